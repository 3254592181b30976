"""The main job of the flights example: each part with small sizes and real processes, and its
checks on invented results."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flight_runs import FlightRuns
from machine import needs
from rich.console import Console

from examples.flights import live, report, year
from examples.flights.collector import Receipt
from examples.flights.data import carrier_names
from examples.flights.day import pace
from examples.flights.events import NS_PER_S, Flight, Kind
from examples.flights.figures import Lateness, Rate
from examples.flights.live import LATE_WORKERS_ALLOWED, Call, Day
from examples.flights.processes import ChildFailed, Crew, Link
from examples.flights.service import DaemonFailed, private_directory, running
from examples.flights.year import Year
from purgatoryd.clients import CancelResult, Client
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.paths import paths_in

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).parents[2]
MINUTE_NS = 60 * NS_PER_S


@pytest.fixture
def directory() -> Iterator[Path]:
    with private_directory() as made:
        yield made


@pytest.fixture
def console() -> Console:
    return Console(width=100, record=True, file=io.StringIO())


def run_module(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.flights", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# --- the parts, with real processes ---------------------------------------------------------------


@pytest.mark.tier("all")
def test_a_day_in_three_seconds(flight_runs: FlightRuns, console: Console) -> None:
    """A day runs in three seconds, so the margin is 1 ms. A landing may lose its race against the
    timer; all other results must agree."""
    day = flight_runs.day
    assert list(live.against_answers(day)) == []
    assert {call.key for call in day.calls_of(Kind.DEPARTURE)} == {one.key for one in day.flights}
    assert {call.key for call in day.calls_of(Kind.LANDING)} < {one.key for one in day.flights}
    lost_races = {call.key for call in day.calls if call.found is CancelResult.FIRED} - day.expected
    never_landed = {one.key for one in day.flights if one.landed_unix_ns is None}
    assert never_landed <= {r.key for r in day.receipts} <= day.expected | lost_races
    report.print_day(console, day, carrier_names())
    assert f"A day live: {day.date}" in console.export_text()


@pytest.mark.tier("all")
def test_a_day_of_the_year(flight_runs: FlightRuns, console: Console) -> None:
    whole = flight_runs.year
    assert whole.problems == []
    assert whole.received == whole.expected
    assert whole.latest_ns < live.TICK_NS
    report.print_year(console, whole, carrier_names())
    assert "0 / 0" in console.export_text()


@pytest.mark.tier("all")
def test_load_from_the_command_line(tmp_path: Path) -> None:
    """If stdout is a pipe, the output has no control codes, and its last line is the verdict."""
    needs("numpy")
    done = run_module("--load", "--timers=5000", "--longest=2s", f"--json={tmp_path}/figures.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS")
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    load = json.loads((tmp_path / "figures.json").read_text())["load"]
    assert load["acknowledged_adds"] == 5000
    assert load["received"] == 5000 - load["cancels"]["CANCELLED"]


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    needs("numpy")
    command = [sys.executable, "-m", "examples.flights", "--load", "--timers", "4"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("purgatoryd-run-*/load.cmd")):
        assert run.poll() is None
    directory = next(tmp_path.glob("purgatoryd-run-*"))
    paths = paths_in(directory, "load")
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate()
    assert run.returncode == 130
    assert output.splitlines()[-1] == "FAIL: interrupted"
    assert not list(tmp_path.iterdir())
    assert not shm.exists(paths.arena)
    assert not shm.exists(paths.private)


def test_without_the_data_one_sentence_says_what_to_install() -> None:
    code = (
        "from examples.flights import data, __main__ as run\n"
        "data.DISTRIBUTION = 'no-such-distribution'\n"
        "run.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1
    assert "pip install '.[demo]' in the checkout" in done.stdout


def test_more_timers_than_shared_memory_holds() -> None:
    load = pytest.importorskip("examples.flights.load", reason="numpy is missing")
    free_bytes = 64 * 2**20
    timers = load.fitting(1_000_000, free_bytes)
    assert load.fitting(timers, free_bytes) == timers
    assert 200_000 < timers < 1_000_000
    assert load.arena_bytes(timers) <= free_bytes
    assert load.arena_bytes(timers + timers // 10) > free_bytes


# --- daemons and processes ------------------------------------------------------------------------


def test_arena_files_go_with_the_daemon(directory: Path) -> None:
    paths = paths_in(directory, "short")
    with running(directory, "short"):
        assert shm.exists(paths.arena)
        with Client("short") as client:
            client.add("a", delay=60)
    assert not shm.exists(paths.arena)
    assert not shm.exists(paths.private)


def test_a_daemon_that_cannot_start_says_why(directory: Path) -> None:
    with pytest.raises(DaemonFailed, match="fanout"), running(directory, "bad", ("--fanout", "1")):
        pytest.fail("the daemon started")


def test_an_exception_of_a_child_is_raised_in_the_parent() -> None:
    with Crew(1) as crew:
        child = crew.start("broken", _divide, 0)
        with pytest.raises(ChildFailed, match="ZeroDivisionError"):
            crew.watch([child], lambda: None)


def test_a_killed_child_is_noticed() -> None:
    with Crew(1) as crew:
        child = crew.start("killed", _die)
        with pytest.raises(ChildFailed, match="exit code -9"):
            crew.watch([child], lambda: None)


def test_children_count_and_return() -> None:
    with Crew(2) as crew:
        children = [crew.start(f"child {n}", _divide, n) for n in (1, 2)]
        crew.wait_ready()
        crew.tell(12)
        crew.watch(list(children), lambda: None)
        assert [child.result for child in children] == [12.0, 6.0]
        assert crew.counts() == (2, 0, 2)


def _divide(link: Link, by: int) -> float:
    quotient = 1 / by
    whole: int = link.ready()
    link.count(adds=1, notices=1)
    return whole * quotient


def _die(link: Link) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- the checks, on made-up results ---------------------------------------------------------------


def flight(number: int, late_min: int | None) -> Flight:
    """Return a flight that departs at minute `number` and is scheduled for an hour. It lands
    `late_min` minutes late, or never."""
    departed_ns = number * MINUTE_NS
    due_ns = departed_ns + 60 * MINUTE_NS
    return Flight(
        key=f"2013-01-01/XX/{number}/JFK",
        carrier="XX",
        dest="LAX",
        departed_unix_ns=departed_ns,
        deadline_unix_ns=due_ns + 14 * MINUTE_NS + MINUTE_NS // 2,
        landed_unix_ns=None if late_min is None else due_ns + late_min * MINUTE_NS,
    )


FLIGHTS = [flight(0, 0), flight(1, 14), flight(2, 15), flight(3, None)]
PUNCTUAL, CLOSE, LATE, LOST = (one.key for one in FLIGHTS)


def made_up_day(sent_late_ns: int = 0, found: dict[str, CancelResult] | None = None) -> Day:
    """Return the results of a day at one second per minute, with calls that take 1 us. The call for
    the landing of CLOSE, which is close to its deadline, is sent `sent_late_ns` late."""
    tempo = pace(FLIGHTS, 0, 77 * NS_PER_S)
    found = {LATE: CancelResult.FIRED} | (found or {})
    calls, receipts = [], []
    for one in FLIGHTS:
        added_ns = tempo.boot_ns(one.departed_unix_ns)
        calls.append(Call(Kind.DEPARTURE, one.key, added_ns, added_ns + 1000, None))
        if one.landed_unix_ns is not None:
            at_ns = tempo.boot_ns(one.landed_unix_ns) + sent_late_ns * (one.key == CLOSE)
            result = found.get(one.key, CancelResult.CANCELLED)
            calls.append(Call(Kind.LANDING, one.key, at_ns, at_ns + 1000, result))
        if found.get(one.key) is CancelResult.FIRED or one.landed_unix_ns is None:
            due_ns = tempo.boot_ns(one.deadline_unix_ns)
            receipts.append(Receipt(one.key, due_ns, due_ns + 10, 20))
    return Day("2013-01-01", FLIGHTS, tempo, calls, receipts, {LATE, LOST})


def judged(day: Day) -> Day:
    live.judge(day)
    return day


def test_a_day_that_agrees() -> None:
    day = judged(made_up_day())
    assert (day.problems, day.late_workers) == ([], [])
    assert day.lateness["received"] == Lateness(2, 20, 20, 20, 20)
    assert day.lateness["fired"].max_ns == 10


def test_a_landing_sent_after_the_margin_is_named_and_excused() -> None:
    day = judged(made_up_day(NS_PER_S * 6 // 10, {CLOSE: CancelResult.FIRED}))
    assert (day.problems, day.late_workers) == ([], [CLOSE])


def test_a_landing_sent_in_time_is_not_excused() -> None:
    day = judged(made_up_day(NS_PER_S * 4 // 10, {CLOSE: CancelResult.FIRED}))
    assert day.late_workers == []
    assert [p.removeprefix(CLOSE) for p in day.problems] == [
        " was answered FIRED before its deadline",
        " expired: not the oracle",
    ]


def test_many_late_workers_fail_the_day() -> None:
    day = made_up_day(NS_PER_S * 6 // 10, {CLOSE: CancelResult.FIRED})
    day.late_workers = [str(n) for n in range(LATE_WORKERS_ALLOWED)]
    assert f"more than {LATE_WORKERS_ALLOWED}" in judged(day).problems[-1]


def test_a_cancel_after_the_deadline_must_not_succeed() -> None:
    day = made_up_day(found={LATE: CancelResult.CANCELLED})
    assert any("after its deadline" in problem for problem in judged(day).problems)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda receipts: receipts[:1], f"{LOST} was not cancelled and no notice came"),
        (lambda receipts: receipts * 2, "2 notices came twice"),
        (
            lambda receipts: [*receipts, receipts[0]._replace(key=PUNCTUAL)],
            f"{PUNCTUAL} was cancelled and a notice came",
        ),
        (
            lambda receipts: [receipts[0]._replace(fired_boot_ns=1), receipts[1]],
            f"{LATE} fired before its deadline",
        ),
    ],
)
def test_wrong_notices_of_a_day_are_named(change, problem) -> None:  # type: ignore[no-untyped-def]
    day = made_up_day()
    day.receipts = change(day.receipts)
    assert problem in judged(day).problems


def made_up_year() -> Year:
    found = {
        PUNCTUAL: CancelResult.CANCELLED,
        CLOSE: CancelResult.CANCELLED,
        LATE: CancelResult.FIRED,
    }
    receipts = [
        Receipt(one.key, one.deadline_unix_ns, one.deadline_unix_ns + 5, 5) for one in FLIGHTS[2:]
    ]
    return Year(FLIGHTS, {LATE, LOST}, 0, 7, found, receipts, 80 * MINUTE_NS, 1.0)


def test_a_year_that_equals_the_oracle() -> None:
    whole = made_up_year()
    year.judge(whole)
    assert whole.problems == []
    assert (whole.calls, whole.latest_ns) == (7, 5)


def test_every_difference_to_the_oracle_is_a_problem() -> None:
    whole = made_up_year()
    whole.receipts[0] = whole.receipts[0]._replace(key=PUNCTUAL)
    year.judge(whole)
    assert [problem.partition(",")[0] for problem in whole.problems] == [
        "1 must expire and did not",
        "1 expired and must not",
        "1 were not cancelled and no notice came",
        "1 were cancelled and a notice came",
        "1 have another deadline than their schedule gives",
    ]


def test_the_ledger_names_what_does_not_add_up() -> None:
    np = pytest.importorskip("numpy")
    load = pytest.importorskip("examples.flights.load")
    added, cancelled, fired = 1, 6, 7  # as in enum pg_status
    answers = load.Answers(
        np.array([added, added, added, added], "u1"),
        np.array([cancelled, cancelled, fired, 0], "u1"),
        np.array([1, 2, 3, 4]),
        np.array([5, 6, 7, 0]),
    )
    times = np.array([0, 1, 0, 2], "u1")
    received = load.Received(times, np.array([9, 9, 9]), np.array([8, 8, 8]), 1)
    made_up = load.Load(4, 4, 1000, answers, received, 4, 1.0)
    load.judge(made_up)
    assert made_up.problems == [
        "1 timers were added, not cancelled, and not received, such as 2",
        "1 timers were received though their cancel was acknowledged, such as 1",
        "1 timers were received more than once, such as 3",
        "1 cancels were answered FIRED for timers that were not received, such as 2",
        "1 notices had another timer's payload",
    ]


def test_the_mix_of_a_share() -> None:
    np = pytest.importorskip("numpy")
    load = pytest.importorskip("examples.flights.load")
    share = load.Share(0, 100_000, 10.0)
    delays_ns, after_ns = load.plan(share)
    cancelled = after_ns >= 0
    assert 0.89 < cancelled.mean() < 0.91
    assert 0.97 < np.median(delays_ns) / NS_PER_S / 0.5 < 1.03
    assert delays_ns.max() <= 10 * NS_PER_S
    fraction = after_ns[cancelled] / delays_ns[cancelled]
    assert 0.49 < fraction.mean() < 0.51
    assert fraction.max() <= 1
    again, _ = load.plan(share)
    assert (again == delays_ns).all()


# --- figures --------------------------------------------------------------------------------------


def test_percentiles_are_measured_values() -> None:
    assert Lateness.of(range(1, 201)) == Lateness(200, 1, 100, 198, 200)
    assert Lateness.of([7]) == Lateness(1, 7, 7, 7, 7)
    assert Lateness.of([]) == Lateness(0, 0, 0, 0, 0)


def test_rates_count_seconds_from_the_first_moment() -> None:
    moments_ns = [0, 1, 2, NS_PER_S, 2 * NS_PER_S]
    assert Rate.of(moments_ns) == Rate(5, 2.5, 3)
    assert Rate.of([]) == Rate(0, 0.0, 0)
