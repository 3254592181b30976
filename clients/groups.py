"""Consumer groups: settings, questions to the daemon, and the calls of Client and AsyncClient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from purgatoryd.clients import times
from purgatoryd.clients.arguments import check_choice, check_type, check_whole, each
from purgatoryd.clients.core import Asked, Core
from purgatoryd.clients.jobs import Job, asked
from purgatoryd.shm_layout import group_wire, wire
from purgatoryd.shm_layout.errors import (
    FullGroup,
    GroupMismatch,
    GroupMissing,
    GroupRefused,
    InvalidArgument,
    MessageRefused,
    PurgatorydError,
)
from purgatoryd.shm_layout.group_wire import DeadLetter, GroupInfo, GroupSettings
from purgatoryd.shm_layout.layout import (
    ATTEMPTS_MAX,
    GROUP_TIME_MAX_NS,
    GROUP_TOPICS_MAX,
    TICKET_MAX,
    DeadAction,
    GroupAction,
    GroupRefusal,
    WireError,
)

if TYPE_CHECKING:
    from purgatoryd.clients.connection import Connection

Result = TypeVar("Result")
OnDead = Literal["skip", "block"]
OnFull = Literal["refuse", "drop_oldest"]
Start = Literal["latest", "earliest"]
PAGE = 256
"""Number of dead letters in one reply of the daemon."""
DEFAULTS = GroupSettings(
    max_backlog=4096, max_bytes=2 * 2**20, retention_ns=0, max_lease_ns=3_600_000_000_000,
    backoff_ns=1_000_000_000, backoff_cap_ns=600_000_000_000, rate=0, max_attempts=20,
    max_dead=1000,
)  # fmt: skip
"""Settings of a new consumer group that does not name them. Four such groups, as many as the
default `jobs` of a daemon allow, use at most half of its default payload memory."""
_COUNTS = {
    "max_backlog": (1, 2**32 - 2), "max_bytes": (0, 2**63 - 1), "rate": (0, 2**32 - 1),
    "max_attempts": (1, ATTEMPTS_MAX), "max_dead": (0, 2**32 - 2),
}  # fmt: skip
_TIMES = {
    "retention": ("retention_ns", 0), "max_lease": ("max_lease_ns", 1),
    "backoff": ("backoff_ns", 0), "backoff_cap": ("backoff_cap_ns", 0),
}  # fmt: skip
_CHOICES = {"on_dead": ("skip", "block"), "full": ("refuse", "drop_oldest")}
_SUMS = (
    "pending", "waiting", "leased", "delayed", "dead", "bytes", "acked", "retried", "dropped",
    "members",
)  # fmt: skip
_REASONS: dict[int, str] = {
    GroupRefusal.MISSING: "there is no such consumer group",
    GroupRefusal.MISMATCH: "the consumer group exists with other settings or topics",
    GroupRefusal.ROWS: "no free row for a consumer group or one of its topics, of {0}",
    GroupRefusal.JOBS: "max_backlog is larger than the {0} jobs that no consumer group has "
    "reserved: give a smaller max_backlog, delete a consumer group or lower its max_backlog, or "
    "restart the daemon with more --jobs",
    GroupRefusal.PENDING: "max_backlog is less than its {0} pending timers and jobs",
    GroupRefusal.SETTINGS: "a setting is out of bounds",
}


# ---- arguments -------------------------------------------------------------------------------


def check_time_ns(name: str, value: Any, least_ns: int = 0) -> int:
    """Return seconds or a timedelta in ns, from `least_ns` to a year. Raises InvalidArgument."""
    time_ns = times.seconds_ns(value)
    if not least_ns <= time_ns <= GROUP_TIME_MAX_NS or (time_ns == 0 and least_ns):
        most_s = GROUP_TIME_MAX_NS / 1e9
        raise InvalidArgument(f"{name} {value!r} must be from {least_ns / 1e9:g} to {most_s:g} s")
    return time_ns


def check_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are not None, by field name of GroupSettings. Raises
    InvalidArgument."""
    checked: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in _COUNTS:
            checked[name] = check_whole(name, value, *_COUNTS[name])
        elif name in _TIMES:
            field, least_ns = _TIMES[name]
            checked[field] = check_time_ns(name, value, least_ns)
        elif name in _CHOICES:
            checked[name] = check_choice(name, value, _CHOICES[name])
        else:
            check_type(name, value, bool)
            checked[name] = value
    return checked


