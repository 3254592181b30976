"""Measure the C core with keys and payloads, and its timing wheel alone against two baselines, the
timers of libuv and libevent, and Python's timers. A library that is not installed is left out.

Builds benchmarks/core, runs every workload several times, alternating between the structures, and
writes benchmarks/results/core.json and the tables in docs/benchmarks.md. `--quick` only checks that
everything still runs: small sizes, one repeat, no results.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sched
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import recording
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "core.json"
BINARY = ROOT / "build" / "bench-core"
FLAGS = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-pthread"]
LIBRARIES = {"libuv": "libuv", "libevent": "libevent_core"}
"""Structures of event loops, and the names of their libraries in pkg-config."""
KEYED = ("keyed",)
BARE = ("wheel", "heap", "linked", *LIBRARIES, "asyncio", "sched")
"""Structures of timers without keys."""
WORKLOADS = ("ops", "mix", "pause", "bytes")
SMALLEST = 10_000
"""The smallest number of pending timers that the binary accepts."""
SIZES = (100_000, 1_000_000, 10_000_000)

T = TypeVar("T")
Key = tuple[str, int, str]  # (measure, number of pending timers, structure)
Samples = dict[Key, list[float]]
Medians = dict[Key, float]

# Functions that compute a figure from the times of all ticks of a run and the number of operations
# in them.
TICKS: dict[str, Callable[[list[float], int], float]] = {
    "mix": lambda ticks, operations: sum(ticks) / operations,
    "worst pause": lambda ticks, _: max(ticks),
}


@dataclass
class Row:
    """One measurement of one structure. Times in ns, memory in bytes."""

    measure: str
    pending: int
    structure: str
    unit: str
    median: float
    low: float
    high: float
    repeats: int
    times_wheel: float | None  # this median / median of the wheel in the same run; None if keyed


@dataclass
class Target:
    """A target for a structure: `found` must be at most `limit`; if `found` is a ratio, at least
    `limit`."""

    structure: str
    measure: str
    pending: int
    against: str  # "" = `found` is the structure's figure; else that of this baseline / the wheel's
    limit: float
    found: float
    met: bool


LIMITS: tuple[tuple[str, str, int, str, float], ...] = (
    ("keyed", "mix", 1_000_000, "", 130),
    ("keyed", "mix", 10_000_000, "", 325),
    ("keyed", "cancel", 1_000_000, "", 200),
    ("keyed", "cancel", 10_000_000, "", 500),
    ("keyed", "replace", 1_000_000, "", 210),
    ("keyed", "replace", 10_000_000, "", 525),
    ("wheel", "add fresh", 1_000_000, "", 20),
    ("wheel", "add fresh", 10_000_000, "", 10),
    ("wheel", "add recycled", 1_000_000, "", 30),
    ("wheel", "add recycled", 10_000_000, "", 65),
    ("wheel", "cancel", 1_000_000, "", 25),
    ("wheel", "cancel", 10_000_000, "", 50),
    ("wheel", "expire", 1_000_000, "", 60),
    ("wheel", "expire", 10_000_000, "", 60),
    ("wheel", "mix", 1_000_000, "", 20),
    ("wheel", "mix", 10_000_000, "", 25),
    ("wheel", "worst pause", 10_000_000, "", 150_000),
    ("wheel", "bytes", 1_000_000, "", 41),
    ("wheel", "bytes", 10_000_000, "", 41),
    ("wheel", "mix", 10_000_000, "linked", 1.3),
    ("wheel", "mix", 10_000_000, "heap", 3),
    ("wheel", "worst pause", 10_000_000, "linked", 50),
)


# ---- the C driver -------------------------------------------------------------------------


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def libraries() -> dict[str, list[str]]:
    """Return the linker's words for each library that is installed, by structure."""
    found = {}
    for structure, name in LIBRARIES.items():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            words = ["pkg-config", "--libs", name]
            output = subprocess.check_output(words, text=True, stderr=subprocess.DEVNULL)
            found[structure] = shlex.split(output)
    return found


def structures() -> list[str]:
    """Return the structures that the binary has."""
    return ["keyed", "wheel", "heap", "linked", *libraries()]


def build() -> None:
    core = list((ROOT / "shm_layout" / "core").rglob("*.c"))
    sources = sorted([*core, *(ROOT / "benchmarks" / "core").glob("*.c")])
    BINARY.parent.mkdir(exist_ok=True)
    include = f"-I{ROOT / 'shm_layout'}"
    more = shlex.split(os.environ.get("CFLAGS", ""))
    command = [*compiler(), *FLAGS, *more, include, "-o", str(BINARY), *map(str, sources), "-lm"]
    subprocess.run([*command, *itertools.chain(*libraries().values())], check=True)


