"""The judge of consumer groups: it judges leases, answers and dead letters of jobs.

Times are world time. A job is known by the payload of its timer, or by the key of its operation, so
it stays the same job if a power cut undoes the firing of its timer, which then fires again. The
judge sees what the processes of a world see: notices, JOBS messages, and answers.

    surely      what each correct daemon has to have done
    possibly    what a correct daemon may have done, because an answer was lost or is under way
    live        a lease that has not surely or possibly ended
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from purgatoryd.shm_layout.layout import JobReason, Op
from world.options import NONE, Options, Possible
from world.oracle import FOREVER_NS, Violation
from world.script import TOPICS, S

ENDS = {Op.JOB_ACK, Op.JOB_NACK, Op.JOB_RELEASE, Op.JOB_REJECT}
"""Answers that end a lease."""
MANY_ATTEMPTS = 20
"""Number of attempts from which on no job fails for good without a member that received it."""
AGING_NS = 10 * S
"""Time in which a waiting job gains one priority."""
MANY_DEAD = 1000
"""Number of dead letters from which on no group drops any by itself."""


class Holder(NamedTuple):
    """A session of a consumer, and the connection over which it received a job."""

    process: int
    session: int
    connection: int


class Delivered(NamedTuple):
    """A job as a member received it, with times in world time."""

    ticket: int
    key: str
    payload: bytes
    deadline_ns: int
    row: int
    lease: int
    attempt: int
    starts_ns: int
    ends_ns: int
    sent_ns: int
    """Time at which the daemon sent it."""
    priority: int = 0


@dataclass(eq=False)
class Lease:
    """A lease of a job."""

    job: Job
    number: int
    attempt: int
    holder: Holder
    identity: tuple[int, int]
    """Ticket and row."""
    starts_ns: int
    ends_ns: int
    """Earliest possible end, unless its holder answers or ends."""
    cuts: int
    """Number of losses of the arena before it."""
    answers: set[Op] = field(default_factory=set)
    """Answers that were sent and that the daemon may have taken."""
    taken: Op | None = None
    """The answer that the daemon has taken."""
    taken_ns: int = 0
    """Earliest time at which the daemon can have taken it."""
    known_ns: int = 0
    """Time at which its holder received the daemon's confirmation."""
    delay_ns: int = 0
    """Delay that the taken answer requests until the next attempt."""
    text: str = ""
    """Error text of the taken answer."""
    ended: bool = False
    """True if its holder, its session or its connection may have ended."""
    closed: bool = False
    """True if its holder may have given it back without a failed attempt."""
    priority: int = 0

    @property
    def live(self) -> bool:
        """True if nothing but time ends it."""
        return not (self.ended or self.answers)

    @property
    def failures(self) -> tuple[int, int]:
        """Least and greatest number of failed attempts that its end counts as."""
        if self.taken in (Op.JOB_NACK, Op.JOB_REJECT):
            return 1, 1
        if self.taken == Op.JOB_RELEASE:
            return 0, 0
        return int(not (self.answers or self.closed)), 1

    def __str__(self) -> str:
        return (
            f"lease {self.number} of {self.job} (attempt {self.attempt}, {self.holder}, from "
            f"{self.starts_ns} to {self.ends_ns}, {sorted(self.answers)}, {self.taken!r}, "
            f"{self.ended=}, {self.closed=})"
        )


