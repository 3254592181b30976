"""Peers that a daemon has to refuse: uids without access, uids that send admin commands without
being administrators, and senders of garbage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.layout import BulkLoadAction, Message, WireError
from world.network import ADMIN, COMMANDS, End, SimulatedChannel
from world.oracle import Violation

if TYPE_CHECKING:
    from world.cell import Cell

UNKNOWN_UID, PLAIN_UID, ADMIN_UID = 99, 1, 0
NO_SESSION = 0xFFFF_FFFF
_PING = wire.encode_frame(Message.PING, 0, 1)
MESSAGES: dict[str, bytes] = {
    "short": b"abc",
    "ping": _PING,
    "magic": bytes(4) + _PING[4:],
    "version": _PING[:4] + b"\xff\xff" + _PING[6:],
    "unknown": wire.encode_frame(999, 0, 1),
    "long": _PING + bytes(8),
    "hello": wire.encode_hello(bytes(range(16)), 1, b"", 0),
    "stop": wire.encode_frame(Message.STOP, 0, 1),
    "sessions": wire.encode_frame(Message.SESSIONS, 0, 1),
    "drop": wire.encode_frame(Message.DROP, NO_SESSION, 1),
    "advance": wire.encode_frame(Message.ADVANCE, 0, 1, at_ns=0),
    "bulk_load": wire.encode_bulk_load(1, 0, b"\x7f" * 16, BulkLoadAction.STATUS),
}
MAY = {PLAIN_UID: {"sessions"}, ADMIN_UID: {"sessions", "bulk_load", "ping"}}
"""For each uid, the messages to which it receives an answer."""
WITHOUT_SESSION = {"ping", "long"}
"""Messages to which the command socket replies, for every uid that may connect."""


class Stranger:
    """A peer that sends one message, and closes its connection when the reply arrives."""

    def __init__(self, cell: Cell, kind: str, uid: int, *, admin: bool, session: int) -> None:
        self._kind, self._uid = kind, uid
        self._may = kind in MAY.get(uid, ())
        self._may |= not admin and uid != UNKNOWN_UID and kind in WITHOUT_SESSION
        # A virtual clock may be at 0, because it was never advanced or because its arena was lost.
        # Then the daemon accepts an advance to 0.
        self._may |= kind == "advance" and uid == ADMIN_UID and cell.virtual
        self._foreign = session
        self._end = End(cell.world.host(), uid, ADMIN if admin else COMMANDS)
        self._end.wake = self._receive
        paths = cell.daemon.paths
        self._channel = SimulatedChannel(
            cell.world.network, self._end, paths.admin_endpoint if admin else paths.cmd_endpoint
        )
        self._message = self._addressed(MESSAGES[kind])
        self._sent = False

    def _addressed(self, message: bytes) -> bytes:
        if self._kind == "drop" and self._foreign:
            return wire.encode_frame(Message.DROP, self._foreign, 1)
        return message

    def _receive(self) -> None:
        if not self._sent:
            self._channel.reconnected()
            self._sent = self._channel.send(self._message)
        while (data := self._channel.receive()) is not None:
            self._judge(wire.decode_reply(data))
            self._channel.close()

    def _judge(self, reply: wire.Reply) -> None:
        """Judge a reply. It must be a refusal, unless the sender may receive an answer."""
        if reply.error == WireError.NONE and not self._may:
            raise Violation(f"{self._kind} of uid {self._uid} was answered")
