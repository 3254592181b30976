"""Silver and gold compared with DuckDB: for segments in any order, kills, and WALs of all
versions."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import pyarrow as pa
import pytest
import wal_segment_writer as sw
from click.testing import CliRunner
from cold_driver import TableDaemon, spark_of_python
from flight_runs import FlightRuns
from made_bronze import EXPIRED, FIRE, MS, SENT, Plan, S, opening_of, put, rows_of, segments_of
from other_user import run_as
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from real_daemon import PATIENCE_S, StartDaemon
from stored_arena import WALS, StoredWal
from tables_oracle import (
    OPEN_SQL,
    TABLES,
    WINDOW_SQL,
    Oracle,
    contents,
    same_schema,
    sketch_columns,
    table,
)
from wal_writer import Story, Wal, arm, end, namespace, topic

from examples.flights.collector import LAST_KEY
from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import Client, Consumer, Subscriber
from purgatoryd.pipeline import (
    advice,
    cold,
    findings,
    fleet,
    gold,
    jobs,
    parts,
    silver,
    sketches,
    trace,
)
from purgatoryd.pipeline.lake import Lake, Span, fields_of
from purgatoryd.pipeline.lifecycles import fires_ns
from purgatoryd.pipeline.living import living
from purgatoryd.pipeline.parts import Layer
from purgatoryd.pipeline.progress import progress
from purgatoryd.pipeline.promote import bulk_load_of, promote
from purgatoryd.pipeline.reach import reaches
from purgatoryd.pipeline.schemas import (
    FINAL_STATES,
    FLOW,
    FORMAT,
    LIFECYCLES,
    OPEN_TIMERS,
    TOPICS,
    WORKERS,
    Table,
)
from purgatoryd.pipeline.ship import Shipper
from purgatoryd.pipeline.tier import Tier
from purgatoryd.pipeline.whole import whole
from purgatoryd.shm_layout.errors import LakeBroken, LakeInUse
from purgatoryd.shm_layout.layout import EVENTS_NAMESPACE, EVENTS_TOPIC

pytestmark = pytest.mark.tier("test")

STRANGER = 4242
PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"
LIVE = Plan(9_000, slow_worker=3)
VIRTUAL = Plan(600, seed=2, daemon="cd" * 16, node="host-b", clock="virtual", real_offset_ns=7 * S)


def lake_in(directory: Path) -> Lake:
    directory.mkdir(exist_ok=True)
    return Lake(directory)


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake with all tables of two daemons, one with a live and one with a virtual clock."""
    lake = lake_in(tmp_path_factory.mktemp("made"))
    for segment in (*segments_of(LIVE), *segments_of(VIRTUAL)):
        put(lake, segment)
    jobs.bring_up(spark, lake)
    return lake


@pytest.fixture(scope="module")
def oracle(made: Lake) -> Oracle:
    return Oracle([made.data(manifest) for manifest in made.manifests()])


# ---- comparison with the oracle ----------------------------------------------------------------


def test_lifecycles_equal_those_of_duckdb(spark: SparkSession, made: Lake, oracle: Oracle) -> None:
    lifecycles = table(spark, made, LIFECYCLES)
    assert same_schema(lifecycles, LIFECYCLES)
    oracle.take("ours", lifecycles)
    assert oracle.differing("ours", "SELECT * FROM lifecycles") == []
    kinds = oracle.rows("SELECT DISTINCT clock, kind, final_state FROM ours")
    assert len(kinds) == 12  # two clocks; timers and operations with three final states each


def test_open_timers_equal_those_of_duckdb(spark: SparkSession, made: Lake, oracle: Oracle) -> None:
    found = silver.open_timers(jobs.bronze_of(spark, made, made.manifests()))
    assert same_schema(found, OPEN_TIMERS)
    oracle.take("still", found)
    assert oracle.differing("still", OPEN_SQL) == []
    assert oracle.rows("SELECT count(*) > 100 FROM still") == [(True,)]


def test_flow_and_final_states_equal_those_of_duckdb(
    spark: SparkSession, made: Lake, oracle: Oracle
) -> None:
    counts_hold(oracle, *(table(spark, made, which) for which in (FLOW, TOPICS, WORKERS)))


def counts_hold(oracle: Oracle, flow: DataFrame, topics: DataFrame, workers: DataFrame) -> None:
    """Check that the rows of flow and final states equal counts in DuckDB."""
    oracle.take("flow", flow)
    oracle.take("topics", topics.drop(*sketch_columns(TOPICS)))
    oracle.take("workers", workers.drop(*sketch_columns(WORKERS)))
    window = WINDOW_SQL.format('"at"')
    added = f"""SELECT daemon, segment, namespace, {window}::TIMESTAMPTZ AS window_start,
        count(*) FILTER (kind IN ('arm', 'watch')) AS added,
        coalesce(sum(octet_length(key) + payload_len) FILTER (kind IN ('arm', 'watch')), 0)
            AS bytes,
        count(*) FILTER (kind = 'move') AS extended, count(*) FILTER (kind = 'unknown') AS unknown
        FROM bronze GROUP BY ALL"""
    assert oracle.differing("flow", added) == []
    counts = ", ".join(f"count(*) FILTER (final_state = '{o}') AS {o}" for o in FINAL_STATES)
    window = WINDOW_SQL.format("ended_at")
    by_window = f"SELECT daemon, segment, clock, {window}::TIMESTAMPTZ AS window_start, {counts}"
    ended = """count(*) AS ended,
        count(*) FILTER (final_state = 'expired' AND flags & 2 > 0) AS overdue
        FROM lifecycles GROUP BY ALL"""
    assert oracle.differing("topics", f"{by_window}, topic, {ended}") == []
    hour = window.replace("5 minutes", "1 hour")
    by_worker = f"{by_window}, worker, {ended}".replace(window, hour)
    assert oracle.differing("workers", by_worker) == []
    sums = ", ".join(f"sum({o})::BIGINT AS {o}" for o in FINAL_STATES)
    flowed = (
        f"SELECT daemon, segment, clock, window_start, {sums} FROM flow WHERE namespace IS NOT NULL"
    )
    again = f"{by_window} FROM lifecycles GROUP BY ALL"
    both = f"SELECT * FROM ({flowed} GROUP BY ALL) WHERE {'+'.join(FINAL_STATES)} > 0"
    assert sorted(oracle.rows(both)) == sorted(oracle.rows(again))


