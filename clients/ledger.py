"""A file of facts that a process received from the daemon, for `pipeline audit`.

Each line is one fact in JSON: an acknowledged call, the outcome of an operation, or a received
notice. docs/reference/tables.md describes the fields. The files are in DIRECTORY/daemon=<uuid>/,
one file for each Ledger.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from purgatoryd.clients.arguments import check_whole
from purgatoryd.clients.closing import Closing
from purgatoryd.clients.model import Notice
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import BadPath, InvalidArgument, Lagged
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import Cause, Op, Status
from purgatoryd.shm_layout.wire import Key, RawOutcome

BUFFER_BYTES = 65_536
BUFFER_MAX = 2**40
UNKNOWN = "unknown"
"""Name of the folder for a daemon whose arena a subscriber cannot read."""

_OPS = {
    int(Op.PUT): "add", int(Op.WATCH): "watch", int(Op.CANCEL): "cancel", int(Op.UNPARK): "unpark",
}  # fmt: skip
_FOUND = {
    int(status): status.name.lower()
    for status in (Status.ADDED, Status.REPLACED, Status.KEPT, Status.EXTENDED, Status.PARKED,
                   Status.CANCELLED, Status.FIRED, Status.UNPARKED, Status.BULK_LOADED)
}  # fmt: skip
_CAUSES = {int(cause): cause.name.lower() for cause in Cause}


class Source(NamedTuple):
    """The source of notices: uuid of the arena, id of the stream, number of the subscriber."""

    daemon: bytes
    stream: int
    subscriber: int

    @property
    def text(self) -> str:
        """The fields `stream` and `subscriber` in JSON, for a line of the file."""
        return f'"stream":"{self.stream:016x}","subscriber":{self.subscriber}'


class Ledger(Closing):
    """Stores facts that its clients and subscribers receive. Thread-safe.

    It writes lines once they fill `buffer_bytes`, on flush() and on close(). A killed process loses
    lines that were not written. After a fork only the parent writes. Raises BadPath if `directory`
    cannot be created.
    """

    def __init__(self, directory: str | Path, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        if not isinstance(directory, str | Path):
            raise InvalidArgument(f"directory must be str or Path, not {type(directory).__name__}")
        self._directory = Path(directory)
        self._buffer_bytes = check_whole("buffer_bytes", buffer_bytes, 0, BUFFER_MAX)
        self._name = f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}.jsonl"
        self._pid = os.getpid()
        self._lines: dict[bytes, list[str]] = {}
        self._waiting = 0
        self._subscribers = 0
        self._mutex = threading.Lock()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadPath(str(directory), f"cannot be created: {error.strerror}") from error

    # ---- facts ---------------------------------------------------------------------------------

    def answered(self, daemon: bytes, rows: bytes, body: bytes, names: int, names_bytes: int,
                 count: int, results: bytes) -> None:  # fmt: skip
        """Note the answer to a batch: `rows` and `body` as they were sent, `results` as they were
        received."""
        acked = f'"acked_boot_ns":{HOST.boot_ns()}'
        calls = _calls(body, names, names_bytes, count)
        answers = wire.decode_results(results[: count * wire.RESULT.size])
        self._note(daemon, (
            f'{{{_act(call.op, word & 0xFF, rows, number)},'
            f'{_subject(word >> 8, call.namespace, call.key)},"found":"{found}",{acked}}}\n'
            for number, (call, (word, _)) in enumerate(zip(calls, answers, strict=True))
            if call.op and (found := _FOUND.get(word & 0xFF))
        ))  # fmt: skip

    def ended(self, daemon: bytes, outcomes: Iterable[RawOutcome]) -> None:
        """Note that the owner of operations has received their outcomes."""
        acked = f'"acked_boot_ns":{HOST.boot_ns()}'
        self._note(daemon, (
            f'{{"op":"outcome","ticket":{raw.ticket},"found":"{_CAUSES[raw.cause]}",{acked}}}\n'
            for raw in outcomes if raw.cause
        ))  # fmt: skip

    def subscriber(self) -> int:
        """Return the number of a new subscriber. It distinguishes subscribers of one ledger."""
        with self._mutex:
            self._subscribers += 1
            return self._subscribers

    def received(self, source: Source, notice: Notice) -> None:
        """Note that a subscriber has handed a notice to its caller."""
        subject = _subject(notice.ticket, notice.namespace, notice.key)
        at = "null" if notice.received_boot_ns is None else notice.received_boot_ns
        line = (
            f'{{"op":"notice",{subject},"found":"{notice.cause.name.lower()}",{source.text},'
            f'"topic":{json.dumps(notice.topic)},"sequence":{notice.seq},"received_boot_ns":{at}}}\n'
        )
        self._note(source.daemon, (line,))

    def lost(self, source: Source, lagged: Lagged) -> None:
        """Note that a subscriber has reported lost notices to its caller."""
        line = (
            f'{{"op":"lost","namespace":{json.dumps(lagged.namespace)},{source.text},'
            f'"topic":{json.dumps(lagged.topic)},"sequence":{lagged.first_lost},'
            f'"upto":{lagged.last_lost}}}\n'
        )
        self._note(source.daemon, (line,))

    def _note(self, daemon: bytes, lines: Iterable[str]) -> None:
        with self._mutex:
            retained = self._lines.setdefault(daemon, [])
            before = len(retained)
            retained.extend(lines)
            self._waiting += sum(map(len, retained[before:]))
            if self._waiting >= self._buffer_bytes:
                self._write()

    # ---- to disk -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write all lines, so that a crash of this process does not lose them. Raises OSError."""
        with self._mutex:
            self._write()

    def _write(self) -> None:
        taken, self._lines, self._waiting = self._lines, {}, 0
        if os.getpid() != self._pid:
            return
        for daemon, lines in taken.items():
            path = self._directory / f"daemon={daemon.hex() or UNKNOWN}" / self._name
            path.parent.mkdir(exist_ok=True)
            with path.open("ab", buffering=0) as file:
                _write_all(file.fileno(), "".join(lines).encode())

    def close(self) -> None:
        """Write all lines. Raises OSError."""
        self.flush()


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _act(op: str, status: int, rows: bytes, number: int) -> str:
    """Return the JSON fields of an acknowledged call, or of a row of a bulk load that was already
    done."""
    if status != Status.BULK_LOADED:
        return f'"op":"{op}"'
    bulk_load, first, _ = wire.ROWS.unpack(rows)
    return f'"op":"row","bulk_load":"{bulk_load.hex()}","row":{first + number}'


