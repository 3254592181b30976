"""Schedules with real daemons: counted over kills, recovered from the WAL, moved to other sizes."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import struct
import subprocess
import sys
import threading
import time
import zoneinfo
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from jobs_driver import JobsCore, Session
from other_user import run_as
from partitioned import start_partitioned
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    eventually,
    notices,
    remove_arena_files,
    stats,
)

from purgatoryd.cli.exits import Exit
from purgatoryd.clients import (
    Admin,
    AsyncClient,
    CancelResult,
    Client,
    Consumer,
    DaemonError,
    Full,
    InvalidArgument,
    InvalidKey,
    InvalidName,
    MessageRefused,
    Notice,
    Schedule,
    ScheduleRefused,
    Subscriber,
    UidShareExceeded,
)
from purgatoryd.clients.schedules import _schedule
from purgatoryd.daemon.schedules import ZONES_EVERY_NS, Schedules
from purgatoryd.shm_layout import cron, wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Arena, Reader
from purgatoryd.shm_layout.errors import ProtocolError
from purgatoryd.shm_layout.layout import ScheduleAction, Status
from purgatoryd.shm_layout.wire import ScheduleAsk

pytestmark = pytest.mark.tier("all")

SECOND_NS = 10**9
HOUR_NS = 3600 * SECOND_NS
ORIGIN_NS = 1_800_000_000 * SECOND_NS  # 2027-01-15T08:00:00Z
ORIGIN = datetime(2027, 1, 15, 8, tzinfo=UTC)
VIRTUAL = ("--clock", "virtual", "--wall-origin", "2027-01-15T08:00:00Z")


def client(**options: Any) -> Client:
    return Client("demo", namespace="shop", timeout=PATIENCE_S, **options)


def subscriber() -> Subscriber:
    return Subscriber("demo", namespace="shop", topics=["ticks"])


def taken(source: Subscriber, count: int) -> list[Notice]:
    found = [source.get(timeout=PATIENCE_S) for _ in range(count)]
    return [notice for notice in found if notice is not None]


def nominal(found: list[Notice]) -> list[datetime]:
    return [notice.occurrence.nominal for notice in found if notice.occurrence is not None]


def advance(hours: float, more_ns: int = 1_000_000) -> None:
    """Move the virtual clock to so many hours, and a bit more, because timers fire at a tick's
    end."""
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.advance(round(hours * HOUR_NS) + more_ns)


def command(
    daemon: Daemon, *args: str, group: str = "schedules"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "purgatoryd.cli", group, *args, "--name", "demo",
         "--namespace", "shop"],
        env=daemon.env, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


def fired(one: Daemon) -> list[tuple[str, int]]:
    """Schedule and nominal time of each notice in the replay buffer, in order."""
    reader = Reader.attach(one.paths)
    try:
        keys = (str(raw.key).rpartition("@") for raw in notices(reader, "shop", "ticks"))
        return [(schedule, int(at)) for schedule, _, at in keys]
    finally:
        reader.close()


# ---- occurrences ---------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_an_occurrence_has_the_nominal_time_the_topic_and_the_payload(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as one, subscriber() as source:
        put = one.put_schedule("tide", every=3600, topic="ticks", payload=b"hi", count=2)
        assert put.next == ORIGIN + timedelta(hours=1)
        assert put.previous == put.put_at == ORIGIN
        advance(5)
        found = taken(source, 2)
        assert nominal(found) == [ORIGIN + timedelta(hours=1), ORIGIN + timedelta(hours=2)]
        assert [notice.payload for notice in found] == [b"hi", b"hi"]
        assert [notice.key for notice in found] == [
            f"tide@{ORIGIN_NS + HOUR_NS}",
            f"tide@{ORIGIN_NS + 2 * HOUR_NS}",
        ]
        assert {notice.occurrence.schedule for notice in found if notice.occurrence} == {"tide"}
        assert source.get(timeout=0) is None
        ended = one.get_schedule("tide")
        assert ended is not None
        assert (ended.occurrences, ended.next, ended.deadline) == (2, None, None)


@pytest.mark.tier("test")
def test_cron_fires_at_each_local_time_of_a_month_however_far_the_clock_moves(
    daemon: StartDaemon,
) -> None:
    daemon("demo", *VIRTUAL)
    with client() as one, subscriber() as source:
        one.put_schedule("night", cron="30 2 * * *", tz="Europe/Berlin", topic="ticks")
        advance(24 * 90)
        end_ns = ORIGIN_NS + 24 * 90 * HOUR_NS
        expected = cron.times("30 2 * * *", "Europe/Berlin", ORIGIN_NS, end_ns, 200)
        found = taken(source, len(expected))
        assert [n.occurrence.nominal_ns for n in found if n.occurrence] == expected
        assert all(n.fired_boot_ns - n.deadline_boot_ns < SECOND_NS for n in found)
        assert source.get(timeout=0) is None


def test_schedules_of_many_kinds_fire_exactly_under_the_virtual_clock(
    daemon: StartDaemon,
) -> None:
    daemon("demo", *VIRTUAL)
    specs = {f"cron {n}": f"{n} */{1 + n % 5} * * *" for n in range(20)}
    with client() as one, subscriber() as source:
        for key, spec in specs.items():
            one.put_schedule(key, cron=spec, topic="ticks")
        for n in range(20):
            one.put_schedule(f"every {n}", every=600 + 60 * n, topic="ticks")
        end_ns = 0
        expected: Counter[str] = Counter()
        for hours in (0.5, 7, 7.25, 30):
            advance(hours)
            end_ns = round(hours * HOUR_NS)
        for key, spec in specs.items():
            for at in cron.times(spec, "", ORIGIN_NS, ORIGIN_NS + end_ns, 10_000):
                expected[f"{key}@{at}"] += 1
        for n in range(20):
            step = (600 + 60 * n) * SECOND_NS
            for at in range(ORIGIN_NS + step, ORIGIN_NS + end_ns + 1, step):
                expected[f"every {n}@{at}"] += 1
        assert Counter(str(n.key) for n in taken(source, expected.total())) == expected
        assert source.get(timeout=0) is None


@pytest.mark.tier("test")
def test_jitter_delays_an_occurrence_and_never_past_the_next_one(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as one, subscriber() as source:
        one.put_schedule("cron", cron="0 * * * *", topic="ticks", jitter=86_400)
        one.put_schedule("every", every=3600, topic="ticks", jitter=86_400)
        advance(101)
        found = taken(source, 200)
        late = [
            n.deadline_boot_ns + n.wall_offset_ns - n.occurrence.nominal_ns
            for n in found if n.occurrence
        ]  # fmt: skip
        assert all(0 <= ns < HOUR_NS for ns in late)
        assert len(set(late)) > 150
        assert max(late) > HOUR_NS // 2 > min(late)


@pytest.mark.tier("test")
def test_an_occurrence_that_is_cancelled_is_skipped(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as one, subscriber() as source:
        one.put_schedule("tide", every=3600, topic="ticks", count=3)
        assert one.cancel(f"tide@{ORIGIN_NS + HOUR_NS}") is CancelResult.CANCELLED
        advance(9)
        assert nominal(taken(source, 2)) == [ORIGIN + timedelta(hours=n) for n in (2, 3)]
        assert source.get(timeout=0) is None


def test_a_timer_with_the_key_of_an_occurrence_stands_for_it(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as one, subscriber() as source:
        key = f"tide@{ORIGIN_NS + 2 * HOUR_NS}"
        one.add(key, 3 * 3600, topic="ticks", payload=b"own")
        one.put_schedule("tide", every=3600, topic="ticks", count=3)
        advance(9)
        assert [n.payload for n in taken(source, 3) if n.key == key] == [b"own"]
        assert source.get(timeout=0) is None


@pytest.mark.tier("test")
def test_an_occurrence_whose_key_stays_unique_is_skipped_and_counted(daemon: StartDaemon) -> None:
    served = daemon("demo", *VIRTUAL)
    with client() as one, subscriber() as source:
        key = f"tide@{ORIGIN_NS + 2 * HOUR_NS}"
        one.add(key, 1800, topic="ticks", payload=b"own", unique_for=8 * 3600)
        advance(0.75)
        one.put_schedule("tide", cron="0 * * * *", topic="ticks", count=3)
        advance(9)
        found = taken(source, 3)
        assert [n.payload for n in found if n.key == key] == [b"own"]
        assert nominal(found) == [ORIGIN + timedelta(hours=n) for n in (1, 3)]
        assert source.get(timeout=0) is None
        assert stats(served)["skipped"] == 1


@pytest.mark.tier("test")
def test_a_schedule_needs_no_client(daemon: StartDaemon) -> None:
    served = daemon("demo")
    with client() as one:
        put = one.put_schedule("tide", every=0.02, topic="ticks", count=20)
        one.put_schedule("cron", cron="* * * * *", topic="ticks")
    eventually(lambda: stats(served)["expiries"] >= 20)
    found = [at for key, at in fired(served) if key == "tide"]
    first_ns = found[0] - 20_000_000
    assert found == [first_ns + n * 20_000_000 for n in range(1, 21)]
    assert abs(first_ns - put.put_at.timestamp() * 1e9) < 10**6
    assert stats(served)["schedules_armed"] == 1


# ---- put -------------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_a_put_with_the_same_settings_changes_nothing_and_another_one_is_a_revision(
    daemon: StartDaemon,
) -> None:
    daemon("demo", *VIRTUAL)
    with client() as one, subscriber() as source:
        first = one.put_schedule("report", cron="0 9 * * *", topic="ticks", payload=b"1")
        advance(24)
        same = one.put_schedule("report", cron="0 9 * * *", topic="ticks", payload=b"1")
        assert (same.revision, same.put_at) == (1, first.put_at)
        other = one.put_schedule("report", cron="0 10 * * *", topic="ticks", payload=b"2")
        assert other.revision == 2
        assert other.next == datetime(2027, 1, 16, 10, tzinfo=UTC)
        advance(49)
        found = taken(source, 2)
        assert [n.payload for n in found] == [b"1", b"2"]
        assert source.get(timeout=0) is None
        for change in (
            {"cron": "0 11 * * *"}, {"tz": "Asia/Tokyo"}, {"topic": "other"}, {"payload": b"3"},
            {"count": 7}, {"until": ORIGIN + timedelta(days=99)}, {"jitter": 1},
        ):  # fmt: skip
            settings: dict[str, Any] = {"cron": "0 10 * * *", "topic": "ticks", "payload": b"2"}
            before = one.put_schedule("report", **settings)
            after = one.put_schedule("report", **settings | change)
            assert after.revision == before.revision + 1, change


def due_by_tag(one: Client, tag: str) -> list[str]:
    """Return the keys of the schedules whose armed occurrence has the tag."""
    found = one.list_timers(tag=tag).timers
    return sorted(str(timer.key).rpartition("@")[0] for timer in found)


@pytest.mark.tier("test")
def test_occurrences_have_the_tag_of_their_schedule(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    long = "ö" * 31 + "x"  # 63 bytes
    with client() as one, subscriber() as source:
        put = one.put_schedule("every", every=3600, topic="ticks", payload=b"e", tag="tide")
        assert (put.tag, put.payload, put.revision) == ("tide", b"e", 1)
        one.put_schedule("cron", cron="0 * * * *", tz="Asia/Kolkata", topic="ticks", tag="tide")
        one.put_schedule("long", every=3600, topic="ticks", payload=b"l", tag=long)
        one.put_schedule("none", every=3600, topic="ticks")
        for hour in (1, 2, 3):
            assert due_by_tag(one, "tide") == ["cron", "every"]
            assert due_by_tag(one, long) == ["long"]
            advance(hour)
            assert Counter(n.payload for n in taken(source, 4)) == {b"e": 1, b"l": 1, b"": 2}


@pytest.mark.tier("test")
def test_another_tag_or_priority_is_a_revision(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as one:
        put = partial(one.put_schedule, "a", every=3600, topic="ticks")
        settings: list[dict[str, Any]] = [
            {}, {"tag": "x"}, {"tag": "y"}, {"tag": "y", "priority": 0},
            {"tag": "y", "priority": 9}, {"priority": 9}, {},
        ]  # fmt: skip
        for revision, given in enumerate(settings, 1):
            for _ in range(2):
                found = put(**given)
                assert found.revision == revision
                assert (found.tag, found.priority) == (given.get("tag"), given.get("priority"))
            assert one.count_timers(tag="y") == (given.get("tag") == "y")
        for tag in ("", "x" * 64, "a\0b"):
            with pytest.raises(InvalidName):
                put(tag=tag)
        priorities: list[Any] = [-1, 10, True, "9"]
        for priority in priorities:
            with pytest.raises(InvalidArgument):
                put(priority=priority)


@pytest.mark.tier("test")
def test_jobs_of_occurrences_have_the_priority_of_their_schedule(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    advance(24, 0)
    with client() as one, Consumer("demo", namespace="shop", group="g", topics=["ticks"]) as jobs:
        one.put_schedule("low", every=3600, topic="ticks", tag="tide", priority=1)
        one.put_schedule("high", every=3600, topic="ticks", tag="tide", priority=8)
        assert one.cancel_where(tag="tide", prefix="low").done == 1
        for key in ("low", "high"):
            one.trigger_schedule(key)
            start = ORIGIN + timedelta(hours=2)
            assert one.backfill_schedule(key, start, start + timedelta(hours=2)).armed == 3
        found = [job for _ in range(8) if (job := jobs.get(timeout=PATIENCE_S)) is not None]
        priorities = {"low": 1, "high": 8}
        keys = [str(job.key).rpartition("@")[0] for job in found]
        assert Counter(keys) == {"low": 4, "high": 4}
        assert [job.priority for job in found] == [priorities[key] for key in keys]
        assert due_by_tag(one, "tide") == ["high", "low"]
        for job in found:
            job.ack()


def test_until_and_count_end_a_schedule(daemon: StartDaemon) -> None:
    served = daemon("demo", *VIRTUAL)
    with client() as one, subscriber() as source:
        until = ORIGIN + timedelta(hours=3)
        one.put_schedule("a", cron="0 * * * *", topic="ticks", until=until)
        one.put_schedule("b", every=3600, topic="ticks", until=until)
        one.put_schedule("c", cron="0 * * * *", topic="ticks", count=2)
        advance(50)
        found = Counter(n.occurrence.schedule for n in taken(source, 8) if n.occurrence)
        assert found == {"a": 3, "b": 3, "c": 2}
        assert source.get(timeout=0) is None
        assert [s.next for s in one.schedules()] == [None, None, None]
        assert stats(served)["schedules_armed"] == 0


@pytest.mark.tier("test")
def test_a_schedule_without_an_occurrence_is_refused(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as one:
        refusals: dict[str, dict[str, Any]] = {
            "NO_OCCURRENCE": {"cron": "0 0 29 2 *", "until": ORIGIN + timedelta(days=30)},
            "BAD_SPEC": {"cron": "@daily", "tz": "Europe/Nowhere"},
        }
        for reason, settings in refusals.items():
            with pytest.raises(ScheduleRefused) as caught:
                one.put_schedule("bad", **settings)
            assert caught.value.reason == reason
        with pytest.raises(ScheduleRefused, match="no occurrence"):
            one.put_schedule("bad", every=60, until=ORIGIN)
        for settings in (
            {"cron": "61 * * * *"}, {"cron": "* * * *"}, {"cron": "0 0 31 2 *"}, {}, {"every": 0},
            {"every": 1, "cron": "@daily"}, {"every": 1, "tz": "UTC"}, {"every": -1},
            {"every": 1, "count": 0}, {"every": 1, "jitter": -1}, {"every": "1"}, {"every": True},
            {"cron": "@daily", "tz": 3}, {"cron": 5}, {"cron": "0 " * 200},
        ):  # fmt: skip
            with pytest.raises(InvalidArgument):
                one.put_schedule("bad", **settings)
        for key in ("", "k" * 235, b"bytes", 7):
            with pytest.raises(InvalidKey):
                one.put_schedule(key, every=1)  # type: ignore[arg-type]
        assert one.schedules() == []


def test_the_table_of_schedules_is_limited(daemon: StartDaemon) -> None:
    served = daemon("demo", "--schedules", "3")
    with client() as one:
        for n in range(3):
            one.put_schedule(f"s{n}", every=60)
        with pytest.raises(ScheduleRefused, match="3 of 3 schedules exist"):
            one.put_schedule("more", every=60)
        assert one.delete_schedule("s1")
        one.put_schedule("more", every=60)
        assert [s.key for s in one.schedules()] == ["more", "s0", "s2"]
        assert stats(served)["refused_schedules"] == 1


def test_a_schedule_keeps_its_topic_while_it_is_paused(daemon: StartDaemon) -> None:
    daemon("demo", "--topics", "2")
    with client() as one:
        one.put_schedule("a", every=3600, topic="mine")
        one.pause_schedule("a")
        one.add("x", 3600, topic="second")
        with pytest.raises(Exception, match="topic"):
            one.add("y", 3600, topic="third")
        assert one.delete_schedule("a")
        one.add("y", 3600, topic="third")


# ---- pause, trigger, backfill, preview -------------------------------------------------------


@pytest.mark.tier("test")
def test_occurrences_during_a_pause_do_not_happen(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as one, subscriber() as source:
        one.put_schedule("cron", cron="0 * * * *", topic="ticks", count=4)
        one.put_schedule("every", every=3600, topic="ticks", count=4)
        advance(1.5)
        assert one.pause_schedule("cron").paused
        assert one.pause_schedule("every").paused
        assert one.pause_schedule("every").next is None
        advance(5.5)
        for key in ("cron", "every"):
            resumed = one.resume_schedule(key)
            assert resumed.next == ORIGIN + timedelta(hours=6)
            assert resumed.occurrences == 2, "the occurrence that was taken back is not counted"
            assert one.resume_schedule(key) == resumed
        advance(30)
        found = nominal(taken(source, 8))
        assert Counter(found) == {ORIGIN + timedelta(hours=n): 2 for n in (1, 6, 7, 8)}
        assert source.get(timeout=0) is None


@pytest.mark.tier("test")
def test_a_trigger_fires_at_once_and_is_not_repeated(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as one, subscriber() as source:
        one.put_schedule("yearly", cron="@yearly", topic="ticks", payload=b"p", count=5)
        moment = datetime(2026, 5, 1, tzinfo=UTC)
        ticket = one.trigger_schedule("yearly", moment)
        notice = taken(source, 1)[0]
        assert (notice.ticket, notice.payload) == (ticket, b"p")
        assert nominal([notice]) == [moment]
        assert one.trigger_schedule("yearly", moment) == ticket, "its notice is there"
        assert one.trigger_schedule("yearly") != ticket
        taken(source, 1)
        found = one.get_schedule("yearly")
        assert found is not None
        assert found.occurrences == 1, "only the armed one is counted"
        for call in (one.trigger_schedule, one.pause_schedule, one.resume_schedule):
            with pytest.raises(ScheduleRefused, match="no schedule"):
                call("unknown")


@pytest.mark.tier("test")
def test_a_backfill_fires_each_missed_occurrence_once(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    advance(24 * 40, 0)
    now = ORIGIN + timedelta(days=40)
    with client() as one, subscriber() as source:
        one.put_schedule("cron", cron="0 * * * *", topic="ticks")
        one.put_schedule("every", every=3600, topic="ticks")
        for key in ("cron", "every"):
            filled = one.backfill_schedule(key, now - timedelta(days=20), now)
            assert filled.armed == len(filled.nominal) == 24 * 20 + 1
            with Admin("demo", timeout=PATIENCE_S) as admin:
                admin.advance(24 * 40 * HOUR_NS)
            assert sorted(nominal(taken(source, filled.armed))) == filled.nominal
            again = one.backfill_schedule(key, now - timedelta(days=21), now)
            assert again.armed == 24
            assert set(filled.nominal) < set(again.nominal)
            taken(source, 24)
        with pytest.raises(MessageRefused):
            one.backfill_schedule("cron", now, now + timedelta(hours=1))
        with pytest.raises(InvalidArgument):
            one.backfill_schedule("cron", now, now - timedelta(hours=1))


def test_a_backfill_may_begin_at_the_begin_of_1970(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    begin = datetime(1970, 1, 1, tzinfo=UTC)
    with client() as one:
        one.put_schedule("cron", cron="0 * * * *", topic="ticks")
        filled = one.backfill_schedule("cron", begin, begin + timedelta(hours=3))
    assert filled.nominal == [begin + timedelta(hours=n) for n in range(4)]
    assert filled.armed == 4


def test_a_preview_agrees_with_the_occurrences(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as one, subscriber() as source:
        one.put_schedule("cron", cron="*/20 * * * *", topic="ticks", count=6)
        one.put_schedule("every", every=1200, topic="ticks", count=6)
        for key in ("cron", "every"):
            preview = one.preview_schedule(key, 10)
            assert len(preview) == 6
            assert preview == [ORIGIN + timedelta(minutes=20 * n) for n in range(1, 7)]
        free = one.preview_schedule(n=2, cron="0 9 * * *", tz="Asia/Kolkata", start=ORIGIN)
        assert free == [
            datetime(2027, 1, 16, 3, 30, tzinfo=UTC) + timedelta(days=n) for n in (0, 1)
        ]
        assert len(one.preview_schedule(n=3, every=60, until=ORIGIN + timedelta(seconds=130))) == 2
        advance(2)
        assert Counter(nominal(taken(source, 12))) == dict.fromkeys(preview, 2)
        assert one.preview_schedule("cron") == []
        with pytest.raises(InvalidArgument):
            one.preview_schedule("cron", 3, cron="@daily")


@pytest.mark.tier("test")
def test_the_asyncio_client_has_the_same_calls(daemon: StartDaemon) -> None:
    daemon("demo")

    async def use() -> None:
        async with AsyncClient("demo", namespace="shop", timeout=PATIENCE_S) as one:
            put: Schedule = await one.put_schedule(
                "a", every=3600, topic="ticks", tag="tide", priority=3
            )
            assert (put.tag, put.priority) == ("tide", 3)
            got = await one.get_schedule("a")
            assert got is not None
            assert replace(got, deadline=put.deadline) == put  # the wall clock may have moved
            assert [s.key for s in await one.schedules()] == ["a"]
            assert (await one.pause_schedule("a")).paused
            assert not (await one.resume_schedule("a")).paused
            assert await one.trigger_schedule("a") > 0
            now = datetime.now(UTC)
            filled = await one.backfill_schedule("a", now - timedelta(hours=2), now)
            assert filled.armed == 2
            assert len(await one.preview_schedule("a", 3)) == 3
            assert await one.delete_schedule("a")
            assert not await one.delete_schedule("a")
            assert await one.get_schedule("a") is None

    asyncio.run(use())


@pytest.mark.tier("test")
def test_the_commands_put_show_and_run_schedules(daemon: StartDaemon) -> None:
    one = daemon("demo")
    put = command(one, "put", "a", "--cron", "0 9 * * 1-5", "--tz", "Europe/Berlin", "--topic", "t",
                  "--payload", "p", "--count", "3", "--jitter", "5s", "--tag", "tide",
                  "--priority", "7", "--json")  # fmt: skip
    record = json.loads(put.stdout)
    assert (record["tag"], record["priority"]) == ("tide", 7)
    assert (record["revision"], record["cron"], record["jitter_ns"]) == (
        1,
        "0 9 * * 1-5",
        5 * 10**9,
    )
    assert "revision 1" in command(one, "put", "b", "--every", "1h").stdout
    listed = command(one, "ls", "--json").stdout.splitlines()
    assert [json.loads(line)["key"] for line in listed] == ["a", "b"]
    assert "0 9 * * 1-5 Europe/Berlin" in command(one, "ls").stdout
    shown = dict(line.split(maxsplit=1) for line in command(one, "show", "a").stdout.splitlines())
    assert (shown["tz"], shown["jitter"], shown["every"]) == ("Europe/Berlin", "5s", "-")
    assert (shown["tag"], shown["priority"]) == ("tide", "7")
    assert "a@" in command(one, "ls", "--tag", "tide", group="timers").stdout
    shown_b = command(one, "show", "b").stdout.splitlines()
    assert f"{'every':<12}1h" in shown_b
    assert "paused" in command(one, "pause", "a").stdout
    assert "resumed a, revision 1" in command(one, "resume", "a").stdout
    assert "triggered a" in command(one, "trigger", "a").stdout
    filled = command(one, "backfill", "a", "2026-01-05T00:00Z", "2026-01-07T00:00Z")
    assert "armed 2 of 2" in filled.stdout
    assert len(command(one, "next", "a", "--count", "2").stdout.split()) == 2
    assert len(command(one, "next", "--every", "10s").stdout.split()) == 5
    assert command(one, "rm", "a").returncode == Exit.DONE
    assert command(one, "rm", "a").returncode == Exit.NEGATIVE
    assert command(one, "show", "a").returncode == Exit.NEGATIVE
    assert command(one, "put", "c").returncode == Exit.USAGE
    assert command(one, "next").returncode == Exit.USAGE


# ---- kills and restarts ----------------------------------------------------------------------


@pytest.mark.costly("a daemon is killed forty times")
@pytest.mark.parametrize("durable", [False, True], ids=["arena", "wal"])
def test_many_kills_lose_and_double_no_occurrence(
    daemon: StartDaemon, tmp_path: Path, durable: bool
) -> None:
    args = ("--wal-dir", str(tmp_path / "wal")) if durable else ()
    one = daemon("demo", "--replay-buffer", "65536", *args)
    step_ns, schedules, kills = 20_000_000, 8, 40
    chance = random.Random(11)
    with client() as caller:
        for n in range(schedules):
            caller.put_schedule(f"s{n}", every=step_ns / 1e9, topic="ticks", jitter=0.01 * (n % 2))
        caller.put_schedule("cron", cron="* * * * *", topic="ticks")
        firsts = {s.key: s.put_at for s in caller.schedules()}
    started = time.monotonic()
    for _ in range(kills):
        time.sleep(chance.random() * 0.05)
        one.kill()
        one.start()
    with client() as caller:
        for schedule in caller.schedules():
            caller.pause_schedule(schedule.key)
        ended = {s.key: s for s in caller.schedules()}
    took = time.monotonic() - started
    found = fired(one)
    total = 0
    for n in range(schedules):
        schedule = ended[f"s{n}"]
        times = sorted(at for key, at in found if key == schedule.key)
        assert len(times) == len(set(times)) == schedule.occurrences
        assert all(b - a == step_ns for a, b in itertools.pairwise(times))
        assert abs(times[0] - step_ns - firsts[schedule.key].timestamp() * 1e9) < 10**6
        total += len(times)
    minutes = sorted(at for key, at in found if key == "cron")
    assert len(minutes) == len(set(minutes)) == ended["cron"].occurrences
    assert total > schedules * 20
    print(f"{total} occurrences over {kills} kills in {took:.1f} s")


SPANS = datetime(2020, 1, 1, tzinfo=UTC)


def until_answered(call: Callable[[Client], Any], ended: threading.Event) -> bool:
    """Make a call again until a daemon has answered it. False = the test has ended first."""
    while not ended.is_set():
        with suppress(DaemonError), client() as caller:
            call(caller)
            return True
    return False


def attack(name: str, ended: threading.Event, chance: random.Random) -> list[int]:
    """Put, pause, resume and trigger a schedule until the test ends. Return the nominal times of
    its triggers."""
    asked: list[int] = []
    for n in itertools.count():
        at = SPANS + timedelta(seconds=10 * n)
        calls: list[Callable[[Client], Any]] = [
            lambda c: c.put_schedule(name, every=0.01 + 0.001 * chance.randrange(9), topic="ticks"),
            lambda c: c.pause_schedule(name),
            lambda c: c.resume_schedule(name),
            functools.partial(Client.trigger_schedule, key=name, nominal=at),
        ]
        for call in chance.sample(calls[:3], chance.randrange(4)) + calls[3:]:
            if not until_answered(call, ended):
                return asked
        asked.append(round(at.timestamp()) * SECOND_NS)
    return asked


def backfills(name: str, ended: threading.Event) -> int:
    """Backfill spans of 99 ms of a schedule until the test ends. Return their number."""
    done = 0
    for n in itertools.count():
        start = SPANS + timedelta(seconds=10 * n)
        end = start + timedelta(seconds=0.099)
        call = functools.partial(Client.backfill_schedule, key=name, start=start, end=end)
        if not until_answered(call, ended):
            return done
        done += 1
    return done


@pytest.mark.costly("a daemon is killed fifty times")
@pytest.mark.parametrize("durable", [False, True], ids=["arena", "wal"])
def test_calls_and_storms_over_many_kills_fire_each_occurrence_once(
    daemon: StartDaemon, tmp_path: Path, durable: bool
) -> None:
    args = ("--wal-dir", str(tmp_path / "wal")) if durable else ()
    one = daemon("demo", "--replay-buffer", "1048576", *args)
    chance, ended, step_ns = random.Random(5), threading.Event(), 10_000_000
    storm, ends = [f"storm {n}" for n in range(12)], dict[str, datetime | None]()
    with client() as caller:
        for name in (*storm, "a", "b"):
            caller.put_schedule(name, every=0.01, topic="ticks")
        caller.put_schedule("fill", every=0.033, topic="ticks")
    with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        stack.callback(ended.set)
        attacks = {name: pool.submit(attack, name, ended, random.Random(name)) for name in "ab"}
        filled = pool.submit(backfills, "fill", ended)
        for kill in range(50):
            name, until = f"short {kill}", datetime.now(UTC) + timedelta(seconds=1)
            limit: dict[str, Any] = {"until": until} if kill % 2 else {"count": 25}
            with client() as caller, suppress(ScheduleRefused):  # a slow machine: it is too late
                caller.put_schedule(name, every=0.01, topic="ticks", **limit)
                ends[name] = until if kill % 2 else None
            time.sleep(chance.random() * 0.05)
            one.kill()
            one.start()
        ended.set()
        asked = {name: found.result(2 * PATIENCE_S) for name, found in attacks.items()}
        fills = filled.result(2 * PATIENCE_S)
    with client() as caller:
        eventually(lambda: all(s.next is None for s in caller.schedules() if s.key in ends))
        for name in (*storm, "fill", "a", "b"):
            caller.pause_schedule(name)
        schedules = {s.key: s for s in caller.schedules()}
    found = fired(one)
    assert len(found) == len(set(found)), "none is doubled"
    times = {name: sorted(at for key, at in found if key == name) for name in schedules}
    for name in (*storm, *ends):
        assert len(times[name]) == schedules[name].occurrences
        assert all(b - a == step_ns for a, b in itertools.pairwise(times[name])), "none is lost"
    for name, last in ends.items():
        if last is None:
            assert len(times[name]) == 25
        else:
            assert times[name][-1] <= last.timestamp() * 1e9 < times[name][-1] + step_ns
    for name, expected in asked.items():
        assert set(expected) <= set(times[name])
    fill_ns, phase_ns = 33_000_000, times["fill"][-1]
    for n in range(fills):
        begin_ns = round(SPANS.timestamp()) * SECOND_NS + 10 * SECOND_NS * n
        first_ns = begin_ns + (phase_ns - begin_ns) % fill_ns
        assert set(range(first_ns, begin_ns + 99_000_001, fill_ns)) <= set(times["fill"])
    assert len(ends) > 20
    print(f"{len(found)} occurrences, {[len(at) for at in asked.values()]} triggers, {fills} fills")


@pytest.mark.tier("test")
def test_a_kill_between_occurrences_changes_nothing_under_the_virtual_clock(
    daemon: StartDaemon,
) -> None:
    one = daemon("demo", *VIRTUAL)
    with client() as caller:
        caller.put_schedule("cron", cron="*/10 * * * *", topic="ticks", jitter=60)
        caller.put_schedule("every", every=600, topic="ticks")
    for hours in range(1, 9):
        advance(hours)
        one.kill()
        one.start()
    found = fired(one)
    assert len(found) == len(set(found))
    assert len(found) in (2 * 6 * 8 - 1, 2 * 6 * 8), "the last occurrence may have a jitter"
    for key in ("cron", "every"):
        times = sorted(at for schedule, at in found if schedule == key)
        assert times == list(range(ORIGIN_NS + 600 * SECOND_NS, times[-1] + 1, 600 * SECOND_NS))


def topic(**settings: Any) -> None:
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.set_topic("ticks", namespace="shop", **settings)


@pytest.mark.parametrize("policy", ["fire", "skip", "coalesce"])
@pytest.mark.parametrize("kills", [False, True], ids=["runs", "kills"])
@pytest.mark.parametrize("durable", [False, True], ids=["arena", "wal"])
def test_a_late_policy_covers_all_late_occurrences_of_a_schedule(
    daemon: StartDaemon, tmp_path: Path, policy: str, kills: bool, durable: bool
) -> None:
    args = ("--wal-dir", str(tmp_path / "wal")) if durable else ()
    one = daemon("demo", *VIRTUAL, *args)
    with client() as caller:
        caller.put_schedule("cron", cron="0 * * * *", topic="ticks", jitter=60, count=12)
        caller.put_schedule("every", every=3600, topic="ticks", count=11)
    topic(late="fire" if policy == "fire" else (policy, 600), paused=True)
    advance(10.5)
    if kills:
        one.kill()
        one.start()
    topic(paused=False)
    advance(10.6)
    if kills:
        one.kill()
        one.start()
    late = {"fire": 20, "skip": 0, "coalesce": 1}[policy]
    eventually(lambda: len(fired(one)) == late)
    advance(20)
    eventually(lambda: len(fired(one)) == late + 3)
    expected = {("cron", 11), ("every", 11), ("cron", 12)}
    if policy == "fire":
        expected |= {(key, hour) for key in ("cron", "every") for hour in range(1, 11)}
    elif policy == "coalesce":
        expected.add(("cron", 10))  # its jitter makes it the last one
    assert set(fired(one)) == {(key, ORIGIN_NS + hour * HOUR_NS) for key, hour in expected}
    ended = stats(one)
    assert ended["skipped"] + ended["coalesced"] == 20 - late
    with client() as caller:
        assert [s.next for s in caller.schedules()] == [None, None]
        assert sorted(s.occurrences for s in caller.schedules()) == [11, 12]


@pytest.mark.tier("test")
def test_schedules_come_back_from_the_wal_after_a_reboot(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    one = daemon("demo", "--wal-dir", str(tmp_path / "wal"), *VIRTUAL)
    with client(durable=True) as caller:
        caller.put_schedule("cron", cron="0 * * * *", topic="ticks", payload=b"c", jitter=1)
        caller.put_schedule(
            "every", every=3600, topic="ticks", payload=b"e", count=9, tag="tide", priority=8
        )
        caller.put_schedule("paused", every=60, topic="ticks", tag="tide")
        caller.pause_schedule("paused")
        caller.put_schedule("gone", every=60, topic="ticks")
        caller.delete_schedule("gone")
    advance(3.5)
    with client(durable=True) as caller:
        before = {s.key: s for s in caller.schedules()}
    for _ in range(2):  # the second recovery starts with a snapshot that has the schedules
        one.kill()
        remove_arena_files(one.paths)
        one.start()
    with client() as caller, subscriber() as source:
        after = {s.key: s for s in caller.schedules()}
        assert after.keys() == before.keys() == {"cron", "every", "paused"}
        for key, schedule in after.items():
            old = before[key]
            assert (schedule.occurrences, schedule.paused) == (old.occurrences, old.paused)
            assert (schedule.next, schedule.revision) == (old.next, old.revision)
            assert (schedule.tag, schedule.priority) == (old.tag, old.priority)
        assert due_by_tag(caller, "tide") == ["every"]
        advance(5.5)
        found = Counter(n.payload for n in taken(source, 4))
        assert found == {b"c": 2, b"e": 2}
        assert source.get(timeout=0) is None
        assert due_by_tag(caller, "tide") == ["every"]
        caller.resume_schedule("paused")
        assert due_by_tag(caller, "tide") == ["every", "paused"]


@pytest.mark.tier("test")
def test_schedules_stay_when_the_sizes_change_and_when_the_arena_is_copied(
    daemon: StartDaemon,
) -> None:
    one = daemon("demo", "--schedules", "4", *VIRTUAL)
    with client() as caller:
        for n in range(3):
            caller.put_schedule(
                f"s{n}", cron="0 * * * *", topic="ticks", payload=bytes([n]),
                tag="tide" if n else None,
            )  # fmt: skip
        before = caller.schedules()
    one.stop()
    one.restart("--schedules", "8", "--capacity", "1000", *VIRTUAL)
    with client() as caller, subscriber() as source:
        assert caller.schedules() == before
        advance(2.5)
        assert len(set(nominal(taken(source, 6)))) == 2
        assert source.get(timeout=0) is None
        assert due_by_tag(caller, "tide") == ["s1", "s2"]
    one.stop()
    with pytest.raises(Exception, match="schedules"):
        one.restart("--schedules", "2", *VIRTUAL)


def test_a_drain_does_not_wait_for_schedules(daemon: StartDaemon) -> None:
    one = daemon("demo")
    with client() as caller:
        caller.put_schedule("a", every=3600, topic="ticks")
        caller.add("b", 0.3, topic="ticks")
        with Admin("demo", timeout=PATIENCE_S) as admin:
            admin.stop(drain=True)
    eventually(lambda: not one.running)
    one.start()
    with client() as caller:
        assert [s.key for s in caller.schedules()] == ["a"]


def test_a_schedule_in_a_full_arena_goes_on(daemon: StartDaemon) -> None:
    daemon("demo", "--capacity", "4")
    with client() as caller, subscriber() as source:
        caller.put_schedule("a", every=0.02, topic="ticks")
        for n in range(3):
            caller.add(f"k{n}", 3600)
        with pytest.raises(Full):
            caller.add("more", 3600)
        found = nominal(taken(source, 20))
        assert all(b - a == timedelta(seconds=0.02) for a, b in itertools.pairwise(found))


def test_a_full_consumer_group_stops_only_schedules_of_its_topics(daemon: StartDaemon) -> None:
    daemon("demo")
    with client() as caller:
        caller.create_group("g", ["mails"], max_backlog=1)
        for key in ("a", "b", "c"):
            caller.put_schedule(key, every=0.01, topic="mails")
        caller.put_schedule("d", every=0.01, topic="ticks")

        def waits() -> bool:
            found = {one.key: one for one in caller.schedules()}
            fires = found["d"].occurrences >= 20
            return fires and all(found[key].deadline is None for key in ("a", "b", "c"))

        assert eventually(waits)


def scheduled(core: JobsCore, session: Session, ask: ScheduleAsk) -> None:
    """Send a message about a schedule, and answer the questions about its times."""
    question = ffi.new("struct pg_question *")
    message = wire.encode_schedule(1, session.id, ask)
    while True:
        with suppress(ProtocolError):  # an empty reply: the message waits for the times
            core.handle(message, uid=session.uid, real_boot_ns=core.header.now_ns)
        if not lib.pg_schedule_question(core.a, question):
            break
        after_ns, until_ns, count = question.after_ns, question.until_ns, question.count
        found = cron.times("* * * * *", "", after_ns, until_ns, count)
        lib.pg_schedule_answer(core.a, question, Status.DONE, found, len(found))
    assert not wire.decode_reply(core.newest_reply).error


@pytest.mark.tier("test")
def test_a_resume_after_a_step_of_the_wall_clock_repeats_no_occurrence() -> None:
    core, minute_ns = JobsCore(schedules=1), 60 * SECOND_NS
    session = Session(core)
    core.advance(SECOND_NS, wall_offset_ns=ORIGIN_NS)
    ask = partial(ScheduleAsk, namespace=b"n", key=b"tide")
    put = ask(ScheduleAction.PUT, topic=b"t", spec=b"* * * * *", until=2**62)
    scheduled(core, session, put)
    for seconds, back in ((61, 0), (62, 30), (63, 30), (94, 30), (154, 30)):
        while core.advance(seconds * SECOND_NS, wall_offset_ns=ORIGIN_NS - back * SECOND_NS):
            pass
        core.publish_all()
        if seconds == 63:
            scheduled(core, session, ask(ScheduleAction.PAUSE))
            scheduled(core, session, ask(ScheduleAction.RESUME))
    keys = [entry.key for entry in core.entries()]
    assert keys == [f"tide@{ORIGIN_NS + n * minute_ns}".encode() for n in (1, 2)]


def fixed_zone(hours: int) -> bytes:
    """Return a file of the tz database: a zone with one offset (RFC 9636, version 1)."""
    head = b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 0, 1, 4)
    return head + struct.pack(">lbb", hours * 3600, 0, 0) + b"ABC\0"


@pytest.fixture
def zone_file(tmp_path: Path) -> Iterator[Path]:
    """Yield the path of the only time zone that exists, Test/Zone."""
    before = zoneinfo.TZPATH
    zoneinfo.reset_tzpath([tmp_path])
    (tmp_path / "Test").mkdir()
    yield tmp_path / "Test" / "Zone"
    zoneinfo.reset_tzpath(before)
    cron.forget_zones()


class ScheduledCore(JobsCore):
    """A private arena that the daemon's Schedules serve."""

    def __init__(self) -> None:
        super().__init__(schedules=1)
        self._a = self.a

    schedule_question = Arena.schedule_question
    schedule_answer = Arena.schedule_answer
    schedule_zones = Arena.schedule_zones
    recheck_schedules = Arena.recheck_schedules


