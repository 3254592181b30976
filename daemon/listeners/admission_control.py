"""Keeps broken and hostile peers from the others: who may connect, and who is cut off.

libzmq takes connections and bytes in a thread of its own and has no limit for a message whose
parts never end. So every connection is known here, by its descriptor, and with its peer as the
kernel says. While bytes come in, admission control looks around every LOOK_NS; while none do, it
sleeps. What a look does once the process has grown by ALARM_BYTES:

    bytes kept coming, no message was ever whole    cut off, and the peer refused for a while
    bytes lie untaken at a peer, always as many     cut off: it does not read

Past SHED_BYTES it also cuts off those whose messages only wait for their turn. Who is cut off
loses nothing that sessions and the replay buffer do not give back.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import select
import socket
import struct
import termios
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import zmq

from purgatoryd.daemon.allowance import Allowance
from purgatoryd.daemon.listeners.acl import Listeners
from purgatoryd.daemon.listeners.transport import Identity, Peer
from purgatoryd.daemon.log import log

MIB = 2**20
MS = 1_000_000
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
FOREVER_NS = 2**63 - 1

LOOK_NS = 20 * MS
STRIKES = 4
"""Looks: so long may one message take to arrive while memory is short."""
ALARM_BYTES = 64 * MIB
SHED_BYTES = 192 * MIB
REFUSED_NS = 60_000 * MS
"""After the first offence; twice as long after each one more, up to REFUSED_MAX_NS."""
REFUSED_MAX_NS = 3600_000 * MS
TRIM_NS = 1_000 * MS
UNREAD_MAX = 8 * MIB
"""What the kernel may hold for us; more is left to libzmq."""
PEERS_PER_LOOK = 256
EVENTS_PER_ITERATION = 32
"""Of one socket: who came and went in between costs no more than its news."""
CONNECTIONS_PER_UID = 1024
"""At most, and at most an eighth of the descriptors that the process may have."""
CONNECTS_PER_S = 64
"""New connections of one uid, beyond as many at once as it may have at all."""
STEP = 0.5
"""What counts of a connection when it came, and when its handshake is through: who floods us may
leave out the second, or be gone before we look at the first."""
PAUSE_NS = 1_000 * MS
"""How long who made too many may make no more."""
SUBJECTS_PER_UID = 8192
"""Prefixes that only subscribers of one uid asked for: the socket keeps each of them."""
SUBSCRIBES_PER_S = 1024
"""New prefixes of one uid, beyond as many at once as it may have at all."""

_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
_EVENT = struct.Struct("=Hi")
_NUMBER = struct.Struct("=i")
_libc = ctypes.CDLL(None)
_dropped = bytearray(MIB)
_LISTENING = int(zmq.Event.LISTENING)
_ACCEPTED, _DISCONNECTED = int(zmq.Event.ACCEPTED), int(zmq.Event.DISCONNECTED)
_PASS_RIGHTS = 83  # SO_PASSRIGHTS, which Python does not name; since Linux 6.16
_POLLIN = int(zmq.POLLIN)
_NO_UID = 2**32 - 1
_IPC = "localhost:"
"""How libzmq begins the address of an ipc peer; uid, gid and pid follow."""


@dataclass(slots=True)
class Refusal:
    """Until when a peer may not connect, and how long that was from its last offence on."""

    until_ns: int = 0
    span_ns: int = REFUSED_NS // 2


class AdmissionControl:
    """All connections of the daemon's sockets. Used by the loop's thread; nothing blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], paths: Iterable[Path] = ()) -> None:
        """`paths`: of the sockets, to have the kernel keep out who is refused."""
        self._context = context
        self._listeners = Listeners(paths)
        self._trusted = {0, os.geteuid()}
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_per_uid = min(CONNECTIONS_PER_UID, descriptors // 8)
        self._most = descriptors // 2
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._peers: dict[int, Peer] = {}
        self._connections: Counter[Identity] = Counter()
        self._refused: dict[Identity, Refusal] = {}
        self._connects: dict[Identity, Allowance] = {}
        self._subscribes: dict[Identity, Allowance] = {}
        self._subjects: dict[bytes, Identity] = {}
        self._subjects_of: Counter[Identity] = Counter()
        self._flow = select.epoll()
        self._flowed: set[int] = set()
        self._round: list[int] = []
        self.fds = {self._flow.fileno()}
        """Descriptors to wait on."""
        self.on_closed: Callable[[Peer], object] = lambda _: None
        """Called with each closed connection."""
        self._now_ns = self._look_ns = self._trim_ns = self._tell_ns = 0
        self._pardon_ns = FOREVER_NS
        """When the first of those who are refused may connect again."""
        self.due_ns = FOREVER_NS
        """When iterate() wants to be called though no descriptor is ready."""
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._base_bytes = self._own_bytes()

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Learns of the socket's connections; to be called before it is bound, and iterate() before
        others may connect."""
        endpoint = f"inproc://monitor-{len(self._sockets)}"
        socket.monitor(endpoint, _LISTENING | _ACCEPTED | _DISCONNECTED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.set(zmq.LINGER, 0)
        monitor.set(zmq.RCVHWM, 0)  # a full one would make libzmq's thread wait
        monitor.connect(endpoint)
        self._sockets.append(socket)
        self._monitors.append(monitor)
        self.fds.add(int(monitor.get(zmq.FD)))

    def rebound(self) -> None:
        """Note that a socket is bound to its path again."""
        self.iterate(self._now_ns)
        self._listeners.renew()

    def close(self) -> None:
        """Stops watching."""
        for watched, monitor in zip(self._sockets, self._monitors, strict=True):
            watched.disable_monitor()
            monitor.close(0)
        self._flow.close()
        os.close(self._statm)

    # ---- an iteration --------------------------------------------------------------------------

    def iterate(self, now_ns: int) -> bool:
        """Takes some of what there is to know at `now_ns`, CLOCK_BOOTTIME.

        True = there is more, which must not pile up: libzmq ends the process if it has no
        descriptor left to accept with.
        """
        self._now_ns = now_ns
        more = [
            self._receive(socket_index, monitor)
            for socket_index, monitor in enumerate(self._monitors)
        ]
        self._note_flow()
        if now_ns >= self._look_ns:
            self._look()
        if now_ns >= self._pardon_ns:
            self._shut_listeners()
        return any(more)

    def _receive(self, socket_index: int, monitor: zmq.Socket[bytes]) -> bool:
        if not int(monitor.get(zmq.EVENTS)) & _POLLIN:
            return False
        came: set[int] = set()
        count = 0
        for event, fd in islice(_news(monitor), EVENTS_PER_ITERATION):
            count += 1
            if event == _ACCEPTED:
                came.add(fd)
            elif event == _LISTENING:
                _take_no_descriptors(fd)
            else:
                came.discard(fd)
                self._left(socket_index, fd)
        for fd in came:
            self._accepted(socket_index, fd)
        return count == EVENTS_PER_ITERATION

    # ---- connections ---------------------------------------------------------------------

    def _accepted(self, socket_index: int, fd: int) -> None:
        if fd in self._peers:  # another socket's event comes later than this one's
            self._forget(fd)
        with suppress(OSError), borrowed(fd) as connection:
            identity = _identity_of(connection)
            peer = self._peers[fd] = Peer(socket_index, identity, peer_pid(connection))
            self._connections[peer.identity] += 1
            self._flow.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
            if not self._may_stay(peer.identity):
                _end(connection)

    def _left(self, socket_index: int, fd: int) -> None:
        peer = self._peers.get(fd)
        if peer is not None and peer.socket_index == socket_index:
            self._forget(fd)

    def _may_stay(self, identity: Identity) -> bool:
        if self._too_many(identity):
            self._pause(identity)
            return False
        return self.admits(identity) if isinstance(identity, int) else not self.refuses(identity)

    def _too_many(self, identity: Identity) -> bool:
        crowded = len(self._peers) > self._most and identity not in self._trusted
        return crowded or self._connections[identity] > self._most_per_uid

    def _forget(self, fd: int) -> None:
        peer = self._peers.pop(fd)
        identity = peer.identity
        self.on_closed(peer)
        self._connections[identity] -= 1
        if self._connections[identity] == 0:
            del self._connections[identity]

    def refuses(self, identity: Identity) -> bool:
        """True while nobody of that uid, or from that address, may connect."""
        refusal = self._refused.get(identity)
        return refusal is not None and refusal.until_ns > self._now_ns

    def admits(self, uid: int) -> bool:
        """Asked for each connection when it came, and again at its handshake."""
        if uid in self._trusted:
            return True
        if self.refuses(uid):
            return False
        allowed = self._allowed(uid)
        if not allowed:
            self._pause(uid)
        return allowed

    def _allowed(self, uid: int) -> bool:
        most, now_ns = self._most_per_uid, self._now_ns
        allowance = self._connects.setdefault(uid, Allowance(most, now_ns))
        return allowance.take(STEP, now_ns, most, CONNECTS_PER_S)

    def _pause(self, identity: Identity) -> None:
        if identity not in self._trusted and not self.refuses(identity):
            self._keep_out(identity, PAUSE_NS)
            self._tell(identity, "too many connections")

    def end_remote(self) -> None:
        """Ends all connections through tcp; who still may connects again."""
        for fd, peer in self._peers.items():
            if isinstance(peer.identity, str):
                with suppress(OSError), borrowed(fd) as connection:
                    _end(connection)

    # ---- what peers do -------------------------------------------------------------------

    def completed(self, frame: zmq.Frame) -> int:
        """Note a complete message with the part `frame`; return its connection's descriptor."""
        fd = _descriptor(frame)
        peer = self._peers.get(fd)
        if peer is not None:
            peer.strikes = 0
        return fd

    def peer(self, fd: int) -> Peer | None:
        """Return the connection of a descriptor; None if it is unknown."""
        return self._peers.get(fd)

    @property
    def connected(self) -> set[int]:
        """Descriptors of all connections."""
        return set(self._peers)

    def unread(self, fds: Set[int]) -> set[int]:
        """Those of `fds` that have bytes which libzmq has not read."""
        return {fd for fd in fds & self._peers.keys() if _pending(fd, termios.FIONREAD)}

    def offence(self, frame: zmq.Frame, detail: str) -> None:
        """Cuts off whoever sent `frame`, and refuses it for a while.

        By now its descriptor may be another's, and one that is not known yet finds itself refused
        once it is.
        """
        fd, identity = _descriptor(frame), _sender(frame)
        peer = self._peers.get(fd)
        if peer is not None and peer.identity == identity:
            self._cut_off(fd, detail, refuse=True)
        elif identity not in self._trusted and not self.refuses(identity):
            self._refuse(identity)
            self._tell(identity, detail)

    def subscribed(self, frame: zmq.Frame) -> None:
        """Takes a message of the XPUB socket: 1 or 0, and a prefix that is new or gone."""
        report = frame.bytes
        subject = report[1:]
        if report[:1] not in (b"\0", b"\1"):
            self.offence(frame, "a message where only subscriptions belong")
        elif report[:1] == b"\1" and subject not in self._subjects:
            identity = self._subjects[subject] = _sender(frame)
            self._subjects_of[identity] += 1
            if self._subjects_of[identity] > SUBJECTS_PER_UID or not self._may_subscribe(identity):
                self.offence(frame, "too many subscriptions")
        elif report[:1] == b"\0" and subject in self._subjects:
            self._subjects_of[self._subjects.pop(subject)] -= 1

    def _may_subscribe(self, identity: Identity) -> bool:
        most, now_ns = SUBJECTS_PER_UID, self._now_ns
        allowance = self._subscribes.setdefault(identity, Allowance(most, now_ns))
        return allowance.take(1, now_ns, most, SUBSCRIBES_PER_S)

    def _cut_off(self, fd: int, detail: str, *, refuse: bool) -> None:
        peer = self._peers.get(fd)
        if peer is None or peer.gone:
            return
        peer.gone = True
        if refuse and peer.identity not in self._trusted:
            self._refuse(peer.identity)
        with suppress(OSError), borrowed(fd) as connection:
            _end(connection)
        self._tell(peer.identity, detail)

    def _tell(self, identity: Identity, detail: str) -> None:
        if self._now_ns >= self._tell_ns:
            self._tell_ns = self._now_ns + LOOK_NS
            log.warning(f"cut off a connection of {_named(identity)}: {detail}", peer=identity)

    def _refuse(self, identity: Identity) -> None:
        refusal = self._refused.setdefault(identity, Refusal())
        refusal.span_ns = min(2 * refusal.span_ns, REFUSED_MAX_NS)
        self._keep_out(identity, refusal.span_ns)

    def _keep_out(self, identity: Identity, span_ns: int) -> None:
        self._refused.setdefault(identity, Refusal()).until_ns = self._now_ns + span_ns
        self._shut_listeners()

    def _shut_listeners(self) -> None:
        """The kernel keeps out who is refused now, and nobody else."""
        until = {
            identity: r.until_ns for identity, r in self._refused.items() if self.refuses(identity)
        }
        self._pardon_ns = min(until.values(), default=FOREVER_NS)
        self._listeners.shut_to(identity for identity in until if isinstance(identity, int))

    # ---- looks ---------------------------------------------------------------------------

    def _note_flow(self) -> None:
        """Each descriptor tells once that bytes came, and again after the next look."""
        flowing = [fd for fd, _ in self._flow.poll(0, EVENTS_PER_ITERATION) if fd in self._peers]
        if flowing and not self._flowed:
            self.due_ns = self._look_ns = self._now_ns + LOOK_NS
        for fd in flowing:
            self._peers[fd].strikes += 1
        self._flowed.update(flowing)

    def _look(self) -> None:
        self.due_ns = FOREVER_NS
        self._look_ns = self._now_ns + LOOK_NS
        grown_bytes = self._grown_bytes()
        if grown_bytes > ALARM_BYTES:
            self._blame(shed=grown_bytes > SHED_BYTES)
        for fd in self._flowed & self._peers.keys():
            with suppress(OSError):
                self._flow.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)
        self._flowed.clear()

    def _blame(self, *, shed: bool) -> None:
        """Somebody holds the memory. It is nobody's fault while whole messages wait for us."""
        waiting = any(int(socket.get(zmq.EVENTS)) & zmq.POLLIN for socket in self._sockets)
        self._round = self._round or list(self._peers)
        some, self._round = self._round[:PEERS_PER_LOOK], self._round[PEERS_PER_LOOK:]
        peers = [(fd, p) for fd in some if (p := self._peers.get(fd)) and not p.gone]
        endless = [fd for fd, p in peers if p.strikes >= STRIKES and (shed or not waiting)]
        deaf = [fd for fd, p in peers if self._takes_nothing(fd, p, shed)]
        for fd in endless:
            self._cut_off(fd, "a message without end", refuse=not waiting)
        for fd in deaf:
            self._cut_off(fd, "it does not read", refuse=False)
        if not endless and not deaf and self._now_ns >= self._trim_ns:
            self._trim_ns = self._now_ns + TRIM_NS
            _libc.malloc_trim(0)  # what those who are gone have held

    def _takes_nothing(self, fd: int, peer: Peer, shed: bool) -> bool:
        untaken = _pending(fd, termios.TIOCOUTQ)
        same = untaken > 0 and (shed or untaken == peer.untaken)
        peer.stuck = peer.stuck + 1 if same else 0
        peer.untaken = untaken
        return peer.stuck >= STRIKES

    def memory_is_short(self) -> bool:
        """True while the process is so large that somebody is to blame for it."""
        return self._grown_bytes() > ALARM_BYTES

    def _grown_bytes(self) -> int:
        return self._own_bytes() - self._base_bytes

    def _own_bytes(self) -> int:
        """Memory of this process alone: without the arena, and without files."""
        _, resident, shared, *_ = os.pread(self._statm, 64, 0).split()
        return (int(resident) - int(shared)) * PAGE_BYTES


