"""Open a daemon's arena: create an arena, attach to the existing arena, recover it from a WAL, or
move its authoritative state to other sizes.

`replacement.py` gives new arena files the names of the old arena files. If there is a WAL, a
snapshot of the new arena is written before that. An arena that replaces another arena, or is
recovered, gets a new uuid: its slots, rows or clock differ, so the WAL records of the two arenas
must not be mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from purgatoryd.daemon.clock import ROUNDING_NS
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.recovery import Step, Way, import_file, recover
from purgatoryd.daemon.replacement import NEW, NEXT, Replacement
from purgatoryd.daemon.snapshot import save_snapshot
from purgatoryd.daemon.wal import (
    Wal,
    has_begun,
    newest_end,
    refuse_other_wal,
    set_aside,
    wal_directory,
    warn_of_other_directory,
)
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.arena import Arena, Handle, Previous, page_size, retire
from purgatoryd.shm_layout.errors import (
    ArenaBroken,
    ArenaInUse,
    ArenaMismatch,
    ArenaTooSmall,
    BadPath,
    PurgatorydError,
    WalError,
    WalMismatch,
    WalNeeded,
)
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import (
    BULK_LOAD_BLOCK_ROWS,
    REGION_ALIGN,
    ArenaState,
    ClockKind,
    DaemonState,
    Degraded,
)
from purgatoryd.shm_layout.paths import Paths
from purgatoryd.shm_layout.shm import ArenaLock, Moved
from purgatoryd.shm_layout.wal import GroupCommit, Walk, is_other_version, segments

# Sizes that may change at a restart. Key: the text with which the core names a full table. Value:
# the setting.
_SIZES = {
    "timers armed": "capacity",
    "payload memory in use": "payload_bytes",
    "notices not sent yet": "replay_capacity",
    "namespaces in use": "namespaces",
    "topics in use": "topics",
    "sessions open": "sessions",
    "answers remembered": "sessions",
    "watches in use": "watches",
    "watch keys in use": "watch_keys",
    "accounts in use": "accounts",
    "consumer groups in use": "groups",
    "topics of consumer groups": "groups",
    "jobs in use": "jobs",
    "budgets of consumer groups": "jobs",
    "bulk loads in use": "bulk_loads",
    "rows of bulk loads in use": "bulk_load_rows",
    "schedules in use": "schedules",
    "rows of cursors in use": "cursors",
}


_OWN = ("namespaces", "topics")
OWN_ROWS = 1
"""Number of rows that each of these tables has in addition to the setting, for the daemon's own
notices."""

# Sizes that may be larger in a new arena than in the arena whose records are redone in it.
_SPACE = (
    "capacity", "payload_bytes", "replay_capacity", "replay_bytes_max", "namespaces", "topics",
    "watches", "watermarks", "accounts", "bulk_loads", "bulk_load_blocks", "groups", "jobs",
    "schedules", "cursors",
)  # fmt: skip


@dataclass(frozen=True)
class Opening:
    """Parameters for opening a daemon's arena. The caller holds the locks of name, WAL and
    arena."""

    config: Config
    paths: Paths
    import_path: Path | None = None
    """An export file from which the arena is made."""
    force: bool = False
    """Recover a damaged WAL up to the damage."""
    as_restored: bool = False
    """Accept a WAL that is a copy; opening the arena makes it an original."""
    step: Step = lambda _: None
    """Called at each step."""
    host: Host = HOST
    """Clocks, disk and random numbers of the daemon."""
    begin_wal: Callable[..., Wal] = Wal
    """Opens the WAL; takes the arguments of Wal."""
    held: ArenaLock | None = None
    """The arena's lock, from `owned`."""

    @property
    def lock(self) -> ArenaLock:
        """The arena's lock. Without the lock, no arena is opened or replaced."""
        assert self.held is not None
        return self.held

    @property
    def replacement(self) -> Replacement:
        """The daemon's arena files, which new files can replace."""
        return Replacement(self.paths, self.lock)

    @property
    def wal(self) -> Path | None:
        """The folder of the WAL; None = no WAL."""
        return wal_directory(self.config)


