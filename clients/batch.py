"""Batches of calls, as the session sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import DaemonError
from purgatoryd.shm_layout.layout import Message


class Partial(NamedTuple):
    """Results of a batch that lacks some: those have the status NONE. `error` is the reason."""

    results: bytes
    error: DaemonError


Outcome = bytes | Partial | DaemonError
Settle = Callable[[Outcome], None]
"""Receives the results of a batch (struct pg_result each), or the error that replaces them."""


class Letter:
    """A message that may have to be sent more than once."""

    __slots__ = ("frame", "sent")

    def __init__(self, frame: bytes = b"") -> None:
        self.frame = frame
        self.sent = False
        """True if the socket has taken a copy."""


class Batch(Letter):
    """Packed records. `body`: name table, records and byte area. `rows`: the struct pg_rows of a
    bulk load, else empty."""

    __slots__ = (
        "at_ns", "behind", "body", "calls", "count", "doubtful", "names", "names_bytes", "order",
        "packed_boot_ns", "places", "rows", "sequence", "settle", "settle_some",
    )  # fmt: skip

    def __init__(
        self,
        count: int,
        names: int,
        names_bytes: int,
        body: bytes,
        settle: Settle,
        at_ns: int | None = None,
    ) -> None:
        super().__init__()
        self.count = count
        self.names = names
        self.names_bytes = names_bytes
        self.body = body
        self.settle = settle
        self.settle_some: Callable[[Sequence[int], bytes], None] | None = None
        """Receives the results of some records before `settle` has those of all."""
        self.at_ns = at_ns
        self.rows = b""
        self.packed_boot_ns = 0
        """Time of packing, on this host's CLOCK_BOOTTIME; 0 = unknown."""
        self.calls: object = None
        """The call of each record as a list, or the one call that has all records."""
        self.order = 0
        """Number of the batch in this client's order of batches; set when it is first sent."""
        self.places: Sequence[int] | None = None
        """Numbers of the records in the batch that this one is a part of; else None."""
        self.sequence = 0
        self.behind = 0
        """`sequence` minus that of the oldest batch without an answer when this was numbered."""
        self.doubtful = False
        """True if a copy was sent and never answered; a later copy may be answered."""

    def address(self, session: int, sequence: int, durable: bool, same_clock: bool) -> None:
        """Fix the bytes, so that every copy is the same."""
        self.sequence = sequence
        self.sent = self.doubtful = False
        flags = layout.FLAG_DURABLE * durable | layout.FLAG_BULK_LOAD * bool(self.rows)
        self.frame = (
            wire.encode_frame(
                Message.BATCH, session, sequence, count=self.count, names=self.names,
                names_bytes=self.names_bytes, at_ns=self.at_ns, flags=flags,
                detail=(self.packed_boot_ns if same_clock else 0, self.behind),
            )
            + self.rows
            + self.body
        )  # fmt: skip
