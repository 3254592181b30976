"""Ask a daemon for notices that its replay buffer has dropped.

The daemon reads them in a process of its own, which has its own socket. The first request starts
this process. No method waits: the owner calls again until the page is there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from purgatoryd.clients.channel import Channel
from purgatoryd.clients.remote import Remote
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import PurgatorydError
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import Message, WireError
from purgatoryd.shm_layout.paths import Paths
from purgatoryd.shm_layout.wire import PastPage, PastRange

START_S = 0.5
"""Time between two requests to start the process, in seconds."""
ASK_S = 5.0
"""Time after which a request without an answer is sent again, in seconds."""


class Past:
    """The past notices of one daemon, page by page. It asks for one range at a time."""

    def __init__(self, find: Callable[[], Paths], remote: Remote | None = None) -> None:
        """`find` returns the paths of the daemon on this host; it may raise a PurgatorydError."""
        self._find = find
        self._remote = remote
        self._asked: PastRange | None = None
        self._sequence = 0
        self._ask_at_s = self._start_at_s = 0.0
        self._endpoints = ("", "")
        self._commands: Channel | None = None
        self._back: Channel | None = None

    def waits_for(self, asked: PastRange) -> bool:
        """Return whether the last call of page() was for this range and returned None."""
        return self._asked == asked

    def page(self, asked: PastRange) -> PastPage | None:
        """Return a page with the first existing notices of a range; None = there is no answer so
        far. All notices of another stream are lost."""
        if self._asked != asked:
            self._asked, self._sequence, self._ask_at_s = asked, self._sequence + 1, 0.0
        with suppress(PurgatorydError):
            self._connect()
        if self._back is None or self._commands is None:
            return None
        now_s = HOST.monotonic_s()
        if self._back.reconnected():
            self._ask_at_s = now_s
        if not self._back.connected:
            self._start(self._commands, now_s)
        elif now_s >= self._ask_at_s and self._back.send(wire.encode_replay(self._sequence, asked)):
            self._ask_at_s = now_s + ASK_S
        return self._answer(self._back, asked)

    def _connect(self) -> None:
        if self._remote is not None:
            endpoints = self._remote.place.commands, self._remote.place.past
        else:
            paths = self._find()
            endpoints = paths.cmd_endpoint, paths.back_endpoint
        if endpoints != self._endpoints:
            self._close()
            self._commands, self._back = (Channel(place, self._remote) for place in endpoints)
            self._endpoints = endpoints

    def _start(self, commands: Channel, now_s: float) -> None:
        """Let the daemon start the process."""
        commands.reconnected()
        while commands.receive() is not None:
            continue
        if now_s >= self._start_at_s and commands.send(wire.encode_frame(Message.REPLAY)):
            self._start_at_s = now_s + START_S

    def _answer(self, back: Channel, asked: PastRange) -> PastPage | None:
        while (data := back.receive()) is not None:
            reply = wire.decode_reply(data)
            if reply.sequence != self._sequence:
                continue
            if reply.error == WireError.STOPPING:
                self._ask_at_s = HOST.monotonic_s() + START_S
                continue
            self._asked = None
            if reply.error == WireError.CURSOR:
                return PastPage(asked.last, asked.last + 1, b"")
            if reply.error:
                raise reply.refusal()
            return wire.decode_replay(reply.body)
        return None

    def _close(self) -> None:
        for channel in (self._commands, self._back):
            if channel is not None:
                channel.close()

    def close(self) -> None:
        """Close the connections."""
        self._close()
        self._commands = self._back = None
        self._endpoints = ("", "")
