"""Measure the cost of one watch key with many watchers (the crowd), in a real daemon.

It answers two questions: How much CPU time do advances cost that satisfy no operation? How long
does an advance that satisfies all operations delay the adds of another client, the prober? Daemon,
owner of the crowd and prober are separate processes. The daemon and the prober run at real-time
priority if this is permitted, so that other work of the machine does not delay them. The same adds
without the advance show the remaining noise. Writes benchmarks/results/watchers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from own_daemon import own_daemon
from purgatory.through import cpu_seconds
from recording import machine, quantile, spread, write_result

from purgatoryd.clients import AllOf, Client, Purgatory, SumOf
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.paths import paths_in

RESULTS = Path(__file__).resolve().parent / "results" / "watchers.json"
NAME = "bench"
HOUR_S = 3600.0
CHUNK = 100
"""Number of advances in one batch: 10,000 advances a second are one batch every 10 ms."""
FAR = 10**12
REACHED = 2 * FAR
PATIENCE_S = 60.0
PROBE_GAP_S = 0.0002
PROBER, DAEMON = 2, 1  # real-time priorities of the two processes


# ---- the owner of the crowd, a separate process -----------------------------------------


def condition(kind: str, n: int) -> AllOf | SumOf:
    """Return the condition of the n-th watcher. Each watcher has a different target."""
    if kind == "all":
        return AllOf({"hot": FAR + n})
    return SumOf({"hot": 0, "cold": 0}, at_least=FAR + n)


def own(kind: str, watchers: int) -> None:
    """Arm the crowd, print "armed", wait for all its outcomes and print their causes."""
    with Purgatory(NAME, timeout=PATIENCE_S) as p:
        rows = ((b"%d" % n, condition(kind, n), HOUR_S) for n in range(watchers))
        operations = p.watch_many(rows)
        print("armed", flush=True)
        causes = {operation.result(PATIENCE_S).cause for operation in operations}
        print(*causes, flush=True)


@contextmanager
def crowd(kind: str, watchers: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, "--own", kind, "--watchers", str(watchers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "armed\n":
        raise SystemExit("the crowd was not armed")
    yield process
    if process.stdout.readline() != "satisfied\n" or process.wait(PATIENCE_S) != 0:
        raise SystemExit("the crowd did not end as it should")


# ---- the daemon ---------------------------------------------------------------------------


@contextmanager
def daemon(watchers: int) -> Iterator[int]:
    """Start a daemon in a new directory; yield its pid."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PURGATORYD_DIR"] = directory
        free_slots = str(2 * watchers + 65_536)
        settings = ["--capacity", free_slots, "--watches", free_slots, "--inbox", str(watchers)]
        with own_daemon(Path(directory), NAME, settings) as pid:
            yield pid


@contextmanager
def urgent(pid: int, priority: int) -> Iterator[None]:
    """Give a process real-time priority during the block, if permitted. Threads that it starts
    during the block inherit the priority."""

    def schedule(policy: int, priority: int) -> None:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):  # the thread may have ended
                os.sched_setscheduler(int(task.name), policy, os.sched_param(priority))

    with suppress(PermissionError):
        schedule(os.SCHED_FIFO, priority)
    yield
    schedule(os.SCHED_OTHER, 0)


# ---- advances that satisfy nobody ---------------------------------------------------------


