"""A client of a namespace whose keys are divided among shards: an ordinary one for each part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar

from purgatoryd.clients.arguments import check_limit_s
from purgatoryd.clients.bulk import BulkResult
from purgatoryd.clients.client import Client
from purgatoryd.clients.closing import Closing
from purgatoryd.clients.core import OPEN_RETRY_S
from purgatoryd.clients.model import CancelResult, TimerInfo
from purgatoryd.clients.partitions import Part, Partitions
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

    def add_many(self, rows: Any, *, timeout: float | None = None, **named: Any) -> BulkResult:
        """Arms many timers; rows and arguments as of Client.add_many, without bulk load and wait.

        Rows of a shard that did not answer have the status NONE; check() raises why.
        """

        def send(client: Client, some: Any, **limits: Any) -> BulkResult:
            return client.add_many(some, wait=False, **limits, **named)

        return self._each(list(self._partitions.split(rows)), send, timeout)

    def cancel_many(self, keys: Any, *, timeout: float | None = None) -> list[CancelResult]:
        """Disarms many timers, as Client.cancel_many does."""

        def send(client: Client, some: Any, **limits: Any) -> BulkResult:
            return client.cancel_many(some, wait=False, **limits)

        result = self._each(list(self._partitions.split_keys(keys)), send, timeout)
        result.check()
        return result.cancels()

    def flush(self, *, timeout: float | None = None) -> None:
        """Returns once every call made before this one was answered; raises as Client.flush."""
        patience = Patience(check_limit_s(self.timeout if timeout is None else timeout))
        _all(partial(patience.wait, client.flush) for client in self._clients)

    def close(self) -> None:
        """Flushes, and closes all connections; raises as Client.close."""
        _all(client.close for client in self._clients)

    def _each(
        self,
        parts: list[Part],
        send: Callable[..., BulkResult],
        timeout: float | None,
    ) -> BulkResult:
        """All parts are under way before the first answer is waited for."""
        patience = Patience(check_limit_s(self.timeout if timeout is None else timeout))
        sent, done = [], []
        error: PurgatorydError | None = None
        for part in parts:
            client = self._clients[part.partition]
            try:
                result = patience.wait(partial(send, client, part.rows))
                sent.append((client, part.places, result))
            except DaemonError as refused:
                error = refused
        for client, places, result in sent:
            try:
                patience.wait(partial(client._bulk, result, [], True))
            except (Busy, DaemonError) as failed:
                error = failed
            done.append((places, result))
        rows = sum(len(part.places) for part in parts)
        return BulkResult.merged(rows, done, error)


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
