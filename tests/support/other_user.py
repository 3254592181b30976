"""Run a part of a test as another user, in a forked child that has dropped root."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from machine import needs

T = TypeVar("T")


def run_as(
    uid: int, work: Callable[[], T], *, gid: int | None = None, groups: Sequence[int] = ()
) -> T:
    """Call `work` as the user `uid`. Return its result, or raise its exception.

    `gid`: primary group of the user; default: the same number as the uid. `groups`: supplementary
    groups. `work` may only use modules that the test has already imported, because other users may
    not be able to read the interpreter's files.
    """
    needs("root", "to become another user")
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_fd)
        _become(uid, uid if gid is None else gid, groups)
        _answer(write_fd, work)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        reported = pipe.read()
    _, status = os.waitpid(child, 0)
    assert reported, f"the child ended with status {status} and reported no result"
    result, error = pickle.loads(reported)
    if error is not None:
        raise error
    found: T = result
    return found


def _become(uid: int, gid: int, groups: Sequence[int]) -> None:
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _answer(write_fd: int, work: Callable[[], object]) -> NoReturn:
    """Send the result or the exception, and exit, because the child must not return into the test
    runner."""
    try:
        try:
            reported = pickle.dumps((work(), None))
        except BaseException as error:
            reported = pickle.dumps((None, error))
        with os.fdopen(write_fd, "wb") as pipe:
            pipe.write(reported)
    finally:
        os._exit(0)
