"""The interface between the loop and its sockets: functions that never block.

`Sockets` implements it with ZeroMQ. Arguments and results are integers and bytes, so that a table
of C functions can take its place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from purgatoryd.daemon.listeners.time_shares import TimeShares
from purgatoryd.shm_layout.arena import Arena, Handled, Outgoing

if TYPE_CHECKING:
    from purgatoryd.daemon.listeners.ring_server import RingServer

Identity = int | str
"""The uid of an ipc peer, or the address of a tcp peer."""
REPLY_HWM = 64
"""Maximum number of replies that wait for one peer. The limit is low, because replies may be large,
and only few wait if the peer reads them."""
REQUEST_HWM = 16
"""Maximum number of requests of one peer that a transport holds; further requests wait at the peer.
receive() takes turns among the peers."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: the route to its sender, its bytes, the sender's credentials from the kernel,
    and the boot time at which it was taken from the socket."""

    route: Hashable
    body: Any
    uid: int
    gid: int
    pid: int
    received_boot_ns: int
    connection: int
    """Descriptor of the message's connection, which may be closed."""


class Served(NamedTuple):
    """The result of CommandRequests.serve(): messages that were applied, and one message that is
    left to the caller."""

    applied: int = 0
    """Number of messages that were applied."""
    request: Request | None = None
    """The message that is left to the caller."""
    how: Handled | None = None
    """Next action for this message; None = the core has not applied it yet."""
    reply: Any = b""
    built_boot_ns: int = 0
    """Boot time at which the reply was complete."""


NOTHING = Served()
"""No message is left."""


class Answered(NamedTuple):
    """Answers to successive batches of a session that were sent."""

    session: int
    first: int
    """Sequence of the first batch."""
    batches: int
    built_boot_ns: int
    """Boot time at which the first answer was complete."""
    handed_boot_ns: int
    """Boot time at which the transport took the last answer."""


@dataclass(eq=False, slots=True)
class Peer:
    """One connection."""

    socket_index: int
    identity: Identity
    pid: int
    """Pid of the process that connected; 0 = the kernel does not report it."""
    strikes: int = 0
    """Number of checks since the peer's last complete message that found newly arrived bytes."""
    untaken: int = 0
    """Number of bytes that waited for the peer at the last check."""
    stuck: int = 0
    """Number of successive checks at which `untaken` was unchanged."""
    gone: bool = False
    """The daemon has closed the connection; earlier messages may still arrive."""
    sessions: set[int] = field(default_factory=set)
    """Sessions whose last message came through this connection."""


class Peers(Protocol):
    """The connections of a transport."""

    on_closed: Callable[[Peer], object]
    """Called with each closed connection."""

    @property
    def connected(self) -> set[int]:
        """Descriptors of all connections."""

    def unread(self, fds: Set[int]) -> set[int]:
        """Return the descriptors in `fds` that have bytes which the transport has not read."""

    def peer(self, fd: int) -> Peer | None:
        """Return the connection of a descriptor; None if it is unknown."""


class Requests(Protocol):
    """A socket for requests of many peers, and for their answers."""

    @property
    def fd(self) -> int:
        """Descriptor that becomes readable when a request comes (edge-triggered)."""

    def receive(self) -> Request | None:
        """Return the next request; None if there is none.

        A request has exactly two frames, routing id and body. A request with more frames is
        returned with an empty body, which the decoder refuses.
        """

    def send(self, route: Hashable, body: Any) -> bool:
        """Send to a peer. False = the message is known to be lost.

        A message is lost if the peer is gone or does not read, or if the message is large while
        memory is short. The peer then asks again.
        """


class CommandRequests(Requests, Protocol):
    """The requests of clients. Most messages are not passed to the caller."""

    def serve(
        self, arena: Arena, shares: TimeShares, most: int, ready: Set[int] | None, each: bool
    ) -> Served:
        """Apply at most `most` messages, and return the first message that is left to the caller.

        `most` is at least 1. `ready`: the descriptors that may have events since the last call;
        None = all. `each`: every message that does not come through rings
        is left to the caller.
        """


class Transport(Protocol):
    """The daemon's sockets, with the methods that the loop uses."""

    @property
    def commands(self) -> CommandRequests:
        """Requests of clients, such as batches and queries."""

    @property
    def ring_server(self) -> RingServer:
        """The messages that the core applies."""

    @property
    def admin(self) -> Requests:
        """Administration, which commands cannot block."""

    def fds(self) -> list[int]:
        """Return the descriptors that the loop waits for."""

    def close(self) -> None:
        """Close all sockets and connections."""

    @property
    def notices_fd(self) -> int:
        """Descriptor that becomes readable when subscriptions change."""

    @property
    def peers(self) -> Peers:
        """The connections."""

    @property
    def watch_due_ns(self) -> int:
        """Boot time at which keep_watch() is due although no descriptor is ready."""

    def pending(self, *, commands: bool) -> bool:
        """True if a message waits in a socket; the command socket counts only if `commands` is
        true. Call this before every sleep, because the descriptors are edge-triggered."""

    def keep_watch(self, now_ns: int, ready: Set[int]) -> bool:
        """Admit new connections and close harmful connections.

        `now_ns` is CLOCK_BOOTTIME, `ready` the descriptors that ended the loop's sleep. True = the
        next iteration has to begin at once.
        """

    @property
    def subscribed(self) -> bool:
        """False while no socket is subscribed to any notice."""

    def take_subscriptions(self) -> None:
        """Process reports of new and ended subscriptions."""

    def publish(self, messages: Iterable[Outgoing]) -> int:
        """Hand notices to the socket, which drops them for slow peers. Return the number of
        notices."""

    def bind_again(self) -> None:
        """Bind sockets again whose paths were removed. Their connections stay."""
