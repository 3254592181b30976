"""The script of a world: what happens in it, step by step, all of it decided by the seed.

A step says all that it needs, so that a script without some of its steps is a script, too. Steps
that make no sense where they stand do nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

MS = 1_000_000
S = 1_000 * MS
CLIENTS, SUBSCRIBERS, KEYS, WATCH_KEYS = 3, 2, 12, 6
TOPICS = ("a", "b")


class Step(NamedTuple):
    """`wait_ns`: time that passes before it. `arguments` by name."""

    wait_ns: int
    kind: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"after {self.wait_ns / MS:.3f} ms: {self.kind}({arguments})"


@dataclass(frozen=True)
class Setting:
    """What a world is like."""

    wal: bool
    durable: tuple[bool, ...]
    """Of each client."""
    shards: int
    capacity: int
    sessions: int
    replay_capacity: int
    seed: int


class Script(NamedTuple):
    """A world's setting and steps."""

    setting: Setting
    steps: list[Step]


WORK = {
    "add": 30, "cancel": 12, "get": 6, "add_many": 6, "cancel_many": 3, "watch": 10, "advance": 14,
    "bump": 3, "fail": 1, "clear": 1, "end_operation": 2,
}  # fmt: skip
FAULTS = {
    "disturb": 40, "break": 6, "disturb_subscriber": 12, "freeze_client": 3, "kill_client": 3,
    "freeze_subscriber": 3, "kill_daemon": 8, "freeze_daemon": 4, "stop_daemon": 2, "disk": 8,
    "disk_full": 1, "short_write": 2, "slow_disk": 2, "power_cut": 2, "step_wall": 2, "drift": 1,
    "suspend": 1, "lose_name": 1, "kill_snapshot": 1,
}  # fmt: skip
OF_THE_DISK = ("disk", "disk_full", "short_write", "power_cut", "kill_snapshot", "slow_disk")


def script(seed: int, steps: int = 400) -> Script:
    """The script of a seed."""
    rng = random.Random(seed)
    setting = Setting(
        wal=rng.random() < 0.7,
        durable=tuple(rng.random() < 0.5 for _ in range(CLIENTS)),
        shards=0,
        capacity=rng.choice([64, 128, 512]),
        sessions=rng.choice([8, 16]),
        replay_capacity=rng.choice([64, 256]),
        seed=seed,
    )
    faults = {
        kind: weight
        for kind, weight in FAULTS.items()
        if setting.wal or kind not in OF_THE_DISK or kind == "power_cut"
    }
    # Some kinds of faults are missing in each world, so that others meet undisturbed.
    for kind in list(faults):
        if rng.random() < 0.3:
            del faults[kind]
    share = rng.choice([0.1, 0.2, 0.3])
    return Script(setting, [_step(rng, faults, share) for _ in range(steps)])


def _step(rng: random.Random, faults: dict[str, int], share: float) -> Step:
    wait_ns = int(rng.expovariate(1 / (2 * MS)))
    if rng.random() < 0.02:
        wait_ns = rng.randrange(3 * S)
    kinds = faults if faults and rng.random() < share else WORK
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    return Step(wait_ns, kind, _ARGUMENTS[kind](rng))


def _delay_ns(rng: random.Random) -> int:
    return rng.choice(
        [0, rng.randrange(5 * MS), rng.randrange(200 * MS), rng.randrange(5 * S), 3600 * S]
    )


def _timer(rng: random.Random) -> dict[str, Any]:
    return {
        "client": rng.randrange(CLIENTS),
        "key": rng.randrange(KEYS),
        "mode": rng.choice(["error", "error", "replace", "keep", "extend"]),
        "delay_ns": _delay_ns(rng),
        "topic": rng.choice(TOPICS),
        "size": rng.choice([0, 8, 48, 300]),
    }


def _many(rng: random.Random) -> dict[str, Any]:
    return {
        "client": rng.randrange(CLIENTS),
        "keys": sorted(rng.sample(range(KEYS), rng.randrange(2, 8))),
        "mode": rng.choice(["error", "replace"]),
        "delay_ns": _delay_ns(rng),
        "topic": rng.choice(TOPICS),
    }