def check_new_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Check the settings of a new consumer group, as check_settings() does."""
    checked = check_settings(given)
    _check_order(checked.get("on_dead"), checked.get("ordered"))
    return checked


def _check_order(on_dead: str | None, ordered: bool | None) -> None:
    if on_dead == "block" and not ordered:
        raise InvalidArgument("on_dead='block' needs a consumer group with ordered=True")


def check_topics(topics: Any) -> tuple[bytes, ...]:
    """Return the encoded names of topics, sorted and without repetition. Raises InvalidArgument."""
    names = sorted({wire.encode_topic(topic) for topic in each("topics", topics)})
    if not 1 <= len(names) <= GROUP_TOPICS_MAX:
        raise InvalidArgument(f"topics must have 1 to {GROUP_TOPICS_MAX} names, not {len(names)}")
    return tuple(names)


# ---- questions -------------------------------------------------------------------------------


class _AboutGroup(Asked[Result]):
    """A question about a consumer group. The daemon's refusal becomes a GroupRefused."""

    def __init__(self, namespace: str, group: str, build: Callable[[int, int], bytes]) -> None:
        super().__init__(build)
        self.namespace = namespace
        self.group = group

    def _body(self) -> wire.Reply:
        try:
            return self._answer()
        except MessageRefused as error:
            if error.error != WireError.GROUP:
                raise
            raise refused(self.namespace, self.group, error) from None


class GroupQuestion(_AboutGroup[list[GroupInfo]]):
    """A GROUP message."""

    def outcome(self) -> list[GroupInfo]:
        """Return the consumer groups of the reply. Raises GroupRefused, DaemonError."""
        reply = self._body()
        return group_wire.decode_groups(reply.body, reply.records)


class DeadPage(NamedTuple):
    """Reply to a DEAD message."""

    changed: int
    """Number of dead letters that were requeued or dropped."""
    after: int
    """Position of the next page; 0 = there is none."""
    letters: list[DeadLetter]


class DeadQuestion(_AboutGroup[DeadPage]):
    """A DEAD message."""

    def outcome(self) -> DeadPage:
        """Return a page of dead letters. Raises GroupRefused, DaemonError."""
        reply = self._body()
        letters = group_wire.decode_dead(reply.body, reply.records)
        return DeadPage(*reply.detail, letters)


def refused(namespace: str, group: str, error: MessageRefused) -> GroupRefused:
    """Return the daemon's refusal of a request about a consumer group."""
    number, figure = error.detail
    reason = _REASONS.get(number, "the request was refused").format(figure)
    kinds: dict[int, type[GroupRefused]] = {
        GroupRefusal.MISSING: GroupMissing, GroupRefusal.MISMATCH: GroupMismatch,
    }  # fmt: skip
    kind = kinds.get(number, GroupRefused)
    return kind(error.error, error.name, error.detail, group, namespace, reason)


def missing(namespace: str, group: str) -> GroupMissing:
    """Return the error for a consumer group that does not exist."""
    name, detail = WireError.GROUP.name, (int(GroupRefusal.MISSING), 0)
    reason = _REASONS[GroupRefusal.MISSING]
    return GroupMissing(int(WireError.GROUP), name, detail, group, namespace, reason)


