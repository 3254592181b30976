"""Keys of the tcp endpoints: CURVE key pairs, who is let in by them, and where they connect.

A key is written in Z85, 40 characters for 32 bytes.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from purgatoryd.shm_layout.errors import BadPath, InvalidArgument

KEY_CHARACTERS = 40
PORT_MAX = 65_534
"""Commands have this port, notices the next one."""
_UID_MAX = 2**32 - 2
_PAIR = re.compile(rb'public-key = "(\S+)"\nsecret-key = "(\S+)"\n')
_PLACE = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})")


class KeyPair(NamedTuple):
    """One party's keys, in Z85."""

    public: bytes
    secret: bytes


class Place(NamedTuple):
    """Where a daemon listens."""

    commands: str
    notices: str


def place(text: str) -> Place:
    """The endpoints of HOST:PORT. Raises InvalidArgument."""
    found = _PLACE.fullmatch(text)
    if found is None or not 1 <= int(found[2]) <= PORT_MAX:
        raise InvalidArgument(f"{text!r} is not HOST:PORT with a port from 1 to {PORT_MAX}")
    host, port = found[1], int(found[2])
    return Place(f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}")


def check_key(text: str) -> bytes:
    """A key as 32 bytes. Raises InvalidArgument."""
    from zmq.utils import z85  # only here: settings are read without ZeroMQ

    try:
        raw = z85.decode(text.encode())
    except (ValueError, KeyError, UnicodeEncodeError):
        raw = b""
    if len(text) != KEY_CHARACTERS or len(raw) != 32:
        raise InvalidArgument(f"{text!r} is not a key: {KEY_CHARACTERS} characters of Z85")
    return raw


def generate(path: Path) -> KeyPair:
    """Makes a key pair and keeps it in a new file that only its owner reads. Raises BadPath."""
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
    """A key pair from its file, which nobody else may read. Raises BadPath."""
    found = _PAIR.fullmatch(_read(path, forbidden=0o077, secret="others may read or change it"))
    if found is None:
        raise BadPath(str(path), "is no file of purgatoryd keygen")
    pair = KeyPair(found[1], found[2])
    for key in pair:
        _key_in(path, key.decode("ascii", "replace"))
    return pair


def read_allowed(path: Path) -> dict[bytes, int]:
    """Uids by public key (32 bytes), from lines NAME KEY UID; # begins a comment.

    Raises BadPath, also if others may change the file.
    """
    allowed: dict[bytes, int] = {}
    text = _read(path, forbidden=0o022, secret="others may change it").decode("utf-8", "replace")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition(" #")[0].split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3 or not words[2].isdecimal() or int(words[2]) > _UID_MAX:
            raise BadPath(str(path), f"line {number} is not NAME KEY UID")
        key = _key_in(path, words[1])
        if key in allowed:
            raise BadPath(str(path), f"line {number} has a key that stands there already")
        allowed[key] = int(words[2])
    return allowed


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
