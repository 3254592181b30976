"""One side of a pair of rings: messages through memory that the daemon and a client map.

The daemon makes the memory. Each side puts messages into one ring and takes them from the other,
and wakes the other side if it sleeps. See ring.c for the order of the stores.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import RingRefusal, struct_format

OFFER = struct.Struct(struct_format("pg_ring_offer"))
"""magic, version, refusal, ring_bytes."""
ARENA_NAME = b"\0purgatoryd-arena"
"""The abstract address of a client's socket begins with this if the client asks for the arena."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POLL: int = lib.PG_RING_POLL


class RingPair:
    """One side of a pair of rings. No method blocks."""

    def __init__(
        self, memory_fd: int, ring_bytes: int, *, daemon: bool, wake: Callable[[int, Any], object]
    ) -> None:
        """Map the memory of rings of `ring_bytes` each, a power of two. Raises OSError.

        `wake` is called with the way in which the other side sleeps (enum pg_ring_sleep) and the
        word on which it perhaps sleeps.
        """
        self._memory = mmap.mmap(memory_fd, pair_bytes(ring_bytes))
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._base = ffi.from_buffer(self._memory, require_writable=True)
        self._wake = wake
        pair = ffi.cast("struct pg_ring_pair *", self._base)
        first = self._base + lib.PG_RING_HEAD
        submissions = _end(pair, "submissions", first, ring_bytes)
        completions = _end(pair, "completions", first + ring_bytes, ring_bytes)
        self.taker, self.putter = (
            (submissions, completions) if daemon else (completions, submissions)
        )
        self._taken = ffi.addressof(self.taker.words, "putter_sleeps")
        self._put = ffi.addressof(self.putter.words, "taker_sleeps")
        self._large: bytearray | None = None

    @property
    def broken(self) -> bool:
        """The other side stored something impossible; nothing more is taken or put."""
        return bool(self.taker.broken or self.putter.broken)

    @property
    def collects(self) -> bool:
        """True while pieces of a message that is larger than the ring are missing."""
        return self._large is not None

    @property
    def puts(self) -> bool:
        """True while the ring has only a part of a message."""
        return bool(self.putter.length)

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of putter and taker, each a struct pg_ring_end."""
        return int(ffi.cast("uintptr_t", self.putter)), int(ffi.cast("uintptr_t", self.taker))

    def is_large(self, length: int) -> bool:
        """True if a message of `length` bytes is larger than the ring."""
        return bool(length + lib.PG_RING_UNIT > self.taker.size)

    @property
    def next_bytes(self) -> int:
        """Length of the message that take() would take, at least in part; 0 = none."""
        return int(lib.pg_ring_next(self.taker))

    def take(self) -> bytearray | None:
        """Take the next message; None if there is none, or if pieces of it are missing."""
        length = self.next_bytes
        if not length:
            return None
        body = bytearray(length) if self._large is None else self._large
        whole = lib.pg_ring_take(self.taker, ffi.from_buffer(body))
        self._large = None if whole else body
        if how := lib.pg_ring_rouse_putter(self.taker):
            self._wake(how, self._taken)
        return body if whole else None

    def put(self, body: Any) -> bool:
        """Put a message. False = there is no space for it, or for all of it: call put() again with
        the same message before any other message."""
        before = self.putter.own
        whole = lib.pg_ring_put(self.putter, ffi.from_buffer(body), len(body))
        if self.putter.own != before and (how := lib.pg_ring_rouse_taker(self.putter)):
            self._wake(how, self._put)
        return bool(whole)

    def may_sleep(self, *, to_put: bool) -> bool:
        """Announce that this side sleeps until its descriptor is readable. `to_put`: also until
        there is space. False = there is a message, or space."""
        if not lib.pg_ring_sleep_taker(self.taker, _POLL):
            return False
        return not to_put or bool(lib.pg_ring_sleep_putter(self.putter, _POLL))

    def close(self) -> None:
        """Unmap the memory."""
        del self.taker, self.putter, self._taken, self._put
        ffi.release(self._base)
        self._memory.close()


def _end(pair: Any, name: str, ring: Any, ring_bytes: int) -> Any:
    end = ffi.new("struct pg_ring_end *")
    lib.pg_ring_open(end, ffi.addressof(pair, name), ring, ring_bytes)
    return end


def pair_bytes(ring_bytes: int) -> int:
    """Return the size of the memory of two rings of `ring_bytes` each."""
    return int(lib.PG_RING_HEAD) + 2 * ring_bytes


def create_memory(ring_bytes: int) -> int:
    """Make the memory of two rings, and return its descriptor. Raises OSError.

    The pages exist and the size is sealed, so no access to the memory can fail, whatever the client
    does with its descriptor.
    """
    fd = os.memfd_create("purgatoryd-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, pair_bytes(ring_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def send_offer(
    connection: socket.socket, refusal: RingRefusal, ring_bytes: int = 0, fds: Sequence[int] = ()
) -> None:
    """Pass the memory and the eventfd of new rings, or the arena, to the client, or let it know why
    it gets none. Raises OSError."""
    offer = OFFER.pack(lib.PG_RING_MAGIC, lib.PG_RING_VERSION, refusal, ring_bytes)
    socket.send_fds(connection, [offer], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
