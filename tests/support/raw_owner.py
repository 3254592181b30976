"""An owner of operations without the client library. It sends only what a test requests."""

from __future__ import annotations

import os
from pathlib import Path

import zmq
from attacker import frame, read_frame, shake_hands
from real_daemon import PATIENCE_S, Daemon

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.layout import Condition, Message, Op, TimeKind

NAMES = wire.encode_names([(b"broker", b"")])

Record = tuple[bytes, bytes]

DELAY_NS = 10**12


def record(op: int, key: bytes, area: bytes = b"", **fields: int) -> Record:
    """Return (record with a str key, its part of the byte area)."""
    f = dict.fromkeys(
        ("mode", "time_kind", "flags", "payload_len", "ext_len", "time_ns", "value"), 0
    )
    f |= {"key_len": len(key)} | fields
    packed = wire.RECORD.pack(
        op, f["mode"], 0, f["key_len"], 0, f["time_kind"], f["flags"], f["payload_len"],
        f["ext_len"], f["time_ns"], f["value"],
    )  # fmt: skip
    return packed, key + area


def put(key: bytes, delay_ns: int) -> Record:
    return record(Op.PUT, key, time_kind=TimeKind.DELAY, time_ns=delay_ns)


def trigger(op: Op, key: bytes, value: int = 0) -> Record:
    return record(op, key, value=value)


def watching(ext: bytes, mode: int = Condition.ALL, **fields: int) -> Record:
    """Return a WATCH record with these bytes as its watch keys."""
    given = {"ext_len": len(ext), "time_kind": TimeKind.DELAY, "time_ns": DELAY_NS} | fields
    return record(Op.WATCH, b"w", ext, mode=mode, **given)


def watch(key: bytes, watched: bytes, target: int, mode: int = Condition.ALL) -> Record:
    ext = wire.encode_watch_key(watched.decode(), target)
    fields = {"time_kind": TimeKind.DELAY, "time_ns": DELAY_NS}
    return record(Op.WATCH, key, ext, mode=mode, ext_len=len(ext), **fields)


class Raw:
    """An owner of operations. It never sends a message that the test has not requested."""

    def __init__(self, demo: Daemon, grace_ns: int = 0) -> None:
        self.endpoint = demo.paths.cmd_endpoint
        self.context = zmq.Context()
        self.pushed: list[wire.Reply] = []
        self.sequence = 0
        self.connect()
        self.send(wire.encode_hello(os.urandom(16), grace_ns=grace_ns))
        self.session = self.receive(Message.HELLO).session

    def connect(self) -> None:
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, round(PATIENCE_S * 1000))
        self.socket.connect(self.endpoint)

    def reconnect(self) -> None:
        """Close the connection and open another connection, which the daemon does not know yet."""
        self.socket.close(0)
        self.pushed.clear()
        self.connect()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(0)
        self.context.term()

    def send(self, message: bytes) -> None:
        self.socket.send(message)

    def next_message(self) -> bytes:
        return self.socket.recv()

    def receive(self, kind: Message) -> wire.Reply:
        """Return the next message of a kind. Store OUTCOMES messages that arrive before it."""
        if kind == Message.OUTCOMES and self.pushed:
            return self.pushed.pop(0)
        while True:
            reply = wire.decode_reply(self.next_message())
            if reply.message == kind:
                return reply
            assert reply.message == Message.OUTCOMES, reply
            self.pushed.append(reply)

    def send_batch(self, *records: Record, session: int = 0) -> None:
        self.send(self.encode_batch(*records, session=session))

    def encode_batch(self, *records: Record, session: int = 0) -> bytes:
        """Return the next batch as bytes."""
        self.sequence += 1
        head = wire.encode_frame(
            Message.BATCH, session or self.session, self.sequence, count=len(records), names=1,
            names_bytes=len(NAMES),
        )  # fmt: skip
        return head + NAMES + b"".join(r for r, _ in records) + b"".join(b for _, b in records)

    def results(self) -> list[tuple[int, int]]:
        """Return (status, number of ended operations or deadline) for each record of the next
        answer."""
        reply = self.receive(Message.BATCH)
        assert reply.error == 0, reply
        return [(word & 0xFF, value) for word, value in wire.decode_results(reply.body)]

    def batch(self, *records: Record) -> list[tuple[int, int]]:
        self.send_batch(*records)
        return self.results()

    def outcomes(self) -> list[wire.RawOutcome]:
        """Return the outcomes in the next OUTCOMES message of the daemon."""
        reply = self.receive(Message.OUTCOMES)
        assert reply.session == self.session
        return wire.decode_outcomes(reply.body, reply.records)

    def acknowledge(self, outcomes: list[wire.RawOutcome], session: int = 0) -> None:
        acks = b"".join(wire.ACK.pack(raw.ticket, raw.version, raw.slot) for raw in outcomes)
        self.send(wire.encode_acks(session or self.session, acks))

    def ping(self, session: int | None = None) -> wire.Reply:
        """Send a PING. Its answer shows that the daemon has handled all earlier messages."""
        self.send(wire.encode_frame(Message.PING, self.session if session is None else session))
        return self.receive(Message.PING)


class RawUnbuffered(Raw):
    """A Raw without libzmq, which sends later, from a thread of its own. When send() returns, the
    kernel has the whole message."""

    def connect(self) -> None:
        self.connection = shake_hands(Path(self.endpoint.removeprefix("ipc://")))

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.context.term()

    def send(self, message: bytes) -> None:
        self.connection.sendall(frame(message))

    def next_message(self) -> bytes:
        return read_frame(self.connection)
