"""Due timers that do not fire at once: pauses, late policies and paced catch-up, in the core."""

from __future__ import annotations

import random

import pytest
from core_driver import Core

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import ClockKind, LatePolicy, PutMode, Status, TimeKind

pytestmark = pytest.mark.tier("test")

MS = 1_000_000
SECOND_NS = 1_000_000_000
START_NS = 1000 * SECOND_NS
GRACE_NS = 60 * SECOND_NS
NEVER_NS = 2**63 - 1
RATE_PER_S = 1000
BURST = 10
"""Timers that a namespace with this rate may fire at once: the timers of 10 ms."""


def configure(core: Core, topic: bytes = b"t", **changes: object) -> Status:
    """Change settings of a topic of namespace n."""
    message = wire.encode_topic_set(1, b"n", topic, wire.TopicChanges(**changes))  # type: ignore[arg-type]
    error, answer = core.set_topic(message[wire.FRAME.size :])
    assert error == 0
    return answer.status


def at(core: Core, key: str, deadline_ns: int, topic: bytes = b"t") -> None:
    """Arm a timer with a deadline on the core's clock."""
    assert core.put(key, deadline_ns, TimeKind.BOOT, topic=topic).status == Status.ADDED


def keys(core: Core) -> list[str]:
    """Return the keys of the timers that fired, in order."""
    return [entry.key.decode() for entry in core.entries()]


def missed(core: Core) -> list[int]:
    """Return the count of coalesced timers in each notice."""
    core_parts, _ = core.notices()
    return [notice.missed for part in core_parts for notice in part.notices]


def run(core: Core, now_ns: int) -> None:
    """Advance to a time, as often as there is work."""
    while core.advance(now_ns):
        core.check()
    core.check()


def restarted(core: Core, now_ns: int) -> None:
    """Attach and rebuild the arena, as a start after a kill does."""
    core.attach()
    core.rebuild(now_ns)
    core.check()


def booted(**config: object) -> Core:
    """Return a core with the real clock."""
    return Core(clock_kind=ClockKind.BOOT, now_ns=START_NS, **config)


# ---- pauses ----


def test_a_paused_timer_falls_due_without_firing() -> None:
    core = Core()
    configure(core, paused=True)
    at(core, "a", MS)
    at(core, "b", 2 * MS, topic=b"u")
    run(core, 3 * MS)
    assert keys(core) == ["b"]
    assert core.metrics.backlog == core.metrics.live == 1
    assert core.get("a").status == Status.FOUND
    assert core.next_ns == NEVER_NS
    assert core.cancel("a").status == Status.CANCELLED
    assert core.cancel("a").status == Status.UNKNOWN
    core.check()


def test_a_paused_namespace_pauses_all_its_topics() -> None:
    core = Core()
    core.set_namespace(b"n", paused=1)
    at(core, "a", MS)
    at(core, "b", MS, topic=b"u")
    core.put("c", MS, TimeKind.BOOT, namespace=b"other")
    run(core, MS)
    assert keys(core) == ["c"]
    core.set_namespace(b"n", paused=0)
    run(core, MS)
    assert sorted(keys(core)) == ["a", "b", "c"]


def test_a_topic_in_a_paused_namespace_stays_paused_until_both_are_resumed() -> None:
    core = Core()
    configure(core, paused=True)
    core.set_namespace(b"n", paused=1)
    at(core, "a", MS)
    run(core, MS)
    core.set_namespace(b"n", paused=0)
    run(core, 2 * MS)
    assert keys(core) == []
    configure(core, paused=False)
    run(core, 2 * MS)
    assert keys(core) == ["a"]


def test_resumed_timers_fire_in_the_order_of_their_deadlines() -> None:
    core = Core(capacity=200, replay_capacity=256)
    configure(core, paused=True)
    order = list(range(200))
    random.Random(1).shuffle(order)
    for n in order:
        at(core, str(n), (n + 1) * MS)
    run(core, SECOND_NS)
    assert keys(core) == []
    configure(core, paused=False)
    run(core, SECOND_NS)
    assert keys(core) == [str(n) for n in range(200)]


