"""Fail if a key measure has become more than 30 % dearer: `make bench-gate`.

Each measure is the CPU time of an operation, of daemon and client together, divided by that of a
round trip through a bare pyzmq echo in the same repetition. CPU time does not contain the wait for
a busy CPU, and the ratio does not depend on the speed of the machine. A measure fails if the median
of its ratios is more than 30 % above the baseline in two runs; the second run repeats only the
measures that failed in the first one. `--write` stores the medians of this run as the baseline,
benchmarks/results/gate.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: forked clients need no threads

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType

from peers import crowd, echo_side, ours
from peers.scenes import LOCAL, started
from peers.side import Job, Prepare
from recording import machine, spread, write_result

BASELINE = Path(__file__).resolve().parent / "results" / "gate.json"
TOLERANCE = 1.3
COST = "both_us"

Ratios = dict[str, list[float]]
Trial = Callable[[], float]


def call(side: ModuleType, prepare: Prepare, job: Job) -> float:
    """Return the CPU time of an operation in us."""
    with started(side, job.count) as server:
        return crowd.calls(prepare, server, job, 1)[COST]


def trials() -> dict[str, Trial]:
    works = ours.works(LOCAL)
    jobs = {
        "add": Job(2000), "awaited": Job(2000), "add_packed": Job(20_000),
        "add_rows": Job(50_000, 1000), "add_columns": Job(200_000, 1000),
        "cancel_columns": Job(200_000, 1000), "operations": Job(5000, 100),
    }  # fmt: skip
    found: dict[str, Trial] = {
        name: partial(call, ours, works[name], job) for name, job in jobs.items()
    }
    return found | {"add_columns of 100": small_columns}


def small_columns() -> float:
    return call(ours, ours.works(LOCAL)["add_columns"], Job(40_000, 100))


def echo() -> float:
    return call(echo_side, echo_side.ask, Job(4000))


def run(names: Iterable[str], repeats: int) -> Ratios:
    """Run the measures in turns; return the ratios to the echo of the same repetition."""
    chosen = {name: trial for name, trial in trials().items() if name in set(names)}
    found: Ratios = {name: [] for name in chosen}
    for _ in range(repeats):
        reference = echo()
        for name, trial in chosen.items():
            found[name].append(trial() / reference)
    return found


def dearer(found: Ratios, baseline: Mapping[str, float]) -> dict[str, float]:
    """Return the measures whose median is beyond the tolerance, with median / baseline.

    A measure without a baseline is an error: somebody has to store one with `--write`.
    """
    changes = {name: median(ratios) / baseline[name] for name, ratios in found.items()}
    return {name: change for name, change in changes.items() if change > TOLERANCE}


def failures(again: Callable[[Iterable[str]], Ratios], baseline: Mapping[str, float]) -> list[str]:
    """Return the measures that are dearer in two runs. `again`: runs measures."""
    names: Iterable[str] = baseline
    for _ in range(2):
        names = dearer(again(names), baseline)
        if not names:
            break
    return list(names)


def report(found: Ratios, baseline: Mapping[str, float]) -> None:
    for name, ratios in found.items():
        print(
            f"{name}: {median(ratios):.4g} [{min(ratios):.4g} - {max(ratios):.4g}] echoes; "
            f"baseline {baseline.get(name, 0):.4g}", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="store the medians as the baseline")
    arguments = parser.parse_args()
    if arguments.write:
        found = run(trials(), arguments.repeats)
        document = {
            "command": "make bench-gate ARGS=--write", "machine": machine(),
            "load_average": os.getloadavg(), "repeats": arguments.repeats,
            "ratios": {name: spread(ratios) for name, ratios in found.items()},
        }  # fmt: skip
        report(found, {})
        write_result(BASELINE, document)
        return
    stored = json.loads(BASELINE.read_text())["ratios"]
    baseline = {name: stored[name]["median"] for name in trials()}

    def again(names: Iterable[str]) -> Ratios:
        found = run(names, arguments.repeats)
        report(found, baseline)
        return found

    if failed := failures(again, baseline):
        sys.exit(f"more than 30 % dearer than the baseline in two runs: {', '.join(failed)}")


if __name__ == "__main__":
    main()
