"""The process that started this one."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Has the kernel end this process when the one that started it, `parent`, is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:  # it was gone before the kernel knew
        os.kill(os.getpid(), signal.SIGTERM)
