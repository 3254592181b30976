"""Check that worlds find known bugs: see `make world-bugs`.

Each file in bugs/ is a patch that brings one bug into the product. Its first line describes the
bug. A second line may name settings without which a world cannot meet the bug. The patch is applied
to a copy of the tree. From each of START_SEEDS on, worlds with these settings run in that copy,
seed after seed, until a world fails. A failure shows the bug only if the same seed passes without
the bug.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from world.runs import run_seed
from world.script import script

ROOT = Path(__file__).parents[2]
BUGS = Path(__file__).parent / "bugs"
START_SEEDS = (10_000_000, 20_000_000, 30_000_000)
LIMIT_S = 300
"""CPU seconds within which a bug has to be found from each start seed."""
SEED_LIMIT_S = 30
"""Limit of CPU seconds for one world. A world that needs more counts as failed."""
AT_ONCE = 2
BEGINS, PASSED, FAILED = "begins", "passed", "failed"


class Bug(NamedTuple):
    """A bug: one patch file."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the bug on the command line."""
        return self.path.stem

    @property
    def kind(self) -> str:
        """`real`: the bug was once in the repository; `planted`: it was made for this purpose."""
        return self._head.partition(":")[0]

    @property
    def description(self) -> str:
        """Description of the bug."""
        return self._head.partition(": ")[2]

    @property
    def files(self) -> list[str]:
        """Paths of the files that the patch changes."""
        return re.findall(r"^\+\+\+ b/(.+)$", self.path.read_text(), re.MULTILINE)

    @property
    def worlds(self) -> list[str]:
        """Names of the settings that a world needs to meet the bug."""
        found = re.search(r"\A.+\nworlds: (.+)$", self.path.read_text(), re.MULTILINE)
        return found[1].split() if found else []

    @property
    def _head(self) -> str:
        return self.path.read_text().partition("\n")[0]


class Found(NamedTuple):
    """The result of one hunt: the search for one bug from one start seed."""

    start_seed: int
    seeds: int
    """Number of seeds up to the one that failed."""
    cpu_s: float
    failure: str | None
    """Text of the failure; None if no world failed."""


def bugs() -> list[Bug]:
    """Return all bugs, sorted by name."""
    return [Bug(path) for path in sorted(BUGS.glob("*.patch"))]


# ---- in a copy: run worlds ---------------------------------------------------------------------


def hunt(seed: int, limit_s: float, worlds: Sequence[str]) -> None:
    """Run worlds with these settings from a seed on until a world fails. Print a line before and
    after each world, because a world may end this process, and the kernel ends a process that
    hangs."""
    begun_s = time.process_time()
    while (now_s := time.process_time()) - begun_s < limit_s:
        if not all(getattr(script(seed).setting, name) for name in worlds):
            seed += 1
            continue
        _say(seed, round(now_s - begun_s, 2), BEGINS)
        resource.setrlimit(resource.RLIMIT_CPU, (int(now_s) + SEED_LIMIT_S, resource.RLIM_INFINITY))
        failure = run_seed(seed).failure
        state = PASSED if failure is None else f"{FAILED} {' '.join(failure.split())}"
        _say(seed, round(time.process_time() - begun_s, 2), state)
        if failure is not None:
            return
        seed += 1


def _say(*words: object) -> None:
    print("hunt", *words, flush=True)


# ---- copies of the tree ------------------------------------------------------------------------


UNUSED = ("docs/", "examples/", "benchmarks/", "pipeline/")
"""Folders that no world needs."""


def copy(source: Path, to: Path, without: tuple[str, ...] = UNUSED) -> None:
    """Copy a tree: its tracked files and its compiled core, or all files if the tree is itself a
    copy."""
    if not (source / ".git").exists():
        shutil.copytree(source, to, symlinks=True)
        return
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=source, text=True)
    built = [*source.glob("build/temp.*"), *source.glob("shm_layout/_core*.so")]
    for name in [
        *listed.split("\0")[:-1],
        *(os.fspath(path.relative_to(source)) for path in built),
    ]:
        if not name.startswith(without):
            _copy_one(source / name, to / name)


def _copy_one(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, to)
    elif path.exists():
        shutil.copy2(path, to, follow_symlinks=False)


@contextmanager
def with_bug(pristine: Path, bug: Bug) -> Iterator[Path]:
    """Yield a compiled copy of the tree that contains the bug."""
    with tempfile.TemporaryDirectory(prefix="world-bug") as folder:
        tree = Path(folder) / "tree"
        copy(pristine, tree)
        subprocess.run(["git", "apply", os.fspath(bug.path)], cwd=tree, check=True)
        if any(name.endswith((".c", ".h")) for name in bug.files):
            compile_core(tree)
        yield tree


