"""The error tree of purgatoryd. Every error keeps its figures as attributes.

PurgatorydError
+-- InvalidArgument (ValueError)     the caller's argument; nothing was sent
|   +-- InvalidKey                   1..255 bytes of str, bytes or UUID
|   +-- InvalidName                  daemon, namespace or topic
|   +-- InvalidPayload               0..65536 bytes
|   +-- InvalidTime                  delay or deadline
|   +-- InvalidRows                  columns of a bulk call
|   +-- InvalidCondition             keys, watermarks or threshold of an operation
|   +-- InvalidSetting               a setting or an option is out of bounds
|   +-- UnknownSetting               a setting or an option of another name
|   +-- Partitioned                  not with a namespace that has several partitions
+-- Refused                          the daemon refused one timer; the arena is unchanged
|   +-- Exists                       mode="error" and the key is armed
|   +-- Full                         slots, payload bytes, namespaces, topics or tickets
|   +-- TooFar                       the deadline is past 2^63 - 1 ns
|   +-- DuplicateWatchKey            a watch key twice in one operation
|   +-- WatermarkOverflow            a watermark past 2^63 - 1
|   +-- Stopping                     the daemon waits for what is armed, and then stops
|   +-- Denied                       the namespace has another owner
|   +-- QuotaExceeded                of a namespace or a uid: timers, bytes, operations per second;
|   |                                of a uid: its share of a table
|   +-- Fenced                       a newer run of the bulk load has begun
|   +-- BulkLoadClosed               the bulk load takes no more rows
|   +-- WrongShard
|   +-- Busy                         the daemon or the key is busy until the call's timeout
|   |   +-- InboxFull                the owner has --inbox operations
|   +-- WalStopped                   the daemon's disk failed or is full
|   +-- ArenaLost                    the daemon's arena file is gone
+-- BatchError                       refusals of packed calls that nobody collected
+-- DaemonError                      the conversation with the daemon failed
|   +-- DaemonUnreachable (ConnectionError)
|   |   +-- DaemonFrozen             its process exists, and its loop does not move
|   +-- CallTimeout (TimeoutError)   connected, but no answer in time
|   +-- QueueFull (TimeoutError)     the bounded send queue stayed full
|   +-- ShardUnavailable (ConnectionError)   a shard failed often; it is not asked for a while
|   +-- SessionExpired               the outcome of what was in flight is unknown
|   +-- MessageRefused               the daemon refused a whole message
|   |   +-- NoWal                    durable=True, and the daemon keeps no WAL
|   |   +-- SessionTableFull         as many sessions are open as --sessions
|   |   +-- UidShareExceeded         the uid holds its share of the sessions or namespaces
|   +-- NotDurable                   applied, but the WAL stopped before it was on disk
|   +-- ProtocolError                bytes that break docs/protocol.md
+-- Lagged                           a subscriber was overtaken by the replay buffer
+-- Closed                           the client or subscriber was closed
+-- ForkedProcess                    a client or subscriber was used after fork
+-- ArenaError                       the arena file
|   +-- ArenaMissing
|   +-- ArenaMismatch                a header field differs: both values
|   |   +-- OtherAbi                 of another version of purgatoryd
|   +-- ArenaNotReady                blank, rebuilding, retired, or not there yet
|   +-- ArenaBroken                  check() found a broken invariant
|   +-- ArenaTooLarge                needed and available bytes
|   +-- ArenaTooSmall                below what lives in it
|   +-- ArenaInUse                   an import would replace what lives in it
+-- TableBroken                      the file that says which shard holds what
+-- PermissionDenied                 this user may not read a daemon's file
+-- SystemFailure                    the machine refused the daemon memory, a file, a descriptor
+-- ExtraMissing                     a part of the installation that was not asked for
+-- LakeBroken                       a file of the lake is not what was written
+-- LakeInUse                        another process writes there
+-- LakeMismatch                     a lake of another format
+-- BulkLoadRefused                  the daemon refused rows of a bulk load
+-- ParkedElsewhere                  nothing says that the daemon has a cold tier's parked timers
+-- WindowElsewhere                  a cold tier's timers are another daemon's
+-- WindowTaken                      a newer run brings this window of a cold tier
+-- StartError                       the daemon cannot start
    +-- AlreadyRunning
    +-- ShardFailed                  a shard of a deployment does not start
    +-- Unplaceable                  a namespace that cannot be divided among other shards
    +-- BadPath                      not a directory, foreign owner, not writable, too long
    +-- Unsupported                  this machine cannot run it
    +-- WalError                     the files of the WAL
        +-- WalInUse                 another daemon writes it
        +-- WalCopied                the WAL is a copy of another one
        +-- WalMismatch              it is not this arena's, or not of this version
        +-- WalDamaged               bytes that were on disk are not what was written
        +-- WalUnwritable            a full disk, an error of the device
        +-- WalNeeded                an arena or a namespace needs one, and none was given
"""

