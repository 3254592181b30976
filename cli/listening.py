"""Where a command that answers questions listens: on this host alone."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

from purgatoryd.shm_layout.errors import BadPath, InvalidArgument

SOCKET_MODE = 0o660
_PLACE = re.compile(r"(?:\[([0-9a-f:]+)\]|([a-z0-9.-]+))(?::(\d{1,5}))?")


@contextmanager
def on_port(listen: str) -> Iterator[socket.socket]:
    """A socket on HOST:PORT; port 0 = any that is free. Raises InvalidArgument for an address that
    others can reach, BadPath for one that cannot be had."""
    host, port = _split(listen)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except (OSError, OverflowError) as error:
            raise BadPath(listen, f"cannot be listened on: {error}") from None
        listening.listen()
        yield listening


def _split(listen: str) -> tuple[str, int]:
    found = _PLACE.fullmatch(listen)
    if found is None or found[3] is None:
        raise InvalidArgument(f"{listen!r} is not HOST:PORT")
    host = _address(found[1] or found[2])
    if not loopback(host):
        raise InvalidArgument(f"{listen!r} is not an address of this host alone, as 127.0.0.1 is")
    return host, int(found[3])


def _address(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


def loopback(address: str) -> bool:
    """True for an address that only this host reaches."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


@contextmanager
def on_socket(path: Path) -> Iterator[socket.socket]:
    """A unix socket for its user and group, which is gone afterwards. Raises BadPath if the path
    is something else's, or somebody listens there."""
    _clear(path)
    with socket.socket(socket.AF_UNIX) as listening:
        before = os.umask(0o777 & ~SOCKET_MODE)
        try:
            listening.bind(str(path))
        except OSError as error:
            raise BadPath(str(path), f"cannot be listened on: {error}") from None
        finally:
            os.umask(before)
        try:
            listening.listen()
            yield listening
        finally:
            path.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Removes a socket that a dead process left."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise BadPath(str(path), "is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise BadPath(str(path), "is another process's, which answers there")
        path.unlink()


def where(listening: socket.socket) -> str:
    """What people open, or what a server in front of it connects to."""
    name = listening.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}/"


def called_here(host: str) -> bool:
    """True if a Host header names this host. A page of another site may have this host's address
    (DNS rebinding), but it is asked for by that site's name."""
    found = _PLACE.fullmatch(host.lower())
    return found is not None and loopback(_address(found[1] or found[2]))
