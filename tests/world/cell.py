"""One daemon of a world, with its clients, its subscribers, its operator, and its oracle.

A world with shards has several cells on one machine. The cells share the clocks, the disk and the
network of this machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from purgatoryd.clients.model import Notice
from purgatoryd.clients.operations import Outcome
from purgatoryd.clients.resume import Resume
from purgatoryd.daemon.config import MIB, Config
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import (
    ArenaInUse,
    ArenaTooSmall,
    Lagged,
    PurgatorydError,
    WalCopied,
    WalMismatch,
)
from purgatoryd.shm_layout.layout import FLAG_RESUME, Cause, Message, Status
from world.clients import LIMIT_S, QUEUE_LIMIT, SHORT_QUEUE, SimulatedClient
from world.consumers import SimulatedConsumer, subject_of
from world.daemons import EVERY_UID, SimulatedDaemon
from world.deliveries import Deliveries
from world.disk import File
from world.jobs import Group, JobOracle
from world.lateness import Counts, Fired, LateOracle
from world.network import ADMIN, End, SimulatedChannel
from world.occurrences import Occurrence, ScheduleOracle
from world.options import Options, options_of
from world.oracle import (
    FOREVER_NS,
    IN_DOUBT,
    BulkLoad,
    Call,
    Operation,
    Oracle,
    Row,
    Sent,
    Sizes,
    Violation,
)
from world.readers import Readers
from world.script import CLIENTS, CONSUMERS, GROUPS, MS, RESUMER, SLOTS, SUBSCRIBERS, S
from world.subscribers import SimulatedSubscriber

if TYPE_CHECKING:
    from world.world import World

NAMESPACE = "n"
SESSION_GRACE_NS = 60 * S
RESTART_NS = 200 * MS
"""Time between the end of a daemon's process and its restart by the simulated supervisor."""
FORCED_AFTER = 3
"""Number of refused starts after which an operator forces the next start."""
OPERATIONS_END_NS = 700 * S
"""Time after which every operation has expired."""
RESUME_S = 20_000.0
"""Time for which a daemon keeps a session that a later process may resume: longer than a world
lasts."""
WALL_ORIGIN_NS = 10**18
"""Wall time at the beginning of a virtual clock."""
ANYBODY = 2**32 - 1
"""The `owner_uid` of a namespace that has no owner."""
EMPTIED_AFTER = 6
"""Number of refused starts after which an operator starts the daemon with an empty WAL."""


class Operator:
    """An administrator of a daemon, with a connection to its admin socket."""

    def __init__(self, cell: Cell) -> None:
        machine = cell.world.machine
        self._end = End(cell.world.host(), 0, ADMIN)
        self._end.wake = self._receive
        self._sequence = 0
        self._asked: dict[int, Callable[[wire.Reply], object]] = {}
        self.unsent: deque[bytes] = deque()
        self._channel = SimulatedChannel(
            cell.world.network, self._end, cell.daemon.paths.admin_endpoint
        )
        self.machine = machine

    @property
    def ends(self) -> list[End]:
        """The operator's end of its connection, as a list with one element."""
        return [self._end]

    def ask(
        self, build: Callable[[int], bytes], report: Callable[[wire.Reply], object] = lambda _: None
    ) -> None:
        """Send a request as soon as a connection exists. `report` receives the reply, if any."""
        self._sequence += 1
        self._asked[self._sequence] = report
        self.unsent.append(build(self._sequence))
        self._send()

    def _send(self) -> None:
        self._channel.reconnected()
        while self.unsent and self._channel.send(self.unsent[0]):
            self.unsent.popleft()

    def _receive(self) -> None:
        self._send()
        while (data := self._channel.receive()) is not None:
            reply = wire.decode_reply(data)
            report = self._asked.pop(reply.sequence, None)
            if report is not None:
                report(reply)


