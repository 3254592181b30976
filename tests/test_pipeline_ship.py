"""`pipeline ship`: every record of a WAL gets into the lake once, despite kills and errors."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import wal_segment_writer as sw
import wal_writer as ww
from click.testing import CliRunner, Result
from machine import needs
from real_daemon import StartDaemon, eventually
from stored_arena import WALS, StoredWal

from purgatoryd.cli.app import app
from purgatoryd.clients import Admin, BulkLoad, Client, Consumer, Status, Subscriber
from purgatoryd.pipeline import cache
from purgatoryd.pipeline.decode import Decoder
from purgatoryd.pipeline.lake import BRONZE, OPENINGS, Lake
from purgatoryd.pipeline.pace import Pace
from purgatoryd.pipeline.schemas import BRONZE as BRONZE_TABLE
from purgatoryd.pipeline.ship import Shipper, hold_name
from purgatoryd.pipeline.sources import names_of
from purgatoryd.pipeline.tiers import Place, tiers
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.errors import (
    LakeBroken,
    LakeInUse,
    PurgatorydError,
    WalDamaged,
    WalMismatch,
)
from purgatoryd.shm_layout.page_cache import resident
from purgatoryd.shm_layout.retention_holds import RetentionHold, read_holds, set_hold
from purgatoryd.shm_layout.wal import (
    SEGMENT,
    Frame,
    Walk,
    contents,
    file_name,
    segments,
    snapshots,
)

pytestmark = pytest.mark.tier("test")

KILLER = Path(__file__).parent / "support" / "ship_killed.py"


@pytest.fixture(params=WALS, ids=lambda folder: folder.name)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The WAL of a released version; its newest segment is not sealed."""
    return StoredWal(request.param, tmp_path / "wal" / "demo").directory


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    (tmp_path / "lake").mkdir()
    return Lake(tmp_path / "lake")


def shipped(wal: Path, lake: Lake) -> int:
    """Ship all sealed segments and all snapshots; return the number of these files."""
    shipper = Shipper(wal, lake, "node")
    try:
        return len(list(shipper.poll()))
    finally:
        shipper.close()


def rows_of(lake: Lake, table: str = BRONZE) -> list[dict[str, Any]]:
    found = [pq.read_table(lake.data(m)).to_pylist() for m in lake.manifests(table)]
    return [row for rows in found for row in rows]


def frames_of(wal: Path) -> list[Frame]:
    """Return the records of all sealed segments, read without the pipeline's decoder."""
    walk, frames = Walk(), []
    for file in segments(wal)[:-1]:
        walk.enter(file.path)
        frames += list(walk.frames())
    return frames


def key_bytes(key: object) -> bytes:
    if isinstance(key, UUID):
        return key.bytes
    return key.encode() if isinstance(key, str) else bytes(key)  # type: ignore[call-overload]


