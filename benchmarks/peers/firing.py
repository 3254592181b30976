"""Measure how late due timers reach another process, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection

from recording import quantile

from .crowd import Sample, apart, received
from .side import Server, boot_ns, cpu_s

GIVE_UP_S = 5.0
"""Time after the last deadline after which a timer counts as not delivered."""
FAR_NS = 3600 * 10**9
LEADS = 4
"""Tries with a lead that doubles, if arming takes longer than the lead."""

Arm = Callable[[Server, list[int], int], None]
"""Arms timers with these deadlines, and numbers from the last argument on."""
Receive = Callable[[Server], Iterator[tuple[int, int]]]


@dataclass(frozen=True)
class Timers:
    """Timers that come due: `count` of them, at `rate` per second or, if it is 0, at one instant.

    `far`: number of others, which come due hours later. `lead_s`: time to arm them in.
    """

    count: int
    rate: int
    far: int = 0
    lead_s: float = 1.5

    def deadlines(self, begin_ns: int) -> list[int]:
        gap_ns = 10**9 // self.rate if self.rate else 0
        return [begin_ns + n * gap_ns for n in range(self.count)]


def receiver(
    receive: Receive, server: Server, count: int, wait_s: float, results: Connection
) -> None:
    """Receive `count` timers and send (time of receipt, deadline) of each; if time runs out, the
    sender of the pipe kills this process."""
    late = receive(server)
    next(late)
    results.send("ready")
    results.send(list(islice(late, count)))
    time.sleep(wait_s)  # until the CPU time was read


def armed(
    arm: Arm, server: Server, deadlines_ns: list[int], first: int, results: Connection
) -> None:
    arm(server, deadlines_ns, first)
    results.send(boot_ns())


def arm_apart(arm: Arm, server: Server, deadlines_ns: list[int], first: int = 0) -> int:
    """Arm timers from another process; return the boot time of the end."""
    with apart(armed, arm, server, deadlines_ns, first) as (_, results):
        return int(received(results))


def firing(
    serve: Callable[[], AbstractContextManager[Server]], arm: Arm, receive: Receive, polls: bool,
    timers: Timers,
) -> Sample:  # fmt: skip
    """Run with a new server, and again with a longer lead if arming took longer."""
    for _ in range(LEADS):
        with serve() as server:
            found = once(arm, receive, polls, server, timers)
        if found is not None:
            return found
        timers = replace(timers, lead_s=2 * timers.lead_s)
    raise SystemExit("arming takes too long")


def once(arm: Arm, receive: Receive, polls: bool, server: Server, timers: Timers) -> Sample | None:
    """Run once; return None if arming took longer than the lead.

    `polls`: whether the receiver does the server's work, so that its CPU time counts as such.
    """
    if timers.far:
        arm_apart(arm, server, [boot_ns() + FAR_NS] * timers.far, timers.count)
    with apart(receiver, receive, server, timers.count, 60.0) as (pid, results):
        received(results)
        begin_ns = boot_ns() + int(timers.lead_s * 1e9)
        deadlines_ns = timers.deadlines(begin_ns)
        if arm_apart(arm, server, deadlines_ns) > begin_ns:
            return None
        time.sleep(max(0.0, (begin_ns - boot_ns()) / 1e9))
        before_s = server.cpu_s(), cpu_s(pid)
        over_s = (deadlines_ns[-1] - boot_ns()) / 1e9 + GIVE_UP_S
        if not results.poll(over_s):
            return {"delivered": 0.0}
        pairs = results.recv()
        server_s, receiver_s = server.cpu_s() - before_s[0], cpu_s(pid) - before_s[1]
    if polls:
        server_s, receiver_s = server_s + receiver_s, 0.0
    return figures(pairs, server_s, receiver_s)


def figures(pairs: list[tuple[int, int]], server_s: float, receiver_s: float) -> Sample:
    """Return quantiles of the lateness in ms, and CPU times of a firing in us."""
    late_ms = sorted((now_ns - due_ns) / 1e6 for now_ns, due_ns in pairs)
    if late_ms[0] < 0:
        raise SystemExit(f"a timer was {-late_ms[0]} ms early")
    count = len(late_ms)
    return {
        "delivered": 1.0, "p50_ms": quantile(late_ms, 0.5), "p99_ms": quantile(late_ms, 0.99),
        "max_ms": late_ms[-1], "server_us": server_s / count * 1e6,
        "client_us": receiver_s / count * 1e6, "both_us": (server_s + receiver_s) / count * 1e6,
    }  # fmt: skip
