"""Lots: calls with wait=False, which their callers pack into one batch.

A lot has its place among the client's requests from the time it is opened. Callers add to it until
another request follows, until the engine collects it, or until it is full (pack/lot.c). A call in a
lot has no Pending. Its handle makes one from the lot when somebody asks for the outcome. A refused
call gets one as well, for flush().
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from purgatoryd.clients import _pack
from purgatoryd.clients.batch import Batch, Outcome, Partial
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import MODES
from purgatoryd.clients.packing import (
    ACCEPTED,
    BATCH_BYTES,
    CANCEL,
    Entry,
    Pending,
    PendingAdd,
    PendingCancel,
)
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import DaemonError
from purgatoryd.shm_layout.layout import BATCH_RECORDS, ClockKind, Status

_SIZE = wire.RESULT.size
_STREAMED = (layout.WINDOW + 1) * BATCH_RECORDS
"""A caller that sends its lots itself has at most this number of calls without an answer."""


class Lot(_pack.Lot):
    """The calls of one lot, and later their results.

    `note` takes each call that fails. `limit`: largest number of calls. `kind`: class of the
    handles.
    """

    __slots__ = ("_connection", "_error", "_like", "_note")

    def __init__(
        self, requests: _pack.Requests, connection: Connection, note: Callable[[Pending], None],
        limit: int, kind: type[_pack.Receipt],
    ) -> None:  # fmt: skip
        names, delays = connection.names, connection.delay_clock == ClockKind.VIRTUAL
        direct = connection.direct if limit >= _STREAMED else None
        super().__init__(
            requests, direct, min(limit, BATCH_RECORDS), BATCH_BYTES, delays, names.topics,
            names.of_key, MODES, kind,
        )  # fmt: skip
        self._like = requests, connection, note, limit, kind
        self._connection = connection
        self._note = note
        self._error: DaemonError | None = None
        """The reason why some results are missing, or None."""

    def add(self, entry: Entry[Any]) -> bool:
        """Add a call that has been checked. Returns False if the lot is not open."""
        return self.record(entry.pending, (entry.name, *entry.fields))

    def next(self) -> Lot:
        """Return a new lot with the same arguments."""
        return Lot(*self._like)

    def batch(self) -> Batch:
        """Close the lot, and return its batch."""
        batch = Batch(*self.body(), self._settle)
        batch.settle_some, batch.calls = self._settle_some, self
        for pending in list(self.calls.values()):
            pending.packed = True
        return batch

    def of(self, number: int) -> Pending:
        """Return the call of a record. Any thread may call it at any time."""
        pending: Pending | None = self.calls.get(number)
        if pending is None:
            pending = self.calls.setdefault(number, self._made(number))
        if self.results is not None and not pending.done:
            self._fill(number, pending)
        return pending

    def _made(self, number: int) -> Pending:
        op, key_type, key_bytes, name, payload = self.row(number)
        key = wire.decode_key(key_type, key_bytes)
        pending: Pending
        if op == CANCEL:
            pending = PendingCancel(key, None)
        else:
            split = 2 + name[0]
            namespace, topic = name[2:split].decode(), name[split:].decode()
            pending = PendingAdd(key, None, namespace, topic, payload)
        pending.connection, pending.packed = self._connection, True
        return pending

    # ---- results -----------------------------------------------------------------------------

    def _settle(self, outcome: Outcome) -> None:
        """Take the results of all calls, or the error that replaces them."""
        count = len(self)
        self._connection.packer.settled += count
        if isinstance(outcome, DaemonError):
            outcome = Partial(bytes(count * _SIZE), outcome)
        results, error = outcome if isinstance(outcome, Partial) else (outcome, None)
        self._fail(results, error)
        # A caller that asks for its call finds the results, or the call is filled here.
        self._error, self.results = error, results[: count * _SIZE]
        for number, pending in list(self.calls.items()):
            if not pending.done:
                self._fill(number, pending)

    def _fail(self, results: bytes, error: DaemonError | None) -> None:
        """Settle and note the calls that failed."""
        statuses = results[: len(self) * _SIZE : _SIZE]
        if error is None and not statuses.translate(None, ACCEPTED):
            return
        fine = ACCEPTED if error is None else ACCEPTED.replace(bytes((Status.NONE,)), b"")
        failed = [place for place, status in enumerate(statuses) if status not in fine]
        self._hand_over(failed, b"".join(_cell(results, place) for place in failed), error)

    def _settle_some(self, places: Sequence[int], results: bytes) -> None:
        """Give the calls with these indexes their results. The others have none yet."""
        self._hand_over(places, results, None)

    def _hand_over(self, places: Iterable[int], results: bytes, error: DaemonError | None) -> None:
        for n, place in enumerate(places):
            pending = self.of(place)
            if pending.done:
                continue
            _fill(pending, _cell(results, n), error)
            if pending.failed:
                self._note(pending)
            pending.done = True

    def _fill(self, number: int, pending: Pending) -> None:
        assert self.results is not None
        _fill(pending, _cell(self.results, number), self._error)
        pending.done = True


def _cell(results: bytes, number: int) -> bytes:
    return results[number * _SIZE : (number + 1) * _SIZE]


def _fill(pending: Pending, result: bytes, error: DaemonError | None) -> None:
    pending.word, pending.deadline_ns = wire.RESULT.unpack(result)
    pending.error = error if pending.word == 0 else None
