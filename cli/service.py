"""The commands run and stop."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from purgatoryd import clients
from purgatoryd.cli import settings
from purgatoryd.cli.exits import ARGUMENTS, Command, Exit, frozen
from purgatoryd.cli.options import emit, json_option, name_option, timeout_option
from purgatoryd.cli.shards import table_of
from purgatoryd.shm_layout.errors import InvalidSetting, PurgatorydError

if TYPE_CHECKING:
    from purgatoryd.daemon.config import Config
    from purgatoryd.shm_layout.arena import HeaderView
    from purgatoryd.shm_layout.paths import Paths
    from purgatoryd.shm_layout.shards import ShardTable

STOP_S = 30.0
"""Time-out, in seconds, of the stop that follows an unfinished drain."""
_UCRED = struct.Struct("=iII")
"""struct ucred: pid, uid, gid."""


@click.command("run", cls=Command)
@name_option
@settings.run_options
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="PURGATORYD_CONFIG",
    show_envvar=True,
    is_eager=True,
    expose_value=False,
    callback=settings.read_file,
    help="TOML file with settings, named like the flags: capacity = 1000.",
)
@click.option(
    "--import",
    "import_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Start with the timers in a file that `stop --export` wrote; the arena must be empty.",
)
@click.option(
    "--force-wal",
    is_flag=True,
    help="Recover a damaged WAL up to the damage, and rename its files.",
)
@click.option(
    "--as-restored",
    is_flag=True,
    help="Start with a copy of a WAL, such as a restored backup. No daemon may use the original.",
)
@click.option("--shard", "shard", type=(click.INT, click.INT), hidden=True)
@click.option(
    "--print-config", is_flag=True, help="Print the settings and their sources, and exit."
)
@json_option
@click.pass_context
def run_command(
    ctx: click.Context, /, name: str, import_path: Path | None, force_wal: bool,
    as_restored: bool, print_config: bool, as_json: bool, shard: tuple[int, int] | None,
    **values: Any,
) -> int:  # fmt: skip
    """Run the daemon in the foreground until SIGTERM or SIGINT.

    The command prints a line that begins with "ready" once clients can connect. After a stop or
    a crash, a daemon that is started under the same name continues with its timers.

    A flag overrides its environment variable (PURGATORYD_CAPACITY for --capacity), which overrides
    the TOML file. An unknown variable, or an unknown name in the file, is an error.

    With --shards N, the command runs N daemons, named NAME-1-0 and so on, and restarts a daemon
    that ends. Clients still connect to NAME.
    """
    settings.refuse_unknown_variables(os.environ)
    config = settings.config_from(ctx, name, values)
    for flag, given in (("force-wal", force_wal), ("as-restored", as_restored)):
        if given and not config.wal_dir:
            raise InvalidSetting(flag, True, "left out without a WAL", "flag")
    if print_config:
        print_settings(ctx, config, as_json)
    elif shard is not None:
        run_shard(ctx, config, shard, force_wal, as_restored)
    elif config.shards:
        run_shards(ctx, config, import_path, as_restored)
    else:
        from purgatoryd.daemon.main import serve

        serve(config, import_path, force_wal, as_restored, lambda: settings.read_again(ctx))
    return Exit.DONE


def print_settings(ctx: click.Context, config: Config, as_json: bool) -> None:
    """Print the settings and their sources."""
    for flag, value, source in settings.effective(ctx, config):
        record = {"setting": flag, "value": value, "source": source}
        emit(record, f"{flag} = {json.dumps(value)}  # {source}", as_json)


def run_shards(
    ctx: click.Context, config: Config, import_path: Path | None, as_restored: bool
) -> None:
    """Run a deployment. Each shard gets the same arguments, followed by its name and number."""
    from purgatoryd.daemon.deployment import serve_shards

    if import_path is not None:
        bound = "left out with --shards; import without shards, then restart with --shards"
        raise InvalidSetting("import", str(import_path), bound, "flag")
    words = [sys.executable, "-m", "purgatoryd.cli", "run", *ctx.meta[ARGUMENTS]]

    def command(table: ShardTable, number: int) -> list[str]:
        which = "--shard", str(number), str(os.getpid())
        return [*words, "--name", table.daemon(number), *which]

    serve_shards(config, command, lambda: settings.read_again(ctx), as_restored=as_restored)


def run_shard(
    ctx: click.Context, config: Config, shard: tuple[int, int], force_wal: bool, as_restored: bool
) -> None:
    """Run one shard of a deployment. It ends when the process that started it ends."""
    from purgatoryd.daemon.main import serve
    from purgatoryd.daemon.parent import end_with

    number, parent = shard
    end_with(parent)

    def as_shard(config: Config) -> Config:
        return replace(config, shard=number)

    reread = partial(settings.read_again, ctx)
    serve(as_shard(config), None, force_wal, as_restored, lambda: as_shard(reread()))


@click.command("stop", cls=Command)
@name_option
@click.option(
    "--drain/--keep",
    default=False,
    help="Refuse adds and wait until no timer is armed, or stop at once (default).",
)
@click.option(
    "--resume", is_flag=True, help="Cancel a drain: the daemon accepts adds and keeps running."
)
@timeout_option
@click.option(
    "--export",
    type=click.Path(dir_okay=False, path_type=Path),
    help="After the stop, write all timers to this file, for `run --import`.",
)
@json_option
def stop_command(
    name: str, drain: bool, resume: bool, timeout: float, export: Path | None, as_json: bool
) -> int:
    """Stop the daemon and wait for the end of its process.

    Armed timers stay in the arena. Timers that become due while no daemon runs fire at the next
    start. Exit code 6 means that the process still runs after --timeout.

    With --drain, the daemon refuses adds. It ends once all timers have fired or were cancelled, and
    owners have acknowledged their outcomes. If that takes longer than --timeout, the daemon
    stops and keeps the remaining timers: exit code 1. SIGINT cancels the drain. If the command is
    killed, the drain continues; --resume cancels it.

    --export needs the daemon's own uid and replaces an existing file. If the file cannot be
    written, the daemon is not stopped.
    """
    from purgatoryd.shm_layout.errors import CallTimeout, DaemonUnreachable
    from purgatoryd.shm_layout.paths import client_paths, paths_in

    if resume:
        return resume_drained(name, timeout, as_json)
    refuse_one_shard(name)
    paths = client_paths(name)
    table = table_of(name)
    if table is not None and export is not None:
        raise InvalidSetting("export", str(export), "left out with shards", "flag")
    names = [name] if table is None else table.daemons
    arenas = [header_view(paths_in(paths.directory, daemon).arena) for daemon in names]
    # If no arena header has the daemon's pid, take the process that listens on the socket.
    alone = arenas[0] if table is None else None
    pid = alone.pid if alone else listener_of(paths.cmd)
    try:
        process = os.pidfd_open(pid)  # opened before STOP, after which the pid may be reused
    except OSError:
        raise DaemonUnreachable(name, str(paths.admin), 0.0) from None
    with open(process, "rb"):
        if export is not None:
            try_export(paths, export)
        drained = drain_and_wait(paths, process, timeout) if drain else True
        paused = not drained and waits_for_paused(names)
        if not drain or not drained:
            try:
                stop_and_wait(paths.admin_endpoint, process, STOP_S if drain else timeout)
            except CallTimeout as error:
                unanswered = DaemonUnreachable(name, paths.admin_endpoint, error.waited_s)
                raise frozen(unanswered) or error from None
    armed = None if None in arenas else sum(arena.armed for arena in arenas if arena)
    for arena in filter(None, arenas):
        arena.close()
    left = f"{armed} armed" if armed is not None else "the arena file is missing"
    text = f"stopped {name}, process {pid}; {left}"
    if paused:
        text += "; the drain waited for due timers of paused topics"
    if export is not None:
        export_arena(paths, export)
    emit({"stopped": name, "pid": pid, "armed": armed}, text, as_json)
    # A drain does not wait for a crash-looping shard, which keeps its timers.
    return Exit.DONE if drained and not (drain and armed) else Exit.NEGATIVE


def header_view(arena: str) -> HeaderView | None:
    """Return a view of the arena header; None if the arena file was removed or another file has its
    name."""
    from purgatoryd.shm_layout.arena import HeaderView
    from purgatoryd.shm_layout.errors import ArenaMismatch, ArenaMissing, BadPath, OtherAbi

    try:
        return HeaderView(arena)
    except OtherAbi:
        raise
    except (ArenaMissing, ArenaMismatch, BadPath):
        return None


def listener_of(path: Path) -> int:
    """Return the pid of the process that listens on a socket; 0 if it is unknown."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.connect(str(path))
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return int(_UCRED.unpack(credentials)[0])
    return 0


