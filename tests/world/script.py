"""The script of a world: its setting and its steps, all decided by the seed.

Each step contains all its arguments, so any subset of the steps is a valid script. A step that is
impossible in the present state does nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

EPOCH_NS = 1_700_000_000_000_000_000
"""Wall time at the beginning of most worlds."""
MS = 1_000_000
S = 1_000 * MS
CLIENTS, SUBSCRIBERS, KEYS, WATCH_KEYS, BULK_LOADS = 3, 2, 12, 6, 2
GROUPS, CONSUMERS, SLOTS = 3, 3, 3
READERS, CURSORS = 3, 2
TOPICS = ("a", "b")
RESUMER = 0
GRACES_NS = (MS, 20 * MS, 150 * MS, S)
"""Graces of late policies."""
UNIQUE_NS = (5 * MS, 150 * MS, 2 * S, 30 * S)
"""Times for which keys are unique."""
NAMESPACE_SCOPE = ""
"""Value for the whole namespace where a pause has the name of a topic."""
ACTIONS = ("open", "close", "status", "forget")
"""Actions on a bulk load."""
STRANGE = (
    "short", "magic", "version", "unknown", "long", "hello", "stop", "sessions", "drop", "advance",
    "bulk_load", "ping",
)  # fmt: skip
"""Kinds of messages that strangers send."""
WRONG = (
    "clock", "clock without an arena", "shard", "too small", "no WAL", "another WAL",
    "WAL of another", "open folder", "open parent", "import", "copied WAL", "no birth", "boot id",
    "boot clock",
)  # fmt: skip
"""Kinds of wrong starts."""

SMALL_LIMITS = ("iteration", "window", "share", "memory", "first snapshot", "client")
"""Names of the groups in limits.py."""

FOR_GOOD = 1000
"""Number of calls that fail in a row: more calls than a world makes before the disk is healed."""

Arguments = dict[str, Any]
Draw = Callable[[random.Random], Arguments]


class Step(NamedTuple):
    """One step. `wait_ns`: time that passes before the step. `cell`: index of the cell on which it
    acts."""

    wait_ns: int
    kind: str
    cell: int
    arguments: Arguments

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        where = f" at daemon {self.cell}" if self.cell else ""
        return f"after {self.wait_ns / MS:.3f} ms{where}: {self.kind}({arguments})"


@dataclass(frozen=True)
class Setting:
    """The properties of a world that its seed chooses."""

    seed: int
    wal: bool
    virtual: bool
    shards: int
    durable: tuple[bool | None, ...]
    """For each client, whether it requests durable answers; None: only if the daemon has a WAL."""
    durable_namespace: bool
    """True if the daemon gives durable answers to all clients."""
    boot_offsets_ns: tuple[int, ...]
    """Offset of CLOCK_BOOTTIME in each client's time namespace."""
    capacity: int
    sessions: int
    replay_capacity: int
    heavy: bool
    """True if large payloads and a slow disk fill the WAL buffer."""
    parks: bool
    """True if timers with a long delay are parked."""
    uids: bool
    """True if each client has a uid of its own."""
    commit_ns: int
    """Duration of a group commit."""
    hasty: tuple[bool, ...]
    """For each client, True if its calls have a short time limit."""
    short_queue: bool
    """True if only a few calls of a client may wait for an answer."""
    resumes: bool
    """True if a later process of client RESUMER takes over the operations of an earlier process."""
    hidden: tuple[bool, ...]
    """For each client, True if it runs in another pid namespace than the daemon."""
    small_limits: tuple[str, ...]
    """Groups of product limits that are small."""
    local_subscribers: int
    """Number of subscribers that read notices from the arena."""
    groups: bool
    """True if consumer groups handle the notices."""
    schedules: bool
    """True if schedules arm timers."""
    zone: str
    """Time zone of cron schedules. The offset of the zone soon changes; "" = none."""
    begin_wall_ns: int
    """Wall time at the beginning of the world."""
    readers: bool
    """True if subscribers have cursors."""
    ranks: bool
    """True if timers have priorities and order keys, which decide the order of jobs."""
    late: bool
    """True if timers, and a topic, have late policies."""
    pauses: bool
    """True if topics and the namespace are paused for a while."""
    unique: bool
    """True if some keys are unique for a time."""
    only_rings: bool
    """True if all clients on the daemon's host have rings; otherwise every second connection."""


class Script(NamedTuple):
    """A world's setting and steps."""

    setting: Setting
    steps: list[Step]


# ---- arguments ---------------------------------------------------------------------------------


def _delay_ns(rng: random.Random) -> int:
    return rng.choice(
        [0, rng.randrange(5 * MS), rng.randrange(200 * MS), rng.randrange(5 * S), 3600 * S]
    )


