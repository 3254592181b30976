"""Subscribers with cursors: the real Inbox and CursorSteps, whose processes compete for cursors.

The connection to the process that serves past notices is not simulated. Its pages are the real
ones: they read the arena, and a copy of the files of the simulated WAL.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from purgatoryd.clients import jobs
from purgatoryd.clients.cursors import CursorOptions, CursorSteps
from purgatoryd.clients.jobs import Job
from purgatoryd.clients.model import Notice
from purgatoryd.clients.subscriber import Inbox
from purgatoryd.daemon.replay_server import Pages, Refused
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import (
    CursorHeld,
    CursorRefused,
    Lagged,
    PurgatorydError,
    WalError,
)
from purgatoryd.shm_layout.layout import CursorAction, CursorRefusal, WireError
from purgatoryd.shm_layout.wal import SEGMENT, SNAPSHOT, Walk
from purgatoryd.shm_layout.wire import Committed, PastPage, PastRange
from world.clients import LIMIT_S, SimulatedClient
from world.cursors import CursorOracle, Holder, Positions
from world.network import Disturbance
from world.oracle import Sent, Violation
from world.script import MS, READERS, S
from world.subscribers import RETRY_NS, SimulatedSubscriber

if TYPE_CHECKING:
    from world.cell import Cell

CURSORS: tuple[tuple[str, list[str] | None], ...] = (("every", None), ("one", ["a"]))
"""The cursors of a cell: names and topics."""
PAGE_NS = 2 * MS
"""Time from the request of a page of past notices to its arrival."""
GRACE_NS = 90 * S
"""Longest time for which a daemon keeps the session of a process that has ended."""
RELEASE_NS = 5 * S
"""Time within which a cursor whose process has ended can be opened."""
AUTO = 7
"""Number of notices after which a process with automatic commits commits."""
HIDDEN_S = 50
"""A machine that was suspended for longer may have ended sessions."""


class _Pending(Exception):
    """A page waits for the disk."""


class _Pages(Pages):
    """Pages that do not wait for the disk: the request is repeated."""

    def _sleep(self, _: float) -> None:
        raise _Pending


class PastServer:
    """The process that serves past notices of one daemon process."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._copies: dict[str, bytes] = {}
        self._folder: Path | None = None
        wal_dir = cell.daemon.config.wal_dir
        if wal_dir:
            self._wal = Path(wal_dir) / cell.daemon.config.name
            self._folder = cell.world.directory / f"past{cell.number}.{cell.daemon.starts}"
            self._folder.mkdir(exist_ok=True)
        self._pages = _Pages(cell.daemon.paths.arena, self._folder, cell.world.host())

    def page(self, asked: PastRange) -> PastPage | None:
        """Return a page; None = there is no answer so far."""
        self._copy()
        try:
            return wire.decode_replay(self._pages.page(asked))
        except Refused as refusal:
            if refusal.error == WireError.CURSOR:
                return PastPage(asked.last, asked.last + 1, b"")
        except (_Pending, PurgatorydError, OSError):
            pass
        return None

    def _copy(self) -> None:
        """Copy the changed files of the simulated WAL to the real folder."""
        if self._folder is None:
            return
        files = self._cell.world.disk.folder(self._wal).now
        for name in self._copies.keys() - files.keys():
            (self._folder / name).unlink()
            del self._copies[name]
        for name, file in files.items():
            data = bytes(file.now)
            if self._copies.get(name) != data:
                path = self._folder / name
                with path.open("r+b" if name in self._copies else "wb") as opened:
                    opened.write(data)
                self._copies[name] = data


