"""The command socket's order: whose message is served next, and where answers go.

A message whose bounded work is used up goes on in the next iteration. So does what comes from a uid
that has had its share of this one, through however many connections: others wait for one share
of it, not for each of its messages. Meanwhile others are served, but not the same peer's: his
messages stay in order. Outcomes and CHECKs are pushed to the peer from which a session sent
last.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from purgatoryd.daemon.client_watch import ClientWatch
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.transport import REQUEST_HWM, Message, Transport
from purgatoryd.daemon.pending_acks import PendingAcks
from purgatoryd.daemon.processes import Processes
from purgatoryd.daemon.wal import Memory
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Arena, Handled
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.layout import Measured, WireError
from purgatoryd.shm_layout.layout import Message as Kind

PER_ITERATION = 16
"""Messages that are served as they come."""
TAKEN_PER_ITERATION = 64
"""Messages that are taken from the socket: those of uids that had their share only wait."""
SHARE_NS = 500_000
"""Of an iteration, for each uid; what has begun is never cut short."""
SHARED_NS = 60_000_000_000
"""So long after requests of two uids there are shares at all."""
PUSHES_PER_ITERATION = 8
BEHIND_MAX = 1024
"""Messages of one peer that wait for its unfinished one."""
WAITING_BYTES_MAX = 32 * 2**20
"""Of all that wait: what has not begun is dropped if there are more. Its sender, who gets no
answer, sends it again."""
OVERHEAD_BYTES = 2048
"""What a message takes besides its own bytes."""
NOTIFIED_BYTES_MAX = 16 * 2**20
"""What may be under way to an owner that is silent; more is sent again later."""
ROW = 0xFFFF  # of a session's id
_SESSION = slice(8, 16)  # of a struct pg_frame
_KIND = slice(6, 8)
_BYE = Kind.BYE.to_bytes(2, "little")
_ERROR = slice(30, 32)
_NO_ERROR = b"\0\0"
_EXPIRED = WireError.SESSION_EXPIRED.to_bytes(2, "little")
_NO_SESSION = frozenset(
    error.to_bytes(2, "little") for error in (WireError.SESSIONS_FULL, WireError.QUOTA)
)


@dataclass(slots=True)
class _Owner:
    """The peer from which a session sent last, and what was sent there since."""

    session: int
    route: bytes
    notified_bytes: int = 0


def _denied(message: Message) -> bytes:
    """What a sender who may not connect is answered, to whatever he sent."""
    known = len(message.body) >= wire.FRAME.size
    kind, session, sequence = wire.FRAME.unpack_from(message.body)[2:5] if known else (0, 0, 0)
    return wire.encode_frame(
        kind, session, sequence, error=WireError.DENIED, detail=(message.uid, 0)
    )


def _size(message: Message) -> int:
    return len(message.body) + OVERHEAD_BYTES


class Commands:
    """Feeds the command socket's messages to the arena, bounded in every iteration."""

    def __init__(
        self,
        arena: Arena,
        transport: Transport,
        access: Access,
        wal: Memory,
        grace_ns: int,
        host: Host,
        processes: Processes,
    ) -> None:
        """`grace_ns` is Config.session_grace_ns."""
        self._arena = arena
        self._access = access
        self._host = host
        self._socket = transport.commands
        self._peers = transport.peers
        self._wal = wal
        self._pending_acks = PendingAcks(self._send)
        self._unfinished: deque[Message] = deque()
        self._behind: dict[bytes, deque[Message]] = {}  # route -> what came after it
        self._waiting_bytes = 0
        """Of the unfinished, and of what is behind them."""
        self._spent_ns: Counter[int] = Counter()
        """What each uid has had of this iteration."""
        self._last_uid: int | None = None
        self._shared_until_ns = 0
        self._shared = False
        self._deferred: Message | None = None
        self._unread: set[int] = set()
        """Connections whose bytes of before note_wakeup() libzmq may not have read."""
        self._taken_of: Counter[bytes] | None = None
        """Messages taken from each peer since libzmq has them; None = all were taken."""
        self._dropped = False
        self._owners: dict[int, _Owner] = {}  # by row, as many as the arena has
        self.clients = ClientWatch(
            arena, transport.peers, processes, grace_ns, host.boot_ns(), self._left
        )

    def serve(self) -> bool:
        """One iteration. True = there is more to do at once."""
        self._spent_ns.clear()
        self._shared = self._host.boot_ns() < self._shared_until_ns
        self._serve_unfinished()
        served = 0
        for _ in range(TAKEN_PER_ITERATION):
            if self._deferred is not None or served == PER_ITERATION:
                return True
            if self.full:
                return bool(self._unfinished)
            message = self._socket.receive()
            if message is None:
                self._taken_of = None
                return bool(self._unfinished)
            if self._taken_of is not None:
                self._count_taken(message.route)
            if message.route in self._behind:
                self._wait_behind(message)
            elif not self._had_its_share(message.uid):
                self._apply(message)
                served += 1
            elif self._has_space(message):
                self._wait(message)
            else:
                self._dropped = True
        return True

    def note_wakeup(self) -> None:
        """Note that messages may wait since an outage."""
        self._unread, self._taken_of, self._dropped = self._peers.connected, None, False

    def caught_up(self) -> bool:
        """Look whether all messages that waited at note_wakeup() have been applied."""
        if self._unread:
            self._unread = self._peers.unread(self._unread)
            if not self._unread:
                self._taken_of = Counter()
            return False
        return self._taken_of is None and not (self._waiting_bytes or self._dropped)

    def _count_taken(self, route: bytes) -> None:
        """Note a message from a peer. The socket takes turns among its peers, and has at most
        REQUEST_HWM messages of each."""
        assert self._taken_of is not None
        self._taken_of[route] += 1
        if self._taken_of[route] > REQUEST_HWM:
            self._taken_of = None

    def _serve_unfinished(self) -> None:
        """Those that need yet another iteration come behind all others."""
        waiting, self._unfinished = self._unfinished, deque()
        retained: deque[Message] = deque()
        for message in waiting:
            if self._deferred is not None or self._had_its_share(message.uid):
                retained.append(message)
            else:
                self._waiting_bytes -= _size(message)
                self._go_on(message)
        self._unfinished.extendleft(reversed(retained))

    def _had_its_share(self, uid: int) -> bool:
        return self._shared and self._spent_ns[uid] >= SHARE_NS

    def _note_cost(self, uid: int, begun_boot_ns: int) -> None:
        ended_boot_ns = self._host.boot_ns()
        self._spent_ns[uid] += ended_boot_ns - begun_boot_ns
        if uid != self._last_uid:
            if self._last_uid is not None:
                self._shared_until_ns = ended_boot_ns + SHARED_NS
            self._last_uid = uid

    def _wait(self, message: Message) -> None:
        """Until the next iteration, and whatever comes from the same peer behind it."""
        self._unfinished.append(message)
        self._behind.setdefault(message.route, deque())
        self._waiting_bytes += _size(message)

    def _wait_behind(self, message: Message) -> None:
        behind = self._behind[message.route]
        if len(behind) < BEHIND_MAX and self._has_space(message):
            self._waiting_bytes += _size(message)
            behind.append(message)
        else:
            self._dropped = True

    def _has_space(self, message: Message) -> bool:
        return self._waiting_bytes + _size(message) <= WAITING_BYTES_MAX

    def _next_behind(self, behind: deque[Message]) -> Message:
        message = behind.popleft()
        self._waiting_bytes -= _size(message)
        return message

    @property
    def waits_for_ns(self) -> int | None:
        """The virtual time that the message at the head wants to be applied at."""
        return self._arena.wait_ns if self._deferred is not None else None

    def arrived(self) -> None:
        """The virtual clock is where the deferred message wants it."""
        if self._deferred is not None:
            message, self._deferred = self._deferred, None
            self._behind.setdefault(message.route, deque())
            self._go_on(message)

    def _apply(self, message: Message) -> bool:
        """True when the message is done with."""
        if not self._access.may_connect(message.uid, message.gid):
            self._socket.send(message.route, _denied(message))
            return True
        begun_boot_ns = self._host.boot_ns()
        state, reply = self._arena.handle(
            message.body, message.uid, message.pid, message.received_boot_ns, begun_boot_ns
        )
        if state == Handled.REPLY and bytes(reply[_ERROR]) in _NO_SESSION:
            # a client may have ended meanwhile
            self.clients.serve(begun_boot_ns)
            state, reply = self._arena.handle(
                message.body, message.uid, message.pid, message.received_boot_ns, begun_boot_ns
            )
        ended_boot_ns = self._host.boot_ns()
        self._arena.served(ended_boot_ns)
        if state == Handled.REPLY:
            self._answer(message, reply, ended_boot_ns)
            self._received(message, reply)
        elif state == Handled.SILENT:
            self._received(message, message.body)
        elif state == Handled.WAIT:
            self._deferred = message
        else:  # AGAIN
            self._wait(message)
        self._note_cost(message.uid, begun_boot_ns)
        return state != Handled.AGAIN

    def _answer(self, message: Message, reply: memoryview, built_boot_ns: int) -> None:
        lsn = self._arena.durable_lsn
        if bytes(reply[_ERROR]) == _EXPIRED:  # it must not overtake answers of that session
            lsn = self._pending_acks.newest_lsn(message.route)
        if lsn > self._wal.committed_lsn:
            self._pending_acks.hold(lsn, message.route, reply, built_boot_ns)
        else:
            self._send(message.route, reply, built_boot_ns)

    def _send(self, route: bytes, reply: Any, built_boot_ns: int) -> None:
        """Hands over an answer that was there at `built_boot_ns`."""
        begun_boot_ns = self._host.boot_ns()
        if not self._socket.send(route, reply):
            return
        handed_boot_ns = self._host.boot_ns()
        self._arena.measure(Measured.RESPONSE_QUEUE, begun_boot_ns - built_boot_ns)
        self._arena.measure(Measured.SEND, handed_boot_ns - begun_boot_ns)
        self._wal.replied(reply, built_boot_ns, handed_boot_ns)

    @property
    def full(self) -> bool:
        """True while so many answers wait for the WAL that no message is taken on."""
        return self._pending_acks.full

    def release(self) -> None:
        """Sends the answers whose records are on disk; with the WAL stopped, none will be."""
        committed_lsn, errno = self._wal.committed_lsn, self._wal.errno
        self._pending_acks.release(committed_lsn)
        if errno:
            self._pending_acks.refuse(committed_lsn, errno)

    def _go_on(self, message: Message) -> None:
        """Applies a message, and those behind it. If one is deferred, arrived() goes on there."""
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

    # ---- inboxes ----

    def _received(self, message: Message, frame: Any) -> None:
        """A session that sends from a new place receives there what it did not take."""
        if frame[_ERROR] != _NO_ERROR:
            return
        session = int.from_bytes(frame[_SESSION], "little")
        owner = self._owners.get(session & ROW)
        if frame[_KIND] == _BYE:
            self.forget(session)
        elif owner is not None and owner.session == session and owner.route == message.route:
            owner.notified_bytes = 0
        elif session != 0:
            self._owners[session & ROW] = _Owner(session, message.route)
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
            self._arena.inbox_away(session)

    def push(self) -> bool:
        """Hands outcomes and CHECKs to the socket. True = there are more."""
        for _ in range(PUSHES_PER_ITERATION):
            session, body = self._arena.inbox()
            if session == 0:
                return False
            self._tell(session, body)
        return True

    def _tell(self, session: int, body: memoryview) -> None:
        built_boot_ns = self._host.boot_ns()
        if self._taken(session, body):
            self._arena.notified(built_boot_ns, self._host.boot_ns())
        else:
            self._arena.untaken()

    def _taken(self, session: int, body: memoryview) -> bool:
        """Sends it to a session's owner; False = he is not there, or does not take what he has."""
        owner = self._owners.get(session & ROW)
        if owner is None or owner.session != session:
            self._arena.inbox_away(session)
            return False
        if owner.notified_bytes > NOTIFIED_BYTES_MAX:
            return False
        owner.notified_bytes += len(body)
        return self._socket.send(owner.route, body)
