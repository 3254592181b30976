"""Measure how many jobs consumers handle per second, and how late they get them.

Compares consumer groups with beanstalkd, Redis streams (XREADGROUP) and PostgreSQL (SKIP LOCKED),
each with 1 and 4 consumers in processes of their own. All sides take and acknowledge up to 64 jobs
at a time, except the first side of beanstalkd: its clients reserve and delete single jobs. Payloads
have 48 bytes, and nothing is written to a disk before an answer. In each repetition each side runs
once, with a new server on a unix socket; the order rotates. A ratio divides the rate of purgatoryd
by that of another side in the same repetition: ack_many() for sides that wait for the answer to
each acknowledgement, ack_many(wait=False) for sides that send it along with later requests (without
waits, pipelined). purgatoryd is a wheel of this checkout, installed in a temporary environment.

Rate: all jobs are due before the consumers begin; it ends with the last acknowledgement. Lateness:
one job is due each millisecond; it ends when a consumer has the job. The delays of beanstalkd are
whole seconds, so its second side puts jobs when they are due. Redis moves due members of a sorted
set to the stream, and PostgreSQL is polled, both every millisecond.

Writes benchmarks/results/jobs.json and the table of docs/benchmarks.md. A peer that is not
installed is named and left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from installed import run_with_wheel
from peers.jobs import BATCH, SIDES, Side
from peers.side import PATIENCE_S, Server, Start, boot_ns, stamp
from recording import machine, quantile, spread, spread_text, write_result, write_section

RESULTS = Path(__file__).resolve().parent / "results" / "jobs.json"
CONSUMERS = (1, 4)
GAP_NS = 1_000_000
OURS = {side.waits: side.name for side in SIDES[1::-1]}
"""The names of the sides by which ratios are made, by Side.waits."""
P50_MAX_US = 1000.0
"""Target of purgatoryd: median lateness."""
_FORK = get_context("fork")
Taken = tuple[int, list[bytes]]
Samples = dict[tuple[str, int], list[float]]
"""By side and number of consumers."""


def consume(side: Side, server: Server, together: Any, count: Any, most: int, out: Any) -> None:
    """Take jobs until all consumers together have `most`; report (time of receipt in ns, payloads)
    of each batch, and the time of the last acknowledgement."""
    taken: list[Taken] = []
    batches = side.batches(server)
    next(batches)  # connects
    together.wait(PATIENCE_S)
    ended_ns = 0
    while count.get_obj().value < most:
        payloads = next(batches)
        if not payloads:
            continue
        taken.append((boot_ns(), payloads))
        with count.get_lock():
            count.get_obj().value += len(payloads)
        next(batches)  # acknowledges
        ended_ns = boot_ns()
    late = [now_ns - stamp(payload) for now_ns, payloads in taken for payload in payloads]
    out.send((late, ended_ns))
    out.close()
    os._exit(0)


@contextmanager
def helping(side: Side, server: Server) -> Iterator[None]:
    """Run the helper of a side in a process."""
    process: BaseProcess | None = None
    if side.helper is not None:
        process = _FORK.Process(target=side.helper, args=(server,), daemon=True)
        process.start()
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.join(PATIENCE_S)


def handled(
    side: Side, server: Server, consumers: int, most: int, fill: Callable[[], int]
) -> tuple[int, list[int], int]:
    """Run consumers until they have `most` jobs. `fill` runs when all are connected, and returns
    the time at which they begin. Returns begin, lateness of each job, and end, in ns."""
    together, count = _FORK.Barrier(consumers + 1), _FORK.Value("q", 0)
    pipes = [_FORK.Pipe(duplex=False) for _ in range(consumers)]
    processes = [
        _FORK.Process(target=consume, args=(side, server, together, count, most, pipe[1]))
        for pipe in pipes
    ]
    for process in processes:
        process.start()
    together.wait(PATIENCE_S)
    begun_ns = fill()
    late: list[int] = []
    ended_ns = 0
    for receiver, _ in pipes:
        found, end_ns = receiver.recv()
        late += found
        ended_ns = max(ended_ns, end_ns)
    for process in processes:
        process.join(PATIENCE_S)
    return begun_ns, late, ended_ns


@contextmanager
def started(side: Side, timers: int) -> Iterator[Server]:
    """Start the server of a side in a temporary directory."""
    with (
        tempfile.TemporaryDirectory(prefix="jobs-") as directory,
        tempfile.TemporaryDirectory(prefix="jobs-files-") as files,
        side.server(Start(Path(directory), Path(files), timers)) as server,
        helping(side, server),
    ):
        yield server


def rate(side: Side, consumers: int, jobs: int) -> float:
    """Return jobs per second, if all jobs are due before the consumers begin."""
    with started(side, jobs) as server:
        side.fill(server, [boot_ns() - 1] * jobs)
        time.sleep(0.5)  # until the daemon has fired all timers
        begun_ns, late, ended_ns = handled(side, server, consumers, jobs, boot_ns)
        assert len(late) >= jobs, (side.name, len(late))
        return jobs / (ended_ns - begun_ns) * 1e9


def lateness_us(side: Side, consumers: int, jobs: int) -> list[float]:
    """Return the lateness of each job in us, if one job is due each millisecond."""
    with started(side, jobs) as server:

        def fill() -> int:
            first_ns = boot_ns() + 500_000_000
            side.fill(server, [first_ns + n * GAP_NS for n in range(jobs)])
            return first_ns

        _, late, _ = handled(side, server, consumers, jobs, fill)
        return sorted(one / 1000 for one in late)


def measured(sides: Sequence[Side], jobs: int, timed: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each side and number of consumers."""
    rates: Samples = {}
    late: dict[tuple[str, int], list[list[float]]] = {}
    for repetition in range(repeats):
        for consumers in CONSUMERS:
            for side in [*sides[repetition % len(sides) :], *sides[: repetition % len(sides)]]:
                case = side.name, consumers
                rates.setdefault(case, []).append(rate(side, consumers, jobs))
                late.setdefault(case, []).append(lateness_us(side, consumers, timed))
                p50 = quantile(late[case][-1], 0.5)
                print(f"{side.name:<26}{consumers} consumers {rates[case][-1]:>10,.0f} jobs/s "
                      f"{p50:>10,.0f} us late", flush=True)  # fmt: skip
    return [
        {
            "side": side.name, "consumers": consumers,
            "jobs_per_s": spread(rates[side.name, consumers]),
            "ratio": spread(ratios(rates, side, consumers)),
            "lateness_p50_us": spread([quantile(one, 0.5) for one in late[side.name, consumers]]),
            "lateness_p99_us": spread([quantile(one, 0.99) for one in late[side.name, consumers]]),
        }
        for consumers in CONSUMERS
        for side in sides
    ]  # fmt: skip


