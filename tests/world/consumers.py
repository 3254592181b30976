"""A consumer process of the world: the real Leases and Member, with handlers that fail, hang,
answer late, or end with their process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from purgatoryd.clients.connection import Connection
from purgatoryd.clients.jobs import Job as Steps
from purgatoryd.clients.leases import Lease, LeasedJob, Leases, PendingLease, Sink
from purgatoryd.clients.packing import Builder, Entry
from purgatoryd.shm_layout import group_wire
from purgatoryd.shm_layout.errors import PurgatorydError
from purgatoryd.shm_layout.group_wire import RawJob
from purgatoryd.shm_layout.layout import KeyType, Op, Status
from world import jobs as judge
from world.clients import LIMIT_S, SimulatedClient
from world.jobs import Delivered, Group, Holder
from world.oracle import Violation
from world.script import MS

if TYPE_CHECKING:
    from world.cell import Cell

DRAIN_S = 2.0
WORK_NS = 40 * MS
"""Longest time that a job waits for a handler, and longest time of a handler."""
HANDLERS: dict[str, int] = {
    "ack": 60, "nack": 7, "nack later": 7, "release": 5, "reject": 4, "extend": 6, "shorten": 4,
    "hang": 4, "forget": 3,
}  # fmt: skip
"""Actions of handlers, with weights."""


def subject_of(key: object, payload: bytes) -> bytes:
    """Return what identifies a job: the key of an operation or of an occurrence, or the payload of
    a timer."""
    return str(key).encode() if str(key).startswith(("o", "s")) else bytes(payload)


class _Queue(Sink):
    """The jobs that wait for a handler."""

    job_type = LeasedJob

    def __init__(self, consumer: SimulatedConsumer) -> None:
        self._consumer = consumer
        self.desk = self
        self.waiting: dict[bytes, Lease] = {}

    def add(self, jobs: Sequence[LeasedJob]) -> None:
        for job in jobs:
            lease = job._lease
            self.waiting[lease.id] = lease
            self._consumer.later(
                self._consumer.luck(lease, "wait") % WORK_NS, partial(self._take, lease)
            )

    def drop(self, lease: Lease) -> None:
        """Do nothing when the object of a job is collected: its handler answers through the
        lease."""

    def _take(self, lease: Lease) -> None:
        if self.waiting.pop(lease.id, None) is not None and not (lease.op or lease.lost):
            lease.handed = True
            self._consumer.handle(lease)

    def clear(self) -> None:
        dropped, self.waiting = self.waiting, {}
        for lease in dropped.values():
            self._consumer.leases.drop(lease)

    def wake(self) -> None:
        pass


class SimulatedConsumer(SimulatedClient):
    """One consumer process of a group."""

    leases: Leases

    def __init__(
        self, cell: Cell, namespace: str, group: Group, lease_ns: int, credits: int, *,
        durable: bool | None, partition: int | None,
    ) -> None:  # fmt: skip
        self.cell = cell
        self.group = group
        self.lease_ns = lease_ns
        self.credits = credits
        self.seen: list[tuple[bytes, judge.Lease]] = []
        """All leases that this process has received, with their struct pg_lease."""
        self._queue = _Queue(self)
        self._frozen_work: list[Callable[[], None]] = []
        self.failed: PurgatorydError | None = None
        """The reason why it could not join its group at its start."""
        self._deserted: set[int] = set()
        """Sessions that this process replaced. Their BYE gives their jobs back."""
        self._last: Any = None
        """The newest connection of this process."""
        world = cell.world
        super().__init__(
            world.machine, world.network, "w", namespace, durable=durable, partition=partition,
            owns=False,
        )  # fmt: skip
        self._begin(self._joining())

    # ---- its parts -----------------------------------------------------------------------------

    def _speaker(self) -> tuple[Callable[[], float], bool]:
        self.leases = Leases(self.core, self.group.name, self.lease_ns, self.credits, self._queue)
        self.core.on_connection = self._connected
        return self.leases.speak, True

    def _connected(self, connection: Connection) -> None:
        super()._connected(connection)
        self.leases.add_member(connection)
        [member] = self.leases.members
        session, pack = connection.session, member._pack
        receive, lose, desert = session.on_jobs, session.on_lost, session._desert
        assert receive is not None
        assert lose is not None

        def received(body: bytes, count: int) -> None:
            for raw in group_wire.decode_jobs(body, count):
                self._received(raw)
            receive(body, count)

        def lost(error: Any) -> None:
            self.cell.jobs.process_closes(self.host.pid)
            lose(error)

        def deserted(*arguments: Any) -> Any:
            self._deserted.add(session.id)
            self.cell.jobs.process_closes(self.host.pid)  # its BYE gives the jobs back
            return desert(*arguments)

        def packed(pending: Any, fields: tuple[Any, ...]) -> None:
            if isinstance(pending, PendingLease):
                self._answering(pending, fields)
            pack(pending, fields)

        session.on_jobs, session.on_lost = received, lost
        session._desert = deserted  # type: ignore[method-assign, assignment]
        member._pack = packed  # type: ignore[method-assign]

    def wake(self) -> None:
        """Schedule the next iteration. Let the judge see that a connection has ended, unless its
        daemon has ended, which keeps leases."""
        last, self._last = self._last, self.ends[-1].connection if self.ends else None
        if last is not None and last is not self._last and last.transport.alive:
            self.cell.jobs.connection_ended(self.host.pid, last.number)
        super().wake()

    def _joining(self) -> Steps[None]:
        try:
            yield from self.jobs.greeted(LIMIT_S)
            yield from self.leases.joined(LIMIT_S)
        except PurgatorydError as error:
            self.failed = error
            raise

    def luck(self, lease: Lease, subject: str) -> int:
        """Return a number that depends on the seed, the job and its lease only."""
        words = (self.cell.world.script.setting.seed, subject, lease.id)
        return zlib.crc32(repr(words).encode())

    def later(self, span_ns: int, work: Callable[[], None]) -> None:
        """Run `work` in this process, unless the process has ended."""

        def run() -> None:
            if self.frozen:
                self._frozen_work.append(run)
            elif self.alive:
                work()
                self.wake()

        self.schedule.after(span_ns, run)

    # ---- jobs ----------------------------------------------------------------------------------

    @property
    def holder(self) -> Holder:
        """The session and the connection of this process."""
        connection = self.ends[-1].connection
        return Holder(self.host.pid, self.session_id, connection.number if connection else 0)

    def _received(self, raw: RawJob) -> None:
        cell, begun_ns = self.cell, self.cell.begun_ns
        payload = raw.payload
        ends_ns = raw.lease_ends_ns + begun_ns
        length_ns = min(self.lease_ns, self.group.settings.max_lease_ns)
        one = Delivered(
            raw.ticket, str(raw.key), payload, raw.deadline_ns + begun_ns, raw.row, raw.lease,
            raw.attempt, ends_ns - length_ns, ends_ns, raw.now_ns + begun_ns, raw.priority,
        )  # fmt: skip
        cell.world.note("job", raw.ticket, raw.lease, raw.attempt)
        subject = subject_of(raw.key, payload)
        closed = self.session_id in self._deserted or self.leaving
        lease = cell.jobs.received(self.group.name, subject, self.holder, one, closed=closed)
        lease.ended |= closed
        lease.closed |= closed
        self.seen.append((raw.lease_id, lease))

    def handle(self, lease: Lease) -> None:
        """Run the handler of a job."""
        kinds = [kind for kind, weight in HANDLERS.items() for _ in range(weight)]
        kind = kinds[self.luck(lease, "handler") % len(kinds)]
        if self.cell.finishing:
            kind = "ack"
        work = partial(getattr(self, f"_{kind.replace(' ', '_')}"), lease)
        self.later(self.luck(lease, "work") % WORK_NS, work)

    def _answer(self, lease: Lease, op: Op, text: bytes = b"", time_ns: int = 0) -> None:
        if not (lease.lost or lease.op) and self.usable:
            self._begin(self.leases.answered([lease], op, text, time_ns, LIMIT_S))

    def _ack(self, lease: Lease) -> None:
        self._answer(lease, Op.JOB_ACK)

    def _nack(self, lease: Lease) -> None:
        self._answer(lease, Op.JOB_NACK, f"failed {lease.attempt}".encode(), -1)

    def _nack_later(self, lease: Lease) -> None:
        delay_ns = self.luck(lease, "delay") % (300 * MS)
        self._answer(lease, Op.JOB_NACK, b"later", delay_ns)

    def _release(self, lease: Lease) -> None:
        self._answer(lease, Op.JOB_RELEASE)

    def _reject(self, lease: Lease) -> None:
        self._answer(lease, Op.JOB_REJECT, f"bad {lease.attempt}".encode())

    def _extend(self, lease: Lease) -> None:
        self._answer(lease, Op.JOB_EXTEND, b"", 2 * self.lease_ns)
        self.later(self.luck(lease, "longer") % (3 * self.lease_ns), partial(self._ack, lease))

    def _shorten(self, lease: Lease) -> None:
        """Request an extension that ends earlier than the lease, which must not end it earlier."""
        self._answer(lease, Op.JOB_EXTEND, b"", MS)
        self.later(self.luck(lease, "longer") % self.lease_ns, partial(self._ack, lease))

    def _hang(self, lease: Lease) -> None:
        """Never answer. The client extends the lease until it has lasted for max_lease."""

    def _forget(self, lease: Lease) -> None:
        """Drop the object of the job without an answer."""
        self.leases.drop(lease)

    # ---- answers -------------------------------------------------------------------------------

    def stale_answer(self, identity: bytes, lease: judge.Lease, op: Op, span_ns: int) -> None:
        """Answer a lease without the checks of the client."""
        [member] = self.leases.members
        pending = PendingLease(Lease(member, _raw(lease), identity, 0.0), lambda _: None)
        fields = (op, 0, KeyType.BYTES, identity, 0, 0, b"stale", b"", span_ns, 0)
        self._answering(pending, fields, lease)
        pending.connection = self.connection
        entry = Entry(pending, self.core.names.of_key, Builder.record, fields)
        self.connection.packer.add(entry)
        self.wake()

    def _answering(
        self, pending: PendingLease, fields: tuple[Any, ...], lease: judge.Lease | None = None
    ) -> None:
        """Let the judge see an answer, and what the daemon says to it."""
        op, text, span_ns = Op(fields[0]), bytes(fields[6]), int(fields[8])
        if lease is None:
            lease = next(one for identity, one in reversed(self.seen) if identity == fields[3])
        mine = (lease.holder.process, lease.holder.session) == (self.host.pid, self.session_id)
        sent_ns, durable, done = self.schedule.now_ns, self.session.durable, pending.on_done
        self.cell.jobs.answering(lease, op, mine=mine)

        def answered(call: Any) -> None:
            self.cell.world.note("answer", op, int(call.word))
            try:
                judged(call)
            except Violation as violation:
                self.cell.violated(violation)  # the client catches exceptions of callbacks
            if done is not None:
                done(call)

        def judged(call: Any) -> None:
            if call.error is None and call.status == Status.DONE:
                self.cell.jobs.answered(
                    lease,
                    op,
                    sent_ns,
                    span_ns,
                    text.decode(),
                    mine=mine,
                    durable=durable,
                    now_ns=self.schedule.now_ns,
                )
                if durable:
                    self.cell.durably_answered()
            elif call.error is None and call.status == Status.LEASE_LOST:
                self.cell.jobs.refused(lease, op, mine=mine)

        pending.on_done = answered

    # ---- its process ---------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """True while the process is a member of its group."""
        return bool(self.leases.members) and all(one.is_joined for one in self.leases.members)

    @property
    def works(self) -> bool:
        """True while the process takes jobs."""
        return self.alive and not (self.leaving or self.failed or self.leases.error)

    def thaw(self) -> None:
        """Let the process continue, with the work that became due meanwhile."""
        super().thaw()
        work, self._frozen_work = self._frozen_work, []
        for run in work:
            self.schedule.after(0, run)

    def close(self) -> None:
        """Stop as on SIGTERM: release the jobs that no handler has, wait for the others, and end
        the session."""
        self.leaving = True
        self.cell.jobs.process_closes(self.host.pid)

        def steps() -> Steps[None]:
            yield from self.leases.drained(DRAIN_S)
            yield from self.jobs.closing(LIMIT_S)

        self._begin(steps())

    def die(self) -> None:
        """End the process without BYE, unless it was closed before."""
        self.cell.jobs.process_ended(self.host.pid)
        super().die()


def _raw(lease: judge.Lease) -> Any:
    """Return the fields of a job that Lease takes."""
    ticket, row = lease.identity
    return RawJob(
        ticket, 0, 0, 0, 0, 0, 0, row, lease.number, lease.attempt, 0, 0, 0, "", "stale", b""
    )
