"""The sans-I/O session with a model daemon: losses, broken connections, restarts, evictions."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter, deque
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from real_daemon import PATIENCE_S
from unconnected import connection_of, with_partitions

from purgatoryd.clients import jobs
from purgatoryd.clients.arguments import LIMIT_S, check_limit_s
from purgatoryd.clients.batch import Batch, Outcome
from purgatoryd.clients.channel import Channel
from purgatoryd.clients.client import Client
from purgatoryd.clients.connection import BUSY_MAX_S, BUSY_S
from purgatoryd.clients.core import Core
from purgatoryd.clients.engine import Call, CallThread, Engine
from purgatoryd.clients.packing import Builder, Entry, Packer, PendingCancel
from purgatoryd.clients.poller import ChannelPoller
from purgatoryd.clients.session import Query, Session, State
from purgatoryd.clients.subscriber import CHECK_S, FIRST_CHECK_S, PROBATION_S, Inbox
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import (
    Closed,
    DaemonError,
    InvalidArgument,
    MessageRefused,
    SessionExpired,
)
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import Message, WireError

pytestmark = pytest.mark.tier("check")

REFUSED = 5  # the model refuses each batch whose body is a multiple of 5


@dataclass
class ServerSession:
    first_id: int = 0
    last: int = 0
    replies: dict[int, bytes] = field(default_factory=dict)


class ModelDaemon:
    """The protocol's rules for sessions in their simplest form. The body of a batch is a number,
    and the model applies the batch by storing this number."""

    def __init__(self) -> None:
        self.sessions: dict[int, ServerSession] = {}
        self.nonces: dict[bytes, int] = {}
        self.applied: list[int] = []
        self.ids = itertools.count(1)
        self.strange = False
        """True while the daemon answers that it does not know the namespace."""

    def handle(self, request: bytes) -> bytes:
        head = wire.FRAME.unpack_from(request)
        message, session, sequence = head[2:5]
        if message == Message.HELLO:
            return self._hello(request[wire.FRAME.size :][:16], sequence)
        if message == Message.BYE:
            self.sessions.pop(session, None)
            return wire.encode_frame(message, session, sequence)
        if session not in self.sessions:
            return self._error(head, WireError.SESSION_EXPIRED)
        if message == Message.QUERY:
            info = wire.INFO.pack(layout.Status.UNKNOWN, 0, -(2**63), *[0] * 12)
            return wire.encode_frame(message, session, sequence, count=1) + info
        return self._batch(head, self.sessions[session], request[wire.FRAME.size :])

    def _hello(self, nonce: bytes, sequence: int) -> bytes:
        number = self.nonces.get(nonce)
        if number not in self.sessions:
            number = self.nonces[nonce] = next(self.ids)
            self.sessions[number] = ServerSession(number)
        welcome = wire.WELCOME.pack(
            number, 7, bytes(16), 0, 1, 0, 0, self.sessions[number].last, 1, 0, 4, 1024, 1 << 23,
            0, 0, 0, self.sessions[number].first_id, 0, 0,
        )  # fmt: skip
        return wire.encode_frame(Message.HELLO, number, sequence) + welcome

    def move(self) -> None:
        """Move all sessions to another daemon, which gives them other ids."""
        known = {number: next(self.ids) for number in self.sessions}
        self.nonces = {n: known[number] for n, number in self.nonces.items() if number in known}
        self.sessions = {known[number]: session for number, session in self.sessions.items()}
        for number, session in self.sessions.items():
            for sequence, reply in session.replies.items():
                session.replies[sequence] = reply[:8] + number.to_bytes(8, "little") + reply[16:]

    def _batch(self, head: tuple[int, ...], session: ServerSession, body: bytes) -> bytes:
        sequence = head[4]
        if sequence <= session.last:
            if sequence not in session.replies:
                return self._error(head, WireError.STALE)
            return session.replies[sequence]
        if sequence != session.last + 1:
            return self._error(head, WireError.OUT_OF_ORDER, (session.last + 1, sequence))
        if self.strange:
            return self._error(head, WireError.WRONG_SHARD)
        number = int.from_bytes(body, "little")
        if number % REFUSED == 0:
            return self._error(head, WireError.MALFORMED)
        self.applied.append(number)
        session.last = sequence
        reply = wire.encode_frame(Message.BATCH, head[3], sequence, count=1)
        session.replies[sequence] = reply + wire.RESULT.pack(number << 8 | 1, number)
        session.replies.pop(sequence - layout.WINDOW, None)
        return session.replies[sequence]

    def _error(
        self, head: tuple[int, ...], error: WireError, detail: tuple[int, int] = (0, 0)
    ) -> bytes:
        return wire.encode_frame(head[2], head[3], head[4], error=error, detail=detail)


class Conversation(RuleBasedStateMachine):
    """A connection keeps order and loses nothing until it breaks. Then it loses the messages in
    flight, except for requests that the daemon still reads. The client may notice the break at any
    later time."""

    def __init__(self) -> None:
        super().__init__()
        nonces = itertools.count()
        self.client = Session(lambda n: next(nonces).to_bytes(n, "little"))
        self.daemon = ModelDaemon()
        self.requests: deque[bytes] = deque()
        self.replies: deque[bytes] = deque()
        self.outcomes: dict[int, Outcome] = {}
        self.submitted = 0
        self.broken = False
        exchange(self.client, self.daemon)

    @rule(count=st.integers(1, 5))
    def submit(self, count: int) -> None:
        for _ in range(count):
            self._submit()

    def _submit(self) -> None:
        number = self.submitted = self.submitted + 1

        def settle(outcome: Outcome) -> None:
            assert number not in self.outcomes, "a call was settled twice"
            self.outcomes[number] = outcome

        self.client.submit(Batch(1, 1, 8, number.to_bytes(8, "little"), settle))

    @rule(count=st.integers(1, 5))
    def send(self, count: int) -> None:
        for _ in range(count):
            if (frame := self.client.frame()) is None:
                return
            self.requests.append(frame)
            self.client.sent()

    @rule(count=st.integers(1, 5))
    def serve(self, count: int) -> None:
        for _ in range(min(count, len(self.requests))):
            self.replies.append(self.daemon.handle(self.requests.popleft()))

    @rule(count=st.integers(1, 5))
    def receive(self, count: int) -> None:
        for _ in range(min(count, len(self.replies))):
            self.client.receive(self.replies.popleft())

    @precondition(lambda self: self.replies)
    @rule()
    def drop_reply(self) -> None:
        """Lose a reply, as if the daemon's queue to a slow client were full."""
        self.replies.popleft()

    @rule(survive=st.integers(0, 3))
    def break_connection(self, survive: int) -> None:
        """Break the connection. The daemon still reads the first `survive` requests; no reply
        arrives."""
        for request in list(self.requests)[:survive]:
            self.daemon.handle(request)
        self.requests.clear()
        self.replies.clear()
        self.broken = True

    @precondition(lambda self: self.broken)
    @rule()
    def notice_break(self) -> None:
        self.broken = False
        self.client.resend()

    @rule(survive=st.integers(0, 3))
    def move(self, survive: int) -> None:
        """Change the number of shards, which moves the sessions."""
        self.break_connection(survive)
        self.daemon.move()
        self.client.moved()
        self.broken = False

    @rule()
    def know_the_namespace_or_not(self) -> None:
        self.daemon.strange = not self.daemon.strange

    @precondition(lambda self: self.client.busy)
    @rule()
    def resend_what_is_overdue(self) -> None:
        self.client.resend()
        self.send(5)

    @precondition(lambda self: self.client.id in self.daemon.sessions)
    @rule()
    def evict(self) -> None:
        del self.daemon.sessions[self.client.id]

    @invariant()
    def never_twice(self) -> None:
        twice = [n for n, times in Counter(self.daemon.applied).items() if times > 1]
        assert not twice, f"applied twice: {twice}"

    @invariant()
    def outcomes_are_true(self) -> None:
        for number, outcome in self.outcomes.items():
            if isinstance(outcome, bytes):
                assert outcome == wire.RESULT.pack(number << 8 | 1, number)
                assert number in self.daemon.applied
            elif isinstance(outcome, MessageRefused):
                assert number not in self.daemon.applied

    @invariant()
    def window_is_kept(self) -> None:
        flight = self.client._flight
        if flight:
            assert max(flight) - min(flight) < layout.WINDOW

    def teardown(self) -> None:
        self.daemon.strange = False
        for _ in range(100):
            if len(self.outcomes) == self.submitted:
                break
            self.client.resend()
            for _ in range(10):
                self.send(5)
                self.serve(50)
                self.receive(50)
        assert len(self.outcomes) == self.submitted, "a call never settled"
        self.outcomes_are_true()
        self.never_twice()
        settled = [n for n, outcome in sorted(self.outcomes.items()) if isinstance(outcome, bytes)]
        assert [n for n in self.daemon.applied if n in settled] == settled, (
            "calls were applied out of order"
        )


