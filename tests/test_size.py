"""`purgatoryd size`, and the table with its output in docs/operations.md."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from real_daemon import StartDaemon

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.cli.size import GIB, PAYLOADS, refresh, sizes, timers_in
from purgatoryd.clients import Client
from purgatoryd.shm_layout.layout import Status

pytestmark = pytest.mark.tier("check")

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"


def size(*args: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["size", "--json", *args], catch_exceptions=False)
    assert done.exit_code == Exit.DONE, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_table_of_the_page_is_what_the_command_says() -> None:
    assert refresh(PAGE.read_text()) == PAGE.read_text(), "make docs"
    assert all(f"| {payload:,} B |" in PAGE.read_text() for payload in PAYLOADS)


@pytest.mark.parametrize("with_wal", [False, True])
def test_exactly_the_reported_number_of_timers_fits(with_wal: bool) -> None:
    most = timers_in(GIB, 64, with_wal)
    assert sizes(most, 64, with_wal).shm_bytes <= GIB
    assert sizes(most + 1, 64, with_wal).shm_bytes > GIB
    assert timers_in(1_000_000, 64, with_wal) == 0


@pytest.mark.parametrize("blob_bytes", [16, 65536])
def test_the_size_per_timer_does_not_depend_on_the_number(blob_bytes: int) -> None:
    few, many = (sizes(n, blob_bytes, with_wal=False).timer_bytes for n in (1, 500_000))
    assert few == pytest.approx(many, rel=0.05)


@pytest.mark.tier("test")
def test_the_advised_settings_are_sufficient(daemon: StartDaemon) -> None:
    reported = CliRunner().invoke(app, ["size", "--timers", "3000", "--payload-bytes", "1000"])
    settings = tomllib.loads(reported.stdout)
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    real = daemon("demo", *flags)
    arena_files = (real.paths.arena, real.paths.private)
    found = size("--timers", "3000", "--payload-bytes", "1000")
    assert sum(Path("/dev/shm" + one).stat().st_size for one in arena_files) == found["shm_bytes"]
    with Client("demo") as client:
        keys = [f"{n:016}" for n in range(3001)]
        result = client.add_many([(key, 60.0, "t", bytes(1000)) for key in keys])
    assert list(result.statuses) == [Status.ADDED] * 3000 + [Status.FULL]


@pytest.mark.parametrize(
    "more", [["--timers", str(2**28)], ["--key-bytes", "256"], ["--payload-bytes", "65537"]]
)
def test_a_size_beyond_all_limits_is_refused(more: list[str]) -> None:
    done = CliRunner().invoke(app, ["size", "--timers", "1", *more])
    assert done.exit_code == Exit.USAGE
