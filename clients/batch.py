"""A batch of calls, as the session sends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import DaemonError
from purgatoryd.shm_layout.layout import Message


class Partial(NamedTuple):
    """Results of a batch of which some records have none: their status is NONE. `error`: why."""

    results: bytes
    error: DaemonError


Outcome = bytes | Partial | DaemonError
Settle = Callable[[Outcome], None]
"""Takes the results of a batch (struct pg_result each), or why there are none."""


class Letter:
    """A message that may have to be sent more than once."""

    __slots__ = ("frame", "sent")

    def __init__(self, frame: bytes = b"") -> None:
        self.frame = frame
        self.sent = False
        """The socket took a copy."""


class Batch(Letter):
    """Packed records; `body` is name table, records and byte area, `rows` the struct pg_rows that
    says which rows of a bulk load they are, if any."""

    __slots__ = (
        "at_ns", "behind", "body", "calls", "count", "doubtful", "names", "names_bytes", "order",
        "packed_boot_ns", "places", "rows", "sequence", "settle",
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
        self.at_ns = at_ns
        self.rows = b""
        self.packed_boot_ns = 0
        """When it was packed, on this host's CLOCK_BOOTTIME; 0 = not noted."""
        self.calls: object = None
        """A list with the call of each record, or the one call that all records are of."""
        self.order = 0
        """Number of the batch among all of this client, given when it is first handed out."""
        self.places: Sequence[int] | None = None
        """Record numbers in the other batch, if this is a part of one."""
        self.sequence = 0
        self.behind = 0
        """Its sequence minus the oldest one that had no answer when this one was numbered."""
        self.doubtful = False
        """A copy was sent and has no answer, although a later copy may get one."""

    def address(self, session: int, sequence: int, durable: bool, same_clock: bool) -> None:
        """Fixes the bytes: from here on every copy is the same."""
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