def refuse_one_shard(name: str) -> None:
    """Raise InvalidSetting if a running deployment would restart this shard."""
    from purgatoryd.shm_layout.errors import DaemonUnreachable
    from purgatoryd.shm_layout.paths import client_paths
    from purgatoryd.shm_layout.shards import deployment_of

    deployment = deployment_of(name)
    with suppress(DaemonUnreachable):
        if deployment and listener_of(client_paths(deployment).cmd):
            bound = f"{deployment}; its shards stop together"
            raise InvalidSetting("name", name, bound, "flag")


def resume_drained(name: str, timeout_s: float, as_json: bool) -> int:
    """Cancel a drain. Raises DaemonUnreachable, and MessageRefused if this uid may not do so."""
    with clients.Admin(name, timeout=timeout_s) as admin:
        admin.resume()
    emit({"resumed": name}, f"resumed {name}", as_json)
    return Exit.DONE


def try_export(paths: Paths, file: Path) -> None:
    """Check, while the daemon still runs, that export_arena() will be possible.

    Raises BadPath if this user is not the daemon's user, WalUnwritable, and OtherAbi.
    """
    from purgatoryd.daemon import main, snapshot
    from purgatoryd.shm_layout.arena import Reader

    main.try_lock(paths)
    snapshot.try_export(file.absolute())
    Reader.attach(paths).close()


