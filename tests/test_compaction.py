"""Compaction: a large payload fits while enough memory is free, whatever was released before."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from core_driver import Core
from purgatory_driver import Purgatory
from wal_driver import Redo, Snapshot, Wal

from purgatoryd.daemon.lifecycle import reasons
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import Degraded, Status, TimeKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from purgatoryd.shm_layout.arena import Arena

pytestmark = pytest.mark.tier("check")

GRANULE = lib.PG_GRANULE
FAR_NS = 10**18
LARGE = bytes(16384)
STEPS = 100_000
"""More steps than any test needs."""
STEP_ROWS = 4096
"""Number of rows that a step visits at most."""
STEP_BYTES = 256 << 10
"""Number of bytes that a step moves at most, apart from the blobs of the last row."""


def core_with(timers: int, payload_bytes: int, **config: Any) -> Core:
    return Core(capacity=timers, payload_bytes=payload_bytes, **config)


def fill(core: Core, payload_bytes: int, after: Callable[[], object] = bool) -> dict[bytes, bytes]:
    """Arm timers with payloads of this length until the payload memory is full. Call `after` after
    each of them."""
    timers: dict[bytes, bytes] = {}
    while True:
        key = b"%07d" % len(timers)
        payload = (key * (payload_bytes // len(key) + 1))[:payload_bytes]
        if core.put(key, FAR_NS, payload=payload).status != Status.ADDED:
            return timers
        timers[key] = payload
        after()


def add(core: Core, key: bytes, granules: int) -> None:
    """Arm a timer that uses so many granules."""
    payload = bytes(granules * GRANULE - len(key))
    assert core.put(key, FAR_NS, payload=payload).status == Status.ADDED


def settle(core: Core) -> int:
    """Advance until nothing is left to do. Return the number of advances."""
    for steps in range(STEPS):
        if not core.advance(core.header.now_ns):
            return steps
    raise AssertionError("compaction does not end")


def put_patiently(core: Core, key: bytes, payload: bytes) -> int:
    """Put until the answer is not BUSY, as a client does. Return the status."""
    for _ in range(STEPS):
        answer = core.put(key, FAR_NS, payload=payload)
        if answer.status != Status.BUSY:
            return answer.status
        core.advance(core.header.now_ns)
    raise AssertionError("BUSY forever")


def payloads(core: Core) -> dict[wire.Key, bytes]:
    return {info.key: info.payload for info in core.scan()}


def free_share(core: Core) -> float:
    return 1 - float(core.metrics.blob_bytes / core.header.payload_bytes)


def test_large_payloads_fit_until_an_eighth_of_a_fragmented_pool_is_free() -> None:
    core = core_with(100_000, 16 << 20)
    timers = fill(core, 200)
    rng = random.Random(20)
    for key in rng.sample(sorted(timers), len(timers) // 2):
        core.cancel(key)
        del timers[key]
    assert max(core.free_runs()) * GRANULE < len(LARGE)
    assert free_share(core) > 0.49
    large = 0
    while put_patiently(core, b"L%d" % large, LARGE) == Status.ADDED:
        timers[b"L%d" % large] = LARGE
        large += 1
    assert free_share(core) < 1 / 8 + 0.01
    assert large * len(LARGE) > 0.36 * core.header.payload_bytes
    core.check()
    assert payloads(core) == timers


@pytest.mark.parametrize("payload_bytes", [200, 3000, 60_000])
def test_each_advance_does_a_bounded_part_of_a_compaction(payload_bytes: int) -> None:
    core = core_with(100_000, 16 << 20)
    timers = fill(core, payload_bytes)
    for key in sorted(timers)[::2]:
        core.cancel(key)
    moved, steps = [0], 0
    while core.advance(core.header.now_ns):
        moved.append(core.metrics.compacted_bytes)
        steps += 1
    most = max(after - before for before, after in pairwise(moved))
    assert payload_bytes <= most <= STEP_BYTES + payload_bytes + 2 * GRANULE
    assert steps > core.header.capacity // STEP_ROWS


def test_compaction_changes_no_timer_and_no_notice() -> None:
    """Random acts between the steps of compactions, compared with a model."""
    for seed in range(6):
        Acts(seed).run()


class Acts:
    """Random acts in a small pool, with a model of its timers and notices."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = core_with(400, 1 << 15, replay_capacity=64, replay_bytes_max=1 << 13)
        self.timers: dict[bytes, bytes] = {}
        self.near: dict[bytes, bytes] = {}
        self.notices: dict[int, bytes] = {}
        self.received = 0

    def run(self) -> None:
        for number in range(1500):
            act = self.rng.choice((self.put, self.put, self.put, self.cancel, self.fire))
            act(b"%d" % number)
            self.core.advance(self.core.header.now_ns)
            self.receive()
            if self.rng.random() < 0.05:
                self.compare()
            if self.rng.random() < 0.005:
                self.core.rebuild(self.core.header.now_ns)
        assert self.core.metrics.compactions > 0
        assert self.core.metrics.compacted_bytes > 0

    def put(self, key: bytes) -> None:
        wall = self.rng.random() < 0.3
        payload = self.rng.randbytes(self.rng.choice((10, 40, 200, 900)))
        kind = TimeKind.WALL if wall else TimeKind.DELAY
        near = self.rng.random() < 0.5
        time_ns = self.core.header.now_ns + 10**6 if near else FAR_NS
        if wall:
            time_ns += self.core.header.wall_offset_ns
        answer = self.core.put(key, time_ns, kind, payload=payload)
        if answer.status == Status.ADDED:
            (self.near if near else self.timers)[key] = payload

    def cancel(self, key: bytes) -> None:
        if self.timers:
            key = self.rng.choice(sorted(self.timers))
            del self.timers[key]
            assert self.core.cancel(key).status == Status.CANCELLED

    def fire(self, key: bytes) -> None:
        if self.rng.random() < 0.1:
            self.core.advance(self.core.header.now_ns + 10**10)

    def receive(self) -> None:
        """Compare new notices with the timers, and let the replay buffer withdraw them."""
        for position in range(self.received, self.core.header.replay_tail):
            entry = self.core.entry(position)
            assert self.near.pop(entry.key) == entry.payload
            self.notices[position] = entry.payload
        self.received = self.core.header.replay_tail
        self.core.publish_all()

    def compare(self) -> None:
        self.core.check()
        assert payloads(self.core) == self.timers | self.near
        for entry in self.core.entries():
            assert entry.payload == self.notices[entry.position]


