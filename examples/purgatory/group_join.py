"""Group join: continue when all members have joined, or expel the members that have not joined in
time.

A coordinator and three members run, each in its own process. The first generation of the group
begins when any three members have arrived; a watch key counts the arrivals. For the next generation
the coordinator knows the names of the members. It waits until all of them have joined again, and
expels the members that are missing after a timeout. A member that has joined waits for an
assignment, or for the message that it is expelled.

In the purgatory, arrivals, joins and assignments are watch keys with watermarks:

    arrived              number of arrivals for the first generation  bump(key)
    joined/member-2      newest generation that member-2 has joined   advance(key, generation)
    assigned/member-2    newest generation that includes member-2     advance(key, generation),
                                                                      or fail(key, EXPELLED)

    watch(join, AllOf({each "joined/...": generation}), timeout)      the coordinator waits
    watch(wait, AllOf({its own "assigned/...": generation}), timeout) a member waits

The outcome of a join names the missing members, so the coordinator needs no list of arrivals. A
failure stays until it is cleared, so a member that comes too late is notified at once.

    python -m examples.purgatory.group_join [NAME OF THE DAEMON]
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from purgatoryd.clients import AllOf, Purgatory

NAMESPACE = "groups"
MEMBERS = ("member-1", "member-2", "member-3")
EXPELLED = 25
PATIENT_S = 10.0
HASTY_S = 0.2


def take_part(daemon: str, member: str, orders: Connection) -> None:
    """A member's process: join each generation that the coordinator orders, and send back the
    result."""
    with Purgatory(daemon, namespace=NAMESPACE) as purgatory:
        while (generation := orders.recv()) is not None:
            if generation == 1:
                purgatory.bump("arrived")
            purgatory.advance(f"joined/{member}", generation)
            orders.send("joined")
            assigned = AllOf({f"assigned/{member}": generation})
            outcome = purgatory.watch(f"{member}/{generation}", assigned, PATIENT_S).result()
            orders.send(f"{outcome.cause} with error {outcome.error}" if outcome.error else "in")


@contextmanager
def members(daemon: str) -> Iterator[dict[str, Connection]]:
    """Start the members' processes; yield the connections on which they receive orders."""
    context = multiprocessing.get_context("spawn")
    processes, orders = [], {}
    for member in MEMBERS:
        orders[member], theirs = context.Pipe()
        processes.append(context.Process(target=take_part, args=(daemon, member, theirs)))
        processes[-1].start()
        theirs.close()
    try:
        yield orders
    finally:
        for pipe in orders.values():
            pipe.send(None)
        for process in processes:
            process.join()


def join(orders: dict[str, Connection], generation: int, *joining: str) -> None:
    """Let the members `joining` join a generation, and wait until they have joined."""
    for member in joining:
        orders[member].send(generation)
    for member in joining:
        orders[member].recv()


def hear(orders: dict[str, Connection], *waiting: str) -> None:
    """Print the results of the members `waiting`, which wait for an assignment."""
    for member in waiting:
        print(f"{member} hears: {orders[member].recv()}")


def first_generation(purgatory: Purgatory, orders: dict[str, Connection]) -> None:
    """Begin a generation when enough members have arrived."""
    arrival = purgatory.watch("join-1", AllOf({"arrived": len(MEMBERS)}), PATIENT_S)
    join(orders, 1, *MEMBERS)
    print(f"join-1: {arrival.result().cause}, {len(MEMBERS)} members have arrived")
    purgatory.advance_many((f"assigned/{member}", 1) for member in MEMBERS)
    hear(orders, *MEMBERS)


def second_generation(purgatory: Purgatory, orders: dict[str, Connection]) -> None:
    """Begin a generation, and expel the member that does not join in time."""
    join(orders, 2, "member-1", "member-3")
    everybody = AllOf({f"joined/{member}": 2 for member in MEMBERS})
    outcome = purgatory.watch("join-2", everybody, HASTY_S).result()
    print(f"join-2: {outcome.cause}, missing: {', '.join(map(str, outcome.missing))}")
    for member in MEMBERS:
        if f"joined/{member}" in outcome.missing:
            purgatory.fail(f"assigned/{member}", EXPELLED)
        else:
            purgatory.advance(f"assigned/{member}", 2)
    hear(orders, "member-1", "member-3")

    print("member-2 joins too late")
    join(orders, 2, "member-2")
    hear(orders, "member-2")


def main(daemon: str = "default") -> None:
    """Run the example against the daemon named `daemon`."""
    with Purgatory(daemon, namespace=NAMESPACE) as purgatory, members(daemon) as orders:
        keys = [f"{subject}/{member}" for subject in ("joined", "assigned") for member in MEMBERS]
        for key in ("arrived", *keys):
            purgatory.forget(key)  # removes watch keys of an earlier run
        first_generation(purgatory, orders)
        second_generation(purgatory, orders)


if __name__ == "__main__":
    main(*sys.argv[1:])