def _group_question(
    core: Core, action: GroupAction, group: str, settings: GroupSettings | None,
    topics: Sequence[bytes], earliest: bool, connection: Connection,
) -> GroupQuestion:  # fmt: skip
    name, namespace = group_wire.encode_group(group) if group else b"", core.names.namespace

    def build(number: int, session: int) -> bytes:
        return group_wire.encode_group_ask(
            number, session, action, namespace, name, settings, topics, earliest=earliest
        )

    question = GroupQuestion(core.namespace, group, build)
    connection.session.ask(question.query)
    return question


def _dead_question(
    core: Core, action: DeadAction, group: str, ticket: int, after: int, connection: Connection
) -> DeadQuestion:
    name, namespace = group_wire.encode_group(group), core.names.namespace

    def build(number: int, session: int) -> bytes:
        return group_wire.encode_dead_ask(
            number, session, action, namespace, name, ticket=ticket, after=after,
            most=PAGE if action == DeadAction.LIST else 0,
        )  # fmt: skip

    question = DeadQuestion(core.namespace, group, build)
    connection.session.ask(question.query)
    return question


# ---- jobs ------------------------------------------------------------------------------------


def shards_of(core: Core) -> list[Connection]:
    """Return a connection to each daemon that has a partition of the namespace."""
    return list({connection.daemon: connection for connection in core.connections}.values())


def each_group(
    core: Core, action: GroupAction, group: str, limit_s: float,
    settings: GroupSettings | None = None, topics: Sequence[bytes] = (), *, earliest: bool = False,
) -> Job[list[GroupInfo]]:  # fmt: skip
    """Send a GROUP message to each shard, and return the merged descriptions."""
    found: list[GroupInfo] = []
    for connection in shards_of(core):
        ask = partial(_group_question, core, action, group, settings, topics, earliest, connection)
        found += yield from asked(connection, ask, "consumer group", limit_s)
    return merged(found)


def merged(found: Sequence[GroupInfo]) -> list[GroupInfo]:
    """Return one description for each name. The counts of several shards are added."""
    whole: dict[str, GroupInfo] = {}
    for info in found:
        before = whole.get(info.name)
        whole[info.name] = info if before is None else _sum(before, info)
    return list(whole.values())


def _sum(one: GroupInfo, other: GroupInfo) -> GroupInfo:
    oldest = [t for t in (one.oldest_boot_ns, other.oldest_boot_ns) if t is not None]
    sums = {name: getattr(one, name) + getattr(other, name) for name in _SUMS}
    created_ns = min(one.created_boot_ns, other.created_boot_ns)
    return one._replace(
        **sums, oldest_boot_ns=min(oldest, default=None), created_boot_ns=created_ns,
        paused=one.paused or other.paused,
    )  # fmt: skip


def one_group(
    core: Core, action: GroupAction, group: str, limit_s: float, **named: Any
) -> Job[GroupInfo]:
    """Send a GROUP message about one consumer group, and return its description. Raises
    GroupMissing."""
    found = yield from each_group(core, action, group, limit_s, **named)
    if not found:
        raise missing(core.namespace, group)
    return found[0]


def created(
    core: Core, group: str, limit_s: float, given: dict[str, Any], topics: tuple[bytes, ...],
    earliest: bool,
) -> Job[GroupInfo]:  # fmt: skip
    """Create a consumer group in each shard. A consumer group that exists must have the given
    settings and topics. If a shard refuses it, the shards that have just created it delete it.
    Raises GroupMismatch, GroupRefused."""
    settings = DEFAULTS._replace(**given)
    infos: list[GroupInfo] = []
    fresh: list[Connection] = []
    try:
        for connection in shards_of(core):
            info = yield from _created_in(
                core, connection, group, limit_s, given, settings, topics, earliest, fresh
            )
            infos.append(info)
    except MessageRefused:
        yield from _deleted_in(core, fresh, group, limit_s)
        raise
    return merged(infos)[0]


