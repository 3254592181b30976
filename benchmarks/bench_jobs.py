"""Measure how many jobs consumers handle per second, and how late they get them.

Compares consumer groups with beanstalkd, Redis streams (XREADGROUP) and PostgreSQL (SKIP LOCKED),
each with 1 and 4 consumers in processes of their own. All sides take and acknowledge up to 64 jobs
at a time, except beanstalkd, whose protocol has no batches; payloads have 48 bytes, and nothing is
written to a disk before an answer. In each repetition each side runs once, with a new server on a
unix socket.

Rate: all jobs are due before the consumers begin. Lateness: one job is due each millisecond; it
ends when a consumer has the job. beanstalkd has a resolution of a second. Redis moves due members
of a sorted set to the stream, and PostgreSQL is polled, both every millisecond.

Writes benchmarks/results/jobs.json. A peer that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from peers.jobs import BATCH, SIDES, Side
from peers.side import PATIENCE_S, Server, Start, boot_ns
from recording import machine, quantile, spread, write_result

RESULTS = Path(__file__).resolve().parent / "results" / "jobs.json"
CONSUMERS = (1, 4)
GAP_NS = 1_000_000
_FORK = get_context("fork")


def consume(side: Side, server: Server, together: Any, count: Any, most: int, out: Any) -> None:
    """Take jobs until all consumers together have `most`; report the lateness of each job in ns,
    and the time of the last acknowledgement."""
    late: list[int] = []
    batches = side.batches(server)
    next(batches)  # connects
    together.wait(PATIENCE_S)
    ended_ns = boot_ns()
    while count.value < most:
        deadlines = next(batches)
        if deadlines:
            now_ns = boot_ns()
            late += [now_ns - due_ns for due_ns in deadlines]
            with count.get_lock():
                count.value += len(deadlines)
            ended_ns = now_ns
    with suppress(StopIteration):
        next(batches)  # acknowledges the last batch
    out.send((late, max(ended_ns, boot_ns() if late else 0)))
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
    rates: dict[tuple[str, int], list[float]] = {}
    late: dict[tuple[str, int], list[list[float]]] = {}
    for repetition in range(repeats):
        for consumers in CONSUMERS:
            for side in [*sides[repetition % len(sides) :], *sides[: repetition % len(sides)]]:
                case = side.name, consumers
                rates.setdefault(case, []).append(rate(side, consumers, jobs))
                late.setdefault(case, []).append(lateness_us(side, consumers, timed))
                p50 = quantile(late[case][-1], 0.5)
                print(f"{side.name:<24}{consumers} consumers {rates[case][-1]:>10,.0f} jobs/s "
                      f"{p50:>10,.0f} us late")  # fmt: skip
    return [
        {
            "side": name, "consumers": consumers, "jobs_per_s": spread(rates[name, consumers]),
            "lateness_p50_us": spread([quantile(one, 0.5) for one in late[name, consumers]]),
            "lateness_p99_us": spread([quantile(one, 0.99) for one in late[name, consumers]]),
        }
        for name, consumers in rates
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=50_000, help="jobs of a measured rate")
    parser.add_argument("--timed", type=int, default=2000, help="jobs of a measured lateness")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", help="measure the sides whose names contain this text")
    parser.add_argument("--quick", action="store_true", help="few jobs; writes no result")
    given = parser.parse_args()
    if given.quick:
        given.jobs, given.timed, given.repeats = 2000, 50, 1
    chosen = [side for side in SIDES if (given.only or "") in side.name]
    for side in chosen:
        if lacks := side.missing():
            print(f"left out: {side.name} needs {lacks}")
    sides = [side for side in chosen if not side.missing()]
    load_average = os.getloadavg()[0]
    rows = measured(sides, given.jobs, given.timed, given.repeats)
    if not given.quick and given.only is None:
        settings = {
            "jobs": given.jobs,
            "timed": given.timed,
            "repeats": given.repeats,
            "batch": BATCH,
        }
        load = {"begin": load_average, "end": os.getloadavg()[0]}
        document = {"machine": machine(), "settings": settings, "load_average": load, "rows": rows}
        write_result(RESULTS, document)


if __name__ == "__main__":
    main()
