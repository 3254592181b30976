"""Measure the effect of a flooding namespace, and of a catch-up, on other work of a real daemon.

purgatoryd is a wheel of this checkout, installed in a temporary environment; with `--dry` it is the
one that Python imports. Four parts, each on a new daemon:

namespace: a client adds timers in one namespace and receives their notices, while another process
    adds and cancels timers in another namespace as fast as it can. The situations alternate:
    without the flood, with it, and with a process that uses as much CPU time as the flood but does
    not contact the daemon.
own core: the same. The daemon has one CPU and a real-time priority, and all other processes have
    the other CPUs, so that no flooding client takes CPU time from the daemon.
admin: pings on the admin socket without and with 256 clients that flood the daemon.
catch_up: timers that come due while late timers are caught up after a pause.

Target: the flood moves the 99th percentiles of calls and of lateness by at most RATIO_MAX, compared
with the process that uses as much CPU time; medians of the ratios of each round.

Writes benchmarks/results/flood.json and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from bench_hostile import BUSY, at_work, processor_s
from installed import run_with_wheel
from own_daemon import own_daemon
from recording import machine, quantile, spread, spread_text, write_result, write_section

from purgatoryd.clients import Admin, Client, Subscriber
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.paths import paths_in

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "flood.json"
NAME = "bench"
RATIO_MAX = 1.5
PATIENCE_S = 120.0
GAP_S = 0.001
DELAY_S = 0.02
CLIENTS = 256
FLOOD = """
import sys
from purgatoryd.clients import Client
rows = [(f"f{n}", 30.0) for n in range(1000)]
keys = [key for key, _ in rows]
with Client("bench", namespace="flood", timeout=120) as client:
    print("ready", flush=True)
    while True:
        client.add_many(rows, mode="replace")
        client.cancel_many(keys)
"""
FLOODS = f"""
import asyncio
from purgatoryd.clients import AsyncClient
rows = [(f"f{{n}}", 30.0) for n in range(100)]
async def flood(n):
    async with AsyncClient("bench", namespace=f"flood{{n % 8}}", timeout=120) as client:
        while True:
            await client.add_many(rows, mode="replace")
async def main():
    tasks = [asyncio.create_task(flood(n)) for n in range({CLIENTS})]
    await asyncio.sleep(3)
    print("ready", flush=True)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""
"""Processes that flood the daemon until they are killed."""

Figures = dict[str, float]


@contextmanager
def daemon(*settings: str, own_core: bool = False) -> Iterator[tuple[int, Path]]:
    """Start a daemon in a directory of its own; yield its pid and the directory."""
    with tempfile.TemporaryDirectory(prefix="purgatoryd-bench-") as directory:
        os.environ["PURGATORYD_DIR"] = directory
        with own_daemon(Path(directory), NAME, settings, own_core=own_core) as pid:
            yield pid, Path(directory)


def stats(directory: Path) -> dict[str, int]:
    """Return the statistics in the daemon's arena."""
    with closing(Reader.attach(paths_in(directory, NAME))) as reader:
        return reader.stats()


class Quiet:
    """A client of another namespace, which measures its calls and its notices."""

    def __init__(self) -> None:
        self.client = Client(NAME, namespace="quiet", timeout=PATIENCE_S)
        self.client.add("probe", delay=86_400)
        self._late: list[float] = []
        self._ends = False
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        with Subscriber(NAME, namespace="quiet", topics=["live"]) as subscriber:
            while not self._ends:
                notice = subscriber.get(0.1)
                if notice is not None:
                    self._late.append(notice.lateness_ns / 1e6)

    def probe(self, seconds: float, until: Callable[[], bool] = lambda: False) -> Figures:
        """Call the daemon for `seconds`, or until `until` is true. Return latencies of calls and
        latenesses of timers, in ms."""
        self._late, trips, end_s = [], list[float](), time.perf_counter() + seconds
        number = 0
        while (begun_s := time.perf_counter()) < end_s and not until():
            number += 1
            self.client.add(f"k{number}", DELAY_S, topic="live", mode="replace")
            trips.append((time.perf_counter() - begun_s) * 1e3)
            time.sleep(GAP_S)
        time.sleep(2 * DELAY_S)
        found: Figures = {}
        for name, values in (("call", sorted(trips)), ("late", sorted(self._late))):
            parts = ((50, 0.5), (99, 0.99), (100, 1.0))
            found |= {f"{name}_p{part}_ms": quantile(values, share) for part, share in parts}
        return found

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        self.client.close()


def namespace_round(quiet: Quiet, seconds: float) -> dict[str, Figures]:
    """Measure without the flood, with it, and with a process that uses the same CPU time."""
    found = {"without": quiet.probe(seconds)}
    with at_work([sys.executable, "-c", FLOOD]) as flood:
        before_s = processor_s(flood)
        found["with"] = quiet.probe(seconds)
        share = min(1.0, (processor_s(flood) - before_s) / seconds)
    with at_work([sys.executable, "-c", BUSY, str(share)]):
        found["loaded"] = quiet.probe(seconds)
    return found


def pings(seconds: float) -> Figures:
    """Ping the admin socket for `seconds`. Return round trips in ms."""
    trips, end_s = [], time.perf_counter() + seconds
    with Admin(NAME, timeout=PATIENCE_S) as admin:
        admin.ping()
        while (begun_s := time.perf_counter()) < end_s:
            admin.ping()
            trips.append((time.perf_counter() - begun_s) * 1e3)
            time.sleep(GAP_S)
    ordered = sorted(trips)
    parts = ((50, 0.5), (99, 0.99), (100, 1.0))
    return {f"ping_p{part}_ms": quantile(ordered, share) for part, share in parts}


