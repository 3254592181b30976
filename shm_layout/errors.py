"""The error tree of purgatoryd. Every error keeps its figures as attributes.

PurgatorydError
+-- InvalidArgument (ValueError)     an argument of the call is invalid; nothing was sent
|   +-- InvalidKey                   1..255 bytes of str, bytes or UUID
|   +-- InvalidName                  daemon, namespace or topic
|   +-- InvalidPayload               0..65536 bytes
|   +-- InvalidTime                  delay or deadline
|   +-- InvalidRows                  rows or columns of a bulk call
|   +-- InvalidCondition             keys, watermarks or threshold of an operation
|   +-- InvalidSetting               a setting or an option is out of bounds
|   +-- UnknownSetting               a setting or an option that does not exist
|   +-- Partitioned                  not possible in a namespace with several partitions
+-- Refused                          the daemon refused one timer; the arena is unchanged
|   +-- Exists                       mode="error", but the key is armed
|   +-- Full                         no free slots, payload bytes, namespaces, topics or tickets
|   |   +-- FullGroup                the budget of a consumer group is used up
|   +-- LeaseLost                    the lease of a job ended before the job was answered
|   +-- TooFar                       the deadline is past 2^63 - 1 ns
|   +-- DuplicateWatchKey            an operation names a watch key twice
|   +-- WatermarkOverflow            a watermark would exceed 2^63 - 1
|   +-- Stopping                     the daemon stops when nothing is armed, and arms nothing new
|   +-- Denied                       the namespace has another owner
|   +-- QuotaExceeded                a quota of a namespace or uid (timers, bytes, operations per
|   |                                second), or a uid's share of a table, is used up
|   +-- Fenced                       a newer run of the bulk load has begun
|   +-- BulkLoadClosed               the bulk load takes no more rows
|   +-- WrongShard
|   +-- Busy                         the daemon answered BUSY until the call timed out
|   |   +-- InboxFull                the owner already has as many operations as --inbox allows
|   +-- WalStopped                   the daemon's disk failed or is full
|   +-- ArenaLost                    the daemon's arena file is gone
+-- BatchError                       packed calls were refused, and nobody collected their results
+-- DaemonError                      the communication with the daemon failed
|   +-- DaemonUnreachable (ConnectionError)
|   |   +-- DaemonFrozen             its process exists, but its loop does not move
|   +-- CallTimeout (TimeoutError)   connected, but no answer in time
|   +-- QueueFull (TimeoutError)     the bounded send queue stayed full
|   +-- ShardUnavailable (ConnectionError)   a shard failed often; nothing is sent to it for a while
|   +-- RingsRefused                 transport="ring", but the daemon gives no rings
|   +-- SessionExpired               it is unknown which calls in flight were applied
|   +-- MessageRefused               the daemon refused a whole message
|   |   +-- NoWal                    durable=True, but the daemon has no WAL
|   |   +-- SessionTableFull         as many sessions are open as --sessions allows
|   |   +-- UidShareExceeded         the uid holds its whole share of sessions or namespaces
|   |   +-- GroupRefused             a request about a consumer group was refused
|   |       +-- GroupMissing         there is no such consumer group
|   |       +-- GroupMismatch        the consumer group has other settings or topics
|   |   +-- ScheduleRefused          the daemon did not accept a schedule or an occurrence
|   |   +-- CursorRefused            a cursor is unknown, or the table of cursors is full
|   |       +-- CursorHeld           another subscriber has the cursor
|   +-- NotDurable                   applied, but the WAL stopped before the change was on disk
|   +-- ProtocolError                received bytes break docs/protocol.md
+-- Lagged                           the replay buffer dropped notices before a subscriber read them
+-- Closed                           the client or subscriber was closed
+-- ForkedProcess                    a client or subscriber was used after fork
+-- ArenaError                       the arena file cannot be used
|   +-- ArenaMissing
|   +-- ArenaMismatch                a field of the header differs
|   |   +-- OtherAbi                 a version with another ABI made the arena
|   +-- ArenaNotReady                blank, rebuilding, retired, or not created yet
|   +-- ArenaBroken                  check() found a broken invariant
|   +-- ArenaTooLarge                more bytes are needed than are available
|   +-- ArenaTooSmall                a size is too small for the contents
|   +-- ArenaInUse                   an import would replace the contents
+-- TableBroken                      a routing table or a status file cannot be read
+-- PermissionDenied                 this user may not read a daemon's file
+-- SystemFailure                    the system refused memory, a file or a file descriptor
+-- ExtraMissing                     an optional part of the installation is missing
+-- LakeBroken                       a file of the lake is missing or damaged
+-- LakeInUse                        another process writes to this part of the lake
+-- LakeMismatch                     the lake has another format
+-- BulkLoadRefused                  the daemon refused rows of a bulk load
+-- ParkedElsewhere                  another arena parked the timers of a cold tier
+-- WindowElsewhere                  the timers of a cold tier belong to another daemon
+-- WindowTaken                      a newer run promotes this window of a cold tier
+-- StartError                       the daemon cannot start
    +-- AlreadyRunning
    +-- ShardFailed                  a shard of a deployment does not start
    +-- Unplaceable                  a namespace cannot be distributed over another number of shards
    +-- BadPath                      no directory, not writable, too long, or of another owner
    +-- Unsupported                  this machine lacks something
    +-- WalError                     the files of a WAL cannot be used
        +-- WalInUse                 another daemon writes this WAL
        +-- WalCopied                the WAL is a copy of another one
        +-- WalMismatch              the WAL belongs to another arena, or to another version
        +-- WalDamaged               bytes on disk differ from those that were written
        +-- WalUnwritable            the disk is full, or the device failed
        +-- WalNeeded                an arena or a namespace needs a WAL, but none was given
"""

from __future__ import annotations

import os
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform


