"""Exclude users from our sockets by the access control lists of their paths, see acl(5).

The kernel then refuses their connections, so these cost the daemon nothing. On a file system
without access control lists, these users are refused at the handshake.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

SHUT_MAX = 256
"""Maximum number of users excluded at the same time. A list on ext4 has space for twice as many."""

_NAME = "system.posix_acl_access"
_HEAD = struct.pack("<I", 2)  # POSIX_ACL_XATTR_VERSION
_ENTRY = struct.Struct("<HHI")  # tag, permissions, id
_NO_ID = 2**32 - 1
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 1, 2, 4, 16, 32

_Entry = tuple[int, int, int]


class Listener:
    """The socket at one path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._list: bytes | None = None
        """Access control list that the path had before the first user was excluded; None = no
        list."""
        self._shut = False

    def shut_to(self, uids: Sequence[int]) -> None:
        """Exclude exactly these users. Raises OSError."""
        if not self._shut:
            self._list = self._found()
        self._shut = bool(uids)
        if uids:
            entries = [e for e in self._entries() if e[0] != _USER or e[2] not in uids]
            entries += [(_USER, 0, uid) for uid in uids]
            self._put(_HEAD + b"".join(_ENTRY.pack(*e) for e in sorted(entries)))
        elif self._list is not None:
            self._put(self._list)
        else:
            os.removexattr(self._path, _NAME)

    def _found(self) -> bytes | None:
        with suppress(OSError):  # the path has no list
            return os.getxattr(self._path, _NAME)
        return None

    def _entries(self) -> list[_Entry]:
        if self._list is not None:
            return [*_ENTRY.iter_unpack(self._list[len(_HEAD) :])]
        mode = self._path.stat().st_mode
        bits = ((_OWNER, mode >> 6), (_GROUP, mode >> 3), (_MASK, mode >> 3), (_OTHERS, mode))
        return [(tag, permissions & 7, _NO_ID) for tag, permissions in bits]

    def _put(self, entries: bytes) -> None:
        os.setxattr(self._path, _NAME, entries)


class Listeners:
    """All sockets of the daemon that have a path."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = [*paths]
        self._listeners = [Listener(path) for path in self._paths]
        self._shut: list[int] = []

    def renew(self) -> None:
        """Note that new sockets are bound to the paths, and exclude the same users from them."""
        self._listeners = [Listener(path) for path in self._paths]
        shut, self._shut = self._shut, []
        self.shut_to(shut)

    def shut_to(self, uids: Iterable[int]) -> None:
        """Exclude exactly these users, at most the first SHUT_MAX of them."""
        some = sorted(islice(uids, SHUT_MAX))
        if some == self._shut:
            return
        self._shut = some
        for listener in self._listeners:
            with suppress(OSError):
                listener.shut_to(some)
