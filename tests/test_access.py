"""Access control with a real daemon: files, sockets, uids, owners, quotas, hijacked paths."""

from __future__ import annotations

import fcntl
import grp
import itertools
import os
import pwd
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import raw_wire as raw
import zmq
from click.testing import CliRunner
from machine import needs
from other_user import run_as
from raw_wire import Raw
from real_daemon import PATIENCE_S, Daemon, DaemonFailed, StartDaemon, clean_environment

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import ANYBODY, Admin, Client, Purgatory, Subscriber
from purgatoryd.clients.conditions import AllOf
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.shm_layout import paths as path_module
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import (
    BadPath,
    Denied,
    InvalidSetting,
    MessageRefused,
    NoWal,
    QuotaExceeded,
)
from purgatoryd.shm_layout.layout import EVENTS_NAMESPACE, Message, Status, WireError
from purgatoryd.shm_layout.paths import daemon_paths

pytestmark = pytest.mark.tier("all")

ALICE, BOB = 61001, 61002  # uids without an entry in any user database
SHM = Path("/dev/shm")


@pytest.fixture
def shared_dir(daemon_dir: Path) -> Path:
    """The daemon's directory with mode 0711: every user can open a file whose name is known."""
    daemon_dir.chmod(0o711)
    return daemon_dir


def group_of(real: Daemon) -> int:
    return real.paths.cmd.stat().st_gid


def as_member(real: Daemon, uid: int, work: Callable[[], object]) -> object:
    """Run `work` as a user with the daemon's group as a supplementary group."""
    return run_as(uid, work, groups=[group_of(real)])


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def may_open(path: Path, flags: int) -> bool:
    try:
        os.close(os.open(path, flags))
    except PermissionError:
        return False
    return True


# ---- files -----------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_file_modes_of_a_daemon(daemon: StartDaemon) -> None:
    real = daemon()
    paths = real.paths
    assert mode_of(SHM / paths.arena[1:]) == 0o640
    assert mode_of(SHM / paths.private[1:]) == 0o600
    assert [mode_of(p) for p in (paths.cmd, paths.pub, paths.admin)] == [0o660] * 3
    assert mode_of(paths.lock) == 0o600


def test_the_directory_of_the_host_is_for_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_module, "HOST_DIRECTORY", tmp_path / "run")
    before = os.umask(0)
    try:
        assert mode_of(daemon_paths("demo", {}).directory) == 0o750
    finally:
        os.umask(before)


def test_only_the_group_may_open_the_arena_files(shared_dir: Path, daemon: StartDaemon) -> None:
    real = daemon()
    files = [SHM / real.paths.arena[1:], SHM / real.paths.private[1:]]

    def opened() -> list[bool]:
        return [may_open(file, flags) for file in files for flags in (os.O_RDONLY, os.O_RDWR)]

    assert as_member(real, ALICE, opened) == [True, False, False, False]
    assert run_as(BOB, opened) == [False] * 4


def test_a_member_cannot_access_the_process(daemon: StartDaemon) -> None:
    real = daemon()
    process = Path(f"/proc/{real.pid}")

    def opened() -> list[bool]:
        readable = [may_open(process / name, os.O_RDONLY) for name in ("mem", "environ", "maps")]
        return [*readable, os.access(process / "fd", os.R_OK | os.X_OK)]

    assert as_member(real, ALICE, opened) == [False] * 4


def test_a_lock_on_the_arena_blocks_nobody(daemon: StartDaemon) -> None:
    """The kernel lets every user who may read a file lock it."""
    real = daemon()
    with Client("demo") as client:
        client.add("k", delay=3600)
    with (SHM / real.paths.arena[1:]).open("rb") as arena:
        fcntl.flock(arena, fcntl.LOCK_EX)
        real.restart()
        with Client("demo") as client:
            assert client.get("k") is not None


def test_a_member_of_the_group_reads_and_a_stranger_does_not(
    shared_dir: Path, daemon: StartDaemon
) -> None:
    real = daemon()
    with Client("demo") as client:
        client.add("k", delay=3600, payload=b"for the whole group")

    def read() -> bool:
        reader = Reader.attach(real.paths)
        return b"for the whole group" in b"".join(bytes(page) for page in reader.scan())

    def connect() -> bool:
        with socket.socket(socket.AF_UNIX) as s:
            return s.connect_ex(str(real.paths.cmd)) == 0

    assert as_member(real, ALICE, read)
    assert as_member(real, ALICE, connect)
    assert not run_as(BOB, connect)


