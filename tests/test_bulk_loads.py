"""Bulk loads in the core: each row is applied once, whatever happened to its timer since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import purgatory_driver as pd
import pytest
from effort import effort
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from purgatory_driver import Command, Owner, Purgatory
from wal_driver import Redo, Snapshot, Wal, frames_of

from purgatoryd.clients.bulk_loads import BulkLoad, StatusParts, check_bulk_load
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.errors import InvalidArgument, MessageRefused
from purgatoryd.shm_layout.layout import (
    BULK_LOAD_ROW_MAX,
    BulkLoadAction,
    BulkLoadState,
    Message,
    PutMode,
    Status,
    WireError,
)

pytestmark = pytest.mark.tier("check")

MS = 10**6
SECOND_NS = 10**9
BLOCK: int = lib.PG_BULK_LOAD_BLOCK_ROWS
ALICE, BOB = 1001, 1002
BULK_LOAD = b"a bulk load, 16b"
OTHER = b"another of 16 b."
CONFIG: dict[str, Any] = {
    "bulk_loads": 3,
    "bulk_load_blocks": 4,
    "wal_buffer_bytes": lib.PG_WAL_BUFFER_MIN,
}


def puts(count: int, mode: int = PutMode.ERROR, delay_ns: int = SECOND_NS) -> list[Command]:
    return [pd.put(b"key %d" % n, delay_ns, mode) for n in range(count)]


def made(
    owner: Owner, first: int, *commands: Command, bulk_load: bytes = BULK_LOAD,
    fencing_token: int = 0,
) -> list[Status]:  # fmt: skip
    return [Status(a.status) for a in owner.bulk_load((bulk_load, first, fencing_token), *commands)]


@pytest.fixture
def core() -> Purgatory:
    return Purgatory(**CONFIG)


def fire(core: Purgatory) -> None:
    while core.advance(core.now_ns + 10 * SECOND_NS):
        core.publish_all()
    core.publish_all()


# ---- done rows after a restart ---------------------------------------------------------------


def carried(core: Purgatory, by: str, snapshot: bytes, wal: Wal) -> Purgatory:
    """Return the core after the kind of restart that `by` names. `snapshot` has the state before
    the WAL's first record."""
    if by == "after a kill":
        core.restart()
    if by == "in another arena":
        return core.migrated(bulk_loads=5, bulk_load_blocks=1, capacity=70)
    if by == "from the WAL":
        redo = Redo(snapshot, sessions=3)
        redo.frames(snapshot)
        redo.frames(wal.data)
        return redo.end(core.now_ns)
    return core


WAYS = ["again", "after a kill", "in another arena", "from the WAL"]


@pytest.mark.parametrize("past", ["armed", "fired", "cancelled"])
@pytest.mark.parametrize("by", WAYS)
def test_a_row_that_was_done_adds_nothing(core: Purgatory, past: str, by: str) -> None:
    wal, snapshot = Wal(core), Snapshot(core).finish().data
    owner = Owner(core, 1, ALICE)
    assert made(owner, 7, *puts(3)) == [Status.ADDED] * 3
    if past == "fired":
        fire(core)
    if past == "cancelled":
        owner.send(*(pd.cancel(b"key %d" % n) for n in range(3)))
    wal.take()
    core = carried(core, by, snapshot, wal)
    tail = core.header.replay_tail
    answers = Owner(core, 2, ALICE).bulk_load((BULK_LOAD, 7, 0), *puts(3))
    assert {a.status for a in answers} == {Status.BULK_LOADED}
    assert [a.ticket != 0 for a in answers] == [past == "armed"] * 3
    fire(core)
    assert core.header.replay_tail - tail == (3 if past == "armed" else 0)
    assert core.bulk_loads()[BULK_LOAD].rows == {7, 8, 9}
    core.check()


def final_states_bulk_loaded(data: bytes) -> list[int]:
    """Return the field `bulk_loaded` of each record of a final state, in order."""
    found = []
    for frame in frames_of(data):
        asked = lib.pg_frame_asked(ffi.from_buffer("struct pg_frame_head *", frame.data))
        if frame.type == lib.PG_WAL_FIRE:
            found.append(frame.body("pg_wal_fire").bulk_loaded)
        elif asked != ffi.NULL:
            found.append(asked.bulk_loaded)
    return found


