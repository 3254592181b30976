"""Cursors in the core: positions after a kill, a migration and a redo, and refused messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from core_driver import Entry
from effort import effort
from hypothesis import given
from hypothesis import strategies as st
from purgatory_driver import Owner, Purgatory
from wal_driver import Redo, Snapshot, Wal

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import CursorAction, CursorRefusal, WireError
from purgatoryd.shm_layout.wire import CursorName, Reply

pytestmark = pytest.mark.tier("check")

SECOND_NS = 10**9
BILLING = CursorName(b"n", b"billing")
CONFIG: dict[str, Any] = {
    "cursors": 8, "replay_capacity": 32, "wal_buffer_bytes": lib.PG_WAL_BUFFER_MIN, "topics": 8,
}  # fmt: skip
Positions = dict[str, tuple[int, int]]


def ask(
    owner: Owner, action: CursorAction, topics: Positions | None = None,
    name: CursorName = BILLING, **about: Any,
) -> Reply:  # fmt: skip
    message = wire.encode_cursor(1, owner.id, name, action, topics or {}, **about)
    return wire.decode_reply(owner.core.send(message, uid=owner.uid))


def opened(owner: Owner, **about: Any) -> Positions:
    reply = ask(owner, CursorAction.OPEN, every_topic=True, **about)
    assert not reply.error, reply.refusal()
    return wire.decode_cursor(reply.body, reply.records)


def committed(owner: Owner, topics: Positions, **about: Any) -> Reply:
    about = {"stream_id": int(owner.core.header.stream_id)} | about
    return ask(owner, CursorAction.COMMIT, topics, **about)


class Row(NamedTuple):
    """A row of the table: (name of the cursor, row of the topic, incarnation, sequence)."""

    cursor: bytes
    topic: int
    incarnation: int
    sequence: int


def rows(core: Purgatory) -> set[Row]:
    return set(_rows(core))


def _rows(core: Purgatory) -> Iterator[Row]:
    table = core.rows(lib.PG_R_CURSORS, "pg_cursor")
    for i in range(core.header.regions[lib.PG_R_CURSORS].count):
        head = table[table[i].cursor] if table[i].state == lib.PG_CURSOR_POSITION else table[i]
        if table[i].state:
            name = bytes(ffi.buffer(head.name, head.name_len))
            yield Row(name, table[i].topic, table[i].incarnation, table[i].sequence)


def fire(core: Purgatory, topic: str, numbers: Iterator[int]) -> None:
    core.put(b"key %d" % next(numbers), 0, topic=topic.encode(), payload=b"payload" * 3)
    core.advance(core.now_ns + SECOND_NS)
    core.publish_all()


def newest(core: Purgatory, topic: str) -> tuple[int, int]:
    row = lib.pg_find_topic(core.a, 0, topic.encode(), len(topic))
    t = core.rows(lib.PG_R_TOPICS, "pg_topic")[row]
    return int(t.incarnation), int(t.sequence)


def sent(core: Purgatory) -> dict[int, Entry]:
    return {entry.position: entry for entry in core.entries()}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fire", "commit", "open", "delete", "snapshot"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 3),
    ),
    max_size=60,
)


@effort(60, 1000)
@given(STEPS)
def test_positions_and_uncommitted_notices_are_the_same_after_any_recovery(
    steps: list[tuple[str, str, int]],
) -> None:
    core, numbers = Purgatory(**CONFIG), itertools.count()
    wal, owner = Wal(core), Owner(core)
    core.put(b"first", SECOND_NS, topic=b"a")
    snapshot = Snapshot(core).finish().data
    for step, topic, back in steps:
        if step == "fire":
            fire(core, topic, numbers)
        elif step == "open":
            opened(owner)
        elif step == "delete":
            assert not ask(owner, CursorAction.DELETE).error
        elif step == "snapshot":
            snapshot = Snapshot(core).finish().data
        elif lib.pg_find_topic(core.a, 0, topic.encode(), 1) != lib.PG_NIL:
            incarnation, sequence = newest(core, topic)
            committed(owner, {topic: (incarnation, max(sequence - back, 0))})
        core.check()
    wal.take()
    before, entries = rows(core), sent(core)
    oldest = int(lib.pg_cursors_oldest(core.a, core.header.published))
    redo = Redo(snapshot, sessions=3)
    redo.frames(snapshot)
    redo.frames(wal.data)
    redone = redo.end(core.now_ns)
    redone.check()
    assert rows(redone) == before
    restored = sent(redone)
    assert all(restored[position] == entries[position] for position in restored)
    assert range(oldest, core.header.replay_tail) == range(
        max(oldest, min(restored, default=core.header.replay_tail)), core.header.replay_tail
    )
    assert rows(core.migrated(cursors=9)) == before
    core.restart()
    assert rows(core) == before


def test_a_kill_between_cursor_and_positions_leaves_no_position() -> None:
    core = Purgatory(**CONFIG)
    owner, numbers = Owner(core), itertools.count()
    fire(core, "a", numbers)
    opened(owner)
    table = core.rows(lib.PG_R_CURSORS, "pg_cursor")
    table[0].state = lib.PG_CURSOR_FREE  # a deletion that was killed after its first store
    core.restart()
    assert rows(core) == set()
    assert core.metrics.cursor_rows == 0


def test_only_the_holder_may_commit_and_delete() -> None:
    core = Purgatory(**CONFIG)
    first, second = Owner(core, 1), Owner(core, 2)
    fire(core, "a", itertools.count())
    positions = opened(first)
    for refused in (
        ask(second, CursorAction.OPEN, every_topic=True), committed(second, positions),
        ask(second, CursorAction.DELETE),
    ):  # fmt: skip
        assert (refused.error, refused.detail) == (WireError.CURSOR, (CursorRefusal.HELD, 1))
    assert not ask(second, CursorAction.CLOSE).error  # releases only a cursor of its own
    assert not committed(first, positions).error
    assert not ask(first, CursorAction.CLOSE).error
    assert opened(second) == positions
    assert core.metrics.refused_cursors == 3


def test_a_commit_without_a_holder_holds_the_cursor() -> None:
    core = Purgatory(**CONFIG)
    first, second = Owner(core, 1), Owner(core, 2)
    fire(core, "a", itertools.count())
    positions = opened(first)
    assert not ask(first, CursorAction.CLOSE).error
    assert not committed(second, positions).error
    assert committed(first, positions).detail[0] == CursorRefusal.HELD


def test_a_position_never_moves_back() -> None:
    core, numbers = Purgatory(**CONFIG), itertools.count()
    owner = Owner(core)
    opened(owner)
    for _ in range(5):
        fire(core, "a", numbers)
    incarnation, _ = newest(core, "a")
    for sequence in (4, 2, 4):
        assert not committed(owner, {"a": (incarnation, sequence)}).error
        assert opened(owner) == {"a": (incarnation, 4)}


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"stream_id": 5}, CursorRefusal.STALE),
        ({"sequence": 4}, CursorRefusal.STALE),
        ({"incarnation": 77}, CursorRefusal.STALE),
        ({"topic": "unknown"}, CursorRefusal.STALE),
        ({"name": CursorName(b"n", b"other")}, CursorRefusal.UNKNOWN),
        ({"name": CursorName(b"nobody", b"billing")}, CursorRefusal.UNKNOWN),
    ],
)
def test_a_commit_of_another_stream_or_cursor_changes_nothing(
    about: dict[str, Any], reason: CursorRefusal
) -> None:
    core, numbers = Purgatory(**CONFIG), itertools.count()
    owner = Owner(core)
    opened(owner)
    for _ in range(3):
        fire(core, "a", numbers)
    before, (incarnation, sequence) = rows(core), newest(core, "a")
    position = about.pop("incarnation", incarnation), about.pop("sequence", sequence)
    reply = committed(owner, {about.pop("topic", "a"): position}, **about)
    assert (reply.error, reply.detail[0]) == (WireError.CURSOR, reason)
    assert rows(core) == before


def test_a_full_table_of_cursors_changes_nothing() -> None:
    core, numbers = Purgatory(**CONFIG | {"cursors": 2}), itertools.count()
    owner = Owner(core)
    opened(owner)
    for topic in ("a", "b"):
        fire(core, topic, numbers)
    assert not committed(owner, {"a": newest(core, "a")}).error
    before = rows(core)
    for reply in (
        committed(owner, {"b": newest(core, "b")}),
        ask(owner, CursorAction.OPEN, name=CursorName(b"n", b"more")),
    ):
        assert reply.detail == (CursorRefusal.FULL, 2)
    assert rows(core) == before
    core.check()


def test_a_uid_may_use_its_share_of_the_rows() -> None:
    core = Purgatory(**CONFIG)
    lib.pg_set_uid_share(core.a, 25, 0)
    owner = Owner(core)
    for name in (b"one", b"two"):
        assert not ask(owner, CursorAction.OPEN, name=CursorName(b"n", name)).error
    assert ask(owner, CursorAction.OPEN, name=CursorName(b"n", b"three")).error == WireError.QUOTA
    assert not ask(Owner(core, 2, 77), CursorAction.OPEN, name=CursorName(b"n", b"4")).error


WRONG = {
    "an action that does not exist": lambda ask: ask[:8] + b"\x04" + ask[9:],
    "a cursor without a name": lambda ask: ask[:13] + b"\0" + ask[14:-7],
    "a name that is too long": lambda ask: ask[:13] + b"\x40" + ask[14:] + b"x" * 57,
    "a namespace without a name": lambda ask: ask[:12] + b"\0" + ask[13:16] + ask[17:],
    "bytes that are missing": lambda ask: ask[:-1],
    "bytes that are left": lambda ask: ask + b"x",
    "a stream that OPEN does not use": lambda ask: b"\x01" + ask[1:],
    "a name with a NUL": lambda ask: ask[:-1] + b"\0",
    "all topics, twice": lambda ask: ask[:14] + b"\x02" + ask[15:],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_malformed_cursor_message_changes_nothing(wrong: str) -> None:
    core = Purgatory(**CONFIG)
    owner = Owner(core)
    message = wire.encode_cursor(1, owner.id, BILLING, CursorAction.OPEN, {})
    head, body = message[: wire.FRAME.size], message[wire.FRAME.size :]
    reply = wire.decode_reply(core.send(head + WRONG[wrong](body), uid=owner.uid))
    assert reply.error == WireError.MALFORMED
    assert rows(core) == set()


def test_topics_of_a_cursor_message_are_bounded() -> None:
    core = Purgatory(**CONFIG)
    owner = Owner(core)
    many = {f"t{n}": (0, 0) for n in range(lib.PG_CURSOR_TOPICS + 1)}
    reply = ask(owner, CursorAction.OPEN, many)
    assert (reply.error, reply.detail) == (WireError.TOO_LARGE, (len(many) - 1, len(many)))


def test_a_listed_topic_without_a_row_is_refused() -> None:
    core = Purgatory(**CONFIG | {"topics": 2})
    owner = Owner(core)
    reply = ask(owner, CursorAction.OPEN, dict.fromkeys("abc", (0, 0)))
    assert (reply.error, reply.detail) == (WireError.CURSOR, (CursorRefusal.TOPICS, 2))
    assert core.metrics.refused_cursors == 1
    assert "raise --topics" in str(reply.refusal())


@pytest.mark.parametrize(("namespace", "topic"), [(b"_n", "a"), (b"n", "_a")])
def test_a_cursor_creates_no_reserved_name(namespace: bytes, topic: str) -> None:
    core = Purgatory(**CONFIG)
    owner = Owner(core)
    name = BILLING._replace(namespace=namespace)
    reply = ask(owner, CursorAction.OPEN, {topic: (0, 0)}, name)
    assert reply.error == WireError.DENIED
    assert lib.pg_topic_fill(core.a).used == 0


def test_a_listed_topic_is_created_and_begins_with_its_first_notice() -> None:
    core, numbers = Purgatory(**CONFIG), itertools.count()
    owner = Owner(core)
    fire(core, "old", numbers)
    reply = ask(owner, CursorAction.OPEN, dict.fromkeys(("old", "new"), (0, 0)))
    found = wire.decode_cursor(reply.body, reply.records)
    assert found == {"old": newest(core, "old"), "new": newest(core, "new")}
    fire(core, "new", numbers)
    again = ask(owner, CursorAction.OPEN, dict.fromkeys(("old", "new"), (0, 0)))
    assert wire.decode_cursor(again.body, again.records) == found


def test_a_durable_commit_needs_a_wal() -> None:
    core = Purgatory(**CONFIG | {"wal_buffer_bytes": 0})
    reply = ask(Owner(core), CursorAction.OPEN, durable=True)
    assert reply.error == WireError.NO_WAL
