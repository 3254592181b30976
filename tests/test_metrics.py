"""Histograms and counters in the arena: what they measure, and in which states they can be read."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import purgatory_driver as pd
import pytest
from core_driver import Core
from core_peer import Peer, put
from opened import opened
from purgatory_driver import Purgatory, handle
from real_daemon import Daemon, StartDaemon, eventually, used
from wal_driver import HEAD_BYTES, Redo, Snapshot, Wal, frames_of

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.store import Opening, wal_end
from purgatoryd.daemon.wal import Wal as DaemonWal
from purgatoryd.daemon.wal import locked
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import COUNTED, Reader
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.layout import Measured, Status, TimeKind, size_of
from purgatoryd.shm_layout.metrics import (
    BUCKETS,
    COUNTERS,
    GAUGES,
    Histogram,
    Metrics,
    read_metrics,
    recorded,
    upper_edge_ns,
)
from purgatoryd.shm_layout.paths import paths_in
from purgatoryd.shm_layout.wal import Walk, segments

pytestmark = pytest.mark.tier("check")

MS = 1_000_000
NAMES = {name.lower() for name in Measured.__members__}


def histogram(*values_ns: int) -> Histogram:
    """Return a histogram of the core that has counted these spans in ns."""
    core = Core()
    for ns in values_ns:
        lib.pg_measure(core.a, Measured.SEND, ns)
    return of(core, Measured.SEND)


def of(core: Core, which: Measured) -> Histogram:
    live = lib.pg_histograms_of(core.a)[which]
    sum_ns = live.sum_high << 64 | live.sum_ns
    return Histogram(which.name.lower(), tuple(live.counts), sum_ns, live.max_ns)


# ---- one histogram ---------------------------------------------------------------------------


def test_a_quantile_is_at_most_an_eighth_too_high() -> None:
    values = [n * n * n for n in range(1, 1000)]
    found = histogram(*values)
    assert (found.count, found.sum_ns, found.max_ns) == (999, sum(values), values[-1])
    for q in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = values[max(1, int(q * 999 + 0.999999)) - 1]
        assert exact <= found.quantile(q) <= exact + exact // 8


def test_an_empty_histogram_is_zero() -> None:
    empty = histogram()
    assert (empty.count, empty.quantile(0.99), empty.mean_ns, list(empty.buckets())) == (
        0,
        0,
        0,
        [],
    )


def test_edges_rise_and_end_at_the_longest_time() -> None:
    edges = [upper_edge_ns(bucket) for bucket in range(BUCKETS)]
    assert edges == sorted(set(edges))
    assert edges[:16] == list(range(16))
    assert edges[-1] == 2**63 - 1


def test_since_returns_the_difference_of_two_histograms() -> None:
    older, newer = histogram(5, 7, 1000), histogram(5, 7, 1000, 7, 300)
    between = newer.since(older)
    assert (between.count, between.sum_ns) == (2, 307)
    assert [count for _, count in between.buckets()] == [1, 1]
    assert 300 <= between.max_ns <= 300 + 300 // 8
    assert older.since(newer) == older, "if counters have fallen, the arena is a new one"


# ---- counters of the core --------------------------------------------------------------------


def test_lateness_is_the_time_after_the_deadline() -> None:
    core = Core()
    core.put("early", 3 * MS)
    core.put("late", 1 * MS)
    core.advance(10 * MS)
    late = of(core, Measured.STRUCTURAL_LATENESS)
    assert (late.count, late.sum_ns, late.max_ns) == (2, 16 * MS, 9 * MS)


KEPT_BY = pytest.mark.parametrize(
    "retained", [{}, {"wal_buffer_bytes": lib.PG_WAL_BUFFER_MIN}], ids=["alone", "wal"]
)


@KEPT_BY
def test_every_final_state_counts_a_wait(retained: dict[str, int]) -> None:
    """Each final state adds one wait to the histogram. Puts that keep or extend a timer add
    none."""
    core = Purgatory(**retained)
    owner = pd.Owner(core)
    far = [pd.Key(b"far", 1)]
    names = (b"fires", b"goes", b"makes way", b"moves")
    owner.send(*(pd.put(name, 64 * MS) for name in names))
    owner.send(*(pd.watch(name, lib.PG_C_ALL, far, 64 * MS) for name in (b"ends", b"is over")))
    core.advance(2 * MS)
    owner.send(pd.put(b"makes way", 64 * MS, lib.PG_MODE_REPLACE), pd.cancel(b"ends"))
    owner.send(pd.put(b"moves", 8 * MS, lib.PG_MODE_KEEP))
    assert of(core, Measured.REMOTE).sum_ns == 2 * 2 * MS
    core.advance(16 * MS)
    owner.send(pd.cancel(b"goes"), pd.put(b"moves", 64 * MS, lib.PG_MODE_EXTEND))
    assert of(core, Measured.REMOTE).sum_ns == (2 * 2 + 16) * MS
    core.advance(64 * MS)
    assert of(core, Measured.REMOTE).sum_ns == (2 * 2 + 16 + 2 * 64) * MS
    core.advance(80 * MS)
    found = of(core, Measured.REMOTE)
    assert (found.count, found.sum_ns) == (7, (2 * 2 + 16 + 2 * 64 + 78 + 80) * MS)


def test_a_far_timer_has_its_own_bucket() -> None:
    core = Core(capacity=20)
    century_ns = 100 * 365 * 86400 * 10**9
    for n in range(20):
        core.put(f"{n}", 2 * century_ns)
    core.advance(century_ns)
    for n in range(20):
        core.cancel(f"{n}")
    found = of(core, Measured.REMOTE)
    assert found.count == 20
    assert found.sum_ns == pytest.approx(20 * century_ns, rel=2**-23), (
        "a sum of 64 bits would overflow"
    )
    assert found.quantile(0.5) == pytest.approx(century_ns, rel=1 / 8)


def moved_to(core: Purgatory, how: str) -> Purgatory:
    """Move the armed timers of `core` to another arena in the way `how`. Return the new arena."""
    if how == "a snapshot":
        snapshot, wal = Snapshot(core).finish().data, Wal(core).take()
        redo = Redo(snapshot)
        redo.frames(snapshot)
        redo.frames(wal)
        return redo.end(core.now_ns)
    return core.migrated(
        capacity=99, wal_buffer_bytes=lib.PG_WAL_BUFFER_MIN if how == "a WAL" else 0
    )


@KEPT_BY
@pytest.mark.parametrize("how", ["other sizes", "a WAL", "a snapshot"])
def test_a_moved_timer_counts_the_wait_before_the_move(retained: dict[str, int], how: str) -> None:
    core = Purgatory(**retained)
    core.advance(2 * MS)
    pd.Owner(core).send(pd.put(b"k", 64 * MS))
    core.advance(4 * MS)
    moved = moved_to(core, how)
    moved.advance(66 * MS)
    assert of(moved, Measured.REMOTE).sum_ns == 64 * MS


def test_a_timer_from_an_earlier_minor_keeps_when_it_was_armed() -> None:
    core, to = Core(), Core()
    core.put("k", 64 * MS)
    core.advance(4 * MS)
    assert lib.pg_convert(to.a, core.a, to._fault)
    to.rebuild(4 * MS)
    to.advance(64 * MS)
    assert of(to, Measured.REMOTE).sum_ns == 64 * MS


def test_a_wall_timer_has_waited_whatever_the_wall_clock_did() -> None:
    core = Core()
    core.put("k", 64 * MS, TimeKind.WALL)
    core.advance(4 * MS, wall_offset_ns=-32 * MS)
    core.advance(70 * MS, wall_offset_ns=-32 * MS)
    assert core.cancel("k").status == Status.CANCELLED, "the wall deadline of k has not passed"
    assert of(core, Measured.REMOTE).sum_ns == 70 * MS


def test_a_timer_that_is_late_already_has_not_waited() -> None:
    core = Core()
    core.advance(64 * MS)
    core.put("k", 2 * MS, TimeKind.BOOT)
    core.advance(64 * MS)
    assert (of(core, Measured.REMOTE).count, of(core, Measured.REMOTE).sum_ns) == (1, 0)


def test_a_batch_leaves_its_stages() -> None:
    core = Core(clock_kind=lib.PG_CLOCK_BOOT)
    peer = Peer(core)
    peer.now_ns = 5 * MS
    peer.ask(peer.encode(put()))
    lib.pg_served(core.a, 8 * MS)
    assert of(core, Measured.REQUEST_QUEUE).count == 1
    assert of(core, Measured.LOCAL).sum_ns == of(core, Measured.BATCH_SERVICE).sum_ns == 3 * MS
    core.advance(2000 * MS)
    lib.pg_published(core.a, core.header.replay_tail, 2003 * MS, 2007 * MS)
    assert of(core, Measured.RESPONSE_QUEUE).sum_ns == 3 * MS
    assert of(core, Measured.SEND).sum_ns == 4 * MS


def test_messages_other_than_batches_are_not_measured_as_batches() -> None:
    core = Core()
    peer = Peer(core)
    peer.batch(put())
    peer.hello()
    lib.pg_served(core.a, 8 * MS)
    assert of(core, Measured.BATCH_SERVICE).count == of(core, Measured.LOCAL).count == 0


def test_work_on_a_batch_is_that_of_all_its_iterations() -> None:
    """The batch needs three calls of the core. Each call takes 1 ms, and 4 ms pass between two
    calls."""
    core = Purgatory(capacity=4096, watches=4096)
    owner = pd.Owner(core)
    keys = [pd.Key(b"far", 1)]
    for n in range(3):
        names = (b"%d" % (n * 1000 + i) for i in range(1000))
        owner.send(*(pd.watch(name, lib.PG_C_ALL, keys, 1000 * MS) for name in names))
    message, now_ns, state = owner.message([pd.advance(b"far", 1)]), 0, lib.PG_H_AGAIN
    while state == lib.PG_H_AGAIN:
        now_ns += 5 * MS
        state = handle(core, message, now_ns, received_ns=0)
        lib.pg_served(core.a, now_ns + MS)
    assert now_ns == 3 * 5 * MS, "three calls"
    assert of(core, Measured.LOCAL).sum_ns == 3 * MS
    assert of(core, Measured.BATCH_SERVICE).sum_ns == (3 * 5 - 4) * MS


def reported(core: Core, built_ns: int, handed_ns: int) -> bool:
    """Send the next inbox message to its owner; return False if there is none."""
    out = ffi.new("uint64_t[]", 4096)
    used = lib.pg_inbox(core.a, ffi.new("uint64_t *"), out, ffi.sizeof(out))
    lib.pg_notified(core.a, built_ns, handed_ns)
    return bool(used)


def test_an_outcome_waits_for_its_owners_socket() -> None:
    """Only the first message with each outcome is measured. CHECKs and repeated outcomes are
    not."""
    core = Purgatory(clock_kind=lib.PG_CLOCK_BOOT)
    owner = pd.Owner(core)
    owner.send(
        pd.watch(b"done", lib.PG_C_ALL, [pd.Key(b"k", 1)]),
        pd.watch(b"late", lib.PG_C_ALL, [pd.Key(b"far", 1)], 2 * MS),
        pd.watch(b"asks", lib.PG_C_CLIENT, [pd.Key(b"k", 1)]),
    )
    core.advance(MS)
    owner.send(pd.advance(b"k", 1))
    core.advance(2 * MS)
    assert reported(core, 5 * MS, 9 * MS)
    core.mail_again()
    assert reported(core, 50 * MS, 90 * MS)
    assert not reported(core, 500 * MS, 900 * MS)
    found = of(core, Measured.RESPONSE_QUEUE)
    assert (found.count, found.sum_ns) == (2, (4 + 3) * MS)
    assert (of(core, Measured.SEND).count, of(core, Measured.SEND).sum_ns) == (2, 2 * 4 * MS)


def test_an_owner_that_is_not_there_is_not_waited_for() -> None:
    """While the owner has no connection, its message waits. No stage of the daemon counts this
    time."""
    core = Purgatory(clock_kind=lib.PG_CLOCK_BOOT)
    pd.Owner(core).send(pd.watch(b"late", lib.PG_C_ALL, [pd.Key(b"far", 1)], 2 * MS))
    core.advance(3 * MS)
    out = ffi.new("uint64_t[]", 4096)
    assert lib.pg_inbox(core.a, ffi.new("uint64_t *"), out, ffi.sizeof(out))
    lib.pg_untaken(core.a)
    core.mail_again()
    assert reported(core, 5_000 * MS, 9_000 * MS)
    assert of(core, Measured.RESPONSE_QUEUE).count == of(core, Measured.SEND).count == 0


def test_iterations_and_cascades_are_counted() -> None:
    core = Core()
    for n in range(8):
        core.put(f"{n}", 100 * MS + n)
    core.advance(90 * MS)
    while core.advance(200 * MS, budget=3):
        pass
    assert core.metrics.iterations > core.metrics.iterations_full > 1
    assert core.metrics.moved == core.rows(lib.PG_R_WHEEL, "pg_wheel")[0].moved > 0


def test_the_budget_of_iterations_with_work_is_counted() -> None:
    core = Core()
    for n in range(8):
        core.put(f"{n}", 100 * MS + n)
    core.advance(50 * MS, budget=1000)
    idle = core.metrics.iteration_budget
    while core.advance(200 * MS, budget=3):
        pass
    work, budget = core.metrics.iteration_work, core.metrics.iteration_budget
    assert 8 <= work <= budget
    assert (budget - idle) % 3 == 0
    iterations, before = core.metrics.iterations, core.metrics.iteration_budget
    core.advance(300 * MS, budget=1000)
    assert (core.metrics.iterations, core.metrics.iteration_budget) == (iterations + 1, before), (
        "an iteration without work adds no budget"
    )


ANSWERS = {
    Status.NONE, Status.LEASED,
    Status.ADDED, Status.REPLACED, Status.KEPT, Status.EXTENDED, Status.CANCELLED,
    Status.FIRED, Status.UNKNOWN, Status.FOUND, Status.DONE, Status.MORE, Status.BULK_LOADED,
    Status.PARKED, Status.UNPARKED,
}  # fmt: skip


def refused(core: Core) -> dict[str, int]:
    counts = {name: int(getattr(core.metrics, name)) for name in COUNTERS}
    return {
        name.removeprefix("refused_"): count
        for name, count in counts.items()
        if name.startswith("refused_") and count
    }


@pytest.mark.parametrize("status", list(Status), ids=lambda status: status.name)
def test_every_status_that_refuses_has_one_counter(status: Status) -> None:
    core = Core()
    assert bool(lib.pg_refused(core.a, status)) is (status not in ANSWERS)
    assert sum(refused(core).values()) == (status not in ANSWERS)


def test_an_invalid_status_is_not_counted() -> None:
    core = Core()
    assert not any(lib.pg_refused(core.a, one) for one in (max(Status) + 1, 255, 2**32 - 1))
    assert refused(core) == {}


@pytest.mark.parametrize(
    ("command", "config", "reason"),
    [
        (pd.watch(b"first", lib.PG_C_ALL, [pd.Key(b"b", 1)]), {}, "exists"),
        (pd.put(b"first", MS), {}, "exists"),
        (pd.cancel_for_key(b"far"), {"payload_bytes": 8192}, "payload"),
        (pd.advance(b"new", 1), {"watermarks": 1}, "keys"),
        (pd.watch(b"x", lib.PG_C_ALL, [pd.Key(b"far", 1)]), {"capacity": 1}, "full"),
    ],
)
def test_a_refused_record_of_a_repeated_batch_is_counted_once(
    command: pd.Command, config: dict[str, int], reason: str
) -> None:
    core = Purgatory(**config)
    owner = pd.Owner(core)
    owner.send(pd.watch(b"first", lib.PG_C_ALL, [pd.Key(b"far", 1)]))
    assert owner.send(command)[0].status not in ANSWERS
    owner.again()
    assert refused(core) == {reason: 1}


def test_a_watermark_past_its_end_is_counted() -> None:
    core = Purgatory()
    pd.Owner(core).send(pd.advance(b"k", 5), pd.bump(b"k", 2**63 - 5))
    assert refused(core) == {"other": 1}


def test_calls_while_draining_are_counted() -> None:
    core = Purgatory()
    owner = pd.Owner(core)
    lib.pg_drain(core.a, 1)
    far = [pd.Key(b"far", 1)]
    owner.send(pd.put(b"k", MS), pd.watch(b"w", lib.PG_C_ALL, far), pd.cancel(b"k"))
    assert refused(core) == {"stopping": 2}


def test_operations_and_timers_are_cancelled_apart() -> None:
    core = Purgatory()
    owner = pd.Owner(core)
    far = [pd.Key(b"far", 1)]
    names = (b"a", b"b", b"c")
    owner.send(pd.put(b"k", MS), *(pd.watch(name, lib.PG_C_ALL, far) for name in names))
    owner.send(pd.cancel(b"k"), pd.cancel(b"a"), pd.cancel_for_key(b"far"))
    assert (core.metrics.cancels, core.metrics.cancelled) == (1, 3)


def test_a_migration_keeps_counters() -> None:
    core = Core()
    core.put("k", MS)
    core.advance(10 * MS)
    moved = core.migrated(capacity=99)
    assert of(moved, Measured.STRUCTURAL_LATENESS) == of(core, Measured.STRUCTURAL_LATENESS)


def test_the_wal_keeps_the_histograms() -> None:
    core = Purgatory(wal_buffer_bytes=lib.PG_WAL_BUFFER_MIN)
    wal = Wal(core)
    for ns in (7, 5000, 2**62, 2**63 - 1, 2**63 - 1):
        lib.pg_measure(core.a, Measured.SEND, ns)
    lib.pg_measure(core.a, Measured.LOCAL, 1)
    lib.pg_wal_append_metrics(core.a, 77)
    (frame,) = [f for f in frames_of(wal.take()) if f.type == lib.PG_WAL_METRICS]
    body = frame.body("pg_wal_metrics")
    found = recorded(body.histogram_count, frame.data[HEAD_BYTES + size_of("pg_wal_metrics") :])
    assert body.at_boot_ns == 77
    assert found.keys() == NAMES
    assert found["send"].sum_ns == 7 + 5000 + 2**62 + 2 * (2**63 - 1)
    assert found["send"].max_ns == 2**63 - 1
    assert [count for _, count in found["send"].buckets()] == [1, 1, 1, 2]
    assert (found["local"].count, found["remote"].count) == (1, 0)


def test_a_daemon_records_histograms_once_a_minute(daemon_dir: Path) -> None:
    (daemon_dir / "demo.lock").touch()  # makes the fixture daemon_dir remove the arena files
    paths = paths_in(daemon_dir, "demo")
    opening = Opening(Config("demo", capacity=100, wal_dir=str(daemon_dir / "wal")), paths)
    directory = opening.wal
    assert directory is not None
    clock_ns = iter(range(0, 10**12, 40 * 10**9))

    class Hasty(Host):
        def boot_ns(self) -> int:
            return next(clock_ns)

    with locked(directory):
        arena = opened(opening)
        end = wal_end(arena, opening)
        wal = DaemonWal(arena, paths.arena, directory, opening.config, end, Hasty())
        for _ in range(4):
            wal.heartbeat()
        wal.commit()
        arena.close()
    walk = Walk()
    walk.enter(segments(directory)[0].path)
    reported = [f.fields["at_boot_ns"] for f in walk.frames() if f.kind == "metrics"]
    assert reported == [80 * 10**9, 160 * 10**9]


def test_a_folder_that_cannot_be_listed_ends_no_daemon(
    daemon_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (daemon_dir / "demo.lock").touch()  # makes the fixture daemon_dir remove the arena files
    paths = paths_in(daemon_dir, "demo")
    opening = Opening(Config("demo", capacity=100, wal_dir=str(daemon_dir / "wal")), paths)
    directory = opening.wal
    assert directory is not None
    with locked(directory):
        arena = opened(opening)
        end = wal_end(arena, opening)
        wal = DaemonWal(arena, paths.arena, directory, opening.config, end)
        with monkeypatch.context() as patch:
            patch.setattr(wal, "_confirmed", False)
            patch.setattr("purgatoryd.daemon.wal.snapshots", fail)
            wal._ended(0)
            assert not wal._confirmed
        wal.commit()
        arena.close()


# ---- reading a daemon ------------------------------------------------------------------------


def test_every_field_has_a_meaning() -> None:
    gauges = {name for name in COUNTED if name in GAUGES}
    assert COUNTERS.keys() | gauges == set(COUNTED)
    assert not COUNTERS.keys() & GAUGES.keys()


@contextmanager
def metrics_of(daemon: Daemon) -> Iterator[Metrics]:
    reader = Reader.attach(daemon.paths)
    try:
        yield read_metrics(reader)
    finally:
        reader.close()


@pytest.mark.tier("test")
def test_a_daemon_fills_every_histogram(daemon: StartDaemon) -> None:
    one = used(daemon)
    with metrics_of(one) as found:
        assert found.histograms.keys() == NAMES
        empty = {name for name, h in found.histograms.items() if not h.count}
        assert empty <= {"wakeup_lateness"}, "an idle daemon may never have woken up late"
        assert (found.counters["expiries"], found.counters["satisfied"]) == (1, 1)
        assert (found.gauges["live"], found.gauges["up"], found.gauges["starts"]) == (2, 1, 1)
        assert found.gauges.keys() == GAUGES.keys()
        assert next((n.name, n.live) for n in found.namespaces) == ("shop", 2)

    def woken() -> int:
        with metrics_of(one) as found:
            return found.histograms["wakeup_lateness"].count

    eventually(woken)


@pytest.mark.tier("all")
def test_a_daemon_that_hangs_is_read(daemon: StartDaemon) -> None:
    one = used(daemon)
    os.kill(one.pid, signal.SIGSTOP)
    try:
        with metrics_of(one) as found:
            assert (found.gauges["up"], found.counters["expiries"]) == (1, 1)
    finally:
        os.kill(one.pid, signal.SIGCONT)


@pytest.mark.tier("all")
@pytest.mark.parametrize("settings", [(), ("--capacity", "777")], ids=["same", "other sizes"])
def test_a_restart_goes_on_counting(daemon: StartDaemon, settings: tuple[str, ...]) -> None:
    one = used(daemon)
    with metrics_of(one) as before:
        pass
    one.restart(*settings)
    with metrics_of(one) as after:
        assert after.gauges["starts"] == 2
        assert after.counters["expiries"] == before.counters["expiries"]
        for name in ("structural_lateness", "batch_service", "remote"):
            assert after.histograms[name].since(before.histograms[name]).count == 0
