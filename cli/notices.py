"""listen and publish: notices as they come, and one without a timer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.options import (
    emit,
    json_option,
    key_record,
    key_text,
    key_type_option,
    name_option,
    namespace_option,
    payload_record,
    read_key,
    timeout_option,
    visible,
)

if TYPE_CHECKING:
    from purgatoryd.clients import Notice


def notice_record(notice: Notice) -> dict[str, Any]:
    """A notice in JSON."""
    return {
        **key_record(notice.key),
        "namespace": notice.namespace,
        "topic": notice.topic,
        "seq": notice.seq,
        "ticket": notice.ticket,
        "cause": notice.cause.name,
        "deadline_boot_ns": notice.deadline_boot_ns,
        "fired_boot_ns": notice.fired_boot_ns,
        "fired_at": units.format_moment(notice.fired_at),
        "lateness_ns": notice.lateness_ns,
        **payload_record(notice.payload),
    }


def notice_text(notice: Notice) -> str:
    """A notice for people, on one line."""
    late = units.format_duration(notice.lateness_ns)
    payload = visible(notice.payload.decode(errors="backslashreplace"))
    head = f"{units.format_moment(notice.fired_at)} {visible(notice.topic)} #{notice.seq}"
    return f"{head} {notice.cause.name.lower()} {key_text(notice.key)} ({late} late) {payload}"


@click.command("listen", cls=Command)
@name_option
@namespace_option
@click.option("-t", "--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option("--count", type=click.IntRange(1), help="Stop after so many notices.")
@click.option(
    "--idle",
    type=click.FloatRange(min=0),
    help="Stop after so many seconds without a notice, with exit code 1.",
)
@timeout_option
@json_option
def listen_command(
    name: str,
    namespace: str,
    topics: tuple[str, ...],
    count: int | None,
    idle: float | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Print the notices of a namespace, one per line, as timers fire.

    Says "listening" on stderr once everything that fires from then on will be printed.
    Gaps are filled from the daemon's replay buffer; notices that are gone from it end the command
    with their range and exit code 8.
    """
    seen = 0
    with clients.Subscriber(
        name, namespace=namespace, topics=topics or None, timeout=timeout
    ) as subscriber:
        click.echo("listening", err=True)
        while count is None or seen < count:
            notice = subscriber.get(timeout=idle)
            if notice is None:
                return Exit.NEGATIVE
            emit(notice_record(notice), notice_text(notice), as_json)
            seen += 1
    return Exit.DONE


@click.command("publish", cls=Command)
@click.argument("key")
@name_option
@namespace_option
@click.option("-t", "--topic", default="default", show_default=True, help="Topic of the notice.")
@click.option("-p", "--payload", default="", help="Text that the notice carries.")
@click.option("--payload-file", type=click.File("rb"), help="The same from a file; - is stdin.")
@key_type_option
@timeout_option
@json_option
def publish_command(
    key: str, name: str, namespace: str, topic: str, payload: str, payload_file: BinaryIO | None,
    key_type: str, timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Publish one notice to a topic at once, with KEY and without a timer.

    Everybody who listens to the topic receives it, those who were away too, as they receive those
    of timers; its cause is "published". For administrators. Names that begin with _ are for this
    command alone: findings about the daemon go to namespace _purgatoryd, topic _events.

    \b
    purgatoryd publish node-7 -n _purgatoryd -t _events -p '{"finding": "slow"}'
    """
    if payload and payload_file:
        raise click.UsageError("Give either --payload or --payload-file.")
    content = payload_file.read() if payload_file else payload.encode()
    wanted = read_key(key, key_type)
    with clients.Admin(name, timeout=timeout) as admin:
        ticket = admin.publish(topic, wanted, content, namespace=namespace)
    record = {**key_record(wanted), "namespace": namespace, "topic": topic, "ticket": ticket}
    emit(record, f"published {key_text(wanted)}, ticket {ticket}", as_json)
