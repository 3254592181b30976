"""Find the functions of the libzmq that pyzmq uses, so that the core can call them.

A process may contain several copies of libzmq. The functions have to be those that pyzmq's own
extension calls, because a socket of one copy is a pointer into that copy's memory.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import zmq
from zmq.backend import Socket

from purgatoryd.shm_layout._core import ffi

OLDEST = (4, 2)
"""Oldest version with the functions, and with messages of 64 bytes. Other major versions are not
used."""
_TYPE = ffi.typeof("struct pg_zmq_calls")


def calls_for(socket: zmq.Socket[bytes]) -> Any | None:
    """Return a struct pg_zmq_calls whose functions take `socket.underlying` and messages of its
    libzmq; None if they cannot be found, or are not certain to be pyzmq's own."""
    library = _library()
    if library is None or not _is_same(library, socket):
        return None
    fields = {
        name: ffi.cast(field.type, _address(library, name)) for name, field in _TYPE.fields or ()
    }
    return ffi.new("struct pg_zmq_calls *", fields)


def _library() -> ctypes.CDLL | None:
    """Return the extension of pyzmq. Symbols are searched in it and in the libraries that it
    is linked with, as the dynamic linker did."""
    path = getattr(sys.modules.get(Socket.__module__), "__file__", None)
    if path is None:
        return None
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        everywhere = ctypes.CDLL(None)
        if any(_is_hidden(library, everywhere, name) for name, _ in _TYPE.fields or ()):
            return None
    except (OSError, AttributeError):  # an extension of another kind, or libzmq within it
        return None
    return library


def _is_hidden(library: ctypes.CDLL, everywhere: ctypes.CDLL, name: str) -> bool:
    """Return whether pyzmq's extension calls another function than that of `library`: the linker
    prefers the functions that are visible to the whole process."""
    own = _address(library, name)
    return hasattr(everywhere, f"zmq_{name}") and _address(everywhere, name) != own


def _address(library: ctypes.CDLL, name: str) -> int:
    """Return the address of a function of libzmq. Raises AttributeError."""
    address = ctypes.cast(getattr(library, f"zmq_{name}"), ctypes.c_void_p).value
    assert address is not None
    return address


def _is_same(library: ctypes.CDLL, socket: zmq.Socket[bytes]) -> bool:
    """Return whether `library` has pyzmq's version, and finds the type and the descriptor of
    `socket` at its address."""
    version = (ctypes.c_int * 3)()
    library.zmq_version(*(ctypes.byref(version, 4 * i) for i in range(3)))
    if tuple(version) != zmq.zmq_version_info() or not OLDEST <= tuple(version) < (5,):
        return False
    options = (zmq.TYPE, zmq.FD)
    return all(_option(library, socket, one) == int(socket.getsockopt(one)) for one in options)


def _option(library: ctypes.CDLL, socket: zmq.Socket[bytes], option: int) -> int | None:
    value, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = library.zmq_getsockopt(
        ctypes.c_void_p(socket.underlying), option, ctypes.byref(value), ctypes.byref(size)
    )
    return None if failed else value.value
