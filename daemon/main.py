"""Start and stop a daemon: lock, arena, sockets, signals, loop. A stop releases them in reverse
order."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import zmq

from purgatoryd.daemon.clock import Clock, RealClock, VirtualClock
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.lifecycle import RECOVERING, STARTING, DaemonLifecycle
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.sockets import Remotes, Sockets
from purgatoryd.daemon.listeners.transport import Transport
from purgatoryd.daemon.log import announce, log
from purgatoryd.daemon.loop import signals
from purgatoryd.daemon.placement import Placement
from purgatoryd.daemon.processes import Processes
from purgatoryd.daemon.reaper import Reaper
from purgatoryd.daemon.reload import Reload
from purgatoryd.daemon.replay_server import ReplayServer
from purgatoryd.daemon.service_manager import ServiceManager
from purgatoryd.daemon.store import Opening, open_arena, owned, place_again, wal_end
from purgatoryd.daemon.waiting import Waiter, allow_descriptors
from purgatoryd.daemon.wal import NullWal, locked
from purgatoryd.daemon.wal_birth import record_birth
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.errors import AlreadyRunning, BadPath, InvalidSetting, SystemFailure
from purgatoryd.shm_layout.filesystems import is_in_memory
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import ArenaState
from purgatoryd.shm_layout.paths import Paths, daemon_paths
from purgatoryd.shm_layout.shards import read_table, refuse_shard_name
from purgatoryd.shm_layout.status_file import StatusFile

LOCK_MODE = 0o600
LOCK_POLL_S = 0.02


def serve(
    config: Config,
    import_path: Path | None = None,
    force_wal: bool = False,
    as_restored: bool = False,
    reread: Callable[[], Config] | None = None,
) -> int:
    """Run the daemon until SIGTERM, SIGINT or the STOP command. Return the exit code.

    `import_path`: an export file from which the arena is made. `force_wal`: recover a damaged WAL
    up to the damage. `as_restored`: accept a WAL that is a copy. `reread` reads the settings again
    after SIGHUP.

    Prints one line that begins with "ready" once clients can reach the daemon. Raises StartError,
    ArenaError or InvalidName if the daemon cannot start; an existing arena is then unchanged.
    Raises SystemFailure, at the start or later, if memory, descriptors or space are exhausted.
    """
    log.set_up(config.log_level, name=config.name)
    lifecycle = DaemonLifecycle(ServiceManager.of(os.environ))
    with system_failures():
        paths = daemon_paths(config.name)
        _refuse_sharded(config, paths)
        opening = Opening(config, paths, import_path, force_wal, as_restored, lifecycle.step)
        _run(opening, lifecycle, reread or (lambda: config))
    return 0


def _run(opening: Opening, lifecycle: DaemonLifecycle, reread: Callable[[], Config]) -> None:
    config, paths = opening.config, opening.paths
    access = Access.of(config)
    lifecycle.enter(STARTING)
    placement = Placement(config, paths.arena)
    placement.begin()
    allow_descriptors()
    with (
        name_lock(paths),
        locked(opening.wal, as_restored=opening.as_restored),
        owned(opening) as opening,
        signals() as wake_fd,
        contextlib.closing(
            Sockets(paths, access, Remotes.of(config), ring_bytes=config.ring_bytes)
        ) as sockets,
        contextlib.closing(Processes()) as processes,
        contextlib.closing(ReplayServer(config, paths)) as replay,
        loop_of(opening, sockets, access, lifecycle, placement, processes) as reaper,
    ):
        _warn_of(opening.wal)
        fds = [*sockets.fds(), wake_fd, *reaper.wal.fds, processes.fd]
        with contextlib.closing(Waiter(fds, sockets.bells, *reaper.wal.fds)) as waiter:
            placement.settle(reaper.arena, partial(lifecycle.step, "placing the arena in memory"))
            reload = Reload(
                config, reread, reaper.arena, sockets, placement, lifecycle.service_manager, replay
            )
            reaper.reload_by(reload)
            reaper.replay_by(replay.start)
            reaper.loop.handle_signals()
            _settle_memory()
            reaper.begin()
            announce(f"ready name={paths.name} pid={os.getpid()} dir={paths.directory}")
            reaper.loop.run(waiter, wake_fd)
            reaper.finish()


@contextlib.contextmanager
def loop_of(
    opening: Opening,
    transport: Transport,
    access: Access,
    lifecycle: DaemonLifecycle,
    placement: Placement,
    processes: Processes,
) -> Iterator[Reaper]:
    """Open a daemon's arena and WAL, and yield the reaper that runs on them. The caller holds the
    locks.

    Raises the errors of open_arena and wal_end.
    """
    config = opening.config
    with (
        contextlib.closing(_recovered(opening, lifecycle)) as arena,
        lifecycle.starting(),
        contextlib.closing(_begin_wal(arena, opening)) as wal,
    ):
        _set_up_namespaces(arena, config)
        arena.set_quotas(config.quota_timers, config.quota_bytes, config.quota_ops)
        arena.set_uid_share(config.uid_share)
        reaper = Reaper(
            arena, transport, access, _clock(config, arena, opening.host), wal, placement, config,
            lifecycle, partial(place_again, arena, opening, lifecycle.heartbeat), opening.host,
            processes,
        )  # fmt: skip
        with contextlib.closing(reaper):
            yield reaper
        arena.set_state(ArenaState.READY, 0)


def _refuse_sharded(config: Config, paths: Paths) -> None:
    """Refuse to run a single daemon under the name of a deployment: it would not have the
    deployment's timers."""
    if config.shard >= 0:
        return
    refuse_shard_name(config.name)
    home = Path(config.wal_dir) if config.wal_dir else paths.directory
    table = read_table(home, config.name) or read_table(paths.directory, config.name)
    if table is not None:
        bound = f"1 or more, because {config.name} is a deployment (currently {table.count} shards)"
        raise InvalidSetting("shards", config.shards, bound, "config")


