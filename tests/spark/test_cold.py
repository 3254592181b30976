from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from cold_driver import (
    Key,
    Mortal,
    TableDaemon,
    small_pieces,
    spark_of_python,
    waiting,
)

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.pipeline import cold
from purgatoryd.pipeline import promote as promoting
from purgatoryd.pipeline import tier as tiers
from purgatoryd.pipeline.bulk_loading import BulkLoader
from purgatoryd.pipeline.promote import promote, window_end_ns
from purgatoryd.pipeline.schemas import FORMAT
from purgatoryd.pipeline.tier import Tier, Window
from purgatoryd.shm_layout.errors import (
    DaemonUnreachable,
    InvalidRows,
    LakeBroken,
    LakeInUse,
    WindowElsewhere,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.tier("test")

BASE = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
MINUTE_NS = 60 * 10**9
BASE_NS = int(BASE.timestamp()) * 10**9


def frame(spark: SparkSession, first: int, last: int, shift: int = 0) -> DataFrame:
    """Return timers k<first> .. k<last - 1> of `shop`; k<i> is due i + shift minutes after BASE."""
    base = BASE_NS // 10**9
    return spark.range(first, last, 1, 1).selectExpr(
        "'shop' as namespace", "concat('k', id) as key", "cast(id as string) as payload",
        f"timestamp_seconds({base} + (id + {shift}) * 60) as deadline",
    )  # fmt: skip


def key(i: int) -> Key:
    return ("shop", "str", f"k{i}".encode())


def due(i: int) -> int:
    return BASE_NS + i * MINUTE_NS


def keys(*numbers: int) -> pa.Table:
    rows = [dict(zip(cold.KEY, key(i), strict=True)) for i in numbers]
    return pa.Table.from_pylist(rows)


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    # These characters are special in the path patterns of Spark's readers.
    folder = tmp_path / "a {lake}, [1] or *"
    folder.mkdir()
    return Tier(folder)


@pytest.fixture
def daemon() -> TableDaemon:
    return TableDaemon()


@pytest.mark.costly("each window is promoted by Spark jobs of its own")
def test_bulk_loaded_timers_are_promoted_by_window(
    spark: SparkSession, tier: Tier, daemon: TableDaemon
) -> None:
    assert promote(spark, tier, due(1), daemon) == []
    bulk_loaded = cold.bulk_load(tier, frame(spark, 0, 150), "one", daemon)
    assert (bulk_loaded.rows, bulk_loaded.late) == (150, 0)
    assert cold.bulk_load(tier, frame(spark, 0, 150), "one", daemon).rows == 0
    (first,) = promote(spark, tier, due(70), daemon)
    assert (first.state, first.rows, first.results) == ("hot", 70, {"ADDED": 70})
    assert daemon.armed == {key(i): due(i) for i in range(70)}
    daemon.fire()
    assert promote(spark, tier, due(70), daemon) == []
    assert promote(spark, tier, due(60), daemon) == []
    (second,) = promote(spark, tier, due(150), daemon)
    assert second.rows == 80
    assert daemon.armed == {key(i): due(i) for i in range(70, 150)}
    assert waiting(tier) == {}
    assert [path for path in tier.lake.rglob("*") if path.stat().st_mode & 0o077] == []


@pytest.mark.tier("all")
def test_rows_that_come_late_go_with_the_next_window(
    spark: SparkSession, tier: Tier, daemon: TableDaemon
) -> None:
    cold.bulk_load(tier, frame(spark, 0, 10), "one", daemon)
    promote(spark, tier, due(10), daemon)
    assert cold.bulk_load(tier, frame(spark, 20, 30, shift=-15), "two", daemon).late == 5
    (window,) = promote(spark, tier, due(10), daemon)
    assert window.rows == 5
    assert promote(spark, tier, due(10), daemon) == []
    assert set(waiting(tier)) == {key(i) for i in range(25, 30)}


@pytest.mark.costly("each change is several Spark jobs")
def test_cancels_and_changes_reach_cold_and_hot_timers(
    spark: SparkSession, tier: Tier, daemon: TableDaemon
) -> None:
    cold.bulk_load(tier, frame(spark, 0, 40), "one", daemon)
    assert cold.cancel(tier, keys(1, 30), daemon) == {}  # both timers are only in the tier
    promote(spark, tier, due(20), daemon)
    assert key(1) not in daemon.armed
    assert cold.cancel(tier, keys(2, 31, 77), daemon) == {"CANCELLED": 1, "UNKNOWN": 2}
    cold.bulk_load(tier, frame(spark, 3, 5, shift=30), "changed", daemon, replacing=True)
    assert daemon.armed == {key(i): due(i) for i in (0, *range(5, 20))}
    promote(spark, tier, due(100), daemon)
    expected = {key(i): due(i) for i in range(40) if i not in (1, 2, 3, 4, 30, 31)}
    assert daemon.armed == expected | {key(i): due(i + 30) for i in (3, 4)}
    assert cold.bulk_load(tier, frame(spark, 30, 31, shift=500), "again", daemon).rows == 1
    assert waiting(tier) == {key(30): due(530)}


@pytest.mark.tier("all")
def test_a_compaction_keeps_armed_timers(
    spark: SparkSession, tier: Tier, daemon: TableDaemon
) -> None:
    for part in range(3):
        cold.bulk_load(tier, frame(spark, part * 50, part * 50 + 50), f"bulk load {part}", daemon)
    cold.cancel(tier, keys(100, 101), daemon)
    promote(spark, tier, due(55), daemon)
    before = waiting(tier)
    found = cold.compact(spark, tier)
    assert found.rows == (150, 93)
    assert found.files[1] < found.files[0]
    assert waiting(tier) == before
    assert not tier.version().tombstones
    figures, wrong = cold.verify(spark, tier)
    assert wrong == []
    assert (figures["pending"], figures["dead"], figures["orphans"]) == (93, 0, 0)
    assert cold.compact(spark, tier).rows == (0, 0)
    promote(spark, tier, due(1000), daemon)
    assert len(daemon.added) == 148


@pytest.mark.tier("all")
def test_a_bulk_load_is_the_same_only_with_the_same_number_of_rows(
    spark: SparkSession, tier: Tier, daemon: TableDaemon
) -> None:
    cold.bulk_load(tier, frame(spark, 0, 10), "one", daemon)
    before = tier.version()
    with pytest.raises(InvalidRows, match="had 10 rows before, and now has 11"):
        cold.bulk_load(tier, frame(spark, 0, 11), "one", daemon)
    assert tier.version() == before


@pytest.mark.tier("all")
def test_no_key_of_a_replacement_comes_to_the_driver(
    spark: SparkSession, tier: Tier, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold, "KEYS_AT_ONCE", 16)
    cold.bulk_load(tier, frame(spark, 0, 40), "one", daemon)
    cold.bulk_load(tier, frame(spark, 30, 70, shift=100), "two", daemon, replacing=True)
    # tombstones only for the 10 replaced rows
    assert sum(part.rows for part in tier.version().tombstones) == 10
    promote(spark, tier, due(35), daemon)
    asked: list[int] = []
    real = daemon.cancel

    def cancel(keys: pa.Table) -> dict[str, int]:
        asked.append(keys.num_rows)
        return real(keys)

    monkeypatch.setattr(daemon, "cancel", cancel)
    cold.bulk_load(tier, frame(spark, 0, 50, shift=200), "three", daemon, replacing=True)
    assert (sum(asked), max(asked)) == (50, 16)
    assert daemon.armed == {}
    left = {key(i): due(i + 200) for i in range(50)} | {key(i): due(i + 100) for i in range(50, 70)}
    assert waiting(tier) == left


@pytest.mark.tier("all")
def test_a_key_has_one_timer_in_the_tier(
    spark: SparkSession, tier: Tier, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold.bulk_load(tier, frame(spark, 0, 40), "one", daemon)
    before = tier.version().rows
    other = frame(spark, 38, 50, shift=100)
    with pytest.raises(InvalidRows, match=r"^2 keys have a timer in the tier.*b'k3[89]'"):
        cold.bulk_load(tier, other, "two", daemon)
    twice = frame(spark, 60, 62).union(frame(spark, 60, 61, shift=300))
    for replacing in (False, True):
        with pytest.raises(InvalidRows, match=r"^1 keys occur more than once.*b'k60'"):
            cold.bulk_load(tier, twice, "two", daemon, replacing=replacing)
    assert (tier.version().rows, tier.orphans(tier.version())) == (before, [])
    cold.cancel(tier, keys(38), daemon)
    promote(spark, tier, due(40), daemon)
    # as if all keys had the same hash
    monkeypatch.setattr(cold, "suspected", lambda *_: (True, True))
    # k38 was cancelled and k39 is hot, so neither of them waits in the tier.
    assert cold.bulk_load(tier, other, "two", daemon).rows == 12
    assert len(waiting(tier)) == 12


@pytest.mark.tier("all")
def test_verify_names_damage(
    spark: SparkSession, tier: Tier, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold.bulk_load(tier, frame(spark, 0, 5), "one", daemon)
    # as if another process had written the second bulk load at the same time
    monkeypatch.setattr(cold, "check_keys", lambda *_, **__: None)
    cold.bulk_load(tier, frame(spark, 4, 90), "two", daemon)
    assert "1 keys have more than one timer" in cold.verify(spark, tier)[1][0]
    first, second, *_ = (tier.lake / part.path for part in tier.version().rows)
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    second.unlink()
    wrong = cold.verify(spark, tier)[1]
    assert [line.partition(": ")[2] for line in wrong] == [
        "its bytes are not those that were written", "is missing",
    ]  # fmt: skip
    with pytest.raises(LakeBroken, match=re.escape(f"{second}: is gone")):
        promote(spark, tier, due(100), daemon)


@pytest.mark.costly("each kind of bad row is a bulk load")
def test_bad_rows_are_refused_and_nothing_changes(
    spark: SparkSession, tier: Tier, daemon: TableDaemon
) -> None:
    good = frame(spark, 0, 10)
    for bad in (
        good.selectExpr("key", "namespace"),
        good.selectExpr("key", "deadline", "1 as deadline_ns"),
        good.selectExpr("if(key = 'k3', '', key) as key", "deadline"),
        good.selectExpr("key", "if(key = 'k3', null, deadline) as deadline"),
        good.selectExpr("key", "deadline", "repeat('x', 70000) as payload"),
        good.selectExpr("key", "deadline", "repeat('x', 70) as namespace"),
        good.selectExpr("key", "deadline", "'uuid' as key_type"),
        good.selectExpr("length(key) as key", "deadline"),
        good.selectExpr("X'6bff' as key", "deadline", "'str' as key_type"),
        good.selectExpr("key", "deadline", "X'6b' as namespace"),
        good.selectExpr("key", "deadline", "concat('a', chr(0)) as namespace"),
        good.selectExpr("key", "deadline", "'_events' as topic"),
        good.selectExpr("key", "deadline", "1 as payload"),
        good.selectExpr("key", "deadline", "1 as key_type"),
        good.selectExpr("key", "deadline as deadline_ns"),
        good.selectExpr("key", "1893456000 as deadline"),
    ):
        with pytest.raises(InvalidRows):
            cold.bulk_load(tier, bad, "bad", daemon)
    assert not tier.version().rows
    assert tier.orphans(tier.version()) == []
    cold.bulk_load(tier, good, "bad", daemon)
    assert len(waiting(tier)) == 10


@pytest.mark.parametrize(
    "row",
    [
        {"key": None}, {"key": b""}, {"key": b"k" * 1000}, {"key": b"\xff"}, {"namespace": None},
        {"namespace": ""}, {"namespace": "n" * 64}, {"namespace": "a\0"}, {"key_type": "weird"},
        {"key_type": None}, {"key_type": "uuid"}, {"key": 7}, {"key": [b"k"]},
        {"namespace": b"\xff"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("quick")
def test_a_cancel_of_an_invalid_key_changes_nothing(
    tmp_path: Path, daemon: TableDaemon, row: dict[str, Any]
) -> None:
    """The tier would send the invalid key to the daemon again and again, and the daemon would
    refuse it with all later cancels."""
    tier = Tier(tmp_path)
    cold.bulk_load(tier, table(0, 10), "one", daemon)
    promote(NO_SPARK, tier, due(5), daemon)
    before = tier.version()
    bad = {"namespace": "default", "key_type": "str", "key": b"k1"} | row
    with pytest.raises(InvalidRows):
        cold.cancel(tier, pa.Table.from_pylist([bad]), daemon)
    assert tier.version() == before
    assert tier.orphans(before) == []
    cold.cancel(tier, keys(1), daemon)
    assert key(1) not in daemon.armed


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("windows/*.json", "state", "weird"), ("windows/*.json", "until", ["x", "y"]),
        ("windows/*.json", "id", "other"), ("cold/versions/*.json", "number", 1),
        ("cold/versions/*.json", "number", "x"), ("cold/versions/*.json", "tier", None),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("quick")
def test_a_cancel_refuses_a_damaged_state(
    tmp_path: Path, daemon: TableDaemon, file: str, field: str, value: object
) -> None:
    """According to the damaged state, no daemon has the timer, so none would get the cancel."""
    cold.bulk_load(Tier(tmp_path), table(0, 10), "one", daemon)
    promote(NO_SPARK, Tier(tmp_path), due(5), daemon)
    newest = max(tmp_path.glob(file))
    newest.write_text(json.dumps(json.loads(newest.read_text()) | {field: value}))
    with pytest.raises(LakeBroken, match=newest.name):
        cold.cancel(Tier(tmp_path), keys(1), daemon)


@pytest.mark.parametrize("found", [0, 2, None])
@pytest.mark.parametrize("file", ["cold/versions/*.json", "windows/*.json"])
@pytest.mark.usefixtures("quick")
def test_a_tier_of_another_format_is_refused(
    tmp_path: Path, daemon: TableDaemon, file: str, found: object
) -> None:
    """A file without a format number is refused as well."""
    cold.bulk_load(Tier(tmp_path), table(0, 10), "one", daemon)
    promote(NO_SPARK, Tier(tmp_path), due(5), daemon)
    path = max(tmp_path.glob(file))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": found}))
    status = ["pipeline", "cold", "status", "--lake", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, status)
    assert done.exit_code == Exit.UNUSABLE, done.output
    reported = json.loads(done.stderr)
    assert (reported["error"], reported["found"], reported["expected"]) == (
        "LakeMismatch",
        found,
        FORMAT,
    )
    assert reported["path"] == str(path)


@pytest.mark.tier("all")
def test_deadlines_that_are_no_times_are_counted(
    spark: SparkSession, tier: Tier, daemon: TableDaemon
) -> None:
    texts = ("1.5", "soon", "1e30", "-1", "", None)
    times = ("soon", "2030-13-01", "9999-12-31T00:00:00Z", "1969-12-31T23:59:59Z", None)
    bad: dict[str, tuple[tuple[object, ...], str]] = {
        "deadline_ns string": (texts, str(BASE_NS)),
        "deadline_ns double": ((1.5, float("nan"), float("inf"), 1e30, -1.0, None), "1893456000e9"),
        "deadline string": (times, "2030-01-01T00:00:00Z"),
    }
    for kind, (wrong, right) in bad.items():
        good = [(kind, right if kind.endswith("string") else float(right))]
        rows = [*good, *(("x", value) for value in wrong)]
        schema = f"key string, {kind}"
        with pytest.raises(InvalidRows, match=f"^{len(wrong)} rows have"):
            cold.bulk_load(tier, spark.createDataFrame(rows, schema), kind, daemon)
        cold.bulk_load(tier, spark.createDataFrame(good, schema), kind, daemon)
    assert waiting(tier) == {("default", "str", kind.encode()): BASE_NS for kind in bad}


def test_a_window_ends_one_window_ahead() -> None:
    assert window_end_ns(7 * MINUTE_NS, 5 * MINUTE_NS) == 15 * MINUTE_NS
    assert window_end_ns(10 * MINUTE_NS, 5 * MINUTE_NS) == 20 * MINUTE_NS


# ---- kills between any two steps -------------------------------------------------------------
# These tests use spark_of_python instead of Spark.

NO_SPARK: Any = None


def table(first: int, last: int, shift: int = 0) -> pa.Table:
    """Return the timers of frame() as a table with the tier's columns."""
    rows = [
        dict(zip(cold.KEY, key(i), strict=True))
        | {"topic": "t", "payload": b"", "deadline_ns": due(i + shift)}
        for i in range(first, last)
    ]
    return pa.Table.from_pylist(rows)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    spark_of_python(monkeypatch)


def every_death(
    mortal: Mortal, step: Callable[[int], Callable[[], object]], after: Callable[[int], None]
) -> int:
    """For n = 1, 2 ...: kill step(n) after its n-th effect, and call after(n). End when a step is
    complete before its n-th effect. Return the number of kills."""
    last = 1
    while mortal.run(step(last), last):
        after(last)
        last += 1
    return last - 1


@pytest.mark.usefixtures("quick")
def test_a_bulk_load_that_is_killed_is_there_whole_or_not_at_all(
    tmp_path: Path, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, mortal = table(0, 70), Mortal(monkeypatch, daemon)
    tiers: dict[int, Tier] = {}

    def step(last: int) -> Callable[[], object]:
        (tmp_path / str(last)).mkdir()
        tiers[last] = Tier(tmp_path / str(last))
        return lambda: cold.bulk_load(tiers[last], rows, "one", daemon)

    def after(last: int) -> None:
        assert len(waiting(tiers[last])) in (0, 70)
        if last == 1:  # the repeated bulk load adds no rows to a promoted window
            promote(NO_SPARK, tiers[last], due(10), daemon)
        cold.bulk_load(tiers[last], rows, "one", daemon)
        assert len(waiting(tiers[last])) == 70

    assert every_death(mortal, step, after) >= 4


@pytest.mark.usefixtures("quick")
def test_a_change_that_is_killed_is_there_whole_or_not_at_all(
    tmp_path: Path, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change replaces a hot timer and a cold timer. After a kill, both keys have their old timer,
    or both have their new timer."""
    tier, mortal = Tier(tmp_path), Mortal(monkeypatch, daemon)
    cold.bulk_load(tier, table(0, 100), "one", daemon)
    promote(NO_SPARK, tier, due(50), daemon)
    changed: list[bool] = []

    def step(last: int) -> Callable[[], object]:
        rows = pa.concat_tables([table(n, n + 1, shift=200) for n in (last, 50 + last)])
        return lambda: cold.bulk_load(tier, rows, f"change {last}", daemon, replacing=True)

    def after(last: int) -> None:
        cold.cancel(tier, keys(99), daemon)
        left, hot, cool = waiting(tier), key(last), key(50 + last)
        new = left.get(hot) == due(200 + last)
        assert (hot in daemon.armed, hot in left) == (not new, new)
        assert left[cool] == due(50 + last + (200 if new else 0))
        changed.append(new)
        step(last)()
        assert hot not in daemon.armed
        assert [waiting(tier)[one] for one in (hot, cool)] == [due(200 + last), due(250 + last)]

    assert every_death(mortal, step, after) >= 6
    assert changed == sorted(changed)
    assert set(changed) == {False, True}


@pytest.mark.costly("each kill is followed by a whole promotion")
@pytest.mark.usefixtures("quick")
def test_a_promotion_that_is_killed_loses_and_doubles_nothing(
    tmp_path: Path, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch, 4)
    tier, mortal = Tier(tmp_path), Mortal(monkeypatch, daemon)
    cold.bulk_load(tier, table(0, 900), "one", daemon)
    begun: list[int] = []

    def step(last: int) -> Callable[[], object]:
        begun.append(last * 10)
        return lambda: promote(NO_SPARK, tier, due(last * 10), daemon)

    def after(last: int) -> None:
        daemon.fire()  # all acknowledged timers fire before the next run continues
        cold.cancel(tier, keys(last * 10 - 1), daemon)

    deaths = every_death(mortal, step, after)
    assert deaths >= 7
    end = begun[-1]
    added = [k for k, _ in daemon.added]
    assert len(added) == len(set(added))
    assert {key(i) for i in range(end)} - set(added) <= {
        key(n * 10 - 1) for n in range(1, deaths + 1)
    }
    assert set(waiting(tier)) == {key(i) for i in range(end, 900)}
    assert not list(tier.lake.glob("windows/*/"))


@pytest.mark.usefixtures("quick")
def test_nothing_is_armed_after_its_cancel(
    tmp_path: Path, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch, 3)
    tier = Tier(tmp_path)
    cold.bulk_load(tier, table(0, 12), "one", daemon)
    cancelled: list[int] = []

    def pace(
        rows: int,
    ) -> None:
        # between two pieces of the promotion, others cancel a promoted and a waiting timer
        for i in (len(cancelled) // 2, 11 - len(cancelled) // 2):
            cold.cancel(tier, keys(i), daemon)
            cancelled.append(i)

    (window,) = promote(NO_SPARK, tier, due(12), daemon, pace)
    assert window.cancelled > 0
    assert set(daemon.armed) == {key(i) for i in range(12) if i not in cancelled}


@pytest.mark.usefixtures("quick")
def test_a_cancel_that_is_killed_takes_effect_with_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = TableDaemon()
    tier, mortal = Tier(tmp_path), Mortal(monkeypatch, daemon)
    cold.bulk_load(tier, table(0, 100), "one", daemon)
    promote(NO_SPARK, tier, due(50), daemon)

    left: list[bool] = []

    def step(last: int) -> Callable[[], object]:
        return lambda: cold.cancel(tier, keys(last, 50 + last), daemon)

    def after(last: int) -> None:
        cold.cancel(tier, keys(99), daemon)
        hot, cool = key(last) in daemon.armed, key(50 + last) in waiting(tier)
        assert hot == cool  # either both timers are cancelled, or neither
        left.append(hot)

    assert every_death(mortal, step, after) >= 4
    assert left == sorted(left, reverse=True)
    assert set(left) == {True, False}


@pytest.mark.usefixtures("quick")
def test_a_compaction_that_is_killed_changes_nothing(
    tmp_path: Path, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, mortal = Tier(tmp_path), Mortal(monkeypatch, daemon)
    for part in range(2):
        cold.bulk_load(tier, table(part * 40, part * 40 + 40), f"bulk load {part}", daemon)
    cold.cancel(tier, keys(7), daemon)
    promote(NO_SPARK, tier, due(5), daemon)
    expected = {key(i): due(i) for i in range(5, 80) if i != 7}

    def after(last: int) -> None:
        assert waiting(tier) == expected

    assert every_death(mortal, lambda _: lambda: cold.compact(NO_SPARK, tier), after) >= 4
    assert waiting(tier) == expected


@pytest.mark.usefixtures("quick")
def test_a_compaction_takes_nothing_from_a_cancel_under_way(
    tier: Tier, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction starts when the cancel's tombstones are on disk but no version names them yet."""
    cold.bulk_load(tier, table(0, 3), "bulk_load", daemon)
    removed, real = Event(), cold._remove_orphans
    compaction = Thread(target=cold.compact, args=(NO_SPARK, Tier(tier.lake)))

    def remove(tier: Tier) -> int:
        count = real(tier)
        removed.set()
        return count

    def add(tier: Tier, keys: pa.Table, number: int) -> tuple[tiers.ColdFile, ...]:
        parts = real_add(tier, keys, number)
        compaction.start()
        removed.wait(0.3)  # the removal of orphans has to wait for the cancel
        return parts

    real_add = Tier.add_tombstones
    monkeypatch.setattr(cold, "_remove_orphans", remove)
    monkeypatch.setattr(Tier, "add_tombstones", add)
    cold.cancel(tier, keys(1), daemon)
    compaction.join()
    assert set(waiting(tier)) == {key(0), key(2)}


@pytest.mark.usefixtures("quick")
def test_a_tier_does_not_grow_with_its_history(
    tier: Tier, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoting, "SURPLUS_MAX", 8)
    monkeypatch.setattr(tiers, "WINDOWS_KEPT", 20)
    cold.bulk_load(tier, table(4000, 4010), "far", daemon)
    reads, rounds, real = list[Path](), list[int](), tiers.read_window

    def read(path: Path) -> Window:
        reads.append(path)
        return real(path)

    monkeypatch.setattr(tiers, "read_window", read)
    most = 0
    for n in range(30):
        cold.bulk_load(tier, table(n * 2, n * 2 + 2), f"bulk load {n}", daemon)
        cold.cancel(tier, keys(n * 2), daemon)
        promote(NO_SPARK, tier, due(n * 2 + 2), daemon)
        counting = tier.version()
        most = max(most, len(counting.rows) + len(counting.tombstones))
        rounds.append(len(reads))
        daemon.fire()
    assert len(daemon.added) == 30
    assert most <= 8 + 3
    assert len(list((tier.lake / "windows").glob("*.json"))) == 20
    assert len(list((tier.lake / "cold" / "versions").glob("*.json"))) == tiers.VERSIONS_KEPT
    # The number of reads per round does not depend on the number of windows.
    assert rounds[29] - rounds[28] == rounds[19] - rounds[18]
    assert set(waiting(tier)) == {key(i) for i in range(4000, 4010)}


@pytest.mark.usefixtures("quick")
def test_one_writer_and_one_promoter_at_a_time(tier: Tier, daemon: TableDaemon) -> None:
    with tier.writing(), pytest.raises(LakeInUse):
        cold.bulk_load(tier, table(0, 1), "one", daemon)
    with tier.promoting(), pytest.raises(LakeInUse):
        promote(NO_SPARK, tier, due(1), daemon)


@pytest.mark.usefixtures("quick")
def test_windows_and_cancels_go_to_one_daemon(
    tier: Tier, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = TableDaemon("other")
    cold.bulk_load(tier, table(0, 10), "one", other)
    assert cold.cancel(tier, keys(9), other) == {}  # not sent: the tier has promoted no window
    mortal = Mortal(monkeypatch, daemon)
    assert mortal.run(lambda: promote(NO_SPARK, tier, due(5), daemon), last=2)
    before = tier.version()
    for state in ("promoting", "hot"):
        assert [window.state for window in tier.windows()] == [state]
        with pytest.raises(WindowElsewhere):
            promote(NO_SPARK, tier, due(8), other)
        with pytest.raises(WindowElsewhere):
            cold.cancel(tier, keys(1), other)
        with pytest.raises(WindowElsewhere):
            cold.bulk_load(tier, table(0, 2, shift=3), "two", other, replacing=True)
        assert tier.version() == before
        promote(NO_SPARK, tier, due(5), daemon)
    assert cold.bulk_load(tier, table(20, 22), "three", other).rows == 2
    assert set(daemon.armed) == {key(i) for i in range(5)}


@pytest.mark.usefixtures("quick")
def test_a_name_that_no_daemon_has_does_not_bind_the_tier(tier: Tier, daemon: TableDaemon) -> None:
    cold.bulk_load(tier, table(0, 3), "one", daemon)
    with BulkLoader("nobody", timeout=1.0) as typo, pytest.raises(DaemonUnreachable):
        promote(NO_SPARK, tier, due(5), typo)
    assert tier.windows() == []
    (window,) = promote(NO_SPARK, tier, due(5), daemon)
    assert window.daemon == daemon.name


@pytest.mark.usefixtures("quick")
def test_another_daemon_does_not_receive_undelivered_tombstones(
    tier: Tier, daemon: TableDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_down(_: pa.Table) -> dict[str, int]:
        raise DaemonUnreachable("demo", "nowhere", 0.0)

    other = TableDaemon("other")
    cold.bulk_load(tier, table(0, 10), "one", daemon)
    promote(NO_SPARK, tier, due(5), daemon)
    with monkeypatch.context() as patch:
        patch.setattr(daemon, "cancel", is_down)
        with pytest.raises(DaemonUnreachable):
            cold.cancel(tier, keys(1), daemon)
    undelivered = tier.version().undelivered
    assert undelivered
    assert key(1) in daemon.armed
    with tier.lock(), pytest.raises(WindowElsewhere):
        cold.settle(tier, other)
    with pytest.raises(WindowElsewhere):
        cold.bulk_load(tier, table(20, 22), "two", other)
    assert tier.version().undelivered == undelivered
    assert cold.bulk_load(tier, table(20, 22), "two", daemon).rows == 2
    assert tier.version().undelivered == ()
    assert set(daemon.armed) == {key(i) for i in (0, 2, 3, 4)}
