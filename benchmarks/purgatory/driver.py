"""One run of the benchmark: submit requests as scheduled, collect the outcomes, compare each
outcome with the predicted outcome."""

from __future__ import annotations

import gc
import time

import numpy as np

from purgatoryd.shm_layout._core import lib

from .cores import Core, Ours, Refused, make
from .experiment import MS, TIMEOUT_NS, Experiment, Longs, Result, Schedule
from .messages import BATCH, Bytes, Messages, outcomes_in

ITERATION_NS = MS
LEAD_NS = 3_000 * MS
"""Time between the creation of the design and the first arrival of a request."""

BEHIND_NS = 1_000 * MS
"""If a run falls this far behind its schedule, it is stopped."""

WINDOWS_NS = {"daemon": (50 * MS, 50 * MS)}
"""Spans (before, after) a deadline. If an advance is sent within them, either outcome is right.

In one process, an advance before the deadline always satisfies the request. After the deadline, the
outcome depends on whether the design handles the advance or the deadline first.
"""

WINDOW_NS = (0, 2 * MS)

ADVANCED = np.uint8(0x80)
ENDED = np.uint8(0x7F)
"""Bits of a request's state: ADVANCED is set if its advance was due; the bits ENDED contain the
cause of its end."""

NEVER_NS = np.iinfo(np.int64).max
SILENCE_NS = 5_000 * MS
"""Time after the last expected end of a request. Outcomes that are still missing then count as
lost."""


class RealClock:
    """The clock that deadlines refer to (CLOCK_BOOTTIME). Iterations begin at fixed intervals.
    Several workers begin their iterations at different times, as independent processes would."""

    def __init__(self, every_ns: int = ITERATION_NS, worker: int = 0, workers: int = 1) -> None:
        self._every_ns = every_ns
        self._phase_ns = every_ns * worker // workers

    def now_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def iteration_ns(self, now_ns: int) -> int:
        """Return the beginning of the iteration that contains `now_ns`."""
        return now_ns - (now_ns - self._phase_ns) % self._every_ns

    def wait(self) -> None:
        now_ns = self.now_ns()
        time.sleep((self.iteration_ns(now_ns) + self._every_ns - now_ns) / 1e9)


class VirtualClock:
    """A clock that moves by one interval per iteration, without waiting. A run does the same work
    as on the real clock, but at full speed and with reproducible outcomes."""

    def __init__(self) -> None:
        self._now_ns = 1_000_000 * MS

    def now_ns(self) -> int:
        return self._now_ns

    def iteration_ns(self, now_ns: int) -> int:
        """Return `now_ns`, because every moment begins an iteration."""
        return now_ns

    def wait(self) -> None:
        self._now_ns += ITERATION_NS


