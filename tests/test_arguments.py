"""Every argument of every public call, with bad values.

A call with a bad argument raises an error of purgatoryd and packs nothing, so the next call gets
its own result. Some values are valid for some arguments; then the call succeeds.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from partitioned import start_partitioned
from public_names import public
from real_daemon import PATIENCE_S, StartDaemon
from tiers import wide
from unconnected import connection_of

from purgatoryd.clients import (
    Admin,
    AllOf,
    AnyOf,
    AsyncClient,
    AsyncPurgatory,
    AsyncSubscriber,
    BulkLoad,
    CancelResult,
    Client,
    Consumer,
    DelayedOperation,
    InvalidArgument,
    InvalidTime,
    Ledger,
    MessageRefused,
    Purgatory,
    PurgatorydError,
    Resume,
    Status,
    Subscriber,
    SumOf,
    When,
)
from purgatoryd.clients.arguments import LIMIT_S, check_limit_s
from purgatoryd.clients.bulk import BulkResult, MergedResult
from purgatoryd.clients.times import seconds_ns

pytestmark = pytest.mark.tier("all")

HOUR_S = 3600.0
BULK_LOAD = bytes(range(16))
CONDITION = AllOf({"w": 5})
PAST = datetime(2020, 1, 1, tzinfo=UTC)


def of_another_client() -> BulkResult:
    """A result of another client, with its own connections."""
    return BulkResult(connection_of("other", "default"), arrays=False)


def merged_of_another_client() -> MergedResult:
    """A result of another client whose namespace has partitions."""
    merged = MergedResult(0)
    merged.add([], of_another_client())
    return merged


BAD: list[Any] = [
    None, True, -1, 0, 0.5, -0.0, 1 << 40, 1 << 63, 1 << 64, 1 << 2000, -(1 << 2000), math.nan,
    math.inf, -math.inf, 1e308, "", "x", "\0", "\ud800", "x" * 70_000, b"", b"\xff" * 17,
    bytes(65_537), bytearray(b"k"), memoryview(b"k"), [], ["\ud800"], [1], [[]], (), (1, 2), {},
    {"key": 5}, {"key": ["a"], "delay": ["b"]}, {5: 6}, {"\ud800": 1}, set(), object(), object,
    print, uuid.UUID(int=0), datetime(2020, 1, 1), datetime.max.replace(tzinfo=UTC), 1j,
    np.int64(-1), np.float64("nan"), np.array([]), np.array([[1.5]]), np.array([1j]),
    np.array(["\ud800"]), np.array([b""]), pa.array([None, 1]), pa.array([{"a": 1}]),
    pa.table({"key": [[1]], "delay": [1]}), AllOf({}), AllOf(5), AnyOf({"a": -1}),  # type: ignore[arg-type]
    AllOf({"a": 1}, own=5), SumOf({"a": 1}, math.nan), SumOf({"a": 1}, 1, cap={5: 5}),  # type: ignore[arg-type]
    When(print, 5), When(5, ["a"]),  # type: ignore[arg-type]
    BulkResult(None, arrays=False), MergedResult(0), of_another_client(),
    merged_of_another_client(),
]  # fmt: skip

CLIENT_CALLS: dict[str, dict[str, Any]] = {
    "add": {"key": "k", "delay": HOUR_S, "mode": "replace"},
    "cancel": {"key": "k"},
    "get": {"key": "k"},
    "add_many": {"rows": [("k", HOUR_S)], "mode": "replace"},
    "cancel_many": {"keys": ["k"]},
    "unpark_many": {"rows": [("k", 1, b"")]},
    "open_bulk_load": {"bulk_load": BULK_LOAD},
    "close_bulk_load": {"bulk_load": BULK_LOAD},
    "forget_bulk_load": {"bulk_load": BULK_LOAD},
    "bulk_load_status": {"bulk_load": BULK_LOAD},
    "list_timers": {"limit": 5},
    "count_timers": {"prefix": "none"},
    "cancel_where": {"prefix": "none"},
    "reschedule_where": {"shift": 1.0, "prefix": "none"},
    "sweep_status": {"sweep_id": BULK_LOAD},
    "stop_sweep": {"sweep_id": BULK_LOAD},
    "sweeps": {},
    "delete_cursor": {"cursor": "billing"},
    "at": {"at_ns": None},
    "settle": {"result": BulkResult(None, arrays=False)},
    "flush": {},
    "groups": {},
    "group": {"group": "g"},
    "create_group": {"group": "g", "topics": ["t"], "max_backlog": 1},
    "change_group": {"group": "g", "max_dead": 5},
    "pause_group": {"group": "g"},
    "resume_group": {"group": "g"},
    "dead_letters": {"group": "g"},
    "requeue_dead": {"group": "g"},
    "drop_dead": {"group": "g"},
    "delete_group": {"group": "g"},
    "put_schedule": {"key": "s", "every": HOUR_S},
    "get_schedule": {"key": "s"},
    "schedules": {},
    "pause_schedule": {"key": "s"},
    "resume_schedule": {"key": "s"},
    "trigger_schedule": {"key": "s"},
    "backfill_schedule": {"key": "s", "start": PAST, "end": PAST},
    "preview_schedule": {"key": "s"},
    "delete_schedule": {"key": "s"},
}
PURGATORY_CALLS = CLIENT_CALLS | {
    "watch": {"key": "o", "condition": CONDITION, "timeout": 0.01},
    "watch_many": {"rows": [("o", CONDITION, 0.01)]},
    "advance": {"key": "w", "watermark": 1},
    "advance_many": {"watermarks": {"w": 1}},
    "bump": {"key": "w"},
    "fail": {"key": "w", "code": 1},
    "clear": {"key": "w"},
    "forget": {"key": "w"},
    "cancel_for_key": {"key": "w"},
}
ADMIN_CALLS: dict[str, dict[str, Any]] = {
    "ping": {},
    "sessions": {},
    "drop_session": {"session": 1},
    "advance": {"to_ns": 0},
    "create_namespace": {"namespace": "n"},
    "set_namespace": {"namespace": "n"},
    "set_topic": {"topic": "t", "within": 0.001},
    "bulk_load_status": {"bulk_load": BULK_LOAD},
    "forget_bulk_load": {"bulk_load": BULK_LOAD},
    "publish": {"topic": "t", "key": "k"},
    "resume": {},
}
ROWS: list[Any] = [
    ("k", 1, "t", 5), ("k", 1, 5), (5, 1), ("k", "1"), ("k", math.nan), ("k",), {}, {"key": "k"},
    {"key": "k", "delay": 1, "delay_ns": 1}, {5: 1, "key": "k"}, ("k", 1, [], b""),
    ("k", 1, "t", ""),
    ("k", -1, b""), ("k", 1.5, b""), ("k", True, b""), ("k", 1 << 64, b""), ("k", AllOf(5), 1),  # type: ignore[arg-type]
    ("k", CONDITION, None), ("k", CONDITION, 1, 5), ("k", CONDITION, 1, b"", 5),
]  # fmt: skip
SELECTION = ("prefix", "topic", "tag", "due_from", "due_before")
OTHER_CALLS = {"stop", "close", "connect", "virtual", "name", "namespace", "daemon"}
"""Methods that have no argument that can be bad, or that another test covers."""


def bad_calls(cls: type, calls: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (method, arguments). One of the arguments is bad."""
    for method, good in calls.items():
        for parameter in inspect.signature(getattr(cls, method)).parameters.values():
            if parameter.name in ("self", "wait", "drain"):
                continue
            names = SELECTION if parameter.name == "selection" else (parameter.name,)
            yield from ((method, good | {name: value}) for name in names for value in BAD)
        if "rows" in good:
            yield from ((method, good | {"rows": [row]}) for row in ROWS)


