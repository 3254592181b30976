"""How rows go to the partitions of a namespace, and their results back into order. No socket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from purgatoryd.clients.arguments import each, unreadable
from purgatoryd.clients.bulk import BulkResult, MergedResult, Packed, fields_of
from purgatoryd.clients.core import Core
from purgatoryd.clients.jobs import Job, Jobs
from purgatoryd.clients.route import Breaker, Partition, Route
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import DaemonError, DaemonUnreachable, InvalidArgument
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.shards import Placement
from purgatoryd.shm_layout.wire import Key

Parts = tuple[MergedResult, list[tuple[int, Job[None]]]]
"""The merged result of all parts, and the job of each partition."""


class Part(NamedTuple):
    """What of a bulk call is one partition's."""

    partition: int
    places: Sequence[int]
    """Of its rows among all rows."""
    rows: Any


class Partitions:
    """Of one namespace."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.count = placement.partitions

    @classmethod
    def at(cls, route: Route) -> Partitions:
        """Those of a route's namespace; a daemon without shards has one. Raises as Route.find."""
        paths, table = route.table()
        alone = Placement(route.namespace, (0,))
        return cls(alone if table is None else route.placed(paths, table))

    @classmethod
    def looks(cls, route: Route, timeout_s: float) -> Iterator[Partitions | None]:
        """Looks for those of a route's namespace, once for each item; None = not there yet.

        Raises as at() does, DaemonUnreachable once `timeout_s` seconds are over.
        """
        deadline_s = HOST.monotonic_s() + timeout_s
        while True:
            try:
                yield cls.at(route)
            except DaemonUnreachable as error:
                if HOST.monotonic_s() >= deadline_s:
                    raise DaemonUnreachable(
                        route.name, error.endpoint, timeout_s, shut=error.shut
                    ) from None
                yield None

    def of(self, key: Key) -> int:
        """The partition of a key. Raises InvalidKey."""
        return self._placement.partition_of(wire.encode_key(key)[1])

    @property
    def all(self) -> list[Partition | None]:
        """What each partition's client is given; None = a plain namespace."""
        if self.count == 1:
            return [None]
        breakers: dict[int, Breaker] = {}
        return [Partition(number, breakers) for number in range(self.count)]

    def split(self, rows: Any) -> Iterator[Part]:
        """Rows or columns, as add_many takes them. Raises InvalidRows, InvalidKey."""
        if isinstance(rows, Mapping) or hasattr(rows, "schema"):
            try:
                parts = list(self._split_columns(rows))
            except Exception as error:
                raise unreadable("columns", error) from error
            yield from parts
        else:
            rows = list(each("rows", rows))
            keys = (fields_of(row, index)[0] for index, row in enumerate(rows))
            yield from self._split_list(keys, rows)

    def split_keys(self, keys: Any) -> Iterator[Part]:
        """Keys, as cancel_many takes them."""
        keys = keys if hasattr(keys, "take") else list(each("keys", keys))
        yield from self._split_list(each("keys", _listed(keys)), keys)

    def _split_list(self, keys: Iterable[Key], rows: Any) -> Iterator[Part]:
        for partition, places in self._places(keys).items():
            yield Part(partition, places, _taken(rows, places))

    def _split_columns(self, table: Any) -> Iterator[Part]:
        keys = table["key"] if isinstance(table, Mapping) else table.column("key")
        for partition, places in self._places(_listed(keys)).items():
            if not isinstance(table, Mapping):
                yield Part(partition, places, table.take(places))
            else:
                columns = {name: _taken(column, places) for name, column in table.items()}
                yield Part(partition, places, columns)

    def _places(self, keys: Iterable[Key]) -> dict[int, list[int]]:
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self.of(key), []).append(place)
        return places


def split_jobs(
    clients: Sequence[Jobs], parts: Iterable[Part], pack: Callable[[Core, Any], Packed],
    queue_limit: int, limit_s: float,
) -> Parts:  # fmt: skip
    """Return the result of a bulk call, and the job of each reachable partition.

    Raises InvalidArgument and Closed before anything is sent.
    """
    parts = list(parts)
    whole, jobs = MergedResult(sum(len(part.places) for part in parts)), []
    for part in parts:
        client = clients[part.partition]
        try:
            client.core.admit()
        except DaemonError as refused:
            whole.fail(refused)
            continue
        result, batches = pack(client.core, part.rows)
        whole.add(part.partition, part.places, result)
        job = client.submitted(queue_limit, result, batches, True, limit_s, last=True)
        jobs.append((part.partition, job))
    return whole, jobs


def settling(clients: Sequence[Jobs], whole: BulkResult, queue_limit: int, limit_s: float) -> Parts:
    """Return an interrupted bulk call, and the jobs that wait for its parts.

    Raises InvalidArgument, Closed.
    """
    cores = [client.core for client in clients]
    ours = isinstance(whole, MergedResult) and all(one._core in cores for _, _, one in whole.parts)
    if not isinstance(whole, MergedResult) or not ours:
        raise InvalidArgument(f"result must be of a bulk call of this client, not {whole!r}")
    jobs = []
    for partition, _, result in whole.parts:
        client = clients[partition]
        client.core.check()
        job = client.submitted(queue_limit, result, [], True, limit_s, last=False)
        jobs.append((partition, job))
    return whole, jobs


def _listed(column: Any) -> Any:
    """The keys of a column as Python objects."""
    for convert in ("to_pylist", "tolist"):
        if hasattr(column, convert):
            return getattr(column, convert)()
    return column


def _taken(column: Any, places: list[int]) -> Any:
    """Those of a list, a numpy array or an Arrow array at `places`."""
    if hasattr(column, "take"):
        return column.take(places)
    return [column[place] for place in places]
