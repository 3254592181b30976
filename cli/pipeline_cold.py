"""The commands pipeline cold bulk-load, cancel, collect, promote, compact, verify and status."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from purgatoryd.cli import units
from purgatoryd.cli.exits import Command, Exit, Group
from purgatoryd.cli.following import follow
from purgatoryd.cli.options import (
    emit,
    json_option,
    key_type_option,
    name_option,
    namespace_option,
    read_key,
)
from purgatoryd.cli.pipeline import lake_option, spark_options
from purgatoryd.cli.shards import daemons
from purgatoryd.cli.wal import folder

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from purgatoryd.pipeline.bulk_loading import BulkLoader
    from purgatoryd.pipeline.parked import Collected
    from purgatoryd.pipeline.tier import Tier, Window

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])
FILE = click.Path(exists=True, path_type=Path)


@click.group("cold", cls=Group)
def cold_command() -> None:
    """Keep far-off timers in a cold tier in the lake.

    LAKE/cold has a directory for each hour in which timers are due. `promote` adds the timers of a
    window to the daemon before the window begins; after that they behave like all other timers.
    """


def daemon_options(command: Wrapped) -> Wrapped:
    """Add --name and the options for a daemon on another host."""
    remote = (
        click.option("--tcp", metavar="HOST:PORT", help="Address of a daemon on another host."),
        click.option("--server-key", help="Public key of that daemon."),
        click.option(
            "--key-file",
            type=FILE,
            help="File with this client's key pair, made by `purgatoryd keygen`.",
        ),
    )
    for option in reversed((name_option, *remote)):
        command = option(command)
    return command


def daemon_of(
    name: str, tcp: str | None, server_key: str | None, key_file: Path | None, mode: str = "keep"
) -> BulkLoader:
    """Return a client of the daemon that the options name. The client connects at its first
    call."""
    from purgatoryd.clients import Remote
    from purgatoryd.pipeline.bulk_loading import BulkLoader

    if not (tcp or server_key or key_file):
        return BulkLoader(name, mode=mode)
    if not (tcp and server_key and key_file):
        raise click.UsageError("Give --tcp, --server-key and --key-file together.")
    return BulkLoader(name, Remote(tcp=tcp, server_key=server_key, key=key_file), mode)


def tier_of(lake: Path) -> Tier:
    """Return the cold tier of a lake. Raises ExtraMissing, BadPath."""
    from purgatoryd.pipeline.extras import need

    need("pyarrow", "lake")
    from purgatoryd.pipeline.tier import Tier

    return Tier(lake)


# ---- bulk load, cancel -------------------------------------------------------------------


@cold_command.command("bulk-load", cls=Command)
@click.argument("files", nargs=-1, required=True, type=FILE)
@lake_option
@daemon_options
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "csv"]),
    default="parquet",
    show_default=True,
    help="Format of FILES. A CSV file has a header line with the column names.",
)
@click.option(
    "--bulk-load-id",
    help="Id of this bulk load; a second bulk load with this id adds nothing. Default: a checksum "
    "of the names, sizes and times of FILES.",
)
@click.option(
    "--replace",
    "replacing",
    is_flag=True,
    help="Replace all timers that have the same keys, also timers in the daemon.",
)
@spark_options
@json_option
def bulk_load_command(
    files: tuple[Path, ...], lake: Path, name: str, tcp: str | None, server_key: str | None,
    key_file: Path | None, kind: str, bulk_load_id: str | None, replacing: bool, master: str | None,
    conf: dict[str, str], as_json: bool,
) -> None:  # fmt: skip
    """Add the timers in FILES to the cold tier: all timers, or none.

    Required columns: key, and either deadline (a time) or deadline_ns (ns since 1970). Optional
    columns: namespace, topic, payload and key_type (str, bytes or uuid).
    """
    tier = tier_of(lake)
    from purgatoryd.pipeline.cold import bulk_load
    from purgatoryd.pipeline.session import session

    rows = table_of(session(master, conf), files, kind)
    with daemon_of(name, tcp, server_key, key_file) as hot:
        done = bulk_load(tier, rows, bulk_load_id or id_of(files), hot, replacing=replacing)
    text = f"{done.rows} timers, version {done.version}"
    text += f"; {done.late} of them late, for the next window" if done.late else ""
    emit({"version": done.version, "rows": done.rows, "late": done.late}, text, as_json)


def table_of(spark: SparkSession, files: tuple[Path, ...], kind: str) -> DataFrame:
    """Return the rows of files. Raises InvalidRows if a file has another format."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from purgatoryd.pipeline.session import literal
    from purgatoryd.shm_layout.errors import InvalidRows

    reader = spark.read.options(header=True)
    try:
        return reader.load([literal(file.resolve()) for file in files], format=kind)
    except (PySparkException, Py4JError) as error:
        names = ", ".join(map(str, files))
        raise InvalidRows(f"{names} cannot be read as {kind}; see --format", -1) from error