def tried(call: Callable[[], object], tried_call: object) -> None:
    """Make the call. It succeeds or raises an error of purgatoryd; any other exception fails the
    test."""
    try:
        call()
    except PurgatorydError:
        pass
    except Exception as error:
        raise AssertionError(
            f"{tried_call!r:.500} raised {type(error).__name__}: {error}"
        ) from error


@pytest.mark.costly("60 bad values for each argument of each call")
@pytest.mark.tier("test")
@pytest.mark.parametrize(("cls", "count"), [(Client, 1), wide(Purgatory, 1), wide(Purgatory, 2)])
def test_a_bad_argument_of_a_client_packs_nothing(
    daemon: StartDaemon, cls: type[Any], count: int
) -> None:
    start_partitioned(daemon, count, "--capacity", "100000")
    calls = PURGATORY_CALLS if cls is Purgatory else CLIENT_CALLS
    with cls("demo", timeout=PATIENCE_S) as client:
        assert public(cls) - OTHER_CALLS - {"operations"} <= calls.keys()
        for number, (method, arguments) in enumerate(bad_calls(cls, calls)):
            tried_call = (method, arguments)
            tried(lambda: getattr(client, method)(**arguments), tried_call)  # noqa: B023
            key = f"probe{number}"
            assert client.cancel(key) is CancelResult.UNKNOWN, tried_call
            assert client.add(key, HOUR_S).status is Status.ADDED, tried_call
            assert client.cancel(key) is CancelResult.CANCELLED, tried_call


