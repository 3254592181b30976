"""The ROUTER socket: messages that the core receives through pyzmq's libzmq, and those that Python
receives."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import raw_wire
import zmq
import zmq.backend
from raw_wire import BATCH, BYE, PING, Raw, batch, cancel, frame, put

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.lifecycle import STARTING, DaemonLifecycle
from purgatoryd.daemon.listeners import libzmq
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.sockets import Sockets
from purgatoryd.daemon.listeners.transport import Served
from purgatoryd.daemon.listeners.whole_messages import send_whole
from purgatoryd.daemon.main import loop_of
from purgatoryd.daemon.processes import Processes
from purgatoryd.daemon.reaper import Reaper
from purgatoryd.daemon.service_manager import ServiceManager
from purgatoryd.daemon.store import Opening, owned
from purgatoryd.daemon.waiting import Waiter
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.paths import daemon_paths

pytestmark = pytest.mark.tier("test")

MS = 1_000_000
UNPLACED: Any = SimpleNamespace(
    look=lambda arena: None, settle=lambda *_: None, plan=SimpleNamespace(spin_ns=0)
)


@pytest.fixture
def socket() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        yield router


def test_a_message_without_memory_is_not_sent_in_part(
    socket: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that has part of a message treats the next message as the rest of it."""
    make = zmq.Frame

    def short_of_memory(data: bytes, *, copy: bool) -> zmq.Frame:
        if len(data) > 100:
            raise MemoryError
        return make(data, copy=copy)

    socket.bind("inproc://replies")
    with socket.context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.ROUTING_ID, b"a")
        client.connect("inproc://replies")
        client.send(b"hello")
        assert socket.recv_multipart() == [b"a", b"hello"]
        with monkeypatch.context() as patch:
            patch.setattr(zmq, "Frame", short_of_memory)
            with pytest.raises(MemoryError):
                send_whole(socket, b"a", bytes(1000))
        reused = bytearray(b"answer" * 20_000)
        send_whole(socket, b"a", reused)
        reused[:] = bytes(len(reused))
        assert client.recv_multipart() == [b"answer" * 20_000]


# ---- the functions of libzmq -------------------------------------------------------------------


def test_the_functions_of_pyzmq_are_found(socket: zmq.Socket[bytes]) -> None:
    calls = libzmq.calls_for(socket)
    assert calls is not None
    assert calls.recv != calls.send