def tree(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


# ---- contents of the lake --------------------------------------------------------------------


def test_every_record_is_in_the_lake_once(stored: Path, lake: Lake) -> None:
    count = shipped(stored, lake)
    assert count == len(segments(stored)) - 1 + len(snapshots(stored))
    rows, frames = rows_of(lake), frames_of(stored)
    assert [(row["lsn"], row["kind"]) for row in rows] == [(f.lsn, f.kind) for f in frames]
    for row, frame in zip(rows, frames, strict=True):
        assert_same(row, frame)
    assert all(row["topic"] for row in rows if row["kind"] in ("arm", "watch", "fire", "outcome"))
    heads = [row for row in rows_of(lake, OPENINGS) if row["kind"] == "head"]
    assert all(row["payload_bytes"] >= row["count"] for row in heads)
    assert len(heads) == len(snapshots(stored))
    if any(row["kind"] == "opened" for row in rows):
        assert {row["worker"] for row in rows if row["session"]} == {"1000:1"}


TIMES = {"arm": "armed_ns", "watch": "armed_ns", "move": "at_ns", "end": "at_ns",
         "fire": "fired_ns", "outcome": "ended_ns", "sent": "built_ns"}  # fmt: skip

TIMESTAMPS = {"sent_boot_ns": "sent_ns", "received_boot_ns": "received_ns",
        "applied_boot_ns": "applied_ns", "done_boot_ns": "done_ns"}  # fmt: skip


def signed(value: int) -> int:
    """Return a value as a signed number of 64 bits, as in the lake."""
    return value - (1 << 64) if value >> 63 else value


def assert_same(row: dict[str, Any], frame: Frame) -> None:
    """Check that the row has the values of the record."""
    found, fields = contents(frame), frame.fields
    if found.key:
        assert row["key"] == key_bytes(found.key)
    if found.payload is not None:
        assert (row["payload"], row["payload_len"]) == (found.payload, len(found.payload))
    ended = {name: frame.asked.get(name) for name in ("deadline_ns", "bulk_loaded")}
    reported = fields | (ended if frame.kind == "end" else {})
    for name in ("ticket", "deadline_ns", "slot", "watermark"):
        assert row[name] == reported.get(name)
    came = reported.get("bulk_loaded") or (frame.kind == "arm" and fields["in_bulk_load"])
    assert bool(row["bulk_loaded"]) == bool(came)
    if frame.kind in TIMES:
        assert row["at_ns"] == fields[TIMES[frame.kind]]
    for prefix, timestamps in (("", frame.timestamps), ("replaced_", frame.replaced)):
        for name, value in timestamps.items():
            assert (row[prefix + TIMESTAMPS.get(name, name)] or 0) == signed(value)
    assert (row["ended_by"] or 0) == signed(frame.asked.get("session", 0))
    assert (row["ended_batch"] or 0) == frame.asked.get("sequence", 0)
    if frame.kind == "arm":
        assert row["replaced_deadline_ns"] == ended["deadline_ns"]
        assert bool(row["replaced_bulk_loaded"]) == bool(ended["bulk_loaded"])
        assert (row["ended_boot_ns"] or 0) == bool(fields["replaced"]) * fields["armed_boot_ns"]


def test_nothing_is_shipped_twice(stored: Path, lake: Lake) -> None:
    shipped(stored, lake)
    before = tree(lake.root)
    assert shipped(stored, lake) == 0
    assert tree(lake.root) == before


def test_manifests_say_what_is_in_the_files(stored: Path, lake: Lake) -> None:
    shipped(stored, lake)
    for table in (BRONZE, OPENINGS):
        for manifest in lake.manifests(table):
            path = lake.data(manifest)
            found = pq.read_table(path)
            kinds = {row["values"]: row["counts"] for row in
                     found["kind"].cast(pa.string()).value_counts().to_pylist()}  # fmt: skip
            assert (manifest.rows, manifest.kinds) == (found.num_rows, kinds)
            assert manifest.bytes == path.stat().st_size
            assert path.name == f"{manifest.name}.parquet"
            assert found.schema.names == BRONZE_TABLE.names
            about = pq.read_metadata(path)  # readers use these times to skip files
            at = [about.row_group(n).column(about.schema.names.index("at")).statistics
                  for n in range(about.num_row_groups)]  # fmt: skip
            ends = min(one.min for one in at), max(one.max for one in at)
            assert tuple(round(end.timestamp() * 1e6) for end in ends) == (
                manifest.wall_from_us, manifest.wall_to_us,
            )  # fmt: skip


def test_segments_in_any_order_give_the_same_rows(stored: Path, lake: Lake) -> None:
    shipped(stored, lake)
    decoder, rows = Decoder("node", names_of(stored)), []
    files = segments(stored)[:-1]
    random.Random(1).shuffle(files)
    for file in files:
        walk = Walk()
        walk.enter(file.path)
        for batch in decoder.batches(walk):
            rows += batch.to_pylist()
    assert sorted(rows, key=lambda row: row["lsn"]) == rows_of(lake)


def test_payloads_can_be_left_out(stored: Path) -> None:
    walk = Walk()
    walk.enter(segments(stored)[0].path)
    for batch in Decoder("node", payloads=False).batches(walk):
        assert batch["payload"].null_count == batch.num_rows
        assert batch["payload_len"].null_count < batch.num_rows


def test_batches_of_any_size_give_the_same_rows(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows() -> list[dict[str, Any]]:
        walk = Walk()
        walk.enter(segments(stored)[0].path)
        return [row for batch in Decoder("node").batches(walk) for row in batch.to_pylist()]

    whole = rows()
    monkeypatch.setattr("purgatoryd.pipeline.decode.BATCH_ROWS", 7)
    assert rows() == whole


def test_virtual_time_is_kept_apart(tmp_path: Path, lake: Lake) -> None:
    wal = tmp_path / "wal"
    data = sw.segment([*sw.names(), sw.arm(3)], clock=lib.PG_CLOCK_VIRTUAL)
    sw.write(wal, data)
    sw.write(wal, sw.segment([sw.arm(4)], 4, first_group=2, seal=False), 4)
    shipped(wal, lake)
    assert {row["clock"] for row in rows_of(lake)} == {"virtual"}
    assert lake.manifests()[0].clock == "virtual"
    arm = rows_of(lake)[-1]
    assert arm["at"].timestamp() == (sw.WALL_NS + 3000) / 1e9


def test_records_that_cannot_be_parsed_are_counted(tmp_path: Path, lake: Lake) -> None:
    wal = tmp_path / "wal"
    short = [*sw.names(), (lib.PG_WAL_ARM, b"whatever"), (lib.PG_WAL_GONE, bytes(160)), sw.arm(3)]
    sw.write(wal, sw.segment(short))
    sw.write(wal, sw.segment([sw.arm(4)], 6, first_group=2, seal=False), 6)
    shipped(wal, lake)
    assert lake.manifests()[0].kinds == {"namespace": 1, "topic": 1, "unknown": 2, "arm": 1}
    rows = rows_of(lake)
    assert [row["lsn"] for row in rows if row["kind"] == "unknown"] == [3, 4]
    assert rows[-1]["key"] == b"key"


@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_wal_is_no_error(tmp_path: Path, lake: Lake, count: int) -> None:
    wal = tmp_path / "wal"
    wal.mkdir()
    if count:
        sw.write(wal, sw.segment(sw.names(), seal=False))
    assert shipped(wal, lake) == 0
    assert lake.manifests() == []
    assert [one.tier for one in tiers(lake, [wal])] == [Place.HOT] * count


# ---- damaged files ---------------------------------------------------------------------------


def cut(data: bytes) -> bytes:
    return data[:-300]


def flipped(data: bytes) -> bytes:
    at = data.index(b"payload of 5")
    return data[:at] + b"P" + data[at + 1 :]


@pytest.mark.parametrize(
    "changed",
    [
        {"crc": 1},
        {"last_lsn": 7},
        {"table": "bronzd"},
        {"daemon": "aa"},
        {"rows": "x"},
        {"epoch": None},
    ],
    ids=str,
)
def test_a_manifest_that_tells_of_another_file_costs_no_data(
    tmp_path: Path, lake: Lake, changed: dict[str, Any]
) -> None:
    """A data file that no manifest names looks like a file left by a kill. It must stay, because
    the WAL may be gone."""
    wal = tmp_path / "wal"
    sw.write(wal, sw.segment([*sw.names(), sw.arm(3)]))
    sw.write(wal, sw.segment([sw.arm(4)], 4, first_group=2, seal=False), 4)
    shipped(wal, lake)
    (manifest,) = lake.manifests()
    path = lake.folder("manifests", manifest.daemon) / f"{manifest.name}.json"
    reported = path.read_text()
    path.write_text(json.dumps(json.loads(reported) | changed))
    with pytest.raises(LakeBroken, match=path.name):
        shipped(wal, lake)
    path.write_text(reported)
    assert lake.files([manifest])


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (cut, WalDamaged),
        (flipped, WalDamaged),
        (lambda data: data[:100], WalDamaged),
        (lambda data: b"\0" * 8 + data[8:], WalDamaged),
    ],
    ids=["cut", "flipped", "no header", "no magic"],
)
def test_a_damaged_segment_is_refused_and_changes_nothing(
    tmp_path: Path, lake: Lake, spoil: Any, error: type[PurgatorydError]
) -> None:
    wal = tmp_path / "wal"
    records = [sw.arm(n, payload=b"payload of %d" % n) for n in range(3, 10)]
    sw.write(wal, sw.segment([*sw.names(), *records]))
    sw.write(wal, spoil(sw.segment(records, 10, first_group=2)), 10)
    sw.write(wal, sw.segment([sw.arm(20)], 17, first_group=3, seal=False), 17)
    with pytest.raises(error) as caught:
        shipped(wal, lake)
    assert "000000000000000a.wal" in str(caught.value)
    assert len(lake.manifests()) <= 1
    files = {
        path
        for path in lake.root.rglob("*")
        if path.is_file() and path.parent.parent.name == BRONZE
    }
    assert files == {lake.data(manifest) for manifest in lake.manifests()}


