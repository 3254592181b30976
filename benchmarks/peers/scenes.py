"""Scenes of the comparison. Each runs its contestants alternately, with new servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import bench_core

from . import (
    beanstalkd_side,
    cores,
    crowd,
    echo_side,
    firing,
    footprint,
    nats_side,
    ours,
    ours_spinning,
    postgres_side,
    redis_side,
)
from .crowd import Sample
from .side import ROOT, Job, Prepare, Server, Start

OURS = "purgatoryd"
"""The first word of the names of our contestants."""
LOCAL = next(iter(ours.TRANSPORTS))
"""The transport that a client on the daemon's host takes by itself."""
SPINNING, ASLEEP = "ring, spinning", "ring, asleep"
RAW, PY, AIO = "redis raw", "redis-py", "redis.asyncio"
POLLED, KEYSPACE = "redis polled", "redis keyspace"
BEANSTALKD, ECHO, POSTGRES, NATS = "beanstalkd", "ZeroMQ echo", "PostgreSQL", "NATS"

SIDES = (redis_side, beanstalkd_side, postgres_side, nats_side)
Target = tuple[str, float]
"""(">=" or "<=", bound)."""
Targets = dict[tuple[str, str, str], Target]
"""Bounds by our contestant, peer and figure: of the ratio, or of our figure if the peer is ""."""


class Scene(NamedTuple):
    """A measure with its contestants. `figures`: which figures of a sample are compared."""

    name: str
    figures: tuple[str, ...]
    contestants: dict[str, Callable[[], Sample]]
    targets: Targets


@contextmanager
def started(side: ModuleType, timers: int, log: str = "") -> Iterator[Server]:
    """Start a side's server in temporary directories; only a log needs a disk."""
    disk = ROOT / "build" if log else None
    with (
        TemporaryDirectory() as directory,
        TemporaryDirectory(dir=disk) as files,
        side.server(Start(Path(directory), Path(files), timers, log)) as server,
    ):
        yield server


def our_name(way: str = "", transport: str = LOCAL) -> str:
    return " ".join(filter(None, (OURS, way, f"({transport})" if transport else "")))


LOCAL_SUBSCRIBER, COLUMNS = our_name("Subscriber", "arena"), our_name("get_many", "arena")


def present(contestants: dict[str, tuple[ModuleType, Any]]) -> dict[str, tuple[ModuleType, Any]]:
    """Return the contestants whose programs are installed."""
    return {name: one for name, one in contestants.items() if not one[0].missing()}


# ---- calls ---------------------------------------------------------------------------------------

Contestants = dict[str, tuple[ModuleType, Prepare]]


def us(**ways: str) -> Contestants:
    """Return our contestants over every transport: way = name of the work."""
    return {
        our_name(way.rstrip("_"), transport): (ours, ours.works(transport)[work])
        for transport in ours.TRANSPORTS
        for way, work in ways.items()
    }


def calls(
    name: str, contestants: Contestants, job: Job, clients: int = 1,
    figures: tuple[str, ...] = ("per_s",), log: str = "", targets: Targets | None = None,
) -> Scene:  # fmt: skip
    """Return a scene of clients that call at the same time."""

    def trial(side: ModuleType, prepare: Prepare) -> Sample:
        with started(side, clients * job.count, log) as server:
            return crowd.calls(prepare, server, job, clients)

    runs: dict[str, Callable[[], Sample]] = {
        name: partial(trial, *one) for name, one in present(contestants).items()
    }
    return Scene(name, figures, runs, targets or {})