@pytest.mark.tier("test")
def test_an_update_of_the_tz_database_moves_the_next_occurrence(zone_file: Path) -> None:
    core = ScheduledCore()
    session, served = Session(core), Schedules(cast(Any, core))
    core.advance(SECOND_NS, wall_offset_ns=ORIGIN_NS)
    served.heartbeat(0)
    ask = partial(ScheduleAsk, namespace=b"n", key=b"tide")

    def asked(put: ScheduleAsk) -> wire.ScheduleInfo:
        for n in range(2):  # the first message waits for the times
            with suppress(ProtocolError):
                message = wire.encode_schedule(n, session.id, put)
                core.handle(message, uid=session.uid, real_boot_ns=core.header.now_ns)
            served.serve()
        reply = wire.decode_reply(core.newest_reply)
        (info,) = wire.decode_schedule(reply.body, reply.records, put.action).infos
        return info

    def next_hour() -> int:
        core.advance(core.header.now_ns + 1, wall_offset_ns=ORIGIN_NS)
        info = asked(ask(ScheduleAction.GET))
        assert info.deadline_ns == info.next_ns
        return (info.next_ns - ORIGIN_NS) // HOUR_NS + ORIGIN.hour

    zone_file.write_bytes(fixed_zone(0))
    asked(ask(ScheduleAction.PUT, topic=b"t", spec=b"0 12 * * *", zone=b"Test/Zone", until=2**62))
    served.heartbeat(ZONES_EVERY_NS)
    assert next_hour() == 12
    (zone_file.parent / "New").write_bytes(fixed_zone(3))
    (zone_file.parent / "New").rename(zone_file)
    served.heartbeat(2 * ZONES_EVERY_NS - 1)
    served.serve()
    assert next_hour() == 12
    served.heartbeat(2 * ZONES_EVERY_NS)
    served.serve()
    assert next_hour() == 9