class SimulatedPast:
    """The past notices of one subscriber, as clients/past.py asks for them."""

    def __init__(self, cell: Cell, wake: Callable[[int], None]) -> None:
        self._cell, self._wake = cell, wake
        self._asked: PastRange | None = None
        self._at_ns = 0

    def waits_for(self, asked: PastRange) -> bool:
        return self._asked == asked

    def page(self, asked: PastRange) -> PastPage | None:
        now_ns = self._cell.world.schedule.now_ns
        if self._asked != asked:
            self._asked, self._at_ns = asked, now_ns + PAGE_NS
            self._wake(PAGE_NS)
        if now_ns < self._at_ns:
            return None
        found = self._cell.readers.past(asked)
        if found is None:
            self._at_ns = now_ns + PAGE_NS
            self._wake(PAGE_NS)
        else:
            self._asked = None
        return found

    def close(self) -> None:
        pass


class _Hold(CursorSteps):
    """The hold of a cursor, whose commits do not wait."""

    def __init__(self, reader: SimulatedReader) -> None:
        self._reader = reader
        super().__init__(
            reader.client.core, reader.topics, reader.holder.cursor.name, LIMIT_S, self._run
        )

    def _run(self, work: Callable[[], None]) -> None:
        work()
        self._reader.client.wake()

    def _question(self, action: CursorAction, topics: Committed, stream_id: int) -> Any:
        """Make a question. An answer to a renewal names the holder of the cursor."""
        question = super()._question(action, topics, stream_id)
        settle, cuts = question.query.settle, self._reader.judge.cuts

        def settled(reply: Any) -> None:
            settle(reply)
            if action is CursorAction.OPEN:
                self._reader.answered(question, cuts)

        question.query.settle = settled
        return question

    def commit(self, stream_id: int, positions: Committed) -> bool:
        """Begin a commit. Its answer comes later, so the stream does not note it at once."""
        self._reader.begin_commit(stream_id, positions)
        return False

    def close(self) -> None:
        """Do nothing: the process ends its session itself."""

    drop = close


