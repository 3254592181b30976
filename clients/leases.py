"""The jobs that a consumer holds: credits, leases, heartbeats and answers, without I/O.

Consumer and AsyncConsumer share this module. Every function here runs in the thread that owns the
connections: the engine of a Consumer, or the event loop of an AsyncConsumer. Other threads only
read the fields of Lease, and set `handed`.

Each connection has a Member. It joins the consumer group whenever the daemon may have forgotten
it: after each welcome and each reconnect. The daemon then sends all jobs again that the session
holds. A Member drops those that it already has.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from purgatoryd.clients import _pack
from purgatoryd.clients.batch import Batch, Outcome, Partial
from purgatoryd.clients.connection import NEVER_S
from purgatoryd.clients.groups import missing
from purgatoryd.clients.jobs import Job as Steps
from purgatoryd.clients.jobs import awaited
from purgatoryd.clients.model import Occurrence, occurrence_of
from purgatoryd.clients.packing import Builder, Entry, Pending
from purgatoryd.clients.session import State
from purgatoryd.clients.times import wall_time
from purgatoryd.shm_layout import group_wire, wire
from purgatoryd.shm_layout.errors import (
    DaemonError,
    InvalidArgument,
    LeaseLost,
    NotDurable,
    PurgatorydError,
    Refused,
    SessionExpired,
)
from purgatoryd.shm_layout.layout import (
    BATCH_RECORDS,
    JOB_ERROR_MAX,
    ClockKind,
    KeyType,
    Op,
    Status,
)

if TYPE_CHECKING:
    from purgatoryd.clients.connection import Connection
    from purgatoryd.clients.core import Core
    from purgatoryd.shm_layout.group_wire import RawJob
    from purgatoryd.shm_layout.layout import Cause

LOG = logging.getLogger("purgatoryd")
KEEP_ALIVE_S = 15.0  # PING interval of a member: the daemon may end idle sessions
SHARE_S = 0.1  # Interval at which a consumer moves credits between partitions.
RETRY_S = 1.0  # Time after which a refused JOIN is sent again.
ENDED_LEAST = 1024  # A member remembers at least this number of answered leases.
GRANTED_LEAST = 120  # Leases are supervised as if max_lease were this part of `lease` at least.
NO_DELAY = -1  # JOB_NACK: the settings of the consumer group choose the delay.
FORGOTTEN = b"the job was dropped without an answer"
_NAMES = {
    Op.JOB_ACK: "ack", Op.JOB_NACK: "nack", Op.JOB_RELEASE: "release", Op.JOB_REJECT: "reject",
}  # fmt: skip


def error_text(error: object) -> bytes:
    """Return an error text for the daemon, cut to JOB_ERROR_MAX bytes of UTF-8."""
    if isinstance(error, BaseException):
        error = f"{type(error).__name__}: {error}"
    data = str(error).encode(errors="backslashreplace")
    return data[:JOB_ERROR_MAX].decode(errors="ignore").encode()


class Lease(_pack.Lease):
    """A lease of one job."""

    __slots__ = ()

    member: Member
    pending: PendingLease | PendingAcks | None

    def __init__(self, member: Member, raw: RawJob, identity: bytes, ends_s: float) -> None:
        self.member = member
        self.id = identity
        """The struct pg_lease."""
        self.key = raw.key
        self.ticket = raw.ticket
        self.attempt = raw.attempt
        self.ends_s = ends_s
        """Host time at which the lease ends, unless it is extended."""
        self.handed = False
        """True once a caller has the job."""
        self.op = 0
        """The Op that answers the job, once it is packed; 0 = none."""
        self.pending = None
        """The call of `op`; None without an answer in flight."""
        self.extending = False
        """True while an extension is in flight."""
        self.limited = False
        """True if max_lease limited the last extension."""
        self.lost = False
        """True once the lease has ended without an answer."""

    def over(self, now_s: float) -> bool:
        """Return whether the lease has ended by the clock. An extension in flight may still move
        the end, unless max_lease limited the extension before it."""
        return now_s >= self.ends_s and (self.limited or not self.extending)

    def error(self) -> LeaseLost:
        """Return the error of an answer that comes after the end of the lease."""
        return LeaseLost(self.key, int(Status.LEASE_LOST), self.ticket, self.attempt)


class PendingLease(Pending):
    """An answer or an extension of a job that waits for the daemon."""

    __slots__ = ("lease",)

    def __init__(self, lease: Lease, on_done: Callable[[Any], None]) -> None:
        super().__init__(lease.key, on_done)
        self.lease = lease

    def why(self) -> PurgatorydError | None:
        """Return the error of an answer that failed."""
        if isinstance(self.error, SessionExpired):
            return self.lease.error()
        if self.error is None and self.status == Status.LEASE_LOST:
            return self.lease.error()
        return super().why()

    def failure(self, _: Lease) -> PurgatorydError | None:
        """Return the error of the answer to the lease; None if the daemon has taken it."""
        done = self.error is None and self.status == Status.DONE
        return None if done else self.why()

    def outcome(self) -> None:
        """Raise LeaseLost, Refused or DaemonError if the daemon has not taken the answer."""
        self._check()


class PendingAcks(Pending):
    """Acknowledgements of several jobs in one batch that wait for the daemon."""

    __slots__ = ("_member", "failures", "leases")

    def __init__(self, member: Member) -> None:
        super().__init__(b"", None)
        self.connection = member.connection
        self.packed = True
        self.leases: list[Lease] = []
        """The leases, in the order of the records."""
        self.failures: dict[Lease, PurgatorydError] = {}
        """The errors of acknowledgements that the daemon has not taken."""
        self._member = member

    def settle(self, outcome: Outcome) -> None:
        """Take the results of the batch, or the error that replaces them."""
        leases, error = self.leases, None
        self.connection.packer.settled += len(leases)
        if isinstance(outcome, DaemonError):
            outcome = Partial(bytes(len(leases) * wire.RESULT.size), outcome)
        if isinstance(outcome, Partial):
            outcome, error = outcome
        for place in self._member.acknowledged(leases, outcome):
            word, detail_ns = wire.RESULT.unpack_from(outcome, place * wire.RESULT.size)
            self._settle_one(leases[place], word, detail_ns, error)
        self.done = True
        if self.on_done is not None:
            self.on_done(self)

    def _settle_one(
        self, lease: Lease, word: int, detail_ns: int, error: DaemonError | None
    ) -> None:
        """Take the result of an acknowledgement that the daemon has not taken, or has not
        synced."""
        pending = PendingLease(lease, self._member.answered)
        pending.word, pending.deadline_ns = word, detail_ns
        pending.error = None if word else error
        self._member.answered(pending)
        if (failure := pending.failure(lease)) is not None:
            self.failures[lease] = failure

    def failure(self, lease: Lease) -> PurgatorydError | None:
        """Return the error of the acknowledgement of a lease; None if the daemon has taken it."""
        return self.failures.get(lease)

    def outcome(self) -> None:
        """Raise the first error of an acknowledgement."""
        for error in self.failures.values():
            raise error


class PendingJoin(Pending):
    """A JOIN that waits for its answer."""

    __slots__ = ()

    def outcome(self) -> int:
        """Return the row of the consumer group. Raises Refused, DaemonError."""
        self._check()
        return self.word >> 8


class LeasedJob(_pack.Job):
    """The fields of a job. Jobs of a daemon are made by the extension, without __init__."""

    __slots__ = ("__weakref__",)

    _lease: Lease

    def __init__(
        self, raw: RawJob, lease: Lease, group: str, received_ns: int | None, desk: Any
    ) -> None:
        self._lease = lease
        self._desk = desk
        self.key = raw.key
        self.payload = raw.payload
        self.topic = raw.topic
        self.ticket = raw.ticket
        """Ticket of the timer, the same in all attempts."""
        self.attempt = raw.attempt
        """Number of this attempt; the first one has 1."""
        self.priority = raw.priority
        self.missed = raw.missed
        """Late timers of the topic that this job stands for, by policy coalesce."""
        self.verdict = raw.verdict
        """Result of the operation that ended; None for a timer."""
        self.group = group
        self.deadline_boot_ns = raw.deadline_ns
        self.fired_boot_ns = raw.fired_ns
        self.wall_offset_ns = raw.wall_offset_ns
        self._cause = raw.cause
        self._flags = raw.flags
        self._received_ns = received_ns

    @property
    def cause(self) -> Cause:
        """EXPIRED for a timer; the end of an operation; PUBLISHED for a published notice."""
        return group_wire.cause_of(self._cause)

    @property
    def occurrence(self) -> Occurrence | None:
        """Schedule and nominal time, if the timer was an occurrence of a schedule. Together they
        are the idempotency key: each occurrence has another one."""
        return occurrence_of(self.key, self._flags)

    @property
    def deadline(self) -> datetime:
        """Deadline of the timer, as an aware UTC datetime."""
        return wall_time(self.deadline_boot_ns + self.wall_offset_ns)

    @property
    def fired(self) -> datetime:
        """Time of firing, as an aware UTC datetime."""
        return wall_time(self.fired_boot_ns + self.wall_offset_ns)

    @property
    def lateness_ns(self) -> int:
        """Time of receipt minus deadline. If the time of receipt is unknown, the time of firing is
        used instead."""
        end_ns = self.fired_boot_ns if self._received_ns is None else self._received_ns
        return end_ns - self.deadline_boot_ns

    @property
    def lost(self) -> bool:
        """True once the lease has ended before the job was answered."""
        lease = self._lease
        if not lease.op and lease.over(lease.member.now_s()):
            lease.lost = True
        return lease.lost

    @property
    def answered(self) -> bool:
        """True once the job has an answer, which perhaps the daemon has not confirmed."""
        return self._lease.op != 0

    def _finish(self) -> None:
        """Acknowledge the job at the end of its block. Raises LeaseLost if its lease has ended."""
        if self.lost:
            raise self._lease.error()
        self._desk.finish((self,))

    def __repr__(self) -> str:
        return f"<job {self.key!r}, ticket {self.ticket}, attempt {self.attempt}>"


class Sink(ABC):
    """Receives the jobs of Leases, in the thread that owns the connections."""

    job_type: type[LeasedJob]
    """Class of the jobs."""
    desk: Any
    """Has drop(lease), which gives back a job that was collected without an answer."""

    @abstractmethod
    def add(self, jobs: Sequence[Any]) -> None:
        """Take jobs of the class `job_type`."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all jobs that no caller has. Their leases are released."""

    @abstractmethod
    def wake(self) -> None:
        """Wake all callers that wait for jobs, because no more jobs come."""


