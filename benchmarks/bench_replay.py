"""Measure whether a reader of past notices disturbs live notices.

A daemon with a WAL has fired many timers, and its replay buffer has dropped nearly all of their
notices. A live subscriber measures the time from the deadline of timers, which are due at a steady
rate, until it receives their notices. Windows alternate: in one nobody reads past notices; in the
next one another process reads the next part of them with REPLAY, and the window ends with the part.
All parts together are all past notices. A ratio divides the 99th percentile of a window with the
reader by that of the window before it. purgatoryd is a wheel of this checkout, installed in a
temporary environment.

Writes benchmarks/results/replay.json and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from installed import run_with_wheel
from own_daemon import own_daemon
from recording import machine, quantile, spread, spread_text, write_result, write_section

from purgatoryd.clients import Client, Subscriber
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.paths import paths_in

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "replay.json"
RATIO_MAX = 1.2
"""Target: median of the ratios."""
PATIENCE_S = 120.0
CHUNK = 100_000
BUFFER = 65_536
AHEAD_S = 0.5
READER = """
import sys, time
from purgatoryd.clients.past import Past
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.paths import client_paths
from purgatoryd.shm_layout.wire import PastRange
past = Past(lambda: client_paths(sys.argv[1]))
first, last = map(int, sys.argv[2:])
begun_s, count = time.monotonic(), 0
print(flush=True)
while first <= last:
    page = past.page(PastRange("default", "past", 0, 0, first, last))
    if page is None:
        time.sleep(0.0005)
        continue
    count += wire.decode_notice_head(page.body).records
    first = page.next
