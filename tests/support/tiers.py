"""The tiers of the tests: tier `test` includes `check`, and tier `all` includes `test`.

A pytest plugin. Each test file states the tier of its tests: `pytestmark =
pytest.mark.tier("test")`. A tier mark at a test, or at a parameter of a test, takes precedence over
the file's mark. `--tier` selects a tier with the tiers that it includes. Without `--tier`, all
tests run.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet

TIERS = ("check", "test", "all")
_DECLARED = re.compile(r'^pytestmark = .*?\bmark\.tier\("(\w+)"\)', re.MULTILINE | re.DOTALL)
_ANYWHERE = re.compile(r'\bmark\.tier\("(\w+)"\)')


def wide(*values: object) -> ParameterSet:
    """Return parameters of a test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.tier("all"))


def sample(values: Iterable[object], chosen: Container[object]) -> list[object]:
    """Return all values of a parameter (or tuples, for several parameters). Values that are not in
    `chosen` get the tier `all`."""
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [value if value in chosen else wide(*row) for value, row in rows]


def declared(source: str) -> str | None:
    """Return the tier that the text of a test file states; None if it states no tier."""
    found = _DECLARED.search(source)
    return found[1] if found and found[1] in TIERS else None


def tier_of(item: pytest.Item) -> str:
    """Return the tier of the parameter; if it has no tier, the tier of the test, otherwise the tier
    of the file."""
    own = [mark for mark in item.own_markers if mark.name == "tier"]
    mark = own[-1] if own else item.get_closest_marker("tier")
    assert mark is not None
    return str(mark.args[0])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of this tier and lower tiers")
    parser.addoption(
        "--above", choices=TIERS, help="leave out the tests of this tier and lower tiers"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "tier(name): check, test or all: lowest tier that runs it")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file if none of its tests is selected."""
    selected = config.getoption("--tier")
    if selected is None or not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    tiers = _ANYWHERE.findall(collection_path.read_text())
    return True if tiers and min(map(TIERS.index, tiers)) > TIERS.index(selected) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of tiers that are not selected.

    Raises UsageError for a file without a tier, and for a test of tier `check` that starts a
    daemon.
    """
    for path in {item.path for item in items}:
        if declared(path.read_text()) is None:
            raise pytest.UsageError(
                f'{path}: no tier; write `pytestmark = pytest.mark.tier("check")`, "test" or "all"'
            )
    for item in items:
        if tier_of(item) == "check" and "daemon" in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(f"{item.nodeid}: a test of the tier check starts a daemon")
    upto = TIERS.index(config.getoption("--tier") or TIERS[-1])
    above = TIERS.index(config.getoption("--above")) if config.getoption("--above") else -1
    selected = [item for item in items if above < TIERS.index(tier_of(item)) <= upto]
    if len(selected) < len(items):
        config.hook.pytest_deselected(items=list(set(items).difference(selected)))
        items[:] = selected