class SimulatedReader(SimulatedSubscriber):
    """A subscriber process with a cursor."""

    def __init__(
        self, cell: Cell, number: int, cursor: int, *, durable: bool, local: bool, auto: bool
    ) -> None:
        self.client: SimulatedClient
        name, self.topics = CURSORS[cursor]
        self.cell, self.number = cell, number
        self.judge: CursorOracle = cell.readers.judge
        self.holder: Holder = self.judge.begins(self.judge.cursor(name, self.topics), number)
        self.durable, self._auto = durable, auto
        self.leaving = self.opened_cursor = False
        self.failed: PurgatorydError | None = None
        self._commits = False
        self._left = AUTO
        self._begun_cuts = self.judge.cuts
        self._hold: _Hold | None = None
        world = cell.world
        self.client = SimulatedClient(
            world.machine, world.network, "w", wire_namespace(), durable=durable,
            partition=cell.partition, owns=False,
        )  # fmt: skip
        self.client.on_expired(self._expired)
        cell.daemon.pids.add(self.client.host.pid)
        super().__init__(
            world.machine, world.network, cell.daemon.config.name, wire_namespace(), self.topics,
            self._taken, local=local,
        )  # fmt: skip
        self._ask_to_open()

    # ---- the cursor ----------------------------------------------------------------------------

    def _ask_to_open(self) -> None:
        self.client.ask(self._opening(), self._judged(self._answered))

    def _opening(self) -> Job[None]:
        yield from self.client.jobs.greeted(LIMIT_S)
        self._begun_cuts = self.judge.cuts
        self._hold = _Hold(self)
        yield from self._hold.opening()

    def _answered(self, _: Any, error: PurgatorydError | None) -> None:
        if error is None:
            self.opened_cursor = True
            self._open()
        else:
            self._fails(error)

    def answered(self, question: Any, cuts: int) -> None:
        """Judge the answer to an OPEN that was sent after `cuts` losses of the arena."""
        if not self.alive or self.leaving:
            return
        try:
            positions = {topic: found for topic, (_, found) in question.outcome().items()}
        except CursorHeld:
            self._judged(self.judge.held)(self.holder, self.schedule.now_ns, GRACE_NS)
        except PurgatorydError:
            pass
        else:
            self._judged(self.judge.opened)(self.holder, positions, cuts)

    def _judged(self, report: Callable[..., None]) -> Callable[..., None]:
        """Let a violation in a report end the world."""

        def reported(*arguments: Any, **named: Any) -> None:
            try:
                report(*arguments, **named)
            except Violation as violation:
                self.cell.violated(violation)

        return reported

    def _expired(self) -> None:
        """Record that the daemon has ended the session. It needs a reason."""
        cut = self.judge.cuts > self._begun_cuts
        suspended = self.machine.suspended_ns >= HIDDEN_S * S
        if not (cut or suspended or self.leaving or self.cell.finishing):
            raise Violation(f"{self.holder} has lost its session without a reason")
        self.judge.released(self.holder)

    def _fails(self, error: PurgatorydError) -> None:
        """End the process because of an error, as a program that does not handle it."""
        self.failed = error
        self.cell.world.note("reader", self.number, type(error).__name__)
        self.schedule.after(0, self.die)

    # ---- commits -------------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit what was handed out, unless a commit waits for its answer."""
        if self.reads and not self._commits and self.inbox is not None:
            with suppress(PurgatorydError):
                self.inbox.commit()

    def begin_commit(self, stream_id: int, positions: Committed) -> None:
        """Send a commit, and judge its answer."""
        assert self._hold is not None
        chosen = {topic: sequence for topic, (_, sequence) in positions.items()}
        self._judged(self.judge.committing)(self.holder, chosen)
        self._commits = True
        report = partial(self._committed, stream_id, positions, chosen, self.judge.cuts)
        self.client.ask(self._hold.committing(stream_id, positions), self._judged(report))

    def _committed(
        self, stream_id: int, positions: Committed, chosen: Positions, cuts: int,
        done: bool | None, error: PurgatorydError | None,
    ) -> None:  # fmt: skip
        self._commits = False
        self.cell.world.note("commit", self.number, done, type(error).__name__)
        unknown = isinstance(error, CursorRefused) and error.detail[0] == CursorRefusal.UNKNOWN
        if done:
            durable = self.cell.readers.is_durable(self)
            self.judge.committed(self.holder, chosen, cuts, durable=durable)
            if durable:
                self.cell.durably_answered()
            if self.inbox is not None and self.inbox._stream.stream_id == stream_id:
                self.inbox._stream.noted_commit(dict(positions))
        elif error is None:
            self.judge.stale(self.holder, chosen, stream_id)
        elif unknown:
            self.judge.unknown(self.holder, chosen, cuts)
        else:
            self.judge.failed(self.holder, chosen)
        if isinstance(error, CursorRefused):
            self._fails(error)

    # ---- notices -------------------------------------------------------------------------------

    def _open(self) -> None:
        if not self.opened_cursor or not self.alive or self.inbox is not None:
            return
        name, namespace, topics = self._arguments
        options = CursorOptions(self.holder.cursor.name, self.durable, LIMIT_S, "auto")
        try:
            self.inbox = Inbox(
                name, namespace, topics, 1000, None, host=self._host, subscribe=self._subscribe,
                local=self._local, cursor=options, open_cursor=self._given, open_past=self._past,
            )  # fmt: skip
        except PurgatorydError:
            self.schedule.after(RETRY_NS, self._open)
            return
        self.judge.sees(self.holder, self.inbox._stream.stream_id)
        self.wake()

    def _given(self, *_: object) -> Any:
        return self._hold

    def _past(self, _: object) -> Any:
        return SimulatedPast(self.cell, self._look_in)

    def _look(self, number: int) -> None:
        if number != self._looks or not self.alive:
            return
        try:
            super()._look(number)
        except CursorRefused as error:
            self._fails(error)
        if self.inbox is not None and not self.frozen:
            self.judge.sees(self.holder, self.inbox._stream.stream_id)

    def _taken(self, item: Notice | Lagged) -> None:
        assert self.inbox is not None
        stream = self.inbox._stream.stream_id
        self.cell.readers.takes(self.holder, stream, item)
        self._left -= 1
        if self._auto and self._left <= 0:
            self._left = AUTO
            self.commit()

    # ---- the process ---------------------------------------------------------------------------

    @property
    def reads(self) -> bool:
        """True while the process has its inbox."""
        return self.alive and self.inbox is not None and not (self.leaving or self.frozen)

    def freeze(self) -> None:
        super().freeze()
        self.client.freeze()

    def thaw(self) -> None:
        self.client.thaw()
        super().thaw()

    def close(self) -> None:
        """End the session, and then the process."""
        self.leaving = True
        self.judge.leaving(self.holder)
        self.client.close()
        self.schedule.after(S, self.die)

    def die(self) -> None:
        if not self.alive:
            return
        super().die()
        self.judge.ended(self.holder, self.schedule.now_ns)
        self.client.die()
        self.cell._end_process(self.client)


