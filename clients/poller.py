"""The interface of a channel to a daemon, and the wait for channels."""

from __future__ import annotations

import math
import os
import select
from collections.abc import Callable
from typing import Literal, Protocol

Addresses = tuple[Literal["ring", "zmq"], int, int, int, int]
"""("ring", putter, taker, eventfd of the daemon, socket), with the addresses of two
struct pg_ring_end; or ("zmq", socket, monitor, their two descriptors), with the addresses of the
two ZeroMQ sockets."""


class AnyChannel(Protocol):
    """The interface of a channel. Channel describes the methods that have no comment here."""

    @property
    def connected(self) -> bool: ...  # noqa: D102

    @property
    def redial_at_s(self) -> float:
        """Host time (monotonic) at which reconnected() has to be called; infinite = no time."""

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that become readable when there may be something to do."""

    @property
    def addresses(self) -> Addresses | None:
        """The numbers that direct calls use; None if they cannot use the channel."""

    def may_sleep(self, *, to_send: bool) -> bool:
        """Announce that the owner waits for `fds`. `to_send`: also until there is space.
        False = there is something to do."""

    def send(self, frame: bytes) -> bool: ...  # noqa: D102
    def receive(self) -> bytes | None: ...  # noqa: D102
    def reconnected(self) -> bool: ...  # noqa: D102
    def redirect(self, endpoint: str) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


OpenChannel = Callable[..., AnyChannel]
"""Opens a channel; the arguments are those of Channel's constructor."""


class ChannelPoller:
    """Waits for several channels, and for an eventfd."""

    def __init__(self, kicked: int = -1) -> None:
        """`kicked`: an eventfd; a write to it ends a wait. -1 = none."""
        self._poll = select.poll()
        self._kicked = kicked
        self._to_send: dict[AnyChannel, bool] = {}
        self._channels: dict[int, AnyChannel] = {}
        """Channels by descriptor."""
        if kicked >= 0:
            self._poll.register(kicked, select.POLLIN)

    def watch(self, channel: AnyChannel, *, to_send: bool = False) -> None:
        """Let wait() return when a message arrives on a channel, and when its connection is made or
        broken. With `to_send`, also when a connected channel has space to send."""
        if channel not in self._to_send:
            for fd in channel.fds:
                self._channels[fd] = channel
                self._poll.register(fd, select.POLLIN)
        self._to_send[channel] = to_send and channel.connected

    def wait(self, timeout_s: float) -> list[AnyChannel]:
        """Wait at most `timeout_s` seconds, and return the channels that may be ready. A write to
        the eventfd ends the wait, and the eventfd is reset."""
        busy = [
            channel
            for channel, to_send in self._to_send.items()
            if not channel.may_sleep(to_send=to_send)
        ]
        if busy:
            timeout_s = 0.0
        limit_ms = None if timeout_s == math.inf else max(0, round(timeout_s * 1000 + 0.5))
        ready = {fd for fd, _ in self._poll.poll(limit_ms)}
        if self._kicked in ready:
            os.eventfd_read(self._kicked)
        return busy + [self._channels[fd] for fd in ready if fd != self._kicked]