def compile_core(tree: Path) -> None:
    """Compile the changed C files of a copy."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL)


def run_in(tree: Path, seed: int, limit_s: float, worlds: Sequence[str] = ()) -> Found:
    """Run a hunt in a copy of the tree, in a process of its own."""
    paths = os.pathsep.join([os.fspath(tree / "src"), os.fspath(tree / "tests")])
    options = ["--hunt", str(seed), "--seconds", str(limit_s)]
    process = subprocess.run(
        [sys.executable, "-m", "world.find_bugs", *worlds, *options],
        cwd=tree, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    lines = [line for line in process.stdout.splitlines() if line.startswith("hunt ")]
    if not lines:
        raise RuntimeError(f"no world ran in {tree}")
    _, last, cpu_s, state, *failure = lines[-1].split(" ", 4)
    used_s, what = float(cpu_s), None if state == PASSED else " ".join(failure)
    if process.returncode == -signal.SIGXCPU:
        used_s, what = used_s + SEED_LIMIT_S, f"hangs: more than {SEED_LIMIT_S} s of CPU"
    elif state == BEGINS:
        what = f"crash: the process ended with {process.returncode}"
    return Found(seed, int(last) - seed + 1, used_s, what)


def search(
    pristine: Path, tree: Path, start_seed: int, limit_s: float, worlds: Sequence[str]
) -> Found:
    """Hunt for one bug from one start seed. Skip seeds that fail even without the bug."""
    seed, used_s = start_seed, 0.0
    while True:
        one = run_in(tree, seed, limit_s - used_s, worlds)
        seed, used_s = seed + one.seeds, used_s + one.cpu_s
        spent = used_s >= limit_s
        if one.failure is None or _is_found(pristine, seed - 1):
            return Found(start_seed, seed - start_seed, round(used_s, 1), one.failure)
        if spent:
            return Found(start_seed, seed - start_seed, round(used_s, 1), None)


def _is_found(pristine: Path, seed: int) -> bool:
    return run_in(pristine, seed, 0.01).failure is None


# ---- all bugs ----------------------------------------------------------------------------------


def find(
    pristine: Path, starts: Iterable[int], limit_s: float, bug: Bug
) -> tuple[Bug, list[Found]]:
    """Search for one bug from each start seed."""
    with with_bug(pristine, bug) as tree:
        found = []
        for start in starts:
            found.append(search(pristine, tree, start, limit_s, bug.worlds))
            _report(_line(bug, found[-1]))
    return bug, found


HEAD = ("bug", "kind", "where", "start seed", "seeds", "CPU s", "failure")


def _line(bug: Bug, one: Found) -> str:
    failure = (one.failure or "NOT FOUND")[:90]
    return _row(bug.name, bug.kind, bug.files[0], one.start_seed, one.seeds, one.cpu_s, failure)


def _row(*cells: object) -> str:
    return "{:24} {:8} {:28} {:>10} {:>6} {:>7}  {}".format(*cells)


def _report(text: str) -> None:
    click.echo(text, err=True)


def document(results: Iterable[tuple[Bug, list[Found]]]) -> dict[str, Any]:
    """Return the results for JSON, by the names of the bugs."""
    return {
        bug.name: {
            "kind": bug.kind, "description": bug.description, "files": bug.files,
            "hunts": [one._asdict() for one in found],
        }
        for bug, found in results
    }  # fmt: skip


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--seconds", default=LIMIT_S, type=float, show_default=True, help="CPU seconds for each hunt."
)
@click.option(
    "--start", "starts", multiple=True, type=int, help="Start seed of a hunt; can be repeated."
)
@click.option(
    "--jobs",
    default=AT_ONCE,
    show_default=True,
    help="Number of bugs that are hunted at the same time.",
)
@click.option("--json", "as_json", is_flag=True, help="Also print the results as JSON.")
@click.option("--hunt", "seed", type=int, hidden=True, help="Run worlds in this tree from a seed.")
def main(
    names: tuple[str, ...], seconds: float, starts: tuple[int, ...], jobs: int,
    as_json: bool, seed: int | None,
) -> None:  # fmt: skip
    """Hunt for the bugs NAMES, or for all bugs. Exit with 1 if a bug is not found."""
    if seed is not None:
        hunt(seed, seconds, names)
        return
    wanted = [bug for bug in bugs() if not names or bug.name in names]
    with (
        tempfile.TemporaryDirectory(prefix="world-bugs") as folder,
        ThreadPoolExecutor(jobs) as pool,
    ):
        pristine = Path(folder) / "pristine"
        copy(ROOT, pristine)
        compile_core(pristine)
        _report(_row(*HEAD))
        one = partial(find, pristine, starts or START_SEEDS, seconds)
        results = list(pool.map(one, wanted))
    if as_json:
        click.echo(json.dumps(document(results)))
    missed = [bug.name for bug, found in results if any(one.failure is None for one in found)]
    _report(f"{len(results) - len(missed)} of {len(results)} bugs found from each start seed")
    if missed:
        _report(f"not found: {', '.join(missed)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