def test_a_pause_and_its_backlog_survive_a_kill() -> None:
    core = booted()
    configure(core, paused=True)
    at(core, "a", START_NS + MS)
    run(core, START_NS + 2 * MS)
    restarted(core, START_NS + 3 * MS)
    run(core, START_NS + 3 * MS)
    assert keys(core) == []
    assert core.metrics.backlog == 1
    assert core.migrated(capacity=500).metrics.live == 1
    configure(core, paused=False)
    run(core, START_NS + 4 * MS)
    assert keys(core) == ["a"]


def test_an_extended_paused_timer_returns_to_the_wheel() -> None:
    core = Core()
    configure(core, paused=True)
    at(core, "a", MS)
    run(core, MS)
    extended = core.put("a", 5 * MS, TimeKind.BOOT, mode=PutMode.EXTEND)
    assert extended.status == Status.EXTENDED
    assert core.metrics.live == 1
    configure(core, paused=False)
    run(core, 4 * MS)
    assert (keys(core), core.metrics.backlog) == ([], 0)
    run(core, 5 * MS)
    assert keys(core) == ["a"]


def test_a_paused_wall_timer_waits_again_after_the_clock_goes_back() -> None:
    core = Core()
    configure(core, paused=True)
    core.put("a", core.header.wall_offset_ns + MS, TimeKind.WALL)
    run(core, 2 * MS)
    assert core.metrics.backlog == 1
    configure(core, paused=False)
    offset_ns = core.header.wall_offset_ns - SECOND_NS
    while core.advance(3 * MS, wall_offset_ns=offset_ns):
        core.check()
    assert keys(core) == []
    while core.advance(2 * SECOND_NS, wall_offset_ns=offset_ns):
        core.check()
    assert keys(core) == ["a"]


def test_a_drain_counts_the_due_timers_of_paused_topics() -> None:
    core = Core()
    configure(core, paused=True)
    at(core, "a", MS)
    at(core, "b", SECOND_NS)
    run(core, MS)
    assert lib.pg_paused_due(core.a) == 1
    assert not lib.pg_drained(core.a)
    configure(core, paused=False)
    assert lib.pg_paused_due(core.a) == 0


# ---- late policies ----


def test_the_policy_skip_ends_timers_beyond_the_grace_without_a_notice() -> None:
    core = Core()
    configure(core, paused=True, late=(LatePolicy.SKIP, GRACE_NS))
    at(core, "late", MS)
    at(core, "in time", 2 * MS)
    run(core, SECOND_NS)
    configure(core, paused=False)
    run(core, GRACE_NS + 2 * MS)
    assert keys(core) == ["in time"]
    assert (core.metrics.skipped, core.metrics.expiries, core.metrics.live) == (1, 1, 0)
    assert core.cancel("late").status == Status.UNKNOWN
    assert core.cancel("in time").status == Status.FIRED


def test_the_policy_coalesce_fires_only_the_last_late_timer() -> None:
    core = Core()
    configure(core, paused=True, late=(LatePolicy.COALESCE, GRACE_NS))
    for n in range(5):
        at(core, str(n), (n + 1) * MS)
    at(core, "in time", SECOND_NS)
    at(core, "other", MS, topic=b"u")
    run(core, GRACE_NS + 5 * MS)
    configure(core, paused=False)
    run(core, GRACE_NS + 6 * MS)
    assert keys(core) == ["other", "4", "in time"]
    assert missed(core) == [0, 4, 0]
    assert core.metrics.coalesced == 4
    assert core.cancel("0").status == Status.UNKNOWN