def test_another_major_version_is_refused(tmp_path: Path, lake: Lake) -> None:
    wal = tmp_path / "wal"
    sw.write(wal, sw.segment(sw.names(), major=lib.PG_WAL_MAJOR + 1))
    sw.write(wal, sw.segment([sw.arm(4)], 3, first_group=2, seal=False), 3)
    with pytest.raises(WalMismatch, match="version of a WAL segment"):
        shipped(wal, lake)
    assert not list(lake.root.rglob("*.parquet"))


@pytest.mark.parametrize("reported_by", ["segment", "snapshot"])
def test_an_arena_in_the_middle_has_the_names_of_those_around_it(
    reported_by: str, tmp_path: Path, lake: Lake
) -> None:
    """The snapshot of the middle arena was removed before anything was shipped."""
    names = [ww.namespace(0, "shop"), ww.topic(0, 0, "late")]
    first, middle, last = (ww.Wal(uuid=bytes([n]) * 16) for n in (3, 2, 1))
    files = {
        "1.wal": first.segment(1, [names]), "3.wal": middle.segment(
            3, [[ww.arm(1, "a", 10)]], first_group=2), "4.wal": last.segment(4, [[]]),
        "4.snapshot": last.snapshot(4, [*names, ww.arm(1, "a", 10)], next_ticket=2),
    }  # fmt: skip
    for name in files.keys() - {"1.wal" if reported_by == "snapshot" else "4.snapshot"}:
        (tmp_path / f"{0:015}{name}").write_bytes(files[name])
    assert shipped(tmp_path, lake) == 2
    (row,) = (row for row in rows_of(lake) if row["kind"] == "arm")
    assert (row["namespace"], row["topic"]) == ("shop", "late")


