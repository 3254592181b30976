"""Records that the daemon answered BUSY, and the records that wait behind them.

This module uses neither socket nor clock. Order is kept per key: a record that touches a key of a
waiting record waits behind that record, whichever call it belongs to. Other records are sent at
once. Keys are compared by namespace, type and bytes; a watch key never equals the key of a timer or
an operation.
"""

from __future__ import annotations

import struct
from bisect import bisect, insort
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence, Set
from functools import partial
from typing import NamedTuple

from purgatoryd.clients.batch import Batch, Outcome, Partial
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import DaemonError
from purgatoryd.shm_layout.layout import Op, Status

WAITING_MAX = 4096
"""While at least this number of records wait, no new batch is sent."""
_BUSY = int(Status.BUSY)
_SIZE = wire.RESULT.size
_NONE = bytes(_SIZE)
_REFUSED = wire.RESULT.pack(_BUSY, 0)
_ENDED = struct.Struct("<II")  # index of a record, bytes of the keys of operations that it ended


def is_busy(results: bytes, count: int) -> bool:
    """True if one of the `count` results has the status BUSY. A result begins with its status."""
    return _BUSY in results[: count * _SIZE : _SIZE]


def all_busy(batch: Batch) -> bytes:
    """Return results that refuse each record of a batch as BUSY."""
    return _REFUSED * batch.count


# ---- the records of a batch ----------------------------------------------------------------


class _Row(NamedTuple):
    record: bytes
    area: bytes
    keys: tuple[bytes, ...]


def rows_of(batch: Batch) -> Iterator[_Row]:
    """Yield the records of a batch, each with its bytes and the keys that it touches."""
    body, records = batch.body, batch.names_bytes
    at = records + batch.count * wire.RECORD.size
    namespaces = list(_namespaces(batch))
    for first in range(records, at, wire.RECORD.size):
        record = body[first : first + wire.RECORD.size]
        op, _, key_type, key_len, name, *_, payload_len, ext_len, _, _ = wire.RECORD.unpack(record)
        ext = at + key_len + payload_len
        watched = Op.ADVANCE_KEY <= op <= Op.CANCEL_FOR_KEY
        keys = [_key(watched, namespaces[name], key_type, body[at : at + key_len])]
        if op == Op.WATCH:
            keys += _watch_keys(namespaces[name], body[ext : ext + ext_len])
        yield _Row(record, body[at : ext + ext_len], tuple(keys))
        at = ext + ext_len


def _namespaces(batch: Batch) -> Iterator[bytes]:
    """Yield the namespace of each entry of the name table."""
    at = 0
    for _ in range(batch.names):
        namespace_len, topic_len = batch.body[at], batch.body[at + 1]
        yield batch.body[at + 2 : at + 2 + namespace_len]
        at += 2 + namespace_len + topic_len


