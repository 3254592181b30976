"""The subscriber process: receives every notice of one topic until the notice of the run's last
timer.

The run adds this timer after all others. The notices of a topic arrive in order and without gaps,
so when the notice of the last timer has arrived, all earlier notices have arrived. The daemon's
counters are not needed.
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
"""Time without any notice, in seconds, after which the process stops waiting for the notice of the
last timer."""


class NoMoreNotices(Exception):
    """The notice of the last timer did not arrive."""


class Receipt(NamedTuple):
    """One notice as it was received; times in ns on the daemon's clock."""

    key: str
    deadline_boot_ns: int
    fired_boot_ns: int
    lateness_ns: int

    @property
    def firing_ns(self) -> int:
        """Time from the deadline until the daemon fired the timer, in ns. It is a part of the
        lateness."""
        return self.fired_boot_ns - self.deadline_boot_ns

    @property
    def received_boot_ns(self) -> int:
        """Time at which the subscriber process received the notice. With a virtual clock, it is the
        time at which the timer fired."""
        return self.deadline_boot_ns + self.lateness_ns


def notices(link: Link, name: str) -> Iterator[Notice]:
    """Yield all new notices of daemon `name`, up to the notice of the last timer, which is
    not yielded itself.

    Reports to the parent that it is ready as soon as it cannot miss a notice. Raises NoMoreNotices.
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
