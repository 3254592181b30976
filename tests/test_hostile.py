"""Hostile and broken clients with a real daemon, next to an honest client.

If the tests run as root, the attackers run under another uid. They are members of the daemon's
group, so they have all rights of a client.
"""

from __future__ import annotations

import os
import re
import select
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from attacker import ATTACKS, connect, frame, shake_hands
from machine import needs
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually
from tiers import sample

from purgatoryd.clients import Client, Subscriber
from purgatoryd.daemon.listeners.acl import SHUT_MAX, Listeners
from purgatoryd.daemon.listeners.admission_control import (
    CONNECTS_PER_S,
    PAUSE_NS,
    REFUSED_NS,
    SHED_BYTES,
    STEP,
    AdmissionControl,
)
from purgatoryd.daemon.listeners.sockets import WATCH_MAX_NS, WATCH_NS, Sockets
from purgatoryd.daemon.listeners.transport import Peer

pytestmark = pytest.mark.tier("test")

MIB = 2**20
ACL = "system.posix_acl_access"
BASE_MAX = 256 * MIB
"""Largest memory in bytes that a daemon may need in addition to its initial memory."""
NOBODY = 65534
PING = 5
CUT_OFF = {
    "endless-large": "a message without end",
    "endless-small": "a message without end",
    "many-parts": "more frames",
    "long-routing-id": "a longer name",
    "unread-answers": "the peer does not read",
    "subscription-flood": "too many subscriptions",
    "subscription-churn": "too many subscriptions",
    "published": "a message where only subscriptions belong",
}


def own_bytes(daemon: Daemon) -> int:
    """Return the memory of the daemon in bytes, without its arena."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.M)
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def attacked(daemon: Daemon, attack: str, uid: int = NOBODY) -> Iterator[subprocess.Popen[bytes]]:
    """Run an attacker while the block runs, and check that it attacks until the end."""
    daemon.dir.chmod(0o750)
    script = Path(__file__).parent / "support" / "attacker.py"
    as_other = [str(uid)] if os.geteuid() == 0 else []
    command = [sys.executable, str(script), attack, str(daemon.dir), daemon.name, *as_other]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        assert process.poll() is None
        process.terminate()
        said, _ = process.communicate(timeout=PATIENCE_S)
        blows = int(said.split()[-1])
        # the attackers in CUT_OFF only report that they were refused
        assert blows > 0 or attack in CUT_OFF
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def reported(attacker: subprocess.Popen[bytes]) -> bool:
    """Return whether the attacker has printed a line that the test has not read."""
    assert attacker.stdout is not None
    return bool(select.select([attacker.stdout], [], [], 0)[0])


class Honest:
    """A client and a subscriber that check that they get all of their results and nothing else."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.peak = 0
        self.base = own_bytes(daemon)
        self.rounds = 0
        self.client = Client(daemon.name, namespace="honest", timeout=PATIENCE_S)
        self.notices = Subscriber(daemon.name, namespace="honest")

    def work(self) -> None:
        """Run one round: add, query, cancel, and receive a notice."""
        self.rounds += 1
        key = f"key-{self.rounds}"
        self.client.add(key, delay=3600, payload=key.encode())
        found = self.client.get(key)
        assert found is not None
        assert found.payload == key.encode()
        assert self.client.cancel(key).name == "CANCELLED"
        self.client.add(key, delay=0, topic="done")
        notice = self.notices.get(timeout=PATIENCE_S)
        assert notice is not None
        assert notice.key == key
        self.peak = max(self.peak, own_bytes(self.daemon))

    def work_until(self, done: Callable[[], bool], at_least: int = 50) -> None:
        """Run at least `at_least` rounds, until `done` shows the effect of the attack."""
        end_s = time.monotonic() + PATIENCE_S
        while self.rounds < at_least or not done():
            self.work()
            assert time.monotonic() < end_s, self.daemon.stderr

    def close(self) -> None:
        self.client.close()
        self.notices.close()


@pytest.fixture
def honest(daemon: StartDaemon) -> Iterator[Honest]:
    one = Honest(daemon())
    yield one
    one.close()


@pytest.mark.parametrize(
    "attack", sample(ATTACKS, {"flood", "garbage", "many-connections", "many-parts"})
)
def test_nobody_else_is_harmed(honest: Honest, attack: str) -> None:
    reason = CUT_OFF.get(attack, "")
    with attacked(honest.daemon, attack) as attacker:
        honest.work_until(lambda: reason in honest.daemon.stderr if reason else reported(attacker))
    honest.work()
    assert honest.daemon.running
    assert honest.peak - honest.base < BASE_MAX


