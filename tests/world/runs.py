"""Runs of seeds: their results, sums over many runs, and the smallest script that still fails."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import click

from world.script import Script, Step, script
from world.seam import Killed
from world.world import world_of


class Seeds(click.ParamType[tuple[int, int | None]]):
    """A range of seeds: `7`, `1-1000`, or `1-` without an end."""

    name = "seeds"

    def convert(self, value: Any, param: object, ctx: object) -> tuple[int, int | None]:
        first, dash, last = str(value).partition("-")
        try:
            return int(first), int(last) if last else None if dash else int(first)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor a range such as 1-1000")


class Run(NamedTuple):
    """Result of a script."""

    seed: int
    failure: str | None
    """Class and text of the exception; None if the script passed."""
    digest: str
    faults: Counter[str]
    """Number of faults by kind."""
    answers: int
    notices: int
    cpu_s: float

    @property
    def kind(self) -> str:
        """Class of the exception. Failures with the same class count as the same failure."""
        return (self.failure or "").partition(":")[0]


def run(the_script: Script) -> Run:
    """Run a script to its end."""
    begun_s = time.process_time()
    failure = None
    with world_of(the_script) as world:
        try:
            world.run()
        except (Exception, Killed) as error:
            failure = f"{type(error).__name__}: {error}"
    oracles = [cell.oracle for cell in world.cells]
    return Run(
        the_script.setting.seed,
        failure,
        world.digest,
        world.counts(),
        sum(oracle.answers.total() for oracle in oracles),
        sum(len(oracle.sent) for oracle in oracles),
        time.process_time() - begun_s,
    )


def run_seed(seed: int) -> Run:
    """Run the world of a seed."""
    return run(script(seed))


def run_seeds(seeds: Iterable[int], jobs: int) -> Iterator[Run]:
    """Run many seeds, `jobs` at the same time. Yield each run when it ends."""
    if jobs == 1:
        yield from map(run_seed, seeds)
        return
    left = iter(seeds)
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        while some := list(islice(left, 100 * jobs)):
            yield from pool.imap_unordered(run_seed, some)


class Tally:
    """Sums over many runs."""

    def __init__(self) -> None:
        self.runs: int = 0
        self.answers = self.notices = 0
        self.cpu_s = 0.0
        self.faults: Counter[str] = Counter()
        self.failed: list[Run] = []

    def add(self, one: Run) -> None:
        """Add a run."""
        self.runs += 1
        self.answers += one.answers
        self.notices += one.notices
        self.cpu_s += one.cpu_s
        self.faults += one.faults
        if one.failure is not None:
            self.failed.append(one)

    @property
    def total(self) -> int:
        """Number of faults. Power cuts are left out, because the recoveries that follow them are
        counted."""
        return self.faults.total() - self.faults["power cut"]

    def document(self) -> dict[str, object]:
        """Return the sums as JSON."""
        hours = self.cpu_s / 3600
        faults = {**dict(sorted(self.faults.items())), "all": self.total}
        return {
            "seeds": self.runs,
            "answers_judged": self.answers,
            "notices_judged": self.notices,
            "cpu_s": round(self.cpu_s, 1),
            "faults": faults,
            "faults_per_cpu_hour": {kind: round(n / hours) for kind, n in faults.items()},
            "failures": {one.seed: one.failure for one in self.failed},
        }


# ---- the smallest script -----------------------------------------------------------------------


def part(the_script: Script, numbers: list[int]) -> Script:
    """Return the script with only those steps whose indexes are in `numbers`. The waiting times of
    the other steps still pass."""
    steps: list[Step] = []
    wait_ns, chosen = 0, set(numbers)
    for number, step in enumerate(the_script.steps):
        wait_ns += step.wait_ns
        if number in chosen:
            steps.append(step._replace(wait_ns=wait_ns))
            wait_ns = 0
    return the_script._replace(steps=steps)


def smallest(the_script: Script, failed: Callable[[Script], bool]) -> list[int]:
    """Return the indexes of steps that still fail together. If any one of these steps is left out,
    the others do not fail.

    The algorithm is the minimizing delta debugging of Zeller and Hildebrandt ("Simplifying and
    isolating failure-inducing input", 2002). It tests only complements of subsets, not the subsets.
    """
    numbers = list(range(len(the_script.steps)))
    size = len(numbers)
    while size:
        before = len(numbers)
        for begin in range(len(numbers) - size, -size, -size):
            fewer = numbers[: max(begin, 0)] + numbers[begin + size :]
            if failed(part(the_script, fewer)):
                numbers = fewer
        size = min(size, len(numbers)) if size == 1 and len(numbers) < before else size // 2
    return numbers
