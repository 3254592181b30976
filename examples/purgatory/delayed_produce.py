"""Delayed produce: answer a write when every replica has it.

A broker leads two partitions of a topic. Each has two followers, which copy its log and tell the
leader their offsets. The lowest of these offsets is the partition's high watermark: records below
it survive a failure of the leader. A producer that asks for acks=all is answered when the high
watermarks have passed its records, in all the partitions that it wrote to.

In the purgatory a partition is a watch key. The key's watermark is the high watermark of the
partition:

    watch(request, AllOf({"orders-0": 1, "orders-1": 1}), timeout)    the producer's request
    advance("orders-0", high_watermark)                               when a follower reports
    fail("orders-0", NOT_LEADER), clear("orders-0")                   leadership lost, and won

Two followers may report in any order or at the same time: a watermark never falls, so an old high
watermark that comes late does no harm. A watermark remains even if no request watches it, so the
report of a follower has its effect even if it arrives before the request is armed.

    python -m examples.purgatory.delayed_produce [NAME OF THE DAEMON]
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterable

from purgatoryd.clients import AllOf, Operation, Purgatory

NAMESPACE = "produce"
NOT_LEADER = 6
REPLICAS = ("follower-1", "follower-2")
PATIENT_S = 10.0
HASTY_S = 0.2


class Partition:
    """A partition's log as its leader knows it: the end of the log, and the offset of each
    follower."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.end = 0
        self.feeds: dict[str, queue.Queue[int | None]] = {r: queue.Queue() for r in REPLICAS}
        self._copied = dict.fromkeys(REPLICAS, 0)
        self._mutex = threading.Lock()

    def append(self) -> int:
        """Append a producer's record. Return the end of the log, up to which the log must be
        replicated."""
        self.end += 1
        for feed in self.feeds.values():
            feed.put(self.end)
        return self.end

    def copied(self, replica: str, offset: int) -> int:
        """Record that a follower has copied the log up to `offset`. Return the partition's high
        watermark."""
        with self._mutex:
            self._copied[replica] = offset
            return min(self._copied.values())


def follow(daemon: str, partition: Partition, replica: str, link: threading.Event) -> None:
    """Run a follower of one partition, with its own connection. The follower is connected to
    the network while `link` is set."""
    with Purgatory(daemon, namespace=NAMESPACE) as purgatory:
        for offset in iter(partition.feeds[replica].get, None):
            link.wait()
            purgatory.advance(partition.name, partition.copied(replica, offset))


def produce(
    leader: Purgatory, request: str, written: dict[Partition, int], timeout_s: float
) -> Operation:
    """Arm a request that ends when its partitions have been replicated up to these offsets."""
    targets = AllOf({partition.name: offset for partition, offset in written.items()})
    return leader.watch(request, targets, timeout=timeout_s)


def tell(operation: Operation) -> None:
    """Wait for the end of a request, and print the answer to the producer."""
    outcome = operation.result()
    answer = {
        "satisfied": "all replicas have it",
        "expired": "not all replicas have it",
        "failed": f"error {outcome.error}",
    }[outcome.cause]
    where = "".join(f", {key!s}" for key in outcome.missing)
    print(f"{operation.key!s}: {outcome.cause}, {answer}{where}")


def lead(leader: Purgatory, first: Partition, second: Partition, slow: threading.Event) -> None:
    """Run the example. `slow` connects the second follower of the second partition to the
    network."""

    def write(*partitions: Partition) -> dict[Partition, int]:
        return {partition: partition.append() for partition in partitions}

    tell(produce(leader, "produce-1", write(first, second), PATIENT_S))

    slow.clear()
    written = write(first, second)
    tell(produce(leader, "produce-2", {first: written[first]}, PATIENT_S))
    tell(produce(leader, "produce-3", written, HASTY_S))

    waiting = produce(leader, "produce-4", write(second), PATIENT_S)
    print(f"leadership of {second.name} lost: {leader.fail(second.name, NOT_LEADER)} request ends")
    tell(waiting)
    tell(produce(leader, "produce-5", write(second), PATIENT_S))

    leader.clear(second.name)
    slow.set()
    print(f"leadership of {second.name} won, its slow follower is back")
    tell(produce(leader, "produce-6", write(first, second), PATIENT_S))


def start_followers(
    daemon: str, partitions: Iterable[Partition]
) -> tuple[list[threading.Thread], dict[tuple[str, str], threading.Event]]:
    """Start a follower thread for each replica of each partition. Return the events that connect
    them to the network."""
    threads, links = [], {}
    for partition in partitions:
        for replica in REPLICAS:
            link = links[partition.name, replica] = threading.Event()
            link.set()
            threads.append(threading.Thread(target=follow, args=(daemon, partition, replica, link)))
            threads[-1].start()
    return threads, links


def main(daemon: str = "default") -> None:
    """Run the example against the daemon named `daemon`."""
    partitions = Partition("orders-0"), Partition("orders-1")
    with Purgatory(daemon, namespace=NAMESPACE) as leader:
        for partition in partitions:
            leader.forget(partition.name)  # removes the watch key of an earlier run
        followers, links = start_followers(daemon, partitions)
        try:
            lead(leader, *partitions, links["orders-1", "follower-2"])
        finally:
            for partition in partitions:
                for replica in REPLICAS:
                    links[partition.name, replica].set()
                    partition.feeds[replica].put(None)
            for follower in followers:
                follower.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
