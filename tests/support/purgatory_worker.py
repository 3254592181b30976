"""Worker processes that a test starts and kills while they work: `python purgatory_worker.py JOB
...`

A worker writes a line to stdout after each step, before it continues.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from purgatoryd.clients import AllOf, AnyOf, Exists, Purgatory, SumOf, When
from purgatoryd.clients.conditions import AnyCondition

KEYS = [f"shared:{n}" for n in range(8)]


def start(job: str, *args: object) -> subprocess.Popen[str]:
    """Start a worker process. Its stdout is a text pipe."""
    command = [sys.executable, str(Path(__file__)), job, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def say(*words: object) -> None:
    """Write one line with one system call, so that the line is either complete or missing."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def advance(*pairs: str) -> None:
    """Advance watch keys. `pairs`: "key=watermark"."""
    with Purgatory("demo", namespace="broker") as p:
        for pair in pairs:
            key, watermark = pair.split("=")
            say(key, p.advance(key, int(watermark)))


def own(count: str, timeout: str) -> None:
    """Arm operations, one of them with a client condition. Then wait for the kill."""
    p = Purgatory("demo", namespace="broker")
    for n in range(int(count)):
        p.watch(f"own:{n}", AllOf({"never": 1}), float(timeout), topic="ends")
    p.watch("own:client", When(lambda: False, ["k"]), float(timeout), topic="ends")
    p.watch("own:long", AllOf({"k": 10}), 3600, topic="ends")
    say("armed")
    signal.pause()


def churn(seed: str) -> None:
    """Arm and trigger operations at random, endlessly."""
    rng = random.Random(seed)
    with Purgatory("demo", namespace="broker") as p:
        deeds: list[Callable[[str], object]] = [
            lambda key: p.advance(key, rng.randint(1, 1000)),
            lambda key: p.bump(key, rng.randint(1, 50)),
            lambda key: p.fail(key, 7),
            p.clear,
            p.forget,
            p.cancel_for_key,
        ]
        while True:
            for _ in range(4):
                arm(p, rng, rng.sample(KEYS, rng.randint(1, 4)))
            rng.choice(deeds)(rng.choice(KEYS))


def arm(p: Purgatory, rng: random.Random, keys: list[str]) -> None:
    """Arm an operation, and print its ticket. The parent process expects that each operation with a
    printed ticket ends."""
    targets = {key: rng.randint(1, 1000) for key in keys}
    conditions: list[Callable[[], AnyCondition]] = [
        lambda: AllOf(targets),
        lambda: AnyOf(targets),
        lambda: SumOf(dict.fromkeys(keys), at_least=rng.randint(1, 200), cap=100),
        lambda: When(lambda: rng.random() < 0.5, keys),
    ]
    try:
        op = p.watch(rng.randbytes(8), rng.choice(conditions)(), rng.uniform(0, 0.7), topic="ends")
    except Exists:
        return
    say(op.ticket)


JOBS: dict[str, Callable[..., None]] = {"advance": advance, "own": own, "churn": churn}

if __name__ == "__main__":
    JOBS[sys.argv[1]](*sys.argv[2:])
