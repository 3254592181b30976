"""One session with the daemon: no socket, no clock, no thread.

The caller hands messages of the daemon to receive(), and takes messages to the daemon from frame().
The results of a batch go to its function `settle`. Records that are answered BUSY wait in `retries`
and are sent again after a pause, which the caller times. The blocking and the asyncio client use
the same class.

States:

    GREETING  a HELLO was sent or must be sent; batches wait
    OPEN      up to `window` batches are in flight
    CLOSED    the session has ended, or the daemon refused the HELLO for good

A batch receives its sequence when it is first handed out, and its bytes do not change after that.
So the daemon recognises a copy and answers it from memory. If the daemon has forgotten the session,
a batch moves to a new session only if it was certainly never applied; the other batches settle with
SessionExpired.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING

from purgatoryd.clients.batch import Batch, Letter
from purgatoryd.clients.retries import WAITING_MAX, Retries, all_busy, is_busy
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import DaemonError, MessageRefused, SessionExpired
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import Message, WireError
from purgatoryd.shm_layout.wire import Reply, Welcome

if TYPE_CHECKING:
    from purgatoryd.clients.ledger import Ledger

_PASSING = frozenset((
    WireError.SESSIONS_FULL, WireError.QUOTA, WireError.STOPPING, WireError.WRONG_SHARD,
))  # fmt: skip
"""Refusals of a HELLO that are temporary."""


class State(enum.Enum):
    """State of a session."""

    GREETING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class Query(Letter):
    """A question to the daemon. It may be sent twice, with the same effect as once.

    `build` makes the message from the number of the question and the id of the session. `settle`
    takes the reply, or the error that replaces it.
    """

    __slots__ = ("build", "settle")

    def __init__(
        self,
        build: Callable[[int, int], bytes],
        settle: Callable[[Reply | DaemonError], None],
    ) -> None:
        super().__init__()
        self.build = build
        self.settle = settle


class Session:
    """The client's end of one session, and of the sessions that replace it."""

    def __init__(
        self,
        nonce: Callable[[int], bytes] = HOST.random_bytes,
        *,
        durable: bool | None = False,
        ledger: Ledger | None = None,
        worker: bytes = b"",
        grace_ns: int = 0,
    ) -> None:
        self._nonce = nonce
        self._grace_ns = grace_ns
        self.original = False
        """True from the first welcome until another session replaces this session."""
        self._worker = worker  # our name in the WAL
        self._wants_durable = durable
        self._ledger = ledger
        self._hellos = 0
        self._questions = 0
        self._sequence = 0
        self._handed_out = 0
        self._waiting: deque[Batch] = deque()
        self._flight: dict[int, Batch] = {}  # ordered by sequence
        self._queries: dict[int, Query] = {}
        self._outgoing: deque[Letter] = deque()
        self._moving = False
        self._leaving = False
        self._deserted: dict[int, Letter] = {}
        """By id of a replaced session: its BYE, until the daemon has answered it."""
        self._first_id = 0
        self.retries = Retries()
        self.fruitless = False
        """True if the last answer refused each record of its batch as BUSY."""
        self.state = State.GREETING
        self.id = 0
        self.window = layout.WINDOW
        self.same_clock = True
        """True if this process and the daemon have the same CLOCK_BOOTTIME. Only then do batches
        contain their time of packing."""
        self.welcome: Welcome | None = None
        self.refusal: MessageRefused | None = None
        """Refusal of the last HELLO, until one is accepted."""
        self.astray: MessageRefused | None = None
        """Refusal of a shard that does not know our namespace; None once a shard answers."""
        self.on_outcomes: Callable[[bytes, int], object] | None = None
        """Takes the body and the number of outcomes of each OUTCOMES message. The daemon sends
        outcomes and CHECKs to the owner of operations."""
        self.on_jobs: Callable[[bytes, int], object] | None = None
        """Takes the body and the number of jobs of each JOBS message. The daemon sends jobs to the
        members of consumer groups."""
        self.on_open: Callable[[], object] | None = None
        """Called when the daemon may have forgotten the connection or the memberships of this
        session: after each welcome, and when messages are sent again."""
        self.on_lost: Callable[[SessionExpired], None] | None = None
        """Called when the session and the outcomes of its operations are lost."""
        self._greet()

    @property
    def durable(self) -> bool:
        """True if batches and cursor commits are answered once they are on disk."""
        if self._wants_durable is None:
            return self.welcome is not None and bool(self.welcome.wal)
        return self._wants_durable

    # ---- requests of the caller ----------------------------------------------------------

    def submit(self, batch: Batch) -> None:
        """Queue `batch` behind all other batches. It settles exactly once."""
        self._waiting.append(batch)

    def ask(self, query: Query) -> None:
        """Queue a question."""
        self._questions += 1
        self._queries[self._questions] = query
        if self.state is State.OPEN:
            self._address_query(self._questions, query)
            self._outgoing.append(query)

    def direct(self) -> tuple[int, int, int, int] | None:
        """Return (id, sequence, flags, window) for the next batch if a direct call may send it,
        else None. Then this session has sent all messages and received all answers."""
        quiet = self.state is State.OPEN and not (self.busy or self.sends or self._leaving)
        if not quiet or self._ledger is not None or self.astray is not None:
            return None
        flags = layout.FLAG_DURABLE * self.durable
        return self.id, self._sequence + 1, flags, self.window

    def note_direct(self, next_sequence: int, batches: Sequence[Batch]) -> None:
        """Note that direct calls have used all sequences below `next_sequence`. `batches`: the last
        of their batches, which have no answer."""
        self._sequence = next_sequence - 1
        first = next_sequence - len(batches)
        for number, batch in enumerate(batches):
            self._handed_out += 1
            batch.order, batch.sequence, batch.sent = self._handed_out, first + number, True
            batch.behind = number
            self._flight[batch.sequence] = batch

    def unsent(self, call: object) -> Batch | None:
        """Return the unsent batch that contains only this call, for withdraw(); None if there is
        none."""
        last = self._flight.get(self._sequence)
        batches = self._waiting if last is None else (*self._waiting, last)
        return next((batch for batch in batches if _call_of(batch) is call), None)

    def withdraw(self, batch: Batch) -> bool:
        """Take back a batch. Returns False if the socket has already accepted it."""
        if batch in self._waiting:
            self._waiting.remove(batch)
        elif batch.sent or self._flight.get(self._sequence) is not batch:
            return False
        else:
            self._sequence -= 1
            del self._flight[batch.sequence]
            self._outgoing.remove(batch)
        return True

    def abandon(self, calls: Set[object]) -> int:
        """Stop resending these calls. BUSY becomes the answer of their records that were refused as
        BUSY or wait behind a refused record. Returns the number of these records."""
        count = self.retries.abandon(calls)
        for batch in [b for b in self._waiting if _call_of(b) in calls] if count else ():
            self._waiting.remove(batch)
            batch.settle(all_busy(batch))
            count += batch.count
        return count

    def forget(self, query: Query) -> None:
        """Drop a question whose caller no longer waits."""
        self._queries = {n: q for n, q in self._queries.items() if q is not query}

    def acknowledge(self, acks: bytes) -> None:
        """Queue ACKs, a struct pg_ack each. If an ACK is lost, the daemon sends the outcome
        again."""
        most = layout.BATCH_RECORDS * wire.ACK.size
        if self.state is State.OPEN:
            for first in range(0, len(acks), most):
                some = acks[first : first + most]
                self._outgoing.append(Letter(wire.encode_acks(self.id, some)))

    def call(self) -> None:
        """Send a PING, so that the daemon knows the connection to which it sends outcomes and jobs
        of this session."""
        if self.state is State.OPEN and (self.on_outcomes or self.on_jobs):
            self._outgoing.append(Letter(wire.encode_frame(Message.PING, self.id)))

    def bye(self) -> None:
        """End the session. The client must have no batch in flight."""
        self._leaving = True
        if self.state is State.OPEN:
            self._outgoing.append(self._bye())
        else:
            self.state = State.CLOSED

    def _bye(self) -> Letter:
        return Letter(wire.encode_frame(Message.BYE, self.id))

    @property
    def busy(self) -> bool:
        """True while a batch or a question has no answer, or a session that was replaced has no
        answer to its BYE."""
        return bool(
            self._flight or self._waiting or self._queries or self.retries or self._deserted
        )

    @property
    def sends(self) -> bool:
        """True while a message waits for the socket."""
        return bool(self._outgoing)

    @property
    def leaving(self) -> bool:
        """True while the BYE of this session has no answer."""
        return self._leaving and self.state is State.OPEN

    def in_doubt(self) -> int:
        """Return the number of records that were sent and have no answer."""
        return sum(b.count for b in self._flight.values() if b.sent)

    # ---- sending ---------------------------------------------------------------------------

    def frame(self) -> bytes | None:
        """Return the next message to send, or None. Call sent() once the socket has accepted it."""
        if not self._outgoing and self.state is State.OPEN and not self._window_full():
            batch = self._next()
            if batch is not None:
                self._hand_out(batch)
        return self._outgoing[0].frame if self._outgoing else None

    def _next(self) -> Batch | None:
        """Return the next batch, or the part of it that need not wait for busy keys; None if no
        batch can be sent."""
        if self.retries.in_round:
            return self.retries.again(in_flight=bool(self._flight))
        batch: Batch | None = None
        while batch is None and self._waiting and self.retries.waiting < WAITING_MAX:
            batch = self._waiting.popleft()
            if not batch.order:
                self._handed_out += 1
                batch.order = self._handed_out
            batch = self.retries.free(batch) if self.retries else batch
        return batch

    def _hand_out(self, batch: Batch) -> None:
        self._sequence += 1
        batch.behind = self._sequence - next(iter(self._flight), self._sequence)
        batch.address(self.id, self._sequence, self.durable, self.same_clock)
        self._flight[self._sequence] = batch
        self._outgoing.append(batch)

    def sent(self) -> None:
        """Note that the socket has accepted the message that frame() returned."""
        self._outgoing.popleft().sent = True

    def resend(self) -> None:
        """Queue all messages without an answer again, after a reconnect or when an answer is
        overdue."""
        self._outgoing.clear()
        if self.state is State.GREETING:
            self._outgoing.append(Letter(self._hello))
        elif self.state is State.OPEN:
            self._outgoing.extend(self._deserted.values())
            self._hand_out_again(list(self._flight.values()))
            self._outgoing.extend(self._queries.values())
            self.call()
            self._reopened()
            if self._leaving:
                self._outgoing.append(self._bye())

    def moved(self) -> None:
        """Send a HELLO to the daemon that holds this session after resharding, perhaps under
        another id."""
        self._moving |= self.state is State.OPEN
        self.state = State.GREETING
        self.resend()

    def _hand_out_again(self, batches: list[Batch]) -> None:
        for batch in batches:
            batch.doubtful = batch.doubtful or batch.sent
        self._outgoing.extend(batches)

    def _window_full(self) -> bool:
        # The daemon remembers the results of the last `window` batches. So the limit applies to the
        # distance to the oldest unanswered batch, not to the number of unanswered batches.
        return bool(self._flight) and self._sequence - next(iter(self._flight)) + 1 >= self.window

    def _address_query(self, number: int, query: Query) -> None:
        query.frame = query.build(number, self.id)

    # ---- receiving -------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Take one message of the daemon. Raises ProtocolError if it is malformed."""
        reply = wire.decode_reply(data)
        self.fruitless = False
        handler = self._HANDLERS.get(reply.message)
        if handler is not None:
            handler(self, reply)

    def _on_hello(self, reply: Reply) -> None:
        if self.state is not State.GREETING or reply.sequence != self._hellos:
            return
        if reply.error:
            self._on_refused_hello(reply.refusal())
            return
        self.welcome = wire.decode_welcome(reply.body)
        self.original = self._hellos == 1
        self.refusal = None
        self.id = self.welcome.session
        self.window = min(layout.WINDOW, self.welcome.window)
        self.state = State.OPEN
        if self._moving and self.welcome.first_id != self._first_id:
            self._give_up([b for b in self._flight.values() if not (b.doubtful or b.sent)])
        self._moving, self._first_id = False, self.welcome.first_id
        self._sequence = max(self.welcome.last, *self._flight, 0)
        self._address_again()
        for number, query in self._queries.items():
            self._address_query(number, query)
        self._outgoing.extend(self._queries.values())
        self._reopened()
        if self._leaving:
            self._outgoing.append(self._bye())

    def _reopened(self) -> None:
        if self.on_open is not None and not self._leaving:
            self.on_open()

    def _address_again(self) -> None:
        """Address the batches in flight to the new id of a session that has moved."""
        batches = list(self._flight.values())
        self._hand_out_again(batches)
        for batch in batches:
            doubtful = batch.doubtful
            batch.address(self.id, batch.sequence, self.durable, self.same_clock)
            batch.doubtful = doubtful

    def _on_refused_hello(self, refusal: MessageRefused) -> None:
        self.refusal = refusal
        if refusal.error in _PASSING:
            return  # temporary: the HELLO is sent again, to this shard or to another shard
        self.state = State.CLOSED
        waiting, self._waiting = self._waiting, deque()
        queries, self._queries = self._queries, {}
        for batch in waiting:
            batch.settle(refusal)
        self.retries.fail(refusal)
        for query in queries.values():
            query.settle(refusal)

    def _on_batch(self, reply: Reply) -> None:
        batch = self._flight.get(reply.sequence)
        if batch is None or reply.session != self.id:
            return  # the answer to a copy of a settled batch
        if reply.error == WireError.WRONG_SHARD:
            self.astray = reply.refusal()  # the batch is sent again, to this or another shard
        elif not reply.error:
            self.astray = None
            wire.check_results(reply.body, batch.count)
            del self._flight[reply.sequence]
            self._note_answer(batch, reply.body)
            self._settle(batch, reply.body)
        elif reply.error == WireError.SESSION_EXPIRED:
            self._expire(batch)
        elif reply.error == WireError.OUT_OF_ORDER:
            self._reorder(batch, reply.detail[0])
        elif reply.error in (WireError.STALE, WireError.CHANGED):
            self._desert(self._sequence + 1)  # a batch that is unknown here used the sequence
        elif reply.error == WireError.NOT_DURABLE:  # the batch was applied; the session continues
            del self._flight[reply.sequence]
            batch.settle(reply.failure())
        elif reply.error not in (WireError.STOPPING, WireError.BUSY):  # else the batch is resent
            self._abandon(batch, reply.refusal())

    def _settle(self, batch: Batch, results: bytes) -> None:
        busy = is_busy(results, batch.count)
        self.fruitless = busy and results.startswith(all_busy(batch))
        if busy and batch.places is None:
            self.retries.refused(batch, results)
        else:
            batch.settle(results)

    def _note_answer(self, batch: Batch, results: bytes) -> None:
        if self._ledger is not None and self.welcome is not None:
            self._ledger.answered(
                self.welcome.uuid, batch.rows, batch.body, batch.names, batch.names_bytes,
                batch.count, results,
            )  # fmt: skip

    def _on_query(self, reply: Reply) -> None:
        if reply.error == WireError.STOPPING or reply.session != self.id:
            return
        if reply.error == WireError.WRONG_SHARD:
            self.astray = reply.refusal()
            return
        if reply.error == WireError.SESSION_EXPIRED:
            self._forgotten()
        elif query := self._queries.pop(reply.sequence, None):
            self.astray = None
            query.settle(reply.failure() if reply.error else reply)

    def _on_outcomes(self, reply: Reply) -> None:
        if reply.session == self.id and self.on_outcomes is not None:
            if self._ledger is not None and self.welcome is not None:
                outcomes = wire.decode_outcomes(reply.body, reply.records)
                self._ledger.ended(self.welcome.uuid, outcomes)
            self.on_outcomes(reply.body, reply.records)

    def _on_jobs(self, reply: Reply) -> None:
        if reply.session == self.id and self.on_jobs is not None:
            self.on_jobs(reply.body, reply.records)

    def _on_ping_or_ack(self, reply: Reply) -> None:
        if reply.error == WireError.SESSION_EXPIRED and reply.session == self.id:
            self._forgotten()

    def _on_bye(self, reply: Reply) -> None:
        self._deserted.pop(reply.session, None)
        if self.state is State.OPEN and reply.session == self.id:
            self.state = State.CLOSED

    _HANDLERS = {  # noqa: RUF012  -- a table, never written
        int(Message.HELLO): _on_hello,
        int(Message.BATCH): _on_batch,
        int(Message.QUERY): _on_query,
        int(Message.BULK_LOAD): _on_query,
        int(Message.GROUP): _on_query,
        int(Message.DEAD): _on_query,
        int(Message.LIST): _on_query,
        int(Message.SWEEP): _on_query,
        int(Message.SCHEDULE): _on_query,
        int(Message.CURSOR): _on_query,
        int(Message.BYE): _on_bye,
        int(Message.PING): _on_ping_or_ack,
        int(Message.ACK): _on_ping_or_ack,
        int(Message.OUTCOMES): _on_outcomes,
        int(Message.JOBS): _on_jobs,
    }

    # ---- when the session breaks -------------------------------------------------------------

    def _forgotten(self) -> None:
        """Replace a session that the daemon does not know.

        Do nothing while batches are in flight, because the answer to each batch says whether it was
        certainly never applied. Do nothing while a HELLO is unanswered: the session is already
        being replaced, and a second HELLO would leave an unused session.
        """
        if self.state is State.OPEN and not self._flight:
            self._replace(0)

    def _expire(self, refused: Batch) -> None:
        # A batch that was sent once and refused was never applied, nor was a later batch that was
        # sent once. An earlier batch, or a batch that was sent several times, may have been
        # applied.
        self._replace(refused.sequence)

    def _reorder(self, refused: Batch, expected: int) -> None:
        if expected in self._flight:
            at_once = self.astray is None and refused.sequence == expected + 1
            if at_once:  # the whole window is sent again at once
                later = [b for b in self._flight.values() if b.sequence >= expected]
                self._outgoing = deque(o for o in self._outgoing if o not in later)
                self._hand_out_again(later)
        elif expected not in range(refused.sequence, self._sequence + 1):
            self._desert(self._sequence + 1)  # the daemon's state of this session differs from ours

    def _abandon(self, refused: Batch, refusal: MessageRefused) -> None:
        # No batch after a refused batch can have been applied, even if several copies were sent.
        del self._flight[refused.sequence]
        for batch in self._flight.values():
            if batch.sequence > refused.sequence:
                batch.doubtful = False
        refused.settle(refusal)
        self._desert(refused.sequence)

    def _desert(self, first_certain: int) -> None:
        """Replace a session that the daemon still has, and tell the daemon to end it."""
        bye = self._deserted[self.id] = self._bye()
        self._replace(first_certain)
        self._outgoing.appendleft(bye)

    def _replace(self, first_certain: int) -> None:
        """Open a new session.

        Batches move to the new session if their sequence is at least `first_certain` and no copy is
        in doubt. The outcome of the other batches is unknown. A session that is about to end is not
        replaced.
        """
        if self._leaving:
            self.state = State.CLOSED
            return
        flight = self._flight.values()
        self._greet()
        self._give_up([b for b in flight if b.sequence >= first_certain and not b.doubtful])

    def _give_up(self, certain: list[Batch]) -> None:
        """Move the batches of `certain`, which were certainly never applied, to the next session.
        The outcome of the other batches is unknown."""
        lost = [b for b in self._flight.values() if b not in certain]
        error = SessionExpired(session=self.id, in_doubt=sum(b.count for b in lost))
        self._flight.clear()
        for part in (b for b in certain if b.places is not None):
            self.retries.returned(part)
        self._waiting.extendleft(reversed([b for b in certain if b.places is None]))
        _fail(lost, error)
        if self.on_lost is not None:
            self.on_lost(error)

    def _greet(self) -> None:
        # The number distinguishes this HELLO from earlier HELLOs, whose answers may come late.
        self._hellos += 1
        self._hello = wire.encode_hello(self._nonce(16), self._hellos, self._worker, self._grace_ns)
        self._grace_ns = 0  # no process can resume a session that replaces this one
        self.original = False
        self.state = State.GREETING
        self._outgoing.clear()
        self._outgoing.append(Letter(self._hello))


def _call_of(batch: Batch) -> object:
    """Return the only call of `batch`; None if its records belong to several calls."""
    of = batch.calls
    return of if not isinstance(of, list) else of[0] if len(of) == 1 else None


def _fail(batches: Iterable[Batch], error: DaemonError) -> None:
    for batch in batches:
        batch.settle(error)
