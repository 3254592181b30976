"""A daemon whose arena files or sockets are removed while it runs."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from click.testing import CliRunner
from machine import needs
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    eventually,
    refused,
    remove_arena_files,
    stats,
)
from service_manager import Manager
from tiers import wide

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import ArenaLost, CancelResult, Client, Purgatory, Subscriber
from purgatoryd.clients.conditions import AllOf
from purgatoryd.daemon import replacement
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.listeners import sockets
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.sockets import Sockets
from purgatoryd.daemon.log import log
from purgatoryd.daemon.reaper import Reaper
from purgatoryd.daemon.store import Opening, open_arena, owned, place_again
from purgatoryd.shm_layout import memory, shm, topology
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.layout import ArenaState
from purgatoryd.shm_layout.paths import Paths, paths_in

pytestmark = pytest.mark.tier("all")

BOTH = ("", ".private")


def file(paths: Paths, suffix: str = "") -> Path:
    return shm.MOUNT / f"{paths.arena[1:]}{suffix}"


def remove(real: Daemon, suffixes: tuple[str, ...] = BOTH) -> None:
    for suffix in suffixes:
        file(real.paths, suffix).unlink()


def placed(real: Daemon) -> bool:
    """Return whether both arena files have their names and belong to the running daemon."""
    if not all(file(real.paths, suffix).is_file() for suffix in BOTH):
        return False
    return stats(real)["daemon_pid"] == real.pid


def pid_of(paths: Paths) -> int:
    """Return the pid in the header of an arena."""
    with contextlib.closing(Reader.attach(paths)) as reader:
        return int(reader.header.daemon_pid)


def memory_files(pid: int) -> int:
    """Return how many files of /dev/shm a process has open."""
    found = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(fd.readlink()).startswith(str(shm.MOUNT))
    return found


def status(real: Daemon) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["status", "--name", real.name])
    return done.exit_code, done.output


@pytest.mark.tier("test")
@pytest.mark.parametrize("suffixes", [BOTH, wide(("",)), wide((".private",))], ids=str)
@pytest.mark.parametrize("wal", [wide(False), True], ids=["without a WAL", "with a WAL"])
def test_a_removed_arena_is_placed_again_and_outlives_the_daemon(
    suffixes: tuple[str, ...], *, wal: bool, daemon: StartDaemon
) -> None:
    real = daemon("demo", *(("--wal-dir", "wal") if wal else ()))
    with Client("demo", timeout=PATIENCE_S) as client, Subscriber("demo", topics=["t"]) as inbox:
        client.add("before", delay=3600)
        remove(real, suffixes)
        client.add("meanwhile", delay=3600)
        eventually(lambda: placed(real))
        client.add("after", delay=3600)
        client.add("now", delay=0, topic="t")
        notice = inbox.get(timeout=PATIENCE_S)
        assert notice is not None
        assert notice.key == "now"
    assert not list(shm.MOUNT.glob(f"{real.paths.arena[1:]}*.ne*"))
    real.kill()
    real.start()
    with Client("demo", timeout=PATIENCE_S) as client:
        assert all(client.get(key) for key in ("before", "meanwhile", "after"))


@pytest.mark.parametrize("wal", [False, True], ids=["without a WAL", "with a WAL"])
def test_a_private_file_that_a_killed_daemon_could_not_replace(
    *, wal: bool, daemon: StartDaemon
) -> None:
    real = daemon("demo", *(("--wal-dir", "wal") if wal else ()))
    with Client("demo", timeout=PATIENCE_S, durable=wal) as client:
        client.add("k", delay=3600)
    real.kill()
    remove(real, (".private",))
    if not wal:
        assert "to start empty" in refused(real.start)
        file(real.paths).unlink()
    real.start()
    with Client("demo", timeout=PATIENCE_S) as client:
        assert (client.get("k") is not None) is wal


def test_a_reader_attaches_again(daemon: StartDaemon) -> None:
    real = daemon()
    reader = Reader.attach(real.paths)
    remove(real)
    eventually(lambda: reader.retired)
    reader.close()
    again = Reader.attach(real.paths)
    assert not again.retired
    again.close()


def test_a_subscriber_loses_nothing_when_the_arena_is_placed_again(daemon: StartDaemon) -> None:
    real, count = daemon(), 400
    with Client("demo", timeout=PATIENCE_S) as client, Subscriber("demo", topics=["t"]) as inbox:
        for number in range(count):
            client.add(f"{number}", delay=0, topic="t")
            if number % 100 == 50:
                remove(real)
                eventually(lambda: placed(real))
        found = [inbox.get(timeout=PATIENCE_S) for _ in range(count)]
    assert {notice.key for notice in found if notice} == {f"{n}" for n in range(count)}


def test_durable_calls_go_on_while_the_arena_moves(daemon: StartDaemon) -> None:
    real = daemon("demo", "--wal-dir", "wal")
    with Client("demo", durable=True, timeout=PATIENCE_S) as client:
        added = 0
        for _ in range(3):
            remove(real)
            while not placed(real):
                client.add(f"{added}", delay=3600)
                added += 1
    real.kill()
    remove_arena_files(real.paths)
    real.start()
    with Client("demo", timeout=PATIENCE_S) as client:
        assert all(client.get(f"{number}") for number in range(added))


def test_a_stop_right_after_the_removal_is_clean(daemon: StartDaemon) -> None:
    real = daemon("demo", "--wal-dir", "wal")
    remove(real)
    done = CliRunner().invoke(app, ["stop", "--name", "demo", "--json"])
    assert done.exit_code == Exit.DONE, done.output
    assert json.loads(done.output)["pid"] == real.pid
    assert real.process.wait(PATIENCE_S) == 0


# ---- arena files that cannot get their names again -------------------------------------------


@pytest.fixture(params=["a file of ours", "a directory"])
def taken(request: pytest.FixtureRequest, daemon: StartDaemon) -> Iterator[Daemon]:
    """A daemon whose arena file was removed and replaced by a foreign file."""
    real = daemon("demo", "--capacity", "100")
    with Client("demo", timeout=PATIENCE_S) as client:
        client.add("soon", delay=3600)
        client.add("k", delay=3600)
    remove(real, ("",))
    path = file(real.paths)
    path.mkdir() if request.param == "a directory" else path.write_bytes(b"precious")
    yield real
    if path.is_dir():
        path.rmdir()
    elif path.exists() and path.read_bytes() == b"precious":
        path.unlink()


def test_another_file_with_the_name_stays(taken: Daemon) -> None:
    """The daemon refuses new timers, and fires and cancels the armed ones. After the foreign file
    is removed, the daemon arms timers again."""
    with (
        Client("demo", timeout=PATIENCE_S) as client,
        Purgatory("demo", timeout=PATIENCE_S) as purgatory,
    ):
        eventually(lambda: "has its name: remove it" in taken.stderr)
        with pytest.raises(ArenaLost):
            client.add("new", delay=3600)
        with pytest.raises(ArenaLost):
            purgatory.watch("o", AllOf({"w": 1}), timeout=60).result()
        assert client.get("new") is None
        assert client.cancel("k") is CancelResult.CANCELLED
        path = file(taken.paths)
        if path.is_dir():
            path.rmdir()
        else:
            assert path.read_bytes() == b"precious"
            path.unlink()
        eventually(lambda: placed(taken))
        eventually(lambda: status(taken)[0] == Exit.DONE)
        client.add("new", delay=3600)
        assert client.get("soon") is not None


def test_a_daemon_that_cannot_be_placed_takes_no_memory(daemon: StartDaemon) -> None:
    """The daemon tries to create its arena files again each second. Each try must close all files
    that it opened."""
    real = daemon("demo", "--capacity", "100")
    obstacle = file(real.paths, ".next")
    obstacle.write_bytes(b"precious")
    os.chown(obstacle, 65534, 65534)  # uid of nobody
    try:
        remove(real)
        eventually(lambda: "is foreign: it belongs to uid 65534" in real.stderr)
        before = memory_files(real.pid)
        # wait for three tries; at each try, the daemon also binds the removed socket again
        for _ in range(3):
            real.paths.pub.unlink()
            eventually(real.paths.pub.is_socket)
        assert memory_files(real.pid) == before
        assert obstacle.read_bytes() == b"precious"
    finally:
        obstacle.unlink()
    eventually(lambda: placed(real))


def test_a_daemon_whose_name_is_taken_can_be_stopped(taken: Daemon) -> None:
    eventually(lambda: "has its name: remove it" in taken.stderr)
    done = CliRunner().invoke(app, ["stop", "--name", "demo", "--json"])
    assert done.exit_code == Exit.DONE, done.output
    assert json.loads(done.output) == {"stopped": "demo", "pid": taken.pid, "armed": None}
    assert taken.process.wait(PATIENCE_S) == 0


def test_without_space_for_a_copy_the_daemon_fires_cancels_and_stops(daemon_dir: Path) -> None:
    needs("mountns", "a small /dev/shm of its own")
    script = daemon_dir / "python"
    script.write_text(
        "#!/bin/sh\nexec unshare -m sh -c 'mount -t tmpfs -o size=48m,mode=1777 tmpfs /dev/shm "
        f'&& exec "$0" "$@"\' {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    real = Daemon("demo", daemon_dir, ("--payload-memory", "12M", "--capacity", "1000"),
                  python=str(script))  # fmt: skip
    inside = Path(f"/proc/{real.pid}/root{file(real.paths)}")
    try:
        with Client("demo", timeout=PATIENCE_S) as client:
            client.add("k", delay=3600)
            client.add("due", delay=1.5)
            inside.unlink()
            eventually(lambda: "new timers are refused" in real.stderr)
            with pytest.raises(ArenaLost):
                client.add("new", delay=3600)
            eventually(lambda: client.get("due") is None)
            assert client.cancel("k") is CancelResult.CANCELLED
        done = CliRunner().invoke(app, ["stop", "--name", "demo"])
        assert done.exit_code == Exit.DONE, done.output
        assert real.process.wait(PATIENCE_S) == 0
    finally:
        real.close()


# ---- a slow copy of the arena ----------------------------------------------------------------

SLOW = """
import os, time
from purgatoryd.shm_layout import shm

