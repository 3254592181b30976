"""Spark reads WALs and the lake: both contain equal rows, and each segment counts once."""

from __future__ import annotations

import json
import pickle
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import wal_segment_writer as sw
from click.testing import CliRunner
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from stored_arena import WALS, StoredWal
from stream_killed import KILLED_AT, keep, rows, run

from purgatoryd.cli.app import app
from purgatoryd.pipeline import cache
from purgatoryd.pipeline.lake import BRONZE as BRONZE_FOLDER
from purgatoryd.pipeline.lake import OPENINGS, Lake, Manifest
from purgatoryd.pipeline.raw import RawShipper, ingest
from purgatoryd.pipeline.schemas import BRONZE
from purgatoryd.pipeline.ship import Shipper
from purgatoryd.pipeline.source import Settings, WalReader, WalStream, read_range
from purgatoryd.pipeline.sources import openings
from purgatoryd.pipeline.tiers import read_events, read_openings
from purgatoryd.shm_layout.errors import BadPath, InvalidSetting, UnknownSetting, WalDamaged
from purgatoryd.shm_layout.retention_holds import read_holds
from purgatoryd.shm_layout.wal import SEGMENT, file_name, segments

pytestmark = pytest.mark.tier("test")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipeline.md"
STREAM = Path(__file__).parents[1] / "support" / "stream_killed.py"
STORED = max(WALS, key=lambda folder: folder.name)
"""Folder of the stored WAL with the newest format."""


@pytest.fixture
def wal(tmp_path: Path) -> Path:
    return StoredWal(STORED, tmp_path / "wal" / "demo").directory


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    # These characters are special in the path patterns of Spark's readers.
    folder = tmp_path / "a {lake}, [1] or *"
    folder.mkdir()
    return Lake(folder)


def ship(wal: Path, lake: Lake) -> None:
    shipper = Shipper(wal, lake, "node")
    assert list(shipper.poll())
    shipper.close()


def raw(spark: SparkSession, wal: Path, **options: str) -> DataFrame:
    return spark.read.format("purgatoryd").options(node="node", **options).load(str(wal))


@pytest.mark.tier("all")
def test_both_ways_give_equal_rows_and_no_segment_counts_twice(
    spark: SparkSession, wal: Path, lake: Lake
) -> None:
    """The test reads raw segments, segments in the lake, and both together."""
    hot = rows(raw(spark, wal))
    ship(wal, lake)
    newest = segments(wal)[-1].lsn
    assert rows(read_events(spark, lake)) == [row for row in hot if row[4] < newest]
    assert [row[4:7] for row in rows(read_events(spark, lake, [wal]))] == [row[4:7] for row in hot]
    segments(wal)[0].path.unlink()
    kinds = read_events(spark, lake, [wal]).groupBy("kind").count()
    assert sum(row["count"] for row in kinds.collect()) == len(hot)


