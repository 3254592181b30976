"""Measure the cost of counting metrics, and the cost of reading them.

Counting: one fixed load on a whole arena (metrics/arena.c), with the normal core and with a core
without histograms. Reading: lateness of notices while a process reads the metrics ten times a
second, and while no process does. These comparisons are measured in pairs whose order changes. Each
side of a pair is the minimum of several alternating runs, because other work of the machine only
adds time. Pairs of two identical sides show the remaining noise. A ratio is the time with metrics
divided by the time without metrics. A ratio meets its limit if the upper end of the ratio's
interval is at most the limit. If valgrind is installed, the benchmark also counts the instructions
of the load, which do not depend on other work. Writes benchmarks/results/metrics.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from bench_placement import NAME, interval, lateness
from own_daemon import own_daemon
from recording import machine, write_result, write_section

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "metrics.json"
FLAGS = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-pthread"]
WITHOUT = "-DPG_UNMEASURED"
TIMERS = 65_536
"""Number of timers in one round."""
COST_MAX = 1.03
READER_MAX = 1.05
COUNTING_TRIES, READING_TRIES = 12, 3
GAP_NS = 1_000_000
"""Interval between deadlines in ns, so short that the slowest 1 % has about twenty timers."""
READER = """
import sys, time
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.metrics import read_metrics
from purgatoryd.shm_layout.paths import arena_paths

reader = Reader.attach(arena_paths(sys.argv[1]))
print(flush=True)
while True:
    read_metrics(reader)
    time.sleep(0.1)
"""
Run = Callable[[], float]


# ---- counting ----------------------------------------------------------------------------------


def build(folder: Path, *flags: str) -> Path:
    """Build the load program with a core that is compiled with these flags; return its path."""
    core = list((ROOT / "shm_layout" / "core").rglob("*.c"))
    sources = sorted([*core, ROOT / "benchmarks" / "metrics" / "arena.c"])
    binary = folder / f"arena{'-'.join(flags)}"
    compiler, more = (shlex.split(os.environ.get(n, "")) for n in ("CC", "CFLAGS"))
    command = [*(compiler or ["cc"]), *FLAGS, *flags, f"-I{ROOT / 'shm_layout'}", *more]
    subprocess.run([*command, "-o", str(binary), *map(str, sources)], check=True)
    return binary


def ns_per_timer(binary: Path, rounds: int) -> float:
    done = subprocess.run([str(binary), str(rounds)], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["ns_per_timer"])


def instructions_per_timer(binary: Path) -> float:
    """Return the number of instructions per timer in one additional round, including those that
    build the messages."""
    few, more = (instructions(binary, rounds) for rounds in (1, 2))
    return (more - few) / TIMERS


def instructions(binary: Path, rounds: int) -> int:
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(binary)]
    run = subprocess.run([*command, str(rounds)], check=True, capture_output=True, text=True)
    (found,) = re.findall(r"Collected : (\d+)", run.stderr)
    return int(found)


# ---- reading -----------------------------------------------------------------------------------


@contextmanager
def reading() -> Iterator[None]:
    """Read all metrics ten times a second during the `with` block."""
    command = [sys.executable, "-c", READER, NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        try:
            assert reader.stdout is not None
            reader.stdout.readline()
            yield
        finally:
            reader.kill()


def p99_us(notices: int, *, read: bool) -> float:
    """Return the 99th percentile of the lateness with which notices are received, in us."""
    with reading() if read else nullcontext():
        return lateness(notices, GAP_NS)["receipt"]["p99"]


# ---- pairs -------------------------------------------------------------------------------------


def pair(runs: dict[str, Run], tries: int) -> dict[str, float]:
    """Run each side `tries` times, alternating; return the minimum of each side."""
    found = [{side: run() for side, run in runs.items()} for _ in range(tries)]
    return {side: min(one[side] for one in found) for side in runs}


def pairs(count: int, tries: int, without: Run, with_: Run) -> list[dict[str, float]]:
    """Run `count` pairs of both sides; the order of the sides changes from pair to pair."""
    order = {"without": without, "with": with_}
    swapped = dict(reversed(order.items()))
    return [pair(swapped if number % 2 else order, tries) for number in range(count)]


def ratio(found: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median of the pairs' ratios, and its 95 % interval."""
    ratios = [pair["with"] / pair["without"] for pair in found]
    return {"ratio": round(median(ratios), 4), "ratio_95": interval(ratios)}


