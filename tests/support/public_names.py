"""The names that users can type or read: `python tests/support/public_names.py` prints them.

tests/support/public_names.txt is the stored copy. A change of the interface shows in its diff.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click

import purgatoryd
from purgatoryd import clients
from purgatoryd.cli import exposition
from purgatoryd.cli.app import app
from purgatoryd.cli.settings import FLAG_OF
from purgatoryd.pipeline import schemas
from purgatoryd.shm_layout import errors, layout

NAMES = Path(__file__).with_suffix(".txt")
PACKAGES = ("shm_layout", "daemon", "daemon.listeners", "clients", "pipeline", "cli")


def public(cls: type) -> set[str]:
    """Return the public methods of a class."""
    return {
        name
        for name, member in inspect.getmembers(cls)
        if not name.startswith("_") and callable(member)
    }


def commands(command: click.Command, title: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield (words, command) of each command that has no subcommands."""
    if not isinstance(command, click.Group):
        yield title, command
        return
    with click.Context(command) as context:
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, f"{title} {name}".strip())


def options() -> Iterator[str]:
    for title, command in commands(app):
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield f"{title} {max(parameter.opts, key=len)}"


def metrics() -> Iterator[str]:
    for row in exposition.table().splitlines():
        if match := re.match(r"\| `(purgatoryd_\w+)` \|", row):
            yield match[1]


def members(name: str, value: object) -> Iterator[str]:
    """Yield the name of a class or function of the clients' API. For a class, also yield its
    members."""
    yield name
    if inspect.isclass(value) and not issubclass(value, BaseException):
        for member in sorted(vars(value)):
            if not member.startswith("_"):
                yield f"{name}.{member}"


def modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        parent = importlib.import_module(f"{purgatoryd.__name__}.{package}")
        for module in pkgutil.iter_modules(parent.__path__):
            if not module.name.startswith("_"):
                yield importlib.import_module(f"{parent.__name__}.{module.name}")


def classes() -> Iterator[str]:
    for module in modules():
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_":
                yield f"{module.__name__.partition('.')[2]}.{name}"


def values(kind: type[enum.IntEnum]) -> list[str]:
    return [f"{kind.__name__}.{member.name} = {member.value}" for member in kind]


def error_classes() -> Iterator[str]:
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, Exception) and name[0] != "_":
            yield name


def columns() -> Iterator[str]:
    for table in vars(schemas).values():
        if isinstance(table, schemas.Table):
            yield from (f"{table.name}.{column.name}" for column in table.columns)


def sections() -> dict[str, list[str]]:
    """Return all names, by kind."""
    return {
        "commands": [title for title, _ in commands(app)],
        "options": sorted(options()),
        "settings": sorted(FLAG_OF.values()),
        "error classes": sorted(error_classes()),
        "statuses": values(layout.Status),
        "errors of messages": values(layout.WireError),
        "metrics": sorted(metrics()),
        "columns": list(columns()),
        "clients": [
            line for name in sorted(clients.__all__)
            for line in members(name, getattr(clients, name))
        ],
        "classes": sorted(classes()),
    }  # fmt: skip


def text() -> str:
    """Return all names, one per line."""
    return "\n".join(
        f"## {kind}: {len(names)}\n" + "".join(f"{name}\n" for name in names)
        for kind, names in sections().items()
    )


def printed() -> str:
    """Return text() from a new process, because text() imports all modules, including PySpark."""
    return subprocess.run(
        [sys.executable, __file__], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def stored() -> dict[str, list[str]]:
    """Return the names of the stored copy, by kind."""
    names: dict[str, list[str]] = {}
    for section in NAMES.read_text().split("## ")[1:]:
        title, *lines = section.split("\n")
        names[title.rpartition(":")[0]] = [line for line in lines if line]
    return names


if __name__ == "__main__":
    print(text(), end="")