@pytest.mark.parametrize("by", WAYS)
def test_the_final_state_of_a_row_names_its_bulk_load(core: Purgatory, by: str) -> None:
    wal, snapshot = Wal(core), Snapshot(core).finish().data
    owner = Owner(core, 1, ALICE)
    made(owner, 0, *puts(3))
    owner.send(*(pd.put(b"other %d" % n, SECOND_NS) for n in range(2)))
    wal.take()
    core = carried(core, by, snapshot, wal)
    after = Wal(core)
    after.position = int(after.wal_buffer.tail)
    owner = Owner(core, 2, ALICE)
    owner.send(pd.cancel(b"key 0"), pd.cancel(b"other 0"))
    owner.send(pd.put(b"key 1", 9 * SECOND_NS, PutMode.REPLACE))
    made(owner, 3, pd.put(b"other 1", 10 * SECOND_NS, PutMode.REPLACE))
    for _ in range(20):
        core.advance(core.now_ns + SECOND_NS)
    after.take()
    assert final_states_bulk_loaded(after.data) == [1, 0, 1, 0, 1, 0, 1]


def test_a_row_that_changes_no_timer_is_done(core: Purgatory) -> None:
    owner = Owner(core, 1, ALICE)
    owner.send(pd.put(b"key 0", SECOND_NS))
    later = pd.put(b"key 0", 5 * SECOND_NS, PutMode.EXTEND)
    assert made(owner, 0, *puts(1, PutMode.KEEP), later) == [Status.KEPT, Status.EXTENDED]
    assert made(owner, 0, *puts(1, PutMode.KEEP), later) == [Status.BULK_LOADED] * 2


def test_a_row_that_was_refused_may_come_again(core: Purgatory) -> None:
    owner = Owner(core, 1, ALICE)
    owner.send(pd.put(b"key 0", SECOND_NS))
    assert made(owner, 0, *puts(1)) == [Status.EXISTS]
    assert core.metrics.bulk_load_blocks == 0
    owner.send(pd.cancel(b"key 0"))
    assert made(owner, 0, *puts(1)) == [Status.ADDED]


def test_a_bulk_load_belongs_to_its_uid_and_namespace(core: Purgatory) -> None:
    alice, bob = Owner(core, 1, ALICE), Owner(core, 2, BOB)
    assert made(alice, 0, *puts(1)) == [Status.ADDED]
    assert made(bob, 1, pd.put(b"x", SECOND_NS), pd.cancel(b"key 0")) == [Status.DENIED] * 2
    assert made(alice, 1, pd.put(b"x", SECOND_NS, name=1)) == [Status.DENIED]
    for action in (BulkLoadAction.OPEN, BulkLoadAction.CLOSE):
        with pytest.raises(MessageRefused, match=r"uid \d+ may not do that"):
            bob.ask_bulk_load(BULK_LOAD, action, namespace=b"n")
        with pytest.raises(MessageRefused, match=r"uid \d+ may not do that"):
            alice.ask_bulk_load(BULK_LOAD, action, namespace=b"other")
    for action in (BulkLoadAction.STATUS, BulkLoadAction.FORGET):
        with pytest.raises(MessageRefused, match=r"uid \d+ may not do that"):
            bob.ask_bulk_load(BULK_LOAD, action)
    assert core.bulk_loads()[BULK_LOAD].rows == {0}


# ---- bounds ------------------------------------------------------------------------------------


def test_bulk_loads_and_rows_have_bounds_and_a_refused_row_takes_none(core: Purgatory) -> None:
    owner = Owner(core, 1, ALICE)
    for n in range(4):
        expected = Status.ADDED if n < 3 else Status.FULL_BULK_LOADS
        assert made(owner, 0, pd.put(b"%d" % n, SECOND_NS), bulk_load=bytes([n + 1]) * 16) == [
            expected
        ]
    assert made(owner, BLOCK - 1, *puts(2), bulk_load=b"\1" * 16) == [Status.ADDED] * 2
    assert made(owner, 2 * BLOCK, pd.put(b"y", SECOND_NS), bulk_load=b"\1" * 16) == [
        Status.FULL_BULK_LOADS
    ]
    assert core.get("y").status == Status.UNKNOWN
    assert (core.metrics.bulk_loads, core.metrics.bulk_load_blocks) == (3, 4)
    assert core.metrics.refused_bulk_loads == 2
    with pytest.raises(MessageRefused, match="BULK_LOADS_FULL"):
        owner.ask_bulk_load(OTHER, BulkLoadAction.OPEN, namespace=b"n")
    owner.ask_bulk_load(b"\2" * 16, BulkLoadAction.FORGET)
    assert made(owner, 2 * BLOCK, pd.put(b"y", SECOND_NS), bulk_load=b"\1" * 16) == [Status.ADDED]
    core.check()


