"""A name on the command line may mean a deployment of shards: which daemons that are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from purgatoryd.shm_layout.shards import ShardTable


class Named(NamedTuple):
    """A daemon that a name means."""

    name: str
    record: dict[str, Any]
    """What tells it from others, in JSON: nothing for a daemon without shards."""


def table_of(name: str) -> ShardTable | None:
    """The routing table of the deployment `name`; None if that is no deployment.

    Raises InvalidName, TableBroken.
    """
    from purgatoryd.shm_layout.errors import DaemonUnreachable
    from purgatoryd.shm_layout.paths import client_paths, directories
    from purgatoryd.shm_layout.shards import read_table

    try:
        return read_table(client_paths(name).directory, name)
    except DaemonUnreachable:
        tables = (read_table(directory, name) for directory in directories())
        return next((table for table in tables if table is not None), None)


def daemons(name: str) -> Iterator[Named]:
    """The daemon of that name, or all shards of the deployment of that name."""
    table = table_of(name)
    if table is None:
        yield Named(name, {})
        return
    for shard, daemon in enumerate(table.daemons):
        yield Named(daemon, {"shard": shard})
