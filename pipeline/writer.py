"""df.write.format("purgatoryd"): the rows of a DataFrame become timers.

    df.write.format("purgatoryd").option("name", "demo").mode("append").save()

Options: `name`, the daemon. Which columns to take: `key` (string or binary), `deadline` (timestamp)
or `delay` (seconds), `topic`, `namespace`, `payload`; each is the column of that name unless given,
and all but the key and a time may be missing. `put`: error, replace, keep or extend, as for add.
`row`: a column that numbers the rows; else their places in their partitions do, which a
repeated task must then meet again in the same order. `bulk_load`: a UUID for this bulk load, a
new one for each write unless given; the same again adds nothing. It needs `row`, because another
write may have other partitions. `refused`: "error", or "count" to go on;
`report`: a file on the driver's host that gets the counts, as JSON. `durable`: "true" to be
answered once the WAL has it. `directory`: $PURGATORYD_DIR of the workers. `tcp`,
`server_key`, `key_file`: a daemon on another host.

`to`: "daemon", or "files" in the folder that save() is given, for the agents of daemons that
workers do not reach (agent.py); a column `daemon` says which one, else `name`.

A row is known to the daemon by its bulk load and its number, also after it fired. So a task that is
killed and runs again adds what is missing, and nothing twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID, uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from purgatoryd.clients import Remote
from purgatoryd.pipeline import agent
from purgatoryd.pipeline.bulk_loading import Answers, BulkLoader, write_report
from purgatoryd.shm_layout.errors import InvalidRows, InvalidSetting
from purgatoryd.shm_layout.files import sync_directory, sync_file
from purgatoryd.shm_layout.paths import check_name

ROWS_PER_PARTITION = 1 << 40
PUTS = ("error", "replace", "keep", "extend")
USUAL = {"topic": "default", "namespace": "default"}
_TYPES = {
    "key": ("string", "binary"), "deadline": ("timestamp",), "topic": ("string",),
    "delay": ("double", "float", "int", "bigint"), "namespace": ("string",),
    "payload": ("binary", "string"), "row": ("bigint", "int"), "daemon": ("string",),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """The options, read and checked. `columns`: which column of the rows is which of ours."""

    name: str
    columns: dict[str, str]
    bulk_load: UUID
    put: str
    strict: bool
    report: str
    durable: bool
    directory: str
    remote: tuple[str, str, str] | None

    @classmethod
    def of(cls, options: Mapping[str, str], schema: StructType) -> Target:
        """Raises InvalidSetting, InvalidRows."""
        columns = columns_of(options, schema)
        if "bulk_load" in options and "row" not in columns:
            raise InvalidSetting(
                "row", "", "a column with row numbers, because bulk_load is set", "option"
            )
        return cls(
            options.get("name", "default"),
            columns,
            bulk_load_of(options.get("bulk_load", "")),
            one_of("put", options.get("put", "error"), PUTS),
            one_of("refused", options.get("refused", "error"), ("error", "count")) == "error",
            options.get("report", ""),
            one_of("durable", options.get("durable", "false"), ("true", "false")) == "true",
            options.get("directory", ""),
            remote_of(options),
        )

    def loader(self) -> BulkLoader:
        """A connection to the daemon."""
        if self.directory:
            os.environ["PURGATORYD_DIR"] = self.directory
        remote = None
        if self.remote is not None:
            tcp, server_key, key = self.remote
            remote = Remote(tcp=tcp, server_key=server_key, key=key)
        return BulkLoader(self.name, remote, self.put, durable=self.durable)


def columns_of(options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Which of our columns is which of the rows'. Raises InvalidRows."""
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    found = {ours: options.get(ours, ours) for ours in _TYPES}
    found = {ours: theirs for ours, theirs in found.items() if theirs in types or ours in options}
    for ours, theirs in found.items():
        if types.get(theirs) not in _TYPES[ours]:
            known = types.get(theirs, "not there")
            raise InvalidRows(f"column {theirs} for {ours} is {known}, not {_TYPES[ours]}", -1)
    if "key" not in found or ("deadline" in found) == ("delay" in found):
        raise InvalidRows(f"columns {sorted(types)}: need key, and either deadline or delay", -1)
    return found


def bulk_load_of(text: str) -> UUID:
    """The bulk load's name. Raises InvalidSetting."""
    try:
        return UUID(text) if text else uuid4()
    except ValueError:
        raise InvalidSetting("bulk_load", text, "a UUID", "option") from None


def one_of(name: str, text: str, known: tuple[str, ...]) -> str:
    """`text`. Raises InvalidSetting."""
    if text not in known:
        raise InvalidSetting(name, text, f"one of {', '.join(known)}", "option")
    return text


