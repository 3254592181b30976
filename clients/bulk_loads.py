"""Bulk loads: each row takes effect once, however often it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from purgatoryd.clients.arguments import check_whole
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import InvalidArgument
from purgatoryd.shm_layout.layout import BULK_LOAD_BLOCK_ROWS, BULK_LOAD_ROW_MAX, BulkLoadState

ID_BYTES = 16
_FENCING_TOKEN_MAX = 2**64 - 1
_LAST_BLOCK = 2**64 - 1


def check_bulk_load(bulk_load: Any, first_row: int, fencing_token: int) -> None:
    """Raise InvalidArgument unless the arguments are a valid id of a bulk load, row number and
    fencing token."""
    if not isinstance(bulk_load, bytes) or len(bulk_load) != ID_BYTES or not any(bulk_load):
        raise InvalidArgument(
            f"the id of a bulk load must be {ID_BYTES} bytes, not all zero, not {bulk_load!r}"
        )
    check_whole("row", first_row, 0, BULK_LOAD_ROW_MAX - 1)
    check_whole("fencing token", fencing_token, 0, _FENCING_TOKEN_MAX)


@dataclass(frozen=True, slots=True)
class BulkLoad:
    """The bulk load that the rows of a call belong to, and the number of the call's first row.

    `id`: 16 bytes of the caller's choice, such as the bytes of a UUID. `first_row`: number of the
    call's first row in the bulk load; the call's other rows follow it. `fencing_token`: number of
    this run of the bulk load. Once the daemon has seen a higher token, it refuses rows with a lower
    token as FENCED.

    Each row takes effect once, and is *done* from then on. If it is sent again, by any session and
    at any time, it gets the status BULK_LOADED and adds nothing. Raises InvalidArgument.
    """

    id: bytes
    first_row: int = 0
    fencing_token: int = 0

    def __post_init__(self) -> None:
        check_bulk_load(self.id, self.first_row, self.fencing_token)

    def rows_from(self, start: int) -> bytes:
        """Return the struct pg_rows of a batch that begins with row `start` of the call."""
        return wire.ROWS.pack(self.id, self.first_row + start, self.fencing_token)

    def check_rows(self, count: int) -> None:
        """Raise InvalidArgument if a bulk load cannot have `count` rows from `first_row` on."""
        if self.first_row + count > BULK_LOAD_ROW_MAX:
            raise InvalidArgument(
                f"{count} rows from row {self.first_row} on exceed {BULK_LOAD_ROW_MAX}, the "
                "number of rows that a bulk load can have"
            )


@dataclass(frozen=True, slots=True)
class BulkLoadStatus:
    """Progress of a bulk load.

    `rows`: number of rows that are done. `done`: the numbers of these rows, as ascending ranges
    that do not touch. In state NONE the daemon has no record of the bulk load: it never began, or
    it was forgotten.
    """

    id: bytes
    state: BulkLoadState
    fencing_token: int
    rows: int
    done: tuple[range, ...]

    def missing(self, first: int, upto: int) -> list[range]:
        """Return the rows of range(first, upto) that are not done, as a list of ranges."""
        holes, at = [], first
        for rows in self.done:
            if rows.start >= upto:
                break
            if rows.start > at:
                holes.append(range(at, rows.start))
            at = max(at, rows.stop)
        return [*holes, range(at, upto)] if at < upto else holes


class StatusParts:
    """Merges the answers to several STATUS messages."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytes] = {}
        self._last: wire.BulkLoadInfo | None = None
        self.start: int | None = 0
        """Number of the block to ask for next; None = all blocks have arrived."""

    def take(self, info: wire.BulkLoadInfo) -> None:
        """Add an answer."""
        self._blocks.update(info.parts)
        self._last = info
        self.start = None if info.next == _LAST_BLOCK else info.next

    @property
    def status(self) -> BulkLoadStatus:
        """The status according to all answers."""
        assert self._last is not None
        head, done = self._last, tuple(_joined(self._ranges()))
        return BulkLoadStatus(
            head.bulk_load, BulkLoadState(head.state), head.fencing_token, head.rows, done
        )

    def _ranges(self) -> Iterator[range]:
        for number, block in sorted(self._blocks.items()):
            for rows in _ones(int.from_bytes(block, "little")):
                yield range(
                    number * BULK_LOAD_BLOCK_ROWS + rows.start,
                    number * BULK_LOAD_BLOCK_ROWS + rows.stop,
                )


def _ones(bits: int) -> Iterator[range]:
    """Yield each run of 1 bits in a number as a range of bit numbers, lowest bits first."""
    at = 0
    while bits:
        zeros = (bits & -bits).bit_length() - 1
        bits >>= zeros
        ones = (~bits & (bits + 1)).bit_length() - 1
        bits >>= ones
        yield range(at + zeros, at + zeros + ones)
        at += zeros + ones


def _joined(ranges: Iterator[range]) -> Iterator[range]:
    """Yield ascending ranges. Ranges that touch are merged."""
    last: range | None = None
    for rows in ranges:
        if last is not None and last.stop == rows.start:
            last = range(last.start, rows.stop)
            continue
        if last is not None:
            yield last
        last = rows
    if last is not None:
        yield last
