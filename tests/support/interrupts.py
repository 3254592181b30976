"""Interrupts of client calls: by an exception at a chosen line, or by signals to a program."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from real_daemon import PATIENCE_S, boot_ns

from purgatoryd import clients
from purgatoryd.clients import AllOf, BulkLoad, BulkLoadState, BulkResult, CancelResult, jobs
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.layout import CursorAction
from purgatoryd.shm_layout.paths import client_paths

HOUR_S = 3600.0
OURS = str(Path(clients.__file__).parent)


class Interrupted(BaseException):
    """Exception that the signal handler raises."""


@contextmanager
def swallowed(repeat: Callable[[], object]) -> Iterator[None]:
    """Call `repeat` for each Interrupted that Python swallows.

    Python only prints an exception that leaves a weakref callback or a __del__ method, so the call
    goes on. This interrupt does not count; `repeat` arranges another one.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, Interrupted):
            repeat()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


class Interrupt:
    """A context that raises Interrupted at the nth line of project code that this thread begins. If
    Python swallows it, the next line raises it. `where`: prefixes of the file names that count as
    project code."""

    def __init__(self, number: int, where: tuple[str, ...] = (OURS,)) -> None:
        self._left = number
        self._where = where
        self._swallowed = swallowed(self._repeat)
        self.raised = False

    def __enter__(self) -> Interrupt:
        gc.disable()  # a garbage collection is not part of the call
        self._swallowed.__enter__()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._swallowed.__exit__(None, None, None)
        gc.enable()

    def _repeat(self) -> None:
        self.raised = False
        sys.settrace(self._trace)  # an exception of a trace function ends tracing

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._where):
            return None
        if event == "line" and not self.raised:
            self._left -= 1
            if self._left < 0:
                self.raised = True
                raise Interrupted
        return self._trace


def interrupted(
    call: Callable[[int], Any], prepare: Iterable[Callable[[int], Any]] = ()
) -> Iterator[tuple[int, Any, Interrupted | None]]:
    """Make a call again and again, and interrupt it one line later each time.

    Yields (n, result, exception) for the call that was interrupted at its nth line. The last call
    is not interrupted and has no exception.
    """
    for number in itertools.count():
        found, error = None, None
        for step in prepare:
            step(number)
        with Interrupt(number) as interrupt:
            try:
                found = call(number)
            except Interrupted as raised:
                error = raised
        yield number, found, error
        if not interrupt.raised:
            assert number > 3, "the call has too few lines to be interrupted"
            return


Step = Callable[[Any, int], Any]
"""A call of a client, with a number for its keys."""


def run(program: str, *arguments: str) -> str:
    """Run a Python program and return its output. The time limit only ends a program that hangs."""
    command = (sys.executable, "-c", program, *arguments)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- calls and their effects ----------------------------------------------------------------

ADDS: dict[str, Step] = {
    "add": lambda c, n: c.add(f"k{n}", HOUR_S),
    "add later": lambda c, n: c.add(f"k{n}", HOUR_S, wait=False),
    "add_many": lambda c, n: c.add_many([(f"k{n}", HOUR_S), (f"l{n}", HOUR_S)]),
    "add_many later": lambda c, n: c.add_many([(f"k{n}", HOUR_S)], wait=False),
}


class Effect(NamedTuple):
    """A call, and how a test checks whether the call took effect."""

    before: list[Step]
    """Calls that prepare the call."""
    call: Step
    returns: Callable[[Any], bool]
    """Function that tells whether a completed call may return this value."""
    look: list[Step]
    """Calls that query the effect; the result of the last call shows it. Empty for a call that only
    reads."""
    seen: Callable[[Any], bool]
    """Function that tells whether the last query shows the effect."""


def id_of(n: int) -> bytes:
    return b"bulk load" + n.to_bytes(7, "big")


def opened_cursor(c: Any, n: int) -> Any:
    """Create a cursor, which the client's own session holds."""
    connection = c._core.connections[0]
    ask = partial(
        c._core.cursor_question, connection, c._core.cursor_name(f"c{n}"), CursorAction.OPEN, {}
    )
    return c._ask(connection, jobs.asked(connection, ask, "cursor", PATIENCE_S))


def has_cursor(c: Any, n: int) -> Any:
    """Return whether a cursor exists, for an asyncio client as a coroutine."""
    reader = Reader.attach(client_paths("demo"))
    found = f"c{n}" in {cursor.name for cursor in reader.cursors()}
    reader.close()
    return asyncio.sleep(0, found) if hasattr(c, "connect") else found


