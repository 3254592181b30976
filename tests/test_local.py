"""Delayed operations inside one process: each rule of the reference, interrupts, and races."""

from __future__ import annotations

import inspect
import itertools
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from interrupts import Interrupt, Interrupted, run
from public_names import public
from real_daemon import PATIENCE_S

from purgatoryd.clients import DelayedOperation, DelayedOperationPurgatory, local
from purgatoryd.shm_layout import wheel
from purgatoryd.shm_layout.errors import Closed, InvalidArgument

pytestmark = pytest.mark.tier("check")

SECOND_NS = 10**9


def nothing(*_: object) -> None:
    pass


class Op(DelayedOperation):
    """Completes if `ready` returns True; records its callbacks in order."""

    def __init__(
        self, ready: Callable[[], object] = lambda: False, timeout: float | timedelta = 1.0,
        on_complete: Callable[[Op], object] = nothing,
        on_expiration: Callable[[Op], object] = nothing,
    ) -> None:  # fmt: skip
        super().__init__(timeout)
        self.ready = ready
        self.calls: list[str] = []
        self.then = {"complete": on_complete, "expire": on_expiration}

    def try_complete(self) -> bool:
        self.calls.append("try")
        return bool(self.ready()) and self.force_complete()

    def on_complete(self) -> None:
        self.calls.append("complete")
        self.then["complete"](self)

    def on_expiration(self) -> None:
        self.calls.append("expire")
        self.then["expire"](self)

    @property
    def ends(self) -> list[str]:
        return [call for call in self.calls if call != "try"]


class Flag:
    """A condition that a test sets."""

    def __init__(self) -> None:
        self.up = False

    def __call__(self) -> bool:
        return self.up


class Time:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.ns = 5 * SECOND_NS

    def __call__(self) -> int:
        return self.ns

    def add(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND_NS)


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Let threads alternate far more often than usual."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before_s)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def errors() -> list[tuple[DelayedOperation, BaseException]]:
    return []


@pytest.fixture
def purgatory(
    time: Time, errors: list[tuple[DelayedOperation, BaseException]]
) -> Iterator[DelayedOperationPurgatory]:
    p = DelayedOperationPurgatory(
        "test", clock_ns=time, reaper=False, on_error=lambda *detail: errors.append(detail)
    )
    yield p
    p._wheel.check()
    p.shutdown()
    assert (p.watched, p.num_delayed) == (0, 0)


# ---- the reference's semantics ---------------------------------------------------------------


def test_an_operation_that_is_already_true_is_never_watched(
    purgatory: DelayedOperationPurgatory,
) -> None:
    op = Op(lambda: True)
    assert purgatory.try_complete_else_watch(op, ["k"])
    assert op.calls == ["try", "complete"]
    assert (purgatory.watched, purgatory.num_delayed) == (0, 0)
    assert purgatory.check_and_complete("k") == 0


def test_an_operation_is_tried_twice_for_any_number_of_keys(
    purgatory: DelayedOperationPurgatory,
) -> None:
    op = Op()
    assert not purgatory.try_complete_else_watch(op, list(range(100)))
    assert op.calls == ["try", "try"]
    assert (purgatory.watched, purgatory.num_delayed) == (100, 1)


def test_an_event_between_the_first_try_and_the_list_is_not_lost(
    purgatory: DelayedOperationPurgatory,
) -> None:
    """The condition becomes true after the first try, before the operation is on any key's list. So
    no check of the key finds the operation."""
    answers = iter([False, True])
    op = Op(lambda: next(answers))
    assert purgatory.try_complete_else_watch(op, ["a", "b"])
    assert op.calls == ["try", "try", "complete"]
    assert (purgatory.watched, purgatory.num_delayed) == (0, 0)


def test_an_event_during_a_try_is_not_lost(purgatory: DelayedOperationPurgatory) -> None:
    """A check of the key during a try leaves a trigger, so the operation is tried again."""
    flag = Flag()
    checked: list[int] = []

    def ready() -> bool:
        if len(op.calls) == 3:
            found, flag.up = flag.up, True
            checked.append(purgatory.check_and_complete("k"))
            return found
        return flag.up

    op = Op(ready)
    purgatory.try_complete_else_watch(op, ["k"])
    assert purgatory.check_and_complete("k") == 1
    assert checked == [0], "only the try in progress completes the operation"
    assert op.calls == ["try", "try", "try", "try", "complete"]


