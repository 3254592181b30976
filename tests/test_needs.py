"""needs() skips a test whose feature the machine lacks, or fails it if the feature is required."""

from __future__ import annotations

import machine
import pytest

pytestmark = pytest.mark.tier("check")


@pytest.fixture(autouse=True)
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the feature "hammer" and without the feature "anvil"."""
    probes = {"hammer": (lambda: True, "a hammer"), "anvil": (lambda: False, "`anvil` is needed")}
    monkeypatch.setattr(machine, "PROBES", probes)
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    machine._present.cache_clear()


def test_an_available_feature_skips_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine.needs("hammer")
    monkeypatch.setenv(machine.VARIABLE, "hammer")
    machine.needs("hammer")


def test_a_missing_feature_skips_with_the_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match="anvil: `anvil` is needed \\(to forge\\)"):
        machine.needs("anvil", "to forge")


@pytest.mark.parametrize("required", ["anvil", "hammer, anvil", "all"])
def test_a_missing_required_feature_fails(required: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.VARIABLE, required)
    with pytest.raises(pytest.fail.Exception, match="anvil"):
        machine.needs("anvil")


def test_a_misspelt_requirement_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.VARIABLE, "anvill")
    with pytest.raises(pytest.fail.Exception, match="unknown \\['anvill'\\]"):
        machine.needs("anvil")