def test_a_stranger_gets_permission_denied_for_the_arena(
    shared_dir: Path, daemon: StartDaemon
) -> None:
    daemon("demo")

    def ask(command: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [command, "--name", "demo"])
        return done.exit_code, done.stderr

    for command in ("status", "stats", "metrics", "placement"):
        assert ask(command)[0] == Exit.DONE
        code, said = run_as(BOB, partial(ask, command))
        assert code == Exit.REFUSED, said
        assert "cannot be read by this user" in said


def test_a_stranger_learns_which_socket_is_shut(shared_dir: Path, daemon: StartDaemon) -> None:
    real = daemon("demo")

    def add() -> tuple[int, str]:
        arguments = ["add", "k", "--delay", "1s", "--timeout", "100ms", "--name", "demo"]
        done = CliRunner().invoke(app, arguments)
        return done.exit_code, done.stderr

    def refused_by(path: Path) -> bool:
        code, said = run_as(BOB, add)
        return code == Exit.NO_DAEMON and f"; {path} cannot be opened by this user" in said

    assert add()[0] == Exit.DONE
    assert refused_by(real.paths.cmd)
    shared_dir.chmod(0o700)
    assert refused_by(shared_dir)


def test_a_stranger_gets_permission_denied_for_a_wal(shared_dir: Path, daemon: StartDaemon) -> None:
    wals = shared_dir / "wal"
    daemon("demo", "--wal-dir", str(wals))
    wals.chmod(0o755)

    def verify(wal: Path) -> tuple[int, str]:
        arguments = ["wal", "verify", "--wal-dir", str(wal), "--name", "demo"]
        done = CliRunner().invoke(app, arguments)
        return done.exit_code, done.stderr

    assert verify(wals)[0] == Exit.DONE
    code, said = run_as(BOB, partial(verify, wals))
    assert (code, said) == (Exit.UNUSABLE, f"purgatoryd: {wals / 'demo'}: Permission denied\n")


# ---- uids that may connect --------------------------------------------------------------------


def add_one() -> str:
    """Add a timer; return its status, or the reason why the daemon refused the connection."""
    try:
        with Client("demo", timeout=PATIENCE_S) as client:
            return client.add("k", delay=3600, mode="replace").status.name
    except MessageRefused as error:
        return f"{error.name} {error.detail[0]}"


def hears_a_notice() -> bool:
    """Return whether a subscription is accepted."""
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        monitor = subscriber.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        )
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.connect(path_module.client_paths("demo").pub_endpoint)
        assert monitor.poll(round(PATIENCE_S * 1000))
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        subscriber.disable_monitor()
        monitor.close(0)
        return event == zmq.Event.HANDSHAKE_SUCCEEDED


@pytest.mark.tier("test")
def test_only_allowed_uids_may_connect(shared_dir: Path, daemon: StartDaemon) -> None:
    real = daemon("demo", "--allow-uid", str(ALICE), "--allow-uid", "61009")
    assert as_member(real, ALICE, add_one) == "ADDED"
    assert as_member(real, ALICE, hears_a_notice)
    assert as_member(real, BOB, add_one) == f"DENIED {BOB}"
    assert not as_member(real, BOB, hears_a_notice)
    assert add_one() == "REPLACED"  # root and the daemon's uid may always connect
    real.restart("--allow-uid", str(BOB))
    assert as_member(real, ALICE, add_one) == f"DENIED {ALICE}"
    real.restart("--budget", "4096")
    assert as_member(real, ALICE, add_one) == "REPLACED"


def test_every_message_of_a_stranger_is_denied(shared_dir: Path, daemon: StartDaemon) -> None:
    real = daemon("demo", "--allow-uid", str(ALICE))

    def errors() -> list[int]:
        messages = [raw.frame(kind) for kind in (raw.HELLO, raw.BATCH, 5, 7, 99)]
        with Raw(real.paths.cmd) as client:
            return [client.ask(m).error for m in (*messages, b"", b"x", bytes(64), bytes(4096))]

    assert as_member(real, BOB, errors) == [WireError.DENIED] * 9
    assert WireError.DENIED not in as_member(real, ALICE, errors)  # type: ignore[operator]


