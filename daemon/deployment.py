"""A deployment of shards: a supervisor process that runs one daemon per shard.

The supervisor holds the deployment's lock, its routing table, and the sockets under its name.
Clients ask the supervisor where a new namespace is to be placed, and send everything else to the
shards. A shard that ends is restarted without effect on the other shards. If the supervisor ends
for any reason, its shards end too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import zmq

from purgatoryd.daemon import admin
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.lifecycle import (
    READY,
    RECOVERING,
    STARTING,
    STOPPED,
    DeploymentLifecycle,
    publishing,
)
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.sockets import Sockets
from purgatoryd.daemon.listeners.transport import Request, Requests
from purgatoryd.daemon.log import announce, log
from purgatoryd.daemon.loop import Loop, signals
from purgatoryd.daemon.main import await_lock, name_lock, system_failures
from purgatoryd.daemon.recovery import Step
from purgatoryd.daemon.resharding import Resharding, settle
from purgatoryd.daemon.service_manager import ServiceManager
from purgatoryd.daemon.shard import ENDS_MAX, Shard, State
from purgatoryd.daemon.store import Opening, left_any
from purgatoryd.daemon.waiting import Waiter, allow_descriptors
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import (
    InvalidName,
    PurgatorydError,
    ShardFailed,
    TableBroken,
)
from purgatoryd.shm_layout.files import private_folder
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import (
    FLAG_DRAIN,
    FLAG_RESUME,
    Message,
    Quota,
    WireError,
    is_reserved,
)
from purgatoryd.shm_layout.paths import Paths, daemon_paths, paths_in
from purgatoryd.shm_layout.shards import (
    ALONE,
    PARTITIONS_MAX,
    Placement,
    ShardTable,
    alone,
    read_table,
    refuse_shard_name,
    table_path,
    write_table,
)
from purgatoryd.shm_layout.status_file import StatusFile

PER_ITERATION = 16
"""Maximum number of requests from one socket that one iteration answers."""
ENDS_WITHIN_NS = 10_000_000_000
"""Longest time that a start waits for shards of the previous supervisor to end."""

Command = Callable[[ShardTable, int], Sequence[str]]
"""Returns the command line that starts the shard with the given number."""


def serve_shards(
    config: Config, command: Command, reread: Callable[[], Config], *, as_restored: bool = False
) -> int:
    """Run a deployment until SIGTERM, SIGINT or the STOP command. Return the exit code.

    `reread` reads the settings again after SIGHUP; it may raise. `as_restored`: accept WALs that
    are copies.

    Prints one line that begins with "ready" once clients can reach all shards. Raises InvalidName,
    StartError, TableBroken, the errors of settle(), and ShardFailed if a shard does not start.
    """
    log.set_up(config.log_level, name=config.name)
    refuse_shard_name(config.name)
    with system_failures():
        paths, access = daemon_paths(config.name), Access.of(config)
        lifecycle = DeploymentLifecycle(ServiceManager.of(os.environ))
        allow_descriptors()
        with name_lock(paths), signals() as wake_fd, zmq.Context() as context:
            lifecycle.enter(STARTING)
            status = StatusFile(paths.directory, config.name)
            lifecycle.write_to(status)
            lifecycle.enter(RECOVERING)
            try:
                # made before the sockets, through which clients use the registry
                with lifecycle.starting():
                    registry = Registry.of(config, paths, lifecycle.step, as_restored=as_restored)
            except Exception:
                if read_table(paths.directory, config.name) is None:
                    status.remove()  # a single daemon reports its state in its arena
                raise
            shards = _shards(registry.table, paths.directory, command, context)
            with contextlib.closing(Sockets(paths, access)) as sockets:
                Deployment(
                    config, registry, shards, sockets, access, wake_fd, lifecycle, reread
                ).run()
    return 0


def _shards(
    table: ShardTable, directory: Path, command: Command, context: zmq.Context[zmq.Socket[bytes]]
) -> list[Shard]:
    return [
        Shard(number, paths_in(directory, table.daemon(number)), command(table, number), context)
        for number in range(table.count)
    ]


class Registry:
    """The routing table in memory and in its files. If there is a WAL, the file in the WAL
    directory is authoritative."""

    def __init__(self, table: ShardTable, homes: Sequence[Path]) -> None:
        self.table = table
        self._homes = homes

    @classmethod
    def of(
        cls,
        config: Config,
        paths: Paths,
        step: Step = lambda _: None,
        *,
        as_restored: bool = False,
    ) -> Registry:
        """Read or create the routing table, and reshard a deployment that had another number of
        shards or was a single daemon.

        `step` is called at each step. Raises AlreadyRunning, TableBroken, and the errors of
        settle().
        """
        homes = [paths.directory]
        if config.wal_dir:
            homes.insert(0, Path(config.wal_dir).absolute())
            private_folder(homes[0])
        found = [table for home in homes if (table := read_table(home, config.name))]
        if not found:
            table = _first(config, paths)
        elif found[0].version < found[-1].version:
            which = f"is outdated: version {found[-1].version} exists, this is {found[0].version}"
            raise TableBroken(str(table_path(homes[0], config.name)), which)
        else:
            table = found[0]
            _await_ends(paths.directory, table)
        registry = cls(table, homes)
        if table.shard_generation != ALONE:
            registry.write()
        resharding = Resharding(config, paths.directory, registry.adopt, step, as_restored)
        registry.table = settle(resharding, table, config.shards)
        return registry

    def adopt(self, table: ShardTable) -> None:
        """Replace the table in memory and in the files. Raises OSError."""
        self.table = table
        self.write()

    def record(self, placement: Placement) -> None:
        """Add a new namespace to the table, durably. After an OSError the table is unchanged."""
        before = self.table
        self.table = before.with_birth(placement)
        try:
            self.write()
        except OSError:
            self.table = before
            with contextlib.suppress(OSError):
                self.write()  # the failed call may have replaced one of the files
            raise

    def write(self) -> None:
        """Write the table to its files. Raises OSError."""
        for home in self._homes:
            write_table(home, self.table)


def _await_ends(directory: Path, table: ShardTable) -> None:
    """Wait until the shards of a killed supervisor have ended. Raises AlreadyRunning."""
    end_ns = HOST.boot_ns() + ENDS_WITHIN_NS
    for name in table.daemons:
        await_lock(paths_in(directory, name), end_ns)


def _first(config: Config, paths: Paths) -> ShardTable:
    """Return the table to start from: the table of a single daemon if a single daemon of this name
    has left files, otherwise an empty table."""
    if left_any(Opening(config, paths)):
        return alone(config.name)
    return ShardTable(config.name, 1, ALONE + 1, config.shards)


class Deployment:
    """Runs the shards and places namespaces. A participant of `Loop`."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        shards: Sequence[Shard],
        sockets: Sockets,
        access: Access,
        wake_fd: int,
        lifecycle: DeploymentLifecycle,
        reread: Callable[[], Config],
    ) -> None:
        """`lifecycle`: its state is RECOVERING."""
        self._config = config
        self._access = access
        self._registry = registry
        self._shards = shards
        self._sockets = sockets
        self._wake_fd = wake_fd
        self._waiter = Waiter()
        self._lifecycle = lifecycle
        self._manager = lifecycle.service_manager
        self._reread = reread
        lifecycle.publish_by(self._announce)
        self.loop = Loop(self, sockets, lifecycle, HOST)
        self._draining = self._reloads = False

    def run(self) -> None:
        """Iterate until all shards have ended as requested. Raises ShardFailed."""
        self.loop.handle_signals()
        try:
            self.loop.run(self._waiter, self._wake_fd)
            self._stop_all()
        finally:
            self._end_all()
            self._waiter.close()

    def done(self) -> bool:
        """True if all shards have ended. A drain does not wait for a crash-looping shard; this
        shard keeps its timers."""
        ended = {State.ENDED, State.CRASH_LOOPING} if self._draining else {State.ENDED}
        return all(shard.state in ended for shard in self._shards)

    @property
    def _stopped(self) -> bool:
        return self._lifecycle.state is STOPPED

    # ---- one iteration -----------------------------------------------------------------------

    def serve(self, now_ns: int) -> bool:
        """Look after the shards and answer requests. True = the next iteration has to begin at
        once."""
        if self.loop.stop_requested:
            self._stop_all()
        for shard in self._shards:
            self._look_at(shard, now_ns)
        self._start_next(now_ns)
        self._settle()
        self.loop.reload_if_requested()
        self._report_reload()
        busy = self._serve(self._sockets.commands, self._command)
        return busy | self._serve(self._sockets.admin, self._administer)

    def end_iteration(self, now_ns: int, *, busy: bool) -> bool:
        """Return `busy`: a deployment has no work at the end of an iteration."""
        return busy

    def wait(self, waiter: Waiter, until_ns: int) -> frozenset[int]:
        """Sleep until `until_ns`, or until a descriptor is ready."""
        return waiter.wait(until_ns)

    def _stop_all(self) -> None:
        if not self._stopped:
            self._lifecycle.enter(STOPPED)
            for shard in self._shards:
                shard.stop()

    def _look_at(self, shard: Shard, now_ns: int) -> None:
        shard.receive()
        if shard.said_ready(now_ns):
            log.info(f"shard {shard.name} is ready", shard=shard.number, process=shard.pid)
            for namespace in self._registry.table.namespaces_of(shard.number):
                shard.send(self._creation(namespace))
            if self._draining:
                shard.send(wire.encode_frame(Message.STOP, flags=FLAG_DRAIN))
        if shard.ended(now_ns, requested=self.loop.stop_requested or self._draining):
            self._note_end(shard, now_ns)

    def _note_end(self, shard: Shard, now_ns: int) -> None:
        if self.loop.stop_requested or shard.state is State.ENDED:
            return
        if self._lifecycle.state is RECOVERING:
            raise ShardFailed(shard.name, shard.code)
        if shard.state is State.CRASH_LOOPING:
            failures = f"{ENDS_MAX} failures in a row"
            text = f"shard {shard.name} is crash-looping: {failures}; not restarted"
            log.error(text, code=shard.code)
        else:
            pause_s = (shard.restart_at_ns - now_ns) / 1e9
            text = f"shard {shard.name} has ended; restarting it in {pause_s:g} s"
            log.warning(text, code=shard.code)

    def _start_next(self, now_ns: int) -> None:
        for shard in self._shards:
            if self._stopped and shard.state in (State.DOWN, State.CRASH_LOOPING):
                shard.enter(State.ENDED)
        for shard in self._startable():
            if shard.restart_at_ns <= now_ns:
                self._start(shard, now_ns)
                return

    def _start(self, shard: Shard, now_ns: int) -> None:
        """Start a shard. If the system cannot start the shard, the other shards continue; but if
        the deployment itself is still starting, that start fails."""
        try:
            shard.start()
        except OSError as error:
            if self._lifecycle.state is RECOVERING:
                raise
            shard.failed(now_ns)
            log.error(f"shard {shard.name} cannot be started: {error.strerror}")

    def _startable(self) -> list[Shard]:
        """Return the shards that are allowed to start.

        During the start of the deployment, shards start one after another, so that each shard sees
        which cores the earlier shards use. A restart does not wait for other shards, because their
        recovery may take long.
        """
        first = self._lifecycle.state is RECOVERING
        if first and any(shard.state is State.STARTING for shard in self._shards):
            return []
        return [shard for shard in self._shards if shard.state is State.DOWN]

    def _settle(self) -> None:
        """Derive the deployment's state from the states of its shards, and enter this state."""
        serving = sum(shard.serves for shard in self._shards)
        again = sum(shard.starts - 1 for shard in self._shards if shard.starts)
        self._lifecycle.count(len(self._shards), serving, again)
        if self._lifecycle.state is RECOVERING:
            if all(shard.state is State.READY for shard in self._shards):
                self._go_live()
        elif not self._stopped:
            why = tuple(found for shard in self._shards if (found := shard.trouble))
            self._lifecycle.settle(why, draining=self._draining)

    def _go_live(self) -> None:
        self._lifecycle.enter(READY)
        directory = self._sockets.directory
        announce(f"ready name={self._config.name} pid={os.getpid()} dir={directory}")

    def _announce(self, key: str, payload: bytes) -> None:
        """Publish an event through one shard. One shard is enough, because subscribers of a
        reserved namespace are connected to all shards."""
        serving = next((shard for shard in self._shards if shard.serves), None)
        if serving is not None:
            serving.send(publishing(key, payload))

    def heartbeat(self, now_ns: int) -> None:
        """Check the progress of each shard's loop."""
        for shard in self._shards:
            self._end_silent(shard)
            shard.heartbeat()
        self._ask_for_time()

    def _ask_for_time(self) -> None:
        """Ask the service manager for more time. A start may always ask, because hanging shards are
        killed during a start. A stop asks only while a shard makes progress, so a hanging shard has
        as much time to end as a single daemon."""
        count = len(self._shards)
        if self._lifecycle.state is RECOVERING:
            ready = sum(shard.state is State.READY for shard in self._shards)
            self._manager.step(f"recovering: {ready} of {count} shards are ready")
        elif self._stopped and any(shard.moves for shard in self._shards):
            ended = sum(shard.state is State.ENDED for shard in self._shards)
            self._manager.step(f"stopping: {ended} of {count} shards have ended")

    def _end_silent(self, shard: Shard) -> None:
        """Kill a shard that hangs, unless a stop or a drain is under way."""
        if not shard.hangs or self._stopped or self._draining:
            return
        log.error(f"shard {shard.name} {shard.hangs}: killing it", process=shard.pid)
        shard.signal(signal.SIGKILL)

    def reload(self) -> bool:
        """Let all shards read their settings again, and restart crash-looping shards. False if the
        deployment is not ready yet, or is stopping."""
        if self._lifecycle.state in (RECOVERING, STOPPED):
            return False
        self._reloads = True
        self._manager.reloading()
        with contextlib.suppress(PurgatorydError):  # the shards log the error
            found = self._reread()
            log.level = found.log_level
            self._config = replace(self._config, uid_share=found.uid_share)
        for shard in self._shards:
            if shard.state is State.CRASH_LOOPING:
                shard.try_again(HOST.boot_ns())
            else:
                shard.reload()
        return True

    def _report_reload(self) -> None:
        """Notify the service manager once all shards have reloaded."""
        if self._reloads and not any(shard.reloads for shard in self._shards):
            self._reloads = False
            self._manager.ready()

    # ---- the sockets ----------------------------------------------------------------------------

    def _serve(self, socket: Requests, answer: Callable[[Request], bytes]) -> bool:
        for _ in range(PER_ITERATION):
            message = socket.receive()
            if message is None:
                return False
            socket.send(message.route, admin.fault(message) or answer(message))
        return True

    def _command(self, message: Request) -> bytes:
        if not self._access.may_connect(message.uid, message.gid):
            return _refused(message, WireError.DENIED, (message.uid, 0))
        if _kind(message) == Message.PLACE:
            return self._place(message, 1)
        return self._wrong_shard(message)

    def _administer(self, message: Request) -> bytes:
        kind = _kind(message)
        if not self._access.may_administer(message.uid):
            return _refused(message, WireError.DENIED, (message.uid, 0))
        if kind == Message.PLACE:
            return self._place(message, PARTITIONS_MAX)
        if kind not in (Message.STOP, Message.PING):
            return self._wrong_shard(message)
        if kind == Message.STOP:
            self._obey(wire.FRAME.unpack_from(message.body)[9])
        return admin.frame(kind, echo=admin.echo_of(message))

    def _wrong_shard(self, message: Request) -> bytes:
        table = self._registry.table
        return _refused(message, WireError.WRONG_SHARD, (table.version, table.count))

    def _obey(self, flags: int) -> None:
        """Carry out a STOP request: stop, drain, or resume."""
        if not flags & (FLAG_DRAIN | FLAG_RESUME):
            self.loop.stop()
            return
        self._draining = bool(flags & FLAG_DRAIN)
        for shard in self._shards:
            if not self._draining and shard.state is State.ENDED:
                shard.try_again(HOST.boot_ns())
        self._settle()  # before the requests are sent, because a drained shard may end at once
        for shard in self._shards:
            shard.send(wire.encode_frame(Message.STOP, flags=flags & (FLAG_DRAIN | FLAG_RESUME)))

    # ---- new namespaces --------------------------------------------------------------------------

    def _place(self, message: Request, most: int) -> bytes:
        """Answer a PLACE request. The namespace is in the table before the answer is sent.

        `most`: the highest number of partitions that this sender may ask for.
        """
        partitions = wire.FRAME.unpack_from(message.body)[5]
        name = bytes(message.body[wire.FRAME.size :])
        try:
            namespace = name.decode()
            wire.encode_namespace(namespace)
        except (UnicodeDecodeError, InvalidName):
            return _refused(message, WireError.MALFORMED, (wire.FRAME.size, len(name)))
        if is_reserved(namespace):
            return _refused(message, WireError.DENIED, (message.uid, 0))
        if not 1 <= partitions <= most:
            return _refused(message, WireError.TOO_LARGE, (most, partitions))
        known = self._registry.table.placements.get(namespace)
        if known is None:
            placement = self._registry.table.place(namespace, partitions)
            return self._create(message, replace(placement, uid=message.uid))
        if most > 1 and known.partitions != partitions:
            return _refused(message, WireError.PLACED, (known.partitions, partitions))
        return _placed(message, known)

    def _create(self, message: Request, placement: Placement) -> bytes:
        table, most = self._registry.table, self._config.namespaces
        if any(len(table.namespaces_of(shard)) >= most for shard in placement.shards):
            return _refused(message, WireError.NAMESPACES_FULL, (most, 0))
        if (held := self._created_by(placement)) >= (share := self._share_of(message.uid)):
            figures = (share << 8 | Quota.UID_NAMESPACES, message.uid << 32 | held)
            return _refused(message, WireError.QUOTA, figures)
        try:
            self._registry.record(placement)
        except OSError as error:
            log.error(f"the routing table cannot be written: {error}")
            return _refused(message, WireError.INTERNAL, (error.errno or 0, 0))
        for shard in {*placement.shards}:
            self._shards[shard].send(self._creation(placement.namespace))
        return _placed(message, placement)

    def _created_by(self, placement: Placement) -> int:
        """Return the number of namespaces that the placement's uid has created in a shard of the
        placement; the maximum over these shards."""
        table = self._registry.table
        return max(table.created_in(shard, placement.uid) for shard in placement.shards)

    def _share_of(self, uid: int) -> int:
        """Return how many namespaces this uid may create in one shard, see `Config.uid_share`."""
        config = self._config
        limited = config.uid_share < 100 and uid not in (0, os.geteuid())
        return max(1, config.namespaces * config.uid_share // 100) if limited else sys.maxsize

    def _creation(self, namespace: str) -> bytes:
        """Return the request that makes a shard create the namespace, unless the shard has it."""
        durable = namespace in self._config.durable_namespaces
        changes = {"durability": 1} if durable else {}
        return wire.encode_namespace_set(0, wire.encode_namespace(namespace), changes)

    # ---- sleep ---------------------------------------------------------------------------------

    @property
    def takes_commands(self) -> bool:
        """A deployment has no queue that could be full."""
        return True

    def sleeps_until(self, latest_ns: int) -> int:
        """Return the boot time at which the next shard is to be started, at most `latest_ns`. The
        waiter receives the shards' descriptors before each sleep, because they change with each
        start."""
        fds = [fd for shard in self._shards for fd in shard.fds]
        self._waiter.watch([*self._sockets.fds(), self._wake_fd, *fds])
        return min([latest_ns, *(shard.restart_at_ns for shard in self._startable())])

    def _end_all(self) -> None:
        """End all shards, also after an error."""
        for shard in self._shards:
            shard.signal(signal.SIGTERM)
        for shard in self._shards:
            shard.wait()


def _kind(message: Request) -> int:
    return int(wire.FRAME.unpack_from(message.body)[2])


def _refused(message: Request, error: WireError, detail: tuple[int, int]) -> bytes:
    return admin.frame(_kind(message), error, detail=detail, echo=admin.echo_of(message))


def _placed(message: Request, placement: Placement) -> bytes:
    return admin.frame(Message.PLACE, count=placement.partitions, echo=admin.echo_of(message))
