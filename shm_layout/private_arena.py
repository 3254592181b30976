"""An arena in private memory, for one process without a daemon.

The core is the one that the daemon runs. Its caller gives the time. Not thread-safe.
"""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.errors import ArenaBroken, InvalidArgument

_BUDGET = 4096
"""Timers and operations that one call of the core fires or expires."""
_SEND_BYTES = 1 << 20
_REPLY_BYTES = 1 << 17
"""Payload memory for the replies that the core stores: PG_WINDOW replies, which take 16 KiB each if
they answer a CANCEL_FOR_KEY."""
_FIXED = {
    "replay_capacity": 16, "replay_bytes_max": 1 << 16, "namespaces": 2, "topics": 2, "sessions": 2,
    "tick_ns": 1_000_000, "fanout": 256, "stream_id": 1, "page_size": mmap.PAGESIZE,
    "layout_id": layout.LAYOUT_ID,
}  # fmt: skip
"""Settings of struct pg_config that do not depend on the limits: nobody receives notices."""


class Limits(NamedTuple):
    """The sizes of an arena."""

    capacity: int
    """Number of operations."""
    watches: int
    """Number of watch records: one for each watch key of each operation."""
    watch_keys: int
    """Number of watch keys that have a watermark."""
    payload_bytes: int
    """Bytes of keys, payloads and conditions."""
    watermark_ttl_ns: int
    """Time after which a watch key that nobody watches is forgotten."""


def _memory(size: int) -> Any:
    """Return zeroed private memory. The kernel provides a page when the page is first used."""
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise InvalidArgument(
            f"a purgatory of these limits needs {size:,} bytes; the kernel refuses them: {error}; "
            "lower the limits"
        ) from error
    return ffi.from_buffer(pages, require_writable=True)


class PrivateArena:
    """An arena in private memory, with one session."""

    def __init__(self, limits: Limits, now_ns: int, nonce: bytes) -> None:
        self.limits = limits
        try:
            config = ffi.new("struct pg_config *", {
                **_FIXED, "capacity": limits.capacity, "watches": limits.watches,
                "watermarks": limits.watch_keys,
                "payload_bytes": limits.payload_bytes + _REPLY_BYTES,
                "inbox_max": 2 * limits.capacity, "watermark_ttl_ns": limits.watermark_ttl_ns,
                "now_ns": now_ns,
            })  # fmt: skip
        except OverflowError:
            raise _out_of_bounds(limits) from None
        sizes = lib.pg_arena_bytes(config), lib.pg_private_bytes(config)
        if 0 in sizes:
            raise _out_of_bounds(limits)
        self.bytes = sum(sizes)
        """Size of the arena in bytes."""
        self._mapped: list[Any] = [_memory(size) for size in sizes]
        self._handle = ffi.new("uint8_t[]", lib.pg_handle_bytes())
        self._a: Any = ffi.cast("struct pg_arena *", self._handle)
        if not lib.pg_create(self._a, *self._mapped, config):
            raise _out_of_bounds(limits)
        self._reply = _memory(layout.MESSAGE_MAX)
        self._out = _memory(_SEND_BYTES)
        self._reply_bytes, self._wait_ns = ffi.new("uint64_t *"), ffi.new("int64_t *")
        self._owner, self._more = ffi.new("uint64_t *"), ffi.new("int *")
        self._swept = ffi.new("uint32_t *")
        hello = self.handle(wire.encode_hello(nonce), now_ns)
        self.session = wire.decode_welcome(hello).session
        """Id of the session whose messages the arena accepts."""

    def handle(self, message: bytes, now_ns: int) -> bytes:
        """Apply a message and return the body of the reply; empty without a reply. Raises
        MessageRefused. A batch that is sent again is not applied
        again: its reply is the same."""
        handled = lib.PG_H_AGAIN
        while handled == lib.PG_H_AGAIN:
            handled = lib.pg_handle(
                self._a, message, len(message), 0, 0, now_ns, now_ns, self._reply,
                self._reply_bytes, self._wait_ns,
            )  # fmt: skip
        if handled != lib.PG_H_REPLY:
            return b""
        reply = wire.decode_reply(bytes(ffi.buffer(self._reply, self._reply_bytes[0])))
        if reply.error:
            raise reply.refusal()
        return reply.body

    def advance(self, now_ns: int) -> None:
        """Expire the operations that are due."""
        self._more[0] = 1
        while self._more[0]:
            lib.pg_advance(self._a, now_ns, 0, now_ns, _BUDGET, self._more)

    def sweep(self, now_ns: int, rows: int) -> None:
        """Look at the next rows of the watch keys, and forget those whose time has passed."""
        lib.pg_sweep(self._a, now_ns, self._swept, rows)

    @property
    def next_ns(self) -> int:
        """Time at which advance() is needed next; 2^63 - 1 if nothing is armed."""
        return int(lib.pg_next_ns(self._a))

    def outcomes(self) -> bytes:
        """Return the next OUTCOMES message; empty if there are no new outcomes and CHECKs."""
        size = lib.pg_inbox(self._a, self._owner, self._out, _SEND_BYTES)
        return bytes(ffi.buffer(self._out, size))

    def repeat(self) -> None:
        """Let outcomes() return again what was not acknowledged."""
        lib.pg_inbox_to(self._a, self.session)

    def close(self) -> None:
        """Free the memory. No other call may follow."""
        self._a, self._mapped, self._reply, self._out = None, [], None, None

    def check(self) -> None:
        """Raise ArenaBroken with the first broken invariant."""
        fault = ffi.new("struct pg_fault *")
        if not lib.pg_check(self._a, fault):
            part, detail = (ffi.string(text).decode() for text in (fault.part, fault.detail))
            raise ArenaBroken(part, detail, fault.where, fault.expected, fault.found)


def _out_of_bounds(limits: Limits) -> InvalidArgument:
    return InvalidArgument(f"the core refuses an arena with {limits}; lower the limits")
