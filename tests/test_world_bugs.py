"""The bugs that prove that the simulated worlds are awake (tests/world/bugs, `make world-bugs`)."""

from __future__ import annotations

import os
import subprocess
from collections import Counter

import pytest
from world.find_bugs import ROOT, Bug, bugs

pytestmark = pytest.mark.tier("all")


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_each_bug_can_be_brought_into_the_tree(bug: Bug) -> None:
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": os.fspath(ROOT.parent)}
    command = ["git", "apply", "--check", os.fspath(bug.path)]
    found = subprocess.run(command, cwd=ROOT, env=outside, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 0, found.stderr
    assert bug.files
    assert bug.description.endswith(".")


def test_there_are_enough_bugs_of_each_kind() -> None:
    kinds = Counter(bug.kind for bug in bugs())
    assert set(kinds) == {"real", "planted"}
    assert min(kinds.values()) >= 10
    assert kinds.total() >= 30
