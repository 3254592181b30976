"""Types of the extension that packs batches; clients/pack/module.c has its code."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from purgatoryd.clients.batch import Batch
from purgatoryd.clients.connection import Connection
from purgatoryd.shm_layout.errors import DaemonError
from purgatoryd.shm_layout.wire import Key, Verdict

Made = TypeVar("Made")
Column = list[Any] | tuple[str, Any, Any, int, int] | None
"""A list of objects, or (letter, buffer, offsets or entries, first offset, detail). Letters: S, U
numpy's bytes and str; i, l Arrow's 32-bit and 64-bit offsets, with the enum pg_key_type; d seconds;
q whole numbers, with their unit in ns; t times in ns, with their enum pg_time_kind; c indexes of a
list of entries of the name table; B flags, one byte each."""

class Answer:
    """A call and its outcome."""

    key: Key
    on_done: Callable[[Any], None] | None
    namespace: str
    topic: str
    payload: bytes
    connection: Connection
    """The connection that sends the call."""
    error: DaemonError | None
    ended: list[Key] | None
    """Keys of the operations that CANCEL_FOR_KEY ended."""
    packed: bool
    """True once the record is in a batch or was sent."""
    done: bool
    word: int
    """ticket << 8 | enum pg_status."""
    deadline_ns: int

    def __init__(
        self, key: Key = ..., on_done: Callable[[Any], None] | None = None, namespace: str = ...,
        topic: str = ..., payload: bytes = ..., /,
    ) -> None: ...  # fmt: skip

class Lease:
    """A lease of one job."""

    member: Any
    id: bytes
    key: Key
    pending: Any
    ticket: int
    attempt: int
    ends_s: float
    op: int
    handed: bool
    extending: bool
    limited: bool
    lost: bool

class Job:
    """The fields of a job. A job that is collected without an answer, and whose lease is not lost,
    calls _desk.drop(lease)."""

    _lease: Any
    _desk: Any
    key: Key
    payload: bytes
    topic: str
    group: str
    ticket: int
    attempt: int
    missed: int
    priority: int
    verdict: Verdict | None
    deadline_boot_ns: int
    fired_boot_ns: int
    wall_offset_ns: int
    _cause: int
    _flags: int
    _received_ns: int | None

def jobs_receive(
    body: bytes, count: int, jobs: dict[bytes, Any], ended: set[bytes], older: set[bytes],
    member: object, lease_type: type[Lease], job_type: type[Job], desk: object, group: str,
    received_ns: int | None, since_ns: int, now_s: float, endless: bool,
    decode_key: Callable[[int, bytes], Key],
    decode_verdict: Callable[[bytes], tuple[Verdict, bytes]], /,
) -> list[Any] | None:  # fmt: skip
    """Take the body of a JOBS message, and add the new leases to `jobs`. Returns the new jobs; None
    if bytes are missing.

    `ended` and `older`: the ids of leases that have ended. `now_s`: host time; `since_ns`: the same
    time on the daemon's clock, -1 = that of sending. `endless`: the ends of leases are unknown."""

def jobs_take(
    get: Callable[[], object], empty: type[Exception], jobs: list[Any], most: int, now_s: float, /
) -> bool:
    """Take jobs with get() until the list has `most`, or get() raises `empty`. Jobs that have an
    answer, or whose lease has ended, are left out. Returns True if the queue had a None."""

def leases_answer(
    name: bytes, op: int, leases: list[Any], call: object, /
) -> tuple[list[Any], list[Any], tuple[int, int, int, bytes]]:
    """Pack the same answer to many leases, whose `pending` becomes `call`. Returns the leases in
    the batch, those that have an answer already or have ended, and what Builder.body returns."""

def leases_end(
    leases: list[Any], results: bytes, jobs: dict[bytes, Any], ended: set[bytes], /
) -> list[int]:
    """Note the results of answers: leases whose answer the daemon has taken move from `jobs` to
    `ended`. Returns the indexes of the others; nothing has happened to these."""

class Maker(Generic[Made]):
    """Makes objects of a frozen dataclass with slots, without its slow __init__. `slots`: the names
    of its slots, in the order of the values."""

    def __init__(self, made: type[Made], slots: tuple[str, ...], /) -> None: ...
    def make(self, *values: object) -> Made:
        """Return a new object with a value for each slot."""

