"""Run simulated worlds: see `make world`."""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from typing import Any

import click

from world.runs import Run, Seeds, Tally, part, run, run_seeds, smallest
from world.script import Script, script

REPORT_RUNS = 500


class Steps(click.ParamType[list[int]]):
    """A list of step numbers, such as `3,17,20`."""

    name = "steps"

    def convert(self, value: Any, param: object, ctx: object) -> list[int]:
        try:
            return [int(number) for number in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers separated by commas")


def _say(text: str) -> None:
    click.echo(text, err=True)


def _show(the_script: Script, numbers: list[int], found: Run) -> None:
    """Print a short script and its result."""
    seed = the_script.setting.seed
    _say(f"{the_script.setting}")
    for number in numbers:
        _say(f"  {number:3} {the_script.steps[number]}")
    _say(f"{found.failure}")
    _say(f"Again: make world SEED={seed} STEPS={','.join(map(str, numbers))}")


def minimise(failed: Run) -> None:
    """Find a short script that fails with the same exception class, and print it."""
    whole = script(failed.seed)
    _say(f"seed {failed.seed} failed; searching for the steps that cause the failure")
    numbers = smallest(whole, lambda fewer: run(fewer).kind == failed.kind)
    _show(whole, numbers, run(part(whole, numbers)))


def _run_part(seed: int, numbers: list[int]) -> int:
    whole = script(seed)
    found = run(part(whole, numbers))
    _show(whole, numbers, found)
    return int(found.failure is not None)


@click.command()
@click.argument("seeds", type=Seeds())
@click.option(
    "--steps", type=Steps(), help="Run only the steps with these numbers; SEEDS must be one seed."
)
@click.option(
    "--jobs",
    default=os.cpu_count(),
    show_default=True,
    help="Number of seeds that run at the same time.",
)
@click.option("--faults", type=int, help="Stop once the worlds have had this number of faults.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON on one line.")
def main(
    seeds: tuple[int, int | None],
    steps: list[int] | None,
    jobs: int,
    faults: int | None,
    as_json: bool,
) -> None:
    """Run the worlds of SEEDS, and count their faults. Exit with 1 if a world failed."""
    first, last = seeds
    if steps is not None:
        sys.exit(_run_part(first, steps))
    tally = Tally()
    numbers = count(first) if last is None else range(first, last + 1)
    for one in run_seeds(numbers, jobs if last != first else 1):
        tally.add(one)
        if one.failure is not None:
            _say(f"seed {one.seed}: {one.failure}")
        if tally.runs % REPORT_RUNS == 0:
            _say(f"{tally.runs} seeds, {tally.total} faults, {len(tally.failed)} failures")
        if faults is not None and tally.total >= faults:
            break
    click.echo(json.dumps(tally.document(), indent=None if as_json else 1))
    if tally.failed:
        minimise(min(tally.failed))
        sys.exit(1)


if __name__ == "__main__":
    main()
