"""FUTEX_CMP_REQUEUE, with which a hostile process moves sleepers away from their word."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from real_daemon import PATIENCE_S, eventually

from purgatoryd.clients import Subscriber
from purgatoryd.shm_layout._core import ffi

SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]
FUTEX_CMP_REQUEUE = 4


def requeue(word: Any, to: Any, expected: int) -> int:
    """Move all sleepers of a word to another one, as any process may that can read the arena.
    Return the number of sleepers that were moved."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, target = (int(ffi.cast("uintptr_t", one)) for one in (word, to))
    return int(
        libc.syscall(
            SYS_FUTEX, ctypes.c_void_p(address), FUTEX_CMP_REQUEUE, 0, ctypes.c_void_p(2**30),
            ctypes.c_void_p(target), expected,
        )
    )  # fmt: skip


def key_after_requeue(
    subscriber: Subscriber, word: Any, to: Any, arm: Callable[[], object]
) -> str | None:
    """Move a sleeping subscriber from `word` to another one, call arm(), and return the key of the
    next notice; None if none came."""
    keys: list[str] = []

    def get() -> None:
        notice = subscriber.get(PATIENCE_S)
        keys.extend([] if notice is None else [str(notice.key)])

    thread = threading.Thread(target=get)
    thread.start()
    eventually(lambda: requeue(word, to, int(word[0])) == 1)
    arm()
    thread.join(PATIENCE_S)
    return keys[0] if keys else None
