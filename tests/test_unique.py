"""unique_for: an add refuses other adds of its key for a time, also after its timer has ended."""

from __future__ import annotations

import struct
from typing import Any

import purgatory_driver as pd
import pytest
from core_driver import Fault
from purgatory_driver import Answer, Command, Owner, Purgatory
from wal_driver import Redo, Snapshot, Wal, authoritative_state, frames_until, twin

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.errors import MessageRefused
from purgatoryd.shm_layout.layout import (
    GRANULE,
    Condition,
    LatePolicy,
    PutMode,
    Status,
    TimeKind,
    WireError,
)

pytestmark = pytest.mark.tier("check")

MS, SECOND_NS = 10**6, 10**9
DUE_NS, LONG_NS = SECOND_NS, 10 * SECOND_NS
CONFIG: dict[str, Any] = {
    "wal_buffer_bytes": lib.PG_WAL_BUFFER_MIN,
    "bulk_loads": 2,
    "bulk_load_blocks": 2,
}
LONG_KEY = b"a key that does not fit into one granule"
ITEMS = wire.encode_tag("a tag") + wire.encode_priority(7)


@pytest.fixture
def core() -> Purgatory:
    return Purgatory(**CONFIG, now_ns=SECOND_NS)


@pytest.fixture
def owner(core: Purgatory) -> Owner:
    return Owner(core)


def put(key: bytes = b"k", for_ns: int = LONG_NS, delay_ns: int = DUE_NS, **more: Any) -> Command:
    """A PUT whose key is unique for `for_ns`; 0 = without the item."""
    items = more.pop("items", b"") + wire.encode_unique(for_ns or None)
    return pd.put(key, delay_ns, items=items, **more)


def one(owner: Owner, command: Command) -> Answer:
    (answer,) = owner.send(command)
    return answer


def added(owner: Owner, *args: Any, **more: Any) -> int:
    answer = one(owner, put(*args, **more))
    assert answer.status == Status.ADDED
    return answer.ticket


def pause(core: Purgatory, paused: bool) -> None:
    """Pause the first topic of the core, or resume it."""
    row = core.topic_row(0)
    message = wire.encode_topic_set(1, row.namespace, row.topic, wire.TopicChanges(paused=paused))
    error, _ = core.set_topic(message[wire.FRAME.size :])
    assert error == 0


def fired(core: Purgatory) -> list[object]:
    return [entry.key for entry in core.entries()]


def run(core: Purgatory, now_ns: int) -> None:
    while core.advance(now_ns):
        core.check()
    core.check()


def recovered(core: Purgatory, data: bytes, shift_ns: int = 0) -> Purgatory:
    redo = Redo(data, wal_buffer_bytes=lib.PG_WAL_BUFFER_MIN)
    redo.frames(data)
    found = redo.end(core.now_ns + shift_ns)
    found.check()
    return found


def uniques(core: Purgatory) -> dict[int, int]:
    """Return ticket -> time until which a key of an ended timer is unique."""
    hot = core.rows(lib.PG_R_HOT, "pg_hot")
    slots = (hot[n] for n in range(core.header.capacity))
    return {h.ctl >> 8: h.deadline_ns for h in slots if h.ctl & 0xFF == lib.PG_S_UNIQUE}


@pytest.mark.parametrize("key", [b"k", LONG_KEY])
def test_a_second_add_is_refused_before_and_after_the_firing(
    core: Purgatory, owner: Owner, key: bytes
) -> None:
    ticket = added(owner, key, items=ITEMS, payload=b"p" * 100)
    for mode in (PutMode.ERROR, PutMode.REPLACE, PutMode.EXTEND):
        answer = one(owner, pd.put(key, 5 * SECOND_NS, mode))
        assert (answer.status, answer.ticket) == (Status.EXISTS, ticket)
    assert one(owner, pd.put(key, SECOND_NS, PutMode.KEEP))[::2] == (Status.KEPT, ticket)
    run(core, 3 * SECOND_NS)
    assert fired(core) == [key]
    for mode in PutMode:
        assert one(owner, pd.put(key, SECOND_NS, mode)) == (
            Status.EXISTS, -(SECOND_NS + LONG_NS), ticket,
        )  # fmt: skip
    watch = one(owner, pd.watch(key, Condition.ALL, [pd.Key(b"w", 1)]))
    assert (watch.status, watch.ticket) == (Status.EXISTS, ticket)
    run(core, SECOND_NS + LONG_NS + 100 * MS)
    assert (uniques(core), core.metrics.unique_freed) == ({}, 1)
    assert one(owner, pd.put(key, SECOND_NS)).status == Status.ADDED
    core.check()


