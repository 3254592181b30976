"""Measure how long a client waits while a daemon replaces its removed arena files.

The arena has the content of bench_recovery.py. A client looks up one timer repeatedly while the
files are removed. While the daemon replaces the files, its loop does not iterate and answers
nothing. So the result is the longest time until an answer. Writes
benchmarks/results/place_again.json, and the table of these results in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from bench_recovery import NAME, NAMESPACE, PATIENCE_S, Victim, fill, victim
from recording import machine, spread, write_result, write_section

from purgatoryd.clients import Client
from purgatoryd.shm_layout import shm

RESULTS = Path(__file__).resolve().parent / "results" / "place_again.json"
QUIET_S = 0.5
"""Time in seconds for which the client continues after the files exist again."""


def once(one: Victim, client: Client) -> float:
    """Remove the files once; return the longest time until an answer, in seconds."""
    names = (one.paths.arena, one.paths.private)
    for name in names:
        shm.unlink(name)
    longest_s, until_s = 0.0, float("inf")
    while (begun_s := time.monotonic()) < until_s:
        client.get(b"timer:0")
        longest_s = max(longest_s, time.monotonic() - begun_s)
        if until_s == float("inf") and all(map(shm.exists, names)):
            until_s = time.monotonic() + QUIET_S
    return longest_s


def measure(timers: int, repeats: int) -> dict[str, Any]:
    with victim(timers) as one:
        fill(timers)
        size = sum((shm.MOUNT / name[1:]).stat().st_size for name in
                   (one.paths.arena, one.paths.private))  # fmt: skip
        with Client(NAME, namespace=NAMESPACE, timeout=PATIENCE_S) as client:
            pauses_s = [once(one, client) for _ in range(repeats)]
    return {
        "timers": timers,
        "arena_bytes": size,
        "repeats": repeats,
        "pause_s": spread(pauses_s),
        "load_average": os.getloadavg(),
    }


def table(found: dict[str, Any]) -> str:
    rows = [
        "| timers | arena | pause, median | lowest | highest |",
        "| --- | --- | --- | --- | --- |",
    ]
    for size in found["sizes"]:
        pause = " | ".join(f"{size['pause_s'][one]:.1f} s" for one in ("median", "low", "high"))
        rows.append(f"| {size['timers']:,} | {size['arena_bytes'] / 2**30:.2f} GiB | {pause} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timers", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    arguments = parser.parse_args()
    found = {
        "command": "make bench-place-again",
        "machine": machine(),
        "sizes": [measure(timers, arguments.repeats) for timers in arguments.timers],
    }
    print(json.dumps(found, indent=1))
    if not arguments.dry:
        write_result(RESULTS, found)
        write_section("place again", table(found))


if __name__ == "__main__":
    main()