class PurgatorydError(Exception):
    """The base class of all errors that purgatoryd raises on purpose; catch it to catch them all.

    What to do: See the subclass.
    """

    figures: ClassVar[tuple[str, ...]] = ()
    """Attribute names of an error's figures, in the order of its arguments."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args)
        if not self.figures and not named:
            return
        given = dict(zip(self.figures, args, strict=False)) | named
        missing = [name for name in self.figures if name not in given and not hasattr(self, name)]
        if missing or len(given) < len(args) + len(named) or not given.keys() <= {*self.figures}:
            expected = ", ".join(self.figures)
            raise TypeError(f"{type(self).__name__} takes ({expected}), not {args!r} and {named!r}")
        vars(self).update({name: getattr(self, name) for name in self.figures if name not in given})
        vars(self).update(given)

    def __repr__(self) -> str:
        retained = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.figures)
        return f"{type(self).__name__}({retained})" if self.figures else super().__repr__()

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException pickles only positional arguments, but these errors also take keyword
        # arguments.
        return type(self), tuple(getattr(self, n) for n in self.figures) or self.args


_Error = TypeVar("_Error", bound=type[PurgatorydError])


@dataclass_transform(eq_default=False)
def keeps_figures(error: _Error) -> _Error:
    """Convert the annotated attributes of an error class into constructor arguments, after those of
    its base class.

    This works like a dataclass, but generates no code, which would delay each import.
    """
    error.figures = (*error.figures, *error.__annotations__)
    return error


class InvalidArgument(PurgatorydError, ValueError):
    """A call is made with an argument that is out of bounds.

    Nothing was sent and nothing changed.

    What to do: Correct the call; nothing was sent.
    """


def _too_long(said: str, length: int, limit: int) -> str:
    """Append the figures to a sentence about an argument, if its length is past the limit."""
    if length <= limit:
        return said
    return f"{said}: it has {length} bytes, allowed are at most {limit}"


@keeps_figures
class InvalidKey(InvalidArgument):
    """A call is made with a key of a wrong type or length.

    `length` is the key's length in bytes (UTF-8 for str); 0 if the type is wrong.

    What to do: Use a str, bytes or UUID with 1 to 255 bytes.
    """

    reason: str
    length: int
    limit: int

    def __str__(self) -> str:
        has = f"it has {self.length} bytes, " if self.length > self.limit else ""
        return f"key {self.reason}: {has}allowed are 1 to {self.limit} bytes"


@keeps_figures
class InvalidName(InvalidArgument):
    """A call or a command is given a name that a daemon, namespace, topic or tag may not have.

    `kind` is "daemon", "namespace", "topic" or "tag"; `length` and `limit` are in bytes.

    What to do: Use a name that the rule in the message allows.
    """

    kind: str
    name: object
    reason: str
    length: int
    limit: int

    def __str__(self) -> str:
        said = f"{self.kind} name {self.name!r} {self.reason}"
        return _too_long(said, self.length, self.limit)


@keeps_figures
class InvalidPayload(InvalidArgument):
    """A call is made with a payload that has a wrong type or is too long.

    `length` and `limit` are in bytes; `length` is 0 if the type is wrong.

    What to do: Use bytes of at most `limit`, or store the data elsewhere and send
    a reference.
    """

    reason: str
    length: int
    limit: int

    def __str__(self) -> str:
        return _too_long(f"payload {self.reason}", self.length, self.limit)


@keeps_figures
class InvalidTime(InvalidArgument):
    """A call is made with a delay or a deadline that is not a time or is too far in the future.

    `value` is the argument; `limit_ns` is the largest possible deadline, in nanoseconds.

    What to do: Use a number of seconds, a timedelta or an aware datetime below the limit.
    """

    reason: str
    value: object
    limit_ns: int

    def __str__(self) -> str:
        subject = "time" if self.value is None else f"time {self.value!r}"
        return f"{subject} {self.reason}"


@keeps_figures
class InvalidRows(InvalidArgument):
    """A bulk call, or a DataFrame that becomes timers, has a row or column that cannot be used.

    `row` is the number of the first bad row; -1 if a whole column is wrong.

    What to do: Correct the row or the column that the error names; nothing was sent.
    """

    reason: str
    row: int

    def __str__(self) -> str:
        return self.reason if self.row < 0 else f"row {self.row}: {self.reason}"


@keeps_figures
class InvalidCondition(InvalidArgument):
    """An operation is added with a condition that violates a limit.

    `reason` states the limit that `value` violates.

    What to do: Correct the condition; see the guide to the purgatory.
    """

    reason: str
    value: object

    def __str__(self) -> str:
        return f"condition: {self.reason}, not {self.value!r}"


@keeps_figures
class InvalidSetting(InvalidArgument):
    """A setting, an option or a field of a configuration file has a value that is out of bounds.

    `source` says where the value came from: a flag, the environment, a file.

    What to do: Use a value within the bound that the error states.
    """

    setting: str
    value: object
    bound: str
    source: str

    def __str__(self) -> str:
        return f"{self.setting} = {self.value!r} ({self.source}): must be {self.bound}"


@keeps_figures
class UnknownSetting(InvalidArgument):
    """A configuration file, the environment or a Spark option names a setting that does not exist.

    `known` lists the settings that exist.

    What to do: Use one of the known settings.
    """

    setting: str
    source: str
    known: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"unknown setting {self.setting!r} in {self.source}"


@keeps_figures
class Partitioned(InvalidArgument):
    """A call does not work with a namespace that has several partitions; `detail` says why.

    What to do: Use plain timers, give an operation keys of one partition, or use a namespace
    without partitions.
    """

    namespace: str
    partitions: int
    detail: str

    def __str__(self) -> str:
        return f"namespace {self.namespace!r} has {self.partitions} partitions: {self.detail}"


@keeps_figures
class Refused(PurgatorydError):
    """The daemon answers a call with a status that means a refusal.

    `status` is the number of this status in enum pg_status. A status that callers have to handle in
    its own way has a subclass.

    What to do: See the subclass; the call changed nothing.
    """

    key: object
    status: int

    why = "was refused"

    def __str__(self) -> str:
        said = f"{self.key!r} {self.why}"
        return f"{said} (status {self.status})" if self.why is Refused.why else said


@keeps_figures
class Exists(Refused):
    """A timer is added with mode="error", and its key is armed; or an earlier add of the key with
    unique_for= refuses all other adds.

    `ticket` and `deadline_boot_ns` belong to the armed timer. If `unique` is True, unique_for= of
    the timer `ticket` refuses the add, and deadline_boot_ns is the time at which the key is free.

    What to do: Use another mode (replace, keep or extend) for a timer, or another key. While a key
    is unique, only a cancel of its pending timer makes it free.
    """

    ticket: int
    deadline_boot_ns: int
    unique: bool

    def __str__(self) -> str:
        if self.unique:
            return (
                f"{self.key!r} is unique by unique_for= of ticket {self.ticket}, until "
                f"{self.deadline_boot_ns / 1e9:.3f} s on the daemon's clock: add it again after "
                "that time, or use another key; while the timer is pending, a cancel frees its key"
            )
        return (
            f"{self.key!r} is armed already, with ticket {self.ticket}: for a timer, add with mode "
            "replace, keep or extend; for an operation, and for watch, no mode helps: cancel the "
            "key first, or use another one"
        )


_SETTING_OF = {
    "slots": "--capacity",
    "space for key and payload": "--payload-memory",
    "namespaces": "--namespaces",
    "topics": "--topics",
    "sessions": "--sessions",
    "watch keys": "--watch-keys",
    "watch records": "--watches",
    "accounts": "--accounts",
    "free slots for bulk loads and their rows": "--bulk-loads or --bulk-load-rows",
    "bulk loads": "--bulk-loads",
    "blocks of 4096 rows of bulk loads": "--bulk-load-rows",
    "operations": "--capacity",
    "members of consumer groups": "--sessions",
}
"""For each resource of Full, the setting that limits it. No setting limits tickets."""
_ARGUMENT_OF = {
    "slots": "capacity",
    "space for key and payload": "payload_memory",
    "watch keys": "watch_keys",
    "watch records": "watches",
}
"""For each resource of Full that a LocalPurgatory has, the argument that limits it."""


@keeps_figures
class Full(Refused):
    """A call needs a resource of the daemon or of a LocalPurgatory that is used up.

    `resource` is "slots", "space for key and payload", "namespaces", "topics", "tickets", "watch
    keys", "watch records", "accounts", "members of consumer groups", or "free slots for bulk loads
    and their rows".

    What to do: Raise the setting that the error names and restart the daemon, or remove objects
    that are not needed.
    """

    resource: str

    def __str__(self) -> str:
        text = f"{self.key!r} was refused: the arena is out of {self.resource}"
        if setting := _SETTING_OF.get(self.resource):
            text += f"; raise {setting} and restart the daemon"
        if argument := _ARGUMENT_OF.get(self.resource):
            text += f", or raise {argument} of the LocalPurgatory"
        return text


@keeps_figures
class TooFar(Refused):
    """A timer is added or extended to a deadline that the daemon's clock cannot represent.

    `limit_ns` is the largest possible deadline, in nanoseconds.

    What to do: Use an earlier deadline.
    """

    limit_ns: int

    def __str__(self) -> str:
        return f"{self.key!r} was refused: its deadline is past {self.limit_ns} ns"


@keeps_figures
class DuplicateWatchKey(Refused):
    """An operation is added that names a watch key twice.

    `watch_key` is that key; None if it is unknown.

    What to do: Name each watch key once.
    """

    watch_key: object = None

    def __str__(self) -> str:
        twice = "a key" if self.watch_key is None else repr(self.watch_key)
        return f"{self.key!r} was refused: it watches {twice} twice; name each watch key once"


class Stopping(Refused):
    """A timer is added while `purgatoryd stop --drain` waits for the armed timers.

    What to do: Repeat the call after the restart, or cancel the drain with `purgatoryd stop
    --resume`.
    """

    why = "was refused because the daemon is stopping"


class WatermarkOverflow(Refused):
    """A bump would raise the watermark of a watch key past 2^63 - 1.

    The watermark is unchanged.

    What to do: Forget the watch key, or use smaller steps.
    """

    why = "was refused: its watermark would pass 2^63 - 1"


@keeps_figures
class FullGroup(Full):
    """A timer is added to a topic whose consumer group has used up its budget.

    `group` is the name of the consumer group, or None if only its number `row` is known; `jobs` is
    the number of pending timers, jobs and dead letters that it counts.

    What to do: Start more consumers, raise max_backlog or max_bytes with `purgatoryd groups
    change`, drop dead letters, or delete the consumer group if nobody uses it.
    """

    row: int
    jobs: int
    group: str | None = None

    def __str__(self) -> str:
        named = f"number {self.row}" if self.group is None else repr(self.group)
        return (
            f"{self.key!r} was refused: consumer group {named} has used up its budget with "
            f"{self.jobs} pending timers and jobs; start consumers, or raise its max_backlog or "
            "max_bytes"
        )


@keeps_figures
class LeaseLost(Refused):
    """A job is answered or extended after its lease has ended.

    The daemon leases the job to a consumer again, as another attempt, unless it has no attempts
    left. The answer changed nothing. `ticket` and `attempt` identify the lease.

    What to do: Drop the result of the handler, or let handlers be idempotent by `ticket`; use a
    longer lease or a higher max_lease if handlers are slow.
    """

    ticket: int
    attempt: int

    def __str__(self) -> str:
        return (
            f"the lease of job {self.key!r} (ticket {self.ticket}, attempt {self.attempt}) has "
            "ended; the answer changed nothing, and the job may run again"
        )


class Denied(Refused):
    """A call requests an action that the sender's uid may not perform in the namespace, or uses a
    reserved name.

    What to do: Use names that do not begin with "_", and a namespace of your own: `purgatoryd
    namespace ls` shows the owners.
    """

    why = (
        "was denied: another uid owns the bulk load or the namespace (`purgatoryd namespace ls` "
        "shows the owner), or the call uses a name that begins with '_', which is reserved"
    )


class Fenced(Refused):
    """A run of a bulk load adds a row after a newer run of the same bulk load has begun.

    What to do: Stop this run; the newer one continues the bulk load.
    """

    why = "was refused: a newer run of the bulk load has begun"


class BulkLoadClosed(Refused):
    """A new row is added to a bulk load that is closed.

    What to do: Use another bulk load id.
    """

    why = "was refused: the bulk load is closed"


@keeps_figures
class Busy(Refused):
    """The daemon answers a call with BUSY until the call times out.

    The WAL buffer is too full, the owner has too many unacknowledged outcomes, or the daemon makes
    space for a large payload. The call was not applied, and the client does not send it again. For
    a bulk call, `rows` has the numbers of all rows that were not applied, `in_doubt` counts the
    other rows without an answer, and `result` is the BulkResult.

    What to do: Repeat the call later; check the disk of the WAL, and acknowledge outcomes.
    """

    rows: tuple[int, ...] = ()
    in_doubt: int = 0

    result = cast(Any, None)  # not a figure, so it is not pickled
    why = "was refused because the daemon is busy"

    def __str__(self) -> str:
        text = super().__str__()
        if len(self.rows) > 1:
            text += f", as were {len(self.rows) - 1} other rows"
        return text + (f"; {self.in_doubt} rows are in doubt" if self.in_doubt else "")


class ArenaLost(Refused):
    """A call arms a timer or operation after the daemon's arena file was removed or replaced.

    The daemon cannot create the file again, because /dev/shm has no space for a copy or another
    file has its name. Armed timers still fire.

    What to do: Free space in /dev/shm, or remove the file in the arena's place.
    """

    why = (
        "was refused because the daemon's arena file was removed and cannot be created again; "
        "free space in /dev/shm, or remove the file that has its name: the daemon's log says why"
    )


class WalStopped(Refused):
    """A call arrives after the daemon's WAL has failed, for example on a full disk.

    The daemon accepts nothing new.

    What to do: Free space or replace the disk, then restart the daemon before any reboot.
    """

    why = "was refused because the daemon's WAL stopped"


@keeps_figures
class InboxFull(Busy):
    """A client that already owns the maximum number of operations calls `watch`.

    `limit` is this maximum: armed operations and operations with an unacknowledged outcome
    together.

    What to do: Acknowledge outcomes, or raise --inbox.
    """

    limit: int = 0

    def __str__(self) -> str:
        return (
            f"{self.key!r} was refused: this client owns {self.limit} of {self.limit} operations, "
            "armed or with an outcome that it has not acknowledged; raise --inbox"
        )


def _share_exceeded(uid: int, used: int, limit: int, resource: str) -> str:
    first = "acknowledge outcomes, raise" if resource == "operations" else "raise"
    return (
        f"uid {uid} holds {used} {resource}, and one uid may hold {limit}; {first} --uid-share "
        f"or {_SETTING_OF.get(resource, resource)}"
    )


@keeps_figures
class QuotaExceeded(Refused):
    """A call exceeds the quota of its namespace or of its uid (`whose`), or the share of its uid.

    For a quota, `resource` is "timers" or "bytes", and `used` of `limit` are in use. Or `resource`
    is "operations per second"; then `used` is None, and the next operation is allowed at
    `retry_boot_ns` (CLOCK_BOOTTIME).

    For a share (`--uid-share`), `resource` is "topics", "namespaces", "watch keys", "watch
    records", "operations" (armed or with an unacknowledged outcome), "bulk loads" or "blocks of
    4096 rows of bulk loads". The uid `uid` holds `used` of them, and one uid may hold `limit`.

    What to do: Wait until `retry_boot_ns`, remove timers, or raise the quota or --uid-share.
    """

    whose: str
    resource: str
    limit: int
    used: int | None = None
    retry_boot_ns: int | None = None
    uid: int | None = None

    def __str__(self) -> str:
        if self.uid is not None and self.used is not None:
            share = _share_exceeded(self.uid, self.used, self.limit, self.resource)
            return f"{self.key!r} was refused: {share}"
        text = f"{self.key!r} is over the quota of its {self.whose}, {self.limit} {self.resource}"
        return text if self.used is None else f"{text}, of which {self.used} are used"


class WrongShard(Refused):
    """A call reaches a shard that does not hold its namespace.

    What to do: Nothing: clients look up the shard and repeat the call.
    """

    why = "belongs to another shard"


def _counted(number: int, noun: str, one: str, many: str) -> str:
    """Return a number with its noun and verb, such as "1 call is" or "2 calls are"."""
    return f"{number} {noun} {one}" if number == 1 else f"{number} {noun}s {many}"


def _in_doubt(calls: int) -> str:
    return f"; {_counted(calls, 'call', 'is', 'are')} in doubt" if calls else ""


@keeps_figures
class BatchError(PurgatorydError):
    """A client made calls with wait=False and did not collect their results, and some calls were
    refused.

    `refusals` has a (key, status) pair for each of the first refused calls; status is 0 if the
    whole message was refused. `count` is the number of refused calls. For `lost` calls it is
    unknown whether they were applied, because their session expired.
    `first` is the text of the first refusal's error.

    What to do: Collect the results of calls with `wait=False`, and repeat the refused calls.
    """

    refusals: tuple[tuple[object, int], ...]
    count: int
    lost: int = 0
    first: str = ""

    def __str__(self) -> str:
        if not self.count:
            return f"{_counted(self.lost, 'packed call', 'has', 'have')} an unknown outcome"
        text = f"{_counted(self.count, 'packed call', 'was', 'were')} refused"
        if self.first:
            text += f": {self.first}" if self.count == 1 else f", the first: {self.first}"
        lost = f"; {_counted(self.lost, 'call', 'has', 'have')} an unknown outcome"
        return text + (lost if self.lost else "")


class DaemonError(PurgatorydError):
    """A call failed because the communication with the daemon failed.

    What to do: See the subclass.
    """


@keeps_figures
class DaemonUnreachable(DaemonError, ConnectionError):
    """A call or a command finds no daemon with the given name, or the daemon does not answer.

    `endpoint` was tried for `waited_s` seconds. `in_doubt` calls were handed to the socket: they
    may or may not have been applied. `shut` is the folder or socket that this user may not
    open; empty if there is none.

    What to do: Start the daemon; check its name and the permissions of its directory.
    """

    name: str
    endpoint: str
    waited_s: float
    in_doubt: int = 0
    shut: str = ""

    def __str__(self) -> str:
        text = f"no daemon {self.name!r} answered at {self.endpoint}"
        text += f" within {self.waited_s:.3g} s" if self.waited_s else ""
        if self.shut:
            text += f"; {self.shut} cannot be opened by this user, who is not in the daemon's group"
        elif self._may_be_started:
            text += f"; `purgatoryd run --name {self.name}` starts it"
        return text + _in_doubt(self.in_doubt)

    @property
    def _may_be_started(self) -> bool:
        """False for a daemon on another host, and for a shard, which its deployment starts."""
        from purgatoryd.shm_layout.shards import deployment_of

        return not self.endpoint.startswith("tcp:") and deployment_of(self.name) is None


@keeps_figures
class DaemonFrozen(DaemonUnreachable):
    """A command finds the process `pid` of a daemon whose loop has not moved for `still_ns`.

    What to do: See in `purgatoryd status` how long the loop has not moved; systemd's watchdog
    restarts the daemon.
    """

    pid: int = 0
    still_ns: int = 0

    def __str__(self) -> str:
        return (
            f"daemon {self.name!r} is frozen: process {self.pid} has not moved for "
            f"{self.still_ns / 1e9:.0f} s, and did not answer within {self.waited_s:.3g} s"
        )


@keeps_figures
class CallTimeout(DaemonError, TimeoutError):
    """A daemon is connected, but does not answer a call in time.

    `waited_s` is in seconds. The call stays in flight: the daemon may still apply it, once. The
    daemon answered BUSY to `busy` calls of this client, and the client continues to send these
    calls again. If `armed` is True, the subject is an operation, which stays armed.

    What to do: Wait for the call's handle, or repeat the call with a longer timeout.
    """

    subject: str
    waited_s: float
    in_doubt: int = 0
    busy: int = 0
    armed: bool = False

    def __str__(self) -> str:
        within = f"within {self.waited_s:.3g} s"
        if self.armed:
            return f"{self.subject} did not end {within}: still armed; wait again, or cancel"
        text = f"no answer to {self.subject} {within}{_in_doubt(self.in_doubt)}"
        waiting = _counted(self.busy, "call", "waits", "wait")
        return text + (f"; the daemon is busy, {waiting}" if self.busy else "")


@keeps_figures
class QueueFull(DaemonError, TimeoutError):
    """A call is made while the client's queue of calls is full.

    The call was not queued. The queue holds `queued` calls and may hold `limit`; `waited_s` is in
    seconds.

    What to do: Wait for results of earlier calls, or raise `queue_limit`.
    """

    queued: int
    limit: int
    waited_s: float

    def __str__(self) -> str:
        return (
            f"{self.queued} of {self.limit} calls are queued and none was acknowledged "
            f"within {self.waited_s:.3g} s; this call was not queued"
        )


@keeps_figures
class ShardUnavailable(DaemonError, ConnectionError):
    """A call is for a shard that did not answer the last calls, so nothing was sent.

    `failures` calls in a row have failed since `since_boot_ns`. The client sends nothing to the
    shard before `retry_boot_ns`. Both times are CLOCK_BOOTTIME.

    What to do: Repeat the call after `retry_boot_ns`; `purgatoryd status` shows the shard.
    """

    name: str
    shard: int
    failures: int
    since_boot_ns: int
    retry_boot_ns: int

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.name!r} did not answer {self.failures} calls in a row"


@keeps_figures
class RingsRefused(DaemonError):
    """A client with transport="ring" gets no rings from the daemon at `endpoint`.

    `reason`: the daemon's memory for rings is used up, this uid holds its share of it, or the
    daemon gives no rings to this uid at all.

    What to do: Use transport="auto", or raise --ring-memory.
    """

    endpoint: str
    reason: str

    def __str__(self) -> str:
        return f"no rings from {self.endpoint}: {self.reason}"


@keeps_figures
class SessionExpired(DaemonError):
    """The daemon has forgotten a client's session while calls were in flight.

    Each of the `in_doubt` calls was applied once or not at all; the client does not know which.

    What to do: Check with `get` which of the calls took effect.
    """

    session: int
    in_doubt: int

    def __str__(self) -> str:
        return (
            f"session {self.session:#x} expired; {self.in_doubt} calls in flight were "
            "each applied once or not at all; it is unknown which"
        )


@keeps_figures
class MessageRefused(DaemonError):
    """The daemon refuses a whole message and applies none of its records.

    `error` is the number of the error in enum pg_error, `name` is its name there, and `detail` has
    its two figures.

    What to do: Look up `name` in the protocol; the message changed nothing.
    """

    error: int
    name: str
    detail: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        if self.name == "DENIED":
            return f"uid {self.detail[0]} may not do that: the daemon refused the message"
        if self.name == "BUSY":
            return (
                "the daemon refused the message because it is busy or its WAL has stopped: "
                "`purgatoryd status` shows which; repeat the call later"
            )
        return f"the daemon refused the message: {self.name} {self.detail[0]}, {self.detail[1]}"


class NoWal(MessageRefused):
    """A call asks for durability or parking, but the daemon has no WAL.

    Nothing was applied.

    What to do: Run the daemon with --wal-dir, or ask for neither.
    """

    def __str__(self) -> str:
        return "durability and parking need a daemon with a WAL: purgatoryd run --wal-dir DIRECTORY"


class SessionTableFull(MessageRefused):
    """The daemon has as many open sessions as --sessions allows.

    `detail` has the number of sessions, and the time in ns since the longest idle session sent its
    last message.

    What to do: Close idle clients, drop sessions with `purgatoryd session drop`, or raise
    --sessions.
    """

    def __str__(self) -> str:
        sessions, silent_ns = self.detail
        return (
            f"session table full: {sessions} of {sessions} sessions are open, the most idle one "
            f"was last used {silent_ns / 1e9:.0f} s ago; raise --sessions or close idle clients"
        )


@keeps_figures
class UidShareExceeded(MessageRefused):
    """The uid of a client already holds its whole share (`--uid-share`) of the daemon's sessions,
    namespaces or bulk loads.

    `uid` holds `used` rows of `resource`, and one uid may hold `limit`. The daemon still serves
    other uids.

    What to do: Close sessions of this uid, or raise --uid-share.
    """

    resource: str = ""
    limit: int = 0
    uid: int = 0
    used: int = 0

    def __str__(self) -> str:
        return _share_exceeded(self.uid, self.used, self.limit, self.resource)


class CursorRefused(MessageRefused):
    """The daemon refuses to open, commit or delete a cursor of a subscriber.

    `detail` has the reason, as in enum pg_cursor_refusal, and its figure.

    What to do: Delete unused cursors with `purgatoryd cursor delete`, or raise --cursors or
    --topics; open a deleted cursor again.
    """

    def __str__(self) -> str:
        reason, figure = self.detail
        if reason == _CURSORS_FULL:
            return f"cursor table full: {figure} of {figure} rows are in use; raise --cursors"
        if reason == _CURSOR_UNKNOWN:
            return "the cursor does not exist: it was deleted; open it again"
        if reason == _TOPICS_FULL:
            return f"topic table full: {figure} of {figure} rows are in use; raise --topics"
        return "the positions to commit belong to another stream; their notices come again"


class CursorHeld(CursorRefused):
    """Another live subscriber has the cursor. `detail[1]` is the pid of its process, 0 = unknown.

    What to do: Close the other subscriber, or use another cursor. The daemon releases a cursor when
    the process of its subscriber ends.
    """

    def __str__(self) -> str:
        pid = self.detail[1]
        holder = f"process {pid}" if pid else "another process"
        return f"the cursor is in use: a subscriber in {holder} has opened it"


_CURSORS_FULL, _CURSOR_UNKNOWN, _TOPICS_FULL = 2, 4, 5
"""Values of enum pg_cursor_refusal; layout.py imports this module."""


@keeps_figures
class GroupRefused(MessageRefused):
    """The daemon refuses a request about a consumer group.

    `group` and `namespace` are its names, and `reason` says which limit the request violates.

    What to do: Use smaller budgets, raise the limits of the daemon, or start consumers that reduce
    the number of pending timers.
    """

    group: str = ""
    namespace: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"consumer group {self.group!r} in namespace {self.namespace!r}: {self.reason}"


class GroupMissing(GroupRefused):
    """A call names a consumer group that does not exist.

    What to do: Create it with `purgatoryd groups create`, or open a Consumer with create=True.
    """


@keeps_figures
class GroupMismatch(GroupRefused):
    """A Consumer asks for settings or topics that differ from those of the existing consumer group.

    `differs` has the name, the existing value and the requested value of each setting that differs.

    What to do: Omit the setting, or change the consumer group with `purgatoryd groups change`; a
    consumer group with other topics needs another name.
    """

    differs: tuple[tuple[str, object, object], ...] = ()

    def __str__(self) -> str:
        parts = [f"{name} is {found!r}, not {asked!r}" for name, found, asked in self.differs]
        return f"{super().__str__()}: {', '.join(parts)}" if parts else super().__str__()


@keeps_figures
class ScheduleRefused(MessageRefused):
    """The daemon does not accept a schedule, or an occurrence that is to fire at once.

    `reason` is the name of the status: BAD_SPEC (the daemon cannot read the cron expression, or its
    tz database does not have the zone), NO_OCCURRENCE (no time within the limits), FULL_SCHEDULES,
    UNKNOWN (there is no such schedule), TOO_FAR (the end of a backfill is in the future), or a
    status that also refuses a timer, such as FULL.

    What to do: Correct the expression, the zone or the time; raise --schedules or the size of the
    table that is full, or delete schedules.
    """

    reason: str = ""

    def __str__(self) -> str:
        if self.reason == "UNKNOWN":
            return "there is no schedule with this key"
        if self.reason == "BAD_SPEC":
            return "the daemon cannot read the cron expression, or it does not know the time zone"
        if self.reason == "NO_OCCURRENCE":
            return "the schedule has no occurrence: no time matches, or `until` is too early"
        if self.reason == "TOO_FAR":
            return "a time is in the future of the daemon's clock, or past the end of this clock"
        if self.reason == "FULL_SCHEDULES":
            rows = self.detail[1]
            return (
                f"schedule table full: {rows} of {rows} schedules exist; raise --schedules or "
                "delete schedules"
            )
        return f"the daemon refused the schedule: {self.reason}"


@keeps_figures
class NotDurable(DaemonError):
    """A durable call was applied, but the WAL stopped before the change was on disk.

    The change is safe only until the host reboots. `committed_lsn` is the LSN of the last record
    that is on disk; `errno` says why later records are not on disk.

    What to do: Free space or replace the disk, then restart the daemon: the start writes the
    applied changes to disk.
    """

    committed_lsn: int
    errno: int

    def __str__(self) -> str:
        return (
            f"applied, but not on disk: the WAL stopped after record {self.committed_lsn}: "
            f"{os.strerror(self.errno)}"
        )


@keeps_figures
class ProtocolError(DaemonError):
    """A client or the daemon receives bytes that break docs/protocol.md.

    `offset` is their position in bytes; `expected` and `found` are the expected and the received
    value.

    What to do: Use matching versions; otherwise report a bug.
    """

    subject: str
    offset: int
    expected: int
    found: int

    def __str__(self) -> str:
        return f"{self.subject} at byte {self.offset}: expected {self.expected}, found {self.found}"


@keeps_figures
class Lagged(PurgatorydError):
    """A subscriber asks for notices that the replay buffer has dropped.

    Notices `first_lost` to `last_lost` of the topic are lost. With `last_lost` = 0 the stream
    itself changed (another arena or incarnation) and the range is unknown; `first_lost` is then the
    first sequence that the subscriber has not seen.

    What to do: Read the missing state from your own database; raise --replay-buffer or
    subscribe faster.
    """

    namespace: str
    topic: str
    first_lost: int
    last_lost: int

    def __str__(self) -> str:
        if self.last_lost == 0:
            return f"{self.namespace}/{self.topic}: the stream changed at notice {self.first_lost}"
        return (
            f"{self.namespace}/{self.topic}: notices {self.first_lost} to {self.last_lost} "
            "are lost: the replay buffer has dropped them"
        )


@keeps_figures
class Closed(PurgatorydError):
    """A client, subscriber or other object (`subject`) is used after it was closed.

    What to do: Create another object.
    """

    subject: str

    def __str__(self) -> str:
        return f"this {self.subject} is closed"


@keeps_figures
class ForkedProcess(PurgatorydError):
    """A client or subscriber (`subject`) is used in a child of the process that made it.

    `owner_pid` is the process that made the object, `pid` is the child.

    What to do: Create clients and subscribers after the fork.
    """

    subject: str
    owner_pid: int
    pid: int

    def __str__(self) -> str:
        return (
            f"this {self.subject} belongs to process {self.owner_pid}; after fork, process "
            f"{self.pid} must make its own"
        )


class ArenaError(PurgatorydError):
    """A command or a start cannot use the daemon's arena in shared memory.

    What to do: See the subclass.
    """


def _in_dev_shm(arena_file: str) -> str:
    return f"/dev/shm/{arena_file.removeprefix('/')}"


@keeps_figures
class ArenaMissing(ArenaError):
    """A command reads the arena of a daemon, but no arena of that name exists.

    What to do: Start the daemon; a reboot removes the arena.
    """

    arena_file: str

    def __str__(self) -> str:
        return f"there is no arena file {_in_dev_shm(self.arena_file)}"


@keeps_figures
class ArenaMismatch(ArenaError):
    """A start or a command finds an arena whose header differs from the expected header.

    `field` is the header field that differs; `expected` and `found` are its expected and its actual
    value.

    What to do: Use the settings and the version that made the arena.
    """

    arena_file: str
    field: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.arena_file}: {self.field} is {self.found}, expected {self.expected}"


class OtherAbi(ArenaMismatch):
    """A command, a client or a start finds an arena of a purgatoryd version with another ABI.

    `expected` is the ABI of this version.

    What to do: Use the command of the version that made the arena, or upgrade the daemon.
    """


@keeps_figures
class ArenaNotReady(ArenaError):
    """An arena is read before its daemon has created or recovered it, or after it was replaced.

    `state` is "blank", "rebuilding", "retired", or a text that says why the arena does not exist
    yet.

    What to do: Wait until the daemon is ready: `purgatoryd status`.
    """

    arena_file: str
    state: str

    def __str__(self) -> str:
        return f"{self.arena_file} is {self.state}"


@keeps_figures
class ArenaBroken(ArenaError):
    """`purgatoryd check`, or a start, finds an arena whose contents contradict each other.

    The figures describe the first broken invariant. `part` is the part of the core that found it,
    and `where` is the row, slot or offset.

    What to do: Copy the arena files and report a bug. If there is a WAL, then remove the arena
    files and start the daemon.
    """

    part: str
    detail: str
    where: int
    expected: int
    found: int

    def __str__(self) -> str:
        return (
            f"{self.part}: {self.detail} at {self.where}: "
            f"expected {self.expected}, found {self.found}"
        )


@keeps_figures
class ArenaTooLarge(ArenaError):
    """A daemon starts with sizes for which there is not enough memory.

    `needed` and `available` are numbers of bytes in `where`: a file system, the memory of the host,
    or the memory of a cgroup.

    What to do: Free memory, enlarge /dev/shm or the limit, or lower --capacity or --payload-memory.
    """

    where: str
    needed: int
    available: int

    def __str__(self) -> str:
        return (
            f"the arena needs {self.needed} bytes in {self.where}, "
            f"available are {self.available}; free or enlarge {self.where}, or lower --capacity "
            "or --payload-memory"
        )


@keeps_figures
class ArenaTooSmall(ArenaError):
    """A daemon starts with sizes that are too small for the contents of its arena.

    The start asks for `asked` of `resource`, but the arena already holds `needed`.

    What to do: Raise the setting to at least the number that the arena holds.
    """

    resource: str
    asked: int
    needed: int

    def __str__(self) -> str:
        return f"{self.resource} {self.asked} is below {self.needed}, which the arena holds"


@keeps_figures
class ArenaInUse(ArenaError):
    """`run --import` starts a daemon whose arena is not empty.

    `arena_file` holds `timers` armed timers, `operations` operations and `notices` unsent notices.

    What to do: Import under another name, or drain the daemon first.
    """

    arena_file: str
    timers: int
    operations: int
    notices: int

    def __str__(self) -> str:
        return (
            f"{self.arena_file} holds {self.timers} timers, {self.operations} operations and "
            f"{self.notices} notices not sent yet; an import needs an empty arena"
        )


@keeps_figures
class TableBroken(PurgatorydError):
    """A client, a command or a start cannot read a deployment's routing table or status file.

    `path` is the file, and `reason` says what is wrong with it.

    What to do: The socket directory and the WAL directory each have a routing table: copy the
    intact table over the broken table. A start writes a new status file.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@keeps_figures
