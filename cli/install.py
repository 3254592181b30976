"""install: units, user and folders of a daemon that systemd runs."""

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

# File of the package: where it goes.
PLACES = {
    "purgatoryd.service": "etc/systemd/system/purgatoryd.service",
    "purgatoryd@.service": "etc/systemd/system/purgatoryd@.service",
    "purgatoryd-metrics@.service": "etc/systemd/system/purgatoryd-metrics@.service",
    "purgatoryd.sysusers.conf": "etc/sysusers.d/purgatoryd.conf",
    "purgatoryd.tmpfiles.conf": "etc/tmpfiles.d/purgatoryd.conf",
}
SETTINGS = "etc/purgatoryd"
"""Where each daemon's settings are; who installs again keeps them."""
COMMAND = "/usr/bin/purgatoryd"
"""As the units name it, before the place of ours takes its place."""
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""What the units do not see."""


@dataclass(frozen=True)
class File:
    """One file to be written."""

    path: Path
    text: str


@click.command("install", cls=Command)
@click.option(
    "--root",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default="/",
    show_default=True,
    help="Folder to install into: another one is the root of an image.",
)
@click.option(
    "--command",
    type=click.Path(path_type=Path),
    help="Where the unit finds purgatoryd; the one that runs now, unless said.",
)
@click.option(
    "--enable",
    multiple=True,
    metavar="NAME",
    help='Have this daemon started at boot; "default" is purgatoryd.service. May be repeated.',
)
@click.option("--dry-run", is_flag=True, help="Only print what would be written and called.")
@json_option
def install_command(
    root: Path, command: Path | None, enable: tuple[str, ...], dry_run: bool, as_json: bool
) -> int:
    """Install the units for systemd, and the user and folders that they need.

    Writes purgatoryd.service, purgatoryd@.service and purgatoryd-metrics@.service to
    /etc/systemd/system, entries for sysusers.d and tmpfiles.d, and settings in
    /etc/purgatoryd/NAME.toml for "default" and what is enabled, unless they are there. Then it
    has systemd make the user and the folders, and read its units again. Nothing is started.
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
    """The unit of the daemon `name`. Raises InvalidName."""
    return "purgatoryd.service" if check_name(name) == "default" else f"purgatoryd@{name}.service"


def own_command() -> Path:
    """The command next to the Python that runs. Raises Unsupported."""
    found = shutil.which("purgatoryd", path=str(Path(sys.executable).parent))
    if found is None:
        raise Unsupported(
            f"no command purgatoryd is next to {sys.executable}: name it by --command"
        )
    refuse_hidden(sys.base_prefix, "python")
    return Path(found)


def refuse_hidden(path: str, subject: str) -> None:
    """Raises InvalidSetting for a path that the units do not see."""
    if not Path(path).is_absolute() or any(map(Path(path).is_relative_to, HIDDEN)):
        bound = f"an absolute path outside of {', '.join(HIDDEN)}, which the units do not see"
        raise InvalidSetting(subject, path, bound, "install")


def unit_files(root: Path, command: str) -> Iterator[File]:
    """What systemd reads. Raises InvalidSetting for a command that the units would not see."""
    refuse_hidden(command, "command")
    for name, place in PLACES.items():
        yield File(root / place, packaged(name).replace(COMMAND, command))


def new_settings(root: Path, names: set[str]) -> Iterator[File]:
    """Settings of the daemons that have none yet."""
    for name in sorted(names):
        path = root / SETTINGS / f"{name}.toml"
        if not path.exists():
            yield File(path, packaged("default.toml"))


def packaged(name: str) -> str:
    """A file that the package carries."""
    return files("purgatoryd.systemd").joinpath(name).read_text()


def write(file: File) -> None:
    """Writes a file and its folders. Raises BadPath."""
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(file.text)
        file.path.chmod(0o644)
    except OSError as error:
        raise BadPath(str(file.path), f"cannot be written: {error.strerror}") from error


def calls(root: Path, units: list[str]) -> Iterator[list[str]]:
    """Commands of systemd, in their order."""
    here = root.resolve() == Path("/")
    at = [] if here else [f"--root={root}"]
    yield ["systemd-sysusers", *at, "purgatoryd.conf"]
    yield ["systemd-tmpfiles", *at, "--create", "purgatoryd.conf"]
    if here:
        yield ["systemctl", "daemon-reload"]
    if units:
        yield ["systemctl", *at, "enable", *units]


def run(call: list[str]) -> None:
    """Calls a command of systemd. Raises Unsupported."""
    try:
        done = subprocess.run(call, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Unsupported(f"{call[0]} is not there: systemd is needed") from None
    if done.returncode:
        raise Unsupported(f"{' '.join(call)}: {done.stderr.strip() or done.returncode}")
