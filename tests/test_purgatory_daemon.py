"""Operations across processes: a real daemon, owners, processes that advance keys, and kills."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

import purgatory_worker
import pytest
from raw_owner import DELAY_NS, Raw, put, record, trigger, watch, watching
from real_daemon import PATIENCE_S, Daemon, StartDaemon, remove_arena_files
from tiers import wide

import purgatoryd.clients.purgatory as purgatory_module
from purgatoryd.cli.arena import infos
from purgatoryd.clients import (
    Admin,
    AllOf,
    AnyOf,
    AsyncOperation,
    AsyncPurgatory,
    CallTimeout,
    CancelResult,
    Closed,
    DuplicateWatchKey,
    Exists,
    ForkedProcess,
    Full,
    InboxFull,
    InvalidArgument,
    InvalidCondition,
    InvalidKey,
    InvalidTime,
    Notice,
    Operation,
    OperationInfo,
    Purgatory,
    Quorum,
    SessionExpired,
    Subscriber,
    SumOf,
    Watch,
    WatchInfo,
    WatermarkOverflow,
    When,
)
from purgatoryd.daemon.config import Config
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.layout import (
    WATCH_KEYS_MAX,
    Cause,
    Condition,
    Message,
    Op,
    Status,
    TimeKind,
    WireError,
)
from purgatoryd.shm_layout.wire import Key

pytestmark = pytest.mark.tier("all")

HOUR_S = 3600.0


def owner(**arguments: Any) -> Purgatory:
    return Purgatory("demo", namespace="broker", timeout=PATIENCE_S, **arguments)


def until(fact: Callable[[], object]) -> None:
    """Call `fact` repeatedly until it returns True."""
    end_s = time.monotonic() + PATIENCE_S
    while not fact():
        assert time.monotonic() < end_s, "the expected fact did not become true"
        time.sleep(0.005)


@pytest.fixture
def demo(daemon: StartDaemon) -> Daemon:
    return daemon("demo")


@pytest.fixture
def a(demo: Daemon) -> Iterator[Purgatory]:
    with owner() as p:
        yield p


@pytest.fixture
def b(demo: Daemon) -> Iterator[Purgatory]:
    with owner() as p:
        yield p


@pytest.fixture
def stats(demo: Daemon) -> Iterator[Callable[[str], int]]:
    """Return a counter of the daemon, by name."""
    reader = Reader.attach(demo.paths)
    yield lambda name: int(reader.stats()[name])
    reader.close()


def notices(count: int, subscriber: Subscriber) -> list[Notice]:
    found = []
    for _ in range(count):
        notice = subscriber.get(PATIENCE_S)
        assert notice is not None
        found.append(notice)
    return found


# ---- watching and advancing ------------------------------------------------------------------


@pytest.mark.tier("test")
def test_one_process_arms_and_others_advance(a: Purgatory) -> None:
    """The owner receives the outcome, and every subscriber of the topic receives a notice."""
    with Subscriber("demo", namespace="broker", topics=["produce"]) as subscriber:
        targets = {"t-0": 1041, "t-1": 77}
        op = a.watch("req:17", AllOf(targets), HOUR_S, payload=b"append", topic="produce")
        late = a.watch("req:18", AllOf({"t-8": 0, "t-9": 1}), 0.2, payload=b"x", topic="produce")
        workers = [
            purgatory_worker.start("advance", *watermarks)
            for watermarks in (["t-0=1000", "t-0=1041"], ["t-1=77"])
        ]
        outcome = op.result(PATIENCE_S)
        expired = late.result(PATIENCE_S)
        said = [worker.communicate(timeout=PATIENCE_S)[0].split() for worker in workers]
        ended = sum(int(count) for words in said for count in words[1::2])
        first, second = sorted(notices(2, subscriber), key=lambda n: str(n.key))
    assert (outcome.cause, outcome.missing, outcome.error) == ("satisfied", [], 0)
    assert outcome.elapsed_ns > 0
    assert (expired.cause, expired.missing) == ("expired", ["t-9"])
    assert ended == 1
    assert (first.key, first.payload, first.cause) == ("req:17", b"append", Cause.SATISFIED)
    assert first.ticket == op.ticket
    assert first.verdict == wire.Verdict(outcome.elapsed_ns, 0, ())
    assert (second.key, second.payload, second.cause) == ("req:18", b"x", Cause.EXPIRED)
    assert second.verdict == wire.Verdict(expired.elapsed_ns, 0, (1,))


def test_notices_of_timers_have_no_verdict(a: Purgatory) -> None:
    with Subscriber("demo", namespace="broker") as subscriber:
        a.add("timer", 0, payload=b"p")
        (notice,) = notices(1, subscriber)
    assert (notice.payload, notice.verdict) == (b"p", None)


def test_only_callbacks_and_conditions_have_a_thread(a: Purgatory, b: Purgatory) -> None:
    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "purgatoryd-owner"]

    plain = a.watch("plain", AllOf({"w": 1}), HOUR_S)
    b.advance("w", 1)
    assert plain.result(PATIENCE_S).cause == "satisfied"
    assert threads() == []
    names: SimpleQueue[str] = SimpleQueue()
    a.watch("called", AllOf({"w": 2}), HOUR_S,
            callback=lambda _: names.put(threading.current_thread().name))  # fmt: skip
    b.advance("w", 2)
    assert names.get(timeout=PATIENCE_S) == "purgatoryd-owner"
    assert threads() == ["purgatoryd-owner"]


def test_an_outcome_behind_the_answer_of_a_direct_call_wakes_the_loop(
    b: Purgatory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No timer wakes the loop in this test."""
    monkeypatch.setattr(purgatory_module, "KEEP_ALIVE_S", HOUR_S)

    async def scenario() -> None:
        async with AsyncPurgatory("demo", namespace="broker", timeout=HOUR_S) as p:
            for n in range(3):
                operation = await p.watch(f"op-{n}", AllOf({f"w-{n}": 1}), HOUR_S)
                await p.add(f"timer-{n}", HOUR_S)
                await asyncio.to_thread(b.advance, f"w-{n}", 1)
                assert (await operation.result(PATIENCE_S)).cause == "satisfied"

    asyncio.run(scenario())


def test_an_advance_before_the_watch_is_not_lost(a: Purgatory, b: Purgatory) -> None:
    assert b.advance("t-0", 10) == 0
    assert b.advance("t-0", 5) == 0, "watermarks never fall"
    op = a.watch("w", AllOf({"t-0": 10}), HOUR_S)
    assert op.result(PATIENCE_S).cause == "satisfied"
    half = a.watch("half", AllOf({"t-0": 10, "t-1": 1}), HOUR_S)
    assert not half.done
    assert b.advance("t-1", 1) == 1
    assert half.result(PATIENCE_S).missing == []


def test_any_needs_one_key(a: Purgatory, b: Purgatory) -> None:
    op = a.watch("w", AnyOf({"x": 5, "y": 5, "z": 5}), HOUR_S)
    assert b.advance("x", 4) == 0
    assert b.advance("y", 5) == 1
    outcome = op.result(PATIENCE_S)
    assert (outcome.cause, outcome.missing) == ("satisfied", ["x", "z"])


