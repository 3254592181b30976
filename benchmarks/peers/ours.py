"""Our side: a daemon, and clients that use the public interface."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from own_daemon import own_daemon, remove_arena_files

from purgatoryd.clients import (
    AllOf,
    AsyncClient,
    Client,
    DelayedOperation,
    DelayedOperationPurgatory,
    LocalPurgatory,
    Purgatory,
    Subscriber,
)
from purgatoryd.shm_layout import shm, wire
from purgatoryd.shm_layout.paths import paths_in

from .side import HOUR_S, PATIENCE_S, PAYLOAD, Job, Prepare, Run, Server, Start, boot_ns, stamp

NAME = "peers"
TOPIC = "peers"
TRANSPORTS: dict[str, dict[str, Any]] = {
    "ring": {"transport": "ring"},
    "zmq": {"transport": "zmq"},
}
"""Arguments of a client for each transport. Every scene runs with each of them."""


def missing() -> str:
    return ""


def settings(start: Start) -> list[str]:
    timers = start.timers + 4096
    words = [
        "--capacity", str(timers), "--payload-memory", str(timers * 80 + (16 << 20)),
        "--replay-buffer", str(1 << 17), "--log-level", "error",
    ]  # fmt: skip
    return [*words, "--wal-dir", str(start.files)] if start.log else words


@contextmanager
def server(start: Start) -> Iterator[Server]:
    with own_daemon(start.directory, NAME, settings(start)) as pid:
        yield Server(start.directory, (pid,))


@contextmanager
def survivor(start: Start) -> Iterator[Server]:
    """Start a daemon, and kill it at the end. Its arena stays, unless it has a WAL: a reboot would
    leave only the WAL."""
    command = [sys.executable, "-m", "purgatoryd.cli", "run", "--name", NAME, *settings(start)]
    environment = {**os.environ, "PURGATORYD_DIR": str(start.directory)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        if not process.stdout.readline().startswith(b"ready"):
            raise SystemExit("the daemon did not start")
        yield Server(start.directory, (process.pid,))
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        if start.log:
            forget(start)


def forget(start: Start) -> None:
    """Remove the arena of a daemon that was killed."""
    remove_arena_files(paths_in(start.directory, NAME))


def arena_bytes(server: Server) -> int:
    paths = paths_in(server.address, NAME)
    return sum(
        (shm.MOUNT / name[1:]).stat().st_blocks * 512 for name in (paths.arena, paths.private)
    )


def memory_bytes(server: Server) -> int:
    """Return the memory of the daemon with both files of its arena. Its own memory is the anonymous
    part, because the rest would count the arena twice."""
    (pid,) = server.pids
    status = Path(f"/proc/{pid}/status").read_text()
    own = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(own.split()[1]) * 1024 + arena_bytes(server)


def client(
    server: Server, transport: str, durable: bool = False, spin_us: int | None = None
) -> Client:
    os.environ["PURGATORYD_DIR"] = str(server.address)
    return Client(
        NAME, timeout=PATIENCE_S, durable=durable, spin_us=spin_us, **TRANSPORTS[transport]
    )


# ---- calls ---------------------------------------------------------------------------------------

Work = Callable[[Client, Job], Run]


def asleep(server: Server, job: Job) -> Run:
    """Add over rings, with calls that never spin."""
    return add(client(server, "ring", spin_us=0), job)


def over(transport: str, work: Work, durable: bool = False) -> Prepare:
    """Return a client's work over a transport."""
    return lambda server, job: work(client(server, transport, durable), job)


def columns(timers: Sequence[tuple[bytes, float]]) -> dict[str, Any]:
    keys, delays_s = zip(*timers, strict=True)
    return {
        "key": np.array(keys), "delay": np.array(delays_s),
        "payload": np.full(len(keys), b"p" * len(PAYLOAD)),
    }  # fmt: skip


def rows(timers: Sequence[tuple[bytes, float]]) -> list[tuple[bytes, float, str, bytes]]:
    return [(key, delay_s, "default", PAYLOAD) for key, delay_s in timers]


def add(c: Client, job: Job) -> Run:
    timers = job.timers()

    def run() -> None:
        for key, delay_s in job.paced(timers):
            c.add(key, delay_s, payload=PAYLOAD)

    return run


