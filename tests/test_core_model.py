"""The core under a virtual clock, compared with a naive model made of a dict and a list."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, field
from typing import Any

import pytest
from core_driver import DERIVED, FOREVER_NS, PLENTY, Answer, Core, Entry, Fault, Part
from effort import effort
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import Cause, PutMode, Status, TimeKind

pytestmark = pytest.mark.tier("check")

GRANULE = lib.PG_GRANULE
TICKET_MAX = lib.PG_TICKET_SHARD - 1
STEP_NS = 2_000_000
"""Largest error of a wall timer while the wall clock drifts: two drifts of less than 1 ms each."""

Key = tuple[bytes, wire.Key]
KEYS: list[wire.Key] = [*"abcd", b"a", uuid.UUID(int=5), "k" * 255]
NAMESPACES = [b"n", b"shop", b"third"]


def clamp(ns: int) -> int:
    return max(-(2**63), min(FOREVER_NS, ns))


def granules(length: int) -> int:
    return -(-length // int(GRANULE))


@dataclass
class Timer:
    ticket: int
    deadline_ns: int
    wall_ns: int | None
    topic: bytes
    payload: bytes
    due_ns: int  # the later of deadline and time of arming
    ordered: bool  # has a boot-clock deadline, and was armed before it was due
    slack: int = 0  # log2 of its slack in ns

    def fires_ns(self, deadline_ns: int) -> int:
        """Return the deadline, rounded up to a multiple of the slack."""
        slack_ns = 1 << self.slack
        return min(FOREVER_NS, -(-deadline_ns // slack_ns) * slack_ns)

    def granules(self, key: wire.Key) -> int:
        extension = 0 if self.wall_ns is None else GRANULE
        return granules(extension + len(wire.encode_key(key)[1]) + len(self.payload))


@dataclass
class Notice:
    position: int
    ticket: int
    key: Key
    timer: Timer
    deadline_ns: int
    fired_ns: int
    sequence: int
    late: bool  # due before the arena's last start
    superseded: bool = False

    @property
    def flags(self) -> int:
        late = lib.PG_E_LATE if self.late else 0
        return int(late | (lib.PG_E_SUPERSEDED if self.superseded else 0))

    @property
    def granules(self) -> int:
        return granules(len(wire.encode_key(self.key[1])[1]) + len(self.timer.payload))


@dataclass
class TopicRow:
    namespace: bytes
    name: bytes
    incarnation: int
    sequence: int = 0
    newest_ns: int = 0  # largest fires_ns() of all fired timers with `ordered`


@dataclass
class Model:
    config: dict[str, Any]
    now_ns: int
    offset_ns: int = 0
    next_ticket: int = 1
    timers: dict[Key, Timer] = field(default_factory=dict)
    replay_buffer: list[Notice] = field(default_factory=list)
    tail: int = 0
    published: int = 0
    namespaces: list[bytes] = field(default_factory=list)
    topics: list[TopicRow] = field(default_factory=list)
    incarnations: int = 0
    started_ns: int = 0
    first_ticket: int = 0  # first ticket since the start

    @property
    def head(self) -> int:
        return self.tail - len(self.replay_buffer)

    @property
    def tick_ns(self) -> int:
        return int(self.config["tick_ns"])

    def tick_up(self, ns: int) -> int:
        return -(-ns // self.tick_ns) * self.tick_ns

    # ---- names ----

    def topic_row(self, namespace: bytes, topic: bytes) -> TopicRow | None:
        same = (t for t in self.topics if (t.namespace, t.name) == (namespace, topic))
        return next(same, None)

    def in_use(self, row: TopicRow) -> bool:
        pair = (row.namespace, row.name)
        return any((n, t.topic) == pair for (n, _), t in self.timers.items()) or any(
            (n.key[0], n.timer.topic) == pair for n in self.replay_buffer
        )

    def born(self, namespace: bytes, topic: bytes) -> Status | None:
        """Create the names. Return a status if a table is full, else None."""
        if namespace not in self.namespaces:
            if len(self.namespaces) == self.config["namespaces"]:
                return Status.FULL_NAMESPACES
            self.namespaces.append(namespace)
        if self.topic_row(namespace, topic):
            return None
        row = TopicRow(namespace, topic, self.incarnations + 1)
        if len(self.topics) < self.config["topics"]:
            self.topics.append(row)
        else:
            idle = [i for i, old in enumerate(self.topics) if not self.in_use(old)]
            if not idle:
                return Status.FULL_TOPICS
            self.topics[idle[0]] = row
        self.incarnations += 1
        return None

    # ---- commands ----

    def deadline(self, kind: int, time_ns: int) -> int | None:
        """Return the deadline on the boot clock; None if it is too far in the future."""
        ns = time_ns
        if kind == TimeKind.DELAY:
            ns = self.now_ns + max(0, time_ns)
            if ns > FOREVER_NS:
                return None
        if kind == TimeKind.WALL:
            ns = clamp(time_ns - self.offset_ns)
        return max(0, ns)

    def current_deadline(self, timer: Timer) -> int:
        if timer.wall_ns is None:
            return timer.deadline_ns
        return max(0, clamp(timer.wall_ns - self.offset_ns))

    def arm(
        self, key: Key, slack: int, topic: bytes, payload: bytes, kind: int, time_ns: int
    ) -> Timer:
        deadline = self.deadline(kind, time_ns)
        assert deadline is not None
        wall = time_ns if kind == TimeKind.WALL else None
        timer = Timer(
            self.next_ticket, deadline, wall, topic, payload, max(deadline, self.now_ns),
            ordered=wall is None, slack=slack,
        )  # fmt: skip
        self.place(timer, deadline)
        self.next_ticket += 1
        self.timers.pop(key, None)
        self.timers[key] = timer
        for notice in self.replay_buffer:
            if notice.key == key:
                notice.superseded = True
        return timer

    def extend(self, timer: Timer, kind: int, time_ns: int, deadline: int) -> None:
        if timer.wall_ns is not None:
            timer.wall_ns = time_ns if kind == TimeKind.WALL else clamp(deadline + self.offset_ns)
        timer.deadline_ns = deadline
        timer.deadline_ns = self.current_deadline(timer)
        self.place(timer, deadline)

    def place(self, timer: Timer, deadline: int) -> None:
        timer.due_ns = max(timer.fires_ns(deadline), self.now_ns)
        timer.ordered = timer.wall_ns is None and timer.fires_ns(deadline) > self.now_ns

    def slots_status(self, replacing: bool) -> Status | None:
        if not replacing and len(self.timers) == self.config["capacity"]:
            return Status.FULL
        return Status.FULL_TICKETS if self.next_ticket > TICKET_MAX else None

    def cancelled(self, key: Key, ticket: int) -> tuple[Status, int]:
        """Cancel a key; return (status, ticket) of the answer."""
        timer = self.timers.get(key)
        if timer is None:
            return self.cancelled_fired(key, ticket)
        if ticket not in (0, timer.ticket):
            return Status.UNKNOWN, 0
        del self.timers[key]
        return Status.CANCELLED, timer.ticket

    def cancelled_fired(self, key: Key, ticket: int) -> tuple[Status, int]:
        fired = [n for n in self.replay_buffer if n.key == key and not n.superseded]
        assert len(fired) <= 1
        if fired and ticket in (0, fired[0].ticket):
            return Status.FIRED, fired[0].ticket
        return Status.UNKNOWN, 0

    # ---- time ----

    def has_space(self, more: int) -> bool:
        pinned = sum(n.granules for n in self.replay_buffer) * GRANULE
        return not self.replay_buffer or (
            len(self.replay_buffer) < self.config["replay_capacity"]
            and pinned + more * GRANULE <= self.config["replay_bytes_max"]
        )

    def make_space(self, more: int) -> bool:
        while not self.has_space(more):
            if self.head >= self.published:
                return False
            self.replay_buffer.pop(0)
        return True

    def restarted(self) -> None:
        self.started_ns, self.first_ticket = self.now_ns, self.next_ticket

    def came_due_before_start(self, entry: Entry, timer: Timer) -> bool:
        due_ns = timer.fires_ns(entry.deadline_ns)
        return entry.ticket < self.first_ticket and due_ns < self.started_ns

    def must_be_gone(self, timer: Timer) -> bool:
        slack = 0 if timer.wall_ns is None else STEP_NS
        due_ns = timer.fires_ns(min(FOREVER_NS, self.current_deadline(timer) + slack))
        return self.tick_up(due_ns) <= self.now_ns


def decoded(entry: Entry) -> Key:
    return entry.namespace, wire.decode_key(entry.key_type, entry.key)


SLACK = st.sampled_from([0, 0, 0, 1, 14, 20, 27, 46])
TICKS = [1_000, 7_001, 100_000, 1_000_000, 33_333_333, 100_000_000]
STARTS = st.sampled_from(
    [0, 0, 0, 1, 10**9, 10**9, 10**15 + 7, 10**15 + 7, 2**62, 2**63 - 10**12, 2**63 - 10**6]
)
CONFIGS = st.fixed_dictionaries(
    {
        "tick_ns": st.sampled_from(TICKS) | st.integers(1_000, 100_000_000),
        "fanout": st.sampled_from([2, 3, 20, 64, 256]) | st.integers(2, 256),
        "capacity": st.integers(8, 40) | st.integers(1, 40),
        "replay_capacity": st.sampled_from([16, 32]),
        "replay_bytes_max": st.sampled_from([64, 256, 2048, 1 << 16]),
        "payload_bytes": st.sampled_from([4096, 8192, 1 << 17]),
        "namespaces": st.sampled_from([1, 2, 3, 3, 3]),
        "topics": st.sampled_from([1, 2, 3, 5, 15, 15, 15]),
        "now_ns": STARTS,
        "wall_offset_ns": st.sampled_from([0, -(10**9), 1_700_000_000 * 10**9]),
    }
)
KEY = st.sampled_from(KEYS)
NAMESPACE = st.sampled_from([b"n", b"n", b"n", b"n", b"shop", b"third"])
TOPIC = st.sampled_from([b"t", b"t", b"t", b"", b"u", b"v", b"w"])
MODE = st.sampled_from(PutMode)
PAYLOAD = st.sampled_from([0, 0, 1, 15, 16, 48, 700, 2000, 65536])
# A span of time is (ticks, exponent, nanoseconds): the ticks are multiplied by the fan-out to the
# power of the exponent, and the nanoseconds are added.
SPAN = st.tuples(
    st.integers(0, 40),
    st.sampled_from([0, 0, 0, 1, 1, 2, 3]),
    st.sampled_from([-1, 0, 0, 1]) | st.integers(0, 10**6),
)
FAR = st.sampled_from([0, 1, -1, -(2**63), FOREVER_NS, FOREVER_NS - 1])
BUDGET = st.sampled_from([1, 2, 3, 7, PLENTY, PLENTY])
SHIFT = (
    st.sampled_from([-1, 1, 999_999, -999_999, 10**6, -(10**6), 3_600 * 10**9, -3_600 * 10**9])
    | st.integers(-(10**6), 10**6)
    | st.integers(-(10**12), 10**12)
)


class CoreMachine(RuleBasedStateMachine):
    core: Core
    model: Model

    @initialize(config=CONFIGS, tickets_left=st.sampled_from([None] * 8 + [0, 1, 5]))
    def begin(self, config: dict[str, Any], tickets_left: int | None) -> None:
        if config["now_ns"] > 2**61:  # an offset would overflow the wall clock
            config["wall_offset_ns"] = 0
        self.core = Core(**config)
        self.model = Model(dict(config), config["now_ns"], config["wall_offset_ns"])
        if tickets_left is not None:
            self.model.next_ticket = TICKET_MAX + 1 - tickets_left
            self.core.header.next_ticket = self.model.next_ticket
        self.wall_offset_ns = self.model.offset_ns  # offset that the next advance applies
        self.unfinished = False  # True if the last advance left due timers

    # ---- fired timers ----

    def fired(self, entry: Entry) -> None:
        m, key = self.model, decoded(entry)
        timer = m.timers.pop(key)
        row = m.topic_row(entry.namespace, timer.topic)
        assert row is not None
        row.sequence += 1
        assert m.make_space(entry_granules(entry))
        assert (entry.position, entry.ticket, entry.cause) == (m.tail, timer.ticket, Cause.EXPIRED)
        assert (entry.topic, entry.payload) == (timer.topic, timer.payload)
        assert (entry.sequence, entry.fired_ns) == (row.sequence, m.now_ns)
        self.never_early(entry, timer)
        self.in_order(row, timer)
        m.replay_buffer.append(
            Notice(
                m.tail, timer.ticket, key, timer, entry.deadline_ns, m.now_ns, row.sequence,
                m.came_due_before_start(entry, timer),
            )
        )  # fmt: skip
        m.tail += 1

    def never_early(self, entry: Entry, timer: Timer) -> None:
        m = self.model
        assert entry.deadline_ns <= entry.fired_ns
        if timer.wall_ns is None:
            assert entry.deadline_ns == timer.deadline_ns
        else:
            assert clamp(timer.wall_ns - m.offset_ns) <= m.now_ns

    def in_order(self, row: TopicRow, timer: Timer) -> None:
        m = self.model
        if timer.ordered:
            due_ns = timer.fires_ns(timer.deadline_ns)
            assert m.tick_up(row.newest_ns) <= m.tick_up(due_ns)
            row.newest_ns = due_ns

    def advance(self, now_ns: int, budget: int = PLENTY) -> bool:
        m = self.model
        before = m.tail
        m.now_ns = max(m.now_ns, now_ns)
        m.offset_ns = self.wall_offset_ns
        more = self.core.advance(now_ns, wall_offset_ns=m.offset_ns, budget=budget)
        assert self.core.header.now_ns == m.now_ns
        for position in range(before, self.core.header.replay_tail):
            self.fired(self.core.entry(position))
        assert m.tail - before <= budget
        assert self.core.header.replay_head <= m.published
        for notice in m.replay_buffer[: self.core.header.replay_head - m.head]:
            # The core withdrew this notice to make space for a due timer. The space did not
            # suffice, so the timer is still due.
            assert more
            m.replay_buffer.remove(notice)
        self.unfinished = more
        if more:
            assert self.core.next_ns <= m.now_ns
        else:
            assert not [t for t in m.timers.values() if m.must_be_gone(t)]
            assert self.core.next_ns > m.now_ns or m.now_ns == FOREVER_NS
            self.next_deadline_is_a_bound()
        return more

    def next_deadline_is_a_bound(self) -> None:
        deadlines = [fires_ns(info) for info in self.core.scan()]
        earliest = min([FOREVER_NS, *map(self.model.tick_up, deadlines)])
        assert self.core.header.next_deadline_ns <= earliest
        if not deadlines:
            assert self.core.header.next_deadline_ns == FOREVER_NS

    def settle(self, budget: int = PLENTY) -> None:
        """Fire all due timers. Publish after each advance, so that the replay buffer has space."""
        iterations = (len(self.model.timers) + 1) * (self.core.header.levels + 2) + 10
        while self.advance(self.model.now_ns, budget):
            self.publish()
            iterations -= 1
            assert iterations > 0

    # ---- rules: commands ----

    def span(self, span: tuple[int, int, int]) -> int:
        ticks, power, ns = span
        fanout: int = self.core.header.fanout
        return int(ticks * fanout**power * self.model.tick_ns + ns)

    def put(
        self, key: Key, kind: int, time_ns: int, mode: int, topic: bytes, payload: bytes,
        slack: int = 0,
    ) -> None:  # fmt: skip
        m = self.model
        old = m.timers.get(key)
        refused = m.born(key[0], topic)
        deadline = m.deadline(kind, time_ns)
        answer = self.core.put(
            key[1], time_ns, kind, mode=mode, payload=payload, namespace=key[0], topic=topic,
            slack=slack + 1,
        )  # fmt: skip
        if refused is None and deadline is None:
            refused = Status.TOO_FAR
        if refused is not None:
            assert answer == (0, refused, 0)
        elif old is None or mode == PutMode.REPLACE:
            self.put_new(key, old, answer, (topic, payload, kind, time_ns), slack)
        else:
            self.put_old(old, answer, mode, kind, time_ns)

    def put_new(
        self, key: Key, old: Timer | None, answer: Answer, detail: tuple[bytes, bytes, int, int],
        slack: int,
    ) -> None:  # fmt: skip
        m = self.model
        refused = m.slots_status(old is not None)
        if refused is None and answer.status == Status.FULL_PAYLOAD:
            extension = GRANULE if detail[2] == TimeKind.WALL else 0
            need = granules(extension + len(wire.encode_key(key[1])[1]) + len(detail[1]))
            # A small request is refused only if no free stretch of memory is large enough.
            assert need >= 64 or max(self.core.free_runs()) < need
            refused = Status.FULL_PAYLOAD
        if refused is not None:
            assert answer == (0, refused, 0)
            return
        timer = m.arm(key, slack, *detail)
        status = Status.REPLACED if old else Status.ADDED
        assert answer == (timer.ticket, status, timer.deadline_ns)

    def put_old(self, old: Timer, answer: Answer, mode: int, kind: int, time_ns: int) -> None:
        m = self.model
        deadline = m.deadline(kind, time_ns)
        assert deadline is not None
        status = Status.EXISTS if mode == PutMode.ERROR else Status.KEPT
        if mode == PutMode.EXTEND and deadline > m.current_deadline(old):
            m.extend(old, kind, time_ns, deadline)
            status = Status.EXTENDED
        assert (answer.ticket, answer.status) == (old.ticket, status)
        self.same_deadline(old, answer.deadline_ns)

    def same_deadline(self, timer: Timer, deadline_ns: int) -> None:
        if timer.wall_ns is None:
            assert deadline_ns == timer.deadline_ns
        elif not self.unfinished:
            assert abs(deadline_ns - self.model.current_deadline(timer)) < STEP_NS

    @rule(key=KEY, ns=NAMESPACE, topic=TOPIC, span=SPAN, mode=MODE, size=PAYLOAD, slack=SLACK)
    def put_delay(
        self, key: wire.Key, ns: bytes, topic: bytes, span: tuple[int, int, int], mode: PutMode,
        size: int, slack: int,
    ) -> None:  # fmt: skip
        delay = min(FOREVER_NS, self.span(span))
        self.put((ns, key), TimeKind.DELAY, delay, mode, topic, os_bytes(size), slack)

    @rule(key=KEY, ticks=st.integers(0, 30), mode=MODE, size=PAYLOAD)
    def put_soon(self, key: wire.Key, ticks: int, mode: PutMode, size: int) -> None:
        delay = ticks * self.model.tick_ns
        self.put((b"n", key), TimeKind.DELAY, delay, mode, b"t", os_bytes(size))

    @rule(key=KEY, ns=NAMESPACE, span=SPAN, mode=MODE)
    def put_at(self, key: wire.Key, ns: bytes, span: tuple[int, int, int], mode: PutMode) -> None:
        at = clamp(self.model.now_ns + self.span(span) - self.model.tick_ns)
        self.put((ns, key), TimeKind.BOOT, at, mode, b"t", b"at")

    @rule(key=KEY, ns=NAMESPACE, span=SPAN, mode=MODE, slack=SLACK)
    def put_wall(
        self, key: wire.Key, ns: bytes, span: tuple[int, int, int], mode: PutMode, slack: int
    ) -> None:
        wall = clamp(self.model.now_ns + self.model.offset_ns + self.span(span))
        self.put((ns, key), TimeKind.WALL, wall, mode, b"t", b"wall", slack)

    @rule(key=KEY, far=FAR, kind=st.sampled_from(TimeKind), mode=MODE)
    def put_extreme(self, key: wire.Key, far: int, kind: TimeKind, mode: PutMode) -> None:
        self.put((b"n", key), kind, far, mode, b"t", b"")

    @rule(key=KEY, over=st.integers(-1, 1), mode=MODE)
    def put_at_the_end_of_time(self, key: wire.Key, over: int, mode: PutMode) -> None:
        delay = min(FOREVER_NS, FOREVER_NS - self.model.now_ns + over)
        self.put((b"n", key), TimeKind.DELAY, delay, mode, b"t", b"")

    @rule(span=SPAN, count=st.integers(1, 40), spread=st.integers(0, 3))
    def put_many(self, span: tuple[int, int, int], count: int, spread: int) -> None:
        delay = self.span(span)
        for i in range(count):
            ns = min(FOREVER_NS, delay + i * spread * self.model.tick_ns)
            self.put((b"n", f"many{i}"), TimeKind.DELAY, ns, PutMode.REPLACE, b"t", os_bytes(i))

    @rule(key=KEY, ns=NAMESPACE, which=st.sampled_from(["any", "own", "other", "older"]))
    def cancel(self, key: wire.Key, ns: bytes, which: str) -> None:
        m = self.model
        own = self.core.get(key, ns).ticket
        fired = [n.ticket for n in m.replay_buffer if n.key == (ns, key)]
        ticket = {
            "any": 0, "own": own, "other": own + 1, "older": fired[-1] if fired else 1
        }[which]  # fmt: skip
        status, answered = m.cancelled((ns, key), ticket)
        answer = self.core.cancel(key, ns, ticket)
        assert (answer.status, answer.ticket) == (status, answered)

    @rule(start=st.integers(0, 40), count=st.integers(1, 20))
    def cancel_many(self, start: int, count: int) -> None:
        for ns, key in list(self.model.timers)[start : start + count]:
            expected = self.model.cancelled((ns, key), 0)
            answer = self.core.cancel(key, ns)
            assert (answer.status, answer.ticket) == expected

    @rule(key=KEY, ns=NAMESPACE)
    def get(self, key: wire.Key, ns: bytes) -> None:
        info = self.core.get(key, ns)
        timer = self.model.timers.get((ns, key))
        if timer is None:
            assert (info.status, info.ticket) == (Status.UNKNOWN, 0)
        else:
            assert info.status == Status.FOUND
            self.same_timer((ns, key), timer, info)

    def same_timer(self, key: Key, timer: Timer, info: wire.Info) -> None:
        assert (info.namespace.encode(), info.key) == key
        assert info.ticket == timer.ticket
        assert info.wall_ns == (None if timer.wall_ns == -(2**63) else timer.wall_ns)
        assert (info.topic.encode(), info.payload) == (timer.topic, timer.payload)
        self.same_deadline(timer, info.deadline_ns)

    # ---- rules: time ----

    @rule(span=SPAN, budget=BUDGET)
    def go(self, span: tuple[int, int, int], budget: int) -> None:
        self.advance(min(FOREVER_NS, self.model.now_ns + max(0, self.span(span))), budget)

    @rule(ticks=st.integers(1, 30), budget=BUDGET)
    def go_a_little(self, ticks: int, budget: int) -> None:
        self.advance(min(FOREVER_NS, self.model.now_ns + ticks * self.model.tick_ns), budget)

    @rule(budget=BUDGET)
    def go_on(self, budget: int) -> None:
        self.advance(self.model.now_ns, budget)

    @rule(back=st.integers(0, 2**63))
    def go_back(self, back: int) -> None:
        """Advance to an earlier time, which must not change the arena."""
        self.advance(max(0, self.model.now_ns - back))

    @precondition(lambda self: self.model.config["capacity"] == 8)
    @rule(ns=st.sampled_from([2**62, FOREVER_NS]))
    def go_far(self, ns: int) -> None:
        self.advance(ns)

    @rule(budget=st.integers(1, 3))
    def finish(self, budget: int) -> None:
        self.settle(budget)

    @rule(span=SPAN)
    def walk(self, span: tuple[int, int, int]) -> None:
        """Advance in steps, each to `next_ns` of the core. No timer is allowed to fire a tick
        late."""
        self.settle()
        m, target = self.model, min(FOREVER_NS, self.model.now_ns + max(0, self.span(span)))
        steps = (len(m.timers) + 2) * 2 * (self.core.header.levels + 1)
        while (at := self.core.next_ns) <= target and at < FOREVER_NS:
            before = m.tail
            self.advance(at)
            for notice in m.replay_buffer[before - m.tail :] if m.tail > before else []:
                if notice.timer.wall_ns is None:
                    assert m.now_ns - notice.timer.due_ns < m.tick_ns
            self.settle()
            steps -= 1
            assert steps > 0
        before = m.tail
        self.advance(target)
        assert m.tail == before

    @rule(shift=SHIFT)
    def wall_clock_moves(self, shift: int) -> None:
        self.wall_offset_ns += shift

    # ---- rules: notices ----

    def publish(self, parts_max: int = 64, out_bytes: int = 1 << 20) -> None:
        m = self.model
        while m.published < m.tail:
            parts, upto = self.core.notices(out_bytes, parts_max)
            assert upto > m.published
            self.same_messages(parts, m.replay_buffer[m.published - m.head : upto - m.head])
            self.core.published(upto)
            m.published = upto

    def same_messages(self, parts: list[Part], expected: list[Notice]) -> None:
        assert sum(p.head.records for p in parts) == len(expected)
        for part in parts:
            mine = [
                n for n in expected
                if (n.key[0], n.timer.topic) == (part.namespace.encode(), part.topic.encode())
            ]  # fmt: skip
            row = self.model.topic_row(part.namespace.encode(), part.topic.encode())
            assert row is not None
            assert (part.head.incarnation, part.head.tail) == (row.incarnation, row.sequence)
            assert part.head.first == mine[0].sequence
            self.same_notices(part.notices, mine)

    def same_notices(self, raw: list[wire.RawNotice], expected: list[Notice]) -> None:
        assert len(raw) == len(expected)
        for found, n in zip(raw, expected, strict=True):
            assert found == (
                n.ticket, n.deadline_ns, n.fired_ns, Cause.EXPIRED, n.flags, n.key[1],
                n.timer.payload, 0,
            )  # fmt: skip

    @rule(parts_max=st.sampled_from([1, 2, 64]), out_bytes=st.sampled_from([1 << 17, 1 << 20]))
    def publish_everything(self, parts_max: int, out_bytes: int) -> None:
        self.publish(parts_max, out_bytes)

    @rule(share=st.floats(0, 1))
    def publish_some(self, share: float) -> None:
        m = self.model
        upto = m.published + round((m.tail - m.published) * share)
        self.core.published(upto)
        m.published = upto

    @precondition(lambda self: self.model.topics)
    @rule(which=st.integers(0, 100), first=st.integers(1, 30), count=st.integers(1, 30))
    def replay(self, which: int, first: int, count: int) -> None:
        m = self.model
        row = m.topics[which % len(m.topics)]
        retained = {
            n.sequence: n for n in m.replay_buffer
            if (n.key[0], n.timer.topic) == (row.namespace, row.name)
        }  # fmt: skip
        last = min(first + count - 1, row.sequence)
        there = [n for s, n in sorted(retained.items()) if first <= s <= last]
        lost, got, notices = self.core.replay(row.namespace, row.name, first, first + count - 1)
        self.same_notices(notices, there)
        gone = [s for s in range(first, last + 1) if s not in retained]
        assert lost == max(gone, default=first - 1)
        assert got == lost + len(there)

    # ---- rules: restarts ----

    @rule(seed=st.integers(0, 2**32), again=st.booleans(), span=SPAN, down=st.booleans())
    def rebuild(self, seed: int, again: bool, span: tuple[int, int, int], down: bool) -> None:
        scribble(self.core, seed)
        if again:
            self.core.attach()
        if down:
            self.model.now_ns = min(FOREVER_NS, self.model.now_ns + max(0, self.span(span)))
        self.core.rebuild(self.model.now_ns)
        self.model.restarted()
        self.unfinished = True

    @rule(config=CONFIGS, same_tick=st.booleans())
    def migrate(self, config: dict[str, Any], same_tick: bool) -> None:
        m = self.model
        if same_tick:
            config["tick_ns"] = m.tick_ns
        rows = {"namespaces": len(NAMESPACES), "topics": max(m.config["topics"], config["topics"])}
        try:
            self.core = self.core.migrated(**{**config, **rows})
        except Fault as fault:
            self.refused(fault, config)
            return
        assert m.head <= self.core.header.replay_head <= m.published
        if self.core.header.replay_head > m.head:
            del m.replay_buffer[: self.core.header.replay_head - m.head]
        for row in m.topics if config["tick_ns"] != m.tick_ns else []:
            row.newest_ns = 0
        m.config = {**config, **rows}
        m.restarted()
        self.unfinished = True

    def refused(self, fault: Fault, config: dict[str, Any]) -> None:
        assert fault.part == "migrate"
        assert fault.expected > fault.found
        assert not self.would_fit(config)

    def would_fit(self, config: dict[str, Any]) -> bool:
        """Return whether an arena of this configuration certainly has space for all armed timers
        and notices."""
        m = self.model
        waiting = m.replay_buffer[m.published - m.head :]
        pinned = sum(n.granules for n in m.replay_buffer)
        used = pinned + sum(t.granules(k) for (_, k), t in m.timers.items())
        return bool(
            len(m.timers) <= config["capacity"]
            and len(waiting) <= config["replay_capacity"]
            and sum(n.granules for n in waiting) * GRANULE <= config["replay_bytes_max"]
            and used * GRANULE <= config["payload_bytes"]
        )

    # ---- after every step ----

    @invariant()
    def check(self) -> None:
        self.core.check()

    @invariant()
    def armed_is_the_same(self) -> None:
        infos = self.core.scan()
        found = {(i.namespace.encode(), i.key): i for i in infos}
        assert len(found) == len(infos)
        assert found.keys() == self.model.timers.keys()
        for key, timer in self.model.timers.items():
            self.same_timer(key, timer, found[key])

    @invariant()
    def replay_buffer_is_the_same(self) -> None:
        m, h = self.model, self.core.header
        assert (h.replay_head, h.published, h.replay_tail) == (m.head, m.published, m.tail)
        for entry, notice in zip(self.core.entries(), m.replay_buffer, strict=True):
            assert (entry.position, entry.ticket) == (notice.position, notice.ticket)
            assert (decoded(entry), entry.payload) == (notice.key, notice.timer.payload)
            assert entry.superseded == notice.superseded

    @invariant()
    def names_are_the_same(self) -> None:
        m = self.model
        live = [(ns, t.topic) for (ns, _), t in m.timers.items()]
        rows = self.core.topic_rows()
        assert [rows[i] for i in sorted(rows)] == [
            (t.namespace, t.name, t.incarnation, t.sequence, live.count((t.namespace, t.name)))
            for t in m.topics
        ]

    @invariant()
    def counters_are_the_same(self) -> None:
        m, metrics = self.model, self.core.metrics
        assert metrics.live == len(m.timers)
        assert metrics.live_wall == sum(t.wall_ns is not None for t in m.timers.values())
        armed = sum(t.granules(key) for (_, key), t in m.timers.items())
        assert metrics.blob_bytes == GRANULE * (armed + sum(n.granules for n in m.replay_buffer))
        table = self.core.rows(lib.PG_R_NAMESPACES, "pg_namespace")
        for i, ns in enumerate(m.namespaces):
            mine = [t.granules(key) for (n, key), t in m.timers.items() if n == ns]
            assert (table[i].live, table[i].bytes) == (len(mine), sum(mine) * GRANULE)

    @invariant()
    def next_wakeup_is_in_time(self) -> None:
        deadlines = [fires_ns(info) for info in self.core.scan()]
        if deadlines:
            earliest = min([FOREVER_NS, *map(self.model.tick_up, deadlines)])
            assert self.core.next_ns <= max(self.model.now_ns, earliest)
        elif not self.unfinished:
            assert self.core.next_ns == FOREVER_NS


def fires_ns(info: wire.Info) -> int:
    """Return the deadline of a timer, rounded up to a multiple of its slack."""
    slack_ns = max(info.within_ns, 1)
    return -(-info.deadline_ns // slack_ns) * slack_ns


def entry_granules(entry: Entry) -> int:
    return granules(len(entry.key) + len(entry.payload))


def os_bytes(size: int) -> bytes:
    return bytes(i * 7 % 256 for i in range(size))


def scribble(core: Core, seed: int) -> None:
    """Overwrite all derived state with garbage."""
    rng = random.Random(seed)
    for region in DERIVED:
        view = core.region(region)
        view[:] = rng.randbytes(len(view))
    hot = core.rows(lib.PG_R_HOT, "pg_hot")
    for i in range(core.config["capacity"] + 1):
        hot[i].where, hot[i].bucket = rng.getrandbits(32), rng.getrandbits(16)
    for i in range(core.config["topics"]):
        core.rows(lib.PG_R_TOPICS, "pg_topic")[i].live = rng.getrandbits(64)
    for i in range(core.config["namespaces"]):
        row = core.rows(lib.PG_R_NAMESPACES, "pg_namespace")[i]
        row.live, row.bytes = rng.getrandbits(64), rng.getrandbits(64)
    core.header.replay_bytes = rng.getrandbits(64)
    core.metrics.live = core.metrics.live_wall = core.metrics.blob_bytes = rng.getrandbits(64)


TestCore = pytest.mark.costly("200 programs of 40 random steps")(CoreMachine.TestCase)
TestCore.settings = effort(200, 5000)


# ---- single cases ----------------------------------------------------------------------------

MS = 1_000_000


def test_the_last_ticket_was_given_before_a_start() -> None:
    """After the start there is no next ticket to compare the last ticket with."""
    machine = CoreMachine()
    machine.begin(
        config={
            "tick_ns": 1000, "fanout": 2, "capacity": 8, "replay_capacity": 16,
            "replay_bytes_max": 64, "payload_bytes": 4096, "namespaces": 1, "topics": 1,
            "now_ns": 0, "wall_offset_ns": 0,
        },
        tickets_left=1,
    )  # fmt: skip
    machine.put_many(count=1, span=(0, 0, -1), spread=0)
    machine.rebuild(again=False, down=True, seed=0, span=(1, 0, -1))
    machine.finish(budget=1)
    machine.publish_everything(out_bytes=1 << 17, parts_max=1)
    machine.teardown()


def level(core: Core) -> int:
    """Return the level of the wheel that has the timer of the arena's first slot."""
    wheel = core.rows(lib.PG_R_WHEEL, "pg_wheel")
    return int(core.rows(lib.PG_R_HOT, "pg_hot")[0].bucket // wheel.ring)


@pytest.mark.parametrize(("ms", "coarsest"), [(445, 1), (8_445, 2), (160_445, 3)])
def test_a_timer_comes_down_level_by_level(ms: int, coarsest: int) -> None:
    core = Core(tick_ns=MS, fanout=20)
    core.put("k", ms * MS)
    levels = [level(core)]
    for now in range(1, ms):
        assert not core.advance(now * MS)
        if level(core) != levels[-1]:
            core.check()
            levels.append(level(core))
    assert levels == list(range(coarsest, -1, -1))
    assert core.header.replay_tail == 0
    assert core.next_ns == ms * MS
    assert not core.advance(ms * MS)
    assert [(e.key, e.deadline_ns, e.fired_ns) for e in core.entries()] == [
        (b"k", ms * MS, ms * MS)
    ]  # fmt: skip


@pytest.mark.parametrize("late", [1, 8])
def test_a_coarse_bucket_that_is_reached_late(late: int) -> None:
    core = Core(tick_ns=MS, fanout=20, capacity=20, replay_capacity=32)
    ticks = list(range(60, 80))  # all in one bucket of level 1
    for tick in ticks:
        core.put(f"{tick}", tick * MS)
    hot = core.rows(lib.PG_R_HOT, "pg_hot")
    assert {hot[i].bucket for i in range(20)} == {hot[0].bucket}
    assert level(core) == 1
    assert not core.advance((60 + late) * MS)
    core.check()
    due = [b"%d" % tick for tick in ticks if tick <= 60 + late]
    assert [e.key for e in core.entries()] == due
    assert sorted(i.deadline_ns for i in core.scan()) == [t * MS for t in ticks if t > 60 + late]
    for tick in ticks[len(due) :]:
        assert core.next_ns == tick * MS
        assert not core.advance(tick * MS)
        *_, newest = core.entries()
        assert (newest.key, newest.fired_ns) == (b"%d" % tick, tick * MS)


def test_every_chunk_of_the_wheel_may_be_in_use() -> None:
    """Each timer has its own bucket. Only the reserve chunk that a replacement needs stays free."""
    core = Core(capacity=30, tick_ns=MS, fanout=20, replay_capacity=32)
    free = ffi.cast("uint32_t *", ffi.from_buffer(core.region(lib.PG_R_FREE_CHUNKS)))
    for i in range(30):
        assert core.put(f"{i}", (i + 1) * MS).status == Status.ADDED
    core.check()
    assert free[0] == 1
    for i in range(30):
        answer = core.put(f"{i}", (31 + i) * MS, mode=PutMode.REPLACE)
        assert answer.status == Status.REPLACED
        core.check()
    for i in range(30):
        assert not core.advance((31 + i) * MS)
        core.check()
        assert core.header.replay_tail == i + 1
    assert free[0] == core.rows(lib.PG_R_WHEEL, "pg_wheel").chunk_count


def test_the_last_ticket() -> None:
    core = Core()
    core.header.next_ticket = TICKET_MAX
    assert core.put("a", MS) == (TICKET_MAX, Status.ADDED, MS)
    assert core.put("b", MS).status == Status.FULL_TICKETS
    assert core.put("a", MS, mode=PutMode.REPLACE).status == Status.FULL_TICKETS
    assert core.put("a", 2 * MS, mode=PutMode.EXTEND) == (TICKET_MAX, Status.EXTENDED, 2 * MS)
    core.check()
    assert core.cancel("a") == (TICKET_MAX, Status.CANCELLED, 2 * MS)


@pytest.mark.parametrize("now_ns", [0, 1, 10**18])
def test_too_far_is_exactly_past_the_end(now_ns: int) -> None:
    core = Core(now_ns=now_ns)
    assert core.put("a", FOREVER_NS - now_ns) == (1, Status.ADDED, FOREVER_NS)
    if now_ns:
        assert core.put("b", FOREVER_NS - now_ns + 1) == (0, Status.TOO_FAR, 0)
        assert core.put("b", FOREVER_NS).status == Status.TOO_FAR
    core.check()


def test_extend_never_moves_a_wall_deadline_back() -> None:
    """The new deadline is earlier by less than the wall clock has drifted, and the drift is too
    small to count as a step of the wall clock."""
    core = Core(wall_offset_ns=10**9)
    core.put("k", 10**10, TimeKind.WALL)
    core.advance(1, wall_offset_ns=10**9 - 500_000)
    answer = core.put("k", 10**10 - 200_000, TimeKind.WALL, mode=PutMode.EXTEND)
    assert answer.status == Status.KEPT
    assert core.get("k").wall_ns == 10**10


def test_a_delay_of_zero_is_due_though_the_clock_stands_still() -> None:
    core = Core(tick_ns=1_000_000, now_ns=1_500_001)
    core.advance(1_500_001)
    core.put("now", 0, TimeKind.DELAY)
    core.put("past", 1_200_000, TimeKind.BOOT)
    core.advance(1_500_001)
    assert core.metrics.live == 0
