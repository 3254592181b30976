"""Batches of calls, as the session sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import DaemonError
from purgatoryd.shm_layout.layout import Message


class Partial(NamedTuple):
    """The results of a batch if some are missing. A missing result has the status NONE; `error` is
    the reason."""

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
        """True if the socket has accepted a copy of the message."""


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
        """Receives the results of some records before `settle` receives the results of all."""
        self.at_ns = at_ns
        self.rows = b""
        self.packed_boot_ns = 0
        """Time of packing, on this host's CLOCK_BOOTTIME; 0 = unknown."""
        self.calls: object = None
        """A list with the call of each record, or the single call that all records belong to."""
        self.order = 0
        """Number of the batch in the order in which this client first sends batches; 0 = unsent."""
        self.places: Sequence[int] | None = None
        """The index that each record of a part has in the whole batch; None if this is no part."""
        self.sequence = 0
        self.behind = 0
        """`sequence` minus the lowest unanswered sequence at the time when this batch received its
        sequence."""
        self.doubtful = False
        """True if an earlier copy was sent and has no answer. Then the batch was perhaps applied,
        whatever the daemon answers to a later copy."""

    def address(self, session: int, sequence: int, durable: bool, same_clock: bool) -> None:
        """Build the bytes of the message once, so that all copies are identical."""
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