def _span_ns(rng: random.Random) -> int:
    return rng.choice([rng.randrange(5 * MS), rng.randrange(100 * MS), rng.randrange(4 * S)])


def _client(rng: random.Random) -> Arguments:
    return {"client": rng.randrange(CLIENTS)}


def _key(rng: random.Random) -> Arguments:
    return {**_client(rng), "key": rng.randrange(KEYS)}


def _timer(rng: random.Random) -> Arguments:
    return {
        **_key(rng),
        "mode": rng.choice(["error", "error", "replace", "keep", "extend"]),
        "delay_ns": _delay_ns(rng),
        "topic": rng.choice(TOPICS),
        "size": rng.choice([0, 8, 48, 300, 20_000]),
        "wait": rng.random() < 0.8,
        "wall": rng.random() < 0.1,
    }


def _rush(rng: random.Random) -> Arguments:
    return {
        **_key(rng),
        "calls": rng.randrange(2, 5),
        "delay_ns": _delay_ns(rng),
        "size": rng.choice([8, 300, 40_000]),
    }


def _keys(rng: random.Random) -> Arguments:
    return {**_client(rng), "keys": sorted(rng.sample(range(KEYS), rng.randrange(2, 8)))}


def _many(rng: random.Random) -> Arguments:
    return {
        **_keys(rng),
        "mode": rng.choice(["error", "replace"]),
        "delay_ns": _delay_ns(rng),
        "topic": rng.choice(TOPICS),
        "wait": rng.random() < 0.8,
    }


def _watch(rng: random.Random) -> Arguments:
    keys = sorted(rng.sample(range(WATCH_KEYS), rng.randrange(1, 4)))
    kind = rng.choice(["all", "all", "any", "sum", "quorum", "client"])
    return {
        **_client(rng),
        "kind": kind,
        "targets": {key: rng.randrange(1, 8) for key in keys},
        "need": rng.randrange(1, len(keys) + 1) if kind == "quorum" else rng.randrange(1, 12),
        "timeout_ns": rng.choice([0, rng.randrange(20 * MS), rng.randrange(2 * S), 600 * S]),
        "topic": rng.choice([None, *TOPICS]),
        "ahead": rng.random() < 0.6,
    }


def _watch_many(rng: random.Random) -> Arguments:
    one = _watch(rng)
    return {
        **{name: one[name] for name in ("client", "targets", "need", "timeout_ns")},
        "count": rng.choice([2, 10, 60]),
    }


def _advance_many(rng: random.Random) -> Arguments:
    keys = rng.sample(range(WATCH_KEYS), rng.randrange(1, 3))
    return {**_client(rng), "keys": keys, "count": rng.choice([3, 10, 60])}


def _watch_key(rng: random.Random) -> Arguments:
    return {**_client(rng), "key": rng.randrange(WATCH_KEYS)}


def _disturb(rng: random.Random) -> Arguments:
    return {
        "kind": rng.choice(["lose", "double", "delay", "swap", "late"]),
        "frames": rng.choice([1, 1, 2, 5]),
        "delay_ns": rng.choice([rng.randrange(MS), rng.randrange(50 * MS), rng.randrange(S)]),
    }


def _storm(rng: random.Random) -> Arguments:
    return {**_client(rng), "disturbances": [_disturb(rng) for _ in range(rng.randrange(5, 30))]}


def _disk(rng: random.Random) -> Arguments:
    return {
        "kind": rng.choice(["write", "sync", "rename", "sync_directory", "open", "read"]),
        "errno": rng.choice([5, 28]),
        "times": rng.choice([1, 1, 1, 2, FOR_GOOD]),
        "span_ns": _span_ns(rng),
    }


def _bulk_load(rng: random.Random) -> Arguments:
    return {
        **_client(rng),
        "number": rng.randrange(BULK_LOADS),
        "first": rng.randrange(20),
        "count": rng.randrange(1, 8),
        "token": rng.choice([0, 0, 1, 2]),
        "delay_ns": _delay_ns(rng),
    }


def _stranger(rng: random.Random) -> Arguments:
    return {
        "kind": rng.choice(STRANGE),
        "uid": rng.choice([0, 1, 99]),
        "admin": rng.random() < 0.5,
    }


def _rot(rng: random.Random) -> Arguments:
    return {"file": rng.randrange(100), "byte": rng.choice([1, 0.01]) * rng.random()}


def _ruin(rng: random.Random) -> Arguments:
    return {**_rot(rng), "lost": rng.random() < 0.3, "cut": rng.random() < 0.7, **_span(rng)}


def _crowd(rng: random.Random) -> Arguments:
    return {"count": rng.randrange(2, 14), "uid": rng.randrange(CLIENTS), **_span(rng)}