TestConversation = pytest.mark.filterwarnings("ignore")(Conversation.TestCase)
TestConversation.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def exchange(client: Session, daemon: ModelDaemon) -> None:
    while (frame := client.frame()) is not None:
        client.sent()
        client.receive(daemon.handle(frame))


# ---- single cases --------------------------------------------------------------------------


@pytest.fixture
def model() -> ModelDaemon:
    return ModelDaemon()


def batch(outcomes: list[Outcome], number: int = 1) -> Batch:
    return Batch(1, 1, 8, number.to_bytes(8, "little"), outcomes.append)


@pytest.mark.parametrize(("extend", "later_s"), [(True, 17.0), (False, 10.0)])
def test_only_an_answer_extends_the_deadline_of_a_call(extend: bool, later_s: float) -> None:
    now_s = 0.0
    connection: Any = SimpleNamespace(
        answers=0, give_up=lambda: None, session=SimpleNamespace(retries=None),
        host=SimpleNamespace(monotonic_s=lambda: now_s),
        overdue=lambda subject, limit_s: TimeoutError(subject),
    )  # fmt: skip
    job = jobs.until(connection, lambda: False, "call", 10.0, extend=extend)
    assert next(job) == 10.0
    now_s = 6.0
    assert next(job) == 10.0
    now_s, connection.answers = 7.0, 1
    assert next(job) == later_s
    now_s = later_s
    with pytest.raises(TimeoutError):
        next(job)