def test_a_deadline_is_not_before_its_nominal_time() -> None:
    at_ns = ORIGIN_NS + 1_500
    info = wire.ScheduleInfo(
        1, 0, HOUR_NS, 2**63 - 1, 0, 1, 0, at_ns, at_ns - 600, 0, 1, 0, 0, 1, 0, 0, None, "t", "k",
        "", "", "", b"",
    )  # fmt: skip
    shown = _schedule("n", info)
    assert shown.deadline == shown.next == ORIGIN + timedelta(microseconds=1)
    stepped = _schedule("n", info._replace(deadline_ns=at_ns - SECOND_NS))
    assert stepped.deadline == ORIGIN - timedelta(seconds=1, microseconds=-1)


@pytest.mark.tier("test")
@pytest.mark.parametrize("resumes", [False, True])
def test_a_wall_clock_set_back_to_before_a_put_repeats_no_occurrence(*, resumes: bool) -> None:
    core, minute_ns, back_ns = JobsCore(schedules=1), 60 * SECOND_NS, 3600 * SECOND_NS
    session = Session(core)
    core.advance(SECOND_NS, wall_offset_ns=ORIGIN_NS)
    ask = partial(ScheduleAsk, namespace=b"n", key=b"tide")
    put = ask(ScheduleAction.PUT, topic=b"t", spec=b"* * * * *", until=2**62)
    scheduled(core, session, put)
    for seconds in (61, 121, 122, 3800, 3900):
        offset_ns = ORIGIN_NS - back_ns * (seconds > 121)
        while core.advance(seconds * SECOND_NS, wall_offset_ns=offset_ns):
            pass
        core.publish_all()
        if seconds == 122:
            lib.pg_schedules_recheck(core.a)
            if resumes:
                scheduled(core, session, ask(ScheduleAction.PAUSE))
        scheduled(core, session, ask(ScheduleAction.RESUME))
    keys = [entry.key for entry in core.entries()]
    assert keys == [f"tide@{ORIGIN_NS + n * minute_ns}".encode() for n in (1, 2, 3, 4, 5)]


