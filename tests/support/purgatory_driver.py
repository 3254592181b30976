"""The purgatory in private memory: sessions that send batches, read inboxes and acknowledge
outcomes."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from core_driver import DERIVED, Core, Fault

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import MESSAGE_MAX, Message, struct_format

ALL, ANY, SUM, CLIENT = lib.PG_C_ALL, lib.PG_C_ANY, lib.PG_C_SUM, lib.PG_C_CLIENT
QUORUM = lib.PG_C_QUORUM
BASE_NOW = 2**64 - 1
"""As `target` of a SUM's key: count from the watermark at the time of arming."""

NAMES = [(b"n", b"t"), (b"other", b"t")]
UID = 1000
WATCH_KEY = struct.Struct(struct_format("pg_watch_key"))
OUTCOME = struct.Struct(struct_format("pg_outcome"))
ACK = struct.Struct(struct_format("pg_ack"))
VERDICT = struct.Struct(struct_format("pg_verdict"))
EXTRA = struct.Struct("<II")

DEFAULTS: dict[str, Any] = {
    "capacity": 64,
    "replay_capacity": 16,
    "replay_bytes_max": 1 << 16,
    "payload_bytes": 1 << 18,
    "sessions": 3,
    "watches": 128,
    "watermarks": 32,
    "watermark_ttl_ns": 2 * 10**9,
    "inbox_max": 1 << 20,
}


class Key(NamedTuple):
    """A watch key of an operation. `target`: for a SUM, the watermark from which the key's share is
    counted. `cap`: for a SUM, the limit of that share."""

    name: bytes
    target: int
    cap: int = 0
    own: bool = False


class Command(NamedTuple):
    """A record, and the bytes that it adds to the byte area of a batch."""

    record: bytes
    area: bytes


class Answer(NamedTuple):
    """The fields of struct pg_result."""

    status: int
    ended: int  # number of ended operations, or the deadline
    ticket: int


class Mail(NamedTuple):
    """One record of an OUTCOMES message. If the cause is 0, the record is a CHECK."""

    ticket: int
    cause: int
    key: bytes
    payload: bytes
    watermarks: tuple[int, ...]
    missing: frozenset[int]
    failed: frozenset[int]
    deadline_ns: int
    armed_ns: int
    ended_ns: int
    error: int
    version: int
    slot: int

    def ack(self) -> bytes:
        return ACK.pack(self.ticket, self.version, self.slot)


class Verdict(NamedTuple):
    """The notice of an ended operation."""

    ticket: int
    cause: int
    key: bytes
    payload: bytes
    missing: frozenset[int]
    error: int
    elapsed_ns: int


def bits(bitmap: bytes) -> frozenset[int]:
    word = int.from_bytes(bitmap, "little")
    return frozenset(n for n in range(len(bitmap) * 8) if word >> n & 1)


def command(
    op: int, key: bytes, *, mode: int = 0, time_ns: int = 0, value: int = 0, payload: bytes = b"",
    extension: bytes = b"", flags: int = 0, name: int = 0,
) -> Command:  # fmt: skip
    kind = lib.PG_T_DELAY if op in (lib.PG_OP_WATCH, lib.PG_OP_PUT) else 0
    record = wire.RECORD.pack(
        op, mode, lib.PG_KEY_BYTES, len(key), name, kind, flags, len(payload), len(extension),
        time_ns, value,
    )  # fmt: skip
    return Command(record, key + payload + extension)


def watch_keys(keys: Sequence[Key]) -> bytes:
    return b"".join(
        WATCH_KEY.pack(k.target, k.cap, len(k.name), lib.PG_KEY_BYTES, k.own) + k.name for k in keys
    )


def watch(
    key: bytes, condition: int, keys: Sequence[Key], delay_ns: int = 10**9, *, threshold: int = 0,
    payload: bytes = b"", notice: bool = False, name: int = 0,
) -> Command:  # fmt: skip
    return command(
        lib.PG_OP_WATCH, key, mode=condition, time_ns=delay_ns, value=threshold,
        payload=payload, extension=watch_keys(keys), flags=int(notice), name=name,
    )  # fmt: skip


def advance(key: bytes, watermark: int, name: int = 0) -> Command:
    return command(lib.PG_OP_ADVANCE_KEY, key, value=watermark, name=name)


def bump(key: bytes, by: int) -> Command:
    return command(lib.PG_OP_BUMP, key, value=by)


