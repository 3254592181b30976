"""Predecessors of the arena of a WAL: the arenas that existed before the number of shards changed.

The arenas of a new shard generation start with the contents of their predecessors, and number their
records from 1. One small file next to the segments names the predecessors, because no other file of
the WAL names them. This file is written before the arena becomes valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from purgatoryd.shm_layout.errors import BadPath
from purgatoryd.shm_layout.files import replace_durably

FILE = "predecessors"


@dataclass(frozen=True, slots=True)
class Predecessors:
    """Predecessors of an arena.

    `upto`: for each predecessor, by its uuid in hex, the LSN of its last record that the new arenas
    contain; empty without predecessors. `shards`: number of new arenas that replaced them.
    """

    upto: Mapping[str, int] = field(default_factory=dict)
    shards: int = 0


def read_predecessors(directory: Path) -> Predecessors:
    """Read the predecessors from the WAL in `directory`. Raises BadPath if the file is invalid."""
    path = directory / FILE
    try:
        document = json.loads(path.read_bytes())
        upto = {bytes.fromhex(uuid).hex(): int(lsn) for uuid, lsn in document["upto"].items()}
        return Predecessors(upto, int(document["shards"]))
    except FileNotFoundError:
        return Predecessors()
    except OSError as error:
        raise BadPath(str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadPath(str(path), f"is not a list of predecessors: {error}") from error


def write_predecessors(directory: Path, predecessors: Predecessors) -> None:
    """Replace the file atomically and durably. Raises OSError."""
    replace_durably(directory / FILE, json.dumps(asdict(predecessors)).encode())
