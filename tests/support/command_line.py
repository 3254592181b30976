"""The command line, in a process of its own and inside of the test's process."""

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
    """Run a command that prints one JSON object. Return the object. The exit code must be
    `code`."""
    done = cli(daemon, *args, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def reported(*arguments: str, code: Exit = Exit.DONE) -> dict[str, Any]:
    """Run a command with --json. Return the JSON object in its last line."""
    result = command(*arguments, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found
