"""Encode requests, and decode replies and notices.

The functions are pure: they do no I/O and read no clock. docs/protocol.md describes the same bytes
for other languages; all formats come from layout.h. Received bytes are checked before use: a frame
that violates the protocol raises ProtocolError and no other error.
"""

from __future__ import annotations

import itertools
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from purgatoryd.shm_layout import layout
from purgatoryd.shm_layout.errors import (
    CursorHeld,
    CursorRefused,
    InvalidKey,
    InvalidName,
    InvalidPayload,
    MessageRefused,
    NotDurable,
    NoWal,
    ProtocolError,
    ScheduleRefused,
    SessionTableFull,
    UidShareExceeded,
)
from purgatoryd.shm_layout.layout import (
    Condition,
    ExtKind,
    KeyType,
    Message,
    NamespaceField,
    SelectField,
    TopicField,
    WireError,
    struct_format,
)

Key = str | bytes | uuid.UUID
"""A timer's key: 1-255 bytes; str is UTF-8. "a" and b"a" are different keys."""

_STR, _BYTES, _UUID = map(int, (KeyType.STR, KeyType.BYTES, KeyType.UUID))
_WITHOUT_TARGETS = frozenset({Condition.SUM, Condition.CLIENT})
_TEXTS = frozenset({ExtKind.TAG, ExtKind.UNIQUE})
"""Kinds of extension items whose text follows the item."""
_NOTHING = 2**64 - 1
"""Special value. As a target: the target is reached. As a cap: there is no cap."""

RESEND_MAX_NS = 2_000_000_000
"""The longest time that a client waits before it sends unanswered messages again. After an outage,
the daemon delays the expiry of operations for longer than this."""
FRAME = struct.Struct(struct_format("pg_frame"))
RECORD = struct.Struct(struct_format("pg_record"))
RESULT = struct.Struct(struct_format("pg_result"))
HELLO = struct.Struct(struct_format("pg_hello"))
SESSION_INFO = struct.Struct(struct_format("pg_session_info"))
WELCOME = struct.Struct(struct_format("pg_welcome"))
INFO = struct.Struct(struct_format("pg_info"))
INFO_WATCH = struct.Struct(struct_format("pg_info_watch"))
TAIL = struct.Struct(struct_format("pg_tail"))
NOTICES = struct.Struct(struct_format("pg_notices"))
NOTICE = struct.Struct(struct_format("pg_notice"))
WATCH_KEY = struct.Struct(struct_format("pg_watch_key"))
EXT = struct.Struct(struct_format("pg_ext"))
SELECT = struct.Struct(struct_format("pg_select"))
LIST_ASK = struct.Struct(struct_format("pg_list_ask"))
LISTED = struct.Struct(struct_format("pg_listed"))
SWEEP_ASK = struct.Struct(struct_format("pg_sweep_ask"))
SWEEP_INFO = struct.Struct(struct_format("pg_sweep_info"))
OUTCOME = struct.Struct(struct_format("pg_outcome"))
ACK = struct.Struct(struct_format("pg_ack"))
VERDICT = struct.Struct(struct_format("pg_verdict"))
NAMESPACE_SET = struct.Struct(struct_format("pg_namespace_set"))
TOPIC_SET = struct.Struct(struct_format("pg_topic_set"))
ROWS = struct.Struct(struct_format("pg_rows"))
REPLAY_ASK = struct.Struct(struct_format("pg_replay_ask"))
REPLAY_INFO = struct.Struct(struct_format("pg_replay_info"))
CURSOR_ASK = struct.Struct(struct_format("pg_cursor_ask"))
BULK_LOAD_ASK = struct.Struct(struct_format("pg_bulk_load_ask"))
BULK_LOAD_INFO = struct.Struct(struct_format("pg_bulk_load_info"))
BULK_LOAD_PART = struct.Struct("<Q512s")  # struct pg_bulk_load_part, but with `bits` as bytes
PUBLISH = struct.Struct(struct_format("pg_publish"))
SCHEDULE_ASK = struct.Struct(struct_format("pg_schedule_ask"))
SCHEDULE_REPLY = struct.Struct(struct_format("pg_schedule_reply"))
SCHEDULE_INFO = struct.Struct(struct_format("pg_schedule_info"))


# ---- keys, names, payloads ---------------------------------------------------------------


def encode_key(key: Key) -> tuple[int, bytes]:
    """Return (type tag, bytes) of `key`. Raises InvalidKey."""
    if isinstance(key, str):
        kind, data = _STR, _utf8(key)
    elif isinstance(key, bytes):
        kind, data = _BYTES, key
    elif isinstance(key, uuid.UUID):
        kind, data = _UUID, key.bytes
    else:
        reason = f"must be str, bytes or UUID, not {type(key).__name__}"
        raise InvalidKey(reason=reason, length=0, limit=layout.KEY_MAX)
    if not 1 <= len(data) <= layout.KEY_MAX:
        raise InvalidKey("is too long" if data else "is empty", len(data), layout.KEY_MAX)
    return kind, data


def _utf8(key: str) -> bytes:
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise InvalidKey(
            reason="is not valid Unicode", length=len(key), limit=layout.KEY_MAX
        ) from error


def decode_key(kind: int, data: bytes) -> Key:
    """Return the key that encode_key() encoded. If `data` is not valid for the type tag `kind`,
    return `data` as bytes."""
    try:
        if kind == KeyType.STR:
            return data.decode()
        return uuid.UUID(bytes=data) if kind == KeyType.UUID else data
    except ValueError:
        return data


def encode_namespace(name: str) -> bytes:
    """Encode a name of 1-63 bytes of UTF-8 without NUL. Raises InvalidName."""
    return encode_name("namespace", name, 1, layout.NAMESPACE_MAX)


def encode_topic(name: str) -> bytes:
    """Encode a name of 0-127 bytes of UTF-8 without NUL. Raises InvalidName."""
    return encode_name("topic", name, 0, layout.TOPIC_MAX)


def tag_bytes(tag: str) -> bytes:
    """Encode a tag of 1-63 bytes of UTF-8 without NUL. Raises InvalidName."""
    return encode_name("tag", tag, 1, layout.TAG_MAX)


