"""Schedule client messages fairly.

Each loop iteration gives every uid at most `SHARE_NS` of CPU, however many connections it has. A
message that exceeds its work budget resumes in the next iteration; until then later messages of the
same peer wait behind it, so each peer's messages stay in order. Outcomes and CHECK requests go to
the peer that last spoke for their session.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass
from typing import Any

from purgatoryd.daemon.client_watch import ClientWatch
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.ring_server import Ring
from purgatoryd.daemon.listeners.time_shares import TimeShares
from purgatoryd.daemon.listeners.transport import REQUEST_HWM, Request, Served, Transport
from purgatoryd.daemon.pending_acks import PendingAcks
from purgatoryd.daemon.processes import Processes
from purgatoryd.daemon.schedules import Schedules
from purgatoryd.daemon.wal import NullWal
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Arena, Handled
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.layout import Measured, Message, WireError

PER_ITERATION = 16
"""Maximum number of messages from the socket that one iteration applies."""
TAKEN_PER_ITERATION = 64
"""Maximum number of messages that one iteration takes from the socket. Messages of a uid that has
used up its share wait."""
PUSHES_PER_ITERATION = 8
BEHIND_MAX = 1024
"""Maximum number of messages of one peer that wait behind its unfinished message."""
WAITING_BYTES_MAX = 32 * 2**20
"""Limit on the size of all waiting messages. Above it, messages whose processing has not begun are
dropped; their senders get no answer and send them again."""
OVERHEAD_BYTES = 2048
"""Memory of a waiting message in addition to its own bytes."""
NOTIFIED_BYTES_MAX = 16 * 2**20
"""Limit on the bytes sent to an owner since the owner's last message. The rest is sent later."""
NO_EVENTS: frozenset[int] = frozenset()
ROW = 0xFFFF  # mask of the row number in a session id
_SESSION = slice(8, 16)  # this and the following slices are fields of struct pg_frame
_KIND = slice(6, 8)
_BYE = Message.BYE.to_bytes(2, "little")
_HELLO = Message.HELLO.to_bytes(2, "little")
_REPLAY = wire.encode_frame(Message.REPLAY)[:8]
"""The bytes with which a REPLAY message begins: magic, version and kind."""
_ERROR = slice(30, 32)
_NO_ERROR = b"\0\0"
_EXPIRED = WireError.SESSION_EXPIRED.to_bytes(2, "little")
_NO_SESSION = frozenset(
    error.to_bytes(2, "little") for error in (WireError.SESSIONS_FULL, WireError.QUOTA)
)


@dataclass(slots=True)
class _Owner:
    """The peer that last spoke for a session, and the bytes sent to it since."""

    session: int
    route: Hashable
    notified_bytes: int = 0


def _denied(message: Request) -> bytes:
    """Return the answer to any message of a sender that may not connect."""
    known = len(message.body) >= wire.FRAME.size
    kind, session, sequence = wire.FRAME.unpack_from(message.body)[2:5] if known else (0, 0, 0)
    return wire.encode_frame(
        kind, session, sequence, error=WireError.DENIED, detail=(message.uid, 0)
    )


def _size(message: Request) -> int:
    return len(message.body) + OVERHEAD_BYTES