def test_a_sum_counts_from_its_bases_up_to_its_caps(a: Purgatory, b: Purgatory) -> None:
    b.advance_many({"t-0": 900, "t-1": 50})
    now = a.watch("now", SumOf({"t-0": None, "t-1": None}, at_least=10), HOUR_S)
    bases = a.watch("bases", SumOf({"t-0": 890, "t-1": 50}, at_least=20), HOUR_S)
    capped = a.watch(
        "capped", SumOf({"t-0": 900, "t-1": 50}, at_least=20, cap={"t-0": 15, "t-1": 100}), HOUR_S
    )
    assert b.bump("t-0", 9) == 0
    assert b.bump("t-0", 1) == 2, "`now` has gained 10, and `bases` 10 + 10"
    assert b.advance("t-0", 10_000) == 0, "`capped` counts at most 15 of t-0"
    assert b.bump("t-1", 5) == 1
    for op in (now, bases, capped):
        assert op.result(PATIENCE_S).cause == "satisfied"
    assert a.watch("nothing", SumOf({"t-0": None}, at_least=0), 1).result(PATIENCE_S)


@pytest.mark.tier("test")
def test_the_owners_condition_is_asked_when_a_key_advances(a: Purgatory, b: Purgatory) -> None:
    asked, answer = threading.Semaphore(0), threading.Event()

    def condition() -> bool:
        asked.release()
        return answer.is_set()

    op = a.watch("w", When(condition, ["k"]), HOUR_S)
    assert asked.acquire(timeout=PATIENCE_S), (
        "a CHECK follows the arming, because the condition may be true"
    )
    assert b.advance("k", 1) == 0
    assert asked.acquire(timeout=PATIENCE_S)
    assert not op.done
    answer.set()
    b.advance("k", 2)
    assert op.result(PATIENCE_S).cause == "satisfied"


def test_a_condition_that_raises_counts_as_false(
    a: Purgatory, b: Purgatory, caplog: pytest.LogCaptureFixture
) -> None:
    op = a.watch("w", When(lambda: 1 / 0, ["k"]), 0.1)
    b.advance("k", 1)
    assert op.result(PATIENCE_S).cause == "expired"
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.tier("test")
def test_a_failure_lasts_until_it_is_cleared(a: Purgatory, b: Purgatory) -> None:
    op = a.watch("w", AllOf({"t-0": 1, "t-1": 1}), HOUR_S)
    done = a.watch("done", AllOf({"t-0": 0, "t-1": 1}), HOUR_S)
    assert b.fail("t-0", 6) == 1
    outcome = op.result(PATIENCE_S)
    assert (outcome.cause, outcome.error, outcome.missing) == ("failed", 6, ["t-0", "t-1"])
    assert not done.done, "a failed key that has reached its target does not end the operation"
    assert a.watch("later", AnyOf({"t-0": 1}), HOUR_S).result(PATIENCE_S).error == 6
    assert b.clear("t-0")
    assert not b.clear("unknown")
    op = a.watch("after", AllOf({"t-0": 1}), HOUR_S)
    assert b.advance("t-0", 1) == 1
    assert op.result(PATIENCE_S).cause == "satisfied"


def test_forget_takes_the_watermark_once_nobody_watches(a: Purgatory, b: Purgatory) -> None:
    b.advance("t", 10)
    op = a.watch("w", AnyOf({"t": 20, "u": 1}), HOUR_S)
    again = a.watch("again", AnyOf({"t": 10, "u": 1}), HOUR_S)
    assert again.result(PATIENCE_S).missing == ["u"], "a watched key keeps its watermark"
    assert b.forget("t")
    assert b.advance("u", 1) == 1
    op.result(PATIENCE_S)
    assert not b.forget("t"), "the forgotten key was removed with its last watcher"
    assert not a.watch("later", AllOf({"t": 1}), HOUR_S).done
    assert b.forget("t")
    assert b.advance("t", 1) == 1
    assert b.forget("t"), "an advance creates the key again"


def test_cancel_by_its_own_key(a: Purgatory, b: Purgatory) -> None:
    op = a.watch("w", AllOf({"t": 1}), HOUR_S)
    assert b.cancel("w", ticket=op.ticket + 1) is CancelResult.UNKNOWN
    assert b.cancel("w", ticket=op.ticket) is CancelResult.CANCELLED
    assert op.result(PATIENCE_S).cause == "cancelled"
    assert b.cancel("w") is CancelResult.UNKNOWN
    assert b.advance("t", 1) == 0


def test_cancel_for_key_names_all_that_it_ended(a: Purgatory, b: Purgatory) -> None:
    """The keys of the ended operations do not fit into one answer."""
    keys = [f"{n:0>200}" for n in range(300)]
    ops = a.watch_many([(key, AnyOf({"t": 1, f"own:{key[-3:]}": 1}), HOUR_S) for key in keys])
    other = a.watch("other", AllOf({"u": 1}), HOUR_S)
    assert sorted(map(str, b.cancel_for_key("t"))) == keys
    assert {op.result(PATIENCE_S).cause for op in ops} == {"cancelled"}
    assert b.cancel_for_key("t") == []
    assert b.cancel_for_key("unknown") == []
    assert not other.done
    assert sum(b.advance_many([(f"own:{key[-3:]}", 1) for key in keys])) == 0


def test_many_at_once(a: Purgatory, b: Purgatory, stats: Callable[[str], int]) -> None:
    ops = a.watch_many(Watch(f"op:{n}", AllOf({"all": 1, f"own:{n}": 1}), HOUR_S)
                       for n in range(3000))  # fmt: skip
    assert a.operations == 3000
    assert sum(b.advance_many((f"own:{n}", 1) for n in range(3000))) == 0
    assert b.advance("all", 1) == 3000
    assert {op.result(PATIENCE_S).cause for op in ops} == {"satisfied"}
    assert a.operations == 0
    until(lambda: stats("outcomes") == 0)


def test_virtual_time(daemon: StartDaemon) -> None:
    """Under a virtual clock, operations time out when the clock is advanced."""
    from purgatoryd.clients import Admin

    daemon("demo", "--clock", "virtual")
    with owner() as p, Admin("demo") as admin:
        op = p.watch("w", AllOf({"t": 1}), 60)
        admin.advance(59 * 10**9)
        assert not op.done
        admin.advance(61 * 10**9)
        outcome = op.result(PATIENCE_S)
    assert outcome.cause == "expired"
    assert 60 * 10**9 <= outcome.elapsed_ns < 61 * 10**9


@pytest.mark.parametrize("end", ["", "stop", "kill"])
def test_own_keys_are_forgotten_with_their_operation(
    demo: Daemon, a: Purgatory, b: Purgatory, end: str
) -> None:
    assert b.advance("ready", 2) == 0
    ops = a.watch_many(
        [
            ("ready", AllOf({"ready": 2}, own=["ready"]), HOUR_S),
            ("all", AllOf({"all": 1, "shared": 0}, own={"all"}), HOUR_S),
            ("any", AnyOf({b"any": 1, b"far": 9}, own=(b"any", b"far")), HOUR_S),
            ("sum", SumOf({"sum": 5, "shared": 0}, at_least=1, own=["sum"]), HOUR_S),
            ("when", When(lambda: False, ["when", "shared"], own=["when"]), HOUR_S),
            ("late", AllOf({"late": 1}, own=["late"]), 0.05),
        ]
    )
    if end:
        getattr(demo, end)()
        demo.start()
    assert b.advance("all", 1) + b.advance(b"any", 1) + b.bump("sum", 6) == 3
    a.cancel("when")
    for op in ops:
        op.result(PATIENCE_S)
    names = ("ready", "all", b"any", b"far", "sum", "when", "late")
    assert not any(b.forget(name) for name in names)
    assert b.forget("shared")