def watched(c: Any, n: int) -> Any:
    return c.watch(f"o{n}", AllOf({f"w{n}": 1}), HOUR_S)


def keep(c: Any, n: int) -> Any:
    """Watch an operation, and store it as attribute `watched` of the client."""
    found = watched(c, n)
    if not inspect.isawaitable(found):
        c.watched = found
        return None

    async def kept() -> None:
        c.watched = await found

    return kept()


def status(c: Any, n: int) -> Any:
    return c.bulk_load_status(id_of(n))


def advanced(c: Any, n: int) -> Any:
    return c.advance(f"w{n}", 1)


NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


def put_schedule(c: Any, n: int) -> Any:
    return c.put_schedule(f"s{n}", cron="@yearly")


def get_schedule(c: Any, n: int) -> Any:
    return c.get_schedule(f"s{n}")


def pause_schedule(c: Any, n: int) -> Any:
    return c.pause_schedule(f"s{n}")


def backfill_schedule(c: Any, n: int) -> Any:
    return c.backfill_schedule(f"s{n}", NEW_YEAR, NEW_YEAR)


def is_paused(found: Any) -> bool:
    return bool(found.paused)


def is_active(found: Any) -> bool:
    return not found.paused


def state_is(state: BulkLoadState) -> Callable[[Any], bool]:
    return lambda found: bool(found.state == state)


def is_none(found: Any) -> bool:
    return found is None


def is_one(found: Any) -> bool:
    return bool(found == 1)


def never(_: Any) -> bool:
    return False


def cancelled(found: Any) -> bool:
    """Return whether all timers were cancelled. `found`: result of cancel_many(), or the BulkResult
    of an interrupted call."""
    found = found.cancels() if isinstance(found, BulkResult) else found
    return bool(found == [CancelResult.CANCELLED])


def some_group(client: Any, _: int) -> Any:
    """Create the consumer group "g", unless it exists."""
    return client.create_group("g", ["of g"], max_backlog=5)


def has_group(found: list[Any]) -> bool:
    return any(group.name == "g" for group in found)


