"""Constants, enums, struct formats and layout id of layout.h, for Python.

All values come from the compiled header, so nothing is declared twice.
"""

from __future__ import annotations

import enum
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.digests import blake2b

if TYPE_CHECKING:
    import numpy as np

    LAYOUT_ID: int

HEADER = Path(__file__).with_name("layout.h")

KEY_MAX: int = lib.PG_KEY_MAX
PAYLOAD_MAX: int = lib.PG_PAYLOAD_MAX
NAMESPACE_MAX: int = lib.PG_NAMESPACE_MAX
SLACK_MAX_NS: int = lib.PG_SLACK_MAX_NS
UNIQUE_MAX_NS: int = lib.PG_UNIQUE_MAX_NS
TOPIC_MAX: int = lib.PG_TOPIC_MAX
TAG_MAX: int = lib.PG_TAG_MAX
PRIORITY_MAX: int = lib.PG_PRIORITY_MAX
GRANULE: int = lib.PG_GRANULE
BATCH_RECORDS: int = lib.PG_BATCH_RECORDS
BATCH_NAMES: int = lib.PG_BATCH_NAMES
MESSAGE_MAX: int = lib.PG_MESSAGE_MAX
WINDOW: int = lib.PG_WINDOW
WORKER_MAX: int = lib.PG_WORKER_MAX
GROUP_NAME_MAX: int = lib.PG_GROUP_NAME_MAX
GROUP_TOPICS_MAX: int = lib.PG_GROUP_TOPICS_MAX
GROUP_TIME_MAX_NS: int = lib.PG_GROUP_TIME_MAX_NS
ATTEMPTS_MAX: int = lib.PG_ATTEMPTS_MAX
CREDITS_MAX: int = lib.PG_CREDITS_MAX
JOB_ERROR_MAX: int = lib.PG_JOB_ERROR_MAX
WIRE_MAGIC: int = lib.PG_WIRE_MAGIC
WIRE_VERSION: int = lib.PG_WIRE_VERSION
NOTICE_MAGIC: int = lib.PG_NOTICE_MAGIC
REGION_ALIGN: int = lib.PG_REGION_ALIGN
FLAG_AT: int = lib.PG_W_AT
FLAG_DURABLE: int = lib.PG_W_DURABLE
FLAG_DRAIN: int = lib.PG_W_DRAIN
FLAG_RESUME: int = lib.PG_W_RESUME
FLAG_BULK_LOAD: int = lib.PG_W_BULK_LOAD
NOTICE_OF_OPERATION: int = lib.PG_E_OPERATION
NOTICE_OF_SCHEDULE: int = lib.PG_E_SCHEDULE
SCHEDULE_KEY_MAX: int = lib.PG_SCHEDULE_KEY_MAX
SPEC_MAX: int = lib.PG_SPEC_MAX
ZONE_MAX: int = lib.PG_ZONE_MAX
NOMINAL_MAX: int = lib.PG_NOMINAL_MAX
NOMINAL_UNKNOWN: int = lib.PG_NOMINAL_UNKNOWN
"""Stands for a nominal time that the daemon has not computed; in a request, for the current
time."""
NOMINAL_NONE: int = lib.PG_NOMINAL_NONE
"""Stands for no occurrence, or for no limit."""
TIME_MAX_NS = 2**63 - 1
WATERMARK_MAX: int = lib.PG_WATERMARK_MAX
TARGET_MAX: int = lib.PG_TARGET_MAX
GRACE_MAX_NS: int = lib.PG_GRACE_MAX_NS
TICKET_SHARD: int = lib.PG_TICKET_SHARD
"""The tickets of a shard start at shard number * TICKET_SHARD + 1."""
QUOTA_MAX: int = lib.PG_QUOTA_MAX
QUOTA_OPS_MAX: int = lib.PG_QUOTA_OPS_MAX
LATE_PER_S_MAX: int = lib.PG_LATE_PER_S_MAX
LATE_GRACE_MIN_NS: int = lib.PG_LATE_GRACE_MIN_NS
LATE_GRACE_MAX_NS: int = lib.PG_LATE_GRACE_MAX_NS
TICKET_MAX: int = lib.PG_TICKET_MAX
BULK_LOAD_ROW_MAX: int = lib.PG_BULK_LOAD_ROW_MAX
CURSOR_MAX: int = lib.PG_CURSOR_MAX
CURSOR_TOPICS: int = lib.PG_CURSOR_TOPICS
BULK_LOAD_BLOCK_ROWS: int = lib.PG_BULK_LOAD_BLOCK_ROWS
ANYBODY: int = lib.PG_NIL
"""Stands for the owner of a namespace that has no owner."""
WATCH_KEYS_MAX: int = lib.PG_WATCH_KEYS_MAX
OWN_KEY: int = lib.PG_WK_OWN