def _capacity(rng: random.Random) -> int | None:
    return rng.choice([None, 24, 64, 128, 512])


def _calls(rng: random.Random) -> int:
    return rng.choice([0, rng.randrange(60), rng.randrange(2000)])


def _watch_only(rng: random.Random) -> Arguments:
    return {"key": rng.randrange(WATCH_KEYS)}


def _kill(rng: random.Random) -> Arguments:
    return {**_client(rng), **_span(rng), "doubled": rng.choice([0, 0, 10])}


def _freeze(rng: random.Random) -> Arguments:
    late = rng.random() < 0.4
    span_ns = rng.randrange(100 * MS) if late else _span_ns(rng)
    read_in_ns = rng.choice([0, span_ns + rng.randrange(20 * MS)])
    return {"span_ns": span_ns, "read_in_ns": read_in_ns, "late": late}


def _quota(rng: random.Random) -> Arguments:
    return {
        "timers": rng.choice([0, 0, 5]),
        "ops": rng.choice([0, 0, 0, 50]),
        "owner": rng.choice([2**32 - 1, 2**32 - 1, rng.randrange(CLIENTS)]),
    }


def _span(rng: random.Random) -> Arguments:
    return {"span_ns": _span_ns(rng)}


def _group(rng: random.Random) -> Arguments:
    return {"slot": rng.randrange(GROUPS)}


def _consumer(rng: random.Random) -> Arguments:
    return {"consumer": rng.randrange(CONSUMERS)}


def _new_group(rng: random.Random) -> Arguments:
    return {
        **_group(rng),
        "topics": rng.choice([["a"], ["b"], ["a", "b"], ["a", "b"]]),
        "start": rng.choice(["latest", "latest", "earliest"]),
        "max_backlog": rng.choice([16, 64, 64, 80]),
        "max_lease_ns": rng.choice([300 * MS, 2 * S, 3600 * S]),
        "backoff_ns": rng.choice([0, MS, 20 * MS]),
        "max_attempts": rng.choice([2, 4, 20, 20]),
        "max_dead": rng.choice([0, 2, 1000, 1000]),
        "retention_ns": rng.choice([0, 0, 0, 200 * MS]),
        "ordered": rng.random() < 0.4,
        "blocks": rng.random() < 0.3,
        "drops": rng.random() < 0.3,
        "rate": rng.choice([0, 0, 0, 50]),
    }


def _consume(rng: random.Random) -> Arguments:
    return {
        **_consumer(rng),
        **_group(rng),
        "lease_ns": rng.choice([20 * MS, 100 * MS, S, 30 * S]),
        "credits": rng.choice([1, 2, 8]),
    }


def _slot(rng: random.Random) -> Arguments:
    return {"slot": rng.randrange(SLOTS)}


def _new_schedule(rng: random.Random) -> Arguments:
    minutes = rng.choice([0, 0, 1, 1, 2])
    every_ns = 0 if minutes else rng.choice([50 * MS, 300 * MS, S, 5 * S])
    return {
        **_slot(rng),
        "every_ns": every_ns,
        "minutes": minutes,
        "topic": rng.choice(TOPICS),
        "limit": rng.choice([1, 3, 10, 30, 30 if 0 < every_ns < S else 0]),
        "span_ns": rng.choice([0, 0, 0, rng.randrange(S, 200 * S)]),
        "jitter_ns": rng.choice([0, 0, 10 * MS, 10 * S]),
        "overlap": rng.choice(["allow", "allow", "skip", "queue"]),
    }


def _seat(rng: random.Random) -> Arguments:
    return {"seat": rng.randrange(READERS)}


def _read(rng: random.Random) -> Arguments:
    return {
        **_seat(rng),
        "cursor": rng.choice([0, 0, 1]),
        "durable": rng.random() < 0.5,
        "local": rng.random() < 0.5,
        "auto": rng.random() < 0.5,
    }


def _zoned_schedule(rng: random.Random) -> Arguments:
    minute = rng.choice(["*", "*/2", "0-59", "0-59", "0-59/2", "1-59/3"])
    hour = rng.choice(["*", "1-3", "1-3", "0-12"])
    return {
        **_new_schedule(rng), "every_ns": 0, "minutes": 1, "cron": f"{minute} {hour} * * *",
    }  # fmt: skip


def _far_ns(rng: random.Random) -> int:
    return rng.choice([_span_ns(rng), rng.randrange(300 * S)])


def _delayed_schedule(rng: random.Random) -> Arguments:
    every_ns = rng.choice([50 * MS, 300 * MS, S, 5 * S])
    return {
        **_new_schedule(rng), "every_ns": every_ns, "minutes": 0, "overlap": "delay", "limit": 30,
    }  # fmt: skip


