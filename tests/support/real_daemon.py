"""A real daemon process with a private run directory, for tests that need a daemon."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import posix_ipc
import pytest
from template import Process, begin

from purgatoryd.clients import AllOf, Client, Purgatory, Subscriber
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.paths import Paths, paths_in
from purgatoryd.shm_layout.wal import Contents, Frame, Walk, contents, segments, uuid_of

Value = TypeVar("Value")

PATIENCE_S = 30.0
"""Seconds after which a test fails because a fact has not become true. A passing test does not wait
that long."""


class DaemonFailed(Exception):
    """The daemon ended before it was ready, or reported nothing in time. `stderr`: the daemon's
    output."""

    def __init__(self, code: int | None, stderr: str) -> None:
        super().__init__(f"exit code {code}; stderr:\n{stderr}")
        self.code = code
        self.stderr = stderr


SETTINGS: dict[str, str] = {}
"""Environment variables of all daemons that are started from now on."""


class Daemon:
    """`purgatoryd run` as a child process. The constructor starts it and waits until it is
    ready."""

    def __init__(
        self,
        name: str,
        directory: Path,
        args: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.name = name
        self.dir = directory
        self.args = args
        self.env = clean_environment(directory) | dict(env or {})
        self.python = python
        self.paths: Paths = paths_in(directory, name)
        self.process: Process
        self.start()

    @property
    def pid(self) -> int:
        """Pid of the daemon's newest process."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """False once the process has ended."""
        return self.process.poll() is None

    @property
    def stderr(self) -> str:
        """Output that the newest process of this daemon has written to stderr so far."""
        return self._log.read_text()

    @property
    def _log(self) -> Path:
        return self.dir / f"{self.name}.stderr"

    def start(self, *args: str) -> None:
        """Start the process, and wait until it is ready. `args`, if any, replace the earlier
        arguments."""
        self.args = args or self.args
        self.begin()
        self.await_ready()

    def begin(self) -> None:
        """Start the process without waiting until it is ready."""
        arguments = ["run", "--name", self.name, *self.args]
        with self._log.open("wb") as log:
            self.process = begin(self.python, arguments, self.dir, self.env, log)

    def await_ready(self) -> None:
        """Wait until the process that begin() started is ready. Raises DaemonFailed."""
        assert self.process.stdout is not None
        end = time.monotonic() + PATIENCE_S
        line = b""
        poller = select.poll()
        poller.register(self.process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            left = max(0.0, end - time.monotonic())
            if not poller.poll(left * 1000):
                self.kill()
            byte = self.process.stdout.read(1)
            if not byte:
                raise DaemonFailed(self.process.wait(PATIENCE_S), self.stderr)
            line += byte
        assert line.startswith(b"ready"), line

    def stop(self) -> None:
        """Send SIGTERM. The daemon must end cleanly, with exit code 0."""
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        assert code == 0, f"exit code {code}; stderr:\n{self.stderr}"

    def kill(self) -> None:
        """Send SIGKILL, as in a crash."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def restart(self, *args: str) -> None:
        """Stop the daemon cleanly, and start it. `args`, if any, replace the earlier arguments."""
        self.stop()
        self.start(*args)

    def close(self) -> None:
        """Stop the daemon cleanly if it still runs. Its arena files stay."""
        try:
            if self.running:
                self.stop()
        finally:
            if self.running:
                self.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()


def clean_environment(directory: Path) -> dict[str, str]:
    """Return the environment of this process without settings of the project, with `directory` as
    the run directory."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PURGATORYD_")}
    return inherited | {"PURGATORYD_DIR": str(directory)} | SETTINGS


def remove_arena_files(paths: Paths) -> None:
    """Remove all existing arena files of a daemon, including unfinished files."""
    births = (f"{paths.arena}.new", f"{paths.arena}.next", f"{paths.private}.new")
    for arena_file in (paths.arena, paths.private, *births):
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(arena_file)


