"""Which files the rows of each segment are made of, from manifests alone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from purgatoryd.pipeline.lake import Manifest
from purgatoryd.pipeline.parts import Segment

BATCHES = ("sent", "replied")
BATCH_ROWS = 16
"""A batch counts for so many rows of bronze, for it is broadcast."""


@dataclass(frozen=True, slots=True)
class Reach:
    """A segment, first, and the others in which its notices and answers were handed over."""

    manifests: tuple[Manifest, ...]

    @property
    def own(self) -> Manifest:
        """The segment itself."""
        return self.manifests[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all its files."""
        return tuple(manifest.name for manifest in self.manifests)

    @property
    def cost(self) -> int:
        """In rows."""
        batches = sum(m.kinds.get(kind, 0) for m in self.manifests for kind in BATCHES)
        return self.own.rows + BATCH_ROWS * batches


def reaches(manifests: Sequence[Manifest]) -> dict[Segment, Reach]:
    """Of all segments; `manifests` in the order of Lake.manifests()."""
    daemons = groupby(manifests, key=lambda manifest: manifest.daemon)
    return {reach.own.segment: reach for _, own in daemons for reach in _reaches(list(own))}


def _reaches(segments: Sequence[Manifest]) -> Iterator[Reach]:
    """Of one daemon. Its notices are handed over in the order of their positions, so those who
    hand over a segment's stand beside each other. An answer follows what it answers, within the
    second or so that a disk takes."""
    handing = [segment for segment in segments if segment.handed.upto]
    begins, uptos = zip(*(m.handed for m in handing), strict=True) if handing else ((), ())
    for own, following in zip(segments, [*segments[1:], None], strict=True):
        first, last = bisect_right(uptos, own.notices.begin), bisect_left(begins, own.notices.upto)
        others = [one for one in handing[first:last] if one is not own]
        if following and _answers(following, own) and following not in others:
            others.append(following)
        yield Reach((own, *others))


def _answers(following: Manifest, own: Manifest) -> bool:
    """True if answers to what `own` has may stand in the segment behind it."""
    return "replied" in following.kinds and bool(own.kinds.keys() & {"arm", "end"})
