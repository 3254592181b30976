"""A day live: four worker processes send the flights of one day at their moments.

A worker adds a timer at each departure and cancels it at the landing, one call at a time. It
records when it sent the call and when the answer arrived. So every cancel was applied between two
known times of the boot clock. The run compares these times with the notices that the subscriber
received, and with the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

from rich.console import Console

from examples.flights.clock import boot_ns, sleep_until
from examples.flights.collector import LAST_KEY, NAMESPACE, TOPIC, Receipt, collect
from examples.flights.day import Pace, pace, share
from examples.flights.display import Display
from examples.flights.events import NS_PER_S, Flight, Kind, Moment
from examples.flights.figures import Lateness, Rate
from examples.flights.processes import Child, Crew, Link
from examples.flights.service import noted, running, wal_flags
from purgatoryd.clients import CancelResult, Client

NAME = "live"
WORKERS = 4
TICK_NS = 65_536
"""The daemon's tick in ns. A timer may fire up to a tick after its deadline, and may be cancelled
until it fires."""
HEAD_START_NS = NS_PER_S // 2
LATE_WORKERS_ALLOWED = 10
"""Maximum number of landings that workers may send too late. On a busy machine a worker may wake up
late; it is correct that its timers then fire."""

_NEW_YORK = ZoneInfo("America/New_York")


class Call(NamedTuple):
    """One add or cancel of a worker; `found` is None for an add."""

    kind: Kind
    key: str
    sent_boot_ns: int
    acked_boot_ns: int
    found: CancelResult | None


@dataclass
class Day:
    """Result of a live day, which passed if `problems` is empty."""

    date: str
    flights: list[Flight]
    pace: Pace
    calls: list[Call]
    receipts: list[Receipt]
    expected: set[str]
    late_workers: list[str] = field(default_factory=list)
    """Flights that expired because their worker sent the landing too late, although the oracle does
    not list them."""
    problems: list[str] = field(default_factory=list)

    def calls_of(self, kind: Kind) -> list[Call]:
        """Return all adds (DEPARTURE) or all cancels (LANDING)."""
        return [call for call in self.calls if call.kind is kind]

    @property
    def overdue(self) -> set[str]:
        """Keys of the fired timers whose deadline had already passed when they were armed. The
        daemon can only fire them late."""
        due = {r.key: r.deadline_boot_ns for r in self.receipts}
        adds = self.calls_of(Kind.DEPARTURE)
        return {add.key for add in adds if due.get(add.key, add.sent_boot_ns) < add.sent_boot_ns}

    @property
    def lateness(self) -> dict[str, Lateness]:
        """Percentiles of the times from the deadline until the notice was received and until the
        timer fired, for timers that were armed before they were due."""
        overdue = self.overdue
        armed = [receipt for receipt in self.receipts if receipt.key not in overdue]
        return {
            "received": Lateness.of(receipt.lateness_ns for receipt in armed),
            "fired": Lateness.of(receipt.firing_ns for receipt in armed),
        }

    @property
    def rates(self) -> dict[str, Rate]:
        """Rates of adds and cancels at the times of their acknowledgement, and of expiries at the
        times of their receipt."""
        return {
            "adds": Rate.of(call.acked_boot_ns for call in self.calls_of(Kind.DEPARTURE)),
            "cancels": Rate.of(call.acked_boot_ns for call in self.calls_of(Kind.LANDING)),
            "expiries": Rate.of(receipt.received_boot_ns for receipt in self.receipts),
        }


def run(
    directory: Path, console: Console, date: str, flights: list[Flight], expected: set[str],
    seconds: float,
) -> Day:  # fmt: skip
    """Run `flights`, the flights of `date`, in `seconds`. `expected` has the keys that the oracle
    lists.

    Raises DaemonFailed, ChildFailed.
    """
    with running(directory, NAME, wal_flags()), Crew(WORKERS + 1) as crew:
        subscriber = crew.start("subscriber", collect, NAME)
        workers = [
            crew.start(f"worker {n}", fly, NAME, share(flights, n, WORKERS)) for n in range(WORKERS)
        ]
        crew.wait_ready()
        tempo = pace(flights, boot_ns() + HEAD_START_NS, round(seconds * NS_PER_S))
        crew.tell(tempo)
        _watch(console, date, crew, workers, subscriber, tempo)
        calls = sorted((c for w in workers for c in w.result), key=lambda c: c.acked_boot_ns)
        day = Day(date, flights, tempo, calls, subscriber.result, expected)
    judge(day)
    return day


def fly(link: Link, name: str, moments: list[Moment]) -> list[Call]:
    """Send each moment at its time; the target of a worker process."""
    with noted(name) as ledger, Client(name, namespace=NAMESPACE, ledger=ledger) as client:
        tempo: Pace = link.ready()
        return [_send(client, link, tempo, moment) for moment in moments]


def _send(client: Client, link: Link, tempo: Pace, moment: Moment) -> Call:
    sleep_until(tempo.boot_ns(moment.at_unix_ns))
    flight, found, sent_ns = moment.flight, None, boot_ns()
    if moment.kind is Kind.DEPARTURE:
        deadline_ns = tempo.boot_ns(flight.deadline_unix_ns)
        client.add(flight.key, deadline_boot_ns=deadline_ns, topic=TOPIC)
        link.count(adds=1)
    else:
        found = client.cancel(flight.key)
        link.count(cancels=1)
    return Call(moment.kind, flight.key, sent_ns, boot_ns(), found)


def _watch(
    console: Console, date: str, crew: Crew, workers: list[Child[list[Call]]],
    subscriber: Child[list[Receipt]], tempo: Pace,
) -> None:  # fmt: skip
    """Show the progress of the day until the workers are done, then add the last timer and wait for
    the subscriber."""
    with Display(console, f"{date} live", tempo.span_real_ns) as display:

        def refresh() -> None:
            gone_ns = max(0, boot_ns() - tempo.start_boot_ns)
            sim_ns = tempo.first_unix_ns + gone_ns * tempo.span_sim_ns // tempo.span_real_ns
            clock = datetime.fromtimestamp(sim_ns // NS_PER_S, _NEW_YORK)
            adds, cancels, late = crew.counts()
            now = f"{clock:%H:%M} in New York, {adds} departed, {cancels} landed, {late} late"
            display.show(gone_ns, now)

        crew.watch(list(workers), refresh)
        with noted(NAME) as ledger, Client(NAME, namespace=NAMESPACE, ledger=ledger) as client:
            end_ns = tempo.start_boot_ns + tempo.span_real_ns + HEAD_START_NS
            client.add(LAST_KEY, deadline_boot_ns=end_ns, topic=TOPIC)
        crew.watch([subscriber], refresh)


# ---- checks of the result ------------------------------------------------------------------------


def judge(day: Day) -> None:
    """Compare the notices with answers, deadlines and the oracle; fill in `day.late_workers` and
    `day.problems`."""
    day.problems += [*against_answers(day), *against_deadlines(day), *_against_oracle(day)]
    if len(day.late_workers) > LATE_WORKERS_ALLOWED:
        day.problems.append(
            f"{len(day.late_workers)} landings were sent too late by their workers, "
            f"more than {LATE_WORKERS_ALLOWED}"
        )


def against_answers(day: Day) -> Iterator[str]:
    """Yield each difference between the notices and the timers that were added and not cancelled,
    and each early notice."""
    received = {receipt.key for receipt in day.receipts}
    if len(received) != len(day.receipts):
        yield f"{len(day.receipts) - len(received)} notices came twice"
    added = {add.key for add in day.calls_of(Kind.DEPARTURE)}
    found = {cancel.key: cancel.found for cancel in day.calls_of(Kind.LANDING)}
    armed = {key for key in added if found.get(key) is not CancelResult.CANCELLED}
    for key in sorted(armed - received):
        yield f"{key} was not cancelled and no notice came"
    for key in sorted(received - armed):
        yield f"{key} was cancelled and a notice came"
    for key in sorted(key for key in found if found[key] is CancelResult.UNKNOWN):
        yield f"{key} was unknown when it landed"
    for receipt in day.receipts:
        if receipt.firing_ns < 0:
            yield f"{receipt.key} fired before its deadline"


def against_deadlines(day: Day) -> Iterator[str]:
    """Yield each cancel whose answer contradicts the deadline.

    A cancel that is applied before the deadline finds the timer; a cancel that is applied later
    does not. Each cancel was applied at some time between its sending and its acknowledgement.
    """
    for flight, cancel in _landings(day):
        deadline_ns = day.pace.boot_ns(flight.deadline_unix_ns)
        if cancel.found is CancelResult.CANCELLED and cancel.sent_boot_ns > deadline_ns + TICK_NS:
            late_us = (cancel.sent_boot_ns - deadline_ns) // 1000
            yield f"{cancel.key} was cancelled by a landing sent {late_us} us after its deadline"
        if cancel.found is CancelResult.FIRED and cancel.acked_boot_ns < deadline_ns:
            yield f"{cancel.key} was answered FIRED before its deadline"


def _against_oracle(day: Day) -> Iterator[str]:
    """Yield each difference from the oracle, unless a landing that was sent too late explains it.
    Put the flights of such landings into `day.late_workers`."""
    sent_late = {
        flight.key
        for flight, cancel in _landings(day)
        if cancel.sent_boot_ns > day.pace.boot_ns(flight.landed_unix_ns or 0) + day.pace.margin_ns
    }
    for key in sorted(day.expected ^ {receipt.key for receipt in day.receipts}):
        if key in sent_late and key not in day.expected:
            day.late_workers.append(key)
        else:
            yield f"{key} {'did not expire' if key in day.expected else 'expired'}: not the oracle"


def _landings(day: Day) -> Iterator[tuple[Flight, Call]]:
    flights = {flight.key: flight for flight in day.flights}
    return ((flights[cancel.key], cancel) for cancel in day.calls_of(Kind.LANDING))