@contextmanager
def owned(opening: Opening) -> Iterator[Opening]:
    """Hold the lock of the daemon's arena, which does not depend on the run directory.

    Raises AlreadyRunning, and BadPath if the name of an arena file is used by something else.
    """
    paths = opening.paths
    for suffix in ("", NEW, NEXT):
        for name in (f"{paths.arena}{suffix}", f"{paths.private}{suffix}"):
            shm.refuse_other_kind(name)
    names = [name for name in (paths.private, f"{paths.private}{NEW}") if shm.ours(name)]
    with closing(ArenaLock(paths.name, names)) as lock:
        yield replace(opening, held=lock)


def open_arena(opening: Opening) -> Arena:
    """Return the arena of a daemon. It is rebuilt and ready to be used.

    Raises ArenaTooLarge, ArenaTooSmall, ArenaMismatch for a foreign arena or an arena of another
    clock, boot or shard, ArenaBroken for damaged authoritative state, ArenaInUse, and WalError.
    After an error the files are unchanged.
    """
    paths = opening.paths
    opening.replacement.recover()
    if opening.import_path is not None:
        return _import(opening, opening.import_path)
    if shm.exists(paths.arena) and not _is_torn(opening):
        return _open_left(opening)
    if opening.wal is not None and has_begun(opening.wal, opening.host.disk):
        return _recover(opening, opening.wal)
    with _in_place(opening, core_config(opening.config, opening.host)) as arena:
        return arena


@contextmanager
def source(opening: Opening) -> Iterator[Arena | None]:
    """Yield the rebuilt arena of a daemon that does not run, with the sizes that it has; None if
    the daemon has no arena. A WAL is recovered into an arena without a name, which is removed
    afterwards.

    Raises the errors of open_arena().
    """
    opening.replacement.recover()
    with ExitStack() as held:
        arena = _source(opening)
        if arena is not None:
            held.callback(arena.close)
            now_ns = opening.host.boot_ns()
            held.callback(arena.set_daemon_state, DaemonState.STOPPED, Degraded(0), now_ns)
            held.callback(_offer, arena)
        yield arena


def _offer(arena: Arena) -> None:
    """Let readers use an arena again, unless it was retired."""
    if arena.header.state != ArenaState.RETIRED:
        arena.set_state(ArenaState.READY)


def left_any(opening: Opening) -> bool:
    """True if a daemon left an arena, or a WAL from which an arena can be recovered."""
    names = opening.paths.arena, f"{opening.paths.arena}{NEXT}"
    wal = opening.wal
    return any(map(shm.exists, names)) or (wal is not None and has_begun(wal, opening.host.disk))


def _source(opening: Opening) -> Arena | None:
    if shm.exists(opening.paths.arena) and not _is_torn(opening):
        return _as_left(opening)
    if opening.wal is not None and has_begun(opening.wal, opening.host.disk):
        return recover(opening.wal, _way(opening))
    return None


def _is_torn(opening: Opening) -> bool:
    """True if the private arena file was removed, the daemon ended without replacing it, and the
    arena can be recovered from a WAL. Raises BadPath if the file is missing and there is no WAL."""
    paths, wal = opening.paths, opening.wal
    if shm.exists(paths.private):
        return False
    if wal is not None and has_begun(wal, opening.host.disk):
        return True
    arena = shm.MOUNT / paths.arena[1:]
    reason = f"is missing, and {arena} cannot be used without it: remove {arena} to start empty"
    raise BadPath(str(shm.MOUNT / paths.private[1:]), reason)


def remove_arena(paths: Paths) -> None:
    """Remove all arena files of a daemon and notify readers. The caller holds the lock."""
    if shm.ours(paths.arena):
        retire(paths.arena)
    if shm.ours(f"{paths.arena}{NEXT}"):
        shm.unlink(f"{paths.arena}{NEXT}")
    for suffix in ("", NEW):
        _remove(paths, suffix)


# ---- as it was left --------------------------------------------------------------------------


def _as_left(opening: Opening) -> Arena:
    old = Previous.attach(opening.paths.arena, opening.paths.private)
    return _convert(old, opening) if old else _attach(opening)


