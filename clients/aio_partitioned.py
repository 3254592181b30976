"""The client of a namespace with partitions, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, closing, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from purgatoryd.clients.aio import AsyncClient
from purgatoryd.clients.arguments import check_limit_s
from purgatoryd.clients.bulk import (
    BulkResult,
    MergedResult,
    Packed,
    checked_cancels,
    pack_cancels,
    pack_puts,
)
from purgatoryd.clients.core import BYE_S, OPEN_RETRY_S, Core, Mode
from purgatoryd.clients.jobs import Jobs
from purgatoryd.clients.model import CancelResult, TimerInfo
from purgatoryd.clients.partitions import Part, Partitions, Parts, settling, split_jobs
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
        self._connecting = asyncio.Lock()

    async def connect(self) -> Self:
        """Opens a session with each partition, unless it has. Raises DaemonUnreachable."""
        async with self._connecting:
            if not self._clients:
                await self._connect()
        return self

    async def _connect(self) -> None:
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

    def of(self, key: Key) -> AsyncClient:
        """The client of the partition that `key` is in, once connected. Raises InvalidKey."""
        return self._clients[self._partitions.of(key)]

    async def add(self, key: Key, *time: Any, **named: Any) -> Any:
        """Arms a timer, as Client.add does."""
        return await (await self.connect()).of(key).add(key, *time, **named)

    async def cancel(self, key: Key, **named: Any) -> Any:
        """Disarms the key's timer, as Client.cancel does."""
        return await (await self.connect()).of(key).cancel(key, **named)

    async def get(self, key: Key, *, timeout: float | None = None) -> TimerInfo | None:
        """The armed timer of `key`, or None, as Client.get does."""
        return await (await self.connect()).of(key).get(key, timeout=timeout)

    async def add_many(
        self, rows: Any, *, topic: str = "default", mode: Mode = "error",
        timeout: float | None = None,
    ) -> BulkResult:  # fmt: skip
        """Arms many timers, as PartitionedClient.add_many does."""
        limit_s = self._limit_s(timeout)

        def pack(core: Core, some: Any) -> Packed:
            return pack_puts(core, some, topic, mode)

        await self.connect()
        return await self._bulk(self._split(self._partitions.split(rows), pack, limit_s))

    async def cancel_many(self, keys: Any, *, timeout: float | None = None) -> list[CancelResult]:
        """Disarms many timers, as Client.cancel_many does."""
        limit_s = self._limit_s(timeout)
        parts = (await self.connect())._partitions.split_keys(keys)
        return checked_cancels(await self._bulk(self._split(parts, pack_cancels, limit_s)))

    async def settle(self, result: BulkResult, *, timeout: float | None = None) -> None:
        """Returns once `result`, the handle of a cancelled bulk call, is done; raises as
        Client.settle does."""
        limit_s = self._limit_s(timeout)
        limit = (await self.connect())._clients[0].queue_limit
        (await self._bulk(settling(self._jobs, result, limit, limit_s))).check()

    @property
    def _jobs(self) -> list[Jobs]:
        return [client._jobs for client in self._clients]

    def _limit_s(self, timeout: float | None) -> float:
        return check_limit_s(self._timeout_s if timeout is None else timeout)

    def _split(
        self, parts: Iterable[Part], pack: Callable[[Core, Any], Packed], limit_s: float
    ) -> Parts:
        return split_jobs(self._jobs, parts, pack, self._clients[0].queue_limit, limit_s)

    async def _bulk(self, bulk: Parts) -> MergedResult:
        """Start all parts, then wait for each."""
        whole, jobs = bulk
        calls = [self._clients[partition]._begin(job) for partition, job in jobs]
        try:
            for call in calls:
                try:
                    await call.future
                except (Busy, DaemonError) as error:
                    whole.fail(error)
        except BaseException as error:
            vars(error)["handle"] = whole
            raise
        return whole

    async def flush(self, *, timeout: float | None = None) -> None:
        """Returns once every call was answered; raises as Client.flush does."""
        await self.connect()
        await _all(client.flush(timeout=timeout) for client in self._clients)

    async def close(self) -> None:
        """Flush, and close all connections, with the errors and times of AsyncClient.close."""
        await self._close(self._timeout_s)

    async def _close(self, limit_s: float) -> None:
        try:
            await _all(client._close(limit_s) for client in self._clients)
        except asyncio.CancelledError:  # perhaps before the first step of any
            await _all(client._close(BYE_S) for client in self._clients)
            raise
        finally:
            for client in self._clients:
                client._drop()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            await self.close()
        elif not self._clients or self._clients[0]._core.fork_guard.mine:
            with suppress(PurgatorydError):  # the caller's error is the one that counts
                await self._close(BYE_S)


async def _all(calls: Iterable[Awaitable[Result]]) -> list[Result]:
    """Waits for every call, also when one has failed; raises an error if one did."""
    results = []
    for found in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(found, BaseException):
            raise found
        results.append(found)
    return results


async def _wait_for(route: Route, timeout_s: float) -> Partitions:
    with closing(route):
        looks = Partitions.looks(route, timeout_s)
        while (found := next(looks)) is None:
            await asyncio.sleep(OPEN_RETRY_S)
        return found
