"""The processes of a run: spawned, counted, and ended with the block that started them.

A child says when it is ready, waits for the word to go, works, and returns its result; what it
raises comes out in the parent. While it works it counts in a row of shared memory of its own,
which the parent reads for the display and for nothing else.
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
    """A child process raised, or died; `details` is its traceback or its exit code."""

    def __init__(self, name: str, details: str) -> None:
        super().__init__(f"process {name}: {details}")
        self.name = name
        self.details = details


class Counts(NamedTuple):
    """What children did so far: acknowledged adds and cancels, and notices received."""

    adds: int = 0
    cancels: int = 0
    notices: int = 0


_WIDTH = len(Counts._fields)


class Link:
    """A child's side of its connection to the parent."""

    def __init__(self, pipe: Connection, board: Any, row: int) -> None:
        self._pipe = pipe
        self._board = board
        self._at = row * _WIDTH

    def ready(self) -> Any:
        """Says that this child is ready, and returns what the parent tells it then."""
        self.send(_READY)
        return self._pipe.recv()

    def send(self, kind: str, value: Any = None) -> None:
        """One message to the parent."""
        self._pipe.send((kind, value))

    def count(self, adds: int = 0, cancels: int = 0, notices: int = 0) -> None:
        """Adds to this child's counts."""
        board, at = self._board, self._at
        board[at] += adds
        board[at + 1] += cancels
        board[at + 2] += notices


class Child(Generic[Result]):
    """A process, seen from the parent."""

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.done = False
        self._result: Any = None

    def take(self) -> None:
        """Takes the result, which must be there or on its way. Raises ChildFailed."""
        self._result = self.receive()
        self.done = True

    @property
    def result(self) -> Result:
        """What the child returned; only once it is done."""
        assert self.done
        return cast(Result, self._result)

    def receive(self) -> Any:
        """The next message's value. Raises ChildFailed if the child did."""
        try:
            kind, value = self.pipe.recv()
        except EOFError:
            self.process.join(END_S)
            raise ChildFailed(self.process.name, f"exit code {self.process.exitcode}") from None
        if kind == _RAISED:
            raise ChildFailed(self.process.name, value)
        return value


class Crew:
    """Up to `size` children; those that still run at the end of the block are ended."""

    def __init__(self, size: int) -> None:
        self._context = get_context("spawn")
        self._board = RawArray("q", size * _WIDTH)
        self._children: list[Child[Any]] = []

    def start(
        self, name: str, target: Callable[Concatenate[Link, P], Result],
        *args: P.args, **kwargs: P.kwargs,
    ) -> Child[Result]:  # fmt: skip
        """Starts target(link, *args, **kwargs) in a process of its own."""
        ours, theirs = self._context.Pipe()
        link = Link(theirs, self._board, len(self._children))
        process = self._context.Process(
            target=_run, name=name, args=(link, target, args, kwargs), daemon=True
        )
        process.start()
        theirs.close()  # so that the end of the child is the end of the pipe
        child: Child[Result] = Child(process, ours)
        self._children.append(child)
        return child

    def wait_ready(self) -> None:
        """Returns when every child is ready. Raises ChildFailed."""
        for child in self._children:
            child.receive()

    def tell(self, word: Any) -> None:
        """Lets the ready children go; each one's Link.ready returns `word`."""
        for child in self._children:
            child.pipe.send(word)

    def counts(self) -> Counts:
        """The sum over all children, as of now."""
        cells = list(self._board)
        return Counts(*(sum(cells[i::_WIDTH]) for i in range(_WIDTH)))

    def watch(self, children: list[Child[Any]], refresh: Callable[[], None]) -> None:
        """Returns when all `children` are done; calls `refresh` every REFRESH_S meanwhile.

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    try:
        link.send(_RESULT, target(link, *args, **kwargs))
    except Exception:
        link.send(_RAISED, traceback.format_exc())