def single_calls(n: Callable[[int], int]) -> Iterator[Scene]:
    for clients, count in ((1, 4000), (4, 2000), (32, 250), (256, 40)):
        peers: Contestants = {
            RAW: (redis_side, redis_side.add),
            PY: (redis_side, redis_side.py_add),
        }
        targets: Targets = {}
        if clients <= 4:
            peers[BEANSTALKD] = (beanstalkd_side, beanstalkd_side.add)
        if clients == 1:
            peers[ECHO] = (echo_side, echo_side.ask)
            peers[our_name("", SPINNING)] = (ours_spinning, ours_spinning.add)
            peers[our_name("", ASLEEP)] = (ours, ours.asleep)
            targets = {
                (our_name("", SPINNING), PY, "per_s"): (">=", 6.0),
                (our_name(), RAW, "per_s"): (">=", 1.3), (our_name(), PY, "per_s"): (">=", 2.0),
                (our_name("", ASLEEP), RAW, "per_s"): (">=", 1.3),
                (our_name("", ASLEEP), PY, "per_s"): (">=", 2.0),
                (our_name("", "zmq"), ECHO, "per_s"): (">=", 0.7),
            }  # fmt: skip
        title = f"add, one a call, {clients} client{'s' * (clients > 1)}"
        yield calls(title, us(_="add") | peers, Job(n(count)), clients, targets=targets)
        if clients == 1:
            yield calls(
                "add, each call timed", us(_="add") | peers, Job(n(count), timed=True),
                figures=("p50_us",), targets={(our_name("", SPINNING), "", "p50_us"): ("<=", 4.0)},
            )  # fmt: skip
    yield calls(
        "cancel, one a call",
        us(_="cancel")
        | {RAW: (redis_side, redis_side.cancel), PY: (redis_side, redis_side.py_cancel),
           BEANSTALKD: (beanstalkd_side, beanstalkd_side.cancel)}, Job(n(4000)),
    )  # fmt: skip
    yield calls(
        "256 clients, 6,000 calls a second", us(_="add") | {PY: (redis_side, redis_side.py_add)},
        Job(n(80), gap_s=256 / 6000), 256, ("server_us",),
        targets={(our_name(), PY, "server_us"): ("<=", 1.0)},
    )  # fmt: skip
    for clients, bound in ((1, 0.9), (16, 1.0)):
        yield calls(
            f"durable add, one a call, {clients} client{'s' * (clients > 1)}",
            us(_="add_durable")
            | {RAW: (redis_side, redis_side.add),
               BEANSTALKD: (beanstalkd_side, beanstalkd_side.add)},
            Job(n(1600 // clients + 200)), clients, log="always",
            targets={(our_name(), RAW, "per_s"): (">=", bound)},
        )  # fmt: skip


def batches(n: Callable[[int], int]) -> Iterator[Scene]:
    peers: Contestants = {RAW: (redis_side, redis_side.add), PY: (redis_side, redis_side.py_add)}
    ways = us(columns="add_columns", rows="add_rows")
    for per_call, count, bounds in ((100, 100_000, (1.3, 1.0)), (1000, 300_000, (2.0, 1.2))):
        targets: Targets = {
            (our_name(way), RAW, "per_s"): (">=", bound)
            for way, bound in zip(("columns", "rows"), bounds, strict=True)
        }
        yield calls(
            f"add, {per_call} a call", ways | peers, Job(n(count), per_call), targets=targets
        )
    yield calls(
        "add, 1000 a call, 4 clients", us(columns="add_columns") | {RAW: peers[RAW]},
        Job(n(150_000), 1000), 4,
    )  # fmt: skip
    peers = {RAW: (redis_side, redis_side.cancel), PY: (redis_side, redis_side.py_cancel)}
    for per_call, count, bound in ((100, 100_000, 0.9), (1000, 300_000, 1.2)):
        ways = us(columns="cancel_columns")
        bounds_of: Targets = {(our_name("columns"), RAW, "per_s"): (">=", bound)}
        if per_call == 1000:
            ways |= us(unwaited="cancel_unwaited")
            bounds_of[our_name("unwaited"), RAW, "per_s"] = (">=", 1.7)
        yield calls(
            f"cancel, {per_call} a call", ways | peers, Job(n(count), per_call), targets=bounds_of
        )
    for per_call, count, work, bound in (
        (1, 2000, "mix", 1.0), (100, 50_000, "mix_columns", 0.6),
        (1000, 200_000, "mix_columns", 0.2),
    ):  # fmt: skip
        yield calls(
            f"add and cancel, {per_call} a call",
            us(_=work) | {RAW: (redis_side, redis_side.mix)},
            Job(n(count), per_call), figures=("per_s", "server_us"),
            targets={(our_name(), RAW, "server_us"): ("<=", bound)},
        )  # fmt: skip
    yield calls(
        "add, a loop that does not wait",
        us(_="add_packed") | {"redis-py pipeline": (redis_side, redis_side.py_pipeline)},
        Job(n(50_000), 1000),
        targets={
            (our_name(), "redis-py pipeline", "per_s"): (">=", 8.0),
            (our_name(), "", "per_s"): (">=", 1.2e6),
        },
    )


def coroutines(n: Callable[[int], int]) -> Iterator[Scene]:
    separate: Contestants = {AIO: (redis_side, redis_side.awaited(redis_side.separate))}
    pipeline = (redis_side, redis_side.awaited(redis_side.pipeline))
    yield calls(
        "asyncio, awaited one by one", us(_="awaited") | separate, Job(n(3000)),
        targets={(our_name(), AIO, "per_s"): (">=", 1.5)},
    )  # fmt: skip
    yield calls(
        "asyncio, 100 at once", us(_="awaited") | separate | {f"{AIO} pipeline": pipeline},
        Job(n(20_000), 100),
    )  # fmt: skip


def purgatories(n: Callable[[int], int]) -> Iterator[Scene]:
    for per_call in (100, 1000):
        yield calls(
            f"operations: watch, advance, outcome, {per_call:,} a call",
            us(columns="operation_columns", rows="operations"), Job(n(40_000), per_call),
            figures=("per_core_s",),
            targets={(our_name("columns"), "", "per_core_s"): (">=", 250_000.0)},
        )  # fmt: skip

    def alone(prepare: Prepare, job: Job) -> Callable[[], Sample]:
        return lambda: crowd.calls(prepare, Server(Path(), ()), job, 1)

    by_columns = ours.of_process(ours.watched_columns)
    by_rows, singly = ours.of_process(ours.watched_rows), ours.of_process(ours.watched_singly)
    contestants = {
        f"{OURS} columns, 1,000 a call": alone(by_columns, Job(n(200_000), 1000)),
        f"{OURS} columns, 100 a call": alone(by_columns, Job(n(100_000), 100)),
        f"{OURS} rows, 100 a call": alone(by_rows, Job(n(20_000), 100)),
        f"{OURS} one a call": alone(singly, Job(n(20_000))),
        f"{OURS} DelayedOperation": alone(ours.delayed, Job(n(50_000))),
    }
    yield Scene(
        "operations inside one process", ("per_core_s",), contestants,
        {
            (f"{OURS} columns, {per_call} a call", "", "per_core_s"): (">=", 500_000.0)
            for per_call in ("1,000", "100")
        },
    )  # fmt: skip


def structures(n: Callable[[int], int]) -> Iterator[Scene]:
    """Yield the scenes of the core: one process, no call, random delays."""
    names = {f"{OURS} {name}": name for name in (cores.KEYED, cores.WHEEL)}
    names |= {name: name for name in bench_core.libraries()}
    for title, work, figures in (
        ("core, 1,000,000 pending, mix of a purgatory", cores.mix, ("ns",)),
        ("core, 1,000,000 pending", cores.ops, ("add_ns", "cancel_ns", "expire_ns")),
    ):
        runs: dict[str, Callable[[], Sample]] = {
            one: partial(work, name, n(1_000_000)) for one, name in names.items()
        }
        yield Scene(title, figures, runs, {})


# ---- firing --------------------------------------------------------------------------------------


def fire(
    name: str, contestants: dict[str, tuple[ModuleType, Any]], timers: firing.Timers,
    figures: tuple[str, ...], targets: Targets,
) -> Scene:  # fmt: skip
    """Return a scene of timers that come due. A contestant: (side, (arm, receive, polls))."""

    def trial(side: ModuleType, way: tuple[firing.Arm, firing.Receive, bool]) -> Sample:
        def serve() -> AbstractContextManager[Server]:
            return started(side, timers.count + timers.far)

        return firing.firing(serve, *way, timers)

    runs: dict[str, Callable[[], Sample]] = {
        one: partial(trial, *way) for one, way in present(contestants).items()
    }
    return Scene(name, figures, runs, targets)


def fired(n: Callable[[int], int]) -> Iterator[Scene]:
    subscribers: dict[str, tuple[ModuleType, Any]] = {
        name: (ours, (ours.arm, receive, False))
        for name, receive in (
            (LOCAL_SUBSCRIBER, partial(ours.subscribed, "auto")),
            (COLUMNS, ours.column_wise),
            (our_name("Subscriber", "zmq"), partial(ours.subscribed, "zmq")),
        )
    }
    socket = {our_name("SUB socket", "zmq"): (ours, (ours.arm, ours.plain, False))}
    polled = {POLLED: (redis_side, (redis_side.arm, redis_side.polled, True))}
    others = {
        KEYSPACE: (redis_side, (redis_side.arm_keys, redis_side.notified, False)),
        BEANSTALKD: (beanstalkd_side, (beanstalkd_side.arm, beanstalkd_side.reserved, False)),
    }
    us_ = LOCAL_SUBSCRIBER
    late = ("p50_ms", "p99_ms", "max_ms")
    bounds: Targets = {(us_, POLLED, "p50_ms"): ("<=", 0.15), (us_, POLLED, "p99_ms"): ("<=", 1.0)}
    cpu: Targets = {(us_, POLLED, "server_us"): ("<=", 1.0), (us_, "", "server_us"): ("<=", 8.0)}
    yield fire(
        "10,000 due a second", subscribers | socket | polled | others,
        firing.Timers(n(40_000), 10_000), (*late, "server_us"), bounds | cpu,
    )  # fmt: skip
    for rate, far, count in (
        (10_000, 10**6, 40_000), (50_000, 0, 150_000), (50_000, 10**6, 150_000)
    ):  # fmt: skip
        yield fire(
            f"{rate:,} due a second{', 1,000,000 far' * bool(far)}", subscribers | polled,
            firing.Timers(n(count), rate, n(far) if far else 0), (*late, "server_us"),
            bounds if rate == 10_000 else {},
        )  # fmt: skip
    yield fire(
        "100,000 due at one instant", subscribers | polled, firing.Timers(n(100_000), 0),
        ("max_ms", "server_us"), {(one, POLLED, "max_ms"): ("<=", 0.7) for one in (us_, COLUMNS)},
    )  # fmt: skip


# ---- memory and recovery -------------------------------------------------------------------------


def stood(n: Callable[[int], int]) -> Iterator[Scene]:
    timers = n(1_000_000)
    sides = present({OURS: (ours, 0), "redis": (redis_side, 0), BEANSTALKD: (beanstalkd_side, 0)})
    yield Scene(
        "memory of a timer", ("bytes",),
        {
            name: partial(footprint.memory, side.server, side.arm, side.memory_bytes, timers)
            for name, (side, _) in sides.items()
        },
        {},
    )  # fmt: skip

    def recover(side: ModuleType, log: str) -> Sample:
        serve, forget = (
            (ours.survivor, ours.forget) if side is ours else (side.server, lambda start: None)
        )
        return footprint.recovery(serve, side.arm, forget, timers, log)

    runs: dict[str, Callable[[], Sample]] = {our_name("arena", ""): partial(recover, ours, "")}
    runs[our_name("WAL", "")] = partial(recover, ours, "later")
    runs |= {
        name: partial(recover, side, "later") for name, (side, _) in sides.items() if name != OURS
    }
    yield Scene("ready after kill -9, 1,000,000 pending", ("ready_s",), runs, {})


def nightly_scenes(n: Callable[[int], int]) -> Iterator[Scene]:
    peers: Contestants = {
        POSTGRES: (postgres_side, postgres_side.add),
        NATS: (nats_side, nats_side.add),
    }
    for work, per_call, count in (("add", 1, 2000), ("add_columns", 1000, 100_000)):
        yield calls(f"nightly: add, {per_call} a call", us(_=work) | peers, Job(n(count), per_call))
    yield calls(
        "nightly: durable add, 16 clients", us(_="add_durable") | {POSTGRES: peers[POSTGRES]},
        Job(n(300)), 16, log="always",
    )  # fmt: skip
    yield fire(
        "nightly: 10,000 due a second",
        {
            LOCAL_SUBSCRIBER: (ours, (ours.arm, partial(ours.subscribed, "auto"), False)),
            POSTGRES: (postgres_side, (postgres_side.arm, postgres_side.polled, True)),
            NATS: (nats_side, (nats_side.arm, nats_side.delivered, False)),
        },
        firing.Timers(n(40_000), 10_000, lead_s=4.0), ("p50_ms", "p99_ms", "server_us"), {},
    )  # fmt: skip


def scenes(scale: float = 1.0, nightly: bool = False) -> list[Scene]:
    """Return all scenes. `scale`: factor of the sizes, for a quick run. `nightly`: with the peers
    that take longer."""

    def n(count: int) -> int:
        return max(1, int(count * scale))

    return [
        *single_calls(n), *batches(n), *coroutines(n), *purgatories(n), *structures(n),
        *fired(n), *stood(n),
        *(nightly_scenes(n) if nightly else ()),
    ]  # fmt: skip


def skipped() -> list[str]:
    """Return which peers are left out, and why."""
    found = [
        f"{side.__name__.rpartition('.')[2].removesuffix('_side')}: no {reason}"
        for side in SIDES
        if (reason := side.missing())
    ]
    return [
        *found,
        *cores.missing(),
        "Kafka's purgatory: no package of Debian or PyPI has its code",
    ]  # fmt: skip
