"""Rules that the test suite itself follows."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pages
import psutil
import pytest
from command_line import cli
from real_daemon import StartDaemon
from template import Forked
from tiers import wide

from purgatoryd.cli.exits import Exit

pytestmark = pytest.mark.tier("test")

TESTS = Path(__file__).resolve().parent
FOLDERS = TESTS, TESTS / "spark"
"""Folders in which pytest looks for tests."""
COLLECTED = {path.stem for folder in FOLDERS for path in folder.glob("*.py")}


def imported(source: str) -> Iterator[str]:
    """Yield each part of each dotted name that a program imports, even inside of functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            for name in names:
                yield from name.split(".")


@pytest.mark.parametrize(
    "source",
    [
        "import json, test_wire as wire",
        "from test_wire import KINDS",
        "from conftest import daemon",
        "from tests.test_wire import KINDS",
        "from . import test_wire",
        "def test():\n    from test_wire import KINDS",
    ],
)
def test_an_import_of_a_test_file_is_found(source: str) -> None:
    assert COLLECTED.intersection(imported(source))


def test_no_file_imports_a_test_file() -> None:
    found = {
        str(path.relative_to(TESTS)): names
        for path in TESTS.rglob("*.py")
        if (names := COLLECTED.intersection(imported(path.read_text())))
    }
    assert found == {}, "a test file is imported: move the shared code to tests/support"


def test_files_that_are_no_tests_are_in_folders() -> None:
    assert {name for name in COLLECTED if not name.startswith("test_")} == {"conftest"}


# ---- tiers, costs and scheduling ---------------------------------------------------------------

CHECK = """
import pytest

pytestmark = pytest.mark.tier("check")

def test_quick():
    pass

@pytest.mark.tier("test")
def test_longer():
    pass

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.tier("all"))])
def test_wide(n):
    pass
"""
BUSY = """
import subprocess, sys, time
import pytest

pytestmark = pytest.mark.tier("test")
SPIN = "import time\\nbegan = time.process_time()\\nwhile time.process_time() < began + 0.3: pass"

def test_quick():
    pass

def test_busy():
    exec(SPIN)

def test_busy_child():
    subprocess.run([sys.executable, "-c", SPIN], check=True)

@pytest.mark.costly("a search")
def test_costly():
    exec(SPIN)

@pytest.fixture(scope="module")
def shared():
    exec(SPIN.replace("0.3", "0.5"))

def test_shares(shared):
    pass
"""
ALONE = """
import os, time
from pathlib import Path
import pytest

pytestmark = pytest.mark.tier("test")

@pytest.mark.alone
@pytest.mark.parametrize("n", range(3))
def test_alone(n):
    folder = Path(os.environ["RUNNING"])
    assert not list(folder.iterdir())
    (folder / f"alone{n}").touch()
    time.sleep(0.2)
    (folder / f"alone{n}").unlink()

@pytest.mark.parametrize("n", range(12))
def test_with_others(n):
    folder = Path(os.environ["RUNNING"])
    (folder / f"other{n}").touch()
    time.sleep(0.05)
    assert not list(folder.glob("alone*"))
    (folder / f"other{n}").unlink()
"""
IMPORTS_PYSPARK = """
import sys
import pytest

pytestmark = pytest.mark.tier("test")

def test_before():
    pass

def test_imports():
    sys.modules["pyspark"] = sys
"""


class Run(NamedTuple):
    """A run of pytest on one file, with this project's plugins and without a conftest."""

    code: int
    outcomes: dict[str, str]
    output: str


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    def run(source: str, *arguments: str, **env: str) -> Run:
        folder = tmp_path / "tests"
        folder.mkdir(exist_ok=True)
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "test_it.py").write_text(source)
        plugins = [word for name in ("tiers", "costs", "scheduling") for word in ("-p", name)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *plugins, "-v", "-p", "no:cacheprovider", *arguments],
            cwd=folder, env=os.environ | {"PYTHONPATH": str(TESTS / "support")} | env, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        found = re.findall(r"test_it\.py::(\S+)(?: | .* )(PASSED|FAILED)", done.stdout)
        found += [(name, word) for word, name in re.findall(
            r"\] \[.*?\] (PASSED|FAILED) test_it\.py::(\S+)", done.stdout)]  # fmt: skip
        return Run(done.returncode, dict(found), done.stdout + done.stderr)

    return run


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--tier=check"], {"test_quick", "test_wide[1]"}),
        (["--tier=test"], {"test_quick", "test_wide[1]", "test_longer"}),
        (["--tier=all"], {"test_quick", "test_wide[1]", "test_longer", "test_wide[2]"}),
        ([], {"test_quick", "test_wide[1]", "test_longer", "test_wide[2]"}),
        (["--tier=all", "--above=test"], {"test_wide[2]"}),
        (["--tier=test", "--above=check"], {"test_longer"}),
    ],
)
def test_a_tier_contains_those_below(
    arguments: list[str], names: set[str], run: Callable[..., Run]
) -> None:
    assert run(CHECK, *arguments).outcomes.keys() == names


