"""Notices as columns: the messages of the daemon, undecoded.

A message has a fixed struct for each notice, and behind them the keys and payloads. So the columns
are views of the message, and only a caller who asks for `Notice` objects pays for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

from purgatoryd.clients.model import Notice
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import Lagged
from purgatoryd.shm_layout.layout import NOTICE_OF_OPERATION, Cause, struct_dtype
from purgatoryd.shm_layout.wire import NoticeHead

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

MADE_AT_ONCE = 64
_CAUSES = {int(cause): cause for cause in Cause}


class Run:
    """The notices of one message: successive notices of one topic. Objects are made when they are
    needed, at least MADE_AT_ONCE at a time, and dropped when later ones are needed."""

    __slots__ = ("_made", "body", "end", "first", "head", "namespace", "received_ns", "topic")

    def __init__(
        self, namespace: str, topic: str, head: NoticeHead, body: bytes, received_ns: int | None
    ) -> None:
        self.namespace, self.topic = namespace, topic
        self.head, self.body, self.received_ns = head, body, received_ns
        self.first, self.end = head.first, head.first + head.records
        """The first sequence that was not delivered before, and the sequence after the last."""
        wire.check_notices(body, head.records)
        self._made = self._none

    @property
    def _none(self) -> tuple[int, list[Notice], int]:
        """(sequence of the first object, objects, offset of the next key in `body`)."""
        return self.head.first, [], wire.NOTICES.size + self.head.records * wire.NOTICE.size

    def __len__(self) -> int:
        return self.end - self.first

    def notices(self, start: int, stop: int) -> list[Notice]:
        """Return the notices `start` to `stop` - 1. A repeated call returns the same objects."""
        before, objects, at = self._made if start >= self._made[0] else self._none
        after = before + len(objects)
        if after < stop:
            first, until = after - self.head.first, max(stop, min(self.end, after + MADE_AT_ONCE))
            raw, at = wire.decode_some_notices(self.body, first, until - self.head.first, at)
            objects = objects + [self._notice(first + i, one) for i, one in enumerate(raw)]
        objects = objects[start - before :]
        self._made = start, objects, at  # one store, because a signal handler may raise before it
        return objects[: stop - start]

    def _notice(self, number: int, raw: wire.RawNotice) -> Notice:
        ticket, deadline_ns, fired_ns, cause, flags, key, payload, missed = raw
        verdict = None
        if flags & NOTICE_OF_OPERATION:
            verdict, payload = wire.decode_verdict(payload)
        return Notice(
            key, payload, self.topic, self.namespace, self.head.first + number, ticket,
            _CAUSES.get(cause, Cause.EXPIRED), deadline_ns, fired_ns,
            self.head.wall_offset_ns, self.received_ns, flags, verdict, missed,
        )  # fmt: skip


class Part(NamedTuple):
    """The notices `start` to `stop` - 1 (sequences) of a message."""

    run: Run
    start: int
    stop: int


class Notices(Sequence[Notice]):
    """Several notices, in order per topic. Iteration and indexing make `Notice` objects.

    The other properties are numpy arrays with one element for each notice, and need numpy. Keys and
    payloads are in `data`: the key of notice i is data[key_offsets[i]:][:key_lengths[i]].
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._rows: Any = None
        self._objects: list[Notice] | None = None

    def __len__(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    def __iter__(self) -> Iterator[Notice]:
        return iter(self._all())

    def _all(self) -> list[Notice]:
        if self._objects is None:
            made = (run.notices(start, stop) for run, start, stop in self.parts)
            self._objects = [notice for some in made for notice in some]
        return self._objects

    @overload
    def __getitem__(self, index: int) -> Notice: ...
    @overload
    def __getitem__(self, index: slice) -> list[Notice]: ...
    def __getitem__(self, index: int | slice) -> Notice | list[Notice]:
        return self._all()[index]

    @property
    def records(self) -> Array:
        """The structs pg_notice of all notices, as a numpy record array."""
        import numpy as np

        if self._rows is None:
            self._rows = np.concatenate([_records(part) for part in self.parts])
        rows: Array = self._rows
        return rows

    @property
    def tickets(self) -> Array:
        """Ticket of each notice, uint64."""
        return self.records["ticket"]

    @property
    def deadlines_boot_ns(self) -> Array:
        """Deadline of each notice on the daemon's clock, int64 in ns."""
        return self.records["deadline_ns"]

    @property
    def fired_boot_ns(self) -> Array:
        """Time of firing of each notice on the daemon's clock, int64 in ns."""
        return self.records["fired_ns"]

    @property
    def sequences(self) -> Array:
        """Sequence of each notice in its topic, int64."""
        import numpy as np

        return np.concatenate([np.arange(p.start, p.stop, dtype="i8") for p in self.parts])

    @property
    def topics(self) -> list[tuple[str, int]]:
        """Topics and numbers of successive notices, in order; their sum is len()."""
        return [(part.run.topic, part.stop - part.start) for part in self.parts]

    @property
    def key_lengths(self) -> Array:
        """Number of bytes of each key, int64."""
        return self.records["key_len"].astype("i8")

    @property
    def payload_lengths(self) -> Array:
        """Number of bytes of each payload, int64. If an operation ended, the payload begins with
        its verdict."""
        return self.records["payload_len"].astype("i8")

    @property
    def key_offsets(self) -> Array:
        """Offset of each key in `data`, int64."""
        import numpy as np

        sizes = self.key_lengths + self.payload_lengths
        offsets: Array = np.cumsum(sizes) - sizes
        return offsets

    @property
    def payload_offsets(self) -> Array:
        """Offset of each payload in `data`, int64."""
        return self.key_offsets + self.key_lengths

    @property
    def data(self) -> Array:
        """The keys and payloads of all notices: key 0, payload 0, key 1, ..., uint8."""
        import numpy as np

        return np.concatenate([_area(part) for part in self.parts])


def _records(part: Part) -> Array:
    import numpy as np

    run = part.run
    rows = np.frombuffer(run.body, struct_dtype("pg_notice"), run.head.records, wire.NOTICES.size)
    return rows[part.start - run.head.first : part.stop - run.head.first]


def _area(part: Part) -> Array:
    import numpy as np

    run = part.run
    rows = _records(Part(run, run.head.first, run.end))
    ends = np.cumsum(rows["key_len"].astype("i8") + rows["payload_len"])
    begin, stop = part.start - run.head.first, part.stop - run.head.first
    area = np.frombuffer(run.body, "u1", offset=wire.NOTICES.size + rows.nbytes)
    start, end = (int(ends[row - 1]) if row else 0 for row in (begin, stop))
    bytes_: Array = area[start:end]
    return bytes_


class Taker(Protocol):
    """An object that stores the item that was handed out last."""

    taken: Taken | None


class Batch:
    """Notices that an iteration hands out one by one. It is stored as taken before the first."""

    __slots__ = ("_source", "_whole", "handed", "notices")

    def __init__(self, source: Taker, whole: Notices) -> None:
        self._source, self._whole = source, whole
        self.notices = list(whole)
        self.handed = 0
        """Number of notices that were handed out."""

    @property
    def left(self) -> bool:
        """True if a notice is left, and nothing else was handed out since the last one."""
        return self._source.taken is self and self.handed < len(self.notices)

    @property
    def parts(self) -> list[Part]:
        """The notices that were handed out."""
        parts: list[Part] = []
        left = self.handed
        for run, start, stop in self._whole.parts:
            if left > 0:
                parts.append(Part(run, start, min(stop, start + left)))
            left -= stop - start
        return parts


Taken = Notice | Lagged | Notices | Batch
