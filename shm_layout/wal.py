"""Files of the WAL: their names, reading and writing. layout.h declares their format.

A WAL is a folder of segments and snapshots. The name of a file is the LSN (the number of a record)
with which it begins. The files of an arena contain its uuid. An arena that replaces another arena
continues the numbers of that arena, but under its own uuid. Recovery never redoes files of two
arenas together.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Handle, text
from purgatoryd.shm_layout.disk import DISK, Disk
from purgatoryd.shm_layout.errors import (
    BadPath,
    WalDamaged,
    WalError,
    WalMismatch,
    WalUnwritable,
)
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import WalkState, WalState, is_padding, size_of
from purgatoryd.shm_layout.page_cache import PAGE
from purgatoryd.shm_layout.wire import Key, decode_key

SEGMENT = ".wal"
SNAPSHOT = ".snapshot"
_NAME = re.compile(r"([0-9a-f]{16})(\.wal|\.snapshot)")
_CALLS = {
    "open", "fallocate", "pwrite", "fdatasync", "rename", "fsync of the directory",
    "pthread_create",
}  # fmt: skip
"""System calls that the field `detail` of a fault may name as failed. Then `found` is the errno."""
_HEADER_DAMAGES = {
    "bytes of a WAL segment", "magic of a WAL segment", "checksum of a WAL segment's header",
}  # fmt: skip
"""Values of the field `detail` of a fault that mean a damaged header."""
_VERSIONS = {"version of a WAL segment", "minor version of a WAL segment"}
"""Values of the field `detail` of a fault that mean a file of another version."""
_LOST = "was written and is missing"
_GROUP_MAX: int = lib.PG_GROUP_MAX
_GROUP_HEAD: int = lib.PG_GROUP_HEAD
_HEAD: int = lib.PG_WAL_SEGMENT_HEAD
FIRST_BYTES = _HEAD + _GROUP_MAX
"""Number of bytes at the start of a file that contain its header and its whole first commit
group."""
PORTION = 1 << 30
"""Number of bytes of a file that even a slow disk reads or writes within one step of a start."""


# ---- which files there are -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class File:
    """A segment or a snapshot.

    `lsn`: number of the first record of a segment, or of the first record to redo after a snapshot.
    `wall_ns`: time of the last write.
    """

    path: Path
    lsn: int
    bytes: int
    wall_ns: int


def file_name(lsn: int, suffix: str) -> str:
    """Return the file name of a segment or a snapshot."""
    return f"{lsn:016x}{suffix}"


def segments(directory: Path, disk: Disk = DISK) -> list[File]:
    """Return the segments of a WAL, oldest first."""
    return _files(directory, SEGMENT, disk)


def snapshots(directory: Path, disk: Disk = DISK) -> list[File]:
    """Return the snapshots of a WAL, oldest first."""
    return _files(directory, SNAPSHOT, disk)


def around(files: Sequence[File], lsn: int) -> tuple[Sequence[File], Sequence[File]]:
    """Split segments, given oldest first. Return (segments with only records before `lsn`, all
    other segments)."""
    before = sum(file.lsn <= lsn for file in files[1:])
    return files[:before], files[before:]


def _files(directory: Path, suffix: str, disk: Disk) -> list[File]:
    """Return the files of a folder; empty if the folder does not exist.

    Raises OSError if the folder cannot be listed, because an unreadable WAL is not an empty WAL.
    """
    found = []
    for path in map(directory.joinpath, disk.names(directory)):
        match = _NAME.fullmatch(path.name) if path.suffix == suffix else None
        with contextlib.suppress(FileNotFoundError):  # the file was deleted in the meantime
            if match:
                found.append(File(path, int(match[1], 16), *disk.about(path)))
    return sorted(found, key=lambda file: file.lsn)


def header_of(path: Path, disk: Disk = DISK) -> Any:
    """Return struct pg_wal_segment of a segment or snapshot, unchecked. Raises WalDamaged,
    BadPath."""
    block = _first_block(path, disk)
    if len(block) < size_of("pg_wal_segment"):
        raise WalDamaged(str(path), "is truncated", len(block), _HEAD, 0, 0)
    head = ffi.new("struct pg_wal_segment *")
    ffi.memmove(head, block, size_of("pg_wal_segment"))
    return head


def _first_block(path: Path, disk: Disk) -> bytes:
    """Read the header's block from the disk. The result is shorter than a block if the file is
    shorter. Raises WalDamaged, BadPath."""
    # A lack of memory for the buffer is not damage to the file.
    with mmap.mmap(-1, PAGE) as memory, _reading(path), disk.open(path, direct=True) as file:
        return memory[: min(file.readinto(memory), _HEAD)]


def uuid_of(path: Path, disk: Disk = DISK) -> bytes:
    """Return the uuid of the arena to which a segment or snapshot belongs. Raises WalDamaged."""
    return bytes(header_of(path, disk).uuid)


def has_header(path: Path, disk: Disk = DISK) -> bool:
    """Return whether the header of a segment or snapshot is valid. Raises BadPath."""
    try:
        block = _first_block(path, disk)
    except WalDamaged:
        return False
    walk, fault = ffi.new("struct pg_walk *"), ffi.new("struct pg_fault *")
    whole = len(block) == _HEAD
    return whole and bool(lib.pg_walk_segment(walk, ffi.from_buffer(block), _HEAD, fault))


def is_other_version(error: WalError) -> bool:
    """Return whether the error means that another version wrote the file. Such a file is not
    damaged."""
    return isinstance(error, WalMismatch) and error.field in _VERSIONS


def has_gone(path: Path) -> bool:
    """Return whether an old file was deleted because later files of its kind have replaced it."""
    there = _files(path.parent, path.suffix, DISK)
    return not path.exists() and bool(there) and path.name < there[0].path.name


def following_lsn(segment: File) -> int:
    """Return the LSN after the last record that this segment currently has.

    Raises WalMismatch, WalDamaged, BadPath.
    """
    walk = Walk()
    walk.enter(segment.path)
    read_out(walk)
    return max(segment.lsn, walk.lsn + 1)


def is_of_birth(snapshot: File, disk: Disk = DISK) -> bool:
    """Return whether this is the first snapshot of an arena that was created empty.

    Such a snapshot contains no records. If it is the only file, a start ended right after writing
    it.
    """
    return has_header(snapshot.path, disk) and header_of(snapshot.path, disk).epoch == 0


def refuse_lost_segments(directory: Path, disk: Disk = DISK) -> None:
    """Raise WalDamaged if there are snapshots but no segment, because the newest segment is never
    deleted."""
    if segments(directory, disk):
        return
    for file in snapshots(directory, disk)[::-1]:
        if not is_of_birth(file, disk):
            detail = "none is left"
            raise WalDamaged(str(directory / f"*{SEGMENT}"), detail, 0, 0, file.lsn, 0)


# ---- reading -------------------------------------------------------------------------------


class Frame(NamedTuple):
    """A record.

    `kind`: "arm", "fire", ..., or "unknown" if it cannot be parsed. `fields`: fields of its struct
    pg_wal_*, without padding. `rest`: bytes after the struct, including padding. `timestamps`:
    fields of the struct pg_timestamps of its timer. `replaced`: fields of the struct pg_timestamps
    of the replaced timer. `asked`: fields of the struct pg_asked of the timer that this record
    ended. The last three are empty if the record does not contain the struct.
    """

    lsn: int
    kind: str
    fields: dict[str, int]
    rest: bytes
    timestamps: dict[str, int] = {}  # noqa: RUF012  -- never written
    replaced: dict[str, int] = {}  # noqa: RUF012
    asked: dict[str, int] = {}  # noqa: RUF012


class Contents(NamedTuple):
    """Parsed bytes after the struct of a record. A record has only some of these fields."""

    name: str | None = None
    key: Key | None = None
    payload: bytes | None = None


def contents(frame: Frame) -> Contents:
    """Return the name, or key and payload, of a record."""
    fields, rest = frame.fields, frame.rest
    if "name_len" in fields:
        # In a record of a consumer group, the rows of its topics come before the name.
        start = 4 * fields["topics"] if frame.kind == "consumer_group" else 0
        return Contents(name=rest[start : start + fields["name_len"]].decode(errors="replace"))
    if not fields.get("key_len"):
        return Contents()
    # In a watch record, the watch keys come before the key.
    start = fields.get("keys", 0) * size_of("pg_wal_watch_key")
    start += size_of("pg_wal_row") if fields.get("in_bulk_load") else 0
    start += fields.get("ext_len", 0)
    if frame.kind == "entry":
        start += fields["jobs"] * size_of("pg_wal_born")
    start += fields["error_len"] if frame.kind == "job" else 0
    end = start + fields["key_len"]
    kind = fields["key_type"] if "key_type" in fields else fields["meta"] & 7
    key = decode_key(kind, rest[start:end])
    size = fields.get("payload_len")
    return Contents(key=key, payload=None if size is None else rest[end : end + size])


KINDS: dict[int, str] = {
    value: name.removeprefix("PG_WAL_").lower()
    for value, name in ffi.typeof("enum pg_wal_type").elements.items()
    if name != "PG_WAL_TYPES"
}
"""Name of each type of record."""
UNKNOWN = "unknown"


def _words(enum: str, prefix: str) -> dict[int, str]:
    elements = ffi.typeof(f"enum {enum}").elements.items()
    return {value: name.removeprefix(prefix).lower() for value, name in elements}


_NOTICE_CAUSES = _words("pg_cause", "PG_CAUSE_")
_END_CAUSES = _words("pg_end_cause", "PG_END_")
_CAUSES = {"entry": _NOTICE_CAUSES, "outcome": _NOTICE_CAUSES, "end": _END_CAUSES}
_JOB_STATES = _words("pg_job_state", "PG_JOB_") | {lib.PG_JOB_FREE: "ended"}
_DEAD_REASONS = _words("pg_job_reason", "PG_JR_")


def explained(frame: Frame) -> dict[str, int | str]:
    """Return the fields of a record, with words for its cause and for the state of a job.

    A packed number becomes one field for each of its parts. A number that has no word stays.
    """
    fields: dict[str, int | str] = dict(frame.fields)
    if frame.kind in ("entry", "job"):
        ticket = frame.fields["ticket"]
        fields |= {"ticket": ticket >> 8, "cause": ticket & 0xFF}
    if frame.kind == "job":
        _explain_job(frame, fields)
    cause = fields.get("cause")
    if isinstance(cause, int):
        fields["cause"] = _CAUSES.get(frame.kind, {}).get(cause, cause)
    return fields


def _explain_job(frame: Frame, fields: dict[str, int | str]) -> None:
    """Replace the control word of a job by its parts. A job that has ended counts nothing."""
    del fields["control"], fields["acked"], fields["cause"]
    fields["row_lsn"] = fields.pop("lsn")
    control = frame.fields["control"]
    state = control & 0xFF
    fields["job_state"] = _JOB_STATES.get(state, state)
    if state == lib.PG_JOB_FREE:
        fields["cause"] = "acknowledged" if frame.fields["acked"] else "dropped"
        return
    fields["leases"] = control >> lib.PG_JOB_LEASES_SHIFT
    fields["failures"] = control >> lib.PG_JOB_FAILURES_SHIFT & 0xFFFF
    if state == lib.PG_JOB_DEAD:
        reason = control >> lib.PG_JOB_REASON_SHIFT & 0xFF
        fields["dead_reason"] = _DEAD_REASONS.get(reason, reason)
    if error_len := frame.fields["error_len"]:
        fields["error_text"] = frame.rest[:error_len].decode(errors="replace")


def _nothing() -> None:
    pass


class Buffer:
    """Aligned memory for the bytes of one file at a time.

    The memory is reused for the next file, because new memory has to be zeroed and mapped first.
    """

    def __init__(self, disk: Disk = DISK) -> None:
        self._disk = disk
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def read(
        self, path: Path, most: int = 2**63, moved: Callable[[], object] = _nothing, *,
        direct: bool = False,
    ) -> Any:  # fmt: skip
        """Read at most `most` bytes of a file for a Walk. They are valid until the next call.

        `moved` is called after each PORTION. `direct`: read from the disk, not from the page cache.
        The file is read and not mapped, so that a bad sector causes an error, not a signal. Raises
        WalDamaged, BadPath.
        """
        with _reading(path):
            there = self._disk.about(path).bytes
        size = min(max(there, _HEAD), most)
        space = -(-size // PAGE) * PAGE
        self._make_space(space)
        with (
            _reading(path),
            self._disk.open(path, direct=direct) as file,
            memoryview(self._memory) as view,
        ):
            end = 0
            while end < there and (count := file.readinto(view[end : min(end + PORTION, space)])):
                end += count
                moved()
            view[end:size] = bytes(max(0, size - end))
        return ffi.from_buffer(self._memory)[0:size]

    def _make_space(self, size: int) -> None:
        if len(self._memory) < size:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            self._memory = mmap.mmap(-1, size, flags=flags)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert an OSError that a read of the file raises to WalDamaged or BadPath."""
    try:
        yield
    except FileNotFoundError as error:
        raise BadPath(str(path), f"cannot be read: {error.strerror}") from error
    except OSError as error:
        detail = f"cannot be read: {error.strerror}"
        raise WalDamaged(str(path), detail, 0, 0, 0, 0) from error


