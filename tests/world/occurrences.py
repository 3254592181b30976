"""The judge of schedules: it judges the occurrences that fire, and the answers about schedules.

Times are world time, except nominal times, which are wall time. Each put with new settings has its
own payload, so each notice shows which settings caused it. A key is never used again after its
schedule was deleted.

    surely      true in each possible order of events
    doubtful    a request of the schedule is without an answer, so it may take effect at any time;
                then only times, and the order of occurrences, are judged
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

from world.options import FIRE, Policy
from world.oracle import FOREVER_NS, LATE_NS, ROUNDING_NS, Violation

MINUTE_NS = 60 * 10**9
OverlapRule = Literal["allow", "skip", "queue", "delay"]
TRUNCATED_NS = 1_000
"""Answers have times in microseconds."""


@cache
def calendar(cron: str, zone: str, base_ns: int) -> list[int]:
    """Return the nominal times of a cron expression near a wall time. Only its minute and its hour
    are restricted, and the zone has shifts of whole hours."""
    minute, hour = cron.split()[:2]
    minutes, hours = _numbers(minute, 60), _numbers(hour, 24)
    elapsed = minute.startswith("*") or hour.startswith("*")
    first = base_ns // MINUTE_NS - BEFORE
    found = []
    before = _local(first - 1, zone)
    for number in range(first, first + BEFORE + AFTER):
        local = _local(number, zone)
        matches = local.minute in minutes and local.hour in hours and (elapsed or not local.fold)
        skipped = 0 if elapsed else _minutes(local) - _minutes(before) - 1
        for more in range(skipped):
            lost = before.replace(tzinfo=None) + timedelta(minutes=more + 1)
            matches |= lost.minute in minutes and lost.hour in hours
        if matches:
            found.append(number * MINUTE_NS)
        before = local
    return found


BEFORE, AFTER = 120, 720
"""Number of minutes of a calendar before and after its base."""


def _local(minute: int, zone: str) -> datetime:
    return datetime.fromtimestamp(60 * minute, ZoneInfo(zone))


def _minutes(local: datetime) -> int:
    return int(local.replace(tzinfo=UTC).timestamp()) // 60


def _numbers(field: str, end: int) -> set[int]:
    """Return the numbers of a field: `*`, a range, or one of them with a step."""
    span, _, step = field.partition("/")
    first, _, last = ("0", "", str(end - 1)) if span == "*" else span.partition("-")
    return {*range(int(first), int(last or first) + 1, int(step or 1))}


class Settings(NamedTuple):
    """The settings of a put. Either `every_ns` or `minutes` is 0."""

    every_ns: int
    minutes: int
    """Time between the occurrences of a cron expression."""
    topic: str
    limit: int
    """Number of occurrences; 0: no limit."""
    until_ns: int
    jitter_ns: int
    overlap: OverlapRule
    cron: str = ""
    """A cron expression; empty: one for every `minutes`."""
    zone: str = "UTC"
    base_ns: int = 0
    """Wall time around which the calendar of `cron` is computed."""

    @property
    def calendar(self) -> list[int]:
        """All nominal times of `cron` around the put."""
        return calendar(self.cron, self.zone, self.base_ns)

    @property
    def step_ns(self) -> int:
        """Time between two nominal times."""
        return self.every_ns or self.minutes * MINUTE_NS


class Occurrence(NamedTuple):
    """An occurrence that has fired. `fired_ns` and `deadline_ns` are world time."""

    stream: int
    key: str
    payload: bytes
    topic: str
    deadline_ns: int
    fired_ns: int


@dataclass(eq=False)
class Put:
    """A put with new settings, and the occurrences that it has caused."""

    schedule: Schedule
    payload: bytes
    settings: Settings
    sent_ns: int
    known_ns: int = FOREVER_NS
    """Time of its answer; FOREVER_NS: without an answer."""
    put_ns: int | None = None
    """Wall time from which it counts; None: unknown."""
    last_ns: int | None = None
    """Newest nominal time that has fired."""
    ended_ns: int | None = None
    """World time at which the newest occurrence fired; with a delay the next one counts from it."""
    durable_ns: int | None = None
    """Newest nominal time whose firing a power cut cannot undo."""
    undone: bool = False
    """True if a loss of the arena may have undone the firings after `durable_ns`."""
    fired: set[int] = field(default_factory=set)
    extras: dict[int, Extra] = field(default_factory=dict)
    """Occurrences of triggers, by nominal time."""
    gap: bool = False
    """True if occurrences may be missing before the next one, because of a pause."""
    resumed_ns: int = 0
    """Time of the answer to the newest resume."""
    next_ns: int | None = None
    """First nominal time that must not be missing after a resume."""
    silent: list[tuple[int, int]] = field(default_factory=list)
    """Wall times between which it was surely paused."""
    stopped_ns: int = FOREVER_NS
    """Time from which it surely causes no occurrence."""
    stopped_durably: bool = False

    def __str__(self) -> str:
        return f"{self.schedule.key} {self.payload!r} {self.settings}"

    @property
    def surely_ns(self) -> int | None:
        """Newest nominal time that has surely fired; None: none."""
        return self.durable_ns if self.undone else self.last_ns

    def has_fired(self, nominal_ns: int) -> bool:
        """Return whether the put has fired an occurrence with a nominal time."""
        extra = self.extras.get(nominal_ns)
        return nominal_ns in self.fired or (extra is not None and bool(extra.fired))

    def after(self, wall_ns: int) -> int | None:
        """Return the first nominal time after a wall time; None: unknown."""
        if self.settings.cron:
            times = self.settings.calendar
            place = bisect_right(times, wall_ns)
            return times[place] if 0 < place < len(times) else None
        begin_ns = 0 if self.settings.minutes else self.put_ns
        if begin_ns is None:
            return None
        steps = (wall_ns - begin_ns) // self.settings.step_ns + 1
        return begin_ns + steps * self.settings.step_ns

    @property
    def delays(self) -> bool:
        """True if each occurrence is due some time after the end of the one before."""
        return self.settings.overlap == "delay"

    @property
    def follows_ns(self) -> int | None:
        """The latest possible nominal time of the next occurrence; None: unknown."""
        if self.delays:
            return None
        if self.last_ns is not None:
            cron = self.settings.cron
            return self.after(self.last_ns) if cron else self.last_ns + self.settings.step_ns
        return None if self.put_ns is None else self.after(self.put_ns + TRUNCATED_NS)


@dataclass(eq=False)
class Extra:
    """An additional occurrence."""

    requests: int = 0
    backfilled: bool = False
    """True if a backfill has requested it. The schedule itself may then have fired it as well."""
    fired: Counter[int] = field(default_factory=Counter)
    """Number of notices by stream."""
    awaited: bool = False
    """True if an answer has promised its notice."""
    durable: bool = False


@dataclass(eq=False)
class Schedule:
    """A schedule with all its puts, the newest one last."""

    key: str
    puts: list[Put] = field(default_factory=list)
    open: int = 0
    """Number of requests without an answer."""
    lost: bool = False
    """True if a request has failed, or a loss of the arena may have undone an answer."""
    exists: bool = False
    durable: bool = False
    """True if a power cut cannot undo its state."""
    paused: bool = False
    paused_ns: int | None = None
    """Wall time at which it was surely paused."""
    revision: int = 0
    cuts: int = 0
    nominal: set[tuple[int, int]] = field(default_factory=set)
    """Stream and nominal time of each occurrence of a cron expression that has fired."""
    fired_ns: int | None = None
    """Newest nominal time that had surely fired when the newest request was sent."""

    @property
    def doubtful(self) -> bool:
        """True if a request may take effect at any time."""
        return self.open > 0 or self.lost


class Answered(NamedTuple):
    """The description of a schedule in an answer of the daemon. Nominal times are wall time."""

    payload: bytes
    revision: int
    occurrences: int
    paused: bool
    put_ns: int
    next_ns: int | None


class ScheduleOracle:
    """The judge of the schedules of one daemon."""

    def __init__(self, policies: Callable[[str], set[Policy]] = lambda _: {FIRE}) -> None:
        """`policies`: function that returns all late policies that a topic may have or have had."""
        self._policies = policies
        self.schedules: dict[str, Schedule] = {}
        self.puts: dict[bytes, Put] = {}
        self.skips = False
        """True if jobs may let occurrences end as skipped."""
        self.judged = 0
        self._reached_ns = 0
        """Latest time that the wall clock has shown."""
        self._slack_ns = 0
        """Maximum time by which reboots may have moved a deadline."""
        self._begun_ns = 0
        self._exact = True
        """True while the wall clock was neither set nor drifted."""

    def _require(self, fact: object, subject: object, text: str, *values: object) -> None:
        if not fact:
            raise Violation(f"{subject}: {text.format(*values)}")

    # ---- requests ------------------------------------------------------------------------------

    def asking(self, schedule: Schedule) -> int:
        """Record a request about a schedule before it is sent. Return the number of losses of the
        arena so far."""
        schedule.open += 1
        schedule.durable = False
        schedule.fired_ns = schedule.puts[-1].surely_ns if schedule.puts else None
        return schedule.cuts

    def failed(self, schedule: Schedule) -> None:
        """Record that a request has no answer."""
        schedule.open -= 1
        schedule.lost = True

    def denied(self, schedule: Schedule) -> None:
        """Record that a request was refused, and changed nothing."""
        schedule.open -= 1
        schedule.puts = [put for put in schedule.puts if put.known_ns < FOREVER_NS]

    def putting(self, key: str, payload: bytes, settings: Settings, now_ns: int) -> Put:
        """Record a put with new settings before it is sent."""
        schedule = self.schedules.setdefault(key, Schedule(key))
        put = self.puts[payload] = Put(schedule, payload, settings, now_ns)
        schedule.puts.append(put)
        return put

    def resuming(self, schedule: Schedule, wall_ns: int) -> None:
        """Record a resume before it is sent, at this wall time."""
        put = schedule.puts[-1]
        if schedule.paused_ns is not None:
            put.silent.append((schedule.paused_ns, wall_ns))
            schedule.paused_ns = None
        put.stopped_ns, put.stopped_durably = FOREVER_NS, False
        put.gap, put.next_ns = True, None

    def triggering(self, put: Put, nominal_ns: int) -> None:
        """Record a trigger before it is sent."""
        put.extras.setdefault(nominal_ns, Extra()).requests += 1

    def backfilling(self, put: Put, begin_ns: int, end_ns: int) -> list[int]:
        """Record a backfill of a range of wall times before it is sent. Return the nominal times
        that it has to fire."""
        first_ns = put.after(begin_ns - 1)
        if first_ns is None or put.delays:
            return []
        last_ns = min(end_ns, put.settings.until_ns)
        found = list(range(first_ns, last_ns + 1, put.settings.step_ns))
        if put.settings.cron:
            found = [one for one in put.settings.calendar if first_ns <= one <= last_ns]
        for nominal_ns in found:
            self.triggering(put, nominal_ns)
            put.extras[nominal_ns].backfilled = True
        return found

    def backfilled(self, put: Put, expected: list[int], nominal: list[int], armed: int) -> None:
        """Judge the answer to a backfill: its nominal times. If all of them were armed, their
        notices must arrive; otherwise some have fired before."""
        same = len(expected) == len(nominal) and all(
            abs(one - two) < TRUNCATED_NS for one, two in zip(expected, nominal, strict=True)
        )
        self._require(same, put, "backfilled {}, expected were {}", nominal, expected)
        self._require(armed <= len(expected), put, "{} were armed", armed)
        for nominal_ns in expected:
            put.extras[nominal_ns].awaited |= armed == len(expected)

    # ---- answers -------------------------------------------------------------------------------

    def answered(self, schedule: Schedule, cuts: int) -> bool:
        """Record an answer. Return whether it describes the present arena."""
        schedule.open -= 1
        self.judged += 1
        if cuts != schedule.cuts:
            schedule.lost = True
        return not schedule.doubtful

    def missing(self, schedule: Schedule) -> None:
        """Judge the answer that there is no such schedule. No request may be without an answer."""
        self._require(not schedule.exists, schedule.key, "a schedule was lost")

    def put_answered(self, put: Put, info: Answered, now_ns: int, wall_ns: int) -> None:
        """Judge the answer to a put, which may have been sent before with the same settings."""
        schedule = put.schedule
        repeated = put.known_ns < FOREVER_NS
        if schedule.exists:
            expected = schedule.revision + (not repeated)
            self._require(info.revision == expected, put, "has revision {}", info.revision)
        schedule.exists, schedule.revision = True, info.revision
        if not repeated:
            put.known_ns = now_ns
            put.put_ns = info.put_ns if info.put_ns <= wall_ns else None
        for stopped in schedule.puts if schedule.paused else schedule.puts[:-1]:
            stopped.stopped_ns = min(stopped.stopped_ns, now_ns)
        self.described(schedule, info)

    def described(self, schedule: Schedule, info: Answered) -> None:
        """Judge a description of a schedule without open requests."""
        put = schedule.puts[-1]
        self._require(info.payload == put.payload, put, "has the payload {!r}", info.payload)
        self._require(info.revision == schedule.revision, put, "has revision {}", info.revision)
        self._require(
            info.paused == schedule.paused, put, "{}paused", "" if info.paused else "not "
        )
        most = put.settings.limit or FOREVER_NS
        self._require(info.occurrences <= most, put, "{} occurrences", info.occurrences)
        fired_ns = schedule.fired_ns
        later = info.next_ns is None or fired_ns is None or info.next_ns + TRUNCATED_NS > fired_ns
        later |= put.delays and not self._exact
        self._require(later, put, "next is {}, but {} has fired", info.next_ns, fired_ns)

    def paused(self, schedule: Schedule, now_ns: int, wall_ns: int) -> None:
        """Record the answer to a pause, at this world time and wall time."""
        schedule.paused = True
        schedule.paused_ns = wall_ns if schedule.paused_ns is None else schedule.paused_ns
        for put in schedule.puts:
            put.stopped_ns = min(put.stopped_ns, now_ns)

    def resumed(self, schedule: Schedule, now_ns: int, wall_ns: int) -> None:
        """Record the answer to a resume, at this world time and wall time."""
        put = schedule.puts[-1]
        schedule.paused = False
        put.resumed_ns, put.next_ns = now_ns, put.after(wall_ns + TRUNCATED_NS)

    def deleted(self, schedule: Schedule, now_ns: int) -> None:
        """Record the answer to a delete."""
        schedule.exists = False
        for put in schedule.puts:
            put.stopped_ns = min(put.stopped_ns, now_ns)

    def triggered(self, put: Put, nominal_ns: int) -> None:
        """Record the answer to a trigger: its notice must arrive."""
        put.extras[nominal_ns].awaited = True

    # ---- occurrences ---------------------------------------------------------------------------

    def fired(self, one: Occurrence, wall_ns: int) -> None:
        """Judge an occurrence that the daemon gave to the socket. `wall_ns`: the present time."""
        self.reached(wall_ns)
        self.judged += 1
        put = self.puts[one.payload]
        key, _, nominal = one.key.rpartition("@")
        self._require(key == put.schedule.key, put, "fired as {}", one.key)
        self._require(one.topic == put.settings.topic, put, "fired in topic {}", one.topic)
        nominal_ns = int(nominal)
        extra = put.extras.get(nominal_ns)
        if extra is not None:
            self._fired_extra(put, nominal_ns, extra, one.stream)
            return
        self._judge_time(put, nominal_ns, one)
        self._judge_order(put, nominal_ns, one)
        if put.settings.minutes:
            place = (one.stream, nominal_ns)
            twice = place in put.schedule.nominal
            self._require(not twice, put, "{} has fired before, by another put", nominal_ns)
            put.schedule.nominal.add(place)
        put.fired.add(nominal_ns)
        put.ended_ns = one.fired_ns
        few = put.schedule.lost or len(put.fired) <= (put.settings.limit or FOREVER_NS)
        self._require(few, put, "{} occurrences have fired", len(put.fired))

    def _fired_extra(self, put: Put, nominal_ns: int, extra: Extra, stream: int) -> None:
        """Judge an additional occurrence. One of a backfill may be one of the schedule as well."""
        extra.fired[stream] += 1
        once = extra.fired[stream] <= extra.requests + extra.backfilled
        self._require(once, put, "the extra occurrence {} fired twice", nominal_ns)
        if extra.backfilled:
            put.gap, put.next_ns = True, None

    def may_end(self, put: Put) -> bool:
        """Return whether a late policy may end occurrences without a notice."""
        return self._policies(put.settings.topic) != {FIRE}

    def _may_have_ended(self, put: Put, one: Occurrence) -> bool:
        """Return whether a late policy may have ended the occurrences that are missing before
        `one`."""
        settings = put.settings
        if not self.may_end(put) or not settings.every_ns:
            return self.may_end(put)
        policies = self._policies(settings.topic) - {FIRE}
        due_ns = one.deadline_ns - settings.jitter_ns - settings.every_ns - self._slack_ns
        return due_ns + min(policy.grace_ns for policy in policies) < one.fired_ns

    def held(self, one: Occurrence, open_job: object, acked_ns: int) -> None:
        """Judge an occurrence that jobs of earlier ones hold back. `open_job`: one of these jobs
        that is surely open; None = none. `acked_ns`: earliest time of the newest ack of one."""
        put = self.puts[one.payload]
        self._require(not open_job, put, "{} fired while {} was open", one, open_job)
        if put.delays and acked_ns:
            least_ns = acked_ns + put.settings.every_ns - self._slack_ns
            late = one.deadline_ns >= least_ns
            self._require(late, put, "{} is due before {}", one, least_ns)

    def waits(self, one: Occurrence) -> list[str] | None:
        """Return the keys of earlier occurrences whose jobs hold this one back; None = it does not
        wait for jobs."""
        put = self.puts[one.payload]
        nominal_ns = int(one.key.rpartition("@")[2])
        if put.settings.overlap not in ("queue", "delay") or nominal_ns in put.extras:
            return None
        earlier = [found for found in put.fired if found != nominal_ns]
        return [f"{put.schedule.key}@{found}" for found in earlier]

    def _judge_time(self, put: Put, nominal_ns: int, one: Occurrence) -> None:
        settings = put.settings
        self._require(nominal_ns <= settings.until_ns, put, "{} is after its end", nominal_ns)
        begun = one.fired_ns - self._slack_ns <= put.stopped_ns
        self._require(begun, put, "{} fired after its end, {}", one, put.stopped_ns)
        for begin_ns, end_ns in put.silent if self._exact and not put.schedule.lost else ():
            silent = begin_ns < nominal_ns < end_ns
            self._require(not silent, put, "{} was in a pause", nominal_ns)
        if settings.minutes:
            known = (
                nominal_ns in settings.calendar if settings.cron
                else nominal_ns % settings.step_ns == 0
            )  # fmt: skip
            self._require(known, put, "has no time {}", nominal_ns)
            reached = nominal_ns <= self._reached_ns + LATE_NS
            self._require(reached, put, "{} fired at {}", nominal_ns, self._reached_ns)
        if put.put_ns is None:
            return
        if put.delays:
            self._judge_delay(put, one)
            return
        self._require(nominal_ns > put.put_ns, put, "{} is before {}", nominal_ns, put.put_ns)
        if settings.every_ns:
            steps, off_ns = divmod(nominal_ns - put.put_ns, settings.every_ns)
            self._require(off_ns < TRUNCATED_NS, put, "has no time {}", nominal_ns)
            put.put_ns += off_ns
            self._judge_deadline(put, steps * settings.every_ns, one)

    def _judge_delay(self, put: Put, one: Occurrence) -> None:
        """Judge a deadline that counts from the end of the occurrence before. Without jobs this is
        the time at which it fired."""
        settings = put.settings
        begins = put.ended_ns is None or put.gap
        if begins or put.undone:
            least_ns, most_ns = put.sent_ns, FOREVER_NS
            if begins and not put.gap:
                most_ns = put.known_ns
        else:
            least_ns, most_ns = put.ended_ns or 0, put.ended_ns or 0
        if self.skips or put.schedule.doubtful or put.schedule.cuts or self.may_end(put):
            most_ns = FOREVER_NS
        least_ns += settings.every_ns - self._slack_ns
        most_ns += settings.every_ns + settings.jitter_ns + self._slack_ns
        fits = least_ns <= one.deadline_ns <= most_ns
        self._require(fits, put, "{} is not due from {} to {}", one, least_ns, most_ns)

    def _judge_deadline(self, put: Put, after_ns: int, one: Occurrence) -> None:
        """Judge a deadline that is this long after the put."""
        least_ns = put.sent_ns + after_ns - self._slack_ns
        most_ns = put.known_ns + after_ns + put.settings.jitter_ns + self._slack_ns
        most_ns = max(most_ns, self._begun_ns)
        fits = least_ns <= one.deadline_ns <= most_ns
        self._require(fits, put, "{} is not due from {} to {}", one, least_ns, most_ns)

    def _judge_order(self, put: Put, nominal_ns: int, one: Occurrence) -> None:
        before_ns = put.surely_ns
        later = before_ns is None or nominal_ns > before_ns or (put.delays and not self._exact)
        self._require(later, put, "{} fired after {}", nominal_ns, before_ns)
        follows_ns = put.follows_ns
        if put.gap:
            follows_ns = put.next_ns if self._exact and not put.delays else None
        if put.last_ns is None and len(put.schedule.puts) > 1 and not self._exact:
            follows_ns = None  # the put begins after the newest occurrence of an earlier put
        skips = self.skips and put.settings.overlap == "skip"
        skips |= self._may_have_ended(put, one)
        if not (put.schedule.doubtful or skips) and follows_ns is not None:
            whole = nominal_ns < follows_ns + TRUNCATED_NS
            self._require(whole, put, "{} fired, but {} is missing", nominal_ns, follows_ns)
        first = put.next_ns is not None and nominal_ns + TRUNCATED_NS > put.next_ns
        put.gap &= not first and (one.fired_ns <= put.resumed_ns or put.schedule.open > 0)
        put.last_ns, put.undone = nominal_ns, False

    # ---- the wall clock ------------------------------------------------------------------------

    def reached(self, wall_ns: int) -> None:
        """Record the time that the wall clock shows."""
        self._reached_ns = max(self._reached_ns, wall_ns)

    def wall_moved(self, before_ns: int, after_ns: int) -> None:
        """Record that the wall clock was set, or begins to drift. A cron schedule whose put is in
        the future then counts from the present time, unless an occurrence has fired."""
        self.reached(before_ns)
        self._exact = False
        for put in self.puts.values():
            begins = put.settings.minutes and put.surely_ns is None
            if begins and (put.put_ns is None or after_ns < put.put_ns + LATE_NS):
                put.put_ns = put.last_ns = put.durable_ns = None
                put.fired.clear()

    # ---- durability ----------------------------------------------------------------------------

    def committed(self) -> None:
        """Record that all appended records are on disk."""
        for schedule in self.schedules.values():
            schedule.durable = not schedule.open
        for put in self.puts.values():
            put.durable_ns = put.surely_ns
            put.stopped_durably = put.stopped_ns < FOREVER_NS
            for extra in put.extras.values():
                extra.durable = extra.awaited

    def arena_lost(self, *, wal: bool) -> None:
        """Record the loss of the arena. Without a WAL, all schedules are gone."""
        for schedule in self.schedules.values():
            schedule.cuts += 1
            schedule.lost |= not (wal and schedule.durable)
            schedule.exists &= wal
        for put in self.puts.values():
            put.undone, put.durable_ns = True, put.durable_ns if wal else None
            if not (wal and put.stopped_durably):
                put.stopped_ns = FOREVER_NS
        for extra in self._extras():
            extra.awaited &= wal and extra.durable

    def forced(self) -> None:
        """Record that a damaged WAL was accepted. Schedules may be missing or older."""
        self.arena_lost(wal=False)

    def recovered(self, slack_ns: int, begun_ns: int) -> None:
        """Record that a recovery has moved deadlines by up to `slack_ns`, and those before the boot
        to the time `begun_ns` of the boot."""
        self._slack_ns += slack_ns + ROUNDING_NS
        self._begun_ns = begun_ns

    # ---- the end -------------------------------------------------------------------------------

    def ended(self, put: Put, info: Answered, target_ns: int | None) -> bool:
        """Return whether a schedule has fired all its occurrences, or those up to a nominal time.
        `target_ns` None: any occurrence will do."""
        if put.last_ns is not None and put.last_ns >= (target_ns or 0):
            return True
        settings = put.settings
        over = settings.until_ns < self._reached_ns + settings.step_ns
        limited = settings.limit and info.occurrences >= settings.limit
        skips = (self.skips and settings.overlap == "skip") or self.may_end(put)
        counted = not skips and put.put_ns is not None
        backfilled = {one for one, extra in put.extras.items() if extra.fired and extra.backfilled}
        whole = not counted or len(put.fired | backfilled) >= info.occurrences
        return bool(info.next_ns is None and (over or limited) and whole)

    def target_ns(self, put: Put) -> int | None:
        """Return a nominal time in the near future up to which a schedule has to fire."""
        if put.delays:
            return None
        if self._exact or put.settings.minutes:
            return put.after(self._reached_ns)
        return put.follows_ns

    def _extras(self) -> Iterator[Extra]:
        for put in self.puts.values():
            yield from put.extras.values()

    def is_far(self, target_ns: int | None) -> bool:
        """Return whether a nominal time is many steps away, because a zone repeats an hour."""
        return target_ns is not None and target_ns > self._reached_ns + 2 * MINUTE_NS

    def behind_ns(self, wall_ns: int) -> int:
        """Return by how much the wall clock is behind the latest time that it has shown."""
        return max(0, self._reached_ns - wall_ns)

    def finish(self) -> None:
        """Judge the final state: each occurrence that an answer has promised has fired. An earlier
        put may have fired it, because the notices of both puts have the same key."""
        for put in self.puts.values():
            for nominal_ns, extra in put.extras.items():
                has_fired = any(one.has_fired(nominal_ns) for one in put.schedule.puts)
                lost = extra.awaited and not has_fired and not self.may_end(put)
                self._require(not lost, put, "the extra occurrence {} was lost", nominal_ns)