shm.PORTION = 1 << 20

def slow(act, size_of):
    def wait(*arguments):
        if os.path.exists({flag!r}):
            time.sleep(size_of(*arguments) / (1 << 20) * 0.05)
        return act(*arguments)
    return wait

def freed(fd):
    about = os.fstat(fd)
    return 0 if about.st_nlink else about.st_size

os.posix_fallocate = slow(os.posix_fallocate, lambda fd, at, length: length)
os.pwrite = slow(os.pwrite, lambda fd, data, at: len(data))
os.close = slow(os.close, freed)
"""
"""Code that a daemon's Python runs first: system calls on arena files take 50 ms per MiB."""
COPY_S = 4.0
"""Lower bound of the time that a slow copy of the arena takes."""


class Slow:
    """A kernel that is slow after begin(), simulated for daemons started with `environment`."""

    def __init__(self, folder: Path, manager: Manager, watchdog_s: float) -> None:
        self._flag = folder / "slow"
        (folder / "sitecustomize.py").write_text(SLOW.format(flag=str(self._flag)))
        self.environment = {
            "PYTHONPATH": str(folder),
            "NOTIFY_SOCKET": manager.address,
            "WATCHDOG_USEC": f"{watchdog_s * 1e6:.0f}",
        }

    def begin(self) -> None:
        """Make the kernel slow."""
        self._flag.touch()


