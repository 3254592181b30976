"""Redo compared with the arena: random work on an arena with a WAL buffer, redone from the WAL."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import purgatory_driver as pd
import pytest
from core_driver import Fault
from purgatory_driver import ALL, ANY, CLIENT, SUM, Command, Key, Owner, Purgatory
from tiers import sample
from wal_driver import Redo, Snapshot, Wal, authoritative_state, frames_of, twin

from purgatoryd.shm_layout import wal, wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import MessageRefused
from purgatoryd.shm_layout.layout import BulkLoadAction, LatePolicy, PutMode, Status, TimeKind
from purgatoryd.shm_layout.shm import ArenaFile
from purgatoryd.shm_layout.wal import Buffer, Walk, contents, write_snapshot

pytestmark = pytest.mark.tier("check")

MS = 1_000_000
CONFIG: dict[str, Any] = {
    "capacity": 48,
    "replay_capacity": 64,
    "replay_bytes_max": 1 << 20,
    "payload_bytes": 1 << 21,
    "watches": 256,
    "watermarks": 24,
    "topics": 5,
    "wal_buffer_bytes": lib.PG_WAL_BUFFER_MIN,
    "accounts": 3,
    "bulk_loads": 6,
    "bulk_load_blocks": 24,
}
KEYS = [f"key{i}".encode() for i in range(14)] + [b"long" * 60]
NAMES = [f"w{i}".encode() for i in range(8)] + [b"watched by a long name" * 4]
NAMESPACES = (b"n", b"other", b"third")
TOPICS = (b"t", b"u", b"v" * 127)
BULK_LOADS = [bytes([n]) * 16 for n in range(1, 5)]


class Work:
    """Random commands of every kind on one core."""

    def __init__(self, seed: int, **config: Any) -> None:
        self.rng = random.Random(seed)
        self.core = Purgatory(**{**CONFIG, **config})
        if self.rng.random() < 0.5:
            lib.pg_set_quotas(self.core.a, 40, 0, 0)
        self.wal = Wal(self.core)
        self.owners = [Owner(self.core, n) for n in (1, 2)]
        self.nonce = 2
        self.now_ns = 0
        self.wall_offset_ns = 5 * MS

    def payload(self) -> bytes:
        size = self.rng.choice([0, 1, 15, 16, 17, 300, 300, 9000, 65536])
        return self.rng.randbytes(size)

    def watch_keys(self, condition: int) -> list[Key]:
        names = self.rng.sample(NAMES, self.rng.randint(1, 5))
        cap = self.rng.randint(1, 9) if condition == SUM else 0
        base = pd.BASE_NOW if condition == SUM and self.rng.random() < 0.5 else 0
        return [Key(name, base or self.rng.randint(0, 12), cap) for name in names]

    def watch(self) -> Command:
        condition = self.rng.choice([ALL, ANY, SUM, CLIENT])
        keys = self.watch_keys(condition)
        made = pd.watch(
            self.rng.choice(KEYS), condition, keys, self.rng.randint(0, 400) * MS,
            threshold=self.rng.randint(1, 12) if condition == SUM else 0,
            payload=self.payload()[:300], notice=self.rng.random() < 0.5,
        )  # fmt: skip
        return own_some(made, keys, self.rng)

    def command(self) -> Command:
        name, key = self.rng.choice(NAMES), self.rng.choice(KEYS)
        watermark = self.rng.randint(0, 14)
        makers: list[Callable[[], Command]] = [
            lambda: pd.put(key, self.rng.randint(-5, 300) * MS, self.rng.randrange(4)),
            lambda: pd.cancel(key), self.watch, self.watch, lambda: pd.advance(name, watermark),
            lambda: pd.advance(name, watermark), lambda: pd.bump(name, 2),
            lambda: pd.fail(name, 1 + watermark), lambda: pd.clear(name), lambda: pd.clear(name),
            lambda: pd.forget(name), lambda: pd.cancel_for_key(name),
        ]  # fmt: skip
        return self.rng.choice(makers)()

    def batch(self) -> None:
        owner = self.rng.choice(self.owners)
        owner.send(*(self.command() for _ in range(self.rng.randint(1, 6))))

    def bulk_load(self) -> None:
        """Add rows of a bulk load around a block boundary; or claim, close or forget it."""
        rng, owner = self.rng, self.rng.choice(self.owners)
        bulk_load, fencing_token = rng.choice(BULK_LOADS), rng.randrange(3)
        if rng.random() < 0.7:
            first = rng.choice([0, 5, lib.PG_BULK_LOAD_BLOCK_ROWS - 3])
            keys = (rng.choice(KEYS) for _ in range(rng.randint(1, 6)))
            made = (
                pd.cancel(key)
                if rng.random() < 0.2
                else pd.put(key, rng.randint(-5, 300) * MS, rng.randrange(4))
                for key in keys
            )
            owner.bulk_load((bulk_load, first, fencing_token), *made)
            return
        with contextlib.suppress(MessageRefused):
            match rng.randrange(3):
                case 0:
                    owner.ask_bulk_load(
                        bulk_load, BulkLoadAction.OPEN, namespace=b"n", fencing_token=fencing_token
                    )
                case 1:
                    owner.ask_bulk_load(
                        bulk_load, BulkLoadAction.CLOSE, namespace=b"n", fencing_token=fencing_token
                    )
                case _:
                    owner.ask_bulk_load(bulk_load, BulkLoadAction.FORGET)

    def complete(self) -> None:
        for owner in self.owners:
            checks = [mail for mail in owner.mail() if mail.cause == 0]
            owner.send(*(pd.complete(m.key, m.version) for m in checks[:3]), pd.bump(NAMES[0], 1))

    def put(self) -> None:
        kind = self.rng.choice([TimeKind.DELAY, TimeKind.WALL, TimeKind.WALL])
        self.core.put(
            self.rng.choice(KEYS), self.now_ns + self.rng.randint(0, 300) * MS, kind,
            mode=self.rng.choice(list(PutMode)), payload=self.payload(),
            namespace=self.rng.choice(NAMESPACES), topic=self.rng.choice(TOPICS),
            slack=self.rng.choice([0, 1, 24, 27]),
        )  # fmt: skip

    def cancel(self) -> None:
        self.core.cancel(self.rng.choice(KEYS), self.rng.choice(NAMESPACES))

    def go(self) -> None:
        self.now_ns += self.rng.randint(0, 60) * MS
        if self.rng.random() < 0.2:
            self.wall_offset_ns += self.rng.randint(-40, 40) * MS
        while self.core.advance(self.now_ns, wall_offset_ns=self.wall_offset_ns):
            self.core.publish_all()

    def publish(self) -> None:
        _, upto = self.core.notices(parts_max=self.rng.randint(1, 3))
        self.core.published(upto)

    def acknowledge(self) -> None:
        for owner in self.owners:
            self.core.mail_again(owner.id)
            owner.ack(*(m.ack() for m in owner.mail() if self.rng.random() < 0.7))

    def bye(self) -> None:
        n = self.rng.randrange(2)
        self.owners[n].bye()
        self.nonce += 1
        self.owners[n] = Owner(self.core, self.nonce)

    def configure(self) -> None:
        """Set the owner, the quotas and the durability of a namespace."""
        durability = self.rng.randrange(2) if self.wal.wal_buffer else 0
        changes = {"durability": durability, "quota_timers": self.rng.choice([0, 40])}
        changes |= {"paused": int(self.rng.random() < 0.2), "late_per_s": self.rng.choice([0, 90])}
        message = wire.encode_namespace_set(1, self.rng.choice(NAMESPACES), changes)
        body = message[wire.FRAME.size :]
        now, detail = ffi.new("struct pg_namespace_set *"), ffi.new("uint64_t[2]")
        assert lib.pg_set_namespace(self.core.a, body, len(body), 0, now, detail) == 0

    def topic_changes(self) -> wire.TopicChanges:
        """Draw a slack, a late policy or a pause."""
        late = self.rng.choice([(LatePolicy.FIRE, 0), *((p, 5 * MS) for p in LatePolicy if p)])
        changes = wire.TopicChanges(self.rng.choice([0, MS, 40 * MS]), late)
        return changes._replace(paused=self.rng.random() < 0.3)

    def configure_topic(self) -> None:
        """Set the slack, the late policy and the pause of a topic."""
        names = self.rng.choice(NAMESPACES), self.rng.choice(TOPICS)
        message = wire.encode_topic_set(1, *names, self.topic_changes())
        error, result = self.core.set_topic(message[wire.FRAME.size :])
        assert error == 0
        assert result.status in (Status.DONE, Status.FULL_TOPICS)

    def step(self) -> None:
        act = self.rng.choice(
            [self.batch] * 8
            + [self.put] * 3
            + [self.bulk_load] * 3
            + [self.cancel, self.go, self.go, self.publish, self.publish, self.acknowledge]
            + [self.complete, self.core.sweep]
        )
        act()
        if self.rng.random() < 0.02:
            self.bye()
        if self.rng.random() < 0.02:
            self.configure()
            self.configure_topic()
        if self.core.header.replay_tail - self.core.header.published > 30:
            self.core.publish_all()
        self.wal.take()


def own_some(made: Command, keys: list[Key], rng: random.Random) -> Command:
    """Return the command with some of its watch keys changed into own keys."""
    area, at = bytearray(made.area), len(made.area) - len(pd.watch_keys(keys))
    for key in keys:
        area[at + 18] = lib.PG_WK_OWN if rng.random() < 0.3 else 0
        at += pd.WATCH_KEY.size + len(key.name)
    return Command(made.record, bytes(area))


def redone(work: Work, snapshot: bytes, rng: random.Random, *, twice: bool = False) -> Purgatory:
    redo = Redo(snapshot)
    for _ in range(1 + twice):
        redo.begin()
        redo.in_pieces(snapshot, rng)
        redo.in_pieces(work.wal.data, rng)
    real_boot_ns = work.now_ns
    return redo.end(
        work.now_ns, real_boot_ns=real_boot_ns, wall_offset_ns=work.core.header.wall_offset_ns
    )


def the_same(work: Work, snapshot: bytes, rng: random.Random, *, twice: bool = False) -> None:
    found = redone(work, snapshot, rng, twice=twice)
    found.check()
    expected = authoritative_state(twin(work.core, work.now_ns))
    assert authoritative_state(found) == expected


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", sample(range(40), range(10)))
def test_the_wal_gives_all_authoritative_state_back(seed: int) -> None:
    work = Work(seed)
    first = Snapshot(work.core).finish().data
    for _ in range(8):
        for _ in range(40):
            work.step()
        work.core.check()
        the_same(work, first, work.rng, twice=work.rng.random() < 0.3)


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", sample(range(100, 160), range(100, 120)))
def test_a_snapshot_taken_while_work_goes_on(seed: int) -> None:
    work = Work(seed)
    for _ in range(work.rng.randint(10, 150)):
        work.step()
    snapshot = Snapshot(work.core)
    while not snapshot.done:
        snapshot.step(work.rng.choice([400, 1000, 4000]))
        for _ in range(work.rng.randint(0, 3)):
            work.step()
    the_same(work, snapshot.data, work.rng)
    for _ in range(work.rng.randint(0, 100)):
        work.step()
    the_same(work, snapshot.data, work.rng, twice=True)


# ---- requirements and refusals of redo ---------------------------------------------------------


def begun(seed: int = 7, steps: int = 120, **config: Any) -> Work:
    work = Work(seed, **config)
    for _ in range(steps):
        work.step()
    return work


def test_an_arena_without_a_wal_is_whole_in_a_quiet_snapshot() -> None:
    work = Work(5, wal_buffer_bytes=0)
    for _ in range(200):
        work.step()
    the_same(work, Snapshot(work.core, quiet=True).finish().data, work.rng)


def test_the_answer_to_a_repeated_batch_waits_for_the_disk() -> None:
    """The arena does not store whether the batch was durable. So the answer to a repeated batch
    always waits for the disk."""
    core = Purgatory(wal_buffer_bytes=lib.PG_WAL_BUFFER_MIN)
    owner = Owner(core)
    owner.send(pd.put(b"timer", 10**9))
    assert lib.pg_durable_lsn(core.a) == 0
    owner.again()
    assert lib.pg_durable_lsn(core.a) == lib.pg_wal_buffer_of(core.a).next_lsn - 1 > 0


def test_a_quiet_snapshot_needs_no_wal() -> None:
    work = begun()
    work.wal.data = b""
    the_same(work, Snapshot(work.core, quiet=True).finish().data, work.rng)


def test_a_snapshot_of_several_groups_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "PORTION", lib.PG_GROUP_MAX)
    core, path = Purgatory(payload_bytes=1 << 23), tmp_path / "snapshot"
    owner = Owner(core)
    payloads = {b"%d" % n: bytes([n]) * 65_536 for n in range(40)}
    for key, payload in payloads.items():
        owner.send(pd.put(key, 10**9, payload=payload))
    written: list[int] = []
    with path.open("wb") as file:
        reader = Reader(ArenaFile("snapshot", core.arena))
        write_snapshot(reader, file, quiet=True, moved=lambda: written.append(file.tell()))
    read: list[None] = []
    walk, buffer = Walk(), Buffer()
    walk.enter(path, buffer.read(path, moved=lambda: read.append(None)))
    found = [contents(frame) for frame in walk.frames() if frame.kind == "arm"]
    walk.check()
    assert walk.struct.group == len(written) == len(read) == 3
    assert max(written) < path.stat().st_size
    assert {timer.key: timer.payload for timer in found} == payloads


@pytest.mark.parametrize("sizes", [(0, lib.PG_WAL_BUFFER_MIN),
                                   (lib.PG_WAL_BUFFER_MIN, 2 * lib.PG_WAL_BUFFER_MIN),
                                   (lib.PG_WAL_BUFFER_MIN, 0)])  # fmt: skip
def test_migration_between_arenas_with_and_without_a_wal_buffer(sizes: tuple[int, int]) -> None:
    work = Work(6, wal_buffer_bytes=sizes[0])
    for _ in range(150):
        work.step()
    to = work.core.migrated(wal_buffer_bytes=sizes[1])
    to.check()
    assert len(dict(authoritative_state(to)["slots"])) == len(
        dict(authoritative_state(work.core)["slots"])
    )
    if all(sizes):
        taken = lib.pg_wal_buffer_of(work.core.a).next_lsn
        assert lib.pg_wal_buffer_of(to.a).next_lsn >= taken
    elif sizes[1]:
        wal, fresh = Wal(to), Snapshot(to, quiet=True).finish().data
        to.put("later", 10**9)
        assert len(list(frames_of(wal.take()))) > 0
        redo = Redo(fresh)
        redo.frames(fresh)
        redo.frames(wal.data)
        found = redo.end(work.now_ns, wall_offset_ns=to.header.wall_offset_ns)
        assert authoritative_state(found) == authoritative_state(twin(to, work.now_ns))


def test_deadlines_move_with_the_boot_clock_and_wall_deadlines_do_not() -> None:
    core = Purgatory(**CONFIG)
    soon = core.put("soon", 1000 * MS, TimeKind.BOOT)
    core.put("later", 9000 * MS, TimeKind.BOOT)
    core.put("wall", 9000 * MS, TimeKind.WALL)
    core.advance(500 * MS)
    snapshot = Snapshot(core, quiet=True).finish().data
    redo = Redo(snapshot)
    redo.frames(snapshot)
    # The new boot's clock is 4 s behind the old boot's clock. 6 s have passed since the snapshot at
    # 0.5 s, so the wall time is 6.5 s.
    found = redo.end(2500 * MS, shift_ns=-4000 * MS, wall_offset_ns=4000 * MS)
    assert found.get("later").deadline_ns == 5000 * MS
    assert found.get("wall").deadline_ns == 5000 * MS
    assert found.get("soon").deadline_ns == 0
    # tickets continue above any ticket that may have been lost
    assert found.put("new", 10**10).ticket > soon.ticket + 1000
    found.advance(2500 * MS)
    (late,) = found.entries()
    assert (late.key, late.ticket) == (b"soon", soon.ticket)
    raw = found.rows(lib.PG_R_REPLAY_BUFFER, "pg_entry")[0]
    assert raw.meta >> 4 & lib.PG_E_LATE
    found.advance(4999 * MS)
    assert len(list(found.entries())) == 1
    found.advance(5001 * MS)
    assert {e.key for e in found.entries()} == {b"soon", b"later", b"wall"}
    found.check()


def test_a_snapshot_of_two_moments_may_need_a_larger_arena_for_a_moment() -> None:
    core = Purgatory(**{**CONFIG, "payload_bytes": 100_000})
    wal = Wal(core)
    core.put("first", 10**9, payload=bytes(60_000))
    core.put("second", 10**9)
    snapshot = Snapshot(core)
    while b"first" not in snapshot.data:
        snapshot.step(100)
    core.cancel("first")
    core.put("third", 10**9)
    core.put("fourth", 10**9, payload=bytes(60_000))
    snapshot.finish()
    wal.take()
    with pytest.raises(Fault, match="no space for a blob"):
        Redo(snapshot.data).frames(snapshot.data + wal.data)
    redo = Redo(snapshot.data, payload_bytes=200_000)
    redo.frames(snapshot.data)
    redo.frames(wal.data)
    small = redo.end(0).migrated(payload_bytes=100_000)
    small.check()
    assert {info.key for info in small.scan()} == {"second", "third", "fourth"}


def all_of_it(snapshot: bytes, *pieces: bytes) -> Purgatory:
    redo = Redo(snapshot)
    for piece in pieces:
        redo.frames(piece)
    return redo.end(10**12)


def test_incomplete_snapshots_are_refused() -> None:
    work = begun()
    frames = list(frames_of(work.wal.data))
    snapshot = Snapshot(work.core).finish()
    for _ in range(20):
        work.step()
    later = [f for f in frames_of(work.wal.data) if f.lsn > frames[-1].lsn]
    assert len(later) > 3
    pieces = {
        "ends before the snapshot": b"",
        "the WAL has a gap": b"".join(f.data for f in frames[-1:] + later[1:]),
        "do not form a frame": frames[-1].data[:-8],
        "wrong kind of file": next(frames_of(snapshot.data)).data,
    }
    for detail, piece in pieces.items():
        with pytest.raises(Fault, match=detail):
            all_of_it(snapshot.data, snapshot.data, piece)
    without_last = b"".join(f.data for f in list(frames_of(snapshot.data))[:-1])
    with pytest.raises(Fault, match="without its last frame"):
        all_of_it(snapshot.data, without_last)
    with pytest.raises(Fault, match="the snapshot has a gap"):
        all_of_it(snapshot.data, without_last[len(next(frames_of(without_last)).data) :])
