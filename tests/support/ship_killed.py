"""Ships a WAL again and again, each time killed one step later; then started once more.

    python ship_killed.py WAL WORK

Steps are what changes or syncs a file: open for writing, fsync, rename, unlink, mkdir. After every
second start the lake must be that of an undisturbed run, to the byte. Prints how many steps there
were. One process that forks: a fresh interpreter for each step would take minutes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from purgatoryd.pipeline.lake import LOCK, Lake
from purgatoryd.pipeline.ship import Shipper

CHANGES = {"os.rename", "os.remove", "os.mkdir"}
WRITING = os.O_WRONLY | os.O_RDWR


def ship(wal: Path, root: Path) -> None:
    """All that is complete."""
    root.mkdir(exist_ok=True)
    shipper = Shipper(wal, Lake(root), "node")
    for _ in shipper.poll():
        pass
    shipper.close()


def killed_at(step: int) -> Callable[..., None]:
    """Kills the process before its step of that number, counted from 1."""
    left = step

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
        if event in CHANGES or event == "os.fsync" or writes:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return count


def forked(wal: Path, root: Path, step: int = 0) -> bool:
    """Ships in a child, killed at a step unless it is 0; True if it came to its end."""
    pid = os.fork()
    if pid == 0:
        count = killed_at(step)
        os.fsync = lambda fd: count("os.fsync", ())  # a kill takes nothing from the kernel
        sys.addaudithook(count)
        ship(wal, root)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0


def tree(root: Path) -> dict[str, bytes]:
    """Every file under it."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != LOCK
    }


def main(wal: Path, work: Path) -> None:
    """Raises AssertionError at the first step that leaves something behind."""
    ship(wal, work / "whole")  # here: else each child would import Pandas for Arrow
    whole, step = tree(work / "whole"), 1
    while not forked(wal, work / "lake", step):
        seen = {path for path in tree(work / "lake") if path.endswith(".json")}
        assert seen <= set(whole), (step, seen - set(whole))
        assert forked(wal, work / "lake"), step
        again = tree(work / "lake")
        assert again == whole, (step, set(again) ^ set(whole))
        shutil.rmtree(work / "lake")
        step += 1
    print(step - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