def longest_silence_s(manager: Manager, over: Callable[[], bool]) -> float:
    """Return the longest time in seconds between two watchdog notifications. Stop at the second
    notification after `over` has become True."""
    manager.hears("WATCHDOG=1")
    longest_s, last_s, more = 0.0, time.monotonic(), 2
    while more:
        more -= over()
        manager.hears("WATCHDOG=1")
        longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
    return longest_s


@pytest.fixture
def watchdog(daemon_dir: Path) -> Iterator[Manager]:
    manager = Manager(str(daemon_dir / "notify"))
    yield manager
    manager.socket.close()


@pytest.mark.alone
@pytest.mark.parametrize("wal", [False, True], ids=["without a WAL", "with a WAL"])
def test_a_copy_that_takes_long_shows_the_watchdog_signs_of_progress(
    *, wal: bool, watchdog: Manager, daemon: StartDaemon, tmp_path: Path
) -> None:
    slow = Slow(tmp_path, watchdog, 3.0)
    real = daemon("demo", *(("--wal-dir", "wal") if wal else ()), env=slow.environment)
    slow.begin()
    begun_s = time.monotonic()
    remove(real)
    silence_s = longest_silence_s(watchdog, file(real.paths).exists)
    assert time.monotonic() - begun_s > COPY_S
    assert silence_s < 3.0
    assert placed(real)


