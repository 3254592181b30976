"""Measure how long a daemon takes to recover after a kill, from its exec until READY.

The arena contains timers with payloads, and operations; a namespace has quotas. The daemon is
killed and started repeatedly. Between a kill and a start, a separate process runs the steps of the
recovery on the same arena and measures the time of each step. A waiting client measures the time
from READY until it is served. Writes benchmarks/results/recovery.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from own_daemon import remove_arena_files
from purgatory.through import cpu_seconds
from recording import machine, spread, write_result

from purgatoryd.clients import Admin, AllOf, Client, Purgatory
from purgatoryd.shm_layout.paths import Paths, paths_in

RESULTS = Path(__file__).resolve().parent / "results" / "recovery.json"
NAME, NAMESPACE = "bench", "bench"
HOUR_S = 3600.0
CHUNK = 100_000
PATIENCE_S = 600.0
PAYLOAD = b"p" * 24
SHARE = 5
"""One in SHARE timers is an operation."""

# Program that runs the steps of a daemon before it is ready, and prints the time at the end of each
# step.
STEPS = """
import sys, time
at = [time.monotonic()]
import purgatoryd.cli.app, purgatoryd.cli.service, purgatoryd.daemon.main
from pathlib import Path
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.paths import paths_in
at.append(time.monotonic())
paths = paths_in(Path(sys.argv[1]), sys.argv[2])
arena = Arena.attach(paths.arena, paths.private)
at.append(time.monotonic())
arena.rebuild(HOST.boot_ns())
at.append(time.monotonic())
print(*at)
arena.close()
"""


def run_arguments(timers: int) -> list[str]:
    operations = str(timers // SHARE + 1024)
    return [
        "--capacity", str(timers + 1024), "--payload-memory", str(timers * 160 + (1 << 24)),
        "--watches", operations, "--watch-keys", "65536", "--inbox", operations,
    ]  # fmt: skip


class Victim:
    """The daemon that is killed and started again."""

    def __init__(self, directory: Path, timers: int) -> None:
        self.directory = directory
        self.paths: Paths = paths_in(directory, NAME)
        self.command = [sys.executable, "-m", "purgatoryd.cli", "run", "--name", NAME,
                        *run_arguments(timers)]  # fmt: skip
        self.ready_s = 0.0
        self.start()

    def start(self) -> float:
        """Start the daemon; return the seconds from exec to READY."""
        begun_s = time.monotonic()
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        if not self.process.stdout.readline().startswith(b"ready"):
            raise SystemExit("the daemon did not start")
        self.ready_s = time.monotonic()
        return self.ready_s - begun_s

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


@contextmanager
def victim(timers: int) -> Iterator[Victim]:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PURGATORYD_DIR"] = directory
        # let Python store bytecode, so that it is compiled once, as in an installation
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = directory
        one = Victim(Path(directory), timers)
        try:
            yield one
        finally:
            one.kill()
            remove_arena_files(one.paths)


def fill(timers: int) -> None:
    """Arm timers and operations that are far from due."""
    operations = timers // SHARE
    with Admin(NAME) as admin:
        admin.set_namespace(NAMESPACE, quota_timers=2 * timers)
    with Client(NAME, namespace=NAMESPACE, timeout=PATIENCE_S) as client:
        for first in range(0, timers - operations, CHUNK):
            rows = (
                (b"timer:%d" % n, HOUR_S + n % 3600, "topic", PAYLOAD)
                for n in range(first, min(first + CHUNK, timers - operations))
            )
            client.add_many(rows)
    with Purgatory(NAME, namespace=NAMESPACE, timeout=PATIENCE_S) as purgatory:
        for first in range(0, operations, CHUNK):
            purgatory.watch_many(
                (b"operation:%d" % n, AllOf({b"key:%d" % (n % 10_000): 1 + n}), HOUR_S, PAYLOAD)
                for n in range(first, min(first + CHUNK, operations))
            )


def steps(directory: Path) -> dict[str, float]:
    """Return the seconds of each recovery step, measured in another process on the arena of a dead
    daemon."""
    begun_s = time.monotonic()
    command = [sys.executable, "-c", STEPS, str(directory), NAME]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    at = [begun_s, *map(float, said.split())]
    names = ("interpreter", "imports", "map", "rebuild")
    return {name: b - a for name, (a, b) in zip(names, pairwise(at), strict=True)}


def once(one: Victim, client: Client) -> dict[str, float]:
    """Kill the daemon once and return the times of its recovery."""
    one.kill()
    found = steps(one.directory)
    served_s: list[float] = []

    def wait() -> None:
        client.add(b"probe", HOUR_S, mode="replace")
        served_s.append(time.monotonic())

    waiting = threading.Thread(target=wait)
    waiting.start()
    found["ready"] = one.start()
    found["cpu"] = cpu_seconds(one.process.pid)
    waiting.join(PATIENCE_S)
    found["rest"] = found["ready"] - sum(
        found[n] for n in ("interpreter", "imports", "map", "rebuild")
    )
    found["served"] = served_s[0] - one.ready_s
    return found


def measure(timers: int, repeats: int) -> dict[str, Any]:
    with victim(timers) as one:
        fill(timers)
        with Client(NAME, namespace=NAMESPACE, timeout=PATIENCE_S) as client:
            runs = [once(one, client) for _ in range(repeats)]
    return {
        "timers": timers,
        "operations": timers // SHARE,
        "repeats": repeats,
        "seconds": {name: spread([run[name] for run in runs]) for name in runs[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timers", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    arguments = parser.parse_args()
    sizes = [measure(timers, arguments.repeats) for timers in arguments.timers]
    document = {
        "command": "make bench-recovery",
        "machine": machine(),
        "load_average": os.getloadavg(),
        "sizes": sizes,
    }
    print(json.dumps(sizes, indent=1))
    if not arguments.dry:
        write_result(RESULTS, document)


if __name__ == "__main__":
    main()
