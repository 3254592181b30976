"""A simulated disk: it tears, reorders and loses unsynced writes, fails, and can be full.

A file has two contents: the bytes that calls see (the page cache) and the bytes on the medium. A
sector that was written but not synced is dirty: after a power cut the medium has its old or its new
bytes. After a failed sync, some sectors are clean in the page cache but old on the medium, as on
Linux. A power cut may undo the creation or removal of names since the last sync of their folder,
the newest first.
"""

from __future__ import annotations

import errno
import io
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from purgatoryd.shm_layout._core import ffi
from purgatoryd.shm_layout.disk import About, Disk
from world.schedule import Schedule
from world.seam import Killed, Seam

SECTOR = 512
PAGE = 4096


class File:
    """An inode."""

    def __init__(self, written_wall_ns: int) -> None:
        self.now = bytearray()
        self.medium = bytearray()
        self.dirty: set[int] = set()
        """Sectors that a sync will write."""
        self.older: dict[File, int] = {}
        """The files that the folder contained when this file was created, each with the position of
        its last write. This write may contain records that the new file lacks."""
        self.written_wall_ns = written_wall_ns
        self.began = 0
        """Position of the last write of group commit."""
        self._goes_on_at = 0
        """Position at which group commit continues after a short write."""

    @property
    def held(self) -> int:
        """Number of bytes before the zeros at the end."""
        return len(self.now.rstrip(b"\0"))

    def write(self, data: bytes, at: int) -> None:
        end = at + len(data)
        if end > len(self.now):
            self.now.extend(bytes(end - len(self.now)))
        self.now[at:end] = data
        self.dirty.update(range(at // SECTOR, -(-end // SECTOR)))

    def write_group(self, at: int, count: int, written: int) -> None:
        """Record that group commit wrote `written` of `count` bytes at position `at`."""
        if at != self._goes_on_at:
            self.began = at
        self._goes_on_at = at + written if written < count else 0

    def change(self, at: int) -> None:
        """Flip a bit of the byte at this position."""
        self.medium[at] ^= 1
        self.now[at] ^= 1

    def sync(self) -> None:
        """Write the dirty sectors and the length to the medium."""
        self._fit()
        for sector in self.dirty:
            self._write_sector(sector)
        self.dirty.clear()

    def lose(self, rng: random.Random) -> None:
        """Fail a sync: some dirty sectors are written, but all dirty sectors are marked clean."""
        self._fit()
        for sector in sorted(self.dirty):
            if rng.random() < 0.5:
                self._write_sector(sector)
        self.dirty.clear()

    def cut(self, rng: random.Random) -> None:
        """Cut the power. Each dirty sector then has its old or its new bytes; the length may also
        be old."""
        if len(self.now) > len(self.medium) and rng.random() < 0.5:
            self._fit()
        for sector in sorted(self.dirty):
            if rng.random() < 0.5 and sector * SECTOR < len(self.medium):
                self._write_sector(sector)
        self.dirty.clear()
        self.now = bytearray(self.medium)

    def direct(self) -> bytes:
        """Write the dirty sectors, and return the bytes of the medium, as a direct read does."""
        self.sync()
        return bytes(self.medium)

    def _fit(self) -> None:
        if len(self.medium) < len(self.now):
            self.medium.extend(bytes(len(self.now) - len(self.medium)))

    def _write_sector(self, sector: int) -> None:
        begin, end = sector * SECTOR, min((sector + 1) * SECTOR, len(self.medium))
        self.medium[begin:end] = self.now[begin:end]


@dataclass
class Trouble:
    """A planned failure of one kind of call: the next `times` calls fail with this errno."""

    errno: int
    times: int


@dataclass
class Folder:
    """The names of a folder, as calls see them and on the medium."""

    now: dict[str, File] = field(default_factory=dict)
    history: list[dict[str, File]] = field(default_factory=lambda: [{}])
    """Possible sets of names on the medium: the names at the last sync, then the names after each
    later change."""

    def changed(self) -> None:
        self.history.append(dict(self.now))

    def sync(self) -> None:
        self.history = [dict(self.now)]

    def cut(self, rng: random.Random) -> None:
        self.now = dict(self.history[rng.randrange(len(self.history))])
        self.sync()


class SimulatedDisk(Disk):
    """All files of one machine, below absolute paths."""

    def __init__(self, schedule: Schedule, rng: random.Random, seam: Seam) -> None:
        self._schedule = schedule
        self._rng = rng
        self._seam = seam
        self._folders: dict[Path, Folder] = {}
        self.troubles: dict[str, Trouble] = {}
        """Planned failures by kind of call: "write", "sync", "rename", "sync_directory", "open",
        "read"."""
        self.full = False
        self.short_writes = 0
        """Number of coming writes of group commit that write only a part of their bytes."""
        self.failed = 0
        """Number of calls that failed."""
        self.calls = 0
        self.table = _Table(self)
        self.storage = self.table.struct

    # ---- faults --------------------------------------------------------------------------------

    def _call(self, kind: str) -> None:
        """Count a call. Raises OSError if the call has to fail, and Killed if the process dies
        here."""
        self._seam.cross()
        self.calls += 1
        trouble = self.troubles.get(kind)
        if trouble is None:
            return
        trouble.times -= 1
        if trouble.times <= 0:
            del self.troubles[kind]
        self.failed += 1
        raise OSError(trouble.errno, os.strerror(trouble.errno))

    def _space(self) -> None:
        if self.full:
            self.failed += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def heal(self) -> None:
        """End all disturbances."""
        self.troubles.clear()
        self.full, self.short_writes = False, 0

    def rot(self, folder: Path, number: int, place: float) -> tuple[File, int] | None:
        """Damage a byte of one file in a folder. Return (file, position); None if no file can be
        damaged."""
        names = sorted(name for name in self.folder(folder).now if name[-1] in "lt")
        files = [self.folder(folder).now[name] for name in names]
        files = [file for file in files if file.medium and not file.dirty]
        if not files:
            return None
        file = files[number % len(files)]
        at = int(place * min(file.held + SECTOR, len(file.medium)))
        file.change(at)
        return file, at

    def lose(self, folder: Path, number: int) -> str | None:
        """Remove one file from a folder, permanently. Return its name; None if the folder has no
        file."""
        names = sorted(name for name in self.folder(folder).now if name[-1] in "lt")
        if not names:
            return None
        name = names[number % len(names)]
        del self.folder(folder).now[name]
        self.folder(folder).sync()
        return name

    def put(self, path: Path, data: bytes) -> None:
        """Store a file on the medium, as if it had been copied there."""
        file = self.folder(path.parent).now[path.name] = File(self._wall_ns())
        file.write(data, 0)
        file.sync()
        self.folder(path.parent).sync()

    @contextmanager
    def mistaken(self, folder: Path, other: Path) -> Iterator[None]:
        """Inside of the block, let a folder contain the files of another folder."""
        right, self._folders[folder] = self.folder(folder), self.folder(other)
        yield
        self._folders[folder] = right

    def empty(self, folder: Path) -> None:
        """Remove all files of a folder, permanently."""
        self._folders[folder] = Folder()

    def cut(self) -> None:
        """Cut the power."""
        for path in sorted(self._folders):
            folder = self._folders[path]
            folder.cut(self._rng)
            for name in sorted(folder.now):
                folder.now[name].cut(self._rng)
        self.troubles.clear()

    def digest_parts(self) -> Iterator[bytes]:
        """Yield all names and bytes on the medium in a fixed order. Folders have numbers instead of
        names."""
        for number, path in enumerate(sorted(self._folders)):
            names = self._folders[path].now
            for name in sorted(names):
                yield f"{number}/{name}".encode()
                yield bytes(names[name].medium)

    def folder(self, path: Path) -> Folder:
        """Return a folder, and create it if needed."""
        return self._folders.setdefault(path, Folder())

    # ---- Disk ----------------------------------------------------------------------------------

    def names(self, folder: Path) -> list[str]:
        self._call("read")
        names = sorted(self.folder(folder).now)
        self._rng.shuffle(names)
        return names

    def about(self, path: Path) -> About:
        file = self._file(path)
        return About(len(file.now), file.written_wall_ns)

    def exists(self, path: Path) -> bool:
        return path.name in self.folder(path.parent).now

    def rename(self, path: Path, name: str) -> None:
        self._call("rename")
        folder = self.folder(path.parent)
        folder.now[name] = self._file(path)
        del folder.now[path.name]
        folder.changed()
        self._seam.cross()

    def remove(self, path: Path) -> None:
        self._seam.cross()
        folder = self.folder(path.parent)
        if folder.now.pop(path.name, None) is not None:
            folder.changed()

    def sync_directory(self, folder: Path) -> None:
        self._call("sync_directory")
        self.folder(folder).sync()
        self._seam.cross()

    @contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        yield

    def read_bytes(self, path: Path) -> bytes:
        self._call("read")
        return bytes(self._file(path).now)

    @contextmanager
    def open(self, path: Path, *, direct: bool) -> Iterator[Any]:
        file = self._file(path)
        self._call("read")
        yield io.BytesIO(file.direct() if direct else bytes(file.now))

    def create(self, path: Path) -> BinaryIO:
        self._call("open")
        self._space()
        folder = self.folder(path.parent)
        if path.name in folder.now:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        older = {file: file.began for file in folder.now.values()}
        file = folder.now[path.name] = File(self._wall_ns())
        file.older = older
        folder.changed()
        return _Writer(self, file)  # type: ignore[return-value]

    def sync(self, file: BinaryIO) -> None:
        assert isinstance(file, _Writer)
        self.sync_file(file.file)

    def begin_writing(self, file: BinaryIO, size: int) -> None:
        pass

    # ---- for the writer and the table ----------------------------------------------------------

    def write(self, file: File, data: bytes, at: int) -> None:
        """Write to a file. Raises OSError."""
        self._call("write")
        if at + len(data) > len(file.now):
            self._space()
        file.write(data, at)
        file.written_wall_ns = self._wall_ns()
        self._seam.cross()

    def short(self, count: int) -> int:
        """Return how many of its `count` bytes a write of group commit writes."""
        if self.short_writes and count > SECTOR:
            self.short_writes -= 1
            self.failed += 1
            return count // 3
        return count

    def sync_file(self, file: File) -> None:
        """Sync a file. If this raises OSError, the contents of the medium are unknown."""
        try:
            self._call("sync")
        except OSError:
            file.lose(self._rng)
            raise
        file.sync()
        self._seam.cross()

    def open_file(self, folder: Path, name: str, flags: int) -> File:
        """Open a file for the group-commit thread. Raises OSError."""
        self._call("open")
        names = self.folder(folder).now
        if flags & os.O_CREAT:
            self._space()
            if name not in names or flags & os.O_TRUNC:
                names[name] = File(self._wall_ns())
                self.folder(folder).changed()
        if name not in names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return names[name]

    def allocate(self, file: File, size: int) -> None:
        """Set the size of a file. Raises OSError."""
        self._call("write")
        if size > len(file.now):
            self._space()
            file.now.extend(bytes(size - len(file.now)))

    def now_ns(self) -> int:
        """Return the world time."""
        return self._schedule.now_ns

    def _file(self, path: Path) -> File:
        names = self.folder(path.parent).now
        if path.name not in names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return names[path.name]

    def _wall_ns(self) -> int:
        return 1_700_000_000_000_000_000 + self._schedule.now_ns


class _Writer(io.RawIOBase):
    """A file that is open for writing."""

    def __init__(self, disk: SimulatedDisk, file: File) -> None:
        super().__init__()
        self._disk = disk
        self.file = file
        self._at = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raw = bytes(data)
        self._disk.write(self.file, raw, self._at)
        self._at += len(raw)
        return len(raw)

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == 0
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at


class _Table:
    """An implementation of struct pg_storage on a simulated disk, for the calls of group commit.

    An exception cannot pass through C. So if the process is killed at a call, the call runs
    `killed` and returns an error.
    """

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self._files: dict[int, File] = {}
        self._folders: dict[int, Path] = {}
        self._opened = 0
        self.killed: Callable[[], None] = lambda: None
        kinds = {
            "open": "int(void *, int, const char *, int)",
            "pwrite": "int64_t(void *, int, const void *, uint64_t, uint64_t)",
            "fallocate": "int(void *, int, uint64_t)",
            "fdatasync": "int(void *, int)",
            "rename": "int(void *, int, const char *, const char *)",
            "fsync_dir": "int(void *, int)",
            "close": "int(void *, int)",
            "clock_ns": "int64_t(void *)",
        }
        self._callbacks = {
            name: ffi.callback(kind, getattr(self, name)) for name, kind in kinds.items()
        }
        self.struct = ffi.new("struct pg_storage *", self._callbacks)

    def _attempt(self, work: Callable[[], int]) -> int:
        try:
            return work()
        except Killed:
            self.killed()
            ffi.errno = errno.EIO
        except OSError as error:
            ffi.errno = error.errno or errno.EIO
        return -1

    def _number(self) -> int:
        self._opened += 1
        return self._opened

    def open(self, _: Any, directory: int, name: Any, flags: int) -> int:
        text = ffi.string(name).decode()

        def work() -> int:
            number = self._number()
            if directory < 0:
                self._folders[number] = Path(text)
            else:
                folder = self._folders[directory]
                self._files[number] = self._disk.open_file(folder, text, flags)
            return number

        return self._attempt(work)

    def pwrite(self, _: Any, number: int, data: Any, count: int, at: int) -> int:
        raw = bytes(ffi.buffer(data, count))

        def work() -> int:
            written = self._disk.short(count)
            self._disk.write(self._files[number], raw[:written], at)
            self._files[number].write_group(at, count, written)
            return written

        return self._attempt(work)

    def fallocate(self, _: Any, number: int, size: int) -> int:
        return self._done(lambda: self._disk.allocate(self._files[number], size))

    def fdatasync(self, _: Any, number: int) -> int:
        return self._done(lambda: self._disk.sync_file(self._files[number]))

    def rename(self, _: Any, directory: int, before: Any, after: Any) -> int:
        path = self._folders[directory] / ffi.string(before).decode()
        return self._done(lambda: self._disk.rename(path, ffi.string(after).decode()))

    def fsync_dir(self, _: Any, directory: int) -> int:
        return self._done(lambda: self._disk.sync_directory(self._folders[directory]))

    def close(self, _: Any, number: int) -> int:
        self._files.pop(number, None)
        self._folders.pop(number, None)
        return 0

    def clock_ns(self, _: Any) -> int:
        return self._disk.now_ns()

    def _done(self, work: Callable[[], None]) -> int:
        def zero() -> int:
            work()
            return 0

        return self._attempt(zero)
