"""Time arguments and bulk packing without a daemon: columns and rows have the same meaning."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from unconnected import connection_of

from purgatoryd.clients import times
from purgatoryd.clients.bulk import pack_cancels, pack_puts
from purgatoryd.clients.connection import Connection
from purgatoryd.clients.retries import all_busy
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import Busy, InvalidKey, InvalidPayload, InvalidRows, InvalidTime
from purgatoryd.shm_layout.layout import ClockKind, TimeKind

pytestmark = pytest.mark.tier("check")

MAX_NS = 2**63 - 1
BAD_TIMES: list[dict[str, Any]] = [
    {},
    {"delay": 1, "delay_ns": 1},
    {"delay": float("nan")},
    {"delay": float("inf")},
    {"delay": True},
    {"delay": "5"},
    {"delay": 1e300},
    {"delay_ns": MAX_NS},
    {"delay_ns": 1.5},
    {"delay_ns": True},
    {"deadline_boot_ns": MAX_NS + 1},
    {"deadline": datetime(2030, 1, 1)},
    {"deadline": "2030-01-01"},
]


@pytest.fixture
def connection() -> Connection:
    """An unopened connection of a client under the virtual clock."""
    connection = connection_of("demo", "shop")
    welcome = [0] * len(wire.Welcome._fields)
    welcome[wire.Welcome._fields.index("clock_kind")] = ClockKind.VIRTUAL
    connection.session.welcome = wire.Welcome(*welcome)  # type: ignore[arg-type]
    connection._welcomed()
    return connection


# ---- times -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", BAD_TIMES)
def test_only_a_time_that_is_too_far_says_the_bound(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidTime) as caught:
        times.due(ClockKind.BOOT, 1, **given)
    assert caught.value.limit_ns == MAX_NS
    said = str(caught.value)
    assert (f"the largest deadline is {MAX_NS} ns" in said) is ("too far" in said)


@pytest.mark.parametrize(
    ("given", "expected_ns"),
    [
        ({"delay": 1.5}, 1_500_000_000),
        ({"delay": 3}, 3 * 10**9),
        ({"delay": timedelta(days=400, microseconds=1)}, 400 * 86400 * 10**9 + 1000),
        ({"delay_ns": np.int64(7)}, 7),
        ({"delay": -5}, 0),
        ({"delay": -1e300}, 0),
        ({"delay_ns": MAX_NS}, MAX_NS),
    ],
)
def test_delays_under_the_virtual_clock(given: dict[str, Any], expected_ns: int) -> None:
    assert times.due(ClockKind.VIRTUAL, 0, **given) == (TimeKind.DELAY, expected_ns)


def test_delays_under_the_real_clock_are_stamped_at_the_call() -> None:
    assert times.due(ClockKind.BOOT, 5, delay=2) == (TimeKind.BOOT, 2 * 10**9 + 5)
    assert times.due(ClockKind.BOOT, 5, delay_ns=-10) == (TimeKind.BOOT, 5)
    longest_ns = MAX_NS - 5
    assert times.due(ClockKind.BOOT, 5, delay_ns=longest_ns)[1] == MAX_NS
    with pytest.raises(InvalidTime):
        times.due(ClockKind.BOOT, 5, delay_ns=longest_ns + 1)


def test_wall_times_are_exact() -> None:
    moment = datetime(2030, 1, 1, 12, 0, 0, 123456, UTC)
    kind, wall_ns = times.due(ClockKind.BOOT, 0, deadline=moment)
    assert kind == TimeKind.WALL
    assert times.wall_time(wall_ns) == moment


# ---- columns -----------------------------------------------------------------------------------


def rows(count: int) -> list[tuple[Any, ...]]:
    return [(f"k{i}", 3600 + i, f"t{i % 300}", b"p" * (i % 40)) for i in range(count)]


def columns(count: int) -> dict[str, Any]:
    names = ("key", "delay", "topic", "payload")
    return dict(zip(names, map(list, zip(*rows(count), strict=True)), strict=True))


def arrow(count: int) -> Any:
    return pa.table(columns(count))


COLUMNS: dict[str, Callable[[int], Any]] = {
    "lists": columns,
    "numpy": lambda n: {name: np.array(column) for name, column in columns(n).items()},
    "objects": lambda n: {name: np.array(c, object) for name, c in columns(n).items()},
    "arrow": arrow,
    "sliced arrow": lambda n: arrow(n + 7).slice(0, n),
    "sliced at the front": lambda n: pa.concat_tables([arrow(5), arrow(n)]).slice(5),
    "chunked": lambda n: pa.concat_tables([arrow(n).slice(0, 700), arrow(n).slice(700)]),
    "record batch": lambda n: arrow(n).to_batches()[0],
    "large strings": lambda n: arrow(n).set_column(0, "key", [columns(n)["key"]]).cast(
        arrow(n).schema.set(0, pa.field("key", pa.large_string()))
    ),
    "dictionary": lambda n: arrow(n).set_column(2, "topic", arrow(n)["topic"].dictionary_encode()),
    "dictionary keys": lambda n: arrow(n).set_column(0, "key", arrow(n)["key"].dictionary_encode()),
}  # fmt: skip


def timers(connection: Connection, table: Any, topic: str = "default") -> list[tuple[Any, ...]]:
    """Return the timers that the packed batches ask the daemon to arm, decoded from their bytes."""
    found = []
    for batch in pack_puts(connection, table, topic, "error")[1]:
        assert batch.count <= layout.BATCH_RECORDS
        names = decoded_names(batch.body[: batch.names_bytes], batch.names)
        end = batch.names_bytes + batch.count * wire.RECORD.size
        at = end
        for record in wire.RECORD.iter_unpack(batch.body[batch.names_bytes : end]):
            op, mode, key_type, key_len, name, time_kind, _, payload_len, _, time_ns, _ = record
            key = wire.decode_key(key_type, batch.body[at : at + key_len])
            payload = batch.body[at + key_len : at + key_len + payload_len]
            at += key_len + payload_len
            assert (op, mode) == (layout.Op.PUT, layout.PutMode.ERROR)
            found.append((key, time_kind, time_ns, *names[name], payload))
        assert at == len(batch.body)
    return found


def decoded_names(table: bytes, count: int) -> list[tuple[bytes, bytes]]:
    assert count <= layout.BATCH_NAMES
    assert len(table) % 8 == 0
    names, at = [], 0
    for _ in range(count):
        middle, end = at + 2 + table[at], at + 2 + table[at] + table[at + 1]
        names.append((table[at + 2 : middle], table[middle:end]))
        at = end
    return names


def expected(count: int) -> list[tuple[Any, ...]]:
    return [
        (key, TimeKind.DELAY, delay * 10**9, b"shop", topic.encode(), payload)
        for key, delay, topic, payload in rows(count)
    ]


def test_rows_are_packed_as_they_are(connection: Connection) -> None:
    assert timers(connection, rows(2500)) == expected(2500)


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_mean_what_rows_mean(connection: Connection, kind: str) -> None:
    assert timers(connection, COLUMNS[kind](2500)) == expected(2500)


def test_no_rows(connection: Connection) -> None:
    assert timers(connection, []) == []
    assert timers(connection, {"key": [], "delay": []}) == []
    result, batches = pack_puts(connection, [], "t", "keep")
    assert (result.done, result.ok, len(result), batches) == (True, True, 0, [])


def test_rows_that_were_never_sent_leave_the_queue_as_busy(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = layout.BATCH_RECORDS + 5
    result, (sent, unsent) = pack_puts(connection, [(f"{n}", 1) for n in range(rows)], "t", "keep")
    connection.packer.bulk(sent)
    sent.settle(all_busy(sent))
    monkeypatch.setattr(connection, "abandon", lambda calls: True)
    with pytest.raises(Busy) as refused:
        result.abandon([unsent])
    assert refused.value.rows == tuple(range(rows))
    assert connection.packer.queued == 0


def test_many_topics_and_large_payloads_split_batches(connection: Connection) -> None:
    keys = [f"k{i}" for i in range(1000)]
    topics = [f"t{i}" for i in range(1000)]
    found = timers(connection, {"key": keys, "delay": [1] * 1000, "topic": topics})
    assert [timer[4] for timer in found] == [topic.encode() for topic in topics]
    big = [bytes([i]) * 65536 for i in range(50)]
    result, batches = pack_puts(
        connection, {"key": keys[:50], "delay": [1] * 50, "payload": big}, "t", "error"
    )
    assert len(batches) > 1
    assert max(len(batch.body) for batch in batches) < layout.MESSAGE_MAX
    assert len(result) == 50


@pytest.mark.parametrize(
    ("column", "values", "expected_ns"),
    [
        ("delay", np.array([1, -2]), [10**9, 0]),
        ("delay", np.array([1.5, -2.0]), [1_500_000_000, 0]),
        ("delay", np.array([1500, -1], "m8[ms]"), [1_500_000_000, 0]),
        ("delay", [timedelta(seconds=1), 2], [10**9, 2 * 10**9]),
        ("delay_ns", np.array([1, 2], "u8"), [1, 2]),
        ("deadline_boot_ns", [3, 4], [3, 4]),
        ("deadline", [datetime(1970, 1, 2, tzinfo=UTC)] * 2, [86400 * 10**9] * 2),
        ("deadline", pa.array([86400, 1], pa.timestamp("s", "UTC")), [86400 * 10**9, 10**9]),
    ],
)
def test_time_columns(
    connection: Connection, column: str, values: Any, expected_ns: list[int]
) -> None:
    found = timers(connection, {"key": ["a", "b"], column: values})
    assert [timer[2] for timer in found] == expected_ns


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("delay", np.array([1.0, np.nan])),
        ("delay", np.array([1.0, np.inf])),
        ("delay", np.array([1.0, 1e300])),
        ("delay", np.array([True, False])),
        ("delay", np.array([1, 2**62])),
        ("delay", np.array([1, 2**62], "m8[s]")),
        ("delay", ["soon", "later"]),
        ("delay_ns", np.array([1.0, 2.0])),
        ("delay_ns", np.array([1, 2**63], "u8")),
        ("delay_ns", [1, 2**63]),
        ("deadline", np.array(["2030-01-01", "2031-01-01"], "M8[s]")),
        ("deadline", [datetime(2030, 1, 1)] * 2),
    ],
)
def test_bad_time_columns(connection: Connection, column: str, values: Any) -> None:
    with pytest.raises(InvalidTime):
        pack_puts(connection, {"key": ["a", "b"], column: values}, "t", "error")


@pytest.mark.parametrize(
    "table",
    [
        [("a",)],
        ["ab"],
        "ab",
        {"key": "ab", "delay": [1, 1]},
        {"key": ["a", "b"], "delay": b"ab"},
        [5],
        [{"key": "a", "delay": 1, "colour": "red"}],
        [{"delay": 1}],
        {"key": ["a", "b"], "delay": [1]},
        {"key": ["a"], "delay": [1], "delay_ns": [1]},
        {"key": ["a"]},
        pa.table({"key": pa.array(["a", None]), "delay": [1, 2]}),
        pa.table({"key": ["a", "b"], "delay": pa.array([1, None])}),
        pa.table({"key": ["a"], "delay": [1], "topic": pa.array([None], pa.string())}),
    ],
)
def test_bad_rows(connection: Connection, table: Any) -> None:
    with pytest.raises(InvalidRows):
        pack_puts(connection, table, "t", "error")


@pytest.mark.parametrize("shorter", ["key", "delay", "topic", "payload"])
def test_columns_have_one_length(connection: Connection, shorter: str) -> None:
    table: dict[str, list[Any]]
    table = {"key": ["a", "b"], "delay": [1, 1], "topic": ["t", "t"], "payload": [b"", b""]}
    with pytest.raises(InvalidRows, match="differ in length"):
        pack_puts(connection, table | {shorter: table[shorter][:1]}, "t", "error")


def test_a_bad_row_is_named(connection: Connection) -> None:
    with pytest.raises(InvalidRows) as caught:
        pack_puts(connection, [("a", 1), ("b",)], "t", "error")
    assert caught.value.row == 1


def test_bad_keys_and_payloads_in_columns(connection: Connection) -> None:
    for keys in (np.array([b"a", b""]), pa.array(["a", "x" * 256]), ["a", 5], np.array(["a", ""])):
        with pytest.raises(InvalidKey):
            pack_puts(connection, {"key": keys, "delay": [1, 2]}, "t", "error")
    for payloads in (["text", b""], np.array(["text", ""]), [b"", bytes(65537)]):
        with pytest.raises(InvalidPayload):
            pack_puts(
                connection, {"key": ["a", "b"], "delay": [1, 2], "payload": payloads}, "t", "error"
            )


@pytest.mark.parametrize("keys", ["ab", b"ab"])
def test_a_single_key_is_no_collection_of_keys(connection: Connection, keys: Any) -> None:
    with pytest.raises(InvalidRows, match=r"must be a collection, not the single value b?'ab'"):
        pack_cancels(connection, keys)


def test_cancels_pack_the_same_from_lists_and_arrays(connection: Connection) -> None:
    keys = [f"k{i}" for i in range(1500)]
    bodies = [
        [batch.body for batch in pack_cancels(connection, form)[1]]
        for form in (keys, np.array(keys), pa.array(keys), pa.chunked_array([keys]))
    ]
    assert len(bodies[0]) == 2
    assert bodies.count(bodies[0]) == len(bodies)
