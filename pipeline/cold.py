"""What is done to the cold tier: bulk load, cancel, compact, verify. tier.py has its files.

Rows are read and written by Spark; a cancel needs none.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from purgatoryd.pipeline.repeats import suspected
from purgatoryd.pipeline.schemas import COLD, TOMBSTONES, Table
from purgatoryd.pipeline.session import rows_in
from purgatoryd.pipeline.tier import (
    HOUR_NS,
    NOTHING,
    ColdFile,
    Frontier,
    Tier,
    Version,
    crc_of,
    hour_text,
)
from purgatoryd.shm_layout import layout
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.errors import InvalidRows

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

KEY = ["namespace", "key_type", "key"]
KEY_TYPES = ("str", "bytes", "uuid")
DEFAULTS = {"namespace": "default", "topic": "default"}
WRITING = {
    "compression": "lz4_raw",
    "parquet.block.size": str(16 << 20),
    **{f"parquet.enable.dictionary#{name}": "false" for name in ("key", "payload", "deadline_ns")},
}
"""Row groups small enough that a window of minutes reads few of them."""
KEYS_AT_ONCE = 65_536


class Hot(Protocol):
    """The daemon into which windows go."""

    name: str

    def cancel(self, keys: pa.Table) -> dict[str, int]:
        """Ends the timers of namespace, key_type, key; how many cancels found what."""


# ---- reading -------------------------------------------------------------------------------


def rows_of(spark: SparkSession, tier: Tier, parts: Iterable[ColdFile]) -> DataFrame:
    """All rows of some files. Raises LakeBroken."""
    return rows_in(spark, COLD, map(tier.file, parts))


def tombstones_of(spark: SparkSession, tier: Tier, parts: Iterable[ColdFile]) -> DataFrame:
    """The tombstones of some files. Raises LakeBroken."""
    return rows_in(spark, TOMBSTONES, map(tier.file, parts))


def alive(rows: DataFrame, tombstones: DataFrame) -> DataFrame:
    """Rows that no younger tombstone ends."""
    ended = [rows[name] == tombstones[name] for name in KEY]
    of_this = [_is_of(tombstones[name], rows[name]) for name in ("daemon", "ticket")]
    newer = tombstones.version > rows.version
    return rows.join(tombstones, [*ended, *of_this, newer], "left_anti")


def _is_of(ended: Column, row: Column) -> Column:
    """A tombstone that names none is of all."""
    return ended.isNull() | ended.eqNullSafe(row)


def beyond(rows: DataFrame, frontier: Frontier) -> DataFrame:
    """Rows that were not promoted."""
    if frontier == NOTHING:
        return rows
    late = rows.version > frontier.version
    return rows.filter((rows.deadline_ns >= frontier.end_ns) | late)


def pending(spark: SparkSession, tier: Tier, keys: DataFrame | None = None) -> DataFrame:
    """Every timer that the tier still has to promote, whatever is under way; those of `keys`, if
    they are given."""
    version = tier.version()
    rows = unpromoted(spark, tier, version)
    if keys is not None:
        rows = rows.join(keys, KEY, "left_semi")
    return alive(rows, tombstones_of(spark, tier, version.tombstones))


def unpromoted(spark: SparkSession, tier: Tier, version: Version) -> DataFrame:
    """All rows of a version that are not hot, dead ones too."""
    frontier = tier.frontier("hot")
    return beyond(rows_of(spark, tier, reached(version.rows, frontier)), frontier)


def reached(parts: Iterable[ColdFile], since: Frontier) -> list[ColdFile]:
    """Files that may have rows beyond a frontier."""
    return [p for p in parts if p.last_ns >= since.end_ns or p.version > since.version]


# ---- bulk load ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BulkLoaded:
    """`rows` came with `version`; 0 = this bulk load was there before. `late`: of them, due before
    what was promoted already: they go with the next window."""

    version: int
    rows: int
    late: int = 0


def bulk_load(
    tier: Tier, rows: DataFrame, bulk_load_id: str, hot: Hot, *, replacing: bool = False
) -> BulkLoaded:
    """Takes `rows` in: all of them, or none. A `bulk_load_id` that is known adds nothing.

    Columns: key (string or binary), deadline (timestamp) or deadline_ns (since 1970); if wanted
    namespace, topic, payload, key_type. A key stands there once, and has no timer in the tier.
    `replacing`: they take the place of all older timers of their keys, also of those that `hot`
    holds. Raises InvalidRows, LakeInUse; WindowElsewhere if another daemon has to be notified;
    DaemonError after all is in the tier: the next command tells the daemon.
    """
    with tier.writing():
        if replacing or tier.version().undelivered:
            tier.check_daemon(hot.name)
        known = tier.version().bulk_loads.get(bulk_load_id)
        if known is not None:
            check_again(tier, rows, bulk_load_id)
            return BulkLoaded(known, 0)
        number = reserve(tier)
        with staging(tier, f"bulk-load-{number}") as staged:
            stage_bulk_load(rows, number, staged)
            check_keys(tier, rows, staged, replacing=replacing)
            parts = tier.take_rows(staged, number, clean=number)
            ended = replaced_keys(tier, rows, parts, number, staged) if replacing else ()
        count = sum(part.rows for part in parts)
        with tier.lock():
            late = late_rows(tier, parts)
            version = tier.version()
            end_keys(tier, replace(
                version, rows=(*version.rows, *parts), reserved=0,
                bulk_loads={**version.bulk_loads, bulk_load_id: number},
                bulk_load_rows={**version.bulk_load_rows, bulk_load_id: count},
            ), ended, hot)  # fmt: skip
    return BulkLoaded(number, count, late)


def check_again(tier: Tier, rows: DataFrame, bulk_load_id: str) -> None:
    """Raises InvalidRows if a bulk load that is known had another number of rows: it is another."""
    had, has = tier.version().bulk_load_rows.get(bulk_load_id), rows.count()
    if had not in (None, has):
        raise InvalidRows(f"bulk load {bulk_load_id} had {had} rows before, and now has {has}", -1)


def reserve(tier: Tier) -> int:
    """The number of a version whose rows are still to come."""
    with tier.lock():
        begun = tier.version()
        return tier.commit(replace(begun, reserved=begun.number + 1)).number


def stage_bulk_load(rows: DataFrame, number: int, staged: Path) -> None:
    """Writes rows as a version's files. Raises InvalidRows."""
    write_rows(shaped(rows, number), staged)