def _deleted_in(
    core: Core, connections: Sequence[Connection], group: str, limit_s: float
) -> Job[None]:
    for connection in connections:
        delete = partial(
            _group_question, core, GroupAction.DELETE, group, None, (), False, connection
        )
        with suppress(PurgatorydError):
            yield from asked(connection, delete, "consumer group", limit_s)


def _created_in(
    core: Core, connection: Connection, group: str, limit_s: float, given: dict[str, Any],
    settings: GroupSettings, topics: tuple[bytes, ...], earliest: bool, fresh: list[Connection],
) -> Job[GroupInfo]:  # fmt: skip
    """Create a consumer group in one shard, which `fresh` then has, unless it exists there."""
    describe = partial(
        _group_question, core, GroupAction.DESCRIBE, group, None, (), False, connection
    )
    create = partial(
        _group_question, core, GroupAction.CREATE, group, settings, topics, earliest, connection
    )
    found = yield from _found(connection, describe, limit_s)
    if not found:
        try:
            found = yield from asked(connection, create, "consumer group", limit_s)
            fresh.append(connection)
        except GroupMismatch:  # another client has created it in the meantime
            found = yield from asked(connection, describe, "consumer group", limit_s)
    check_same(core.namespace, found[0], given, topics)
    return found[0]


def _found(
    connection: Connection, describe: Callable[[], GroupQuestion], limit_s: float
) -> Job[list[GroupInfo]]:
    try:
        return (yield from asked(connection, describe, "consumer group", limit_s))
    except GroupMissing:
        return []


def check_same(
    namespace: str, info: GroupInfo, given: dict[str, Any], topics: tuple[bytes, ...]
) -> None:
    """Raise GroupMismatch if a given setting or the topics differ from those of a consumer
    group."""
    differs: list[tuple[str, object, object]] = [
        _difference(name, getattr(info.settings, name), value)
        for name, value in given.items()
        if getattr(info.settings, name) != value
    ]
    names = tuple(sorted(topic.decode() for topic in topics))
    if topics and tuple(sorted(info.topics)) != names:
        differs.append(("topics", tuple(sorted(info.topics)), names))
    if differs:
        detail = (int(GroupRefusal.MISMATCH), 0)
        raise GroupMismatch(
            int(WireError.GROUP), WireError.GROUP.name, detail, info.name, namespace,
            "the existing settings differ", tuple(differs),
        )  # fmt: skip


def _difference(name: str, found: Any, asked_: Any) -> tuple[str, object, object]:
    """Return a setting that differs, with times in seconds."""
    if name.endswith("_ns"):
        return name.removesuffix("_ns"), found / 1e9, asked_ / 1e9
    return name, found, asked_


def changed(core: Core, group: str, limit_s: float, given: dict[str, Any]) -> Job[GroupInfo]:
    """Change the given settings of a consumer group, and keep the others."""
    info = yield from one_group(core, GroupAction.DESCRIBE, group, limit_s)
    settings = info.settings._replace(**given)
    _check_order(settings.on_dead, settings.ordered)
    return (yield from one_group(core, GroupAction.CHANGE, group, limit_s, settings=settings))


def each_dead(core: Core, action: DeadAction, group: str, ticket: int, limit_s: float) -> Job[int]:
    """Requeue or drop dead letters in each shard, and return their number."""
    count = 0
    for connection in shards_of(core):
        ask = partial(_dead_question, core, action, group, ticket, 0, connection)
        page = yield from asked(connection, ask, "dead letters", limit_s)
        count += page.changed
    return count


def dead_page(core: Core, group: str, number: int, after: int, limit_s: float) -> Job[DeadPage]:
    """Return a page of the dead letters of one shard."""
    connection = shards_of(core)[number]
    ask = partial(_dead_question, core, DeadAction.LIST, group, 0, after, connection)
    return (yield from asked(connection, ask, "dead letters", limit_s))


