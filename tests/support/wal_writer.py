"""Write WALs byte by byte, without the project's code, so that a test can write records that no
daemon writes.

Frames, groups, segments and snapshots have format 1.0, as in layout.h. A `Story` consists of
records, each with a type and a body. To make a WAL wrong, a test changes its story. LSNs, groups
and checksums are added when the files are written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

SEGMENT_MAGIC, SNAPSHOT_MAGIC = b"PPGWAL01", b"PPGSNAP1"
HEAD_BYTES = 4096
SALT = 0x5EED
NO_WALL = -(2**63)
NIL = 2**32 - 1
EXPIRED, SATISFIED, FAILED, CANCELLED = 1, 2, 3, 4
ALL, ANY, SUM, CLIENT, QUORUM = range(5)
BOOT, VIRTUAL = 0, 1
BORN = 1
BULK_LOAD_NONE, BULK_LOAD_OPEN = 0, 1
OPERATION = 4
MET = 2**64 - 1
S = 1_000_000_000

_FRAME = struct.Struct("<IIQIHH")  # bytes, crc, lsn, salt, type, group
_GROUP = struct.Struct("<QQqq24x")  # number, bytes, boot_ns, wall_ns, term, origin
_SEGMENT = struct.Struct("<8sII16s16sQqqQQQIII")
_KEY_TYPES = {str: 0, bytes: 1, UUID: 2}
_KINDS = (
    "pad", "group", "seal", "namespace", "topic", "arm", "move", "end", "fire", "sent", "watch",
    "watermark", "gone", "outcome", "session", "head", "entry", "last", "opened", "replied",
    "bulk_load", "done", "block", "unpark", "metrics",
)  # fmt: skip
_TYPES = {name: number for number, name in enumerate(_KINDS, 1)}


class Record(NamedTuple):
    """A frame that has no LSN yet. `kind`: a name in _TYPES."""

    kind: str
    body: bytes

    @property
    def type(self) -> int:
        return _TYPES[self.kind]


# ---- records ---------------------------------------------------------------------------------


def _key(key: str | bytes | UUID) -> tuple[int, bytes]:
    data = key.encode() if isinstance(key, str) else key.bytes if isinstance(key, UUID) else key
    return _KEY_TYPES[type(key)], data


def namespace(row: int, name: str) -> Record:
    head = struct.pack("<IIIIQQQ24xII", row, 0, NIL, 0, 0, 0, 0, 0, len(name))
    return Record("namespace", head + name.encode())


def topic(row: int, namespace_row: int, name: str, sequence: int = 0) -> Record:
    head = struct.pack("<QQQ32xIIII", row + 1, sequence, 0, row, namespace_row, 0, len(name))
    return Record("topic", head + name.encode())


def arm(
    ticket: int, key: str | bytes | UUID, deadline_ns: int, *, at_ns: int = 0,
    wall_ns: int = NO_WALL, replaced: int = 0, topic: int = 0, slot: int | None = None,
    payload: bytes = b"", bulk_load: bytes = b"", bulk_load_row: int = 0, parked: bool = False,
    slack_log2: int = 0,
) -> Record:  # fmt: skip
    kind, data = _key(key)
    row = bulk_load + struct.pack("<Q", bulk_load_row) if bulk_load else b""
    head = struct.pack(
        "<QqqqQIIIIIBBBBI16xI", ticket, deadline_ns, wall_ns, at_ns, replaced,
        ticket if slot is None else slot, replaced if replaced else NIL, topic, 1000,
        len(payload), 0, bool(bulk_load), len(data), kind, parked, slack_log2,
    )  # fmt: skip
    return Record("arm", head + row + data + payload)


def unpark(ticket: int, key: str, deadline_ns: int, *, at_ns: int = 0) -> Record:
    kind, data = _key(key)
    head = struct.pack(
        "<QqqqIIIIBBBB12x", ticket, deadline_ns, NO_WALL, at_ns, ticket, 0, 1000, 0, 0, 0,
        len(data), kind,
    )  # fmt: skip
    return Record("unpark", head + data)


def bulk_load(name: bytes, state: int, *, at_ns: int = 0) -> Record:
    return Record("bulk_load", struct.pack("<16sQqIIII", name, 1, at_ns, 0, 1000, state, 0))


def move(ticket: int, deadline_ns: int, *, at_ns: int = 0, wall_ns: int = NO_WALL) -> Record:
    return Record(
        "move", struct.pack("<QqqqIIQ", ticket, deadline_ns, wall_ns, at_ns, ticket, 0, 0)
    )


def end(
    ticket: int, *, at_ns: int = 0, acknowledged: bool = False, dropped: bool = False
) -> Record:
    cause = 3 if dropped else 2 if acknowledged else 1
    return Record("end", struct.pack("<QqIIIIQ8x", ticket, at_ns, ticket, cause, 1000, 0, 0))


def timestamps(add_lsn: int, armed_ns: int) -> bytes:
    """Return the bytes behind the record of a final state: LSN of the add, session, and times of
    the timer."""
    return struct.pack("<QQqqqqq", add_lsn, 77, 0, 0, 0, armed_ns, 0)


def fire(
    ticket: int, deadline_ns: int, fired_ns: int, *, position: int, sequence: int, topic: int = 0,
    slack_log2: int = 0,
) -> Record:  # fmt: skip
    return Record("fire", struct.pack(
        "<QqqQQQIIHHI16x", ticket, deadline_ns, fired_ns, position, sequence, 0, ticket, topic, 0,
        slack_log2, 0,
    ))  # fmt: skip


def sent(begin: int, upto: int, *, at_ns: int = 0) -> Record:
    return Record("sent", struct.pack("<QQqq8x", begin, upto, at_ns, at_ns))


class Watched(NamedTuple):
    """A watch key of an operation."""

    row: int
    target: int = 0
    base: int = 0
    cap: int = 0


def watch(
    ticket: int, key: str, deadline_ns: int, keys: Sequence[Watched], *, condition: int = ALL,
    threshold: int = 0, at_ns: int = 0, topic: int = 0, notice: bool = True,
) -> Record:  # fmt: skip
    kind, data = _key(key)
    head = struct.pack(
        "<QqqQQIIIIHBBBBBB", ticket, deadline_ns, at_ns, threshold, 77, ticket, topic, 1000, 0,
        len(keys), condition, notice, len(data), kind, 0, 0,
    )  # fmt: skip
    shares = b"".join(struct.pack("<QQQII", k.target, k.base, k.cap, k.row, 0) for k in keys)
    return Record("watch", head + shares + data)


def watermark(row: int, value: int, *, key: str = "", error: int = 0, namespace: int = 0) -> Record:
    data = key.encode()
    flags = BORN if key else 0
    head = struct.pack(
        "<QIIIHBBII", value, row, error, namespace, flags, len(data), 0, NIL, 0
    )  # fmt: skip
    return Record("watermark", head + data)


def gone(row: int) -> Record:
    return Record("gone", struct.pack("<II", row, 0))


def outcome(
    ticket: int, deadline_ns: int, ended_ns: int, cause: int, *, keys: int, position: int | None,
    sequence: int = 0, topic: int = 0, error: int = 0,
) -> Record:  # fmt: skip
    head = struct.pack(
        "<QqqQQQIIIHBB16x", ticket, deadline_ns, ended_ns,
        0 if position is None else position + 1, sequence, 0, ticket, topic, error, keys, cause,
        OPERATION,
    )  # fmt: skip
    return Record("outcome", head + bytes((keys + 7) // 8))


def head(wal: Wal, start_lsn: int, *, next_ticket: int, now_ns: int, published: int = 0) -> Record:
    return Record("head", struct.pack(
        "<16s16sQQQQQQQqqqqqQQQQQ12I24x", wal.uuid, wal.boot_id, 1, wal.epoch, 1 << 20,
        1 << 20, 1 << 22, 600 * S, 100, 65536, now_ns, wal.wall_offset_ns, 0, 0, next_ticket, 1,
        published, published, start_lsn, 1000, 1024, 256, 16, 16, 64, 64, wal.clock, 0, 1, 16,
        0,
    ))  # fmt: skip


def last(frames: int, start_lsn: int, end_lsn: int) -> Record:
    return Record("last", struct.pack("<QQQ", frames, start_lsn, end_lsn))


# ---- bytes -----------------------------------------------------------------------------------


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _crc_table()


def crc32c(data: bytes) -> int:
    crc = NIL
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 255]
    return crc ^ NIL


def _frame(kind: int, lsn: int, group: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 8)
    size = _FRAME.size + len(body)
    low = group & 0xFFFF
    crc = crc32c(struct.pack("<IQIHH", size, lsn, SALT, kind, low) + body)
    return _FRAME.pack(size, crc, lsn, SALT, kind, low) + body


def _group(number: int, before_lsn: int, frames: bytes, boot_ns: int, wall_ns: int) -> bytes:
    body = _GROUP.pack(number, len(frames), boot_ns, wall_ns)
    return _frame(_TYPES["group"], before_lsn, number, body) + frames


@dataclass(frozen=True)
class Wal:
    """The arena that the files belong to. `wall_offset_ns`: the wall clock minus the arena's
    clock."""

    uuid: bytes = bytes(range(16))
    boot_id: bytes = bytes(range(16, 32))
    epoch: int = 1
    clock: int = BOOT
    wall_offset_ns: int = 1_700_000_000 * S
    began_empty: bool = False
    """True if the header of the first segment says that the arena was created empty."""

    def _head(
        self, magic: bytes, first_lsn: int, first_group: int, size: int, now_ns: int
    ) -> bytes:
        block = _SEGMENT.pack(
            magic, 1, 0, self.uuid, self.boot_id, self.epoch, now_ns,
            now_ns + self.wall_offset_ns, first_lsn, first_group, size, self.clock, SALT,
            self.began_empty and first_lsn == 1 and magic == SEGMENT_MAGIC,
        )  # fmt: skip
        return (block + struct.pack("<I", crc32c(block))).ljust(HEAD_BYTES, b"\0")

    def segment(
        self, first_lsn: int, groups: Sequence[Sequence[Record]], *, first_group: int = 1,
        now_ns: int = 0, sealed: bool = True,
    ) -> bytes:  # fmt: skip
        """Return the bytes of a segment."""
        out, lsn = b"", first_lsn - 1
        for number, records in enumerate(groups, first_group):
            before, frames = lsn, b""
            for record in records:
                lsn += 1
                frames += _frame(record.type, lsn, number, record.body)
            out += _group(number, before, frames, now_ns, now_ns + self.wall_offset_ns)
        if sealed:
            out += _frame(_TYPES["seal"], lsn, first_group + len(groups), b"")
        size = HEAD_BYTES + len(out)
        return self._head(SEGMENT_MAGIC, first_lsn, first_group, size, now_ns) + out

    def snapshot(
        self, start_lsn: int, records: Sequence[Record], *, next_ticket: int, end_lsn: int = 0,
        now_ns: int = 0, published: int = 0,
    ) -> bytes:  # fmt: skip
        """Return the bytes of a snapshot. `records`: all that was armed when the WAL was at
        `start_lsn`."""
        first = head(self, start_lsn, next_ticket=next_ticket, now_ns=now_ns, published=published)
        whole = [first, *records]
        whole.append(last(len(whole), start_lsn, end_lsn or start_lsn - 1))
        frames = b"".join(_frame(r.type, n, 1, r.body) for n, r in enumerate(whole, 1))
        out = _group(1, 0, frames, now_ns, now_ns + self.wall_offset_ns)
        out += _frame(_TYPES["seal"], len(whole), 2, b"")
        size = HEAD_BYTES + len(out)
        return self._head(SNAPSHOT_MAGIC, start_lsn, 1, size, now_ns) + out


@dataclass
class Story:
    """A WAL: named records in order, cut into segments, and its snapshots.

    `cuts`: for the name of each record that begins a further segment, the pair (number of LSNs that
    are missing before the segment, epoch of the segment). `first`: records of the snapshot at the
    beginning, which are all that is armed then; None = no snapshot. `closing`: the same for the
    snapshot at the end. `copied`: number of records that were appended to the WAL while the first
    snapshot was written. `published`: number of notices before the story begins.
    """

    records: dict[str, Record]
    wal: Wal = field(default_factory=Wal)
    cuts: dict[str, tuple[int, int]] = field(default_factory=dict)
    first_lsn: int = 1
    first: Sequence[Record] | None = ()
    copied: int = 0
    published: int = 0
    closing: Sequence[Record] | None = None
    now_ns: int = 100 * S

    def having(self, **changes: Any) -> Story:
        return replace(self, **changes)

    def instead(self, **records: Record | None) -> Story:
        """Return the story with other records under these names. None removes a record."""
        retained = {name: records.get(name, record) for name, record in self.records.items()}
        return replace(self, records={n: r for n, r in retained.items() if r is not None})

    def then(self, after: str, *more: Record) -> Story:
        """Return the story with more records behind the record `after`."""
        records: dict[str, Record] = {}
        for name, record in self.records.items():
            records[name] = record
            if name == after:
                records |= {f"{after}_{n}": one for n, one in enumerate(more)}
        return replace(self, records=records)

    def write(self, directory: Path) -> None:
        """Write all files of the story."""
        directory.mkdir(parents=True)
        if self.first is not None:
            self._snapshot(directory, self.first_lsn, self.first, self.copied)
        lsn = self.first_lsn
        for group, (name, records) in enumerate(self._segments(), 1):
            skipped, epoch = self.cuts.get(name, (0, self.wal.epoch))
            lsn += skipped
            wal = replace(self.wal, epoch=epoch)
            data = wal.segment(lsn, [records], first_group=group, now_ns=self.now_ns)
            (directory / f"{lsn:016x}.wal").write_bytes(data)
            lsn += len(records)
        empty = self.wal.segment(lsn, [], first_group=len(self.cuts) + 2, sealed=False)
        (directory / f"{lsn:016x}.wal").write_bytes(empty)  # a new segment without records
        if self.closing is not None:
            self._snapshot(directory, lsn, self.closing)

    def _segments(self) -> Iterator[tuple[str, list[Record]]]:
        names = list(self.records)
        bounds = [0, *(names.index(cut) for cut in self.cuts), len(names)]
        for begin, upto in pairwise(bounds):
            yield names[begin], [self.records[name] for name in names[begin:upto]]

    def _snapshot(
        self, directory: Path, lsn: int, living: Sequence[Record], copied: int = 0
    ) -> None:
        data = self.wal.snapshot(
            lsn, living, next_ticket=1000, end_lsn=lsn - 1 + copied, now_ns=self.now_ns,
            published=self.published,
        )  # fmt: skip
        (directory / f"{lsn:016x}.snapshot").write_bytes(data)
