"""Delayed fetch: long polling with min bytes, max wait, and a cap per partition.

A producer process appends to the partitions of a topic, which are files. A consumer asks for the
bytes after its offsets. It gets an answer when all its partitions together have at least MIN_BYTES,
or after the maximum wait, with the bytes that are available. One partition counts for at most
CAP_BYTES, because the answer contains no more bytes of it.

In the purgatory a partition is a watch key, and the length of its log is that key's watermark:

    watch(fetch, SumOf(bases=offsets, at_least=MIN_BYTES, cap=CAP_BYTES), timeout=max_wait)
    advance(partition, length)

The bases are the consumer's offsets, so bytes that were available before the fetch are included
from the start. The bytes do not pass through the purgatory: the outcome only says that enough bytes
are available, and the consumer reads them from the files.

    python -m examples.purgatory.delayed_fetch [NAME OF THE DAEMON]
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from purgatoryd.clients import Operation, Purgatory, SumOf

NAMESPACE = "fetch"
PARTITIONS = ("clicks-0", "clicks-1")
MIN_BYTES = 1000
CAP_BYTES = 600
PATIENT_S = 10.0
HASTY_S = 0.2
STORAGE_ERROR = 56


def produce(daemon: str, folder: Path, orders: Connection) -> None:
    """The producer's process: append bytes as each order says, and answer with the number of
    fetches that ended."""
    with Purgatory(daemon, namespace=NAMESPACE) as purgatory:
        orders.send("ready")
        while (order := orders.recv()) is not None:
            partition, size = order
            with (folder / partition).open("ab") as log:
                log.write(b"." * size)
            orders.send(purgatory.advance(partition, (folder / partition).stat().st_size))


class Consumer:
    """A consumer that polls the partitions of one topic, starting at offset 0. It numbers its
    fetches."""

    def __init__(self, purgatory: Purgatory, folder: Path) -> None:
        self._purgatory = purgatory
        self._folder = folder
        self._offsets = dict.fromkeys(PARTITIONS, 0)
        self._fetches = 0

    def fetch(self, max_wait_s: float) -> Operation:
        """Arm a fetch that starts where the last fetch ended."""
        self._fetches += 1
        enough = SumOf(self._offsets, at_least=MIN_BYTES, cap=CAP_BYTES)
        return self._purgatory.watch(f"fetch-{self._fetches}", enough, max_wait_s)

    def take(self, fetch: Operation) -> None:
        """Wait for the end of `fetch`, then read the available bytes, up to the cap."""
        outcome = fetch.result()
        read = {name: self._read(name) for name in PARTITIONS}
        error = f" with error {outcome.error}" if outcome.error else ""
        sizes = ", ".join(f"{name} {size}" for name, size in read.items())
        print(f"{fetch.key!s}: {outcome.cause}{error}, {sum(read.values())} bytes: {sizes}")

    def _read(self, name: str) -> int:
        with (self._folder / name).open("rb") as log:
            log.seek(self._offsets[name])
            size = len(log.read(CAP_BYTES))
        self._offsets[name] += size
        return size


@contextmanager
def producer(daemon: str, folder: Path) -> Iterator[Connection]:
    """Start the producer's process; yield the connection on which it receives orders."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=produce, args=(daemon, folder, theirs)
    )
    process.start()
    theirs.close()
    ours.recv()
    try:
        yield ours
    finally:
        ours.send(None)
        process.join()


def poll(consumer: Consumer, orders: Connection) -> None:
    """Fetch in three situations: enough bytes arrive during the wait, no bytes arrive, and enough
    bytes were available before the fetch."""

    def append(partition: str, size: int) -> int:
        orders.send((partition, size))
        ended: int = orders.recv()
        return ended

    fetch = consumer.fetch(PATIENT_S)
    for partition, size in (("clicks-0", 700), ("clicks-1", 300), ("clicks-1", 100)):
        print(f"{size} bytes to {partition}: {append(partition, size)} fetch ends")
    consumer.take(fetch)

    # no more bytes arrive, so at its timeout the fetch gets the rest of clicks-0
    consumer.take(consumer.fetch(HASTY_S))

    append("clicks-0", 600)
    append("clicks-1", 500)
    consumer.take(consumer.fetch(PATIENT_S))  # enough bytes were available before the fetch


def main(daemon: str = "default") -> None:
    """Run the example against the daemon named `daemon`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Purgatory(daemon, namespace=NAMESPACE) as purgatory,
        producer(daemon, Path(folder)) as orders,
    ):
        for name in PARTITIONS:
            purgatory.forget(name)  # removes watch keys of an earlier run
            (Path(folder) / name).touch()
        consumer = Consumer(purgatory, Path(folder))
        poll(consumer, orders)

        fetch = consumer.fetch(PATIENT_S)
        print(f"disk of clicks-1 broken: {purgatory.fail('clicks-1', STORAGE_ERROR)} fetch ends")
        consumer.take(fetch)


if __name__ == "__main__":
    main(*sys.argv[1:])
