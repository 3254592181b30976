"""Measure the cost of a daemon at rest, and at work with timers and with operations.

At rest means that no timer is due and no client sends requests. Daemons that differ in one property
(timers that are far from due, a subscriber, a watchdog, shards) run side by side, and all are
measured in the same windows. At work a client arms timers or operations at a steady rate, and all
of them end. This is measured in three alternating ways: in memory, with a WAL, and with calls that
wait for the disk. CPU time is the time of all threads of the daemon, as the kernel's scheduler
counts it. Writes benchmarks/results/idle.json, and the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from own_daemon import own_daemon
from recording import machine, spread, write_result, write_section

from purgatoryd.clients import AllOf, Client, Purgatory
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.paths import paths_in

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "idle.json"
WAKEUPS_MAX, CORE_PERCENT_MAX = 2.0, 0.3
"""Targets at rest: at most this number of wake-ups per second, and this percentage of a core."""
PATIENCE_S = 120.0
CHUNK = 100_000
FAR_S = 86_400
SETTLE_S = 35.0
"""Time until a daemon is at rest. It sends tail heartbeats for 30 s after a topic's last notice."""
BATCHES_PER_S = 20
DUE_S = 1.0
WATCHDOG_US = 5_000_000
"""Watchdog interval in microseconds, as in systemd/purgatoryd.service."""
LISTENER = (
    "import sys\n"
    "from purgatoryd.clients import Subscriber\n"
    "with Subscriber(sys.argv[1], topics=['busy']) as inbox:\n"
    "    print(flush=True)\n"
    "    for _ in inbox: pass\n"
)


@dataclass(frozen=True)
class Used:
    """Wake-ups and CPU time of all threads of a daemon and its shards up to the time `at_s`."""

    at_s: float
    wakeups: int
    cpu_ns: int


def used(pid: int) -> Used:
    wakeups = cpu_ns = 0
    for process in (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))):
        for task in Path(f"/proc/{process}/task").iterdir():
            status = dict(line.split(":\t") for line in (task / "status").read_text().splitlines())
            wakeups += int(status["voluntary_ctxt_switches"])
            cpu_ns += int((task / "schedstat").read_text().split()[0])
    return Used(time.monotonic(), wakeups, cpu_ns)


