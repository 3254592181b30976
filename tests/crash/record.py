"""Run a program that prints JSON, and store the output with machine, command and commit.

`python record.py RESULT COMMAND...` writes benchmarks/results/RESULT after the command has
succeeded.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))

from recording import machine, write_result  # noqa: E402


def _output(*command: str) -> str:
    """Return the output of a command. If the command fails, print the output and exit, because the
    command may have run for hours."""
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout, end="")
        sys.exit(done.returncode)
    return done.stdout


def origin(*command: str) -> dict[str, object]:
    """Return the origin of a result: the machine, the command and the commit that is checked
    out."""
    return {
        "machine": {**machine(), "compiler": _output("cc", "--version").splitlines()[0]},
        "command": " ".join(command),
        "commit": _output("git", "describe", "--always", "--dirty").strip(),
    }


def main(result: str, *command: str) -> None:
    write_result(RESULTS / result, {**origin(*command), **json.loads(_output(*command))})


if __name__ == "__main__":
    main(*sys.argv[1:])