def _topic(rng: random.Random) -> Arguments:
    return {"topic": rng.choice(TOPICS), "priority": rng.choice([0, 0, 3, 9])}


def _outage(rng: random.Random) -> Arguments:
    return {
        "span_ns": rng.choice([50, 300, 2000]) * rng.randrange(MS),
        "read_in_ns": 0,
        "late": False,
    }


def _late(rng: random.Random) -> Arguments:
    kind = rng.choice(["fire", "skip", "coalesce", "coalesce"])
    return {"kind": kind, "grace_ns": 0 if kind == "fire" else rng.choice(GRACES_NS)}


def _stale(rng: random.Random) -> Arguments:
    return {
        **_consumer(rng),
        "of": rng.randrange(CONSUMERS),
        "number": rng.randrange(10_000),
        "op": rng.choice(["ack", "ack", "nack", "extend", "release", "reject"]),
        "span_ns": rng.randrange(1, S),
    }


# ---- kinds of steps: weight and arguments -----------------------------------------------------

WORK: dict[str, tuple[int, Draw]] = {
    "add": (30, _timer),
    "cancel": (12, lambda rng: {**_key(rng), "by_ticket": rng.random() < 0.3}),
    "get": (6, _key),
    "rush": (4, _rush),
    "add_many": (6, _many),
    "cancel_many": (3, _keys),
    "watch": (10, _watch),
    "watch_many": (2, _watch_many),
    "advance_many": (2, _advance_many),
    "advance": (12, lambda rng: {**_watch_key(rng), "by": rng.choice([0, 1, 1, 2, 3])}),
    "bump": (3, lambda rng: {**_watch_key(rng), "by": rng.randrange(3)}),
    "fail": (3, _watch_key),
    "clear": (1, _watch_key),
    "forget": (1, _watch_key),
    "cancel_for_key": (1, _watch_key),
    "end_operation": (2, lambda rng: {**_client(rng), "number": rng.randrange(1000)}),
    "extend_operation": (
        2, lambda rng: {**_client(rng), "number": rng.randrange(1000), "span_ns": _delay_ns(rng)}
    ),
    "let_hold": (2, _watch_key),
    "bulk_load": (2, _bulk_load),
    "manage_bulk_load": (1, lambda rng: {**_bulk_load(rng), "action": rng.choice(ACTIONS)}),
    "publish": (1, lambda rng: {"topic": rng.choice(TOPICS)}),
    "settle": (1, lambda rng: {}),
    "ping": (1, lambda rng: {}),
    "list_sessions": (1, lambda rng: {}),
    "flush": (2, lambda rng: {**_client(rng), "raises": rng.random() < 0.6}),
    "add_far": (1, _key),
    "look": (2, lambda rng: {**_client(rng), "number": rng.randrange(1000)}),
    "late_check": (2, lambda rng: {**_watch_key(rng), **_span(rng)}),
    "stranger": (2, _stranger),
    "quota": (1, _quota),
}  # fmt: skip
FAULTS: dict[str, tuple[int, Draw]] = {
    "disturb": (40, lambda rng: {**_client(rng), **_disturb(rng)}),
    "storm": (18, _storm),
    "break": (6, _client),
    "disturb_subscriber": (
        12, lambda rng: {"subscriber": rng.randrange(SUBSCRIBERS), **_disturb(rng)}
    ),
    "cut": (2, lambda rng: {**_client(rng), **_span(rng)}),
    "freeze_client": (3, lambda rng: {**_client(rng), **_span(rng)}),
    "kill_client": (3, _kill),
    "leave": (2, lambda rng: {**_client(rng), **_span(rng), "lost": rng.choice([0, 1, 2])}),
    "lose_answer": (1, _client),
    "drop_session": (
        2, lambda rng: {**_client(rng), "late_ns": rng.choice([0, rng.randrange(S)])}
    ),
    "drop_busy": (
        2, lambda rng: {**_watch_many(rng), "count": 70, "late_ns": rng.randrange(10 * MS)}
    ),
    "ask_durably": (
        3,
        lambda rng: {
            **_client(rng), "span_ns": rng.randrange(50 * MS), "lost": rng.choice([0, 1, 2])
        },
    ),
    "freeze_subscriber": (
        3, lambda rng: {"subscriber": rng.randrange(SUBSCRIBERS), **_span(rng)}
    ),
    "kill_daemon": (19, lambda rng: {"calls": _calls(rng)}),
    "kill_start": (
        3,
        lambda rng: {
            "calls": rng.choice([rng.randrange(40), rng.randrange(150), rng.randrange(600)]),
            "capacity": _capacity(rng), "cut": rng.random() < 0.3,
        },
    ),
    "kill_subscriber": (
        2,
        lambda rng: {
            "subscriber": rng.randrange(SUBSCRIBERS),
            "topics": rng.choice([None, None, ["a"], ["a", "b"]]),
            "whole": rng.random() < 0.3,
        },
    ),
    "freeze_daemon": (4, _freeze),
    "bar": (3, lambda rng: {**_client(rng), **_span(rng)}),
    "stop_daemon": (
        2,
        lambda rng: {
            "capacity": _capacity(rng), "asked": rng.random() < 0.5,
            "publishes": rng.random() < 0.5,
        },
    ),
    "terminate": (2, lambda rng: {"calls": _calls(rng)}),
    "drain": (
        2, lambda rng: {**_span(rng), "calls": rng.choice([None, rng.randrange(400)])}
    ),
    "crowd": (1, _crowd),
    "two_starts": (3, lambda rng: {"calls": rng.randrange(80), "lost": rng.random() < 0.7}),
    "wrong_start": (6, lambda rng: {"kind": rng.choice(WRONG)}),
    "move": (2, lambda rng: {}),
    "disk": (12, _disk),
    "fail_sync": (2, lambda rng: {"span_ns": rng.randrange(100 * MS)}),
    "disk_full": (1, _span),
    "short_write": (2, lambda rng: {"times": rng.randrange(1, 4)}),
    "slow_disk": (2, lambda rng: {"commit_ns": rng.choice([MS, 20 * MS, 300 * MS]), **_span(rng)}),
    "rot": (
        3, lambda rng: {**_rot(rng), "cut": rng.random() < 0.5, "dead": rng.random() < 0.5}
    ),
    "ruin": (2, _ruin),
    "cut_at_copy": (
        3, lambda rng: {**_client(rng), "span_ns": rng.randrange(20 * MS, 100 * MS)}
    ),
    "lose_file": (1, lambda rng: {"file": rng.randrange(100)}),
    "power_cut": (2, lambda rng: {**_span(rng), "answered": rng.random() < 0.5}),
    "kill_snapshot": (1, lambda rng: {"more": rng.choice([0, 0, 3])}),
    "step_wall": (2, lambda rng: {"by_ns": rng.choice([-1, 1]) * rng.randrange(10 * S)}),
    "drift": (1, lambda rng: {"ppm": rng.randrange(-500, 500)}),
    "suspend": (1, lambda rng: {"span_ns": rng.randrange(20 * S)}),
    "lose_name": (2, lambda rng: {"private": rng.random() < 0.5}),
    "reuse_pid": (1, _client),
}  # fmt: skip
OF_THE_DISK = frozenset((
    "disk", "fail_sync", "disk_full", "short_write", "slow_disk", "rot", "ruin", "lose_file",
    "cut_at_copy", "kill_snapshot",
))  # fmt: skip
WITHOUT_WAL = frozenset({"ask_durably", "two_starts"})
OF_REAL_TIME = frozenset({"step_wall", "drift", "suspend", "lose_name", "drop_busy"})
OF_THE_WALL_CLOCK = frozenset({"step_wall", "drift"})
HEAVY: dict[str, tuple[int, Draw]] = {
    "burst": (
        20,
        lambda rng: {**_client(rng), "count": rng.randrange(10, 70), "rows": rng.choice([0, 0, 7])},
    ),
    "rush": (40, lambda rng: {**_rush(rng), "size": rng.choice([300, 60_000])}),
    "slow_disk": (10, FAULTS["slow_disk"][1]),
    "wade": (3, lambda rng: {**_watch_key(rng), "timeout_ns": _span_ns(rng)}),
    "cancel_crowd": (3, _watch_only),
    "overfill": (3, _watch_key),
}


