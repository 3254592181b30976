"""Which files the rows of each segment are made of, from manifests alone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from purgatoryd.pipeline.lake import Manifest
from purgatoryd.pipeline.parts import Segment

BATCHES = ("sent", "replied")
BATCH_ROWS = 16
"""A batch counts for so many rows of bronze, for it is broadcast."""
BATCH_NS = 10**9
"""A batch that takes several iterations ends something so long before its answer is built, at
most."""
NEVER_NS = (1 << 63) - 1


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
    hand over a segment's stand next to each other."""
    handing = [segment for segment in segments if segment.handed.upto]
    begins, uptos = zip(*(m.handed for m in handing), strict=True) if handing else ((), ())
    starts = groupby(segments, key=lambda segment: segment.epoch)
    answering = [others for _, start in starts for others in _answering(list(start))]
    for own, answers in zip(segments, answering, strict=True):
        first, last = bisect_right(uptos, own.notices.begin), bisect_left(begins, own.notices.upto)
        others = [one for one in handing[first:last] if one is not own]
        yield Reach((own, *others, *(one for one in answers if one not in others)))


def _answering(segments: Sequence[Manifest]) -> Iterator[list[Manifest]]:
    """Of one start of a daemon: for each segment those behind it that may have answers to its
    batches. An answer waits for the disk, and its record for another one; but it is built with its
    batch's last end, and the record says when."""
    built = [one.built_from_ns if "replied" in one.kinds else NEVER_NS for one in segments]
    earliest = list(accumulate(reversed(built), min))[::-1]
    for number, own in enumerate(segments, start=1):
        asked = own.kinds.keys() & {"arm", "end"}
        upto_ns = own.ended_upto_ns + BATCH_NS if asked else 0
        behind = range(number, bisect_right(earliest, upto_ns))
        yield [segments[n] for n in behind if built[n] <= upto_ns]
