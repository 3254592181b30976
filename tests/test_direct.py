"""Direct calls: the caller's thread sends one record through a channel, and takes its answer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any
from uuid import UUID

import pytest
import zmq

from purgatoryd.clients import Handle, _pack, lots
from purgatoryd.clients._pack import Caller, Direct, Requests
from purgatoryd.clients.batch import Batch
from purgatoryd.clients.bulk import BulkResult, pack_puts, send_direct
from purgatoryd.clients.channel import Channel
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import MODES, NO_SPIN, Core, Spin
from purgatoryd.clients.lots import Lot
from purgatoryd.clients.packing import PendingAdd, PendingCancel
from purgatoryd.clients.poller import Addresses
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import ClockKind, Message, Status, WireError
from purgatoryd.shm_layout.rings import RingPair, create_memory

pytestmark = pytest.mark.tier("check")

RING_BYTES = 16_384
SESSION, SEQUENCE = 77, 5
LONG_S = 60.0
ADD = (
    b"key", None, None, None, 10**15, "default", b"payload", "error", None, None, None, None, None,
    None,
)  # fmt: skip
"""Arguments of Core.put."""
Reply = Callable[[bytes], bytes]


class Sides(ABC):
    """Both sides of a channel in this process, and the direct calls of the client's side."""

    def __init__(self, spin: Spin = NO_SPIN, wait_ns: int = 10**11) -> None:
        self.core = Core("demo", "shop")
        connection = self.core._connection(0)
        connection.delay_clock = ClockKind.VIRTUAL  # so that messages do not depend on the time
        self.core.connections = [connection]
        self.core.names.of_topic("default")
        self.queue: SimpleQueue[object] = SimpleQueue()
        self.kicked = os.eventfd(0, os.EFD_NONBLOCK)
        self.requests = Requests(self.queue, "nothing", self.kicked)
        names = self.core.names
        self.direct = Direct(
            self.requests, connection, "shop", names.topics, names.of_key, MODES, wait_ns, *spin
        )
        self.unread: bytes | None = None

    @property
    @abstractmethod
    def addresses(self) -> Addresses:
        """The numbers that direct calls use."""

    @property
    @abstractmethod
    def sent(self) -> bool:
        """True if a message has arrived at the daemon's side."""

    @abstractmethod
    def daemon_takes(self) -> bytes:
        """Wait for the next message at the daemon's side, and return it."""

    @abstractmethod
    def daemon_puts(self, message: bytes) -> None:
        """Send a message to the client."""

    @abstractmethod
    def receive(self) -> bytes | None:
        """Return the next message in the channel, or None."""

    def lend(self, *, admit: bool = True, sequence: int = SEQUENCE) -> None:
        self.direct.lend(
            *self.addresses, SESSION, sequence, layout.FLAG_DURABLE, layout.WINDOW, False, True
        )
        if admit:
            self.requests.admit()

    def take_back(self) -> tuple[int, Any, Any] | None:
        if (taken := self.direct.take_back()) is None:
            return None
        self.unread = taken[3]
        return taken[:3]

    def engine_receives(self) -> bytes:
        """Wait for the next message that no direct call has taken."""
        message, self.unread = self.unread, None
        while message is None:
            message = self.receive()
        return message

    def add(self, arguments: tuple[Any, ...] = ADD, limit_s: float = LONG_S) -> Any:
        self.pending = PendingAdd()
        return self.direct.add(self.pending, limit_s, arguments)

    def close(self) -> None:
        self.direct.take_back()
        os.close(self.kicked)


class Rings(Sides):
    """A pair of rings."""

    def __init__(self, spin: Spin = NO_SPIN, wait_ns: int = 10**11) -> None:
        super().__init__(spin, wait_ns)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.sockets = socket.socketpair()
        memory_fd = create_memory(RING_BYTES)
        self.client = RingPair(memory_fd, RING_BYTES, daemon=False, wake=self._signal)
        self.daemon = RingPair(memory_fd, RING_BYTES, daemon=True, wake=self._wake)
        os.close(memory_fd)

    @property
    def addresses(self) -> Addresses:
        return "ring", *self.client.addresses, self.bell, self.sockets[0].fileno()

    def _signal(self, _how: int, _word: Any) -> None:
        lib.pg_ring_signal(self.bell)

    def _wake(self, how: int, word: Any) -> None:
        lib.pg_ring_wake(how, word, self.sockets[1].fileno())

    def daemon_takes(self) -> bytes:
        body = None
        while body is None:
            body = self.daemon.take()
        return bytes(body)

    def daemon_puts(self, message: bytes) -> None:
        self.daemon.put(message)

    @property
    def sent(self) -> bool:
        return bool(self.daemon.next_bytes)

    def receive(self) -> bytes | None:
        return None if (body := self.client.take()) is None else bytes(body)

    def client_spins(self) -> bool:
        return bool(self.daemon.putter.words.taker_sleeps == lib.PG_RING_AWAKE)

    def close(self) -> None:
        super().close()
        self.client.close()
        self.daemon.close()
        os.close(self.bell)
        for one in self.sockets:
            one.close()


