"""Columns of the lake's tables; the Arrow and Spark schemas are derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

FORMAT = 1
"""Format number in every JSON file of a lake. A change of a column or of a field needs the next
number. Files with another number are refused."""


@dataclass(frozen=True, slots=True)
class Column:
    """`type`: "string", "word" (a string of few values), "binary", "long", "int", "double",
    "boolean", "date", "timestamp" (UTC, microseconds), or for a list of structs its columns.
    `about`: for docs/reference/tables.md."""

    name: str
    type: str | tuple[Column, ...]
    nullable: bool = True
    about: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the lake."""

    name: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        """Of the columns, in order."""
        return [column.name for column in self.columns]

    def arrow(self) -> pa.Schema:
        """The schema of its files."""
        import pyarrow as pa

        return pa.schema([_arrow_field(column) for column in self.columns])

    def spark(self) -> StructType:
        """The schema that Spark reads it with."""
        return _spark_struct(self.columns)


def columns(kind: str, names: str, **settings: Any) -> tuple[Column, ...]:
    """Columns of one type, by their names."""
    return tuple(Column(name, kind, **settings) for name in names.split())


# ---- Arrow and Spark -------------------------------------------------------------------------


def _arrow_field(column: Column) -> pa.Field:
    import pyarrow as pa

    return pa.field(column.name, arrow_type(column.type), column.nullable)


