"""Jobs of consumer groups after a power cut: a redo of a snapshot and of the WAL."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from core_driver import Fault
from jobs_driver import SETTINGS, JobsCore, Session
from jobs_world import MS, World, fire, restart, step
from wal_driver import Redo, Snapshot, Wal, frames_of

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import CursorAction, Status

pytestmark = pytest.mark.tier("test")

SIZES: dict[str, int] = {
    "wal_buffer_bytes": lib.PG_WAL_BUFFER_MIN,
    "payload_bytes": 1 << 20,
    "sessions": 64,
}
SHIFT_NS = 5 * 10**9


class Job(NamedTuple):
    """The part of a job that a reboot keeps."""

    state: int
    reason: int
    failures: int
    leases: int
    key: bytes
    payload: bytes
    error: bytes
    fired_ns: int


def bytes_at(core: Any, granule: int, count: int) -> bytes:
    at = granule * lib.PG_GRANULE
    return bytes(core.region(lib.PG_R_BLOBS)[at : at + count])


def jobs_of(core: Any, shift_ns: int = 0) -> dict[tuple[int, int], Job]:
    """Return the jobs by (ticket, row of the group), as they are after a reboot."""
    rows = core.rows(lib.PG_R_JOBS, "pg_job")
    groups = core.rows(lib.PG_R_GROUPS, "pg_consumer_group")
    found: dict[tuple[int, int], Job] = {}
    for row in range(core.header.regions[lib.PG_R_JOBS].count):
        j = rows[row]
        state, failures = j.control & 0xFF, j.control >> 16 & 0xFFFF
        if state == lib.PG_JOB_FREE or groups[j.group].incarnation == 0:
            continue
        reason, cut = j.control >> 8 & 0xFF, state == lib.PG_JOB_LEASED
        blob = bytes_at(core, j.blob, j.key_len + j.payload_len)
        error = bytes_at(core, j.error & 0xFFFFFFFF, j.error >> 32) if j.error else b""
        if cut:
            failures, error = failures + 1, b"the host restarted"
            dead = failures >= groups[j.group].settings.max_attempts
            state = lib.PG_JOB_DEAD if dead else lib.PG_JOB_WAITING
            reason = lib.PG_JR_MAX_ATTEMPTS if dead else lib.PG_JR_NONE
        assert (j.ticket >> 8, j.group) not in found, "a job exists once"
        found[j.ticket >> 8, j.group] = Job(
            state, reason, failures, j.control >> 32, blob[: j.key_len], blob[j.key_len :], error,
            j.fired_ns + shift_ns,
        )  # fmt: skip
    return found


def groups_of(core: Any) -> dict[int, tuple[bytes, bytes]]:
    rows = core.rows(lib.PG_R_GROUPS, "pg_consumer_group")
    return {
        row: (
            bytes(ffi.buffer(rows[row].name, rows[row].name_len)),
            bytes(ffi.buffer(ffi.addressof(rows[row], "settings"))),
        )
        for row in range(core.header.regions[lib.PG_R_GROUPS].count)
        if rows[row].name_len and rows[row].incarnation
    }


def redone(snapshot: bytes, wal: bytes, start_lsn: int, now_ns: int) -> Any:
    """Return a core after a redo. The clock of the new boot is SHIFT_NS ahead."""
    redo = Redo(snapshot)
    redo.frames(snapshot)
    redo.frames(b"".join(f.data for f in frames_of(wal) if f.lsn >= start_lsn))
    core = redo.end(now_ns + SHIFT_NS, shift_ns=SHIFT_NS)
    core.check()
    return core


def sound(core: JobsCore, snapshot: Snapshot, wal: bytes) -> None:
    again = redone(snapshot.data, wal, snapshot.cursor.start_lsn, core.header.now_ns)
    assert jobs_of(again) == jobs_of(core, SHIFT_NS)
    assert groups_of(again) == groups_of(core)


def started(**config: Any) -> tuple[JobsCore, Wal]:
    core = JobsCore(**{**SIZES, **config})
    return core, Wal(core)


@pytest.mark.parametrize("seed", range(24))
def test_a_power_cut_after_any_step_gives_all_jobs_back(seed: int) -> None:
    rng = random.Random(seed)
    core, wal = started()
    world = World(seed, core, max_dead=60)
    for _ in range(rng.randrange(40)):
        world.step()
        wal.take()
    snapshot = Snapshot(core)
    while not snapshot.done:
        snapshot.step(rng.choice([64, 300, 1000, 9000]))
        for _ in range(rng.randrange(4)):
            world.step()
            wal.take()
    wal.take()
    for _ in range(6):
        sound(core, snapshot, wal.data)
        for _ in range(rng.randrange(1, 12)):
            world.step()
            wal.take()
    sound(core, snapshot, wal.data)


@pytest.mark.parametrize("seed", range(6))
def test_a_cut_inside_the_wal_gives_a_sound_arena(seed: int) -> None:
    core, wal = started()
    snapshot = Snapshot(core).finish()
    world = World(seed, core)
    for _ in range(60):
        world.step()
        wal.take()
    frames = list(frames_of(wal.data))
    rng = random.Random(seed)
    for end in sorted(rng.sample(range(len(frames)), 12)):
        redone(
            snapshot.data, b"".join(f.data for f in frames[:end]), snapshot.cursor.start_lsn,
            core.header.now_ns,
        )  # fmt: skip


def ask_cursor(session: Session, action: CursorAction, **about: Any) -> None:
    """Send a CURSOR message for all topics. OPEN has no sequences, COMMIT the newest ones."""
    core, topics = session.core, {}
    row = lib.pg_find_topic(core.a, 0, b"t", 1)
    if action == CursorAction.COMMIT and row != lib.PG_NIL:
        t = core.rows(lib.PG_R_TOPICS, "pg_topic")[row]
        topics = {"t": (int(t.incarnation), max(int(t.sequence) - 1, 0))}
    name = wire.CursorName(b"n", b"billing")
    reply = core.handle(
        wire.encode_cursor(1, session.id, name, action, topics, **about), uid=session.uid
    )
    assert isinstance(reply, wire.Reply)
    assert reply.error == 0, reply


def step_with_cursor(world: World, session: Session, rng: random.Random) -> None:
    world.step()
    world.core.publish_all()
    if rng.random() < 0.1:
        about = {"stream_id": int(world.core.header.stream_id)}
        ask_cursor(session, CursorAction.COMMIT, **about)


def awaited(core: Any, oldest: int) -> dict[int, tuple[int, bytes, bytes]]:
    """Return (sequence, key, payload) of the notices from `oldest` on, by position."""
    return {
        e.position: (e.sequence, e.key, e.payload) for e in core.entries() if e.position >= oldest
    }


@pytest.mark.parametrize("seed", range(12))
def test_notices_of_a_cursor_and_their_jobs_survive_a_power_cut(seed: int) -> None:
    """A sent notice stays for the cursor, and uses the memory of its jobs."""
    rng = random.Random(seed)
    core, wal = started(cursors=8, replay_capacity=256)
    world, session = World(seed, core, max_dead=60), Session(core)
    ask_cursor(session, CursorAction.OPEN, every_topic=True)
    for _ in range(rng.randrange(40)):
        step_with_cursor(world, session, rng)
        wal.take()
    snapshot = Snapshot(core)
    while not snapshot.done:
        snapshot.step(rng.choice([64, 300, 1000, 9000]))
        step_with_cursor(world, session, rng)
        wal.take()
    for _ in range(6):
        for _ in range(rng.randrange(1, 12)):
            step_with_cursor(world, session, rng)
            wal.take()
        again = redone(snapshot.data, wal.data, snapshot.cursor.start_lsn, core.header.now_ns)
        assert jobs_of(again) == jobs_of(core, SHIFT_NS)
        oldest = int(lib.pg_cursors_oldest(core.a, core.header.published))
        assert awaited(again, oldest) == awaited(core, oldest)


def test_jobs_of_a_group_that_starts_with_the_replay_buffer_survive_a_power_cut() -> None:
    core, wal = started()
    snapshot = Snapshot(core).finish()
    fire(core, "a", "b")
    core.create_group(earliest=True)
    wal.take()
    assert len(jobs_of(core)) == 2
    sound(core, snapshot, wal.data)


NOTICES = 5000
MANY: dict[str, int] = {
    "capacity": 6000, "replay_capacity": 8192, "jobs": 6000, "payload_bytes": 8 << 20,
    "replay_bytes_max": 1 << 20,
}  # fmt: skip


class Meanwhile(Exception):
    """Something happens between two steps of a group's creation."""


