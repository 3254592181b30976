"""Errors say what is wrong and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from real_daemon import PATIENCE_S, StartDaemon

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import (
    Admin,
    AllOf,
    AsyncPurgatory,
    AsyncSubscriber,
    BatchError,
    CallTimeout,
    Client,
    DuplicateWatchKey,
    InvalidCondition,
    Purgatory,
    PurgatorydError,
    Quorum,
    When,
    times,
)
from purgatoryd.shm_layout import errors, wire
from purgatoryd.shm_layout.layout import TIME_MAX_NS, ClockKind

pytestmark = pytest.mark.tier("check")

HOUR_S = 3600.0
UNHELPFUL: Any = {"k": 1}


@pytest.fixture
def client(daemon: StartDaemon) -> Any:
    daemon("demo")
    with Purgatory("demo", timeout=PATIENCE_S) as purgatory:
        yield purgatory


def text_of(call: Callable[[], object]) -> str:
    """Return the text of the error that the call raises."""
    with pytest.raises(PurgatorydError) as caught:
        call()
    return str(caught.value)


# ---- arguments -----------------------------------------------------------------------------------


def due(**given: Any) -> Callable[[], object]:
    return lambda: times.due(ClockKind.BOOT, 0, **given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "time is missing: give one of delay, delay_ns, deadline, deadline_boot_ns"),
        ({"delay": 1, "delay_ns": 2}, "time (1, 2) has 2 values: give only one of delay,"),
        ({"delay": "5s"}, "time '5s' must be a number of seconds or a timedelta"),
        ({"delay": True}, "time True must be a number of seconds or a timedelta"),
        ({"delay_ns": 0.5}, "time 0.5 must be a whole number of nanoseconds"),
        ({"deadline_boot_ns": "x"}, "time 'x' must be a whole number of nanoseconds"),
    ],
)
def test_an_invalid_time_says_what_is_allowed(given: Any, text: str) -> None:
    said = text_of(due(**given))
    assert said.startswith(text)
    assert str(TIME_MAX_NS) not in said


def test_only_a_time_that_is_too_far_names_the_largest_deadline() -> None:
    said = text_of(due(delay=timedelta.max))
    assert "is too far: the largest deadline is" in said
    assert str(TIME_MAX_NS) in said


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: wire.encode_key(UNHELPFUL), "key must be str, bytes or UUID, not dict"),
        (lambda: wire.encode_key(""), "key is empty: allowed are 1 to 255 bytes"),
        (lambda: wire.encode_key("k" * 256), "key is too long: it has 256 bytes"),
        (lambda: wire.encode_payload(UNHELPFUL), "payload must be bytes, not dict"),
        (lambda: wire.encode_payload(bytes(65_537)), "payload is too long: it has 65537 bytes"),
        (lambda: Client("demo", durable=UNHELPFUL), "durable must be bool or None, not dict"),
    ],
)
def test_an_invalid_argument_is_named_without_false_figures(
    call: Callable[[], object], text: str
) -> None:
    said = text_of(call)
    assert said.startswith(text)
    assert "has 0 bytes" not in said


@pytest.mark.parametrize(
    ("keys", "need"), [("abc", 2), (["a", "b"], 0), (["a", "b"], 3), (UNHELPFUL, True), (5, 1)]
)
def test_a_quorum_that_cannot_hold_is_not_constructed(keys: Any, need: Any) -> None:
    with pytest.raises(InvalidCondition):
        Quorum(keys, need=need)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.tier("all")
def test_a_watch_without_a_timeout_names_the_argument(client: Purgatory) -> None:
    said = text_of(lambda: client.watch("o", AllOf({"k": 1}), None))  # type: ignore[arg-type]
    assert said == "timeout None must be a number of seconds or a timedelta"
    operation = client.watch("o", AllOf({"k": 1}), HOUR_S)
    assert text_of(lambda: operation.extend(None)) == said  # type: ignore[arg-type]


@pytest.mark.tier("all")
def test_a_reserved_name_is_a_reason_of_a_denial(client: Purgatory) -> None:
    said = text_of(lambda: client.add("k", HOUR_S, topic="_x"))
    assert said.startswith("'k' was denied: ")
    assert "a name that begins with '_'" in said


@pytest.mark.tier("all")
def test_an_armed_key_says_when_a_mode_helps(client: Purgatory) -> None:
    client.add("timer", HOUR_S)
    client.watch("operation", AllOf({"k": 1}), HOUR_S)
    for said in (
        text_of(lambda: client.add("timer", HOUR_S)),
        text_of(lambda: client.add("operation", HOUR_S, mode="replace")),
        text_of(lambda: client.watch("timer", AllOf({"k": 1}), HOUR_S)),
    ):
        assert "for a timer, add with mode replace, keep or extend" in said
        assert "for an operation, and for watch, no mode helps" in said


@pytest.mark.tier("all")
def test_a_duplicate_watch_key_is_named(client: Purgatory) -> None:
    with pytest.raises(DuplicateWatchKey, match="'w' was refused: it watches 'twice' twice") as one:
        client.watch("w", When(bool, ["once", "twice", "twice"]), HOUR_S)
    assert one.value.watch_key == "twice"
    (row,) = client.watch_many([("v", Quorum(["a", "a"], need=1), HOUR_S)])
    assert "it watches 'a' twice" in text_of(lambda: row.result(PATIENCE_S))


@pytest.mark.tier("all")
def test_an_operation_that_has_not_ended_stays_armed(client: Purgatory) -> None:
    operation = client.watch("order:1", AllOf({"k": 1}), HOUR_S)
    said = text_of(lambda: operation.result(0.01))
    assert said == (
        "operation 'order:1' did not end within 0.01 s: still armed; wait again, or cancel"
    )

    async def scenario() -> None:
        async with AsyncPurgatory("demo", timeout=PATIENCE_S) as other:
            waiting = await other.watch("order:2", AllOf({"k": 1}), HOUR_S)
            with pytest.raises(CallTimeout, match=r"'order:2' did not end .* still armed"):
                await waiting.result(0.01)

    asyncio.run(scenario())


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("count", "start"), [(1, "1 packed call was refused: "), (2, "2 packed calls were refused, ")]
)
def test_a_batch_error_quotes_the_first_refusal(client: Purgatory, count: int, start: str) -> None:
    client.add("a", HOUR_S)
    for _ in range(count):
        client.add("a", HOUR_S, wait=False)
    with pytest.raises(BatchError) as caught:
        client.flush()
    assert str(caught.value).startswith(start)
    assert ": 'a' is armed already, with ticket" in str(caught.value)
    assert "status" not in str(caught.value)
    assert caught.value.count == count


def test_a_batch_error_without_refusals_counts_the_lost_calls() -> None:
    assert str(errors.BatchError((), 0, lost=1)) == "1 packed call has an unknown outcome"
    assert str(errors.BatchError((), 2, lost=3)) == (
        "2 packed calls were refused; 3 calls have an unknown outcome"
    )


# ---- daemons -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "endpoint", "starts"),
    [
        ("demo", "ipc:///run/x", True), ("demo-1-0", "ipc:///run/x", False),
        ("demo", "tcp://host:1", False),
    ],
)  # fmt: skip
def test_an_unreachable_daemon_shows_how_to_start_it(
    name: str, endpoint: str, starts: bool
) -> None:
    said = str(errors.DaemonUnreachable(name, endpoint, 1.0))
    assert ("`purgatoryd run --name demo` starts it" in said) is starts


def test_a_user_who_may_not_open_the_socket_gets_no_command_to_start_it() -> None:
    said = str(errors.DaemonUnreachable("demo", "ipc:///run/x", 1.0, shut="/run/x"))
    assert "starts it" not in said


@pytest.mark.parametrize(
    ("in_doubt", "text"), [(1, "; 1 call is in doubt"), (2, "; 2 calls are in doubt")]
)
def test_calls_in_doubt_are_counted_in_english(in_doubt: int, text: str) -> None:
    assert str(errors.DaemonUnreachable("demo", "tcp://h:1", 1.0, in_doubt)).endswith(text)
    assert str(errors.CallTimeout("add", 1.0, in_doubt)).endswith(text)


@pytest.mark.tier("all")
def test_a_setting_that_needs_a_wal_says_so(client: Purgatory) -> None:
    with Admin("demo", timeout=PATIENCE_S) as admin:
        said = text_of(lambda: admin.set_namespace("n", park_beyond_ns=1))
    assert said.startswith("durability and parking need a daemon with a WAL: ")
    assert said.endswith("purgatoryd run --wal-dir DIRECTORY")


def test_a_start_without_the_wal_names_the_arena_file() -> None:
    said = str(errors.WalNeeded("/purgatoryd.demo"))
    assert said.startswith("/dev/shm/purgatoryd.demo has a WAL: ")
    assert "the --wal-dir of its last start" in said
    assert "then run `purgatoryd stop --export FILE`" in said


# ---- commands and Python syntax ------------------------------------------------------------------


def test_a_command_asks_for_an_integer_in_plain_words() -> None:
    done = CliRunner().invoke(app, ["advance", "a", "x"])
    assert done.exit_code == Exit.USAGE
    assert "'x' is not a valid integer." in done.output
    assert "-1 is not in the range" in CliRunner().invoke(app, ["advance", "a", "--", "-1"]).output


@pytest.mark.parametrize("kind", [AsyncPurgatory, AsyncSubscriber])
def test_a_plain_with_names_async_with(kind: Any) -> None:
    with pytest.raises(TypeError, match="async with"), kind("demo"):
        pass
