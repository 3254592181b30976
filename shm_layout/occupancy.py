"""The occupancy of an arena: timers in each cell of its wheel, and rows used in its tables.

The results contain no keys and no payloads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.arena import Handle

CELLS = 64
"""Largest number of cells of a level. A cell counts the timers of one or several neighbouring
buckets."""
SHOWN = 4
"""Number of the finest levels that are reported even if they are empty."""


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the wheel: a ring of buckets, starting with the bucket of the current time."""

    number: int
    bucket_ns: int
    """Time that one bucket spans."""
    cell_ns: int
    """Time that one cell spans."""
    counts: tuple[int, ...]
    """Number of timers in each cell; the cells are in the order of their deadlines."""

    @property
    def timers(self) -> int:
        """Number of timers on the level."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Fill:
    """Usage of a table or memory: `used` of `capacity`. Both are numbers of `unit`; "" = rows.

    `recycles`: new entries replace the oldest entries, so a full table is normal.
    """

    name: str
    used: int
    capacity: int
    unit: str = ""
    recycles: bool = False

    @property
    def share(self) -> float:
        """The used share of the capacity, from 0 to 1; 0 if the capacity is 0."""
        return self.used / self.capacity if self.capacity else 0.0


def levels(arena: Handle) -> list[Level]:
    """Return the SHOWN finest levels of the wheel, and all other levels that have timers.

    The daemon may move timers at the same time: a moving timer is counted once, twice or not at
    all.
    """
    wheel = arena.rows(lib.PG_R_WHEEL, "pg_wheel")[0]
    counts = _words(arena, lib.PG_R_BUCKETS)[1::2]  # struct pg_bucket has 2 words: tail, count
    return [
        _level(wheel, number, counts)
        for number in range(wheel.level_count)
        if number < SHOWN or wheel.occupied >> number & 1
    ]


def due(arena: Handle) -> int:
    """Return the number of due timers that have not fired yet."""
    wheel = arena.rows(lib.PG_R_WHEEL, "pg_wheel")[0]
    buckets = arena.rows(lib.PG_R_BUCKETS, "pg_bucket")
    return sum(int(buckets[wheel.due + n].count) for n in range(lib.PG_DUE_BUCKETS))


def _level(wheel: Any, number: int, counts: memoryview) -> Level:
    level = wheel.levels[number]
    ring, first, here = int(wheel.ring), int(level.first), int(level.here) % int(wheel.ring)
    in_order = [*counts[first + here : first + ring], *counts[first : first + here]]
    together = -(-ring // CELLS)
    bucket_ns = int(level.width) * int(wheel.tick_ns)
    cells = (sum(in_order[at : at + together]) for at in range(0, ring, together))
    return Level(number, bucket_ns, bucket_ns * together, tuple(cells))


def tables(arena: Handle) -> list[Fill]:
    """Return the occupancy of the tables of names, schedules and bulk loads."""
    return [
        *_names(arena),
        Fill("jobs", int(arena.metrics.jobs), _count(arena, lib.PG_R_JOBS)),
        Fill("schedules", int(arena.metrics.schedules), _count(arena, lib.PG_R_SCHEDULES)),
        Fill("bulk loads", int(arena.metrics.bulk_loads), _count(arena, lib.PG_R_BULK_LOADS)),
        Fill(
            "bulk load blocks",
            int(arena.metrics.bulk_load_blocks),
            _count(arena, lib.PG_R_BULK_LOAD_BLOCKS),
        ),
        Fill("cursor rows", int(arena.metrics.cursor_rows), _count(arena, lib.PG_R_CURSORS)),
    ]


def _names(arena: Handle) -> list[Fill]:
    """Return the occupancy of the name tables. The daemon's own names are not counted."""
    namespaces, topics = arena.name_fills()
    return [Fill("namespaces", *namespaces), Fill("topics", *topics)]


def _count(arena: Handle, region: int) -> int:
    return int(arena.header.regions[region].count)


def _words(arena: Handle, region: int) -> memoryview:
    """Return a view of a region in the mapped arena, as 32-bit words."""
    where = arena.header.regions[region]
    span = memoryview(arena.file.memory)[where.offset :][: where.stride * where.count]
    return span.cast("I")
