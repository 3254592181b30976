"""A name on the command line may mean a deployment of shards: which daemons that are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from purgatoryd.shm_layout.shards import ShardTable


class Named(NamedTuple):
    """A daemon that a name means."""

    name: str
    record: dict[str, Any]
    """What tells it from others, in JSON: nothing for a daemon without shards."""


def directory_of(name: str) -> Path | None:
    """Where the sockets and the routing table of the deployment `name` are; None if that is no
    deployment. Raises InvalidName."""
    from purgatoryd.shm_layout.errors import DaemonUnreachable
    from purgatoryd.shm_layout.paths import client_paths, directories
    from purgatoryd.shm_layout.shards import table_path

    try:
        places = [client_paths(name).directory]
    except DaemonUnreachable:
        places = list(directories())
    # who may not look there finds none
    return next((place for place in places if os.path.exists(table_path(place, name))), None)


def table_of(name: str) -> ShardTable | None:
    """The routing table of the deployment `name`; None if that is no deployment.

    Raises InvalidName, TableBroken.
    """
    from purgatoryd.shm_layout.shards import read_table

    directory = directory_of(name)
    return None if directory is None else read_table(directory, name)


def daemons(name: str, count: int = 0) -> Iterator[Named]:
    """The daemon of that name, or all shards of the deployment of that name. `count`: as a start
    with so many shards would have them; 0 = as they are."""
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
