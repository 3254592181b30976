"""The C core next to the timers of event loops, in one process (see bench_core.py)."""

from __future__ import annotations

from functools import cache

import bench_core

from .crowd import Sample

KEYED, WHEEL = "keyed", "wheel"
_build = cache(bench_core.build)


def missing() -> list[str]:
    """Return why libraries are left out."""
    there = bench_core.libraries()
    return [
        f"{name}: no lib{name.removeprefix('lib')}-dev"
        for name in bench_core.LIBRARIES
        if name not in there
    ]


def mix(structure: str, pending: int) -> Sample:
    """Return the time of an operation in the steady state of a purgatory, in ns."""
    _build()
    run = bench_core.drive(structure, "mix", max(pending, bench_core.SMALLEST), 1)
    return {"ns": sum(run["mix"]) / run["operations"]}


def ops(structure: str, pending: int) -> Sample:
    """Return the CPU time that a timer takes to be added, cancelled and fired, in ns."""
    _build()
    run = bench_core.drive(structure, "ops", max(pending, bench_core.SMALLEST), 1)
    return {
        f"{name}_ns": run[measure]
        for name, measure in (("add", "add recycled"), ("cancel", "cancel"), ("expire", "expire"))
    }
