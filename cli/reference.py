"""Generates docs/cli.md: `python -m purgatoryd.cli.reference > docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from purgatoryd.cli.app import COMMANDS, app
from purgatoryd.cli.exits import MEANING
from purgatoryd.cli.settings import FLAG_OF, variable

_INTRO = """\
# The command line

This page is generated from the help texts by `make docs`; a test fails if it is out of date.

Every command prints text, or with `--json` one JSON object per line. Errors go to stderr; with
`--json`, an error is one JSON object that contains the error's attributes.

In JSON, `key` is the key as on the command line, and `key_type` is present unless it is `str`.
A payload is `payload` if it is UTF-8, else `payload_base64`.
"""

_SETTINGS = """\
## Settings of the daemon

A flag of `purgatoryd run` overrides its environment variable, which overrides the TOML file of
`--config`, which overrides the default. An unknown name is an error in all three. `purgatoryd run
--print-config` prints the settings in effect, with their sources, as a TOML file.
"""

_DIRECTORY = """\
`PURGATORYD_DIR`, if set, is the directory of sockets and locks, for daemons and clients.
Otherwise there are three: `/run/purgatoryd`, `$XDG_RUNTIME_DIR/purgatoryd` and
`/tmp/purgatoryd-UID`. A daemon uses the first one that it can write, a client the first one that
contains the daemon's command socket. `PURGATORYD_NAME` is the default of `--name`.
"""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _help(command: click.Command, title: str) -> str:
    names = app.context_settings["help_option_names"]
    with click.Context(
        command, info_name=title, terminal_width=90, max_content_width=90, help_option_names=names
    ) as ctx:
        return f"## {title}\n\n```text\n{command.get_help(ctx)}\n```\n"


def _leaves(command: click.Command, title: str) -> Iterator[tuple[click.Command, str]]:
    if not isinstance(command, click.Group):
        yield command, title
        return
    with click.Context(command) as ctx:
        found = [(name, command.get_command(ctx, name)) for name in command.list_commands(ctx)]
    for name, one in found:
        if one:
            yield from _leaves(one, f"{title} {name}")


def text() -> str:
    """Return the page."""
    codes = [(str(code.value), meaning) for code, meaning in MEANING.items()]
    flags = [(f"`--{f}`", f"`{variable(f)}`", f"`{f}`") for f in ("name", *FLAG_OF.values())]
    with click.Context(app) as ctx:
        commands = [(name, app.get_command(ctx, name)) for name in COMMANDS]
    return "\n".join(
        [
            _INTRO,
            "## Exit codes\n",
            _table(("code", "meaning"), codes),
            _SETTINGS,
            _table(("flag", "environment", "TOML key"), flags),
            _DIRECTORY,
            _help(app, "purgatoryd"),
            *(
                _help(*shown)
                for name, command in commands
                if command
                for shown in _leaves(command, f"purgatoryd {name}")
            ),
        ]
    )


if __name__ == "__main__":
    click.echo(text(), nl=False)
