"""A million timers of the purgatory mix, which four workers add as fast as they can.

In this mix, delays are lognormal with sigma 1, and nine timers in ten are cancelled at a uniform
fraction of their delay. The median delay is 1 s instead of 5 s, and no delay exceeds 20 s (one in a
thousand would), so that the run does not take long. If another longest delay is given, all delays
are scaled. A key is the timer's number in 16 digits (16 bytes), a payload is the key three times
(48 bytes). The answers that each worker receives and the notices of the subscriber are stored in
arrays, indexed by the timer's number, so that a million timers are checked by comparing arrays.

Seven processes may share two cores. The workers use all CPU time that they get, so they run at a
lower priority. Otherwise the measured times would include how long the daemon and the subscriber
wait for a core.
"""

from __future__ import annotations

import heapq
import os
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console

from examples.flights.clock import boot_ns, sleep_until
from examples.flights.collector import LAST_KEY, NAMESPACE, TOPIC, notices
from examples.flights.display import Display
from examples.flights.events import NS_PER_S
from examples.flights.figures import Lateness, Rate
from examples.flights.processes import Child, Crew, Link
from examples.flights.service import running
from purgatoryd.clients import BulkResult, Client, Status
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.store import core_config
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import LAYOUT_ID
from purgatoryd.shm_layout.shm import MOUNT

NAME = "load"
WORKERS = 4
WORKER_NICE = 10
CHUNK = 1024  # number of records in one batch
QUEUE_LIMIT = 4 * CHUNK  # maximum number of unanswered calls; a longer queue would delay cancels
PATIENCE_S = 60.0
LONGEST_PER_MEDIAN = 20.0
SIGMA = 1.0
CANCELLED = 0.9
BLOB_BYTES = 16 + 48
FEW = 65_536  # up to this number of timers, the replay buffer has space for all
# interval in which cancels are sent after all timers are armed; due cancels are sent together
CANCELS_EVERY_S = 0.005

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Share(NamedTuple):
    """The timers of one worker: numbers `first` to `first + timers - 1`, delays up to
    `longest_s`."""

    first: int
    timers: int
    longest_s: float


class Answers(NamedTuple):
    """The answers that one worker received, by the timer's position in its share.

    `adds` and `cancels` contain a Status, or NONE if there was no call. The `_boot_ns` arrays
    contain the times of the acknowledgements, or 0 if there is none.
    """

    adds: Bytes
    cancels: Bytes
    added_boot_ns: Numbers
    cancelled_boot_ns: Numbers


class Received(NamedTuple):
    """The number of notices of each timer, and for each notice the times from the deadline until
    the timer fired and until the notice was received."""

    times: Bytes
    lateness_ns: Numbers
    firing_ns: Numbers
    spoiled: int
    """Number of notices whose payload does not belong to their key."""


@dataclass
class Load:
    """Result of a run under load, which passed if `problems` is empty."""

    asked: int
    timers: int
    arena_bytes: int
    answers: Answers
    received: Received
    most_armed: int
    elapsed_s: float
    problems: list[str] = field(default_factory=list)

    @property
    def adds(self) -> int:
        """Number of timers whose add was acknowledged as ADDED."""
        return int((self.answers.adds == Status.ADDED).sum())

    def cancels(self, found: Status) -> int:
        """Return the number of acknowledged cancels with this result."""
        return int((self.answers.cancels == found).sum())

    @property
    def rates(self) -> dict[str, Rate]:
        """Rates of adds and cancels at the times of their acknowledgement, while timers were added.
        Later cancels are left out, because they are not sent as fast as possible."""
        added = self.answers.added_boot_ns[self.answers.added_boot_ns > 0]
        cancelled = self.answers.cancelled_boot_ns
        cancelled = cancelled[(cancelled > 0) & (cancelled <= added.max(initial=0))]
        return {
            "adds": Rate.of(added.tolist()),
            "cancels meanwhile": Rate.of(cancelled.tolist()),
            "together": Rate.of(np.concatenate((added, cancelled)).tolist()),
        }

    @property
    def lateness(self) -> dict[str, Lateness]:
        """Percentiles of the times from the deadline until the notice was received and until the
        timer fired."""
        return {
            "received": Lateness.of(self.received.lateness_ns.tolist()),
            "fired": Lateness.of(self.received.firing_ns.tolist()),
        }


def run(directory: Path, console: Console, asked: int, longest_s: float) -> Load:
    """Arm `asked` timers, or as many as fit into shared memory, with delays of at most `longest_s`
    seconds.

    Raises DaemonFailed, ChildFailed.
    """
    timers = fitting(asked, _shm_free_bytes())
    each = timers // WORKERS
    shares = [Share(n * each, each, longest_s) for n in range(WORKERS)]
    with running(directory, NAME, _settings(timers)), Crew(WORKERS + 1) as crew:
        subscriber = crew.start("subscriber", count_notices, NAME, timers)
        workers = [crew.start(f"worker {n}", press, NAME, share) for n, share in enumerate(shares)]
        crew.wait_ready()
        began_s = time.monotonic()
        crew.tell(None)
        most_armed = _watch(console, crew, workers, subscriber, shares)
        elapsed_s = time.monotonic() - began_s
    answers = Answers(*map(np.concatenate, zip(*(w.result for w in workers), strict=True)))
    load = Load(
        asked, timers, arena_bytes(timers), answers, subscriber.result, most_armed, elapsed_s
    )
    judge(load)
    return load


