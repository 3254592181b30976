"""Measure the purgatory against two earlier designs, on the real clock, at rising rates.

Every run is a separate process with one design, one case of latencies, one series of watch keys and
one rate. It lasts at least 5 s and has at least 1M requests. Rates rise from 10,000 a second until
the design no longer keeps up. Writes benchmarks/results/purgatory.json, the table in
docs/purgatory.md and the plots in docs/img/. `--quick` only checks that everything still runs: it
uses small sizes on a virtual clock and writes nothing. `--api` measures instead what callers of
Purgatory and LocalPurgatory get per second of client CPU time, and writes
benchmarks/results/purgatory_api.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from purgatory import api, cores, report, through
from purgatory.driver import Driver, RealClock, VirtualClock
from purgatory.experiment import CASES, SERIES, Experiment, Result
from recording import machine, write_result
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "purgatory.json"
API_RESULTS = RESULTS.with_name("purgatory_api.json")
DESIGNS = ("nothing", "old", "new", "ours", "daemon")
RATES = (10_000, 50_000, 100_000, 250_000, 500_000, 750_000, 1_000_000)
HIGHER = 1.5
"""Factor from one rate to the next after the last of RATES."""
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    # the earlier designs get huge pages, like the core
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

Row = dict[str, Any]


# ---- one run -----------------------------------------------------------------------------


def run_here(experiment: Experiment, virtual: bool = False) -> Result:
    return Driver(experiment, VirtualClock() if virtual else real_clock(experiment)).run()


def real_clock(experiment: Experiment) -> RealClock:
    if experiment.design == "daemon":
        return RealClock(through.ITERATION_NS, experiment.worker, through.WORKERS)
    return RealClock()


def run_apart(experiment: Experiment) -> Row:
    """Run an experiment in its own process."""
    command, environment = [sys.executable, __file__, "--one"], {**os.environ, **ENVIRONMENT}
    if experiment.design == "daemon":
        return {
            **experiment.described(),
            **through.run_through(experiment, command, environment),
        }
    command.append(json.dumps(asdict(experiment)))
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    row: Row = json.loads(done.stdout)
    return row


def row_of(experiment: Experiment, result: Result) -> Row:
    return {**experiment.described(), **asdict(result), "keeps_up": result.keeps_up}


# ---- series ------------------------------------------------------------------------------


def count_of(rate: int, seconds: float, least: int) -> int:
    return max(int(rate * seconds), least)


def rising(rates: tuple[int, ...] | None) -> Iterator[int]:
    """Yield the requested rates. If none are requested, yield RATES and then higher rates without
    end."""
    yield from rates or RATES
    rate = RATES[-1]
    while not rates:
        rate = int(rate * HIGHER)
        yield rate


def ladder(arguments: argparse.Namespace, design: str, case: str, series: str) -> Iterator[Row]:
    """Run rising rates, up to the first rate with which the design does not keep up.

    The driver alone is the reference of the other designs, so it does not stop before it has run
    all RATES.
    """
    for rate in rising(arguments.rates):
        requests = count_of(rate, arguments.seconds, arguments.requests)
        row = run_apart(Experiment(design, case, series, rate, requests))
        yield row
        if not row["keeps_up"] and (design != "nothing" or rate > RATES[-1]):
            return


def beyond_driver(rows: list[Row]) -> None:
    """Add to each row its CPU time minus the CPU time of the same run without a design."""
    driver = {
        (row["case"], row["series"], row["rate"]): row["cpu_per_million"]
        for row in rows
        if row["design"] == "nothing"
    }
    for row in rows:
        key = (row["case"], row["series"], row["rate"])
        if row["design"] != "nothing" and key in driver:
            row["cpu_beyond_driver"] = row["cpu_per_million"] - driver[key]


def stored_others(arguments: argparse.Namespace) -> list[Row]:
    """Return the stored runs that this benchmark does not repeat."""
    now = set(itertools.product(arguments.designs, arguments.cases, arguments.series))
    return [
        row
        for row in json.loads(RESULTS.read_text())["runs"]
        if (row["design"], row["case"], row["series"]) not in now
        or (arguments.rates and row["rate"] not in arguments.rates)
    ]


def measure(arguments: argparse.Namespace, console: Console) -> None:
    rows = stored_others(arguments) if arguments.add else []
    for case, series, design in itertools.product(
        arguments.cases, arguments.series, arguments.designs
    ):
        for row in ladder(arguments, design, case, series):
            rows.append(row)
            console.print(report.line(row), soft_wrap=True)
        beyond_driver(rows)
        write(arguments, rows)  # an interrupted benchmark keeps the finished runs


def quick(console: Console) -> None:
    """Run every design and load with small sizes on the virtual clock, which makes each outcome
    predictable."""
    in_process = (design for design in DESIGNS if design != "daemon")
    for design, case, series in itertools.product(in_process, CASES, SERIES):
        result = run_here(Experiment(design, case, series, 20_000, 10_000), virtual=True)
        if not result.keeps_up:
            raise SystemExit(f"{design}, {case}, {series}: {asdict(result)}")
    console.print("all designs ran, every outcome as predicted")


# ---- results -----------------------------------------------------------------------------


def write(arguments: argparse.Namespace, rows: list[Row]) -> None:
    document = {
        "command": "make bench-purgatory",
        "machine": machine(),
        "seconds": arguments.seconds,
        "requests_least": arguments.requests,
        "load_average": os.getloadavg(),
        "runs": rows,
    }
    write_result(RESULTS, document)


def measure_api(arguments: argparse.Namespace, console: Console) -> None:
    rows = api.measure(arguments.quick)
    for row in rows:
        console.print(api.line(row), soft_wrap=True)
    if not arguments.quick:
        command = "python benchmarks/bench_purgatory.py --api"
        document = {"command": command, "machine": machine(), "load_average": os.getloadavg()}
        write_result(API_RESULTS, {**document, "runs": rows})


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(float(part)) for part in text.split(","))


def words(known: Iterable[str]) -> Any:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return found

    return parse


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes; writes nothing")
    parser.add_argument("--plots", action="store_true", help="draw the stored results again")
    parser.add_argument(
        "--add", action="store_true", help="keep stored runs of other designs, cases and series"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="minimum length of a run in seconds"
    )
    parser.add_argument(
        "--requests", type=int, default=1_000_000, help="minimum number of requests of a run"
    )
    parser.add_argument("--rates", type=numbers, help="only these requests per second, a,b,c")
    parser.add_argument("--designs", type=words(DESIGNS), default=list(DESIGNS))
    parser.add_argument("--cases", type=words(CASES), default=list(CASES))
    parser.add_argument("--series", type=words(SERIES), default=list(SERIES))
    parser.add_argument(
        "--api", action="store_true", help="measure only the calls of Purgatory and LocalPurgatory"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments, console = parse(), Console()
    if arguments.one:
        experiment = Experiment(**json.loads(arguments.one))
        print(json.dumps(row_of(experiment, run_here(experiment))))
        return
    if arguments.api:
        measure_api(arguments, console)
        return
    if arguments.plots:
        report.write(json.loads(RESULTS.read_text()))
        return
    cores.build()
    if arguments.quick:
        quick(console)
        return
    measure(arguments, console)
    report.write(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
