"""The routing table of a deployment: the shards of each namespace.

A deployment of COUNT shards consists of COUNT daemons, each with its own arena and sockets. Its
shard generation changes only when COUNT changes. The shard generation is part of the daemons'
names, so daemons of two shard generations never use the same arena. The first shard generation
replaces a daemon without shards, which has the deployment's name.

The table is one small file that is replaced as a whole. The supervisor is its only writer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.digests import blake2b
from purgatoryd.shm_layout.errors import InvalidName, PermissionDenied, TableBroken
from purgatoryd.shm_layout.files import write_durably
from purgatoryd.shm_layout.layout import is_reserved
from purgatoryd.shm_layout.paths import NAME_BYTES_MAX, SHARDS_MAX

SCHEMA = 1
ALONE = 0
"""Shard generation of a daemon without shards, which has no table."""
PARTITIONS_MAX = 1024
MODE = 0o640
"""Mode of the file. Clients in the daemon's Unix group can read it, as they can use the sockets."""

_DAEMON = re.compile(r"(.+)-([0-9]+)-([0-9]+)")
"""Pattern of the names that ShardTable.daemon() returns for shards."""


def deployment_of(daemon: str) -> str | None:
    """Return the name of the deployment that has a shard of this name; None if the name is not the
    name of a shard."""
    found = _DAEMON.fullmatch(daemon)
    return found[1] if found else None


def refuse_shard_name(name: str) -> None:
    """Raise InvalidName for the name of a shard.

    Such names are reserved for deployments. A deployment removes old files with these names.
    """
    if deployment_of(name) is not None:
        reason = "ends in -N-N, as only names of shards do"
        raise InvalidName("daemon", name, reason, len(name), NAME_BYTES_MAX)


@dataclass(frozen=True)
class Placement:
    """Shard of each partition of a namespace; an unpartitioned namespace has one partition."""

    namespace: str
    shards: tuple[int, ...]
    uid: int = -1
    """Uid whose message created the namespace; -1 = no message created it."""

    @property
    def partitions(self) -> int:
        """Number of partitions of the namespace."""
        return len(self.shards)

    def partition_of(self, key: bytes) -> int:
        """Return the partition of a key. `key`: the bytes without the type."""
        return int(lib.pg_partition(key, len(key), len(self.shards)))


@dataclass(frozen=True)
class ShardTable:
    """The shards of the deployment `name`, and the namespaces that were created in it."""

    name: str
    version: int
    """Version number, which grows with every change."""
    shard_generation: int
    count: int
    placements: Mapping[str, Placement] = field(default_factory=dict)

    def daemon(self, shard: int) -> str:
        """Return the name of the daemon that runs `shard`."""
        if self.shard_generation == ALONE:
            return self.name
        return f"{self.name}-{self.shard_generation}-{shard}"

    @property
    def daemons(self) -> list[str]:
        """The names of all daemons of the deployment, in the order of their shards."""
        return [self.daemon(shard) for shard in range(self.count)]

    def place(self, namespace: str, partitions: int = 1) -> Placement:
        """Return the placement of `namespace`, or, if the namespace does not exist, the placement
        that it would get with `partitions` partitions.

        A hash of the names distributes namespaces over the shards. The partitions of one namespace
        are on as many shards as possible.
        """
        if namespace in self.placements:
            return self.placements[namespace]
        if is_reserved(namespace):
            return Placement(namespace, tuple(range(self.count)))
        ranked = sorted(range(self.count), key=lambda shard: _weight(namespace, shard))
        return Placement(namespace, tuple(ranked[p % self.count] for p in range(partitions)))

    def knows(self, namespace: str) -> bool:
        """Return whether `namespace` exists, or is a namespace of the daemons themselves."""
        return namespace in self.placements or is_reserved(namespace)

    def shard_of_key(self, namespace: str, key: bytes) -> int:
        """Return the shard of a key in `namespace`. `key`: the bytes without the type."""
        placement = self.place(namespace)
        return placement.shards[placement.partition_of(key)]

    def with_birth(self, placement: Placement) -> ShardTable:
        """Return the next version of the table, with one more namespace."""
        placements = {**self.placements, placement.namespace: placement}
        return replace(self, version=self.version + 1, placements=placements)

    def namespaces_of(self, shard: int) -> list[str]:
        """Return the namespaces of which `shard` holds all or some partitions."""
        return [name for name, found in self.placements.items() if shard in found.shards]

    def created_in(self, shard: int, uid: int) -> int:
        """Return the number of namespaces of `shard` that messages of `uid` created."""
        return sum(f.uid == uid and shard in f.shards for f in self.placements.values())


