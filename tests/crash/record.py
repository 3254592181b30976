"""Runs a program that prints JSON, and keeps it with machine, command and commit.

`python record.py RESULT COMMAND...` writes benchmarks/results/RESULT once the command ended well.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def origin(*command: str) -> dict[str, object]:
    """Where figures come from: the machine, the command, the commit that is checked out."""
    return {
        "machine": {
            "cpu": _cpu(),
            "cpus": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "compiler": _output("cc", "--version").splitlines()[0],
        },
        "command": " ".join(command),
        "commit": _output("git", "describe", "--always", "--dirty").strip(),
    }


def main(result: str, *command: str) -> None:
    found = {**origin(*command), **json.loads(_output(*command))}
    (RESULTS / result).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
