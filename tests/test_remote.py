"""Remote clients over tcp: they need CURVE and a listed key, even on loopback, and have limits."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from raw_wire import PING
from raw_wire import frame as request
from real_daemon import PATIENCE_S, DaemonFailed, StartDaemon, eventually
from remote_place import UID, Place, remote_place

from purgatoryd.clients import (
    AllOf,
    AsyncClient,
    AsyncSubscriber,
    CallTimeout,
    Client,
    Consumer,
    DaemonUnreachable,
    Denied,
    InvalidArgument,
    Lagged,
    Purgatory,
    Remote,
    Subscriber,
)
from purgatoryd.clients.stream import Stream
from purgatoryd.daemon.listeners import sockets
from purgatoryd.shm_layout import curve, wire
from purgatoryd.shm_layout.errors import BadPath
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import ArenaState, ClockKind

pytestmark = pytest.mark.tier("test")

SHORT_S = 0.5
"""Timeout of a client that is refused, in seconds."""


@pytest.fixture
def place(daemon: StartDaemon, tmp_path: Path) -> Place:
    return remote_place(daemon, tmp_path)


HOLDER = """
import sys, time
from purgatoryd.clients import Consumer, Remote
with Consumer("demo", namespace="far", group="mailers", create=False, timeout=60,
              lease=float(sys.argv[1]), remote=Remote(*sys.argv[2:])) as jobs:
    job = jobs.get(60)
    print(job.key, flush=True)
    time.sleep(3600)
