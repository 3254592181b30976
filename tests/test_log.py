"""The log: a full disk, a closed terminal or a stopped reader does not delay the daemon."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_daemon import PATIENCE_S, Daemon, DaemonFailed, eventually, stats, thread_status
from tiers import sample

from purgatoryd.cli.exits import Exit
from purgatoryd.clients import Client
from purgatoryd.daemon import log
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import ArenaError
from purgatoryd.shm_layout.layout import DaemonState
from purgatoryd.shm_layout.paths import Paths, paths_in
from purgatoryd.shm_layout.status_file import StatusFile

pytestmark = pytest.mark.tier("test")

Stderr = tuple[int, Callable[[], None]]
"""A pair (descriptor, function that closes or stops the descriptor's other end once the daemon is
ready)."""


# ---- stderr without a working reader ---------------------------------------------------------


def full_disk() -> Stderr:
    return os.open("/dev/full", os.O_WRONLY), lambda: None


def closed_reader() -> Stderr:
    reader, writer = os.pipe()
    return writer, lambda: os.close(reader)


def closed_terminal() -> Stderr:
    controller, terminal = pty.openpty()
    return terminal, lambda: os.close(controller)


def fill(fd: int) -> None:
    """Write until the descriptor takes no more bytes; then set it to blocking mode."""
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(fd, b"." * 4096)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(fd, b".")
    os.set_blocking(fd, True)


KEPT_OPEN: list[int] = []


def full_pipe() -> Stderr:
    reader, writer = os.pipe()
    KEPT_OPEN.append(reader)
    fill(writer)
    return writer, lambda: None


def stalled_journald() -> Stderr:
    """A full stderr stream to journald, which the log uses if journald takes no datagrams."""
    reader, writer = socket.socketpair()
    KEPT_OPEN.append(reader.detach())
    fill(writer.fileno())
    return writer.detach(), lambda: None


REFUSE = [full_disk, closed_reader, closed_terminal]
STALL = [full_pipe, stalled_journald]


class Spoken(Daemon):
    """A daemon whose stderr is the given descriptor instead of a file."""

    def __init__(self, directory: Path, stderr: int, *args: str) -> None:
        self._stderr = stderr
        about = os.fstat(stderr)
        stream = {"JOURNAL_STREAM": f"{about.st_dev}:{about.st_ino}"}
        super().__init__("demo", directory, args, stream)

    def begin(self) -> None:
        command = [self.python, "-m", "purgatoryd.cli", "run", "--name", self.name, *self.args]
        self.process = subprocess.Popen(
            command, cwd=self.dir, env=self.env, stdout=subprocess.PIPE, stderr=self._stderr,
            bufsize=0, start_new_session=True,
        )  # fmt: skip


@contextlib.contextmanager
def speaking(make: Callable[[], Stderr], directory: Path, *args: str) -> Iterator[Spoken]:
    """Run a daemon whose stderr is the descriptor from `make`; yield it when it is ready."""
    stderr, spoil = make()
    real = Spoken(directory, stderr, *args)
    os.close(stderr)
    spoil()
    try:
        yield real
    finally:
        real.close()
        while KEPT_OPEN:
            os.close(KEPT_OPEN.pop())


def state(real: Daemon) -> int | None:
    """Return the daemon's state; None while there is no arena."""
    with contextlib.suppress(ArenaError), contextlib.closing(Reader.attach(real.paths)) as reader:
        return int(reader.header.daemon_state)
    return None


def provoke_a_line() -> None:
    """Make the daemon log a warning, as any client can: fill nine of ten slots."""
    with Client("demo") as client:
        for key in range(9):
            client.add(str(key), delay=3600)