def _subject(ticket: int, namespace: str, key: Key) -> str:
    if isinstance(key, str):
        kind, text = "str", json.dumps(key)
    elif isinstance(key, UUID):
        kind, text = "uuid", f'"{key.hex}"'
    else:
        kind, text = "bytes", f'"{key.hex()}"'
    return f'"ticket":{ticket},"namespace":{json.dumps(namespace)},"key":{text},"key_type":"{kind}"'


# ---- a batch, read back ------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call of a batch; `op` is empty if a ledger does not note such calls."""

    op: str
    namespace: str
    key: Key


def _calls(body: bytes, names: int, names_bytes: int, count: int) -> Iterator[_Call]:
    """Yield the calls of a batch, in order."""
    namespaces = list(_namespaces(body, names))
    at = names_bytes + count * wire.RECORD.size
    for record in wire.RECORD.iter_unpack(body[names_bytes:at]):
        op, _, key_type, key_len, name, _, _, payload_len, ext_len, _, _ = record
        key = wire.decode_key(key_type, body[at : at + key_len])
        yield _Call(_OPS.get(op, ""), namespaces[name], key)
        at += key_len + payload_len + ext_len


def _namespaces(body: bytes, names: int) -> Iterator[str]:
    """Yield the namespace of each entry of a name table."""
    at = 0
    for _ in range(names):
        namespace_len, topic_len = body[at], body[at + 1]
        yield body[at + 2 : at + 2 + namespace_len].decode()
        at += 2 + namespace_len + topic_len
