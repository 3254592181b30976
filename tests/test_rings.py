"""The ring transport: clients on this host, through memory that they share with the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from raw_ring import NoRings, RawRing
from raw_wire import HELLO, batch, frame, put
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, stats

from purgatoryd.clients import (
    Admin,
    AsyncClient,
    CallTimeout,
    CancelResult,
    Client,
    ForkedProcess,
    InvalidArgument,
    Remote,
    RingsRefused,
    Status,
    Subscriber,
)
from purgatoryd.clients.local_channel import LocalChannel
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.ring_server import Ring, RingServer
from purgatoryd.daemon.listeners.rings import Rings
from purgatoryd.daemon.listeners.sockets import Sockets
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import Message, RingRefusal
from purgatoryd.shm_layout.paths import paths_in
from purgatoryd.shm_layout.rings import OFFER, RingPair, create_memory, pair_bytes

pytestmark = pytest.mark.tier("test")

PAYLOAD = b"p" * 60_000


def transport_of(client: Client) -> str:
    channel = client._core.connections[0].channel
    assert isinstance(channel, LocalChannel)
    return channel.transport


def sessions_of(real: Daemon) -> int:
    with Admin(real.name) as admin:
        return len(admin.sessions())


def armed(real: Daemon, key: str) -> bool:
    with Client(real.name, namespace="raw", transport="zmq") as client:
        return client.get(key) is not None


# ---- which transport ---------------------------------------------------------------------------


def test_a_client_on_the_daemons_host_gets_rings(daemon: StartDaemon) -> None:
    daemon("demo")
    with Client("demo") as client:
        assert transport_of(client) == "ring"
        assert client.add("a", 60).key == "a"
        assert client.cancel("a")


def test_a_client_without_rings_uses_zeromq(daemon: StartDaemon) -> None:
    real = daemon("demo", "--ring-memory", "0")
    assert not real.paths.ring.exists()
    with Client("demo") as client:
        assert transport_of(client) == "zmq"
        client.add("a", 60)
    with pytest.raises(RingsRefused, match="has no rings"):
        Client("demo", transport="ring")


def test_a_client_uses_zeromq_when_the_memory_for_rings_is_used_up(daemon: StartDaemon) -> None:
    daemon("demo", "--ring-memory", "80K")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client("demo")) for _ in range(3)]
        assert [transport_of(client) for client in clients] == ["ring", "ring", "zmq"]
        for number, client in enumerate(clients):
            client.add(f"k{number}", 60)
        with pytest.raises(RingsRefused, match="memory for rings is used up"):
            Client("demo", transport="ring")
    with Client("demo") as client:  # the rings of closed clients are free again
        eventually(lambda: client.get("k0") is not None)


def test_a_transport_that_does_not_exist_is_refused(daemon_dir: Path) -> None:
    with pytest.raises(InvalidArgument, match="auto, ring or zmq, not 'tcp'"):
        Client("demo", transport="tcp")  # type: ignore[arg-type]


def test_a_daemon_on_another_host_has_no_rings(daemon_dir: Path) -> None:
    remote = Remote.__new__(Remote)
    with pytest.raises(InvalidArgument, match="auto or zmq for a daemon on another host"):
        Client("demo", transport="ring", remote=remote)


# ---- messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ring", "zmq"])
def test_a_message_larger_than_the_ring_arrives_whole(daemon: StartDaemon, transport: Any) -> None:
    daemon("demo", "--payload-memory", "64M")
    with Client("demo", transport=transport) as client:
        rows = [(f"k{n}", 60.0, "default", PAYLOAD[: 50_000 + n]) for n in range(100)]
        client.add_many(rows)
        for n in (0, 57, 99):
            info = client.get(f"k{n}")
            assert info is not None
            assert info.payload == PAYLOAD[: 50_000 + n]


def test_a_reply_without_space_waits_for_a_ring_that_sleeps() -> None:
    """Outcomes are sent to clients that are silent, so the daemon waits for space by itself."""
    size = 512
    woken: list[int] = []
    fd = create_memory(size)
    try:
        daemon_side = RingPair(fd, size, daemon=True, wake=lambda *_: None)
        client_side = RingPair(fd, size, daemon=False, wake=lambda *_: woken.append(1))
    finally:
        os.close(fd)
    with contextlib.closing(daemon_side), contextlib.closing(client_side):
        server, ring = RingServer(size), Ring(daemon_side, (0, 0, 0), 7)
        server.add(ring)
        assert server.may_sleep()
        body = bytes(range(250)) * 4
        assert ring.send(body)
        assert server.may_sleep()
        assert client_side.take() is None  # only the first pieces
        assert woken == [1]
        while (taken := client_side.take()) is None:
            ring.flush()
        assert taken == body


def test_many_calls_in_flight_keep_their_order(daemon: StartDaemon) -> None:
    daemon("demo")
    with Client("demo", transport="ring") as client:
        handles = [client.add("same", 60 + n, mode="replace", wait=False) for n in range(5_000)]
        tickets = [handle.result().ticket for handle in handles]
        assert tickets == list(range(tickets[0], tickets[0] + 5_000))


def test_an_async_client_uses_rings(daemon: StartDaemon) -> None:
    daemon("demo")

    async def run() -> int:
        async with AsyncClient("demo", transport="ring") as client:
            await asyncio.gather(*(client.add(f"k{n}", 60) for n in range(2_000)))
            return sum([await client.get(f"k{n}") is not None for n in range(0, 2_000, 100)])

    assert asyncio.run(run()) == 20


# ---- the end of either side --------------------------------------------------------------------


def test_whole_messages_of_a_client_that_ended_are_applied(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with RawRing(real.paths.ring) as raw:
        raw.hello()
        os.kill(real.process.pid, signal.SIGSTOP)
        for n in range(1, 4):
            raw.sequence += 1
            raw.send(batch(raw.session, raw.sequence, [put(b"k%d" % n, 60_000_000_000)]))
    os.kill(real.process.pid, signal.SIGCONT)
    assert eventually(lambda: armed(real, "k3"))
    assert armed(real, "k1")


def test_answers_of_a_daemon_that_was_killed_are_received(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with RawRing(real.paths.ring) as raw:
        raw.hello()
        raw.sequence += 1
        raw.send(batch(raw.session, raw.sequence, [put(b"k", 60_000_000_000)]))
        eventually(lambda: raw.pair.next_bytes)
        real.kill()
        assert raw.receive().error == 0


def test_calls_in_flight_reach_the_next_daemon(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with Client("demo", transport="ring", timeout=30) as client:
        client.add("before", 60)
        os.kill(real.process.pid, signal.SIGSTOP)
        handles = [client.add(f"k{n}", 60, wait=False) for n in range(3_000)]
        real.kill()
        daemon("demo")
        assert [handle.result().key for handle in handles] == [f"k{n}" for n in range(3_000)]
        assert transport_of(client) == "ring"
        assert client.get("before") is not None


def test_the_session_of_a_killed_client_ends_with_its_rings(daemon: StartDaemon) -> None:
    real = daemon("demo")
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            client = Client("demo", transport="ring")
            client.add("a", 60)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    maps = Path(f"/proc/{real.process.pid}/maps")
    eventually(lambda: "purgatoryd-ring" not in maps.read_text())
    eventually(lambda: sessions_of(real) == 0)


def test_a_forked_child_has_no_rings(daemon: StartDaemon) -> None:
    daemon("demo")
    with Client("demo", transport="ring") as client:
        client.add("a", 60)
        assert "purgatoryd-ring" in Path("/proc/self/maps").read_text()
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                mapped = "purgatoryd-ring" in Path("/proc/self/maps").read_text()
                try:
                    client.add("b", 60)
                except ForkedProcess:
                    code = 2 if mapped else 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.get("a") is not None


def test_a_removed_path_is_bound_again(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with Client("demo", transport="ring") as client:
        real.paths.ring.unlink()
        client.add("a", 60)
        eventually(real.paths.ring.is_socket)
        with Client("demo", transport="ring") as second:
            assert second.get("a") is not None


def test_a_command_socket_exists_only_with_the_socket_for_rings(
    daemon_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that finds only the command socket uses no rings."""
    paths = paths_in(daemon_dir, "demo")
    found: list[bool] = []

    def look_before(method: str) -> None:
        act = getattr(Rings, method)

        def look(*arguments: object) -> None:
            found.append(paths.cmd.exists())
            act(*arguments)

        monkeypatch.setattr(Rings, method, look)

    for method in ("__init__", "listen", "close"):
        look_before(method)
    for path in (paths.cmd, paths.ring):  # those of a daemon that was killed
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
            left.bind(str(path))
    with contextlib.closing(Sockets(paths, Access.of(Config("demo")), ring_bytes=2**20)):
        assert paths.cmd.exists()
        assert paths.ring.exists()
    assert found == [False, False, False]
    assert [path for path in daemon_dir.iterdir() if path.is_socket()] == []


