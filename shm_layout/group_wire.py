"""Encode requests about consumer groups, and decode jobs and replies.

The functions are pure, like those of wire.py. Received bytes are checked before use: a message that
violates the protocol raises ProtocolError and no other error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout.errors import ProtocolError
from purgatoryd.shm_layout.layout import (
    NOTICE_OF_OPERATION,
    Cause,
    DeadAction,
    GroupAction,
    GroupFlag,
    JobReason,
    Message,
    struct_format,
)
from purgatoryd.shm_layout.wire import Key, Verdict, decode_key

LEASE = struct.Struct(struct_format("pg_lease"))
JOB_INFO = struct.Struct(struct_format("pg_job_info"))
GROUP_ASK = struct.Struct(struct_format("pg_group_ask"))
GROUP_INFO = struct.Struct(struct_format("pg_group_info"))
DEAD_ASK = struct.Struct(struct_format("pg_dead_ask"))
DEAD_INFO = struct.Struct(struct_format("pg_dead_info"))
NEVER_NS = 2**63 - 1
"""Time of firing of the oldest job of a consumer group that has none."""
_CAUSES = {int(cause): cause for cause in Cause}
_SETTINGS = 10
"""Number of fields of struct pg_group_settings."""


class GroupSettings(NamedTuple):
    """Settings of a consumer group, in the units of the wire."""

    max_backlog: int
    """Budget: pending timers of the topics, plus jobs and dead letters."""
    max_bytes: int
    """Budget in bytes of keys and payloads; 0 = no limit."""
    retention_ns: int
    """Time after which a waiting job becomes a dead letter; 0 = never."""
    max_lease_ns: int
    backoff_ns: int
    backoff_cap_ns: int
    rate: int
    """Leases per second; 0 = no limit."""
    max_attempts: int
    max_dead: int
    ordered: bool = False
    on_dead: str = "skip"
    """Ordered: "skip" a dead letter, or "block" the key until it is requeued or dropped."""
    full: str = "refuse"
    """Effect of a used budget: "refuse" new timers, or "drop_oldest" waiting job."""

    def pack(self) -> tuple[int, ...]:
        """Return the fields of struct pg_group_settings."""
        flags = GroupFlag(0)
        flags |= GroupFlag.ORDERED if self.ordered else 0
        flags |= GroupFlag.BLOCK if self.on_dead == "block" else 0
        flags |= GroupFlag.DROP_OLDEST if self.full == "drop_oldest" else 0
        return (*self[:9], int(flags))


NO_SETTINGS = (0,) * _SETTINGS


def unpack_settings(fields: Sequence[int]) -> GroupSettings:
    """Return the settings in the fields of struct pg_group_settings."""
    jobs, size, retention, lease, backoff, cap, rate, attempts, dead, flags = fields
    return GroupSettings(
        jobs, size, retention, lease, backoff, cap, rate, attempts, dead,
        bool(flags & GroupFlag.ORDERED), "block" if flags & GroupFlag.BLOCK else "skip",
        "drop_oldest" if flags & GroupFlag.DROP_OLDEST else "refuse",
    )  # fmt: skip


class GroupInfo(NamedTuple):
    """A consumer group as the daemon describes it. In a namespace with several partitions the
    counts are sums over all shards, and the budgets apply in each shard."""

    name: str
    namespace: str
    topics: tuple[str, ...]
    settings: GroupSettings
    paused: bool
    pending: int
    """Pending timers and operations of the topics."""
    waiting: int
    """Jobs that wait for a member."""
    leased: int
    """Jobs that members hold."""
    delayed: int
    """Jobs that wait for their next attempt."""
    dead: int
    """Dead letters."""
    bytes: int
    """Bytes of keys and payloads of its jobs."""
    acked: int
    retried: int
    dropped: int
    oldest_boot_ns: int | None
    """Time of firing of its oldest job that is not dead; None if it has none."""
    created_boot_ns: int
    row: int
    members: int


class RawJob(NamedTuple):
    """A leased job as the daemon sends it. All times are on the daemon's clock, in ns."""

    ticket: int
    cause: int
    deadline_ns: int
    fired_ns: int
    lease_ends_ns: int
    now_ns: int
    wall_offset_ns: int
    row: int
    lease: int
    """Number of this lease of the job, the fencing token."""
    attempt: int
    """1 + number of failed attempts."""
    group: int
    flags: int
    priority: int
    topic: str
    key: Key
    payload: bytes
    missed: int = 0
    """Number of timers of the topic that this one stands for, by a late policy."""
    verdict: Verdict | None = None
    """Result of the operation that ended; None for a timer."""

    @property
    def lease_id(self) -> bytes:
        """The struct pg_lease of this lease."""
        return LEASE.pack(self.ticket, self.row, self.lease)


