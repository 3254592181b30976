"""The client of a namespace with partitions, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from contextlib import AsyncExitStack, closing
from types import TracebackType
from typing import Any, Self, TypeVar

from purgatoryd.clients.aio import AsyncClient
from purgatoryd.clients.arguments import check_limit_s
from purgatoryd.clients.bulk import BulkResult
from purgatoryd.clients.core import OPEN_RETRY_S
from purgatoryd.clients.model import CancelResult, TimerInfo
from purgatoryd.clients.partitions import Part, Partitions
from purgatoryd.clients.route import Route
from purgatoryd.shm_layout.errors import Busy, DaemonError, PurgatorydError
from purgatoryd.shm_layout.wire import Key

Result = TypeVar("Result")


class AsyncPartitionedClient:
    """PartitionedClient for asyncio: same arguments, same errors, same promises.

    Use it as `async with AsyncPartitionedClient("name", namespace="events") as c`.
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
        self._timeout_s = check_limit_s(timeout)
        self._settings = settings
        self._clients: list[AsyncClient] = []

    async def connect(self) -> Self:
        """Opens a session with each partition. Raises DaemonUnreachable."""
        self._partitions = await _wait_for(Route(self.name, self.namespace), self._timeout_s)
        clients = [
            AsyncClient(
                self.name, namespace=self.namespace, timeout=self._timeout_s, partition=partition,
                **self._settings,
            )
            for partition in self._partitions.all
        ]  # fmt: skip
        async with AsyncExitStack() as undo:
            for client in clients:
                await undo.enter_async_context(client)
            undo.pop_all()
        self._clients = clients
        return self

    def of(self, key: Key) -> AsyncClient:
        """The client of the partition that `key` is in. Raises InvalidKey."""
        return self._clients[self._partitions.of(key)]

    async def add(self, key: Key, *time: Any, **named: Any) -> Any:
        """Arms a timer, as Client.add does."""
        return await self.of(key).add(key, *time, **named)

    async def cancel(self, key: Key, **named: Any) -> Any:
        """Disarms the key's timer, as Client.cancel does."""
        return await self.of(key).cancel(key, **named)

    async def get(self, key: Key, *, timeout: float | None = None) -> TimerInfo | None:
        """The armed timer of `key`, or None, as Client.get does."""
        return await self.of(key).get(key, timeout=timeout)

    async def add_many(self, rows: Any, **named: Any) -> BulkResult:
        """Arms many timers, as PartitionedClient.add_many does."""
        parts = list(self._partitions.split(rows))
        calls = (self._clients[part.partition].add_many(part.rows, **named) for part in parts)
        found = await asyncio.gather(*calls, return_exceptions=True)
        return _merged(parts, found)

    async def cancel_many(self, keys: Any, *, timeout: float | None = None) -> list[CancelResult]:
        """Disarms many timers, as Client.cancel_many does."""
        parts = list(self._partitions.split_keys(keys))
        calls = (
            self._clients[part.partition].cancel_many(part.rows, timeout=timeout) for part in parts
        )
        found = await _all(calls)
        results = {
            place: result
            for part, some in zip(parts, found, strict=True)
            for place, result in zip(part.places, some, strict=True)
        }
        return [results[place] for place in sorted(results)]

    async def flush(self, *, timeout: float | None = None) -> None:
        """Returns once every call was answered; raises as Client.flush does."""
        await _all(client.flush(timeout=timeout) for client in self._clients)

    async def close(self) -> None:
        """Flushes, and closes all connections; raises as Client.close."""
        async with AsyncExitStack() as stack:
            for client in self._clients:
                stack.push_async_callback(client.close)

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def _all(calls: Iterable[Awaitable[Result]]) -> list[Result]:
    """Waits for every call, also when one has failed; raises an error if one did."""
    results = []
    for found in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(found, BaseException):
            raise found
        results.append(found)
    return results


def _merged(parts: list[Part], found: list[BulkResult | BaseException]) -> BulkResult:
    """The results of all parts; the error of one that failed is its check()."""
    error: PurgatorydError | None = None
    done = []
    for part, one in zip(parts, found, strict=True):
        if isinstance(one, BulkResult):
            done.append((part.places, one))
        elif isinstance(one, Busy):
            done.append((part.places, one.result))
            error = one
        elif isinstance(one, DaemonError):
            error = one
        else:
            raise one
    return BulkResult.merged(sum(len(part.places) for part in parts), done, error)


async def _wait_for(route: Route, timeout_s: float) -> Partitions:
    with closing(route):
        looks = Partitions.looks(route, timeout_s)
        while (found := next(looks)) is None:
            await asyncio.sleep(OPEN_RETRY_S)
        return found
