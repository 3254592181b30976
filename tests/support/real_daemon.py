"""A real daemon process on a private directory, for tests that need one."""

from __future__ import annotations

import contextlib
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
"""Seconds after which a test fails because a fact has not become true. Tests do not wait that long
otherwise."""


class DaemonFailed(Exception):
    """The daemon ended, or reported nothing, before it was ready; `stderr` is its output."""

    def __init__(self, code: int | None, stderr: str) -> None:
        super().__init__(f"exit code {code}; it said:\n{stderr}")
        self.code = code
        self.stderr = stderr


class Daemon:
    """`purgatoryd run` as a child process; started and ready after construction."""

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
        """Pid of the running daemon, or of the last one."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self.process.poll() is None

    @property
    def stderr(self) -> str:
        """Output of the last process of this daemon to stderr so far."""
        return self._log.read_text()

    @property
    def _log(self) -> Path:
        return self.dir / f"{self.name}.stderr"

    def start(self, *args: str) -> None:
        """Start the process, and wait until it is ready; `args` replace the earlier ones."""
        self.args = args or self.args
        self.begin()
        self.await_ready()

    def begin(self) -> None:
        """Start the process without waiting."""
        arguments = ["run", "--name", self.name, *self.args]
        with self._log.open("wb") as log:
            self.process = begin(self.python, arguments, self.dir, self.env, log)

    def await_ready(self) -> None:
        """Wait until a process from begin() is ready. Raises DaemonFailed."""
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
        """Send SIGTERM; the daemon must end cleanly, with exit code 0."""
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        assert code == 0, f"exit code {code}; it said:\n{self.stderr}"

    def kill(self) -> None:
        """Send SIGKILL, as in a crash."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def restart(self, *args: str) -> None:
        """Stop cleanly and start; `args` replace the earlier ones."""
        self.stop()
        self.start(*args)

    def close(self) -> None:
        """End a daemon that still runs, cleanly; its arena files stay."""
        try:
            if self.running:
                self.stop()
        finally:
            if self.running:
                self.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()


def clean_environment(directory: Path) -> dict[str, str]:
    """Return this environment without settings of the project, and with `directory` for the
    sockets."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PURGATORYD_")}
    return inherited | {"PURGATORYD_DIR": str(directory)}


def remove_arena_files(paths: Paths) -> None:
    """Remove the existing arena files of a daemon, including unfinished ones."""
    births = (f"{paths.arena}.new", f"{paths.arena}.next", f"{paths.private}.new")
    for arena_file in (paths.arena, paths.private, *births):
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(arena_file)


def eventually(fact: Callable[[], Value], patience_s: float = PATIENCE_S) -> Value:
    """Return the first true value of `fact`."""
    end_s = time.monotonic() + patience_s
    while not (value := fact()):
        assert time.monotonic() < end_s, "the expected fact did not become true"
        time.sleep(0.005)
    return value


def boot_ns() -> int:
    """Return the time of CLOCK_BOOTTIME in ns."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def stats(daemon: Daemon) -> dict[str, int]:
    """Return the figures in the daemon's arena."""
    reader = Reader.attach(daemon.paths)
    try:
        return reader.stats()
    finally:
        reader.close()


def notices(reader: Reader, namespace: str, topic: str, first: int = 1) -> list[wire.RawNotice]:
    """Return all notices of a topic from sequence `first` on, from the replay buffer; none may be
    lost."""
    _, last = reader.newest_sequences(namespace)[topic]
    lost, bodies = reader.replay(namespace, topic, first, last)
    assert lost == first - 1
    heads = [(body, wire.decode_notice_head(body)) for body in bodies]
    return [n for body, head in heads for n in wire.decode_notices(body, head.records)]


def sent(daemon: Daemon, namespace: str) -> int:
    """Return how many notices of a namespace the socket has; 0 while any notice waits for it."""
    with contextlib.closing(Reader.attach(daemon.paths)) as reader:
        waiting = reader.header.replay_tail - reader.header.published
        return (
            0 if waiting else sum(last for _, last in reader.newest_sequences(namespace).values())
        )


def wal_frames(folder: Path) -> list[Frame]:
    """Return the records in a daemon's folder: of all arenas, one after the other."""
    found, walk = [], Walk()
    for file in segments(folder):
        if uuid_of(file.path) != walk.uuid:
            walk = Walk()
        walk.enter(file.path)
        found += list(walk.frames())
        walk.check()
    return found


def wal_entries(folder: Path) -> list[Contents]:
    """Return the published notices, from the WAL in a daemon's folder."""
    return [contents(frame) for frame in wal_frames(folder) if frame.kind == "entry"]


def refused(start: Callable[[], object]) -> str:
    """Return the error of a daemon that must not start: one line, no traceback."""
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
    """Return a free port of the loopback, the next one of which is also free."""
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
    """Starts a daemon; `args` are those of `purgatoryd run`."""

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
