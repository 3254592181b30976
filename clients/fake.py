"""A consumer without a daemon, for unit tests of handlers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from purgatoryd.clients.arguments import check_whole, each
from purgatoryd.clients.connection import NEVER_S
from purgatoryd.clients.consumer import DRAIN_S, Job, JobSource
from purgatoryd.clients.items import check_priority
from purgatoryd.clients.leases import LOG, NO_DELAY, Lease
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import Closed, InvalidArgument
from purgatoryd.shm_layout.group_wire import RawJob
from purgatoryd.shm_layout.layout import NOTICE_OF_SCHEDULE, Cause, Op

if TYPE_CHECKING:
    from purgatoryd.clients.model import Occurrence
    from purgatoryd.shm_layout.wire import Key, Verdict


class FakeAnswer(NamedTuple):
    """An answer that a FakeConsumer has recorded."""

    job: Job
    error: str = ""
    """Error text of a nack or reject."""
    delay: float | None = None
    """Delay of a nack in seconds; None = as the settings of the consumer group say."""


class FakeConsumer(JobSource):
    """A consumer without a daemon, for unit tests of code that takes jobs from a Consumer.

    It has the methods of Consumer. Iteration, get() and run() end once the jobs are used up. The
    answers are recorded in `acked`, `nacked`, `released`, `rejected` and `extended`. A job that has
    got a nack or a release does not come again; add it again with add().

    `jobs`: for each job its key, a tuple (key, payload), or a dict with the arguments of add().

    With `lose()` the test ends the lease of a job, so that its next answer raises LeaseLost.
    """

    def __init__(
        self, jobs: Iterable[Any] = (), *, group: str = "default", topic: str = "default"
    ) -> None:
        self.group = group
        self.acked: list[Job] = []
        """Jobs that were acknowledged."""
        self.nacked: list[FakeAnswer] = []
        """Failed attempts."""
        self.released: list[Job] = []
        """Jobs that were given back."""
        self.rejected: list[FakeAnswer] = []
        """Jobs that became dead letters."""
        self.extended: list[tuple[Job, float]] = []
        """Extended jobs, with the seconds of the extension."""
        self._topic = topic
        self._queue: deque[Job] = deque()
        self._tickets = 0
        self._stopped = self._closed = False
        for job in each("jobs", jobs):
            self._add_row(job)

    def _add_row(self, row: Any) -> None:
        if isinstance(row, dict):
            self.add(**row)
        elif isinstance(row, tuple):
            self.add(*row)
        else:
            self.add(row)

    def add(
        self, key: Key, payload: bytes = b"", *, topic: str | None = None, attempt: int = 1,
        ticket: int | None = None, priority: int = 0, deadline_boot_ns: int | None = None,
        missed: int = 0, cause: Cause = Cause.EXPIRED, verdict: Verdict | None = None,
        occurrence: Occurrence | None = None,
    ) -> Job:  # fmt: skip
        """Add a job, and return it. The default ticket is the number of the job, from 1.

        `cause` and `verdict`: the end of an operation. `occurrence`: makes the job that of a
        schedule; the key must be f"{schedule}@{nominal_ns}", as in a daemon."""
        wire.encode_key(key)
        priority = check_priority(priority) or 0
        flags = _flags_of(key, occurrence)
        self._tickets += 1
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        deadline_ns = now_ns if deadline_boot_ns is None else deadline_boot_ns
        raw = RawJob(
            self._tickets if ticket is None else ticket, int(cause), deadline_ns, now_ns,
            2**63 - 1, now_ns, time.time_ns() - now_ns, self._tickets, 1, attempt, 0, flags,
            priority, self._topic if topic is None else topic, key, wire.encode_payload(payload),
            check_whole("missed", missed, 0, 2**32 - 1), verdict,
        )  # fmt: skip
        job = Job(
            raw,
            Lease(_MEMBER, raw, raw.lease_id, NEVER_S),
            self.group,
            now_ns,
            _FakeDesk(self),
        )
        self._queue.append(job)
        return job

    def lose(self, job: Job) -> None:
        """End the lease of a job."""
        job._lease.lost = True

    @property
    def in_flight(self) -> int:
        """Number of jobs that wait for a caller."""
        return len(self._queue)

    def _take(self, limit_s: float) -> Job | None:
        if self._closed:
            raise Closed("consumer")
        if self._stopped or not self._queue:
            return None
        job = self._queue.popleft()
        job._lease.handed = True
        return job

    def _take_many(self, n: int, limit_s: float) -> list[Job]:
        jobs: list[Job] = []
        while len(jobs) < n and (job := self._take(limit_s)) is not None:
            jobs.append(job)
        return jobs

    def _answer(
        self,
        jobs: Sequence[Job],
        op: Op,
        text: bytes,
        time_ns: int,
        timeout: float | timedelta | None,
    ) -> None:
        lost = [job for job in jobs if not self._record(job, op, text, time_ns)]
        if lost:
            raise lost[0]._lease.error()

    def _record(self, job: Job, op: Op, text: bytes, time_ns: int) -> bool:
        """Record an answer. Return False if the lease of the job has ended."""
        lease = job._lease
        if lease.op == op:
            return True
        if lease.op:
            raise InvalidArgument(f"job {lease.key!r} already has another answer")
        if lease.lost:
            return False
        if op == Op.JOB_EXTEND:
            self.extended.append((job, time_ns / 1e9))
            return True
        lease.op = op
        delay = None if time_ns == NO_DELAY else time_ns / 1e9
        if op == Op.JOB_NACK:
            self.nacked.append(FakeAnswer(job, text.decode(), delay))
        elif op == Op.JOB_REJECT:
            self.rejected.append(FakeAnswer(job, text.decode()))
        else:
            (self.acked if op == Op.JOB_ACK else self.released).append(job)
        return True

    def _finish(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if not self._record(job, Op.JOB_ACK, b"", 0):
                LOG.warning("%s", job._lease.error())

    def stop(self) -> None:
        """Take no more jobs, and release those that no caller has."""
        self._stopped = True
        while self._queue:
            self._answer((self._queue.popleft(),), Op.JOB_RELEASE, b"", 0, None)

    def close(self, drain: float = DRAIN_S) -> None:
        """Take no more jobs."""
        self.stop()
        self._closed = True


def _flags_of(key: Key, occurrence: Occurrence | None) -> int:
    if occurrence is None:
        return 0
    if key != f"{occurrence.schedule}@{occurrence.nominal_ns}":
        raise InvalidArgument(f"key {key!r} is not that of {occurrence}")
    return NOTICE_OF_SCHEDULE


class _FakeDesk:
    """Records the answers of jobs in a FakeConsumer."""

    def __init__(self, consumer: FakeConsumer) -> None:
        self._consumer = consumer

    def answer(
        self,
        jobs: Sequence[Job],
        op: Op,
        text: bytes,
        time_ns: int,
        timeout: float | timedelta | None,
    ) -> None:
        """Record the answer."""
        self._consumer._answer(jobs, op, text, time_ns, timeout)

    def finish(self, jobs: Sequence[Job]) -> None:
        """Record acknowledgements."""
        self._consumer._finish(jobs)

    def drop(self, lease: Lease) -> None:
        """Do nothing: a test sees in the records that the job has no answer."""


class _NoMember:
    """Stands for the membership of a fake job, whose lease does not end by the clock."""

    def now_s(self) -> float:
        """Return a time before every end."""
        return 0.0


_MEMBER: Any = _NoMember()


__all__ = ["FakeAnswer", "FakeConsumer"]