# ---- refusals: typed, and nothing changed ----------------------------------------------------


ANYTHING: Callable[[object], Any] = lambda given: given  # noqa: E731
Bad = tuple[Callable[[Any], object], type[Exception], str]
BAD: tuple[Bad, ...] = (
    (lambda p: p.watch("w", AllOf({}), 1), InvalidCondition, "1 to 1024"),
    (lambda p: p.watch("w", AllOf({str(n): 1 for n in range(1025)}), 1), InvalidCondition, "1024"),
    (lambda p: p.watch("w", AllOf({"k": -1}), 1), InvalidCondition, "target"),
    (lambda p: p.watch("w", AllOf({"k": 2**63}), 1), InvalidCondition, "target"),
    (lambda p: p.watch("w", AllOf({"k": True}), 1), InvalidCondition, "target"),
    (lambda p: p.watch("w", AllOf({"": 1}), 1), InvalidKey, "empty"),
    (lambda p: p.watch("w", AllOf({"k" * 256: 1}), 1), InvalidKey, "256"),
    (lambda p: p.watch("w", AllOf(ANYTHING(["k"])), 1), InvalidCondition, "mapping"),
    (lambda p: p.watch("w", SumOf({"k": 0}, at_least=1, cap={"j": 1}), 1), InvalidCondition, "cap"),
    (lambda p: p.watch("w", SumOf(ANYTHING(["k"]), at_least=1), 1), InvalidCondition, "mapping"),
    (lambda p: p.watch("w", When(bool, "keys"), 1), InvalidCondition, "collection"),
    (lambda p: p.watch("w", When(ANYTHING(True), ["k"]), 1), InvalidCondition, "callable"),
    (lambda p: p.watch("w", When(bool, []), 1), InvalidCondition, "1 to 1024"),
    (lambda p: p.watch("w", When(bool, ["k:0", "k:0"]), 1), DuplicateWatchKey, "w"),
    (lambda p: p.watch("w", {"k": 1}, 1), InvalidCondition, "AllOf"),
    (lambda p: p.watch("w", AllOf({"k": 1}, own="k"), 1), InvalidCondition, "collection"),
    (lambda p: p.watch("w", AnyOf({"k": 1}, own=[b"k"]), 1), InvalidCondition, "one of the keys"),
    (lambda p: p.watch("w", When(bool, ["k"], own=[""]), 1), InvalidKey, "empty"),
    (lambda p: p.watch("w", AllOf({"k": 1}), float("nan")), InvalidTime, "nan"),
    (lambda p: p.watch("w", AllOf({"k": 1}), None), InvalidArgument, ""),
    (lambda p: p.watch("", AllOf({"k": 1}), 1), InvalidKey, "empty"),
    (lambda p: p.watch("taken", AllOf({"k": 1}), 1), Exists, "taken"),
    (lambda p: p.watch("timer", AllOf({"k": 1}), 1), Exists, "timer"),
    (lambda p: p.add("taken", 1), Exists, "taken"),
    (lambda p: p.add("taken", 1, mode="replace"), Exists, "taken"),
    (lambda p: p.watch("w", AllOf({"k:0": 1, "new": 1}), 1), Full, "watch keys"),
    (lambda p: p.watch("w", AllOf({f"k:{n}": 1 for n in range(6)}), 1), Full, "watch records"),
    (lambda p: p.advance("one operation more than the limit", 1), Full, "watch keys"),
    (lambda p: p.fail("one more", 1), Full, "watch keys"),
    (lambda p: p.bump("high", 11), WatermarkOverflow, "high"),
    (lambda p: p.advance("k", -1), InvalidArgument, "watermark"),
    (lambda p: p.advance("k", 2**63), InvalidArgument, "watermark"),
    (lambda p: p.bump("k", -1), InvalidArgument, "watermark"),
    (lambda p: p.fail("k", 0), InvalidArgument, "error code"),
    (lambda p: p.fail("k", 2**32), InvalidArgument, "error code"),
    (lambda p: p.watch("w", AllOf({"k": 1}), 1, payload=bytes(65_537)), InvalidArgument, "65537"),
)


def test_refused_calls_change_nothing(daemon: StartDaemon) -> None:
    demo = daemon("demo", "--watch-keys", "9", "--watches", "6")
    reader = Reader.attach(demo.paths)
    with owner() as p:
        op = p.watch("taken", AllOf({"t": 1}), HOUR_S)
        p.add("timer", HOUR_S)
        p.advance_many([(f"k:{n}", 0) for n in range(7)])
        p.advance("high", 2**63 - 11)
        before = (reader.stats()["blob_bytes"], reader.stats()["live"], p.operations)
        for call, kind, text in BAD:
            with pytest.raises(kind) as caught:
                call(p)
            assert text in str(caught.value)
            found = (reader.stats()["blob_bytes"], reader.stats()["live"], p.operations)
            assert found == before, text
        assert p.bump("high", 10) == 0, "the watermark did not move"
        assert p.advance("t", 1) == 1
        assert op.result(PATIENCE_S).cause == "satisfied"
        reader.check()
    reader.close()


def test_rows_of_watch_many_are_refused_one_by_one(a: Purgatory) -> None:
    ops = a.watch_many(
        [
            ("one", AllOf({"k": 1}), HOUR_S),
            ("one", AllOf({"k": 1}), HOUR_S),
            ("two", When(bool, ["k", "k"]), HOUR_S),
            ("three", AllOf({"k": 1}), HOUR_S),
        ]
    )
    with pytest.raises(Exists):
        ops[1].result(PATIENCE_S)
    with pytest.raises(DuplicateWatchKey):
        ops[2].result(PATIENCE_S)
    assert a.advance("k", 1) == 2
    assert [ops[n].result(PATIENCE_S).cause for n in (0, 3)] == ["satisfied"] * 2


def test_an_invalid_row_among_many_is_found_before_anything_is_sent(
    a: Purgatory, stats: Callable[[str], int]
) -> None:
    good = ("one", AllOf({"k": 1}), HOUR_S)
    for bad in (("", good[1], 1.0), ("two", AllOf({}), 1.0), ("two", good[1], float("nan"))):
        with pytest.raises(InvalidArgument):
            a.watch_many([good, bad])
    for watermarks in ([("k", 1), ("k", -1)], [("k", 1), ("", 1)]):
        with pytest.raises(InvalidArgument):
            a.advance_many(watermarks)
    a.flush()
    assert (stats("operations"), a.operations) == (0, 0)
    op = a.watch(*good)
    assert not op.done, "the key was not advanced"
    assert a.advance_many({"k": 1}) == [1]