@pytest.mark.tier("test")
@pytest.mark.parametrize("rechecks", [False, True])
def test_a_put_after_a_step_of_the_wall_clock_repeats_no_occurrence(*, rechecks: bool) -> None:
    core, minute_ns = JobsCore(schedules=1), 60 * SECOND_NS
    session = Session(core)
    core.advance(SECOND_NS, wall_offset_ns=ORIGIN_NS)
    put = ScheduleAsk(
        ScheduleAction.PUT, b"n", key=b"tide", topic=b"t", spec=b"* * * * *", until=2**62
    )
    scheduled(core, session, put)
    steps = ((61, 0), (121, 0), (122, 0 if rechecks else 90), (123, 90), (212, 90), (271, 90))
    for seconds, back in steps:
        while core.advance(seconds * SECOND_NS, wall_offset_ns=ORIGIN_NS - back * SECOND_NS):
            pass
        core.publish_all()
        if seconds == 122:
            scheduled(core, session, put._replace(payload=b"other"))
        if seconds == 123 and rechecks:
            lib.pg_schedules_recheck(core.a)
        scheduled(core, session, ScheduleAsk(ScheduleAction.RESUME, b"n", key=b"tide"))
    keys = [entry.key for entry in core.entries()]
    assert keys == [f"tide@{ORIGIN_NS + n * minute_ns}".encode() for n in (1, 2, 3)]


