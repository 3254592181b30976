"""Ship a WAL repeatedly. Kill each run one step later than the previous run, then start once more.

python ship_killed.py WAL WORK

A step changes or syncs a file: open for writing, fsync, rename, unlink, mkdir. After each second
start, the lake must be the same to the byte as after an undisturbed run. The program prints the
number of steps. It forks a child for each step, because a new interpreter for each step would take
minutes.
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
    """Return an audit hook that kills the process before its step `step`, counted from 1; 0: it
    kills nothing."""
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
    """Ship in a child process, which is killed at this step; 0: it is not killed. Return True if it
    ended."""
    pid = os.fork()
    if pid == 0:
        count = killed_at(step)
        os.fsync = lambda fd: count("os.fsync", ())  # a sync does not change what survives a kill
        sys.addaudithook(count)
        ship(wal, root)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0


def tree(root: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder except LOCK, by relative path."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != LOCK
    }


def main(wal: Path, work: Path) -> None:
    """Check all steps. Raises AssertionError at the first step after which the lake is wrong."""
    # in this process, so that Arrow imports Pandas once, not in each child
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
