"""Write files so that they exist completely or not at all, even after a power cut."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from purgatoryd.shm_layout.disk import DISK, MODE, Disk

FOLDER_MODE = 0o700


def sync_directory(directory: Path) -> None:
    """Make created, renamed and removed names in `directory` durable."""
    DISK.sync_directory(directory)


def sync_file(path: Path) -> None:
    """Write a file's data to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def listed(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder that match the pattern, sorted; [] if the folder is missing.

    Raises OSError. Path.glob() raises no error: it skips unreadable entries as if they did not
    exist.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.match(pattern))
    except FileNotFoundError:
        return []


@contextmanager
def new_file(temporary: Path, disk: Disk = DISK) -> Iterator[BinaryIO]:
    """Open a new file under a temporary name. The name is removed at the end, unless take_name()
    has renamed the file.

    If a killed writer has left a file under that name, it is replaced. In a folder that other users
    can write, the name has to be unpredictable: use next_to().
    """
    try:
        disk.remove(temporary)
        with disk.create(temporary) as file:
            try:
                yield file
            finally:
                disk.remove(temporary)
    except OSError as error:  # the error of a full disk has no file name
        error.filename = error.filename or str(temporary)
        raise


def take_name(file: BinaryIO, temporary: Path, name: str, disk: Disk = DISK) -> Path:
    """Sync a file, then rename it within its folder.

    If the directory cannot be synced, the new name may be missing on disk. The file is then
    removed, unless it has replaced another file.
    """
    path = temporary.with_name(name)
    disk.sync(file)
    replaced = disk.exists(path)
    disk.rename(temporary, name)
    _confirm_name(path, disk, replaced=replaced)
    return path


def write_durably(temporary: Path, write: Callable[[BinaryIO], str], disk: Disk = DISK) -> Path:
    """Create a file durably. `write` writes its content, and returns its final name."""
    with new_file(temporary, disk) as file:
        return take_name(file, temporary, write(file), disk)


def _confirm_name(path: Path, disk: Disk, *, replaced: bool) -> None:
    try:
        disk.sync_directory(path.parent)
    except OSError:
        if not replaced:
            disk.remove(path)
        raise


def try_write(temporary: Path) -> None:
    """Raise OSError if write_durably() could not create the file `temporary`."""
    with DISK.create(temporary):
        temporary.unlink()


def next_to(path: Path) -> Path:
    """Return a temporary name in the folder of `path` that is unused and unpredictable."""
    return path.with_name(f"{path.name}.{os.urandom(8).hex()}.new")


def private_folder(path: Path) -> None:
    """Create a folder and its missing parents, accessible to this user only."""
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(FOLDER_MODE, exist_ok=True)


def make_private(folder: Path) -> None:
    """Remove all access rights of other users to a folder and its files.

    This is for files that Spark wrote with the rights that the umask allowed.
    """
    for path in (folder, *folder.rglob("*")):
        if path.exists():
            path.chmod(FOLDER_MODE if path.is_dir() else MODE)


def replace_durably(
    path: Path, content: bytes, temporary: Path | None = None, disk: Disk = DISK
) -> None:
    """Replace the content of `path` atomically. In a folder that other users can write, `temporary`
    has to be unpredictable: use next_to()."""

    def write(file: BinaryIO) -> str:
        file.write(content)
        return path.name

    write_durably(temporary or path.with_name(f"{path.name}.new"), write, disk)
