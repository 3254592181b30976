"""Jobs on all sides: work that is handed to one of several consumers, which acknowledge it.

A side fills a queue, and gives each consumer an iterator over batches. A batch is a list with the
payload of each job in it, which begins with the deadline. The next step of the iterator
acknowledges the batch and yields an empty one. Empty batches also come if no job came for a while,
and once the consumer is connected. No side writes to a disk before it answers.

A side with `waits` reads the answer to each acknowledgement before it takes the next batch. The
others send acknowledgements along with later requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from own_daemon import own_daemon

from purgatoryd.clients import Client, Consumer

from . import beanstalkd_side, ours, postgres_side, redis_side
from .side import PATIENCE_S, Server, Start, boot_ns, lacking, stamped

BATCH = 64
"""Largest number of jobs in a batch."""
HELD = 4 * BATCH
"""Largest number of jobs that a Consumer holds: the daemon sends some while others are handled."""
WAIT_S = 0.05
POLL_S = 0.001
GROUP, STREAM = "jobs", b"jobs"
ADDED_AT_ONCE = 1000
Batches = Iterator[list[bytes]]


@dataclass(frozen=True)
class Side:
    """A contestant. `fill(server, deadlines in ns of the boot clock)` adds jobs, each with a
    payload of 48 bytes. `helper`: runs in a process of its own while jobs are added."""

    name: str
    missing: Callable[[], str]
    server: Callable[[Start], AbstractContextManager[Server]]
    fill: Callable[[Server, Sequence[int]], object]
    batches: Callable[[Server], Batches]
    helper: Callable[[Server], object] | None = None
    waits: bool = True


def slices(items: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the items of one call after another."""
    for at in range(0, len(items), ADDED_AT_ONCE):
        yield items[at : at + ADDED_AT_ONCE]


# ---- purgatoryd ----------------------------------------------------------------------------------


@contextmanager
def our_server(start: Start) -> Iterator[Server]:
    """Start a daemon with a consumer group."""
    settings = [*ours.settings(start), "--jobs", str(start.timers + 4096)]
    with own_daemon(start.directory, ours.NAME, settings) as pid:
        server = Server(start.directory, (pid,))
        with ours.client(server, "ring") as client:
            client.create_group(GROUP, [ours.TOPIC], max_backlog=start.timers + 1024, max_bytes=0)
        yield server


def our_fill(transport: str) -> Callable[[Server, Sequence[int]], None]:
    def fill(server: Server, deadlines_ns: Sequence[int]) -> None:
        client: Client
        with ours.client(server, transport) as client:
            number = 0
            for some in slices(deadlines_ns):
                rows = [
                    {"key": b"%016d" % n, "deadline_boot_ns": due_ns, "payload": stamped(due_ns)}
                    for n, due_ns in enumerate(some, number)
                ]
                number += len(rows)
                assert client.add_many(rows, topic=ours.TOPIC).ok

    return fill


def our_batches(transport: str, *, wait: bool = True) -> Callable[[Server], Batches]:
    def batches(server: Server) -> Batches:
        os.environ["PURGATORYD_DIR"] = str(server.address)
        with Consumer(
            ours.NAME, group=GROUP, create=False, max_in_flight=HELD, timeout=PATIENCE_S,
            **ours.TRANSPORTS[transport],
        ) as consumer:  # fmt: skip
            yield []
            while True:
                jobs = consumer.get_many(BATCH, WAIT_S)
                yield [job.payload for job in jobs]
                if jobs:
                    consumer.ack_many(jobs, wait=wait)
                    yield []

    return batches


# ---- beanstalkd ----------------------------------------------------------------------------------


def beanstalkd_fill(server: Server, deadlines_ns: Sequence[int]) -> None:
    beanstalkd_side.arm(server, list(deadlines_ns))


def beanstalkd_batches(server: Server) -> Batches:
    """Reserve and delete single jobs, as its clients do: the protocol has no batches."""
    import greenstalk

    client = beanstalkd_side.connected(server)
    yield []
    while True:
        try:
            job = client.reserve(timeout=1)
        except greenstalk.TimedOutError:
            yield []
            continue
        yield [job.body[16:]]
        client.delete(job)
        yield []


def beanstalkd_fill_when_due(server: Server, deadlines_ns: Sequence[int]) -> None:
    """Put each job without a delay once it is due, because delays are whole seconds. Jobs that are
    due go out together."""
    pipeline = beanstalkd_side.Pipeline(server.address)
    at = 0
    while at < len(deadlines_ns):
        time.sleep(max(0, deadlines_ns[at] - boot_ns()) / 1e9)
        now_ns, some = boot_ns(), deadlines_ns[at : at + ADDED_AT_ONCE]
        due = [(at + n, due_ns) for n, due_ns in enumerate(some) if due_ns <= now_ns]
        pipeline.put([b"%016d" % number + stamped(due_ns) for number, due_ns in due])
        at += len(due)


