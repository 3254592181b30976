"""Log messages of the daemon: sent to journald with fields, or to stderr as lines that end with the
fields.

A message is queued, and a thread writes it: a full disk, a closed terminal or a stopped reader
delays only that thread. Nothing here raises. A message is dropped and counted if the queue is full,
if it exceeds the rate limit of its kind, or if it cannot be written. The next written line contains
the number of dropped messages. The thread may block, because O_NONBLOCK on stderr would apply to
every process that shares it.

The standard library's logging module is not used, because importing it would take most of the time
of a start.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread, stack_size

from purgatoryd.daemon.allowance import Allowance
from purgatoryd.shm_layout.host import HOST

LEVELS = {"error": 3, "warning": 4, "info": 6}
"""Severity numbers of syslog, by level."""
JOURNALD = "/run/systemd/journal/socket"
QUEUE_MAX = 1000
"""Maximum number of messages that wait for the thread; further messages are dropped."""
BURST, PER_S = 200, 0.2
"""Token bucket of each kind of message: its size, and tokens per second. All messages of one log
statement are one kind."""
FLUSH_S = 2.0
"""Longest wait of an exiting process for queued messages."""
_AGAIN_S = 0.02
"""Pause before the next attempt to write, if another process has made stderr non-blocking."""
_STACK_BYTES = 256 * 1024
"""Stack size of the thread; with the setting lock-memory the whole stack stays in RAM."""


class Log:
    """The log of a process: level, destination, and the fields that are added to every message."""

    def __init__(self) -> None:
        self.level = "warning"
        self.writes = False
        """True in a daemon, whose thread writes all output."""
        self._fields: dict[str, object] = {}
        self._journald: socket.socket | None = None
        self._refused = self._unwritten = self._reported = 0
        """Numbers of messages: refused by the full queue or the rate limit, not written by the
        thread, and already reported as dropped."""
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Start with an empty queue, also in a forked child, because the parent's thread writes
        the parent's queue."""
        self._queue: SimpleQueue[Callable[[], bool | None]] = SimpleQueue()
        self._thread: Thread | None = None
        self._rates: dict[tuple[object, int], Allowance] = {}

    def set_up(self, level: str, **fields: object) -> None:
        """Log messages at least as severe as `level`, each with `fields`.

        Messages go to journald with all fields if stderr is connected to journald. The thread
        starts at once, before the daemon's threads are placed on CPUs.
        """
        self.level, self._fields, self.writes = level, fields, True
        if self._journald is None and leads_to_journald(2):
            self._journald = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sys.unraisablehook = self._unraisable
        self._start()

    def _unraisable(self, raised: sys.UnraisableHookArgs) -> None:
        """Log an ignored exception. Python itself would print it, and block until stderr is
        read."""
        self.error(f"ignored {raised.exc_value!r} in {raised.object!r}")

    def _start(self) -> None:
        """Start the thread. If there is no memory for it, messages wait, and the next message tries
        again."""
        if self._thread is not None:
            return
        before = stack_size(_STACK_BYTES)
        try:
            thread = Thread(target=self._work, args=(self._queue,), name="log", daemon=True)
            _begin_without_signals(thread)
            self._thread = thread
            atexit.register(self.flush)
        except (RuntimeError, MemoryError):
            pass
        finally:
            stack_size(before)

    @property
    def dropped(self) -> int:
        """Number of messages dropped since the start of the process."""
        return self._refused + self._unwritten

    def error(self, message: str, **fields: object) -> None:
        """Log a fault that an operator has to repair."""
        self._put("error", message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """Log an event that may need an operator."""
        self._put("warning", message, fields)

    def info(self, message: str, **fields: object) -> None:
        """Log an event that helps to understand later ones."""
        self._put("info", message, fields)

    def last_words(self, text: str) -> None:
        """Log the reason why the process ends, as a line without fields. The exit of the process
        waits for the line, see flush()."""
        self._queue.put(partial(_written, 2, text))

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until all queued messages are written, at most `timeout_s`."""
        if self._thread is not None:
            done = Event()
            self._queue.put(done.set)
            done.wait(timeout_s)

    def _put(self, level: str, message: str, fields: Mapping[str, object]) -> None:
        if LEVELS[level] > LEVELS[self.level]:
            return
        if self._queue.qsize() >= QUEUE_MAX or not self._allowed():
            self._refused += 1
            return
        self._queue.put(partial(self._write, level, message, fields))
        self._start()

    def _allowed(self) -> bool:
        """Take a token from the bucket of the log statement. False if the bucket is empty."""
        caller, now_ns = sys._getframe(3), HOST.boot_ns()
        kind = caller.f_code, caller.f_lineno
        return self._rates.setdefault(kind, Allowance(BURST, now_ns)).take(1, now_ns, BURST, PER_S)

    # ---- in the thread -----------------------------------------------------------------------

    def _work(self, queue: SimpleQueue[Callable[[], bool | None]]) -> None:
        """Run the queued tasks until the process ends."""
        while True:
            task = queue.get()
            try:
                written = task() is not False
            except Exception:
                written = False
            self._unwritten += not written

    def _write(self, level: str, message: str, fields: Mapping[str, object]) -> bool:
        dropped = self.dropped - self._reported
        all_fields = {**self._fields, **fields, **({"dropped": dropped} if dropped else {})}
        if not (
            self._sent(entry(level, message, all_fields))
            or _written(2, line(level, message, all_fields))
        ):
            return False
        self._reported += dropped
        return True

    def _sent(self, data: bytes) -> bool:
        if self._journald is None:
            return False
        try:
            self._journald.sendto(data, JOURNALD)
        except OSError:  # journald does not run, or refuses a message of this size
            return False
        return True


log = Log()
"""The log of this process."""


def _begin_without_signals(thread: Thread) -> None:
    """Start a thread that receives no signals. The loop has to see a signal before it takes
    messages that were sent after it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def announce(text: str) -> None:
    """Write a line to stdout in a thread, so that a stopped reader does not delay the daemon."""
    try:
        _begin_without_signals(Thread(target=_written, args=(1, text), daemon=True))
    except (RuntimeError, MemoryError):  # no memory for a thread
        _written(1, text)


def _written(fd: int, text: str) -> bool:
    """Write a line. False if the line, or the end of the line, is lost."""
    data = f"{text}\n".encode(errors="backslashreplace")
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            time.sleep(_AGAIN_S)
        except OSError:
            return False
    return True


def leads_to_journald(fd: int) -> bool:
    """True if what is written to `fd` goes to journald, as systemd says in $JOURNAL_STREAM."""
    try:
        about = os.fstat(fd)
    except OSError:  # closed
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{about.st_dev}:{about.st_ino}"


def line_prefix(level: str) -> str:
    """Return the prefix by which journald recognises the level of a line on stderr; empty if stderr
    does not lead to journald."""
    return f"<{LEVELS[level]}>" if leads_to_journald(2) else ""


def line(level: str, message: str, fields: Mapping[str, object]) -> str:
    """Return a message as a line for stderr, with its fields as name=value at the end."""
    named = " ".join(f"{name}={_word(str(value))}" for name, value in fields.items())
    return f"{line_prefix(level)}purgatoryd: {message}" + (f" [{named}]" if named else "")


def _word(value: str) -> str:
    """Quote a value that is not one plain word."""
    return value if value.isprintable() and not set(value) & set(" '\"=[]") else repr(value)


def entry(level: str, message: str, fields: Mapping[str, object]) -> bytes:
    """Return a message in journald's native protocol. Names of fields begin with PURGATORYD_."""
    known = {"MESSAGE": message, "PRIORITY": LEVELS[level], "SYSLOG_IDENTIFIER": "purgatoryd"}
    named = {f"PURGATORYD_{name.upper()}": value for name, value in fields.items()}
    return b"".join(_field(name, str(value)) for name, value in (known | named).items())


def _field(name: str, value: str) -> bytes:
    """Return a field. A value of several lines is preceded by its length."""
    data = value.encode(errors="backslashreplace")
    if b"\n" not in data:
        return f"{name}=".encode() + data + b"\n"
    return f"{name}\n".encode() + len(data).to_bytes(8, "little") + data + b"\n"