DELIVERY: dict[str, tuple[int, Draw]] = {
    "create_group": (10, _new_group),
    "delete_group": (1, _group),
    "pause_group": (2, lambda rng: {**_group(rng), **_span(rng)}),
    "change_group": (2, lambda rng: {**_group(rng), "backoff_ns": rng.choice([0, MS, 50 * MS])}),
    "describe_group": (3, _group),
    "dead_letters": (4, lambda rng: {**_group(rng), "requeue": rng.random() < 0.7}),
    "consume": (20, _consume),
    "stale_answer": (12, _stale),
    "kill_consumer": (7, lambda rng: {**_consumer(rng), **_span(rng)}),
    "freeze_consumer": (7, lambda rng: {**_consumer(rng), **_span(rng)}),
    "close_consumer": (4, _consumer),
    "break_consumer": (4, _consumer),
    "disturb_consumer": (12, lambda rng: {**_consumer(rng), **_disturb(rng)}),
}  # fmt: skip
"""Steps of worlds with consumer groups."""
DELIVERY_SHARE = 0.4
"""Number of steps of consumer groups for each other step."""


SCHEDULES: dict[str, tuple[int, Draw]] = {
    "put_schedule": (6, _new_schedule),
    "repeat_put": (4, _slot),
    "delete_schedule": (1, _slot),
    "pause_schedule": (4, lambda rng: {**_slot(rng), **_span(rng)}),
    "trigger_schedule": (4, lambda rng: {**_slot(rng), "again": rng.random() < 0.4}),
    "describe_schedule": (4, _slot),
    "step_wall": (
        2, lambda rng: {"by_ns": rng.choice([rng.randrange(100 * S), -rng.randrange(20 * S)])}
    ),
}  # fmt: skip
"""Steps of worlds with schedules."""
MORE_SCHEDULES: dict[str, tuple[int, Draw]] = {
    "step_wall": (2, lambda rng: {"by_ns": -rng.randrange(90 * S)}),
    "put_schedule": (4, _delayed_schedule),
    "backfill_schedule": (
        6, lambda rng: {**_slot(rng), "back_ns": rng.randrange(300 * S), "span_ns": _far_ns(rng)}
    ),
}  # fmt: skip
"""Steps of worlds with schedules that are inserted after the other steps were chosen."""
SWINGS: dict[str, tuple[int, Draw]] = {
    "swing_wall": (1, lambda rng: {"by_ns": rng.randrange(30 * S, 90 * S)}),
}
"""Steps of some worlds with schedules. They move the wall clock forward, and then further back."""
MORE_SHARE, SWING_SHARE = 0.04, 0.02
SCHEDULES_SHARE = 0.15
"""Number of steps of schedules for each other step."""


