"""The report: its figures from a WAL, and its HTML page, which needs no other files."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from audit_stories import CLEAN, OPEN, RECORDS, by, restarted, ship, uuid
from pyspark.sql import functions as F  # noqa: N812
from wal_writer import S

from purgatoryd.cli.pipeline_audit import _print_tables
from purgatoryd.pipeline import gold, silver
from purgatoryd.pipeline.audit import Balance, Verdict
from purgatoryd.pipeline.continuity import Coverage, LsnRange, Violation
from purgatoryd.pipeline.figures import RANKS, Advice, Figures, Flow, Profile, Spread, figures
from purgatoryd.pipeline.findings import Finding, slow
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.ledger import Unjudged
from purgatoryd.pipeline.report import COLOURS, duration, page
from purgatoryd.pipeline.schemas import TOPICS
from purgatoryd.pipeline.tiers import read_events
from purgatoryd.pipeline.whole import whole

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.tier("test")

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def spread(step_ns: int) -> Spread:
    return Spread(1000, tuple(int(rank * 100 * step_ns) for rank in RANKS))


def part(clock: str = "live") -> Profile:
    one = Profile("ab" * 16, "eagle", clock, 10**15, 10**15 + 60_000_000)
    one.flow = [Flow(10**15 + n * 10**6, 10, cancelled=5, expired=3) for n in range(60)]
    one.lateness = spread(2_000)
    one.due = {(10**9 + 10 * n, row): n + row for n in range(6) for row in range(10)}
    one.column_s, one.row_s = 10, 1
    one.advice = [Advice("shop", "late", 300, 180, 0.375, 2 * S, 9 * S, None, 8 * S, None)]
    if clock == "live":
        one.stages = {"request_queue": spread(300), "send": spread(10_000_000)}
    return one


def shown(*parts: Profile) -> Figures:
    values = (1000, 5, 10**9, 10**9, 3 * 10**8)
    slow = Finding("node", "eagle", "eagle", "live", NOW, "service", *values, "send", 990_000_000)
    return Figures([*parts], [slow])


def verdict() -> Verdict:
    found = Verdict(records=1234, coverage=Coverage(1234, 1234, 1234))
    found.balance = [Balance("ab" * 16, "shop", 0, 600, 300, 0, 180, 0, 0, 120)]
    return found


def test_a_page_of_a_clean_wal() -> None:
    text = page(verdict(), shown(part(), part("virtual"), part("bulk_load")), NOW)
    assert "The audit found no violation." in text
    assert "1 daemon," in text
    assert "virtual clock" in text
    assert "bulk loads" in text
    assert '>unknown</td><td class="n">8 s to unknown</td>' in text
    assert "send, p99 990 ms" in text
    assert text.count("<svg") == 10  # two profiles have no stages, and so fewer pictures


def test_the_page_needs_nothing_but_itself() -> None:
    text = page(verdict(), shown(part()), NOW)
    used = re.findall(r'(?:src|href|url)\s*[=(]\s*"?([^")\s>]+)', text)
    # an anchor in the page, or a data: URL
    assert {one.split(":")[0][:1] for one in used} <= {"#", "d"}
    assert "<script" not in text
    assert "@import" not in text


def test_violations_and_what_is_missing_are_on_the_page() -> None:
    found = verdict()
    found.counts = {"early": 2}
    evidence = {"namespace": "shop", "key": "<b>a</b>", "ended_ns": 9}
    found.samples = [Violation("early", "ab" * 16, 12, 7, evidence)]
    found.lost = [
        LsnRange("ab" * 16, 1, 99, "retention"), LsnRange("ab" * 16, 700, None, "recovery"),
    ]  # fmt: skip
    found.coverage = Coverage(
        600, 601, 700, (LsnRange("ab" * 16, 100, 100, "snapshot"), *found.lost)
    )
    text = page(found, shown(part()), NOW)
    assert "The audit found 2 violations." in text
    assert "key=&lt;b&gt;a&lt;/b&gt; ended_ns=9" in text
    assert text.count("<td>missing</td>") == 2
    assert text.count("<td>not judged</td>") == 1
    assert "at most 85.71 %. 600 records were judged, of 601 in the lake and 700" in text


def test_a_verdict_over_a_part_is_amber() -> None:
    found = verdict()
    assert 'class="verdict green"' in page(found, shown(part()), NOW)
    found.coverage = Coverage(1233, 1234, 1234, (LsnRange("ab" * 16, 1, 1, "snapshot"),))
    text = page(found, shown(part()), NOW)
    assert 'class="verdict amber"' in text
    assert "The audit found no violation in what was judged." in text
    assert "Coverage: 99.91 %" in text


def test_ledgers_that_were_not_judged_do_not_agree() -> None:
    found = verdict()
    found.ledger = {"add": 600}
    assert "and the ledgers agree" in page(found, shown(part()), NOW)
    found.unjudged = [Unjudged("ab" * 16, 7, "beyond"), Unjudged("unknown", 8, "absent")]
    text = page(found, shown(part()), NOW)
    assert "and the ledgers agree" not in text
    assert "7 lines of ledgers of <code>abababab</code> could not be judged" in text
    assert "nothing of that daemon is in the lake" in text


def lines(capsys: pytest.CaptureFixture[str], found: Verdict, *parts: Profile) -> list[list[str]]:
    """Return the printed tables as lists of words, one list per line."""
    _print_tables(found, [*parts])
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_key_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """carried_over + added equals the sum of final states and open, over all namespaces."""
    found = verdict()
    found.balance.append(Balance("ab" * 16, "other", 1, 9, 2, 1, 2, 2, 2, 1))
    assert lines(capsys, found, part(), part("bulk_load")) == [
        ["the", "audit", "found", "nothing"],
        ["daemon", "carried_over", "added", "cancelled", "replaced", "expired", "satisfied",
         "failed", "open", "skipped", "coalesced"],
        ["abababab", "1", "609", "302", "1", "182", "2", "2", "121", "0", "0"],
        ["daemon,", "clock", "late", "p50", "p99", "max"],
        ["eagle", "abababab", "live", "100", "µs", "198", "µs", "200", "µs"],
        ["eagle", "abababab", "bulk_load", "100", "µs", "198", "µs", "200", "µs"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "reported"),
    [(Verdict(1, counts={"early": 1}), "VIOLATIONS"), (Verdict(), "no record")],
)
def test_the_key_tables_say_what_the_audit_found(
    found: Verdict, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert " ".join(lines(capsys, found)[0]) == f"the audit found {reported}"


def test_the_key_tables_cut_no_figure_of_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = verdict()
    found.balance = [Balance("ab" * 16, "shop", *[123_456_789_012] * 10)]
    assert lines(capsys, found)[2][1:] == ["123,456,789,012"] * 10


@pytest.mark.parametrize(
    ("ns", "text"), [(None, ""), (7, "7 ns"), (1500, "1.5 µs"), (90 * S, "1.5 min")]
)
def test_durations(ns: int | None, text: str) -> None:
    assert duration(ns) == text


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake with the records of CLEAN."""
    (tmp_path / "lake").mkdir()
    CLEAN.write(tmp_path / "demo")
    ship(tmp_path / "demo", Lake(tmp_path / "lake"), "eagle")
    return Lake(tmp_path / "lake")


