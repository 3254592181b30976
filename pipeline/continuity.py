"""Which records of a WAL are in the lake without a hole, and what became of the others.

From the manifests alone. A run is the records between two holes; an audit starts over with each,
from a snapshot. What is missing has a cause:

    retention    the segments went before they were shipped: the exporter saw that they, and all
                 before them, had left the WAL
    forced       `run --force-wal` set the files aside; the arena held all and went on
    recovery     another arena took its place, and it was not stopped before: what was not on disk
                 by then is nowhere, and nobody knows how much
    resharding   the number of a deployment's shards changed, and these records of one before are
                 not shipped yet; or it was killed, and they went into the new arenas from memory;
                 or the lake lacks the first snapshot of one of those that took its place: what
                 became of what it held is not known
    not_shipped  a snapshot shows that these newer records exist; they are only in the WAL
    unexplained  nothing says why: a violation

Records in the lake that are not judged also have a cause:

    snapshot     the WAL began with an arena that was not empty, or continues after a hole: the
                 state before the first snapshot is unknown
    no_snapshot  the same, without any snapshot: only single records and pairs of records are
                 checked
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from purgatoryd.pipeline.lake import BRONZE, MANIFESTS, OPENINGS, Manifest
from purgatoryd.shm_layout.errors import LakeBroken


class Violation(NamedTuple):
    """Something that cannot be, or was promised otherwise. `evidence`: the figures that show it."""

    kind: str
    daemon: str
    lsn: int | None
    ticket: int | None
    evidence: dict[str, Any]


class LsnRange(NamedTuple):
    """Records of one daemon that are not judged, and the cause. `last_lsn` None: unknown."""

    daemon: str
    first_lsn: int
    last_lsn: int | None
    cause: str


@dataclass(frozen=True, slots=True)
class Run:
    """Records of one daemon without a hole.

    `from_lsn`: the first that is audited. `opening`: the start LSN of the snapshot that the audit
    begins with; 0 = there is none. `unsure_lsn`: what ended up to here may be missing in it.
    `began_empty`: the audit begins with record 1 and an empty arena.
    """

    daemon: str
    number: int
    first_lsn: int
    last_lsn: int
    segments: tuple[Manifest, ...]
    from_lsn: int = 0
    opening: int = 0
    unsure_lsn: int = 0
    began_empty: bool = False

    @property
    def is_judged(self) -> bool:
        """True if the state before `from_lsn` is known, so that each record can be judged."""
        return self.began_empty or self.opening > 0


class Resharding(NamedTuple):
    """A deployment's change of the number of shards. `upto`: the daemons before, each with its last
    record that counts; `openings`: what those after began with, `shards` if none is missing."""

    upto: Mapping[str, int]
    openings: tuple[Manifest, ...]
    shards: int


@dataclass(frozen=True, slots=True)
class Continuity:
    """All runs and snapshots, and all that is wrong or missing between them."""

    runs: list[Run]
    snapshots: list[Manifest]
    lost: list[LsnRange]
    violations: list[Violation]
    reshardings: list[Resharding] = field(default_factory=list)
    not_judged: list[LsnRange] = field(default_factory=list)


class Coverage(NamedTuple):
    """Numbers of judged records, of `shipped` records, and of records that the WALs `had` as far as
    the lake knows. `ranges`: all records that were not judged, shipped or missing."""

    judged: int = 0
    shipped: int = 0
    had: int = 0
    ranges: tuple[LsnRange, ...] = ()

    @property
    def is_exact(self) -> bool:
        """False if the number of missing records in a range is unknown."""
        return all(one.last_lsn is not None for one in self.ranges)

    @property
    def share(self) -> float:
        """Judged share of the records that the WALs had, 0 to 1; an upper bound unless exact."""
        return self.judged / self.had if self.had else 0.0

    @property
    def is_whole(self) -> bool:
        """True if there were records and every one of them was judged."""
        return self.had > 0 and not self.ranges

    def reaches(self, share: float) -> bool:
        """True if at least this share was judged. 100 % needs all records."""
        return self.is_whole or (self.share >= share and share < 1)


def coverage(found: Continuity) -> Coverage:
    """Return the coverage of the result of continuity()."""
    judged = sum(run.last_lsn - run.from_lsn + 1 for run in found.runs if run.is_judged)
    shipped = sum(run.last_lsn - run.first_lsn + 1 for run in found.runs)
    missing = sum(one.last_lsn - one.first_lsn + 1 for one in found.lost if one.last_lsn)
    ranges = sorted({*found.not_judged, *found.lost}, key=lambda one: (one.daemon, one.first_lsn))
    return Coverage(judged, shipped, shipped + missing, tuple(ranges))


def continuity(segments: Sequence[Manifest], snapshots: Sequence[Manifest]) -> Continuity:
    """Of all daemons whose segments these are."""
    found = Continuity([], sorted(snapshots, key=_order), [], [])
    for daemon, own in groupby(sorted(segments, key=_order), attrgetter("daemon")):
        _follow(found, list(own), [s for s in found.snapshots if s.daemon == daemon])
    _follow_arenas(found)
    found.reshardings.extend(_reshardings([*segments, *snapshots]))
    for resharding in found.reshardings:
        found.lost.extend(_before_resharding(found.runs, resharding))
    found.lost.extend(_not_shipped(found))
    return found


def _order(manifest: Manifest) -> tuple[str, int, int]:
    return manifest.daemon, manifest.first_lsn, manifest.last_lsn


# ---- one arena -------------------------------------------------------------------------------


def _follow(found: Continuity, segments: list[Manifest], snapshots: list[Manifest]) -> None:
    """The runs of one daemon."""
    found.violations.extend(_out_of_order(segments))
    before: Run | None = None
    for run in _runs(segments):
        opened = _opened(run, snapshots)
        if before is not None:
            cause = _cause(before, opened)
            found.lost.append(LsnRange(run.daemon, before.last_lsn + 1, run.first_lsn - 1, cause))
            if cause == "unexplained":
                found.violations.append(_gap(run, before.last_lsn + 1))
        found.not_judged.extend(_before_opening(opened))
        found.runs.append(opened)
        before = opened


def _out_of_order(segments: list[Manifest]) -> Iterator[Violation]:
    for one, two in pairwise(segments):
        evidence = {"segment": two.first_lsn, "before": one.first_lsn}
        if two.first_lsn <= one.last_lsn:
            yield Violation("lsn_repeated", two.daemon, two.first_lsn, None, evidence)
        if two.epoch < one.epoch:
            epochs = {"epoch": two.epoch, "epoch_before": one.epoch}
            yield Violation("epoch_back", two.daemon, two.first_lsn, None, evidence | epochs)


def _runs(segments: list[Manifest]) -> Iterator[Run]:
    number, begun = 0, 0
    for at, segment in enumerate(segments, 1):
        if at == len(segments) or segments[at].first_lsn > segment.last_lsn + 1:
            own = tuple(segments[begun:at])
            yield Run(segment.daemon, number, own[0].first_lsn, own[-1].last_lsn, own)
            number, begun = number + 1, at


def _opened(run: Run, snapshots: Iterable[Manifest]) -> Run:
    """Return the run with its opening: an empty arena, or the first snapshot that records of the
    run follow."""
    if run.segments[0].began_empty:
        return replace(run, from_lsn=run.first_lsn, began_empty=True)
    for snapshot in snapshots:
        if run.first_lsn <= snapshot.first_lsn <= run.last_lsn:
            start = snapshot.first_lsn
            return replace(run, from_lsn=start, opening=start, unsure_lsn=snapshot.last_lsn)
    return replace(run, from_lsn=run.first_lsn)


def _before_opening(run: Run) -> Iterator[LsnRange]:
    if not run.is_judged:
        yield LsnRange(run.daemon, run.first_lsn, run.last_lsn, "no_snapshot")
    elif run.from_lsn > run.first_lsn:
        yield LsnRange(run.daemon, run.first_lsn, run.from_lsn - 1, "snapshot")


def _not_shipped(found: Continuity) -> Iterator[LsnRange]:
    """Yield records after the newest run of a daemon without successors, as a snapshot shows."""
    over = {name for one in found.reshardings for name in one.upto}
    over |= {r.daemon for run in found.runs if (r := run_before(found.runs, run)) is not None}
    for daemon, run in {run.daemon: run for run in found.runs}.items():
        own = (s for s in found.snapshots if s.daemon == daemon)
        end = max((max(s.first_lsn - 1, s.last_lsn) for s in own), default=0)
        if end > run.last_lsn and daemon not in over:
            yield LsnRange(daemon, run.last_lsn + 1, end, "not_shipped")


def _cause(before: Run, run: Run) -> str:
    if not (run.opening and _had_gone(run, before.last_lsn + 1)):
        return "unexplained"
    restarted = run.segments[0].epoch > before.segments[-1].epoch
    return "forced" if restarted and run.opening == run.first_lsn else "retention"


def _had_gone(run: Run, lsn: int) -> bool:
    """Whether the records from `lsn` up to the run had left the WAL when it was shipped."""
    return 0 < run.segments[0].gone_from <= lsn


def _gap(run: Run, lsn: int) -> Violation:
    missing = {"first_lsn": lsn, "last_lsn": run.first_lsn - 1}
    return Violation("lsn_gap", run.daemon, run.first_lsn, None, missing)


# ---- one arena in another one's place --------------------------------------------------------


def _follow_arenas(found: Continuity) -> None:
    """A recovery from the WAL goes on with the numbers under a new uuid."""
    for run in [r for r in found.runs if r.number == 0 and r.first_lsn > 1]:
        before = run_before(found.runs, run)
        if before is None:
            cause = "retention" if _had_gone(run, 1) else "unexplained"
            found.lost.append(LsnRange(run.daemon, 1, run.first_lsn - 1, cause))
            if cause == "unexplained":
                found.violations.append(_gap(run, 1))
        elif not is_complete(before, found.snapshots):
            found.lost.append(LsnRange(before.daemon, before.last_lsn + 1, None, "recovery"))


def run_before(runs: Sequence[Run], run: Run) -> Run | None:
    """The last run of the arena whose place another one took with `run`; None = not known."""
    others = (other for other in runs if other.daemon != run.daemon)
    for other in others:
        goes_on = other.last_lsn + 1 == run.first_lsn
        if goes_on and _of_one_wal(other.segments[-1], run.segments[0]):
            return other
    return None


def _of_one_wal(one: Manifest, other: Manifest) -> bool:
    """Whether both may be of one WAL: that two count alike may be chance."""
    return one.node == other.node and one.wal == other.wal


def successors(manifests: Iterable[Manifest]) -> dict[str, str]:
    """By daemon whose place another one took: the other. What was armed there is armed here.

    `manifests`: of segments and, for arenas that have filled none yet, of snapshots.
    """
    arenas = [_arena(list(own)) for _, own in groupby(sorted(manifests, key=_order), _daemon)]
    in_order = sorted(arenas, key=attrgetter("next_lsn", "newest.wall_to_us"))
    return {
        one.newest.daemon: other.newest.daemon
        for one in arenas for other in in_order if _goes_on(one, other)
    }  # fmt: skip


_daemon = attrgetter("daemon")


class _Arena(NamedTuple):
    """What is known of an arena. `next_lsn`: that of its successor's first record; `newest`: its
    manifest with the newest row."""

    first_lsn: int
    next_lsn: int
    newest: Manifest


def _arena(own: Sequence[Manifest]) -> _Arena:
    first_lsn, newest = min(m.first_lsn for m in own), max(own, key=attrgetter("wall_to_us"))
    last_lsn = max((m.last_lsn for m in own if m.table == BRONZE), default=first_lsn - 1)
    return _Arena(first_lsn, last_lsn + 1, newest)


def _goes_on(one: _Arena, other: _Arena) -> bool:
    meet = one.next_lsn == other.first_lsn > one.first_lsn
    return meet and _of_one_wal(one.newest, other.newest)


def predecessors(manifests: Iterable[Manifest]) -> dict[str, set[str]]:
    """By daemon, those whose place it took, alone or with others: after a recovery, or as a shard
    of another number of shards. What was armed there is armed in those that came after.

    `manifests`: as successors() has them. Raises LakeBroken if what they tell is a ring.
    """
    listed = [*manifests]
    found = {one.daemon: set(one.predecessors) for one in listed if one.predecessors}
    in_turn(found)
    for before, after in successors(listed).items():
        # it only looks so: nobody comes before himself
        if after not in all_predecessors(found, before):
            found.setdefault(after, set()).add(before)
    return found


def all_predecessors(predecessors: Mapping[str, Set[str]], daemon: str) -> set[str]:
    """Whose place it took, and whose they had taken, and so on."""
    found: set[str] = set()
    left = [daemon]
    while left:
        new = predecessors.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def in_turn(predecessors: Mapping[str, Set[str]]) -> list[str]:
    """The daemons, each behind those whose place it took. Raises LakeBroken if there is none."""
    try:
        return [*TopologicalSorter(predecessors).static_order()]
    except CycleError as error:
        raise _ring(error.args[1]) from None


def newest_successor(successors: Mapping[str, str], daemon: str) -> str:
    """Who has a daemon's place by now: itself, if nobody took it. Raises LakeBroken for a ring."""
    line = [daemon]
    while line[-1] in successors:
        line.append(successors[line[-1]])
        if line[-1] in line[:-1]:
            raise _ring(line)
    return line[-1]