def test_a_redo_and_a_snapshot_see_each_payload_that_moved() -> None:
    core = Purgatory(
        capacity=6000, payload_bytes=1 << 20, wal_buffer_bytes=lib.PG_WAL_BUFFER_MIN
    )  # fmt: skip
    wal, first = Wal(core), Snapshot(core).finish()
    timers = fill(core, 200, wal.take)
    for key in sorted(timers)[::2]:
        core.cancel(key)
        wal.take()
        del timers[key]
    later = Snapshot(core)
    while core.advance(core.header.now_ns):
        later.step(100_000)
    for number in range(8):
        timers[b"L%d" % number] = LARGE
        assert put_patiently(core, b"L%d" % number, LARGE) == Status.ADDED
        wal.take()
    assert core.metrics.compacted_bytes > 0
    for snapshot in (first, later.finish()):
        redo = Redo(snapshot.data)
        redo.frames(snapshot.data)
        redo.frames(wal.data)
        found = redo.end(core.header.now_ns)
        found.check()
        assert payloads(found) == timers


def test_blobs_that_fit_nowhere_end_the_search() -> None:
    """Blobs of 40 granules with gaps of 30: no gap takes a blob, so no zone can be emptied."""
    core = core_with(100, 16 << 10)
    for number in range(14):
        add(core, b"b%02d" % number, 40)
        add(core, b"g%02d" % number, 30)
    add(core, b"b14", 40)
    for number in range(14):
        core.cancel(b"g%02d" % number)
    assert settle(core) > 0
    assert lib.pg_fragmented(core.a)
    assert core.put(b"L", FAR_NS, payload=bytes(50 * GRANULE)).status == Status.FULL_PAYLOAD
    core.check()
    core.cancel(b"b03")
    core.cancel(b"b05")
    settle(core)
    assert not lib.pg_fragmented(core.a)
    assert core.put(b"L", FAR_NS, payload=bytes(50 * GRANULE)).status == Status.ADDED


def test_the_largest_free_block_is_a_metric() -> None:
    core = core_with(100, 16 << 10)
    core.advance(core.header.now_ns)
    assert core.metrics.largest_free_bytes == 16 << 10
    core.put(b"k", FAR_NS, payload=bytes(1 << 10))
    core.advance(core.header.now_ns)
    largest = max(core.free_runs()) * GRANULE
    assert 0.96 * largest < core.metrics.largest_free_bytes <= largest


def test_fragmented_memory_is_a_reason_to_be_degraded() -> None:
    header = SimpleNamespace(now_ns=0, next_deadline_ns=0, capacity=10, payload_bytes=10)
    metrics = SimpleNamespace(live=0, parked=0, outcomes=0, unique_keys=0, blob_bytes=0)
    arena = cast("Arena", SimpleNamespace(header=header, metrics=metrics))
    sound = {"stopped": False, "full": False, "nameless": False}
    assert reasons(arena, Degraded(0), **sound, fragmented=False) == Degraded(0)
    assert reasons(arena, Degraded(0), **sound, fragmented=True) == Degraded.FRAGMENTED