def test_an_arena_without_space_for_bulk_loads_refuses_them() -> None:
    core = Purgatory()
    owner = Owner(core)
    assert made(owner, 0, *puts(2)) == [Status.FULL_BULK_LOADS] * 2
    assert owner.ask_bulk_load(BULK_LOAD, BulkLoadAction.STATUS).state == BulkLoadState.NONE
    assert len(core.scan()) == 0
    core.restart()


def test_a_smaller_arena_is_refused_while_bulk_loads_need_the_space(core: Purgatory) -> None:
    owner = Owner(core)
    made(owner, BLOCK - 1, *puts(2))
    with pytest.raises(Exception, match="rows of bulk loads in use"):
        core.migrated(bulk_load_blocks=1)
    with pytest.raises(Exception, match="bulk loads in use"):
        core.migrated(bulk_loads=0)


def test_a_bulk_load_is_forgotten_after_its_time(core: Purgatory) -> None:
    owner = Owner(core)
    made(owner, 0, *puts(1))
    core.advance(5 * SECOND_NS)
    made(owner, 0, pd.put(b"x", SECOND_NS), bulk_load=OTHER)
    lib.pg_bulk_loads_sweep(core.a, 5 * SECOND_NS, 5 * SECOND_NS)
    assert set(core.bulk_loads()) == {BULK_LOAD, OTHER}
    lib.pg_bulk_loads_sweep(core.a, 5 * SECOND_NS + 1, 5 * SECOND_NS)
    assert set(core.bulk_loads()) == {OTHER}
    core.check()


def test_a_forgotten_bulk_load_begins_anew(core: Purgatory) -> None:
    owner = Owner(core)
    made(owner, 0, *puts(1), fencing_token=9)
    assert owner.ask_bulk_load(BULK_LOAD, BulkLoadAction.FORGET).state == BulkLoadState.NONE
    assert owner.ask_bulk_load(BULK_LOAD, BulkLoadAction.FORGET).state == BulkLoadState.NONE
    assert (core.metrics.bulk_loads, core.metrics.bulk_load_blocks) == (0, 0)
    assert made(owner, 0, *puts(2)) == [Status.EXISTS, Status.ADDED]
    assert core.bulk_loads()[BULK_LOAD].fencing_token == 0


# ---- runs with fencing tokens, and the end of a bulk load ------------------------------------


def test_a_newer_run_shuts_out_an_older_one(core: Purgatory) -> None:
    old, new = Owner(core, 1, ALICE), Owner(core, 2, ALICE)
    assert made(old, 0, *puts(1), fencing_token=4) == [Status.ADDED]
    assert (
        new.ask_bulk_load(
            BULK_LOAD, BulkLoadAction.OPEN, namespace=b"n", fencing_token=5
        ).fencing_token
        == 5
    )
    assert made(old, 0, *puts(2), fencing_token=4) == [Status.FENCED] * 2
    core.restart()
    assert made(old, 0, *puts(2), fencing_token=4) == [Status.FENCED] * 2
    assert made(new, 0, *puts(2), fencing_token=5) == [Status.BULK_LOADED, Status.ADDED]
    assert made(new, 2, pd.put(b"x", SECOND_NS), fencing_token=6) == [Status.ADDED]
    with pytest.raises(MessageRefused, match="FENCED") as refused:
        new.ask_bulk_load(BULK_LOAD, BulkLoadAction.CLOSE, namespace=b"n", fencing_token=5)
    assert refused.value.detail == (6, 5)


