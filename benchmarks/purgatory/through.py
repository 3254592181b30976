"""Runs through a daemon with four worker processes, each of which sends its share of the
requests."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from own_daemon import own_daemon

from purgatoryd.shm_layout import layout
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.paths import Paths, paths_in

from .experiment import MS, Experiment, Figures
from .messages import Bytes, Messages

WORKERS = 4
ITERATION_NS = 2 * MS
"""Interval between two iterations of a worker. A shorter interval takes too much CPU time from the
daemon if four workers share two CPUs with it."""
BEGIN_NS = 4_000 * MS
"""Time that all workers have to prepare their schedules."""
SETTLE_MS = 10_000
"""Time in which a worker's last messages, its acknowledgements, may still be sent after its run."""

OUTCOMES: int = lib.PG_M_OUTCOMES

Row = dict[str, Any]


# ---- a worker's connection ---------------------------------------------------------------


class Through:
    """The connection of one worker. It sends raw frames, with as many batches in flight as a
    session may have."""

    def __init__(
        self, experiment: Experiment, messages: Messages, check: Callable[[Bytes], None]
    ) -> None:
        self._check = check
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, SETTLE_MS)
        self._socket.connect(experiment.endpoint)
        self._in = messages.bytes.data
        self._under_way = 0
        self._outcomes: deque[bytes] = deque()
        self.out: Bytes = np.zeros(0, np.uint8)
        self._socket.send(self._in[: messages.hello(os.urandom(16))])
        reply = self._socket.recv()
        messages.session = int.from_bytes(reply[8:16], "little")

    def handle(self, length: int) -> None:
        batch = self._in[6] == layout.Message.BATCH
        while batch and self._under_way >= layout.WINDOW:
            self._take(self._socket.recv())
        self._socket.send(self._in[:length])
        self._under_way += batch

    def _take(self, message: bytes) -> None:
        if message[6] == OUTCOMES:
            self._outcomes.append(message)
            return
        self._under_way -= 1
        self._check(np.frombuffer(message, np.uint8))

    def advance(self, now_ns: int) -> None: ...

    def inbox(self) -> int:
        while not self._outcomes and int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._take(self._socket.recv(zmq.NOBLOCK))
        if not self._outcomes:
            return 0
        self.out = np.frombuffer(self._outcomes.popleft(), np.uint8)
        return len(self.out)

    def figures(self) -> Figures:
        return Figures()  # the daemon's figures are measured outside of the worker


# ---- the daemon --------------------------------------------------------------------------


def settings(experiment: Experiment) -> list[str]:
    """Return daemon settings with space for all requests that arrive in 350 ms."""
    slots = max(1 << 14, int(experiment.rate * 0.35))
    keys = slots * experiment.own + experiment.shared
    return [
        "--capacity", str(slots), "--watches", str(slots * (experiment.own + experiment.shared)),
        "--watch-keys", str(keys), "--payload-memory", str(slots * 224 + (8 << 20)),
        "--inbox", str(slots), "--replay-buffer", "1024", "--tick", "1ms",
    ]  # fmt: skip


@contextmanager
def daemon(experiment: Experiment) -> Iterator[tuple[Paths, int]]:
    """Start a daemon; yield its paths and its pid."""
    with tempfile.TemporaryDirectory() as directory:
        paths = paths_in(Path(directory), "bench")
        with own_daemon(Path(directory), "bench", settings(experiment)) as pid:
            yield paths, pid


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def check(paths: Paths) -> None:
    """Check every invariant of the arena, and that no operation is left."""
    reader = Reader.attach(paths)
    left, give_up_s = reader.metrics, time.monotonic() + SETTLE_MS / 1e3
    while (left.operations or left.outcomes) and time.monotonic() < give_up_s:
        time.sleep(0.01)
    if left.operations or left.outcomes:
        raise SystemExit(f"{left.operations} operations, {left.outcomes} outcomes left at the end")
    reader.check()
    reader.close()


# ---- a run -------------------------------------------------------------------------------


def shares(experiment: Experiment, paths: Paths) -> list[Experiment]:
    start_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + BEGIN_NS
    return [
        replace(
            experiment, rate=experiment.rate // WORKERS, requests=experiment.requests // WORKERS,
            seed=experiment.seed + n, worker=n, endpoint=f"ipc://{paths.cmd}", start_ns=start_ns,
        )
        for n in range(WORKERS)
    ]  # fmt: skip


def together(rows: list[Row], daemon_cpu_s: float, core_bytes: int) -> Row:
    """Merge the results of all workers: add the counts, and take the times of the worst worker."""
    count = sum(row["satisfied"] + row["expired"] for row in rows)
    sums = ("satisfied", "expired", "ambiguous", "wrong", "lost", "repeated")
    worst = ("drain_tail_ms", "late_p50_ms", "late_p99_ms", "late_max_ms", "aborted")
    workers_cpu_s = sum(
        row["cpu_per_million"] * (row["satisfied"] + row["expired"]) / 1e6 for row in rows
    )
    return {
        **{name: sum(row[name] for row in rows) for name in sums},
        **{name: max(row[name] for row in rows) for name in worst},
        "achieved": min(row["achieved"] for row in rows),
        "cpu_per_million": (workers_cpu_s + daemon_cpu_s) / max(count, 1) * 1e6,
        "cpu_daemon": daemon_cpu_s / max(count, 1) * 1e6,
        "core_bytes": core_bytes,
        "purges": 0, "purge": 0.0, "purge_max_ms": 0.0,
        "keeps_up": all(row["keeps_up"] for row in rows),
    }  # fmt: skip


def run_through(experiment: Experiment, command: list[str], environment: dict[str, str]) -> Row:
    """Run an experiment with a daemon and workers. A worker is started with `command` and one JSON
    argument."""
    with daemon(experiment) as (paths, pid):
        before_s = cpu_seconds(pid)
        workers = [
            subprocess.Popen(
                [*command, json.dumps(asdict(share))], env=environment, stdout=subprocess.PIPE
            )
            for share in shares(experiment, paths)
        ]
        rows = [json.loads(worker.communicate()[0]) for worker in workers]
        arena = os.stat(f"/dev/shm{paths.arena}")
        row = together(rows, cpu_seconds(pid) - before_s, arena.st_blocks * 512)
        if not row["aborted"] and not row["lost"]:
            check(paths)
        return row
