"""The commands schedules put, ls, show, rm, trigger, pause, resume, backfill and next."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from itertools import starmap
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.arena import human, print_table
from purgatoryd.cli.exits import Command, Exit, Group
from purgatoryd.cli.options import (
    emit,
    json_option,
    name_option,
    namespace_option,
    payload_record,
    timeout_option,
    visible,
)

if TYPE_CHECKING:
    from purgatoryd.clients import Client, Schedule
    from purgatoryd.clients.schedules import OverlapRule

key_argument = click.argument("key")


def spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say when a schedule has its occurrences."""
    for option in reversed(
        (
            click.option("--every", type=units.Duration(), help="Time between occurrences: 30s."),
            click.option("--cron", help="Five fields, or @hourly, @daily, @weekly, @monthly."),
            click.option(
                "--tz", help="Time zone of --cron, such as Europe/Berlin.  [default: UTC]"
            ),
            click.option("--until", type=units.Moment(), help="Latest time of an occurrence."),
        )
    ):
        command = option(command)
    return command


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else units.format_moment(moment)


def schedule_record(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule for JSON."""
    every = schedule.every
    return {
        "key": schedule.key,
        "namespace": schedule.namespace,
        "topic": schedule.topic,
        "tag": schedule.tag,
        "priority": schedule.priority,
        "every_ns": None if every is None else round(every.total_seconds() * 1e6) * 1000,
        "cron": schedule.cron,
        "tz": schedule.tz,
        "count": schedule.count,
        "until": _moment(schedule.until),
        "jitter_ns": round(schedule.jitter.total_seconds() * 1e6) * 1000,
        "overlap": schedule.overlap,
        "revision": schedule.revision,
        "occurrences": schedule.occurrences,
        "open_jobs": schedule.open_jobs,
        "paused": schedule.paused,
        "next": _moment(schedule.next),
        "deadline": _moment(schedule.deadline),
        "previous": _moment(schedule.previous),
        "put_at": _moment(schedule.put_at),
        "owner_uid": schedule.owner_uid,
        **payload_record(schedule.payload),
    }


def _spec_text(schedule: Schedule) -> str:
    if schedule.every is None:
        return f"{schedule.cron} {schedule.tz}"
    return f"every {units.format_duration(round(schedule.every.total_seconds() * 1e9))}"


def _next_text(schedule: Schedule) -> str:
    waits = schedule.overlap == "delay" and schedule.open_jobs != 0
    if schedule.paused:
        return "paused"
    if schedule.next is not None:
        return f"next {units.format_moment(schedule.next)}"
    return f"waits for {schedule.open_jobs} jobs" if waits else "ended"


def _show(schedule: Schedule, did: str, *, as_json: bool) -> None:
    text = (
        f"{did} {visible(schedule.key)}, revision {schedule.revision}, "
        f"{_spec_text(schedule)}, {_next_text(schedule)}"
    )
    emit(schedule_record(schedule), text, as_json)


def _client(name: str, namespace: str, timeout: float) -> Client:
    return clients.Client(name, namespace=namespace, timeout=timeout)


@click.group("schedules", cls=Group)
def schedules_command() -> None:
    """Put, show and run schedules, which arm timer after timer."""


@schedules_command.command("put", cls=Command)
@key_argument
@name_option
@namespace_option
@spec_options
@click.option("--count", type=click.IntRange(1), help="Number of occurrences.")
@click.option(
    "--jitter", type=units.Duration(), default="0s", show_default=True,
    help="An occurrence is up to this late, and before the next one.",
)  # fmt: skip
@click.option(
    "--overlap", type=click.Choice(["allow", "skip", "queue", "delay"]), default="allow",
    show_default=True,
    help="An occurrence while jobs of earlier ones are open: fire it, skip it, let it wait, or"
    " begin --every when they end.",
)  # fmt: skip
@click.option("-t", "--topic", default="default", show_default=True, help="Topic of the notices.")
@click.option("--tag", help="Tag of the occurrences, for `timers` commands: up to 63 bytes.")
@click.option(
    "--priority", type=units.Whole(0, 9),
    help="Priority of the jobs of the occurrences, 9 first.  [default: that of the topic]",
)  # fmt: skip
@click.option("-p", "--payload", default="", help="Payload of the notices, as text.")
@click.option("--payload-file", type=click.File("rb"), help="File with the payload; - is stdin.")
@timeout_option
@json_option
def put_command(
    key: str, name: str, namespace: str, every: int | None, cron: str | None, tz: str | None,
    until: datetime | None, count: int | None, jitter: int, overlap: OverlapRule, topic: str,
    tag: str | None, priority: int | None, payload: str, payload_file: BinaryIO | None,
    timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Add the schedule KEY, or change it if it has other settings.

    Each occurrence is a timer whose key is KEY, "@" and its nominal time in ns since 1970.

    \b
    purgatoryd schedules put report --cron '0 9 * * 1-5' --topic reports
    """
    if (every is None) == (cron is None):
        raise click.UsageError("Give either --every or --cron.")
    if payload and payload_file:
        raise click.UsageError("Give either --payload or --payload-file.")
    content = payload_file.read() if payload_file else payload.encode()
    with _client(name, namespace, timeout) as client:
        schedule = client.put_schedule(
            key, every=None if every is None else every / 1e9, cron=cron, tz=tz, topic=topic,
            payload=content, count=count, until=until, jitter=jitter / 1e9,
            overlap=overlap, tag=tag, priority=priority,
        )  # fmt: skip
    _show(schedule, "put", as_json=as_json)


@schedules_command.command("ls", cls=Command)
@name_option
@namespace_option
@timeout_option
@json_option
def ls_command(name: str, namespace: str, timeout: float, as_json: bool) -> None:
    """List the schedules of the namespace."""
    with _client(name, namespace, timeout) as client:
        found = client.schedules()
    rows = [
        {
            "key": one.key, "topic": one.topic, "spec": _spec_text(one), "revision": one.revision,
            "occurrences": one.occurrences, "state": _next_text(one),
        }
        for one in found
    ]  # fmt: skip
    if not as_json and rows:
        print_table(rows, name)
    for one in found if as_json else []:
        emit(schedule_record(one), "", as_json)


@schedules_command.command("show", cls=Command)
@key_argument
@name_option
@namespace_option
@timeout_option
@json_option
def show_command(key: str, name: str, namespace: str, timeout: float, as_json: bool) -> int:
    """Show the schedule KEY. Exit code 1 means that there is no such schedule."""
    with _client(name, namespace, timeout) as client:
        schedule = client.get_schedule(key)
    if schedule is None:
        emit({"key": key, "result": "UNKNOWN"}, f"unknown {visible(key)}", as_json)
        return Exit.NEGATIVE
    record = schedule_record(schedule)
    emit(record, "\n".join(starmap(_line, record.items())), as_json)
    return Exit.DONE


def _line(field: str, value: Any) -> str:
    """Return a field of a schedule as a line of text."""
    if field.endswith("_ns"):
        return f"{field.removesuffix('_ns'):<12}{human(field, value)}"
    return f"{field:<12}{visible(str(value))}"


@schedules_command.command("rm", cls=Command)
@key_argument
@name_option
@namespace_option
@timeout_option
@json_option
def rm_command(key: str, name: str, namespace: str, timeout: float, as_json: bool) -> int:
    """Remove the schedule KEY and its armed occurrence. Exit code 1 means that there is no such
    schedule."""
    with _client(name, namespace, timeout) as client:
        result = "removed" if client.delete_schedule(key) else "unknown"
    emit({"key": key, "result": result.upper()}, f"{result} {visible(key)}", as_json)
    return Exit.DONE if result == "removed" else Exit.NEGATIVE


@schedules_command.command("pause", cls=Command)
@key_argument
@name_option
@namespace_option
@timeout_option
@json_option
def pause_command(key: str, name: str, namespace: str, timeout: float, as_json: bool) -> None:
    """Take the armed occurrence of KEY back and arm no other.

    Occurrences during the pause do not happen; `schedules backfill` makes up for them.
    """
    with _client(name, namespace, timeout) as client:
        _show(client.pause_schedule(key), "paused", as_json=as_json)


@schedules_command.command("resume", cls=Command)
@key_argument
@name_option
@namespace_option
@timeout_option
@json_option
def resume_command(key: str, name: str, namespace: str, timeout: float, as_json: bool) -> None:
    """Go on with the first occurrence of KEY after the current time."""
    with _client(name, namespace, timeout) as client:
        _show(client.resume_schedule(key), "resumed", as_json=as_json)


@schedules_command.command("trigger", cls=Command)
@key_argument
@name_option
@namespace_option
@click.option("--at", type=units.Moment(), help="Nominal time.  [default: the current time]")
@timeout_option
@json_option
def trigger_command(
    key: str, name: str, namespace: str, at: datetime | None, timeout: float, as_json: bool
) -> None:
    """Fire an additional occurrence of KEY at once."""
    with _client(name, namespace, timeout) as client:
        ticket = client.trigger_schedule(key, at)
    emit({"key": key, "ticket": ticket}, f"triggered {visible(key)}, ticket {ticket}", as_json)


@schedules_command.command("backfill", cls=Command)
@key_argument
@click.argument("start", type=units.Moment())
@click.argument("end", type=units.Moment())
@name_option
@namespace_option
@click.option("--repeat", is_flag=True, help="Also fire the occurrences that have fired.")
@timeout_option
@json_option
def backfill_command(
    key: str, start: datetime, end: datetime, name: str, namespace: str, repeat: bool,
    timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Fire at once what KEY missed from START to END.

    These occurrences have not fired: those from before the put, those during a pause, and skipped
    ones. Armed occurrences are left out, even with --repeat.
    """
    with _client(name, namespace, timeout) as client:
        result = client.backfill_schedule(key, start, end, repeat=repeat)
    text = f"armed {result.armed} of {len(result.nominal)} occurrences of {visible(key)}"
    nominal = [units.format_moment(moment) for moment in result.nominal]
    emit({"key": key, "armed": result.armed, "nominal": nominal}, text, as_json)


@schedules_command.command("next", cls=Command)
@click.argument("key", required=False)
@name_option
@namespace_option
@spec_options
@click.option(
    "--count", type=click.IntRange(1, 256), default=5, show_default=True, help="Number of times."
)
@timeout_option
@json_option
def next_command(
    key: str | None, name: str, namespace: str, every: int | None, cron: str | None,
    tz: str | None, until: datetime | None, count: int, timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Show the next nominal times of the schedule KEY.

    --cron or --every shows those of a schedule that does not exist. The daemon computes them, so
    they follow the time zones of its host.
    """
    given = (key is not None) + (every is not None) + (cron is not None)
    if given != 1:
        raise click.UsageError("Give one of KEY, --every and --cron.")
    with _client(name, namespace, timeout) as client:
        found = client.preview_schedule(
            key, count, every=None if every is None else every / 1e9, cron=cron, tz=tz, until=until
        )
    for moment in found:
        text = units.format_moment(moment)
        emit({"nominal": text}, text, as_json)