@pytest.mark.parametrize("packed", [False, True])
def test_an_interrupted_call_has_its_handle_if_it_was_packed(packed: bool) -> None:
    def open_lot(entry: Entry[Any], _: int) -> None:
        entry.pending.packed = packed
        raise KeyboardInterrupt

    engine: Any = SimpleNamespace(knows=lambda fact: fact())
    engine.leave_handle = partial(CallThread.leave_handle, engine)
    client: Any = SimpleNamespace(_engine=engine, _open_lot=open_lot, _space=lambda *_: 1)
    one = with_partitions(1, "demo", "shop").cancel("k", 0, collect=False)
    with pytest.raises(KeyboardInterrupt) as caught:
        Client._later(client, one, 1.0)
    assert hasattr(caught.value, "handle") is packed


def test_calls_that_do_not_fit_the_queue_wait_for_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "space", lambda *_: [1.0])
    monkeypatch.setattr(jobs, "awaited", lambda *_: [2.0])
    core = with_partitions(1, "demo", "shop")
    packer = core.connections[0].packer
    entries = [core.cancel(key, 0, collect=False) for key in "abc"]
    waited = [(due_s, packer.queued) for due_s in jobs.several(2, entries, 10.0)]
    assert waited == [(1.0, 2)] + [(2.0, 3)] * 3, "one wait for space, then one for each answer"


def test_a_broken_engine_refuses_calls_in_its_queue() -> None:
    engine: Any = object.__new__(Engine)
    engine._requests, engine._calls, engine._at_end = SimpleQueue(), [], lambda: None
    call: Call[None] = Call(iter(()))  # type: ignore[arg-type]
    for request in (call, lambda: None):
        engine._requests.put(request)
    engine._refuse(Closed("client"))
    assert engine._requests.empty()
    assert call.done
    with pytest.raises(Closed):
        call.outcome()