@pytest.mark.parametrize("make", sample([*REFUSE, *STALL], [full_disk, full_pipe]))
def test_a_log_without_a_reader_neither_ends_nor_freezes_the_daemon(
    make: Callable[[], Stderr], daemon_dir: Path
) -> None:
    with speaking(make, daemon_dir, "--capacity", "10") as real:
        provoke_a_line()
        eventually(lambda: state(real) == DaemonState.DEGRADED)
        before = stats(real)["loop_iterations"]
        eventually(lambda: stats(real)["loop_iterations"] > before + 2)  # heartbeats continue
        with Client("demo") as client:
            assert client.get("0") is not None
        if make in REFUSE:
            eventually(lambda: stats(real)["log_dropped"] > 0)
        real.stop()  # ends cleanly, although its last line cannot be written


@pytest.mark.parametrize("make", [full_disk, full_pipe])
def test_a_log_without_a_reader_does_not_end_a_deployment(
    make: Callable[[], Stderr], daemon_dir: Path
) -> None:
    with speaking(make, daemon_dir, "--shards", "1") as real:
        file = StatusFile(daemon_dir, "demo")
        with contextlib.closing(Reader.attach(shard_paths(real))) as reader:
            os.kill(int(reader.header.daemon_pid), 9)
        eventually(lambda: file.header.restarts == 1 and file.header.serving == 1)
        if make is full_disk:
            eventually(lambda: file.header.log_dropped > 0)


def shard_paths(real: Daemon) -> Paths:
    return paths_in(real.dir, "demo-1-0")


@pytest.mark.parametrize("make", [full_disk, closed_reader, full_pipe])
def test_a_failed_start_keeps_its_exit_code(make: Callable[[], Stderr], daemon_dir: Path) -> None:
    """The exit code decides whether the service manager restarts the daemon."""
    first = Daemon("demo", daemon_dir)
    stderr, spoil = make()
    spoil()
    try:
        with pytest.raises(DaemonFailed) as failed:
            Silent(daemon_dir, stderr)
        assert failed.value.code == Exit.UNUSABLE
    finally:
        first.close()
        os.close(stderr)
        while KEPT_OPEN:
            os.close(KEPT_OPEN.pop())


class Silent(Spoken):
    """A daemon whose messages the test does not read."""

    @property
    def stderr(self) -> str:
        return ""


def test_a_daemon_starts_although_no_reader_takes_its_ready_line(daemon_dir: Path) -> None:
    class Unheard(Daemon):
        def begin(self) -> None:
            super().begin()
            assert self.process.stdout is not None
            self.process.stdout.close()

        def await_ready(self) -> None:
            eventually(lambda: self.paths.cmd.exists())
            eventually(lambda: state(self) == DaemonState.READY)

    real = Unheard("demo", daemon_dir)
    with Client("demo") as client:
        client.add("k", delay=3600)
    real.close()


@pytest.mark.parametrize("args", [(), ("--shards", "1")])
def test_signals_reach_the_loop_and_no_other_thread(
    args: tuple[str, ...], daemon_dir: Path
) -> None:
    """If another thread took SIGHUP, the loop might answer a later message before it reloads."""
    with contextlib.closing(Daemon("demo", daemon_dir, args)) as real:
        tasks = thread_status(real.pid)
        assert len(tasks) > 1
        for task in tasks:
            loop = task == real.pid
            eventually(lambda: takes_signals(real.pid, task) == loop)  # noqa: B023


def takes_signals(pid: int, task: int) -> bool | None:
    """Return whether SIGHUP and SIGTERM reach a thread; None if only one of them does."""
    status = thread_status(pid).get(task)
    if status is None:  # the thread has ended
        return False
    (mask,) = re.findall(r"SigBlk:\t(\w+)", status)
    blocked = {bool(int(mask, 16) >> n - 1 & 1) for n in (signal.SIGHUP, signal.SIGTERM)}
    return None if len(blocked) > 1 else not blocked.pop()


# ---- the queue -------------------------------------------------------------------------------