class Requests:
    """The requests to a client's engine. `queue`: has put() and empty(). `nothing`: a request that
    only wakes the engine. `kicked`: the eventfd that ends the engine's waits for messages; -1 =
    none."""

    def __init__(self, queue: Any, nothing: object, kicked: int, /) -> None: ...
    def put(self, request: object, /) -> None:
        """Put a request into the queue; no direct call begins before the engine has taken it."""

    def open(self, request: object, /) -> None:
        """Put the request of a lot into the queue. The lot is open until the next put()."""

    streams: bool
    """True if the only request since the engine became idle is that of a lot."""

    def admit(self) -> None:
        """Let direct calls begin, if the queue is empty."""

class Direct:
    """The direct calls of a connection. `wait_ns`: longest time until a call leaves its message to
    the engine. `spin_ns`: longest time that a call looks for its answer without sleep. `adapts`:
    while such looks mostly find nothing, most calls omit them.

    With `wait_ns` 0 the calls are those of an event loop, which is its own engine. They do not
    sleep, and the loop calls collect() once a descriptor of the channel is readable."""

    def __init__(
        self, requests: Requests, connection: Connection, namespace: str,
        topics: dict[str, bytes], entry: bytes, modes: dict[str, int], wait_ns: int,
        spin_ns: int, adapts: bool, /,
    ) -> None: ...  # fmt: skip
    @staticmethod
    def find_zmq(path: str, /) -> bool:
        """Find the functions of libzmq in the mapped library of this path, or in a library that it
        needs. Returns False if they are not there."""

    def lend(
        self, kind: str, first: int, second: int, fd: int, other_fd: int, session: int,
        sequence: int, flags: int, window: int, same_clock: bool, delays: bool, /,
    ) -> None:  # fmt: skip
        """Let direct calls use a channel. The first five arguments are AnyChannel.addresses.
        `sequence`: that of the next batch. `window`: largest number of batches without an answer.
        `delays`: the daemon computes deadlines from delays."""

    def take_back(
        self,
    ) -> tuple[int, tuple[tuple[Any, bytes], ...], Any, bytes | None] | None:
        """Wait until no direct call runs, and let none begin. Returns the sequence of the next
        batch; (Answer or Lot, message) for what was sent and has no answer, in order; the lot that
        callers fill, or None; and a message of the daemon that a call received but did not take, or
        None. Returns None if no channel was lent."""

    lots: int
    """Number of lots that callers have sent."""

    def stream(self, lot: Lot, /) -> None:
        """Let callers send a lot, and the lots after it, once they are full. No effect unless
        Requests.streams is True and a channel is lent."""

    def collect(self) -> bool | None:
        """Look for the answer of a call of an event loop. Returns True if the call has its outcome;
        None if it has none yet; False if the loop has to take back the channel."""

    def record(
        self, answer: Answer, limit_s: float, name: bytes, op: int, mode: int, key_type: int,
        key: bytes, time_kind: int, flags: int, payload: bytes, extension: bytes, time_ns: int,
        value: int, /,
    ) -> bool | None:  # fmt: skip
        """Make a direct call with one record. Returns True if `answer` has its outcome; False if
        nothing was sent; None if the message was left to the engine, which takes its answer. That
        happens after `limit_s` seconds at the latest.

        A call of an event loop looks for its answer for `spin_ns`, whatever `limit_s` is. It
        returns None if it was sent, and False if it was sent and has an unusual answer already;
        `answer.packed` says whether it was sent."""

    def add(self, answer: Answer, limit_s: float, arguments: tuple[Any, ...], /) -> bool | None:
        """Make a direct call with the arguments of Core.put, and set the fields of `answer`.
        Returns as record() does; also False if an argument needs a conversion by Python."""

    def cancel(self, answer: Answer, limit_s: float, arguments: tuple[Any, ...], /) -> bool | None:
        """Make a direct call with the arguments of Core.cancel, as add() does."""

    def batch(
        self, batch: Batch, limit_s: float, count: int, names: int, names_bytes: int, body: bytes,
        results: list[bytes], unanswered: set[int], index: int, /,
    ) -> None:  # fmt: skip
        """Make a direct call with a batch. batch.sent becomes True if the message was sent. A plain
        answer is stored in results[index], and `index` leaves `unanswered`. Without one the message
        is left to the engine, which takes its answer."""

    def get(self, limit_s: float, key: Key, /) -> bytes | None:
        """Ask for the timer of a key. Returns the daemon's reply, or None if the engine has to
        ask."""

