"""The arithmetic of the comparison: ratios, targets, and rows of the result."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from recording import spread

Sample = Mapping[str, float]
Samples = Mapping[str, Sequence[Sample]]
"""The samples of a scene's repetitions, by contestant."""
Row = dict[str, Any]


class Figure(NamedTuple):
    """Title, unit and direction of a figure of a sample."""

    title: str
    unit: str
    more_is_better: bool = False


FIGURES = {
    "per_s": Figure("", "k/s", True),
    "per_core_s": Figure("", "k/s of a core of client CPU", True),
    "p50_us": Figure("p50", "us"),
    "server_us": Figure("server CPU", "us"), "bytes": Figure("", "bytes"),
    "p50_ms": Figure("lateness p50", "ms"), "p99_ms": Figure("lateness p99", "ms"),
    "max_ms": Figure("lateness, last", "ms"), "ready_s": Figure("", "s"), "ns": Figure("", "ns"),
    "add_ns": Figure("add", "ns"), "cancel_ns": Figure("cancel", "ns"),
    "expire_ns": Figure("expire", "ns"),
}  # fmt: skip
COSTS = ("server_us", "client_us")
SHOWN_IN = {"k/s": 1000.0, "k/s of a core of client CPU": 1000.0}


def values(samples: Sequence[Sample], figure: str) -> list[float]:
    """Return a figure in its unit. A sample in which timers were not delivered has none."""
    unit = SHOWN_IN.get(FIGURES[figure].unit, 1.0)
    return [sample[figure] / unit for sample in samples if figure in sample]


def meets(found: float, target: tuple[str, float]) -> bool:
    sign, bound = target
    return found >= bound if sign == ">=" else found <= bound


def costs(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the median CPU times of an operation, of the servers and of the clients, in us."""
    return {
        name: statistics.median(found)
        for name in COSTS
        if (found := [sample[name] for sample in samples if name in sample])
    }


def row(
    measure: str, figure: str, ours: tuple[str, Sequence[Sample]],
    peer: tuple[str, Sequence[Sample]], target: tuple[str, float] | None,
) -> Row:  # fmt: skip
    """Compare our median with the peer's best repetition.

    Without a peer (`peer` = ("", ())) the target bounds our figure itself. A side that delivered
    nothing has no figure, and no ratio.
    """
    kind, our_values, its_values = (
        FIGURES[figure], values(ours[1], figure), values(peer[1], figure),
    )  # fmt: skip
    mine = statistics.median(our_values) if our_values else None
    best = (max if kind.more_is_better else min)(its_values) if its_values else None
    ratio = mine / best if mine is not None and best else None
    judged = ratio
    if not peer[0] and mine is not None:
        judged = mine * SHOWN_IN.get(kind.unit, 1.0)
    return {
        "measure": f"{measure}, {kind.title}" if kind.title else measure, "unit": kind.unit,
        "ours": mine, "ours_name": ours[0], "peer": best, "peer_name": peer[0], "ratio": ratio,
        "target": f"{target[0]} {target[1]:,g}" if target else None,
        "met": meets(judged, target) if target and judged is not None else None,
        "more_is_better": kind.more_is_better,
        "ours_spread": spread(our_values) if our_values else None,
        "peer_spread": spread(its_values) if its_values else None,
        "ours_cpu_us": costs(ours[1]), "peer_cpu_us": costs(peer[1]),
    }  # fmt: skip


def rows(
    measure: str, figures: Sequence[str], samples: Samples,
    targets: Mapping[tuple[str, str, str], tuple[str, float]], prefix: str,
) -> list[Row]:  # fmt: skip
    """Return a row for each figure, for each contestant of ours (whose name begins with `prefix`),
    and for each peer; and a row without a peer for each bound of our figure itself, or if the scene
    has no peer."""
    ours = {name: found for name, found in samples.items() if name.startswith(prefix)}
    peers = {name: found for name, found in samples.items() if name not in ours}
    found = []
    for figure in figures:
        for one in ours.items():
            alone = (one[0], "", figure) in targets or not peers
            for peer in [*peers.items(), *([("", ())] if alone else [])]:
                target = targets.get((one[0], peer[0], figure))
                found.append(row(measure, figure, one, peer, target))
    return found


def advantage(one: Row) -> float | None:
    """Return how many times better our figure is; below 1 the peer is better."""
    ratio: float | None = one["ratio"]
    return ratio if ratio is None or one["more_is_better"] else 1 / ratio
