"""Metrics of a daemon, read from its arena; they are readable while the daemon hangs or after it
ended.

Counters and histograms count from the creation of the arena, across daemon starts, except those in
SINCE_START. A counter that has fallen belongs to a new arena.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import COUNTED, Handle, Namespace
from purgatoryd.shm_layout.health import is_alive, overdue_ns, still_ns
from purgatoryd.shm_layout.layout import (
    DaemonState,
    Degraded,
    Measured,
    WalState,
    fields,
    struct_format,
)

BUCKETS: int = lib.PG_HISTOGRAM_BUCKETS

# Help text of each counter. The reason of a refusal follows the prefix "refused_".
COUNTERS: dict[str, str] = {
    "adds": "timers armed, replacements included",
    "replaces": "timers that took the place of an armed one",
    "extends": "timers moved to a later deadline",
    "cancels": "timers cancelled",
    "cancels_fired": "cancels that came after the timer had fired",
    "cancels_unknown": "cancels of keys without a timer",
    "expiries": "timers that fired",
    "parks": "timers accepted without their payload in memory",
    "unparks": "timers whose payload came back",
    "notices_withdrawn": "notices that left the replay buffer to make space",
    "messages_sent": "messages of notices handed to the socket",
    "batches": "batches applied",
    "batches_repeated": "repeated batches, answered from memory",
    "batches_refused": "messages refused as a whole",
    "records": "records of batches applied",
    "watches": "operations armed",
    "satisfied": "operations that succeeded because their condition held",
    "already_true": "successful operations whose condition was only noticed at their deadline",
    "expired": "operations that timed out",
    "failed": "operations ended by a failing key",
    "cancelled": "operations cancelled by their own key or by a watch key",
    "checks": "CHECK requests to owners of client conditions",
    "outcomes_dropped": "outcomes freed because their owner's session had ended",
    "outcomes_repeated": "outcomes and CHECK requests repeated for owners that did not answer",
    "advances": "watch keys advanced",
    "visits": "watchers checked because a watch key advanced",
    "bulk_load_rows": "rows of bulk loads done",
    "bulk_load_rows_repeated": "repeated rows of bulk loads",
    "moved": "timers cascaded to a finer level of the wheel",
    "iterations": "loop iterations that advanced the wheel",
    "iterations_full": "loop iterations that used up their budget",
    "iteration_work": "timers moved or fired by the loop iterations that had any",
    "iteration_budget": "sum of the budgets of those loop iterations: the share of the budget in "
    "use is iteration_work divided by it",
    "wakeups": "times the loop woke up",
    "log_dropped": "log messages dropped because their kind was too frequent or the reader of the "
    "log was slow, full or gone",
    "records_redone": "records of the WAL from which the arena was recovered",
    "refused_full": "no free slot",
    "refused_payload": "no space for key and payload",
    "refused_names": "no free slot for a namespace or topic",
    "refused_busy": "the owner has too many unacknowledged outcomes; for a publish: the socket "
    "accepts no notices",
    "refused_keys": "no free slots for watch keys",
    "refused_denied": "a namespace of another owner, or a reserved name",
    "refused_quota": "over a quota",
    "refused_wal": "the WAL buffer was too full, or the WAL has stopped",
    "refused_bulk_loads": "no free slots for a bulk load",
    "refused_fenced": "rows of a bulk load that is closed, or of an older run of it",
    "refused_exists": "the key is armed, and the call has mode=error",
    "refused_stopping": "the daemon is draining",
    "refused_other": "a deadline too far or a watermark too high, no ticket left, "
    "one watch key twice, or a publish in another shard",
}
SINCE_START = {"wakeups", "messages_sent", "log_dropped"}
"""Counters that start at 0 with each start of the daemon."""

# Help text of each gauge. The name ends with the unit: seconds, bytes, or a number of things.
GAUGES: dict[str, str] = {
    "up": "1 while the daemon's process is there",
    "still_seconds": "time since the last heartbeat of the loop, which has one each second",
    "overdue_seconds": "time by which the next deadline is past",
    "starts": "starts of the daemon on this arena",
    "live": "timers and operations armed",
    "live_wall": "timers and operations with a deadline on the wall clock",
    "parked": "timers without their payload in memory",
    "operations": "operations armed",
    "outcomes": "unacknowledged outcomes",
    "bulk_loads": "bulk loads that the daemon remembers",
    "bulk_load_blocks": "blocks of rows of bulk loads in use",
    "capacity": "slots for timers, operations and outcomes",
    "slots_used": "slots in use",
    "payload_bytes": "memory for keys and payloads",
    "blob_bytes": "memory for keys and payloads in use",
    "replay_capacity": "capacity of the replay buffer in notices",
    "replay_entries": "notices in the replay buffer",
    "unsent": "notices in the replay buffer that were not yet sent",
    "replay_bytes_max": "memory that notices may use",
    "replay_bytes": "memory that notices use",
    "watch_records_max": "capacity for watch records: one per watch key of each operation",
    "watch_records": "watch records in use",
    "watch_keys_max": "capacity for watch keys",
    "watch_keys": "watch keys in use",
    "wal_buffer_bytes": "size of the WAL buffer; 0 = no WAL",
    "wal_buffer_used_bytes": "bytes in the WAL buffer that are not yet on disk",
    "wal_stopped": "1 once the WAL has stopped",
}


# Help text of each histogram: the first and the last moment of its span.
MEANINGS: dict[str, str] = {
    "structural_lateness": "from the deadline of a timer or an expired operation until it fired",
    "wakeup_lateness": "from the time for which the loop asked to be woken until it ran",
    "batch_service": "from the start of the work on a batch until its answer was built",
    "request_queue": "from the receipt of a batch until the start of the work on it",
    "local": "work of the loop on a batch, over all its loop iterations",
    "remote": "from arming until the final state of each timer that fired, was cancelled or was "
    "replaced, and of each operation; long by design",
    "response_queue": "from the end of the work on a message, timer or operation, or from the "
    "publishing, until the answer, notice or outcome began to be sent; includes the wait of a "
    "durable answer for the disk. Notices and outcomes under a virtual clock do not count",
    "send": "from the end of response_queue until the socket accepted the message",
}


# ---- histograms ------------------------------------------------------------------------------


def upper_edge_ns(bucket: int) -> int:
    """Return the highest value in ns that belongs to a bucket."""
    shift = max(0, bucket // 8 - 1)
    return ((bucket - 8 * shift + 1) << shift) - 1


_EDGES_NS = tuple(map(upper_edge_ns, range(BUCKETS)))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Distribution of a span. Upper edges of buckets exceed the values by at most an eighth."""

    name: str
    counts: tuple[int, ...]
    """Number of values in each bucket."""
    sum_ns: int
    max_ns: int

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def mean_ns(self) -> int:
        """Mean in ns; 0 if empty."""
        return self.sum_ns // max(1, self.count)

    def quantile(self, q: float) -> int:
        """Return the upper edge in ns of the bucket in which the share `q` of all values is
        reached.

        The result is at most the highest value; 0 if empty.
        """
        wanted = max(1.0, q * self.count)
        for edge_ns, reached in zip(_EDGES_NS, accumulate(self.counts), strict=True):
            if reached >= wanted:
                return min(edge_ns, self.max_ns)
        return self.max_ns

    def buckets(self) -> Iterator[tuple[int, int]]:
        """Yield (upper edge in ns, count) of the non-empty buckets, in ascending order."""
        pairs = zip(_EDGES_NS, self.counts, strict=True)
        return ((edge_ns, count) for edge_ns, count in pairs if count)

    def since(self, older: Histogram) -> Histogram:
        """Return the values added since `older`; all values if the arena is another one."""
        counts = tuple(now - then for now, then in zip(self.counts, older.counts, strict=True))
        if min(counts) < 0:
            return self
        highest_ns = max((e for e, n in zip(_EDGES_NS, counts, strict=True) if n), default=0)
        max_ns = self.max_ns if self.max_ns > older.max_ns else min(highest_ns, self.max_ns)
        return Histogram(self.name, counts, self.sum_ns - older.sum_ns, max_ns)

    def plus(self, other: Histogram) -> Histogram:
        """Return the sum of both, for example of two shards."""
        counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        highest_ns = max(self.max_ns, other.max_ns)
        return Histogram(self.name, counts, self.sum_ns + other.sum_ns, highest_ns)


