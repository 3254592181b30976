"""Merge of several arenas' namespaces into new arenas: preserved state, refusals, ticket owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from core_driver import Core, Fault
from purgatory_driver import ALL, Key, Owner, Purgatory, advance, put, watch
from shards_driver import (
    BULK_LOAD,
    FAR_NS,
    MS,
    OWNED,
    PARTS,
    SIZES,
    Ledger,
    Shards,
    as_arena,
    renamed,
)

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.errors import ArenaBroken, MessageRefused
from purgatoryd.shm_layout.layout import Status, TimeKind
from purgatoryd.shm_layout.merge import NamespaceStats, Route, merge, namespace_stats

pytestmark = pytest.mark.tier("check")

Placements = Mapping[bytes, tuple[int, ...]]

TWO: Placements = {
    OWNED: (0,), b"other": (1,), b"a": (0,), b"b": (1,), b"c": (1,), PARTS: (0, 1, 1, 0),
}  # fmt: skip
THREE: Placements = {
    OWNED: (1,), b"other": (1,), b"a": (2,), b"b": (0,), b"c": (2,), PARTS: (2, 0, 1, 2),
}  # fmt: skip
ONE: Placements = {name: tuple(0 for _ in shards) for name, shards in TWO.items()}


def begun(count: int, placements: Placements, **sizes: Any) -> Shards:
    cores = [
        Purgatory(**{**SIZES, "shard": k, "shards": count, "secret": (k, 9), **sizes})
        for k in range(count)
    ]
    return Shards(cores, placements)


def resharded(old: Shards, count: int, to: Placements, **sizes: Any) -> Shards:
    """Merge the contents of all shards into `count` new arenas; return these."""
    new = begun(count, to, **{"now_ns": old.cores[0].now_ns, **sizes})
    for core in new.cores:
        sources = [(as_arena(one), old.routes(to, k)) for k, one in enumerate(old.cores)]
        merge(as_arena(core), sources)
        core.rebuild(old.cores[0].now_ns)
    return new


def total(shards: Shards) -> dict[str, NamespaceStats]:
    """Return the statistics of each namespace, added up over all shards. The partitioned namespace
    PARTS, which each shard has, is left out."""
    found: dict[str, NamespaceStats] = {}
    for core in shards.cores:
        for name, one in namespace_stats(as_arena(core)).items():
            found[name] = found.get(name, NamespaceStats()) + one
    return {name: one for name, one in found.items() if name != PARTS.decode()}


@pytest.mark.parametrize("seed", range(6))
def test_contents_of_two_shards_survive_resharding_to_three_and_to_one(seed: int) -> None:
    ledger, shards = Ledger(seed), begun(2, TWO)
    ledger.fill(shards)
    ledger.operate(shards)
    before = total(shards)
    for count, placements in ((3, THREE), (1, ONE)):
        shards = resharded(shards, count, placements)
        ledger.compare(shards)
        assert total(shards) == before
    ledger.finish(shards)


def test_a_ticket_names_its_shard_and_is_never_given_twice() -> None:
    shards, given = begun(3, THREE), set[int]()
    for count, placements in ((3, THREE), (1, ONE), (2, TWO), (3, THREE)):
        shards = resharded(shards, count, placements)
        for k, core in enumerate(shards.cores):
            for n in range(5 * (k + 1)):
                ticket = core.put(b"%d" % n, 1, namespace=b"of %d" % k).ticket
                assert ticket // lib.PG_TICKET_SHARD == k
                assert ticket not in given
                given.add(ticket)
                core.cancel(b"%d" % n, namespace=b"of %d" % k)


def test_a_timer_that_came_from_another_shard_is_cancelled_by_its_ticket() -> None:
    shards = begun(2, TWO)
    ticket = shards.of(b"b", b"k").put(b"k", FAR_NS, namespace=b"b").ticket
    [core] = resharded(shards, 1, ONE).cores
    assert core.cancel(b"k", b"b", ticket + 1).status == Status.UNKNOWN
    assert core.cancel(b"k", b"b", ticket) == (ticket, Status.CANCELLED, FAR_NS)
    core.check()


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        (3 * lib.PG_TICKET_SHARD + 2, "the next ticket, of this shard"),
        (lib.PG_TICKET_SHARD, "the next ticket, of this shard"),
        (lib.PG_TICKET_SHARD + 1, "a ticket that was never assigned"),
    ],
)
def test_check_finds_tickets_that_the_shard_did_not_give(wrong: int, detail: str) -> None:
    core = Purgatory(shard=1, shards=3)
    core.put(b"k", FAR_NS)
    core.check()
    core.header.next_ticket = wrong
    with pytest.raises(Fault) as caught:
        core.check()
    assert caught.value.detail == detail


def test_an_invalid_shard_is_refused() -> None:
    core = Purgatory(shard=1, shards=2)
    core.attach()
    core.header.shard = 2
    with pytest.raises(Fault) as caught:
        core.attach()
    assert (caught.value.detail, caught.value.expected, caught.value.found) == ("shard", 1, 2)


def test_a_fired_timer_is_answered_fired_in_its_new_shard() -> None:
    shards = begun(2, TWO)
    shards.of(b"b", b"k").put(b"k", 10, TimeKind.BOOT, namespace=b"b", payload=b"p")
    for core in shards.cores:
        core.advance(10**9)
        core.publish_all()
    core = resharded(shards, 3, THREE).of(b"b", b"k")
    assert core.cancel(b"k", b"b").status == Status.FIRED
    assert core.replay(b"b", b"t", 1, 1)[2][0][5:7] == (b"k", b"p")


def test_a_key_that_stays_unique_moves_with_its_namespace() -> None:
    shards = begun(2, {b"n": (0,)})
    old = shards.of(b"n", b"k")
    (first,) = Owner(old).send(put(b"k", 10, items=wire.encode_unique(2 * 10**9)))
    old.advance(10**9)
    old.publish_all()
    core = resharded(shards, 3, {b"n": (2,)}).of(b"n", b"k")
    (again,) = Owner(core).send(put(b"k", 10))
    assert (again.status, again.ticket) == (Status.EXISTS, first.ticket)
    while core.advance(3 * 10**9):
        core.check()
    core.check()
    assert Owner(core).send(put(b"k", 10))[0].status == Status.ADDED


def test_the_youngest_notices_that_fit_are_kept_and_a_gap_is_reported() -> None:
    shards = begun(2, TWO, replay_capacity=64)
    for n in range(20):
        for name in (b"a", b"b"):
            shards.of(name, b"").put(b"%d" % n, n * MS, TimeKind.BOOT, namespace=name)
        for core in shards.cores:
            core.advance(n * MS)
            core.publish_all()
    [core] = resharded(shards, 1, ONE, replay_capacity=16).cores
    core.check()
    assert [core.replay(name, b"t", 1, 20)[0] for name in (b"a", b"b")] == [12, 12]
    assert {entry.sequence for entry in core.entries()} == set(range(13, 21))


def outcome_of_a_topic_that_went(shards: Shards) -> Owner:
    """Return the owner of an operation of one namespace. The operation has ended and left an
    outcome. Since then, the row of the operation's topic was given to another namespace."""
    core = shards.of(b"other", b"")
    owner = Owner(core)
    owner.send(watch(b"w", ALL, [Key(b"r", 1)], FAR_NS, name=1), advance(b"r", 1, name=1))
    core.put(b"k", FAR_NS, namespace=b"b", topic=b"new")
    assert {row.namespace for row in core.topic_rows().values()} == {b"b"}
    return owner