@pytest.mark.costly("60 bad values for each argument of each call")
@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("cls", "count"), [wide(AsyncClient, 1), (AsyncPurgatory, 1), wide(AsyncPurgatory, 2)]
)
def test_a_bad_argument_of_an_async_client_packs_nothing(
    daemon: StartDaemon, cls: type[Any], count: int
) -> None:
    start_partitioned(daemon, count, "--capacity", "100000")
    calls = PURGATORY_CALLS if cls is AsyncPurgatory else CLIENT_CALLS

    async def scenario() -> None:
        async with cls("demo", timeout=PATIENCE_S) as client:
            assert public(cls) - OTHER_CALLS - {"operations"} <= calls.keys()
            for number, (method, arguments) in enumerate(bad_calls(cls, calls)):
                tried_call = (method, arguments)
                try:
                    found = getattr(client, method)(**arguments)
                    if inspect.isawaitable(found):
                        await found
                except PurgatorydError:
                    pass
                except Exception as error:
                    raise AssertionError(f"{tried_call!r:.500} raised {error!r}") from error
                key = f"probe{number}"
                assert await client.cancel(key) is CancelResult.UNKNOWN, tried_call
                assert (await client.add(key, HOUR_S)).status is Status.ADDED, tried_call
                assert await client.cancel(key) is CancelResult.CANCELLED, tried_call

    asyncio.run(scenario())


@pytest.mark.tier("test")
def test_a_bad_argument_of_an_admin_sends_nothing(daemon: StartDaemon) -> None:
    daemon("demo", "--clock", "virtual")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        assert public(Admin) - OTHER_CALLS <= ADMIN_CALLS.keys()
        for method, arguments in bad_calls(Admin, ADMIN_CALLS):
            if method == "advance" and isinstance(arguments["to_ns"], int):
                continue  # a valid time, which would move the clock
            tried(lambda: getattr(admin, method)(**arguments), (method, arguments))  # noqa: B023
            admin.ping()


def test_bad_limits_of_waits(daemon: StartDaemon) -> None:
    daemon("demo")
    with Purgatory("demo") as client, Subscriber("demo") as subscriber:
        operation = client.watch("o", CONDITION, HOUR_S)
        operation_ended = client.watch("p", CONDITION, 0.0)
        operation_ended.result(PATIENCE_S)
        for value in BAD:
            if value is None or (isinstance(value, int | float) and value > 1):
                continue  # these calls would wait longer than a test is allowed to take
            tried(lambda: subscriber.get(value), value)  # noqa: B023
            tried(lambda: operation.result(value), value)  # noqa: B023
            handle = client.add("k", HOUR_S, mode="replace", wait=False)
            tried(lambda: handle.result(value), value)  # noqa: B023
            if not callable(value):
                tried(lambda: operation.add_done_callback(value), value)  # noqa: B023
            assert handle.result().key == "k"
        assert operation_ended.result(math.inf).cause == "expired"


@pytest.mark.tier("test")
def test_a_flag_of_another_type_is_refused(daemon: StartDaemon) -> None:
    daemon("demo")
    flags = [value for value in BAD if type(value) is not bool]
    with (
        Client("demo", timeout=PATIENCE_S) as client,
        Consumer("demo", group="g", topics=["t"], timeout=PATIENCE_S) as jobs,
    ):
        client.put_schedule("s", every=HOUR_S)
        client.add("k", 0, topic="t")
        job = jobs.get(PATIENCE_S)
        assert job is not None
        for value in flags:
            for call in (
                lambda: client.cancel("k", delivered=value),  # noqa: B023
                lambda: client.cancel_many(["k"], delivered=value),  # noqa: B023
                lambda: client.backfill_schedule("s", PAST, PAST, repeat=value),  # noqa: B023
                lambda: jobs.ack_many([job], wait=value),  # noqa: B023
            ):
                with pytest.raises(InvalidArgument):
                    call()
        jobs.ack_many([job])
        assert client.group("g").acked == 1


PATIENCE = timedelta(seconds=PATIENCE_S)


@pytest.mark.tier("test")
def test_each_wait_takes_a_timedelta(daemon: StartDaemon) -> None:
    daemon("demo", "--clock", "virtual")
    with (
        Purgatory("demo", timeout=PATIENCE) as client,
        Admin("demo", timeout=PATIENCE) as admin,
        Subscriber("demo", namespace="quiet", timeout=PATIENCE) as subscriber,
    ):
        for made, calls in ((client, PURGATORY_CALLS), (admin, ADMIN_CALLS)):
            for method, arguments in calls.items():
                found = getattr(made, method)
                if "timeout" in inspect.signature(found).parameters and method != "settle":
                    with suppress(MessageRefused):  # there is no session 1
                        answer = found(**{"timeout": PATIENCE} | arguments)
                        if inspect.isgenerator(answer):
                            assert [*answer] == []
        assert subscriber.get(timedelta(milliseconds=1)) is None
        operation = client.watch("p", CONDITION, timedelta(0))
        assert operation.result(PATIENCE).cause == "expired"
        assert client.add("k", timedelta(hours=1), mode="replace", wait=False).result(PATIENCE)