def _histogram(name: str, live: Any) -> Histogram:
    counts = tuple(ffi.unpack(live.counts, BUCKETS))
    return Histogram(name, counts, live.sum_high << 64 | live.sum_ns, live.max_ns)


def histogram_name(number: int) -> str:
    """Return the name of a number of enum pg_histogram_id; a later version may have more
    numbers."""
    try:
        return Measured(number).name.lower()
    except ValueError:
        return f"histogram_{number}"


_HEADER = [name for name, _, _ in fields("pg_header")]
_HISTOGRAM = struct.Struct(struct_format("pg_wal_histogram"))
_BUCKET = struct.Struct(struct_format("pg_wal_bucket"))


def recorded(count: int, rest: bytes) -> dict[str, Histogram]:
    """Decode the `count` histograms that follow the struct of a METRICS record."""
    heads = [_HISTOGRAM.unpack_from(rest, n * _HISTOGRAM.size) for n in range(count)]
    at, found = count * _HISTOGRAM.size, {}
    for number, (low, high, max_ns, used) in enumerate(heads):
        counts = [0] * BUCKETS
        for times, bucket in _BUCKET.iter_unpack(rest[at : at + used * _BUCKET.size]):
            counts[bucket] = times
        at += used * _BUCKET.size
        name = histogram_name(number)
        found[name] = Histogram(name, tuple(counts), high << 64 | low, max_ns)
    return found


