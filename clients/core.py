"""The part of a client that the blocking client and the asyncio client share.

A Core checks the arguments of a call, finds the connection to the partition that has its key, and
collects the refusals that no caller has seen. No code here locks or waits.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

from purgatoryd.clients import times
from purgatoryd.clients._pack import Direct, Requests
from purgatoryd.clients.arguments import check_class, check_type, check_whole
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.fork_guard import ForkGuard
from purgatoryd.clients.items import OrderHash, OrderKey, encode_items
from purgatoryd.clients.local_channel import Transport, open_zmq, opener
from purgatoryd.clients.model import TimerInfo
from purgatoryd.clients.numa_local import refuse_remote
from purgatoryd.clients.packing import (
    CANCEL,
    PUT,
    Builder,
    Entry,
    Names,
    Pending,
    PendingAdd,
    PendingCancel,
)
from purgatoryd.clients.poller import OpenChannel
from purgatoryd.clients.route import Route
from purgatoryd.clients.session import Query, Session
from purgatoryd.clients.times import Late
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.errors import (
    BatchError,
    DaemonError,
    DaemonUnreachable,
    Denied,
    InvalidArgument,
    InvalidTime,
    Partitioned,
    SessionExpired,
)
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import (
    TICKET_MAX,
    TIME_MAX_NS,
    BulkLoadAction,
    ClockKind,
    CursorAction,
    PutMode,
    Status,
)
from purgatoryd.shm_layout.paths import check_name, shut
from purgatoryd.shm_layout.wire import Key, Reply

if TYPE_CHECKING:
    from purgatoryd.clients.ledger import Ledger
    from purgatoryd.clients.remote import Remote
    from purgatoryd.clients.resume import Resume

Answer = TypeVar("Answer", covariant=True)
Mode = Literal["error", "replace", "keep", "extend"]
"""Effect of an add whose key is armed: raise Exists, arm the timer again, keep the timer, or move
its deadline, but only to a later time."""

MODES: dict[str, int] = {mode.name.lower(): int(mode) for mode in PutMode}
UNCOLLECTED_MAX = 10_000  # Number of refusals stored for flush(); more refusals are only counted.
QUEUE_LIMIT = 65_536  # Default limit for packed calls without an answer, for each partition.
QUEUE_LIMIT_MAX = 2**31 - 1
DIRECT_S = 0.02
"""Time after which a direct call without an answer becomes a batch in flight of the engine, which
alone watches the end of the connection."""
OPEN_RETRY_S = 0.01  # Time between two attempts to find the daemon's socket.
HOST_MAX = 50  # Largest number of characters of the host's name in the name of a worker.
BYE_S = 0.2  # Time that a closing client waits until the daemon has ended its session.


class Spin(NamedTuple):
    """Time that a direct call looks for its answer before it sleeps."""

    longest_ns: int = 0
    adapts: bool = False
    """If spins seldom find the answer, most calls omit them."""


NO_SPIN = Spin()
_ADAPTING = Spin(50_000, adapts=True)
_SPIN_MAX_US = 1000


def check_spin(spin_us: int | None) -> Spin:
    """Return the spin of a client. None = one that adapts. Raises InvalidArgument."""
    if spin_us is None:
        return _ADAPTING
    return Spin(check_whole("spin_us", spin_us, 0, _SPIN_MAX_US) * 1000)


def mode_number(mode: str) -> int:
    """Return the enum pg_put_mode of `mode`. Raises InvalidArgument."""
    try:
        return MODES[mode]
    except (KeyError, TypeError):
        raise InvalidArgument(f"mode must be one of {', '.join(MODES)}, not {mode!r}") from None


def _worker_name(worker: str | None, remote: Remote | None, pid: int) -> bytes:
    """Return the worker's name for the HELLO. The default of a local process is empty, because the
    daemon knows its pid."""
    if worker is None and remote is not None:
        worker = f"{os.uname().nodename[:HOST_MAX]}:{pid}"
    return wire.encode_worker(worker or "")


class Core:
    """The part of a client that neither locks nor waits."""

    def __init__(
        self,
        name: str,
        namespace: str,
        remote: Remote | None = None,
        durable: bool | None = False,
        ledger: Ledger | None = None,
        worker: str | None = None,
        numa_local: bool = False,
        resume: Resume | None = None,
        host: Host = HOST,
        transport: Transport = "auto",
        open_channel: OpenChannel | None = None,
    ) -> None:
        """`open_channel` replaces the channels of `transport`."""
        self.name = check_name(name)
        check_type("durable", durable, bool)
        check_type("worker", worker, str)
        check_class("remote", remote, "remote", "Remote")
        check_class("ledger", ledger, "ledger", "Ledger")
        check_class("resume", resume, "resume", "Resume")
        refuse_remote(numa_local=numa_local, remote=remote)
        self.host = host
        self.namespace = namespace
        self.names = Names(wire.encode_namespace(namespace))
        self.connections: Sequence[Connection] = ()
        """A Connection for each partition of the namespace; empty until the daemon is found."""
        self.direct: Direct | None = None
        """The direct calls of the only connection; None if there are several partitions."""
        self.opened = False
        """True once each connection has a channel."""
        self.on_connection: Callable[[Connection], object] = lambda _: None
        """Called with each connection before it is opened."""
        self._endpoint = ""
        self._remote = remote
        self._durable = durable
        self._ledger = ledger
        self._worker = _worker_name(worker, remote, host.pid)
        self._numa_local = numa_local
        self._resume = resume
        self._open_channel = open_channel or opener(transport, remote)
        self._route = Route(name, namespace, host, open_channel or open_zmq)
        self._uncollected: dict[Pending, None] = {}
        self.reported: BatchError | None = None
        """The error that flush() raises next, with the refused and the lost calls; or None."""
        self._unlisted = 0
        self.fork_guard = ForkGuard("client")
        self.check = self.fork_guard.check

    # ---- open and close ----------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self.fork_guard.closed

    def try_open(self) -> bool:
        """Open the channels if the daemon's socket exists. Returns whether all channels are open.

        Raises the errors of Route.find, except DaemonUnreachable.
        """
        if not self.opened:
            try:
                if not self.connections:
                    self.connections = [self._connection(number) for number in self.partitions()]
                for connection in self.connections:
                    connection.open()
                self.opened = True
            except DaemonUnreachable as error:
                self._endpoint = error.endpoint
        return self.opened

    def partitions(self) -> Iterable[int]:
        """Return the numbers of the partitions whose keys this client uses. Raises the errors of
        Route.find."""
        return range(1 if self._remote is not None else self._route.count())

    def _connection(self, number: int) -> Connection:
        host, resume = self.host, self._resume
        nonces = host.random_bytes if resume is None else resume.nonces(host.random_bytes, number)
        grace_ns = 0 if resume is None else resume.grace_ns
        session = Session(
            nonces, durable=self._durable, ledger=self._ledger, worker=self._worker,
            grace_ns=grace_ns,
        )  # fmt: skip
        connection = Connection(
            self._route, number, self.names, session, open_channel=self._open_channel,
            remote=self._remote, numa_local=self._numa_local,
        )  # fmt: skip
        self.on_connection(connection)
        return connection

    def lend(self, requests: Requests, wait_ns: int, spin: Spin) -> bool:
        """Let direct calls use the channels of quiet connections. Returns whether they may use one.
        The other arguments are those of Direct."""
        lent = False
        for connection in self.connections:
            if connection.direct is None:
                names = self.names
                connection.direct = Direct(
                    requests, connection, self.namespace, names.topics, names.of_key, MODES,
                    wait_ns, *spin,
                )  # fmt: skip
                self.direct = connection.direct if len(self.connections) == 1 else None
            lent |= connection.lend()
        return lent

    def unreachable(self, waited_s: float) -> DaemonUnreachable:
        """Return the error of a client that did not find its daemon within `waited_s` seconds."""
        barred = shut(self.name) if self._remote is None else ""
        return DaemonUnreachable(self.name, self._endpoint, waited_s, 0, barred)

    def close(self) -> None:
        """Close all channels. Calls in flight get no answer."""
        self.fork_guard.closed = True
        if self.fork_guard.mine:
            self._route.close()
            for connection in self.connections:
                connection.close()

    @property
    def clock(self) -> int:
        """ClockKind of the daemon, from its last welcome."""
        return self.connections[0].clock if self.connections else ClockKind.BOOT

    @property
    def daemon(self) -> bytes:
        """The uuid of the daemon's arena, from its last welcome. Raises Partitioned if there are
        several partitions, because each shard has an arena of its own."""
        return self.whole("no arena has all its timers").daemon if self.connections else b""

    # ---- routing -----------------------------------------------------------------------------

    def at(self, key: bytes) -> Connection:
        """Return the connection to the partition of a key. `key`: the bytes without the type."""
        connections = self.connections
        if len(connections) == 1:
            return connections[0]
        return connections[int(lib.pg_partition(key, len(key), len(connections)))]

    def of(self, key: Key) -> Connection:
        """Return the connection to the partition of a key. Raises InvalidKey."""
        return self.at(wire.encode_key(key)[1])

    def of_all(self, key: Key, others: Iterable[Key]) -> Connection:
        """Return the connection to the partition that has `key` and all `others`.

        Raises InvalidKey, and Partitioned if the keys are in different partitions.
        """
        connection = self.of(key)
        if len(self.connections) > 1:
            for other in others:
                if self.of(other) is not connection:
                    reason = (
                        f"operation {key!r} and its watch key {other!r} are in different partitions"
                    )
                    raise Partitioned(self.namespace, len(self.connections), reason)
        return connection

    def check_order(self, key: Key, order_key: OrderKey | None) -> None:
        """Raise Partitioned if a key and its order key are in different partitions, because a
        consumer group orders the jobs of one partition only. Raises InvalidKey."""
        if order_key is None or len(self.connections) < 2:
            return
        if isinstance(order_key, OrderHash):
            raise Partitioned(self.namespace, len(self.connections), NO_ORDER_HASHES)
        if self.of(key) is not self.of(order_key):
            reason = f"timer {key!r} and its order key {order_key!r} are in different partitions"
            raise Partitioned(self.namespace, len(self.connections), reason)

    def whole(self, reason: str) -> Connection:
        """Return the only connection. Raises Partitioned with `reason` if there are more."""
        if len(self.connections) > 1:
            raise Partitioned(self.namespace, len(self.connections), reason)
        return self.connections[0]

    def for_bulk_loads(self) -> Connection:
        """Return the connection for a bulk load. Raises Closed, Partitioned, ShardUnavailable."""
        self.check()
        connection = self.whole(NO_BULK_LOADS)
        connection.admit()
        return connection

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
        within: float | timedelta | None,
        tag: str | None,
        priority: int | None,
        order_key: OrderKey | None,
        late: Late | None,
        unique_for: float | timedelta | None,
        *,
        collect: bool,
    ) -> Entry[PendingAdd]:
        """Check an add and return its entry. Raises InvalidArgument, Closed.

        `collect`: if the add is refused and no caller sees the refusal, flush() reports it.
        """
        self.check()
        key_type, key_bytes = wire.encode_key(key)
        connection = self.at(key_bytes)
        self.check_order(key, order_key)
        kind, time_ns = connection.due(delay, delay_ns, deadline, deadline_boot_ns)
        name = self.names.of_topic(topic)
        payload = wire.encode_payload(payload)
        number = mode_number(mode)
        note = self._note if collect else None
        pending = PendingAdd(key, note, self.namespace, topic, payload)
        slack = times.slack(within)
        items = encode_items(tag, priority, order_key, late, unique_for)
        fields = (PUT, number, key_type, key_bytes, kind, slack, payload, items, time_ns, 0)
        return connection.entry(pending, name, Builder.record, fields)

    def cancel(
        self, key: Key, ticket: int, *, collect: bool, delivered: bool = False
    ) -> Entry[PendingCancel]:
        """Check a cancel and return its entry; `ticket` 0 = any timer of the key; `delivered`: end
        jobs of the key as well. Raises InvalidArgument, Closed."""
        self.check()
        ticket = check_whole("ticket", ticket, 0, TICKET_MAX)
        key_type, key_bytes = wire.encode_key(key)
        pending = PendingCancel(key, self._note if collect else None)
        fields = (CANCEL, 0, key_type, key_bytes, 0, int(delivered), b"", b"", 0, ticket)
        return self.at(key_bytes).entry(pending, self.names.of_key, Builder.record, fields)

    def question(self, connection: Connection, key: Key) -> Question:
        """Queue and return a question about the timer of one key."""
        question = Question(self.names.namespace, key)
        connection.session.ask(question.query)
        return question

    def found(self, key: Key, reply: bytes) -> TimerInfo | None:
        """Return the timer in the daemon's reply to a question about a key. Raises Denied."""
        question = Question(self.names.namespace, key)
        question.query.settle(wire.decode_reply(reply))
        return question.outcome()

    def bulk_load_question(
        self, bulk_load: bytes, action: int, fencing_token: int = 0, start: int = 0
    ) -> BulkLoadQuestion:
        """Queue a message that asks for the status of a bulk load, or begins, closes or forgets it.
        Return the message. Raises InvalidArgument and Partitioned."""
        from purgatoryd.clients.bulk_loads import check_bulk_load

        check_bulk_load(bulk_load, 0, fencing_token)
        connection = self.whole(NO_BULK_LOADS)
        question = BulkLoadQuestion(self.names.namespace, bulk_load, action, fencing_token, start)
        connection.session.ask(question.query)
        return question

    def cursor_name(self, cursor: str) -> wire.CursorName:
        """Return the encoded name of a cursor. Raises InvalidName."""
        return wire.CursorName(self.names.namespace, wire.encode_cursor_name(cursor))

    def cursor_question(
        self, connection: Connection, name: wire.CursorName, action: CursorAction,
        topics: wire.Committed, stream_id: int = 0, *, every_topic: bool = False,
    ) -> CursorQuestion:  # fmt: skip
        """Queue a message that opens, commits or deletes a cursor, and return it."""
        session = connection.session
        question = CursorQuestion(
            lambda number, of: wire.encode_cursor(
                number, of, name, action, topics, stream_id=stream_id, every_topic=every_topic,
                durable=session.durable,
            )
        )  # fmt: skip
        session.ask(question.query)
        return question

    def check_time(self, at_ns: int | None) -> int | None:
        """Return `at_ns` for set_time(). Raises InvalidTime, InvalidArgument."""
        if at_ns is not None:
            if self.clock != ClockKind.VIRTUAL:
                raise InvalidTime("needs a daemon with a virtual clock", at_ns, TIME_MAX_NS)
            at_ns = check_whole("time", at_ns, 0, TIME_MAX_NS)
        return at_ns

    def set_time(self, at_ns: int | None) -> None:
        """Let the daemon apply later calls at virtual time `at_ns`; None = at its current time."""
        for connection in self.connections:
            connection.packer.seal()
            connection.packer.at_ns = at_ns

    # ---- refusals that no caller has seen ----------------------------------------------------

    def _note(self, pending: Pending) -> None:
        if not pending.failed:
            return
        if len(self._uncollected) < UNCOLLECTED_MAX:
            self._uncollected[pending] = None
        else:
            self._unlisted += 1

    def collected(self, pending: Pending) -> None:
        """Note that the caller has seen the outcome of this call."""
        self._uncollected.pop(pending, None)

    def report(self) -> None:
        """Add to `reported` the refused and the lost calls whose outcome no caller has seen."""
        uncollected, self._uncollected = self._uncollected, {}
        unlisted, self._unlisted = self._unlisted, 0
        if not (uncollected or unlisted):
            return
        lost = sum(isinstance(pending.error, SessionExpired) for pending in uncollected)
        refused = [p for p in uncollected if not isinstance(p.error, SessionExpired)]
        refusals: tuple[tuple[object, int], ...] = tuple((p.key, p.status) for p in refused)
        count = len(refusals) + unlisted
        first = str(refused[0].why()) if refused else ""
        if (before := self.reported) is not None:
            refusals, count = before.refusals + refusals, before.count + count
            lost, first = lost + before.lost, before.first or first
        self.reported = BatchError(refusals=refusals, count=count, lost=lost, first=first)

    def raise_reported(self) -> None:
        """Raise `reported` once, if it is set. No signal handler runs between the statements."""
        if (error := self.reported) is not None:
            self.reported = None; raise error  # noqa: E702  # fmt: skip


