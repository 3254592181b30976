"""Placement of real daemons on this machine, and of clients with numa_local=True."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_system import Machine
from machine import CPUSETS, needs
from other_user import run_as
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    boot_ns,
    clean_environment,
    eventually,
    stats,
    thread_status,
)

from purgatoryd.cli.exits import Exit
from purgatoryd.clients import Admin, Client, InvalidArgument, Subscriber
from purgatoryd.clients.remote import Remote
from purgatoryd.daemon import placement
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.log import log
from purgatoryd.daemon.placement import Placement
from purgatoryd.daemon.placement_plan import plan_placement
from purgatoryd.shm_layout import curve, memory, shm
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Placed
from purgatoryd.shm_layout.layout import ABI, PlacementPart, size_of
from purgatoryd.shm_layout.loops import Loop, loop_cpus, loops
from purgatoryd.shm_layout.topology import cpu_text, read, worker_cpus

# alone: daemons of other tests would change the CPUs that these tests check
pytestmark = [pytest.mark.tier("all"), pytest.mark.alone]

Cpus = set[int]
CORE = PlacementPart.CORE
STRANGER = 4242


@pytest.fixture
def pair() -> tuple[int, int]:
    """Two CPUs that this process may use: (last CPU, first CPU)."""
    needs("cpus")
    ours = sorted(os.sched_getaffinity(0))
    return ours[-1], ours[0]


@pytest.fixture
def pinned(daemon: StartDaemon, pair: tuple[int, int]) -> Daemon:
    """A daemon with its loop on the first CPU of `pair`, and all other threads on the second."""
    return daemon("demo", "--cpus", f"{pair[0]},{pair[1]}")


def affinities(pid: int) -> tuple[Cpus, list[Cpus]]:
    """Return (CPUs of the loop, list of the CPUs of each other thread)."""
    others: list[Cpus] = []
    for thread in psutil.Process(pid).threads():
        if thread.id != pid:
            # a thread may have ended, such as the thread that wrote "ready"
            with suppress(ProcessLookupError):
                others.append(os.sched_getaffinity(thread.id))
    return os.sched_getaffinity(pid), others


def spread(pid: int) -> list[Cpus]:
    """Return the CPUs of each thread of a process."""
    loop, others = affinities(pid)
    return [loop, *others]


# ---- CPUs ---------------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_the_loop_and_the_other_threads_are_where_they_belong(
    daemon: StartDaemon, pair: tuple[int, int]
) -> None:
    loop, others = pair
    real = daemon("demo", "--cpus", f"{loop},{others}", "--wal-dir", "wal")
    # libzmq has two threads; group commit and log have one each
    eventually(lambda: affinities(real.pid) == ({loop}, [{others}] * 4))
    figures: dict[str, Any] = stats(real)
    assert (figures["placement"], figures["reaper_cpu"]) == ("explicit", loop)
    assert (figures["placed"], figures["clamped"]) == ("cpus", None)


def test_impossible_settings_are_reported_and_the_daemon_runs(daemon: StartDaemon) -> None:
    real = daemon("demo", "--cpus", "65535", "--node", "60000")
    assert "CPUs 65535 of --cpus are not online" in real.stderr
    assert "there is no node 60000" in real.stderr
    assert stats(real)["clamped"] == "cpus, memory"  # type: ignore[comparison-overlap]
    with Client("demo") as client:
        client.add("key", delay=60)


def test_auto_does_what_its_plan_says(daemon: StartDaemon) -> None:
    topology = read(os.sched_getaffinity(0))
    real = daemon("demo")
    loop, others = affinities(real.pid)
    if plan_placement(topology, Config("demo")).reaper:
        assert len(loop) == 1  # the choice of this CPU depends on other daemons
        assert all(loop.isdisjoint(cpus) for cpus in others)
    else:
        eventually(lambda: spread(real.pid) == [topology.allowed] * 4)


def test_none_leaves_everything_alone(daemon: StartDaemon) -> None:
    real = daemon("demo", "--placement", "none")
    eventually(lambda: spread(real.pid) == [os.sched_getaffinity(0)] * 4)
    figures: dict[str, Any] = stats(real)
    assert [figures[f] for f in ("placement", "node", "reaper_cpu")] == ["none", None, None]


@pytest.mark.parametrize("name", ["purgatoryd", "ZMQbg/IO/0"])
def test_a_thread_that_was_moved_goes_back(
    name: str, pinned: Daemon, pair: tuple[int, int]
) -> None:
    loop, others = pair
    moved = pinned.pid if name == "purgatoryd" else thread(pinned, name)
    os.sched_setaffinity(moved, {loop, others})
    eventually(lambda: affinities(pinned.pid) == ({loop}, [{others}] * 3))


@pytest.fixture
def cpuset() -> Iterator[Path]:
    """Yield a cgroup for this test with all CPUs and all memory nodes."""
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
    assert affinities(real.pid) == ({others}, [{others}] * 3)
    assert stats(real)["clamped"] == "cpus"  # type: ignore[comparison-overlap]
    (cpuset / "cpuset.cpus").write_text(f"{loop},{others}")
    eventually(lambda: stats(real)["reaper_cpu"] == loop)
    assert affinities(real.pid) == ({loop}, [{others}] * 3)
    assert stats(real)["clamped"] is None


def test_sighup_puts_every_thread_back(pinned: Daemon, pair: tuple[int, int]) -> None:
    loop, others = pair
    for thread in psutil.Process(pinned.pid).threads():
        if thread.id != pinned.pid:
            os.sched_setaffinity(thread.id, {loop})
    os.kill(pinned.pid, signal.SIGHUP)
    eventually(lambda: affinities(pinned.pid) == ({loop}, [{others}] * 3))


def test_sighup_takes_over_what_the_file_says_now(
    daemon: StartDaemon, pair: tuple[int, int], tmp_path: Path
) -> None:
    loop, others = pair
    everywhere = os.sched_getaffinity(0)
    settings = tmp_path / "demo.toml"
    settings.write_text('placement = "none"\n')
    real = daemon("demo", "--config", str(settings))

    def reloaded(text: str) -> tuple[Cpus, list[Cpus]]:
        settings.write_text(text)
        os.kill(real.pid, signal.SIGHUP)
        with Admin("demo") as admin:
            admin.ping()  # the daemon answers after the reload
        return affinities(real.pid)

    assert reloaded(f'cpus = "{loop},{others}"\n') == ({loop}, [{others}] * 3)
    assert re.search(r"the daemon \(explicit\): node \d+, the loop on CPU", placement_of(real))
    busy = reloaded(f'cpus = "{others},{loop}"\nnode = 60000\nbusy-poll = "1us"\n')
    assert busy == ({others}, [{loop}] * 3)
    figures: dict[str, Any] = stats(real)
    assert (figures["reaper_cpu"], figures["clamped"]) == (others, "memory")
    assert figures["placed"] == "cpus, spin"
    assert "there is no node 60000" in real.stderr
    assert reloaded('placement = "none"\n') == (everywhere, [everywhere] * 3)
    after: dict[str, Any] = stats(real)
    assert [after[f] for f in ("placement", "reaper_cpu", "placed")] == ["none", None, None]
    assert "the daemon (none): its threads run anywhere" in placement_of(real)
    assert "apply from the next start" not in real.stderr


def test_sighup_has_the_loop_run_first_and_as_usual_again(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    needs("realtime")
    settings = tmp_path / "demo.toml"
    settings.touch()
    real = daemon("demo", "--config", str(settings))
    for priority, parts in ((3, {"realtime"}), (0, set())):
        settings.write_text(f"realtime = {priority}\n")
        os.kill(real.pid, signal.SIGHUP)
        with Admin("demo") as admin:
            admin.ping()
        assert os.sched_getparam(real.pid).sched_priority == priority
        assert os.sched_getparam(thread(real, "ZMQbg/IO/0")).sched_priority == max(0, priority - 1)
        assert set(str(stats(real)["placed"]).split(", ")) & {"realtime"} == parts


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
    (tmp_path / "purgatoryd.gone").touch()
    write_header(tmp_path / pinned.paths.private[1:], 7)
    begins = (shm.MOUNT / pinned.paths.arena[1:]).read_bytes()[: size_of("pg_header")]
    (tmp_path / pinned.paths.arena[1:]).write_bytes(begins)
    monkeypatch.setattr(shm, "MOUNT", tmp_path)  # loop_cpus() reads only arenas in this folder
    os.mkfifo(tmp_path / "purgatoryd.fifo")
    write_header(tmp_path / "purgatoryd.foreign", 7, magic=0)
    # The pid of a killed daemon now belongs to this process, which started later.
    write_header(tmp_path / "purgatoryd.killed", 7, moved_boot_ns=1)
    assert loop_cpus("/purgatoryd.another") == [pair[0]]
    assert loop_cpus(pinned.paths.arena) == []
    pinned.kill()
    assert loop_cpus("/purgatoryd.another") == []


def write_header(
    path: Path,
    cpu: int,
    magic: int = lib.PG_MAGIC,
    parts: PlacementPart = PlacementPart.CPUS | CORE,
    moved_boot_ns: int | None = None,
) -> None:
    """Write the arena header of a daemon whose pid is this process and whose loop is on `cpu`.
    `moved_boot_ns`: time of its last heartbeat; None = now."""
    header = ffi.new("struct pg_header *")
    header.heartbeat_boot_ns = boot_ns() if moved_boot_ns is None else moved_boot_ns
    header.placement.applied = parts
    header.magic, header.abi_major, header.daemon_pid = magic, ABI[0], os.getpid()
    header.placement.reaper_cpu = cpu + 1
    path.write_bytes(ffi.buffer(header)[:])


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Cpus, Cpus]]:
    """Return the CPUs that Placement sets, on a simulated machine with four CPUs and no other
    daemon."""
    sets: list[tuple[Cpus, Cpus]] = []
    affinities_of_threads = placement._affinities

    def record(loop: Cpus, others: Cpus) -> object:
        sets.append((loop, others))
        return affinities_of_threads()

    monkeypatch.setattr(placement, "_set_cpus", record)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(shm, "MOUNT", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    Machine({0: range(4)}).lay_out(tmp_path)
    log._start()  # start its thread now: Placement sets all CPUs again when a thread starts
    return sets


@pytest.mark.tier("test")
def test_a_daemon_makes_way_for_one_that_comes(
    asked: list[tuple[Cpus, Cpus]], tmp_path: Path
) -> None:
    arena: Any = FakeArena()
    one = Placement(Config("demo"), "/purgatoryd.demo", tmp_path)
    write_header(tmp_path / "shm" / "purgatoryd.demo", 3)
    other = tmp_path / "shm" / "purgatoryd.other"
    write_header(other, 3)  # both daemons chose CPU 3 before they knew of each other
    one.settle(arena)
    one.look(arena)
    one.look(arena)
    other.unlink()
    one.look(arena)
    assert asked == [({3}, {0, 1, 2}), ({2}, {0, 1}), ({2}, {0, 1, 3})]
    assert arena.placed.reaper_cpu == 2


def test_a_thread_that_is_moved_while_all_are_pinned_goes_back(
    asked: list[tuple[Cpus, Cpus]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena: Any = FakeArena()
    one = Placement(Config("demo"), "", tmp_path)
    with monkeypatch.context() as patch:
        moved = {thread: {0} for thread in placement._affinities()}
        patch.setattr(placement, "_affinities", lambda: moved)
        one.settle(arena)  # somebody moves the threads right after settle()
        one.look(arena)
        assert len(asked) == 2
    one.look(arena)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("given", "leaves"), [({}, CORE), ({"node": 0}, CORE), ({"cpus": "3,0-2"}, PlacementPart(0))]
)
def test_a_daemon_that_chose_its_core_says_so(
    given: dict[str, Any], leaves: PlacementPart, asked: list[tuple[Cpus, Cpus]], tmp_path: Path
) -> None:
    arena: Any = FakeArena()
    Placement(Config("demo", **given), "/purgatoryd.demo", tmp_path).settle(arena)
    assert asked == [({3}, {0, 1, 2})]
    assert arena.placed.applied & CORE == leaves


@pytest.mark.parametrize(
    ("smaller", "parts", "cpu"),
    [
        (True, PlacementPart.CPUS | CORE, 3),
        (False, PlacementPart.CPUS | CORE, 2),
        (True, PlacementPart.CPUS, 2),  # the other daemon cannot move
    ],
)
def test_two_daemons_on_one_core_leave_it_to_the_smaller_pid(
    smaller: bool, parts: PlacementPart, cpu: int, asked: list[tuple[Cpus, Cpus]],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    arena: Any = FakeArena()
    one = Placement(Config("demo"), "/purgatoryd.demo", tmp_path)
    one.settle(arena)
    assert arena.placed.reaper_cpu == 3
    write_header(tmp_path / "shm" / "purgatoryd.other", 3, parts=parts)
    theirs = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: theirs - 1 if smaller else theirs + 1)
    one.look(arena)
    assert arena.placed.reaper_cpu == cpu
    one.look(arena)
    assert len(asked) == 2


@pytest.mark.tier("test")
def test_the_more_loops_there_are_the_less_often_they_are_looked_at(
    asked: list[tuple[Cpus, Cpus]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena: Any = FakeArena()
    for n in range(2 * placement.LOOPS_PER_HEARTBEAT + 1):
        write_header(tmp_path / "shm" / f"purgatoryd.{n}", 1)
    one = Placement(Config("demo"), "/purgatoryd.demo", tmp_path)
    one.settle(arena)
    looks, looked = 0, []

    def noted(*ours: str) -> list[Loop]:
        nonlocal looks
        looks += 1
        return loops(*ours)

    monkeypatch.setattr(placement, "loops", noted)
    for _ in range(6):
        one.look(arena)
        looked.append(looks)
    assert looked == [0, 0, 1, 1, 1, 2]
    assert asked == [({3}, {0, 2})]


@pytest.mark.parametrize("call", ["_affinities", "read"])
def test_without_descriptors_the_placement_stays_until_there_are_some(
    call: str, asked: list[tuple[Cpus, Cpus]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena: Any = FakeArena()
    one = Placement(Config("demo"), "/purgatoryd.demo", tmp_path)
    one.settle(arena)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(placement, call, fail)
        one.look(arena)
        one.again(arena, Config("demo", cpus="0"))
    one.look(arena)
    assert [loop for loop, _ in asked][-1] == {0}
    assert arena.placed.reaper_cpu == 0


def test_a_cgroup_that_takes_and_gives_back(
    asked: list[tuple[Cpus, Cpus]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arena: Any = FakeArena()
    one = Placement(Config("demo"), "", tmp_path)
    one.settle(arena)
    one.look(arena)
    Machine({0: range(4)}, cgroup=(0, 1)).lay_out(tmp_path)
    one.look(arena)
    assert (arena.placed.applied, arena.placed.reaper_cpu) == (PlacementPart(0), None)
    Machine({0: range(4)}, cgroup=(0, 1, 2)).lay_out(tmp_path)
    one.look(arena)
    one.look(arena)
    assert (arena.placed.applied, arena.placed.reaper_cpu) == (PlacementPart.CPUS | CORE, 2)
    assert asked == [({3}, {0, 1, 2}), ({0, 1}, {0, 1}), ({2}, {0, 1})]
    log.flush()
    assert "too few to pin threads" in capfd.readouterr().err


# ---- settings other than CPUs -------------------------------------------------------------------


def test_the_loop_runs_first_and_memory_stays(daemon: StartDaemon) -> None:
    needs("realtime")
    needs("memlock")
    real = daemon("demo", "--realtime", "3", "--lock-memory", "true")
    policy = os.sched_getscheduler(real.pid)
    assert policy == os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    assert os.sched_getparam(real.pid).sched_priority == 3
    assert os.sched_getparam(thread(real, "ZMQbg/IO/0")).sched_priority == 2
    assert os.sched_getscheduler(thread(real, "ZMQbg/Reaper")) == os.SCHED_OTHER
    assert status(real.pid, "VmLck") >= stats(real)["length"] // 1024
    assert {"realtime", "lock"} <= set(str(stats(real)["placed"]).split(", "))


def thread(real: Daemon, name: str) -> int:
    """Return the id of the thread with that name."""
    (found,) = (
        task
        for task, text in thread_status(real.pid).items()
        if text.startswith(f"Name:\t{name}\n")
    )
    return found


def status(pid: int, field: str) -> int:
    """Return the value of a field of /proc/PID/status in kB."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1])


