"""The subscriber process: takes every notice of one topic, up to a last timer of the run's own.

The notices of a topic come in order and without gaps, so once the last timer is here, everything
that fired before it is here. No counter of the daemon is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from examples.flights.processes import Link
from examples.flights.service import noted
from purgatoryd.clients import Notice, Subscriber

NAMESPACE = "flights"
TOPIC = "late"
LAST_KEY = "the last one"
SILENCE_S = 120.0
"""After so long without any notice the last one is not waited for any more."""


class NoMoreNotices(Exception):
    """The last timer's notice did not come."""


class Receipt(NamedTuple):
    """One notice as it was received; times in ns on the daemon's clock."""

    key: str
    deadline_boot_ns: int
    fired_boot_ns: int
    lateness_ns: int

    @property
    def firing_ns(self) -> int:
        """How long after the deadline the daemon fired it: a part of the lateness."""
        return self.fired_boot_ns - self.deadline_boot_ns

    @property
    def received_boot_ns(self) -> int:
        """When the subscriber process had it; under the virtual clock, when it fired."""
        return self.deadline_boot_ns + self.lateness_ns


def notices(link: Link, name: str) -> Iterator[Notice]:
    """All notices of daemon `name` from now on, without the last one.

    Tells the parent that it is ready once nothing can be missed. Raises NoMoreNotices.
    """
    with (
        noted(name) as ledger,
        Subscriber(name, namespace=NAMESPACE, topics=[TOPIC], ledger=ledger) as subscriber,
    ):
        link.ready()
        while (notice := subscriber.get(timeout=SILENCE_S)) is not None:
            if notice.key == LAST_KEY:
                return
            link.count(notices=1)
            yield notice
    raise NoMoreNotices(f"no notice for {SILENCE_S:.0f} s")


def collect(link: Link, name: str) -> list[Receipt]:
    """Target of the subscriber process: all receipts, in their order."""
    return [
        Receipt(str(n.key), n.deadline_boot_ns, n.fired_boot_ns, n.lateness_ns)
        for n in notices(link, name)
    ]
