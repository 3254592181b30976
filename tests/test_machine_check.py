"""Messages of the set-up about parts that the machine lacks: one clear sentence each."""

from __future__ import annotations

import runpy
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("check")

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "check_machine.py"


@pytest.fixture
def missing() -> Callable[[str], str | None]:
    found: Callable[[str], str | None] = runpy.run_path(str(SCRIPT))["missing"]
    return found


def test_this_machine_has_all_requirements(missing: Callable[[str], str | None]) -> None:
    assert missing("cc") is None


def test_no_compiler(missing: Callable[[str], str | None]) -> None:
    reported = missing("no-such-cc -m64")
    assert reported is not None
    assert reported.startswith("No C compiler: no-such-cc -m64")


def test_other_system(
    missing: Callable[[str], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert missing("cc") == "purgatoryd runs on Linux only; this is darwin."


def test_old_python(missing: Callable[[str], str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert "needs Python 3.11 or newer" in (missing("cc") or "")


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_no_venv(
    module: str, missing: Callable[[str], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert "venv module is missing" in (missing("cc") or "")


def test_no_headers(
    missing: Callable[[str], str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert (missing("cc") or "").startswith(f"No Python.h in {tmp_path}")
