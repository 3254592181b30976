"""A core with consumer groups: sessions, their messages, and the jobs that they receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from core_driver import Answer, Core

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import MESSAGE_MAX, Message, Op, Status

SETTINGS: dict[str, int] = {
    "max_jobs": 100, "max_lease_ns": 10**12, "backoff_base_ns": 10**9, "backoff_cap_ns": 10**10,
    "max_attempts": 20, "max_dead": 10,
}  # fmt: skip
LEASE_NS = 30 * 10**9


class Leased(NamedTuple):
    """A job in a JOBS message."""

    ticket: int
    row: int
    lease: int
    attempt: int
    group: int
    topic: bytes
    key: bytes
    payload: bytes
    ends_ns: int
    priority: int

    @property
    def token(self) -> bytes:
        """The struct pg_lease."""
        return bytes(ffi.buffer(ffi.new("struct pg_lease *", [self.ticket, self.row, self.lease])))


class Dead(NamedTuple):
    """A dead letter in the reply to a DEAD."""

    ticket: int
    attempts: int
    reason: int
    key: bytes
    payload: bytes
    error: bytes


class Session:
    """A client of the core that numbers its batches."""

    def __init__(self, core: JobsCore, uid: int = 1000) -> None:
        self.core, self.uid, self.sequence = core, uid, 0
        nonce = bytes([core.nonces % 256]) * 15 + bytes([core.nonces // 256])
        core.nonces += 1
        reply = core.handle(wire.encode_hello(nonce), uid=uid)
        assert isinstance(reply, wire.Reply)
        self.id = reply.session

    def message(self, records: Iterable[tuple[bytes, bytes]], namespace: bytes = b"n") -> bytes:
        """Return the next batch of the session."""
        self.sequence += 1
        heads, areas = zip(*records, strict=True)
        table = wire.encode_names([(namespace, b"t")])
        frame = ffi.new("struct pg_frame *", {
            "magic": lib.PG_WIRE_MAGIC if hasattr(lib, "PG_WIRE_MAGIC") else 0x51434750,
            "version": 1, "message": Message.BATCH, "session": self.id, "sequence": self.sequence,
            "count": len(heads), "names": 1, "names_bytes": len(table),
        })  # fmt: skip
        return bytes(ffi.buffer(frame)) + table + b"".join(heads) + b"".join(areas)

    def batch(self, *records: tuple[bytes, bytes], namespace: bytes = b"n") -> list[Answer]:
        """Send a batch. Return its answers."""
        reply = self.core.handle(self.message(records, namespace), uid=self.uid)
        assert isinstance(reply, wire.Reply)
        assert reply.error == 0, reply
        return answers(self.core.newest_reply)

    def one(self, record: tuple[bytes, bytes]) -> Answer:
        return self.batch(record)[0]

    def join(self, group: bytes = b"g", credits_: int = 10, lease_ns: int = LEASE_NS) -> Answer:
        return self.one(record(Op.JOIN, group, value=credits_, time_ns=lease_ns))

    def ack(self, held: Leased) -> Status:
        return self.one(of_job(Op.JOB_ACK, held)).status

    def nack(self, held: Leased, delay_ns: int = -1, error: bytes = b"") -> Status:
        return self.one(of_job(Op.JOB_NACK, held, error, delay_ns)).status

    def extend(self, held: Leased, lease_ns: int) -> Status:
        return self.one(of_job(Op.JOB_EXTEND, held, time_ns=lease_ns)).status

    def release(self, held: Leased) -> Status:
        return self.one(of_job(Op.JOB_RELEASE, held)).status

    def reject(self, held: Leased, error: bytes = b"") -> Status:
        return self.one(of_job(Op.JOB_REJECT, held, error)).status

    def bye(self) -> None:
        frame = ffi.new("struct pg_frame *", {
            "magic": 0x51434750, "version": 1, "message": Message.BYE, "session": self.id,
        })  # fmt: skip
        self.core.handle(bytes(ffi.buffer(frame)), uid=self.uid)


def answers(reply: bytes) -> list[Answer]:
    """Return the answers in the reply to a batch."""
    head = ffi.from_buffer("struct pg_frame *", reply)
    results = ffi.cast("struct pg_result *", ffi.addressof(head[0]) + 1)
    return [
        Answer(results[i].ticket >> 8, Status(results[i].ticket & 0xFF), results[i].deadline_ns)
        for i in range(head.count)
    ]


def record(op: int, key: bytes, area: bytes = b"", **fields: Any) -> tuple[bytes, bytes]:
    """Return (record, its part of the byte area)."""
    struct = ffi.new("struct pg_record *", {"op": op, "key_len": len(key), **fields})
    return bytes(ffi.buffer(struct)), key + area


def of_job(op: int, held: Leased, text: bytes = b"", time_ns: int = 0) -> tuple[bytes, bytes]:
    return record(op, held.token, text, key_type=1, payload_len=len(text), time_ns=time_ns)


class JobsCore(Core):
    """A private arena with consumer groups."""

    def __init__(self, **config: Any) -> None:
        sizes = {"sessions": 16, "groups": 4, "jobs": 400, "capacity": 200, "replay_capacity": 64}
        super().__init__(**{**sizes, **config})
        self.nonces = 1
        self._jobs_out = bytearray(MESSAGE_MAX)
        self._asker: Session | None = None

    def ask_group(
        self, action: int, group: bytes, topics: Iterable[bytes] = (), *, namespace: bytes = b"n",
        earliest: bool = False, uid: int = 1000, meanwhile: Callable[[], object] = lambda: None,
        **settings: Any,
    ) -> wire.Reply:  # fmt: skip
        """Send a GROUP message until it is answered, and call `meanwhile` in between. Return its
        reply."""
        topics = list(topics)
        ask = ffi.new("struct pg_group_ask *", {
            "settings": settings, "action": action, "topics": len(topics), "earliest": earliest,
            "namespace_len": len(namespace), "name_len": len(group),
        })  # fmt: skip
        names = namespace + group + b"".join(bytes([len(t)]) + t for t in topics)
        reply = self._ask(Message.GROUP, bytes(ffi.buffer(ask)) + names, uid)
        while reply is None:
            meanwhile()
            reply = self._ask(Message.GROUP, bytes(ffi.buffer(ask)) + names, uid)
        return reply

    def _ask(self, message: int, body: bytes, uid: int) -> wire.Reply | None:
        if self._asker is None or lib.pg_session_grace_ns(self.a, self._asker.id) < 0:
            self._asker = Session(self, uid)
        frame = ffi.new("struct pg_frame *", {
            "magic": 0x51434750, "version": 1, "message": message, "session": self._asker.id,
        })  # fmt: skip
        used, wait = ffi.new("uint64_t *"), ffi.new("int64_t *")
        whole = bytes(ffi.buffer(frame)) + body
        lib.pg_handle(
            self.a, ffi.from_buffer(whole), len(whole), uid, 1, 0, 0, ffi.from_buffer(self._reply),
            used, wait,
        )  # fmt: skip
        if used[0] == 0:
            return None
        self.newest_reply = bytes(self._reply[: used[0]])
        return wire.decode_reply(self.newest_reply)

    def create_group(
        self, group: bytes = b"g", topics: Iterable[bytes] = (b"t",), *, earliest: bool = False,
        meanwhile: Callable[[], object] = lambda: None, **settings: Any,
    ) -> None:  # fmt: skip
        reply = self.ask_group(
            lib.PG_GA_CREATE, group, topics, earliest=earliest, meanwhile=meanwhile,
            **{**SETTINGS, **settings},
        )  # fmt: skip
        assert reply.error == 0, reply

    def info(self, group: bytes = b"g") -> Any:
        """Return the struct pg_group_info of a group."""
        reply = self.ask_group(lib.PG_GA_DESCRIBE, group)
        assert reply.error == 0
        frame = ffi.sizeof("struct pg_frame")
        info = ffi.new("struct pg_group_info *")
        ffi.buffer(info)[:] = self.newest_reply[frame : frame + ffi.sizeof("struct pg_group_info")]
        return info

    def ask_dead(
        self, action: int, group: bytes = b"g", *, ticket: int = 0, after: int = 0, most: int = 100
    ) -> tuple[int, int]:
        """Send a DEAD message. Return the two numbers of its reply."""
        ask = ffi.new("struct pg_dead_ask *", {
            "ticket": ticket, "after": after, "action": action, "most": most, "namespace_len": 1,
            "name_len": len(group),
        })  # fmt: skip
        reply = self._ask(Message.DEAD, bytes(ffi.buffer(ask)) + b"n" + group, 1000)
        assert reply is not None
        assert reply.error == 0
        head = ffi.from_buffer("struct pg_frame *", self.newest_reply)
        return int(head.detail[0]), int(head.detail[1])

    def dead(self, group: bytes = b"g") -> list[Dead]:
        """Return the dead letters of a group, the oldest first."""
        self.ask_dead(lib.PG_DA_LIST, group)
        head = ffi.from_buffer("struct pg_frame *", self.newest_reply)
        infos = ffi.cast("struct pg_dead_info *", ffi.addressof(head[0]) + 1)
        at = ffi.sizeof("struct pg_frame") + head.count * ffi.sizeof("struct pg_dead_info")
        found = []
        for i in range(head.count):
            d = infos[i]
            rest = self.newest_reply[at:]
            key = rest[d.topic_len :][: d.key_len]
            payload = rest[d.topic_len + d.key_len :][: d.payload_len]
            error = rest[d.topic_len + d.key_len + d.payload_len :][: d.error_len]
            at += d.topic_len + d.key_len + d.payload_len + d.error_len
            found.append(Dead(d.ticket >> 8, d.attempts, d.reason, key, payload, error))
        return found

    def messages(self) -> list[tuple[int, list[Leased]]]:
        """Take all JOBS messages. Return the session and the jobs of each."""
        found = []
        session = ffi.new("uint64_t *")
        while used := lib.pg_jobs(self.a, session, ffi.from_buffer(self._jobs_out), MESSAGE_MAX):
            found.append((int(session[0]), _leased(bytes(self._jobs_out[:used]))))
        return found

    def received(self) -> dict[int, list[Leased]]:
        """Take all JOBS messages. Return the jobs of each session."""
        found: dict[int, list[Leased]] = {}
        for session, jobs in self.messages():
            found.setdefault(session, []).extend(jobs)
        return found

    def jobs_of(self, session: Session) -> list[Leased]:
        return self.received().get(session.id, [])


def _leased(message: bytes) -> list[Leased]:
    head = ffi.from_buffer("struct pg_frame *", message)
    infos = ffi.cast("struct pg_job_info *", ffi.addressof(head[0]) + 1)
    at = ffi.sizeof("struct pg_frame") + head.count * ffi.sizeof("struct pg_job_info")
    found = []
    for i in range(head.count):
        j = infos[i]
        topic, rest = message[at : at + j.topic_len], message[at + j.topic_len :]
        found.append(Leased(
            j.ticket >> 8, j.row, j.lease, j.attempt, j.group, topic, rest[: j.key_len],
            rest[j.key_len : j.key_len + j.payload_len], j.lease_ends_ns, j.priority,
        ))  # fmt: skip
        at += j.topic_len + j.key_len + j.payload_len
    return found