def test_in_a_folder_that_was_emptied_all_begins_anew(tmp_path: Path, lake: Lake) -> None:
    """The WAL folder is emptied while the exporter runs. The exporter then sets its retention hold
    and reads the names of namespaces and topics a second time."""
    wal = tmp_path / "wal"
    wal.mkdir()
    shipper = Shipper(wal, lake, "node")
    births = [ww.namespace(0, "shop"), ww.namespace(1, "gone"), ww.topic(0, 1, "late")], [
        ww.namespace(0, "new")]  # fmt: skip
    for number, records in enumerate(births, 1):
        for path in wal.iterdir():
            path.unlink()
        arena = ww.Wal(uuid=bytes([number]) * 16)
        (wal / file_name(1, SEGMENT)).write_bytes(arena.segment(1, [records]))
        assert list(shipper.poll()) == []  # the only segment is not sealed
        assert [hold.lsn for hold in read_holds(wal).values()] == [1]
        newest = wal / file_name(1 + len(records), SEGMENT)
        newest.write_bytes(arena.segment(1 + len(records), [[]], first_group=2))
        assert len(list(shipper.poll())) == 1
    shipper.close()
    found = lake.names((bytes([2]) * 16).hex())
    assert (found.namespaces, found.topics) == ({0: "new"}, {})


@pytest.mark.parametrize("text", ["{", "[]", '"words"', '{"format": 1, "table": "bronze"}'])
def test_an_invalid_manifest_is_named(text: str, lake: Lake) -> None:
    path = lake.folder("manifests", "aa") / "1.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(LakeBroken, match=r"1\.json: is not a manifest"):
        lake.manifests()