from __future__ import annotations

import os
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform


class PurgatorydError(Exception):
    """Every error that purgatoryd raises on purpose is one of these; catch it to catch all.

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
        # BaseException pickles positional arguments only; these errors take keywords.
        return type(self), tuple(getattr(self, n) for n in self.figures) or self.args


_Error = TypeVar("_Error", bound=type[PurgatorydError])


@dataclass_transform(eq_default=False)
def keeps_figures(error: _Error) -> _Error:
    """Make the annotations of an error class its arguments, after those of its base class.

    This works like a dataclass, but generates no code, which would delay each import.
    """
    error.figures = (*error.figures, *error.__annotations__)
    return error


class InvalidArgument(PurgatorydError, ValueError):
    """A call gets an argument that is out of bounds.

    Nothing was sent and nothing changed.

    What to do: Correct the call; nothing was sent.
    """


@keeps_figures
class InvalidKey(InvalidArgument):
    """A call gets a key of a wrong type or length.

    `length` is in bytes (UTF-8 for str); 0 if the type is wrong.

    What to do: Use 1 to 255 bytes of str, bytes or UUID.
    """

    reason: str
    length: int
    limit: int

    def __str__(self) -> str:
        return f"key {self.reason}: it has {self.length} bytes, allowed are 1 to {self.limit}"


@keeps_figures
class InvalidName(InvalidArgument):
    """A call or a command gets a name that a daemon, namespace or topic may not have.

    `kind` is "daemon", "namespace" or "topic"; `length` and `limit` are bytes.

    What to do: Use a name that the rule in the message allows.
    """

    kind: str
    name: object
    reason: str
    length: int
    limit: int

    def __str__(self) -> str:
        said = f"{self.kind} name {self.name!r} {self.reason}"
        if self.length <= self.limit:
            return said
        return f"{said}: it has {self.length} bytes, allowed are at most {self.limit}"


@keeps_figures
class InvalidPayload(InvalidArgument):
    """A call gets a payload of a wrong type, or one that is too long.

    `length` and `limit` are bytes; the length is 0 if the type is wrong.

    What to do: Use bytes of at most `limit`, or store the data elsewhere and send
    a reference.
    """

    reason: str
    length: int
    limit: int

    def __str__(self) -> str:
        return f"payload {self.reason}: it has {self.length} bytes, allowed are up to {self.limit}"


@keeps_figures
class InvalidTime(InvalidArgument):
    """A call gets a delay or a deadline that is no time or is too far off.

    `value` is the argument; `limit_ns` is the largest deadline, in nanoseconds.

    What to do: Use a number of seconds, a timedelta or an aware datetime below the limit.
    """

    reason: str
    value: object
    limit_ns: int

    def __str__(self) -> str:
        return (
            f"time {self.value!r} {self.reason}; the largest deadline is "
            f"{self.limit_ns} ns on the daemon's clock"
        )


@keeps_figures
class InvalidRows(InvalidArgument):
    """A bulk call, or a DataFrame that becomes timers, has a row or column that cannot be used.

    `row` is the first bad row, -1 if a column is at fault.

    What to do: Correct the row or the column that the error names; nothing was sent.
    """

    reason: str
    row: int

    def __str__(self) -> str:
        return self.reason if self.row < 0 else f"row {self.row}: {self.reason}"


@keeps_figures
class InvalidCondition(InvalidArgument):
    """An operation is added with a condition that breaks a bound.

    `reason` names the bound that `value` breaks.

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

    `known` are the settings that exist.

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
    """The daemon answers a call with a status that refuses it.

    `status` is its number in enum pg_status. Statuses that need a reaction of their own have
    a subclass.

    What to do: See the subclass; the call changed nothing.
    """

    key: object
    status: int

    why = "was refused"

    def __str__(self) -> str:
        return f"{self.key!r} {self.why} (status {self.status})"


