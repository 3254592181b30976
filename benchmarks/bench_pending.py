"""Measure what it costs to count, list, cancel and move pending timers.

A daemon has --timers timers with tags and random deadlines, in memory or with a WAL. One client
selects all of them. Another client asks for one timer again and again: its longest wait shows how
long the loop was busy. CPU time is the time of all threads of the daemon, as the kernel's scheduler
counts it. Writes benchmarks/results/pending.json, and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from own_daemon import own_daemon
from recording import machine, spread, spread_text, write_result, write_section

from purgatoryd.clients import Client

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "pending.json"
PATIENCE_S = 120.0
TARGET_MS = 500.0
"""Target for the CPU time of 1,000,000 cancels or moves, in ms."""
CHUNK = 100_000
Call = Callable[[Client], int]
CALLS: dict[str, Call] = {
    "count by tag": lambda c: c.count_timers(tag="t"),
    "list the first 1,000": lambda c: len(c.list_timers(limit=1000)),
    "shift": lambda c: c.reschedule_where(shift=60).done,
    "shift by tag": lambda c: c.reschedule_where(shift=60, tag="t").done,
    "move by prefix": lambda c: c.reschedule_where(delay=9000, prefix="key").done,
    "cancel": lambda c: c.cancel_where().done,
}


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process, also of those that have ended."""
    return time.clock_gettime_ns(~pid << 3 | 2)  # the clock of clock_getcpuclockid(3)


def fill(client: Client, timers: int) -> None:
    """Add the timers."""
    deadlines = np.random.default_rng(1).uniform(3600, 7200, timers)
    for first in range(0, timers, CHUNK):
        some = deadlines[first : first + CHUNK]
        table = {
            "key": [f"key:{first + n}" for n in range(len(some))],
            "delay": some,
            "payload": [b"p" * 32] * len(some),
        }
        client.add_many(table, tag="t")


@contextmanager
def prober(name: str) -> Iterator[list[float]]:
    """Ask for one timer again and again, and yield the list of the waits in ms."""
    waits_ms: list[float] = []
    stop = threading.Event()

    def run() -> None:
        with Client(name, namespace="probe", timeout=PATIENCE_S) as client:
            while not stop.is_set():
                start_s = time.perf_counter()
                client.get("k")
                waits_ms.append((time.perf_counter() - start_s) * 1000)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield waits_ms
    finally:
        stop.set()
        thread.join()


def measure(name: str, pid: int, timers: int) -> dict[str, dict[str, float]]:
    """Return CPU time, elapsed time and the waits of the prober, by call."""
    found: dict[str, dict[str, float]] = {}
    with Client(name, timeout=PATIENCE_S) as client:
        fill(client, timers)
        for call, act in CALLS.items():
            before_ns, start_s = cpu_ns(pid), time.perf_counter()
            done = act(client)
            elapsed_ms = (time.perf_counter() - start_s) * 1000
            assert done in (timers, min(timers, 1000)), (call, done)
            found[call] = {
                "cpu_ms": (cpu_ns(pid) - before_ns) / 1e6,
                "elapsed_ms": elapsed_ms,
            }
        fill(client, timers)
        with prober(name) as waits_ms:
            client.reschedule_where(shift=60, tag="t")
            client.cancel_where(prefix="key")
        found["a look-up meanwhile"] = {
            "p99_ms": float(np.percentile(waits_ms, 99)),
            "max_ms": max(waits_ms),
        }
    return found


def cell(samples: list[float], digits: int) -> str:
    """Return median, lowest and highest sample."""
    return spread_text(spread(samples), f",.{digits}f")


def rows_of(results: dict[str, list[dict[str, dict[str, float]]]]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| processor time in ms | in memory | with a WAL | at most 500 |",
        "| --- | --- | --- | --- |",
    ]
    for call in CALLS:
        runs = {way: [run[call]["cpu_ms"] for run in found] for way, found in results.items()}
        changes = call.startswith(("shift", "move", "cancel"))
        met = max(max(run) for run in runs.values()) <= TARGET_MS
        verdict = ("met" if met else "missed") if changes else ""
        cells = " | ".join(cell(run, 0) for run in runs.values())
        lines.append(f"| {call} | {cells} | {verdict} |")
    waits = [
        cell([run["a look-up meanwhile"]["p99_ms"] for run in found], 2)
        for found in results.values()
    ]
    lines.append(f"| *wait* of a look-up meanwhile, p99 | {' | '.join(waits)} | |")
    return lines


def main() -> None:
    """Measure both ways `--repetitions` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timers", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few timers, no result")
    arguments = parser.parse_args()
    timers = 20_000 if arguments.quick else arguments.timers
    results: dict[str, list[dict[str, Any]]] = {"in memory": [], "with a WAL": []}
    for _ in range(1 if arguments.quick else arguments.repetitions):
        for way, found in results.items():
            with tempfile.TemporaryDirectory() as folder:
                os.environ["PURGATORYD_DIR"] = folder
                settings = ["--capacity", str(timers * 6 // 5), "--payload-memory", "300M",
                            "--replay-memory", "16M"]  # fmt: skip
                settings += ["--wal-dir", f"{folder}/wal"] if way == "with a WAL" else []
                with own_daemon(Path(folder), "pending", settings) as pid:
                    found.append(measure("pending", pid, timers))
    lines = rows_of(results)
    print("\n".join(lines))
    if not arguments.quick:
        write_result(RESULTS, {**machine(), "timers": timers, "results": results})
        write_section("pending", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
