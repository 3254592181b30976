"""Measure what it costs to count, list, cancel and move pending timers.

A daemon has --timers timers with tags and random deadlines, in memory or with a WAL. One client
selects all of them. CPU time is the time of all threads of the daemon, as the kernel's scheduler
counts it.

Next to it, a process asks for one timer again and again, and another receives notices that are due
every 4 ms. Their waits and lateness are measured while all timers are moved and cancelled, and for
as long without that: the difference is the part of the sweep, the rest that of the machine. The
longest step of the loop is measured in an arena of this process, as CPU time of one call of
pg_advance, because it does not depend on other processes.

Writes benchmarks/results/pending.json, and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from own_daemon import own_daemon
from recording import machine, spread, spread_text, write_result, write_section

from purgatoryd.clients import Client, Subscriber
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import SweepAction, SweepChange
from purgatoryd.shm_layout.private_arena import Limits, PrivateArena

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "pending.json"
PATIENCE_S = 120.0
TARGET_MS = 500.0
"""Target for the CPU time of 1,000,000 cancels or moves, in ms."""
PAUSE_MS = 2.0
"""Target for the longest step of the loop, in ms."""
NOTICE_GAP_S = 0.004
NOTICES = 10_000
CHUNK = 100_000
PROBES = ("a look-up", "a notice")
Call = Callable[[Client], int]
CALLS: dict[str, Call] = {
    "count by tag": lambda c: c.count_timers(tag="t"),
    "list the first 1,000": lambda c: len(c.list_timers(limit=1000)),
    "shift": lambda c: c.reschedule_where(shift=60).done,
    "shift by tag": lambda c: c.reschedule_where(shift=60, tag="t").done,
    "move by prefix": lambda c: c.reschedule_where(delay=9000, prefix="key").done,
    "cancel": lambda c: c.cancel_where().done,
}


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process, also of those that have ended."""
    return time.clock_gettime_ns(~pid << 3 | 2)  # the clock of clock_getcpuclockid(3)


def queued_ns(pid: int) -> int:
    """Return for how long the threads of a process were ready to run, but waited for a CPU."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks)


def fill(client: Client, timers: int) -> None:
    """Add the timers."""
    deadlines = np.random.default_rng(1).uniform(3600, 7200, timers)
    for first in range(0, timers, CHUNK):
        some = deadlines[first : first + CHUNK]
        table = {
            "key": [f"key:{first + n}" for n in range(len(some))],
            "delay": some,
            "payload": [b"p" * 32] * len(some),
        }
        client.add_many(table, tag="t")


def boot_s() -> float:
    """Return the time of the boot clock, in s."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def look_up(name: str, stop: Event, ready: Event) -> list[tuple[float, float]]:
    """Ask for one timer until `stop` is set. Return (boot time in s, wait in ms) of each call."""
    waits = []
    with Client(name, namespace="probe", timeout=PATIENCE_S) as client:
        client.get("k")
        ready.set()
        while not stop.is_set():
            start_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            client.get("k")
            waits.append((start_s, (time.clock_gettime(time.CLOCK_BOOTTIME) - start_s) * 1000))
    return waits


def receive(name: str, stop: Event, ready: Event) -> list[tuple[float, float]]:
    """Receive notices until `stop` is set. Return (deadline on the boot clock in s, lateness in ms)
    of each."""
    late = []
    with (
        Subscriber(name, namespace="probe", topics=["n"]) as notices,
        Client(name, namespace="probe", timeout=PATIENCE_S) as client,
    ):
        client.add_many([(f"n{i}", NOTICE_GAP_S * i) for i in range(NOTICES)], topic="n")
        ready.set()
        while not stop.is_set():
            notice = notices.get(timeout=0.1)
            if notice is not None:
                received_ns = notice.received_boot_ns or 0
                late.append((notice.deadline_boot_ns / 1e9,
                             (received_ns - notice.deadline_boot_ns) / 1e6))  # fmt: skip
        client.cancel_where(prefix="n")
    return late


