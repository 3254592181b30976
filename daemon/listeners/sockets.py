"""The daemon's three ZeroMQ sockets: commands, notices, administration. They contain no policy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket as sockets
import stat
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import zmq

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.admission_control import AdmissionControl, identity_at
from purgatoryd.daemon.listeners.ring_server import Ring
from purgatoryd.daemon.listeners.rings import Rings
from purgatoryd.daemon.listeners.router import Router
from purgatoryd.daemon.listeners.time_shares import TimeShares
from purgatoryd.daemon.listeners.transport import (
    REPLY_HWM,
    REQUEST_HWM,
    Peer,
    Request,
    Served,
)
from purgatoryd.daemon.listeners.whole_messages import send_whole
from purgatoryd.daemon.listeners.zap import DOMAIN, ZapHandler, sender_of
from purgatoryd.daemon.log import log
from purgatoryd.shm_layout import curve
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Arena, Outgoing
from purgatoryd.shm_layout.errors import BadPath
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import MESSAGE_MAX, NAMESPACE_MAX, TOPIC_MAX
from purgatoryd.shm_layout.paths import Paths

SOCKET_MODE = 0o660
PROBE_S = 1.0
"""A socket at our path that does not refuse a connection within this time is in use."""
NOTICE_HWM = 1000
LARGE_BYTES = 16 * 2**10
"""Answers above this size are dropped while memory is short. The peers then ask again."""
SUBSCRIPTION_MAX = NAMESPACE_MAX + TOPIC_MAX + 32
"""Maximum size of a subscription: two names, three bytes around them, and the ZMTP header."""
ROUTE_MAX = int(lib.PG_ROUTE_MAX)
OFFENCE = "more frames or a longer name than any client has"
PARTS_MAX = 256
"""Maximum number of frames in a message; a message with more frames is an offence. An iteration
drops at most this many frames."""
REPORTS_PER_ITERATION = 256
PROBED = b"\1\0"
"""First bytes of the report of a subscription to a probe. No namespace begins with a zero byte."""
HANDSHAKE_MS = 10_000
CURVE_MAX = 512
"""Maximum number of bytes that encryption adds to a message, or that a message of the CURVE
handshake has."""
"""Heartbeats of tcp peers. For ipc peers the kernel reports the end of a connection at once."""
ASK_NS = 5_000_000
"""Interval at which a loop that does not sleep checks for events of connections."""
WATCH_NS, WATCH_MAX_NS = 100_000, 5_000_000
"""Bounds of the time that one check for events of connections takes. Within these bounds, a check
takes as long as all other work since the last check. So neither kind of work delays the other for
long, and events are processed faster than libzmq creates them."""
LINGER_MS = 1000
"""Longest time that a clean stop waits for peers to receive their messages."""


@dataclass(frozen=True)
class Remotes:
    """Address for clients on other hosts, key pair of the daemon, and keys of the clients."""

    place: curve.Place
    pair: curve.KeyPair
    list: Path
    """File of the clients' keys."""
    allowed: dict[bytes, int]
    """The uids of clients, by public key."""

    @classmethod
    def of(cls, config: Config) -> Remotes | None:
        """Read the key files that the settings name; None = no tcp. Raises BadPath."""
        if not config.tcp:
            return None
        pair = curve.read_pair(Path(config.server_key))
        path = Path(config.keys).absolute()
        return cls(curve.place(config.tcp), pair, path, curve.read_allowed(path))


