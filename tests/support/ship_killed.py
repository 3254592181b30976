"""Ship a WAL repeatedly, each time killed one step later; then start once more.

python ship_killed.py WAL WORK

A step changes or syncs a file: open for writing, fsync, rename, unlink, mkdir. After every second
start the lake must be that of an undisturbed run, to the byte. The program prints the number of
steps. It is one process that forks: a new interpreter for each step would take minutes.
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
    """Ship all sealed segments."""
    root.mkdir(exist_ok=True)
    shipper = Shipper(wal, Lake(root), "node")
    for _ in shipper.poll():
        pass
    shipper.close()


def killed_at(step: int) -> Callable[..., None]:
    """Return a function that kills the process before its step of that number, counted from 1."""
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
    """Ship in a child, killed at a step unless it is 0; return True if it ended."""
    pid = os.fork()
    if pid == 0:
        count = killed_at(step)
        os.fsync = lambda fd: count("os.fsync", ())  # a sync has no effect on what survives a kill
        sys.addaudithook(count)
        ship(wal, root)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0


def tree(root: Path) -> dict[str, bytes]:
    """Return every file under a folder."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != LOCK
    }


def main(wal: Path, work: Path) -> None:
    """Check all steps. Raises AssertionError at the first step that leaves something behind."""
    # in this process, because otherwise each child would import Pandas for Arrow
    ship(wal, work / "whole")
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
