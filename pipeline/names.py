"""What a daemon's rows are called, and who its sessions are, learnt along its WAL.

Records name topics and namespaces by rows, and workers by sessions. A row is born once, and
its name never changes, nor in an arena that takes the place of this one; so names that were learnt
from any part of the WAL hold for all of it, and to learn them twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

SESSIONS_KEPT = 1 << 17
"""Sessions, the newest ones, whose workers are written down: twice what a daemon can have. In
memory there are up to twice as many."""


@dataclass(slots=True)
class Names:
    """`topics`: the row of the namespace, and the name. `workers`: by session. `learnt`: births
    that were taken, repeats among them."""

    namespaces: dict[int, str] = field(default_factory=dict)
    topics: dict[int, tuple[int, str]] = field(default_factory=dict)
    workers: dict[int, str] = field(default_factory=dict)
    learnt: int = 0

    def add(self, other: Names) -> None:
        """Those of another one, which is of the same WAL."""
        self.namespaces |= other.namespaces
        self.topics |= other.topics
        self.workers |= other.workers

    def opened(self, session: int, worker: str) -> None:
        """A session has begun; the oldest ones are forgotten."""
        self.workers[session] = worker
        if len(self.workers) > 2 * SESSIONS_KEPT:
            self.workers = dict(self._newest_workers())

    def to_json(self) -> dict[str, Any]:
        """As JSON has it; of the workers the newest ones alone."""
        return {
            "namespaces": list(self.namespaces.items()),
            "topics": [(row, *of) for row, of in self.topics.items()],
            "workers": list(self._newest_workers()),
        }

    def _newest_workers(self) -> Iterator[tuple[int, str]]:
        return islice(self.workers.items(), max(0, len(self.workers) - SESSIONS_KEPT), None)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Names:
        """The other way round."""
        return cls(
            dict(found["namespaces"]),
            {row: (namespace, name) for row, namespace, name in found["topics"]},
            dict(found["workers"]),
        )
