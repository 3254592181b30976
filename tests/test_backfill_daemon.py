"""Backfills fire the occurrences of a schedule that have not fired, and fire none twice."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, remove_arena_files

from purgatoryd.clients import Admin, Client, Consumer, InvalidArgument, ScheduleRefused

pytestmark = pytest.mark.tier("test")

HOUR_NS = 3600 * 10**9
ORIGIN = datetime(2027, 1, 15, 8, tzinfo=UTC)
VIRTUAL = ("--clock", "virtual", "--wall-origin", "2027-01-15T08:00:00Z")
SMALL = ("--replay-buffer", "16")
HOURLY: list[Any] = [{"every": 3600}, {"cron": "0 * * * *"}]
BOTH = pytest.mark.parametrize("spec", HOURLY, ids=["every", "cron"])


def client() -> Client:
    return Client("demo", namespace="shop", timeout=PATIENCE_S)


def consumer() -> Consumer:
    return Consumer(
        "demo", namespace="shop", group="g", topics=["ticks"], timeout=PATIENCE_S, lease=10**6,
        max_lease=10**6,
    )  # fmt: skip


def advance(hours: float, more_ns: int = 1_000_000) -> None:
    """Move the virtual clock to `hours`, and 1 ms further, because timers fire at the end of a
    tick."""
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.advance(round(hours * HOUR_NS) + more_ns)


def at(hours: float) -> datetime:
    return ORIGIN + timedelta(hours=hours)


def hours(moments: list[datetime]) -> list[float]:
    return [(moment - ORIGIN) / timedelta(hours=1) for moment in moments]


def flush(caller: Client) -> None:
    """Fire enough timers of another topic to drop all earlier notices from the replay buffer."""
    for n in range(40):
        caller.add(f"other {n}", 0, topic="others")
    eventually(lambda: caller.count_timers(topic="others") == 0)


def taken(jobs: Consumer, count: int) -> list[Any]:
    """Return `count` jobs, and check that no other follows."""
    found = [jobs.get(PATIENCE_S) for _ in range(count)]
    assert jobs.get(0.05) is None
    return found


def nominal(jobs: list[Any]) -> list[float]:
    """Return the nominal times of jobs in hours."""
    times_ns = [int(str(job.key).rpartition("@")[2]) for job in jobs]
    return sorted((time_ns / 1e9 - ORIGIN.timestamp()) / 3600 for time_ns in times_ns)


@BOTH
def test_occurrences_whose_jobs_are_open_are_not_fired_again(
    daemon: StartDaemon, spec: dict[str, Any]
) -> None:
    daemon("demo", *VIRTUAL, *SMALL)
    with client() as caller, consumer() as jobs:
        caller.put_schedule("tide", topic="ticks", **spec)
        advance(3)
        held = taken(jobs, 3)
        flush(caller)
        filled = caller.backfill_schedule("tide", at(-2), at(3))
        assert (filled.armed, hours(filled.nominal)) == (3, [-2, -1, 0, 1, 2, 3])
        assert nominal(taken(jobs, 3)) == [-2, -1, 0]
        flush(caller)
        assert caller.backfill_schedule("tide", at(-2), at(3)).armed == 0
        again = caller.backfill_schedule("tide", at(-1), at(2), repeat=True)
        assert again.armed == 4
        assert nominal(taken(jobs, 4)) == [-1, 0, 1, 2]
        assert nominal(held) == [1, 2, 3]
        jobs.close(drain=0)  # the jobs stay open


@BOTH
def test_a_backfill_makes_up_for_a_pause(daemon: StartDaemon, spec: dict[str, Any]) -> None:
    one = daemon("demo", *VIRTUAL, *SMALL)
    with client() as caller, consumer() as jobs:
        caller.put_schedule("tide", topic="ticks", **spec)
        advance(2)
        caller.pause_schedule("tide")
        advance(5.5)
        caller.resume_schedule("tide")
        advance(7)
        assert nominal(taken(jobs, 4)) == [1, 2, 6, 7]
        one.kill()
        one.start()
        filled = caller.backfill_schedule("tide", at(1), at(7))
        assert (filled.armed, hours(filled.nominal)) == (3, [1, 2, 3, 4, 5, 6, 7])
        assert nominal(taken(jobs, 3)) == [3, 4, 5]
        assert caller.backfill_schedule("tide", at(1), at(7)).armed == 0
        advance(8)
        assert caller.backfill_schedule("tide", at(1), at(8)).armed == 0


@BOTH
def test_a_backfill_makes_up_for_skipped_occurrences(
    daemon: StartDaemon, spec: dict[str, Any]
) -> None:
    daemon("demo", *VIRTUAL, *SMALL)
    with client() as caller, consumer() as jobs:
        caller.put_schedule("tide", topic="ticks", overlap="skip", **spec)
        advance(1)
        [first] = taken(jobs, 1)
        advance(3)
        first.ack()
        eventually(lambda: (s := caller.get_schedule("tide")) and s.open_jobs == 0)
        advance(4)
        assert nominal(taken(jobs, 1)) == [4]
        assert caller.backfill_schedule("tide", at(1), at(4)).armed == 2
        assert nominal(taken(jobs, 2)) == [2, 3]


def test_a_put_with_other_settings_repeats_no_occurrence(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL, *SMALL)
    with client() as caller, consumer() as jobs:
        caller.put_schedule("tide", topic="ticks", cron="0 * * * *")
        advance(2)
        caller.put_schedule("tide", topic="ticks", cron="0 */2 * * *", payload=b"other")
        advance(4)
        assert nominal(taken(jobs, 3)) == [1, 2, 4]
        caller.put_schedule("tide", topic="ticks", cron="0 * * * *")
        assert caller.backfill_schedule("tide", at(0), at(4)).armed == 2
        assert nominal(taken(jobs, 2)) == [0, 3], "the second put had no occurrence at 3"
        assert caller.delete_schedule("tide")
        flush(caller)
        caller.put_schedule("tide", topic="ticks", cron="0 * * * *")
        assert caller.backfill_schedule("tide", at(1), at(4)).armed == 4, "another schedule"


def test_a_triggered_occurrence_is_not_fired_again(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL, *SMALL)
    with client() as caller, consumer() as jobs:
        for key, spec in zip(("every", "cron"), HOURLY, strict=True):
            caller.put_schedule(key, topic="ticks", **spec)
            caller.trigger_schedule(key, at(-2))
            caller.trigger_schedule(key, at(-1.3))
            assert nominal(taken(jobs, 2)) == pytest.approx([-2, -1.3])
            flush(caller)
            assert caller.backfill_schedule(key, at(-3), at(-1)).armed == 2
            assert nominal(taken(jobs, 2)) == [-3, -1]


def test_occurrences_between_old_ranges_count_as_fired(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as caller, consumer() as jobs:
        caller.put_schedule("tide", topic="ticks", cron="0 * * * *")
        for hour in range(-40, -20, 2):
            assert caller.backfill_schedule("tide", at(hour), at(hour)).armed == 1
        assert len(taken(jobs, 10)) == 10
        filled = caller.backfill_schedule("tide", at(-40), at(-22))
        assert (filled.armed, len(filled.nominal)) == (6, 19)
        assert nominal(taken(jobs, 6)) == list(range(-33, -22, 2))
        assert caller.backfill_schedule("tide", at(-39), at(-39), repeat=True).armed == 1
        assert nominal(taken(jobs, 1)) == [-39]


@pytest.mark.parametrize("loses", ["process", "arena"])
def test_fired_occurrences_stay_known_after_a_kill(
    daemon: StartDaemon, tmp_path: Path, loses: str
) -> None:
    args = ("--wal-dir", str(tmp_path / "wal")) if loses == "arena" else ()
    one = daemon("demo", *VIRTUAL, *SMALL, *args)
    with Client("demo", namespace="shop", timeout=PATIENCE_S, durable=bool(args)) as caller:
        caller.put_schedule("tide", topic="ticks", cron="0 * * * *")
        advance(2)
        assert caller.backfill_schedule("tide", at(-300), at(0)).armed == 301
        eventually(lambda: caller.count_timers(topic="ticks") == 1)
    one.kill()
    if loses == "arena":
        remove_arena_files(one.paths)
    one.start()
    with client() as caller:
        filled = caller.backfill_schedule("tide", at(-301), at(2))
        assert (filled.armed, len(filled.nominal)) == (1, 304)


def test_repeat_fires_again_what_the_replay_buffer_has(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as caller, consumer() as jobs:
        caller.put_schedule("tide", topic="ticks", every=3600)
        advance(1)
        assert caller.backfill_schedule("tide", at(1), at(1)).armed == 0
        assert caller.backfill_schedule("tide", at(1), at(1), repeat=True).armed == 1
        assert nominal(taken(jobs, 2)) == [1, 1]
        for bad in (1, None, "yes"):
            with pytest.raises(InvalidArgument, match="repeat"):
                caller.backfill_schedule("tide", at(0), at(1), repeat=bad)  # type: ignore[arg-type]


def backfill(one: Daemon, *args: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "purgatoryd.cli", "schedules", "backfill", "tide", *args, "--json",
         "--name", "demo", "--namespace", "shop"],
        env=one.env, capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout))


def test_the_command_repeats_only_on_request(daemon: StartDaemon) -> None:
    one = daemon("demo", *VIRTUAL)
    with client() as caller:
        caller.put_schedule("tide", topic="ticks", cron="0 * * * *")
        advance(1)
        span = ("2027-01-15T07:00Z", "2027-01-15T09:00Z")
        assert [backfill(one, *span)["armed"] for _ in range(2)] == [2, 0]
        assert backfill(one, *span, "--repeat")["armed"] == 3


def test_a_backfill_ends_at_the_current_time_at_the_latest(daemon: StartDaemon) -> None:
    daemon("demo", *VIRTUAL)
    with client() as caller:
        caller.put_schedule("tide", every=3600)
        advance(1.5)
        with pytest.raises(ScheduleRefused, match="in the future") as refused:
            caller.backfill_schedule("tide", at(0), at(1.6))
        assert refused.value.reason == "TOO_FAR"
