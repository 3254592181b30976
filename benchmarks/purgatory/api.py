"""Operations through Purgatory, as callers use it: operations per second of client CPU time.

A round watches a batch of operations, advances all their watch keys, and waits for all outcomes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from own_daemon import own_daemon

from purgatoryd.clients import AllOf, Purgatory

SIZES = (100, 1000, 5000)
"""Operations in a batch."""
REPETITIONS = 5
LEAST = 50_000
"""Operations of one repetition."""
PAYLOAD = b"p" * 48
SETTINGS = (
    "--capacity", "65536", "--watches", "65536", "--watch-keys", "65536",
    "--payload-memory", str(64 << 20),
)  # fmt: skip

Row = dict[str, Any]
Round = Callable[[Purgatory, int, int], None]


def names(prefix: str, count: int) -> Any:
    return np.char.add(prefix, np.arange(count).astype("U")).astype("S16")


def rows(p: Purgatory, count: int, target: int) -> None:
    keys, watched = names("op:", count).tolist(), names("key:", count).tolist()
    operations = p.watch_many(
        [(k, AllOf({w: target}), 30.0, PAYLOAD) for k, w in zip(keys, watched, strict=True)]
    )
    p.advance_many([(w, target) for w in watched])
    for operation in operations:
        operation.result(30.0)


def columns(p: Purgatory, count: int, target: int) -> None:
    watched, targets = names("key:", count), np.full(count, target)
    operations = p.watch_many({
        "key": names("op:", count), "watch_key": watched, "target": targets,
        "timeout": np.full(count, 30.0), "payload": np.full(count, PAYLOAD),
    })  # fmt: skip
    p.advance_many({"key": watched, "watermark": targets})
    operations.wait(30.0)


def repeated(p: Purgatory, play: Round, size: int, first: int) -> tuple[float, float, int]:
    """Return (operations per second of CPU time, per second, next target) of one repetition."""
    rounds = -(-LEAST // size)
    cpu_s, wall_s = time.process_time(), time.monotonic()
    for target in range(first, first + rounds):
        play(p, size, target)
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    return rounds * size / cpu_s, rounds * size / wall_s, first + rounds


def measure(quick: bool = False) -> list[Row]:
    """Return a row for each form and batch size; the forms take turns."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PURGATORYD_DIR"] = directory
        name = f"bench-api-{os.getpid()}"
        with own_daemon(Path(directory), name, SETTINGS), Purgatory(name) as p:
            target = 1
            for size in SIZES[:1] if quick else SIZES:
                rates: dict[str, list[tuple[float, float]]] = {"rows": [], "columns": []}
                for play in (rows, columns) * (1 if quick else REPETITIONS):
                    of_cpu, of_wall, target = repeated(p, play, size, target)
                    rates[play.__name__].append((of_cpu, of_wall))
                found += [row(form, size, measured) for form, measured in rates.items()]
    return found


def row(form: str, size: int, measured: list[tuple[float, float]]) -> Row:
    of_cpu, of_wall = zip(*measured, strict=True)
    return {
        "form": form, "batch": size, "per_core_s": statistics.median(of_cpu),
        "per_core_s_least": min(of_cpu), "per_core_s_most": max(of_cpu),
        "per_s": statistics.median(of_wall),
    }  # fmt: skip


def line(found: Row) -> str:
    least, most = found["per_core_s_least"], found["per_core_s_most"]
    return (
        f"{found['form']:>8} {found['batch']:>6} a batch: {found['per_core_s']:>10,.0f}/s "
        f"a core of client CPU ({least:,.0f} to {most:,.0f})"
    )
