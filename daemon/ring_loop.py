"""Sleep, and meanwhile fire timers and serve clients (front/ring_loop.c)."""

from __future__ import annotations

from typing import Any

from purgatoryd.daemon import commands
from purgatoryd.daemon.commands import Commands
from purgatoryd.daemon.grace import LATE_NS, Grace
from purgatoryd.daemon.listeners.ring_server import RingServer
from purgatoryd.daemon.waiting import Waiter
from purgatoryd.shm_layout._core import ffi
from purgatoryd.shm_layout.arena import Arena


class RingLoop:
    """The iterations that only fire timers and serve clients, without Python."""

    def __init__(
        self, arena: Arena, server: RingServer, messages: Commands, grace: Grace, budget: int
    ) -> None:
        """`budget`: as in Arena.advance."""
        self._arena = arena
        self._messages = messages
        self._grace = grace
        fields: dict[str, Any] = {
            "server": server.struct, "shares": messages.shares.struct, "late_ns": LATE_NS,
            "budget": budget, "most": commands.PER_ITERATION,
        }  # fmt: skip
        self.struct = ffi.new("struct pg_loop *", fields)

    def wait(self, waiter: Waiter, until_ns: int, spin_ns: int, *, fires: bool) -> frozenset[int]:
        """Do what `waiter.wait` does, and meanwhile serve clients and, if `fires`, fire timers.
        `spin_ns`: the loop wants to be awake this long before timers are due."""
        struct = self.struct
        struct.spin_ns, struct.fires = spin_ns, fires
        ready = waiter.wait_and_serve(self._arena, struct, until_ns)
        self._grace.sleep(struct.planned_boot_ns)
        if struct.iterations:
            self._grace.iterated(struct.begun_boot_ns)
            self._messages.take_left()
        return ready