class Reading:
    """Stand-in for stderr and its reader. The reader can be stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.takes = True
        monkeypatch.setattr(log, "_written", self._written)

    def _written(self, fd: int, text: str) -> bool:
        assert fd == 2
        self.goes_on.wait(PATIENCE_S)
        if self.takes:
            self.lines.append(text)
        return self.takes


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(monkeypatch)


def test_the_queue_is_bounded_and_the_next_line_counts_dropped_ones(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "QUEUE_MAX", 10)
    logger = log.Log()
    reading.goes_on.clear()
    logger.warning("first")
    # the log's thread has taken the line and waits for the reader
    eventually(lambda: logger._queue.empty())
    for number in range(15):
        logger.warning(f"{number}")
    assert logger.dropped == 5
    reading.goes_on.set()
    logger.flush(PATIENCE_S)
    assert reading.lines == [
        "purgatoryd: first",
        "purgatoryd: 0 [dropped=5]",
        *(f"purgatoryd: {number}" for number in range(1, 10)),
    ]


def test_an_unwritten_line_is_counted_and_reported(reading: Reading) -> None:
    logger = log.Log()
    reading.takes = False
    logger.error("lost")
    logger.error("lost as well")
    logger.flush(PATIENCE_S)
    reading.takes = True
    logger.error("taken")
    logger.error("taken as well")
    logger.flush(PATIENCE_S)
    assert reading.lines == ["purgatoryd: taken [dropped=2]", "purgatoryd: taken as well"]
    assert logger.dropped == 2


def test_one_kind_of_message_has_a_rate_and_leaves_the_others_alone(reading: Reading) -> None:
    logger = log.Log()
    for number in range(log.BURST + 50):
        logger.warning(f"message of one statement, {number}")
    logger.warning("message of another one")
    logger.flush(PATIENCE_S)
    assert len(reading.lines) == log.BURST + 1
    assert reading.lines[-1] == "purgatoryd: message of another one"
    assert logger.dropped == 50


def test_a_message_that_cannot_be_encoded_ends_nothing(reading: Reading) -> None:
    class Wrong:
        def __str__(self) -> str:
            raise ValueError

    logger = log.Log()
    logger.warning("cannot be", value=Wrong())
    logger.warning("can be")
    logger.flush(PATIENCE_S)
    assert reading.lines == ["purgatoryd: can be [dropped=1]"]


def test_a_file_name_that_is_not_utf8_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    logger = log.Log()
    logger.warning(os.fsdecode(b"bad\xff"))
    logger.flush(PATIENCE_S)
    assert capfd.readouterr().err == "purgatoryd: bad\\udcff\n"


def test_a_stalled_journald_delays_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(str(tmp_path / "journald"))
        monkeypatch.setattr(log, "JOURNALD", str(tmp_path / "journald"))
        monkeypatch.setattr(log, "leads_to_journald", lambda fd: True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    other.sendto(b"x", str(tmp_path / "journald"))
        logger = log.Log()
        logger.set_up("warning")
        logger.warning("waits")
        logger.flush(0.01)  # without a time limit, flush() would wait for journald forever
        journald.setblocking(False)
        received = []

        def arrived() -> bool:
            with contextlib.suppress(BlockingIOError):
                received.append(journald.recv(4096))
            return received[-1:] != [b"x"] and bool(received)

        eventually(arrived)
        assert b"MESSAGE=waits\n" in received[-1]


def test_a_forked_child_logs_by_itself_and_repeats_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    logger = log.Log()
    logger.warning("message of the parent")
    pid = os.fork()
    if pid == 0:
        logger.warning("message of the child")
        logger.flush(PATIENCE_S)
        os._exit(0)
    os.waitpid(pid, 0)
    logger.flush(PATIENCE_S)
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == [
        "purgatoryd: message of the child",
        "purgatoryd: message of the parent",
    ]


def test_a_stderr_that_another_process_made_non_blocking_is_waited_for() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    fill(writer)
    os.set_blocking(writer, False)
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(log._written(writer, "late")))
    thread.start()
    taken = b""
    while not taken.endswith(b"late\n"):
        taken += os.read(reader, 4096)
    thread.join(PATIENCE_S)
    assert done == [True]
    os.close(reader)
    os.close(writer)
