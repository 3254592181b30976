"""The year: every flight of 2013 through one daemon under the virtual clock, at full speed.

The events of one minute are sent together. First the clock advances to that minute, which fires the
timers that are due before the minute. Then the minute's departures and landings are applied.
Answers are read while later minutes are sent.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from rich.console import Console

from examples.flights.collector import LAST_KEY, NAMESPACE, TOPIC, Receipt, collect
from examples.flights.display import Display
from examples.flights.events import NS_PER_S, Flight, Kind, Moment, in_order
from examples.flights.processes import Crew
from examples.flights.service import noted, running, wal_flags
from purgatoryd.clients import Admin, CancelResult, Client, Handle

NAME = "year"
PATIENCE_S = 60.0
QUEUE_LIMIT = 4096  # maximum number of queued calls; an interrupted client still sends all of them


@dataclass
class Year:
    """Result of the run, which passed if `problems` is empty."""

    flights: list[Flight]
    expected: set[str]
    origin_unix_ns: int
    minutes: int
    cancels: dict[str, CancelResult]
    receipts: list[Receipt]
    span_sim_ns: int
    elapsed_s: float
    problems: list[str] = field(default_factory=list)

    @property
    def received(self) -> set[str]:
        """The keys whose notices the subscriber process received."""
        return {receipt.key for receipt in self.receipts}

    @property
    def found(self) -> Counter[CancelResult]:
        """Number of landings for each result of their cancels."""
        return Counter(self.cancels.values())

    @property
    def calls(self) -> int:
        """Number of acknowledged adds and cancels."""
        return len(self.flights) + len(self.cancels)

    @property
    def due_ns(self) -> dict[str, int]:
        """Virtual time at which each timer is due: its deadline, or its departure if that is
        later."""
        origin_ns = self.origin_unix_ns
        return {
            flight.key: max(flight.deadline_unix_ns, flight.departed_unix_ns) - origin_ns
            for flight in self.flights
        }

    @property
    def latest_ns(self) -> int:
        """Longest virtual time between the due time of a timer and its firing, in ns."""
        due_ns = self.due_ns
        return max((r.fired_boot_ns - due_ns[r.key] for r in self.receipts), default=0)


def run(directory: Path, console: Console, flights: list[Flight], expected: set[str]) -> Year:
    """Run `flights`. `expected` has the keys that the oracle lists. Raises DaemonFailed,
    ChildFailed."""
    moments = in_order(flights)
    origin_ns = moments[0].at_unix_ns
    origin = datetime.fromtimestamp(origin_ns // NS_PER_S, UTC).isoformat()
    settings = ("--clock", "virtual", "--wall-origin", origin, *wal_flags())
    with running(directory, NAME, settings), Crew(1) as crew:
        subscriber = crew.start("subscriber", collect, NAME)
        crew.wait_ready()
        crew.tell(None)
        began_s = time.monotonic()
        with Display(console, "the year", len(moments)) as display:
            sender = _Sender(display, crew, origin_ns)
            sender.send(moments)
            crew.watch([subscriber], lambda: None)
        elapsed_s = time.monotonic() - began_s
    span_ns = moments[-1].at_unix_ns - origin_ns
    year = Year(
        flights, expected, origin_ns, sender.minutes, sender.cancels, subscriber.result,
        span_ns, elapsed_s,
    )  # fmt: skip
    judge(year)
    return year


class _Sender:
    """The only client of the year, and the results of its cancels."""

    def __init__(self, display: Display, crew: Crew, origin_unix_ns: int) -> None:
        self._display = display
        self._crew = crew
        self._origin_ns = origin_unix_ns
        self._open: deque[tuple[str, Handle[CancelResult]]] = deque()
        self.cancels: dict[str, CancelResult] = {}
        self.minutes = 0
        self._done = 0

    def send(self, moments: list[Moment]) -> None:
        """Send all moments, then the last timer. Raises BatchError, DaemonError."""
        with (
            noted(NAME) as ledger,
            Client(
                NAME, namespace=NAMESPACE, timeout=PATIENCE_S, queue_limit=QUEUE_LIMIT,
                ledger=ledger,
            ) as client,
        ):  # fmt: skip
            for at_ns, minute in groupby(moments, attrgetter("at_unix_ns")):
                client.at(at_ns - self._origin_ns)
                self._send_minute(client, minute)
                self._show(at_ns)
            client.at(None)
            end_ns = _end_unix_ns(moments) - self._origin_ns
            client.add(LAST_KEY, deadline_boot_ns=end_ns, topic=TOPIC)
            client.flush()
            self._take_answers()
        with Admin(NAME, timeout=PATIENCE_S) as admin:
            admin.advance(end_ns + NS_PER_S)

    def _send_minute(self, client: Client, minute: Iterable[Moment]) -> None:
        for _, kind, flight in minute:
            if kind is Kind.DEPARTURE:
                client.add(flight.key, delay_ns=flight.delay_ns, topic=TOPIC, wait=False)
            else:
                self._open.append((flight.key, client.cancel(flight.key, wait=False)))
            self._done += 1
        self.minutes += 1

    def _take_answers(self) -> None:
        """Process the answers that have arrived, which come in the order of the calls."""
        answers = self._open
        while answers and answers[0][1].done:
            key, handle = answers.popleft()
            self.cancels[key] = handle.result()

    def _show(self, at_ns: int) -> None:
        if self.minutes % 2000:
            return
        self._take_answers()
        date = datetime.fromtimestamp(at_ns // NS_PER_S, UTC)
        late = self._crew.counts().notices
        self._display.show(self._done, f"{date:%d %B}, {self._done:,} calls, {late:,} late")


def _end_unix_ns(moments: list[Moment]) -> int:
    """Return a moment after the last departure, landing and deadline."""
    last_deadline_ns = max(moment.flight.deadline_unix_ns for moment in moments)
    return max(last_deadline_ns, moments[-1].at_unix_ns) + NS_PER_S


def judge(year: Year) -> None:
    """Fill in `year.problems`: the result must match the oracle exactly."""
    received, expected = year.received, year.expected
    retained = {flight.key for flight in year.flights} - {
        key for key, found in year.cancels.items() if found is CancelResult.CANCELLED
    }
    due_ns = year.due_ns
    early = {r.key for r in year.receipts if r.fired_boot_ns < due_ns[r.key]}
    moved = {r.key for r in year.receipts if r.deadline_boot_ns != due_ns[r.key]}
    for subject, keys in (
        ("must expire and did not", expected - received),
        ("expired and must not", received - expected),
        ("were not cancelled and no notice came", retained - received),
        ("were cancelled and a notice came", received - retained),
        ("fired before they were due", early),
        ("have another deadline than their schedule gives", moved),
    ):
        if keys:
            year.problems.append(f"{len(keys)} {subject}, such as {min(keys)}")
    if len(received) != len(year.receipts):
        year.problems.append(f"{len(year.receipts) - len(received)} notices came twice")
    if year.found[CancelResult.UNKNOWN]:
        year.problems.append(f"{year.found[CancelResult.UNKNOWN]} landings found no timer")