class PermissionDenied(PurgatorydError):
    """A command or a client reads an arena or a file of a deployment without permission.

    `path` is that file.

    What to do: Run the command as the daemon's user, a member of its group, or root.
    """

    path: str

    def __str__(self) -> str:
        return (
            f"{self.path} cannot be read by this user; allowed are the daemon's user, "
            "the members of its group, and root"
        )


@keeps_figures
class SystemFailure(PurgatorydError):
    """The system refuses the daemon memory, a file or a file descriptor, and the daemon ends.

    `number` is the errno of the failed system call (0 = unknown); `path` is its file, if it has
    one. Everything that the daemon acknowledged is still in its arena for the next start.

    What to do: Provide the resource that the message names, and start the daemon again.
    """

    number: int
    reason: str
    path: str = ""

    def __str__(self) -> str:
        text = f"the daemon cannot continue: {self.reason}"
        text += f" (errno {self.number})" if self.number else ""
        return f"{self.path}: {text}" if self.path else text


@keeps_figures
class ExtraMissing(PurgatorydError):
    """A command needs an optional part of the installation that is missing.

    `subject` is the missing part; `install` says how to install it.

    What to do: Run the command that the error shows.
    """

    subject: str
    install: str

    def __str__(self) -> str:
        return f"{self.subject} is missing: {self.install}"


