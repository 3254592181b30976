"""The command status."""

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

# Exit code by condition of a daemon; Exit.NEGATIVE for all other conditions.
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
    """Show the condition of the daemon in one line.

    Reads the shared memory without contacting the daemon. Exit codes:

    \b 0  ready 1  degraded, draining or recovering; the line gives the reasons 3  stopped, killed,
    or no such daemon 6  frozen: the process exists, but its loop stands still

    If a loop stands still, the command watches it for two seconds before reporting it as frozen.
    While a daemon starts, it is frozen only after two minutes without progress. For a deployment,
    the command prints a line for the supervisor process and a line for each shard; exit code 1
    means that their conditions differ.
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
    """Print the condition of a deployment's supervisor process. Return a set with the exit code for
    it.

    The set is empty if the process has reported nothing since the host booted. Raises TableBroken.
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
    """Return the health of the daemon `name`."""
    from purgatoryd.shm_layout.health import look
    from purgatoryd.shm_layout.paths import arena_paths
    from purgatoryd.shm_layout.status_file import DaemonStatus

    with closing(DaemonStatus(arena_paths(name))) as source:
        return look(source, frozen_ns)


def record(name: str, health: Health) -> dict[str, Any]:
    """Return a daemon's health for JSON."""
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
    """Return a daemon's health as a line of text."""
    parts = [f"{name}: {health.condition}"]
    if reasons and health.condition in ("degraded", "draining"):
        parts[0] += f" ({reasons})"
    if health.pid:
        parts.append(f"process {health.pid}")
    parts.append(f"last loop iteration {units.format_relative(-health.still_ns)}")
    if health.overdue_ns:
        parts.append(f"next deadline overdue by {units.format_duration(health.overdue_ns)}")
    return ", ".join(parts)
