"""Settings of Spark for tests: no query has so many rows that compiling its plan would pay."""

from __future__ import annotations

from purgatoryd.pipeline.session import QUIET

INTERPRETED = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""What a session may receive at any time."""
SMALL_PLANS = INTERPRETED | {
    # Nothing runs so long that compiling more of Java would pay, either.
    "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {QUIET}",
    # A task costs more than its few rows, and each file has memory for a whole batch of them.
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.files.minPartitionNum": "2",
    "spark.sql.parquet.columnarReaderBatchSize": "256",
}
