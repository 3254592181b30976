"""A client of a core in private memory, and functions that encode the records of its batches."""

from __future__ import annotations

from core_driver import Core

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.layout import Message, Op, PutMode, Status, TimeKind, WireError

SECOND_NS = 10**9

NONCE = bytes(range(16))

Record = tuple[bytes, bytes, bytes]  # header, key, payload


def put(
    key: bytes = b"k", payload: bytes = b"", *, delay_ns: int = SECOND_NS, name: int = 0,
    mode: int = PutMode.ERROR, kind: int = TimeKind.DELAY, key_type: int = 0,
) -> Record:  # fmt: skip
    head = wire.RECORD.pack(
        Op.PUT, mode, key_type, len(key), name, kind, 0, len(payload), 0, delay_ns, 0
    )
    return head, key, payload


def cancel(key: bytes = b"k", *, ticket: int = 0, name: int = 0) -> Record:
    return wire.RECORD.pack(Op.CANCEL, 0, 0, len(key), name, 0, 0, 0, 0, 0, ticket), key, b""


def get(key: bytes = b"k", *, name: int = 0) -> Record:
    return wire.RECORD.pack(Op.GET, 0, 0, len(key), name, 0, 0, 0, 0, 0, 0), key, b""


def message(
    kind: int, session: int, sequence: int, records: list[Record],
    names: list[tuple[bytes, bytes]], at_ns: int | None = None,
) -> bytes:  # fmt: skip
    table = wire.encode_names(names)
    head = wire.encode_frame(
        kind, session, sequence, count=len(records), names=len(names), names_bytes=len(table),
        at_ns=at_ns,
    )  # fmt: skip
    area = b"".join(key + payload for _, key, payload in records)
    return head + table + b"".join(r[0] for r in records) + area


class Peer:
    """One client of one arena."""

    def __init__(self, core: Core, nonce: bytes = NONCE, uid: int = 1000) -> None:
        self.core, self.uid, self.nonce = core, uid, nonce
        self.now_ns = 0
        self.sequence = 0
        self.session = self.hello().session

    def ask(self, data: bytes) -> wire.Reply:
        reply = self.core.handle(data, uid=self.uid, real_boot_ns=self.now_ns)
        assert isinstance(reply, wire.Reply)
        return reply

    def hello(self) -> wire.Welcome:
        reply = self.ask(wire.encode_hello(self.nonce))
        assert reply.error == 0
        return wire.decode_welcome(reply.body)

    def encode(
        self, *records: Record, sequence: int | None = None, kind: int = Message.BATCH,
        names: list[tuple[bytes, bytes]] | None = None, at_ns: int | None = None,
    ) -> bytes:  # fmt: skip
        return message(
            kind, self.session, self.sequence + 1 if sequence is None else sequence,
            list(records), names or [(b"n", b"t")], at_ns,
        )  # fmt: skip

    def batch(
        self, *records: Record, names: list[tuple[bytes, bytes]] | None = None
    ) -> list[tuple[Status, int]]:
        """Send the next batch; return (status, ticket) of each record."""
        reply = self.ask(self.encode(*records, names=names))
        self.sequence += 1
        return statuses(reply)


def statuses(reply: wire.Reply) -> list[tuple[Status, int]]:
    assert reply.error == 0, (WireError(reply.error), reply.detail)
    wire.check_results(reply.body, reply.records)
    return [(Status(word & 0xFF), word >> 8) for word, _ in wire.decode_results(reply.body)]