def wire_namespace() -> str:
    """Return the namespace of all subscribers."""
    from world.cell import NAMESPACE  # imported here because cell.py imports this module

    return NAMESPACE


class Readers:
    """The subscribers with cursors of one cell, and their judge."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self.judge = CursorOracle(lambda: cell.oracle.stream_id)
        self.seats: list[SimulatedReader | None] = [None] * READERS
        self._server: tuple[int, PastServer] | None = None
        self._numbers = 0
        self._overflowed = False
        """True once a replay buffer may have dropped notices."""

    def begin(self, seat: int, cursor: int, **options: bool) -> None:
        """Start a subscriber, unless one runs in its place."""
        one = self.seats[seat]
        if one is None or not one.alive:
            self._numbers += 1
            self.seats[seat] = SimulatedReader(self._cell, self._numbers, cursor, **options)

    def is_durable(self, reader: SimulatedReader) -> bool:
        """Return whether a subscriber's commits are answered once they are on disk."""
        setting = self._cell.world.script.setting
        return setting.wal and (setting.durable_namespace or reader.durable)

    def living(self) -> Iterator[SimulatedReader]:
        """Yield the running subscribers."""
        yield from (one for one in self.seats if one is not None and one.alive)

    def die(self) -> None:
        """End all processes."""
        for one in self.living():
            one.die()

    # ---- notices -------------------------------------------------------------------------------

    def published(self, place: tuple[int, str, int], sent: Sent) -> None:
        """Record a notice that the daemon sent."""
        position = 0
        if self._cell.world.script.setting.readers and place not in self.judge.sent:
            position = self._cell.world.seam.run(None, partial(self._position, *place[1:]))
        self.judge.published(place, sent, position)

    def _position(self, topic: str, sequence: int) -> int:
        """Return the position of a notice in the replay buffer; 0: it is not there."""
        arena = self._cell._arena
        header, entries = arena.header, arena.rows(lib.PG_R_REPLAY_BUFFER, "pg_entry")
        capacity = int(header.replay_capacity)
        for position in reversed(range(int(header.replay_head), int(header.replay_tail))):
            entry = entries[position % capacity]
            if int(entry.sequence) == sequence and arena.topic_at(entry.topic).name == topic:
                return position
        return 0

    def takes(self, holder: Holder, stream: int, item: Notice | Lagged) -> None:
        """Judge an item that a subscriber takes."""
        if isinstance(item, Lagged):
            self._cell.world.note("lagged", holder.number, item.topic, item.last_lost)
            self.judge.lagged(
                holder, stream, item.topic, item.first_lost, item.last_lost,
                partial(self._exists, holder),
            )  # fmt: skip
            return
        sent = Sent(
            item.ticket, str(item.key), item.payload, item.deadline_boot_ns, item.fired_boot_ns,
            int(item.cause),
        )  # fmt: skip
        self._cell.world.note("read", holder.number, item.topic, item.seq, item.ticket)
        self.judge.received(holder, stream, item.topic, item.seq, sent)

    def past(self, asked: PastRange) -> PastPage | None:
        """Return a page of past notices; None = there is no answer so far."""
        daemon = self._cell.daemon
        if not daemon.alive or daemon.frozen:
            return None
        if self._server is None or self._server[0] != daemon.starts:
            try:
                self._server = daemon.starts, PastServer(self._cell)
            except PurgatorydError:
                return None
        page: PastPage | None = self._cell.world.seam.run(
            None, partial(self._server[1].page, asked)
        )
        return page

    def ending(self, arena: Any) -> None:
        """Look whether the replay buffer of an arena, which may be lost next, has dropped
        notices."""
        oracle = self._cell.oracle
        full = int(arena.header.replay_tail) > oracle.least.replay_capacity
        self._overflowed |= full or oracle._may_be_short()

    def _exists(self, holder: Holder, topic: str, first: int, last: int) -> int | None:
        """Return the first notice of a range that the replay buffer has or should have, or that the
        WAL has; None if all are lost. No notice is lost unless a replay buffer was full, or a file
        was damaged."""
        cell = self._cell
        if not cell.daemon.alive:
            return None
        cell.world.seam.run(None, partial(self.ending, cell._arena))
        if not (self._overflowed or cell.rotten or cell.rots):
            return first
        replay = partial(Reader.replay, cell._arena, wire_namespace(), topic, first, last)
        for body in cell.world.seam.run(None, replay)[1]:
            return wire.decode_notice_head(body).first
        oldest = int(cell._arena.header.replay_tail) - cell.oracle.least.replay_capacity
        for sequence in () if cell.oracle._may_be_short() else range(first, last + 1):
            if self.judge.is_safe(holder.cursor, topic, sequence, oldest):
                return sequence
        if cell.daemon.config.wal_dir and not (cell.rotten or cell.rots):
            return min(self._in_wal(topic, range(first, last + 1)), default=None)
        return None

    def _in_wal(self, topic: str, wanted: range) -> set[int]:
        """Return the sequences of a topic that the records of the WAL contain. A notice needs two
        records: that of its firing, and an earlier one with its payload."""
        cell = self._cell
        find = partial(Reader.topic_row, cell._arena, wire_namespace(), topic)
        row = cell.world.seam.run(None, find)
        folder = cell.world.disk.folder(Path(cell.daemon.config.wal_dir) / cell.daemon.config.name)
        fired: dict[int, int] = {}
        tickets: set[int] = set()
        for name in sorted(name for name in folder.now if name.endswith((SEGMENT, SNAPSHOT))):
            for frame in _frames(Path(name), bytes(folder.now[name].now)):
                fields = frame.fields
                if frame.kind in ("arm", "unpark", "watch") and fields.get("payload_len", 1):
                    tickets.add(fields["ticket"])
                fires = frame.kind in ("fire", "entry") or fields.get("position")
                if name.endswith(SEGMENT) and fires and fields.get("topic") == row:
                    fired[fields.get("sequence", 0)] = fields.get("ticket", 0)
                    tickets |= {fields["ticket"]} if frame.kind == "entry" else set()
        return {one for one in fired if one in wanted and fired[one] in tickets}

    # ---- the end -------------------------------------------------------------------------------

    def heal(self) -> None:
        """End all disturbances."""
        for one in self.living():
            one.thaw()
            for end in (*one.client.ends, *one.ends):
                end.disturbances.clear()

    def finish(self) -> None:
        """Judge each cursor at the end. A process opens it soon after the last one has ended,
        receives all notices that were not committed, and commits them; the next one receives
        none."""
        for number, (name, _) in enumerate(CURSORS):
            if name in self.judge.cursors:
                self._finish(number)
        for name in sorted(self.judge.cursors):
            self._delete(name)

    def _finish(self, cursor: int) -> None:
        until = self._cell.world.until
        one = self._next(cursor)
        until(lambda: self.judge.caught_up(one.holder), f"{one.holder} has caught up")
        one.commit()
        until(lambda: not one.holder.commits, f"{one.holder} has committed")
        self.judge.finish(one.holder)
        last = self._next(cursor)
        self._cell.world.pass_time(S)
        if last.holder.notices or last.holder.lost:
            raise Violation(f"{last.holder} has received committed notices")
        last.die()

    def _next(self, cursor: int) -> SimulatedReader:
        """Let a cursor have one process, once the others have ended."""
        self.die()
        self._cell.world.pass_time(100 * MS)
        self.begin(0, cursor, durable=False, local=bool(cursor), auto=False)
        one = self.seats[0]
        assert one is not None
        if not self._cell.world.comes_true(lambda: one.reads, RELEASE_NS):
            raise Violation(f"{one.holder} cannot open the cursor: {one.failed}")
        return one

    def _delete(self, name: str) -> None:
        manager = SimulatedClient(
            self._cell.world.machine, self._cell.world.network, "w", wire_namespace(),
            durable=False, partition=self._cell.partition, owns=False,
        )  # fmt: skip
        self._cell.daemon.pids.add(manager.host.pid)
        answers: list[object] = []

        def work() -> Job[None]:
            yield from manager.jobs.greeted(LIMIT_S)
            yield from jobs.cursor_deleted(manager.core, manager.core.cursor_name(name), LIMIT_S)

        manager.ask(work(), lambda _, error: answers.append(error))
        self._cell.world.until(lambda: answers, "a cursor is deleted")
        if answers[0] is not None:
            raise Violation(f"cursor {name} is not deleted: {answers[0]}")
        manager.die()
        self._cell._end_process(manager)


