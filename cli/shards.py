"""Find the daemons that a name on the command line means: one daemon, or the shards of a
deployment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from purgatoryd.shm_layout.shards import ShardTable


class Named(NamedTuple):
    """One of the daemons that a name on the command line means."""

    name: str
    record: dict[str, Any]
    """Fields for JSON that identify a shard; empty for a daemon without shards."""


def directory_of(name: str) -> Path | None:
    """Return the directory with the sockets and the routing table of the deployment `name`.

    None if `name` is not a deployment. Raises InvalidName.
    """
    from purgatoryd.shm_layout.errors import DaemonUnreachable
    from purgatoryd.shm_layout.paths import client_paths, directories
    from purgatoryd.shm_layout.shards import table_path

    try:
        places = [client_paths(name).directory]
    except DaemonUnreachable:
        places = list(directories())
    # not Path.exists(), which raises if this user may not look
    return next((place for place in places if os.path.exists(table_path(place, name))), None)


def table_of(name: str) -> ShardTable | None:
    """Return the routing table of the deployment `name`; None if it is not a deployment.

    Raises InvalidName, TableBroken.
    """
    from purgatoryd.shm_layout.shards import read_table

    directory = directory_of(name)
    return None if directory is None else read_table(directory, name)


def daemons(name: str, count: int = 0) -> Iterator[Named]:
    """Yield the daemon `name`, or all shards of the deployment `name`.

    `count`: yield the shards that a deployment with this number of shards would have; 0 = the
    actual shards.
    """
    from purgatoryd.shm_layout.shards import ShardTable

    table = table_of(name)
    if count and table is None:
        table = ShardTable(name, 1, 1, count)
    if count and table is not None and table.count != count:
        table = replace(table, shard_generation=table.shard_generation + 1, count=count)
    if table is None:
        yield Named(name, {})
        return
    for shard, daemon in enumerate(table.daemons):
        yield Named(daemon, {"shard": shard})
