"""listen: notices as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from purgatoryd.cli import units
from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.options import (
    emit,
    json_option,
    key_record,
    key_text,
    name_option,
    namespace_option,
    payload_record,
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
    "--idle", type=float, help="Stop after so many seconds without a notice, with exit code 1."
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
    Gaps are filled from the daemon's outbox; notices that are gone from it end the command
    with their range and exit code 8.
    """
    from purgatoryd.clients import Subscriber

    seen = 0
    with Subscriber(
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
