"""Measure the lateness of notices while a process that never sleeps runs on every CPU.

The same load runs against a daemon without a placement and a daemon with a placement, in pairs
whose order changes. Pairs of two identical daemons show the machine's noise. The results are the
daemon's part (fired - deadline) and the total (receipt - deadline); a ratio above 1 means that the
placement made the time shorter. Writes benchmarks/results/placement.json and the table of
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from own_daemon import own_daemon
from recording import machine, write_result, write_section

from purgatoryd.clients import Client, Subscriber
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.paths import paths_in

RESULTS = Path(__file__).resolve().parent / "results" / "placement.json"
NAME = "bench"
GAP_NS = 5_000_000
SOON_NS = 20_000_000
PATIENCE_S = 120.0
RESAMPLES = 2000
SEED = 1
HOG = "print(flush=True)\nwhile True: pass"
Lateness = dict[str, float]


def variants() -> dict[str, list[str]]:
    """Return the flags of `purgatoryd run` for each variant. On a machine with few CPUs, `auto`
    pins nothing."""
    ours = sorted(os.sched_getaffinity(0))
    pinned = ["--cpus", f"{ours[-1]},{ours[0]}"]
    return {
        "none": ["--placement", "none"],
        "auto": [],
        "pinned": pinned,
        "realtime": ["--placement", "none", "--realtime", "10"],
        "pinned, realtime": [*pinned, "--realtime", "10"],
    }


# ---- one run -----------------------------------------------------------------------------------


@contextmanager
def hogs() -> Iterator[None]:
    """Run as many processes that never sleep as there are CPUs. They are not pinned, so the
    scheduler may move them."""
    command = [sys.executable, "-c", HOG]
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            hog = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(hog.kill)
            assert hog.stdout is not None
            hog.stdout.readline()
        yield


@contextmanager
def daemon(directory: Path, settings: list[str]) -> Iterator[dict[str, Any]]:
    """Start a new daemon; yield the parts of its placement that are in effect."""
    with own_daemon(directory, NAME, settings):
        reader = Reader.attach(paths_in(directory, NAME))
        figures = reader.stats()
        reader.close()
        yield {name: figures[name] for name in ("placed", "clamped", "reaper_cpu")}


def lateness(notices: int, gap_ns: int = GAP_NS) -> dict[str, Lateness]:
    """Return the lateness of timers whose deadlines are `gap_ns` apart: when fired and when
    received, in us."""
    fired, received = [], []
    with Subscriber(NAME, timeout=PATIENCE_S) as inbox, Client(NAME, timeout=PATIENCE_S) as timers:
        timers.add_many({
            "key": [f"{n}" for n in range(notices)],
            "delay_ns": [SOON_NS + n * gap_ns for n in range(notices)],
        })  # fmt: skip
        for _ in range(notices):
            notice = inbox.get(PATIENCE_S)
            assert notice is not None
            fired.append(notice.structural_lateness_ns / 1e3)
            received.append(notice.lateness_ns / 1e3)
    return {"daemon": summary(fired), "receipt": summary(received)}


def summary(values_us: list[float]) -> Lateness:
    cuts = quantiles(values_us, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98], "max": max(values_us)}


def run(directory: Path, settings: list[str], notices: int) -> dict[str, Any]:
    with daemon(directory, settings) as placed:
        return {"placed": placed, **lateness(notices)}


# ---- pairs -------------------------------------------------------------------------------------


def pair(directory: Path, settings: list[str], notices: int, *, swap: bool) -> dict[str, Any]:
    """Run once without a placement and once with these settings; return both results and their
    ratios."""
    both = {"without": variants()["none"], "with": settings}
    order = reversed(both) if swap else iter(both)
    found = {name: run(directory, both[name], notices) for name in order}
    ratios = {
        f"{part}_{figure}": found["without"][part][figure] / found["with"][part][figure]
        for part in ("daemon", "receipt")
        for figure in ("p50", "p99", "max")
    }
    return {**found, "ratios": ratios}


def interval(values: list[float]) -> list[float]:
    """Return the 95 % bootstrap interval of the median of these values."""
    draw = random.Random(SEED)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return [round(medians[int(RESAMPLES * share)], 3) for share in (0.025, 0.975)]


def figures(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of both sides, and for the ratio the median and the 95 % interval."""
    rows = {}
    for name in pairs[0]["ratios"]:
        part, figure = name.split("_")
        ratios = [one["ratios"][name] for one in pairs]
        rows[name] = {
            **{f"{side}_us": round(median(one[side][part][figure] for one in pairs), 1)
               for side in ("without", "with")},
            "ratio": round(median(ratios), 3),
            "ratio_95": interval(ratios),
        }  # fmt: skip
    return {"placed": pairs[0]["with"]["placed"], **rows}


def table(medians: dict[str, dict[str, Any]]) -> str:
    """Return the table of docs/benchmarks.md. It has the 99th percentile of the lateness without
    and with each setting."""
    rows = [
        "| settings | what is in force | of | without | with | ratio | 95 % |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in medians.items():
        for part in ("daemon", "receipt"):
            one = found[f"{part}_p99"]
            low, high = one["ratio_95"]
            rows.append(
                f"| {name} | {found['placed']['placed'] or 'nothing'} | {part} "
                f"| {one['without_us']:,.0f} µs | {one['with_us']:,.0f} µs "
                f"| {one['ratio']:.2f} | {low:.2f} to {high:.2f} |"
            )
    return "\n".join(rows) + "\n"


def write(document: dict[str, Any]) -> None:
    write_result(RESULTS, document)
    write_section("placement", table(document["medians"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--notices", type=int, default=300, help="notices of one run")
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    arguments = parser.parse_args()
    pairs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants()}
    with tempfile.TemporaryDirectory(prefix="purgatoryd-bench-") as directory, hogs():
        os.environ["PURGATORYD_DIR"] = directory
        for number in range(arguments.pairs):
            for name, settings in variants().items():
                swap = number % 2 == 1
                pairs[name].append(pair(Path(directory), settings, arguments.notices, swap=swap))
    medians = {name: figures(some) for name, some in pairs.items()}
    print(json.dumps(medians, indent=1))
    if not arguments.dry:
        write({
            "command": "make bench-placement", "machine": machine(), "pairs": arguments.pairs,
            "notices": arguments.notices, "settings": variants(), "medians": medians,
        })  # fmt: skip


if __name__ == "__main__":
    main()
