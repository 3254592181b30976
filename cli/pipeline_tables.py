"""The commands of pipeline that build and query the tables: ingest, rebuild, trace, slow, ..."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from purgatoryd.cli import units
from purgatoryd.cli.arena import print_records
from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.following import follow as repeat
from purgatoryd.cli.options import (
    emit,
    json_option,
    key_type_option,
    namespace_option,
    read_key,
)
from purgatoryd.cli.pipeline import lake_option, spark_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from purgatoryd.pipeline.lake import Lake
    from purgatoryd.pipeline.trace import Lifecycle


def opened(lake: Path, master: str | None, conf: dict[str, str]) -> tuple[SparkSession, Lake]:
    """Return (Spark session, lake). The session ends with the process."""
    from purgatoryd.pipeline.lake import Lake
    from purgatoryd.pipeline.session import session

    place = Lake(lake)
    return session(master, conf), place


def on_tables(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --lake, the Spark options and --json.

    The command receives the parameters `spark`, `place` (the lake) and `as_json`.
    """

    @wraps(command)
    def run(lake: Path, master: str | None, conf: dict[str, str], **rest: Any) -> Any:
        spark, place = opened(lake, master, conf)
        return command(spark, place, **rest)

    return lake_option(spark_options(json_option(run)))


def tell(made: dict[str, int], as_json: bool) -> None:
    """Print how many segments or parts a job processed; `made`: each count by its name."""
    text = ", ".join(f"{name} {count}" for name, count in made.items())
    emit(made, text, as_json)


ledger_option = click.option(
    "--ledger",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of ledgers, which contain the times at which notices were received.",
)


# ---- build the tables ------------------------------------------------------------------------


@click.command("ingest", cls=Command)
@lake_option
@click.option("--follow", is_flag=True, help="Keep running and ingest each new segment.")
@click.option(
    "--every", type=units.Duration(units.PAUSE_NS), default="10s", show_default=True,
    help="Pause between two rounds of --follow.",
)  # fmt: skip
@click.option(
    "--wal-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of WALs that are not shipped; sealed segments in it are ingested first.",
)
@ledger_option
@click.option(
    "--show",
    type=click.Choice(["topics", "workers"]),
    help="After ingesting, show the latencies of all records, by topic or by worker.",
)
@spark_options
@json_option
def ingest_command(
    lake: Path, follow: bool, every: int, wal_dir: Path | None, ledger: Path | None,
    show: str | None, master: str | None, conf: dict[str, str], as_json: bool,
) -> None:  # fmt: skip
    """Update the silver and gold tables from shipped segments.

    The command may be killed and started again at any time. Neither duplicates nor the order of
    segments change the tables.
    """
    if wal_dir is not None:
        lake.mkdir(parents=True, exist_ok=True)
    spark, place = opened(lake, master, conf)
    from purgatoryd.pipeline.jobs import bring_up
    from purgatoryd.pipeline.raw import ingest

    def iteration() -> None:
        raw = {} if wal_dir is None else {"raw": ingest(spark, place, wal_dir)}
        tell(raw | bring_up(spark, place, ledgers=ledger), as_json)
        if show is not None:
            show_latencies(spark, place, show, as_json)

    if follow:
        repeat(iteration, lambda: every / units.NS_PER["s"], as_json)
    else:
        iteration()


def show_latencies(spark: SparkSession, place: Lake, subject: str, as_json: bool) -> None:
    """Print the latencies of all records; `subject`: "topics" or "workers"."""
    from purgatoryd.pipeline.gold import latency, merge
    from purgatoryd.pipeline.parts import Layer
    from purgatoryd.pipeline.schemas import TOPICS, WORKERS

    table = TOPICS if subject == "topics" else WORKERS
    by = ["clock", "node", *(["namespace", "topic"] if subject == "topics" else ["worker"])]
    rows = merge(Layer(place.root, "gold").read(spark, table), table, by)
    show_rows(latency(rows, by), f"latencies by {subject[:-1]}", as_json, len(by) + 1)


@click.command("rebuild", cls=Command)
@on_tables
@click.option(
    "--from", "since", type=units.Moment(), required=True, help="Time of the first records."
)
@ledger_option
def rebuild_command(
    spark: SparkSession, place: Lake, since: datetime, ledger: Path | None, as_json: bool
) -> None:
    """Rebuild the silver and gold tables from a point in time on.

    Reads all WAL segments with records of --from or later.
    """
    from purgatoryd.pipeline.jobs import bring_up

    tell(bring_up(spark, place, int(since.timestamp() * 1_000_000), ledger), as_json)


@click.command("compact", cls=Command)
@on_tables
def compact_command(spark: SparkSession, place: Lake, as_json: bool) -> None:
    """Merge small parts of the silver and gold tables.

    Prints the decrease in the number of parts.
    """
    from purgatoryd.pipeline.jobs import compact

    tell(compact(spark, place), as_json)


# ---- query the tables ------------------------------------------------------------------------


@click.command("slow", cls=Command)
@on_tables
@click.option(
    "--limit",
    type=units.Duration(0),
    default="300ms",
    show_default=True,
    help="Limit for the 99th percentile.",
)
@click.option(
    "--least",
    type=units.Whole(1),
    default=1000,
    show_default=True,
    help="Minimum number of values that an hour must have to be judged.",
)
@click.option(
    "--publish",
    "publish_to",
    metavar="NAME",
    help="Publish the findings to namespace _purgatoryd, topic _events of daemon NAME.",
)
def slow_command(
    spark: SparkSession, place: Lake, limit: int, least: int, publish_to: str | None, as_json: bool
) -> int:
    """Find slow nodes and workers; exit code 1 if there are any.

    A node or worker is slow in an hour if the 99th percentile of a stage or of lateness exceeds
    the limit. The stages are request queue, local, response queue and send, without the wait until
    the deadline.
    """
    from purgatoryd.pipeline.findings import publish, slow
    from purgatoryd.pipeline.parts import Layer
    from purgatoryd.pipeline.schemas import TOPICS, WORKERS

    gold = Layer(place.root, "gold")
    found = slow(gold.read(spark, TOPICS), gold.read(spark, WORKERS), limit, least)
    print_records([finding.record() for finding in found], "slow", as_json)
    if publish_to is not None:
        publish(publish_to, found)
    return Exit.NEGATIVE if found else Exit.DONE


