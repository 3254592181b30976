"""Whether keys stand there twice, by their hashes.

Nearly every key stands there once. Grouped by Spark, each would be a row of a shuffle and a group
of its own; so its tasks hand on sorted arrays of hashes instead, one for each range of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame

RANGES = 64
"""A task holds one of them at a time: a sixty-fourth of eight bytes for each key."""
_BOUNDS = np.arange(1 - RANGES // 2, RANGES // 2) * (2**64 // RANGES)
"""Between the ranges of signed numbers of 64 bits."""


def suspected(keys: DataFrame, older: DataFrame) -> tuple[bool, bool]:
    """Whether a row of `keys` may stand there twice, and whether one may stand among `older`, too.

    "No" is certain; as two keys may have one hash, "yes" is to be looked into. Both have the same
    columns.
    """
    own, others = (_ranges(rows).groupBy("range") for rows in (keys, older))
    compared = own.cogroup(others).applyInArrow(_compared, "twice boolean, there boolean").collect()
    return any(row.twice for row in compared), any(row.there for row in compared)


def _ranges(rows: DataFrame) -> DataFrame:
    from pyspark.sql.functions import xxhash64

    hashes = rows.select(xxhash64(*rows.columns).alias("hash"))
    return hashes.mapInArrow(_split, "range int, hashes binary")


def _split(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    numbers = pa.array(np.arange(RANGES, dtype=np.int32))
    for batch in batches:
        hashes = np.sort(batch["hash"].to_numpy())
        parts = np.split(hashes, np.searchsorted(hashes, _BOUNDS))
        arrays = [numbers, pa.array([part.tobytes() for part in parts], pa.binary())]
        yield pa.RecordBatch.from_arrays(arrays, ["range", "hashes"])


def _compared(own: pa.Table, others: pa.Table) -> pa.Table:
    mine, theirs = _joined(own), _joined(others)
    twice = bool(np.any(mine[1:] == mine[:-1]))
    there = bool(np.isin(mine, theirs).any())
    return pa.table({"twice": [twice], "there": [there]})


def _joined(parts: pa.Table) -> NDArray[np.int64]:
    hashes = np.frombuffer(b"".join(parts["hashes"].to_pylist()), np.int64)
    return np.sort(hashes)
