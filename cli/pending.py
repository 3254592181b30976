"""The commands timers ls, count, cancel, reschedule, purge, sweeps, stop, export and import."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.bulk_loads import BulkLoadId
from purgatoryd.cli.exits import Command, Exit, Group
from purgatoryd.cli.options import (
    agreed,
    emit,
    json_option,
    key_text,
    name_option,
    namespace_option,
    read_key,
    time_text,
    timeout_option,
    visible,
)
from purgatoryd.cli.timers import due_record, timer_record
from purgatoryd.shm_layout.host import HOST

if TYPE_CHECKING:
    from purgatoryd.clients import Client, SweepStatus, TimerInfo

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
OWN_FIELDS = ("tag", "priority", "order_hash", "late", "grace_ns", "unique_until_boot_ns")
"""Fields of an exported timer that few timers have."""
PAGE = 10_000
"""Number of timers that one page of an export has."""


@click.group("timers", cls=Group)
def timers_command() -> None:
    """List, change, export and import pending timers."""


def selection_options(function: Decorated) -> Decorated:
    """Add the options that select timers."""
    for option in reversed(
        (
            click.option("--prefix", help="Only keys that begin with this."),
            click.option(
                "--key-type",
                type=click.Choice(["str", "hex"]),
                default="str",
                show_default=True,
                help="Type of --prefix: text, or bytes in hexadecimal.",
            ),
            click.option("-t", "--topic", help="Only timers of this topic."),
            click.option("--tag", help="Only timers with this tag."),
            click.option(
                "--due-from", type=units.Moment(), help="Only timers due at or after this."
            ),
            click.option("--due-before", type=units.Moment(), help="Only timers due before this."),
        )
    ):
        function = option(function)
    return function


def selection_of(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options that select timers out of all options. Return the selection."""
    prefix, key_type = options.pop("prefix"), options.pop("key_type")
    found = {name: options.pop(name) for name in ("topic", "tag", "due_from", "due_before")}
    found["prefix"] = None if prefix is None else read_key(prefix, key_type)
    return {name: value for name, value in found.items() if value is not None}


def opened(options: dict[str, Any]) -> Client:
    """Return a client for the options --name, --namespace and --timeout, and remove them."""
    name, namespace = options.pop("name"), options.pop("namespace")
    return clients.Client(name, namespace=namespace, timeout=options.pop("timeout"))


def client_options(function: Decorated) -> Decorated:
    """Add --name, --namespace, --timeout and --json."""
    for option in (json_option, timeout_option, namespace_option, name_option):
        function = option(function)
    return function


# ---- list and count ----------------------------------------------------------------------------


def timer_line(timer: TimerInfo, virtual: bool) -> str:
    """Return a timer as a line of text."""
    left_ns = timer.deadline_boot_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    due = time_text(units.format_wall(time.time_ns() + left_ns))
    if timer.deadline_at is not None:
        due = time_text(units.format_moment(timer.deadline_at))
    elif virtual:
        due = f"at {timer.deadline_boot_ns} ns"
    tag = "" if timer.tag is None else f", tag {visible(timer.tag)}"
    parked = ", parked" if timer.status is clients.Status.PARKED else ""
    return f"{due:<52} {visible(timer.topic):<16} {key_text(timer.key)}{tag}{parked}"


@timers_command.command("ls", cls=Command)
@client_options
@selection_options
@click.option(
    "--limit", type=units.Whole(1), default=100, show_default=True, help="Maximum number of timers."
)
@click.option("--cursor", help="Continue behind the page that printed this cursor.")
def ls_command(as_json: bool, limit: int, cursor: str | None, **options: Any) -> None:
    """List pending timers by deadline.

    If there are more, the last line has a cursor for the next page. Timers that are added after
    the first page are not in later pages.
    """
    selection = selection_of(options)
    with opened(options) as client:
        page = client.list_timers(limit=limit, cursor=cursor, **selection)
        virtual = client.virtual
    for timer in page:
        record = timer_record(timer) | ({} if virtual else due_record(timer, as_json))
        emit(record, timer_line(timer, virtual), as_json)
    if page.cursor is not None:
        emit({"cursor": page.cursor}, f"more: --cursor {page.cursor}", as_json)


@timers_command.command("count", cls=Command)
@client_options
@selection_options
def count_command(as_json: bool, **options: Any) -> None:
    """Count pending timers."""
    selection = selection_of(options)
    with opened(options) as client:
        total = client.count_timers(**selection)
    emit({"timers": total}, f"{total} timers", as_json)


# ---- sweeps ------------------------------------------------------------------------------------


def sweep_record(status: SweepStatus) -> dict[str, Any]:
    """Return a sweep for JSON."""
    record = {
        "sweep": status.id.hex(),
        "state": status.state.name.lower(),
        "change": None if status.change is None else status.change.name.lower(),
        "done": status.done,
        "fraction": round(status.fraction, 4),
        "uid": status.uid,
        "namespace": status.namespace,
    }
    selected = {"topic": status.topic, "tag": status.tag}
    if status.prefix is not None:
        selected["prefix"] = key_text(status.prefix)
    return record | {name: value for name, value in selected.items() if value is not None}