def test_a_file_without_a_tier_is_refused(run: Callable[..., Run]) -> None:
    for source in ("def test_it(): pass", CHECK.replace('("check")', '("chekc")')):
        refused = run(source)
        assert refused.code == pytest.ExitCode.USAGE_ERROR
        assert "no tier; write" in refused.output


def test_a_file_of_a_higher_tier_is_not_imported(run: Callable[..., Run]) -> None:
    source = 'import pytest\npytestmark = pytest.mark.tier("all")\nraise SystemError'
    assert run(source, "--tier=test").code == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.costly("two runs of pytest, with tests that cost CPU")
def test_tests_that_cost_too_much_fail_the_gate(run: Callable[..., Run]) -> None:
    gate = run(BUSY, "--cpu-limit=0.2")
    assert set(gate.outcomes.values()) == {"PASSED"}
    assert gate.code == pytest.ExitCode.TESTS_FAILED
    over = re.findall(r"::(\w+): .* without a reason", gate.output)
    assert over == ["test_busy", "test_busy_child"]
    assert "fixture shared" in gate.output
    assert run(BUSY, "--cpu-limit=2").code == pytest.ExitCode.OK


def test_a_test_that_is_to_run_alone_does(run: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "running").mkdir()
    done = run(ALONE, "-n3", "--dist=loadgroup", RUNNING=str(tmp_path / "running"))
    assert done.code == pytest.ExitCode.OK, done.output
    assert len(done.outcomes) == 15


@pytest.mark.parametrize(
    ("at", "workers"), [("test_imports", []), wide("collection", []), ("collection", ["-n1"])]
)
def test_a_process_that_imports_pyspark_without_a_test_of_it_fails_the_run(
    at: str, workers: list[str], run: Callable[..., Run]
) -> None:
    source, importer = IMPORTS_PYSPARK, "test_it.py::test_imports"
    if at == "collection":
        source, importer = source.replace("    sys.", "    pass\nsys."), "test_it.py"
    done = run(source, *workers)
    assert done.outcomes == {"test_before": "PASSED", "test_imports": "PASSED"}
    assert done.code == pytest.ExitCode.TESTS_FAILED
    assert f"\n{importer} imported PySpark" in done.output


# ---- promises ----------------------------------------------------------------------------------


def runs_in_make_test(name: str) -> bool:
    """Return whether `make test` runs the test `name`: FILE::TEST, or FILE for any test of the
    file."""
    path, _, test = name.partition("::")
    source = (TESTS.parent / path).read_text()
    if path.endswith(".c"):
        return path.startswith("tests/c/")
    marks = re.findall(r'\bmark\.tier\("(\w+)"\)', source)
    if test:
        before = re.findall(rf"((?:^@.*\n)*)^def {test}\(", source, re.MULTILINE)[0]
        marks = re.findall(r'^@pytest\.mark\.tier\("(\w+)"\)', before, re.MULTILINE) or marks[:1]
    return {"check", "test"} & set(marks) != set()


def test_each_promise_has_a_test_in_make_test() -> None:
    found = list(pages.promises())
    assert len(found) > 40
    for promise, quick, longer in found:
        names = re.findall(r"`(tests/[\w/]+\.(?:py|c)(?:::\w+)?)`", quick)
        assert names or promise.startswith("The tests notice a fault in"), promise
        assert [name for name in names if not runs_in_make_test(name)] == [], promise
        for path in re.findall(r"`(tests/[\w/.]+)", longer):
            assert (TESTS.parent / path).is_file(), path


# ---- daemons that a template process forks -----------------------------------------------------


def test_a_forked_daemon_is_a_child_with_files_and_a_folder_of_its_own(daemon: StartDaemon) -> None:
    demo = daemon("demo")
    assert isinstance(demo.process, Forked)
    process = psutil.Process(demo.pid)
    assert (process.ppid(), process.cwd()) == (os.getpid(), str(demo.dir))
    assert [file.path for file in process.open_files()].count(str(demo.dir / "demo.stderr")) == 1
    demo.stop()
    assert demo.process.returncode == 0


def test_a_caller_that_differs_from_the_template_starts_an_interpreter(
    daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o27)
    try:
        assert not isinstance(daemon("masked").process, Forked)
    finally:
        os.umask(before)
    assert not isinstance(daemon("seeded", env={"PYTHONHASHSEED": "7"}).process, Forked)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert not isinstance(daemon("inherits").process, Forked)


def test_a_command_of_the_template_reads_stdin_and_ends_with_its_code(daemon: StartDaemon) -> None:
    demo = daemon("demo")
    added = cli(demo, "add", "k", "--delay", "1h", "--payload-file", "-", stdin="héllo")
    assert added.returncode == Exit.DONE, added.stderr
    assert "héllo" in cli(demo, "get", "k", "--json").stdout
    unknown = cli(demo, "get", "no such key")
    assert (unknown.returncode, unknown.stdout) == (Exit.NEGATIVE, "unknown no such key\n")