@keeps_figures
class LakeBroken(PurgatorydError):
    """A command of the pipeline finds a file of the lake that is missing or damaged.

    `path` is the file, and `detail` says what is wrong with it.

    What to do: Restore the file, or ship its data again if the WAL still has them.
    """

    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


@keeps_figures
class LakeInUse(PurgatorydError):
    """A command would write to a part of the lake where another process writes.

    `path` is the lock file that the other process holds.

    What to do: Wait for the other process.
    """

    path: str

    def __str__(self) -> str:
        return f"{self.path}: another process writes to this part of the lake"


@keeps_figures
class LakeMismatch(PurgatorydError):
    """A lake or cold tier has a format that this version of purgatoryd does not read.

    `path` is the file with the format number and `found` is that number (None if the file has
    none). `expected` is the number that this version reads.

    What to do: Read the lake with the version that wrote it.
    """

    path: str
    expected: int
    found: object

    def __str__(self) -> str:
        has = "no format number" if self.found is None else f"format {self.found}"
        return (
            f"{self.path}: the file has {has}, and this version of purgatoryd reads format "
            f"{self.expected} only; read the lake with the version that wrote it"
        )


@keeps_figures
class BulkLoadRefused(PurgatorydError):
    """A bulk load has ended, and the daemon refused some of its rows.

    The daemon refused `refused` rows of `subject` and accepted all other rows. `counts` has the
    number of rows by status, and `samples` has some refusals as (namespace, key, status).

    What to do: Resolve the reasons in `counts`, and run the same bulk load again.
    """

    subject: str
    refused: int
    counts: dict[str, int]
    samples: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {status}" for status, n in sorted(self.counts.items()))
        some = ", ".join(f"{key!r} in {space!r}: {why}" for space, key, why in self.samples)
        return f"{self.subject}: {self.refused} rows were refused ({counts}); for example {some}"


