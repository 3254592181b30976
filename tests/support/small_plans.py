"""Settings of Spark for tests: no query has so many rows that compiling its plan would pay."""

from __future__ import annotations

from purgatoryd.pipeline.session import QUIET

INTERPRETED = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""What a session may receive at any time."""
JAVA = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {QUIET}"
"""Nothing runs so long that compiling more of Java would pay, either."""
SMALL_PLANS = INTERPRETED | {
    "spark.driver.extraJavaOptions": JAVA,
    # A task costs more than its few rows, and each file has memory for a whole batch of them.
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.files.minPartitionNum": "2",
    "spark.sql.parquet.columnarReaderBatchSize": "256",
}
MANY_PLANS = {
    # A plan is garbage as soon as its query has ended. Compiled code is never thrown away.
    "spark.driver.extraJavaOptions": f"-Xms600m -Xmn300m -XX:ReservedCodeCacheSize=200m {JAVA}",
}
"""Settings of the one session that runs many small plans."""
