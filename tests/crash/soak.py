"""Kill a real daemon and its workers at random, under load, and check that no timer or operation is
lost.

`python soak.py SECONDS [SEED] [--keep DIR] [--audit]`, with tests/support on PYTHONPATH. Workers
record the daemon's acknowledgements. At the end each timer must have one notice, or none if it was
cancelled, and no operation may have ended twice. Owners that run until the end must have received
the outcomes of all their operations. With --keep the daemon writes a WAL to DIR/wal, `pipeline
ship` (which is killed at random too) copies it to DIR/lake, and the clients write ledgers to
DIR/ledgers. With --audit the program audits these files; without --keep it puts them into a
temporary folder. The program prints kills and totals as JSON; exit code 1 = a timer or operation is
lost or doubled, or the audit found a violation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from real_daemon import PATIENCE_S, Daemon, clean_environment, eventually, remove_arena_files

from purgatoryd.clients import AllOf, AnyOf, Client, Ledger, Operation, Purgatory, Subscriber
from purgatoryd.shm_layout.errors import CallTimeout, PurgatorydError

NAME, NAMESPACE = "soak", "soak"
JOBS = ("timers", "timers", "operations", "operations")
EXPORTER = "exporter"
SHARED = [f"shared:{n}" for n in range(6)]
SIZES = ("--replay-buffer", "524288", "--inbox", "100000")
KEEP = "SOAK_KEEP"
"""Environment variable that gives the workers the DIR of --keep."""
LONGEST_S = 0.8
"""Longest delay of a timer and longest timeout of an operation, in seconds."""


# ---- workers --------------------------------------------------------------------------------


def ledger() -> Ledger | None:
    """Create a ledger that writes every line at once, so that a kill loses no reported event."""
    return Ledger(f"{os.environ[KEEP]}/ledgers", buffer_bytes=0) if KEEP in os.environ else None


def leave() -> Path:
    """Return the path of the file whose creation makes the owners of operations stop."""
    return Path(os.environ["PURGATORYD_DIR"], "leave")


def say(out: int, *words: object) -> None:
    """Write one line with one system call, so that it is complete or missing."""
    os.write(out, (" ".join(map(str, words)) + "\n").encode())


def timers(seed: int, out: int) -> None:
    """Add timers without replacements, and cancel some; every key is used once."""
    rng = random.Random(seed)
    with Client(NAME, namespace=NAMESPACE, timeout=10 * PATIENCE_S, ledger=ledger()) as client:
        for n in range(1 << 30):
            keys = [f"{seed}:{n}:{i}" for i in range(rng.randint(1, 20))]
            for key in keys:
                say(out, "tried", key)
            handles = [
                client.add(key, rng.uniform(0, LONGEST_S), topic="timers", wait=False)
                for key in keys
            ]
            tickets = [handle.result().ticket for handle in handles]
            for ticket in tickets:
                say(out, "added", ticket)
            for key, ticket in zip(keys, tickets, strict=True):
                if rng.random() < 0.3:
                    say(out, "cancelling", ticket)
                    say(out, client.cancel(key).name, ticket)


def operations(seed: int, out: int) -> None:
    """Arm operations, and advance shared watermarks that end operations of any owner. Report the
    outcomes of this worker's operations.

    At the end, wait for the missing outcomes.
    """
    rng = random.Random(seed)
    armed: list[Operation] = []
    with Purgatory(
        NAME, namespace=NAMESPACE, timeout=10 * PATIENCE_S, ledger=ledger()
    ) as purgatory:
        while not armed or not leave().exists():
            key, watermark = f"{seed}:{len(armed)}", len(armed) + 1
            say(out, "tried", key)
            targets = {k: watermark + rng.randint(0, 20) for k in rng.sample(SHARED, 2)}
            condition = AllOf(targets) if rng.random() < 0.5 else AnyOf(targets)
            timeout = rng.uniform(0, LONGEST_S)
            operation = purgatory.watch(key, condition, timeout, topic="ends")
            armed.append(operation)
            say(out, "armed", operation.ticket)
            operation.add_done_callback(lambda o: say(out, "ended", o.ticket))
            if rng.random() < 0.3:
                purgatory.advance(rng.choice(SHARED), watermark)
            if rng.random() < 0.1:
                purgatory.cancel(key)
        end = time.monotonic() + PATIENCE_S
        for operation in armed:
            say(out, received(operation, end), operation.ticket)


def received(operation: Operation, end: float) -> str:
    """Return "received" if the owner is notified before `end` (monotonic clock, seconds), else
    "missed"."""
    with contextlib.suppress(CallTimeout):
        operation.result(max(0.0, end - time.monotonic()))
        return "received"
    return "missed"


def worker(job: str, seed: str, path: str) -> None:
    """Work until killed, or report an unexpected error."""
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        {"timers": timers, "operations": operations}[job](int(seed), out)
    except PurgatorydError as error:
        say(out, "error", type(error).__name__, str(error).replace("\n", " "))


def wal_settings() -> tuple[str, ...]:
    """Return WAL settings with the smallest segment size, so that the WAL has many segments."""
    if KEEP not in os.environ:
        return ()
    return ("--wal-dir", f"{os.environ[KEEP]}/wal", "--wal-segment-bytes", "256K")


def pipeline(*words: str) -> list[str]:
    """Return the command line of a pipeline command for the files in DIR."""
    retained = os.environ[KEEP]
    places = ("--wal-dir", f"{retained}/wal", "--lake", f"{retained}/lake")
    return [sys.executable, "-m", "purgatoryd.cli", "pipeline", *words, *places, "--json"]


def ship() -> None:
    """Ship the sealed segments to the lake. The first call also creates a retention hold, which
    keeps the WAL from then on."""
    subprocess.run(pipeline("ship", "--name", NAME), stdout=subprocess.DEVNULL, check=True)


# ---- the soak -------------------------------------------------------------------------------


class Listener(threading.Thread):
    """Counts every notice by its ticket."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.noticed: Counter[int] = Counter()
        self.keys: set[str] = set()
        self.error = ""
        self.stopping = False
        self._subscriber = Subscriber(
            NAME, namespace=NAMESPACE, timeout=PATIENCE_S, ledger=ledger()
        )

    def run(self) -> None:
        """Count notices until the soak is stopping and no notice arrives for 0.2 s."""
        try:
            while not self.stopping:
                if (notice := self._subscriber.get(timeout=0.2)) is not None:
                    self.noticed[notice.ticket] += 1
                    self.keys.add(str(notice.key))
        except PurgatorydError as error:
            self.error = f"{type(error).__name__}: {error}"


