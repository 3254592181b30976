"""layout.py, wire.py and errors.py: formats, round trips, garbage."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import re
import struct
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purgatoryd.shm_layout import errors, layout, reference, wire
from purgatoryd.shm_layout._core import ffi
from purgatoryd.shm_layout.errors import (
    InvalidKey,
    InvalidName,
    InvalidPayload,
    ProtocolError,
    PurgatorydError,
)
from purgatoryd.shm_layout.layout import KeyType, Message, Op, WireError

PROTOCOL = Path(__file__).parents[1] / "docs" / "protocol.md"

pytestmark = pytest.mark.tier("check")

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
U64 = st.integers(0, 2**64 - 1)
SHORT_TEXT = TEXT.filter(lambda text: 0 < len(text.encode()) <= 255)
KEYS = st.one_of(SHORT_TEXT, st.binary(min_size=1, max_size=255), st.uuids())


# ---- layout --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", layout.struct_names())
def test_every_struct_has_a_format_of_its_size(name: str) -> None:
    assert struct.calcsize(layout.struct_format(name)) == layout.size_of(name)


@pytest.mark.parametrize("name", ["pg_record", "pg_result", "pg_notice", "pg_hot", "pg_entry"])
def test_numpy_types_agree_with_the_header(name: str) -> None:
    dtype = layout.struct_dtype(name)
    assert dtype.itemsize == layout.size_of(name)
    assert {n: dtype.fields[n][1] for n in dtype.names} == {  # type: ignore[union-attr, index]
        n: offset for n, offset, _ in layout.fields(name)
    }


def test_the_formats_of_the_wire_read_what_c_wrote() -> None:
    record = ffi.new("struct pg_record *", {"op": 1, "key_len": 3, "time_ns": -5, "value": 7})
    unpacked = wire.RECORD.unpack(ffi.buffer(record))
    assert unpacked == (1, 0, 0, 3, 0, 0, 0, 0, 0, -5, 7)


def test_enums_are_complete() -> None:
    for enum, name in (
        (layout.Status, "pg_status"),
        (layout.WireError, "pg_error"),
        (layout.Message, "pg_message"),
        (layout.Cause, "pg_cause"),
        (layout.KeyType, "pg_key_type"),
        (layout.TimeKind, "pg_time_kind"),
        (layout.PutMode, "pg_put_mode"),
        (layout.ArenaState, "pg_arena_state"),
        (layout.DaemonState, "pg_daemon_state"),
        (layout.Degraded, "pg_degraded"),
    ):
        declared = ffi.typeof(f"enum {name}").relements
        counts = {"PG_KEY_TYPES", "PG_T_KINDS", "PG_MODES"}
        wanted = {value for label, value in declared.items() if label not in counts}
        assert {int(member) for member in enum} == wanted


def test_the_layout_id_is_of_64_bits_and_steady() -> None:
    assert 0 < layout.LAYOUT_ID < 2**64
    assert layout.layout_id() == layout.LAYOUT_ID


def test_the_tables_of_the_protocol_page_are_current() -> None:
    page = PROTOCOL.read_text()
    assert page == reference.refresh(page), (
        "run python -m purgatoryd.shm_layout.reference docs/protocol.md"
    )
    for name in ("frame", "record", "result", "hello", "welcome", "info", "tail", "notices"):
        assert f"<!-- struct pg_{name} -->" in page


def test_each_field_and_each_value_of_the_protocol_has_a_meaning() -> None:
    tables = re.findall(
        r"<!-- (struct|enum) (\w+) -->\n(.*?)<!-- end -->", PROTOCOL.read_text(), re.DOTALL
    )
    assert len(tables) > 30
    for _, name, table in tables:
        rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][2:]
        assert [row[-3].strip() for row in rows if not row[-2].strip()] == [], name


# ---- keys and names ------------------------------------------------------------------------


@given(KEYS)
def test_keys_keep_value_and_type(key: wire.Key) -> None:
    kind, data = wire.encode_key(key)
    back = wire.decode_key(kind, data)
    assert (back, type(back)) == (key, type(key))


def test_str_bytes_and_uuid_are_different_keys() -> None:
    number = uuid.UUID(int=5)
    kinds = {wire.encode_key(key)[0] for key in ("a", b"a", number)}
    assert kinds == {KeyType.STR, KeyType.BYTES, KeyType.UUID}


@pytest.mark.parametrize("key", ["", b"", "x" * 256, "é" * 128, b"x" * 256, 7, None, "\ud800"])
def test_bad_keys_say_the_bound(key: object) -> None:
    with pytest.raises(InvalidKey) as caught:
        wire.encode_key(key)  # type: ignore[arg-type]
    assert caught.value.limit == layout.KEY_MAX
    assert "255" in str(caught.value)


def test_bounds_of_keys_are_inclusive() -> None:
    assert wire.encode_key("é" * 127 + "x")[1] == ("é" * 127 + "x").encode()
    assert wire.encode_key(b"\0" * 255)[0] == KeyType.BYTES


@pytest.mark.parametrize("name", ["", "x" * 64, "a\0b", "\ud800", b"bytes", None])
def test_bad_namespaces(name: object) -> None:
    with pytest.raises(InvalidName) as caught:
        wire.encode_namespace(name)  # type: ignore[arg-type]
    assert caught.value.limit == layout.NAMESPACE_MAX
    assert ("at most" in str(caught.value)) is (name == "x" * 64)


@pytest.mark.parametrize("name", ["x" * 128, "a\0b", None])
def test_bad_topics(name: object) -> None:
    with pytest.raises(InvalidName) as caught:
        wire.encode_topic(name)  # type: ignore[arg-type]
    assert caught.value.limit == layout.TOPIC_MAX


def test_bounds_of_payloads() -> None:
    assert len(wire.encode_payload(bytearray(65536))) == 65536
    with pytest.raises(InvalidPayload) as caught:
        wire.encode_payload(bytes(65537))
    assert (caught.value.length, caught.value.limit) == (65537, 65536)
    with pytest.raises(InvalidPayload):
        wire.encode_payload("text")  # type: ignore[arg-type]


# ---- frames --------------------------------------------------------------------------------


@given(
    st.sampled_from(list(Message)), U64, U64, st.integers(0, 13), st.tuples(U64, U64), st.binary()
)
def test_reply_round_trip(
    message: Message, session: int, sequence: int, error: int, detail: tuple[int, int], body: bytes
) -> None:
    frame = wire.encode_frame(message, session, sequence, count=3, error=error, detail=detail)
    reply = wire.decode_reply(frame + body)
    assert tuple(reply) == (message, session, sequence, 3, error, detail, body)
    assert reply.refusal().name == WireError(error).name


@given(st.binary(max_size=300))
def test_garbage_is_a_protocol_error_or_nothing(data: bytes) -> None:
    for decode in (
        wire.decode_reply,
        wire.decode_welcome,
        wire.decode_notice_head,
        wire.decode_topic_frame,
        lambda d: wire.decode_infos(d, 3),
        lambda d: wire.decode_newest_sequences(d, 3),
        lambda d: wire.decode_notices(d, 3),
        lambda d: wire.check_results(d, 3),
    ):
        with contextlib.suppress(ProtocolError):
            decode(data)


def test_a_name_table_is_padded_to_eight_bytes() -> None:
    table = wire.encode_names([(b"shop", b"orders"), (b"n", b"")])
    assert table == b"\x04\x06shoporders\x01\x00n" + b"\0"
    assert len(table) % 8 == 0


def test_a_query_has_one_record_and_the_key() -> None:
    frame = wire.encode_query(5, 9, b"shop", "key")
    head = wire.FRAME.unpack_from(frame)
    assert head[2:6] == (Message.QUERY, 9, 5, 1)
    record = wire.RECORD.unpack_from(frame, wire.FRAME.size + head[8])
    assert record[:4] == (Op.GET, 0, KeyType.STR, 3)
    assert frame.endswith(b"key")


def info(*timer: int, operation: tuple[int, ...] = (0,) * 7) -> bytes:
    return wire.INFO.pack(*timer, *operation)


def test_infos_round_trip() -> None:
    found = info(5 << 8 | 9, 77, -(2**63), 3, 2, 1, 2, 4) + b"nstopc" + b"kk" + b"pay"
    wall = info(6 << 8 | 9, 78, 1234, 0, 1, 0, 1, 0, operation=(0, 0, 0, 0, 0, 20, 0)) + b"n" + b"k"
    first, second = wire.decode_infos(found + wall, 2)
    assert first == (
        5,
        9,
        77,
        None,
        "ns",
        "topc",
        b"kk",
        b"pay",
        None,
        0,
        None,
        None,
        None,
        None,
        None,
    )
    assert second == (
        6,
        9,
        78,
        1234,
        "n",
        "",
        "k",
        b"",
        None,
        1 << 20,
        None,
        None,
        None,
        None,
        None,
    )


def test_an_operations_info_has_its_condition() -> None:
    key = wire.INFO_WATCH.pack(40, 2**64 - 1, 7, 9, 1, 0, 1) + b"a"
    reached = wire.INFO_WATCH.pack(2**64 - 1, 0, 50, 0, 1, 1, 0) + b"b"
    head = (6 << 8 | 9, 78, -(2**63), 0, 1, 0, 1, 0)
    quorum = (99, 1, len(key + reached), 2, layout.Condition.QUORUM, 0, 1000)
    (found,) = wire.decode_infos(info(*head, operation=quorum) + b"nk" + key + reached, 1)
    waits_for = (("a", 7, 9, 40, None, None, True), (b"b", 50, 0, None, None, None, False))
    assert found.operation == (layout.Condition.QUORUM, 99, 1000, 1, waits_for)
    total = (99, 1000, len(key), 1, layout.Condition.SUM, 0, layout.ANYBODY)
    (found,) = wire.decode_infos(info(*head, operation=total) + b"nk" + key, 1)
    assert found.operation is not None
    assert found.operation.keys == (("a", 7, 9, None, 40, None, True),)
    assert found.operation.owner_uid is None
    unknown = (99, 1, len(key), 1, len(layout.Condition), 0, 0)
    with pytest.raises(ProtocolError, match="condition"):
        wire.decode_infos(info(*head, operation=unknown) + b"nk" + key, 1)
    with pytest.raises(ProtocolError, match="watch key"):
        wire.decode_infos(info(*head, operation=(99, 1, 0, 1, 0, 0, 0)) + b"nk", 1)


# ---- notices -------------------------------------------------------------------------------


def notices(records: list[tuple[bytes, int, bytes]]) -> bytes:
    head = wire.NOTICES.pack(
        layout.NOTICE_MAGIC, 1, 7, 3, 10, 10 + len(records), 5, 6, len(records)
    )
    packed = b"".join(
        wire.NOTICE.pack(i, 100 + i, 200 + i, len(payload), len(key), kind, 1, 2, i)
        for i, (key, kind, payload) in enumerate(records)
    )
    return head + packed + b"".join(key + payload for key, _, payload in records)


@given(st.lists(st.tuples(KEYS, st.binary(max_size=50)), max_size=20))
def test_notices_round_trip(rows: list[tuple[wire.Key, bytes]]) -> None:
    records = [(wire.encode_key(key)[1], wire.encode_key(key)[0], payload) for key, payload in rows]
    body = notices(records)
    head = wire.decode_notice_head(body)
    assert head == (7, 3, 10, 10 + len(rows), 5, 6, len(rows))
    found = wire.decode_notices(body, head.records)
    assert [(n.key, n.payload) for n in found] == rows
    assert [(n.ticket, n.deadline_ns, n.fired_ns, n.cause, n.flags) for n in found] == [
        (i, 100 + i, 200 + i, 1, 2) for i in range(len(rows))
    ]


@given(st.integers(0, 200))
def test_a_cut_notice_message_is_refused(length: int) -> None:
    body = notices([(b"key", 0, b"payload"), (b"key2", 1, b"")])
    if length >= len(body):
        return
    with pytest.raises(ProtocolError):
        wire.decode_notices(body[:length], wire.decode_notice_head(body[:length]).records)


def test_topic_frames() -> None:
    assert wire.topic_frame(b"shop", b"orders") == b"shop\0orders\0"
    assert wire.decode_topic_frame(b"shop\0\0") == ("shop", "")
    with pytest.raises(ProtocolError):
        wire.decode_topic_frame(b"shop\0orders")


# ---- errors --------------------------------------------------------------------------------


def tree(root: type[PurgatorydError]) -> list[type[PurgatorydError]]:
    return [root] + [leaf for child in root.__subclasses__() for leaf in tree(child)]


@pytest.mark.parametrize("kind", tree(PurgatorydError))
def test_every_error_is_in_the_drawing_and_survives_pickling(kind: type[PurgatorydError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")
    samples = {
        "str": "text", "int": 1, "float": 1.5, "object": b"thing", "dict[str, int]": {"a": 5},
        "tuple[int, int]": (5, 6), "tuple[tuple[str, object, object], ...]": (("a", 5, b"c"),),
        "tuple[tuple[str, str, str], ...]": (("a", "b", "c"),),
    }  # fmt: skip
    kinds = {
        name: kind
        for c in kind.__mro__
        for name, kind in vars(c).get("__annotations__", {}).items()
    }
    error = kind(*(samples.get(kinds[name], (("a", 5), ("b", 6))) for name in kind.figures))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)
    assert inspect.getdoc(kind)