@pytest.mark.parametrize(("which", "by"), [(TOPICS, ["clock"]), (WORKERS, ["clock", "worker"])])
def test_quantiles_keep_within_the_stated_error(
    spark: SparkSession, made: Lake, oracle: Oracle, which: Table, by: list[str]
) -> None:
    quantiles_hold(table(spark, made, which), oracle, which, by)


def quantiles_hold(partials: DataFrame, oracle: Oracle, which: Table, by: list[str]) -> None:
    """Check that the rank of each quantile among all values is within the error."""
    merged = gold.merge(partials, which, by)
    oracle.take("quantiles", gold.latency(merged, by))
    for measure, value in MEASURES.items():
        same = " AND ".join(f"l.{name} = q.{name}" for name in by)
        rows = oracle.rows(f"""
            SELECT {", ".join(f"l.{name}" for name in by)}, q.n, count(*), q.max_ns, max(v),
                avg((v <= p50_ns)::INT), avg((v < p50_ns)::INT),
                avg((v <= p99_ns)::INT), avg((v < p99_ns)::INT)
            FROM quantiles q JOIN (SELECT *, {value} AS v FROM lifecycles) l ON {same}
            WHERE measure = '{measure}' AND v IS NOT NULL GROUP BY ALL""")
        assert rows, measure
        for n, count, most, really, *ranks in (row[len(by) :] for row in rows):
            assert (n, most) == (count, really)
            for asked, below, under in ((0.5, *ranks[:2]), (0.99, *ranks[2:])):
                assert under - error() <= asked <= below + error(), (measure, asked)


MEASURES = {
    "request_queue": "request_queue_ns",
    "send": "send_ns",
    "service": "coalesce(request_queue_ns, 0) + coalesce(response_queue_ns, 0)"
    " + coalesce(send_ns, 0) + coalesce(local_ns, 0)",
    "lateness": "if(flags & 2 > 0, NULL, lateness_ns)",
}


def error() -> float:
    """Return twice the stated rank error. The stated error holds for 99 of 100 ranks; twice the
    error must never occur."""
    return 2 * sketches.rank_error()


# ---- real WALs -----------------------------------------------------------------------------


def shipped(wal: Path, root: Path) -> Lake:
    lake = lake_in(root)
    shipper = Shipper(wal, lake, "host")
    list(shipper.poll())
    shipper.close()
    return lake


