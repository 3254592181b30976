"""The asyncio version of Consumer. It runs in the caller's event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from purgatoryd.clients.aio import AsyncClient
from purgatoryd.clients.arguments import (
    check_callable,
    check_limit_s,
    check_type,
    check_whole,
    each,
)
from purgatoryd.clients.closing import AsyncClosing
from purgatoryd.clients.consumer import DRAIN_S, Plan, delay_ns, extension_ns, may_wait
from purgatoryd.clients.groups import OnDead, OnFull, Start
from purgatoryd.clients.jobs import Jobs
from purgatoryd.clients.leases import LOG, Lease, LeasedJob, Leases, Sink, error_text
from purgatoryd.clients.ledger import Ledger
from purgatoryd.clients.local_channel import Transport
from purgatoryd.clients.remote import Remote
from purgatoryd.shm_layout.errors import Closed, InvalidArgument, LeaseLost, PurgatorydError
from purgatoryd.shm_layout.layout import CREDITS_MAX, Op


class AsyncJob(LeasedJob):
    """The asyncio version of Job, with the same fields; its answers are coroutines.

    Use it as `async with job:`. A body that is cancelled releases the job. As with Job, the block
    does not wait for its acknowledgement.
    """

    __slots__ = ()

    _desk: _AsyncLine

    async def ack(self, *, timeout: float | timedelta | None = None) -> None:
        """End the job: its work is done."""
        await self._desk.answer((self,), Op.JOB_ACK, b"", 0, timeout)

    async def nack(
        self, error: object = "", *, delay: float | timedelta | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:  # fmt: skip
        """Count the attempt as failed, as Job.nack does."""
        wait_ns = delay_ns(delay)
        await self._desk.answer((self,), Op.JOB_NACK, error_text(error), wait_ns, timeout)

    async def extend(
        self, seconds: float | timedelta, *, timeout: float | timedelta | None = None
    ) -> None:
        """Let the lease end later, as Job.extend does."""
        await self._desk.answer((self,), Op.JOB_EXTEND, b"", extension_ns(seconds), timeout)

    async def release(self, *, timeout: float | timedelta | None = None) -> None:
        """Give the job back. This is no attempt, and another consumer may get it at once."""
        await self._desk.answer((self,), Op.JOB_RELEASE, b"", 0, timeout)

    async def reject(self, error: object = "", *, timeout: float | timedelta | None = None) -> None:
        """Make the job a dead letter at once, as Job.reject does."""
        await self._desk.answer((self,), Op.JOB_REJECT, error_text(error), 0, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:  # fmt: skip
        if error is None and not self.answered:
            self._finish()
        elif error is not None and not self.answered:
            with suppress(PurgatorydError):
                await (self.nack(error) if isinstance(error, Exception) else self.release())
        if not isinstance(error, Exception):
            return False
        LOG.error("the handler of job %r failed in attempt %d", self.key, self.attempt,
                  exc_info=error)  # fmt: skip
        return True


class AsyncConsumer(AsyncClosing):
    """The asyncio version of Consumer, with the same arguments and errors.

    Use it as `async with AsyncConsumer(...) as jobs`, and iterate with `async for job in jobs`. A
    cancelled call loses no job: a job that no task has is given back.
    """

    def __init__(
        self, name: str = "default", *, namespace: str = "default", group: str,
        topics: Sequence[str] = (), lease: float | timedelta = 30.0, max_in_flight: int = 64,
        create: bool = True, start: Start = "latest", max_backlog: int | None = None,
        max_bytes: int | None = None, retention: float | timedelta | None = None,
        max_lease: float | timedelta | None = None, backoff: float | timedelta | None = None,
        backoff_cap: float | timedelta | None = None, max_attempts: int | None = None,
        max_dead: int | None = None, rate: int | None = None, ordered: bool | None = None,
        on_dead: OnDead | None = None, full: OnFull | None = None, timeout: float = 5.0,
        remote: Remote | None = None, durable: bool | None = False, ledger: Ledger | None = None,
        worker: str | None = None, numa_local: bool = False, transport: Transport = "auto",
    ) -> None:  # fmt: skip
        plan = Plan(group, topics, lease, max_in_flight, create, start, locals())
        self._line = _AsyncLine(
            plan, name, namespace=namespace, timeout=timeout, remote=remote, durable=durable,
            ledger=ledger, worker=worker, numa_local=numa_local, transport=transport,
        )  # fmt: skip
        self.group = group

    @property
    def name(self) -> str:
        """Name of the daemon."""
        return self._line._core.name

    @property
    def namespace(self) -> str:
        """Namespace of the consumer group."""
        return self._line._core.namespace

    @property
    def in_flight(self) -> int:
        """Number of jobs that this consumer holds, those included that wait for a task."""
        return self._line.leases.in_flight

    # ---- jobs ------------------------------------------------------------------------------------

    async def get(self, timeout: float | timedelta | None = None) -> AsyncJob | None:
        """Return the next job; None after `timeout` seconds or after stop(), as Consumer.get."""
        return await self._take(check_limit_s(float("inf") if timeout is None else timeout))

    async def _take(self, limit_s: float) -> AsyncJob | None:
        await self._line.connected()
        return await self._line.inbox.take(limit_s, self._line.leases.check)

    async def get_many(self, n: int, timeout: float | timedelta | None = None) -> list[AsyncJob]:
        """Return 1 to `n` jobs, as Consumer.get_many does."""
        n = check_whole("n", n, 1, CREDITS_MAX)
        job = await self.get(timeout)
        jobs = [] if job is None else [job]
        while job is not None and len(jobs) < n and (job := self._line.inbox.pop()) is not None:
            jobs.append(job)
        return jobs

    async def ack_many(
        self, jobs: Iterable[AsyncJob], *, wait: bool = True,
        timeout: float | timedelta | None = None,
    ) -> None:  # fmt: skip
        """Acknowledge many jobs at once, as Consumer.ack_many does. With `wait=False` the
        acknowledgements of one iteration of the event loop are sent together."""
        listed = list(each("jobs", jobs))
        for job in listed:
            check_type("a job", job, AsyncJob, optional=False)
        if any(job._desk is not self._line for job in listed):
            raise InvalidArgument("the jobs must come from this consumer")
        if may_wait(listed, wait, timeout):
            await self._line.answer(listed, Op.JOB_ACK, b"", 0, timeout)
        else:
            self._line.finish(listed)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncJob:
        job = await self._take(float("inf"))
        if job is None:
            raise StopAsyncIteration
        return job

    # ---- handlers --------------------------------------------------------------------------------

    async def run(
        self, handler: Callable[[AsyncJob], Coroutine[Any, Any, object]], *, concurrency: int = 1
    ) -> None:
        """Await `handler(job)` for each job in `concurrency` tasks, until stop() or close(), as
        Consumer.run does with threads. The acknowledgements of all tasks that end in one iteration
        of the event loop are sent together. A cancelled run() cancels the handlers, which releases
        their jobs."""
        if handler is None:
            raise InvalidArgument("handler must be callable, not None")
        check_callable("handler", handler)
        check_whole("concurrency", concurrency, 1, 65_536)
        tasks = [asyncio.ensure_future(self._work(handler)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            self.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _work(self, handler: Callable[[AsyncJob], Coroutine[Any, Any, object]]) -> None:
        with suppress(Closed):
            while (job := await self._take(float("inf"))) is not None:
                await self._handle(job, handler)
                del job  # no job stays in a variable while the task waits
            await self._line.finished()

    async def _handle(
        self, job: AsyncJob, handler: Callable[[AsyncJob], Coroutine[Any, Any, object]]
    ) -> None:
        try:
            async with job:
                await handler(job)
        except LeaseLost as lost:
            LOG.warning("%s", lost)

    # ---- open and close --------------------------------------------------------------------------

    async def connect(self) -> Self:
        """Open the session and join the consumer group. A cancelled connect() closes the
        consumer."""
        await self._line.connect()
        return self

    def stop(self) -> None:
        """Take no more jobs: loops over the consumer, get() and run() end. Jobs that no task has
        are released. Use it with loop.add_signal_handler()."""
        self._line.stop()

    async def close(self, drain: float = DRAIN_S) -> None:
        """Take no more jobs, wait up to `drain` seconds until tasks have answered theirs, and end
        the session, as Consumer.close does."""
        await self._line.leave(check_limit_s(drain, "drain"))

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if kind is None:
            await self.close()
        elif self._line._core.fork_guard.mine:
            with suppress(PurgatorydError):  # the caller's own error is raised instead
                await self.close(drain=0.0)


class _AsyncLine(AsyncClient):
    """The client of an AsyncConsumer."""

    def __init__(self, plan: Plan, name: str, **settings: Any) -> None:
        self._plan = plan
        self._finished_jobs: list[AsyncJob] = []
        """Jobs that finish() has taken in this iteration of the event loop."""
        super().__init__(name, **settings)

    def _start(self) -> Jobs:
        plan = self._plan
        self.inbox = _AsyncInbox(self)
        self.leases = Leases(self._core, plan.group, plan.lease_ns, plan.max_in_flight, self.inbox)
        return Jobs(self._core, self.leases.speak, listens=True)

    async def _greet(self) -> None:
        await super()._greet()
        await self._run(self._plan.opened(self._core, self.leases, self.timeout))

    async def connected(self) -> None:
        """Join the consumer group, unless that has been done. Raises Closed, ForkedProcess."""
        await self._ready()

    async def answer(
        self,
        jobs: Sequence[AsyncJob],
        op: Op,
        text: bytes,
        time_ns: int,
        timeout: float | timedelta | None,
    ) -> None:
        """Answer jobs, and wait until the daemon has taken the answers."""
        limit_s = self._limit_s(timeout)
        self._core.check()
        leases = [job._lease for job in jobs]
        await self._run(self.leases.answered(leases, op, text, time_ns, limit_s))

    def finish(self, jobs: Sequence[AsyncJob]) -> None:
        """Acknowledge jobs without a wait, together with all others of this loop iteration."""
        self._core.check()
        is_first = not self._finished_jobs
        self._finished_jobs += jobs
        if is_first and self._loop is not None:
            self._loop.call_soon(self._take_finished)

    def _take_finished(self) -> None:
        jobs, self._finished_jobs = self._finished_jobs, []
        if not self._core.closed:
            self._take_back()
            self.leases.finish([job._lease for job in jobs])
            self._schedule()

    async def finished(self) -> None:
        """Wait until the daemon has taken all acknowledgements of finish()."""
        self._core.check()
        self._take_finished()
        await self._run(self.leases.finished(self.timeout))

    def drop(self, lease: Lease) -> None:
        """Give back a job whose object was collected without an answer. Any thread may call it."""
        loop = self._loop
        if loop is not None and self._core.fork_guard.mine and not self._core.closed:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._dropped, lease)

    def _dropped(self, lease: Lease) -> None:
        if not self._core.closed:
            self._take_back()
            self.leases.drop(lease)
            self._schedule()

    def stop(self) -> None:
        """Take no more jobs."""
        if self._core.fork_guard.mine and not self._core.closed:
            self._take_back()
            self.leases.stop()
            self._schedule()

    async def leave(self, drain_s: float) -> None:
        """Drain, and close the client."""
        if self._core.closed:
            return
        self._core.check()
        try:
            if self._loop is not None:
                with suppress(Closed):  # another task closes the consumer at the same time
                    await self._run(self.leases.drained(drain_s))
        finally:
            await self.close()
        self.leases.check_finished()

    def _drop(self) -> None:
        super()._drop()
        self.leases.end()


class _AsyncInbox(Sink):
    """The jobs that no task has, and the tasks that wait for jobs."""

    job_type = AsyncJob

    def __init__(self, line: _AsyncLine) -> None:
        self.desk = line
        self._queue: deque[AsyncJob] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._ended = False

    def add(self, jobs: Sequence[AsyncJob]) -> None:
        """Queue jobs."""
        self._queue += jobs
        for _ in jobs:
            self._wake_one()

    def clear(self) -> None:
        """Forget the queued jobs, whose objects then release them."""
        self._queue.clear()

    def wake(self) -> None:
        """Let take() return None."""
        self._ended = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _wake_one(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def pop(self) -> AsyncJob | None:
        """Return a queued job; None if there is none."""
        while self._queue:
            job = self._queue.popleft()
            if not (job.answered or job.lost):
                job._lease.handed = True
                return job
        return None

    async def take(self, limit_s: float, failed: Callable[[], None]) -> AsyncJob | None:
        """Return the next job; None after `limit_s` seconds or after wake(). Raises the errors of
        failed() after wake()."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + limit_s
        while not self._ended:
            if (job := self.pop()) is not None:
                return job
            if (left_s := deadline_s - loop.time()) <= 0:
                return None
            await self._arrival(loop, left_s)
        failed()
        return None

    async def _arrival(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """Wait until a job has come, at most `limit_s` seconds."""
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        try:
            await asyncio.wait((waiter,), timeout=limit_s)
        finally:
            if waiter.done() and self._queue:
                self._wake_one()  # this task was cancelled, or finds the job of another task
            with suppress(ValueError):
                self._waiters.remove(waiter)
            waiter.cancel()


__all__ = ["AsyncConsumer", "AsyncJob"]
