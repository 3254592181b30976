"""Copies of the Node client of examples/node with its dependency, and scripts that use it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import example_clients
import pytest
from machine import needs, required
from real_daemon import PATIENCE_S, Daemon, eventually

SOURCES = Path(__file__).resolve().parent.parent.parent / "examples" / "node"


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the client, with its dependency from npm."""
    needs("node")
    folder = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0 and "node" not in required():
        pytest.skip(f"npm did not install the client: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return folder


def command(node: Path, demo: Daemon, text: str) -> list[str]:
    """Return the command of a script of the client. `show()` prints values as a line of JSON."""
    head = f"""
import * as pg from "{node}/index.js";
import {{ writeSync }} from "node:fs";
const place = "{demo.dir}/demo";
const plain = (_, value) => typeof value === "bigint" ? Number(value) : value;
const show = (value) => writeSync(1, JSON.stringify(value, plain) + "\\n");
"""
    return ["node", "--input-type=module", "--eval", head + text]


def script(node: Path, demo: Daemon, text: str) -> Any:
    """Run a script of the client that prints a line of JSON, and return what it printed."""
    done = example_clients.run(command(node, demo, text))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def script_while_killed(node: Path, demo: Daemon, text: str, log: Path, kills: int) -> Any:
    """Run a script of the client that prints lines of JSON, and kill the daemon again and again
    while it runs. Then send it SIGTERM, and return its last line."""
    with example_clients.running(command(node, demo, text), log) as program:
        for _ in range(kills):
            before = len(program.lines())
            eventually(lambda: len(program.lines()) > before + 3)  # noqa: B023
            example_clients.crash(demo)
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(2 * PATIENCE_S) == 0
    return newest(log)


def newest(log: Path) -> Any:
    """Return the last line of JSON in a file."""
    return json.loads(log.read_text().strip().split("\n")[-1])