def arrow_type(kind: str | tuple[Column, ...]) -> pa.DataType:
    """Arrow's type of a column's."""
    import pyarrow as pa

    if isinstance(kind, tuple):
        return pa.list_(pa.field("element", pa.struct([_arrow_field(c) for c in kind]), False))
    known = {
        "string": pa.string(),
        "word": pa.dictionary(pa.int32(), pa.string()),
        "binary": pa.binary(),
        "long": pa.int64(),
        "int": pa.int32(),
        "double": pa.float64(),
        "boolean": pa.bool_(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us", "UTC"),
    }
    return known[kind]


def _spark_struct(columns: tuple[Column, ...]) -> StructType:
    from pyspark.sql import types

    return types.StructType(
        [types.StructField(c.name, spark_type(c.type), c.nullable) for c in columns]
    )


def spark_type(kind: str | tuple[Column, ...]) -> DataType:
    """Spark's type of a column's."""
    from pyspark.sql import types

    if isinstance(kind, tuple):
        return types.ArrayType(_spark_struct(kind), containsNull=False)
    known: dict[str, DataType] = {
        "string": types.StringType(),
        "word": types.StringType(),
        "binary": types.BinaryType(),
        "long": types.LongType(),
        "int": types.IntegerType(),
        "double": types.DoubleType(),
        "boolean": types.BooleanType(),
        "date": types.DateType(),
        "timestamp": types.TimestampType(),
    }
    return known[kind]


# ---- bronze ----------------------------------------------------------------------------------

BRONZE = Table(
    "bronze",
    (
        Column("daemon", "word", False, about="uuid of the arena, in hex"),
        Column("node", "word", False, about="host of the daemon, as given by `ship --node`"),
        Column("epoch", "long", False, about="start of the daemon that began the segment"),
        Column("segment", "long", False, about="first LSN of the record's file; of a snapshot: the "
               "LSN from which the WAL is redone over it"),
        Column("lsn", "long", False, about="number of the record; within a snapshot, its position"),
        Column("kind", "word", False, about="`arm`, `move`, `fire`, `end`, `watch`, `outcome`, "
               "`watermark`, `sent`, ... as `wal cat` prints"),
        Column("clock", "word", False, about="`boot` or `virtual`: never to be mixed"),
        Column("at", "timestamp", False, about="time of the record on the wall clock"),
        Column("at_ns", "long", about="time of the record"),
        Column("namespace", "word", about="namespace of key or topic"),
        Column("topic", "word", about="topic of the notice"),
        Column("ticket", "long", about="names the timer for ever, with `daemon`"),
        Column("key", "binary", about="key of the timer or the operation, or watch key; of "
               "`consumer_group`: its name"),
        Column("key_type", "word", about="`str`, `bytes` or `uuid`"),
        Column("payload", "binary", about="payload; of `metrics` the histograms"),
        Column("payload_len", "int", about="bytes of the payload"),
        Column("deadline_ns", "long", about="deadline"),
        Column("wall_deadline_ns", "long", about="deadline on the wall clock, since 1970"),
        Column("sent_ns", "long", about="the client packed the call; boot clock of its host"),
        Column("received_ns", "long", about="the daemon received the call; boot clock"),
        Column("applied_ns", "long", about="the daemon began to apply the call; boot clock"),
        Column("armed_ns", "long", about="the timer was armed"),
        Column("add_lsn", "long", about="record that armed it"),
        Column("session", "long", about="session that armed it; of `job`: that has the lease"),
        Column("worker", "word", about="name of the client of `session`, or `uid:pid`"),
        Column("ended_boot_ns", "long", about="end of the timer or operation; boot clock"),
        Column("uid", "int", about="uid of the client"),
        Column("slot", "int", about="slot in the arena"),
        Column("cause", "word", about="cause of an end"),
        Column("error", "int", about="error of a failed operation or watch key"),
        Column("flags", "int", about="of ends and notices enum pg_entry_flag; of `bulk_load` enum "
               "pg_bulk_load_state"),
        Column("sequence", "long", about="sequence of the notice in its topic; of `replied`: the "
               "first batch"),
        Column("position", "long", about="position of the notice in the replay buffer"),
        Column("replaced", "long", about="ticket of the timer that an `arm` replaced"),
        Column("condition", "word", about="condition of an operation"),
        Column("threshold", "long", about="threshold of a quorum or a sum"),
        Column(
            "watch",
            (
                Column("row", "int", nullable=False),
                *columns("long", "target base cap", nullable=False),
                Column("flags", "int", nullable=False),
            ),
            about="watch keys of an operation: row, target, base, cap, flags",
        ),
        Column("missing", "binary", about="watch keys that an outcome lacks, as bits"),
        Column("watermark", "long", about="watermark of a watch key"),
        Column("row", "int", about="row of a watch key, namespace or topic; of `opened`: the pid"),
        Column("positions_from", "long", about="of `sent`: first position handed over"),
        Column("positions_upto", "long", about="of `sent`: end of the positions; of `head`: end of "
               "the replay buffer"),
        Column("built_ns", "long", about="notices or answers were built; boot clock"),
        Column("handed_ns", "long", about="notices or answers were handed over; boot clock"),
        Column("count", "int", about="of `sent`, `replied`: how many; of `head`: slots; of "
               "`consumer_group`: topics, 0 = it was deleted"),
        Column("bulk_load", "binary", about="id of the bulk load"),
        Column("bulk_load_row", "long", about="row in the bulk load"),
        Column("replaced_add_lsn", "long", about="`add_lsn` of the replaced timer"),
        Column("replaced_session", "long", about="`session` of the replaced timer"),
        Column("replaced_sent_ns", "long", about="`sent_ns` of the replaced timer"),
        Column("replaced_received_ns", "long", about="`received_ns` of the replaced timer"),
        Column("replaced_applied_ns", "long", about="`applied_ns` of the replaced timer"),
        Column("replaced_armed_ns", "long", about="`armed_ns` of the replaced timer"),
        Column("replaced_worker", "word", about="`worker` of the replaced timer"),
        Column("parked", "int", about="1: the daemon kept only the key of this add"),
        Column("payload_bytes", "long", about="of `head`: payload memory of the arena"),
        Column("replaced_deadline_ns", "long", about="`deadline_ns` of the replaced timer"),
        Column("ended_by", "long", about="session that cancelled or replaced the timer"),
        Column("ended_batch", "long", about="batch of that session"),
        Column("bulk_loaded", "int", about="1: the timer came as the row of a bulk load"),
        Column("replaced_bulk_loaded", "int", about="`bulk_loaded` of the replaced timer"),
        Column("done_ns", "long", about="the call of the core that armed it returned; boot clock"),
        Column("replaced_done_ns", "long", about="`done_ns` of the replaced timer"),
        Column("slack_ns", "long", about="slack of the timer in effect; null: none"),
        Column("incarnation", "long", about="of `consumer_group`, `job`: names the consumer group "
               "for ever, with `daemon`"),
        Column("job_state", "word", about="of `job`: `waiting`, `leased`, `delayed`, `dead`, or "
               "`ended`; then `cause` is `acknowledged` or `dropped`"),
        Column("dead_reason", "word", about="of a dead `job`: `max_attempts`, `rejected`, "
               "`too_old`"),
        Column("leases", "int", about="of a `job` that has not ended: leases so far"),
        Column("failures", "int", about="of a `job` that has not ended: failed attempts"),
        Column("leased_ns", "long", about="of `job`: start of the newest lease"),
        Column("error_text", "binary", about="of `job`: error of the newest failed attempt"),
    ),
)  # fmt: skip
"""One row for each record of a WAL or a snapshot. Unsigned 64-bit numbers stand as the long of the
same bits."""

# ---- silver ----------------------------------------------------------------------------------

_ORIGIN = (
    Column("daemon", "word", False, about="uuid of the arena, in hex"),
    Column("node", "word", False, about="host of the daemon"),
    Column("epoch", "long", False, about="start of the daemon that began the WAL segment"),
    Column("segment", "long", False, about="first LSN of the WAL segment that has the final state"),
)
_CLOCK = Column("clock", "word", False, about="`live`, `virtual` or `bulk_load`: never to be mixed")
_SUBJECT = (
    Column("namespace", "word", about="of the key"),
    Column("topic", "word", about="of the notice; of a replaced timer: of the one that came"),
    Column("key", "binary", about="null of what ended, unless replaced; the add has it"),
    Column("key_type", "word", about="`str`, `bytes` or `uuid`"),
    Column("ticket", "long", False, about="names it for ever, with `daemon`"),
)

LIFECYCLES = Table(
    "lifecycles",
    (
        *_ORIGIN,
        Column("lsn", "long", False, about="of the record of the final state"),
        Column("kind", "word", False, about="`timer` or `operation`"),
        _CLOCK,
        Column(
            "final_state", "word", False,
            about="`expired`, `cancelled`, `replaced`; of a late timer also `skipped`,"
            " `coalesced`; of an operation also `satisfied`, `failed`",
        ),
        *_SUBJECT,
        Column("add_lsn", "long", about="of the record that armed it"),
        Column("session", "long", about="of who armed it"),
        Column("worker", "word", about="who armed it: `uid:pid`, or the name that it gave"),
        Column("deadline_ns", "long", about="the arena's clock"),
        Column("sent_ns", "long", about="the call, on the client's boot clock"),
        Column("received_ns", "long", about="the daemon had the message; boot clock"),
        Column("armed_ns", "long", about="the arena's clock"),
        Column("ended_ns", "long", False, about="the arena's clock"),
        Column("ended_at", "timestamp", False, about="the same on the wall clock"),
        Column("request_queue_ns", "long", about="received to applied"),
        Column("local_ns", "long", about="applied until the call that armed it was done"),
        Column("remote_ns", "long", about="armed to ended: the waiting that was asked for"),
        Column("response_queue_ns", "long", about="ended to the batch of notices built, or to the"
               " answer to who cancelled or replaced it"),
        Column("send_ns", "long", about="built to handed to the socket"),
        Column(
            "receive_ns", "long", about="handed over to received, where a subscriber recorded it"
        ),
        Column("lateness_ns", "long", about="if expired: `ended_ns` minus the deadline, rounded up"
               " to a multiple of `slack_ns`, or minus `armed_ns` if that is later"),
        Column("error", "int", about="of a failed operation"),
        Column("flags", "int", about="enum pg_entry_flag; bit 1: was due before a restart"),
        Column("sequence", "long", about="of its notice, in the topic"),
        Column("replaced_by", "long", about="ticket of the timer that took its place"),
        Column("slack_ns", "long", about="slack of an expired timer; null: none"),
    ),
)  # fmt: skip
"""One row per timer or operation that ended."""

OPEN_TIMERS = Table(
    "open_timers",
    (
        *_ORIGIN[:2],
        Column("lsn", "long", False, about="of the record that armed it, or of a snapshot"),
        Column("kind", "word", False, about="`timer` or `operation`"),
        _CLOCK,
        *_SUBJECT,
        Column("session", "long", about="of who armed it"),
        Column("worker", "word", about="who armed it: `uid:pid`, or the name that it gave"),
        Column("armed_ns", "long", about="the arena's clock"),
        Column("deadline_ns", "long", about="the arena's clock, as last extended"),
        Column("wall_deadline_ns", "long", about="since 1970; of a deadline on the wall clock"),
    ),
)
"""One row per timer or operation that has not ended; made when it is read."""

FINAL_STATES = (
    "expired", "cancelled", "replaced", "satisfied", "failed", "skipped", "coalesced",
)  # fmt: skip

# ---- gold ------------------------------------------------------------------------------------

_COUNTS = (
    Column("ended", "long", False, about="lifecycles"),
    *(Column(name, "long", False, about="of them") for name in FINAL_STATES),
    Column(
        "overdue", "long", False, about="of the expired: due before a restart, not in `lateness`"
    ),
)
_LATENCIES = (
    *(
        Column(name, "binary", False, about=f"sketch of `{name}_ns`")
        for name in ("request_queue", "local", "response_queue", "send")
    ),
    Column("service", "binary", False, about="sketch of the sum of these four"),
    Column("lateness", "binary", False, about="sketch of `lateness_ns`"),
)

TOPICS = Table(
    "topics",
    (
        *_ORIGIN,
        _CLOCK,
        Column("namespace", "word", about="namespace"),
        Column("topic", "word", about="topic of the notices"),
        Column("window_start", "timestamp", False, about="5 minutes of `ended_at`"),
        *_COUNTS,
        *_LATENCIES,
        Column(
            "settled",
            "binary",
            False,
            about="sketch of `remote_ns` of what was cancelled or satisfied",
        ),
        Column("asked", "binary", False, about="sketch of `deadline_ns - armed_ns`, where known"),
    ),
)
"""Partials per segment: add counts and merge sketches over what you group by."""

WORKERS = Table(
    "workers",
    (
        *_ORIGIN,
        _CLOCK,
        Column("worker", "word", about="who armed them: `uid:pid`, or the name of the client"),
        Column("window_start", "timestamp", False, about="hour of `ended_at`"),
        *_COUNTS,
        *_LATENCIES,
    ),
)
"""Partials per segment, by who armed the timers."""

FLOW = Table(
    "flow",
    (
        *_ORIGIN,
        _CLOCK,
        Column("namespace", "word", about="namespace"),
        Column("window_start", "timestamp", False, about="5 minutes of the record's wall time"),
        Column("added", "long", False, about="timers and operations armed"),
        Column("bytes", "long", False, about="their keys and payloads"),
        *(Column(name, "long", False, about="final states") for name in FINAL_STATES),
        Column("extended", "long", False, about="deadlines moved"),
        Column("unknown", "long", False, about="records that cannot be parsed"),
    ),
)
"""Partials per segment: what came and went."""

# ---- the cold tier ---------------------------------------------------------------------------

COLD = Table(
    "cold",
    (
        *columns("string", "namespace topic"),
        Column("key", "binary"),
        Column("key_type", "string"),
        Column("payload", "binary"),
        *columns("long", "deadline_ns version"),
        Column("daemon", "string"),
        Column("ticket", "long"),
    ),
)
"""Timers that are due far from now. `deadline_ns`: since 1970, UTC; `version`: tier.py. `daemon`,
`ticket`: of one that a daemon parked, whose key it still has; null of one that was loaded."""

TOMBSTONES = Table(
    "cold_tombstones",
    (
        *columns("string", "namespace key_type"),
        Column("key", "binary"),
        Column("version", "long"),
        Column("daemon", "string"),
        Column("ticket", "long"),
    ),
)
"""Keys whose rows of smaller versions are dead; with `daemon` and `ticket`, the row of this one."""
