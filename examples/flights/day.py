"""One day of flights, and the pace at which the live run replays it.

The day with most departures, 2 December 2013, has 1,001 of them. Its first departure is at 04:52 in
New York; its last landing is at 04:35 New York time the next morning (evening flights to California
and red-eyes to Puerto Rico). So the run spans 23 h 43 min and two dates.

Compressed to 65 s, one real second is about 22 simulated minutes:

    simulated                                       real
    1 minute, the resolution of all times           46 ms
    30 s, from a landing at +14 to its deadline     23 ms
    30 s, from the deadline to a landing at +15     23 ms
    50 min, the shortest scheduled block            2.3 s

The margin is only half a minute. If a landing is 14 minutes late, its cancel must be sent,
transmitted and applied within 23 ms. If the worker sends the cancel too late, the timer fires by
the worker's fault; the recorded time of sending proves this. Conversely, a landing that is 15
minutes late must not cancel the timer: the daemon has 23 ms to fire it.

The run therefore follows these rules:

* Every moment is computed from the start: real = start + (simulated - first) / speed. So errors of
  sleeps do not add up.
* A timer gets its deadline as a real time, computed from the schedule. A delay would begin at the
  call, so that an add sent 5 ms late would move the deadline by 5 ms.
* At most 8 moments share a minute, so each of the four workers has about 2-3 calls in a burst.
* One worker sends both the add and the cancel of a flight (`share`), and its calls stay in order.
* 13 flights depart after their own deadline, so their timers are due at once.
* The run ends when the last moment and the last deadline have passed, whichever is later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

from examples.flights.events import Flight, Moment, in_order

MARGIN_SIM_NS = 30_000_000_000  # shortest simulated time between a landing and its deadline


class Pace(NamedTuple):
    """Map from simulated instants to the real clock.

    The simulated time `first_unix_ns` is the real time `start_boot_ns` (CLOCK_BOOTTIME). The
    simulated duration `span_sim_ns` lasts `span_real_ns` in real time.
    """

    first_unix_ns: int
    start_boot_ns: int
    span_sim_ns: int
    span_real_ns: int

    def boot_ns(self, unix_ns: int) -> int:
        """Convert a simulated instant to real time (CLOCK_BOOTTIME)."""
        return self.start_boot_ns + self.real_ns(unix_ns - self.first_unix_ns)

    def real_ns(self, sim_ns: int) -> int:
        """Convert a simulated duration to real time, rounded down."""
        return sim_ns * self.span_real_ns // self.span_sim_ns

    @property
    def margin_ns(self) -> int:
        """Real duration of the half minute between a landing and the deadline."""
        return self.real_ns(MARGIN_SIM_NS)


def busiest_date(flights: Iterable[Flight]) -> str:
    """Return the date with the most departures; of several such dates, the earliest."""
    departures = Counter(flight.date for flight in flights)
    return min(departures, key=lambda date: (-departures[date], date))


def flights_of(date: str, flights: Iterable[Flight]) -> list[Flight]:
    """Return the flights scheduled to depart on `date` in New York."""
    return [flight for flight in flights if flight.date == date]


def pace(flights: Iterable[Flight], start_boot_ns: int, span_real_ns: int) -> Pace:
    """Return the pace with which `flights`, from the first departure to the last landing or
    deadline, last `span_real_ns`.

    Raises ValueError without flights.
    """
    fleet = list(flights)
    first = min(flight.departed_unix_ns for flight in fleet)
    last = max(max(flight.deadline_unix_ns, flight.landed_unix_ns or 0) for flight in fleet)
    return Pace(first, start_boot_ns, last - first, span_real_ns)


def share(flights: Iterable[Flight], worker: int, workers: int) -> list[Moment]:
    """Return the moments that worker number `worker` of `workers` sends, in time order. Each flight
    belongs to one worker."""
    return in_order(f for f in flights if crc32(f.key.encode()) % workers == worker)
