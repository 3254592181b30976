"""Measure the pipeline, step by step, on a WAL that a real daemon wrote.

The WAL has timers with keys and payloads; nine of ten are cancelled, the others fire. Each run has
two processes. The first runs ship without Spark, and then silver, gold, sketches and the cold tier
in one Spark session. The second runs bulk adds, which are a separate job. The first measurement in
a session is called *cold*, repetitions are called *warm*. As a baseline of each step, pyarrow or
DuckDB does the same work on the same files. Memory is the peak of all processes of a run together
(PSS). The daemon with its arena is included, and also listed separately; baselines are not
included. Writes benchmarks/results/pipeline.json and the table in docs/benchmarks.md; `--quick`
only checks that everything still runs: small sizes, one run, no results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from flow import baseline, jvm, steps, wal
from recording import machine, spread, write_result, write_section

from purgatoryd.pipeline.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "pipeline.json"
SAMPLE_S = 1.0
"""Interval of memory samples in seconds. The kernel needs 40 ms per GB to compute PSS, so a shorter
interval would slow down the measured steps."""

Figures = dict[str, dict[str, float]]


class Peaks(NamedTuple):
    """Peaks of memory, in bytes of PSS."""

    peak_bytes: float
    daemons_bytes: float
    others_bytes: float


NOTHING = Peaks(0.0, 0.0, 0.0)


# ---- one run -----------------------------------------------------------------------------------


class Memory(threading.Thread):
    """Sampler of the peak memory of this process and its children, in bytes of PSS.

    It samples three peaks: of all processes together, of daemons with their arenas, and of all
    other processes.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._lock = threading.Lock()
        self._peaks = NOTHING
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        me = psutil.Process()
        found = {True: 0, False: 0}
        with self._lock:
            for process in (me, *me.children(recursive=True)):
                is_daemon, size = pss(process)
                found[is_daemon] += size
            now = (sum(found.values()), found[True], found[False])
            self._peaks = Peaks(*map(max, self._peaks, now))

    def taken(self) -> Peaks:
        """Return the peaks since the last call. This call takes a sample, so that a step shorter
        than the interval has one."""
        self._sample()
        with self._lock:
            peaks, self._peaks = self._peaks, NOTHING
        return peaks

    def stop(self) -> None:
        self._end.set()
        self.join()


def pss(process: psutil.Process) -> tuple[bool, int]:
    """Return (whether a process is a daemon, its PSS in bytes); the PSS is 0 for baselines and
    ended processes."""
    try:
        command = process.cmdline()
        if baseline.MODULE in command:
            return False, 0
        return "purgatoryd.cli" in command, int(process.memory_full_info().pss)
    except psutil.Error:
        return False, 0


def run_here(arguments: argparse.Namespace, job: str, spark: Callable[[], SparkSession]) -> Figures:
    """Run the steps of a job in this process and its children; `spark` starts the Spark session of
    the steps."""
    memory, peaks = Memory(), NOTHING
    memory.start()
    found: Figures = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        for name, figures in steps.JOBS[job](arguments, Path(folder), spark):
            taken = memory.taken()
            peaks = Peaks(*map(max, peaks, taken))
            step = found.setdefault(name, {"peak_bytes": 0.0})
            step |= {**figures, "peak_bytes": max(step["peak_bytes"], taken.peak_bytes)}
            print(name, {key: round(value, 3) for key, value in figures.items()}, file=sys.stderr)
    memory.stop()
    return found | {"memory": peaks._asdict()}


def run_apart(arguments: argparse.Namespace) -> Figures:
    """Run each job in its own process."""
    return together([_job_apart(arguments, job) for job in steps.JOBS])


def _job_apart(arguments: argparse.Namespace, job: str) -> Figures:
    command = [sys.executable, __file__, "--job", job, *size_of(arguments), "--wal-dir",
               str(arguments.wal_dir), "--directory", str(arguments.directory)]  # fmt: skip
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def together(jobs: Sequence[Figures]) -> Figures:
    """Return the figures of all jobs, and the highest of the jobs' memory peaks."""
    peaks = {name: max(job["memory"][name] for job in jobs) for name in Peaks._fields}
    return {step: of for job in jobs for step, of in job.items()} | {"memory": peaks}


def size_of(arguments: argparse.Namespace) -> list[str]:
    """Return the command-line flags that set the sizes."""
    return ["--timers", str(arguments.timers), "--cold-rows", str(arguments.cold_rows),
            "--bulk-rows", str(arguments.bulk_rows)]  # fmt: skip


