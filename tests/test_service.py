"""The units in a booted systemd: start, kill, hang, reload, second instance, users, journald and
shards.

support/service_steps.py runs inside of a container. This file builds and boots the container, and
has a test for each step.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import nspawn
import pytest
from machine import needs
from service_steps import STEPS

from purgatoryd.cli.app import app

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).resolve().parent.parent
NAMES = "default", "web", "far", "many"
PEOPLE = """\
u insider 2001 - - -
u outsider 2002 - - -
m insider purgatoryd
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str | None]:
    """Boot the container and run all steps; return None or the reason of failure, by step."""
    needs("nspawn")
    root = tmp_path_factory.mktemp("service") / "root"
    nspawn.make_root(root)
    binds = nspawn.python_of(root, ROOT)
    script = root / "opt/bin/purgatoryd"
    script.write_text('#!/bin/sh\nexec /opt/bin/python -m purgatoryd.cli "$@"\n')
    script.chmod(0o755)
    install(root)
    results = root / "var/results.json"
    assert nspawn.boot(
        root, "/opt/bin/python /opt/source/tests/support/service_steps.py /var/results.json", binds
    ), "systemd did not boot"
    found: dict[str, str | None] = json.loads(results.read_text())
    return found


def install(root: Path) -> None:
    """Install the service as in an image, with `purgatoryd install`; create the tests' users."""
    arguments = ["install", "--root", str(root), "--command", "/opt/bin/purgatoryd"]
    arguments += [word for name in NAMES for word in ("--enable", name)]
    with pytest.raises(SystemExit) as ended:
        app.main(arguments)
    assert ended.value.code == 0
    people = root / "etc/sysusers.d/people.conf"
    people.write_text(PEOPLE)
    subprocess.run(["systemd-sysusers", f"--root={root}", "people.conf"], check=True)


@pytest.mark.parametrize("step", [step.__name__ for step in STEPS])
def test_a_step_of_the_service(step: str, outcomes: Mapping[str, str | None]) -> None:
    assert outcomes[step] is None, outcomes[step]
