"""The C core in private memory: one arena, one handle, and one clock that the test moves."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, NamedTuple

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import LAYOUT_ID, MESSAGE_MAX, PutMode, Status, TimeKind

NIL = 0xFFFFFFFF
FOREVER_NS = 2**63 - 1
PLENTY = 1 << 20

DEFAULTS: dict[str, Any] = {
    "capacity": 16,
    "replay_capacity": 16,
    "replay_bytes_max": 1 << 16,
    "payload_bytes": 1 << 16,
    "tick_ns": 1_000_000,
    "fanout": 20,
    "namespaces": 4,
    "topics": 8,
    "sessions": 1,
    "watches": 64,
    "watermarks": 32,
    "watermark_ttl_ns": 600 * 10**9,
    "inbox_max": 64,
    "now_ns": 0,
    "wall_offset_ns": 0,
    "stream_id": 77,
    "secret": (1, 2),
    "uuid": bytes(range(16)),
    "clock_kind": lib.PG_CLOCK_VIRTUAL,
    "shards": 1,
}

# Regions with derived state, which a rebuild restores.
DERIVED = (
    lib.PG_R_FREE_SLOTS, lib.PG_R_WHEEL, lib.PG_R_BUCKETS, lib.PG_R_CHUNKS,
    lib.PG_R_FREE_CHUNKS, lib.PG_R_INDEX, lib.PG_R_BLOB_HEAP, lib.PG_R_BLOB_MAP,
    lib.PG_R_NAME_INDEX, lib.PG_R_WATERMARK_INDEX, lib.PG_R_BULK_LOAD_INDEX,
    lib.PG_R_BACKLOGS,
)  # fmt: skip


class Fault(Exception):
    """A broken invariant or a lack of space that the core reports."""

    def __init__(self, fault: Any) -> None:
        self.part = ffi.string(fault.part).decode()
        self.detail = ffi.string(fault.detail).decode()
        self.where, self.expected, self.found = fault.where, fault.expected, fault.found
        super().__init__(
            f"{self.part}: {self.detail} at {self.where}: "
            f"expected {self.expected}, found {self.found}"
        )


class Answer(NamedTuple):
    """The fields of struct pg_result."""

    ticket: int
    status: Status
    deadline_ns: int


class Entry(NamedTuple):
    """An entry of the replay buffer, with its namespace, topic, key and payload."""

    position: int
    ticket: int
    cause: int
    deadline_ns: int
    fired_ns: int
    sequence: int
    previous: int
    namespace: bytes
    topic: bytes
    key_type: int
    key: bytes
    payload: bytes
    superseded: bool


class Part(NamedTuple):
    """One notice message."""

    namespace: str
    topic: str
    head: wire.NoticeHead
    notices: list[wire.RawNotice]


class Row(NamedTuple):
    """A row of the topic table."""

    namespace: bytes
    topic: bytes
    incarnation: int
    sequence: int
    live: int


def split_infos(data: bytes) -> list[wire.Info]:
    """Decode all struct pg_info in `data`, each with the bytes behind it."""
    infos: list[wire.Info] = []
    at = 0
    while at < len(data):
        end = at + wire.info_bytes(data, at)
        infos += wire.decode_infos(data[at:end], 1)
        at = end
    return infos


def config_struct(**changes: Any) -> Any:
    """Return a struct pg_config with DEFAULTS, except for these changes."""
    return ffi.new("struct pg_config *", {"layout_id": LAYOUT_ID, **DEFAULTS, **changes})


class BulkLoadRecord(NamedTuple):
    """A bulk load as the arena stores it."""

    fencing_token: int
    state: int
    uid: int
    namespace_row: int
    rows: frozenset[int]


class Core:
    """A private arena; `config` overrides DEFAULTS."""

    def __init__(self, **config: Any) -> None:
        self.config = {**DEFAULTS, **config}
        struct = config_struct(**config)
        self.arena = mmap.mmap(-1, lib.pg_arena_bytes(struct))
        self.private = mmap.mmap(-1, lib.pg_private_bytes(struct))
        self._base = ffi.from_buffer(self.arena)
        self._secret = ffi.from_buffer(self.private)
        self._fault = ffi.new("struct pg_fault *")
        self._result = ffi.new("struct pg_result *")
        self._out = bytearray(1 << 20)
        self._reply = bytearray(MESSAGE_MAX)
        self.newest_reply = b""
        self.handle_memory = bytearray(lib.pg_handle_bytes())
        self.a = ffi.cast("struct pg_arena *", ffi.from_buffer(self.handle_memory))
        assert lib.pg_create(self.a, self._base, self._secret, struct) == 1

    def _need(self, done: int) -> None:
        if not done:
            raise Fault(self._fault)

    @property
    def header(self) -> Any:
        return ffi.cast("struct pg_header *", self._base)

    @property
    def secret(self) -> Any:
        """Return the struct pg_private."""
        return ffi.cast("struct pg_private *", self._secret)

    @property
    def metrics(self) -> Any:
        return lib.pg_metrics_of(self.a)

    def region(self, region: int) -> memoryview:
        """Return the bytes of one region."""
        r = self.header.regions[region]
        return memoryview(self.arena)[r.offset : r.offset + r.length]

    def rows(self, region: int, struct: str) -> Any:
        """Return a region as an array of a struct."""
        return ffi.cast(f"struct {struct} *", self._base + self.header.regions[region].offset)

    def rows_of_sessions(self) -> Any:
        """Return the array of struct pg_session."""
        return ffi.cast("struct pg_session *", self._secret + self.secret.rows_offset)

    # ---- lifecycle ----

    def attach(
        self,
        *,
        arena_bytes: int | None = None,
        private_bytes: int | None = None,
        layout_id: int = LAYOUT_ID,
        reader: bool = False,
    ) -> None:
        """Attach the handle again to the same bytes, as a new daemon or a reader does."""
        done = lib.pg_attach(
            self.a, self._base, len(self.arena) if arena_bytes is None else arena_bytes,
            ffi.NULL if reader else self._secret,
            len(self.private) if private_bytes is None else private_bytes,
            layout_id, self._fault,
        )  # fmt: skip
        self._need(done)

    def rebuild(self, now_ns: int) -> None:
        self._need(lib.pg_rebuild(self.a, now_ns, self._fault))

    def migrated(self, **changes: Any) -> Core:
        """Return a new arena with other sizes and the same contents."""
        to = Core(**{**self.config, **changes})
        if not lib.pg_migrate(to.a, self.a, to._fault):
            raise Fault(to._fault)
        return to

    def check(self) -> None:
        self._need(lib.pg_check(self.a, self._fault))
        self._need(lib.pg_check_live(self.a, self._fault))

    # ---- owners and quotas ----

    def set_namespace(self, namespace: bytes, **changes: int) -> wire.NamespaceSettings:
        """Change settings of a namespace, as an admin's NAMESPACE message does."""
        request = wire.encode_namespace_set(1, namespace, changes)
        error, _, now = self.set_namespace_raw(request[wire.FRAME.size :])
        assert error == 0
        return wire.decode_namespace_set(now)

    def set_namespace_raw(self, body: bytes, uid: int = 0) -> tuple[int, tuple[int, int], bytes]:
        """Call pg_set_namespace with any bytes as the body. Return (error, the two numbers that
        explain the error, settings)."""
        now, detail = ffi.new("struct pg_namespace_set *"), ffi.new("uint64_t[2]")
        error = lib.pg_set_namespace(self.a, ffi.from_buffer(body), len(body), uid, now, detail)
        return error, (detail[0], detail[1]), bytes(ffi.buffer(now))

    def set_topic(self, body: bytes, uid: int = 0) -> tuple[int, Answer]:
        """Apply the body of a TOPIC message. Return (error, answer)."""
        detail = ffi.new("uint64_t[2]")
        error = lib.pg_set_topic(
            self.a, ffi.from_buffer(body), len(body), uid, self._result, detail
        )
        return error, self._answer()

    def set_quotas(self, timers: int = 0, bytes_: int = 0, ops: int = 0) -> None:
        """Set the quotas of every uid."""
        lib.pg_set_quotas(self.a, timers, bytes_, ops)

    def set_uid_share(self, percent: int, own_uid: int = 0) -> None:
        """Set the percentage of topics, namespaces, sessions, watch keys and watch records that one
        uid may have."""
        lib.pg_set_uid_share(self.a, percent, own_uid)

    # ---- commands ----

    def _record(
        self, namespace: bytes, topic: bytes, key: wire.Key, payload: bytes = b"",
        mode: int = 0, kind: int = 0, time_ns: int = 0, slack: int = 0,
    ) -> tuple[Any, list[Any]]:  # fmt: skip
        key_type, data = wire.encode_key(key)
        keep = [ffi.from_buffer(b) for b in (namespace, topic, data, payload)]
        struct = ffi.new("struct pg_put *", {
            "namespace_name": keep[0], "topic_name": keep[1],
            "key": ffi.cast("uint8_t *", keep[2]), "payload": ffi.cast("uint8_t *", keep[3]),
            "payload_len": len(payload), "namespace_len": len(namespace),
            "topic_len": len(topic), "key_len": len(data), "key_type": key_type,
            "mode": mode, "time_kind": kind, "time_ns": time_ns, "slack": slack,
        })  # fmt: skip
        return struct, keep

    def _answer(self) -> Answer:
        word = self._result.ticket
        return Answer(word >> 8, Status(word & 0xFF), self._result.deadline_ns)

    def put(
        self, key: wire.Key, time_ns: int, kind: int = TimeKind.DELAY, *,
        mode: int = PutMode.ERROR, payload: bytes = b"", namespace: bytes = b"n",
        topic: bytes = b"t", slack: int = 0,
    ) -> Answer:  # fmt: skip
        struct, _keep = self._record(namespace, topic, key, payload, mode, kind, time_ns, slack)
        lib.pg_put(self.a, struct, self._result)
        return self._answer()

    def cancel(self, key: wire.Key, namespace: bytes = b"n", ticket: int = 0) -> Answer:
        struct, _keep = self._record(namespace, b"", key)
        lib.pg_cancel(self.a, struct, ticket, self._result)
        return self._answer()

    def get(self, key: wire.Key, namespace: bytes = b"n") -> wire.Info:
        struct, _keep = self._record(namespace, b"", key)
        used = lib.pg_get(self.a, struct, ffi.from_buffer(self._out), len(self._out))
        return wire.decode_infos(bytes(self._out[:used]), 1)[0]

    def handle(
        self, message: bytes, *, uid: int = 1000, pid: int = 1, real_boot_ns: int = 0
    ) -> wire.Reply | int:
        """Handle a message. Return the reply, or the virtual time to which the clock has to advance
        first."""
        used, wait = ffi.new("uint64_t *"), ffi.new("int64_t *")
        state = lib.pg_handle(
            self.a, ffi.from_buffer(message), len(message), uid, pid, real_boot_ns, real_boot_ns,
            ffi.from_buffer(self._reply), used, wait,
        )  # fmt: skip
        if state == lib.PG_H_WAIT:
            return int(wait[0])
        self.newest_reply = bytes(self._reply[: used[0]])
        return wire.decode_reply(self.newest_reply)

    # ---- time ----

    def advance(
        self, now_ns: int, *, wall_offset_ns: int | None = None, budget: int = PLENTY
    ) -> bool:
        """Fire timers that are due, at most `budget`. Return whether due work is left."""
        more = ffi.new("int *")
        offset = self.header.wall_offset_ns if wall_offset_ns is None else wall_offset_ns
        done = lib.pg_advance(self.a, now_ns, offset, now_ns, budget, more)
        assert done <= budget
        return bool(more[0])

    @property
    def next_ns(self) -> int:
        return int(lib.pg_next_ns(self.a))

    # ---- notices ----

    def notices(self, out_bytes: int = 1 << 20, parts_max: int = 64) -> tuple[list[Part], int]:
        """Return (messages with unsent notices, position behind the last notice in them)."""
        parts, upto = ffi.new("struct pg_part[]", parts_max), ffi.new("uint64_t *")
        count = lib.pg_notices(
            self.a, ffi.from_buffer(self._out), out_bytes, parts, parts_max, upto
        )
        return [self._part(parts[i]) for i in range(count)], int(upto[0])

    def _part(self, part: Any) -> Part:
        assert part.body % 8 == 0
        subject = bytes(self._out[part.subject : part.subject + part.subject_bytes])
        body = bytes(self._out[part.body : part.body + part.body_bytes])
        head = wire.decode_notice_head(body)
        return Part(
            *wire.decode_topic_frame(subject), head, wire.decode_notices(body, head.records)
        )

    def tail_heartbeats(self, since_boot_ns: int, parts_max: int = 64) -> list[Part]:
        cursor, parts = ffi.new("uint32_t *"), ffi.new("struct pg_part[]", parts_max)
        found: list[Part] = []
        while count := lib.pg_tail_heartbeats(
            self.a, since_boot_ns, cursor, ffi.from_buffer(self._out), len(self._out), parts,
            parts_max,
        ):  # fmt: skip
            found += [self._part(parts[i]) for i in range(count)]
        return found

    def published(self, upto: int) -> None:
        lib.pg_published(self.a, upto, 0, 0)

    def publish_all(self) -> list[Part]:
        """Publish all notices. Return the messages."""
        parts: list[Part] = []
        while self.header.published < self.header.replay_tail:
            some, upto = self.notices()
            parts += some
            self.published(upto)
        return parts

    def entries(self) -> Iterator[Entry]:
        """Yield the entries of the replay buffer, the oldest first, as they are stored in the
        arena."""
        for position in range(self.header.replay_head, self.header.replay_tail):
            yield self.entry(position)

    def entry(self, position: int) -> Entry:
        ring = self.rows(lib.PG_R_REPLAY_BUFFER, "pg_entry")
        e = ring[position % self.header.replay_capacity]
        assert e.commit == position + 1
        blob = self.region(lib.PG_R_BLOBS)[e.blob * lib.PG_GRANULE :]
        row = self.topic_row(e.topic)
        return Entry(
            position, e.ticket >> 8, e.ticket & 0xFF, e.deadline_ns, e.fired_ns, e.sequence,
            position + 1 - e.back if e.back else 0, row.namespace, row.topic, e.meta & 7,
            bytes(blob[: e.key_len]), bytes(blob[e.key_len : e.key_len + e.payload_len]),
            bool(e.meta >> 4 & lib.PG_E_SUPERSEDED),
        )  # fmt: skip

    # ---- names ----

    def topic_row(self, row: int) -> Row:
        t = self.rows(lib.PG_R_TOPICS, "pg_topic")[row]
        ns = self.rows(lib.PG_R_NAMESPACES, "pg_namespace")[t.namespace_row]
        return Row(
            bytes(ffi.buffer(ns.name, ns.name_len)), bytes(ffi.buffer(t.name, t.name_len - 1)),
            t.incarnation, t.sequence, t.live,
        )  # fmt: skip

    def topic_rows(self) -> dict[int, Row]:
        """Return the used rows of the topic table, by row index."""
        table = self.rows(lib.PG_R_TOPICS, "pg_topic")
        used = (i for i in range(self.config["topics"]) if table[i].name_len)
        return {i: self.topic_row(i) for i in used}

    # ---- bulk loads ----

    def bulk_loads(self) -> dict[bytes, BulkLoadRecord]:
        """Return the bulk loads that the arena remembers, by id."""
        rows = self.rows(lib.PG_R_BULK_LOADS, "pg_bulk_load")
        table = range(self.header.regions[lib.PG_R_BULK_LOADS].count)
        return {
            bytes(rows[i].id): BulkLoadRecord(
                rows[i].fencing_token, rows[i].state, rows[i].uid, rows[i].namespace_row,
                frozenset(self._rows_done(i)),
            )
            for i in table if rows[i].state
        }  # fmt: skip

    def _rows_done(self, bulk_load: int) -> Iterator[int]:
        blocks = self.rows(lib.PG_R_BULK_LOAD_BLOCKS, "pg_bulk_load_block")
        bits, size = self.region(lib.PG_R_BULK_LOAD_BITS), lib.PG_BULK_LOAD_BLOCK_ROWS // 8
        for block in range(self.header.regions[lib.PG_R_BULK_LOAD_BLOCKS].count):
            if blocks[block].bulk_load != bulk_load + 1:
                continue
            word = int.from_bytes(bits[block * size : (block + 1) * size], "little")
            first = blocks[block].number * lib.PG_BULK_LOAD_BLOCK_ROWS
            while word:
                yield first + (word & -word).bit_length() - 1
                word &= word - 1

    # ---- readers ----

    def scan(self, at_most: int = 4096, out_bytes: int = 1 << 20) -> list[wire.Info]:
        cursor, infos = ffi.new("uint32_t *"), list[wire.Info]()
        while cursor[0] < self.header.capacity + 1:
            used = lib.pg_scan(self.a, cursor, at_most, ffi.from_buffer(self._out), out_bytes)
            infos += split_infos(bytes(self._out[:used]))
        return infos

    def replay(
        self, namespace: bytes, topic: bytes, first: int, last: int, out_bytes: int = 1 << 20
    ) -> tuple[int, int, list[wire.RawNotice]]:
        """Replay a range of sequences with one call. Return (highest sequence that has left the
        buffer, highest sequence among the notices, notices)."""
        ns = lib.pg_find_namespace(self.a, namespace, len(namespace))
        row = lib.pg_find_topic(self.a, ns, topic, len(topic))
        assert row != NIL
        positions = ffi.new("uint64_t[]", last - first + 1)
        lost, got = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        used = lib.pg_replay(
            self.a, row, first, last, positions, ffi.from_buffer(self._out), out_bytes, lost, got
        )
        if used == 0:
            return int(lost[0]), int(got[0]), []
        body = bytes(self._out[:used])
        head = wire.decode_notice_head(body)
        assert head.first == lost[0] + 1
        assert head.records == got[0] - lost[0]
        return int(lost[0]), int(got[0]), wire.decode_notices(body, head.records)

    # ---- memory ----

    def image(self) -> tuple[bytes, bytes]:
        """Return the bytes of (arena, private file), without the counters and histograms in the
        arena."""
        first, last = (self.header.regions[r] for r in (lib.PG_R_METRICS, lib.PG_R_HISTOGRAMS))
        before, after = first.offset, last.offset + last.length
        return self.arena[:before] + self.arena[after:], bytes(self.private[:])

    def free_runs(self) -> list[int]:
        """Return the lengths, in granules, of the free ranges between used granules of payload
        memory."""
        granules = self.header.regions[lib.PG_R_BLOBS].count
        bits = int.from_bytes(self.region(lib.PG_R_BLOB_MAP), "little")
        text = format(bits, "b").zfill(granules)[::-1][:granules]
        return [len(run) for run in text.split("1")]
