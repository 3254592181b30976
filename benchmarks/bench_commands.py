"""Measures how long `purgatoryd add`, `get` and `cancel` take, from fork to exit.

The script of an installed wheel talks to a daemon that the benchmark starts. For comparison, the
same rounds run `python -c pass` and, if Redis is installed, `redis-cli` with a new server. Each
round runs every command once; the commands for comparison come first in every other round. Writes
benchmarks/results/commands.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from installed import install
from own_daemon import own_daemon
from recording import machine, spread, write_result

RESULTS = Path(__file__).resolve().parent / "results" / "commands.json"
NAME = "bench"
START_S = 10.0

Commands = dict[str, list[str]]


def environment(directory: Path) -> dict[str, str]:
    """Return this process's environment without PYTHONDONTWRITEBYTECODE, which makes Python compile
    every module at every start."""
    env = os.environ | {"PURGATORYD_DIR": str(directory), "PURGATORYD_NAME": NAME}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


@contextmanager
def redis(directory: Path) -> Iterator[Commands]:
    """Start a Redis server; yield a command for it, or no command if Redis is not installed."""
    client, server = shutil.which("redis-cli"), shutil.which("redis-server")
    if client is None or server is None:
        yield {}
        return
    socket = directory / "redis.sock"
    words = [server, "--port", "0", "--unixsocket", str(socket), "--save", ""]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + START_S
        while not socket.exists():
            if time.monotonic() > deadline_s:
                raise SystemExit("redis-server did not start")
            time.sleep(0.01)
        yield {"redis-cli set": [client, "-s", str(socket), "SET", "key", "value"]}
    finally:
        process.terminate()
        process.wait()


def one_run(words: list[str], env: Mapping[str, str]) -> tuple[float, float]:
    """Run a command; return its wall time and its CPU time in ms."""
    began_s = time.perf_counter()
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}")
    return wall_s * 1e3, (usage.ru_utime + usage.ru_stime) * 1e3


def round_of(number: int, script: str, others: Commands) -> Commands:
    """Return the commands of a round in the order in which the round runs them. `add`, `get` and
    `cancel` keep their order, because they use the same timer."""
    ours = {
        "add": [script, "add", f"key-{number}", "--delay", "1h"],
        "get": [script, "get", f"key-{number}"],
        "cancel": [script, "cancel", f"key-{number}"],
    }
    return {**others, **ours} if number % 2 else {**ours, **others}


def measured(rounds: int) -> dict[str, Any]:
    """Return median, minimum and maximum of the wall time and CPU time of each command, in ms."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        env, folder = environment(directory), install(directory)
        with own_daemon(directory, NAME, ["--capacity", "1000"]), redis(directory) as others:
            others["python -c pass"] = [str(folder / "python"), "-c", "pass"]
            samples: dict[str, list[tuple[float, float]]] = {}
            for number in range(rounds + 1):
                for name, words in round_of(number, str(folder / "purgatoryd"), others).items():
                    sample = one_run(words, env)
                    if number:  # the first round compiles modules and fills caches
                        samples.setdefault(name, []).append(sample)
    return {
        name: {
            "wall_ms": spread([wall for wall, _ in found]),
            "cpu_ms": spread([cpu for _, cpu in found]),
        }
        for name, found in samples.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="run the commands under SCHED_FIFO, for a busy machine",
    )
    parser.add_argument("--dry", action="store_true", help="print only, write nothing")
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    if arguments.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    found = measured(arguments.rounds)
    document = {
        "machine": machine(),
        "command": f"python benchmarks/bench_commands.py --rounds {arguments.rounds}"
        + " --realtime" * arguments.realtime,
        "load_average": load_before,
        "commands": found,
    }
    print(json.dumps(found, indent=1))
    if not arguments.dry:
        write_result(RESULTS, document)


if __name__ == "__main__":
    main()