def test_the_loop_spins_before_a_deadline(daemon: StartDaemon) -> None:
    real = daemon("demo", "--busy-poll", "10ms")
    if len(os.sched_getaffinity(0)) == 1:
        assert stats(real)["clamped"] == "spin"  # type: ignore[comparison-overlap]
        return

    def sleepless_iterations() -> int:
        figures = stats(real)
        return figures["loop_iterations"] - figures["wakeups"]

    def spun() -> bool:
        before = sleepless_iterations()
        timers.add("key", delay=0.015, mode="replace")
        notice = notices.get(PATIENCE_S)
        assert notice is not None
        assert notice.fired_boot_ns >= notice.deadline_boot_ns
        heartbeat = stats(real)["heartbeat_boot_ns"]
        eventually(lambda: stats(real)["heartbeat_boot_ns"] > heartbeat)
        return sleepless_iterations() - before > 20

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
        assert huge > 0 or "no huge pages" in real.stderr  # the machine may have no free huge pages
    finally:
        real.close()


class FakeArena:
    """Stand-in for an arena that stores the published placement."""

    mappings = ()
    placed: Placed

    def set_placement(self, placed: Placed) -> None:
        self.placed = placed


def settled(config: Config) -> Placed:
    """Apply a configuration's placement to this process; return the published placement."""
    arena: Any = FakeArena()
    Placement(config, "").settle(arena)
    placed: Placed = arena.placed
    log.flush()  # otherwise the messages of a child are lost when it ends
    return placed