def test_only_the_requested_part_of_the_lake_is_read(
    spark: SparkSession, wal: Path, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    ship(wal, lake)
    read_events(spark, lake).where("at > timestamp_micros(7)").select("lsn").explain()
    plan = capsys.readouterr().out
    assert "ReadSchema: struct<lsn:bigint,at:timestamp>" in plan
    assert "GreaterThan(at," in plan


@pytest.mark.costly("each tier is read by several Spark jobs")
def test_openings_are_read_from_both_tiers(spark: SparkSession, wal: Path, lake: Lake) -> None:
    before = rows(read_openings(spark, None, [wal]))
    ship(wal, lake)
    assert {row[3] for row in before} == {one.identity.first_lsn for one in openings(wal)}
    assert [row[4:] for row in rows(read_openings(spark, lake, [wal]))] == [
        row[4:] for row in before
    ]


@pytest.mark.tier("all")
def test_ingest_of_raw_segments_gives_the_lake_that_ship_does(
    spark: SparkSession, wal: Path, lake: Lake
) -> None:
    assert spark  # the command uses this Spark session
    ship(wal, lake)
    raw_lake = lake.root.parent / "raw [1]"
    options = ("--wal-dir", str(wal.parent), "--lake", str(raw_lake), "--json")
    reported = [CliRunner().invoke(app, ["pipeline", "ingest", *options]) for _ in range(2)]
    assert [one.exit_code for one in reported] == [0, 0], reported[0].output
    count = len(lake.manifests()) + len(lake.manifests(OPENINGS))
    assert [json.loads(one.stdout)["raw"] for one in reported] == [count, 0]
    ours = Lake(raw_lake)
    for table in (BRONZE_FOLDER, OPENINGS):
        theirs = lake.manifests(table)
        for mine, other in zip(ours.manifests(table), theirs, strict=True):
            assert replace(mine, node=other.node, bytes=other.bytes) == other
            assert mine.bytes == ours.data(mine).stat().st_size
            assert bronze_rows(ours, mine) == bronze_rows(lake, other)
    assert ours.names(theirs[0].daemon).to_json() == lake.names(theirs[0].daemon).to_json()
    assert {hold.lsn for hold in read_holds(wal).values()} == {segments(wal)[-1].lsn}
    assert not list((raw_lake / "raw").rglob("*.parquet"))
    assert [path for path in raw_lake.rglob("*") if path.stat().st_mode & 0o077] == []


def bronze_rows(lake: Lake, manifest: Manifest) -> list[dict[str, Any]]:
    """Read the rows of a manifest's file without Spark; leave out the column with the host's
    name."""
    found = pq.read_table(lake.data(manifest), partitioning=None)
    assert found.schema.names == BRONZE.names
    rows: list[dict[str, Any]] = found.drop_columns(["node"]).to_pylist()
    return rows


def test_raw_ingest_takes_what_is_whole_and_names_the_damage(
    spark: SparkSession, tmp_path: Path, lake: Lake
) -> None:
    wal = tmp_path / "wal" / "demo"
    sw.write(wal, sw.segment([*sw.names(), sw.arm(3)]))
    sw.write(wal, sw.segment([sw.arm(4)], 4, first_group=2)[:-40], 4)
    sw.write(wal, sw.segment([sw.arm(5)], 5, first_group=3, seal=False), 5)
    with pytest.raises(WalDamaged) as caught:
        ingest(spark, lake, wal.parent)
    assert caught.value.path == str(wal / "0000000000000004.wal")
    (manifest,) = lake.manifests()
    assert (manifest.rows, manifest.first_lsn, manifest.last_lsn) == (3, 1, 3)


def test_a_segment_without_its_end_is_not_read_short(tmp_path: Path) -> None:
    """The middle segment has its full size, but has lost its trailer. The newest segment has no
    trailer yet."""
    wal = tmp_path / "wal" / "demo"
    sw.write(wal, sw.segment([*sw.names(), sw.arm(3)]))
    sw.write(wal, sw.segment([sw.arm(4)], 4, first_group=2, seal=False), 4)
    sw.write(wal, sw.segment([sw.arm(6)], 6, first_group=4, seal=False), 6)
    settings = Settings.of({"path": str(wal), "columns": "lsn"})
    read = WalReader(settings).partitions()
    streamed = WalStream(settings).partitions({"lsn": 1}, {"lsn": 6})
    for parts, whole in ((read, (0, 2)), (streamed, (0,))):
        assert [sum(b.num_rows for b in read_range(settings, parts[n])) for n in whole] == [
            3, 1][: len(whole)]  # fmt: skip
        with pytest.raises(WalDamaged, match="ends before the next segment") as caught:
            list(read_range(settings, parts[1]))
        assert caught.value.path == str(wal / "0000000000000004.wal")


def test_a_segment_is_ingested_completely_or_not_at_all(
    tmp_path: Path, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment changes after `ingest` has checked it and before it decodes the records."""
    wal = tmp_path / "wal" / "demo"
    sw.write(wal, sw.segment([*sw.names(), sw.arm(3)]))
    sw.write(wal, sw.segment([sw.arm(4)], 4, first_group=2, seal=False), 4)
    monkeypatch.setattr(RawShipper, "_decoded", lambda *_: {})
    with pytest.raises(BadPath, match="removed or changed"):
        ingest(cast("SparkSession", None), lake, wal.parent)
    assert lake.manifests() == []


def test_an_empty_lake_is_an_empty_table(spark: SparkSession, lake: Lake) -> None:
    found = read_events(spark, lake)
    assert found.schema == BRONZE.spark()
    assert found.isEmpty()


@pytest.mark.tier("all")
def test_a_filter_of_one_query_does_not_reach_another(spark: SparkSession, wal: Path) -> None:
    """If the source accepted a pushed filter, Spark would apply this filter to the next query of
    the same DataFrame as well, and to the other branch of a union. Both would return too few rows.
    So the source accepts no filter."""
    all_ = raw(spark, wal, columns="lsn,kind")
    count = all_.count()
    arms, fires = all_.filter("kind = 'arm'"), all_.filter("kind = 'fire'")
    armed, fired = arms.count(), fires.count()
    assert 0 < armed < count
    assert 0 < fired < count
    assert all_.count() == count
    assert arms.union(fires).count() == armed + fired


def test_columns_and_a_time_range_are_options(spark: SparkSession, wal: Path) -> None:
    at = sorted(row["at_us"] for row in raw(spark, wal, columns="at").selectExpr(
        "unix_micros(at) at_us").collect())  # fmt: skip
    middle, end = at[len(at) // 3], at[2 * len(at) // 3]
    part = raw(spark, wal, columns="lsn,payload", payloads="off", from_us=str(middle),
               to_us=str(end))  # fmt: skip
    found = part.collect()
    assert part.columns == ["lsn", "payload"]
    assert len(found) == sum(middle <= us < end for us in at)
    assert all(row["payload"] is None for row in found)


@pytest.mark.tier("all")
def test_a_stream_killed_at_each_step_of_a_batch_has_each_row_once(
    spark: SparkSession, wal: Path, tmp_path: Path
) -> None:
    """The steps are: Spark logs the offsets, the source reads, the rows are stored, and Spark logs
    the commit of the batch."""
    checkpoint, aside, retained = (tmp_path / name for name in ("checkpoint", "aside", "kept"))
    retained.mkdir()

    def each(frame: DataFrame, number: int) -> None:
        keep(frame, number, retained)

    def before(frame: DataFrame, number: int) -> None:
        if number == KILLED_AT + 1:
            raise RuntimeError("killed")
        each(frame, number)

    def unread(frame: DataFrame, number: int) -> None:
        next_file().rename(aside)
        each(frame, number)

    def next_file() -> Path:
        return wal / file_name(batches(retained)[-1][-1][LSN] + 1, SEGMENT)

    process_is_killed(wal, checkpoint, retained)
    killed(spark, wal, checkpoint, before, "killed")
    for name in ("{}", ".{}.crc"):
        (checkpoint / "offsets" / name.format(KILLED_AT + 1)).unlink()
    killed(spark, wal, checkpoint, unread, "cannot be read")
    aside.rename(next_file())
    run(spark, wal, checkpoint, each)
    upto = segments(wal)[-1].lsn
    assert [row for batch in batches(retained) for row in batch] == [
        row for row in rows(raw(spark, wal)) if row[LSN] < upto
    ]
    assert max(map(len, batches(retained))) <= 2000
    assert 1 < read_holds(wal)["stream"].lsn <= upto


LSN = BRONZE.names.index("lsn")


def batches(retained: Path) -> list[list[tuple[Any, ...]]]:
    """Return the rows that a stream has stored, one list per batch."""
    paths = sorted(retained.iterdir(), key=lambda path: int(path.name))
    return [pickle.loads(path.read_bytes()) for path in paths]


def process_is_killed(wal: Path, checkpoint: Path, retained: Path) -> None:
    """Kill a stream after the rows of a batch are stored, before Spark has logged the commit."""
    done = subprocess.run(
        [sys.executable, STREAM, wal, checkpoint, retained], start_new_session=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert len(batches(retained)) == KILLED_AT + 1
    assert (checkpoint / "offsets" / str(KILLED_AT)).exists()
    assert not (checkpoint / "commits" / str(KILLED_AT)).exists()


def killed(
    spark: SparkSession, wal: Path, checkpoint: Path, each: Callable[[DataFrame, int], None],
    how: str,
) -> None:  # fmt: skip
    """Run the stream, which must end with this error."""
    with pytest.raises(StreamingQueryException, match=how):
        run(spark, wal, checkpoint, each)


@pytest.mark.tier("all")
def test_the_page_s_examples_run(
    spark: SparkSession,
    wal: Path,
    lake: Lake,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ship(wal, lake)
    lake.root.rename(lake.root.with_name("lake"))  # the page calls it "lake"
    # an absolute path, because the JVM keeps the working directory of its start
    folder = f"{lake.root.parent}/"
    shared: dict[str, object] = {}
    for block in re.findall(r"^```pyspark\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(re.sub(r'"(lake|wal)', rf'"{folder}\1', block), shared)
    assert shared["spark"] is spark
    assert "outcome" in capsys.readouterr().out


# ---- without a session -----------------------------------------------------------------------


def test_a_range_that_is_gone_is_named(wal: Path) -> None:
    from purgatoryd.pipeline.source import WalStream

    stream = WalStream(Settings.of({"path": str(wal)}))
    first = stream.initialOffset()
    end = stream.latestOffset(first, stream.getDefaultReadLimit())
    assert end["lsn"] == segments(wal)[-1].lsn
    segments(wal)[0].path.unlink()
    with pytest.raises(WalDamaged) as caught:
        stream.partitions(first, end)
    assert (caught.value.first_lsn, caught.value.last_lsn) == (1, segments(wal)[0].lsn - 1)


def test_a_segment_that_is_gone_between_others_is_named(tmp_path: Path) -> None:
    from purgatoryd.pipeline.source import WalStream

    sw.write(tmp_path, sw.segment([*sw.names(), sw.arm(3)]))
    for lsn in (4, 5, 6):
        sw.write(tmp_path, sw.segment([sw.arm(lsn)], lsn, first_group=lsn - 2), lsn)
    stream = WalStream(Settings.of({"path": str(tmp_path)}))

    def lsns() -> list[int]:
        parts = stream.partitions({"lsn": 1}, {"lsn": 6})
        batches = [batch for part in parts for batch in stream.read(part)]
        return [lsn for batch in batches for lsn in batch["lsn"].to_pylist()]

    assert lsns() == [1, 2, 3, 4, 5]
    (tmp_path / file_name(4, SEGMENT)).unlink()
    with pytest.raises(WalDamaged, match="the next segment is missing") as caught:
        lsns()
    assert (caught.value.first_lsn, caught.value.last_lsn) == (4, 4)


@pytest.mark.parametrize("at", [0, -90], ids=["header", "record"])
def test_a_damaged_segment_does_not_affect_a_reader_that_skips_it(tmp_path: Path, at: int) -> None:
    """The reader requests no rows of the damaged segment, and no names that this segment may have
    created."""
    from purgatoryd.pipeline.source import WalReader

    damaged = bytearray(sw.segment([sw.arm(4, b"the damaged one")], 4, first_group=2))
    damaged[at] ^= 1
    sw.write(tmp_path, sw.segment([*sw.names(), sw.arm(3)]))
    sw.write(tmp_path, bytes(damaged), 4)
    sw.write(tmp_path, sw.segment([sw.arm(5)], 5, first_group=3), 5)

    def read(lsn: int, **options: str) -> list[dict[str, Any]]:
        files = json.dumps([file_name(lsn, SEGMENT)])
        reader = WalReader(Settings.of({"path": str(tmp_path), "files": files, **options}))
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return [row for batch in batches for row in batch.to_pylist()]

    assert [(row["lsn"], row["namespace"]) for row in read(1)][-1] == (3, "n")
    assert read(5, columns="lsn,key") == [{"lsn": 5, "key": b"key"}]
    for asked in (4, 5):
        with pytest.raises(WalDamaged, match=file_name(4, SEGMENT)):
            read(asked)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """Return a counter of complete reads by file. Reads of a header alone are not counted."""
    found: Counter[Path] = Counter()
    real = cache.read

    def counted(path: Path, *rest: Any, **options: Any) -> Any:
        found[path] += "upto" not in options
        return real(path, *rest, **options)

    monkeypatch.setattr(cache, "read", counted)
    return found


def test_a_time_range_leaves_out_segments_that_the_lake_tells_of(
    wal: Path, lake: Lake, reads: Counter[Path]
) -> None:
    """The newest segment is always read, because its times are unknown. Only requested columns are
    read."""
    ship(wal, lake)
    before, one, *_, last = lake.manifests()
    files = {file.lsn: file.path for file in segments(wal)}
    assert before.wall_to_us == one.wall_from_us
    for bounds, opened in (
        ((one.wall_from_us + 1, one.wall_to_us), [one]),
        ((one.wall_from_us, one.wall_from_us + 1), [before, one]),
        ((last.wall_to_us + 1, 1 << 62), []),
        ((0, before.wall_from_us), []),
    ):
        reads.clear()
        lsns = lsns_of(wal, lake, *bounds)
        assert {path for path, count in reads.items() if count} == {
            files[lsn] for lsn in (*(manifest.first_lsn for manifest in opened), max(files))
        }
        assert lsns == lsns_of(wal, None, *bounds)


def lsns_of(wal: Path, lake: Lake | None, from_us: int, to_us: int) -> list[int]:
    from purgatoryd.pipeline.source import WalReader

    given = {"path": str(wal), "columns": "lsn", "from_us": str(from_us), "to_us": str(to_us)}
    reader = WalReader(Settings.of(given | ({} if lake is None else {"lake": str(lake.root)})))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert {tuple(batch.schema.names) for batch in batches} <= {("lsn",)}
    return [lsn for batch in batches for lsn in batch["lsn"].to_pylist()]


def test_a_stream_reads_each_segment_twice_however_small_its_batches_are(
    wal: Path, reads: Counter[Path]
) -> None:
    """The stream reads each sealed segment once for the names and once for the rows."""
    from purgatoryd.pipeline.source import WalStream

    stream = WalStream(Settings.of({"path": str(wal), "max_rows": "10"}))
    sealed = segments(wal)[:-1]
    at, lsns = stream.initialOffset(), []
    while (end := stream.latestOffset(at, stream.getDefaultReadLimit())) != at:
        for part in stream.partitions(at, end):
            lsns += [lsn for batch in stream.read(part) for lsn in batch["lsn"].to_pylist()]
        at = end
    assert lsns == list(range(1, segments(wal)[-1].lsn))
    assert [reads[file.path] for file in sealed] == [2] * len(sealed)
    assert reads[segments(wal)[-1].path] == 0


def test_nothing_sealed_is_nothing_new(tmp_path: Path) -> None:
    from purgatoryd.pipeline.source import WalStream

    sw.write(tmp_path, sw.segment(sw.names(), seal=False))
    stream = WalStream(Settings.of({"path": str(tmp_path)}))
    first = stream.initialOffset()
    assert stream.latestOffset(first, stream.getDefaultReadLimit()) == first
    assert stream.partitions(first, first) == []


def test_no_file_has_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    read = spark.read.format("purgatoryd")
    assert read.load(str(tmp_path)).count() == 0
    sw.write(tmp_path, sw.segment(sw.names(), seal=False))
    assert read.option("files", '["gone"]').load(str(tmp_path)).count() == 0


def test_a_missing_segment_is_not_skipped(tmp_path: Path) -> None:
    from purgatoryd.pipeline.source import WalReader

    sw.write(tmp_path, sw.segment(sw.names(), seal=False))
    asked = {"path": str(tmp_path), "files": '["00000000000000ff.wal"]'}
    with pytest.raises(BadPath, match="removed before it was read"):
        WalReader(Settings.of(asked)).partitions()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"columns": "lsn,nothing"}, InvalidSetting),
        ({"payloads": "maybe"}, InvalidSetting),
        ({"from_us": "yesterday"}, InvalidSetting),
        ({"files": json.dumps([]), "path": "/nowhere"}, BadPath),
        ({"files": "nope"}, InvalidSetting),
        ({"files": "5"}, InvalidSetting),
        ({"max_rows": "-5"}, InvalidSetting),
        ({"column": "lsn"}, UnknownSetting),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused(
    tmp_path: Path, options: dict[str, str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Settings.of({"path": str(tmp_path), **options})