def check_keys(tier: Tier, rows: DataFrame, staged: Path, *, replacing: bool) -> None:
    """Raises InvalidRows if a key stands in a bulk load more than once, or has a timer in the tier
    that is not replaced; with how many, and some of them."""
    spark = rows.sparkSession
    keys = rows_in(spark, COLD, [staged]).select(KEY)
    version = Version() if replacing else tier.version()
    older = unpromoted(spark, tier, version).where(BULK_LOADED).select(KEY)
    twice, there = suspected(keys, older)
    if twice:
        repeated = keys.groupBy(KEY).count().where("count > 1")
        refuse_keys(repeated, "occur more than once in the bulk load")
    if there:
        waiting = pending(spark, tier, keys).where(BULK_LOADED).select(KEY).distinct()
        refuse_keys(waiting, "have a timer in the tier; only a replacing bulk load may add another")


BULK_LOADED = "ticket IS NULL"
"""Not parked: those are known by their tickets."""


def refuse_keys(keys: DataFrame, detail: str) -> None:
    """Raises InvalidRows if there is one."""
    if count := keys.count():
        some = [(row.namespace, bytes(row.key)) for row in keys.limit(3).collect()]
        raise InvalidRows(f"{count} keys {detail}: {some}", -1)


def shaped(rows: DataFrame, number: int) -> DataFrame:
    """The columns of the tier. Raises InvalidRows for columns that are not.

    A deadline that is no time becomes null.
    """
    from pyspark.sql import functions as f

    given = dict(rows.dtypes)
    check_columns(given)
    binary = given["key"] == "binary"
    columns: dict[str, Column] = {
        name: f.coalesce(f.col(name), f.lit(usual)) if name in given else f.lit(usual)
        for name, usual in {**DEFAULTS, "key_type": "bytes" if binary else "str"}.items()
    }
    columns |= {
        "key": f.col("key").cast("binary"),
        "payload": f.col("payload").cast("binary") if "payload" in given else f.lit(b""),
        "deadline_ns": f.expr(_DEADLINE if "deadline" in given else _DEADLINE_NS),
        "version": f.lit(number).cast("long"),
        "daemon": f.lit(None).cast("string"),
        "ticket": f.lit(None).cast("long"),
    }
    return rows.select([columns[name].alias(name) for name in COLD.names])


