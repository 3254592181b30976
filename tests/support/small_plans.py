"""Settings of Spark for tests: queries are so small that compiling their plans takes longer."""

from __future__ import annotations

from purgatoryd.pipeline.session import QUIET

INTERPRETED = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Settings that a session can receive at any time."""
JAVA = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {QUIET}"
"""Options of Java: no code runs long enough for its best compiler to pay off."""
SMALL_PLANS = INTERPRETED | {
    "spark.driver.extraJavaOptions": JAVA,
    # A task costs more than its few rows, and each file has memory for a whole batch of rows.
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.files.minPartitionNum": "2",
    "spark.sql.parquet.columnarReaderBatchSize": "256",
}
MANY_PLANS = {
    # A plan is garbage as soon as its query has ended. Compiled code is never thrown away.
    "spark.driver.extraJavaOptions": f"-Xms600m -Xmn300m -XX:ReservedCodeCacheSize=200m {JAVA}",
}
"""Settings of the one session that runs many small plans."""