def encode_tag(tag: str | None) -> bytes:
    """Return the extension items of a PUT: the item of a tag of 1-63 bytes of UTF-8 without NUL.
    Raises InvalidName."""
    if tag is None:
        return b""
    text = tag_bytes(tag)
    return EXT.pack(ExtKind.TAG, len(text), 0) + text + bytes(-len(text) % layout.GRANULE)


def encode_late(late: tuple[int, int] | None) -> bytes:
    """Return the extension item of a late policy (enum pg_late_policy, grace in ns)."""
    return b"" if late is None else EXT.pack(ExtKind.LATE, *late)


def encode_priority(priority: int | None) -> bytes:
    """Return the extension item of a priority from 0 to PRIORITY_MAX; None = no item."""
    return b"" if priority is None else EXT.pack(ExtKind.PRIORITY, priority, 0)


def encode_order(order: int | None) -> bytes:
    """Return the extension item of the hash of an order key; None = no item."""
    return b"" if order is None else EXT.pack(ExtKind.ORDER, 0, order)


def encode_unique(unique_for_ns: int | None) -> bytes:
    """Return the extension item of the time for which a key is unique, in ns; None = no item."""
    return b"" if unique_for_ns is None else EXT.pack(ExtKind.UNIQUE, 0, unique_for_ns)