def with_notices() -> tuple[JobsCore, Wal, list[str]]:
    """Return a core whose replay buffer has NOTICES notices of the topic t, and their keys."""
    core, wal = started(**MANY)
    keys = [f"k{i:05}" for i in range(NOTICES)]
    for first in range(0, NOTICES, 500):
        fire(core, *keys[first : first + 500])
        wal.take()
    return core, wal, [entry.key.decode() for entry in core.entries()]


def wal_filled(core: JobsCore) -> None:
    """Fill three quarters of the WAL buffer: groups can still be created."""
    for i in range(62):
        large = core.put(f"large{i}", 10**12, topic=b"u", payload=bytes(50_000))
        assert large.status == Status.ADDED


def keys_of(core: JobsCore, wal: Wal) -> list[str]:
    """Return the keys of the jobs, in the order in which their group leases them."""
    session = Session(core)
    session.join(credits_=6000)
    while core.info().waiting:
        wal.take()
        step(core, 20 * MS)
    return [held.key.decode() for held in core.jobs_of(session)]


def stop_at(nth: int) -> Any:
    calls = iter(range(nth + 1))

    def stop() -> None:
        if next(calls) == nth:
            raise Meanwhile

    return stop


def test_a_group_starts_with_all_notices_if_the_wal_buffer_is_full() -> None:
    core, wal, keys = with_notices()
    snapshot = Snapshot(core).finish()
    wal_filled(core)
    waited = []
    core.create_group(earliest=True, max_jobs=5000, meanwhile=lambda: waited.append(wal.take()))
    assert waited
    wal.take()
    sound(core, snapshot, wal.data)
    assert keys_of(core, wal) == keys
    assert core.info().dropped == 0