def check_columns(given: Mapping[str, str]) -> None:
    """Raises InvalidRows if key or deadline is missing, or has a type that cannot be one."""
    if "key" not in given or len({"deadline", "deadline_ns"} & given.keys()) != 1:
        raise InvalidRows(
            f"columns {sorted(given)}: need key, and either deadline or deadline_ns", -1
        )
    for name, types in _TYPES.items():
        if name in given and given[name].partition("(")[0] not in types:
            raise InvalidRows(f"column {name} has type {given[name]}, not {' or '.join(types)}", -1)


_TYPES = {
    **dict.fromkeys(("key", "payload"), ("string", "binary")),
    **dict.fromkeys(("namespace", "topic", "key_type"), ("string",)),
    "deadline": ("timestamp", "timestamp_ntz", "date", "string"),
    "deadline_ns": (
        "bigint", "int", "smallint", "tinyint", "decimal", "double", "float", "string",
    ),
}  # fmt: skip
"""As Spark names them; a string is of a CSV file."""
_DEADLINE = "try_multiply(unix_micros(try_cast(deadline as timestamp)), 1000L)"
_WHOLE = "try_cast(try_cast(deadline_ns as decimal(38, 9)) as bigint)"
_DEADLINE_NS = f"if({_WHOLE} = try_cast(deadline_ns as decimal(38, 9)), {_WHOLE}, null)"


def write_rows(rows: DataFrame, staged: Path) -> None:
    """Sorted files by hour. Raises InvalidRows, with how many are bad and some of them."""
    from pyspark.sql import functions as f

    hour = f.expr(f"if({_BAD}, null, deadline_ns div {HOUR_NS})")
    ordered = rows.withColumn("hour", hour).repartition("hour")
    ordered = ordered.sortWithinPartitions("hour", "deadline_ns")
    ordered.write.partitionBy("hour").options(**WRITING).parquet(str(staged), mode="overwrite")
    refuse_bad(rows.sparkSession, staged / NO_HOUR)


NO_HOUR = "hour=__HIVE_DEFAULT_PARTITION__"
"""Where Spark puts rows whose hour is null: bad ones, so that no pass has to look for them."""


def refuse_bad(spark: SparkSession, folder: Path) -> None:
    """Raises InvalidRows if there is a folder of bad rows."""
    if folder.is_dir():
        bad = rows_in(spark, COLD, [folder])
        some = bad.limit(3).select("namespace", "key", "deadline_ns").collect()
        detail = f"{bad.count()} rows have a bad key, name, payload or deadline: {some}"
        raise InvalidRows(detail, -1)


_BAD = f"""
    key is null or octet_length(key) not between 1 and {layout.KEY_MAX}
    or deadline_ns is null or deadline_ns < 0
    or coalesce(octet_length(payload), 0) > {layout.PAYLOAD_MAX}
    or octet_length(namespace) not between 1 and {layout.NAMESPACE_MAX}
    or octet_length(topic) not between 1 and {layout.TOPIC_MAX}
    or key_type not in {KEY_TYPES}
    or key_type = 'uuid' and octet_length(key) <> 16
    or key_type = 'str' and not is_valid_utf8(cast(key as string))
    or not is_valid_utf8(namespace) or contains(namespace, chr(0))
    or not is_valid_utf8(topic) or contains(topic, chr(0))
    or '{chr(lib.PG_RESERVED)}' in (left(namespace, 1), left(topic, 1))
"""