def named(core: Core, error: FullGroup, limit_s: float) -> Job[FullGroup]:
    """Return the refusal of a timer with the name of the consumer group, if the daemon says it."""
    connection = core.of(cast("wire.Key", error.key))
    ask = partial(_group_question, core, GroupAction.DESCRIBE, "", None, (), False, connection)
    with suppress(PurgatorydError):
        found = yield from asked(connection, ask, "consumer group", limit_s)
        names = [info.name for info in found if info.row == error.row]
        return FullGroup(error.key, error.status, error.resource, error.row, error.jobs, *names[:1])
    return error


def check_ticket(ticket: int | None) -> int:
    """Return a ticket for the wire; None becomes 0, all dead letters. Raises InvalidArgument."""
    return 0 if ticket is None else check_whole("ticket", ticket, 1, TICKET_MAX)


# ---- the calls of the clients ----------------------------------------------------------------

GroupJob = Callable[[Core, float], Job[Result]]
"""The job of a call; the arguments are the core and the limit in seconds."""


def describe_job(group: str) -> GroupJob[GroupInfo]:
    """Return the job of group(), after a check of the name."""
    group_wire.encode_group(group)
    return lambda core, limit_s: one_group(core, GroupAction.DESCRIBE, group, limit_s)


def list_job() -> GroupJob[list[GroupInfo]]:
    """Return the job of groups()."""
    return lambda core, limit_s: each_group(core, GroupAction.DESCRIBE, "", limit_s)


def create_job(
    group: str, topics: Any, start: str, settings: dict[str, Any]
) -> GroupJob[GroupInfo]:
    """Return the job of create_group(), after a check of its arguments."""
    group_wire.encode_group(group)
    names, given = check_topics(topics), check_new_settings(settings)
    earliest = check_choice("start", start, ("latest", "earliest")) == "earliest"
    return lambda core, limit_s: created(core, group, limit_s, given, names, earliest)


def change_job(group: str, settings: dict[str, Any]) -> GroupJob[GroupInfo]:
    """Return the job of change_group(), after a check of its arguments."""
    group_wire.encode_group(group)
    given = check_settings(settings)
    return lambda core, limit_s: changed(core, group, limit_s, given)


def action_job(action: GroupAction, group: str) -> GroupJob[None]:
    """Return the job of pause_group(), resume_group() and delete_group()."""
    group_wire.encode_group(group)

    def job(core: Core, limit_s: float) -> Job[None]:
        yield from each_group(core, action, group, limit_s)

    return job


def dead_job(action: DeadAction, group: str, ticket: int | None) -> GroupJob[int]:
    """Return the job of requeue_dead() and drop_dead(), after a check of the arguments."""
    group_wire.encode_group(group)
    number = check_ticket(ticket)
    return lambda core, limit_s: each_dead(core, action, group, number, limit_s)


