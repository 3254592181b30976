"""Waiter, in which all loops wait: descriptors above 1023, and deadlines in nanoseconds."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from real_daemon import Daemon, boot_ns

from purgatoryd.clients import Client, Subscriber
from purgatoryd.daemon import waiting
from purgatoryd.daemon.waiting import Waiter

pytestmark = pytest.mark.tier("test")

INHERITED = 1200
"""Number of inherited descriptors: more than select() supports."""


@pytest.fixture
def many() -> Iterator[list[int]]:
    """Open INHERITED descriptors, and set the soft limit of open files just above the highest of
    them."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(INHERITED)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 50, before[1]))
    try:
        yield opened
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Inheriting(Daemon):
    """A daemon that inherits INHERITED open descriptors."""

    def __init__(self, directory: Path, inherited: list[int], *args: str) -> None:
        self._inherited = inherited
        super().__init__("demo", directory, args)

    def begin(self) -> None:
        command = [self.python, "-m", "purgatoryd.cli", "run", "--name", self.name, *self.args]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=self.dir, env=self.env, stdout=subprocess.PIPE, stderr=log, bufsize=0,
                pass_fds=self._inherited,
            )  # fmt: skip


@pytest.mark.parametrize("args", [(), ("--shards", "1")])
def test_a_daemon_that_inherits_more_descriptors_than_select_takes(
    args: tuple[str, ...], many: list[int], daemon_dir: Path
) -> None:
    with contextlib.closing(Inheriting(daemon_dir, many, *args)) as real:
        with Client("demo") as client, Subscriber("demo") as subscriber:
            client.add("k", delay=0.05)
            notice = subscriber.get(30)
        assert notice is not None
        assert notice.key == "k"
        soft, hard = resource.prlimit(real.pid, resource.RLIMIT_NOFILE)
        assert soft == hard


def test_a_wait_ends_at_its_time_and_not_before() -> None:
    waiter = Waiter()
    for span_ns in (0, 1, 999, 300_000, 2_500_000):
        until_ns = boot_ns() + span_ns
        assert waiter.wait(until_ns) == frozenset()
        assert boot_ns() >= until_ns
    assert waiter.wait(0) == waiter.wait(-1) == frozenset()  # deadlines that passed long ago
    waiter.close()


def left_ns(timer: int) -> int:
    """Return the time in ns until a timerfd expires."""
    lines = Path(f"/proc/self/fdinfo/{timer}").read_text().splitlines()
    (value,) = [line for line in lines if line.startswith("it_value:")]
    seconds, nanoseconds = value.partition("(")[2].rstrip(")").split(",")
    return int(seconds) * 10**9 + int(nanoseconds)


@pytest.mark.alone
def test_a_wait_has_its_deadline_in_nanoseconds() -> None:
    """The kernel reports the remaining time. Its sums with the clock readings before and after must
    enclose the deadline. A deadline in whole milliseconds would often be outside of these
    bounds."""
    readable, speaker = os.pipe()
    os.write(speaker, b"x")
    waiter = Waiter([readable])
    widths_ns = []
    for number in range(500):
        until_ns = (boot_ns() // 10**9 + 3600) * 10**9 + number * 1_001_001
        assert waiter.wait(until_ns) == {readable}
        before_ns, left, after_ns = boot_ns(), left_ns(waiter._timer), boot_ns()
        assert before_ns + left <= until_ns <= after_ns + left
        widths_ns.append(after_ns - before_ns)
    assert min(widths_ns) < 1_000_000
    waiter.close()
    os.close(readable)
    os.close(speaker)


def test_a_wait_ends_for_a_descriptor_and_says_which() -> None:
    (quiet, silent), (loud, speaker) = os.pipe(), os.pipe()
    waiter = Waiter([quiet, loud])
    os.write(speaker, b"x")
    assert waiter.wait(2**63 - 1) == {loud}
    assert waiter.wait(2**63 - 1) == {loud}  # `loud` is reported until its byte is read
    os.read(loud, 1)
    assert waiter.wait(boot_ns()) == frozenset()
    waiter.watch([loud])
    os.write(silent, b"x")
    assert waiter.wait(boot_ns()) == frozenset()
    waiter.close()
    for fd in (quiet, silent, loud, speaker):
        os.close(fd)


def test_a_reused_descriptor_number_is_watched() -> None:
    first, other = os.pipe()
    waiter = Waiter([first])
    os.close(first)
    os.close(other)
    second, speaker = os.pipe()
    assert second == first
    waiter.watch([second])
    os.write(speaker, b"x")
    assert waiter.wait(2**63 - 1) == {second}
    waiter.watch([])
    os.close(second)
    os.close(speaker)
    waiter.close()


def test_a_wait_without_a_timer_is_refused_and_holds_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: int) -> int:
        ctypes.set_errno(errno.EMFILE)
        return -1

    monkeypatch.setattr(waiting, "_LIBC", SimpleNamespace(timerfd_create=fail))
    gc.collect()  # else objects of earlier tests may close their descriptors during this test
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Too many open files") as caught:
        Waiter()
    assert caught.value.errno == errno.EMFILE
    assert len(os.listdir("/proc/self/fd")) == len(before)
