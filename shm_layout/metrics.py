"""What an arena tells of its daemon's work, in figures: also while the daemon hangs or is gone.

Counters and histograms count since the arena's birth, over starts of the daemon, but for
SINCE_START; one that has fallen tells of another arena.
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

# Name -> what it counts. What begins with "refused_" has its reason behind that.
COUNTERS: dict[str, str] = {
    "adds": "timers armed, replacements included",
    "replaces": "timers that took the place of an armed one",
    "extends": "timers moved to a later deadline",
    "cancels": "timers cancelled",
    "cancels_fired": "cancels that came after the timer had fired",
    "cancels_unknown": "cancels of what was not there",
    "expiries": "timers that fired",
    "parks": "timers accepted without their payload in memory",
    "unparks": "timers whose payload came back",
    "notices_withdrawn": "notices that left the replay buffer to make space",
    "messages_sent": "messages of notices handed to the socket",
    "batches": "batches applied",
    "batches_repeated": "batches sent again, and answered from memory",
    "batches_refused": "messages refused as a whole",
    "records": "records of batches applied",
    "watches": "operations armed",
    "satisfied": "operations that ended because their condition held",
    "already_true": "of them, those that only the look at the deadline found",
    "expired": "operations that timed out",
    "failed": "operations ended by a failing key",
    "cancelled": "operations cancelled, by their own key or a watch key",
    "checks": "questions to owners of conditions of their own",
    "outcomes_dropped": "outcomes freed because their owner's session had ended",
    "outcomes_repeated": "outcomes and questions sent again to owners that were silent",
    "advances": "watch keys advanced",
    "visits": "watchers looked at by that",
    "bulk_load_rows": "rows of bulk loads done",
    "bulk_load_rows_repeated": "rows of bulk loads that came again",
    "moved": "timers brought to a finer level of the wheel: the cascades",
    "iterations": "times the wheel was advanced",
    "iterations_full": "of them, those that used up the budget of an iteration",
    "iteration_work": "timers moved or fired, by iterations that had any",
    "iteration_budget": "what the budgets of those iterations allowed: the budget used is the "
    "share of iteration_work in it",
    "wakeups": "times the loop woke up",
    "log_dropped": "log messages that were not written: their kind came too often, or their reader "
    "is slow, full or gone",
    "records_redone": "records of the WAL that the arena was made of",
    "refused_full": "no free slot",
    "refused_payload": "no space for key and payload",
    "refused_names": "no free slot for a namespace or topic",
    "refused_busy": "the owner has not acknowledged enough outcomes, or of a publish: the socket "
    "takes no notices",
    "refused_keys": "no free slots for watch keys",
    "refused_denied": "another one's namespace, or a reserved name",
    "refused_quota": "over a quota",
    "refused_wal": "the WAL's ring was too full, or the WAL has stopped",
    "refused_bulk_loads": "no free slots for a bulk load",
    "refused_fenced": "rows of a bulk load that is closed, or of an older run of it",
    "refused_exists": "the key is armed, and the call said that this is an error",
    "refused_stopping": "the daemon drains: it arms nothing more",
    "refused_other": "a deadline too far or a watermark too high, no ticket left, "
    "one watch key twice, or a publish in another shard",
}
SINCE_START = {"wakeups", "messages_sent", "log_dropped"}
"""Counted since the start of the daemon."""

# Name -> what it tells; the unit is at its end: seconds, bytes, or a number of things.
GAUGES: dict[str, str] = {
    "up": "1 while the daemon's process is there",
    "still_seconds": "since the loop moved last; a sound one moves every second",
    "overdue_seconds": "by how much the next deadline is past",
    "starts": "starts of the daemon on this arena",
    "live": "timers and operations armed",
    "live_wall": "of them, those with a deadline on the wall clock",
    "parked": "timers without their payload in memory",
    "operations": "operations armed",
    "outcomes": "outcomes that their owners have not acknowledged",
    "bulk_loads": "bulk loads that are remembered",
    "bulk_load_blocks": "blocks of their rows in use",
    "capacity": "slots for timers, operations and outcomes",
    "slots_used": "of them, those in use",
    "payload_bytes": "memory for keys and payloads",
    "blob_bytes": "of it, what is in use",
    "replay_capacity": "notices that the replay buffer holds",
    "replay_entries": "of them, those that are there",
    "unsent": "of them, those that the socket does not have yet",
    "replay_bytes_max": "memory that notices may take",
    "replay_bytes": "of it, what they take",
    "watch_records_max": "watch keys of operations, together",
    "watch_records": "of them, those in use",
    "watch_keys_max": "watermarks",
    "watch_keys": "of them, those in use",
    "wal_buffer_bytes": "the WAL's ring; 0 = no WAL",
    "wal_buffer_used_bytes": "of it, what is not on disk yet",
    "wal_stopped": "1 once the WAL has stopped",
}


# Histogram -> from when to when.
MEANINGS: dict[str, str] = {
    "structural_lateness": "from the deadline until it fired, of timers and timed out operations",
    "wakeup_lateness": "from when the loop was to wake up until it ran",
    "batch_service": "from when work on a batch began until its answer was there",
    "request_queue": "from when a batch was received until work on it began",
    "local": "how long the loop worked on a batch, in all iterations that it took",
    "remote": "from arming until the end, however it came, which is meant to be long: of each "
    "timer that fired, was cancelled or was replaced, and of each operation",
    "response_queue": "from the end of the work on a message, of a timer or of an operation, or "
    "from the publishing, until the answer, notice or outcome began to be sent; with what a "
    "durable answer waits for the disk. Not of notices and outcomes under a virtual clock",
    "send": "from there until the socket had it",
}


# ---- histograms ------------------------------------------------------------------------------


def upper_edge_ns(bucket: int) -> int:
    """The highest value that counts in a bucket."""
    shift = max(0, bucket // 8 - 1)
    return ((bucket - 8 * shift + 1) << shift) - 1


_EDGES_NS = tuple(map(upper_edge_ns, range(BUCKETS)))


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often a span was how long; an edge is at most an eighth above its bucket's values."""

    name: str
    counts: tuple[int, ...]
    """Of each bucket."""
    sum_ns: int
    max_ns: int

    @property
    def count(self) -> int:
        """How many spans there were."""
        return sum(self.counts)

    @property
    def mean_ns(self) -> int:
        """0 when empty."""
        return self.sum_ns // max(1, self.count)

    def quantile(self, q: float) -> int:
        """The upper edge, in ns, of the bucket in which the share `q` of all values is reached,
        but no more than the highest value; 0 when empty."""
        wanted = max(1.0, q * self.count)
        for edge_ns, reached in zip(_EDGES_NS, accumulate(self.counts), strict=True):
            if reached >= wanted:
                return min(edge_ns, self.max_ns)
        return self.max_ns

    def buckets(self) -> Iterator[tuple[int, int]]:
        """(upper edge in ns, count) of those that are not empty, rising."""
        pairs = zip(_EDGES_NS, self.counts, strict=True)
        return ((edge_ns, count) for edge_ns, count in pairs if count)

    def since(self, older: Histogram) -> Histogram:
        """What came between `older` and this one; all of this one if the arena is another."""
        counts = tuple(now - then for now, then in zip(self.counts, older.counts, strict=True))
        if min(counts) < 0:
            return self
        highest_ns = max((e for e, n in zip(_EDGES_NS, counts, strict=True) if n), default=0)
        max_ns = self.max_ns if self.max_ns > older.max_ns else min(highest_ns, self.max_ns)
        return Histogram(self.name, counts, self.sum_ns - older.sum_ns, max_ns)

    def plus(self, other: Histogram) -> Histogram:
        """What both have, as that of two shards."""
        counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        highest_ns = max(self.max_ns, other.max_ns)
        return Histogram(self.name, counts, self.sum_ns + other.sum_ns, highest_ns)