# ---- all of an arena -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics of an arena. They are read one after the other while the daemon works."""

    state: DaemonState
    why: Degraded
    counters: Mapping[str, int]
    """Counters by their names in COUNTERS."""
    gauges: Mapping[str, float]
    """Gauges by their names in GAUGES."""
    histograms: Mapping[str, Histogram]
    """Histograms by their names in Measured, in lower case."""
    namespaces: Sequence[Namespace]
    """Namespaces of users, those with the most timers first."""


def read_metrics(arena: Handle) -> Metrics:
    """Read the metrics of an arena; an arena that is being rebuilt is allowed."""
    header, live = arena.header, arena.metrics
    histograms = {histogram_name(n): arena.histograms[n] for n in Measured}
    return Metrics(
        DaemonState(header.daemon_state),
        Degraded(header.daemon_why),
        {name: int(getattr(live, name)) for name in COUNTERS},
        _gauges(arena),
        {name: _histogram(name, found) for name, found in histograms.items()},
        sorted(arena.namespaces_of_users(), key=lambda n: (-n.live, n.name)),
    )


def process_gauges(header: Any) -> dict[str, float]:
    """Return the gauges of the daemon's process, from an arena header or a status file."""
    return {
        "up": float(header.daemon_pid != 0 and is_alive(header)),
        "still_seconds": still_ns(header) / 1e9,
    }


def _gauges(arena: Handle) -> dict[str, float]:
    header, live = arena.header, arena.metrics
    return {
        **process_gauges(header),
        "overdue_seconds": overdue_ns(header) / 1e9,
        "starts": header.epoch,
        **{name: int(getattr(live, name)) for name in COUNTED if name in GAUGES},
        **{name: int(getattr(header, name)) for name in _HEADER if name in GAUGES},
        "slots_used": live.live + live.parked + live.outcomes,
        "replay_entries": header.replay_tail - header.replay_head,
        "unsent": header.replay_tail - header.published,
        **arena.watch_fill(),
        **_wal_gauges(arena),
    }


def _wal_gauges(arena: Handle) -> dict[str, float]:
    wal_buffer = arena.wal_buffer
    if wal_buffer is None:
        return {"wal_buffer_bytes": 0, "wal_buffer_used_bytes": 0, "wal_stopped": 0}
    return {
        "wal_buffer_bytes": int(wal_buffer.size),
        "wal_buffer_used_bytes": int(wal_buffer.tail - wal_buffer.committed),
        "wal_stopped": float(wal_buffer.state == WalState.STOPPED),
    }