@keeps_figures
class ParkedElsewhere(PurgatorydError):
    """A cold tier has timers of one arena, and no record says that the daemon's arena replaced that
    arena.

    A command tries to arm `rows` timers in the arena `daemon`, but the arena `parked_by` parked
    them. `parked_by` and `daemon` are uuids in hex.

    What to do: Ship the daemon's WAL, or collect with --wal-dir.
    """

    parked_by: str
    daemon: str
    rows: int

    def __str__(self) -> str:
        return (
            f"{self.rows} timers were parked by the arena {self.parked_by}; nothing in lake or "
            f"WAL says that the daemon's arena {self.daemon} took its place: "
            "ship the daemon's WAL, or collect with --wal-dir. The window stays promoting"
        )


@keeps_figures
class WindowElsewhere(PurgatorydError):
    """A command of the cold tier names a daemon to which the tier's timers do not belong.

    The timers belong to the daemon `daemon`, so nothing was sent to `other`.

    What to do: Name the daemon to which the tier belongs.
    """

    daemon: str
    other: str

    def __str__(self) -> str:
        return (
            f"this tier has windows or parked timers of the daemon {self.daemon!r}: all its "
            f"windows and cancels go to that daemon, none to {self.other!r}"
        )


@keeps_figures
class WindowTaken(PurgatorydError):
    """A run of `cold promote` finds that a newer run has taken over its window.

    The old run, whose fencing token is `fencing_token`, adds no more timers of `window`.

    What to do: Nothing: the newer run continues the window.
    """

    window: str
    fencing_token: int

    def __str__(self) -> str:
        return (
            f"a run newer than {self.fencing_token} promotes window {self.window}: "
            "this run adds no more timers"
        )


