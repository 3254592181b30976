"""Single calls packed into batches, and the handles that receive their results."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from purgatoryd.clients import _pack
from purgatoryd.clients.batch import Batch, Outcome, Partial, Settle
from purgatoryd.clients.model import CancelResult, TimerInfo
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import (
    ArenaLost,
    BulkLoadClosed,
    Busy,
    DaemonError,
    Denied,
    DuplicateWatchKey,
    Exists,
    Fenced,
    Full,
    FullGroup,
    InboxFull,
    PurgatorydError,
    QuotaExceeded,
    Refused,
    Stopping,
    TooFar,
    WalStopped,
    WatermarkOverflow,
    WrongShard,
)
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.layout import Op, Quota, Status
from purgatoryd.shm_layout.wire import Key

if TYPE_CHECKING:
    from purgatoryd.clients.lots import Lot

# Far below PG_MESSAGE_MAX, because a batch is copied once and applied in one loop iteration.
BATCH_BYTES = 1 << 20

_NAMES_BYTES = 8  # index in wire.FRAME
PUT, CANCEL = int(Op.PUT), int(Op.CANCEL)

_timer = _pack.Maker(TimerInfo, tuple(field.name for field in fields(TimerInfo))).make
_FULL: dict[int, str] = {
    Status.FULL: "slots",
    Status.FULL_PAYLOAD: "space for key and payload",
    Status.FULL_NAMESPACES: "namespaces",
    Status.FULL_TOPICS: "topics",
    Status.FULL_TICKETS: "tickets",
    Status.FULL_KEYS: "watch keys",
    Status.FULL_WATCHES: "watch records",
    Status.FULL_ACCOUNTS: "accounts",
    Status.FULL_BULK_LOADS: "free slots for bulk loads and their rows",
    Status.FULL_MEMBERS: "members of consumer groups",
}
_QUOTAS = {
    Quota.NAMESPACE_TIMERS: ("namespace", "timers"),
    Quota.NAMESPACE_BYTES: ("namespace", "bytes"),
    Quota.NAMESPACE_OPS: ("namespace", "operations per second"),
    Quota.UID_TIMERS: ("uid", "timers"),
    Quota.UID_BYTES: ("uid", "bytes"),
    Quota.UID_OPS: ("uid", "operations per second"),
}
_REFUSED: dict[int, type[Refused]] = {
    Status.DENIED: Denied,
    Status.BUSY: Busy,
    Status.WAL: WalStopped,
    Status.WRONG_SHARD: WrongShard,
    Status.DUPLICATE: DuplicateWatchKey,
    Status.OVERFLOW: WatermarkOverflow,
    Status.STOPPING: Stopping,
    Status.FENCED: Fenced,
    Status.CLOSED: BulkLoadClosed,
    Status.ARENA: ArenaLost,
}


def is_refusal(status: int) -> bool:
    """Return whether the status means that the daemon refused the record."""
    return status == Status.EXISTS or (status >= Status.FULL and status != Status.LEASED)


ACCEPTED = bytes(status for status in range(256) if not is_refusal(status))
"""The statuses that are no refusals."""
_TAKEN = {int(status): status for status in Status if not is_refusal(status)}


def refusal(key: Key, word: int, deadline_ns: int) -> Refused:
    """Return the error for the result of a refused record. `word`: ticket << 8 | status."""
    status = word & 0xFF
    if status == Status.EXISTS:
        unique = deadline_ns < 0
        return Exists(
            key, status, ticket=word >> 8, deadline_boot_ns=abs(deadline_ns), unique=unique
        )
    if status == Status.TOO_FAR:
        return TooFar(key, status, limit_ns=layout.TIME_MAX_NS)
    if status == Status.QUOTA:
        return _over(key, word >> 8, deadline_ns)
    if status == Status.BUSY and deadline_ns:
        return InboxFull(key, status, limit=deadline_ns)
    if status == Status.FULL_GROUP:
        return FullGroup(key, status, "budget of a consumer group", word >> 8, deadline_ns)
    if full := _FULL.get(status):
        return Full(key, status, resource=full)
    return _REFUSED.get(status, Refused)(key, status)


def _over(key: Key, detail: int, figure: int) -> QuotaExceeded:
    if share := wire.decode_share(detail, figure):
        return QuotaExceeded(
            key, Status.QUOTA, "uid", share.resource, share.limit, share.used, uid=share.uid
        )
    quota, limit = Quota(detail & 0xFF), detail >> 8
    whose, resource = _QUOTAS[quota]
    if quota in (Quota.NAMESPACE_OPS, Quota.UID_OPS):
        return QuotaExceeded(key, Status.QUOTA, whose, resource, limit, retry_boot_ns=figure)
    return QuotaExceeded(key, Status.QUOTA, whose, resource, limit, used=figure)


AnyPending = TypeVar("AnyPending", bound="Pending")
Found = TypeVar("Found")


class Pending(_pack.Answer):
    """One packed call. `done` turns True exactly once, when the call has its outcome."""

    __slots__ = ()

    @property
    def status(self) -> int:
        """The enum pg_status of the answer; NONE if there is no answer."""
        return self.word & 0xFF

    @property
    def failed(self) -> bool:
        """True if the call was refused or its outcome is unknown."""
        return self.error is not None or is_refusal(self.word & 0xFF)

    def why(self) -> PurgatorydError | None:
        """Return the error of a call that failed; None if it has not failed."""
        if self.error is not None or not is_refusal(self.word & 0xFF):
            return self.error
        return refusal(self.key, self.word, self.deadline_ns)

    @abstractmethod
    def outcome(self) -> Any:
        """Return the result of the call. Raises Refused or DaemonError."""

    def _check(self) -> None:
        if (error := self.why()) is not None:
            raise error


class PendingAdd(Pending):
    """An add that waits for its answer."""

    __slots__ = ()

    def outcome(self) -> TimerInfo:
        """Return the timer. Raises Refused, DaemonError."""
        word = self.word
        if self.error is not None or (status := _TAKEN.get(word & 0xFF)) is None:
            self._check()
        return _timer(
            self.key, self.namespace, self.topic, word >> 8, self.deadline_ns, status,
            self.payload, None, None, None, None, None, None, None, None,
        )  # fmt: skip


class PendingCancel(Pending):
    """A cancel that waits for its answer."""

    __slots__ = ()

    def outcome(self) -> CancelResult:
        """Return the CancelResult. Raises Refused, DaemonError."""
        self._check()
        return CancelResult(self.word & 0xFF)


class PendingTrigger(Pending, Generic[Found]):
    """A call of a purgatory that waits for its answer."""

    __slots__ = ()

    @abstractmethod
    def outcome(self) -> Found:
        """Return the result of the call. Raises Refused, DaemonError."""


class PendingCount(PendingTrigger[int]):
    """A watch, advance, bump or fail that waits for its answer."""

    __slots__ = ()

    def outcome(self) -> int:
        """Return the number of operations that the call ended. Raises Refused, DaemonError."""
        self._check()
        return self.deadline_ns


class PendingWatch(PendingCount):
    """A watch that waits for its answer; `watched`: the watch keys of the operation."""

    __slots__ = ("watched",)

    def __init__(
        self, key: Key, on_done: Callable[[Pending], None] | None, watched: tuple[Key, ...]
    ) -> None:
        super().__init__(key, on_done)
        self.watched = watched

    def why(self) -> PurgatorydError | None:
        """Return the error of a watch that failed. It names a duplicate watch key, which the answer
        does not contain."""
        error = super().why()
        if isinstance(error, DuplicateWatchKey):
            twice = (key for key in self.watched if self.watched.count(key) > 1)
            error.watch_key = next(twice, None)
        return error


class PendingFound(PendingTrigger[bool]):
    """A CLEAR, a FORGET or an extension that waits for its answer."""

    __slots__ = ()

    def outcome(self) -> bool:
        """Return whether the daemon knows the key. Raises Refused, DaemonError."""
        self._check()
        return self.status != Status.UNKNOWN


class PendingCancelled(PendingTrigger[bool]):
    """A cancel of an operation; the cancel waits for its answer."""

    __slots__ = ()

    def outcome(self) -> bool:
        """Return whether the cancel ended the operation. Raises Refused, DaemonError."""
        self._check()
        return self.status == Status.CANCELLED


class PendingEnded(PendingTrigger[list[Key]]):
    """A CANCEL_FOR_KEY that waits for its answer. One record ends a limited number of operations.
    If operations are left, the record is packed again."""

    __slots__ = ("_done", "repeat")

    repeat: Callable[[], None]

    def __init__(self, key: Key, on_done: Callable[[Pending], None] | None) -> None:
        super().__init__(key, on_done)
        self._done = False

    @property
    def done(self) -> bool:
        """True once all operations have ended."""
        return self._done

    @done.setter
    def done(self, answered: bool) -> None:
        self._done = answered and (self.error is not None or self.status != Status.MORE)
        if answered and not self._done:
            self.repeat()

    def outcome(self) -> list[Key]:
        """Return the keys of all operations that the call ended. Raises Refused, DaemonError."""
        self._check()
        return self.ended or []


class Builder(_pack.Builder):
    """Builds the body of one batch: name table, records, byte area. The caller has checked the
    fields of each record."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(BATCH_BYTES)

    def put(
        self, name: bytes, mode: int, key_type: int, key: bytes, time_kind: int, time_ns: int,
        payload: bytes, ticket: int = 0, slack: int = 0,
    ) -> None:  # fmt: skip
        """Add a PUT. With mode EXTEND and a `ticket`, it extends only the timer or operation that
        has this ticket."""
        self.record(name, PUT, mode, key_type, key, time_kind, slack, payload, b"", time_ns, ticket)

    def cancel(self, name: bytes, key_type: int, key: bytes, ticket: int) -> None:
        """Add a CANCEL; `ticket` 0 = any timer of the key."""
        self.record(name, CANCEL, 0, key_type, key, 0, 0, b"", b"", 0, ticket)

    def unpark(self, name: bytes, key_type: int, key: bytes, ticket: int, payload: bytes) -> None:
        """Add an UNPARK."""
        self.record(name, Op.UNPARK, 0, key_type, key, 0, 0, payload, b"", 0, ticket)

    def watch(
        self, name: bytes, condition: int, key_type: int, key: bytes, time_kind: int,
        time_ns: int, payload: bytes, threshold: int, watched: bytes, notice: bool,
    ) -> None:  # fmt: skip
        """Add a WATCH; `watched`: its encoded watch keys, concatenated."""
        self.record(
            name, Op.WATCH, condition, key_type, key, time_kind, notice, payload, watched,
            time_ns, threshold,
        )  # fmt: skip

    def trigger(self, name: bytes, op: int, key_type: int, key: bytes, value: int) -> None:
        """Add a record whose `op` is from ADVANCE_KEY to COMPLETE."""
        self.record(name, op, 0, key_type, key, 0, 0, b"", b"", 0, value)

    def batch(self, settle: Settle, at_ns: int | None = None, rows: bytes = b"") -> Batch:
        """Return the finished batch; `rows`: the struct pg_rows of a bulk load, else empty."""
        batch = Batch(*self.body(), settle, at_ns)
        batch.rows = rows
        return batch