class Message(enum.IntEnum):
    """enum pg_message."""

    HELLO = lib.PG_M_HELLO
    BATCH = lib.PG_M_BATCH
    QUERY = lib.PG_M_QUERY
    BYE = lib.PG_M_BYE
    PING = lib.PG_M_PING
    OUTCOMES = lib.PG_M_OUTCOMES
    ACK = lib.PG_M_ACK
    BULK_LOAD = lib.PG_M_BULK_LOAD
    PLACE = lib.PG_M_PLACE
    LIST = lib.PG_M_LIST
    SWEEP = lib.PG_M_SWEEP
    GROUP = lib.PG_M_GROUP
    JOBS = lib.PG_M_JOBS
    DEAD = lib.PG_M_DEAD
    SCHEDULE = lib.PG_M_SCHEDULE
    CURSOR = lib.PG_M_CURSOR
    REPLAY = lib.PG_M_REPLAY
    STATS = lib.PG_M_STATS
    ADVANCE = lib.PG_M_ADVANCE
    STOP = lib.PG_M_STOP
    PUBLISH = lib.PG_M_PUBLISH
    NAMESPACE = lib.PG_M_NAMESPACE
    SESSIONS = lib.PG_M_SESSIONS
    DROP = lib.PG_M_DROP
    TOPIC = lib.PG_M_TOPIC


class Op(enum.IntEnum):
    """enum pg_op."""

    PUT = lib.PG_OP_PUT
    CANCEL = lib.PG_OP_CANCEL
    GET = lib.PG_OP_GET
    WATCH = lib.PG_OP_WATCH
    ADVANCE_KEY = lib.PG_OP_ADVANCE_KEY
    BUMP = lib.PG_OP_BUMP
    FAIL = lib.PG_OP_FAIL
    CLEAR = lib.PG_OP_CLEAR
    FORGET = lib.PG_OP_FORGET
    CANCEL_FOR_KEY = lib.PG_OP_CANCEL_FOR_KEY
    COMPLETE = lib.PG_OP_COMPLETE
    UNPARK = lib.PG_OP_UNPARK
    JOIN = lib.PG_OP_JOIN
    JOB_ACK = lib.PG_OP_JOB_ACK
    JOB_NACK = lib.PG_OP_JOB_NACK
    JOB_EXTEND = lib.PG_OP_JOB_EXTEND
    JOB_RELEASE = lib.PG_OP_JOB_RELEASE
    JOB_REJECT = lib.PG_OP_JOB_REJECT


class Condition(enum.IntEnum):
    """enum pg_condition."""

    ALL = lib.PG_C_ALL
    ANY = lib.PG_C_ANY
    SUM = lib.PG_C_SUM
    CLIENT = lib.PG_C_CLIENT
    QUORUM = lib.PG_C_QUORUM


class PutMode(enum.IntEnum):
    """enum pg_put_mode."""

    ERROR = lib.PG_MODE_ERROR
    REPLACE = lib.PG_MODE_REPLACE
    KEEP = lib.PG_MODE_KEEP
    EXTEND = lib.PG_MODE_EXTEND


class TimeKind(enum.IntEnum):
    """enum pg_time_kind."""

    BOOT = lib.PG_T_BOOT
    DELAY = lib.PG_T_DELAY
    WALL = lib.PG_T_WALL


class ExtKind(enum.IntEnum):
    """enum pg_ext_kind, without the reserved kinds."""

    WALL = lib.PG_EXT_WALL
    TAG = lib.PG_EXT_TAG
    PRIORITY = lib.PG_EXT_PRIORITY
    ORDER = lib.PG_EXT_ORDER
    LATE = lib.PG_EXT_LATE
    UNIQUE = lib.PG_EXT_UNIQUE


class KeyType(enum.IntEnum):
    """enum pg_key_type."""

    STR = lib.PG_KEY_STR
    BYTES = lib.PG_KEY_BYTES
    UUID = lib.PG_KEY_UUID