@contextmanager
def listener(name: str) -> Iterator[None]:
    """Run a subscriber of the daemon in its own process."""
    command = [sys.executable, "-c", LISTENER, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()


# ---- at rest -------------------------------------------------------------------------------------


def fill(name: str, timers: int) -> None:
    """Arm timers that are due in one to two days."""
    with Client(name, timeout=PATIENCE_S) as client:
        for first in range(0, timers, CHUNK):
            numbers = range(first, min(first + CHUNK, timers))
            client.add_many({
                "key": [f"far:{n}" for n in numbers],
                "delay": [FAR_S + n % FAR_S for n in numbers],
            })  # fmt: skip


@contextmanager
def manager(directory: Path) -> Iterator[dict[str, str]]:
    """Receive a daemon's watchdog messages like a service manager; yield the environment variables
    for the daemon."""
    address = str(directory / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(address)
        hearer = threading.Thread(target=_hear, args=(inbox,))
        hearer.start()
        try:
            yield {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(WATCHDOG_US)}
        finally:
            inbox.sendto(b"", address)
            hearer.join()


def _hear(inbox: socket.socket) -> None:
    while inbox.recv(4096):
        pass


@contextmanager
def resting(directory: Path, timers: int) -> Iterator[dict[str, int]]:
    """Start the daemons to measure at rest; yield {distinguishing property: pid}."""
    slots = timers + CHUNK
    large = ["--capacity", str(slots), "--payload-memory", str(64 * slots)]
    full = f"{timers:,} timers"
    with ExitStack() as stack:
        reported = stack.enter_context(manager(directory))
        found = {
            subject: stack.enter_context(own_daemon(directory, name, settings, environment))
            for subject, name, settings, environment in (
                (full, "full", large, {}),
                (f"{full}, a subscriber", "received", large, {}),
                ("no timer", "empty", [], {}),
                ("no timer, a watchdog", "watched", [], reported),
                ("no timer, two shards", "two", ["--shards", "2"], {}),
                ("no timer, three shards", "three", ["--shards", "3"], {}),
            )
        }
        for name in ("full", "received"):
            fill(name, timers)
        stack.enter_context(listener("received"))
        yield found


def window(pids: dict[str, int], seconds: float) -> dict[str, tuple[float, float]]:
    """Return (wake-ups per second, percentage of a core) of each daemon during a window."""
    before = {subject: used(pid) for subject, pid in pids.items()}
    time.sleep(seconds)
    return {subject: between(before[subject], used(pid)) for subject, pid in pids.items()}


def between(before: Used, after: Used) -> tuple[float, float]:
    seconds = after.at_s - before.at_s
    return (
        round((after.wakeups - before.wakeups) / seconds, 3),
        round((after.cpu_ns - before.cpu_ns) / seconds / 1e7, 4),
    )


def at_rest(directory: Path, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    with resting(directory, arguments.timers) as pids:
        time.sleep(arguments.settle)
        windows = [window(pids, arguments.seconds) for _ in range(arguments.windows)]
    return {
        subject: {
            "wakeups_per_s": spread([one[subject][0] for one in windows]),
            "core_percent": spread([one[subject][1] for one in windows]),
        }
        for subject in pids
    }


# ---- at work -------------------------------------------------------------------------------------


def timers_fired(owner: Purgatory, keys: list[str]) -> None:
    owner.add_many({"key": keys, "delay": [DUE_S] * len(keys)}, topic="busy")


def timers_cancelled(owner: Purgatory, keys: list[str]) -> None:
    timers_fired(owner, keys)
    owner.cancel_many(keys)


def watched(owner: Purgatory, keys: list[str], timeout_s: float) -> dict[str, int]:
    """Arm operations, each with its own watch key; return the watch keys with the watermarks that
    end the operations."""
    watermarks = {f"watermark:{key}": 1 for key in keys}
    owner.watch_many(
        (key, AllOf({watermark: 1}, own=[watermark]), timeout_s)
        for key, watermark in zip(keys, watermarks, strict=True)
    )
    return watermarks


def operations_satisfied(owner: Purgatory, keys: list[str]) -> None:
    owner.advance_many(watched(owner, keys, PATIENCE_S))


def operations_timed_out(owner: Purgatory, keys: list[str]) -> None:
    watched(owner, keys, DUE_S)


Load = Callable[[Purgatory, list[str]], None]
LOADS: dict[str, tuple[Load, bool]] = {
    "timers: armed, fired": (timers_fired, False),
    "timers: armed, cancelled": (timers_cancelled, False),
    "operations: armed, satisfied": (operations_satisfied, True),
    "operations: armed, timed out": (operations_timed_out, True),
}
"""For each kind of work: (function that does one batch, whether it arms operations)."""
WAYS = {
    "in memory": ("memory", False),
    "with a WAL": ("disk", False),
    "durable": ("disk", True),
}
"""For each way: (name of the daemon, whether calls wait for the disk)."""


@dataclass(frozen=True)
class Worked:
    """Rate and CPU time of a series of batches, from the first call until all timers or operations
    have ended."""

    per_s: int
    cpu_ms_per_100k: float


@dataclass(frozen=True)
class Bench:
    """One way to use a daemon at work: the daemon, a client and a reader of its statistics."""

    pid: int
    owner: Purgatory
    reader: Reader

    def work(self, load: Load, per_s: int, seconds: float) -> Worked:
        """Run a load for `seconds` and wait until all its timers or operations have ended; return
        the rate and the CPU time."""
        batch, batches = per_s // BATCHES_PER_S, int(seconds * BATCHES_PER_S)
        before = used(self.pid)
        for number in range(batches):
            load(self.owner, [f"{number}:{n}" for n in range(batch)])
            time.sleep(max(0.0, before.at_s + (number + 1) / BATCHES_PER_S - time.monotonic()))
        armed_s = time.monotonic() - before.at_s
        while self.reader.stats()["live"] or self.owner.operations:
            time.sleep(1 / BATCHES_PER_S)
        cpu_ns = used(self.pid).cpu_ns - before.cpu_ns
        done = batch * batches
        return Worked(round(done / armed_s), round(cpu_ns / done / 10, 1))


@contextmanager
def benches(directory: Path, rate: int) -> Iterator[dict[str, Bench]]:
    """Start the daemons, and connect an owner for each way."""
    space = ["--capacity", str(4 * rate), "--payload-memory", str(1024 * rate)]
    wal = ["--wal-dir", str(directory / "wal")]
    with ExitStack() as stack:
        pids = {
            name: stack.enter_context(own_daemon(directory, name, [*space, *more]))
            for name, more in (("memory", []), ("disk", wal))
        }
        for name in pids:
            stack.enter_context(listener(name))
        found = {}
        for way, (name, durable) in WAYS.items():
            owner = stack.enter_context(Purgatory(name, timeout=PATIENCE_S, durable=durable))
            reader = Reader.attach(paths_in(directory, name))
            stack.callback(reader.close)
            found[way] = Bench(pids[name], owner, reader)
        yield found


def at_work(directory: Path, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    rates = {False: arguments.rate, True: arguments.operations}
    found: dict[str, dict[str, list[Worked]]] = {
        subject: {way: [] for way in WAYS} for subject in LOADS
    }
    with benches(directory, arguments.rate) as ways_to_work:
        for _ in range(arguments.rounds):
            for subject, (load, operations) in LOADS.items():
                for way, bench in ways_to_work.items():
                    found[subject][way].append(bench.work(load, rates[operations], arguments.work))
    return {
        subject: {way: summary(runs) for way, runs in ways.items()}
        for subject, ways in found.items()
    }


def summary(runs: list[Worked]) -> dict[str, Any]:
    return {
        "per_s": min(one.per_s for one in runs),
        "cpu_ms_per_100k": spread([one.cpu_ms_per_100k for one in runs]),
    }


# ---- the command ---------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="purgatoryd-bench-", dir=arguments.directory) as name:
        os.environ["PURGATORYD_DIR"] = name
        rest = at_rest(Path(name), arguments)
        work = at_work(Path(name), arguments)
    return {
        "command": "make bench-idle", "machine": machine(), "load_average": os.getloadavg(),
        "windows": arguments.windows, "rounds": arguments.rounds, "at_rest": rest, "at_work": work,
        "limit": {"wakeups_per_s": WAKEUPS_MAX, "core_percent": CORE_PERCENT_MAX},
    }  # fmt: skip


def shown(one: dict[str, float], digits: int) -> str:
    return f"{one['median']:,.{digits}f} [{one['low']:,.{digits}f} - {one['high']:,.{digits}f}]"


def met(one: dict[str, dict[str, float]]) -> bool:
    wakeups, percent = one["wakeups_per_s"]["median"], one["core_percent"]["median"]
    return wakeups <= WAKEUPS_MAX and percent <= CORE_PERCENT_MAX


def rest_table(found: dict[str, Any]) -> str:
    rows = [
        f"| at rest | wake-ups per second | % of a core "
        f"| at most {WAKEUPS_MAX:g} and {CORE_PERCENT_MAX:g} % |",
        "| --- | --- | --- | --- |",
        *(
            f"| {subject} | {shown(one['wakeups_per_s'], 1)} | {shown(one['core_percent'], 3)} "
            f"| {'' if 'shards' in subject else 'met' if met(one) else 'missed'} |"
            for subject, one in found["at_rest"].items()
        ),
    ]
    return "\n".join(rows) + "\n"


def work_table(found: dict[str, Any]) -> str:
    rows = [
        f"| processor time for 100,000, in ms | per second | {' | '.join(WAYS)} |",
        f"| --- | --- |{' --- |' * len(WAYS)}",
        *(
            f"| {subject} | {min(one['per_s'] for one in ways.values()):,} | "
            f"{' | '.join(shown(ways[way]['cpu_ms_per_100k'], 0) for way in WAYS)} |"
            for subject, ways in found["at_work"].items()
        ),
    ]
    return "\n".join(rows) + "\n"


def write(found: dict[str, Any]) -> None:
    write_result(RESULTS, found)
    write_section("idle", f"{rest_table(found)}\n{work_table(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--timers", type=int, default=1_000_000, help="timers at rest, far from due"
    )
    parser.add_argument(
        "--settle", type=float, default=SETTLE_S, help="seconds before the first window"
    )
    parser.add_argument("--windows", type=int, default=5, help="windows at rest")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of a window")
    parser.add_argument("--rounds", type=int, default=3, help="rounds at work")
    parser.add_argument("--work", type=float, default=5.0, help="seconds of a load in a round")
    parser.add_argument("--rate", type=int, default=100_000, help="timers per second")
    parser.add_argument("--operations", type=int, default=5_000, help="operations per second")
    parser.add_argument("--directory", type=Path, help="folder for the WAL; on a disk")
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    arguments = parser.parse_args()
    found = measure(arguments)
    print(json.dumps(found, indent=1))
    if not arguments.dry:
        write(found)


if __name__ == "__main__":
    main()
