"""Findings: nodes and workers that are slow, with the evidence and the stage that is guilty.

Slow is what the service answers for: the request queue, the local stage, the response queue and
sending, together; or firing late. Never the waiting that was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from purgatoryd.clients import Admin
from purgatoryd.pipeline import gold, sketches
from purgatoryd.pipeline.schemas import TOPICS, WORKERS
from purgatoryd.pipeline.silver import SERVICE
from purgatoryd.shm_layout.layout import EVENTS_NAMESPACE, EVENTS_TOPIC

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

LIMIT_NS = 300 * 10**6
LEAST = 1000
_RANKS = {"p50_ns": 0.5, "p99_ns": 0.99, "max_ns": 1.0}


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject`: "node" or "worker", `name`: which; `node`: itself, or where the worker's daemon
    is; `hour`: its begin, UTC. `measure`: "service" or "lateness", with `n` values, of which the
    99th percentile is over `limit_ns`. `stage`: the one with the highest 99th percentile,
    `stage_p99_ns`; what fires late waits in "remote"."""

    subject: str
    name: str
    node: str
    clock: str
    hour: datetime
    measure: str
    n: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    limit_ns: int
    stage: str
    stage_p99_ns: int

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "hour": f"{self.hour:%Y-%m-%dT%H:%M:%SZ}"}

    def payload(self) -> bytes:
        """Of the notice that tells it."""
        return json.dumps(self.record()).encode()


def publish(name: str, findings: Sequence[Finding]) -> None:
    """Tells them in the events of the daemon `name`, by its admin socket.

    Raises DaemonUnreachable, MessageRefused, Refused.
    """
    with Admin(name) as admin:
        for finding in findings:
            key = f"slow {finding.subject}"
            admin.publish(EVENTS_TOPIC, key, finding.payload(), namespace=EVENTS_NAMESPACE)


def slow(
    topics: DataFrame, workers: DataFrame, limit_ns: int = LIMIT_NS, least: int = LEAST
) -> list[Finding]:
    """All findings in TOPICS and WORKERS, per hour; of groups with `least` values or more."""
    hour = F.date_trunc("hour", "window_start").alias("hour")
    nodes = gold.merge(topics, TOPICS, ["clock", "node", hour])
    named = workers.where("worker IS NOT NULL")
    people = gold.merge(named, WORKERS, ["clock", "node", "worker", hour])
    return [
        *_findings("node", nodes, limit_ns, least),
        *_findings("worker", people, limit_ns, least),
    ]


def _findings(subject: str, merged: DataFrame, limit_ns: int, least: int) -> Iterator[Finding]:
    figures = [figure for name in gold.LATENCIES for figure in _figures(name)]
    over = [
        (F.col(f"{measure}_n") >= least) & (F.col(f"{measure}_p99_ns") > limit_ns)
        for measure in ("service", "lateness")
    ]
    hours = merged.select("clock", "node", F.col(subject).alias("name"), "hour", *figures)
    for row in hours.where(over[0] | over[1]).orderBy("hour", "node", "name").collect():
        for measure in ("service", "lateness"):
            if row[f"{measure}_n"] >= least and row[f"{measure}_p99_ns"] > limit_ns:
                yield _finding(subject, row, measure, limit_ns)


def _figures(name: str) -> list[Column]:
    values = {key: sketches.quantile(name, rank) for key, rank in _RANKS.items()}
    values["n"] = sketches.count(name)
    return [value.alias(f"{name}_{key}") for key, value in values.items()]


def _finding(subject: str, row: Row, measure: str, limit_ns: int) -> Finding:
    stages = {name: row[f"{name}_p99_ns"] or 0 for name in SERVICE}
    if measure == "lateness":
        stages = {"remote": row["lateness_p99_ns"]}
    stage = max(stages, key=lambda name: stages[name])
    evidence = {key: row[f"{measure}_{key}"] for key in ("n", *_RANKS)}
    return Finding(
        subject=subject, name=row["name"], node=row["node"] or "", clock=row["clock"],
        hour=row["hour"].astimezone(UTC), measure=measure, limit_ns=limit_ns,
        stage=stage, stage_p99_ns=stages[stage], **evidence,
    )  # fmt: skip
