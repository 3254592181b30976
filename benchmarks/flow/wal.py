"""Make a WAL by running a daemon, and start daemons for the measurements."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pyarrow as pa

from purgatoryd.clients import Client, Status
from purgatoryd.shm_layout.paths import paths_in
from purgatoryd.shm_layout.wal import segments

NAME = "bench"
TOPICS = 64
AT_ONCE = 50_000
PATIENCE_S = 300.0
MANY = 1_000_000
FIRING = 10  # one timer in FIRING is due at once; the others are cancelled


@contextmanager
def daemon(*arguments: str) -> Iterator[Path]:
    """Start a daemon in a new folder, and yield the folder. $PURGATORYD_DIR is set to it."""
    with tempfile.TemporaryDirectory(prefix="purgatoryd-bench-") as folder:
        os.environ["PURGATORYD_DIR"] = folder
        process = subprocess.Popen(
            [sys.executable, "-m", "purgatoryd.cli", "run", "--name", NAME, *arguments],
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith(b"ready"):
                raise SystemExit("the daemon did not start")
            yield Path(folder)
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            paths = paths_in(Path(folder), NAME)
            for arena_file in (paths.arena, paths.private):
                with suppress(posix_ipc.ExistentialError):
                    posix_ipc.unlink_shared_memory(arena_file)


def make(folder: Path, timers: int) -> int:
    """Write a WAL with `timers` timers; return the number of events in the WAL."""
    size = (
        "--wal-dir", str(folder), "--capacity", str(4 * AT_ONCE), "--payload-memory", "128M",
        "--replay-buffer", "65536", "--wal-buffer-bytes", "256M", "--retain-bytes", "1024G",
        "--wal-segment-bytes", "64M" if timers >= MANY else "1M",
    )  # fmt: skip
    with daemon(*size), Client(NAME, namespace="shop", timeout=PATIENCE_S) as client:
        for first in range(0, timers, AT_ONCE):
            _add_and_end(client, rows(first, min(timers, first + AT_ONCE)))
    return events(folder)


def rows(first: int, last: int) -> pa.Table:
    """Return the timers with numbers `first` to `last` - 1. Their keys, topics and payloads are
    like those of a shop."""
    numbers = np.arange(first, last)
    text = pa.array(numbers).cast(pa.string())
    due = np.where(numbers % FIRING == 0, 0.0, 3600.0)
    topics = pa.array((numbers % TOPICS).astype("i4"))
    names = pa.array([f"orders-{i}" for i in range(TOPICS)])
    return pa.table({
        "key": pa.compute.binary_join_element_wise("order:2026:", text, ""),
        "delay": due,
        "topic": pa.DictionaryArray.from_arrays(topics, names).dictionary_decode(),
        "payload": pa.compute.binary_join_element_wise(
            '{"order": ', text, ', "remind": true, "channel": "mail"}', ""
        ).cast(pa.binary()),
    })  # fmt: skip


def _add_and_end(client: Client, table: pa.Table) -> None:
    left: Any = table
    while left.num_rows:
        statuses = client.add_many(left, mode="keep").statuses
        left = left.filter(pa.array(statuses == Status.BUSY))
        if left.num_rows:
            time.sleep(0.01)
    stay = table.filter(pa.compute.greater(table["delay"], 0.0))
    client.cancel_many(stay["key"].combine_chunks())


def events(folder: Path) -> int:
    """Return the number of records in the sealed segments."""
    files = segments(folder / NAME)
    return files[-1].lsn - files[0].lsn
