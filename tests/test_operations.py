"""Book, the owner's table of operations, without a daemon: early, late and repeated messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from purgatoryd.clients import Closed, InvalidArgument, Operation, When
from purgatoryd.clients.conditions import encode
from purgatoryd.clients.operations import Book
from purgatoryd.clients.packing import PendingCount
from purgatoryd.clients.purgatory import ERROR_MAX, check_error
from purgatoryd.clients.session import Session
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import SessionExpired
from purgatoryd.shm_layout.layout import Cause, Status
from purgatoryd.shm_layout.wire import RawOutcome

pytestmark = pytest.mark.tier("check")

TICKET, SLOT, VERSION = 7, 3, 2


@pytest.fixture
def book() -> Book:
    return Book(lambda: None)


def operation(condition: Callable[[], object]) -> Operation:
    when = When(condition, ["k"])
    return Operation("w", encode(when), when)


def added(ticket: int = TICKET) -> PendingCount:
    pending = PendingCount("w", None)
    pending.word, pending.done = ticket << 8 | Status.ADDED, True
    return pending


def acks_of(book: Book) -> list[tuple[int, ...]]:
    return list(wire.ACK.iter_unpack(book.acks()))


def outcome_of(cause: int, ticket: int = TICKET) -> RawOutcome:
    watermarks = () if cause == 0 else (0,)
    version = VERSION if cause == 0 else 0
    return RawOutcome(ticket, cause, 9, 4, 5, version, 0, SLOT, "w", b"", watermarks, (), ())


@pytest.mark.parametrize("holds", [False, True])
def test_a_check_before_the_watchs_answer_is_answered_after_it(book: Book, holds: bool) -> None:
    """With a WAL, the answer to a watch waits for the disk. A CHECK does not wait, so it can come
    before the answer."""
    op = operation(lambda: holds)
    book.expect(op)
    book.take([outcome_of(0)])
    book.work()
    assert (acks_of(book), book.completions()) == ([], [])
    book.armed(op, added())
    book.work()
    assert book.completions() == ([(op, VERSION)] if holds else [])
    assert acks_of(book) == ([] if holds else [(TICKET, VERSION, SLOT)])
    book.take([outcome_of(Cause.SATISFIED)])
    book.work()
    assert op.result(0).cause == "satisfied"
    assert book.open == 0


def test_an_outcome_before_the_watchs_answer_takes_the_place_of_a_check(book: Book) -> None:
    asked: list[None] = []
    op = operation(lambda: asked.append(None))
    book.expect(op)
    book.take([outcome_of(0), outcome_of(Cause.EXPIRED)])
    book.armed(op, added())
    book.work()
    assert op.result(0).cause == "expired"
    assert (asked, book.open, acks_of(book)) == ([], 0, [(TICKET, 0, SLOT)])


def test_a_check_after_an_outcome_does_not_take_its_place(book: Book) -> None:
    op = operation(lambda: True)
    book.expect(op)
    book.take([outcome_of(Cause.EXPIRED), outcome_of(0)])
    book.armed(op, added())
    book.work()
    assert op.result(0).cause == "expired"
    assert book.open == 0


def test_the_first_end_of_an_operation_counts_and_it_answers_no_check(book: Book) -> None:
    op = operation(lambda: True)
    book.expect(op)
    book.armed(op, added())
    book.take([outcome_of(0)])
    first = SessionExpired(session=1, in_doubt=0)
    op._store(None, first)  # another thread has received the outcome
    op._store(None, SessionExpired(session=2, in_doubt=0))
    book.work()
    assert (book.completions(), acks_of(book)) == ([], [])
    with pytest.raises(SessionExpired) as raised:
        op.result(0)
    assert raised.value is first


def test_a_check_of_an_unknown_operation_is_ignored(book: Book) -> None:
    book.take([outcome_of(0)])
    book.work()
    assert (acks_of(book), book.completions(), book.open) == ([], [], 0)


# ---- an owner that resumes the session of an earlier process -----------------------------------
# In these tests all times are equal, as under a virtual clock that stands still. So times cannot
# tell the processes' operations apart, as after a reboot of a remote daemon.


@pytest.fixture
def resumed(book: Book) -> list[int]:
    """Error codes of the outcomes of the earlier process, as the callback received them."""
    found: list[int] = []
    session = Session(lambda count: bytes(count))
    session.original = True
    book.resume(session, lambda key, outcome: found.append(outcome.error))
    return found


def test_tickets_tell_the_operations_of_an_earlier_process(book: Book, resumed: list[int]) -> None:
    op = operation(lambda: False)
    book.take([outcome_of(Cause.EXPIRED, TICKET - 2)])
    book.expect(op)
    book.armed(op, added())
    book.take([outcome_of(Cause.EXPIRED, TICKET - 1), outcome_of(Cause.EXPIRED)])
    # the daemon repeats the outcomes
    book.take([outcome_of(Cause.EXPIRED, TICKET - 1), outcome_of(Cause.EXPIRED)])
    book.work()
    assert (len(resumed), op.result(0).cause) == (2, "expired")
    assert [ticket for ticket, _, _ in acks_of(book)] == [5, 6, 7, 6, 7]


def test_an_ambiguous_outcome_waits_for_the_answers(book: Book, resumed: list[int]) -> None:
    first, second = operation(lambda: False), operation(lambda: False)
    book.expect(first)
    book.expect(second)
    book.armed(second, added(TICKET + 1))  # the first watch's answer was lost and comes later
    outcomes = [outcome_of(Cause.EXPIRED, TICKET - 1), outcome_of(Cause.EXPIRED)]
    book.take(outcomes)
    book.work()
    assert (resumed, acks_of(book), first.done) == ([], [], False)
    book.armed(first, added())
    book.take(outcomes)
    book.work()
    assert (len(resumed), first.done, second.done) == (1, True, False)


def test_a_check_that_comes_before_the_answer_is_answered_or_released(
    book: Book, resumed: list[int]
) -> None:
    op = operation(lambda: True)
    book.expect(op)
    book.take([outcome_of(0, TICKET - 1), outcome_of(0)])
    book.armed(op, added())
    book.work()
    assert book.completions() == [(op, VERSION)]
    assert acks_of(book) == [(TICKET - 1, VERSION, SLOT)]


def test_codes_of_errors_begin_at_1() -> None:
    assert [check_error(code) for code in (1, ERROR_MAX)] == [1, ERROR_MAX]
    for code in (0, ERROR_MAX + 1):
        with pytest.raises(InvalidArgument):
            check_error(code)


def test_only_the_first_end_of_an_operation_counts() -> None:
    called: list[Operation] = []
    op = operation(lambda: False)
    op.add_done_callback(called.append)
    for error in (InvalidArgument("first"), Closed("client")):
        op._store(None, error)
        op._call_back()
    with pytest.raises(InvalidArgument, match="first"):
        op.result(0)
    assert called == [op]