def test_a_shard_whose_copy_takes_long_is_not_killed(
    watchdog: Manager, daemon: StartDaemon, tmp_path: Path
) -> None:
    """A deployment kills a shard that shows no progress for ten heartbeats, 2 s."""
    slow = Slow(tmp_path, watchdog, 0.4)
    real = daemon("demo", "--shards", "1", env=slow.environment)
    shard = paths_in(real.dir, "demo-1-0")
    pid = pid_of(shard)
    slow.begin()
    begun_s = time.monotonic()
    file(shard).unlink()
    eventually(file(shard).exists)
    assert time.monotonic() - begun_s > COPY_S
    assert pid_of(shard) == pid
    assert "does not answer" not in real.stderr


def test_each_portion_of_memory_that_is_placed_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm, "PORTION", 1 << 16)
    node, signs = min(topology.read(None).memory_nodes), list[str]()
    with mmap.mmap(-1, 1 << 20) as mapping:
        memory.bind(mapping, node, move=True, moved=lambda: signs.append("bind"))
        memory.populate(mapping, lambda: signs.append("populate"))
        with contextlib.suppress(OSError):  # the kernel may refuse huge pages
            memory.collapse(mapping, lambda: signs.append("collapse"))
    assert [signs.count(one) for one in ("bind", "populate", "collapse")] == [16] * 3


# ---- sockets -----------------------------------------------------------------------------------


@pytest.mark.tier("test")
@pytest.mark.parametrize("deployment", [False, wide(True)], ids=["a daemon", "a deployment"])
def test_removed_sockets_are_bound_again_and_connections_stay(
    *, deployment: bool, daemon: StartDaemon
) -> None:
    real = daemon("demo", *(("--shards", "1") if deployment else ()))
    with Client("demo", timeout=PATIENCE_S) as before:
        before.add("k", delay=3600)
        sockets = (real.paths.cmd, real.paths.pub, real.paths.admin)
        for path in sockets:
            path.unlink()
        before.add("meanwhile", delay=3600)
        eventually(lambda: all(path.is_socket() for path in sockets))
        # The daemon binds a socket first and sets its mode afterwards.
        eventually(lambda: all(path.stat().st_mode & 0o777 == 0o660 for path in sockets))
        with Client("demo", timeout=PATIENCE_S) as after:
            assert after.get("meanwhile") is not None
        before.add("after", delay=3600)
    real.stop()


