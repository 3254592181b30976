"""The data of `top` and `web`, and the output of `top`, for real daemons, some of which hang."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner
from core_driver import Core
from raw_owner import Raw, trigger, watch
from real_daemon import PATIENCE_S, Daemon, StartDaemon, boot_ns, eventually, remove_arena_files
from rich.console import Console

from purgatoryd.cli import top as top_view
from purgatoryd.cli import units
from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.cli.top import SECTIONS, Bar, Choice, boxed, client_name, picture, times
from purgatoryd.cli.view import Operations, Sampler, Spread, TopicShare, View, _Moment
from purgatoryd.cli.viewer import Viewer
from purgatoryd.clients import Admin, Client
from purgatoryd.shm_layout import health
from purgatoryd.shm_layout.arena import Handle
from purgatoryd.shm_layout.errors import InvalidSetting, PermissionDenied, PurgatorydError
from purgatoryd.shm_layout.layout import DaemonState, Op
from purgatoryd.shm_layout.occupancy import Fill, due
from purgatoryd.shm_layout.paths import paths_in
from purgatoryd.shm_layout.shm import ArenaFile
from purgatoryd.shm_layout.status_file import StatusFile, StatusRecord

pytestmark = pytest.mark.tier("check")

S = 1_000_000_000
MS = 1_000_000
VIRTUAL = ("--clock", "virtual", "--tick", "1ms", "--fanout", "20", "--capacity", "1000")


@pytest.fixture
def demo(daemon: StartDaemon) -> Daemon:
    return daemon("demo", *VIRTUAL)


@pytest.fixture
def sampler(demo: Daemon) -> Iterator[Sampler]:
    with closing(Sampler("demo")) as one:
        yield one


def fill(view: View, name: str) -> tuple[int, int]:
    (one,) = (fill for fill in view.fills if fill.name == name)
    return one.used, one.capacity


@pytest.mark.tier("all")
def test_the_wheel_shows_each_timer_where_its_time_is(sampler: Sampler) -> None:
    delays_ns = [5 * MS, 39 * MS, 1 * S, 90 * S, 90 * S, 3600 * S]
    with Client("demo") as client:
        client.add_many([(f"k{i}", delay_ns / S) for i, delay_ns in enumerate(delays_ns)])
        view = sampler.take()
    found = [
        (number * level.cell_ns, (number + 1) * level.cell_ns)
        for level in view.levels
        for number, count in enumerate(level.counts)
        for _ in range(count)
    ]
    assert len(found) == len(delays_ns)
    for delay_ns, (first_ns, end_ns) in zip(delays_ns, sorted(found), strict=True):
        assert first_ns <= delay_ns < end_ns
    assert (view.armed, view.due) == (6, 0)
    assert 0 < eventually(lambda: sampler.take().next_in_ns or 0) <= 5 * MS


@pytest.mark.tier("all")
def test_the_first_cell_is_the_clocks_wherever_it_stands(sampler: Sampler) -> None:
    with Client("demo") as client, Admin("demo") as admin:
        for at_ms in (13, 39, 61, 795, 8001):
            admin.advance(at_ms * MS)
            client.add("k", delay=0.007)
            (level,) = (one for one in sampler.take().levels if one.timers)
            assert (level.number, level.counts.index(1)) == (0, 7), at_ms
            admin.advance((at_ms + 8) * MS)


@pytest.mark.tier("all")
def test_many_buckets_share_a_cell(daemon: StartDaemon) -> None:
    daemon("demo", "--clock", "virtual", "--tick", "1ms", "--fanout", "256")
    with Client("demo") as client, closing(Sampler("demo")) as sampler:
        client.add_many([(f"k{i}", 0.001 * i) for i in range(8, 16)])
        level = sampler.take().levels[0]
    assert (len(level.counts), level.cell_ns) == (64, 8 * MS)
    assert level.counts[1] == level.timers == 8


def test_due_timers_are_counted_separately() -> None:
    core = Core()
    core.put("late", -1)
    core.put("later", S)
    assert due(cast(Handle, core)) == 1


@pytest.mark.tier("all")
def test_occupancy_of_tables(sampler: Sampler) -> None:
    empty = sampler.take()
    assert fill(empty, "timers") == (0, 1000)
    with Client("demo", namespace="shop") as client:
        client.add_many([(f"k{i}", 60.0, "orders", bytes(100)) for i in range(10)])
        view = sampler.take()
    assert fill(view, "timers") == (10, 1000)
    assert fill(view, "namespaces") == (1, 64)  # the daemon's own namespace is not counted
    assert fill(view, "topics") == (1, 1024)
    assert fill(view, "payload memory")[0] == fill(empty, "payload memory")[0] + 10 * 112
    assert fill(view, "sessions") == (1, 1024)
    assert [(one.name, one.timers, one.bytes) for one in view.namespaces] == [("shop", 10, 1120)]


@pytest.mark.tier("all")
def test_rates_are_of_what_came_since_the_view_before(sampler: Sampler) -> None:
    with Client("demo") as client:
        client.add("before", delay=60)
        assert sampler.take().rates["armed"] == 0
        client.add_many([(f"k{i}", 60.0) for i in range(10)])
        client.cancel("k1")
        rates = sampler.take().rates
        assert rates["armed"] == pytest.approx(10 * rates["cancelled"])
        assert rates["fired"] == 0
        client.add_many([(f"more{i}", 60.0) for i in range(2000)])
        refused = sampler.take().refused
    assert set(refused) == {"full"}


@pytest.mark.tier("all")
def test_figures_updated_once_a_second_are_rated_over_the_window(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sampler._moment()

    def moment(number: int) -> _Moment:
        """Return sample `number` of a series with two samples per second. Each second has 100
        advances, and 100 wake-ups in one burst."""
        made = {"wakeups": number // 2 * 100, "advances": number * 50}
        metrics = replace(first.metrics, counters={**first.metrics.counters, **made})
        return _Moment(number * S // 2, number // 2 * S, first.epoch, metrics)

    moments = map(moment, range(60))
    monkeypatch.setattr(sampler, "_moment", lambda: next(moments))
    rates = [sampler.take().rates for _ in range(60)]
    assert [one["advances"] for one in rates[1:]] == [100] * 59
    assert [one["wake-ups"] for one in rates] == [0] * 2 + [100] * 58


@pytest.mark.tier("all")
def test_lateness_is_of_the_last_seconds(sampler: Sampler) -> None:
    sampler.take()
    with Client("demo") as client, Admin("demo") as admin:
        client.add_many([(f"k{i}", 0.001 * (1 + i)) for i in range(10)])
        admin.advance(S)
    late = sampler.take().times["structural_lateness"]
    assert late.count == sum(count for _, count in late.bins) == 10
    assert late.p50_ns <= late.p99_ns <= late.max_ns
    assert all(edge_ns & (edge_ns - 1) == 0 for edge_ns, _ in late.bins)


@pytest.mark.tier("all")
def test_a_client_that_does_not_acknowledge_is_seen(demo: Daemon, sampler: Sampler) -> None:
    with Raw(demo) as slow, Client("demo") as fast, Admin("demo") as admin:
        fast.add("k", delay=60)
        slow.batch(watch(b"one", b"t", 1), watch(b"two", b"t", 1))
        slow.batch(trigger(Op.ADVANCE_KEY, b"t", 1))
        admin.advance(3 * S)
        view = sampler.take()
    assert view.slowest is not None
    assert [(one.unacknowledged, one.oldest_ns) for one in view.slowest] == [(2, 3 * S)]
    assert {(one.pid, one.uid) for one in view.slowest} == {(os.getpid(), os.geteuid())}
    assert view.operations == Operations(0, 2)


@pytest.mark.tier("all")
def test_a_healthy_client_is_not_slow(demo: Daemon, sampler: Sampler) -> None:
    """A client with an outcome that has just arrived is not reported as slow."""
    with Raw(demo) as owner, Client("demo") as fast, Admin("demo") as admin:
        fast.add("k", delay=60)
        owner.batch(watch(b"one", b"t", 1), watch(b"two", b"other", 1))
        owner.batch(trigger(Op.ADVANCE_KEY, b"t", 1))
        assert sampler.take().operations == Operations(1, 1)
        admin.advance(S - 1)
        assert sampler.take().slowest == []


@pytest.mark.tier("all")
def test_a_client_has_the_name_that_it_gave_itself(demo: Daemon) -> None:
    with Client("demo", worker="web-3"), Client("demo"), closing(Sampler("demo")) as sampler:
        assert sampler._sessions is not None
        found = sampler._sessions.read(0, boot_ns())
        assert {one.worker for one in found} == {"web-3", ""}
    named = replace(found[0], worker="a\x1b[2J", pid=7, uid=8)
    assert client_name(named) == "a\\x1b[2J, process 7, uid 8"
    assert client_name(replace(named, worker="", pid=0)) == "another host, uid 8"


@pytest.mark.tier("all")
def test_topics_have_their_timers_and_notices(sampler: Sampler) -> None:
    with Client("demo", namespace="shop") as client, Admin("demo") as admin:
        client.add_many([(f"k{i}", 60.0, "orders", b"") for i in range(3)])
        client.add_many([(f"m{i}", 0.001, "mail", b"") for i in range(2)])
        admin.advance(S)
        assert sampler.take().topics == [
            TopicShare("shop", "orders", 3, 0), TopicShare("shop", "mail", 0, 2),
        ]  # fmt: skip


@pytest.mark.tier("all")
def test_a_full_replay_buffer_is_no_alarm(sampler: Sampler) -> None:
    """A full replay buffer is normal, because new notices replace the oldest notices."""
    (found,) = (one for one in sampler.take().fills if one.name == "replay memory")
    console = Console(width=20, file=StringIO())
    for fill_, colour in ((found, "cyan"), (Fill("timers", 0, 1), "red")):
        full = replace(fill_, used=fill_.capacity)
        assert {str(piece.style) for piece in console.render(Bar(full))} - {"None"} == {colour}


@pytest.mark.tier("all")
def test_another_user_does_not_see_clients(demo: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ArenaFile.open

    def open_arena(name: str, *, read_only: bool) -> ArenaFile:
        if name == demo.paths.private:
            raise PermissionDenied(name)
        return opened(name, read_only=read_only)

    monkeypatch.setattr(ArenaFile, "open", open_arena)
    with closing(Sampler("demo")) as sampler:
        view = sampler.take()
    assert view.slowest is None
    assert "sessions" not in {one.name for one in view.fills}


@pytest.mark.tier("all")
@pytest.mark.parametrize("spoil", [b"", bytes(4096), b"\xff" * 512])
def test_a_strangers_session_table_is_not_read(demo: Daemon, spoil: bytes) -> None:
    demo.stop()
    private = "/dev/shm" + demo.paths.private
    os.unlink(private)
    with open(private, "wb") as file:
        file.write(spoil)
    with closing(Sampler("demo")) as sampler:
        assert sampler.take().slowest is None


# ---- a daemon that hangs, ends and starts again --------------------------------------------------


@pytest.mark.tier("all")
def test_a_frozen_daemon_is_seen_at_work_before_it_froze(
    demo: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WATCHED_NS", 100 * MS)
    with Client("demo") as client:
        client.add("k", delay=60)
    os.kill(demo.pid, signal.SIGSTOP)
    try:
        eventually(lambda: "frozen" in top("--frozen-after", "10ms"))
        assert json.loads(top("--json", "--frozen-after", "10ms"))["armed"] == 1
    finally:
        os.kill(demo.pid, signal.SIGCONT)


@pytest.mark.tier("all")
def test_views_follow_a_daemon_into_another_arena(demo: Daemon, sampler: Sampler) -> None:
    with Client("demo") as client:
        client.add("k", delay=60)
    assert sampler.take().armed == 1
    demo.stop()
    assert sampler.take().health.condition == "stopped"
    demo.start("--capacity", "2000", *VIRTUAL[:-2])
    assert eventually(lambda: fill(sampler.take(), "timers")) == (1, 2000)
    assert sampler.take().health.pid == demo.pid


@pytest.mark.tier("all")
def test_an_arena_that_is_gone_may_come_again(demo: Daemon, sampler: Sampler) -> None:
    demo.stop()
    remove_arena_files(demo.paths)
    with pytest.raises(PurgatorydError):
        sampler.take()
    demo.start()
    assert sampler.take().health.pid == demo.pid


# ---- a deployment --------------------------------------------------------------------------------

SPACES = [f"space-{n}" for n in range(6)]


@pytest.fixture
def three(daemon: StartDaemon) -> Daemon:
    return daemon("demo", "--shards", "3", "--capacity", "1000")


@pytest.fixture
def viewer(three: Daemon) -> Iterator[Viewer]:
    with closing(Viewer("demo")) as one:
        yield one


def arm(namespaces: list[str]) -> None:
    """Arm timers in each namespace: one in the first, two in the second, and so on."""
    for number, namespace in enumerate(namespaces):
        with Client("demo", namespace=namespace) as client:
            client.add_many([(f"k{i}", 3600.0, "t", bytes(20)) for i in range(1 + number)])


@pytest.mark.tier("test")
def test_a_deployment_is_the_sum_of_its_shards(viewer: Viewer) -> None:
    viewer.take()
    arm(SPACES)
    whole, shards = (views := viewer.take()).whole, views.all()[1:]
    assert (whole.name, whole.health.condition, whole.armed) == ("demo", "ready", 21)
    assert whole.armed == sum(one.armed for one in shards)
    assert fill(whole, "timers") == (21, 3000)
    assert sum(level.timers for level in whole.levels) == 21
    assert {len(one.levels) for one in shards} == {len(whole.levels)}
    assert whole.rates["armed"] == pytest.approx(sum(one.rates["armed"] for one in shards))
    assert whole.times["batch_service"].count == sum(
        one.times["batch_service"].count for one in shards
    )
    assert {(one.name, one.timers) for one in whole.namespaces} == {
        (name, 1 + number) for number, name in enumerate(SPACES)
    }
    assert [row.armed for row in whole.shards] == [one.armed for one in shards]
    assert whole.next_in_ns == min(one.next_in_ns for one in shards if one.next_in_ns)


@pytest.mark.tier("all")
def test_a_namespace_with_partitions_is_one(viewer: Viewer) -> None:
    with Admin("demo") as admin:
        admin.create_namespace("split", partitions=3)
    with Client("demo", namespace="split") as client:
        client.add_many([(f"k{i}", 3600.0) for i in range(50)])
    (one,) = viewer.take().whole.namespaces
    assert (one.name, one.timers) == ("split", 50)


@pytest.mark.tier("all")
def test_one_shard_that_is_gone_does_not_hide_the_others(three: Daemon, viewer: Viewer) -> None:
    arm(SPACES)
    assert viewer.take().whole.health.condition == "ready"
    pid = viewer.take().of(1).health.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: viewer.take().whole.health.still_ns > 2 * S)
        whole = viewer.take().whole
        assert sum(row.armed for row in whole.shards) == whole.armed == 21
    finally:
        os.kill(pid, signal.SIGCONT)
    three.stop()
    remove_arena_files(paths_in(three.paths.directory, "demo-1-1"))
    views = viewer.take()
    assert [row.condition for row in views.whole.shards] == ["stopped", None, "stopped"]
    assert "demo-1-1" in str(views.whole.shards[1].error)
    with pytest.raises(PurgatorydError, match="demo-1-1"):
        views.of(1)


@pytest.mark.tier("all")
def test_views_follow_a_deployment_to_other_shards(three: Daemon, viewer: Viewer) -> None:
    arm(SPACES)
    three.restart("--shards", "2")
    whole = viewer.take().whole
    assert [row.name for row in whole.shards] == ["demo-2-0", "demo-2-1"]
    assert whole.armed == 21
    with pytest.raises(InvalidSetting, match="must be 0 to 1"):
        viewer.take().of(2)


@pytest.mark.tier("all")
def test_top_of_a_deployment_and_of_its_shards(three: Daemon) -> None:
    arm(SPACES)
    shown = top()
    assert re.search(r"demo +3 of 3 shards ready", shown)
    assert f"supervisor process {three.pid}, ready; restarts: 0" in shown
    one = json.loads(top("--shard", "1", "--json"))
    whole = json.loads(top("--json"))
    assert one["name"] == whole["shards"][1]["name"] == "demo-1-1"
    assert one["armed"] == whole["shards"][1]["armed"] < whole["armed"] == 21
    done = CliRunner().invoke(app, ["top", "--name", "demo", "--once", "--shard", "3"])
    assert (done.exit_code, "must be 0 to 2" in done.stderr) == (Exit.USAGE, True)
    os.kill(three.pid, signal.SIGSTOP)
    shows_who_runs_it(three, StatusFile(three.dir, "demo"))
    three.kill()


def shows_who_runs_it(three: Daemon, file: StatusFile) -> None:
    """Check the output of top for a supervisor that is degraded, frozen, or has no status file."""
    now_ns, why = boot_ns(), "demo-1-1 does not answer"
    record = StatusRecord(DaemonState.DEGRADED, three.pid, now_ns, now_ns, [], [why], 3, 2, 4)
    file.write(record)
    assert f"supervisor process {three.pid}, degraded; restarts: 4; {why}" in top()
    reported = json.loads(top("--json", "--frozen-after", "1ms"))
    assert (reported["condition"], reported["runner"]["condition"]) == ("frozen", "frozen")
    file.remove()
    assert "the supervisor process has reported nothing" in top()


@pytest.mark.tier("all")
def test_a_daemon_alone_has_no_shard_to_choose(demo: Daemon) -> None:
    done = CliRunner().invoke(app, ["top", "--name", "demo", "--once", "--shard", "0"])
    assert (done.exit_code, "the daemon has no shards" in done.stderr) == (Exit.USAGE, True)


# ---- top -----------------------------------------------------------------------------------------


def top(*args: str) -> str:
    """Run `purgatoryd top --once`; return its output."""
    command = ["top", "--name", "demo", "--once", "--interval", "100ms", *args]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "140"}, catch_exceptions=False)
    assert done.exit_code == Exit.DONE, done.output
    return done.stdout


@pytest.mark.tier("all")
def test_one_view_has_the_rates_of_counters_that_heartbeats_store(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventually(lambda: sampler._moment().metrics.counters["wakeups"] > 0)
    monkeypatch.setattr(top_view, "HEARTBEAT_S", PATIENCE_S)
    assert json.loads(top("--json"))["rates"]["wake-ups"] > 0


@pytest.mark.tier("test")
def test_one_view_in_the_terminal(demo: Daemon) -> None:
    with Client("demo", namespace="[red]shop") as client:
        client.add("hidden-key", delay=3, payload=b"hidden-payload")
        shown = top()
    for text in (
        "ready",
        f"process {demo.pid}",
        "1 of 1,000",
        "level 0",
        "█",
        "p99",
        "slow clients",
    ):
        assert text in shown
    assert f"process {os.getpid()}, uid {os.geteuid()}" not in shown  # only slow clients are shown
    for text in ("[red]shop", "structural lateness"):
        assert text in shown
    assert "hidden" not in shown


@pytest.mark.tier("all")
@pytest.mark.parametrize("columns", [40, 80, 140])
def test_a_narrow_terminal_shows_less_side_by_side(demo: Daemon, columns: int) -> None:
    with Client("demo") as client:
        client.add_many([(f"k{i}", 60.0) for i in range(123)])
        command = ["top", "--name", "demo", "--once", "--interval", "100ms"]
        shown = CliRunner().invoke(app, command, env={"COLUMNS": str(columns)}).stdout
    assert max(map(len, shown.splitlines())) <= columns
    assert "payload memory" in shown
    assert "123 of 1,000" in shown
    title = next(line for line in shown.splitlines() if "per second" in line)
    assert ("times" in title) is (columns > 40)
    assert ("fill" in title) is (columns > 80)


@pytest.mark.parametrize("columns", [8, 12, 100])
def test_the_first_of_many_shows_in_a_bar(columns: int) -> None:
    console = Console(width=columns, color_system=None, file=StringIO())
    shown = [
        "".join(piece.text for piece in console.render(Bar(Fill("timers", used, 10**6, ""))))
        for used in (0, 1, 10**6)
    ]
    assert [text.count("━") for text in shown] == [0, 1, columns]


def test_times_have_space_next_to_the_others() -> None:
    span = 123_456_789
    view = SimpleNamespace(times={"structural_lateness": Spread(1, span, span, span, [])})
    console = Console(width=48, file=StringIO())
    with console.capture() as capture:
        console.print(boxed("times", times(cast(View, view))))
    assert capture.get().count(units.format_duration(span)) == 3


@pytest.mark.tier("all")
def test_a_pipe_gets_one_view_after_the_other(demo: Daemon) -> None:
    command = [sys.executable, "-m", "purgatoryd.cli", "top", "--name", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=demo.env) as process:
        assert process.stdout is not None
        heads = (line for line in process.stdout if line.startswith(" ready  demo"))
        assert [next(heads) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == Exit.DONE


@pytest.mark.tier("all")
def test_views_in_json_go_on(demo: Daemon) -> None:
    command = [sys.executable, "-m", "purgatoryd.cli", "top", "--name", "demo", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=demo.env) as process:
        assert process.stdout is not None
        views = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == Exit.DONE
    assert [view["condition"] for view in views] == ["ready"] * 2


@pytest.mark.tier("all")
def test_views_in_json_outlive_the_arena(demo: Daemon) -> None:
    command = [sys.executable, "-m", "purgatoryd.cli", "top", "--name", "demo", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=demo.env) as process:
        assert process.stdout is not None
        reported = map(json.loads, process.stdout)
        assert next(reported)["condition"] == "ready"
        demo.stop()
        remove_arena_files(demo.paths)
        assert "demo" in next(view for view in reported if "error" in view)["error"]
        demo.start()
        assert any(view.get("condition") == "ready" for view in reported)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == Exit.DONE


@pytest.mark.tier("all")
def test_a_stopped_daemon_has_no_process(demo: Daemon) -> None:
    demo.stop()
    shown = top()
    assert "stopped for " in shown
    assert "process 0" not in shown


@contextmanager
def drawn(demo: Daemon, columns: int, lines: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `purgatoryd top` in a terminal of this size; yield (process, terminal's other end)."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "purgatoryd.cli", "top", "--name", demo.name]
    environment = demo.env | {"TERM": "xterm", "COLUMNS": str(columns), "LINES": str(lines)}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, env=environment) as process:
        os.close(theirs)
        yield process, ours
    os.close(ours)


@pytest.mark.tier("all")
def test_the_terminal_is_drawn_until_it_is_interrupted(demo: Daemon) -> None:
    with drawn(demo, columns=120, lines=50) as (process, ours):
        seen = b""
        while b"level 0" not in seen:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == Exit.DONE


@pytest.mark.tier("all")
def test_keys_choose_a_section_and_end(demo: Daemon) -> None:
    with drawn(demo, columns=80, lines=24) as (process, ours):
        for key, shown in (
            (b"", b"per second"),
            (b"\x1b[C", b"batch service"),
            (b"4", b"level 0"),
            (b"h", b"this help"),
            (b"h", b"level 0"),
            (b"a", b"per second"),
        ):
            os.write(ours, key)
            seen = b""
            while shown not in seen:
                seen += os.read(ours, 4096)
        os.write(ours, b"q")
        with suppress(OSError):  # `top` has closed its end
            while os.read(ours, 4096):
                continue
        assert process.wait(PATIENCE_S) == Exit.DONE


@pytest.mark.tier("test")
@pytest.mark.parametrize("section", range(len(SECTIONS)))
def test_a_small_terminal_shows_a_section_whole(sampler: Sampler, section: int) -> None:
    chosen = Choice()
    chosen.take(str(section + 1))
    console = Console(width=80, height=24, color_system=None, file=StringIO())
    with Client("demo", namespace="shop") as client:
        client.add_many([(f"k{i}", 60.0, "orders", b"") for i in range(10)])
    with console.capture() as capture:
        console.print(picture(sampler.take(), chosen, console))
    lines = capture.get().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    if section == 0:
        for word in ("ready", "armed", "fired", "late, p50 and p99", "slow clients"):
            assert word in capture.get()


@pytest.mark.tier("all")
def test_a_large_terminal_shows_all_sections(sampler: Sampler) -> None:
    console = Console(width=120, height=50, color_system=None, file=StringIO())
    with console.capture() as capture:
        console.print(picture(sampler.take(), Choice(), console))
    assert all(title in capture.get() for title in ("per second", "topics with", "slow clients"))


@pytest.mark.parametrize("command", ["top", "status", "web"])
def test_a_time_below_0_freezes_nobody(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--frozen-after", "-1s"])
    assert (done.exit_code, "'-1s' is not a duration" in done.stderr) == (Exit.USAGE, True)


def test_no_daemon_at_all(daemon_dir: object) -> None:
    done = CliRunner().invoke(app, ["top", "--name", "nobody", "--once"])
    assert done.exit_code == Exit.NO_DAEMON
