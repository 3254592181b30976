"""Resharding: move the namespaces of a deployment to another number of shards, while no shard runs.

The arenas of the next shard generation are created next to the current arenas, under names of their
own. Writing the routing table is the commit point. If a resharding is interrupted before this
point, the next start removes the unfinished shard generation and begins again. If it is interrupted
later, the next start removes the rest of the old shard generation. So one shard generation is
always complete.

The old shard generation is not changed before the commit point, so the deployment can continue with
it after an error.

A daemon without shards is resharded as the only shard of shard generation 0. It has the same lock
as the deployment, and only its arena is removed.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.main import name_lock
from purgatoryd.daemon.recovery import Step
from purgatoryd.daemon.snapshot import save_snapshot
from purgatoryd.daemon.store import (
    Opening,
    commit_once,
    core_config,
    create_arena,
    owned,
    place,
    remove_arena,
    source,
    too_small,
)
from purgatoryd.daemon.wal import locked
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.arena import Arena, HeaderView
from purgatoryd.shm_layout.errors import (
    ArenaBroken,
    ArenaMissing,
    BadPath,
    InvalidName,
    Unplaceable,
    WalError,
    WalMismatch,
)
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import ArenaState, is_reserved
from purgatoryd.shm_layout.merge import NamespaceStats, Route, merge, namespace_stats
from purgatoryd.shm_layout.paths import SHARDS_MAX, Paths, arena_end, paths_in
from purgatoryd.shm_layout.predecessors import Predecessors, write_predecessors
from purgatoryd.shm_layout.shards import ALONE, Placement, ShardTable
from purgatoryd.shm_layout.status_file import StatusFile
from purgatoryd.shm_layout.wal import Walk, has_header, segments, uuid_of


@dataclass(frozen=True)
class Resharding:
    """Parameters of a resharding. The caller holds the deployment's lock, and no shard runs."""

    config: Config
    """Settings of the deployment. Each shard has the same settings except the name."""
    directory: Path
    """Folder of sockets and locks."""
    write: Callable[[ShardTable], None]
    """Writes the routing table durably. This is the commit point."""
    step: Step = lambda _: None
    """Called at each step."""
    as_restored: bool = False
    """Accept WALs that are copies."""

    def opening(self, table: ShardTable, shard: int) -> Opening:
        """Return the parameters for opening the arena of a shard. Raises InvalidName, BadPath."""
        name = table.daemon(shard)
        config = replace(self.config, name=name, shard=shard, shards=table.count)
        return Opening(config, paths_in(self.directory, name), step=self.step)


def settle(resharding: Resharding, table: ShardTable, count: int) -> ShardTable:
    """Return the table for `count` shards: `table`, or the table of the next shard generation.

    Removes files that an interrupted call left. Raises StartError, ArenaError and WalError if an
    arena cannot be opened, merged or created; the deployment is then unchanged.
    """
    _clear(resharding, table)
    if table.shard_generation != ALONE and table.count == count:
        return table
    new = _reshard(resharding, table, count)
    _clear(resharding, new)
    return new


def _placed(old: ShardTable, new: ShardTable) -> dict[str, Placement]:
    return {
        name: replace(new.place(name, was.partitions), uid=was.uid)
        for name, was in old.placements.items()
    }


def _reshard(resharding: Resharding, old: ShardTable, count: int) -> ShardTable:
    new = ShardTable(old.name, old.version + 1, old.shard_generation + 1, count)
    with contextlib.ExitStack() as held:
        sources = list(_sources(resharding, old, held))
        have = [namespace_stats(arena) if arena else {} for arena in sources]
        if old.shard_generation == ALONE:
            old = replace(old, placements=_born(sources[0]))
        new = replace(new, placements=_placed(old, new))
        routes = [_routes(old, new, shard, found) for shard, found in enumerate(have)]
        _refuse_other_settings(old, have)
        given = [(a, r) for a, r in zip(sources, routes, strict=True) if a is not None]
        predecessors = Predecessors(_records(resharding, old, sources), new.count)
        try:
            made = list(_made(resharding, new, given, predecessors))
            _verify(old, have, routes, made)
        except BaseException:
            _clear_shard_generation(resharding, new, wals=True)
            raise
        resharding.step("writing the routing table")
        resharding.write(new)
        for arena in sources:
            if arena is not None:
                # Readers must not take the unsent notices, which the new arenas have.
                arena.set_state(ArenaState.RETIRED)
        return new


