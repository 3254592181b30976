"""Merge namespaces of several arenas into one, and count the contents of an arena by namespace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Arena, broken

_WORD = 2**64
_SCRATCH = {
    "namespaces": lib.PG_R_NAMESPACES,
    "topics": lib.PG_R_TOPICS,
    "watermarks": lib.PG_R_WATERMARKS,
    "bulk_loads": lib.PG_R_BULK_LOADS,
    "schedules": lib.PG_R_SCHEDULES,
    "cursors": lib.PG_R_CURSORS,
}


@dataclass(frozen=True, slots=True)
class Route:
    """Destination of a namespace: struct pg_route."""

    shards: tuple[int, ...]
    """Shard of each partition."""
    fresh_topics: bool = False
    """True if its topics start again at sequence 1, without the notices that were already sent and
    that all cursors have committed."""


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """Contents of a namespace in one arena, or in several arenas together. The fields are those of
    struct pg_namespace_stats."""

    timers: int = 0
    parked: int = 0
    operations: int = 0
    outcomes: int = 0
    watermarks: int = 0
    notices: int = 0
    bulk_loads: int = 0
    schedules: int = 0
    topics: int = 0
    jobs: int = 0
    digest: int = 0
    settings: int = 0
    streams: int = 0

    def __add__(self, other: NamespaceStats) -> NamespaceStats:
        """Return the sum. The settings are those of `self`, or of `other` if `self` has none."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        total = dict(zip(_FIELDS, ((a + b) % _WORD for a, b in pairs), strict=True))
        return NamespaceStats(**total | {"settings": self.settings or other.settings})

    @property
    def empty(self) -> bool:
        """True if the namespace has only its name and its settings."""
        return not any((self.digest, self.streams, self.topics, self.bulk_loads))


_FIELDS = tuple(field.name for field in fields(NamespaceStats))


def namespace_stats(arena: Arena) -> dict[str, NamespaceStats]:
    """Return the contents of an arena by namespace. The arena must not change during the call.
    Raises ArenaBroken."""
    rows = ffi.new("struct pg_namespace_stats[]", arena.header.regions[lib.PG_R_NAMESPACES].count)
    fault = ffi.new("struct pg_fault *")
    if not lib.pg_namespace_stats(arena.struct, rows, fault):
        raise broken(fault)
    return {
        namespace.name: NamespaceStats(*(int(getattr(rows[row], name)) for name in _FIELDS))
        for row, namespace in arena.namespaces().items()
    }


def merge(to: Arena, sources: Sequence[tuple[Arena, Mapping[str, Route]]]) -> None:
    """Copy contents of several arenas into the new arena `to`. `sources`: each arena with its
    routes.

    A namespace is copied if its route leads to the shard of `to`; without a route it is not copied.
    `to` has to be rebuilt afterwards. Raises ArenaBroken with the name of the table that is too
    small.
    """
    structs, fault = ffi.new("struct pg_source[]", len(sources)), ffi.new("struct pg_fault *")
    retained = [_fill(structs[i], arena, routes) for i, (arena, routes) in enumerate(sources)]
    done = lib.pg_merge(to.struct, structs, len(sources), fault)
    retained.clear()
    if not done:
        raise broken(fault)


def _fill(struct: Any, arena: Arena, routes: Mapping[str, Route]) -> list[Any]:
    """Fill the struct. Return the objects that it points to; the caller must keep them."""
    regions = arena.header.regions
    table = ffi.new("struct pg_route[]", regions[lib.PG_R_NAMESPACES].count)
    retained: list[Any] = [table]
    for row, namespace in arena.namespaces().items():
        if route := routes.get(namespace.name):
            shards = ffi.new("uint32_t[]", route.shards)
            retained.append(shards)
            table[row].shards, table[row].partitions = shards, len(route.shards)
            table[row].fresh_topics = route.fresh_topics
    sizes = {name: regions[region].count for name, region in _SCRATCH.items()}
    for name, size in (sizes | {"sessions": arena.session_rows}).items():
        retained.append(ffi.new("uint32_t[]", size))
        setattr(struct, name, retained[-1])
    struct.arena, struct.routes = arena.struct, table
    return retained