def test_a_closed_bulk_load_takes_no_more_rows(core: Purgatory) -> None:
    owner = Owner(core)
    made(owner, 0, *puts(1), fencing_token=2)
    closed = owner.ask_bulk_load(BULK_LOAD, BulkLoadAction.CLOSE, namespace=b"n", fencing_token=3)
    assert (closed.state, closed.fencing_token, closed.rows) == (BulkLoadState.CLOSED, 3, 1)
    assert made(owner, 0, *puts(2), fencing_token=3) == [Status.BULK_LOADED, Status.CLOSED]
    assert made(owner, 1, pd.put(b"x", SECOND_NS), fencing_token=2) == [Status.FENCED]
    assert (
        owner.ask_bulk_load(BULK_LOAD, BulkLoadAction.OPEN, namespace=b"n", fencing_token=4).state
        == BulkLoadState.CLOSED
    )
    owner.ask_bulk_load(OTHER, BulkLoadAction.CLOSE, namespace=b"n")
    assert made(owner, 0, pd.put(b"x", SECOND_NS), bulk_load=OTHER) == [Status.CLOSED]


def test_a_cancel_of_a_row_holds_for_a_row_that_comes_later(core: Purgatory) -> None:
    loader, owner = Owner(core, 1, ALICE), Owner(core, 2, ALICE)
    loader.ask_bulk_load(BULK_LOAD, BulkLoadAction.OPEN, namespace=b"n", fencing_token=3)
    assert made(owner, 1, pd.cancel(b"key 1")) == [Status.UNKNOWN]
    assert made(loader, 0, *puts(3), fencing_token=3) == [
        Status.ADDED,
        Status.BULK_LOADED,
        Status.ADDED,
    ]
    assert made(owner, 2, pd.cancel(b"key 2")) == [Status.CANCELLED]
    assert made(loader, 0, *puts(3), fencing_token=4) == [Status.BULK_LOADED] * 3
    loader.ask_bulk_load(BULK_LOAD, BulkLoadAction.CLOSE, namespace=b"n", fencing_token=4)
    assert made(owner, 0, pd.cancel(b"key 0")) == [Status.CANCELLED]
    fire(core)
    assert core.header.replay_tail == 0


def test_a_cancel_of_a_bulk_load_that_has_not_begun_leaves_nothing(core: Purgatory) -> None:
    owner = Owner(core)
    owner.send(pd.put(b"key 0", SECOND_NS))
    assert made(owner, 0, pd.cancel(b"key 0"), pd.cancel(b"x")) == [
        Status.CANCELLED, Status.UNKNOWN,
    ]  # fmt: skip
    assert core.bulk_loads() == {}


# ---- status --------------------------------------------------------------------------------------


def test_status_names_every_row_in_as_many_answers_as_it_takes() -> None:
    core = Purgatory(bulk_loads=2, bulk_load_blocks=200, capacity=300)
    owner = Owner(core)
    rows = {0, 1, 2, 9, BLOCK - 1, BLOCK, *(n * 1000 * BLOCK + n for n in range(1, 151))}
    for n, row in enumerate(sorted(rows, reverse=True)):
        assert made(owner, row, pd.put(b"%d" % n, SECOND_NS)) == [Status.ADDED]
    made(owner, 77, pd.put(b"of another", SECOND_NS), bulk_load=OTHER)
    parts, answers = StatusParts(), 0
    while parts.start is not None:
        info = owner.ask_bulk_load(BULK_LOAD, BulkLoadAction.STATUS, start=parts.start)
        assert list(info.parts) == sorted(info.parts)
        parts.take(info)
        answers += 1
    status = parts.status
    assert answers == 3
    assert (info.upto, info.rows, status.rows) == (max(rows) + 1, len(rows), len(rows))
    assert {row for part in status.done for row in part} == rows
    assert status.done[:3] == (range(3), range(9, 10), range(BLOCK - 1, BLOCK + 1))
    assert status.missing(1, 12) == [range(3, 9), range(10, 12)]
    assert status.missing(0, 3) == []
    assert status.missing(2000 * BLOCK + 2, 2000 * BLOCK + 4) == [
        range(2000 * BLOCK + 3, 2000 * BLOCK + 4)
    ]


# ---- requests that are refused as a whole --------------------------------------------------------