def beanstalkd_pipelined(server: Server) -> Batches:
    """Send up to BATCH requests before the first answer is read: twice as many after a batch for
    which there were jobs enough, one after another batch. Deletes are pipelined likewise."""
    pipeline, want = beanstalkd_side.Pipeline(server.address), 1
    yield []
    while True:
        jobs = pipeline.reserve(want)
        yield [body[16:] for _, body in jobs]
        if jobs:
            pipeline.delete([name for name, _ in jobs])
            yield []
        want = min(2 * want, BATCH) if len(jobs) == want else 1


# ---- Redis ---------------------------------------------------------------------------------------


@contextmanager
def redis_server(start: Start) -> Iterator[Server]:
    """Start Redis with a stream and its consumer group."""
    with redis_side.server(start) as server:
        redis_side.connected(server).xgroup_create(STREAM, GROUP, mkstream=True)
        yield server


def redis_fill(server: Server, deadlines_ns: Sequence[int]) -> None:
    """Add what is due to the stream, and the rest to a sorted set."""
    client, now_ns, number = redis_side.connected(server), boot_ns(), 0
    for some in slices(deadlines_ns):
        pipe = client.pipeline(transaction=False)
        for due_ns in some:
            number += 1
            if due_ns <= now_ns:
                pipe.xadd(STREAM, {b"p": stamped(due_ns)})
            else:
                pipe.zadd(redis_side.SET, {b"%016d" % number + stamped(due_ns): due_ns / 1000})
        pipe.execute()


def redis_mover(server: Server) -> None:
    """Move due members of the sorted set to the stream, every millisecond."""
    client = redis_side.connected(server)
    while True:
        due = client.zrangebyscore(redis_side.SET, 0, boot_ns() // 1000, start=0, num=1000)
        if due:
            pipe = client.pipeline(transaction=True)
            pipe.zrem(redis_side.SET, *due)
            for member in due:
                pipe.xadd(STREAM, {b"p": member[16:]})
            pipe.execute()
        else:
            time.sleep(POLL_S)


def redis_batches(server: Server) -> Batches:
    client, name = redis_side.connected(server), str(os.getpid())
    yield []
    while True:
        found: Any = client.xreadgroup(
            GROUP, name, {STREAM: b">"}, count=BATCH, block=round(WAIT_S * 1000)
        )
        entries = found[0][1] if found else []
        yield [fields[b"p"] for _, fields in entries]
        if entries:
            client.xack(STREAM, GROUP, *(entry for entry, _ in entries))
            yield []


def redis_pipelined(server: Server) -> Batches:
    """Acknowledge a batch in the same round trip that takes the next one."""
    client, name, handled = redis_side.connected(server), str(os.getpid()), list[bytes]()
    yield []
    while True:
        pipe = client.pipeline(transaction=False)
        if handled:
            pipe.xack(STREAM, GROUP, *handled)
        pipe.xreadgroup(GROUP, name, {STREAM: b">"}, count=BATCH, block=round(WAIT_S * 1000))
        found: Any = pipe.execute()[-1]
        entries = found[0][1] if found else []
        yield [fields[b"p"] for _, fields in entries]
        handled = [entry for entry, _ in entries]
        if handled:
            yield []


# ---- PostgreSQL ----------------------------------------------------------------------------------

LEASED = """SELECT key, payload FROM timers WHERE due_ns <= %s ORDER BY due_ns
    LIMIT %s FOR UPDATE SKIP LOCKED"""


def postgres_fill(server: Server, deadlines_ns: Sequence[int]) -> None:
    postgres_side.arm(server, list(deadlines_ns))


def postgres_batches(server: Server) -> Batches:
    """Lock due rows until the end of a transaction, which deletes them."""
    connection = postgres_side.connected(server.address)
    yield []
    while True:
        with connection.transaction():
            rows = connection.execute(LEASED, [boot_ns(), BATCH]).fetchall()
            yield [payload for _, payload in rows]
            if rows:
                keys = [key for key, _ in rows]
                connection.execute("DELETE FROM timers WHERE key = ANY(%s)", [keys])
        if rows:
            yield []
        else:
            time.sleep(POLL_S)


SIDES = (
    Side("purgatoryd", ours.missing, our_server, our_fill("ring"), our_batches("ring")),
    Side(
        "purgatoryd without waits", ours.missing, our_server, our_fill("ring"),
        our_batches("ring", wait=False), waits=False,
    ),
    Side("purgatoryd over ZeroMQ", ours.missing, our_server, our_fill("zmq"), our_batches("zmq")),
    Side(
        "beanstalkd", beanstalkd_side.missing, beanstalkd_side.server, beanstalkd_fill,
        beanstalkd_batches,
    ),
    Side(
        "beanstalkd pipelined", lambda: lacking(["beanstalkd"], []), beanstalkd_side.server,
        beanstalkd_fill_when_due, beanstalkd_pipelined, waits=False,
    ),
    Side(
        "Redis streams", redis_side.missing, redis_server, redis_fill, redis_batches, redis_mover
    ),
    Side(
        "Redis streams pipelined", redis_side.missing, redis_server, redis_fill, redis_pipelined,
        redis_mover, waits=False,
    ),
    Side(
        "PostgreSQL SKIP LOCKED", postgres_side.missing, postgres_side.server, postgres_fill,
        postgres_batches,
    ),
)  # fmt: skip