class Status(enum.IntEnum):
    """enum pg_status: the answer to one record."""

    NONE = lib.PG_ST_NONE
    ADDED = lib.PG_ST_ADDED
    REPLACED = lib.PG_ST_REPLACED
    KEPT = lib.PG_ST_KEPT
    EXTENDED = lib.PG_ST_EXTENDED
    EXISTS = lib.PG_ST_EXISTS
    CANCELLED = lib.PG_ST_CANCELLED
    FIRED = lib.PG_ST_FIRED
    UNKNOWN = lib.PG_ST_UNKNOWN
    FOUND = lib.PG_ST_FOUND
    DONE = lib.PG_ST_DONE
    MORE = lib.PG_ST_MORE
    BULK_LOADED = lib.PG_ST_BULK_LOADED
    PARKED = lib.PG_ST_PARKED
    UNPARKED = lib.PG_ST_UNPARKED
    FULL = lib.PG_ST_FULL
    FULL_PAYLOAD = lib.PG_ST_FULL_PAYLOAD
    FULL_NAMESPACES = lib.PG_ST_FULL_NAMESPACES
    FULL_TOPICS = lib.PG_ST_FULL_TOPICS
    FULL_TICKETS = lib.PG_ST_FULL_TICKETS
    FULL_KEYS = lib.PG_ST_FULL_KEYS
    FULL_WATCHES = lib.PG_ST_FULL_WATCHES
    FULL_ACCOUNTS = lib.PG_ST_FULL_ACCOUNTS
    TOO_FAR = lib.PG_ST_TOO_FAR
    DENIED = lib.PG_ST_DENIED
    BUSY = lib.PG_ST_BUSY
    QUOTA = lib.PG_ST_QUOTA
    WRONG_SHARD = lib.PG_ST_WRONG_SHARD
    DUPLICATE = lib.PG_ST_DUPLICATE
    OVERFLOW = lib.PG_ST_OVERFLOW
    WAL = lib.PG_ST_WAL
    STOPPING = lib.PG_ST_STOPPING
    FULL_BULK_LOADS = lib.PG_ST_FULL_BULK_LOADS
    FENCED = lib.PG_ST_FENCED
    CLOSED = lib.PG_ST_CLOSED
    ARENA = lib.PG_ST_ARENA
    FULL_GROUP = lib.PG_ST_FULL_GROUP
    LEASE_LOST = lib.PG_ST_LEASE_LOST
    NO_GROUP = lib.PG_ST_NO_GROUP
    FULL_MEMBERS = lib.PG_ST_FULL_MEMBERS
    LEASED = lib.PG_ST_LEASED
    FULL_SCHEDULES = lib.PG_ST_FULL_SCHEDULES
    BAD_SPEC = lib.PG_ST_BAD_SPEC
    NO_OCCURRENCE = lib.PG_ST_NO_OCCURRENCE


class Quota(enum.IntEnum):
    """enum pg_quota: the kinds of quotas that can be used up."""

    NAMESPACE_TIMERS = lib.PG_Q_NAMESPACE_TIMERS
    NAMESPACE_BYTES = lib.PG_Q_NAMESPACE_BYTES
    NAMESPACE_OPS = lib.PG_Q_NAMESPACE_OPS
    UID_TIMERS = lib.PG_Q_UID_TIMERS
    UID_BYTES = lib.PG_Q_UID_BYTES
    UID_OPS = lib.PG_Q_UID_OPS
    UID_TOPICS = lib.PG_Q_UID_TOPICS
    UID_NAMESPACES = lib.PG_Q_UID_NAMESPACES
    UID_SESSIONS = lib.PG_Q_UID_SESSIONS
    UID_WATCH_KEYS = lib.PG_Q_UID_WATCH_KEYS
    UID_WATCHES = lib.PG_Q_UID_WATCHES
    UID_OPERATIONS = lib.PG_Q_UID_OPERATIONS
    UID_BULK_LOADS = lib.PG_Q_UID_BULK_LOADS
    UID_BULK_LOAD_BLOCKS = lib.PG_Q_UID_BULK_LOAD_BLOCKS
    UID_SCHEDULES = lib.PG_Q_UID_SCHEDULES
    UID_CURSORS = lib.PG_Q_UID_CURSORS


