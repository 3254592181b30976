"""Opens a daemon's arena: new, as it was left, or with its truth moved to other sizes.

New segments are made under a name of their own and renamed once they are whole, so a
segment under the daemon's name is complete, or it is not ours and is left alone.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from purgatoryd.daemon.clock import boot_ns
from purgatoryd.daemon.config import Config
from purgatoryd.shm_layout import segment
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.arena import Arena, boot_id, page_size
from purgatoryd.shm_layout.errors import ArenaBroken, ArenaMismatch, ArenaTooSmall
from purgatoryd.shm_layout.layout import ArenaState, ClockKind
from purgatoryd.shm_layout.paths import Paths

# Settings that can differ at a restart: what the core calls them, and the setting's name.
_SIZES = {
    "timers armed": "capacity",
    "payload memory in use": "payload_bytes",
    "notices not sent yet": "outbox_capacity",
    "namespaces in use": "namespaces",
    "topics in use": "topics",
    "sessions open": "sessions",
    "watches in use": "watches",
    "watch keys in use": "watch_keys",
}


def open_arena(config: Config, paths: Paths) -> Arena:
    """The arena of daemon `config.name`, rebuilt and ready to be used.

    Raises ArenaTooLarge, ArenaTooSmall, ArenaMismatch for what is not ours or does not
    fit, ArenaBroken for damaged truth. The caller holds the daemon's lock.
    """
    if not segment.exists(paths.arena):
        return _create(config, paths)
    arena = Arena.attach(paths.arena, paths.private)
    _refuse_other_clock(arena, config)
    now_ns = int(arena.header.now_ns) if config.clock == "virtual" else boot_ns()
    arena.rebuild(now_ns)
    return arena if _same_sizes(arena, config) else _resize(arena, config, paths)


def _geometry(config: Config) -> dict[str, int]:
    return {
        "capacity": config.capacity,
        "payload_bytes": config.payload_bytes,
        "outbox_capacity": config.outbox_capacity,
        "outbox_bytes_max": config.outbox_bytes_max,
        "tick_ns": config.tick_ns,
        "fanout": config.fanout,
        "namespaces": config.namespaces,
        "topics": config.topics,
        "sessions": config.sessions,
        "watches": config.watches,
        "levels": config.watch_keys,
        "level_ttl_ns": config.level_ttl_ns,
        "inbox_max": config.inbox,
    }


def core_config(config: Config) -> dict[str, Any]:
    """Fields of struct pg_config for a fresh arena."""
    virtual = config.clock == "virtual"
    now_ns, wall_ns = boot_ns(), time.time_ns()
    return _geometry(config) | {
        "now_ns": 0 if virtual else now_ns,
        "wall_offset_ns": config.wall_origin_ns if virtual else wall_ns - now_ns,
        "wall_origin_ns": config.wall_origin_ns,
        "created_wall_ns": wall_ns,
        "stream_id": secrets.randbits(63) | 1,
        "secret": [secrets.randbits(64), secrets.randbits(64)],
        "uuid": secrets.token_bytes(16),
        "boot_id": boot_id(),
        "page_size": page_size(),
        "clock_kind": ClockKind.VIRTUAL if virtual else ClockKind.BOOT,
        "shard": 0,
        "shards": 1,
    }


def _create_beside(paths: Paths, fields: dict[str, Any]) -> Arena:
    """Segments under the names of a birth; leftovers of one that failed are removed."""
    segment.unlink(f"{paths.arena}.new")
    segment.unlink(f"{paths.private}.new")
    return Arena.create(f"{paths.arena}.new", f"{paths.private}.new", fields)


def _take_place(paths: Paths) -> None:
    """The private segment first: where there is an arena there is its private one."""
    segment.replace(f"{paths.private}.new", paths.private)
    segment.replace(f"{paths.arena}.new", paths.arena)


def _create(config: Config, paths: Paths) -> Arena:
    arena = _create_beside(paths, core_config(config))
    _take_place(paths)
    return arena


def _refuse_other_clock(arena: Arena, config: Config) -> None:
    header, name = arena.header, arena.segment.name
    kind = ClockKind.VIRTUAL if config.clock == "virtual" else ClockKind.BOOT
    if header.clock_kind != kind:
        raise ArenaMismatch(name, "clock", kind.name, ClockKind(header.clock_kind).name)
    if bytes(header.boot_id) != boot_id():
        raise ArenaMismatch(name, "boot id", boot_id().hex(), bytes(header.boot_id).hex())


def _current(arena: Arena) -> dict[str, int]:
    header = arena.header
    return {
        "capacity": header.capacity,
        "payload_bytes": header.payload_bytes,
        "outbox_capacity": header.outbox_capacity,
        "outbox_bytes_max": header.outbox_bytes_max,
        "tick_ns": header.tick_ns,
        "fanout": header.fanout,
        "namespaces": header.regions[lib.PG_R_NAMESPACES].count,
        "topics": header.regions[lib.PG_R_TOPICS].count,
        "sessions": arena.session_rows,
        "watches": header.regions[lib.PG_R_WATCHES].count,
        "levels": header.regions[lib.PG_R_LEVELS].count,
        "level_ttl_ns": arena.purgatory.level_ttl_ns,
        "inbox_max": arena.purgatory.inbox_max,
    }


def _same_sizes(arena: Arena, config: Config) -> bool:
    wanted = _geometry(config)
    page = 4096
    wanted["payload_bytes"] = -(-wanted["payload_bytes"] // page) * page
    return wanted == _current(arena)


def _resize(old: Arena, config: Config, paths: Paths) -> Arena:
    header = old.header
    same = {
        "uuid": bytes(header.uuid),
        "stream_id": header.stream_id,
        "now_ns": header.now_ns,
        "created_wall_ns": header.created_wall_ns,
    }
    new = _create_beside(paths, core_config(config) | same)
    try:
        new.migrate_from(old)
    except ArenaBroken as error:
        segment.unlink(f"{paths.arena}.new")
        segment.unlink(f"{paths.private}.new")
        setting = _SIZES.get(error.what, error.what)
        raise ArenaTooSmall(setting, error.found, error.expected) from error
    _take_place(paths)
    old.set_state(ArenaState.RETIRED)
    old.close()
    return new