@click.command("timeouts", cls=Command)
@on_tables
@click.option(
    "--rate",
    type=units.Number(0, 1),
    default=0.01,
    show_default=True,
    help="Share of timers and operations that may expire.",
)
def timeouts_command(spark: SparkSession, place: Lake, rate: float, as_json: bool) -> None:
    """Show the time-out at which a given share of timers expires.

    For each topic, the output also has the current share, and a 95 % interval of the time-out. A
    time-out is "unknown", in JSON null, if it is longer than any observed duration.
    """
    from purgatoryd.pipeline.advice import timeouts
    from purgatoryd.pipeline.jobs import observed

    lived, still_open = observed(spark, place)
    rows = timeouts(lived, rate, still_open)
    show_rows(rows, "time-outs", as_json, unknown=UNKNOWN if not as_json else None)


UNKNOWN = "unknown"
"""Text for a figure that the data do not determine."""


@click.command("capacity", cls=Command)
@on_tables
def capacity_command(spark: SparkSession, place: Lake, as_json: bool) -> None:
    """Show the usage of each daemon and when its arena is full.

    The time is extrapolated from the last day. An arena is full when its slots or its memory for
    keys and payloads are used up.
    """
    from purgatoryd.pipeline.advice import anchors, capacity, sizes
    from purgatoryd.pipeline.parts import Layer
    from purgatoryd.pipeline.schemas import FLOW

    gold = Layer(place.root, "gold")
    flow, then = gold.read(spark, FLOW), anchors(spark, place, gold.sources())
    show_rows(capacity(flow, sizes(spark, place), then), "capacity", as_json)


def show_rows(
    frame: DataFrame, title: str, as_json: bool, order: int = 3, unknown: str | None = None
) -> None:
    """Show a small table, sorted by its first `order` columns. `unknown` replaces nulls in the
    other columns."""
    rows = frame.orderBy(*frame.columns[:order]).collect()
    shown = [
        {
            name: unknown if value is None and name not in frame.columns[:order] else plain(value)
            for name, value in row.asDict().items()
        }
        for row in rows
    ]
    print_records(shown, title, as_json)


def plain(value: Any) -> Any:
    """Return a value of a row for JSON."""
    return units.format_moment(value) if isinstance(value, datetime) else value


# ---- trace -----------------------------------------------------------------------------------


@click.command("trace", cls=Command)
@on_tables
@namespace_option
@key_type_option
@click.option(
    "--wal-dir",
    "wal_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory WAL_DIR/NAME of a daemon, for records that are not shipped.",
)
@click.argument("key")
def trace_command(
    spark: SparkSession, place: Lake, namespace: str, key_type: str,
    wal_dirs: tuple[Path, ...], key: str, as_json: bool,
) -> int:  # fmt: skip
    """Show all timers of KEY with the time of each stage.

    The output includes all hosts and the cold tier. Exit code 1 means that there is no timer of
    KEY.
    """
    from purgatoryd.shm_layout.errors import BadPath
    from purgatoryd.shm_layout.layout import KeyType
    from purgatoryd.shm_layout.wal import segments
    from purgatoryd.shm_layout.wire import encode_key

    kind, data = encode_key(read_key(key, key_type))
    for folder in wal_dirs:
        if not segments(folder):
            raise BadPath(str(folder), "has no WAL segments; give the directory WAL_DIR/NAME")
    from purgatoryd.pipeline.trace import Key, history, record

    wanted = Key(namespace, KeyType(kind).name.lower(), data)
    lifecycles = history(spark, place, wal_dirs, wanted)
    for lifecycle in lifecycles:
        if as_json:
            emit(record(lifecycle), "", as_json)
        else:
            print_lifecycle(lifecycle)
    return Exit.DONE if lifecycles else Exit.NEGATIVE


def print_lifecycle(lifecycle: Lifecycle) -> None:
    """Print the events of a timer with their times, and a bar for each stage."""
    from rich.console import Console
    from rich.table import Table

    from purgatoryd.pipeline.trace import record

    document = record(lifecycle)
    table = Table("at", "lsn", "event", title=lifecycle_title(document), title_justify="left")
    for event in document["events"]:
        table.add_row(event["at"] or "", str(event["lsn"] or ""), event["event"])
    for stage, span in document["stages_ns"].items():
        table.add_row(
            "", stage, f"{units.format_duration(span):>8} {bar(span, document['stages_ns'])}"
        )
    Console().print(table)


def lifecycle_title(document: dict[str, Any]) -> str:
    """Return the timer's node and ticket, and its final state."""
    late = document["lateness_ns"]
    how = document["final_state"] or "open"
    how += "" if late is None else f", {units.format_duration(late)} late"
    subject = (
        f"{document['node']}, ticket {document['ticket']}"
        if document["ticket"]
        else document["node"]
    )
    return f"{subject}: {how}"


def bar(span: int, stages: dict[str, int]) -> str:
    """Return a bar for the share of a stage in the sum of all stages, up to 40 characters long."""
    return "█" * round(40 * max(0, span) / max(1, sum(stages.values())))