def alone(name: str) -> ShardTable:
    """Return the table of a daemon without shards, as if it were the only shard of a deployment."""
    return ShardTable(name, 0, ALONE, 1)


def _weight(namespace: str, shard: int) -> bytes:
    """Return the weight of a shard for a namespace. This is rendezvous hashing: if the number of
    shards changes, few namespaces move to another shard."""
    return blake2b(f"{shard} {namespace}".encode(), 8)


# ---- the file -----------------------------------------------------------------------------------


def shard_generations_behind(wal: Path) -> int:
    """Return the number of shard generations that followed the shard generation of a daemon.

    `wal`: WAL_DIR/NAME of the daemon. 0 = the daemon belongs to the newest shard generation, or to
    no deployment; negative = its shard generation is not valid yet. Raises TableBroken.
    """
    found = _DAEMON.fullmatch(wal.name)
    name, shard_generation = (found[1], int(found[2])) if found else (wal.name, ALONE)
    counts = _shard_generation(wal.parent, name)
    return 0 if counts is None else counts - shard_generation


def wals_of(wal_dir: Path, deployment: str) -> list[Path]:
    """Return the WAL folders of a deployment, oldest first.

    They include the folders of earlier shard generations, and the folder of the daemon without
    shards that preceded them. Raises TableBroken.
    """
    folders = {
        (int(found[2]), int(found[3])): path
        for path in wal_dir.glob(f"{deployment}-*/")
        if (found := _DAEMON.fullmatch(path.name)) and found[1] == deployment
    }
    if folders and (lone := wal_dir / deployment).is_dir():
        folders[ALONE, 0] = lone
    counts = _shard_generation(wal_dir, deployment)
    return [path for at, path in sorted(folders.items()) if counts is None or at[0] <= counts]


def _shard_generation(wal_dir: Path, name: str) -> int | None:
    """Return the valid shard generation, from the folder of the WALs. Return None if the folder has
    neither a table nor a WAL of this name."""
    if table := read_table(wal_dir, name):
        return table.shard_generation
    return ALONE if (wal_dir / name).is_dir() else None


def table_path(directory: Path, name: str) -> Path:
    """Return the path of the deployment's table. `directory`: the directory of its sockets, or the
    folder of its WALs."""
    return directory / f"{name}.shards"


def read_table(directory: Path, name: str) -> ShardTable | None:
    """Read the table of the deployment `name`; None if there is none.

    Raises TableBroken, PermissionDenied.
    """
    path = table_path(directory, name)
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise PermissionDenied(str(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TableBroken(str(path), str(error)) from error
    return _decoded(path, name, text)


def write_table(directory: Path, table: ShardTable) -> None:
    """Replace the table atomically and durably. Raises OSError."""
    content = _encoded(table)

    def write(file: BinaryIO) -> str:
        os.fchmod(file.fileno(), MODE)
        file.write(content)
        return path.name

    path = table_path(directory, table.name)
    write_durably(path.with_name(f"{path.name}.new"), write)


def _encoded(table: ShardTable) -> bytes:
    record = {
        "schema": SCHEMA,
        "name": table.name,
        "version": table.version,
        "shard_generation": table.shard_generation,
        "count": table.count,
        "placements": {name: found.shards for name, found in table.placements.items()},
        "created_uids": {n: found.uid for n, found in table.placements.items() if found.uid >= 0},
    }
    return json.dumps(record, indent=1).encode() + b"\n"


def _decoded(path: Path, name: str, text: str) -> ShardTable:
    try:
        record = json.loads(text)
        if record["schema"] != SCHEMA:
            raise TableBroken(str(path), f"has schema {record['schema']}, not {SCHEMA}")
        table = _table(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableBroken(str(path), f"is no routing table: {error!r}") from error
    _check(path, name, table)
    return table


def _table(record: Any) -> ShardTable:
    uids = record.get("created_uids", {})
    placements = {
        name: Placement(name, tuple(map(int, shards)), int(uids.get(name, -1)))
        for name, shards in record["placements"].items()
    }
    version, shard_generation, count = (
        int(record[n]) for n in ("version", "shard_generation", "count")
    )
    return ShardTable(str(record["name"]), version, shard_generation, count, placements)


def _check(path: Path, name: str, table: ShardTable) -> None:
    if table.name != name:
        raise TableBroken(str(path), f"is the table of {table.name!r}")
    if not 1 <= table.count <= SHARDS_MAX or table.shard_generation < 1 or table.version < 1:
        raise TableBroken(
            str(path), f"has {table.count} shards of generation {table.shard_generation}"
        )
    for placement in table.placements.values():
        if not placement.shards or not all(0 <= s < table.count for s in placement.shards):
            raise TableBroken(
                str(path), f"places {placement.namespace!r} in {list(placement.shards)}"
            )
