"""A timing wheel in private memory. It returns objects when their deadlines have passed.

The wheel is not thread-safe. An exception of a signal handler may come between any two lines. The
wheel may then contain a timer that cannot be cancelled, but it loses no timer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.errors import ArenaBroken

T = TypeVar("T")
NEVER_NS = 2**63 - 1
_NIL = 0xFFFFFFFF
_FIRST_CAPACITY = 1024
_DUE_MAX = 4096


class Wheel(Generic[T]):
    """Timers of one process. The wheel doubles its memory when it is full.

    `tick_ns`: resolution, 1000 to 10^8; `fanout`: number of buckets in a level, 2 to 256. A timer
    is due at or after its deadline, at most one tick later if advance() is called in time.
    """

    def __init__(self, now_ns: int, tick_ns: int = 1_000_000, fanout: int = 256) -> None:
        self._shape = (tick_ns, fanout)
        self._items: dict[int, tuple[T, int]] = {}
        self._taken: deque[T] = deque()
        """Items that are due."""
        self._due = ffi.new("uint32_t[]", _DUE_MAX)
        """Buffer for the slots of timers that became due. _NIL terminates the list."""
        ffi.memmove(self._due, b"\xff" * ffi.sizeof(self._due), ffi.sizeof(self._due))
        self._more = ffi.new("int *")
        self._capacity, self._now_ns = _FIRST_CAPACITY, now_ns
        self._memory, self._wheel = self._made(_FIRST_CAPACITY)

    def _made(self, capacity: int) -> tuple[Any, Any]:
        """Return (memory, wheel): new memory, and a new wheel in this memory."""
        memory = ffi.new("uint8_t[]", lib.pg_local_bytes(capacity, *self._shape))
        return memory, lib.pg_local_create(memory, capacity, *self._shape, self._now_ns)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: T, deadline_ns: int) -> int:
        """Arm a timer and return its slot, which is valid until the timer is cancelled or due.

        Deadlines are clamped to the range from 0 to 2^63 - 1.
        """
        self._collect()
        deadline_ns = min(max(deadline_ns, 0), NEVER_NS)
        slot = lib.pg_local_add(self._wheel, deadline_ns)
        if slot == _NIL:
            self._grow()
            slot = lib.pg_local_add(self._wheel, deadline_ns)
        self._items[slot] = (item, deadline_ns)
        return int(slot)

    def _grow(self) -> None:
        """Move all timers to a larger wheel. A new wheel assigns the slots 0, 1, 2, ... in order,
        so every timer keeps its slot."""
        capacity = 2 * self._capacity
        memory, wheel = self._made(capacity)
        for slot in range(self._capacity):
            _, deadline_ns = self._items.get(slot, (None, NEVER_NS))
            assert lib.pg_local_add(wheel, deadline_ns) == slot
        for slot in self._items.keys() ^ range(self._capacity):
            lib.pg_local_cancel(wheel, slot)
        self._capacity, self._memory, self._wheel = capacity, memory, wheel

    def cancel(self, slot: int, item: T) -> None:
        """Disarm the timer of `item` in `slot`, unless it is due or already cancelled."""
        self._collect()
        if self._items.get(slot, (None, 0))[0] is item:
            del self._items[slot]
            lib.pg_local_cancel(self._wheel, slot)

    def advance(self, now_ns: int, take: Callable[[T], object]) -> None:
        """Remove all timers that are due at `now_ns`, in the order of the ticks of their deadlines.

        `take` is called with each item; after an exception, `take` may be called twice with the
        same item.
        """
        self._now_ns = max(self._now_ns, now_ns)
        while True:
            self._collect()
            while self._taken:
                take(self._taken[0])
                self._taken.popleft()
            lib.pg_local_advance(self._wheel, now_ns, self._due, _DUE_MAX, self._more)
            if self._due[0] == _NIL and not self._more[0]:
                return

    def _collect(self) -> None:
        """Take the items of due slots. The slots can be reused after that."""
        count = 0
        while count < _DUE_MAX and self._due[count] != _NIL:
            slot = self._due[count]
            if slot in self._items:
                self._taken.append(self._items[slot][0])
                del self._items[slot]
            count += 1
        while count:  # clears the first slot last, as it shows that slots are left
            count -= 1
            self._due[count] = _NIL

    @property
    def next_ns(self) -> int:
        """Time at which advance() is needed next; NEVER_NS if nothing is armed."""
        return int(lib.pg_local_next_ns(self._wheel))

    def check(self) -> None:
        """Raise ArenaBroken with the first broken invariant."""
        fault = ffi.new("struct pg_fault *")
        if not lib.pg_local_check(self._wheel, fault):
            part, detail = (ffi.string(text).decode() for text in (fault.part, fault.detail))
            raise ArenaBroken(part, detail, fault.where, fault.expected, fault.found)