class Commands:
    """Applies messages of the command socket to the arena, a bounded part in each iteration."""

    def __init__(
        self,
        arena: Arena,
        transport: Transport,
        access: Access,
        wal: NullWal,
        grace_ns: int,
        host: Host,
        processes: Processes,
        schedules: Schedules,
    ) -> None:
        """`grace_ns` is Config.session_grace_ns."""
        self._arena = arena
        self._access = access
        self._host = host
        self._socket = transport.commands
        self._rings = transport.ring_server
        self._peers = transport.peers
        self._wal = wal
        self._schedules = schedules
        self._rings.commit_by(wal.requests)
        self._pending_acks = PendingAcks(self._send)
        self._unfinished: deque[Request] = deque()
        self._behind: dict[Hashable, deque[Request]] = {}
        """Later messages of each peer with an unfinished message, by route."""
        self._waiting_bytes = 0
        """Total size of unfinished messages and of the messages queued behind them."""
        self.shares = TimeShares()
        self._deferred: Request | None = None
        self._unread: set[int] = set()
        """Connections that may have bytes from before note_wakeup() that libzmq has not read, or
        that are in a ring."""
        self._taken_of: Counter[Hashable] | None = None
        """Number of messages taken from each peer of the socket since libzmq has read all bytes
        from before note_wakeup(); None = all messages from before note_wakeup() have been taken."""
        self.start_replay: Callable[[], object] = lambda: None
        """Starts the process that serves past notices, unless it runs."""
        self._dropped = False
        self._owners: dict[int, _Owner] = {}
        """Owners of sessions, by the session's row in the arena."""
        self.clients = ClientWatch(
            arena, transport.peers, processes, grace_ns, host.boot_ns(), self._left
        )

    def serve(self, ready: Set[int] | None = None) -> bool:
        """Serve messages for one iteration. True = the next iteration has to begin at once.

        `ready`: the descriptors that ended the loop's sleep before this iteration; None = there was
        no sleep.
        """
        self.shares.begin(self._host.boot_ns())
        self._serve_unfinished()
        left = PER_ITERATION
        for _ in range(TAKEN_PER_ITERATION):
            if self._deferred is not None or left <= 0:
                return True
            if self.full:
                return bool(self._unfinished)
            served = self._serve_some(left, ready)
            ready = NO_EVENTS  # one look at all descriptors in each iteration
            message = served.request
            left -= served.applied
            if message is not None:
                left -= self._take(message, served)
            elif not served.applied:
                self._taken_of = None
                return bool(self._unfinished)
        return True

    def _serve_some(self, most: int, ready: Set[int] | None) -> Served:
        """Let the transport apply messages."""
        counts = self._taken_of is not None
        served = self._socket.serve(self._arena, self.shares, most, ready, counts)
        self._note_answers()
        return served

    def _note_answers(self) -> None:
        for answered in self._rings.answered():
            self._wal.answered(answered)

    def take_left(self) -> None:
        """Take the message that Arena.wait() has left."""
        served = self._rings.left(self._arena)
        if served.request is not None:
            self._take(served.request, served)

    def _take(self, message: Request, served: Served) -> bool:
        """Apply a message, or let it wait. Return whether it was applied here."""
        if served.how is not None:
            self._go_after(message, served.how, served.reply, served.built_boot_ns)
            return False
        if self._taken_of is not None and not isinstance(message.route, Ring):
            self._count_taken(message.route)
        if message.route in self._behind:
            self._wait_behind(message)
        elif not self._had_its_share(message.uid):
            self._apply(message)
            return True
        elif self._has_space(message):
            self._wait(message)
        else:
            self._dropped = True
        return False

    def note_wakeup(self) -> None:
        """Note that the loop woke up after an outage, so that messages may wait in the sockets."""
        self._unread, self._taken_of, self._dropped = self._peers.connected, None, False

    def caught_up(self) -> bool:
        """Check whether all messages that waited at note_wakeup() have been applied. A
        dropped message counts as not applied."""
        if self._unread:
            self._unread = self._peers.unread(self._unread)
            if not self._unread:
                self._taken_of = Counter()
            return False
        return self._taken_of is None and not (self._waiting_bytes or self._dropped)

    def _count_taken(self, route: Hashable) -> None:
        """Count a message from a peer. The socket takes turns among its peers and stores at most
        REQUEST_HWM messages of each. Once the count of one peer exceeds REQUEST_HWM, each other
        peer was served as often, so no message from before note_wakeup() is left."""
        assert self._taken_of is not None
        self._taken_of[route] += 1
        if self._taken_of[route] > REQUEST_HWM:
            self._taken_of = None

    def _serve_unfinished(self) -> None:
        """Resume unfinished messages. A message that needs another iteration moves to the end of
        the queue."""
        waiting, self._unfinished = self._unfinished, deque()
        retained: deque[Request] = deque()
        for message in waiting:
            if self._deferred is not None or self._had_its_share(message.uid):
                retained.append(message)
            else:
                self._waiting_bytes -= _size(message)
                self._go_on(message)
        self._unfinished.extendleft(reversed(retained))

    def _had_its_share(self, uid: int) -> bool:
        return self.shares.used(uid)

    def _wait(self, message: Request) -> None:
        """Postpone a message to the next iteration. Later messages of its peer wait behind it."""
        self._unfinished.append(message)
        self._hold(message.route)
        self._waiting_bytes += _size(message)

    def _hold(self, route: Hashable) -> None:
        """Let later messages of a peer wait behind its unfinished message."""
        self._behind.setdefault(route, deque())
        self._rings.hold(route, behind=True)

    def _wait_behind(self, message: Request) -> None:
        behind = self._behind[message.route]
        if len(behind) < BEHIND_MAX and self._has_space(message):
            self._waiting_bytes += _size(message)
            behind.append(message)
        else:
            self._dropped = True

    def _has_space(self, message: Request) -> bool:
        return self._waiting_bytes + _size(message) <= WAITING_BYTES_MAX

    def _next_behind(self, behind: deque[Request]) -> Request:
        message = behind.popleft()
        self._waiting_bytes -= _size(message)
        return message

    @property
    def waits_for_ns(self) -> int | None:
        """The virtual time at which the deferred message is to be applied; None = no message is
        deferred."""
        return self._arena.wait_ns if self._deferred is not None else None

    def arrived(self) -> None:
        """Apply the deferred message: the virtual clock has reached its time."""
        if self._deferred is not None:
            message, self._deferred = self._deferred, None
            self._hold(message.route)
            self._go_on(message)

    def _apply(self, message: Request) -> bool:
        """Apply a message. False if it is unfinished."""
        if not self._access.may_connect(message.uid, message.gid):
            self._socket.send(message.route, _denied(message))
            return True
        if message.body[: len(_REPLAY)] == _REPLAY:
            self._start_replay(message)
            return True
        begun_boot_ns = self._host.boot_ns()
        state, reply = self._arena.handle(
            message.body, message.uid, message.pid, message.received_boot_ns, begun_boot_ns
        )
        if state == Handled.AGAIN and self._schedules.answer():
            state, reply = self._arena.handle(
                message.body, message.uid, message.pid, message.received_boot_ns, begun_boot_ns
            )
        if message.body[_KIND] == _HELLO and bytes(reply[_ERROR]) in _NO_SESSION:
            # the client of another session may have ended; then serve() ends that session
            self.clients.serve(begun_boot_ns)
            state, reply = self._arena.handle(
                message.body, message.uid, message.pid, message.received_boot_ns, begun_boot_ns
            )
        ended_boot_ns = self._host.boot_ns()
        self._arena.served(ended_boot_ns)
        self._go_after(message, state, reply, ended_boot_ns)
        self.shares.charge(message.uid, begun_boot_ns, self._host.boot_ns())
        return state != Handled.AGAIN

    def _start_replay(self, message: Request) -> None:
        """Start the process that serves past notices. It answers from a socket of its own."""
        size = len(message.body)
        bad = size != wire.FRAME.size
        if not bad:
            self.start_replay()
        _, session, sequence = wire.FRAME.unpack_from(bytes(message.body).ljust(64))[2:5]
        reply = wire.encode_frame(
            Message.REPLAY, session, sequence, error=WireError.MALFORMED * bad,
            detail=(size, wire.FRAME.size) if bad else (0, 0),
        )  # fmt: skip
        self._socket.send(message.route, reply)

    def _go_after(self, message: Request, state: Handled, reply: Any, built_boot_ns: int) -> None:
        """Do what the core asks for after a message."""
        if state == Handled.REPLY:
            self._answer(message, reply, built_boot_ns)
            self._received(message, reply)
        elif state == Handled.SILENT:
            self._received(message, message.body)
        elif state == Handled.WAIT:
            self._deferred = message
        else:  # AGAIN
            self._wait(message)

    def _answer(self, message: Request, reply: memoryview, built_boot_ns: int) -> None:
        lsn, route = self._arena.durable_lsn, message.route
        before = max(self._rings.newest_lsn(route), self._pending_acks.newest_lsn(route))
        if bytes(reply[_ERROR]) == _EXPIRED:
            lsn = before  # this answer must not overtake the session's pending answers
        # the last commit may allow pending answers that release() has not sent
        if lsn > self._wal.committed_lsn or (lsn and before):
            self._pending_acks.hold(lsn, route, reply, built_boot_ns)
            self._rings.callers_pending(len(self._pending_acks))
        else:
            self._send(route, reply, built_boot_ns)

    def _send(self, route: Hashable, reply: Any, built_boot_ns: int) -> None:
        """Send an answer that was complete at `built_boot_ns`."""
        begun_boot_ns = self._host.boot_ns()
        if not self._socket.send(route, reply):
            return
        handed_boot_ns = self._host.boot_ns()
        self._arena.measure(Measured.RESPONSE_QUEUE, begun_boot_ns - built_boot_ns)
        self._arena.measure(Measured.SEND, handed_boot_ns - begun_boot_ns)
        self._wal.replied(reply, built_boot_ns, handed_boot_ns)

    @property
    def full(self) -> bool:
        """True while so many answers wait for the WAL that no further messages are taken."""
        return self._pending_acks.full

    @property
    def pending(self) -> int:
        """Number of answers that wait for the WAL."""
        return len(self._pending_acks) + self._rings.pending

    def release(self) -> None:
        """Send answers whose records are on disk. If the WAL has stopped, send errors instead of
        the other answers."""
        committed_lsn, errno, pending = self._wal.committed_lsn, self._wal.errno, self.pending
        self._rings.release(self._arena, self._send)  # all others wait for later records
        self._pending_acks.release(committed_lsn)
        if self.pending < pending:
            self._wal.released(pending)
            self._note_answers()
        if errno:
            self._pending_acks.precede(self._rings.take_pending())
            self._pending_acks.refuse(committed_lsn, errno)
        self._rings.callers_pending(len(self._pending_acks))

    def _go_on(self, message: Request) -> None:
        """Apply a message and the messages behind it. If one of them is deferred, arrived()
        continues with that message."""
        if not self._apply(message):
            return
        behind = self._behind[message.route]
        while behind and self._deferred is None and not self._had_its_share(message.uid):
            if not self._apply(self._next_behind(behind)):
                return
        if self._deferred is not None:
            return
        if behind:
            self._wait(self._next_behind(behind))
        else:
            del self._behind[message.route]
            self._rings.hold(message.route, behind=False)

    # ---- inboxes ----

    def _received(self, message: Request, frame: Any) -> None:
        """Note which peer sent a message. If a session sends from a new peer, the core sends that
        peer all unacknowledged outcomes of the session again."""
        if frame[_ERROR] != _NO_ERROR:
            return
        session = int.from_bytes(frame[_SESSION], "little")
        owner = self._owners.get(session & ROW)
        if frame[_KIND] == _BYE:
            self.forget(session)
        elif owner is not None and owner.session == session and owner.route == message.route:
            owner.notified_bytes = 0
        elif session != 0:
            share = self.shares.of(message.uid)  # before disown(), which may drop it
            if owner is not None:
                self._rings.disown(owner.route, owner.session)
            self._owners[session & ROW] = _Owner(session, message.route)
            self._rings.own(message, session, share)
            self.clients.speaks(session, message.pid, message.connection)
            self._arena.inbox_to(session)

    def forget(self, session: int) -> None:
        """Forget a session that has ended."""
        self._left(session)
        self.clients.forget(session)

    def _left(self, session: int) -> None:
        """Stop sending to a session whose connection is closed."""
        owner = self._owners.get(session & ROW)
        if owner is not None and owner.session == session:
            del self._owners[session & ROW]
            self._rings.disown(owner.route, session)
            self._arena.inbox_away(session)

    def push(self) -> bool:
        """Send outcomes, CHECK requests and leased jobs to their owners. True = more are left."""
        for _ in range(PUSHES_PER_ITERATION):
            session, body = self._arena.inbox()
            if session != 0:
                self._notify(session, body)
            elif not self._send_jobs():
                return False
        return True

    def _send_jobs(self) -> bool:
        """Send leased jobs to a member. False: there are none to send."""
        session, body = self._arena.jobs()
        if session != 0 and not self._taken(session, body):
            self._arena.jobs_untaken()
        return session != 0

    def _notify(self, session: int, body: memoryview) -> None:
        built_boot_ns = self._host.boot_ns()
        if self._taken(session, body):
            self._arena.notified(built_boot_ns, self._host.boot_ns())
        else:
            self._arena.untaken()

    def _taken(self, session: int, body: memoryview) -> bool:
        """Send `body` to the session's owner. False if the owner is not connected, or reads too
        slowly."""
        owner = self._owners.get(session & ROW)
        if owner is None or owner.session != session:
            self._arena.inbox_away(session)
            return False
        if self._rings.spoke(owner.route):
            owner.notified_bytes = 0
        if owner.notified_bytes > NOTIFIED_BYTES_MAX:
            return False
        owner.notified_bytes += len(body)
        return self._socket.send(owner.route, body)
