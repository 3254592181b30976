"""The thread that owns a blocking client's connections, and how calls reach it.

Python runs a signal handler in the main thread, between any two of its bytecodes. An exception of
the handler, such as KeyboardInterrupt, leaves the work of that thread half done. So callers never
change a connection. A caller checks its arguments, puts one request into the engine's queue, and
waits. The put is a single step in C. The engine's thread, which no handler interrupts, packs,
sends, receives, and watches every deadline.

So an interrupted call either never reached the queue, or goes on without its caller: the engine
still receives its answer. Every public call must follow this rule: prepare everything first, put
one request, and then only wait and read the result.

A request is a function, which the engine runs at once, or a Call, which has a job (see jobs.py).
An Admin has a Worker instead of an engine; a Worker runs one call at a time.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from purgatoryd.clients._pack import Requests
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import DIRECT_S, NO_SPIN, OPEN_RETRY_S, Core, Spin
from purgatoryd.clients.jobs import Job, Jobs, Started, nothing
from purgatoryd.clients.packing import Packer
from purgatoryd.clients.poller import ChannelPoller
from purgatoryd.shm_layout.errors import CallTimeout, Closed, PurgatorydError
from purgatoryd.shm_layout.layout import BATCH_RECORDS

if TYPE_CHECKING:
    from purgatoryd.clients.lots import Lot

FLUSH_S = 0.0003  # Time that a packed call waits for other calls to fill its batch.
ALIVE_S = 1.0  # Interval at which a waiting caller checks that the engine runs.
JOIN_S = 1.0  # Time that garbage collection waits until the thread has ended.

Result = TypeVar("Result")


class Call(Started[Result]):
    """A job that a caller hands to the client's thread, and for which the caller waits."""

    __slots__ = ("_answered", "_claimed")

    def __init__(self, job: Job[Result]) -> None:
        super().__init__(job)
        self._answered = threading.Lock()
        self._answered.acquire()
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        """Return True only once: to the thread that begins the job, or to the caller that takes the
        job back."""
        return self._claimed.acquire(blocking=False)

    def finish(self, result: Result | None = None, error: BaseException | None = None) -> None:
        """Note the outcome, and wake the caller."""
        super().finish(result, error)
        self._answered.release()

    def wait(self, alive: Callable[[], bool], limit_s: float = float("inf")) -> Result:
        """Return or raise the outcome of the job. Raises Closed if the thread has ended, and
        CallTimeout after `limit_s` seconds."""
        deadline_s = time.monotonic() + limit_s
        while not self.done and not self._answered.acquire(timeout=_nap_s(deadline_s)):
            if not alive() and not self.done:
                raise Closed("client")
            if time.monotonic() >= deadline_s and not self.done:
                raise CallTimeout("call", limit_s, 0)
        return self.outcome()


def _nap_s(deadline_s: float) -> float:
    return min(max(deadline_s - time.monotonic(), 0.0), ALIVE_S)


WorkerRequests = SimpleQueue[Callable[[], object] | Call[Any] | None]


class CallThread(ABC):
    """A thread that does the work of a client; callers hand it requests."""

    _thread: threading.Thread
    _refuses = False
    """True once the thread ends. Then a call that enters the queue perhaps gets no answer."""

    @abstractmethod
    def put(self, request: Callable[[], object] | Call[Any], *, urgent: bool = False) -> None:
        """Hand a request to the thread. An interrupt before the request is in the queue has no
        effect."""

    def call(self, job: Job[Result]) -> Result:
        """Hand a job to the thread and wait until it has ended."""
        return self.run(Call(job))

    def run(self, call: Call[Result]) -> Result:
        """Hand a call to the thread and wait until it has ended."""
        self.put(call, urgent=True)
        return self.wait(call)

    def wait(self, call: Call[Result], limit_s: float = float("inf")) -> Result:
        """Wait until a call that was handed to the thread has ended. Raises CallTimeout after
        `limit_s` seconds."""
        if self._refuses and not call.done:  # perhaps the thread ended before it took this call
            raise Closed("client")
        return call.wait(self._alive, limit_s)

    @abstractmethod
    def begun(self, call: Call[Any]) -> bool:
        """Return whether the thread has begun a call. If not, the call never begins."""

    def report(self, call: Call[Result], handle: object) -> Result:
        """Run a call. Attach `handle` to an exception that interrupts it after it has begun."""
        try:
            return self.run(call)
        except BaseException as error:
            if not isinstance(error, PurgatorydError):
                self.leave_handle(error, handle, lambda: self.begun(call))
            raise

    def leave_handle(self, error: BaseException, handle: object, sent: Callable[[], bool]) -> None:
        """Attach `handle` to the error of a call that was interrupted or timed out, unless sent()
        returns False."""
        vars(error)["handle"] = handle
        try:
            if not sent():
                del vars(error)["handle"]
        except PurgatorydError:
            return  # the client was closed, so sent() gave no answer
        except BaseException as second:
            vars(second)["handle"] = handle
            raise

    def _alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, limit_s: float) -> None:
        """Wait at most `limit_s` seconds until the thread has ended."""
        self._thread.join(limit_s)