class GroupCalls(ABC):
    """The calls of Client about consumer groups of its namespace.

    Settings and times are those of Consumer. In a namespace with several partitions a call is made
    in each shard, and a budget applies in each shard. Every call raises InvalidArgument before
    anything is sent, GroupMissing, GroupRefused and DaemonError.
    """

    @abstractmethod
    def _ask_about(self, job: GroupJob[Result], timeout: float | timedelta | None) -> Result:
        """Make a call."""

    def groups(self, *, timeout: float | timedelta | None = None) -> list[GroupInfo]:
        """Return the consumer groups of the namespace."""
        return self._ask_about(list_job(), timeout)

    def group(self, group: str, *, timeout: float | timedelta | None = None) -> GroupInfo:
        """Return settings and counts of a consumer group."""
        return self._ask_about(describe_job(group), timeout)

    def create_group(
        self, group: str, topics: Sequence[str], *, start: Start = "latest",
        timeout: float | timedelta | None = None, max_backlog: int | None = None,
        max_bytes: int | None = None, retention: float | timedelta | None = None,
        max_lease: float | timedelta | None = None, backoff: float | timedelta | None = None,
        backoff_cap: float | timedelta | None = None, max_attempts: int | None = None,
        max_dead: int | None = None, rate: int | None = None, ordered: bool | None = None,
        on_dead: OnDead | None = None, full: OnFull | None = None,
    ) -> GroupInfo:  # fmt: skip
        """Create a consumer group, and return it. It receives every timer of its topics that fires
        after this call, also those that are armed already.

        A consumer group that exists stays as it is; if it has another value of a given setting or
        other topics, the call raises GroupMismatch.
        """
        job = create_job(group, topics, start, settings_of(locals()))
        return self._ask_about(job, timeout)

    def change_group(
        self, group: str, *, timeout: float | timedelta | None = None,
        max_backlog: int | None = None,
        max_bytes: int | None = None, retention: float | timedelta | None = None,
        max_lease: float | timedelta | None = None, backoff: float | timedelta | None = None,
        backoff_cap: float | timedelta | None = None, max_attempts: int | None = None,
        max_dead: int | None = None, rate: int | None = None,
        on_dead: OnDead | None = None, full: OnFull | None = None,
    ) -> GroupInfo:  # fmt: skip
        """Change the given settings of a consumer group, and return it. Its topics and `ordered`
        stay."""
        job = change_job(group, settings_of(locals()))
        return self._ask_about(job, timeout)

    def delete_group(self, group: str, *, timeout: float | timedelta | None = None) -> None:
        """Delete a consumer group with its jobs and dead letters."""
        self._ask_about(action_job(GroupAction.DELETE, group), timeout)

    def pause_group(self, group: str, *, timeout: float | timedelta | None = None) -> None:
        """Lease no jobs of a consumer group until resume_group(). Leased jobs stay leased."""
        self._ask_about(action_job(GroupAction.PAUSE, group), timeout)

    def resume_group(self, group: str, *, timeout: float | timedelta | None = None) -> None:
        """Lease jobs of a paused consumer group again."""
        self._ask_about(action_job(GroupAction.RESUME, group), timeout)

    def dead_letters(
        self, group: str, *, timeout: float | timedelta | None = None
    ) -> Iterator[DeadLetter]:
        """Iterate over the dead letters of a consumer group, oldest first in each shard. The
        iterator asks the daemon for one page at a time."""
        group_wire.encode_group(group)
        return self._letters(group, timeout)

    def _letters(self, group: str, timeout: float | timedelta | None) -> Iterator[DeadLetter]:
        number, after = 0, 0
        while number >= 0:
            job = _page_job(group, number, after)
            letters, number, after = self._ask_about(job, timeout)
            yield from letters

    def requeue_dead(
        self, group: str, ticket: int | None = None, *, timeout: float | timedelta | None = None
    ) -> int:
        """Make dead letters wait again, with all their attempts. Return their number. `ticket`:
        only this dead letter; None = all."""
        return self._ask_about(dead_job(DeadAction.REQUEUE, group, ticket), timeout)

    def drop_dead(
        self, group: str, ticket: int | None = None, *, timeout: float | timedelta | None = None
    ) -> int:
        """Remove dead letters. Return their number. `ticket`: only this dead letter; None = all."""
        return self._ask_about(dead_job(DeadAction.DROP, group, ticket), timeout)


