"""The audit finds each planted violation, and none in clean WALs.

One run audits all WALs. Each WAL belongs to a daemon of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from audit_stories import (
    CLEAN,
    IN_PARTS,
    NOTED,
    OPEN,
    RECORDS,
    Line,
    by,
    call,
    noted,
    notice,
    reported,
    restarted,
    ship,
    uuid,
    write_ledger,
)
from click.testing import CliRunner, Result
from stored_arena import WALS, StoredWal
from wal_writer import (
    BULK_LOAD_NONE,
    BULK_LOAD_OPEN,
    FAILED,
    QUORUM,
    SUM,
    VIRTUAL,
    Record,
    S,
    Story,
    Wal,
    Watched,
    arm,
    bulk_load,
    end,
    fire,
    move,
    outcome,
    sent,
    timestamps,
    unpark,
    watch,
)

from purgatoryd.cli.app import app
from purgatoryd.pipeline.audit import SAMPLES, Verdict, audit
from purgatoryd.pipeline.continuity import Coverage, LsnRange, continuity, coverage
from purgatoryd.pipeline.lake import BRONZE, OPENINGS, Lake, Manifest
from purgatoryd.pipeline.ledger import Unjudged, read_ledgers
from purgatoryd.pipeline.ship import Shipper
from purgatoryd.pipeline.silver import received
from purgatoryd.pipeline.whole import Whole, _copy, whole
from purgatoryd.shm_layout.errors import BadPath
from purgatoryd.shm_layout.wal import header_of, segments

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).resolve().parents[2]


def slack_until(end_s: int) -> Story:
    """Return CLEAN with a timer that is due after 80 s with a slack of 2^39 ns, so at 550 s. The
    newest record is of `end_s`."""
    armed = CLEAN.instead(again_d=arm(5, "d", 70 * S, at_ns=4 * S, replaced=4, slack_log2=39))
    return armed.then("arm_g", arm(30, "x", 2000 * S, at_ns=end_s * S), end(30, at_ns=end_s * S))


EMPTY = CLEAN.having(wal=Wal(began_empty=True), first=None)
"""CLEAN without its first snapshot. The first segment says that the arena was created empty."""
PARKED = arm(1, "a", 10 * S, at_ns=1 * S, parked=True)
BACK = unpark(1, "a", 10 * S, at_ns=1 * S)


def bulk_load_rows(*between: Record) -> Iterator[Record]:
    """Yield the records of a bulk load whose only row is done twice, with records in `between`."""
    row = {"at_ns": 21 * S, "bulk_load": b"sixteen bytes id", "bulk_load_row": 7}
    yield bulk_load(b"sixteen bytes id", BULK_LOAD_OPEN, at_ns=21 * S)
    for ticket, more in ((30, between), (31, ())):
        yield arm(ticket, "x", 900 * S, **row)  # type: ignore[arg-type]
        yield end(ticket, at_ns=21 * S)
        yield from more


class Planted(NamedTuple):
    """The records of a WAL, and the kinds of violation that the audit must report. `ticket`: ticket
    of the first violation."""

    story: Story
    kinds: set[str]
    ticket: int | None = None


def planted(kind: str, story: Story, ticket: int | None = None, also: str = "") -> Planted:
    return Planted(story, {kind, *also.split()}, ticket)


PLANTED = [
    planted("armed_twice", CLEAN.then("arm_a", RECORDS["arm_a"]), 1, "unbalanced"),
    planted("never_armed", CLEAN.instead(arm_b=None), 2, "unbalanced"),
    planted("ended_twice", CLEAN.then("fire_b", end(1, at_ns=12 * S)), 1, "unbalanced"),
    planted("ended_before_armed", CLEAN.instead(arm_c=end(3, at_ns=2 * S),
                                                cancel_c=arm(3, "c", 50 * S, at_ns=3 * S)), 3),
    planted("wrong_final_state",
            CLEAN.instead(end_f=fire(7, 9 * S, 9 * S, position=1, sequence=2)), 7),
    planted("early", CLEAN.instead(fire_a=fire(1, 10 * S, 10 * S - 1, position=2, sequence=3)), 1),
    planted("wrong_deadline", CLEAN.instead(fire_b=fire(2, 12 * S, 12 * S, position=3,
                                                        sequence=4)), 2),
    planted("early_by_wall", CLEAN.instead(fire_w=fire(8, 19 * S, 19 * S, position=4,
                                                       sequence=5)), 8),
    planted("moved_after_end", CLEAN.then("cancel_c", move(3, 90 * S, at_ns=3 * S)), 3),
    planted("moved_back", CLEAN.instead(move_d=move(5, 65 * S, at_ns=5 * S)), 5),
    planted("ack_unfounded", CLEAN.then("ack_e", end(1, at_ns=8 * S, acknowledged=True)), 1),
    planted("acked_twice", CLEAN.then("ack_e", end(6, at_ns=8 * S, dropped=True)), 6),
    planted("key_armed_twice", CLEAN.then("arm_b", arm(20, "a", 90 * S, at_ns=1 * S),
                                          end(20, at_ns=1 * S)), 1),
    planted("condition_unmet", CLEAN.instead(
        watch_e=watch(6, "e", 30 * S, [Watched(0, 8)], at_ns=6 * S)), 6),
    planted("condition_unmet", CLEAN.instead(
        watch_s=watch(10, "s", 30 * S, [Watched(0, base=7, cap=10), Watched(1, cap=2)],
                      condition=SUM, threshold=5, at_ns=13 * S)), 10),
    planted("condition_unmet", CLEAN.instead(
        watch_s=watch(10, "s", 30 * S, [Watched(0, 5), Watched(1, 99)],
                      condition=QUORUM, threshold=2, at_ns=13 * S)), 10),
    planted("condition_overlooked", CLEAN.instead(
        watch_f=watch(7, "f", 9 * S, [Watched(0, 7)], at_ns=8 * S)), 7),
    planted("failure_unfounded", CLEAN.instead(
        end_f=outcome(7, 9 * S, 9 * S, FAILED, keys=1, position=1, sequence=2, error=5)), 7),
    planted("sequence_gap", CLEAN.instead(
        fire_b=fire(2, 11 * S, 12 * S, position=3, sequence=5),
        fire_w=fire(8, 20 * S, 20 * S, position=4, sequence=6)), 2),
    planted("sequence_repeated", CLEAN.instead(
        fire_b=fire(2, 11 * S, 12 * S, position=3, sequence=3),
        fire_w=fire(8, 20 * S, 20 * S, position=4, sequence=4)), 2),
    planted("position_gap", CLEAN.instead(
        fire_w=fire(8, 20 * S, 20 * S, position=6, sequence=5)), 8),
    planted("position_repeated", CLEAN.instead(
        fire_b=fire(2, 11 * S, 12 * S, position=2, sequence=4), sent_ab=sent(1, 3, at_ns=12 * S),
        fire_w=fire(8, 20 * S, 20 * S, position=3, sequence=5), sent_w=sent(3, 4, at_ns=20 * S)),
        2),
    planted("sent_out_of_order", CLEAN.instead(sent_w=sent(3, 5, at_ns=20 * S))),
    planted("sent_before_made", CLEAN.instead(sent_ab=sent(1, 5, at_ns=12 * S),
                                              sent_w=sent(5, 5, at_ns=20 * S))),
    planted("clock_back", CLEAN.instead(arm_g=arm(9, "g", 900 * S, at_ns=5 * S)), 9),
    planted("fired_parked", CLEAN.instead(arm_a=PARKED), 1),
    planted("unpark_unfounded", CLEAN.then("arm_a", BACK), 1),
    planted("unparked_twice", CLEAN.instead(arm_a=PARKED).then("arm_a", BACK, BACK), 1),
    planted("clock_back", CLEAN.having(cuts={"arm_g": (0, 1)}).instead(
        arm_g=arm(9, "g", 900 * S, at_ns=5 * S)), 9),
    planted("bulk_load_row_twice", CLEAN.then("arm_g", *bulk_load_rows()), 31),
    planted("wrong_timestamps", CLEAN.instead(
        fire_a=Record("fire", RECORDS["fire_a"].body + timestamps(4, 1 * S))), 1),
    planted("forgotten", CLEAN.then("arm_g", arm(30, "x", 2000 * S, at_ns=500 * S),
                                    end(30, at_ns=500 * S)), 5),
    planted("forgotten", slack_until(700), 5),
    planted("lsn_gap", CLEAN.having(cuts={"fire_a": (3, 1)})),
    planted("lsn_repeated", CLEAN.having(cuts={"fire_a": (-2, 1)}, closing=None)),
    planted("epoch_back", CLEAN.having(cuts={"fire_a": (0, 0)})),
    planted("never_armed", EMPTY.instead(arm_b=None), 2, "unbalanced"),
    planted("position_gap", Story({
        name: RECORDS[name] for name in ("shop", "late", "arm_a")
    } | {"fire_a": fire(1, 10 * S, 10 * S, position=1, sequence=1)}, EMPTY.wal, first=None), 1),
    planted("snapshot_lacks", CLEAN.having(closing=OPEN[:1]), 9),
    planted("snapshot_invents", CLEAN.having(closing=(*OPEN, RECORDS["arm_a"])), 1),
]  # fmt: skip


# ---- ledgers ---------------------------------------------------------------------------------


def row(number: int) -> Line:
    """Return the ledger line which says that a row of a bulk load took effect earlier. The timer of
    the row is gone."""
    place = {"bulk_load": b"sixteen bytes id".hex(), "row": number}
    return call("row", 0, "x", "bulk_loaded", 21 * S) | place


BULK_LOADED = CLEAN.then(
    "arm_g", arm(12, "p", 900 * S, at_ns=21 * S, parked=True),
    arm(13, "q", 900 * S, at_ns=21 * S, parked=True), unpark(13, "q", 900 * S, at_ns=21 * S),
    *list(bulk_load_rows())[:3],
).having(closing=(*OPEN, arm(12, "p", 900 * S), arm(13, "q", 900 * S)))  # fmt: skip
"""CLEAN with one parked timer, one unparked timer, and one row of a bulk load."""
TRUE_LEDGER = [*noted(), call("unpark", 13, "q", "unparked", 22 * S), row(7)]
WRONG_LEDGERS: list[tuple[str, list[Line], int]] = [
    ("ack_lost", noted(more=call("add", 50, "z", "added", 5 * S)), 50),
    ("ack_differs", noted(a=call("add", 1, "z", "added", 1 * S)), 1),
    ("cancel_undone", noted(more=call("cancel", 1, "a", "cancelled", 9 * S)), 1),
    ("fired_unfounded", noted(more=call("cancel", 3, "c", "fired", 9 * S)), 3),
    ("unpark_lost", noted(more=call("unpark", 12, "p", "unparked", 15 * S)), 12),
    ("row_lost", [*noted(), row(8)], 0),
    ("outcome_differs", noted(reported_e=reported(6, "expired")), 6),
    ("notice_unfounded", noted(more=notice(3, "c", 6, 21 * S)), 3),
    ("notice_differs", noted(notice_w=notice(8, "w", 5, 20 * S, "other")), 8),
    ("received_early", noted(notice_a=notice(1, "a", 3, 10 * S - 1)), 1),
    ("notice_doubled", noted(more=notice(2, "b", 4, 12 * S)), 2),
    ("notice_missed", noted(notice_b=None), 8),
]
LOST = {"op": "lost", "namespace": "shop", "stream": "0" * 15 + "1", "subscriber": 1,
        "topic": "late", "sequence": 4, "upto": 4}  # fmt: skip


# ---- one audit of all WALs -------------------------------------------------------------------

CLEAN_FROM, LEDGER_FROM, PAIR, PAIR_LACKS, HOLED, STRANGER = 200, 300, 400, 402, 250, 260
HOLED_LINES = [
    *noted(),
    call("cancel", 3, "c", "fired", 5 * S),  # noted before the hole of missing records
    call("cancel", 8, "w", "cancelled", 15 * S),  # noted after the hole
    call("cancel", 4, "d", "fired", 30 * S),  # fired before the hole, noted after it
]


CLEAN_STORIES = {
    "boot": CLEAN,
    "virtual": CLEAN.having(wal=Wal(clock=VIRTUAL)),
    "no_snapshot": CLEAN.having(first=None, closing=None),
    "empty": EMPTY,
    "late_snapshot": CLEAN.having(first=None),
    "retention": CLEAN.having(first_lsn=100),
    "parked": CLEAN.instead(arm_a=PARKED).then("arm_a", BACK),
    "slack": slack_until(500),
    "acknowledged_while_copied": CLEAN.then("late", end(90, at_ns=1 * S, acknowledged=True)).having(
        copied=3
    ),
    "acknowledged_long_after": CLEAN.then("gone", end(90, at_ns=14 * S, acknowledged=True)),
    "owner_gone": CLEAN.then("gone", end(7, at_ns=14 * S, dropped=True)),
    "forgotten_bulk_load": CLEAN.then(
        "arm_g", *bulk_load_rows(bulk_load(b"sixteen bytes id", BULK_LOAD_NONE, at_ns=21 * S))
    ),
    "metrics": CLEAN.then("gone", Record("metrics", bytes(32))),
    "unknown_kind": CLEAN.then("gone", Record("gone", bytes(32))),
}


@dataclass
class Found:
    """The verdict of the audit, and for each daemon the kinds of violation that it found.

    `retained`: folder of WALs, lake and ledgers. `soaked`: uuid of the soak's daemon. `totals`: the
    report of the soak.
    """

    verdict: Verdict
    kinds: dict[bytes, set[str]]
    retained: Path
    soaked: bytes
    totals: dict[str, Any]

    def first(self, kind: str, daemon: bytes) -> Any:
        return next(v for v in self.verdict.samples if (v.kind, v.daemon) == (kind, daemon.hex()))

    def lost(self, daemon: bytes) -> list[tuple[int, int | None, str]]:
        found = [one for one in self.verdict.lost if one.daemon == daemon.hex()]
        return [(one.first_lsn, one.last_lsn, one.cause) for one in found]

    def ranges(self, daemon: bytes) -> list[tuple[int, int | None, str]]:
        """Return the ranges of a daemon's records that the audit could not judge."""
        found = [one for one in self.verdict.coverage.ranges if one.daemon == daemon.hex()]
        return [(one.first_lsn, one.last_lsn, one.cause) for one in found]


