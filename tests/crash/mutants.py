"""Make mutants of the daemon and the clients, and check that the tests of a changed line fail.

`mutants.py draw` samples lines, and one change of each line, and writes them to a list. `mutants.py
cover` runs the tests and records which tests run which line, also in processes that the tests
start. `mutants.py try` then makes each listed change that has no result, one at a time, in a copy
of the tree. It finds a line by its text, so the list stays valid while other lines change. It runs
the tests of `make test` that cover the line, then the tests that only `make test-all` runs, until a
test fails. Each result is written at once, so an interrupted run continues. `mutants.py prove` runs
tests that were written for a mutant. A developer judges a mutant that no test kills and may set its
`fate` to "equivalent", with a `reason`. `before` is the fate that the mutant had before a test was
added or moved to `make test`.

tests/crash/mutate.py makes mutants of the C core.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click
import coverage
import pytest
from record import RESULTS, ROOT, origin
from recording import write_result
from world.find_bugs import copy

FOLDERS = ("daemon", "clients")
KEPT = RESULTS / "python_mutants.json"
WORK = ROOT / "build" / "mutants"
UNTRIED, GONE = "not tried", "line is gone"
"""The fates of a mutant without a result, and of a mutant whose line has been changed or
removed."""
NEW, OLD = "test", "all"
"""The tiers: the tests of `make test`, and the tests that only `make test-all` runs."""
UNMEASURED = {
    f"test_{name}.py" for name in (
        "bench_quick", "benchmarks", "core_arena", "core_batch", "core_model", "crash", "docs",
        "examples", "flights_data", "fuzz", "golden", "machine_check", "needs", "packaging",
        "pipeline_ship", "placement_guest", "public_names", "races", "style", "test_suite",
        "topology", "world_bugs",
    )
}  # fmt: skip
"""Test files that are not measured: they test the core, the pipeline, documents or tools (as
tests/spark does), or send so many signals that they never end under coverage."""

MOST_OF_ONE = 3
"""Maximum number of parameter sets of one test function that are run."""
HANGS_S = 45
"""Time limit of one test. Some tests wait 30 s for a condition before they fail."""

SWAPPED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"), ast.Mod: ("%", "+"),
    ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}  # fmt: skip
UNSEEN = re.compile(r"\s*(?:log\.|announce\(|warnings\.|assert\b|self\.log|.*\b__slots__\b)")
"""Statements that only produce text for a reader, or that have no effect."""


# ---- mutants -----------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """One change: bytes `begin` to `end` of a file, currently `before`, are replaced by `after`."""

    file: str
    line: int
    column: int
    """Number of bytes between the first character of the line's text and the change."""
    text: str
    """The text of the line without its indentation."""
    begin: int
    end: int
    before: str
    after: str

    @property
    def change(self) -> str:
        """The change as text for the list."""
        return f"{_brief(self.before)} -> {self.after if len(self.after) < 80 else 'not (...)'}"

    def applied(self) -> bytes:
        """Return the content of the changed file."""
        source = (ROOT / self.file).read_bytes()
        return source[: self.begin] + self.after.encode() + source[self.end :]


def _brief(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) < 80 else f"{line[:76]} ..."