class NamespaceField(enum.IntFlag):
    """enum pg_namespace_field: the settings that a NAMESPACE message changes."""

    OWNER = lib.PG_N_OWNER
    DURABILITY = lib.PG_N_DURABILITY
    TIMERS = lib.PG_N_TIMERS
    BYTES = lib.PG_N_BYTES
    OPS = lib.PG_N_OPS
    PARK = lib.PG_N_PARK
    LATE = lib.PG_N_LATE
    PAUSED = lib.PG_N_PAUSED


class TopicField(enum.IntFlag):
    """enum pg_topic_field: the settings that a TOPIC message changes."""

    SLACK = lib.PG_TF_SLACK
    LATE = lib.PG_TF_LATE
    PAUSED = lib.PG_TF_PAUSED
    PRIORITY = lib.PG_TF_PRIORITY


class LatePolicy(enum.IntEnum):
    """enum pg_late_policy: the end of a timer that is later than its grace."""

    FIRE = lib.PG_LATE_FIRE
    SKIP = lib.PG_LATE_SKIP
    COALESCE = lib.PG_LATE_COALESCE


class WireError(enum.IntEnum):
    """enum pg_error: the reason why a whole message was refused."""

    NONE = lib.PG_ERR_NONE
    MALFORMED = lib.PG_ERR_MALFORMED
    VERSION = lib.PG_ERR_VERSION
    UNKNOWN_MESSAGE = lib.PG_ERR_UNKNOWN_MESSAGE
    TOO_LARGE = lib.PG_ERR_TOO_LARGE
    SESSION_EXPIRED = lib.PG_ERR_SESSION_EXPIRED
    OUT_OF_ORDER = lib.PG_ERR_OUT_OF_ORDER
    STALE = lib.PG_ERR_STALE
    CHANGED = lib.PG_ERR_CHANGED
    SESSIONS_FULL = lib.PG_ERR_SESSIONS_FULL
    DENIED = lib.PG_ERR_DENIED
    STOPPING = lib.PG_ERR_STOPPING
    CLOCK = lib.PG_ERR_CLOCK
    INTERNAL = lib.PG_ERR_INTERNAL
    NO_WAL = lib.PG_ERR_NO_WAL
    NAMESPACES_FULL = lib.PG_ERR_NAMESPACES_FULL
    NOT_DURABLE = lib.PG_ERR_NOT_DURABLE
    BUSY = lib.PG_ERR_BUSY
    BULK_LOADS_FULL = lib.PG_ERR_BULK_LOADS_FULL
    FENCED = lib.PG_ERR_FENCED
    WRONG_SHARD = lib.PG_ERR_WRONG_SHARD
    PLACED = lib.PG_ERR_PLACED
    QUOTA = lib.PG_ERR_QUOTA
    GROUP = lib.PG_ERR_GROUP
    SCHEDULE = lib.PG_ERR_SCHEDULE
    CURSOR = lib.PG_ERR_CURSOR


class RingRefusal(enum.IntEnum):
    """enum pg_ring_refusal: the reason why the daemon gives a client no rings, or no arena."""

    NONE = lib.PG_RING_NONE
    MEMORY = lib.PG_RING_MEMORY
    UID = lib.PG_RING_UID
    DENIED = lib.PG_RING_DENIED
    UNREAD = lib.PG_RING_UNREAD


class BulkLoadState(enum.IntEnum):
    """enum pg_bulk_load_state."""

    NONE = lib.PG_BULK_LOAD_NONE
    OPEN = lib.PG_BULK_LOAD_OPEN
    CLOSED = lib.PG_BULK_LOAD_CLOSED


class BulkLoadAction(enum.IntEnum):
    """enum pg_bulk_load_action: the request of a BULK_LOAD message."""

    STATUS = lib.PG_LA_STATUS
    OPEN = lib.PG_LA_OPEN
    CLOSE = lib.PG_LA_CLOSE
    FORGET = lib.PG_LA_FORGET


class GroupAction(enum.IntEnum):
    """enum pg_group_action: the request of a GROUP message."""

    CREATE = lib.PG_GA_CREATE
    DESCRIBE = lib.PG_GA_DESCRIBE
    CHANGE = lib.PG_GA_CHANGE
    DELETE = lib.PG_GA_DELETE
    PAUSE = lib.PG_GA_PAUSE
    RESUME = lib.PG_GA_RESUME


