"""CURVE keys of the TCP endpoints: key pairs, files of allowed keys, and endpoint addresses.

A key is written in Z85, 40 characters for 32 bytes.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from purgatoryd.shm_layout.errors import BadPath, InvalidArgument

if TYPE_CHECKING:
    import zmq

KEY_CHARACTERS = 40
PROBES, PROBE_S = 2, 5
"""TCP detects a dead host after PROBES + 1 times PROBE_S, in seconds."""
PORT_MAX = 65_533
"""Highest port of the command socket; the notice socket has the next higher port."""
_UID_MAX = 2**32 - 2
_PAIR = re.compile(rb'public-key = "(\S+)"\nsecret-key = "(\S+)"\n')
_PLACE = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})")


class KeyPair(NamedTuple):
    """Public and secret key of one party, in Z85."""

    public: bytes
    secret: bytes


class Place(NamedTuple):
    """Addresses of a daemon's TCP sockets."""

    commands: str
    notices: str
    past: str
    """Address for past notices."""


def place(text: str) -> Place:
    """Return the endpoints for "HOST:PORT". Raises InvalidArgument."""
    found = _PLACE.fullmatch(text)
    if found is None or not 1 <= int(found[2]) <= PORT_MAX:
        raise InvalidArgument(f"{text!r} is not HOST:PORT with a port from 1 to {PORT_MAX}")
    host, port = found[1], int(found[2])
    return Place(*(f"tcp://{host}:{port + n}" for n in range(3)))


def check_key(text: str) -> bytes:
    """Return a Z85 key as 32 bytes. Raises InvalidArgument."""
    from zmq.utils import z85  # imported here because settings are read without ZeroMQ

    try:
        raw = z85.decode(text.encode())
    except (ValueError, KeyError, UnicodeEncodeError):
        raw = b""
    if len(text) != KEY_CHARACTERS or len(raw) != 32:
        raise InvalidArgument(f"{text!r} is not a key of {KEY_CHARACTERS} Z85 characters")
    return raw


def generate(path: Path) -> KeyPair:
    """Make a key pair and store it in a new file that only its owner can read. Raises BadPath."""
    import zmq

    pair = KeyPair(*zmq.curve_keypair())
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadPath(str(path), f"cannot be made: {error.strerror}") from error
    with open(fd, "wb") as file:
        file.write(b'public-key = "%s"\nsecret-key = "%s"\n' % pair)
    return pair


def read_pair(path: Path) -> KeyPair:
    """Read a key pair from a file that no other user may read. Raises BadPath."""
    found = _PAIR.fullmatch(
        _read(path, forbidden=0o077, secret="other users may read or change it")
    )
    if found is None:
        raise BadPath(str(path), "was not written by purgatoryd keygen")
    pair = KeyPair(found[1], found[2])
    for key in pair:
        _key_in(path, key.decode("ascii", "replace"))
    return pair


def read_allowed(path: Path) -> dict[bytes, int]:
    """Return {public key (32 bytes): uid} from a file of lines NAME KEY UID; # starts a comment.

    Raises BadPath, also if other users may change the file.
    """
    allowed: dict[bytes, int] = {}
    text = _read(path, forbidden=0o022, secret="other users may change it").decode(
        "utf-8", "replace"
    )
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition(" #")[0].split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3 or not words[2].isdecimal() or int(words[2]) > _UID_MAX:
            raise BadPath(str(path), f"line {number} is not NAME KEY UID")
        key = _key_in(path, words[1])
        if key in allowed:
            raise BadPath(str(path), f"line {number} repeats a key")
        allowed[key] = int(words[2])
    return allowed


def detect_dead_host(socket: zmq.Socket[bytes]) -> None:
    """Let TCP close later connections of a socket whose host does not answer.

    A socket whose queue may be full must not use heartbeats of ZeroMQ instead: libzmq aborts the
    process if a heartbeat is due on a connection that broke while the queue was full (its issue
    4841).
    """
    import zmq

    for option, value in (
        (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, PROBE_S),
        (zmq.TCP_KEEPALIVE_INTVL, PROBE_S), (zmq.TCP_KEEPALIVE_CNT, PROBES),
        (zmq.TCP_MAXRT, 1000 * PROBE_S * (PROBES + 1)),
    ):  # fmt: skip
        socket.set(option, value)


def _key_in(path: Path, text: str) -> bytes:
    try:
        return check_key(text)
    except InvalidArgument as error:
        raise BadPath(str(path), str(error)) from None


def _read(path: Path, *, forbidden: int, secret: str) -> bytes:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (0, os.geteuid()):
                raise BadPath(str(path), f"belongs to uid {found.st_uid}")
            if stat.S_IMODE(found.st_mode) & forbidden:
                raise BadPath(str(path), secret)
            return file.read()
    except OSError as error:
        raise BadPath(str(path), f"cannot be read: {error.strerror}") from error
