"""The command `purgatoryd`, and the module of each subcommand."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from traceback import format_exception
from typing import Any

import click

from purgatoryd import __version__
from purgatoryd.cli.exits import Exit, Group, help_table, say

# Module in purgatoryd.cli by command, in the order of --help.
COMMANDS = {
    "run": "service",
    "stop": "service",
    "add": "timers",
    "cancel": "timers",
    "get": "timers",
    "timers": "pending",
    "watch": "purgatory",
    "advance": "purgatory",
    "fail": "purgatory",
    "clear": "purgatory",
    "watermarks": "purgatory",
    "listen": "notices",
    "publish": "notices",
    "consume": "jobs",
    "groups": "groups",
    "dead": "groups",
    "status": "status",
    "list": "arena",
    "stats": "arena",
    "check": "arena",
    "top": "top",
    "web": "web",
    "metrics": "metrics",
    "size": "size",
    "placement": "placement",
    "namespace": "namespaces",
    "topic": "topics",
    "pause": "topics",
    "resume": "topics",
    "schedules": "schedules",
    "bulk-load": "bulk_loads",
    "cursor": "cursors",
    "session": "sessions",
    "keygen": "curve",
    "install": "install",
    "wal": "wal",
    "pipeline": "pipeline",
}


class Lazy(Group):
    """A click group that imports the module of a command only when the command is needed.

    `table`: module of purgatoryd.cli by command. The module defines the function COMMAND_command.
    """

    def __init__(self, *args: Any, table: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command named `cmd_name`; None if it does not exist, which click reports."""
        if cmd_name not in self.table:
            return None
        module = import_module(f"purgatoryd.cli.{self.table[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command


@click.group(
    cls=Lazy,
    table=COMMANDS,
    context_settings={"max_content_width": 100},
    help=f"""Timers for the processes of this host.

`purgatoryd run` starts a daemon, which keeps timers under keys. When a timer is due, each
listener of its topic receives a notice. Commands talk to the daemon that --name or
PURGATORYD_NAME gives, otherwise to "default". PURGATORYD_DIR is the directory of its sockets.

\b
  purgatoryd run &
  purgatoryd listen --topic orders --count 1 &
  purgatoryd add order:42 --delay 2s --topic orders --payload 'remind me'

{help_table()}""",
)
@click.version_option(__version__, prog_name="purgatoryd", message="%(prog)s %(version)s")
def app() -> None:
    """The help text in the decorator above replaces this docstring."""


def main() -> None:
    """Run the command line. An unexpected exception prints a traceback and ends with Exit.BUG.

    MemoryError is handled here because it may also occur in click, before or after a command.
    """
    try:
        app(prog_name="purgatoryd")
    except MemoryError:
        sys.stderr.write("purgatoryd: out of memory\n")
        sys.exit(Exit.UNUSABLE)
    except Exception as error:
        say("".join(format_exception(error)).rstrip())
        sys.exit(Exit.BUG)