def test_a_group_that_starts_in_several_steps_keeps_the_order_of_its_notices() -> None:
    core, wal, keys = with_notices()
    session = Session(core)
    late: list[str] = []

    def meanwhile() -> None:
        late.append(f"late{len(late)}")
        core.put(late[-1], 0, topic=b"t")
        core.advance(core.header.now_ns + MS)
        wal.take()
        assert session.join(b"g").status == Status.NO_GROUP
        core.check()

    snapshot = Snapshot(core)
    snapshot.step(2000)
    core.create_group(earliest=True, max_jobs=5500, meanwhile=meanwhile)
    snapshot.finish()
    assert late
    fire(core, "after")
    wal.take()
    sound(core, snapshot, wal.data)
    assert keys_of(core, wal) == [*keys, *late, "after"]


@pytest.mark.parametrize("nth", [0, 1])
def test_a_kill_while_a_group_starts_leaves_no_part_of_it(nth: int) -> None:
    core, wal, keys = with_notices()
    snapshot = Snapshot(core).finish()
    with pytest.raises(Meanwhile):
        core.create_group(earliest=True, max_jobs=5500, meanwhile=stop_at(nth))
    wal.take()
    assert redone(snapshot.data, wal.data, snapshot.cursor.start_lsn, 10**9).metrics.jobs == 0
    restart(core)
    assert core.metrics.jobs == 0
    core.create_group(b"h", earliest=True, max_jobs=5500, meanwhile=wal.take)
    wal.take()
    sound(core, snapshot, wal.data)
    core.create_group(earliest=True, max_jobs=500)
    assert core.info(b"h").waiting == len(keys)
    assert (core.info().waiting, core.info().dropped) == (500, len(keys) - 500)


