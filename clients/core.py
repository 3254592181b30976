"""What the blocking and the asyncio client share: arguments in, packed calls out, and one
non-blocking exchange with the daemon. No lock, no wait: those are the clients' own."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Generic, Literal, TypeVar

from purgatoryd.clients import times
from purgatoryd.clients.arguments import check_type, check_whole
from purgatoryd.clients.bulk_loads import check_bulk_load
from purgatoryd.clients.channel import Channel, OpenChannel
from purgatoryd.clients.fork_guard import ForkGuard
from purgatoryd.clients.ledger import Ledger
from purgatoryd.clients.model import TimerInfo
from purgatoryd.clients.numa_local import pin_numa_local, refuse_remote
from purgatoryd.clients.packing import (
    Builder,
    Entry,
    Packer,
    Pending,
    PendingAdd,
    PendingCancel,
)
from purgatoryd.clients.remote import Remote
from purgatoryd.clients.resume import Resume
from purgatoryd.clients.route import Partition, Route
from purgatoryd.clients.session import Query, Session, State
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import (
    BatchError,
    CallTimeout,
    DaemonError,
    DaemonUnreachable,
    Denied,
    InvalidArgument,
    InvalidTime,
    PermissionDenied,
    SessionExpired,
    SessionTableFull,
    TableBroken,
    UidShareExceeded,
)
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import (
    TICKET_MAX,
    TIME_MAX_NS,
    BulkLoadAction,
    ClockKind,
    PutMode,
    Status,
    kernel_number,
)
from purgatoryd.shm_layout.paths import check_name, shut
from purgatoryd.shm_layout.wire import Key, Reply

Answer = TypeVar("Answer", covariant=True)
Mode = Literal["error", "replace", "keep", "extend"]
"""What an add does when its key is armed: refuse, re-arm, leave it, move it only later."""

MODES: dict[str, int] = {mode.name.lower(): int(mode) for mode in PutMode}
UNCOLLECTED_MAX = 10_000  # refusals remembered one by one; more are only counted
TOPICS_CACHED = 4096
NEVER_S = float("inf")
APART_NS = 60_000_000_000
"""A welcome of an earlier or later time on this process's boot clock is of another clock."""
RESEND_S = 0.1  # the first wait for an overdue answer; doubles up to RESEND_MAX_S
RESEND_MAX_S = wire.RESEND_MAX_NS / 1e9
BUSY_S = 0.001  # the first wait before calls refused as BUSY are sent again; doubles
BUSY_MAX_S = 0.1
QUEUE_LIMIT = 65_536  # calls that are packed and have no answer
QUEUE_LIMIT_MAX = 2**31 - 1
OPEN_RETRY_S = 0.01  # between looks for the daemon's socket
HOST_MAX = 50  # characters of a host's name in that of a worker
BYE_S = 0.2  # how long a closing client waits for the end of its session


def mode_number(mode: str) -> int:
    """enum pg_put_mode of `mode`. Raises InvalidArgument."""
    try:
        return MODES[mode]
    except (KeyError, TypeError):
        raise InvalidArgument(f"mode {mode!r} is none of {', '.join(MODES)}") from None


def _worker_name(worker: str | None, remote: Remote | None, pid: int) -> bytes:
    """What HELLO says. Of local processes the daemon learns the pid without it."""
    if worker is None and remote is not None:
        worker = f"{os.uname().nodename[:HOST_MAX]}:{pid}"
    return wire.encode_worker(worker or "")