Converted = tuple[int, int, int, bytes, bytes, bytes, int, int, bytes]
"""A row whose fields were checked: enum pg_time_kind, time in ns, enum pg_key_type, key, entry of
the name table, payload, flags, value, extension."""
Source = _pack.Source


class Entry(NamedTuple, Generic[AnyPending]):
    """One call whose arguments were checked. Packing it raises no error."""

    pending: AnyPending
    name: bytes
    """The call's entry of the name table."""
    method: Callable[..., None]
    """The method of Builder that adds the call's record."""
    fields: tuple[Any, ...]


TOPICS_CACHED = 4096


class Names:
    """Entries of the name table of a batch, for one namespace. An entry has two lengths, the
    namespace and the topic."""

    def __init__(self, namespace: bytes) -> None:
        self.namespace = namespace
        self.of_key = self._entry(b"")
        """The entry of calls that name no topic."""
        self.topics: dict[str, bytes] = {}
        """The entries of topics that were used lately."""

    def of_topic(self, topic: str) -> bytes:
        """Return the entry of a topic. Raises InvalidName."""
        if isinstance(topic, str) and (known := self.topics.get(topic)):
            return known
        entry = self._entry(wire.encode_topic(topic))
        if len(self.topics) >= TOPICS_CACHED:
            self.topics.clear()
        self.topics[topic] = entry
        return entry

    def _entry(self, topic: bytes) -> bytes:
        return bytes((len(self.namespace), len(topic))) + self.namespace + topic