def replaced_keys(
    tier: Tier, rows: DataFrame, parts: Iterable[ColdFile], number: int, staged: Path
) -> tuple[ColdFile, ...]:
    """Tombstones of the keys of a version's files, not counting yet. Spark's workers write them."""
    stage_keys(rows, tier, parts, number, staged / STONES)
    return tier.take_tombstones(staged / STONES, number)


def stage_keys(
    rows: DataFrame, tier: Tier, parts: Iterable[ColdFile], number: int, staged: Path
) -> None:
    """Writes them. A daemon may have a timer of any key; where none has to be asked, it is the
    keys of older rows alone."""
    spark, version = rows.sparkSession, tier.version()
    keys = rows_of(spark, tier, parts).select(KEY).distinct()
    if not has_timers(tier):
        keys = keys.join(rows_of(spark, tier, version.rows).select(KEY), KEY, "left_semi")
    write_tombstones(keys, number, staged)


def write_tombstones(keys: DataFrame, number: int, staged: Path) -> None:
    """Files of tombstones; with `daemon` and `ticket`, those end one row each."""
    from pyspark.sql import functions as f

    given = {name: f.lit(None).cast(kind) for name, kind in _OF_ONE if name not in keys.columns}
    rows = keys.withColumns({**given, "version": f.lit(number).cast("long")})
    rows.select(TOMBSTONES.names).write.option("compression", "lz4_raw").parquet(str(staged))


_OF_ONE = (("daemon", "string"), ("ticket", "long"))
STONES = "stones"
"""Where tombstones are staged, in the folder of the rows that they come with."""


def late_rows(tier: Tier, parts: Iterable[ColdFile]) -> int:
    """How many rows are due before the end of what was promoted."""
    end_ns = tier.frontier("promoting", "hot").end_ns
    late = [tier.file(part) for part in parts if part.first_ns < end_ns]
    times = (pq.read_table(path, columns=["deadline_ns"])["deadline_ns"] for path in late)
    return sum(pc.sum(pc.less(column, end_ns)).as_py() for column in times)