def test_check_returns_how_many_it_completed(purgatory: DelayedOperationPurgatory) -> None:
    flag = Flag()
    for n in range(3):
        purgatory.try_complete_else_watch(Op(flag), ["k", n])
    purgatory.try_complete_else_watch(Op(), ["k"])
    assert purgatory.check_and_complete("k") == 0
    flag.up = True
    assert purgatory.check_and_complete("unknown") == 0
    assert purgatory.check_and_complete(1) == 1
    assert purgatory.check_and_complete("k") == 2
    assert purgatory.check_and_complete("k") == 0


def test_completing_leaves_all_lists_and_the_wheel_at_once(
    purgatory: DelayedOperationPurgatory,
) -> None:
    ops = [Op() for _ in range(5000)]
    for n, op in enumerate(ops):
        purgatory.try_complete_else_watch(op, ["shared", ("own", n)])
    assert (purgatory.watched, purgatory.num_delayed) == (10_000, 5000)
    for left, op in enumerate(reversed(ops)):
        assert op.force_complete()
        assert (purgatory.watched, purgatory.num_delayed) == (9998 - 2 * left, 4999 - left)
    assert not purgatory._watchers, "the empty lists of the keys are removed"


def test_an_operation_completes_once_for_any_caller(
    purgatory: DelayedOperationPurgatory, time: Time
) -> None:
    flag = Flag()
    op = Op(flag)
    purgatory.try_complete_else_watch(op, ["k"])
    assert not op.completed
    assert op.force_complete()
    assert op.completed
    flag.up = True
    assert not op.force_complete()
    assert purgatory.check_and_complete("k") == 0
    time.add(2)
    assert purgatory.advance() == 0
    assert op.ends == ["complete"]


def test_a_completed_operation_is_not_watched(purgatory: DelayedOperationPurgatory) -> None:
    op = Op()
    op.force_complete()
    assert purgatory.try_complete_else_watch(op, ["k"])
    assert op.calls == ["complete"]
    assert purgatory.watched == 0


def test_expiry_completes_first_and_then_expires(
    purgatory: DelayedOperationPurgatory, time: Time
) -> None:
    op, later = Op(timeout=timedelta(milliseconds=200)), Op(timeout=0.3)
    purgatory.try_complete_else_watch(op, ["a", "b"])
    purgatory.try_complete_else_watch(later, ["a"])
    time.add(0.1999)
    assert purgatory.advance() == 0
    assert op.ends == [], "never early"
    time.add(0.0021)
    assert purgatory.advance() == 1
    assert op.ends == ["complete", "expire"]
    assert (purgatory.watched, purgatory.num_delayed) == (1, 1)


def test_expiry_tries_the_condition_once_more(
    purgatory: DelayedOperationPurgatory, time: Time
) -> None:
    """The condition became true without a check of the key. The operation completes late, and does
    not expire."""
    flag = Flag()
    op = Op(flag)
    purgatory.try_complete_else_watch(op, ["k"])
    flag.up = True
    time.add(2)
    assert purgatory.advance() == 1
    assert op.ends == ["complete"]
    assert purgatory.already_true == 1


@pytest.mark.parametrize("timeout", [0, -5, -(2**62)])
def test_a_timeout_of_nothing_is_due_at_once(
    purgatory: DelayedOperationPurgatory, timeout: float
) -> None:
    op = Op(timeout=max(timeout, -9e9))
    assert not purgatory.try_complete_else_watch(op, ["k"])
    assert purgatory.advance() == 1
    assert op.ends == ["complete", "expire"]


def test_huge_timeouts_wait_and_impossible_ones_are_refused(
    purgatory: DelayedOperationPurgatory, time: Time
) -> None:
    op = Op(timeout=9e9)
    purgatory.try_complete_else_watch(op, ["k"])
    time.add(8e9)
    assert purgatory.advance() == 0
    for bad in (float("nan"), float("inf"), 1e10, 2**63):
        with pytest.raises(InvalidArgument, match="timeout"):
            Op(timeout=bad)


def test_cancel_for_key_returns_the_incomplete_operations(
    purgatory: DelayedOperationPurgatory, time: Time
) -> None:
    ops = [Op() for _ in range(3)]
    for op, keys in zip(ops, (["k", "a"], ["k"], ["a"]), strict=True):
        purgatory.try_complete_else_watch(op, keys)
    assert purgatory.cancel_for_key("k") == ops[:2]
    assert purgatory.cancel_for_key("k") == []
    assert not any(op.completed for op in ops)
    assert (purgatory.watched, purgatory.num_delayed) == (1, 1)
    time.add(2)
    assert purgatory.advance() == 1, "cancelled operations have no armed timer"
    assert [op.ends for op in ops] == [[], [], ["complete", "expire"]]


