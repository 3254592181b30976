"""The consumer of a consumer group: jobs, and the blocking Consumer.

The engine's thread owns the connections and all leases (leases.py). Callers take jobs from a queue
and hand answers to the engine. If an interrupt, such as Ctrl-C, comes between the queue and the
caller, the job is collected as garbage, and the engine gives it back to the daemon. So no interrupt
loses a job.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import attrgetter
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from purgatoryd.clients import groups
from purgatoryd.clients._pack import jobs_take
from purgatoryd.clients.arguments import (
    check_callable,
    check_choice,
    check_flag,
    check_limit_s,
    check_type,
    check_whole,
    each,
)
from purgatoryd.clients.client import Client
from purgatoryd.clients.closing import Closing
from purgatoryd.clients.engine import ALIVE_S, Engine
from purgatoryd.clients.groups import OnDead, OnFull, Start
from purgatoryd.clients.leases import LOG, NO_DELAY, Lease, LeasedJob, Leases, Sink, error_text
from purgatoryd.clients.local_channel import Transport
from purgatoryd.shm_layout import group_wire
from purgatoryd.shm_layout.errors import (
    Closed,
    InvalidArgument,
    LeaseLost,
    Partitioned,
    PurgatorydError,
)
from purgatoryd.shm_layout.layout import CREDITS_MAX, GroupAction, Op

if TYPE_CHECKING:
    from purgatoryd.clients.core import Core
    from purgatoryd.clients.jobs import Job as Steps
    from purgatoryd.clients.ledger import Ledger
    from purgatoryd.clients.remote import Remote

DRAIN_S = 30.0
"""Time that close() waits for running handlers by default."""
LEASE_LEAST_NS = 1_000_000
_DESK = attrgetter("_desk")
_INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Desk(Protocol):
    """Takes the answers of jobs."""

    def finish(self, jobs: Sequence[Job]) -> None:
        """Acknowledge jobs without a wait."""

    def answer(
        self,
        jobs: Sequence[Job],
        op: Op,
        text: bytes,
        time_ns: int,
        timeout: float | timedelta | None,
    ) -> None:
        """Answer jobs, and wait until the daemon has taken the answers."""

    def drop(self, lease: Lease) -> None:
        """Give back a job whose object was collected without an answer."""


def delay_ns(delay: float | timedelta | None) -> int:
    """Return the delay of a nack for the wire. Raises InvalidArgument."""
    return NO_DELAY if delay is None else groups.check_time_ns("delay", delay)


def extension_ns(seconds: float | timedelta) -> int:
    """Return the time of an extension in ns. Raises InvalidArgument."""
    return groups.check_time_ns("extension", seconds, LEASE_LEAST_NS)


def may_wait(
    jobs: Sequence[LeasedJob], wait: bool, timeout: float | timedelta | None
) -> bool:  # fmt: skip
    """Return whether ack_many() waits. Raises InvalidArgument for a timeout without a wait, and for
    a job with another answer that no wait would report."""
    if check_flag("wait", wait):
        return True
    if timeout is not None:
        raise InvalidArgument("timeout needs wait=True")
    for job in jobs:
        if job._lease.op not in _ACKED:
            raise InvalidArgument(f"job {job.key!r} already has another answer")
    return False


class Job(LeasedJob):
    """A job that a Consumer has leased: a timer that fired, an operation that ended, or a notice.

    Answer it with one of ack(), nack(), release() and reject(), or use it in a `with` block. The
    block acknowledges the job at its end, and does not wait until the daemon has taken that: run()
    and close() do. If the lease was lost meanwhile, that is logged, and `lost` is True; the next
    call that takes jobs, or close(), raises any other error. If the body raises an Exception, the
    block logs it, answers nack with the type and message of the exception, and continues after the
    block. If the body raises KeyboardInterrupt, SystemExit or GeneratorExit, the block releases the
    job and raises. A job that has an answer keeps it.

    A job may run more than once: a process can die after its work and before the ack. So handlers
    must be idempotent; `ticket` is the same in all attempts. Every answer may be repeated after an
    interrupt or a CallTimeout. Raises LeaseLost if the lease has ended, and InvalidArgument if the
    job has another answer.
    """

    __slots__ = ()

    _desk: Desk

    def ack(self, *, timeout: float | timedelta | None = None) -> None:
        """End the job: its work is done."""
        self._desk.answer((self,), Op.JOB_ACK, b"", 0, timeout)

    def nack(
        self, error: object = "", *, delay: float | timedelta | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:  # fmt: skip
        """Count the attempt as failed. `error`: a text or an exception, stored with the job, up to
        1 KiB. `delay`: time until the next attempt; None = as the settings say."""
        wait_ns = delay_ns(delay)
        self._desk.answer((self,), Op.JOB_NACK, error_text(error), wait_ns, timeout)

    def extend(
        self, seconds: float | timedelta, *, timeout: float | timedelta | None = None
    ) -> None:
        """Let the lease end in this time, if that is later, but at most max_lease after its start.
        While a handler runs, the consumer extends its lease by itself."""
        self._desk.answer((self,), Op.JOB_EXTEND, b"", extension_ns(seconds), timeout)

    def release(self, *, timeout: float | timedelta | None = None) -> None:
        """Give the job back. This is no attempt, and another consumer may get it at once."""
        self._desk.answer((self,), Op.JOB_RELEASE, b"", 0, timeout)

    def reject(self, error: object = "", *, timeout: float | timedelta | None = None) -> None:
        """Make the job a dead letter at once. `error`: as for nack()."""
        self._desk.answer((self,), Op.JOB_REJECT, error_text(error), 0, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:  # fmt: skip
        if self.answered:
            return isinstance(error, Exception) and self._logged(error)
        if error is None:
            self._finish()
            return False
        with suppress(PurgatorydError):
            if isinstance(error, Exception):
                self.nack(error)
            else:
                self.release()
        return isinstance(error, Exception) and self._logged(error)

    def _logged(self, error: BaseException) -> bool:
        LOG.error("the handler of job %r failed in attempt %d", self.key, self.attempt,
                  exc_info=error)  # fmt: skip
        return True


_JOBS = {Job}
_ACKED = (0, Op.JOB_ACK)


class JobSource(Closing):
    """The methods that Consumer and FakeConsumer share."""

    @abstractmethod
    def _take(self, limit_s: float) -> Job | None:
        """Return the next job; None after `limit_s` seconds or after stop()."""

    @abstractmethod
    def _take_many(self, n: int, limit_s: float) -> list[Job]:
        """Return the next jobs, at most `n`; none after `limit_s` seconds or after stop()."""

    @abstractmethod
    def _answer(
        self,
        jobs: Sequence[Job],
        op: Op,
        text: bytes,
        time_ns: int,
        timeout: float | timedelta | None,
    ) -> None: ...

    @abstractmethod
    def _finish(self, jobs: Sequence[Job]) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """Take no more jobs: loops over the consumer, get() and run() end. Jobs that no caller has
        are released. A signal handler may call stop()."""

    def get(self, timeout: float | timedelta | None = None) -> Job | None:
        """Return the next job; None if none comes within `timeout` seconds, or after stop().
        Without `timeout` it waits as long as necessary."""
        return self._take(check_limit_s(float("inf") if timeout is None else timeout))

    def get_many(self, n: int, timeout: float | timedelta | None = None) -> list[Job]:
        """Return 1 to `n` jobs. Like get(), it waits for the first one; the list is empty at the
        timeout and after stop()."""
        n = check_whole("n", n, 1, CREDITS_MAX)
        return self._take_many(n, check_limit_s(float("inf") if timeout is None else timeout))

    def ack_many(
        self, jobs: Iterable[Job], *, wait: bool = True, timeout: float | timedelta | None = None
    ) -> None:
        """Acknowledge many jobs at once. Raises the first error, usually LeaseLost, after all jobs
        have their answers.

        With `wait=False` it acknowledges like a `with` block: it does not wait for the daemon.
        run() and close() wait. A lost lease is logged; the next call that takes jobs, or close(),
        raises any other error.
        """
        listed = list(each("jobs", jobs))
        if not _JOBS.issuperset(map(type, listed)):
            for job in listed:
                check_type("a job", job, Job, optional=False)
        if may_wait(listed, wait, timeout):
            self._answer(listed, Op.JOB_ACK, b"", 0, timeout)
        else:
            self._finish(listed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Job:
        job = self._take(float("inf"))
        if job is None:
            raise StopIteration
        return job

    # ---- handlers --------------------------------------------------------------------------------

    def run(self, handler: Callable[[Job], object], *, concurrency: int = 1) -> None:
        """Call `handler(job)` for each job in `concurrency` threads, until stop() or close().

        Each call is a `with job:` block: an exception of the handler is a nack, and the next job
        follows. The next job does not wait for the acknowledgement of the last one; run() returns
        once the daemon has taken all of them. An interrupt of run(), such as Ctrl-C, calls stop()
        and raises; close() then waits for the running handlers.
        """
        if handler is None:
            raise InvalidArgument("handler must be callable, not None")
        check_callable("handler", handler)
        check_whole("concurrency", concurrency, 1, 4096)
        failures: list[BaseException] = []
        threads = [
            threading.Thread(
                target=self._work, args=(handler, failures), name=f"purgatoryd-job-{n}", daemon=True
            )
            for n in range(concurrency)
        ]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                threads[0].join(ALIVE_S)
                threads = [thread for thread in threads if thread.is_alive()] or threads
        except BaseException:
            self.stop()
            raise
        if failures:
            raise failures[0]

    def _work(self, handler: Callable[[Job], object], failures: list[BaseException]) -> None:
        try:
            while (job := self._take(float("inf"))) is not None:
                self._handle(job, handler)
                del job  # no job stays in a variable while the thread waits
            self._finished()
        except Closed:
            pass
        except BaseException as error:
            failures.append(error)
            self.stop()

    def _handle(self, job: Job, handler: Callable[[Job], object]) -> None:
        try:
            with job:
                handler(job)
        except LeaseLost as lost:
            LOG.warning("%s", lost)

    def _finished(self) -> None:
        """Wait until the daemon has taken the acknowledgements of all `with` blocks."""


class Consumer(JobSource):
    """A member of the consumer group `group` of the daemon `name`: it takes jobs and answers them.

    Iterate over it, or call get(), get_many() or run(). Each job goes to one member of its
    consumer group. All methods are thread-safe.

    `topics`: topics of the consumer group. A missing consumer group is created with these topics
    and the settings below; with `create=False` it must exist. If it exists, the settings that are
    given must be those of the consumer group; all others may differ. `lease`: seconds or a
    timedelta for which the daemon gives a job to this process. While the process runs, it extends
    its leases, up to `max_lease` after their start. If the process or its connection ends, the
    daemon counts an attempt as failed and gives the job to another member. `max_in_flight`: number
    of jobs that this consumer holds at most, those included that wait for a caller. In a namespace
    with several partitions it is shared by all of them, and must be at least their number.
    `timeout`, `remote`, `durable`, `ledger`, `worker`, `numa_local` and `transport`: as for Client.

    Settings of a new consumer group. `max_backlog` and `max_bytes`: its budget in pending timers,
    jobs and dead letters, 4,096 by default, and in bytes of their keys and payloads, 2 MiB by
    default (0 = no limit). `full`: if the budget is used up, "refuse" new timers of the topics with
    FullGroup, or "drop_oldest" waiting job. `retention`: time after which a waiting job becomes a
    dead letter (0 = never). `backoff`, `backoff_cap`: longest delay before the second and before
    any attempt. `max_attempts`: failed attempts after which a job is a dead letter. `max_dead`:
    dead letters that are kept. `rate`: leases per second (0 = no limit). `ordered`: lease one job
    of a key at a time, in order of their deadlines; `on_dead`: a dead letter lets later jobs of its
    key pass ("skip") or not ("block"). `start`: "earliest" adds the notices that the replay buffer
    has, the oldest first, up to the budget; the others count as dropped. Times are seconds or
    timedeltas.

    Raises GroupMissing, GroupMismatch, GroupRefused, Refused, InvalidArgument, and the errors of
    Client.
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
        self._line = _Line(
            plan, name, namespace=namespace, timeout=timeout, remote=remote, durable=durable,
            ledger=ledger, worker=worker, numa_local=numa_local, transport=transport,
        )  # fmt: skip
        self._inbox, self._desk = self._line.inbox, self._line.desk
        self.group = group

    @property
    def name(self) -> str:
        """Name of the daemon."""
        return self._line.name

    @property
    def namespace(self) -> str:
        """Namespace of the consumer group."""
        return self._line.namespace

    @property
    def in_flight(self) -> int:
        """Number of jobs that this consumer holds, those included that wait for a caller."""
        return self._line.leases.in_flight

    def _take(self, limit_s: float) -> Job | None:
        self._desk.request()
        return self._inbox.take(limit_s, self._line.check, self._line.leases.check)

    def _take_many(self, n: int, limit_s: float) -> list[Job]:
        job = self._take(limit_s)
        return [] if job is None else self._inbox.take_more([job], n)

    def _answer(
        self,
        jobs: Sequence[Job],
        op: Op,
        text: bytes,
        time_ns: int,
        timeout: float | timedelta | None,
    ) -> None:
        self._check_origin(jobs)
        self._desk.answer(jobs, op, text, time_ns, timeout)

    def _finish(self, jobs: Sequence[Job]) -> None:
        self._check_origin(jobs)
        self._desk.finish(jobs)

    def _check_origin(self, jobs: Sequence[Job]) -> None:
        if not {self._desk}.issuperset(map(_DESK, jobs)):
            raise InvalidArgument("the jobs must come from this consumer")

    def _finished(self) -> None:
        self._line.desk.finished()

    def stop(self) -> None:
        """Take no more jobs: loops over the consumer, get() and run() end. Jobs that no caller has
        are released. A signal handler may call stop()."""
        self._line.stop()

    def close(self, drain: float = DRAIN_S) -> None:
        """Take no more jobs, wait up to `drain` seconds until callers have answered theirs, and end
        the session.

        The daemon gives the jobs that are left to other members, without counting an attempt. Then
        it raises the errors of Client.close. Repeat an interrupted close().
        """
        self._line.leave(check_limit_s(drain, "drain"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if kind is None:
            self.close()
        elif self._line.mine:
            with suppress(PurgatorydError):  # the caller's own error is raised instead
                self.close(drain=0.0)


class Plan:
    """The checked arguments of a consumer. Raises InvalidArgument."""

    def __init__(
        self, group: str, topics: Sequence[str], lease: float | timedelta, max_in_flight: int,
        create: bool, start: str, arguments: dict[str, Any],
    ) -> None:  # fmt: skip
        group_wire.encode_group(group)
        check_type("create", create, bool, optional=False)
        self.group = group
        self.topics = groups.check_topics(topics) if create or topics else ()
        self.lease_ns = groups.check_time_ns("lease", lease, LEASE_LEAST_NS)
        self.max_in_flight = check_whole("max_in_flight", max_in_flight, 1, CREDITS_MAX)
        check = groups.check_new_settings if create else groups.check_settings
        self.settings = check(groups.settings_of(arguments))
        self.earliest = check_choice("start", start, ("latest", "earliest")) == "earliest"
        self.create = create

    def opened(self, core: Core, leases: Leases, limit_s: float) -> Steps[None]:
        """Find or create the consumer group, and join it in each partition."""
        count = len(core.connections)
        if self.max_in_flight < count:
            detail = f"a consumer needs max_in_flight of at least {count}"
            raise Partitioned(core.namespace, count, detail)
        if self.create:
            yield from groups.created(
                core, self.group, limit_s, self.settings, self.topics, self.earliest
            )
        else:
            info = yield from groups.one_group(core, GroupAction.DESCRIBE, self.group, limit_s)
            groups.check_same(core.namespace, info, self.settings, self.topics)
        yield from leases.joined(limit_s)


class _Line(Client):
    """The client of a Consumer."""

    def __init__(self, plan: Plan, name: str, **settings: Any) -> None:
        self._plan = plan
        super().__init__(name, **settings)
        try:
            self._engine.call(plan.opened(self._core, self.leases, self.timeout))
        except BaseException:
            self._engine.end()
            raise

    def _start(self) -> Engine:
        plan = self._plan
        self.inbox = inbox = _Inbox()
        self.leases = leases = Leases(
            self._core, plan.group, plan.lease_ns, plan.max_in_flight, inbox
        )
        engine = Engine(self._core, after=leases.speak, at_end=leases.end, listens=True)
        self.desk = inbox.desk = _Desk(engine, leases, self.timeout)
        return engine

    @property
    def mine(self) -> bool:
        """True in the process that created the consumer."""
        return self._core.fork_guard.mine

    def check(self) -> None:
        """Raise Closed or ForkedProcess if the consumer may not be used."""
        self._core.check()

    def stop(self) -> None:
        """Take no more jobs."""
        if self.mine and not self._core.closed:
            self.inbox.end()
            self._engine.put(self.leases.stop, urgent=True)

    def leave(self, drain_s: float) -> None:
        """Drain, and close the client."""
        if self._core.closed:
            return
        self._core.check()
        with suppress(Closed):  # another thread closes the consumer at the same time
            self.desk.request()  # perhaps an interrupt left some
            self._engine.call(self.leases.drained(drain_s))
        self._close(self._limit_s(None))
        self.leases.check_finished()


class _Desk:
    """Hands the answers of jobs to the engine. It holds no reference to the Consumer, so that a
    job does not keep its connection open."""

    def __init__(self, engine: Engine, leases: Leases, timeout_s: float) -> None:
        self._engine = engine
        self._leases = leases
        self._timeout_s = timeout_s
        self._jobs: deque[Job] = deque()
        """Jobs that finish() has taken and the engine has not."""

    def answer(
        self,
        jobs: Sequence[Job],
        op: Op,
        text: bytes,
        time_ns: int,
        timeout: float | timedelta | None,
    ) -> None:
        """Answer jobs, and wait until the daemon has taken the answers."""
        limit_s = check_limit_s(self._timeout_s if timeout is None else timeout)
        leases = [job._lease for job in jobs]
        self._leases.core.check()
        self._engine.call(self._leases.answered(leases, op, text, time_ns, limit_s))

    def finish(self, jobs: Sequence[Job]) -> None:
        """Acknowledge jobs without a wait. A request lets the engine take all jobs that it finds.
        After an interrupt before the request, the next request takes the jobs, and the caller makes
        one when it takes its next job."""
        self._leases.core.check()
        self._jobs.extend(jobs)
        self.request()

    def request(self) -> None:
        """Let the engine take the jobs of finish() that it has not taken."""
        if self._jobs:
            self._engine.put(self.take_finished)

    def take_finished(self) -> None:
        """Take the jobs of finish(), in the engine's thread."""
        if not self._jobs:
            return
        jobs = [self._jobs.popleft() for _ in range(len(self._jobs))]
        self._leases.finish([job._lease for job in jobs])

    def finished(self) -> None:
        """Wait until the daemon has taken all acknowledgements of finish()."""
        self._engine.call(self._leases.finished(self._timeout_s))

    def drop(self, lease: Lease) -> None:
        """Give back a job whose object was collected without an answer."""
        if self._leases.core.fork_guard.mine and not self._engine.ended:
            self._engine.put(lambda: self._leases.drop(lease))


class _Inbox(Sink):
    """The queue between the engine and the callers. None in the queue wakes all callers."""

    job_type = Job
    desk: _Desk

    def __init__(self) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._ended = False

    def add(self, jobs: Sequence[Job]) -> None:
        """Queue jobs."""
        put = self._queue.put
        for job in jobs:
            put(job)

    def clear(self) -> None:
        """Forget the queued jobs, whose objects then release them."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()

    def end(self) -> None:
        """Let take() return None, as soon as it looks at the queue."""
        self._ended = True

    def wake(self) -> None:
        """Let take() return None."""
        self.end()
        self._queue.put(None)

    def take(
        self, limit_s: float, check: Callable[[], None], failed: Callable[[], None]
    ) -> Job | None:
        """Return the next job; None after `limit_s` seconds or after wake(). Raises the errors of
        check(), and those of failed() after wake()."""
        check()
        deadline_s = time.monotonic() + limit_s
        while True:
            if self._ended:
                failed()
                return None
            left_s = max(deadline_s - time.monotonic(), 0.0)
            try:
                job = self._queue.get(timeout=min(left_s, ALIVE_S)) if left_s else self._pop()
            except Empty:
                if left_s <= ALIVE_S:
                    return None
                continue
            if job is None:
                self._queue.put(None)  # for the next caller
            elif not (job.answered or job.lost):
                # No statement may come between the two steps, so that a job that an interrupt
                # drops is released.
                job._lease.handed = True; return job  # noqa: E702  # fmt: skip

    def _pop(self) -> Job | None:
        return self._queue.get_nowait()

    def take_more(self, jobs: list[Job], most: int) -> list[Job]:
        """Add jobs that are in the queue to a list, until it has `most`, and return the list."""
        if jobs_take(self._queue.get_nowait, Empty, jobs, most, time.monotonic()):
            self._queue.put(None)  # for the next caller
        return jobs


__all__ = ["Consumer", "Job"]
