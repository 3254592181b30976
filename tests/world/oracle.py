"""The oracle of a world: it judges answers, notices and outcomes by the promises of the product.

It imports only constants of the product. Times are world time, or the daemon's virtual time. Each
timer key belongs to one client, and the daemon applies the client's calls on the key in order. So
the state of a key is known after each answer, unless the effect of a call is in doubt; then several
states are possible. Each add has its own payload and each operation has its own key, so that every
notice shows what caused it.

    state of a key     None, or the timer that is armed under it
    due                a timer that may have fired, because its deadline has passed
    durable            a change that a power cut cannot undo, because the answer to the change was
                       durable, or its record was appended before the last commit
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from purgatoryd.daemon.grace import GRACE_NS, LONG_NS
from purgatoryd.shm_layout.layout import TIME_MAX_NS, Cause, Status
from world.answers import ANSWERS, REFUSALS

ARMED = frozenset({Status.ADDED, Status.REPLACED, Status.KEPT, Status.EXTENDED, Status.PARKED})
NEW = frozenset({Status.ADDED, Status.REPLACED, Status.PARKED})
CHANGES = (
    Status.ADDED, Status.REPLACED, Status.EXTENDED, Status.CANCELLED, Status.PARKED
)  # fmt: skip
"""Answers of calls that changed something. The change is durable if the client requested that."""
IN_DOUBT = -1
"""Status of a call without an answer."""
FOREVER_NS = 2**63
ROUNDING_NS = 2_000
"""Maximum rounding error of a deadline when it is carried over a reboot."""
BLOB_BYTES = 128
"""Bytes that the storage of a key and a payload may need in addition to their lengths."""
LATE_NS = 1_000_000
"""Maximum time by which the wall clock may be behind the boot clock when a wall deadline is
judged."""


class Violation(AssertionError):
    """The product has broken a promise."""


@dataclass(eq=False)
class Timer:
    """A timer that a client armed, or may have armed."""

    key: str
    topic: str
    payload: bytes = field(repr=False)
    deadline_ns: int
    """The deadline; only a lower bound until an answer names the exact deadline."""
    delay_ns: int = 0
    """Requested delay."""
    ticket: int = 0
    """Ticket of the timer; 0: no answer has named it."""
    earliest_ns: int = FOREVER_NS
    """Deadline before the timer's first extension."""
    durable_ns: int = FOREVER_NS
    """Deadline before the first extension that is not durable."""
    latest_ns: int = 0
    """The latest deadline that an extension may have given the timer."""
    wall_ns: int | None = None
    reached: bool = False
    """True once the wall clock has reached the timer's deadline, even if the clock is set back
    later."""
    slack_ns: int = 0
    """Maximum time by which reboots may have moved the deadline, because the wall clock was
    wrong."""
    rounding_ns: int = 0
    """Maximum time by which reboots may have moved the deadline later, because of rounding."""
    ended: str = ""
    """Reason why the daemon must not send a notice: "cancelled", "replaced"."""
    ended_durably: bool = False
    durable: bool = False
    shaky: bool = False
    """True if a power cut may have undone the add; the ticket may then belong to another timer."""
    exact: bool = False
    """True if an answer named the timer's deadline."""
    parked: bool = False
    """True if the timer is parked. It fires only after it has been unparked."""
    awaits_notice: bool = False
    """True if an answer implies that the timer has fired, so that its notice has to arrive."""
    refused: bool = False
    """True if it was surely never armed."""
    cancelled_ns: int = 0
    """Time until which a call may have cancelled or replaced it; 0: none has."""
    issued: int = 0
    """Moment at which it was added."""
    present: bool = True
    """False if a loss of the arena has surely undone it, or found it ended."""
    unique_ns: int = 0
    """Time for which it keeps its key unique; 0: the key is not unique."""
    asked_ns: int = 0
    """Time at which it was added."""
    known_ns: int = FOREVER_NS
    """Time of the answer that it was armed; FOREVER_NS: without an answer."""
    freed: bool = False
    """True if a cancel or a loss of the arena may have made its key free."""
    silent: bool = False
    """True if it has ended, but perhaps without a notice, by a late policy."""
    fired: set[int] = field(default_factory=set)
    """Streams in which the timer has fired."""

    def extend(self, deadline_ns: int) -> None:
        """Move the deadline, as an extension does."""
        if deadline_ns > self.deadline_ns:
            self.earliest_ns = min(self.earliest_ns, self.deadline_ns)
            self.durable_ns = min(self.durable_ns, self.deadline_ns)
            self.deadline_ns = deadline_ns
            self.latest_ns = max(self.latest_ns, deadline_ns)

    @property
    def deadlines_ns(self) -> tuple[int, int]:
        """The earliest and the latest possible deadline."""
        earliest_ns = min(self.deadline_ns, self.earliest_ns, self.durable_ns)
        latest_ns = max(self.deadline_ns, self.latest_ns)
        return earliest_ns - self.slack_ns, latest_ns + self.slack_ns + self.rounding_ns

    def due(self, now_ns: int) -> bool:
        """Return whether the timer may have fired by this time. Return True for every wall
        deadline, because judge_wall() judges it."""
        return self.wall_ns is not None or self.deadline_ns - self.slack_ns <= now_ns


