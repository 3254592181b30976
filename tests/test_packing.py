"""Batches packed in C, compared byte for byte with batches that Python packs, for random rows."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unconnected import connection_of

from purgatoryd.clients import times
from purgatoryd.clients.bulk import OWN, pack_cancels, pack_puts
from purgatoryd.clients.items import Common, order_hash
from purgatoryd.clients.model import CancelResult, Codes
from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import InvalidTime
from purgatoryd.shm_layout.layout import SLACK_MAX_NS, Op, Status

pytestmark = pytest.mark.tier("check")

NOW_NS = 1_000_000_007
CONNECTION = connection_of("demo", "shop")
CONNECTION.host = type("Frozen", (), {"boot_ns": staticmethod(lambda: NOW_NS)})()

TEXTS = st.text(min_size=1, max_size=60).filter(
    lambda text: not set(text) & {chr(n) for n in range(0xD800, 0xE000)}
)
KEYS = st.one_of(TEXTS, st.binary(min_size=1, max_size=255), st.uuids())
DELAYS = st.one_of(
    st.integers(-5, 10**9),
    st.floats(-5, 1e9),
    st.timedeltas(max_value=timedelta(days=50_000)),
    st.sampled_from([0.0, 0.5e-9, 1.5e-9, 2.5e-9, 1e-9]),
)
TOPICS = st.one_of(st.none(), st.sampled_from(["", "t", "default", "münze"]))
SLACKS = st.one_of(
    st.none(),
    st.floats(0, SLACK_MAX_NS / 1e9),
    st.timedeltas(timedelta(0), timedelta(hours=19)),
)
PAYLOADS = st.one_of(st.none(), st.binary(max_size=80), st.binary(max_size=9).map(bytearray))


def by_hand(
    rows: list[tuple[Any, ...]], mode: int, topic: str, within: float | None = None
) -> list[bytes]:
    """Pack rows (key, delay[, topic[, payload[, slack]]]) record by record, and return the body of
    each batch. `topic`, `within`: those of rows that have none."""
    bodies, left = [], rows
    while left:
        names: dict[bytes, int] = {}
        records, area = b"", b""
        for count, row in enumerate(left):
            key, delay, of_row, payload, slack = (*row, None, None, None)[:5]
            entry = CONNECTION.names.of_topic(topic if of_row is None else of_row)
            full = len(names) == layout.BATCH_NAMES and entry not in names
            if full or count == layout.BATCH_RECORDS:
                break
            kind, time_ns = times.due(0, NOW_NS, delay)
            key_type, data = wire.encode_key(key)
            payload = bytes(payload or b"")
            index = names.setdefault(entry, len(names))
            flags = times.slack(within if slack is None else slack)
            records += wire.RECORD.pack(
                Op.PUT, mode, key_type, len(data), index, kind, flags, len(payload), 0, time_ns, 0
            )
            area += data + payload
        else:
            count = len(left)
        table = b"".join(names)
        bodies.append(table + bytes(-len(table) % 8) + records + area)
        left = left[count:]
    return bodies


def packed(
    rows: Any, mode: str = "error", topic: str = "default", within: float | None = None
) -> list[bytes]:
    common = Common(within)
    return [batch.body for batch in pack_puts(CONNECTION, rows, topic, mode, None, common)[1]]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(KEYS, DELAYS, TOPICS, PAYLOADS, SLACKS), max_size=30))
def test_rows_are_packed_byte_for_byte(rows: list[tuple[Any, ...]]) -> None:
    keep = layout.PutMode.KEEP
    tuples = [row[:4] for row in rows]
    for within in (None, 0.5):
        assert packed(tuples, "keep", "main", within) == by_hand(tuples, keep, "main", within)
    names = ("key", "delay", "topic", "payload", "within")
    dicts = [
        {name: value for name, value in zip(names, row, strict=True) if value is not None}
        for row in rows
    ]
    assert packed(dicts, "keep", "main", 0.5) == by_hand(rows, keep, "main", 0.5)


@pytest.mark.parametrize("topics", [1, 256, 257, 1500])
def test_batches_are_cut_at_their_limits(topics: int) -> None:
    rows = [(f"k{i}", i, f"t{i % topics}", b"x" * (i % 3)) for i in range(2500)]
    assert packed(rows) == by_hand(rows, layout.PutMode.ERROR, "default")


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            TEXTS,
            st.floats(0, 1e9),
            st.sampled_from(["a", "b"]),
            st.binary(max_size=9),
            st.floats(0, SLACK_MAX_NS / 1e9),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_columns_are_packed_byte_for_byte(rows: list[tuple[Any, ...]]) -> None:
    rows = [(k, d, t, p.rstrip(b"\0"), s) for k, d, t, p, s in rows]
    keys, delays, topics, payloads, slacks = (list(column) for column in zip(*rows, strict=True))
    columns = {"key": keys, "delay": delays, "topic": topics, "payload": payloads}
    without = [row[:4] for row in rows]
    assert packed(columns, within=0.5) == by_hand(without, layout.PutMode.ERROR, "default", 0.5)
    columns["within"] = slacks
    expected = by_hand(rows, layout.PutMode.ERROR, "default")
    assert packed(columns) == expected
    assert packed(pa.table(columns)) == expected
    if not any(key.endswith("\0") for key in keys):  # numpy takes these for its padding
        assert packed({**columns, "key": np.array(keys), "delay": np.array(delays)}) == expected
        every_second = np.array([text for key in keys for text in (key, "other")])[::2]
        assert packed({**columns, "key": every_second}) == expected
        assert packed({**columns, "within": np.array(slacks)}) == expected


@settings(deadline=None, max_examples=50)
@given(st.lists(KEYS, max_size=30))
def test_cancels_are_packed_byte_for_byte(keys: list[Any]) -> None:
    bodies = [batch.body for batch in pack_cancels(CONNECTION, keys)[1]]
    entry = CONNECTION.names.of_key
    pairs = [wire.encode_key(key) for key in keys]
    records = b"".join(
        wire.RECORD.pack(Op.CANCEL, 0, kind, len(data), 0, 0, 0, 0, 0, 0, 0) for kind, data in pairs
    )
    body = entry + bytes(-len(entry) % 8) + records + b"".join(data for _, data in pairs)
    assert bodies == ([body] if keys else [])


@pytest.mark.parametrize("delay", [2.0**63 / 1e9, 1e300, float("nan"), 10**30, True, "5"])
def test_a_delay_that_no_clock_can_have_is_refused(delay: Any) -> None:
    with pytest.raises(InvalidTime):
        packed([("k", 1), ("k", delay)])


def test_rows_that_python_converts_have_the_slack_of_their_column() -> None:
    keys, slacks = ["plain", UUID(int=1)], [None, timedelta(milliseconds=2)]
    rows = [(key, 1.0, None, None, slack) for key, slack in zip(keys, slacks, strict=True)]
    columns = {"key": keys, "delay": [1.0, 1.0], "within": slacks}
    assert packed(columns, within=0.5) == by_hand(rows, layout.PutMode.ERROR, "default", 0.5)


def test_rows_columns_and_tables_are_packed_with_the_same_items() -> None:
    own: list[tuple[str | None, int | None, str | None, Literal["fire"] | None, float | None]] = [
        (None, None, None, None, None), ("t", None, None, None, None), (None, 0, None, None, 30.0),
        (None, None, "o", None, None), ("t", 9, "p", "fire", 2.5),
    ]  # fmt: skip
    common = Common(tag="common", priority=5, order_key="order", late=("skip", 60), unique_for=60)
    rows = [
        {"key": f"k{n}", "delay": 1.0} | dict(zip(OWN, values, strict=True))
        for n, values in enumerate(own)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    numpy = columns | {"priority": np.array(columns["priority"], object)}
    bodies = [
        [batch.body for batch in pack_puts(CONNECTION, given, "t", "error", None, common)[1]]
        for given in (rows, columns, numpy, pa.table(columns))
    ]
    assert bodies[1:] == bodies[:1] * 3
    [body] = bodies[0]
    for values in own:
        assert common.items(*values) in body
    assert common.items("t", 9, "p", "fire", 2.5) == (
        wire.EXT.pack(2, 1, 0) + b"t".ljust(16, b"\0") + wire.EXT.pack(4, 9, 0)
        + wire.EXT.pack(5, 0, order_hash("p")) + wire.EXT.pack(6, 0, 0)
        + wire.EXT.pack(7, 0, 25 * 10**8)
    )  # fmt: skip


def test_codes_are_equal_to_a_list_of_their_objects() -> None:
    codes = Codes(bytes((Status.CANCELLED, Status.UNKNOWN, Status.CANCELLED)), CancelResult)
    objects = [CancelResult.CANCELLED, CancelResult.UNKNOWN, CancelResult.CANCELLED]
    assert codes == objects
    assert objects == codes
    assert codes != objects[1:]
    assert (codes[1], codes[-1]) == (objects[1], objects[-1])
    assert codes[1:] == objects[1:]
    assert (codes.count(objects[0]), codes.index(objects[1])) == (2, 1)
    assert repr(codes) == repr(objects)
    assert codes != Codes(codes.codes, Status)
