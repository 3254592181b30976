"""Extension items of timers: a PUT carries them, and they stay with the timer until it ends."""

from __future__ import annotations

import struct

import purgatory_driver as pd
import pytest
from core_driver import Fault
from purgatory_driver import Owner, Purgatory
from wal_driver import Redo, Snapshot, Wal, authoritative_state, frames_until, twin

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.errors import InvalidName, MessageRefused, ProtocolError
from purgatoryd.shm_layout.layout import (
    GRANULE,
    TAG_MAX,
    ExtKind,
    PutMode,
    Status,
    TimeKind,
    WireError,
)

pytestmark = pytest.mark.tier("check")

SECOND_NS = 10**9
TAG = wire.encode_tag("order-7")
LONGEST = wire.encode_tag("t" * TAG_MAX)
CONFIG = {"wal_buffer_bytes": lib.PG_WAL_BUFFER_MIN, "bulk_loads": 2, "bulk_load_blocks": 2}


def item(kind: int, extra: int = 0, value: int = 0, text: bytes = b"") -> bytes:
    return struct.pack("<IIq", kind, extra, value) + text


@pytest.fixture
def core() -> Purgatory:
    return Purgatory(**CONFIG, now_ns=SECOND_NS)


@pytest.fixture
def owner(core: Purgatory) -> Owner:
    return Owner(core)


def armed(owner: Owner, key: bytes, delay_ns: int, items: bytes = TAG, **fields: object) -> int:
    (answer,) = owner.send(pd.put(key, delay_ns, items=items, **fields))  # type: ignore[arg-type]
    assert answer.status in (Status.ADDED, Status.REPLACED, Status.PARKED, Status.EXTENDED)
    return answer.ticket


def tags(core: Purgatory) -> dict[object, str | None]:
    return {info.key: info.tag for info in core.scan()}


MALFORMED = {
    "an unknown kind": item(99),
    "kind 0": item(0),
    "a kind that is reserved": item(lib.PG_EXT_UNIQUE),
    "a wall deadline": item(ExtKind.WALL),
    "half an item": TAG[:8],
    "an empty tag": item(ExtKind.TAG),
    "a tag without its text": item(ExtKind.TAG, 5),
    "a tag that is too long": item(ExtKind.TAG, TAG_MAX + 1, text=b"t" * 64),
    "a tag with a value": item(ExtKind.TAG, 1, 1, b"t" + bytes(15)),
    "a tag that is no UTF-8": item(ExtKind.TAG, 1, text=b"\xff" + bytes(15)),
    "a tag with a NUL": item(ExtKind.TAG, 2, text=bytes(16)),
    "padding that is not zero": item(ExtKind.TAG, 1, text=b"tt" + bytes(14)),
    "two tags": TAG + TAG,
    "bytes after the tag": TAG + bytes(16),
}


@pytest.mark.parametrize("items", MALFORMED.values(), ids=MALFORMED)
def test_malformed_items_are_refused(core: Purgatory, owner: Owner, items: bytes) -> None:
    before = core.metrics.adds
    with pytest.raises(MessageRefused) as caught:
        owner.send(pd.put(b"good", SECOND_NS, items=TAG), pd.put(b"k", SECOND_NS, items=items))
    assert caught.value.error == WireError.MALFORMED
    assert core.metrics.adds == before


def test_a_get_shows_the_tag(core: Purgatory, owner: Owner) -> None:
    armed(owner, b"k", SECOND_NS, payload=b"the payload")
    armed(owner, b"plain", SECOND_NS, b"")
    armed(owner, b"long", SECOND_NS, LONGEST)
    assert tags(core) == {b"k": "order-7", b"plain": None, b"long": "t" * TAG_MAX}
    assert core.get(b"k").payload == b"the payload"
    core.check()


def test_a_wall_timer_has_its_deadline_and_its_tag(core: Purgatory, owner: Owner) -> None:
    record = bytearray(pd.put(b"k", 9 * SECOND_NS, items=TAG).record)
    record[6] = TimeKind.WALL
    owner.send(pd.Command(bytes(record), b"k" + TAG))
    info = core.get(b"k")
    assert (info.wall_ns, info.tag) == (9 * SECOND_NS, "order-7")
    copy = twin(core, core.now_ns)
    assert (copy.get(b"k").wall_ns, copy.get(b"k").tag) == (9 * SECOND_NS, "order-7")
    core.advance(9 * SECOND_NS)
    assert [entry.key for entry in core.entries()] == [b"k"]
    core.check()


def test_replace_takes_the_new_items_and_extend_keeps_the_old(
    core: Purgatory, owner: Owner
) -> None:
    armed(owner, b"k", SECOND_NS)
    armed(owner, b"k", 2 * SECOND_NS, LONGEST, mode=PutMode.EXTEND)
    assert core.get(b"k").tag == "order-7"
    armed(owner, b"k", SECOND_NS, LONGEST, mode=PutMode.REPLACE)
    assert core.get(b"k").tag == "t" * TAG_MAX
    armed(owner, b"k", SECOND_NS, b"", mode=PutMode.REPLACE)
    assert core.get(b"k").tag is None
    core.check()


def test_a_timer_that_ends_returns_the_bytes_of_its_items(core: Purgatory, owner: Owner) -> None:
    empty = core.metrics.blob_bytes
    armed(owner, b"gone", SECOND_NS, LONGEST)
    assert core.metrics.blob_bytes - empty == len(LONGEST) + GRANULE
    owner.send(pd.cancel(b"gone"))
    assert core.metrics.blob_bytes == empty
    armed(owner, b"fires", SECOND_NS, LONGEST, payload=b"p")
    core.advance(3 * SECOND_NS)
    assert [(entry.key, entry.payload) for entry in core.entries()] == [(b"fires", b"p")]
    assert core.metrics.blob_bytes - empty == GRANULE
    core.check()


