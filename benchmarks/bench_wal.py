"""Measure the cost of the WAL, and the time of a recovery from it.

Adds: sessions of one process send batches of 100 timers to a new daemon, with as many batches in
flight as a session may have, and wait for all answers. Three ways alternate: no WAL; a WAL, and
answers at once (`memory`); a WAL, and answers when the batch is on disk (`durable`).

Recovery: a daemon with timers in its WAL is killed; then its shared memory and its pages in the
page cache are removed, as by a reboot. The result is the time from the start of the next process
until it is ready. It is measured with the timers in the WAL segments only, with the timers in a
snapshot, and, for comparison, with an empty WAL.

The WAL is written under --directory, which must not be a tmpfs. Writes benchmarks/results/wal.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from own_daemon import remove_arena_files
from recording import machine, spread, write_result

from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.layout import KeyType, Message, Op, PutMode, Status, TimeKind
from purgatoryd.shm_layout.paths import paths_in

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "wal.json"
NAME = "bench"
BATCH = 100
PAYLOAD = bytes(100)
HOUR_NS = 3600 * 10**9
WAYS = ("no WAL", "memory", "durable")
PATIENCE_S = 120.0
PAUSE_S = 0.001  # pause before a batch that was answered BUSY is sent again

Samples = dict[str, list[float]]


# ---- the daemon ---------------------------------------------------------------------------


class Daemon:
    """A daemon in its own directory. Its WAL, if it has one, is in another directory."""

    def __init__(self, directory: Path, capacity: int, wal: Path | None) -> None:
        self.paths = paths_in(directory, NAME)
        self.start_s = 0.0  # seconds from the first start of the process until it was ready
        self._wal = wal
        self._environment = {**os.environ, "PURGATORYD_DIR": str(directory)}
        self._command = [
            sys.executable, "-m", "purgatoryd.cli", "run", "--name", NAME,
            "--capacity", str(capacity), "--payload-memory", str(capacity * 160 + (1 << 20)),
            *(["--wal-dir", str(wal)] if wal else []),
        ]  # fmt: skip

    def start(self) -> float:
        """Start the daemon; return the seconds until it is ready."""
        began_s = time.perf_counter()
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline().startswith(b"ready"):
            raise SystemExit("the daemon did not start")
        return time.perf_counter() - began_s

    def end(self, by: signal.Signals) -> None:
        """Stop the daemon with a signal, and wait for its end."""
        self._process.send_signal(by)
        self._process.wait(PATIENCE_S)

    def lose_memory(self) -> None:
        """Remove the daemon's files from /dev/shm and its WAL from the page cache, as a reboot
        does."""
        remove_arena_files(self.paths)
        for path in self._wal.glob("*/*.*") if self._wal else ():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def daemon(directory: Path, capacity: int, wal: bool) -> Iterator[Daemon]:
    """Start a daemon and yield it. At the end of the block, kill it and remove its memory and
    WAL."""
    with (
        tempfile.TemporaryDirectory(dir=directory) as files,
        tempfile.TemporaryDirectory(prefix="purgatoryd-bench-") as sockets,
    ):
        one = Daemon(Path(sockets), capacity, Path(files) if wal else None)
        try:
            one.start_s = one.start()
            yield one
        finally:
            one.end(signal.SIGKILL)
            one.lose_memory()


# ---- adds -----------------------------------------------------------------------------------


class Session:
    """One session that sends raw frames. Its batches differ only in their keys.

    A batch that was answered BUSY, because the WAL buffer was full, is sent again. Those of its
    records that have already been added are then answered KEPT.
    """

    def __init__(self, endpoint: str, durable: bool) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.socket.send(wire.encode_hello(os.urandom(16)))
        self._id = wire.decode_reply(self.socket.recv()).session
        self._sequence = 0
        self._flags = layout.FLAG_DURABLE * durable
        self._names = wire.encode_names([(b"bench", b"t")])
        record = wire.RECORD.pack(
            Op.PUT, PutMode.KEEP, KeyType.BYTES, 8, 0, TimeKind.DELAY, 0, len(PAYLOAD), 0,
            HOUR_NS, 0,
        )  # fmt: skip
        self._records = record * BATCH
        self.under_way: deque[int] = deque()

    def send(self, first: int) -> None:
        """Send a batch of 100 timers with keys `first` to `first` + 99."""
        self._sequence += 1
        area = b"".join(key.to_bytes(8, "little") + PAYLOAD for key in range(first, first + BATCH))
        frame = wire.encode_frame(
            Message.BATCH, self._id, self._sequence, count=BATCH, names=1,
            names_bytes=len(self._names), flags=self._flags,
        )  # fmt: skip
        self.socket.send(frame + self._names + self._records + area)
        self.under_way.append(first)

    def take(self) -> int | None:
        """Receive the next answer. Return the first key of its batch if the batch must be sent
        again, else None."""
        reply = wire.decode_reply(self.socket.recv())
        statuses = {word & 0xFF for word, _ in wire.RESULT.iter_unpack(reply.body)}
        if reply.error or not statuses <= {Status.ADDED, Status.KEPT, Status.BUSY}:
            raise SystemExit(f"a batch was not added: error {reply.error}, {statuses}")
        first = self.under_way.popleft()
        return first if Status.BUSY in statuses else None


def add(endpoint: str, batches: int, sessions: int, durable: bool) -> float:
    """Add `batches` * 100 timers; return the seconds until all timers are acknowledged."""
    poller = zmq.Poller()
    by_socket = {}
    for _ in range(sessions):
        session = Session(endpoint, durable)
        by_socket[session.socket] = session
        poller.register(session.socket, zmq.POLLIN)
    began_s, left = time.perf_counter(), deque(range(0, batches * BATCH, BATCH))
    ready: Iterable[Session] = by_socket.values()
    while left or any(session.under_way for session in by_socket.values()):
        for session in ready:
            while left and len(session.under_way) < layout.WINDOW:
                session.send(left.popleft())
        ready = [by_socket[socket] for socket, _ in poller.poll(int(PATIENCE_S * 1000))]
        busy = [first for session in ready if (first := session.take()) is not None]
        left.extend(busy)
        if busy:
            time.sleep(PAUSE_S)
    seconds = time.perf_counter() - began_s
    for socket in by_socket:
        socket.close()
    return seconds


def adds_per_second(arguments: argparse.Namespace, way: str) -> float:
    batches = arguments.adds // BATCH
    with daemon(arguments.directory, batches * BATCH, way != "no WAL") as one:
        seconds = add(f"ipc://{one.paths.cmd}", batches, arguments.sessions, way == "durable")
    return float(batches * BATCH / seconds)


# ---- recovery -------------------------------------------------------------------------------


def recoveries(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the seconds until the daemon is ready with an empty WAL, from the segments, and from a
    snapshot."""
    with daemon(arguments.directory, arguments.pending, wal=True) as one:
        found = {"empty": one.start_s}
        add(f"ipc://{one.paths.cmd}", arguments.pending // BATCH, arguments.sessions, durable=True)
        for source in ("segments", "snapshot"):  # the first recovery ends by writing a snapshot
            one.end(signal.SIGKILL)
            one.lose_memory()
            found[source] = one.start()
    return found


# ---- the document ------------------------------------------------------------------------------


def spreads(samples: Samples) -> dict[str, dict[str, float]]:
    return {name: spread(values) for name, values in samples.items()}


def measure(arguments: argparse.Namespace) -> tuple[Samples, Samples]:
    adds: Samples = {way: [] for way in WAYS}
    seconds: Samples = {"empty": [], "segments": [], "snapshot": []}
    for number in range(arguments.repeats):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            adds[way].append(adds_per_second(arguments, way))
        print({way: round(adds[way][-1]) for way in WAYS}, file=sys.stderr)
    for _ in range(arguments.recoveries):
        for source, value in recoveries(arguments).items():
            seconds[source].append(value)
        print({source: round(seconds[source][-1], 3) for source in seconds}, file=sys.stderr)
    return adds, seconds


def document(arguments: argparse.Namespace, adds: Samples, seconds: Samples) -> dict[str, Any]:
    pairs = {
        f"durable to {way}": [a / b for a, b in zip(adds["durable"], adds[way], strict=True)]
        for way in ("memory", "no WAL")
    }
    return {
        "machine": machine(),
        "file_system": shutil.disk_usage(arguments.directory)._asdict(),
        "command": f"python benchmarks/bench_wal.py --adds {arguments.adds} --sessions "
        f"{arguments.sessions} --repeats {arguments.repeats} --pending {arguments.pending} "
        f"--recoveries {arguments.recoveries}",
        "load_average": os.getloadavg(),
        "batch": BATCH,
        "payload_bytes": len(PAYLOAD),
        "adds_per_second": spreads(adds),
        "ratios": spreads(pairs),
        "seconds_until_ready": spreads(seconds),
        "targets": {
            "durable to memory, at least 0.8": statistics.median(pairs["durable to memory"]),
            "seconds from the segments, at most 1.2": statistics.median(seconds["segments"]),
        },
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--adds", type=int, default=400_000, help="timers to add in one run")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9, help="runs of each way")
    parser.add_argument("--pending", type=int, default=1_000_000, help="timers to recover")
    parser.add_argument("--recoveries", type=int, default=5)
    parser.add_argument(
        "--directory", type=Path, default=ROOT / "build", help="folder for the WALs"
    )
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    found = document(arguments, *measure(arguments))
    print(json.dumps({name: found[name] for name in ("ratios", "targets")}, indent=1))
    if not arguments.dry:
        write_result(RESULTS, found)


if __name__ == "__main__":
    main()
