"""The requests of one run, with the times at which they arrive and at which their conditions become
true."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
MS = 1_000_000
TIMEOUT_NS = 200 * MS
PAYLOAD_BYTES = 100
QUARTILE = 0.6744897501960817
"""Upper quartile of the standard normal distribution, in standard deviations."""

CASES = {"low": (20.0, 60.0), "high": (200.0, 400.0)}
"""The cases: (median, upper quartile) of the latency in ms."""

SERIES = {"shared": (2, 1), "own": (0, 3)}
"""The series: (number of keys that all requests watch, number of keys that belong to one
request)."""
KEYS = 3
"""Number of watch keys of a request, in each series."""


@dataclass(frozen=True)
class Experiment:
    """One run: a design under one load."""

    design: str
    case: str
    series: str
    rate: int  # requests per second
    requests: int
    seed: int = 1
    worker: int = 0  # number of the worker process, if the run goes through the daemon
    endpoint: str = ""
    start_ns: int = 0  # start of the schedule on the boot clock; 0 = when everything is prepared

    @property
    def shared(self) -> int:
        """Number of keys that all requests watch."""
        return SERIES[self.series][0]

    @property
    def own(self) -> int:
        """Number of keys that only one request watches."""
        return SERIES[self.series][1]

    def described(self) -> dict[str, Any]:
        """Return the experiment as the results file describes it."""
        names = ("design", "case", "series", "rate", "requests")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Schedule:
    """Times in ns from the start of the run; `order` has the numbers of the requests, sorted by
    `completes_ns`."""

    arrives_ns: Longs
    completes_ns: Longs
    order: Longs

    @classmethod
    def of(cls, e: Experiment) -> Schedule:
        """Draw a random schedule: exponential inter-arrival times and lognormal latencies."""
        random = np.random.default_rng(e.seed)
        arrives = np.cumsum(random.exponential(1e9 / e.rate, e.requests)).astype(np.int64)
        median, upper = CASES[e.case]
        sigma = math.log(upper / median) / QUARTILE
        latency_ms = random.lognormal(math.log(median), sigma, e.requests)
        completes = arrives + (latency_ms * MS).astype(np.int64)
        return cls(arrives, completes, np.argsort(completes).astype(np.int64))

    @property
    def ends_ns(self) -> Longs:
        """Time at which each request should end: its completion or its deadline, whichever is
        earlier."""
        ends: Longs = np.minimum(self.completes_ns, self.arrives_ns + TIMEOUT_NS)
        return ends


@dataclass
class Figures:
    """Figures that a design reports at the end of a run."""

    core_bytes: int = 0
    purges: int = 0
    purge_ns: int = 0
    purge_max_ns: int = 0


@dataclass
class Result:
    """Figures of one run. Times without a unit in their name are seconds."""

    achieved: float  # requests per second / target rate; 1 = keeps up
    drain_tail_ms: float  # time from the last expected end to the receipt of the last outcome
    late_p50_ms: float  # for expired requests: time from the deadline to the receipt of the outcome
    late_p99_ms: float
    late_max_ms: float
    cpu_per_million: float  # CPU time of the whole process per million requests
    core_bytes: int  # peak memory of the design
    purges: int
    purge: float
    purge_max_ms: float
    satisfied: int
    expired: int
    ambiguous: int  # requests that ended in the window in which either outcome is right
    wrong: int  # outcomes other than predicted, outside of the window; early expiries
    lost: int  # requests without an outcome
    repeated: int  # outcomes received again: the daemon repeats them until they are acknowledged
    aborted: bool  # the run fell too far behind its schedule and was stopped

    @property
    def keeps_up(self) -> bool:
        """True if the run meets the experiment's criterion for keeping up."""
        return (
            not self.aborted
            and self.achieved >= 0.99
            and self.drain_tail_ms < 50
            and self.wrong == self.lost == 0
        )
