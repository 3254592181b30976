"""Placement of real daemons on this machine, and of those who come near them."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import StartDaemon
from fake_system import Machine
from machine import CPUSETS, needs
from other_user import run_as
from real_daemon import PATIENCE_S, Daemon, clean_environment, eventually, stats

from purgatoryd.cli.exits import Exit
from purgatoryd.clients import Client, InvalidArgument, Subscriber
from purgatoryd.clients.remote import Remote
from purgatoryd.daemon import placement
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.placement import Placement, taken_cpus
from purgatoryd.daemon.plan import plan
from purgatoryd.shm_layout import keys, memory, segment
from purgatoryd.shm_layout.arena import Placed
from purgatoryd.shm_layout.layout import PlacementPart
from purgatoryd.shm_layout.topology import cpu_text, read, worker_cpus

Cpus = set[int]
STRANGER = 4242


@pytest.fixture
def pair() -> tuple[int, int]:
    """Two CPUs that are ours: the last one, and the first."""
    needs("cpus")
    ours = sorted(os.sched_getaffinity(0))
    return ours[-1], ours[0]


@pytest.fixture
def pinned(daemon: StartDaemon, pair: tuple[int, int]) -> Daemon:
    """Its loop on one of them, the other threads on the other."""
    return daemon("demo", "--cpus", f"{pair[0]},{pair[1]}")


def affinities(pid: int) -> tuple[Cpus, list[Cpus]]:
    """Of the loop, and of the other threads."""
    others = (thread.id for thread in psutil.Process(pid).threads() if thread.id != pid)
    return os.sched_getaffinity(pid), [os.sched_getaffinity(thread) for thread in others]


# ---- CPUs ---------------------------------------------------------------------------------------


def test_the_loop_and_the_other_threads_are_where_they_belong(
    daemon: StartDaemon, pair: tuple[int, int]
) -> None:
    loop, others = pair
    real = daemon("demo", "--cpus", f"{loop},{others}", "--journal", "journal")
    assert affinities(real.pid) == ({loop}, [{others}] * 3)  # libzmq has two, the committer is one
    figures: dict[str, Any] = stats(real)
    assert (figures["placement"], figures["reaper_cpu"]) == ("explicit", loop)
    assert (figures["placed"], figures["clamped"]) == ("cpus", None)


def test_what_is_impossible_is_told_and_the_daemon_runs(daemon: StartDaemon) -> None:
    real = daemon("demo", "--cpus", "65535", "--node", "60000")
    assert "of --cpus, 65535 are not online" in real.stderr
    assert "there is no node 60000" in real.stderr
    assert stats(real)["clamped"] == "cpus, memory"  # type: ignore[comparison-overlap]
    with Client("demo") as client:
        client.add("key", delay=60)


def test_auto_does_what_its_plan_says(daemon: StartDaemon) -> None:
    topology = read(os.sched_getaffinity(0))
    real = daemon("demo")
    loop, others = affinities(real.pid)
    if plan(topology, Config("demo")).reaper:
        assert len(loop) == 1  # which one depends on other daemons
        assert all(loop.isdisjoint(cpus) for cpus in others)
    else:
        assert [loop, *others] == [topology.allowed] * 3


def test_none_leaves_everything_alone(daemon: StartDaemon) -> None:
    real = daemon("demo", "--placement", "none")
    loop, others = affinities(real.pid)
    assert [loop, *others] == [os.sched_getaffinity(0)] * 3
    figures: dict[str, Any] = stats(real)
    assert [figures[f] for f in ("placement", "node", "reaper_cpu")] == ["none", None, None]


@pytest.mark.parametrize("name", ["purgatoryd", "ZMQbg/IO/0"])
def test_a_thread_that_was_moved_goes_back(
    name: str, pinned: Daemon, pair: tuple[int, int]
) -> None:
    loop, others = pair
    moved = pinned.pid if name == "purgatoryd" else thread(pinned, name)
    os.sched_setaffinity(moved, {loop, others})
    eventually(lambda: affinities(pinned.pid) == ({loop}, [{others}] * 2))


@pytest.fixture
def cpuset() -> Iterator[Path]:
    """A cgroup of our own that has the CPUs and the memory of all."""
    needs("cpuset")
    made = CPUSETS / f"purgatoryd-test-{os.getpid()}"
    made.mkdir()
    (made / "cpuset.cpus").write_text(cpu_text(os.sched_getaffinity(0)))
    (made / "cpuset.mems").write_text(cpu_text(read(None).memory_nodes))
    yield made
    eventually(lambda: not (made / "cgroup.procs").read_text())
    made.rmdir()


def test_a_daemon_follows_its_cgroup(
    cpuset: Path, daemon: StartDaemon, pair: tuple[int, int]
) -> None:
    loop, others = pair
    real = daemon("demo", "--cpus", f"{loop},{others}")
    (cpuset / "cgroup.procs").write_text(str(real.pid))
    (cpuset / "cpuset.cpus").write_text(str(others))
    eventually(lambda: stats(real)["reaper_cpu"] == others)
    assert affinities(real.pid) == ({others}, [{others}] * 2)
    assert stats(real)["clamped"] == "cpus"  # type: ignore[comparison-overlap]
    (cpuset / "cpuset.cpus").write_text(f"{loop},{others}")
    eventually(lambda: stats(real)["reaper_cpu"] == loop)
    assert affinities(real.pid) == ({loop}, [{others}] * 2)
    assert stats(real)["clamped"] is None


def test_sighup_puts_every_thread_back(pinned: Daemon, pair: tuple[int, int]) -> None:
    loop, others = pair
    for thread in psutil.Process(pinned.pid).threads():
        if thread.id != pinned.pid:
            os.sched_setaffinity(thread.id, {loop})
    os.kill(pinned.pid, signal.SIGHUP)
    eventually(lambda: affinities(pinned.pid) == ({loop}, [{others}] * 2))


def test_a_child_does_not_stay_on_the_loops_cpu(pinned: Daemon, pair: tuple[int, int]) -> None:
    code = (
        "import os; from purgatoryd.daemon.snapshot import leave_the_loop; "
        f"os.sched_setaffinity(0, {{{pair[0]}}}); leave_the_loop({pinned.pid}); "
        "print(*os.sched_getaffinity(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(pair[1])]


def test_loops_of_other_daemons_are_known(
    pinned: Daemon, pair: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (pinned.paths.arena, pinned.paths.private, "/purgatoryd.gone"):
        (tmp_path / name[1:]).touch()
    monkeypatch.setattr(segment, "MOUNT", tmp_path)  # only these are looked at
    assert taken_cpus("/purgatoryd.another") == {pair[0]}
    assert taken_cpus(pinned.paths.arena) == set()
    pinned.kill()
    assert taken_cpus("/purgatoryd.another") == set()


def test_a_cgroup_that_takes_and_gives_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Cpus, Cpus]] = []
    monkeypatch.setattr(placement, "_set_cpus", lambda *cpus: asked.append(cpus))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    arena: Any = FakeArena()
    Machine({0: range(4)}).lay_out(tmp_path)
    one = Placement(Config("demo"), "", tmp_path)
    one.settle(arena)
    one.look(arena)
    Machine({0: range(4)}, cgroup=(0, 1)).lay_out(tmp_path)
    one.look(arena)
    assert (arena.placed.applied, arena.placed.reaper_cpu) == (PlacementPart(0), None)
    Machine({0: range(4)}, cgroup=(0, 1, 2)).lay_out(tmp_path)
    one.look(arena)
    one.look(arena)
    assert (arena.placed.applied, arena.placed.reaper_cpu) == (PlacementPart.CPUS, 2)
    assert asked == [({3}, {0, 1, 2}), ({0, 1}, {0, 1}), ({2}, {0, 1})]
    assert "the scheduler does better than a pin" in capfd.readouterr().err


# ---- what else ----------------------------------------------------------------------------------


def test_the_loop_runs_first_and_memory_stays(daemon: StartDaemon) -> None:
    needs("root", "to be allowed SCHED_FIFO and mlockall")
    real = daemon("demo", "--realtime", "3", "--lock-memory", "true")
    policy = os.sched_getscheduler(real.pid)
    assert policy == os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    assert os.sched_getparam(real.pid).sched_priority == 3
    assert os.sched_getparam(thread(real, "ZMQbg/IO/0")).sched_priority == 2
    assert os.sched_getscheduler(thread(real, "ZMQbg/Reaper")) == os.SCHED_OTHER
    assert status(real.pid, "VmLck") >= stats(real)["length"] // 1024
    assert {"realtime", "lock"} <= set(str(stats(real)["placed"]).split(", "))


def thread(real: Daemon, name: str) -> int:
    """Of the thread of that name."""
    (found,) = (
        int(task.name)
        for task in Path(f"/proc/{real.pid}/task").iterdir()
        if (task / "comm").read_text() == f"{name}\n"
    )
    return found


def status(pid: int, field: str) -> int:
    """A field of /proc/PID/status in kB."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1])


