"""Redis: timers as members of a sorted set, each with its deadline as the score.

A member holds key and payload, 64 bytes; so a removal repeats the payload. "raw" is a socket that
sends requests which were encoded before the clock starts.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .side import PAYLOAD, Job, Run, Server, Start, boot_ns, child, lacking, program, stamp, stamped

SET = b"timers"
DUE_AT_ONCE = 1000
"""Most members that the polling process takes in one request."""
POLL_S = 0.001
ARMED_AT_ONCE = 1000


def missing() -> str:
    return lacking(["redis-server"], ["redis", "hiredis"])


def command(start: Start) -> list[str]:
    words = [
        str(program("redis-server")), "--port", "0", "--unixsocket", str(socket_in(start)),
        "--save", "", "--dir", str(start.files), "--maxclients", "1000",
        "--notify-keyspace-events", "Ex",
    ]  # fmt: skip
    sync = {"always": "always", "later": "everysec"}
    return [*words, "--appendonly", "yes", "--appendfsync", sync[start.log]] if start.log else words


def socket_in(start: Start) -> Path:
    return start.directory / "redis.sock"


def serves(path: Path) -> bool:
    """Return whether a server answers, and has read all its data."""
    with suppress(OSError, ValueError):  # a ValueError: it reads its log
        return Raw(path).ask(encode(b"PING")).startswith(b"+PONG")
    return False


@contextmanager
def server(start: Start) -> Iterator[Server]:
    path = socket_in(start)
    with child(command(start), lambda: serves(path)) as pid:
        yield Server(path, (pid,))


def memory_bytes(server: Server) -> int:
    return server.memory_bytes()


# ---- raw -----------------------------------------------------------------------------------------


def encode(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


class Raw:
    """A connection whose answers are one line each, or are parsed by hiredis."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))

    def ask(self, request: bytes) -> bytes:
        """Send a request and return its answer, which must be one line."""
        self.socket.sendall(request)
        answer = self.socket.recv(4096)
        while not answer.endswith(b"\r\n"):
            answer += self.socket.recv(4096)
        if answer.startswith(b"-"):
            raise ValueError(answer.decode())
        return answer


Members = Mapping[bytes, float]
"""Member -> score, the deadline in us of the boot clock."""


def members(job: Job) -> list[Members]:
    """Return the members of each call."""
    now_us = boot_ns() // 1000
    return [
        {key + PAYLOAD: now_us + delay_s * 1e6 for key, delay_s in some}
        for some in job.calls(job.timers())
    ]


def zadd(some: Members) -> bytes:
    words = [word for member, score in some.items() for word in (b"%d" % score, member)]
    return encode(b"ZADD", SET, *words)


def zrem(some: Members) -> bytes:
    return encode(b"ZREM", SET, *some)


def add(server: Server, job: Job) -> Run:
    return asked(Raw(server.address), job, [zadd(some) for some in members(job)])


def asked(raw: Raw, job: Job, requests: list[bytes]) -> Run:
    def run() -> None:
        for request in job.paced(requests):
            raw.ask(request)

    return run


def cancel(server: Server, job: Job) -> Run:
    raw, calls = Raw(server.address), members(job)
    for some in calls:
        raw.ask(zadd(some))
    return asked(raw, job, [zrem(some) for some in calls])


def mix(server: Server, job: Job) -> Run:
    """Add each key and cancel it, in calls of the same size."""
    requests = [make(some) for some in members(job) for make in (zadd, zrem)]
    return asked(Raw(server.address), job, requests)


# ---- redis-py ------------------------------------------------------------------------------------


def connected(server: Server) -> Any:
    import redis

    return redis.Redis(unix_socket_path=str(server.address))


def py_add(server: Server, job: Job) -> Run:
    r = connected(server)
    r.ping()
    calls = members(job)

    def run() -> None:
        for some in job.paced(calls):
            r.zadd(SET, some)

    return run


def py_cancel(server: Server, job: Job) -> Run:
    r, calls = connected(server), members(job)
    for some in calls:
        r.zadd(SET, some)

    def run() -> None:
        for some in calls:
            r.zrem(SET, *some)

    return run