@keeps_figures
class Exists(Refused):
    """A timer is added with mode="error", and its key is armed.

    `ticket` and `deadline_boot_ns` are those of the armed timer.

    What to do: Use another mode: replace, keep or extend.
    """

    ticket: int
    deadline_boot_ns: int

    def __str__(self) -> str:
        return f"{self.key!r} is armed already, with ticket {self.ticket}"


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
}
"""Setting that limits each resource of Full. Tickets have none."""


@keeps_figures
class Full(Refused):
    """A call needs a resource of the daemon that is used up.

    `resource` is slots, space for key and payload, namespaces, topics, tickets, watch keys, watch
    records, accounts, or free slots for bulk loads and their rows.

    What to do: Raise the setting that the error names and restart, or remove what is not
    needed.
    """

    resource: str

    def __str__(self) -> str:
        text = f"{self.key!r} was refused: the arena is out of {self.resource}"
        setting = _SETTING_OF.get(self.resource)
        return text + (f"; raise {setting} and restart the daemon" if setting else "")


@keeps_figures
class TooFar(Refused):
    """A timer is added or extended to a deadline that the daemon's clock cannot represent.

    `limit_ns` is the largest deadline.

    What to do: Use an earlier deadline.
    """

    limit_ns: int

    def __str__(self) -> str:
        return f"{self.key!r} was refused: its deadline is past {self.limit_ns} ns"


class DuplicateWatchKey(Refused):
    """An operation is added that names a watch key twice.

    What to do: Name each watch key once.
    """

    why = "was refused: it watches a key twice"


class Stopping(Refused):
    """A timer is added while `purgatoryd stop --drain` waits for the armed ones.

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


class Denied(Refused):
    """A call does something in a namespace that the sender's uid may not do there.

    What to do: Ask the owner of the namespace or an administrator: `purgatoryd namespace ls`
    shows the owner.
    """

    why = "was denied"


class Fenced(Refused):
    """A row is added by a run of a bulk load after a newer run of it has begun.

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
    """The daemon refuses a call as BUSY until the call times out.

    The WAL buffer is too full, or the owner has too many unacknowledged outcomes. The call was
    not done, and the client does not send it again. For a bulk call `rows` are the numbers of all
    rows that were not done, `in_doubt` is the number of other rows without an answer, and `result`
    is the BulkResult.

    What to do: Repeat the call later; check the disk of the WAL, and acknowledge outcomes.
    """

    rows: tuple[int, ...] = ()
    in_doubt: int = 0

    result = cast(Any, None)  # no figure: it is not pickled
    why = "was refused because the daemon is busy"

    def __str__(self) -> str:
        text = super().__str__()
        if len(self.rows) > 1:
            text += f", as were {len(self.rows) - 1} other rows"
        return text + (f"; {self.in_doubt} rows are in doubt" if self.in_doubt else "")


class ArenaLost(Refused):
    """A call arms a timer or operation, and the daemon's arena file was removed or replaced.

    /dev/shm has no space for a copy, or another file has the name. Armed timers still fire.

    What to do: Free space in /dev/shm, or remove the file in the arena's place.
    """

    why = (
        "was refused because the daemon's arena file was removed and cannot be made again; "
        "free space in /dev/shm, or remove the file that has its name: the daemon's log says which"
    )


class WalStopped(Refused):
    """A call comes after the daemon's WAL failed, such as on a full disk.

    The daemon accepts nothing new.

    What to do: Free space or replace the disk, then restart the daemon before any reboot.
    """

    why = "was refused because the daemon's WAL stopped"


