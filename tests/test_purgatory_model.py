"""The purgatory compared with a naive model that evaluates every condition at every step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import purgatory_driver as pd
import pytest
from core_driver import DERIVED, Fault
from effort import effort
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from purgatory_driver import (
    ALL,
    ANY,
    CLIENT,
    QUORUM,
    SUM,
    Answer,
    Key,
    Mail,
    Owner,
    Purgatory,
    Verdict,
)
from tiers import wide

from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import Cause

pytestmark = pytest.mark.tier("check")

NIL = 0xFFFFFFFF
WATERMARK_MAX = 2**63 - 1
MS = 1_000_000


# ---- the model -----------------------------------------------------------------------------


@dataclass
class Watermark:
    watermark: int = 0
    error: int = 0
    touched_s: int | None = 0  # None = forgotten, to be removed when its last watcher ends


@dataclass
class Operation:
    key: bytes
    ticket: int
    session: int
    condition: int
    keys: list[Key]
    threshold: int
    armed_ns: int
    deadline_ns: int
    payload: bytes
    notice: bool
    version: int = 0
    check: str = ""  # "asked": a CHECK was sent; "moved": a key has moved since then
    cause: int = 0
    error: int = 0
    ended_ns: int = 0
    watermarks: tuple[int, ...] = ()
    missing: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()


@dataclass
class Model:
    config: dict[str, Any]
    now_ns: int = 0
    next_ticket: int = 1
    watermarks: dict[bytes, Watermark] = field(default_factory=dict)
    armed: dict[bytes, Operation] = field(default_factory=dict)
    inbox: dict[int, dict[int, Operation]] = field(default_factory=dict)  # by session and ticket
    unsent: set[int] = field(default_factory=set)  # tickets of messages to send
    # operations with a notice that have ended since the last comparison
    verdicts: list[Operation] = field(default_factory=list)

    # ---- conditions ----

    def gain(self, k: Key) -> int:
        return min(k.cap, max(0, self.watermarks[k.name].watermark - k.target))

    def reached(self, k: Key) -> bool:
        return self.watermarks[k.name].watermark >= k.target

    def holds(self, op: Operation) -> bool:
        if op.condition == SUM:
            return sum(map(self.gain, op.keys)) >= op.threshold
        if op.condition == CLIENT:
            return False
        return sum(map(self.reached, op.keys)) >= needed(op)

    def error(self, op: Operation) -> int:
        """Return the error of the first failed key if the condition can no longer hold, else 0."""
        failed = [
            self.watermarks[k.name].error
            for k in op.keys
            if self.watermarks[k.name].error
            and (op.condition in (SUM, CLIENT) or not self.reached(k))
        ]
        spare = 0 if op.condition in (SUM, CLIENT) else len(op.keys) - needed(op)
        return failed[0] if len(failed) > spare else 0

    def missing(self, op: Operation) -> frozenset[int]:
        if op.condition == CLIENT:
            return frozenset()
        met = self.gain if op.condition == SUM else self.reached
        return frozenset(n for n, k in enumerate(op.keys) if not met(k))

    def failed(self, op: Operation) -> frozenset[int]:
        return frozenset(n for n, k in enumerate(op.keys) if self.watermarks[k.name].error)

    def watchers(self, name: bytes) -> list[Operation]:
        return [op for op in self.armed.values() if any(k.name == name for k in op.keys)]

    # ---- watermarks ----

    @property
    def now_s(self) -> int:
        return self.now_ns // 10**9

    def watermark(self, name: bytes) -> Watermark | None:
        """Return the watermark of a key. Create it if necessary; None if the table is full."""
        if name not in self.watermarks:
            if len(self.watermarks) == self.config["watermarks"]:
                return None
            self.watermarks[name] = Watermark(touched_s=self.now_s)
        return self.watermarks[name]

    def left(self, name: bytes) -> None:
        watermark = self.watermarks[name]
        if self.watchers(name):
            return
        if watermark.touched_s is None:
            del self.watermarks[name]
        else:
            watermark.touched_s = self.now_s

    def sweep(self) -> None:
        ttl_s = self.config["watermark_ttl_ns"] // 10**9
        for name, watermark in list(self.watermarks.items()):
            idle = watermark.touched_s is not None and self.now_s - watermark.touched_s > ttl_s
            if idle and not watermark.error and not self.watchers(name):
                del self.watermarks[name]

    # ---- ends ----

    def news(self, op: Operation) -> None:
        if op.session in self.inbox:
            self.inbox[op.session][op.ticket] = op
            self.unsent.add(op.ticket)

    def end(self, op: Operation, cause: int, error: int = 0) -> int:
        op.missing, op.failed = self.missing(op), self.failed(op)
        op.watermarks = tuple(self.watermarks[k.name].watermark for k in op.keys)
        op.cause, op.error = cause, error
        op.ended_ns = self.now_ns
        del self.armed[op.key]
        for k in op.keys:
            if k.own:
                self.watermarks[k.name].touched_s = None
            self.left(k.name)
        if op.notice:
            self.verdicts.append(op)
        self.news(op)
        return 1

    def ask(self, op: Operation) -> None:
        if op.check:
            op.check = "moved"
            return
        op.check = "asked"
        op.version += 1
        self.news(op)

    def settle(self, op: Operation) -> None:
        if self.holds(op):
            self.end(op, Cause.SATISFIED)
        elif error := self.error(op):
            self.end(op, Cause.FAILED, error)
        elif op.condition == CLIENT:
            self.ask(op)

    def expire(self) -> None:
        for op in list(self.armed.values()):
            if op.deadline_ns <= self.now_ns:
                self.end(op, Cause.EXPIRED)

    # ---- commands ----

    def refusal(self, op: Operation) -> int:
        """Return the status with which an operation is refused. Change no watermark."""
        slots = len(self.armed) + len(
            [o for box in self.inbox.values() for o in box.values() if o.cause]
        )
        records = sum(len(o.keys) for o in self.armed.values())
        if op.key in self.armed:
            return int(lib.PG_ST_EXISTS)
        armed = sum(o.session == op.session for o in self.armed.values())
        ended = sum(o.cause != 0 for o in self.inbox[op.session].values())
        if armed + ended >= self.config["inbox_max"]:
            return int(lib.PG_ST_BUSY)
        if records + len(op.keys) > self.config["watches"]:
            return int(lib.PG_ST_FULL_WATCHES)
        if slots == self.config["capacity"]:
            return int(lib.PG_ST_FULL)
        return self.keys_refusal([k.name for k in op.keys])

    def keys_refusal(self, names: list[bytes]) -> int:
        free_slots = self.config["watermarks"] - len(self.watermarks)
        for n, name in enumerate(names):
            if name in names[:n]:
                return int(lib.PG_ST_DUPLICATE)
            free_slots -= name not in self.watermarks
            if free_slots < 0:
                return int(lib.PG_ST_FULL_KEYS)
        return 0

    def watch(self, op: Operation) -> Answer:
        refused = self.refusal(op)
        if refused == lib.PG_ST_EXISTS:
            old = self.armed[op.key]
            return Answer(refused, old.deadline_ns, old.ticket)
        if refused:
            limit = self.config["inbox_max"] if refused == lib.PG_ST_BUSY else 0
            return Answer(refused, limit, 0)
        for k in op.keys:
            watermark = self.watermark(k.name)
            assert watermark is not None
            if watermark.touched_s is not None:
                watermark.touched_s = self.now_s
        if op.condition == SUM:
            op.keys = [
                k._replace(target=self.watermarks[k.name].watermark)
                if k.target == pd.BASE_NOW
                else k
                for k in op.keys
            ]
        self.next_ticket += 1
        op.version = op.ticket << 32
        self.armed[op.key] = op
        self.settle(op)
        return Answer(lib.PG_ST_ADDED, op.deadline_ns, op.ticket)

    def advance(self, name: bytes, to: int) -> Answer:
        watermark = self.watermark(name)
        if watermark is None:
            return Answer(lib.PG_ST_FULL_KEYS, 0, 0)
        if to <= watermark.watermark:
            return Answer(lib.PG_ST_DONE, 0, 0)
        watermark.watermark, watermark.touched_s = to, self.now_s
        watchers = self.watchers(name)
        for op in watchers:
            if op.condition == CLIENT:
                self.ask(op)
        ended = [self.end(op, Cause.SATISFIED) for op in watchers if self.holds(op)]
        return Answer(lib.PG_ST_DONE, len(ended), 0)

    def bump(self, name: bytes, by: int) -> Answer:
        before = self.watermarks[name].watermark if name in self.watermarks else 0
        if before + by > WATERMARK_MAX:
            return Answer(lib.PG_ST_OVERFLOW, 0, 0)
        return self.advance(name, before + by)

    def fail(self, name: bytes, code: int) -> Answer:
        watermark = self.watermark(name)
        if watermark is None:
            return Answer(lib.PG_ST_FULL_KEYS, 0, 0)
        watermark.error, watermark.touched_s = code, self.now_s
        failed = [op for op in self.watchers(name) if self.error(op)]
        ended = [self.end(op, Cause.FAILED, self.error(op)) for op in failed]
        return Answer(lib.PG_ST_DONE, len(ended), 0)

    def clear(self, name: bytes) -> Answer:
        if name not in self.watermarks:
            return Answer(lib.PG_ST_UNKNOWN, 0, 0)
        watermark = self.watermarks[name]
        watermark.error = 0
        if watermark.touched_s is not None:
            watermark.touched_s = self.now_s
        return Answer(lib.PG_ST_DONE, 0, 0)

    def forget(self, name: bytes) -> Answer:
        if name not in self.watermarks:
            return Answer(lib.PG_ST_UNKNOWN, 0, 0)
        self.watermarks[name].touched_s = None
        self.left(name)
        return Answer(lib.PG_ST_DONE, 0, 0)

    def cancel(self, key: bytes, ticket: int) -> Answer:
        op = self.armed.get(key)
        if op is None or ticket not in (0, op.ticket):
            return Answer(lib.PG_ST_UNKNOWN, 0, 0)
        self.end(op, Cause.CANCELLED)
        return Answer(lib.PG_ST_CANCELLED, op.deadline_ns, op.ticket)

    def complete(self, session: int, key: bytes, version: int) -> Answer:
        """Complete an operation with a CLIENT condition, if `session` belongs to its owner."""
        op = self.armed.get(key)
        if op is None or op.condition != CLIENT or op.session != session:
            return Answer(lib.PG_ST_UNKNOWN, 0, 0)
        if op.version == version:
            self.end(op, Cause.SATISFIED)
        return Answer(lib.PG_ST_DONE, int(op.version == version), op.ticket)

    # ---- inbox messages ----

    def acknowledge(self, session: int, ticket: int, version: int) -> None:
        op = self.inbox[session].get(ticket)
        if op is None or (version != 0 if op.cause else version != op.version):
            return
        del self.inbox[session][ticket]
        self.unsent.discard(ticket)
        moved, op.check = op.check == "moved", ""
        if moved and not op.cause:
            self.ask(op)

    def bye(self, session: int) -> None:
        self.unsent -= self.inbox.pop(session).keys()

    def rebuilt(self) -> None:
        """Apply a rebuild. All messages are sent again, including CHECKs. After a client has
        answered no to such a CHECK, the core sends another CHECK."""
        for box in self.inbox.values():
            for ticket in [t for t, op in box.items() if not op.cause]:
                del box[ticket]
        for op in self.armed.values():
            if op.condition == CLIENT:
                op.check = "moved"
                self.news(op)
        self.unsent = {t for box in self.inbox.values() for t in box}


def needed(op: Operation) -> int:
    """Return the number of keys that have to reach their targets."""
    return {ALL: len(op.keys), ANY: 1}.get(op.condition, op.threshold)


# ---- the machine ---------------------------------------------------------------------------

OPERATION_KEYS = [b"op%d" % i for i in range(16)] + [b"o" * 255]
WATCH_KEYS = [b"k%d" % i for i in range(4)] + [b"w" * 255]
OPERATION = st.sampled_from(OPERATION_KEYS)
NAME = st.sampled_from(WATCH_KEYS)
WATERMARK = st.integers(0, 9)
CODE = st.integers(1, 3)
DELAY = st.integers(0, 40).map(lambda ms: ms * MS) | st.sampled_from([10**9, 4 * 10**9])
EXTREME = st.sampled_from([WATERMARK_MAX, WATERMARK_MAX + 1, 2**64 - 3, 2**64 - 2, 2**64 - 1])
TARGET_MAX = WATERMARK_MAX - 1
OWN = st.sampled_from([False, False, True])
TARGET = WATERMARK | WATERMARK | st.sampled_from([TARGET_MAX - 1, TARGET_MAX])
TARGETED = st.builds(Key, NAME, TARGET, st.just(0), OWN)
SHARED = st.builds(
    Key,
    NAME,
    WATERMARK | st.just(pd.BASE_NOW) | EXTREME,
    st.integers(0, 9) | st.just(2**64 - 1),
    OWN,
)
KEYS = {c: st.lists(SHARED if c == SUM else TARGETED, min_size=1, max_size=5) for c in range(5)}


@st.composite
def watches(draw: st.DrawFn) -> tuple[str, tuple[Any, ...]]:
    condition = draw(st.sampled_from([ALL, ANY, SUM, CLIENT, QUORUM, QUORUM]))
    keys = draw(KEYS[condition])
    if draw(st.integers(0, 9)):
        keys = list({k.name: k for k in keys}.values())
    threshold = 0
    if condition == SUM:
        threshold = draw(st.integers(0, 30) | st.just(2**64 - 1))
    if condition == QUORUM:
        threshold = draw(st.integers(1, len(keys)))
    return "watch", (
        draw(OPERATION), condition, keys, draw(DELAY), threshold,
        draw(st.sampled_from([b"", b"payload", b"p" * 100])), draw(st.booleans()),
    )  # fmt: skip


def commands_of(name: str, *fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(name), st.tuples(*fields))


COMMAND = st.one_of(
    watches(), watches(), watches(), watches(),
    commands_of("advance", NAME, WATERMARK),
    commands_of("advance", NAME, st.just(WATERMARK_MAX)),
    commands_of("bump", NAME, st.integers(0, 3)),
    commands_of("bump", NAME, st.just(WATERMARK_MAX)),
    commands_of("fail", NAME, CODE),
    commands_of("clear", NAME),
    commands_of("clear", NAME),
    commands_of("forget", NAME),
    commands_of("cancel", OPERATION, st.sampled_from([0, 0, 3])),
    commands_of("cancel_for_key", NAME),
    commands_of("complete", OPERATION, st.integers(0, 3)),
)  # fmt: skip
NOP = ("clear", (b"k0",))
CONFIG = st.fixed_dictionaries(
    {
        "capacity": st.sampled_from([4, 64, 64]),
        "watches": st.sampled_from([6, 12, 128, 128]),
        "watermarks": st.sampled_from([3, 6, 32, 32]),
        "inbox_max": st.sampled_from([2, 5, 1000, 1000]),
        "replay_bytes_max": st.sampled_from([256, 1 << 16]),
    }
)
OWNERS = 3


class PurgatoryMachine(RuleBasedStateMachine):
    core: Purgatory
    model: Model
    owners: list[Owner]
    seen: list[Verdict]

    @initialize(config=CONFIG)
    def begin(self, config: dict[str, Any]) -> None:
        self.core = Purgatory(**config)
        self.model = Model(dict(self.core.config))
        self.seen, self.looked_upto, self.nonce = [], 0, 0
        self.last: list[tuple[bytes, bytes] | None] = [None] * OWNERS
        self.owners = [self.greeted() for _ in range(OWNERS)]
        self.counts = self.core.counts()

    def greeted(self) -> Owner:
        self.nonce += 1
        owner = Owner(self.core, self.nonce)
        self.model.inbox[owner.id] = {}
        return owner

    # ---- notices ----

    def look(self) -> None:
        self.seen += self.core.verdicts(self.looked_upto)
        self.looked_upto = self.core.header.replay_tail

    def publish_some(self) -> None:
        self.look()
        self.core.published(min(self.core.header.published + 2, self.core.header.replay_tail))

    def verdicts_are_the_same(self) -> None:
        self.look()
        assert sorted(self.seen) == sorted(map(verdict_of, self.model.verdicts))
        self.seen.clear()
        self.model.verdicts.clear()

    # ---- commands ----

    def operation(
        self, owner: Owner, key: bytes, condition: int, keys: list[Key], delay_ns: int,
        threshold: int, payload: bytes, notice: bool,
    ) -> Operation:  # fmt: skip
        m = self.model
        return Operation(
            key, m.next_ticket, owner.id, condition, keys, threshold, m.now_ns,
            m.now_ns + delay_ns, payload, notice,
        )  # fmt: skip

    def encoded(self, name: str, fields: tuple[Any, ...]) -> pd.Command:
        if name != "watch":
            made: pd.Command = getattr(pd, name)(*fields)
            return made
        key, condition, keys, delay_ns, threshold, payload, notice = fields
        return pd.watch(
            key, condition, keys, delay_ns, threshold=threshold, payload=payload, notice=notice
        )

    def expected(
        self, owner: Owner, name: str, fields: tuple[Any, ...], found: Answer, ended: list[bytes]
    ) -> Answer:
        if name == "watch":
            return self.model.watch(self.operation(owner, *fields))
        if name == "cancel_for_key":
            return self.cancelled_for_key(fields[0], found, ended)
        if name == "complete":
            return self.model.complete(owner.id, *fields)
        answer: Answer = getattr(self.model, name)(*fields)
        return answer

    def cancelled_for_key(self, name: bytes, found: Answer, ended: list[bytes]) -> Answer:
        """Apply CANCEL_FOR_KEY. The core may answer MORE while the replay buffer is full."""
        m = self.model
        if name not in m.watermarks:
            return Answer(lib.PG_ST_UNKNOWN, 0, 0)
        keys = {op.key for op in m.watchers(name)}
        assert len(set(ended)) == len(ended)
        assert keys >= set(ended)
        status = lib.PG_ST_DONE if keys == set(ended) else lib.PG_ST_MORE
        assert status == lib.PG_ST_DONE or any(m.armed[k].notice for k in keys - set(ended))
        for key in ended:
            m.end(m.armed[key], Cause.CANCELLED)
        return Answer(status, len(ended), 0)

    @rule(number=st.integers(0, OWNERS - 1), commands=st.lists(COMMAND, min_size=1, max_size=6))
    def batch(self, number: int, commands: list[tuple[str, tuple[Any, ...]]]) -> None:
        owner = self.owners[number]
        message = owner.message([self.encoded(*c) for c in commands])
        reply = owner.reply(self.core.send(message, self.publish_some))
        self.last[number] = message, reply.data
        busy = False
        for n, ((name, fields), found) in enumerate(zip(commands, reply.answers, strict=True)):
            if busy and found.status == lib.PG_ST_BUSY:
                # not compared, because this record may share a key with the record that was BUSY;
                # tests/c/test_purgatory.c tests this case
                continue
            ended = reply.ended.get(n, [])
            assert found == self.expected(owner, name, fields, found, ended), (name, fields)
            busy |= found.status == lib.PG_ST_BUSY

    @rule(number=st.integers(0, OWNERS - 1), some=st.lists(watches(), min_size=1, max_size=4))
    def watch(self, number: int, some: list[tuple[str, tuple[Any, ...]]]) -> None:
        self.batch(number, some)

    @rule(
        number=st.integers(0, OWNERS - 1),
        some=st.lists(commands_of("advance", NAME, WATERMARK), min_size=1, max_size=6),
    )
    def advance(self, number: int, some: list[tuple[str, tuple[Any, ...]]]) -> None:
        self.batch(number, some)

    @rule(number=st.integers(0, OWNERS - 1), name=NAME, by=st.integers(1, 3))
    def bump(self, number: int, name: bytes, by: int) -> None:
        self.batch(number, [("bump", (name, by))])

    @rule(number=st.integers(0, OWNERS - 1), late=st.integers(0, 1))
    def complete(self, number: int, late: int) -> None:
        asked = [op for op in self.model.armed.values() if op.condition == CLIENT]
        self.batch(number, [("complete", (op.key, op.version - late)) for op in asked[:2]] or [NOP])

    @rule(number=st.integers(0, OWNERS - 1))
    def batch_again(self, number: int) -> None:
        if last := self.last[number]:
            assert self.core.send(last[0]) == last[1]

    # ---- inbox messages ----

    @rule(size=st.sampled_from([800, 1 << 20]))
    def read_mail(self, size: int) -> None:
        found = self.core.mail(size)
        expected = {
            session: [mail_of(op) for t, op in box.items() if t in self.model.unsent]
            for session, box in self.model.inbox.items()
        }
        assert {s: sorted(m._replace(slot=0) for m in mail) for s, mail in found.items()} == {
            s: sorted(mail) for s, mail in expected.items() if mail
        }
        self.model.unsent.clear()

    @rule(number=st.integers(0, OWNERS))
    def send_again(self, number: int) -> None:
        sessions = [o.id for o in self.owners]
        if number < OWNERS:
            sessions = [self.owners[number].id]
        self.core.mail_again(sessions[0] if number < OWNERS else 0)
        for session in sessions:
            self.model.unsent |= self.model.inbox[session].keys()

    @rule(seed=st.integers(0, 2**32), number=st.integers(0, OWNERS - 1), share=st.floats(0, 1))
    def acknowledge(self, seed: int, number: int, share: float) -> None:
        self.acknowledge_some(random.Random(seed), self.owners[number], share)

    def acknowledge_some(self, rng: random.Random, owner: Owner, share: float) -> None:
        """Acknowledge some messages, among them old versions and messages of other owners."""
        slots = {h.ctl >> 8: n for n, h in enumerate(self.hot()) if h.ctl & 0xFF}
        for box in self.model.inbox.values():
            for ticket, op in list(box.items()):
                if rng.random() > share:
                    continue
                version = 0 if op.cause else op.version - (rng.random() < 0.2)
                owner.ack(pd.ACK.pack(ticket, version, slots[ticket]))
                if op.session == owner.id:
                    self.model.acknowledge(owner.id, ticket, version)

    def hot(self) -> Iterator[Any]:
        rows = self.core.rows(lib.PG_R_HOT, "pg_hot")
        return (rows[i] for i in range(self.core.header.capacity + 1))

    @precondition(lambda self: self.model.next_ticket % 5 == 0)
    @rule(number=st.integers(0, OWNERS - 1))
    def bye(self, number: int) -> None:
        self.model.bye(self.owners[number].id)
        self.owners[number].bye()
        self.owners[number], self.last[number] = self.greeted(), None

    # ---- time ----

    @rule(ms=st.integers(0, 45) | st.integers(0, 4000))
    def go(self, ms: int) -> None:
        m = self.model
        m.now_ns += ms * MS
        while self.core.advance(m.now_ns):
            self.publish_some()
        m.expire()

    @rule()
    def sweep(self) -> None:
        self.core.sweep()
        self.model.sweep()

    @rule()
    def publish(self) -> None:
        self.look()
        self.core.publish_all()

    # ---- restarts ----

    @rule(seed=st.integers(0, 2**32), attach=st.booleans())
    def rebuild(self, seed: int, attach: bool) -> None:
        self.look()
        scribble(self.core, seed)
        if attach:
            self.core.attach()
        self.core.rebuild(self.model.now_ns)
        self.model.rebuilt()

    @precondition(lambda self: self.model.next_ticket % 3 == 0)
    @rule(config=CONFIG, replay_buffer=st.sampled_from([16, 64]))
    def migrate(self, config: dict[str, Any], replay_buffer: int) -> None:
        m = self.model
        self.look()
        try:
            self.core = self.core.migrated(**config, replay_capacity=replay_buffer)
        except Fault as fault:
            self.does_not_fit(fault)
            return
        for owner in self.owners:
            owner.core = self.core
        m.config = dict(self.core.config)
        m.rebuilt()
        fresh = Purgatory(**m.config)
        self.counts = {**fresh.counts(), "outcomes": 0}

    def does_not_fit(self, fault: Fault) -> None:
        assert (fault.part, fault.expected > fault.found) == ("migrate", True)

    @precondition(lambda self: self.model.next_ticket % 7 == 0)
    @rule()
    def end_everything(self) -> None:
        """End and acknowledge all operations, forget all keys, and check that all counts have their
        initial values."""
        m = self.model
        for key in list(m.armed):
            self.batch(0, [("cancel", (key, 0))])
        for owner in self.owners:
            self.acknowledge_some(random.Random(0), owner, 1.0)
            self.batch(0, [("forget", (name,)) for name in m.watermarks] or [NOP])
        for owner in self.owners:
            while m.inbox[owner.id]:
                self.acknowledge_some(random.Random(1), owner, 1.0)
        assert not m.watermarks
        self.window_passes()
        self.verdicts_are_the_same()
        self.core.publish_all()
        counts = self.core.counts()
        pinned = self.core.header.replay_bytes
        counts["bytes"] -= pinned
        counts["granules"] -= pinned // lib.PG_GRANULE
        assert counts == self.counts

    def window_passes(self) -> None:
        """Send a window of batches per owner, so that no remembered reply has keys of ended
        operations."""
        for number in range(OWNERS):
            for _ in range(lib.PG_WINDOW):
                self.batch(number, [NOP])

    # ---- after every step ----

    @invariant()
    def check(self) -> None:
        self.core.check()

    @invariant()
    def notices_are_the_same(self) -> None:
        self.verdicts_are_the_same()

    @invariant()
    def counters_are_the_same(self) -> None:
        m, metrics = self.model, self.core.metrics
        boxes = [op for box in m.inbox.values() for op in box.values()]
        assert metrics.operations == metrics.live == len(m.armed)
        assert metrics.outcomes == sum(op.cause != 0 for op in boxes)
        assert metrics.already_true == 0
        records = sum(len(op.keys) for op in m.armed.values())
        assert self.core.pool.free_watches == m.config["watches"] - records
        assert metrics.blob_bytes == self.core.counts()["granules"] * lib.PG_GRANULE
        rows = self.core.rows_of_sessions()
        assert rows == {session: len(box) for session, box in m.inbox.items()}

    @invariant()
    def watermarks_are_the_same(self) -> None:
        assert {
            name: (row.watermark, row.error, row.touched_s) for name, row in self.core.watermarks()
        } == {
            name: (v.watermark, v.error, NIL if v.touched_s is None else v.touched_s)
            for name, v in self.model.watermarks.items()
        }

    @invariant()
    def nobody_was_passed_over(self) -> None:
        """Check the watchers of each key: none is missing, they are in order, and each waits for a
        higher watermark."""
        records = self.core.rows(lib.PG_R_WATCHES, "pg_watch")
        for name, row in self.core.watermarks():
            order = list(in_order(records, row.root))
            targets = [records[x].target for x in order]
            assert targets == sorted(targets)
            assert all(target > row.watermark for target in targets)
            assert (row.first, row.latest) == ((order[0], order[-1]) if order else (NIL, NIL))
            assert len(order) == len(self.model.watchers(name))


def in_order(records: Any, root: int) -> Iterator[int]:
    if root != NIL:
        yield from in_order(records, records[root].left)
        yield root
        yield from in_order(records, records[root].right)


def verdict_of(op: Operation) -> Verdict:
    return Verdict(
        op.ticket, op.cause, op.key, op.payload, op.missing, op.error, op.ended_ns - op.armed_ns
    )


def mail_of(op: Operation) -> Mail:
    return Mail(
        op.ticket, op.cause, op.key, op.payload, op.watermarks, op.missing, op.failed,
        op.deadline_ns, op.armed_ns, op.ended_ns, op.error, 0 if op.cause else op.version, 0,
    )  # fmt: skip


def scribble(core: Purgatory, seed: int) -> None:
    """Overwrite all derived state with garbage."""
    rng = random.Random(seed)

    def junk() -> int:
        return rng.getrandbits(32)

    for region in (*DERIVED, lib.PG_R_WATERMARK_INDEX):
        view = core.region(region)
        view[:] = rng.randbytes(len(view))
    core.pool.free_watch, core.pool.free_watermark = junk(), junk()
    core.pool.free_watches, core.pool.free_watermarks = junk(), junk()
    scribble_watches(core, junk)
    watermarks = core.rows(lib.PG_R_WATERMARKS, "pg_watermark")
    for i in range(core.config["watermarks"]):
        watermarks[i].root, watermarks[i].first, watermarks[i].latest = junk(), junk(), junk()
        watermarks[i].place = junk()
    m = core.metrics
    m.live = m.operations = m.outcomes = m.blob_bytes = core.header.replay_bytes = junk()


def scribble_watches(core: Purgatory, junk: Callable[[], int]) -> None:
    records = core.rows(lib.PG_R_WATCHES, "pg_watch")
    for i in range(core.config["watches"]):
        record = records[i]
        record.left, record.right, record.parent = junk(), junk(), junk()
        if record.slot == NIL:
            record.sibling = junk()
        elif core.operation(record.slot).condition in (SUM, CLIENT):
            record.target = junk()
    for slot in core.operations():
        op = core.operation(slot)
        op.unmet, op.inbox_next, op.inbox_previous = junk(), junk(), junk()
        op.in_inbox = junk() & 1


# ---- order of changes and watch ------------------------------------------------------------

FATES = ("advance", "fail", "silent")
"""Change of a watch key: it reaches its target, it fails, or neither."""


def ended(
    condition: int, needed: int, order: Sequence[tuple[int, str]], count: int, killed: bool
) -> int:
    """Apply changes and watch in this order; return the operation's cause, or 0 if it still
    waits."""
    core = Purgatory()
    owner = Owner(core)
    keys = [Key(b"k%d" % n, 5) for n in range(count)]
    for n, what in order:
        made = {
            "advance": pd.advance(b"k%d" % n, 5),
            "fail": pd.fail(b"k%d" % n, 7 + n),
            "silent": pd.advance(b"k%d" % n, 4),
            "watch": pd.watch(b"o", condition, keys, threshold=needed),
        }[what]
        owner.send(made)
        if killed:
            scribble(core, n)
            core.rebuild(0)
        core.check()
    return next((m.cause for m in owner.mail()), 0)


@pytest.mark.tier("test")
@pytest.mark.parametrize("killed", [wide(False), True])
@pytest.mark.parametrize(
    ("condition", "needed"), [(ALL, 3), wide(ANY, 1), wide(QUORUM, 1), (QUORUM, 2), wide(QUORUM, 3)]
)
def test_the_outcome_is_the_same_in_every_order(condition: int, needed: int, killed: bool) -> None:
    for fates in itertools.product(FATES, repeat=3):
        events = [*enumerate(fates), (3, "watch")]
        expected = (
            Cause.SATISFIED if fates.count("advance") >= needed
            else Cause.FAILED if fates.count("fail") > 3 - needed
            else 0
        )  # fmt: skip
        found = {
            ended(condition, needed, order, 3, killed) for order in itertools.permutations(events)
        }
        assert found == {expected}, fates


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.tuples(
            st.integers(1, n),
            st.lists(st.sampled_from(FATES), min_size=n, max_size=n).flatmap(
                lambda fates: st.tuples(
                    st.just(len(fates)), st.permutations([*enumerate(fates), (n, "watch")])
                )
            ),
        )
    ),
    st.booleans(),
)
@effort(100, 5000)
def test_a_quorum_fails_only_when_success_has_become_impossible(
    case: tuple[int, tuple[int, list[tuple[int, str]]]], killed: bool
) -> None:
    needed, (count, order) = case
    reached, failed = (sum(what == fate for _, what in order) for fate in ("advance", "fail"))
    cause = ended(QUORUM, needed, order, count, killed)
    assert (cause == Cause.SATISFIED) == (reached >= needed)
    assert (cause == Cause.FAILED) == (failed > count - needed)


PurgatoryMachine.TestCase.settings = effort(150, 5000)
TestPurgatory = pytest.mark.costly("150 programs of 40 random steps")(PurgatoryMachine.TestCase)