def py_pipeline(server: Server, job: Job) -> Run:
    """Add each key with a command of its own; `job.per_call` commands in one message."""
    r, calls = connected(server), members(job)
    r.ping()

    def run() -> None:
        for some in calls:
            pipeline = r.pipeline(transaction=False)
            for member, score in some.items():
                pipeline.zadd(SET, {member: score})
            pipeline.execute()

    return run


# ---- redis.asyncio -------------------------------------------------------------------------------

Adds = Callable[[Any, Members], Any]


async def separate(r: Any, some: Members) -> None:
    adds = [r.zadd(SET, {member: score}) for member, score in some.items()]
    await (adds[0] if len(adds) == 1 else asyncio.gather(*adds))


async def pipeline(r: Any, some: Members) -> None:
    async with r.pipeline(transaction=False) as p:
        for member, score in some.items():
            p.zadd(SET, {member: score})
        await p.execute()


def awaited(adds: Adds) -> Callable[[Server, Job], Run]:
    """Return work that awaits one by one what `adds` does with the members of a call."""

    def prepare(server: Server, job: Job) -> Run:
        import redis.asyncio

        r, calls = redis.asyncio.Redis(unix_socket_path=str(server.address)), members(job)

        async def work() -> None:
            for some in calls:
                await adds(r, some)

        async def warm() -> None:
            await r.ping()

        runner = asyncio.Runner()
        runner.run(warm())
        return lambda: runner.run(work())

    return prepare


# ---- firing --------------------------------------------------------------------------------------


def arm(server: Server, deadlines_ns: list[int], first: int = 0) -> None:
    """Arm timers whose member holds number and deadline; the score is the deadline in us."""
    raw = Raw(server.address)
    for at in range(0, len(deadlines_ns), ARMED_AT_ONCE):
        words: list[bytes] = []
        for number, due_ns in enumerate(deadlines_ns[at : at + ARMED_AT_ONCE], first + at):
            words += (b"%d" % (due_ns // 1000), b"%016d" % number + stamped(due_ns))
        raw.ask(encode(b"ZADD", SET, *words))


def polled(server: Server) -> Iterator[tuple[int, int]]:
    """Poll for due members; a member counts as received before its removal. Yields as
    ours.subscribed does."""
    import hiredis

    raw, reader = Raw(server.address), hiredis.Reader()
    limit = (b"LIMIT", b"0", b"%d" % DUE_AT_ONCE)

    def answer(*words: bytes) -> Any:
        raw.socket.sendall(encode(*words))
        while (found := reader.gets()) is False:
            reader.feed(raw.socket.recv(1 << 18))
        return found

    yield 0, 0
    while True:
        due = answer(b"ZRANGEBYSCORE", SET, b"-inf", b"%d" % (boot_ns() // 1000), *limit)
        now_ns = boot_ns()
        if due:
            answer(b"ZREM", SET, *due)
            yield from ((now_ns, stamp(member[16:])) for member in due)
        if len(due) < DUE_AT_ONCE:
            time.sleep(POLL_S)


def arm_keys(server: Server, deadlines_ns: list[int], first: int = 0) -> None:
    """Arm timers as keys that expire; the key holds the deadline."""
    raw, wall_ns = Raw(server.address), time.time_ns() - boot_ns()
    for at in range(0, len(deadlines_ns), ARMED_AT_ONCE):
        some = enumerate(deadlines_ns[at : at + ARMED_AT_ONCE], first + at)
        requests = [
            encode(b"SET", b"%d:%d" % (number, due_ns), PAYLOAD, b"PXAT",
                   b"%d" % -(-(due_ns + wall_ns) // 10**6))
            for number, due_ns in some
        ]  # fmt: skip
        raw.socket.sendall(b"".join(requests))
        left = len(requests) * len(b"+OK\r\n")
        while left > 0:
            left -= len(raw.socket.recv(1 << 16))


def notified(server: Server) -> Iterator[tuple[int, int]]:
    """Receive keyspace notices of expired keys."""
    import hiredis

    raw, reader = Raw(server.address), hiredis.Reader()
    raw.ask(encode(b"SUBSCRIBE", b"__keyevent@0__:expired"))
    yield 0, 0
    while True:
        reader.feed(raw.socket.recv(1 << 18))
        now_ns = boot_ns()
        while (message := reader.gets()) is not False:
            yield now_ns, int(message[2].partition(b":")[2])
