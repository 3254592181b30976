"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

MODE, FOLDER_MODE = 0o600, 0o700
"""Keys and payloads are in them."""


def sync_directory(directory: Path) -> None:
    """Makes names that were given or removed in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_in_memory(path: Path) -> bool:
    """True if what stands there is gone with the next reboot."""
    return bool(filesystems(path) & {"tmpfs", "ramfs"})


def filesystems(path: Path) -> set[str]:
    """Return the possible types of a path's file system, such as ext4; empty if unknown."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts = (line.partition(" - ") for line in lines)
    return {after.split()[0] for before, _, after in mounts if before.split()[2] == number}


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


def write_durably(temporary: Path, write: Callable[[BinaryIO], str]) -> Path:
    """`write` fills the file and says which name in its folder it gets once it is on disk.

    What a killed writer left under the temporary name goes. Where others may write, too, that name
    has to be one that they cannot know: `next_to`. If the directory cannot be synced, the disk may
    not have the new name, and it is removed.
    """
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "wb", opener=_new) as file:
            try:
                path = temporary.with_name(write(file))
                file.flush()
                os.fsync(file.fileno())
                replaced = path.exists()
                temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)
        _confirm_name(path, replaced=replaced)
    except OSError as error:  # of a full disk it says no name
        error.filename = error.filename or str(temporary)
        raise
    return path


def _confirm_name(path: Path, *, replaced: bool) -> None:
    try:
        sync_directory(path.parent)
    except OSError:
        if not replaced:
            path.unlink(missing_ok=True)
        raise


def try_write(temporary: Path) -> None:
    """Raises OSError if `write_durably` could not even begin."""
    with open(temporary, "wb", opener=_new):
        temporary.unlink()


def next_to(path: Path) -> Path:
    """A temporary name in the folder of `path` that nobody has, or can foresee."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")


def _new(path: str, flags: int) -> int:
    """An opener of files that were not there, so that nobody else has them open."""
    return private(path, flags | os.O_EXCL | os.O_NOFOLLOW)


def private(path: str, flags: int) -> int:
    """An opener of files that are nobody else's."""
    return os.open(path, flags, MODE)


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


def replace_durably(path: Path, content: bytes, temporary: Path | None = None) -> None:
    """Gives `path` this content, at once. `temporary`: where others may write, too, `next_to`."""

    def write(file: BinaryIO) -> str:
        file.write(content)
        return path.name

    write_durably(temporary or path.with_name(f"{path.name}.new"), write)