@keeps_figures
class InboxFull(Busy):
    """A client that owns the maximum number of operations calls watch.

    `limit` counts armed operations and those with an unacknowledged outcome.

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
    """A call exceeds the quota of its namespace or of its uid (`whose`), or its uid's share.

    `resource` is "timers" or "bytes", of which `used` of `limit` are in use, or "operations per
    second": then `used` is None, and `retry_boot_ns` says when the next one is allowed
    (CLOCK_BOOTTIME). Or it is "topics", "namespaces", "watch keys", "watch records", "operations",
    armed or with an unacknowledged outcome, "bulk loads" or "blocks of 4096 rows of bulk loads":
    the uid `uid` holds `used` of the `limit` that one uid may hold (`--uid-share`).

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


@keeps_figures
class BatchError(PurgatorydError):
    """A client made calls with wait=False, did not collect their results, and some were refused.

    `refusals` holds (key, status) pairs of the first ones, with status 0 where the whole
    message was refused; `count` says how many there were, `lost` how many calls have an
    unknown outcome because their session expired.

    What to do: Collect the results of calls with `wait=False`, and repeat the refused ones.
    """

    refusals: tuple[tuple[object, int], ...]
    count: int
    lost: int = 0

    def __str__(self) -> str:
        first = ", ".join(f"{key!r} with status {status}" for key, status in self.refusals[:3])
        text = f"{self.count} packed calls were refused"
        if first:
            text += f", the first: {first}"
        return text + (f"; {self.lost} have an unknown outcome" if self.lost else "")


class DaemonError(PurgatorydError):
    """A call failed because the conversation with the daemon did.

    What to do: See the subclass.
    """


@keeps_figures
class DaemonUnreachable(DaemonError, ConnectionError):
    """A call or a command finds no daemon of that name, or none that answers.

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
        return text + (f"; {self.in_doubt} calls are in doubt" if self.in_doubt else "")


@keeps_figures
class DaemonFrozen(DaemonUnreachable):
    """A command finds the process `pid` of a daemon whose loop has not moved for `still_ns`.

    What to do: `purgatoryd status` shows for how long; systemd's watchdog restarts it.
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
    """A call gets no answer in time from a daemon that is connected.

    `waited_s` is in seconds. The call stays in flight: it may still be applied, once. The daemon
    refused `busy` calls of this client as BUSY; the client goes on sending them again.

    What to do: Wait for the handle, or repeat the call with a longer timeout.
    """

    subject: str
    waited_s: float
    in_doubt: int = 0
    busy: int = 0

    def __str__(self) -> str:
        text = f"no answer to {self.subject} within {self.waited_s:.3g} s"
        text += f"; {self.in_doubt} calls are in doubt" if self.in_doubt else ""
        return text + (f"; the daemon is busy, {self.busy} calls wait" if self.busy else "")


@keeps_figures
class QueueFull(DaemonError, TimeoutError):
    """A call is made while as many calls wait as the client may queue.

    The call was not queued. `queued` of `limit` calls wait; `waited_s` is in seconds.

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
    """A call is for a shard that did not answer the last calls, and nothing was sent.

    `failures` calls in a row failed since `since_boot_ns`; the shard is not asked before
    `retry_boot_ns` (CLOCK_BOOTTIME).

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
class SessionExpired(DaemonError):
    """The daemon has forgotten a client's session while calls were in flight.

    Each of the `in_doubt` calls was applied once or not at all, which is unknown.

    What to do: Check with `get` which of the calls took effect.
    """

    session: int
    in_doubt: int

    def __str__(self) -> str:
        return (
            f"session {self.session:#x} expired; {self.in_doubt} calls in flight were "
            "applied once or not at all, which is unknown"
        )


@keeps_figures
class MessageRefused(DaemonError):
    """The daemon refuses a whole message and applies none of its records.

    `error` is its number in enum pg_error, `name` its name, `detail` its two figures.

    What to do: See `name` in the protocol; the message changed nothing.
    """

    error: int
    name: str
    detail: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        if self.name == "DENIED":
            return f"uid {self.detail[0]} may not do that: the daemon refused the message"
        return f"the daemon refused the message: {self.name} {self.detail[0]}, {self.detail[1]}"