def admin_round(seconds: float) -> dict[str, Figures]:
    """Measure pings without and with many flooding clients."""
    found = {"without": pings(seconds)}
    with at_work([sys.executable, "-c", FLOODS]):
        found["with"] = pings(seconds)
    return found


def catch_up(count: int, seconds: float, rate: int) -> dict[str, Figures]:
    """Measure a live namespace without a catch-up and during one of `count` timers."""
    settings = (
        "--capacity",
        str(count + 100_000),
        "--payload-memory",
        f"{count // 10_000 + 64}MiB",
    )
    with daemon(*settings) as (_, directory), closing(Quiet()) as quiet:
        found = {"without": quiet.probe(seconds)}
        with Admin(NAME, timeout=PATIENCE_S) as admin:
            admin.set_namespace("late", paused=True, late_per_s=rate)
            with Client(NAME, namespace="late", timeout=PATIENCE_S) as client:
                for begin in range(0, count, 50_000):
                    client.add_many([(f"k{begin + n}", 0.0) for n in range(min(50_000, count))])
            while stats(directory)["backlog"] < count:
                time.sleep(0.1)
            begun_s = time.perf_counter()
            admin.set_namespace("late", paused=False)
        found["with"] = quiet.probe(
            PATIENCE_S, lambda: time.perf_counter() > begun_s + 0.5 and not quick_backlog(directory)
        )
        taken_s = time.perf_counter() - begun_s
    return found | {"catch_up": {"timers": count, "per_s": count / taken_s}}


def quick_backlog(directory: Path) -> int:
    """Return the backlog, read at most every 0.2 s."""
    now_s = time.perf_counter()
    if now_s > quick_backlog.at_s + 0.2:  # type: ignore[attr-defined]
        quick_backlog.at_s = now_s  # type: ignore[attr-defined]
        quick_backlog.value = stats(directory)["backlog"]  # type: ignore[attr-defined]
    return quick_backlog.value  # type: ignore[attr-defined, no-any-return]


quick_backlog.at_s = 0.0  # type: ignore[attr-defined]
quick_backlog.value = 1  # type: ignore[attr-defined]


def summary(rounds: list[dict[str, Figures]]) -> dict[str, dict[str, Any]]:
    """Return median, minimum and maximum of each figure, and the ratios of the 99th percentiles."""
    found: dict[str, dict[str, Any]] = {
        when: {name: spread([one[when][name] for one in rounds]) for name in rounds[0][when]}
        for when in rounds[0]
    }
    for base in found.keys() - {"with", "catch_up"}:
        for name in (n for n in found["with"] if n.endswith("p99_ms")):
            ratios = [one["with"][name] / one[base][name] for one in rounds]
            found.setdefault("ratios", {})[f"{name[:-3]}_to_{base}"] = spread(ratios)
    return found


def targets(figures: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return which ratios of a flooding namespace meet the target."""
    return {
        f"{part}: {name}": values["median"] <= RATIO_MAX
        for part, found in figures.items()
        for name, values in found["ratios"].items()
        if name.endswith("_to_loaded")
    }


def table(figures: dict[str, dict[str, Any]]) -> str:
    """Return the table for docs/benchmarks.md: medians over the rounds."""
    rows = ["| | without | with | same CPU use | ratio to that |", "| --- " * 5 + "|"]
    for part, found in figures.items():
        for name in (n for n in found["with"] if n.endswith(("p50_ms", "p99_ms"))):
            whens = ("without", "with", "loaded")
            cells = [f"{found[w][name]['median']:.2f}" if w in found else "" for w in whens]
            measure = name.removesuffix("_ms")
            if ratio := found["ratios"].get(f"{measure}_to_loaded"):
                cells.append(spread_text(ratio, ".2f"))
            else:
                cells.append("")
            rows.append(f"| {part}: {measure} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timers", type=int, default=1_000_000, help="late timers")
    parser.add_argument("--rate", type=int, default=0, help="late timers per second; 0 = default")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("parts", nargs="*", default=["namespace", "own core", "admin", "catch_up"])
    parser.add_argument("--installed", action="store_true", help="use the importable purgatoryd")
    given = parser.parse_args()
    if not (given.installed or given.dry):
        return run_with_wheel(__file__, sys.argv[1:])
    figures: dict[str, dict[str, Any]] = {}
    if "namespace" in given.parts:
        with daemon() as _, closing(Quiet()) as quiet:
            rounds = [namespace_round(quiet, given.seconds) for _ in range(given.rounds)]
        figures["namespace"] = summary(rounds)
    if "own core" in given.parts:
        with daemon(own_core=True), closing(Quiet()) as quiet:
            rounds = [namespace_round(quiet, given.seconds) for _ in range(given.rounds)]
        figures["own core"] = summary(rounds)
    if "admin" in given.parts:
        with daemon():
            figures["admin"] = summary([admin_round(given.seconds) for _ in range(given.rounds)])
    if "catch_up" in given.parts:
        rounds = [catch_up(given.timers, given.seconds, given.rate) for _ in range(given.rounds)]
        figures["catch_up"] = summary(rounds)
    print(json.dumps(figures, indent=1))
    if not given.dry:
        document = {"command": "make bench-flood", "machine": machine(), "seconds": given.seconds,
                    "rounds": given.rounds, "target_ratio": RATIO_MAX,
                    "targets": targets(figures), "figures": figures}  # fmt: skip
        write_result(RESULTS, document)
        write_section("flood", table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