class Walk:
    """Read files of a WAL in sequence, by whole commit groups. Each byte is checked."""

    def __init__(self, *, direct: bool = False, disk: Disk = DISK) -> None:
        """`direct`: read from the disk, not from the page cache."""
        self.direct = direct
        self.struct = ffi.new("struct pg_walk *")
        self.path: Path | None = None
        self._fault = ffi.new("struct pg_fault *")
        self._memory: Any = None
        self._buffer = Buffer(disk)

    @classmethod
    def before(cls, arena: Handle) -> Walk:
        """Return a Walk at the end of a WAL to which this arena has not written yet. All records of
        the arena are still to be written."""
        wal_buffer, self = arena.wal_buffer, cls()
        appended = int(wal_buffer.tail) != int(wal_buffer.committed)
        self.struct.lsn = wal_buffer.committed_lsn if appended else wal_buffer.next_lsn - 1
        return self

    @property
    def state(self) -> WalkState:
        """State of the walk."""
        return WalkState(self.struct.state)

    @property
    def lsn(self) -> int:
        """LSN of the last record that was read."""
        return int(self.struct.lsn)

    @property
    def uuid(self) -> bytes:
        """Uuid of the arena of these files."""
        return bytes(self.struct.header.uuid)

    @property
    def boot_id(self) -> bytes:
        """Id of the boot whose clock the times use."""
        return bytes(self.struct.header.boot_id)

    def enter(self, path: Path, memory: Any = None) -> None:
        """Continue with this file. `memory`: its bytes, aligned to 8 bytes, if already read.

        Raises WalDamaged, WalMismatch, BadPath.
        """
        if memory is None:
            memory = self._buffer.read(path, direct=self.direct)
        if not lib.pg_walk_segment(self.struct, memory, len(memory), self._fault):
            raise self._refused(path)
        self.path, self._memory = path, memory

    def enter_again(self) -> None:
        """Read the file again, from the first record. Raises the same errors as enter()."""
        assert self.path is not None
        self.struct = ffi.new("struct pg_walk *")
        self.enter(self.path)

    def groups(self) -> Iterator[tuple[Any, int]]:
        """Yield (address, size in bytes) of the records of each remaining commit group."""
        walk = self.struct
        while (frame := lib.pg_walk_next(walk)) != ffi.NULL:
            begin = ffi.cast("uint8_t *", frame)
            walk.next = walk.at  # skip the other frames of the group
            yield (
                begin,
                int(ffi.cast("uintptr_t", walk.bytes + walk.at))
                - int(ffi.cast("uintptr_t", begin)),
            )

    def frames(self) -> Iterator[Frame]:
        """Decode and yield each remaining record."""
        while (frame := lib.pg_walk_next(self.struct)) != ffi.NULL:
            yield _decode(frame)

    def skip(self, live_lsn: int) -> WalDamaged | None:
        """Continue after damage if every lost record is before `live_lsn`, and return the damage.

        Return None if there is no damage, or if records from `live_lsn` on are lost. In the second
        case check() raises.
        """
        damage = self._damage(_LOST, self.path)
        return damage if lib.pg_walk_skip(self.struct, live_lsn) else None

    def check(self) -> None:
        """Raise WalDamaged if the walk has stopped at damaged bytes, or the file is incomplete."""
        walk = self.struct
        if self.state == WalkState.DAMAGED:
            raise self._damage(_LOST, self.path)
        if self.state == WalkState.SEALED:
            return
        if walk.header.magic == lib.PG_SNAPSHOT_MAGIC:
            raise self._damage("incomplete snapshot", self.path)
        # A file gets its full size before its first record is written.
        if walk.size < walk.header.bytes:
            detail, size = "was made shorter", int(walk.header.bytes)
            raise WalDamaged(str(self.path), detail, walk.size, size, walk.lsn + 1, 0)

    def _damage(self, detail: str, path: Path | None) -> WalDamaged:
        walk = self.struct
        return WalDamaged(
            str(path), detail, walk.bad_from, walk.bad_to, walk.lost_from, walk.lost_to
        )

    def _refused(self, path: Path) -> WalError:
        fault = self._fault
        detail = text(fault.detail)
        if self.state == WalkState.DAMAGED:
            return self._damage(detail, path)
        if detail in _HEADER_DAMAGES:
            return WalDamaged(str(path), f"{detail} is not as written", 0, _HEAD, 0, 0)
        return WalMismatch(str(path), detail, fault.expected, fault.found)


