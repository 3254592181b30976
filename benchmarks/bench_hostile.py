"""Measure the effect of an attack on other clients of a real daemon.

A client looks up a timer repeatedly in three situations that alternate: without an attack, with an
attack of tests/support/attacker.py, and with a process that uses as much CPU time as the attacker
but does not contact the daemon. If the benchmark runs as root, each attacker has a new uid, because
the daemon refuses the uid of the previous attacker. Otherwise each attacker has the daemon's own
uid; the daemon disconnects clients of that uid but never refuses them. Writes
benchmarks/results/hostile.json and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from own_daemon import remove_arena_files
from recording import machine, quantile, spread, write_result, write_section

from purgatoryd.clients import Client
from purgatoryd.shm_layout.paths import paths_in

ROOT = Path(__file__).resolve().parent.parent
ATTACKER = ROOT / "tests" / "support" / "attacker.py"
RESULTS = ROOT / "benchmarks" / "results" / "hostile.json"
NAME = "bench"
FIRST_UID = 60_000
GAP_S = 0.0005
SAMPLE_EVERY = 20
PATIENCE_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
BUSY = """
import sys, time
share, period_s = float(sys.argv[1]), 0.01
print("ready", flush=True)
while True:
    begun_s, until_s = time.monotonic(), time.process_time() + share * period_s
    while time.process_time() < until_s:
        pass
    time.sleep(max(0, begun_s + period_s - time.monotonic()))
"""
ATTACKS = (
    "endless-large", "endless-small", "many-parts", "flood", "never-read", "garbage",
    "half-handshakes", "many-connections", "long-routing-id", "claimed-routing-ids",
    "empty-messages", "unread-answers", "dear-requests", "subscription-flood",
    "subscription-churn", "published", "deaf-subscriber",
)  # fmt: skip


class Bench:
    """A daemon in a new directory, and the client whose lookups are measured."""

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o750)
        os.environ["PURGATORYD_DIR"] = str(directory)
        self.directory = directory
        command = [sys.executable, "-m", "purgatoryd.cli", "run", "--name", NAME]
        self.daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.daemon.stdout is not None
        assert self.daemon.stdout.readline().startswith(b"ready")
        self.client = Client(NAME, timeout=PATIENCE_S)
        self.client.add("probe", delay=86_400)
        self.base_mib = self.memory_mib()
        self.uids = count(FIRST_UID)

    def memory_mib(self) -> float:
        """Memory of the daemon without its arena, in MiB."""
        status = Path(f"/proc/{self.daemon.pid}/status").read_text()
        found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.M)
        assert found is not None
        return int(found[1]) / 1024

    def probe(self, seconds: float) -> tuple[list[float], float]:
        """Look up a timer for `seconds`. Return (sorted round trips in ms, largest growth of the
        daemon's memory since its start in MiB)."""
        trips, most, end_s = [], 0.0, time.perf_counter() + seconds
        while (begun_s := time.perf_counter()) < end_s:
            self.client.get("probe")
            trips.append((time.perf_counter() - begun_s) * 1e3)
            if len(trips) % SAMPLE_EVERY == 0:
                most = max(most, self.memory_mib() - self.base_mib)
            time.sleep(GAP_S)
        return sorted(trips), most

    def attacker(self, attack: str) -> list[str]:
        """Return the command line of an attacker process."""
        uid = [str(next(self.uids))] if os.geteuid() == 0 else []
        return [sys.executable, str(ATTACKER), attack, str(self.directory), NAME, *uid]

    def close(self) -> None:
        """Stop the daemon and remove its arena."""
        self.client.close()
        self.daemon.terminate()
        self.daemon.wait(PATIENCE_S)
        remove_arena_files(paths_in(self.directory, NAME))


@contextmanager
def at_work(command: list[str]) -> Iterator[int]:
    """Run a command during the `with` block; yield its pid."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def processor_s(pid: int) -> float:
    """Return the CPU time in seconds that a process has used."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = after_name[11:13]
    return (int(user) + int(system)) / TICKS_PER_S


def round_of(bench: Bench, attack: str, seconds: float) -> dict[str, float]:
    """Measure once without the attack, once with it, and once with a process that uses the same CPU
    time."""
    trips = {"without": bench.probe(seconds)[0]}
    with at_work(bench.attacker(attack)) as attacker:
        before_s = processor_s(attacker)
        trips["with"], most = bench.probe(seconds)
        share = min(1.0, (processor_s(attacker) - before_s) / seconds)
    with at_work([sys.executable, "-c", BUSY, str(share)]):
        trips["loaded"], _ = bench.probe(seconds)
    row = {f"{name}_{when}_ms": quantile(ordered, part)
           for when, ordered in trips.items()
           for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}  # fmt: skip
    ratios = {f"p99_ratio_to_{when}": row["p99_with_ms"] / row[f"p99_{when}_ms"]
              for when in ("without", "loaded")}  # fmt: skip
    return {**row, **ratios, "processor_share": share, "most_mib": most}


def summary(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return median, minimum and maximum of each figure over the rounds."""
    return {name: spread([one[name] for one in rounds]) for name in rounds[0]}


def table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the table for docs/benchmarks.md: medians over the rounds, but the maximum for
    memory."""
    rows = [
        "| attack | without | loaded | with | to without | to loaded | processor | memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for attack, found in figures.items():
        one = {name: values["median"] for name, values in found.items()}
        p99 = " | ".join(f"{one[f'p99_{when}_ms']:.1f}" for when in ("without", "loaded", "with"))
        rows.append(
            f"| {attack} | {p99} | {one['p99_ratio_to_without']:.1f} "
            f"| {one['p99_ratio_to_loaded']:.1f} | {one['processor_share']:.0%} "
            f"| {found['most_mib']['high']:.0f} |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("attacks", nargs="*", default=ATTACKS)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {attack: [] for attack in arguments.attacks}
    with tempfile.TemporaryDirectory(prefix="purgatoryd-bench-") as directory:
        bench = Bench(Path(directory))
        try:
            for _ in range(arguments.rounds):
                for attack in arguments.attacks:
                    found[attack].append(round_of(bench, attack, arguments.seconds))
        finally:
            bench.close()
    figures = {attack: summary(rounds) for attack, rounds in found.items()}
    print(json.dumps(figures, indent=1))
    if not arguments.dry:
        document: dict[str, Any] = {
            "command": "make bench-hostile",
            "machine": machine(),
            "other_uid": os.geteuid() == 0,
            "seconds": arguments.seconds,
            "rounds": arguments.rounds,
            "figures": figures,
        }
        write_result(RESULTS, document)
        write_section("hostile", table(figures))


if __name__ == "__main__":
    main()
