"""run and stop: how a daemon begins and ends."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
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
from purgatoryd.shm_layout.errors import InvalidSetting

if TYPE_CHECKING:
    from purgatoryd.daemon.config import Config
    from purgatoryd.shm_layout.arena import HeaderView
    from purgatoryd.shm_layout.paths import Paths
    from purgatoryd.shm_layout.shards import ShardTable

STOP_S = 30.0
"""How long a daemon that did not drain in time may take to stop."""
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
    help="TOML file with settings, named as the flags are: payload-memory = '64M'.",
)
@click.option(
    "--import",
    "import_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Begin with what stop --export wrote; the arena must be empty.",
)
@click.option(
    "--force-wal",
    is_flag=True,
    help="Go on with what a damaged WAL holds before the damage; its files are set aside.",
)
@click.option(
    "--as-restored",
    is_flag=True,
    help="Start with a copy of a WAL, such as a restored backup. No daemon may use the original.",
)
@click.option("--shard", "shard", type=(click.INT, click.INT), hidden=True)
@click.option("--print-config", is_flag=True, help="Print the settings and their sources; stop.")
@json_option
@click.pass_context
def run_command(
    ctx: click.Context, /, name: str, import_path: Path | None, force_wal: bool,
    as_restored: bool, print_config: bool, as_json: bool, shard: tuple[int, int] | None,
    **values: Any,
) -> int:  # fmt: skip
    """Run the daemon in the foreground until SIGTERM or SIGINT.

    It prints one line that begins with "ready" once clients can reach it. A daemon that was
    stopped, or killed, finds its timers again when it is started under the same name.

    A setting comes from its flag, else from its environment variable (PURGATORYD_CAPACITY
    for --capacity and so on), else from the TOML file, else it has its default. An unknown
    one is an error.

    With --shards N it runs N daemons, NAME-1-0 and so on, and starts one that ended again; clients
    find the one they need by NAME.
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
    """The settings and their sources."""
    for flag, value, source in settings.effective(ctx, config):
        record = {"setting": flag, "value": value, "source": source}
        emit(record, f"{flag} = {json.dumps(value)}  # {source}", as_json)


def run_shards(
    ctx: click.Context, config: Config, import_path: Path | None, as_restored: bool
) -> None:
    """Runs a deployment. Its daemons get the same words, and behind them what they are."""
    from purgatoryd.daemon.deployment import serve_shards

    if import_path is not None:
        bound = "left out with shards: start without them first, then with them"
        raise InvalidSetting("import", str(import_path), bound, "flag")
    words = [sys.executable, "-m", "purgatoryd.cli", "run", *ctx.meta[ARGUMENTS]]

    def command(table: ShardTable, number: int) -> list[str]:
        which = "--shard", str(number), str(os.getpid())
        return [*words, "--name", table.daemon(number), *which]

    serve_shards(config, command, lambda: settings.read_again(ctx), as_restored=as_restored)


