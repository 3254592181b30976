"""Measure what the firing of spread timers costs a daemon, by their slack.

One daemon with one subscriber fires timers that are evenly spread, RATE a second. All are armed
before the measured seconds. The slacks alternate. CPU time is the time of all threads of the
daemon, as the kernel's scheduler counts it. Writes
benchmarks/results/slack.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_idle import listener, used
from own_daemon import own_daemon
from recording import machine, write_result

from purgatoryd.clients import Client
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.paths import client_paths

RESULTS = Path(__file__).resolve().parent / "results" / "slack.json"
SLACKS_S = (0.0, 0.001, 0.005)
AHEAD_S = 2.0


def measure(name: str, pid: int, rate: int, seconds: float, within_s: float) -> tuple[float, int]:
    """Return (CPU time of the daemon in us for each timer, wake-ups of the daemon)."""
    count = int(rate * seconds)
    with Client(name, timeout=60.0) as client:
        start_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(AHEAD_S * 1e9)
        deadlines = start_ns + (np.arange(count) * 1e9 / rate).astype("i8")
        keys = np.array([f"{within_s}:{n}".encode() for n in range(count)])
        table = {"key": keys, "deadline_boot_ns": deadlines}
        client.add_many(table, topic="busy", within=within_s, mode="replace")
    reader = Reader.attach(client_paths(name))
    before, fired = used(pid), reader.metrics.expiries
    time.sleep(max(0.0, (int(deadlines[-1]) - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) / 1e9))
    time.sleep(0.1)
    after, fired = used(pid), reader.metrics.expiries - fired
    reader.close()
    assert fired == count, (fired, count)
    return (after.cpu_ns - before.cpu_ns) / count / 1000, after.wakeups - before.wakeups


def main() -> None:
    """Measure each slack `--repetitions` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[float, list[tuple[float, int]]] = {slack_s: [] for slack_s in SLACKS_S}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PURGATORYD_DIR"] = folder
        settings = ["--capacity", "200000"]
        with own_daemon(Path(folder), "slack", settings) as pid, listener("slack"):
            for _ in range(arguments.repetitions):
                for slack_s, runs in found.items():
                    runs.append(measure("slack", pid, arguments.rate, arguments.seconds, slack_s))
    rows = []
    for slack_s, runs in found.items():
        cpu_us, wakeups = (statistics.median(column) for column in zip(*runs, strict=True))
        rows.append(
            {
                "slack_s": slack_s,
                "cpu_us_a_timer": [run[0] for run in runs],
                "wakeups": [run[1] for run in runs],
            }
        )
        print(f"slack {slack_s * 1000:g} ms: {cpu_us:.1f} us a timer, {wakeups:.0f} wake-ups")
    write_result(RESULTS, {**machine(), **vars(arguments), "rows": rows})


if __name__ == "__main__":
    main()
