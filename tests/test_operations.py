"""The owner's book of operations, without a daemon: what comes before, after and twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from purgatoryd.clients import Operation, When
from purgatoryd.clients.conditions import encode
from purgatoryd.clients.operations import Book
from purgatoryd.clients.packing import PendingCount
from purgatoryd.shm_layout.layout import Cause, Status
from purgatoryd.shm_layout.wire import RawOutcome

TICKET, SLOT, VERSION = 7, 3, 2


@pytest.fixture
def book() -> Book:
    return Book(lambda: None)


def operation(condition: Callable[[], object]) -> Operation:
    when = When(condition, ["k"])
    return Operation("w", encode(when), when)


def added() -> PendingCount:
    pending = PendingCount("w", None)
    pending.word, pending.done = TICKET << 8 | Status.ADDED, True
    return pending


def outcome_of(cause: int) -> RawOutcome:
    watermarks = () if cause == 0 else (0,)
    version = VERSION if cause == 0 else 0
    return RawOutcome(TICKET, cause, 9, 4, 5, version, 0, SLOT, "w", b"", watermarks, (), ())


@pytest.mark.parametrize("holds", [False, True])
def test_a_check_before_the_watchs_answer_is_answered_after_it(book: Book, holds: bool) -> None:
    """With a WAL the answer waits for the disk, and the CHECK does not."""
    op = operation(lambda: holds)
    book.expect()
    book.take([outcome_of(0)])
    book.work()
    assert (book.acks(), book.completions()) == ([], [])
    book.armed(op, added())
    book.work()
    assert book.completions() == ([(op, VERSION)] if holds else [])
    assert book.acks() == ([] if holds else [(TICKET, VERSION, SLOT)])
    book.take([outcome_of(Cause.SATISFIED)])
    book.work()
    assert op.result(0).cause == "satisfied"
    assert book.open == 0


def test_an_outcome_before_the_watchs_answer_takes_the_place_of_a_check(book: Book) -> None:
    asked: list[None] = []
    op = operation(lambda: asked.append(None))
    book.expect()
    book.take([outcome_of(0), outcome_of(Cause.EXPIRED)])
    book.armed(op, added())
    book.work()
    assert op.result(0).cause == "expired"
    assert (asked, book.open, book.acks()) == ([], 0, [(TICKET, 0, SLOT)])


def test_a_check_of_what_nobody_waits_for_is_passed_over(book: Book) -> None:
    book.take([outcome_of(0)])
    book.work()
    assert (book.acks(), book.completions(), book.open) == ([], [], 0)