def _news(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """Events and their descriptors, oldest first, until there are none."""
    with suppress(zmq.Again):
        while True:
            event, fd = _EVENT.unpack(monitor.recv(zmq.NOBLOCK))
            monitor.recv()  # the socket's address
            yield event, fd


@contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """libzmq's descriptor as a socket; its family is given, so that nobody asks for it.

    What is done with it raises OSError if it is no connection any more.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
    try:
        yield connection
    finally:
        connection.detach()


def _pending(fd: int, queue: int) -> int:
    """Bytes that wait in a queue of the kernel: FIONREAD or TIOCOUTQ. 0 if it is no connection any
    more."""
    with suppress(OSError):
        return int(_NUMBER.unpack(fcntl.ioctl(fd, queue, bytes(4)))[0])
    return 0


def _take_no_descriptors(fd: int) -> None:
    """Peers cannot pass any: libzmq would drop them, and the last one to close a file waits for it,
    as long as whoever made it pleases."""
    with suppress(OSError), borrowed(fd) as listener:
        listener.setsockopt(socket.SOL_SOCKET, _PASS_RIGHTS, 0)


def _end(connection: socket.socket) -> None:
    """Shuts it down; libzmq finds that out and closes it. What it has not read is dropped."""
    connection.shutdown(socket.SHUT_RDWR)
    for _ in range(UNREAD_MAX // MIB):
        if not connection.recv_into(_dropped, MIB, socket.MSG_DONTWAIT):
            return


def _credentials_of(connection: socket.socket) -> tuple[int, int, int]:
    """Pid, uid, gid."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(credentials)
    return pid, uid, gid


def peer_pid(connection: socket.socket) -> int:
    """Return the pid of the process that connected; 0 = the kernel does not report it."""
    return max(0, _credentials_of(connection)[0])


def _identity_of(connection: socket.socket) -> Identity:
    uid = _credentials_of(connection)[1]
    return str(connection.getpeername()[0]) if uid == _NO_UID else uid


def _sender(frame: zmq.Frame) -> Identity:
    """Who sent `frame`, as libzmq saw it when the connection was made; "" of its own reports."""
    try:
        return _of_address(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return ""


@lru_cache(maxsize=4096)
def _of_address(address: str) -> Identity:
    if address.startswith(_IPC):
        return int(address.split(":")[1])
    return address.partition("%")[0]  # without the interface, as getpeername() tells it


def _named(identity: Identity) -> str:
    return f"uid {identity}" if isinstance(identity, int) else identity


def _descriptor(frame: zmq.Frame) -> int:
    """Of the connection on which `frame` came; -1 of a report that libzmq made itself."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
