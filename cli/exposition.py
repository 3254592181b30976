"""Figures of arenas as families of OpenMetrics, and their table for docs/reference/metrics.md."""

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
from purgatoryd.shm_layout.arena import Namespace, Reader
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
"""Histograms that share a family, as the label `stage`."""
SLOW_NS = 300_000_000
"""What an alarm asks for; a bucket ends just above it."""
READABLE = (
    "1 while the arena can be read: 0 = there is none, it is another version's, or this user may "
    "not; of a deployment the same of its files"
)
# What is exported of the process that runs a deployment's shards, in addition to what each daemon
# has.
SHARDS = "shards that the deployment has"
SERVING = "of them, those that are ready and answer"
RESTARTS = "starts of shards that had ended, since that of the deployment"
_REASONS = [one.names[0] for one in Degraded]
TOP = 20
"""Namespaces that are named."""
_MARK = re.compile(r"<!-- metrics -->\n.*?<!-- end -->", re.DOTALL)


def _edges_ns(powers: int) -> list[int]:
    """A bucket for each power of two from 1 us on, and SLOW_NS's own end."""
    ends = {upper_edge_ns(bucket) for bucket in range(BUCKETS)}
    slow_ns = min(end for end in ends if end >= SLOW_NS)
    return sorted({(1 << power) - 1 for power in range(10, 10 + powers)} & ends | {slow_ns})


EDGES_NS = _edges_ns(33)
"""Up to 73 minutes."""
WAITING = "remote"
"""The stage that is meant to be long,"""
WAITING_EDGES_NS = _edges_ns(49)
"""and has buckets up to 9 years."""


# ---- families --------------------------------------------------------------------------------


def families(name: str, found: Metrics) -> Iterator[Metric]:
    """All families of a daemon, whose name is the label `daemon` of every sample."""
    yield _gauge(name, "readable", READABLE, 1)
    yield from _counters(name, found)
    yield from _gauges(name, found)
    reasons = (one in found.why for one in Degraded)
    yield from _states(name, found.state, dict(zip(_REASONS, reasons, strict=True)))
    yield from _namespaces(name, found)
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
    """All families of the process that runs the shards of a deployment."""
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
        f"{PREFIX}state", "1 for the state that the daemon is in", labels=["daemon", "state"]
    )
    for one in DaemonState:
        state.add_metric([name, one.name.lower()], one == found)
    why = GaugeMetricFamily(
        f"{PREFIX}degraded", "1 for each reason to be degraded", labels=["daemon", "reason"]
    )
    for reason, holds in reasons.items():
        why.add_metric([name, reason], holds)
    yield state
    yield why


def _namespaces(name: str, found: Metrics) -> Iterator[Metric]:
    labels = ["daemon", "namespace"]
    timers = GaugeMetricFamily(
        f"{PREFIX}namespace_timers", f"armed, of the {TOP} namespaces with the most", labels=labels
    )
    memory = GaugeMetricFamily(
        f"{PREFIX}namespace_bytes", "memory of their keys and payloads", labels=labels
    )
    for one in found.namespaces[:TOP]:
        timers.add_metric([name, one.name], one.live)
        memory.add_metric([name, one.name], one.bytes)
    yield timers
    yield memory


def _histograms(name: str, found: Metrics) -> Iterator[Metric]:
    stages = HistogramMetricFamily(
        f"{PREFIX}stage_seconds", "how long each stage takes", labels=["daemon", "stage"]
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
    """(end in seconds, values up to it) of each bucket, and the sum in seconds."""
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
    """The families of all that a name means, read whenever they are asked for: the shards of a
    deployment change with their number."""

    def __init__(self, name: str) -> None:
        self._name = name

    def collect(self) -> Iterable[Metric]:
        """Each family once, with samples of all daemons."""
        return merged(exported(self._name))


def merged(families: Iterable[Metric]) -> Iterable[Metric]:
    """Each family once, with all its samples."""
    found: dict[str, Metric] = {}
    for family in families:
        known = found.setdefault(family.name, family)
        if known is not family:
            known.samples += family.samples
    return found.values()


def exported(name: str) -> Iterator[Metric]:
    """All families of what a name means: a daemon, or a deployment and each of its shards. Of what
    cannot be read only that."""
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
    """How a daemon stands that does not serve yet: what its arena says may be of the one before."""
    with suppress(DaemonUnreachable, BadPath, TableBroken, PermissionDenied, OSError):
        paths = arena_paths(name)
        return StatusFile(paths.directory, paths.name).header
    return None


def _unreadable(name: str, *, missing: bool) -> Iterator[Metric]:
    """What is not there is not up; of what is there and cannot be read nobody knows."""
    yield _gauge(name, "readable", READABLE, 0)
    if missing:
        yield _gauge(name, "up", GAUGES["up"], 0)


def read(name: str) -> Metrics:
    """The figures of a daemon's arena, in whatever state it is. Raises ArenaError, BadPath,
    DaemonUnreachable if there never was one."""
    reader = Reader(ArenaFile.open(arena_paths(name).arena, read_only=True))
    try:
        return read_metrics(reader)
    finally:
        reader.close()


def registry(name: str) -> CollectorRegistry:
    """One that has these daemons alone."""
    only = CollectorRegistry(auto_describe=False)
    only.register(Daemons(name))
    return only


def text(name: str) -> str:
    """All that there is to tell of these daemons. Raises what read() does, TableBroken."""
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
    )


def table() -> str:
    """A row for each family, in Markdown."""
    rows = ["| name | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for family in merged(_of_nobody()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = [label for label in family.samples[0].labels if label not in ("daemon", "le")]
        shown = ", ".join(f"`{label}`" for label in labels)
        rows.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    return "\n".join(rows) + "\n" + _labels()


def _labels() -> str:
    """What the labels say of which the meaning is not plain."""
    rows = ["", "| label | value | meaning |", "| --- | --- | --- |"]
    rows += [f"| `stage` | `{stage}` | {MEANINGS[stage]} |" for stage in STAGES]
    rows += [
        f"| `reason` | `{counter.removeprefix(REFUSED)}` | {meaning} |"
        for counter, meaning in COUNTERS.items()
        if counter.startswith(REFUSED)
    ]
    return "\n".join(rows) + "\n"


def refresh(page: str) -> str:
    """The text of a page with its table regenerated."""
    return _MARK.sub(lambda _: f"<!-- metrics -->\n{table()}<!-- end -->", page)