def _frames(path: Path, data: bytes) -> Iterator[Any]:
    """Yield the records of a file of the WAL, as far as they are whole."""
    walk = Walk()
    with mmap.mmap(-1, len(data)) as aligned, suppress(WalError):
        aligned.write(data)
        with ffi.from_buffer(aligned) as memory:
            walk.enter(path, memory)
            yield from walk.frames()


# ---- steps -------------------------------------------------------------------------------------


def _reader(cell: Cell, seat: int) -> SimulatedReader | None:
    one = cell.readers.seats[seat]
    return one if one is not None and one.alive else None


def read_cursor(cell: Cell, seat: int, cursor: int, durable: bool, local: bool, auto: bool) -> None:
    """Start a subscriber with a cursor, unless one runs in its place."""
    durable &= cell.world.script.setting.wal
    cell.readers.begin(seat, cursor, durable=durable, local=local, auto=auto)


def commit_cursor(cell: Cell, seat: int) -> None:
    """Commit what a subscriber has taken."""
    if (one := _reader(cell, seat)) is not None:
        one.commit()


def kill_reader(cell: Cell, seat: int, commits: bool) -> None:
    """Kill a subscriber with a cursor. `commits`: just after it has sent a commit."""
    if (one := _reader(cell, seat)) is not None:
        cell.world.faults["client"] += 1
        if commits:
            one.commit()
            cell.world.pass_time(5_000)
        one.die()


