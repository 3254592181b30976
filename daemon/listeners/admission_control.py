"""Admission control: protect clients from broken and hostile peers.

libzmq accepts connections and reads bytes in a thread of its own, and does not limit the number of
parts in a message. So admission control keeps a record of every connection: its descriptor, and the
uid from the kernel. It checks all connections every LOOK_NS while bytes arrive. If the process has
grown by ALARM_BYTES, a check closes these connections:

* connections on which bytes keep arriving, but no message is complete; their peers are also refused
  for a while,
* connections whose peers do not read, that is, the number of bytes that wait for the peer does not
  change.

If the process has grown by more than SHED_BYTES, a check also closes connections whose messages
only wait for their turn. A client whose connection is closed loses nothing: its session and the
replay buffer still have everything.
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
from purgatoryd.shm_layout._core import ffi

MIB = 2**20
MS = 1_000_000
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
FOREVER_NS = 2**63 - 1

LOOK_NS = 20 * MS
STRIKES = 4
"""Number of checks within which a complete message has to arrive while memory is short."""
ALARM_BYTES = 64 * MIB
SHED_BYTES = 192 * MIB
REFUSED_NS = 60_000 * MS
"""Length of the refusal after the first offence. It doubles with each further offence, up to
REFUSED_MAX_NS."""
REFUSED_MAX_NS = 3600_000 * MS
TRIM_NS = 1_000 * MS
UNREAD_MAX = 8 * MIB
"""Maximum number of unread bytes that are dropped when a connection is closed; libzmq reads the
rest."""
PEERS_PER_LOOK = 256
EVENTS_PER_ITERATION = 32
"""Maximum number of events of one socket in one iteration. A connection that opens and closes
within these events causes no further work."""
CONNECTIONS_PER_UID = 1024
"""Maximum number of connections of one uid; an eighth of the process's descriptors if that is
less."""
COMPLETED_MAX = 2**16
"""Number of descriptors for which the core can note complete messages."""
CONNECTS_PER_S = 64
"""Rate limit of new connections of one uid. The burst is the maximum number of connections of a
uid."""
STEP = 0.5
"""Tokens that a connection takes when it opens, and again at its handshake. A peer that floods the
daemon may omit the handshake, or close the connection before the daemon sees it."""
PAUSE_NS = 1_000 * MS
"""Time that a uid with too many connections is refused."""
SUBJECTS_PER_UID = 8192
"""Maximum number of prefixes that one uid was the first to subscribe to. The socket stores each
prefix."""
SUBSCRIBES_PER_S = 1024
"""Rate limit of new prefixes of one uid. The burst is the maximum number of prefixes."""

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
"""Prefix of the address that libzmq gives to an ipc peer; uid, gid and pid follow."""


@dataclass(slots=True)
class Refusal:
    """Boot time until which a peer is refused, and the length of its last refusal."""

    until_ns: int = 0
    span_ns: int = REFUSED_NS // 2


class AdmissionControl:
    """All connections of the daemon's sockets. Only the loop's thread uses it; no method blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], paths: Iterable[Path] = ()) -> None:
        """`paths`: the paths of the sockets, at which the kernel can refuse connections."""
        self._context = context
        self._listeners = Listeners(paths)
        self._trusted = {0, os.geteuid()}
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_per_uid = min(CONNECTIONS_PER_UID, descriptors // 8)
        self._most = descriptors // 2
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._peers: dict[int, Peer] = {}
        self.messages = ffi.new("uint8_t[]", min(descriptors, COMPLETED_MAX))
        """For each descriptor 1 if the core has received a complete message through it since the
        last check."""
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
        """Boot time at which the first refusal ends."""
        self.due_ns = FOREVER_NS
        """Boot time at which iterate() is due although no descriptor is ready."""
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._base_bytes = self._own_bytes()

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Receive the events of a socket's connections. Call this before the socket is bound, and
        iterate() before other users may connect."""
        endpoint = f"inproc://monitor-{len(self._sockets)}"
        socket.monitor(endpoint, _LISTENING | _ACCEPTED | _DISCONNECTED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.set(zmq.LINGER, 0)
        monitor.set(zmq.RCVHWM, 0)  # a full queue would make libzmq's thread wait
        monitor.connect(endpoint)
        self._sockets.append(socket)
        self._monitors.append(monitor)
        self.fds.add(int(monitor.get(zmq.FD)))

    def rebound(self) -> None:
        """Note that a socket is bound to its path again."""
        self.iterate(self._now_ns)
        self._listeners.renew()

    def close(self) -> None:
        """Stop receiving events."""
        for watched, monitor in zip(self._sockets, self._monitors, strict=True):
            watched.disable_monitor()
            monitor.close(0)
        self._flow.close()
        os.close(self._statm)

    # ---- an iteration --------------------------------------------------------------------------

    def iterate(self, now_ns: int) -> bool:
        """Process a bounded number of events at `now_ns`, CLOCK_BOOTTIME. True = more are left.

        Events must not pile up: libzmq aborts the process if no descriptor is left for a new
        connection.
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
                take_no_descriptors(fd)
            else:
                came.discard(fd)
                self._left(socket_index, fd)
        for fd in came:
            self._accepted(socket_index, fd)
        return count == EVENTS_PER_ITERATION

    # ---- connections ---------------------------------------------------------------------

    def _accepted(self, socket_index: int, fd: int) -> None:
        # The descriptor of a closed connection is reused. If that connection was one of another
        # socket, its end is reported later.
        if fd in self._peers:
            self._forget(fd)
        with suppress(OSError), borrowed(fd) as connection:
            identity = _identity_of(connection)
            peer = self._peers[fd] = Peer(socket_index, identity, peer_pid(connection))
            self._strikes(fd, peer)
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
        """True while connections of this uid, or from this address, are refused."""
        refusal = self._refused.get(identity)
        return refusal is not None and refusal.until_ns > self._now_ns

    def admits(self, uid: int) -> bool:
        """Return whether a uid may connect. This is called when a connection opens, and again at
        its handshake."""
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
        """Close all tcp connections. Clients with a valid key connect again."""
        for fd, peer in self._peers.items():
            if isinstance(peer.identity, str):
                with suppress(OSError), borrowed(fd) as connection:
                    _end(connection)

    # ---- what peers do -------------------------------------------------------------------

    def completed(self, frame: zmq.Frame) -> int:
        """Note that a message which contains `frame` is complete. Return the descriptor of its
        connection."""
        fd = _descriptor(frame)
        peer = self._peers.get(fd)
        if peer is not None:
            peer.strikes = 0
        return fd

    def _strikes(self, fd: int, peer: Peer) -> int:
        """Return the number of strikes of a connection: 0 if the core has received a message."""
        if fd < len(self.messages) and self.messages[fd]:
            self.messages[fd] = peer.strikes = 0
        return peer.strikes

    def peer(self, fd: int) -> Peer | None:
        """Return the connection of a descriptor; None if it is unknown."""
        return self._peers.get(fd)

    @property
    def connected(self) -> set[int]:
        """Descriptors of all connections."""
        return set(self._peers)

    def unread(self, fds: Set[int]) -> set[int]:
        """Return the descriptors in `fds` that have bytes which libzmq has not read."""
        return {fd for fd in fds & self._peers.keys() if pending_bytes(fd, termios.FIONREAD)}

    def offence(self, frame: zmq.Frame, detail: str) -> None:
        """Close the connection on which `frame` came, and refuse its peer for a while.

        If the descriptor has been reused since, or the connection is not known yet, no connection
        is closed, but the peer is refused.
        """
        self.offended(_descriptor(frame), _sender(frame), detail)

    def offended(self, fd: int, identity: Identity, detail: str) -> None:
        """Do what offence() does for a connection whose peer is `identity`."""
        peer = self._peers.get(fd)
        if peer is not None and peer.identity == identity:
            self._cut_off(fd, detail, refuse=True)
        elif identity not in self._trusted and not self.refuses(identity):
            self._refuse(identity)
            self._tell(identity, detail)

    def subscribed(self, frame: zmq.Frame) -> None:
        """Process a message from the XPUB socket: byte 1 and a prefix that was added, or byte 0 and
        a prefix that was removed."""
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

    @property
    def subscribed_to(self) -> int:
        """Number of prefixes that some socket is subscribed to."""
        return len(self._subjects)

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
        """Let the kernel refuse exactly the peers that are refused at the moment."""
        until = {
            identity: r.until_ns for identity, r in self._refused.items() if self.refuses(identity)
        }
        self._pardon_ns = min(until.values(), default=FOREVER_NS)
        self._listeners.shut_to(identity for identity in until if isinstance(identity, int))

    # ---- checks --------------------------------------------------------------------------

    def _note_flow(self) -> None:
        """Note on which connections bytes have arrived. Each connection reports this once per
        check."""
        flowing = [fd for fd, _ in self._flow.poll(0, EVENTS_PER_ITERATION) if fd in self._peers]
        if flowing and not self._flowed:
            self.due_ns = self._look_ns = self._now_ns + LOOK_NS
        for fd in flowing:
            peer = self._peers[fd]
            peer.strikes = self._strikes(fd, peer) + 1
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
        """Close connections that use much memory. No peer is refused while complete messages wait
        for the daemon itself."""
        waiting = any(int(socket.get(zmq.EVENTS)) & zmq.POLLIN for socket in self._sockets)
        self._round = self._round or list(self._peers)
        some, self._round = self._round[:PEERS_PER_LOOK], self._round[PEERS_PER_LOOK:]
        peers = [(fd, p) for fd in some if (p := self._peers.get(fd)) and not p.gone]
        endless = [
            fd for fd, p in peers if self._strikes(fd, p) >= STRIKES and (shed or not waiting)
        ]
        deaf = [fd for fd, p in peers if self._takes_nothing(fd, p, shed)]
        for fd in endless:
            self._cut_off(fd, "a message without end", refuse=not waiting)
        for fd in deaf:
            self._cut_off(fd, "the peer does not read", refuse=False)
        if not endless and not deaf and self._now_ns >= self._trim_ns:
            self._trim_ns = self._now_ns + TRIM_NS
            _libc.malloc_trim(0)  # returns the memory of closed connections to the kernel

    def _takes_nothing(self, fd: int, peer: Peer, shed: bool) -> bool:
        untaken = pending_bytes(fd, termios.TIOCOUTQ)
        same = untaken > 0 and (shed or untaken == peer.untaken)
        peer.stuck = peer.stuck + 1 if same else 0
        peer.untaken = untaken
        return peer.stuck >= STRIKES

    def memory_is_short(self) -> bool:
        """True while the process has grown by more than ALARM_BYTES."""
        return self._grown_bytes() > ALARM_BYTES

    def _grown_bytes(self) -> int:
        return self._own_bytes() - self._base_bytes

    def _own_bytes(self) -> int:
        """Return the private memory of this process, without the arena and mapped files."""
        _, resident, shared, *_ = os.pread(self._statm, 64, 0).split()
        return (int(resident) - int(shared)) * PAGE_BYTES


def _news(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """Yield (event, descriptor) for each waiting event, oldest first."""
    with suppress(zmq.Again):
        while True:
            event, fd = _EVENT.unpack(monitor.recv(zmq.NOBLOCK))
            monitor.recv()  # the socket's address
            yield event, fd


@contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """Yield libzmq's descriptor as a socket. The address family is given explicitly, which saves
    system calls.

    Methods of the socket raise OSError if the connection is closed.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
    try:
        yield connection
    finally:
        connection.detach()


def pending_bytes(fd: int, queue: int) -> int:
    """Return the number of bytes in the kernel's receive queue (FIONREAD) or send queue (TIOCOUTQ)
    of a connection; 0 if the connection is closed."""
    with suppress(OSError):
        return int(_NUMBER.unpack(fcntl.ioctl(fd, queue, bytes(4)))[0])
    return 0


def take_no_descriptors(fd: int) -> None:
    """Let the kernel refuse descriptors that peers pass. libzmq would close these descriptors, and
    the creator of a file can make closing it block for any length of time."""
    with suppress(OSError), borrowed(fd) as listener:
        listener.setsockopt(socket.SOL_SOCKET, _PASS_RIGHTS, 0)


def _end(connection: socket.socket) -> None:
    """Shut a connection down; libzmq then closes it. Drop the bytes that libzmq has not read."""
    connection.shutdown(socket.SHUT_RDWR)
    for _ in range(UNREAD_MAX // MIB):
        if not connection.recv_into(_dropped, MIB, socket.MSG_DONTWAIT):
            return


def credentials_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and gid of the process that connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(credentials)
    return pid, uid, gid


def peer_pid(connection: socket.socket) -> int:
    """Return the pid of the process that connected; 0 = the kernel does not report it."""
    return max(0, credentials_of(connection)[0])


def _identity_of(connection: socket.socket) -> Identity:
    uid = credentials_of(connection)[1]
    return str(connection.getpeername()[0]) if uid == _NO_UID else uid


def _sender(frame: zmq.Frame) -> Identity:
    """Return the peer of the connection on which `frame` came; "" for reports of libzmq itself."""
    try:
        return identity_at(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return ""


@lru_cache(maxsize=4096)
def identity_at(address: str) -> Identity:
    """Return the peer with an address, as libzmq writes addresses."""
    if address.startswith(_IPC):
        return int(address.split(":")[1])
    return address.partition("%")[0]  # without the interface name, like getpeername()


def _named(identity: Identity) -> str:
    return f"uid {identity}" if isinstance(identity, int) else identity


def _descriptor(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection of `frame`; -1 for reports of libzmq itself."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