def test_memory_is_given_back(honest: Honest) -> None:
    with attacked(honest.daemon, "endless-large"):
        honest.work_until(lambda: "without end" in honest.daemon.stderr)
    honest.work_until(lambda: own_bytes(honest.daemon) - honest.base < SHED_BYTES // 3)


def test_a_refused_uid_gets_no_further_and_others_do(honest: Honest) -> None:
    needs("root", "two uids")
    needs("acl", "so that the kernel refuses")
    # the daemon refuses the attacker's uid once no other messages wait
    with attacked(honest.daemon, "endless-small"):
        honest.work_until(lambda: ACL in os.listxattr(honest.daemon.paths.cmd))
    assert ask_as(NOBODY, honest.daemon) == "refused by the kernel"
    assert ask_as(NOBODY - 1, honest.daemon) == "answered"
    assert ask_as(0, honest.daemon) == "answered"


def test_no_peer_can_pass_a_descriptor(honest: Honest) -> None:
    """A peer could pass a file whose close is slow, and the daemon would wait for this close."""
    needs("passrights")
    paths = honest.daemon.paths
    for path in (paths.cmd, paths.pub, paths.admin):
        with connect(path) as connection, pytest.raises(PermissionError):
            socket.send_fds(connection, [b"x"], [connection.fileno()])


def ask_as(uid: int, daemon: Daemon) -> str:
    """Ping the daemon as another uid.

    Returns "answered"; "refused" if no handshake succeeds; "refused by the kernel" if connect()
    fails.
    """
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent / "support")!r})
from pathlib import Path
from attacker import PING, frame, shake_hands
os.setgroups([])
os.setuid({uid})
try:
    connection = shake_hands(Path({str(daemon.paths.cmd)!r}))
    connection.sendall(frame(PING))
    print("answered" if connection.recv(100) else "refused")
except (ConnectionError, PermissionError) as error:
    print("refused", "by the kernel" * isinstance(error, PermissionError))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.fixture
def honest_with_few_descriptors(daemon_dir: Path, tmp_path: Path) -> Iterator[Honest]:
    """An honest client of a daemon with a limit of 4096 descriptors."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n 4096\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with closing(Daemon("demo", daemon_dir, python=str(python))) as one, closing(Honest(one)) as h:
        yield h


def test_connections_do_not_use_up_the_descriptors(honest_with_few_descriptors: Honest) -> None:
    """A uid gets an eighth of the descriptors. Without free descriptors, libzmq ends the
    process."""
    honest = honest_with_few_descriptors
    with attacked(honest.daemon, "half-handshakes") as attacker:
        assert attacker.stdout is not None
        assert b"held\n" in attacker.stdout  # the attacker has as many connections as it can get
        honest.work_until(lambda: descriptors(honest.daemon) < 4096 // 4)
    honest.work()


def descriptors(daemon: Daemon) -> int:
    """Return the number of open descriptors of the daemon."""
    return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))


def test_a_peer_that_was_refused_is_let_in_again() -> None:
    with zmq.Context() as context:
        admission = AdmissionControl(context)
        admission.iterate(1)
        assert admission.admits(NOBODY)
        admission._refuse(NOBODY)
        assert not admission.admits(NOBODY)
        admission.iterate(1 + REFUSED_NS)
        assert admission.admits(NOBODY)
        admission._refuse(NOBODY)
        admission.iterate(1 + 2 * REFUSED_NS)
        assert not admission.admits(NOBODY)  # the second refusal lasts twice as long
        admission.iterate(1 + 3 * REFUSED_NS)
        assert admission.admits(NOBODY)
        admission.close()


def test_the_page_states_how_often_a_peer_may_connect() -> None:
    page = Path(__file__).parents[1] / "docs" / "operations.md"
    assert f"; then {CONNECTS_PER_S} in a second |" in page.read_text()


def test_a_peer_that_connects_too_often_has_to_pause() -> None:
    with zmq.Context() as context:
        admission = AdmissionControl(context)
        admission.iterate(1)
        while admission.admits(NOBODY):
            pass
        admission.iterate(PAUSE_NS)
        assert admission.refuses(NOBODY)
        admission.iterate(1 + PAUSE_NS)
        assert not admission.refuses(NOBODY)
        assert [admission.admits(NOBODY) for _ in range(3 * CONNECTS_PER_S)].count(True) == (
            CONNECTS_PER_S / STEP
        )
        admission.close()


def test_a_connection_has_unread_bytes_until_they_are_read() -> None:
    ours, theirs = socket.socketpair()
    with zmq.Context() as context, ours, theirs:
        admission = AdmissionControl(context)
        admission._peers[ours.fileno()] = Peer(0, NOBODY, os.getpid())
        asked = {ours.fileno(), theirs.fileno()}
        theirs.send(b"x")
        ours.send(b"x")
        assert admission.unread(asked) == {ours.fileno()}, (
            "only connections of known peers are reported"
        )
        ours.recv(1)
        assert admission.unread(asked) == set()
        admission._peers.clear()
        admission.close()


def test_connections_get_as_much_time_as_passed_since_the_last_look() -> None:
    now_ns = 10**9

    def serve() -> bool:
        nonlocal now_ns
        now_ns += WATCH_NS // 4
        return True

    watched: Any = object.__new__(Sockets)
    watched._host = SimpleNamespace(boot_ns=lambda: now_ns)
    watched._zap = SimpleNamespace(serve=serve)
    watched.admission = SimpleNamespace(iterate=lambda now_ns: False, due_ns=0)
    watched._commands = watched.admin = SimpleNamespace(look=lambda: None)
    watched._ask_ns, watched._watched_ns, watched._watched = 0, now_ns, frozenset()
    for pause_ns, work_ns in (
        (0, WATCH_NS), (3 * WATCH_NS, 3 * WATCH_NS), (2 * WATCH_MAX_NS, WATCH_MAX_NS),
    ):  # fmt: skip
        now_ns += pause_ns
        begun_ns = now_ns
        assert watched.keep_watch(now_ns, frozenset())
        assert now_ns - begun_ns == work_ns


# ---- listeners -------------------------------------------------------------------------------


@pytest.fixture
def listener(daemon_dir: Path) -> Path:
    needs("acl")
    path = daemon_dir / "listener"
    path.touch()
    path.chmod(0o660)
    return path


def listed(path: Path) -> set[bytes]:
    """Return the entries of a path's access control list."""
    stored = os.getxattr(path, ACL)[4:]
    return {stored[at : at + 8] for at in range(0, len(stored), 8)}