def close_reader(cell: Cell, seat: int) -> None:
    """Let a subscriber with a cursor end its session."""
    one = _reader(cell, seat)
    if one is not None and one.client.usable and not one.leaving:
        one.close()


def freeze_reader(cell: Cell, seat: int, span_ns: int) -> None:
    """Stop a subscriber with a cursor for a while."""
    if (one := _reader(cell, seat)) is not None:
        cell.world.faults["client"] += 1
        one.freeze()
        cell.world.schedule.after(span_ns, one.thaw)


def break_reader(cell: Cell, seat: int) -> None:
    """Break the connections of a subscriber with a cursor."""
    one = _reader(cell, seat)
    for end in (*one.client.ends, *one.ends) if one is not None else ():
        cell.world.faults["message"] += 1
        cell.world.network.break_connection(end)


def disturb_reader(cell: Cell, seat: int, kind: str, frames: int, delay_ns: int) -> None:
    """Disturb the next frames of a subscriber with a cursor."""
    one = _reader(cell, seat)
    for end in (*one.client.ends, *one.ends) if one is not None else ():
        end.disturbances.append(Disturbance(kind, frames, delay_ns))


STEPS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        read_cursor, commit_cursor, kill_reader, close_reader, freeze_reader, break_reader,
        disturb_reader,
    )
}  # fmt: skip
