"""Administration of a daemon: virtual clock, namespaces, bulk loads, sessions, notices, stop.

The caller's thread checks the arguments of a call. A thread of the Admin does the rest, one call at
a time. No signal handler interrupts that thread (see engine.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from purgatoryd.clients import times
from purgatoryd.clients.arguments import check_limit_s, check_whole
from purgatoryd.clients.bulk_loads import BulkLoadStatus, StatusParts, check_bulk_load
from purgatoryd.clients.channel import Channel
from purgatoryd.clients.client import Handle
from purgatoryd.clients.closing import Closing
from purgatoryd.clients.engine import Call, Worker
from purgatoryd.clients.fork_guard import ForkGuard
from purgatoryd.clients.items import check_priority
from purgatoryd.clients.jobs import Job
from purgatoryd.clients.packing import Pending, is_refusal, refusal
from purgatoryd.clients.poller import ChannelPoller
from purgatoryd.clients.times import Late
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import (
    DaemonUnreachable,
    InvalidArgument,
    InvalidSetting,
    Partitioned,
    WrongShard,
)
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import (
    ANYBODY,
    FLAG_DRAIN,
    FLAG_RESUME,
    LATE_PER_S_MAX,
    QUOTA_MAX,
    QUOTA_OPS_MAX,
    TIME_MAX_NS,
    BulkLoadAction,
    Message,
)
from purgatoryd.shm_layout.paths import check_name, client_paths, shut
from purgatoryd.shm_layout.shards import ShardTable, read_table
from purgatoryd.shm_layout.wire import Key, NamespaceSettings, Reply, SessionInfo, TopicChanges

RETRY_S = 0.01
PARTITIONS_MAX = 2**32 - 1
PATIENCE_S = 0.1
CLOSE_S = 1.0
"""Time that close() waits for the thread, which checks every PATIENCE_S whether it must end."""
P = ParamSpec("P")
T = TypeVar("T")
MOST = {
    "owner_uid": ANYBODY,
    "durability": 1,
    "quota_timers": QUOTA_MAX,
    "quota_bytes": QUOTA_MAX,
    "quota_ops": QUOTA_OPS_MAX,
    "park_beyond_ns": TIME_MAX_NS,
    "late_per_s": LATE_PER_S_MAX,
    "paused": 1,
}


class Admin(Closing):
    """Administration of the daemon `name`.

    Only administrators may use it: root, the daemon's own uid, and the uids of --admin-uid. In a
    deployment of shards a call about a namespace goes to the shards that hold it.

    `timeout`: seconds that a call waits for its answer. Not thread-safe. Every method raises
    DaemonUnreachable if no answer comes, and MessageRefused if the daemon refuses.

    An interrupt of a call, such as Ctrl-C, leaves the Admin usable. If the call has begun, it goes
    on, and the exception has the attribute `handle`: a Handle with the outcome of the call. The
    next call waits until the interrupted call has ended.
    """

    def __init__(self, name: str = "default", *, timeout: float | timedelta = 5.0) -> None:
        self.name = check_name(name)
        self.timeout = check_limit_s(timeout)
        self._fork_guard = ForkGuard("admin")
        self._worker: Worker | None = None
        self._channel: Channel | None = None
        self._sequence = 0
        self._shards: dict[str, Admin] = {}

    def ping(self, *, timeout: float | timedelta | None = None) -> None:
        """Return once the daemon's loop has answered."""
        self._do(self._tell, Message.PING, self._limit_s(timeout))

    def advance(
        self, to_ns: int, *, timeout: float | timedelta | None = None
    ) -> dict[tuple[str, str], tuple[int, int]]:
        """Move the virtual clock to `to_ns`, in nanoseconds of virtual time.

        Returns once the daemon has handed its socket every notice that is due by `to_ns`. The
        result maps (namespace, topic) to (incarnation, sequence of the newest notice). The daemon's
        own namespaces are left out.
        """
        to_ns = check_whole("time", to_ns, 0, TIME_MAX_NS)
        return self._do(self._advance_all, to_ns, self._limit_s(timeout))

    def _advance_all(self, to_ns: int, limit_s: float) -> dict[tuple[str, str], tuple[int, int]]:
        newest: dict[tuple[str, str], tuple[int, int]] = {}
        for shard in self._everyone():
            newest |= shard._advance(to_ns, limit_s)
        return newest

    def _advance(self, to_ns: int, limit_s: float) -> dict[tuple[str, str], tuple[int, int]]:
        reply = self._call(Message.ADVANCE, to_ns, limit_s)
        return wire.decode_newest_sequences(reply.body, reply.records)

    def create_namespace(
        self, namespace: str, partitions: int = 1, *, timeout: float | timedelta | None = None
    ) -> None:
        """Create a namespace with this number of partitions. An existing namespace stays as it is.

        Without shards a namespace has one partition. Raises InvalidName, InvalidSetting, and
        MessageRefused with PLACED if the namespace exists with another number of partitions.
        """
        name = wire.encode_namespace(namespace)
        partitions = check_whole("partitions", partitions, 1, PARTITIONS_MAX)
        self._do(self._create, name, partitions, self._limit_s(timeout))

    def _create(self, name: bytes, partitions: int, limit_s: float) -> None:
        if partitions > 1 and self._table() is None:
            self._tell(Message.PING, limit_s)  # a daemon that runs has its table
        if self._table() is not None:
            self._sequence += 1
            self._request(wire.encode_place(self._sequence, name, partitions), limit_s)
        elif partitions == 1:
            self._set(name, {}, limit_s)
        else:
            bound = "1, because the daemon has no shards"
            raise InvalidSetting("partitions", partitions, bound, "argument")

    def set_namespace(
        self,
        namespace: str,
        *,
        owner_uid: int | None = None,
        durability: int | None = None,
        quota_timers: int | None = None,
        quota_bytes: int | None = None,
        quota_ops: int | None = None,
        park_beyond_ns: int | None = None,
        late_per_s: int | None = None,
        paused: bool | None = None,
        timeout: float | timedelta | None = None,
    ) -> NamespaceSettings:
        """Change the given settings of a namespace, and return all its settings.

        `owner_uid`: the only uid that may use the namespace; ANYBODY = every uid. `durability`: 0 =
        memory, 1 = durable, which needs a WAL. The quotas limit armed timers, their bytes, and
        operations per second; 0 = no limit. `park_beyond_ns`: the daemon parks an added timer whose
        deadline is more than this time away, which needs a WAL; 0 = it parks no timer.
        `late_per_s`: late timers that fire per second after an outage or a pause; 0 = 100,000.
        `paused`: while True, timers of all its topics fall due without firing, as in set_topic.

        A namespace that does not exist is created. If it has several partitions, the settings apply
        in each shard, each shard counts its own use of the quotas, and parking is refused. Raises
        InvalidName, InvalidSetting, Partitioned and NoWal.
        """
        given = {
            "owner_uid": owner_uid, "durability": durability, "quota_timers": quota_timers,
            "quota_bytes": quota_bytes, "quota_ops": quota_ops, "park_beyond_ns": park_beyond_ns,
            "late_per_s": late_per_s, "paused": int(paused) if type(paused) is bool else paused,
        }  # fmt: skip
        changes = {field: value for field, value in given.items() if value is not None}
        for field, value in changes.items():
            if type(value) is not int or not 0 <= value <= MOST[field]:
                raise InvalidSetting(field, value, f"from 0 to {MOST[field]}", "argument")
        wire.encode_namespace(namespace)
        return self._do(self._set_all, namespace, changes, self._limit_s(timeout))

    def _set_all(
        self, namespace: str, changes: dict[str, int], limit_s: float
    ) -> NamespaceSettings:
        if changes.get("park_beyond_ns"):
            self._refuse_partitions(namespace)
        name, holders = wire.encode_namespace(namespace), self._holders(namespace, limit_s)
        settings = [holder._set(name, changes, limit_s) for holder in holders]
        return settings[0]

    def _refuse_partitions(self, namespace: str) -> None:
        table = self._table()
        partitions = 1 if table is None else table.place(namespace).partitions
        if partitions > 1:
            detail = (
                "it cannot park timers: parked timers need bulk loads, which need one partition"
            )
            raise Partitioned(namespace, partitions, detail)

    def _set(self, name: bytes, changes: dict[str, int], limit_s: float) -> NamespaceSettings:
        self._sequence += 1
        request = wire.encode_namespace_set(self._sequence, name, changes)
        return wire.decode_namespace_set(self._request(request, limit_s).body)

    def set_topic(
        self, topic: str, *, within: float | timedelta | None = None,
        late: Late | None = None, priority: int | None = None,
        paused: bool | None = None, namespace: str = "default",
        timeout: float | timedelta | None = None,
    ) -> None:  # fmt: skip
        """Change the given settings of a topic.

        `within`: slack of new timers whose add() gives none, in seconds or a timedelta; 0 = no
        slack. Armed timers keep theirs.

        `late`: end of a timer that would fire more than a grace after its deadline, for example
        after an outage or a pause. The grace is in seconds or a timedelta, at least 1 ms. "fire":
        it fires late. ("skip", grace): it ends without a notice. ("coalesce", grace): of successive
        such timers of the topic only the last fires, and `missed` of its notice counts the others.
        The policy applies to armed timers as well, but not to those that have their own.

        `priority`: 0 to 9, of the jobs of timers that fire from here on and give none.

        `paused`: while True, timers fall due without firing. They stay armed and count in quotas.
        Afterwards they fire as the late policy says, at the rate of the namespace (late_per_s).

        A topic that does not exist is created, and a topic with a setting keeps its row when it is
        empty. If the namespace has several partitions, the settings apply in each shard, and each
        shard coalesces its own timers. Raises InvalidName, InvalidArgument, Refused (Full, Busy,
        WalStopped).
        """
        names = wire.encode_namespace(namespace), wire.encode_topic(topic)
        if paused is not None and not isinstance(paused, bool):
            raise InvalidArgument(f"paused {paused!r} must be True or False")
        changes = wire.TopicChanges(
            None if within is None else times.within_ns(within), times.late_policy(late),
            paused, check_priority(priority),
        )  # fmt: skip
        self._do(self._set_topics, namespace, names, changes, self._limit_s(timeout))

    def _set_topics(
        self, namespace: str, names: tuple[bytes, bytes], changes: TopicChanges, limit_s: float
    ) -> None:
        for holder in self._holders(namespace, limit_s):
            holder._set(names[0], {}, limit_s)
            holder._set_topic(names, changes, limit_s)

    def _set_topic(self, names: tuple[bytes, bytes], changes: TopicChanges, limit_s: float) -> None:
        self._sequence += 1
        reply = self._request(wire.encode_topic_set(self._sequence, *names, changes), limit_s)
        wire.check_results(reply.body, 1)
        ((word, figure),) = wire.decode_results(reply.body[: wire.RESULT.size])
        if is_refusal(word & 0xFF):
            raise refusal(names[1].decode(), word, figure)

    def bulk_load_status(
        self, bulk_load: bytes, *, timeout: float | timedelta | None = None
    ) -> BulkLoadStatus:
        """Return which rows of a bulk load of any uid are done. Raises InvalidArgument."""
        check_bulk_load(bulk_load, 0, 0)
        return self._do(self._find_bulk_load, bulk_load, self._limit_s(timeout))

    def _find_bulk_load(self, bulk_load: bytes, limit_s: float) -> BulkLoadStatus:
        found = [one._status(bulk_load, limit_s) for one in self._everyone()]
        return max(found, key=lambda status: status.state)

    def _status(self, bulk_load: bytes, limit_s: float) -> BulkLoadStatus:
        parts = StatusParts()
        while parts.start is not None:
            parts.take(self._bulk_load(bulk_load, BulkLoadAction.STATUS, limit_s, parts.start))
        return parts.status

    def forget_bulk_load(
        self, bulk_load: bytes, *, timeout: float | timedelta | None = None
    ) -> None:
        """Free the daemon's record of a bulk load of any uid; its timers stay.

        A row that is sent again afterwards is added again. Raises InvalidArgument.
        """
        check_bulk_load(bulk_load, 0, 0)
        self._do(self._forget_bulk_load, bulk_load, self._limit_s(timeout))

    def _forget_bulk_load(self, bulk_load: bytes, limit_s: float) -> None:
        for one in self._everyone():
            one._bulk_load(bulk_load, BulkLoadAction.FORGET, limit_s)

    def _bulk_load(
        self, bulk_load: bytes, action: BulkLoadAction, limit_s: float, start: int = 0
    ) -> wire.BulkLoadInfo:
        self._sequence += 1
        request = wire.encode_bulk_load(self._sequence, 0, bulk_load, action, start=start)
        return wire.decode_bulk_load(self._request(request, limit_s).body)

    def publish(
        self,
        topic: str,
        key: Key,
        payload: bytes = b"",
        *,
        namespace: str = "default",
        timeout: float | timedelta | None = None,
    ) -> int:
        """Publish one notice with the cause PUBLISHED to a topic, and return its ticket.

        The notice enters the replay buffer, so subscribers that reconnect receive it. Only this
        call may use names that begin with "_". The request is sent only once: after
        DaemonUnreachable with `in_doubt` 1 the notice was published once or not at all. Raises
        InvalidName, InvalidKey, InvalidPayload, and Refused (Full, Busy, WalStopped, WrongShard).
        """
        names = wire.encode_namespace(namespace), wire.encode_topic(topic)
        wire.encode_key(key)
        data = wire.encode_payload(payload)
        return self._do(self._publish_to, namespace, names, key, data, self._limit_s(timeout))

    def _publish_to(
        self, namespace: str, names: tuple[bytes, bytes], key: Key, data: bytes, limit_s: float
    ) -> int:
        deadline_s = HOST.monotonic_s() + limit_s
        while True:
            holder = self._holders(namespace, limit_s, key)[0]
            try:
                return holder._publish(names, key, data, limit_s)
            except WrongShard:
                # The shard does not know the namespace yet, although the routing table lists it. So
                # nothing was published.
                if holder is self or HOST.monotonic_s() >= deadline_s:
                    raise
            time.sleep(RETRY_S)

    def _publish(self, names: tuple[bytes, bytes], key: Key, data: bytes, limit_s: float) -> int:
        self._sequence += 1
        request = wire.encode_publish(self._sequence, *names, key, data)
        reply = self._request(request, limit_s, again=False)
        wire.check_results(reply.body, 1)
        ((word, deadline_ns),) = wire.decode_results(reply.body[: wire.RESULT.size])
        if is_refusal(word & 0xFF):
            raise refusal(key, word, deadline_ns)
        return word >> 8

    def sessions(self, *, timeout: float | timedelta | None = None) -> list[SessionInfo]:
        """Return the open sessions. Administrators get all sessions, other users the sessions of
        their own uid."""
        return self._do(self._all_sessions, self._limit_s(timeout))

    def _all_sessions(self, limit_s: float) -> list[SessionInfo]:
        return [session for one in self._everyone() for session in one._sessions(limit_s)]

    def _sessions(self, limit_s: float) -> list[SessionInfo]:
        reply = self._call(Message.SESSIONS, None, limit_s)
        return wire.decode_sessions(reply.body, reply.records)

    def drop_session(self, session: int, *, timeout: float | timedelta | None = None) -> None:
        """End a session and free its unacknowledged outcomes; its armed operations stay.

        Administrators may end any session, other users only sessions of their own uid. Raises
        MessageRefused (SESSION_EXPIRED if there is no such session, DENIED, BUSY), InvalidArgument.
        """
        session = check_whole("session", session, 1, 2**64 - 1)
        self._do(self._drop, session, self._limit_s(timeout))

    def _drop(self, session: int, limit_s: float) -> None:
        holder = self._holder_of(session, limit_s)
        holder._sequence += 1
        holder._request(wire.encode_frame(Message.DROP, session, holder._sequence), limit_s)

    def _holder_of(self, session: int, limit_s: float) -> Admin:
        everyone = self._everyone()
        for one in everyone[1:]:
            if any(info.session == session for info in one._sessions(limit_s)):
                return one
        return everyone[0]

    def stop(self, *, drain: bool = False, timeout: float | timedelta | None = None) -> None:
        """Ask the daemon to end cleanly, and return once it has agreed.

        `drain`: the daemon refuses adds with Stopping, and ends once nothing is armed.
        """
        flags = FLAG_DRAIN if drain else 0
        self._do(self._tell, Message.STOP, self._limit_s(timeout), flags)

    def resume(self, timeout: float | timedelta | None = None) -> None:
        """Cancel a drain: the daemon arms timers again. Without a drain nothing changes."""
        self._do(self._tell, Message.STOP, self._limit_s(timeout), FLAG_RESUME)

    def close(self) -> None:
        """Close the connection. An interrupted call that has not ended yet raises Closed."""
        self._fork_guard.closed = True
        if self._worker is not None and self._fork_guard.mine:
            self._worker.end(self._disconnect, CLOSE_S)

    def _disconnect(self) -> None:
        for one in (self, *self._shards.values()):
            if one._channel is not None:
                one._channel.close()

    # ---- the thread ------------------------------------------------------------------------------

    def _do(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Let the thread run `work`, and return the result. An exception that interrupts this call
        has a handle of the work as its attribute `handle`."""
        self._fork_guard.check()
        if self._worker is None:
            self._worker = Worker("purgatoryd-admin")
        call = Call(_job(work, *args, **named))
        handle: Handle[T] = Handle(self, call)
        return self._worker.report(call, handle)

    def _limit_s(self, timeout: float | timedelta | None) -> float:
        return check_limit_s(self.timeout if timeout is None else timeout)

    def _await(self, pending: Pending | Call[Any], limit_s: float) -> None:
        """Wait for a call that was interrupted."""
        assert self._worker is not None
        assert isinstance(pending, Call)
        self._worker.wait(pending, limit_s)

    # ---- shards ----------------------------------------------------------------------------------

    def _table(self) -> ShardTable | None:
        """Return the routing table; None if there are no shards or no daemon is found."""
        try:
            return read_table(client_paths(self.name).directory, self.name)
        except DaemonUnreachable:
            return None

    def _everyone(self) -> list[Admin]:
        """Return an Admin for each shard; without shards, this one."""
        table = self._table()
        return [self] if table is None else [self._shard(daemon) for daemon in table.daemons]

    def _shard(self, daemon: str) -> Admin:
        if daemon not in self._shards:
            self._shards[daemon] = Admin(daemon, timeout=self.timeout)
            self._shards[daemon]._fork_guard = self._fork_guard
        return self._shards[daemon]

    def _holders(self, namespace: str, limit_s: float, key: Key | None = None) -> list[Admin]:
        """Return an Admin for each shard that holds the namespace, or only for the shard that holds
        `key`. If the namespace does not exist, create it."""
        table = self._table()
        if table is None:
            return [self]
        if not table.knows(namespace):
            self._create(wire.encode_namespace(namespace), 1, limit_s)
            table = self._table() or table
        shards = table.place(namespace).shards
        if key is not None:
            shards = (table.shard_of_key(namespace, wire.encode_key(key)[1]),)
        return [self._shard(table.daemon(shard)) for shard in sorted({*shards})]

    # ---- the exchange ----------------------------------------------------------------------------

    def _tell(self, message: Message, limit_s: float, flags: int = 0) -> None:
        self._call(message, None, limit_s, flags)

    def _call(self, message: Message, at_ns: int | None, limit_s: float, flags: int = 0) -> Reply:
        self._sequence += 1  # so that a late answer to an earlier call is recognised
        frame = wire.encode_frame(message, 0, self._sequence, flags=flags, at_ns=at_ns)
        return self._request(frame, limit_s)

    def _request(self, frame: bytes, limit_s: float, *, again: bool = True) -> Reply:
        deadline_s = HOST.monotonic_s() + limit_s
        reply = self._exchange(self._open(deadline_s, limit_s), frame, deadline_s, again)
        if reply is None:
            raise DaemonUnreachable(self.name, self._endpoint, limit_s, 1, shut(self.name))
        if reply.error:
            raise reply.failure()
        return reply

    def _open(self, deadline_s: float, limit_s: float) -> Channel:
        while self._channel is None:
            self._fork_guard.check()
            try:
                self._endpoint = client_paths(self.name).admin_endpoint
                self._channel = Channel(self._endpoint)
            except DaemonUnreachable as error:
                if HOST.monotonic_s() > deadline_s:
                    raise DaemonUnreachable(
                        self.name, error.endpoint, limit_s, shut=error.shut
                    ) from None
                time.sleep(RETRY_S)
        return self._channel

    def _exchange(
        self, channel: Channel, frame: bytes, deadline_s: float, again: bool
    ) -> Reply | None:
        """Send a command and return its reply; None if no reply came in time. With `again`, send
        the command again after each reconnect."""
        sent, poller = False, ChannelPoller()
        while (remaining_s := deadline_s - HOST.monotonic_s()) > 0:
            self._fork_guard.check()
            new = channel.reconnected()
            sent = (sent and not (new and again)) or channel.send(frame)
            data = channel.receive_soon() if sent else None
            if data is None:
                poller.watch(channel, to_send=not sent)
                poller.wait(min(remaining_s, PATIENCE_S))
            elif (reply := wire.decode_reply(data)).sequence == self._sequence:
                return reply
        return None


def _job(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> Job[T]:
    """Run `work` as a job. The job yields no deadline, because `work` does its own waiting."""
    yield from ()
    return work(*args, **named)