class Packer:
    """Collects single calls until a batch is full or is sealed.

    Sealed batches wait in `sealed`, in order. Not thread-safe.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.sealed: deque[Batch] = deque()
        self.lots: deque[Lot] = deque()
        """Lots whose requests are in the engine's queue, in order, and the last collected lot.
        Callers append to it."""
        self.at_ns: int | None = None
        # `packed` and `settled` only rise. A job waits until `settled` has reached the value that
        # `packed` had earlier. `queued` is their difference, so a caller may read it at any time.
        self.packed = 0
        self.settled = 0
        self._open()

    def _open(self) -> None:
        self._builder = Builder()
        self._pending: list[Pending] = []

    @property
    def queued(self) -> int:
        """Number of packed records without a result."""
        return self.packed - self.settled

    @property
    def empty(self) -> bool:
        """True if nothing waits to be handed to the session."""
        return not (self._pending or self.sealed)

    def add(self, entry: Entry[Any]) -> None:
        """Add one call to the open batch: both its record and its waiter, or neither."""
        if not self._builder.fits(entry.name):
            self.seal()
        entry.method(self._builder, entry.name, *entry.fields)
        self._pending.append(entry.pending)
        entry.pending.packed = True
        self.packed += 1

    def adopt(self, call: Pending | Lot | Batch, message: bytes) -> Batch:
        """Return the batch of a direct call or a lot. Its caller has sent `message`, and has no
        answer."""
        if isinstance(call, Batch):
            batch = call
        elif isinstance(call, Pending):
            names_bytes = wire.FRAME.unpack_from(message)[_NAMES_BYTES]
            settlement = _Settlement(self, [call])
            batch = Batch(1, 1, names_bytes, message[wire.FRAME.size :], settlement)
            batch.calls = [call]
        else:
            batch = call.batch()
        batch.packed_boot_ns = self._host.boot_ns()
        batch.frame = message
        self.packed += batch.count
        return batch

    def seal(self) -> Batch | None:
        """Close the open batch and return it; None if it is empty."""
        if not self._pending:
            return None
        settlement = _Settlement(self, self._pending)
        batch = self._builder.batch(settlement, self.at_ns)
        batch.settle_some = settlement.some
        batch.packed_boot_ns = self._host.boot_ns()
        batch.calls = self._pending
        self.sealed.append(batch)
        self._open()
        return batch

    def collect(self, lot: Lot) -> None:
        """Queue a lot behind the open batch, unless its caller has sent it."""
        if not lot.collected:
            batch = lot.batch()
            if batch.count:
                self.bulk(batch)
            lot.collected = True
        while len(self.lots) > 1 and self.lots[0].collected:
            self.lots.popleft()

    def shut(self) -> None:
        """Let later calls that do not wait open a new lot."""
        for lot in self._lots_now():
            lot.shut()

    def _lots_now(self) -> tuple[Lot, ...]:
        """Return the lots. Any thread may call it."""
        while True:
            with suppress(RuntimeError):  # another thread has changed them meanwhile
                return tuple(self.lots)

    @property
    def collecting(self) -> int:
        """Number of records in lots that were not collected. Any thread may read it."""
        return sum(len(lot) for lot in self._lots_now() if not lot.collected)

    def bulk(self, batch: Batch) -> None:
        """Queue a batch of a bulk call or a lot behind the open batch."""
        self.seal()
        batch.at_ns = self.at_ns
        batch.packed_boot_ns = self._host.boot_ns()
        self.sealed.append(batch)
        self.packed += batch.count


class _Settlement:
    """Hands the results of a batch to its calls."""

    __slots__ = ("packer", "pending")

    def __init__(self, packer: Packer, pending: list[Pending]) -> None:
        self.packer = packer
        self.pending = pending

    def __call__(self, outcome: Outcome) -> None:
        self.packer.settled += len(self.pending)
        error: DaemonError | None = None
        if isinstance(outcome, DaemonError):
            self._fail(outcome)
            return
        if isinstance(outcome, Partial):
            outcome, error = outcome
        self._hand_over(self.pending, outcome, error)

    def some(self, places: Sequence[int], results: bytes) -> None:
        """Hand over the results of the calls with these indexes in the batch. The other calls have
        no results yet."""
        self._hand_over([self.pending[place] for place in places], results, None)

    def _hand_over(
        self, calls: Sequence[Pending], outcome: bytes, error: DaemonError | None
    ) -> None:
        end = len(calls) * wire.RESULT.size
        ended = wire.decode_ended(outcome[end:])
        results = wire.decode_results(outcome[:end])
        for number, (pending, (word, deadline_ns)) in enumerate(zip(calls, results, strict=True)):
            if pending.done:  # some() has settled this call
                continue
            if number in ended:
                pending.ended = (pending.ended or []) + ended[number]
            pending.word = word
            pending.deadline_ns = deadline_ns
            self._settle(pending, error if word == 0 else None)

    def _fail(self, error: DaemonError) -> None:
        for pending in self.pending:
            self._settle(pending, error)

    def _settle(self, pending: Pending, error: DaemonError | None) -> None:
        assert not pending.done
        pending.error = error
        pending.done = True
        if pending.on_done is not None:
            pending.on_done(pending)
