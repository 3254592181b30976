"""A client process of the world: the real Core, Jobs, Session and Book, without a thread or an
event loop.

SimulatedClient replaces the thread or event loop of a real client. It iterates when a message has
arrived, when a call has been started, and at the time that Jobs requests.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from purgatoryd.clients import jobs, partitions
from purgatoryd.clients.batch import Batch
from purgatoryd.clients.bulk import Bulk, BulkResult
from purgatoryd.clients.bulk_loads import BulkLoad
from purgatoryd.clients.conditions import AnyCondition
from purgatoryd.clients.connection import NEVER_S, Connection
from purgatoryd.clients.core import Core
from purgatoryd.clients.jobs import Job, Jobs, Started, nothing
from purgatoryd.clients.operations import Operation
from purgatoryd.clients.packing import (
    Entry,
    Pending,
    PendingCount,
    PendingEnded,
    PendingFound,
    PendingTrigger,
)
from purgatoryd.clients.purgatory import (
    Owner,
    Watch,
    each_watermark,
    prepare_cancel,
    prepare_extend,
    prepare_trigger,
    prepare_watch,
    watch_rows,
)
from purgatoryd.clients.resume import Resume
from purgatoryd.clients.session import Session, State
from purgatoryd.shm_layout.errors import CallTimeout, PurgatorydError
from purgatoryd.shm_layout.layout import BulkLoadAction, Op
from world.hosts import Machine, SimulatedHost
from world.network import COMMANDS, End, Network, SimulatedChannel
from world.options import NONE, Options

if TYPE_CHECKING:
    from world.schedule import Schedule

ITERATION_NS = 3_000
"""Time from an event to the iteration that it causes."""
LIMIT_S = 5.0
HASTY_S = 0.05
"""Time limit in seconds for each call of an impatient client."""
QUEUE_LIMIT = 4096
SHORT_QUEUE = 8
ROW = ("key", "delay", "topic", "payload")
"""Names of the fields of a row."""
KIND_OF: dict[Op, type[PendingTrigger[Any]]] = {
    Op.CLEAR: PendingFound,
    Op.FORGET: PendingFound,
    Op.CANCEL_FOR_KEY: PendingEnded,
}


def slack_s(key: str) -> float | None:
    """Return the slack of the timers of a key: every third key has 20 ms."""
    return 0.02 if zlib.crc32(key.encode()) % 3 == 0 else None


def tag(key: str) -> str | None:
    """Return the tag of the timers of a key: every second key has one."""
    return f"tag of {key}"[:40] if zlib.crc32(key.encode()) % 2 == 0 else None


class _Unasked:
    """Result of a question that was never sent."""

    def outcome(self) -> Any:
        raise CallTimeout("get", LIMIT_S, 0)


_UNASKED = _Unasked()


class Begun(Started[Any]):
    """A started job of a client. It only counts errors, because the pending calls report the
    results."""

    def __init__(self, job: Job[Any], client: SimulatedClient) -> None:
        super().__init__(job)
        self._client = client

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        super().finish(result, error)
        if error is not None and not isinstance(error, PurgatorydError):
            raise error
        self._client.errors += error is not None


class SimulatedCore(Core):
    """A Core that uses one partition for all keys, so that the cells of a world with shards do not
    share a partition."""

    def __init__(self, *arguments: Any, partition: int | None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._partition = partition

    def partitions(self) -> Iterable[int]:
        numbers = super().partitions()
        return numbers if self._partition is None else [self._partition]


class SimulatedClient:
    """One client process."""

    def __init__(
        self,
        machine: Machine,
        network: Network,
        name: str,
        namespace: str,
        *,
        durable: bool | None,
        uid: int = 0,
        boot_offset_ns: int = 0,
        partition: int | None = None,
        resume: Resume | None = None,
        hasty: bool = False,
        queue_limit: int = QUEUE_LIMIT,
        hidden: bool = False,
        owns: bool = True,
    ) -> None:
        """Start a client. `hidden`: it runs in another pid namespace than the daemon. `owns`: it
        may own operations."""
        self.limit_s = HASTY_S if hasty else LIMIT_S
        self._queue_limit = queue_limit
        self.machine = machine
        self.schedule: Schedule = machine.schedule
        self.host = SimulatedHost(machine, machine.next_pid(), boot_offset_ns)
        self.ends: list[End] = []
        self.alive, self.frozen, self.leaving = True, False, False
        self.thawed_s = 0.0
        """End of the last freeze, on the client's monotonic clock."""
        self.begun = 0
        """Moment (of the oracle) at which the process began."""
        self.errors = 0
        self.options: Callable[[str], Options] = lambda _: NONE
        """Function that returns the options of the timers of a key."""
        self._network = network
        self._uid, self._hidden = uid, hidden
        self._resumes = resume is not None
        self.core = SimulatedCore(
            name, namespace, durable=durable, partition=partition, resume=resume, host=self.host,
            open_channel=self._open_channel,
        )  # fmt: skip
        self.owner = Owner(self.core, self.wake, resume) if owns else None
        self.core.on_connection = self._connected
        self._report_expired: Callable[[], None] = lambda: None
        after, listens = self._speaker()
        self.jobs = Jobs(self.core, after, listens=listens)
        self.unsettled: list[tuple[Pending | BulkResult, Callable[[], None]]] = []
        """Calls without a result, each with the callback that will report the result."""
        self._unpacked: set[Pending | BulkResult] = set()
        """Calls that were abandoned before they were packed."""
        self._iterations = 0
        self._iterates_at_ns: int | None = None
        self._begin(self.jobs.greeted(LIMIT_S))

    def _speaker(self) -> tuple[Callable[[], float], bool]:
        """Return the function that runs in each exchange, and whether this client listens while no
        call waits."""
        return (nothing, False) if self.owner is None else (self.owner.speak, True)

    @property
    def connection(self) -> Connection:
        """The only connection of this client."""
        [connection] = self.core.connections
        return connection

    @property
    def session(self) -> Session:
        """The session of the client's only connection."""
        return self.connection.session

    @property
    def session_id(self) -> int:
        """Id of the client's session; 0 before the first session."""
        return self.session.id if self.core.connections else 0

    def _connected(self, connection: Connection) -> None:
        """Prepare a new connection. Report when the daemon says that the connection's session is
        gone."""
        connection.admit = lambda: None  # type: ignore[method-assign]  # `usable` checks instead
        if self.owner is not None:
            self.owner.own(connection)
        session = connection.session
        expire = session._expire

        def expired(batch: Batch) -> None:
            self._report_expired()
            expire(batch)

        session._expire = expired  # type: ignore[method-assign, assignment]

    def _open_channel(self, endpoint: str, *_: object) -> Any:
        end = End(self.host, self._uid, COMMANDS, hidden=self._hidden)
        end.wake = self.wake
        self.ends.append(end)
        return SimulatedChannel(self._network, end, endpoint)

    # ---- the shell -----------------------------------------------------------------------------

    def wake(self) -> None:
        """Schedule the client's next iteration in ITERATION_NS at the latest."""
        self._iterate_in(ITERATION_NS)

    def _iterate_in(self, delay_ns: int) -> None:
        at_ns = self.schedule.now_ns + delay_ns
        if self._iterates_at_ns is not None and self._iterates_at_ns <= at_ns:
            return
        self._iterates_at_ns = at_ns
        self._iterations += 1
        number = self._iterations
        self.schedule.after(delay_ns, lambda: self._iteration(number))

    def _iteration(self, number: int) -> None:
        if number != self._iterations or not self.alive:
            return
        self._iterates_at_ns = None
        if self.frozen:
            return
        try:
            self.core.try_open()
            self._work()
            self.jobs.iterate()
        except (PurgatorydError, OSError) as error:
            self.jobs.advance(error)
        self._work()
        self._report()
        wake_s = self.jobs.wake_s
        if wake_s != NEVER_S:
            wait_s = wake_s - self.host.monotonic_s()
            self._iterate_in(max(ITERATION_NS, round(wait_s * 1e9) + 1000))

    def _work(self) -> None:
        if self.owner is not None:
            self.owner.work()

    def _report(self) -> None:
        unsettled, self.unsettled = self.unsettled, []
        for call, report in unsettled:
            if call.done or call in self._unpacked:
                report()
            else:
                self.unsettled.append((call, report))

    # ---- calls ---------------------------------------------------------------------------------

    def _begin(self, job: Job[Any]) -> None:
        self.jobs.begin(Begun(job, self))
        self.wake()

    def add(
        self, key: str, report: Callable[[Pending], None], *, topic: str, payload: bytes,
        mode: str, wait: bool, delay_ns: int | None = None, deadline: datetime | None = None,
    ) -> None:  # fmt: skip
        """Add a timer. `report` receives the call as soon as its result is known."""
        options = self.options(key)
        late, unique_ns = options.late, options.unique_ns
        entry = self.core.put(
            key, None, delay_ns, deadline, None, topic, payload, mode, slack_s(key), tag(key),
            options.priority, options.order_key, None if late is None else late.argument,
            None if unique_ns is None else unique_ns / 1e9, collect=not wait,
        )  # fmt: skip
        if wait:
            self._single(entry, report)
        else:
            self.connection.packer.add(entry)
            self._expect(entry.pending, report)
            self.wake()

    def cancel(self, key: str, ticket: int, report: Callable[[Pending], None]) -> None:
        """Cancel a timer."""
        self._single(self.core.cancel(key, ticket, collect=False), report)

    def trigger(self, op: Op, key: str, value: int, report: Callable[[Pending], None]) -> None:
        """Advance, bump, fail, clear or forget a watch key."""
        self._single(
            prepare_trigger(self.core, KIND_OF.get(op, PendingCount), op, key, value), report
        )

    def watch(
        self, key: str, condition: AnyCondition, timeout_s: float, topic: str | None,
        report: Callable[[Pending], None],
    ) -> Operation:  # fmt: skip
        """Arm an operation."""
        assert self.owner is not None
        armed = prepare_watch(self.core, self.owner, Watch(key, condition, timeout_s, b"", topic))
        self._single(armed.entry, report)
        return armed.operation

    def _expect(self, call: Any, report: Callable[[Any], None]) -> None:
        self.unsettled.append((call, lambda: report(call)))

    def _single(self, entry: Entry[Any], report: Callable[[Pending], None]) -> None:
        self._expect(entry.pending, report)
        self._begin(jobs.single(entry, self.limit_s))

    def watch_many(
        self, rows: list[Watch], report: Callable[[int, Pending], None]
    ) -> list[Operation]:
        """Arm many operations. `report` receives (row index, call) for each row."""
        assert self.owner is not None
        armed = watch_rows(self.core, self.owner, rows)
        for number, one in enumerate(armed):
            self._expect(one.entry.pending, partial(report, number))
        self._several([one.entry for one in armed])
        return [one.operation for one in armed]

    def advance_many(
        self, watermarks: list[tuple[str, int]], report: Callable[[int, Pending], None]
    ) -> None:
        """Advance many watch keys, in order. `report` receives (row index, call) for each row."""
        entries = [
            prepare_trigger(self.core, PendingCount, Op.ADVANCE_KEY, key, watermark)
            for key, watermark in each_watermark(watermarks)
        ]
        for number, entry in enumerate(entries):
            self._expect(entry.pending, partial(report, number))
        self._several(entries)

    def _several(self, entries: list[Entry[Any]]) -> None:
        def work() -> Job[None]:
            try:
                yield from jobs.several(self._queue_limit, entries, self.limit_s)
            finally:
                self._unpacked.update(one.pending for one in entries if not one.pending.packed)

        self._begin(work())

    def end(self, operation: Operation) -> None:
        """Cancel an operation."""
        self._single(prepare_cancel(self.core, operation), lambda _: None)

    def extend(self, operation: Operation, timeout_s: float) -> None:
        """Move the deadline of an operation."""
        self._single(prepare_extend(self.core, operation, timeout_s), lambda _: None)

    def add_many(
        self, rows: list[Any], topic: str, mode: str, bulk_load: BulkLoad | None,
        report: Callable[[BulkResult], None], *, wait: bool = True,
    ) -> None:  # fmt: skip
        """Add many timers. Without `wait`, the call ends before the answers have arrived."""
        if any(self.options(key) != NONE for key, *_ in rows):
            rows = [
                {**dict(zip(ROW, row, strict=True)), **self.options(row[0]).arguments}
                for row in rows
            ]
        self._bulk(partitions.puts(self.core, rows, topic, mode, bulk_load), report, wait=wait)

    def cancel_many(self, keys: list[str], report: Callable[[BulkResult], None]) -> None:
        """Cancel many timers."""
        self._bulk(partitions.cancels(self.core, keys, None), report, last=True)

    def unpark_many(self, rows: list[Any], report: Callable[[BulkResult], None]) -> None:
        """Arm parked timers."""
        self._bulk(partitions.unparks(self.core, rows, None), report)

    def _bulk(
        self, bulk: Bulk, report: Callable[[BulkResult], None], *,
        last: bool = False, wait: bool = True,
    ) -> None:  # fmt: skip
        self._expect(bulk.result, report)
        self._begin(jobs.bulk(self._queue_limit, bulk, wait, self.limit_s, last=last))

    def bulk_load(
        self, bulk_load: bytes, action: BulkLoadAction, token: int, answered: Callable[[], None]
    ) -> None:
        """Query the status of a bulk load, or change the bulk load."""
        core, limit_s = self.core, self.limit_s

        def work() -> Job[Any]:
            if action == BulkLoadAction.STATUS:
                yield from jobs.bulk_load_status(core, bulk_load, 0, limit_s)
            elif action == BulkLoadAction.OPEN:
                yield from jobs.bulk_load_opened(core, bulk_load, token, limit_s)
            else:
                yield from jobs.bulk_load(action, core, bulk_load, token, limit_s)
            answered()

        self._begin(work())

    def flush(self, *, raises: bool) -> None:
        """Wait for all answers. With `raises`, raise the unreported refusals; otherwise the next
        flush raises them."""

        def work() -> Job[None]:
            yield from self.jobs.flushed(self.limit_s)
            if raises:
                self.core.raise_reported()

        self._begin(work())

    def get(self, key: str, report: Callable[[Any], None]) -> None:
        """Query a timer. `report` receives the answered question."""
        asked: list[Any] = []

        def ask() -> Any:
            asked.append(self.core.question(self.connection, key))
            return asked[0]

        limit_s = self.limit_s

        def work() -> Job[Any]:
            try:
                yield from jobs.asked(self.connection, ask, "get", limit_s)
            except PurgatorydError:
                report(_UNASKED)
                raise
            report(asked[0])

        self._begin(work())

    def ask(self, job: Job[Any], report: Callable[[Any, PurgatorydError | None], None]) -> None:
        """Run a job. `report` receives (result, error), one of which is None."""

        def work() -> Job[Any]:
            try:
                result = yield from job
            except PurgatorydError as error:
                report(None, error)
                raise
            report(result, None)

        self._begin(work())

    def on_expired(self, report: Callable[[], None]) -> None:
        """Call `report` whenever the daemon says that a session is gone."""
        self._report_expired = report

    # ---- its process ---------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop the process as SIGSTOP does."""
        self.frozen = True

    def thaw(self) -> None:
        """Let the process continue."""
        self.frozen, self.thawed_s = False, self.host.monotonic_s()
        self.wake()

    def close(self) -> None:
        """End the session and the process cleanly."""
        self.leaving = True
        self._begin(self.jobs.closing(self.limit_s))

    @property
    def usable(self) -> bool:
        """True once calls can be made. The constructor of a real client returns only when it has a
        session."""
        if not self.alive or self.leaving or not self.core.connections:
            return False
        if self.session.welcome is None:
            return False
        try:
            self.core.check()
            Connection.admit(self.connection)
        except PurgatorydError:  # the client's shard has not answered for a while
            return False
        return True

    @property
    def served(self) -> bool:
        """True while the client has an open session."""
        return bool(self.core.connections) and self.session.state is State.OPEN

    @property
    def repeated_greetings(self) -> int:
        """Number of HELLOs of this client that arrived as a second or later copy. Each such copy
        may have opened an additional session."""
        return sum(sum(end.greetings.values()) - len(end.greetings) for end in self.ends)

    def want_durable(self, wanted: bool) -> None:
        """Request durable answers, or stop requesting them. A daemon without a WAL refuses each
        batch that requests them."""
        self.core._durable = wanted
        for connection in self.core.connections:
            connection.session._wants_durable = wanted

    @property
    def resumable(self) -> bool:
        """True while a later process can take over the operations of this process."""
        return self._resumes and bool(self.core.connections) and self.session.original

    @property
    def closed(self) -> bool:
        """True once the daemon has answered BYE."""
        states = [one.session.state for one in self.core.connections]
        return self.jobs.ended and states in ([], [State.CLOSED])

    def die(self) -> None:
        """End the process. It sends no BYE, unless the client was closed before."""
        self.alive = False
        if self.jobs.ended:
            self.core.close()
        for end in self.ends:
            end.wake = lambda: None
            connection = end.connection
            if connection is not None and connection.open:
                connection.open = False
                connection.transport.lost(connection)
            end.connection = None
        for one in self.core.connections:
            one.close()