def test_each_wait_of_an_async_client_takes_a_timedelta(daemon: StartDaemon) -> None:
    daemon("demo", "--clock", "virtual")

    async def scenario() -> None:
        async with AsyncPurgatory("demo", timeout=PATIENCE) as client:
            for method, arguments in PURGATORY_CALLS.items():
                found = getattr(client, method)
                if "timeout" in inspect.signature(found).parameters and method != "settle":
                    answer = found(**{"timeout": PATIENCE} | arguments)
                    with suppress(MessageRefused):  # there is no consumer group
                        if inspect.isasyncgen(answer):
                            assert [item async for item in answer] == []
                        else:
                            await answer
            operation = await client.watch("p", CONDITION, timedelta(0))
            assert (await operation.result(PATIENCE)).cause == "expired"
        async with AsyncSubscriber("demo", timeout=PATIENCE) as subscriber:
            assert await subscriber.get(timedelta(milliseconds=1)) is None

    asyncio.run(scenario())


def test_spans_are_exact_in_nanoseconds() -> None:
    days = timedelta(days=36_500, microseconds=1)  # a float of its seconds has no microseconds
    assert seconds_ns(days) == 36_500 * 86_400 * 10**9 + 1000
    assert seconds_ns(0.1) == 10**8
    assert seconds_ns(3) == 3 * 10**9
    for bad in (math.nan, math.inf, -math.inf, "1", True):
        with pytest.raises(InvalidTime):
            seconds_ns(bad)
    assert check_limit_s(timedelta(milliseconds=1500)) == 1.5
    assert check_limit_s(timedelta.max) == LIMIT_S
    assert check_limit_s(timedelta(-1)) == 0.0
    for grace in (1.5, timedelta(seconds=1.5)):
        assert Resume("r", grace, print).grace_ns == 1_500_000_000
    with pytest.raises(InvalidArgument, match="at most a day"):
        Resume("r", timedelta(days=1, microseconds=1), print)


def test_the_timeout_of_a_delayed_operation_is_exact() -> None:
    class Delayed(DelayedOperation):
        def try_complete(self) -> bool:
            return False

        def on_complete(self) -> None:
            pass

        def on_expiration(self) -> None:
            pass

    assert Delayed(timedelta(days=36_500, microseconds=1)).timeout_ns == 3_153_600_000_000_001_000
    assert Delayed(-1).timeout_ns == 0
    for bad in (math.nan, math.inf, 1e10, timedelta.max, "1", None):
        with pytest.raises(InvalidArgument):
            Delayed(bad)  # type: ignore[arg-type]


def constructors() -> list[type[Any]]:
    return [Client, Purgatory, Subscriber, Admin, Ledger, BulkLoad,
            AsyncClient, AsyncPurgatory, AsyncSubscriber]  # fmt: skip


@pytest.mark.tier("test")
@pytest.mark.parametrize("cls", constructors())
def test_bad_arguments_of_constructors(daemon: StartDaemon, tmp_path: Path, cls: type[Any]) -> None:
    daemon("demo")
    good: dict[str, Any] = {"name": "demo", "timeout": 0.5}
    if cls is Ledger:
        good = {"directory": tmp_path / "ledger"}
    if cls is BulkLoad:
        good = {"id": BULK_LOAD}
    if cls is Admin:
        good = {"name": "demo"}
    names = [p.name for p in inspect.signature(cls).parameters.values() if p.kind != p.VAR_KEYWORD]
    for name in names:
        for value in BAD:
            if name == "directory" and isinstance(value, str | Path):
                continue  # a call with valid arguments
            tried(lambda: opened(cls, good | {name: value}), (name, value))  # noqa: B023


def opened(cls: type[Any], arguments: dict[str, Any]) -> None:
    async def enter(made: Any) -> None:
        async with made:
            pass

    made = cls(**arguments)
    if hasattr(made, "__aenter__"):
        asyncio.run(enter(made))
    elif hasattr(made, "close"):
        made.close()


def test_a_negative_ticket_is_refused_before_it_shifts_results(daemon: StartDaemon) -> None:
    daemon("demo")
    with Client("demo", timeout=PATIENCE_S) as client:
        first = client.add("a", HOUR_S, wait=False)
        for ticket in (-1, 1 << 56, 1 << 64, 0.5, None, "1", True):
            with pytest.raises(InvalidArgument, match="ticket"):
                client.cancel("a", ticket=ticket)  # type: ignore[arg-type]
        second = client.add("b", HOUR_S, wait=False)
        assert client.cancel("nothing") is CancelResult.UNKNOWN
        assert (first.result().key, second.result().key) == ("a", "b")
        assert client.cancel("b", ticket=second.result().ticket) is CancelResult.CANCELLED
        assert client.cancel("a", ticket=first.result().ticket) is CancelResult.CANCELLED