def ratios(rates: Samples, side: Side, consumers: int) -> list[float]:
    """Return the rate of purgatoryd divided by that of a side, for each repetition."""
    ours = rates.get((OURS[side.waits], consumers), ())
    pairs = zip(ours, rates[side.name, consumers], strict=False)
    return [ours / theirs for ours, theirs in pairs] or [float("nan")]


def targets(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Return which targets are met: by the median ratios, and by the median lateness."""
    peers = [row["ratio"]["median"] for row in rows if "purgatoryd" not in row["side"]]
    ours = [row["lateness_p50_us"]["median"] for row in rows if row["side"] in OURS.values()]
    return {"ahead of each peer": min(peers) > 1, "p50 below 1 ms": max(ours) < P50_MAX_US}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table for docs/benchmarks.md."""
    lines = ["| side | consumers | jobs per second | purgatoryd to side | p50 | p99 |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in rows:
        cells = [row["side"], str(row["consumers"]), spread_text(row["jobs_per_s"], ",.0f"),
                 spread_text(row["ratio"], ".2f"), spread_text(row["lateness_p50_us"], ",.0f"),
                 spread_text(row["lateness_p99_us"], ",.0f")]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=100_000, help="jobs of a measured rate")
    parser.add_argument("--timed", type=int, default=2000, help="jobs of a measured lateness")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="measure the sides whose names contain this")
    parser.add_argument("--quick", action="store_true", help="few jobs; writes no result")
    parser.add_argument("--installed", action="store_true", help="use the importable purgatoryd")
    given = parser.parse_args()
    if given.quick:
        given.jobs, given.timed, given.repeats = 2000, 50, 1
    return given


def main() -> int:
    given = parse()
    if not (given.installed or given.quick):
        return run_with_wheel(__file__, sys.argv[1:])
    chosen = [side for side in SIDES if given.only in side.name]
    skipped = [f"{side.name}: no {lacks}" for side in chosen if (lacks := side.missing())]
    for reason in skipped:
        print(f"LEFT OUT: {reason}", file=sys.stderr, flush=True)
    sides = [side for side in chosen if not side.missing()]
    begin = os.getloadavg()[0]
    rows = measured(sides, given.jobs, given.timed, given.repeats)
    if not (given.quick or given.only):
        write_result(RESULTS, {
            "command": "make bench-jobs", "machine": machine(),
            "settings": {"jobs": given.jobs, "timed": given.timed, "gap_ns": GAP_NS,
                         "repeats": given.repeats, "batch": BATCH},
            "load_average": {"begin": begin, "end": os.getloadavg()[0]},
            "skipped": skipped, "targets": targets(rows), "rows": rows,
        })  # fmt: skip
        write_section("jobs", table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