def test_an_outcome_moves_with_its_namespace_though_its_topic_row_was_reused() -> None:
    shards = begun(2, TWO, topics=1)
    outcome_of_a_topic_that_went(shards)
    new = resharded(shards, 3, THREE)
    assert [mail.key for mail in Owner(new.of(b"other", b"")).mail()] == [b"w"]
    assert [len(core.operations()) for core in new.cores] == [0, 1, 0]


def test_topics_of_a_partitioned_namespace_restart_with_unsent_notices() -> None:
    shards = begun(2, TWO)
    for n in range(8):
        key = b"%d" % n
        shards.of(PARTS, key).put(key, 10 * MS * (n // 4), TimeKind.BOOT, namespace=PARTS)
    for core in shards.cores:
        core.advance(5 * MS)
        core.publish_all()
        core.advance(15 * MS)
    births = {row.incarnation for core in shards.cores for row in core.topic_rows().values()}
    new = resharded(shards, 3, THREE)
    entries = [entry for core in new.cores for entry in core.entries()]
    assert sorted(entry.key for entry in entries) == [b"4", b"5", b"6", b"7"]
    for core in new.cores:
        mine = list(core.entries())
        assert [entry.sequence for entry in mine] == list(range(1, len(mine) + 1))
        assert not births & {row.incarnation for row in core.topic_rows().values()}


def test_the_rows_of_a_bulk_load_of_a_partitioned_namespace_are_known_to_all_its_shards() -> None:
    shards = begun(2, {b"n": (0, 1)})
    for first, core in zip((0, 5000), shards.cores, strict=True):
        Owner(core).bulk_load((BULK_LOAD, first, 3), put(b"%d" % first, FAR_NS))
    for core in resharded(shards, 2, {b"n": (1, 0)}).cores:
        [bulk_load] = core.bulk_loads().values()
        assert (bulk_load.fencing_token, bulk_load.rows) == (3, frozenset({0, 5000}))


@pytest.mark.parametrize(
    ("sizes", "detail"),
    [
        ({"capacity": 4}, "timers armed"),
        ({"namespaces": 3}, "namespaces in use"),
        ({"topics": 4}, "topics in use"),
        ({"watches": 2}, "watches in use"),
        ({"watermarks": 2}, "watch keys in use"),
        ({"payload_bytes": 4096}, "payload memory in use"),
        ({"bulk_loads": 0}, "bulk loads in use"),
        ({"bulk_load_blocks": 0}, "rows of bulk loads in use"),
        ({"accounts": 0}, "accounts in use"),
    ],
)
def test_a_merge_without_space_is_refused_with_its_figures(
    sizes: dict[str, int], detail: str
) -> None:
    ledger, shards = Ledger(1), begun(2, TWO, payload_bytes=1 << 16)
    ledger.fill(shards)
    ledger.operate(shards)
    shards.of(b"c", b"").put(b"large", FAR_NS, namespace=b"c", payload=bytes(5000))
    before = [core.image() for core in shards.cores]
    with pytest.raises(ArenaBroken) as caught:
        resharded(shards, 1, ONE, **sizes)
    assert (caught.value.detail, caught.value.found) == (detail, next(iter(sizes.values())))
    assert caught.value.expected > caught.value.found
    assert [core.image() for core in shards.cores] == before


def test_notices_that_were_not_sent_are_not_left_behind() -> None:
    shards = begun(2, TWO, replay_capacity=64)
    for n in range(12):
        for name in (b"a", b"b"):
            shards.of(name, b"").put(b"%d" % n, 1, TimeKind.BOOT, namespace=name)
    for core in shards.cores:
        core.advance(10**9)
    with pytest.raises(ArenaBroken) as caught:
        resharded(shards, 1, ONE, replay_capacity=16)
    assert (caught.value.detail, caught.value.expected) == ("notices not sent yet", 24)


def test_sessions_that_own_operations_are_never_left_behind() -> None:
    shards = begun(2, TWO, sessions=3)
    for shard, core in enumerate(shards.cores):
        for nonce in range(1, 4):
            arm = watch(b"%d" % nonce, ALL, [Key(b"r", 1)], name=shard)
            Owner(core, nonce + 10 * shard).send(arm)
    with pytest.raises(ArenaBroken) as caught:
        resharded(shards, 1, ONE, sessions=3)
    assert (caught.value.detail, caught.value.expected) == ("sessions open", 6)


def test_only_idle_sessions_without_operations_are_left_behind() -> None:
    shards = begun(1, {b"n": (0,)})
    [core] = shards.cores
    Owner(core, 1).send(watch(b"w", ALL, [Key(b"r", 1)], FAR_NS))
    Owner(core, 2).send(put(b"k", FAR_NS))
    core.advance(61 * 10**9)
    Owner(core, 3)
    lib.pg_heartbeat(core.a, core.now_ns, 1, 1, 1, 0)
    [new] = resharded(shards, 1, {b"n": (0,)}).cores
    retained = new.rows_of_sessions()
    assert len(retained) == 2
    assert Owner(new, 1).id in retained
    assert Owner(new, 3).id in retained


def test_a_session_of_several_shards_is_merged() -> None:
    shards = begun(1, {OWNED: (0,), b"other": (0,)})
    owner = Owner(shards.cores[0])
    owner.send(put(b"k", FAR_NS), put(b"l", FAR_NS, name=1))
    shards = resharded(shards, 2, {OWNED: (0,), b"other": (1,)})
    ahead, behind = [Owner(core) for core in shards.cores]
    answers = ahead.send(watch(b"w", ALL, [Key(b"r", 1)], FAR_NS))
    behind.send(watch(b"w", ALL, [Key(b"r", 1)], FAR_NS, name=1))
    answers = ahead.send(put(b"m", FAR_NS))
    [core] = resharded(shards, 1, {OWNED: (0,), b"other": (0,)}).cores
    met = Owner(core)
    assert core.rows_of_sessions().keys() == {met.id}
    met.newest = renamed(ahead.newest, met.id)
    assert met.again().answers == answers
    met.newest = renamed(behind.newest, met.id)
    with pytest.raises(MessageRefused) as caught:
        met.again()
    assert caught.value.name == "CHANGED"
    met.send(advance(b"r", 1), advance(b"r", 1, name=1))
    assert [mail.key for mail in met.mail()] == [b"w", b"w"]


def half_applied(core: Purgatory, name: int) -> Owner:
    """Return the owner of a batch. A kill came after one record of this batch was applied."""
    owner = Owner(core)
    owner.send(put(b"1", FAR_NS, name=name), put(b"2", FAR_NS, name=name))
    row = Core.rows_of_sessions(core)[0]
    row.last, row.current, row.applied = 0, 1, 1
    core.rebuild(0)
    return owner


def test_a_started_batch_continues_in_the_new_shard_of_its_namespace() -> None:
    shards = begun(2, TWO)
    owner = half_applied(shards.of(OWNED, b""), 0)
    new = resharded(shards, 3, THREE).of(OWNED, b"")
    after = Owner(new)
    assert after.sequence == 0
    tickets = new.header.next_ticket
    after.newest = renamed(owner.newest, after.id)
    assert {answer.status for answer in after.again().answers} == {Status.ADDED}
    assert new.header.next_ticket == tickets
    new.check()


def test_two_started_batches_of_one_number_are_both_in_doubt() -> None:
    shards = begun(2, TWO)
    owners = [half_applied(core, name) for name, core in enumerate(shards.cores)]
    [core] = resharded(shards, 1, ONE).cores
    met = Owner(core)
    for owner in owners:
        met.newest = renamed(owner.newest, met.id)
        with pytest.raises(MessageRefused) as caught:
            met.again()
        assert caught.value.name == "CHANGED"
    assert len(core.scan()) == 4
    core.check()


def test_a_namespace_without_a_route_stays() -> None:
    shards = begun(1, {b"n": (0,)})
    shards.cores[0].put(b"k", FAR_NS, namespace=b"n")
    shards.cores[0].put(b"k", FAR_NS, namespace=b"stays")
    [new] = resharded(shards, 1, {b"n": (0,)}).cores
    assert {row.namespace for row in new.topic_rows().values()} == {b"n"}


def test_namespace_statistics_show_every_change() -> None:
    core = Purgatory(**SIZES)
    owner = Owner(core)
    seen = [namespace_stats(as_arena(core)).get("n", NamespaceStats())]

    def changed() -> None:
        seen.append(namespace_stats(as_arena(core))["n"])
        assert len({*seen}) == len(seen)

    for step in (
        lambda: core.put(b"k", FAR_NS, TimeKind.BOOT),
        lambda: core.put(b"k", FAR_NS + 1, TimeKind.BOOT, mode=lib.PG_MODE_EXTEND),
        lambda: core.put(b"l", FAR_NS, TimeKind.WALL, payload=b"p"),
        lambda: core.put(b"l", FAR_NS, TimeKind.WALL, payload=b"q", mode=lib.PG_MODE_REPLACE),
        lambda: owner.send(watch(b"w", ALL, [Key(b"r", 5)], FAR_NS)),
        lambda: owner.send(advance(b"r", 4)),
        lambda: owner.send(advance(b"r", 5)),
        lambda: core.put(b"due", 1, TimeKind.BOOT),
        lambda: core.advance(10**9),
        core.publish_all,
        lambda: core.set_namespace(b"n", owner_uid=5),
    ):
        step()
        changed()


def test_a_route_without_its_partition_leaves_the_key() -> None:
    core, to = Purgatory(**SIZES), Purgatory(**SIZES, shard=1, shards=2)
    keys = [b"%d" % n for n in range(16)]
    for key in keys:
        core.put(key, FAR_NS)
    merge(as_arena(to), [(as_arena(core), {"n": Route((0, 1), fresh_topics=True)})])
    to.rebuild(0)
    here = {key for key in keys if lib.pg_partition(key, len(key), 2)}
    assert {info.key for info in to.scan()} == here
    assert 0 < len(here) < len(keys)
