"""Measures how long a daemon pauses when its arena files were removed, seen by a client.

The arena is that of bench_recovery.py. A client asks for one timer over and over while the files
are removed: its longest answer is the pause. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from bench_recovery import NAME, NAMESPACE, PATIENCE_S, Victim, fill, victim

from purgatoryd.clients import Client
from purgatoryd.shm_layout import shm

QUIET_S = 0.5
"""So long the client goes on once the files are there again."""


def once(one: Victim, client: Client) -> float:
    """Seconds of the longest answer around one removal."""
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
        "arena_mib": round(size / 2**20),
        "pause_median_ms": round(statistics.median(pauses_s) * 1000),
        "pause_worst_ms": round(max(pauses_s) * 1000),
    }


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timers", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for timers in arguments.timers:
        print(json.dumps(measure(timers, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