def test_a_batch_is_sealed_once_it_is_full() -> None:
    packer = Packer(HOST)
    one = Entry(PendingCancel("k", None), b"n", Builder.cancel, (1, b"k", 0))
    for _ in range(layout.BATCH_RECORDS):
        packer.add(one)
    assert not packer.sealed
    packer.add(one)
    assert [batch.count for batch in packer.sealed] == [layout.BATCH_RECORDS]


def test_a_resent_batch_is_the_same_bytes(model: ModelDaemon) -> None:
    client = Session()
    exchange(client, model)
    client.submit(batch([]))
    first = client.frame()
    client.sent()
    client.resend()
    assert client.frame() == first


@pytest.mark.parametrize(
    ("wanted", "wal", "durable"),
    [(None, 0, False), (None, 1, True), (False, 1, False), (True, 1, True)],
)
def test_batches_are_durable_if_wanted_or_if_the_daemon_has_a_wal(
    model: ModelDaemon, wanted: bool | None, wal: int, durable: bool
) -> None:
    client = Session(durable=wanted)
    exchange(client, model)
    assert client.welcome is not None
    client.welcome = client.welcome._replace(wal=wal)
    client.submit(batch([]))
    flags = wire.FRAME.unpack_from(client.frame() or b"")[9]
    assert bool(flags & layout.FLAG_DURABLE) is durable


def test_an_idle_session_that_was_evicted_is_replaced_silently(model: ModelDaemon) -> None:
    client, outcomes = Session(), list[Outcome]()
    exchange(client, model)
    model.sessions.clear()
    client.submit(batch(outcomes))
    exchange(client, model)
    assert model.applied == [1]
    assert outcomes == [wire.RESULT.pack(1 << 8 | 1, 1)]


def test_a_batch_sent_twice_to_an_evicted_session_is_in_doubt(model: ModelDaemon) -> None:
    client, outcomes = Session(), list[Outcome]()
    exchange(client, model)
    client.submit(batch(outcomes))
    lost = client.frame()
    client.sent()
    assert lost is not None
    model.handle(lost)
    model.sessions.clear()
    client.resend()
    exchange(client, model)
    (error,) = outcomes
    assert isinstance(error, SessionExpired)
    assert error.in_doubt == 1
    assert model.applied == [1]


def test_records_are_in_doubt_from_being_sent_to_their_answer(model: ModelDaemon) -> None:
    client = Session()
    exchange(client, model)
    client.submit(batch([]))
    request = client.frame()
    assert request is not None
    assert client.in_doubt() == 0
    client.sent()
    assert client.in_doubt() == 1
    client.receive(model.handle(request))
    assert client.in_doubt() == 0


def test_calls_sent_twice_are_in_doubt_and_others_move_to_the_new_session(
    model: ModelDaemon,
) -> None:
    client, outcomes = Session(), list[Outcome]()
    exchange(client, model)
    for number in (1, 2):
        client.submit(batch(outcomes, number))
        model.handle(client.frame() or b"")
        client.sent()
    model.sessions.clear()
    client.resend()
    client.submit(batch(outcomes, 3))
    exchange(client, model)
    assert [type(outcome) for outcome in outcomes] == [SessionExpired, SessionExpired, bytes]
    assert model.applied == [1, 2, 3]


def test_a_batch_that_never_left_can_be_withdrawn(model: ModelDaemon) -> None:
    client, outcomes = Session(), list[Outcome]()
    exchange(client, model)
    first, second = batch(outcomes, 1), batch(outcomes, 2)
    client.submit(first)
    client.submit(second)
    assert client.frame() is not None
    assert client.withdraw(first)
    exchange(client, model)
    assert model.applied == [2]
    assert not client.withdraw(second)


def test_a_hello_refused_for_good_settles_what_waits() -> None:
    client, outcomes, answers = Session(), list[Outcome](), list[object]()
    client.submit(batch(outcomes))
    client.ask(Query(lambda number, session: b"", answers.append))
    hello = wire.decode_reply(client.frame() or b"")
    client.receive(wire.encode_frame(Message.HELLO, 0, hello.sequence, error=WireError.VERSION))
    assert client.state is State.CLOSED
    assert isinstance(outcomes[0], MessageRefused)
    assert isinstance(answers[0], MessageRefused)


