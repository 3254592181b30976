"""The commands list, stats and check. They read the arena and need no running daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from purgatoryd.cli import units
from purgatoryd.cli.completion import namespace_names
from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.operations import condition_text, operation_record, owner_text
from purgatoryd.cli.options import (
    emit,
    is_wide,
    json_option,
    key_record,
    key_text,
    name_option,
    payload_record,
    time_text,
    visible,
)
from purgatoryd.cli.shards import Named, daemons

if TYPE_CHECKING:
    from purgatoryd.shm_layout.arena import Account, Reader
    from purgatoryd.shm_layout.wire import Info

TIMES = ("complete_to", "newest")
"""Fields with times whose names do not end in _at."""
ANY_WIDTH = 10_000
"""Width in columns for measuring a table; no table is wider."""


@contextmanager
def reading(name: str) -> Iterator[Reader]:
    """Return a context manager for a Reader of the daemon's arena."""
    from purgatoryd.shm_layout.arena import Reader
    from purgatoryd.shm_layout.paths import arena_paths

    reader = Reader.attach(arena_paths(name))
    try:
        yield reader
    finally:
        reader.close()


def infos(reader: Reader) -> Iterator[Info]:
    """Yield all armed timers and operations, in no particular order."""
    from purgatoryd.shm_layout.wire import decode_infos, info_bytes

    for page in reader.scan():
        at = count = 0
        while at < len(page):
            at += info_bytes(page, at)
            count += 1
        yield from decode_infos(page, count)


def now_ns(reader: Reader) -> int:
    """Return the time of the arena's clock, in ns."""
    if reader.stats()["clock"] == "virtual":
        return int(reader.header.now_ns)
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def info_record(info: Info, due_in_ns: int, due_at: str | None) -> dict[str, Any]:
    """Return a timer for JSON. `due_at`: None if the daemon's clock is virtual."""
    from purgatoryd.shm_layout.layout import Status

    record: dict[str, Any] = {
        **key_record(info.key),
        "namespace": info.namespace,
        "topic": info.topic,
        "ticket": info.ticket,
        "deadline_boot_ns": info.deadline_ns,
        "due_in_ns": due_in_ns,
        **({} if due_at is None else {"due_at": due_at}),
        "status": Status(info.status).name,
        **payload_record(info.payload),
    }
    if info.tag is not None:
        record["tag"] = info.tag
    if info.wall_ns is not None:
        record["deadline_at"] = units.format_wall(info.wall_ns)
    if info.operation is not None:
        record["operation"] = operation_record(info.operation)
    return record


def info_text(info: Info, due_in_ns: int, due_at: str | None) -> str:
    """Return a timer as a line of text, with the time `due_at` if the terminal is wide."""
    from purgatoryd.shm_layout.layout import Status

    place = visible(f"{info.namespace}/{info.topic}")
    due = units.format_relative(due_in_ns)
    text = f"{due:<12} {place:<24} {key_text(info.key):<36} {len(info.payload)} bytes"
    if info.operation is not None:
        text += f", {condition_text(info.operation)}, owner {owner_text(info.operation)}"
    text += ", parked" if info.status == Status.PARKED else ""
    return text if due_at is None or not is_wide() else f"{text}, at {due_at}"


@click.command("list", cls=Command)
@name_option
@click.option(
    "-n", "--namespace", shell_complete=namespace_names, help="Only timers of this namespace."
)
@click.option("--prefix", default="", help="Only keys that begin with this text.")
@click.option("--limit", type=units.Whole(1), help="Maximum number of timers.")
@json_option
def list_command(
    name: str, namespace: str | None, prefix: str, limit: int | None, as_json: bool
) -> None:
    """List pending timers and operations, in no particular order.

    A pending timer is armed or parked. Reads the shared memory without contacting the daemon.
    Every listed timer was pending when it was read. Timers that are added, fire or are cancelled
    while the command runs may be missing.
    """
    found = (
        info
        for info in pending(name)
        if namespace in (None, info[0].namespace) and key_text(info[0].key).startswith(prefix)
    )
    for found_timer in islice(found, limit):
        emit(info_record(*found_timer), info_text(*found_timer), as_json)


def pending(name: str) -> Iterator[tuple[Info, int, str | None]]:
    """Yield (timer, ns until it is due, that time in ISO 8601) for the pending timers of the daemon
    or of its shards. Under a virtual clock the time is None."""
    for daemon in daemons(name):
        with reading(daemon.name) as reader:
            virtual = reader.stats()["clock"] == "virtual"
            for info in infos(reader):
                left_ns = info.deadline_ns - now_ns(reader)
                yield info, left_ns, None if virtual else units.wall_in(left_ns)