def read_out(walk: Walk) -> None:
    """Move a walk to the end of its file, or to the first damaged bytes."""
    for _ in walk.groups():
        pass


def _decode(frame: Any) -> Frame:
    kind = KINDS.get(frame.type, UNKNOWN)
    body = ffi.cast("uint8_t *", frame) + size_of("pg_frame_head")
    if kind == UNKNOWN:
        rest = frame.bytes - size_of("pg_frame_head")
        return Frame(int(frame.lsn), kind, {}, bytes(ffi.buffer(body, rest)))
    fields = _fields(ffi.cast(f"struct pg_wal_{kind} *", body))
    replaced = ffi.new("struct pg_timestamps **")
    tail = [lib.pg_frame_timestamps(frame, replaced), replaced[0], lib.pg_frame_asked(frame)]
    parsed = [_fields(struct) for struct in tail]
    size = size_of(f"pg_wal_{kind}")
    rest = frame.bytes - size_of("pg_frame_head") - size
    rest -= sum(ffi.sizeof(struct[0]) for struct in tail if struct != ffi.NULL)
    return Frame(int(frame.lsn), kind, fields, bytes(ffi.buffer(body + size, rest)), *parsed)


def _fields(struct: Any) -> dict[str, int]:
    if struct == ffi.NULL:
        return {}
    names = [n for n, f in ffi.typeof(struct).item.fields if f.type.kind == "primitive"]
    return {n: int(getattr(struct, n)) for n in names if not is_padding(n)}


