"""Start a daemon for a benchmark, and remove it afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import posix_ipc

from purgatoryd.shm_layout.paths import Paths, paths_in
from purgatoryd.shm_layout.shards import read_table

PATIENCE_S = 120.0


@contextmanager
def own_daemon(
    directory: Path,
    name: str,
    settings: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    own_core: bool = False,
) -> Iterator[int]:
    """Start a daemon and yield its pid when it is ready. At the end, stop it and remove its arena
    files.

    `environment`: additional environment variables. With `--shards` in `settings`, a supervisor and
    its shards are started. `own_core`: the daemon's loop has one CPU and a real-time priority; this
    process and its later children use the other CPUs.
    """
    cpus = os.sched_getaffinity(0)
    if own_core:
        settings = [*settings, "--cpus", str(min(cpus)), "--realtime", "10"]
    process = subprocess.Popen(
        [sys.executable, "-m", "purgatoryd.cli", "run", "--name", name, *settings],
        env={**os.environ, "PURGATORYD_DIR": str(directory), **(environment or {})},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        if not process.stdout.readline().startswith(b"ready"):
            raise SystemExit("the daemon did not start")
        if own_core:
            os.sched_setaffinity(0, cpus - {min(cpus)} or cpus)
        yield process.pid
    finally:
        os.sched_setaffinity(0, cpus)
        process.terminate()
        process.wait(PATIENCE_S)
        table = read_table(directory, name)
        for daemon in table.daemons if table else [name]:
            remove_arena_files(paths_in(directory, daemon))


def remove_arena_files(paths: Paths) -> None:
    """Remove a daemon's arena, if it has one."""
    for arena_file in (paths.arena, paths.private):
        with suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(arena_file)