def test_items_count_in_the_quota_of_bytes(core: Purgatory, owner: Owner) -> None:
    core.set_namespace(b"n", quota_bytes=len(LONGEST) + GRANULE)
    (over,) = owner.send(pd.put(b"k", SECOND_NS, payload=b"p" * GRANULE, items=LONGEST))
    assert over.status == Status.QUOTA
    armed(owner, b"k", SECOND_NS, LONGEST)


def test_items_survive_a_kill_and_a_migration(core: Purgatory, owner: Owner) -> None:
    armed(owner, b"k", SECOND_NS, payload=b"p")
    armed(owner, b"long", 2 * SECOND_NS, LONGEST)
    wanted = tags(core)
    core.restart()
    assert tags(core) == wanted
    other = core.migrated(capacity=99)
    other.check()
    assert tags(other) == wanted


def test_the_wal_and_a_snapshot_have_the_items(core: Purgatory, owner: Owner) -> None:
    wal, first = Wal(core), Snapshot(core, quiet=True).finish().data
    armed(owner, b"k", 30 * SECOND_NS, payload=b"p")
    armed(owner, b"long", 40 * SECOND_NS, LONGEST)
    armed(owner, b"k", 50 * SECOND_NS, LONGEST, mode=PutMode.EXTEND)
    armed(owner, b"long", 60 * SECOND_NS, mode=PutMode.REPLACE)
    owner.bulk_load((b"a bulk load, 16b", 0, 1), pd.put(b"row", 70 * SECOND_NS, items=TAG))
    frames = wal.take()
    for snapshot, more in ((first, frames), (Snapshot(core, quiet=True).finish().data, b"")):
        redo = Redo(snapshot, wal_buffer_bytes=lib.PG_WAL_BUFFER_MIN)
        redo.frames(snapshot + more)
        found = redo.end(core.now_ns)
        found.check()
        assert tags(found) == tags(core) == {b"k": "order-7", b"long": "order-7", b"row": "order-7"}
        assert authoritative_state(found)["slots"] == authoritative_state(core)["slots"]


def test_a_parked_timer_keeps_its_items(core: Purgatory, owner: Owner) -> None:
    core.set_namespace(b"n", park_beyond_ns=SECOND_NS)
    wal, snapshot = Wal(core), Snapshot(core, quiet=True).finish().data
    ticket = armed(owner, b"k", 5 * SECOND_NS, payload=b"far")
    assert (core.get(b"k").status, core.get(b"k").tag) == (Status.PARKED, "order-7")
    copy = twin(core, core.now_ns)
    assert copy.get(b"k").tag == "order-7"
    owner.send(pd.command(lib.PG_OP_UNPARK, b"k", value=ticket, payload=b"far"))
    assert (core.get(b"k").payload, core.get(b"k").tag) == (b"far", "order-7")
    redo = Redo(snapshot)
    redo.frames(snapshot + wal.take())
    found = redo.end(core.now_ns).get(b"k")
    assert (found.status, found.payload, found.tag) == (Status.FOUND, b"far", "order-7")
    core.check()


def damaged(core: Purgatory, offset: int, byte: int) -> None:
    """Change a byte of the only timer's blob."""
    hot, cold = core.rows(lib.PG_R_HOT, "pg_hot"), core.rows(lib.PG_R_COLD, "pg_cold")
    (slot,) = (n for n in range(core.header.capacity) if hot[n].ctl & 0xFF == lib.PG_S_ARMED)
    core.region(lib.PG_R_BLOBS)[cold[slot].blob * GRANULE + offset] = byte


@pytest.mark.parametrize(("offset", "byte"), [(0, 99), (4, 40), (8, 1), (31, 1)])
def test_damaged_items_are_found(core: Purgatory, owner: Owner, offset: int, byte: int) -> None:
    armed(owner, b"k", SECOND_NS)
    armed(owner, b"newest", SECOND_NS, b"")
    owner.send(pd.cancel(b"newest"))
    damaged(core, offset, byte)
    with pytest.raises(Fault, match="extension items"):
        core.check()
    core.attach()
    with pytest.raises(Fault, match="extension items"):
        core.rebuild(core.now_ns)


def test_a_frame_whose_items_are_damaged_is_refused(core: Purgatory, owner: Owner) -> None:
    wal, snapshot = Wal(core), Snapshot(core, quiet=True).finish().data
    armed(owner, b"k", SECOND_NS)
    before, frame = frames_until(wal.take(), lib.PG_WAL_ARM)
    redo = Redo(snapshot)
    redo.frames(snapshot + before)
    at = ffi.sizeof("struct pg_frame_head") + ffi.sizeof("struct pg_wal_arm")
    with pytest.raises(Fault, match="malformed extension item"):
        redo.frames(frame.data[:at] + b"\x63" + frame.data[at + 1 :])


@pytest.mark.parametrize("tag", ["", "t" * 64, "a\0b", "\ud800", 7])
def test_a_tag_out_of_bounds_is_refused_by_the_client(tag: str) -> None:
    with pytest.raises(InvalidName, match="tag"):
        wire.encode_tag(tag)


@pytest.mark.parametrize("cut", [1, 15, 17])
def test_items_that_were_cut_raise_a_protocol_error(cut: int) -> None:
    assert wire.decode_tag(TAG) == "order-7"
    with pytest.raises(ProtocolError):
        wire.decode_tag(TAG[:cut])
