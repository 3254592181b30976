"""One day live: a day of flights, and the pace at which it runs.

The day with most departures, 2 December 2013, has 1,001. Its first departure is at 04:52 in New
York; its last landing comes when it is 04:35 there the next morning (the evening's flights to
California and the red-eyes to Puerto Rico), so the run spans 23 h 43 min across two dates.

Compressed to 65 s, one real second is about 22 simulated minutes:

    simulated                                       real
    1 minute, the grain of every event              46 ms
    30 s, from a landing at +14 to its deadline     23 ms
    30 s, from the deadline to a landing at +15     23 ms
    50 min, the shortest scheduled block            2.3 s

The half minute is the whole margin. The cancel of a landing 14 minutes late must be sent, carried
and applied within 23 ms of its moment. A worker that sends it later loses the race by its own
fault; the time of sending proves that. Conversely, a landing 15 minutes late must not cancel the
timer: the daemon has 23 ms to fire it.

The run therefore follows these rules:

* Every moment is computed from the origin: real = start + (simulated - first) / speed. Sleeps do
  not add up, so nothing drifts.
* A delay counts from the call, a deadline from the schedule. The delay given to a timer is
  therefore the real time of its deadline minus the boot clock at the call, not the simulated delay
  divided by the speed: an add sent 5 ms late must not move its deadline by 5 ms.
* At most 8 moments share a minute, so a burst spread over four workers is 2-3 calls each.
* A flight's add and cancel belong to one worker (`share`), whose calls are in order.
* 13 flights depart after their own deadline; their timers are due at once.
* The run ends when the last moment and the last deadline have passed, whichever is later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

from examples.flights.events import Flight, Moment, in_order

MARGIN_SIM_NS = 30_000_000_000  # shortest time between a landing and the deadline


class Pace(NamedTuple):
    """Map from simulated instants to the real clock.

    `first_unix_ns` (simulated) happens at `start_boot_ns` (real, CLOCK_BOOTTIME), and `span_sim_ns`
    of simulated time take `span_real_ns`.
    """

    first_unix_ns: int
    start_boot_ns: int
    span_sim_ns: int
    span_real_ns: int

    def boot_ns(self, unix_ns: int) -> int:
        """Return the real time of a simulated instant, on CLOCK_BOOTTIME."""
        return self.start_boot_ns + self.real_ns(unix_ns - self.first_unix_ns)

    def real_ns(self, sim_ns: int) -> int:
        """Return the real length of a simulated duration, rounded down."""
        return sim_ns * self.span_real_ns // self.span_sim_ns

    @property
    def margin_ns(self) -> int:
        """Real length of the half minute between a landing and its deadline."""
        return self.real_ns(MARGIN_SIM_NS)


def busiest_date(flights: Iterable[Flight]) -> str:
    """Return the date with most departures; among equals, the earliest one."""
    departures = Counter(flight.date for flight in flights)
    return min(departures, key=lambda date: (-departures[date], date))


def flights_of(date: str, flights: Iterable[Flight]) -> list[Flight]:
    """Return the flights scheduled to depart on `date` in New York."""
    return [flight for flight in flights if flight.date == date]


def pace(flights: Iterable[Flight], start_boot_ns: int, span_real_ns: int) -> Pace:
    """Return the pace that fits `flights`, from first departure to last landing or deadline, into a
    span.

    Raises ValueError without flights.
    """
    fleet = list(flights)
    first = min(flight.departed_unix_ns for flight in fleet)
    last = max(max(flight.deadline_unix_ns, flight.landed_unix_ns or 0) for flight in fleet)
    return Pace(first, start_boot_ns, last - first, span_real_ns)


def share(flights: Iterable[Flight], worker: int, workers: int) -> list[Moment]:
    """Return the moments of one of `workers` workers, in time order; a flight stays with one
    worker."""
    return in_order(f for f in flights if crc32(f.key.encode()) % workers == worker)