def test_functions_that_cannot_be_found_are_not_used(
    socket: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("not loaded")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert libzmq.calls_for(socket) is None


def test_an_extension_without_libzmq_is_not_used(
    socket: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = sys.modules["purgatoryd.shm_layout._core"]
    monkeypatch.setitem(sys.modules, zmq.backend.Socket.__module__, own)
    assert libzmq.calls_for(socket) is None


def test_another_version_is_not_used(
    socket: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 99, 0))
    assert libzmq.calls_for(socket) is None


@pytest.mark.parametrize("oldest", [(4, 99), (5, 0)])
def test_an_old_version_is_not_used(
    socket: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch, oldest: tuple[int, int]
) -> None:
    monkeypatch.setattr(libzmq, "OLDEST", oldest)
    assert libzmq.calls_for(socket) is None


def test_a_socket_that_libzmq_describes_differently_is_not_used(
    socket: zmq.Socket[bytes],
) -> None:
    other: Any = SimpleNamespace(underlying=socket.underlying, getsockopt=lambda _: zmq.XPUB)
    assert libzmq.calls_for(other) is None


def test_functions_of_another_copy_that_the_linker_prefers_are_not_used(
    socket: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another copy of libzmq that the whole process sees has other functions under these names."""
    opened = ctypes.CDLL
    copy = SimpleNamespace(zmq_send=ctypes.CDLL(None).write)
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name, *a, **k: copy if name is None else opened(name, *a, **k)
    )
    assert libzmq.calls_for(socket) is None


# ---- a daemon in this process ------------------------------------------------------------------


class InProcess:
    """A daemon whose iterations the test runs, and the messages that its Python has seen."""

    def __init__(self, sockets: Sockets, reaper: Reaper, waiter: Waiter, name: str) -> None:
        self.name = name
        self.sockets = sockets
        self.reaper = reaper
        self._waiter = waiter
        self.seen: list[bytes] = []
        commands: Any = reaper._commands
        take = commands._take

        def taken(message: Any, served: Served) -> bool:
            self.seen.append(bytes(message.body))
            return bool(take(message, served))

        commands._take = taken

    def ask(self, peer: Raw, *parts: bytes) -> raw_wire.Answer:
        """Send a message, and run the daemon until the peer has an answer."""
        peer.send(*parts)
        return self.answer(peer)

    def answer(self, peer: Raw) -> raw_wire.Answer:
        """Run the daemon until the peer has an answer."""
        self.run_until(lambda: bool(peer.socket.poll(0)))
        return peer.receive()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run the daemon, with short sleeps, until `done`."""
        loop = self.reaper.loop
        while not done():
            if loop.iterate() is not None:
                loop.woke(self.reaper.wait(self._waiter, HOST.boot_ns() + MS))

    def greet(self, peer: Raw) -> None:
        """Open a session for a peer."""
        found = self.ask(peer, frame(raw_wire.HELLO) + os.urandom(16) + bytes(16))
        assert found.error == 0
        peer.session = found.session

    def batch(self, peer: Raw, *records: tuple[bytes, bytes]) -> raw_wire.Answer:
        """Send the next batch of a peer's session."""
        peer.sequence += 1
        return self.ask(peer, batch(peer.session, peer.sequence, records))


StartServed = Callable[..., InProcess]


@pytest.fixture
def start(daemon_dir: Path) -> Iterator[StartServed]:
    with contextlib.ExitStack() as stack:

        def started(name: str = "demo", *, in_core: bool = True) -> InProcess:
            paths, config = daemon_paths(name), Config(name)
            access = Access.of(config)
            opening = stack.enter_context(owned(Opening(config, paths)))
            with pytest.MonkeyPatch.context() as patch:
                if not in_core:
                    patch.setattr(libzmq, "_library", lambda: None)
                sockets = stack.enter_context(contextlib.closing(Sockets(paths, access)))
            processes = stack.enter_context(contextlib.closing(Processes()))
            lifecycle = DaemonLifecycle(ServiceManager())
            lifecycle.enter(STARTING)
            reaper = stack.enter_context(
                loop_of(opening, sockets, access, lifecycle, UNPLACED, processes)
            )
            waiter = Waiter([*sockets.fds(), processes.fd], sockets.bells)
            stack.enter_context(contextlib.closing(waiter))
            reaper.begin()
            return InProcess(sockets, reaper, waiter, name)

        yield started


@pytest.fixture
def served(start: StartServed) -> InProcess:
    return start()


@pytest.fixture
def peer(served: InProcess) -> Iterator[Raw]:
    with Raw(daemon_paths("demo").cmd) as connected:
        yield connected


def test_plain_messages_do_not_reach_python(served: InProcess, peer: Raw) -> None:
    served.greet(peer)
    first = served.batch(peer, put(b"a"))  # may come before the session has an owner
    assert first.statuses == [raw_wire.ADDED]
    served.seen.clear()
    assert served.batch(peer, put(b"b"), cancel(b"a")).statuses == [1, raw_wire.CANCELLED]
    assert served.ask(peer, frame(PING, peer.session, 9)).sequence == 9
    assert served.seen == []


def test_other_messages_reach_python_unchanged_and_in_order(served: InProcess, peer: Raw) -> None:
    served.greet(peer)
    served.batch(peer, put(b"a"))
    served.seen.clear()
    strange = [b"short", frame(PING, peer.session ^ 1 << 20, 1), frame(77, peer.session, 2)]
    for body in strange:
        peer.send(body)
    served.ask(peer, frame(BYE, peer.session))
    for _ in strange:
        served.answer(peer)
    assert served.seen == [*strange, frame(BYE, peer.session)]


def test_python_receives_each_message_without_the_functions(start: StartServed) -> None:
    served = start(in_core=False)
    with Raw(daemon_paths("demo").cmd) as peer:
        served.greet(peer)
        served.batch(peer, put(b"a"))
        served.seen.clear()
        assert served.batch(peer, put(b"b")).statuses == [raw_wire.ADDED]
        assert len(served.seen) == 1


def test_a_session_belongs_to_the_connection_that_spoke_last(served: InProcess, peer: Raw) -> None:
    served.greet(peer)
    served.batch(peer, put(b"a"))
    with Raw(daemon_paths("demo").cmd) as second:
        second.session, second.sequence = peer.session, peer.sequence
        served.batch(second, put(b"b"))
        served.seen.clear()
        served.batch(second, put(b"c"))
        assert served.seen == []
        served.ask(peer, frame(PING, peer.session, 1))  # the first connection again
        assert len(served.seen) == 1
        served.ask(second, frame(PING, peer.session, 2))
        assert len(served.seen) == 2


def test_complete_messages_clear_the_strikes_of_a_connection(served: InProcess, peer: Raw) -> None:
    served.greet(peer)
    served.batch(peer, put(b"a"))
    admission = served.sockets.admission
    (fd,) = [fd for fd, one in admission._peers.items() if one.sessions]
    one = admission._peers[fd]
    one.strikes = 3
    served.seen.clear()
    served.batch(peer, put(b"b"))
    assert served.seen == []
    assert admission._strikes(fd, one) == 0


def test_a_message_with_more_frames_ends_the_connection(served: InProcess, peer: Raw) -> None:
    served.greet(peer)
    served.batch(peer, put(b"a"))
    connected = set(served.sockets.admission.connected)
    with Raw(daemon_paths("demo").cmd) as hostile:
        served.greet(hostile)
        before = served.sockets.admission.connected - connected
        hostile.send(*[b"part"] * 600)
        served.run_until(lambda: not before & served.sockets.admission.connected)
    assert served.batch(peer, put(b"b")).statuses == [raw_wire.ADDED]
    served.greet(peer)


def test_a_flood_is_answered_completely(served: InProcess, peer: Raw) -> None:
    served.greet(peer)
    served.batch(peer, put(b"a"))
    for n in range(40):
        peer.send(frame(PING, peer.session, n))
    assert [served.answer(peer).sequence for _ in range(40)] == list(range(40))


def test_each_iteration_of_a_flood_looks_for_clients_that_ring(
    served: InProcess, peer: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client whose rings sleep would wait until the end of the flood."""
    served.greet(peer)
    served.batch(peer, put(b"a"))
    looks = 0

    def look(_: object) -> None:
        nonlocal looks
        looks += 1

    monkeypatch.setattr(served.sockets._rings, "_look", look)
    for n in range(100):
        peer.send(frame(PING, peer.session, n))
    served.reaper.loop.iterate()  # the first iteration after the sleep
    looks = 0
    for iterations in range(1, 8):
        served.reaper.loop.iterate()
        assert looks == iterations


# ---- the core and Python answer alike ----------------------------------------------------------


def some_message(random_: random.Random, session: int, sequence: int) -> bytes:
    """Return a batch, a damaged batch, a short message or another kind of message."""
    key, how = b"k%d" % random_.randrange(5), random_.randrange(16)
    records = [put(key) if random_.random() < 0.5 else cancel(key) for _ in range(how % 4)]
    whole = batch(session, sequence, records)
    if how < 2:
        return whole[: random_.randrange(len(whole))]
    if how < 4:
        at = random_.randrange(len(whole))
        return whole[:at] + bytes([random_.randrange(256)]) + whole[at + 1 :]
    if how < 6:
        return frame(random_.choice([PING, BATCH, 9, 77]), session, sequence)
    if how < 8:
        return random_.randbytes(random_.randrange(200))
    return whole


def conversation(served: InProcess, seed: int) -> list[tuple[int, int, int, list[int]]]:
    """Send random messages, and return what the answers say."""
    random_, answers = random.Random(seed), []
    with Raw(daemon_paths(served.name).cmd) as peer:
        served.greet(peer)
        served.ask(peer, frame(PING, peer.session))
        for _ in range(60):
            peer.send(some_message(random_, peer.session, peer.sequence + 1))
            found = served.ask(peer, frame(PING, peer.session, 99))
            while found.sequence != 99 or found.message != PING:
                good = found.message == BATCH and found.error == 0
                peer.sequence += good and found.sequence == peer.sequence + 1
                statuses = found.statuses if good else []
                answers.append((found.message, found.sequence, found.error, statuses))
                found = served.answer(peer)
    return answers


@pytest.mark.parametrize("seed", range(4))
def test_the_core_and_python_give_the_same_answers(start: StartServed, seed: int) -> None:
    in_core, in_python = start("demo"), start("other", in_core=False)
    answers = conversation(in_core, seed)
    assert answers == conversation(in_python, seed)
    assert len(in_core.seen) < len(in_python.seen)