class NoWal(MessageRefused):
    """A call asks for durability, and the daemon keeps no WAL.

    Nothing was applied.

    What to do: Run the daemon with --wal-dir, or do not ask for durability.
    """

    def __str__(self) -> str:
        return "durability needs a daemon with a WAL: purgatoryd run --wal-dir DIRECTORY"


class SessionTableFull(MessageRefused):
    """All sessions of the daemon are open.

    `detail`: the number of sessions, and the ns since the most idle one sent a message.

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
    """The uid of a client holds its share (`--uid-share`) of the daemon's sessions, namespaces or
    bulk loads.

    `uid` holds `used` rows of `resource`, and one uid may hold `limit`. Other uids are served.

    What to do: Close sessions of this uid, or raise --uid-share.
    """

    resource: str = ""
    limit: int = 0
    uid: int = 0
    used: int = 0

    def __str__(self) -> str:
        return _share_exceeded(self.uid, self.used, self.limit, self.resource)


@keeps_figures
class NotDurable(DaemonError):
    """A durable call was applied, but the WAL stopped before the change was on disk.

    It holds until a reboot. `committed_lsn` is the last record that is on disk; `errno` says
    why no later one is.

    What to do: Free space or replace the disk, then restart: the start writes what was applied.
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

    `offset` says where, `expected` and `found` the values.

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
    itself changed (another arena or incarnation) and the range is unknown; `first_lost` is then
    the first sequence that was not seen.

    What to do: Read the missing state from your own database; raise --replay-buffer or
    subscribe faster.
    """

    namespace: str
    topic: str
    first_lost: int
    last_lost: int

    def __str__(self) -> str:
        if self.last_lost == 0:
            return f"{self.namespace}/{self.topic}: the stream changed at {self.first_lost}"
        return (
            f"{self.namespace}/{self.topic}: notices {self.first_lost} to {self.last_lost} "
            "were overtaken in the replay buffer"
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

    `owner_pid` made it, `pid` is the child.

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


@keeps_figures
class ArenaMissing(ArenaError):
    """A command reads the arena of a daemon, and there is none of that name.

    What to do: Start the daemon; a reboot removes the arena.
    """

    arena_file: str

    def __str__(self) -> str:
        return f"there is no arena file /dev/shm/{self.arena_file.removeprefix('/')}"


@keeps_figures
class ArenaMismatch(ArenaError):
    """A start or a command meets an arena whose header differs from what it expects.

    `field` of the header differs: `expected` and `found` are both values.

    What to do: Use the settings and the version that made the arena.
    """

    arena_file: str
    field: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.arena_file}: {self.field} is {self.found}, expected {self.expected}"


class OtherAbi(ArenaMismatch):
    """A command, a client or a start meets an arena of a version with another ABI.

    `expected` is the ABI of this version.

    What to do: Use the command of the version that made the arena, or upgrade the daemon.
    """


@keeps_figures
class ArenaNotReady(ArenaError):
    """An arena is read before its daemon has created or recovered it, or after it was replaced.

    `state` is blank, rebuilding, retired, or not there yet and why.

    What to do: Wait until the daemon is ready: `purgatoryd status`.
    """

    arena_file: str
    state: str

    def __str__(self) -> str:
        return f"{self.arena_file} is {self.state}"


@keeps_figures
class ArenaBroken(ArenaError):
    """`purgatoryd check`, or a start, finds an arena whose contents contradict each other.

    It is the first broken invariant: in `part`, at `where`.

    What to do: Keep the arena files and report a bug; with a WAL, remove them and start.
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

    `needed` and `available` are bytes in `where`.

    What to do: Free space, enlarge /dev/shm, or lower --capacity or --payload-memory.
    """

    where: str
    needed: int
    available: int

    def __str__(self) -> str:
        return (
            f"the arena needs {self.needed} bytes in {self.where}, "
            f"available are {self.available}; free space, or lower --capacity or --payload-memory"
        )


@keeps_figures
class ArenaTooSmall(ArenaError):
    """A daemon starts with sizes that are too small for the contents of its arena.

    `resource` was asked to be `asked`, and holds `needed`.

    What to do: Raise the setting to what the arena holds.
    """

    resource: str
    asked: int
    needed: int

    def __str__(self) -> str:
        return f"{self.resource} {self.asked} is below {self.needed}, which the arena holds"


@keeps_figures
class ArenaInUse(ArenaError):
    """`run --import` starts a daemon whose arena is not empty.

    `arena_file` holds `timers` armed timers, `operations`, and `notices` that were not sent.

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

    `path` is the file, `reason` what is wrong with it.

    What to do: Copy the intact routing table, of the socket directory or of the WAL directory, over
    the broken one. A start writes a status file again.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@keeps_figures
