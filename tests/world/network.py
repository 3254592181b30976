"""Simulated connections between clients and daemons: the daemon's transport, and its peers' ends.

A connection delivers frames in order, LATENCY_NS after each was sent. Faults lose, double, delay or
swap the frames of a connection, deliver frames late, or break the connection. Frames that have not
arrived before the break are lost.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from purgatoryd.daemon.listeners.ring_server import Ring
from purgatoryd.daemon.listeners.time_shares import TimeShares
from purgatoryd.daemon.listeners.transport import Peer, Request, Served
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.arena import Arena, Outgoing
from world import rings
from world.router import SimulatedRouter
from world.seam import Seam

if TYPE_CHECKING:
    from world.hosts import SimulatedHost
    from world.schedule import Schedule

LATENCY_NS = 20_000
RECONNECT_NS = 10_000_000
FOREVER_NS = 2**63 - 1
COMMANDS, ADMIN, NOTICES = 0, 1, 2
"""Sockets of a daemon. The numbers are also used as the descriptors."""
WATCHED = 4
"""Descriptor that is readable when a connection was closed."""
HWM = 64
"""Maximum number of answers that wait for one peer; further answers are dropped."""


def message_of(frame: bytes) -> int:
    """Return the message kind of a frame; 0 if the frame is too short."""
    return int(wire.FRAME.unpack_from(frame)[2]) if len(frame) >= wire.FRAME.size else 0


@dataclass
class Disturbance:
    """A disturbance of the next frames of a connection, in either direction."""

    kind: str
    """"lose", "double", "delay", "swap", "cut" or "late"."""
    frames: int
    delay_ns: int = 0


@dataclass(eq=False)
class End:
    """A peer's end of a connection, with the peer's process and the disturbances of the frames at
    this end."""

    host: SimulatedHost
    uid: int
    kind: int
    """COMMANDS, ADMIN or NOTICES."""
    connection: Connection | None = None
    received: deque[Any] = field(default_factory=deque)
    made: int = 0
    """Number of connections made since the owner last checked."""
    queued: list[bytes] = field(default_factory=list)
    """Frames that wait for the next connection."""
    local: bool = False
    """True for a client that takes rings."""
    hidden: bool = False
    """True if the daemon cannot see the pid, because the process is in another pid namespace."""
    unready: int = 0
    """Number of coming receive calls that return nothing although a message has arrived."""
    lossy: bool = False
    """True if a frame was lost since the last connection was made."""
    disturbances: list[Disturbance] = field(default_factory=list)
    wake: Callable[[], None] = lambda: None
    """Function to call when a frame has arrived or a connection has been made."""
    retry: Callable[[], None] = lambda: None
    """Function that connects again."""
    subjects: tuple[bytes, ...] = ()
    greetings: Counter[bytes] = field(default_factory=Counter)
    """For each HELLO, how many times it has arrived."""

    @property
    def pid(self) -> int:
        """The pid that the daemon sees."""
        return 0 if self.hidden else self.host.pid


class Connection:
    """A connection from a peer's end to a daemon."""

    def __init__(self, number: int, end: End, transport: SimulatedTransport) -> None:
        self.number = number
        self.end = end
        self.transport = transport
        self.open = True
        self.peer = Peer(end.kind, end.uid, end.pid)
        self.route = number.to_bytes(5, "big")
        self.under_way = 0


