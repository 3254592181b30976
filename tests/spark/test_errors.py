"""Messages of the command line for errors of Spark."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from pyspark.errors import PySparkException

from purgatoryd.cli.foreign_errors import unreadable, unwritable

pytestmark = pytest.mark.tier("test")


def test_a_write_error_of_spark_names_its_file() -> None:
    said = "Job aborted: java.io.IOException: file:/lake/silver/x.parquet (Read-only file system)"
    reported = unwritable(PySparkException(said))
    assert str(reported) == "/lake/silver/x.parquet: Read-only file system"
    assert unwritable(PySparkException("Job aborted: out of memory")) is None


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        ("[PATH_NOT_FOUND] Path does not exist: file:{plain}. SQLSTATE: 42K03", "is gone"),
        ("[FAILED_READ_FILE.NO_HINT] Encountered error while reading file file://{url}.  SQLSTATE: "
         "KD001\n\tat org.apache", "cannot be read"),
        ("java.lang.RuntimeException: file:{plain} is not a Parquet file. Expected magic number",
         "cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_spark_could_not_read_is_named_whole(said: str, detail: str) -> None:
    plain = "/lakes, old/it's/x.parquet"
    reported = unreadable(
        PySparkException(said.format(plain=plain, url=quote(plain, safe="/,'()")))
    )
    assert str(reported) == f"{plain}: {detail}"