def test_a_group_is_allowed_by_the_gid_from_the_kernel(
    shared_dir: Path, daemon: StartDaemon
) -> None:
    real = daemon("demo", "--allow-gid", "62000")
    group = [group_of(real)]
    assert run_as(ALICE, add_one, gid=62000, groups=group) == "ADDED"
    assert run_as(ALICE, hears_a_notice, gid=62000, groups=group)
    assert run_as(BOB, add_one, gid=62001, groups=group) == f"DENIED {BOB}"
    assert not run_as(BOB, hears_a_notice, gid=62001, groups=group)


def test_a_group_is_allowed_by_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    users = {"alice": 71, "bob": 72}

    def user(name: str) -> SimpleNamespace:
        return SimpleNamespace(pw_uid=users[name])

    monkeypatch.setattr(pwd, "getpwnam", user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_mem=["alice", "gone"]))
    access = Access.of(Config("demo", allow_gids=(5,), allow_uids=(73,), admin_uids=(74,)))
    allowed = [uid for uid in range(70, 76) if access.may_connect(uid, 6)]
    assert allowed == [71, 73, 74]
    assert access.may_connect(75, 5)
    assert [uid for uid in range(70, 76) if access.may_administer(uid)] == [74]
    assert access.may_administer(0)
    assert access.may_administer(os.geteuid())
    assert Access.of(Config("demo")).may_connect(75, 75)


# ---- administration -----------------------------------------------------------------------------


def admin_calls() -> list[str]:
    calls: list[Callable[[Admin], object]] = [
        lambda admin: admin.ping(),
        lambda admin: admin.set_namespace("shop", quota_timers=1),
        lambda admin: admin.advance(10**9),
        lambda admin: admin.stop(),
    ]
    found = []
    with Admin("demo", timeout=PATIENCE_S) as admin:
        for call in calls:
            try:
                call(admin)
                found.append("done")
            except MessageRefused as error:
                found.append(error.name)
    return found


@pytest.mark.tier("test")
def test_administration_is_for_admins(shared_dir: Path, daemon: StartDaemon) -> None:
    real = daemon("demo", "--clock", "virtual", "--admin-uid", str(BOB))
    assert as_member(real, ALICE, admin_calls) == ["DENIED"] * 4
    with Admin("demo") as admin:
        admin.ping()
        spaces = Reader.attach(real.paths).namespaces().values()
        assert [space.name for space in spaces] == [EVENTS_NAMESPACE]
    assert as_member(real, BOB, admin_calls) == ["done"] * 4
    assert real.process.wait(PATIENCE_S) == 0


def test_a_stop_by_a_member_who_is_no_admin_names_the_uid(
    shared_dir: Path, daemon: StartDaemon
) -> None:
    real = daemon("demo")

    def stop(name: str = "demo") -> tuple[int, str]:
        done = CliRunner().invoke(app, ["stop", "--name", name])
        return done.exit_code, done.output

    assert stop("other")[0] == Exit.NO_DAEMON
    message = f"purgatoryd: uid {ALICE} may not do that: the daemon refused the message\n"
    assert as_member(real, ALICE, stop) == (Exit.REFUSED, message)
    with Admin("demo") as admin:
        admin.ping()


def test_an_export_is_for_the_daemons_own_uid(shared_dir: Path, daemon: StartDaemon) -> None:
    real = daemon("demo", "--admin-uid", str(BOB))
    bobs = shared_dir / "bobs"
    bobs.mkdir()

    def stop(folder: Path) -> tuple[int, str]:
        arguments = ["stop", "--name", "demo", "--export", str(folder / "demo.export")]
        done = CliRunner().invoke(app, arguments)
        return done.exit_code, done.output

    code, said = stop(shared_dir / "nowhere")
    assert (code, "cannot be written" in said) == (Exit.UNUSABLE, True)
    bobs.chmod(0o777)
    code, said = run_as(BOB, lambda: stop(bobs), groups=[group_of(real)])
    assert code == Exit.UNUSABLE
    assert f"{real.paths.lock}: cannot be opened: Permission denied" in said
    with Admin("demo") as admin:
        admin.ping()
    assert not list(bobs.iterdir())


