"""The purgatory of one process: its calls against a plain model, limits, callbacks, threads, fork,
and interrupts."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import pytest
from interrupts import Interrupt, Interrupted
from public_names import public
from real_daemon import PATIENCE_S

from purgatoryd.clients import (
    AllOf,
    AnyOf,
    CallTimeout,
    Cause,
    Closed,
    DuplicateWatchKey,
    Exists,
    ForkedProcess,
    Full,
    InvalidArgument,
    InvalidCondition,
    InvalidKey,
    LocalPurgatory,
    Operation,
    Outcome,
    Quorum,
    Status,
    SumOf,
    Watch,
    WatermarkOverflow,
    When,
)
from purgatoryd.clients.conditions import AnyCondition
from purgatoryd.clients.locked import locked

pytestmark = pytest.mark.tier("check")

HOUR_S = 3600.0
MS = 1_000_000


class Time:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.ns = 5 * 10**9

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def p() -> Iterator[LocalPurgatory]:
    with LocalPurgatory() as purgatory:
        yield purgatory
        if not purgatory._core.fork_guard.closed:
            check(purgatory)


def check(p: LocalPurgatory) -> None:
    """Check every invariant of the core."""
    locked(p._core._mutex, p._core.arena.check)


def iterate(p: LocalPurgatory) -> None:
    """Expire what is due, at once."""
    locked(p._core._mutex, p._core._land)


def columns(rows: int, **others: Any) -> dict[str, Any]:
    numbers = np.arange(rows).astype("U")
    given = {
        "key": np.char.add("op:", numbers), "watch_key": np.char.add("key:", numbers),
        "timeout": np.full(rows, HOUR_S),
    }  # fmt: skip
    return given | others


# ---- calls ---------------------------------------------------------------------------------


def test_an_operation_ends_by_its_condition_its_deadline_or_a_cancel(p: LocalPurgatory) -> None:
    write = p.watch("write", AllOf({"a": 2, "b": 1}), HOUR_S, payload=b"17")
    assert (p.advance("a", 2), p.advance("b", 0), write.done) == (0, 0, False)
    assert (p.bump("b"), write.done, p.operations) == (1, True, 0)
    assert write.result(0).cause == "satisfied"
    assert write.result(0).watermarks == {"a": 2, "b": 1}
    late = p.watch("late", AllOf({"never": 1}), timedelta(seconds=0.01))
    assert (late.result(PATIENCE_S).cause, late.result().missing) == ("expired", ["never"])
    gone = p.watch("gone", AllOf({"never": 1}), HOUR_S)
    assert (gone.cancel(), gone.cancel(), gone.result(0).cause) == (True, False, "cancelled")


def test_all_triggers(p: LocalPurgatory) -> None:
    first, second = (p.watch(key, AllOf({"k": 9}), HOUR_S) for key in ("one", "two"))
    assert p.fail("k", 7) == 2
    assert (first.result(0).cause, second.result(0).error) == ("failed", 7)
    assert (p.clear("k"), p.clear("unknown"), p.forget("k"), p.forget("k")) == (
        True, False, True, False,
    )  # fmt: skip
    for number in range(3000):
        p.watch(f"many:{number}", AnyOf({"k": 1, "other": 1}), HOUR_S)
    assert sorted(p.cancel_for_key("k")) == sorted(f"many:{number}" for number in range(3000))
    assert (p.operations, p.cancel_for_key("k")) == (0, [])
    with pytest.raises(WatermarkOverflow):
        p.bump("k", 2**63 - 1) or p.bump("k", 1)


def test_extend_moves_the_deadline(p: LocalPurgatory) -> None:
    operation = p.watch("o", AllOf({"k": 1}), 0.05)
    assert operation.extend(HOUR_S)
    with pytest.raises(CallTimeout):
        operation.result(0.2)
    assert (p.advance("k", 1), operation.extend(1.0)) == (1, False)


def test_rows_are_refused_one_by_one(p: LocalPurgatory) -> None:
    rows: list[Any] = [
        ("a", AllOf({"k": 1}), 9.0), Watch("a", AllOf({"k": 1}), 9.0, b"p"),
        ["b", When(int, ["k"]), 9],
    ]  # fmt: skip
    one, two, three = p.watch_many(rows)
    with pytest.raises(Exists):
        two.result(0)
    assert p.advance_many([("k", 1), ("l", 1)]) == [1, 0]
    assert (one.result(0).cause, three.done) == ("satisfied", False)
    with pytest.raises(DuplicateWatchKey):
        p.watch("c", Quorum(["k", "k"], need=1), 1.0)


def test_columns_are_those_of_a_client(p: LocalPurgatory) -> None:
    operations = p.watch_many(columns(3000, own=np.arange(3000) % 2 == 0))
    assert (operations.open, p.operations, operations.refused) == (3000, 3000, [])
    again = p.watch_many(columns(2))
    assert again.refused == [(0, Status.EXISTS), (1, Status.EXISTS)]
    again.wait(0)
    seen: list[int] = []
    operations.add_done_callback(lambda _, rows: seen.extend(rows.tolist()))
    counts = p.advance_many({"key": columns(3000)["watch_key"], "watermark": np.full(3000, 4)})
    assert (counts.tolist(), p.operations) == ([1] * 3000, 0)
    operations.wait(PATIENCE_S)
    assert (operations.causes == Cause.SATISFIED).all()
    ended = operations[7]
    assert ended is not None
    assert (ended.cause, ended.watermarks) == ("satisfied", {"key:7": 4})
    p.close()
    assert sorted(seen) == list(range(3000))


def test_columns_expire(p: LocalPurgatory) -> None:
    operations = p.watch_many(columns(100, timeout=np.linspace(0.0, 0.02, 100)))
    operations.wait(PATIENCE_S)
    assert (operations.causes == Cause.EXPIRED).all()
    waited_ns = operations.ended_boot_ns - operations.armed_boot_ns
    assert (waited_ns[1:] >= 0).all()


def test_a_condition_in_python_runs_whenever_a_key_rises(p: LocalPurgatory) -> None:
    shelf: set[str] = set()
    order = p.watch("order", When(lambda: {"book", "pen"} <= shelf, ["deliveries"]), HOUR_S)
    for thing in ("pen", "book"):
        assert not order.done
        shelf.add(thing)
        p.bump("deliveries")
    assert order.result(PATIENCE_S).cause == "satisfied"
    at_once = p.watch("at once", When(lambda: True, ["deliveries"]), 0)
    assert at_once.result(PATIENCE_S).cause == "satisfied"


def test_bad_arguments_change_nothing(p: LocalPurgatory) -> None:
    rows: list[Any] = [("a", AllOf({"k": 1}), 9.0), ("b", AllOf({}), 9.0)]
    for error, call in (
        (InvalidCondition, lambda: p.watch_many(rows)),
        (InvalidKey, lambda: p.watch("", AllOf({"k": 1}), 1.0)),
        (InvalidArgument, lambda: p.watch("k", AllOf({"k": 1}), float("nan"))),
        (InvalidArgument, lambda: p.watch("k", AllOf({"k": 1}), 1.0, callback=7)),  # type: ignore[arg-type]
        (InvalidArgument, lambda: p.advance_many([("k", -1)])),
        (InvalidArgument, lambda: p.advance("k", 2**63)),
        (InvalidArgument, lambda: p.fail("k", 0)),
        (InvalidKey, lambda: p.watch_many(columns(2, key=["a", ""]))),
        (InvalidArgument, lambda: p.watch_many(columns(2, topic=["a", "b"]))),
        (InvalidArgument, lambda: p.watch_many(7)),  # type: ignore[call-overload]
        (InvalidArgument, lambda: p.advance_many(7)),  # type: ignore[call-overload]
        (InvalidArgument, lambda: p.watch_many([("a", AllOf({"k": 1}), 9.0, b"", "topic")])),
    ):  # fmt: skip
        with pytest.raises(error):
            call()
    assert (p.operations, p.forget("k")) == (0, False)


# ---- limits --------------------------------------------------------------------------------


def small(**limits: int) -> LocalPurgatory:
    defaults: dict[str, Any] = {
        "capacity": 64,
        "watches": 128,
        "watch_keys": 128,
        "payload_memory": 1 << 17,
    }
    return LocalPurgatory(**{**defaults, **limits})


@pytest.mark.parametrize(
    ("limits", "resource", "allowed"),
    [
        ({"capacity": 4}, "slots", 4),
        ({"watches": 5}, "watch records", 2),
        ({"watch_keys": 5}, "watch keys", 2),
        ({"payload_memory": 1 << 12}, "space for key and payload", None),
    ],
)
def test_full_names_what_is_full(
    limits: dict[str, int], resource: str, allowed: int | None
) -> None:
    with small(**limits) as p:
        armed, error = 0, None
        while error is None:
            keys = {f"{armed}:{n}": 1 for n in range(2)}
            try:
                p.watch(f"o{armed}", AllOf(keys, own=keys), HOUR_S, payload=b"p" * 5000)
                armed += 1
            except Full as full:
                error = full
        assert (error.resource, armed) == (resource, allowed or armed)
        assert (p.operations, "of the LocalPurgatory" in str(error)) == (armed, True)
        check(p)
        for number in range(armed):  # an operation that ends frees its memory
            p.advance_many({f"{number}:{n}": 1 for n in range(2)})
        again = p.watch("o", AllOf({"k": 1}, own=["k"]), HOUR_S, payload=b"p" * 5000)
        assert (p.advance("k", 1), again.result(0).cause) == (1, "satisfied")
        check(p)


def test_operations_by_columns_are_refused_where_the_memory_ends() -> None:
    with small(capacity=10) as p:
        operations = p.watch_many(columns(12))
        assert operations.refused == [(10, Status.FULL), (11, Status.FULL)]
        assert operations.open == 10
        with pytest.raises(Full):
            raise_refusal(operations[11])


def raise_refusal(outcome: Outcome | None) -> None:
    assert outcome is None, "a refused row has no outcome"


def test_memory_does_not_grow() -> None:
    """The same limits are enough for any number of operations that have ended."""
    with small(capacity=100) as p:
        given = columns(100)
        for target in range(1, 200):
            operations = p.watch_many({**given, "target": np.full(100, target)})
            p.advance_many({"key": given["watch_key"], "watermark": np.full(100, target)})
            assert (operations.refused, operations.done) == ([], True)
        assert p._core._tickets.places <= 4096
        check(p)


def test_a_watch_key_is_forgotten_after_its_time() -> None:
    time = Time()
    with LocalPurgatory(capacity=4, watch_keys=4, watermark_ttl=10.0, clock_ns=time) as p:
        for number in range(4):
            p.advance(f"old:{number}", 1)
        with pytest.raises(Full):
            p.advance("new", 1)
        time.ns += 12 * 10**9
        p.advance("old:0", 2)
        p.advance_many([("old:0", 3)] * 8)  # each call looks at as many rows as it has records
        for number in range(3):
            p.advance(f"new:{number}", 1)


@pytest.mark.parametrize(
    "limits",
    [
        {"capacity": 0}, {"capacity": -1}, {"capacity": 2**40}, {"capacity": 1.5},
        {"watches": 0}, {"watch_keys": 0}, {"payload_memory": 0}, {"clock_ns": 7},
        {"watermark_ttl": float("nan")}, {"watermark_ttl": "x"},
    ],
)  # fmt: skip
def test_limits_out_of_bounds_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        LocalPurgatory(**limits)


def test_memory_that_the_kernel_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("purgatoryd.shm_layout.private_arena.mmap.mmap", refused)
    with pytest.raises(InvalidArgument, match=r"needs [\d,]+ bytes.*Cannot allocate memory"):
        LocalPurgatory()


# ---- callbacks -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_callback_that_raises_is_logged_and_stops_no_other(
    p: LocalPurgatory, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise error("broken callback")

    ended: list[Operation] = []
    operation = p.watch("o", AllOf({"k": 1}), HOUR_S, callback=broken)
    operation.add_done_callback(ended.append)
    asked = threading.Event()

    def condition_that_raises() -> None:
        asked.set()
        broken()

    condition = p.watch("c", When(condition_that_raises, ["k"]), HOUR_S)
    table = p.watch_many(columns(2))
    for callback in (broken, lambda *_: ended.append(operation)):
        table.add_done_callback(callback)
    assert asked.wait(PATIENCE_S)
    p.advance_many([("k", 1), ("key:0", 1), ("key:1", 1)])
    p.close()
    assert len(ended) >= 2
    assert {record.getMessage() for record in caplog.records} == {
        "callback of operation 'o' failed", "condition of operation 'c' failed",
        "callback of operations failed",
    }  # fmt: skip
    assert (operation.result(0).cause, table.done) == ("satisfied", True)
    with pytest.raises(Closed):
        condition.result(0)


def test_callbacks_may_make_calls(p: LocalPurgatory) -> None:
    """A chain of operations that end one another needs no deep stack."""
    last = 3 * sys.getrecursionlimit()
    done = threading.Event()

    def link(number: int, _: Operation) -> None:
        if number == last:
            done.set()
            return
        p.watch(f"o{number}", AllOf({"k": number}), HOUR_S, callback=partial(link, number + 1))
        assert p.advance("k", number) == 1

    p.watch("first", AllOf({"start": 1}), HOUR_S, callback=partial(link, 1))
    p.advance("start", 1)
    assert done.wait(PATIENCE_S)


def test_a_condition_may_make_calls(p: LocalPurgatory) -> None:
    def condition() -> bool:
        p.watch("inner", AllOf({"inner": 1}), HOUR_S)
        return list(p.advance_many({"key": ["inner", "x"], "watermark": [1, 1]})) == [1, 0]

    assert p.watch("o", When(condition, ["k"]), HOUR_S).result(PATIENCE_S).cause == "satisfied"


def test_a_callback_may_close_the_purgatory() -> None:
    p, ended = LocalPurgatory(), threading.Event()
    left = p.watch("left", AllOf({"never": 1}), HOUR_S, callback=lambda _: ended.set())
    p.watch("o", AllOf({"k": 1}), HOUR_S, callback=lambda _: p.close())
    p.advance("k", 1)
    assert ended.wait(PATIENCE_S)
    with pytest.raises(Closed):
        left.result(0)
    p.close()


def test_no_callback_runs_in_the_thread_of_a_call(p: LocalPurgatory) -> None:
    names: list[str] = []

    def note(*_: object) -> None:
        names.append(threading.current_thread().name)

    operations = [p.watch(f"o{n}", AllOf({"k": 1}), HOUR_S, callback=note) for n in range(3)]
    p.advance("k", 1)
    wait([operation.future() for operation in operations], PATIENCE_S)
    p.close()
    assert names == ["purgatoryd-local"] * 3


# ---- threads -------------------------------------------------------------------------------


def test_threads_share_a_purgatory(p: LocalPurgatory) -> None:
    """Each operation ends once, whichever thread ends it."""
    rounds, threads = 60, 4
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    ended: Counter[str] = Counter()
    counts = [0] * threads

    def note(operation: Operation) -> None:
        ended[str(operation.key)] += 1

    def work(thread: int) -> None:
        for number in range(rounds):
            key = f"{thread}:{number}"
            p.watch(key, AllOf({f"k{number}": 1}), HOUR_S, callback=note)
            counts[thread] += p.advance(f"k{number}", 1)
            given = columns(5, key=[f"{key}:{n}" for n in range(5)])
            table = p.watch_many({**given, "timeout": np.full(5, 0.001)})
            table.wait(PATIENCE_S)

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(4 * PATIENCE_S)
    finally:
        sys.setswitchinterval(before_s)
    p.close()
    assert ended == {f"{t}:{n}": 1 for t in range(threads) for n in range(rounds)}
    assert sum(counts) <= rounds * threads


def test_the_thread_notices_time_that_passed_without_it() -> None:
    """The clock of a sleep stops while the host is suspended."""
    time = Time()
    with LocalPurgatory(clock_ns=time) as p:
        operation = p.watch("o", AllOf({"k": 1}), 600.0)
        time.ns += 600 * 10**9 + 2 * MS
        assert operation.result(PATIENCE_S).cause == "expired"


def test_a_deadline_that_comes_first_wakes_the_thread(p: LocalPurgatory) -> None:
    p.watch("far", AllOf({"k": 1}), HOUR_S)
    begun_s = monotonic()
    near = p.watch("near", AllOf({"k": 1}), 0.02)
    assert near.result(PATIENCE_S).cause == "expired"
    assert monotonic() - begun_s >= 0.02


# ---- close, fork, collection -----------------------------------------------------------------


def test_closing_ends_what_is_left() -> None:
    ended: list[str] = []
    with LocalPurgatory() as p:
        operation = p.watch("o", AllOf({"k": 1}), HOUR_S, callback=lambda o: ended.append("o"))
        table = p.watch_many(columns(3))
        waiter = threading.Thread(target=lambda: ended.append(type(caught(table.wait)).__name__))
        waiter.start()
    waiter.join(PATIENCE_S)
    assert sorted(ended) == ["Closed", "o"]
    assert isinstance(caught(operation.result), Closed)
    for call in (
        partial(p.watch, "o", AllOf({"k": 1}), 1.0), partial(p.watch_many, columns(2)),
        partial(p.advance, "k", 1), partial(p.advance_many, {"key": ["k"], "watermark": [1]}),
        partial(p.cancel_for_key, "k"), operation.cancel, partial(operation.extend, 1.0),
    ):  # fmt: skip
        assert isinstance(caught(call), Closed)
    p.close()
    assert (p.operations, table.done) == (0, True)


def caught(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as error:  # noqa: PT011
        call()
    return error.value


def test_a_child_of_a_fork_cannot_use_the_purgatory(p: LocalPurgatory) -> None:
    operation = p.watch("o", AllOf({"k": 1}), HOUR_S)
    child = os.fork()
    if child == 0:
        errors = [caught(partial(p.advance, "k", 1)), caught(partial(p.watch_many, columns(1)))]
        p.close()
        os._exit(0 if all(isinstance(error, ForkedProcess) for error in errors) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (p.advance("k", 1), operation.result(0).cause) == (1, "satisfied")


def test_an_unused_purgatory_ends_its_thread() -> None:
    p = LocalPurgatory()
    p.watch("o", AllOf({"k": 1}), HOUR_S)
    p.advance("k", 1)
    thread, gone = p._thread, weakref.ref(p)
    del p
    gc.collect()
    thread.join(PATIENCE_S)
    assert (gone(), thread.is_alive()) == (None, False)


# ---- interrupts ------------------------------------------------------------------------------

CALLS: dict[str, Callable[[LocalPurgatory], object]] = {
    "watch": lambda p: p.watch("new", AllOf({"a": 3}), HOUR_S),
    "watch_many": lambda p: p.watch_many([("new", AllOf({"a": 3}), HOUR_S)]),
    "watch_many columns": lambda p: p.watch_many(
        {"key": ["new"], "watch_key": ["a"], "target": [3], "timeout": [HOUR_S]}
    ),
    "advance": lambda p: p.advance("a", 1),
    "advance_many": lambda p: p.advance_many([("a", 1), ("b", 1)]),
    "advance_many columns": lambda p: p.advance_many({"key": ["a", "b"], "watermark": [1, 1]}),
    "bump": lambda p: p.bump("a"),
    "fail": lambda p: p.fail("a", 7),
    "clear": lambda p: p.clear("a"),
    "forget": lambda p: p.forget("a"),
    "cancel_for_key": lambda p: p.cancel_for_key("a"),
    "close": lambda p: p.close(),
}
NEITHER_SEND_NOR_WAIT = {"operations", "memory"}


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_has_its_whole_effect_or_none(name: str) -> None:
    for number in itertools.count():
        p = LocalPurgatory(capacity=64)
        row = p.watch("row", AllOf({"a": 1}), HOUR_S)
        table = p.watch_many({"key": ["column"], "watch_key": ["a"], "timeout": [HOUR_S]})
        found, error = None, None
        with Interrupt(number) as interrupt:
            try:
                found = CALLS[name](p)
            except Interrupted as raised:
                error = raised
        if name != "close":
            new = found if error is None else getattr(error, "handle", None)
            agree(p, name, row, table, new)
        p.close()
        assert (row.done, table.done) == (True, True)
        assert p.operations == 0
        if not interrupt.raised:
            assert number > 3
            return


def agree(p: LocalPurgatory, name: str, row: Operation, table: Any, new: Any) -> None:
    """Check that row and table agree about what happened, and that later calls work."""
    check(p)
    done = row.done
    assert done == table.done
    if name.startswith("watch"):
        assert p.operations == 2 + (new is not None)
    else:
        assert p.operations == (0 if done else 2)
    assert p.bump("a", 1) == (0 if done else 2)
    if new is not None and name.startswith("watch"):
        assert p.advance("a", 3) == 1
        with suppress(TypeError):
            new = new[0]
        outcome = new.result(0) if isinstance(new, Operation) else new
        assert outcome.cause == "satisfied"


@pytest.mark.tier("test")
def test_every_call_is_interrupted() -> None:
    assert public(LocalPurgatory) - NEITHER_SEND_NOR_WAIT == {name.split()[0] for name in CALLS}


# ---- the model -------------------------------------------------------------------------------


@dataclass
class ModelOperation:
    key: str
    condition: AnyCondition
    targets: dict[str, int]
    deadline_ns: int
    columns: bool
    cause: str = ""
    error: int = 0
    missing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    watermarks: dict[str, int] = field(default_factory=dict)


class Model:
    """The purgatory as lists that are searched. Keys are never forgotten while they are watched."""

    def __init__(self) -> None:
        self.armed: dict[str, ModelOperation] = {}
        self.watermarks: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        self.forgotten: set[str] = set()

    def known(self, key: str) -> bool:
        return key in self.watermarks

    def touch(self, key: str) -> None:
        self.watermarks.setdefault(key, 0)

    def gain(self, op: ModelOperation, key: str) -> int:
        cap = op.condition.cap if isinstance(op.condition, SumOf) else None
        gained = max(0, self.watermarks[key] - op.targets[key])
        return gained if cap is None else min(gained, int(cap))  # type: ignore[arg-type]

    def met(self, op: ModelOperation, key: str) -> bool:
        if isinstance(op.condition, SumOf):
            return self.gain(op, key) > 0
        return self.watermarks[key] >= op.targets[key]

    def needed(self, op: ModelOperation) -> int:
        if isinstance(op.condition, Quorum):
            return op.condition.need
        return 1 if isinstance(op.condition, AnyOf) else len(op.targets)

    def holds(self, op: ModelOperation) -> bool:
        if isinstance(op.condition, SumOf):
            return sum(self.gain(op, key) for key in op.targets) >= op.condition.at_least
        return sum(self.met(op, key) for key in op.targets) >= self.needed(op)

    def failure(self, op: ModelOperation) -> int:
        whole = isinstance(op.condition, SumOf)
        errors = [
            self.errors[key] for key in op.targets
            if key in self.errors and (whole or not self.met(op, key))
        ]  # fmt: skip
        spare = 0 if whole else len(op.targets) - self.needed(op)
        return errors[0] if len(errors) > spare else 0

    def end(self, op: ModelOperation, cause: str, error: int = 0) -> int:
        op.cause, op.error = cause, error
        op.missing = [key for key in op.targets if not self.met(op, key)]
        op.failed = [key for key in op.targets if key in self.errors]
        op.watermarks = {key: self.watermarks[key] for key in op.targets}
        del self.armed[op.key]
        for key in op.targets:
            if key in self.forgotten:
                self.drop(key)
        return 1

    def watchers(self, key: str) -> list[ModelOperation]:
        return [op for op in self.armed.values() if key in op.targets]

    def drop(self, key: str) -> None:
        if not self.watchers(key):
            self.watermarks.pop(key, None)
            self.errors.pop(key, None)
            self.forgotten.discard(key)

    def expire(self, now_ns: int) -> None:
        for op in list(self.armed.values()):
            if op.deadline_ns <= now_ns:
                self.end(op, "expired")

    def watch(self, op: ModelOperation) -> bool:
        if op.key in self.armed:
            return False
        for key in op.targets:
            self.touch(key)
        if isinstance(op.condition, SumOf):
            op.targets = {
                key: self.watermarks[key] if base is None else base
                for key, base in op.targets.items()
            }
        self.armed[op.key] = op
        if self.holds(op):
            self.end(op, "satisfied")
        elif error := self.failure(op):
            self.end(op, "failed", error)
        return True

    def advance(self, key: str, to: int) -> int:
        self.touch(key)
        if to <= self.watermarks[key]:
            return 0
        self.watermarks[key] = to
        self.forgotten.discard(key)
        return sum(self.end(op, "satisfied") for op in self.watchers(key) if self.holds(op))

    def bump(self, key: str, n: int) -> int:
        return self.advance(key, self.watermarks.get(key, 0) + n)

    def fail(self, key: str, code: int) -> int:
        self.touch(key)
        self.errors[key] = code
        self.forgotten.discard(key)
        failed = [op for op in self.watchers(key) if self.failure(op)]
        return sum(self.end(op, "failed", self.failure(op)) for op in failed)

    def clear(self, key: str) -> bool:
        if self.known(key):
            self.errors.pop(key, None)
            return True
        return False

    def forget(self, key: str) -> bool:
        known = self.known(key)
        if known:
            self.forgotten.add(key)
            self.drop(key)
        return known


KEYS = [f"k{n}" for n in range(6)]


class Both:
    """A purgatory and the model, which get the same random calls."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.time = Time()
        self.p = LocalPurgatory(capacity=512, clock_ns=self.time)
        self.model = Model()
        self.pairs: list[tuple[Callable[[], Outcome | None], ModelOperation]] = []
        self.operations: list[tuple[Operation, ModelOperation]] = []

    def condition(self) -> tuple[AnyCondition, dict[str, Any]]:
        rng = self.random
        keys = rng.sample(KEYS, rng.randint(1, 4))
        targets: dict[str, Any] = {key: rng.randint(0, 9) for key in keys}
        kind = rng.randrange(4)
        if kind == 3:
            targets = {key: rng.choice([None, rng.randint(0, 9)]) for key in keys}
            cap = rng.choice([None, 2])
            return SumOf(targets, at_least=rng.randint(0, 8), cap=cap), targets
        if kind == 2:
            return Quorum(targets, need=rng.randint(1, len(keys))), targets
        return (AllOf, AnyOf)[kind](targets), targets

    def fresh(self, *, columns: bool = False) -> ModelOperation:
        condition, targets = self.condition()
        if columns:
            targets = {self.random.choice(KEYS): self.random.randint(0, 9)}
            condition = AllOf(targets)
        deadline_ns = self.time.ns + self.random.choice([0, 3, 20, 100]) * MS
        return ModelOperation(
            f"o{self.random.randrange(12)}", condition, targets, deadline_ns, columns
        )

    def timeout(self, op: ModelOperation) -> float:
        return (op.deadline_ns - self.time.ns) / 1e9

    def watch(self) -> None:
        op = self.fresh()
        if self.model.watch(op):
            operation = self.p.watch(op.key, op.condition, self.timeout(op))
            self.note(operation, op)
        else:
            with pytest.raises(Exists):
                self.p.watch(op.key, op.condition, self.timeout(op))

    def note(self, operation: Operation, op: ModelOperation) -> None:
        self.operations.append((operation, op))
        self.pairs.append((lambda: operation.result(0) if operation.done else None, op))

    def watch_many(self) -> None:
        ops = [self.fresh() for _ in range(self.random.randint(1, 5))]
        armed = [self.model.watch(op) for op in ops]
        found = self.p.watch_many([(op.key, op.condition, self.timeout(op)) for op in ops])
        for operation, op, was_armed in zip(found, ops, armed, strict=True):
            if was_armed:
                self.note(operation, op)
            else:
                assert isinstance(caught(partial(operation.result, 0)), Exists)

    def watch_columns(self) -> None:
        ops = [self.fresh(columns=True) for _ in range(self.random.randint(1, 5))]
        armed = [self.model.watch(op) for op in ops]
        table = self.p.watch_many({
            "key": [op.key for op in ops], "watch_key": [next(iter(op.targets)) for op in ops],
            "target": [next(iter(op.targets.values())) for op in ops],
            "timeout": [self.timeout(op) for op in ops],
        })  # fmt: skip
        refused = [(row, Status.EXISTS) for row, was_armed in enumerate(armed) if not was_armed]
        assert table.refused == refused
        for row, (op, was_armed) in enumerate(zip(ops, armed, strict=True)):
            if was_armed:
                self.pairs.append((partial(table.__getitem__, row), op))

    def trigger(self) -> None:
        rng, key = self.random, self.random.choice(KEYS)
        name, value = rng.choice([
            ("advance", rng.randint(0, 9)), ("advance", rng.randint(0, 9)),
            ("bump", rng.randint(0, 2)), ("fail", rng.randint(1, 3)), ("clear", None),
            ("forget", None), ("forget", None),
        ])  # fmt: skip
        arguments = (key,) if value is None else (key, value)
        expected = getattr(self.model, name)(*arguments)
        assert getattr(self.p, name)(*arguments) == expected, (name, arguments)

    def advance_many(self) -> None:
        rows = [(self.random.choice(KEYS), self.random.randint(0, 9)) for _ in range(4)]
        expected = [self.model.advance(*row) for row in rows]
        if self.random.random() < 0.5:
            assert self.p.advance_many(rows) == expected
        else:
            keys, values = zip(*rows, strict=True)
            found = self.p.advance_many({"key": list(keys), "watermark": list(values)})
            assert found.tolist() == expected

    def cancel(self) -> None:
        if self.operations:
            operation, op = self.random.choice(self.operations)
            armed = self.model.armed.get(op.key) is op
            if armed:
                self.model.end(op, "cancelled")
            assert operation.cancel() == armed

    def cancel_for_key(self) -> None:
        key = self.random.choice(KEYS)
        ended = self.model.watchers(key)
        for op in ended:
            self.model.end(op, "cancelled")
        assert sorted(map(str, self.p.cancel_for_key(key))) == sorted(op.key for op in ended)

    def extend(self) -> None:
        if self.operations:
            operation, op = self.random.choice(self.operations)
            armed = self.model.armed.get(op.key) is op
            later_ns = self.time.ns + 50 * MS
            assert operation.extend(0.05) == armed
            if armed:
                op.deadline_ns = max(op.deadline_ns, later_ns)

    def wait(self) -> None:
        """Let time pass. All deadlines are multiples of the tick, so the purgatory expires what the
        model expires."""
        self.time.ns += self.random.choice([1, 5, 30]) * MS
        iterate(self.p)
        self.model.expire(self.time.ns)

    def settle(self) -> None:
        """Expire what is due at once: operations with the timeout 0."""
        iterate(self.p)
        self.model.expire(self.time.ns)

    def compare(self) -> None:
        check(self.p)
        assert self.p.operations == len(self.model.armed)
        for outcome_of, op in self.pairs:
            outcome = outcome_of()
            found = None if outcome is None else (
                outcome.cause, outcome.error, outcome.missing, outcome.failed, outcome.watermarks,
            )  # fmt: skip
            expected = (op.cause, op.error, op.missing, op.failed, op.watermarks)
            assert found == (expected if op.cause else None), op
        self.pairs = [(outcome_of, op) for outcome_of, op in self.pairs if not op.cause]


STEPS = (
    Both.watch, Both.watch, Both.watch_many, Both.watch_columns, Both.trigger, Both.trigger,
    Both.trigger, Both.advance_many, Both.cancel, Both.cancel_for_key, Both.extend, Both.wait,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_random_calls_agree_with_the_model(seed: int) -> None:
    both = Both(seed)
    with both.p:
        for _ in range(250):
            both.random.choice(STEPS)(both)
            both.settle()
            both.compare()
