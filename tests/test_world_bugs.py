"""The bugs of tests/world/bugs: `make world-bugs` applies them, and simulated worlds find them."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from world.find_bugs import LIMIT_S, ROOT, START_SEEDS, Bug, bugs
from world.script import Setting

pytestmark = pytest.mark.tier("all")


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_each_bug_can_be_brought_into_the_tree(bug: Bug) -> None:
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": os.fspath(ROOT.parent)}
    command = ["git", "apply", "--check", os.fspath(bug.path)]
    found = subprocess.run(command, cwd=ROOT, env=outside, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 0, found.stderr
    assert bug.files
    assert {*bug.worlds} <= Setting.__dataclass_fields__.keys()
    assert bug.description.endswith(".")


def test_a_patch_may_name_the_settings_of_the_worlds_that_can_meet_its_bug(tmp_path: Path) -> None:
    patch = tmp_path / "bug.patch"
    patch.write_text("planted: A bug.\nworlds: groups wal\n\ndiff\n")
    assert Bug(patch).worlds == ["groups", "wal"]
    patch.write_text("planted: A bug.\n\ndiff\nworlds: groups\n")
    assert Bug(patch).worlds == []


def test_worlds_have_found_each_bug_from_each_start_seed() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "world_bugs.json").read_text())
    for bug in bugs():
        hunts = found[bug.name]["hunts"]
        assert [hunt["start_seed"] for hunt in hunts] == list(START_SEEDS), bug.name
        assert all(hunt["failure"] and hunt["cpu_s"] <= LIMIT_S for hunt in hunts), bug.name


def test_there_are_enough_bugs_of_each_kind() -> None:
    kinds = Counter(bug.kind for bug in bugs())
    assert set(kinds) == {"real", "planted"}
    assert min(kinds.values()) >= 10
    assert kinds.total() >= 30