State = Timer | None


@dataclass(eq=False)
class Call:
    """A call on a timer key."""

    kind: str
    """Kind of call: "cancel", "get", or the mode of an add ("error", "replace", "keep",
    "extend")."""
    key: str
    durable: bool
    timer: Timer | None = None
    """The timer that an add arms."""
    ticket: int = 0
    """Ticket of the timer that a cancel names; 0: it names no ticket."""
    issued: int = 0
    """Moment at which the call was made."""
    answer: tuple[int, int, int, int] | None = None
    """Result as (status, ticket, deadline, time). The result is kept until all earlier calls are
    judged."""
    before: list[Timer] = field(default_factory=list)
    """Timers that may have been armed when the call was made."""


@dataclass(eq=False)
class Key:
    """The possible states of a key: at present, and after a power cut."""

    states: list[State] = field(default_factory=lambda: [None])
    undurable: list[State] = field(default_factory=list)
    past: list[State] = field(default_factory=list)
    calls: deque[Call] = field(default_factory=deque)
    """Calls without an answer, in the order in which they have to be applied."""
    unique: list[Timer] = field(default_factory=list)
    """Timers that keep the key unique for a time."""

    @property
    def armed(self) -> list[Timer]:
        """Timers that may be armed."""
        return [state for state in self.states if state is not None]

    def become(self, states: Iterable[State]) -> None:
        """Replace the possible states."""
        self.undurable += [state for state in self.states if state not in self.undurable]
        self.past += [state for state in self.states if state not in self.past]
        self.states = list(dict.fromkeys(states))

    def settle(self) -> None:
        """Record that the current states are durable."""
        for timer in (*self.undurable, *self.states):
            if timer is not None:
                timer.ended_durably = bool(timer.ended)
                timer.durable = True
                timer.durable_ns = FOREVER_NS
        self.undurable.clear()

    def cut(self) -> None:
        """Record a power cut: each state since the last commit is possible."""
        self.states += [state for state in self.undurable if state not in self.states]
        self.undurable.clear()


@dataclass(eq=False)
class Watched:
    """Known facts about a watch key."""

    sure: int = 0
    """Highest acknowledged watermark."""
    durable: int = 0
    highest: int = 0
    """The highest watermark that was sent."""
    bumps: int = 0
    """Sum of all bumps."""
    may_fail: bool = False
    forgets: int = 0
    """Number of unanswered calls that forget the watch key."""
    forgotten: int = 0
    """Moment of the last answer to a call that forgets the watch key."""
    cancels: int = 0
    """Number of unanswered calls that cancel all operations on the watch key."""
    may_hold: bool = False
    """True if a client's own condition on the watch key may be true."""
    history: list[tuple[int, int, int]] = field(default_factory=list)
    """(time of sending, time of acknowledgement, value) of each watermark."""

    before_forget: int = 0
    """Highest watermark that the key may have had when the last FORGET was sent."""

    @property
    def possible(self) -> int:
        """Highest watermark that the key may have."""
        return self.highest + self.bumps

    def sure_at(self, now_ns: int, until_ns: int = 0) -> int:
        """Return the highest watermark that was acknowledged before `now_ns`, or sent before
        `now_ns` and acknowledged before `until_ns`."""
        marks = [
            mark
            for sent_ns, known_ns, mark in self.history
            if known_ns < now_ns or (sent_ns < now_ns and known_ns < until_ns)
        ]
        return max(marks, default=0)


@dataclass(eq=False)
class Operation:
    """An operation that a client armed, or may have armed."""

    key: str
    kind: str
    """"all", "any", "sum", "quorum" or "client"."""
    targets: Mapping[str, int]
    need: int
    """Threshold of a sum, or number of keys of a quorum."""
    deadline_ns: int
    ticket: int = 0
    armed: int = 0
    """Moment at which an answer reported the operation as armed."""
    moved: bool = False
    """True if its deadline was moved, or may have been moved."""
    cancelled: bool = False
    cause: Cause | None = None
    durable: bool = False
    """True if its outcome is durable."""
    slack_ns: int = 0
    awaits_notice: bool = False
    """True if its outcome has a notice that has not arrived yet."""

    @property
    def fatal(self) -> int:
        """Smallest number of failed keys with which the condition cannot become true."""
        count = len(self.targets)
        return {"any": count, "quorum": count - self.need + 1}.get(self.kind, 1)

    def holds(self, watermark: Callable[[str], int]) -> bool:
        """Return whether the condition is true with these watermarks."""
        reached = [watermark(key) >= target for key, target in self.targets.items()]
        if self.kind == "all":
            return all(reached)
        if self.kind == "any":
            return any(reached)
        if self.kind == "quorum":
            return sum(reached) >= self.need
        return sum(watermark(key) for key in self.targets) >= self.need


@dataclass(eq=False)
class Row:
    """A row of a bulk load that a client has sent."""

    bulk_load: int
    key: str
    fired: set[int] = field(default_factory=set)
    """Streams in which the row has fired."""


