"""Translate errors of Python and Spark into errors of purgatoryd."""

from __future__ import annotations

import errno
import os
import re
import sys
from urllib.parse import unquote

from purgatoryd.shm_layout import errors

_REFUSALS = {
    number: os.strerror(number)
    for number in (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
        errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
    )
}  # fmt: skip


def unwritable(error: Exception) -> errors.BadPath | None:
    """Return the error for a file that the system refused to open or write, in Python or in Spark.

    None if `error` has another cause.
    """
    if isinstance(error, OSError):
        detail = _REFUSALS.get(error.errno or 0)
        return errors.BadPath(str(error.filename or "a file"), detail) if detail else None
    if not _of_spark(error):
        return None
    said = str(error)
    detail = next((words for words in _REFUSALS.values() if words in said), None)
    return errors.BadPath(_file_in(said) or "a file", detail) if detail else None


def _of_spark(error: Exception) -> bool:
    if "pyspark" not in sys.modules:
        return False
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return isinstance(error, (PySparkException, Py4JError))


_FILE = re.compile(
    r"file://(?P<url>/[^\s\"]+)"
    r"|file:(?P<path>/.+?)(?=\.? SQLSTATE| is not a Parquet| does not exist| \(|\"|$)",
    re.MULTILINE,
)
"""The file that a message of Spark names: a URL, or a path, which may contain spaces."""
_READING = re.compile("FAILED_READ_FILE|PATH_NOT_FOUND|CANNOT_READ_FILE|is not a Parquet file")


def _file_in(said: str) -> str | None:
    """Return the path of the file that a message of Spark names."""
    file = _FILE.search(said)
    if file is None:
        return None
    return file["path"] or unquote(file["url"].rstrip("."))


def unreadable(error: Exception) -> errors.LakeBroken | None:
    """Return the error for a file that Spark could not read; None if `error` has another cause."""
    said = str(error)
    path = _file_in(said)
    if not (_of_spark(error) and path and _READING.search(said)):
        return None
    detail = "is gone" if "PATH_NOT_FOUND" in said else "cannot be read"
    return errors.LakeBroken(path, detail)


def unusable(error: Exception) -> errors.InvalidArgument | None:
    """Return the error for an argument that Python or Spark refused; None for other errors."""
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return errors.InvalidArgument(f"{error.object!r} is not valid Unicode")
    if _of_spark(error) and "JAVA_GATEWAY_EXITED" in str(error):
        return errors.InvalidArgument(
            "Java did not start Spark; see its message above, and check --master and --conf"
        )
    return None


def translated(error: Exception) -> errors.PurgatorydError | None:
    """Return the error of purgatoryd for a refusal by the machine or by Spark; None = `error`
    is a bug."""
    return unwritable(error) or unreadable(error) or unusable(error)