@dataclass(eq=False)
class Job:
    """A job of one group."""

    group: Group
    subject: bytes
    key: str = ""
    deadline_ns: int = 0
    born_ns: int = FOREVER_NS
    """Time at which its timer fired."""
    required: bool = False
    """True if the daemon must have it, or must have ended it."""
    durable: bool = False
    """True if a power cut cannot undo its birth."""
    priorities: set[int] = field(default_factory=set)
    """Priorities that its topic may have had when its timer fired."""
    leases: dict[int, Lease] = field(default_factory=dict)
    """Leases of the job in the present arena, by number."""
    done: bool = False
    """True if the daemon has taken an ack."""
    done_ns: int = 0
    """Earliest time at which the daemon can have taken the ack."""
    done_durably: bool = False
    acks: int = 0
    """Number of acks that the daemon may have taken."""
    rejects: int = 0
    """Number of requests to make it a dead letter that the daemon may have taken."""
    requeued: bool = False
    """True if it may have been requeued, which resets its attempts."""
    listed: bool = False
    """True if it was found among the dead letters at the end."""
    repeated: bool = False
    """True if it is an occurrence that has fired twice, because it was triggered twice, or because
    of a power cut. It may be two jobs, so it is not judged."""

    def __str__(self) -> str:
        return f"{self.subject!r} of {self.group.name}"

    def repeat(self) -> None:
        """Record that its subject has become another job as well."""
        self.repeated, self.required = True, False
        self.leases.clear()

    @property
    def may_have_ended(self) -> bool:
        """True if it may be gone, or may be a dead letter."""
        settings = self.group.settings
        fails = settings.max_attempts < MANY_ATTEMPTS or settings.retention_ns > 0
        return bool(self.acks or self.rejects) or fails or settings.drops

    @property
    def may_pass(self) -> bool:
        """True if it may not hold back later jobs of its order key."""
        settings = self.group.settings
        if not settings.blocks:
            return self.may_have_ended
        drops = self.group.drops > 0 or settings.max_dead < MANY_DEAD
        return self.acks > 0 or settings.drops or drops

    @property
    def newest(self) -> Lease | None:
        """The lease with the greatest number."""
        return self.leases[max(self.leases)] if self.leases else None


class Settings(NamedTuple):
    """Settings of a group that no call changes."""

    topics: tuple[str, ...]
    max_backlog: int
    max_lease_ns: int
    max_attempts: int
    max_dead: int
    retention_ns: int
    ordered: bool
    blocks: bool
    """True if a dead letter blocks its key."""
    drops: bool
    """True if new timers drop the oldest job once the budget is used up."""


@dataclass(eq=False)
class Group:
    """A consumer group. A name is never used again after the group was deleted."""

    name: str
    settings: Settings
    since_ns: int = FOREVER_NS
    """Time from which it surely exists; FOREVER_NS: it may not exist."""
    durable: bool = False
    """True if a power cut cannot undo its creation."""
    retired: bool = False
    """True once its deletion was requested."""
    paused_ns: int = FOREVER_NS
    """Time from which it is surely paused."""
    pauses: int = 0
    """Number of requests to pause or resume it."""
    cuts: int = 0
    """Number of losses of the arena since its creation."""
    drops: int = 0
    """Number of requests to drop dead letters."""
    requeues: int = 0
    """Number of requests to requeue dead letters."""
    acked: int = 0
    """Number of acks that the daemon has taken."""
    jobs: dict[bytes, Job] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


