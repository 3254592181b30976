"""The audit: whether what the WALs say can be true, and was kept.

A shuffle of its own over bronze: it shares no code with the tables, and believes no record about
another one. Every check gives violations of the same form; docs/reference/tables.md names them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.pipeline import checks, ledger
from purgatoryd.pipeline.continuity import (
    Continuity,
    Coverage,
    LsnRange,
    Run,
    Violation,
    coverage,
)
from purgatoryd.pipeline.ledger import Unjudged
from purgatoryd.pipeline.lifecycles import (
    ARMED,
    FINAL_STATE_CODES,
    in_runs,
    lifecycles,
    opening_rows,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SAMPLES = 20
"""Violations of one kind that are shown; all are counted."""


@dataclass(frozen=True, slots=True)
class Balance:
    """What began and what ended in a namespace: carried over + added = final states + open."""

    daemon: str
    namespace: str
    carried_over: int
    added: int
    cancelled: int
    replaced: int
    expired: int
    satisfied: int
    failed: int
    open: int
    skipped: int = 0
    coalesced: int = 0

    @property
    def holds(self) -> bool:
        """True if nothing came or went unseen."""
        final_states = self.cancelled + self.replaced + self.expired + self.satisfied + self.failed
        final_states += self.skipped + self.coalesced
        return self.carried_over + self.added == final_states + self.open


@dataclass
class Verdict:
    """The result of an audit. `lost`: records that the lake does not have. `coverage`: the judged
    records. `counts`: violations of each kind; `samples`: some of each. `ledger`: lines of ledgers
    of each kind; `unjudged`: lines that the audit could not judge."""

    records: int = 0
    unknown: int = 0
    runs: list[Run] = field(default_factory=list)
    lost: list[LsnRange] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    balance: list[Balance] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    samples: list[Violation] = field(default_factory=list)
    ledger: dict[str, int] = field(default_factory=dict)
    unjudged: list[Unjudged] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """True if records were audited and none is a violation; see `coverage` for their share."""
        return self.records > 0 and not self.counts

    @property
    def colour(self) -> str:
        """Colour of the verdict: "red" with a violation, "green" if every record was judged and
        none is a violation, else "amber"."""
        if self.counts:
            return "red"
        return "green" if self.clean and self.coverage.is_whole else "amber"


def audit(
    bronze: DataFrame, openings: DataFrame, found: Continuity, noted: DataFrame | None = None
) -> Verdict:
    """Audits the records of the runs in `found`; `openings`: the rows of the snapshots; `noted`:
    ledgers, as ledger.read_ledgers gives them."""
    events = in_runs(bronze, found.runs)
    carried_over = opening_rows(openings, found.runs)
    known = lifecycles(events, carried_over).persist()
    try:
        verdict = Verdict(runs=found.runs, lost=found.lost, coverage=coverage(found))
        verdict.records, verdict.unknown = _counted(events)
        verdict.balance = balance(known, events)
        for part in checks.all_checks(known, events, carried_over, openings, found):
            _add(verdict, part)
        if noted is not None:
            verdict.ledger = ledger.totals(noted, events)
            with ledger.compared(noted, known, events, found) as compared:
                verdict.unjudged = ledger.unjudged(compared)
                for part in ledger.reconcile(compared):
                    _add(verdict, part)
        for violation in (*found.violations, *_unbalanced(verdict.balance)):
            verdict.counts[violation.kind] = verdict.counts.get(violation.kind, 0) + 1
            verdict.samples.append(violation)
        verdict.samples = _with_keys(events, verdict.samples)
        return verdict
    finally:
        known.unpersist()


def _counted(events: DataFrame) -> tuple[int, int]:
    """Records, and those of unknown kinds among them."""
    row = events.agg(F.count("*"), F.count_if(F.col("kind") == "unknown")).first()
    assert row is not None
    return row[0], row[1]


def _add(verdict: Verdict, violations: DataFrame) -> None:
    """All are counted, the first of each kind are shown; in one query."""
    one = F.struct("daemon", "lsn", "ticket", "evidence")
    rows = violations.groupBy("kind").agg(
        F.count("*").alias("found"), F.min_by(one, one, SAMPLES).alias("shown")
    )
    for row in sorted(rows.collect()):
        verdict.counts[row.kind] = verdict.counts.get(row.kind, 0) + row.found
        verdict.samples += (
            Violation(row.kind, first.daemon, first.lsn, first.ticket, json.loads(first.evidence))
            for first in row.shown
        )


UNBORN = "carried_over = 0 AND final_states > 0 AND sure"
"""It ended, and neither a record nor the opening has its begin."""


BEFORE = "acks > 0 AND adds + carried_over + final_states + unparks = 0 AND last_move_lsn IS NULL"
"""It began and ended before the opening; only its owner's acknowledgement came later."""


def balance(known: DataFrame, events: DataFrame) -> list[Balance]:
    """Of each daemon and namespace, by counts of records, not of tickets."""
    sums = {
        name: F.sum(F.expr(f"IF(final_state = '{name}', final_states, 0)"))
        for name in FINAL_STATE_CODES
    }
    sums["cancelled"] = F.sum(F.expr("IF(final_state IN ('end', 'cancelled'), final_states, 0)"))
    rows = known.where(f"NOT ({BEFORE})").groupBy("daemon", "namespace_hash").agg(
        F.count_if(F.expr(f"adds = 0 AND NOT ({UNBORN})")).alias("carried_over"),
        F.sum("adds").alias("added"), sums["cancelled"].alias("cancelled"),
        sums["replaced"].alias("replaced"), (sums["fire"] + sums["expired"]).alias("expired"),
        sums["satisfied"].alias("satisfied"), sums["failed"].alias("failed"),
        sums["skipped"].alias("skipped"), sums["coalesced"].alias("coalesced"),
        F.count_if(F.col("final_states") == 0).alias("open"),
    )  # fmt: skip
    names = events.where("namespace IS NOT NULL").select("namespace").distinct()
    names = names.withColumn("namespace_hash", F.xxhash64("namespace"))
    named = rows.join(F.broadcast(names), "namespace_hash", "left").drop("namespace_hash")
    named = named.withColumn("namespace", F.coalesce("namespace", F.lit("?")))
    return [Balance(**row.asDict()) for row in named.orderBy("daemon", "namespace").collect()]


def _unbalanced(balances: Iterable[Balance]) -> Iterator[Violation]:
    for one in balances:
        if not one.holds:
            yield Violation("unbalanced", one.daemon, None, None, asdict(one))


def _with_keys(events: DataFrame, samples: list[Violation]) -> list[Violation]:
    """Each with namespace and key of its ticket, looked up."""
    tickets = sorted({v.ticket for v in samples if v.ticket is not None})
    if not tickets:
        return samples
    rows = events.where(ARMED).where(F.col("ticket").isin(tickets))
    names = {
        (row.daemon, row.ticket): {"namespace": row.namespace, "key": row.key_text}
        for row in rows.select("daemon", "ticket", "namespace", _key_text()).collect()
    }
    return [
        v._replace(evidence={**names.get((v.daemon, v.ticket or 0), {}), **v.evidence})
        for v in samples
    ]


def _key_text() -> Column:
    return F.expr("IF(key_type = 'str', CAST(key AS string), lower(hex(key)))").alias("key_text")