def test_a_cancel_of_the_pending_timer_ends_the_time(core: Purgatory, owner: Owner) -> None:
    added(owner)
    assert one(owner, pd.cancel(b"k")).status == Status.CANCELLED
    added(owner)
    run(core, 3 * SECOND_NS)
    assert one(owner, pd.cancel(b"k")).status == Status.FIRED
    assert one(owner, pd.put(b"k", SECOND_NS)).status == Status.EXISTS


def test_a_time_that_ends_before_the_deadline_leaves_an_ordinary_timer(
    core: Purgatory, owner: Owner
) -> None:
    ticket = added(owner, for_ns=SECOND_NS, delay_ns=5 * SECOND_NS)
    run(core, 4 * SECOND_NS)
    answer = one(owner, put(for_ns=SECOND_NS, mode=PutMode.REPLACE))
    assert answer.status == Status.REPLACED
    assert answer.ticket != ticket
    run(core, 6 * SECOND_NS)
    assert (fired(core), uniques(core)) == ([b"k"], {})
    assert one(owner, pd.put(b"k", SECOND_NS)).status == Status.ADDED


def test_a_unique_key_is_no_timer(core: Purgatory, owner: Owner) -> None:
    added(owner, payload=b"p" * 64)
    run(core, 3 * SECOND_NS)
    assert core.scan() == []
    assert core.get(b"k").status == Status.UNKNOWN
    assert (core.metrics.live, core.metrics.unique_keys) == (0, 1)
    assert core.topic_row(0).live == 0


