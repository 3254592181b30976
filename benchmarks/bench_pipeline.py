"""Measures the pipeline, step by step, on a journal that a real daemon wrote.

The journal: timers with keys and payloads, nine of ten cancelled, the others fired. Each run is a
process of its own: ship (without Spark), then silver and gold, sketches, the cold tier and bulk
adds in one session; what is measured in it first is *cold*, what is done again *warm*. Beside
each step the same is done by pyarrow or by DuckDB on the same files. Memory is the most that all
processes of a run had together (PSS): the daemon with its arena is one of them, and stands alone,
too; what is done beside is none. Writes
benchmarks/results/pipeline.json and the table in docs/benchmarks.md; `--quick` only proves that all
of it still runs: small sizes, one run, nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from bench_purgatory import machine
from flow import beside, journal, steps

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "pipeline.json"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- pipeline: begin -->\n", "<!-- pipeline: end -->\n"
SAMPLE_S = 0.25

Figures = dict[str, dict[str, float]]


# ---- one run -----------------------------------------------------------------------------------


class Memory(threading.Thread):
    """The most that this process and its children had at a moment, in bytes of PSS: all of them
    together, and the daemons among them, with their arenas, and the others by themselves."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks = {"peak_bytes": 0, "daemons_bytes": 0, "others_bytes": 0}
        self._end = threading.Event()

    def run(self) -> None:
        me = psutil.Process()
        while not self._end.wait(SAMPLE_S):
            found = {True: 0, False: 0}
            for process in (me, *me.children(recursive=True)):
                is_daemon, size = pss(process)
                found[is_daemon] += size
            now = (sum(found.values()), found[True], found[False])
            for name, size in zip(self.peaks, now, strict=True):
                self.peaks[name] = max(self.peaks[name], size)

    def stop(self) -> dict[str, float]:
        self._end.set()
        self.join()
        return {name: float(size) for name, size in self.peaks.items()}


def pss(process: psutil.Process) -> tuple[bool, int]:
    """Whether it is a daemon, and its bytes: 0 if it is gone, or does the same work beside."""
    try:
        command = process.cmdline()
        if beside.MODULE in command:
            return False, 0
        return "purgatoryd.cli" in command, int(process.memory_full_info().pss)
    except psutil.Error:
        return False, 0


def run_here(arguments: argparse.Namespace) -> Figures:
    """All steps, in this process and its children."""
    memory = Memory()
    memory.start()
    found: Figures = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        for name, figures in steps.all_steps(arguments, Path(folder)):
            found[name] = figures
            print(name, {key: round(value, 3) for key, value in figures.items()}, file=sys.stderr)
    found["memory"] = memory.stop()
    return found


def run_apart(arguments: argparse.Namespace) -> Figures:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--one", *size_of(arguments), "--journal",
               str(arguments.journal), "--directory", str(arguments.directory)]  # fmt: skip
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def size_of(arguments: argparse.Namespace) -> list[str]:
    """The flags that say how much is measured."""
    return ["--timers", str(arguments.timers), "--cold-rows", str(arguments.cold_rows),
            "--bulk-rows", str(arguments.bulk_rows)]  # fmt: skip


# ---- the document --------------------------------------------------------------------------------


def spread(runs: list[Figures]) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for step, figures in runs[0].items():
        found[step] = {}
        for name in figures:
            values = [run[step][name] for run in runs]
            found[step][name] = {
                "median": statistics.median(values), "low": min(values), "high": max(values)
            }  # fmt: skip
    return found


