"""OpenMetrics families of daemons and deployments, and the table of them in
docs/reference/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from purgatoryd.cli.shards import daemons, directory_of
from purgatoryd.shm_layout.arena import ConsumerGroup, Namespace, Reader
from purgatoryd.shm_layout.errors import (
    ArenaError,
    ArenaMissing,
    BadPath,
    DaemonUnreachable,
    PermissionDenied,
    TableBroken,
)
from purgatoryd.shm_layout.layout import ANYBODY, DaemonState, Degraded, Measured
from purgatoryd.shm_layout.metrics import (
    BUCKETS,
    COUNTERS,
    GAUGES,
    MEANINGS,
    SINCE_START,
    CursorLag,
    Histogram,
    Metrics,
    process_gauges,
    read_metrics,
    upper_edge_ns,
)
from purgatoryd.shm_layout.paths import arena_paths
from purgatoryd.shm_layout.shm import ArenaFile
from purgatoryd.shm_layout.status_file import Cause, StatusFile, StatusRecord
from purgatoryd.shm_layout.wire import NamespaceSettings

PREFIX = "purgatoryd_"
REFUSED = "refused_"
STAGES = ("request_queue", "local", "remote", "response_queue", "send")
"""Histograms in one family, which the label `stage` distinguishes."""
SLOW_NS = 300_000_000
"""Threshold of an alert rule. A bucket ends just above it."""
READABLE = (
    "1 if the arena can be read; 0 if it does not exist, is of another version, or must not be "
    "read by this user. For a deployment, this is about its status file"
)
# Metrics that a deployment's supervisor process has in addition to the metrics of each daemon.
SHARDS = "shards of the deployment"
SERVING = "shards that are ready and answer the supervisor"
RESTARTS = "restarts of shards since the deployment started"
_REASONS = [one.names[0] for one in Degraded]
TOP = 20
"""Maximum number of namespaces that have samples of their own."""
_MARK = re.compile(r"<!-- metrics -->\n.*?<!-- end -->", re.DOTALL)


def _edges_ns(powers: int) -> list[int]:
    """Return `powers` bucket edges at powers of two from 1 us on, plus an edge just above
    SLOW_NS."""
    ends = {upper_edge_ns(bucket) for bucket in range(BUCKETS)}
    slow_ns = min(end for end in ends if end >= SLOW_NS)
    return sorted({(1 << power) - 1 for power in range(10, 10 + powers)} & ends | {slow_ns})


EDGES_NS = _edges_ns(33)
"""Bucket edges up to 73 minutes."""
WAITING = "remote"
"""The stage in which a timer waits for its deadline, or an operation for its condition. Long
durations are normal."""
WAITING_EDGES_NS = _edges_ns(49)
"""Bucket edges of the stage WAITING, up to 9 years."""


# ---- families --------------------------------------------------------------------------------


def families(name: str, found: Metrics) -> Iterator[Metric]:
    """Yield all families of a daemon. The label `daemon` of every sample is the daemon's name."""
    yield _gauge(name, "readable", READABLE, 1)
    yield from _counters(name, found)
    yield from _gauges(name, found)
    reasons = (one in found.why for one in Degraded)
    yield from _states(name, found.state, dict(zip(_REASONS, reasons, strict=True)))
    yield from _namespaces(name, found)
    yield from _cursors(name, found)
    yield from _groups(name, found)
    yield from _histograms(name, found)


def _counters(name: str, found: Metrics) -> Iterator[Metric]:
    refused = CounterMetricFamily(
        f"{PREFIX}refused", "records refused, by reason", labels=["daemon", "reason"]
    )
    for counter, value in found.counters.items():
        if counter.startswith(REFUSED):
            refused.add_metric([name, counter.removeprefix(REFUSED)], value)
            continue
        yield _counter(name, counter, _meaning(counter), value)
    yield refused


def _meaning(counter: str) -> str:
    since = ", since the daemon's start" if counter in SINCE_START else ""
    return COUNTERS[counter] + since


def _gauges(name: str, found: Metrics) -> Iterator[Metric]:
    for gauge, value in found.gauges.items():
        yield _gauge(name, gauge, GAUGES[gauge], value)


def _gauge(name: str, gauge: str, meaning: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}{gauge}", meaning, labels=["daemon"])
    family.add_metric([name], value)
    return family


def _counter(name: str, counter: str, meaning: str, value: float) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}{counter}", meaning, labels=["daemon"])
    family.add_metric([name], value)
    return family


def deployment_families(name: str, found: StatusRecord) -> Iterator[Metric]:
    """Yield all families of a deployment's supervisor process."""
    yield _gauge(name, "readable", READABLE, 1)
    yield from _process(name, found, {one: one in found.causes for one in Cause})
    yield _gauge(name, "shards", SHARDS, found.shards)
    yield _gauge(name, "shards_serving", SERVING, found.serving)
    yield _counter(name, "shard_restarts", RESTARTS, found.restarts)
    yield _counter(name, "log_dropped", _meaning("log_dropped"), found.log_dropped)