class Lot:
    """Calls that do not wait, in one batch. `requests`: the requests to the engine. `records_max`,
    `bytes_max`: a lot with so many records or more bytes takes no further record. `delays`: the
    daemon computes deadlines from delays. `kind`: class of the handles. `direct`: lets a caller
    send the full lot; None = only the engine sends it."""

    calls: dict[int, Any]
    """The Answers of calls for which somebody has asked, by index of the record."""
    results: bytes | None
    """The struct pg_result of each record; None before the answer."""
    collected: bool
    """True once the engine has the batch, or a caller has sent it."""

    def __init__(
        self, requests: Requests, direct: Direct | None, records_max: int, bytes_max: int,
        delays: bool, topics: dict[str, bytes], entry: bytes, modes: dict[str, int],
        kind: type[Receipt], /,
    ) -> None: ...  # fmt: skip
    def __len__(self) -> int: ...
    def record(self, call: Answer, fields: tuple[Any, ...], /) -> bool:
        """Add a record: the arguments of Builder.record as `fields`. Returns False if the lot is
        not open."""

    def shut(self) -> None:
        """Take no further record."""

    def body(self) -> tuple[int, int, int, bytes]:
        """Shut the lot, and return what Builder.body returns."""

    def row(self, number: int, /) -> tuple[int, int, bytes, bytes, bytes]:
        """Return (operation, key type, key, entry of the name table, payload) of a record."""

class Receipt:
    """A client, and a call that it made."""

    _client: Any
    @property
    def _pending(self) -> Any:
        """The call. A call in a lot gets its Answer from Lot.of()."""

    def __init__(self, client: object, call: object, /) -> None: ...

class Caller:
    """A client. Its add() and cancel() with wait=False add plain calls to `_lot`. For all other
    calls they call the methods of TimerCalls, which have the documentation."""

    _lot: Lot | None

class Builder:
    """A batch under construction."""

    def __init__(self, bytes_max: int, /) -> None: ...
    def __len__(self) -> int: ...
    def fits(self, name: bytes, /) -> bool: ...
    def record(
        self, name: bytes, op: int, mode: int, key_type: int, key: bytes, time_kind: int,
        flags: int, payload: bytes, extension: bytes, time_ns: int, value: int, /,
    ) -> None: ...  # fmt: skip
    def fill(self, source: Source, start: int, /) -> int: ...
    def body(self) -> tuple[int, int, int, bytes]: ...

class Source:
    """The rows of a bulk call."""

    count: int
    """Number of rows."""

    def __init__(
        self, count: int, op: int, mode: int, flags: int, delays: bool, now_ns: int, entry: bytes,
        topics: dict[str, bytes],
        slow: Callable[[int], tuple[int, int, int, bytes, bytes, bytes, int, int, bytes]],
        rows: list[Any] | None, key: Column, time: Column, topic: Column, payload: Column,
        flags_of_rows: Column, watched: Column, value: Column, /,
    ) -> None: ...  # fmt: skip

class Table:
    """Answers and outcomes of a watch_many()."""

    _rows: int
    """Number of rows."""
    open: int
    """Number of rows that have no outcome and were not refused."""
    _ended: int
    """Number of rows that have an outcome."""

    def __init__(self, rows: int, /) -> None: ...
    def _answers(self) -> bytes: ...
    def _outcomes(self) -> bytes: ...
    def _order(self, first: int, /) -> bytes: ...

class Tickets:
    """Rows of operations by ticket."""

    open: int
    """Number of operations that have not ended."""
    places: int
    """Number of operations that have memory."""
    touched: list[Any]
    """Tables that have outcomes which the caller has not seen."""

    def __init__(self) -> None: ...
    def add(self, table: Table, results: bytes, rows: bytes, /) -> int: ...
    def receive(self, body: bytes, count: int, /) -> tuple[bytes, list[int]] | int: ...
    def end(
        self, ticket: int, cause: int, armed_ns: int, ended_ns: int, watermark: int, error: int,
        missing: int, failed: int, /,
    ) -> bool: ...  # fmt: skip
    def has(self, ticket: int, /) -> bool: ...
    def clear(self) -> None: ...
