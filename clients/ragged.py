"""Ragged columns: byte strings of different lengths in one block of memory.

watch_columns.py packs keys and payloads in this form, without a loop over the rows. This module
needs numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from purgatoryd.clients.columns import payload_buffers, text_buffers
from purgatoryd.clients.packing import BATCH_BYTES
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import InvalidKey, InvalidPayload

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


class Ragged(NamedTuple):
    """n byte strings. String i is data[offsets[i]:offsets[i + 1]]."""

    data: Array
    offsets: Array

    @property
    def lengths(self) -> Array:
        """Number of bytes of each string."""
        return np.diff(self.offsets)

    def strings(self) -> list[bytes]:
        """Return all strings."""
        data, offsets = self.data.tobytes(), self.offsets.tolist()
        return [data[start:stop] for start, stop in pairwise(offsets)]

    def cut(self, rows: slice) -> Ragged:
        """Return the strings of a slice of rows, with offsets that start at 0."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        return Ragged(self.data[offsets[0] : offsets[-1]], offsets - offsets[0])


def key_column(column: Any) -> tuple[Ragged, Array]:
    """Return the bytes of the keys, and the KeyType of each. Raises InvalidKey."""
    texts = text_buffers(column)
    if not isinstance(texts, tuple):
        pairs = [wire.encode_key(key) for key in texts or ()]
        return _joined([data for _, data in pairs]), np.array([kind for kind, _ in pairs], "u1")
    ragged, lengths = _ragged(len(column), *texts)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= layout.KEY_MAX:
        worst = int(lengths.max() if lengths.min() else 0)
        raise InvalidKey("is too long" if worst else "is empty", worst, layout.KEY_MAX)
    return ragged, np.full(len(lengths), texts[4], "u1")


def payload_column(column: Any) -> Ragged:
    """Return the payloads. Raises InvalidPayload."""
    texts = payload_buffers(column)
    if not isinstance(texts, tuple):
        return _joined([b"" if row is None else wire.encode_payload(row) for row in texts or ()])
    ragged, lengths = _ragged(len(column), *texts)
    longest = int(lengths.max(initial=0))
    if longest > layout.PAYLOAD_MAX:
        raise InvalidPayload("is too long", longest, layout.PAYLOAD_MAX)
    return ragged


def _ragged(
    rows: int, letter: str, data: Array, offsets: Any, first: int, _: int
) -> tuple[Ragged, Array]:
    """Return (strings, their lengths) of a column as text_buffers() returns it."""
    if letter in ("S", "U"):
        ragged = _fixed(np.char.encode(data, "utf-8") if letter == "U" else data)
    else:
        ends = offsets[first : first + rows + 1].astype("i8")
        ragged = Ragged(data[ends[0] : ends[-1]], ends - ends[0])
    return ragged, ragged.lengths


def _fixed(column: Array) -> Ragged:
    """Return fixed-width strings without their trailing NULs, which numpy drops as padding."""
    width = column.dtype.itemsize
    lengths = np.char.str_len(column).astype("i8")
    cells = np.ascontiguousarray(column).view("u1").reshape(len(column), width)
    return Ragged(cells[np.arange(width) < lengths[:, None]], offsets_of(lengths))


def _joined(strings: list[bytes]) -> Ragged:
    lengths = np.fromiter(map(len, strings), "i8", len(strings))
    return Ragged(np.frombuffer(b"".join(strings), "u1"), offsets_of(lengths))


def offsets_of(lengths: Array) -> Array:
    """Return the offsets of strings with these lengths."""
    return np.concatenate((np.zeros(1, "i8"), np.cumsum(lengths)))


def empty_column(rows: int) -> Ragged:
    """Return a column of empty strings."""
    return Ragged(np.empty(0, "u1"), np.zeros(rows + 1, "i8"))


def cuts(sizes: Array, codes: Array) -> Iterator[tuple[slice, Array, Array]]:
    """Cut rows into batches; `sizes`: bytes of each row, `codes`: name of each row.

    Yields for each batch: its rows, the codes of its names, and the index of each row's name among
    them.
    """
    ends = np.concatenate(([0], np.cumsum(sizes)))
    start, rows = 0, len(sizes)
    while start < rows:
        fits = int(np.searchsorted(ends, ends[start] + BATCH_BYTES, "right")) - 1
        stop = min(rows, start + layout.BATCH_RECORDS, max(fits, start + 1))
        used, places = np.unique(codes[start:stop], return_inverse=True)
        while len(used) > layout.BATCH_NAMES:
            stop = (start + stop) // 2
            used, places = np.unique(codes[start:stop], return_inverse=True)
        yield slice(start, stop), used, places
        start = stop