def test_a_group_starts_although_its_creator_ends() -> None:
    core, _, keys = with_notices()
    with pytest.raises(Meanwhile):
        core.create_group(earliest=True, max_jobs=5500, meanwhile=stop_at(0))
    assert core.next_ns == core.header.now_ns
    step(core)
    assert core.info().waiting == len(keys)
    core.advance(core.header.now_ns)
    assert core.next_ns > core.header.now_ns


def test_a_group_that_starts_counts_its_budget_and_that_of_others() -> None:
    core, _, _ = with_notices()
    core.create_group(b"other", (b"u",), max_jobs=1000)
    seen: list[Status] = []
    wanted: dict[str, Any] = {**SETTINGS, "max_jobs": 2000}

    def meanwhile() -> None:
        wide = core.ask_group(lib.PG_GA_CHANGE, b"other", **wanted)
        assert (wide.error, wide.detail[0]) == (lib.PG_ERR_GROUP, lib.PG_GR_JOBS)
        gone = core.ask_group(lib.PG_GA_DELETE, b"g")
        assert (gone.error, gone.detail[0]) == (lib.PG_ERR_GROUP, lib.PG_GR_MISSING)
        seen.append(core.put(f"more{len(seen)}", 10**12, topic=b"t").status)

    core.create_group(earliest=True, max_jobs=NOTICES, meanwhile=meanwhile)
    assert set(seen) == {Status.ADDED}
    info = core.info()
    assert (info.pending, info.waiting, info.dropped) == (len(seen), NOTICES - len(seen), len(seen))
    assert core.put("x", 10**12, topic=b"t").status == Status.FULL_GROUP


def test_two_groups_that_start_at_once_both_start() -> None:
    core, _, _ = with_notices()
    with pytest.raises(Meanwhile):
        core.create_group(earliest=True, max_jobs=2500, meanwhile=stop_at(0))
    core.create_group(b"h", earliest=True, max_jobs=2500)
    assert (core.info().waiting, core.info(b"h").waiting) == (2500, 2500)


def test_a_new_group_in_the_row_of_a_deleted_one_keeps_its_jobs() -> None:
    """The snapshot has the new group's job, and the WAL has the end of the old group."""
    core, wal = started()
    core.create_group()
    fire(core, "a")
    wal.take()
    snapshot = Snapshot(core)
    while snapshot.cursor.phase < 4:  # the phase of groups is over
        snapshot.step(64)
    core.ask_group(lib.PG_GA_DELETE, b"g")
    core.create_group(b"h")
    fire(core, "b")
    wal.take()
    sound(core, snapshot.finish(), wal.data)


def test_an_older_record_of_a_row_does_not_end_a_job_with_a_lower_ticket() -> None:
    core, wal = started()
    core.create_group()
    session = Session(core)
    session.join()
    low = core.put("low", 50 * MS, topic=b"t").ticket
    wal.take()
    snapshot = Snapshot(core)
    snapshot.step(64)
    (high,) = fire(core, "high")
    (held,) = core.jobs_of(session)
    assert session.ack(held) == Status.DONE
    step(core, 60 * MS)
    (again,) = core.jobs_of(session)
    assert low < high
    assert again.row == held.row
    wal.take()
    sound(core, snapshot.finish(), wal.data)


def test_a_lease_that_a_reboot_cuts_is_the_last_attempt() -> None:
    core, wal = started()
    core.create_group(max_attempts=1)
    snapshot = Snapshot(core).finish()
    session = Session(core)
    session.join()
    fire(core, "a")
    wal.take()
    again = redone(snapshot.data, wal.data, snapshot.cursor.start_lsn, core.header.now_ns)
    ((_, job),) = jobs_of(again).items()
    assert (job.state, job.failures, job.error) == (lib.PG_JOB_DEAD, 1, b"the host restarted")