class PermissionDenied(PurgatorydError):
    """A command or a client reads an arena or a file of a deployment without the rights for it.

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
    """The machine refuses the daemon memory, a file or a descriptor, and the daemon ends.

    `number` is the errno (0: not known) of the system call, on `path` if any. What the daemon
    had acknowledged is in its arena, for the next start.

    What to do: Give the daemon what the message names, and start it again.
    """

    number: int
    reason: str
    path: str = ""

    def __str__(self) -> str:
        text = f"the daemon cannot go on: {self.reason}"
        text += f" (errno {self.number})" if self.number else ""
        return f"{self.path}: {text}" if self.path else text


@keeps_figures
class ExtraMissing(PurgatorydError):
    """A command needs an optional part of the installation that is missing.

    `subject` is needed; `install` says how to get it.

    What to do: Run the command that the error shows.
    """

    subject: str
    install: str

    def __str__(self) -> str:
        return f"{self.subject} is missing: {self.install}"


@keeps_figures
class LakeBroken(PurgatorydError):
    """A command of the pipeline finds a file of the lake that is missing or damaged.

    `path` is the file, `detail` is wrong with it.

    What to do: Restore the file; or ship it again if the WAL still has it.
    """

    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


@keeps_figures
class LakeInUse(PurgatorydError):
    """A command would write to a part of the lake where another process writes.

    `path` is the lock that it holds.

    What to do: Wait for the other process.
    """

    path: str

    def __str__(self) -> str:
        return f"{self.path}: another process writes to this part of the lake"


@keeps_figures
class LakeMismatch(PurgatorydError):
    """A lake or cold tier has a format that this version of purgatoryd does not read.

    `path` is its file, `found` the format number there (None if it has none), `expected` ours.

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
    """A bulk load ends, and the daemon refused some of its rows.

    The daemon refused `refused` rows of `subject` and did the others. `counts`: rows by status;
    `samples`: some refusals, as (namespace, key, status).

    What to do: Resolve the reasons in `counts`, and run the same bulk load again.
    """

    subject: str
    refused: int
    counts: dict[str, int]
    samples: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {status}" for status, n in sorted(self.counts.items()))
        some = ", ".join(f"{key!r} in {space!r}: {why}" for space, key, why in self.samples)
        return f"{self.subject}: {self.refused} rows were refused ({counts}); such as {some}"


@keeps_figures
class ParkedElsewhere(PurgatorydError):
    """A cold tier has timers of an arena, and no record says that the daemon's arena replaced it.

    `rows` timers were parked by the arena `parked_by`, and they are asked of `daemon`. Both are
    uuids in hex.

    What to do: Ship the WAL, or use --wal-dir.
    """

    parked_by: str
    daemon: str
    rows: int

    def __str__(self) -> str:
        return (
            f"{self.rows} timers were parked by the arena {self.parked_by}; nothing in lake or "
            f"WAL says that the daemon's arena {self.daemon} took its place: ship its WAL, "
            "or collect with --wal-dir. The window stays promoting"
        )


@keeps_figures
class WindowElsewhere(PurgatorydError):
    """A command of the cold tier names another daemon than the one that its timers belong to.

    The tier is of the daemon `daemon`: nothing goes to `other`.

    What to do: Name the daemon to which the tier belongs.
    """

    daemon: str
    other: str

    def __str__(self) -> str:
        return (
            f"this tier has windows or parked timers of the daemon {self.daemon!r}: all its "
            f"windows and cancels go there, none to {self.other!r}"
        )