@contextlib.contextmanager
def system_failures() -> Iterator[None]:
    """Convert system errors that occur inside this context to SystemFailure."""
    try:
        yield
    except MemoryError:
        raise SystemFailure(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
    except RuntimeError as error:  # raised if CPython has no memory for the lock of a file
        if not str(error).startswith("can't allocate"):
            raise
        raise SystemFailure(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
    except (OSError, zmq.ZMQError) as error:
        path = getattr(error, "filename", None) or ""
        raise SystemFailure(error.errno or 0, error.strerror or str(error), str(path)) from error


def _recovered(opening: Opening, lifecycle: DaemonLifecycle) -> Arena:
    lifecycle.enter(RECOVERING)
    lifecycle.write_to(StatusFile(opening.paths.directory, opening.paths.name))
    with lifecycle.starting():
        arena = open_arena(opening)
        if opening.wal is not None and opening.as_restored:
            record_birth(opening.wal)
    lifecycle.attach(arena)
    return arena


def _begin_wal(arena: Arena, opening: Opening) -> NullWal:
    """Begin an epoch and open the WAL. Records that were appended earlier are then on disk."""
    arena.start_epoch(opening.host.boot_id())
    if opening.wal is None:
        return NullWal()
    opening.step("opening the WAL")
    end = wal_end(arena, opening)
    name, config = opening.paths.arena, opening.config
    return opening.begin_wal(arena, name, opening.wal, config, end, opening.host, opening.step)


def _warn_of(wal: Path | None) -> None:
    if wal is not None and is_in_memory(wal):
        log.warning(f"the WAL {wal} is on a file system in memory: it will not survive a reboot")


def _set_up_namespaces(arena: Arena, config: Config) -> None:
    """Create the durable namespaces. A shard receives its namespaces from the supervisor, which
    also says which of them are durable."""
    if config.shard >= 0:
        arena.confine()
        return
    _refuse_too_many(arena, config)
    for namespace in config.durable_namespaces:
        arena.set_durable(namespace)


def _refuse_too_many(arena: Arena, config: Config) -> None:
    """Raise InvalidSetting if there are more namespaces than the setting allows. The namespace of
    the daemon's own notices does not count."""
    known = {namespace.name for namespace in arena.namespaces_of_users()}
    if len(known.union(config.durable_namespaces)) > config.namespaces:
        bound = "enough for the namespaces in use and the durable namespaces"
        raise InvalidSetting("namespaces", config.namespaces, bound, "arena")


def _clock(config: Config, arena: Arena, host: Host) -> Clock:
    if config.clock == "virtual":
        return VirtualClock(int(arena.header.now_ns), int(arena.header.wall_origin_ns))
    return RealClock(host)


def _settle_memory() -> None:
    """Turn off the garbage collector: the loop leaves no reference cycles for it to find."""
    gc.collect()
    gc.freeze()
    gc.disable()
    _precise_sleep()


def _precise_sleep() -> None:
    """Set the timer slack to 1 ns: with the default the kernel may end a sleep 50 us late."""
    with (
        contextlib.suppress(OSError),
        open("/proc/self/timerslack_ns", "wb", buffering=0) as slack_ns,
    ):
        slack_ns.write(b"1")


@contextlib.contextmanager
def name_lock(paths: Paths) -> Iterator[None]:
    """Hold the daemon's lock file: one daemon per name and directory. Raises AlreadyRunning.

    The kernel releases the lock when the process ends. The file is never removed: otherwise two
    processes could each lock a file of this name.
    """
    fd = _open_lock(paths.lock)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunning(paths.name, _holder(fd), str(paths.lock)) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def await_lock(paths: Paths, end_ns: int) -> None:
    """Wait until the lock is free. Raises AlreadyRunning if it is still held at boot time
    `end_ns`."""
    while True:
        try:
            with name_lock(paths):
                return
        except AlreadyRunning:
            if HOST.boot_ns() >= end_ns:
                raise
            time.sleep(LOCK_POLL_S)


def try_lock(paths: Paths) -> None:
    """Raise BadPath if this user could not take the lock even if it were free."""
    os.close(_open_lock(paths.lock))


def _open_lock(path: Path) -> int:
    """Open the lock file. Its mode denies other users access, because a user who can open the file
    can lock it. Raises BadPath."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, LOCK_MODE)
    except OSError as error:
        raise BadPath(str(path), f"cannot be opened: {error.strerror}") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        reason = f"cannot be the lock: it is not a regular file of uid {os.geteuid()}; remove it"
        raise BadPath(str(path), reason)
    os.fchmod(fd, LOCK_MODE)
    return fd


def _holder(fd: int) -> int:
    """Return the pid of the lock's holder; 0 if the holder has not written it yet."""
    written = os.pread(fd, 32, 0).strip()
    pid = int(written) if written.isdigit() else 0
    return pid if Path(f"/proc/{pid}").exists() else 0
