"""Small values for limits of the product, so that little work and few messages reach the limits.

Each group of limits is a fault of its own. The product then does its work in more parts or refuses
work, but it must keep the same promises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

from purgatoryd.clients import core, packing, session
from purgatoryd.daemon import client_watch, commands, pending_acks, reaper, wal
from purgatoryd.daemon.listeners import time_shares

SMALL: dict[str, tuple[tuple[ModuleType, str, int], ...]] = {
    "iteration": (
        (client_watch, "EVENTS_PER_ITERATION", 1), (client_watch, "ENDS_PER_ITERATION", 1),
        (commands, "PER_ITERATION", 1), (reaper, "ADMIN_PER_ITERATION", 1),
        (reaper, "MOMENTS_PER_ITERATION", 1), (reaper, "SWEEP_PER_ITERATION", 1),
    ),
    "window": (
        (commands, "PUSHES_PER_ITERATION", 1), (reaper, "STEPS_PER_ITERATION", 1),
        (reaper, "WINDOWS_PER_ITERATION", 1),
    ),
    "share": ((time_shares, "SHARE_NS", 150), (commands, "TAKEN_PER_ITERATION", 2)),
    "memory": (
        (commands, "BEHIND_MAX", 1), (commands, "NOTIFIED_BYTES_MAX", 200),
        (commands, "WAITING_BYTES_MAX", 7_000), (pending_acks, "PENDING_BYTES_MAX", 300),
    ),
    "first snapshot": ((wal, "SNAPSHOT_BEFORE_READY", 500),),
    "client": (
        (packing, "TOPICS_CACHED", 1), (core, "UNCOLLECTED_MAX", 1), (packing, "BATCH_BYTES", 100),
        (session, "WAITING_MAX", 2),
    ),
}  # fmt: skip
"""For each group: (module that contains the limit, name of the limit, its small value)."""


@contextmanager
def limited(groups: Iterable[str]) -> Iterator[None]:
    """Make the limits of these groups small inside of the block."""
    limits = [limit for group in groups for limit in SMALL[group]]
    before = [getattr(module, name) for module, name, _ in limits]
    for module, name, small in limits:
        setattr(module, name, small)
    try:
        yield
    finally:
        for (module, name, _), value in zip(limits, before, strict=True):
            setattr(module, name, value)
