"""The command install: install the units, the user and the directories of a daemon that systemd
runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import click

from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.options import emit, json_option
from purgatoryd.shm_layout.errors import BadPath, InvalidSetting, Unsupported
from purgatoryd.shm_layout.paths import check_name

# Path under --root, by name of the file in the package.
PLACES = {
    "purgatoryd.service": "etc/systemd/system/purgatoryd.service",
    "purgatoryd@.service": "etc/systemd/system/purgatoryd@.service",
    "purgatoryd-metrics@.service": "etc/systemd/system/purgatoryd-metrics@.service",
    "purgatoryd.sysusers.conf": "etc/sysusers.d/purgatoryd.conf",
    "purgatoryd.tmpfiles.conf": "etc/tmpfiles.d/purgatoryd.conf",
}
SETTINGS = "etc/purgatoryd"
"""Directory with a TOML file for each daemon. An existing file is kept."""
COMMAND = "/usr/bin/purgatoryd"
"""Path of the command in the packaged units. It is replaced by the path that --command gives."""
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Directories that the units hide from the daemon."""


@dataclass(frozen=True)
class File:
    """A file to write."""

    path: Path
    text: str


@click.command("install", cls=Command)
@click.option(
    "--root",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default="/",
    show_default=True,
    help="Root directory: /, or the root directory of an image.",
)
@click.option(
    "--command",
    type=click.Path(path_type=Path),
    help="Path of purgatoryd in the units; default: the path of this command.",
)
@click.option(
    "--enable",
    multiple=True,
    metavar="NAME",
    help='Start this daemon at boot; "default" is purgatoryd.service. May be repeated.',
)
@click.option("--dry-run", is_flag=True, help="Only print the files and the systemd commands.")
@json_option
def install_command(
    root: Path, command: Path | None, enable: tuple[str, ...], dry_run: bool, as_json: bool
) -> int:
    """Install the systemd units, their user and directories.

    Writes purgatoryd.service, purgatoryd@.service and purgatoryd-metrics@.service to
    /etc/systemd/system, and entries for sysusers.d and tmpfiles.d. Writes settings to
    /etc/purgatoryd/NAME.toml for "default" and each daemon of --enable, unless the file exists.
    Then systemd creates the user and the directories and reloads its units. The command starts
    nothing.
    """
    units = [unit_of(name) for name in enable]
    path = str(command or own_command())
    for file in (*unit_files(root, path), *new_settings(root, {"default", *enable})):
        emit({"file": str(file.path)}, f"write {file.path}", as_json)
        if not dry_run:
            write(file)
    for call in calls(root, units):
        emit({"call": call}, f"call {' '.join(call)}", as_json)
        if not dry_run:
            run(call)
    return Exit.DONE


def unit_of(name: str) -> str:
    """Return the name of a daemon's unit. Raises InvalidName."""
    return "purgatoryd.service" if check_name(name) == "default" else f"purgatoryd@{name}.service"


def own_command() -> Path:
    """Return the path of `purgatoryd` next to this Python interpreter. Raises Unsupported."""
    found = shutil.which("purgatoryd", path=str(Path(sys.executable).parent))
    if found is None:
        raise Unsupported(f"no purgatoryd next to {sys.executable}; give its path with --command")
    refuse_hidden(sys.base_prefix, "python")
    return Path(found)


def refuse_hidden(path: str, subject: str) -> None:
    """Raise InvalidSetting for a path in a directory that the units hide from the daemon."""
    if not Path(path).is_absolute() or any(map(Path(path).is_relative_to, HIDDEN)):
        bound = f"an absolute path outside of {', '.join(HIDDEN)}, which the units hide"
        raise InvalidSetting(subject, path, bound, "install")


def unit_files(root: Path, command: str) -> Iterator[File]:
    """Yield the files for systemd. Raises InvalidSetting if `command` is in a directory that the
    units hide from the daemon."""
    refuse_hidden(command, "command")
    for name, place in PLACES.items():
        yield File(root / place, packaged(name).replace(COMMAND, command))


def new_settings(root: Path, names: set[str]) -> Iterator[File]:
    """Yield a settings file for each of these daemons that has none."""
    for name in sorted(names):
        path = root / SETTINGS / f"{name}.toml"
        if not path.exists():
            yield File(path, packaged("default.toml"))


def packaged(name: str) -> str:
    """Return the text of a file of the package."""
    return files("purgatoryd.systemd").joinpath(name).read_text()


def write(file: File) -> None:
    """Write a file and create its directories. Raises BadPath."""
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(file.text)
        file.path.chmod(0o644)
    except OSError as error:
        raise BadPath(str(file.path), f"cannot be written: {error.strerror}") from error


def calls(root: Path, units: list[str]) -> Iterator[list[str]]:
    """Yield the systemd commands to call, in order."""
    here = root.resolve() == Path("/")
    at = [] if here else [f"--root={root}"]
    yield ["systemd-sysusers", *at, "purgatoryd.conf"]
    yield ["systemd-tmpfiles", *at, "--create", "purgatoryd.conf"]
    if here:
        yield ["systemctl", "daemon-reload"]
    if units:
        yield ["systemctl", *at, "enable", *units]


def run(call: list[str]) -> None:
    """Call a systemd command. Raises Unsupported."""
    try:
        done = subprocess.run(call, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Unsupported(f"{call[0]} not found; the command needs systemd") from None
    if done.returncode:
        raise Unsupported(f"{' '.join(call)}: {done.stderr.strip() or done.returncode}")
