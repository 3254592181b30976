"""A daemon whose Nth call of a libc function fails, or kills it: tests/fault/shim.c."""

from __future__ import annotations

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

from real_daemon import PATIENCE_S, clean_environment

from purgatoryd.shm_layout.paths import paths_in

SOURCES = Path(__file__).parent / "fault"


def build_library(name: str, directory: Path) -> Path:
    """tests/fault/NAME.c, compiled, to be preloaded."""
    library = directory / f"{name}.so"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", library, SOURCES / f"{name}.c"], check=True)
    return library


@dataclass(frozen=True)
class Fault:
    """`call` fails with errno `code`; with "KILL" the process is killed there instead."""

    call: str
    code: str

    def environment(self, shim: Path, nth: int, after: Path | None, log: Path) -> dict[str, str]:
        """For a process whose `nth` call fails, counted once the path `after` exists; 0 = none."""
        number = 0 if self.code == "KILL" else getattr(errno, self.code)
        found = {"LD_PRELOAD": str(shim), "FAULT_LOG": str(log)}
        if after:
            found["FAULT_AFTER"] = str(after)
        if nth:
            found |= {"FAULT_CALL": self.call, "FAULT_NTH": str(nth), "FAULT_ERRNO": str(number)}
        return found


class Victim:
    """A daemon with a fault to come, if `nth` is not 0. It may end at any moment."""

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
        raise AssertionError("it neither began nor ended")

    @property
    def running(self) -> bool:
        """False once it has ended."""
        return self.process.poll() is None

    @property
    def hit(self) -> bool:
        """True once the call has failed."""
        return self.nth > 0 and self._log.exists()

    @property
    def calls(self) -> Counter[str]:
        """How often each function was called, where none failed and the daemon has ended."""
        lines = map(str.split, self._log.read_text().splitlines())
        return Counter({name: int(count) for name, count in lines})

    @property
    def stderr(self) -> str:
        """What it said."""
        return self._stderr.read_text()

    def end(self) -> int:
        """The exit code, after a SIGTERM if it still runs; negative = a signal."""
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


def numbers(calls: int, complete: bool) -> Iterator[int]:
    """Which of so many calls fail: all of them, or further and further apart."""
    nth = 1
    while nth <= calls:
        yield nth
        nth = nth + 1 if complete or nth < 3 else 2 * nth


COMPLETE = os.environ.get("CRASH_TEST") == "complete"