@keeps_figures
class WindowTaken(PurgatorydError):
    """`cold promote` finds that a newer run has taken over its window.

    Run `fencing_token` of `window` adds nothing more.

    What to do: Nothing: the newer run continues the window.
    """

    window: str
    fencing_token: int

    def __str__(self) -> str:
        return (
            f"a newer run than {self.fencing_token} brings window {self.window}: "
            "this one adds no more"
        )


class StartError(PurgatorydError):
    """A daemon, or a command, cannot start.

    What to do: See the subclass.
    """


@keeps_figures
class AlreadyRunning(StartError):
    """A daemon is started with the name or the arena of a running daemon.

    `pid` is its process, 0 if it cannot be seen from here. It has locked the file `path`.

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
    """A deployment is started, and one of its shards ends before it is ready.

    `daemon` is the shard and `code` its exit code; its own error stands above.

    What to do: See the shard's own error above this one.
    """

    daemon: str
    code: int

    def __str__(self) -> str:
        return f"shard {self.daemon} ended with code {self.code} before it was ready"


@keeps_figures
class Unplaceable(StartError):
    """A deployment is started with another number of shards, and a namespace cannot be resharded.

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

    `subject` is a sentence about it.

    What to do: Install what the sentence names.
    """

    subject: str

    def __str__(self) -> str:
        return self.subject


class WalError(StartError):
    """A daemon starts, or a command reads a WAL, and its files cannot be used.

    What to do: See the subclass.
    """


@keeps_figures
class WalInUse(WalError):
    """A daemon is started with the WAL of another running daemon.

    `pid` is its process, 0 if unknown.

    What to do: Stop the other daemon.
    """

    path: str
    pid: int

    def __str__(self) -> str:
        return f"{self.path}: process {self.pid or 'unknown'} writes this WAL"


@keeps_figures
class WalCopied(WalError):
    """A daemon is started with a copy of a WAL, whose original may fire the same timers.

    The original's birth was `recorded`; the file that records it in the folder `path` has `found`.

    What to do: Make sure that no daemon uses the original, then start with --as-restored.
    """

    path: str
    recorded: str
    found: str

    def __str__(self) -> str:
        return (
            f"{self.path}: this WAL is a copy: its birth has {self.recorded}, the copy has "
            f"{self.found}; make sure that no daemon runs with the original, and start with "
            "--as-restored"
        )


@keeps_figures
class WalMismatch(WalError):
    """A file belongs to another WAL, or another version wrote it.

    `field` differs: `expected` and `found` are both values.

    What to do: Use the WAL of this daemon, and the version that wrote it.
    """

    path: str
    field: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.path}: {self.field} is {self.found}, expected {self.expected}"


@keeps_figures
class WalDamaged(WalError):
    """A start or a reader finds damaged bytes in a WAL.

    Bytes `first_byte` to `last_byte` of `path` are damaged: records `first_lsn` to `last_lsn` are
    lost or in doubt; 0 = unknown.

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
        """File, bytes and records of the damage, without advice."""
        damaged = f"{self.path}: {self.detail}"
        if self.last_byte:
            damaged += f": bytes {self.first_byte} to {self.last_byte}"
        if self.first_lsn or self.last_lsn:
            damaged += f", records {self.first_lsn} to {self.last_lsn or 'unknown'}"
        return damaged

    def __str__(self) -> str:
        if not self.path.endswith(".wal"):  # a snapshot has no records before the damage
            return self.place
        return f"{self.place}; --force-wal goes on with what is before"


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

    The arena `arena_file` has a WAL; without it, its records would go nowhere. Or it is
    imported, and its `namespace` is durable, which nothing is without a WAL.

    What to do: Start with --wal-dir, or export and import without a WAL.
    """

    arena_file: str
    namespace: str | None = None

    def __str__(self) -> str:
        if self.namespace is not None:
            return (
                f"namespace {self.namespace!r} is durable: import it with --wal-dir; to go on "
                "without, set its durability to memory before the export"
            )
        return (
            f"{self.arena_file} has a WAL: start it with --wal-dir; to go on without, "
            "stop it with --export FILE, and import that into another name"
        )