def add_columns(c: Client, job: Job) -> Run:
    return each(c.add_many, [columns(some) for some in job.calls(job.timers())])


def add_rows(c: Client, job: Job) -> Run:
    return each(c.add_many, [rows(some) for some in job.calls(job.timers())])


def each(call: Callable[[Any], object], arguments: list[Any]) -> Run:
    def run() -> None:
        for one in arguments:
            call(one)

    return run


def add_packed(c: Client, job: Job) -> Run:
    timers = job.timers()

    def run() -> None:
        for key, delay_s in timers:
            c.add(key, delay_s, payload=PAYLOAD, wait=False)
        c.flush()

    return run


def filled(c: Client, job: Job) -> list[bytes]:
    """Add all keys of a job; return them."""
    c.add_many(columns(job.timers()))
    return job.keys()


def cancel(c: Client, job: Job) -> Run:
    return each(c.cancel, filled(c, job))


def cancel_columns(c: Client, job: Job) -> Run:
    return each(c.cancel_many, [np.array(keys) for keys in job.calls(filled(c, job))])


def cancel_unwaited(c: Client, job: Job) -> Run:
    calls = [np.array(keys) for keys in job.calls(filled(c, job))]

    def run() -> None:
        for keys in calls:
            c.cancel_many(keys, wait=False)
        c.flush()

    return run


def mix(c: Client, job: Job) -> Run:
    """Add each key and cancel it, one in a call."""
    timers = job.timers()

    def run() -> None:
        for key, delay_s in timers:
            c.add(key, delay_s, payload=PAYLOAD)
            c.cancel(key)

    return run


def mix_columns(c: Client, job: Job) -> Run:
    calls = [columns(some) for some in job.calls(job.timers())]

    def run() -> None:
        for added in calls:
            c.add_many(added)
            c.cancel_many(added["key"])

    return run


# ---- operations ----------------------------------------------------------------------------------

AnyPurgatory = Purgatory | LocalPurgatory


def watched_rows(p: AnyPurgatory, job: Job) -> Run:
    """Watch a key for each operation, advance all keys, and read all outcomes."""
    calls = job.calls(job.keys())

    def run() -> None:
        for keys in calls:
            watched = p.watch_many([(key, AllOf({key: 1}), HOUR_S) for key in keys])
            p.advance_many([(key, 1) for key in keys])
            for operation in watched:
                operation.result(PATIENCE_S)

    return run


def watched_columns(p: AnyPurgatory, job: Job) -> Run:
    """The same with columns, which are made before."""
    calls = []
    for keys in map(np.array, job.calls(job.keys())):
        ones = np.ones(len(keys), "i8")
        watch = {"key": keys, "watch_key": keys, "timeout": np.full(len(keys), HOUR_S)}
        calls.append((watch, {"key": keys, "watermark": ones}))

    def run() -> None:
        for watch, advance in calls:
            operations = p.watch_many(watch)
            p.advance_many(advance)
            operations.wait(PATIENCE_S)

    return run


def watched_singly(p: AnyPurgatory, job: Job) -> Run:
    """The same with one operation a call."""
    keys = job.keys()

    def run() -> None:
        for key in keys:
            operation = p.watch(key, AllOf({key: 1}), HOUR_S)
            p.advance(key, 1)
            operation.result(PATIENCE_S)

    return run


def of_daemon(transport: str, prepare: Callable[[AnyPurgatory, Job], Run]) -> Prepare:
    def connected(server: Server, job: Job) -> Run:
        os.environ["PURGATORYD_DIR"] = str(server.address)
        return prepare(Purgatory(NAME, timeout=PATIENCE_S, **TRANSPORTS[transport]), job)

    return connected


def of_process(prepare: Callable[[AnyPurgatory, Job], Run]) -> Prepare:
    """Return the work with a purgatory in the client's process, without a daemon."""

    def made(_: Server, job: Job) -> Run:
        return prepare(LocalPurgatory(capacity=2 * job.per_call, watch_keys=job.count), job)

    return made


class Flag(DelayedOperation):
    """An operation that is complete once its flag is set."""

    up = False

    def try_complete(self) -> bool:
        return self.up and self.force_complete()

    def on_complete(self) -> None: ...


