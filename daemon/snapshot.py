"""Snapshots of an arena: the file, and the process that writes it while the daemon runs.

The process also removes files that are not needed, so that the loop never waits for a file. The
arena changes while the snapshot is written. So the snapshot gets its name only once all records up
to its end are on disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from purgatoryd.daemon.log import log
from purgatoryd.daemon.parent import end_with
from purgatoryd.daemon.recovery import Step
from purgatoryd.daemon.retention import Keep, tidy
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.arena import Handle, Reader
from purgatoryd.shm_layout.errors import PurgatorydError, WalUnwritable
from purgatoryd.shm_layout.files import new_file, next_to, take_name, try_write, write_durably
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.shm import ArenaFile
from purgatoryd.shm_layout.wal import SNAPSHOT, file_name, has_stopped, write_snapshot

POLL_S = 0.005
NICENESS = 10
SLICE_NS = 100_000
"""Time slice of processes in the background. A running thread finishes its slice before a thread of
a higher priority that has become ready; usual slices last milliseconds."""
TEMPORARY = "snapshot.new"


def saving(
    handle: Handle, directory: Path, host: Host, step: Step = lambda _: None, *, quiet: bool
) -> Iterator[int]:
    """Write a snapshot into a WAL's folder, in steps. Raises WalUnwritable.

    Yields once: the LSN of the record that must be on disk before the caller continues. Then the
    snapshot gets its name. `quiet`: the arena does not change during the call, and nothing is
    yielded. `step` is called at the beginning, and at least once for each PORTION.
    """
    disk, temporary = host.disk, directory / TEMPORARY
    moved = partial(step, "writing a snapshot")
    moved()
    try:
        with new_file(temporary, disk) as file:
            written = write_snapshot(handle, file, quiet=quiet, moved=moved, host=host)
            if not quiet:
                yield written.end_lsn
            take_name(file, temporary, file_name(written.start_lsn, SNAPSHOT), disk)
    except OSError as error:
        raise WalUnwritable(str(temporary), error.errno or 0) from error


def save_snapshot(
    handle: Handle, directory: Path, host: Host = HOST, step: Step = lambda _: None
) -> None:
    """Write a snapshot of an arena that does not change during the call. Raises WalUnwritable."""
    for _ in saving(handle, directory, host, step, quiet=True):
        raise AssertionError("nothing to wait for")


def save_export(handle: Handle, path: Path, host: Host = HOST) -> None:
    """Write a snapshot as an export file. Raises WalUnwritable."""

    def write(file: BinaryIO) -> str:
        write_snapshot(handle, file, quiet=True, host=host)
        return path.name

    try:
        write_durably(next_to(path), write)
    except OSError as error:
        raise WalUnwritable(str(path), error.errno or 0) from error


def try_export(path: Path) -> None:
    """Raise WalUnwritable if no export file can be written at this path."""
    try:
        try_write(next_to(path))
    except OSError as error:
        raise WalUnwritable(str(path), error.errno or 0) from error


def tidy_and_tell(directory: Path, keep: Keep, host: Host = HOST) -> None:
    """Remove files that are not needed, and log which retention holds were dropped."""
    for hold in tidy(directory, keep, host):
        detail = (
            f"dropped the retention hold {hold.name!r}: it held back more than "
            f"{hold.cap_bytes} bytes"
        )
        log.warning(detail, retention_hold=hold.name)


class Child(Protocol):
    """A process that writes a snapshot and removes files that are not needed."""

    returncode: Any

    def poll(self) -> int | None:
        """Return the exit code of the process; None while it runs."""

    def kill(self) -> None:
        """End the process at once."""

    def wait(self) -> int:
        """Wait for the end of the process."""


def start(arena: str, directory: Path, keep: Keep, *, snapshot: bool) -> Child:
    """Start the process. If `snapshot`, it first writes a snapshot. It then removes files that are
    not needed."""
    arguments = [arena, directory, os.getpid(), keep.age_ns, keep.bytes, int(snapshot)]
    return subprocess.Popen(
        [sys.executable, "-m", "purgatoryd.daemon.snapshot", *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _snapshot_process(arena: str, directory: Path, daemon: int) -> None:
    reader = Reader(ArenaFile.open(arena, read_only=True))
    for lsn in saving(reader, directory, HOST, quiet=False):
        while int(reader.wal_buffer.committed_lsn) < lsn:
            if has_stopped(reader.wal_buffer) or os.getppid() != daemon:
                raise WalUnwritable(str(directory), int(reader.wal_buffer.error))
            time.sleep(POLL_S)


def lower_priority() -> None:
    """Give this process a low priority and short time slices."""
    os.nice(NICENESS)
    lib.pg_thread_slice(SLICE_NS)


def leave_the_loop(daemon: int) -> None:
    """Move this process to the CPUs of the daemon's other threads, because a child starts on the
    CPUs of the loop."""
    threads = {int(thread) for thread in os.listdir(f"/proc/{daemon}/task")} - {daemon}
    os.sched_setaffinity(0, os.sched_getaffinity(max(threads)))


def _main(arena: str, folder: str, daemon: str, age_ns: str, keep: str, snapshot: str) -> int:
    # otherwise this process and the snapshot process of the next daemon would write the same files
    end_with(int(daemon))
    lower_priority()
    log.set_up("warning", name=Path(folder).name)
    directory = Path(folder)
    try:
        leave_the_loop(int(daemon))
        if int(snapshot):
            _snapshot_process(arena, directory, int(daemon))
    except (OSError, PurgatorydError) as error:
        log.warning(f"a WAL file cannot be read or written: {error}")
        return 1
    try:
        tidy_and_tell(directory, Keep(int(age_ns), int(keep)))
    except (OSError, PurgatorydError) as error:
        # the exit code is 0, because the snapshot itself succeeded
        log.warning(f"a WAL file cannot be read or written: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