class Worker(CallThread):
    """A thread that runs one request at a time. It finishes a request before it takes the next."""

    def __init__(self, name: str) -> None:
        self._requests: WorkerRequests = SimpleQueue()
        self._thread = threading.Thread(
            target=_work_off, args=(self._requests,), name=name, daemon=True
        )
        weakref.finalize(self, _end, self._requests, self._thread, JOIN_S).atexit = False
        self._thread.start()

    def put(self, request: Callable[[], object] | Call[Any], *, urgent: bool = False) -> None:
        """Hand a request to the thread. An interrupt before the request is in the queue has no
        effect."""
        self._requests.put(request)

    def begun(self, call: Call[Any]) -> bool:
        """Return whether the thread has begun a call. If not, the call never begins."""
        return not call.claim()

    def end(self, last: Callable[[], object], limit_s: float) -> None:
        """Let the thread run `last` and then end. Wait at most `limit_s` seconds for its end."""
        self._requests.put(last)
        _end(self._requests, self._thread, limit_s)


def _end(requests: WorkerRequests, thread: threading.Thread, limit_s: float) -> None:
    """End the thread of a Worker after its last request. The caller can be that thread itself."""
    requests.put(None)
    if thread is not threading.current_thread() and thread.is_alive():
        thread.join(limit_s)


def _work_off(requests: WorkerRequests) -> None:
    """Run the requests of a Worker. While it waits for a request, this function holds no reference
    to the last one."""
    while _done(requests.get()):
        pass


def _done(request: Callable[[], object] | Call[Any] | None) -> bool:
    """Run a request. Return False for None, which ends the thread."""
    if isinstance(request, Call):
        _work(request)
    elif request is not None:
        request()
    return request is not None


def _work(call: Call[Any]) -> None:
    """Run a job to its end, unless its caller has taken it back."""
    if not call.claim():
        call.finish(error=CallTimeout("a call that was never sent", 0.0, 0))
        return
    try:
        while True:
            next(call.job)
    except StopIteration as stop:
        call.finish(stop.value)
    except BaseException as error:
        call.finish(error=error)


