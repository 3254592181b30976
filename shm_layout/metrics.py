"""Metrics of a daemon, read from its arena. They can be read even while the daemon hangs or after
it has ended.

Counters and histograms count from the creation of the arena, across daemon starts, except the
counters in SINCE_START. If a counter has fallen, it belongs to a new arena.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import COUNTED, ConsumerGroup, Handle, Namespace, slots_used
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

# Help text of each counter. A counter of refusals is named "refused_" + reason.
COUNTERS: dict[str, str] = {
    "adds": "timers armed, replacements included",
    "replaces": "timers that replaced an armed timer",
    "extends": "timers moved to a later deadline",
    "cancels": "timers cancelled",
    "cancels_fired": "cancels that came after the timer had fired",
    "cancels_unknown": "cancels of keys without a timer",
    "reschedules": "timers that sweeps moved to another deadline",
    "sweeps": "sweeps that began",
    "expiries": "timers that fired",
    "parks": "timers parked when they were added: only the WAL has their payload",
    "unparks": "parked timers armed after their payload came back",
    "notices_withdrawn": "notices removed from the replay buffer to make space",
    "messages_sent": "notice messages handed to the socket",
    "batches": "batches applied",
    "batches_repeated": "batches that were sent again and answered from memory",
    "batches_refused": "messages refused as a whole",
    "records": "records of applied batches",
    "watches": "operations armed",
    "satisfied": "operations that succeeded because their condition came true",
    "already_true": "successful operations whose condition was found true only at their deadline",
    "expired": "operations that timed out",
    "failed": "operations that ended because a watch key failed",
    "cancelled": "operations cancelled with their own key or with a watch key",
    "checks": "CHECK requests sent to owners of operations with condition CLIENT",
    "outcomes_dropped": "outcomes freed because their owner's session had ended",
    "outcomes_repeated": "outcomes and CHECK requests sent again because their owner did not "
    "answer",
    "advances": "number of times that the watermark of a watch key rose",
    "visits": "watchers checked because a watch key advanced",
    "bulk_load_rows": "rows of bulk loads that were marked as done",
    "occurrences": "occurrences of schedules that were armed",
    "bulk_load_rows_repeated": "rows of bulk loads that were sent again",
    "jobs_born": "jobs of consumer groups that began",
    "jobs_leased": "leases of jobs",
    "jobs_acked": "jobs that were acknowledged",
    "jobs_retried": "failed attempts of jobs that another attempt follows",
    "jobs_expired": "leases that expired, or whose member ended",
    "jobs_dead": "jobs that became dead letters",
    "jobs_dropped": "jobs and dead letters that were removed unfinished",
    "refused_group": "the budget of a consumer group is used up",
    "unique_freed": "keys that stayed unique until their time was over",
    "cursor_commits": "positions that cursors committed, and deleted cursors",
    "moved": "timers cascaded to a finer level of the wheel",
    "iterations": "loop iterations that advanced the wheel",
    "iterations_full": "loop iterations that used up their budget",
    "iteration_work": "timers moved or fired by loop iterations that had work",
    "iteration_budget": "sum of the budgets of loop iterations that had work; iteration_work "
    "divided by this sum is the share of the budget in use",
    "wakeups": "wakeups of the loop",
    "log_dropped": "log messages dropped, because messages of one kind were too frequent or "
    "because the reader of the log was slow, full or gone",
    "records_redone": "WAL records redone when the arena was recovered",
    "skipped": "timers that ended without a notice, by the late policy skip or overlap=skip, and"
    " occurrences of schedules whose key stays unique",
    "coalesced": "late timers that another one fired for, by the late policy coalesce",
    "compactions": "passes that moved keys and payloads to join free memory",
    "compacted_bytes": "bytes of keys and payloads that these passes moved",
    "refused_full": "no free slot",
    "refused_payload": "no space for key and payload",
    "refused_names": "no free slot for a namespace or topic",
    "refused_busy": "the owner has too many unacknowledged outcomes, or compaction makes space; "
    "for a publish: the socket accepts no notices",
    "refused_keys": "no free slots for watch keys",
    "refused_denied": "the namespace has another owner, or the name is reserved",
    "refused_quota": "a quota or share is used up",
    "refused_wal": "the WAL buffer was too full, or the WAL has stopped",
    "refused_bulk_loads": "no free slots for a bulk load",
    "refused_schedules": "no free slot for a schedule, or no time that its expression names",
    "refused_cursors": "a cursor is held by another session, or no row is free for it",
    "refused_fenced": "the bulk load is closed, or a newer run of it has begun",
    "refused_exists": "the key is armed, and the call has mode=error",
    "refused_stopping": "the daemon is draining",
    "refused_other": "the deadline is too far away, the watermark is too high, no ticket is left, "
    "a watch key occurs twice, or a publish is for another shard",
}
SINCE_START = {"wakeups", "messages_sent", "log_dropped"}
"""Counters that start at 0 with each start of the daemon."""

# Help text of each gauge. The name ends with the unit, seconds or bytes; all other gauges count
# objects.
GAUGES: dict[str, str] = {
    "up": "1 while the daemon's process exists",
    "still_seconds": "time since the last heartbeat of the loop, which writes a heartbeat every "
    "second",
    "overdue_seconds": "time since the earliest armed deadline passed; 0 if it is in the future",
    "starts": "number of daemon starts with this arena",
    "live": "armed timers and operations",
    "live_wall": "armed or parked timers with a deadline on the wall clock",
    "parked": "parked timers: only the WAL has their payload",
    "backlog": "due timers that have not fired, because they are paused or the daemon catches up",
    "operations": "armed operations",
    "outcomes": "unacknowledged outcomes",
    "bulk_loads": "bulk loads that the daemon remembers",
    "bulk_load_blocks": "blocks in use for the rows of bulk loads",
    "jobs": "jobs of consumer groups, dead letters included",
    "schedules": "schedules that the daemon has",
    "schedules_armed": "schedules whose next occurrence is armed",
    "unique_keys": "keys that stay unique after the end of their timers",
    "cursors": "cursors of subscribers",
    "cursor_rows": "rows in use for cursors and their positions",
    "capacity": "slots for timers, operations and outcomes",
    "slots_used": "slots in use",
    "payload_bytes": "size of the memory for keys and payloads",
    "blob_bytes": "used bytes of the memory for keys and payloads",
    "largest_free_bytes": "length of a key and payload that fit into the largest free block",
    "replay_capacity": "maximum number of notices in the replay buffer",
    "replay_entries": "notices in the replay buffer",
    "unsent": "notices in the replay buffer that were not sent yet",
    "replay_bytes_max": "payload memory that notices in the replay buffer may use",
    "replay_bytes": "payload memory that notices in the replay buffer use",
    "watch_records_max": "capacity for watch records: one per watch key of each operation",
    "watch_records": "watch records in use",
    "watch_keys_max": "capacity for watch keys",
    "watch_keys": "watch keys in use",
    "wal_buffer_bytes": "size of the WAL buffer; 0 = no WAL",
    "wal_buffer_used_bytes": "bytes in the WAL buffer that are not yet on disk",
    "wal_stopped": "1 if the WAL has stopped",
}


# Help text of each histogram: the start and the end of the measured time.
MEANINGS: dict[str, str] = {
    "structural_lateness": "from the deadline of a timer or an expired operation until it fired",
    "wakeup_lateness": "from the time at which the loop had to wake up until it ran",
    "batch_service": "from the start of the work on a batch until its answer was built",
    "request_queue": "from the receipt of a batch until the start of the work on it",
    "local": "time that the loop worked on a batch, summed over all loop iterations",
    "remote": "from the arming to the final state of each operation, and of each timer that fired, "
    "was cancelled or was replaced; long by design",
    "response_queue": "from the end of the work on a message, timer, operation or publish until "
    "the sending of the answer, notice or outcome began; includes the time that a durable answer "
    "waits for the disk. Notices and outcomes under a virtual clock are not measured",
    "send": "from the start of sending until the socket accepted the message",
}


# ---- histograms ------------------------------------------------------------------------------


def upper_edge_ns(bucket: int) -> int:
    """Return the highest value in ns that belongs to a bucket."""
    shift = max(0, bucket // 8 - 1)
    return ((bucket - 8 * shift + 1) << shift) - 1


_EDGES_NS = tuple(map(upper_edge_ns, range(BUCKETS)))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Distribution of a duration. The upper edge of a bucket exceeds its values by at most an
    eighth."""

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
        """Mean in ns; 0 if there are no values."""
        return self.sum_ns // max(1, self.count)

    def quantile(self, q: float) -> int:
        """Return the quantile `q` in ns, as the upper edge of its bucket.

        `q` is between 0 and 1. The result is at most the highest value; 0 if there are no values.
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
        """Return the values that were added after `older`; all values if `older` is of another
        arena."""
        counts = tuple(now - then for now, then in zip(self.counts, older.counts, strict=True))
        if min(counts) < 0:
            return self
        highest_ns = max((e for e, n in zip(_EDGES_NS, counts, strict=True) if n), default=0)
        max_ns = self.max_ns if self.max_ns > older.max_ns else min(highest_ns, self.max_ns)
        return Histogram(self.name, counts, self.sum_ns - older.sum_ns, max_ns)

    def plus(self, other: Histogram) -> Histogram:
        """Return the sum of this histogram and another, for example of two shards."""
        counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        highest_ns = max(self.max_ns, other.max_ns)
        return Histogram(self.name, counts, self.sum_ns + other.sum_ns, highest_ns)


def _histogram(name: str, live: Any) -> Histogram:
    counts = tuple(ffi.unpack(live.counts, BUCKETS))
    return Histogram(name, counts, live.sum_high << 64 | live.sum_ns, live.max_ns)


def histogram_name(number: int) -> str:
    """Return the name of a histogram by its number in enum pg_histogram_id. If only a later
    version has the histogram, the name contains the number."""
    try:
        return Measured(number).name.lower()
    except ValueError:
        return f"histogram_{number}"


_HEADER = [name for name, _, _ in fields("pg_header")]
_HISTOGRAM = struct.Struct(struct_format("pg_wal_histogram"))
_BUCKET = struct.Struct(struct_format("pg_wal_bucket"))


def recorded(count: int, rest: bytes) -> dict[str, Histogram]:
    """Decode `rest`, the `count` histograms that follow the struct of a METRICS record."""
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


class CursorLag(NamedTuple):
    """A cursor, and the number of notices that it has not committed."""

    namespace: str
    cursor: str
    lag: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics of an arena. The daemon works while they are read, so they are not of exactly the
    same moment."""

    state: DaemonState
    why: Degraded
    counters: Mapping[str, int]
    """Counters by their names in COUNTERS."""
    gauges: Mapping[str, float]
    """Gauges by their names in GAUGES."""
    histograms: Mapping[str, Histogram]
    """Histograms by their names in Measured, in lower case."""
    namespaces: Sequence[Namespace]
    """Namespaces of users, in descending order of their numbers of timers."""
    groups: Sequence[ConsumerGroup] = ()
    """Consumer groups, in descending order of the age of their oldest jobs."""
    cursors: Sequence[CursorLag] = ()
    """Cursors, in descending order of their lag."""


def read_metrics(arena: Handle) -> Metrics:
    """Read the metrics of an arena, which may be in the middle of a rebuild."""
    header, live = arena.header, arena.metrics
    histograms = {histogram_name(n): arena.histograms[n] for n in Measured}
    return Metrics(
        DaemonState(header.daemon_state),
        Degraded(header.daemon_why),
        {name: int(getattr(live, name)) for name in COUNTERS},
        _gauges(arena),
        {name: _histogram(name, found) for name, found in histograms.items()},
        sorted(arena.namespaces_of_users(), key=lambda n: (-n.live, n.name)),
        sorted(arena.consumer_groups(), key=lambda g: (-g.oldest_ns, g.namespace, g.name)),
        sorted(_lags(arena), key=lambda one: (-one.lag, one.namespace, one.cursor)),
    )


def _lags(arena: Handle) -> Iterator[CursorLag]:
    names, topics = arena.namespaces(), arena.topics_by_row()
    for cursor in arena.cursors():
        namespace = names.get(cursor.namespace_row)
        if namespace is not None:
            yield CursorLag(namespace.name, cursor.name, cursor.lag(topics))


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
        "slots_used": slots_used(live),
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