class DeadLetter(NamedTuple):
    """A job that failed for good, as the daemon stores it for its consumer group."""

    key: Key
    payload: bytes
    topic: str
    ticket: int
    attempts: int
    reason: JobReason
    error: str
    """Error text of the newest failed attempt."""
    deadline_boot_ns: int
    fired_boot_ns: int
    first_failed_boot_ns: int | None
    """Time of the first failed attempt; None if no attempt failed."""
    last_failed_boot_ns: int | None
    wall_offset_ns: int
    """Wall time minus the time on the daemon's clock."""
    priority: int
    cause: Cause
    """EXPIRED for a timer; the end of an operation; PUBLISHED for a published notice."""
    verdict: Verdict | None
    """Result of the operation that ended; None for a timer."""


# ---- names -----------------------------------------------------------------------------------


def encode_group(name: str) -> bytes:
    """Encode the name of a consumer group: 1-63 bytes of UTF-8 without NUL. Raises InvalidName."""
    return wire.encode_name("consumer group", name, 1, layout.GROUP_NAME_MAX)


# ---- requests --------------------------------------------------------------------------------


def encode_group_ask(
    sequence: int, session: int, action: GroupAction, namespace: bytes, name: bytes,
    settings: GroupSettings | None = None, topics: Iterable[bytes] = (), *, earliest: bool = False,
) -> bytes:  # fmt: skip
    """Return a GROUP message. CREATE needs settings and topics, CHANGE needs settings."""
    names = list(topics)
    fields = NO_SETTINGS if settings is None else settings.pack()
    ask = GROUP_ASK.pack(*fields, action, len(names), earliest, len(namespace), len(name))
    listed = b"".join(bytes((len(topic),)) + topic for topic in names)
    return wire.encode_frame(Message.GROUP, session, sequence) + ask + namespace + name + listed


def encode_dead_ask(
    sequence: int, session: int, action: DeadAction, namespace: bytes, name: bytes, *,
    ticket: int = 0, after: int = 0, most: int = 0,
) -> bytes:  # fmt: skip
    """Return a DEAD message. `after` and `most` select the page of a LIST; `ticket` 0 = all dead
    letters of the consumer group."""
    ask = DEAD_ASK.pack(ticket, after, action, most, len(namespace), len(name))
    return wire.encode_frame(Message.DEAD, session, sequence) + ask + namespace + name


# ---- replies ---------------------------------------------------------------------------------