class AsyncGroupCalls(ABC):
    """The asyncio version of GroupCalls, with the same arguments and errors."""

    @abstractmethod
    async def _ask_about(self, job: GroupJob[Result], timeout: float | timedelta | None) -> Result:
        """Make a call."""

    async def groups(self, *, timeout: float | timedelta | None = None) -> list[GroupInfo]:
        """Return the consumer groups of the namespace."""
        return await self._ask_about(list_job(), timeout)

    async def group(self, group: str, *, timeout: float | timedelta | None = None) -> GroupInfo:
        """Return a consumer group, as Client.group does."""
        return await self._ask_about(describe_job(group), timeout)

    async def create_group(
        self, group: str, topics: Sequence[str], *, start: Start = "latest",
        timeout: float | timedelta | None = None, max_backlog: int | None = None,
        max_bytes: int | None = None, retention: float | timedelta | None = None,
        max_lease: float | timedelta | None = None, backoff: float | timedelta | None = None,
        backoff_cap: float | timedelta | None = None, max_attempts: int | None = None,
        max_dead: int | None = None, rate: int | None = None, ordered: bool | None = None,
        on_dead: OnDead | None = None, full: OnFull | None = None,
    ) -> GroupInfo:  # fmt: skip
        """Create a consumer group, as Client.create_group does."""
        job = create_job(group, topics, start, settings_of(locals()))
        return await self._ask_about(job, timeout)

    async def change_group(
        self, group: str, *, timeout: float | timedelta | None = None,
        max_backlog: int | None = None,
        max_bytes: int | None = None, retention: float | timedelta | None = None,
        max_lease: float | timedelta | None = None, backoff: float | timedelta | None = None,
        backoff_cap: float | timedelta | None = None, max_attempts: int | None = None,
        max_dead: int | None = None, rate: int | None = None,
        on_dead: OnDead | None = None, full: OnFull | None = None,
    ) -> GroupInfo:  # fmt: skip
        """Change a consumer group, as Client.change_group does."""
        job = change_job(group, settings_of(locals()))
        return await self._ask_about(job, timeout)

    async def delete_group(self, group: str, *, timeout: float | timedelta | None = None) -> None:
        """Delete a consumer group with its jobs and dead letters."""
        await self._ask_about(action_job(GroupAction.DELETE, group), timeout)

    async def pause_group(self, group: str, *, timeout: float | timedelta | None = None) -> None:
        """Lease no jobs of a consumer group until resume_group()."""
        await self._ask_about(action_job(GroupAction.PAUSE, group), timeout)

    async def resume_group(self, group: str, *, timeout: float | timedelta | None = None) -> None:
        """Lease jobs of a paused consumer group again."""
        await self._ask_about(action_job(GroupAction.RESUME, group), timeout)

    def dead_letters(
        self, group: str, *, timeout: float | timedelta | None = None
    ) -> AsyncIterator[DeadLetter]:
        """Iterate over the dead letters of a consumer group, as Client.dead_letters does."""
        group_wire.encode_group(group)
        return self._letters(group, timeout)

    async def _letters(
        self, group: str, timeout: float | timedelta | None
    ) -> AsyncIterator[DeadLetter]:
        number, after = 0, 0
        while number >= 0:
            job = _page_job(group, number, after)
            letters, number, after = await self._ask_about(job, timeout)
            for letter in letters:
                yield letter

    async def requeue_dead(
        self, group: str, ticket: int | None = None, *, timeout: float | timedelta | None = None
    ) -> int:
        """Make dead letters wait again, as Client.requeue_dead does."""
        return await self._ask_about(dead_job(DeadAction.REQUEUE, group, ticket), timeout)

    async def drop_dead(
        self, group: str, ticket: int | None = None, *, timeout: float | timedelta | None = None
    ) -> int:
        """Remove dead letters, as Client.drop_dead does."""
        return await self._ask_about(dead_job(DeadAction.DROP, group, ticket), timeout)


def settings_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that are settings of a consumer group."""
    names = (*_COUNTS, *_TIMES, *_CHOICES, "ordered")
    return {name: arguments[name] for name in names if name in arguments}


def _page_job(group: str, number: int, after: int) -> GroupJob[tuple[list[DeadLetter], int, int]]:
    """Return a job for one page of dead letters. It returns the dead letters, and the shard and
    position of the next page; shard -1 = there is none."""

    def job(core: Core, limit_s: float) -> Job[tuple[list[DeadLetter], int, int]]:
        _, later, letters = yield from dead_page(core, group, number, after, limit_s)
        if later:
            return letters, number, later
        return letters, number + 1 if number + 1 < len(shards_of(core)) else -1, 0

    return job
