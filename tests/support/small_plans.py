"""Settings of Spark for tests. Their queries are so small that compiling a plan takes longer than
the query."""

from __future__ import annotations

from purgatoryd.pipeline.session import QUIET

INTERPRETED = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Settings that can be changed while a session runs."""
JAVA = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {QUIET}"
"""Options of Java. No code runs long enough for the optimizing compiler to pay off."""
SMALL_PLANS = INTERPRETED | {
    "spark.driver.extraJavaOptions": JAVA,
    # A task itself costs more than its few rows, and each open file reserves memory for a whole
    # batch of rows.
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.files.minPartitionNum": "2",
    "spark.sql.parquet.columnarReaderBatchSize": "256",
}
MANY_PLANS = {
    # A plan becomes garbage as soon as its query has ended. Java never discards compiled code.
    "spark.driver.extraJavaOptions": f"-Xms600m -Xmn300m -XX:ReservedCodeCacheSize=200m {JAVA}",
}
"""Settings of the session that runs many small plans."""