class JobOracle:
    """The judge of the consumer groups of one daemon."""

    def __init__(self, options: Callable[[str], Options] = lambda _: NONE) -> None:
        """`options`: function that returns the options of the timers of a key."""
        self.groups: dict[str, Group] = {}
        self.priorities = {topic: Possible(0) for topic in TOPICS}
        """Priorities of topics."""
        self.starts_ns: list[int] = []
        """Times at which the daemon started."""
        self.cut_ns = 0
        """Time of the last loss of the arena."""
        self.granted = self.judged = 0
        """Number of leases, and of answers."""
        self._noted: set[tuple[int, str, int]] = set()
        self._subjects: set[bytes] = set()
        """Subjects of notices."""
        self._options = options

    # ---- groups --------------------------------------------------------------------------------

    def creating(self, name: str, settings: Settings) -> Group:
        """Record a group before it is created."""
        return self.groups.setdefault(name, Group(name, settings))

    def created(self, group: Group, now_ns: int, cuts: int) -> None:
        """Record that a group exists, unless an arena was lost since the request. `cuts`: its
        number of losses at that time."""
        if group.cuts == cuts and not group.retired:
            group.since_ns = min(group.since_ns, now_ns)

    def exists(self, group: Group, there: bool) -> None:
        """Judge at the end whether a group exists."""
        if not there and group.since_ns < FOREVER_NS:
            raise Violation(f"the group {group.name} was lost")

    def retiring(self, group: Group) -> None:
        """Record the request to delete a group. From now on its jobs may be gone."""
        group.retired, group.since_ns = True, FOREVER_NS
        for job in group.jobs.values():
            job.required = False

    def pausing(self, group: Group) -> int:
        """Record a request to pause or resume a group. Return its number."""
        group.paused_ns = FOREVER_NS
        group.pauses += 1
        return group.pauses

    def paused(self, group: Group, number: int, now_ns: int) -> None:
        """Record the answer to the request `number` to pause a group."""
        if number == group.pauses == 1:  # no copy of an earlier request can resume it
            group.paused_ns = now_ns

    def changing_dead(self, group: Group, *, requeue: bool) -> None:
        """Record a request to requeue or drop dead letters."""
        group.requeues += requeue
        group.drops += not requeue
        for job in group.jobs.values():
            job.requeued |= requeue

    def full(self, jobs: int) -> None:
        """Judge the answer FULL_GROUP, which names the number of jobs and pending timers."""
        least = min((one.settings.max_backlog for one in self.groups.values()), default=FOREVER_NS)
        if jobs < least:
            raise Violation(f"answered FULL_GROUP with {jobs} jobs, but no budget is below {least}")

    # ---- births --------------------------------------------------------------------------------

    def published(
        self, place: tuple[int, str, int], subject: bytes, key: str, deadline_ns: int, fired_ns: int
    ) -> None:
        """Record a notice: each group of its topic has a job. `place`: stream, topic, sequence."""
        if place in self._noted:
            return
        self._noted.add(place)
        repeated = key.startswith("s") and subject in self._subjects
        self._subjects.add(subject)
        for group in self.groups.values():
            if place[1] in group.settings.topics and group.since_ns < fired_ns:
                job = self.job(group, subject)
                job.key, job.deadline_ns, job.born_ns = key, deadline_ns, fired_ns
                job.priorities = self.priorities[place[1]].since(fired_ns)
                job.required = True
            if repeated:
                self.job(group, subject).repeat()

    def order(self, job: Job) -> Hashable:
        """Return the order key of a job; None: unknown. A job of a notice from before its group has
        the order of its key, but it is not known which jobs these are."""
        own = self._options(job.key).order_key
        if own is None:
            return ("key", job.key) if job.key else None
        return own if job.required else None

    def job(self, group: Group, subject: bytes) -> Job:
        """Return a job."""
        found = group.jobs.get(subject)
        if found is None:
            found = group.jobs[subject] = Job(group, subject)
            found.requeued = group.requeues > 0
        return found

    # ---- leases --------------------------------------------------------------------------------

    def received(
        self, name: str, subject: bytes, holder: Holder, one: Delivered, *, closed: bool = False
    ) -> Lease:
        """Judge a job that a member received. Return its lease. `closed`: the member may have given
        it back before."""
        job = self.job(self.groups[name], subject)
        if job.repeated or one.sent_ns <= self.cut_ns:  # the message is older than the arena
            return self._new(job, holder, one, cuts=-1)
        known = job.leases.get(one.lease)
        if known is not None:
            self._repeated(known, holder, one)
            return known
        lease = self._new(job, holder, one, cuts=job.group.cuts)
        lease.ended = lease.closed = closed
        self.granted += 1
        job.key, job.deadline_ns = one.key, one.deadline_ns
        self._judge_new(lease, one)
        job.leases[one.lease] = lease
        return lease

    def _new(self, job: Job, holder: Holder, one: Delivered, *, cuts: int) -> Lease:
        return Lease(
            job, one.lease, one.attempt, holder, (one.ticket, one.row), one.starts_ns, one.ends_ns,
            cuts, priority=one.priority,
        )  # fmt: skip

    def _repeated(self, known: Lease, holder: Holder, one: Delivered) -> None:
        """Judge a job that a member has received before."""
        same = known.holder.session == holder.session and known.attempt == one.attempt
        if not same or known.identity != (one.ticket, one.row):
            raise Violation(f"{known} was given to {holder} as well: {one}")

    def _judge_new(self, lease: Lease, one: Delivered) -> None:
        job, group = lease.job, lease.job.group
        settings = group.settings
        done = job.done and lease.starts_ns >= job.done_ns
        self._require(not done, lease, "leased after its ack")
        sent_ns = one.sent_ns
        self._require(one.starts_ns <= sent_ns, lease, "sent at {} before its start", sent_ns)
        self._require(1 <= lease.attempt <= lease.number, lease, "more attempts than leases")
        self._require(
            lease.attempt <= settings.max_attempts, lease, "more than {} attempts",
            settings.max_attempts,
        )  # fmt: skip
        self._require(lease.starts_ns <= group.paused_ns, lease, "leased, but the group is paused")
        later = [other for other in job.leases.values() if other.number > lease.number]
        for other in later:  # the message about this lease came late
            self._judge_pair(lease, other)
        for other in job.leases.values():
            if other.number < lease.number:
                self._judge_pair(other, lease)
        if settings.ordered:
            self._judge_order(lease)
        self._judge_priority(lease)

    def _judge_pair(self, one: Lease, other: Lease) -> None:
        """Judge two leases of one job, the older one first."""
        self._require(one.taken != Op.JOB_ACK, other, "leased after the ack of {}", one)
        over = not one.live or one.ends_ns <= other.starts_ns
        self._require(over, other, "began during {}", one)
        between = other.number - one.number - 1
        least, most = one.failures
        if any(one.starts_ns < ns <= other.starts_ns for ns in self.starts_ns):
            least = 0  # a start gives back the jobs of sessions that have ended
        low, high = one.attempt + least, one.attempt + most + between
        fits = low <= other.attempt <= high or (one.job.requeued and other.attempt <= high)
        self._require(fits, other, "expected an attempt from {} to {} after {}", low, high, one)
        if one.taken == Op.JOB_NACK and one.delay_ns and between == 0 and not one.job.requeued:
            due_ns = one.taken_ns + one.delay_ns
            self._require(other.starts_ns >= due_ns, other, "began before {} after {}", due_ns, one)

    def _judge_order(self, lease: Lease) -> None:
        """Judge a lease of an ordered group: at most one job of a key is leased, in the order of
        deadlines."""
        first, order = lease.number == 1, self.order(lease.job)
        for job in lease.job.group.jobs.values():
            if job is lease.job or order is None or self.order(job) != order:
                continue
            other = job.newest
            if other is not None and other.live and other.starts_ns <= lease.starts_ns:
                over = other.ends_ns <= lease.starts_ns
                self._require(over, lease, "began during {} of the same key", other)
            if first and job.required and job.deadline_ns < lease.job.deadline_ns:
                born = self.cut_ns < job.born_ns < lease.starts_ns
                waits = born and not job.may_pass
                self._require(not waits, lease, "began before {}, which is due earlier", job)

    def _judge_priority(self, lease: Lease) -> None:
        """Judge the priority of a job, and the jobs that were leased while another job waited."""
        job = lease.job
        if job.required:
            own = self._options(job.key).priority
            known = job.priorities if own is None else {own}
            self._require(lease.priority in known, lease, "has priority {}", lease.priority)
        for other in job.group.jobs.values():
            first = other.leases.get(1)
            if other is job:
                continue
            if first is not None:
                self._judge_rank(lease, first)
            for one in other.leases.values() if lease.number == 1 else ():
                self._judge_rank(one, lease)

    def _judge_rank(self, lease: Lease, first: Lease) -> None:
        """Judge a lease that began while another job waited for its first lease, `first`. Both
        jobs rank by priority, and by the time for which they have waited."""
        waiting, job = first.job, lease.job
        waited = self._waits_from(waiting) < lease.starts_ns < first.starts_ns
        if waited and self.cut_ns < job.born_ns < FOREVER_NS and self._is_free(waiting):
            # a job that was given back ranks behind its birth
            rank_ns = job.born_ns - lease.priority * AGING_NS
            other_ns = waiting.born_ns - first.priority * AGING_NS
            self._require(
                rank_ns <= other_ns, lease, "with priority {} passed {} with priority {}",
                lease.priority, waiting, first.priority,
            )  # fmt: skip

    def _waits_from(self, job: Job) -> int:
        """Return the time from which a job has surely waited for its first lease."""
        unknown = job.requeued or job.group.settings.retention_ns or job.born_ns <= self.cut_ns
        return job.born_ns if job.required and not unknown else FOREVER_NS

    def _is_free(self, job: Job) -> bool:
        """Return whether no other job can hold back a job."""
        order = self.order(job)
        return not job.group.settings.ordered or not any(
            other is not job and self.order(other) in (order, None)
            for other in job.group.jobs.values()
        )

    def _require(self, fact: object, lease: Lease, text: str, *values: object) -> None:
        if not fact:
            raise Violation(f"{lease}: {text.format(*values)}")

    # ---- ends of leases ------------------------------------------------------------------------

    def _leases(self) -> Iterator[Lease]:
        for group in self.groups.values():
            for job in group.jobs.values():
                yield from job.leases.values()

    def process_ended(self, process: int) -> None:
        """Record that a consumer's process has ended, or loses its session."""
        for lease in self._leases():
            lease.ended |= lease.holder.process == process

    def process_closes(self, process: int) -> None:
        """Record that a consumer closes, which gives its jobs back without a failed attempt."""
        for lease in self._leases():
            if lease.holder.process == process:
                lease.ended = lease.closed = True

    def connection_ended(self, process: int, connection: int) -> None:
        """Record that a consumer has another connection than `connection`, which may have carried
        its leases on from an earlier daemon process."""
        for lease in self._leases():
            if lease.holder.process == process and lease.holder.connection <= connection:
                lease.ended = True

    # ---- answers -------------------------------------------------------------------------------

    def answering(self, lease: Lease, op: Op, *, mine: bool) -> None:
        """Record an answer before it is sent. `mine`: the holder of the lease sends it."""
        if mine and op in ENDS:
            lease.answers.add(op)
            lease.job.acks += op == Op.JOB_ACK
            lease.job.rejects += op == Op.JOB_REJECT

    def refused(self, lease: Lease, op: Op, *, mine: bool) -> None:
        """Record that the daemon has not taken an answer, because the lease had ended."""
        self.judged += 1
        if mine:
            lease.job.acks -= op == Op.JOB_ACK
            lease.job.rejects -= op == Op.JOB_REJECT
            lease.ended = True

    def answered(
        self, lease: Lease, op: Op, sent_ns: int, span_ns: int, text: str, *, mine: bool,
        durable: bool, now_ns: int,
    ) -> None:  # fmt: skip
        """Judge that the daemon has taken an answer that was sent at `sent_ns`."""
        self.judged += 1
        if lease.cuts != lease.job.group.cuts:
            return  # the arena that gave the answer is lost
        self._require(mine, lease, "a foreign session answered it with {}", op.name)
        both = lease.taken is None or (op == Op.JOB_EXTEND and sent_ns <= lease.known_ns)
        self._require(both, lease, "taken with another answer, {}", op.name)
        for other in lease.job.leases.values():
            older = other.number <= lease.number or other.starts_ns > sent_ns
            self._require(older, lease, "took {} although {} was newer", op.name, other)
        if op == Op.JOB_EXTEND:
            self._extended(lease, sent_ns + span_ns)
            return
        lease.taken, lease.taken_ns, lease.text = op, sent_ns, text
        lease.known_ns = now_ns
        lease.delay_ns = span_ns if op == Op.JOB_NACK else 0
        if op == Op.JOB_ACK:
            lease.job.done, lease.job.done_ns = True, sent_ns
            lease.job.done_durably |= durable
            lease.job.group.acked += 1

    def _extended(self, lease: Lease, ends_ns: int) -> None:
        last_ns = lease.starts_ns + lease.job.group.settings.max_lease_ns
        lease.ends_ns = max(lease.ends_ns, min(ends_ns, last_ns))
        for other in lease.job.leases.values():
            if other.number > lease.number:
                self._judge_pair(lease, other)

    # ---- durability ----------------------------------------------------------------------------

    def committed(self) -> None:
        """Record that all appended records are on disk."""
        for group in self.groups.values():
            group.durable |= group.since_ns < FOREVER_NS
            for job in group.jobs.values():
                job.durable |= job.required
                job.done_durably |= job.done

    def arena_lost(self, now_ns: int, *, wal: bool) -> None:
        """Record the loss of the arena. All leases have ended; without a WAL, all jobs are gone."""
        self.cut_ns = now_ns
        self._forget_priorities()
        for group in self.groups.values():
            group.cuts += 1
            group.acked, group.paused_ns = 0, FOREVER_NS
            if not (wal and group.durable):
                group.since_ns, group.durable = FOREVER_NS, False
            for job in group.jobs.values():
                job.required &= job.durable and wal
                job.durable &= wal
                job.done = job.done_durably = job.done_durably and wal
                job.leases.clear()

    def forced(self) -> None:
        """Record that a damaged WAL was accepted. Groups and jobs may be missing or older."""
        self._forget_priorities()
        for group in self.groups.values():
            group.cuts += 1
            group.since_ns, group.durable, group.paused_ns = FOREVER_NS, False, FOREVER_NS
            group.acked = 0
            for job in group.jobs.values():
                job.required = job.durable = job.done = job.done_durably = False
                job.leases.clear()

    def _forget_priorities(self) -> None:
        for possible in self.priorities.values():
            possible.lost()

    # ---- the end -------------------------------------------------------------------------------

    def dead(
        self, name: str, subject: bytes, ticket: int, attempts: int, reason: JobReason, error: str
    ) -> None:
        """Judge a dead letter."""
        group = self.groups[name]
        job, settings = self.job(group, subject), group.settings
        letter = f"dead letter {job} ({reason.name}, {attempts} attempts, {error!r})"
        job.listed = True
        if job.repeated:
            return
        if job.done:
            raise Violation(f"{letter}: the job was acknowledged")
        if reason == JobReason.MAX_ATTEMPTS and attempts < settings.max_attempts:
            raise Violation(f"{letter}: {settings.max_attempts} attempts are allowed")
        if reason == JobReason.TOO_OLD and not settings.retention_ns:
            raise Violation(f"{letter}: the group has no retention")
        if reason == JobReason.REJECTED and not job.rejects:
            raise Violation(f"{letter}: nobody rejected it")
        newest = job.newest
        if newest is None or job.requeued:
            return
        if ticket != newest.identity[0]:
            raise Violation(f"{letter}: ticket {ticket}, but {newest}")
        if newest.taken == Op.JOB_REJECT and (reason, error) != (JobReason.REJECTED, newest.text):
            raise Violation(f"{letter}: differs from {newest}")

    def finish(self, name: str, dropped: int) -> None:
        """Judge a group that has no jobs left, but perhaps dead letters. Each required job was
        acknowledged, is a dead letter, or was dropped. `dropped`: the daemon's count of those."""
        group = self.groups[name]
        missing = [
            job for job in group.jobs.values() if job.required and not job.acks and not job.listed
        ]
        drops = group.settings.drops or group.drops or group.settings.max_dead < MANY_DEAD
        if missing and (not drops or (not group.cuts and dropped < len(missing))):
            raise Violation(f"{len(missing)} jobs were lost, {dropped} were dropped: {missing[0]}")

    def counts(self, name: str, acked: int, sizes: tuple[int, ...], confirmed: int) -> None:
        """Judge the counts of a group. `sizes`: pending timers, and jobs in each state.
        `confirmed`: number of confirmed acks when the question was sent."""
        group = self.groups[name]
        if sum(sizes) > group.settings.max_backlog:
            raise Violation(f"{name}: {sizes} exceed the budget {group.settings.max_backlog}")
        if acked < min(confirmed, group.acked):
            raise Violation(f"{name}: {acked} acks are counted, {confirmed} were confirmed")
        possible = sum(job.acks > 0 for job in group.jobs.values())
        if acked > possible + len(self.starts_ns):
            raise Violation(f"{name}: {acked} acks are counted, {possible} were sent")