def _born(arena: Arena | None) -> dict[str, Placement]:
    """Return the placements for the namespaces of a daemon without shards, which has no routing
    table."""
    found = arena.namespaces_of_users() if arena is not None else ()
    return {n.name: Placement(n.name, (0,), n.created_uid) for n in found}


# ---- the current shard generation ------------------------------------------------------------


def _sources(
    resharding: Resharding, old: ShardTable, held: contextlib.ExitStack
) -> Iterator[Arena | None]:
    """Yield the arenas of all shards, locked and rebuilt; None for a shard that has no arena."""
    for shard in range(old.count):
        opening = resharding.opening(old, shard)
        if old.shard_generation != ALONE:
            held.enter_context(name_lock(opening.paths))
        held.enter_context(locked(opening.wal, as_restored=resharding.as_restored))
        opening = held.enter_context(owned(opening))
        resharding.step(f"opening {opening.config.name}")
        yield held.enter_context(source(opening))


def _records(
    resharding: Resharding, old: ShardTable, sources: Sequence[Arena | None]
) -> dict[str, int]:
    """Return the LSN of the last record that each arena contains, by the uuid of the arena's WAL.
    Arenas without a WAL are left out."""
    upto = {}
    for shard, arena in enumerate(sources):
        wal = resharding.opening(old, shard).wal
        files = segments(wal) if wal and arena else []
        if arena is not None and files and has_header(files[-1].path):
            upto[uuid_of(files[-1].path).hex()] = int(arena.wal_buffer.next_lsn) - 1
    return upto


def _routes(
    old: ShardTable, new: ShardTable, shard: int, found: Mapping[str, NamespaceStats]
) -> dict[str, Route]:
    """Return the route of each namespace of a shard. Raises Unplaceable."""
    return {
        name: route
        for name, detail in found.items()
        if (route := _route(old, new, shard, name, detail)) is not None
    }


def _route(
    old: ShardTable, new: ShardTable, shard: int, name: str, found: NamespaceStats
) -> Route | None:
    """Return the route of a namespace; None if the namespace belongs to another shard and is empty
    in this shard.

    Reserved namespaces are not in the routing table. Their notices in shard N move to shard
    N modulo the new number of shards.
    """
    if is_reserved(name):
        return Route((shard % new.count,), fresh_topics=True)
    was = old.placements.get(name)
    if was is None or shard not in was.shards:
        if found.empty:
            return None
        raise Unplaceable(name, f"is in shard {shard}, but the routing table places it elsewhere")
    if found.parked:
        where = f"the WAL of {old.daemon(shard)}"
        raise Unplaceable(name, f"has parked timers: their payloads are in {where}")
    if was.partitions > 1 and (found.operations or found.outcomes or found.watermarks):
        raise Unplaceable(name, "has operations or watch keys, and is partitioned")
    return Route(new.placements[name].shards, fresh_topics=was.partitions > 1)


def _refuse_other_settings(old: ShardTable, have: Sequence[Mapping[str, NamespaceStats]]) -> None:
    """Raise Unplaceable if parts of a namespace have different settings, because these parts may be
    merged."""
    for name, was in old.placements.items():
        shards = [shard for shard in sorted({*was.shards}) if name in have[shard]]
        for shard in shards[1:]:
            if have[shard][name].settings != have[shards[0]][name].settings:
                why = f"has other settings in shard {shard} than in shard {shards[0]}"
                raise Unplaceable(name, why)


# ---- the next shard generation ---------------------------------------------------------------