def id_of(files: tuple[Path, ...]) -> str:
    """Return the default id of a bulk load: a checksum of paths, sizes and modification
    times of the files."""
    stamps = [
        (str(file.resolve()), (about := file.stat()).st_size, about.st_mtime_ns) for file in files
    ]
    return f"files-{zlib.crc32(repr(sorted(stamps)).encode()):08x}"


@cold_command.command("cancel", cls=Command)
@click.argument("keys", metavar="KEY...", nargs=-1)
@lake_option
@daemon_options
@namespace_option
@key_type_option
@click.option(
    "--file",
    type=FILE,
    help="Parquet file with a column key, and optionally namespace and key_type.",
)
@json_option
def cancel_command(
    keys: tuple[str, ...], lake: Path, name: str, tcp: str | None, server_key: str | None,
    key_file: Path | None, namespace: str, key_type: str, file: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Cancel timers by their keys, in the cold tier and in the daemon.

    After the command has ended, none of the timers fires. The command prints the daemon's answers;
    the tier does not report which of the keys it contained.
    """
    tier = tier_of(lake)
    from purgatoryd.pipeline.cold import cancel

    if bool(keys) == bool(file):
        raise click.UsageError("Give either keys or --file.")
    table = keys_in(file, namespace) if file else keys_given(keys, namespace, key_type)
    with daemon_of(name, tcp, server_key, key_file) as hot:
        found = cancel(tier, table, hot)
    answers = ", ".join(f"{count} {subject.lower()}" for subject, count in sorted(found.items()))
    text = (
        f"{table.num_rows} keys; the daemon: {answers or 'not asked, because it has none of them'}"
    )
    emit({"keys": table.num_rows, "daemon": found}, text, as_json)


def keys_given(keys: tuple[str, ...], namespace: str, key_type: str) -> pa.Table:
    """Return the keys of the command line as a table."""
    import pyarrow as pa

    from purgatoryd.shm_layout.layout import KeyType
    from purgatoryd.shm_layout.wire import encode_key

    pairs = [encode_key(read_key(key, key_type)) for key in keys]
    kinds = [KeyType(kind).name.lower() for kind, _ in pairs]
    spaces = [namespace] * len(pairs)
    return pa.table({"namespace": spaces, "key_type": kinds, "key": [key for _, key in pairs]})


def keys_in(file: Path, namespace: str) -> pa.Table:
    """Return the keys in a Parquet file as a table. Raises InvalidRows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from purgatoryd.shm_layout.errors import InvalidRows

    try:
        rows = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise InvalidRows(f"{file} cannot be read as Parquet: {error}", -1) from error
    if rows.column_names.count("key") != 1:
        raise InvalidRows(f"{file} has the columns {rows.column_names}, but no column key", -1)
    text = pa.types.is_string(rows["key"].type) or pa.types.is_large_string(rows["key"].type)
    for column, usual in (("namespace", namespace), ("key_type", "str" if text else "bytes")):
        if column not in rows.column_names:
            rows = rows.append_column(column, pa.array([usual] * rows.num_rows, pa.string()))
    return rows


# ---- collect, promote --------------------------------------------------------------------------


def wal_option(command: Wrapped) -> Wrapped:
    """Add --wal-dir."""
    return click.option(
        "--wal-dir",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Directory of the WALs, as for `purgatoryd run`; parked timers not yet shipped "
        "are collected from there.",
    )(command)


@cold_command.command("collect", cls=Command)
@lake_option
@daemon_options
@wal_option
@spark_options
@json_option
def collect_command(
    lake: Path, name: str, tcp: str | None, server_key: str | None, key_file: Path | None,
    wal_dir: Path | None, master: str | None, conf: dict[str, str], as_json: bool,
) -> None:  # fmt: skip
    """Collect parked timers into the cold tier.

    The command also applies changes of these timers. It reads each shipped record in LAKE once.
    `promote` collects before it promotes.
    """
    tier = tier_of(lake)
    from purgatoryd.pipeline.session import session

    spark = session(master, conf)
    with daemon_of(name, tcp, server_key, key_file) as hot:
        done = collected(spark, tier, hot, wal_dir)
    text = f"{done.rows} timers, version {done.version}; {done.ended} older rows ended"
    emit({"version": done.version, "rows": done.rows, "ended": done.ended}, text, as_json)


def collected(spark: SparkSession, tier: Tier, hot: BulkLoader, wal_dir: Path | None) -> Collected:
    """Collect into the cold tier the timers that the daemon has parked."""
    from purgatoryd.pipeline.lake import Lake
    from purgatoryd.pipeline.parked import collect

    folders = [folder(wal_dir, one.name) for one in daemons(hot.name)] if wal_dir else []
    return collect(spark, tier, Lake(tier.lake), hot, folders)


@cold_command.command("promote", cls=Command)
@lake_option
@daemon_options
@wal_option
@click.option(
    "--window", type=units.Moment(), help="Promote the timers that are due before this time."
)
@click.option(
    "--every",
    type=units.Duration(units.PAUSE_NS),
    help="Keep running, and promote each window of this length one window length before it begins.",
)
@click.option("--rate", type=units.Number(1), help="Maximum number of timers per second.")
@spark_options
@json_option
def promote_command(
    lake: Path, name: str, tcp: str | None, server_key: str | None, key_file: Path | None,
    wal_dir: Path | None, window: datetime | None, every: int | None, rate: float | None,
    master: str | None, conf: dict[str, str], as_json: bool,
) -> None:  # fmt: skip
    """Add timers from the cold tier to the daemon.

    They include timers that the daemon has parked. An unfinished window is finished first.
    Promoting a window again adds nothing.
    """
    tier = tier_of(lake)
    from purgatoryd.clients.times import wall_ns
    from purgatoryd.pipeline.lake import Lake
    from purgatoryd.pipeline.pace import Pace
    from purgatoryd.pipeline.promote import promote, window_end_ns
    from purgatoryd.pipeline.session import session
    from purgatoryd.shm_layout.errors import LakeInUse

    if (window is None) == (every is None):
        raise click.UsageError("Give either --window or --every.")
    pace = Pace(rate or 0).wait
    spark = session(master, conf)

    def bring(until_ns: int) -> None:
        with daemon_of(name, tcp, server_key, key_file) as hot:
            if wal_dir or Lake(lake).daemons():
                with suppress(LakeInUse):  # then the next iteration collects
                    collected(spark, tier, hot, wal_dir)
            for one in promote(spark, tier, until_ns, hot, pace):
                emit(window_record(one), window_text(one), as_json)

    if window is not None:
        bring(wall_ns(window))
        return
    assert every is not None
    length_ns = every
    follow(
        lambda: bring(window_end_ns(time.time_ns(), length_ns)),
        lambda: (length_ns - time.time_ns() % length_ns) / 1e9,  # until the next window begins
        as_json,
    )


def window_record(window: Window) -> dict[str, Any]:
    """Return a window for JSON."""
    return {
        "window": window.id, "state": window.state, "daemon": window.daemon,
        "until": units.format_wall(window.until.end_ns), "rows": window.rows,
        "cancelled": window.cancelled, "results": window.results,
    }  # fmt: skip


def window_text(window: Window) -> str:
    """Return a window as a line of text."""
    answers = ", ".join(
        f"{count} {subject.lower()}" for subject, count in sorted(window.results.items())
    )
    until = units.format_wall(window.until.end_ns)
    return f"{window.state} until {until}: {window.rows} rows ({answers or 'none'})"


# ---- compact, verify, status -----------------------------------------------------------------


@cold_command.command("compact", cls=Command)
@lake_option
@click.option(
    "--hour", type=click.DateTime(["%Y-%m-%d-%H"]), metavar="YYYY-MM-DD-HH",
    help="Only the timers that are due in this hour.",
)  # fmt: skip
@spark_options
@json_option
def compact_command(
    lake: Path, hour: datetime | None, master: str | None, conf: dict[str, str], as_json: bool
) -> None:
    """Merge small files and drop obsolete rows.

    Obsolete rows were cancelled, changed or promoted. The command also removes unreferenced files.
    Files that this compaction replaces are removed by the next compaction, because other processes
    may be reading them.
    """
    tier = tier_of(lake)
    from purgatoryd.pipeline.cold import compact
    from purgatoryd.pipeline.session import session

    done = compact(session(master, conf), tier, f"{hour:%Y-%m-%d-%H}" if hour else None)
    text = f"{done.files[0]} files became {done.files[1]}, {done.rows[0]} rows {done.rows[1]}"
    emit(
        {"files": done.files, "rows": done.rows, "orphans": done.orphans},
        f"{text}; {done.orphans} old files removed", as_json,
    )  # fmt: skip


@cold_command.command("verify", cls=Command)
@lake_option
@spark_options
@json_option
def verify_command(lake: Path, master: str | None, conf: dict[str, str], as_json: bool) -> int:
    """Check the bytes, order, counts and keys of every file.

    No key may have two timers. Exit code 5 means that a check failed.
    """
    tier = tier_of(lake)
    from purgatoryd.pipeline.cold import verify
    from purgatoryd.pipeline.session import session

    figures, wrong = verify(session(master, conf), tier)
    lines = [f"{name:<18}{value}" for name, value in figures.items()]
    emit({**figures, "wrong": wrong}, "\n".join([*lines, *wrong]), as_json)
    return Exit.BROKEN if wrong else Exit.DONE


@cold_command.command("status", cls=Command)
@lake_option
@json_option
def status_command(lake: Path, as_json: bool) -> None:
    """Show the contents of the cold tier and the promoted windows."""
    tier = tier_of(lake)
    from purgatoryd.pipeline.cold import status

    figures = status(tier)
    window = tier.unfinished()
    lines = [f"{name:<18}{value}" for name, value in figures.items()]
    lines += [window_text(window)] if window else []
    emit({**figures, "promoting": window and window_record(window)}, "\n".join(lines), as_json)