def test_a_job_whose_lease_a_reboot_cuts_waits_since_the_reboot() -> None:
    core, wal = started()
    core.create_group()
    snapshot = Snapshot(core).finish()
    session = Session(core)
    session.join()
    step(core, 1000 * MS)
    fire(core, "a")
    wal.take()
    now_ns = core.header.now_ns
    again = redone(snapshot.data, wal.data, snapshot.cursor.start_lsn, now_ns)
    jobs = again.rows(lib.PG_R_JOBS, "pg_job")
    (job,) = (jobs[n] for n in range(again.header.regions[lib.PG_R_JOBS].count) if jobs[n].ticket)
    assert job.control & 0xFF == lib.PG_JOB_WAITING
    assert [job.due_ns, job.first_failed_ns, job.last_failed_ns] == [now_ns + SHIFT_NS] * 3


def test_jobs_of_one_key_stay_in_order_after_a_reboot_with_another_secret() -> None:
    core, wal = started()
    core.create_group(flags=lib.PG_G_ORDERED, backoff_base_ns=0)
    snapshot = Snapshot(core).finish()
    session = Session(core)
    session.join(credits_=1)
    fire(core, "a", "b")
    (held,) = core.jobs_of(session)
    session.nack(held, 20 * MS)
    fire(core, "a")
    wal.take()
    again = redone(snapshot.data, wal.data, snapshot.cursor.start_lsn, core.header.now_ns)
    rows = again.rows(lib.PG_R_JOBS, "pg_job")
    orders = {key: set[int]() for key in (b"a", b"b")}
    for row in range(again.header.regions[lib.PG_R_JOBS].count):
        if rows[row].control & 0xFF:
            orders[bytes_at(again, rows[row].blob, rows[row].key_len)].add(rows[row].order)
    assert [len(found) for found in orders.values()] == [1, 1]


def test_jobs_stay_in_order_after_a_reboot_with_a_wall_clock_that_was_set_back() -> None:
    core, wal = started()
    core.create_group()
    snapshot = Snapshot(core).finish()
    fire(core, "a")
    wal.take()
    redo = Redo(snapshot.data)
    redo.frames(snapshot.data)
    redo.frames(wal.data)
    again = redo.end(core.header.now_ns, shift_ns=3600 * 10**9)
    assert again.put("b", 0, topic=b"t").status == Status.ADDED
    again.advance(core.header.now_ns + MS)
    again.check()
    assert len(jobs_of(again)) == 2


def damaged() -> Iterator[tuple[str, str, int, str]]:
    yield "pg_wal_job", "row", 10**6, "a job that does not exist"
    yield "pg_wal_job", "group", 999, "a consumer group that does not exist"
    yield "pg_wal_job", "topic", 999, "a topic that does not exist"
    yield "pg_wal_job", "control", 9, "state of a job"
    yield "pg_wal_job", "priority", 10, "priority of a job"
    yield "pg_wal_job", "ticket", 1, "a ticket out of bounds"
    yield "pg_wal_job", "meta", 15, "type of a key"
    yield "pg_wal_consumer_group", "row", 999, "a consumer group that does not exist"
    yield "pg_wal_consumer_group", "namespace_row", 999, "a namespace that does not exist"


@pytest.mark.parametrize(("struct", "field", "value", "message"), list(damaged()))
def test_a_damaged_record_of_jobs_is_refused(
    struct: str, field: str, value: int, message: str
) -> None:
    core, wal = started()
    snapshot = Snapshot(core).finish()
    core.create_group()
    session = Session(core)
    session.join()
    fire(core, "a")
    wal.take()
    kind = lib.PG_WAL_JOB if struct == "pg_wal_job" else lib.PG_WAL_CONSUMER_GROUP
    redo = Redo(snapshot.data)
    redo.frames(snapshot.data)
    refused = []
    for frame in frames_of(wal.data):
        data = bytearray(frame.data)
        if frame.type == kind:
            body = ffi.from_buffer(data)
            at = ffi.cast(f"struct {struct} *", body + ffi.sizeof("struct pg_frame_head"))
            setattr(at, field, value)
        try:
            redo.frames(bytes(data))
        except Fault as fault:
            refused.append(str(fault))
            break
    assert len(refused) == 1
    assert message in refused[0]