# ---- the document --------------------------------------------------------------------------------


def spreads(runs: list[Figures]) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for step, figures in runs[0].items():
        found[step] = {}
        for name in figures:
            found[step][name] = spread([run[step][name] for run in runs])
    return found


def document(arguments: argparse.Namespace, events: int, runs: list[Figures]) -> dict[str, Any]:
    found = spreads(runs)

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
            "cold bulk load, rows/s, at least 0.35M": median("cold bulk load", "warm"),
            "memory, the daemon's too, bytes, at most 2.2G": median("memory", "peak_bytes"),
        },
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    measured = {step: medians(figures) for step, figures in found["steps"].items()}
    lines = [
        "| step | cold | warm | peak memory | baseline | its rate | to ours |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(row(step, of) for step, of in measured.items() if "warm" in of),
    ]
    window, memory = measured["window"], measured["memory"]
    lines += [
        "",
        f"A window of five minutes, {window['rows']:.0f} timers: selected in "
        f"{window['select_s']:.2f} s (DuckDB {window['baseline_s']:.3f} s), hot after "
        f"{window['promote_s']:.2f} s, with {gigabytes(window['peak_bytes'])} at most. All "
        "processes together, the daemon and its arena among them: "
        f"{gigabytes(memory['peak_bytes'])} at most; the daemon alone "
        f"{gigabytes(memory['daemons_bytes'])}, all others "
        f"{gigabytes(memory['others_bytes'])} at most.",
        "",
        f"| processor time of the JVM, s | {' | '.join(jvm.WHERE)} |",
        f"| --- |{' --- |' * len(jvm.WHERE)}",
        *(
            f"| {step} | {' | '.join(f'{of[where]:.1f}' for where in jvm.WHERE)} |"
            for step, of in measured.items()
            if jvm.REST in of
        ),
    ]
    return "\n".join(lines) + "\n"


def medians(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    return {name: value["median"] for name, value in figures.items()}


def row(step: str, of: dict[str, float]) -> str:
    cold, warm, other = (f"{of[name] / 1e6:.2f} M/s" for name in ("cold", "warm", "baseline"))
    times = f"{of['baseline'] / of['warm']:.1f}"
    cells = (step, cold, warm, gigabytes(of["peak_bytes"]), baseline.NAMES[step], other, times)
    return f"| {' | '.join(cells)} |"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def write(found: dict[str, Any]) -> None:
    write_result(RESULTS, found)
    write_section("pipeline", table(found))


# ---- the command ---------------------------------------------------------------------------------


@contextmanager
def working(arguments: argparse.Namespace) -> Iterator[None]:
    """Create a folder for the WAL, if none is given."""
    made = arguments.wal_dir is None
    if made:
        arguments.wal_dir = Path(tempfile.mkdtemp(dir=arguments.directory, prefix="bench-wal-"))
        began_s = time.perf_counter()
        events = wal.make(arguments.wal_dir, arguments.timers)
        print(f"{events} events in {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
    try:
        yield
    finally:
        if made:
            shutil.rmtree(arguments.wal_dir)


def absolute(text: str) -> Path:
    """Return the absolute path, because child processes have other working directories."""
    return Path(text).absolute()


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timers", type=int, default=5_300_000, help="timers in the WAL")
    parser.add_argument(
        "--cold-rows", type=int, default=10_000_000, help="rows of a day in the cold tier"
    )
    parser.add_argument("--bulk-rows", type=int, default=2_000_000, help="rows that become timers")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--directory", type=absolute, default=ROOT / "build", help="folder for all files"
    )
    parser.add_argument("--wal-dir", type=absolute, help="WAL of an earlier run")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--job", choices=steps.JOBS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.timers, arguments.cold_rows, arguments.bulk_rows = 20_000, 20_000, 5_000
        arguments.runs = 1
    return arguments


def main() -> None:
    arguments = parse()
    arguments.directory.mkdir(exist_ok=True)
    if arguments.job:
        print(json.dumps(run_here(arguments, arguments.job, session)))
        return
    with working(arguments):
        runs = [run_apart(arguments) for _ in range(arguments.runs)]
        found = document(arguments, wal.events(arguments.wal_dir), runs)
    print(json.dumps(found["targets"], indent=1))
    print(table(found))
    if not arguments.quick:
        write(found)


if __name__ == "__main__":
    main()