@pytest.mark.parametrize("why", [WireError.STOPPING, WireError.BUSY])
def test_a_batch_refused_for_now_is_sent_again(why: WireError, model: ModelDaemon) -> None:
    client, outcomes = Session(), list[Outcome]()
    exchange(client, model)
    client.submit(batch(outcomes))
    sent = wire.decode_reply(client.frame() or b"")
    client.sent()
    client.receive(wire.encode_frame(Message.BATCH, client.id, sent.sequence, error=why))
    assert outcomes == []
    client.resend()
    exchange(client, model)
    assert isinstance(outcomes[0], bytes)


def test_a_message_of_an_unknown_kind_is_passed_over(model: ModelDaemon) -> None:
    client = Session()
    exchange(client, model)
    client.receive(wire.encode_frame(Message.PUBLISH, client.id, 1))
    assert client.state is State.OPEN
    assert client.frame() is None


@pytest.mark.parametrize("why", [WireError.SESSIONS_FULL, WireError.WRONG_SHARD])
def test_a_hello_refused_for_now_is_sent_again(why: WireError, model: ModelDaemon) -> None:
    client = Session()
    hello = wire.decode_reply(client.frame() or b"")
    client.sent()
    client.receive(wire.encode_frame(Message.HELLO, 0, hello.sequence, error=why))
    assert client.refusal is not None
    client.resend()
    exchange(client, model)
    assert client.state is State.OPEN
    assert client.refusal is None


def test_a_question_survives_an_eviction(model: ModelDaemon) -> None:
    client, found = Session(), list[object]()
    exchange(client, model)
    model.sessions.clear()
    client.ask(Query(lambda n, session: wire.encode_query(n, session, b"ns", "key"), found.append))
    exchange(client, model)
    assert len(found) == 1


def test_two_answers_from_a_daemon_that_forgot_the_session_cause_one_hello(
    model: ModelDaemon,
) -> None:
    client = Session()
    exchange(client, model)
    refusal = wire.encode_frame(
        Message.QUERY, client.id, 1, error=WireError.SESSION_EXPIRED, detail=(client.id, 0)
    )
    hellos = set()
    for _ in range(2):
        client.receive(refusal)
        while frame := client.frame():
            hellos.add(frame)
            client.sent()
    assert len(hellos) == 1


@pytest.mark.parametrize("why", [WireError.MALFORMED, WireError.CHANGED, WireError.OUT_OF_ORDER])
def test_a_session_that_is_replaced_ends(why: WireError, model: ModelDaemon) -> None:
    client, outcomes = Session(), list[Outcome]()
    exchange(client, model)
    before = client.id
    client.submit(Batch(1, 0, 0, b"x", outcomes.append))
    head = wire.decode_reply(client.frame() or b"")
    client.sent()
    refusal = wire.encode_frame(Message.BATCH, client.id, head.sequence, error=why, detail=(99, 0))
    client.receive(refusal)
    exchange(client, model)
    assert isinstance(outcomes[0], DaemonError)
    assert client.state is State.OPEN
    assert before != client.id
    assert [*model.sessions] == [client.id]


def test_the_bye_of_a_session_that_was_replaced_is_sent_until_it_is_answered(
    model: ModelDaemon,
) -> None:
    client = Session()
    exchange(client, model)
    (replaced,) = model.sessions
    client.submit(batch([]))
    client.receive(
        wire.encode_frame(Message.BATCH, replaced, _sent_one(client), error=WireError.STALE)
    )
    bye = wire.decode_reply(client.frame() or b"")
    assert (bye.message, bye.session) == (Message.BYE, replaced)
    client.sent()  # the BYE is lost
    exchange(client, model)
    assert client.busy
    assert replaced in model.sessions
    client.resend()
    exchange(client, model)
    assert not client.busy
    assert list(model.sessions) == [client.id]


def _sent_one(client: Session) -> int:
    """Send the next message. Return its sequence."""
    sequence = wire.decode_reply(client.frame() or b"").sequence
    client.sent()
    return sequence