READING: dict[str, tuple[int, Draw]] = {
    "read_cursor": (16, _read),
    "commit_cursor": (20, _seat),
    "kill_reader": (8, lambda rng: {**_seat(rng), "commits": rng.random() < 0.5}),
    "close_reader": (4, _seat),
    "freeze_reader": (5, lambda rng: {**_seat(rng), **_span(rng)}),
    "break_reader": (3, _seat),
    "disturb_reader": (6, lambda rng: {**_seat(rng), **_disturb(rng)}),
}  # fmt: skip
"""Steps of worlds whose subscribers have cursors."""
READING_SHARE = 0.25
"""Number of steps of such subscribers for each other step."""


def _with_readers(seed: int, setting: Setting, steps: list[Step]) -> list[Step]:
    """Insert steps of subscribers with cursors. Their random numbers leave the other steps as they
    are."""
    rng = random.Random(f"reader steps {seed}")
    first = [Step(MS, "read_cursor", cell, _read(rng)) for cell in range(setting.shards)]
    return first + _mixed(rng, setting, steps, READING, READING_SHARE)


def _mixed(
    rng: random.Random, setting: Setting, steps: list[Step], table: dict[str, tuple[int, Draw]],
    share: float,
) -> list[Step]:  # fmt: skip
    """Insert steps of a table before a share of the other steps."""
    found: list[Step] = []
    for step in steps:
        if rng.random() < share:
            found.append(_step(rng, setting, table, {}, 0.0))
        found.append(step)
    return found


TOPIC_STEPS: dict[str, tuple[int, Draw]] = {"set_topic": (1, _topic)}
"""Steps of worlds in which timers have priorities."""
LATE_STEPS: dict[str, tuple[int, Draw]] = {
    "set_late": (2, _late),
    "set_pace": (1, lambda rng: {"late_per_s": rng.choice([50, 500, 100_000])}),
    "add_many": (12, lambda rng: {**_many(rng), "delay_ns": rng.randrange(400 * MS)}),
    "freeze_daemon": (8, _outage),
}
"""Steps of worlds in which timers have late policies."""
PAUSE_STEPS: dict[str, tuple[int, Draw]] = {
    "set_pace": (1, LATE_STEPS["set_pace"][1]),
    "pause_topic": (
        3, lambda rng: {"topic": rng.choice([*TOPICS, NAMESPACE_SCOPE]), **_span(rng)}
    ),
    "add_many": (4, LATE_STEPS["add_many"][1]),
}  # fmt: skip
"""Steps of worlds in which topics are paused."""
TOPIC_SHARE, LATE_SHARE = 0.02, 0.15
PAUSE_SHARE = 0.06
"""Number of steps of topics, or of late timers, for each other step."""


def _with_topics(seed: int, setting: Setting, steps: list[Step]) -> list[Step]:
    """Insert steps of topics. Their random numbers leave the other steps as they are."""
    rng = random.Random(f"topic steps {seed}")
    kinds = (TOPIC_STEPS if setting.ranks else {}) | (LATE_STEPS if setting.late else {})
    found = [
        Step(MS, kind, cell, kinds[kind][1](rng))
        for cell in range(setting.shards)
        for kind in kinds
        if kind.startswith("set_")
    ]
    share = LATE_SHARE if setting.late else TOPIC_SHARE
    for step in steps:
        if rng.random() < share:
            found.append(_step(rng, setting, kinds, {}, 0.0))
        found.append(step)
    return found