class GroupFlag(enum.IntFlag):
    """enum pg_group_flag."""

    ORDERED = lib.PG_G_ORDERED
    BLOCK = lib.PG_G_BLOCK
    DROP_OLDEST = lib.PG_G_DROP_OLDEST
    PAUSED = lib.PG_G_PAUSED


class GroupRefusal(enum.IntEnum):
    """enum pg_group_refusal: the reason for WireError.GROUP."""

    MISSING = lib.PG_GR_MISSING
    MISMATCH = lib.PG_GR_MISMATCH
    ROWS = lib.PG_GR_ROWS
    JOBS = lib.PG_GR_JOBS
    PENDING = lib.PG_GR_PENDING
    SETTINGS = lib.PG_GR_SETTINGS


class JobReason(enum.IntEnum):
    """enum pg_job_reason: the reason why a job became a dead letter."""

    NONE = lib.PG_JR_NONE
    MAX_ATTEMPTS = lib.PG_JR_MAX_ATTEMPTS
    REJECTED = lib.PG_JR_REJECTED
    TOO_OLD = lib.PG_JR_TOO_OLD


class DeadAction(enum.IntEnum):
    """enum pg_dead_action: the request of a DEAD message."""

    LIST = lib.PG_DA_LIST
    REQUEUE = lib.PG_DA_REQUEUE
    DROP = lib.PG_DA_DROP


class SweepState(enum.IntEnum):
    """enum pg_sweep_state."""

    NONE = lib.PG_SW_NONE
    RUNNING = lib.PG_SW_RUNNING
    DONE = lib.PG_SW_DONE
    STOPPED = lib.PG_SW_STOPPED
    CUT = lib.PG_SW_CUT


class SweepChange(enum.IntEnum):
    """enum pg_sweep_change."""

    CANCEL = lib.PG_SC_CANCEL
    SHIFT = lib.PG_SC_SHIFT
    MOVE = lib.PG_SC_MOVE


class SweepAction(enum.IntEnum):
    """enum pg_sweep_action: the request of a SWEEP message."""

    STATUS = lib.PG_SA_STATUS
    BEGIN = lib.PG_SA_BEGIN
    STOP = lib.PG_SA_STOP


class SelectField(enum.IntFlag):
    """enum pg_select_field."""

    PREFIX = lib.PG_SEL_PREFIX
    TOPIC = lib.PG_SEL_TOPIC
    TAG = lib.PG_SEL_TAG


class ScheduleState(enum.IntEnum):
    """enum pg_schedule_state."""

    NONE = lib.PG_SCHEDULE_NONE
    ACTIVE = lib.PG_SCHEDULE_ACTIVE
    PAUSED = lib.PG_SCHEDULE_PAUSED


class Overlap(enum.IntEnum):
    """enum pg_overlap: what happens to the next occurrence of a schedule while jobs are open."""

    ALLOW = lib.PG_OVERLAP_ALLOW
    SKIP = lib.PG_OVERLAP_SKIP
    QUEUE = lib.PG_OVERLAP_QUEUE
    DELAY = lib.PG_OVERLAP_DELAY


class ScheduleAction(enum.IntEnum):
    """enum pg_schedule_action: the request of a SCHEDULE message."""

    PUT = lib.PG_SA_PUT
    GET = lib.PG_SA_GET
    LIST = lib.PG_SA_LIST
    DELETE = lib.PG_SA_DELETE
    PAUSE = lib.PG_SA_PAUSE
    RESUME = lib.PG_SA_RESUME
    TRIGGER = lib.PG_SA_TRIGGER
    BACKFILL = lib.PG_SA_BACKFILL
    NEXT = lib.PG_SA_NEXT


class CursorAction(enum.IntEnum):
    """enum pg_cursor_action: the request of a CURSOR message."""

    OPEN = lib.PG_CA_OPEN
    COMMIT = lib.PG_CA_COMMIT
    CLOSE = lib.PG_CA_CLOSE
    DELETE = lib.PG_CA_DELETE


class CursorRefusal(enum.IntEnum):
    """enum pg_cursor_refusal: the reason why the daemon refuses a CURSOR message."""

    HELD = lib.PG_CR_HELD
    FULL = lib.PG_CR_FULL
    STALE = lib.PG_CR_STALE
    UNKNOWN = lib.PG_CR_UNKNOWN
    TOPICS = lib.PG_CR_TOPICS