@dataclass(eq=False)
class BulkLoad:
    """A bulk load. The daemon must add each of its rows only once."""

    done: dict[str, bytes] = field(default_factory=dict)
    """Added payloads, by the key of the row."""
    durable: set[str] = field(default_factory=set)
    """Keys of rows whose addition is durable."""
    sent: Counter[str] = field(default_factory=Counter)
    """Number of times that each row was sent, by its key."""
    newest_token: int = 0
    """The highest fencing token that was sent."""
    may_be_closed: bool = False
    forgets: int = 0
    """Number of unanswered calls that forget the bulk load."""
    forgotten: int = 0
    """Moment of the last answer to a call that forgets the bulk load."""


@dataclass(frozen=True)
class Sent:
    """A notice that the daemon gave to the socket."""

    ticket: int
    key: str
    payload: bytes
    deadline_boot_ns: int
    fired_boot_ns: int
    cause: int


class Sizes(NamedTuple):
    """The sizes of an arena."""

    capacity: int
    payload_bytes: int
    inbox: int
    """Number of operations that a session may own."""
    replay_capacity: int


class Oracle:
    """The judge of answers, notices and outcomes."""

    def __init__(self) -> None:
        self.keys: dict[str, Key] = {}
        self.timers: dict[bytes, Timer] = {}
        """Timers by payload."""
        self.watched: dict[str, Watched] = {}
        self.operations: dict[str, Operation] = {}
        """Operations by key."""
        self.sent: dict[tuple[int, str, int], Sent] = {}
        """Notices by stream, topic and sequence."""
        self.newest: dict[tuple[int, str], int] = {}
        self.tickets: set[tuple[int, int]] = set()
        """Stream and ticket of each notice."""
        self.publications: dict[bytes, bool] = {}
        """For each notice without a timer, by payload: True if the notice was sent."""
        self.awaited: set[bytes] = set()
        """Payloads of acknowledged publications that have no notice yet."""
        self.rows: dict[bytes, Row] = {}
        """Rows of bulk loads that were sent, by payload."""
        self.bulk_loads: dict[int, BulkLoad] = {}
        """Bulk loads by number."""
        self.answers: Counter[str] = Counter()
        self.stream_id = 0
        """Stream id of the arena in use."""
        self.outages: list[tuple[int, int]] = []
        """Outages, each as the times (begin, end) between which the daemon's loop did not run.
        Empty if the product does not delay expiry after outages."""
        self._moment = 0
        self.cut = 0
        """Moment of the last loss of an arena."""
        self.least = Sizes(*[FOREVER_NS] * len(Sizes._fields))
        """Smallest sizes that the arena has had."""
        self.others = 0
        """Number of timers that no client has added: the occurrences of schedules."""
        self.bytes_sent = 0
        """Total bytes of payloads and keys of all calls that arm something."""
        self.disk_failures: Callable[[], int] = lambda: 0
        """Function that returns the number of failed disk calls."""
        self.causes: set[Status] = set()
        """Refusals that earlier events may have caused."""
        self.wall_moved = False
        """True once the wall clock has been set or has drifted."""
        self.may_end: Callable[[Timer, int], bool] = lambda *_: False
        """Function that returns whether a timer may have ended without a notice by this time."""

    def moment(self) -> int:
        """Return the next moment: a number that is higher than all numbers returned before."""
        self._moment += 1
        return self._moment

    def _require(self, fact: object, subject: object, text: str, *values: object) -> None:
        """Raise Violation unless the fact holds. `values` replace each {} of the text."""
        if not fact:
            raise Violation(f"{subject}: {text.format(*values)}")

    # ---- timers --------------------------------------------------------------------------------

    def key(self, name: str) -> Key:
        """Return the state of a key."""
        return self.keys.setdefault(name, Key())

    def issue(self, call: Call) -> Call:
        """Record a call before it is made."""
        key = self.key(call.key)
        added = [one.timer for one in key.calls if one.timer is not None]
        call.before, call.issued = [*key.armed, *added], self.moment()
        key.calls.append(call)
        if call.timer is not None:
            call.timer.issued = call.issued
            if call.timer.unique_ns:
                key.unique.append(call.timer)
            self.timers[call.timer.payload] = call.timer
            self.arming(call.key, call.timer.payload)
        return call

    def doubt(self, name: str, now_ns: int) -> None:
        """Judge the unanswered calls on a key as calls in doubt, because their caller has ended."""
        for call in list(self.key(name).calls):
            self.answer(call, IN_DOUBT, 0, 0, now_ns)

    def answer(self, call: Call, status: int, ticket: int, deadline_ns: int, now_ns: int) -> None:
        """Judge the result of a call. `status` IN_DOUBT: the result is unknown."""
        key = self.key(call.key)
        if call not in key.calls or call.answer is not None:
            return  # the caller of this call is gone
        call.answer = (status, ticket, deadline_ns, now_ns)
        while key.calls and (answer := key.calls[0].answer) is not None:
            self._judge(key.calls.popleft(), key, *answer)

    def _judge(
        self, call: Call, key: Key, status: int, ticket: int, deadline_ns: int, now_ns: int
    ) -> None:
        self.answers["IN_DOUBT" if status == IN_DOUBT else Status(status).name] += 1
        if status == Status.TOO_FAR:
            assert call.timer is not None
            too_far = now_ns + call.timer.delay_ns > TIME_MAX_NS
            self._require(too_far, call, "refused as too far, at {}", now_ns)
        elif status == Status.EXISTS and deadline_ns < 0:
            self._judge_exclusion(call, key, ticket, -deadline_ns)
        elif status != IN_DOUBT:
            self.judge_status(call.kind, status, call)
        if call.timer is not None:
            call.timer.refused = status not in (IN_DOUBT, *NEW)
        if call.kind in ("cancel", "replace"):
            for timer in (*key.armed, *call.before):
                if timer is not call.timer:
                    until_ns = FOREVER_NS if status == IN_DOUBT else now_ns
                    timer.cancelled_ns = max(timer.cancelled_ns, until_ns)
        if call.issued < self.cut and not call.durable:
            status = IN_DOUBT  # the arena that gave the answer is lost
        if call.kind == "cancel" and status in (IN_DOUBT, Status.CANCELLED):
            for timer in (*key.armed, *call.before):
                timer.freed = True
        elif status in (*NEW, Status.EXTENDED):
            self._judge_unique(call, key, now_ns)
        if status == IN_DOUBT:
            key.become([*key.states, *self._effects(call)])
            for timer in (*key.armed, *call.before) if call.kind == "extend" else ():
                timer.latest_ns = FOREVER_NS
        elif deadline_ns >= 0:
            self._judge_answer(call, key, status, ticket, deadline_ns, now_ns)
        if call.durable and status in CHANGES:
            key.settle()
        # the timer may have fired before the answer arrived
        if any(self._has_fired(state) for state in key.states):
            key.become(None if self._has_fired(state) else state for state in key.states)

    def _judge_answer(
        self, call: Call, key: Key, status: int, ticket: int, deadline_ns: int, now_ns: int
    ) -> None:
        if status == Status.PARKED and call.kind == "get":
            self._parked(call, key, ticket, deadline_ns)
        elif status in ARMED:
            self._armed(call, key, status, ticket, deadline_ns, now_ns)
        elif status in (Status.EXISTS, Status.FOUND):
            self._same(call, key, ticket, deadline_ns)
        elif status == Status.CANCELLED:
            self._cancelled(call, key, ticket)
        elif status in (Status.FIRED, Status.LEASED, Status.UNKNOWN):
            self._gone(call, key, status, now_ns)

    # ---- unique keys ---------------------------------------------------------------------------

    def _judge_exclusion(self, call: Call, key: Key, ticket: int, until_ns: int) -> None:
        """Judge the answer that a key is unique until a time, because of a timer with a ticket."""
        assert call.timer is not None
        self._require(until_ns >= call.timer.asked_ns, call, "excluded until {} only", until_ns)
        for one in key.unique:
            named = one.ticket in (0, ticket) or one.shaky
            slack_ns = one.slack_ns + one.rounding_ns
            begins_ns = until_ns - one.unique_ns
            fits = one.asked_ns - slack_ns <= begins_ns <= one.known_ns + slack_ns
            if one is not call.timer and named and fits and not one.refused:
                return
        self._require(False, call, "excluded until {}, known are {}", until_ns, key.unique)

    def _judge_unique(self, call: Call, key: Key, now_ns: int) -> None:
        """Judge that no timer keeps the key unique when an add has armed or moved one."""
        for one in key.unique:
            armed = one.known_ns < FOREVER_NS and not (one.freed or one.shaky or one.refused)
            until_ns = one.asked_ns + one.unique_ns - one.slack_ns - one.rounding_ns
            excluded = one is not call.timer and armed and now_ns < until_ns
            self._require(not excluded, call, "added, but the key is unique: {}", one)

    # ---- statuses ------------------------------------------------------------------------------

    def arming(self, key: str, payload: bytes = b"") -> None:
        """Record a call that needs space for a key and a payload, before the call is made."""
        self.bytes_sent += BLOB_BYTES + len(key) + len(payload)

    def arming_other(self, key: str, payload: bytes) -> None:
        """Record a call about a schedule, or an occurrence, which need a timer and space."""
        self.others += 1
        self.arming(key, payload)

    def served_with(self, sizes: Sizes) -> None:
        """Record that a daemon starts with these sizes."""
        self.least = Sizes(*map(min, self.least, sizes))

    def judge_status(self, kind: str, status: int, subject: object) -> None:
        """Judge a status: it has to fit the kind of the call, and a refusal needs a cause."""
        if status in ANSWERS[kind]:
            return
        name = Status(status).name
        self._require(status in REFUSALS[kind], subject, "a {} call was answered {}", kind, name)
        if status == Status.FULL:
            keys = len(self.keys) + len(self.rows) + len(self.operations) + self.others
            self._require(keys >= self.least.capacity, subject, "FULL after {} keys", keys)
        elif status == Status.FULL_PAYLOAD:
            short = self._may_be_short()
            self._require(short, subject, "FULL_PAYLOAD after {} bytes", self.bytes_sent)
        elif status == Status.WAL:
            failed = self.disk_failures() or status in self.causes
            self._require(failed, subject, "answered WAL, but no disk call failed")
        elif status == Status.BUSY:
            many = len(self.operations) >= self.least.inbox
            self._require(many or status in self.causes, subject, "answered BUSY")
        else:
            self._require(status in self.causes, subject, "answered {} without a cause", name)

    def _may_be_short(self) -> bool:
        """Return whether payloads may have filled the arena; free space may be fragmented."""
        return self.bytes_sent >= self.least.payload_bytes // 2

    def judge_row(self, payload: bytes, token: int, status: int) -> None:
        """Judge the answer to a row of a bulk load."""
        row = self.rows[payload]
        bulk_load = self.bulk_loads[row.bulk_load]
        if status == Status.BULK_LOADED:
            self._require(
                bulk_load.sent[row.key] > 1, row, "answered BULK_LOADED, but sent only once"
            )
        elif status == Status.FENCED:
            self._require(
                token < bulk_load.newest_token, row, "answered FENCED, but no newer token was sent"
            )
        elif status == Status.CLOSED:
            self._require(
                bulk_load.may_be_closed, row, "answered CLOSED, but nobody closed the bulk load"
            )
        else:
            self.judge_status("row", status, row)

    def _effects(self, call: Call) -> list[State]:
        """Return the states to which a call leads if it was applied."""
        if call.kind == "cancel":
            return [None]
        return [] if call.timer is None else [call.timer]

    def _has_fired(self, state: State) -> bool:
        return state is not None and self.stream_id in state.fired

    def _armed(
        self, call: Call, key: Key, status: int, ticket: int, deadline_ns: int, now_ns: int
    ) -> None:
        timer, armed = call.timer, key.armed
        assert timer is not None
        if timer.deadline_ns and timer.wall_ns is None and status in NEW:
            asked = timer.deadline_ns - LATE_NS <= deadline_ns <= now_ns + timer.delay_ns + LATE_NS
            self._require(asked, call, "has the deadline {}", deadline_ns)
        if status == Status.PARKED:
            timer.parked = True
        elif status == Status.ADDED:
            free = None in key.states or any(state.due(now_ns) for state in armed)
            self._require(free, call, "added, but a timer is armed: {}", armed)
            self._await(key, now_ns)
        if status in (Status.KEPT, Status.EXTENDED):
            extended = status == Status.EXTENDED
            for one in self._same(call, key, ticket, deadline_ns, extended=extended):
                one.extend(deadline_ns if extended else 0)
            return
        if status == Status.REPLACED:
            self._require(armed, call, "replaced, but no timer is armed")
            if len(key.states) == 1 and not armed[0].due(now_ns):
                armed[0].ended = "replaced"
        timer.ticket, timer.deadline_ns, timer.exact = ticket, deadline_ns, True
        timer.known_ns = now_ns
        key.become([timer])

    def _same(
        self, call: Call, key: Key, ticket: int, deadline_ns: int, *, extended: bool = False
    ) -> list[Timer]:
        """Check that the answer names the armed timer and its deadline."""
        named = self._named(call, key, ticket)
        if len(named) == 1 and named[0].exact and named[0].wall_ns is None and not extended:
            low_ns, high_ns = named[0].deadlines_ns
            same = low_ns <= deadline_ns <= high_ns
            self._require(same, call, "has the deadline {}: {}", deadline_ns, named[0])
        key.become(named)
        return named

    def _parked(self, call: Call, key: Key, ticket: int, deadline_ns: int) -> None:
        """Record that a timer is parked. If several timers are possible, the deadline identifies
        it."""
        named = self._named(call, key, ticket)
        key.become(named)
        near = [
            one for one in named if abs(one.deadline_ns - deadline_ns) <= one.slack_ns + LATE_NS
        ]
        if len(near) == 1:
            key.become(near)
        for timer in near or named:
            timer.ticket, timer.parked = ticket, True

    def _named(self, call: Call, key: Key, ticket: int) -> list[Timer]:
        """Return the timers that the ticket of an answer may identify. They may have fired since
        the answer was sent. If a power cut may have undone a timer's add, a later timer may have
        got the same ticket. That later timer is one whose ticket no answer has named."""
        known = list(dict.fromkeys((*key.armed, *call.before)))
        named = [timer for timer in known if timer.ticket == ticket]
        if all(timer.shaky for timer in named):
            named += [timer for timer in known if timer.ticket == 0]
        self._require(named, call, "names ticket {}, known are {}", ticket, key.states)
        if len(named) == 1:
            named[0].ticket = ticket
        return named

    def _cancelled(self, call: Call, key: Key, ticket: int) -> None:
        named = self._named(call, key, ticket)
        fired = all(self._has_fired(timer) for timer in named)
        self._require(not fired, call, "cancelled, but it had fired: {}", named)
        if len(named) == 1:
            named[0].ended = "cancelled"
        key.become([None])

    def _gone(self, call: Call, key: Key, status: int, now_ns: int) -> None:
        """Judge the answer FIRED, LEASED or UNKNOWN. It means that no timer is armed, or that the
        armed timer is not the timer that the call names."""
        if call.ticket in (0, *(timer.ticket for timer in key.armed)):
            self._await(key, now_ns)
        left: list[State] = []
        for state in key.states:
            meant = state is None or call.ticket in (0, state.ticket)
            if not meant:
                left.append(state)
            elif state is None or state.due(now_ns):
                left.append(None)
        self._require(
            left, call, "answered {}, but these are armed: {}", Status(status).name, key.armed
        )
        key.become(left)

    def _await(self, key: Key, now_ns: int) -> None:
        """Record that a notice must arrive, because an answer implies that a key's timer has ended.
        If it may be late, it may have no notice. Do nothing unless it is certain which timer that
        is."""
        if len(key.states) != 1 or not key.armed:
            return
        [timer] = key.armed
        if self.may_end(timer, now_ns):
            timer.silent = True
        else:
            timer.awaits_notice = True

    # ---- notices -------------------------------------------------------------------------------

    def published(
        self, stream: int, topic: str, sequence: int, sent: Sent, boot_begun_ns: int, now_ns: int
    ) -> bool:
        """Judge a notice that the daemon gave to the socket. After a kill it may be a repeated
        notice. Return True for the first notice of an occurrence of a schedule, which another judge
        has to judge."""
        place = (stream, topic, sequence)
        before = self.sent.get(place)
        if before is not None:
            self._require(before == sent, place, "two different notices: {} and {}", before, sent)
            return False
        # an arena recovered from a WAL continues the sequences
        newest = self.newest.get((stream, topic), sequence - 1)
        self._require(sequence == newest + 1, place, "follows sequence {}", newest)
        twice = (stream, sent.ticket) in self.tickets
        self._require(not twice, sent, "has two notices in one stream")
        self.newest[stream, topic] = sequence
        self.sent[place] = sent
        self.tickets.add((stream, sent.ticket))
        if sent.cause == Cause.EXPIRED:
            self._require(sent.fired_boot_ns >= sent.deadline_boot_ns, sent, "fired early")
            # The times of a notice from an earlier boot were converted with a wall clock that had
            # moved.
            converted = self.wall_moved and sent.fired_boot_ns + boot_begun_ns > now_ns
            due = sent.deadline_boot_ns + boot_begun_ns <= now_ns
            self._require(due or converted, sent, "sent early")
        if sent.payload in self.publications:
            self.publications[sent.payload] = True
            self.awaited.discard(sent.payload)
            return False
        if sent.payload in self.rows:
            once = stream not in self.rows[sent.payload].fired
            self._require(once, sent, "a row of a bulk load fired twice")
            self.rows[sent.payload].fired.add(stream)
            return False
        if sent.key in self.operations:
            self.ended(self.operations[sent.key], Cause(sent.cause), now_ns)
            self.operations[sent.key].awaits_notice = False
            return False
        if sent.key.startswith("s"):
            self.arming_other(sent.key, sent.payload)
            return True
        self._require(sent.payload in self.timers, sent, "nobody added it")
        self._judge_notice(stream, self.timers[sent.payload], sent, now_ns)
        return False

    def judge_loss(self, topic: tuple[int, str], lost: range, fired: int) -> None:
        """Judge a range of notices that a subscriber lost. `topic`: (stream, topic).

        If a notice of the range was sent in this stream, the replay buffer must have overflowed.
        `fired`: number of notices that the buffer received.
        """
        if any((*topic, sequence) in self.sent for sequence in lost):
            full = fired > self.least.replay_capacity or self._may_be_short()
            self._require(full, topic, "{} were lost after {} notices", lost, fired)

    def _judge_notice(self, stream: int, timer: Timer, sent: Sent, now_ns: int) -> None:
        same = timer.key == sent.key and (timer.shaky or timer.ticket in (0, sent.ticket))
        self._require(same, sent, "differs from {}", timer)
        self._require(not timer.ended, sent, "fired, but it was {}", timer.ended)
        self._require(timer.due(now_ns), sent, "early: {}", timer)
        self._require(stream not in timer.fired, sent, "fired twice: {}", timer)
        timer.fired.add(stream)
        key = self.key(timer.key)
        if timer in key.states:
            key.become([None if state is timer else state for state in key.states])

    def judge_wall(self, payload: bytes, wall_ns: int) -> None:
        """Judge a timer on the wall clock that has fired at this wall time."""
        timer = self.timers.get(payload)
        if timer is not None and timer.wall_ns is not None and not timer.reached:
            early = wall_ns + LATE_NS < timer.wall_ns
            self._require(not early, timer, "fired at wall time {}", wall_ns)

    def wall_steps(self, wall_ns: int) -> None:
        """Record which deadlines the wall clock has reached by now, because the clock may be set
        back next."""
        for timer in self.timers.values():
            timer.reached |= timer.wall_ns is not None and timer.wall_ns <= wall_ns + LATE_NS

    def publishing(self, payload: bytes) -> None:
        """Record a notice without a timer before it is published."""
        self.publications[payload] = False

    def was_published(self, payload: bytes, issued: int) -> None:
        """Judge the acknowledgement of a publication that was requested at the moment `issued`."""
        if issued > self.cut and not self.publications[payload]:
            self.awaited.add(payload)

    # ---- bulk loads ----------------------------------------------------------------------------

    def adding_row(self, bulk_load: int, name: str, payload: bytes, token: int) -> None:
        """Record a row of a bulk load before it is sent."""
        self.rows[payload] = Row(bulk_load, name)
        self.arming(name, payload)
        one = self.bulk_loads.setdefault(bulk_load, BulkLoad())
        one.sent[name] += 1
        one.newest_token = max(one.newest_token, token)

    def added_row(self, payload: bytes, issued: int, *, durable: bool) -> None:
        """Judge the answer ADDED to a row that was sent at the moment `issued`.

        Another copy of the row must not have been added, unless an arena was lost or the bulk load
        was forgotten.
        """
        row = self.rows[payload]
        bulk_load = self.bulk_loads.setdefault(row.bulk_load, BulkLoad())
        if bulk_load.forgets or issued < max(bulk_load.forgotten, 0 if durable else self.cut):
            return  # the daemon may have forgotten the bulk load
        before = bulk_load.done.setdefault(row.key, payload)
        self._require(before == payload, row.key, "was added as {!r} and as {!r}", before, payload)
        if durable:
            bulk_load.durable.add(row.key)

    def managing_bulk_load(self, number: int, token: int, action: str) -> Callable[[], None]:
        """Record a change of a bulk load before it is sent. Return a function to call when the
        answer arrives.

        If the change is FORGET, the daemon may forget the bulk load at any time before the answer
        arrives.
        """
        one = self.bulk_loads.setdefault(number, BulkLoad())
        forgets = action == "forget"
        one.newest_token = max(one.newest_token, token)
        one.may_be_closed |= action == "close"
        one.forgets += forgets
        if forgets:
            one.done.clear()
            one.durable.clear()

        def answered() -> None:
            one.forgets -= forgets
            one.forgotten = self.moment() if forgets else one.forgotten

        return answered

    # ---- operations ----------------------------------------------------------------------------

    def watch_key(self, name: str) -> Watched:
        """Return the known facts about a watch key."""
        return self.watched.setdefault(name, Watched())

    def advancing(self, name: str, watermark: int) -> int:
        """Record a watermark before it is sent. Return the moment of sending."""
        one = self.watch_key(name)
        one.highest = max(one.highest, watermark)
        return self.moment()

    def advanced(
        self, name: str, watermark: int, issued: int, sent_ns: int, now_ns: int, *, durable: bool
    ) -> None:
        """Judge the acknowledgement of a watermark that was sent at the moment `issued`."""
        one = self.watch_key(name)
        if issued < self.cut and not durable:
            return  # the arena that gave the answer is lost
        if one.forgets or issued < one.forgotten:
            return  # the daemon may have forgotten the watch key
        if watermark <= one.before_forget:
            return  # only a higher value keeps the key when its last watcher leaves
        if watermark > one.sure:
            one.sure = watermark
            one.history.append((sent_ns, now_ns, watermark))
        if durable:
            one.durable = max(one.durable, watermark)
        for operation in self.operations.values():
            if operation.cause == Cause.EXPIRED and name in operation.targets:
                self._outlasts(operation)

    def forgetting(self, name: str) -> Callable[[], None]:
        """Record a FORGET before it is sent. Return a function to call when the answer arrives.

        Until the answer arrives, the daemon may apply the FORGET at any time.
        """
        one = self.watch_key(name)
        one.sure = one.durable = 0
        one.before_forget = one.possible
        one.history.clear()
        one.forgets += 1

        def forgotten() -> None:
            one.forgets -= 1
            one.forgotten = self.moment()

        return forgotten

    def lets_hold(self, operation: Operation) -> bool:
        """Return whether the client's own condition of an operation may be true."""
        return any(self.watch_key(key).may_hold for key in operation.targets)

    def watching(self, operation: Operation) -> None:
        """Record an operation before it is sent."""
        self.operations[operation.key] = operation
        self.arming(operation.key)
        operation.cancelled = any(self.watch_key(key).cancels for key in operation.targets)

    def cancelling(self, name: str) -> Callable[[], None]:
        """Record a cancel of all operations on a watch key before it is sent. Return a function to
        call when the answer arrives.

        Until the answer arrives, the daemon may apply the cancel at any time.
        """
        one = self.watch_key(name)
        one.cancels += 1
        for operation in self.operations.values():
            operation.cancelled |= name in operation.targets

        def end() -> None:
            one.cancels -= 1

        return end

    def ended(self, operation: Operation, cause: Cause, now_ns: int) -> None:
        """Judge the outcome of an operation. Its owner and its topic must receive the same
        outcome."""
        if operation.cause is not None:
            same = operation.cause == cause
            self._require(same, operation, "has a second outcome: {!r}", cause)
            return
        operation.cause = cause
        deadline_ns = operation.deadline_ns - operation.slack_ns
        if operation.kind == "client" and cause in (Cause.SATISFIED, Cause.EXPIRED):
            possible = cause == Cause.EXPIRED or self.lets_hold(operation)
            self._require(possible, operation, "satisfied, but its condition was never true")
        elif cause == Cause.SATISFIED:
            possible = operation.holds(lambda key: self.watch_key(key).possible)
            self._require(possible, operation, "satisfied, but no advance could have done that")
        elif cause == Cause.EXPIRED:
            self._require(now_ns >= deadline_ns, operation, "expired early, at {}", now_ns)
            held = operation.holds(lambda key: self.watch_key(key).sure_at(deadline_ns))
            self._require(not held, operation, "expired, but its condition held in time")
            self._outlasts(operation)
        elif cause == Cause.FAILED:
            failed = sum(self.watch_key(key).may_fail for key in operation.targets)
            enough = failed >= operation.fatal
            self._require(
                enough, operation, "failed, but success was possible: only {} keys failed", failed
            )
        elif cause == Cause.CANCELLED:
            self._require(operation.cancelled, operation, "cancelled, but nobody requested it")

    def _outlasts(self, operation: Operation) -> None:
        """Judge an operation that expired in a long outage.

        Its condition must not hold with the triggers that were sent before its deadline and
        answered by the end of the grace period.
        """
        deadline_ns = operation.deadline_ns
        ends_ns = [
            end_ns
            for begin_ns, end_ns in self.outages
            if begin_ns <= deadline_ns <= end_ns - 2 * LONG_NS
        ]
        if not ends_ns or operation.moved or operation.armed <= self.cut or operation.slack_ns:
            return
        if operation.kind != "client":
            until_ns = ends_ns[-1] + GRACE_NS
            held = operation.holds(lambda key: self.watch_key(key).sure_at(deadline_ns, until_ns))
            self._require(not held, operation, "expired in an outage, but its condition held")

    # ---- durability ---------------------------------------------------------------------------

    def committed(self) -> None:
        """Record that all appended records are on disk."""
        for key in self.keys.values():
            key.settle()
        for one in self.watched.values():
            one.durable = one.sure
        for operation in self.operations.values():
            operation.durable = operation.cause is not None
        for bulk_load in self.bulk_loads.values():
            bulk_load.durable.update(bulk_load.done)

    def arena_lost(self, wal: bool) -> None:
        """Record the loss of the arena. Uncommitted changes may be undone; without a WAL, all
        changes are undone."""
        self.cut = self.moment()
        self.awaited.clear()
        self._keep_rows(lambda bulk_load: bulk_load.durable if wal else set())
        for key in self.keys.values():
            if wal:
                key.cut()
            else:
                key.states, key.undurable = [None], []
        for timer in self.timers.values():
            timer.shaky |= not timer.durable
            timer.freed |= not wal
            timer.awaits_notice &= timer.durable and wal
            timer.silent = False
            timer.deadline_ns = min(timer.deadline_ns, timer.durable_ns)
            timer.ended = timer.ended if timer.ended_durably else ""
        self._find_present()
        for one in self.watched.values():
            one.sure = one.durable = one.durable if wal else 0
            one.history = [found for found in one.history if found[-1] <= one.sure]
        for operation in self.operations.values():
            operation.cause = operation.cause if operation.durable else None
            operation.awaits_notice &= operation.durable

    def _find_present(self) -> None:
        """Find the timers that may be armed after a loss of the arena."""
        found: set[State] = set()
        for key in self.keys.values():
            found.update(key.armed, (call.timer for call in key.calls))
        for timer in self.timers.values():
            timer.present = timer in found

    def forced(self) -> None:
        """Record that a damaged WAL was accepted. Changes that the WAL lacks may be undone, however
        old they are."""
        for key in self.keys.values():
            key.states += [state for state in key.past if state not in key.states]
            key.states += [state for state in (None,) if state not in key.states]
        for timer in self.timers.values():
            timer.ended, timer.shaky, timer.awaits_notice = "", True, False
            timer.freed = True
            timer.silent = False
            timer.deadline_ns = min(timer.deadline_ns, timer.earliest_ns)
        self._find_present()
        for one in self.watched.values():
            one.sure = one.durable = 0
            one.history.clear()
        self.awaited.clear()
        for operation in self.operations.values():
            operation.cause, operation.awaits_notice = None, False
        self._keep_rows(lambda _: set())

    def _keep_rows(self, kept: Callable[[BulkLoad], set[str]]) -> None:
        for bulk_load in self.bulk_loads.values():
            bulk_load.durable = kept(bulk_load)
            bulk_load.done = {key: bulk_load.done[key] for key in bulk_load.durable}

    def recovered(self, slack_ns: int) -> None:
        """Record that a recovery has converted deadlines with a wall clock that may be wrong by
        `slack_ns`."""
        for timer in self.timers.values():
            timer.slack_ns += slack_ns
            timer.rounding_ns += ROUNDING_NS
        for operation in self.operations.values():
            operation.slack_ns += slack_ns

    # ---- the end -------------------------------------------------------------------------------

    def finish(self, now_ns: int = FOREVER_NS) -> None:
        """Judge the final state: every deadline has passed, and every daemon serves.

        Each acknowledged timer and operation must have ended, and a client must have been notified
        of its end, unless a late policy has ended it.
        """
        for name, key in self.keys.items():
            self._await(key, now_ns)
            ended = None in key.states or any(self.may_end(one, now_ns) for one in key.armed)
            self._require(ended, name, "never fired: {}", key.armed)
        for timer in self.timers.values():
            lost = timer.awaits_notice and not timer.fired
            self._require(not lost, timer, "was lost: it is not armed, and no notice arrived")
        for bulk_load in self.bulk_loads.values():
            for row, payload in bulk_load.done.items():
                self._require(self.rows[payload].fired, row, "a row of a bulk load was lost")
        for operation in self.operations.values():
            silent = operation.awaits_notice and operation.cause is not None
            self._require(not silent, operation, "its outcome has no notice")
        self._require(
            not self.awaited, sorted(self.awaited), "were published, but no notice arrived"
        )