def test_missed_is_in_the_next_notice_if_the_last_late_timer_is_cancelled() -> None:
    core = Core()
    configure(core, paused=True, late=(LatePolicy.COALESCE, GRACE_NS))
    for n in range(4):
        at(core, str(n), (n + 1) * MS)
    run(core, GRACE_NS + 5 * MS)
    configure(core, paused=False)
    for _ in range(3):
        core.advance(GRACE_NS + 6 * MS, budget=1)
    assert core.metrics.coalesced == 3
    assert core.cancel("3").status == Status.CANCELLED
    restarted(core, GRACE_NS + 7 * MS)
    at(core, "next", GRACE_NS + 8 * MS)
    run(core, GRACE_NS + 8 * MS)
    assert (keys(core), missed(core)) == (["next"], [3])


def test_a_policy_that_is_set_during_a_pause_applies_to_armed_timers() -> None:
    core = Core()
    configure(core, paused=True)
    at(core, "a", MS)
    run(core, 2 * GRACE_NS)
    configure(core, paused=False, late=(LatePolicy.SKIP, GRACE_NS))
    run(core, 2 * GRACE_NS)
    assert (keys(core), core.metrics.skipped) == ([], 1)


def test_lateness_counts_from_the_end_of_the_slack() -> None:
    core = Core()
    configure(core, paused=True, late=(LatePolicy.SKIP, MS))
    core.put("a", MS, TimeKind.BOOT, slack=1 + 30)
    run(core, 1 << 30)
    configure(core, paused=False)
    run(core, (1 << 30) + MS)
    assert keys(core) == ["a"]


def test_a_step_of_the_wall_clock_makes_wall_timers_late() -> None:
    core = booted()
    configure(core, late=(LatePolicy.SKIP, GRACE_NS))
    core.put("skipped", START_NS + SECOND_NS, TimeKind.WALL)
    core.put("fired", START_NS + 2 * GRACE_NS, TimeKind.WALL)
    while core.advance(START_NS + MS, wall_offset_ns=2 * GRACE_NS):
        core.check()
    assert (keys(core), core.metrics.skipped) == (["fired"], 1)


def test_a_topic_with_a_policy_a_pause_or_missed_timers_keeps_its_row() -> None:
    core = Core(topics=1)
    for changes in ({"late": (LatePolicy.SKIP, MS)}, {"paused": True}):
        configure(core, **changes)
        assert core.put("k", 1, topic=b"other").status == Status.FULL_TOPICS
        configure(core, late=(LatePolicy.FIRE, 0), paused=False)
    assert core.put("k", 1, topic=b"other").status == Status.ADDED


@pytest.mark.parametrize(
    "late",
    [(LatePolicy.FIRE, 1), (LatePolicy.SKIP, 0), (LatePolicy.SKIP, MS - 1),
     (LatePolicy.COALESCE, -1), (LatePolicy.SKIP, lib.PG_LATE_GRACE_MAX_NS + 1),
     (lib.PG_LATE_POLICIES, MS)],
)  # fmt: skip
def test_a_policy_out_of_bounds_changes_nothing(late: tuple[int, int]) -> None:
    core = Core()
    message = wire.encode_topic_set(1, b"n", b"t", wire.TopicChanges(late=late))
    assert core.set_topic(message[wire.FRAME.size :])[0] == lib.PG_ERR_TOO_LARGE
    assert core.topic_rows() == {}


# ---- catch-up ----


def late_core(count: int, **settings: int) -> Core:
    """Return a core that starts with `count` timers that came due while no daemon ran."""
    core = booted(capacity=count + 10, replay_capacity=4096)
    core.set_namespace(b"n", **{"late_per_s": RATE_PER_S, **settings})
    for n in range(count):
        at(core, str(n), START_NS + n * MS)
    restarted(core, START_NS + 10 * SECOND_NS)
    return core


