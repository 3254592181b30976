"""The admin lane: what moves a virtual clock or ends the daemon. Never blocked by load."""

from __future__ import annotations

import os
import struct
from typing import Protocol

from purgatoryd.daemon.lanes import Message
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.layout import (
    WIRE_MAGIC,
    WIRE_VERSION,
    WireError,
    size_of,
    struct_format,
)
from purgatoryd.shm_layout.layout import Message as Kind

_FRAME = struct.Struct(struct_format("pg_frame"))
_TAIL = struct.Struct(struct_format("pg_tail"))


class Loop(Protocol):
    """What an admin command may do to the loop."""

    arena: Arena

    def advance_to(self, target_ns: int, message: Message) -> bool:
        """Moves a virtual clock; False if there is none or it would go back."""
        ...

    def stop(self) -> None:
        """Ends the loop after this turn."""
        ...


def frame(kind: int, error: WireError = WireError.NONE, count: int = 0,
          detail: tuple[int, int] = (0, 0)) -> bytes:  # fmt: skip
    """The 64 bytes that begin a reply."""
    return _FRAME.pack(
        WIRE_MAGIC, WIRE_VERSION, kind, 0, 0, count, 0, error, 0, 0, 0, *detail
    )  # fmt: skip


def handle(loop: Loop, message: Message) -> bytes | None:
    """The reply to one admin request; None if it comes later, when the clock has arrived."""
    if len(message.body) != size_of("pg_frame"):
        return frame(0, WireError.MALFORMED, detail=(len(message.body), size_of("pg_frame")))
    magic, version, kind, _, _, _, _, _, _, _, at_ns, _, _ = _FRAME.unpack(message.body)
    if magic != WIRE_MAGIC:
        return frame(kind, WireError.MALFORMED, detail=(0, magic))
    if version != WIRE_VERSION:
        return frame(kind, WireError.VERSION, detail=(WIRE_VERSION, version))
    if message.uid not in (0, os.geteuid()):
        return frame(kind, WireError.DENIED, detail=(message.uid, 0))
    return _command(loop, message, kind, at_ns)


def _command(loop: Loop, message: Message, kind: int, at_ns: int) -> bytes | None:
    if kind == Kind.PING:
        return frame(kind)
    if kind == Kind.STOP:
        loop.stop()
        return frame(kind)
    if kind == Kind.ADVANCE:
        if loop.advance_to(at_ns, message):
            return None
        now_ns = int(loop.arena.header.now_ns)
        return frame(kind, WireError.CLOCK, detail=(now_ns, at_ns % 2**64))
    return frame(kind, WireError.UNKNOWN_MESSAGE, detail=(kind, 0))


def advanced(arena: Arena) -> bytes:
    """The reply to ADVANCE: the tail sequence of every topic."""
    namespaces = arena.namespaces()
    parts = []
    for topic in arena.topics():
        ns, name = namespaces[topic.namespace_row].name.encode(), topic.name.encode()
        parts.append(
            _TAIL.pack(topic.sequence, topic.incarnation, len(ns), len(name), b"") + ns + name
        )
    return frame(Kind.ADVANCE, count=len(parts)) + b"".join(parts)