def _process(name: str, found: StatusRecord, reasons: Mapping[str, bool]) -> Iterator[Metric]:
    for gauge, value in process_gauges(found).items():
        yield _gauge(name, gauge, GAUGES[gauge], value)
    yield from _states(name, found.daemon_state, reasons)


def _states(name: str, found: int, reasons: Mapping[str, bool]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        f"{PREFIX}state", "1 for the current state of the daemon", labels=["daemon", "state"]
    )
    for one in DaemonState:
        state.add_metric([name, one.name.lower()], one == found)
    why = GaugeMetricFamily(
        f"{PREFIX}degraded",
        "1 for each reason why the daemon is degraded",
        labels=["daemon", "reason"],
    )
    for reason, holds in reasons.items():
        why.add_metric([name, reason], holds)
    yield state
    yield why


def _namespaces(name: str, found: Metrics) -> Iterator[Metric]:
    labels = ["daemon", "namespace"]
    timers = GaugeMetricFamily(
        f"{PREFIX}namespace_timers",
        f"armed timers, of the {TOP} namespaces with the most timers",
        labels=labels,
    )
    memory = GaugeMetricFamily(
        f"{PREFIX}namespace_bytes",
        "memory of the keys and payloads of these namespaces",
        labels=labels,
    )
    for one in found.namespaces[:TOP]:
        timers.add_metric([name, one.name], one.live)
        memory.add_metric([name, one.name], one.bytes)
    yield timers
    yield memory


def _cursors(name: str, found: Metrics) -> Iterator[Metric]:
    lag = GaugeMetricFamily(
        f"{PREFIX}cursor_lag",
        f"notices that a cursor has not committed, of the {TOP} cursors with the most",
        labels=["daemon", "namespace", "cursor"],
    )
    for one in found.cursors[:TOP]:
        lag.add_metric([name, one.namespace, one.cursor], one.lag)
    yield lag


def _groups(name: str, found: Metrics) -> Iterator[Metric]:
    labels = ["daemon", "namespace", "group"]
    oldest = GaugeMetricFamily(
        f"{PREFIX}group_oldest_seconds",
        "time since the oldest job without an ack fired, dead letters excluded; 0 = none; of the "
        f"{TOP} consumer groups with the oldest jobs",
        labels=labels,
    )
    jobs = GaugeMetricFamily(
        f"{PREFIX}group_jobs", "jobs of these consumer groups, by state", labels=[*labels, "state"]
    )
    for one in found.groups[:TOP]:
        oldest.add_metric([name, one.namespace, one.name], one.oldest_ns / 1e9)
        for state in ("waiting", "leased", "delayed", "dead"):
            jobs.add_metric([name, one.namespace, one.name, state], getattr(one, state))
    yield oldest
    yield jobs


def _histograms(name: str, found: Metrics) -> Iterator[Metric]:
    stages = HistogramMetricFamily(
        f"{PREFIX}stage_seconds", "duration of each stage", labels=["daemon", "stage"]
    )
    for which, histogram in found.histograms.items():
        if which in STAGES:
            stages.add_metric([name, which], *_buckets(histogram))
            continue
        family = HistogramMetricFamily(
            f"{PREFIX}{which}_seconds", MEANINGS[which], labels=["daemon"]
        )
        family.add_metric([name], *_buckets(histogram))
        yield family
    yield stages


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return (buckets, sum in seconds). A bucket is (edge in seconds, cumulative count)."""
    reached, rows = 0, list(histogram.buckets())
    buckets: list[tuple[str, float]] = []
    for edge_ns in WAITING_EDGES_NS if histogram.name == WAITING else EDGES_NS:
        while rows and rows[0][0] <= edge_ns:
            reached += rows.pop(0)[1]
        end: str = floatToGoString(edge_ns / 1e9)  # type: ignore[no-untyped-call]
        buckets.append((end, reached))
    return [*buckets, ("+Inf", histogram.count)], histogram.sum_ns / 1e9


# ---- daemons ---------------------------------------------------------------------------------


class Daemons(Collector):
    """Collects the metrics of a daemon, or of a deployment and all its shards.

    Each collection reads the routing table again, because resharding changes the shards.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def collect(self) -> Iterable[Metric]:
        """Yield each family once, with the samples of all daemons."""
        return merged(exported(self._name))


def merged(families: Iterable[Metric]) -> Iterable[Metric]:
    """Yield each family once, with all its samples."""
    found: dict[str, Metric] = {}
    for family in families:
        known = found.setdefault(family.name, family)
        if known is not family:
            known.samples += family.samples
    return found.values()


