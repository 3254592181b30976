"""Sweeps: the daemon cancels or moves all timers of a selection in steps, across kills."""

from __future__ import annotations

from typing import Any

import purgatory_driver as pd
import pytest
from purgatory_driver import UID, Owner, Purgatory
from wal_driver import Redo, Snapshot, Wal, frames_of

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.errors import MessageRefused
from purgatoryd.shm_layout.layout import (
    Status,
    SweepAction,
    SweepChange,
    SweepState,
    TimeKind,
    WireError,
)

pytestmark = pytest.mark.tier("check")

SECOND_NS = 10**9
ID = bytes(range(1, 17))
ALL = wire.Select(b"n")
CONFIG: dict[str, Any] = {"capacity": 4000, "payload_bytes": 1 << 20, "now_ns": SECOND_NS}


class Sweeper(Owner):
    """A session that lists and sweeps."""

    def sweep(
        self, action: SweepAction, select: wire.Select | None = None, *, id_: bytes = ID,
        **fields: Any,
    ) -> list[wire.SweepInfo]:  # fmt: skip
        message = wire.encode_sweep(5, self.id, id_, action, select, **fields)
        reply = wire.decode_reply(self._ask(message))
        if reply.error:
            raise reply.refusal()
        return wire.decode_sweeps(reply.body, reply.records)

    def begin(self, select: wire.Select = ALL, **fields: Any) -> wire.SweepInfo:
        (info,) = self.sweep(SweepAction.BEGIN, select, **fields)
        return info

    def status(self, id_: bytes = ID) -> wire.SweepInfo:
        (info,) = self.sweep(SweepAction.STATUS, id_=id_)
        return info

    def listed(self, part: wire.Part, select: wire.Select = ALL) -> wire.Listed:
        reply = wire.decode_reply(self._ask(wire.encode_list(5, self.id, part, select)))
        if reply.error:
            raise reply.refusal()
        return wire.decode_listed(reply.body, reply.records)


@pytest.fixture(params=[False, True], ids=["no WAL", "WAL"])
def core(request: pytest.FixtureRequest) -> Purgatory:
    wal = {"wal_buffer_bytes": lib.PG_WAL_BUFFER_MIN} if request.param else {}
    return Purgatory(**CONFIG, **wal)


@pytest.fixture
def owner(core: Purgatory) -> Sweeper:
    return Sweeper(core)


def armed(owner: Owner, count: int, *, delay_ns: int = 60 * SECOND_NS) -> None:
    keys = [b"%d" % n for n in range(count)]
    for first in range(0, count, 1000):
        some = [
            pd.put(key, delay_ns, payload=key, items=wire.encode_tag("t"))
            for key in keys[first : first + 1000]
        ]
        assert {answer.status for answer in owner.send(*some)} == {Status.ADDED}


def step(core: Purgatory) -> None:
    core.advance(core.now_ns)


def run(core: Purgatory, owner: Sweeper) -> wire.SweepInfo:
    while owner.status().state == SweepState.RUNNING:
        step(core)
    core.check()
    return owner.status()


def deadlines(core: Purgatory) -> dict[Any, int]:
    return {info.key: info.deadline_ns for info in core.scan()}


def row(core: Purgatory) -> Any:
    (found,) = (r for r in core.rows(lib.PG_R_SWEEPS, "pg_sweep")[0 : lib.PG_SWEEPS] if r.state)
    return found


def test_a_sweep_does_a_bounded_part_in_each_iteration(core: Purgatory, owner: Sweeper) -> None:
    armed(owner, 3000)
    assert owner.begin().state == SweepState.RUNNING
    seen = []
    while owner.status().state == SweepState.RUNNING:
        before = owner.status().done
        step(core)
        seen.append(owner.status().done - before)
    assert max(seen) <= 1024 + 32
    assert (sum(seen), core.metrics.live) == (3000, 0)
    assert core.metrics.cancels == 3000
    core.check()


def test_timers_that_come_later_are_not_swept(core: Purgatory, owner: Sweeper) -> None:
    armed(owner, 2000)
    owner.begin()
    step(core)
    owner.send(pd.put(b"later", SECOND_NS), pd.put(b"1999", SECOND_NS, lib.PG_MODE_REPLACE))
    assert run(core, owner).done == 1999
    assert deadlines(core).keys() == {b"later", b"1999"}


@pytest.mark.parametrize("change", SweepChange)
@pytest.mark.parametrize("wall", [False, True], ids=["boot", "wall"])
def test_a_kill_between_the_change_and_its_count_counts_once(
    core: Purgatory, owner: Sweeper, change: SweepChange, wall: bool
) -> None:
    record = bytearray(pd.put(b"k", 60 * SECOND_NS).record)
    record[6] = TimeKind.WALL if wall else TimeKind.BOOT
    owner.send(pd.Command(bytes(record), b"k"))
    time_ns = 0 if change is SweepChange.CANCEL else 90 * SECOND_NS
    owner.begin(change=change, time_ns=time_ns)
    step(core)
    assert run(core, owner).done == 1
    after = deadlines(core)
    row(core).progress = 0
    row(core).state = SweepState.RUNNING
    core.restart()
    assert owner.status().done == 1
    assert run(core, owner).done == 1
    assert deadlines(core) == after