class Sockets(Sides):
    """A pair of ZeroMQ sockets."""

    def __init__(self, spin: Spin = NO_SPIN, wait_ns: int = 10**11) -> None:
        super().__init__(spin, wait_ns)
        self.context = zmq.Context()
        self.daemon = self.context.socket(zmq.DEALER)
        self.daemon.set(zmq.LINGER, 0)
        self.daemon.bind("ipc://*")
        endpoint = self.daemon.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.client = Channel(endpoint.decode())
        self.await_connection(connected=True)

    def await_connection(self, *, connected: bool) -> None:
        while self.client.connected is not connected:
            self.client.reconnected()

    @property
    def addresses(self) -> Addresses:
        addresses = self.client.addresses
        assert addresses is not None
        return addresses

    def daemon_takes(self) -> bytes:
        return self.daemon.recv()

    def daemon_puts(self, message: bytes) -> None:
        self.daemon.send(message)

    @property
    def sent(self) -> bool:
        return bool(int(self.daemon.get(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> bytes | None:
        return self.client.receive()

    def close(self) -> None:
        super().close()
        self.client.close()
        self.daemon.close()
        self.context.term()


CHANNELS: dict[str, Callable[..., Sides]] = {
    "sleeping": Rings,
    "spinning": partial(Rings, Spin(100_000)),
    "adapting": partial(Rings, Spin(100_000, adapts=True)),
    "zmq": Sockets,
}
BOTH = pytest.mark.parametrize("kind", [Rings, Sockets])


@pytest.fixture(params=CHANNELS)
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    with contextlib.closing(CHANNELS[request.param]()) as sides:
        sides.lend()
        yield sides


@pytest.fixture
def rings() -> Iterator[Rings]:
    with contextlib.closing(Rings()) as rings:
        rings.lend()
        yield rings


def answer(message: bytes, status: int = Status.ADDED, /, **fields: Any) -> bytes:
    """Return the answer of a daemon to a message with one record."""
    head = wire.FRAME.unpack_from(message)
    known = {"message": Message.BATCH, "session": head[3], "sequence": head[4], "count": 1}
    return wire.encode_frame(**(known | fields)) + wire.RESULT.pack(9 << 8 | status, 1234)


@contextlib.contextmanager
def answering(sides: Sides, reply: Reply) -> Iterator[list[bytes]]:
    """Answer one message, as a daemon does. Yields a list that receives the message."""
    messages: list[bytes] = []

    def serve() -> None:
        message = sides.daemon_takes()
        messages.append(message)
        sides.daemon_puts(reply(message))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield messages
    finally:
        thread.join()


@contextlib.contextmanager
def calling(sides: Sides) -> Iterator[list[Any]]:
    """Make an add in another thread, and yield once its message has arrived. Yields a list that
    receives the result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(sides.add()))
    thread.start()
    while not sides.sent:
        pass
    yield results
    thread.join()


def left(sides: Sides) -> bytes:
    """Return the message that a call has left to the engine."""
    assert sides.queue.get_nowait() == "nothing"
    taken = sides.take_back()
    assert taken is not None
    ((pending, message),) = taken[1]
    assert (taken[0], pending, taken[2]) == (SEQUENCE + 1, sides.pending, None)
    assert sides.pending.packed
    assert not sides.pending.done
    return bytes(message)


# ---- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [Status.ADDED, Status.EXISTS, Status.FULL], ids=str)
def test_a_plain_answer_is_the_outcome(sides: Sides, status: Status) -> None:
    with answering(sides, lambda message: answer(message, status)) as messages:
        assert sides.add() is True
    head = wire.FRAME.unpack_from(messages[0])
    assert head[2:5] == (Message.BATCH, SESSION, SEQUENCE)
    pending = sides.pending
    assert (pending.done, pending.word, pending.deadline_ns) == (True, 9 << 8 | status, 1234)
    assert sides.take_back() == (SEQUENCE + 1, (), None)
    assert sides.queue.empty()


def test_each_call_has_the_next_sequence(sides: Sides) -> None:
    for n in range(300):  # more bytes than the ring has
        with answering(sides, answer) as messages:
            assert sides.add() is True
        assert wire.FRAME.unpack_from(messages[0])[4] == SEQUENCE + n


UNUSUAL: dict[str, Reply] = {
    "busy": lambda m: answer(m, Status.BUSY),
    "other sequence": lambda m: answer(m, sequence=SEQUENCE - 1),
    "other session": lambda m: answer(m, session=SESSION + 1),
    "other message": lambda m: answer(m, message=Message.OUTCOMES),
    "evicted": lambda m: answer(m, error=WireError.SESSION_EXPIRED),
    "not durable": lambda m: answer(m, error=WireError.NOT_DURABLE),
    "out of order": lambda m: answer(m, error=WireError.OUT_OF_ORDER),
    "longer": lambda m: answer(m) + bytes(8),
    "shorter": lambda m: answer(m)[: wire.FRAME.size],
    "larger than the ring": lambda m: answer(m) + bytes(RING_BYTES),
    "other magic": lambda m: bytes(4) + answer(m)[4:],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_answer_is_left_to_the_engine(sides: Sides, name: str) -> None:
    replies: list[bytes] = []

    def reply(message: bytes) -> bytes:
        replies.append(UNUSUAL[name](message))
        return replies[0]

    with answering(sides, reply) as messages:
        assert sides.add() is None
    assert left(sides) == messages[0]
    if isinstance(sides, Rings) and name == "larger than the ring":
        assert sides.receive() is None, "only a part of it is in the ring"
    else:
        assert sides.engine_receives() == replies[0]
        assert sides.receive() is None


@BOTH
@pytest.mark.parametrize(("wait_ns", "limit_s"), [(10**6, 60.0), (10**11, 0.001), (10**11, 0.0)])
def test_a_late_answer_is_left_to_the_engine(
    kind: type[Sides], wait_ns: int, limit_s: float
) -> None:
    with contextlib.closing(kind(wait_ns=wait_ns)) as sides:
        sides.lend()
        assert sides.add(limit_s=limit_s) is None
        message = left(sides)
        assert sides.daemon_takes() == message
        sides.daemon_puts(answer(message))
        assert sides.engine_receives() == answer(message)


# ---- the engine --------------------------------------------------------------------------------


def test_no_call_begins_while_a_request_is_queued(sides: Sides) -> None:
    sides.requests.put("request")
    assert sides.add() is False
    sides.requests.admit()
    assert sides.add() is False, "the queue is not empty"
    assert sides.queue.get_nowait() == "request"
    sides.requests.admit()
    with answering(sides, answer):
        assert sides.add() is True


@BOTH
def test_no_call_begins_before_the_channel_is_lent(kind: type[Sides]) -> None:
    with contextlib.closing(kind()) as sides:
        assert sides.add() is False
        sides.lend(admit=False)
        assert sides.add() is False
        sides.requests.admit()
        sides.take_back()
        sides.requests.admit()
        assert sides.add() is False
        assert sides.take_back() is None
        assert not sides.sent
        assert not sides.pending.packed


def test_the_engine_takes_the_channel_from_a_waiting_call(sides: Sides) -> None:
    with calling(sides) as results:
        taken = sides.take_back()
    assert results == [None]
    assert taken == (SEQUENCE + 1, ((sides.pending, sides.daemon_takes()),), None)


def test_calls_omit_spins_after_one_that_found_nothing() -> None:
    # A spin of this length never ends by itself, so a call that sleeps has omitted its spin.
    with contextlib.closing(Rings(Spin(10**12, adapts=True))) as rings:
        rings.lend()
        with calling(rings):
            assert rings.client_spins()
            rings.take_back()
        assert rings.queue.get_nowait() == "nothing"
        rings.daemon_takes()
        rings.lend()
        for omitted in (True, True, True, False):
            with calling(rings) as results:
                while omitted and rings.client_spins():
                    pass
                assert rings.client_spins() != omitted
                rings.daemon.put(answer(rings.daemon_takes()))
            assert results == [True]


def test_a_call_of_an_event_loop_looks_for_its_answer() -> None:
    with contextlib.closing(Rings(Spin(10**12), wait_ns=0)) as rings:
        rings.lend()
        with calling(rings) as results:
            assert rings.client_spins()
            rings.daemon.put(answer(rings.daemon_takes()))
        assert results == [True]


def test_a_call_of_an_event_loop_is_announced_after_its_spin() -> None:
    with contextlib.closing(Rings(Spin(1000), wait_ns=0)) as rings:
        rings.lend()
        assert rings.add() is None
        assert not rings.client_spins()


def test_a_second_thread_does_not_wait_for_a_direct_call(sides: Sides) -> None:
    with calling(sides) as results:
        first = sides.pending
        assert sides.add() is False
        message = sides.daemon_takes()
        assert not sides.sent
        sides.daemon_puts(answer(message))
    assert results == [True]
    assert first.done


def test_calls_of_threads_and_an_engine_that_interrupts_them(sides: Sides) -> None:
    """Each message is answered to its call or left to the engine, exactly once."""
    count, ended = 2_000, threading.Event()
    served: list[int] = []

    def serve() -> None:
        while not ended.is_set() or sides.sent:
            if sides.sent:
                body = sides.daemon_takes()
                served.append(wire.FRAME.unpack_from(body)[4])
                sides.daemon_puts(answer(body))

    server = threading.Thread(target=serve)
    results: list[Any] = []

    def call() -> None:
        results.extend([sides.direct.add(PendingAdd(), LONG_S, ADD) for _ in range(count)])

    callers = [threading.Thread(target=call) for _ in range(3)]
    for thread in (server, *callers):
        thread.start()
    left_ones, sequence = 0, SEQUENCE
    while any(thread.is_alive() for thread in callers):
        taken = sides.take_back()
        if taken is not None:
            sequence = taken[0]
            if taken[1]:
                left_ones += 1
                sides.engine_receives()
        while not sides.queue.empty():
            sides.queue.get()
        sides.lend(sequence=sequence)
    ended.set()
    server.join()
    assert len(results) == 3 * count
    assert results.count(None) == left_ones
    assert served == list(range(SEQUENCE, SEQUENCE + results.count(True) + left_ones))


class Stopped(Exception):
    """Exception of a signal handler."""


def test_a_signal_leaves_the_message_to_the_engine(sides: Sides) -> None:
    stopped = threading.Event()

    def stop(*_: object) -> None:
        if not stopped.is_set():
            stopped.set()
            raise Stopped

    def interrupt() -> None:
        while not sides.sent:
            pass
        while not stopped.wait(0.001):  # a signal before the sleep does not end it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, stop)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(Stopped):
            sides.add()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert left(sides) == sides.daemon_takes()


# ---- questions ---------------------------------------------------------------------------------


def question_answer(message: bytes, /, **fields: Any) -> bytes:
    """Return a reply that says that there is no such timer."""
    head = wire.FRAME.unpack_from(message)
    known = {"message": Message.QUERY, "session": head[3], "sequence": head[4], "count": 1}
    info = bytearray(wire.INFO.size)
    info[0] = Status.UNKNOWN
    return wire.encode_frame(**(known | fields)) + bytes(info)


@pytest.mark.parametrize("key", ["key", b"key", "k" * 255], ids=repr)
def test_a_question_returns_the_reply(sides: Sides, key: Any) -> None:
    with answering(sides, question_answer) as messages:
        reply = sides.direct.get(LONG_S, key)
    assert reply == question_answer(messages[0])
    number = wire.FRAME.unpack_from(messages[0])[4]
    assert number >= 2**63, "no question of the session has this number"
    assert messages[0] == wire.encode_query(number, SESSION, b"shop", key)
    with answering(sides, answer) as messages:
        assert sides.add() is True
    assert wire.FRAME.unpack_from(messages[0])[4] == SEQUENCE


@pytest.mark.parametrize(
    "fields",
    [{"sequence": 5}, {"session": 5}, {"error": WireError.STOPPING}, {"message": Message.BATCH}],
    ids=str,
)
def test_an_unusual_reply_stays_for_the_engine(sides: Sides, fields: dict[str, Any]) -> None:
    replies: list[bytes] = []

    def reply(message: bytes) -> bytes:
        replies.append(question_answer(message, **fields))
        return replies[0]

    with answering(sides, reply):
        assert sides.direct.get(LONG_S, "key") is None
    assert sides.take_back() == (SEQUENCE, (), None)
    assert sides.engine_receives() == replies[0]


@BOTH
def test_a_question_that_is_not_answered_in_time_is_asked_by_the_engine(kind: type[Sides]) -> None:
    with contextlib.closing(kind(wait_ns=10**6)) as sides:
        sides.lend()
        assert sides.direct.get(LONG_S, "key") is None
        assert sides.daemon_takes()


@pytest.mark.parametrize("key", [UUID(int=5), "", "k" * 256, 5, None], ids=repr)
def test_another_key_is_left_to_python(sides: Sides, key: Any) -> None:
    assert sides.direct.get(LONG_S, key) is None
    assert not sides.sent


# ---- calls that the engine has to send ---------------------------------------------------------


def test_a_message_that_is_larger_than_the_ring_is_not_sent(rings: Rings) -> None:
    assert rings.add((*ADD[:6], bytes(RING_BYTES), *ADD[7:])) is False
    assert not rings.pending.packed
    assert not rings.daemon.next_bytes


def test_nothing_is_sent_into_a_full_ring(rings: Rings) -> None:
    while rings.client.put(bytes(1000)):
        pass
    assert rings.add((*ADD[:6], bytes(1000), *ADD[7:])) is False
    assert not rings.pending.packed


def test_nothing_is_sent_to_a_daemon_that_has_ended(rings: Rings) -> None:
    assert rings.daemon.may_sleep(to_put=False)
    rings.sockets[1].close()
    assert rings.add() is False
    assert not rings.pending.packed


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with contextlib.closing(Sockets()) as sockets:
        sockets.lend()
        yield sockets


def test_nothing_is_sent_once_the_connection_has_ended(sockets: Sockets) -> None:
    sockets.daemon.close()
    sockets.client.monitor.poll()
    assert sockets.add() is False
    assert not sockets.pending.packed


def test_the_end_of_the_connection_ends_the_wait(sockets: Sockets) -> None:
    with calling(sockets) as results:
        sockets.daemon.close()
    assert results == [None]
    assert left(sockets)
    sockets.await_connection(connected=False)
    assert sockets.client.addresses is None


def test_an_earlier_message_is_left_to_the_engine_before_the_answer(sockets: Sockets) -> None:
    sockets.daemon_puts(b"early")
    sockets.client.socket.poll()
    with answering(sockets, answer):
        assert sockets.add() is None
    message = left(sockets)
    assert sockets.unread == b"early"
    assert sockets.engine_receives() == b"early"
    assert sockets.engine_receives() == answer(message)


def test_without_the_functions_of_libzmq_the_engine_makes_all_calls() -> None:
    assert not Direct.find_zmq("/nonexistent")
    assert not Direct.find_zmq(_pack.__file__), "this library does not need libzmq"


def test_a_forked_child_makes_no_direct_call(sides: Sides) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = 0 if sides.add() is False else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with answering(sides, answer):
        assert sides.add() is True


# ---- messages ----------------------------------------------------------------------------------

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NONE = (None,) * 6
"""The last arguments of Core.put, from `within` to `unique_for`."""
PLAIN: list[tuple[Any, ...]] = [
    ("key", 5, None, None, None, "default", b"", "error", *NONE),
    (b"key", 5.5, None, None, None, "default", b"payload", "replace", *NONE),
    (b"key", -1, None, None, None, "default", b"payload", "keep", *NONE),
    ("ключ", None, 17, None, None, "default", b"p" * 300, "extend", *NONE),
    (b"k" * 255, None, -17, None, None, "default", b"", "error", *NONE),
    (b"k", None, None, None, 10**15, "default", b"", "error", *NONE),
    (b"k", None, None, None, -1, "default", b"", "error", *NONE),
    (b"k", 0.1 + 0.2, None, None, None, "default", b"", "error", *NONE),
    (b"k", 5, None, None, None, "default", b"payload", "error", None, "tag", *NONE[2:]),
    (b"k", 5, None, None, None, "default", b"", "error", None, "\u00fc" * 8, *NONE[2:]),
    (b"k", 5, None, None, None, "default", b"", "error", None, "t" * 63, *NONE[2:]),
]
ODD: list[tuple[Any, ...]] = [
    (UUID(int=5), 5, None, None, None, "default", b"", "error", *NONE),
    (b"", 5, None, None, None, "default", b"", "error", *NONE),
    (b"k" * 256, 5, None, None, None, "default", b"", "error", *NONE),
    ("\ud800", 5, None, None, None, "default", b"", "error", *NONE),
    (b"k", True, None, None, None, "default", b"", "error", *NONE),
    (b"k", float("nan"), None, None, None, "default", b"", "error", *NONE),
    (b"k", 1e30, None, None, None, "default", b"", "error", *NONE),
    (b"k", 2**70, None, None, None, "default", b"", "error", *NONE),
    (b"k", timedelta(seconds=5), None, None, None, "default", b"", "error", *NONE),
    (b"k", None, 2**70, None, None, "default", b"", "error", *NONE),
    (b"k", None, None, NOW, None, "default", b"", "error", *NONE),
    (b"k", None, None, None, None, "default", b"", "error", *NONE),
    (b"k", 5, 5, None, None, "default", b"", "error", *NONE),
    (b"k", 5, None, NOW, None, "default", b"", "error", *NONE),
    (b"k", 5, None, None, None, "unused", b"", "error", *NONE),
    (b"k", 5, None, None, None, 7, b"", "error", *NONE),
    (b"k", 5, None, None, None, [], b"", "error", *NONE),
    (b"k", 5, None, None, None, "default", "text", "error", *NONE),
    (b"k", 5, None, None, None, "default", None, "error", *NONE),
    (b"k", 5, None, None, None, "default", bytearray(3), "error", *NONE),
    (b"k", 5, None, None, None, "default", bytes(65_537), "error", *NONE),
    (b"k", 5, None, None, None, "default", b"", "never", *NONE),
    (b"k", 5, None, None, None, "default", b"", [], *NONE),
    (b"k", 5, None, None, None, "default", b"", "error", 0.5, *NONE[1:]),
    (b"k", 5, None, None, None, "default", b"", "error", None, "", *NONE[2:]),
    (b"k", 5, None, None, None, "default", b"", "error", None, "t" * 64, *NONE[2:]),
    (b"k", 5, None, None, None, "default", b"", "error", None, "a\0b", *NONE[2:]),
    (b"k", 5, None, None, None, "default", b"", "error", None, "\ud800", *NONE[2:]),
    (b"k", 5, None, None, None, "default", b"", "error", None, b"tag", *NONE[2:]),
    (b"k", 5, None, None, None, "default", b"", "error", None, None, 0, *NONE[3:]),
    (b"k", 5, None, None, None, "default", b"", "error", None, None, None, "order", None, None),
    (b"k", 5, None, None, None, "default", b"", "error", None, None, None, None, "fire", None),
    (b"k", 5, None, None, None, "default", b"", "error", *NONE[1:], 60.0),
    (
        b"k",
        5,
        None,
        None,
        None,
        "default",
        b"",
        "error",
        None,
        "tag",
        None,
        None,
        ("skip", 60),
        None,
    ),
]


def packed(core: Core, entry: Any) -> bytes:
    """Return the message of the engine for an entry."""
    connection: Connection = core.connections[0]
    connection.packer.add(entry)
    batch = connection.packer.seal()
    assert batch is not None
    batch.address(SESSION, SEQUENCE, True, False)
    return batch.frame


@pytest.mark.parametrize("arguments", PLAIN, ids=repr)
def test_a_direct_add_has_the_bytes_of_the_engine(arguments: tuple[Any, ...]) -> None:
    with contextlib.closing(Rings()) as sides:
        sides.lend()
        with answering(sides, answer) as messages:
            assert sides.add(arguments) is True
        entry = sides.core.put(*arguments, collect=False)
        assert messages[0] == packed(sides.core, entry)
        info = sides.pending.outcome()
        assert (info.key, info.topic, info.payload) == (arguments[0], arguments[5], arguments[6])
        assert (info.namespace, info.ticket, info.deadline_boot_ns) == ("shop", 9, 1234)
        assert (info.status, info.operation) == (Status.ADDED, None)


@pytest.mark.parametrize("arguments", ODD, ids=repr)
def test_other_arguments_are_left_to_python(arguments: tuple[Any, ...]) -> None:
    with contextlib.closing(Rings()) as sides:
        sides.lend()
        assert sides.add(arguments) is False
        assert not sides.pending.packed


def test_a_record_of_any_kind_has_the_bytes_of_the_engine(sides: Sides) -> None:
    entry = sides.core.put(UUID(int=5), timedelta(5), None, None, None, "t", b"p", "keep", 2.0,
                           "tag", 9, "order", ("skip", 60), 3600, collect=False)  # fmt: skip
    with answering(sides, answer) as messages:
        assert sides.direct.record(entry.pending, LONG_S, entry.name, *entry.fields) is True
    assert messages[0] == packed(sides.core, entry)


@pytest.mark.parametrize("ticket", [0, 5, layout.TICKET_MAX])
@pytest.mark.parametrize("key", ["key", b"key"], ids=repr)
def test_a_direct_cancel_has_the_bytes_of_the_engine(sides: Sides, key: Any, ticket: int) -> None:
    pending = PendingCancel()
    with answering(sides, lambda m: answer(m, Status.CANCELLED)) as messages:
        assert sides.direct.cancel(pending, LONG_S, (key, ticket)) is True
    assert messages[0] == packed(sides.core, sides.core.cancel(key, ticket, collect=False))
    assert pending.outcome().value == Status.CANCELLED


@pytest.mark.parametrize("ticket", [-1, layout.TICKET_MAX + 1, 2**70, True, None, "5"], ids=repr)
def test_a_cancel_with_another_ticket_is_left_to_python(sides: Sides, ticket: Any) -> None:
    assert sides.direct.cancel(PendingCancel(), LONG_S, ("key", ticket)) is False


def test_wrong_arguments_raise(sides: Sides) -> None:
    with pytest.raises(IndexError):
        sides.direct.add(PendingAdd(), LONG_S, ADD[:3])
    with pytest.raises(TypeError):
        sides.direct.add(object(), LONG_S, ADD)  # type: ignore[arg-type]


# ---- a batch -------------------------------------------------------------------------------------


def bulk(rings: Rings, count: int = 3) -> tuple[Batch, BulkResult]:
    """Return the only batch of an add_many, and the result of the call."""
    rows = [(b"k%d" % n, 5, "default", b"p") for n in range(count)]
    result, (batch,) = pack_puts(rings.core.connections[0], rows, "default", "error")
    return batch, result


def answers(message: bytes, statuses: Sequence[int], **fields: Any) -> bytes:
    """Return the answer of a daemon to a batch."""
    head = answer(message, **fields)[: wire.FRAME.size]
    return head + b"".join(wire.RESULT.pack(9 << 8 | status, 1234) for status in statuses)


def test_a_direct_batch_has_the_bytes_of_the_engine(rings: Rings) -> None:
    batch, result = bulk(rings)
    statuses = (Status.ADDED, Status.EXISTS, Status.FULL)
    with answering(rings, lambda message: answers(message, statuses)) as messages:
        send_direct(rings.direct, batch, result, LONG_S)
    assert (batch.sent, result.done) == (True, True)
    assert (tuple(result.statuses), result.tickets) == (statuses, [9, 9, 9])
    assert rings.take_back() == (SEQUENCE + 1, (), None)
    assert rings.queue.empty()
    batch.address(SESSION, SEQUENCE, True, False)
    assert messages[0] == batch.frame


@pytest.mark.parametrize(
    ("statuses", "fields"),
    [
        ((1, Status.BUSY, 1), {}),
        ((1, 1), {}),
        ((1, 1, 1, 1), {}),
        ((), {"error": WireError.SESSION_EXPIRED}),
        ((1, 1, 1), {"session": SESSION + 1}),
        ((1, 1, 1), {"sequence": SEQUENCE - 1}),
    ],
    ids=repr,
)
def test_another_answer_to_a_batch_is_left_to_the_engine(
    rings: Rings, statuses: Sequence[int], fields: dict[str, Any]
) -> None:
    batch, result = bulk(rings)
    with answering(rings, lambda message: answers(message, statuses, **fields)) as messages:
        send_direct(rings.direct, batch, result, LONG_S)
    assert (batch.sent, result.done) == (True, False)
    assert rings.queue.get_nowait() == "nothing"
    assert rings.take_back() == (SEQUENCE + 1, ((batch, messages[0]),), None)
    assert bytes(rings.client.take() or b"") == answers(messages[0], statuses, **fields)


@pytest.mark.parametrize("case", ["queued", "not lent", "larger than the ring", "event loop"])
def test_a_batch_that_is_not_sent_stays_with_its_caller(case: str) -> None:
    with contextlib.closing(Rings(wait_ns=0 if case == "event loop" else 10**11)) as rings:
        if case != "not lent":
            rings.lend()
        if case == "queued":
            rings.requests.put("request")
        batch, result = bulk(rings, 600 if case == "larger than the ring" else 3)
        send_direct(rings.direct, batch, result, LONG_S)
        assert (batch.sent, result.done) == (False, False)
        assert not rings.daemon.next_bytes


def test_a_late_answer_to_a_batch_is_left_to_the_engine(rings: Rings) -> None:
    batch, result = bulk(rings)
    send_direct(rings.direct, batch, result, 0.001)
    assert (batch.sent, result.done) == (True, False)
    taken = rings.take_back()
    assert taken == (SEQUENCE + 1, ((batch, rings.daemon_takes()),), None)
    adopted = rings.core.connections[0].packer.adopt(*taken[1][0])
    assert adopted is batch
    adopted.settle(b"".join(wire.RESULT.pack(n << 8 | 1, 5) for n in range(3)))
    assert (result.done, result.tickets) == (True, [0, 1, 2])


# ---- lots ----------------------------------------------------------------------------------------

FULL = 40
"""Number of calls that fill a lot in these tests."""


class Adds(Caller):
    """A client whose calls in Python are only counted."""

    def __init__(self, rings: Rings) -> None:
        self.checked = 0
        self.noted: list[Any] = []
        like = rings.requests, rings.core.connections[0], self.noted.append, 10**6, Handle
        self.first = Lot(*like)
        self._lot = self.first

    def _made(self, *_: Any) -> None:
        self.checked += 1

    def fill(self, number: int, count: int = FULL) -> None:
        for n in range(count):
            self.add(b"k%d" % (number * FULL + n), None, deadline_boot_ns=10**15, wait=False)  # type: ignore[attr-defined]


@pytest.fixture
def adds(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rings, Adds]]:
    monkeypatch.setattr(lots, "BATCH_RECORDS", FULL)
    with contextlib.closing(Rings(wait_ns=10**7)) as rings:
        rings.lend()
        made = Adds(rings)
        made.first.add(rings.core.put(*ADD, collect=True))
        rings.requests.open("the lot")
        rings.core.connections[0].direct = rings.direct
        made.first = made._lot = made.first.next()
        rings.direct.stream(made.first)
        yield rings, made


def added(message: bytes) -> bytes:
    return answers(message, [Status.ADDED] * FULL)


def test_callers_send_full_lots_in_order(adds: tuple[Rings, Adds]) -> None:
    rings, client = adds
    client.fill(0)
    assert not rings.daemon.next_bytes, "the next call sends the lot"
    bodies: list[bytes] = []
    for number in range(1, 5):
        client.fill(number, 1)
        message = rings.daemon_takes()
        head = wire.FRAME.unpack_from(message)
        assert head[3:6] == (SESSION, SEQUENCE + number - 1, FULL)
        bodies.append(message[wire.FRAME.size :])
        rings.daemon.put(added(message))
        client.fill(number, FULL - 1)
    assert (rings.direct.lots, client.checked) == (4, 0)
    assert bodies[0] == client.first.batch().body
    assert client.first.results is not None
    assert client.first.of(3).outcome().ticket == 9
    taken = rings.take_back()
    assert taken is not None
    assert (taken[0], len(taken[1]), taken[2]) == (SEQUENCE + 4, 1, client._lot)


def test_a_lot_waits_while_the_window_is_full(adds: tuple[Rings, Adds]) -> None:
    rings, client = adds
    for number in range(layout.WINDOW + 1):
        client.fill(number)
    assert rings.direct.lots == layout.WINDOW
    client.fill(layout.WINDOW + 1, 1)
    assert (rings.direct.lots, client.checked) == (layout.WINDOW, 1), "no answer came in time"
    taken = rings.take_back()
    assert taken is not None
    assert [message for _, message in taken[1]] == [
        rings.daemon_takes() for _ in range(layout.WINDOW)
    ]
    assert [wire.FRAME.unpack_from(message)[-1] for _, message in taken[1]] == [0, 1, 2, 3]
    assert taken[2] is client._lot


def test_an_answer_with_a_refusal_stays_for_the_engine(adds: tuple[Rings, Adds]) -> None:
    rings, client = adds
    client.fill(0)
    client.fill(1, 1)
    message = rings.daemon_takes()
    refused = answers(message, [Status.EXISTS] + [Status.ADDED] * (FULL - 1))
    rings.daemon.put(refused)
    client.fill(1, FULL - 1)
    client.fill(2, 1)
    assert rings.direct.lots == 2
    taken = rings.take_back()
    assert taken is not None
    assert taken[1][0] == (client.first, message)
    assert bytes(rings.client.take() or b"") == refused
    packer = rings.core.connections[0].packer
    packer.adopt(*taken[1][0]).settle(refused[wire.FRAME.size :])
    assert [pending.failed for pending in client.noted] == [True]


@pytest.mark.parametrize("end", ["request", "lot", "taken back"])
def test_a_later_request_ends_the_sending_of_lots(adds: tuple[Rings, Adds], end: str) -> None:
    rings, client = adds
    client.fill(0)
    if end == "request":
        rings.requests.put("request")
    elif end == "lot":
        rings.requests.open("another lot")
    else:
        rings.take_back()
    client.fill(1, 1)
    assert (rings.direct.lots, client.checked) == (0, 1)
    assert not rings.daemon.next_bytes


def test_arguments_that_python_must_convert(adds: tuple[Rings, Adds]) -> None:
    _, client = adds
    before = len(client.first)
    some: Any = client
    odd: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((UUID(int=1), 5), {}), (("k", timedelta(5)), {}), (("k", 5), {"within": 1.0}),
        (("k", 5), {"topic": "unknown"}), (("k", 5), {"mode": "never"}),
        (("k", 5), {"deadline": NOW}), (("k", 5), {"timeout": 1.0}), (("k",), {}),
        (("k", 5, 6), {}), ((), {"delay": 5}), (("k", 5), {"payload": "text"}),
    ]  # fmt: skip
    for arguments, named in odd[:8] + odd[10:]:
        some.add(*arguments, wait=False, **named)
    for arguments, named in odd[8:10]:
        with pytest.raises(TypeError):
            some.add(*arguments, wait=False, **named)
    with pytest.raises(TypeError):
        some.add("k", 5, wait=False, unknown=1)
    some.add("k", 5)
    some.cancel("k", ticket=-1, wait=False)
    some.cancel("k")
    assert (client.checked, len(client.first)) == (12, before)
    some.cancel("k", wait=False)
    some.cancel(b"k", ticket=7, wait=False)
    some.add(key="k", delay=5, wait=False)
    assert (client.checked, len(client.first)) == (12, before + 3)