class _Reader:
    """Cuts a body into its parts. Raises ProtocolError if a part is missing."""

    def __init__(self, subject: str, body: bytes) -> None:
        self._subject = subject
        self._body = body
        self.at = 0

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes."""
        end = self.at + length
        if end > len(self._body):
            raise ProtocolError(self._subject, self.at, length, len(self._body) - self.at)
        part, self.at = self._body[self.at : end], end
        return part

    def text(self, length: int) -> str:
        """Return the next `length` bytes as text."""
        return self.take(length).decode(errors="surrogateescape")


def decode_groups(body: bytes, count: int) -> list[GroupInfo]:
    """Decode the body of a reply to GROUP. Raises ProtocolError."""
    reader = _Reader("consumer group", body)
    return [_decode_group(reader) for _ in range(count)]


def _decode_group(reader: _Reader) -> GroupInfo:
    head = GROUP_INFO.unpack(reader.take(GROUP_INFO.size))
    settings, rest = head[:_SETTINGS], head[_SETTINGS:]
    pending, waiting, leased, delayed, dead, size, acked, retried, dropped, oldest, created = rest[
        :11
    ]
    row, members, topics, namespace_len, name_len = rest[11:]
    namespace, name = reader.text(namespace_len), reader.text(name_len)
    return GroupInfo(
        name, namespace, tuple(reader.text(reader.take(1)[0]) for _ in range(topics)),
        unpack_settings(settings), bool(settings[9] & GroupFlag.PAUSED), pending, waiting, leased,
        delayed, dead, size, acked, retried, dropped, None if oldest == NEVER_NS else oldest,
        created, row, members,
    )  # fmt: skip


def last_lease_ns(body: bytes, count: int) -> int:
    """Return the time from the sending of a valid JOBS message to the end of its last lease."""
    fields = JOB_INFO.unpack_from(body, (count - 1) * JOB_INFO.size)
    return int(fields[3] - fields[4])


def decode_jobs(body: bytes, count: int) -> Iterator[RawJob]:
    """Decode the body of a JOBS message. Raises ProtocolError."""
    size = count * JOB_INFO.size
    if len(body) < size:
        raise ProtocolError("jobs", 0, size, len(body))
    at, end = size, len(body)
    for head in JOB_INFO.iter_unpack(body[:size]):
        word, deadline_ns, fired_ns, ends_ns, now_ns, offset_ns, row, lease, attempt = head[:9]
        group, payload_len, key_len, key_type, flags, topic_len, priority, missed = head[9:]
        key_at = at + topic_len
        payload_at = key_at + key_len
        if payload_at + payload_len > end:
            raise ProtocolError("bytes of a job", at, topic_len + key_len + payload_len, end - at)
        topic = body[at:key_at].decode(errors="surrogateescape")
        key = decode_key(key_type, body[key_at:payload_at])
        at = payload_at + payload_len
        verdict, payload = split_verdict(flags, body[payload_at:at])
        yield RawJob(
            word >> 8, word & 0xFF, deadline_ns, fired_ns, ends_ns, now_ns, offset_ns, row,
            lease, attempt, group, flags, priority, topic, key, payload, missed, verdict,
        )  # fmt: skip


def cause_of(number: int) -> Cause:
    """Return the cause of a job; EXPIRED for a number that this version does not have."""
    return _CAUSES.get(number, Cause.EXPIRED)


def split_verdict(flags: int, payload: bytes) -> tuple[Verdict | None, bytes]:
    """Return the verdict, or None without an operation, and the payload that the user gave. Raises
    ProtocolError."""
    if flags & NOTICE_OF_OPERATION:
        return wire.decode_verdict(payload)
    return None, payload


def decode_dead(body: bytes, count: int) -> list[DeadLetter]:
    """Decode the body of a reply to DEAD. Raises ProtocolError."""
    reader = _Reader("dead letters", body)
    heads = list(DEAD_INFO.iter_unpack(reader.take(count * DEAD_INFO.size)))
    return [_decode_letter(reader, head) for head in heads]


def _decode_letter(reader: _Reader, head: tuple[int, ...]) -> DeadLetter:
    word, deadline_ns, fired_ns, first_ns, last_ns, offset_ns, attempts, reason = head[:8]
    payload_len, error_len, key_len, key_type, flags, topic_len, priority = head[8:]
    topic, key = reader.text(topic_len), decode_key(key_type, reader.take(key_len))
    verdict, payload = split_verdict(flags, reader.take(payload_len))
    error = reader.take(error_len).decode(errors="replace")
    try:
        why = JobReason(reason)
    except ValueError:
        raise ProtocolError("reason of a dead letter", reader.at, len(JobReason), reason) from None
    return DeadLetter(
        key, payload, topic, word >> 8, attempts, why, error, deadline_ns, fired_ns,
        first_ns or None, last_ns or None, offset_ns, priority, cause_of(word & 0xFF), verdict,
    )  # fmt: skip
