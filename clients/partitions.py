"""Bulk calls in a namespace with any number of partitions: divide rows by key, and pack them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from purgatoryd.clients.arguments import check_flag, check_no_text, check_type, each, unreadable
from purgatoryd.clients.bulk import (
    NO_COMMON,
    Bulk,
    BulkResult,
    MergedResult,
    Packed,
    Part,
    are_columns,
    fields_of,
    pack_cancels,
    pack_puts,
    pack_unparks,
    unpark_key,
)
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.core import NO_BULK_LOADS, Core
from purgatoryd.clients.items import Common, OrderKey
from purgatoryd.shm_layout.errors import DaemonError, InvalidArgument
from purgatoryd.shm_layout.wire import Key

if TYPE_CHECKING:
    from purgatoryd.clients.bulk_loads import BulkLoad

Pack = Callable[[Connection, Any], Packed]


class Share(NamedTuple):
    """The rows of a bulk call that belong to one partition, and their indexes in the call."""

    connection: Connection
    places: Sequence[int]
    rows: Any


# ---- the bulk calls --------------------------------------------------------------------------


def puts(
    core: Core, rows: Any, topic: str, mode: str, bulk_load: BulkLoad | None = None,
    common: Common = NO_COMMON,
) -> Bulk:  # fmt: skip
    """Pack `rows` for add_many. If it raises InvalidArgument or Closed, nothing was packed."""

    def pack(connection: Connection, some: Any) -> Packed:
        return pack_puts(connection, some, topic, mode, bulk_load, common)

    return _packed(core, rows, bulk_load, pack, partial(split_rows, order_key=common.order_key))


def cancels(
    core: Core, keys: Any, bulk_load: BulkLoad | None = None, delivered: bool = False
) -> Bulk:  # fmt: skip
    """Pack `keys` for cancel_many. If it raises InvalidArgument or Closed, nothing was packed."""
    check_flag("delivered", delivered)
    pack = partial(pack_cancels, bulk_load=bulk_load, delivered=delivered)
    return _packed(core, keys, bulk_load, pack, split_keys)


def unparks(core: Core, rows: Any, bulk_load: BulkLoad | None = None) -> Bulk:
    """Pack `rows` for unpark_many. If it raises InvalidArgument or Closed, nothing was packed."""
    return _packed(core, rows, bulk_load, partial(pack_unparks, bulk_load=bulk_load), split_unparks)


def unsettled(core: Core, result: BulkResult) -> Bulk:
    """Return the parts of an earlier bulk call. Raises InvalidArgument, Closed."""
    check_type("result", result, BulkResult, optional=False)
    core.check()
    results = [one for _, one in result.parts] if isinstance(result, MergedResult) else [result]
    parts = [Part(one._connection, one, ()) for one in results if one._connection is not None]
    if any(part.connection not in core.connections for part in parts):
        raise InvalidArgument(f"result must come from a bulk call of this client, not {result!r}")
    return Bulk(result, parts)


def _packed(
    core: Core, rows: Any, bulk_load: BulkLoad | None, pack: Pack,
    split: Callable[[Core, Any], Iterable[Share]],
) -> Bulk:  # fmt: skip
    """Pack the rows of each partition. If a shard is unavailable, raise ShardUnavailable in a
    namespace with one partition; with several partitions the rows of that shard get this error."""
    core.check()
    if len(core.connections) == 1:
        connection = core.connections[0]
        result, batches = pack(connection, rows)
        connection.admit()
        return Bulk(result, [Part(connection, result, batches)])
    if bulk_load is not None:
        core.whole(NO_BULK_LOADS)
    rows = rows if _has_columns(rows) else list(each("rows", rows))
    try:
        shares = list(split(core, rows))
    except Exception as error:
        raise unreadable("rows", error) from error
    # Without rows one empty share is packed, so that the other arguments are checked.
    shares = shares or [Share(core.connections[0], (), rows)]
    whole, parts = MergedResult(sum(len(share.places) for share in shares)), []
    for share in shares:
        try:
            result, batches = pack(share.connection, share.rows)
        except InvalidArgument:
            pack(core.connections[0], rows)  # raises the error with the row's number among all rows
            raise
        whole.add(share.places, result)
        parts.append(Part(share.connection, result, batches))
    return Bulk(whole, [part for part in parts if _admitted(whole, part)])


def _admitted(whole: MergedResult, part: Part) -> bool:
    try:
        part.connection.admit()
    except DaemonError as error:
        whole.fail(error)
        for batch in part.batches:
            part.connection.packer.packed += batch.count
            batch.settle(error)
        return False
    return True


# ---- dividing rows ---------------------------------------------------------------------------


def split_rows(core: Core, rows: Any, order_key: OrderKey | None = None) -> Iterator[Share]:
    """Divide the rows or columns of add_many by partition. `order_key`: that of rows that have
    none. Raises InvalidRows, InvalidKey, Partitioned."""
    if are_columns(rows):
        yield from _split_columns(core, rows, order_key)
    else:
        keys = [fields_of(row, index)[0] for index, row in enumerate(rows)]
        given = (row.get("order_key") if isinstance(row, Mapping) else None for row in rows)
        _check_orders(core, keys, given, order_key)
        yield from _split(core, keys, rows)


def _check_orders(
    core: Core,
    keys: Iterable[Key],
    order_keys: Iterable[OrderKey | None],
    default: OrderKey | None,
) -> None:
    for key, order_key in zip(keys, order_keys, strict=False):
        core.check_order(key, default if order_key is None else order_key)


def split_keys(core: Core, keys: Any) -> Iterator[Share]:
    """Divide the keys of cancel_many by partition. Raises InvalidKey."""
    yield from _split(core, _listed(keys), keys)


def split_unparks(core: Core, rows: Any) -> Iterator[Share]:
    """Divide the rows of unpark_many by partition. Raises InvalidRows, InvalidKey."""
    keys = (unpark_key(row, index) for index, row in enumerate(rows))
    yield from _split(core, keys, rows)


def _split(core: Core, keys: Iterable[Key], rows: Any) -> Iterator[Share]:
    for connection, places in _places(core, keys).items():
        yield Share(connection, places, _taken(rows, places))


def _split_columns(core: Core, table: Any, order_key: OrderKey | None) -> Iterator[Share]:
    for column in table.values() if isinstance(table, Mapping) else ():
        check_no_text("a column", column)
    by_name = (
        table
        if isinstance(table, Mapping)
        else dict(zip(table.schema.names, table.columns, strict=True))
    )
    keys = _listed(by_name["key"])
    given = _listed(by_name["order_key"]) if "order_key" in by_name else repeat(None)
    _check_orders(core, keys, given, order_key)
    for connection, places in _places(core, keys).items():
        if not isinstance(table, Mapping):
            yield Share(connection, places, table.take(places))
        else:
            columns = {name: _taken(column, places) for name, column in table.items()}
            yield Share(connection, places, columns)


def _places(core: Core, keys: Iterable[Key]) -> dict[Connection, list[int]]:
    places: dict[Connection, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(core.of(key), []).append(place)
    return places


def _has_columns(rows: Any) -> bool:
    """True for columns, and for a numpy or Arrow array of keys."""
    return are_columns(rows) or hasattr(rows, "take")


def _listed(column: Any) -> Any:
    """Return the keys of a column as Python objects."""
    for convert in ("to_pylist", "tolist"):
        if hasattr(column, convert):
            return getattr(column, convert)()
    return column


def _taken(column: Any, places: list[int]) -> Any:
    """Return the items of a list, a numpy array or an Arrow array at these indexes."""
    if hasattr(column, "take"):
        return column.take(places)
    return [column[place] for place in places]