def totals(found: Profile) -> list[int]:
    return [sum(getattr(one, name) for one in found.flow) for name in COLOURS]


@pytest.mark.costly("the figures are twenty Spark jobs")
def test_figures_of_a_wal(spark: SparkSession, lake: Lake) -> None:
    parts, judged = figures(read_events(spark, lake))
    (found,) = parts
    assert (found.node, found.clock, totals(found)) == ("eagle", "live", [11, 1, 1, 4, 3, 0, 0, 0])
    assert found.lateness is not None
    assert (found.lateness.n, found.lateness.at(1.0)) == (4, 1 * S)
    assert sum(found.due.values()) == 12
    assert found.advice == []  # the test's records have no time of arming
    assert judged == []


@pytest.mark.tier("all")
def test_a_daemon_counts_once_whatever_its_node_was_called(spark: SparkSession, lake: Lake) -> None:
    called = F.when(F.col("lsn") < 9, "hawk").otherwise(F.col("node"))
    (found,) = figures(read_events(spark, lake).withColumn("node", called)).parts
    assert (found.node, totals(found)) == ("eagle", [11, 1, 1, 4, 3, 0, 0, 0])


@pytest.mark.tier("all")
def test_figures_keep_apart_what_gold_keeps_apart(spark: SparkSession, lake: Lake) -> None:
    """Bulk loads are no live traffic, even if they replace timers. Timers that came due before a
    restart are not late."""
    bronze = read_events(spark, lake).withColumns({
        "bulk_load": F.expr("IF(ticket IN (2, 4) AND kind IN ('arm', 'fire'), X'01', bulk_load)"),
        "replaced_bulk_loaded": F.expr("IF(replaced = 4, 1, replaced_bulk_loaded)"),
        "flags": F.expr("IF(ticket = 1 AND kind = 'fire', 2, flags)"),
    })  # fmt: skip
    found = figures(bronze).parts
    topics = gold.merge(gold.topics(silver.lifecycles(bronze, bronze)), TOPICS, ["clock"])
    rows = gold.latency(topics, ["clock"]).where("measure = 'lateness'").collect()
    assert {one.clock: totals(one) for one in found} == {
        "live": [9, 1, 0, 3, 3, 0, 0, 0], "bulk_load": [2, 0, 1, 1, 0, 0, 0, 0]
    }  # fmt: skip
    late = {one.clock: (one.lateness.n, one.lateness.at(1.0)) for one in found if one.lateness}
    assert late == {"live": (2, 0), "bulk_load": (1, 1 * S)}
    assert late == {row.clock: (row.n, row.max_ns) for row in rows}
    sums = (F.sum(name).alias(name) for name in COLOURS)
    counted = gold.flow(bronze).groupBy("clock").agg(*sums).collect()
    assert {row.clock: [*row[1:]] for row in counted} == {one.clock: totals(one) for one in found}