class Changes(ast.NodeVisitor):
    """Collects all possible changes of one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.source = (ROOT / file).read_bytes()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.visit(ast.parse(self.source))

    # ---- places ----

    def begin(self, node: Any) -> int:
        return int(self.starts[node.lineno - 1] + node.col_offset)

    def end(self, node: Any) -> int:
        return int(self.starts[node.end_lineno - 1] + node.end_col_offset)

    def text(self, node: Any) -> str:
        return self.source[self.begin(node) : self.end(node)].decode()

    def add(self, node: Any, after: str) -> None:
        self._add(self.begin(node), self.end(node), after)

    def _add(self, begin: int, end: int, after: str) -> None:
        line = self.source.count(b"\n", 0, begin) + 1
        before = self.source[begin:end].decode()
        whole = self.source[self.starts[line - 1] : self.starts[line]]
        column = begin - self.starts[line - 1] - (len(whole) - len(whole.lstrip()))
        text = whole.strip().decode()
        self.found.append(Mutant(self.file, line, column, text, begin, end, before, after))

    def swap(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        """Replace the operator between two operands."""
        old, new = SWAPPED.get(type(operator), ("", ""))
        begin, end = self.end(left), self.begin(right)
        between = self.source[begin:end].decode()
        word = re.search(rf"(?<![\w]){re.escape(old)}(?![\w])" if old.isalpha() else re.escape(old),
                         between) if old else None  # fmt: skip
        if word:
            self._add(begin + word.start(), begin + word.end(), new)

    # ---- statements ----

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and UNSEEN.match(self.text(node)):
            return
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call | ast.Await):
            self.add(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.add(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.swap(node.target, node.value, node.op)
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.add(node, "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.add(node, "pass")
        elif not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add(node.value, "None")
            self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "continue")

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if "TYPE_CHECKING" in self.text(node.test):
            return
        if not isinstance(node.test, ast.Constant):
            self.add(node.test, f"not ({self.text(node.test)})")
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If  # noqa: N815

    # ---- expressions ----

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip texts."""

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            self.swap(left, right, operator)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.swap(left, right, node.op)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = ast.JoinedStr, ast.Constant
        if not any(
            isinstance(part, texts) and not is_number(part) for part in (node.left, node.right)
        ):
            self.swap(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            begin = self.begin(node)
            self._add(begin, begin + len("not"), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self.add(node, str(node.value + 1))


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def sample(count: int, seed: int) -> list[Mutant]:
    """Draw one change in each of `count` lines, in proportion to the lines of each file."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for path in measured_files():
        for mutant in Changes(os.fspath(path.relative_to(ROOT))).found:
            by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
    chance = random.Random(seed)
    chosen = chance.sample(sorted(by_line), count)
    return [next(filter(parses, chance.sample(found, len(found))))
            for found in map(by_line.__getitem__, chosen)]  # fmt: skip


def listed(mutant: Mutant) -> dict[str, Any]:
    """Return the row of the list for a mutant, without a result."""
    return {
        "file": mutant.file, "line": mutant.line, "column": mutant.column,
        "change": mutant.change, "text": mutant.text, "fate": UNTRIED, "killed_by": None,
    }  # fmt: skip


@cache
def changes(file: str) -> list[Mutant]:
    """Return all mutants of a file."""
    return Changes(file).found


def located(row: Mapping[str, Any]) -> Mutant | None:
    """Return the mutant of a row, in the line that has its text; None if no line has it.

    If several lines have this text, return the mutant in the line nearest to the listed line
    number.
    """
    same = ("column", "change", "text")
    found = [
        mutant for mutant in (changes(row["file"]) if (ROOT / row["file"]).exists() else [])
        if all(getattr(mutant, name) == row[name] for name in same)
    ]  # fmt: skip
    return min(found, key=lambda mutant: abs(mutant.line - row["line"]), default=None)


def parses(mutant: Mutant) -> bool:
    """Return whether the changed file is valid Python."""
    try:
        ast.parse(mutant.applied())
    except SyntaxError:
        return False
    return True


def measured_files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


# ---- coverage ----------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tell the coverage of this process which test runs. Child processes read
    $PYTEST_CURRENT_TEST."""
    current = coverage.Coverage.current()
    if current is None:
        return (yield)
    current.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        current.switch_context("")


COVERAGE_RC = """[run]
data_file = {folder}/data
parallel = true
sigterm = true
source =
    {sources}
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected,module-not-imported,couldnt-parse
"""


def measure(tier: str) -> None:
    """Run the tests of one tier, and store their coverage and costs.

    Each test file runs in its own process, because a file with many signals or forks may end its
    process under coverage.
    """
    folder = WORK / tier
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = folder / "coverage.rc"
    sources = "\n    ".join(os.fspath(ROOT / name) for name in FOLDERS)
    settings.write_text(COVERAGE_RC.format(folder=folder, sources=sources))
    covering = [sys.executable, "-m", "coverage"]
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        if path.name in UNMEASURED:
            continue
        subprocess.run(
            [*covering, "run", f"--rcfile={settings}", "-m", "pytest", "-p", "mutants", "--quiet",
             "-k", "not storm", f"--timeout={HANGS_S}", f"--tier={tier}",
             *([f"--above={NEW}"] if tier == OLD else []),
             f"--costs={folder / path.stem}.costs", os.fspath(path)],
            cwd=ROOT, check=False,
            env={**os.environ, "COVERAGE_PROCESS_START": os.fspath(settings),
                 "PYTHONPATH": f"{Path(__file__).parent}:{ROOT / 'tests'}"},
        )  # fmt: skip
    subprocess.run([*covering, "combine", "--quiet", f"--rcfile={settings}"], cwd=ROOT, check=True)


class Limits(NamedTuple):
    """Maximum number and total time of the tests that run against one mutant, for each tier."""

    tests: int = 20
    seconds: float = 60.0


class Coverage:
    """The tests of a tier by the lines that they run, and the cost of each test."""

    def __init__(self, tier: str, limits: Limits) -> None:
        self.limits = limits
        files = (WORK / tier).glob("*.costs")
        rows = (json.loads(row) for file in files for row in file.read_text().splitlines())
        self.costs: dict[str, float] = {name: wall for name, _, wall, _, _ in rows}
        self.data = coverage.CoverageData(os.fspath(WORK / tier / "data"))
        self.data.read()
        self.read: dict[str, dict[int, set[str]]] = {}

    def tests(self, file: str, line: int) -> set[str]:
        """Return the tests that run a line, except during the import of the module."""
        if file not in self.read:
            found = self.data.contexts_by_lineno(os.fspath(ROOT / file))
            self.read[file] = {
                number: {re.sub(r" \((setup|call|teardown)\)$", "", name) for name in names}
                for number, names in found.items()
            }
        return self.read[file].get(line, set()) & self.costs.keys()

    def of(self, lines: Iterable[tuple[str, int]]) -> set[str]:
        """Return the tests that run any of these lines."""
        return set().union(*(self.tests(*place) for place in lines))

    def chosen(self, tests: set[str]) -> list[str]:
        """Return the cheapest of these tests, as many as the limits allow."""
        per_function: Counter[str] = Counter()
        picked: list[str] = []
        spent_s = 0.0
        for test in sorted(tests, key=lambda test: (self.costs[test], test)):
            function = test.partition("[")[0]
            after_s = spent_s + self.costs[test]
            if len(picked) == self.limits.tests or (picked and after_s > self.limits.seconds):
                break
            if per_function[function] < MOST_OF_ONE:
                per_function[function] += 1
                spent_s = after_s
                picked.append(test)
        return picked


def places(mutant: Mutant) -> list[tuple[str, int]]:
    """Return the lines whose tests can notice a mutant: the mutant's own line, or for a mutant that
    runs at import the lines that use the names it assigns."""
    tree = ast.parse((ROOT / mutant.file).read_bytes())
    inside = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)
              and node.lineno <= mutant.line <= (node.end_lineno or 0)]  # fmt: skip
    functions = [
        node for node in inside if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    if functions and mutant.line >= functions[-1].body[0].lineno:
        return [(mutant.file, line) for line in {mutant.line, inside[-1].lineno}]
    names = [target.id for node in inside if isinstance(node, ast.Assign | ast.AnnAssign)
             for target in ast.walk(node) if isinstance(target, ast.Name)
             and isinstance(target.ctx, ast.Store)]  # fmt: skip
    if not names:
        users = ast.walk(functions[-1] if functions else tree)
        return [(mutant.file, node.lineno) for node in users if isinstance(node, ast.stmt)]
    used = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
    return [
        (os.fspath(path.relative_to(ROOT)), number)
        for path in measured_files()
        for number, text in enumerate(path.read_text().splitlines(), 1)
        if used.search(text)
    ]


# ---- trials ------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """The result of the tests that ran against one mutant."""

    killed_by: str | None
    tests: int
    """Number of tests that pytest was asked to run."""


def run_tests(tree: Path, tests: list[str]) -> Trial:
    """Run tests in a copy of the tree until one fails."""
    if not tests:
        return Trial(None, 0)
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider",
         "-p", "no:hypothesispytest", "-p", "no:anyio",  # their import takes a second of CPU time
         f"--timeout={HANGS_S}", *tests],
        cwd=tree, env={**os.environ, "PYTHONPATH": os.fspath(tree / "src")}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=HANGS_S * (1 + len(tests)))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Trial(f"a hang of {', '.join(tests)[:200]}", len(tests))
    if process.returncode == 0:
        return Trial(None, len(tests))
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", said, re.MULTILINE)
    return Trial(failed[1] if failed else f"exit code {process.returncode}", len(tests))


