"""What the daemon has to say to whoever looks after it: fields for journald, or lines on stderr,
which end with the fields.

Not the standard library's logging: importing that takes longer than mapping a million timers, at
every restart.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

LEVELS = {"error": 3, "warning": 4, "info": 6}
"""By how grave they are, as syslog counts."""
JOURNALD = "/run/systemd/journal/socket"


class Log:
    """How much is logged, where, and what is added to every message."""

    def __init__(self) -> None:
        self.level = "warning"
        self._fields: dict[str, object] = {}
        self._journald: socket.socket | None = None

    def set_up(self, level: str, **fields: object) -> None:
        """Tells what is at least as grave as `level`; `fields` go with each message.

        To journald with all fields if that is where stderr leads.
        """
        self.level, self._fields = level, fields
        if self._journald is None and leads_to_journald(2):
            self._journald = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def error(self, message: str, **fields: object) -> None:
        """Somebody has to do something."""
        self._write("error", message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """Somebody may have to."""
        self._write("warning", message, fields)

    def info(self, message: str, **fields: object) -> None:
        """Good to know afterwards."""
        self._write("info", message, fields)

    def _write(self, level: str, message: str, fields: Mapping[str, object]) -> None:
        if LEVELS[level] > LEVELS[self.level]:
            return
        all_fields = {**self._fields, **fields}
        if self._journald is None or not self._sent(entry(level, message, all_fields)):
            print(line(level, message, all_fields), file=sys.stderr, flush=True)

    def _sent(self, data: bytes) -> bool:
        assert self._journald is not None
        try:
            self._journald.sendto(data, JOURNALD)
        except OSError:  # journald is not there, or takes nothing of this size
            return False
        return True


log = Log()
"""Of this process."""


def leads_to_journald(fd: int) -> bool:
    """True if what is written to `fd` goes to journald, as systemd says in $JOURNAL_STREAM."""
    try:
        about = os.fstat(fd)
    except OSError:  # closed
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{about.st_dev}:{about.st_ino}"


def line_prefix(level: str) -> str:
    """What tells journald the level of a line on stderr; nothing if others read it."""
    return f"<{LEVELS[level]}>" if leads_to_journald(2) else ""


def line(level: str, message: str, fields: Mapping[str, object]) -> str:
    """A message for stderr, with its fields as name=value behind it."""
    named = " ".join(f"{name}={_word(str(value))}" for name, value in fields.items())
    return f"{line_prefix(level)}purgatoryd: {message}" + (f" [{named}]" if named else "")


def _word(value: str) -> str:
    """A value that is not one plain word is quoted."""
    return value if value.isprintable() and not set(value) & set(" '\"=[]") else repr(value)


def entry(level: str, message: str, fields: Mapping[str, object]) -> bytes:
    """A message in journald's own protocol; the names of its fields begin with PURGATORYD_."""
    known = {"MESSAGE": message, "PRIORITY": LEVELS[level], "SYSLOG_IDENTIFIER": "purgatoryd"}
    named = {f"PURGATORYD_{name.upper()}": value for name, value in fields.items()}
    return b"".join(_field(name, str(value)) for name, value in (known | named).items())


def _field(name: str, value: str) -> bytes:
    """A value of several lines is written with its length before it."""
    data = value.encode()
    if b"\n" not in data:
        return f"{name}=".encode() + data + b"\n"
    return f"{name}\n".encode() + len(data).to_bytes(8, "little") + data + b"\n"