def test_the_loop_spins_before_a_deadline(daemon: StartDaemon) -> None:
    real = daemon("demo", "--busy-poll", "10ms")
    if len(os.sched_getaffinity(0)) == 1:
        assert stats(real)["clamped"] == "spin"  # type: ignore[comparison-overlap]
        return

    def sleepless_turns() -> int:
        figures = stats(real)
        return figures["loop_turns"] - figures["wakeups"]

    def spun() -> bool:
        before = sleepless_turns()
        timers.add("key", delay=0.015, mode="replace")
        notice = notices.get(PATIENCE_S)
        assert notice is not None
        assert notice.fired_boot_ns >= notice.deadline_boot_ns
        beat = stats(real)["heartbeat_boot_ns"]
        eventually(lambda: stats(real)["heartbeat_boot_ns"] > beat)
        return sleepless_turns() - before > 20

    with Subscriber("demo") as notices, Client("demo") as timers:
        eventually(spun)


def test_the_arena_gets_huge_pages(daemon_dir: Path, tmp_path: Path) -> None:
    needs("mountns", "for a tmpfs with huge pages")
    python = tmp_path / "python"
    mount = "mount -t tmpfs -o huge=advise tmpfs /dev/shm"
    python.write_text(
        f'#!/bin/sh\nexec unshare -m sh -c \'{mount} && exec "$0" "$@"\' {sys.executable} "$@"\n'
    )
    python.chmod(0o700)
    real = Daemon("demo", daemon_dir, ("--huge-pages", "true"), python=str(python))
    try:
        smaps = Path(f"/proc/{real.pid}/smaps").read_text()
        huge = sum(map(int, re.findall(r"^ShmemPmdMapped:\s+(\d+) kB", smaps, re.M)))
        assert huge > 0 or "no huge pages" in real.stderr  # there may be none left
    finally:
        real.close()