def test_asyncio_finds_an_invalid_row_before_anything_is_sent(
    demo: Daemon, stats: Callable[[str], int]
) -> None:
    async def work(p: AsyncPurgatory) -> None:
        with pytest.raises(InvalidArgument):
            await p.watch_many([("w", AllOf({"k": 1}), HOUR_S), ("", AllOf({"k": 1}), HOUR_S)])
        with pytest.raises(InvalidArgument):
            await p.advance_many([("k", 1), ("k", -1)])
        await p.flush()
        assert stats("operations") == 0
        assert await p.bump("k") == 0
        op = await p.watch("w", AllOf({"k": 2}), HOUR_S)
        assert await p.advance_many({"k": 2}) == [1]
        assert (await op).cause == "satisfied"

    run(work)


def test_an_inbox_that_is_full_refuses_watches(daemon: StartDaemon) -> None:
    """The owner's thread hangs in a callback, so it acknowledges no outcome. A watch waits for a
    free slot until its timeout."""
    demo = daemon("demo", "--inbox", "5")
    reader = Reader.attach(demo.paths)
    hanging, go_on = threading.Event(), threading.Event()

    def hang(_: object) -> None:
        hanging.set()
        go_on.wait(4 * PATIENCE_S)

    with Purgatory("demo", namespace="broker", timeout=3.0) as p, owner() as q:
        p.watch("hang", AllOf({"h": 1}), HOUR_S, callback=hang)
        ops = p.watch_many([(f"op:{n}", AllOf({"t": 1}), HOUR_S) for n in range(4)])
        q.advance("h", 1)
        assert hanging.wait(PATIENCE_S)
        until(lambda: reader.stats()["outcomes"] == 0)
        ops.append(p.watch("last", AllOf({"t": 1}), HOUR_S))
        with pytest.raises(InboxFull, match=r"owns 5 of 5 operations.*--inbox"):
            p.watch("more", AllOf({"t": 2}), HOUR_S)
        assert q.advance("t", 1) == 5
        with pytest.raises(InboxFull):
            p.watch("more", AllOf({"t": 2}), HOUR_S)
        assert q.watch("other", AllOf({"u": 1}), HOUR_S), "another owner has its own inbox"
        go_on.set()
        assert {op.result(PATIENCE_S).cause for op in ops} == {"satisfied"}
        until(lambda: reader.stats()["outcomes"] == 0)
        p.watch("more", AllOf({"t": 2}), HOUR_S)
    reader.close()


# ---- callbacks, closing, forking -------------------------------------------------------------


def test_callbacks_run_once_and_stop_nobody(
    a: Purgatory, b: Purgatory, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []
    all_there = threading.Event()

    def note(op: Operation) -> None:
        called.append(f"{op.key!r} {op.result(0).cause}")
        if len(called) == 3:
            all_there.set()

    def explode(_: Operation) -> None:
        raise RuntimeError("on purpose")

    def leave(_: Operation) -> None:
        raise SystemExit("in a listener")

    op = a.watch("one", AllOf({"t": 1}), HOUR_S, callback=explode)
    op.add_done_callback(leave)
    op.add_done_callback(note)
    a.watch("two", AllOf({"t": 1}), HOUR_S, callback=note)
    b.advance("t", 1)
    op.result(PATIENCE_S)
    a.watch("three", AllOf({"t": 1}), HOUR_S, callback=note)
    assert all_there.wait(PATIENCE_S)
    assert sorted(called) == ["'one' satisfied", "'three' satisfied", "'two' satisfied"]
    op.add_done_callback(note)
    assert called[3:] == ["'one' satisfied"], "a callback of an ended operation runs at once"
    assert "on purpose" in caplog.text
    assert "in a listener" in caplog.text


def test_a_callback_watches_and_advances(a: Purgatory) -> None:
    """A chain: the callback of each operation watches the next operation and ends it."""
    last = threading.Event()

    def next_one(op: Operation) -> None:
        n = int(str(op.key)) + 1
        if n == 50:
            last.set()
            return
        a.watch(str(n), AllOf({"t": n}), HOUR_S, callback=next_one)
        a.advance("t", n)

    a.watch("0", AllOf({"t": 0}), HOUR_S, callback=next_one)
    assert last.wait(PATIENCE_S)


def test_a_callback_may_close_its_purgatory(demo: Daemon) -> None:
    closed = threading.Event()
    p = owner()

    def close(_: object) -> None:
        p.close()
        closed.set()

    rest = p.watch("rest", AllOf({"u": 1}), HOUR_S)
    p.watch("w", AllOf({"t": 0}), HOUR_S, callback=close)
    assert closed.wait(PATIENCE_S)
    with pytest.raises(Closed):
        rest.result(PATIENCE_S)


def test_results_wait_no_longer_than_they_may(a: Purgatory) -> None:
    op = a.watch("w", AllOf({"t": 1}), HOUR_S)
    with pytest.raises(CallTimeout, match="operation"):
        op.result(0)
    assert not op.done


def test_closing_ends_the_wait_for_armed_operations(
    demo: Daemon, stats: Callable[[str], int]
) -> None:
    with owner() as p:
        op = p.watch("w", AllOf({"t": 1}), HOUR_S)
    with pytest.raises(Closed):
        op.result(PATIENCE_S)
    with pytest.raises(Closed):
        p.watch("v", AllOf({"t": 1}), HOUR_S)
    with owner() as q:
        assert q.advance("t", 1) == 1, "the operation stays armed without an owner"
        until(lambda: stats("outcomes") == 0)


def test_after_fork(a: Purgatory, b: Purgatory) -> None:
    op = a.watch("w", AllOf({"t": 1}), HOUR_S)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: a.advance("t", 1), lambda: a.watch("x", AllOf({"t": 1}), 1)):
            try:
                call()
            except ForkedProcess:
                refused += 1
        try:
            a.close()
        except ForkedProcess:
            refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert b.advance("t", 1) == 1
    assert op.result(PATIENCE_S).cause == "satisfied"


def test_threads_share_a_purgatory(a: Purgatory, b: Purgatory) -> None:
    def work(thread: int) -> list[str]:
        causes: list[str] = []
        for n in range(60):
            key = f"{thread}:{n}"
            op = a.watch(key, AllOf({f"t:{key}": 1}), HOUR_S)
            assert (a if n % 2 else b).advance(f"t:{key}", 1) == 1
            causes.append(op.result(PATIENCE_S).cause)
        return causes

    with ThreadPoolExecutor(8) as pool:
        for causes in pool.map(work, range(8)):
            assert causes == ["satisfied"] * 60


# ---- asyncio ---------------------------------------------------------------------------------


def run(work: Callable[[AsyncPurgatory], Awaitable[None]]) -> None:
    async def with_one() -> None:
        async with AsyncPurgatory("demo", namespace="broker", timeout=PATIENCE_S) as p:
            await asyncio.wait_for(work(p), PATIENCE_S)

    asyncio.run(with_one())