def show(status: SweepStatus, as_json: bool, dry_run: bool = False) -> int:
    """Print a sweep. Return the exit code."""
    state, done = status.state.name.lower(), status.done
    change = "" if status.change is None else f" {status.change.name.lower()}"
    text = f"{state} {done} timers,{change} sweep {status.id.hex()}"
    if dry_run:
        emit({"timers": done, "dry_run": True}, f"would change {done} timers", as_json)
        return Exit.DONE
    emit(sweep_record(status), text, as_json)
    unfinished = (clients.SweepState.CUT, clients.SweepState.NONE)
    return Exit.NEGATIVE if status.state in unfinished else Exit.DONE


def sweep_options(function: Decorated) -> Decorated:
    """Add --id, --dry-run and --no-wait."""
    for option in (
        click.option("--no-wait", is_flag=True, help="Return once the sweep has begun."),
        click.option("--dry-run", is_flag=True, help="Only count the timers."),
        click.option(
            "--id",
            "sweep_id",
            type=BulkLoadId(),
            help="Id of the sweep: 32 hex digits. An id that was used shows its sweep.",
        ),
    ):
        function = option(function)
    return function


@timers_command.command("cancel", cls=Command)
@client_options
@selection_options
@sweep_options
def cancel_command(
    as_json: bool, no_wait: bool, dry_run: bool, sweep_id: bytes | None, **options: Any
) -> int:
    """Cancel the selected pending timers.

    The daemon cancels them in steps, also if this command is interrupted; `timers stop` stops it.
    To cancel all timers of a namespace, use `timers purge`.
    """
    selection = selection_of(options)
    if not selection:
        raise click.UsageError("Select timers, or use `purgatoryd timers purge`.")
    with opened(options) as client:
        status = client.cancel_where(
            sweep_id=sweep_id, dry_run=dry_run, wait=not no_wait, **selection
        )
    return show(status, as_json, dry_run)


@timers_command.command("reschedule", cls=Command)
@client_options
@selection_options
@sweep_options
@click.option("--shift", type=units.Shift(), help="Move each deadline: 10m is later, -10m earlier.")
@click.option("--delay", type=units.Duration(), help="New deadline of all: time from now.")
@click.option("--deadline", type=units.Moment(), help="New deadline of all: a wall time.")
def reschedule_command(
    as_json: bool,
    no_wait: bool,
    dry_run: bool,
    sweep_id: bytes | None,
    shift: int | None,
    delay: int | None,
    deadline: datetime | None,
    **options: Any,
) -> int:
    """Move the selected pending timers.

    Key, payload and tag stay.
    """
    if (shift is None) + (delay is None) + (deadline is None) != 2:
        raise click.UsageError("Give one of --shift, --delay and --deadline.")
    selection = selection_of(options)
    with opened(options) as client:
        status = client.reschedule_where(
            shift=None if shift is None else shift / 1e9,
            delay=None if delay is None else delay / 1e9,
            deadline=deadline,
            sweep_id=sweep_id,
            dry_run=dry_run,
            wait=not no_wait,
            **selection,
        )
    return show(status, as_json, dry_run)


@timers_command.command("purge", cls=Command)
@client_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only count the timers.")
def purge_command(as_json: bool, yes: bool, dry_run: bool, **options: Any) -> int:
    """Cancel all timers of a namespace.

    The command asks first. The daemon logs the sweep with the uid that began it, and `timers
    sweeps` shows it.
    """
    target = f"namespace {visible(options['namespace'])} of daemon {visible(options['name'])}"
    with opened(options) as client:
        total = client.count_timers()
        if dry_run:
            return show(client.cancel_where(dry_run=True), as_json, dry_run=True)
        if not (yes or agreed("timers purge", f"Cancel all {total} timers of {target}?")):
            return Exit.NEGATIVE
        status = client.cancel_where()
    return show(status, as_json)


@timers_command.command("sweeps", cls=Command)
@client_options
def sweeps_command(as_json: bool, **options: Any) -> None:
    """Show the last changes of many timers."""
    with opened(options) as client:
        for status in client.sweeps():
            change = "" if status.change is None else status.change.name.lower()
            text = f"{status.id.hex()} {change:<6} {status.state.name.lower():<8} {status.done} "
            text += f"timers of {visible(status.namespace)}, uid {status.uid}"
            emit(sweep_record(status), text, as_json)


@timers_command.command("stop", cls=Command)
@click.argument("sweep_id", metavar="ID", type=BulkLoadId())
@client_options
def stop_command(sweep_id: bytes, as_json: bool, **options: Any) -> int:
    """Stop a running sweep.

    Timers that it has changed stay changed.
    """
    with opened(options) as client:
        status = client.stop_sweep(sweep_id)
    return show(status, as_json)


# ---- export and import -------------------------------------------------------------------------


