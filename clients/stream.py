"""Order of notices: find gaps, fill them from the arena, drop duplicates.

This module uses neither socket nor clock: messages go in through take(), notices come out through
pop(). The arena is only read, through `Reader`.

The items of `_todo` are processed in order, so a message waits behind the gap before it:

    Gap      notices that are in the arena, but were not received by this subscriber
    Arrival  a message; turned into notices once the topic's gap is closed

The caller's thread drives a subscriber, and a signal handler may raise there between any two
bytecodes. So each step can be repeated: an Arrival leaves `_todo` once its notices are in `_ready`,
and a notice that is put there twice is recognised by its sequence and dropped. The item that peek()
returns stays the next item until it is stored in `taken`.

If this version cannot read the arena, the subscriber has only the messages. A topic then begins
with the first message that arrives, and a gap is reported as lost, with its range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from purgatoryd.clients.model import Notice
from purgatoryd.clients.notices import Batch, Notices, Part, Run, Taken
from purgatoryd.clients.past import Past
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import Lagged, PurgatorydError
from purgatoryd.shm_layout.follower import Follower, Sleep
from purgatoryd.shm_layout.layout import ArenaState, ClockKind
from purgatoryd.shm_layout.wire import NoticeHead, PastRange

_READY = int(ArenaState.READY)
REPLAY_CHUNK = 65_536  # largest number of notices read from the arena at once

Newest = dict[str, tuple[int, int]]
"""(incarnation, newest sequence) by topic."""


@dataclass(slots=True)
class Position:
    """Progress of delivery in one topic."""

    topic: str
    incarnation: int
    """Incarnation of the topic; 0 = the topic was not in the arena yet."""
    next: int
    """The sequence that must come next."""
    reported: int = 0
    """A reported loss of continuity covers the losses up to this sequence."""
    handed: int = 0
    """The next sequence to hand out; earlier notices were handed out or reported as lost."""
    broken: Lagged | None = None
    """A loss of continuity that is not in `_ready` yet."""
    restarted: bool = False
    """True until the topic's loss of continuity is handed out. Until then `handed` belongs to the
    previous incarnation."""


@dataclass(slots=True)
class Gap:
    """The notices of a topic up to `last`, which have to be read from the arena."""

    position: Position
    last: int
    stream_id: int
    incarnation: int
    """`last` is valid only in this incarnation of the topic and in this stream."""


@dataclass(slots=True)
class Arrival:
    """A message that is not delivered yet. `received_ns` becomes `received_boot_ns` of Notice."""

    position: Position
    head: NoticeHead
    body: bytes
    received_ns: int | None


class Stream:
    """The notices of one namespace, for one subscriber.

    `attach` maps the present arena of the daemon, or raises a PurgatorydError; it returns None if
    there is no arena that can be read here. The stream begins with the notices that come from now
    on; if `whole`, with all notices in the arena. `topics`: None = all topics, including topics
    that are created later. `clock`: CLOCK_BOOTTIME, in ns.
    """

    def __init__(
        self,
        namespace: str,
        topics: Collection[str] | None,
        attach: Callable[[], Reader | None],
        clock: Callable[[], int],
        *,
        whole: bool = False,
        words: int = 0,
        cursor: str | None = None,
        past: Past | None = None,
    ) -> None:
        """`cursor`: begin after the notices that this cursor has committed. `past`: reads notices
        that the replay buffer has dropped. `words`: number of words that a sleep has for the
        arena. look() then finds the notices in the arena, and no messages are needed. 0 = messages
        are needed."""
        self._words = words
        self._cursor = cursor
        self._past = past
        self._committed: dict[str, tuple[int, int]] = {}
        """(incarnation, sequence) of the last commit, by topic."""
        self._final = False
        self._follower: Follower | None = None
        self._namespace = namespace
        self._topics = topics
        self._attach = attach
        self._clock = clock
        self._reader = attach()
        self._positions: dict[str, Position] = {}
        self._todo: deque[Gap | Arrival] = deque()
        self._ready: deque[tuple[Position, Run | Lagged]] = deque()
        self.taken: Taken | None = None
        """The item that was handed out last."""
        self.stream_id = self._reader.stream_id if self._reader else 0
        """Id of the current stream. The last item that pop() returned belongs to it."""
        newest = self._newest_sequences()
        first = self._first_sequences(newest, whole=whole)
        for topic, (incarnation, _) in newest.items():
            self._positions[topic] = Position(topic, incarnation, first[topic])
        for topic in topics or ():
            self._position(topic)
        self._follow_reader()

    def _first_sequences(self, newest: Newest, *, whole: bool) -> dict[str, int]:
        """Return the sequence with which each topic begins."""
        reader = self._reader
        if reader is None or not (whole or self._cursor):
            return {topic: sequence + 1 for topic, (_, sequence) in newest.items()}
        if self._cursor is None:
            carried = reader.carried(self._namespace)
            return {topic: carried.get(topic, 0) + 1 for topic in newest}
        self._committed = reader.committed(self._namespace, self._cursor) or {}
        return {topic: self._committed.get(topic, (0, 0))[1] + 1 for topic in newest}

    def handed(self) -> dict[str, tuple[int, int]]:
        """Return (incarnation, sequence of the newest notice that was handed out or reported as
        lost) by topic, for the topics where it has risen since noted_commit()."""
        handed = {p.topic: p.handed for p in self._positions.values() if not p.restarted}
        taken = self.taken
        if isinstance(taken, Notices | Batch):
            handed |= {run.topic: stop for run, _, stop in taken.parts if run.topic in handed}
        elif isinstance(taken, Notice) and taken.topic in handed:
            handed[taken.topic] = taken.seq + 1
        elif isinstance(taken, Lagged) and taken.topic in handed:
            handed[taken.topic] = max(handed[taken.topic], _end_of(taken))
        found = {t: (self._positions[t].incarnation, end - 1) for t, end in handed.items()}
        return {
            topic: position
            for topic, position in found.items()
            if position[1] > 0 and position != self._committed.get(topic)
        }

    def noted_commit(self, positions: Newest) -> None:
        """Note what the cursor has committed."""
        self._committed |= positions

    @property
    def daemon(self) -> bytes:
        """The uuid of the arena to which the last item of pop() belongs; empty if no arena can be
        read."""
        return self._reader.uuid if self._reader else b""

    @property
    def stuck(self) -> bool:
        """True if there is work that needs the arena, and the arena cannot be read at present;
        pop() tries again."""
        return bool(self._todo)

    @property
    def mapped(self) -> bool:
        """True if an arena can be read."""
        return self._reader is not None

    @property
    def follower(self) -> Follower | None:
        """Finds new notices in the arena; None if the stream needs messages."""
        return self._follower

    @property
    def ready(self) -> bool:
        """False while the mapped arena is not ready, or if it has another stream."""
        return self._current(self.stream_id)

    @property
    def moved(self) -> bool:
        """True if the mapped arena is not ready, or another file has its name."""
        if self._reader is None:
            return False
        with suppress(PurgatorydError):
            return not self.ready or not self._reader.file.has_name
        return True

    @property
    def sleep(self) -> Sleep | None:
        """The words on which to wait for new notices; None if nothing changes them."""
        if self._follower is None or self._final or self.stuck or not self.ready:
            return None
        return self._follower.sleep

    def finish(self) -> bool:
        """End the stream with the notices that remain in the arena, because no daemon will write it
        again. Its successors have the notices that were not handed to the socket. Returns False
        while the arena is being rebuilt."""
        reader = self._reader
        if self._final or reader is None:
            return True
        if reader.state == ArenaState.REBUILDING and reader.file.has_name:
            return False
        self._final = True
        if reader.stream_id == self.stream_id:
            for topic, (incarnation, sequence) in self._wanted(reader.newest_sent).items():
                self._expect(topic, incarnation, sequence)
        return True

    def broken(self) -> list[Lagged]:
        """Return for each topic a Lagged that reports the loss of continuity after the items that
        pop() has returned."""
        return [
            Lagged(self._namespace, position.topic, position.next, 0)
            for position in self._positions.values()
            if position.incarnation
        ]

    def close(self) -> None:
        """Unmap the arena."""
        if self._reader is not None:
            self._reader.close()
        if self._past is not None:
            self._past.close()

    # ---- in ----------------------------------------------------------------------------------

    def take(self, frames: list[bytes]) -> None:
        """Take a message of the socket. Raises ProtocolError."""
        if len(frames) != 2:
            return
        _, topic = wire.decode_topic_frame(frames[0])
        head = wire.decode_notice_head(frames[1])
        self._todo.append(Arrival(self._position(topic), head, frames[1], self._received_ns()))

    def look(self) -> bool:
        """Look in the arena for notices that became visible since the last look. Returns whether
        there are some."""
        if not self._current(self.stream_id) and not self._follow():
            return False
        if (follower := self._follower) is None or self._final:
            return False
        changed = follower.look()
        for one in changed:
            self._expect(one.topic, one.incarnation, one.sequence)
            follower.know(one.row, one.incarnation, one.sequence)
        return bool(changed)

    def compare(self) -> None:
        """Look in the arena for notices that no message has announced."""
        if self._final:
            return
        if not self._current(self.stream_id):
            self._follow()
        for topic, (incarnation, sequence) in self._newest_sequences().items():
            self._expect(topic, incarnation, sequence)

    def _expect(self, topic: str, incarnation: int, sequence: int) -> None:
        """Let the notices of a topic up to `sequence` be read from the arena."""
        position = self._position(topic)
        self._adopt(position, incarnation, sequence)
        self._report(position)
        if sequence >= position.next:
            self._todo.append(self._gap(position, sequence))

    def reconnected(self) -> None:
        """Attach again, because the daemon may have another arena, and look there for notices that
        no message has announced."""
        if not self._final:
            self._follow()
            self.compare()

    # ---- out ---------------------------------------------------------------------------------

    def peek(self) -> Notice | Lagged | None:
        """Return the next notice, or a Lagged with the range lost before it; None if there is no
        such item."""
        item = self._next()
        if not isinstance(item, Run):
            return item
        sequence = max(self._positions[item.topic].handed, item.first)
        return item.notices(sequence, sequence + 1)[0]

    def peek_many(self, most: int) -> Notices | Lagged | None:
        """Return the next notices, at most `most`, up to the next loss; if a loss is next, its
        Lagged; None if there is no item."""
        item = self._next()
        if not isinstance(item, Run):
            return item
        while sum(len(run) for _, run in self._ready if isinstance(run, Run)) < most:
            if not self._todo or not self._work(self._todo[0]):
                break
        parts = self._parts(most)
        # The stream of a cursor may have changed, so that the item is gone.
        return Notices(parts) if parts else self.peek_many(most)

    def _next(self) -> Run | Lagged | None:
        """Return the first item of `_ready` that is not handed out yet; None if there is none."""
        self._settle()
        while True:
            while self._ready:
                position, item = self._ready[0]
                if isinstance(item, Run):
                    if max(position.handed, item.first) < item.end:
                        return item
                elif _pending(item, position):
                    return item
                self._ready.popleft()
            if not self._todo or not self._work(self._todo[0]):
                return None

    def _parts(self, most: int) -> list[Part]:
        parts: list[Part] = []
        handed: dict[str, int] = {}
        for position, run in self._ready:
            if most == 0 or isinstance(run, Lagged):
                break
            start = max(handed.get(run.topic, position.handed), run.first)
            stop = min(run.end, start + most)
            if start < stop:
                parts.append(Part(run, start, stop))
                handed[run.topic] = stop
                most -= stop - start
        return parts

    def _settle(self) -> None:
        """Note the items that were handed out since the last call. This can be repeated until
        `taken` is None."""
        taken = self.taken
        if isinstance(taken, Notices | Batch):
            for run, _, stop in taken.parts:
                self._positions[run.topic].handed = stop
        elif isinstance(taken, Notice):
            self._positions[taken.topic].handed = taken.seq + 1
        elif taken is not None:
            self._lost_one(taken)
        self.taken = None

    def _lost_one(self, taken: Lagged) -> None:
        self._positions[taken.topic].handed = _end_of(taken)
        self._positions[taken.topic].restarted &= taken.last_lost != 0
        if self._ready and self._ready[0][1] is taken:
            self._ready.popleft()

    def pop(self) -> Notice | None:
        """Take the next notice; None if there is none. Raises Lagged for lost notices."""
        item = self.peek()
        self.taken = item
        if isinstance(item, Lagged):
            raise item
        return item

    def _work(self, item: Gap | Arrival) -> bool:
        """Process the first item of `_todo`. Returns False if that is not possible at present."""
        return self._fill(item) if isinstance(item, Gap) else self._arrive(item)

    def _arrive(self, arrival: Arrival) -> bool:
        head, position = arrival.head, arrival.position
        if not self._same_stream(head):
            self._todo.popleft()
            return True
        if self._reader is None and position.incarnation == 0:
            position.next = head.first if head.records else head.tail + 1
        behind = head.first - 1 if head.records else head.tail
        self._adopt(position, head.incarnation, behind)
        if behind >= position.next:
            self._todo.appendleft(self._gap(position, behind))
            return True
        if head.records:
            self._deliver(position, head, arrival.body, arrival.received_ns)
        self._todo.popleft()
        return True

    def _gap(self, position: Position, last: int) -> Gap:
        return Gap(position, last, self.stream_id, position.incarnation)

    def _is_over(self, gap: Gap) -> bool:
        position = gap.position
        same = (gap.stream_id, gap.incarnation) == (self.stream_id, position.incarnation)
        return not same or gap.last < position.next

    def _fill(self, gap: Gap) -> bool:
        """Close a gap, at most REPLAY_CHUNK notices at a time."""
        position = gap.position
        if not self._is_over(gap) and not self._current(self.stream_id) and not self._follow():
            return False
        if self._is_over(gap):
            self._todo.popleft()
            return True
        if self._reader is None:
            self._lose(position, gap.last)
            return True
        first, last = position.next, min(gap.last, position.next + REPLAY_CHUNK - 1)
        if self._past is not None and self._past.waits_for(self._range(position, gap.last)):
            return self._fill_past(self._past, position, gap.last)
        epoch = self._reader.epoch
        lost_until, bodies = self._reader.replay(self._namespace, position.topic, first, last)
        if not self._current(self.stream_id) or self._reader.epoch != epoch:
            return False  # read during a rebuild of the arena: the result is not reliable
        if self._past is not None and lost_until >= first:
            return self._fill_past(self._past, position, gap.last)
        for body in bodies:
            head = wire.decode_notice_head(body)
            self._lose(position, head.first - 1)
            self._deliver(position, head, body, self._received_ns())
        self._lose(position, lost_until)
        return position.next > first

    def _range(self, position: Position, last: int) -> PastRange:
        return PastRange(
            self._namespace, position.topic, self.stream_id, position.incarnation, position.next,
            last,
        )  # fmt: skip

    def _fill_past(self, past: Past, position: Position, last: int) -> bool:
        """Take the next page of past notices. Return False if it is not there yet."""
        first = position.next
        page = past.page(self._range(position, last))
        if page is None:
            return False
        self._lose(position, min(page.lost_until, last))
        head = wire.decode_notice_head(page.body) if page.body else None
        if head is not None and head.records:
            self._deliver(position, head, page.body, None)
        return position.next > first

    def _deliver(
        self, position: Position, head: NoticeHead, body: bytes, received_ns: int | None
    ) -> None:
        """Append the new notices of a message to `_ready`. No gap may precede the message."""
        skip = position.next - head.first
        if skip >= head.records:
            return
        self._report(position)
        run = Run(self._namespace, position.topic, head, body, received_ns)
        run.first = position.next
        self._ready.append((position, run))
        position.next = head.first + head.records

    def _lose(self, position: Position, until: int) -> None:
        if until < position.next:
            return
        self._report(position)
        first = max(position.next, position.reported + 1)
        if first <= until:
            lost = Lagged(self._namespace, position.topic, first, until)
            self._ready.append((position, lost))
        position.next = until + 1

    def _received_ns(self) -> int | None:
        """Return the time of receipt; None under the virtual clock, or if the clock is unknown."""
        if self._reader is None or int(self._reader.header.clock_kind) == ClockKind.VIRTUAL:
            return None
        return self._clock()

    # ---- streams -------------------------------------------------------------------------------

    def _newest_sequences(self) -> Newest:
        return self._wanted(self._reader.newest_sequences) if self._reader else {}

    def _wanted(self, newest: Callable[[str], Newest]) -> Newest:
        found = newest(self._namespace)
        return {t: v for t, v in found.items() if self._topics is None or t in self._topics}

    def _position(self, topic: str) -> Position:
        position = self._positions.get(topic)
        if position is None:
            position = self._positions[topic] = Position(topic, 0, 1)
        return position

    def _current(self, stream_id: int) -> bool:
        """True if the mapped arena is READY and has this stream, or if no arena can be read. Always
        true after finish()."""
        if self._reader is None or self._final:
            return True
        header = self._reader.header
        return bool(header.state == _READY and header.stream_id == stream_id)

    def _follow(self) -> bool:
        """Map the daemon's present arena. Returns False while no arena is ready."""
        try:
            reader = self._attach()
        except PurgatorydError:
            return False
        before, self._reader = self._reader, reader
        self._follow_reader()
        if before is not None:
            before.close()
        if reader is not None and reader.stream_id != self.stream_id:
            self._break(reader.stream_id)
        return True

    def _follow_reader(self) -> None:
        if self._words and self._reader is not None:
            self._follower = Follower(self._reader, self._namespace, self._topics, self._words)
        else:
            self._follower = None

    def _same_stream(self, head: NoticeHead) -> bool:
        """Return False for a message of an earlier stream."""
        if head.stream_id != self.stream_id:
            self._follow()
        if self._reader is None and head.stream_id != self.stream_id:
            self._break(head.stream_id)
        return head.stream_id == self.stream_id

    def _break(self, stream_id: int) -> None:
        """Report a loss of continuity for every topic, and continue with the new stream. This loss
        covers all notices that the new stream has sent so far. Later losses are reported again."""
        newest = self._newest_sequences()
        if not self._continue(newest):
            for position in self._positions.values():
                self._restart(position, 0, newest.get(position.topic, (0, 0))[1])
            self._skip_carried()
        self.stream_id = stream_id

    def _skip_carried(self) -> None:
        """Begin after the notices that were sent in the previous stream."""
        if self._reader is not None:
            for topic, carried in self._reader.carried(self._namespace).items():
                if self._topics is None or topic in self._topics:
                    self._position(topic).next = carried + 1

    def _continue(self, newest: Newest) -> bool:
        """Begin the new stream after the notices that the cursor has committed in it. The others
        come again. Returns False if there is no such cursor."""
        reader, cursor = self._reader, self._cursor
        if reader is None or cursor is None:
            return False
        if reader.committed(self._namespace, cursor) is None:
            return False
        self._ready.clear()
        self.taken = None
        first = self._first_sequences(newest, whole=False)
        for topic in {*self._positions, *newest}:
            position = self._position(topic)
            position.incarnation, position.next = newest.get(topic, (0, 0))[0], first.get(topic, 1)
            position.reported = position.handed = 0
            position.broken, position.restarted = None, False
        return True

    def _adopt(self, position: Position, incarnation: int, sent: int) -> None:
        if position.incarnation == 0:
            position.incarnation = incarnation
        elif position.incarnation != incarnation:
            self._restart(position, incarnation, sent)

    def _restart(self, position: Position, incarnation: int, sent: int) -> None:
        """Begin again with the first notice of a topic. `sent`: number of notices of the topic that
        were already sent."""
        broken = position.broken
        if position.incarnation:
            position.restarted = True
            broken = Lagged(self._namespace, position.topic, position.next, 0)
        position.incarnation, position.next, position.reported, position.broken = (
            incarnation, 1, sent, broken,
        )  # fmt: skip
        self._report(position)

    def _report(self, position: Position) -> None:
        """Append the topic's loss of continuity to `_ready`, behind the notices before it."""
        if (broken := position.broken) is not None:
            if not any(item is broken for _, item in self._ready):
                self._ready.append((position, broken))
            position.broken = None


def _end_of(lagged: Lagged) -> int:
    """Return the sequence after a loss; 1 after a loss of continuity."""
    return lagged.last_lost + 1


def _pending(lagged: Lagged, position: Position) -> bool:
    return _end_of(lagged) > position.handed or _end_of(lagged) == 1