class FakeArena:
    """Takes note of what is published."""

    mappings = ()
    placed: Placed

    def set_placement(self, placed: Placed) -> None:
        self.placed = placed


def settled(config: Config) -> Placed:
    """How a placement of this very process ends."""
    arena: Any = FakeArena()
    Placement(config, "").settle(arena)
    placed: Placed = arena.placed
    return placed


def test_what_this_user_may_not_is_refused_and_told(capfd: pytest.CaptureFixture[str]) -> None:
    config = Config("demo", realtime=5, lock_memory=True, placement="none")
    placed = run_as(STRANGER, lambda: settled(config))
    assert placed.clamped == PlacementPart.REALTIME | PlacementPart.LOCK
    assert placed.applied == PlacementPart(0)
    told = capfd.readouterr().err
    assert "purgatoryd: placement: no SCHED_FIFO: " in told
    assert "purgatoryd: placement: no memory that stays in RAM: " in told


@pytest.mark.parametrize("error", [OSError(1, "not permitted"), ValueError("no such CPU")])
def test_cpus_that_the_kernel_refuses(
    error: Exception, pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(placement, "_set_cpus", refuse)
    placed = settled(Config("demo", cpus=f"{pair[0]},{pair[1]}"))
    assert (placed.applied, placed.clamped) == (PlacementPart(0), PlacementPart.CPUS)


# ---- memory --------------------------------------------------------------------------------------


def in_a_child(work: Callable[[], object]) -> object:
    """A policy belongs to the process; this one has to be as it was."""
    return run_as(os.getuid(), work, gid=os.getgid(), groups=os.getgroups())


def bound(node: int) -> tuple[int, int, int]:
    """Pages elsewhere: before they were bound, then, and of a node that is not there."""
    memory.prefer(node)
    with mmap.mmap(-1, 1 << 20) as mapping:
        mapping.write(bytes(1 << 20))
        before = memory.elsewhere(mapping, node)
        memory.bind(mapping, node, move=False)
        memory.bind(mapping, node, move=True)
        return before, memory.elsewhere(mapping, node), memory.elsewhere(mapping, node + 1)


def test_memory_of_the_one_node_is_there() -> None:
    nodes = read(None).memory_nodes
    if len(nodes) != 1:
        pytest.skip("this machine has several nodes; what a guest of two does is tested there")
    (node,) = nodes
    assert in_a_child(lambda: bound(node)) == (0, 0, memory.SAMPLES)


def test_a_node_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        memory.prefer(1000)


# ---- near ----------------------------------------------------------------------------------------

COME_NEAR = {
    "client": "from purgatoryd.clients import Client\nc = Client('demo', near=True)",
    "purgatory": "from purgatoryd.clients import Purgatory\nc = Purgatory('demo', near=True)",
    "subscriber": "from purgatoryd.clients import Subscriber\nc = Subscriber('demo', near=True)",
    "asyncio": "import asyncio\nfrom purgatoryd.clients import AsyncClient\n"
    "async def main():\n    async with AsyncClient('demo', near=True):\n        tell()\n"
    "asyncio.run(main())\nraise SystemExit",
}
TELL = """
import os
def tell():
    print(*({frozenset(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')}))
"""


@pytest.mark.parametrize("who", COME_NEAR)
def test_who_wants_to_be_near_leaves_the_loop_alone(
    who: str, pinned: Daemon, pair: tuple[int, int]
) -> None:
    topology = read(os.sched_getaffinity(0))
    node = topology.node_of(pair[0])
    assert node is not None
    near = frozenset(worker_cpus(topology, node.id, pair[0]))
    code = f"{TELL}\n{COME_NEAR[who]}\ntell()"
    command = [sys.executable, "-c", code]
    environment = clean_environment(pinned.dir)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(near)  # all threads of it


def test_a_daemon_on_another_host_is_not_near(tmp_path: Path) -> None:
    server = keys.generate(tmp_path / "server")
    keys.generate(tmp_path / "client")
    remote = Remote("127.0.0.1:7000", server.public.decode(), tmp_path / "client")
    for make in (Client, Subscriber):
        with pytest.raises(InvalidArgument, match="on this host"):
            make("demo", remote=remote, near=True)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_shows_where_the_daemon_is(pinned: Daemon, pair: tuple[int, int]) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "purgatoryd.cli", "placement", "--name", "demo"]
        environment = clean_environment(pinned.dir)
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == Exit.DONE, done.stderr
        return done.stdout

    topology = read(os.sched_getaffinity(0))
    node = topology.node_of(pair[0])
    assert node is not None
    assert f"the daemon (explicit): node {node.id}, the loop on CPU {pair[0]}" in run()
    assert json.loads(run("--json"))["daemon"]["reaper_cpu"] == pair[0]
    advised = [json.loads(line)["cpu"] for line in run("--advise", "3", "--json").splitlines()]
    near = worker_cpus(topology, node.id, pair[0])
    assert advised == [near[worker % len(near)] for worker in range(3)]
