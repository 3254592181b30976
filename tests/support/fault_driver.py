"""A daemon in which the Nth call of a libc function fails, waits, or kills the daemon: see
tests/fault/shim.c."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from real_daemon import PATIENCE_S, clean_environment, eventually

from purgatoryd.shm_layout.paths import paths_in

SOURCES = Path(__file__).parents[1] / "fault"


def build_library(name: str, directory: Path) -> Path:
    """Compile tests/fault/NAME.c to a library for LD_PRELOAD. Return its path."""
    library = directory / f"{name}.so"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", library, SOURCES / f"{name}.c"], check=True)
    return library


@dataclass(frozen=True)
class Fault:
    """A planned fault: the function `call` fails with errno `code`. If `code` is "KILL", the call
    kills the process instead."""

    call: str
    code: str

    def environment(self, shim: Path, nth: int, after: Path | None, log: Path) -> dict[str, str]:
        """Return the environment of a process in which the `nth` call of the function fails; 0 = no
        call fails. Calls are counted from the start of the process. If `after` is given, they are
        counted from the moment at which the file `after` exists."""
        number = 0 if self.code == "KILL" else getattr(errno, self.code)
        found = {"LD_PRELOAD": str(shim), "FAULT_LOG": str(log)}
        if after:
            found["FAULT_AFTER"] = str(after)
        if nth:
            found |= {"FAULT_CALL": self.call, "FAULT_NTH": str(nth), "FAULT_ERRNO": str(number)}
        return found


class Gate:
    """A gate in a process's first call of a libc function. The process waits there until the gate
    opens."""

    def __init__(self, call: str, shim: Path, path: Path) -> None:
        """Create a gate. `path`: path at which to create its FIFO."""
        self._path = path
        os.mkfifo(path)
        self.environment = {
            "LD_PRELOAD": str(shim), "FAULT_CALL": call, "FAULT_NTH": "1",
            "FAULT_GATE": str(path),
        }  # fmt: skip

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Wait until the process has reached the gate. Open the gate at the end of the block."""
        fd = eventually(self._reached)
        try:
            yield
        finally:
            os.close(fd)

    def _reached(self) -> int:
        """Return a descriptor of the FIFO; 0 = the process has not reached the gate yet."""
        with contextlib.suppress(OSError):
            return os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        return 0


class Victim:
    """A daemon with a planned fault, unless `nth` is 0. The daemon may end at any moment."""

    def __init__(
        self, directory: Path, args: tuple[str, ...], shim: Path, fault: Fault, nth: int,
        after: Path | None,
    ) -> None:  # fmt: skip
        self.paths = paths_in(directory, "demo")
        self.nth = nth
        self._log = directory / "fault.log"
        self._log.unlink(missing_ok=True)
        self._stderr = directory / "victim.stderr"
        env = clean_environment(directory) | fault.environment(shim, nth, after, self._log)
        command = [sys.executable, "-m", "purgatoryd.cli", "run", "--name", "demo", *args]
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=stderr, bufsize=0
            )
        self.ready = self._ready()

    def _ready(self) -> bool:
        assert self.process.stdout is not None
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            if select.select([self.process.stdout], [], [], 0.1)[0]:
                return self.process.stdout.readline().startswith(b"ready")
        raise AssertionError("the daemon neither became ready nor ended")

    @property
    def running(self) -> bool:
        """Return False once the daemon has ended."""
        return self.process.poll() is None

    @property
    def hit(self) -> bool:
        """Return True once the planned call has failed."""
        return self.nth > 0 and self._log.exists()

    @property
    def calls(self) -> Counter[str]:
        """Return the number of calls of each function. The daemon must have ended, and must have
        had no planned fault."""
        lines = map(str.split, self._log.read_text().splitlines())
        return Counter({name: int(count) for name, count in lines})

    @property
    def stderr(self) -> str:
        """Return the output of the daemon to stderr."""
        return self._stderr.read_text()

    def end(self) -> int:
        """Return the exit code, or -N if signal N ended the daemon. A daemon that still runs
        receives SIGTERM."""
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


class End(NamedTuple):
    """The end of a daemon whose `nth` call failed. Exit code -N: signal N ended the daemon."""

    nth: int
    code: int
    ready: bool
    stderr: str


class Walk:
    """A daemon that stops at each call of a function, and forks a child process in which that call
    fails.

    So the work before the call is done only once. The daemon itself ends without a fault. If
    `every` is N, only the first of each N calls is tried.
    """

    def __init__(
        self, directory: Path, args: tuple[str, ...], shim: Path, fault: Fault, every: int,
    ) -> None:  # fmt: skip
        self._stderr = directory / "victim.stderr"
        self._stderr.touch()
        self._ends, out = os.pipe()
        into, self._go = os.pipe()
        env = clean_environment(directory) | {
            "LD_PRELOAD": str(shim), "FAULT_CALL": fault.call,
            "FAULT_ERRNO": str(getattr(errno, fault.code)), "FAULT_WALK": f"{out} {into} {every}",
            "FAULT_UNTIL": str(paths_in(directory, "demo").lock),
        }  # fmt: skip
        command = [sys.executable, "-m", "purgatoryd.cli", "run", "--name", "demo", *args]
        with self._stderr.open("ab") as stderr:
            self._process = subprocess.Popen(
                command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=stderr,
                pass_fds=(out, into),
            )  # fmt: skip
        os.close(out)
        os.close(into)

    def ends(self) -> Iterator[End]:
        """Yield the end of each child process. Then the daemon continues to its next call. The
        daemon must end with exit code 0."""
        ready = False
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        try:
            while self._process.poll() is None:
                received = select.select([out, self._ends], [], [], 0.1)[0]
                if out in received and (line := self._process.stdout.readline()):
                    ready = True
                    os.kill(int(line.split(b"pid=")[1].split()[0]), signal.SIGTERM)
                elif self._ends in received and (reported := os.read(self._ends, 64)):
                    yield self._end(reported, ready)
                    os.write(self._go, b".")
                    ready = False
            assert self._process.returncode == 0, self._stderr.read_text()
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            os.close(self._ends)
            os.close(self._go)

    def _end(self, reported: bytes, ready: bool) -> End:
        nth, status = map(int, reported.split())
        said = self._stderr.read_text()
        os.truncate(self._stderr, 0)
        return End(nth, os.waitstatus_to_exitcode(status), ready, said)


def numbers(calls: int, complete: bool) -> Iterator[int]:
    """Yield the values of `nth` to try, one for each daemon to start. If `complete`, every one of
    the `calls` calls fails once; otherwise the distances between the failing calls grow."""
    nth = 1
    while nth <= calls:
        yield nth
        nth = nth + 1 if complete or nth < 2 else 3 * nth


EVERY = int(os.environ.get("FAULT_EVERY", "0"))
COMPLETE = os.environ.get("CRASH_TEST") == "complete"
