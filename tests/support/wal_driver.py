"""The WAL of a core in private memory: frames as group commit takes them, snapshots as another
process writes them, and a redo of frames and snapshots into a new core."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from core_driver import Core, Fault
from purgatory_driver import Purgatory

from purgatoryd.shm_layout._core import ffi, lib

FRAME_MAX: int = lib.PG_WAL_FRAME_MAX
HEAD_BYTES: int = ffi.sizeof("struct pg_frame_head")
SUPERSEDED: int = lib.PG_E_SUPERSEDED << 4
NIL = 0xFFFFFFFF


class Frame(NamedTuple):
    """A frame of the WAL."""

    lsn: int
    type: int
    data: bytes

    def body(self, struct: str) -> Any:
        return ffi.from_buffer(f"struct {struct} *", self.data[HEAD_BYTES:], require_writable=False)


def frames_of(data: bytes) -> Iterator[Frame]:
    """Yield the frames of a buffer that contains only complete frames."""
    at = 0
    while at < len(data):
        head = ffi.from_buffer("struct pg_frame_head *", data[at : at + HEAD_BYTES])
        yield Frame(head.lsn, head.type, data[at : at + head.bytes])
        at += head.bytes
    assert at == len(data)


def frames_until(data: bytes, kind: int) -> tuple[bytes, Frame]:
    """Return the frames before the first one of a kind, and this one."""
    before = b""
    for frame in frames_of(data):
        if frame.type == kind:
            return before, frame
        before += frame.data
    raise AssertionError(f"no frame of kind {kind}")


class Wal:
    """A WAL in memory. It takes a core's frames, and frees their space in the WAL buffer."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.data = b""
        self.position = 0
        self._out = ffi.new("uint64_t[]", FRAME_MAX // 8)
        self._upto, self._lsn = ffi.new("uint64_t *"), ffi.new("uint64_t *")

    @property
    def wal_buffer(self) -> Any:
        return lib.pg_wal_buffer_of(self.core.a)

    def take(self, out_bytes: int = FRAME_MAX, commit: bool = True) -> bytes:
        """Take all frames that were appended since the last call, and return them. Empty if the
        core has no WAL buffer."""
        taken = b""
        while self.wal_buffer:
            used = lib.pg_wal_buffer_copy(
                self.core.a, self.position, self._out, out_bytes, self._upto, self._lsn
            )
            if used == 0:
                break
            taken += bytes(ffi.buffer(self._out, used))
            self.position = self._upto[0]
        self.data += taken
        if taken and commit:
            self.wal_buffer.committed = self.position
            self.wal_buffer.committed_lsn = self._lsn[0]
        return taken


class Snapshot:
    """A snapshot that a reader takes in parts while the core continues to work."""

    def __init__(self, core: Core, *, quiet: bool = False) -> None:
        self.core = core
        self.data = b""
        self.cursor = ffi.new("struct pg_snapshot *", {"quiet": quiet})
        self._memory = ffi.new("uint8_t[]", lib.pg_handle_bytes())
        self._reader = ffi.cast("struct pg_arena *", self._memory)
        fault = ffi.new("struct pg_fault *")
        base = ffi.from_buffer(core.arena)
        size, layout_id = len(core.arena), core.header.layout_id
        if not lib.pg_attach(self._reader, base, size, ffi.NULL, 0, layout_id, fault):
            raise Fault(fault)

    @property
    def done(self) -> bool:
        return bool(self.cursor.done)

    def step(self, out_bytes: int) -> None:
        """Take as many frames as fit into `out_bytes`; if no frame fits, take only the next
        frame."""
        out = ffi.new("uint64_t[]", FRAME_MAX // 8)
        used = lib.pg_snapshot(self._reader, self.cursor, out, out_bytes)
        while used == 0 and not self.done:
            out_bytes += 64
            used = lib.pg_snapshot(self._reader, self.cursor, out, out_bytes)
        self.data += bytes(ffi.buffer(out, used))

    def finish(self) -> Snapshot:
        while not self.done:
            self.step(FRAME_MAX)
        return self


class Redo:
    """A new core, and a redo of frames into it."""

    def __init__(self, snapshot: bytes, **changes: Any) -> None:
        first = next(frames_of(snapshot)).data
        config = ffi.new("struct pg_config *")
        fault = ffi.new("struct pg_fault *")
        if not lib.pg_redo_config(ffi.from_buffer(first), len(first), config, fault):
            raise Fault(fault)
        taken = {name for name, _ in ffi.typeof("struct pg_config").fields}
        taken -= {"layout_id", "secret", "sessions", "page_size", "stream_id", "boot_id"}
        fields = {name: getattr(config, name) for name in taken}
        fields["uuid"] = bytes(config.uuid)
        self.core = Purgatory(**{**fields, "secret": (3, 4), "stream_id": 78, **changes})
        self._fault = fault
        self.begin()

    def begin(self) -> None:
        """Begin the redo again. The next frame has to be the first frame of the snapshot."""
        self.state = ffi.new("struct pg_redo *")

    def frames(self, data: bytes) -> None:
        words = ffi.new("uint64_t[]", len(data) // 8 + 1)
        ffi.memmove(words, data, len(data))
        if not lib.pg_redo(self.core.a, self.state, words, len(data), self._fault):
            raise Fault(self._fault)

    def in_pieces(self, data: bytes, rng: random.Random) -> None:
        piece = b""
        for frame in frames_of(data):
            piece += frame.data
            if rng.random() < 0.1:
                self.frames(piece)
                piece = b""
        self.frames(piece)

    def end(
        self, now_ns: int, *, real_boot_ns: int = 0, shift_ns: int = 0, wall_offset_ns: int = 0
    ) -> Purgatory:
        if not lib.pg_redo_end(
            self.core.a, self.state, now_ns, real_boot_ns, shift_ns, wall_offset_ns, self._fault
        ):
            raise Fault(self._fault)
        self.core.rebuild(now_ns)
        return self.core


def twin(core: Purgatory, now_ns: int) -> Purgatory:
    """Return a copy of a core, as if the core had crashed and been rebuilt."""
    copy = Purgatory(**core.config)
    copy.arena[:] = core.arena[:]
    copy.private[:] = core.private[:]
    copy.attach()
    copy.rebuild(now_ns)
    return copy


# ---- the whole authoritative state, except for sessions --------------------------------------


def authoritative_state(core: Purgatory) -> dict[str, Any]:
    """Return all state that has to be the same after a redo and a rebuild."""
    header = core.header
    return {
        "namespaces": dict(_namespaces(core)),
        "topics": {row: t._replace(live=0) for row, t in core.topic_rows().items()},
        "slots": dict(_slots(core)),
        "topic_settings": dict(_topic_settings(core)),
        "watermarks": dict(_watermarks(core)),
        "bulk_loads": core.bulk_loads(),
        "timestamps": dict(_timestamps(core)),
        "unsent": list(_unsent(core)),
        "tail": header.replay_tail,
        "published": header.published,
        "incarnation": header.next_incarnation,
    }


def _namespaces(core: Purgatory) -> Iterator[tuple[int, Any]]:
    rows = core.rows(lib.PG_R_NAMESPACES, "pg_namespace")
    for i in range(core.header.regions[lib.PG_R_NAMESPACES].count):
        if n := rows[i].name_len:
            quotas = (rows[i].quota_timers, rows[i].quota_bytes, rows[i].quota_ops)
            name = bytes(ffi.buffer(rows[i].name, n))
            owners = (rows[i].owner_uid, rows[i].created_uid)
            late = (rows[i].late_per_s, rows[i].paused)
            yield i, (name, rows[i].shard, owners, rows[i].durability, quotas, late)


def _topic_settings(core: Purgatory) -> Iterator[tuple[int, Any]]:
    rows = core.rows(lib.PG_R_TOPICS, "pg_topic")
    for i in range(core.header.regions[lib.PG_R_TOPICS].count):
        if rows[i].name_len:
            t = rows[i]
            yield i, (t.created_uid, t.slack_ns, t.late, t.missed, t.coalescing, t.paused)


def _uid(core: Purgatory, account: int) -> int | None:
    return core.rows(lib.PG_R_ACCOUNTS, "pg_account")[account - 1].uid if account else None


def _slots(core: Purgatory) -> Iterator[tuple[int, Any]]:
    hot, cold = core.rows(lib.PG_R_HOT, "pg_hot"), core.rows(lib.PG_R_COLD, "pg_cold")
    blobs = core.region(lib.PG_R_BLOBS)
    for slot in range(core.header.capacity + 1):
        h, c = hot[slot], cold[slot]
        if h.ctl & 0xFF != lib.PG_S_ARMED:
            continue
        at = c.blob * lib.PG_GRANULE
        ext, rest = bytes(blobs[at : at + c.ext_len]), bytes(blobs[at + c.ext_len :][:70_000])
        key, payload = rest[: c.key_len], rest[c.key_len : c.key_len + c.payload_len]
        kind = _operation(core, slot) if h.flags & lib.PG_F_OPERATION else ext
        timer = (h.ctl >> 8, h.deadline_ns, h.topic, h.flags, _uid(core, c.account))
        yield slot, (*timer, c.key_type, key, payload, kind)


def _timestamps(core: Purgatory) -> Iterator[tuple[int, Any]]:
    """Yield (ticket, timestamps) without times of the real clock, because a reboot changes the real
    clock."""
    hot, timestamps = (
        core.rows(lib.PG_R_HOT, "pg_hot"),
        core.rows(lib.PG_R_TIMESTAMPS, "pg_timestamps"),
    )
    for slot in range(core.header.regions[lib.PG_R_TIMESTAMPS].count):
        if hot[slot].ctl & 0xFF == lib.PG_S_ARMED:
            one = timestamps[slot]
            yield hot[slot].ctl >> 8, (one.add_lsn, one.session, one.armed_ns)


def _operation(core: Purgatory, slot: int) -> Any:
    op = core.operation(slot)
    records = core.rows(lib.PG_R_WATCHES, "pg_watch")
    keys, x = [], op.first_watch
    while x != NIL:
        asked = op.condition == lib.PG_C_CLIENT  # `target` depends on the session's CHECK requests
        keys.append((0 if asked else records[x].target, records[x].key_row))
        x = records[x].sibling
    space = core.rows(lib.PG_R_COLD, "pg_cold")[slot].ext_len - ffi.sizeof("struct pg_operation")
    noted = 8 * op.keys + 2 * ((op.keys + 7) // 8)  # these bytes are set when an operation ends
    extension = bytes(ffi.buffer(op + 1, space))[noted:]
    return (
        op.session, op.uid, op.threshold, op.armed_ns, op.condition, op.has_own,
        op.notice_blob != NIL, keys, extension,
    )  # fmt: skip


def _watermarks(core: Purgatory) -> Iterator[tuple[int, Any]]:
    rows = core.rows(lib.PG_R_WATERMARKS, "pg_watermark")
    keys = {ffi.cast("uintptr_t", ffi.addressof(row)): key for key, row in core.watermarks()}
    by_address = {int(address): key for address, key in keys.items()}
    for i in range(core.header.regions[lib.PG_R_WATERMARKS].count):
        row = rows[i]
        if row.key_len:
            key = by_address[int(ffi.cast("uintptr_t", ffi.addressof(row)))]
            forgotten = row.touched_s == NIL
            state = (row.watermark, row.error, forgotten, _uid(core, row.account))
            yield i, (key, row.key_type, row.namespace_row, *state)


def _unsent(core: Purgatory) -> Iterator[Any]:
    ring = core.rows(lib.PG_R_REPLAY_BUFFER, "pg_entry")
    for position in range(core.header.published, core.header.replay_tail):
        raw = ring[position % core.header.replay_capacity]
        entry = core.entry(position)._replace(superseded=False)
        yield entry, raw.meta & ~SUPERSEDED
