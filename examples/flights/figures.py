"""The figures of a run: percentiles of lateness, and rates of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from examples.flights.events import NS_PER_S


class Lateness(NamedTuple):
    """Percentiles of times after a deadline, in ns; all are 0 if there are no values."""

    notices: int
    min_ns: int
    p50_ns: int
    p99_ns: int
    max_ns: int

    @classmethod
    def of(cls, samples_ns: Iterable[int]) -> Lateness:
        """Return percentiles with the nearest-rank method, so that every figure is a measured
        value."""
        ordered = sorted(samples_ns)
        if not ordered:
            return cls(0, 0, 0, 0, 0)
        ranks = (_rank(ordered, 50), _rank(ordered, 99))
        return cls(len(ordered), ordered[0], *ranks, ordered[-1])


class Rate(NamedTuple):
    """Number of events, events per second from the first to the last event, and events in the
    busiest second."""

    events: int
    per_s: float
    best_s: int

    @classmethod
    def of(cls, moments_ns: Iterable[int]) -> Rate:
        """Return the rate of events that happened at these moments."""
        moments = sorted(moments_ns)
        if not moments:
            return cls(0, 0.0, 0)
        seconds = Counter((moment - moments[0]) // NS_PER_S for moment in moments)
        span_s = (moments[-1] - moments[0]) / NS_PER_S or 1.0
        return cls(len(moments), len(moments) / span_s, max(seconds.values()))


def _rank(ordered: Sequence[int], percent: int) -> int:
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