@pytest.mark.parametrize("folder", WALS, ids=lambda folder: folder.name)
def test_wals_of_all_versions_become_tables(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    lake = shipped(StoredWal(folder, tmp_path / "wal" / "demo").directory, tmp_path / "l")
    jobs.bring_up(spark, lake)
    oracle = Oracle([lake.data(manifest) for manifest in lake.manifests()])
    oracle.take("ours", table(spark, lake, LIFECYCLES))
    assert oracle.differing("ours", "SELECT * FROM lifecycles") == []
    causes = oracle.rows("SELECT DISTINCT final_state FROM ours ORDER BY 1")
    assert [cause for (cause,) in causes] == sorted(FINAL_STATES)


def test_lateness_begins_after_the_slack(spark: SparkSession) -> None:
    end = 2**63 - 1
    cases = [(9, None, 9), (9, 8, 16), (16, 8, 16), (end, 8, end), (end, None, end)]
    rows = spark.createDataFrame(cases, "deadline_ns long, slack_ns long, wanted long")
    assert rows.where(fires_ns() != F.col("wanted")).collect() == []


def test_a_daemons_wal_becomes_tables(
    spark: SparkSession, daemon: StartDaemon, tmp_path: Path
) -> None:
    wals = tmp_path / "wal"
    wals.mkdir()
    demo = daemon("demo", "--wal-dir", str(wals), "--wal-segment-bytes", "256K")
    with Client("demo") as client, Subscriber("demo") as subscriber:
        client.add_many([(f"soon:{n}", 0.001, "t", b"") for n in range(100)])
        client.add_many([(f"far:{n}", 3600.0, "t", b"x" * 200) for n in range(3000)])
        for n in range(50):
            client.cancel(f"far:{n}")
            client.add(f"far:{n + 50}", delay=7200, mode="replace")
        notices = [subscriber.get(timeout=PATIENCE_S) for _ in range(100)]
        client.add("slack", 0.001, topic="t", within=0.1)
        notices.append(subscriber.get(timeout=PATIENCE_S))
        client.add_many([(f"more:{n}", 3600.0, "t", b"x" * 200) for n in range(3000)])
    demo.stop()  # a clean stop leaves all records on disk
    lake = shipped(wals / "demo", tmp_path / "lake")
    jobs.bring_up(spark, lake)
    oracle = Oracle([lake.data(manifest) for manifest in lake.manifests()])
    oracle.take("ours", table(spark, lake, LIFECYCLES))
    assert oracle.differing("ours", "SELECT * FROM lifecycles") == []
    slacks = oracle.rows("SELECT ticket, slack_ns FROM ours WHERE slack_ns IS NOT NULL")
    assert notices[-1] is not None
    assert slacks == [(notices[-1].ticket, 1 << 26)]
    fired = oracle.rows("SELECT ticket FROM ours WHERE final_state = 'expired'")
    assert {ticket for (ticket,) in fired} == {notice.ticket for notice in notices if notice}
    counts = oracle.rows("SELECT final_state, count(*) FROM ours GROUP BY 1 ORDER BY 1")
    assert counts == [("cancelled", 50), ("expired", 101), ("replaced", 50)]
    stages = ("request_queue", "local", "remote", "response_queue", "send")
    known = ", ".join(f"count(*) FILTER ({name}_ns >= 0)" for name in stages)
    assert oracle.rows(f"SELECT {known} FROM ours") == [(201,) * len(stages)]
    assert oracle.rows("SELECT count(*) FROM ours WHERE local_ns > 0") == [(201,)]
    assert oracle.rows("SELECT count(*) FROM ours WHERE lateness_ns >= 0") == [(101,)]
    assert oracle.rows("SELECT DISTINCT worker FROM ours") == [(f"{os.getuid()}:{os.getpid()}",)]


@pytest.mark.tier("all")
def test_the_flights_become_tables(
    spark: SparkSession, flight_runs: FlightRuns, tmp_path: Path
) -> None:
    with whole(spark, lake_in(tmp_path / "lake"), flight_runs.wals) as found:
        files = [Path(unquote(urlparse(file).path)) for file in found.bronze.inputFiles()]
        bronze, oracle = found.bronze.persist(), Oracle(files)
        lifecycles = silver.lifecycles(bronze, bronze).persist()
        oracle.take("ours", lifecycles)
        assert oracle.differing("ours", "SELECT * FROM lifecycles") == []
        topics = gold.topics(lifecycles).persist()
        counts_hold(oracle, gold.flow(bronze), topics, gold.workers(lifecycles))
        quantiles_hold(topics, oracle, TOPICS, ["clock", "topic"])
        for frame in (bronze, lifecycles, topics):
            frame.unpersist()
    ended = """SELECT a.key::VARCHAR FROM ours JOIN bronze a ON a.daemon = ours.daemon
               AND a.lsn = ours.add_lsn WHERE ours.clock = 'virtual' AND ours.final_state = ?"""
    expired, cancelled = (
        {key for (key,) in oracle.db.execute(ended, [final_state]).fetchall()}
        for final_state in ("expired", "cancelled")
    )
    assert expired == flight_runs.year.expected | {LAST_KEY}
    assert cancelled == {flight.key for flight in flight_runs.year.flights} - expired


def test_a_ledger_tells_when_notices_were_received(spark: SparkSession, tmp_path: Path) -> None:
    lake, rows = lake_in(tmp_path / "lake"), rows_of(SMALL)
    put(lake, segments_of(replace(SMALL, segment_rows=10**6))[0])
    fired = np.flatnonzero(rows["kind"] == FIRE)[:20]
    reported = [
        {
            "op": "notice",
            "ticket": int(rows["ticket"][n]),
            "received_boot_ns": int(rows["at_ns"][n]) + late,
        }
        for n in fired
        for late in (9_000_000, 5_000_000)
    ]
    ledger = tmp_path / "ledgers" / f"daemon={SMALL.daemon}" / "host-1-2.jsonl"
    ledger.parent.mkdir(parents=True)
    ledger.write_text("".join(f"{json.dumps(line)}\n" for line in reported))
    jobs.make_silver(spark, lake, ledgers=tmp_path / "ledgers")
    received = table(spark, lake, LIFECYCLES).where("receive_ns IS NOT NULL")
    whole = F.col("response_queue_ns") + F.col("send_ns") + F.col("receive_ns")
    assert [tuple(row) for row in received.select("ticket", whole).orderBy("lsn").collect()] == [
        (int(rows["ticket"][n]), 5_000_000) for n in fired if rows["cause"][n] == EXPIRED
    ]


# ---- segments in any order, repeated jobs, and kills -------------------------------------------

SMALL = Plan(500, segment_rows=300)


@pytest.fixture(scope="module")
def batch(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake with all segments of SMALL. One commit made its tables."""
    lake = lake_in(tmp_path_factory.mktemp("batch [1]"))
    for segment in segments_of(SMALL):
        put(lake, segment)
    jobs.bring_up(spark, lake)
    return lake


@pytest.fixture(scope="module")
def expected(spark: SparkSession, batch: Lake) -> dict[str, list[str]]:
    """The contents of all tables in the lake of the fixture `batch`."""
    return contents(spark, batch)


@pytest.fixture(scope="module")
def begun(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake with the first two segments of SMALL and their tables."""
    lake = lake_in(tmp_path_factory.mktemp("begun"))
    for segment in segments_of(SMALL)[:2]:
        put(lake, segment)
    jobs.bring_up(spark, lake)
    return lake


def copy_of(lake: Lake, root: Path) -> Lake:
    """Return a copy of a lake, which a test may change."""
    return Lake(Path(shutil.copytree(lake.root, root / "lake")))


@pytest.mark.tier("all")
def test_segments_come_late_twice_and_in_any_order(
    spark: SparkSession, expected: dict[str, list[str]], tmp_path: Path
) -> None:
    lake, segments = lake_in(tmp_path), segments_of(SMALL)
    random.Random(5).shuffle(segments)
    late = segments.pop()
    for some in (segments[:2], segments[2:], segments[:3], [late]):
        for segment in some:
            put(lake, segment)
        jobs.bring_up(spark, lake)
    assert contents(spark, lake) == expected
    assert jobs.bring_up(spark, lake) == {"silver": 0, "gold": 0}


@pytest.mark.tier("all")
def test_quantiles_keep_their_error_in_any_order_and_a_day_late(
    spark: SparkSession, oracle: Oracle, made: Lake, tmp_path: Path
) -> None:
    """The lake has the oracle's segments. The sketches of late segments are merged last."""
    lake, segments = lake_in(tmp_path), [*segments_of(LIVE), *segments_of(VIRTUAL)]
    random.Random(7).shuffle(segments)
    for some in (segments[:2], segments[2:]):
        for segment in some:
            put(lake, segment)
        jobs.bring_up(spark, lake)
    assert len(Layer(lake.root, "gold").parts()) == 2
    quantiles_hold(table(spark, lake, TOPICS), oracle, TOPICS, ["clock"])


class Killed(BaseException):
    pass


def dying(monkeypatch: pytest.MonkeyPatch, name: str, after: bool) -> None:
    """Let the next call of parts.NAME raise Killed, before or after its work."""
    real = getattr(parts, name)

    def die(*args: object) -> None:
        monkeypatch.setattr(parts, name, real)
        if after:
            real(*args)
        raise Killed

    monkeypatch.setattr(parts, name, die)


@pytest.mark.tier("all")
def test_a_kill_at_any_step_of_a_commit_changes_nothing(
    spark: SparkSession, begun: Lake, expected: dict[str, list[str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """First a commit of silver is killed, then a commit of gold."""
    lake = copy_of(begun, tmp_path)
    for segment in segments_of(SMALL)[2:]:
        put(lake, segment)
    for job, made in ((jobs.make_silver, [LIFECYCLES]), (jobs.make_gold, [TOPICS])):
        before = contents(spark, lake, made)
        for name, after in (
            ("sync_file", False), ("sync_directory", True), ("replace_durably", False),
        ):  # fmt: skip
            dying(monkeypatch, name, after)
            with pytest.raises(Killed):
                job(spark, lake)
            assert contents(spark, lake, made) == before
        dying(monkeypatch, "replace_durably", after=True)
        with pytest.raises(Killed):
            job(spark, lake)
    assert jobs.bring_up(spark, lake) == {"silver": 0, "gold": 0}
    assert contents(spark, lake) == expected


STEPS = ("make_private", "sync_file", "sync_directory", "replace_durably")


def dying_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Raise Killed before the step with this number. Steps are calls of STEPS, counted from 1."""
    left = iter(range(1, step))

    def mortal(real: Callable[..., object]) -> Callable[..., None]:
        def do(*args: object) -> None:
            if next(left, None) is None:
                raise Killed
            real(*args)

        return do

    for name in STEPS:
        patch.setattr(parts, name, mortal(getattr(parts, name)))


class WrittenBefore:
    """Stand-in for a DataFrame. It writes a copy of `folder`, whose files Spark wrote before."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.write = folder, self

    def options(self, **_: str) -> WrittenBefore:
        return self

    def parquet(self, path: str, mode: str) -> None:
        shutil.rmtree(path, ignore_errors=mode == "overwrite")
        shutil.copytree(self.folder, path)


@pytest.mark.tier("all")
def test_until_its_last_step_a_commit_has_done_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, one, step = Layer(tmp_path, "gold"), ("d", 1, 1), 1
    none = {which.name: spark.createDataFrame([], which.spark()) for which in layer.tables}
    with layer.writing():
        layer.commit(none, {one: ("old",)})
    again: dict[str, Any] = {
        name: WrittenBefore(next((tmp_path / "gold" / name).iterdir())) for name in none
    }
    while layer.sources() == {one: ("old",)}:
        with monkeypatch.context() as patch, suppress(Killed), layer.writing():
            dying_at(patch, step)
            layer.commit(again, {one: ("new",)})
        step += 1
    assert layer.sources() == {one: ("new",)}
    # at least four steps per table, even without files, and one for the commit
    assert step - 2 >= len(layer.tables) * 4 + 1
    monkeypatch.setattr(parts, "KEPT_S", 0)
    with layer.writing():
        assert [len(list((tmp_path / "gold" / t.name).iterdir())) for t in layer.tables] == [1] * 3


@pytest.mark.tier("all")
def test_rebuilt_and_compacted_tables_are_the_same(
    spark: SparkSession, begun: Lake, expected: dict[str, list[str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(parts, "KEPT_S", 0)
    lake, segments = copy_of(begun, tmp_path), segments_of(SMALL)
    for some in (segments[2:4], segments[4:]):
        for segment in some:
            put(lake, segment)
        jobs.bring_up(spark, lake)
    since = lake.manifests()[2].wall_from_us
    assert jobs.bring_up(spark, lake, since)["gold"] >= 2
    assert contents(spark, lake) == expected
    assert jobs.compact(spark, lake)["gold"] >= 1
    assert contents(spark, lake) == expected
    assert jobs.compact(spark, lake) == {"silver": 0, "gold": 0}
    assert len(list((lake.root / "gold" / "flow").iterdir())) == 1
    (file,) = (lake.root / "gold" / "flow").glob("*/*.parquet")
    with file.open("ab") as more:
        more.write(b"x")
    with pytest.raises(LakeBroken, match=f"{file}: has"):
        table(spark, lake, FLOW)


def test_reads_show_one_version(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the read, a job commits a new part and removes replaced parts."""
    layer, real = Layer(tmp_path, "gold"), Layer.parts
    none = {which.name: spark.createDataFrame([], which.spark()) for which in layer.tables}

    def commit(segment: int) -> None:
        with layer.writing():
            layer.commit(none, {("d", 1, segment): ("file",)})

    def interrupted(self: Layer) -> list[parts.Part]:
        monkeypatch.setattr(Layer, "parts", real)
        found = real(self)
        commit(2)
        return found

    commit(1)
    monkeypatch.setattr(Layer, "parts", interrupted)
    assert layer.read(spark, FLOW).count() == 0
    monkeypatch.setattr(
        parts, "fields_of", lambda path, kind: (path.unlink(), fields_of(path, kind))[1]
    )
    assert layer.parts() == []


def test_a_part_stays_for_its_readers_once_it_was_replaced(
    spark: SparkSession, tmp_path: Path
) -> None:
    layer, minute = Layer(tmp_path, "silver"), 60
    none = {LIFECYCLES.name: spark.createDataFrame([], LIFECYCLES.spark())}
    one, two = ("d", 1, 1), ("d", 1, 9)

    def commit(minutes_ago: int, *segments: parts.Segment) -> None:
        with layer.writing():
            number = layer.commit(none, dict.fromkeys(segments, ())).number
        then = time.time() - minutes_ago * minute
        os.utime(tmp_path / "silver" / "parts" / f"{number:012d}.json", (then, then))

    def there() -> list[int]:
        with layer.writing():
            return [part.number for part in layer.parts()]

    commit(10_000, one, two)
    commit(9_000, one)
    assert there() == [1, 2]  # part 2 has only one of the two segments
    commit(5, one, two)
    assert there() == [1, 2, 3]
    commit(1, one, two)
    then = time.time() - 20 * minute
    os.utime(tmp_path / "silver" / "parts" / "000000000003.json", (then, then))
    assert there() == [3, 4]  # parts 1 and 2 were replaced 20 minutes ago, part 3 just now


def test_a_batch_may_be_handed_over_in_the_next_segment(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = rows_of(SMALL)
    first_sent = int(rows["lsn"][rows["kind"] == SENT][0])
    lake, segments = lake_in(tmp_path), segments_of(replace(SMALL, segment_rows=first_sent - 1))
    unsent = []
    for segment in segments[:2]:
        put(lake, segment)
        assert jobs.make_silver(spark, lake) >= 1
        first = table(spark, lake, LIFECYCLES).where("segment = 1 AND send_ns IS NULL")
        unsent.append(first.where("kind = 'operation' OR final_state = 'expired'").count())
    assert unsent[0] > unsent[1] == 0


@pytest.mark.tier("all")
def test_a_batch_may_be_handed_over_much_later(spark: SparkSession, tmp_path: Path) -> None:
    """Many records and segments may be between a notice and the record of its handover."""
    plan = replace(SMALL, unsent_rows=70_000, segment_rows=30_000)
    lake, segments = lake_in(tmp_path), segments_of(plan)
    assert (len(segments), segments[0][0].handed) == (3, (0, 0))
    unsent = []
    for segment in segments:
        put(lake, segment)
        jobs.make_silver(spark, lake)
        notices = table(spark, lake, LIFECYCLES).where(
            "kind = 'operation' OR final_state = 'expired'"
        )
        unsent.append(notices.where("response_queue_ns IS NULL OR send_ns IS NULL").count())
    assert unsent[0] > unsent[-1] == 0
    assert jobs.make_silver(spark, lake) == 0


def test_an_answer_is_looked_for_in_all_segments_that_may_have_it() -> None:
    """Many segments of one start of the daemon may be between a final state and its answer."""
    plain, _ = segments_of(SMALL)[0]
    reported = [  # (epoch, time of the last final state, time at which the first answer was built)
        (1, 10 * S, None), (1, 20 * S, None), (1, 30 * S, 10 * S + MS), (1, 40 * S, 35 * S),
        (2, 9 * S, 5 * S),
    ]  # fmt: skip
    chain = [
        replace(
            plain, epoch=epoch, first_lsn=lsn, last_lsn=lsn, handed=Span(0, 0),
            kinds={"end": 1} if built is None else {"end": 1, "replied": 1},
            ended_upto_ns=ended, built_from_ns=built or 0,
        )
        for lsn, (epoch, ended, built) in enumerate(reported, 1)
    ]  # fmt: skip
    found = [[one.first_lsn for one in reach.manifests] for reach in reaches(chain).values()]
    assert found == [[1, 3], [2, 3], [3], [4], [5]]


def test_one_writer_at_a_time(spark: SparkSession, batch: Lake) -> None:
    with Layer(batch.root, "silver").writing(), pytest.raises(LakeInUse):
        jobs.make_silver(spark, batch)


def test_an_empty_lake_has_empty_tables(spark: SparkSession, tmp_path: Path) -> None:
    lake = lake_in(tmp_path)
    assert jobs.bring_up(spark, lake) == {"silver": 0, "gold": 0}
    assert jobs.compact(spark, lake) == {"silver": 0, "gold": 0}
    assert [table(spark, lake, which).count() for which in TABLES] == [0, 0, 0, 0]
    assert progress(lake) == []


def edit(path: Path, **changes: object) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("found", [0, 2, None])
@pytest.mark.parametrize("file", ["manifests/*/*.json", "silver/parts/*.json"])
def test_another_format_is_refused(batch: Lake, tmp_path: Path, file: str, found: object) -> None:
    """A file without a format number is refused as well. The command writes nothing."""
    root = Path(shutil.copytree(batch.root, tmp_path / "lake"))
    path = min(root.glob(file))
    edit(path, format=found)
    before = {one: one.stat().st_mtime_ns for one in root.rglob("*.json")}
    done = CliRunner().invoke(app, ["pipeline", "ingest", "--lake", str(root), "--json"])
    assert done.exit_code == Exit.UNUSABLE, done.output
    reported = json.loads(done.stderr)
    assert (reported["error"], reported["found"], reported["expected"]) == (
        "LakeMismatch",
        found,
        FORMAT,
    )
    assert reported["path"] == str(path)
    assert {one: one.stat().st_mtime_ns for one in root.rglob("*.json")} == before


@pytest.mark.parametrize("file", ["manifests/*/*.json", "silver/parts/*.json"])
def test_a_file_with_an_unknown_field_is_broken(batch: Lake, tmp_path: Path, file: str) -> None:
    root = Path(shutil.copytree(batch.root, tmp_path / "lake"))
    path = min(root.glob(file))
    edit(path, invented=1)
    with pytest.raises(LakeBroken, match=f"{re.escape(str(path))}.*invented"):
        Layer(root, "silver").parts() if "parts" in file else Lake(root).manifests()


def test_the_query_of_the_page_runs(
    spark: SparkSession, batch: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spark  # the query uses this Spark session
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (query,) = (block for block in blocks if "import gold" in block)
    query = query.replace('Path("lake")', f"Path({str(batch.root)!r})")
    exec(compile(query, PAGE.name, "exec"), {})
    assert "request_queue" in capsys.readouterr().out


def test_a_broken_part_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "silver" / "parts" / "000000000001.json"
    broken.parent.mkdir(parents=True)
    broken.write_text('{"format": 1, "number": 1}')
    with pytest.raises(LakeBroken, match=r"000000000001\.json"):
        Layer(tmp_path, "silver").parts()


# ---- progress ----------------------------------------------------------------------------------


def test_complete_to_stops_at_a_gap(tmp_path: Path) -> None:
    lake, segments = lake_in(tmp_path), segments_of(SMALL)
    for segment in (segments[0], segments[1], segments[3]):
        put(lake, segment)
    (found,) = progress(lake)
    assert found.segments == 3
    assert found.complete_to_us == segments[1][0].wall_to_us < found.last_us
    assert found.gaps == ((segments[2][0].first_lsn, segments[2][0].last_lsn),)
    put(lake, segments[2])
    (found,) = progress(lake)
    assert (found.complete_to_us, found.gaps) == (segments[3][0].wall_to_us, ())


def test_records_removed_before_shipping_are_missing(tmp_path: Path) -> None:
    lake, segments = lake_in(tmp_path), segments_of(SMALL)
    manifest, rows = segments[1]
    put(lake, (replace(manifest, gone_from=1), rows))
    (found,) = progress(lake)
    assert found.gaps == ((1, manifest.first_lsn - 1),)
    assert found.complete_to_us == manifest.wall_to_us


def test_a_lake_that_may_not_be_read_is_not_an_empty_one(daemon_dir: Path) -> None:
    """A user may not read the folder of another user's shipped segments."""
    lake = lake_in(daemon_dir)
    put(lake, segments_of(SMALL)[0])
    daemon_dir.chmod(0o755)
    (theirs,) = (lake.root / "manifests").iterdir()
    theirs.chmod(0o700)
    status = ("pipeline", "status", "--lake", str(lake.root))
    assert CliRunner().invoke(app, status).exit_code == Exit.DONE
    done = run_as(STRANGER, lambda: CliRunner().invoke(app, status).stderr)
    assert done == f"purgatoryd: {theirs}: Permission denied\n"


def test_progress_counts_what_is_up_to_date_and_what_is_unknown(batch: Lake) -> None:
    (found,) = progress(batch)
    assert found.silver == found.gold == found.segments == len(segments_of(SMALL))
    assert found.unknown == 3


# ---- findings and advice -----------------------------------------------------------------------


@pytest.mark.tier("all")
def test_only_the_slow_worker_is_found_with_its_stage(spark: SparkSession, made: Lake) -> None:
    topics, workers = table(spark, made, TOPICS), table(spark, made, WORKERS)
    found = findings.slow(topics, workers)
    assert {(f.subject, f.name, f.node, f.measure, f.stage, f.clock) for f in found} == {
        ("worker", "worker-3", "host-a", "service", "request_queue", "live"),
        ("node", "host-a", "host-a", "service", "request_queue", "live"),
    }
    assert all(f.p99_ns > f.limit_ns and f.n >= 1000 for f in found)
    assert findings.slow(topics, workers, limit_ns=10**9) == []
    assert findings.slow(topics, workers, least=10**6) == []


@pytest.mark.tier("all")
def test_a_worker_of_another_node_is_another_worker(spark: SparkSession, made: Lake) -> None:
    """Many quick workers with the same name on another node do not hide the slow worker."""
    topics, workers = table(spark, made, TOPICS), table(spark, made, WORKERS)
    quick = workers.where("worker <> 'worker-3'").withColumn("worker", F.lit("worker-3"))
    others = quick.withColumn("node", F.lit("host-b"))
    for _ in range(5):
        others = others.unionByName(others)
    found = findings.slow(topics, workers.unionByName(others))
    assert ("worker-3", "host-a") in {(f.name, f.node) for f in found if f.subject == "worker"}


def test_findings_are_published(daemon: StartDaemon) -> None:
    hour = datetime(2026, 1, 1, 12, tzinfo=UTC)
    found = findings.Finding(
        "worker",
        "1000:7",
        "eagle",
        "live",
        hour,
        "service",
        1200,
        5,
        400 * MS,
        500 * MS,
        300 * MS,
        "send",
        9,
    )
    daemon("demo")
    with Subscriber("demo", namespace=EVENTS_NAMESPACE, topics=[EVENTS_TOPIC]) as subscriber:
        findings.publish("demo", [found])
        notice = subscriber.get(timeout=PATIENCE_S)
    assert notice is not None
    assert json.loads(notice.payload) == found.record()


REMISSION = {6: (3, 1), 7: (1, 0), 9: (0, 1), 10: (1, 1), 11: (0, 1), 13: (1, 0), 16: (1, 0),
             17: (0, 1), 19: (0, 1), 20: (0, 1), 22: (1, 0), 23: (1, 0), 25: (0, 1), 32: (0, 2),
             34: (0, 1), 35: (0, 1)}  # fmt: skip
"""By weeks in remission: (number of relapses, number of patients who were observed only until that
week). The 21 patients got 6-mercaptopurine (Freireich et al. 1963)."""
ESTIMATE = {
    6: (0.8571, 0.6197, 0.9516), 7: (0.8067, 0.5631, 0.9228), 10: (0.7529, 0.5032, 0.8894),
    13: (0.6902, 0.4316, 0.8491), 16: (0.6275, 0.3675, 0.8049), 22: (0.5378, 0.2678, 0.7468),
    23: (0.4482, 0.1881, 0.6801),
}  # fmt: skip
"""Estimates for these data by week: (survival, lower bound, upper bound). Result of survfit(...,
conf.type = "log-log") of R's survival package."""


def ended(spans: dict[int, tuple[int, int]]) -> Iterator[tuple[str, str, str, int, int, str, int]]:
    """Yield one lifecycle per patient, all in one topic. Relapses settled; all others expired."""
    for span, counts in spans.items():
        for final_state, count in zip(("cancelled", "expired"), counts, strict=True):
            yield from [("live", "shop", "t", span, 0, final_state, 40)] * count


LIVED = (
    "clock string, namespace string, topic string, remote_ns long, armed_ns long, "
    "final_state string, deadline_ns long"
)


def test_the_estimate_is_that_of_kaplan_and_meier(spark: SparkSession) -> None:
    counted = spark.createDataFrame(
        [("t", span, settled + others, settled) for span, (settled, others) in REMISSION.items()],
        "topic string, span_ns long, ended long, settled long",
    )
    found = {row.span_ns: row for row in advice.survival(counted, ["topic"]).collect()}
    for span, wanted in ESTIMATE.items():
        row = found[span]
        bounds = (row.survival, row.survival_low, row.survival_high)
        assert bounds == pytest.approx(wanted, abs=1e-4)
    assert found[35].survival == found[23].survival


def test_a_timeout_beyond_the_data_is_unknown(spark: SparkSession) -> None:
    """A timeout is unknown if the estimate never falls to `rate`. A bound of the timeout is unknown
    if the same bound of the estimate never falls to it."""
    lived = spark.createDataFrame([*ended(REMISSION)], LIVED)
    for rate, *wanted in ((0.5, 23, 13, None), (0.7, 13, 6, 23), (0.3, None, 22, None)):
        (row,) = advice.timeouts(lived, rate).collect()
        assert [row.timeout_ns, row.timeout_low_ns, row.timeout_high_ns] == wanted
    assert (row.settled, row.expired, row.rate) == (9, 12, 12 / 21)
    assert (row.settled_p50_ns, row.settled_p99_ns, row.asked_p50_ns) == (10, 23, 40)


def test_open_spans_count_as_censored(spark: SparkSession) -> None:
    """The open spans stand for patients who were observed only until the end of the span. Without
    these spans, all have settled by week 23."""
    settled = {span: (counts[0], 0) for span, counts in REMISSION.items()}
    lived = spark.createDataFrame([*ended(settled)], LIVED)
    watched = [span for span, (_, count) in REMISSION.items() for _ in range(count)]
    spans = [("live", "shop", "t", span, 40) for span in watched]
    still_open = spark.createDataFrame(
        spans, "clock string, namespace string, topic string, span_ns long, asked_ns long"
    )
    for found, wanted in (
        (advice.timeouts(lived, 0.5), 10), (advice.timeouts(lived, 0.5, still_open), 23),
    ):  # fmt: skip
        (row,) = found.collect()
        assert row.timeout_ns == wanted


@pytest.mark.tier("all")
def test_the_advised_timeout_gives_the_wanted_rate(
    spark: SparkSession, made: Lake, oracle: Oracle
) -> None:
    """If all have settled, the rate is the share of operations that took longer than the
    timeout."""
    lived, still_open = jobs.observed(spark, made)
    settled = lived.where("clock = 'live' AND final_state IN ('cancelled', 'satisfied')")
    oracle.take("advised", advice.timeouts(settled, 0.2))
    rows = oracle.rows("""
        SELECT a.settled, count(*), avg((remote_ns > timeout_ns)::INT)
        FROM advised a JOIN lifecycles l USING (clock, namespace, topic)
        WHERE l.final_state IN ('cancelled', 'satisfied') GROUP BY ALL""")
    assert len(rows) == LIVE.topics
    for settled_count, really_settled, would_expire in rows:
        assert settled_count == really_settled
        assert abs(would_expire - 0.2) <= 0.01
    # A rate of 0 has no timeout, because nobody knows how long the expired operations would have
    # taken.
    assert advice.timeouts(lived, 0.0, still_open).where("timeout_ns > 0").count() == 0


def test_capacity_tells_when_the_slots_are_used_up(spark: SparkSession) -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    windows = [
        (daemon, begin + timedelta(minutes=5 * n), added, ended, added * 100, n + 1)
        for n in range(24)
        for daemon, added, ended in (
            ("grows", 20, 10),
            ("heavy", 20, 10),
            ("shrinks", 5, 6),
            ("stopped", 20, 10),
        )
    ]
    flow = spark.createDataFrame(
        windows,
        "daemon string, window_start timestamp, added long, expired long, bytes long, segment long",
    ).withColumns({name: F.lit(0) for name in FINAL_STATES if name != "expired"})
    sizes = spark.createDataFrame(
        [
            (name, "host", begin + timedelta(hours=2), *known, name == "stopped")
            for name, *known in (
                ("grows", 340, 34_000, 1540, 10_000_000), ("heavy", 340, 34_000, 1540, 40_000),
                ("new", 7, 700, 1000, None), ("shrinks", 476, 47_600, 1000, None),
                ("stopped", 340, 34_000, 1540, 10_000_000),
            )
        ],
        advice.SIZES,
    )  # fmt: skip
    known = sizes.where("daemon <> 'new'").select(
        "daemon", F.lit(1).alias("from_lsn"), F.lit(24).alias("upto"),
        F.col("as_of").alias("anchor_at"), F.col("living").alias("then_living"),
        F.col("living_bytes").alias("then_bytes"),
    )  # fmt: skip
    forecasts = advice.capacity(flow, sizes, known).orderBy("daemon").collect()
    grows, heavy, new, shrinks, stopped = forecasts
    assert (stopped.per_hour, stopped.full_at) == (grows.per_hour, None)
    assert (grows.live, grows.slots) == (100 + 24 * 10, 1540)
    assert grows.per_hour == pytest.approx(120)
    assert (grows.live_bytes, grows.bytes) == (34_000, 10_000_000)
    assert grows.bytes_per_hour == pytest.approx(12_000)
    for row, hours, by in (
        (grows, (1540 - 340) / 120, "slots"), (heavy, (40_000 - 34_000) / 12_000, "bytes"),
    ):  # fmt: skip
        full_at = begin + timedelta(hours=2 + hours)
        assert abs(row.full_at.astimezone(UTC) - full_at) < timedelta(minutes=1)
        assert row.full_by == by
    assert (shrinks.live, shrinks.full_at, shrinks.full_by) == (500 - 24, None, None)
    assert (new.node, new.live, new.per_hour, new.full_at) == ("host", 7, None, None)


HOUR = 3600 * S
ADDS = {f"arm_{n}": arm(n, f"k{n}", 50 * HOUR, at_ns=n * HOUR // 100) for n in range(1, 101)}
NAMES = {"shop": namespace(0, "shop"), "late": topic(0, 0, "late")}
ENDS = {f"end_{n}": end(n, at_ns=HOUR) for n in range(1, 101)}


@pytest.mark.tier("all")
@pytest.mark.parametrize("run_on", [0, 1])
def test_live_figures_are_compared_at_the_same_record(
    spark: SparkSession, tmp_path: Path, run_on: int
) -> None:
    """A daemon armed a hundred timers in an hour, and then ended all of them. The lake lacks the
    second half of the WAL, which ended them. The last snapshot has no timers."""
    wal = Wal(began_empty=True)
    Story(NAMES | ADDS, wal, first=None, now_ns=HOUR).write(tmp_path / "demo")
    begin = 1 + len(NAMES | ADDS | ENDS)
    data = wal.snapshot(begin, [], next_ticket=101, end_lsn=begin - 1 + run_on, now_ns=HOUR)
    (tmp_path / "demo" / f"{begin:016x}.snapshot").write_bytes(data)
    lake = shipped(tmp_path / "demo", tmp_path)
    jobs.bring_up(spark, lake)
    made = Layer(lake.root, "gold").sources()
    (then,) = advice.anchors(spark, lake, made).collect()
    assert (then.from_lsn, then.upto, then.then_living) == (1, len(NAMES | ADDS), 100)
    lived = advice.live(table(spark, lake, FLOW), advice.anchors(spark, lake, made)).collect()
    assert min(row.living for row in lived) > 0
    assert max(row.living for row in lived) == 100
    (forecast,) = called("capacity", "--lake", lake.root)
    assert forecast["live"] == 0
    if not run_on:  # no record follows the snapshot: the daemon has stopped
        assert (forecast["full_at"], forecast["full_by"]) == (None, None)


@pytest.mark.tier("all")
def test_armed_timers_are_counted_from_the_newest_snapshot(
    spark: SparkSession, tmp_path: Path, batch: Lake
) -> None:
    every = jobs.bronze_of(spark, batch, batch.manifests())
    open_tickets = {row.ticket for row in silver.open_timers(every).collect()}
    lake, segments = lake_in(tmp_path), segments_of(SMALL)
    for segment in segments[1:]:  # the first segment was removed before it was shipped
        put(lake, segment)
    (size,) = advice.sizes(spark, lake).collect()
    assert (size.daemon, *size[3:7]) == (SMALL.daemon, None, None, None, None)
    assert round(size.as_of.timestamp() * 1e6) == segments[-1][0].wall_to_us
    second, third = (manifest for manifest, _ in segments[1:3])
    put(lake, opening_of(SMALL, 1, 2))
    put(lake, opening_of(SMALL, second.first_lsn + 20, third.first_lsn + 50))
    assert sorted(row.ticket for row in living(spark, lake).collect()) == sorted(open_tickets)
    (size,) = advice.sizes(spark, lake).collect()
    assert size.living == len(open_tickets)
    sizes = [len(row.key) + row.payload_len for row in living(spark, lake).collect()]
    assert size.living_bytes == sum(-(-one // 16) * 16 for one in sizes)
    (found,) = fleet.measured_in(spark, lake.root).collect()
    assert found.live == len(open_tickets)
    jobs.bring_up(spark, lake)
    (capacity,) = called("capacity", "--lake", lake.root)
    assert capacity["live"] == len(open_tickets)


# ---- trace -------------------------------------------------------------------------------------


@pytest.mark.tier("all")
def test_a_trace_tells_every_record_of_a_key(
    spark: SparkSession, made: Lake, oracle: Oracle
) -> None:
    sql = "SELECT decode(key), ticket, lsn FROM lifecycles "
    sql += "WHERE final_state = '{}' AND daemon LIKE 'ab%'"
    for final_state in ("expired", "replaced"):
        key, ticket, lsn = oracle.rows(sql.format(final_state))[0]
        assert isinstance(key, str)
        lifecycles = trace.history(spark, made, (), trace.Key("default", "str", key.encode()))
        reported = next(
            t
            for t in map(trace.record, lifecycles)
            if (t["ticket"], t["node"]) == (ticket, "host-a")
        )
        assert reported["final_state"] == final_state
        assert reported["events"][-1]["lsn"] == lsn
        assert reported["events"][0]["event"].startswith("armed")
        assert reported["stages_ns"].keys() >= (
            {"request_queue", "remote"} | (set() if final_state == "replaced" else {"send"})
        )
    assert trace.history(spark, made, (), trace.Key("default", "str", b"nobody")) == []


@pytest.mark.tier("all")
def test_a_trace_shows_the_jobs_of_a_timer(
    spark: SparkSession, daemon: StartDaemon, tmp_path: Path
) -> None:
    wals = tmp_path / "wal"
    wals.mkdir()
    demo = daemon("demo", "--wal-dir", str(wals), "--wal-segment-bytes", "256K")
    with Client("demo") as client, Consumer("demo", group="mailers", topics=["t"]) as consumer:
        client.add("order", 0, topic="t", mode="replace")
        (job,) = consumer.get_many(1, timeout=PATIENCE_S)
        job.reject("no address")
        client.drop_dead("mailers")
        client.add_many([(f"more:{n}", 3600.0, "u", b"x" * 200) for n in range(3000)])
    demo.stop()
    lake = shipped(wals / "demo", tmp_path / "lake")
    (found,) = trace.history(spark, lake, (), trace.Key("default", "str", b"order"))
    assert [event["event"] for event in trace.record(found)["events"]] == [
        "armed", "expired", "job leased, leases 1, failures 0",
        "job dead, rejected, leases 1, failures 1", "job dropped",
    ]  # fmt: skip


@pytest.mark.tier("all")
def test_a_trace_goes_from_the_cold_tier_to_the_end(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One listing shows three timers of a key: the first was promoted, armed and fired, the second
    was cancelled in the tier, and the third is still in the tier."""
    spark_of_python(monkeypatch)
    lake, daemon, due_ns = lake_in(tmp_path / "lake"), TableDaemon("demo"), sw.WALL_NS + 3600 * S
    tier = Tier(lake.root)

    def bulk_load(name: str, at_ns: int) -> None:
        row = {"namespace": "n", "topic": "t", "key": b"key:7", "key_type": "str",
               "deadline_ns": at_ns}  # fmt: skip
        cold.bulk_load(tier, pa.Table.from_pylist([row]), name, daemon)

    bulk_load("first", due_ns)
    (window,) = promote(spark, tier, due_ns + 1, daemon)
    daemon.fire()
    bulk_load("second", due_ns + 7200 * S)
    keys = pa.table({"namespace": ["n"], "key_type": ["str"], "key": [b"key:7"]})
    cold.cancel(tier, keys, daemon)
    bulk_load("third", due_ns + 9000 * S)
    first, second, third = sorted(part.version for part in tier.version().rows)
    arm = sw.arm(3, b"key:7", bulk_load=bulk_load_of(tier, window).bytes)
    fire = sw.record("fire", ticket=3, fired_ns=sw.BOOT_NS + 2 * S, sequence=1, slot=3)
    sw.write(tmp_path / "j", sw.segment([*sw.names(), arm, fire]))
    lifecycles = trace.history(spark, lake, [tmp_path / "j"], trace.Key("n", "str", b"key:7"))
    reported = [trace.record(lifecycle) for lifecycle in lifecycles]
    assert [[event["event"] for event in one["events"]] for one in reported] == [
        [f"in the cold tier since version {first}, due {moment(due_ns)}",
         f"armed by window {window.id}", "expired"],
        [f"in the cold tier since version {second}, due {moment(due_ns + 7200 * S)}; ended there"],
        [f"in the cold tier since version {third}, due {moment(due_ns + 9000 * S)}"],
    ]  # fmt: skip
    assert [(one["final_state"], one["ticket"]) for one in reported] == [
        ("expired", 3), ("ended", 0), (None, 0)
    ]  # fmt: skip


def moment(wall_ns: int) -> str:
    return f"{datetime.fromtimestamp(wall_ns // S, UTC):%Y-%m-%dT%H:%M:%SZ}"


# ---- the commands ------------------------------------------------------------------------------


def called(*arguments: str | Path) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["pipeline", *map(str, arguments), "--json"])
    assert done.exit_code in (0, 1), done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.tier("all")
def test_the_commands_make_and_ask_the_tables(
    spark: SparkSession, daemon: StartDaemon, tmp_path: Path
) -> None:
    assert spark  # the commands use this Spark session
    lake = lake_in(tmp_path)
    for segment in segments_of(SMALL):
        put(lake, segment)
    where, count = ("--lake", lake.root), len(segments_of(SMALL))
    assert called("ingest", *where) == [{"silver": count, "gold": count}]
    for show, column, count_of in (("topics", "topic", 4), ("workers", "worker", 6)):
        none, *latencies = called("ingest", *where, "--show", show)
        assert none == {"silver": 0, "gold": 0}
        assert len({row[column] for row in latencies}) == count_of
        assert all(row["p50_ns"] <= row["p99_ns"] <= row["max_ns"] for row in latencies)
    since = ("--from", "2025-01-01T00:00Z")
    assert called("rebuild", *where, *since) == [{"silver": count, "gold": count}]
    (status,) = called("status", *where)
    assert (status["segments"], status["gold"], status["missing"]) == (count, count, [])
    assert called("slow", *where) == []
    daemon("demo")
    with Subscriber("demo", namespace=EVENTS_NAMESPACE, topics=[EVENTS_TOPIC]) as subscriber:
        found = called("slow", *where, "--limit", "1ns", "--least", "1", "--publish", "demo")
        received = [subscriber.get(timeout=PATIENCE_S) for _ in found]
    assert [json.loads(notice.payload) for notice in received if notice] == found != []
    assert {row["topic"] for row in called("timeouts", *where)} == {"t0", "t1", "t2", "t3"}
    (capacity,) = called("capacity", *where)
    assert capacity["live"] > 0
    (lifecycle, *_) = called("trace", "key:0", *where)
    assert lifecycle["events"][0]["event"] == "armed"
    assert called("trace", "nobody", *where) == []
