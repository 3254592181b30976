"""A client of a namespace whose keys are divided among shards: an ordinary one for each part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from purgatoryd.clients.arguments import check_limit_s
from purgatoryd.clients.bulk import (
    BulkResult,
    MergedResult,
    Packed,
    checked,
    checked_cancels,
    pack_cancels,
    pack_puts,
    unchecked,
)
from purgatoryd.clients.client import Client
from purgatoryd.clients.closing import Closing
from purgatoryd.clients.core import BYE_S, OPEN_RETRY_S, Core, Mode
from purgatoryd.clients.engine import Call, Engine
from purgatoryd.clients.jobs import Job, in_doubt
from purgatoryd.clients.model import CancelResult, TimerInfo
from purgatoryd.clients.partitions import Part, Partitions, Parts, settling, split_jobs
from purgatoryd.clients.route import Route
from purgatoryd.shm_layout.errors import (
    Busy,
    CallTimeout,
    DaemonError,
    DaemonUnreachable,
    PurgatorydError,
    QueueFull,
)
from purgatoryd.shm_layout.wire import Key

SILENCE_S = 0.25
Result = TypeVar("Result")


class PartitionedClient(Closing):
    """Timers of a namespace with partitions; of a plain one, too, and of a daemon without shards.

    Arguments as of Client. A call for a key goes to the shard that has it; a bulk call is divided,
    and its results come back in the order of its rows. While a shard does not answer, calls for its
    keys raise ShardUnavailable, and the others go on. Raises as Client does.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        namespace: str = "default",
        timeout: float = 5.0,
        **settings: Any,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.timeout = timeout = check_limit_s(timeout)
        self._partitions = _wait_for(Route(name, namespace), timeout)
        self._clients: list[Client] = []
        with ExitStack() as undo:
            for partition in self._partitions.all:
                client = Client(
                    name, namespace=namespace, timeout=timeout, partition=partition, **settings
                )
                undo.callback(client.close)
                self._clients.append(client)
            undo.pop_all()

    def of(self, key: Key) -> Client:
        """The client of the partition that `key` is in. Raises InvalidKey."""
        return self._clients[self._partitions.of(key)]

    def add(self, key: Key, *time: Any, **named: Any) -> Any:
        """Arms a timer, as Client.add does."""
        return self.of(key).add(key, *time, **named)

    def cancel(self, key: Key, **named: Any) -> Any:
        """Disarms the key's timer, as Client.cancel does."""
        return self.of(key).cancel(key, **named)

    def get(self, key: Key, *, timeout: float | None = None) -> TimerInfo | None:
        """The armed timer of `key` with its payload, or None, as Client.get does."""
        return self.of(key).get(key, timeout=timeout)

    def add_many(
        self, rows: Any, *, topic: str = "default", mode: Mode = "error",
        timeout: float | None = None,
    ) -> BulkResult:  # fmt: skip
        """Arms many timers; rows and arguments as of Client.add_many, without bulk load and wait.

        Rows of a shard that did not answer have the status NONE; check() raises why.
        """
        limit_s = self._limit_s(timeout)

        def pack(core: Core, some: Any) -> Packed:
            return pack_puts(core, some, topic, mode)

        return self._bulk(self._split(self._partitions.split(rows), pack, limit_s), unchecked)

    def cancel_many(self, keys: Any, *, timeout: float | None = None) -> list[CancelResult]:
        """Disarms many timers, as Client.cancel_many does."""
        limit_s, parts = self._limit_s(timeout), self._partitions.split_keys(keys)
        return self._bulk(self._split(parts, pack_cancels, limit_s), checked_cancels)

    def settle(self, result: BulkResult, *, timeout: float | None = None) -> None:
        """Returns once `result`, the handle of an interrupted bulk call, is done; raises as
        Client.settle does."""
        limit_s, limit = self._limit_s(timeout), self._clients[0].queue_limit
        whole, jobs = settling(self._engines, result, limit, limit_s)
        self._bulk((whole, jobs), checked)

    def _split(
        self, parts: Iterable[Part], pack: Callable[[Core, Any], Packed], limit_s: float
    ) -> Parts:
        return split_jobs(self._engines, parts, pack, self._clients[0].queue_limit, limit_s)

    def flush(self, *, timeout: float | None = None) -> None:
        """Returns once every call made before this one was answered; raises as Client.flush."""
        patience = Patience(self._limit_s(timeout))
        _all(partial(patience.wait, client.flush) for client in self._clients)

    def close(self) -> None:
        """Flushes, and closes all connections; raises as Client.close, and waits as long."""
        self._close(self._limit_s(None))

    def _close(self, limit_s: float) -> None:
        calls = [(client, client._begin_close(limit_s)) for client in self._clients]
        _all(partial(client._end_close, call, limit_s) for client, call in calls)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif self._clients[0]._core.fork_guard.mine:
            with suppress(PurgatorydError):  # the caller's error is the one that counts
                self._close(BYE_S)

    @property
    def _engines(self) -> list[Engine]:
        return [client._engine for client in self._clients]

    def _limit_s(self, timeout: float | None) -> float:
        return check_limit_s(self.timeout if timeout is None else timeout)

    def _bulk(self, bulk: Parts, outcome: Callable[[MergedResult], Result]) -> Result:
        """Hand all parts to one of the engines, which distributes them, and wait for all."""
        whole, jobs = bulk
        if not jobs:
            return outcome(whole)
        engines = self._engines
        calls = [(engines[partition], Call(job)) for partition, job in jobs]
        handed = Call(_handed_over(calls))
        try:
            engines[0].run(handed)
            for engine, call in calls:
                _await(engine, call, whole)
            return outcome(whole)
        except BaseException as error:
            if in_doubt(error):
                engines[0].leave_handle(error, whole, lambda: engines[0].begun(handed))
            raise


def _await(engine: Engine, call: Call[None], whole: MergedResult) -> None:
    """Wait for one part; its error becomes the error of its rows."""
    try:
        engine.wait(call)
    except (Busy, DaemonError) as error:
        whole.fail(error)


def _handed_over(calls: list[tuple[Engine, Call[None]]]) -> Job[None]:
    """Hand calls to their engines, in an engine's thread, which no signal handler interrupts."""
    for engine, call in calls:
        engine.put(call, urgent=True)
    yield from ()


class Patience:
    """With several clients whose calls are under way all at once, and waited for in turn.

    Once one was silent for as long as the caller waits, so were those behind it: they have only
    SILENCE_S left to say something, or several silent ones would take the time of each.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def wait(self, step: Callable[..., Result]) -> Result:
        """Does a step that takes a `timeout`; raises as it does."""
        try:
            return step(timeout=self._limit_s)
        except (CallTimeout, DaemonUnreachable, QueueFull):
            self._limit_s = min(self._limit_s, SILENCE_S)
            raise


def _wait_for(route: Route, timeout_s: float) -> Partitions:
    with closing(route):
        looks = Partitions.looks(route, timeout_s)
        while (found := next(looks)) is None:
            time.sleep(OPEN_RETRY_S)
        return found


def _all(steps: Iterable[Callable[[], object]]) -> None:
    """Does every step; raises an error if one failed."""
    with ExitStack() as stack:
        for step in steps:
            stack.callback(step)