@pytest.mark.tier("test")
def test_an_answer_from_before_the_newest_occurrence_does_not_repeat_it() -> None:
    core, minute_ns = JobsCore(schedules=2), 60 * SECOND_NS
    session, question = Session(core), ffi.new("struct pg_question *")
    core.advance(50 * SECOND_NS, wall_offset_ns=ORIGIN_NS)
    put = ScheduleAsk(
        ScheduleAction.PUT, b"n", key=b"tide", topic=b"t", spec=b"* * * * *", until=2**62
    )
    scheduled(core, session, put)
    abandoned = wire.encode_schedule(1, session.id, put._replace(key=b"ebb"))
    with suppress(ProtocolError):
        core.handle(abandoned, uid=session.uid, real_boot_ns=core.header.now_ns)
    assert lib.pg_schedule_question(core.a, question)
    found = [ORIGIN_NS + n * minute_ns for n in (1, 2)]
    lib.pg_schedule_answer(core.a, question, Status.DONE, found, len(found))
    for seconds in (61, 62):
        while core.advance(seconds * SECOND_NS, wall_offset_ns=ORIGIN_NS):
            pass
        core.publish_all()
        if seconds == 61:
            scheduled(core, session, put._replace(payload=b"other"))
    assert [entry.key for entry in core.entries()] == [f"tide@{found[0]}".encode()]