def test_a_socket_that_cannot_be_bound_again_keeps_no_other_from_it(
    daemon_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = paths_in(daemon_dir, "demo")
    ours = (paths.cmd, paths.admin, paths.pub)
    with contextlib.closing(Sockets(paths, Access.of(Config("demo")))) as bound:
        for path in ours:
            path.unlink()
        with monkeypatch.context() as patch:
            listen_at = sockets.listen_at

            def fail(socket: zmq.Socket[bytes], path: Path) -> None:
                if path in (paths.cmd, paths.pub):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                listen_at(socket, path)

            patch.setattr(sockets, "listen_at", fail)
            for _ in range(3):
                bound.bind_again()
            assert [path.is_socket() for path in ours] == [False, True, False]
        bound.bind_again()
        assert all(path.is_socket() for path in ours)
    log.flush()
    messages = capfd.readouterr().err
    assert messages.count("cannot be bound again") == 2


def test_a_removal_of_a_socket_costs_a_descriptor(daemon: StartDaemon) -> None:
    """The daemon keeps the old listener, because libzmq closes a listener with its connections."""
    real = daemon()

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{real.pid}/fd"))

    with Client("demo", timeout=PATIENCE_S) as client:
        client.add("k", delay=3600)
        before = descriptors()
        for _ in range(3):
            real.paths.cmd.unlink()
            eventually(real.paths.cmd.is_socket)
        assert descriptors() == before + 3
        assert client.get("k") is not None
    real.restart()
    with Client("demo", timeout=PATIENCE_S) as client:
        assert client.get("k") is not None
        assert descriptors() == before


def test_libzmq_ends_connections_with_their_endpoint(tmp_path: Path) -> None:
    """If this test fails with a new libzmq, bind_again() can be changed: it can then unbind the old
    listener without ending connections."""
    endpoint = f"ipc://{tmp_path / 'socket'}"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.bind(endpoint)
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(endpoint)
            dealer.send(b"request")
            route, _ = router.recv_multipart()
            router.send_multipart([route, b"reply"])
            router.unbind(endpoint)

            def unreachable() -> bool:
                try:
                    router.send_multipart([route, b"reply"])
                except zmq.ZMQError as error:
                    return error.errno == zmq.EHOSTUNREACH
                return False

            eventually(unreachable)


def test_another_file_at_the_path_of_a_removed_socket_stays(daemon: StartDaemon) -> None:
    real = daemon()
    real.paths.pub.unlink()
    real.paths.pub.write_text("precious")
    real.paths.cmd.unlink()
    eventually(lambda: real.paths.cmd.is_socket())
    assert real.paths.pub.read_text() == "precious"


def test_a_shard_whose_arena_is_placed_again_is_not_restarted(daemon: StartDaemon) -> None:
    real = daemon("demo", "--shards", "1")
    shard = paths_in(real.dir, "demo-1-0")
    pid = pid_of(shard)
    file(shard).unlink()
    eventually(file(shard).exists)
    with Client("demo", timeout=PATIENCE_S) as client:
        client.add("k", delay=3600)
    assert pid_of(shard) == pid
    assert os.path.exists(f"/proc/{pid}")


@pytest.mark.tier("test")
@pytest.mark.parametrize("suffixes", [BOTH, wide(("",)), wide((".private",))], ids=str)
@pytest.mark.parametrize("step", ["adopt", "retire", "replace", "settle"])
def test_a_copy_that_did_not_replace_the_arena_is_removed(
    suffixes: tuple[str, ...], step: str, daemon_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start would use a remaining copy as the arena, and lose all later changes."""
    (daemon_dir / "demo.lock").touch()  # makes the fixture daemon_dir remove the arena files
    paths = paths_in(daemon_dir, "demo")
    gc.collect()  # closes files that objects of earlier tests still keep open
    others = memory_files(os.getpid())

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with (
        owned(Opening(Config("demo", capacity=100), paths)) as opening,
        contextlib.closing(open_arena(opening)) as arena,
    ):
        for suffix in suffixes:
            file(paths, suffix).unlink()
        with monkeypatch.context() as patch:
            at = {"retire": replacement, "replace": shm}.get(step, shm.ArenaLock)
            patch.setattr(at, step, fail)
            with contextlib.suppress(OSError):
                assert place_again(arena, opening, lambda: None), (
                    "the start did not reach this step"
                )
        assert arena.header.state != ArenaState.RETIRED
        left = sorted(path.name for path in shm.MOUNT.glob(f"{paths.arena[1:]}*"))
        assert not [name for name in left if name.endswith((".new", ".next"))]
        place_again(arena, opening, lambda: None)
        assert arena.file.has_name
        assert arena.private.has_name
        assert opening.lock is not None
        assert opening.lock.holds(paths.private)
        own = 5  # two open files, their two mappings, and the lock's file
        eventually(lambda: memory_files(os.getpid()) == others + own)


@pytest.mark.tier("check")
def test_the_state_is_settled_with_each_loss_and_return_of_names() -> None:
    settled: list[bool] = []
    reaper: Any = object.__new__(Reaper)
    reaper.arena = SimpleNamespace(set_nameless=lambda *, nameless: None)
    reaper._settle = lambda: settled.append(reaper._nameless)
    for why in ("a foreign file is in the way", ""):
        reaper._set_nameless(why)
    assert settled == [True, False]