def _ring(daemons: Iterable[str]) -> LakeBroken:
    line = ", ".join(daemons)
    return LakeBroken(MANIFESTS, f"each of these daemons is a predecessor of the next: {line}")


class Excluded(NamedTuple):
    """Daemons that do not count. `gone`: others took their place; `coming`: they will once the
    other shards of their number are in the lake, too."""

    gone: set[str]
    coming: set[str]

    @property
    def absent(self) -> set[str]:
        """All of them."""
        return self.gone | self.coming


def excluded(manifests: Iterable[Manifest]) -> Excluded:
    """Of the daemons in `manifests`, as predecessors() has them. Raises LakeBroken."""
    listed = [*manifests]
    before, coming = predecessors(listed), set(_coming(listed))
    gone = set().union(*(all_predecessors(before, one) for one in before.keys() - coming))
    return Excluded(gone, coming - gone)


def _coming(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Those who took the place of others with shards of which no snapshot is there: without one
    nobody knows what they began with. Where nothing of those before is there either, they count."""
    known = {one.daemon for one in manifests}
    for own in by_predecessors(manifests):
        there = {one.wal for one in own if one.table == OPENINGS}
        if len(there) < own[0].shards and known & own[0].predecessors.keys():
            yield from (one.daemon for one in own)


def _reshardings(manifests: Iterable[Manifest]) -> Iterator[Resharding]:
    """By the arenas that took the place of others, with the snapshots that they began with."""
    for own in by_predecessors(manifests):
        begun = [one for one in own if one.table == OPENINGS and one.first_lsn == 1]
        begun.sort(key=attrgetter("epoch"), reverse=True)
        first = {one.wal: one for one in begun}  # a start that came to no record took another
        yield Resharding(own[0].predecessors, tuple(first.values()), own[0].shards)


def by_predecessors(manifests: Iterable[Manifest]) -> Iterator[tuple[Manifest, ...]]:
    """Those of daemons that took the place of the same others, of each change of the number of
    shards."""
    ordered = sorted((one for one in manifests if one.predecessors), key=_predecessors)
    for _, own in groupby(ordered, _predecessors):
        yield tuple(own)


def _predecessors(manifest: Manifest) -> list[tuple[str, int]]:
    return sorted(manifest.predecessors.items())


def _before_resharding(runs: Iterable[Run], resharding: Resharding) -> Iterator[LsnRange]:
    ends = {run.daemon: run.last_lsn for run in runs}
    for daemon, upto in resharding.upto.items():
        if (end := ends.get(daemon, 0)) < upto:
            yield LsnRange(daemon, end + 1, upto, "resharding")
        if len(resharding.openings) < resharding.shards:
            yield LsnRange(daemon, upto + 1, None, "resharding")


def is_complete(run: Run, snapshots: Iterable[Manifest]) -> bool:
    """True if the daemon stopped behind it: a snapshot says that nothing came after."""
    end = (run.daemon, run.last_lsn + 1)
    return any((s.daemon, s.first_lsn) == end for s in snapshots)
