"""Compare with the servers that users would choose instead, both sides in one run.

In each repetition of a scene every contestant runs once, with a new server on a unix socket in a
temporary directory; the order rotates. Clients are processes of their own. A
ratio divides our median by the peer's best repetition. CPU times of servers include the process
that polls Redis. A peer that is not installed is named on stderr and in the result, and left out.

Writes benchmarks/results/peers.json, the table and the plot of docs/peers.md after each scene. With
`--only`, the stored rows of other scenes stay.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: forked clients need no threads

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from peers import report, verdicts
from peers.scenes import OURS, Scene, scenes, skipped
from recording import machine, write_result

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"

Sample = dict[str, float]


def turned(names: list[str], repetition: int) -> list[str]:
    """Return the contestants in the order of a repetition: each is first in its turn."""
    first = repetition % len(names)
    return names[first:] + names[:first]


def samples(contestants: dict[str, Callable[[], Sample]], repeats: int) -> dict[str, list[Sample]]:
    """Run all contestants in turns."""
    found: dict[str, list[Sample]] = {name: [] for name in contestants}
    for repetition in range(repeats):
        for name in turned(list(contestants), repetition):
            found[name].append(contestants[name]())
    return found


def measured(scene: Scene, repeats: int) -> list[verdicts.Row]:
    """Return the rows of a scene; each has the load average at the scene's begin."""
    load_average = os.getloadavg()[0]
    found = samples(scene.contestants, repeats)
    rows = verdicts.rows(scene.name, scene.figures, found, scene.targets, OURS)
    return [{**row, "scene": scene.name, "load_average": load_average} for row in rows]


def chosen(words: list[str], nightly: bool) -> list[str]:
    """Return the names of the scenes that contain one of the words; all if there are none."""
    names = [scene.name for scene in scenes(nightly=nightly)]
    return [name for name in names if not words or any(word in name for word in words)]


def commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def document(arguments: argparse.Namespace, rows: list[verdicts.Row]) -> dict[str, Any]:
    """Return the result: new rows, with the stored rows of other scenes, in the scenes' order."""
    new = {row["scene"] for row in rows}
    old = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() and arguments.only else []
    order = {scene.name: number for number, scene in enumerate(scenes(nightly=True))}
    stored = [row for row in old if row["scene"] in order and row["scene"] not in new]
    return {
        "command": "make bench-peers", "machine": machine(), "commit": commit(),
        "repeats": arguments.repeats, "skipped": skipped(),
        "rows": sorted([*stored, *rows], key=lambda row: order[row["scene"]]),
    }  # fmt: skip


def line(row: verdicts.Row) -> str:
    return " | ".join(report.cells(row))


def warn(reasons: Iterable[str]) -> None:
    for reason in reasons:
        print(f"LEFT OUT: {reason}", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all sizes")
    parser.add_argument("--only", nargs="+", default=[], help="scenes that contain these words")
    parser.add_argument("--nightly", action="store_true", help="also PostgreSQL and NATS")
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    parser.add_argument("--report", action="store_true", help="only write the page and the plot")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.report:
        report.write(json.loads(RESULTS.read_text()))
        return
    warn(skipped())
    rows: list[verdicts.Row] = []
    names = chosen(arguments.only, arguments.nightly)
    for scene in (one for one in scenes(arguments.scale, arguments.nightly) if one.name in names):
        found = measured(scene, arguments.repeats)
        rows += found
        print(*map(line, found), sep="\n", flush=True)
        if not arguments.dry:
            write_result(RESULTS, document(arguments, rows))
            report.write(json.loads(RESULTS.read_text()))
    warn(skipped())


if __name__ == "__main__":
    main()
