"""Stored arenas, exports and WALs of released versions, for a start of the present version."""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path
from typing import Any

from purgatoryd.daemon.wal_birth import record_birth
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.paths import Paths

FOLDER = Path(__file__).parents[1] / "stored"
ARENAS = sorted(path.parent for path in FOLDER.glob("*/arena.xz"))
EXPORTS = sorted(path.parent for path in FOLDER.glob("*/export.xz"))
WALS = sorted(path.parent for path in FOLDER.glob("*/wal.json"))


def unpacked(path: Path) -> bytearray:
    return bytearray(lzma.decompress(path.read_bytes()))


class Stored:
    """The stored arena in a folder of tests/stored: two arena files, and a description of their
    contents."""

    def __init__(self, folder: Path) -> None:
        self.contents: dict[str, Any] = json.loads((folder / "arena.json").read_text())
        self.arena = unpacked(folder / "arena.xz")
        self.private = unpacked(folder / "private.xz")
        self.of_boot(HOST.boot_id())
        for at in self.contents["uid_offsets"]:  # let this user own the sessions
            self.private[at : at + 4] = os.geteuid().to_bytes(4, "little")

    def of_boot(self, boot: bytes) -> None:
        """Set the boot id. The deadlines then count as times on the clock of this boot."""
        at = self.contents["boot_id_offset"]
        self.arena[at : at + 16] = boot

    def lay_out(self, paths: Paths) -> None:
        """Write the arena files, as if the daemon had been killed."""
        for name, data, mode in (
            (paths.arena, self.arena, 0o640),
            (paths.private, self.private, 0o600),
        ):
            path = shm.MOUNT / name[1:]
            path.write_bytes(data)
            path.chmod(mode)

    def untouched(self, paths: Paths) -> bool:
        """Return whether both arena files are unchanged, and no new files are next to them."""
        found_files = list(shm.MOUNT.glob(f"{paths.arena[1:]}*"))
        found = [(shm.MOUNT / name[1:]).read_bytes() for name in (paths.arena, paths.private)]
        return found == [self.arena, self.private] and len(found_files) == 2


class StoredExport:
    """The stored export in a folder of tests/stored, written to `file`, with a description of its
    contents."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.contents: dict[str, Any] = json.loads((folder / "export.json").read_text())
        self.file = file
        file.write_bytes(unpacked(folder / "export.xz"))


class StoredWal:
    """The stored WAL in a folder of tests/stored, copied to `directory`, with a description of its
    contents."""

    def __init__(self, folder: Path, directory: Path) -> None:
        self.contents: dict[str, Any] = json.loads((folder / "wal.json").read_text())
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True)
        for path in folder.glob("*.xz"):
            (directory / path.stem).write_bytes(unpacked(path))
        record_birth(directory)
