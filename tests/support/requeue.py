"""FUTEX_CMP_REQUEUE, with which a hostile process moves sleepers away from their word."""

from __future__ import annotations

import ctypes
import os
from typing import Any

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