# Fields with points in time and positions, which only --json shows.
FOR_PROGRAMS = {
    "stream_id", "heartbeat_boot_ns", "loop_iterations", "now_ns", "next_deadline_ns",
    "wall_offset_ns", "next_ticket", "replay_head", "replay_tail", "published", "late_sum_ns",
    "namespaces", "uids", "daemon_since_boot_ns",
}  # fmt: skip


# Fields by section of the table. Fields without a section come last.
SECTIONS = {
    "daemon": (
        "shard", "daemon_state", "arena_state", "degraded_by", "clock", "daemon_pid", "epoch",
        "heartbeat_age_ns", "wakeups", "iterations", "iterations_full",
        "iteration_work", "iteration_budget", "log_dropped",
    ),
    "placement": (
        "placement", "node", "memory_node", "reaper_cpu", "placed", "clamped", "pages_sampled",
        "pages_elsewhere",
    ),
    "timers": (
        "live", "live_wall", "parked", "backlog", "overdue", "next_in_ns", "adds", "replaces",
        "extends", "reschedules", "sweeps", "cancels",
        "cancels_fired", "cancels_unknown", "expiries", "skipped", "coalesced", "parks",
        "unparks", "moved", "unique_keys", "unique_freed",
        "late_mean_ns", "late_p99_ns", "late_max_ns",
    ),
    "purgatory": (
        "operations", "outcomes", "watch_records", "watch_records_max", "watch_keys",
        "watch_keys_max", "watches", "satisfied", "already_true", "expired", "failed",
        "cancelled", "advances", "visits", "checks", "outcomes_repeated",
        "outcomes_dropped",
    ),
    "consumer groups": (
        "jobs", "jobs_born", "jobs_leased", "jobs_acked", "jobs_retried", "jobs_expired",
        "jobs_dead", "jobs_dropped",
    ),
    "notices": ("replay_entries", "replay_bytes", "notices_withdrawn", "messages_sent"),
    "commands": ("batches", "batches_repeated", "records"),
    "refused": (
        "batches_refused", "refused_full", "refused_payload", "refused_names", "refused_busy",
        "refused_keys", "refused_denied", "refused_quota", "refused_exists", "refused_group",
        "refused_stopping", "refused_other",
    ),
    "schedules": ("schedules", "schedules_armed", "occurrences", "refused_schedules"),
    "cursors": ("cursors", "cursor_rows", "cursor_commits", "refused_cursors"),
    "bulk_loads": (
        "bulk_loads", "bulk_load_blocks", "bulk_load_rows", "bulk_load_rows_repeated",
        "refused_bulk_loads", "refused_fenced",
    ),
    "wal": (
        "wal", "wal_error", "committed_lsn", "appended_lsn", "wal_buffer_used_bytes",
        "wal_buffer_bytes",
        "wal_bytes", "syncs", "sync_mean_ns", "refused_wal",
        "records_redone",
    ),
    "sizes": (
        "length", "capacity", "payload_bytes", "blob_bytes", "largest_free_bytes", "compactions",
        "compacted_bytes", "replay_capacity", "replay_bytes_max", "tick_ns", "fanout", "levels",
    ),
}  # fmt: skip


