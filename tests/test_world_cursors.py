"""The judge of cursors in simulated worlds (tests/world/cursors.py), and their seeds."""

from __future__ import annotations

from enum import EnumType

import pytest
from product_imports import product_imports
from world import cursors
from world.cursors import CursorOracle, Holder
from world.oracle import Sent, Violation
from world.runs import run
from world.script import READING, script

pytestmark = pytest.mark.tier("check")

STREAM, LATER = 7, 8


class Arena:
    """A judge, and the present stream."""

    def __init__(self) -> None:
        self.stream = STREAM
        self.judge = CursorOracle(lambda: self.stream)
        self.cursor = self.judge.cursor("c", None)
        self.numbers = 0

    def begin(self, **positions: int) -> Holder:
        """Let a process open the cursor. `positions`: those in the answer."""
        self.numbers += 1
        holder = self.judge.begins(self.cursor, self.numbers)
        self.judge.opened(holder, positions, self.judge.cuts)
        self.judge.sees(holder, self.stream)
        return holder

    def take(self, holder: Holder, *sequences: int, topic: str = "a") -> None:
        """Let a process receive notices."""
        for sequence in sequences:
            self.judge.received(holder, self.stream, topic, sequence, sent(sequence))

    def publish(self, *sequences: int) -> None:
        """Let the daemon send notices."""
        for sequence in sequences:
            self.judge.published((self.stream, "a", sequence), sent(sequence))

    def commit(self, holder: Holder, sequence: int, *, durable: bool = False) -> None:
        """Let a process commit, and get the answer."""
        positions = {"a": sequence}
        self.judge.committing(holder, positions)
        self.judge.committed(holder, positions, self.judge.cuts, durable=durable)

    def end(self, holder: Holder) -> None:
        """End a process."""
        self.judge.ended(holder, 0)

    def lose(self, *, wal: bool, carried: int = 0) -> None:
        """Lose the arena, and begin another stream."""
        self.judge.arena_lost(wal=wal)
        self.stream = LATER
        self.judge.begins_stream({"a": carried})


def sent(sequence: int) -> Sent:
    return Sent(sequence, "k", b"p%d" % sequence, 0, 0, 1)


def test_a_process_begins_after_the_committed_notices() -> None:
    arena = Arena()
    first = arena.begin()
    arena.take(first, 1, 2, 3)
    arena.commit(first, 3)
    arena.take(first, 4)
    arena.end(first)
    for positions in ({"a": 2}, {"a": 4}, {}):
        with pytest.raises(Violation, match="has the position"):
            arena.begin(**positions)
        arena.end(arena.cursor.holders[-1])
    second = arena.begin(a=3)
    for sequence in (3, 5):
        with pytest.raises(Violation, match="but 4 comes next"):
            arena.take(second, sequence)
    arena.take(second, 4)


def test_a_commit_without_an_answer_allows_both_positions() -> None:
    for position in (0, 2):
        arena = Arena()
        first = arena.begin()
        arena.take(first, 1, 2)
        arena.judge.committing(first, {"a": 2})
        arena.end(first)
        arena.take(arena.begin(a=position), position + 1)
    arena = Arena()
    first = arena.begin()
    arena.take(first, 1, 2)
    arena.judge.committing(first, {"a": 2})
    arena.end(first)
    with pytest.raises(Violation, match="only 2 was committed"):
        arena.begin(a=3)


def test_a_commit_covers_what_was_handed_out() -> None:
    arena = Arena()
    first = arena.begin()
    arena.take(first, 1, 2)
    for sequence in (1, 3):
        with pytest.raises(Violation, match="but 2 was handed out"):
            arena.judge.committing(first, {"a": sequence})


def test_notices_come_in_order_and_as_they_were_sent() -> None:
    arena = Arena()
    first = arena.begin()
    arena.publish(1, 2, 3)
    arena.take(first, 1)
    with pytest.raises(Violation, match="but 2 comes next"):
        arena.take(first, 3)
    with pytest.raises(Violation, match="sent was"):
        arena.judge.received(first, STREAM, "a", 2, sent(1))
    arena.take(first, 2, 3, 4)
    with pytest.raises(Violation, match="was received, but not sent"):
        arena.judge.finish(first)
    with pytest.raises(Violation, match="was read as"):
        arena.judge.published((STREAM, "a", 4), sent(1))


def test_a_loss_is_reported_with_its_range_and_only_if_no_notice_exists() -> None:
    arena = Arena()
    first = arena.begin()
    arena.take(first, 1)

    def lose(begin: int, end: int, exists: int | None = None) -> None:
        arena.judge.lagged(first, STREAM, "a", begin, end, lambda *_: exists)

    with pytest.raises(Violation, match="but 2 comes next"):
        lose(3, 5)
    with pytest.raises(Violation, match="but 4 exists"):
        lose(2, 5, exists=4)
    with pytest.raises(Violation, match="end of a stream"):
        lose(2, 0)
    lose(2, 5)
    arena.take(first, 6)


