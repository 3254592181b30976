"""The command topic set."""

from __future__ import annotations

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.completion import topic_names
from purgatoryd.cli.exits import Command, Group
from purgatoryd.cli.options import (
    emit,
    json_option,
    name_option,
    namespace_option,
    timeout_option,
    visible,
)


@click.group("topic", cls=Group)
def topic_command() -> None:
    """Set the slack of the timers of a topic."""


@topic_command.command("set", cls=Command)
@click.argument("topic", shell_complete=topic_names)
@name_option
@namespace_option
@click.option(
    "--within",
    type=units.Duration(),
    required=True,
    help="Slack of new timers that are added without --within; 0s = none.",
)
@timeout_option
@json_option
def set_command(
    topic: str, name: str, namespace: str, within: int, timeout: float, as_json: bool
) -> None:
    """Set the slack of new timers of TOPIC.

    A timer may fire so long after it is due, to share a wake-up with others. Creates the topic if
    it does not exist. Armed timers stay as they are. Only administrators may use this command:
    root, the daemon's own uid and the uids of --admin-uid.

    \b
    purgatoryd topic set orders --within 5ms
    """
    with clients.Admin(name, timeout=timeout) as admin:
        admin.set_topic(topic, within=within / 1e9, namespace=namespace)
    record = {"namespace": namespace, "topic": topic, "within_ns": within}
    emit(record, f"{visible(topic)} has a slack of {units.format_duration(within)}", as_json)