class Leases:
    """The leases of one consumer."""

    def __init__(
        self, core: Core, group: str, lease_ns: int, max_in_flight: int, sink: Sink
    ) -> None:
        self.core = core
        self.group = group
        self.lease_ns = lease_ns
        self.max_in_flight = max_in_flight
        self.sink = sink
        self._granted_s = self.lease_s
        """Length of the leases that the daemon grants: less than `lease_s` if max_lease is."""
        self.members: list[Member] = []
        self.stopping = False
        """True once the consumer takes no more jobs."""
        self.error: PurgatorydError | None = None
        """The reason why no more jobs come; None while the consumer works."""
        self._finished: list[PendingAcks] = []
        """Acknowledgements for which no caller waits, until they have their answers."""
        self._refusal: PurgatorydError | None = None
        """First error of such an acknowledgement that is no LeaseLost."""
        self._scan_s = self._share_s = 0.0
        self._ping_s = core.host.monotonic_s() + KEEP_ALIVE_S
        core.on_connection = self.add_member

    def add_member(self, connection: Connection) -> None:
        """Create the member of a connection."""
        self.members.append(Member(connection, self))

    def check(self) -> None:
        """Raise the reason why no more jobs come."""
        if self.error is not None:
            if self.error is self._refusal:
                self._refusal = None  # the caller sees it
            raise self.error

    @property
    def lease_s(self) -> float:
        """Length of a lease in seconds."""
        return self.lease_ns / 1e9

    @property
    def in_flight(self) -> int:
        """Number of jobs that have no confirmed answer."""
        return sum(len(member.jobs) for member in self.members)

    # ---- membership ------------------------------------------------------------------------------

    def joined(self, limit_s: float) -> Steps[None]:
        """Divide the credits among the partitions and join in each of them. Raises GroupMissing,
        Refused, DaemonError."""
        count, credits = len(self.members), self.max_in_flight
        for number, member in enumerate(self.members):
            member.wanted = credits // count + (number < credits % count)
            member.begin()
        for member in self.members:
            while not member.is_joined:
                self.check()
                pending = member.join()
                if pending is not None:
                    yield from awaited(pending, limit_s, (pending,))
                    self._raise_refusal(pending)
        self.check()

    def _raise_refusal(self, pending: PendingJoin) -> None:
        """Raise the error of the first JOIN of a member, unless another session repeats the
        JOIN."""
        self.check()
        error = pending.why()
        if not (error is None or isinstance(error, (NotDurable, SessionExpired))):
            raise error

    def fail(self, error: PurgatorydError) -> None:
        """Let all callers that wait for jobs raise `error`."""
        if self.error is None:
            self.error = error
            self.sink.wake()

    def stop(self) -> None:
        """Take no more jobs, and release those that no caller has."""
        self.stopping = True
        for member in self.members:
            member.wanted = 0
        self.sink.clear()
        self.sink.wake()

    def drained(self, limit_s: float) -> Steps[None]:
        """Take no more jobs, and wait until all jobs are answered, at most `limit_s` seconds."""
        self.stop()
        deadline_s = self.core.host.monotonic_s() + limit_s
        while self.in_flight and self.core.host.monotonic_s() < deadline_s:
            yield deadline_s

    def end(self) -> None:
        """Count all leases as lost, because the session has ended."""
        self.stopping = True
        for member in self.members:
            member.lose_all()
        self.sink.wake()

    # ---- answers ---------------------------------------------------------------------------------

    def answered(
        self, jobs: Sequence[Lease], op: Op, text: bytes, time_ns: int, limit_s: float
    ) -> Steps[None]:
        """Answer jobs, and wait until the daemon has taken all answers. A job that already has the
        same answer waits for it.

        Raises the first error: LeaseLost, InvalidArgument if a job has another answer, Refused,
        DaemonError.
        """
        first: PurgatorydError | None = None
        single: list[tuple[Lease, PendingLease | PendingAcks]] = []
        calls: list[PendingAcks] = []
        if op == Op.JOB_ACK and len(jobs) > 1:
            calls, jobs = self._acknowledge(jobs)
        for lease in jobs:
            try:
                if (call := lease.member.answer(lease, op, text, time_ns)) is not None:
                    single.append((lease, call))
            except PurgatorydError as error:
                first = first or error
        waited = [*calls, *(call for _, call in single)]
        for call in waited:
            if not call.done:
                yield from awaited(call, limit_s, waited)
        for call in calls:
            call.outcome()
        for lease, call in single:
            first = first or call.failure(lease)
        if first is not None:
            raise first

    def _acknowledge(self, jobs: Sequence[Lease]) -> tuple[list[PendingAcks], list[Lease]]:
        """Pack acknowledgements of many jobs. Return the calls, and the leases that have an answer
        already or have ended."""
        leases: dict[Member, list[Lease]] = {}
        for lease in jobs:
            leases.setdefault(lease.member, []).append(lease)
        calls: list[PendingAcks] = []
        left: list[Lease] = []
        for member, some in leases.items():
            for at in range(0, len(some), BATCH_RECORDS):
                call, others = member.acknowledge(some[at : at + BATCH_RECORDS])
                left += others
                if call.leases:
                    calls.append(call)
        return calls, left

    def finish(self, jobs: Sequence[Lease]) -> None:
        """Acknowledge jobs for which no caller waits. A LeaseLost is logged. Callers that wait for
        jobs raise any other error, and so do finished() and check_finished()."""
        calls, left = self._acknowledge(jobs)
        self._finished += calls
        for call in calls:
            call.on_done = self._finish_answered
        self._note(lease.error() for lease in left if lease.lost)

    def _finish_answered(self, call: PendingAcks) -> None:
        self._finished.remove(call)
        self._note(call.failures.values())
        for lease in call.failures:
            self.drop(lease)  # another attempt follows, unless the lease is lost

    def _note(self, errors: Iterable[PurgatorydError]) -> None:
        for error in errors:
            if isinstance(error, LeaseLost) or self.error is not None:
                LOG.warning("%s", error)
            else:
                self._refusal = error
                self.fail(error)

    def finished(self, limit_s: float) -> Steps[None]:
        """Wait until the daemon has taken all acknowledgements of finish(). Raises the first error
        that is no LeaseLost."""
        for call in [*self._finished]:
            yield from awaited(call, limit_s)
        self.check_finished()

    def check_finished(self) -> None:
        """Raise the first error of finish() that is no LeaseLost, once."""
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal

    def drop(self, lease: Lease) -> None:
        """Give back a job whose object was collected without an answer. A job that a caller had
        counts as failed, because else it would be leased again at once, and forever."""
        if lease.op or lease.lost:
            return
        op, text = (Op.JOB_NACK, FORGOTTEN) if lease.handed else (Op.JOB_RELEASE, b"")
        with suppress(PurgatorydError):
            lease.member.answer(lease, op, text, NO_DELAY if lease.handed else 0)

    # ---- for every exchange ----------------------------------------------------------------------

    def speak(self) -> float:
        """Pack what is due: JOINs, extensions, a PING. Return the host time at which speak() must
        be called again."""
        now_s = self.core.host.monotonic_s()
        due_s = min((member.keep_joined(now_s) for member in self.members), default=NEVER_S)
        return min(due_s, self._extend(now_s), self._share(now_s), self._ping(now_s))

    def _ping(self, now_s: float) -> float:
        if now_s >= self._ping_s:
            self._ping_s = now_s + KEEP_ALIVE_S
            for member in self.members:
                member.connection.session.call()
        return self._ping_s

    def _extend(self, now_s: float) -> float:
        """Extend the leases that end soon."""
        if not any(member.jobs for member in self.members):
            self._scan_s = now_s + self._granted_s / 12
            return NEVER_S
        if now_s >= self._scan_s:
            self._scan_s = now_s + self._granted_s / 12
            for member in self.members:
                member.extend_all(now_s)
        return self._scan_s

    def leased(self, length_s: float) -> None:
        """Note the length of a new lease."""
        self._granted_s = min(max(length_s, self.lease_s / GRANTED_LEAST), self.lease_s)
        now_s = self.core.host.monotonic_s()
        self._scan_s = min(self._scan_s, now_s + self._granted_s / 12)

    def extended(self, length_s: float) -> None:
        """Note the length of an extended lease: max_lease may have been raised."""
        self._granted_s = max(self._granted_s, min(length_s, self.lease_s))

    def ends_soon(self, lease: Lease, now_s: float, share: float) -> bool:
        """Return whether less than this share of the length of a lease is left, or its end is
        unknown."""
        return lease.ends_s == NEVER_S or lease.ends_s - now_s < self._granted_s * share

    # ---- credits of several partitions -----------------------------------------------------------

    def _share(self, now_s: float) -> float:
        """Move credits of idle members to members that hold as many jobs as they may."""
        if len(self.members) < 2 or self.stopping:
            return NEVER_S
        if now_s >= self._share_s:
            self._share_s = now_s + SHARE_S
            share_credits(self.members, self.max_in_flight)
        return self._share_s