class Soak:
    """A daemon, its workers, and their reports."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = random.Random(seed)
        self.directory = directory
        self.daemon = Daemon(NAME, directory, (*SIZES, *wal_settings()))
        self.listener = Listener()
        self.listener.start()
        self.workers: dict[subprocess.Popen[bytes], str] = {}
        self.started = self.daemon_kills = self.worker_kills = 0
        if KEEP in os.environ:
            ship()  # ship the beginning of the WAL
        for job in (*JOBS, *([EXPORTER] if KEEP in os.environ else [])):
            self.start(job)

    def start(self, job: str) -> None:
        """Start a worker with its own seed and its own report file."""
        self.started += 1
        said = self.directory / f"{self.started}.said"
        command = [sys.executable, __file__, "worker", job, str(self.started), str(said)]
        if job == EXPORTER:
            command = pipeline("ship", "--name", NAME, "--follow")
        self.workers[subprocess.Popen(command, stdout=subprocess.DEVNULL)] = job

    def kill_worker(self) -> None:
        """Kill a random worker with SIGKILL, and start a new worker for its job."""
        victim = self.rng.choice(list(self.workers))
        victim.send_signal(signal.SIGKILL)
        victim.wait(PATIENCE_S)
        self.worker_kills += 1
        self.start(self.workers.pop(victim))

    @property
    def at_work(self) -> bool:
        """Return whether the workers have done at least 50 actions of each kind."""
        done = Counter(words[0] for words in self.said())
        return min(done[kind] for kind in ("added", "CANCELLED", "ended")) >= 50

    def run(self, seconds: float) -> None:
        """Kill workers at random times, and the daemon at least once."""
        eventually(lambda: self.at_work)
        end = time.monotonic() + seconds
        while time.monotonic() < end or not self.daemon_kills:
            time.sleep(self.rng.uniform(0, 0.3))
            if self.rng.random() < 0.3:
                self.kill_worker()
            else:
                self.daemon.kill()
                self.daemon_kills += 1
                self.daemon.start()
        leave().touch()
        for one, job in self.workers.items():
            if job != "operations":
                one.kill()
            one.wait(3 * PATIENCE_S)

    def said(self) -> Iterator[list[str]]:
        """Yield all complete lines of all workers."""
        for path in self.directory.glob("*.said"):
            for line in path.read_text().splitlines():
                yield line.split()

    def settle(self) -> None:
        """Wait until no notice is missing, at most PATIENCE_S."""
        end = time.monotonic() + PATIENCE_S
        while self.result()["lost"] and time.monotonic() < end:
            time.sleep(LONGEST_S)
        time.sleep(2 * LONGEST_S)
        self.listener.stopping = True
        self.listener.join(PATIENCE_S)

    def result(self) -> dict[str, object]:
        """Compare the workers' reports with the notices, and return counts and faults."""
        lines = list(self.said())
        tried = {words[1] for words in lines if words[0] == "tried"}
        reported = {kind: Counter(int(w[1]) for w in lines if w[0] == kind) for kind in (
            "added", "armed", "ended", "cancelling", "CANCELLED", "FIRED",
            "UNKNOWN", "received", "missed")}  # fmt: skip
        noticed = self.listener.noticed.copy()  # a copy, because the listener's thread continues
        unsure = reported["cancelling"].keys() - reported["FIRED"].keys()
        due = (reported["added"].keys() - unsure) | reported["armed"].keys()
        return {
            "daemon_kills": self.daemon_kills,
            "worker_kills": self.worker_kills,
            "added": len(reported["added"]),
            "cancelled": len(reported["CANCELLED"]),
            "armed": len(reported["armed"]),
            "outcomes": len(reported["ended"]),
            "outcomes_received": len(reported["received"]),
            "outcomes_lost": len(reported["missed"]),
            "notices": noticed.total(),
            "lost": len((due - noticed.keys()) | reported["UNKNOWN"].keys()),
            "doubled": sum(n > 1 for n in noticed.values()),
            "outcomes_doubled": sum(n > 1 for n in reported["ended"].values()),
            "fired_though_cancelled": len(reported["CANCELLED"].keys() & noticed.keys()),
            "strangers": len(self.listener.keys - tried),
            "errors": [" ".join(w) for w in lines if w[0] == "error"],
            "listener": self.listener.error,
        }


