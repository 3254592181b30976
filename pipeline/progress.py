"""How far each daemon's WAL has come, from manifests alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise

from purgatoryd.pipeline.continuity import excluded
from purgatoryd.pipeline.lake import BRONZE, OPENINGS, Lake, Manifest
from purgatoryd.pipeline.parts import Layer, Segment
from purgatoryd.pipeline.reach import Reach, reaches


class State(StrEnum):
    """Whether what lives is counted in a daemon: not in one whose place others took, nor in one of
    several shards that take others' place while the lake has not all of them."""

    COUNTS = "counts"
    REPLACED = "replaced"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one daemon. `complete_to_us`: the wall time, UTC, up to which every segment is in the
    lake, from the first one there; `last_us`: that of the newest record there. `gaps`: first and
    last LSN of what is missing. `silver`, `gold`: segments whose tables are up to date.
    `unknown`: records that cannot be parsed."""

    daemon: str
    node: str
    state: State
    segments: int
    rows: int
    complete_to_us: int
    last_us: int
    gaps: tuple[tuple[int, int], ...]
    silver: int
    gold: int
    unknown: int


def progress(lake: Lake) -> list[Progress]:
    """Of every daemon that has something in the lake. Raises LakeBroken."""
    segments = lake.manifests()
    both = sorted([*segments, *lake.manifests(OPENINGS)], key=lambda m: m.segment)
    reached, other = reaches(segments), excluded(both)
    done = {name: _up_to_date(lake, name, reached) for name in ("silver", "gold")}
    states = dict.fromkeys(other.gone, State.REPLACED)
    states |= dict.fromkeys(other.coming, State.INCOMPLETE)
    return [
        _of(list(own), states.get(daemon, State.COUNTS), done)
        for daemon, own in groupby(both, key=lambda m: m.daemon)
    ]


def _up_to_date(lake: Lake, layer: str, reached: dict[Segment, Reach]) -> set[Segment]:
    made = Layer(lake.root, layer).sources()
    return {segment for segment, reach in reached.items() if made.get(segment) == reach.names}


def _of(own: Sequence[Manifest], state: State, done: Mapping[str, Set[Segment]]) -> Progress:
    segments = [m for m in own if m.table == BRONZE]
    first = segments[0] if segments else None
    never = [(first.gone_from, first.first_lsn - 1)] if first and first.gone_from else []
    pairs = [(a, b) for a, b in pairwise(segments) if a.last_lsn + 1 < b.first_lsn]
    whole = segments[: segments.index(pairs[0][0]) + 1] if pairs else segments
    return Progress(
        daemon=own[0].daemon,
        node=own[-1].node,
        state=state,
        segments=len(segments),
        rows=sum(m.rows for m in segments),
        complete_to_us=max(m.wall_to_us for m in whole or own),
        last_us=max(m.wall_to_us for m in segments or own),
        gaps=(*never, *((a.last_lsn + 1, b.first_lsn - 1) for a, b in pairs)),
        silver=sum(m.segment in done["silver"] for m in segments),
        gold=sum(m.segment in done["gold"] for m in segments),
        unknown=sum(m.kinds.get("unknown", 0) for m in segments),
    )