class Network:
    """All connections of a world."""

    def __init__(
        self, schedule: Schedule, seam: Seam, note: Callable[..., None] = lambda *_: None
    ) -> None:
        """Create a network. `note` is called with each frame."""
        self.schedule = schedule
        self.seam = seam
        self._note = note
        self.listening: dict[str, SimulatedTransport] = {}
        """Listening transports by endpoint."""
        self._waiting: dict[End, tuple[int, Callable[[], None]]] = {}
        """Ends that no daemon has accepted, each with (time of its first attempt, function that
        tries again)."""
        self._made = 0
        self.disturbed: dict[str, int] = {}
        """Number of disturbed frames, by kind of disturbance."""

    def connect(self, end: End, endpoint: Callable[[], str]) -> None:
        """Connect an end to the daemon that listens at its endpoint. Connect it again after each
        break."""

        def attempt() -> None:
            if end.connection is not None and end.connection.open:
                return
            place = endpoint()
            transport = self.listening.get(place)
            if not place:
                return  # the end has been closed
            if transport is None or transport.frozen:
                self._waiting.setdefault(end, (self.schedule.now_ns, attempt))
            else:
                self._made += 1
                end.connection = Connection(self._made, end, transport)
                end.made += 1
                end.lossy = False
                end.retry = attempt
                transport.accept(end.connection)
                queued, end.queued = end.queued, []
                for frame in queued:
                    self.send(end.connection, frame)
                end.wake()

        self.schedule.after(LATENCY_NS, attempt)

    def changed(self) -> None:
        """Let each waiting end try again after its current RECONNECT_NS period, because a daemon
        may accept it now."""
        waiting, self._waiting = self._waiting, {}
        for since_ns, attempt in waiting.values():
            left_ns = (since_ns - self.schedule.now_ns) % RECONNECT_NS
            self.schedule.after(left_ns, attempt)

    def break_connection(self, end: End) -> None:
        """Break the connection of an end. The end connects again after RECONNECT_NS."""
        connection = end.connection
        if connection is None or not connection.open:
            return
        connection.open = False
        end.connection = None
        end.received.clear()
        connection.transport.lost(connection)
        self.schedule.after(RECONNECT_NS, end.retry)
        end.wake()

    def send(self, connection: Connection, frame: bytes) -> None:
        """Carry a frame from the peer's end to the daemon."""
        transport = connection.transport
        self.carry(connection, frame, lambda: transport.arrived(connection, frame))

    def carry(self, connection: Connection, data: Any, deliver: Callable[[], None]) -> bool:
        """Carry a frame over a connection, unless the connection breaks first. Return False if a
        disturbance loses the frame."""
        self._note(*data) if isinstance(data, list) else self._note(data)

        def arrive() -> None:
            if connection.open:
                deliver()

        def cut() -> None:
            if connection.open:
                deliver()
                self.break_connection(connection.end)

        latency_ns = LATENCY_NS
        disturbances = connection.end.disturbances
        if disturbances:
            one = disturbances[0]
            one.frames -= 1
            if one.frames <= 0:
                disturbances.pop(0)
            self.disturbed[one.kind] = self.disturbed.get(one.kind, 0) + 1
            if one.kind == "lose":
                connection.end.lossy = True
                return False
            if one.kind == "double":
                self.schedule.after(latency_ns, arrive)
            elif one.kind == "delay":
                latency_ns += one.delay_ns
            elif one.kind == "swap":  # the next frame overtakes this one
                latency_ns = 3 * LATENCY_NS
            elif one.kind == "cut":  # the frame arrives, and then the connection breaks
                arrive = cut
            elif one.kind == "late":  # the socket has the frame, but is not readable at once
                connection.end.unready += 1
        self.schedule.after(latency_ns, arrive)
        return True


# ---- the peers' ends ---------------------------------------------------------------------------


class SimulatedChannel:
    """An implementation of Channel (clients/channel.py) over the simulated network."""

    fds = ()
    redial_at_s = float("inf")

    def __init__(self, network: Network, end: End, endpoint: str, remote: object = None) -> None:
        self._network = network
        self.end = end
        self._endpoint = endpoint
        self.connected = False
        end.local = end.kind == COMMANDS
        network.connect(end, lambda: self._endpoint)

    def redirect(self, endpoint: str) -> None:
        if endpoint != self._endpoint:
            self._endpoint = endpoint
            self.connected = False
            self.end.queued.clear()
            self._network.break_connection(self.end)
            self._network.changed()

    def may_sleep(self, *, to_send: bool) -> bool:
        return True

    def send(self, frame: bytes) -> bool:
        if not self.connected:
            return False
        if self.end.connection is None:
            self.end.queued.append(bytes(frame))
        else:
            self._network.send(self.end.connection, bytes(frame))
        return True

    def receive(self) -> bytes | None:
        if self.end.unready:
            self.end.unready -= 1
            return None
        return self.end.received.popleft() if self.end.received else None

    def reconnected(self) -> bool:
        made, self.end.made = self.end.made, 0
        self.connected = self.end.connection is not None
        return made > 0

    def close(self) -> None:
        if self.end.connection is not None and self.end.connection.open:
            self.end.connection.open = False
            self.end.connection.transport.lost(self.end.connection)
        self.end.connection = None
        self.end.queued.clear()
        self._endpoint = ""