def test_a_folder_that_somebody_else_made_in_the_lake_stays(tmp_path: Path, lake: Lake) -> None:
    sw.write(tmp_path, sw.segment([*sw.names(), sw.arm(3)]))
    sw.write(tmp_path, sw.segment([sw.arm(4)], 4, first_group=2), 4)
    folder = lake.folder(BRONZE, sw.DAEMON.hex()) / "theirs"
    folder.mkdir(parents=True)
    assert shipped(tmp_path, lake) == 1
    assert folder.is_dir()


# ---- kills, and two exporters at the same time -----------------------------------------------


def test_killed_at_any_step_nothing_is_lost_doubled_or_left_behind(tmp_path: Path) -> None:
    """The test kills `ship` while it ships a segment, and while it ships a snapshot."""
    wal, living = tmp_path / "wal", ww.arm(1, "a", 10, at_ns=1)
    ww.Story({"shop": ww.namespace(0, "shop"), "a": living}, first=None, closing=[living]).write(
        wal
    )
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, KILLER, wal, tmp_path / "work"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30
    whole = Lake(tmp_path / "work" / "whole")
    assert len(whole.manifests(BRONZE)) == len(whole.manifests(OPENINGS)) == 1


def test_two_do_not_ship_one_wal(stored: Path, lake: Lake) -> None:
    shipper = Shipper(stored, lake, "node")
    next(shipper.poll())
    with pytest.raises(LakeInUse):
        shipped(stored, lake)
    shipper.close()
    assert shipped(stored, lake) > 0


# ---- retention -------------------------------------------------------------------------------


def test_the_retention_hold_keeps_what_is_not_in_the_lake(stored: Path, lake: Lake) -> None:
    hold, files = hold_name(lake), segments(stored)
    shipper = Shipper(stored, lake, "node")
    held = []
    for manifest in shipper.poll():
        held.append(read_holds(stored)[hold].lsn)
        assert manifest.table == OPENINGS or held[-1] > manifest.first_lsn
    shipper.close()
    assert held == sorted(held)
    assert held[0] == files[0].lsn
    assert read_holds(stored)[hold].lsn == files[-1].lsn
    set_hold(stored, RetentionHold(hold, files[-1].lsn, dropped=True))
    shipped(stored, lake)
    assert not read_holds(stored)[hold].dropped


def test_segments_are_hot_then_both_then_in_the_lake(stored: Path, lake: Lake) -> None:
    assert {one.tier for one in tiers(lake, [stored])} == {Place.HOT}
    shipped(stored, lake)
    found = tiers(lake, [stored])
    assert [one.tier for one in found] == [Place.BOTH] * (len(found) - 1) + [Place.HOT]
    segments(stored)[0].path.unlink()
    found = tiers(lake, [stored])
    assert [one.tier for one in found][:2] == [Place.LAKE, Place.BOTH]
    assert len({one.identity for one in found}) == len(found)


