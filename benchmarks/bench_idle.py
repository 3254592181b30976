"""Measures what a daemon costs: at rest, with timers that are far from due, and at work.

At rest means that nothing is due and nobody asks; it is measured without and with a subscriber.
At work a client arms timers at a steady rate, and they fire a second later, or are cancelled.
Processor time is that of all threads of the daemon, as the kernel's scheduler counts it. Writes
benchmarks/results/idle.json, the tables of docs/benchmarks.md, and that of work in
docs/operations.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from os import environ, getloadavg
from pathlib import Path
from typing import Any

from bench_purgatory import machine
from own_daemon import own_daemon

from purgatoryd.clients import Client

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "idle.json"
PAGE = ROOT / "docs" / "benchmarks.md"
SIZES = ROOT / "docs" / "operations.md"
BEGIN, END = "<!-- idle: begin -->\n", "<!-- idle: end -->\n"
WAKEUPS_MAX, CORE_PERCENT_MAX = 2.0, 0.3
"""Aims, per second and of a core, at rest."""
NAME = "bench"
PATIENCE_S = 120.0
CHUNK = 100_000
FAR_S = 86_400
SETTLE_S = 35.0
"""After the last notice, topics are told of for 30 s."""
BATCHES_PER_S = 20
DUE_S = 1.0
LISTENER = (
    "from purgatoryd.clients import Subscriber\n"
    f"with Subscriber({NAME!r}, topics=['busy']) as inbox:\n"
    "    print(flush=True)\n"
    "    for _ in inbox: pass\n"
)


@dataclass(frozen=True)
class Used:
    """What all threads of a process have used so far."""

    at_s: float
    wakeups: int
    cpu_ns: int


def used(pid: int) -> Used:
    wakeups = cpu_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = dict(line.split(":\t") for line in (task / "status").read_text().splitlines())
        wakeups += int(status["voluntary_ctxt_switches"])
        cpu_ns += int((task / "schedstat").read_text().split()[0])
    return Used(time.monotonic(), wakeups, cpu_ns)


def between(before: Used, after: Used) -> dict[str, float]:
    seconds = after.at_s - before.at_s
    return {
        "seconds": round(seconds, 2),
        "wakeups_per_s": round((after.wakeups - before.wakeups) / seconds, 3),
        "core_percent": round((after.cpu_ns - before.cpu_ns) / seconds / 1e7, 4),
    }


@contextmanager
def listener() -> Iterator[None]:
    """A subscriber in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()


# ---- at rest -------------------------------------------------------------------------------------


def fill(timers: int) -> None:
    """Timers that are due in a day or two."""
    with Client(NAME, timeout=PATIENCE_S) as client:
        for first in range(0, timers, CHUNK):
            numbers = range(first, min(first + CHUNK, timers))
            client.add_many({
                "key": [f"far:{n}" for n in numbers],
                "delay": [FAR_S + n % FAR_S for n in numbers],
            })  # fmt: skip


def met(one: dict[str, float]) -> bool:
    return one["wakeups_per_s"] <= WAKEUPS_MAX and one["core_percent"] <= CORE_PERCENT_MAX


def at_rest(pid: int, seconds: float, settle_s: float) -> dict[str, dict[str, Any]]:
    found = {}
    for name, beside in (("alone", nullcontext()), ("with a subscriber", listener())):
        with beside:
            time.sleep(settle_s)
            before = used(pid)
            time.sleep(seconds)
            one = between(before, used(pid))
            found[name] = one | {"met": met(one)}
    return found


# ---- at work -------------------------------------------------------------------------------------


def at_work(pid: int, per_s: int, seconds: float, *, cancel: bool) -> dict[str, float]:
    """Processor time of the daemon for 100,000 timers, which fire or are cancelled."""
    batch = per_s // BATCHES_PER_S
    with listener(), Client(NAME, timeout=PATIENCE_S) as client:
        before = used(pid)
        for number in range(int(seconds * BATCHES_PER_S)):
            keys = [f"{number}:{n}" for n in range(batch)]
            client.add_many({"key": keys, "delay": [DUE_S] * batch}, topic="busy")
            if cancel:
                client.cancel_many(keys)
            time.sleep(max(0.0, before.at_s + (number + 1) / BATCHES_PER_S - time.monotonic()))
        armed_s = time.monotonic() - before.at_s
        time.sleep(0 if cancel else 2 * DUE_S)
        after = used(pid)
    timers = int(seconds * BATCHES_PER_S) * batch
    return {
        "timers": timers,
        "timers_per_s": round(timers / armed_s),
        "cpu_ms_per_100k": round((after.cpu_ns - before.cpu_ns) / timers / 10, 1),
    }


# ---- the command ---------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    room = arguments.timers + 4 * arguments.rate
    settings = ["--capacity", str(room), "--payload-memory", str(64 * room)]
    with tempfile.TemporaryDirectory(prefix="purgatoryd-bench-") as directory:
        environ["PURGATORYD_DIR"] = directory
        with own_daemon(Path(directory), NAME, settings) as pid:
            fill(arguments.timers)
            rest = at_rest(pid, arguments.seconds, arguments.settle)
            work = {
                name: at_work(pid, arguments.rate, arguments.work, cancel=cancel)
                for name, cancel in (("armed, fired", False), ("armed, cancelled", True))
            }
    return {
        "command": "make bench-idle", "machine": machine(), "load_average": getloadavg(),
        "timers": arguments.timers, "at_rest": rest, "at_work": work,
        "limit": {"wakeups_per_s": WAKEUPS_MAX, "core_percent": CORE_PERCENT_MAX},
    }  # fmt: skip


def rest_table(found: dict[str, Any]) -> str:
    rows = [
        f"| at rest, {found['timers']:,} timers | wake-ups per second | % of a core "
        f"| at most {WAKEUPS_MAX:g} and {CORE_PERCENT_MAX:g} % |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {one['wakeups_per_s']:.2f} | {one['core_percent']:.3f} "
            f"| {'met' if one['met'] else 'missed'} |"
            for name, one in found["at_rest"].items()
        ),
    ]
    return "\n".join(rows) + "\n"


def work_table(found: dict[str, Any]) -> str:
    rows = [
        "| at work | timers per second | processor time for 100,000 timers |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {one['timers_per_s']:,} | {one['cpu_ms_per_100k']:.0f} ms |"
            for name, one in found["at_work"].items()
        ),
    ]
    return "\n".join(rows) + "\n"


def write(found: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    put(PAGE, f"{rest_table(found)}\n{work_table(found)}")
    put(SIZES, work_table(found))


def put(page: Path, tables: str) -> None:
    """Between the marks of a page."""
    before, begin, rest = page.read_text().partition(BEGIN)
    assert begin, page
    page.write_text(before + begin + tables + END + rest.partition(END)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timers", type=int, default=1_000_000, help="far from due")
    parser.add_argument("--seconds", type=float, default=30.0, help="at rest")
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds before that")
    parser.add_argument("--rate", type=int, default=100_000, help="timers per second, at work")
    parser.add_argument("--work", type=float, default=10.0, help="seconds at work")
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    arguments = parser.parse_args()
    found = measure(arguments)
    print(json.dumps(found, indent=1))
    if not arguments.dry:
        write(found)


if __name__ == "__main__":
    main()
