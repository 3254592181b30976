"""Fuzz target for decoders of clients and commands: replies, notices, key files, settings.

The first byte of an input selects the decoder for the rest. Some decoders get a valid head before
the rest. Every input must be decoded, or refused with an error of this project.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from click.testing import CliRunner

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.clients.batch import Batch
from purgatoryd.clients.session import Query, Session
from purgatoryd.clients.stream import Stream
from purgatoryd.shm_layout import curve, wire
from purgatoryd.shm_layout.errors import DaemonError, Lagged, PurgatorydError
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import NOTICE_MAGIC, WIRE_VERSION, Message
from purgatoryd.shm_layout.wire import Reply

SESSION = 7
_FOLDER = TemporaryDirectory(prefix="purgatoryd-fuzz-")


def _file(data: bytes) -> Path:
    path = Path(_FOLDER.name) / "input"
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def _pieces(data: bytes, head: struct.Struct) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Yield (fields of a small head, bytes after the head) until the data ends. The last field of a
    head is the number of bytes after it."""
    while len(data) >= head.size:
        fields = head.unpack_from(data)
        end = head.size + fields[-1]
        yield fields, data[head.size : end]
        data = data[end:]


def _decoded(reply: Reply | DaemonError) -> None:
    if isinstance(reply, Reply):
        wire.decode_infos(reply.body, reply.records)
        wire.decode_bulk_load(reply.body)
        wire.decode_listed(reply.body, reply.records)
        wire.decode_sweeps(reply.body, reply.records)


def conversation(data: bytes) -> None:
    """Decode replies to a client that waits for the replies to a batch and to a query."""
    talk = Session(bytes)
    talk.on_outcomes = wire.decode_outcomes
    talk.receive(
        wire.encode_frame(Message.HELLO, SESSION, 1)
        + struct.pack("<QQ16sQQqqQQIIII40x", SESSION, 1, bytes(16), 1, 1, 0, 0, 0, 1, 0, 4, 9, 9)
    )
    talk.submit(Batch(1, 1, 8, bytes(40), lambda outcome: None))
    talk.ask(Query(lambda n, session: wire.encode_query(n, session, b"n", "key"), _decoded))
    for (kind, sequence, count, error, _), body in _pieces(data, struct.Struct("<BBBBH")):
        while talk.frame() is not None:
            talk.sent()
        talk.receive(wire.encode_frame(kind, SESSION, sequence, count=count, error=error) + body)


def notices(data: bytes) -> None:
    """Decode messages to a subscriber that has no arena."""
    stream = Stream("n", None, lambda: None, HOST.boot_ns)
    for (first, count, tail, stream_id, _), body in _pieces(data, struct.Struct("<BBBBH")):
        head = (NOTICE_MAGIC, WIRE_VERSION, stream_id, 1, first, tail, 0, 0, count)
        stream.take([b"n\0t\0", wire.NOTICES.pack(*head) + body])
        _take_all(stream)


def _take_all(stream: Stream) -> None:
    while True:
        with suppress(Lagged):
            if stream.pop() is None:
                return


def raw(data: bytes) -> None:
    """Decode the input as one reply, and its two halves as the two parts of a notice message."""
    Session(bytes).receive(data)
    half = len(data) // 2
    Stream("n", None, lambda: None, HOST.boot_ns).take([data[:half], data[half:]])


def counted(decode: Callable[[bytes, int], object]) -> Callable[[bytes], None]:
    """Return a decoder that takes the number of expected items from the first byte of its input."""

    def target(data: bytes) -> None:
        decode(data[1:], data[0] if data else 0)

    return target


def settings(data: bytes) -> None:
    """Parse a TOML file for `purgatoryd run`."""
    arguments = ["run", "--print-config", "--config", str(_file(data))]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code != Exit.BUG, result.output


TARGETS: tuple[Callable[[bytes], object], ...] = (
    conversation,
    notices,
    raw,
    counted(wire.decode_infos),
    counted(wire.decode_outcomes),
    counted(wire.decode_newest_sequences),
    wire.decode_ended,
    wire.decode_verdict,
    wire.decode_welcome,
    wire.decode_namespace_set,
    lambda data: curve.read_allowed(_file(data)),
    lambda data: curve.read_pair(_file(data)),
    lambda data: curve.place(data.decode(errors="replace")),
    settings,
)


def run(data: bytes) -> None:
    """Decode one input. Raise all exceptions that are not errors of this project."""
    if data:
        with suppress(PurgatorydError):
            TARGETS[data[0] % len(TARGETS)](data[1:])
