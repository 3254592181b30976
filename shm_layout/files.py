"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from purgatoryd.shm_layout.disk import DISK, MODE, Disk

FOLDER_MODE = 0o700


def sync_directory(directory: Path) -> None:
    """Makes names that were given or removed in `directory` durable."""
    DISK.sync_directory(directory)


def sync_file(path: Path) -> None:
    """Brings what stands in a file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def listed(folder: Path, pattern: str) -> list[Path]:
    """What stands in a folder under names of that pattern, in order; nothing if it is not there.

    Raises OSError: a glob passes by what may not be read as if it were not there.
    """
    try:
        return sorted(path for path in folder.iterdir() if path.match(pattern))
    except FileNotFoundError:
        return []


@contextmanager
def new_file(temporary: Path, disk: Disk = DISK) -> Iterator[BinaryIO]:
    """A file under a temporary name, which goes at the end unless `take_name` was called.

    What a killed writer left under the name goes. Where others may write, too, it has to be a name
    that they cannot know: `next_to`.
    """
    try:
        disk.remove(temporary)
        with disk.create(temporary) as file:
            try:
                yield file
            finally:
                disk.remove(temporary)
    except OSError as error:  # of a full disk it says no name
        error.filename = error.filename or str(temporary)
        raise


def take_name(file: BinaryIO, temporary: Path, name: str, disk: Disk = DISK) -> Path:
    """Give a file a name in its folder once it is on disk.

    If the directory cannot be synced, the disk may not have the new name, and it is removed.
    """
    path = temporary.with_name(name)
    disk.sync(file)
    replaced = disk.exists(path)
    disk.rename(temporary, name)
    _confirm_name(path, disk, replaced=replaced)
    return path


def write_durably(temporary: Path, write: Callable[[BinaryIO], str], disk: Disk = DISK) -> Path:
    """`write` fills a new file and says which name in its folder it gets once it is on disk."""
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
    """Raises OSError if `write_durably` could not even begin."""
    with DISK.create(temporary):
        temporary.unlink()


def next_to(path: Path) -> Path:
    """A temporary name in the folder of `path` that nobody has, or can foresee."""
    return path.with_name(f"{path.name}.{os.urandom(8).hex()}.new")


def private_folder(path: Path) -> None:
    """Makes a folder, and those above it that are missing, nobody else's."""
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(FOLDER_MODE, exist_ok=True)


def make_private(folder: Path) -> None:
    """All in a folder, if it is there, and the folder are nobody else's now: Spark, which wrote
    them, follows the umask."""
    for path in (folder, *folder.rglob("*")):
        if path.exists():
            path.chmod(FOLDER_MODE if path.is_dir() else MODE)


def replace_durably(
    path: Path, content: bytes, temporary: Path | None = None, disk: Disk = DISK
) -> None:
    """Gives `path` this content, at once. `temporary`: where others may write, too, `next_to`."""

    def write(file: BinaryIO) -> str:
        file.write(content)
        return path.name

    write_durably(temporary or path.with_name(f"{path.name}.new"), write, disk)