class Core:
    """A client without locks and waits."""

    def __init__(
        self,
        name: str,
        namespace: str,
        remote: Remote | None = None,
        durable: bool | None = False,
        ledger: Ledger | None = None,
        worker: str | None = None,
        numa_local: bool = False,
        partition: Partition | None = None,
        resume: Resume | None = None,
        host: Host = HOST,
        open_channel: OpenChannel = Channel,
    ) -> None:
        self.name = check_name(name)
        check_type("remote", remote, Remote)
        check_type("durable", durable, bool)
        check_type("ledger", ledger, Ledger)
        check_type("worker", worker, str)
        check_type("partition", partition, Partition)
        check_type("resume", resume, Resume)
        refuse_remote(numa_local=numa_local, remote=remote)
        self.host = host
        self._open_channel = open_channel
        self._numa_local = numa_local
        self._remote = remote
        self.namespace = namespace
        self.namespace_bytes = wire.encode_namespace(namespace)
        self._route = Route(name, namespace, partition, host, open_channel)
        self.key_name = self._name_entry(b"")  # for calls that name no topic
        self.session = Session(
            host.random_bytes if resume is None else resume.nonces(host.random_bytes),
            durable=durable,
            ledger=ledger,
            worker=_worker_name(worker, remote, host.pid),
            grace_ns=0 if resume is None else resume.grace_ns,
        )
        self.session.same_clock = remote is None
        self.packer = Packer(host)
        self.channel: Channel | None = None
        self.endpoint = ""
        self.answers = 0
        self._apart = False
        """Messages that came; a wait that sees it grow has not been in vain."""
        self._resend_s = RESEND_S
        self.resend_at_s = NEVER_S
        """Host time at which overdue answers are asked for again."""
        self._busy_s = BUSY_S
        self._retry_at_s = NEVER_S
        self._retried = 0
        self._topics: dict[str, bytes] = {}
        self._uncollected: dict[Pending, None] = {}
        self.reported: BatchError | None = None
        """Refusals and losses that flush() raises next."""
        self._unlisted = 0
        self.fork_guard = ForkGuard("client")
        self.check = self.fork_guard.check

    # ---- open and close ----------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self.fork_guard.closed

    def try_open(self) -> bool:
        """Connects if the daemon's socket is there. True once there is a channel."""
        if self.channel is None:
            try:
                self.endpoint = self._find()
            except DaemonUnreachable as error:
                self.endpoint = error.endpoint
                return False
            self.channel = self._open_channel(self.endpoint, self._remote)
        return True

    def _find(self) -> str:
        if self._remote is not None:
            return self._remote.place.commands
        return self._route.find().cmd_endpoint

    def admit(self) -> None:
        """Before a call. Raises Closed, ForkedProcess, and ShardUnavailable."""
        self.check()
        if self._route.breaker is not None:
            self._route.breaker.check()

    def _follow(self) -> None:
        """With another number of shards, or with the first, the namespace may have gone to another
        daemon."""
        if self.channel is None or self._remote is not None:
            return
        with suppress(DaemonError, TableBroken, PermissionDenied):
            endpoint = self._find()
            if endpoint != self.endpoint:
                self.endpoint = endpoint
                self.channel.redirect(endpoint)
                self.session.moved()

    def close(self) -> None:
        """Drops the connection; what is in flight stays without an answer."""
        self.fork_guard.closed = True
        if self.fork_guard.mine:
            self._route.close()
        if self.channel is not None and self.fork_guard.mine:
            self.channel.close()
            self.channel = None

    @property
    def clock(self) -> int:
        """The daemon's ClockKind, from its last welcome."""
        return self.session.welcome.clock_kind if self.session.welcome else ClockKind.BOOT

    @property
    def daemon(self) -> bytes:
        """The uuid of the daemon's arena, from its last welcome."""
        return self.session.welcome.uuid if self.session.welcome else b""

    @property
    def delay_clock(self) -> int:
        """The ClockKind by which delays are sent: VIRTUAL if the daemon has to stamp them,
        because its clock is not ours: on another host, or in another time namespace."""
        return self.clock if self.session.same_clock else ClockKind.VIRTUAL

    # ---- calls -------------------------------------------------------------------------------

    def put(
        self,
        key: Key,
        delay: float | timedelta | None,
        delay_ns: int | None,
        deadline: datetime | None,
        deadline_boot_ns: int | None,
        topic: str,
        payload: bytes,
        mode: str,
        *,
        collect: bool,
    ) -> Entry[PendingAdd]:
        """Check an add and return its entry. Raises InvalidArgument."""
        kind, time_ns = self.due(delay, delay_ns, deadline, deadline_boot_ns)
        key_type, key_bytes = wire.encode_key(key)
        name = self.topic_name(topic)
        payload = wire.encode_payload(payload)
        number = mode_number(mode)
        note = self._note if collect else None
        pending = PendingAdd(key, note, self.namespace, topic, payload)
        fields = (number, key_type, key_bytes, kind, time_ns, payload)
        return Entry(pending, name, Builder.put, fields)

    def due(
        self,
        delay: float | timedelta | None,
        delay_ns: int | None = None,
        deadline: datetime | None = None,
        deadline_boot_ns: int | None = None,
    ) -> tuple[int, int]:
        """times.due of a call that is made at this moment."""
        now_ns = self.host.boot_ns()
        return times.due(self.delay_clock, now_ns, delay, delay_ns, deadline, deadline_boot_ns)

    def cancel(self, key: Key, ticket: int, *, collect: bool) -> Entry[PendingCancel]:
        """Check a cancel and return its entry; `ticket` 0 = any timer of the key. Raises
        InvalidArgument."""
        ticket = check_whole("ticket", ticket, 0, TICKET_MAX)
        key_type, key_bytes = wire.encode_key(key)
        pending = PendingCancel(key, self._note if collect else None)
        return Entry(pending, self.key_name, Builder.cancel, (key_type, key_bytes, ticket))

    def question(self, key: Key) -> Question:
        """Asks for one key."""
        wire.encode_key(key)
        question = Question(self.namespace_bytes, key)
        self.session.ask(question.query)
        return question

    def bulk_load_question(
        self, bulk_load: bytes, action: int, fencing_token: int = 0, start: int = 0
    ) -> BulkLoadQuestion:
        """Asks for a bulk load, or begins, closes or forgets it. Raises InvalidArgument."""
        check_bulk_load(bulk_load, 0, fencing_token)
        question = BulkLoadQuestion(self.namespace_bytes, bulk_load, action, fencing_token, start)
        self.session.ask(question.query)
        return question

    def check_time(self, at_ns: int | None) -> int | None:
        """Raises InvalidTime or InvalidArgument unless set_time() may get `at_ns`."""
        if at_ns is not None:
            if self.clock != ClockKind.VIRTUAL:
                raise InvalidTime("needs a daemon with a virtual clock", at_ns, TIME_MAX_NS)
            at_ns = check_whole("time", at_ns, 0, TIME_MAX_NS)
        return at_ns

    def set_time(self, at_ns: int | None) -> None:
        """Later calls are applied at virtual time `at_ns`."""
        self.packer.seal()
        self.packer.at_ns = at_ns

    def topic_name(self, topic: str) -> bytes:
        """The name table's entry for `topic`. Raises InvalidName."""
        if isinstance(topic, str) and (known := self._topics.get(topic)):
            return known
        entry = self._name_entry(wire.encode_topic(topic))
        if len(self._topics) >= TOPICS_CACHED:
            self._topics.clear()
        self._topics[topic] = entry
        return entry

    def _name_entry(self, topic: bytes) -> bytes:
        lengths = bytes((len(self.namespace_bytes), len(topic)))
        return lengths + self.namespace_bytes + topic

    # ---- refusals that nobody looked at ------------------------------------------------------

    def _note(self, pending: Pending) -> None:
        if not pending.failed:
            return
        if len(self._uncollected) < UNCOLLECTED_MAX:
            self._uncollected[pending] = None
        else:
            self._unlisted += 1

    def collected(self, pending: Pending) -> None:
        """The caller has seen this call's outcome."""
        self._uncollected.pop(pending, None)

    def report(self) -> None:
        """Move refusals and losses that no caller has seen into `reported`."""
        uncollected, self._uncollected = self._uncollected, {}
        unlisted, self._unlisted = self._unlisted, 0
        if not (uncollected or unlisted):
            return
        lost = sum(isinstance(pending.error, SessionExpired) for pending in uncollected)
        refusals: tuple[tuple[object, int], ...] = tuple(
            (p.key, p.status) for p in uncollected if not isinstance(p.error, SessionExpired)
        )
        count = len(refusals) + unlisted
        if (before := self.reported) is not None:
            refusals, count = before.refusals + refusals, before.count + count
            lost += before.lost
        self.reported = BatchError(refusals=refusals, count=count, lost=lost)

    def raise_reported(self) -> None:
        """Raise `reported` once, if there is one. No signal comes between the two statements."""
        if (error := self.reported) is not None:
            self.reported = None; raise error  # noqa: E702  # fmt: skip

    # ---- the exchange ------------------------------------------------------------------------

    def push(self) -> bool:
        """Sends what may be sent. True if something could not be sent now."""
        sealed, session, channel = self.packer.sealed, self.session, self.channel
        while sealed:
            session.submit(sealed.popleft())
        if session.retries:
            self._retry()
        while (frame := session.frame()) is not None:
            if channel is None or not channel.send(frame):
                return True
            session.sent()
        return False

    def _retry(self) -> None:
        """Send calls that were refused as BUSY again, once their pause is over."""
        retries = self.session.retries
        if retries.in_round or not retries.waiting:
            return
        now_s = self.host.monotonic_s()
        if self._retry_at_s == NEVER_S:
            if retries.settled != self._retried:
                self._retried, self._busy_s = retries.settled, BUSY_S
            self._retry_at_s = now_s + self._busy_s
            self._busy_s = min(2 * self._busy_s, BUSY_MAX_S)
        elif now_s >= self._retry_at_s:
            self._retry_at_s = NEVER_S
            retries.begin_round()

    @property
    def retry_at_s(self) -> float:
        """Host time at which calls refused as BUSY are sent again; NEVER_S if there are none."""
        return self._retry_at_s if self.session.retries.waiting else NEVER_S

    def abandon(self, calls: Iterable[object]) -> bool:
        """Stop sending these calls again if the daemon refused them as BUSY; BUSY becomes their
        answer. False if none was refused."""
        return self.session.abandon(frozenset(calls)) > 0

    def pull(self) -> bool:
        """Takes all that has come. True if anything had."""
        came = False
        while self.channel is not None and (data := self.channel.receive()) is not None:
            self.take(data)
            came = True
        return came

    def withdraw(self, call: Pending, error: DaemonError) -> None:
        """Take back `call` if it is alone in its batch and was never sent; `error` becomes its
        outcome."""
        batch = self.session.unsent(call)
        if batch is not None and self.session.withdraw(batch):
            batch.settle(error)

    def take(self, data: bytes) -> None:
        """Hands one message to the session."""
        self.resend_at_s, self._resend_s = NEVER_S, RESEND_S
        before = self.session.welcome
        self.session.receive(data)
        if (welcome := self.session.welcome) is not None and welcome is not before:
            theirs_ns = welcome.real_boot_ns
            self._apart = not 0 <= self.host.boot_ns() - theirs_ns < APART_NS
            self.session.same_clock = self._remote is None and not self._apart
            if self._numa_local:
                self._numa_local = False
                pin_numa_local(kernel_number(welcome.node), kernel_number(welcome.reaper_cpu))
        session = self.session
        if session.refusal is None and session.astray is None and not session.fruitless:
            self.answers += 1  # being refused again and again is no progress
            if self._route.breaker is not None:
                self._route.breaker.answered()

    def expect(self, *, answer: bool) -> None:
        """Note whether the daemon owes an answer. The wait for it begins once, and again after
        each message of the daemon."""
        if not answer:
            self.resend_at_s = NEVER_S
        elif self.resend_at_s == NEVER_S:
            self.resend_at_s = self.host.monotonic_s() + self._resend_s

    def ask_again(self) -> None:
        """Ask again for overdue answers; each time the daemon gets longer to answer."""
        if self.host.monotonic_s() >= self.resend_at_s:
            self._resend_s = min(2 * self._resend_s, RESEND_MAX_S)
            self.resend_at_s = NEVER_S
            self._follow()
            self.session.resend()

    def look(self) -> None:
        """Takes all that has come; after a reconnect, hands everything out again."""
        if self.channel is not None and self.channel.reconnected():
            self.session.resend()
        elif self.channel is not None and not self.channel.connected:
            self._follow()
        self.pull()

    def give_up(self) -> None:
        """Raise SessionTableFull or UidShareExceeded if the daemon refused a session for that
        reason; the next call asks again."""
        refusal = self.session.refusal
        if isinstance(refusal, (SessionTableFull, UidShareExceeded)):
            self.session.refusal = None
            self.session.resend()
            raise refusal

    def overdue(self, subject: str, waited_s: float) -> DaemonError:
        """The error for a call that got no answer within `waited_s` seconds."""
        in_doubt = self.session.in_doubt()
        if self._route.breaker is not None:
            self._route.breaker.failed()
        if refusal := self.session.refusal or self.session.astray:
            return refusal
        greeting = self.session.state is State.GREETING
        if greeting or self.channel is None or not self.channel.connected:
            barred = shut(self.name) if self._remote is None else ""
            return DaemonUnreachable(self.name, self.endpoint, waited_s, in_doubt, barred)
        return CallTimeout(subject, waited_s, in_doubt, self.session.retries.waiting)


