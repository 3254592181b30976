"""The judge of cursors: it judges positions, holders, and the notices that subscribers receive.

A position is the sequence of the newest committed notice of a topic. A subscriber begins after it,
and again after the loss of an arena.

    sure        the position that an answer has confirmed
    durable     the position that a power cut cannot undo
    most        the highest position that a commit has sent

An exact start is known if no commit is without an answer; otherwise a start is between the position
that is sure and the highest one that was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from world.oracle import Sent, Violation

Positions = dict[str, int]
"""Sequence of the newest committed notice, by topic."""


@dataclass
class Position:
    """The known facts about the position of a cursor in one topic."""

    sure: int = 0
    durable: int = 0
    most: int = 0


@dataclass
class Progress:
    """Progress of one subscriber in one topic."""

    next: int
    """Sequence that the next notice must have; 0 = any that the cursor allows."""


@dataclass(eq=False)
class Cursor:
    """A cursor, and the subscribers that use it."""

    name: str
    topics: frozenset[str] | None
    """None = all topics."""
    exists: bool = False
    """True if the cursor surely exists."""
    durable: bool = False
    """True if a power cut cannot undo its creation."""
    doubtful: bool = False
    """True if an earlier request may have created the cursor, or created it again."""
    positions: dict[str, Position] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)
    """All subscribers of the cursor that have sent a request."""
    unsafe: int = 0
    """Newest position in the replay buffer that a recovery may have lost, because the arena was
    lost while the cursor was not durable."""

    def position(self, topic: str) -> Position:
        """Return the facts about a topic. A topic without a position begins with its first
        notice."""
        return self.positions.setdefault(topic, Position())

    def covers(self, topic: str) -> bool:
        """Return whether the cursor has positions in a topic."""
        return self.topics is None or topic in self.topics


@dataclass(eq=False)
class Holder:
    """A subscriber process of a cursor."""

    cursor: Cursor
    number: int
    holds: bool = False
    """True while this process surely has the cursor."""
    leaves: bool = False
    """True once it has begun to end its session."""
    ended_ns: int | None = None
    """World time at which it ended."""
    stream: int = 0
    """Stream of its newest item; 0 = none."""
    opened: int = 0
    """Stream of the daemon when its OPEN was answered."""
    starts: Positions = field(default_factory=dict)
    """Positions in the answer to its OPEN."""
    bounds: dict[str, tuple[int, int]] | None = None
    """Lowest and highest possible position of each topic when it began a later stream; None if the
    cursor may not have been in the arena."""
    loose: bool = False
    """True once a damaged WAL was accepted: its positions are not known."""
    topics: dict[str, Progress] = field(default_factory=dict)
    commits: list[Positions] = field(default_factory=list)
    """Commits without an answer."""
    notices: int = 0
    lost: int = 0

    def __str__(self) -> str:
        return f"subscriber {self.number} of {self.cursor.name}"


class CursorOracle:
    """The judge of the cursors of one daemon."""

    def __init__(self, stream: Callable[[], int]) -> None:
        """`stream` returns the present stream of the daemon."""
        self._stream = stream
        self.cursors: dict[str, Cursor] = {}
        self.cuts = 0
        """Number of losses of the arena so far."""
        self.log: dict[str, dict[int, Sent]] = {}
        """Newest notice with each sequence, by topic."""
        self.sent: dict[tuple[int, str, int], Sent] = {}
        """Notices by stream, topic and sequence."""
        self.newest: dict[str, int] = {}
        """Sequence of the newest notice of each topic, in the present arena."""
        self.buffered: dict[tuple[str, int], int] = {}
        """Position in the replay buffer of each notice that no loss of the arena has undone, by
        topic and sequence; 0: unknown."""
        self._undurable: set[tuple[str, int]] = set()
        """Notices that a power cut may undo."""
        self.carried: Positions = {}
        """Sequence of the newest notice of each topic that an earlier stream sent."""
        self.unsent: dict[tuple[int, str, int], Sent] = {}
        """Notices that a subscriber has read before they were sent."""
        self.judged = 0

    def _require(self, fact: object, subject: object, text: str, *values: object) -> None:
        if not fact:
            raise Violation(f"{subject}: {text.format(*values)}")

    def cursor(self, name: str, topics: Iterable[str] | None) -> Cursor:
        """Return a cursor; create its facts if it was not used before."""
        chosen = None if topics is None else frozenset(topics)
        return self.cursors.setdefault(name, Cursor(name, chosen))

    # ---- holders -------------------------------------------------------------------------------

    def begins(self, cursor: Cursor, number: int) -> Holder:
        """Record a subscriber before its first request."""
        holder = Holder(cursor, number)
        cursor.holders.append(holder)
        return holder

    def opened(self, holder: Holder, positions: Positions, cuts: int) -> None:
        """Judge the answer to an OPEN of a subscriber, which was sent after `cuts` losses.
        `positions`: those in the answer. Later ones renew the hold."""
        cursor = holder.cursor
        self.judged += 1
        renewal, lost = holder.opened != 0, cuts != self.cuts
        if not renewal:
            holder.opened, holder.starts = self._stream(), positions
            holder.loose = lost
        if lost:  # the arena that gave the answer may be lost
            cursor.doubtful = True
            return
        self._takes(holder)
        if renewal:
            cursor.doubtful |= not cursor.exists
            return
        for topic in sorted({*positions, *cursor.positions}):
            self._judge_position(cursor, topic, positions.get(topic, 0))
        cursor.exists, cursor.doubtful = True, False

    def _judge_position(self, cursor: Cursor, topic: str, found: int) -> None:
        one = cursor.position(topic)
        if cursor.exists:
            back = f"{topic} {found}, but {one.sure} is committed"
            self._require(found >= one.sure, cursor.name, "has the position {}", back)
            self._require(
                found <= one.most, cursor.name, "has the position {} {}, but only {} was committed",
                topic, found, one.most,
            )  # fmt: skip
        one.sure = found
        one.most = found if cursor.exists or not cursor.doubtful else max(found, one.most)

    def _takes(self, holder: Holder) -> None:
        """Judge an answer that gives a subscriber the cursor, or that shows it has the cursor."""
        for other in holder.cursor.holders:
            free = other is holder or not other.holds
            self._require(free, holder, "has the cursor, but {} holds it", other)
        holder.holds = not holder.leaves

    def held(self, holder: Holder, now_ns: int, grace_ns: int) -> None:
        """Judge the answer that another subscriber has the cursor. `grace_ns`: longest time for
        which a daemon keeps the session of an ended process."""
        self.judged += 1
        for other in holder.cursor.holders:
            ended_ns = other.ended_ns
            if other is not holder and (ended_ns is None or now_ns - ended_ns <= grace_ns):
                return
        raise Violation(f"{holder}: the cursor is in use, but nobody has it")

    def released(self, holder: Holder) -> None:
        """Record that a subscriber has lost its session."""
        holder.holds = False

    def leaving(self, holder: Holder) -> None:
        """Record that a subscriber ends its session."""
        holder.holds, holder.leaves = False, True

    def ended(self, holder: Holder, now_ns: int) -> None:
        """Record the end of a subscriber's process."""
        holder.holds, holder.ended_ns = False, now_ns

    # ---- commits -------------------------------------------------------------------------------

    def committing(self, holder: Holder, positions: Positions) -> None:
        """Judge a commit before it is sent: it must cover exactly what was handed out."""
        for topic, sequence in positions.items():
            at = holder.topics.get(topic)
            handed = at.next - 1 if at is not None else 0
            self._require(
                sequence == handed, holder, "commits {} {}, but {} was handed out",
                topic, sequence, handed,
            )  # fmt: skip
            one = holder.cursor.position(topic)
            one.most = max(one.most, sequence)
        holder.commits.append(positions)

    def committed(self, holder: Holder, positions: Positions, cuts: int, *, durable: bool) -> None:
        """Judge the acknowledgement of a commit that was sent after `cuts` losses."""
        self.judged += 1
        holder.commits.remove(positions)
        if cuts != self.cuts and not durable:
            return
        if cuts == self.cuts:
            self._takes(holder)
            self._require(
                holder.cursor.exists or holder.cursor.doubtful, holder, "committed without a cursor"
            )
        for topic, sequence in positions.items():
            one = holder.cursor.position(topic)
            one.sure = max(one.sure, sequence)
            if durable:
                one.durable = max(one.durable, sequence)
        if durable:
            holder.cursor.exists = holder.cursor.durable = True

    def stale(self, holder: Holder, positions: Positions, stream: int) -> None:
        """Judge the answer that the committed notices belong to another stream. `stream`: the one
        that the commit names."""
        holder.commits.remove(positions)
        truthful = stream != self._stream()
        self._require(truthful, holder, "{} is refused as one of another stream", positions)

    def unknown(self, holder: Holder, positions: Positions, cuts: int) -> None:
        """Judge the answer that there is no such cursor."""
        holder.commits.remove(positions)
        gone = cuts != self.cuts or not holder.cursor.exists
        self._require(gone, holder, "the cursor was lost")

    def failed(self, holder: Holder, positions: Positions) -> None:
        """Record a commit without an answer, or one that was refused for now."""
        holder.commits.remove(positions)

    # ---- notices -------------------------------------------------------------------------------

    def published(self, place: tuple[int, str, int], sent: Sent, position: int = 0) -> None:
        """Record a notice that the daemon sent. `place`: stream, topic, sequence. `position`: its
        position in the replay buffer; 0: unknown."""
        _, topic, sequence = place
        if place not in self.sent:
            self.buffered[topic, sequence] = position
            self._undurable.add((topic, sequence))
        self.log.setdefault(topic, {})[sequence] = self.sent[place] = sent
        self.newest[topic] = max(self.newest.get(topic, 0), sequence)
        read = self.unsent.pop(place, sent)
        self._require(read == sent, place, "was read as {}, but {} was sent", read, sent)

    def is_safe(self, cursor: Cursor, topic: str, sequence: int, oldest: int) -> bool:
        """Return whether a notice that is not committed must be in the replay buffer, also after a
        recovery. `oldest`: the position from which on the buffer has space for all notices."""
        return self.buffered.get((topic, sequence), 0) >= max(oldest, cursor.unsafe + 1)

    def received(self, holder: Holder, stream: int, topic: str, sequence: int, sent: Sent) -> None:
        """Judge a notice that a subscriber takes."""
        self.sees(holder, stream)
        at = self._at(holder, topic)
        self._judge_next(holder, at, topic, sequence)
        self._judge_notice(holder, (stream, topic, sequence), sent)
        at.next = sequence + 1
        holder.notices += 1
        self.judged += 1

    def _judge_notice(self, holder: Holder, place: tuple[int, str, int], sent: Sent) -> None:
        stream, topic, sequence = place
        known = self.sent.get(place)
        if known is not None:
            self._require(known == sent, holder, "received {} {}, sent was {}", place, sent, known)
        elif stream != self._stream():
            return
        elif sequence > self.carried.get(topic, 0):
            self.unsent[place] = sent
        elif (before := self.log.get(topic, {}).get(sequence)) is not None:
            same = (before.ticket, before.key, before.payload, before.cause) == (
                sent.ticket, sent.key, sent.payload, sent.cause
            )  # fmt: skip
            self._require(same, holder, "received {} {}, sent was {}", place, sent, before)

    def lagged(
        self, holder: Holder, stream: int, topic: str, first: int, last: int,
        exists: Callable[[str, int, int], int | None],
    ) -> None:  # fmt: skip
        """Judge a range that a subscriber reports as lost. `last` 0: it reports the end of a
        stream. `exists` returns the first notice of a range that the replay buffer or the WAL
        has."""
        self.sees(holder, stream)
        if last == 0:
            gone = stream != holder.opened and holder.bounds is None
            self._require(gone, holder, "{}: reports the end of a stream", topic)
            holder.topics.pop(topic, None)
            return
        at = self._at(holder, topic)
        self._judge_next(holder, at, topic, first)
        if stream == self._stream():
            found = exists(topic, first, last)
            self._require(
                found is None, holder, "{}: {} to {} are reported as lost, but {} exists",
                topic, first, last, found,
            )  # fmt: skip
        at.next = last + 1
        holder.lost += 1
        self.judged += 1

    def sees(self, holder: Holder, stream: int) -> None:
        """Record the stream that a subscriber reads. In another stream all topics begin again,
        after the position of the cursor."""
        if holder.stream == stream:
            return
        holder.stream, cursor = stream, holder.cursor
        holder.topics.clear()
        holder.bounds = None
        if stream != holder.opened and cursor.durable:
            holder.bounds = {t: (one.durable, one.most) for t, one in cursor.positions.items()}

    def _at(self, holder: Holder, topic: str) -> Progress:
        if topic not in holder.topics:
            exact = holder.stream == holder.opened and not holder.loose
            holder.topics[topic] = Progress(holder.starts.get(topic, 0) + 1 if exact else 0)
        return holder.topics[topic]

    def _judge_next(self, holder: Holder, at: Progress, topic: str, sequence: int) -> None:
        covers = holder.cursor.covers(topic)
        self._require(covers, holder, "receives {}, which it has not requested", topic)
        if at.next:
            self._require(
                sequence == at.next, holder, "receives {} {}, but {} comes next",
                topic, sequence, at.next,
            )  # fmt: skip
        elif holder.bounds is not None:
            durable, most = holder.bounds.get(topic, (0, 0))
            self._require(
                durable < sequence <= most + 1, holder,
                "continues with {} {}, committed are {} to {}", topic, sequence, durable, most,
            )  # fmt: skip

    # ---- the arena -----------------------------------------------------------------------------

    def begins_stream(self, sent: Positions) -> None:
        """Record a new stream. `sent`: sequence of the newest notice of each topic that an earlier
        stream sent."""
        self.carried = dict(sent)
        self.newest = dict(sent)

    def all_committed(self) -> None:
        """Record that all appended records are on disk."""
        self._undurable.clear()
        for cursor in self.cursors.values():
            cursor.durable |= cursor.exists
            for one in cursor.positions.values():
                one.durable = one.sure

    def arena_lost(self, *, wal: bool) -> None:
        """Record the loss of the arena. Without a WAL, all cursors are gone."""
        self.cuts += 1
        newest = max(self.buffered.values(), default=0)
        for place in self._undurable if wal else list(self.buffered):
            self.buffered.pop(place, None)
        self._undurable.clear()
        for cursor in self.cursors.values():
            cursor.unsafe = cursor.unsafe if cursor.durable and wal else newest
            cursor.durable &= wal
            cursor.doubtful |= cursor.exists and wal and not cursor.durable
            cursor.exists = cursor.durable
            for one in cursor.positions.values():
                one.sure = one.durable = one.durable if cursor.durable else 0
                one.most = one.most if wal else 0
            for holder in cursor.holders:
                holder.holds = False

    def forced(self) -> None:
        """Record that a damaged WAL was accepted. Cursors may be missing or older."""
        self.buffered.clear()
        for cursor in self.cursors.values():
            cursor.exists = cursor.durable = False
            cursor.doubtful = True
            for one in cursor.positions.values():
                one.sure = one.durable = 0
            for holder in cursor.holders:
                holder.loose, holder.bounds = True, None

    # ---- the end -------------------------------------------------------------------------------

    def caught_up(self, holder: Holder) -> bool:
        """Return whether a subscriber has received all notices."""
        return not self._behind(holder)

    def _behind(self, holder: Holder) -> list[str]:
        """Return the topics whose newest notices a subscriber has not received."""
        return sorted(
            topic
            for topic, newest in self.newest.items()
            if holder.cursor.covers(topic) and self._at_least(holder, topic) < newest
        )

    def _at_least(self, holder: Holder, topic: str) -> int:
        at = holder.topics.get(topic) if holder.stream == self._stream() else None
        return at.next - 1 if at is not None else holder.starts.get(topic, 0)

    def finish(self, holder: Holder) -> None:
        """Judge the last subscriber of a cursor: it has received all notices after the position."""
        behind = self._behind(holder)
        self._require(not behind, holder, "has not received the newest notices of {}", behind)
        for place, sent in self.unsent.items():
            if place[0] == self._stream():
                raise Violation(f"{place}: {sent} was received, but not sent")
