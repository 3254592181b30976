"""The ring transport: clients on this host, through memory that they share with the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_ring import NoRings, RawRing
from raw_wire import HELLO, batch, frame, put
from real_daemon import Daemon, StartDaemon, eventually, stats

from purgatoryd.clients import (
    Admin,
    AsyncClient,
    Client,
    ForkedProcess,
    InvalidArgument,
    Remote,
    RingsRefused,
)
from purgatoryd.clients.local_channel import LocalChannel
from purgatoryd.shm_layout._core import lib

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
    from purgatoryd.daemon.config import Config
    from purgatoryd.daemon.listeners.access import Access
    from purgatoryd.daemon.listeners.sockets import Sockets
    from purgatoryd.shm_layout.paths import paths_in

    paths = paths_in(daemon_dir, "demo")
    with contextlib.closing(Sockets(paths, Access.of(Config("demo")), ring_bytes=2**20)) as bound:
        bound._rings._overflow_uid = os.geteuid()
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.connect(str(paths.ring))
            assert bound.commands.receive() is None
            connection.settimeout(5)
            assert connection.recv(64) == b""


def test_the_daemon_sleeps_while_clients_are_idle(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with contextlib.ExitStack() as stack:
        for n in range(20):
            stack.enter_context(Client("demo", transport="ring")).add(f"k{n}", 600)
        added = stats(real)["heartbeat_boot_ns"]
        eventually(lambda: stats(real)["heartbeat_boot_ns"] > added)
        before = stats(real)
        eventually(lambda: stats(real)["heartbeat_boot_ns"] > before["heartbeat_boot_ns"] + 2**31)
        assert stats(real)["loop_iterations"] - before["loop_iterations"] < 40