def test_settings_that_need_more_rights_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    config = Config("demo", realtime=5, lock_memory=True, placement="none")
    placed = run_as(STRANGER, lambda: settled(config))
    assert placed.clamped == PlacementPart.REALTIME | PlacementPart.LOCK
    assert placed.applied == PlacementPart(0)
    log.flush()
    reported = capfd.readouterr().err
    assert "purgatoryd: placement: no SCHED_FIFO: " in reported
    assert "purgatoryd: placement: no locked memory: " in reported


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
    """Run `work` in a child, because a memory policy belongs to the process and must not stay."""
    return run_as(os.getuid(), work, gid=os.getgid(), groups=os.getgroups())


def bound(node: int) -> tuple[int, int, int]:
    """Return how many sampled pages are not on the node before binding, how many are not on it
    after binding, and how many are then not on a node that does not exist."""
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
        pytest.skip("this machine has several nodes; a guest with two nodes tests binding")
    (node,) = nodes
    assert in_a_child(lambda: bound(node)) == (0, 0, memory.SAMPLES)


def test_a_node_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        memory.prefer(1000)


# ---- numa_local ----------------------------------------------------------------------------------

NUMA_LOCAL = {
    "client": "from purgatoryd.clients import Client\nc = Client('demo', numa_local=True)",
    "purgatory": "from purgatoryd.clients import Purgatory\nc = Purgatory('demo', numa_local=True)",
    "subscriber": "from purgatoryd.clients import Subscriber\n"
    "c = Subscriber('demo', numa_local=True)",
    "asyncio": "import asyncio\nfrom purgatoryd.clients import AsyncClient\n"
    "async def main():\n    async with AsyncClient('demo', numa_local=True):\n        tell()\n"
    "asyncio.run(main())\nraise SystemExit",
}
TELL = """
import os
def tell():
    print(*({frozenset(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')}))
"""