def _watch_keys(namespace: bytes, extension: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(extension):
        _, _, key_len, key_type, *_ = wire.WATCH_KEY.unpack_from(extension, at)
        at += wire.WATCH_KEY.size
        yield _key(True, namespace, key_type, extension[at : at + key_len])
        at += key_len


def _key(watched: bool, namespace: bytes, key_type: int, key: bytes) -> bytes:
    return bytes((watched, key_type, len(namespace))) + namespace + key


def _ended(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (index of a record, keys of the operations that it ended) from the bytes after the
    results."""
    at = 0
    while at < len(extra):
        number, size = _ENDED.unpack_from(extra, at)
        at += _ENDED.size
        yield number, extra[at : at + size]
        at += size


class Whole:
    """A batch whose records are sent, and answered, in parts."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.rows = list(rows_of(batch))
        self.waiting: list[int] = []
        """Indexes in the batch of the records that wait to be sent, in rising order."""
        self.refused: set[int] = set()
        """Indexes in the batch of the records that wait or have been sent again. The keys of these
        records are busy."""
        self.in_flight = 0
        """Number of records that were sent in parts and have no answer."""
        self.error: DaemonError | None = None
        self._results = [_NONE] * batch.count
        self._ended: dict[int, bytes] = {}

    def part(self, places: Sequence[int]) -> Batch:
        """Return a batch of the records with these indexes, which from this call on count as in
        flight."""
        whole = self.batch
        rows = [self.rows[place] for place in places]
        names = whole.body[: whole.names_bytes]
        body = b"".join((names, *(row.record for row in rows), *(row.area for row in rows)))
        part = Batch(len(rows), whole.names, whole.names_bytes, body, whole.settle)
        part.packed_boot_ns, part.order, part.places = whole.packed_boot_ns, whole.order, places
        if whole.rows:
            bulk_load, first, fencing_token = wire.ROWS.unpack(whole.rows)
            part.rows = wire.ROWS.pack(bulk_load, first + places[0], fencing_token)
        self.in_flight += len(rows)
        return part

    def note(self, places: Sequence[int], results: bytes) -> list[int]:
        """Store the answers to these records; return the records that were refused as BUSY."""
        refused = []
        for n, place in enumerate(places):
            self._results[place] = result = results[n * _SIZE : (n + 1) * _SIZE]
            if result[0] == _BUSY:
                refused.append(place)
        for n, keys in _ended(results[len(places) * _SIZE :]):
            self._ended[places[n]] = keys
        return refused

    def lose(self, places: Sequence[int], error: DaemonError) -> None:
        """Store that these records have no answer and why: their outcome is unknown, or they are
        not sent."""
        self.error = error
        for place in places:
            self._results[place] = _NONE

    def waits_for(self, calls: Set[object]) -> list[int]:
        """Return the indexes in the batch of the waiting records that belong to these calls."""
        of = self.batch.calls
        if isinstance(of, list):
            return [place for place in self.waiting if of[place] in calls]
        return list(self.waiting) if of in calls else []

    @property
    def complete(self) -> bool:
        """True if every record has its answer, or will get none."""
        return not (self.in_flight or self.waiting)

    @property
    def outcome(self) -> bytes | Partial:
        """The answers to all parts, in the order of the records."""
        results = self._answers(range(self.batch.count))
        return results if self.error is None else Partial(results, self.error)

    def hand_over(self, places: Sequence[int]) -> None:
        """Give the calls of these records their answers, before the whole batch is answered."""
        if self.batch.settle_some is not None and places:
            self.batch.settle_some(places, self._answers(places))

    def _answers(self, places: Sequence[int]) -> bytes:
        """Return the results of these records, then the keys of the operations that they ended."""
        results = b"".join(self._results[place] for place in places)
        ended = ((n, self._ended[place]) for n, place in enumerate(places) if place in self._ended)
        return results + b"".join(_ENDED.pack(n, len(keys)) + keys for n, keys in ended)


# ---- all batches ---------------------------------------------------------------------------


class Retries:
    """All batches with a record that was refused as BUSY, in the order of their calls."""

    def __init__(self) -> None:
        self._wholes: list[Whole] = []
        self._busy: Counter[bytes] = Counter()
        self._round: deque[Whole] = deque()
        self._round_due = False
        self._sent_to = -1  # Index of the last sent record in the first batch of `_round`.
        self._refused_again: set[bytes] = set()  # Keys of records refused again in this round.
        self.waiting = 0
        """Number of records that wait to be sent again."""
        self.settled = 0
        """Number of records that were refused as BUSY and later got another answer."""

    def __bool__(self) -> bool:
        return bool(self._wholes)

    # ---- answers -----------------------------------------------------------------------------

    def refused(self, batch: Batch, results: bytes) -> None:
        """Take the answer to a batch that has records refused as BUSY."""
        whole = self._take_apart(batch)
        whole.in_flight = batch.count
        self._answered(whole, range(batch.count), results)

    def returned(self, part: Batch) -> None:
        """Queue the records of a part again, because the part was certainly not applied."""
        assert part.places is not None
        whole = self._whole_of(part)
        whole.in_flight -= part.count
        whole.note(part.places, all_busy(part))
        self._wait(whole, part.places)

    def fail(self, error: DaemonError) -> None:
        """Fail all waiting records, because the daemon refuses this client."""
        for whole in list(self._wholes):
            places, whole.waiting = whole.waiting, []
            self.waiting -= len(places)
            whole.lose(places, error)
            self._release(whole, places)
            self._finish(whole)

    def abandon(self, calls: Set[object]) -> int:
        """Stop resending the waiting records of these calls; BUSY becomes their answer.

        Returns the number of these records.
        """
        count = 0
        for whole in list(self._wholes):
            if places := set(whole.waits_for(calls)):
                count += len(places)
                whole.waiting = [place for place in whole.waiting if place not in places]
                self.waiting -= len(places)
                self._release(whole, places)
                self._finish(whole)
        return count

    def _take_apart(self, batch: Batch) -> Whole:
        whole = Whole(batch)
        self._wholes.insert(bisect(self._wholes, batch.order, key=_order), whole)
        return whole

    def _whole_of(self, part: Batch) -> Whole:
        return self._wholes[bisect(self._wholes, part.order, key=_order) - 1]

    def _part(self, whole: Whole, places: Sequence[int]) -> Batch:
        part = whole.part(places)
        part.settle = partial(self._settle, whole, places)
        return part

    def _settle(self, whole: Whole, places: Sequence[int], outcome: Outcome) -> None:
        """Take the answer to a part, or the error that replaces it."""
        if isinstance(outcome, bytes):
            self._answered(whole, places, outcome)
            return
        assert isinstance(outcome, DaemonError)
        whole.lose(places, outcome)
        whole.in_flight -= len(places)
        self._release(whole, places)
        self._finish(whole)

    def _answered(self, whole: Whole, places: Sequence[int], results: bytes) -> None:
        refused = whole.note(places, results)
        whole.in_flight -= len(places)
        self._wait(whole, refused)
        done = set(places).difference(refused)
        self.settled += len(done & whole.refused)
        self._release(whole, done)
        self._finish(whole)
        if not whole.complete:
            whole.hand_over(sorted(done))

    def _wait(self, whole: Whole, places: Sequence[int]) -> None:
        for place in places:
            insort(whole.waiting, place)
            self._refused_again.update(whole.rows[place].keys)
            if place not in whole.refused:
                whole.refused.add(place)
                self._busy.update(whole.rows[place].keys)
        self.waiting += len(places)

    def _release(self, whole: Whole, places: Collection[int]) -> None:
        for place in whole.refused.intersection(places):
            whole.refused.remove(place)
            for key in whole.rows[place].keys:
                self._busy[key] -= 1
                if not self._busy[key]:
                    del self._busy[key]

    def _finish(self, whole: Whole) -> None:
        if whole.complete:
            self._wholes.remove(whole)
            whole.batch.settle(whole.outcome)

    # ---- sending -----------------------------------------------------------------------------

    def free(self, batch: Batch) -> Batch | None:
        """Return the part of a new batch that may be sent, or None. The other records wait, because
        they use keys of records that were answered BUSY, or follow a waiting row of a bulk load."""
        rows = list(rows_of(batch)) if self._wholes else []
        if not any(key in self._busy for row in rows for key in row.keys):
            return batch
        whole = self._take_apart(batch)
        places: list[int] = []
        for place, row in enumerate(rows):
            in_bulk_load = bool(
                batch.rows and whole.waiting
            )  # rows of a bulk load must be consecutive in a batch
            if in_bulk_load or any(key in self._busy for key in row.keys):
                whole.note((place,), _REFUSED)
                self._wait(whole, (place,))
            else:
                places.append(place)
        if not places:
            return None
        part = self._part(whole, places)
        part.at_ns = batch.at_ns
        return part

    @property
    def in_round(self) -> bool:
        """True while records are being sent again."""
        return self._round_due or bool(self._round)

    def begin_round(self) -> None:
        """Send all waiting records again, each once, in order."""
        self._round_due = True

    def again(self, in_flight: bool) -> Batch | None:
        """Return the next batch of the round; None if the round must not begin yet or is over.

        A round begins only if no batch is `in_flight`, because the daemon refuses records with busy
        keys until the client has seen all answers.
        """
        if self._round_due:
            if in_flight:
                return None
            self._round_due, self._round, self._sent_to = False, deque(self._wholes), -1
            self._refused_again.clear()
        while self._round:
            whole = self._round[0]
            if places := self._places(whole):
                self._sent_to, sent = places[-1], set(places)
                whole.waiting = [place for place in whole.waiting if place not in sent]
                self.waiting -= len(places)
                return self._part(whole, places)
            self._round.popleft()
            self._sent_to = -1
        return None

    def _places(self, whole: Whole) -> list[int]:
        """Return the indexes of the records that may be sent. A record must wait if it shares a key
        with an earlier record that was refused again in this round."""
        places: list[int] = []
        for place in whole.waiting[bisect(whole.waiting, self._sent_to) :]:
            if places and whole.batch.rows and place != places[-1] + 1:
                break
            if self._refused_again.isdisjoint(whole.rows[place].keys):
                places.append(place)
            else:
                self._refused_again.update(whole.rows[place].keys)
        return places


def _order(whole: Whole) -> int:
    return whole.batch.order