class Asked(ABC, Generic[Answer]):
    """A question on its way."""

    def __init__(self, build: Callable[[int, int], bytes]) -> None:
        self.query = Query(build, self._settle)
        self._reply: Reply | DaemonError | None = None

    def _settle(self, reply: Reply | DaemonError) -> None:
        self._reply = reply

    @property
    def done(self) -> bool:
        """True once the answer, or why there is none, is here."""
        return self._reply is not None

    @abstractmethod
    def outcome(self) -> Answer:
        """Return the answer. Raises DaemonError."""

    def _answer(self) -> Reply:
        if isinstance(self._reply, DaemonError):
            raise self._reply
        assert self._reply is not None
        return self._reply


class BulkLoadQuestion(Asked[wire.BulkLoadInfo]):
    """A question about a bulk load."""

    def __init__(
        self, namespace: bytes, bulk_load: bytes, action: int, fencing_token: int, start: int
    ) -> None:
        named = namespace if action in (BulkLoadAction.OPEN, BulkLoadAction.CLOSE) else b""
        super().__init__(
            lambda number, session: wire.encode_bulk_load(
                number,
                session,
                bulk_load,
                action,
                namespace=named,
                fencing_token=fencing_token,
                start=start,
            )
        )

    def outcome(self) -> wire.BulkLoadInfo:
        """How the bulk load stands now. Raises DaemonError."""
        return wire.decode_bulk_load(self._answer().body)


class Question(Asked[TimerInfo | None]):
    """A get on its way."""

    def __init__(self, namespace: bytes, key: Key) -> None:
        self.key = key
        super().__init__(lambda number, session: wire.encode_query(number, session, namespace, key))

    def outcome(self) -> TimerInfo | None:
        """The timer, or None. Raises Denied or DaemonError."""
        reply = self._answer()
        found = wire.decode_infos(reply.body, reply.records)
        if found and found[0].status == Status.DENIED:
            raise Denied(self.key, Status.DENIED)
        if not found or found[0].status not in (Status.FOUND, Status.PARKED):
            return None
        info = found[0]
        return TimerInfo(
            self.key, info.namespace, info.topic, info.ticket, info.deadline_ns,
            Status(info.status), info.payload,
            None if info.wall_ns is None else times.wall_time(info.wall_ns), info.operation,
        )  # fmt: skip