NO_ORDER_HASHES = "the partition of an order key that is known as a hash cannot be found"
NO_BULK_LOADS = "bulk loads need a namespace with one partition"


class Asked(ABC, Generic[Answer]):
    """A question to the daemon, and its answer once it has arrived."""

    def __init__(self, build: Callable[[int, int], bytes]) -> None:
        self.query = Query(build, self._settle)
        self._reply: Reply | DaemonError | None = None

    def _settle(self, reply: Reply | DaemonError) -> None:
        self._reply = reply

    @property
    def done(self) -> bool:
        """True once the answer, or the error that replaces it, has arrived."""
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
        """Return the status of the bulk load. Raises DaemonError."""
        return wire.decode_bulk_load(self._answer().body)


class CursorQuestion(Asked[dict[str, tuple[int, int]]]):
    """A CURSOR message. Its answer is (incarnation, newest committed sequence) by topic."""

    def outcome(self) -> dict[str, tuple[int, int]]:
        """Return the positions of the cursor. Raises DaemonError."""
        reply = self._answer()
        return wire.decode_cursor(reply.body, reply.records)


class Question(Asked[TimerInfo | None]):
    """A question about the timer of one key, for get()."""

    def __init__(self, namespace: bytes, key: Key) -> None:
        self.key = key
        super().__init__(lambda number, session: wire.encode_query(number, session, namespace, key))

    def outcome(self) -> TimerInfo | None:
        """Return the timer, or None. Raises Denied, DaemonError."""
        reply = self._answer()
        found = wire.decode_infos(reply.body, reply.records)
        if found and found[0].status == Status.DENIED:
            raise Denied(self.key, Status.DENIED)
        if not found or found[0].status not in (Status.FOUND, Status.PARKED):
            return None
        return timer_info(found[0])


def timer_info(info: wire.Info) -> TimerInfo:
    """Return a timer that the daemon has described."""
    return TimerInfo(
        info.key, info.namespace, info.topic, info.ticket, info.deadline_ns, Status(info.status),
        info.payload, None if info.wall_ns is None else times.wall_time(info.wall_ns),
        info.operation, info.within_ns, info.tag, times.late_named(info.late), info.priority,
        None if info.order is None else OrderHash(info.order), info.unique_until_ns,
    )  # fmt: skip