@pytest.mark.parametrize("change", SweepChange)
def test_a_kill_before_the_change_repeats_it(
    core: Purgatory, owner: Sweeper, change: SweepChange
) -> None:
    armed(owner, 1)
    time_ns = 0 if change is SweepChange.CANCEL else 90 * SECOND_NS
    owner.begin(change=change, time_ns=time_ns)
    hot = core.rows(lib.PG_R_HOT, "pg_hot")
    (slot,) = (n for n in range(4000) if hot[n].ctl & 0xFF == lib.PG_S_ARMED)
    row(core).slot, row(core).new_ns = slot, 151 * SECOND_NS
    row(core).ticket = hot[slot].ctl >> 8
    core.restart()
    assert owner.status().done == 0
    assert run(core, owner).done == 1
    wanted = {SweepChange.SHIFT: 151 * SECOND_NS, SweepChange.MOVE: 90 * SECOND_NS}
    assert set(deadlines(core).values()) == ({wanted[change]} if change in wanted else set())


def test_a_sweep_goes_on_after_a_restart(core: Purgatory, owner: Sweeper) -> None:
    armed(owner, 3000)
    owner.begin(change=SweepChange.SHIFT, time_ns=SECOND_NS)
    step(core)
    assert 0 < owner.status().done < 3000
    core.restart()
    assert core.next_ns <= core.now_ns
    assert run(core, owner).done == 3000
    assert set(deadlines(core).values()) == {62 * SECOND_NS}


def test_a_resize_ends_a_sweep_with_its_count(core: Purgatory, owner: Sweeper) -> None:
    armed(owner, 3000)
    owner.begin(change=SweepChange.SHIFT, time_ns=SECOND_NS)
    step(core)
    done = owner.status().done
    other = core.migrated(capacity=5000)
    after = row(other)
    assert (after.state, after.progress & 0xFFFFFFFF) == (SweepState.CUT, done)
    moved = sum(at == 62 * SECOND_NS for at in deadlines(other).values())
    assert moved == done
    other.check()


def test_a_begin_that_is_sent_again_begins_nothing(core: Purgatory, owner: Sweeper) -> None:
    armed(owner, 10)
    owner.begin(change=SweepChange.SHIFT, time_ns=SECOND_NS)
    run(core, owner)
    assert owner.begin(change=SweepChange.SHIFT, time_ns=SECOND_NS).state == SweepState.DONE
    step(core)
    assert set(deadlines(core).values()) == {62 * SECOND_NS}


def test_a_stopped_sweep_changes_no_further_timer(core: Purgatory, owner: Sweeper) -> None:
    armed(owner, 3000)
    owner.begin()
    step(core)
    (stopped,) = owner.sweep(SweepAction.STOP)
    assert stopped.state == SweepState.STOPPED
    step(core)
    assert core.metrics.live == 3000 - stopped.done > 0
    assert owner.sweep(SweepAction.STOP, id_=b"\x05" * 16) == []
    core.check()


def test_the_table_of_sweeps_keeps_the_newest(core: Purgatory, owner: Sweeper) -> None:
    armed(owner, 5)
    ids = [bytes([n + 1]) * 16 for n in range(lib.PG_SWEEPS + 1)]
    for id_ in ids[:-1]:
        owner.begin(id_=id_)
    with pytest.raises(MessageRefused) as caught:
        owner.begin(id_=ids[-1])
    assert caught.value.error == WireError.BUSY
    while any(
        info.state == SweepState.RUNNING for info in owner.sweep(SweepAction.STATUS, id_=bytes(16))
    ):
        step(core)
    owner.begin(id_=ids[-1])
    assert len(owner.sweep(SweepAction.STATUS, id_=bytes(16))) == lib.PG_SWEEPS
    assert owner.sweep(SweepAction.STATUS, id_=ids[0]) == []


@pytest.mark.parametrize("core", [True], indirect=True)
def test_each_change_has_a_record_with_the_uid(owner: Sweeper, core: Purgatory) -> None:
    wal, snapshot = Wal(core), Snapshot(core, quiet=True).finish().data
    armed(owner, 40)
    owner.begin(change=SweepChange.SHIFT, time_ns=SECOND_NS)
    run(core, owner)
    owner.begin(wire.Select(b"n", prefix=b"1"), id_=b"\x02" * 16)
    while owner.status(b"\x02" * 16).state == SweepState.RUNNING:
        step(core)
    frames = wal.take()
    kinds = {lib.PG_WAL_MOVE: "pg_wal_move", lib.PG_WAL_END: "pg_wal_end"}
    records = [(f.type, f.body(kinds[f.type]).uid) for f in frames_of(frames) if f.type in kinds]
    assert records.count((lib.PG_WAL_MOVE, UID)) == 40
    assert records.count((lib.PG_WAL_END, UID)) == 11
    redo = Redo(snapshot)
    redo.frames(snapshot + frames)
    assert deadlines(redo.end(core.now_ns)) == deadlines(core)


