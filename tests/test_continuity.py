"""Predecessors and successors of arenas, and the arenas that the figures of a lake leave out.

All of these are found in manifests alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from purgatoryd.pipeline.continuity import (
    continuity,
    excluded,
    newest_successor,
    predecessors,
    successors,
)
from purgatoryd.pipeline.lake import BRONZE, OPENINGS, Manifest
from purgatoryd.shm_layout.errors import LakeBroken

pytestmark = pytest.mark.tier("check")


def arena(
    name: str, first: int, last: int, table: str = BRONZE, at: int = 0, wal: str = ""
) -> Manifest:
    """Return the manifest of a segment of the arena `name`, or of a snapshot if `table` is
    OPENINGS."""
    node = "other" if name == "stranger" else "node"
    return Manifest(table, name, node, 1, first, last, 0, "boot", 1, at, at, wal=wal)


def shard(
    name: str, predecessors: Mapping[str, int], shards: int, first: int = 1, table: str = OPENINGS
) -> Manifest:
    """Return the manifest of the first snapshot of an arena that a resharding to `shards` shards
    made.

    A name that ends with an asterisk, such as "2-0*", means the arena that succeeded "2-0" in the
    same WAL.
    """
    wal = f"demo-{name.rstrip('*')}"
    return Manifest(
        table, name, "node", 1, first, 0, 0, "boot", 1, 0, 0,
        predecessors=predecessors, shards=shards, wal=wal,
    )  # fmt: skip


# ---- recoveries ------------------------------------------------------------------------------


def test_successors_are_known_by_where_their_records_begin() -> None:
    fresh, first = arena("fresh", 1, 99), arena("a", 1, 15)
    strangers = [fresh, arena("stranger", 16, 20)]
    assert successors([first, *strangers]) == {}
    # `brief` was migrated to other sizes before its first record
    brief = arena("brief", 16, 15, OPENINGS, at=1)
    then = arena("b", 16, 15, OPENINGS, at=2)
    assert successors([then, brief, first, *strangers]) == {"a": "b"}
    found = successors([arena("b", 16, 28), arena("c", 29, 28, OPENINGS), then, brief, first])
    assert found == {"a": "b", "b": "c"}
    assert [newest_successor(found, name) for name in ("a", "c", "fresh")] == ["c", "c", "fresh"]


def test_two_wals_that_count_alike_have_nothing_to_do_with_each_other() -> None:
    """Each shard numbers its own records, so the manifests of two shards may have the same
    numbers."""
    one = arena("a", 1, 15, wal="demo-1-0")
    for wal, found in (("demo-1-0", {"a": "b"}), ("demo-1-1", {})):
        other = arena("b", 16, 20, wal=wal)
        assert successors([one, other]) == found
        causes = [lost.cause for lost in continuity([one, other], []).lost]
        assert causes == (["recovery"] if found else ["unexplained"])


@pytest.mark.parametrize("first", [1, 2])
def test_no_arena_precedes_itself(first: int) -> None:
    """By record numbers alone, `old` seems to follow its own successor, or its successor's
    successor. The manifest's field `predecessors` decides."""
    wal = f"demo-{first}-0"
    old = arena("old", 11, 20, wal=wal)
    young = [
        shard("1-0", {"old": 20}, 1, table=BRONZE), shard("2-0", {"1-0": 1}, 1),
        arena(f"{first}-0", 1, 10, wal=wal),
    ]  # fmt: skip
    assert successors([old, *young]) == {f"{first}-0": "old"}
    assert predecessors([old, *young]) == {"1-0": {"old"}, "2-0": {"1-0"}}


def test_a_ring_is_named() -> None:
    reported = [shard("1-0", {"2-0": 5}, 1), shard("2-0", {"1-0": 5}, 1)]
    with pytest.raises(LakeBroken, match=r"1-0, 2-0, 1-0|2-0, 1-0, 2-0"):
        predecessors(reported)
    with pytest.raises(LakeBroken, match="a, b, a"):
        newest_successor({"a": "b", "b": "a"}, "a")


# ---- another number of shards ----------------------------------------------------------------

OLD = {"1-0": 9, "1-1": 9}
YOUNG = {"2-0": 9, "2-1": 9, "2-2": 9}


def names(*manifests: Manifest) -> tuple[set[str], set[str]]:
    before = [arena(name, 1, 9, wal=f"demo-{name}") for name in OLD]
    found = excluded([*before, *manifests])
    assert found.absent == found.gone | found.coming
    return found.gone, found.coming


def test_shards_count_until_all_that_took_their_place_are_there() -> None:
    three = [shard(name, OLD, 3) for name in YOUNG]
    successor = shard("2-0*", OLD, 3, first=10)
    assert names() == (set(), set())
    assert names(*three[:2], successor) == (set(), {"2-0", "2-0*", "2-1"})
    segment = shard("2-2", OLD, 3, table=BRONZE)
    # the snapshot with the initial contents of 2-2 is missing
    assert names(*three[:2], segment) == (set(), set(YOUNG))
    assert names(*three) == (set(OLD), set())


def test_predecessors_do_not_count_though_successors_were_never_complete() -> None:
    one_of_three, last = shard("2-0", OLD, 3), shard("3-0", YOUNG, 1)
    assert names(one_of_three, last) == ({*OLD, *YOUNG}, set())


def test_shards_count_if_nothing_of_those_before_is_there() -> None:
    """A lake that was created after the resharding contains no data of the arenas before it."""
    some = [shard(name, OLD, 3) for name in ("2-0", "2-1")]
    assert not excluded(some).absent & {"2-0", "2-1"}


def test_missing_parts_of_a_resharding_are_named() -> None:
    segments = [arena("1-0", 1, 9), arena("1-1", 1, 7)]
    openings = [shard("2-0", OLD, 2), shard("2-1", OLD, 2)]
    born = [arena(name, 1, 0, OPENINGS) for name in OLD]
    assert continuity(segments, born + openings).lost == [("1-1", 8, 9, "resharding")]
    assert continuity(segments, born + openings[:1]).lost == [
        ("1-0", 10, None, "resharding"), ("1-1", 8, 9, "resharding"),
        ("1-1", 10, None, "resharding"),
    ]  # fmt: skip
    young = [shard("2-0", OLD, 2, first=5), shard("2-1", OLD, 2, first=5)]
    assert continuity(segments, born + young).lost == continuity(segments, born + openings[:1]).lost


def test_each_shard_of_a_resharding_counts_once() -> None:
    """A shard is listed once even if it took two snapshots before its first record."""
    again = replace(shard("2-0", OLD, 2), epoch=2)
    segments, one = [arena(name, 1, 9) for name in OLD], shard("2-0", OLD, 2)
    for there in ([one, again], [again, one]):
        (resharding,) = continuity(segments, there).reshardings
        assert resharding.openings == (one,)