def share_credits(members: Sequence[Member], most: int) -> None:
    """Set the wanted credits of each member. The jobs that all members may hold stay below `most`:
    credits that an idle member gives up are used once the daemon has confirmed it."""
    busy = sorted((one for one in members if one.saturated), key=lambda one: one.wanted)
    if not busy:
        return
    fair = most // len(members)
    poor = [one for one in busy if one.wanted < fair] or busy
    free = most - sum(one.bound for one in members)
    for one in members:
        least = max(len(one.jobs), 1) if one not in busy else fair if one not in poor else most
        if free < len(poor) and one.settled and one.wanted > least:
            one.wanted -= -(-(one.wanted - least) // 2)
    for number, one in enumerate(poor):
        if one.settled and free > 0:
            more = -(-free // (len(poor) - number))
            one.wanted += more
            free -= more


class Member:
    """The membership of one session, and the jobs that it holds."""

    def __init__(self, connection: Connection, leases: Leases) -> None:
        self.connection = connection
        self.jobs: dict[bytes, Lease] = {}
        """The jobs without a confirmed answer, by struct pg_lease."""
        self.wanted = 0
        """Number of jobs that this member wants to hold."""
        self._leases = leases
        self._ended: set[bytes] = set()
        self._older: set[bytes] = set()
        self._begun = False
        self._joins = self._stale = False
        """A JOIN is in flight; the daemon may have forgotten the membership."""
        self._sent = self._granted = 0
        """Credits of the last JOIN, and of the last JOIN that was answered."""
        self._call: PendingJoin | None = None
        self._retry_s = 0.0
        session = connection.session
        session.on_jobs, session.on_open, session.on_lost = self.receive, self.forgotten, self.lose

    def now_s(self) -> float:
        """Return the host's time on which leases end."""
        return self._leases.core.host.monotonic_s()

    # ---- membership ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Join as soon as possible, and again whenever that is needed."""
        self._begun = self._stale = True

    def forgotten(self) -> None:
        """Join again, because the daemon may have forgotten this connection."""
        self._stale = True

    @property
    def is_joined(self) -> bool:
        """True if the daemon has confirmed the membership."""
        return self._begun and not (self._stale or self._joins)

    @property
    def settled(self) -> bool:
        """True if the daemon has confirmed the wanted credits."""
        return self.is_joined and self._granted == self.wanted

    @property
    def saturated(self) -> bool:
        """True if the member holds as many jobs as it may."""
        return len(self.jobs) >= self.wanted

    @property
    def bound(self) -> int:
        """The number of jobs that the member perhaps holds, or is about to hold."""
        return max(self._sent, self._granted, self.wanted, len(self.jobs))

    def keep_joined(self, now_s: float) -> float:
        """Send a JOIN if one is due, and return the time at which it becomes due."""
        if not self._begun or self._joins or self.connection.session.state is not State.OPEN:
            return NEVER_S
        if self._stale or self._sent != self.wanted:
            if now_s < self._retry_s:
                return self._retry_s
            self.join()
        return NEVER_S

    def join(self) -> PendingJoin | None:
        """Pack a JOIN unless one is in flight, and return the one in flight; None if the session is
        not open."""
        if self._joins:
            return self._call
        leases = self._leases
        kind, name = wire.encode_key(leases.group)
        self._joins, self._stale, self._sent = True, False, self.wanted
        self._call = pending = PendingJoin(leases.group, self._join_answered)
        fields = (Op.JOIN, 0, kind, name, 0, 0, b"", b"", leases.lease_ns, self.wanted)
        self._pack(pending, fields)
        return pending

    def _join_answered(self, pending: Pending) -> None:
        self._joins = False
        applied = pending.error is None and pending.status == Status.DONE
        if applied or isinstance(pending.error, NotDurable):  # no record has memberships
            self._granted = self._sent
        elif pending.error is None and pending.status == Status.NO_GROUP:
            core = self._leases.core
            self._leases.fail(missing(core.namespace, self._leases.group))
        elif isinstance(error := pending.why(), Refused) and error.status != Status.STOPPING:
            self._leases.fail(error)
        else:
            self._stale, self._retry_s = True, self.now_s() + RETRY_S
            if isinstance(pending.error, SessionExpired):
                self._retry_s = 0.0

    def _pack(self, pending: Pending, fields: tuple[Any, ...]) -> None:
        connection = self.connection
        pending.connection = connection
        names = self._leases.core.names
        connection.packer.add(Entry(pending, names.of_key, Builder.record, fields))

    # ---- jobs ------------------------------------------------------------------------------------

    def receive(self, body: bytes, count: int) -> None:
        """Take the body of a JOBS message. Raises ProtocolError.

        A message without jobs reports that the consumer group was deleted. Its leases are lost, and
        the answer to another JOIN shows whether there is a new consumer group of that name.
        """
        leases, now_s = self._leases, self.now_s()
        if count == 0:
            self.lose_all()
            self.forgotten()
            return
        received_ns = self._received_ns()  # later, so that no lease seems to end too late
        jobs = _pack.jobs_receive(
            body, count, self.jobs, self._ended, self._older, self, Lease, leases.sink.job_type,
            leases.sink.desk, leases.group, received_ns, -1 if received_ns is None else received_ns,
            now_s, self.connection.clock == ClockKind.VIRTUAL, wire.decode_key, wire.decode_verdict,
        )  # fmt: skip
        if jobs:
            leases.leased(group_wire.last_lease_ns(body, count) / 1e9)
        if jobs is None:
            list(group_wire.decode_jobs(body, count))  # raises the error
        elif leases.stopping:
            for job in jobs:
                leases.drop(job._lease)
        else:
            leases.sink.add(jobs)

    def _received_ns(self) -> int | None:
        """Return the time on the daemon's clock; None if this process does not have that clock."""
        connection = self.connection
        real = connection.session.same_clock and connection.clock == ClockKind.BOOT
        return connection.host.boot_ns() if real else None

    def answer(
        self, lease: Lease, op: Op, text: bytes, time_ns: int
    ) -> PendingLease | PendingAcks | None:
        """Pack an answer or an extension of a job, and return its call; None if the daemon has
        confirmed the same answer. Raises LeaseLost, InvalidArgument."""
        if lease.lost:
            raise lease.error()
        if lease.op == op and lease.id not in self.jobs:
            return None
        if lease.op == op:
            return lease.pending
        if lease.op:
            said = _NAMES[Op(lease.op)]
            raise InvalidArgument(f"job {lease.key!r} already has the answer {said!r}")
        if op == Op.JOB_EXTEND:
            pending = PendingLease(lease, partial(self._extended, lease, time_ns, self.now_s()))
            lease.extending = True
        else:
            pending = PendingLease(lease, self.answered)
            lease.op, lease.pending = op, pending
        fields = (op, 0, KeyType.BYTES, lease.id, 0, 0, text, b"", time_ns, 0)
        self._pack(pending, fields)
        return pending

    def acknowledge(self, leases: list[Lease]) -> tuple[PendingAcks, list[Lease]]:
        """Pack acknowledgements in a batch of their own. Return the call, and the leases that have
        an answer already or have ended."""
        call, packer = PendingAcks(self), self.connection.packer
        name = self._leases.core.names.of_key
        call.leases, left, body = _pack.leases_answer(name, Op.JOB_ACK, leases, call)
        if call.leases:
            batch = Batch(*body, call.settle)
            batch.calls = call
            packer.bulk(batch)
        return call, left

    def acknowledged(self, leases: list[Lease], results: bytes) -> list[int]:
        """Take the results of acknowledgements. Return the indexes of the leases whose
        acknowledgement the daemon has not taken."""
        left = _pack.leases_end(leases, results, self.jobs, self._ended)
        self._forget_oldest()
        return left

    def _forget_oldest(self) -> None:
        """Forget old leases that have ended. The daemon repeats at most the jobs that the member
        may hold, and small sets stay in the processor's cache."""
        if len(self._ended) > max(ENDED_LEAST, 2 * self.bound):
            self._older, self._ended = self._ended, set()

    def answered(self, pending: Any) -> None:
        """Take the daemon's answer to the answer of a job."""
        lease: Lease = pending.lease
        lease.pending = None
        applied = pending.error is None and pending.status == Status.DONE
        if applied or isinstance(pending.error, NotDurable):
            self._end(lease)
        elif isinstance(pending.why(), LeaseLost):
            lease.lost = True
            self._end(lease)
        else:
            lease.op = 0  # the daemon has not taken the answer, so the caller may give it again

    def _end(self, lease: Lease) -> None:
        if self.jobs.pop(lease.id, None) is not None:
            self._ended.add(lease.id)
            self._forget_oldest()

    def _extended(self, lease: Lease, time_ns: int, sent_s: float, pending: Any) -> None:
        """Take the daemon's answer to an extension."""
        lease.extending = False
        if pending.error is None and pending.status == Status.DONE:
            left_ns = pending.deadline_ns
            lease.limited = left_ns < time_ns
            lease.ends_s = max(lease.ends_s, sent_s + left_ns / 1e9)
            self._leases.extended(left_ns / 1e9)
        elif isinstance(pending.why(), LeaseLost):
            lease.lost = True
            if not lease.op:
                self._end(lease)

    def extend_all(self, now_s: float) -> None:
        """Extend the leases that end soon. If max_lease is near, release jobs that wait for a
        caller, because a release is no failed attempt."""
        leases = self._leases
        for lease in [*self.jobs.values()]:
            if lease.op:
                continue
            if lease.lost or lease.over(now_s):
                lease.lost = True
                self._end(lease)
            elif lease.extending:
                continue
            elif not lease.handed and lease.limited and leases.ends_soon(lease, now_s, 1 / 2):
                self.answer(lease, Op.JOB_RELEASE, b"", 0)
            elif leases.ends_soon(lease, now_s, 2 / 3):
                self.answer(lease, Op.JOB_EXTEND, b"", leases.lease_ns)

    def lose(self, _: SessionExpired) -> None:
        """Count all leases as lost, because another session replaces this one."""
        self.lose_all()

    def lose_all(self) -> None:
        """Count all leases as lost."""
        lost, self.jobs = self.jobs, {}
        for one in lost.values():
            one.lost = one.lost or not one.op
        self._ended.clear()
        self._older.clear()