class StartError(PurgatorydError):
    """A daemon, or a command, cannot start.

    What to do: See the subclass.
    """


@keeps_figures
class AlreadyRunning(StartError):
    """A daemon is started with the name or the arena of a running daemon.

    `pid` is the pid of the running daemon; 0 if its process is not visible from here. The running
    daemon has locked the file `path`.

    What to do: Stop the other process, or use another name.
    """

    name: str
    pid: int
    path: str

    def __str__(self) -> str:
        process = f"process {self.pid}" if self.pid else "a process that cannot be seen from here"
        return f"a daemon {self.name!r} runs already, as {process}: it has locked {self.path}"


@keeps_figures
class ShardFailed(StartError):
    """A deployment is started, and one of its shards ends before the shard is ready.

    `daemon` is the name of the shard and `code` is its exit code. The shard's own error is printed
    above this error.

    What to do: See the shard's own error above this one.
    """

    daemon: str
    code: int

    def __str__(self) -> str:
        return f"shard {self.daemon} ended with code {self.code} before it was ready"


@keeps_figures
class Unplaceable(StartError):
    """A deployment is started with another number of shards, but a namespace cannot be resharded.

    `reason` says why.

    What to do: Change what the reason names, or start with the previous number of shards.
    """

    namespace: str
    reason: str

    def __str__(self) -> str:
        return f"namespace {self.namespace!r} cannot be resharded: it {self.reason}"