def _made(
    resharding: Resharding,
    new: ShardTable,
    sources: Sequence[tuple[Arena, Mapping[str, Route]]],
    predecessors: Predecessors,
) -> Iterator[dict[str, NamespaceStats]]:
    """Create the arenas of the next shard generation one after another. Yield the namespace
    statistics of each arena."""
    arenas = [arena for arena, _ in sources]
    same = _identity(resharding.config, arenas)
    for shard in range(new.count):
        opening = resharding.opening(new, shard)
        resharding.step(f"making {opening.config.name}")
        with (
            locked(opening.wal),
            owned(opening) as opening,
            contextlib.closing(
                create_arena(opening.paths, core_config(opening.config) | same, opening.host)
            ) as to,
        ):
            try:
                merge(to, sources)
            except ArenaBroken as error:
                raise too_small(error, f" of shard {shard}") from error
            yield _finished(to, opening, predecessors)


def _identity(config: Config, sources: Sequence[Arena]) -> dict[str, Any]:
    """Return the fields of struct pg_config that all arenas of a shard generation share. If all
    sources have the same stream id, it is kept, so that subscribers continue their stream."""
    headers = [arena.header for arena in sources]
    streams = {int(header.stream_id) for header in headers}
    same = {"stream_id": streams.pop() if len(streams) == 1 else HOST.random_bits(63) | 1}
    if config.clock == "virtual" and headers:
        retained = ("wall_origin_ns", "wall_offset_ns")
        same |= {name: int(getattr(headers[0], name)) for name in retained}
        same["now_ns"] = max(int(header.now_ns) for header in headers)
    return same


def _finished(
    arena: Arena, opening: Opening, predecessors: Predecessors
) -> dict[str, NamespaceStats]:
    """Rebuild and check a merged arena, begin its WAL, and give its files their names. Return the
    namespace statistics of the arena."""
    virtual = opening.config.clock == "virtual"
    arena.rebuild(int(arena.header.now_ns) if virtual else HOST.boot_ns())
    arena.check()
    if opening.wal is not None:
        write_predecessors(opening.wal, predecessors)
        save_snapshot(arena, opening.wal, opening.host, opening.step)
        commit_once(arena, opening, Walk.before(arena))
    arena.set_state(ArenaState.READY)
    place(arena, opening)
    return namespace_stats(arena)


def _verify(
    old: ShardTable,
    have: Sequence[Mapping[str, NamespaceStats]],
    routes: Sequence[Mapping[str, Route]],
    made: Sequence[Mapping[str, NamespaceStats]],
) -> None:
    """Check that the new arenas contain the state of the old arenas exactly once. Raises
    ArenaBroken."""
    before = _total(
        {n: c for n, c in found.items() if n in r} for found, r in zip(have, routes, strict=True)
    )
    after = _total(made)
    fresh = {name for r in routes for name, route in r.items() if route.fresh_topics}
    for name in before:
        was, now = (
            _comparable(one.get(name, NamespaceStats()), fresh_topics=name in fresh)
            for one in (before, after)
        )
        if was != now:
            detail = f"namespace {name!r} differs after the merge"
            raise ArenaBroken("reshard", detail, 0, was.digest, now.digest)


def _total(parts: Iterable[Mapping[str, NamespaceStats]]) -> dict[str, NamespaceStats]:
    total: dict[str, NamespaceStats] = {}
    for part in parts:
        for name, found in part.items():
            total[name] = total.get(name, NamespaceStats()) + found
    return total


def _comparable(found: NamespaceStats, *, fresh_topics: bool) -> NamespaceStats:
    """Return the statistics that a resharding must not change. In a partitioned namespace the
    number of topics and the number of bulk loads change, because each part has its own."""
    return replace(found, topics=0, streams=0, bulk_loads=0) if fresh_topics else found


# ---- removal ------------------------------------------------------------------------------------


def _clear(resharding: Resharding, table: ShardTable) -> None:
    """Remove the previous and the next shard generation. The WALs of the previous shard generation
    stay, because they may not have been shipped yet."""
    _refuse_later(resharding, table)
    if table.shard_generation == ALONE + 1:
        _clear_alone(resharding, table)
    elif table.shard_generation != ALONE:
        _clear_shard_generation(
            resharding, replace(table, shard_generation=table.shard_generation - 1), wals=False
        )
    _clear_shard_generation(
        resharding, replace(table, shard_generation=table.shard_generation + 1), wals=True
    )