@pytest.mark.parametrize("core", [True], indirect=True)
def test_a_sweep_leaves_half_of_the_wal_buffer(owner: Sweeper, core: Purgatory) -> None:
    wal = Wal(core)
    armed(owner, 3000)
    wal.take()
    for n in range(20):
        owner.begin(id_=bytes([n + 1]) * 16, change=SweepChange.SHIFT, time_ns=1)
        for _ in range(5):
            step(core)
        if owner.status(bytes([n + 1]) * 16).state == SweepState.RUNNING:
            break
    state = wal.wal_buffer
    assert state.tail - state.committed <= state.size // 2 + 32 * 512
    assert owner.send(pd.put(b"new", SECOND_NS))[0].status == Status.ADDED
    wal.take()
    for _ in range(10):
        step(core)
    assert owner.status(bytes([n + 1]) * 16).state == SweepState.DONE


@pytest.mark.parametrize("core", [True], indirect=True)
def test_a_parked_timer_is_moved_and_cancelled(core: Purgatory, owner: Sweeper) -> None:
    core.set_namespace(b"n", park_beyond_ns=10 * SECOND_NS)
    (answer,) = owner.send(pd.put(b"far", 60 * SECOND_NS, payload=b"p"))
    assert answer.status == Status.PARKED
    owner.begin(change=SweepChange.SHIFT, time_ns=SECOND_NS)
    run(core, owner)
    assert (core.get(b"far").status, core.get(b"far").deadline_ns) == (
        Status.PARKED,
        62 * SECOND_NS,
    )
    owner.begin(id_=b"\x07" * 16)
    step(core)
    assert (core.metrics.parked, core.get(b"far").status) == (0, Status.UNKNOWN)
    core.check()


def test_operations_are_neither_listed_nor_swept(core: Purgatory, owner: Sweeper) -> None:
    owner.send(pd.watch(b"op", pd.ALL, [pd.Key(b"w", 1)]))
    armed(owner, 1)
    assert owner.listed(wire.Part(most=10)).matched == 1
    owner.begin()
    assert run(core, owner).done == 1
    assert core.get(b"op").status == Status.FOUND


def test_a_part_of_a_list_is_bounded_and_goes_on(core: Purgatory, owner: Sweeper) -> None:
    armed(owner, 3500)
    select, part, keys, rounds = ALL, wire.Part(most=500), [], 0
    while True:
        found = owner.listed(part, select)
        keys += [info.key for info in found.timers]
        assert len(found.timers) <= 500
        rounds += 1
        if found.slot is None:
            break
        part = part._replace(slot=found.slot)
        select = select._replace(tickets=found.tickets)
    assert len(keys) == len(set(keys)) == 3500
    assert rounds >= 7
    between = part._replace(slot=0, after=(61 * SECOND_NS, 1000), before=(61 * SECOND_NS, 1011))
    assert sorted(i.ticket for i in owner.listed(between).timers) == list(range(1001, 1011))


MALFORMED = {
    "a sweep without an id": wire.encode_sweep(1, 1, bytes(16), SweepAction.BEGIN, ALL),
    "an unknown action": wire.encode_sweep(1, 1, ID, 9),
    "an unknown change": wire.encode_sweep(1, 1, ID, SweepAction.BEGIN, ALL, change=9),
    "a shift of nothing": wire.encode_sweep(1, 1, ID, SweepAction.BEGIN, ALL, change=1),
    "a cancel with a time": wire.encode_sweep(1, 1, ID, SweepAction.BEGIN, ALL, time_ns=1),
    "a status with a selection": wire.encode_sweep(1, 1, ID, SweepAction.STATUS, ALL),
    "a begin without a selection": wire.encode_sweep(1, 1, ID, SweepAction.BEGIN),
    "a selection without a namespace": wire.encode_list(1, 1, wire.Part(), wire.Select(b"")),
    "a namespace that is no UTF-8": wire.encode_list(1, 1, wire.Part(), wire.Select(b"\xff")),
    "a cut list": wire.encode_list(1, 1, wire.Part(), ALL)[:-1],
    "a list with more": wire.encode_list(1, 1, wire.Part(), ALL) + b"x",
}


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED)
def test_malformed_messages_are_refused(owner: Sweeper, message: bytes) -> None:
    armed(owner, 1)
    addressed = message[:8] + owner.id.to_bytes(8, "little") + message[16:]
    reply = wire.decode_reply(owner._ask(addressed))
    assert reply.error == WireError.MALFORMED
    assert owner.core.metrics.live == 1


@pytest.mark.parametrize("field", ["state", "change", "time_kind"])
def test_a_damaged_row_is_found(core: Purgatory, owner: Sweeper, field: str) -> None:
    armed(owner, 1)
    owner.begin()
    setattr(row(core), field, 200)
    for act in (core.check, lambda: core.rebuild(core.now_ns)):
        with pytest.raises(Exception, match="sweep"):
            act()


def test_the_size_of_a_row_is_declared() -> None:
    assert ffi.sizeof("struct pg_sweep") == 640
