"""A cold tier that an earlier version wrote, and what a later one may write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cold_driver import Key, TableDaemon, spark_of_python, waiting

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.pipeline.promote import promote
from purgatoryd.pipeline.tier import HOUR_NS, Tier

STORED = Path(__file__).parent / "stored" / "cold-1"
"""Ten timers, one each ten minutes from 2030 on, the last four parked. The first three are hot, two
are in a window that is promoting, and of these k4 was cancelled. No major version stands in it."""
ORIGIN_NS = 1_893_456_000 * 10**9
NO_SPARK: Any = None


def key(n: int) -> Key:
    return "shop", "str", b"k%d" % n


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "lake"))


def edit(path: Path, **changes: object) -> None:
    """Changes fields of a file of JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("later", [False, True])
def test_a_stored_tier_goes_on(lake: Path, monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    spark_of_python(monkeypatch)
    (version,) = lake.glob("cold/versions/*.json")
    if later:
        parts = json.loads(version.read_text())["rows"]
        edit(version, invented=[1], rows=[part | {"invented": 1} for part in parts])
        for window in lake.glob("windows/*.json"):
            edit(window, invented=1)
    tier, daemon = Tier(lake), TableDaemon()
    assert set(waiting(tier)) == {key(n) for n in (3, 5, 6, 7, 8, 9)}
    first, second = promote(NO_SPARK, tier, ORIGIN_NS + 2 * HOUR_NS, daemon)
    assert (first.rows, first.cancelled, second.rows) == (2, 1, 5)
    assert set(daemon.armed) == {key(n) for n in (3, 5, 6, 7, 8, 9)}
    assert waiting(tier) == {}


@pytest.mark.parametrize("file", ["cold/versions/*.json", "windows/*.json"])
def test_another_major_version_is_refused(lake: Path, file: str) -> None:
    path = max(lake.glob(file))
    edit(path, major=2)
    done = CliRunner().invoke(app, ["pipeline", "cold", "status", "--lake", str(lake), "--json"])
    assert done.exit_code == Exit.UNUSABLE, done.output
    told = json.loads(done.stderr)
    assert (told["error"], told["found"], told["expected"]) == ("LakeMismatch", 2, 1)
    assert told["path"] == str(path)