@keeps_figures
class BadPath(StartError):
    """A daemon or a command is given a path that it cannot use.

    `reason` says why.

    What to do: Change the path, its owner or its mode.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@keeps_figures
class Unsupported(StartError):
    """`purgatoryd install` needs something that this machine lacks.

    `subject` is a sentence about the missing part.

    What to do: Install what the sentence names.
    """

    subject: str

    def __str__(self) -> str:
        return self.subject


class WalError(StartError):
    """A daemon that starts, or a command that reads a WAL, cannot use the files of the WAL.

    What to do: See the subclass.
    """


@keeps_figures
class WalInUse(WalError):
    """A daemon is started with the WAL of another running daemon.

    `pid` is the pid of the other daemon; 0 = unknown.

    What to do: Stop the other daemon.
    """

    path: str
    pid: int

    def __str__(self) -> str:
        return f"{self.path}: process {self.pid or 'unknown'} writes this WAL"


@keeps_figures
class WalCopied(WalError):
    """A daemon is started with a copy of a WAL, whose original may fire the same timers.

    A file in the folder `path` records its own inode number and birth time. It records `recorded`,
    but actually has `found`.

    What to do: Make sure that no daemon uses the original, then start with --as-restored.
    """

    path: str
    recorded: str
    found: str

    def __str__(self) -> str:
        return (
            f"{self.path}: this WAL is a copy: its birth file records {self.recorded}, but has "
            f"{self.found}; make sure that no daemon runs with the original, and start with "
            "--as-restored"
        )


@keeps_figures
class WalMismatch(WalError):
    """A file belongs to another WAL, or another version wrote it.

    `field` is the field that differs; `expected` and `found` are its expected and its actual value.

    What to do: Use the WAL of this daemon, and the version that wrote it.
    """

    path: str
    field: str
    expected: object
    found: object

    def __str__(self) -> str:
        text = f"{self.path}: {self.field} is {self.found}, expected {self.expected}"
        if not self.field.startswith("the files end before"):
            return text
        return (
            f"{text}; the daemon probably wrote the later records to another --wal-dir: "
            "start it with that directory"
        )


@keeps_figures
class WalDamaged(WalError):
    """A start or a reader finds damaged bytes in a WAL.

    Bytes `first_byte` to `last_byte` of `path` are damaged. Records `first_lsn` to `last_lsn` are
    lost or in doubt. A figure of 0 means unknown.

    What to do: Restore the files, or accept the loss with --force-wal.
    """

    path: str
    detail: str
    first_byte: int
    last_byte: int
    first_lsn: int
    last_lsn: int

    @property
    def place(self) -> str:
        """The damaged file, bytes and records as text, without advice."""
        damaged = f"{self.path}: {self.detail}"
        if self.last_byte:
            damaged += f": bytes {self.first_byte} to {self.last_byte}"
        if self.first_lsn or self.last_lsn:
            damaged += f", records {self.first_lsn} to {self.last_lsn or 'unknown'}"
        return damaged

    def __str__(self) -> str:
        if not self.path.endswith(".wal"):  # a start can use no part of a damaged snapshot
            return self.place
        return f"{self.place}; --force-wal starts with the records before the damage"


@keeps_figures
class WalUnwritable(WalError):
    """A daemon cannot write its WAL, a snapshot or an export, for example on a full disk.

    `errno` says why writing `path` failed.

    What to do: Free space or replace the disk.
    """

    path: str
    errno: int

    def __str__(self) -> str:
        return f"{self.path} cannot be written: {os.strerror(self.errno)}"


@keeps_figures
class WalNeeded(WalError):
    """A daemon is started without the WAL that its arena or a namespace needs.

    The arena `arena_file` has a WAL, and without it changes would not be recorded. Or, if
    `namespace` is not None, an import contains this durable namespace, and durability needs a WAL.

    What to do: Start with the --wal-dir of the last start, or export and import without a WAL.
    """

    arena_file: str
    namespace: str | None = None

    def __str__(self) -> str:
        if self.namespace is not None:
            return (
                f"namespace {self.namespace!r} is durable: import it with --wal-dir; to import it "
                "without a WAL, set its durability to memory before the export"
            )
        return (
            f"{_in_dev_shm(self.arena_file)} has a WAL: start the daemon with the --wal-dir of its "
            "last start; to start without a WAL, start it so once more, then run `purgatoryd stop "
            "--export FILE`, and import FILE into another name"
        )
