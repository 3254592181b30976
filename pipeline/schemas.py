"""The tables' columns, each with the version that brought it; Arrow's and Spark's schemas
come from here.

A version only ever adds columns. So a file of an earlier one reads as the newest, with nulls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType


@dataclass(frozen=True, slots=True)
class Column:
    """`type`: "string", "word" (a string of few values), "binary", "long", "int", "double",
    "boolean", "date", "timestamp" (UTC, microseconds), or for a list of structs its columns.
    `since`: the version of the table that brought it."""

    name: str
    type: str | tuple[Column, ...]
    nullable: bool = True
    since: int = 1


@dataclass(frozen=True, slots=True)
class Table:
    """A table; `version` is the newest one."""

    name: str
    version: int
    columns: tuple[Column, ...]

    def at(self, version: int) -> Table:
        """The table as it was in an earlier version."""
        kept = tuple(column for column in self.columns if column.since <= version)
        return Table(self.name, version, kept)

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
    1,
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
        Column("level", "long"),
        Column("row", "int"),
        *columns("long", "positions_from positions_upto built_ns handed_ns"),
        Column("count", "int"),
        Column("load", "binary"),
        Column("load_row", "long"),
        *columns("long", "replaced_add_lsn replaced_session replaced_sent_ns"),
        *columns("long", "replaced_received_ns replaced_applied_ns replaced_armed_ns"),
        Column("replaced_worker", "word"),
    ),
)
"""One row per record of a journal or a snapshot. Unsigned 64-bit numbers stand as the long of
the same bits. Times in ns are on the arena's clock unless docs/pipeline.md says otherwise."""
