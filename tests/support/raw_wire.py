"""A client that uses only struct and pyzmq, with all formats of the wire protocol written by hand.

It shares no code with the package. So it can send messages that the client library cannot send, and
it fails if a change of the package changes the wire protocol.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import zmq

MAGIC, VERSION = 0x51434750, 1
HELLO, BATCH, QUERY, BYE, PING, ADVANCE, STOP = 1, 2, 3, 4, 5, 32, 33
PUT, CANCEL, GET = 1, 2, 3
AT_BOOT, DELAY, WALL = 0, 1, 2
MALFORMED, WRONG_VERSION, UNKNOWN_MESSAGE, TOO_LARGE, SESSION_EXPIRED = 1, 2, 3, 4, 5
OUT_OF_ORDER, STALE, CHANGED, SESSIONS_FULL, DENIED, CLOCK = 6, 7, 8, 9, 10, 12
ADDED, EXISTS, CANCELLED, FIRED, UNKNOWN, FOUND = 1, 5, 6, 7, 8, 9
FULL_TOPICS = 19
HOUR_NS = 3_600_000_000_000

_FRAME = struct.Struct("<IHHQQIHHIIqQQ")
_RECORD = struct.Struct("<BBBBHBxIIqQ")
_RESULT = struct.Struct("<Qq")
_INFO = struct.Struct("<QqqIBBBBQQIHBxI4x")
_TAIL = struct.Struct("<QQBB6x")


class Answer(NamedTuple):
    message: int
    session: int
    sequence: int
    records: int
    error: int
    detail: tuple[int, int]
    body: bytes

    @property
    def results(self) -> list[tuple[int, int, int]]:
        """Return (status, ticket, deadline_ns) of each record of a batch."""
        return [(word & 0xFF, word >> 8, at_ns) for word, at_ns in _RESULT.iter_unpack(self.body)]

    @property
    def statuses(self) -> list[int]:
        return [status for status, _, _ in self.results]

    @property
    def first_info(self) -> tuple[int, bytes]:
        """Return (status, bytes of names, key and payload) of the first record of a query."""
        return self.body[0], self.body[_INFO.size :]

    @property
    def newest_sequences(self) -> dict[tuple[bytes, bytes], int]:
        """Return, from the answer to an ADVANCE, the newest sequence of each (namespace, topic)."""
        newest, at = {}, 0
        for _ in range(self.records):
            sequence, _, n, t = _TAIL.unpack_from(self.body, at)
            names = self.body[at + _TAIL.size : at + _TAIL.size + n + t]
            newest[names[:n], names[n:]] = sequence
            at += _TAIL.size + n + t
        return newest


def frame(
    message: int, session: int = 0, sequence: int = 0, *, magic: int = MAGIC,
    version: int = VERSION, count: int = 0, names: int = 0, error: int = 0,
    names_bytes: int = 0, flags: int = 0, at_ns: int | None = None,
) -> bytes:  # fmt: skip
    """Return the 64 bytes that begin a message."""
    if at_ns is not None:
        flags |= 1
    return _FRAME.pack(
        magic, version, message, session, sequence, count, names, error, names_bytes, flags,
        at_ns or 0, 0, 0,
    )  # fmt: skip


def record(
    op: int, key_len: int, *, mode: int = 0, key_type: int = 0, name: int = 0,
    time_kind: int = 0, payload_len: int = 0, reserved: int = 0, time_ns: int = 0,
    value: int = 0,
) -> bytes:  # fmt: skip
    return _RECORD.pack(
        op, mode, key_type, key_len, name, time_kind, payload_len, reserved, time_ns, value
    )


def put(
    key: bytes, delay_ns: int = HOUR_NS, payload: bytes = b"", name: int = 0
) -> tuple[bytes, bytes]:
    """Return (record, bytes for the byte area) of an add."""
    head = record(
        PUT, len(key), name=name, time_kind=DELAY, payload_len=len(payload), time_ns=delay_ns
    )
    return head, key + payload


def cancel(key: bytes, name: int = 0) -> tuple[bytes, bytes]:
    """Return (record, bytes for the byte area) of a cancel."""
    return record(CANCEL, len(key), name=name), key


def name_table(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    table = b"".join(bytes((len(n), len(t))) + n + t for n, t in pairs)
    return table + bytes(-len(table) % 8)


NAMES = [(b"raw", b"topic")]


def batch(
    session: int, sequence: int, records: Sequence[tuple[bytes, bytes]], *,
    names: Sequence[tuple[bytes, bytes]] = NAMES, message: int = BATCH, at_ns: int | None = None,
) -> bytes:  # fmt: skip
    table = name_table(names)
    head = frame(
        message, session, sequence, count=len(records), names=len(names),
        names_bytes=len(table), at_ns=at_ns,
    )  # fmt: skip
    return head + table + b"".join(r for r, _ in records) + b"".join(b for _, b in records)


def answer(data: bytes) -> Answer:
    head = _FRAME.unpack_from(data)
    assert head[:2] == (MAGIC, VERSION)
    return Answer(head[2], head[3], head[4], head[5], head[7], (head[11], head[12]), data[64:])


class Raw:
    """One connection to a socket of the daemon."""

    def __init__(self, path: Path, patience_s: float = 30.0, kind: int = zmq.DEALER) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, round(patience_s * 1000))
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.socket.connect(f"ipc://{path}")
        self.session = 0
        self.sequence = 0

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(0)
        self._context.term()

    def send(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts)

    def receive(self) -> Answer:
        """Return the next answer. Raises zmq.Again if no answer arrives in time."""
        (data,) = self.socket.recv_multipart()
        return answer(data)

    def ask(self, *parts: bytes) -> Answer:
        self.send(*parts)
        return self.receive()

    def hello(self, nonce: bytes | None = None) -> Answer:
        """Open a session. The next batch follows the newest batch that the daemon has applied."""
        nonce = os.urandom(16) if nonce is None else nonce
        found = self.ask(frame(HELLO) + nonce + bytes(16))
        if found.error == 0:
            self.session = found.session
            # struct pg_welcome: u64 session, stream; uuid; u64 layout, epoch; i64 now, offset
            (self.sequence,) = struct.unpack_from("<Q", found.body, 64)
        return found

    def batch(
        self, *records: tuple[bytes, bytes], names: Sequence[tuple[bytes, bytes]] = NAMES,
        at_ns: int | None = None,
    ) -> Answer:  # fmt: skip
        """Send the next batch of the session."""
        self.sequence += 1
        return self.ask(batch(self.session, self.sequence, records, names=names, at_ns=at_ns))

    def query(self, key: bytes, names: Sequence[tuple[bytes, bytes]] = NAMES) -> Answer:
        records = [(record(GET, len(key)), key)]
        return self.ask(batch(self.session, 7, records, names=names, message=QUERY))
