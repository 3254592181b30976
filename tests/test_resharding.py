"""Other numbers of shards: all is moved or nothing is, and a start that was killed is made good."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import functions as F  # noqa: N812
from real_daemon import PATIENCE_S, StartDaemon, remove_arena_files
from shards_driver import FAR_NS, OWNED, PARTS, Ledger, Shards, as_arena, as_core, release

from purgatoryd.cli.app import app
from purgatoryd.cli.wal import folders
from purgatoryd.clients import AllOf, Client, Purgatory, Subscriber
from purgatoryd.daemon import resharding
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.deployment import Registry
from purgatoryd.daemon.main import name_lock
from purgatoryd.daemon.resharding import Resharding, settle
from purgatoryd.daemon.store import NEXT, Opening, open_arena, source, wal_end
from purgatoryd.daemon.wal import locked
from purgatoryd.pipeline import fleet, trace
from purgatoryd.pipeline.advice import sizes
from purgatoryd.pipeline.audit import audit
from purgatoryd.pipeline.continuity import excluded
from purgatoryd.pipeline.lake import BRONZE, OPENINGS, Lake
from purgatoryd.pipeline.living import in_place, living
from purgatoryd.pipeline.progress import State, progress
from purgatoryd.pipeline.rebalance_plan import Host
from purgatoryd.pipeline.ship import Convoy
from purgatoryd.pipeline.sources import openings
from purgatoryd.pipeline.whole import whole
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.arena import Arena, Reader
from purgatoryd.shm_layout.errors import (
    AlreadyRunning,
    ArenaMismatch,
    ArenaTooSmall,
    BadPath,
    InvalidSetting,
    PurgatorydError,
    Unplaceable,
    WalMismatch,
)
from purgatoryd.shm_layout.layout import ArenaState, DaemonState, Status
from purgatoryd.shm_layout.merge import NamespaceStats, namespace_stats
from purgatoryd.shm_layout.paths import Paths, paths_in
from purgatoryd.shm_layout.shards import Placement, ShardTable, alone, read_table, write_table
from purgatoryd.shm_layout.wal import GroupCommit, Walk, segments, uuid_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL: dict[str, Any] = {
    "capacity": 128, "payload_bytes": 1 << 18, "replay_capacity": 64, "topics": 32,
    "namespaces": 16, "sessions": 8, "watches": 128, "watch_keys": 32, "accounts": 4,
    "bulk_loads": 2, "bulk_load_rows": 8192, "tick_ns": 10**6, "fanout": 20, "clock": "virtual",
}  # fmt: skip
WAL_SETTINGS: dict[str, Any] = {"wal_segment_bytes": 256 * 1024, "wal_buffer_bytes": 4 << 20}
KILLED = 9
UNKNOWN_TICKET = 2**47
"""No ticket that anything has."""


CHANGES = {"os.rename", "os.remove", "os.rmdir"}
"""What the interpreter tells before a file that is there gets another name, or goes."""


def killed(act: Callable[[], None]) -> bool:
    """Whether `act`, in a process of its own, was killed in it."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def kill_before(nth: int, counts: Callable[[], bool] = lambda: True) -> None:
    """From now on this process is killed before its nth change of a file that counts."""
    left = nth

    def hear(event: str, _: object) -> None:
        nonlocal left
        if event in CHANGES and counts():
            left -= 1
            if left == 0:
                os._exit(KILLED)

    sys.addaudithook(hear)