def remote_of(options: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Where the daemon is, if it is on another host. Raises InvalidSetting."""
    given = {name: options.get(name, "") for name in ("tcp", "server_key", "key_file")}
    if not any(given.values()):
        return None
    for name, value in given.items():
        if not value:
            raise InvalidSetting(
                name, value, "set: tcp, server_key and key_file are set together", "option"
            )
    return given["tcp"], given["server_key"], given["key_file"]


# ---- rows ------------------------------------------------------------------------------------


def partition() -> int:
    """The number of this task's partition."""
    context = TaskContext.get()
    return context.partitionId() if context else 0


def numbered(
    columns: Mapping[str, str], batches: Iterator[pa.RecordBatch], daemon: str
) -> Iterator[pa.Table]:
    """The rows of this task, with numbers that no other task's have. Raises InvalidRows."""
    first = partition() * ROWS_PER_PARTITION
    for batch in batches:
        yield timers(columns, batch, first, daemon)
        first += batch.num_rows


def timers(
    columns: Mapping[str, str], batch: pa.RecordBatch, first_row: int, daemon: str
) -> pa.Table:
    """Rows as a BulkLoader takes them. Raises InvalidRows for nulls."""
    given = {ours: batch.column(theirs) for ours, theirs in columns.items()}
    for ours, column in given.items():
        if ours != "payload" and column.null_count:
            raise InvalidRows(f"column {columns[ours]} holds nulls", -1)
    kind = "str" if pa.types.is_string(given["key"].type) else "bytes"
    usual = USUAL | {"key_type": kind, "payload": b"", "daemon": daemon}
    for name in usual.keys() - given.keys():
        given[name] = pa.repeat(pa.scalar(usual[name]), batch.num_rows)
    if "row" not in given:
        given["row"] = pa.array(np.arange(first_row, first_row + batch.num_rows))
    plain = {"key": pa.binary(), "payload": pa.binary(), "row": pa.int64()}
    return pa.table({name: given[name].cast(plain.get(name, given[name].type)) for name in given})


# ---- into a daemon ---------------------------------------------------------------------------


@dataclass
class Done(WriterCommitMessage):
    """What became of a partition's rows."""

    answers: Answers = field(default_factory=Answers)
    namespaces: list[str] = field(default_factory=list)


class TimersWriter(DataSourceArrowWriter):
    """Add the rows of Spark partitions to a daemon. Each task has sessions of its own."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Done:
        """A partition. Raises DaemonError: the task is repeated then."""
        target, answers, namespaces = self.target, Answers(), set[str]()
        with target.loader() as loader:
            for rows in numbered(target.columns, iterator, target.name):
                answers.add(loader.add(target.bulk_load, rows))
                namespaces.update(rows["namespace"].unique().to_pylist())
        return Done(answers, sorted(namespaces))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Every row was answered: a late copy of a task adds nothing any more.

        Raises BulkLoadRefused; the bulk load stays open then, for another try.
        """
        target, done = self.target, [one for one in messages if isinstance(one, Done)]
        answers, namespaces = Answers(), set[str]()
        for one in done:
            answers.add(one.answers)
            namespaces.update(one.namespaces)
        if target.report:
            write_report(Path(target.report), target.bulk_load, answers)
        if target.strict:
            answers.check(f"bulk load {target.bulk_load}")
        with target.loader() as loader:
            loader.close_bulk_load(target.bulk_load, sorted(namespaces))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What was acknowledged stays; the same bulk load again adds the rest."""


# ---- into files ------------------------------------------------------------------------------


@dataclass
class Written(WriterCommitMessage):
    """Files of a partition, one for each daemon."""

    partition: int
    attempt: str
    daemons: list[str]


class FilesWriter(DataSourceArrowWriter):
    """Writes files for the agents of daemons; see agent.py."""

    def __init__(self, target: Target, spool: Path) -> None:
        self.target = target
        self.spool = spool

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """A partition: files that do not count yet."""
        attempt, target = uuid4().hex, self.target
        files: dict[str, pq.ParquetWriter] = {}
        with ExitStack() as stack:
            for rows in numbered(target.columns, iterator, target.name):
                for daemon, some in by_daemon(rows):
                    if daemon not in files:
                        file = self._open(daemon, attempt, some.schema)
                        files[daemon] = stack.enter_context(file)
                    files[daemon].write_table(some)
        return Written(partition(), attempt, sorted(files))

    def _open(self, daemon: str, attempt: str, schema: pa.Schema) -> pq.ParquetWriter:
        new, _ = self._paths(check_name(daemon), partition(), attempt)
        new.parent.mkdir(parents=True, exist_ok=True)
        named = schema.with_metadata({agent.BULK_LOAD: self.target.bulk_load.bytes})
        return pq.ParquetWriter(new, named, compression="zstd", compression_level=1)

    def _paths(self, daemon: str, number: int, attempt: str) -> tuple[Path, Path]:
        folder, stem = agent.folder_of(self.spool, daemon), f"{self.target.bulk_load}-{number:05d}"
        return folder / f"{stem}-{attempt}.new", folder / f"{stem}.parquet"

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All files of the bulk load count."""
        for new, path in self._files(messages):
            sync_file(new)
            new.rename(path)
            sync_directory(path.parent)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """None of them is left."""
        for new, _ in self._files(messages):
            new.unlink(missing_ok=True)

    def _files(self, messages: list[WriterCommitMessage | None]) -> Iterator[tuple[Path, Path]]:
        written = (one for one in messages if isinstance(one, Written))
        for one in written:
            yield from (self._paths(name, one.partition, one.attempt) for name in one.daemons)


def by_daemon(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows for each daemon."""
    for daemon in rows["daemon"].unique().to_pylist():
        yield daemon, rows.filter(pc.equal(rows["daemon"], daemon)).drop_columns("daemon")


def writer_of(options: Mapping[str, str], schema: StructType) -> DataSourceArrowWriter:
    """The writer that the options ask for. Raises InvalidSetting, InvalidRows."""
    target = Target.of(options, schema)
    if one_of("to", options.get("to", "daemon"), ("daemon", "files")) == "daemon":
        return TimersWriter(target)
    if "delay" in target.columns:
        raise InvalidSetting(
            "delay",
            target.columns["delay"],
            "replaced by a deadline, because files have no delays",
            "option",
        )
    if "path" not in options:
        raise InvalidSetting("path", "", "the folder of the spool, because to = files", "option")
    return FilesWriter(target, Path(options["path"]).absolute())  # tasks stand in other folders