def _items(items: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield kind, extra, value and text of each extension item. Raises ProtocolError."""
    at = 0
    while at < len(items):
        _need("extension item", items, at, EXT.size)
        kind, extra, value = EXT.unpack_from(items, at)
        at += EXT.size
        length = extra if kind in _TEXTS else 0
        _need("text of an extension item", items, at, length)
        yield kind, extra, value, items[at : at + length]
        at += length + -length % layout.GRANULE


def decode_tag(items: bytes) -> str | None:
    """Return the tag in the extension items of a timer; None = it has none. Raises
    ProtocolError."""
    tags = (text for kind, _, _, text in _items(items) if kind == ExtKind.TAG)
    return next((text.decode(errors="replace") for text in tags), None)


def decode_late(items: bytes) -> tuple[int, int] | None:
    """Return the late policy in the extension items of a timer, as encode_late() takes it; None =
    it has none. Raises ProtocolError."""
    return next(((extra, ns) for kind, extra, ns, _ in _items(items) if kind == ExtKind.LATE), None)


def decode_priority(items: bytes) -> int | None:
    """Return the priority in the extension items of a timer; None = it has none. Raises
    ProtocolError."""
    found = (extra for kind, extra, _, _ in _items(items) if kind == ExtKind.PRIORITY)
    return next(found, None)


def decode_order(items: bytes) -> int | None:
    """Return the hash of the order key in the extension items of a timer; None = it has none.
    Raises ProtocolError."""
    found = (order for kind, _, order, _ in _items(items) if kind == ExtKind.ORDER)
    return next(found, None)


def decode_unique(items: bytes) -> int | None:
    """Return the time until which the key of a timer is unique, in ns on the daemon's clock, from
    the extension items of the timer; None = it has none. Raises ProtocolError."""
    found = (until_ns for kind, _, until_ns, _ in _items(items) if kind == ExtKind.UNIQUE)
    return next(found, None)


def encode_name(kind: str, name: str, least: int, most: int) -> bytes:
    """Encode a name of `least` to `most` bytes of UTF-8 without NUL. Raises InvalidName."""
    if not isinstance(name, str):
        raise InvalidName(kind=kind, name=name, reason="must be str", length=0, limit=most)
    try:
        data = name.encode()
    except UnicodeEncodeError as error:
        raise InvalidName(
            kind=kind, name=name, reason="is not valid Unicode", length=len(name), limit=most
        ) from error
    if b"\0" in data:
        reason = "holds a NUL byte"
    elif len(data) < least:
        reason = "is empty"
    elif len(data) > most:
        reason = "is too long"
    else:
        return data
    raise InvalidName(kind=kind, name=name, reason=reason, length=len(data), limit=most)


def encode_cursor_name(name: str) -> bytes:
    """Encode a name of 1-63 bytes of UTF-8 without NUL. Raises InvalidName."""
    return encode_name("cursor", name, 1, layout.CURSOR_MAX)


def encode_payload(payload: bytes | bytearray | memoryview) -> bytes:
    """Check that a payload has 0-65536 bytes, and return it as bytes. Raises InvalidPayload."""
    if not isinstance(payload, bytes | bytearray | memoryview):
        reason = f"must be bytes, not {type(payload).__name__}"
        raise InvalidPayload(reason=reason, length=0, limit=layout.PAYLOAD_MAX)
    data = bytes(payload)
    if len(data) > layout.PAYLOAD_MAX:
        raise InvalidPayload(reason="is too long", length=len(data), limit=layout.PAYLOAD_MAX)
    return data


def encode_names(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a name table of (namespace, topic) pairs, padded to 8 bytes."""
    table = b"".join(bytes((len(n), len(t))) + n + t for n, t in pairs)
    return table + bytes(-len(table) % 8)


# ---- requests ------------------------------------------------------------------------------


def encode_frame(
    message: int,
    session: int = 0,
    sequence: int = 0,
    *,
    count: int = 0,
    names: int = 0,
    error: int = 0,
    names_bytes: int = 0,
    flags: int = 0,
    at_ns: int | None = None,
    detail: tuple[int, int] = (0, 0),
) -> bytes:
    """Return the 64 bytes with which every request and reply begins; `at_ns` also sets FLAG_AT."""
    if at_ns is not None:
        flags |= layout.FLAG_AT
    return FRAME.pack(
        layout.WIRE_MAGIC, layout.WIRE_VERSION, message, session, sequence,
        count, names, error, names_bytes, flags, at_ns or 0, *detail,
    )  # fmt: skip


def encode_worker(name: str) -> bytes:
    """Encode the name that a client gives itself: 0-63 bytes of UTF-8 without NUL. Raises
    InvalidName."""
    return encode_name("worker", name, 0, layout.WORKER_MAX)


def encode_hello(nonce: bytes, sequence: int = 0, worker: bytes = b"", grace_ns: int = 0) -> bytes:
    """Return a HELLO message; `nonce` is 16 random bytes; a repeated nonce returns the same
    session."""
    hello = HELLO.pack(nonce, len(worker), grace_ns)
    return encode_frame(Message.HELLO, 0, sequence) + hello + worker


def encode_query(sequence: int, session: int, namespace: bytes, key: Key) -> bytes:
    """Return a QUERY message for one key; the daemon only repeats `sequence` in its reply."""
    kind, data = encode_key(key)
    names = encode_names([(namespace, b"")])
    head = encode_frame(Message.QUERY, session, sequence, count=1, names=1, names_bytes=len(names))
    record = RECORD.pack(layout.Op.GET, 0, kind, len(data), 0, 0, 0, 0, 0, 0, 0)
    return head + names + record + data


def encode_bulk_load(
    sequence: int, session: int, bulk_load: bytes, action: int,
    *, namespace: bytes = b"", fencing_token: int = 0, start: int = 0,
) -> bytes:  # fmt: skip
    """Return a BULK_LOAD message. OPEN and CLOSE need `namespace`; STATUS needs `start`, the first
    block to report."""
    ask = BULK_LOAD_ASK.pack(bulk_load, fencing_token, start, action, len(namespace))
    return encode_frame(Message.BULK_LOAD, session, sequence) + ask + namespace


NO_END_NS = 2**63 - 1
"""`upto_ns` of a selection without a latest deadline."""


class Select(NamedTuple):
    """A struct pg_select and its names; None = not compared. `tickets` 0 = all timers that are
    armed when the daemon handles the message."""

    namespace: bytes
    prefix: Key | None = None
    topic: bytes | None = None
    tag: bytes | None = None
    from_ns: int = 0
    upto_ns: int = NO_END_NS
    tickets: int = 0

    def encode(self) -> bytes:
        """Return the bytes of the selection."""
        key_type, prefix = encode_key(self.prefix) if self.prefix is not None else (0, b"")
        fields = SelectField.PREFIX if self.prefix is not None else SelectField(0)
        fields |= SelectField.TOPIC if self.topic is not None else SelectField(0)
        fields |= SelectField.TAG if self.tag is not None else SelectField(0)
        texts = (self.namespace, prefix, self.topic or b"", self.tag or b"")
        lengths = (len(text) for text in texts)
        head = SELECT.pack(
            self.from_ns, self.upto_ns, self.tickets, fields, key_type, *lengths
        )  # fmt: skip
        return head + b"".join(texts)


class Part(NamedTuple):
    """The fields of struct pg_list_ask, the request of one LIST message."""

    after: tuple[int, int] = (-(2**63), 0)
    before: tuple[int, int] = (NO_END_NS, 2**64 - 1)
    slot: int = 0
    most: int = 0
    payloads: bool = False


class Listed(NamedTuple):
    """Answer to a LIST message: the fields of struct pg_listed, and the timers. `slot` None = there
    are no more slots."""

    tickets: int
    matched: int
    now_ns: int
    wall_offset_ns: int
    slot: int | None
    timers: list[Info]


class SweepInfo(NamedTuple):
    """Answer to a SWEEP message: struct pg_sweep_info and the selection."""

    id: bytes
    done: int
    time_ns: int
    begun_ns: int
    slot: int
    slots: int
    uid: int
    state: int
    change: int
    time_kind: int
    select: Select


def encode_list(sequence: int, session: int, part: Part, select: Select) -> bytes:
    """Return a LIST message. Raises InvalidKey."""
    ask = LIST_ASK.pack(*part.after, *part.before, part.slot, part.most, part.payloads)
    return encode_frame(Message.LIST, session, sequence) + ask + select.encode()


def encode_sweep(
    sequence: int, session: int, id_: bytes, action: int, select: Select | None = None,
    *, change: int = 0, time_kind: int = 0, time_ns: int = 0,
) -> bytes:  # fmt: skip
    """Return a SWEEP message; BEGIN needs `select`. Raises InvalidKey."""
    ask = SWEEP_ASK.pack(id_, time_ns, action, change, time_kind)
    body = b"" if select is None else select.encode()
    return encode_frame(Message.SWEEP, session, sequence) + ask + body


class ScheduleAsk(NamedTuple):
    """A SCHEDULE message. The fields are those of struct pg_schedule_ask; `start` is its field
    `from`."""

    action: int
    namespace: bytes
    topic: bytes = b""
    key: bytes = b""
    spec: bytes = b""
    zone: bytes = b""
    payload: bytes = b""
    every_ns: int = 0
    start: int = 0
    until: int = 0
    jitter_ns: int = 0
    most: int = 0
    """The field `count`."""
    overlap: int = 0
    tag: bytes = b""
    priority: int | None = None
    repeat: bool = False


def encode_schedule(
    sequence: int, session: int, ask: ScheduleAsk, *, durable: bool = False
) -> bytes:
    """Return a SCHEDULE message. `durable`: the reply comes after the WAL has the changes."""
    texts = (ask.namespace, ask.topic, ask.key, ask.spec, ask.zone, ask.tag, ask.payload)
    head = SCHEDULE_ASK.pack(
        ask.action, *(len(text) for text in texts[:-2]), ask.overlap, len(ask.tag),
        len(ask.payload), ask.priority is not None, ask.priority or 0, ask.repeat, ask.every_ns,
        ask.start, ask.until, ask.jitter_ns, ask.most,
    )  # fmt: skip
    flags = layout.FLAG_DURABLE * durable
    return encode_frame(Message.SCHEDULE, session, sequence, flags=flags) + head + b"".join(texts)


class CursorName(NamedTuple):
    """The name of a cursor in its namespace, encoded."""

    namespace: bytes
    cursor: bytes


Committed = Mapping[str, tuple[int, int]]
"""(incarnation, sequence of the newest committed notice) by topic."""


def encode_cursor(
    sequence: int, session: int, name: CursorName, action: int, topics: Committed,
    *, stream_id: int = 0, every_topic: bool = False, durable: bool = False,
) -> bytes:  # fmt: skip
    """Return a CURSOR message. `stream_id`: for COMMIT, the stream of the sequences. Raises
    InvalidName."""
    ask = CURSOR_ASK.pack(stream_id, action, len(name.namespace), len(name.cursor), every_topic)
    parts = [ask, *name]
    for topic, (incarnation, newest) in topics.items():
        data = encode_topic(topic)
        parts += [TAIL.pack(newest, incarnation, 0, len(data)), data]
    flags = layout.FLAG_DURABLE * durable
    head = encode_frame(Message.CURSOR, session, sequence, count=len(topics), flags=flags)
    return head + b"".join(parts)


class PastRange(NamedTuple):
    """Notices `first` to `last` of a topic, for a REPLAY message."""

    namespace: str
    topic: str
    stream_id: int
    incarnation: int
    first: int
    last: int


def encode_replay(sequence: int, asked: PastRange) -> bytes:
    """Return a REPLAY message, which reads past notices. Raises InvalidName."""
    namespace, topic = encode_namespace(asked.namespace), encode_topic(asked.topic)
    body = REPLAY_ASK.pack(
        asked.stream_id, asked.incarnation, asked.first, asked.last, len(namespace), len(topic)
    )
    return encode_frame(Message.REPLAY, 0, sequence) + body + namespace + topic


def decode_replay_ask(body: bytes) -> PastRange:
    """Decode a REPLAY message without its frame. Raises ProtocolError."""
    _need("REPLAY", body, 0, REPLAY_ASK.size)
    *numbers, namespace_len, topic_len = REPLAY_ASK.unpack_from(body)
    ends = _ends(REPLAY_ASK.size, (namespace_len, topic_len))
    if ends[-1] != len(body):
        raise ProtocolError("names of a REPLAY", REPLAY_ASK.size, ends[-1], len(body))
    namespace, topic = (part.decode(errors="replace") for part in _cut(body, ends))
    return PastRange(namespace, topic, *numbers)


class NamespaceSettings(NamedTuple):
    """Settings of a namespace that an admin sets; 0 means no quota."""

    owner_uid: int = layout.ANYBODY
    durability: int = 0
    """Durability: 0 = memory, 1 = durable."""
    quota_timers: int = 0
    quota_bytes: int = 0
    quota_ops: int = 0
    """Limit in operations per second."""
    park_beyond_ns: int = 0
    """Timers with a longer delay are parked; 0 = no timer is parked."""
    late_per_s: int = 0
    """Late timers that fire per second while the daemon catches up; 0 = the default rate."""
    paused: int = 0
    """1 = timers fall due without firing."""


_SET_FIELDS = {
    "owner_uid": NamespaceField.OWNER,
    "durability": NamespaceField.DURABILITY,
    "quota_timers": NamespaceField.TIMERS,
    "quota_bytes": NamespaceField.BYTES,
    "quota_ops": NamespaceField.OPS,
    "park_beyond_ns": NamespaceField.PARK,
    "late_per_s": NamespaceField.LATE,
    "paused": NamespaceField.PAUSED,
}


def encode_namespace_set(sequence: int, namespace: bytes, changes: Mapping[str, int]) -> bytes:
    """Return a NAMESPACE message that changes only the settings in `changes`. `changes` maps field
    names of NamespaceSettings to new values."""
    fields = NamespaceField(0)
    for name in changes:
        fields |= _SET_FIELDS[name]
    owner, durability, *quotas = NamespaceSettings(**changes)
    body = NAMESPACE_SET.pack(fields, owner, durability, len(namespace), *quotas)
    return encode_frame(Message.NAMESPACE, 0, sequence) + body + namespace


def encode_place(sequence: int, namespace: bytes, partitions: int = 1) -> bytes:
    """Return a PLACE message, which makes a deployment assign the namespace to shards, unless the
    namespace exists."""
    return encode_frame(Message.PLACE, 0, sequence, count=partitions) + namespace


def decode_namespace_set(body: bytes) -> NamespaceSettings:
    """Decode the reply to a NAMESPACE message. Raises ProtocolError."""
    _need("namespace settings", body, 0, NAMESPACE_SET.size)
    _, owner, durability, _, *quotas = NAMESPACE_SET.unpack_from(body)
    return NamespaceSettings(owner, durability, *quotas)


class TopicChanges(NamedTuple):
    """New settings of a topic; None = unchanged."""

    slack_ns: int | None = None
    """Slack of new timers."""
    late: tuple[int, int] | None = None
    """Late policy (enum pg_late_policy) and its grace in ns."""
    paused: bool | None = None
    priority: int | None = None
    """Priority of the jobs of timers that give none."""


def encode_topic_set(sequence: int, namespace: bytes, topic: bytes, changes: TopicChanges) -> bytes:
    """Return a TOPIC message, which changes the settings in `changes`."""
    given = zip(TopicField, changes, strict=True)
    fields = TopicField(sum(field for field, value in given if value is not None))
    policy, grace_ns = changes.late or (0, 0)
    body = TOPIC_SET.pack(
        changes.slack_ns or 0, grace_ns, fields, policy, bool(changes.paused),
        len(namespace), len(topic), changes.priority or 0,
    )  # fmt: skip
    return encode_frame(Message.TOPIC, 0, sequence) + body + namespace + topic


def encode_publish(
    sequence: int, namespace: bytes, topic: bytes, key: Key, payload: bytes
) -> bytes:
    """Return a PUBLISH message, with which the daemon sends one notice to a topic at once. Raises
    InvalidKey."""
    kind, data = encode_key(key)
    head = PUBLISH.pack(len(payload), len(data), kind, len(namespace), len(topic))
    return encode_frame(Message.PUBLISH, 0, sequence) + head + namespace + topic + data + payload


# ---- replies -------------------------------------------------------------------------------


class Reply(NamedTuple):
    """Fields of a reply's frame; `body` is the bytes after the 64 bytes of the frame."""

    message: int
    session: int
    sequence: int
    records: int
    error: int
    detail: tuple[int, int]
    body: bytes

    def failure(self) -> MessageRefused | NotDurable:
        """Return the reply's error as an exception: NotDurable if the daemon has applied the
        message."""
        applied = self.error == WireError.NOT_DURABLE
        return NotDurable(*self.detail) if applied else self.refusal()

    def refusal(self) -> MessageRefused:
        """Return the reply's error as an exception. The error must not be NOT_DURABLE."""
        try:
            name = WireError(self.error).name
        except ValueError:
            name = "an error this client does not know"
        if share := decode_share(*self.detail) if self.error == WireError.QUOTA else None:
            return UidShareExceeded(self.error, name, self.detail, *share)
        if self.error == WireError.SCHEDULE:
            reason = layout.Status(self.detail[0]).name if self.detail[0] in _STATUSES else "?"
            return ScheduleRefused(self.error, name, self.detail, reason)
        if self.error == WireError.CURSOR:
            held = self.detail[0] == layout.CursorRefusal.HELD
            return (CursorHeld if held else CursorRefused)(self.error, name, self.detail)
        kind = _REFUSALS.get(self.error, MessageRefused)
        return kind(error=self.error, name=name, detail=self.detail)


_STATUSES = frozenset(layout.Status)
_SHARED = {
    layout.Quota.UID_TOPICS: "topics",
    layout.Quota.UID_NAMESPACES: "namespaces",
    layout.Quota.UID_SESSIONS: "sessions",
    layout.Quota.UID_WATCH_KEYS: "watch keys",
    layout.Quota.UID_WATCHES: "watch records",
    layout.Quota.UID_OPERATIONS: "operations",
    layout.Quota.UID_BULK_LOADS: "bulk loads",
    layout.Quota.UID_SCHEDULES: "schedules",
    layout.Quota.UID_BULK_LOAD_BLOCKS: "blocks of 4096 rows of bulk loads",
    layout.Quota.UID_CURSORS: "rows of cursors",
}


class Share(NamedTuple):
    """Figures of a refusal because a uid holds its whole share of a table."""

    resource: str
    limit: int
    uid: int
    used: int


def decode_share(quota: int, figure: int) -> Share | None:
    """Decode the figures of PG_ST_QUOTA or PG_ERR_QUOTA; None if the quota is not a share of a
    table."""
    resource = _SHARED.get(layout.Quota(quota & 0xFF))
    if resource is None:
        return None
    return Share(resource, quota >> 8, figure >> 32 & 0xFFFFFFFF, figure & 0xFFFFFFFF)


_REFUSALS: dict[int, type[MessageRefused]] = {
    WireError.NO_WAL: NoWal,
    WireError.SESSIONS_FULL: SessionTableFull,
}


class Welcome(NamedTuple):
    """struct pg_welcome."""

    session: int
    stream_id: int
    uuid: bytes
    layout_id: int
    epoch: int
    now_ns: int
    wall_offset_ns: int
    last: int
    tick_ns: int
    clock_kind: int
    window: int
    batch_records: int
    message_bytes: int
    real_boot_ns: int
    """CLOCK_BOOTTIME of the daemon."""
    node: int
    """1 + NUMA node of the daemon's threads; 0 = any."""
    reaper_cpu: int
    """1 + CPU of the daemon's loop; 0 = any."""
    first_id: int
    """The first id that this session had."""
    wal: int
    """1 if the daemon has a WAL."""
    term: int
    """Term of the leader that answers; 0 = the daemon has no replicas."""


class WatchInfo(NamedTuple):
    """A watch key of an armed operation."""

    key: Key
    watermark: int
    error: int
    """Error code of the failed key; 0 = the key has not failed."""
    target: int | None
    """Target of the watermark; None if the target is reached, and always None for SumOf and
    When."""
    base: int | None
    """For SumOf: the watermark from which the gain of the key is measured."""
    cap: int | None
    """For SumOf: the maximum that the key can contribute to the sum; None = no limit."""
    own: bool
    """True if the key is forgotten when the operation ends."""


class OperationInfo(NamedTuple):
    """Condition and owner of an armed operation."""

    condition: Condition
    owner: int
    """Session of the client that armed the operation, as `purgatoryd session ls` lists it."""
    owner_uid: int | None
    """Uid of the client that armed the operation; None = unknown."""
    threshold: int
    """`at_least` of SumOf or `need` of Quorum; else 0."""
    keys: tuple[WatchInfo, ...]


class Info(NamedTuple):
    """Result of a QUERY for one key. `wall_ns` is the absolute wall deadline; None if there is
    none."""

    ticket: int
    status: int
    deadline_ns: int
    wall_ns: int | None
    namespace: str
    topic: str
    key: Key
    payload: bytes
    operation: OperationInfo | None = None
    """Details of an operation; None for a timer."""
    within_ns: int = 0
    """Slack of a timer in effect, ns."""
    tag: str | None = None
    """Tag of a timer; None = it has none."""
    late: tuple[int, int] | None = None
    """Own late policy of a timer, and its grace in ns; None = it has none."""
    priority: int | None = None
    """Own priority of a timer's jobs; None = it has none."""
    order: int | None = None
    """Hash of a timer's order key; None = it has none."""
    unique_until_ns: int | None = None
    """Time until which a timer's key is unique, on the daemon's clock; None = it is not unique."""


class BulkLoadInfo(NamedTuple):
    """struct pg_bulk_load_info and its parts. `parts` has one bit per row, lowest row first, for
    each block of BULK_LOAD_BLOCK_ROWS rows, by block number."""

    bulk_load: bytes
    fencing_token: int
    rows: int
    upto: int
    next: int
    uid: int
    state: int
    parts: dict[int, bytes]


def _need(subject: str, data: bytes, offset: int, length: int) -> None:
    if len(data) < offset + length:
        raise ProtocolError(
            subject=subject, offset=offset, expected=length, found=len(data) - offset
        )


def decode_reply(data: bytes) -> Reply:
    """Split a reply into frame and body, and check magic and version. Raises ProtocolError."""
    _need("reply", data, 0, FRAME.size)
    head = FRAME.unpack_from(data)
    if head[0] != layout.WIRE_MAGIC:
        raise ProtocolError("reply magic", 0, layout.WIRE_MAGIC, head[0])
    if head[1] != layout.WIRE_VERSION:
        raise ProtocolError("reply version", 4, layout.WIRE_VERSION, head[1])
    return Reply(head[2], head[3], head[4], head[5], head[7], head[11:13], data[FRAME.size :])


def decode_welcome(body: bytes) -> Welcome:
    """Decode the body of a reply to HELLO. Raises ProtocolError."""
    _need("welcome", body, 0, WELCOME.size)
    return Welcome(*WELCOME.unpack_from(body))


def check_results(body: bytes, count: int) -> None:
    """Raise ProtocolError unless `body` has at least `count` results. The keys of ended operations
    may follow the results."""
    if len(body) < count * RESULT.size:
        raise ProtocolError("results", FRAME.size, count * RESULT.size, len(body))


def decode_results(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield (ticket << 8 | status, deadline_ns) for each record. check_results() must have accepted
    `body`."""
    return RESULT.iter_unpack(body)


def decode_infos(body: bytes, count: int) -> list[Info]:
    """Decode the body of a reply to QUERY. Raises ProtocolError."""
    infos, at = [], 0
    for _ in range(count):
        _need("info", body, at, INFO.size)
        head = INFO.unpack_from(body, at)
        ends = _ends(at + INFO.size, (head[6], head[7], head[4], head[3], head[10]))
        _need("info's bytes", body, at, ends[-1] - at)
        namespace, topic, key, payload, ext = _cut(body, ends)
        operation = _decode_operation(head, ext)
        infos.append(
            Info(
                head[0] >> 8, head[0] & 0xFF, head[1], None if head[2] == -(2**63) else head[2],
                namespace.decode(errors="surrogateescape"), topic.decode(errors="replace"),
                decode_key(head[5], key), payload, operation, 1 << head[13] & ~1,
                decode_tag(ext) if operation is None else None,
                decode_late(ext) if operation is None else None,
                decode_priority(ext) if operation is None else None,
                decode_order(ext) if operation is None else None,
                decode_unique(ext) if operation is None else None,
            )
        )  # fmt: skip
        at = ends[-1]
    return infos


def decode_listed(body: bytes, count: int) -> Listed:
    """Decode the body of a reply to LIST. Raises ProtocolError."""
    _need("list", body, 0, LISTED.size)
    tickets, matched, now_ns, wall_offset_ns, slot = LISTED.unpack_from(body)
    timers = decode_infos(body[LISTED.size :], count)
    following = None if slot == layout.ANYBODY else slot
    return Listed(tickets, matched, now_ns, wall_offset_ns, following, timers)


def decode_sweeps(body: bytes, count: int) -> list[SweepInfo]:
    """Decode the body of a reply to SWEEP. Raises ProtocolError."""
    sweeps, at = [], 0
    for _ in range(count):
        _need("sweep", body, at, SWEEP_INFO.size + SELECT.size)
        select, end = _decode_select(body, at + SWEEP_INFO.size)
        sweeps.append(SweepInfo(*(*SWEEP_INFO.unpack_from(body, at), select)))
        at = end
    return sweeps


def _decode_select(body: bytes, at: int) -> tuple[Select, int]:
    """Return the selection at offset `at`, and the offset behind it."""
    from_ns, upto_ns, tickets, fields, key_type, *lengths = SELECT.unpack_from(body, at)
    ends = _ends(at + SELECT.size, tuple(lengths))
    _need("names of a selection", body, at, ends[-1] - at)
    namespace, prefix, topic, tag = _cut(body, ends)
    select = Select(
        namespace, decode_key(key_type, prefix) if fields & SelectField.PREFIX else None,
        topic if fields & SelectField.TOPIC else None, tag if fields & SelectField.TAG else None,
        from_ns, upto_ns, tickets,
    )  # fmt: skip
    return select, ends[-1]


def info_bytes(body: bytes, at: int) -> int:
    """Return the length in bytes of the struct pg_info at offset `at`, including the names, key,
    payload and extension that follow it."""
    head = INFO.unpack_from(body, at)
    return INFO.size + int(head[3] + head[4] + head[6] + head[7] + head[10])


def _decode_operation(head: tuple[Any, ...], watches: bytes) -> OperationInfo | None:
    owner, threshold, _, keys, condition, _, uid = head[8:]
    if keys == 0:
        return None
    if condition >= len(Condition):
        raise ProtocolError("condition", INFO.size, len(Condition) - 1, condition)
    found, at = [], 0
    for _ in range(keys):
        _need("watch key", watches, at, INFO_WATCH.size)
        row = INFO_WATCH.unpack_from(watches, at)
        key_at, at = at + INFO_WATCH.size, at + INFO_WATCH.size + row[4]
        _need("watch key's bytes", watches, key_at, row[4])
        found.append(_decode_watch(Condition(condition), row, watches[key_at:at]))
    owner_uid = None if uid == layout.ANYBODY else uid
    return OperationInfo(Condition(condition), owner, owner_uid, threshold, tuple(found))


def _decode_watch(condition: Condition, row: tuple[Any, ...], key: bytes) -> WatchInfo:
    target, cap, watermark, error, _, key_type, own = row
    is_sum, has_target = condition is Condition.SUM, condition not in _WITHOUT_TARGETS
    return WatchInfo(
        decode_key(key_type, key), watermark, error,
        target if has_target and target != _NOTHING else None,
        target if is_sum else None,
        cap if is_sum and cap != _NOTHING else None,
        bool(own),
    )  # fmt: skip


def decode_bulk_load(body: bytes) -> BulkLoadInfo:
    """Decode the body of a reply to BULK_LOAD. Raises ProtocolError."""
    _need("bulk load", body, 0, BULK_LOAD_INFO.size)
    parts = body[BULK_LOAD_INFO.size :]
    _need(
        "parts of a bulk load",
        parts,
        0,
        -(-len(parts) // BULK_LOAD_PART.size) * BULK_LOAD_PART.size,
    )
    bulk_load, fencing_token, rows, upto, following, uid, state = BULK_LOAD_INFO.unpack_from(body)
    blocks = dict(BULK_LOAD_PART.iter_unpack(parts))
    return BulkLoadInfo(bulk_load, fencing_token, rows, upto, following, uid, state, blocks)


class ScheduleInfo(NamedTuple):
    """struct pg_schedule_info and the texts that follow it. `most` is its field `count`."""

    revision: int
    most: int
    every_ns: int
    until_ns: int
    jitter_ns: int
    armed: int
    last_ns: int
    next_ns: int
    deadline_ns: int
    put_ns: int
    ticket: int
    row: int
    uid: int
    state: int
    overlap: int
    open_jobs: int
    priority: int | None
    topic: str
    key: str
    spec: str
    zone: str
    tag: str
    payload: bytes


class ScheduleAnswer(NamedTuple):
    """The reply to a SCHEDULE message."""

    status: int
    ticket: int
    next: int
    infos: list[ScheduleInfo]
    times: list[int]


def decode_schedule(body: bytes, count: int, action: int) -> ScheduleAnswer:
    """Decode the body of a reply to SCHEDULE. Raises ProtocolError."""
    _need("schedule", body, 0, SCHEDULE_REPLY.size)
    status, ticket, following = SCHEDULE_REPLY.unpack_from(body)
    at = SCHEDULE_REPLY.size
    if action in (layout.ScheduleAction.NEXT, layout.ScheduleAction.BACKFILL):
        _need("nominal times", body, at, 8 * count)
        times = list(struct.unpack_from(f"<{count}q", body, at))
        return ScheduleAnswer(status, ticket, following, [], times)
    infos = []
    for _ in range(count):
        info, at = _schedule_info(body, at)
        infos.append(info)
    return ScheduleAnswer(status, ticket, following, infos, [])


def _schedule_info(body: bytes, at: int) -> tuple[ScheduleInfo, int]:
    """Decode the struct pg_schedule_info at an offset. Return it and the offset after it."""
    _need("schedule", body, at, SCHEDULE_INFO.size)
    (
        *figures,
        payload_len,
        state,
        topic,
        key,
        spec,
        zone,
        overlap,
        tag,
        chosen,
        open_jobs,
        urgency,
    ) = SCHEDULE_INFO.unpack_from(body, at)
    ends = _ends(at + SCHEDULE_INFO.size, (topic, key, spec, zone, tag, payload_len))
    _need("schedule's bytes", body, at, ends[-1] - at)
    *texts, payload = _cut(body, ends)
    names = (text.decode(errors="replace") for text in texts)
    priority = urgency if chosen else None
    return ScheduleInfo._make(
        (*figures, state, overlap, open_jobs, priority, *names, payload)
    ), ends[-1]


def decode_cursor(body: bytes, count: int) -> dict[str, tuple[int, int]]:
    """Decode the body of a reply to CURSOR: the positions of the cursor. Raises ProtocolError."""
    found = decode_newest_sequences(body, count)
    return {topic: position for (_, topic), position in found.items()}


class PastPage(NamedTuple):
    """The reply to a REPLAY message."""

    lost_until: int
    """The notices from the first one to this sequence are lost; first - 1 = none is lost."""
    next: int
    """The first sequence for the next message."""
    body: bytes
    """Second frame of a notice message."""


def decode_replay(body: bytes) -> PastPage:
    """Decode the body of a reply to REPLAY. Raises ProtocolError."""
    _need("page of past notices", body, 0, REPLAY_INFO.size)
    lost_until, following = REPLAY_INFO.unpack_from(body)
    return PastPage(lost_until, following, body[REPLAY_INFO.size :])


class SessionInfo(NamedTuple):
    """struct pg_session_info: a client's session, as the daemon sees it."""

    session: int
    opened_boot_ns: int
    used_boot_ns: int
    grace_ns: int
    """Time in ns that the session outlives its client."""
    uid: int
    pid: int
    """Pid of the client; 0 if it is on another host or in another pid namespace."""
    operations: int
    """Number of operations that the session owns, armed or with an unacknowledged outcome."""
    unacknowledged: int
    """Number of outcomes and CHECK requests in the session's inbox."""


def decode_sessions(body: bytes, count: int) -> list[SessionInfo]:
    """Decode the body of a reply to SESSIONS. Raises ProtocolError."""
    _need("sessions", body, 0, count * SESSION_INFO.size)
    rows = SESSION_INFO.iter_unpack(body[: count * SESSION_INFO.size])
    return [SessionInfo(*row) for row in rows]


def decode_newest_sequences(body: bytes, count: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Decode the body of a reply to ADVANCE. Return (incarnation, newest sequence) by (namespace,
    topic)."""
    newest, at = {}, 0
    for _ in range(count):
        _need("tail", body, at, TAIL.size)
        sequence, incarnation, namespace_len, topic_len = TAIL.unpack_from(body, at)
        ends = _ends(at + TAIL.size, (namespace_len, topic_len))
        _need("tail's names", body, at, ends[-1] - at)
        namespace, topic = (part.decode(errors="surrogateescape") for part in _cut(body, ends))
        newest[namespace, topic] = (incarnation, sequence)
        at = ends[-1]
    return newest


def _ends(start: int, lengths: Sequence[int]) -> list[int]:
    ends = [start]
    for length in lengths:
        ends.append(ends[-1] + length)
    return ends


def _cut(data: bytes, ends: Sequence[int]) -> list[bytes]:
    return [data[a:b] for a, b in itertools.pairwise(ends)]


# ---- the purgatory -------------------------------------------------------------------------


class RawOutcome(NamedTuple):
    """Outcome that the daemon sends to an owner. Cause 0 means that it is a CHECK of a CLIENT
    condition."""

    ticket: int
    cause: int
    deadline_ns: int
    armed_ns: int
    ended_ns: int
    version: int
    error: int
    slot: int
    key: Key
    payload: bytes
    watermarks: tuple[int, ...]
    """Watermarks of the operation's keys at its end; empty for a CHECK."""
    missing: tuple[int, ...]
    """Indices of the operation's keys that were still missing when it ended."""
    failed: tuple[int, ...]
    """Indices of the operation's keys that had failed."""


def encode_watch_key(key: Key, target: int, cap: int = 0, own: bool = False) -> bytes:
    """Encode one watch key of an operation; an `own` key is forgotten when the operation ends.
    Raises InvalidKey."""
    kind, data = encode_key(key)
    return WATCH_KEY.pack(target, cap, len(data), kind, layout.OWN_KEY * own) + data


def encode_acks(session: int, acks: bytes) -> bytes:
    """Return an ACK message. `acks` has a struct pg_ack for each outcome or CHECK; the version of
    an outcome is 0."""
    return encode_frame(Message.ACK, session, count=len(acks) // ACK.size) + acks


def decode_bitmap(bits: bytes) -> tuple[int, ...]:
    """Return the numbers of the bits that are set, the lowest bit first."""
    return tuple(i for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1)


def decode_outcomes(body: bytes, count: int) -> list[RawOutcome]:
    """Decode the body of an OUTCOMES message. Raises ProtocolError."""
    _need("outcomes", body, 0, count * OUTCOME.size)
    outcomes, at = [], count * OUTCOME.size
    for head in OUTCOME.iter_unpack(body[:at]):
        (word, deadline_ns, armed_ns, ended_ns, version, error, payload_len, keys,
         bitmap_len, key_len, key_type, slot) = head  # fmt: skip
        keys = keys if bitmap_len else 0
        ends = _ends(at, (key_len, payload_len, 8 * keys, bitmap_len, bitmap_len))
        _need("outcome's bytes", body, at, ends[-1] - at)
        key, payload, watermarks, missing, failed = _cut(body, ends)
        outcomes.append(
            RawOutcome(
                word >> 8, word & 0xFF, deadline_ns, armed_ns, ended_ns, version, error, slot,
                decode_key(key_type, key), payload, struct.unpack(f"<{keys}Q", watermarks),
                decode_bitmap(missing), decode_bitmap(failed),
            )
        )  # fmt: skip
        at = ends[-1]
    return outcomes


def decode_ended(extra: bytes) -> dict[int, list[Key]]:
    """Decode the bytes after the results of a batch. Return the keys of the operations that each
    record ended, by the number of the record."""
    ended: dict[int, list[Key]] = {}
    at = 0
    while at < len(extra):
        _need("ended keys", extra, at, 8)
        record, size = struct.unpack_from("<II", extra, at)
        at += 8
        _need("ended keys", extra, at, size)
        ended[record] = list(_ended_keys(extra[at : at + size]))
        at += size
    return ended


def _ended_keys(data: bytes) -> Iterator[Key]:
    at = 0
    while at < len(data):
        _need("an ended key", data, at, 2)
        kind, size = data[at], data[at + 1]
        _need("an ended key", data, at + 2, size)
        yield decode_key(kind, data[at + 2 : at + 2 + size])
        at += 2 + size


# ---- notices -------------------------------------------------------------------------------


class NoticeHead(NamedTuple):
    """struct pg_notices without magic and version."""

    stream_id: int
    incarnation: int
    first: int
    tail: int
    built_ns: int
    wall_offset_ns: int
    records: int


class RawNotice(NamedTuple):
    """A notice of a notice message, with its key decoded."""

    ticket: int
    deadline_ns: int
    fired_ns: int
    cause: int
    flags: int
    key: Key
    payload: bytes
    missed: int
    """Timers of the topic that were coalesced before this one."""


class Verdict(NamedTuple):
    """Result of an operation, from the payload of its notice."""

    elapsed_ns: int
    """Time in ns from the arming to the end of the operation, on the daemon's clock."""
    error: int
    """Error code that was passed to fail(); 0 if no key failed."""
    missing: tuple[int, ...]
    """Indices of the operation's keys that were still missing when it ended."""


def decode_verdict(payload: bytes) -> tuple[Verdict, bytes]:
    """Split the payload of an operation's notice into verdict and the operation's own payload.

    Raises ProtocolError.
    """
    _need("verdict", payload, 0, VERDICT.size)
    elapsed_ns, error, _, bitmap_bytes = VERDICT.unpack_from(payload)
    end = VERDICT.size + bitmap_bytes
    _need("verdict's bitmap", payload, VERDICT.size, bitmap_bytes)
    return Verdict(elapsed_ns, error, decode_bitmap(payload[VERDICT.size : end])), payload[end:]


def topic_frame(namespace: bytes, topic: bytes) -> bytes:
    """Return the first frame of a notice message, which is also the subscription prefix."""
    return b"%s\0%s\0" % (namespace, topic)


def decode_topic_frame(frame: bytes) -> tuple[str, str]:
    """Return (namespace, topic) from the first frame of a notice message. Raises ProtocolError."""
    parts = frame.split(b"\0")
    if len(parts) != 3 or parts[2]:
        raise ProtocolError("NUL bytes of a topic frame", 0, 2, len(parts) - 1)
    return parts[0].decode(errors="surrogateescape"), parts[1].decode(errors="replace")


def decode_notice_head(data: bytes) -> NoticeHead:
    """Decode the head of a notice message's second frame. A message without records is a tail
    heartbeat. Raises ProtocolError."""
    _need("notices", data, 0, NOTICES.size)
    head = NOTICES.unpack_from(data)
    if head[0] != layout.NOTICE_MAGIC:
        raise ProtocolError("notice magic", 0, layout.NOTICE_MAGIC, head[0])
    if head[1] != layout.WIRE_VERSION:
        raise ProtocolError("notice version", 4, layout.WIRE_VERSION, head[1])
    return NoticeHead(*head[2:])


def check_notices(data: bytes, count: int) -> None:
    """Check that a notice message has exactly the bytes of its `count` notices. Raises
    ProtocolError."""
    _need("notice records", data, NOTICES.size, count * NOTICE.size)
    at = NOTICES.size + count * NOTICE.size
    for record in NOTICE.iter_unpack(data[NOTICES.size : at]):
        at += record[3] + record[4]
    if at != len(data):
        raise ProtocolError("end of the notices", len(data), at, len(data))


def decode_notices(data: bytes, count: int) -> list[RawNotice]:
    """Decode the `count` notices of a notice message's second frame, in order. Raises
    ProtocolError."""
    check_notices(data, count)
    return decode_some_notices(data, 0, count, NOTICES.size + count * NOTICE.size)[0]


def decode_some_notices(data: bytes, start: int, stop: int, at: int) -> tuple[list[RawNotice], int]:
    """Decode the notices `start` to `stop` - 1 of a message after check_notices(). `at`: offset of
    the key of the first. Return them and the offset after them."""
    notices = []
    records = data[NOTICES.size + start * NOTICE.size : NOTICES.size + stop * NOTICE.size]
    for record in NOTICE.iter_unpack(records):
        (ticket, deadline_ns, fired_ns, payload_len, key_len, key_type, cause, flags,
         missed) = record  # fmt: skip
        middle, end = at + key_len, at + key_len + payload_len
        key = data[at:middle]
        notices.append(
            RawNotice(
                ticket, deadline_ns, fired_ns, cause, flags,
                key.decode() if key_type == _STR and key.isascii() else decode_key(key_type, key),
                data[middle:end], missed,
            )
        )  # fmt: skip
        at = end
    return notices, at
