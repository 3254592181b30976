"""Answer requests on the admin socket, which requests of clients cannot block.

Admin requests move a virtual clock, set up namespaces, publish notices, list and end sessions, and
stop the daemon.
"""

from __future__ import annotations

import struct
from typing import Protocol

from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.transport import Request
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.layout import (
    FLAG_DRAIN,
    FLAG_RESUME,
    WIRE_MAGIC,
    WIRE_VERSION,
    Message,
    WireError,
    is_reserved,
    size_of,
    struct_format,
)

_FRAME = struct.Struct(struct_format("pg_frame"))
_TAIL = struct.Struct(struct_format("pg_tail"))
_BULK_LOAD_INFO_BYTES = size_of("pg_bulk_load_info")
_BULK_LOAD_PART_BYTES = size_of("pg_bulk_load_part")
_SESSION_INFO_BYTES = size_of("pg_session_info")


class Administered(Protocol):
    """The methods that a daemon offers to the handlers of admin requests."""

    arena: Arena
    access: Access

    def advance_to(self, target_ns: int, message: Request) -> bool:
        """Begin to move a virtual clock; False if the clock is real or would go back."""
        ...

    def stop(self) -> None:
        """End the loop after the current iteration."""
        ...

    def drain(self) -> None:
        """Refuse new timers, and end the loop once nothing is armed."""
        ...

    def resume(self) -> None:
        """End a drain: accept timers again."""
        ...

    def publish(self, body: bytes, uid: int) -> tuple[WireError, tuple[int, int], bytes]:
        """Publish a notice without a timer."""
        ...

    def drop(self, session: int) -> bool:
        """End a session; False if the WAL has no space to record this."""
        ...


def frame(kind: int, error: WireError = WireError.NONE, count: int = 0,
          detail: tuple[int, int] = (0, 0), echo: tuple[int, int] = (0, 0)) -> bytes:  # fmt: skip
    """Return the 64 bytes that begin a reply. `echo`: session and sequence of the request."""
    return _FRAME.pack(
        WIRE_MAGIC, WIRE_VERSION, kind, *echo, count, 0, error, 0, 0, 0, *detail
    )  # fmt: skip


def fault(message: Request) -> bytes | None:
    """Return the error reply to a message without a valid frame; None if the frame is valid."""
    if len(message.body) < _FRAME.size:
        return frame(0, WireError.MALFORMED, detail=(len(message.body), _FRAME.size))
    magic, version, kind, *_ = _FRAME.unpack_from(message.body)
    echo = echo_of(message)
    if magic != WIRE_MAGIC:
        return frame(kind, WireError.MALFORMED, detail=(0, magic), echo=echo)
    if version != WIRE_VERSION:
        return frame(kind, WireError.VERSION, detail=(WIRE_VERSION, version), echo=echo)
    return None


def handle(daemon: Administered, message: Request) -> bytes | None:
    """Return the reply to an admin request. None for an ADVANCE that begins to move the virtual
    clock: the daemon replies once the clock has reached the requested time."""
    if (answer := fault(message)) is not None:
        return answer
    kind, echo = _FRAME.unpack_from(message.body)[2], echo_of(message)
    if (
        kind not in (Message.NAMESPACE, Message.TOPIC, Message.BULK_LOAD, Message.PUBLISH)
        and len(message.body) != _FRAME.size
    ):
        detail = (len(message.body), _FRAME.size)
        return frame(kind, WireError.MALFORMED, detail=detail, echo=echo)
    if daemon.access.may_administer(message.uid):
        return _command(daemon, message, kind)
    if kind in (Message.SESSIONS, Message.DROP) and daemon.access.may_connect(
        message.uid, message.gid
    ):
        return _session_command(daemon, message, kind, message.uid)
    return frame(kind, WireError.DENIED, detail=(message.uid, 0), echo=echo)


def echo_of(message: Request) -> tuple[int, int]:
    """Return session and sequence of a request; the reply repeats them."""
    session, sequence = _FRAME.unpack_from(message.body)[3:5]
    return session, sequence


def _command(daemon: Administered, message: Request, kind: int) -> bytes | None:
    echo = echo_of(message)
    if kind == Message.PING:
        return frame(kind, echo=echo)
    if kind == Message.STOP:
        _stop(daemon, _FRAME.unpack_from(message.body)[9])
        return frame(kind, echo=echo)
    if kind == Message.ADVANCE:
        at_ns = _FRAME.unpack_from(message.body)[10]
        if daemon.advance_to(at_ns, message):
            return None
        now_ns = int(daemon.arena.header.now_ns)
        return frame(kind, WireError.CLOCK, detail=(now_ns, at_ns % 2**64), echo=echo)
    if kind == Message.NAMESPACE:
        error, detail, now = daemon.arena.set_namespace(message.body[_FRAME.size :], message.uid)
        return frame(kind, error, detail=detail, echo=echo) + (b"" if error else now)
    if kind == Message.BULK_LOAD:
        error, detail, found = daemon.arena.bulk_load(message.body[_FRAME.size :])
        count = max(0, len(found) - _BULK_LOAD_INFO_BYTES) // _BULK_LOAD_PART_BYTES
        return frame(kind, error, count, detail, echo) + found
    if kind in (Message.PUBLISH, Message.TOPIC):
        body = message.body[_FRAME.size :]
        apply = daemon.publish if kind == Message.PUBLISH else daemon.arena.set_topic
        error, detail, result = apply(body, message.uid)
        head = frame(kind, error, count=not error, detail=detail, echo=echo)
        return head + (b"" if error else result)
    if kind in (Message.SESSIONS, Message.DROP):
        return _session_command(daemon, message, kind, None)
    return frame(kind, WireError.UNKNOWN_MESSAGE, detail=(kind, 0), echo=echo)


def _session_command(daemon: Administered, message: Request, kind: int, uid: int | None) -> bytes:
    """Answer SESSIONS or DROP for the sessions of `uid`; None = all sessions."""
    echo = session, _ = echo_of(message)
    if kind == Message.SESSIONS:
        found = daemon.arena.sessions(uid)
        return frame(kind, count=len(found) // _SESSION_INFO_BYTES, echo=echo) + found
    if daemon.arena.session_grace_ns(session) is None:
        return frame(kind, WireError.SESSION_EXPIRED, detail=(session, 0), echo=echo)
    if uid is not None and session not in daemon.arena.session_ids(uid):
        return frame(kind, WireError.DENIED, detail=(uid, 0), echo=echo)
    error = WireError.NONE if daemon.drop(session) else WireError.BUSY
    return frame(kind, error, echo=echo)


def _stop(daemon: Administered, flags: int) -> None:
    if flags & FLAG_RESUME:
        daemon.resume()
    elif flags & FLAG_DRAIN:
        daemon.drain()
    else:
        daemon.stop()


def advanced(arena: Arena, message: Request) -> bytes:
    """Return the reply to the ADVANCE `message`: the last sequence of every user topic."""
    namespaces = arena.namespaces()
    parts = []
    for topic in arena.topics():
        namespace = namespaces[topic.namespace_row].name
        if is_reserved(namespace):
            continue
        ns, name = namespace.encode(), topic.name.encode()
        parts.append(_TAIL.pack(topic.sequence, topic.incarnation, len(ns), len(name)) + ns + name)
    return frame(Message.ADVANCE, count=len(parts), echo=echo_of(message)) + b"".join(parts)
