"""Heartbeats: sessions that live as long as they are extended, and are declared dead exactly once.

Three members, each a process, have a session of SESSION_S seconds. Each extends its session with
several heartbeats in that time. One member is killed, one member stalls, as in a long pause of a
garbage collector, and one member continues. A watcher is notified of each death.

A session needs no condition, so it is a plain timer, and the watcher is a plain subscriber:

    add(member, SESSION_S, topic="sessions", mode="extend")    a heartbeat: never shortens it
    Subscriber(topics=["sessions"])                            each notice is a death

Each timer fires once, under a ticket that is never used again, so each session dies once. The
answer to a heartbeat says whether the session was alive: EXTENDED, or KEPT if it would already last
longer. ADDED means that there was no session, which is right for the first heartbeat. On a later
heartbeat it means that the member has been declared dead, and that another member may have taken
over its work.

    python -m examples.purgatory.heartbeats [NAME OF THE DAEMON]
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from purgatoryd.clients import Client, Status, Subscriber

NAMESPACE = "groups"
TOPIC = "sessions"
SESSION_S = 1.0
HEARTBEAT_S = 0.1


def heartbeat(client: Client, member: str) -> bool:
    """Extend the member's session, or begin a session. Return whether the session existed
    before."""
    session = client.add(member, SESSION_S, topic=TOPIC, mode="extend")
    return session.status != Status.ADDED


def live(daemon: str, member: str, orders: Connection) -> None:
    """A member's process: send heartbeats until asked to leave. If asked to stall, send none until
    the next order."""
    with Client(daemon, namespace=NAMESPACE) as client:
        heartbeat(client, member)
        orders.send("in")
        while obey(orders) != "leave":
            if not heartbeat(client, member):
                orders.send("declared dead")
        orders.send(client.cancel(member).name)


def obey(orders: Connection) -> str:
    """Wait until the next heartbeat is due. If asked to stall, wait for the next order. Return the
    last order."""
    order: str = orders.recv() if orders.poll(HEARTBEAT_S) else ""
    return orders.recv() if order == "stall" else order


class Member(NamedTuple):
    """A member's process, and the connection on which it receives orders."""

    process: BaseProcess
    orders: Connection


@contextmanager
def members(daemon: str, *names: str) -> Iterator[dict[str, Member]]:
    """Start members and yield them; at the end of the block, kill them."""
    context = multiprocessing.get_context("spawn")
    started = {}
    try:
        for name in names:
            ours, theirs = context.Pipe()
            process = context.Process(target=live, args=(daemon, name, theirs))
            process.start()
            theirs.close()
            started[name] = Member(process, ours)
        for member in started.values():
            member.orders.recv()
        yield started
    finally:
        for member in started.values():
            member.process.kill()
            member.process.join()


def deaths(sessions: Subscriber, count: int) -> list[str]:
    """Wait until `count` members are declared dead; return their names, sorted."""
    return sorted(str(next(sessions).key) for _ in range(count))


def deaths_so_far(client: Client, sessions: Subscriber) -> list[str]:
    """Return the members that died since the last call. A timer that fires at once marks the end of
    their notices."""
    marker = client.add("marker", delay_ns=0, topic=TOPIC).ticket
    received = []
    while (notice := next(sessions)).ticket != marker:
        received.append(str(notice.key))
    return received


def main(daemon: str = "default") -> None:
    """Run the example against the daemon named `daemon`."""
    with (
        Client(daemon, namespace=NAMESPACE) as client,
        Subscriber(daemon, namespace=NAMESPACE, topics=[TOPIC]) as sessions,
        members(daemon, "living", "killed", "stalled") as everybody,
    ):
        print("three sessions begin")
        everybody["killed"].process.kill()
        everybody["stalled"].orders.send("stall")
        print(f"declared dead: {', '.join(deaths(sessions, 2))}")

        orders = everybody["stalled"].orders
        orders.send("go on")
        print(f"the next heartbeat of stalled answers: {orders.recv()}")
        for name in ("stalled", "living"):
            everybody[name].orders.send("leave")
            print(f"{name} leaves, its session was {everybody[name].orders.recv()}")
        print(f"the end of the session of killed was {client.cancel('killed').name}")
        print(f"deaths besides: {len(deaths_so_far(client, sessions))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