def test_asyncio(demo: Daemon) -> None:
    async def work(p: AsyncPurgatory) -> None:
        op = await p.watch("w", AllOf({"t": 5, "u": 1}), HOUR_S, payload=b"p")
        assert (op.key, op.done, p.operations) == ("w", False, 1)
        with pytest.raises(CallTimeout):
            await op.result(0)
        assert await p.advance("t", 5) == 0
        assert await p.bump("u") == 1
        assert (await op).cause == "satisfied"
        assert (await op.result()).missing == []
        failing = await p.watch("f", AllOf({"bad": 1}), HOUR_S)
        assert await p.fail("bad", 9) == 1
        assert (await failing).error == 9
        assert await p.clear("bad")
        assert await p.forget("bad")
        assert not await p.forget("bad")
        expired = await p.watch("e", AnyOf({"t": 9, "u": 9}, own=["u"]), 0.02)
        assert (await expired).missing == ["t", "u"]
        assert (await p.forget("t"), await p.forget("u")) == (True, False)
        with pytest.raises(DuplicateWatchKey):
            await p.watch("d", When(bool, ["k", "k"]), 1)

    run(work)


def test_asyncio_many(demo: Daemon) -> None:
    async def work(p: AsyncPurgatory) -> None:
        ops = await p.watch_many((n.to_bytes(2), AllOf({str(n): 1, "all": 1}), HOUR_S)
                                 for n in range(2000))  # fmt: skip
        assert sum(await p.advance_many({str(n): 1 for n in range(2000)})) == 0
        waiting = asyncio.gather(*(op.result() for op in ops[:1000]))
        assert await p.advance("all", 1) == 2000
        assert {outcome.cause for outcome in await waiting} == {"satisfied"}
        assert {(await op).cause for op in ops} == {"satisfied"}
        many = await p.watch_many([(f"{n:0>200}", AllOf({"c": 1}), HOUR_S) for n in range(200)])
        assert len(await p.cancel_for_key("c")) == 200
        assert {(await op).cause for op in many} == {"cancelled"}

    run(work)


def test_asyncio_conditions_and_callbacks_run_in_the_loop(demo: Daemon) -> None:
    async def work(p: AsyncPurgatory) -> None:
        here = threading.get_ident()
        where: list[int] = []
        called: asyncio.Future[AsyncOperation] = asyncio.get_running_loop().create_future()

        def condition() -> bool:
            where.append(threading.get_ident())
            return len(where) == 3

        op = await p.watch("w", When(condition, ["k"]), HOUR_S, callback=called.set_result)
        for watermark in range(1, 4):
            while len(where) < watermark:
                await asyncio.sleep(0.001)
            await p.advance("k", watermark)
        assert await called is op
        assert (await op).cause == "satisfied"
        assert set(where) == {here}

    run(work)


def test_asyncio_close_and_cancelled_waiters(demo: Daemon) -> None:
    async def work(p: AsyncPurgatory) -> None:
        op = await p.watch("w", AllOf({"t": 1}), HOUR_S)
        waiter = asyncio.ensure_future(op.result())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        still = asyncio.ensure_future(op.result())
        await p.close()
        with pytest.raises(Closed):
            await still
        with pytest.raises(Closed):
            await p.advance("t", 1)

    async def closed_inside() -> None:
        p = AsyncPurgatory("demo", namespace="broker", timeout=PATIENCE_S)
        await p.connect()
        await work(p)

    asyncio.run(closed_inside())


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_asyncio_across_a_restart(demo: Daemon, end: str) -> None:
    async def work(p: AsyncPurgatory) -> None:
        op = await p.watch("w", AllOf({"t": 1}), HOUR_S)
        await asyncio.to_thread(getattr(demo, end))
        await asyncio.to_thread(demo.start)
        assert await asyncio.to_thread(advance_by_another) == 1
        assert (await op).cause == "satisfied"

    run(work)


def advance_by_another() -> int:
    with owner() as p:
        return p.advance("t", 1)


# ---- restarts and deaths ---------------------------------------------------------------------


@pytest.mark.tier("test")
@pytest.mark.parametrize("end", [wide("stop"), "kill"])
def test_everything_ends_once_across_restarts(demo: Daemon, end: str) -> None:
    """The daemon ends while operations end and others are armed. Some operations come due during
    the outage. Each callback runs once."""
    ended: Counter[object] = Counter()
    rng = random.Random(end)

    def note(op: Operation) -> None:
        ended[op.key] += 1

    with owner() as p, owner() as q, owner() as idle:
        waiting = idle.watch("waiting", AllOf({"own:7": 1}), HOUR_S)
        ops = []
        for round_ in range(4):
            for n in range(round_ * 100, round_ * 100 + 100):
                timeout = 0.1 if n % 10 == 0 else HOUR_S
                keys: dict[Any, int] = {f"own:{n}": 1, "shared": 1 if n % 3 else 0}
                ops.append(p.watch(n.to_bytes(2), AllOf(keys), timeout, callback=note))
            triggers = threading.Thread(
                target=lambda r=round_: [q.bump(f"own:{n}") for n in range(r * 100, r * 100 + 100)]
            )
            triggers.start()
            if round_ < 3:
                time.sleep(rng.random() * 0.02)  # the daemon ends at a random moment of the work
                getattr(demo, end)()
                demo.start()
            triggers.join(PATIENCE_S)
        q.advance("shared", 1)
        causes = Counter(op.result(PATIENCE_S).cause for op in ops)
        assert waiting.result(PATIENCE_S).cause == "satisfied", "a silent owner is notified as well"
        reader = Reader.attach(demo.paths)
        until(lambda: reader.stats()["outcomes"] == 0)
        assert reader.stats()["operations"] == 0
        reader.check()
        reader.close()
    assert sum(causes.values()) == len(ops)
    assert set(causes) <= {"satisfied", "expired"}
    assert set(ended.values()) == {1}
    assert len(ended) == len(ops)


def test_another_arena_ends_the_wait(demo: Daemon) -> None:
    with owner() as p:
        op = p.watch("w", AllOf({"t": 1}), HOUR_S)
        demo.stop()
        remove_arena_files(demo.paths)
        demo.start()
        with pytest.raises(SessionExpired):
            op.result(PATIENCE_S)
        again = p.watch("w", AllOf({"t": 1}), HOUR_S)
        assert p.advance("t", 1) == 1
        assert again.result(PATIENCE_S).cause == "satisfied"


def test_the_operations_of_a_dead_owner_end_too(demo: Daemon, stats: Callable[[str], int]) -> None:
    """Subscribers of the topics receive notices. An operation with a CLIENT condition expires,
    because no owner can answer its CHECK."""
    with Subscriber("demo", namespace="broker", topics=["ends"]) as subscriber, owner() as p:
        worker = purgatory_worker.start("own", 5, 0.4)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "armed\n"
        worker.kill()
        worker.communicate(timeout=PATIENCE_S)
        p.advance("k", 1)
        ends = notices(6, subscriber)
        assert {n.cause for n in ends} == {Cause.EXPIRED}
        assert sorted(str(n.key) for n in ends) == [*(f"own:{n}" for n in range(5)), "own:client"]
        assert p.advance("k", 10) == 1
        assert notices(1, subscriber)[0].cause is Cause.SATISFIED
        assert stats("operations") == 0
        assert stats("outcomes") == 0, "no owner is left to acknowledge the outcomes"
        assert p.watch("own:1", AllOf({"t": 1}), HOUR_S), "the keys of the operation are free"