FAULTS = ("lost", "doubled", "outcomes_lost", "outcomes_doubled", "fired_though_cancelled",
          "strangers", "errors", "listener", "violations", "missing")  # fmt: skip


def soak(seconds: float, seed: int, keep: Path | None) -> dict[str, object]:
    """Run a soak and return its result. Leave the WAL, the lake and the clients' ledgers in
    `keep`."""
    with tempfile.TemporaryDirectory(prefix="purgatoryd-soak-") as folder:
        directory = Path(folder)
        os.environ.update(clean_environment(directory))
        if keep is not None:
            os.environ[KEEP] = str(keep.absolute())
            for part in ("wal", "lake"):
                (keep / part).mkdir(parents=True)
        one = Soak(seed, directory)
        try:
            one.run(seconds)
            one.settle()
            result = one.result()
        finally:
            for process in one.workers:
                process.kill()
            one.daemon.close()
            remove_arena_files(one.daemon.paths)
        if keep is not None:
            ship()
        return result


def audited() -> dict[str, object]:
    """Audit the kept files. Return the audit's summary, with the missing ranges."""
    command = [*pipeline("audit"), "--ledger", f"{os.environ[KEEP]}/ledgers"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        done.check_returncode()
    reported = [json.loads(line) for line in done.stdout.splitlines()]
    return {**reported[-1], "missing": [one["missing"] for one in reported if "missing" in one]}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    parser.add_argument("--keep", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--audit", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="purgatoryd-kept-") as folder:
        keep = given.keep or (Path(folder) / "soak" if given.audit else None)
        result = soak(given.seconds, given.seed, keep)
        if given.audit:
            result |= audited()
    print(json.dumps(result, indent=1))
    return any(result.get(fault) for fault in FAULTS)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(*sys.argv[2:])
    else:
        sys.exit(main())