# ---- writing -------------------------------------------------------------------------------


class Written(NamedTuple):
    """Two LSNs of a snapshot: of the first record to redo after it, and of the last record that
    must be on disk before the snapshot is valid."""

    start_lsn: int
    end_lsn: int


def write_snapshot(
    handle: Handle, file: BinaryIO, *, quiet: bool, moved: Callable[[], object] = _nothing,
    host: Host = HOST, disk: Disk = DISK,
) -> Written:  # fmt: skip
    """Write all authoritative state of an arena, without sessions, as a snapshot.

    `quiet`: the arena does not change during the call, so the snapshot is complete without later
    records of the WAL. `moved` is called after each PORTION that has been written to disk.
    """
    snapshot, out = ffi.new("struct pg_snapshot *", {"quiet": quiet}), bytearray(_GROUP_MAX)
    base, salt, lsn, number = ffi.from_buffer(out), host.random_bits(32), 0, 0
    header = handle.header
    clocks = {"boot_ns": header.now_ns, "wall_ns": header.now_ns + header.wall_offset_ns}
    made_by = {"term": header.term, "origin": bytes(header.boot_id)}
    file.write(bytes(_HEAD))
    for number in count(1):
        used = lib.pg_snapshot(
            handle.struct, snapshot, base + _GROUP_HEAD, _GROUP_MAX - _GROUP_HEAD
        )
        group = ffi.new("struct pg_wal_group *", {"number": number, **made_by, **clocks})
        lib.pg_group_seal(base, _GROUP_HEAD + used, salt, group)
        file.write(memoryview(out)[: _GROUP_HEAD + used])
        disk.begin_writing(file, _GROUP_HEAD + used)
        if number % (PORTION // _GROUP_MAX) == 0:
            disk.sync(file)
            moved()
        if snapshot.done:
            break
    lsn = int(snapshot.frames)
    seal = ffi.new("struct pg_frame_head *")
    lib.pg_wal_segment_end(seal, salt, number, lsn)
    file.write(ffi.buffer(seal))
    fields = {
        "magic": lib.PG_SNAPSHOT_MAGIC, "uuid": bytes(header.uuid), "salt": salt,
        "boot_id": bytes(header.boot_id), "epoch": header.epoch, "first_group": 1,
        "first_lsn": snapshot.start_lsn, "bytes": file.tell(), "clock_kind": header.clock_kind,
        **clocks,
    }  # fmt: skip
    lib.pg_wal_segment_begin(base, ffi.new("struct pg_wal_segment *", fields))
    file.seek(0)
    file.write(memoryview(out)[:_HEAD])
    return Written(int(snapshot.start_lsn), int(snapshot.end_lsn))


class GroupCommit:
    """Write appended records to disk in a thread. Each commit writes all records that were appended
    before it.

    `end`: a Walk that has read the newest segment to its end from the page cache, or
    Walk.before(arena). The thread ends that segment and starts a new segment. Raises WalUnwritable
    if a system call failed, WalMismatch if the files and the arena disagree.
    """

    def __init__(
        self, arena: Handle, directory: Path, wal_segment_bytes: int, end: Walk, disk: Disk = DISK,
        *, threaded: bool = True,
    ) -> None:  # fmt: skip
        """Start the thread. Without `threaded`, the caller commits with iterate() instead."""
        self._arena = arena
        self._threaded = threaded
        self._memory = ffi.new("uint8_t[]", lib.pg_group_commit_bytes())
        self._c = ffi.cast("struct pg_group_commit *", self._memory)
        fault = ffi.new("struct pg_fault *")
        name, storage = str(directory).encode(), disk.storage or ffi.NULL
        opened = lib.pg_group_commit_open(
            self._c, arena.struct, name, wal_segment_bytes, end.struct, storage, fault
        )
        if not opened or (threaded and not lib.pg_group_commit_start(self._c, fault)):
            raise _unopened(directory, fault)

    @property
    def fd(self) -> int:
        """File descriptor that is readable after a commit, or after the WAL has stopped."""
        return int(lib.pg_group_commit_fd(self._c))

    def iterate(self) -> bool:
        """Commit one group of appended records. Returns False if there were no records."""
        return bool(lib.pg_group_commit_iterate(self._c))

    def requests(self) -> Any:
        """Return a new struct pg_commit_requests, through which the loop requests commits."""
        requests = ffi.new("struct pg_commit_requests *")
        lib.pg_commit_requests_init(requests, self._arena.struct, self._c)
        return requests

    def stop(self, errno: int) -> None:
        """Stop the WAL after a failure outside of the thread. The thread checks the state before
        each commit. `errno`: error number of the failure."""
        wal_buffer = self._arena.wal_buffer
        wal_buffer.error, wal_buffer.error_lsn = errno, wal_buffer.committed_lsn + 1
        wal_buffer.state = WalState.STOPPED

    def pause(self) -> bool:
        """Pause the thread's work on arena and files. Returns False if the thread still works: call
        again once `fd` is readable."""
        return bool(lib.pg_group_commit_pause(self._c))

    def unpause(self) -> None:
        """Let the thread continue. The arena may have moved."""
        lib.pg_group_commit_unpause(self._c)

    def close(self) -> None:
        """Commit all appended records, end the thread and close the files."""
        while not self._threaded and self.iterate():
            pass
        lib.pg_group_commit_stop(self._c)
        lib.pg_group_commit_close(self._c)


def _unopened(directory: Path, fault: Any) -> WalError:
    detail = text(fault.detail)
    if detail in _CALLS:
        return WalUnwritable(str(directory), int(fault.found))
    return WalMismatch(str(directory), detail, fault.expected, fault.found)


def has_stopped(wal_buffer: Any) -> bool:
    """Return whether the WAL has stopped, so that no more records are written to disk."""
    return int(wal_buffer.state) == WalState.STOPPED