def fail(key: bytes, code: int) -> Command:
    return command(lib.PG_OP_FAIL, key, value=code)


def clear(key: bytes) -> Command:
    return command(lib.PG_OP_CLEAR, key)


def forget(key: bytes, name: int = 0) -> Command:
    return command(lib.PG_OP_FORGET, key, name=name)


def cancel(key: bytes, ticket: int = 0, name: int = 0) -> Command:
    return command(lib.PG_OP_CANCEL, key, value=ticket, name=name)


def cancel_for_key(key: bytes) -> Command:
    return command(lib.PG_OP_CANCEL_FOR_KEY, key)


def complete(key: bytes, version: int) -> Command:
    return command(lib.PG_OP_COMPLETE, key, value=version)


def put(
    key: bytes, delay_ns: int, mode: int = 0, *, payload: bytes = b"", name: int = 0,
    items: bytes = b"",
) -> Command:  # fmt: skip
    return command(
        lib.PG_OP_PUT, key, mode=mode, time_ns=delay_ns, payload=payload, extension=items, name=name
    )


def extend(key: bytes, delay_ns: int, ticket: int) -> Command:
    return command(lib.PG_OP_PUT, key, mode=lib.PG_MODE_EXTEND, time_ns=delay_ns, value=ticket)


class Reply(NamedTuple):
    answers: list[Answer]
    ended: dict[int, list[bytes]]  # by record index: operations that a CANCEL_FOR_KEY ended
    data: bytes


def split_ended(data: bytes) -> dict[int, list[bytes]]:
    ended: dict[int, list[bytes]] = {}
    at = 0
    while at < len(data):
        record, length = EXTRA.unpack_from(data, at)
        at, end = at + EXTRA.size, at + EXTRA.size + length
        keys = ended.setdefault(record, [])
        while at < end:
            assert data[at] == lib.PG_KEY_BYTES
            keys.append(data[at + 2 : at + 2 + data[at + 1]])
            at += 2 + data[at + 1]
        assert at == end
    return ended