def try_one(tree: Path, mutant: Mutant, tiers: dict[str, Coverage]) -> dict[str, Any]:
    """Try one mutant, and return its row of the list with the result."""
    changed = tree / mutant.file
    original = changed.read_bytes()
    row = listed(mutant) | {"fate": "not covered"}
    began = time.monotonic()
    changed.write_bytes(mutant.applied())
    try:
        for tier, covered in tiers.items():
            tests = covered.chosen(covered.of(places(mutant)))
            trial = run_tests(tree, tests)
            row[f"tests_{tier}"] = trial.tests
            if trial.tests:
                row["fate"] = "survived"
            if trial.killed_by:
                row |= {"fate": f"killed by {tier}", "killed_by": trial.killed_by}
                break
    finally:
        changed.write_bytes(original)
    return row | {"seconds": round(time.monotonic() - began, 1)}


def open_tree(folder: Path) -> Path:
    """Copy the tree, without mutants, to a folder. Tests in the copy use this Python
    interpreter."""
    tree = folder / "tree"
    copy(ROOT, tree, without=())
    (tree / ".venv").symlink_to(ROOT / ".venv")
    (tree / "build").mkdir(exist_ok=True)
    return tree


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command("draw")
@click.option("--count", default=200, show_default=True, help="Number of mutants in the sample.")
@click.option("--seed", default=18, show_default=True, help="Seed of the sample.")
def draw_command(count: int, seed: int) -> None:
    """List sampled mutants of the files of this checkout, and forget the earlier list."""
    came_from = origin("python", *sys.argv)
    drawn = {"seed": seed, "commit": came_from["commit"]}
    keep(came_from, drawn, [listed(mutant) for mutant in sample(count, seed)])