class RequestSocket:
    """A ROUTER socket: requests of many peers, and their answers."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        admission: AdmissionControl,
        host: Host,
        sheds_over: int = MESSAGE_MAX,
    ) -> None:
        """`sheds_over`: bytes; larger answers are dropped while memory is short."""
        self.zmq_socket = socket
        self._admission = admission
        self._host = host
        self._sheds_over = sheds_over
        self.fd = int(socket.getsockopt(zmq.FD))
        self._route = bytearray(ROUTE_MAX)
        self.state = ffi.new(
            "struct pg_router *", {"fd": self.fd, "each": 1, "reply_max": sheds_over}
        )
        """State of the socket: `quiet`, and `rest` while frames of the current message have to be
        dropped before the next message. The core may receive the messages."""

    def receive(self) -> Request | None:
        """Return the next request; None if there is none."""
        state = self.state
        if state.rest:
            state.rest = not self._take_off()
            if state.rest:
                return None
        try:
            # a route of more than ROUTE_MAX bytes is cut; `size` then shows that
            size = self.zmq_socket.recv_into(self._route, flags=zmq.NOBLOCK)
        except zmq.Again:
            state.quiet = 1
            return None
        state.quiet = 0
        body = self.zmq_socket.recv(copy=False)
        state.rest = body.more and not self._take_off()
        if state.rest or size > ROUTE_MAX:
            self._admission.offence(body, OFFENCE)
            return None
        connection = self._admission.completed(body)
        route, request = bytes(self._route[:size]), b"" if body.more else body.buffer
        return Request(route, request, *sender_of(body), self._host.boot_ns(), connection)

    def send(self, route: Hashable, body: Any) -> bool:
        """Send to a peer; False = the message is known to be lost."""
        if len(body) > self._sheds_over and self._admission.memory_is_short():
            return False
        self.state.quiet = 0
        try:
            send_whole(self.zmq_socket, cast(bytes, route), body)
        except zmq.Again:
            return False
        return True

    def pending(self) -> bool:
        """Return whether a request waits."""
        if not self.state.quiet:
            self.state.quiet = not int(self.zmq_socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        return not self.state.quiet

    def look(self) -> None:
        """Note that the socket may have a message, because its descriptor is readable or may have
        lost an event."""
        self.state.quiet = 0

    def unlike_a_clients(self, connection: int, address: str) -> bool:
        """Drop the rest of the frames of a message that no client sends. Return whether the sender
        may have an answer; otherwise it is punished."""
        self.state.rest = self.state.rest and not self._take_off()
        if self.state.rest or self.state.route_bytes > ROUTE_MAX:
            self._admission.offended(connection, identity_at(address), OFFENCE)
            return False
        if 0 <= connection < self.state.descriptors:
            self.state.completed[connection] = True
        return True

    def _take_off(self) -> bool:
        """Drop the remaining frames of a message, at most PARTS_MAX. True = no frame is left."""
        with contextlib.suppress(zmq.Again):  # libzmq drops the rest when the connection ends
            return any(
                not self.zmq_socket.recv(zmq.NOBLOCK, copy=False).more for _ in range(PARTS_MAX)
            )
        return True


class AllRequests:
    """Requests that come through the command socket, and through rings."""

    def __init__(self, socket: RequestSocket, rings: Rings, *, in_core: bool) -> None:
        """`in_core`: the core can receive the messages of the socket."""
        self._socket = socket
        self._rings = rings
        self._in_core = in_core
        self.fd = socket.fd

    def receive(self) -> Request | None:
        """Return the next request of the socket; None if there is none."""
        return self._socket.receive()

    def serve(
        self, arena: Arena, shares: TimeShares, most: int, ready: Set[int] | None, each: bool
    ) -> Served:
        """Apply at most `most` messages, and return the first message that is left to the caller.
        `each`: every message of the socket is left to the caller."""
        self._socket.state.each = each or not self._in_core
        if ready is None or self.fd in ready:
            self._socket.look()
        return self._rings.serve(arena, shares, most, ready)

    def send(self, route: Hashable, body: Any) -> bool:
        """Send to a peer; False = the message is known to be lost."""
        return route.send(body) if isinstance(route, Ring) else self._socket.send(route, body)


class AllPeers:
    """The connections of the sockets, and of the rings."""

    def __init__(self, admission: AdmissionControl, rings: Rings) -> None:
        self._parts = (admission, rings)

    @property
    def on_closed(self) -> Callable[[Peer], object]:
        """Called with each closed connection."""
        return self._parts[0].on_closed

    @on_closed.setter
    def on_closed(self, on_closed: Callable[[Peer], object]) -> None:
        for part in self._parts:
            part.on_closed = on_closed

    @property
    def connected(self) -> set[int]:
        """Descriptors of all connections."""
        return self._parts[0].connected | self._parts[1].connected

    def unread(self, fds: Set[int]) -> set[int]:
        """Return the descriptors in `fds` that have bytes which were not read."""
        return self._parts[0].unread(fds) | self._parts[1].unread(fds)

    def peer(self, fd: int) -> Peer | None:
        """Return the connection of a descriptor; None if it is unknown."""
        return self._parts[0].peer(fd) or self._parts[1].peer(fd)


class Sockets:
    """All sockets of a daemon or deployment. The constructor binds them. Only one thread uses them;
    no method blocks."""

    def __init__(
        self,
        paths: Paths,
        access: Access,
        remotes: Remotes | None = None,
        host: Host = HOST,
        ring_bytes: int = 0,
    ) -> None:
        """`ring_bytes`: memory for all rings; 0 = no rings."""
        self._host = host
        self.directory = paths.directory
        self._paths = (paths.cmd, paths.admin, paths.pub)
        for path in (*self._paths, paths.ring):
            _refuse_foreign(path)
        # Clients look for rings first, so that socket must exist before the command socket. After a
        # kill, the command socket is left.
        paths.cmd.unlink(missing_ok=True)
        _unpredictable_routes()
        self._context = zmq.Context(io_threads=1)
        self.admission = AdmissionControl(self._context, (*self._paths, paths.ring))
        allowed = {} if remotes is None else remotes.allowed
        self._zap = ZapHandler(self._context, self.admission, access, allowed)
        commands = self._socket(zmq.ROUTER, REPLY_HWM, MESSAGE_MAX)
        self._commands = RequestSocket(commands, self.admission, host, LARGE_BYTES)
        router = Router(self._commands.state, self._commands)
        in_core = router.receive_by(commands, self.admission.messages)
        self._rings = Rings(paths.ring, ring_bytes, self.admission, access, host, router)
        if ring_bytes:
            self._bind_rings(paths.ring)
        self._bind(commands, paths.cmd)
        self.commands = AllRequests(self._commands, self._rings, in_core=in_core)
        admin = self._socket(zmq.ROUTER, REPLY_HWM, MESSAGE_MAX)
        self._bind(admin, paths.admin)
        self.peers = AllPeers(self.admission, self._rings)
        self.ring_server = self._rings.server
        self.bells = self._rings.bells
        self.admin = RequestSocket(admin, self.admission, host)
        self.notices = self._socket(zmq.XPUB, NOTICE_HWM, SUBSCRIPTION_MAX)
        accept_only(self.notices, access)
        self._bind(self.notices, paths.pub)
        self._notices_quiet = False
        """True if the XPUB socket had no report at the last call. Its descriptor is then readable
        once it has one."""
        self.notices_fd = int(self.notices.getsockopt(zmq.FD))
        self._sockets = (commands, admin, self.notices)
        if remotes is not None:
            listen_tcp(commands, remotes.place.commands, remotes.pair, MESSAGE_MAX)
            listen_tcp(self.notices, remotes.place.notices, remotes.pair, SUBSCRIPTION_MAX)
        self._remotes = remotes
        self._watched = {self._zap.fd, *self.admission.fds}
        self._ask_ns = self._watched_ns = 0
        self._unbound: set[Path] = set()
        """Removed paths that could not be bound again."""

    def _socket(self, kind: int, send_hwm: int, message_max: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, message_max)
        socket.setsockopt(zmq.SNDHWM, send_hwm)
        socket.setsockopt(zmq.RCVHWM, REQUEST_HWM)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.admission.watch(socket)
        return socket

    def _bind(self, socket: zmq.Socket[bytes], path: Path) -> None:
        try:
            listen_at(socket, path)
            self.admission.iterate(self._host.boot_ns())
        except (zmq.ZMQError, OSError) as error:
            raise BadPath(str(path), f"cannot be bound: {error.strerror}") from error

    def _bind_rings(self, path: Path) -> None:
        try:
            self._listen_for_rings()
            self.admission.iterate(self._host.boot_ns())
        except OSError as error:
            raise BadPath(str(path), f"cannot be bound: {error.strerror}") from error

    def _listen_for_rings(self) -> None:
        with _closed():
            self._rings.listen()
        self._rings.path.chmod(SOCKET_MODE)

    def bind_again(self) -> None:
        """Bind sockets again whose paths were removed. Their connections stay.

        The old listener and its descriptor stay as well, because libzmq closes an endpoint's
        connections together with it. If another file has such a path, it is left alone.
        """
        binds: dict[Path, Callable[[], None]] = {
            path: partial(listen_at, socket, path)
            for path, socket in zip(self._paths, self._sockets, strict=True)
        }
        if self._rings.listens:
            binds[self._rings.path] = self._listen_for_rings
        gone = [(path, bind) for path, bind in binds.items() if not os.path.lexists(path)]
        for path, bind in gone:
            try:
                bind()
            except (zmq.ZMQError, OSError) as error:
                self._report_unbound(path, error)
            else:
                self._unbound.discard(path)
                log.warning(f"{path} was removed; the daemon has bound it again")
        if gone:
            self.admission.rebound()
            self._look()

    def _report_unbound(self, path: Path, error: OSError | zmq.ZMQError) -> None:
        if path not in self._unbound:
            self._unbound.add(path)
            log.error(
                f"{path} was removed and cannot be bound again: {error.strerror}; new clients "
                "cannot connect"
            )

    def fds(self) -> list[int]:
        """Descriptors that become readable when a socket has news (edge-triggered)."""
        fds = [self._commands.fd, self.admin.fd, self.notices_fd, *self._rings.fds]
        return [*fds, *self._watched]

    def pending(self, *, commands: bool) -> bool:
        """True if a message waits in a socket; the command socket counts only if `commands` is
        true. Call this before every sleep, because the descriptors are edge-triggered."""
        if commands and self._commands.pending():
            return True
        return self.admin.pending() or self._reported()

    def _look(self) -> None:
        """Note that each socket may have a message although its descriptor is not readable."""
        self._commands.look()
        self.admin.look()
        self._notices_quiet = False

    def _reported(self) -> bool:
        """Return whether the XPUB socket has a report of a subscription."""
        if not self._notices_quiet:
            self._notices_quiet = not int(self.notices.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        return not self._notices_quiet

    def keep_watch(self, now_ns: int, ready: Set[int]) -> bool:
        """Admit new connections and close harmful connections.

        `now_ns` is CLOCK_BOOTTIME, `ready` the descriptors that ended the loop's sleep. True = the
        next iteration has to begin at once.
        """
        if now_ns < min(self._ask_ns, self.admission.due_ns) and self._watched.isdisjoint(ready):
            return False
        begun_ns = self._host.boot_ns()
        until_ns = begun_ns + min(max(begun_ns - self._watched_ns, WATCH_NS), WATCH_MAX_NS)
        while more := self._zap.serve() | self.admission.iterate(now_ns):
            if self._host.boot_ns() >= until_ns:
                break
        self._look()  # a check may have taken the event of a descriptor
        self._watched_ns = self._host.boot_ns()
        self._ask_ns = now_ns if more else now_ns + ASK_NS
        return more

    @property
    def watch_due_ns(self) -> int:
        """Boot time at which keep_watch() is due although no descriptor is ready."""
        return self.admission.due_ns

    @property
    def subscribed(self) -> bool:
        """False while no socket is subscribed to any notice."""
        return self.admission.subscribed_to > 0

    def take_subscriptions(self) -> None:
        """Take reports of subscriptions from the XPUB socket, which keeps the subscriptions."""
        for _ in range(REPORTS_PER_ITERATION):
            self._notices_quiet = False
            if not self._reported():
                return
            report = self.notices.recv(zmq.NOBLOCK, copy=False)
            self.admission.subscribed(report)
            if report.bytes.startswith(PROBED):
                self._answer_probe(report.bytes[1:])

    def _answer_probe(self, subject: bytes) -> None:
        """Confirm a subscription to a probe. The earlier subscriptions of its connection take
        effect before it, so they are live."""
        send_whole(self.notices, subject, b"")

    def publish(self, messages: Iterable[Outgoing]) -> int:
        """Hand notices to the socket, which drops them for slow peers. Return the number of
        notices."""
        sent = 0
        for message in messages:
            self._notices_quiet = False
            send_whole(self.notices, message.subject, message.body)
            sent += 1
        return sent

    def read_keys(self) -> None:
        """Read the list of keys again. All tcp clients have to connect again.

        Raises BadPath; the keys are then unchanged.
        """
        if self._remotes is not None:
            self._zap.keys = curve.read_allowed(self._remotes.list)
            self.admission.end_remote()

    def close(self) -> None:
        """Close all sockets. Messages that peers do not receive within LINGER_MS are dropped.

        The command socket disappears before the socket for rings, see the constructor.
        """
        for path in self._paths:
            with contextlib.suppress(OSError):  # the next daemon replaces a path that is left
                path.unlink()
        self._rings.close()
        self.admission.close()
        for socket in self._sockets:
            socket.close()
        self._zap.close()
        self._context.term()


def _unpredictable_routes() -> None:
    """Seed rand(), from which libzmq takes numbers for peers without a routing id. libzmq would
    abort if a peer used the next such number as its own id."""
    ctypes.CDLL(None).srand(secrets.randbits(32))


def _refuse_without_netlink(endpoint: str) -> None:
    """Raise BadPath if there is no AF_NETLINK, because libzmq would then abort the process."""
    try:
        sockets.socket(sockets.AF_NETLINK, sockets.SOCK_RAW).close()
    except OSError as error:
        why = f"cannot be bound: libzmq needs AF_NETLINK sockets: {error.strerror}"
        raise BadPath(endpoint, why) from error


def listen_tcp(
    socket: zmq.Socket[bytes], endpoint: str, pair: curve.KeyPair, message_max: int
) -> None:
    """Bind a socket to tcp in addition to ipc. Options apply only to later binds. They are reset
    afterwards, so that a removed ipc path is bound again without CURVE.
    """
    _refuse_without_netlink(endpoint)
    socket.setsockopt(zmq.MAXMSGSIZE, message_max + CURVE_MAX)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
    curve.detect_dead_host(socket)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise BadPath(endpoint, f"cannot be bound: {error.strerror}") from error
    socket.setsockopt(zmq.CURVE_SERVER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, message_max)


def listen_at(socket: zmq.Socket[bytes], path: Path) -> None:
    """Bind a socket to a path."""
    with _closed():
        socket.bind(f"ipc://{path}")
    path.chmod(SOCKET_MODE)


@contextlib.contextmanager
def _closed() -> Iterator[None]:
    """Deny other users access to sockets that are bound inside this context, from the moment of the
    bind."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def accept_only(socket: zmq.Socket[bytes], access: Access) -> None:
    """Let libzmq close connections of users without access at once, because a subscriber sends no
    request that could be refused."""
    if access.everybody:
        return
    for uid in access.uids:
        socket.setsockopt(zmq.IPC_FILTER_UID, uid)
    for gid in access.gids:
        socket.setsockopt(zmq.IPC_FILTER_GID, gid)


def _refuse_foreign(path: Path) -> None:
    """Raise BadPath unless the path is free or is an unused socket of our user, because libzmq
    unlinks any file at the path.

    The caller holds the daemon's lock, so a socket that answers belongs to another program.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise BadPath(str(path), "is not a socket: remove it")
    if found.st_uid != os.geteuid():
        raise BadPath(str(path), f"is foreign: it belongs to uid {found.st_uid}")
    if _answers(path):
        raise BadPath(str(path), "is served by another process: stop it")


def _answers(path: Path) -> bool:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