def sections(figures: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield (title, rows) for each section of the table."""
    left = {field: value for field, value in figures.items() if field not in FOR_PROGRAMS}
    for title, fields in SECTIONS.items():
        yield title, [(f, human(f, left.pop(f))) for f in fields if f in left]
    if left:
        yield "more", [(field, human(field, value)) for field, value in left.items()]


def print_figures(figures: dict[str, Any], title: str) -> None:
    """Print a table with a section for each part of the daemon."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for section, rows in sections(figures):
        table.add_row(f"[bold]{section}", "")
        for field, value in rows:
            table.add_row(f"  {field}", value)
        table.add_section()
    Console().print(table)


def human(field: str, value: Any) -> str:
    """Return a figure as text, with the unit that the field name indicates."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    if isinstance(value, str) and (field.endswith("_at") or field in TIMES):
        return time_text(value)
    if isinstance(value, int | float) and field.endswith("_s") and not field.endswith("_per_s"):
        return units.format_duration(round(value * units.NS_PER["s"]))
    if not isinstance(value, int) or field.endswith(("pid", "uid", "node", "cpu")):
        return str(value)
    if field.endswith("_ns"):
        return units.format_duration(value)
    if "bytes" in field or field == "length":
        return units.format_size(value)
    return f"{value:,}"


def collect(reader: Reader) -> dict[str, Any]:
    """Return the statistics of the arena, and figures derived from them."""
    from purgatoryd.shm_layout.arena import NONE_NS
    from purgatoryd.shm_layout.metrics import read_metrics

    figures = reader.stats()
    late = read_metrics(reader).histograms["structural_lateness"]
    heartbeat_ns = figures["heartbeat_boot_ns"]
    armed_ns = figures["next_deadline_ns"]
    return figures | {
        "replay_entries": figures["replay_tail"] - figures["replay_head"],
        "late_sum_ns": late.sum_ns,
        "late_mean_ns": late.mean_ns,
        "late_p99_ns": late.quantile(0.99),
        "late_max_ns": late.max_ns,
        "heartbeat_age_ns": time.clock_gettime_ns(time.CLOCK_BOOTTIME) - heartbeat_ns,
        "next_in_ns": None if armed_ns == NONE_NS else armed_ns - now_ns(reader),
        "namespaces": [
            {"namespace": n.name, "live": n.live, "blob_bytes": n.bytes}
            for n in reader.namespaces_of_users()
        ],
        "uids": [uid_record(account) for account in reader.accounts()],
    }


def uid_record(account: Account) -> dict[str, int]:
    """Return the usage of a uid for JSON."""
    return {
        "uid": account.uid,
        "live": account.live,
        "blob_bytes": account.bytes,
        "topics": account.topics,
        "namespaces": account.namespaces,
        "sessions": account.sessions,
        "watch_keys": account.watch_keys,
        "watches": account.watches,
        "operations": account.operations,
        "bulk_loads": account.bulk_loads,
        "bulk_load_blocks": account.bulk_load_blocks,
    }


def topic_records(reader: Reader) -> Iterator[dict[str, Any]]:
    """Return a record for each topic."""
    names = reader.namespaces()
    for topic in reader.topics():
        yield {
            "namespace": names[topic.namespace_row].name,
            "topic": topic.name,
            "live": topic.live,
            "sequence": topic.sequence,
            "within_ns": topic.slack_ns,
            "late": topic.late_policy.name.lower(),
            "grace_ns": topic.grace_ns,
            "priority": topic.priority,
            "paused": topic.paused,
            "backlog": topic.backlog,
        }


def print_records(rows: list[dict[str, Any]], title: str, as_json: bool) -> None:
    """Print records as a table, or one JSON object per line. Print nothing without records."""
    if as_json:
        for row in rows:
            emit(row, "", as_json)
    elif rows:
        print_table(rows, title)


def daemon_records(
    name: str, records: Callable[[Reader, int], Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the records of a daemon, or of all shards of a deployment. `records` gets the reader
    of an arena, and the current CLOCK_BOOTTIME in ns."""
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    rows = []
    for daemon in daemons(name):
        with reading(daemon.name) as reader:
            rows += [daemon.record | row for row in records(reader, now_ns)]
    return rows


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """Print records as a table. All records have the same fields."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*rows[0], title=title, title_justify="left")
    readable = [
        {field: escape(visible(human(field, value))) for field, value in row.items()}
        for row in rows
    ]
    for row in readable:
        table.add_row(*row.values())
    console = Console(highlight=False)
    width = console.measure(table, options=console.options.update(max_width=ANY_WIDTH)).maximum
    if not console.is_terminal:  # a pipe has no width
        console = Console(width=max(width, console.width), highlight=False)
    if width <= console.width:
        console.print(table)
    else:
        console.print(title, *map(_block, readable), sep="\n\n")


def _block(row: dict[str, str]) -> str:
    """Return a record as text with a line for each field."""
    widest = max(map(len, row))
    return "\n".join(f"{field:<{widest}}  {value}" for field, value in row.items())


@click.command("stats", cls=Command)
@name_option
@click.option("--topics", is_flag=True, help="Print a line for each topic instead of the counters.")
@json_option
def stats_command(name: str, topics: bool, as_json: bool) -> None:
    """Show the daemon's counters, sizes and state.

    Reads the shared memory without contacting the daemon. `replay_capacity` is the number of
    notices that a subscriber may fall behind. While a notice is in the replay buffer, cancelling
    its key answers FIRED.
    """
    for daemon in daemons(name):
        show_stats(daemon, topics, as_json)


def show_stats(daemon: Named, topics: bool, as_json: bool) -> None:
    """Print the figures of one daemon."""
    with reading(daemon.name) as reader:
        figures = daemon.record | collect(reader)
        rows = [daemon.record | row for row in topic_records(reader)]
    if as_json:
        for record in rows if topics else [figures]:
            emit(record, "", as_json)
    elif topics and rows:
        print_table(rows, "topics")
    elif not topics:
        print_figures(figures, daemon.name)
        for table in ("namespaces", "uids"):
            if figures[table]:
                print_table(figures[table], table)


@click.command("check", cls=Command)
@name_option
@json_option
def check_command(name: str, as_json: bool) -> int:
    """Check the arena's invariants; exit code 5 if one is broken.

    Reads the shared memory without contacting the daemon, and checks the invariants that hold while
    the daemon works. The error names the first broken invariant, its place and both values.
    """
    for daemon in daemons(name):
        with reading(daemon.name) as reader:
            reader.check()
        emit(daemon.record | {"check": "clean"}, f"daemon {daemon.name}: clean", as_json)
    return Exit.DONE