def test_workers_die_at_random_while_others_go_on(
    demo: Daemon, stats: Callable[[str], int]
) -> None:
    """Each operation that the daemon acknowledged to a worker has one notice, despite kills and
    races."""
    rng = random.Random(7)
    armed: list[int] = []
    with Subscriber("demo", namespace="broker", topics=["ends"]) as subscriber:
        workers = [purgatory_worker.start("churn", n) for n in range(3)]
        seen: list[int] = []
        for _ in range(12):
            victim = workers.pop(rng.randrange(3))
            assert victim.stdout is not None
            assert select.select([victim.stdout], [], [], PATIENCE_S)[0], "the worker armed nothing"
            drain(subscriber, seen, 0.1 + rng.random() * 0.2)
            armed += bury(victim)
            workers.append(purgatory_worker.start("churn", rng.random()))
        for worker in workers:
            armed += bury(worker)
        # no process changes keys now, so all operations have to time out
        with owner() as p:
            until(lambda: stats("operations") == 0)
            assert p.operations == 0
        while len(seen) < stats("watches"):
            assert drain(subscriber, seen, PATIENCE_S)
    assert set(armed) <= set(seen)
    assert max(Counter(seen).values()) == 1
    assert len(seen) == stats("watches")
    ends = ("satisfied", "expired", "failed", "cancelled")
    assert sum(stats(name) for name in ends) == len(seen)
    reader = Reader.attach(demo.paths)
    reader.check()
    reader.close()


def drain(subscriber: Subscriber, seen: list[int], seconds: float) -> bool:
    """Collect notices for `seconds`. If `seconds` is PATIENCE_S, stop as soon as notices have
    arrived and no further notice follows."""
    end_s = time.monotonic() + seconds
    before = len(seen)
    while (left_s := end_s - time.monotonic()) > 0:
        if (notice := subscriber.get(min(left_s, 0.05))) is not None:
            seen.append(notice.ticket)
        elif seconds == PATIENCE_S and len(seen) > before:
            break
    return len(seen) > before


def bury(worker: Any) -> list[int]:
    """Kill a worker; return the tickets of its acknowledged watches."""
    worker.kill()
    said, _ = worker.communicate(timeout=PATIENCE_S)
    return [int(line) for line in said.splitlines()]


# ---- a crowd on one key ----------------------------------------------------------------------


CROWD = 20_000


def test_a_crowd_that_is_satisfied_at_once_stalls_nobody(demo: Daemon) -> None:
    """An add that arrives during a large advance is applied before the advance ends, that is, some
    operations of the crowd end after the add. Later messages of the advancing peer wait behind the
    advance, in order."""
    with Raw(demo) as crowd, Raw(demo) as big, Raw(demo) as other:
        for first in range(0, CROWD, 1000):
            keys = [n.to_bytes(3) for n in range(first, first + 1000)]
            crowd.batch(*(watch(key, b"crowd", 1) for key in keys))
        demo.process.send_signal(signal.SIGSTOP)
        big.send_batch(trigger(Op.ADVANCE_KEY, b"crowd", 1))
        big.send_batch(trigger(Op.BUMP, b"behind", 1))
        other.send_batch(put(b"timer", DELAY_NS))
        demo.process.send_signal(signal.SIGCONT)
        ((added, deadline_ns),) = other.results()
        ((advanced, count),) = big.results()
        assert big.results() == [(Status.DONE, 0)]
        ends: list[int] = []
        while len(ends) < CROWD:
            outcomes = crowd.outcomes()
            crowd.acknowledge(outcomes)
            ends += [raw.ended_ns for raw in outcomes]
    assert (added, advanced, count) == (Status.ADDED, Status.DONE, CROWD)
    assert len(set(ends)) > 1, "the crowd ends in several iterations"
    assert max(ends) > deadline_ns - DELAY_NS, "the add came before the last end"


# ---- messages that the client library never sends ---------------------------------------------


@pytest.fixture
def raw(demo: Daemon) -> Iterator[Raw]:
    with Raw(demo) as one:
        yield one


@pytest.fixture
def stranger(demo: Daemon) -> Iterator[Raw]:
    with Raw(demo) as one:
        yield one


@pytest.mark.tier("test")
@pytest.mark.parametrize("end", [wide("stop"), "kill"])
def test_outcomes_come_again_until_they_are_acknowledged(demo: Daemon, raw: Raw, end: str) -> None:
    raw.batch(watch(b"one", b"t", 1), watch(b"two", b"t", 2), watch(b"three", b"u", 1))
    raw.batch(trigger(Op.ADVANCE_KEY, b"t", 1), trigger(Op.FAIL, b"t", 6))
    first = raw.outcomes()
    assert [(o.key, o.failed, o.watermarks) for o in first] == [
        ("one", (), (1,)), ("two", (0,), (1,)),
    ]  # fmt: skip
    assert raw.outcomes() == first, "an unacknowledged outcome is sent again"
    raw.acknowledge(first[:1])
    raw.ping()
    getattr(demo, end)()
    demo.start()
    raw.reconnect()
    raw.ping()
    again = raw.outcomes()
    assert again == first[1:]
    raw.acknowledge(again)
    raw.batch(trigger(Op.ADVANCE_KEY, b"u", 1))
    assert [o.key for o in raw.outcomes()] == ["three"], "acknowledged outcomes are not sent again"


KEY = wire.encode_watch_key("k", 1)
GARBAGE = {
    "no watch keys": watching(b""),
    "half a watch key": watching(KEY[:-1]),
    "half the fixed part": watching(KEY[:10]),
    "a byte behind the keys": watching(KEY + b"x"),
    "the second one cut": watching(KEY + KEY[:20]),
    "1025 keys": watching(b"".join(wire.encode_watch_key(str(n), 1) for n in range(1025))),
    "an empty watch key": watching(struct.pack("<QQBB6x", 1, 0, 0, 0)),
    "a key of an unknown type": watching(struct.pack("<QQBB6x", 1, 0, 1, 3) + b"k"),
    "a UUID of one byte": watching(struct.pack("<QQBB6x", 1, 0, 1, 2) + b"k"),
    "an extension longer than the message": watching(KEY, ext_len=2**32 - 1),
    "an extension shorter than what is there": watching(KEY, ext_len=len(KEY) - 1),
    "an unknown condition": watching(KEY, mode=4),
    "a wall deadline": watching(KEY, time_kind=TimeKind.WALL),
    "an unknown flag": watching(KEY, flags=2),
    "a payload that is too long": watching(KEY + bytes(65_537), payload_len=65_537),
    "a watermark past the last": trigger(Op.ADVANCE_KEY, b"k", 2**63),
    "a bump past the last": trigger(Op.BUMP, b"k", 2**63),
    "a failure with no code": trigger(Op.FAIL, b"k", 0),
    "a failure with a long code": trigger(Op.FAIL, b"k", 2**32),
    "a value that is not used": trigger(Op.CLEAR, b"k", 1),
    "a mode that is not used": record(Op.FORGET, b"k", mode=1),
    "a time that is not used": record(Op.ADVANCE_KEY, b"k", time_ns=1),
    "watch keys that are not used": record(Op.CANCEL_FOR_KEY, b"k", KEY, ext_len=len(KEY)),
    "no key": record(Op.ADVANCE_KEY, b""),
    "an unknown op": record(max(Op) + 1, b"k"),
}