def compared(
    count: int, tries: int, unit: str, limit: float, without: Run, with_: Run
) -> dict[str, Any]:
    """Compare the two sides in pairs, and the side `without` with itself."""
    found, noise = pairs(count, tries, without, with_), pairs(count, tries, without, without)
    figures = ratio(found)
    return {
        "unit": unit,
        **{side: round(median(pair[side] for pair in found), 2) for side in ("without", "with")},
        **figures,
        "noise": ratio(noise),
        "limit": limit,
        "met": figures["ratio_95"][1] <= limit,
    }


def counting(folder: Path, count: int, rounds: int, *, exact: bool) -> dict[str, Any]:
    plain, measured = build(folder, WITHOUT), build(folder)
    found = compared(
        count, COUNTING_TRIES, "ns of processor time per timer", COST_MAX,
        lambda: ns_per_timer(plain, rounds), lambda: ns_per_timer(measured, rounds),
    )  # fmt: skip
    if exact:
        found["instructions"] = counted(plain, measured)
    return found


def counted(plain: Path, measured: Path) -> dict[str, Any]:
    without, with_ = instructions_per_timer(plain), instructions_per_timer(measured)
    return {
        "without": round(without),
        "with": round(with_),
        "ratio": round(with_ / without, 4),
        "met": with_ / without <= COST_MAX,
    }


def being_read(folder: Path, count: int, notices: int) -> dict[str, Any]:
    os.environ["PURGATORYD_DIR"] = str(folder)
    with own_daemon(folder, NAME, []):
        return compared(
            count, READING_TRIES, "p99 of lateness in us", READER_MAX,
            lambda: p99_us(notices, read=False), lambda: p99_us(notices, read=True),
        )  # fmt: skip


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the table for docs/benchmarks.md."""
    rows = [
        "| | unit | without | with | ratio | 95 % | noise | at most |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    if exact := found["counting"].get("instructions"):
        rows.append(
            f"| counting | instructions per timer | {exact['without']} | {exact['with']} "
            f"| {exact['ratio']:.3f} | | | {COST_MAX}, {met(exact)} |"
        )
    for name, one in found.items():
        spread, noise = (
            f"{low:.3f} to {high:.3f}" for low, high in (one["ratio_95"], one["noise"]["ratio_95"])
        )
        rows.append(
            f"| {name} | {one['unit']} | {one['without']} | {one['with']} | {one['ratio']:.3f} "
            f"| {spread} | {noise} | {one['limit']}, {met(one)} |"
        )
    return "\n".join(rows) + "\n"


def met(one: dict[str, Any]) -> str:
    return "met" if one["met"] else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--rounds", type=int, default=5, help=f"rounds of {TIMERS} timers in one run"
    )
    parser.add_argument("--notices", type=int, default=2000, help="notices of one run")
    parser.add_argument(
        "--instructions", action=argparse.BooleanOptionalAction,
        default=shutil.which("valgrind") is not None,
        help="count instructions with valgrind (takes a minute)",
    )  # fmt: skip
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="purgatoryd-bench-") as directory:
        folder = Path(directory)
        figures = {
            "counting": counting(
                folder, arguments.pairs, arguments.rounds, exact=arguments.instructions
            ),
            "being read": being_read(folder, arguments.pairs, arguments.notices),
        }
    print(json.dumps(figures, indent=1))
    if not arguments.dry:
        document = {
            "command": "make bench-metrics", "machine": machine(), "pairs": arguments.pairs,
            "tries": {"counting": COUNTING_TRIES, "being read": READING_TRIES},
            "rounds": arguments.rounds, "notices": arguments.notices, **figures,
        }  # fmt: skip
        write_result(RESULTS, document)
        write_section("metrics", table(figures))


if __name__ == "__main__":
    main()
