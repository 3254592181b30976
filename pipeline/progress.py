"""How far each daemon's journal has come, from manifests alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise

from purgatoryd.pipeline.lake import Lake, Manifest
from purgatoryd.pipeline.parts import Layer, Segment
from purgatoryd.pipeline.reach import Reach, reaches


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one daemon. `complete_to_us`: the wall time, UTC, up to which every segment is in the
    lake; `last_us`: that of the newest record there. `gaps`: first and last LSN of what is
    missing. `silver`, `gold`: segments whose tables are up to date. `unknown`: records of types
    that this version does not know."""

    daemon: str
    node: str
    segments: int
    rows: int
    complete_to_us: int
    last_us: int
    gaps: tuple[tuple[int, int], ...]
    silver: int
    gold: int
    unknown: int


def progress(lake: Lake) -> list[Progress]:
    """Of every daemon that has segments in the lake. Raises LakeBroken."""
    manifests = lake.manifests()
    reached = reaches(manifests)
    done = {name: _up_to_date(lake, name, reached) for name in ("silver", "gold")}
    return [_of(list(found), done) for _, found in groupby(manifests, key=lambda m: m.daemon)]


def _up_to_date(lake: Lake, layer: str, reached: dict[Segment, Reach]) -> set[Segment]:
    made = Layer(lake.root, layer).sources()
    return {segment for segment, reach in reached.items() if made.get(segment) == reach.names}


def _of(segments: list[Manifest], done: dict[str, set[Segment]]) -> Progress:
    pairs = [(a, b) for a, b in pairwise(segments) if a.last_lsn + 1 < b.first_lsn]
    whole = segments.index(pairs[0][0]) + 1 if pairs else len(segments)
    return Progress(
        daemon=segments[0].daemon,
        node=segments[-1].node,
        segments=len(segments),
        rows=sum(m.rows for m in segments),
        complete_to_us=max(m.wall_to_us for m in segments[:whole]),
        last_us=max(m.wall_to_us for m in segments),
        gaps=tuple((a.last_lsn + 1, b.first_lsn - 1) for a, b in pairs),
        silver=sum(m.segment in done["silver"] for m in segments),
        gold=sum(m.segment in done["gold"] for m in segments),
        unknown=sum(m.kinds.get("unknown", 0) for m in segments),
    )