@main.command("cover")
@click.argument("tiers", nargs=-1, type=click.Choice([NEW, OLD]))
def cover_command(tiers: tuple[str, ...]) -> None:
    """Run the tests of TIERS, or of both tiers, and record which lines they cover. This takes half
    an hour or more."""
    for tier in tiers or (NEW, OLD):
        measure(tier)


@main.command("try")
@click.option("--again", multiple=True, help="Also try mutants that have these fates.")
@click.option(
    "--tests",
    default=Limits().tests,
    show_default=True,
    help="Maximum number of tests for each mutant.",
)
@click.option(
    "--seconds",
    default=Limits().seconds,
    show_default=True,
    help="Maximum total time of these tests for each mutant, in seconds.",
)
@click.option("--only", default="", help="Only mutants of files whose path contains this text.")
def try_command(again: tuple[str, ...], tests: int, seconds: float, only: str) -> None:
    """Try the mutants that have no result."""
    stored: dict[str, Any] = json.loads(KEPT.read_text())
    rows: list[dict[str, Any]] = stored["mutants"]
    limits = Limits(tests, seconds)
    tiers = {tier: Coverage(tier, limits) for tier in (NEW, OLD) if (WORK / tier / "data").exists()}
    came_from = origin("python", *sys.argv)
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = open_tree(Path(folder))
        for number, row in enumerate(rows):
            if row["fate"] not in (UNTRIED, *again) or only not in row["file"]:
                continue
            mutant = located(row)
            result = {"fate": GONE} if mutant is None else try_one(tree, mutant, tiers)
            if row["fate"] not in (UNTRIED, result["fate"]):
                result["before"] = row["fate"]
            rows[number] = row | result | {"commit": came_from["commit"]}
            print("{fate:16} {file}:{line} {change}".format(**rows[number]), flush=True)
            keep(came_from, stored["drawn"], rows)


@main.command("prove")
@click.argument("place", metavar="FILE:LINE")
@click.argument("tests", nargs=-1, required=True)
def prove_command(place: str, tests: tuple[str, ...]) -> None:
    """Store the mutant in a line of this checkout as killed. TESTS must pass without the mutant,
    and one must fail with it."""
    stored: dict[str, Any] = json.loads(KEPT.read_text())
    rows: list[dict[str, Any]] = stored["mutants"]
    came_from = origin("python", *sys.argv)
    file, _, line = place.partition(":")
    found = [(number, mutant) for number, row in enumerate(rows) if row["file"] == file
             and (mutant := located(row)) is not None and mutant.line == int(line)]  # fmt: skip
    if len(found) != 1:
        raise click.ClickException(f"the list has no mutant or several mutants in {place}")
    ((number, mutant),) = found
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = open_tree(Path(folder))
        sound = run_tests(tree, [*tests])
        (tree / mutant.file).write_bytes(mutant.applied())
        trial = run_tests(tree, [*tests])
    if sound.killed_by or not trial.killed_by:
        raise click.ClickException(
            "the tests must pass without the mutant and fail with it; "
            f"without: {sound}; with: {trial}"
        )
    row = rows[number]
    before = row.get("before", row["fate"])
    rows[number] = row | listed(mutant) | {
        "fate": f"killed by {NEW}", "killed_by": trial.killed_by, "before": before,
        "commit": came_from["commit"],
    }  # fmt: skip
    keep(came_from, stored["drawn"], rows)


def keep(
    came_from: Mapping[str, Any], drawn: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Write the list. `came_from`: origin of the newest run; `drawn`: seed and commit of the
    sample."""
    counts = Counter(str(row["fate"]) for row in rows)
    write_result(
        KEPT, {"origin": came_from, "drawn": drawn, "counts": dict(counts), "mutants": rows}
    )


if __name__ == "__main__":
    main()