def _clear_alone(resharding: Resharding, table: ShardTable) -> None:
    """Remove the arena of the daemon that was resharded into these shards. Raises BadPath if the
    arena belongs to another daemon."""
    paths = paths_in(resharding.directory, table.name)
    with owned(Opening(resharding.config, paths)):
        _clear_arena_alone(resharding, table, paths)


def _clear_arena_alone(resharding: Resharding, table: ShardTable, paths: Paths) -> None:
    if shm.ours(paths.arena):
        if _stream(paths.arena) not in {
            _stream(one.paths.arena) for one in _left(resharding, table)
        }:
            reason = (
                f"holds timers of a daemon {table.name!r} without shards. The shards do not have "
                "these timers: start the shards under another name, or remove this file"
            )
            raise BadPath(str(shm.MOUNT / paths.arena[1:]), reason)
        resharding.step(f"removing {table.name}")
    remove_arena(paths)


def _stream(arena: str) -> int | None:
    """Return the stream id of an arena, which its successors may continue; None if there is no
    arena."""
    with contextlib.suppress(ArenaMissing), contextlib.closing(HeaderView(arena)) as view:
        return view.stream_id
    return None


def _left(resharding: Resharding, table: ShardTable) -> Iterator[Opening]:
    """Yield the parameters for opening each shard of the table's shard generation that left
    files."""
    begin = f"{table.name}-{table.shard_generation}-"
    places = [
        (resharding.directory, begin, ""),
        (shm.MOUNT, shm.PREFIX + begin, arena_end(resharding.directory)),
    ]
    if resharding.config.wal_dir:
        places.append((Path(resharding.config.wal_dir), begin, ""))
    numbers = {number for place in places for number in _numbers(*place)}
    for shard in sorted(numbers.intersection(range(SHARDS_MAX))):
        with contextlib.suppress(InvalidName, BadPath):
            yield resharding.opening(replace(table, count=SHARDS_MAX), shard)


def _numbers(folder: Path, begin: str, end: str) -> Iterator[int]:
    """Yield the shard numbers in file names that consist of `begin`, a number, `end`, and possibly
    a dot with further characters."""
    name = re.compile(rf"{re.escape(begin)}([0-9]+){re.escape(end)}(?:\..*)?")
    found = (name.fullmatch(path.name) for path in folder.glob("*"))
    return (int(one[1]) for one in found if one)


def _refuse_later(resharding: Resharding, table: ShardTable) -> None:
    """Raise WalMismatch if daemons have used the next shard generation. In that case `table` is
    outdated, because daemons never run on an unfinished shard generation."""
    for opening in _left(resharding, replace(table, shard_generation=table.shard_generation + 1)):
        if opening.wal is not None and _used(opening.wal):
            shard_generation = table.shard_generation
            raise WalMismatch(
                str(opening.wal), "shard generation", shard_generation, shard_generation + 1
            )


def _used(wal: Path) -> bool:
    """True if a daemon has written a record to this WAL."""
    found = segments(wal)
    if len(found) != 1:
        return bool(found)
    walk = Walk()
    try:
        walk.enter(found[0].path)
        return any(True for _ in walk.groups())
    except WalError:
        return True


def _clear_shard_generation(resharding: Resharding, table: ShardTable, *, wals: bool) -> None:
    for opening in _left(resharding, table):
        with name_lock(opening.paths), owned(opening) as opening:
            _clear_daemon(resharding, opening, wals)


def _clear_daemon(resharding: Resharding, opening: Opening, wals: bool) -> None:
    """Remove the files of a shard. The caller holds the locks."""
    if shm.exists(opening.paths.arena):
        resharding.step(f"removing {opening.config.name}")
    remove_arena(opening.paths)
    if wals and opening.wal is not None and opening.wal.exists():
        resharding.step(f"removing the WAL of {opening.config.name}")
        shutil.rmtree(opening.wal)
    _clear_files(opening.paths)


def _clear_files(paths: Paths) -> None:
    """Remove sockets, lock file and status file: no daemon will have this name again."""
    for path in (paths.cmd, paths.pub, paths.admin, paths.ring, paths.lock):
        path.unlink(missing_ok=True)
    StatusFile(paths.directory, paths.name).remove()
