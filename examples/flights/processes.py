"""The child processes of a run. They are spawned, report their progress, and end with the block
that started them.

A child reports that it is ready, waits for the start message, works, and returns its result. If it
raises an exception, the parent raises ChildFailed. Each child counts its work in a row of shared
memory, which the parent reads only for the display.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import RawArray
from types import TracebackType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar, cast

REFRESH_S = 0.1
END_S = 5.0

_READY, _RESULT, _RAISED = "ready", "result", "raised"

P = ParamSpec("P")
Result = TypeVar("Result")


class ChildFailed(Exception):
    """A child process raised an exception or died; `details` is its traceback or its exit code."""

    def __init__(self, name: str, details: str) -> None:
        super().__init__(f"process {name}: {details}")
        self.name = name
        self.details = details


class Counts(NamedTuple):
    """Counts of the work done by children: acknowledged adds and cancels, and received notices."""

    adds: int = 0
    cancels: int = 0
    notices: int = 0


_WIDTH = len(Counts._fields)


class Link:
    """The child's side of its connection to the parent."""

    def __init__(self, pipe: Connection, board: Any, row: int) -> None:
        self._pipe = pipe
        self._board = board
        self._at = row * _WIDTH

    def ready(self) -> Any:
        """Report that this child is ready; return the parent's start message."""
        self.send(_READY)
        return self._pipe.recv()

    def send(self, kind: str, value: Any = None) -> None:
        """Send one message to the parent; `kind` says what it contains."""
        self._pipe.send((kind, value))

    def count(self, adds: int = 0, cancels: int = 0, notices: int = 0) -> None:
        """Add to this child's counters of finished work."""
        board, at = self._board, self._at
        board[at] += adds
        board[at + 1] += cancels
        board[at + 2] += notices


class Child(Generic[Result]):
    """A child process, as the parent sees it."""

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.done = False
        self._result: Any = None

    def take(self) -> None:
        """Receive the result. It must be the child's next message. Raises ChildFailed."""
        self._result = self.receive()
        self.done = True

    @property
    def result(self) -> Result:
        """The result of the child, available when the child is done."""
        assert self.done
        return cast(Result, self._result)

    def receive(self) -> Any:
        """Return the value of the next message. Raises ChildFailed if the child failed."""
        try:
            kind, value = self.pipe.recv()
        except EOFError:
            self.process.join(END_S)
            raise ChildFailed(self.process.name, f"exit code {self.process.exitcode}") from None
        if kind == _RAISED:
            raise ChildFailed(self.process.name, value)
        return value


class Crew:
    """A group of up to `size` children. Children that still run at the end of the block are
    terminated."""

    def __init__(self, size: int) -> None:
        self._context = get_context("spawn")
        self._board = RawArray("q", size * _WIDTH)
        self._children: list[Child[Any]] = []

    def start(
        self, name: str, target: Callable[Concatenate[Link, P], Result],
        *args: P.args, **kwargs: P.kwargs,
    ) -> Child[Result]:  # fmt: skip
        """Start target(link, *args, **kwargs) in a new process."""
        ours, theirs = self._context.Pipe()
        link = Link(theirs, self._board, len(self._children))
        process = self._context.Process(
            target=_run, name=name, args=(link, target, args, kwargs), daemon=True
        )
        process.start()
        theirs.close()  # close the parent's copy, so that the pipe is closed when the child ends
        child: Child[Result] = Child(process, ours)
        self._children.append(child)
        return child

    def wait_ready(self) -> None:
        """Wait until every child is ready. Raises ChildFailed."""
        for child in self._children:
            child.receive()

    def tell(self, word: Any) -> None:
        """Send `word` to all ready children, which then start to work. Link.ready returns the word
        in each child."""
        for child in self._children:
            child.pipe.send(word)

    def counts(self) -> Counts:
        """Return the current sums of the counters of all children."""
        cells = list(self._board)
        return Counts(*(sum(cells[i::_WIDTH]) for i in range(_WIDTH)))

    def watch(self, children: list[Child[Any]], refresh: Callable[[], None]) -> None:
        """Wait until all `children` are done, and call `refresh` at least every REFRESH_S until
        then.

        Raises ChildFailed as soon as any child of the crew fails.
        """
        while waiting := [child for child in children if not child.done]:
            others = [c for c in self._children if not c.done and c not in waiting]
            pipes = {child.pipe: child for child in waiting + others}
            for pipe in connection.wait(list(pipes), REFRESH_S):
                pipes[cast(Connection, pipe)].take()
            refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            if kind is not None:
                child.process.terminate()
            child.process.join(END_S)
            if child.process.is_alive():
                child.process.kill()
            child.pipe.close()


def _run(link: Link, target: Callable[..., Any], args: Any, kwargs: Any) -> None:
    # the parent handles Ctrl-C and ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        link.send(_RESULT, target(link, *args, **kwargs))
    except Exception:
        link.send(_RAISED, traceback.format_exc())