# ---- space ---------------------------------------------------------------------------------------


def fitting(asked: int, free_bytes: int) -> int:
    """Return the largest number of timers whose arena fits into shared memory: at most `asked`, and
    a multiple of WORKERS."""
    low, high = WORKERS, max(WORKERS, asked)
    if arena_bytes(high) <= free_bytes:
        low = high
    while high - low > WORKERS:
        middle = (low + high) // 2
        low, high = (middle, high) if arena_bytes(middle) <= free_bytes else (low, middle)
    return low // WORKERS * WORKERS


def _config(timers: int) -> Config:
    """Return settings with space for all timers, and for a quarter of them in the replay buffer.

    For a small number of timers, the replay buffer has space for all of them. There a late
    cancel finds a timer that has already fired.
    """
    replay_buffer = 1 << max(1024, timers // 4, min(timers, FEW)).bit_length()
    pinned_bytes = replay_buffer * BLOB_BYTES
    payload_bytes = timers * BLOB_BYTES + pinned_bytes + 2**20
    return Config(
        NAME,
        capacity=timers,
        payload_bytes=payload_bytes,
        replay_capacity=replay_buffer,
        replay_bytes_max=pinned_bytes,
    )


def _settings(timers: int) -> tuple[str, ...]:
    config = _config(timers)
    return (
        f"--capacity={config.capacity}",
        f"--payload-memory={config.payload_bytes}",
        f"--replay-buffer={config.replay_capacity}",
        f"--replay-memory={config.replay_bytes_max}",
    )


def arena_bytes(timers: int) -> int:
    """Return how much shared memory the daemon's two arena files take, in bytes."""
    fields = {"layout_id": LAYOUT_ID, **core_config(_config(timers))}
    config = ffi.new("struct pg_config *", fields)
    return int(lib.pg_arena_bytes(config) + lib.pg_private_bytes(config))


def _shm_free_bytes() -> int:
    """Return the free shared memory in bytes, minus a sixteenth that is left for other programs."""
    free = os.statvfs(MOUNT)
    return free.f_bavail * free.f_frsize // 16 * 15


# ---- the worker processes ------------------------------------------------------------------------


def press(link: Link, name: str, share: Share) -> Answers:
    """Arm timers as fast as possible, and cancel them on time; the target of a worker process."""
    os.nice(WORKER_NICE)
    with Client(name, namespace=NAMESPACE, timeout=PATIENCE_S, queue_limit=QUEUE_LIMIT) as client:
        worker = _Worker(client, link, share)
        link.ready()
        worker.work()
        return worker.answers


class _Worker:
    """The timers of one worker, with their delays, their times of cancel and their answers."""

    def __init__(self, client: Client, link: Link, share: Share) -> None:
        self._client = client
        self._link = link
        self._delays_ns, self._cancel_after_ns = plan(share)
        self._keys, self._payloads = _names(share)
        self._due: list[tuple[int, int]] = []
        self._open: deque[tuple[str, Any, BulkResult]] = deque()
        self.answers = Answers(
            np.zeros(share.timers, "u1"), np.zeros(share.timers, "u1"),
            np.zeros(share.timers, "i8"), np.zeros(share.timers, "i8"),
        )  # fmt: skip

    def work(self) -> None:
        """Add all timers and send their cancels, until every add and every cancel is
        acknowledged."""
        for start in range(0, len(self._keys), CHUNK):
            self._add(slice(start, min(start + CHUNK, len(self._keys))))
            self._cancel_due()
            self._take_answers()
        while self._due:
            self._client.flush()
            self._take_answers()
            sleep_until(self._due[0][0] + round(CANCELS_EVERY_S * NS_PER_S))
            self._cancel_due()
        self._client.flush()
        self._take_answers()

    def _add(self, rows: slice) -> None:
        columns = {
            "key": self._keys[rows],
            "delay_ns": self._delays_ns[rows],
            "payload": self._payloads[rows],
        }
        now_ns = boot_ns()
        result = self._client.add_many(columns, topic=TOPIC, wait=False)
        self._open.append(("add", rows, result))
        after_ns = self._cancel_after_ns[rows]
        cancelled = np.flatnonzero(after_ns >= 0)
        moments = (after_ns[cancelled] + now_ns).tolist()
        for entry in zip(moments, (cancelled + rows.start).tolist(), strict=True):
            heapq.heappush(self._due, entry)

    def _cancel_due(self) -> None:
        now_ns, rows = boot_ns(), []
        while self._due and self._due[0][0] <= now_ns:
            rows.append(heapq.heappop(self._due)[1])
        if rows:
            result = self._client.cancel_many(self._keys[rows], wait=False)
            self._open.append(("cancel", rows, result))

    def _take_answers(self) -> None:
        """Process the answers that have arrived, which come in the order of the calls. Raises
        DaemonError if an answer is lost."""
        now_ns, answers = boot_ns(), self.answers
        while self._open and self._open[0][2].done:
            kind, rows, result = self._open.popleft()
            result.check()
            if kind == "add":
                answers.adds[rows] = result.statuses
                answers.added_boot_ns[rows] = now_ns
                self._link.count(adds=len(result))
            else:
                answers.cancels[rows] = found = result.statuses
                answers.cancelled_boot_ns[rows] = now_ns
                self._link.count(cancels=int((found == Status.CANCELLED).sum()))


def plan(share: Share) -> tuple[Numbers, Numbers]:
    """Return (delay of each timer, time from its add to its cancel), in ns; -1 = never cancelled.

    The same share gives the same plan.
    """
    random = np.random.default_rng(share.first)
    log_median = np.log(share.longest_s / LONGEST_PER_MEDIAN)
    delays_s = random.lognormal(log_median, SIGMA, share.timers)
    while (far := delays_s > share.longest_s).any():
        delays_s[far] = random.lognormal(log_median, SIGMA, int(far.sum()))
    cancelled = random.random(share.timers) < CANCELLED
    after_s = delays_s * random.random(share.timers)
    after_ns = np.where(cancelled, after_s * NS_PER_S, -1).astype("i8")
    return (delays_s * NS_PER_S).astype("i8"), after_ns


def _names(share: Share) -> tuple[npt.NDArray[np.bytes_], npt.NDArray[np.bytes_]]:
    """Return (keys, payloads) of the timers of a share."""
    keys = [b"%016d" % number for number in range(share.first, share.first + share.timers)]
    return np.array(keys, "S16"), np.array([key * 3 for key in keys], "S48")


# ---- the subscriber process ----------------------------------------------------------------------


def count_notices(link: Link, name: str, timers: int) -> Received:
    """Count the notices of each timer; the target of the subscriber process."""
    times, lateness_ns, firing_ns, spoiled = bytearray(timers), array("q"), array("q"), 0
    for notice in notices(link, name):
        number = int(notice.key)
        times[number] += 1
        lateness_ns.append(notice.lateness_ns)
        firing_ns.append(notice.structural_lateness_ns)
        spoiled += notice.payload != b"%016d" % number * 3
    counted = np.frombuffer(times, "u1")
    return Received(counted, np.array(lateness_ns), np.array(firing_ns), spoiled)


def _watch(
    console: Console, crew: Crew, workers: list[Child[Answers]], subscriber: Child[Received],
    shares: list[Share],
) -> int:  # fmt: skip
    """Show the progress until the workers are done, then add the last timer and wait for the
    subscriber. Return the highest number of armed timers."""
    most_armed, timers = 0, sum(share.timers for share in shares)
    with Display(console, "under load", timers) as display:

        def refresh() -> None:
            nonlocal most_armed
            adds, cancels, expired = crew.counts()
            armed = max(0, adds - cancels - expired)
            most_armed = max(most_armed, armed)
            now = f"{adds:,} added, {cancels:,} cancelled, {expired:,} expired, {armed:,} armed"
            display.show(cancels + expired, now)

        crew.watch(list(workers), refresh)
        last_add_ns = max(int(worker.result.added_boot_ns.max()) for worker in workers)
        end_ns = last_add_ns + round(shares[0].longest_s * NS_PER_S) + 1
        with Client(NAME, namespace=NAMESPACE, timeout=PATIENCE_S) as client:
            client.add(LAST_KEY, deadline_boot_ns=end_ns, topic=TOPIC)
        crew.watch([subscriber], refresh)
    return most_armed


# ---- check of the result -------------------------------------------------------------------------


def judge(load: Load) -> None:
    """Fill in `load.problems`: the notices must match the timers that were added and not
    cancelled."""
    answers, times = load.answers, load.received.times
    added = answers.adds == Status.ADDED
    cancelled = answers.cancels == Status.CANCELLED
    fired = answers.cancels == Status.FIRED
    received = times > 0
    for subject, wrong in (
        ("adds were refused", ~added),
        ("timers were added, not cancelled, and not received", added & ~cancelled & ~received),
        ("timers were received though their cancel was acknowledged", cancelled & received),
        ("timers were received that were never acknowledged", received & ~added),
        ("timers were received more than once", times > 1),
        ("cancels were answered FIRED for timers that were not received", fired & ~received),
        ("cancels found no timer", answers.cancels == Status.UNKNOWN),
    ):
        if wrong.any():
            load.problems.append(f"{int(wrong.sum()):,} {subject}, such as {int(wrong.argmax())}")
    if load.received.spoiled:
        load.problems.append(f"{load.received.spoiled:,} notices had another timer's payload")
    if load.received.firing_ns.min(initial=0) < 0:
        load.problems.append("a timer fired before its deadline")