def test_bytes_and_slots_are_given_back(core: Purgatory, owner: Owner) -> None:
    empty = core.metrics.blob_bytes
    added(owner, LONG_KEY, items=ITEMS, payload=b"p" * 1000)
    run(core, 3 * SECOND_NS)
    core.publish_all()
    run(core, 20 * SECOND_NS)
    entry = -(-(len(LONG_KEY) + 1000) // GRANULE) * GRANULE
    assert core.metrics.blob_bytes - empty == entry
    core.check()


def test_a_slack_does_not_prolong_the_time(core: Purgatory, owner: Owner) -> None:
    wal, first = Wal(core), Snapshot(core, quiet=True).finish().data
    record, area = put()
    slack = bytearray(record)
    slack[7] = 1 + 33  # 2^33 ns = 8.6 s
    assert one(owner, Command(bytes(slack), area)).status == Status.ADDED
    run(core, 9 * SECOND_NS)
    assert (fired(core), len(uniques(core))) == ([b"k"], 1)
    found = recovered(core, first + wal.take())
    for copy in (twin(core, core.now_ns), core.migrated(capacity=64), found, core):
        run(copy, 12 * SECOND_NS)
        assert uniques(copy) == {}


def test_a_unique_key_counts_in_the_quotas(core: Purgatory, owner: Owner) -> None:
    core.set_namespace(b"n", quota_timers=1)
    added(owner)
    run(core, 3 * SECOND_NS)
    assert one(owner, pd.put(b"other", SECOND_NS)).status == Status.QUOTA
    run(core, 20 * SECOND_NS)
    assert one(owner, pd.put(b"other", SECOND_NS)).status == Status.ADDED


@pytest.mark.parametrize("policy", [LatePolicy.SKIP, LatePolicy.COALESCE])
def test_a_late_timer_without_a_notice_keeps_its_key_unique(
    core: Purgatory, owner: Owner, policy: LatePolicy
) -> None:
    late = wire.encode_late((policy, SECOND_NS))
    added(owner, items=late, payload=b"p" * 100)
    added(owner, b"newer", items=late, delay_ns=DUE_NS + MS)
    pause(core, True)
    run(core, 5 * SECOND_NS)
    wal, snapshot = Wal(core), Snapshot(core, quiet=True).finish().data
    pause(core, False)
    run(core, 6 * SECOND_NS)
    assert b"k" not in fired(core)
    assert one(owner, pd.put(b"k", SECOND_NS)).status == Status.EXISTS
    found = recovered(core, snapshot + wal.take())
    assert uniques(found) == uniques(core)
    assert len(uniques(core)) == 2


def test_a_parked_timer_keeps_its_key_unique(core: Purgatory, owner: Owner) -> None:
    core.set_namespace(b"n", park_beyond_ns=SECOND_NS)
    answer = one(owner, put(delay_ns=5 * SECOND_NS, payload=b"far"))
    assert answer.status == Status.PARKED
    assert one(owner, pd.put(b"k", SECOND_NS, PutMode.REPLACE)).status == Status.EXISTS
    unpark = pd.command(lib.PG_OP_UNPARK, b"k", value=answer.ticket, payload=b"far")
    assert one(owner, unpark).status == Status.UNPARKED
    run(core, 7 * SECOND_NS)
    assert fired(core) == [b"k"]
    assert uniques(core) == {answer.ticket: SECOND_NS + LONG_NS}


def test_a_row_of_a_bulk_load_is_refused_like_an_add(core: Purgatory, owner: Owner) -> None:
    added(owner)
    (answer,) = owner.bulk_load((b"a bulk load, 16b", 0, 1), pd.put(b"k", SECOND_NS))
    assert answer.status == Status.EXISTS


def item(kind: int, extra: int = 0, value: int = 0) -> bytes:
    return struct.pack("<IIq", kind, extra, value)


MALFORMED = {
    "no time": item(lib.PG_EXT_UNIQUE),
    "a negative time": item(lib.PG_EXT_UNIQUE, 0, -1),
    "a time that is too long": item(lib.PG_EXT_UNIQUE, 0, lib.PG_UNIQUE_MAX_NS + 1),
    "a key": item(lib.PG_EXT_UNIQUE, 1, SECOND_NS) + b"k" + bytes(15),
    "twice": wire.encode_unique(1) * 2,
}


@pytest.mark.parametrize("items", MALFORMED.values(), ids=MALFORMED)
def test_malformed_items_are_refused(core: Purgatory, owner: Owner, items: bytes) -> None:
    with pytest.raises(MessageRefused) as caught:
        owner.send(pd.put(b"k", SECOND_NS, items=items))
    assert caught.value.error == WireError.MALFORMED
    assert core.metrics.adds == 0


@pytest.mark.parametrize("wall", [False, True])
def test_a_kill_a_migration_and_a_recovery_keep_the_key_unique(
    core: Purgatory, owner: Owner, wall: bool
) -> None:
    wal, first = Wal(core), Snapshot(core, quiet=True).finish().data
    command = put(LONG_KEY, items=ITEMS, payload=b"p" * 100, delay_ns=2 * SECOND_NS)
    if wall:
        record = bytearray(command.record)
        record[6] = TimeKind.WALL
        command = Command(bytes(record), command.area)
    ticket = one(owner, command).ticket
    added(owner, b"pending")
    armed = Snapshot(core, quiet=True).finish().data
    run(core, 4 * SECOND_NS)
    expected = uniques(core)
    assert expected[ticket] == SECOND_NS + LONG_NS
    frames, ended = wal.take(), Snapshot(core, quiet=True).finish().data
    late = frames[len(frames_until(frames, lib.PG_WAL_FIRE)[0]) :]
    for data in (first + frames, armed + late, ended):
        found = recovered(core, data)
        assert uniques(found) == expected
        if data is first + frames:
            assert authoritative_state(found)["slots"] == authoritative_state(core)["slots"]
        moved = recovered(core, data, shift_ns=-SECOND_NS // 2)
        assert set(uniques(moved)) == set(expected)
    for copy in (twin(core, core.now_ns), core.migrated(capacity=64)):
        copy.check()
        assert uniques(copy) == expected
        run(copy, 20 * SECOND_NS)
        assert uniques(copy) == {}
    run(core, 20 * SECOND_NS)
    assert uniques(recovered(core, first + frames + wal.take())) == {}


def test_a_damaged_unique_key_is_found(core: Purgatory, owner: Owner) -> None:
    added(owner)
    run(core, 3 * SECOND_NS)
    hot, cold = core.rows(lib.PG_R_HOT, "pg_hot"), core.rows(lib.PG_R_COLD, "pg_cold")
    (slot,) = (n for n in range(core.header.capacity) if hot[n].ctl & 0xFF == lib.PG_S_UNIQUE)
    core.region(lib.PG_R_BLOBS)[cold[slot].blob * GRANULE + 4] = 9
    with pytest.raises(Fault, match="a unique key is malformed"):
        core.check()
    core.attach()
    with pytest.raises(Fault, match="a unique key is malformed"):
        core.rebuild(core.now_ns)


def test_a_frame_whose_key_differs_is_refused(core: Purgatory, owner: Owner) -> None:
    wal, snapshot = Wal(core), Snapshot(core, quiet=True).finish().data
    added(owner)
    before, frame = frames_until(wal.take(), lib.PG_WAL_ARM)
    redo = Redo(snapshot)
    redo.frames(snapshot + before)
    at = ffi.sizeof("struct pg_frame_head") + ffi.sizeof("struct pg_wal_arm") + GRANULE
    with pytest.raises(Fault, match="malformed extension item"):
        redo.frames(frame.data[:at] + b"x" + frame.data[at + 1 :])
