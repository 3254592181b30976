"""A world: machine, daemon, clients, subscribers and faults, run by a script under an oracle."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from world.clients import SimulatedClient
from world.daemons import SimulatedDaemon
from world.deliveries import Deliveries
from world.disk import SimulatedDisk, Trouble
from world.hosts import Machine
from world.network import Disturbance, Network
from world.oracle import IN_DOUBT, Call, Operation, Oracle, Sent, Timer, Violation
from world.schedule import Schedule
from world.script import CLIENTS, KEYS, MS, SUBSCRIBERS, TOPICS, S, Script, Step
from world.seam import CrossedLibrary, Seam
from world.subscribers import SimulatedSubscriber

from purgatoryd.clients.conditions import AllOf, AnyOf, Quorum, SumOf
from purgatoryd.clients.model import Notice
from purgatoryd.daemon import recovery
from purgatoryd.daemon.config import MIB, Config
from purgatoryd.daemon.log import log
from purgatoryd.shm_layout import arena as arena_module
from purgatoryd.shm_layout import wal as wal_module
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import Lagged, PurgatorydError
from purgatoryd.shm_layout.layout import Cause, Op, Status
from purgatoryd.shm_layout.shm import ArenaFile

BEGIN_NS = 10**13
NAMESPACE = "n"
RESTART_NS = 200 * MS
"""From the end of a daemon's process to the next start, as a supervisor does it."""
FAR_NS = 4000 * S
"""Later than every deadline."""
PATCHED = (arena_module, wal_module, recovery)


@contextmanager
def crossed(seam: Seam) -> Iterator[None]:
    """Let calls into the core cross the seam, and note which arena files a process opens."""
    libraries = [module.lib for module in PATCHED]
    for module, library in zip(PATCHED, libraries, strict=True):
        module.lib = CrossedLibrary(library, seam)  # type: ignore[attr-defined]
    open_file = ArenaFile.__init__

    def opened(file: ArenaFile, *arguments: Any) -> None:
        open_file(file, *arguments)
        if seam.running is not None:
            seam.running.files.append(file)

    ArenaFile.__init__ = opened  # type: ignore[method-assign]
    try:
        yield
    finally:
        ArenaFile.__init__ = open_file  # type: ignore[method-assign]
        for module, library in zip(PATCHED, libraries, strict=True):
            module.lib = library  # type: ignore[attr-defined]


class Observer:
    """Hears of the daemons what the oracle has to know."""

    def __init__(self, world: World) -> None:
        self._world = world

    def started(self, daemon: SimulatedDaemon, arena: Any) -> None:
        """A process has its arena."""
        self._world.tap(daemon)
        self._world.began_stream(int(arena.header.stream_id))

    def committed(self, daemon: SimulatedDaemon, arena: Any) -> None:
        """A group was committed."""
        b = arena.wal_buffer
        if b is not None and int(b.committed_lsn) == int(b.next_lsn) - 1:
            self._world.oracle.committed()

    def ended(self, daemon: SimulatedDaemon) -> None:
        """A process has ended."""
        self._world.daemon_ended(daemon)

    def refused_start(self, daemon: SimulatedDaemon, error: BaseException) -> None:
        """A start was refused."""
        self._world.refused.append(error)
        if "remove that one" in str(error):  # an operator reads the message
            self._world.lose_arena()


