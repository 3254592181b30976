"""Whose place the arena of a WAL took when the number of a deployment's shards changed.

All arenas of the new number began with what those before had, and count their records from 1 again:
nothing else in a WAL tells where its timers were. It stands in one small file next to the
segments, written before the arena counts.
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
    """`upto`: the uuids, in hex, of the arenas before, each with the last record (LSN) that counts
    in the new ones; empty = there were none. `shards`: how many took their place together."""

    upto: Mapping[str, int] = field(default_factory=dict)
    shards: int = 0


def read_predecessors(directory: Path) -> Predecessors:
    """Those of the WAL in `directory`. Raises BadPath if the file is not one of ours."""
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
        raise BadPath(str(path), f"does not tell predecessors: {error}") from error


def write_predecessors(directory: Path, predecessors: Predecessors) -> None:
    """Replaces the file, at once and durably. Raises OSError."""
    replace_durably(directory / FILE, json.dumps(asdict(predecessors)).encode())