def _with_pauses(seed: int, setting: Setting, steps: list[Step]) -> list[Step]:
    """Insert pauses of topics. Their random numbers leave the other steps as they are."""
    rng = random.Random(f"pause steps {seed}")
    pace = PAUSE_STEPS["set_pace"][1]
    first = [Step(MS, "set_pace", cell, pace(rng)) for cell in range(setting.shards)]
    return first + _mixed(rng, setting, steps, PAUSE_STEPS, PAUSE_SHARE)


def _with_schedules(seed: int, setting: Setting, steps: list[Step]) -> list[Step]:
    """Insert steps of schedules. Their random numbers leave the other steps as they are."""
    rng = random.Random(f"schedule steps {seed}")
    kinds = dict(SCHEDULES)
    if rng.random() < 0.5 or setting.virtual:  # times stay exact
        del kinds["step_wall"]
    found = [
        Step(MS, "put_schedule", cell, _new_schedule(rng) | {"slot": n})
        for cell in range(setting.shards)
        for n in range(SLOTS)
    ]
    for step in steps:
        if rng.random() < SCHEDULES_SHARE:
            found.append(_step(rng, setting, kinds, {}, 0.0))
        found.append(step)
    return _with_more_schedules(seed, setting, found)


def _with_more_schedules(seed: int, setting: Setting, steps: list[Step]) -> list[Step]:
    """Insert further steps of schedules. Their random numbers leave the other steps as they are."""
    rng = random.Random(f"more schedule steps {seed}")
    kinds, found = dict(MORE_SCHEDULES), []
    if setting.zone:
        kinds["put_schedule"] = (8, lambda rng: {**_zoned_schedule(rng), "zone": setting.zone})
    if rng.random() < 0.5 or setting.virtual:  # times stay exact
        del kinds["step_wall"]
    for step in steps:
        found.append(step)
        if rng.random() < MORE_SHARE:
            found.append(_step(rng, setting, kinds, {}, 0.0))
    return found if setting.virtual else _with(seed, "swing", setting, found, SWINGS, SWING_SHARE)


def _with(
    seed: int, name: str, setting: Setting, steps: list[Step], kinds: dict[str, tuple[int, Draw]],
    share: float,
) -> list[Step]:  # fmt: skip
    """Insert further steps into a third of the worlds. Their random numbers leave the other steps
    as they are."""
    rng = random.Random(f"{name} steps {seed}")
    if rng.random() > 0.3:
        return steps
    found = []
    for step in steps:
        found.append(step)
        if rng.random() < share:
            found.append(_step(rng, setting, kinds, {}, 0.0))
    return found


def _with_groups(seed: int, setting: Setting, steps: list[Step]) -> list[Step]:
    """Insert steps of consumer groups. Their random numbers leave the other steps as they are."""
    rng = random.Random(f"group steps {seed}")
    found = [
        Step(MS, kind, cell, DELIVERY[kind][1](rng))
        for cell in range(setting.shards)
        for kind in ["create_group"] * GROUPS + ["consume"] * CONSUMERS
    ]
    for step in steps:
        if rng.random() < DELIVERY_SHARE:
            found.append(_step(rng, setting, DELIVERY, {}, 0.0))
        found.append(step)
    return found


