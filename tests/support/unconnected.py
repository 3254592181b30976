"""The core of a client, without a daemon."""

from __future__ import annotations

from typing import Any

from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import Core


def connection_of(*arguments: Any, **settings: Any) -> Connection:
    """Return the only connection of a new core. The channel of the connection is not open."""
    return with_partitions(1, *arguments, **settings).connections[0]


def with_partitions(count: int, *arguments: Any, **settings: Any) -> Core:
    """Return a core of a namespace with `count` partitions."""
    core = Core(*arguments, **settings)
    core.connections = [core._connection(number) for number in range(count)]
    return core
