"""What the loop needs of its sockets: a table of functions that never block.

`Sockets` implements it with ZeroMQ. Arguments and results are integers and bytes, so that a table
of C functions can take its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from purgatoryd.shm_layout.arena import Outgoing

Identity = int | str
"""A uid; of a peer behind tcp its address."""
REQUEST_HWM = 16
"""Requests of one peer that a transport has taken; more wait at the peer. receive() takes turns
among the peers."""


@dataclass(frozen=True, slots=True)
class Message:
    """One request: who asks, by routing id and as the kernel says, the bytes, and when it was
    taken from the socket."""

    route: bytes
    body: Any
    uid: int
    gid: int
    pid: int
    received_boot_ns: int
    connection: int
    """Descriptor of the message's connection, which may be closed."""


@dataclass(eq=False, slots=True)
class Peer:
    """One connection."""

    socket_index: int
    identity: Identity
    pid: int
    """Pid of the process that connected; 0 = the kernel does not report it."""
    strikes: int = 0
    """Looks before which bytes had come, since its last whole message."""
    untaken: int = 0
    """Bytes on their way to it at the last look."""
    stuck: int = 0
    """Looks at which they were as many as before."""
    gone: bool = False
    """It was cut off; what it sent before may still come."""
    sessions: set[int] = field(default_factory=set)
    """Session that last sent a message through the connection."""


class Peers(Protocol):
    """The connections of a transport."""

    on_closed: Callable[[Peer], object]
    """Called with each closed connection."""

    @property
    def connected(self) -> set[int]:
        """Descriptors of all connections."""

    def unread(self, fds: Set[int]) -> set[int]:
        """Those of `fds` that have bytes which the transport has not read."""

    def peer(self, fd: int) -> Peer | None:
        """Return the connection of a descriptor; None if it is unknown."""


class Requests(Protocol):
    """A socket for requests of many peers, and for their answers."""

    @property
    def fd(self) -> int:
        """Descriptor that becomes readable when a request comes (edge-triggered)."""

    def receive(self) -> Message | None:
        """The next request, None if there is none.

        A request has exactly two frames, routing id and body; of one with more, the body is
        empty, which the decoder refuses.
        """

    def send(self, route: bytes, body: Any) -> bool:
        """Send to a peer. One that is gone, or does not read, loses it and asks again; so does one
        whose answer is large while memory is short. False = it is known to be lost."""


class Transport(Protocol):
    """The daemon's sockets, as the loop uses them."""

    @property
    def commands(self) -> Requests:
        """Batches, queries and what else clients ask."""

    @property
    def admin(self) -> Requests:
        """Administration, which commands cannot block."""

    @property
    def notices_fd(self) -> int:
        """Descriptor that becomes readable when subscriptions change."""

    @property
    def peers(self) -> Peers:
        """Who is connected."""

    @property
    def watch_due_ns(self) -> int:
        """When keep_watch() wants to be called though nothing happened."""

    def pending(self, *, commands: bool) -> bool:
        """True if a message waits, one on the command socket only if `commands`. Asking is needed
        before every sleep: the descriptors tell of changes only."""

    def keep_watch(self, now_ns: int, ready: Set[int]) -> bool:
        """Admit who connected and cut off who does harm.

        `now_ns` is CLOCK_BOOTTIME, `ready` the descriptors on which the loop woke up, if it
        slept. True = there is more to do at once.
        """

    def take_subscriptions(self) -> None:
        """Take note of what subscribers ask for."""

    def publish(self, messages: Iterable[Outgoing]) -> int:
        """Hand notices to the socket, which drops them for peers that are behind; return their
        number."""

    def bind_again(self) -> None:
        """Bind sockets whose paths were removed again. Their connections stay."""