class Cause(enum.IntEnum):
    """enum pg_cause: the reason for a notice."""

    EXPIRED = lib.PG_CAUSE_EXPIRED
    SATISFIED = lib.PG_CAUSE_SATISFIED
    FAILED = lib.PG_CAUSE_FAILED
    CANCELLED = lib.PG_CAUSE_CANCELLED
    PUBLISHED = lib.PG_CAUSE_PUBLISHED


class ClockKind(enum.IntEnum):
    """enum pg_clock_kind."""

    BOOT = lib.PG_CLOCK_BOOT
    VIRTUAL = lib.PG_CLOCK_VIRTUAL


class ArenaState(enum.IntEnum):
    """enum pg_arena_state."""

    BLANK = lib.PG_BLANK
    REBUILDING = lib.PG_REBUILDING
    READY = lib.PG_READY
    RETIRED = lib.PG_RETIRED


class PlacementMode(enum.IntEnum):
    """enum pg_placement_mode: the source of the daemon's placement."""

    NONE = lib.PG_PLACE_NONE
    AUTO = lib.PG_PLACE_AUTO
    EXPLICIT = lib.PG_PLACE_EXPLICIT


class PlacementPart(enum.IntFlag):
    """enum pg_placement_part: the parts of a placement."""

    CPUS = lib.PG_PL_CPUS
    MEMORY = lib.PG_PL_MEMORY
    REALTIME = lib.PG_PL_REALTIME
    LOCK = lib.PG_PL_LOCK
    HUGE = lib.PG_PL_HUGE
    SPIN = lib.PG_PL_SPIN
    CORE = lib.PG_PL_CORE


def kernel_number(stored: int) -> int | None:
    """Convert the stored number of a node or CPU, which is the kernel's number + 1, to the kernel's
    number; None for 0, which means any."""
    return stored - 1 if stored else None


class DaemonState(enum.IntEnum):
    """enum pg_daemon_state: the phase of the daemon."""

    STOPPED = lib.PG_D_STOPPED
    STARTING = lib.PG_D_STARTING
    RECOVERING = lib.PG_D_RECOVERING
    READY = lib.PG_D_READY
    DEGRADED = lib.PG_D_DEGRADED
    DRAINING = lib.PG_D_DRAINING


class Degraded(enum.IntFlag):
    """enum pg_degraded: the reasons why a daemon is degraded."""

    WAL = lib.PG_WHY_WAL
    WAL_BUFFER = lib.PG_WHY_WAL_BUFFER
    LATE = lib.PG_WHY_LATE
    TIMERS = lib.PG_WHY_TIMERS
    PAYLOADS = lib.PG_WHY_PAYLOADS
    ARENA = lib.PG_WHY_ARENA
    FRAGMENTED = lib.PG_WHY_FRAGMENTED
    PAUSED = lib.PG_WHY_PAUSED

    @property
    def names(self) -> list[str]:
        """Names of all reasons in this value."""
        return [str(reason.name).lower() for reason in Degraded if reason in self]


class WalState(enum.IntEnum):
    """enum pg_wal_state: whether appended records are still written to disk."""

    NONE = lib.PG_WAL_NONE
    RUNNING = lib.PG_WAL_RUNNING
    STOPPED = lib.PG_WAL_STOPPED


class Measured(enum.IntEnum):
    """enum pg_histogram_id: the measured durations."""

    STRUCTURAL_LATENESS = lib.PG_HG_STRUCTURAL_LATENESS
    WAKEUP_LATENESS = lib.PG_HG_WAKEUP_LATENESS
    BATCH_SERVICE = lib.PG_HG_BATCH_SERVICE
    REQUEST_QUEUE = lib.PG_HG_REQUEST_QUEUE
    LOCAL = lib.PG_HG_LOCAL
    REMOTE = lib.PG_HG_REMOTE
    RESPONSE_QUEUE = lib.PG_HG_RESPONSE_QUEUE
    SEND = lib.PG_HG_SEND


class WalkState(enum.IntEnum):
    """enum pg_walk_state: the reason why a WAL reader stopped, or that it is still reading."""

    NONE = lib.PG_WALK_NONE
    GROUPS = lib.PG_WALK_GROUPS
    SEALED = lib.PG_WALK_SEALED
    END = lib.PG_WALK_END
    TORN = lib.PG_WALK_TORN
    DAMAGED = lib.PG_WALK_DAMAGED