class SimulatedSubscription:
    """An implementation of Subscription (clients/channel.py) over the simulated network."""

    sockets: ClassVar[tuple[()]] = ()

    def __init__(
        self, network: Network, end: End, endpoint: str, subjects: Iterable[bytes], *_: object
    ) -> None:
        self._network = network
        self.end = end
        self._endpoint = endpoint
        end.subjects = tuple(subjects)
        network.connect(end, lambda: self._endpoint)

    def redirect(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._network.break_connection(self.end)
        self._network.changed()

    def receive(self) -> list[bytes] | None:
        return self.end.received.popleft() if self.end.received else None

    def reconnected(self) -> bool:
        made, self.end.made = self.end.made, 0
        return made > 0

    def close(self) -> None:
        if self.end.connection is not None and self.end.connection.open:
            self.end.connection.open = False
            self.end.connection.transport.lost(self.end.connection)
        self.end.connection = None
        self._endpoint = ""


# ---- the daemon's transport --------------------------------------------------------------------


class SimulatedRequests:
    """One request socket of a daemon."""

    def __init__(self, transport: SimulatedTransport, fd: int) -> None:
        self._transport = transport
        self.fd = fd
        self.waiting: deque[Request] = deque()

    def receive(self) -> Request | None:
        self._transport.network.seam.cross()
        if not self.waiting:
            return None
        return self.waiting.popleft()

    def serve(self, arena: Arena, shares: TimeShares, most: int, _: object, each: bool) -> Served:
        self._transport.router.look(each=each)
        return self._transport.rings.serve(arena, shares, most)

    def send(self, route: Any, body: Any) -> bool:
        seam = self._transport.network.seam
        seam.cross()
        if isinstance(route, Ring):
            sent = route.send(body)
            seam.cross()
            return sent
        connection = self._transport.connections.get(int.from_bytes(route, "big"))
        sent = connection is not None and connection.open and connection.under_way < HWM
        if connection is not None and sent:
            self._transport.deliver(connection, bytes(body))
        seam.cross()
        return sent


class SimulatedTransport:
    """The daemon's sockets, and the connections of its peers."""

    notices_fd = NOTICES

    def __init__(
        self, network: Network, host: SimulatedHost, endpoints: Iterable[str], *, in_core: bool,
        only_rings: bool,
    ) -> None:  # fmt: skip
        """`in_core`: the core receives the messages of the command socket. `only_rings`: each
        connection of a client has rings, not only every second connection."""
        self.network = network
        self._host = host
        self._ring_every = 1 if only_rings else 2
        self.commands = SimulatedRequests(self, COMMANDS)
        self.admin = SimulatedRequests(self, ADMIN)
        self.router = SimulatedRouter(self.commands, in_core=in_core)
        self.rings = rings.SimulatedRings(self, host)
        self.ring_server = self.rings.server
        self.connections: dict[int, Connection] = {}
        self.peers = self
        self.on_closed: Callable[[Peer], object] = lambda _: None
        self._closed: deque[Peer] = deque()
        self._endpoints = tuple(endpoints)
        self.wake: Callable[[], None] = lambda: None
        self.look: Callable[[], None] = lambda: None
        """Looks for notices that readers of the arena may take."""
        self.frozen = False
        self._unread: deque[Callable[[], None]] = deque()
        """Functions that deliver the messages that the kernel has received but the socket has not
        read."""
        self._unread_of: set[int] = set()
        """The `number` of each connection that has unread messages."""
        self._reported = False
        """True if subscriptions have changed since take_subscriptions()."""
        self.subscribed = False
        self.alive = True
        self.watch_due_ns = FOREVER_NS

    def listen(self) -> None:
        """Let peers connect."""
        for endpoint in self._endpoints:
            self.network.listening[endpoint] = self
        self.network.changed()

    def vanish(self) -> None:
        """Break all connections, because the process has ended."""
        self.alive = False
        for endpoint in self._endpoints:
            if self.network.listening.get(endpoint) is self:
                del self.network.listening[endpoint]
        for number in sorted(self.connections):
            connection = self.connections[number]
            self.network.schedule.after(
                LATENCY_NS,
                lambda end=connection.end: self.network.break_connection(end),  # type: ignore[misc]
            )
        self.connections.clear()
        self.rings.vanish()

    # ---- for the network -----------------------------------------------------------------------

    def accept(self, connection: Connection) -> None:
        """Accept a connection from a peer, and give rings to a client."""
        self.connections[connection.number] = connection
        self._report(connection)
        if connection.end.local and connection.number % self._ring_every == 0:
            self.rings.open(connection)

    def _report(self, connection: Connection) -> None:
        """Report a subscription that begins or ends."""
        if connection.end.subjects:
            self._reported = True
            self.wake()

    def lost(self, connection: Connection) -> None:
        """Remove a closed connection. Rings stay until their frames have been taken."""
        if self.rings.has(connection.number):
            self.rings.end(connection.number)
            self.wake()
        else:
            self.forget(connection.number)

    def forget(self, number: int) -> None:
        """Report the end of a connection to the daemon."""
        connection = self.connections.get(number)
        if connection is None:
            return
        if self.connections.pop(connection.number, None) is not None and self.alive:
            self._closed.append(connection.peer)
            self._report(connection)
            self.wake()

    def arrived(self, connection: Connection, data: bytes) -> None:
        """Queue a request that arrived."""
        end = connection.end
        if message_of(data) == layout.Message.HELLO:
            end.greetings[data] += 1
        now_ns = self.network.schedule.now_ns - self._host.machine.boot_begun_ns
        message = Request(
            connection.route, data, end.uid, end.uid, end.pid, now_ns, connection.number
        )
        if not self.alive:
            return
        if self.rings.has(connection.number):
            self.rings.put(connection, data)
            self.wake()
            return
        requests = self.admin if end.kind == ADMIN else self.commands
        if self.frozen or self._unread:
            self._unread.append(partial(requests.waiting.append, message))
            self._unread_of.add(connection.number)
            return
        requests.waiting.append(message)
        self.wake()

    def thaw(self, read_in_ns: int) -> None:
        """Let the process continue. After `read_in_ns`, its sockets read the messages that the
        kernel has received."""
        self.frozen = False
        self.network.schedule.after(read_in_ns, self._read)

    def _read(self) -> None:
        if not self.frozen:
            while self._unread:
                self._unread.popleft()()
            self._unread_of.clear()
            self.wake()

    def deliver(self, connection: Connection, data: Any) -> None:
        """Send a frame to a peer."""
        end, copies = connection.end, [data]

        def arrive() -> None:
            connection.under_way -= len(copies)
            copies.clear()
            end.received.append(data)
            end.wake()

        if self.network.carry(connection, data, arrive):
            connection.under_way += 1

    # ---- Transport -----------------------------------------------------------------------------

    def peer(self, fd: int) -> Peer | None:
        connection = self.connections.get(fd)
        return None if connection is None else connection.peer

    @property
    def connected(self) -> set[int]:
        return set(self.connections)

    def unread(self, fds: Set[int]) -> set[int]:
        return (self._unread_of & fds) | {fd for fd in fds if self.rings.unread(fd)}

    def ready(self) -> frozenset[int]:
        """Return the readable descriptors."""
        found = {r.fd for r in (self.commands, self.admin) if r.waiting}
        found |= {NOTICES} if self._reported else set()
        found |= {WATCHED} if self._closed else set()
        return frozenset(found | {rings.FD}) if self.rings.rung else frozenset(found)

    def pending(self, *, commands: bool) -> bool:
        return bool(self._reported or self.admin.waiting or (commands and self.commands.waiting))

    def keep_watch(self, now_ns: int, ready: Set[int]) -> bool:
        while self._closed:
            self.on_closed(self._closed.popleft())
        return False

    def take_subscriptions(self) -> None:
        self._reported = False
        self.subscribed = any(one.end.subjects for one in self.connections.values())

    def publish(self, messages: Iterable[Outgoing]) -> int:
        self.network.seam.cross()
        sent = 0
        for message in messages:
            frames = [bytes(message.subject), bytes(message.body)]
            for number in sorted(self.connections):
                connection = self.connections[number]
                if any(frames[0].startswith(subject) for subject in connection.end.subjects):
                    self.deliver(connection, frames)
            sent += 1
        self.network.seam.cross()
        return sent

    def bind_again(self) -> None:
        pass


class SimulatedProcesses:
    """An implementation of Processes (daemon/processes.py). It reports client processes that
    end."""

    fd = -1

    def __init__(self, transport: SimulatedTransport) -> None:
        self._transport = transport
        self._watched: dict[int, int] = {}
        self._ended: list[int] = []
        self._handles = 0
        self.alive: set[int] = set()
        """Pids of running client processes."""

    def end(self, pid: int) -> None:
        """Record that a process has ended."""
        for handle in sorted(self._watched):
            if self._watched[handle] == pid and handle not in self._ended:
                self._ended.append(handle)
        self._transport.wake()

    def watch(self, connection: int, pid: int) -> int | None:
        if pid not in self.alive:
            raise ProcessLookupError
        if self._transport.peer(connection) is None:
            return None
        self._handles += 1
        self._watched[self._handles] = pid
        return self._handles

    def unwatch(self, pidfd: int) -> None:
        self._watched.pop(pidfd, None)
        if pidfd in self._ended:
            self._ended.remove(pidfd)

    def has_ended(self, pidfd: int) -> bool:
        return pidfd in self._ended

    def is_gone(self, pid: int) -> bool:
        return pid != 0 and pid not in self.alive

    def ended(self, limit: int) -> list[int]:
        return list(self._ended[:limit])

    def close(self) -> None:
        self._watched.clear()
