"""Complete names of daemons, namespaces and topics in a shell.

The functions read directories and arenas, and contact no daemon. A shell shows no errors while it
completes a word, so an unreadable arena has no names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from purgatoryd.shm_layout.arena import Reader

_ENDINGS = (".cmd", ".shards")
"""Endings of files that a running daemon or a deployment has in its directory."""


def daemon_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of running daemons and deployments that begin with `incomplete`."""
    from purgatoryd.shm_layout.paths import directories

    names = set()
    for directory in directories():
        with suppress(OSError):
            names |= {os.path.splitext(n)[0] for n in os.listdir(directory) if n.endswith(_ENDINGS)}
    return sorted(name for name in names if name.startswith(incomplete))


def namespace_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the namespaces of the daemon that --name gives."""
    found = {one.name for reader in _readers(ctx) for one in reader.namespaces_of_users()}
    return sorted(name for name in found if name.startswith(incomplete))


def topic_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the topics in the namespace that --namespace gives, of the daemon that --name
    gives."""
    namespace, found = ctx.params.get("namespace") or "default", set()
    for reader in _readers(ctx):
        names = reader.namespaces()
        found |= {t.name for t in reader.topics() if names[t.namespace_row].name == namespace}
    return sorted(name for name in found if name.startswith(incomplete))


def _readers(ctx: click.Context) -> Iterator[Reader]:
    """Yield the readable arenas of the daemon or of its shards, each until the next one."""
    from purgatoryd.cli.arena import reading
    from purgatoryd.cli.shards import daemons
    from purgatoryd.shm_layout.errors import PurgatorydError

    with suppress(PurgatorydError, OSError):
        for daemon in daemons(ctx.params.get("name") or "default"):
            with suppress(PurgatorydError, OSError), reading(daemon.name) as reader:
                yield reader