class Driver:
    """Drives one design through one experiment."""

    def __init__(self, experiment: Experiment, clock: RealClock | VirtualClock) -> None:
        self.clock = clock
        self.experiment = experiment
        self.schedule = Schedule.of(experiment)
        self.messages = Messages(experiment)
        count = experiment.requests
        self.start_ns = experiment.start_ns or clock.now_ns() + LEAD_NS
        self.core: Core = make(experiment, self.schedule, self.messages, self.start_ns)
        self._arrives_ns = self.schedule.arrives_ns + self.start_ns
        self._completes_ns = (self.schedule.completes_ns + self.start_ns)[self.schedule.order]
        self._deadlines_ns = self._arrives_ns + TIMEOUT_NS
        # Fill the arrays, so that all their pages are allocated before the run.
        self._armed_ns: Longs = np.full(count, NEVER_NS)
        self._advanced_ns: Longs = np.full(count, NEVER_NS)  # in the order of schedule.order
        self._got: Longs = np.full(count, -1)  # requests in the order of their outcomes
        self._got_ns: Longs = np.full(count, -1)  # times at which they were received
        self._states = np.full(count, 0, np.uint8)  # per request: cause and ADVANCED
        self._arrived = self._completed = self._ended = 0
        self._last_arrival_ns = self._repeated = self._iteration_ns = 0

    def _handle(self, length: int) -> None:
        """Handle a message. Raises Refused if the iteration takes too long, because then each
        iteration has more work than the last."""
        self.core.handle(length)
        if self.clock.now_ns() - self._iteration_ns > BEHIND_NS:
            raise Refused

    # ---- one iteration --------------------------------------------------------------------------

    def _arrive(self, now_ns: int) -> None:
        due = int(np.searchsorted(self._arrives_ns, now_ns, side="right"))
        for first in range(self._arrived, due, BATCH):
            end = min(first + BATCH, due)
            self._handle(self.messages.watch(first, self._deadlines_ns[first:end]))
            self._last_arrival_ns = now_ns
        self._armed_ns[self._arrived : due] = now_ns
        self._arrived = max(due, self._arrived)

    def _complete(self, now_ns: int) -> None:
        """Send an advance for each request whose condition has become true, unless the request has
        ended."""
        due = int(np.searchsorted(self._completes_ns, now_ns, side="right"))
        requests = self.schedule.order[self._completed : due]
        self._advanced_ns[self._completed : due] = now_ns
        self._completed = max(due, self._completed)
        states = self._states[requests]
        self._states[requests] = states | ADVANCED
        requests = requests[states == 0]
        for first in range(0, len(requests), BATCH):
            self._handle(self.messages.advance(requests[first : first + BATCH]))

    def _collect(self) -> None:
        """Take outcomes and acknowledge them.

        A request's own keys are removed when the request ends. An advance that comes later creates
        its key again, so this function forgets that key.
        """
        while length := self.core.inbox():
            got_ns = self.clock.now_ns()
            heads, requests = outcomes_in(self.core.out[:length])
            causes = (heads["ticket"] & np.uint64(0xFF)).astype(np.uint8)
            self.core.handle(self.messages.ack(heads))
            states = self._states[requests]
            if (states & ENDED).any():
                fresh = states & ENDED == 0
                self._repeated += len(requests) - int(fresh.sum())
                requests, causes, states = requests[fresh], causes[fresh], states[fresh]
            self._states[requests] = states | causes
            first, self._ended = self._ended, self._ended + len(requests)
            self._got[first : self._ended] = requests
            self._got_ns[first : self._ended] = got_ns
            late = (causes == lib.PG_CAUSE_EXPIRED) & (states == ADVANCED)
            if late.any():
                self.core.handle(self.messages.forget(requests[late]))

    def _iterate(self, now_ns: int) -> None:
        """Run one iteration. It handles ended requests first, because they free space for new
        requests.

        So an advance may be sent before the watch of its request. Outcomes are collected after each
        step, while their memory is still in the CPU caches.
        """
        self._iteration_ns = now_ns
        self.core.advance(now_ns)
        self._collect()
        self._complete(now_ns)
        self._collect()
        self._arrive(now_ns)
        self._collect()

    # ---- the run ----------------------------------------------------------------------------

    def _behind(self, now_ns: int) -> bool:
        next_arrival = min(self._arrived, self.experiment.requests - 1)
        return now_ns - int(self._arrives_ns[next_arrival]) > BEHIND_NS and (
            self._arrived < self.experiment.requests
        )

    def run(self) -> Result:
        """Run the schedule until the last outcome has been received."""
        gc.collect()
        gc.disable()
        last_end_ns = int(self.schedule.ends_ns.max()) + self.start_ns
        cpu_ns = time.process_time_ns()
        refused = self._iterations(last_end_ns + SILENCE_NS)
        cpu_ns = time.process_time_ns() - cpu_ns
        return self._result(cpu_ns, self.clock.now_ns() - last_end_ns, refused)

    def _iterations(self, give_up_ns: int) -> bool:
        """Run iterations. Return True if the design refused a request or fell too far behind."""
        while self._ended < self.experiment.requests:
            self.clock.wait()
            now_ns = self.clock.now_ns()
            if now_ns > give_up_ns:
                return False
            try:
                self._iterate(self.clock.iteration_ns(now_ns))
            except Refused:
                return True
            if self._behind(now_ns):
                return True
        return False

    # ---- the result ----------------------------------------------------------------------

    def _wrong(self, causes: Bytes, got_ns: Longs) -> tuple[int, int]:
        """Return (number of wrong outcomes, number of ambiguous outcomes). An early expiry is
        wrong."""
        sent_ns = np.empty_like(self._advanced_ns)
        sent_ns[self.schedule.order] = self._advanced_ns
        satisfied, expired = causes == lib.PG_CAUSE_SATISFIED, causes == lib.PG_CAUSE_EXPIRED
        before_ns, after_ns = WINDOWS_NS.get(self.experiment.design, WINDOW_NS)
        must_satisfy = sent_ns < self._deadlines_ns - before_ns
        must_expire = sent_ns >= self._deadlines_ns + after_ns
        must_expire &= self._armed_ns < sent_ns
        early = expired & (got_ns < self._deadlines_ns)
        wrong = (must_satisfy & expired) | (must_expire & satisfied) | early
        return int(wrong.sum()), int((~must_satisfy & ~must_expire).sum())

    def _result(self, cpu_ns: int, tail_ns: int, aborted: bool) -> Result:
        causes = self._states & ENDED
        got_ns = np.zeros(len(causes), np.int64)
        got_ns[self._got[: self._ended]] = self._got_ns[: self._ended]
        expired = causes == lib.PG_CAUSE_EXPIRED
        late_ms = (got_ns - self._deadlines_ns)[expired] / MS
        late = np.percentile(late_ms, (50, 99, 100)) if len(late_ms) else np.zeros(3)
        took_ns = max(self._last_arrival_ns - self.start_ns, 1)
        nothing = self.experiment.design == "nothing"
        wrong, ambiguous = (0, 0) if nothing else self._wrong(causes, got_ns)
        if isinstance(self.core, Ours) and not aborted:
            self.core.check()
        f = self.core.figures()
        return Result(
            achieved=self._arrived / took_ns * 1e9 / self.experiment.rate,
            drain_tail_ms=tail_ns / MS,
            late_p50_ms=float(late[0]),
            late_p99_ms=float(late[1]),
            late_max_ms=float(late[2]),
            cpu_per_million=cpu_ns / 1e9 / max(self._ended, 1) * 1e6,
            core_bytes=f.core_bytes,
            purges=f.purges,
            purge=f.purge_ns / 1e9,
            purge_max_ms=f.purge_max_ns / MS,
            satisfied=int((causes == lib.PG_CAUSE_SATISFIED).sum()),
            expired=int(expired.sum()),
            ambiguous=ambiguous,
            wrong=0 if aborted else wrong,
            lost=0 if aborted else int((causes == 0).sum()),
            repeated=self._repeated,
            aborted=aborted,
        )