@pytest.mark.tier("test")
def test_a_loop_does_not_go_on_while_an_occurrence_lacks_space() -> None:
    core = JobsCore(capacity=2, schedules=1)
    session = Session(core)
    assert [core.put(f"k{n}", HOUR_NS).status for n in (1, 2)] == [Status.ADDED] * 2
    ask = ScheduleAsk(
        ScheduleAction.PUT, b"n", topic=b"t", key=b"tide", every_ns=SECOND_NS, until=HOUR_NS
    )
    assert core.handle(wire.encode_schedule(1, session.id, ask), uid=session.uid)
    left = [core.advance(core.header.now_ns + 1_000_000, budget=1) for _ in range(3)]
    assert left == [False] * 3
    assert core.next_ns > core.header.now_ns


def test_an_occurrence_waits_while_the_payload_memory_is_full(daemon: StartDaemon) -> None:
    daemon("demo", "--payload-memory", "256K", "--replay-buffer", "16")
    step = timedelta(seconds=0.05)
    with client() as caller:
        caller.put_schedule("a", every=step, topic="ticks", payload=bytes(20_000))
        caller.add_many([(f"k{n}", 3600, "default", bytes(9_000)) for n in range(100)])

        def seen() -> Schedule:
            found = caller.get_schedule("a")
            assert found is not None
            return found

        waiting = eventually(lambda: seen() if seen().deadline is None else None)
        assert waiting is not None
        caller.cancel_many([f"k{n}" for n in range(100)])
        after = eventually(lambda: seen() if seen().occurrences > waiting.occurrences + 5 else None)
        assert after is not None
        assert after.previous == after.put_at + (after.occurrences - 1) * step