def _open_left(opening: Opening) -> Arena:
    arena = _as_left(opening)
    if _same_sizes(arena, opening.config):
        return arena
    try:
        _commit_appended(arena, opening)
        return _resize(arena, opening)
    except PurgatorydError:
        arena.set_daemon_state(DaemonState.STOPPED, Degraded(0), opening.host.boot_ns())
        arena.clear_pid()
        raise


def _commit_appended(arena: Arena | Previous, opening: Opening) -> None:
    """Write the WAL buffer to disk, because the new arena gets only a snapshot of this arena."""
    if opening.wal is not None and arena.wal_buffer is not None:
        commit_once(arena, opening, wal_end(arena, opening))


def commit_once(arena: Arena | Previous, opening: Opening, end: Walk) -> None:
    """Write the records of the WAL buffer to the WAL, which continues at `end`. This starts no
    thread."""
    assert opening.wal is not None
    GroupCommit(
        arena, opening.wal, opening.config.wal_segment_bytes, end, opening.host.disk,
        threaded=False,
    ).close()  # fmt: skip


def _attach(opening: Opening) -> Arena:
    arena = Arena.attach(opening.paths.arena, opening.paths.private)
    _refuse_other_clock(arena, opening)
    _refuse_other_shard(arena, opening)
    _refuse_other_wal(arena, opening)
    opening.step("rebuilding")
    host = opening.host
    arena.set_state(ArenaState.REBUILDING, host.pid)
    arena.set_daemon_state(DaemonState.RECOVERING, Degraded(0), host.boot_ns())
    arena.rebuild(_now_ns(arena, opening))
    return arena


def _refuse_other_wal(arena: Arena | Previous, opening: Opening) -> None:
    wal = opening.wal
    if wal is None:
        if arena.wal_buffer is not None:
            raise WalNeeded(str(shm.MOUNT / arena.file.name[1:]))
    elif arena.wal_buffer is None:
        if segments(wal, opening.host.disk):
            raise WalMismatch(str(wal), "wal", "empty", "used by another arena")
    elif not opening.force:
        refuse_other_wal(wal, arena.uuid, opening.host.disk)


def wal_end(arena: Arena | Previous, opening: Opening) -> Walk:
    """Return the end of the arena's WAL, where the WAL continues. Raises WalDamaged, WalMismatch.

    With `force` a damaged WAL is set aside, and a new WAL begins with a snapshot of the arena.
    """
    assert opening.wal is not None
    try:
        refuse_other_wal(opening.wal, arena.uuid, opening.host.disk)
        end = newest_end(opening.wal, arena, opening.host.disk)
        warn_of_other_directory(opening.wal, arena, opening.host.disk)
        return end
    except WalError as error:
        if not opening.force or is_other_version(error):
            raise
        set_aside(opening.wal, opening.host.disk)
        if isinstance(arena, Arena):  # otherwise the snapshot is written from the new arena
            _save_snapshot(arena, opening)
        return Walk.before(arena)


# ---- from files ------------------------------------------------------------------------------


def _recover(opening: Opening, wal: Path) -> Arena:
    arena = _place_redone(recover(wal, _way(opening)), opening)
    if opening.force:
        set_aside(wal, opening.host.disk)
    return arena


def _import(opening: Opening, path: Path) -> Arena:
    if shm.exists(opening.paths.arena):
        _refuse_used(opening.paths)
    if opening.wal is not None and segments(opening.wal, opening.host.disk):
        raise WalMismatch(str(opening.wal), "wal", "empty", "not empty")
    arena = import_file(path, _way(opening))
    _refuse_durable(arena, opening)
    return _place_redone(arena, opening)


def _way(opening: Opening) -> Way:
    return Way(
        lambda sizes: _make_redone(opening, sizes), partial(_clock_of, opening.host), opening.step,
        opening.host, opening.force,
    )  # fmt: skip


def _save_snapshot(arena: Handle, opening: Opening) -> None:
    if opening.wal is not None:
        save_snapshot(arena, opening.wal, opening.host, opening.step)


