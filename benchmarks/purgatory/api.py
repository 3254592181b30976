"""Operations through Purgatory and LocalPurgatory, as callers use them.

A round watches a batch of operations, advances all their watch keys, and waits for all outcomes.
The figure is operations per second of CPU time of the client, which contains the core if there is
no daemon.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from own_daemon import own_daemon

from purgatoryd.clients import AllOf, LocalPurgatory, Purgatory

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
AnyPurgatory = Purgatory | LocalPurgatory
Round = Callable[[AnyPurgatory, int, int], None]


@cache
def names(prefix: str, count: int) -> Any:
    """Return keys, which the rounds share: their making is not measured."""
    return np.char.add(prefix, np.arange(count).astype("U")).astype("S16")


@cache
def listed(prefix: str, count: int) -> list[bytes]:
    keys: list[bytes] = names(prefix, count).tolist()
    return keys


def single(p: AnyPurgatory, count: int, target: int) -> None:
    """Make one call for each operation and one for each watch key."""
    for key, watched in zip(listed("op:", count), listed("key:", count), strict=True):
        operation = p.watch(key, AllOf({watched: target}), 30.0, payload=PAYLOAD)
        p.advance(watched, target)
        operation.result(30.0)


def rows(p: AnyPurgatory, count: int, target: int) -> None:
    keys, watched = listed("op:", count), listed("key:", count)
    operations = p.watch_many(
        [(k, AllOf({w: target}), 30.0, PAYLOAD) for k, w in zip(keys, watched, strict=True)]
    )
    p.advance_many([(w, target) for w in watched])
    for operation in operations:
        operation.result(30.0)


def columns(p: AnyPurgatory, count: int, target: int) -> None:
    watched, targets = names("key:", count), np.full(count, target)
    operations = p.watch_many({
        "key": names("op:", count), "watch_key": watched, "target": targets,
        "timeout": np.full(count, 30.0), "payload": np.full(count, PAYLOAD),
    })  # fmt: skip
    p.advance_many({"key": watched, "watermark": targets})
    operations.wait(30.0)


def repeated(p: AnyPurgatory, play: Round, size: int, first: int) -> tuple[float, float, int]:
    """Return (operations per second of CPU time, per second, next target) of one repetition."""
    rounds = -(-(LEAST // 10 if play is single else LEAST) // size)
    cpu_s, wall_s = time.process_time(), time.monotonic()
    for target in range(first, first + rounds):
        play(p, size, target)
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    return rounds * size / cpu_s, rounds * size / wall_s, first + rounds


def measure(quick: bool = False) -> list[Row]:
    """Return a row for each place, form and batch size; the forms take turns."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PURGATORYD_DIR"] = directory
        name = f"bench-api-{os.getpid()}"
        with own_daemon(Path(directory), name, SETTINGS), Purgatory(name) as p:
            found = measured("daemon", p, quick)
    with LocalPurgatory() as local:
        return found + measured("process", local, quick)


def measured(place: str, p: AnyPurgatory, quick: bool) -> list[Row]:
    found, target = [], 1
    forms: tuple[Round, ...] = (rows, columns)
    for size in SIZES[:1] if quick else SIZES:
        some = (single, *forms) if size == SIZES[0] else forms
        rates: dict[str, list[tuple[float, float]]] = {play.__name__: [] for play in some}
        for play in some * (1 if quick else REPETITIONS):
            of_cpu, of_wall, target = repeated(p, play, size, target)
            rates[play.__name__].append((of_cpu, of_wall))
        found += [row(place, form, size, measured) for form, measured in rates.items()]
    return found


def row(place: str, form: str, size: int, measured: list[tuple[float, float]]) -> Row:
    of_cpu, of_wall = zip(*measured, strict=True)
    return {
        "place": place, "form": form, "batch": 1 if form == "single" else size,
        "per_core_s": statistics.median(of_cpu), "per_core_s_least": min(of_cpu),
        "per_core_s_most": max(of_cpu), "per_s": statistics.median(of_wall),
    }  # fmt: skip


def line(found: Row) -> str:
    least, most = found["per_core_s_least"], found["per_core_s_most"]
    return (
        f"{found['place']:>8} {found['form']:>8} {found['batch']:>6} a batch: "
        f"{found['per_core_s']:>10,.0f}/s a core of client CPU ({least:,.0f} to {most:,.0f})"
    )