def test_impossible_rows_are_malformed(core: Purgatory) -> None:
    owner = Owner(core)
    plain = [pd.put(b"k", SECOND_NS)]
    wrong = {
        "no id": (wire.ROWS.pack(bytes(16), 0, 0), plain),
        "past the last row": (wire.ROWS.pack(BULK_LOAD, BULK_LOAD_ROW_MAX, 0), plain),
        "far past it": (wire.ROWS.pack(BULK_LOAD, 2**64 - 1, 0), plain),
        "a watch": (
            wire.ROWS.pack(BULK_LOAD, 0, 0), [pd.watch(b"k", pd.ALL, [pd.Key(b"w", 1)])],
        ),
        "an advance": (wire.ROWS.pack(BULK_LOAD, 0, 0), [pd.advance(b"w", 1)]),
    }  # fmt: skip
    before = core.image()
    for rows, commands in wrong.values():
        reply = wire.decode_reply(core.send(owner.message(commands, rows)))
        owner.sequence -= 1
        assert reply.error == WireError.MALFORMED
    head = wire.encode_frame(Message.BATCH, owner.id, 1, count=1, names=1, flags=lib.PG_W_BULK_LOAD)
    for tail in (b"", BULK_LOAD, wire.ROWS.pack(BULK_LOAD, 0, 0)):
        assert wire.decode_reply(core.send(head + tail)).error == WireError.MALFORMED
    assert core.image() == before
    last = pd.put(b"last", SECOND_NS)
    assert made(owner, BULK_LOAD_ROW_MAX - 1, last) == [Status.ADDED]
    assert core.bulk_loads()[BULK_LOAD].rows == {BULK_LOAD_ROW_MAX - 1}


def test_impossible_bulk_load_requests_are_malformed(core: Purgatory) -> None:
    owner = Owner(core)
    good = wire.BULK_LOAD_ASK.pack(BULK_LOAD, 0, 0, BulkLoadAction.STATUS, 0)
    wrong = [
        b"", good[:-1], good + b"n",
        wire.BULK_LOAD_ASK.pack(bytes(16), 0, 0, BulkLoadAction.STATUS, 0),
        wire.BULK_LOAD_ASK.pack(BULK_LOAD, 0, 0, lib.PG_BULK_LOAD_ACTIONS, 0),
        wire.BULK_LOAD_ASK.pack(BULK_LOAD, 1, 0, BulkLoadAction.STATUS, 0),
        wire.BULK_LOAD_ASK.pack(BULK_LOAD, 0, 1, BulkLoadAction.FORGET, 0),
        wire.BULK_LOAD_ASK.pack(BULK_LOAD, 0, 0, BulkLoadAction.STATUS, 1) + b"n",
        wire.BULK_LOAD_ASK.pack(BULK_LOAD, 0, 0, BulkLoadAction.OPEN, 0),
        wire.BULK_LOAD_ASK.pack(BULK_LOAD, 0, 0, BulkLoadAction.OPEN, 64) + b"n" * 64,
        wire.BULK_LOAD_ASK.pack(BULK_LOAD, 0, 0, BulkLoadAction.CLOSE, 1) + b"\xff",
    ]  # fmt: skip
    for body in wrong:
        reply = wire.decode_reply(
            core.send(wire.encode_frame(Message.BULK_LOAD, owner.id, 9) + body)
        )  # fmt: skip
        assert (reply.error, reply.sequence) == (WireError.MALFORMED, 9)
    assert core.bulk_loads() == {}


def test_an_administrator_sees_and_forgets_any_bulk_load(core: Purgatory) -> None:
    made(Owner(core, 1, ALICE), 3, *puts(2))
    out, used, detail = bytearray(1 << 23), ffi.new("uint64_t *"), ffi.new("uint64_t[2]")

    def ask(action: int, name: bytes = b"") -> tuple[WireError, bytes]:
        body = wire.BULK_LOAD_ASK.pack(BULK_LOAD, 0, 0, action, len(name)) + name
        error = lib.pg_bulk_load_admin(core.a, body, len(body), ffi.from_buffer(out), used, detail)
        return WireError(error), bytes(out[: used[0]])

    error, body = ask(BulkLoadAction.STATUS)
    info = wire.decode_bulk_load(body)
    assert (error, info.uid, info.rows) == (WireError.NONE, ALICE, 2)
    assert ask(BulkLoadAction.CLOSE, b"n") == (WireError.MALFORMED, b"")
    error, body = ask(BulkLoadAction.FORGET)
    assert (error, wire.decode_bulk_load(body).state) == (WireError.NONE, BulkLoadState.NONE)
    assert core.bulk_loads() == {}


