"""The report: its figures from a journal, and the page, which needs nothing but itself."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from journal_writer import S
from test_audit import CLEAN, ship, small_plans

from purgatoryd.pipeline.audit import Balance, Verdict
from purgatoryd.pipeline.continuity import Lost, Violation
from purgatoryd.pipeline.figures import RANKS, Advice, Flow, Part, Spread, figures
from purgatoryd.pipeline.findings import Finding
from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.report import duration, key_table, page
from purgatoryd.pipeline.tiers import read_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def spread(step_ns: int) -> Spread:
    return Spread(1000, tuple(int(rank * 100 * step_ns) for rank in RANKS))


def part(clock: str = "boot") -> Part:
    one = Part("ab" * 16, "eagle", clock, 10**15, 10**15 + 60_000_000)
    one.flow = [Flow(10**15 + n * 10**6, 10, 5, 3, 0) for n in range(60)]
    one.lateness = spread(2_000)
    one.due = {(10**9 + 10 * n, row): n + row for n in range(6) for row in range(10)}
    one.column_s, one.row_s = 10, 1
    one.advice = [Advice("shop", "late", 300, 180, 0.375, 2 * S, 9 * S, None)]
    if clock == "boot":
        one.stages = {"request_queue": spread(300), "send": spread(10_000_000)}
        one.slow = [Finding("node", "eagle", "live", NOW, "service", 1000, 5, 10**9, 10**9,
                            3 * 10**8, "send", 990_000_000)]  # fmt: skip
    return one


def verdict() -> Verdict:
    found = Verdict(records=1234)
    found.balance = [Balance("ab" * 16, "shop", 0, 600, 300, 0, 180, 0, 0, 120)]
    return found


def test_a_page_of_a_clean_journal() -> None:
    text = page(verdict(), [part(), part("virtual")], NOW)
    assert "The audit found no violation." in text
    assert "virtual clock" in text
    assert "longer than any asked for" in text
    assert "send, p99 990 ms" in text
    assert text.count("<svg") == 7  # a virtual clock has no stages


def test_the_page_needs_nothing_but_itself() -> None:
    text = page(verdict(), [part()], NOW)
    used = re.findall(r'(?:src|href|url)\s*[=(]\s*"?([^")\s>]+)', text)
    assert {one.split(":")[0][:1] for one in used} <= {"#", "d"}  # in the page, or data:
    assert "<script" not in text
    assert "@import" not in text


def test_violations_and_what_is_missing_are_on_the_page() -> None:
    found = verdict()
    found.counts = {"early": 2}
    evidence = {"namespace": "shop", "key": "<b>a</b>", "ended_ns": 9}
    found.samples = [Violation("early", "ab" * 16, 12, 7, evidence)]
    found.lost = [Lost("ab" * 16, 1, 99, "retention"), Lost("ab" * 16, 700, None, "recovery")]
    text = page(found, [part()], NOW)
    assert "The audit found 2 violations." in text
    assert "key=&lt;b&gt;a&lt;/b&gt; ended_ns=9" in text
    assert "retention" in text
    assert "recovery" in text


def test_the_key_table() -> None:
    table = key_table(verdict(), [part()])
    assert [str(c.header) for c in table.columns][:4] == ["daemon", "clock", "added", "cancelled"]
    assert [list(c.cells) for c in table.columns][2:4] == [["600"], ["300"]]


@pytest.mark.parametrize(
    ("ns", "text"), [(None, ""), (7, "7 ns"), (1500, "1.5 µs"), (90 * S, "1.5 min")]
)
def test_durations(ns: int | None, text: str) -> None:
    assert duration(ns) == text


def test_figures_of_a_journal(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    CLEAN.write(tmp_path / "demo")
    lake = Lake(tmp_path / "lake")
    ship(tmp_path / "demo", lake, "eagle")
    with small_plans(spark):
        (found,) = figures(read_events(spark, lake))
    totals = [sum(getattr(one, name) for one in found.flow)
              for name in ("added", "cancelled", "expired", "satisfied")]  # fmt: skip
    assert (found.node, found.clock, totals) == ("eagle", "boot", [11, 1, 4, 3])
    assert found.lateness is not None
    assert (found.lateness.n, found.lateness.at(1.0)) == (4, 1 * S)
    assert sum(found.due.values()) == 12
    assert found.advice == []  # format 1.0 does not tell when what ended was armed
    assert found.slow == []
