"""Sessions of clients that have died, and the limit of the session table, with a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machine import needs
from raw_wire import Raw
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    eventually,
    remove_arena_files,
    stats,
    wal_frames,
)

from purgatoryd.clients import (
    Admin,
    AllOf,
    AsyncClient,
    Client,
    InvalidArgument,
    Purgatory,
    Resume,
    SessionExpired,
    SessionTableFull,
    Status,
    Subscriber,
)
from purgatoryd.daemon import processes
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import WireError
from purgatoryd.shm_layout.wire import SessionInfo

pytestmark = pytest.mark.tier("all")

NEVER_S = 1e6
"""A timeout that no test reaches, because the daemon refuses at once."""

# ---- the session table -----------------------------------------------------------------------


def test_one_client_more_than_sessions_is_refused_at_once(daemon: StartDaemon) -> None:
    daemon("demo", "--sessions", "2")
    with Client("demo"), Client("demo") as second:
        with pytest.raises(SessionTableFull, match=r"2 of 2 sessions are open.*raise --sessions"):
            Client("demo", timeout=NEVER_S)
        second.close()
        with Client("demo") as third:
            third.add("k", 60.0)


def test_one_asyncio_client_more_than_sessions_is_refused_at_once(daemon: StartDaemon) -> None:
    daemon("demo", "--sessions", "1")

    async def refused() -> None:
        async with AsyncClient("demo"):
            with pytest.raises(SessionTableFull):
                async with AsyncClient("demo", timeout=NEVER_S):
                    pass

    asyncio.run(refused())


# ---- processes that end ----------------------------------------------------------------------

OWNS = """
import sys
from purgatoryd.clients import AllOf, Purgatory
p = Purgatory(sys.argv[1])
count = int(sys.argv[2])
p.watch_many((f"{sys.argv[3]}:{n}", AllOf({sys.argv[3]: 1}), 3600.0) for n in range(count))
print("ready", flush=True)
sys.stdin.read()
"""
"""Code of a client that watches argv[2] operations on the watch key argv[3]. It ends when stdin is
closed."""


def owner(count: int, key: str, *before: str) -> subprocess.Popen[str]:
    """Start the client OWNS under the command `before`, such as unshare. Return when the client
    owns its operations."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", OWNS, "demo", str(count), key],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def sessions_of(pid: int) -> list[SessionInfo]:
    with Admin("demo") as admin:
        return [info for info in admin.sessions() if info.pid == pid]


@pytest.mark.tier("test")
def test_killed_clients_free_their_sessions_at_once(daemon: StartDaemon) -> None:
    daemon("demo", "--sessions", "140")
    opens = (
        "import sys; from purgatoryd.clients import Client\n"
        "open = [Client('demo') for _ in range(35)]\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", opens], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for process in crowd:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    with pytest.raises(SessionTableFull):
        Client("demo", timeout=NEVER_S)
    for process in crowd:
        kill(process)
    with Client("demo") as client:
        client.add("k", 60.0)
    eventually(lambda: not any(sessions_of(process.pid) for process in crowd))


def test_outcomes_of_killed_owners_are_freed(daemon: StartDaemon) -> None:
    real = daemon("demo", "--capacity", "4000", "--watches", "8000")
    for key in "ab":
        process = owner(1900, key)
        with Purgatory("demo") as triggers:
            os.kill(process.pid, signal.SIGSTOP)
            assert triggers.advance(key, 1) == 1900
            assert stats(real)["outcomes"] == 1900
            kill(process)
            eventually(lambda: stats(real)["outcomes"] == 0)
    with Client("demo", namespace="other") as client:
        result = client.add_many([(str(n), 3600.0) for n in range(3900)])
        assert {*result.statuses} == {Status.ADDED}


@pytest.mark.tier("test")
def test_each_freed_outcome_has_a_record_in_the_wal(daemon: StartDaemon, daemon_dir: Path) -> None:
    wal = daemon_dir / "wal"
    real = daemon("demo", "--wal-dir", str(wal))
    process = owner(300, "t")

    def dropped() -> list[int]:
        ends = [frame.fields for frame in wal_frames(wal / "demo") if frame.kind == "end"]
        return [end["ticket"] for end in ends if end["cause"] == lib.PG_END_DROPPED]

    with Purgatory("demo") as triggers:
        os.kill(process.pid, signal.SIGSTOP)
        assert triggers.advance("t", 1) == 300
        assert stats(real)["outcomes"] == 300
    assert not dropped()
    kill(process)
    eventually(lambda: len(dropped()) >= 300)
    real.kill()
    assert len(dropped()) == len({*dropped()}) == 300
    remove_arena_files(real.paths)
    real.start()
    assert (stats(real)["outcomes"], stats(real)["operations"]) == (0, 0)