def test_a_cancelled_operation_may_be_watched_again(
    purgatory: DelayedOperationPurgatory, time: Time
) -> None:
    op = Op()
    purgatory.try_complete_else_watch(op, ["k"])
    (same,) = purgatory.cancel_for_key("k")
    time.add(5)
    purgatory.try_complete_else_watch(same, ["other"])
    assert purgatory.advance() == 0, "the timeout starts again with the new watch"
    time.add(2)
    assert purgatory.advance() == 1


def test_a_watched_operation_is_refused(purgatory: DelayedOperationPurgatory) -> None:
    op = Op()
    purgatory.try_complete_else_watch(op, ["k"])
    with pytest.raises(InvalidArgument, match="watched already"):
        purgatory.try_complete_else_watch(op, ["k"])
    assert (purgatory.watched, purgatory.num_delayed) == (1, 1)


def test_keys_are_looked_at_before_anything_happens(
    purgatory: DelayedOperationPurgatory,
) -> None:
    op = Op()
    with pytest.raises(InvalidArgument, match="at least one key"):
        purgatory.try_complete_else_watch(op, [])
    with pytest.raises(InvalidArgument, match="collection of keys, not 'ab'"):
        purgatory.try_complete_else_watch(op, "ab")
    unhashable: Any = [["k"]]
    with pytest.raises(TypeError):
        purgatory.try_complete_else_watch(op, unhashable)
    assert op.calls == []
    purgatory.try_complete_else_watch(op, ["k", "k"])
    assert purgatory.watched == 1, "a repeated key is counted once"


@dataclass
class Produce(DelayedOperation):
    """An operation that is a dataclass: it compares by value and has no hash."""

    partition: int

    def __post_init__(self) -> None:
        super().__init__(timeout=1)
        self.over = 0

    def try_complete(self) -> bool:
        return False

    def on_complete(self) -> None:
        self.over += 1


def test_operations_that_are_equal_are_still_two(purgatory: DelayedOperationPurgatory) -> None:
    ops = [Produce(7), Produce(7)]
    for op in ops:
        purgatory.try_complete_else_watch(op, ["k"])
    assert purgatory.watched == 2
    ops[0].force_complete()
    assert [op.over for op in ops] == [1, 0]
    assert [op is ops[1] for op in purgatory.cancel_for_key("k")] == [True]


# ---- callbacks that throw ----------------------------------------------------------------------


def fails(_: object = None) -> bool:
    raise RuntimeError("on purpose")


def test_a_condition_that_raises_stops_no_other_operation(
    purgatory: DelayedOperationPurgatory, errors: list[tuple[DelayedOperation, BaseException]],
    time: Time,
) -> None:  # fmt: skip
    flag = Flag()
    ops = [Op(flag), Op(fails), Op(flag)]
    for op in ops:
        assert not purgatory.try_complete_else_watch(op, ["k"])
    flag.up = True
    assert purgatory.check_and_complete("k") == 2
    assert {id(op) for op, _ in errors} == {id(ops[1])}
    assert len(errors) == purgatory.errors == 3
    time.add(2)
    assert purgatory.advance() == 1, "the operation still times out"
    assert ops[1].ends == ["complete", "expire"]


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit])
def test_a_callback_that_raises_system_exit_stops_no_other_operation(
    purgatory: DelayedOperationPurgatory,
    errors: list[tuple[DelayedOperation, BaseException]],
    error: type[BaseException],
) -> None:
    def leave(_: object = None) -> bool:
        raise error

    flag = Flag()
    ops = [Op(flag, on_complete=leave), Op(leave), Op(flag)]
    for op in ops:
        assert not purgatory.try_complete_else_watch(op, ["k"])
    flag.up = True
    assert purgatory.check_and_complete("k") == 2
    assert [op.ends for op in ops] == [["complete"], [], ["complete"]]
    assert {type(detail) for _, detail in errors} == {error}
    assert ops[1].force_complete()


@pytest.mark.tier("test")
def test_an_interrupt_goes_through_and_leaves_the_operation_whole(
    purgatory: DelayedOperationPurgatory,
) -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt

    def end_and_interrupt() -> bool:
        ended.force_complete()
        raise KeyboardInterrupt

    op, ended = Op(), Op()
    for one, then in ((op, interrupt), (ended, end_and_interrupt)):
        purgatory.try_complete_else_watch(one, [id(one)])
        one.ready = then
        with pytest.raises(KeyboardInterrupt):
            purgatory.check_and_complete(id(one))
    assert (op.ends, ended.ends) == ([], ["complete"])
    op.ready = lambda: True
    assert purgatory.check_and_complete(id(op)) == 1
    assert op.ends == ["complete"]