def export_arena(paths: Paths, file: Path) -> None:
    """Write the timers of a stopped daemon to a file. Raises AlreadyRunning, WalUnwritable."""
    from purgatoryd.daemon.main import name_lock
    from purgatoryd.daemon.snapshot import save_export
    from purgatoryd.shm_layout.arena import Reader

    with name_lock(paths), closing(Reader.attach(paths)) as reader:
        save_export(reader, file.absolute())


def waits_for_paused(names: Iterable[str]) -> bool:
    """Return whether the drain of one of the daemons waits for timers of paused topics."""
    from purgatoryd.cli.status import health_of
    from purgatoryd.shm_layout.health import FROZEN_NS
    from purgatoryd.shm_layout.layout import Degraded

    for name in names:
        with suppress(PurgatorydError):
            if Degraded.PAUSED in health_of(name, FROZEN_NS).why:
                return True
    return False


def drain_and_wait(paths: Paths, process: int, timeout_s: float) -> bool:
    """Drain the daemon and return True once `process`, a pidfd, has ended; False after `timeout_s`.

    KeyboardInterrupt cancels the drain.
    """
    from purgatoryd.shm_layout.errors import CallTimeout
    from purgatoryd.shm_layout.layout import FLAG_DRAIN

    try:
        stop_and_wait(paths.admin_endpoint, process, timeout_s, FLAG_DRAIN)
    except CallTimeout:
        return False
    except KeyboardInterrupt:
        with clients.Admin(paths.name, timeout=STOP_S) as admin:
            admin.resume()
        raise
    return True


def stop_and_wait(endpoint: str, process: int, timeout_s: float, flags: int = 0) -> None:
    """Send STOP and return when `process`, a pidfd, has ended.

    Does not wait for an answer, because the daemon may close its sockets before it sends one.
    Raises CallTimeout, and MessageRefused if this uid may not stop the daemon.
    """
    import zmq

    from purgatoryd.shm_layout import wire
    from purgatoryd.shm_layout.errors import CallTimeout
    from purgatoryd.shm_layout.layout import Message

    deadline_s = time.monotonic() + timeout_s
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send(wire.encode_frame(Message.STOP, flags=flags))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(process, zmq.POLLIN)
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready = dict(poller.poll(round(left_s * 1000)))
            if process in ready:
                return
            if socket in ready and (reply := wire.decode_reply(socket.recv())).error:
                raise reply.refusal()
    raise CallTimeout("stop", timeout_s)
