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
    `about`: for docs/tables.md."""

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
        *columns("word", "daemon node", nullable=False),
        *columns("long", "epoch segment lsn", nullable=False),
        *columns("word", "kind clock", nullable=False),
        Column("at", "timestamp", nullable=False),
        Column("at_ns", "long"),
        *columns("word", "namespace topic"),
        Column("ticket", "long"),
        Column("key", "binary"),
        Column("key_type", "word"),
        Column("payload", "binary"),
        Column("payload_len", "int"),
        *columns("long", "deadline_ns wall_deadline_ns sent_ns received_ns applied_ns armed_ns"),
        *columns("long", "add_lsn session"),
        Column("worker", "word"),
        Column("ended_boot_ns", "long"),
        *columns("int", "uid slot"),
        Column("cause", "word"),
        *columns("int", "error flags"),
        *columns("long", "sequence position replaced"),
        Column("condition", "word"),
        Column("threshold", "long"),
        Column(
            "watch",
            (
                Column("row", "int", nullable=False),
                *columns("long", "target base cap", nullable=False),
                Column("flags", "int", nullable=False),
            ),
        ),
        Column("missing", "binary"),
        Column("watermark", "long"),
        Column("row", "int"),
        *columns("long", "positions_from positions_upto built_ns handed_ns"),
        Column("count", "int"),
        Column("bulk_load", "binary"),
        Column("bulk_load_row", "long"),
        *columns("long", "replaced_add_lsn replaced_session replaced_sent_ns"),
        *columns("long", "replaced_received_ns replaced_applied_ns replaced_armed_ns"),
        Column("replaced_worker", "word"),
        Column("parked", "int"),
        Column("payload_bytes", "long"),
        *columns("long", "replaced_deadline_ns ended_by ended_batch"),
        *columns("int", "bulk_loaded replaced_bulk_loaded"),
        *columns("long", "done_ns replaced_done_ns"),
    ),
)
"""One row per record of a WAL or a snapshot. Unsigned 64-bit numbers stand as the long of
the same bits. Times in ns are on the arena's clock unless docs/pipeline.md says otherwise.
`parked`: 1 of an add whose key alone the daemon kept, else null. `ended_by`, `ended_batch`: session
and number of the batch that cancelled or replaced a timer. `bulk_loaded`: 1 of the add or the end
of one that came as the row of a bulk load, else null."""

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
            about="`expired`, `cancelled`, `replaced`; of an operation also `satisfied`, `failed`",
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
        Column("lateness_ns", "long", about="deadline, or armed if later, to ended; if expired"),
        Column("error", "int", about="of a failed operation"),
        Column("flags", "int", about="enum pg_entry_flag; bit 1: was due before a restart"),
        Column("sequence", "long", about="of its notice, in the topic"),
        Column("replaced_by", "long", about="ticket of the timer that took its place"),
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

# ---- gold ------------------------------------------------------------------------------------

_COUNTS = (
    Column("ended", "long", False, about="lifecycles"),
    *(
        Column(name, "long", False, about="of them")
        for name in ("expired", "cancelled", "replaced", "satisfied", "failed")
    ),
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
        Column("namespace", "word"),
        Column("topic", "word"),
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
        Column("worker", "word"),
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
        Column("namespace", "word"),
        Column("window_start", "timestamp", False, about="5 minutes of the record's wall time"),
        Column("added", "long", False, about="timers and operations armed"),
        Column("bytes", "long", False, about="their keys and payloads"),
        *(
            Column(name, "long", False, about="final states")
            for name in ("expired", "cancelled", "replaced", "satisfied", "failed")
        ),
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