def test_malformed_batches_change_nothing(raw: Raw, stats: Callable[[str], int]) -> None:
    raw.batch(watch(b"armed", b"k", 1))
    before = stats("blob_bytes"), stats("operations"), stats("records")
    for detail, broken in GARBAGE.items():
        raw.send_batch(trigger(Op.ADVANCE_KEY, b"k", 1), broken)
        assert raw.receive(Message.BATCH).error == WireError.MALFORMED, detail
        raw.sequence -= 1
    assert (stats("blob_bytes"), stats("operations"), stats("records")) == before
    assert raw.batch(trigger(Op.ADVANCE_KEY, b"k", 1)) == [(Status.DONE, 1)]


def test_malformed_acknowledgements(raw: Raw, stats: Callable[[str], int]) -> None:
    raw.batch(watch(b"w", b"k", 0))
    (outcome,) = raw.outcomes()
    one = wire.ACK.pack(outcome.ticket, 0, outcome.slot)
    ack = wire.encode_acks(raw.session, one)
    for broken in (ack[:-1], ack + b"x", ack[:64], ack + ack[64:]):
        raw.send(broken)
        assert raw.receive(Message.ACK).error == WireError.MALFORMED
    raw.send(wire.encode_acks(raw.session, one * 1025))
    assert raw.receive(Message.ACK).error == WireError.TOO_LARGE
    assert stats("outcomes") == 1
    wrong = [
        (outcome.ticket + 1, 0, outcome.slot),
        (outcome.ticket, 0, outcome.slot + 1),
        (outcome.ticket, 0, 2**32 - 1),
        (outcome.ticket, 1, outcome.slot),
        (0, 0, 0),
    ]
    raw.send(wire.encode_acks(raw.session, b"".join(wire.ACK.pack(*one) for one in wrong)))
    raw.ping()
    assert stats("outcomes") == 1
    raw.send(wire.encode_acks(raw.session, one * 3))
    raw.ping()
    assert stats("outcomes") == 0


def test_nobody_acknowledges_or_completes_for_others(
    raw: Raw, stranger: Raw, stats: Callable[[str], int]
) -> None:
    raw.batch(watch(b"w", b"k", 0), watch(b"c", b"k", 0, Condition.CLIENT))
    (check, outcome) = sorted(raw.outcomes(), key=lambda o: o.cause)
    assert (check.cause, check.version & 0xFFFFFFFF, outcome.cause) == (0, 1, Cause.SATISFIED)
    stranger.acknowledge([check, outcome])
    assert stranger.batch(trigger(Op.COMPLETE, b"c", check.version)) == [(Status.UNKNOWN, 0)]
    assert stranger.batch(trigger(Op.COMPLETE, b"w", 0)) == [(Status.UNKNOWN, 0)]
    stranger.acknowledge([outcome], session=stranger.session ^ 1)
    assert stranger.receive(Message.ACK).error == WireError.SESSION_EXPIRED
    assert stats("outcomes") == 1
    assert sorted(raw.outcomes(), key=lambda o: o.cause) == [check, outcome], (
        "an acknowledgement by another session has no effect"
    )
    assert raw.batch(trigger(Op.COMPLETE, b"c", 0)) == [(Status.DONE, 0)], (
        "an answer to an old version of the CHECK has no effect"
    )
    assert raw.batch(trigger(Op.COMPLETE, b"c", check.version)) == [(Status.DONE, 1)]


def test_a_stranger_learns_nothing_with_a_guessed_session(raw: Raw, stranger: Raw) -> None:
    raw.batch(watch(b"w", b"k", 1))
    for guess in (raw.session ^ 1 << 20, raw.session | 0xFFFF, 1, 2**64 - 1):
        assert stranger.ping(guess).error == WireError.SESSION_EXPIRED
    raw.batch(trigger(Op.ADVANCE_KEY, b"k", 1))
    assert [o.key for o in raw.outcomes()] == ["w"]
    assert stranger.ping(0).error == 0