def test_segments_removed_by_retention_are_reported_by_the_next_segment(
    stored: Path, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment is removed after the exporter has listed the folder and before it reads the
    file."""
    oldest, *others = segments(stored)

    def too_late(path: Path, *of: Any, **upto: Any) -> Any:
        if path == oldest.path and not upto:  # a read of the whole file, not of its header only
            path.unlink()
        return read(path, *of, **upto)

    read = cache.read
    monkeypatch.setattr(cache, "read", too_late)
    assert shipped(stored, lake) >= len(others) - 1
    found = lake.manifests(BRONZE)
    assert [one.first_lsn for one in found] == [file.lsn for file in others[:-1]]
    assert found[0].gone_from == oldest.lsn
    assert not any(one.gone_from for one in found[1:])


# ---- cost for the host -----------------------------------------------------------------------


def test_the_page_cache_is_left_as_it_was(tmp_path: Path, lake: Lake) -> None:
    needs("pagecache")
    wal, payload = tmp_path / "wal", bytes(1000)
    records = [sw.arm(n, payload=payload) for n in range(3, 2003)]
    paths = [
        sw.write(wal, sw.segment(records, 1, first_group=1)),
        sw.write(wal, sw.segment(records, 2001, first_group=2), 2001),
        sw.write(wal, sw.segment([sw.arm(1)], 4001, first_group=3, seal=False), 4001),
    ]
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    with paths[0].open("rb") as file:
        cache.drop(file)
    before = [resident_pages(path) for path in paths]
    assert before[0] == 0
    assert before[1] > 500
    assert shipped(wal, lake) == 2
    assert [resident_pages(path) for path in paths] == before
    for manifest in lake.manifests():
        assert resident_pages(lake.data(manifest)) == 0


def resident_pages(path: Path) -> int:
    with path.open("rb") as file:
        return sum(byte & 1 for byte in resident(file))


def test_no_more_bytes_are_read_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept_s = 100.0, 0.0

    def sleep(time_s: float) -> None:
        nonlocal now_s, slept_s
        now_s, slept_s = now_s + time_s, slept_s + time_s

    monkeypatch.setattr("purgatoryd.pipeline.pace.time.monotonic", lambda: now_s)
    monkeypatch.setattr("purgatoryd.pipeline.pace.time.sleep", sleep)
    pace = Pace(1000)
    for _ in range(11):
        pace.wait(500)
    assert slept_s == pytest.approx(5.0)
    free = Pace(0)
    free.wait(1 << 40)
    assert slept_s == pytest.approx(5.0)


class Reported:
    """Stand-in for Pace. It stores its arguments."""

    limits: ClassVar[list[float]] = []
    counts: ClassVar[list[int]] = []

    def __init__(self, limit: float) -> None:
        self.limits.append(limit)

    def wait(self, count: int) -> None:
        self.counts.append(count)


def test_the_exporter_keeps_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wal = tmp_path / "wal" / "demo"
    sw.write(wal, sw.segment([*sw.names(), *(sw.arm(n) for n in range(3, 50))]))
    sw.write(wal, sw.segment([sw.arm(1)], 50, first_group=2, seal=False), 50)
    monkeypatch.setattr("purgatoryd.pipeline.ship.Pace", Reported)
    where = ("--name", "demo", "--wal-dir", wal.parent, "--lake", tmp_path / "lake")
    done = called("ship", "--limit", "50K", *where)
    assert done.exit_code == 0, done.output
    shipped, _ = segments(wal)
    assert (Reported.limits, sum(Reported.counts)) == ([50 << 10], shipped.bytes)


# ---- the command -----------------------------------------------------------------------------


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["pipeline", *map(str, arguments)])


def test_a_running_daemon_is_shipped(daemon: StartDaemon, tmp_path: Path) -> None:
    wals, root = tmp_path / "wal", tmp_path / "lake"
    wals.mkdir()
    daemon("demo", "--wal-dir", str(wals), "--wal-segment-bytes", "256K")
    with Client("demo") as client:
        for batch in range(8):
            client.add_many([(f"{batch}:{n}", 3600.0, "t", b"x" * 200) for n in range(500)])
    eventually(lambda: len(segments(wals / "demo")) >= 4)  # three of the four segments are sealed
    where = ("--name", "demo", "--wal-dir", wals, "--lake", root, "--json")
    done = called("ship", *where, "--node", "here")
    assert done.exit_code == 0, done.output
    reported = [json.loads(line) for line in done.output.splitlines()]
    assert {one["table"] for one in reported} == {BRONZE, OPENINGS}
    assert {one["node"] for one in reported} == {"here"}
    status = called("status", "--segments", *where).output
    listed = [json.loads(line) for line in status.splitlines()]
    found = [one["tier"] for one in listed]
    # "hot" comes after "both". The number of "hot" segments is open, because the daemon may have
    # sealed a segment after `ship`.
    assert found == sorted(found)
    assert set(found) == {"both", "hot"}
    lsns = [row["lsn"] for row in rows_of(Lake(root))]
    assert lsns == list(range(1, len(lsns) + 1))


def test_jobs_and_consumer_groups_are_in_the_lake(daemon: StartDaemon, tmp_path: Path) -> None:
    wals, root = tmp_path / "wal", tmp_path / "lake"
    wals.mkdir()
    daemon("demo", "--wal-dir", str(wals), "--wal-segment-bytes", "256K")
    settings: dict[str, Any] = {"topics": ["orders", "bills"], "max_attempts": 2, "backoff": 0.0}
    with Client("demo") as client:
        with Consumer("demo", group="mailers", worker="mailer", **settings) as jobs:
            good = client.add("good", 0, topic="orders", payload=b"p").ticket
            jobs.ack_many(jobs.get_many(1, timeout=30))
            bad = client.add("bad", 0, topic="orders").ticket
            for attempt in (1, 2):
                (job,) = jobs.get_many(1, timeout=30)
                job.nack(f"bounced {attempt}")
        client.drop_dead("mailers")
        client.delete_group("mailers")
        client.add_many([(f"more {n}", 3600.0, "t", b"x" * 200) for n in range(1000)])
    eventually(lambda: len(segments(wals / "demo")) >= 2)  # the one with the jobs is sealed
    assert called("ship", "--name", "demo", "--wal-dir", wals, "--lake", root).exit_code == 0
    found = rows_of(Lake(root))
    made, deleted = (row for row in found if row["kind"] == "consumer_group")
    assert (made["key"], made["namespace"], made["count"]) == (b"mailers", "default", 2)
    assert (deleted["key"], deleted["count"]) == (b"mailers", 0)
    listed = [row for row in found if row["kind"] == "job"]
    assert {(r["incarnation"], r["topic"]) for r in listed} == {(made["incarnation"], "orders")}
    assert deleted["incarnation"] == made["incarnation"]
    fields = ("ticket", "job_state", "cause", "leases", "failures")
    states = [tuple(row[field] for field in fields) for row in listed]
    assert states == [
        (good, "leased", None, 1, 0), (good, "ended", "acknowledged", None, None),
        (bad, "leased", None, 1, 0), (bad, "waiting", None, 1, 1),
        (bad, "leased", None, 2, 1), (bad, "dead", None, 2, 2),
        (bad, "ended", "dropped", None, None),
    ]  # fmt: skip
    texts = [r["error_text"] for r in listed]
    assert texts[2:6] == [None, b"bounced 1", b"bounced 1", b"bounced 2"]
    assert [r["dead_reason"] for r in listed][4:6] == [None, "max_attempts"]
    leased = [row for row in listed if row["job_state"] == "leased"]
    assert {row["worker"] for row in leased} == {"mailer"}
    assert all(row["leased_ns"] >= row["deadline_ns"] > 0 for row in leased)


def test_a_cursor_is_no_worker(daemon: StartDaemon, tmp_path: Path) -> None:
    wals = tmp_path / "wal"
    wals.mkdir()
    daemon("demo", "--wal-dir", str(wals), "--wal-segment-bytes", "256K")
    with Client("demo") as client, Subscriber("demo", cursor="billing"):
        client.add_many([(f"more {n}", 3600.0, "t", b"x" * 200) for n in range(1000)])
        eventually(lambda: len(segments(wals / "demo")) >= 2)
    decoder, walk = Decoder("node"), Walk()
    walk.enter(segments(wals / "demo")[0].path)
    rows = [row for batch in decoder.batches(walk) for row in batch.to_pylist()]
    assert any(row["kind"] == "cursor" for row in rows)
    assert set(decoder.names.workers.values()) == {f"{os.getuid()}:{os.getpid()}"}
    assert None not in decoder.names.workers


def test_wal_cat_names_a_consumer_group(daemon: StartDaemon, tmp_path: Path) -> None:
    wals = tmp_path / "wal"
    wals.mkdir()
    daemon("demo", "--wal-dir", str(wals))
    with Client("demo") as client:
        client.create_group("mailers", ["orders", "bills"])
    named = ("--name", "demo", "--wal-dir", str(wals), "--json")
    printed = CliRunner().invoke(app, ["wal", "cat", *named])
    (made,) = (r for r in map(json.loads, printed.output.splitlines())
               if r["kind"] == "consumer_group")  # fmt: skip
    assert made["name"] == "mailers"


def test_rows_of_a_bulk_load_have_their_numbers(daemon: StartDaemon, tmp_path: Path) -> None:
    wals, root, bulk_load = tmp_path / "wal", tmp_path / "lake", b"a bulk load, 16b"
    wals.mkdir()
    daemon("demo", "--wal-dir", str(wals), "--wal-segment-bytes", "256K")
    with Client("demo") as client:
        rows = [(f"key {n}", 3600.0, "t", b"x" * 200) for n in range(1000)]
        client.add_many(rows, bulk_load=BulkLoad(bulk_load, 5))
        client.add_many(rows[:1], bulk_load=BulkLoad(bulk_load, 2), mode="keep")
        client.add_many([("no row", 3600.0)])
        client.add_many([(f"more {n}", 3600.0, "t", b"x" * 200) for n in range(1000)])
    # the segment with the expected records is sealed
    eventually(lambda: segments(wals / "demo")[-1].lsn > 1100)
    where = ("--name", "demo", "--wal-dir", wals, "--lake", root, "--json")
    assert called("ship", *where).exit_code == 0
    found = rows_of(Lake(root))
    arms = [row for row in found if row["kind"] == "arm"]
    assert [(r["key"], r["bulk_load_row"]) for r in arms if r["bulk_load"] == bulk_load] == [
        (b"key %d" % n, n + 5) for n in range(1000)
    ]
    assert {r["key"] for r in arms if r["bulk_load"] is None} >= {b"no row"}
    (begun,) = [row for row in found if row["kind"] == "bulk_load"]
    assert (begun["bulk_load"], begun["uid"]) == (bulk_load, os.getuid())
    (retained,) = [row for row in found if row["kind"] == "done"]
    assert (retained["bulk_load"], retained["bulk_load_row"]) == (bulk_load, 2)


def test_an_unparked_timer_is_a_row_in_the_lake(daemon: StartDaemon, tmp_path: Path) -> None:
    wals, root = tmp_path / "wal", tmp_path / "lake"
    wals.mkdir()
    daemon("demo", "--wal-dir", str(wals), "--wal-segment-bytes", "256K")
    with Admin("demo") as admin:
        admin.set_namespace("shop", park_beyond_ns=3600 * 10**9)
    with Client("demo", namespace="shop") as client:
        parked = client.add("far", 7200.0, topic="t", payload=b"its payload")
        back = client.unpark_many([("far", parked.ticket, b"its payload")])
        assert back.statuses == [Status.UNPARKED]
        client.add_many([(f"more {n}", 60.0, "t", b"x" * 200) for n in range(2000)])
    # the segment with the expected record is sealed
    eventually(lambda: segments(wals / "demo")[-1].lsn > 10)
    done = called("ship", "--name", "demo", "--wal-dir", wals, "--lake", root, "--json")
    assert done.exit_code == 0, done.output
    arm, unpark = (row for row in rows_of(Lake(root)) if row["ticket"] == parked.ticket)
    assert (arm["kind"], unpark["kind"]) == ("arm", "unpark")
    assert [row["ticket"] for row in rows_of(Lake(root)) if row["parked"]] == [parked.ticket]
    same = ("namespace", "topic", "key", "payload", "deadline_ns", "armed_ns", "add_lsn")
    assert [unpark[name] for name in same] == [arm[name] for name in same]
    assert unpark["payload"] == b"its payload"


def test_a_damaged_segment_ends_the_command_with_its_code(tmp_path: Path) -> None:
    wal = tmp_path / "wal" / "demo"
    sw.write(wal, cut(sw.segment([*sw.names(), *(sw.arm(n) for n in range(3, 50))])))
    sw.write(wal, sw.segment([sw.arm(1)], 50, first_group=2, seal=False), 50)
    done = called("ship", "--name", "demo", "--wal-dir", wal.parent, "--lake", tmp_path / "l")
    assert done.exit_code == 5, done.output


def test_no_wal_is_a_clear_error(tmp_path: Path) -> None:
    done = called("ship", "--name", "demo", "--wal-dir", tmp_path, "--lake", tmp_path / "lake")
    assert done.exit_code == 7
    assert "is not a WAL" in done.output
    assert not (tmp_path / "lake").exists()
