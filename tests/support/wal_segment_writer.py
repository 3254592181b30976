"""WAL segments that a test builds byte by byte, with records of any type, version and clock."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.wal import SEGMENT, file_name

DAEMON = bytes(range(16))
BOOT_NS = 1_000 * 10**9
WALL_NS = 1_700_000_000 * 10**9
SALT = 77
_HEAD: int = lib.PG_WAL_SEGMENT_HEAD
_GROUP_HEAD: int = lib.PG_GROUP_HEAD

Record = tuple[int, bytes]


def record(kind: str, rest: bytes = b"", **fields: Any) -> Record:
    """Return (type, body) of a record. The body is its struct, followed by `rest`."""
    body = ffi.new(f"struct pg_wal_{kind} *", fields)
    return int(getattr(lib, f"PG_WAL_{kind.upper()}")), bytes(ffi.buffer(body)) + rest


def names() -> list[Record]:
    """Return the records of namespace `n` in row 0, and of its topic `t` in row 0."""
    return [
        record("namespace", b"n", row=0, name_len=1, owner_uid=0xFFFFFFFF),
        record("topic", b"t", row=0, name_len=1, incarnation=1),
    ]


def arm(
    ticket: int, key: bytes = b"key", payload: bytes = b"", *, bulk_load: bytes = b"", **fields: Any
) -> Record:
    """Return the record of a timer, armed `ticket` microseconds after the beginning of the segment
    and due a second later.

    If `bulk_load` is given, the timer is row 0 of this bulk load.
    """
    at_ns = BOOT_NS + ticket * 1000
    given = {"ticket": ticket, "armed_ns": at_ns, "deadline_ns": at_ns + 10**9,
             "wall_ns": -(2**63), "uid": 1000, "slot": ticket}  # fmt: skip
    row = bulk_load and bulk_load + bytes(8)
    given |= {"key_len": len(key), "payload_len": len(payload), "in_bulk_load": bool(bulk_load)}
    return record("arm", row + key + payload, **(given | fields))


def _frame(lsn: int, kind: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 8)
    return struct.pack("<IIQIHH", 24 + len(body), 0, lsn, 0, kind, 0) + body


def segment(
    records: Iterable[Record],
    first_lsn: int = 1,
    *,
    first_group: int = 1,
    seal: bool = True,
    major: int = lib.PG_WAL_MAJOR,
    minor: int = lib.PG_WAL_MINOR,
    uuid: bytes = DAEMON,
    clock: int = lib.PG_CLOCK_BOOT,
) -> bytes:
    """Return the bytes of a segment with all records in one group."""
    frames = [_frame(first_lsn + n, *one) for n, one in enumerate(records)]
    group = bytearray(_GROUP_HEAD) + b"".join(frames)
    clocks = {"boot_ns": BOOT_NS, "wall_ns": WALL_NS}
    lib.pg_group_seal(
        ffi.from_buffer(group), len(group), SALT,
        ffi.new("struct pg_wal_group *", {"number": first_group, **clocks}),
    )  # fmt: skip
    end = ffi.new("struct pg_frame_head *")
    lib.pg_wal_segment_end(end, SALT, first_group, first_lsn + len(frames) - 1)
    head = _header(
        {"magic": lib.PG_WAL_SEGMENT_MAGIC, "uuid": uuid, "epoch": 1, "first_lsn": first_lsn,
         "first_group": first_group, "salt": SALT, "clock_kind": clock, **clocks},
        major, minor,
    )  # fmt: skip
    return head + bytes(group) + (bytes(ffi.buffer(end)) if seal else bytes(24))


def _header(fields: dict[str, Any], major: int, minor: int) -> bytes:
    block = bytearray(_HEAD)
    lib.pg_wal_segment_begin(ffi.from_buffer(block), ffi.new("struct pg_wal_segment *", fields))
    head = ffi.from_buffer("struct pg_wal_segment *", block)
    head.major, head.minor = major, minor
    size = ffi.offsetof("struct pg_wal_segment", "crc")
    head.crc = lib.pg_crc32c(0, ffi.from_buffer(block), size)
    return bytes(block)


def write(directory: Path, data: bytes, first_lsn: int = 1) -> Path:
    """Write a segment as a file of the WAL in `directory`. Return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / file_name(first_lsn, SEGMENT)
    path.write_bytes(data)
    return path