def document(arguments: argparse.Namespace, events: int, runs: list[Figures]) -> dict[str, Any]:
    found = spread(runs)

    def median(step: str, name: str) -> float:
        return found[step][name]["median"]

    many = median("sketches of 8000 groups", "warm")
    end_to_end = 1 / (1 / median("silver", "cold") + 1 / median("gold", "cold"))
    return {
        "machine": machine(),
        "command": "python benchmarks/bench_pipeline.py " + " ".join(size_of(arguments))
        + f" --runs {arguments.runs}",
        "load_average": os.getloadavg(),
        "events": events,
        "steps": found,
        "targets": {
            "ship, events/s, at least 2M": median("ship", "warm"),
            "ship to bare pyarrow, time, at most 1.5": median("ship", "to_pyarrow"),
            "bronze to gold, events/s, at least 0.5M": end_to_end,
            "sketches of 10 groups, rows/s, at least 4M": median("sketches of 8 groups", "warm"),
            "sketches of 8k groups, rows/s, at least 0.8M": many,
            "select a window, s, at most 0.5": median("window", "select_s"),
            "promote a window, s, at most 1.5": median("window", "promote_s"),
            "anti-join, rows/s, at least 2M": median("anti-join", "warm"),
            "bulk add, timers/s, at least 0.5M": median("bulk add", "warm"),
            "bulk add to add_many, rate, at least 0.7": median("bulk add", "to_add_many"),
            "cold load, rows/s, at least 0.35M": median("cold load", "warm"),
            "memory, the daemon's too, bytes, at most 2.2G": median("memory", "peak_bytes"),
        },
        "runs": runs,
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        "| step | cold | warm | beside it | its rate | to ours |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for step, figures in found["steps"].items():
        if "warm" in figures:
            rates = [figures.get(name, {}).get("median") for name in ("cold", "warm", "beside")]
            cold, warm, other = (f"{rate / 1e6:.2f} M/s" if rate else "" for rate in rates)
            times = figures["beside"]["median"] / figures["warm"]["median"]
            names = (step, cold, warm, beside.NAMES[step], other, f"{times:.1f}")
            lines.append(f"| {' | '.join(names)} |")
    window = {name: value["median"] for name, value in found["steps"]["window"].items()}
    memory = {name: of["median"] / 2**30 for name, of in found["steps"]["memory"].items()}
    lines += [
        "",
        f"A window of five minutes, {window['rows']:.0f} timers: selected in "
        f"{window['select_s']:.2f} s (DuckDB {window['beside_s']:.3f} s), hot after "
        f"{window['promote_s']:.2f} s. All processes together, the daemon and its arena among "
        f"them: {memory['peak_bytes']:.2f} GiB at most; the daemon alone "
        f"{memory['daemons_bytes']:.2f}, all others {memory['others_bytes']:.2f} at most.",
    ]
    return "\n".join(lines) + "\n"


def write(found: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    if PAGE.exists() and BEGIN in (page := PAGE.read_text()):
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(found) + END + rest.partition(END)[2])


# ---- the command ---------------------------------------------------------------------------------


@contextmanager
def working(arguments: argparse.Namespace) -> Iterator[None]:
    """A folder for the journal, if none is given."""
    made = arguments.journal is None
    if made:
        arguments.journal = Path(tempfile.mkdtemp(dir=arguments.directory, prefix="bench-journal-"))
        began_s = time.perf_counter()
        events = journal.make(arguments.journal, arguments.timers)
        print(f"{events} events in {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
    try:
        yield
    finally:
        if made:
            shutil.rmtree(arguments.journal)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timers", type=int, default=5_300_000, help="of the journal")
    parser.add_argument(
        "--cold-rows", type=int, default=10_000_000, help="of a day in the cold tier"
    )
    parser.add_argument("--bulk-rows", type=int, default=2_000_000, help="that become timers")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=ROOT / "build", help="for all files")
    parser.add_argument("--journal", type=Path, help="one that was made before")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.timers, arguments.cold_rows, arguments.bulk_rows = 20_000, 20_000, 5_000
        arguments.runs = 1
    return arguments


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(exist_ok=True)
    if arguments.one:
        print(json.dumps(run_here(arguments)))
        return
    with working(arguments):
        runs = [run_apart(arguments) for _ in range(arguments.runs)]
        found = document(arguments, journal.events(arguments.journal), runs)
    print(json.dumps(found["targets"], indent=1))
    print(table(found))
    if not arguments.quick:
        write(found)


if __name__ == "__main__":
    main()