@contextmanager
def staging(tier: Tier, name: str) -> Iterator[Path]:
    """A folder to write to, which goes at the end with what is left in it."""
    folder = tier.staging(name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- cancel --------------------------------------------------------------------------------


def cancel(tier: Tier, keys: pa.Table, hot: Hot) -> dict[str, int]:
    """Ends all timers of namespace, key_type, key, here and in the daemon; what it answered.

    Once it returned no such timer fires any more, unless it came later. Raises InvalidRows;
    WindowElsewhere if another daemon may hold them; DaemonError after the tombstones are in the
    tier: the next command tells the daemon.
    """
    keys = cancellable(keys)
    with tier.lock():
        tier.check_daemon(hot.name)
        version = tier.version()
        tombstones = tier.add_tombstones(keys, version.number + 1)
        return end_keys(tier, version, tombstones, hot)


def cancellable(keys: pa.Table) -> pa.Table:
    """Their columns as tombstones have them: what is in the tier once, the daemon has to take.
    Raises InvalidRows if no timer can have such a key."""
    schema = TOMBSTONES.arrow()
    try:
        found = pa.table({name: keys.column(name).cast(schema.field(name).type) for name in KEY})
        found["key"].filter(pc.equal(found["key_type"], "str")).cast(pa.string())
    except (pa.ArrowException, KeyError) as error:
        raise InvalidRows(f"invalid keys: {error}", -1) from error
    bad = pc.index(_of_timers(*(found[name] for name in KEY)), value=False).as_py()
    if bad >= 0:
        raise InvalidRows(f"no timer can have this key: {found.slice(bad, 1).to_pylist()[0]}", bad)
    return found


def _of_timers(namespace: pa.ChunkedArray, key_type: pa.ChunkedArray, key: pa.ChunkedArray) -> Any:
    """Of each key whether a timer can have it, as _BAD says it for Spark."""
    space, size = pc.binary_length(namespace), pc.binary_length(key)
    whole = pc.or_(pc.not_equal(key_type, "uuid"), pc.equal(size, 16))
    bounds = (
        pc.is_in(key_type, pa.array(KEY_TYPES)), whole,
        pc.greater(space, 0), pc.less_equal(space, layout.NAMESPACE_MAX),
        pc.invert(pc.match_substring(namespace, "\0")),
        pc.greater(size, 0), pc.less_equal(size, layout.KEY_MAX),
    )  # fmt: skip
    return pc.fill_null(reduce(pc.and_, bounds), fill_value=False)


def has_timers(tier: Tier) -> bool:
    """True if the daemon may have timers of the tier."""
    return bool(tier.version().daemon) or tier.frontier("promoting", "hot") != NOTHING


def end_keys(
    tier: Tier, version: Version, tombstones: tuple[ColdFile, ...], hot: Hot
) -> dict[str, int]:
    """Commits `version` with tombstones; under the lock. The daemon is notified once it has
    rows."""
    paths = (t.path for t in tombstones) if has_timers(tier) else ()
    tier.commit(replace(
        version, tombstones=(*version.tombstones, *tombstones),
        undelivered=(*version.undelivered, *paths),
    ))  # fmt: skip
    return settle(tier, hot)


def settle(tier: Tier, hot: Hot) -> dict[str, int]:
    """Tells the daemon of tombstones that it does not know; under the lock. Raises
    WindowElsewhere, and they stay undelivered."""
    version = tier.version()
    if not version.undelivered:
        return {}
    tier.check_daemon(hot.name)
    undelivered = [part for part in version.tombstones if part.path in version.undelivered]
    found = Counter[str]()
    for keys in pieces(tier, undelivered):
        found.update(hot.cancel(keys))
    tier.commit(replace(version, undelivered=()))
    return dict(found)


def pieces(tier: Tier, parts: Iterable[ColdFile]) -> Iterator[pa.Table]:
    """The keys of tombstones, some at a time. Raises LakeBroken."""
    for part in parts:
        for batch in pq.ParquetFile(tier.file(part)).iter_batches(KEYS_AT_ONCE, columns=KEY):
            yield pa.Table.from_batches([batch])


# ---- compact -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compacted:
    """Files and rows before and after; `orphans`: files that were removed."""

    files: tuple[int, int]
    rows: tuple[int, int]
    orphans: int


def compact(spark: SparkSession, tier: Tier, hour: str | None = None) -> Compacted:
    """Merges the files of each hour, without dead and promoted rows, and drops tombstones that
    end nothing any more. `hour`: only this one, as 2026-11-21-17. Raises LakeInUse."""
    with tier.writing():
        with tier.lock():  # a cancel's tombstones are on disk before a version names them
            orphans = _remove_orphans(tier)
            version = tier.version()
            number = tier.commit(replace(version, reserved=0)).number
        frontier = tier.frontier("hot")
        old = [part for part in version.rows if untidy(version, part, frontier, hour)]
        with staging(tier, f"compact-{number}") as staged:
            if old:
                stage_left(spark, tier, reached(old, frontier), staged)
            parts = tier.take_rows(staged, number, clean=version.number)
        with tier.lock():
            tier.commit(_compacted(tier, old, parts))
    before, after = sum(part.rows for part in old), sum(part.rows for part in parts)
    return Compacted((len(old), len(parts)), (before, after), orphans)


def untidy(version: Version, part: ColdFile, frontier: Frontier, hour: str | None) -> bool:
    """True if a file can be merged with another, or may have rows that are of no use."""
    folder = Path(part.path).parent
    if hour is not None and folder.name != f"due_hour={hour}":
        return False
    alone = sum(Path(other.path).parent == folder for other in version.rows) == 1
    whole = part.first_ns >= frontier.end_ns or part.version > frontier.version
    return not (alone and whole and not version.newer_tombstones(part.clean))


def stage_left(spark: SparkSession, tier: Tier, old: list[ColdFile], staged: Path) -> None:
    """Writes what files have that is of use."""
    rows = beyond(rows_of(spark, tier, old), tier.frontier("hot"))
    left = alive(rows, tombstones_of(spark, tier, tier.version().tombstones))
    write_rows(left, staged)


def _compacted(tier: Tier, old: list[ColdFile], parts: tuple[ColdFile, ...]) -> Version:
    version, gone = tier.version(), {part.path for part in old}
    rows = (*(part for part in version.rows if part.path not in gone), *parts)
    clean = min((part.clean for part in rows), default=version.number)
    window = tier.unfinished()
    needed = min(clean, window.until.version) if window else clean
    retained = tuple(
        t for t in version.tombstones if t.version > needed or t.path in version.undelivered
    )
    ended = {t.path for t in version.tombstones} - {t.path for t in retained}
    return replace(version, rows=rows, tombstones=retained, replaced=tuple(sorted(gone | ended)))


def _remove_orphans(tier: Tier) -> int:
    orphans = tier.orphans(tier.version())
    for path in orphans:
        path.unlink(missing_ok=True)
    return len(orphans)


# ---- status and verify -----------------------------------------------------------------------


def status(tier: Tier) -> dict[str, int]:
    """Figures of the tier, from its version alone."""
    version, windows = tier.version(), tier.windows()
    answers = sum((Counter(window.results) for window in windows), Counter[str]())
    return {
        "version": version.number,
        "files": len(version.rows),
        "rows": sum(part.rows for part in version.rows),
        "bytes": sum(part.bytes for part in version.rows),
        "tombstones": sum(part.rows for part in version.tombstones),
        "undelivered": len(version.undelivered),
        "windows": len(windows),
        "promoted": answers.total() - answers["UNKNOWN"],
        "unknown": answers["UNKNOWN"],
        "promoted_until_ns": max(0, tier.frontier("hot").end_ns),
    }


def verify(spark: SparkSession, tier: Tier) -> tuple[dict[str, int], list[str]]:
    """Reads everything: counts, and what is wrong, one line each."""
    from pyspark.sql import functions as f

    version = tier.version()
    wrong = [line for part in version.rows for line in _check_part(tier, part, COLD)]
    wrong += [line for part in version.tombstones for line in _check_part(tier, part, TOMBSTONES)]
    if wrong:
        return {}, wrong
    left = pending(spark, tier)
    keys = left.groupBy(*KEY, "daemon", "ticket").count()
    counted = keys.agg(
        f.sum("count").alias("pending"), f.count_if(f.col("count") > 1).alias("twice")
    ).first()
    assert counted is not None
    figures = status(tier) | {"pending": counted["pending"] or 0}
    figures["dead"] = figures["rows"] - figures["pending"]
    figures["orphans"] = len(tier.orphans(version))
    if counted["twice"]:
        some = [tuple(row) for row in keys.filter("count > 1").limit(3).collect()]
        wrong.append(f"{counted['twice']} keys have more than one timer: {some}")
    return figures, wrong


def _check_part(tier: Tier, part: ColdFile, table: Table) -> Iterator[str]:
    path = tier.lake / part.path
    if not path.is_file():
        yield f"{part.path}: is missing"
    elif path.stat().st_size != part.bytes or crc_of(path) != part.crc:
        yield f"{part.path}: its bytes are not those that were written"
    elif table is COLD:
        yield from _check_order(part, pq.read_table(path, columns=["deadline_ns"])["deadline_ns"])


def _check_order(part: ColdFile, times: pa.ChunkedArray) -> Iterator[str]:
    column = times.combine_chunks()
    if len(column) != part.rows:
        yield f"{part.path}: has {len(column)} rows, not {part.rows}"
    elif not pc.all(pc.less_equal(column[:-1], column[1:]), min_count=0).as_py():
        yield f"{part.path}: is not sorted by deadline"
    hours = {hour_text(time // HOUR_NS) for time in (part.first_ns, part.last_ns)}
    if hours != {Path(part.path).parent.name.removeprefix("due_hour=")}:
        yield f"{part.path}: has rows of other hours: {sorted(hours)}"