def delayed(_: Server, job: Job) -> Run:
    """The work of `watched_singly` with a condition in Python for each operation."""
    keys, p = job.keys(), DelayedOperationPurgatory("peers")

    def run() -> None:
        for key in keys:
            operation = Flag(HOUR_S)
            p.try_complete_else_watch(operation, [key])
            operation.up = True
            if p.check_and_complete(key) != 1:
                raise SystemExit("an operation did not complete")

    return run


# ---- asyncio -------------------------------------------------------------------------------------


def awaited(transport: str, server: Server, job: Job) -> Run:
    """Await adds one by one, or `job.per_call` of them at once."""
    os.environ["PURGATORYD_DIR"] = str(server.address)
    calls = job.calls(job.timers())

    async def connected() -> AsyncClient:
        return await AsyncClient(NAME, timeout=PATIENCE_S, **TRANSPORTS[transport]).connect()

    async def work(c: AsyncClient) -> None:
        for some in calls:
            adds: list[Coroutine[Any, Any, Any]]
            adds = [c.add(key, delay_s, payload=PAYLOAD) for key, delay_s in some]
            await (adds[0] if len(adds) == 1 else asyncio.gather(*adds))

    runner = asyncio.Runner()
    c = runner.run(connected())
    return lambda: runner.run(work(c))


# ---- firing --------------------------------------------------------------------------------------


def arm(server: Server, deadlines_ns: list[int], first: int = 0) -> None:
    """Arm timers whose payload holds the deadline; keys are numbers from `first` on."""
    c = client(server, next(iter(TRANSPORTS)))
    due_ns = np.array(deadlines_ns, np.int64)
    payloads = np.zeros((len(due_ns), len(PAYLOAD) // 8), np.int64)
    payloads[:, 0] = due_ns
    payloads[:, -1] = -1  # numpy strips NUL bytes at the end
    keys = np.array([b"%016d" % n for n in range(first, first + len(due_ns))])
    c.add_many(
        {"key": keys, "deadline_boot_ns": due_ns, "payload": payloads.view("S48")[:, 0]},
        topic=TOPIC,
    )
    c.close()


Late = Iterator[tuple[int, int]]
"""Yields (time of receipt, deadline) for each timer, on the boot clock in ns; (0, 0) at first, as
soon as no notice can be missed."""


def subscriber(server: Server, transport: str) -> Subscriber:
    os.environ["PURGATORYD_DIR"] = str(server.address)
    return Subscriber(NAME, topics=[TOPIC], timeout=PATIENCE_S, transport=transport)


def subscribed(transport: str, server: Server) -> Late:
    """Receive with a Subscriber, one notice at a time."""
    with subscriber(server, transport) as notices:
        yield 0, 0
        for notice in notices:
            yield boot_ns(), stamp(notice.payload)


def column_wise(server: Server) -> Late:
    """Receive columns with a Subscriber that reads the arena."""
    with subscriber(server, "auto") as notices:
        yield 0, 0
        while some := notices.get_many():
            now_ns = boot_ns()
            yield from ((now_ns, due_ns) for due_ns in some.deadlines_boot_ns.tolist())


def plain(server: Server) -> Late:
    """Receive with a bare SUB socket, which cannot fill gaps."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.SUBSCRIBE, wire.topic_frame(b"default", TOPIC.encode()))
    socket.connect(paths_in(server.address, NAME).pub_endpoint)
    time.sleep(0.5)  # the subscription takes effect some time after it was made
    yield 0, 0
    while True:
        _, body = socket.recv_multipart()
        now_ns = boot_ns()
        for notice in wire.decode_notices(body, wire.decode_notice_head(body).records):
            yield now_ns, stamp(notice.payload)


def works(transport: str) -> dict[str, Prepare]:
    """Return the work of clients over one transport, by name."""
    return {
        "add": over(transport, add), "add_columns": over(transport, add_columns),
        "add_rows": over(transport, add_rows), "add_packed": over(transport, add_packed),
        "cancel": over(transport, cancel), "cancel_columns": over(transport, cancel_columns),
        "cancel_unwaited": over(transport, cancel_unwaited), "mix": over(transport, mix),
        "mix_columns": over(transport, mix_columns),
        "add_durable": over(transport, add, durable=True),
        "awaited": partial(awaited, transport),
        "operations": of_daemon(transport, watched_rows),
        "operation_columns": of_daemon(transport, watched_columns),
    }  # fmt: skip
