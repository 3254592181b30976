"""Compare the speed of this checkout with another checkout: `make bench-compare OTHER=DIRECTORY`.

Both checkouts must be built. Each round runs every measure once in each checkout, in an order that
alternates. The result, in benchmarks/results/compare.json, has the medians, their ratio, and the
lowest and highest ratio of a round. A ratio above 1 means that this checkout is slower. If
`--other` is a second build of the same commit, the result shows the machine's noise.

This file runs in both checkouts, so it uses only names that both checkouts have.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results" / "compare.json"
TIMERS = 500_000
BATCH = 1000
KEY = struct.Struct("<QQ")
PAYLOAD = bytes(48)
SECOND_NS = 10**9
NAMES = b"\x01\x01nt" + bytes(4)


# ---- in one checkout -----------------------------------------------------------------------------


class Core:
    """The C core in private memory, called through the entry point that the daemon uses."""

    def __init__(self, timers: int, watches: int = 1) -> None:
        from purgatoryd.shm_layout import layout
        from purgatoryd.shm_layout._core import ffi, lib

        self.ffi, self.lib = ffi, lib
        names = [name for name, _ in ffi.typeof("struct pg_config").fields]
        values = [
            layout.LAYOUT_ID, timers * 160 + (1 << 20), 1 << 20, 65_536, 0, 0, 0, 0, 77, (1, 2),
            bytes(16), bytes(16), timers, 1 << 16, 256, 4, 8, 1, watches, watches, 0, 0, 0,
            600 * SECOND_NS, 1 << 20, 0, 4096, lib.PG_CLOCK_VIRTUAL, 0, 1,
        ]  # fmt: skip
        config = ffi.new("struct pg_config *", dict(zip(names, values, strict=True)))
        size, private = lib.pg_arena_bytes(config), lib.pg_private_bytes(config)
        assert size > 0
        assert private > 0
        self._memory = [mmap.mmap(-1, size), mmap.mmap(-1, private)]
        self._handle = bytearray(lib.pg_handle_bytes())
        self._a = ffi.cast("struct pg_arena *", ffi.from_buffer(self._handle))
        assert lib.pg_create(self._a, *map(ffi.from_buffer, self._memory), config)
        self._reply = ffi.new("uint8_t[]", 1 << 23)
        self._used, self._wait = ffi.new("uint64_t *"), ffi.new("int64_t *")
        self._parts, self._upto = ffi.new("struct pg_part[]", 1024), ffi.new("uint64_t *")
        self._out = ffi.new("uint8_t[]", 1 << 22)
        self.now_ns, self.sequence = 0, 0
        self.session = 0
        self.session = int.from_bytes(self.ask(self.frame(1) + bytes(32))[64:72], "little")

    def frame(self, kind: int, count: int = 0, names: bytes = b"") -> bytes:
        """Return the frame head of a request."""
        return struct.pack(
            "<IHHQQIHHIIqQQ", 0x51434750, 1, kind, self.session, self.sequence, count,
            bool(names), 0, len(names), 0, 0, 0, 0,
        )  # fmt: skip

    def ask(self, message: bytes) -> bytes:
        """Return the reply, in a buffer that the next call overwrites."""
        data = self.ffi.from_buffer(message)
        while True:
            state = self.lib.pg_handle(
                self._a, data, len(message), 1000, 1, self.now_ns, self.now_ns, self._reply,
                self._used, self._wait,
            )  # fmt: skip
            if state != self.lib.PG_H_AGAIN:
                return bytes(self.ffi.buffer(self._reply, 128))
            self.publish()

    def batch(self, body: bytes) -> None:
        """Send one BATCH message of BATCH records."""
        self.sequence += 1
        reply = self.ask(self.frame(2, BATCH, NAMES) + NAMES + body)
        assert reply[30:32] == bytes(2), "a refused batch"

    def advance(self, to_ns: int) -> None:
        self.now_ns, more = to_ns, self.ffi.new("int *", 1)
        while more[0]:
            self.lib.pg_advance(self._a, to_ns, 0, to_ns, 4096, more)
            self.publish()

    def publish(self) -> None:
        """Read all notices and report them as sent, as the daemon does."""
        while self.lib.pg_notices(self._a, self._out, 1 << 22, self._parts, 1024, self._upto):
            self.lib.pg_published(self._a, self._upto[0], self.now_ns, self.now_ns)


def record(op: int, key_len: int = 16, payload: int = 0, time_ns: int = 0, value: int = 0,
           mode: int = 0, ext: int = 0) -> bytes:  # fmt: skip
    """Return the bytes of a struct pg_record for a key of type bytes."""
    return struct.pack(
        "<BBBBHBBIIqQ", op, mode, 1, key_len, 0, time_ns > 0, 0, payload, ext, time_ns, value
    )


def scattered(number: int, of: int) -> bytes:
    """Return the key of timer `number` in a set of `of` timers. Consecutive timers have keys that
    are far apart, so that no prefetcher can predict them."""
    return KEY.pack(number * 2_654_435_761 % of, 7)


def timed(work: Callable[[bytes], None], prepared: list[bytes]) -> float:
    """Return the mean time that `work` takes for a record of the prepared batches, in ns."""
    begun = time.perf_counter_ns()
    for body in prepared:
        work(body)
    return (time.perf_counter_ns() - begun) / len(prepared) / BATCH


def keyed_timers() -> dict[str, float]:
    """Measure adds, cancels and expiries of timers with keys and payloads, in ns per timer."""
    core, batches = Core(TIMERS + BATCH), TIMERS // BATCH
    puts = b"".join(
        record(1, payload=len(PAYLOAD), time_ns=SECOND_NS + n * 1000) for n in range(BATCH)
    )
    keys = [
        [scattered(number * BATCH + n, TIMERS) for n in range(BATCH)] for number in range(batches)
    ]
    adds = [puts + b"".join(key + PAYLOAD for key in some) for some in keys]
    cancels = [record(2) * BATCH + b"".join(some) for some in keys[::2]]
    found = {"add": timed(core.batch, adds), "cancel": timed(core.batch, cancels)}
    begun = time.perf_counter_ns()
    core.advance(10 * SECOND_NS)
    found["expire"] = (time.perf_counter_ns() - begun) / (TIMERS - len(cancels) * BATCH)
    return found


def operations() -> dict[str, float]:
    """Measure operations that wait for one key each and are satisfied by an advance of that key, in
    ns per operation."""
    core, batches = Core(TIMERS // 5 + BATCH, TIMERS // 5 + BATCH), TIMERS // 5 // BATCH
    share = struct.pack("<QQBBB5x", 1, 0, 16, 1, 0)
    keys = [[KEY.pack(number * BATCH + n, 9) for n in range(BATCH)] for number in range(batches)]
    watch = record(4, time_ns=3600 * SECOND_NS, ext=40) * BATCH
    watches = [watch + b"".join(key + share + key for key in some) for some in keys]
    advances = [record(5, value=1) * BATCH + b"".join(some) for some in keys]
    return {"watch": timed(core.batch, watches), "advance": timed(core.batch, advances)}


def daemon_command(script: str, *arguments: str) -> Any:
    """Run a benchmark script of the current checkout and return its JSON output."""
    command = [sys.executable, f"benchmarks/{script}", *arguments, "--dry"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(said)


def recovery() -> dict[str, float]:
    """Measure how long a daemon with a million timers takes to recover after a kill, from exec to
    READY, in seconds."""
    (found,) = daemon_command("bench_recovery.py", "--timers", "1000000", "--repeats", "3")
    return {"ready": float(found["seconds"]["ready"]["median"])}


def idle() -> dict[str, float]:
    """Measure wake-ups and CPU time of a daemon at rest."""
    found = daemon_command(
        "bench_idle.py", "--timers", "100000", "--settle", "5", "--windows", "1", "--seconds",
        "10", "--rounds", "1", "--work", "2",
    )  # fmt: skip
    rest = next(iter(found["at_rest"].values()))
    return {name: float(rest[name]["median"]) for name in ("wakeups_per_s", "core_percent")}


MEASURES = {
    "core": (keyed_timers, "ns"), "purgatory": (operations, "ns"), "recovery": (recovery, "s"),
    "idle": (idle, "per s; % of a core"),
}  # fmt: skip


# ---- both checkouts ------------------------------------------------------------------------------


def run_in(checkout: Path, measure: str) -> dict[str, float]:
    """Run one measure in a process that uses the code of a checkout."""
    command = [str(checkout / ".venv/bin/python"), __file__, "--measure", measure]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PURGATORYD_")}
    done = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def compared(ours: list[float], theirs: list[float]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return {
        "ours": median(ours), "other": median(theirs), "ratio": median(ours) / median(theirs),
        "lowest_pair": ratios[0], "median_pair": median(ratios), "highest_pair": ratios[-1],
    }  # fmt: skip


def compare(other: Path, measure: str, repeats: int) -> dict[str, Any]:
    """Run a measure in both checkouts, alternating; return the compared figures."""
    here = Path(__file__).resolve().parents[1]
    runs: dict[Path, list[dict[str, float]]] = {here: [], other: []}
    for number in range(repeats):
        for checkout in (here, other) if number % 2 else (other, here):
            runs[checkout].append(run_in(checkout, measure))
    return {
        figure: compared([r[figure] for r in runs[here]], [r[figure] for r in runs[other]])
        for figure in runs[here][0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--other", type=Path, help="folder of the other checkout")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(MEASURES[arguments.measure][0]()))
        return
    from recording import machine, write_result

    other = arguments.other.resolve()
    measures = {}
    for name in arguments.only:
        measures[name] = compare(other, name, arguments.repeats)
        print(name, json.dumps(measures[name], indent=1), flush=True)
    document = {
        "command": "make bench-compare OTHER=DIRECTORY", "machine": machine(),
        "load_average": os.getloadavg(), "repeats": arguments.repeats,
        "units": {name: MEASURES[name][1] for name in measures}, "measures": measures,
    }  # fmt: skip
    write_result(RESULTS, document)


if __name__ == "__main__":
    main()
