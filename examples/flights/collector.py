"""The subscriber process: receives every notice of one topic, up to a last timer of the run itself.

The notices of a topic come in order and without gaps, so once the last timer has arrived,
everything that fired before it has arrived. The daemon's counters are not needed.
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
"""Time without any notice after which the process stops waiting for the last one."""


class NoMoreNotices(Exception):
    """The last timer's notice did not arrive."""


class Receipt(NamedTuple):
    """One notice as it was received; times in ns on the daemon's clock."""

    key: str
    deadline_boot_ns: int
    fired_boot_ns: int
    lateness_ns: int

    @property
    def firing_ns(self) -> int:
        """Time from the deadline until the daemon fired the timer: a part of the lateness."""
        return self.fired_boot_ns - self.deadline_boot_ns

    @property
    def received_boot_ns(self) -> int:
        """Time at which the subscriber process received it; under the virtual clock, at which it
        fired."""
        return self.deadline_boot_ns + self.lateness_ns


def notices(link: Link, name: str) -> Iterator[Notice]:
    """Yield all notices of daemon `name` from now on, without the last one.

    Reports to the parent that it is ready once it cannot miss any. Raises NoMoreNotices.
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
    """Receive all notices and return them in order; the target of the subscriber process."""
    return [
        Receipt(str(n.key), n.deadline_boot_ns, n.fired_boot_ns, n.lateness_ns)
        for n in notices(link, name)
    ]
