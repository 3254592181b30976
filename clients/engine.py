"""The thread that owns a blocking client's connection, and how calls reach it.

Python runs a signal handler in the main thread, between any two of its bytecodes. An exception of
the handler, such as KeyboardInterrupt, leaves the work of that thread half done. So callers
change nothing of the connection. A caller checks its arguments, hands the engine one request with
one put into a queue, which is a single step in C, and waits. The engine's thread, which no handler
interrupts, packs, sends, receives, and keeps every deadline.

So an interrupted call either never reached the queue, or goes on without its caller: the engine
still receives its answer. A new public call stays safe by the same rule: prepare everything first,
put one request, and then only wait and read the result.

A request is a function, which the engine runs at once, or a Call, which has a job (see jobs.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from purgatoryd.clients.core import OPEN_RETRY_S, Core
from purgatoryd.clients.jobs import Job, Jobs, nothing
from purgatoryd.shm_layout.errors import Closed, PurgatorydError
from purgatoryd.shm_layout.layout import BATCH_RECORDS

FLUSH_S = 0.0003  # how long a packed call waits for others to fill its batch
ALIVE_S = 1.0  # how often a waiting caller makes sure that the engine runs
JOIN_S = 1.0  # how long garbage collection waits for the thread's end

_LOG = logging.getLogger("purgatoryd")

Result = TypeVar("Result")


class Call(Generic[Result]):
    """A job on its way through the engine, for which its caller waits."""

    __slots__ = ("_answered", "_error", "_result", "job", "taken")

    def __init__(self, job: Job[Result]) -> None:
        self.job = job
        self.taken = False
        """True once the engine has the call."""
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Wakes the caller."""
        self._result, self._error = result, error
        self._answered.release()

    def wait(self, alive: Callable[[], bool]) -> Result:
        """Return or raise the outcome of the job. Raises Closed if the engine has ended."""
        while not self._answered.acquire(timeout=ALIVE_S):
            if not alive() and not self._answered.acquire(timeout=0):
                raise Closed("client")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Engine(Jobs):
    """The only thread that uses `core`, until close() or end(). `after` runs in this thread."""

    def __init__(
        self,
        core: Core,
        *,
        after: Callable[[], float] = nothing,
        at_end: Callable[[], object] = nothing,
        listens: bool = False,
    ) -> None:
        """`at_end` runs once, after the last call has ended."""
        super().__init__(core, after, listens=listens)
        self._at_end = at_end
        self._refuses = False
        self._requests: SimpleQueue[Callable[[], object] | Call[Any]] = SimpleQueue()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._kicked = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with the engine, not with the connection: a caller may write to it after close().
        weakref.finalize(self, os.close, self._kicked).atexit = False
        self._wake: Callable[[], object] = nothing
        self._wake_at = 0
        """Number of queued requests that wakes the engine; 0 = it is awake."""
        self._thread = threading.Thread(target=self._run, name="purgatoryd-client", daemon=True)
        self._thread.start()

    # ---- for callers ---------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Records without a result, and requests in the queue."""
        return self.core.packer.queued + self._requests.qsize()

    def put(self, request: Callable[[], object] | Call[Any], *, urgent: bool = False) -> None:
        """Hand a request to the engine. Before it is in the queue, nothing has happened.

        If an interrupt prevents the wake-up, the engine takes the request at its next wake-up.
        """
        self._requests.put(request)
        if (enough := self._wake_at) and (urgent or self._requests.qsize() >= enough):
            self._wake()

    def call(self, job: Job[Result]) -> Result:
        """Hand a job to the engine and wait for its end."""
        return self.run(Call(job))

    def run(self, call: Call[Result]) -> Result:
        """Hand a call to the engine and wait for its end."""
        self.put(call, urgent=True)
        if self._refuses:  # the engine has ended, and may not have refused this call
            raise Closed("client")
        return self.wait(call)

    def wait(self, call: Call[Result]) -> Result:
        """Wait for the end of a call that the engine has."""
        return call.wait(self._alive)

    def knows(self, taken: Callable[[], bool]) -> bool:
        """Return `taken()`, evaluated after the engine has taken all earlier requests."""
        return self.call(_asked(taken))

    def _alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """End the thread and drop the connection without BYE."""
        if not self.core.fork_guard.mine:
            return
        self.put(self._end, urgent=True)
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _end(self) -> None:
        self.ended = True

    def join(self, limit_s: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(limit_s)

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException = Closed("client")
        try:
            while not self.ended:
                self._try()
        except BaseException as broken:
            _LOG.exception("the connection of a client failed")
            error = broken
        finally:
            self.ended = self._refuses = True
            self.core.close()
            self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        """End all calls with `error`, including those still in the queue."""
        with suppress(Empty):
            while True:
                if isinstance(request := self._requests.get_nowait(), Call):
                    self._calls.append(request)
        self.refuse(error)
        self._at_end()

    def _try(self) -> None:
        """Run one iteration. An error of the connection fails every waiting call."""
        try:
            self._wait()
            self.turn()
        except (PurgatorydError, OSError) as error:
            self._drain()
            self.advance(error)
            time.sleep(OPEN_RETRY_S)  # the same error may come again at once

    # ---- waiting for requests and answers --------------------------------------------------------

    def _wait(self) -> None:
        """Sleep until there is work, and take the requests from the queue."""
        if not self.expects and not self.listens:
            request = self._requests.get()
            self._take(request)
            self._drain()
            if not self._calls:
                self._await_company()
        elif not self.core.try_open() or self.core.channel is None:
            with suppress(Empty):
                self._take(self._requests.get(timeout=OPEN_RETRY_S))
        else:
            self._listen()
        self._drain()

    def _await_company(self) -> None:
        """Wait until a batch is full or a caller waits for its answer, at most FLUSH_S."""
        self._wake, self._wake_at = partial(self._bell.put, None), BATCH_RECORDS
        with suppress(Empty):
            self._bell.get(timeout=FLUSH_S)
        self._wake_at = 0

    def _listen(self) -> None:
        """Wait for a message or a request; send again when the daemon stays silent.

        While an answer is missing, packed calls wait for that answer, unless they fill a batch.
        """
        core = self.core
        assert core.channel is not None
        limit_s = max(self.wake_s - core.host.monotonic_s(), 0.0)
        expects = self.expects
        self._wake = partial(os.eventfd_write, self._kicked, 1)
        self._wake_at = BATCH_RECORDS if expects else 1
        if not self._requests.empty():
            limit_s = 0.0
        core.channel.wait(limit_s, to_send=self.blocked, kicked=self._kicked)
        self._wake_at = 0

    def _drain(self) -> None:
        """Take the requests from the queue."""
        with suppress(Empty):
            for _ in range(self._requests.qsize()):
                self._take(self._requests.get_nowait())

    def _take(self, request: Callable[[], object] | Call[Any]) -> None:
        if isinstance(request, Call):
            request.taken = True
            self.begin(request)
        else:
            request()


def _asked(question: Callable[[], bool]) -> Job[bool]:
    yield 0.0
    return question()
