"""Parked timers: the core keeps the key, and the WAL the payload, until the timer is unparked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import purgatory_driver as pd
import pytest
from core_driver import Fault
from effort import effort
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from purgatory_driver import Answer, Command, Owner, Purgatory
from wal_driver import Redo, Snapshot, Wal, frames_of

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import PutMode, Status, TimeKind, WireError

pytestmark = pytest.mark.tier("check")

MS, SECOND_NS = 10**6, 10**9
BEYOND_NS = SECOND_NS
FAR_NS, NEAR_NS = 5 * SECOND_NS, SECOND_NS // 2
BULK_LOAD = b"a bulk load, 16b"
CONFIG: dict[str, Any] = {
    "wal_buffer_bytes": lib.PG_WAL_BUFFER_MIN,
    "bulk_loads": 2,
    "bulk_load_blocks": 2,
}


def unpark(key: bytes, ticket: int, payload: bytes = b"") -> Command:
    return pd.command(lib.PG_OP_UNPARK, key, value=ticket, payload=payload)


@pytest.fixture
def core() -> Purgatory:
    core = Purgatory(**CONFIG, now_ns=SECOND_NS)
    core.set_namespace(b"n", park_beyond_ns=BEYOND_NS)
    return core


@pytest.fixture
def owner(core: Purgatory) -> Owner:
    return Owner(core)


def one(owner: Owner, command: Command) -> Answer:
    (answer,) = owner.send(command)
    return answer


def parked(owner: Owner, key: bytes = b"k", payload: bytes = b"far") -> int:
    answer = one(owner, pd.put(key, FAR_NS, payload=payload))
    assert answer.status == Status.PARKED
    return answer.ticket


def payloads(core: Purgatory) -> list[bytes]:
    return [entry.payload for entry in core.entries()]


def test_far_timers_are_parked_and_near_ones_are_not(core: Purgatory, owner: Owner) -> None:
    before = core.metrics.blob_bytes
    ticket = parked(owner, payload=bytes(5000))
    assert core.metrics.blob_bytes - before == lib.PG_GRANULE
    assert one(owner, pd.put(b"near", NEAR_NS)).status == Status.ADDED
    assert one(owner, pd.put(b"other", FAR_NS, name=1)).status == Status.ADDED
    info = core.get(b"k")
    assert (info.status, info.ticket, info.payload) == (Status.PARKED, ticket, b"")
    assert (core.metrics.parked, core.metrics.live) == (1, 2)
    core.check()


def test_a_parked_timer_does_not_fire_before_its_payload_is_back(
    core: Purgatory, owner: Owner
) -> None:
    ticket = parked(owner)
    core.advance(20 * SECOND_NS)
    assert lib.pg_overdue(core.a) == 1
    assert core.header.replay_tail == 0
    answer = one(owner, unpark(b"k", ticket, b"far"))
    assert (answer.status, answer.ticket, answer.ended) == (Status.UNPARKED, ticket, 6 * SECOND_NS)
    core.advance(20 * SECOND_NS)
    (entry,) = core.entries()
    assert (entry.ticket, entry.payload, entry.deadline_ns) == (ticket, b"far", 6 * SECOND_NS)
    assert one(owner, unpark(b"k", ticket, b"far")).status == Status.UNKNOWN
    core.check()


def test_every_put_mode_and_cancel_handles_a_parked_timer(core: Purgatory, owner: Owner) -> None:
    ticket = parked(owner)
    assert one(owner, pd.put(b"k", FAR_NS)).status == Status.EXISTS
    assert one(owner, pd.put(b"k", FAR_NS, PutMode.KEEP))[::2] == (Status.KEPT, ticket)
    assert one(owner, pd.put(b"k", NEAR_NS, PutMode.EXTEND)).status == Status.KEPT
    later = one(owner, pd.put(b"k", 2 * FAR_NS, PutMode.EXTEND))
    assert later == (Status.EXTENDED, SECOND_NS + 2 * FAR_NS, ticket)
    assert core.get(b"k").status == Status.PARKED
    assert core.get(b"k").deadline_ns == SECOND_NS + 2 * FAR_NS
    replaced = one(owner, pd.put(b"k", NEAR_NS, PutMode.REPLACE, payload=b"near"))
    assert replaced.status == Status.REPLACED
    assert one(owner, unpark(b"k", ticket)).status == Status.UNKNOWN
    assert one(owner, pd.put(b"k", FAR_NS, PutMode.REPLACE)).status == Status.REPLACED
    assert core.get(b"k").status == Status.PARKED
    assert one(owner, pd.cancel(b"k")).status == Status.CANCELLED
    assert core.get(b"k").status == Status.UNKNOWN
    core.advance(60 * SECOND_NS)
    assert core.header.replay_tail == 0
    core.check()


def test_only_the_ticket_that_is_parked_is_unparked(core: Purgatory, owner: Owner) -> None:
    ticket = parked(owner)
    near = one(owner, pd.put(b"near", NEAR_NS)).ticket
    for key, of in ((b"k", ticket + 1), (b"x", ticket), (b"near", near)):
        assert one(owner, unpark(key, of, b"p")).status == Status.UNKNOWN
    assert core.get(b"near").payload == b""
    assert core.get(b"k").status == Status.PARKED
    full = one(owner, unpark(b"k", ticket, bytes(65536)))
    assert full.status in (Status.UNPARKED, Status.FULL_PAYLOAD)
    core.check()


def test_wall_deadlines_are_parked_too(core: Purgatory, owner: Owner) -> None:
    assert core.put("wall", 9 * SECOND_NS, TimeKind.WALL, payload=b"w").status == Status.PARKED
    ticket = core.get("wall").ticket
    key = pd.command(lib.PG_OP_UNPARK, b"wall", value=ticket, payload=b"w")
    record = bytearray(key.record)
    record[2] = lib.PG_KEY_STR
    core.restart()
    core.advance(SECOND_NS, wall_offset_ns=3 * SECOND_NS)
    assert one(owner, Command(bytes(record), key.area))[::2] == (Status.UNPARKED, ticket)
    core.advance(5 * SECOND_NS)
    assert core.header.replay_tail == 0
    core.advance(6 * SECOND_NS + 2 * MS)
    assert payloads(core) == [b"w"]
    core.check()


def test_the_wal_has_the_payloads_of_parked_timers(core: Purgatory, owner: Owner) -> None:
    wal = Wal(core)
    parked(owner, payload=b"the payload")
    arms = [f for f in frames_of(wal.take()) if f.type == lib.PG_WAL_ARM]
    assert b"the payload" in arms[-1].data
    assert arms[-1].body("pg_wal_arm").parked == 1
    assert b"the payload" not in Snapshot(core, quiet=True).finish().data


def test_a_row_that_is_unparked_is_done_once(core: Purgatory, owner: Owner) -> None:
    ticket = parked(owner)
    rows = (BULK_LOAD, 0, 1)
    gone = parked(owner, b"gone")
    one(owner, pd.cancel(b"gone"))
    both = [unpark(b"k", ticket, b"far"), unpark(b"gone", gone, b"far")]
    assert [a.status for a in owner.bulk_load(rows, *both)] == [Status.UNPARKED, Status.UNKNOWN]
    assert [a.status for a in owner.bulk_load(rows, *both)] == [Status.BULK_LOADED] * 2
    assert core.bulk_loads()[BULK_LOAD].rows == {0, 1}


@pytest.mark.parametrize("frame", ["arm", "unpark"])
def test_a_frame_with_malformed_items_is_refused(core: Purgatory, owner: Owner, frame: str) -> None:
    wal, snapshot = Wal(core), Snapshot(core, quiet=True).finish().data
    one(owner, unpark(b"k", parked(owner), b"far"))
    kind = {"arm": lib.PG_WAL_ARM, "unpark": lib.PG_WAL_UNPARK}[frame]
    before, wanted = b"", b""
    for found in frames_of(wal.take()):
        if found.type == kind:
            wanted = found.data
            break
        before += found.data
    at = ffi.sizeof("struct pg_frame_head") + ffi.offsetof(f"struct pg_wal_{frame}", "ext_len")
    later = wanted[:at] + (16).to_bytes(4, "little") + wanted[at + 4 :]
    redo = Redo(snapshot)
    redo.frames(snapshot + before)
    with pytest.raises(Fault, match=r"malformed extension item|bytes that do not form a frame"):
        redo.frames(later)
    redo.frames(wanted)


def test_parking_needs_a_wal() -> None:
    core = Purgatory()
    core.put("x", SECOND_NS)
    request = wire.encode_namespace_set(1, b"n", {"park_beyond_ns": 5})
    error, _, _ = core.set_namespace_raw(request[wire.FRAME.size :])
    assert error == WireError.NO_WAL


# ---- against a model ---------------------------------------------------------------------------


@dataclass
class Timer:
    ticket: int
    deadline_ns: int
    payload: bytes
    parked: bool


KEYS = [b"%d" % n for n in range(6)]


class Parking(RuleBasedStateMachine):
    """Adds of all modes, cancels, unparks, kills and reboots. No timer fires early, twice or after
    its cancel, and each unparked timer has its own payload."""

    @initialize()
    def begin(self) -> None:
        core = Purgatory(**CONFIG, now_ns=SECOND_NS)
        core.set_namespace(b"n", park_beyond_ns=BEYOND_NS)
        self.timers: dict[bytes, Timer] = {}
        self.serial = 0
        self.adopt(core)

    def adopt(self, core: Purgatory) -> None:
        self.core = core
        self.wal = Wal(core)
        self.snapshot = Snapshot(core, quiet=True).finish().data
        self.owner = Owner(core)

    keys = st.sampled_from(KEYS)

    @rule(key=keys, mode=st.sampled_from(list(PutMode)), ms=st.integers(1, 4000))
    def put(self, key: bytes, mode: int, ms: int) -> None:
        self.serial += 1
        payload, deadline_ns = b"%d" % self.serial * 9, self.core.now_ns + ms * MS
        answer = one(self.owner, pd.put(key, ms * MS, mode, payload=payload))
        old = self.timers.get(key)
        if old is None or mode == PutMode.REPLACE:
            parks = ms * MS > BEYOND_NS
            self.timers[key] = Timer(answer.ticket, deadline_ns, payload, parks)
            fresh = Status.PARKED if parks else Status.ADDED
            assert answer.status == (fresh if old is None else Status.REPLACED)
        elif mode == PutMode.EXTEND and deadline_ns > old.deadline_ns:
            old.deadline_ns = deadline_ns
            assert answer[::2] == (Status.EXTENDED, old.ticket)
        else:
            refused = mode == PutMode.ERROR
            assert answer[::2] == (Status.EXISTS if refused else Status.KEPT, old.ticket)

    @rule(key=keys)
    def cancel(self, key: bytes) -> None:
        found = one(self.owner, pd.cancel(key)).status
        assert (found == Status.CANCELLED) == (self.timers.pop(key, None) is not None)

    @rule(key=keys, wrong=st.booleans())
    def unpark(self, key: bytes, wrong: bool) -> None:
        timer = self.timers.get(key)
        ticket = (timer.ticket if timer else 1) + wrong
        answer = one(self.owner, unpark(key, ticket, timer.payload if timer else b"x"))
        if timer is None or wrong or not timer.parked:
            assert answer.status == Status.UNKNOWN
            return
        timer.parked = False
        assert answer == (Status.UNPARKED, timer.deadline_ns, ticket)

    @rule(ms=st.integers(1, 900))
    def pass_time(self, ms: int) -> None:
        before = self.core.header.replay_tail
        while self.core.advance(self.core.now_ns + ms * MS):
            self.core.publish_all()
        fired = {
            (e.key, e.ticket, e.payload)
            for e in map(self.core.entry, range(before, self.core.header.replay_tail))
        }
        self.core.publish_all()
        due = {
            key: t for key, t in self.timers.items()
            if not t.parked and t.deadline_ns <= self.core.now_ns // MS * MS
        }  # fmt: skip
        assert fired == {(key, t.ticket, t.payload) for key, t in due.items()}
        self.timers = {k: t for k, t in self.timers.items() if k not in due}

    @rule()
    def kill(self) -> None:
        self.core.restart()

    @rule()
    def resize(self) -> None:
        self.adopt(self.core.migrated(capacity=70))

    @rule()
    def reboot(self) -> None:
        self.wal.take()
        redo = Redo(self.snapshot, sessions=3)
        redo.frames(self.snapshot)
        redo.frames(self.wal.data)
        self.adopt(redo.end(self.core.now_ns, real_boot_ns=self.core.now_ns))

    @invariant()
    def the_arena_is_as_the_model(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        found = {
            bytes(info.key) if isinstance(info.key, bytes) else info.key: (
                info.ticket, info.deadline_ns, info.payload, info.status == Status.PARKED,
            )
            for info in self.core.scan()
        }  # fmt: skip
        assert found == {
            key: (t.ticket, t.deadline_ns, b"" if t.parked else t.payload, t.parked)
            for key, t in self.timers.items()
        }
        overdue = [
            t for t in self.timers.values() if t.parked and t.deadline_ns <= self.core.now_ns
        ]
        assert lib.pg_overdue(self.core.a) == len(overdue)
        self.wal.take()


TestParking = Parking.TestCase
TestParking.settings = effort(60, 3000)