def _refuse_used(paths: Paths) -> None:
    """Raise ArenaInUse if the arena holds timers, operations or unsent notices. The check only
    reads the arena, so changes that a kill left unfinished count as finished."""
    arena = Arena.attach(paths.arena, paths.private)
    timers, operations = arena.in_use()
    unsent = int(arena.header.replay_tail - arena.header.published)
    arena.close()
    if timers or operations or unsent:
        raise ArenaInUse(paths.arena, timers, operations, unsent)


def _refuse_durable(arena: Arena, opening: Opening) -> None:
    """Raise WalNeeded if the arena has a durable namespace and there is no WAL."""
    durable = [n.name for n in arena.namespaces().values() if n.settings.durability]
    if durable and opening.wal is None:
        arena.close()
        raise WalNeeded(opening.paths.arena, durable[0])


def _make_redone(opening: Opening, sizes: Mapping[str, Any]) -> Arena:
    """Create an arena for redo. No table may be smaller than before, because records refer to slots
    and rows."""
    fields = core_config(opening.config, opening.host)
    found, wanted = ClockKind(sizes["clock_kind"]), ClockKind(fields["clock_kind"])
    if found != wanted:
        raise ArenaMismatch(opening.paths.arena, "clock", wanted.name, found.name)
    opening.step("making an arena")
    space = {name: max(fields[name], sizes[name]) for name in _SPACE}
    retained = {name: sizes[name] for name in ("now_ns", "wall_origin_ns", "created_wall_ns")}
    return create_arena(opening.paths, fields | space | retained, opening.host)


def _clock_of(host: Host, walk: Walk) -> tuple[int, int, int]:
    """Return (now_ns, shift_ns, wall_offset_ns). After a reboot, all times are shifted from the old
    boot clock to the new one, by means of the wall clock. No deadline becomes earlier.

    The wall offset in the WAL may be ROUNDING_NS too low. The boot clock is read after the wall
    clock, so that a pause between the two readings makes the new offset too low, and deadlines
    late instead of early.
    """
    then = walk.struct
    then_offset_ns = int(then.wall_ns - then.boot_ns)
    if then.header.clock_kind == ClockKind.VIRTUAL:
        return int(then.boot_ns), 0, then_offset_ns
    wall_ns = host.wall_ns()
    now_ns = host.boot_ns()
    offset_ns = wall_ns - now_ns
    if walk.boot_id == host.boot_id():
        return now_ns, 0, offset_ns
    return now_ns, then_offset_ns + ROUNDING_NS - offset_ns, offset_ns


def _place_redone(arena: Arena, opening: Opening) -> Arena:
    if not _same_sizes(arena, opening.config):
        return _resize(arena, opening)
    _save_snapshot(arena, opening)
    place(arena, opening)
    return arena


# ---- new arenas ------------------------------------------------------------------------------


def _now_ns(arena: Arena | Previous, opening: Opening) -> int:
    virtual = opening.config.clock == "virtual"
    return int(arena.header.now_ns) if virtual else opening.host.boot_ns()


