"""Bulk loads of Spark, of files and of the cold tier: each row is added once, despite kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cold_driver import Mortal, filed, files_writer, keys_in, small_pieces, spark_of_python
from cold_killed import DUE, FAR, UNTIL_NS, key_of, rows_of
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, notices, stats

from purgatoryd.clients import Client
from purgatoryd.clients.batch import Batch
from purgatoryd.pipeline import agent, cold
from purgatoryd.pipeline.bulk_loading import Answers, BulkLoader, runs
from purgatoryd.pipeline.promote import promote
from purgatoryd.pipeline.tier import Tier
from purgatoryd.pipeline.writer import TimersWriter, writer_of
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import (
    BulkLoadRefused,
    DaemonUnreachable,
    InvalidName,
    InvalidRows,
    InvalidSetting,
    LakeInUse,
    MessageRefused,
    SessionExpired,
    WindowTaken,
)
from purgatoryd.shm_layout.layout import WireError

pytestmark = pytest.mark.tier("test")

HOUR_NS = 3600 * 10**9
SCHEMA = StructType().add("key", "string").add("delay", "double").add("payload", "binary")
NO_SPARK: Any = None
KILLER = Path(__file__).parents[1] / "support" / "cold_killed.py"
PROMOTION = Path(__file__).parents[1] / "support" / "promote_killed.py"


def batch(first: int, last: int, delay: float = 3600.0) -> pa.RecordBatch:
    """Return a batch with the columns of SCHEMA: timers k<first> to k<last - 1>."""
    numbers = range(first, last)
    return pa.RecordBatch.from_pydict({
        "key": [f"k{i}" for i in numbers],
        "delay": pa.array([delay] * len(numbers), pa.float64()),
        "payload": pa.array([b"p%d" % i for i in numbers], pa.binary()),
    })  # fmt: skip


def fired(daemon: Daemon, topic: str = "default", namespace: str = "default") -> list[Any]:
    """Return the keys of all notices of a topic."""
    reader = Reader.attach(daemon.paths)
    try:
        return [one.key for one in notices(reader, namespace, topic)]
    finally:
        reader.close()


def has_expired(daemon: Daemon, count: int) -> None:
    """Wait until `count` timers have fired."""
    eventually(lambda: stats(daemon)["expiries"] == count)


def timers_writer(daemon: Daemon, **options: str) -> TimersWriter:
    writer = writer_of({"name": daemon.name, **options}, SCHEMA)
    assert isinstance(writer, TimersWriter)
    return writer


# ---- format("purgatoryd") ----------------------------------------------------------------------


def test_a_task_that_dies_after_its_timers_fired_adds_nothing_twice(daemon: StartDaemon) -> None:
    demo = daemon()
    writer = timers_writer(demo)

    def dies() -> Iterator[pa.RecordBatch]:
        yield batch(0, 3000, delay=0.0)
        yield batch(3000, 5000, delay=0.0)
        has_expired(demo, 5000)
        raise OSError("the executor is gone")

    with pytest.raises(OSError, match="gone"):
        writer.write(dies())
    done = writer.write(iter([batch(0, 3000), batch(3000, 5000), batch(5000, 5010, 0.0)]))
    assert done.answers.counts == {"BULK_LOADED": 5000, "ADDED": 10}
    writer.commit([done])
    has_expired(demo, 5010)
    assert sorted(fired(demo)) == sorted(f"k{i}" for i in range(5010))
    late = writer.write(iter([batch(0, 5011)]))  # a speculative copy of the task ends late
    assert late.answers.counts == {"BULK_LOADED": 5010, "CLOSED": 1}


def test_the_daemon_may_be_killed_meanwhile(daemon: StartDaemon) -> None:
    demo = daemon()
    writer = timers_writer(demo)

    def killed() -> Iterator[pa.RecordBatch]:
        yield batch(0, 2000)
        demo.kill()
        demo.start()
        yield batch(2000, 4000)

    done = writer.write(killed())
    assert done.answers.counts == {"ADDED": 4000}
    assert stats(demo)["live"] == 4000


def test_refusals_are_reported_with_counts_and_samples(daemon: StartDaemon, tmp_path: Path) -> None:
    demo = daemon("demo", "--capacity", "100")
    report = tmp_path / "report.json"
    with Client(demo.name) as client:
        client.add("k3", 3600)
    writer = timers_writer(demo, report=str(report))
    done = writer.write(iter([batch(0, 150)]))
    assert done.answers.counts == {"ADDED": 99, "EXISTS": 1, "FULL": 50}
    with pytest.raises(BulkLoadRefused) as caught:
        writer.commit([done])
    assert caught.value.refused == 51
    assert ("default", "k3", "EXISTS") in caught.value.samples
    reported = json.loads(report.read_text())
    assert (reported["refused"], reported["counts"]["FULL"]) == (51, 50)
    timers_writer(demo, refused="count").commit([done])


def test_columns_and_options_are_checked(daemon_dir: Path) -> None:
    good = {"name": "demo"}
    for bad in (
        {"put": "often"},
        {"bulk_load": str(uuid4())},
        {"to": "nowhere"},
        {"tcp": "h:1"},
        {"to": "files"},
    ):
        with pytest.raises(InvalidSetting):
            writer_of(good | bad, SCHEMA)
    with pytest.raises(InvalidSetting, match="UUID"):
        writer_of(good | {"bulk_load": "x"}, StructType([*SCHEMA.fields]).add("row", "long"))
    with pytest.raises(InvalidRows, match="not there"):
        writer_of(good | {"topic": "nothing"}, SCHEMA)
    with pytest.raises(InvalidRows, match="need key"):
        writer_of(good, StructType().add("key", "string"))
    with pytest.raises(InvalidRows, match="for payload is double"):
        writer_of(good | {"payload": "delay"}, SCHEMA)
    nulls = pa.RecordBatch.from_pydict(
        {"key": ["a", None], "delay": [1.0, 2.0], "payload": pa.array([None, b""], pa.binary())}
    )
    writer = writer_of(good, SCHEMA)
    with pytest.raises(InvalidRows, match="holds nulls"):
        writer.write(iter([nulls]))


def test_rows_of_many_namespaces_topics_and_types(daemon: StartDaemon) -> None:
    demo = daemon()
    names = ["a", "a", "b", "a", "b", "b"]
    kinds = ["str", "str", "bytes", "uuid", "uuid", "bytes"]
    raw = [uuid4().bytes for _ in names]
    keys = [b"k%d" % i if kind == "str" else raw[i] for i, kind in enumerate(kinds)]
    rows = pa.table({
        "namespace": names, "key_type": kinds, "key": pa.array(keys, pa.binary()),
        "topic": [f"t{i % 2}" for i in range(6)], "payload": pa.array(raw, pa.binary()),
        "delay": [3600.0] * 6, "row": [0, 1, 2, 3, 9, 10],
    })  # fmt: skip
    assert [run.num_rows for run in runs(rows)] == [2, 1, 1, 1, 1]
    bulk_load = uuid4()
    with BulkLoader(demo.name) as loader:
        assert loader.add(bulk_load, rows).counts == {"ADDED": 6}
        assert loader.add(bulk_load, rows).counts == {"BULK_LOADED": 6}
        with Client(demo.name, namespace="b") as client:
            timer = client.get(UUID(bytes=raw[4]))
        assert timer is not None
        assert (timer.topic, timer.payload) == ("t0", raw[4])
        assert loader.cancel(rows) == {"CANCELLED": 6}
        assert loader.cancel(rows) == {"UNKNOWN": 6}


@pytest.mark.parametrize("wal", [False, True])
def test_answers_wait_for_the_disk_if_there_is_a_wal(
    daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wal: bool
) -> None:
    """The cold tier stores the answers, so the answered timers must survive a power cut."""
    demo = daemon("demo", *(("--wal-dir", str(tmp_path)) if wal else ()))
    asked, real = list[bool](), Batch.address

    def address(batch: Batch, session: int, sequence: int, durable: bool, clock: bool) -> None:
        asked.append(durable)
        real(batch, session, sequence, durable, clock)

    monkeypatch.setattr(Batch, "address", address)
    rows = pa.table({
        "namespace": ["a"], "key_type": ["str"], "key": pa.array([b"k"], pa.binary()),
        "topic": ["t"], "payload": pa.array([b"p"], pa.binary()), "delay": [3600.0], "row": [0],
    })  # fmt: skip
    with BulkLoader(demo.name) as loader:
        assert loader.add(uuid4(), rows).counts == {"ADDED": 1}
        assert loader.cancel(rows) == {"CANCELLED": 1}
    assert asked == [wal] * 2


@pytest.mark.tier("all")
def test_spark_runs_a_killed_task_again(
    spark: SparkSession, daemon: StartDaemon, tmp_path: Path
) -> None:
    demo = daemon("demo", "--capacity", "65536", "--payload-memory", "64M")
    report, died, paths = tmp_path / "report.json", tmp_path / "died", demo.paths

    def dies_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        if died.exists():
            return
        reader, end_s = Reader.attach(paths), time.monotonic() + PATIENCE_S
        while reader.stats()["expiries"] < 1000 and time.monotonic() < end_s:
            time.sleep(0.01)
        died.touch()
        os._exit(1)

    # the task writes four batches
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10000")
    rows = spark.range(0, 40_000, 1, 1).selectExpr(
        "concat('k', id) as key", "repeat('x', 400) as payload", "0.0D as delay"
    )
    (
        rows.mapInArrow(dies_once, rows.schema).write.format("purgatoryd").mode("append")
        .options(name="demo", directory=str(demo.dir), report=str(report)).save()
    )  # fmt: skip
    counts = json.loads(report.read_text())["counts"]
    assert counts["BULK_LOADED"] >= 1000
    assert sum(counts.values()) == 40_000
    has_expired(demo, 40_000)
    assert stats(demo)["adds"] == 40_000


@pytest.mark.tier("all")
def test_refusals_fail_the_write(spark: SparkSession, daemon: StartDaemon, tmp_path: Path) -> None:
    demo = daemon("demo", "--capacity", "10")
    rows = spark.range(0, 15, 1, 1).selectExpr("concat('k', id) as key", "3600.0D as delay")
    write = rows.write.format("purgatoryd").mode("append")
    with pytest.raises(PySparkException, match=r"5 rows were refused \(10 ADDED, 5 FULL\)"):
        write.options(name="demo", directory=str(demo.dir)).save()


# ---- files and their agent ---------------------------------------------------------------------


def test_files_go_to_their_daemons_once(daemon: StartDaemon, tmp_path: Path) -> None:
    one, two = daemon("one"), daemon("two")
    writer = files_writer(tmp_path)
    lost = writer.write(iter([filed(0, 50, "one", "two")]))
    done = writer.write(iter([filed(0, 30, "one", "two"), filed(30, 50, "one", "two")]))
    assert not list(tmp_path.glob("*/*.parquet"))
    writer.abort([lost])
    writer.commit([done, None])
    for host in (one, two):
        (path,) = tmp_path.glob(f"{host.name}/*.parquet")
        content = path.read_bytes()
        with BulkLoader(host.name) as loader:
            (found,) = agent.deliver(tmp_path, loader, credits=8)
            assert (found.left, found.answers.counts) == (False, {"ADDED": 25})
            path.write_bytes(content)  # as if the agent had been killed before it moved the file
            has_expired(host, 25)
            (again,) = agent.deliver(tmp_path, loader)
            assert again.answers.counts == {"BULK_LOADED": 25}
            assert list(agent.deliver(tmp_path, loader)) == []
        reported = json.loads((path.parent / "done" / f"{path.stem}.json").read_text())
        assert reported["counts"] == {"BULK_LOADED": 25}
    assert sorted(fired(one)) == sorted(f"k{i}" for i in range(0, 50, 2))


def test_a_file_stays_until_there_is_space(daemon: StartDaemon, tmp_path: Path) -> None:
    one = daemon("one", "--capacity", "10")
    writer = files_writer(tmp_path)
    rows = filed(0, 15, "one").set_column(
        1, "deadline", pa.array([2**51] * 15, pa.timestamp("us", "UTC"))
    )
    writer.commit([writer.write(iter([rows]))])
    with BulkLoader("one") as loader:
        (found,) = agent.deliver(tmp_path, loader)
        assert found.left
        assert found.answers.refusals == {"FULL": 5}
        with Client("one") as client:
            client.cancel_many([f"k{i}" for i in range(5)])
        (found,) = agent.deliver(tmp_path, loader)
        assert (found.left, found.answers.counts) == (False, {"BULK_LOADED": 10, "ADDED": 5})
    assert stats(one)["live"] == 10


def test_the_agent_is_alone(daemon_dir: Path, tmp_path: Path) -> None:
    with agent.working(tmp_path, "one"), pytest.raises(LakeInUse):
        list(agent.deliver(tmp_path, BulkLoader("one")))
    with pytest.raises(InvalidName):
        list(agent.deliver(tmp_path, BulkLoader("../one")))


def spooled(path: Path, keys: list[str], **other: str) -> None:
    """Write a file of timers in the format that the agent reads."""
    usual = {"namespace": "default", "key_type": "str", "topic": "t"} | other
    columns: dict[str, Any] = {name: [value] * len(keys) for name, value in usual.items()}
    columns |= {
        "key": pa.array([key.encode() for key in keys], pa.binary()),
        "payload": pa.array([b""] * len(keys), pa.binary()),
        "row": list(range(len(keys))),
        "delay": [3600.0] * len(keys),
    }
    rows = pa.table(columns)
    pq.write_table(rows.replace_schema_metadata({agent.BULK_LOAD: uuid4().bytes}), path)


def test_a_bad_file_is_set_aside_and_the_others_go_on(daemon: StartDaemon, tmp_path: Path) -> None:
    one, folder = daemon("one"), tmp_path / "one"
    folder.mkdir()
    (folder / "bytes.parquet").write_bytes(b"nothing")
    pq.write_table(pa.table({"key": ["x"]}), folder / "foreign.parquet")
    spooled(folder / "key.parquet", [*(f"a{i}" for i in range(8)), ""])
    spooled(folder / "kind.parquet", ["b"], key_type="uuid")
    spooled(folder / "name.parquet", ["c"], namespace="n" * 64)
    spooled(folder / "pages.parquet", ["d" * 100])
    content = (folder / "pages.parquet").read_bytes()
    (folder / "pages.parquet").write_bytes(b"PAR1" + bytes(len(content) // 4) + content[
        4 + len(content) // 4 :
    ])  # fmt: skip
    named = pa.table({"key": ["e"]}).replace_schema_metadata({agent.BULK_LOAD: uuid4().bytes})
    pq.write_table(named, folder / "short.parquet")
    spooled(folder / "whole.parquet", ["f", "g"])
    with BulkLoader("one") as loader:
        *bad, good = agent.deliver(tmp_path, loader, credits=8)
        assert list(agent.deliver(tmp_path, loader)) == []
    names = ["bytes", "foreign", "key", "kind", "name", "pages", "short"]
    assert [found.path for found in bad] == [folder / "refused" / f"{n}.parquet" for n in names]
    for found in bad:
        reported = json.loads(found.path.with_suffix(".json").read_text())
        assert reported["bad"] == found.bad != ""
        assert reported["counts"] == ({"ADDED": 8} if found.path.stem == "key" else {})
    assert (good.path, good.bad) == (folder / "done" / "whole.parquet", "")
    assert stats(one)["live"] == 10


class Failing:
    """Stand-in for a BulkLoader. It raises an error for some keys. `times`: by key, how often the
    error is raised, and the error."""

    name = "one"

    def __init__(self, times: dict[bytes, tuple[int, Exception]]) -> None:
        self.times = times
        self.added: list[bytes] = []

    def add(self, bulk_load: UUID, rows: pa.Table) -> Answers:
        """Add rows, or raise the error of one of their keys."""
        keys = rows["key"].to_pylist()
        for key in keys:
            left, error = self.times.get(key, (0, None))
            if error and left:
                self.times[key] = (left - 1, error)
                raise error
        self.added += keys
        return Answers(Counter(ADDED=len(keys)))


def test_refused_rows_of_a_file_delay_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "PAUSE_S", 0.0)
    folder = tmp_path / "one"
    folder.mkdir()
    for name in "abcd":
        spooled(folder / f"{name}.parquet", [f"{name}{n}" for n in range(6)])
    daemon = Failing(
        {
            b"a3": (9, MessageRefused(WireError.TOO_LARGE, "TOO_LARGE", (1, 2))),
            b"b0": (2, SessionExpired(7, 1)),
            b"c5": (1, MessageRefused(WireError.BULK_LOADS_FULL, "BULK_LOADS_FULL", (1, 2))),
            b"d0": (3, DaemonUnreachable("one", "nowhere", 1.0)),
        }
    )
    with pytest.raises(DaemonUnreachable):
        list(agent.deliver(tmp_path, daemon, credits=2))
    assert [path.name for path in folder.glob("*.parquet")] == ["d.parquet"]
    reported = json.loads((folder / "refused" / "a.json").read_text())
    assert ("TOO_LARGE" in reported["bad"], reported["counts"]) == (True, {"ADDED": 2})
    (last,) = agent.deliver(tmp_path, daemon, credits=2)
    assert (last.path, last.bad, last.left) == (folder / "done" / "d.parquet", "", False)
    assert daemon.added == [
        b"a0",
        b"a1",
        *(f"{name}{n}".encode() for name in "bcd" for n in range(6)),
    ]


# ---- the cold tier -----------------------------------------------------------------------------


def cold_rows(first: int, last: int, due_ns: int) -> pa.Table:
    rows = [
        {"namespace": "shop", "key_type": "str", "key": b"k%d" % i, "topic": "t", "payload": b"p",
         "deadline_ns": due_ns + i}
        for i in range(first, last)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows)


def test_windows_that_are_killed_fire_every_timer_once(
    daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark_of_python(monkeypatch)
    small_pieces(monkeypatch, 50)
    demo, tier, past_ns = daemon(), Tier(tmp_path), time.time_ns() - 2 * HOUR_NS
    with BulkLoader(demo.name) as loader:
        mortal, deaths, killed = Mortal(monkeypatch, loader), 0, True

        def bring() -> object:
            return promote(NO_SPARK, tier, past_ns + 10**6, loader)

        while killed:
            first = deaths * 100
            cold.bulk_load(
                tier, cold_rows(first, first + 100, past_ns), f"bulk load {deaths}", loader
            )
            deaths += 1
            killed = mortal.run(bring, deaths)
            bring()
    assert deaths >= 7
    count = deaths * 100
    has_expired(demo, count)
    assert sorted(fired(demo, "t", "shop")) == sorted(f"k{i}" for i in range(count))


@pytest.mark.tier("all")
def test_windows_whose_process_is_killed_fire_every_timer_once(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    demo = daemon()
    command = [sys.executable, str(KILLER), str(tmp_path), demo.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    windows = int(done.stdout)
    assert windows > 20
    has_expired(demo, 6 * windows)
    assert sorted(fired(demo, "t", "shop")) == sorted(
        f"w{window}:{n}" for window in range(1, windows + 1) for n in range(6)
    )
    assert stats(demo)["live"] == 5 * windows


@pytest.mark.tier("all")
def test_a_promotion_whose_spark_is_killed_goes_on(
    spark: SparkSession, daemon: StartDaemon, tmp_path: Path
) -> None:
    """Spark is killed twice. Before the second kill, the promoted timers have already fired."""
    demo, tier, rows = daemon(), Tier(tmp_path), rows_of(1)
    with BulkLoader(demo.name) as hot:
        cold.bulk_load(tier, spark.createDataFrame(rows), "one", hot)
        for fencing_token, step in enumerate(("stage_slice", "add"), 1):
            command = (str(tmp_path), demo.name, str(UNTIL_NS), step)
            done = subprocess.run(
                [sys.executable, PROMOTION, *command], start_new_session=True, check=False
            )
            assert done.returncode == -signal.SIGKILL
            begun = tier.unfinished()
            assert begun is not None
            assert begun.fencing_token == fencing_token
        has_expired(demo, 5)
        cold.cancel(tier, rows.slice(FAR[0], 1), hot)
        (window,) = promote(spark, tier, UNTIL_NS, hot)
    assert (window.results, window.cancelled) == ({"BULK_LOADED": 5, "ADDED": 6}, 1)
    has_expired(demo, len(DUE))
    assert sorted(fired(demo, "t", "shop")) == [key_of(1, n).decode() for n in DUE]
    assert stats(demo)["live"] == len(FAR) - 1
    assert cold.verify(spark, tier)[1] == []
    assert not [*tmp_path.rglob("*.new")]


def test_a_cancel_reaches_timers_of_the_daemon(
    daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark_of_python(monkeypatch)
    demo, tier, due_ns = daemon(), Tier(tmp_path), time.time_ns() + HOUR_NS
    rows = cold_rows(0, 100, due_ns)
    with BulkLoader(demo.name) as loader:
        cold.bulk_load(tier, rows, "one", loader)
        promote(NO_SPARK, tier, due_ns + 50, loader)
        assert cold.cancel(tier, rows.slice(45, 10), loader) == {"CANCELLED": 5, "UNKNOWN": 5}
        assert stats(demo)["live"] == 45
        (window,) = promote(NO_SPARK, tier, due_ns + 100, loader)
        assert window.results == {"ADDED": 45}
    with Client(demo.name, namespace="shop") as client:
        timer = client.get("k0")
    assert timer is not None
    assert timer.deadline_at is not None
    assert timer.deadline_at.timestamp() == pytest.approx(due_ns / 1e9, abs=1e-3)


def test_a_window_without_space_goes_on_later(
    daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark_of_python(monkeypatch)
    demo, tier, due_ns = (
        daemon("demo", "--capacity", "60"),
        Tier(tmp_path),
        time.time_ns() + HOUR_NS,
    )
    rows = cold_rows(0, 100, due_ns)
    with BulkLoader(demo.name) as loader:
        cold.bulk_load(tier, rows, "one", loader)
        with pytest.raises(BulkLoadRefused) as caught:
            promote(NO_SPARK, tier, due_ns + 100, loader)
        assert caught.value.counts == {"ADDED": 60, "FULL": 40}
        assert tier.unfinished() is not None
        loader.cancel(rows.slice(0, 40))
        (window,) = promote(NO_SPARK, tier, due_ns + 100, loader)
        assert window.results == {"BULK_LOADED": 60, "ADDED": 40}
    assert {key[2] for key in keys_in(rows.slice(40))} == {b"k%d" % i for i in range(40, 100)}
    assert stats(demo)["live"] == 60


def test_a_promoter_that_wakes_up_late_adds_nothing(
    daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark_of_python(monkeypatch)
    small_pieces(monkeypatch, 10)
    demo, tier, due_ns = daemon(), Tier(tmp_path), time.time_ns() + HOUR_NS
    stalled, wakes, errors = Event(), Event(), list[BaseException]()

    def stalls(_: int) -> None:
        if stats(demo)["live"] == 20:
            stalled.set()
            assert wakes.wait(PATIENCE_S)

    def old_run() -> None:
        with BulkLoader(demo.name) as old:
            try:
                promote(NO_SPARK, Tier(tmp_path), due_ns + 100, old, stalls)
            except WindowTaken as error:
                errors.append(error)

    with BulkLoader(demo.name) as loader:
        cold.bulk_load(tier, cold_rows(0, 60, due_ns), "one", loader)
        old = Thread(target=old_run)
        old.start()
        assert stalled.wait(PATIENCE_S)
        (tmp_path / "windows" / "promoter").unlink()  # the stalled run loses its lock

        def wakes_the_old(_: int) -> None:
            wakes.set()
            old.join(PATIENCE_S)
            assert not old.is_alive()

        (window,) = promote(NO_SPARK, tier, due_ns + 100, loader, wakes_the_old)
    assert [str(error) for error in errors] == [
        f"a run newer than 1 promotes window {window.id}: this run adds no more timers"
    ]
    assert (window.fencing_token, window.results) == (2, {"BULK_LOADED": 20, "ADDED": 40})
    assert (stats(demo)["adds"], stats(demo)["live"]) == (60, 60)


def test_answers_add_up() -> None:
    one = Answers()
    one.counts.update({"ADDED": 3, "FULL": 2, "BULK_LOADED": 4})
    one.add(one)
    assert (one.refused, one.refusals) == (4, {"FULL": 4})