def run_shard(
    ctx: click.Context, config: Config, shard: tuple[int, int], force_wal: bool, as_restored: bool
) -> None:
    """Runs one daemon of a deployment, which ends with the process that started it."""
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
    help="Drain: refuse adds, and wait until nothing is armed. Keep, the default: stop at once.",
)
@click.option(
    "--resume", is_flag=True, help="Give up a drain: the daemon arms again, and goes on running."
)
@timeout_option
@click.option(
    "--export",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Then write all that it holds to this file, for run --import.",
)
@json_option
def stop_command(
    name: str, drain: bool, resume: bool, timeout: float, export: Path | None, as_json: bool
) -> int:
    """Stop the daemon cleanly, and return when its process has ended.

    What is armed stays in its arena; what comes due meanwhile fires when it is started again.
    Exit code 6 if the process still runs after --timeout seconds.

    With --drain nothing is armed any more, and the daemon ends once all that is armed has fired
    or was cancelled, and owners have acknowledged their outcomes. After --timeout seconds it
    ends all the same, and keeps the rest: exit code 1 then. Interrupted by SIGINT, the command
    gives the drain up; one that ended otherwise leaves it to --resume.

    --export is for the daemon's own uid, and replaces a FILE that is there. The daemon is not
    stopped for a file that could not be written.
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
    # the daemon may be of the version before
    alone = arenas[0] if table is None else None
    pid = alone.pid if alone else listener_of(paths.cmd)
    try:
        process = os.pidfd_open(pid)  # held before STOP: a pid alone may be somebody else's soon
    except OSError:
        raise DaemonUnreachable(name, str(paths.admin), 0.0) from None
    with open(process, "rb"):
        if export is not None:
            try_export(paths, export)
        drained = drain_and_wait(paths, process, timeout) if drain else True
        if not drain or not drained:
            try:
                stop_and_wait(paths.admin_endpoint, process, STOP_S if drain else timeout)
            except CallTimeout as error:
                unanswered = DaemonUnreachable(name, paths.admin_endpoint, error.waited_s)
                raise frozen(unanswered) or error from None
    armed = None if None in arenas else sum(arena.armed for arena in arenas if arena)
    for arena in filter(None, arenas):
        arena.close()
    left = f"{armed} armed" if armed is not None else "the arena file was gone"
    text = f"stopped {name}, process {pid}; {left}"
    if export is not None:
        export_arena(paths, export)
    emit({"stopped": name, "pid": pid, "armed": armed}, text, as_json)
    # a crash-looping shard keeps what it has
    return Exit.DONE if drained and not (drain and armed) else Exit.NEGATIVE


def header_view(arena: str) -> HeaderView | None:
    """Return the header view; None if the arena file was removed or another file has its name."""
    from purgatoryd.shm_layout.arena import HeaderView
    from purgatoryd.shm_layout.errors import ArenaMismatch, ArenaMissing, BadPath, OtherAbi

    try:
        return HeaderView(arena)
    except OtherAbi:
        raise
    except (ArenaMissing, ArenaMismatch, BadPath):
        return None


def listener_of(path: Path) -> int:
    """The process that listens at a socket; 0 if none does, or this user may not know."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.connect(str(path))
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return int(_UCRED.unpack(credentials)[0])
    return 0


def refuse_one_shard(name: str) -> None:
    """Raises InvalidSetting if a deployment runs that would start this shard again."""
    from purgatoryd.shm_layout.errors import DaemonUnreachable
    from purgatoryd.shm_layout.paths import client_paths
    from purgatoryd.shm_layout.shards import deployment_of

    deployment = deployment_of(name)
    with suppress(DaemonUnreachable):
        if deployment and listener_of(client_paths(deployment).cmd):
            bound = f"{deployment}: its shards end together"
            raise InvalidSetting("name", name, bound, "flag")


def resume_drained(name: str, timeout_s: float, as_json: bool) -> int:
    """Has the daemon arm again. Raises DaemonUnreachable, MessageRefused if this uid may not."""
    with clients.Admin(name, timeout=timeout_s) as admin:
        admin.resume()
    emit({"resumed": name}, f"{name} goes on", as_json)
    return Exit.DONE


def try_export(paths: Paths, file: Path) -> None:
    """What export_arena will need, tried while the daemon still runs.

    Raises BadPath if this user is not the daemon's, WalUnwritable, and OtherAbi.
    """
    from purgatoryd.daemon import main, snapshot
    from purgatoryd.shm_layout.arena import Reader

    main.try_lock(paths)
    snapshot.try_export(file.absolute())
    Reader.attach(paths).close()


def export_arena(paths: Paths, file: Path) -> None:
    """Writes what a stopped daemon left. Raises AlreadyRunning, WalUnwritable."""
    from purgatoryd.daemon.main import name_lock
    from purgatoryd.daemon.snapshot import save_export
    from purgatoryd.shm_layout.arena import Reader

    with name_lock(paths), closing(Reader.attach(paths)) as reader:
        save_export(reader, file.absolute())


def drain_and_wait(paths: Paths, process: int, timeout_s: float) -> bool:
    """Sends STOP with the wish to drain; False if `process` still runs after `timeout_s`.

    Who does not wait any more gives the drain up.
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
    """Sends STOP and returns when `process`, a pidfd, has ended.

    The end counts, not the answer: that may be lost as the daemon closes its sockets. Raises
    CallTimeout, and MessageRefused if this uid may not stop the daemon.
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
