"""The daemons of the run. They run in a private directory, which is removed when the run ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from purgatoryd.clients import Ledger
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.paths import Paths, paths_in

KEEP = "FLIGHTS_KEEP"
"""Environment variable that names the directory in which the run keeps WALs and ledgers. If it is
not set, the run writes none."""
WAL_BUFFER_MIN, WAL_BUFFER_MAX = 1 << 22, 1 << 26
"""Minimum and maximum size of the WAL buffer in bytes. The larger the buffer, the less a slow disk
delays the run."""
STOP_S = 10.0
"""Time in seconds that a daemon has to end after SIGTERM, before it is killed."""


class DaemonFailed(Exception):
    """A daemon of the run did not start, or did not end with exit code 0; `said` is its output on
    stderr."""

    def __init__(self, name: str, code: int | None, said: str) -> None:
        super().__init__(f"daemon {name} ended with exit code {code}: {said or 'no message'}")
        self.name = name
        self.code = code
        self.said = said


@contextmanager
def private_directory() -> Iterator[Path]:
    """Use a new $PURGATORYD_DIR for this process and its children; remove it at the end."""
    before = os.environ.get("PURGATORYD_DIR")
    with tempfile.TemporaryDirectory(prefix="purgatoryd-run-") as made:
        os.environ["PURGATORYD_DIR"] = made
        try:
            yield Path(made)
        finally:
            del os.environ["PURGATORYD_DIR"]
            if before is not None:
                os.environ["PURGATORYD_DIR"] = before


def wal_flags() -> tuple[str, ...]:
    """Return the flags of `purgatoryd run` with which a daemon writes a WAL that is kept; no flags
    if WALs are not kept."""
    if KEEP not in os.environ:
        return ()
    free, wal_buffer_bytes = os.statvfs(shm.MOUNT), WAL_BUFFER_MIN
    while (
        wal_buffer_bytes < WAL_BUFFER_MAX and wal_buffer_bytes * 8 <= free.f_bavail * free.f_frsize
    ):
        wal_buffer_bytes *= 2
    wals = Path(os.environ[KEEP]) / "wal"
    wals.mkdir(parents=True, exist_ok=True)
    return (f"--wal-dir={wals}", f"--wal-buffer-bytes={wal_buffer_bytes}", "--retain-age=1h")


@contextmanager
def noted(name: str) -> Iterator[Ledger | None]:
    """Yield a ledger for a client or subscriber of daemon `name`; None if its WAL is not kept."""
    retained = Path(os.environ.get(KEEP, "/nowhere"))
    if (retained / "wal" / name).is_dir():
        with Ledger(retained / "ledgers") as ledger:
            yield ledger
    else:
        yield None


@contextmanager
def running(directory: Path, name: str, settings: Sequence[str] = ()) -> Iterator[None]:
    """Run a daemon that is ready inside the block. After the block, stop it and remove its arena
    files.

    `settings` are flags of `purgatoryd run`. Raises DaemonFailed if the daemon does not start, dies
    inside the block, or does not end cleanly.
    """
    log = directory / f"{name}.stderr"
    try:
        process = _start(directory, name, settings, log)
        try:
            _wait_ready(process, name)
            yield
        finally:  # if the daemon died, report this instead of errors that follow from it
            died, code = process.poll() is not None, _stop(process)
            if (died or code) and not isinstance(sys.exception(), KeyboardInterrupt):
                raise DaemonFailed(name, code, log.read_text().strip())
    finally:
        _remove_arena_files(paths_in(directory, name))


def _start(
    directory: Path, name: str, settings: Sequence[str], log: Path
) -> subprocess.Popen[bytes]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PURGATORYD_")}
    with log.open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "purgatoryd.cli", "run", "--name", name, *settings],
            env=inherited | {"PURGATORYD_DIR": str(directory)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # the run handles Ctrl-C and then stops its daemon
        )


def _wait_ready(process: subprocess.Popen[bytes], name: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith(b"ready"):
        process.wait(STOP_S)
        raise DaemonFailed(name, process.returncode, line.decode())


def _stop(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    process.terminate()
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        process.stdout.close()


def _remove_arena_files(paths: Paths) -> None:
    for name in (paths.arena, paths.private):
        shm.unlink(name)
        shm.unlink(f"{name}.new")
