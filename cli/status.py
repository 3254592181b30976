"""status: whether a daemon does its work, for people and for monitoring."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from purgatoryd.cli import units
from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.options import emit, frozen_option, json_option, name_option
from purgatoryd.cli.shards import daemons, directory_of

if TYPE_CHECKING:
    from pathlib import Path

    from purgatoryd.shm_layout.health import Health

# Condition of a daemon: exit code; another one is NEGATIVE: it serves, but not as it should.
_EXITS = {
    "ready": Exit.DONE,
    "frozen": Exit.TIMEOUT,
    "killed": Exit.NO_DAEMON,
    "stopped": Exit.NO_DAEMON,
}


@click.command("status", cls=Command)
@name_option
@frozen_option
@json_option
def status_command(name: str, frozen_ns: int, as_json: bool) -> int:
    """Say whether the daemon does its work, in one line.

    Reads the shared memory and does not need the daemon. Exit code 0: ready. 1: degraded,
    with the reasons, draining or recovering. 3: stopped, killed, or never there. 6: frozen: the
    process is there and its loop stands still, which is watched for two seconds first; each step
    of a start may take two minutes. Of a deployment, a line for the process that runs it, one for
    each shard, and 1 if they differ.
    """
    exits: set[int] = set()
    directory = directory_of(name)
    if directory is not None:
        exits |= show_deployment(directory, name, frozen_ns, as_json)
    for daemon in daemons(name):
        health = health_of(daemon.name, frozen_ns)
        shown = daemon.record | record(daemon.name, health)
        emit(shown, status_text(daemon.name, health, ", ".join(health.why.names)), as_json)
        exits.add(_EXITS.get(health.condition, Exit.NEGATIVE))
    return exits.pop() if len(exits) == 1 else Exit.NEGATIVE


def show_deployment(directory: Path, name: str, frozen_ns: int, as_json: bool) -> set[int]:
    """Shows how the process that runs the shards does; returns the exit code, none if it has
    reported nothing since the host began. Raises TableBroken.
    """
    from purgatoryd.shm_layout.health import look
    from purgatoryd.shm_layout.status_file import StatusFile

    file = StatusFile(directory, name)
    try:
        health, found = look(file, frozen_ns), file.header
    except FileNotFoundError:
        return set()
    names = "shards", "serving", "restarts", "log_dropped"
    figures = {name: getattr(found, name) for name in names}
    shown = record(name, health) | {"degraded_by": found.reasons} | figures
    emit(shown, status_text(name, health, "; ".join(found.reasons)), as_json)
    return {_EXITS.get(health.condition, Exit.NEGATIVE)}


def health_of(name: str, frozen_ns: int) -> Health:
    """How the daemon of that name does."""
    from purgatoryd.shm_layout.health import look
    from purgatoryd.shm_layout.paths import arena_paths
    from purgatoryd.shm_layout.status_file import DaemonStatus

    with closing(DaemonStatus(arena_paths(name))) as source:
        return look(source, frozen_ns)


def record(name: str, health: Health) -> dict[str, Any]:
    """The health in JSON."""
    return {
        "name": name,
        "condition": health.condition,
        "degraded_by": health.why.names,
        "pid": health.pid,
        "since_boot_ns": health.since_boot_ns,
        "still_ns": health.still_ns,
        "overdue_ns": health.overdue_ns,
    }


def status_text(name: str, health: Health, reasons: str) -> str:
    """The health for people."""
    parts = [f"{name}: {health.condition}"]
    if reasons and health.condition in ("degraded", "draining"):
        parts.append(f"by {reasons}")
    if health.pid:
        parts.append(f"process {health.pid}")
    parts.append(f"moved {units.format_duration(health.still_ns)} ago")
    if health.overdue_ns:
        parts.append(f"next deadline past by {units.format_duration(health.overdue_ns)}")
    return ", ".join(parts)
