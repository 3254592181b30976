"""The parent process of this process."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let the kernel end this process when its parent, with pid `parent`, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGTERM)
