"""The judge of late policies and pauses: it judges which timers end without a notice, their counts,
and the pace of a catch-up. No timer of a paused topic may fire.

Times are world time. A timer that is later than the grace of its policy ends without a notice
(skip), or may do so if a later timer of its topic is late as well (coalesce). Worlds see such an
end in two ways: an answer says that the timer is gone, or a counter of the daemon has risen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from world.options import FIRE, Options, Policy, Possible
from world.oracle import FOREVER_NS, Oracle, Timer, Violation
from world.script import MS, NAMESPACE_SCOPE, TOPICS, S

SLACK_NS = 20 * MS
"""The longest slack of a timer."""
BURST_NS = 10 * MS
"""A namespace may fire the late timers of this time at once."""
USUAL_PER_S = 100_000
"""Number of late timers that a namespace may fire in a second, unless it was set."""


class Fired(NamedTuple):
    """A notice of a timer, with times in world time."""

    place: tuple[int, str, int]
    """Stream, topic and sequence."""
    deadline_ns: int
    fired_ns: int
    missed: int


class Counts(NamedTuple):
    """Counts of the daemon."""

    skipped: int
    coalesced: int
    pending: int
    """Number of coalesced timers that no notice has named."""


class LateOracle:
    """The judge of the late timers of one daemon."""

    def __init__(self, oracle: Oracle, options: Callable[[str], Options]) -> None:
        """`options`: function that returns the options of the timers of a key."""
        self.policies = {topic: Possible(FIRE) for topic in TOPICS}
        """Late policies of topics."""
        self.pace = Possible(USUAL_PER_S)
        """Number of late timers that the namespace may fire in a second."""
        self.pauses = {scope: Possible(False) for scope in (*TOPICS, NAMESPACE_SCOPE)}
        """State of each topic and of the namespace: True if it is paused."""
        self.schedules = False
        """True if policies may end occurrences of schedules as well, in unknown number."""
        self.judged = 0
        self._oracle = oracle
        self._options = options
        self._places: set[tuple[int, str, int]] = set()
        self._stream = self._since = 0
        """Stream of the present arena, and the moment of the last loss of an arena."""
        self._arena_ns = 0
        """Time at which a process first opened the present arena."""
        self._began_ns = 0
        """Time at which the daemon's process began."""
        self._first = self._last = Counts(0, 0, 0)
        """Counts of the present arena: at its begin, and at present."""
        self._missed: Counter[str] = Counter()
        """Sum of `missed` of the notices that fired in the present arena, by topic."""
        self._caught_up_ns = 0
        """Time up to which late timers have used up the pace of the namespace."""
        self._waited: set[bytes] = set()
        """Payloads of timers that came due while their topic was paused."""

    # ---- what is known of a timer --------------------------------------------------------------

    @property
    def _timers(self) -> Iterable[Timer]:
        return self._oracle.timers.values()

    def of(self, timer: Timer, from_ns: int) -> set[Policy]:
        """Return the policies that may have applied to a timer at `from_ns` or later."""
        own = self._options(timer.key).late
        return self.policies[timer.topic].since(from_ns) if own is None else {own}

    def may_end(self, timer: Timer, now_ns: int, kind: str = "") -> bool:
        """Return whether a timer may have ended without a notice. `kind`: by this policy only."""
        due_ns = 0 if timer.wall_ns is not None else timer.deadlines_ns[0]
        return any(
            due_ns + policy.grace_ns < now_ns and kind in ("", policy.kind)
            for policy in self.of(timer, due_ns)
            if policy != FIRE
        )

    def _surely(self, kind: str) -> Iterator[Timer]:
        """Yield the timers that have surely ended by a policy in the present arena."""
        for timer in self._timers:
            kinds = {policy.kind for policy in self.of(timer, 0)}
            here = timer.issued > self._since and not timer.fired
            if timer.silent and here and kinds == {kind}:
                yield timer

    def _possibly(self, kind: str, now_ns: int, topics: Iterable[str] = TOPICS) -> Iterator[Timer]:
        """Yield the timers that may have ended by a policy in the present arena."""
        for timer in self._timers:
            gone = timer.refused or timer.ended or self._stream in timer.fired
            gone = gone or not timer.present
            if timer.topic in topics and not gone and self.may_end(timer, now_ns, kind):
                yield timer

    # ---- events --------------------------------------------------------------------------------

    def started(self, stream: int, counts: Counts, now_ns: int) -> None:
        """Record that a process of the daemon has opened its arena."""
        if stream != self._stream:
            self._stream, self._arena_ns = stream, now_ns
            self._first = self._last = counts
            self._missed.clear()
        self._began_ns, self._caught_up_ns = now_ns, 0

    def lost(self) -> None:
        """Record that an arena was lost."""
        self._since = self._oracle.moment()
        self._waited.clear()
        self.pace.lost()
        for pause in self.pauses.values():
            pause.lost()
        for policy in self.policies.values():
            policy.lost()

    def pausing(self, scope: str, *, paused: bool, now_ns: int) -> None:
        """Record a request to pause or resume a topic, or the namespace, before it is sent.
        `now_ns`: time until which the daemon has handled all due timers; 0: unknown."""
        for topic in TOPICS if not paused else ():
            if scope in (topic, NAMESPACE_SCOPE):
                self._hold(topic, self.pauses[scope].surely_from(value=True), now_ns)
        self.pauses[scope].changing(paused)

    def _hold(self, topic: str, from_ns: int, now_ns: int) -> None:
        """Find the timers that have come due in a pause of a topic that began at `from_ns`."""
        for timer in self._known():
            earliest_ns, latest_ns = timer.deadlines_ns
            due = from_ns < earliest_ns and latest_ns + SLACK_NS < now_ns
            if due and timer.topic == topic and timer.wall_ns is None:
                self._waited.add(timer.payload)

    def counted(
        self, counts: Counts, now_ns: int, armed: Callable[[], set[int]] = lambda: set()
    ) -> None:
        """Judge the counts of late timers at this time, and the timers that are gone without a
        notice. `armed`: function that returns the tickets of all armed timers."""
        if counts == self._last:
            return
        tickets = armed()
        for timer in self._known() if tickets else ():
            if timer.ticket not in tickets:
                self._gone(timer, now_ns)
        self._last = counts
        self.judged += 1
        for kind, count in () if self.schedules else self._counted(counts):
            most = sum(1 for _ in self._possibly(kind, now_ns))
            if count > most:
                raise Violation(f"{count} timers ended by {kind}, at most {most} may have")

    def _known(self) -> Iterator[Timer]:
        """Yield the timers that were armed in the present arena, and that only their deadline may
        have ended."""
        for timer in self._timers:
            untouched = not (timer.cancelled_ns or self._oracle.key(timer.key).calls)
            here = timer.issued > self._since and not (timer.fired or timer.silent)
            if timer.exact and here and untouched and not timer.refused:
                yield timer

    def _gone(self, timer: Timer, now_ns: int) -> None:
        """Judge a timer that has ended without a notice."""
        self.judged += 1
        timer.silent = True
        if not self.may_end(timer, now_ns):
            raise Violation(f"{timer}: ended at {now_ns} without a notice")

    def _counted(self, counts: Counts) -> list[tuple[str, int]]:
        """Return the number of ends of each kind in the present arena."""
        skipped = counts.skipped - self._first.skipped
        return [("skip", skipped), ("coalesce", counts.coalesced - self._first.coalesced)]

    def fired_timer(self, one: Fired) -> None:
        """Judge the notice of any timer: its topic must not be paused."""
        for scope in (one.place[1], NAMESPACE_SCOPE):
            surely = self.pauses[scope].since(one.fired_ns) == {True}
            if surely and one.fired_ns >= self._arena_ns and one.place not in self._places:
                raise Violation(f"{one}: fired, but {scope or 'the namespace'} is paused")

    def fired_occurrence(self, one: Fired) -> None:
        """Judge the notice of an occurrence that is not due on the wall clock. Its late policy is
        that of its topic."""
        self._judge_skip(one, one, self.policies[one.place[1]].since(one.fired_ns))

    def _judge_skip(self, subject: object, one: Fired, policies: set[Policy]) -> None:
        late_ns = one.fired_ns - one.deadline_ns - SLACK_NS
        if all(policy.kind == "skip" and late_ns > policy.grace_ns for policy in policies):
            raise Violation(f"{subject}: fired {late_ns} ns late, but {policies}")

    def fired(self, timer: Timer | None, one: Fired) -> None:
        """Judge a notice. None: no timer of a client caused it."""
        if one.place in self._places:
            return
        self._places.add(one.place)
        if one.missed and one.fired_ns >= self._arena_ns:
            self._missed[one.place[1]] += one.missed
            self._judge_missed(one)
        if timer is None or timer.wall_ns is not None:
            return
        policies = self.of(timer, one.fired_ns)
        self._judge_skip(timer, one, policies)
        self._judge_last(timer, one, policies)
        waited = timer.payload in self._waited and one.fired_ns >= self._arena_ns
        if waited or one.deadline_ns + SLACK_NS < self._began_ns <= one.fired_ns:
            self._judge_pace(one)

    def _judge_missed(self, one: Fired) -> None:
        topic = one.place[1]
        most = sum(1 for _ in self._possibly("coalesce", one.fired_ns, [topic]))
        missed = self._missed[topic]
        if missed > most + self._first.pending and self._exact and not self.schedules:
            raise Violation(f"{one}: {missed} timers of {topic} were missed, at most {most} ended")

    def _judge_last(self, timer: Timer, one: Fired, policies: set[Policy]) -> None:
        """Judge that a late timer which stands for others is the last one of them."""
        late_ns = one.fired_ns - one.deadline_ns - SLACK_NS
        late = all(p.kind == "coalesce" and late_ns > p.grace_ns for p in policies)
        known = self._exact and one.fired_ns >= self._arena_ns and not self._first.pending
        if not (one.missed and late and known) or self._may_be_cancelled(timer.topic):
            return
        if self.schedules:
            return
        ended = self._possibly("coalesce", one.fired_ns, [timer.topic])
        most = sum(other.deadlines_ns[0] <= timer.deadlines_ns[1] for other in ended)
        if one.missed > most:
            raise Violation(f"{timer}: stands for {one.missed}, but {most} were due before it")

    def _may_be_cancelled(self, topic: str) -> bool:
        """Return whether a timer that stood for others may have been cancelled, so that the next
        notice of the topic names their number."""
        for timer in self._timers:
            calls = self._oracle.key(timer.key).calls
            until_ns = FOREVER_NS if calls else timer.cancelled_ns
            silent = timer.topic == topic and not timer.fired and not timer.refused
            if silent and self.may_end(timer, until_ns, "coalesce"):
                return True
        return False

    @property
    def _exact(self) -> bool:
        """True if it is certain which notices fired in the present arena."""
        return not (self._oracle.cut and self._oracle.wall_moved)

    def _judge_pace(self, one: Fired) -> None:
        """Judge the time of a notice that was due before the process began, or in a pause."""
        self.judged += 1
        if one.fired_ns < self._caught_up_ns - BURST_NS:
            raise Violation(f"{one}: fired before {self._caught_up_ns - BURST_NS}")
        interval_ns = S // max(self.pace.since(one.fired_ns))
        self._caught_up_ns = max(self._caught_up_ns, one.fired_ns) + interval_ns

    # ---- the end -------------------------------------------------------------------------------

    def finish(self, counts: Counts, now_ns: int) -> None:
        """Judge the counts at the end."""
        self.counted(counts, now_ns)
        for timer in () if self.schedules else self._surely("coalesce"):
            if not any(self._may_stand_for(other, timer, now_ns) for other in self._timers):
                raise Violation(f"{timer}: ended without a later timer of its topic")
        for kind, count in self._counted(counts):
            least = sum(1 for _ in self._surely(kind))
            if count < least:
                raise Violation(f"{least} timers ended by {kind}, but {count} are counted")
        missed = sum(self._missed.values()) + counts.pending - self._first.pending
        coalesced = counts.coalesced - self._first.coalesced
        if missed != coalesced and self._exact:
            raise Violation(f"notices name {missed} missed timers, but {coalesced} are counted")

    def _may_stand_for(self, other: Timer, timer: Timer, now_ns: int) -> bool:
        """Return whether `timer` may have ended because `other` was due later."""
        later = other.wall_ns is not None or other.deadlines_ns[1] >= timer.deadlines_ns[0]
        same = other is not timer and other.topic == timer.topic and not other.refused
        return same and later and self.may_end(other, now_ns, "coalesce")