@pytest.mark.parametrize(
    ("bulk_load", "first", "fencing_token"),
    [(b"short", 0, 0), (bytes(16), 0, 0), ("text of 16 chars", 0, 0), (BULK_LOAD, -1, 0),
     (BULK_LOAD, BULK_LOAD_ROW_MAX, 0), (BULK_LOAD, 0, -1), (BULK_LOAD, 0, 2**64)],
)  # fmt: skip
def test_values_that_name_no_row_are_refused(
    bulk_load: Any, first: int, fencing_token: int
) -> None:
    with pytest.raises(InvalidArgument):
        check_bulk_load(bulk_load, first, fencing_token)
    with pytest.raises(InvalidArgument):
        BulkLoad(bulk_load, first, fencing_token)
    with pytest.raises(InvalidArgument):
        BulkLoad(BULK_LOAD, BULK_LOAD_ROW_MAX - 1).check_rows(2)


# ---- against a model -----------------------------------------------------------------------------


@dataclass
class Known:
    uid: int
    fencing_token: int
    closed: bool = False
    rows: set[int] = field(default_factory=set)

    @property
    def blocks(self) -> set[int]:
        return {row // BLOCK for row in self.rows}


IDS = [bytes([n]) * 16 for n in range(1, 5)]
UIDS = (ALICE, BOB)
KEYS = [b"%d" % n for n in range(8)]


class Loading(RuleBasedStateMachine):
    """Bulk loads are claimed and ended, timers are cancelled, the core is killed, and WALs are
    redone.

    The model predicts every answer.
    """

    @initialize()
    def begin(self) -> None:
        self.adopt(Purgatory(**CONFIG, now_ns=SECOND_NS))
        self.owners = {uid: Owner(self.core, uid, uid) for uid in UIDS}
        self.bulk_loads: dict[bytes, Known] = {}
        self.timers: dict[bytes, int] = {}  # deadline by key

    def adopt(self, core: Purgatory) -> None:
        self.core = core
        self.wal, self.snapshot = Wal(core), Snapshot(core, quiet=True).finish().data

    # ---- predictions ----

    @property
    def blocks_left(self) -> int:
        return int(CONFIG["bulk_load_blocks"]) - sum(
            len(k.blocks) for k in self.bulk_loads.values()
        )

    def claim(self, bulk_load: bytes, uid: int, fencing_token: int, *, arms: bool) -> Status:
        """Return the status that refuses the whole batch, or NONE."""
        known = self.bulk_loads.get(bulk_load)
        if known is None and arms and len(self.bulk_loads) == CONFIG["bulk_loads"]:
            return Status.FULL_BULK_LOADS
        if known is None:
            if arms:
                self.bulk_loads[bulk_load] = Known(uid, fencing_token)
            return Status.NONE
        if known.uid != uid:
            return Status.DENIED
        if not arms:
            return Status.NONE
        if fencing_token < known.fencing_token:
            return Status.FENCED
        known.fencing_token = fencing_token
        return Status.NONE

    def admit(self, known: Known, row: int) -> Status:
        if row in known.rows:
            return Status.BULK_LOADED
        if known.closed:
            return Status.CLOSED
        full = row // BLOCK not in known.blocks and self.blocks_left == 0
        return Status.FULL_BULK_LOADS if full else Status.NONE

    def put_row(self, known: Known, row: int, key: bytes, mode: int, deadline_ns: int) -> Status:
        refusal = self.admit(known, row)
        if refusal:
            return refusal
        armed = self.timers.get(key)
        if armed is None or mode == PutMode.REPLACE:
            self.timers[key] = deadline_ns
            status = Status.ADDED if armed is None else Status.REPLACED
        elif mode == PutMode.ERROR:
            return Status.EXISTS
        elif mode == PutMode.EXTEND and deadline_ns > armed:
            self.timers[key] = deadline_ns
            status = Status.EXTENDED
        else:
            status = Status.KEPT
        known.rows.add(row)
        return status

    def cancel_row(self, known: Known | None, row: int, key: bytes) -> Status:
        refusal = self.admit(known, row) if known else Status.NONE
        if refusal == Status.FULL_BULK_LOADS:
            return refusal
        if known and not refusal:
            known.rows.add(row)
        return Status.CANCELLED if self.timers.pop(key, None) else Status.UNKNOWN

    # ---- actions ----

    uids = st.sampled_from(UIDS)
    ids = st.sampled_from(IDS)
    firsts = st.sampled_from([0, 2, BLOCK - 2, 3 * BLOCK, 9 * BLOCK])
    fencing_tokens = st.integers(0, 2)
    records = st.lists(
        st.tuples(
            st.sampled_from(KEYS), st.sampled_from([None, *PutMode]), st.integers(1, 90),
        ),
        min_size=1, max_size=5,
    )  # fmt: skip

    @rule(uid=uids, bulk_load=ids, first=firsts, fencing_token=fencing_tokens, records=records)
    def rows(
        self, uid: int, bulk_load: bytes, first: int, fencing_token: int, records: Any
    ) -> None:
        now_ns = self.core.now_ns
        commands = [
            pd.cancel(key) if mode is None else pd.put(key, ms * MS, mode)
            for key, mode, ms in records
        ]
        answers = self.owners[uid].bulk_load((bulk_load, first, fencing_token), *commands)
        refusal = self.claim(
            bulk_load, uid, fencing_token, arms=any(m is not None for _, m, _ in records)
        )
        known = self.bulk_loads.get(bulk_load)
        expected = []
        for row, (key, mode, ms) in enumerate(records, first):
            if mode is None and refusal in (Status.NONE, Status.FENCED):
                expected.append(self.cancel_row(known, row, key))
            elif refusal or known is None:
                expected.append(refusal)
            else:
                expected.append(self.put_row(known, row, key, mode, now_ns + ms * MS))
        found = [Status(a.status) for a in answers]
        fired = {Status.FIRED: Status.UNKNOWN}  # FIRED: the replay buffer still has the key
        assert [fired.get(status, status) for status in found] == expected
        again = [Status(a.status) for a in self.owners[uid].again().answers]
        assert again == found

    @rule(uid=uids, bulk_load=ids, fencing_token=fencing_tokens, close=st.booleans())
    def claims(self, uid: int, bulk_load: bytes, fencing_token: int, close: bool) -> None:
        action = BulkLoadAction.CLOSE if close else BulkLoadAction.OPEN
        expected = self.claim(bulk_load, uid, fencing_token, arms=True)
        try:
            self.owners[uid].ask_bulk_load(
                bulk_load, action, namespace=b"n", fencing_token=fencing_token
            )
            found = Status.NONE
        except MessageRefused as error:
            found = {
                WireError.DENIED: Status.DENIED,
                WireError.FENCED: Status.FENCED,
                WireError.BULK_LOADS_FULL: Status.FULL_BULK_LOADS,
            }[WireError(error.error)]
        assert found == expected
        if close and not found:
            self.bulk_loads[bulk_load].closed = True

    @rule(uid=uids, bulk_load=ids)
    def forgets(self, uid: int, bulk_load: bytes) -> None:
        if bulk_load in self.bulk_loads and self.bulk_loads[bulk_load].uid != uid:
            return
        self.owners[uid].ask_bulk_load(bulk_load, BulkLoadAction.FORGET)
        self.bulk_loads.pop(bulk_load, None)

    @rule(ms=st.integers(1, 60))
    def pass_time(self, ms: int) -> None:
        while self.core.advance(self.core.now_ns + ms * MS):
            self.core.publish_all()
        self.core.publish_all()
        self.timers = {k: d for k, d in self.timers.items() if d > self.core.now_ns}

    @rule()
    def kill(self) -> None:
        self.core.restart()

    @rule(more=st.integers(0, 2))
    def resize(self, more: int) -> None:
        self.adopt(self.core.migrated(capacity=64 + more))
        for owner in self.owners.values():
            owner.core = self.core

    @rule()
    def reboot(self) -> None:
        self.wal.take()
        redo = Redo(self.snapshot, sessions=3)
        redo.frames(self.snapshot)
        redo.frames(self.wal.data)
        self.adopt(redo.end(self.core.now_ns))
        self.owners = {uid: Owner(self.core, uid, uid) for uid in UIDS}

    # ---- invariants ----

    @invariant()
    def the_arena_remembers_what_the_model_does(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        found = {
            bulk_load: (t.uid, t.fencing_token, t.state == BulkLoadState.CLOSED, set(t.rows))
            for bulk_load, t in self.core.bulk_loads().items()
        }
        assert found == {
            bulk_load: (k.uid, k.fencing_token, k.closed, k.rows)
            for bulk_load, k in self.bulk_loads.items()
        }
        armed = {bytes(wire.encode_key(info.key)[1]): info.deadline_ns for info in self.core.scan()}
        assert armed == self.timers
        self.wal.take()


TestLoading = Loading.TestCase
TestLoading.settings = effort(60, 3000)
