"""Interrupts of calls: an exception at a chosen line, and programs that signals hit."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from real_daemon import PATIENCE_S

from purgatoryd import clients as package

OURS = str(Path(package.__file__).parent)


class Interrupted(BaseException):
    """The exception of the signal handler."""


class Interrupt:
    """Raises at the nth line of project code that this thread begins."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.raised = False

    def __enter__(self) -> Interrupt:
        gc.disable()  # a collection is not part of the call
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line" and not self.raised:
            self._left -= 1
            if self._left < 0:
                self.raised = True
                raise Interrupted
        return self._trace


def run(program: str, *arguments: str) -> str:
    """Run a program and return its output. The limit only ends a program that hangs."""
    command = (sys.executable, "-c", program, *arguments)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