def test_bye_closes(model: ModelDaemon) -> None:
    client = Session()
    exchange(client, model)
    client.bye()
    exchange(client, model)
    assert client.state is State.CLOSED
    assert not model.sessions


@pytest.mark.parametrize("lost", ["before it was sent", "on its way"])
@pytest.mark.parametrize("then", ["resend", "moved"])
def test_a_lost_bye_is_sent_again(model: ModelDaemon, lost: str, then: str) -> None:
    client = Session()
    exchange(client, model)
    client.bye()
    if lost == "on its way":
        client.sent()
    getattr(client, then)()
    exchange(client, model)
    assert client.state is State.CLOSED
    assert not model.sessions


def test_a_session_that_ends_is_not_replaced_for_what_has_no_answer(model: ModelDaemon) -> None:
    client = Session()
    exchange(client, model)
    client.submit(batch([]))
    sequence = _sent_one(client)
    client.bye()
    refusal = wire.encode_frame(Message.BATCH, client.id, sequence, error=WireError.SESSION_EXPIRED)
    client.receive(refusal)
    assert client.state is State.CLOSED


def test_a_session_that_ends_is_not_replaced(model: ModelDaemon) -> None:
    client = Session()
    exchange(client, model)
    client.bye()
    model.sessions.clear()
    client.receive(wire.encode_frame(Message.PING, client.id, error=WireError.SESSION_EXPIRED))
    assert client.state is State.CLOSED
    assert not model.sessions


def test_acknowledgements_come_in_messages_of_the_size_that_is_allowed(model: ModelDaemon) -> None:
    client = Session()
    exchange(client, model)
    client.acknowledge(b"".join(wire.ACK.pack(ticket, 0, 0) for ticket in range(1, 2501)))
    counts = []
    while frame := client.frame():
        counts.append(wire.decode_reply(frame).records)
        client.sent()
    assert counts == [1024, 1024, 452]


# ---- connections ---------------------------------------------------------------------------


def test_a_channel_reports_each_connection_once(daemon_dir: Path) -> None:
    endpoint = f"ipc://{daemon_dir}/socket"
    with closing(Channel(endpoint)) as channel, zmq.Context() as context:
        assert not waited(channel, 0)
        with context.socket(zmq.ROUTER) as daemon:
            daemon.bind(endpoint)
            assert waited(channel, PATIENCE_S)
            assert channel.reconnected()
            assert channel.connected
            assert not channel.reconnected()
            assert not waited(channel, 0), "the poller reported space to send without request"
            assert waited(channel, PATIENCE_S, to_send=True)
        assert waited(channel, PATIENCE_S)
        assert not channel.reconnected()
        assert not channel.connected


def waited(channel: Channel, timeout_s: float, *, to_send: bool = False, kicked: int = -1) -> bool:
    """Wait for an event of one channel; return whether an event came."""
    poller = ChannelPoller(kicked)
    poller.watch(channel, to_send=to_send)
    return bool(poller.wait(timeout_s))


def test_a_channel_sends_on_no_connection_that_was_not_reported(daemon_dir: Path) -> None:
    endpoint = f"ipc://{daemon_dir}/socket"
    with closing(Channel(endpoint)) as channel, zmq.Context() as context:
        for _ in range(2):
            with context.socket(zmq.ROUTER) as daemon:
                daemon.bind(endpoint)
                assert waited(channel, PATIENCE_S)
                assert not channel.send(b"early")
                assert channel.reconnected()
                assert channel.send(b"asked")
                route, asked = daemon.recv_multipart()
                assert asked == b"asked"
                daemon.send_multipart([route, b"answer"])
            assert waited(channel, PATIENCE_S)
            while not channel.reconnected() and channel.connected:
                assert waited(channel, PATIENCE_S)
            assert channel.receive() == b"answer", "the answer was lost with the connection"


