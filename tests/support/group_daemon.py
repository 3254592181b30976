"""A daemon in Python that only has consumer groups, for tests of the consumers.

It answers over a ZeroMQ ROUTER socket. A test decides what happens and when: it fires jobs, lets
leases expire, forgets sessions and members, and delays answers.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import zmq

from purgatoryd.shm_layout import group_wire, layout, wire
from purgatoryd.shm_layout.group_wire import GroupSettings
from purgatoryd.shm_layout.layout import (
    DeadAction,
    GroupAction,
    GroupRefusal,
    JobReason,
    KeyType,
    Message,
    Op,
    Status,
    WireError,
)
from purgatoryd.shm_layout.paths import client_paths

LEASE = struct.Struct("<QII")


@dataclass
class ModelJob:
    """A job of the model."""

    row: int
    ticket: int
    key: bytes
    payload: bytes
    topic: bytes
    deadline_ns: int
    leases: int = 0
    failed: int = 0
    session: int = 0
    leased_ns: int = 0
    ends_ns: int = 0
    state: str = "waiting"
    error: bytes = b""
    priority: int = 0


@dataclass
class ModelGroup:
    """A consumer group of the model."""

    name: str
    topics: list[bytes]
    settings: GroupSettings
    paused: bool = False
    jobs: dict[int, ModelJob] = field(default_factory=dict)


@dataclass
class ModelSession:
    """A session of the model, and its memberships by name of consumer group."""

    id: int
    route: bytes
    last: int = 0
    replies: dict[int, bytes] = field(default_factory=dict)
    members: dict[str, tuple[int, int]] = field(default_factory=dict)


class GroupDaemon:
    """The model. Every method but those of the thread may be called by a test."""

    def __init__(self, name: str) -> None:
        self.groups: dict[str, ModelGroup] = {}
        self.sessions: dict[int, ModelSession] = {}
        self.joins: list[tuple[int, int]] = []
        """(session, credits) of each JOIN that was applied."""
        self.answers: list[tuple[str, int, int, int]] = []
        """(op, ticket, number of the lease, status) of each answer to a job."""
        self.extensions: list[int] = []
        """Ticket of each extension that was applied."""
        self.errors: list[bytes] = []
        self.delays: list[int] = []
        self.refuse_with: dict[Op, Status] = {}
        """Status with which the records of an op are refused."""
        self.wal_stopped = False
        """True = batches are applied, but are answered with NOT_DURABLE."""
        self.mute = False
        """True = the daemon receives, but neither applies nor answers."""
        self.doubled = False
        """True = every JOBS message is sent twice."""
        self._left_ns = 0
        """Time until the end of the lease that the record extends."""
        self._nonces: dict[bytes, int] = {}
        self._next_session = self._next_ticket = 0
        self._rotation = 0
        self._endpoint = client_paths_for(name)
        self._requests: SimpleQueue[tuple[Callable[[], object], threading.Event]] = SimpleQueue()
        self._ended = threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._bound = threading.Event()
        self._restarts = False
        self._unsent: deque[list[bytes]] = deque()
        self._thread.start()
        assert self._bound.wait(10)

    # ---- for tests -------------------------------------------------------------------------------

    def do(self, step: Callable[[], object]) -> None:
        """Run a step in the thread of the daemon."""
        done = threading.Event()
        self._requests.put((step, done))
        assert done.wait(10)

    def fire(self, *keys: str, group: str = "mailers", payload: bytes = b"") -> None:
        """Let timers fire, and lease their jobs."""
        for key in keys:
            self.do(partial(self._fire, group, key.encode(), payload))

    def expire(self, group: str = "mailers") -> None:
        """Let all leases end."""
        for job in self._leased(group):
            self.do(partial(self._fail, self.groups[group], job))

    def restart(self, *, sessions: bool = True) -> None:
        """Close all connections and forget all members, as a restart of the daemon does. Without
        `sessions`, forget the sessions; their leases end."""
        self.do(self._forget_members if sessions else self._forget_sessions)

    def _forget_members(self) -> None:
        for session in self.sessions.values():
            session.members.clear()
        self._restarts = True

    def states(self, group: str = "mailers") -> list[str]:
        """Return the state of each job."""
        found: list[str] = []
        self.do(lambda: found.extend(job.state for job in self.groups[group].jobs.values()))
        return found

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(10)

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        with zmq.Context() as context:
            while not self._ended.is_set():
                with context.socket(zmq.ROUTER) as router:
                    self._serve(router)

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        """Serve one socket, until restart() or stop()."""
        router.setsockopt(zmq.LINGER, 0)
        router.bind(self._endpoint)
        self._bound.set()
        self._restarts = False
        while not (self._ended.is_set() or self._restarts):
            if router.poll(5):
                route, data = router.recv_multipart()
                if not self.mute:
                    self._take(route, data)
            self._run_requests()
            while self._unsent:
                router.send_multipart(self._unsent.popleft())

    def _run_requests(self) -> None:
        try:
            while True:
                step, done = self._requests.get_nowait()
                step()
                done.set()
        except Empty:
            pass

    def _send(self, route: bytes, data: bytes) -> None:
        self._unsent.append([route, data])

    def _take(self, route: bytes, data: bytes) -> None:
        head = wire.FRAME.unpack_from(data)
        message, session, sequence = head[2:5]
        body = data[wire.FRAME.size :]
        if message == Message.HELLO:
            self._hello(route, sequence, body)
            return
        known = self.sessions.get(session)
        if known is None:
            error = WireError.SESSION_EXPIRED
            self._send(route, wire.encode_frame(message, session, sequence, error=error))
            return
        known.route = route
        if message == Message.BATCH:
            self._batch(known, head, body)
        elif message == Message.GROUP:
            self._group(known, sequence, body)
        elif message == Message.DEAD:
            self._dead(known, sequence, body)
        elif message == Message.BYE:
            self._bye(known)
            self._send(route, wire.encode_frame(message, session, sequence))
        else:
            self._send(route, wire.encode_frame(message, session, sequence))
        self._lease_all()

    def _hello(self, route: bytes, sequence: int, body: bytes) -> None:
        nonce = body[:16]
        if nonce not in self._nonces or self._nonces[nonce] not in self.sessions:
            self._next_session += 1
            self._nonces[nonce] = self._next_session
            self.sessions[self._next_session] = ModelSession(self._next_session, route)
        session = self.sessions[self._nonces[nonce]]
        session.route = route
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        welcome = wire.WELCOME.pack(
            session.id, 1, b"u" * 16, 1, 1, now_ns, time.time_ns() - now_ns, session.last, 1, 0,
            16, 1024, 1 << 20, now_ns, 0, 0, session.id, 0, 0,
        )  # fmt: skip
        self._send(route, wire.encode_frame(Message.HELLO, session.id, sequence) + welcome)

    def _forget_sessions(self) -> None:
        for group in self.groups.values():
            for job in self._leased(group.name):
                self._fail(group, job)
        self.sessions.clear()
        self._restarts = True

    def _bye(self, session: ModelSession) -> None:
        for group in self.groups.values():
            for job in self._leased(group.name):
                if job.session == session.id:
                    self._release(job)
        del self.sessions[session.id]

    # ---- records ---------------------------------------------------------------------------------

    def _batch(self, session: ModelSession, head: tuple[int, ...], body: bytes) -> None:
        sequence, count, names_bytes = head[4], head[5], head[8]
        if sequence in session.replies:
            self._send(session.route, session.replies[sequence])
            return
        assert sequence == session.last + 1, (sequence, session.last)
        results, at = b"", names_bytes + count * wire.RECORD.size
        for number in range(count):
            record = wire.RECORD.unpack_from(body, names_bytes + number * wire.RECORD.size)
            op, _, key_type, key_len, *_, payload_len, ext_len, time_ns, value = record
            key, payload = body[at : at + key_len], body[at + key_len : at + key_len + payload_len]
            at += key_len + payload_len + ext_len
            self._left_ns = 0
            word = self._record(session, Op(op), key_type, key, payload, time_ns, value)
            results += wire.RESULT.pack(word, self._left_ns)
        session.last = sequence
        reply = wire.encode_frame(Message.BATCH, session.id, sequence, count=count) + results
        if self.wal_stopped:
            fields = [*wire.FRAME.unpack_from(reply)[:5], 0, 0, WireError.NOT_DURABLE, *[0] * 5]
            reply = wire.FRAME.pack(*fields)
        session.replies[sequence] = reply
        self._send(session.route, reply)

    def _record(
        self, session: ModelSession, op: Op, key_type: int, key: bytes, payload: bytes,
        time_ns: int, value: int,
    ) -> int:  # fmt: skip
        if op in self.refuse_with:
            return int(self.refuse_with[op])
        if op == Op.JOIN:
            assert key_type == KeyType.STR
            return self._join(session, key.decode(), time_ns, value)
        assert key_type == KeyType.BYTES
        ticket, row, lease = LEASE.unpack(key)
        status = self._answer(session, op, (ticket, row, lease), payload, time_ns)
        self.answers.append((op.name, ticket, lease, int(status)))
        return int(status)

    def _join(self, session: ModelSession, name: str, lease_ns: int, credits: int) -> int:
        if name not in self.groups:
            return int(Status.NO_GROUP)
        again = name not in session.members
        session.members[name] = (credits, lease_ns)
        self.joins.append((session.id, credits))
        if again:
            for job in self._leased(name):
                if job.session == session.id:
                    self._push(session, self.groups[name], job)
        return list(self.groups).index(name) << 8 | int(Status.DONE)

    def _answer(
        self, session: ModelSession, op: Op, lease: tuple[int, int, int], text: bytes, time_ns: int
    ) -> Status:
        ticket, row, number = lease
        for group in self.groups.values():
            job = group.jobs.get(row)
            held = job is not None and job.state == "leased" and job.session == session.id
            if job is None or not held or (job.ticket, job.leases) != (ticket, number):
                continue
            self._apply(group, job, op, text, time_ns)
            return Status.DONE
        return Status.LEASE_LOST

    def _apply(self, group: ModelGroup, job: ModelJob, op: Op, text: bytes, time_ns: int) -> None:
        if op == Op.JOB_ACK:
            job.state = "acked"
        elif op == Op.JOB_RELEASE:
            self._release(job)
        elif op == Op.JOB_EXTEND:
            now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            last_ns = job.leased_ns + group.settings.max_lease_ns
            job.ends_ns = max(job.ends_ns, min(now_ns + time_ns, last_ns))
            self._left_ns = job.ends_ns - now_ns
            self.extensions.append(job.ticket)
        else:
            self.errors.append(text)
            job.error = text
            self.delays.append(time_ns)
            self._fail(group, job, rejected=op == Op.JOB_REJECT, delayed=True)

    def _release(self, job: ModelJob) -> None:
        job.state, job.session = "waiting", 0

    def _fail(
        self, group: ModelGroup, job: ModelJob, *, rejected: bool = False, delayed: bool = False
    ) -> None:
        job.failed += 1
        job.session = 0
        if rejected or job.failed >= group.settings.max_attempts:
            job.state = "dead"
        else:
            job.state = "delayed" if delayed else "waiting"

    def _fire(self, group: str, key: bytes, payload: bytes) -> None:
        self._next_ticket += 1
        number, found = self._next_ticket, self.groups[group]
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        found.jobs[number] = ModelJob(number, number, key, payload, found.topics[0], now_ns)
        self._lease_all()

    def retry(self, group: str = "mailers") -> None:
        """Let all delayed jobs wait for a member."""
        self.do(lambda: self._retry(group))

    def _retry(self, group: str) -> None:
        for job in self.groups[group].jobs.values():
            if job.state == "delayed":
                job.state = "waiting"
        self._lease_all()

    # ---- leases ----------------------------------------------------------------------------------

    def _leased(self, group: str) -> list[ModelJob]:
        return [job for job in self.groups[group].jobs.values() if job.state == "leased"]

    def _lease_all(self) -> None:
        for group in self.groups.values():
            for job in group.jobs.values():
                if job.state == "waiting" and not group.paused and not self._lease(group, job):
                    break

    def _lease(self, group: ModelGroup, job: ModelJob) -> bool:
        leased = self._leased(group.name)
        free = []
        for session in self.sessions.values():
            credits, lease_ns = session.members.get(group.name, (0, 0))
            left = credits - sum(one.session == session.id for one in leased)
            if left > 0:
                free.append((left, -session.id, session, lease_ns))
        if not free:
            return False
        _, _, session, lease_ns = max(free, key=lambda one: one[:2])
        job.state, job.session = "leased", session.id
        job.leases += 1
        job.leased_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        job.ends_ns = job.leased_ns + min(lease_ns, group.settings.max_lease_ns)
        self._push(session, group, job)
        return True

    def _push(self, session: ModelSession, group: ModelGroup, job: ModelJob) -> None:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        info = group_wire.JOB_INFO.pack(
            job.ticket << 8, job.deadline_ns, job.deadline_ns, job.ends_ns, now_ns,
            time.time_ns() - now_ns, job.row, job.leases, job.failed + 1,
            list(self.groups).index(group.name),
            len(job.payload), len(job.key), KeyType.STR, 0, len(job.topic), job.priority, 0,
        )  # fmt: skip
        head = wire.encode_frame(Message.JOBS, session.id, count=1)
        for _ in range(1 + self.doubled):
            self._send(session.route, head + info + job.topic + job.key + job.payload)

    # ---- questions -------------------------------------------------------------------------------

    def _refuse(self, session: ModelSession, message: int, sequence: int, why: int) -> None:
        frame = wire.encode_frame(
            message, session.id, sequence, error=WireError.GROUP, detail=(why, 0)
        )
        self._send(session.route, frame)

    def _group(self, session: ModelSession, sequence: int, body: bytes) -> None:
        *fields, action, topics, _, namespace_len, name_len = group_wire.GROUP_ASK.unpack_from(body)
        at = group_wire.GROUP_ASK.size
        namespace, name = body[at : at + namespace_len], body[at + namespace_len :][:name_len]
        at += namespace_len + name_len
        names = []
        for _ in range(topics):
            names.append(body[at + 1 : at + 1 + body[at]])
            at += 1 + body[at]
        found = self.groups.get(name.decode())
        settings = group_wire.unpack_settings(fields)
        if action == GroupAction.CREATE and found is None:
            self.groups[name.decode()] = ModelGroup(name.decode(), names, settings)
        elif name and found is None:
            self._refuse(session, Message.GROUP, sequence, GroupRefusal.MISSING)
            return
        elif found is not None:
            if action == GroupAction.CREATE and (found.topics, found.settings) != (names, settings):
                self._refuse(session, Message.GROUP, sequence, GroupRefusal.MISMATCH)
                return
            self._change(found, GroupAction(action), settings)
        chosen = [self.groups[name.decode()]] if name and name.decode() in self.groups else []
        chosen = chosen if name else list(self.groups.values())
        infos = b"".join(self._info(one, namespace) for one in chosen)
        head = wire.encode_frame(Message.GROUP, session.id, sequence, count=len(chosen))
        self._send(session.route, head + infos)

    def _change(self, group: ModelGroup, action: GroupAction, settings: GroupSettings) -> None:
        if action == GroupAction.CHANGE:
            group.settings = settings
        elif action == GroupAction.DELETE:
            del self.groups[group.name]
            for session in self.sessions.values():
                if session.members.pop(group.name, None) is not None:
                    frame = wire.encode_frame(Message.JOBS, session.id, count=0)
                    self._send(session.route, frame)
        elif action in (GroupAction.PAUSE, GroupAction.RESUME):
            group.paused = action == GroupAction.PAUSE

    def _info(self, group: ModelGroup, namespace: bytes) -> bytes:
        counts = [
            sum(job.state == state for job in group.jobs.values())
            for state in ("waiting", "leased", "delayed", "dead", "acked")
        ]
        fields = list(group.settings.pack())
        fields[9] |= layout.GroupFlag.PAUSED * group.paused
        name = group.name.encode()
        members = sum(group.name in one.members for one in self.sessions.values())
        info = group_wire.GROUP_INFO.pack(
            *fields, 0, *counts[:4], 0, counts[4], 0, 0, 2**63 - 1, 1, 0, members,
            len(group.topics), len(namespace), len(name),
        )  # fmt: skip
        topics = b"".join(bytes((len(topic),)) + topic for topic in group.topics)
        return info + namespace + name + topics

    def _dead(self, session: ModelSession, sequence: int, body: bytes) -> None:
        ticket, after, action, most, namespace_len, name_len = group_wire.DEAD_ASK.unpack_from(body)
        at = group_wire.DEAD_ASK.size + namespace_len
        group = self.groups.get(body[at : at + name_len].decode())
        if group is None:
            self._refuse(session, Message.DEAD, sequence, GroupRefusal.MISSING)
            return
        dead = [job for job in group.jobs.values() if job.state == "dead"]
        if action == DeadAction.LIST:
            page = dead[after : after + most]
            later = after + most if after + most < len(dead) else 0
            infos = b"".join(map(_dead_info, page))
            rest = b"".join(job.topic + job.key + job.payload + job.error for job in page)
            head = wire.encode_frame(
                Message.DEAD, session.id, sequence, count=len(page), detail=(0, later)
            )
            self._send(session.route, head + infos + rest)
            return
        chosen = [job for job in dead if ticket in (0, job.ticket)]
        for job in chosen:
            job.state = "waiting" if action == DeadAction.REQUEUE else "dropped"
        head = wire.encode_frame(Message.DEAD, session.id, sequence, detail=(len(chosen), 0))
        self._send(session.route, head)


def _dead_info(job: ModelJob) -> bytes:
    return group_wire.DEAD_INFO.pack(
        job.ticket << 8, job.deadline_ns, job.deadline_ns, 5, 6, 0, job.failed, JobReason.REJECTED,
        len(job.payload), len(job.error), len(job.key), KeyType.STR, 0, len(job.topic), 0,
    )  # fmt: skip


def client_paths_for(name: str) -> str:
    """Return the endpoint of the command socket of a daemon that does not run yet."""
    import os

    return f"ipc://{Path(os.environ['PURGATORYD_DIR']) / name}.cmd"


@contextmanager
def group_daemon(name: str) -> Iterator[GroupDaemon]:
    """Run a daemon for the duration of a test."""
    daemon = GroupDaemon(name)
    assert client_paths(name)
    try:
        yield daemon
    finally:
        daemon.stop()