def cpu_of_advances(
    pid: int, rate: int, seconds: float, watermarks: Iterator[int]
) -> dict[str, float]:
    """Return the rate of the advances, and the daemon's CPU use in cores: during the advances, and
    at rest for the same time."""
    before_s = cpu_seconds(pid)
    time.sleep(seconds)
    idle = (cpu_seconds(pid) - before_s) / seconds
    with Purgatory(NAME, timeout=PATIENCE_S) as p:
        before_s, start_s = cpu_seconds(pid), time.monotonic()
        for n in range(int(rate * seconds) // CHUNK):
            ended = p.advance_many([("hot", next(watermarks)) for _ in range(CHUNK)])
            if any(ended):
                raise SystemExit("an advance ended an operation that it should not reach")
            time.sleep(max(0.0, start_s + (n + 1) * CHUNK / rate - time.monotonic()))
        took_s = time.monotonic() - start_s
        busy = (cpu_seconds(pid) - before_s) / took_s
    return {"rate": rate * seconds / took_s, "core": busy, "core_idle": idle}


# ---- an advance that satisfies all --------------------------------------------------------


def probe(client: Client, until: Callable[[], bool]) -> list[float]:
    """Send single adds until `until()` is true; return their round trips in ms."""
    took_ms = []
    for n in count():
        start_s = time.monotonic()
        client.add(b"probe", HOUR_S, mode="replace")
        took_ms.append((time.monotonic() - start_s) * 1e3)
        if n % 64 == 63 and until():
            return took_ms
        time.sleep(PROBE_GAP_S)
    raise AssertionError


def figures(took_ms: list[float]) -> dict[str, float]:
    ordered = sorted(took_ms)
    return {
        "adds": len(ordered), "p50_ms": quantile(ordered, 0.5),
        "p99_ms": quantile(ordered, 0.99), "max_ms": ordered[-1],
    }  # fmt: skip


def delay_of_adds(pid: int, reader: Reader, watchers: int) -> dict[str, Any]:
    """Measure the round trips of adds while the whole crowd is satisfied, notified and
    acknowledged, and then for the same time at rest."""
    trigger = [sys.executable, "-c",
               "import sys; from purgatoryd.clients import Purgatory\n"
               f"with Purgatory({NAME!r}, timeout={PATIENCE_S}) as p:\n"
               " print('connected', flush=True)\n"
               " sys.stdin.readline()\n"
               f" print(p.advance('cold', {REACHED}) + p.advance('hot', {REACHED}))"]  # fmt: skip
    process = subprocess.Popen(trigger, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    if process.stdout.readline() != "connected\n":
        raise SystemExit("the process that advances did not connect")
    with (
        urgent(pid, DAEMON),
        urgent(os.getpid(), PROBER),
        Client(NAME, timeout=PATIENCE_S) as client,
    ):
        realtime = os.sched_getscheduler(pid) == os.SCHED_FIFO
        probe(client, lambda: True)
        start_s = time.monotonic()
        process.stdin.write("go\n")
        process.stdin.flush()
        storm = probe(
            client, lambda: reader.stats()["operations"] == reader.stats()["outcomes"] == 0
        )
        storm_s = time.monotonic() - start_s
        said, _ = process.communicate(timeout=PATIENCE_S)
        if int(said) != watchers:
            raise SystemExit(f"the advance ended {said.strip()} of {watchers}")
        time.sleep(1.0)  # gives the owner's process time to end
        end_s = time.monotonic() + storm_s
        calm = probe(client, lambda: time.monotonic() >= end_s)
    return {
        "realtime": realtime, "seconds": storm_s, "storm": figures(storm), "calm": figures(calm),
    }  # fmt: skip


# ---- the whole benchmark -------------------------------------------------------------------------


def one_crowd(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with daemon(arguments.watchers) as pid:
        reader = Reader.attach(paths_in(Path(os.environ["PURGATORYD_DIR"]), NAME))
        with crowd(kind, arguments.watchers):
            cpu = cpu_of_advances(pid, arguments.rate, arguments.seconds, count(1))
            delay = delay_of_adds(pid, reader, arguments.watchers)
        reader.close()
    return {"condition": kind, "cpu": cpu, **delay}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median, minimum and maximum of each figure, for each condition."""
    found: dict[str, Any] = {}
    for kind in ("all", "sum"):
        of_kind = [run for run in runs if run["condition"] == kind]
        found[kind] = {
            "realtime": all(run["realtime"] for run in of_kind),
            "storm_s": spread([run["seconds"] for run in of_kind]),
            **{
                f"{part}_{name}": spread([run[part][name] for run in of_kind])
                for part in ("cpu", "storm", "calm")
                for name in of_kind[0][part]
            },
        }
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--watchers", type=int, default=100_000)
    parser.add_argument("--rate", type=int, default=10_000, help="advances per second")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of advances")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    parser.add_argument("--own", choices=("all", "sum"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.own:
        own(arguments.own, arguments.watchers)
        return
    runs = [one_crowd(kind, arguments) for _ in range(arguments.repeats) for kind in ("all", "sum")]
    document = {
        "machine": machine(),
        "command": f"python benchmarks/bench_watchers.py --watchers {arguments.watchers} --rate"
        f" {arguments.rate} --seconds {arguments.seconds} --repeats {arguments.repeats}",
        "load_average": os.getloadavg(),
        "figures": summary(runs),
    }
    print(json.dumps(document["figures"], indent=1))
    if not arguments.dry:
        write_result(RESULTS, document)


if __name__ == "__main__":
    main()