class World:
    """One world. Use it as a context manager."""

    def __init__(self, script: Script, directory: Path) -> None:
        self.script = script
        self.directory = directory
        setting = script.setting
        self.rng = random.Random(f"world {setting.seed}")
        self.schedule = Schedule(BEGIN_NS)
        self.seam = Seam()
        self.disk = SimulatedDisk(self.schedule, random.Random(f"disk {setting.seed}"), self.seam)
        self.machine = Machine(self.schedule, random.Random(f"machine {setting.seed}"), self.disk)
        self.network = Network(self.schedule, random.Random(f"network {setting.seed}"), self.seam)
        self.oracle = Oracle()
        self.faults: Counter[str] = Counter()
        self.refused: list[BaseException] = []
        self.messages: list[str] = []
        self.digest = hashlib.sha256()
        self.restarts = True
        """Whether a daemon that ended is started again."""
        self._wall_wrong_ns = 0
        self._arena_lost = self._may_lose_arena = False
        self._payloads = 0
        self.daemon = SimulatedDaemon(
            self.machine, self.network, self.seam, directory, self._config(), Observer(self)
        )
        self.clients: list[SimulatedClient] = []
        self.subscribers: list[SimulatedSubscriber] = []
        self.deliveries: list[Deliveries] = []
        self.generation = [0] * CLIENTS
        self.operations: list[list[tuple[Operation, Any]]] = [[] for _ in range(CLIENTS)]
        self._restarting = False

    def _config(self) -> Config:
        setting = self.script.setting
        wal: dict[str, Any] = {
            "wal_dir": str(self.directory / "wal"), "wal_buffer_bytes": 4 * MIB,
            "wal_segment_bytes": 256 * 1024, "snapshot_segments": 2,
        }  # fmt: skip
        return Config(
            "w", capacity=setting.capacity, payload_bytes=256 * 1024,
            replay_capacity=setting.replay_capacity, topics=8, namespaces=4,
            sessions=setting.sessions, watches=256, watch_keys=64, accounts=8, bulk_loads=4,
            bulk_load_rows=4096, inbox=64, **(wal if setting.wal else {}),
        )  # fmt: skip

    def log(self, level: str, message: str, fields: object) -> None:
        """A daemon logs a message."""
        self.messages.append(f"{level}: {message}")

    # ---- running -------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the script, then let everything come to its end. Raises Violation."""
        self.daemon.start()
        self.clients = [self._client(n) for n in range(CLIENTS)]
        for _ in range(SUBSCRIBERS):
            self._subscribe()
        for step in self.script.steps:
            self.pass_time(step.wait_ns)
            self.apply(step)
        self.finish()

    def pass_time(self, span_ns: int) -> None:
        """Run the events of a span."""
        self.schedule.run(self.schedule.now_ns + span_ns)

    def apply(self, step: Step) -> None:
        """Do one step."""
        getattr(self, f"do_{step.kind}")(**step.arguments)

    def finish(self) -> None:
        """Heal everything, and wait until all is over."""
        self.disk.troubles.clear()
        self.disk.full = False
        self.disk.short_writes = 0
        self.daemon.fuse.left = None
        self.daemon.thaw()
        for one in (*self.clients, *self.subscribers):
            one.thaw()
            for end in one.ends:
                end.disturbances.clear()
        self.until(lambda: self.daemon.alive, "the daemon serves")
        if self.daemon.reaper is not None and self.daemon.reaper.wal.errno:
            self.daemon.stop()
            self.until(lambda: self.daemon.alive, "the daemon serves again")
        self.until(lambda: all(not c.unsettled for c in self.clients), "all calls have an outcome")
        self.pass_time(20 * S)
        self.schedule.skip(FAR_NS)
        self.pass_time(20 * S)
        self.until(self._all_ended, "all operations have an outcome")
        self.oracle.finish()
        for client in self.clients:
            client.close()
        self.until(lambda: all(client.closed for client in self.clients), "all sessions ended")
        self.pass_time(70 * S)  # the grace of sessions whose process nobody watched
        for one in self.deliveries:
            one.finish()
        self._check_leaks()
        self._digest_end()
        self.restarts = False
        self.daemon.stop()

    def until(self, fact: Callable[[], object], name: str, limit_ns: int = 300 * S) -> None:
        """Let time pass until a fact is true. Raises Violation."""
        end_ns = self.schedule.now_ns + limit_ns
        while not fact():
            if self.schedule.now_ns > end_ns:
                raise Violation(f"did not come true: {name}")
            self.pass_time(50 * MS)

    def _all_ended(self) -> bool:
        return all(
            real.done for mine in self.operations for operation, real in mine if operation.ticket
        )

    def _check_leaks(self) -> None:
        assert self.daemon.reaper is not None
        arena = self.daemon.reaper.arena
        arena.check()
        metrics = arena.metrics
        left = {
            "timers": int(metrics.live),
            "operations": int(metrics.operations),
            "outcomes": int(metrics.outcomes),
            "sessions": len(arena.session_ids()),
            "watch records": arena.watch_fill()["watch_records"],
        }
        if any(left.values()):
            raise Violation(f"left over: {left}")

    def close(self) -> None:
        """Remove what the world has outside of itself."""
        self.restarts = False
        for one in (*self.clients, *self.subscribers):
            one.die()
        if self.daemon.alive:
            self.daemon.kill()
        self.daemon.lose_memory()

    # ---- the digest ----------------------------------------------------------------------------

    def note(self, *parts: object) -> None:
        """Something that the same seed has to repeat."""
        for part in parts:
            self.digest.update(part if isinstance(part, bytes) else str(part).encode())

    def _digest_end(self) -> None:
        assert self.daemon.reaper is not None
        self.note(self.schedule.now_ns, *self.disk.digest_parts())
        for memory in self.daemon.reaper.arena.mappings:
            self.note(hashlib.sha256(memory).digest())

    # ---- what the daemon publishes ---------------------------------------------------------------

    def tap(self, daemon: SimulatedDaemon) -> None:
        """Listen to all that a daemon hands to its notice socket."""
        assert daemon.transport is not None
        transport = daemon.transport
        publish = transport.publish

        def listen(messages: Any) -> int:
            messages = list(messages)
            sent = publish(messages)
            for message in messages:
                self.published(bytes(message.subject), bytes(message.body))
            return sent

        transport.publish = listen  # type: ignore[method-assign]

    def published(self, subject: bytes, body: bytes) -> None:
        """A message was handed to the notice socket."""
        self.note(subject, body)
        namespace, topic = wire.decode_topic_frame(subject)
        if namespace != NAMESPACE:
            return
        head = wire.decode_notice_head(body)
        raws = wire.decode_notices(body, head.records)
        for index in range(head.records):
            ticket, deadline_ns, fired_ns, cause, flags, key, payload = raws[index]
            if not str(key).startswith("o"):
                self.oracle.judge_wall(bytes(payload), self.machine.wall_ns(self.schedule.now_ns))
            if str(key).startswith("o"):
                _, payload = wire.decode_verdict(payload)
            sent = Sent(ticket, str(key), bytes(payload), deadline_ns, fired_ns, cause)
            self.oracle.published(
                head.stream_id, topic, head.first + index, sent, self.machine.boot_begun_ns,
                self.schedule.now_ns,
            )  # fmt: skip

    # ---- processes -----------------------------------------------------------------------------

    def _client(self, number: int) -> SimulatedClient:
        client = SimulatedClient(
            self.machine, self.network, "w", NAMESPACE, durable=self._durable(number)
        )
        self.daemon.pids.add(client.host.pid)
        return client

    def _durable(self, number: int) -> bool:
        return self.script.setting.wal and self.script.setting.durable[number]

    def _subscribe(self) -> None:
        number = len(self.subscribers)
        deliveries = Deliveries(self.oracle, lambda: self._stream_of(number))
        self.deliveries.append(deliveries)
        take = partial(self._deliver, deliveries)
        self.subscribers.append(
            SimulatedSubscriber(self.machine, self.network, "w", NAMESPACE, None, take)
        )

    def _stream_of(self, number: int) -> int:
        inbox = self.subscribers[number].inbox
        return inbox._stream.stream_id if inbox is not None else 0

    def _deliver(self, deliveries: Deliveries, item: Notice | Lagged) -> None:
        if isinstance(item, Lagged):
            self.note("lagged", item.topic, item.first_lost, item.last_lost)
            deliveries.lagged(item.topic, item.first_lost, item.last_lost)
            return
        self.note("notice", item.topic, item.seq, item.ticket)
        sent = Sent(
            item.ticket, str(item.key), item.payload, item.deadline_boot_ns, item.fired_boot_ns,
            int(item.cause),
        )  # fmt: skip
        deliveries.received(item.topic, item.seq, sent)

    def daemon_ended(self, daemon: SimulatedDaemon) -> None:
        """A daemon's process has ended: its supervisor starts the next one."""
        if self.restarts and not self._restarting:
            self._restarting = True
            self.schedule.after(RESTART_NS, self._restart)

    def _restart(self) -> None:
        self._restarting = False
        if self.restarts and not self.daemon.alive:
            if not self.daemon.start() and not self._restarting:
                self._restarting = True
                self.schedule.after(RESTART_NS, self._restart)

    # ---- steps: work -----------------------------------------------------------------------------

    def _name(self, client: int, key: int) -> str:
        return f"k{client}.{key}"

    def _free(self, client: int, key: int) -> str | None:
        """The name of a key on which no call is under way."""
        name = self._name(client, key)
        usable = self.clients[client].alive and self.oracle.key(name).call is None
        return name if usable else None

    def _payload(self, size: int) -> bytes:
        self._payloads += 1
        return f"{self._payloads}:".encode() + bytes(size)

    def do_add(
        self, client: int, key: int, mode: str, delay_ns: int, topic: str, size: int
    ) -> None:
        name = self._free(client, key)
        if name is None:
            return
        payload = self._payload(size)
        timer = Timer(name, topic, payload, self.schedule.now_ns + delay_ns)
        call = self.oracle.issue(
            Call(mode, name, self.schedule.now_ns, self._durable(client), timer)
        )
        self.clients[client].add(
            name, partial(self._answered, call), delay_ns=delay_ns, topic=topic, payload=payload,
            mode=mode,
        )  # fmt: skip

    def do_cancel(self, client: int, key: int, by_ticket: bool) -> None:
        name = self._free(client, key)
        if name is None:
            return
        armed = self.oracle.key(name).armed
        ticket = armed[0].ticket if by_ticket and armed else 0
        call = Call("cancel", name, self.schedule.now_ns, self._durable(client), ticket=ticket)
        self.oracle.issue(call)
        self.clients[client].cancel(name, ticket, partial(self._answered, call))

    def _answered(self, call: Call, pending: Any) -> None:
        word = int(pending.word)
        status = IN_DOUBT if pending.error is not None or word == 0 else word & 0xFF
        self._judge(call, status, word >> 8, int(pending.deadline_ns))

    def _judge(self, call: Call, status: int, ticket: int, deadline_boot_ns: int) -> None:
        self.note(call.kind, call.key, status, ticket)
        deadline_ns = deadline_boot_ns + self.machine.boot_begun_ns
        self.oracle.answer(call, status, ticket, deadline_ns, self.schedule.now_ns)

    def do_get(self, client: int, key: int) -> None:
        name = self._free(client, key)
        if name is None:
            return
        call = self.oracle.issue(Call("get", name, self.schedule.now_ns, self._durable(client)))

        def report(question: Any) -> None:
            try:
                found = question.outcome()
            except PurgatorydError:
                self._judge(call, IN_DOUBT, 0, 0)
                return
            if found is None:
                self._judge(call, Status.UNKNOWN, 0, 0)
            else:
                self._judge(call, found.status, found.ticket, found.deadline_boot_ns)

        self.clients[client].get(name, report)

    def do_add_many(
        self, client: int, keys: list[int], mode: str, delay_ns: int, topic: str
    ) -> None:
        names = [name for key in keys if (name := self._free(client, key))]
        if not names:
            return
        rows, calls = [], []
        for name in names:
            payload = self._payload(8)
            timer = Timer(name, topic, payload, self.schedule.now_ns + delay_ns)
            calls.append(
                self.oracle.issue(
                    Call(mode, name, self.schedule.now_ns, self._durable(client), timer)
                )
            )
            rows.append((name, delay_ns / 1e9, topic, payload))
        self.clients[client].add_many(rows, topic, mode, partial(self._all_answered, calls))

    def do_cancel_many(self, client: int, keys: list[int], **_: object) -> None:
        names = [name for key in keys if (name := self._free(client, key))]
        if not names:
            return
        calls = [
            self.oracle.issue(Call("cancel", name, self.schedule.now_ns, self._durable(client)))
            for name in names
        ]
        self.clients[client].cancel_many(names, partial(self._all_answered, calls))

    def _all_answered(self, calls: list[Call], result: Any) -> None:
        rows = zip(calls, result.statuses, result.tickets, result.deadlines_boot_ns, strict=True)
        for call, status, ticket, deadline_boot_ns in rows:
            known = IN_DOUBT if status == Status.NONE else int(status)
            self._judge(call, known, ticket, deadline_boot_ns)

    # ---- steps: operations -------------------------------------------------------------------------

    def do_watch(
        self, client: int, kind: str, targets: dict[int, int], need: int, timeout_ns: int,
        topic: str | None,
    ) -> None:  # fmt: skip
        one = self.clients[client]
        if not one.alive:
            return
        named = {f"w{key}": target for key, target in targets.items()}
        conditions: dict[str, Callable[[], Any]] = {
            "all": lambda: AllOf(named),
            "any": lambda: AnyOf(named),
            "sum": lambda: SumOf(dict.fromkeys(named, 0), need),
            "quorum": lambda: Quorum(named, need),
        }
        condition = conditions[kind]()
        self._payloads += 1
        key = f"o{client}.{self._payloads}"
        operation = Operation(key, kind, named, need, self.schedule.now_ns + timeout_ns)
        self.oracle.watching(operation)
        real: list[Any] = []

        def report(pending: Any) -> None:
            word = int(pending.word)
            self.note("watch", key, word)
            if pending.error is None and word & 0xFF == Status.ADDED:
                operation.ticket = word >> 8
                operation.deadline_ns = int(pending.deadline_ns) + self.machine.boot_begun_ns

        def ended(found: Any) -> None:
            try:
                outcome = found.result(0)
            except PurgatorydError:
                operation.ticket = 0  # nobody will hear of it
                return
            self.note("outcome", key, outcome.cause)
            self.oracle.ended(operation, Cause[outcome.cause.upper()], self.schedule.now_ns)

        real.append(one.watch(key, condition, timeout_ns / 1e9, topic, report))
        real[0].add_done_callback(ended)
        self.operations[client].append((operation, real[0]))

    def _trigger(
        self, client: int, op: Op, key: int, value: int, done: Callable[[int], None]
    ) -> None:
        def report(pending: Any) -> None:
            word = int(pending.word)
            self.note(op, key, value, word)
            if pending.error is None:
                done(word & 0xFF)

        if self.clients[client].alive:
            self.clients[client].trigger(op, f"w{key}", value, report)

    def do_advance(self, client: int, key: int, by: int) -> None:
        name = f"w{key}"
        watermark, issued_ns = self.oracle.watch_key(name).possible + by, self.schedule.now_ns
        self.oracle.advancing(name, watermark)

        def done(status: int) -> None:
            if status == Status.DONE:
                self.oracle.advanced(
                    name,
                    watermark,
                    issued_ns,
                    self.schedule.now_ns,
                    durable=self._durable(client),
                )

        self._trigger(client, Op.ADVANCE_KEY, key, watermark, done)

    def do_bump(self, client: int, key: int, by: int) -> None:
        one = self.oracle.watch_key(f"w{key}")
        one.bumps += by
        self._trigger(client, Op.BUMP, key, by, lambda _: None)

    def do_fail(self, client: int, key: int) -> None:
        self.oracle.watch_key(f"w{key}").may_fail = True
        self._trigger(client, Op.FAIL, key, 7, lambda _: None)

    def do_clear(self, client: int, key: int) -> None:
        self._trigger(client, Op.CLEAR, key, 0, lambda _: None)

    def do_end_operation(self, client: int, number: int) -> None:
        mine = [found for found in self.operations[client] if found[0].ticket]
        if not mine or not self.clients[client].alive:
            return
        operation, _ = mine[number % len(mine)]
        operation.cancelled = True
        self.clients[client].cancel(operation.key, operation.ticket, lambda _: None)

    # ---- steps: faults -------------------------------------------------------------------------

    def _count(self, kind: str) -> None:
        self.faults[kind] += 1

    def do_disturb(self, client: int, kind: str, frames: int, delay_ns: int) -> None:
        for end in self.clients[client].ends:
            end.disturbances.append(Disturbance(kind, frames, delay_ns))

    def do_break(self, client: int) -> None:
        for end in self.clients[client].ends:
            self.network.break_connection(end)
        self._count("connection")

    def do_disturb_subscriber(self, subscriber: int, kind: str, frames: int, delay_ns: int) -> None:
        for end in self.subscribers[subscriber].ends:
            end.disturbances.append(Disturbance(kind, frames, delay_ns))

    def do_freeze_client(self, client: int, span_ns: int) -> None:
        one = self.clients[client]
        one.freeze()
        self._count("client")
        self.schedule.after(span_ns, one.thaw)

    def do_freeze_subscriber(self, subscriber: int, span_ns: int) -> None:
        one = self.subscribers[subscriber]
        one.freeze()
        self._count("client")
        self.schedule.after(span_ns, one.thaw)

    def do_kill_client(self, client: int, span_ns: int) -> None:
        if self.clients[client].alive:
            self._end_client(client)
            self._count("client")
            self.schedule.after(span_ns, partial(self._begin_client, client))

    def _end_client(self, client: int) -> None:
        one = self.clients[client]
        one.die()
        for call, report in one.unsettled:
            if call.done:
                report()
        self.daemon.pids.discard(one.host.pid)
        if self.daemon.processes is not None and self.daemon.alive:
            self.daemon.processes.end(one.host.pid)
        for key in range(KEYS):
            self.oracle.doubt(self._name(client, key), self.schedule.now_ns)
        self.operations[client] = []

    def _begin_client(self, client: int) -> None:
        if not self.clients[client].alive:
            self.clients[client] = self._client(client)

    def do_kill_daemon(self, calls: int, span_ns: int) -> None:
        if self.daemon.alive or self.daemon.fuse.left is None:
            self.daemon.fuse.left = calls
            self._count("kill")

    def do_freeze_daemon(self, span_ns: int) -> None:
        self.daemon.freeze()
        self._count("freeze")
        self.schedule.after(span_ns, self.daemon.thaw)

    def do_stop_daemon(self, span_ns: int, capacity: int | None) -> None:
        if not self.daemon.alive:
            return
        self.daemon.stop()
        self._count("stop")
        if capacity is not None and not self.daemon.alive:
            self.daemon.config = self._resized(capacity)

    def _resized(self, capacity: int) -> Config:
        from dataclasses import replace

        return replace(self.daemon.config, capacity=max(capacity, self.script.setting.capacity))

    def do_disk(self, kind: str, errno: int, times: int, span_ns: int) -> None:
        trouble = self.disk.troubles[kind] = Trouble(errno, times)

        def heal() -> None:
            if self.disk.troubles.get(kind) is trouble:
                del self.disk.troubles[kind]

        self.schedule.after(span_ns, heal)

    def do_disk_full(self, span_ns: int) -> None:
        self.disk.full = True

        def heal() -> None:
            self.disk.full = False

        self.schedule.after(span_ns, heal)

    def do_short_write(self, times: int) -> None:
        self.disk.short_writes += times

    def do_slow_disk(self, commit_ns: int, span_ns: int) -> None:
        before = self.daemon.commit_ns
        self.daemon.commit_ns = commit_ns
        self._count("slow disk")

        def heal() -> None:
            self.daemon.commit_ns = before

        self.schedule.after(span_ns, heal)

    def do_power_cut(self, span_ns: int) -> None:
        self._count("power cut")
        for client in range(CLIENTS):
            if self.clients[client].alive:
                self._end_client(client)
                self.schedule.after(span_ns + MS, partial(self._begin_client, client))
        if self.daemon.alive:
            self.daemon.kill()
        self.daemon.fuse.left = None
        self.lose_arena()
        self.disk.cut()
        self.machine.reboot()

    def began_stream(self, stream_id: int) -> None:
        """A daemon serves with a stream. Another one has a reason."""
        before, self.oracle.stream_id = self.oracle.stream_id, stream_id
        if before not in (0, stream_id):
            if not self._may_lose_arena:
                raise Violation(f"stream {before} was followed by {stream_id} without a reason")
            if not self._arena_lost:  # its name was removed, and then it was killed
                self.lose_arena(memory=False)
            drifts_ns = FAR_NS // 1000 if self.machine.drift_ppm else 0
            self.oracle.recovered(self._wall_wrong_ns + drifts_ns)
            self._wall_wrong_ns = 0
        self._arena_lost = self._may_lose_arena = False

    def lose_arena(self, *, memory: bool = True) -> None:
        """The arena is gone, and what no WAL has."""
        self._arena_lost = self._may_lose_arena = True
        if memory:
            self.daemon.lose_memory()
        self.oracle.arena_lost(self.script.setting.wal, self.schedule.now_ns)

    def do_step_wall(self, by_ns: int) -> None:
        self._count("clock")
        self._wall_wrong_ns += abs(by_ns)
        self.machine.step_wall(by_ns)

    def do_drift(self, ppm: int) -> None:
        self._count("clock")
        self._wall_wrong_ns += FAR_NS // 1000
        self.machine.drift(ppm)

    def do_suspend(self, span_ns: int) -> None:
        self._count("clock")
        self.machine.suspend(span_ns)

    def do_lose_name(self, private: bool) -> None:
        if self.daemon.alive:
            self._count("name")
            self._may_lose_arena = True
            path = self.daemon.paths.private if private else self.daemon.paths.arena
            Path(f"/dev/shm{path}").unlink(missing_ok=True)

    def do_kill_snapshot(self) -> None:
        if self.daemon._snapshot is not None:
            self._count("snapshot")
            self.daemon._snapshot.kill()


@contextmanager
def world_of(script: Script) -> Iterator[World]:
    """A world in a folder of its own, which goes afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="pw"))
    before = os.environ.get("PURGATORYD_DIR")
    os.environ["PURGATORYD_DIR"] = str(directory)
    world = World(script, directory)
    put, log._put = log._put, world.log  # type: ignore[method-assign]
    try:
        with crossed(world.seam):
            try:
                yield world
            finally:
                world.close()
    finally:
        log._put = put  # type: ignore[method-assign]
        shutil.rmtree(directory)
        if before is None:
            del os.environ["PURGATORYD_DIR"]
        else:
            os.environ["PURGATORYD_DIR"] = before


TOPICS_OF_WORK = TOPICS
