"""Read single keys from a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAMES = {
    b"\x1b[C": "right", b"\x1bOC": "right", b"\t": "right", b"\x1b[D": "left", b"\x1bOD": "left",
    b"\x1b[Z": "left", b"\x1b": "escape",
}  # fmt: skip
"""Names of the byte sequences that a terminal sends for keys without a character."""
MOST_BYTES = 32


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to a number of seconds for a key. The function returns the
    name or the character of the key, or "" if no key was pressed. If standard input is not a
    terminal, the function only waits."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield lambda wait_s: _key(fd, wait_s)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _no_key(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""


def _key(fd: int, wait_s: float) -> str:
    if not select.select([fd], [], [], wait_s)[0]:
        return ""
    read = os.read(fd, MOST_BYTES)
    if not read:  # the terminal is closed
        return "q"
    return NAMES.get(read, read[:1].decode(errors="replace"))
