"""What a test needs of the machine: skipped with the reason, or failed when it is required."""

from __future__ import annotations

import machine
import pytest

pytestmark = pytest.mark.tier("check")


@pytest.fixture(autouse=True)
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has a hammer and no anvil."""
    probes = {"hammer": (lambda: True, "a hammer"), "anvil": (lambda: False, "`anvil` is needed")}
    monkeypatch.setattr(machine, "PROBES", probes)
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    machine._present.cache_clear()


def test_what_is_there_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    machine.needs("hammer")
    monkeypatch.setenv(machine.VARIABLE, "hammer")
    machine.needs("hammer")


def test_what_is_missing_skips_and_says_what() -> None:
    with pytest.raises(pytest.skip.Exception, match="anvil: `anvil` is needed \\(to forge\\)"):
        machine.needs("anvil", "to forge")


@pytest.mark.parametrize("required", ["anvil", "hammer, anvil", "all"])
def test_what_is_required_fails(required: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.VARIABLE, required)
    with pytest.raises(pytest.fail.Exception, match="anvil"):
        machine.needs("anvil")


def test_a_misspelt_requirement_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.VARIABLE, "anvill")
    with pytest.raises(pytest.fail.Exception, match="unknown \\['anvill'\\]"):
        machine.needs("anvil")
