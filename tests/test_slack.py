"""Timers with a slack: they fire at instants that neighbours share, never before they are due."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from core_driver import Core
from hypothesis import given
from hypothesis import strategies as st
from real_daemon import PATIENCE_S, StartDaemon

from purgatoryd.clients import Admin, AsyncClient, Client, InvalidArgument, Subscriber, times
from purgatoryd.clients.columns import slacks_of
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import SLACK_MAX_NS, PutMode, Status, TimeKind

pytestmark = pytest.mark.tier("test")

MS = 1_000_000
TICK_NS = 65_536
SECOND_NS = 1_000_000_000
BAD: list[Any] = [
    -1, -0.001, float("nan"), float("inf"), "5ms", b"1", True, [1], 1e6, 10**400,
    timedelta(seconds=-1), timedelta(days=1),
]  # fmt: skip


@pytest.fixture
def client(daemon: StartDaemon) -> Iterator[Client]:
    daemon("demo", "--clock", "virtual")
    with Client("demo", timeout=PATIENCE_S) as client:
        yield client


def fired(core: Core) -> dict[str, int]:
    """Return the time at which each timer fired, by key."""
    return {entry.key.decode(): entry.fired_ns for entry in core.entries()}


def run(core: Core) -> int:
    """Advance the core until nothing is armed. Return the number of instants at which it fired
    timers."""
    while core.metrics.live:
        core.advance(core.next_ns)
    return len({*fired(core).values()})


@given(st.integers(0, 10 * SECOND_NS), st.integers(0, SLACK_MAX_NS), st.integers(1000, 100 * MS))
def test_a_timer_fires_within_its_slack_and_never_early(
    delay_ns: int, within_ns: int, tick_ns: int
) -> None:
    core = Core(tick_ns=tick_ns)
    core.put("k", delay_ns, slack=times.slack(within_ns / 1e9))
    run(core)
    assert delay_ns <= fired(core)["k"] <= delay_ns + within_ns + tick_ns


@given(st.lists(st.floats(0, SLACK_MAX_NS / 1e9), min_size=1), st.integers(0, 47))
def test_a_column_of_slacks_equals_its_rows(seconds: list[float], default: int) -> None:
    rows = [times.slack(value) for value in seconds]
    assert slacks_of(np.array(seconds), default).tolist() == rows
    assert slacks_of(seconds, default).tolist() == rows
    spans = np.array([*(int(value * 1e6) for value in seconds), "NaT"], "m8[us]")
    rows = [times.slack(span) for span in spans.tolist()[:-1]]
    assert slacks_of(spans, default).tolist() == [*rows, default]


@pytest.mark.parametrize("bad", [-1e-9, float("nan"), float("inf"), SLACK_MAX_NS / 1e9 + 1])
def test_a_column_with_a_bad_slack_is_refused(bad: float) -> None:
    for column in (np.array([0, bad]), [0, bad]):
        with pytest.raises(InvalidArgument, match="within"):
            slacks_of(column, 0)


@pytest.mark.parametrize(("within_s", "most"), [(0, 1000), (0.001, 125), (0.005, 16), (1, 1)])
def test_neighbours_share_an_instant(within_s: float, most: int) -> None:
    core = Core(tick_ns=TICK_NS, capacity=2000, replay_capacity=2048)
    for i in range(1000):
        core.put(f"k{i}", 5 * MS + i * TICK_NS, slack=times.slack(within_s))
    wakeups = run(core)
    assert most <= wakeups <= most + 1
    assert len(fired(core)) == 1000


def test_slacks_of_different_lengths_share_an_instant() -> None:
    core = Core(tick_ns=TICK_NS)
    for n in range(10, 30):
        core.put(f"k{n}", (1 << 30) - (1 << n) + 1, slack=n + 1)
    assert run(core) == 1


def test_notices_of_a_topic_are_in_order_of_firing() -> None:
    core = Core(tick_ns=TICK_NS)
    core.put("first", 1 * MS, slack=times.slack(0.1))
    core.put("second", 2 * MS)
    run(core)
    assert [entry.key for entry in core.entries()] == [b"second", b"first"]


def test_slack_does_not_count_as_lateness() -> None:
    core = Core(tick_ns=TICK_NS)
    core.put("k", 1 * MS, slack=times.slack(0.1))
    run(core)
    histogram = core.rows(lib.PG_R_HISTOGRAMS, "pg_histogram")[lib.PG_HG_STRUCTURAL_LATENESS]
    assert histogram.max_ns < TICK_NS


def test_a_rebuild_keeps_the_slack() -> None:
    core = Core(tick_ns=TICK_NS)
    core.put("k", 1 * MS, slack=times.slack(0.1))
    core.rebuild(0)
    core.check()
    core.advance(50 * MS)
    assert not fired(core)
    run(core)
    assert fired(core) == {"k": 1 << 26}


def test_an_extended_timer_keeps_its_slack() -> None:
    core = Core(tick_ns=TICK_NS)
    core.put("k", 1 * MS, slack=times.slack(0.1))
    core.put("k", 70 * MS, mode=PutMode.EXTEND, slack=1)
    run(core)
    assert fired(core) == {"k": 2 << 26}


def test_a_replaced_timer_has_the_new_slack() -> None:
    core = Core(tick_ns=TICK_NS)
    core.put("k", 1 * MS, slack=times.slack(0.1))
    core.put("k", 1 * MS, mode=PutMode.REPLACE, slack=1)
    run(core)
    assert fired(core)["k"] < 2 * MS


def test_a_slack_at_the_end_of_time_is_not_early() -> None:
    core = Core(tick_ns=TICK_NS)
    core.put("k", 2**63 - 1, TimeKind.BOOT, slack=47)
    core.check()
    core.advance(2**63 - 2)
    assert not fired(core)


def set_topic(core: Core, slack_ns: int, topic: bytes = b"t") -> Status:
    message = wire.encode_topic_set(1, b"n", topic, wire.TopicChanges(slack_ns))
    error, answer = core.set_topic(message[wire.FRAME.size :])
    assert error == 0
    return answer.status


def test_a_topic_gives_its_slack_to_timers_without_one() -> None:
    core = Core(tick_ns=TICK_NS)
    core.put("before", 1 * MS)
    assert set_topic(core, 100 * MS) == Status.DONE
    core.put("default", 1 * MS)
    core.put("exact", 1 * MS, slack=times.slack(0))
    run(core)
    assert fired(core)["default"] == 1 << 26
    assert max(fired(core)["before"], fired(core)["exact"]) < 2 * MS


def test_a_topic_with_a_slack_keeps_its_row() -> None:
    core = Core(topics=1)
    assert set_topic(core, MS) == Status.DONE
    assert core.put("k", 0, topic=b"other").status == Status.FULL_TOPICS
    assert set_topic(core, 0) == Status.DONE
    assert core.put("k", 0, topic=b"other").status == Status.ADDED


@pytest.mark.parametrize("slack_ns", [-1, SLACK_MAX_NS + 1])
def test_a_topic_refuses_a_slack_out_of_bounds(slack_ns: int) -> None:
    core = Core()
    changes = wire.TopicChanges(slack_ns)
    body = wire.encode_topic_set(1, b"n", b"t", changes)[wire.FRAME.size :]
    assert core.set_topic(body)[0] == lib.PG_ERR_TOO_LARGE
    assert core.set_topic(body[:-1])[0] == lib.PG_ERR_MALFORMED
    assert not core.topic_rows()


# ---- clients and the daemon ------------------------------------------------------------------


@pytest.mark.parametrize("within", BAD, ids=repr)
def test_a_bad_within_changes_nothing(client: Client, within: Any) -> None:
    rows = [{"key": "a", "delay": 1, "within": within}]
    columns = {"key": ["a"], "delay": [1], "within": [within]}
    with pytest.raises(InvalidArgument, match="within"):
        client.add("a", 1, within=within)
    for many in (rows, columns):
        with pytest.raises(InvalidArgument, match="within"):
            client.add_many(many)
    with Admin("demo") as admin, pytest.raises(InvalidArgument, match="within"):
        admin.set_topic("default", within=within)
    assert client.get("a") is None


def test_every_kind_of_add_takes_a_slack(client: Client) -> None:
    client.add("single", 1, within=timedelta(milliseconds=5))
    client.add_many([{"key": "row", "delay": 1, "within": 0.005}, ("tuple", 1)], within=0.001)
    table = {"key": ["c0", "c1"], "delay": np.ones(2), "within": np.array([0.005, 0])}
    client.add_many(table)
    spans = np.array([5_000_000, 1_000_000], "m8[ns]")
    client.add_many({"key": ["c2", "c3"], "delay": np.ones(2), "within": spans})
    client.add_many({"key": ["all"], "delay": [1]}, within=0.001)

    async def add() -> None:
        async with AsyncClient("demo", timeout=PATIENCE_S) as other:
            await other.add("async", 1, within=0.005)
            await other.add_many([("many", 1)], within=0.005)

    asyncio.run(add())
    found = {
        key: client.get(key).within_ns  # type: ignore[union-attr]
        for key in ("single", "row", "tuple", "c0", "c1", "c2", "c3", "all", "async", "many")
    }
    few, more = 1 << 19, 1 << 22
    assert found == {
        "single": more, "row": more, "tuple": few, "c0": more, "c1": 0, "c2": more,
        "c3": few, "all": few,
        "async": more, "many": more,
    }  # fmt: skip


def test_a_slack_shares_wake_ups_of_the_daemon(client: Client) -> None:
    with Admin("demo") as admin, Subscriber("demo", topics=["default"]) as subscriber:
        admin.set_topic("default", within=0.1)
        armed = [client.add(f"k{i}", delay_ns=MS * (1 + i)) for i in range(50)]
        admin.advance(SECOND_NS)
        notices = [subscriber.get(PATIENCE_S) for _ in armed]
    fired_ns = {notice.fired_boot_ns for notice in notices if notice is not None}
    asked = {timer.ticket: timer.deadline_boot_ns for timer in armed}
    assert asked == {n.ticket: n.deadline_boot_ns for n in notices if n is not None}
    assert len(fired_ns) <= 2