class Purgatory(Core):
    """A core with watch keys. Its virtual clock is also its real clock."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**{**DEFAULTS, **config})
        self._mail = ffi.new("uint8_t[]", 1 << 20)
        self._cursor = ffi.new("uint32_t *")

    def migrated(self, **changes: Any) -> Purgatory:
        to = Purgatory(**{**self.config, **changes})
        if not lib.pg_migrate(to.a, self.a, to._fault):
            raise Fault(to._fault)
        return to

    @property
    def now_ns(self) -> int:
        return int(self.header.now_ns)

    def restart(self) -> None:
        """Restart as after kill -9, with garbage in all derived state."""
        for region in DERIVED:
            view = self.region(region)
            view[:] = b"\xa5" * len(view)
        self.attach()
        self.rebuild(self.now_ns)
        self.check()

    @property
    def pool(self) -> Any:
        """Return the struct pg_purgatory."""
        return self.rows(lib.PG_R_PURGATORY, "pg_purgatory")[0]

    def once(self, message: bytes, uid: int = UID) -> bytes | None:
        """Handle a message. Return the reply; None = send the same message again."""
        used, wait = ffi.new("uint64_t *"), ffi.new("int64_t *")
        state = lib.pg_handle(
            self.a, ffi.from_buffer(message), len(message), uid, 1, self.now_ns, self.now_ns,
            ffi.from_buffer(self._reply), used, wait,
        )  # fmt: skip
        if state == lib.PG_H_AGAIN:
            return None
        assert state in (lib.PG_H_REPLY, lib.PG_H_SILENT)
        return bytes(self._reply[: used[0]])

    def send(
        self, message: bytes, between: Callable[[], object] | None = None, uid: int = UID
    ) -> bytes:
        """Send a message until the core replies. Return the reply. `between` runs before each
        repetition."""
        for _ in range(10_000):
            reply = self.once(message, uid)
            if reply is not None:
                return reply
            (between or self.publish_all)()
        raise AssertionError("the core asked for the same message 10,000 times")

    def sweep(self) -> None:
        lib.pg_sweep(self.a, self.now_ns, self._cursor, self.config["watermarks"])

    def mail(self, size: int = 1 << 20) -> dict[int, list[Mail]]:
        """Return all outcomes that the core has not sent yet, by session. mail_again() makes the
        core send them again."""
        found: dict[int, list[Mail]] = {}
        session = ffi.new("uint64_t *")
        while used := lib.pg_inbox(self.a, session, self._mail, size):
            message = bytes(ffi.buffer(self._mail, used))
            found.setdefault(session[0], []).extend(split_mail(message, session[0]))
        return found

    def mail_again(self, session: int = 0) -> None:
        sessions = [session] if session else [*self.rows_of_sessions()]
        for one in sessions:
            lib.pg_inbox_to(self.a, one)

    def verdicts(self, since: int) -> Iterator[Verdict]:
        """Yield the notices of operations in the replay buffer, beginning at position `since`."""
        for position in range(since, self.header.replay_tail):
            entry = self.entry(position)
            flags = (
                self.rows(lib.PG_R_REPLAY_BUFFER, "pg_entry")[
                    position % self.header.replay_capacity
                ].meta
                >> 4
            )
            if not flags & lib.PG_E_OPERATION:
                continue
            elapsed_ns, error, keys, bitmap = VERDICT.unpack_from(entry.payload)
            assert bitmap == (keys + 7) // 8
            rest = entry.payload[VERDICT.size :]
            yield Verdict(
                entry.ticket, entry.cause, entry.key, rest[bitmap:], bits(rest[:bitmap]), error,
                elapsed_ns,
            )  # fmt: skip

    # ---- contents of the arena ----

    def operation(self, slot: int) -> Any:
        """Return the struct pg_operation of a slot that contains an operation."""
        blob = self.rows(lib.PG_R_COLD, "pg_cold")[slot].blob
        at = self._base + self.header.regions[lib.PG_R_BLOBS].offset + blob * lib.PG_GRANULE
        return ffi.cast("struct pg_operation *", at)

    def operations(self) -> list[int]:
        """Return the slots of all armed and ended operations."""
        hot = self.rows(lib.PG_R_HOT, "pg_hot")
        return [
            slot for slot in range(self.header.capacity + 1)
            if hot[slot].ctl & 0xFF and hot[slot].flags & lib.PG_F_OPERATION
        ]  # fmt: skip

    def watermarks(self) -> Iterator[tuple[bytes, Any]]:
        """Yield (watch key, its row as struct pg_watermark)."""
        rows = self.rows(lib.PG_R_WATERMARKS, "pg_watermark")
        blobs = self.region(lib.PG_R_BLOBS)
        for i in range(self.config["watermarks"]):
            if length := rows[i].key_len:
                key = bytes(ffi.buffer(rows[i].key))
                if length > len(key):
                    at = int.from_bytes(key[:4], "little") * lib.PG_GRANULE
                    key = bytes(blobs[at : at + length])
                yield key[:length], rows[i]

    def rows_of_sessions(self) -> dict[int, int]:
        """Return the number of messages in the inbox of each open session, by session id."""
        rows = ffi.cast("struct pg_session *", self._secret + self.secret.rows_offset)
        all_rows = (rows[i] for i in range(self.secret.sessions))
        return {row.id: row.inbox_count for row in all_rows if row.id}

    def counts(self) -> dict[str, int]:
        """Return the counts that must have their initial values once all timers and operations are
        gone."""
        m, p = self.metrics, self.pool
        return {
            "live": m.live, "operations": m.operations, "outcomes": m.outcomes,
            "slots": int.from_bytes(self.region(lib.PG_R_FREE_SLOTS)[:4], "little"),
            "watches": p.free_watches, "watermarks": p.free_watermarks, "bytes": m.blob_bytes,
            "granules": self.rows(lib.PG_R_BLOB_HEAP, "pg_blob_heap")[0].used,
            "index": any(self.region(lib.PG_R_INDEX)),
            "watermark index": any(self.region(lib.PG_R_WATERMARK_INDEX)),
        }  # fmt: skip


def split_mail(message: bytes, session: int) -> Iterator[Mail]:
    reply = wire.decode_reply(message)
    assert (reply.message, reply.session) == (lib.PG_M_OUTCOMES, session)
    assert reply.records > 0
    at = reply.records * OUTCOME.size
    for fields in OUTCOME.iter_unpack(reply.body[:at]):
        ticket, deadline_ns, armed_ns, ended_ns, version, error = fields[:6]
        payload_len, keys, bitmap, key_len, kind, slot = fields[6:]
        assert kind == lib.PG_KEY_BYTES
        keys = keys if ticket & 0xFF else 0  # a CHECK does not list keys
        assert bitmap == (keys + 7) // 8
        sizes = (key_len, payload_len, 8 * keys, bitmap, bitmap)
        ends = list(itertools.accumulate(sizes, initial=at))
        key, payload, watermarks, missing, failed = (
            reply.body[a:b] for a, b in itertools.pairwise(ends)
        )
        at = ends[-1]
        yield Mail(
            ticket >> 8, ticket & 0xFF, key, payload, struct.unpack(f"<{keys}Q", watermarks),
            bits(missing), bits(failed), deadline_ns, armed_ns, ended_ns, error, version, slot,
        )  # fmt: skip
    assert at == len(reply.body)


class Owner:
    """An owner of operations: one session."""

    def __init__(self, core: Purgatory, nonce: int = 1, uid: int = UID) -> None:
        self.core = core
        self.uid = uid
        reply = wire.decode_reply(self._ask(wire.encode_hello(nonce.to_bytes(16, "little"))))
        assert reply.error == 0
        self.id = reply.session
        self.sequence = wire.decode_welcome(reply.body).last
        self.newest = b""
        self.behind = 0
        """Number of batches between the next batch and the oldest unanswered batch."""

    def _ask(self, message: bytes, between: Callable[[], object] | None = None) -> bytes:
        return self.core.send(message, between, self.uid)

    def message(self, commands: Sequence[Command], rows: bytes = b"") -> bytes:
        """Return the next batch as bytes. `rows`: the bulk load rows to which its records
        belong."""
        self.sequence += 1
        names = wire.encode_names(NAMES)
        self.newest = (
            wire.encode_frame(
                Message.BATCH, self.id, self.sequence, count=len(commands), names=len(NAMES),
                names_bytes=len(names), flags=lib.PG_W_BULK_LOAD * bool(rows),
                detail=(0, self.behind),
            )
            + rows + names
            + b"".join(c.record for c in commands) + b"".join(c.area for c in commands)
        )  # fmt: skip
        return self.newest

    def send(self, *commands: Command, between: Callable[[], object] | None = None) -> list[Answer]:
        return self.reply(self._ask(self.message(commands), between)).answers

    def bulk_load(self, rows: tuple[bytes, int, int], *commands: Command) -> list[Answer]:
        """Send a batch with rows of a bulk load. `rows`: (id, first row, fencing token)."""
        return self.reply(self._ask(self.message(commands, wire.ROWS.pack(*rows)))).answers

    def ask_bulk_load(self, bulk_load: bytes, action: int, **about: Any) -> wire.BulkLoadInfo:
        """Send a BULK_LOAD message. `about`: namespace, fencing_token, start."""
        reply = wire.decode_reply(
            self._ask(wire.encode_bulk_load(1, self.id, bulk_load, action, **about))
        )
        if reply.error:
            raise reply.refusal()
        return wire.decode_bulk_load(reply.body)

    def again(self) -> Reply:
        """Send the newest batch again."""
        return self.reply(self._ask(self.newest))

    def reply(self, data: bytes) -> Reply:
        reply = wire.decode_reply(data)
        if reply.error:
            raise reply.refusal()
        at = reply.records * wire.RESULT.size
        answers = [
            Answer(word & 0xFF, ended, word >> 8)
            for word, ended in wire.RESULT.iter_unpack(reply.body[:at])
        ]
        return Reply(answers, split_ended(reply.body[at:]), data)

    def ack(self, *acks: bytes) -> None:
        for first in range(0, len(acks), lib.PG_BATCH_RECORDS):
            some = acks[first : first + lib.PG_BATCH_RECORDS]
            frame = wire.encode_frame(lib.PG_M_ACK, self.id, count=len(some))
            assert self._ask(frame + b"".join(some)) == b""

    def mail(self) -> list[Mail]:
        return self.core.mail().get(self.id, [])

    def bye(self) -> None:
        self._ask(wire.encode_frame(Message.BYE, self.id))


def handle(core: Purgatory, message: bytes, now_ns: int, received_ns: int | None = None) -> int:
    """Handle a message as the daemon does. Return the core's state after the message."""
    reply, used, wait = bytearray(MESSAGE_MAX), ffi.new("uint64_t *"), ffi.new("int64_t *")
    times_ns = (now_ns if received_ns is None else received_ns, now_ns)
    bytes_in, bytes_out = ffi.from_buffer(message), ffi.from_buffer(reply)
    uid, pid = UID, 1
    state = lib.pg_handle(
        core.a, bytes_in, len(message), uid, pid, *times_ns, bytes_out, used, wait
    )
    return int(state)