def test_an_owner_keeps_itself_reachable(
    demo: Daemon, stranger: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon sends outcomes to the connection on which a session sent its last message. An
    owner without calls sends a message from time to time, so it receives outcomes even if another
    connection has used its session."""
    monkeypatch.setattr(purgatory_module, "KEEP_ALIVE_S", 0.02)
    with owner() as p:
        op = p.watch("w", AllOf({"k": 1}), HOUR_S)
        stranger.ping(p._core.connections[0].session.id)
        stranger.batch(trigger(Op.ADVANCE_KEY, b"k", 1))
        assert op.result(PATIENCE_S).cause == "satisfied"


def test_a_session_that_ends_drops_its_outcomes(raw: Raw, stats: Callable[[str], int]) -> None:
    raw.batch(*(watch(b"%d" % n, b"k", 0) for n in range(1000)), watch(b"armed", b"k", 9))
    assert stats("outcomes") == 1000
    raw.send(wire.encode_frame(Message.BYE, raw.session))
    raw.receive(Message.BYE)
    assert stats("outcomes") == 0
    with_none = stats("blob_bytes")
    with owner() as p:
        assert p.advance("k", 9) == 1
    assert stats("outcomes") == stats("operations") == 0
    assert stats("blob_bytes") < with_none


def test_an_owner_that_does_not_read_gets_all_once_it_reads(demo: Daemon, a: Purgatory) -> None:
    """The owner reads nothing until its outcomes exceed what the daemon's socket queues for one
    peer."""
    payload = bytes(8000)
    fields = {"payload_len": len(payload), "ext_len": len(KEY), "time_kind": TimeKind.DELAY}
    demo.restart("--payload-memory", "64M")
    with Raw(demo) as slow:
        for first in range(0, 3000, 500):
            slow.batch(*(
                record(Op.WATCH, b"%d" % n, payload + KEY, time_ns=DELAY_NS, **fields)
                for n in range(first, first + 500)
            ))  # fmt: skip
        assert a.advance("k", 1) == 3000
        seen: set[int] = set()
        while len(seen) < 3000:
            outcomes = slow.outcomes()
            slow.acknowledge(outcomes)
            seen |= {o.ticket for o in outcomes}
        assert a.advance("k", 2) == 0


# ---- quorum, handles, repeated watches -----------------------------------------------------------


def test_a_quorum_outlives_the_failures_that_it_can_spare(a: Purgatory, b: Purgatory) -> None:
    replicas = [f"r-{n}" for n in range(5)]
    write, lost = (a.watch(key, Quorum(replicas, need=3), HOUR_S) for key in ("w-1", "w-2"))
    assert [b.fail("r-0", 7), b.fail("r-1", 8), b.advance("r-2", 1)] == [0, 0, 0]
    assert lost.cancel()
    assert [b.advance("r-3", 1), b.advance("r-4", 1)] == [0, 1]
    assert (write.result(PATIENCE_S).cause, write.result().missing) == ("satisfied", replicas[:2])
    assert write.result().failed == lost.result(PATIENCE_S).failed == replicas[:2]
    assert write.result().watermarks == dict(zip(replicas, (0, 0, 1, 1, 1), strict=True))
    assert lost.result().watermarks == dict(zip(replicas, (0, 0, 1, 0, 0), strict=True))
    assert write.result().condition == Quorum(replicas, need=3)
    assert a.watch("w-3", Quorum(["r-0", "r-1"], need=1), HOUR_S).result(PATIENCE_S).error == 7


@pytest.mark.parametrize("need", [0, 3, True, 1.0])
def test_a_quorum_that_cannot_be_is_refused(a: Purgatory, need: Any) -> None:
    with pytest.raises(InvalidCondition, match="need"):
        a.watch("w", Quorum({"a": 1, "b": 1}, need=need), 1)


def test_an_operation_is_extended_and_cancelled_by_its_handle(a: Purgatory) -> None:
    first = a.watch("x", AllOf({"k": 1}), 0.5)
    assert first.extend(HOUR_S)
    with pytest.raises(Exists):
        a.add("x", delay=HOUR_S, mode="extend")
    with pytest.raises(CallTimeout):
        first.result(1.0)
    assert first.cancel()
    assert first.result(PATIENCE_S).cause == "cancelled"
    second = a.watch("x", AllOf({"k": 1}), HOUR_S)
    assert [first.cancel(), first.extend(1)] == [False, False]
    assert second.cancel()
    assert a.get("x") is None


@pytest.mark.tier("test")
def test_operations_can_be_waited_for_as_futures(a: Purgatory) -> None:
    soon, late = (a.watch(key, AllOf({key: 1}), HOUR_S) for key in ("soon", "late"))
    futures = [late.future(), soon.future()]
    a.advance("soon", 1)
    done, left = wait(futures, PATIENCE_S, return_when=FIRST_COMPLETED)
    assert ([f.result() for f in done], left) == ([soon.result()], {futures[0]})
    late.cancel()
    assert futures[0].result(PATIENCE_S).cause == "cancelled"


@pytest.mark.tier("test")
def test_asyncio_waits_for_operations_and_ends_them(demo: Daemon) -> None:
    async def work(p: AsyncPurgatory) -> None:
        soon, late = [await p.watch(key, AllOf({key: 1}), HOUR_S) for key in ("soon", "late")]
        assert await late.extend(2 * HOUR_S)
        futures = [soon.future(), late.future()]
        await p.advance("soon", 1)
        done, left = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        assert (done, left) == ({futures[0]}, {futures[1]})
        assert await late.cancel()
        assert (await futures[1]).cause == "cancelled"
        assert [await late.cancel(), await late.extend(1)] == [False, False]

    run(work)


@pytest.mark.tier("test")
@pytest.mark.parametrize(("holds", "cause"), [(True, "satisfied"), (False, "expired")])
@pytest.mark.parametrize("timeout", [0, wide(-1.0)])
def test_a_condition_without_time_is_tried_once(
    a: Purgatory, holds: bool, cause: str, timeout: float
) -> None:
    op = a.watch("x", When(lambda: holds, ["k"]), timeout)
    assert (op.result(PATIENCE_S).cause, op.result().missing) == (cause, [])


@pytest.mark.tier("test")
def test_a_watch_that_timed_out_is_repeated_and_returns_its_operation(demo: Daemon) -> None:
    with Purgatory("demo", namespace="broker", timeout=1.0) as p:
        p.advance("k", 1)
        demo.process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(CallTimeout):
                p.watch("x", AllOf({"k": 5}), HOUR_S)
        demo.process.send_signal(signal.SIGCONT)
        until(lambda: p.operations == 1)
        for condition in (AllOf({"k": 6}), AnyOf({"k": 5})):
            with pytest.raises(Exists):
                p.watch("x", condition, HOUR_S)
        op = p.watch("x", AllOf({"k": 5}), HOUR_S)
        with pytest.raises(Exists):
            p.watch("x", AllOf({"k": 5}), HOUR_S)
        assert p.operations == 1
        assert p.advance("k", 5) == 1
        assert op.result(PATIENCE_S).cause == "satisfied"


@pytest.mark.tier("test")
def test_condition_owner_and_watermarks_are_readable(a: Purgatory, demo: Daemon) -> None:
    long = "k" * 200
    a.advance("k-1", 7)
    a.fail(long, 9)
    a.watch("w", Quorum({"k-1": 40, "k-2": 1, long: 3}, need=1, own=["k-2"]), HOUR_S)
    bases: dict[Key, int | None] = {"k-1": None, b"b": 2}
    caps: dict[Key, int] = {"k-1": 60, b"b": 50}
    a.watch("s", SumOf(bases, at_least=100, cap=caps), HOUR_S)
    a.watch("f", When(lambda: False, ["k-1"]), HOUR_S)
    a.add("timer", HOUR_S)
    a.advance("k-2", 0)
    with Admin(demo.name) as admin:
        (session,) = [info.session for info in admin.sessions() if info.operations == 3]
    uid = os.getuid()
    with contextlib.closing(Reader.attach(demo.paths)) as reader:
        listed = {info.key: info.operation for info in infos(reader)}
    got = {key: a.get(key) for key in ("w", "s", "f", "timer")}
    assert {key: timer and timer.operation for key, timer in got.items()} == listed
    assert listed["timer"] is None
    assert listed["w"] == OperationInfo(Condition.QUORUM, session, uid, 1, (
        WatchInfo("k-1", 7, 0, 40, None, None, own=False),
        WatchInfo("k-2", 0, 0, 1, None, None, own=True),
        WatchInfo(long, 0, 9, 3, None, None, own=False),
    ))  # fmt: skip
    assert listed["s"] == OperationInfo(Condition.SUM, session, uid, 100, (
        WatchInfo("k-1", 7, 0, None, 7, 60, own=False),
        WatchInfo(b"b", 0, 0, None, 2, 50, own=False),
    ))  # fmt: skip
    assert listed["f"] == OperationInfo(
        Condition.CLIENT, session, uid, 0, (WatchInfo("k-1", 7, 0, None, None, None, own=False),)
    )


def test_the_largest_operation_is_readable(a: Purgatory, demo: Daemon) -> None:
    keys = [f"{n:0255}" for n in range(WATCH_KEYS_MAX)]
    operation = a.watch("x", AllOf(dict.fromkeys(keys, 1)), HOUR_S, payload=b"p" * 65_536)
    a.advance(keys[5], 1)
    found = a.get("x")
    assert found is not None
    assert found.operation is not None
    assert [row.key for row in found.operation.keys] == keys
    assert [n for n, row in enumerate(found.operation.keys) if row.target is None] == [5]
    with contextlib.closing(Reader.attach(demo.paths)) as reader:
        assert [info.operation for info in infos(reader)] == [found.operation]
    a.fail(keys[7], 3)
    outcome = operation.result(PATIENCE_S)
    assert (outcome.failed, len(outcome.missing)) == ([keys[7]], WATCH_KEYS_MAX - 1)
    assert outcome.watermarks == {key: int(key == keys[5]) for key in keys}


def test_watch_keys_and_records_are_in_the_stats(a: Purgatory, stats: Callable[[str], int]) -> None:
    a.watch("x", AllOf({"k-1": 1, "k-2": 1}), HOUR_S)
    names = ("watch_records", "watch_records_max", "watch_keys", "watch_keys_max")
    assert [stats(name) for name in names] == [2, Config(name="demo").watches, 2, 65_536]