def _histogram(name: str, live: Any) -> Histogram:
    counts = tuple(ffi.unpack(live.counts, BUCKETS))
    return Histogram(name, counts, live.sum_high << 64 | live.sum_ns, live.max_ns)


def histogram_name(number: int) -> str:
    """Of enum pg_histogram_id; a later version may have more."""
    try:
        return Measured(number).name.lower()
    except ValueError:
        return f"histogram_{number}"


_HEADER = [name for name, _, _ in fields("pg_header")]
_HISTOGRAM = struct.Struct(struct_format("pg_wal_histogram"))
_BUCKET = struct.Struct(struct_format("pg_wal_bucket"))


def recorded(count: int, rest: bytes) -> dict[str, Histogram]:
    """The `count` histograms that stand behind the struct of a METRICS record."""
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
    """The figures of an arena, read one after the other while it goes on."""

    state: DaemonState
    why: Degraded
    counters: Mapping[str, int]
    """By the names of COUNTERS."""
    gauges: Mapping[str, float]
    """By the names of GAUGES."""
    histograms: Mapping[str, Histogram]
    """By the names of Measured, in lower case."""
    namespaces: Sequence[Namespace]
    """Those of users, with the most timers first."""


def read_metrics(arena: Handle) -> Metrics:
    """The figures of an arena; a Reader of one that is being rebuilt will do."""
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
    """Those of the process, by the header of an arena or by a status file."""
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
