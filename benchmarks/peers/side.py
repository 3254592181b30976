"""Servers, jobs, keys and CPU clocks, which all sides of the comparison share.

A side is a file with the functions `missing` and `server`, and the work of its clients. The
libraries of a peer are optional, so only its own file imports them.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import psutil

PATIENCE_S = 120.0
HOUR_S = 3600.0
KEY_BYTES, PAYLOAD_BYTES = 16, 48
PAYLOAD = bytes(PAYLOAD_BYTES)
ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
Run = Callable[[], object]
"""The part of a client's work that is measured."""


@dataclass(frozen=True)
class Server:
    """A running server. `address`: its socket, or the directory of its sockets. `pids`: its
    processes. `family`: whether their children count as well."""

    address: Path
    pids: tuple[int, ...]
    family: bool = False

    def cpu_s(self) -> float:
        """Return the CPU time that all its processes have used, in seconds."""
        return sum(map(cpu_s, self.processes()))

    def processes(self) -> list[int]:
        """Return the pids of all its processes."""
        children = [
            child.pid
            for pid in self.pids
            if self.family
            for child in psutil.Process(pid).children(recursive=True)
        ]
        return [*self.pids, *children]

    def memory_bytes(self) -> int:
        """Return the memory that only its processes use."""
        return sum(psutil.Process(pid).memory_full_info().uss for pid in self.processes())


Prepare = Callable[[Server, "Job"], Run]
"""Connects a client and prepares its work; runs in the client's process."""


@dataclass(frozen=True)
class Start:
    """Parameters of a server.

    `directory`: for its sockets; `files`: for files that must be on a disk. `timers`: the largest
    number that will be pending. `log`: "" for none, "always" = an answer follows the sync, "later"
    = the disk follows the answer.
    """

    directory: Path
    files: Path
    timers: int
    log: str = ""


@dataclass(frozen=True)
class Job:
    """The work of one client. `count`: number of keys; `per_call`: keys of one call; `gap_s`: time
    from the begin of a call to the next one, 0 = none. `timed`: note in `times_ns` when each call
    begins, and when the last one ends."""

    count: int
    per_call: int = 1
    worker: int = 0
    gap_s: float = 0.0
    timed: bool = False
    times_ns: list[int] = field(default_factory=list, compare=False)

    def keys(self) -> list[bytes]:
        """Return this client's keys; no other client has them."""
        return [b"%05d%011d" % (self.worker, n) for n in range(self.count)]

    def delays_s(self) -> list[float]:
        """Return a delay for each key: one to two hours, in an order that looks random."""
        return [HOUR_S + n * 2_654_435_761 % 3_600_000 / 1000 for n in range(self.count)]

    def timers(self) -> list[tuple[bytes, float]]:
        """Return (key, delay in seconds) of each timer."""
        return list(zip(self.keys(), self.delays_s(), strict=True))

    def calls(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Return the items in slices of one call."""
        return [items[at : at + self.per_call] for at in range(0, len(items), self.per_call)]

    def paced(self, items: Sequence[T]) -> Iterator[T]:
        """Yield the items, each at its time."""
        if self.timed:
            yield from self._timed(items)
            return
        if not self.gap_s:
            yield from items
            return
        begun_s = time.monotonic() + self.worker % 256 / 256 * self.gap_s
        for number, item in enumerate(items):
            time.sleep(max(0.0, begun_s + number * self.gap_s - time.monotonic()))
            yield item

    def _timed(self, items: Sequence[T]) -> Iterator[T]:
        for item in items:
            self.times_ns.append(time.perf_counter_ns())
            yield item
        self.times_ns.append(time.perf_counter_ns())

    def call_us(self) -> list[float]:
        """Return the time of each call of a timed job in us."""
        return [(end_ns - begin_ns) / 1000 for begin_ns, end_ns in pairwise(self.times_ns)]


def cpu_s(pid: int) -> float:
    """Return the CPU time that all threads of a process have used, in seconds."""
    return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED of the process, as in the kernel


def boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def stamped(deadline_ns: int) -> bytes:
    """Return a payload that begins with a deadline."""
    return deadline_ns.to_bytes(8, "little") + PAYLOAD[8:]


def stamp(payload: bytes) -> int:
    return int.from_bytes(payload[:8], "little")


def lacking(programs: Sequence[str], modules: Sequence[str]) -> str:
    """Return which of these programs and Python modules are not installed, or ""."""
    absent = [f"program {name}" for name in programs if program(name) is None]
    absent += [f"Python module {name}" for name in modules if find_spec(name) is None]
    return ", ".join(absent)


def program(name: str) -> str | None:
    """Return the path of a server's program, also if only root has its folder in PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


@contextmanager
def child(
    command: Sequence[str], ready: Callable[[], bool], user: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[int]:  # fmt: skip
    """Run a server; yield its pid once it is ready; at the end stop it."""
    account = pwd.getpwnam(user) if user else None
    ids: dict[str, Any] = {"user": account.pw_uid, "group": account.pw_gid} if account else {}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})}, **ids,
    )  # fmt: skip
    try:
        await_ready(process, ready)
        yield process.pid
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def await_ready(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    """Wait until a server is ready; raise SystemExit if it ends or takes too long."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not ready():
        if process.poll() is not None or time.monotonic() > give_up_s:
            raise SystemExit(f"{process.args!r} did not start")
        time.sleep(0.002)