def test_a_shut_listener_is_as_it_was_once_it_is_open(listener: Path) -> None:
    listeners = Listeners([listener])
    listeners.shut_to([NOBODY, 1])
    assert {struct.pack("<HHI", 2, 0, uid) for uid in (1, NOBODY)} < listed(listener)
    assert stat.S_IMODE(listener.stat().st_mode) == 0o660
    listeners.shut_to([])
    assert ACL not in os.listxattr(listener)
    assert stat.S_IMODE(listener.stat().st_mode) == 0o660


def test_access_lists_of_other_users_stay(listener: Path) -> None:
    Listeners([listener]).shut_to([7])  # stands for an access list that another user has set
    given = listed(listener)
    listeners = Listeners([listener])
    listeners.shut_to([NOBODY])
    listeners.shut_to([7, 8])
    assert {entry[4:] for entry in listed(listener) - given} == {struct.pack("<I", 8)}
    listeners.shut_to([])
    assert listed(listener) == given


def test_uids_beyond_the_access_list_are_refused_in_the_handshake(listener: Path) -> None:
    Listeners([listener]).shut_to(range(1000, 3000))
    assert len(listed(listener)) == SHUT_MAX + 4


def test_a_listener_that_is_gone_harms_nobody(listener: Path) -> None:
    listeners = Listeners([listener])
    listeners.shut_to([7])
    listener.unlink()
    listeners.shut_to([])
    listeners.shut_to([8])


# ---- admission control alone ---------------------------------------------------------------


class Controlled:
    """A socket with its admission control, in which no uid is trusted."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self.path = path
        self.admission = AdmissionControl(context)
        self.admission._trusted.clear()
        self._socket = context.socket(zmq.ROUTER)
        self.admission.watch(self._socket)
        self._socket.bind(f"ipc://{path}")

    def request(self, connection: socket.socket) -> zmq.Frame:
        """Return the body of a message that came through `connection`."""
        connection.sendall(frame(b"body"))
        self._socket.recv()
        return self._socket.recv(copy=False)

    def hears_of(self, connections: int) -> bool:
        """Handle all notifications; return whether exactly this number of connections is left."""
        return not self.admission.iterate(1) and self.admission._connections.total() == connections

    def close(self) -> None:
        self.admission.close()
        self._socket.close(0)


@pytest.fixture
def controlled(daemon_dir: Path) -> Iterator[Controlled]:
    with zmq.Context() as context, closing(Controlled(context, daemon_dir / "socket")) as one:
        yield one


def test_closed_connections_leave_nothing(controlled: Controlled) -> None:
    with shake_hands(controlled.path):
        eventually(lambda: controlled.hears_of(1))
        for _ in range(100):
            shake_hands(controlled.path).close()
        eventually(lambda: controlled.hears_of(1))
    eventually(lambda: controlled.hears_of(0))
    assert not controlled.admission._peers


def test_a_peer_that_offends_before_it_is_known_is_refused_and_ended(
    controlled: Controlled,
) -> None:
    with shake_hands(controlled.path) as connection:
        connection.settimeout(PATIENCE_S)
        controlled.admission.offence(controlled.request(connection), "a test")
        assert controlled.admission.refuses(os.geteuid())
        controlled.admission.iterate(1)
        with suppress(ConnectionResetError):
            while connection.recv(100):
                pass


def test_an_offence_is_not_put_down_to_the_peer_that_has_the_descriptor_now(
    controlled: Controlled,
) -> None:
    with shake_hands(controlled.path) as connection:
        eventually(lambda: controlled.hears_of(1))
        body = controlled.request(connection)
        (successor,) = controlled.admission._peers.values()
        successor.identity = NOBODY
        controlled.admission.offence(body, "a test")
        assert not successor.gone
        assert not controlled.admission.refuses(NOBODY)
        assert controlled.admission.refuses(os.geteuid())