EFFECTS: dict[str, Effect] = {
    "add": Effect(
        [], ADDS["add"], lambda timer: timer.key[0] == "k", [lambda c, n: c.get(f"k{n}")], bool
    ),
    "cancel": Effect(
        [ADDS["add"]], lambda c, n: c.cancel(f"k{n}"),
        lambda found: found is CancelResult.CANCELLED, [lambda c, n: c.get(f"k{n}")], is_none,
    ),
    "cancel_many": Effect(
        [ADDS["add"]], lambda c, n: c.cancel_many([f"k{n}"]), cancelled,
        [lambda c, n: c.get(f"k{n}")], is_none,
    ),
    "cancel_many of jobs": Effect(
        [lambda c, n: c.create_group("j", ["of j"], max_backlog=10_000),
         lambda c, n: c.add(f"j{n}", 0, topic="of j"), lambda c, n: c.get(f"j{n}")],
        lambda c, n: c.cancel_many([f"j{n}"], delivered=True), cancelled,
        [lambda c, n: c.cancel(f"j{n}", delivered=True)],
        lambda found: found is not CancelResult.CANCELLED,
    ),
    "advance_many": Effect(
        [watched], lambda c, n: c.advance_many({f"w{n}": 1}), lambda ended: ended == [1],
        [advanced], lambda ended: ended == 0,
    ),
    "get": Effect(
        [lambda c, n: c.add(f"k{n}", HOUR_S)], lambda c, n: c.get(f"k{n}"),
        lambda found: found.key[0] == "k", [], never,
    ),
    "delete_cursor": Effect(
        [opened_cursor], lambda c, n: c.delete_cursor(f"c{n}"), is_none,
        [has_cursor], lambda found: not found,
    ),
    "open_bulk_load": Effect(
        [], lambda c, n: c.open_bulk_load(id_of(n), 5), state_is(BulkLoadState.OPEN),
        [status], state_is(BulkLoadState.OPEN),
    ),
    "close_bulk_load": Effect(
        [lambda c, n: c.open_bulk_load(id_of(n), 5)],
        lambda c, n: c.close_bulk_load(id_of(n), 5),
        is_none, [status], state_is(BulkLoadState.CLOSED),
    ),
    "forget_bulk_load": Effect(
        [lambda c, n: c.open_bulk_load(id_of(n), 5)], lambda c, n: c.forget_bulk_load(id_of(n)),
        is_none, [status], state_is(BulkLoadState.NONE),
    ),
    "bulk_load_status": Effect(
        [lambda c, n: c.add_many([(f"k{n}", HOUR_S)], bulk_load=BulkLoad(id_of(n)))], status,
        lambda found: found.rows == 1, [], never,
    ),
    "create_group": Effect(
        [some_group, lambda c, n: c.delete_group("g")], some_group, lambda info: info.name == "g",
        [lambda c, n: c.groups()], has_group,
    ),
    "delete_group": Effect(
        [some_group], lambda c, n: c.delete_group("g"), is_none, [lambda c, n: c.groups()],
        lambda found: not has_group(found),
    ),
    "change_group": Effect(
        [some_group, lambda c, n: c.change_group("g", max_dead=9)],
        lambda c, n: c.change_group("g", max_dead=5), lambda info: info.settings.max_dead == 5,
        [lambda c, n: c.group("g")], lambda info: info.settings.max_dead == 5,
    ),
    "pause_group": Effect(
        [some_group, lambda c, n: c.resume_group("g")], lambda c, n: c.pause_group("g"), is_none,
        [lambda c, n: c.group("g")], lambda info: info.paused,
    ),
    "resume_group": Effect(
        [some_group, lambda c, n: c.pause_group("g")], lambda c, n: c.resume_group("g"), is_none,
        [lambda c, n: c.group("g")], lambda info: not info.paused,
    ),
    "groups": Effect([some_group], lambda c, n: c.groups(), bool, [], never),
    "group": Effect([some_group], lambda c, n: c.group("g"), lambda info: info.pending == 0, [],
                    never),
    "requeue_dead": Effect(
        [some_group], lambda c, n: c.requeue_dead("g"), lambda count: count == 0, [], never
    ),
    "drop_dead": Effect(
        [some_group], lambda c, n: c.drop_dead("g"), lambda count: count == 0, [], never
    ),
    "put_schedule": Effect([], put_schedule, is_active, [get_schedule], bool),
    "get_schedule": Effect([put_schedule], get_schedule, is_active, [], never),
    "schedules": Effect([put_schedule], lambda c, n: c.schedules(), bool, [], never),
    "preview_schedule": Effect(
        [put_schedule], lambda c, n: c.preview_schedule(f"s{n}", 1), bool, [], never
    ),
    "delete_schedule": Effect(
        [put_schedule], lambda c, n: c.delete_schedule(f"s{n}"), lambda found: found is True,
        [get_schedule], is_none,
    ),
    "pause_schedule": Effect([put_schedule], pause_schedule, is_paused, [get_schedule], is_paused),
    "resume_schedule": Effect(
        [put_schedule, pause_schedule], lambda c, n: c.resume_schedule(f"s{n}"), is_active,
        [get_schedule], is_active,
    ),
    "trigger_schedule": Effect(
        [put_schedule], lambda c, n: c.trigger_schedule(f"s{n}", NEW_YEAR), bool,
        [backfill_schedule], lambda filled: filled.armed == 0,
    ),
    "backfill_schedule": Effect(
        [put_schedule], backfill_schedule, lambda filled: filled.armed == 1, [backfill_schedule],
        lambda filled: filled.armed == 0,
    ),
    "advance": Effect([watched], advanced, is_one, [advanced], lambda ended: ended == 0),
    "bump": Effect(
        [watched], lambda c, n: c.bump(f"w{n}"), is_one, [advanced], lambda ended: ended == 0
    ),
    "fail": Effect(
        [watched], lambda c, n: c.fail(f"w{n}", 7), is_one, [advanced], lambda ended: ended == 0
    ),
    "clear": Effect(
        [lambda c, n: c.fail(f"w{n}", 7)], lambda c, n: c.clear(f"w{n}"),
        lambda found: found is True, [watched, advanced], is_one,
    ),
    "forget": Effect(
        [advanced], lambda c, n: c.forget(f"w{n}"), lambda found: found is True,
        [lambda c, n: c.forget(f"w{n}")], lambda known: known is False,
    ),
    "Operation.extend": Effect(
        [keep], lambda c, n: c.watched.extend(2 * HOUR_S), lambda found: found is True,
        [lambda c, n: c.get(f"o{n}")],
        lambda timer: timer.deadline_boot_ns - boot_ns() > 1.5e9 * HOUR_S,
    ),
    "Operation.cancel": Effect(
        [keep], lambda c, n: c.watched.cancel(), lambda found: found is True, [advanced],
        lambda ended: ended == 0,
    ),
    "cancel_for_key": Effect(
        [watched], lambda c, n: c.cancel_for_key(f"w{n}"), lambda keys: keys[0][0] == "o",
        [advanced], lambda ended: ended == 0,
    ),
}  # fmt: skip