def released(lock: Path) -> bool:
    """Return whether no process holds this lock file of a daemon."""
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def eventually(fact: Callable[[], Value], patience_s: float = PATIENCE_S) -> Value:
    """Call `fact` until it returns a true value. Return this value."""
    end_s = time.monotonic() + patience_s
    while not (value := fact()):
        assert time.monotonic() < end_s, "the expected fact did not become true"
        time.sleep(0.005)
    return value


def boot_ns() -> int:
    """Return the time of CLOCK_BOOTTIME in ns."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def stats(daemon: Daemon) -> dict[str, int]:
    """Return the statistics that the daemon's arena contains, by name."""
    reader = Reader.attach(daemon.paths)
    try:
        return reader.stats()
    finally:
        reader.close()


def notices(reader: Reader, namespace: str, topic: str, first: int = 1) -> list[wire.RawNotice]:
    """Return all notices of a topic in the replay buffer, beginning at sequence `first`. No notice
    may be lost."""
    _, last = reader.newest_sequences(namespace)[topic]
    lost, bodies = reader.replay(namespace, topic, first, last)
    assert lost == first - 1
    heads = [(body, wire.decode_notice_head(body)) for body in bodies]
    return [n for body, head in heads for n in wire.decode_notices(body, head.records)]


def sent(daemon: Daemon, namespace: str) -> int:
    """Return how many notices of a namespace were given to the socket; 0 while any notice of the
    daemon still waits for the socket."""
    with contextlib.closing(Reader.attach(daemon.paths)) as reader:
        waiting = reader.header.replay_tail - reader.header.published
        return (
            0 if waiting else sum(last for _, last in reader.newest_sequences(namespace).values())
        )


def wal_frames(folder: Path) -> list[Frame]:
    """Return all records of the WAL in a daemon's folder, arena by arena."""
    found, walk = [], Walk()
    for file in segments(folder):
        if uuid_of(file.path) != walk.uuid:
            walk = Walk()
        walk.enter(file.path)
        found += list(walk.frames())
        walk.check()
    return found


def wal_entries(folder: Path) -> list[Contents]:
    """Return the contents of all "entry" records of the WAL in a daemon's folder: the published
    notices."""
    return [contents(frame) for frame in wal_frames(folder) if frame.kind == "entry"]


def refused(start: Callable[[], object]) -> str:
    """Check that a start fails with an error of one line, without a traceback. Return the error."""
    with pytest.raises(DaemonFailed) as caught:
        start()
    assert caught.value.code not in (0, None)
    assert "Traceback" not in caught.value.stderr
    assert len(caught.value.stderr.splitlines()) == 1, caught.value.stderr
    return caught.value.stderr


def used(daemon: Callable[..., Daemon], *args: str) -> Daemon:
    """Start a daemon that has fired a timer and ended an operation."""
    one = daemon("demo", *args)
    with (
        Subscriber("demo", topics=["t"]) as subscriber,
        Client("demo", namespace="shop") as client,
        Client("demo") as timers,
        Purgatory("demo") as purgatory,
    ):
        client.add("far", delay=3600.0)
        client.add("farther", delay=7200.0)
        timers.add("k", delay=0.001, topic="t")
        assert subscriber.get(30) is not None
        done = purgatory.watch("w", AllOf({"key": 1}), timeout=30.0)
        purgatory.advance("key", 1)
        done.result()
    return one


def free_port() -> int:
    """Return a port of the loopback interface. The port and the next port are free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


class StartDaemon(Protocol):
    """A function that starts a daemon. `args`: arguments of `purgatoryd run`."""

    def __call__(
        self, name: str = "demo", *args: str, env: Mapping[str, str] | None = None
    ) -> Daemon: ...


def thread_status(pid: int) -> dict[int, str]:
    """Return the text of /proc/PID/task/TID/status by thread id, without ended threads."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[int(task.name)] = (task / "status").read_text()
    return found