def _geometry(config: Config) -> dict[str, int]:
    return {
        "capacity": config.capacity,
        "payload_bytes": config.payload_bytes,
        "replay_capacity": config.replay_capacity,
        "replay_bytes_max": config.replay_bytes_max,
        "tick_ns": config.tick_ns,
        "fanout": config.fanout,
        "namespaces": config.namespaces + OWN_ROWS,
        "topics": config.topics + OWN_ROWS,
        "sessions": config.sessions,
        "watches": config.watches,
        "watermarks": config.watch_keys,
        "watermark_ttl_ns": config.watermark_ttl_ns,
        "inbox_max": config.inbox,
        "accounts": config.accounts,
        "groups": config.groups,
        "jobs": config.jobs if config.groups else 0,
        "bulk_loads": config.bulk_loads,
        "bulk_load_blocks": -(-config.bulk_load_rows // BULK_LOAD_BLOCK_ROWS),
        "schedules": config.schedules,
        "cursors": config.cursors,
        "wal_buffer_bytes": config.wal_buffer_bytes if config.wal_dir else 0,
    }


def core_config(config: Config, host: Host = HOST) -> dict[str, Any]:
    """Return the fields of struct pg_config for a new arena."""
    virtual = config.clock == "virtual"
    now_ns, wall_ns = host.boot_ns(), host.wall_ns()
    return _geometry(config) | {
        "now_ns": 0 if virtual else now_ns,
        "wall_offset_ns": config.wall_origin_ns if virtual else wall_ns - now_ns,
        "wall_origin_ns": config.wall_origin_ns,
        "created_wall_ns": wall_ns,
        "stream_id": host.random_bits(63) | 1,
        "secret": [host.random_bits(64), host.random_bits(64)],
        "uuid": host.random_bytes(16),
        "boot_id": host.boot_id(),
        "page_size": page_size(),
        "clock_kind": ClockKind.VIRTUAL if virtual else ClockKind.BOOT,
        "shard": max(0, config.shard),
        "shards": max(1, config.shards),
    }


@contextmanager
def _in_place(opening: Opening, fields: Mapping[str, Any]) -> Iterator[Arena]:
    """Yield a new arena. It replaces the existing arena when the context ends, and is removed after
    an error."""
    new = create_arena(opening.paths, fields, opening.host)
    try:
        yield new
        _save_snapshot(new, opening)
        place(new, opening)
    except BaseException:
        new.close()
        raise


def create_arena(paths: Paths, fields: Mapping[str, Any], host: Host = HOST) -> Arena:
    """Create arena files. They have no names until place() is called. Raises ArenaTooLarge."""
    for name in (f"{paths.arena}{NEW}", f"{paths.private}{NEW}", f"{paths.arena}{NEXT}"):
        shm.refuse_foreign(name)
    return Arena.create(paths.arena, paths.private, fields, host.free_memory)


def place(arena: Arena, opening: Opening) -> None:
    """Replace the daemon's arena files by new arena files.

    Raises AlreadyRunning if another daemon of this name has replaced them first. This can happen
    only if there was no file to lock.
    """
    opening.replacement.replace_by(arena.file, arena.private)


def place_again(arena: Arena, opening: Opening, moved: Moved) -> bool:
    """Copy an arena whose files have lost a name into new files, and continue with the new files.
    False if the files have their names.

    Calls `moved` after each portion of the copy, because the loop does not iterate during the copy.
    Raises ArenaTooLarge, and AlreadyRunning or BadPath if another file has one of the names. That
    file is left alone.
    """
    # a list, so that both names are checked: each check may raise BadPath
    if all([arena.file.has_name, arena.private.has_name]):
        return False
    # called before the copy, because a failed copy takes long and is tried again each second
    opening.replacement.refuse_taken()
    files = arena.copied(moved, opening.host.free_memory)
    try:
        opening.replacement.replace_by(*files)
    except BaseException:
        opening.replacement.take_back(*files)
        arena.set_state(ArenaState.READY, opening.host.pid)  # the old file may say RETIRED
        for file in files:
            file.give_up(moved)
        raise
    arena.set_state(ArenaState.RETIRED, opening.host.pid)
    arena.move_to(*files, moved)
    return True


def _remove(paths: Paths, suffix: str) -> None:
    for name in (f"{paths.arena}{suffix}", f"{paths.private}{suffix}"):
        if shm.ours(name):
            shm.unlink(name)


def _refuse_other_clock(arena: Arena | Previous, opening: Opening) -> None:
    header, name, host = arena.header, arena.file.name, opening.host
    kind = ClockKind.VIRTUAL if opening.config.clock == "virtual" else ClockKind.BOOT
    if header.clock_kind != kind:
        raise ArenaMismatch(name, "clock", kind.name, ClockKind(header.clock_kind).name)
    if bytes(header.boot_id) != host.boot_id():
        raise ArenaMismatch(name, "boot id", host.boot_id().hex(), bytes(header.boot_id).hex())
    if kind == ClockKind.BOOT and (now_ns := host.boot_ns()) < header.now_ns:
        raise ArenaMismatch(name, "boot clock", f"at least {header.now_ns} ns", f"{now_ns} ns")


def _refuse_other_shard(arena: Arena | Previous, opening: Opening) -> None:
    fields, header = core_config(opening.config, opening.host), arena.header
    wanted, found = (fields["shard"], fields["shards"]), (header.shard, header.shards)
    if found != wanted:
        wanted_text, found_text = ("{} of {}".format(*shard) for shard in (wanted, found))
        raise ArenaMismatch(arena.file.name, "shard", wanted_text, found_text)


def _current(arena: Arena | Previous) -> dict[str, int]:
    header = arena.header
    return {
        "capacity": header.capacity,
        "payload_bytes": header.payload_bytes,
        "replay_capacity": header.replay_capacity,
        "replay_bytes_max": header.replay_bytes_max,
        "tick_ns": header.tick_ns,
        "fanout": header.fanout,
        "namespaces": header.regions[lib.PG_R_NAMESPACES].count,
        "topics": header.regions[lib.PG_R_TOPICS].count,
        "sessions": arena.session_rows,
        "watches": header.regions[lib.PG_R_WATCHES].count,
        "watermarks": header.regions[lib.PG_R_WATERMARKS].count,
        "watermark_ttl_ns": arena.purgatory.watermark_ttl_ns,
        "inbox_max": arena.purgatory.inbox_max,
        "accounts": header.regions[lib.PG_R_ACCOUNTS].count,
        "groups": header.regions[lib.PG_R_GROUPS].count,
        "jobs": header.regions[lib.PG_R_JOBS].count,
        "bulk_loads": header.regions[lib.PG_R_BULK_LOADS].count,
        "bulk_load_blocks": header.regions[lib.PG_R_BULK_LOAD_BLOCKS].count,
        "schedules": header.regions[lib.PG_R_SCHEDULES].count,
        "cursors": header.regions[lib.PG_R_CURSORS].count,
        "wal_buffer_bytes": arena.wal_buffer.size if arena.wal_buffer is not None else 0,
    }


def _same_sizes(arena: Arena, config: Config) -> bool:
    wanted = _geometry(config)
    wanted["payload_bytes"] = -(-wanted["payload_bytes"] // REGION_ALIGN) * REGION_ALIGN
    return wanted == _current(arena)


def _identity(old: Arena | Previous, opening: Opening) -> dict[str, Any]:
    """Return the fields of struct pg_config that make a new arena look like the old one to readers.
    If there is a WAL, the new arena gets another uuid, so that the records of the two arenas are
    not mixed."""
    header = old.header
    same = {
        "stream_id": header.stream_id,
        "now_ns": header.now_ns,
        "created_wall_ns": header.created_wall_ns,
    }
    return same if opening.wal else same | {"uuid": old.uuid}


def _resize(old: Arena, opening: Opening) -> Arena:
    fields = core_config(opening.config, opening.host) | _identity(old, opening)
    opening.step("moving to other sizes")
    with _in_place(opening, fields) as new:
        try:
            new.migrate_from(old)
        except ArenaBroken as error:
            raise too_small(error) from error
    old.close()
    return new


def too_small(error: ArenaBroken, of: str = "") -> PurgatorydError:
    """Return ArenaTooSmall, which names the setting, if the error is that of a full table. Return
    other errors unchanged. `of`: text that names the arena."""
    setting = _SIZES.get(error.detail)
    if setting is None:
        return error
    unit = BULK_LOAD_BLOCK_ROWS if setting == "bulk_load_rows" else 1
    own = OWN_ROWS if setting in _OWN else 0
    asked, needed = (figure * unit - own for figure in (error.found, error.expected))
    return ArenaTooSmall(f"{setting}{of}", asked, needed)


def _convert(old: Previous, opening: Opening) -> Arena:
    """Copy the authoritative state of an arena of an earlier ABI into a new arena of the same
    sizes.

    Tables that the earlier ABI does not have get their sizes from the settings.
    """
    _refuse_other_clock(old, opening)
    _refuse_other_shard(old, opening)
    _refuse_other_wal(old, opening)
    sizes = {name: size for name, size in _current(old).items() if size}
    fields = core_config(opening.config, opening.host) | sizes | _identity(old, opening)
    opening.step("converting the arena of an earlier version")
    with _in_place(opening, fields) as new:
        new.convert_from(old)
        _commit_appended(old, opening)
        new.rebuild(_now_ns(old, opening))
    old.close()
    return new