def test_completion_that_throws_is_reported_and_not_repeated(
    purgatory: DelayedOperationPurgatory, errors: list[tuple[DelayedOperation, BaseException]],
    time: Time,
) -> None:  # fmt: skip
    ops = [Op(on_complete=fails, on_expiration=fails), Op()]
    for op in ops:
        purgatory.try_complete_else_watch(op, ["k"])
    time.add(2)
    assert purgatory.advance() == 2
    assert [op.ends for op in ops] == [["complete", "expire"]] * 2
    assert [str(error) for _, error in errors] == ["on purpose"] * 2
    assert not ops[0].force_complete()


def test_an_error_handler_that_throws_is_logged(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    p = DelayedOperationPurgatory(
        "bad", clock_ns=time, reaper=False, on_error=lambda op, error: print(fails())
    )
    op = Op(on_complete=fails)
    p.try_complete_else_watch(op, ["k"])
    with caplog.at_level(logging.ERROR, "purgatoryd"):
        assert op.force_complete()
    assert "error handler of purgatory 'bad'" in caplog.text
    p.shutdown()


def test_errors_are_logged_when_nobody_takes_them(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    p = DelayedOperationPurgatory("plain", clock_ns=time, reaper=False)
    with caplog.at_level(logging.ERROR, "purgatoryd"):
        p.try_complete_else_watch(Op(fails), ["k"])
    assert "on purpose" in caplog.text
    p.shutdown()


# ---- callbacks that use the purgatory ------------------------------------------------------------


def test_operations_complete_one_another(purgatory: DelayedOperationPurgatory) -> None:
    """Each operation of a ring completes the next one. The ring is longer than Python's stack."""
    ops: list[Op] = []
    for _ in range(3000):
        ops.append(Op(on_complete=lambda op: ops[(ops.index(op) + 1) % 3000].force_complete()))
        purgatory.try_complete_else_watch(ops[-1], ["k"])
    assert ops[0].force_complete()
    assert all(op.ends == ["complete"] for op in ops)


def test_a_callback_checks_the_key_that_completed_it(
    purgatory: DelayedOperationPurgatory,
) -> None:
    flag = Flag()
    ops = [Op(flag, on_complete=lambda _: purgatory.check_and_complete("k")) for _ in range(50)]
    for op in ops:
        purgatory.try_complete_else_watch(op, ["k"])
    flag.up = True
    purgatory.check_and_complete("k")
    assert all(op.ends == ["complete"] for op in ops)


def test_a_callback_may_watch_again(purgatory: DelayedOperationPurgatory, time: Time) -> None:
    """Each operation that expires watches a new operation on the same key."""
    ops: list[Op] = []

    def again(_: object) -> None:
        ops.append(Op(on_expiration=again))
        purgatory.try_complete_else_watch(ops[-1], ["k"])

    again(None)
    for _ in range(5):
        time.add(1.5)
        assert purgatory.advance() == 1
    assert [op.ends for op in ops] == [["complete", "expire"]] * 5 + [[]]
    assert purgatory.watched == 1


def test_a_condition_may_cancel_other_operations(purgatory: DelayedOperationPurgatory) -> None:
    victim = Op()
    purgatory.try_complete_else_watch(victim, ["v"])
    op = Op(lambda: purgatory.cancel_for_key("v"))
    assert purgatory.try_complete_else_watch(op, ["k"])
    assert victim.ends == []


def test_a_condition_may_cancel_its_own_key(
    purgatory: DelayedOperationPurgatory, time: Time
) -> None:
    taken: list[DelayedOperation] = []
    op = Op(lambda: taken.extend(purgatory.cancel_for_key("k")))
    assert not purgatory.try_complete_else_watch(op, ["k"])
    assert taken == [op]
    assert (purgatory.watched, purgatory.num_delayed) == (0, 0), (
        "a cancelled operation has no timer"
    )


# ---- shutdown ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "ends"),
    [("complete", ["complete"]), ("expire", ["complete", "expire"]), ("return", [])],
)
def test_shutdown_ends_the_remaining_operations(time: Time, ending: Any, ends: list[str]) -> None:
    p = DelayedOperationPurgatory("end", clock_ns=time, reaper=False)
    ops = [Op() for _ in range(3)]
    for n, op in enumerate(ops):
        p.try_complete_else_watch(op, ["k", n])
    assert p.shutdown(ending) == ops
    assert [op.ends for op in ops] == [ends] * 3
    assert (p.watched, p.num_delayed) == (0, 0)
    assert p.shutdown(ending) == []
    with pytest.raises(Closed, match="end"):
        p.try_complete_else_watch(Op(), ["k"])
    time.add(5)
    assert p.advance() == 0


def test_operations_that_a_shutdown_returned_may_be_watched_elsewhere(
    purgatory: DelayedOperationPurgatory, time: Time
) -> None:
    old = DelayedOperationPurgatory("old", clock_ns=time, reaper=False)
    op = Op()
    old.try_complete_else_watch(op, ["k"])
    for left in old.shutdown():
        purgatory.try_complete_else_watch(left, ["k"])
    time.add(2)
    assert purgatory.advance() == 1


def test_errors_at_shutdown_are_reported(
    time: Time, errors: list[tuple[DelayedOperation, BaseException]]
) -> None:
    p = DelayedOperationPurgatory(
        "end", clock_ns=time, reaper=False, on_error=lambda *detail: errors.append(detail)
    )
    for _ in range(2):
        p.try_complete_else_watch(Op(on_complete=fails), ["k"])
    assert len(p.shutdown("complete")) == len(errors) == p.errors == 2


def test_a_wrong_ending_changes_nothing(purgatory: DelayedOperationPurgatory) -> None:
    wrong: Any = "explode"
    with pytest.raises(InvalidArgument, match="explode"):
        purgatory.shutdown(wrong)
    purgatory.try_complete_else_watch(Op(), ["k"])


def test_a_shutdown_during_a_watch_loses_no_operation(time: Time) -> None:
    """The shutdown comes after the first try and before the operation is on a list. The watch is
    refused."""
    p = DelayedOperationPurgatory("end", clock_ns=time, reaper=False)
    op = Op(lambda: p.shutdown("expire"))
    with pytest.raises(Closed):
        p.try_complete_else_watch(op, ["k"])
    assert op.ends == []
    assert (p.watched, p.num_delayed) == (0, 0)


def test_shutdown_from_a_callback(time: Time) -> None:
    p = DelayedOperationPurgatory("end", clock_ns=time, reaper=False)
    others = [Op(timeout=9) for _ in range(3)]
    first = Op(timeout=1, on_expiration=lambda _: p.shutdown("complete"))
    for op in (first, *others):
        p.try_complete_else_watch(op, ["k"])
    time.add(1.5)
    assert p.advance() == 1
    assert [op.ends for op in (first, *others)] == [["complete", "expire"], *[["complete"]] * 3]


# ---- threads ------------------------------------------------------------------------------------


def test_the_reaper_expires_by_itself_and_may_be_shut_down_from_its_own_callback() -> None:
    over = threading.Event()
    p = DelayedOperationPurgatory("real")

    def end(_: object) -> None:
        p.shutdown("expire")
        over.set()

    late = Op(timeout=3600)
    p.try_complete_else_watch(late, ["k"])
    p.try_complete_else_watch(Op(timeout=0.01, on_expiration=end), ["k"])
    assert over.wait(PATIENCE_S)
    assert late.ends == ["complete", "expire"]
    assert p._thread is not None
    p._thread.join(PATIENCE_S)
    assert not p._thread.is_alive()


def test_the_reaper_survives_a_callback_that_raises_system_exit() -> None:
    over = threading.Event()
    p = DelayedOperationPurgatory("real", on_error=nothing)

    def leave(_: object) -> None:
        raise SystemExit

    p.try_complete_else_watch(Op(timeout=0, on_complete=leave), ["k"])
    p.try_complete_else_watch(Op(timeout=0.01, on_complete=lambda _: over.set()), ["k"])
    assert over.wait(PATIENCE_S)
    p.shutdown()
    assert p.errors == 1


def test_the_reaper_notices_time_that_passed_without_it(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps forward as after a suspend. While a machine is suspended, the timeout of a
    waiting thread does not run down."""
    monkeypatch.setattr(local, "NAP_MAX_S", 0.01)
    over = threading.Event()
    p = DelayedOperationPurgatory("real", clock_ns=time)
    op = Op(timeout=3600, on_expiration=lambda _: over.set())
    p.try_complete_else_watch(op, ["k"])
    assert not over.wait(0.05)
    time.add(3600.1)
    assert over.wait(PATIENCE_S)
    p.shutdown()


# ---- interrupts --------------------------------------------------------------------------------

FILES = (str(Path(inspect.getfile(local))), str(Path(inspect.getfile(wheel))))


class Scene:
    """Six operations on the keys "a" and "b". end() ends the operations that an interrupted call
    has left."""

    def __init__(self, *, watched: bool = True) -> None:
        self.time, self.flag = Time(), Flag()
        self.purgatory = DelayedOperationPurgatory("scene", clock_ns=self.time, reaper=False)
        self.ops = [Op(self.flag, timeout=1 + n % 2) for n in range(6)]
        self.taken: list[DelayedOperation] = []
        """Operations that a call has returned or reported as cancelled."""
        for op in self.ops if watched else ():
            self.watch(op)

    def watch(self, op: DelayedOperation) -> bool:
        return self.purgatory.try_complete_else_watch(op, ["a", "b"])

    def end(self) -> None:
        """Let all watched operations time out; then watch all others, and let them time out."""
        self.time.add(10)
        self.purgatory.advance()
        again = DelayedOperationPurgatory("again", clock_ns=self.time, reaper=False)
        self.flag.up = False
        for op in self.ops:
            if not op.completed:
                assert op in self.taken, "an operation is neither ended, nor watched, nor returned"
                again.try_complete_else_watch(op, ["c"])
        self.time.add(10)
        again.advance()

    def check(self) -> None:
        """Check that each operation has ended once, and that the purgatory is empty."""
        assert {tuple(op.ends) for op in self.ops} <= {("complete",), ("complete", "expire")}
        assert self.purgatory.watched == self.purgatory.num_delayed == 0
        self.purgatory._wheel.check()


def watch_one(scene: Scene) -> None:
    op = scene.ops[0]
    if not op.completed and op._purgatory is None:
        scene.watch(op)


def watch_true_one(scene: Scene) -> None:
    scene.flag.up = True
    watch_one(scene)


def watch_one_that_becomes_true(scene: Scene) -> None:
    scene.ops[0].ready = lambda: "try" in scene.ops[0].calls[:-1]
    watch_one(scene)


def complete_key(scene: Scene) -> None:
    scene.flag.up = True
    scene.purgatory.check_and_complete("a")


def force(scene: Scene) -> None:
    scene.ops[0].force_complete()


def force_in_a_chain(scene: Scene) -> None:
    for op, other in itertools.pairwise(scene.ops):
        op.then["complete"] = lambda _, other=other: other.force_complete()  # type: ignore[misc]
    scene.ops[0].force_complete()


def force_while_it_is_tried(scene: Scene) -> None:
    scene.ops[0].ready = lambda: scene.ops[1].force_complete() and False
    scene.purgatory.check_and_complete("b")


def take_out(scene: Scene) -> None:
    scene.taken += scene.purgatory.cancel_for_key("a")


def expire(scene: Scene) -> None:
    scene.time.add(1.5)
    scene.purgatory.advance()


def expire_true_ones(scene: Scene) -> None:
    scene.flag.up = True
    expire(scene)


def end_all(scene: Scene, ending: Any) -> None:
    left = scene.purgatory.shutdown(ending)
    scene.taken += left if ending == "return" else []


def sizes(scene: Scene) -> None:
    assert scene.purgatory.watched <= 12
    assert scene.purgatory.num_delayed <= 6


SCENES: dict[str, tuple[str, Callable[[Scene], object]]] = {
    "watch": ("try_complete_else_watch", watch_one),
    "watch what is true": ("try_complete_else_watch", watch_true_one),
    "watch what becomes true": ("try_complete_else_watch", watch_one_that_becomes_true),
    "complete a key": ("check_and_complete", complete_key),
    "force": ("force_complete", force),
    "force in a chain": ("force_complete", force_in_a_chain),
    "force while another is tried": ("force_complete", force_while_it_is_tried),
    "take out": ("cancel_for_key", take_out),
    "expire": ("advance", expire),
    "expire what is true": ("advance", expire_true_ones),
    "shutdown, return": ("shutdown", partial(end_all, ending="return")),
    "shutdown, complete": ("shutdown", partial(end_all, ending="complete")),
    "shutdown, expire": ("shutdown", partial(end_all, ending="expire")),
    "sizes": ("watched", sizes),
}


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("repeated", [False, True])
def test_an_interrupted_call_completes_each_operation_once(name: str, *, repeated: bool) -> None:
    _, call = SCENES[name]
    for number in itertools.count():
        scene = Scene(watched=not name.startswith("watch"))
        with Interrupt(number, FILES) as interrupt:
            try:
                call(scene)
            except Interrupted as error:
                scene.taken += getattr(error, "handle", [])
        if not interrupt.raised:
            assert number > 3
            return
        if repeated:
            call(scene)
        for op in scene.ops:
            if op._purgatory is None and not op.completed and op not in scene.taken:
                assert name.startswith("watch"), "an operation was cancelled, but not returned"
                scene.taken.append(op)
        scene.end()
        scene.check()


@pytest.mark.tier("test")
def test_an_interrupted_constructor_of_a_purgatory_leaves_no_lock() -> None:
    for number in itertools.count():
        made = None
        with Interrupt(number, FILES) as interrupt, suppress(Interrupted):
            made = DelayedOperationPurgatory("real")
        if made is not None:
            made.shutdown()
        if not interrupt.raised:
            return


@pytest.mark.tier("test")
def test_every_call_of_a_purgatory_is_interrupted() -> None:
    calls = {call for call, _ in SCENES.values()}
    assert public(DelayedOperationPurgatory) <= calls
    assert public(DelayedOperation) - calls == {"try_complete", "on_complete", "on_expiration"}


@pytest.mark.tier("test")
def test_an_interrupted_try_loses_no_trigger_of_another_thread() -> None:
    """The other thread checks the key while the interrupted thread tries the operation."""
    purgatory = DelayedOperationPurgatory("real", reaper=False)
    flag = Flag()

    def ready() -> bool:
        if not flag.up:
            flag.up = True
            other = threading.Thread(target=purgatory.check_and_complete, args=("k",))
            other.start()
            other.join(PATIENCE_S)
            raise KeyboardInterrupt
        return True

    op = Op()
    purgatory.try_complete_else_watch(op, ["k"])
    op.ready = ready
    with pytest.raises(KeyboardInterrupt):
        purgatory.check_and_complete("k")
    assert op.ends == ["complete"]


@pytest.mark.tier("test")
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_callback_prevents_no_other_callback(*, late: bool) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    time = Time()
    purgatory = DelayedOperationPurgatory("real", clock_ns=time, reaper=False)
    first, second = Op(), Op()
    first.then["expire" if late else "complete"] = interrupt
    for op in (first, second):
        purgatory.try_complete_else_watch(op, ["k"])
    time.add(2)
    with pytest.raises(KeyboardInterrupt):
        purgatory.advance()
    purgatory.advance()
    assert first.ends == second.ends == ["complete", "expire"]


STORM = """
import random, signal
from purgatoryd.clients import DelayedOperation, DelayedOperationPurgatory

class Alarm(KeyboardInterrupt): pass

def ring(*_):
    raise Alarm

class Op(DelayedOperation):
    def __init__(self, timeout):
        super().__init__(timeout)
        self.up, self.ends = False, 0
    def try_complete(self):
        return self.up and self.force_complete()
    def on_complete(self):
        self.ends += 1

signal.signal(signal.SIGALRM, ring)
random.seed(5)
purgatory, interrupts, ops, cut_off = DelayedOperationPurgatory("storm"), 0, [], set()

def shaken(call):
    global interrupts
    try:
        signal.setitimer(signal.ITIMER_REAL, random.random() * 0.00006 + 1e-6)
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, ())  # runs a handler that Python put off
    except Alarm as error:
        interrupts += 1
        trace = error.__traceback__
        while trace is not None:  # the signal may have come within a callback, even before its work
            if trace.tb_frame.f_code.co_name == "on_complete":
                cut_off.add(trace.tb_frame.f_locals["self"])
            trace = trace.tb_next
        for op in getattr(error, "handle", ()):
            purgatory.try_complete_else_watch(op, ["again"])
    signal.setitimer(signal.ITIMER_REAL, 0)

def cancel(key):
    for op in purgatory.cancel_for_key(key):
        op.force_complete()

for n in range(20_000):
    op = Op(random.choice((0, 0.001, 0.5)))
    ops.append(op)
    shaken(lambda: purgatory.try_complete_else_watch(op, [n % 7, n % 5]))
    if n % 3 == 0:
        for other in ops[-30:]:
            other.up = True
        shaken(lambda: purgatory.check_and_complete(n % 7))
    elif n % 3 == 1:
        shaken(op.force_complete)
    elif n % 10 == 0:
        shaken(lambda: cancel(n % 5))
for op in ops:
    if not op.completed and op._purgatory is None:
        op.force_complete()
purgatory.shutdown("complete")
ends = {op.ends for op in ops if op not in cut_off}
print(interrupts > 1000, ends, {op.ends for op in cut_off} <= {0, 1}, purgatory.watched)
"""


@pytest.mark.tier("test")
def test_a_storm_of_signals_loses_no_completion() -> None:
    assert run(STORM) == "True {1} True 0\n"


# ---- races -------------------------------------------------------------------------------------


def run_all(work: Callable[[int], object], threads: int = 8) -> None:
    """Run `work(n)` in threads that start together, and raise their failures."""
    failures: list[BaseException] = []
    start = threading.Barrier(threads)

    def run(n: int) -> None:
        start.wait(PATIENCE_S)
        try:
            work(n)
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert not failures, failures


class Countdown(DelayedOperation):
    """Completes at the last of `left` arrivals. Counts calls of its methods that overlap."""

    def __init__(self, left: int, timeout: float = 3600) -> None:
        super().__init__(timeout)
        self.left = left
        self.completions = self.expirations = self.overlaps = 0
        self._count = threading.Lock()
        self._inside = threading.Lock()

    def arrive(self) -> None:
        with self._count:
            self.left -= 1

    def _alone(self) -> bool:
        if not self._inside.acquire(blocking=False):
            self.overlaps += 1
            return False
        self._inside.release()
        return True

    def try_complete(self) -> bool:
        if not self._inside.acquire(blocking=False):
            self.overlaps += 1
            return False
        try:
            for _ in range(20):  # lets other threads run
                threading.get_ident()
            return self.left <= 0 and self.force_complete()
        finally:
            self._inside.release()

    def on_complete(self) -> None:
        self._alone()
        self.completions += 1

    def on_expiration(self) -> None:
        self._alone()
        self.expirations += 1


@pytest.mark.usefixtures("many_switches")
def test_all_complete_at_the_last_of_many_random_attempts() -> None:
    """If a race lost a trigger, an operation would never end, because nothing tries it after the
    last arrival."""
    threads, per_thread = 8, 40
    p = DelayedOperationPurgatory("races")
    ops = [Countdown(threads * per_thread) for _ in range(25)]
    keys = [[("own", n), ("half", n % 5), "all"][: 1 + n % 3] for n in range(len(ops))]
    completed = [0] * threads

    def attempt(thread: int) -> None:
        rng = random.Random(thread)
        for step in range(per_thread):
            order = list(range(len(ops)))
            rng.shuffle(order)
            for n in order:
                if step == 0 and n % threads == thread:
                    p.try_complete_else_watch(ops[n], keys[n])
                ops[n].arrive()
                completed[thread] += p.check_and_complete(rng.choice(keys[n]))

    run_all(attempt, threads)
    assert [op.completions for op in ops] == [1] * len(ops)
    assert [op.expirations for op in ops] == [0] * len(ops)
    assert [op.overlaps for op in ops] == [0] * len(ops)
    assert sum(completed) <= len(ops)
    assert (p.watched, p.num_delayed) == (0, 0)
    p._wheel.check()
    p.shutdown()


@pytest.mark.usefixtures("many_switches")
def test_expiry_and_completion_race_and_one_of_them_wins() -> None:
    p = DelayedOperationPurgatory("races")
    rng = random.Random(1)
    ops = [Countdown(1, rng.uniform(0, 0.05)) for _ in range(2000)]
    won = [0] * 4

    def race(thread: int) -> None:
        mine = range(thread, len(ops), 4)
        for n in mine:
            p.try_complete_else_watch(ops[n], [n, "all"])
        for n in mine:
            won[thread] += ops[n].force_complete()

    run_all(race, 4)
    left = p.shutdown("expire")
    assert all(op.completed for op in ops)
    assert [op.completions for op in ops] == [1] * len(ops)
    expired = sum(op.expirations for op in ops)
    assert sum(won) + expired == len(ops)
    assert not any(op.overlaps for op in ops)
    assert not left, "an operation was neither completed nor expired"


@pytest.mark.usefixtures("many_switches")
def test_cancel_for_key_and_completion_race() -> None:
    """The thread that cancels an operation watches it again on another key."""
    p = DelayedOperationPurgatory("races")
    ops = [Countdown(1) for _ in range(400)]

    def fight(thread: int) -> None:
        rng = random.Random(thread)
        for n in range(thread, len(ops), 4):
            p.try_complete_else_watch(ops[n], [n % 10])
        for _ in range(60):
            for op in p.cancel_for_key(rng.randrange(10)):
                p.try_complete_else_watch(op, [rng.randrange(10)])
        for n in range(thread, len(ops), 4):
            ops[n].arrive()
        for key in range(10):
            p.check_and_complete(key)

    run_all(fight, 4)
    for key in range(10):
        p.check_and_complete(key)
    assert [op.completions for op in ops] == [1] * len(ops)
    assert (p.watched, p.num_delayed) == (0, 0)
    p.shutdown()


@pytest.mark.usefixtures("many_switches")
def test_shutdown_and_watch_race() -> None:
    """Each watch was refused, or its operation has ended, so no operation is lost."""
    p = DelayedOperationPurgatory("races")
    ops = [[Countdown(1) for _ in range(300)] for _ in range(4)]
    refused = [0] * 4
    half = threading.Event()

    def watch(thread: int) -> None:
        for n, op in enumerate(ops[thread]):
            if thread == 0 and n == 150:
                half.set()
            try:
                p.try_complete_else_watch(op, ["k", n])
            except Closed:
                refused[thread] += 1

    def work(thread: int) -> None:
        if thread < 4:
            watch(thread)
        else:
            assert half.wait(PATIENCE_S)
            p.shutdown("complete")

    run_all(work, 5)
    ended = sum(op.completions for some in ops for op in some)
    assert ended + sum(refused) == 1200
    assert (p.watched, p.num_delayed) == (0, 0)
