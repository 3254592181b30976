"""Rules of the tests themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
COLLECTED = {path.stem for path in TESTS.glob("*.py")}


def imported(source: str) -> Iterator[str]:
    """Each part of each dotted name that a program imports, wherever in it."""
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
    assert found == {}, "move what is shared to tests/support"


def test_what_is_no_test_is_in_a_folder() -> None:
    assert {name for name in COLLECTED if not name.startswith("test_")} == {"conftest"}
