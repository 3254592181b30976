"""What is measured: the requests of one run, when each arrives and its condition turns true."""

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
"""The standard normal's upper quartile, in standard deviations."""

CASES = {"low": (20.0, 60.0), "high": (200.0, 400.0)}
"""Median and upper quartile of the latency, ms."""

SERIES = {"shared": (2, 1), "own": (0, 3)}
"""Keys that all requests watch, and keys of the request's own."""
KEYS = 3
"""Watch keys of a request, in each series."""


@dataclass(frozen=True)
class Experiment:
    """One run: a design under one load."""

    design: str
    case: str
    series: str
    rate: int  # requests per second
    requests: int
    seed: int = 1
    worker: int = 0  # through the daemon: which of its workers this is
    endpoint: str = ""
    start_ns: int = 0  # when the schedule begins; 0 = as soon as all is made

    @property
    def shared(self) -> int:
        """Keys that all requests watch."""
        return SERIES[self.series][0]

    @property
    def own(self) -> int:
        """Keys that one request alone watches."""
        return SERIES[self.series][1]

    def described(self) -> dict[str, Any]:
        """For the results' file."""
        names = ("design", "case", "series", "rate", "requests")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Schedule:
    """In ns from the start of the run; `order` are the requests by `completes_ns`."""

    arrives_ns: Longs
    completes_ns: Longs
    order: Longs

    @classmethod
    def of(cls, e: Experiment) -> Schedule:
        """Exponential inter-arrival times, lognormal latencies."""
        random = np.random.default_rng(e.seed)
        arrives = np.cumsum(random.exponential(1e9 / e.rate, e.requests)).astype(np.int64)
        median, upper = CASES[e.case]
        sigma = math.log(upper / median) / QUARTILE
        latency_ms = random.lognormal(math.log(median), sigma, e.requests)
        completes = arrives + (latency_ms * MS).astype(np.int64)
        return cls(arrives, completes, np.argsort(completes).astype(np.int64))

    @property
    def ends_ns(self) -> Longs:
        """When each request should end, by whichever comes first."""
        ends: Longs = np.minimum(self.completes_ns, self.arrives_ns + TIMEOUT_NS)
        return ends


@dataclass
class Figures:
    """What a design tells of itself at the end of a run."""

    core_bytes: int = 0
    purges: int = 0
    purge_ns: int = 0
    purge_max_ns: int = 0


@dataclass
class Result:
    """One run's figures. Times without a unit in their name are seconds."""

    achieved: float  # requests per second over the target; 1 = keeps up
    drain_tail_ms: float  # from the last end that was due to the last outcome at hand
    late_p50_ms: float  # expiries: from the deadline to the outcome in the driver's hands
    late_p99_ms: float
    late_max_ms: float
    cpu_per_million: float  # of the whole process
    core_bytes: int  # peak memory of the design
    purges: int
    purge: float
    purge_max_ms: float
    satisfied: int
    expired: int
    ambiguous: int  # ended within the window where both outcomes are right
    wrong: int  # outcomes that differ from the prediction outside the window, or early
    lost: int  # requests without an outcome
    repeated: int  # outcomes that came again: the daemon re-sends until it is acknowledged
    aborted: bool  # fell too far behind its schedule and was stopped

    @property
    def keeps_up(self) -> bool:
        """The criterion of the whole experiment."""
        return (
            not self.aborted
            and self.achieved >= 0.99
            and self.drain_tail_ms < 50
            and self.wrong == self.lost == 0
        )