def test_one_process_at_a_time_has_the_cursor() -> None:
    arena = Arena()
    first = arena.begin()
    second = arena.judge.begins(arena.cursor, 2)
    arena.judge.held(second, 100, 10)
    third = arena.judge.begins(arena.judge.cursor("d", None), 3)
    with pytest.raises(Violation, match="nobody has it"):
        arena.judge.held(third, 100, 10)
    with pytest.raises(Violation, match="holds it"):
        arena.judge.opened(second, {}, 0)
    arena.judge.released(first)
    arena.judge.opened(second, {}, 0)
    with pytest.raises(Violation, match="holds it"):
        arena.commit(first, 0)
    arena.judge.leaving(second)
    arena.commit(first, 0)


def test_a_notice_that_is_not_committed_is_safe_while_the_replay_buffer_has_space() -> None:
    arena = Arena()

    def safe(oldest: int = 1) -> list[bool]:
        return [arena.judge.is_safe(arena.cursor, "a", n, oldest) for n in (1, 2, 3)]

    for sequence in (1, 2, 3):
        arena.judge.published((STREAM, "a", sequence), sent(sequence), 10 + sequence)
        if sequence == 2:
            arena.cursor.exists = True
            arena.judge.all_committed()
    assert safe(12) == [False, True, True]
    arena.lose(wal=True)
    assert safe() == [True, True, False]
    arena.cursor.durable = False
    arena.lose(wal=True)
    assert safe() == [False] * 3


@pytest.mark.parametrize("durable", [True, False])
def test_a_power_cut_undoes_only_what_was_not_committed(*, durable: bool) -> None:
    arena = Arena()
    first = arena.begin()
    arena.take(first, 1)
    arena.commit(first, 1)
    arena.judge.all_committed()
    arena.take(first, 2, 3)
    arena.commit(first, 3, durable=durable)
    arena.lose(wal=True, carried=3)
    arena.judge.sees(first, LATER)
    for sequence in (1, 5):
        with pytest.raises(Violation, match="continues with"):
            arena.take(first, sequence)
    if durable:
        with pytest.raises(Violation, match="continues with"):
            arena.take(first, 2)
        arena.take(first, 4)
    else:
        arena.take(first, 2, 3)
    arena.end(first)
    with pytest.raises(Violation, match="has the position"):
        arena.begin(a=2 if durable else 0)


def test_a_loss_of_the_arena_without_a_wal_ends_the_cursor() -> None:
    arena = Arena()
    first = arena.begin()
    arena.take(first, 1)
    arena.commit(first, 1)
    arena.lose(wal=False)
    arena.judge.lagged(first, LATER, "a", 2, 0, lambda *_: None)
    arena.take(first, 1)
    arena.judge.committing(first, {"a": 1})
    arena.judge.unknown(first, {"a": 1}, arena.judge.cuts)
    arena.end(first)
    arena.begin(a=1)


def test_a_refused_commit_needs_a_reason() -> None:
    arena = Arena()
    first = arena.begin()
    arena.take(first, 1)
    arena.judge.committing(first, {"a": 1})
    with pytest.raises(Violation, match="the cursor was lost"):
        arena.judge.unknown(first, {"a": 1}, 0)
    arena.judge.committing(first, {"a": 1})
    with pytest.raises(Violation, match="of another stream"):
        arena.judge.stale(first, {"a": 1}, STREAM)
    arena.judge.committing(first, {"a": 1})
    arena.judge.stale(first, {"a": 1}, LATER)


def test_the_last_process_receives_all_notices() -> None:
    arena = Arena()
    arena.publish(1, 2)
    first = arena.begin()
    arena.take(first, 1)
    assert not arena.judge.caught_up(first)
    with pytest.raises(Violation, match="has not received"):
        arena.judge.finish(first)
    arena.take(first, 2)
    arena.judge.finish(first)


def test_the_judge_imports_only_constants() -> None:
    assert all(isinstance(value, EnumType) for value in product_imports(cursors).values())


def test_steps_of_readers_leave_the_other_steps_as_they_are() -> None:
    seed = next(seed for seed in range(1, 60) if script(seed).setting.readers)
    whole = script(seed)
    assert {step.kind for step in whole.steps} >= {*READING}


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", [8, 24, 85, 1023])  # each of these worlds has cursors
def test_no_notice_is_skipped_and_no_commit_is_lost_in_a_world(seed: int) -> None:
    chosen = script(seed)
    assert chosen.setting.readers
    assert run(chosen).failure is None