class Engine(CallThread, Jobs):
    """The only thread that uses `core`, until close() or end().

    `after` and `at_end` run in this thread: `after` with every exchange (see Jobs), `at_end` once,
    after the last call has ended.
    """

    def __init__(
        self,
        core: Core,
        *,
        after: Callable[[], float] = nothing,
        at_end: Callable[[], object] = nothing,
        listens: bool = False,
        spin: Spin = NO_SPIN,
    ) -> None:
        super().__init__(core, after, listens=listens)
        self._at_end = at_end
        self._requests: SimpleQueue[Callable[[], object] | Call[Any]] = SimpleQueue()
        self._spin = spin
        self._bell: SimpleQueue[None] = SimpleQueue()
        # The eventfd is closed with the engine, not with the connection, because a caller may write
        # to it after close(). The two statements share a line: no interrupt may come between them.
        flags, finalize = os.EFD_NONBLOCK | os.EFD_CLOEXEC, weakref.finalize
        self._kicked = fd = os.eventfd(0, flags); finalize(self, os.close, fd).atexit = False  # noqa: E702  # fmt: skip
        self._queue = Requests(self._requests, nothing, fd)
        self._poller = ChannelPoller(fd)
        self._wake: Callable[[], object] = nothing
        self._wake_at = 0
        """The engine is woken once the queue has this number of requests; 0 = it is awake."""
        self._thread = threading.Thread(target=self._run, name="purgatoryd-client", daemon=True)

    def start(self) -> None:
        """Start the thread. The owner must register end() as a finalizer before this call, because
        an interrupt may follow at once."""
        self._thread.start()

    # ---- for callers ---------------------------------------------------------------------------

    def queued(self, connection: Connection) -> int:
        """Return the number of records of the connection that have no result."""
        return connection.packer.queued + connection.packer.collecting

    def put(self, request: Callable[[], object] | Call[Any], *, urgent: bool = False) -> None:
        """Hand a request to the engine. An interrupt before it is in the queue has no effect.

        If an interrupt prevents the wake-up, the engine takes the request at its next wake-up.
        """
        self._queue.put(request)
        if (enough := self._wake_at) and (urgent or self._requests.qsize() >= enough):
            self._wake()

    @property
    def requests(self) -> Requests:
        """The queue, for lots."""
        return self._queue

    def collect(self, lot: Lot, packer: Packer) -> None:
        """Let the engine collect a lot after all earlier requests. Callers may add to the lot until
        then. An interrupt before the request is in the queue has no effect."""
        full = packer.collecting
        self._queue.open(partial(packer.collect, lot))
        packer.lots.append(lot)
        if self._wake_at == 1 or (self._wake_at and full):
            self._wake()

    def knows(self, taken: Callable[[], bool]) -> bool:
        """Let the engine call taken() after all earlier requests, and return the result."""
        return self.call(_asked(taken))

    def begun(self, call: Call[Any]) -> bool:
        """Return whether the engine has begun a call. If not, the call never begins."""
        return self.knows(lambda: call.taken)

    def end(self) -> None:
        """End the thread and drop the connection without BYE."""
        if not self.core.fork_guard.mine:
            return
        self.put(self._end, urgent=True)
        if self._thread is not threading.current_thread() and self._alive():
            self._thread.join(JOIN_S)

    def _end(self) -> None:
        self.ended = True

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException = Closed("client")
        try:
            while not self.ended:
                self._try()
        except BaseException as broken:
            error = broken
            import logging  # only here, because the import would delay short commands

            logging.getLogger("purgatoryd").exception(
                "the thread of a client failed; all its calls raise this error"
            )
        finally:
            self.ended = self._refuses = True
            self._take_back()
            self.core.close()
            self._queue.put(nothing)  # ends the open lots, so that later calls raise Closed
            self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        """End all calls with `error`, including calls that are still in the queue."""
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
            self.iterate()
        except (PurgatorydError, OSError) as error:
            self._drain()
            self.advance(error)
            time.sleep(OPEN_RETRY_S)  # a pause, because the error could repeat at once

    # ---- waiting for requests and answers --------------------------------------------------------

    def _wait(self) -> None:
        """Sleep until there is work, and take the requests from the queue."""
        if not self.expects and not self.listens:
            self._lend()
            self._open(self._requests.get())
        elif not self.core.try_open():
            with suppress(Empty):
                self._take(self._requests.get(timeout=OPEN_RETRY_S))
        else:
            self._listen()
        self._drain()

    def _open(self, request: Callable[[], object] | Call[Any]) -> None:
        """Take the request that ends the idle time. Unless a caller waits, let others join."""
        if isinstance(request, Call):
            self._take_back()
            self._take(request)
            self._drain()
            if not self._calls:
                self._await_company()
        else:
            self._await_lots()
            self._take_back()
            self._take(request)

    def _await_lots(self) -> None:
        """Wait for other requests, and while callers send full lots themselves."""
        direct, seen = self.core.direct, None
        while (sent := 0 if direct is None else direct.lots) != seen:
            seen = sent
            self._await_company()
            if not self._queue.streams:
                return

    def _lend(self) -> None:
        """Let callers use the channels of idle connections, until a request comes."""
        self.core.lend(self._queue, round(DIRECT_S * 1e9), self._spin)
        self._queue.admit()

    def _take_back(self) -> None:
        for connection in self.core.connections:
            connection.take_back()

    def _await_company(self) -> None:
        """Wait until the queue fills a batch or a caller waits for an answer, at most FLUSH_S."""
        self._wake, self._wake_at = partial(self._bell.put, None), BATCH_RECORDS
        with suppress(Empty):
            self._bell.get(timeout=FLUSH_S)
        self._wake_at = 0

    def _listen(self) -> None:
        """Wait for a message, for a request, or until it is time to send messages again.

        While an answer is missing, calls in the queue wait for that answer or until they fill a
        batch.
        """
        limit_s = max(self.wake_s - self.core.host.monotonic_s(), 0.0)
        expects = self.expects
        for connection in self.core.connections:
            assert connection.channel is not None
            self._poller.watch(connection.channel, to_send=connection.blocked)
        self._wake = partial(os.eventfd_write, self._kicked, 1)
        self._wake_at = BATCH_RECORDS if expects else 1
        if not self._requests.empty():
            limit_s = 0.0
        ready = self._poller.wait(limit_s)
        for connection in self.core.connections:
            connection.news |= connection.channel in ready
        self._wake_at = 0

    def _drain(self) -> None:
        """Take all requests from the queue."""
        with suppress(Empty):
            for _ in range(self._requests.qsize()):
                self._take(self._requests.get_nowait())

    def _take(self, request: Callable[[], object] | Call[Any]) -> None:
        if isinstance(request, Call):
            self.begin(request)
        else:
            request()


def _asked(question: Callable[[], bool]) -> Job[bool]:
    yield 0.0
    return question()
