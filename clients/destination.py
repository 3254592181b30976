"""The arena that takes calls, and how calls are packed for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

from purgatoryd.clients import times
from purgatoryd.clients.packing import Entry, Names, Packer, Pending
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.layout import ClockKind

AnyPending = TypeVar("AnyPending", bound=Pending)


class Destination:
    """An arena that takes calls. `host` has its clock, `names` the entries of its name table."""

    def __init__(self, host: Host, names: Names) -> None:
        self.host = host
        self.names = names
        self.delay_clock: int = ClockKind.BOOT
        """BOOT: this process computes the deadline from a delay. VIRTUAL: the daemon computes it,
        because its clock is virtual or it is on another host or in another time namespace."""
        self.packer = Packer(host)

    def due(
        self,
        delay: float | timedelta | None,
        delay_ns: int | None = None,
        deadline: datetime | None = None,
        deadline_boot_ns: int | None = None,
    ) -> tuple[int, int]:
        """Return times.due() for a call that is made at this moment."""
        now_ns = self.host.boot_ns()
        return times.due(self.delay_clock, now_ns, delay, delay_ns, deadline, deadline_boot_ns)

    def entry(
        self, pending: AnyPending, name: bytes, method: Callable[..., None], fields: tuple[Any, ...]
    ) -> Entry[AnyPending]:
        """Return the entry of a call that goes here."""
        return Entry(pending, name, method, fields)