@pytest.mark.parametrize("way", NUMA_LOCAL)
def test_a_numa_local_client_leaves_the_loop_alone(
    way: str, pinned: Daemon, pair: tuple[int, int]
) -> None:
    topology = read(os.sched_getaffinity(0))
    node = topology.node_of(pair[0])
    assert node is not None
    local = frozenset(worker_cpus(topology, node.id, pair[0], loop_cpus()))
    code = f"{TELL}\n{NUMA_LOCAL[way]}\ntell()"
    command = [sys.executable, "-c", code]
    environment = clean_environment(pinned.dir)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(local)  # each thread has these CPUs


def test_with_a_daemon_that_chose_nothing_nobody_moves(pinned: Daemon, daemon: StartDaemon) -> None:
    plain = daemon("plain", "--placement", "none")
    code = f"{TELL}\n{NUMA_LOCAL['client'].replace('demo', 'plain')}\ntell()"
    command = [sys.executable, "-c", code]
    said = subprocess.check_output(command, env=clean_environment(plain.dir), text=True)
    assert said.strip() == str(frozenset(os.sched_getaffinity(0)))


def test_a_daemon_on_another_host_is_not_numa_local(tmp_path: Path) -> None:
    server = curve.generate(tmp_path / "server")
    curve.generate(tmp_path / "client")
    remote = Remote("127.0.0.1:7000", server.public.decode(), tmp_path / "client")
    for make in (Client, Subscriber):
        with pytest.raises(InvalidArgument, match="on this host"):
            make("demo", remote=remote, numa_local=True)


# ---- the command ---------------------------------------------------------------------------------


def placement_of(real: Daemon, *arguments: str) -> str:
    """Run `purgatoryd placement`; return its output."""
    command = [sys.executable, "-m", "purgatoryd.cli", "placement", "--name", "demo", *arguments]
    environment = clean_environment(real.dir)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.DONE, done.stderr
    return done.stdout


def test_the_command_shows_where_the_daemon_is(pinned: Daemon, pair: tuple[int, int]) -> None:
    reported = placement_of(pinned)
    topology = read(os.sched_getaffinity(0))
    node = topology.node_of(pair[0])
    assert node is not None
    assert f"the daemon (explicit): node {node.id}, the loop on CPU {pair[0]}" in reported
    assert json.loads(placement_of(pinned, "--json"))["daemon"]["reaper_cpu"] == pair[0]
    reported = placement_of(pinned, "--advise", "3", "--json")
    advised = [json.loads(line)["cpu"] for line in reported.splitlines()]
    local = worker_cpus(topology, node.id, pair[0], loop_cpus())
    assert advised == [local[worker % len(local)] for worker in range(3)]