def test_a_kick_ends_a_wait_once_and_is_no_message(daemon_dir: Path) -> None:
    endpoint, kicked = f"ipc://{daemon_dir}/socket", os.eventfd(0, os.EFD_NONBLOCK)
    with closing(Channel(endpoint)) as channel, zmq.Context() as context:
        os.eventfd_write(kicked, 1)
        assert not waited(channel, PATIENCE_S, kicked=kicked)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(kicked)
        with context.socket(zmq.ROUTER) as daemon:
            daemon.bind(endpoint)
            assert waited(channel, PATIENCE_S, kicked=kicked)
            os.eventfd_write(kicked, 1)
            assert waited(channel, PATIENCE_S, kicked=kicked), "the connection is not reported"
    os.close(kicked)


class SteppedHost(Host):
    """A host whose clock the test sets."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


class SilentChannel:
    """Stand-in for a channel to a daemon that does not answer."""

    def __init__(self, endpoint: str, *_: object) -> None:
        self.endpoints = [endpoint]
        self.connected = True

    def redirect(self, endpoint: str) -> None:
        self.endpoints.append(endpoint)

    def reconnected(self) -> bool:
        return False

    def receive(self) -> None:
        return None


@pytest.mark.parametrize(
    "option", ["remote", "durable", "ledger", "worker", "numa_local", "resume"]
)
def test_an_option_of_another_type_is_refused_before_a_connection(option: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{option} must be "):
        Core("demo", "shop", **{option: object()})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "limit_s"),
    [(0, 0.0), (1.5, 1.5), (-1, 0.0), (-math.inf, 0.0), (-(10**400), 0.0), (10**400, LIMIT_S),
     (math.inf, LIMIT_S)],
)  # fmt: skip
def test_a_limit_of_any_size_is_a_number_of_seconds(given: float, limit_s: float) -> None:
    assert check_limit_s(given) == limit_s


@pytest.mark.parametrize("proven", [False, True])
def test_a_subscription_that_is_live_is_checked_seldom(proven: bool) -> None:
    inbox: Any = object.__new__(Inbox)
    inbox._host = SteppedHost()
    inbox._probation()
    distances = []
    for now_s in range(20):
        if proven and now_s == 1:
            inbox._trust(float(now_s))
        else:
            inbox._schedule(float(now_s))
        distances.append(inbox._check_s - now_s)
    if proven:
        assert distances == [2 * FIRST_CHECK_S] + 19 * [CHECK_S]
    else:
        doubled = [FIRST_CHECK_S * 2 ** (number + 1) for number in range(20)]
        assert distances == pytest.approx([d if d < PROBATION_S else CHECK_S for d in doubled])


@pytest.mark.parametrize("connected", [True, False])
def test_a_silent_or_lost_daemon_is_searched_by_the_routing_table(
    monkeypatch: pytest.MonkeyPatch, *, connected: bool
) -> None:
    host, channels, found = SteppedHost(), list[SilentChannel](), ["here"]

    def open_channel(*arguments: Any) -> Any:
        channels.append(SilentChannel(*arguments))
        return channels[-1]

    connection = connection_of("demo", "shop", host=host, open_channel=open_channel)
    monkeypatch.setattr(connection, "_find", lambda: found[0])
    connection.open()
    connection.expect(answer=True)
    found[0] = "there"
    connection.look()
    connection.ask_again()
    assert channels[0].endpoints == ["here"]
    channels[0].connected = connected
    if connected:
        host.now_s = connection.resend_at_s
        connection.ask_again()
    else:
        connection.look()
    assert channels[0].endpoints == ["here", "there"]


def test_the_pause_before_busy_calls_doubles_until_one_is_taken() -> None:
    host, rounds = SteppedHost(), list[float]()
    connection = connection_of("demo", "shop", host=host)
    retries = SimpleNamespace(
        in_round=False, waiting=1, settled=0, begin_round=lambda: rounds.append(host.now_s)
    )
    connection.session.retries = cast("Any", retries)
    pauses = []
    for number in range(10):
        retries.settled = int(number == 9)
        connection.exchange()
        pauses.append(connection.retry_at_s - host.now_s)
        host.now_s = connection.retry_at_s
        connection.exchange()
        assert rounds.pop() == host.now_s
    expected = [min(BUSY_S * 2**number, BUSY_MAX_S) for number in range(9)] + [BUSY_S]
    assert pauses == pytest.approx(expected)
