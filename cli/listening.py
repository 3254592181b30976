"""Listening sockets that only this host can reach."""

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
    """Return a context manager for a socket that listens on HOST:PORT; port 0 = any free port.

    Raises InvalidArgument if the address is not a loopback address, and BadPath if the socket
    cannot be bound.
    """
    host, port = _split(listen)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except (OSError, OverflowError) as error:
            raise BadPath(listen, f"cannot be bound: {error}") from None
        listening.listen()
        yield listening


def _split(listen: str) -> tuple[str, int]:
    found = _PLACE.fullmatch(listen)
    if found is None or found[3] is None:
        raise InvalidArgument(f"{listen!r} is not HOST:PORT")
    host = _address(found[1] or found[2])
    if not loopback(host):
        raise InvalidArgument(f"{listen!r} is not a loopback address such as 127.0.0.1")
    return host, int(found[3])


def _address(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


def loopback(address: str) -> bool:
    """Return True for an address that only this host can reach."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


@contextmanager
def on_socket(path: Path) -> Iterator[socket.socket]:
    """Return a context manager for a listening Unix socket that its user and Unix group may use.
    The socket is removed at the end of the context.

    Raises BadPath if the path is not a socket or another process listens there.
    """
    _clear(path)
    with socket.socket(socket.AF_UNIX) as listening:
        before = os.umask(0o777 & ~SOCKET_MODE)
        try:
            listening.bind(str(path))
        except OSError as error:
            raise BadPath(str(path), f"cannot be bound: {error}") from None
        finally:
            os.umask(before)
        try:
            listening.listen()
            yield listening
        finally:
            path.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Remove a socket that an ended process left. Raises BadPath."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise BadPath(str(path), "is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise BadPath(str(path), "is in use: another process listens there")
        path.unlink()


def where(listening: socket.socket) -> str:
    """Return the URL or the path of a listening socket."""
    name = listening.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}/"


def called_here(host: str) -> bool:
    """Return True if a Host header names this host.

    The check prevents DNS rebinding. If the name of another site resolves to an address of this
    host, the requests of its pages have that site's name in the Host header.
    """
    found = _PLACE.fullmatch(host.lower())
    return found is not None and loopback(_address(found[1] or found[2]))