@pytest.fixture(scope="module")
def found(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("audit")
    totals, lake = soak(3, root), Lake(root / "lake")
    (ledger,) = (root / "ledgers").iterdir()
    soaked = bytes.fromhex(ledger.name.removeprefix("daemon="))
    stories = {uuid(n): by(n, plant.story) for n, plant in enumerate(PLANTED, 1)}
    clean = enumerate(CLEAN_STORIES.values(), CLEAN_FROM)
    stories |= {uuid(n): by(n, story) for n, story in clean}
    for n, (_, lines, _) in enumerate([("", TRUE_LEDGER, 0), *WRONG_LEDGERS], LEDGER_FROM):
        stories[uuid(n)] = by(n, BULK_LOADED)
        write_ledger(root / "ledgers", uuid(n), lines)
    excused = uuid(LEDGER_FROM - 1)
    stories[excused] = by(LEDGER_FROM - 1, CLEAN)
    write_ledger(root / "ledgers", excused, noted(notice_b=LOST))
    stories[uuid(HOLED)] = by(HOLED, IN_PARTS)
    write_ledger(root / "ledgers", uuid(HOLED), HOLED_LINES)
    write_ledger(root / "ledgers", uuid(STRANGER), noted())
    for pair, living in ((PAIR, OPEN), (PAIR_LACKS, OPEN[:1])):
        stories[uuid(pair)] = by(pair, CLEAN.having(closing=None))
        stories[uuid(pair + 1)] = restarted(pair + 1, living)
    ship(StoredWal(WALS[-1], root / "stored").directory, lake, "stored")
    for daemon, story in stories.items():
        node = str(int.from_bytes(daemon) // 2) if int.from_bytes(daemon) >= PAIR else daemon.hex()
        story.write(root / daemon.hex() / "demo")
        ship(root / daemon.hex() / "demo", lake, node)
    lose(lake, uuid(HOLED), 1)
    with whole(spark, lake, [root / "wal" / "soak"]) as read:
        verdict = audited(read, read_ledgers(spark, root / "ledgers"))
    kinds: dict[bytes, set[str]] = defaultdict(set)
    for violation in verdict.samples:
        kinds[bytes.fromhex(violation.daemon)].add(violation.kind)
    return Found(verdict, kinds, root, soaked, totals)


def lose(lake: Lake, daemon: bytes, at: int) -> None:
    """Remove one of a daemon's segments from the lake."""
    lost = lake.manifests(BRONZE, daemon.hex())[at]
    lake.folder("manifests", daemon.hex()).joinpath(f"{lost.name}.json").unlink()


def audited(read: Whole, noted_: DataFrame) -> Verdict:
    """Run the audit. Spark persists the tables, so that the checks do not each read the files
    again."""
    tables = [table.persist() for table in (read.bronze, read.openings, noted_)]
    try:
        return audit(read.bronze, read.openings, read.found, noted_)
    finally:
        for table in tables:
            table.unpersist()


# ---- violations, losses and the balance ------------------------------------------------------


@pytest.mark.parametrize("number", range(1, len(PLANTED) + 1), ids=lambda n: _named(n))
def test_planted_violations_are_named(found: Found, number: int) -> None:
    plant = PLANTED[number - 1]
    assert found.kinds[uuid(number)] == plant.kinds
    kind = min(plant.kinds - {"unbalanced"})
    shown = found.first(kind, uuid(number))
    if plant.ticket is not None:
        assert shown.ticket == plant.ticket
        assert shown.evidence
    assert shown.lsn is not None


def _named(number: int) -> str:
    return f"{number}-{min(PLANTED[number - 1].kinds - {'unbalanced'})}"


@pytest.mark.parametrize("at", range(len(WRONG_LEDGERS)), ids=[w[0] for w in WRONG_LEDGERS])
def test_a_contradicting_ledger_is_named(found: Found, at: int) -> None:
    kind, _, ticket = WRONG_LEDGERS[at]
    daemon = uuid(LEDGER_FROM + 1 + at)
    assert found.kinds[daemon] == {kind}
    assert found.first(kind, daemon).ticket == ticket
    assert found.first(kind, daemon).evidence["file"] == "host-1-0.jsonl"


@pytest.mark.parametrize("name", CLEAN_STORIES)
def test_clean_wals_have_no_violations(found: Found, name: str) -> None:
    assert found.kinds[uuid(CLEAN_FROM + list(CLEAN_STORIES).index(name))] == set()


def test_a_stored_wal_has_no_violations(found: Found) -> None:
    """A real daemon has written this WAL. Its timers ended in every way, replacement included."""
    reported = json.loads((WALS[-1] / "wal.json").read_text())
    assert found.kinds[bytes.fromhex(reported["uuid"])] == set()


def test_a_soaked_wal_has_no_violations(found: Found) -> None:
    """In the soak, the daemon, workers and the exporter were killed at random during their work."""
    assert found.kinds[found.soaked] == set()
    assert max(found.verdict.counts.values()) <= SAMPLES  # the samples contain all findings
    assert found.lost(found.soaked) == []
    lake, hot = Lake(found.retained / "lake"), segments(found.retained / "wal" / "soak")
    epochs = {manifest.epoch for manifest in lake.manifests(BRONZE, found.soaked.hex())}
    epochs |= {header_of(file.path).epoch for file in hot}
    assert found.totals["daemon_kills"] > 0
    # may be fewer than the kills, because a daemon that was killed at once has written nothing
    assert len(epochs) > 1
    (balance,) = [one for one in found.verdict.balance if one.daemon == found.soaked.hex()]
    assert balance.added >= found.totals["added"] + found.totals["armed"] > 0
    assert min(balance.cancelled, balance.expired, balance.satisfied) > 0
    ledgers = found.retained / "ledgers" / f"daemon={found.soaked.hex()}"
    reported = {op for file in ledgers.iterdir() for op in OP.findall(file.read_text())}
    assert reported >= {"add", "watch", "cancel", "outcome", "notice"}


OP = re.compile(r'"op":"(\w+)"')


def soak(seconds: int, retained: Path) -> dict[str, Any]:
    """Run a soak that leaves its WAL and ledgers in `retained`; return its report."""
    script = str(ROOT / "tests" / "crash" / "soak.py")
    command = [sys.executable, script, str(seconds), "--keep", str(retained)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support")}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_a_true_ledger_and_losses_that_were_reported_are_no_violations(found: Found) -> None:
    assert found.kinds[uuid(LEDGER_FROM)] == set()
    assert found.kinds[uuid(LEDGER_FROM - 1)] == set()


def test_a_hole_hides_nothing_else_of_a_ledger(found: Found) -> None:
    assert {"lsn_gap", "fired_unfounded", "cancel_undone"} == found.kinds[uuid(HOLED)]
    assert found.first("fired_unfounded", uuid(HOLED)).ticket == 3
    assert found.first("cancel_undone", uuid(HOLED)).ticket == 8


def test_unknown_ledger_lines_are_named(found: Found) -> None:
    """The audit cannot judge some lines of HOLED. They report final states in the hole of missing
    records, or they are from a time after the last record before the hole."""
    assert [one for one in found.verdict.unjudged if one.daemon != found.soaked.hex()] == [
        Unjudged(uuid(HOLED).hex(), 6, "beyond"),
        Unjudged(uuid(STRANGER).hex(), len(NOTED), "absent"),
    ]


def test_records_missing_in_the_lake_are_named(found: Found) -> None:
    at = {name: uuid(CLEAN_FROM + n) for n, name in enumerate(CLEAN_STORIES)}
    assert found.lost(at["boot"]) == []
    assert found.lost(at["retention"]) == [(1, 99, "retention")]
    assert found.lost(at["no_snapshot"]) == []
    assert found.ranges(at["no_snapshot"]) == [(1, len(RECORDS), "no_snapshot")]
    assert found.ranges(at["empty"]) == []
    assert found.lost(uuid(PAIR)) == [(len(RECORDS) + 1, None, "recovery")]


def test_records_lost_by_a_recovery_are_named(found: Found) -> None:
    assert found.kinds[uuid(PAIR)] == found.kinds[uuid(PAIR + 1)] == set()
    assert found.kinds[uuid(PAIR_LACKS)] == {"snapshot_lacks"}
    assert found.first("snapshot_lacks", uuid(PAIR_LACKS)).ticket == 9


def test_the_balance_of_a_namespace(found: Found) -> None:
    """Timers and operations that ended before the audited range do not count, even if their final
    states were acknowledged in this range."""
    for name in ("boot", "empty", "acknowledged_while_copied", "acknowledged_long_after"):
        daemon = uuid(CLEAN_FROM + [*CLEAN_STORIES].index(name)).hex()
        (shop,) = [one for one in found.verdict.balance if one.daemon == daemon]
        figures = (shop.carried_over, shop.added, shop.cancelled, shop.replaced, shop.expired,
                   shop.satisfied, shop.failed, shop.open)  # fmt: skip
        assert figures == (0, 11, 1, 1, 4, 3, 0, 2)
        assert shop.namespace == "shop"


def test_evidence_has_the_key(found: Found) -> None:
    early = 1 + next(n for n, plant in enumerate(PLANTED) if plant.kinds == {"early"})
    shown = found.first("early", uuid(early))
    assert shown.evidence == {
        "namespace": "shop", "key": "a", "ended_ns": 10 * S - 1, "end_deadline_ns": 10 * S,
    }  # fmt: skip


# ---- missing records, found in manifests alone -----------------------------------------------


def manifest(first: int, last: int, *, epoch: int = 1, table: str = BRONZE) -> Manifest:
    return Manifest(table, "d", "n", epoch, first, last, 0, "boot", 1, 0, 0)


def opening(start: int) -> Manifest:
    return manifest(start, start - 1, table=OPENINGS)


def covered(segments: list[Manifest], *snapshots: int) -> Coverage:
    return coverage(continuity(segments, [opening(start) for start in snapshots]))


def test_a_wal_that_began_empty_is_judged_from_its_first_record_on() -> None:
    """The audit judges these records even if the oldest shipped snapshot is late or missing."""
    first = replace(manifest(1, 9), began_empty=True)
    for snapshots in ([], [1], [18], [21]):
        found = covered([first, manifest(10, 20)], *snapshots)
        assert found == Coverage(20, 20, 20)
        assert found.is_whole


def test_a_wal_that_began_with_timers_is_judged_from_its_first_snapshot_on() -> None:
    segments = [manifest(1, 9), manifest(10, 20)]
    before = LsnRange("d", 1, 17, "snapshot")
    assert covered(segments, 18) == Coverage(3, 20, 20, (before,))
    assert continuity(segments, [opening(18)]).lost == []  # no record is missing in the lake
    assert covered(segments) == Coverage(0, 20, 20, (LsnRange("d", 1, 20, "no_snapshot"),))


def test_coverage_counts_all_records_of_the_wal() -> None:
    """The count includes records that were removed from the WAL unshipped, and records that are
    only in the WAL."""
    found = covered([replace(manifest(5, 9), gone_from=1), manifest(10, 20)], 5, 26)
    missing = LsnRange("d", 1, 4, "retention"), LsnRange("d", 21, 25, "not_shipped")
    assert found == Coverage(16, 16, 25, missing)
    assert (found.share, found.is_exact) == (0.64, True)
    assert [found.reaches(share) for share in (0, 0.64, 0.65, 1)] == [True, True, False, False]


def test_coverage_is_never_whole_if_the_missing_count_is_unknown() -> None:
    missing = LsnRange("d", 10, None, "recovery")
    assert not Coverage(9, 9, 9, (missing,)).is_exact
    assert not Coverage(9, 9, 9, (missing,)).reaches(1)
    assert not Coverage().reaches(0.1)


@pytest.mark.parametrize(
    ("segments", "snapshots", "lost", "kinds"),
    [
        ([(1, 9), (10, 20)], [1], [], []),
        ([(5, 9)], [5], [(1, 4, "retention")], []),
        ([(5, 9)], [7], [(1, 4, "retention")], []),
        ([(1, 9), (15, 20)], [1, 17], [(10, 14, "retention")], []),
        ([(1, 9), (15, 20, 2)], [1, 15], [(10, 14, "forced")], []),
        ([(1, 9), (15, 20)], [1], [(10, 14, "unexplained")], ["lsn_gap"]),
        ([(1, 9), (9, 20)], [1], [], ["lsn_repeated"]),
        ([(1, 9, 2), (10, 20, 1)], [1], [], ["epoch_back"]),
    ],
)
def test_holes_have_a_cause(
    segments: list[tuple[int, ...]], snapshots: list[int], lost: list[Any], kinds: list[str]
) -> None:
    """In each case, the exporter has noted that the missing records were removed from the WAL."""
    behind = [0, *(last for _, last, *_ in segments)]
    known = [
        replace(manifest(first, last, epoch=sum(e) or 1),
                gone_from=before + 1 if before + 1 < first else 0)
        for before, (first, last, *e) in zip(behind, segments, strict=False)
    ]  # fmt: skip
    one = continuity(known, [opening(start) for start in snapshots])
    assert [tuple(o[1:]) for o in one.lost] == lost
    assert [v.kind for v in one.violations] == kinds


@pytest.fixture
def in_parts(tmp_path: Path) -> Path:
    """Write a WAL of three segments, with a snapshot at the start of the third segment."""
    IN_PARTS.write(tmp_path / "demo")
    behind = 1 + list(RECORDS).index("arm_w")
    data = Wal().snapshot(behind, OPEN[:1], next_ticket=1000, now_ns=100 * S)
    (tmp_path / "demo" / f"{behind:016x}.snapshot").write_bytes(data)
    (tmp_path / "lake").mkdir()
    return tmp_path


def holes(root: Path) -> tuple[list[str], list[str]]:
    lake = Lake(root / "lake")
    one = continuity(lake.manifests(BRONZE), lake.manifests(OPENINGS))
    return [lost.cause for lost in one.lost], [violation.kind for violation in one.violations]


def drop(root: Path, *at: int) -> None:
    """Remove these segments from the WAL."""
    files = sorted((root / "demo").glob("*.wal"))
    for number in at:
        files[number].unlink()


def ship_first(root: Path) -> None:
    """Ship only the first segment."""
    shipper = Shipper(root / "demo", Lake(root / "lake"), "eagle")
    for manifest in shipper.poll():
        if manifest.table == BRONZE:
            break
    shipper.close()


def test_a_hole_at_the_beginning_is_retention(in_parts: Path) -> None:
    ship_first(in_parts)
    drop(in_parts, 0, 1)
    ship(in_parts / "demo", Lake(in_parts / "lake"), "eagle")
    assert holes(in_parts) == (["retention"], [])


def test_a_hole_before_the_first_shipped_segment_is_retention(in_parts: Path) -> None:
    drop(in_parts, 0, 1)
    ship(in_parts / "demo", Lake(in_parts / "lake"), "eagle")
    assert holes(in_parts) == (["retention"], [])


@pytest.mark.parametrize("at", [0, 1])
def test_a_hole_of_shipped_segments_is_no_retention(in_parts: Path, at: int) -> None:
    ship(in_parts / "demo", Lake(in_parts / "lake"), "eagle")
    lose(Lake(in_parts / "lake"), Wal().uuid, at)
    causes, kinds = holes(in_parts)
    assert set(causes) - {"snapshot"} == {"unexplained"}
    assert kinds == ["lsn_gap"]


def test_a_hole_before_older_records_is_no_retention(in_parts: Path) -> None:
    drop(in_parts, 1)
    ship(in_parts / "demo", Lake(in_parts / "lake"), "eagle")
    assert holes(in_parts) == (["unexplained"], ["lsn_gap"])


def test_retention_explains_nothing_else(in_parts: Path) -> None:
    """The first segment is shipped and then lost in the lake. The second one is never shipped."""
    ship_first(in_parts)
    drop(in_parts, 0, 1)
    ship(in_parts / "demo", Lake(in_parts / "lake"), "eagle")
    lose(Lake(in_parts / "lake"), Wal().uuid, 0)
    assert holes(in_parts) == (["unexplained"], ["lsn_gap"])


# ---- the commands ----------------------------------------------------------------------------


def test_hot_segments_are_visible_to_a_reader_of_the_lake(
    in_parts: Path, spark: SparkSession
) -> None:
    lake = Lake(in_parts / "lake")
    with whole(spark, lake, [in_parts / "demo"]) as found:
        files = [*found.bronze.inputFiles(), *found.openings.inputFiles()]
    assert files
    assert {file.startswith(f"file://{lake.root}/hot/") for file in files} == {True}


def test_segments_shipped_during_a_read_count_once(
    in_parts: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(in_parts / "lake")

    def shipped_meanwhile(folder: Path, lake: Lake, overlay: Lake) -> None:
        _copy(folder, lake, overlay)
        ship(folder, lake, "eagle")

    monkeypatch.setattr("purgatoryd.pipeline.whole._copy", shipped_meanwhile)
    with whole(spark, lake, [in_parts / "demo"]) as read:
        assert len(lake.manifests()) == 3
        assert read.found.violations == []
        assert read.bronze.count() == len(RECORDS)


HOLDER = """
import sys, time
from pathlib import Path
from purgatoryd.pipeline.lake import Lake

with Lake(Path(sys.argv[1])).overlay() as own:
    print(own.root, flush=True)
    time.sleep(600)
"""


def test_files_of_a_killed_reader_are_removed_by_the_next(tmp_path: Path) -> None:
    lake, command = Lake(tmp_path), [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        theirs = Path(reader.stdout.readline().strip())
        with lake.overlay() as ours:
            assert ours.root != theirs
            assert theirs.is_dir()
        assert not ours.root.exists()
        reader.kill()
    assert theirs.is_dir()
    with lake.overlay():
        assert not theirs.exists()


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["pipeline", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("damage", "detail"),
    [
        (lambda reported: reported[:100], "has 100 bytes, not {size}"),
        (lambda reported: reported + b"x", "has {more} bytes, not {size}"),
        (lambda reported: bytes(len(reported)), "cannot be read"),
        (None, "is gone"),
    ],
    ids=["cut", "grown", "damaged", "gone"],
)
def test_a_file_of_the_lake_that_is_not_as_it_was_written_is_named(
    in_parts: Path, spark: SparkSession, damage: Callable[[bytes], bytes] | None, detail: str
) -> None:
    lake = Lake(in_parts / "lake")
    ship(in_parts / "demo", lake, "eagle")
    path = lake.data(lake.manifests(BRONZE)[1])
    size = path.stat().st_size
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    reported = invoke("audit", "--lake", lake.root)
    assert reported.exit_code == 5
    assert reported.stderr == f"purgatoryd: {path}: {detail.format(size=size, more=size + 1)}\n"


def test_a_folder_without_ledgers_is_named(spark: SparkSession, tmp_path: Path) -> None:
    for read in (read_ledgers, received):
        with pytest.raises(BadPath, match="contains no ledger"):
            read(spark, tmp_path)


@pytest.mark.tier("all")
@pytest.mark.usefixtures("spark")
def test_nothing_to_audit_is_reported(tmp_path: Path) -> None:
    reported = invoke("audit", "--lake", tmp_path)
    assert (reported.exit_code, reported.stdout) == (1, "0 records: nothing to audit\n")
    reported = invoke("report", "--lake", tmp_path, "--out", tmp_path / "r.html")
    assert reported.exit_code == 1
    assert "There was nothing to audit." in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("command", ["audit", "report"])
def test_a_missing_lake_is_refused_and_not_created(tmp_path: Path, command: str) -> None:
    reported = invoke(command, "--lake", tmp_path / "typo")
    assert reported.exit_code == 7
    assert not (tmp_path / "typo").exists()


def test_a_page_that_cannot_be_written_is_reported_first(tmp_path: Path) -> None:
    reported = invoke("report", "--lake", tmp_path, "--out", tmp_path / "no" / "r.html")
    assert reported.exit_code == 7
    assert "no" in reported.stderr


@pytest.mark.tier("all")
def test_the_commands_report_their_findings(in_parts: Path, spark: SparkSession) -> None:
    """With --wal-dir, the commands work even before anything was shipped. The exit code is 5 after
    a segment was lost."""
    lake, wal, page = in_parts / "lake", ("--wal-dir", in_parts), in_parts / "r.html"
    ledger = ("--ledger", in_parts / "ledgers")
    write_ledger(in_parts / "ledgers", uuid(STRANGER), noted())
    lake.rmdir()
    reported = invoke("audit", "--lake", lake, *wal, *ledger, "--require-coverage", "100%")
    assert (reported.exit_code, reported.stdout.splitlines()[-1]) == (
        0,
        f"{len(RECORDS)} records: no violation; coverage 100 %: {len(RECORDS)} judged"
        f" of {len(RECORDS)} in the lake and {len(RECORDS)} that the WALs had",
    )
    assert "in no ledger 11 timers and operations that were armed" in reported.stdout
    assert f"not judged {uuid(STRANGER).hex()[:8]} 15 lines of ledgers: absent" in reported.stdout
    ship(in_parts / "demo", Lake(lake), "eagle")
    assert invoke("audit", "--lake", lake, "--require-coverage", "100%").exit_code == 0
    lose(Lake(lake), Wal().uuid, 1)
    broken = invoke("report", "--lake", lake, *ledger, "--out", page, "--json")
    assert broken.exit_code == 5
    rows = [json.loads(line) for line in broken.stdout.splitlines()]
    assert {"missing", "violation", "unjudged", "balance"} <= {name for row in rows for name in row}
    assert rows[-2]["verdict"] == "red"
    assert "lsn_gap" in page.read_text()


@pytest.fixture
def in_part(in_parts: Path) -> Path:
    """A lake without the first snapshot, so that the audit can judge only the last record."""
    for snapshot in (in_parts / "demo").glob("*.snapshot"):
        snapshot.unlink()
    behind = len(RECORDS)
    data = Wal().snapshot(behind, OPEN[:1], next_ticket=1000, now_ns=100 * S)
    (in_parts / "demo" / f"{behind:016x}.snapshot").write_bytes(data)
    ship(in_parts / "demo", Lake(in_parts / "lake"), "eagle")
    return in_parts


def test_coverage_below_the_required_share_fails(
    in_part: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = (LsnRange(Wal().uuid.hex(), 2, 10, "snapshot"),)
    tenth = Verdict(records=10, coverage=Coverage(1, 10, 10, ranges))
    monkeypatch.setattr("purgatoryd.pipeline.audit.audit", lambda *_: tenth)
    for share, code in (("10", 0), ("99.9", 5)):
        done = invoke("audit", "--lake", in_part / "lake", "--require-coverage", share)
        assert done.exit_code == code
        said = "coverage is 10 %; --require-coverage is 99.9 %" in done.stderr
        assert said == (code == 5), done.stderr


@pytest.mark.tier("all")
def test_a_report_of_too_little_coverage_is_written_and_fails(
    in_part: Path, spark: SparkSession
) -> None:
    page = in_part / "r.html"
    failed = invoke(
        "report", "--lake", in_part / "lake", "--out", page, "--require-coverage", "99.9"
    )
    assert failed.exit_code == 5
    assert "--require-coverage is" in failed.stderr
    assert 'class="verdict amber"' in page.read_text()
    assert "no violation in what was judged" in page.read_text()


@pytest.mark.tier("all")
def test_a_partial_verdict_is_amber_and_names_the_other_records(
    in_part: Path, spark: SparkSession
) -> None:
    lake, behind, judged, count = in_part / "lake", len(RECORDS), 1, len(RECORDS)
    share = f"{100 * judged / count - 0.1:.2f}%"
    reported = invoke("audit", "--lake", lake, "--json", "--require-coverage", share)
    rows = [json.loads(line) for line in reported.stdout.splitlines()]
    assert reported.exit_code == 0
    assert [row["not_judged"] for row in rows if "not_judged" in row] == [
        {"daemon": Wal().uuid.hex(), "first_lsn": 1, "last_lsn": behind - 1, "cause": "snapshot"}
    ]
    assert not any("missing" in row for row in rows)
    assert rows[-1]["verdict"] == "amber"
    assert rows[-1]["coverage"] == {
        "judged": judged, "shipped": count, "had": count, "share": judged / count, "exact": True,
        "whole": False,
    }  # fmt: skip