class Cell:
    """A daemon with its clients, subscribers and operator."""

    def __init__(self, world: World, number: int, name: str, shards: int) -> None:
        self.world = world
        self.number = number
        self.oracle = Oracle()
        self.usual = self._config(name, shards)
        """Configuration of the first start."""
        self.daemon = SimulatedDaemon(
            world.machine, world.network, world.seam, world.directory,
            self.usual, self, world.script.setting.commit_ns,
            only_rings=world.script.setting.only_rings,
        )  # fmt: skip
        self.oracle.disk_failures = lambda: world.disk.failed
        if world.script.setting.wal:  # the WAL buffer may become full
            self.oracle.causes.add(Status.BUSY)
        if world.script.setting.uids:  # each uid has limits, and owns its bulk loads
            self.oracle.causes |= {Status.QUOTA, Status.DENIED}
        if world.script.setting.groups:
            self.oracle.causes.add(Status.FULL_GROUP)
        if not self.virtual:
            self.oracle.outages = self.daemon.outages
        self.operator = Operator(self)
        self.jobs = JobOracle(self.options)
        self.late = LateOracle(self.oracle, self.options)
        self.late.schedules = world.script.setting.schedules
        self.oracle.may_end = self.late.may_end
        self.consumers: list[SimulatedConsumer | None] = [None] * CONSUMERS
        self.manager: SimulatedClient | None = None
        """Client that manages consumer groups and schedules; None: the world has neither."""
        self.deleted_groups = [0] * GROUPS
        """For each slot of a consumer group, how many groups were deleted there."""
        self.schedules = ScheduleOracle(lambda topic: self.late.policies[topic].since(0))
        self.schedules.skips = world.script.setting.groups
        self.deleted_schedules = [0] * SLOTS
        """For each slot of a schedule, how many schedules were deleted there."""
        self.readers = Readers(self)
        self.group_options: dict[str, dict[str, Any]] = {}
        """Arguments of the creation of each consumer group."""
        self.clients: list[SimulatedClient] = []
        self.guests: list[SimulatedClient] = []
        self.expected: tuple[type[PurgatorydError], ...] = ()
        """If not empty: a refusal of the next start must raise one of these errors."""
        self.subscribers: list[SimulatedSubscriber] = []
        self.deliveries: list[Deliveries] = []
        self.operations: list[list[tuple[Operation, Any]]] = [[] for _ in range(CLIENTS)]
        self.inherited: set[str] = set()
        """Keys of operations whose client process has ended. A later process has to receive their
        outcomes."""
        self.at_durable_answer: Callable[[], None] | None = None
        """Function that causes a fault at the next durable answer to a client."""
        self.dropped: set[int] = set()
        """Indexes of the clients whose session an operator has dropped."""
        self.finishing = False
        """True once all disturbances are over."""
        self._calm = 0
        """Moment (of the oracle) at which all clients had a session again after the disturbances; 0
        before."""
        self.restarts = True
        """True if a daemon that has ended is started again."""
        self.barred: int | None = None
        """Index of the client whose uid may not connect; None if every uid may connect."""
        self.rots: list[tuple[File, int]] = []
        """Each damaged file of the WAL, with the position of the damage."""
        self.may_lose_arena = self.rotten = self.draining = False
        self._arena_lost = self._restarting = False
        self._sent: dict[str, int] = {}
        """Newest sequence of each topic that was sent before the current stream began."""
        self._first_position = 0
        """Position in the replay buffer at which the current stream began."""
        self._refused = 0
        self._failed_calls = 0
        self._shards = shards

    def _config(self, name: str, shards: int) -> Config:
        setting = self.world.script.setting
        more: dict[str, Any] = {}
        if setting.wal:
            more = {
                "wal_dir": str(self.world.directory / "wal"), "wal_buffer_bytes": 4 * MIB,
                "wal_segment_bytes": 256 * 1024, "snapshot_segments": 1,
            }  # fmt: skip
        if shards > 1:
            more |= {"shard": self.number, "shards": shards}
        elif setting.durable_namespace:
            more["durable_namespaces"] = (NAMESPACE,)
        if setting.virtual:
            more |= {"clock": "virtual", "wall_origin_ns": WALL_ORIGIN_NS}
        if "iteration" in setting.small_limits:
            more["budget"] = 1
        return Config(
            name, capacity=setting.capacity,
            payload_bytes=(8 if setting.heavy else 1) * MIB,
            replay_capacity=setting.replay_capacity,
            topics=8, namespaces=4, sessions=setting.sessions, watches=1024, watch_keys=64,
            accounts=8, bulk_loads=4, bulk_load_rows=16_384, inbox=64, groups=4, jobs=256,
            schedules=16, cursors=16, **more,
        )  # fmt: skip

    @property
    def partition(self) -> int | None:
        """The partition of this cell's clients; None if the deployment has no shards."""
        return self.number if self._shards > 1 else None

    # ---- times ---------------------------------------------------------------------------------

    @property
    def virtual(self) -> bool:
        """True if deadlines are on a virtual clock."""
        return self.world.script.setting.virtual

    @property
    def begun_ns(self) -> int:
        """World time minus the daemon's boot clock; 0 if deadlines are on a virtual clock."""
        return 0 if self.virtual else self.world.machine.boot_begun_ns

    def now_ns(self) -> int:
        """Current time on the clock of deadlines: world time, or the daemon's virtual time."""
        if not self.virtual:
            return self.world.schedule.now_ns
        if not self.daemon.fuse.dead:
            self._virtual_ns = int(self._arena.header.now_ns)
        return self._virtual_ns

    def wall_ns(self) -> int:
        """Current time on the wall clock of schedules."""
        if self.virtual:
            return WALL_ORIGIN_NS + self.now_ns()
        return self.world.machine.wall_ns(self.world.schedule.now_ns)

    _virtual_ns = 0
    _arena: Any = None

    # ---- processes -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the daemon, the clients and the subscribers."""
        self.daemon.start()
        self.clients = [self.client(n) for n in range(CLIENTS)]
        for number in range(SUBSCRIBERS):
            self._subscribe(number)
        if self.world.script.setting.groups or self.world.script.setting.schedules:
            self.begin_manager()

    def client(self, number: int) -> SimulatedClient:
        """Start a new process of a client."""
        world, setting = self.world, self.world.script.setting
        partition = self.number if self._shards > 1 else None
        client = SimulatedClient(
            world.machine, world.network, "w", NAMESPACE,
            durable=setting.wal and setting.durable[number], hidden=setting.hidden[number],
            partition=partition, uid=number if setting.uids else 0,
            boot_offset_ns=setting.boot_offsets_ns[number],
            resume=self._resume_of(number), hasty=setting.hasty[number] and not self.finishing,
            queue_limit=SHORT_QUEUE if setting.short_queue else QUEUE_LIMIT,
        )  # fmt: skip
        client.options = self.options
        client.begun = self.oracle.moment()
        client.on_expired(partial(self._session_lost, number, client.begun))
        self.daemon.pids.add(client.host.pid)
        return client

    def options(self, key: str) -> Options:
        """Return the options of the timers of a key."""
        setting = self.world.script.setting
        return options_of(
            key, ranks=setting.ranks, late=setting.late, unique=setting.unique
        )  # fmt: skip

    def _session_lost(self, number: int, began: int) -> None:
        """Check that an event of the world explains why a client's process has lost its session."""
        cut = self.oracle.cut > max(began, self._calm)
        leaves = self.clients[number].leaving  # the client itself sent BYE
        reason = cut or leaves or number in self.dropped or (self.finishing and not self._calm)
        if not reason and self.world.machine.suspended_ns < SESSION_GRACE_NS - 10 * S:
            raise Violation(f"client {number} has lost its session without a reason")

    def _resume_of(self, number: int) -> Resume | None:
        if not self.world.script.setting.resumes or number != RESUMER:
            return None
        return Resume(f"w{number}", RESUME_S, self._resumed, lambda _: self.inherited.clear())

    def _resumed(self, key: wire.Key, outcome: Outcome) -> None:
        """Record the outcome of an operation that an earlier process of the client armed."""
        self.world.note("resumed", key, outcome.cause)
        self.inherited.discard(str(key))
        self._ended(self.oracle.operations[str(key)], outcome)

    def durable(self, client: int) -> bool:
        """Return whether a client receives durable answers."""
        setting = self.world.script.setting
        return setting.wal and (setting.durable_namespace or setting.durable[client] is not False)

    def _subscribe(
        self, number: int, topics: list[str] | None = None, *, whole: bool = False
    ) -> None:
        deliveries = Deliveries(self.oracle, lambda: self._stream_of(number), self._replay, topics)
        self.deliveries[number:] = [deliveries, *self.deliveries[number + 1 :]]
        local = number < self.world.script.setting.local_subscribers

        def opened() -> None:
            if local and self.daemon.alive:
                self._look()
            deliveries.opened()

        subscriber = SimulatedSubscriber(
            self.world.machine, self.world.network, self.daemon.config.name, NAMESPACE, topics,
            partial(self._deliver, deliveries), whole=whole, local=local, opened=opened,
        )  # fmt: skip
        self.subscribers[number:] = [subscriber, *self.subscribers[number + 1 :]]

    def renew_subscriber(self, number: int, topics: list[str] | None, *, whole: bool) -> None:
        """End a subscriber's process, and start another process that subscribes to these topics."""
        self.subscribers[number].die()
        self._subscribe(number, topics, whole=whole)

    def renew_local_subscribers(self) -> None:
        """Start the subscribers on the daemon's host again, after its reboot."""
        for number in range(self.world.script.setting.local_subscribers):
            self.renew_subscriber(number, self.deliveries[number].wanted, whole=False)

    def _replay(self, topic: str, sequence: int) -> tuple[bool, int]:
        """Return (notice is in the replay buffer, number of notices that the buffer received).

        If the replay buffer cannot be read, return (False, infinity).
        """
        unread = False, FOREVER_NS
        if not self.daemon.alive:
            return unread
        try:
            reader = Reader.attach(self.daemon.paths)
        except PurgatorydError:
            return unread
        with closing(reader):
            if reader.stream_id != self.oracle.stream_id:
                return unread
            lost_until, _ = reader.replay(NAMESPACE, topic, sequence, sequence)
            return lost_until < sequence, int(reader.header.replay_tail) - self._first_position

    def _stream_of(self, number: int) -> int:
        inbox = self.subscribers[number].inbox
        return inbox._stream.stream_id if inbox is not None else 0

    def _deliver(self, deliveries: Deliveries, item: Notice | Lagged) -> None:
        if isinstance(item, Lagged):
            self.world.note("lagged", item.topic, item.first_lost, item.last_lost)
            deliveries.lagged(item.topic, item.first_lost, item.last_lost)
            return
        self.world.note("notice", item.topic, item.seq, item.ticket)
        sent = Sent(
            item.ticket, str(item.key), item.payload, item.deadline_boot_ns, item.fired_boot_ns,
            int(item.cause),
        )  # fmt: skip
        deliveries.received(item.topic, item.seq, sent)

    def end_client(self, number: int) -> None:
        """End a client's process without BYE. The effects of its open calls are then in doubt."""
        one = self.clients[number]
        one.die()
        for call, report in one.unsettled:
            if call.done:
                report()
        self._end_process(one)
        for name in self.keys_of(number):
            self.oracle.doubt(name, self.now_ns())
        lasts = one.begun > self.oracle.cut and number not in self.dropped
        if one.resumable and lasts:
            mine = self.operations[number]
            self.inherited |= {o.key for o, real in mine if o.ticket and not real.done}
        self.operations[number] = []

    def guest(self, uid: int) -> SimulatedClient:
        """Start a guest: a client that opens a session and makes no calls."""
        world = self.world
        partition = self.number if self._shards > 1 else None
        guest = SimulatedClient(
            world.machine, world.network, "w", NAMESPACE, durable=False, partition=partition,
            uid=uid if world.script.setting.uids else 0, owns=False,
        )  # fmt: skip
        self.daemon.pids.add(guest.host.pid)
        self.guests.append(guest)
        return guest

    def end_guests(self, guests: list[SimulatedClient]) -> None:
        """End the processes of these guests without BYE."""
        for guest in [one for one in guests if one.alive]:
            self.guests.remove(guest)
            guest.die()
            self._end_process(guest)

    # ---- consumer groups -----------------------------------------------------------------------

    def group_name(self, slot: int) -> str:
        """Return the name of the consumer group in a slot."""
        return f"g{slot}.{self.deleted_groups[slot]}"

    def schedule_key(self, slot: int) -> str:
        """Return the key of the schedule in a slot."""
        return f"s{slot}.{self.deleted_schedules[slot]}"

    def begin_manager(self) -> None:
        """Start a new process of the client that manages consumer groups and schedules."""
        if self.manager is not None and self.manager.alive:
            self.manager.die()
            self._end_process(self.manager)
        partition = self.number if self._shards > 1 else None
        self.manager = SimulatedClient(
            self.world.machine, self.world.network, "w", NAMESPACE, durable=False,
            partition=partition, owns=False,
        )  # fmt: skip
        self.daemon.pids.add(self.manager.host.pid)

    def begin_consumer(self, number: int, group: Group, lease_ns: int, credits: int) -> None:
        """Start a process of a consumer."""
        setting = self.world.script.setting
        self.consumers[number] = one = SimulatedConsumer(
            self, NAMESPACE, group, lease_ns, credits,
            durable=setting.wal and setting.durable[number],
            partition=self.number if self._shards > 1 else None,
        )  # fmt: skip
        self.daemon.pids.add(one.host.pid)

    def end_consumer(self, number: int) -> None:
        """End the process of a consumer, if there is one, without BYE."""
        one = self.consumers[number]
        if one is not None and one.alive:
            one.die()
            self._end_process(one)

    def close_consumers(self) -> None:
        """End the sessions of all consumers and of the manager cleanly."""
        ones: list[SimulatedClient] = [
            one for one in self.consumers if one is not None and one.alive
        ]
        ones += [self.manager] if self.manager is not None else []
        for one in ones:
            one.close()
        self.world.until(lambda: all(one.closed for one in ones), "all consumers have closed")
        for one in ones:
            one.die()
            self._end_process(one)

    def end_delivery(self) -> None:
        """End the processes of the manager, of all consumers and of all subscribers with a cursor,
        because the power is cut."""
        self.readers.die()
        for number in range(CONSUMERS):
            self.end_consumer(number)
        if self.manager is not None:
            self.manager.die()
            self._end_process(self.manager)

    def begin_delivery(self) -> None:
        """Start the manager and the consumers again after a power cut."""
        if self.manager is None or self.finishing:
            return
        self.begin_manager()
        for number, one in enumerate(self.consumers):
            if one is not None and not one.alive and not one.group.retired:
                self.begin_consumer(number, one.group, one.lease_ns, one.credits)

    def durably_answered(self) -> None:
        """Cause the fault that a script has planned for the next durable answer."""
        if self.at_durable_answer is not None:
            self.world.schedule.after(0, self.at_durable_answer)
            self.at_durable_answer = None

    def violated(self, violation: Violation) -> None:
        """Raise a violation in an event of its own, because a client catches exceptions of
        callbacks."""

        def again() -> None:
            raise violation

        self.world.schedule.after(0, again)

    def judge_letter(self, group: Group, letter: Any) -> None:
        """Judge a dead letter at the end of the world."""
        subject = subject_of(letter.key, letter.payload)
        self.jobs.dead(
            group.name, subject, letter.ticket, letter.attempts, letter.reason, letter.error
        )

    def _end_process(self, client: SimulatedClient) -> None:
        self.daemon.pids.discard(client.host.pid)
        if self.daemon.processes is not None and self.daemon.alive:
            self.daemon.processes.end(client.host.pid)

    def begin_client(self, number: int) -> None:
        """Start a client's next process, if none is running."""
        if not self.clients[number].alive:
            self.clients[number] = self.client(number)

    def keys_of(self, client: int) -> list[str]:
        """Return all timer keys that belong to a client."""
        return [name for name in self.oracle.keys if name.startswith(f"k{client}.")]

    # ---- events of the daemon ------------------------------------------------------------------

    def starting(self) -> None:
        """Record that a process of the daemon starts."""
        self._failed_calls = self.world.disk.failed

    def started(self, arena: Any) -> None:
        """Record that a daemon process has opened its arena. If the arena has a new stream, check
        that there is a reason."""
        self._refused = 0
        self._arena = arena
        self.jobs.starts_ns.append(self.world.schedule.now_ns)
        self._tap()
        sizes = [getattr(self.daemon.config, name) for name in Sizes._fields]
        self.oracle.served_with(Sizes(*sizes))
        header = arena.header  # this read may kill the process; the code below cannot
        stream_id = int(header.stream_id)
        before, self.oracle.stream_id = self.oracle.stream_id, stream_id
        if before != stream_id:
            self._first_position = int(header.replay_head)
            self._sent = self.world.seam.run(None, self._sent_sequences)
            self.readers.judge.begins_stream(self._sent)
        if before not in (0, stream_id):
            if not self.may_lose_arena:
                raise Violation(f"stream {before} was followed by {stream_id} without a reason")
            if not self._arena_lost:  # an arena file lost its name, then the daemon was killed
                self.lose_arena(memory=False)
            slack_ns = self.world.wrong_ns(self)
            self.oracle.recovered(slack_ns)
            self.schedules.recovered(slack_ns, self.begun_ns)
            if self.rotten:  # damage at the end of the WAL looks like a torn write
                self._forced()
        self._arena_lost = self.may_lose_arena = False
        self.late.started(stream_id, self._late_counts(), self.world.schedule.now_ns)
        self.check()
        if self._shards > 1:
            self._place(self.daemon.starts)

    def check(self) -> None:
        """Check all invariants of the arena."""
        self.world.seam.run(None, self._arena.check)

    def steadiness(self) -> tuple[object, ...]:
        """Return values that change whenever the daemon pauses or a disk call fails.

        The last value is True while the daemon does not run or cannot write to the disk.
        """
        disk, reaper = self.world.disk, self.daemon.reaper
        troubled = disk.full or bool(disk.troubles) or (reaper is None or bool(reaper.wal.errno))
        paused = (self.daemon.starts, self.daemon.freezes, self.world.machine.suspended_ns)
        return (*paused, disk.failed, troubled or self.daemon.frozen)

    def named_again(self, steadiness: tuple[object, ...]) -> None:
        """Unless the daemon has paused or failed since `steadiness` was read, expect that the
        daemon has restored the names of its arena files."""
        if steadiness == self.steadiness() and not steadiness[-1]:
            self.may_lose_arena = False

    def _place(self, start: int) -> None:
        """Create the namespace in a shard, as the supervisor does."""

        def again() -> None:
            if not placed and self.restarts and self.daemon.starts == start:
                self._set(lambda _: placed.append(1))
                self.world.schedule.after(100 * MS, again)

        placed: list[int] = []
        self.world.schedule.after(MS, again)

    def committed(self, arena: Any) -> None:
        """Record a group commit. If all frames are committed, all changes up to this time are
        durable."""
        buffer, reaper = arena.wal_buffer, self.daemon.reaper
        if buffer is None or reaper is None:
            return
        # committed_lsn is 0 until the first snapshot is committed
        if reaper.wal.committed_lsn == int(buffer.next_lsn) - 1:
            self._committed()

    def _committed(self) -> None:
        """Record that all changes up to this time are durable."""
        self.oracle.committed()
        self.jobs.committed()
        self.schedules.committed()
        self.readers.judge.all_committed()

    def ending(self, arena: Any) -> None:
        """Remember the virtual time that the arena of an ending process contains. At this time the
        process last worked."""
        self._virtual_ns = int(arena.header.now_ns) if self.virtual else 0
        self.readers.ending(arena)

    def ended(self) -> None:
        """Let the supervisor start the next process."""
        if self.restarts and not self._restarting:
            self._restarting = True
            self.world.schedule.after(RESTART_NS, self._restart)

    def _restart(self) -> None:
        self._restarting = False
        if self.restarts and not self.daemon.alive and not self.daemon.start():
            self.ended()

    def refused(self, error: BaseException) -> None:
        """Check that a refused start has a reason, and let an operator react to the message."""
        text = f"{type(error).__name__}: {error}"
        self.world.note("refused", type(error).__name__)
        disk = self.world.disk
        troubled = disk.full or disk.failed != self._failed_calls or bool(disk.troubles)
        if self.expected:
            if not isinstance(error, self.expected):
                names = " or ".join(one.__name__ for one in self.expected)
                raise Violation(f"a start was refused, but not with {names}: {text}")
        elif isinstance(error, WalCopied):
            self.daemon.as_restored = True
        elif self.daemon.import_path is not None and isinstance(error, (ArenaInUse, WalMismatch)):
            self.daemon.import_path = None  # the export was imported before a kill
        elif "to start empty" in text:
            self.lose_arena()
        elif isinstance(error, ArenaTooSmall):
            larger: dict[str, Any] = {error.resource: 2 * error.needed}
            self.daemon.next_config = replace(self.daemon.config, **larger)
        elif self.rotten and not troubled:
            self._refused += 1
            if self._refused == EMPTIED_AFTER:
                self._begin_anew()
            elif self._refused >= FORCED_AFTER:
                self._force()
        elif not troubled:
            raise Violation(f"a start was refused without a reason: {text}")

    def _forced(self) -> None:
        """Expect that changes are missing that a damaged WAL lacks."""
        self.oracle.forced()
        self.jobs.forced()
        self.late.lost()
        self.schedules.forced()
        self.readers.judge.forced()

    def _force(self) -> None:
        """Let an operator accept only those records of the WAL that precede its damage."""
        self.daemon.force = True
        self.may_lose_arena = True
        self._forced()

    def _begin_anew(self) -> None:
        """Let an operator move the WAL away, because even a forced start finds no sound
        snapshot."""
        self.world.disk.empty(Path(self.daemon.config.wal_dir) / self.daemon.config.name)
        self.may_lose_arena = True
        self._forced()

    def move(self) -> None:
        """Expect that the next start restores exactly what the export of the stopped daemon
        contains."""
        self._committed()
        self._arena_lost = self.may_lose_arena = True
        self.daemon.lose_memory()
        self.oracle.arena_lost(wal=True)
        self.jobs.arena_lost(self.world.schedule.now_ns, wal=True)
        self.late.lost()
        self.schedules.arena_lost(wal=True)
        self.readers.judge.arena_lost(wal=True)
        self.inherited.clear()

    def lose_arena(self, *, memory: bool = True) -> None:
        """Expect the loss of the arena, and of all state that neither a WAL nor an export
        contains."""
        self._arena_lost = self.may_lose_arena = True
        if memory:
            self.daemon.lose_memory()
        carried = self.world.script.setting.wal or self.daemon.import_path is not None
        self.oracle.arena_lost(carried)
        self.jobs.arena_lost(self.world.schedule.now_ns, wal=carried)
        self.late.lost()
        self.schedules.arena_lost(wal=carried)
        self.readers.judge.arena_lost(wal=carried)
        self.inherited.clear()

    # ---- publications of the daemon ----------------------------------------------------------

    def _tap(self) -> None:
        """Observe all messages that the daemon gives to its notice socket."""
        transport, arena = self.daemon.transport, self._arena
        assert transport is not None
        transport.look = self._look
        publish, send_none = transport.publish, arena.send_none

        def listen(messages: Any) -> int:
            messages = list(messages)
            sent = publish(messages)
            for message in messages:
                namespace, topic = wire.decode_topic_frame(bytes(message.subject))
                if namespace == NAMESPACE:
                    self._published(topic, bytes(message.body))
            return sent

        def look(now_boot_ns: int) -> None:
            self._look()
            send_none(now_boot_ns)

        transport.publish = listen  # type: ignore[method-assign]
        arena.send_none = look

    def _look(self) -> None:
        """Observe notices that readers of the arena may take, and that are in no message."""
        self.world.seam.run(None, self._observe)

    def _late_counts(self) -> Counts:
        """Return the daemon's counts of late timers."""
        arena = self._arena
        metrics, rows = arena.metrics, arena.rows(lib.PG_R_TOPICS, "pg_topic")
        pending = sum(int(rows[row].missed) for row in range(arena.topic_rows))
        return Counts(int(metrics.skipped), int(metrics.coalesced), pending)

    def _observe(self) -> None:
        arena, stream_id = self._arena, self.oracle.stream_id
        for topic, (_, newest) in Reader.newest_sequences(arena, NAMESPACE).items():
            before = self.oracle.newest.get((stream_id, topic), self._sent.get(topic, 0))
            if before < newest:
                for body in Reader.replay(arena, NAMESPACE, topic, before + 1, newest)[1]:
                    self._published(topic, body)
        if self.world.script.setting.late:
            self.late.counted(self._late_counts(), self.world.schedule.now_ns, self._tickets)

    def _tickets(self) -> set[int]:
        """Return the tickets of all armed timers."""
        count = int(self._arena.header.regions[lib.PG_R_HOT].count)
        rows = self._arena.rows(lib.PG_R_HOT, "pg_hot")
        words = (int(rows[row].ctl) for row in range(count))
        return {word >> 8 for word in words if word & 0xFF == lib.PG_S_ARMED}

    def _sent_sequences(self) -> dict[str, int]:
        """Return the newest sequence of each topic that was sent before the daemon started."""
        arena = self._arena
        entries = arena.rows(lib.PG_R_REPLAY_BUFFER, "pg_entry")
        found = {t: newest for t, (_, newest) in Reader.newest_sequences(arena, NAMESPACE).items()}
        for position in range(int(arena.header.published), int(arena.header.replay_tail)):
            entry = entries[position % int(arena.header.replay_capacity)]
            topic = arena.topic_at(entry.topic)
            if topic.namespace_row == arena.namespace_row(NAMESPACE):
                found[topic.name] = min(found[topic.name], int(entry.sequence) - 1)
        return found

    def _published(self, topic: str, body: bytes) -> None:
        self.world.note(topic, body)
        head = wire.decode_notice_head(body)
        wall_ns = self.wall_ns()
        for index, raw in enumerate(wire.decode_notices(body, head.records)):
            ticket, deadline_ns, fired_ns, cause, _, key, payload, missed = raw
            if str(key).startswith("o"):
                _, payload = wire.decode_verdict(payload)
            elif not self.virtual:
                self.oracle.judge_wall(bytes(payload), wall_ns)
            sent = Sent(ticket, str(key), bytes(payload), deadline_ns, fired_ns, cause)
            if self.oracle.published(
                head.stream_id, topic, head.first + index, sent, self.begun_ns, self.now_ns()
            ):
                occurrence = self._occurrence(head.stream_id, topic, sent)
                self._judge_held(occurrence)
                self.schedules.fired(occurrence, wall_ns)
            place = (head.stream_id, topic, head.first + index)
            self.readers.published(place, sent)
            self.jobs.published(
                place, subject_of(key, sent.payload), str(key), deadline_ns + self.begun_ns,
                fired_ns + self.begun_ns,
            )  # fmt: skip
            self._judge_lateness(sent, Fired(
                place, deadline_ns + self.begun_ns, fired_ns + self.begun_ns, missed,
            ))  # fmt: skip

    def _judge_lateness(self, sent: Sent, one: Fired) -> None:
        """Judge the time of a notice."""
        if sent.key.startswith(("k", "r", "s")):
            self.late.fired_timer(one)
        put = self.schedules.puts.get(sent.payload)
        if put is not None and put.settings.every_ns:
            self.late.fired_occurrence(one)
        self.late.fired(self.oracle.timers.get(sent.payload), one)

    def _judge_held(self, one: Occurrence) -> None:
        """Judge an occurrence that fires only once the jobs of earlier ones have ended."""
        keys = self.schedules.waits(one)
        if keys is None:
            return
        found = [
            group.jobs[key.encode()]
            for group in self.jobs.groups.values()
            for key in keys
            if key.encode() in group.jobs
        ]
        still = [
            job for job in found
            if job.required and job.born_ns < one.fired_ns and not job.may_have_ended
        ]  # fmt: skip
        acked_ns = [job.done_ns for job in found if job.done]
        self.schedules.held(one, still[0] if still else None, max(acked_ns, default=0))

    def _occurrence(self, stream: int, topic: str, sent: Sent) -> Occurrence:
        return Occurrence(
            stream, sent.key, sent.payload, topic, sent.deadline_boot_ns + self.begun_ns,
            sent.fired_boot_ns + self.begun_ns,
        )  # fmt: skip

    # ---- answers -------------------------------------------------------------------------------

    def answered(self, call: Call, pending: Any) -> None:
        """Record the result of a single call."""
        word = int(pending.word)
        self.world.note(type(pending.why()).__name__)
        status = IN_DOUBT if pending.error is not None or word == 0 else word & 0xFF
        self.judge(call, status, word >> 8, int(pending.deadline_ns))

    def judge(self, call: Call, status: int, ticket: int, deadline_boot_ns: int) -> None:
        """Pass the result of a call to the oracle."""
        self.world.note(call.kind, call.key, status, ticket)
        deadline_ns = deadline_boot_ns + self.begun_ns
        if status == Status.EXISTS and self.options(call.key).unique_ns and deadline_boot_ns < 0:
            deadline_ns = deadline_boot_ns - self.begun_ns  # the key is unique until then
        self.oracle.answer(call, status, ticket, deadline_ns, self.now_ns())
        if call.durable and status != IN_DOUBT:
            self.durably_answered()
        if status == Status.FULL_GROUP:
            self.jobs.full(deadline_boot_ns)

    def ask(self, client: int, name: str, *, healed: bool = False) -> None:
        """Query the timer of a key. `healed`: all disturbances are over, so an answer must
        arrive."""
        starts, call = (
            self.daemon.starts,
            self.oracle.issue(Call("get", name, self.durable(client))),
        )

        def report(question: Any) -> None:
            try:
                found = question.outcome()
            except PurgatorydError as error:
                if healed and starts == self.daemon.starts:
                    raise Violation(f"{name}: no answer without a disturbance: {error}") from error
                self.judge(call, IN_DOUBT, 0, 0)
                return
            if found is None:
                self.judge(call, Status.UNKNOWN, 0, 0)
            else:
                self.judge(call, found.status, found.ticket, found.deadline_boot_ns)

        self.clients[client].get(name, report)

    def operation_ended(self, operation: Operation, found: Any) -> None:
        """Record that the owner of an operation has received its outcome, or never will."""
        try:
            outcome = found.result(0)
        except PurgatorydError:
            operation.ticket = 0
            return
        self.world.note("outcome", operation.key, outcome.cause)
        self._ended(operation, outcome)

    def _ended(self, operation: Operation, outcome: Outcome) -> None:
        """Judge an outcome in an event of its own, because a client catches exceptions of
        callbacks."""
        cause, now_ns = Cause[outcome.cause.upper()], self.now_ns()
        self.world.schedule.after(0, lambda: self.oracle.ended(operation, cause, now_ns))

    # ---- the end -------------------------------------------------------------------------------

    def heal(self) -> None:
        """End all disturbances."""
        self.finishing = True
        self.end_guests(list(self.guests))
        self.daemon.fuse.left = self.daemon.fuse.signal_left = self.at_durable_answer = None
        self.daemon.thaw()
        self.daemon.doomed_snapshots = 0
        self.daemon.quicken()
        self.let_in()
        for client in self.clients:
            client.thaw()
            client.limit_s = LIMIT_S
        for subscriber in self.subscribers:
            subscriber.thaw()
        self.readers.heal()
        consumers = [one for one in self.consumers if one is not None]
        for one in consumers:
            one.thaw()
        ends = [one.ends for one in self.clients] + [one.ends for one in self.subscribers]
        ends += [one.ends for one in consumers]
        for end in chain(self.operator.ends, *ends):
            end.disturbances.clear()

    def finish(self) -> None:
        """Let all calls, timers and operations end. Raises Violation."""
        until = self.world.until
        until(lambda: self.daemon.alive, "the daemon serves")
        if self.daemon.reaper is not None and self.daemon.reaper.wal.errno:
            self.daemon.stop()
            until(lambda: self.daemon.alive, "the daemon serves again")
        until(lambda: not any(c.alive and c.leaving for c in self.clients), "closed clients end")
        for number in range(CLIENTS):
            self.begin_client(number)
        # A watch may be refused for lack of space until an earlier operation has expired.
        if self.virtual and not self.world.comes_true(self._settled, 60 * S):
            self.advance_far(self.now_ns() + OPERATIONS_END_NS)
        until(self._settled, "all calls have an outcome", OPERATIONS_END_NS)
        until(lambda: all(c.served for c in self.clients), "all clients have a session")
        self._notice_drops()
        self._calm = self.oracle.moment()
        self.dropped.clear()
        self.resume()
        self._set(park_beyond_ns=0)
        self._set(quota_timers=0, quota_ops=0, owner_uid=ANYBODY)
        self.world.pass_time(S)
        self._ask_all()
        self._unpark_all()
        self.world.pass_time(20 * S)

    def _notice_drops(self) -> None:
        """Let each client make a request after the operator's last request.

        Without a request, a client does not notice that the operator has dropped its session.
        """
        until = self.world.until
        until(lambda: not self.operator.unsent, "the operator's requests are sent")
        self.world.pass_time(S)
        asked: list[object] = []
        for number, client in enumerate(self.clients):
            client.get(f"k{number}.0", asked.append)
        until(lambda: len(asked) == len(self.clients), "all clients have an answer")

    def let_in(self) -> None:
        """Let every uid connect again.

        A client that was refused does not try again, so a new process of this client starts.
        """
        client, self.barred = self.barred, None
        if client is None:
            return
        self.daemon.next_uids = EVERY_UID
        self.daemon.stop()
        if self.clients[client].alive:
            self.end_client(client)
        self.begin_client(client)

    def resume(self) -> None:
        """Let a draining daemon accept adds again."""
        if self.draining:
            self.draining = False
            self.operator.ask(lambda n: wire.encode_frame(Message.STOP, 0, n, flags=FLAG_RESUME))

    def _set(self, report: Callable[[wire.Reply], object] = lambda _: None, **changes: int) -> None:
        self.operator.ask(
            lambda n: wire.encode_namespace_set(n, NAMESPACE.encode(), changes), report
        )

    def _ask_all(self) -> None:
        """Query every key, so that the state of no key remains in doubt."""
        until = self.world.until
        for number in range(CLIENTS):
            for name in self.keys_of(number):
                if not self.oracle.key(name).calls:
                    self.ask(number, name, healed=True)
        until(
            lambda: not any(key.calls for key in self.oracle.keys.values()),
            "all keys were asked for",
        )

    def _parked_rows(self) -> list[tuple[str, int, bytes]]:
        """Return the parked rows of bulk loads, each as (key, ticket, payload that the oracle
        expects)."""
        parked: list[tuple[str, int, bytes]] = []
        waiting: set[bytes] = set(self.oracle.rows)

        def report(payload: bytes, row: Row, question: Any) -> None:
            waiting.discard(payload)
            found = question.outcome()
            if found is not None and found.status == Status.PARKED:
                done = self.oracle.bulk_loads.get(row.bulk_load, BulkLoad()).done
                parked.append((row.key, found.ticket, done.get(row.key, payload)))

        for payload, row in self.oracle.rows.items():
            self.clients[0].get(row.key, partial(report, payload, row))
        self.world.until(lambda: not waiting, "all rows were asked for")
        return list({key: (key, ticket, payload) for key, ticket, payload in parked}.values())

    def _settled(self) -> bool:
        return all(not client.unsettled for client in self.clients)

    def _unpark_all(self) -> None:
        parked_rows = self._parked_rows()
        for number, client in enumerate(self.clients):
            rows = [
                (name, timer.ticket, timer.payload)
                for name in self.keys_of(number)
                for timer in self.oracle.key(name).armed
                if timer.parked and timer.ticket
            ]
            rows += parked_rows if number == 0 else []
            if rows:
                client.unpark_many(rows, lambda _: None)
        self.world.until(self._settled, "parked timers came back")

    def advance_far(self, far_ns: int) -> None:
        """Move the virtual clock past every deadline."""
        arrived: list[int] = []

        def again() -> None:
            if not arrived:
                self.operator.ask(
                    lambda n: wire.encode_frame(Message.ADVANCE, 0, n, at_ns=far_ns),
                    lambda reply: arrived.append(reply.error),
                )
                self.world.schedule.after(500 * MS, again)

        again()
        self.world.until(lambda: arrived, "the virtual clock moved")

    def close(self) -> None:
        """End all sessions. Raises Violation if a session, timer or operation remains."""
        until = self.world.until
        until(self._all_ended, "all operations have an outcome")
        now_ns = self.world.schedule.now_ns
        self.oracle.finish(now_ns)
        if self.world.script.setting.late:
            self.late.finish(self._late_counts(), now_ns)
        self.schedules.finish()
        self.check()
        self._check_sessions()
        for client in self.clients:
            client.close()
        until(lambda: all(client.closed for client in self.clients), "all sessions ended")
        self._check_deserted()
        for number in range(CLIENTS):
            self.end_client(number)
        # If the daemon does not watch a client's process, the session ends only after its grace
        # period.
        self.world.pass_time(70 * S)
        for one in self.deliveries:
            one.finish()
        self._check_leaks()

    def _all_ended(self) -> bool:
        return not self.inherited and all(
            real.done for mine in self.operations for operation, real in mine if operation.ticket
        )

    def _check_sessions(self) -> None:
        """Check that connected clients kept their sessions.

        A client that has lost a frame is not checked, because a client without operations does not
        repeat lost frames.
        """
        for number, client in enumerate(self.clients):
            lossy = any(end.lossy for end in client.ends)
            if not lossy and client.session_id not in self._arena.session_ids():
                raise Violation(f"client {number} has lost its session although it was connected")

    def _check_deserted(self) -> None:
        """Check that each client has ended the sessions that it replaced.

        One additional session is allowed for each late copy of a HELLO.
        """
        rows = self._arena.sessions()
        left = wire.decode_sessions(rows, len(rows) // wire.SESSION_INFO.size)
        for number, client in enumerate(self.clients):
            mine = [one.session for one in left if one.pid == client.host.pid]
            if len(mine) > client.repeated_greetings:
                raise Violation(f"client {number} has left sessions open: {mine}")

    def _check_leaks(self) -> None:
        assert self.daemon.reaper is not None
        arena = self.daemon.reaper.arena
        arena.check()  # checks that each blob and each block of rows has an owner
        metrics = arena.metrics
        left = {
            "timers": int(metrics.live),
            "parked": int(metrics.parked),
            "operations": int(metrics.operations),
            "outcomes": int(metrics.outcomes),
            "sessions": len(arena.session_ids()),
            "watch records": arena.watch_fill()["watch_records"],
            "jobs": int(metrics.jobs),
            "schedules": int(metrics.schedules),
            "cursors": int(metrics.cursor_rows),
            "unique keys": int(metrics.unique_keys),
        }
        if any(left.values()):
            raise Violation(f"left over: {left}")

    def die(self) -> None:
        """Release the real resources that the cell uses outside of the simulated world."""
        self.restarts = False
        self.readers.die()
        for client in self.clients:
            client.die()
        for subscriber in self.subscribers:
            subscriber.die()
        for one in (*self.consumers, self.manager):
            if one is not None and one.alive:
                one.die()
        if self.daemon.alive:
            self.daemon.kill()
        self.daemon.lose_memory()
