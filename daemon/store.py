"""Opens a daemon's arena: new, as it was left, or with its truth moved to other sizes.

New segments are made under names of their own, NAME.new. The arena's second name, NAME.next,
says that both are whole and take the place of what is there. A start completes what a killed
daemon began, or undoes it. So a segment under the daemon's name is complete, and of one birth
with its private one, or it is not ours and is left alone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from purgatoryd.daemon.clock import boot_ns
from purgatoryd.daemon.config import Config
from purgatoryd.shm_layout import segment
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.arena import Arena, Previous, boot_id, page_size, retire
from purgatoryd.shm_layout.errors import ArenaBroken, ArenaMismatch, ArenaTooSmall
from purgatoryd.shm_layout.layout import REGION_ALIGN, ClockKind
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
    "accounts in use": "accounts",
}


def open_arena(config: Config, paths: Paths) -> Arena:
    """The arena of daemon `config.name`, rebuilt and ready to be used.

    Raises ArenaTooLarge, ArenaTooSmall, ArenaMismatch for what is not ours or does not
    fit, ArenaBroken for damaged truth; what was there is as it was then. The caller holds
    the daemon's lock.
    """
    _take_place(paths)
    _remove_new(paths)
    if not segment.exists(paths.arena):
        return _create(config, paths)
    old = Previous.attach(paths.arena, paths.private)
    arena = _convert(old, config, paths) if old else _attach(config, paths)
    return arena if _same_sizes(arena, config) else _resize(arena, config, paths)


def _attach(config: Config, paths: Paths) -> Arena:
    arena = Arena.attach(paths.arena, paths.private)
    _refuse_other_clock(arena, config)
    arena.rebuild(_now_ns(arena, config))
    return arena


def _now_ns(arena: Arena | Previous, config: Config) -> int:
    return int(arena.header.now_ns) if config.clock == "virtual" else boot_ns()


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
        "accounts": config.accounts,
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


@contextmanager
def _in_place(paths: Paths, fields: dict[str, Any]) -> Iterator[Arena]:
    """A fresh arena; it takes the place of what is there if all goes well inside, else goes."""
    new_names = f"{paths.arena}.new", f"{paths.private}.new"
    for name in (*new_names, f"{paths.arena}.next"):
        segment.refuse_foreign(name)
    new = Arena.create(*new_names, fields)
    try:
        yield new
        segment.replace(f"{paths.arena}.new", f"{paths.arena}.next")
    except BaseException:
        _remove_new(paths)
        raise
    _take_place(paths)


def _remove_new(paths: Paths) -> None:
    for name in (f"{paths.arena}.new", f"{paths.private}.new"):
        if segment.ours(name):
            segment.unlink(name)


def _take_place(paths: Paths) -> None:
    """Completes a birth that got as far as the name NAME.next, from wherever it stopped."""
    if not segment.ours(f"{paths.arena}.next"):
        return
    if segment.ours(paths.arena):
        retire(paths.arena)
    if segment.ours(f"{paths.private}.new"):
        segment.replace(f"{paths.private}.new", paths.private)
    segment.replace(f"{paths.arena}.next", paths.arena)


def _create(config: Config, paths: Paths) -> Arena:
    with _in_place(paths, core_config(config)) as arena:
        return arena


def _refuse_other_clock(arena: Arena | Previous, config: Config) -> None:
    header, name = arena.header, arena.segment.name
    kind = ClockKind.VIRTUAL if config.clock == "virtual" else ClockKind.BOOT
    if header.clock_kind != kind:
        raise ArenaMismatch(name, "clock", kind.name, ClockKind(header.clock_kind).name)
    if bytes(header.boot_id) != boot_id():
        raise ArenaMismatch(name, "boot id", boot_id().hex(), bytes(header.boot_id).hex())
    if kind == ClockKind.BOOT and (now_ns := boot_ns()) < header.now_ns:
        raise ArenaMismatch(name, "boot clock", f"at least {header.now_ns} ns", f"{now_ns} ns")


def _current(arena: Arena | Previous) -> dict[str, int]:
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
        "accounts": header.regions[lib.PG_R_ACCOUNTS].count,
    }


def _same_sizes(arena: Arena, config: Config) -> bool:
    wanted = _geometry(config)
    wanted["payload_bytes"] = -(-wanted["payload_bytes"] // REGION_ALIGN) * REGION_ALIGN
    return wanted == _current(arena)


def _identity(old: Arena | Previous) -> dict[str, Any]:
    """Fields of struct pg_config by which nobody can tell a new arena from the old one."""
    header = old.header
    return {
        "uuid": bytes(header.uuid),
        "stream_id": header.stream_id,
        "now_ns": header.now_ns,
        "created_wall_ns": header.created_wall_ns,
    }


def _resize(old: Arena, config: Config, paths: Paths) -> Arena:
    with _in_place(paths, core_config(config) | _identity(old)) as new:
        try:
            new.migrate_from(old)
        except ArenaBroken as error:
            setting = _SIZES.get(error.what, error.what)
            raise ArenaTooSmall(setting, error.found, error.expected) from error
    old.close()
    return new


def _convert(old: Previous, config: Config, paths: Paths) -> Arena:
    """The truth of an arena of an earlier ABI in a new one, whose sizes are the old ones.

    What an earlier ABI had no room for has size 0 there, and gets that of the settings.
    """
    _refuse_other_clock(old, config)
    sizes = {name: size for name, size in _current(old).items() if size}
    with _in_place(paths, core_config(config) | sizes | _identity(old)) as new:
        new.convert_from(old)
        new.rebuild(_now_ns(old, config))
    old.close()
    return new
