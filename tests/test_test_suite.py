"""Rules of the tests themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
FILES = sorted(TESTS.rglob("test_*.py"))


def imported(source: str) -> Iterator[str]:
    """The modules that a program imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_test_files_do_not_import_each_other(path: Path) -> None:
    tests = {file.stem for file in FILES} | {"conftest"}
    assert not tests.intersection(imported(path.read_text())), "move it to tests/support"


def test_no_helper_imports_a_test() -> None:
    tests = {file.stem for file in FILES} | {"conftest"}
    for path in TESTS.glob("*/*.py"):
        assert not tests.intersection(imported(path.read_text())), path.name


def test_what_is_no_test_is_in_a_folder() -> None:
    outside = {path.name for path in TESTS.glob("*.py")} - {path.name for path in FILES}
    assert outside == {"conftest.py"}