def test_late_timers_fire_at_the_rate_of_their_namespace() -> None:
    core, now_ns = late_core(500), START_NS + 10 * SECOND_NS
    run(core, now_ns)
    fired = [len(keys(core))]
    while core.metrics.backlog:
        assert now_ns < core.next_ns <= now_ns + SECOND_NS
        now_ns = core.next_ns
        run(core, now_ns)
        fired.append(len(keys(core)))
        passed_ns = now_ns - START_NS - 10 * SECOND_NS
        assert fired[-1] <= 1 + BURST + passed_ns * RATE_PER_S / SECOND_NS
    assert fired[0] <= 1 + BURST
    assert keys(core) == [str(n) for n in range(500)]


def test_a_timer_that_comes_due_during_a_catch_up_does_not_wait_for_it() -> None:
    core, now_ns = late_core(500), START_NS + 10 * SECOND_NS
    at(core, "live", now_ns + MS)
    run(core, now_ns)
    behind = core.metrics.backlog
    run(core, now_ns + MS)
    assert "live" in keys(core)[-3:]
    assert core.metrics.backlog >= behind - 2


def test_each_namespace_catches_up_at_its_own_rate() -> None:
    core = booted(capacity=1000, replay_capacity=4096)
    for namespace, rate in ((b"n", 1000), (b"m", 10)):
        core.set_namespace(namespace, late_per_s=rate)
        for n in range(300):
            core.put(f"{n}", START_NS, TimeKind.BOOT, namespace=namespace)
    restarted(core, START_NS + SECOND_NS)
    now_ns = START_NS + SECOND_NS
    while now_ns < START_NS + 2 * SECOND_NS:
        run(core, now_ns)
        now_ns += MS
    fired = [entry.namespace for entry in core.entries()]
    assert fired.count(b"n") == 300
    assert 9 <= fired.count(b"m") <= 12


def test_a_loop_that_stood_still_catches_up_at_the_rate() -> None:
    core = booted(capacity=600, replay_capacity=4096)
    core.set_namespace(b"n", late_per_s=RATE_PER_S)
    for n in range(500):
        at(core, str(n), START_NS + SECOND_NS)
    run(core, START_NS)
    run(core, START_NS + 60 * SECOND_NS)
    assert 1 <= len(keys(core)) <= 1 + BURST


def test_a_burst_of_live_timers_is_not_paced() -> None:
    core = booted(capacity=600, replay_capacity=4096)
    core.set_namespace(b"n", late_per_s=RATE_PER_S)
    for n in range(500):
        at(core, str(n), START_NS + SECOND_NS)
    run(core, START_NS + SECOND_NS)
    assert len(keys(core)) == 500


def test_skipped_timers_do_not_wait_for_the_rate() -> None:
    core, now_ns = late_core(500, late_per_s=1), START_NS + 10 * SECOND_NS
    configure(core, late=(LatePolicy.SKIP, MS))
    run(core, now_ns)
    assert (core.metrics.skipped, core.metrics.live) == (500, 0)


def test_coalesced_timers_of_an_outage_fire_once() -> None:
    core, now_ns = late_core(500), START_NS + 10 * SECOND_NS
    configure(core, late=(LatePolicy.COALESCE, MS))
    run(core, now_ns)
    assert (keys(core), missed(core)) == (["499"], [499])


def test_a_paused_backlog_of_many_timers_costs_an_advance_nothing() -> None:
    core, now_ns = late_core(500, paused=1), START_NS + 10 * SECOND_NS
    run(core, now_ns)
    work = core.metrics.iteration_work
    for n in range(100):
        assert not core.advance(now_ns + n)
    assert core.metrics.iteration_work == work
    assert core.next_ns == NEVER_NS


def test_a_full_replay_buffer_stops_a_catch_up_and_loses_nothing() -> None:
    core = Core(capacity=40, replay_capacity=16)
    configure(core, paused=True)
    for n in range(40):
        at(core, str(n), (n + 1) * MS)
    run(core, SECOND_NS)
    configure(core, paused=False)
    found: list[str] = []
    while core.metrics.live:
        core.advance(SECOND_NS)
        parts, upto = core.notices()
        found += [str(n.key) for part in parts for n in part.notices]
        core.published(upto)
        core.check()
    assert found == [str(n) for n in range(40)]