@pytest.mark.tier("all")
def test_a_node_is_judged_by_all_of_its_daemons(spark: SparkSession, lake: Lake) -> None:
    """Neither of two shards has the thousand values that a verdict needs, but their node has.
    `pipeline slow` gives the same verdict."""
    ids = (F.lit(uuid(number).hex()) for number in (1, 2))
    bronze = (
        read_events(spark, lake)
        .withColumn("daemon", F.explode(F.array(*ids)))
        .withColumn("copy", F.explode(F.sequence(F.lit(1), F.lit(200))))
    )
    lifecycles = silver.lifecycles(bronze, bronze)
    (reported,) = figures(bronze).slow
    assert [reported] == slow(gold.topics(lifecycles), gold.workers(lifecycles))
    assert (reported.name, reported.measure, reported.n, reported.p99_ns) == (
        "eagle",
        "lateness",
        1600,
        1 * S,
    )


@pytest.mark.tier("all")
def test_unshipped_records_have_the_node_of_shipped_ones(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Records of the arena that has replaced the shipped arena also have this node."""
    wal, later = tmp_path / "demo", tmp_path / "later"
    by(1, CLEAN.having(closing=None)).write(wal)
    (tmp_path / "lake").mkdir()
    lake = Lake(tmp_path / "lake")
    ship(wal, lake, "eagle")
    restarted(2, OPEN).write(later)
    for path in later.iterdir():
        path.replace(wal / path.name)
    with whole(spark, lake, [wal]) as found:
        nodes = found.bronze.select("daemon", "node").distinct().collect()
        assert {tuple(row) for row in nodes} == {(uuid(n).hex(), "eagle") for n in (1, 2)}
        assert found.found.lost == [LsnRange(uuid(1).hex(), len(RECORDS) + 1, None, "recovery")]
        assert {row.node for row in read_events(spark, lake, [wal]).select("node").collect()} == {
            "eagle"
        }