def wall_offset_ns() -> int:
    """Return the wall clock minus CLOCK_BOOTTIME, in ns."""
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def export_record(timer: TimerInfo, offset_ns: int | None) -> dict[str, Any]:
    """Return a timer for a file. `offset_ns`: wall clock minus the daemon's clock; None = the
    daemon has a virtual clock."""
    record = timer_record(timer)
    names = ("key", "key_type", "topic", "within_ns", "deadline_boot_ns", "deadline_at")
    row = {name: record[name] for name in names if name in record}
    row |= {name: value for name, value in record.items() if name.startswith("payload")}
    row |= {name: record[name] for name in OWN_FIELDS if name in record}
    if offset_ns is not None:
        row["deadline_ns"] = timer.deadline_boot_ns + offset_ns
        if timer.unique_until_boot_ns is not None:
            row["unique_until_ns"] = timer.unique_until_boot_ns + offset_ns
    return row


def pages(client: Client, selection: dict[str, Any]) -> Iterator[TimerInfo]:
    """Yield all timers of a selection, with payloads."""
    cursor: str | None = None
    while True:
        page = client.list_timers(limit=PAGE, cursor=cursor, payloads=True, **selection)
        yield from page
        cursor = page.cursor
        if cursor is None:
            return


@timers_command.command("export", cls=Command)
@click.argument("path", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@client_options
@selection_options
def export_command(path: Path, as_json: bool, **options: Any) -> int:
    """Write pending timers to FILE.

    They are in the order of their deadlines. The format is Parquet if FILE ends in .parquet, which
    needs pyarrow, else JSON lines. Each timer has key, topic, tag, priority, hash of the order key,
    late policy, slack, payload and deadline, and the time until which its key is unique. Parked
    timers are left out, because only the WAL has their payloads: the command counts them, and its
    exit code is 1. Keys that stay unique after their timers have ended are left out as well.
    """
    selection = selection_of(options)
    with opened(options) as client:
        offset_ns = None if client.virtual else wall_offset_ns()
        parked = 0
        rows = []
        for timer in pages(client, selection):
            if timer.status is clients.Status.PARKED:
                parked += 1
            else:
                rows.append(export_record(timer, offset_ns))
    written(path, rows)
    text = f"exported {len(rows)} timers" + (f", left out {parked} parked ones" if parked else "")
    emit({"timers": len(rows), "parked": parked}, text, as_json)
    return Exit.NEGATIVE if parked else Exit.DONE


def written(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows to a file, which appears as a whole."""
    from purgatoryd.cli.timer_files import write_rows

    part = path.with_name(f"{path.name}.part")
    write_rows(part, rows, parquet=path.suffix == ".parquet")
    os.replace(part, path)


@timers_command.command("import", cls=Command)
@click.argument(
    "path", metavar="FILE", type=click.Path(dir_okay=False, exists=True, path_type=Path)
)
@client_options
@click.option(
    "--bulk-load",
    type=BulkLoadId(),
    help="Id of the bulk load: 32 hex digits.  [default: from the content of FILE]",
)
@click.option(
    "--mode",
    type=click.Choice(["error", "replace", "keep"]),
    default="error",
    show_default=True,
    help="If a key is armed: refuse the row, replace the timer, or keep it.",
)
def import_command(
    path: Path, as_json: bool, bulk_load: bytes | None, mode: Any, **options: Any
) -> int:
    """Add the timers of an exported FILE.

    Each row takes effect once: after an interruption, the same command adds the rest. Timers keep
    deadlines, tags, priorities, order keys, late policies and slack, and their keys stay unique for
    the rest of their time. A deadline that has passed is due at once. Exit code 1 means that rows
    were refused.

    The namespace must have one partition, as for every bulk load. FILE has only the hashes of order
    keys, and the partition of a timer cannot be computed from a hash.
    """
    from purgatoryd.cli.timer_files import read_rows

    content = path.read_bytes()
    chosen = (
        bulk_load or hashlib.sha256(options["namespace"].encode() + b"\0" + content).digest()[:16]
    )
    with opened(options) as client:
        offset_ns = None if client.virtual else wall_offset_ns()
        # Only a page of timers has the time of a virtual clock.
        now_boot_ns = client.list_timers(limit=1).now_boot_ns if client.virtual else HOST.boot_ns()
        rows = read_rows(path, offset_ns, now_boot_ns)
        counts: dict[str, int] = {}
        for first in range(0, len(rows), PAGE):
            result = client.add_many(
                rows[first : first + PAGE],
                mode=mode,
                bulk_load=clients.BulkLoad(chosen, first_row=first),
            )
            for status in result.statuses:
                counts[status.name.lower()] = counts.get(status.name.lower(), 0) + 1
    text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no timers"
    emit({"bulk_load": chosen.hex(), **counts}, f"{text}, bulk load {chosen.hex()}", as_json)
    good = {"added", "replaced", "kept", "parked", "bulk_loaded"}
    return Exit.DONE if counts.keys() <= good else Exit.NEGATIVE