_CODES = {
    "int8_t": "b", "uint8_t": "B", "int16_t": "h", "uint16_t": "H", "int32_t": "i",
    "uint32_t": "I", "int64_t": "q", "uint64_t": "Q",
}  # fmt: skip


def struct_names() -> tuple[str, ...]:
    """Return the names of all structs that layout.h declares, in its order."""
    return tuple(re.findall(r"^struct (\w+) \{", HEADER.read_text(), re.MULTILINE))


def fields(name: str) -> list[tuple[str, int, Any]]:
    """Return (field name, byte offset, cffi type) of each field of struct `name`."""
    return [(n, f.offset, f.type) for n, f in ffi.typeof(f"struct {name}").fields]


def size_of(name: str) -> int:
    """Return the size of struct `name` in bytes."""
    return int(ffi.sizeof(f"struct {name}"))


def _code(ctype: Any) -> str:
    if ctype.kind == "struct":
        return struct_format(ctype.cname.removeprefix("struct "))[1:]
    if ctype.kind != "array":
        return _CODES[str(ctype.cname)]
    if ctype.item.cname in ("char", "uint8_t"):
        return f"{ctype.length}s"
    if ctype.item.kind == "primitive":
        return f"{ctype.length}{_CODES[ctype.item.cname]}"
    return _code(ctype.item) * int(ctype.length)


def is_padding(field: str) -> bool:
    """Return whether a field is padding, which only aligns the next field."""
    return field.startswith("pad")


@cache
def struct_format(name: str) -> str:
    """Return the format of a struct for Python's module struct: explicit little endian; padding
    fields give no values.

    Byte and char arrays are one `s` item. Nested structs are flattened.
    """
    parts, end = ["<"], 0
    for field, offset, ctype in fields(name):
        if not is_padding(field):
            parts.append("x" * (offset - end) + _code(ctype))
            end = offset + int(ffi.sizeof(ctype))
    return "".join(parts) + "x" * (size_of(name) - end)


@cache
def struct_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy structured dtype of struct `name`, which must not contain other structs.
    Needs numpy."""
    import numpy as np

    names, offsets, types = zip(*fields(name), strict=True)
    return np.dtype(
        {
            "names": list(map(str, names)),
            "offsets": list(offsets),
            "formats": [_dtype_code(t) for t in types],
            "itemsize": size_of(name),
        }
    )


def _dtype_code(ctype: Any) -> str:
    return "<" + _code(ctype) if ctype.kind == "primitive" else f"V{ffi.sizeof(ctype)}"


def places(name: str) -> list[str]:
    """Return offset and type of each field of struct `name`, such as "8:q"."""
    return [f"{offset}:{_code(ctype)}" for _, offset, ctype in fields(name)]


def layout_id() -> int:
    """Return a 64-bit hash of the sizes of all structs and of the offsets and types of their
    fields.

    The names of fields do not enter the hash, because renaming a field changes no byte.
    """
    structs = "".join(f"{size_of(name)}: {' '.join(places(name))}\n" for name in struct_names())
    return int.from_bytes(blake2b(f"{sys.byteorder}{structs}".encode(), 8), "little")


EVENTS_NAMESPACE, EVENTS_TOPIC = "_purgatoryd", "_events"
"""Namespace and topic in which the daemon publishes notices about itself and its clients."""


def is_reserved(name: str) -> bool:
    """Return whether a namespace or topic name is reserved for notices without a timer."""
    return name[:1] == chr(lib.PG_RESERVED)


def __getattr__(name: str) -> int:
    """Compute LAYOUT_ID when it is first used, so that clients that read no arena do not wait for
    it."""
    if name != "LAYOUT_ID":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = layout_id()
    return value


ABI = (int(lib.PG_ABI_MAJOR), int(lib.PG_ABI_MINOR))

RELEASED_LAYOUTS: dict[int, tuple[int, int]] = {}
"""ABI version by layout id, for all released ABIs before the current one."""


def converts(layout_id: int) -> bool:
    """Return whether a daemon of this ABI can convert arenas with this layout id, because their ABI
    is an earlier minor version."""
    major, minor = RELEASED_LAYOUTS.get(layout_id, (0, 0))
    return major == ABI[0] and minor < ABI[1]