@dataclass
class Deployment:
    """The arenas of a deployment whose daemons do not run, and its table."""

    directory: Path
    config: Config
    table: ShardTable

    def write(self, table: ShardTable) -> None:
        write_table(self.directory, table)

    def resharding(self, step: Callable[[str], None] = lambda _: None) -> Resharding:
        return Resharding(self.config, self.directory, self.write, step)

    def reshard(self, count: int, step: Callable[[str], None] = lambda _: None) -> None:
        """What a start with so many shards does first, with the table as it finds it."""
        table = read_table(self.directory, "demo")
        assert table is not None
        self.table = settle(self.resharding(step), table, count)

    def killed_at(self, nth: int, count: int) -> bool:
        """A start that is killed at its nth step; False if it has fewer."""
        left = [nth]

        def step(_: str) -> None:
            left[0] -= 1
            if left[0] == 0:
                os._exit(KILLED)

        return killed(lambda: self.reshard(count, step))

    def start(self, count: int, step: Callable[[str], None] = lambda _: None) -> None:
        """A start with so many shards, until the first of them would run."""
        config, paths = replace(self.config, shards=count), paths_in(self.directory, "demo")
        self.table = Registry.of(config, paths, step).table

    def killed_before(self, nth: int, count: int, first: str, last: str) -> bool:
        """A start that is killed before the nth change of a file, counted between the steps that
        begin so; False if there are fewer."""
        counts = not first

        def step(text: str) -> None:
            nonlocal counts
            counts = (counts or text.startswith(first)) and not (last and text.startswith(last))

        def start() -> None:
            kill_before(nth, lambda: counts)
            self.start(count, step)

        return killed(start)

    @contextlib.contextmanager
    def opened(self, *, commit: bool = False) -> Iterator[Shards]:
        """Its arenas, as its daemons open them. `commit`: all is in the WALs afterwards."""
        placements = {name.encode(): p.shards for name, p in self.table.placements.items()}
        with contextlib.ExitStack() as held:
            cores = [as_core(held.enter_context(self.shard(k, commit))) for k in self.shards]
            held.callback(release, cores)
            yield Shards(cores, placements)

    @property
    def shards(self) -> range:
        return range(self.table.count)

    @contextlib.contextmanager
    def shard(self, shard: int, commit: bool) -> Iterator[Arena]:
        opening = self.resharding().opening(self.table, shard)
        with name_lock(opening.paths), locked(opening.wal):
            arena = open_arena(opening)
            yield arena
            if commit and opening.wal is not None:
                end = wal_end(arena, opening)
                GroupCommit(arena, opening.wal, opening.config.wal_segment_bytes, end).close()
            arena.set_state(ArenaState.READY)
            arena.close()

    def arena_files(self) -> set[str]:
        """The names of what there is in shared memory."""
        return {path.name for path in shm.MOUNT.glob(f"purgatoryd.demo*{self.suffix}*")}

    def all_there_is(self) -> tuple[set[str], ShardTable | None, list[dict[str, NamespaceStats]]]:
        """Arena files, table, and what is in them."""
        with self.opened(commit=True) as shards:
            found = [namespace_stats(as_arena(core)) for core in shards.cores]
        return self.arena_files(), read_table(self.directory, "demo"), found

    @property
    def suffix(self) -> str:
        return paths_in(self.directory, "demo").arena.removeprefix("/purgatoryd.demo")

    @property
    def homes(self) -> list[Path]:
        """Where its table is."""
        return [self.directory, *([Path(self.config.wal_dir)] if self.config.wal_dir else [])]

    def tables(self) -> list[ShardTable | None]:
        return [read_table(home, "demo") for home in self.homes]

    def remove(self) -> None:
        """All of it."""
        for name in self.arena_files():
            (shm.MOUNT / name).unlink()
        for path in (path for home in self.homes for path in home.glob("demo*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def reboot(self) -> None:
        """Shared memory is empty then."""
        for name in self.table.daemons:
            remove_arena_files(paths_in(self.directory, name))


def test_a_start_with_another_number_keeps_what_clients_have(daemon: StartDaemon) -> None:
    small = ("--capacity", "2000", "--payload-memory", "1M", "--replay-buffer", "1024")
    real = daemon("demo", *small)
    names = [f"n{n}" for n in range(6)]
    with Purgatory("demo", namespace="n0", timeout=PATIENCE_S) as owner:
        armed = owner.watch("op", AllOf({"k": 2}), timeout=3600)
        owner.advance("k", 1)
        with contextlib.ExitStack() as held:
            clients = [
                held.enter_context(Client("demo", namespace=name, timeout=PATIENCE_S))
                for name in names
            ]
            tickets = [client.add("far", delay=3600).ticket for client in clients]
            notices = [
                held.enter_context(Subscriber("demo", namespace=name, topics=["soon"]))
                for name in names
            ]
            for count in ("2", "3", "1"):
                real.restart("--shards", count, *small)
                for client, received in zip(clients, notices, strict=True):
                    client.add("now", delay=0, topic="soon")
                    assert (notice := received.get(timeout=PATIENCE_S)) is not None
                    assert notice.key == "now"
                found = [info for client in clients if (info := client.get("far"))]
                assert [info.ticket for info in found] == tickets
                tickets += [client.add(f"in {count}", delay=3600).ticket for client in clients]
                assert len({*tickets}) == len(tickets)
                tickets = tickets[: len(clients)]
        assert owner.advance("k", 2) == 1
        assert armed.result(timeout=PATIENCE_S).cause == "satisfied"
    assert read_table(real.dir, "demo") == replace(
        ShardTable("demo", 1, 1, 1), version=3, shard_generation=3,
        placements={name: Placement(name, (0,), os.geteuid()) for name in names},
    )  # fmt: skip


@pytest.fixture
def begin(daemon_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """A deployment of two shards, or a daemon alone, with or without WALs."""
    made: list[Deployment] = []

    def begin(*, wal: bool = False, lone: bool = False, **changes: Any) -> Deployment:
        retained = {"wal_dir": str(tmp_path), **WAL_SETTINGS} if wal else {}
        config = Config("demo", **{**SMALL, **retained, **changes})
        table = alone("demo") if lone else ShardTable("demo", 1, 1, 2)
        parts = table.place(PARTS.decode(), 1 if lone else 5)
        names = (OWNED.decode(), "other", "a", "b", "c", "d")
        for place in (*map(table.place, names), parts):
            table = table.with_birth(place)
        made.append(Deployment(daemon_dir, config, table))
        if not lone:  # which has no table
            made[-1].write(table)
        return made[-1]

    yield begin
    for one in made:
        for name in one.arena_files():
            (shm.MOUNT / name).unlink(missing_ok=True)


def names_of(one: Deployment) -> set[str]:
    """The arena files that ought to be there."""
    arenas = [paths_in(one.directory, name) for name in one.table.daemons]
    return {name[1:] for paths in arenas for name in (paths.arena, paths.private)}


def test_a_daemon_alone_becomes_two_shards_though_starts_are_killed(
    begin: Callable[..., Deployment],
) -> None:
    """Before any change of a file. Until the switch it can go on alone, as it was."""
    for nth in itertools.count(1):
        one, ledger = begin(wal=True, lone=True), Ledger(nth)
        with one.opened(commit=True) as shards:
            ledger.fill(shards)
            ledger.operate(shards)
        was_killed = one.killed_before(nth, 2, "", "")
        if not any(one.tables()):
            with one.opened() as shards:
                ledger.compare(shards)
        one.start(2)
        assert (one.table.shard_generation, one.table.count) == (1, 2)
        assert one.tables() == [one.table] * len(one.homes)
        assert one.arena_files() == names_of(one)
        with one.opened(commit=True) as shards:
            ledger.compare(shards)
            if not was_killed:
                ledger.finish(shards)
        one.remove()
        if not was_killed:
            break
    print(f"killed before {nth - 1} changes of files")
    assert nth > 5


def test_a_daemon_alone_that_was_killed_as_it_got_its_arena_becomes_shards(
    begin: Callable[..., Deployment],
) -> None:
    one, ledger = begin(lone=True), Ledger(3)
    with one.opened() as shards:
        ledger.fill(shards)
        ledger.operate(shards)
    arena = shm.MOUNT / paths_in(one.directory, "demo").arena[1:]
    arena.rename(f"{arena}{NEXT}")
    one.start(2)
    assert one.arena_files() == names_of(one)
    with one.opened() as shards:
        ledger.compare(shards)


def test_what_a_daemon_alone_has_and_no_place_for_is_named_and_nothing_is_changed(
    begin: Callable[..., Deployment],
) -> None:
    one = begin(wal=True, lone=True)
    with one.opened(commit=True) as shards:
        Ledger(2).fill(shards)
        core = shards.of(b"a", b"")
        core.set_namespace(b"a", park_beyond_ns=1)
        assert core.put(b"k", FAR_NS, namespace=b"a").status == Status.PARKED
    before = one.all_there_is()
    with pytest.raises(Unplaceable, match=r"parked.* in the WAL of demo$") as caught:
        Registry.of(replace(one.config, shards=3), paths_in(one.directory, "demo"))
    assert caught.value.namespace == "a"
    assert one.all_there_is() == before
    assert one.tables() == [None, None]


def test_a_daemon_alone_whose_place_the_shards_did_not_take_is_not_cleared_away(
    begin: Callable[..., Deployment],
) -> None:
    one = begin(lone=True)
    with one.opened() as shards:
        Ledger(1).fill(shards)
    one.write(ShardTable("demo", 1, 1, 2))
    before = one.all_there_is()
    with pytest.raises(BadPath, match="'demo' without shards"):
        Registry.of(replace(one.config, shards=2), paths_in(one.directory, "demo"))
    assert one.all_there_is() == before


@pytest.mark.parametrize("wal", [False, True], ids=["memory", "wal"])
def test_two_shards_become_three_and_one_though_starts_are_killed(
    wal: bool, begin: Callable[..., Deployment], tmp_path: Path
) -> None:
    one, ledger, steps = begin(wal=wal), Ledger(3), 0
    with one.opened(commit=True) as shards:
        ledger.fill(shards)
        ledger.operate(shards)
    for count in (3, 1):
        shard_generation, nth = one.table.shard_generation, 1
        while one.killed_at(nth, count):
            steps += 1
            found = read_table(one.directory, "demo")
            assert found is not None
            if found.count == count and shard_generation != found.shard_generation:
                # the switch: the rest is cleared away
                shard_generation, nth = found.shard_generation, 0
            nth += 1
        one.reshard(count)
        assert one.table.count == count
        assert one.arena_files() == names_of(one)
        with one.opened(commit=True) as shards:
            ledger.compare(shards)
    print(f"killed at {steps} steps")
    with one.opened(commit=True) as shards:
        ledger.finish(shards)
    retained = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    every = {"demo-1-0", "demo-1-1", "demo-2-0", "demo-2-1", "demo-2-2", "demo-3-0"}
    assert retained == (every if wal else set())


def test_a_start_is_killed_at_the_switch_or_while_it_clears_the_old_ones_away(
    begin: Callable[..., Deployment],
) -> None:
    """Between the table's two homes, too, and between any two files that go."""
    assert killed_everywhere(begin, ("writing the routing table", "")) > 10


def test_each_snapshot_of_a_new_arena_is_a_step(begin: Callable[..., Deployment]) -> None:
    steps: list[str] = []
    begin(wal=True).start(3, steps.append)
    assert steps.count("writing a snapshot") == 3


def test_a_start_is_killed_while_it_clears_away_what_a_killed_one_made(
    begin: Callable[..., Deployment],
) -> None:
    def step(text: str) -> None:
        if text == "writing the routing table":
            os._exit(KILLED)

    def half(one: Deployment) -> None:
        assert killed(lambda: one.start(1, step))
        assert one.arena_files() > names_of(one)

    assert killed_everywhere(begin, ("clearing", "opening"), half) > 5


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_birth_is_killed_between_the_homes_of_the_table(
    nth: int, begin: Callable[..., Deployment]
) -> None:
    """It stands in both of them then, or in none; it was not answered. The second change of a file
    gives the first home its name."""
    one = begin(wal=True)
    one.start(2)
    registry = Registry.of(replace(one.config, shards=2), paths_in(one.directory, "demo"))
    before = one.table
    born = before.with_birth(before.place("born"))

    def record() -> None:
        kill_before(nth)
        registry.record(born.placements["born"])

    assert killed(record)
    one.start(2)
    assert one.table == (before if nth <= 2 else born)
    assert one.tables() == [one.table] * 2


def test_a_start_takes_no_locks_of_names_that_left_nothing(
    begin: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, taken = begin(wal=True), []

    @contextlib.contextmanager
    def lock(paths: Paths) -> Iterator[None]:
        taken.append(paths.name)
        yield

    monkeypatch.setattr(resharding, "name_lock", lock)
    one.start(2)
    assert taken == []
    paths_in(one.directory, "demo-2-17").lock.touch()
    for name in ("demo-2-17.status", "demo-2-17.status.new"):
        (one.directory / name).touch()
    (Path(one.config.wal_dir) / "demo-2-5").mkdir()
    (Path(one.config.wal_dir) / "demo-3-5").mkdir()  # of no neighbour
    with one_of_another_directory("demo-2-9") as its:
        one.start(2)
        assert taken == ["demo-2-5", "demo-2-17"]
        assert its.exists()
    assert not list(one.directory.glob("demo-2-17.*"))


@contextlib.contextmanager
def one_of_another_directory(name: str) -> Iterator[Path]:
    """An arena file of a daemon of the same name, which stands next to all others of the host."""
    its = shm.MOUNT / paths_in(Path("/another"), name).arena[1:]
    its.touch()
    try:
        yield its
    finally:
        its.unlink()


def killed_everywhere(
    begin: Callable[..., Deployment],
    between: tuple[str, str],
    before: Callable[[Deployment], None] = lambda _: None,
) -> int:
    """At how many places a start with one shard was killed, each of them followed by one that
    resumes."""
    for nth in itertools.count(1):
        one, ledger = begin(wal=True), Ledger(nth)
        with one.opened(commit=True) as shards:
            ledger.fill(shards)
            ledger.operate(shards)
        before(one)
        was_killed = one.killed_before(nth, 1, *between)
        one.start(1)
        assert one.arena_files() == names_of(one)
        assert one.tables() == [one.table] * 2
        with one.opened() as shards:
            ledger.compare(shards)
        one.remove()
        if not was_killed:
            print(f"killed before {nth - 1} changes of files")
            return nth - 1
    raise AssertionError


@pytest.mark.parametrize("when", ["before", "after", "before and after"])
def test_a_reboot_before_or_after_loses_nothing_that_is_in_the_wals(
    when: str, begin: Callable[..., Deployment]
) -> None:
    one, ledger = begin(wal=True), Ledger(5)
    with one.opened(commit=True) as shards:
        ledger.fill(shards)
        ledger.take(shards)
    for count in (3, 2):
        if "before" in when:
            one.reboot()
        one.reshard(count)
        if "after" in when:
            one.reboot()
        with one.opened(commit=True) as shards:
            key = b"0 of %d" % count
            ledger.arm(shards, b"a", key, FAR_NS)
            shards.of(b"b", b"2:0").cancel(b"2:0", b"b")
            ledger.expected = {
                t: due for t, due in ledger.expected.items() if due[:2] != (b"b", b"2:0")
            }
            ledger.arm(shards, b"b", b"2:0", FAR_NS)
            found = {info.ticket for core in shards.cores for info in core.scan()}
            assert found == ledger.expected.keys()
            shards.check()


def test_the_same_number_changes_nothing(begin: Callable[..., Deployment]) -> None:
    one = begin()
    with one.opened() as shards:
        Ledger(1).fill(shards)
    before = one.all_there_is()
    one.reshard(2)
    assert one.all_there_is() == before


def test_shards_that_never_ran_are_resharded_too(begin: Callable[..., Deployment]) -> None:
    one = begin()
    one.reshard(3)
    with one.opened() as shards:
        assert [core.put(b"k", FAR_NS).ticket % 2**48 for core in shards.cores] == [1, 1, 1]


def refused(one: Deployment, count: int) -> PurgatorydError:
    """Why; what was there is there, and nothing else."""
    before = one.all_there_is()
    with pytest.raises(PurgatorydError) as caught:
        one.reshard(count)
    one.reshard(2)
    assert one.all_there_is() == before
    return caught.value


def test_what_does_not_fit_is_named_and_nothing_is_changed(
    begin: Callable[..., Deployment],
) -> None:
    one = begin()
    plain = [p for p in one.table.placements.values() if p.partitions == 1]
    names = {p.shards[0]: p.namespace.encode() for p in plain}
    with one.opened() as shards:
        for n in range(70):
            for shard, core in enumerate(shards.cores):
                core.put(b"%d" % n, FAR_NS, namespace=names[shard])
    error = refused(one, 1)
    assert isinstance(error, ArenaTooSmall)
    assert (error.resource, error.asked, error.needed) == ("capacity of shard 0", 128, 140)
    with one.opened() as shards:
        assert sum(len(core.scan()) for core in shards.cores) == 140


def test_what_cannot_be_resharded_is_named(begin: Callable[..., Deployment]) -> None:
    one = begin()
    with one.opened() as shards:
        elsewhere = 1 - one.table.place("a").shards[0]
        shards.cores[elsewhere].put(b"k", FAR_NS, namespace=b"a")
    error = refused(one, 3)
    assert isinstance(error, Unplaceable)
    assert (error.namespace, str(elsewhere) in error.reason) == ("a", True)


def test_operations_in_a_partitioned_namespace_cannot_be_placed(
    begin: Callable[..., Deployment],
) -> None:
    one = begin()
    one.table = replace(one.table, placements={OWNED.decode(): Placement(OWNED.decode(), (0, 1))})
    one.write(one.table)
    with one.opened() as shards:
        Ledger(1).operate(shards)
    error = refused(one, 3)
    assert isinstance(error, Unplaceable)
    assert "operations" in error.reason


def test_parked_timers_stay_with_the_wal_that_has_their_payloads(
    begin: Callable[..., Deployment],
) -> None:
    one = begin(wal=True)
    with one.opened(commit=True) as shards:
        core = shards.of(b"a", b"")
        core.set_namespace(b"a", park_beyond_ns=1)
        assert core.put(b"k", FAR_NS, namespace=b"a").status == Status.PARKED
    error = refused(one, 3)
    assert isinstance(error, Unplaceable)
    assert (error.namespace, "parked" in error.reason) == ("a", True)


def test_parts_with_different_settings_cannot_meet(begin: Callable[..., Deployment]) -> None:
    one = begin()
    with one.opened() as shards:
        for k, core in enumerate(shards.cores):
            core.set_namespace(PARTS, quota_timers=5 + k)
    error = refused(one, 3)
    assert isinstance(error, Unplaceable)
    assert error.namespace == PARTS.decode()


def test_a_shard_that_still_runs_is_named(begin: Callable[..., Deployment]) -> None:
    one = begin()
    with (
        name_lock(paths_in(one.directory, "demo-1-1")),
        pytest.raises(AlreadyRunning) as caught,
    ):
        one.reshard(3)
    assert caught.value.name == "demo-1-1"


def test_an_arena_says_that_it_is_rebuilt_and_stopped_once_it_was_only_read(
    begin: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, rebuild, states = begin(), Arena.rebuild, []

    def noted(arena: Arena, now_ns: int) -> None:
        states.append((arena.header.daemon_state, arena.header.daemon_pid))
        rebuild(arena, now_ns)

    with one.opened() as shards:
        shards.cores[0].put(b"k", FAR_NS, namespace=b"a")
    monkeypatch.setattr(Arena, "rebuild", noted)
    with source(one.resharding().opening(one.table, 0)) as arena:
        assert arena is not None
    assert states == [(DaemonState.RECOVERING, os.getpid())]
    with contextlib.closing(Reader.attach(paths_in(one.directory, "demo-1-0"))) as reader:
        assert reader.header.daemon_state == DaemonState.STOPPED
        assert reader.header.daemon_pid == 0


@pytest.mark.parametrize("name", ["demo-1-5", "demo-3-5"])
def test_what_a_running_daemon_has_is_not_cleared_away(
    name: str, begin: Callable[..., Deployment]
) -> None:
    one = begin()
    one.write(replace(one.table, shard_generation=2))
    paths = paths_in(one.directory, name)
    config = replace(one.config, name=name)
    arena = open_arena(Opening(config, paths))
    arena.close()
    before = one.arena_files()
    with name_lock(paths), pytest.raises(AlreadyRunning):
        one.reshard(2)
    assert one.arena_files() == before
    one.reshard(2)
    assert one.arena_files() == set()


def test_an_arena_of_another_shard_is_refused(begin: Callable[..., Deployment]) -> None:
    one = begin()
    with one.opened():
        pass
    opening = one.resharding().opening(one.table, 1)
    wrong = replace(opening, config=replace(opening.config, shard=0))
    with pytest.raises(ArenaMismatch) as caught:
        open_arena(wrong)
    assert (caught.value.field, caught.value.found) == ("shard", "1 of 2")


def test_a_wal_of_a_later_shard_generation_is_left_alone(begin: Callable[..., Deployment]) -> None:
    """The routing table is an older one than the WALs."""
    one = begin(wal=True)
    with one.opened(commit=True) as shards:
        Ledger(1).fill(shards)
    old = one.table
    one.reshard(3)
    with one.opened(commit=True) as shards:
        shards.cores[0].put(b"k", FAR_NS, namespace=b"_x")
    one.write(old)
    with pytest.raises(WalMismatch) as caught:
        one.reshard(3)
    assert caught.value.field == "shard generation"


def test_namespaces_of_the_daemons_themselves_go_on(begin: Callable[..., Deployment]) -> None:
    one = begin()
    with one.opened() as shards:
        for core in shards.cores:
            core.put(b"reported", 1, 1, namespace=b"_purgatoryd", topic=b"_events")
            core.advance(10**9)
    one.reshard(1)
    with one.opened() as shards:
        [part] = shards.cores[0].publish_all()
        assert (part.namespace, part.head.records) == ("_purgatoryd", 2)


# ---- the pipeline ------------------------------------------------------------------------------


def shipped(convoy: Convoy) -> int:
    """Ships what is complete; how many segments that were."""
    return sum(manifest.table == BRONZE for manifest in convoy.poll())


def records_of(one: Deployment, table: ShardTable) -> list[tuple[str, int, str]]:
    """Daemon, LSN and kind of all records in the WALs of a shard generation."""
    found = []
    for daemon in table.daemons:
        walk = Walk()
        for file in segments(Path(one.config.wal_dir) / daemon):
            walk.enter(file.path)
            found += [(walk.uuid.hex(), frame.lsn, frame.kind) for frame in walk.frames()]
    return sorted(found)


@pytest.mark.parametrize("lone", [False, True], ids=["shards", "alone"])
def test_all_records_of_the_shard_generation_before_get_into_the_lake(
    lone: bool, begin: Callable[..., Deployment], tmp_path: Path
) -> None:
    one, ledger = begin(wal=True, lone=lone), Ledger(7)
    (tmp_path / "lake").mkdir()
    lake = Lake(tmp_path / "lake")
    before = one.table
    with one.opened(commit=True) as shards:
        ledger.fill(shards)
    with contextlib.closing(Convoy(partial(folders, tmp_path, "demo"), lake, "node")) as convoy:
        assert shipped(convoy) == 0  # their daemons may go on

        def ship_early(step: str) -> None:
            """The next shard generation does not count yet, and may never do so."""
            if step == "writing the routing table":
                first, *others = tmp_path.glob(f"demo-{before.shard_generation + 1}-*")
                assert len(others) == 2
                assert list(convoy.poll()) == []
                assert openings(first) == []

        one.start(3, ship_early)
        assert shipped(convoy) == before.count
    with one.opened(commit=True) as shards:
        ledger.take(shards)
    command = ["pipeline", "ship", "--name", "demo", "--wal-dir", str(tmp_path)]
    again = CliRunner().invoke(app, [*command, "--lake", str(lake.root), "--json"])
    assert (again.exit_code, again.output) == (0, "")
    assert len(lake.manifests(OPENINGS)) == before.count + 3
    rows = [
        (row["daemon"], row["lsn"], row["kind"])
        for manifest in lake.manifests()
        for row in pq.read_table(lake.data(manifest), partitioning=None).to_pylist()
    ]
    assert sorted(rows) == records_of(one, before)
    assert len(rows) > len(ledger.given)


class Shipped(NamedTuple):
    """A daemon alone that became two shards, then three, then one, and its lake."""

    one: Deployment
    lake: Lake
    tickets: set[int]
    """Of all that lives."""


@pytest.fixture
def twice_resharded(begin: Callable[..., Deployment], tmp_path: Path) -> Shipped:
    one, ledger = begin(wal=True, lone=True), Ledger(9)
    (tmp_path / "lake").mkdir()
    with one.opened(commit=True) as shards:
        ledger.fill(shards)
        ledger.operate(shards)
        ledger.arm(shards, b"a", b"far", FAR_NS)
    for count in (2, 3, 1):
        if count == 1:
            one.reboot()  # what is resharded then is an arena that wrote nothing itself
        one.start(count)
        with one.opened(commit=True) as shards:
            ledger.take(shards)
            shards.of(b"a", b"far").cancel(b"far", b"a")
            ledger.arm(shards, b"a", b"far", FAR_NS)
            tickets = {info.ticket for core in shards.cores for info in core.scan()}
    lake = Lake(tmp_path / "lake")
    with contextlib.closing(Convoy(partial(folders, tmp_path, "demo"), lake, "node")) as convoy:
        list(convoy.poll())
    return Shipped(one, lake, tickets)


def test_the_lake_has_each_timer_once_though_the_number_of_shards_changed(
    spark: SparkSession, twice_resharded: Shipped
) -> None:
    one, lake, _ = twice_resharded
    [wal] = Path(one.config.wal_dir).glob("demo-3-*")
    [newest] = {uuid_of(file.path).hex() for file in segments(wal)}
    alive = living(spark, lake).collect()
    assert {row.daemon for row in alive} == {newest}
    assert len({row.ticket for row in alive}) == len(alive) > 10
    segments_, openings_ = in_place(lake)
    assert {m.daemon for m in segments_} <= {newest} == {*openings_}
    bulk_loads = fleet.measured_in(spark, lake.root).collect()
    assert {row.daemon for row in bulk_loads} == {newest}
    assert sum(row.live for row in bulk_loads) == len(alive)
    gone = excluded([*lake.manifests(), *lake.manifests(OPENINGS)]).absent
    assert len(gone) == 1 + 2 + 3
    for daemon in gone:
        with pytest.raises(InvalidSetting, match="of a shard that counts"):
            fleet.of_today({daemon: Host("a", 1, 1.0)}, {}, gone)
    lifecycles = trace.history(spark, lake, [wal], trace.Key("a", "bytes", b"far"))
    assert [lifecycle.final_state for lifecycle in lifecycles] == [*["cancelled"] * 3, None]
    kinds = [[event.kind for event in lifecycle.events] for lifecycle in lifecycles]
    assert kinds == [*[["arm", "end"]] * 3, ["arm"]]
    assert lifecycles[-1].daemon == newest
    (size,) = sizes(spark, lake).collect()  # though it has no segment in the lake yet
    assert (size.daemon, size.living) == (newest, len(alive))


def test_until_all_shards_of_the_new_number_are_shipped_those_before_count(
    spark: SparkSession, twice_resharded: Shipped
) -> None:
    _, lake, _ = twice_resharded
    for last, counted in (("demo-3-0", 3), ("demo-2-1", 2)):
        unship(lake, last)
        states = {one.daemon: one.state for one in progress(lake)}
        alive = living(spark, lake).collect()
        assert {states[row.daemon] for row in alive} == {State.COUNTS}
        assert len({row.daemon for row in alive}) == counted
        assert len({row.ticket for row in alive}) == len(alive) > 10
    assert [*states.values()].count(State.INCOMPLETE) == 2


def unship(lake: Lake, wal: str) -> None:
    """Of this WAL nothing is in the lake."""
    for manifest in (*lake.manifests(), *lake.manifests(OPENINGS)):
        if manifest.wal == wal:
            (lake.folder("manifests", manifest.daemon) / f"{manifest.name}.json").unlink()


def test_an_audit_holds_shard_generations_against_each_other(
    spark: SparkSession, twice_resharded: Shipped
) -> None:
    one, lake, _ = twice_resharded
    with whole(spark, lake, folders(Path(one.config.wal_dir), "demo")) as read:
        assert sorted(len(resharding.upto) for resharding in read.found.reshardings) == [1, 2, 3]
        verdict = audit(*read)
        assert (verdict.counts, verdict.lost) == ({}, [])
        [last] = [d.openings[0].daemon for d in read.found.reshardings if d.shards == 1]
        row = read.openings.where((F.col("daemon") == last) & (F.col("kind") == "arm")).first()
        assert row is not None
        is_it = (F.col("daemon") == last) & F.col("ticket").eqNullSafe(row.ticket)
        other = F.when(is_it, UNKNOWN_TICKET).otherwise(F.col("ticket"))
        planted = audit(read.bronze, read.openings.withColumn("ticket", other), read.found)
    reported = {(one.kind, one.ticket) for one in planted.samples}
    assert {("snapshot_lacks", row.ticket), ("snapshot_invents", UNKNOWN_TICKET)} <= reported