def exported(name: str) -> Iterator[Metric]:
    """Yield all families of a daemon, or of a deployment and each of its shards.

    If a daemon cannot be read, yield only the family that reports this.
    """
    try:
        directory, shards = directory_of(name), list(daemons(name))
    except (TableBroken, PermissionDenied):
        yield _gauge(name, "readable", READABLE, 0)
        return
    if directory is not None:
        yield from _of_deployment(name, StatusFile(directory, name))
    for shard in shards:
        yield from _of_daemon(shard.name)


def _of_deployment(name: str, file: StatusFile) -> Iterator[Metric]:
    try:
        found = file.header
    except (OSError, TableBroken, PermissionDenied) as error:
        yield from _unreadable(name, missing=isinstance(error, FileNotFoundError))
        return
    yield from deployment_families(name, found)


def _of_daemon(name: str) -> Iterator[Metric]:
    starts = _starts(name)
    try:
        found = read(name)
    except (ArenaError, PermissionDenied, DaemonUnreachable, BadPath) as error:
        missing = isinstance(error, ArenaMissing | DaemonUnreachable) and starts is None
        yield from _unreadable(name, missing=missing)
        if starts is not None:
            yield from _process(name, starts, dict.fromkeys(_REASONS, False))
        return
    if starts is not None:
        gauges = {**found.gauges, **process_gauges(starts)}
        found = replace(found, state=DaemonState(starts.daemon_state), gauges=gauges)
    yield from families(name, found)


def _starts(name: str) -> StatusRecord | None:
    """Return the status file of a starting daemon, whose arena may still show the previous run."""
    with suppress(DaemonUnreachable, BadPath, TableBroken, PermissionDenied, OSError):
        paths = arena_paths(name)
        return StatusFile(paths.directory, paths.name).header
    return None


def _unreadable(name: str, *, missing: bool) -> Iterator[Metric]:
    """Yield `readable` 0. Yield `up` 0 only if the arena is missing, because otherwise `up` is
    unknown."""
    yield _gauge(name, "readable", READABLE, 0)
    if missing:
        yield _gauge(name, "up", GAUGES["up"], 0)


def read(name: str) -> Metrics:
    """Return the metrics in a daemon's arena, in any state.

    Raises ArenaError, BadPath, and DaemonUnreachable if there never was a daemon.
    """
    reader = Reader(ArenaFile.open(arena_paths(name).arena, read_only=True))
    try:
        return read_metrics(reader)
    finally:
        reader.close()


def registry(name: str) -> CollectorRegistry:
    """Return a registry that contains only the daemon `name`, or the deployment `name` and its
    shards."""
    only = CollectorRegistry(auto_describe=False)
    only.register(Daemons(name))
    return only


def text(name: str) -> str:
    """Return the metrics as OpenMetrics text. Raises the errors of read(), and TableBroken."""
    for daemon in daemons(name):
        read(daemon.name)
    printed: bytes = generate_latest(registry(name))  # type: ignore[no-untyped-call]
    return printed.decode()


# ---- the table -------------------------------------------------------------------------------


def _of_nobody() -> Iterator[Metric]:
    yield from families("", _no_metrics())
    yield from deployment_families("", StatusRecord(DaemonState.STOPPED, 0, 0, 0))


def _no_metrics() -> Metrics:
    settings = NamespaceSettings(ANYBODY, 0, 0, 0, 0, 0)
    return Metrics(
        DaemonState.STOPPED,
        Degraded(0),
        dict.fromkeys(COUNTERS, 0),
        dict.fromkeys(GAUGES, 0.0),
        {n.lower(): Histogram(n.lower(), (0,) * BUCKETS, 0, 0) for n in Measured.__members__},
        [Namespace("", 0, 0, 0, settings, ANYBODY)],
        [ConsumerGroup("", "", 0, 0, 0, 0, 0, 0, 0)],
        [CursorLag("", "", 0)],
    )


def table() -> str:
    """Return a Markdown table with a row for each family."""
    rows = ["| name | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for family in merged(_of_nobody()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = [label for label in family.samples[0].labels if label not in ("daemon", "le")]
        shown = ", ".join(f"`{label}`" for label in labels)
        rows.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    return "\n".join(rows) + "\n" + _labels()


def _labels() -> str:
    """Return a Markdown table of the label values that need an explanation."""
    rows = ["", "| label | value | meaning |", "| --- | --- | --- |"]
    rows += [f"| `stage` | `{stage}` | {MEANINGS[stage]} |" for stage in STAGES]
    rows += [
        f"| `reason` | `{counter.removeprefix(REFUSED)}` | {meaning} |"
        for counter, meaning in COUNTERS.items()
        if counter.startswith(REFUSED)
    ]
    return "\n".join(rows) + "\n"


def refresh(page: str) -> str:
    """Return the text of a page with its table regenerated."""
    return _MARK.sub(lambda _: f"<!-- metrics -->\n{table()}<!-- end -->", page)