def drive(structure: str, workload: str, pending: int, seed: int) -> dict[str, Any]:
    command = [str(BINARY), structure, workload, str(pending), str(seed)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def medians_by_tick(repeats: list[list[float]]) -> list[float]:
    """Return each tick's median over the repeats.

    All repeats have the same timers, so a tick has the same work in each repeat. A deviation in one
    repeat comes from the machine.
    """
    return [statistics.median(values) for values in zip(*repeats, strict=True)]


def measure_structures(sizes: tuple[int, ...], repeats: int, samples: Samples) -> Medians:
    """Run all workloads and add the measurements to `samples`. Return the cost of `mix`, computed
    from each tick's median; `samples` does not contain the ticks."""
    runs = list(itertools.product(sizes, range(repeats), WORKLOADS, structures()))
    ticks: dict[Key, list[list[float]]] = {}
    operations: dict[Key, int] = {}
    with Progress() as progress:
        for pending, repeat, workload, structure in progress.track(runs, description="measuring"):
            seed = repeat + 1 if workload == "ops" else 1
            result = drive(structure, workload, pending, seed)
            for measure, value in result.items():
                key = (measure, pending, structure)
                if isinstance(value, list):
                    if measure == "mix":
                        ticks.setdefault(key, []).append(value)
                    operations[key] = result["operations"]
                    samples.setdefault(key, []).append(TICKS[measure](value, operations[key]))
                elif isinstance(value, float):
                    samples.setdefault(key, []).append(value)
    return {
        key: TICKS[key[0]](medians_by_tick(calls), operations[key]) for key, calls in ticks.items()
    }


# ---- Python's timers, for comparison -------------------------------------------------------------


def nothing() -> None: ...


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock only moves when the test moves it."""

    now = 0.0

    def time(self) -> float:
        return self.now


def ns_each(work: Callable[[], object], count: int) -> float:
    begin_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - begin_ns) / count


def cancel_each(cancel: Callable[[T], None], timers: list[T]) -> None:
    for timer in timers:
        cancel(timer)


def time_asyncio(delays: list[float]) -> Iterator[tuple[str, float]]:
    loop = VirtualLoop()
    handles: list[asyncio.TimerHandle] = []
    half = len(delays) // 2

    def expire() -> None:
        loop.now = max(delays) + 1
        loop.call_soon(loop.stop)
        loop.run_forever()

    yield (
        "add fresh",
        ns_each(lambda: handles.extend(loop.call_later(d, nothing) for d in delays), len(delays)),
    )
    Random(1).shuffle(handles)
    yield "cancel", ns_each(lambda: cancel_each(asyncio.TimerHandle.cancel, handles[:half]), half)
    yield "expire", ns_each(expire, len(delays) - half)
    loop.close()


def time_sched(delays: list[float]) -> Iterator[tuple[str, float]]:
    now = [0.0]
    timers = sched.scheduler(lambda: now[0], lambda _: None)
    events: list[sched.Event] = []
    few = min(100, len(delays))  # few cancels, because each searches the whole list

    def expire() -> None:
        now[0] = max(delays) + 1
        timers.run(blocking=False)

    yield (
        "add fresh",
        ns_each(lambda: events.extend(timers.enter(d, 0, nothing) for d in delays), len(delays)),
    )
    Random(1).shuffle(events)
    yield "cancel", ns_each(lambda: cancel_each(timers.cancel, events[:few]), few)
    yield "expire", ns_each(expire, len(delays) - few)


def measure_python(pending: int, repeats: int, samples: Samples) -> None:
    for repeat in range(repeats):
        random = Random(repeat)
        delays = [random.uniform(0.001, 3600) for _ in range(pending)]
        for name, work in (("asyncio", time_asyncio), ("sched", time_sched)):
            for measure, value in work(delays):
                samples.setdefault((measure, pending, name), []).append(value)


# ---- results -----------------------------------------------------------------------------------


def rows_of(samples: Samples, medians: Medians) -> list[Row]:
    medians = {key: statistics.median(values) for key, values in samples.items()} | medians
    rows = []
    for (measure, pending, structure), values in samples.items():
        median = medians[measure, pending, structure]
        wheel = medians.get((measure, pending, "wheel"))
        rows.append(
            Row(
                measure,
                pending,
                structure,
                "bytes" if measure == "bytes" else "ns",
                round(median, 3),
                round(min(values), 3),
                round(max(values), 3),
                len(values),
                round(median / wheel, 3) if wheel and structure not in KEYED else None,
            )
        )
    return sorted(rows, key=lambda row: (row.pending, row.measure, row.structure))


def targets_of(rows: list[Row]) -> list[Target]:
    found = {(row.measure, row.pending, row.structure): row for row in rows}
    targets = []
    for structure, measure, pending, against, limit in LIMITS:
        row = found.get((measure, pending, against or structure))
        if row is None:
            continue
        value = row.times_wheel if against else row.median
        assert value is not None
        met = value >= limit if against else value <= limit
        targets.append(Target(structure, measure, pending, against, limit, value, met))
    return targets


def machine() -> dict[str, object]:
    version = subprocess.run([*compiler(), "--version"], check=True, capture_output=True, text=True)
    return {
        **recording.machine(),
        "compiler": version.stdout.splitlines()[0],
        "flags": " ".join(FLAGS),
        "load_before": round(os.getloadavg()[0], 2),
    }


# ---- tables ------------------------------------------------------------------------------------


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def target_lines(targets: list[Target]) -> list[list[str]]:
    lines = []
    for t in targets:
        subject = f"{t.measure}, times better than {t.against}" if t.against else t.measure
        sign = "≥" if t.against else "≤"
        lines.append(
            [
                t.structure,
                subject,
                f"{t.pending:,}",
                f"{sign} {figure(t.limit)}",
                figure(t.found),
                "met" if t.met else "missed",
            ]
        )
    return lines


def row_lines(rows: list[Row], names: Sequence[str], spreads: bool) -> list[list[str]]:
    lines: dict[tuple[int, str], dict[str, str]] = {}
    for row in rows:
        if row.structure not in names:
            continue
        spread = f" ({figure(row.low)}-{figure(row.high)})" if spreads else ""
        times = f" = {row.times_wheel:.2f}x" if row.times_wheel and row.structure != "wheel" else ""
        line = lines.setdefault((row.pending, row.measure), {})
        line[row.structure] = figure(row.median) + spread + times
    return [
        [measure, f"{pending:,}", *(line.get(name, "") for name in names)]
        for (pending, measure), line in lines.items()
    ]


TARGET_HEAD = ["structure", "measure", "pending", "target", "found", ""]
ROW_HEAD = ["measure", "pending"]


def show(title: str, head: list[str], lines: list[list[str]]) -> None:
    table = Table(*head, title=title)
    for line in lines:
        table.add_row(*line)
    Console().print(table)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])


def write_page(result: dict[str, object], rows: list[Row], targets: list[Target]) -> None:
    host = result["machine"]
    assert isinstance(host, dict)
    place = f"{host['cpu']}, {host['cpus']} CPUs, {host['compiler']}, `{host['flags']}`"
    body = [
        f"Measured on: {place}.",
        markdown(TARGET_HEAD, target_lines(targets)),
        markdown([*ROW_HEAD, *KEYED], row_lines(rows, KEYED, spreads=True)),
        markdown([*ROW_HEAD, *BARE], row_lines(rows, BARE, spreads=True)),
    ]
    recording.write_section("core", "\n" + "\n\n".join(body) + "\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="check that everything runs; write nothing"
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of each workload (default 5)")
    options = parser.parse_args()
    sizes, repeats = ((SMALLEST,), 1) if options.quick else (SIZES, options.repeats)

    command = f"python benchmarks/bench_core.py --repeats {repeats}"
    result: dict[str, object] = {"command": command, "machine": machine()}
    samples: Samples = {}
    build()
    medians = measure_structures(sizes, repeats, samples)
    measure_python(min(sizes), repeats, samples)
    rows = rows_of(samples, medians)
    targets = targets_of(rows)
    for names in (KEYED, BARE):
        lines = row_lines(rows, names, spreads=False)
        show("ns or bytes = times the wheel's", [*ROW_HEAD, *names], lines)
    if targets:
        show("targets", TARGET_HEAD, target_lines(targets))
    if options.quick:
        return
    result["rows"] = [asdict(row) for row in rows]
    result["targets"] = [asdict(target) for target in targets]
    recording.write_result(RESULTS, result)
    write_page(result, rows, targets)


if __name__ == "__main__":
    main()