def test_settings_of_a_namespace_through_the_daemon(daemon: StartDaemon) -> None:
    real = daemon()
    with Admin("demo") as admin:
        settings = admin.set_namespace("shop", owner_uid=ALICE, quota_bytes=4096)
        assert settings == wire.NamespaceSettings(ALICE, 0, 0, 4096, 0)
        bad: list[dict[str, Any]] = [
            {"durability": 2}, {"owner_uid": -1}, {"quota_ops": 10**9 + 1}, {"paused": 2},
            {"late_per_s": 10**9 + 1},
        ]  # fmt: skip
        for changes in bad:
            with pytest.raises(InvalidSetting, match="from 0 to"):
                admin.set_namespace("shop", **changes)
        real.kill()
        real.start()
        assert admin.set_namespace("shop", quota_ops=3) == settings._replace(quota_ops=3)
        with pytest.raises(NoWal, match="--wal-dir"):
            admin.set_namespace("shop", durability=1)
        assert admin.set_namespace("shop", durability=0) == settings._replace(quota_ops=3)
        assert admin.set_namespace("shop", owner_uid=ANYBODY).owner_uid == ANYBODY


def test_bytes_that_are_no_settings_are_refused(daemon: StartDaemon) -> None:
    real = daemon()
    with Raw(real.paths.admin) as admin:
        for body in (b"", bytes(63), bytes(64), bytes(10_000)):
            reply = admin.ask(raw.frame(Message.NAMESPACE) + body)
            assert (reply.error, reply.body) == (WireError.MALFORMED, b"")
        assert admin.ask(raw.frame(Message.PING) + b"x").error == WireError.MALFORMED
        assert admin.ask(b"short").error == WireError.MALFORMED
        assert admin.ask(raw.frame(Message.PING)).error == 0


# ---- owners and quotas through the clients -------------------------------------------------------


@pytest.mark.tier("test")
def test_an_owned_namespace_is_denied_to_others(shared_dir: Path, daemon: StartDaemon) -> None:
    real = daemon()
    with Admin("demo") as admin:
        admin.set_namespace("shop", owner_uid=ALICE)

    def use() -> list[str]:
        with Client("demo", namespace="shop") as client:
            return [client.add("k", delay=3600).status.name, str(client.get("k") is not None)]

    assert as_member(real, ALICE, use) == ["ADDED", "True"]
    with Client("demo", namespace="shop") as client:
        calls: list[Callable[[], object]] = [
            lambda: client.add("k", delay=1, mode="replace"),
            lambda: client.cancel("k"),
            lambda: client.get("k"),
            lambda: client.cancel_many(["never was", "k"]),
        ]
        for call in calls:
            with pytest.raises(Denied, match="denied"):
                call()
    with Purgatory("demo", namespace="shop") as purgatory:
        with pytest.raises(Denied):
            purgatory.advance("w", 1)
        with pytest.raises(Denied):
            purgatory.watch("o", AllOf({"w": 1}), timeout=1).result()
    with Client("demo", namespace="other") as client:
        client.add("k", delay=3600)
    reader = Reader.attach(real.paths)
    assert reader.stats()["live"] == 2
    assert reader.stats()["refused_denied"] == 7


def test_a_session_is_of_no_use_to_another_uid(shared_dir: Path, daemon: StartDaemon) -> None:
    real = daemon()
    nonce = os.urandom(16)

    def takeover(session: int) -> list[int]:
        with Raw(real.paths.cmd) as thief:
            stolen = thief.hello(nonce)
            kinds = (Message.BYE, Message.PING, Message.ACK)
            found = [thief.ask(raw.frame(kind, session)).error for kind in kinds]
            batch = raw.batch(session, 1, [raw.put(b"thief's")])
            query = raw.batch(session, 1, [(raw.record(3, 1), b"k")], message=raw.QUERY)
            taken = int(stolen.session == session)
            return [taken, *found, thief.ask(batch).error, thief.ask(query).error]

    with Raw(real.paths.cmd) as owner:
        session = owner.hello(nonce).session
        denied = int(WireError.DENIED)
        assert as_member(real, ALICE, lambda: takeover(session)) == [0] + [denied] * 5
        assert owner.batch(raw.put(b"k")).statuses == [1]