def test_operations_of_a_killed_owner_run_on(daemon: StartDaemon) -> None:
    real = daemon("demo")
    notices = Subscriber("demo", topics=["ends"])
    code = OWNS.replace("3600.0)", "3600.0, b'', 'ends')")
    process = subprocess.Popen(
        [sys.executable, "-c", code, "demo", "3", "t"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    kill(process)
    eventually(lambda: not sessions_of(process.pid))
    with notices, Purgatory("demo") as triggers:
        assert stats(real)["operations"] == 3
        assert triggers.advance("t", 1) == 3
        found = [notices.get(PATIENCE_S) for _ in range(3)]
    assert sorted(n.key for n in found if n is not None) == ["t:0", "t:1", "t:2"]
    assert stats(real)["outcomes"] == 0


def test_the_children_of_a_server_that_forks_have_sessions_of_their_own(
    daemon: StartDaemon,
) -> None:
    """A child inherits the parent's connection. So the connection stays open after the parent has
    ended."""
    daemon("demo")
    code = (
        "import os, sys\n"
        "from purgatoryd.clients import Client\n"
        "mine = Client('demo')\n"
        "read, write = os.pipe()\n"
        "if child := os.fork():\n"
        "    os.read(read, 1)\n"
        "    print(child, flush=True)\n"
        "    sys.stdin.read()\n"
        "else:\n"
        "    own = Client('demo')\n"
        "    os.write(write, b'1')\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert [len(sessions_of(pid)) for pid in (parent.pid, child)] == [1, 1]
        parent.kill()
        parent.wait()
        eventually(lambda: not sessions_of(parent.pid))
        assert len(sessions_of(child)) == 1
    finally:
        os.kill(child, signal.SIGKILL)
    eventually(lambda: not sessions_of(child))


PREFORKS = """
import os, signal, sys
from purgatoryd.clients import AllOf, Purgatory

def watch(p, count, key):
    p.watch_many((f"{key}:{n}", AllOf({key: 1}), 3600.0) for n in range(count))

def child(key):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        own = Purgatory("demo")
        watch(own, 20, key)
        os.write(write, b"1")
        signal.pause()
    os.read(read, 1)
    return pid

mine = Purgatory("demo")
watch(mine, 7, "parent")
for line in sys.stdin:
    print(child(line.strip()), flush=True)
"""
"""Code of a server that owns seven operations. For each line of stdin it forks a child that owns
twenty."""


def test_a_pre_forked_server_replaces_killed_children(daemon: StartDaemon) -> None:
    real = daemon("demo")
    parent = subprocess.Popen(
        [sys.executable, "-c", PREFORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def fork(key: str) -> int:
        assert parent.stdin is not None
        assert parent.stdout is not None
        print(key, file=parent.stdin, flush=True)
        return int(parent.stdout.readline())

    def owned(*pids: int) -> list[list[int]]:
        return [[info.operations for info in sessions_of(pid)] for pid in pids]

    children = [fork(f"c{n}") for n in range(3)]
    try:
        for number in range(3):
            before = {info.pid: info.session for info in [*sessions_of(parent.pid)]}
            killed, children[number] = children[number], fork(f"r{number}")
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: not sessions_of(killed))  # noqa: B023
            assert owned(parent.pid, *children) == [[7], [20], [20], [20]]
            assert {info.pid: info.session for info in sessions_of(parent.pid)} == before
        with Purgatory("demo") as triggers:
            assert [triggers.advance(key, 1) for key in ("c0", "c1", "c2")] == [20] * 3
            eventually(lambda: stats(real)["outcomes"] == 0)  # the owners have died
            assert triggers.advance("parent", 1) == 7
        eventually(lambda: stats(real)["outcomes"] == 0)  # the parent has acknowledged its outcomes
        assert owned(*children) == [[20]] * 3
    finally:
        for pid in children:  # the children keep the parent's stdout open
            os.kill(pid, signal.SIGKILL)
        kill(parent)
    eventually(lambda: not any(map(sessions_of, (parent.pid, *children))))


def test_a_client_dropped_without_close_keeps_no_session(daemon: StartDaemon) -> None:
    daemon("demo", "--session-grace", "100ms")
    left = Client("demo")
    assert len(sessions_of(os.getpid())) == 1
    del left
    gc.collect()
    eventually(lambda: not sessions_of(os.getpid()))


def test_a_silent_client_with_a_connection_keeps_its_session(daemon: StartDaemon) -> None:
    daemon("demo", "--session-grace", "100ms")
    with Client("demo") as silent, Client("demo", namespace="other") as other:
        before = sessions_of(os.getpid())
        for _ in range(5):
            time.sleep(0.2)
            other.add("k", 60.0, mode="replace")
        assert [i.session for i in sessions_of(os.getpid())] == [i.session for i in before]
        silent.add("k", 60.0)


# ---- processes that the kernel does not report -----------------------------------------------


def test_the_connection_of_a_client_in_a_sibling_container_decides(daemon_dir: Path) -> None:
    """The daemon and the client are in sibling pid namespaces, so the kernel reports pid 0 for the
    client."""
    needs("pidns")
    inside = ("unshare", "--pid", "--fork", "--kill-child")
    python = daemon_dir / "python"
    python.write_text(f'#!/bin/sh\nexec {" ".join(inside)} {sys.executable} "$@"\n')
    python.chmod(0o755)
    real = Daemon("demo", daemon_dir, ("--session-grace", "100ms"), python=str(python))
    process = owner(10, "t", *inside)
    (session,) = sessions_of(0)
    assert session.operations == 10
    kill(process)
    eventually(lambda: not sessions_of(0))
    assert stats(real)["operations"] == 10
    with Admin("demo") as admin:
        admin.stop()
    real.process.wait(PATIENCE_S)


REUSES = """
import os, subprocess, sys, time
from purgatoryd.clients import Admin

def start(*command):
    process = subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().startswith("ready")
    return process

def next_pid(pid):
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(pid - 1))

def owned(admin):
    return sorted(info.operations for info in admin.sessions() if info.pid == pid)

run = ("-m", "purgatoryd.cli", "run", "--session-grace", "100ms", "--name", "demo")
daemon = start(*run)
client = ("-c", sys.argv[1], "demo")
first = start(*client, "3", "a")
pid = first.pid
admin = Admin("demo")
assert owned(admin) == [3]
first.kill()
first.wait()
next_pid(pid)
second = start(*client, "5", "b")
assert second.pid == pid, (second.pid, pid)
while owned(admin) != [5]:
    time.sleep(0.01)
print("reused", flush=True)

second.kill()
daemon.kill()
second.wait()
daemon.wait()
next_pid(pid)
other = subprocess.Popen(["sleep", "1000"])
assert other.pid == pid, (other.pid, pid)
daemon = start(*run)
while owned(admin):
    time.sleep(0.01)
print("restarted", flush=True)
other.kill()
admin.stop()
daemon.wait()
"""
"""Code of pid 1 of a pid namespace. It loops forever if the session of a dead client stays."""


def test_a_reused_pid_keeps_no_session_of_a_dead_client(
    daemon_dir: Path,
) -> None:
    needs("pidns")
    environment = os.environ | {"PURGATORYD_DIR": str(daemon_dir)}
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child",
         sys.executable, "-c", REUSES, OWNS],
        env=environment, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["reused", "restarted"], done.stderr


# ---- kernels without SO_PEERPIDFD ------------------------------------------------------------


@pytest.fixture
def without_peer_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PEER_PIDFD", 0xFFFF)


@pytest.mark.usefixtures("without_peer_pidfd")
def test_an_older_kernel_opens_the_process_while_the_connection_is_open() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pidfd = processes.open_pidfd(ours.fileno(), os.getpid())
        assert pidfd is not None
        signal.pidfd_send_signal(pidfd, 0)
        os.close(pidfd)


@pytest.mark.usefixtures("without_peer_pidfd")
def test_an_older_kernel_does_not_take_a_later_process_for_the_client() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        assert processes.open_pidfd(ours.fileno(), os.getpid()) is None


@pytest.mark.tier("check")
def test_a_connection_that_cannot_be_polled_is_not_the_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(timeout_ms: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    connection = SimpleNamespace(register=lambda *_: None, poll=fail)
    monkeypatch.setattr(processes, "select", SimpleNamespace(poll=lambda: connection))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not processes._is_peer(ours, os.getpid())


# ---- messages that outlive their connection --------------------------------------------------


def test_a_connection_of_another_process_is_not_the_clients() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert processes.open_pidfd(ours.fileno(), os.getppid()) is None


def test_the_process_behind_a_closed_descriptor_cannot_be_watched() -> None:
    ours, theirs = socket.socketpair()
    descriptor = ours.fileno()
    ours.close()
    theirs.close()
    assert processes.open_pidfd(descriptor, os.getpid()) is None


@pytest.mark.parametrize("waited_for", [True, False])
def test_the_process_behind_a_closed_descriptor_may_have_ended(waited_for: bool) -> None:
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | (0 if waited_for else os.WNOWAIT))
    ours, theirs = socket.socketpair()
    descriptor = ours.fileno()
    ours.close()
    theirs.close()
    with pytest.raises(ProcessLookupError):
        processes.open_pidfd(descriptor, ended.pid)


# ---- sessions that outlive their process -----------------------------------------------------

GREETS = """
import sys
sys.path.append(sys.argv[1])
import raw_wire as raw
from pathlib import Path
from typing import Any
from purgatoryd.shm_layout import wire
client = raw.Raw(Path(sys.argv[2]))
nonce, grace_s = bytes.fromhex(sys.argv[3]), int(sys.argv[4])
print(client.ask(wire.encode_hello(nonce, grace_ns=grace_s * 10**9)).session, flush=True)
sys.stdin.read()
"""
"""Code that opens a session with the nonce argv[3] and prints the id of the session. The session
outlives the process by argv[4] seconds."""


def greet(real: Daemon, nonce: bytes, grace_s: int) -> tuple[subprocess.Popen[str], int]:
    support = str(Path(__file__).parent / "support")
    process = subprocess.Popen(
        [sys.executable, "-c", GREETS, support, str(real.paths.cmd), nonce.hex(), str(grace_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_session_with_a_grace_outlives_its_process(daemon: StartDaemon) -> None:
    real = daemon("demo", "--session-grace", "100ms")
    first, session = greet(real, b"1" * 16, 3600)
    plain, _ = greet(real, b"2" * 16, 0)
    kill(first)
    kill(plain)
    eventually(lambda: not sessions_of(plain.pid))
    assert [info.session for info in sessions_of(first.pid)] == [session]
    second, found = greet(real, b"1" * 16, 0)
    assert found == session
    assert [info.session for info in sessions_of(second.pid)] == [session]
    kill(second)
    eventually(lambda: not sessions_of(second.pid))


# ---- the commands ----------------------------------------------------------------------------


def test_a_session_is_listed_and_dropped(daemon: StartDaemon) -> None:
    daemon("demo")
    process = owner(3, "t")

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "purgatoryd.cli", "session", *arguments, "--name", "demo"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    shown = json.loads(command("ls", "--json").stdout)
    assert (shown["pid"], shown["uid"], shown["operations"]) == (process.pid, os.getuid(), 3)
    assert shown["session"] in command("ls").stdout
    assert command("drop", shown["session"]).returncode == 0
    assert command("ls", "--json").stdout == ""
    again = command("drop", shown["session"])
    assert (again.returncode, again.stdout) == (1, f"unknown {shown['session']}\n")
    assert command("drop", "no-id").returncode == 2
    kill(process)


def test_a_member_sees_only_sessions_of_its_own_uid(daemon: StartDaemon) -> None:
    needs("root")
    real = daemon("demo")
    real.dir.chmod(0o755)
    real.paths.admin.chmod(0o666)
    asks = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "import raw_wire as raw\n"
        "from pathlib import Path\n"
        "from purgatoryd.shm_layout import wire\n"
        "from purgatoryd.shm_layout.layout import Message\n"
        "import os; os.setgroups([]); os.setuid(61001)\n"
        "admin = raw.Raw(Path(sys.argv[2]))\n"
        "print(len(admin.ask(wire.encode_frame(Message.SESSIONS, 0)).body))\n"
        "print(admin.ask(wire.encode_frame(Message.DROP, int(sys.argv[3]))).error)\n"
    )
    with Client("demo"):
        (mine,) = sessions_of(os.getpid())
        support = str(Path(__file__).parent / "support")
        done = subprocess.run(
            [sys.executable, "-c", asks, support, str(real.paths.admin), str(mine.session)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout.split() == ["0", str(int(WireError.DENIED))], done.stderr
        assert sessions_of(os.getpid()) == [mine._replace(used_boot_ns=mine.used_boot_ns)]


# ---- owners that resume ----------------------------------------------------------------------

RESUMES = """
import os, sys
from purgatoryd.clients import AllOf, Purgatory, Resume

def say(*words):  # whole lines: several threads do
    os.write(1, " ".join(words).encode() + b"\\n")

resume = Resume("worker-1", 3600.0, lambda key, outcome: say(key, outcome.cause))
p = Purgatory("demo", timeout=30.0, resume=resume)
key = sys.argv[1]
op = p.watch(key, AllOf({"t": 1}), 3600.0)
op.add_done_callback(lambda op: say("own", op.key, op.result().cause))
say("ready")
sys.stdin.read()
"""
"""Code of an owner that watches the operation argv[1] and prints each outcome that it receives."""


def resumed(key: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RESUMES, key],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.tier("test")
def test_a_later_process_gets_the_outcomes_of_an_owner_that_was_killed(
    daemon: StartDaemon,
) -> None:
    real = daemon("demo", "--session-grace", "100ms")
    first = resumed("first")
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    kill(first)
    with Purgatory("demo") as triggers:
        assert triggers.advance("t", 1) == 1
        assert triggers.forget("t")
        assert stats(real)["outcomes"] == 1
        process = resumed("second")
        assert process.stdout is not None
        lines = {process.stdout.readline() for _ in range(2)}
        assert lines == {"first satisfied\n", "ready\n"}, (
            "the callback may run before or after 'ready'"
        )
        eventually(lambda: stats(real)["outcomes"] == 0)
        assert triggers.advance("t", 1) == 1
        assert process.stdout.readline() == "own second satisfied\n"
    process.stdin.close()  # type: ignore[union-attr]
    assert process.stdout.read() == ""
    process.wait()


@pytest.mark.tier("test")
@pytest.mark.parametrize("fails", [False, True])
def test_a_process_learns_that_the_session_which_it_resumed_is_lost(
    fails: bool, daemon: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """The lost-session callback runs once, in the purgatory's thread. It may raise an exception."""
    real, lost = daemon("demo"), list[SessionExpired]()

    def on_lost(error: SessionExpired) -> None:
        lost.append(error)
        if fails:
            raise ValueError(error)

    resume = Resume("worker-1", 60.0, lambda key, outcome: None, on_lost)
    with Purgatory("demo", timeout=PATIENCE_S, resume=resume) as owner, Admin("demo") as admin:
        for count in (1, 2):
            owner.watch(f"op{count}", AllOf({"t": 1}), 60.0)
            assert len(lost) == count - 1
            for session in sessions_of(os.getpid()):
                admin.drop_session(session.session)
            owner.advance("t2", count)
            eventually(lambda: lost)
    assert len(lost) == 1
    assert real.process.poll() is None
    assert ("callback of a lost session failed" in caplog.text) == fails


@pytest.mark.tier("check")
@pytest.mark.parametrize(
    "arguments", [("", 1.0), ("x" * 64, 1.0), (7, 1.0), ("a", 0), ("a", 86_401), ("a", "1")]
)
def test_a_resume_with_bad_arguments_is_refused(arguments: tuple[Any, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Resume(*arguments, lambda key, outcome: None)
    with pytest.raises(InvalidArgument):
        Resume("a", 1.0, "no function")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        Resume("a", 1.0, lambda key, outcome: None, "no function")  # type: ignore[arg-type]


def test_idle_processes_do_not_use_up_the_descriptors(daemon_dir: Path, tmp_path: Path) -> None:
    """Each process opens a session, closes its connection, and continues to run."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n 96\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    children: list[int] = []
    with contextlib.closing(Daemon("demo", daemon_dir, python=str(python))) as real:
        try:
            children.extend(_idle_client(real) for _ in range(80))
            with Client("demo", timeout=PATIENCE_S) as client:
                client.add("k", 60.0)
            assert len(os.listdir(f"/proc/{real.pid}/fd")) < 80
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _idle_client(real: Daemon) -> int:
    """Start a process that has a session and no connection; return its pid."""
    read_fd, write_fd = os.pipe()
    if (child := os.fork()) == 0:
        with suppress(BaseException), Raw(real.paths.cmd) as raw:
            raw.hello()
        os.write(write_fd, b"ready")
        signal.pause()
        os._exit(0)
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        assert pipe.read(5) == b"ready"
    return child