def _watch(rng: random.Random) -> dict[str, Any]:
    keys = sorted(rng.sample(range(WATCH_KEYS), rng.randrange(1, 4)))
    kind = rng.choice(["all", "all", "any", "sum", "quorum"])
    return {
        "client": rng.randrange(CLIENTS),
        "kind": kind,
        "targets": {key: rng.randrange(1, 8) for key in keys},
        "need": rng.randrange(1, len(keys) + 1) if kind == "quorum" else rng.randrange(1, 12),
        "timeout_ns": rng.choice([0, rng.randrange(20 * MS), rng.randrange(2 * S), 600 * S]),
        "topic": rng.choice([None, *TOPICS]),
    }


def _disturb(rng: random.Random) -> dict[str, Any]:
    return {
        "kind": rng.choice(["lose", "double", "delay", "swap"]),
        "frames": rng.choice([1, 1, 2, 5]),
        "delay_ns": rng.choice([rng.randrange(MS), rng.randrange(50 * MS), rng.randrange(S)]),
    }


def _of_client(rng: random.Random) -> dict[str, Any]:
    return {"client": rng.randrange(CLIENTS)}


def _span(rng: random.Random) -> int:
    return rng.choice([rng.randrange(5 * MS), rng.randrange(100 * MS), rng.randrange(4 * S)])


_ARGUMENTS: dict[str, Any] = {
    "add": _timer,
    "cancel": lambda rng: {**_of_client(rng), "key": rng.randrange(KEYS), "by_ticket": rng.random() < 0.3},
    "get": lambda rng: {**_of_client(rng), "key": rng.randrange(KEYS)},
    "add_many": _many,
    "cancel_many": _many,
    "watch": _watch,
    "advance": lambda rng: {**_of_client(rng), "key": rng.randrange(WATCH_KEYS), "by": rng.choice([0, 1, 1, 2, 3])},
    "bump": lambda rng: {**_of_client(rng), "key": rng.randrange(WATCH_KEYS), "by": rng.randrange(3)},
    "fail": lambda rng: {**_of_client(rng), "key": rng.randrange(WATCH_KEYS)},
    "clear": lambda rng: {**_of_client(rng), "key": rng.randrange(WATCH_KEYS)},
    "end_operation": lambda rng: {**_of_client(rng), "number": rng.randrange(1000)},
    "disturb": lambda rng: {**_of_client(rng), **_disturb(rng)},
    "break": _of_client,
    "disturb_subscriber": lambda rng: {"subscriber": rng.randrange(SUBSCRIBERS), **_disturb(rng)},
    "freeze_client": lambda rng: {**_of_client(rng), "span_ns": _span(rng)},
    "kill_client": lambda rng: {**_of_client(rng), "span_ns": _span(rng)},
    "freeze_subscriber": lambda rng: {"subscriber": rng.randrange(SUBSCRIBERS), "span_ns": _span(rng)},
    "kill_daemon": lambda rng: {"calls": rng.choice([0, rng.randrange(60), rng.randrange(2000)]), "span_ns": _span(rng)},
    "freeze_daemon": lambda rng: {"span_ns": _span(rng)},
    "stop_daemon": lambda rng: {"span_ns": _span(rng), "capacity": rng.choice([None, 64, 128, 512])},
    "disk": lambda rng: {
        "kind": rng.choice(["write", "sync", "rename", "sync_directory", "open", "read"]),
        "errno": rng.choice([5, 28]), "times": rng.choice([1, 1, 1, 2, 1000]), "span_ns": _span(rng),
    },
    "disk_full": lambda rng: {"span_ns": _span(rng)},
    "short_write": lambda rng: {"times": rng.randrange(1, 4)},
    "slow_disk": lambda rng: {"commit_ns": rng.choice([1 * MS, 20 * MS, 300 * MS]), "span_ns": _span(rng)},
    "power_cut": lambda rng: {"span_ns": _span(rng)},
    "step_wall": lambda rng: {"by_ns": rng.choice([-1, 1]) * rng.randrange(10 * S)},
    "drift": lambda rng: {"ppm": rng.randrange(-500, 500)},
    "suspend": lambda rng: {"span_ns": rng.randrange(20 * S)},
    "lose_name": lambda rng: {"private": rng.random() < 0.5},
    "kill_snapshot": lambda rng: {},
}  # fmt: skip