def test_operations_per_second_of_every_uid(daemon: StartDaemon) -> None:
    real = daemon("demo", "--quota-ops", "3")
    with Raw(real.paths.cmd) as client:
        client.hello()
        answer = client.batch(*(raw.put(b"%d" % i) for i in range(5)))
    assert answer.statuses == [Status.ADDED] * 3 + [Status.QUOTA] * 2


@pytest.mark.tier("test")
def test_quotas_of_every_uid(shared_dir: Path, daemon: StartDaemon) -> None:
    real = daemon("demo", "--quota-timers", "2", "--quota-bytes", "1K", "--accounts", "7")

    def fill() -> tuple[str, str, int, int | None]:
        with Client("demo") as client:
            client.add(f"{os.getuid()}-1", delay=3600)
            client.add(f"{os.getuid()}-2", delay=3600)
            with pytest.raises(QuotaExceeded) as caught:
                client.add(f"{os.getuid()}-3", delay=3600)
            client.cancel(f"{os.getuid()}-1")
            with pytest.raises(QuotaExceeded, match="1024 bytes"):
                client.add(f"{os.getuid()}-1", delay=3600, payload=bytes(2000))
            client.add(f"{os.getuid()}-1", delay=3600)
            error = caught.value
            return error.whose, error.resource, error.limit, error.used

    assert as_member(real, ALICE, fill) == ("uid", "timers", 2, 2)
    assert fill() == ("uid", "timers", 2, 2)
    found = {a.uid: a.live for a in Reader.attach(real.paths).accounts()}
    assert found == {ALICE: 2, os.getuid(): 2}
    real.kill()
    real.start()
    assert {a.uid: a.live for a in Reader.attach(real.paths).accounts()} == found
    real.restart("--accounts", "100")  # this start sets no quota
    with Client("demo") as client:
        client.add("third", delay=3600)
    reader = Reader.attach(real.paths)
    assert {a.uid: a.live for a in reader.accounts()} == found | {os.getuid(): 3}
    reader.check()


def test_a_quota_of_operations_says_when_to_come_again(daemon: StartDaemon) -> None:
    daemon()
    with Admin("demo") as admin:
        admin.set_namespace("default", quota_ops=1)
    with Client("demo") as client:
        client.add("first", delay=3600)
        more = (client.add(f"k{n}", delay=3600) for n in itertools.count())
        with pytest.raises(QuotaExceeded) as caught:
            list(more)  # on a busy machine, a second may pass between two adds
        error = caught.value
        assert (error.whose, error.resource) == ("namespace", "operations per second")
        assert (error.limit, error.used) == (1, None)
        assert error.retry_boot_ns is not None
        while time.clock_gettime_ns(time.CLOCK_BOOTTIME) < error.retry_boot_ns:
            time.sleep(0.01)
        client.add("second", delay=3600)
        client.cancel("first")


# ---- paths that belong to other processes or users -----------------------------------------------


def refused(daemon: StartDaemon, words: str) -> None:
    """Check that a start fails with the exit code of BadPath and a message that contains
    `words`."""
    with pytest.raises(DaemonFailed, match=words) as caught:
        daemon()
    assert caught.value.code == Exit.UNUSABLE
    assert "Traceback" not in caught.value.stderr


def identity(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_ino, found.st_mode, found.st_uid


@pytest.mark.parametrize("socket_name", ["cmd", "pub", "admin"])
@pytest.mark.parametrize("detail", ["file", "link", "dangling", "directory", "fifo"])
def test_a_file_that_is_no_socket_is_not_touched(
    daemon_dir: Path, daemon: StartDaemon, socket_name: str, detail: str
) -> None:
    path = daemon_dir / f"demo.{socket_name}"
    (daemon_dir / "target").write_text("precious")
    make: dict[str, Callable[[], object]] = {
        "file": lambda: path.write_text("precious"),
        "link": lambda: path.symlink_to("target"),
        "dangling": lambda: path.symlink_to("nowhere"),
        "directory": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
    }
    make[detail]()
    before = identity(path)
    refused(daemon, f"demo.{socket_name}: is not a socket: remove it")
    assert identity(path) == before
    assert (daemon_dir / "target").read_text() == "precious"


def test_a_link_to_a_socket_is_left_alone(daemon_dir: Path, daemon: StartDaemon) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon_dir / "elsewhere"))
    (daemon_dir / "demo.cmd").symlink_to("elsewhere")
    refused(daemon, "is not a socket: remove it")
    assert (daemon_dir / "elsewhere").is_socket()