def script(seed: int, steps: int = 400) -> Script:
    """Return the script of a seed."""
    rng = random.Random(seed)
    setting = _setting(rng, seed)
    work = dict(WORK)
    if setting.heavy:
        work |= HEAVY
    if setting.virtual:
        work["move_clock"] = (25, lambda rng: {"by_ns": _delay_ns(rng) // 10})
        work["add_at"] = (
            10,
            lambda rng: {**_key(rng), "by_ns": _span_ns(rng), "delay_ns": _delay_ns(rng)},
        )
    faults = {
        kind: how
        for kind, how in FAULTS.items()
        if kind not in (WITHOUT_WAL if setting.wal else OF_THE_DISK)
        and not (setting.virtual and kind in OF_REAL_TIME)
    }
    if setting.resumes:
        work["watch"] = (40, lambda rng: {**_watch(rng), "client": RESUMER})
        work["succeed"] = (8, _watch_only)
        faults["kill_client"] = (12, lambda rng: {**_kill(rng), "client": RESUMER})
    if setting.only_rings and setting.wal:
        # The core gives all durable answers, so a power cut shows one that it gives early.
        faults["power_cut"] = (12, lambda rng: {**_span(rng), "answered": rng.random() < 0.9})
    # Each world omits some kinds of faults, so that the other kinds also occur without the omitted
    # kinds.
    missing = {kind for kind in faults if rng.random() < 0.3}
    if rng.random() < 0.4:  # without these faults, times stay exact over a reboot
        missing |= OF_THE_WALL_CLOCK
    for kind in missing & set(faults):
        del faults[kind]
    share = rng.choice([0.1, 0.3, 0.4])
    chosen = [_step(rng, setting, work, faults, share) for _ in range(steps)]
    if setting.groups:
        chosen = _with_groups(seed, setting, chosen)
    if setting.readers:
        chosen = _with_readers(seed, setting, chosen)
    if setting.ranks or setting.late:
        chosen = _with_topics(seed, setting, chosen)
    if setting.pauses:
        chosen = _with_pauses(seed, setting, chosen)
    return Script(setting, _with_schedules(seed, setting, chosen) if setting.schedules else chosen)


CHANGES = (
    ("Europe/Berlin", 1_711_846_800), ("Europe/Berlin", 1_729_990_800),
    ("America/New_York", 1_710_054_000), ("America/New_York", 1_730_613_600),
)  # fmt: skip
"""Zones, each with a time in seconds at which the zone skips or repeats an hour."""


def _with_zone(seed: int, setting: Setting) -> Setting:
    """Let some worlds with schedules begin shortly before a change of the offset of a zone."""
    rng = random.Random(f"zone {seed}")
    if not setting.schedules or setting.virtual or rng.random() < 0.5:
        return setting
    zone, at_s = rng.choice(CHANGES)
    return replace(setting, zone=zone, begin_wall_ns=at_s * S - rng.randrange(200 * S))


def _setting(rng: random.Random, seed: int) -> Setting:
    wal = rng.random() < 0.7
    shards = 2 if rng.random() < 0.1 else 1
    virtual = rng.random() < 0.1
    groups = not virtual and random.Random(f"groups {seed}").random() < 0.3
    schedules = random.Random(f"s {seed}").random() < 0.3
    late = not virtual and random.Random(f"late {seed}").random() < (0.2 if schedules else 0.4)
    unique = not virtual and random.Random(f"unique {seed}").random() < 0.15
    setting = Setting(
        seed=seed,
        wal=wal,
        virtual=virtual,
        shards=shards,
        durable=tuple(rng.choice([True, False, None]) for _ in range(CLIENTS)),
        durable_namespace=wal and shards == 1 and rng.random() < 0.2,
        boot_offsets_ns=tuple(
            rng.choice([-3600, 3600]) * S if rng.random() < 0.15 else 0 for _ in range(CLIENTS)
        ),
        capacity=rng.choice([64, 128, 512]),
        sessions=rng.choice([8, 16]),
        replay_capacity=rng.choice([64, 256]),
        heavy=wal and rng.random() < 0.2,
        parks=wal and rng.random() < 0.15,
        uids=rng.random() < 0.3,
        commit_ns=rng.choice([MS // 10, MS, 5 * MS]),
        resumes=rng.random() < 0.3,
        hasty=tuple(rng.random() < 0.2 for _ in range(CLIENTS)),
        short_queue=rng.random() < 0.2,
        hidden=tuple(rng.random() < 0.1 for _ in range(CLIENTS)),
        small_limits=tuple(group for group in SMALL_LIMITS if rng.random() < 0.15),
        local_subscribers=random.Random(f"local {seed}").choice([0, 1, SUBSCRIBERS]),
        groups=groups,
        schedules=schedules,
        zone="",
        begin_wall_ns=EPOCH_NS,
        readers=random.Random(f"readers {seed}").random() < 0.3,
        ranks=groups and random.Random(f"ranks {seed}").random() < 0.5,
        late=late,
        pauses=not virtual and random.Random(f"pauses {seed}").random() < 0.2,
        unique=unique,
        only_rings=random.Random(f"rings {seed}").random() < 0.3,
    )
    setting = _with_zone(seed, setting)
    if setting.readers:
        setting = replace(setting, sessions=16)
    if setting.readers and not (groups or setting.schedules):
        # The WAL has most notices. Triggers look for their notices in the replay buffer.
        setting = replace(setting, replay_capacity=16)
    setting = replace(setting, sessions=16, parks=False) if groups else setting
    return replace(setting, parks=False) if late or unique else setting


def _step(
    rng: random.Random,
    setting: Setting,
    work: dict[str, tuple[int, Draw]],
    faults: dict[str, tuple[int, Draw]],
    share: float,
) -> Step:
    wait_ns = int(rng.expovariate(1 / (2 * MS)))
    if rng.random() < 0.02:
        wait_ns = rng.randrange(3 * S)
    kinds = faults if faults and rng.random() < share else work
    kind = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
    return Step(wait_ns, kind, rng.randrange(setting.shards), kinds[kind][1](rng))