print(count, time.monotonic() - begun_s, flush=True)
"""


def fill(name: str, directory: Path, notices: int) -> None:
    """Fire timers, and wait until all have fired."""
    with Client(name, timeout=PATIENCE_S) as client:
        for first in range(0, notices, CHUNK):
            keys = [f"past:{n}" for n in range(first, min(first + CHUNK, notices))]
            client.add_many({"key": keys, "delay": [0.0] * len(keys)}, topic="past")
            _await_fired(directory, name, first + len(keys))


def _await_fired(directory: Path, name: str, count: int) -> None:
    reader = Reader.attach(paths_in(directory, name))
    until_s = time.monotonic() + PATIENCE_S
    while int(reader.metrics.expiries) < count:
        if time.monotonic() > until_s:
            raise SystemExit("the timers did not fire")
        time.sleep(0.01)
    reader.close()


def live(name: str, rate: int, ended: Callable[[], bool]) -> list[float]:
    """Return the time from deadline to receipt of each live notice, in microseconds, until a window
    has ended and has a notice."""
    late_us: list[float] = []
    step_s = 0.1
    with (
        Subscriber(name, topics=["live"], timeout=PATIENCE_S) as source,
        Client(name, timeout=PATIENCE_S) as client,
    ):
        number = 0
        while not (late_us and ended()):
            begun_s, count = time.monotonic(), int(rate * step_s)
            delays = [AHEAD_S + step_s * n / count for n in range(count)]
            keys = [f"live:{number + n}" for n in range(count)]
            client.add_many({"key": keys, "delay": delays}, topic="live")
            number += count
            while (left_s := begun_s + step_s - time.monotonic()) > 0:
                _receive(source, left_s, late_us)
        received = len(late_us)
        while len(late_us) < number:
            _receive(source, PATIENCE_S, late_us)
    return late_us[:received]


def _receive(source: Subscriber, limit_s: float, late_us: list[float]) -> None:
    for notice in source.get_many(timeout=limit_s) or ():
        assert notice.received_boot_ns is not None
        late_us.append((notice.received_boot_ns - notice.deadline_boot_ns) / 1000)


def alone(name: str, rate: int, seconds: float) -> list[float]:
    """Return the live times of a window in which nobody reads past notices."""
    end_s = time.monotonic() + seconds
    return live(name, rate, lambda: time.monotonic() > end_s)


def with_reader(name: str, rate: int, part: range) -> tuple[list[float], int, float]:
    """Return (live times, number of past notices that the reader got, its seconds)."""
    words = [name, str(part[0] + 1), str(part[-1] + 1)]
    with subprocess.Popen(
        [sys.executable, "-c", READER, *words], stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        try:
            reader.stdout.readline()
            late_us = live(name, rate, lambda: reader.poll() is not None)
            count, taken_s = reader.stdout.readline().split()
        finally:
            reader.kill()
    return late_us, int(count), float(taken_s)


def p99(late_us: list[float]) -> float:
    return quantile(sorted(late_us), 0.99)


def summary(windows: list[list[float]]) -> dict[str, float]:
    ordered = sorted(chain.from_iterable(windows))
    return {
        "notices": len(ordered),
        "p50_us": quantile(ordered, 0.5),
        "p99_us": quantile(ordered, 0.99),
        "p999_us": quantile(ordered, 0.999),
    }


def measure(notices: int, seconds: float, rounds: int, rate: int) -> dict[str, Any]:
    calm: list[list[float]] = []
    disturbed: list[list[float]] = []
    read, read_s = 0, 0.0
    with tempfile.TemporaryDirectory(prefix="pg-replay-") as folder:
        directory = Path(folder)
        os.environ["PURGATORYD_DIR"] = str(directory)
        settings = (
            "--capacity", str(4 * CHUNK), "--replay-buffer", str(BUFFER),
            "--wal-dir", str(directory / "wal"), "--retain-age", "1d",
        )  # fmt: skip
        with own_daemon(directory, "replay", settings):
            fill("replay", directory, notices)
            for number in range(rounds):
                part = range(notices * number // rounds, notices * (number + 1) // rounds)
                calm.append(alone("replay", rate, seconds))
                some, count, taken_s = with_reader("replay", rate, part)
                disturbed.append(some)
                read, read_s = read + count, read_s + taken_s
    ratios = spread([p99(b) / p99(a) for a, b in zip(calm, disturbed, strict=True)])
    found = {"alone": summary(calm), "with a reader": summary(disturbed)}
    return {
        "command": "make bench-replay",
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "past_notices": notices,
        "rounds": rounds,
        "rate_per_s": rate,
        "live": found,
        "reader": {"notices": read, "notices_per_s": read / read_s, "complete": read == notices},
        "p99_ratio": ratios,
        "p99_ratio_of_all_windows": found["with a reader"]["p99_us"] / found["alone"]["p99_us"],
        "target_ratio": RATIO_MAX,
        "met": ratios["median"] <= RATIO_MAX,
    }


def table(found: dict[str, Any]) -> str:
    """Return the table for docs/benchmarks.md."""
    rows = ["| reader of past notices | p50 | p99 | p99.9 |", "| --- " * 4 + "|"]
    for name, times in found["live"].items():
        cells = (f"{times[part]:,.0f}" for part in ("p50_us", "p99_us", "p999_us"))
        rows.append(f"| {'none' if name == 'alone' else 'one'} | {' | '.join(cells)} |")
    verdict = "met" if found["met"] else "missed"
    rows.append(f"| *ratio* | | {spread_text(found['p99_ratio'], '.2f')}, {verdict} | |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notices", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="window without a reader")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rate", type=int, default=1000, help="live notices per second")
    parser.add_argument("--quick", action="store_true", help="a short run that writes no file")
    parser.add_argument("--installed", action="store_true", help="use the importable purgatoryd")
    given = parser.parse_args()
    if not (given.installed or given.quick):
        return run_with_wheel(__file__, sys.argv[1:])
    if given.quick:
        given.notices, given.seconds, given.rounds = 200_000, 1.0, 2
    found = measure(given.notices, given.seconds, given.rounds, given.rate)
    print(found)
    if not given.quick:
        write_result(RESULTS, found)
        write_section("replay", table(found))
    return 0 if found["reader"]["complete"] else 1


if __name__ == "__main__":
    sys.exit(main())
