"""Generate docs/reference/cli.md from the help texts."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import indent

import click

from purgatoryd.cli.app import COMMANDS, app
from purgatoryd.cli.exits import help_table

_INTRO = """\
# The command line

Every command prints text for people, and with `--json` one JSON object per line.
[Errors](errors.md) lists errors and exit codes, [settings](settings.md) the settings of `purgatoryd
run`.

In JSON, `key` is the key as on the command line, and `key_type` is present unless it is `str`.
A payload is `payload` if it is UTF-8, else `payload_base64`.
"""

_COMPLETION = """\
## Completion

A shell completes commands, options, and names of daemons, namespaces and topics after this line:

| shell | line | file |
| --- | --- | --- |
| bash 4.4 or newer | `eval "$(_PURGATORYD_COMPLETE=bash_source purgatoryd)"` | `~/.bashrc` |
| zsh | `eval "$(_PURGATORYD_COMPLETE=zsh_source purgatoryd)"`, after `compinit` | `~/.zshrc` |
| fish | `_PURGATORYD_COMPLETE=fish_source purgatoryd \\| source` | `~/.config/fish/config.fish` |

Namespaces and topics are those of the daemon that `--name` gives earlier in the line.
"""

_DURATIONS = """\
## Durations

A duration, in options, environment variables and TOML files, is one or more numbers with units:
`100ms`, `1h30m`, `2w`.

| rule | refused |
| --- | --- |
| Units are ns, us, ms, s, m, h, d and w; every number has one. | `5`: write `5s` |
| The largest unit comes first, each at most once, without spaces. | `30m1h`, `1h 30m` |
| The last number may have a decimal point; the sum is in whole nanoseconds. | `0.5ns` |
| The shortest duration is `0s`, the longest 292 years. | `-5s` |
| `inf` and `never` mean no limit, for `--timeout` and `--idle` only. | `--delay inf` |

## Times

| time | meaning |
| --- | --- |
| `2026-01-31T12:00:00Z`, `2026-01-31T12:00+01:00` | ISO 8601 with an offset from UTC |
| `2026-01-31T12:00[Europe/Berlin]`, `2026-01-31 12:00 Europe/Berlin` | in this zone |
| `2026-01-31T12:00` | in the local zone |
| `now`, `in 2 hours`, `in 1h30m`, `3 days ago` | counted from the call |
| `tomorrow 9:00`, `next friday 6pm`, `3 april 2026 noon UTC` | in the local zone or the given one |

If a time has no zone or is free text, the command first prints on stderr how it understood the
time. It refuses a time that the zone's clock skips or shows twice, and text with several meanings,
such as `03/04/2026`, `tomorrow` and `tomorrow at 9`. `friday` is the next one; on a Friday, write
`today` or `next friday`. The setting `wall-origin` needs ISO 8601 with an offset or a zone.

Text output shows times as `in 2h 5m` or `3m ago`. A pipe, and a terminal of at least 120 columns,
also get the exact time. JSON has exact times in ISO 8601 and durations in nanoseconds. A
field whose name ends in `_boot_ns` has the time of the daemon's own clock, in nanoseconds.
"""

_DIRECTORY = """\
## Socket directory

`PURGATORYD_DIR`, if set, is the directory of sockets and locks, for daemons and clients.
Otherwise there are three: `/run/purgatoryd`, `$XDG_RUNTIME_DIR/purgatoryd` and
`/tmp/purgatoryd-UID`. A daemon uses the first one that it can write, a client the first one that
contains the daemon's command socket. `PURGATORYD_NAME` is the default of `--name`.
"""

_EXIT_CODES = indent(help_table().removeprefix("\b\n"), "  ") + "\n\n"
"""The exit codes in the help of the first command; this page refers to errors.md instead."""


def _help(command: click.Command, title: str) -> str:
    with click.Context(command, info_name=title, terminal_width=90, max_content_width=90) as ctx:
        shown = command.get_help(ctx).replace(_EXIT_CODES, "")
        return f"## {title}\n\n```text\n{shown}\n```\n"


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
    with click.Context(app) as ctx:
        commands = [(name, app.get_command(ctx, name)) for name in COMMANDS]
    return "\n".join(
        [
            _INTRO,
            _COMPLETION,
            _DURATIONS,
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
