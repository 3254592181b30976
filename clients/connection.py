"""The exchange with the daemon that holds one partition of a namespace.

A Connection has a session, a channel, and the packed calls that wait for the session. A client has
one Connection for each partition; most namespaces have one partition. No code here locks or waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from purgatoryd.clients.destination import AnyPending, Destination
from purgatoryd.clients.numa_local import pin_numa_local
from purgatoryd.clients.packing import Builder, Entry, Names, Pending
from purgatoryd.clients.poller import AnyChannel, OpenChannel
from purgatoryd.clients.route import Breaker, Route
from purgatoryd.clients.session import Session, State
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import (
    CallTimeout,
    DaemonError,
    DaemonUnreachable,
    MessageRefused,
    PermissionDenied,
    SessionTableFull,
    TableBroken,
    UidShareExceeded,
)
from purgatoryd.shm_layout.layout import ClockKind, kernel_number
from purgatoryd.shm_layout.paths import shut

if TYPE_CHECKING:
    from purgatoryd.clients._pack import Direct
    from purgatoryd.clients.remote import Remote

NEVER_S = float("inf")
APART_NS = 60_000_000_000
"""Limit for our CLOCK_BOOTTIME minus the time in a welcome. If the difference is larger or
negative, the daemon is in another time namespace."""
RESEND_S = 0.1  # the first wait for an overdue answer; doubles up to RESEND_MAX_S
RESEND_MAX_S = wire.RESEND_MAX_NS / 1e9
BUSY_S = 0.001  # the first wait before calls refused as BUSY are sent again; doubles to BUSY_MAX_S
BUSY_MAX_S = 0.1


class Connection(Destination):
    """A session with the daemon that holds a partition, and the calls for that partition."""

    def __init__(
        self,
        route: Route,
        number: int,
        names: Names,
        session: Session,
        *,
        open_channel: OpenChannel,
        remote: Remote | None = None,
        numa_local: bool = False,
    ) -> None:
        super().__init__(route.host, names)
        self.number = number
        """Number of the partition."""
        self.session = session
        session.same_clock = remote is None
        if remote is not None:
            self.delay_clock = ClockKind.VIRTUAL
        self.direct: Direct | None = None
        """Makes single calls of callers while the engine is idle; the engine sets it."""
        self.planned: set[Pending] = set()
        """Calls that a job packs once the queue has space."""
        self.channel: AnyChannel | None = None
        self.endpoint = ""
        self.blocked = False
        """True if the socket could not accept a message."""
        self.news = False
        """True from the time a socket of the channel becomes readable until look() has read it."""
        self._unread: bytes | None = None
        """A message that a direct call has received and left to the engine."""
        self.answers = 0
        """Number of messages that showed progress. Each of them extends the waits for answers."""
        self.breaker: Breaker | None = None
        """Breaker of the shard; None if the daemon has no shards."""
        self._route = route
        self._open_channel = open_channel
        self._remote = remote
        self._numa_local = numa_local
        self._resend_s = RESEND_S
        self.resend_at_s = NEVER_S
        """Host time at which unanswered messages are sent again."""
        self._busy_s = BUSY_S
        self._retry_at_s = NEVER_S
        self._retried = 0

    # ---- open and close ----------------------------------------------------------------------

    def open(self) -> None:
        """Open the channel, unless it is open. Raises the errors of Route.find."""
        if self.channel is None:
            self.endpoint = self._find()
            self.channel = self._open_channel(self.endpoint, self._remote)
            self.news = True

    def _find(self) -> str:
        if self._remote is not None:
            return self._remote.place.commands
        paths, self.breaker = self._route.find(self.number)
        return paths.cmd_endpoint

    def admit(self) -> None:
        """Admit a call whose arguments have been checked.

        Raises ShardUnavailable if the shard has not answered the last calls. Even then one call
        at a time is admitted as a probe, after a pause (see Breaker).
        """
        if self.breaker is not None:
            self.breaker.check()

    def _follow(self) -> None:
        """Redirect the channel if another daemon holds the partition. That happens when the number
        of shards changes, and when a daemon becomes a deployment."""
        if self.channel is None or self._remote is not None:
            return
        with suppress(DaemonError, TableBroken, PermissionDenied):
            endpoint = self._find()
            if endpoint != self.endpoint:
                self.endpoint = endpoint
                self.channel.redirect(endpoint)
                self.session.moved()

    def close(self) -> None:
        """Close the channel. Calls in flight get no answer."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    # ---- time --------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """ClockKind of the daemon, from its last welcome."""
        return self.session.welcome.clock_kind if self.session.welcome else ClockKind.BOOT

    @property
    def daemon(self) -> bytes:
        """The uuid of the daemon's arena, from its last welcome."""
        return self.session.welcome.uuid if self.session.welcome else b""

    @property
    def redial_at_s(self) -> float:
        """Host time at which look() has to be called to connect again."""
        return NEVER_S if self.channel is None else self.channel.redial_at_s

    # ---- calls -------------------------------------------------------------------------------

    def entry(
        self, pending: AnyPending, name: bytes, method: Callable[..., None], fields: tuple[Any, ...]
    ) -> Entry[AnyPending]:
        """Return the entry of a call of this connection."""
        pending.connection = self
        return super().entry(pending, name, method, fields)

    def lend(self) -> bool:
        """Let direct calls use the channel until take_back(), if nothing is in flight. Returns
        whether they may."""
        addresses = None if self.channel is None else self.channel.addresses
        terms = self.session.direct()
        breaks = self.breaker is not None and self.breaker.failures > 0
        packer = self.packer
        if addresses is None or terms is None or breaks:
            return False
        if packer.at_ns is not None or not packer.empty:
            return False
        assert self.direct is not None
        delays = self.delay_clock == ClockKind.VIRTUAL
        self.direct.lend(*addresses, *terms, self.session.same_clock, delays)
        return True

    def take_back(self) -> None:
        """Wait until no direct call runs. Calls and lots without an answer go on as batches in
        flight. The lot that callers fill is collected."""
        if self.direct is None or (taken := self.direct.take_back()) is None:
            return
        sequence, unanswered, lot, self._unread = taken
        self.news |= self._unread is not None
        batches = [self.packer.adopt(call, message) for call, message in unanswered]
        self.session.note_direct(sequence, batches)
        if lot is not None:
            self.packer.collect(lot)

    def call(self, entry: Entry[Any], limit_s: float) -> bool:
        """Make a direct call. Returns whether it has its outcome. If not, the engine has to send
        it, or waits for its answer."""
        if self.direct is None or entry.method is not Builder.record:
            return False
        return self.direct.record(entry.pending, limit_s, entry.name, *entry.fields) is True

    def abandon(self, calls: Iterable[object]) -> bool:
        """Stop resending the calls that the daemon refused as BUSY; BUSY becomes their answer.
        Returns False if no call was refused."""
        return self.session.abandon(frozenset(calls)) > 0

    def withdraw(self, call: Pending, error: DaemonError) -> None:
        """Take back `call` if it is alone in its batch and was never sent; `error` becomes its
        outcome."""
        batch = self.session.unsent(call)
        if batch is not None and self.session.withdraw(batch):
            batch.settle(error)

    # ---- the exchange ------------------------------------------------------------------------

    def expects(self, *, greets: bool) -> bool:
        """True while an answer may come or a message must be sent. Without `greets` a HELLO is
        ignored: a client that neither calls nor listens opens no new session."""
        session = self.session
        if session.state is State.GREETING and greets:
            return True
        return bool(
            self.blocked or session.busy or session.sends or session.leaving
            or not self.packer.empty
        )  # fmt: skip

    def look(self) -> None:
        """Receive all messages. After a reconnect, queue all unanswered messages again."""
        if self.channel is not None and self.channel.reconnected():
            self.session.resend()
        elif self.channel is not None and not self.channel.connected:
            self._follow()
        self._pull()
        self.news = False

    def ask_again(self) -> None:
        """Resend messages whose answers are overdue. The next wait for an answer is longer."""
        if self.host.monotonic_s() >= self.resend_at_s:
            self._resend_s = min(2 * self._resend_s, RESEND_MAX_S)
            self.resend_at_s = NEVER_S
            self._follow()
            self.session.resend()

    def exchange(self) -> bool:
        """Send all messages that may be sent, and receive all messages. Returns whether one came.
        The last operation on the socket is a receive that finds no message, because the descriptor
        of a ZeroMQ socket becomes readable only when the state of the socket changes."""
        self.packer.seal()
        self.blocked = self._push()
        return self._pull()

    def expect(self, *, answer: bool) -> None:
        """Set the time at which unanswered messages are sent again, unless it is set; without
        `answer`, clear the time. Each message of the daemon clears it as well."""
        if not answer or self.channel is None:
            self.resend_at_s = NEVER_S
        elif self.resend_at_s == NEVER_S:
            self.resend_at_s = self.host.monotonic_s() + self._resend_s

    def _push(self) -> bool:
        """Send all messages that may be sent. Returns True if the socket could not accept one."""
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
        """Resend calls that were refused as BUSY once their waiting time has passed."""
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
        """Host time at which calls refused as BUSY are sent again; NEVER_S without such calls."""
        return self._retry_at_s if self.session.retries.waiting else NEVER_S

    def _pull(self) -> bool:
        """Receive all messages. Returns whether one came."""
        came = False
        while (data := self._receive()) is not None:
            self.take(data)
            came = True
        return came

    def _receive(self) -> bytes | None:
        if (data := self._unread) is not None:
            self._unread = None
        elif self.channel is not None:
            data = self.channel.receive()
        return data

    def take(self, data: bytes) -> None:
        """Hand one message to the session. Raises ProtocolError."""
        self.resend_at_s, self._resend_s = NEVER_S, RESEND_S
        session = self.session
        before = session.welcome
        session.receive(data)
        if session.welcome is not before:
            self._welcomed()
        if session.refusal is None and session.astray is None and not session.fruitless:
            self.answers += 1  # repeated refusals do not count as progress
            if self.breaker is not None:
                self.breaker.answered()

    def _welcomed(self) -> None:
        welcome = self.session.welcome
        assert welcome is not None
        apart = not 0 <= self.host.boot_ns() - welcome.real_boot_ns < APART_NS
        same_clock = self.session.same_clock = self._remote is None and not apart
        self.delay_clock = self.clock if same_clock else ClockKind.VIRTUAL
        if self._numa_local:
            self._numa_local = False
            pin_numa_local(kernel_number(welcome.node), kernel_number(welcome.reaper_cpu))
        self.packer.shut()  # a lot has one clock

    @property
    def full(self) -> MessageRefused | None:
        """The daemon's refusal of our session, if the daemon's session table is full or this uid
        has too many sessions; else None."""
        refusal = self.session.refusal
        return refusal if isinstance(refusal, (SessionTableFull, UidShareExceeded)) else None

    def give_up(self) -> None:
        """Raise the refusal `full` if there is one. The next call asks for a session again."""
        if (refusal := self.full) is not None:
            self.session.refusal = None
            self.session.resend()
            raise refusal

    def overdue(self, subject: str, waited_s: float) -> DaemonError:
        """Note in the breaker that a call got no answer within `waited_s` seconds, and return the
        call's error."""
        in_doubt = self.session.in_doubt()
        if self.breaker is not None:
            self.breaker.failed()
            self.packer.shut()  # the next call must ask the breaker
        if refusal := self.session.refusal or self.session.astray:
            return refusal
        greeting = self.session.state is State.GREETING
        if greeting or self.channel is None or not self.channel.connected:
            name = self._route.name
            barred = shut(name) if self._remote is None else ""
            return DaemonUnreachable(name, self.endpoint, waited_s, in_doubt, barred)
        return CallTimeout(subject, waited_s, in_doubt, self.session.retries.waiting)
