"""The command line, in its own process and inside the test's."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result
from real_daemon import PATIENCE_S, Daemon
from template import run

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit

BASE = [sys.executable, "-m", "purgatoryd.cli"]


def cli(daemon: Daemon, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run((*args, "--name", daemon.name), daemon.env, stdin, PATIENCE_S)


def answer(daemon: Daemon, *args: str, code: Exit = Exit.DONE) -> Any:
    """Return the one JSON object that a command prints; its exit code must be `code`."""
    done = cli(daemon, *args, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def reported(*arguments: str, code: Exit = Exit.DONE) -> dict[str, Any]:
    """Return the last line of a command with --json."""
    result = command(*arguments, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found