def test_the_share_of_a_uid_limits_its_schedules(daemon: StartDaemon, daemon_dir: Path) -> None:
    daemon_dir.chmod(0o711)
    served = daemon("demo", "--schedules", "4", "--uid-share", "50")
    group = served.paths.cmd.stat().st_gid

    def puts() -> tuple[int, str, int, int]:
        with client() as one:
            try:
                for n in range(4):
                    one.put_schedule(f"s{n}", every=60)
            except UidShareExceeded as error:
                return n, error.resource, error.used, error.limit
            return 4, "", 0, 0

    assert run_as(12_345, puts, groups=[group]) == (2, "schedules", 2, 2)


@pytest.mark.tier("test")
def test_a_quota_refuses_a_cron_schedule_with_one_answer(daemon: StartDaemon) -> None:
    daemon("demo")
    with Admin("demo", timeout=PATIENCE_S) as admin, client() as one:
        one.add("full", 3600)
        admin.set_namespace("shop", quota_timers=1)
        with pytest.raises(MessageRefused, match="QUOTA"):
            one.put_schedule("tide", cron="@hourly", timeout=5)
        assert one.schedules() == []


@pytest.mark.tier("test")
def test_schedules_follow_their_keys_to_other_shards(daemon: StartDaemon) -> None:
    one = start_partitioned(daemon, 4)
    start = datetime.now(UTC)
    with Client("demo", timeout=PATIENCE_S) as caller:
        for n in range(12):
            spec: dict[str, Any] = {"cron": "0 0 1 * *"} if n % 2 else {"every": 86_400}
            caller.put_schedule(
                f"s{n}", topic="ticks", payload=bytes([n]), jitter=60, tag=f"t{n % 3}",
                priority=n % 10, **spec,
            )  # fmt: skip
        caller.pause_schedule("s3")
        before = caller.schedules()
        assert len(before) == 12
        for moved in ("3", "1", "2"):
            one.restart("--shards", moved)
            after = caller.schedules()
            # the offset of the wall clock, hence the deadline of an `every`, differs a little
            assert [replace(s, deadline=None) for s in after] == [
                replace(s, deadline=None) for s in before
            ]
            assert [s.deadline is None for s in after] == [s.key == "s3" for s in before]
            assert due_by_tag(caller, "t0") == ["s0", "s6", "s9"]
    with Client("demo", timeout=PATIENCE_S) as caller:
        assert caller.delete_schedule("s0")
        assert caller.resume_schedule("s3").next is not None
        filled = caller.backfill_schedule("s1", start - timedelta(days=70), start)
        assert filled.armed == len(filled.nominal) in (2, 3)
        assert len(caller.schedules()) == 11
