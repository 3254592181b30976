"""The timing wheel in private memory: deadlines in, due objects out. Not thread-safe."""

from __future__ import annotations

from typing import Generic, TypeVar

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.errors import ArenaBroken

T = TypeVar("T")
NEVER_NS = 2**63 - 1
_NIL = 0xFFFFFFFF
_FIRST_CAPACITY = 1024
_DUE_MAX = 4096


class Wheel(Generic[T]):
    """Timers of one process. Doubles its memory when it is full.

    `tick_ns`: resolution, 1000 to 10^8; `fanout`: buckets in a level, 2 to 256. A timer is
    due at or after its deadline, at most a tick later when advance() is called in time.
    """

    def __init__(self, now_ns: int, tick_ns: int = 1_000_000, fanout: int = 256) -> None:
        self._shape = (tick_ns, fanout)
        self._items: dict[int, tuple[T, int]] = {}
        self._due = ffi.new("uint32_t[]", _DUE_MAX)
        self._more = ffi.new("int *")
        self._make(_FIRST_CAPACITY, now_ns)

    def _make(self, capacity: int, now_ns: int) -> None:
        self._capacity = capacity
        self._now_ns = now_ns
        self._memory = ffi.new("uint8_t[]", lib.pg_local_bytes(capacity, *self._shape))
        self._wheel = lib.pg_local_create(self._memory, capacity, *self._shape, now_ns)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: T, deadline_ns: int) -> int:
        """Arms a timer; returns its slot, valid until it is cancelled or due. Deadlines are
        clamped to 0 and 2^63 - 1."""
        deadline_ns = min(max(deadline_ns, 0), NEVER_NS)
        slot = lib.pg_local_add(self._wheel, deadline_ns)
        if slot == _NIL:
            self._grow()
            slot = lib.pg_local_add(self._wheel, deadline_ns)
        self._items[slot] = (item, deadline_ns)
        return int(slot)

    def _grow(self) -> None:
        """Slots are given out from 0 on, so every timer gets its own one again."""
        before = sorted(self._items.items())
        self._make(2 * self._capacity, self._now_ns)
        for slot, (_, deadline_ns) in before:
            assert lib.pg_local_add(self._wheel, deadline_ns) == slot

    def cancel(self, slot: int) -> T:
        """Disarms the timer in `slot` and returns its item. Raises KeyError if it is gone."""
        item, _ = self._items.pop(slot)
        lib.pg_local_cancel(self._wheel, slot)
        return item

    def advance(self, now_ns: int) -> list[T]:
        """Takes out all that is due at `now_ns`, in the order of deadlines by tick."""
        self._now_ns = max(self._now_ns, now_ns)
        due: list[T] = []
        while True:
            count = lib.pg_local_advance(self._wheel, now_ns, self._due, _DUE_MAX, self._more)
            due.extend(self._items.pop(self._due[i])[0] for i in range(count))
            if not self._more[0]:
                return due

    @property
    def next_ns(self) -> int:
        """When advance() is needed next; NEVER_NS = nothing is armed."""
        return int(lib.pg_local_next_ns(self._wheel))

    def check(self) -> None:
        """Raises ArenaBroken with the first broken invariant."""
        fault = ffi.new("struct pg_fault *")
        if not lib.pg_local_check(self._wheel, fault):
            part, detail = (ffi.string(text).decode() for text in (fault.part, fault.detail))
            raise ArenaBroken(part, detail, fault.where, fault.expected, fault.found)
