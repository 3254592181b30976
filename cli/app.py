"""The command group: names, common options, and which file holds which command."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from traceback import format_exception
from typing import Any

import click

from purgatoryd import __version__
from purgatoryd.cli.exits import Exit, help_table, say

# command: module of purgatoryd.cli; in the order of --help
COMMANDS = {
    "run": "service",
    "stop": "service",
    "add": "timers",
    "cancel": "timers",
    "get": "timers",
    "watch": "purgatory",
    "advance": "purgatory",
    "fail": "purgatory",
    "clear": "purgatory",
    "watermarks": "purgatory",
    "listen": "notices",
    "publish": "notices",
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
    "bulk-load": "bulk_loads",
    "session": "sessions",
    "keygen": "curve",
    "install": "install",
    "wal": "wal",
    "pipeline": "pipeline",
}


class Lazy(click.Group):
    """Imports the module of a command when the command is asked for.

    `table` names, for each command, the module of purgatoryd.cli that holds COMMAND_command.
    """

    def __init__(self, *args: Any, table: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; None lets click say that there is none."""
        if cmd_name not in self.table:
            return None
        module = import_module(f"purgatoryd.cli.{self.table[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command


@click.group(
    cls=Lazy,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help=f"""Timers for the processes of this host.

A daemon, started by `purgatoryd run`, holds timers under keys. When one is due, everybody
who listens to its topic receives a notice. Without --name all commands mean the daemon
"default"; $PURGATORYD_NAME names another, $PURGATORYD_DIR says in which directory it is.

\b
  purgatoryd run &
  purgatoryd listen --topic orders --count 1 &
  purgatoryd add order:42 --delay 2s --topic orders --payload 'remind me'

{help_table()}""",
)
@click.version_option(__version__, prog_name="purgatoryd", message="%(prog)s %(version)s")
def app() -> None:
    """Replaced by the help text above."""


def main() -> None:
    """Entry point; a bug in purgatoryd ends with a traceback and its own exit code.

    Memory may also run out in click, before or after a command.
    """
    try:
        app(prog_name="purgatoryd")
    except MemoryError:
        sys.stderr.write("purgatoryd: out of memory\n")
        sys.exit(Exit.UNUSABLE)
    except Exception as error:
        say("".join(format_exception(error)).rstrip())
        sys.exit(Exit.BUG)