@pytest.mark.tier("test")
def test_a_socket_that_another_process_serves_is_left_alone(
    daemon_dir: Path, daemon: StartDaemon
) -> None:
    path = daemon_dir / "demo.cmd"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        before = identity(path)
        refused(daemon, "is served by another process")
        assert identity(path) == before
    daemon()  # the other process has closed the socket, so the daemon replaces it


def test_a_socket_of_another_user_is_left_alone(daemon_dir: Path, daemon: StartDaemon) -> None:
    needs("root", "to make another user's socket")
    path = daemon_dir / "demo.pub"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    os.chown(path, ALICE, -1)
    before = identity(path)
    refused(daemon, f"belongs to uid {ALICE}")
    assert identity(path) == before


@pytest.mark.tier("test")
def test_the_sockets_of_a_dead_daemon_are_taken_over(daemon: StartDaemon) -> None:
    real = daemon()
    with Client("demo") as client:
        client.add("k", delay=3600)
    before = identity(real.paths.cmd)
    real.kill()
    assert identity(real.paths.cmd) == before
    real.start()
    with Client("demo") as client:
        assert client.get("k") is not None


def test_a_directory_that_anybody_may_write_is_refused(
    daemon_dir: Path, daemon: StartDaemon
) -> None:
    real = daemon()
    for mode in (0o777, 0o1777, 0o702):
        daemon_dir.chmod(mode)
        refused(daemon, "can be written by anybody")
        with pytest.raises(BadPath, match="can be written by anybody"):
            Client("demo", timeout=1).add("k", delay=1)
    daemon_dir.chmod(0o700)
    assert real.running


def test_a_directory_of_another_user_is_refused(daemon_dir: Path, daemon: StartDaemon) -> None:
    needs("root", "to make another user's directory")
    os.chown(daemon_dir, ALICE, -1)
    refused(daemon, f"belongs to uid {ALICE}")
    os.chown(daemon_dir, os.geteuid(), -1)
    daemon()


@pytest.mark.parametrize("detail", ["link", "fifo", "foreign", "directory"])
def test_an_unusable_lock_file_is_refused(
    daemon_dir: Path, daemon: StartDaemon, detail: str
) -> None:
    lock, target = daemon_dir / "demo.lock", daemon_dir / "target"
    target.write_text("precious")
    if detail == "link":
        lock.symlink_to("target")
    elif detail == "fifo":
        os.mkfifo(lock)
    elif detail == "directory":
        lock.mkdir()
    else:
        needs("root", "to make another user's file")
        lock.write_text("precious")
        os.chown(lock, ALICE, -1)
    before = identity(lock)
    refused(daemon, "demo.lock: ")
    assert identity(lock) == before
    assert target.read_text() == "precious"
    lock.rmdir() if detail == "directory" else lock.unlink()


# ---- two daemons that start at the same time -----------------------------------------------------


def begin(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "purgatoryd.cli", "run", "--name", "demo"],
        cwd=directory,
        env=clean_environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    """Return the first line on stdout; empty if the process ended without one."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], PATIENCE_S)[0]
    return process.stdout.readline()


@pytest.mark.tier("test")
def test_one_of_ten_simultaneous_starts_wins(daemon_dir: Path) -> None:
    racers = [begin(daemon_dir) for _ in range(10)]
    try:
        lines = [first_line(racer) for racer in racers]
        winners = [r for r, line in zip(racers, lines, strict=True) if line.startswith("ready")]
        assert len(winners) == 1
        for racer in racers:
            if racer is winners[0]:
                continue
            _, said = racer.communicate(timeout=PATIENCE_S)
            assert racer.returncode == Exit.UNUSABLE
            assert "a daemon 'demo' runs already, as " in said
            assert f"process {winners[0].pid}" in said or "a process that cannot be seen" in said
        with Client("demo") as client, Subscriber("demo", topics=["t"]) as notices:
            client.add("k", delay=0, topic="t")
            notice = notices.get(timeout=PATIENCE_S)
            assert notice is not None
            assert notice.key == "k"
    finally:
        for racer in racers:
            if racer.poll() is None:
                racer.send_signal(signal.SIGTERM)
            racer.communicate(timeout=PATIENCE_S)
    assert winners[0].returncode == 0