@contextmanager
def probes(name: str) -> Iterator[Callable[[], list[list[tuple[float, float]]]]]:
    """Run both probes in processes of their own. Yield a function that ends them and returns what
    they measured."""
    processes = get_context("spawn")
    with processes.Manager() as manager, processes.Pool(2) as pool:
        stop: Any = manager.Event()
        ready: list[Any] = [manager.Event(), manager.Event()]
        running = [
            pool.apply_async(probe, (name, stop, event))
            for probe, event in zip((look_up, receive), ready, strict=True)
        ]
        for event in ready:
            event.wait()

        def end() -> list[list[tuple[float, float]]]:
            stop.set()
            return [result.get(PATIENCE_S) for result in running]

        yield end


def figures_of(samples: list[tuple[float, float]], from_s: float, to_s: float) -> dict[str, float]:
    """Return percentiles of the samples of a span of time, in ms."""
    waits_ms = [ms for at_s, ms in samples if from_s <= at_s < to_s]
    return {
        "samples": len(waits_ms),
        **{f"p{p}_ms": float(np.percentile(waits_ms, p)) for p in (50, 99, 99.9, 100)},
    }


def pauses(name: str, pid: int, client: Client, timers: int) -> dict[str, dict[str, float]]:
    """Return what the probes measure while all timers are moved and cancelled, and without that."""
    with probes(name) as end:
        time.sleep(1)  # the imports of the processes are over
        begun_s, before_ns = boot_s(), queued_ns(pid)
        assert client.reschedule_where(shift=60, tag="t").done == timers
        assert client.cancel_where(prefix="key").done == timers
        ended_s, between_ns = boot_s(), queued_ns(pid)
        time.sleep(ended_s - begun_s)
        after_ns, measured = queued_ns(pid), end()
    found = {
        "waits of the daemon for a CPU": {
            "meanwhile_ms": (between_ns - before_ns) / 1e6,
            "without_ms": (after_ns - between_ns) / 1e6,
            "elapsed_ms": (ended_s - begun_s) * 1e3,
        }
    }
    for probe, samples in zip(PROBES, measured, strict=True):
        found[f"{probe} meanwhile"] = figures_of(samples, begun_s, ended_s)
        found[f"{probe} without"] = figures_of(samples, ended_s, 2 * ended_s - begun_s)
    return found