"""
"""A program that holds a job."""


@contextmanager
def job_held(
    place: Place, client: Client, lease_s: float = 3600
) -> Iterator[subprocess.Popen[str]]:
    """Let a process on another host hold a job. The consumer group retries at once."""
    remote = place.remote
    client.create_group("mailers", ["orders"], backoff=0)
    client.add("k", 0, topic="orders")
    with subprocess.Popen(
        [
            sys.executable, "-c", HOLDER, str(lease_s), remote.tcp, remote.server_key,
            str(remote.key),
        ],
        stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "k\n"
            assert (client.group("mailers").leased, client.group("mailers").waiting) == (1, 0)
            yield holder
        finally:
            holder.kill()


def check_returned(client: Client, limit_s: float) -> None:
    """Wait for the job of the holder."""
    with Consumer("demo", namespace="far", group="mailers", create=False) as jobs:
        job = jobs.get(limit_s)
        assert job is not None
        assert (job.key, job.attempt) == ("k", 2)
        job.ack()
    assert client.group("mailers").acked == 1


# ---- calls that work ---------------------------------------------------------------------------


def test_tcp_without_netlink_is_refused_before_libzmq_aborts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "not supported")

    pair = curve.generate(tmp_path / "pair")
    monkeypatch.setattr(socket, "socket", refuse)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        with pytest.raises(BadPath, match="libzmq needs AF_NETLINK sockets: not supported"):
            sockets.listen_tcp(router, "tcp://127.0.0.1:1", pair, 1000)
        monkeypatch.undo()
        with pytest.raises(BadPath, match="cannot be bound: Cannot assign"):
            sockets.listen_tcp(router, "tcp://192.0.2.1:1", pair, 1000)


@pytest.mark.tier("test")
def test_a_client_and_a_subscriber(place: Place) -> None:
    with (
        Subscriber("demo", namespace="far", remote=place.remote) as notices,
        Client("demo", namespace="far", remote=place.remote) as timers,
    ):
        added = timers.add("late", delay=3600, payload=b"x" * 60_000)
        assert added.deadline_boot_ns > 0
        assert timers.cancel("late").name == "CANCELLED"
        timers.add_many([(f"key-{i}", 0.0, "jobs", b"payload") for i in range(3000)])
        seen = {notices.get(timeout=PATIENCE_S) for _ in range(3000)}
    assert {n.key for n in seen if n is not None} == {f"key-{i}" for i in range(3000)}
    # client and daemon have no common clock
    assert {n.received_boot_ns for n in seen if n is not None} == {None}


def test_a_killed_remote_consumer_returns_its_leases(place: Place) -> None:
    client = Client("demo", namespace="far", timeout=PATIENCE_S)
    with client, job_held(place, client) as holder:
        holder.kill()
        check_returned(client, PATIENCE_S)


@pytest.mark.tier("all")
def test_a_frozen_remote_consumer_loses_its_lease_when_it_ends(place: Place) -> None:
    client = Client("demo", namespace="far", timeout=PATIENCE_S)
    with client, job_held(place, client, lease_s=2) as holder:
        holder.send_signal(signal.SIGSTOP)
        check_returned(client, PATIENCE_S)


@pytest.mark.tier("all")
def test_the_daemon_stamps_the_delays(place: Place) -> None:
    with Client("demo", remote=place.remote) as timers:
        before_ns = HOST.boot_ns()
        one = timers.add("one", delay=100)
        many = timers.add_many([("many", 100.0)])
        after_ns = HOST.boot_ns()
        assert before_ns <= one.deadline_boot_ns - 100 * 10**9 <= after_ns
        assert before_ns <= int(many.deadlines_boot_ns[0]) - 100 * 10**9 <= after_ns


@pytest.mark.tier("all")
def test_operations(place: Place) -> None:
    with Purgatory("demo", namespace="far", remote=place.remote) as owner:
        write = owner.watch("write", AllOf({"replica": 5}), timeout=60.0)
        with Purgatory("demo", namespace="far") as local:
            local.advance("replica", 5)
        assert write.result(timeout=PATIENCE_S).cause == "satisfied"


@pytest.mark.tier("all")
def test_asyncio(place: Place) -> None:
    async def both() -> str:
        async with (
            AsyncSubscriber("demo", namespace="far", remote=place.remote) as notices,
            AsyncClient("demo", namespace="far", remote=place.remote) as timers,
        ):
            await timers.add("key", delay=0)
            notice = await notices.get(timeout=PATIENCE_S)
            assert notice is not None
            return str(notice.key)

    assert asyncio.run(both()) == "key"


@pytest.mark.tier("all")
def test_local_clients_need_no_key(place: Place) -> None:
    with Client("demo", namespace="near") as timers:
        timers.add("key", delay=60)


@pytest.mark.tier("test")
def test_the_key_is_the_uid_that_owns(place: Place) -> None:
    namespaces = [sys.executable, "-m", "purgatoryd.cli", "namespace", "set", "--name", "demo"]
    environment = place.daemon.env

    def give(namespace: str, owner: int) -> None:
        command = [*namespaces, namespace, "--owner", str(owner)]
        subprocess.run(command, check=True, capture_output=True, env=environment)

    give("its", UID)
    give("others", UID + 1)
    with Client("demo", namespace="its", remote=place.remote) as timers:
        timers.add("key", delay=60)
    with (
        Client("demo", namespace="others", remote=place.remote) as timers,
        pytest.raises(Denied),
    ):
        timers.add("key", delay=60)


@pytest.mark.tier("all")
def test_a_restart_is_survived(place: Place) -> None:
    with Client("demo", remote=place.remote, timeout=PATIENCE_S) as timers:
        timers.add("before", delay=600)
        place.daemon.kill()
        place.daemon.start()
        assert timers.get("before") is not None


@pytest.mark.tier("all")
def test_uids_that_may_not_connect_do_not_by_key(place: Place) -> None:
    place.daemon.restart(*place.args, "--allow-uid", str(UID + 1))
    refused(place.remote)
    place.daemon.restart(*place.args, "--allow-uid", str(UID))
    with Client("demo", remote=place.remote) as timers:
        timers.add("key", delay=60)


# ---- refusals --------------------------------------------------------------------------------


def refused(remote: Remote) -> None:
    with pytest.raises(DaemonUnreachable):
        Client("demo", remote=remote, timeout=SHORT_S)
    with pytest.raises(DaemonUnreachable):
        Subscriber("demo", remote=remote, timeout=SHORT_S)


@pytest.mark.tier("test")
def test_a_key_that_is_not_in_the_list(place: Place, tmp_path: Path) -> None:
    curve.generate(tmp_path / "stranger")
    refused(Remote(place.remote.tcp, place.server_key, tmp_path / "stranger"))


def allow(place: Place, tmp_path: Path, *pairs: curve.KeyPair) -> None:
    """Write these keys into the list of allowed keys, and make the daemon read the list."""
    lines = (f"worker-{n} {pair.public.decode()} {UID}\n" for n, pair in enumerate(pairs))
    (tmp_path / "allowed").write_text("".join(lines))
    os.kill(place.daemon.pid, signal.SIGHUP)


def is_let_in(remote: Remote) -> bool:
    try:
        with Client("demo", remote=remote, timeout=SHORT_S) as client:
            return client.get("k") is not None
    except (CallTimeout, DaemonUnreachable):
        return False


def is_cut_off(client: Client) -> bool:
    try:
        return client.get("k", timeout=SHORT_S) is None
    except (CallTimeout, DaemonUnreachable):
        return True


@pytest.mark.tier("all")
def test_the_list_of_keys_is_read_again_on_demand(place: Place, tmp_path: Path) -> None:
    first, second = curve.read_pair(tmp_path / "client"), curve.generate(tmp_path / "second")
    other = Remote(place.remote.tcp, place.server_key, tmp_path / "second")
    with Client("demo", remote=place.remote, timeout=PATIENCE_S) as client:
        client.add("k", delay=3600)
        allow(place, tmp_path, first, second)
        eventually(lambda: is_let_in(other))
        assert client.get("k") is not None, "a client whose key stays listed can still call"
        allow(place, tmp_path, second)
        eventually(lambda: is_cut_off(client))
    allow(place, tmp_path, second, second)
    eventually(lambda: "repeats a key" in place.daemon.stderr)
    eventually(lambda: is_let_in(other))  # the invalid list changes nothing
    assert not is_let_in(place.remote)


@pytest.mark.tier("all")
def test_another_server_than_expected(place: Place, tmp_path: Path) -> None:
    other = curve.generate(tmp_path / "other").public.decode()
    refused(Remote(place.remote.tcp, other, place.remote.key))


@pytest.mark.tier("all")
def test_other_mechanisms(place: Place) -> None:
    """Clients with the ZeroMQ mechanisms NULL and PLAIN get no answer on either port."""
    for endpoint in place.remote.place:
        for plain in (False, True):
            assert not answers(endpoint, plain)
    assert place.daemon.running


def answers(endpoint: str, plain: bool) -> bool:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.set(zmq.LINGER, 0)
        client.set(zmq.RCVTIMEO, round(SHORT_S * 1000))
        if plain:
            client.set(zmq.PLAIN_USERNAME, b"root")
            client.set(zmq.PLAIN_PASSWORD, b"root")
        client.connect(endpoint)
        client.send(request(PING))
        try:
            client.recv()
        except zmq.Again:
            return False
        return True


@pytest.mark.tier("all")
def test_bytes_that_are_no_zmtp(place: Place) -> None:
    host, port = place.remote.tcp.split(":")
    for noise in (b"GET / HTTP/1.0\r\n\r\n", bytes(100), os.urandom(1000), b"\xff" + bytes(9)):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(noise)
    with Client("demo", remote=place.remote) as timers:
        timers.add("key", delay=60)


@pytest.mark.tier("all")
def test_administration_is_not_on_tcp(place: Place) -> None:
    stop = wire.encode_frame(33)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.set(zmq.LINGER, 0)
        place.remote.equip(client)
        client.connect(place.remote.place.commands)
        client.send(stop)
        assert client.poll(round(PATIENCE_S * 1000))
        assert wire.decode_reply(client.recv()).error
    assert place.daemon.running


# ---- key files --------------------------------------------------------------------------------


def keygen(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "purgatoryd.cli", "keygen", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_keygen(tmp_path: Path) -> None:
    made = keygen(str(tmp_path / "key"))
    assert made.returncode == 0, made.stderr
    pair = curve.read_pair(tmp_path / "key")
    assert made.stdout == f"{pair.public.decode()}\n"
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert zmq.curve_public(pair.secret) == pair.public
    again = keygen(str(tmp_path / "key"))
    assert again.returncode != 0
    assert "exists" in again.stderr
    assert curve.read_pair(tmp_path / "key") == pair


@pytest.mark.tier("all")
def test_a_key_file_that_others_may_read_is_refused(place: Place, tmp_path: Path) -> None:
    place.daemon.stop()
    for name, mode in (("server", 0o640), ("server", 0o604), ("allowed", 0o662)):
        (tmp_path / name).chmod(mode)
        with pytest.raises(DaemonFailed, match="other users may"):
            place.daemon.start(*place.args)
        (tmp_path / name).chmod(0o600)
    place.daemon.start(*place.args)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("worker", "NAME KEY UID"),
        ("worker short 1", "is not a key"),
        (f"worker {'a' * 40} minus", "NAME KEY UID"),
        (f"worker {'~' * 40} 1", "is not a key"),
        (f"worker {'a' * 40} {2**32 - 1}", "NAME KEY UID"),
        (f"one {'a' * 40} 1\ntwo {'a' * 40} 2", "repeats a key"),
    ],
)
def test_an_invalid_list_of_keys_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "allowed").write_text(line + "\n")
    with pytest.raises(BadPath, match=re.escape(reason)):
        curve.read_allowed(tmp_path / "allowed")


@pytest.mark.parametrize("tcp", ["", "host", "host:0", "host:65535", "host:1:2", "a b:7", ":7"])
def test_invalid_places_are_refused(tcp: str) -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        curve.place(tcp)
    assert curve.place("[::1]:7000").notices == "tcp://[::1]:7001"


@pytest.mark.tier("all")
def test_settings_of_tcp_come_together(daemon: StartDaemon) -> None:
    with pytest.raises(DaemonFailed, match="together with the other two"):
        daemon("demo", "--tcp", "127.0.0.1:7000")


# ---- a subscriber without an arena --------------------------------------------------------------


def message(first: int, count: int, stream_id: int = 7, incarnation: int = 1) -> list[bytes]:
    """Return a message with `count` notices of topic t, numbered from `first`. If `count` is 0, the
    message is a heartbeat after sequence `first` - 1."""
    head = struct.pack(
        "<IHHQQQQqqII", 0x4E434750, 1, 0, stream_id, incarnation, first, first + count - 1, 0, 0,
        count, 0,
    )  # fmt: skip
    records = struct.pack("<QqqIBBBB8x", 1, 0, 0, 0, 1, 0, 1, 0) * count
    return [b"n\0t\0", head + records + b"k" * count]


@pytest.fixture
def stream() -> Stream:
    return Stream("n", None, lambda: None, HOST.boot_ns)


def drain(stream: Stream) -> list[int | tuple[int, int]]:
    """Return the sequences of notices, and lost ranges (first, last), in order of arrival."""
    found: list[int | tuple[int, int]] = []
    while True:
        try:
            notice = stream.pop()
        except Lagged as lost:
            found.append((lost.first_lost, lost.last_lost))
            continue
        if notice is None:
            return found
        found.append(notice.seq)


def test_a_stream_returns_notices_and_reports_losses(stream: Stream) -> None:
    stream.take(message(11, 2))  # the first notice of a topic starts its sequence
    assert drain(stream) == [11, 12]
    stream.take(message(12, 2))  # a repeated message
    assert drain(stream) == [13]
    stream.take(message(17, 1))
    assert drain(stream) == [(14, 16), 17]
    stream.take(message(18, 0))  # a heartbeat that shows no loss
    assert drain(stream) == []
    stream.take(message(200_018, 0))  # a heartbeat that shows a loss
    assert drain(stream) == [(18, 200_017)]
    stream.take(message(200_018, 1))
    assert drain(stream) == [200_018]


def test_a_message_of_another_number_of_frames_is_passed_over(stream: Stream) -> None:
    stream.take(message(1, 1)[:1])
    assert drain(stream) == []


def test_a_topic_that_a_heartbeat_announces(stream: Stream) -> None:
    stream.take(message(100_001, 0))
    assert drain(stream) == []
    stream.take(message(100_002, 1))
    assert drain(stream) == [(100_001, 100_001), 100_002]


class LostArena:
    """Stand-in for the reader of an arena with an empty replay buffer."""

    uuid, epoch = b"", 1

    def __init__(self, stream_id: int, newest: dict[str, tuple[int, int]]) -> None:
        self.stream_id, self.newest = stream_id, newest
        self.header = SimpleNamespace(
            clock_kind=ClockKind.BOOT, state=ArenaState.READY, stream_id=stream_id
        )

    def newest_sequences(self, _: str) -> dict[str, tuple[int, int]]:
        return self.newest

    def carried(self, _: str) -> dict[str, int]:
        return {}

    def replay(self, _: str, __: str, ___: int, last: int) -> tuple[int, list[bytes]]:
        return last, []

    def close(self) -> None:
        pass


@pytest.mark.parametrize("again", ["stream", "topic"])
def test_a_gap_of_an_earlier_numbering_hides_no_notice(again: str) -> None:
    arenas: list[Any] = [LostArena(7, {"t": (1, 0)})]
    stream = Stream("n", None, lambda: arenas[-1], HOST.boot_ns)
    arenas[0].newest = {"t": (1, 1)}
    stream.compare()  # notice 1 is missing
    if again == "stream":
        arenas[0].header.state = ArenaState.RETIRED
        arenas.append(LostArena(8, {}))
    else:
        arenas[0].newest = {"t": (2, 0)}
        stream.compare()
    assert drain(stream) == [(1, 0)]
    number = {"stream": (8, 1), "topic": (7, 2)}[again]
    stream.take(message(1, 1, *number))
    assert drain(stream) == [1]


@pytest.mark.parametrize("sent", [0, 3])
def test_a_loss_after_a_reported_loss_of_continuity_is_reported(sent: int) -> None:
    """Lagged reports that a new stream has begun. No further loss is reported for notices that this
    stream had sent by then."""
    arenas: list[Any] = [LostArena(7, {"t": (1, 0)})]
    stream = Stream("n", None, lambda: arenas[-1], HOST.boot_ns)
    arenas[0].header.state = ArenaState.RETIRED
    arenas.append(LostArena(8, {"t": (1, sent)} if sent else {}))
    stream.compare()
    assert drain(stream) == [(1, 0)]
    arenas[1].newest = {"t": (1, 5)}
    stream.compare()
    assert drain(stream) == [(sent + 1, 5)]


def test_another_stream_is_reported(stream: Stream) -> None:
    stream.take(message(5, 1))
    stream.take(message(1, 1, stream_id=8))
    assert drain(stream) == [5, (6, 0), 1]


def test_a_restarted_topic_is_reported(stream: Stream) -> None:
    stream.take(message(5, 1))
    stream.take(message(1, 1, incarnation=2))
    assert drain(stream) == [5, (6, 0), 1]


def test_a_reconnect_loses_no_place(stream: Stream) -> None:
    stream.take(message(5, 1))
    stream.reconnected()
    stream.take(message(8, 1))
    assert drain(stream) == [5, (6, 7), 8]


@pytest.mark.tier("all")
def test_a_removed_socket_takes_local_clients_again_without_a_key(place: Place) -> None:
    for path in (place.daemon.paths.cmd, place.daemon.paths.admin, place.daemon.paths.pub):
        path.unlink()
    eventually(place.daemon.paths.pub.is_socket)
    with Client("demo", timeout=5.0) as timers, Subscriber("demo") as notices:
        timers.add("near", delay=0.0)
        assert notices.get(timeout=PATIENCE_S) is not None
