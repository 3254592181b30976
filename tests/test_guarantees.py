"""Tests and results that docs/guarantees.md names exist, and each promise is stated there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("check")

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
ROWS = [row for row in PAGE.splitlines() if row.startswith("| **")]
NAMES = [re.findall(r"\*\*(.+?)\.?\*\*", row)[0] for row in ROWS]
"""The promises, without the full stop at the end."""


def named_tests(row: str) -> list[tuple[str, str]]:
    """Return (file, function or "") of each test in a row.

    `::name` without a file means a function of the last file that the row names before it.
    """
    found, file = [], ""
    for path, function in re.findall(r"`(tests/[\w/]+\.(?:py|c))?(?:::(\w+))?`", row):
        file = path or file
        if path or function:
            found.append((file, function))
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.findall(r"\*\*(.+?)\*\*", row)[0])
def test_each_promise_names_tests_that_exist(row: str) -> None:
    found = named_tests(row)
    assert found
    for file, function in found:
        source = (ROOT / file).read_text()
        assert not function or re.search(rf"^def {function}\(", source, re.MULTILINE), function


def test_results_that_are_named_exist() -> None:
    results = re.findall(r"`(\w+\.json)`", PAGE)
    assert len(results) > 5
    assert [name for name in results if not (ROOT / "benchmarks/results" / name).exists()] == []


def test_the_page_and_promises_toml_have_the_same_promises() -> None:
    listed = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())["promise"]
    assert sorted(one["text"] for one in listed) == sorted(NAMES)
    assert len(set(NAMES)) == len(NAMES)


def test_the_readme_links_to_promises_and_states_none() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    plain = re.sub(r"\[[^]]*\]\([^)]*\)", "", readme).lower()
    assert "docs/guarantees.md#" in readme
    assert [name for name in NAMES if name.lower() in plain] == []
