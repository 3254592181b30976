"""The commands topic set, pause and resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

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

if TYPE_CHECKING:
    from purgatoryd.clients.times import Late

LATE = ("fire", "skip", "coalesce")


@click.group("topic", cls=Group)
def topic_command() -> None:
    """Set slack, late policy and priority of the timers of a topic."""


@topic_command.command("set", cls=Command)
@click.argument("topic", shell_complete=topic_names)
@name_option
@namespace_option
@click.option(
    "--within",
    type=units.Duration(),
    help="Slack of new timers that are added without --within; 0s = none.",
)
@click.option("--late", type=click.Choice(LATE), help="End of a timer that is late beyond --grace.")
@click.option("--grace", type=units.Duration(), help="Lateness from which --late applies.")
@click.option(
    "--priority",
    type=units.Whole(0, 9),
    help="Priority of jobs whose timers give none; 9 is the most urgent one.",
)
@timeout_option
@json_option
def set_command(
    topic: str,
    name: str,
    namespace: str,
    within: int | None,
    late: str | None,
    grace: int | None,
    priority: int | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Change the given settings of TOPIC.

    With a slack, a timer may fire so long after it is due, to share a wake-up with others. Armed
    timers keep their slack. The late policy applies to armed timers as well. With --late skip, a
    timer that would fire more than --grace after its deadline ends without a notice. With
    coalesce, only the last of successive such timers fires. The priority applies to the jobs of
    consumer groups that begin from here on.

    Creates the topic if it does not exist. Only administrators may use this command: root, the
    daemon's own uid and the uids of --admin-uid.

    \b
    purgatoryd topic set orders --within 5ms
    purgatoryd topic set reminders --late skip --grace 10m
    """
    with clients.Admin(name, timeout=timeout) as admin:
        admin.set_topic(
            topic,
            within=None if within is None else within / 1e9,
            late=_late(late, grace),
            priority=priority,
            namespace=namespace,
        )
    given = {"within_ns": within, "late": late, "grace_ns": grace, "priority": priority}
    changed = {field: value for field, value in given.items() if value is not None}
    text = ", ".join(
        f"{field.removesuffix('_ns')} {_shown(field, v)}" for field, v in changed.items()
    )
    record = {"namespace": namespace, "topic": topic, **changed}
    emit(record, f"{visible(topic)}: {text or 'exists'}", as_json)


def _late(late: str | None, grace: int | None) -> Late | None:
    """Return the late policy of the options."""
    if grace is None:
        if late in (None, "fire"):
            return cast("Late | None", late)
        raise click.UsageError(f"--late {late} needs --grace.")
    if late in (None, "fire"):
        raise click.UsageError("--grace needs --late skip or --late coalesce.")
    return cast("Late", (late, grace / 1e9))


def _shown(field: str, value: Any) -> str:
    return units.format_duration(value) if field.endswith("_ns") else str(value)


_topics = click.argument("topics", nargs=-1, metavar="TOPIC...")


@click.command("pause", cls=Command)
@_topics
@click.option("--all", "whole", is_flag=True, help="Pause the whole namespace.")
@name_option
@namespace_option
@timeout_option
@json_option
def pause_command(
    topics: tuple[str, ...], whole: bool, name: str, namespace: str, timeout: float, as_json: bool
) -> None:
    """Let the timers of each TOPIC fall due without firing.

    They stay armed until `purgatoryd resume`, also after a restart of the daemon, and can be
    cancelled. `purgatoryd stats` shows paused topics and their due timers. Operations are not
    paused. Creates topics that do not exist. Only administrators may use this command.

    \b
    purgatoryd pause orders invoices
    purgatoryd pause --all --namespace shop
    """
    set_paused(topics, whole, name, namespace, timeout, as_json, paused=True)


@click.command("resume", cls=Command)
@_topics
@click.option("--all", "whole", is_flag=True, help="Resume the whole namespace.")
@name_option
@namespace_option
@timeout_option
@json_option
def resume_command(
    topics: tuple[str, ...], whole: bool, name: str, namespace: str, timeout: float, as_json: bool
) -> None:
    """Let the timers of each paused TOPIC fire again.

    Due timers then end as the late policy of the topic says, at the rate that `purgatoryd
    namespace set --late-per-second` gives. A topic that was paused by name stays paused after
    --all. Only administrators may use this command.

    \b
    purgatoryd resume orders invoices
    purgatoryd resume --all --namespace shop
    """
    set_paused(topics, whole, name, namespace, timeout, as_json, paused=False)


def set_paused(
    topics: tuple[str, ...],
    whole: bool,
    name: str,
    namespace: str,
    timeout: float,
    as_json: bool,
    *,
    paused: bool,
) -> None:
    """Pause or resume topics, or a whole namespace, and print what was done."""
    if whole == bool(topics):
        raise click.UsageError("Give one or more topics, or --all for the whole namespace.")
    done = "paused" if paused else "resumed"
    with clients.Admin(name, timeout=timeout) as admin:
        for topic in topics:
            admin.set_topic(topic, paused=paused, namespace=namespace)
            record = {"namespace": namespace, "topic": topic, "paused": paused}
            emit(record, f"{done} {visible(f'{namespace}/{topic}')}", as_json)
        if whole:
            admin.set_namespace(namespace, paused=paused)
            record = {"namespace": namespace, "topic": None, "paused": paused}
            emit(record, f"{done} all topics of {visible(namespace)}", as_json)