# ---- direct calls ------------------------------------------------------------------------------


@contextlib.contextmanager
def stopped(real: Daemon) -> Iterator[None]:
    """Stop the daemon, so that no message is answered. It is awake then, so that a client has no
    reason to look for the end of the connection."""
    os.kill(real.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(real.process.pid, signal.SIGCONT)


@contextlib.contextmanager
def in_thread(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Make a call in another thread. Yields a list that receives its result or its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield results
    thread.join()


def sent_bytes(client: Client) -> int:
    """Return the position of the client in its ring."""
    channel = client._core.connections[0].channel
    assert isinstance(channel, LocalChannel)
    assert channel._pair is not None
    return int(channel._pair.putter.words.tail)


@pytest.mark.parametrize("spin_us", [0, 1000, None])
def test_a_direct_call_reaches_the_next_daemon_once(
    daemon: StartDaemon, spin_us: int | None
) -> None:
    real = daemon("demo")
    with Client("demo", transport="ring", timeout=30, spin_us=spin_us) as client:
        client.add("first", 60)
        before = sent_bytes(client)
        with stopped(real), in_thread(lambda: client.add("second", 60)) as results:
            eventually(lambda: sent_bytes(client) > before)
            real.kill()
            daemon("demo")
        assert results[0].status is Status.ADDED
        assert client.cancel("second") is CancelResult.CANCELLED
        assert client.cancel("second") is CancelResult.UNKNOWN


def test_an_answer_of_a_killed_daemon_is_not_repeated(daemon: StartDaemon) -> None:
    """The first daemon has applied the calls, and the next one repeats their answers."""
    real = daemon("demo")
    tickets = []
    with Client("demo", transport="ring", timeout=30) as client:

        def work(name: str) -> list[int]:
            return [client.add(f"{name}{n}", 60).ticket for n in range(300)]

        for name in "abcde":
            with in_thread(partial(work, name)) as got:
                eventually(lambda first=f"{name}0": client.get(first) is not None)  # type: ignore[misc]
                real.kill()
                real = daemon("demo")
            tickets += got[0]
    assert tickets == sorted(set(tickets))
    assert len(tickets) == 1500


def test_threads_share_a_client_for_direct_calls(daemon: StartDaemon) -> None:
    daemon("demo")
    with Client("demo", transport="ring", timeout=30) as client:

        def work(name: str) -> list[int]:
            return [client.add(f"{name}{n}", 60).ticket for n in range(500)]

        with contextlib.ExitStack() as stack:
            lists = [stack.enter_context(in_thread(partial(work, name))) for name in "abcd"]
        for (tickets,), name in zip(lists, "abcd", strict=True):
            assert tickets == sorted(tickets)
            for n in (0, 250, 499):
                info = client.get(f"{name}{n}")
                assert info is not None
                assert info.ticket == tickets[n]


def test_packed_calls_come_before_a_direct_call(daemon: StartDaemon) -> None:
    daemon("demo")
    with Client("demo", transport="ring", timeout=30) as client:
        for n in range(300):
            later = client.add("key", 60, mode="replace", wait=False)
            assert client.add("key", 60, mode="replace").ticket > later.result().ticket
            assert client.add(f"k{n}", 60).ticket


def test_a_direct_call_that_times_out_is_in_doubt(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with Client("demo", transport="ring", timeout=30) as client:
        client.add("first", 60)
        with stopped(real), pytest.raises(CallTimeout) as caught:
            client.add("second", 60, timeout=0.2)
        assert caught.value.in_doubt == 1
        handle = vars(caught.value)["handle"]
        assert handle.result().key == "second"
        assert client.get("second") is not None


class Stopped(Exception):
    """Exception of a signal handler."""


def test_a_signal_interrupts_a_direct_call(daemon: StartDaemon) -> None:
    real = daemon("demo")

    def stop(*_: object) -> None:
        raise Stopped

    handler = signal.signal(signal.SIGALRM, stop)
    try:
        with Client("demo", transport="ring", timeout=30) as client:
            client.add("first", 60)
            with stopped(real):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                with pytest.raises(Stopped) as caught:
                    client.add("second", 60)
            assert vars(caught.value)["handle"].result().key == "second"
            assert client.cancel("second")
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_close_waits_for_a_direct_call(daemon: StartDaemon) -> None:
    real = daemon("demo")
    client = Client("demo", transport="ring", timeout=30)
    client.add("first", 60)
    before = sent_bytes(client)
    with in_thread(lambda: client.add("second", 60)) as results, stopped(real):
        eventually(lambda: results or sent_bytes(client) > before)
        with in_thread(client.close) as closed:
            os.kill(real.process.pid, signal.SIGCONT)
    assert closed == [None]
    assert results[0].key == "second"


def test_a_fork_during_a_direct_call_leaves_it_to_the_parent(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with Client("demo", transport="ring", timeout=30) as client:
        client.add("first", 60)
        before = sent_bytes(client)
        with in_thread(lambda: client.add("second", 60)) as results, stopped(real):
            eventually(lambda: results or sent_bytes(client) > before)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    client.add("third", 60)
                except ForkedProcess:
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert results[0].key == "second"
        assert client.get("third") is None


def test_a_call_of_a_session_that_the_daemon_forgot_is_made_once(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with Client("demo", transport="ring", timeout=30) as client:
        client.add("first", 60)
        session = client._core.connections[0].session.id
        with RawRing(real.paths.ring) as raw:
            raw.hello()
            raw.send(frame(Message.BYE, session))
            assert raw.receive().error == 0
        assert client.add("second", 60).key == "second"
        assert client._core.connections[0].session.id != session
        assert client.cancel("second")


def test_a_call_that_is_larger_than_the_ring_is_made(daemon: StartDaemon) -> None:
    daemon("demo", "--ring-memory", "80K")
    with Client("demo", transport="ring", timeout=30) as client:
        for n in range(20):
            assert client.add(f"k{n}", 60, payload=PAYLOAD).key == f"k{n}"
            assert client.add(f"s{n}", 60).key == f"s{n}"


def test_a_daemon_that_polls_rings_serves_others(daemon: StartDaemon) -> None:
    """Timers, ZeroMQ and new clients are served while a client keeps the loop awake."""
    real = daemon("demo", "--busy-poll", "10ms")
    ended = threading.Event()

    def keep_awake() -> int:
        with Client("demo", transport="ring", timeout=30, spin_us=1000) as client:
            while not ended.is_set():
                client.add("key", 60, mode="replace")
        return 1

    with in_thread(keep_awake) as results, Subscriber("demo") as subscriber:
        try:
            for transport in ("ring", "zmq"):
                with Client("demo", transport=transport, timeout=30) as client:
                    client.add("due", 0)
                    notice = subscriber.get(timeout=30)
                    assert notice is not None
                    assert notice.key == "due"
            assert sessions_of(real) >= 1
        finally:
            ended.set()
    assert results == [1]


def test_other_tasks_run_between_two_calls_that_find_their_answers_at_once(
    daemon: StartDaemon,
) -> None:
    daemon("demo")

    async def main() -> None:
        async with AsyncClient("demo", transport="ring", timeout=30, spin_us=1000) as client:
            iterations = 0

            async def count() -> None:
                nonlocal iterations
                while True:
                    iterations += 1
                    await asyncio.sleep(0)

            counter = asyncio.create_task(count())
            for n in range(300):
                await client.add(f"k{n}", 60)
            counter.cancel()
            assert iterations >= 300

    asyncio.run(main())


def test_calls_of_several_tasks_share_batches_however_long_a_call_looks(
    daemon: StartDaemon,
) -> None:
    real = daemon("demo")

    async def main() -> None:
        async with AsyncClient("demo", transport="ring", timeout=30, spin_us=1000) as client:
            for n in range(10):
                await asyncio.gather(*(client.add(f"k{n}-{i}", 60) for i in range(100)))

    asyncio.run(main())
    assert stats(real)["batches"] <= 40


@pytest.mark.parametrize("spin_us", [-1, 1001, True, 1.5, "5"])
@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_a_spin_out_of_range_is_refused(daemon_dir: Path, cls: Any, spin_us: Any) -> None:
    with pytest.raises(InvalidArgument, match="spin_us"):
        cls("demo", spin_us=spin_us)


# ---- hostile clients ---------------------------------------------------------------------------

Attack = Callable[[RawRing], None]


def junk_positions(raw: RawRing) -> None:
    raw.pair.putter.words.tail = 2**63 + 5
    raw._signal(0, None)


def junk_length(raw: RawRing) -> None:
    struct.pack_into("<Q", raw.pair._memory, lib.PG_RING_HEAD, 2**40)
    raw.pair.putter.words.tail = 64
    raw._signal(0, None)


def zero_length(raw: RawRing) -> None:
    raw.pair.putter.words.tail = 64
    raw._signal(0, None)


def junk_completions(raw: RawRing) -> None:
    raw.pair.taker.words.head = 2**64 - 8 * 2**20
    for _ in range(3_000):
        if not raw.pair.put(frame(HELLO) + os.urandom(16) + bytes(16)):
            return
    raw._signal(0, None)


@pytest.mark.parametrize(
    "attack", [junk_positions, junk_length, zero_length, junk_completions], ids=lambda a: a.__name__
)
def test_impossible_words_end_only_the_attackers_connection(
    daemon: StartDaemon, attack: Attack
) -> None:
    real = daemon("demo")
    with Client("demo", transport="ring") as client, RawRing(real.paths.ring) as raw:
        client.add("before", 60)
        attack(raw)
        assert raw.closed_by_daemon()
        assert client.get("before") is not None
        assert real.running


def test_a_client_that_takes_no_answers_stalls_nobody(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with Client("demo", transport="ring") as client, RawRing(real.paths.ring) as raw:
        raw.hello()
        for _ in range(10_000):
            if not raw.pair.put(frame(HELLO) + os.urandom(16) + bytes(16)):
                client.add("a", 60, mode="replace")
        assert client.get("a") is not None
        assert real.running


def test_bells_without_messages_stall_nobody(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with RawRing(real.paths.ring) as raw, Client("demo", transport="ring") as client:
        os.set_blocking(raw.bell, True)  # the daemon shares this file description
        os.eventfd_write(raw.bell, 2**64 - 2)
        for _ in range(10_000):
            raw.connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                raw.connection.send(b"x" * 4096)
        client.add("a", 60)
        assert client.get("a") is not None
        with RawRing(real.paths.ring) as second:
            assert second.hello().error == 0


def test_a_client_that_was_cut_off_may_ring_its_bell(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with Client("demo", transport="ring") as client, RawRing(real.paths.ring) as raw:
        junk_positions(raw)
        assert raw.closed_by_daemon()
        for n in range(20):
            os.eventfd_write(raw.bell, 1)
            client.add(f"k{n}", 60)
        assert client.get("k19") is not None
        assert real.running


def test_a_session_moves_between_rings_and_is_served_by_the_last(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with RawRing(real.paths.ring) as first, RawRing(real.paths.ring) as second:
        first.hello()
        for sequence, raw in enumerate((first, first, second, second, first, first), 1):
            message = batch(first.session, sequence, [put(b"k%d" % sequence, 60_000_000_000)])
            raw.send(message)
            assert raw.receive().error == 0
        second.hello()
        second.send(batch(second.session, 1, [put(b"other", 60_000_000_000)]))
        assert second.receive().error == 0
        assert armed(real, "k6")
        assert armed(real, "other")


def test_a_client_cannot_resize_the_memory(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with RawRing(real.paths.ring) as raw:
        for size in (0, 4096, 2**24):
            with pytest.raises(PermissionError):
                os.ftruncate(raw.memory_fd, size)
        raw.hello()


def test_a_flood_of_connections_leaves_the_daemon_running(daemon: StartDaemon) -> None:
    real = daemon("demo", "--ring-memory", "1M")
    with contextlib.ExitStack() as stack:
        given = 0
        for _ in range(200):
            with contextlib.suppress(NoRings):
                stack.enter_context(RawRing(real.paths.ring))
                given += 1
        assert 8 < given < 40
        with Client("demo") as client:
            client.add("a", 60)

    def given_again() -> bool:
        with contextlib.suppress(NoRings), RawRing(real.paths.ring) as raw:
            return raw.hello().error == 0
        return False

    assert eventually(given_again)


def test_pieces_that_never_come_cost_no_one_else(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with contextlib.ExitStack() as stack:
        for _ in range(9):
            raw = stack.enter_context(RawRing(real.paths.ring))
            raw.pair.put(bytes(8 * 2**20))
        with Client("demo", transport="ring") as client:
            client.add("a", 60)
            assert client.get("a") is not None
    assert real.running


def test_a_uid_outside_the_user_namespace_gets_no_rings(
    daemon_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = paths_in(daemon_dir, "demo")
    with contextlib.closing(Sockets(paths, Access.of(Config("demo")), ring_bytes=2**20)) as bound:
        bound._rings._overflow_uid = os.geteuid()
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.connect(str(paths.ring))
            bound._rings._look(None)  # type: ignore[arg-type]
            connection.settimeout(5)
            assert connection.recv(64) == b""


def test_a_uid_gets_half_of_the_memory_for_rings(daemon_dir: Path) -> None:
    paths, memory_bytes = paths_in(daemon_dir, "demo"), 2**20
    with contextlib.ExitStack() as stack:
        bound = Sockets(paths, Access.of(Config("demo")), ring_bytes=memory_bytes)
        rings = stack.enter_context(contextlib.closing(bound))._rings

        def connect() -> tuple[RingRefusal, int]:
            """Return why a new connection gets no rings, and the memory of its rings."""
            connection = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
            connection.settimeout(PATIENCE_S)
            connection.connect(str(paths.ring))
            rings._look(None)  # type: ignore[arg-type]
            offer, fds, _, _ = socket.recv_fds(connection, OFFER.size, 2)
            for fd in fds:
                os.close(fd)
            _, _, refusal, ring_bytes = OFFER.unpack(offer)
            return RingRefusal(refusal), pair_bytes(ring_bytes) if fds else 0

        rings._trusted = set()
        offers = [connect()]
        while offers[-1][0] is RingRefusal.NONE:
            offers.append(connect())
        sizes = [found_bytes for _, found_bytes in offers]
        assert offers[-1][0] is RingRefusal.UID
        assert sum(sizes) <= memory_bytes // 2 < sum(sizes) + sizes[-2]
        rings._trusted = {os.geteuid()}
        assert connect()[0] is RingRefusal.NONE


@pytest.mark.parametrize("settings", [(), ("--busy-poll", "1ms")], ids=" ".join)
def test_the_daemon_sleeps_while_clients_are_idle(
    daemon: StartDaemon, settings: tuple[str, ...]
) -> None:
    real = daemon("demo", *settings)
    with contextlib.ExitStack() as stack:
        for n in range(20):
            stack.enter_context(Client("demo", transport="ring")).add(f"k{n}", 600)
        added = stats(real)["heartbeat_boot_ns"]
        eventually(lambda: stats(real)["heartbeat_boot_ns"] > added)
        before = stats(real)
        eventually(lambda: stats(real)["heartbeat_boot_ns"] > before["heartbeat_boot_ns"] + 2**31)
        assert stats(real)["loop_iterations"] - before["loop_iterations"] < 40
