"""Measure how late the daemon wakes up if it waits with epoll and a timerfd, or with select and a
timeout, and the CPU time of a wait.

Both ways wait in one process, with the daemon's timer slack and the same idle descriptors. For each
span, both ways wait for a deadline that far in the future, in an order that alternates. Lateness is
the boot clock at the return minus the deadline. The CPU time is that of the thread, from the begin
of a wait to its return. At normal priority lateness includes the wait for a
CPU; at real-time priority it does not. Writes benchmarks/results/waiting.json and the table of
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from recording import machine, quantile, spread, write_result, write_section

from purgatoryd.daemon.waiting import Waiter
from purgatoryd.shm_layout.host import HOST

RESULTS = Path(__file__).resolve().parent / "results" / "waiting.json"
SPANS_NS = (200_000, 5_000_000)
"""Shortest and longest time until a deadline, in ns."""
DESCRIPTORS = 6
SHARES = {"p50_us": 0.5, "p99_us": 0.99}
CPU = "cpu_us"
"""Mean CPU time of a wait."""
LABELS = (*SHARES, CPU)
SLACK = Path("/proc/self/timerslack_ns")
PRIORITIES = {"normal": (os.SCHED_OTHER, 0), "real-time": (os.SCHED_FIFO, 1)}
TITLES = {
    "timerfd": ("epoll and a timerfd", 0), "select": ("select with a timeout", 0),
    "ratio": ("ratio", 2),
}  # fmt: skip
"""For each row of the table: (title, number of decimal places)."""

Figures = dict[str, dict[str, dict[str, dict[str, float]]]]
Wait = Callable[[int], frozenset[int]]
"""A function that waits until a time of the boot clock in ns, or until descriptors are readable; it
returns the readable descriptors."""


def waits(fds: list[int]) -> dict[str, Wait]:
    """Return the two ways to wait. The descriptors `fds` never become readable."""
    waiter = Waiter(fds)

    def by_select(until_ns: int) -> frozenset[int]:
        return frozenset(select.select(fds, [], [], max(0, until_ns - HOST.boot_ns()) / 1e9)[0])

    return {"timerfd": waiter.wait, "select": by_select}


def lateness_us(wait: Wait, span_ns: int) -> float:
    """Wait for a deadline `span_ns` in the future; return the lateness in us. If the wake-up is
    early, the function waits again."""
    until_ns = HOST.boot_ns() + span_ns
    while (now_ns := HOST.boot_ns()) < until_ns:
        wait(until_ns)
    return (now_ns - until_ns) / 1000


def one_round(ways: dict[str, Wait], count: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the quantiles of lateness and the CPU time of each way. All ways wait for the same
    spans."""
    spans, found = random.Random(seed), {name: list[float]() for name in ways}
    cpu_ns = dict.fromkeys(ways, 0)
    for number in range(count):
        span_ns = spans.randint(*SPANS_NS)
        for name in sorted(ways, reverse=number % 2 == 1):
            begun_ns = time.thread_time_ns()
            found[name].append(lateness_us(ways[name], span_ns))
            cpu_ns[name] += time.thread_time_ns() - begun_ns
    return {
        name: {label: quantile(sorted(late), share) for label, share in SHARES.items()}
        | {CPU: cpu_ns[name] / count / 1000}
        for name, late in found.items()
    }


def measured(rounds: int, count: int) -> Figures:
    """Return median, minimum and maximum over the rounds, for each priority, way and quantile.

    "ratio" is the lateness with timerfd divided by the lateness with select, in each round.
    Real-time priority is left out if the system refuses it.
    """
    with suppress(OSError):
        SLACK.write_text("1")
    pipes = [os.pipe() for _ in range(DESCRIPTORS)]
    ways, found = waits([reader for reader, _ in pipes]), Figures()
    for priority, (policy, value) in PRIORITIES.items():
        with suppress(PermissionError):
            os.sched_setscheduler(0, policy, os.sched_param(value))
            runs = [one_round(ways, count, seed) for seed in range(rounds)]
            for run in runs:
                run["ratio"] = {n: run["timerfd"][n] / run["select"][n] for n in LABELS}
            found[priority] = {
                name: {label: spread([run[name][label] for run in runs]) for label in LABELS}
                for name in TITLES
            }
    return found


def table(found: Figures) -> str:
    """Return the table of docs/benchmarks.md."""
    lines = ["| priority | way | p50 | p99 | CPU |", "| --- | --- | --- | --- | --- |"]
    for priority, ways in found.items():
        for name, (title, digits) in TITLES.items():
            of = [ways[name][label] for label in LABELS]
            cells = [
                f"{s['median']:,.{digits}f} [{s['low']:,.{digits}f} - {s['high']:,.{digits}f}]"
                for s in of
            ]
            lines.append(f"| {priority} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--deadlines", type=int, default=1500, help="deadlines of a round, for each way"
    )
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    arguments = parser.parse_args()
    found = measured(arguments.rounds, arguments.deadlines)
    document: dict[str, Any] = {
        "machine": machine(),
        "command": f"python benchmarks/bench_waiting.py --rounds {arguments.rounds} --deadlines"
        f" {arguments.deadlines}",
        "load_average": os.getloadavg(),
        "figures": found,
    }
    print(json.dumps(found, indent=1))
    if not arguments.dry:
        write_result(RESULTS, document)
        write_section("waiting", table(found))


if __name__ == "__main__":
    main()