def longest_steps(timers: int) -> dict[str, dict[str, float]]:
    """Return CPU time and number of the steps of a move and of a cancel of all timers, in an arena
    of this process."""
    limits = Limits(timers * 6 // 5, 1, 1, 300_000_000, 10**9)
    arena, handle = PrivateArena(limits, 0, bytes(16)), ffi.new("struct pg_result *")
    payload, more, found = ffi.from_buffer(b"p" * 32), ffi.new("int *"), {}
    deadlines = np.random.default_rng(1).uniform(3600e9, 7200e9, timers).astype("i8").tolist()
    for number, deadline_ns in enumerate(deadlines):
        key = f"key:{number}".encode()
        key_bytes = ffi.from_buffer(key)
        put = ffi.new("struct pg_put *", {
            "namespace_name": ffi.from_buffer(b"n"), "topic_name": ffi.from_buffer(b"t"),
            "key": ffi.cast("uint8_t *", key_bytes), "payload": ffi.cast("uint8_t *", payload),
            "payload_len": 32, "namespace_len": 1, "topic_len": 1, "key_len": len(key),
            "key_type": 0, "time_ns": deadline_ns,
        })  # fmt: skip
        lib.pg_put(arena._a, put, handle)
    for change, call, by_ns in (
        (SweepChange.SHIFT, "shift", 60 * 10**9), (SweepChange.CANCEL, "cancel", 0),
    ):  # fmt: skip
        ask = wire.encode_sweep(
            1, arena.session, bytes([change + 1]) * 16, SweepAction.BEGIN, wire.Select(b"n"),
            change=change, time_ns=by_ns,
        )  # fmt: skip
        arena.handle(ask, 0)
        steps_ms, more[0] = [], 1
        while more[0]:
            before_ns = time.thread_time_ns()
            lib.pg_advance(arena._a, 0, 0, 0, 4096, more)
            steps_ms.append((time.thread_time_ns() - before_ns) / 1e6)
        found[f"longest step of a {call}"] = {"max_ms": max(steps_ms), "steps": len(steps_ms)}
    arena.close()
    return found


def measure(name: str, pid: int, timers: int) -> dict[str, dict[str, float]]:
    """Return CPU time and elapsed time by call, pauses, and the longest steps."""
    found: dict[str, dict[str, float]] = {}
    with Client(name, timeout=PATIENCE_S) as client:
        fill(client, timers)
        for call, act in CALLS.items():
            before_ns, start_s = cpu_ns(pid), time.perf_counter()
            done = act(client)
            elapsed_ms = (time.perf_counter() - start_s) * 1000
            assert done in (timers, min(timers, 1000)), (call, done)
            found[call] = {
                "cpu_ms": (cpu_ns(pid) - before_ns) / 1e6,
                "elapsed_ms": elapsed_ms,
            }
        fill(client, timers)
        return found | pauses(name, pid, client, timers) | longest_steps(timers)


def cell(samples: list[float], digits: int) -> str:
    """Return median, lowest and highest sample."""
    return spread_text(spread(samples), f",.{digits}f")


def rows_of(results: dict[str, list[dict[str, dict[str, float]]]]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| processor time in ms | in memory | with a WAL | at most 500 |",
        "| --- | --- | --- | --- |",
    ]
    for call in CALLS:
        runs = {way: [run[call]["cpu_ms"] for run in found] for way, found in results.items()}
        changes = call.startswith(("shift", "move", "cancel"))
        met = max(max(run) for run in runs.values()) <= TARGET_MS
        verdict = ("met" if met else "missed") if changes else ""
        cells = " | ".join(cell(run, 0) for run in runs.values())
        lines.append(f"| {call} | {cells} | {verdict} |")
    for call in ("shift", "cancel"):
        name = f"longest step of a {call}"
        runs = {way: [run[name]["max_ms"] for run in found] for way, found in results.items()}
        steps = runs["in memory"] + runs["with a WAL"]  # both are without a WAL
        verdict = "met" if max(steps) <= PAUSE_MS else "missed"
        lines.append(f"| *{name}*, at most {PAUSE_MS:.0f} | {cell(steps, 2)} | | {verdict} |")
    delays = []
    for found in results.values():
        waits = [run["waits of the daemon for a CPU"] for run in found]
        meanwhile, without = (
            cell([run[f"{when}_ms"] for run in waits], 0) for when in ("meanwhile", "without")
        )
        delays.append(f"{meanwhile}; without a sweep {without}")
    lines.append(f"| *waits* of the daemon's threads for a CPU, sum | {' | '.join(delays)} | |")
    for probe, measure_of in zip(
        PROBES, ("*wait* of a look-up", "*lateness* of a notice"), strict=True
    ):
        for share in ("99", "99.9", "100"):
            shown = []
            for found in results.values():
                meanwhile, without = (
                    cell([run[f"{probe} {when}"][f"p{share}_ms"] for run in found], 2)
                    for when in ("meanwhile", "without")
                )
                shown.append(f"{meanwhile}; without a sweep {without}")
            lines.append(f"| {measure_of} meanwhile, p{share} | {' | '.join(shown)} | |")
    return lines


def main() -> None:
    """Measure both ways `--repetitions` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timers", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few timers, no result")
    arguments = parser.parse_args()
    timers = 60_000 if arguments.quick else arguments.timers
    results: dict[str, list[dict[str, Any]]] = {"in memory": [], "with a WAL": []}
    for _ in range(1 if arguments.quick else arguments.repetitions):
        for way, found in results.items():
            with tempfile.TemporaryDirectory() as folder:
                os.environ["PURGATORYD_DIR"] = folder
                settings = ["--capacity", str(timers * 6 // 5), "--payload-memory", "300M",
                            "--replay-memory", "16M"]  # fmt: skip
                settings += ["--wal-dir", f"{folder}/wal"] if way == "with a WAL" else []
                with own_daemon(Path(folder), "pending", settings, own_core=True) as pid:
                    found.append(measure("pending", pid, timers))
    lines = rows_of(results)
    print("\n".join(lines))
    if not arguments.quick:
        write_result(RESULTS, {**machine(), "timers": timers, "results": results})
        write_section("pending", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
