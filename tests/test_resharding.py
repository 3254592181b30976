"""Changes of the number of shards: all contents move or none, and a killed start is resumed."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from deployment import KILLED, Deployment, deployments, kill_before, killed
from opened import opened
from real_daemon import PATIENCE_S, StartDaemon
from shards_driver import FAR_NS, OWNED, PARTS, Ledger
from tiers import wide

from purgatoryd.cli.app import app
from purgatoryd.cli.wal import folders
from purgatoryd.clients import AllOf, Client, Purgatory, Subscriber
from purgatoryd.daemon import resharding
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.deployment import Registry
from purgatoryd.daemon.main import name_lock
from purgatoryd.daemon.replacement import NEXT
from purgatoryd.daemon.store import Opening, owned, source
from purgatoryd.pipeline.lake import BRONZE, OPENINGS, Lake
from purgatoryd.pipeline.ship import Convoy
from purgatoryd.pipeline.sources import openings
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.arena import Arena, Reader
from purgatoryd.shm_layout.errors import (
    AlreadyRunning,
    ArenaMismatch,
    ArenaTooLarge,
    ArenaTooSmall,
    BadPath,
    PurgatorydError,
    Unplaceable,
    WalMismatch,
)
from purgatoryd.shm_layout.host import Host
from purgatoryd.shm_layout.layout import DaemonState, Status
from purgatoryd.shm_layout.merge import NamespaceStats, Route
from purgatoryd.shm_layout.paths import Paths, paths_in
from purgatoryd.shm_layout.shards import Placement, ShardTable, read_table
from purgatoryd.shm_layout.wal import Walk, segments

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.tier("test")


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
    with deployments(daemon_dir, tmp_path) as begin:
        yield begin


def names_of(one: Deployment) -> set[str]:
    """Return the names of the arena files that should exist."""
    arenas = [paths_in(one.directory, name) for name in one.table.daemons]
    return {name[1:] for paths in arenas for name in (paths.arena, paths.private)}


@pytest.mark.tier("all")
def test_a_single_daemon_becomes_two_shards_though_starts_are_killed(
    begin: Callable[..., Deployment],
) -> None:
    """Each start is killed before a change of a file. Until the switch, the old daemon can run
    again."""
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


def test_a_single_daemon_killed_while_it_got_its_arena_becomes_shards(
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


def test_contents_of_a_single_daemon_without_a_place_are_named_and_nothing_changes(
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


def test_a_single_daemon_that_the_shards_did_not_replace_is_kept(
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


@pytest.mark.parametrize("wal", [wide(False), True], ids=["memory", "wal"])
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
                # The start was killed at the switch, so the next start only has to clean up.
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


def test_a_start_is_killed_at_the_switch_or_while_it_removes_predecessors(
    begin: Callable[..., Deployment],
) -> None:
    """Kills also come between the writes of the two copies of the routing table, and between the
    removals of two files."""
    assert killed_everywhere(begin, ("writing the routing table", "")) > 10


def test_each_snapshot_of_a_new_arena_is_a_step(begin: Callable[..., Deployment]) -> None:
    steps: list[str] = []
    begin(wal=True).start(3, steps.append)
    assert steps.count("writing a snapshot") == 3


@pytest.mark.tier("all")
def test_a_start_is_killed_while_it_removes_files_of_a_killed_start(
    begin: Callable[..., Deployment],
) -> None:
    def step(text: str) -> None:
        if text == "writing the routing table":
            os._exit(KILLED)

    def half(one: Deployment) -> None:
        assert killed(lambda: one.start(1, step))
        assert one.arena_files() > names_of(one)

    assert killed_everywhere(begin, ("removing", "opening"), half) > 5


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_birth_is_killed_between_the_homes_of_the_table(
    nth: int, begin: Callable[..., Deployment]
) -> None:
    """After the next start, both copies of the routing table have the new namespace, or neither
    has. The creation of the namespace was not acknowledged. The second change of a file renames the
    first copy."""
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


def test_a_start_locks_only_names_with_files(
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
    (Path(one.config.wal_dir) / "demo-3-5").mkdir()  # the only shard of its shard generation
    with one_of_another_directory("demo-2-9") as its:
        one.start(2)
        assert taken == ["demo-2-5", "demo-2-17"]
        assert its.exists()
    assert not list(one.directory.glob("demo-2-17.*"))


@contextlib.contextmanager
def one_of_another_directory(name: str) -> Iterator[Path]:
    """Create an arena file in /dev/shm as if by a daemon of the same name in another directory."""
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
    """Change to one shard. For each change of a file between the two steps of `between`, kill the
    start before this change, and let the next start resume. Return the number of kills."""
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
    """Return the error of a refused start, and check that it has changed nothing."""
    before = one.all_there_is()
    with pytest.raises(PurgatorydError) as caught:
        one.reshard(count)
    one.reshard(2)
    assert one.all_there_is() == before
    return caught.value


def test_contents_that_do_not_fit_are_named_and_nothing_changes(
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


def test_arenas_that_memory_cannot_hold_are_refused_and_nothing_changes(
    begin: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = begin()
    before = one.all_there_is()
    with monkeypatch.context() as patch:
        patch.setattr(Host, "free_memory", lambda _: [("memory", 4096)])
        with pytest.raises(ArenaTooLarge, match="in memory, available are 4096;"):
            one.reshard(1)
    one.reshard(2)
    assert one.all_there_is() == before


def test_a_namespace_that_cannot_be_resharded_is_named(begin: Callable[..., Deployment]) -> None:
    one = begin()
    with one.opened() as shards:
        elsewhere = 1 - one.table.place("a").shards[0]
        shards.cores[elsewhere].put(b"k", FAR_NS, namespace=b"a")
    error = refused(one, 3)
    assert isinstance(error, Unplaceable)
    assert (error.namespace, str(elsewhere) in error.reason) == ("a", True)


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_topics_of_a_partitioned_namespace_begin_again(partitions: int) -> None:
    """Each shard has numbered its own notices from 1, so their sequences cannot be merged."""
    shards = tuple(range(partitions))
    old = ShardTable("demo", 1, 1, 3, {"n": Placement("n", shards)})
    new = ShardTable("demo", 2, 2, 1, {"n": Placement("n", (0,) * partitions)})
    routes = resharding._routes(old, new, 0, {"n": NamespaceStats(topics=1)})
    assert routes == {"n": Route((0,) * partitions, fresh_topics=partitions > 1)}


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


def test_an_arena_that_was_only_read_is_marked_rebuilt_and_stopped(
    begin: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, rebuild, states = begin(), Arena.rebuild, []

    def noted(arena: Arena, now_ns: int) -> None:
        states.append((arena.header.daemon_state, arena.header.daemon_pid))
        rebuild(arena, now_ns)

    with one.opened() as shards:
        shards.cores[0].put(b"k", FAR_NS, namespace=b"a")
    monkeypatch.setattr(Arena, "rebuild", noted)
    with owned(one.resharding().opening(one.table, 0)) as opening, source(opening) as arena:
        assert arena is not None
    assert states == [(DaemonState.RECOVERING, os.getpid())]
    with contextlib.closing(Reader.attach(paths_in(one.directory, "demo-1-0"))) as reader:
        assert reader.header.daemon_state == DaemonState.STOPPED
        assert reader.header.daemon_pid == 0


@pytest.mark.parametrize("name", ["demo-1-5", "demo-3-5"])
def test_files_of_a_running_daemon_are_not_removed(
    name: str, begin: Callable[..., Deployment]
) -> None:
    one = begin()
    one.write(replace(one.table, shard_generation=2))
    paths = paths_in(one.directory, name)
    config = replace(one.config, name=name)
    arena = opened(Opening(config, paths))
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
        opened(wrong)
    assert (caught.value.field, caught.value.found) == ("shard", "1 of 2")


def test_a_wal_of_a_later_shard_generation_is_left_alone(begin: Callable[..., Deployment]) -> None:
    """An old copy of the routing table was restored, so it is older than the WALs."""
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
    """Ship the sealed segments; return their number."""
    return sum(manifest.table == BRONZE for manifest in convoy.poll())


def records_of(one: Deployment, table: ShardTable) -> list[tuple[str, int, str]]:
    """Return (daemon, LSN, kind) of all records in the WALs of a shard generation."""
    found = []
    for daemon in table.daemons:
        walk = Walk()
        for file in segments(Path(one.config.wal_dir) / daemon):
            walk.enter(file.path)
            found += [(walk.uuid.hex(), frame.lsn, frame.kind) for frame in walk.frames()]
    return sorted(found)


@pytest.mark.parametrize("lone", [False, True], ids=["shards", "alone"])
def test_all_records_of_the_previous_shard_generation_get_into_the_lake(
    lone: bool, begin: Callable[..., Deployment], tmp_path: Path
) -> None:
    one, ledger = begin(wal=True, lone=lone), Ledger(7)
    (tmp_path / "lake").mkdir()
    lake = Lake(tmp_path / "lake")
    before = one.table
    with one.opened(commit=True) as shards:
        ledger.fill(shards)
    with contextlib.closing(Convoy(partial(folders, tmp_path, "demo"), lake, "node")) as convoy:
        assert shipped(convoy) == 0  # no segment is sealed: the daemons may still append

        def ship_early(step: str) -> None:
            """Before the switch, nothing of the next shard generation is shipped."""
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


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_a_merged_arena_is_rebuilt_at_the_time_of_its_clock(
    clock: Literal["real", "virtual"], monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuilt: list[int] = []
    arena: Any = SimpleNamespace(
        header=SimpleNamespace(now_ns=5), rebuild=rebuilt.append, check=lambda: None,
        set_state=lambda state: None,
    )  # fmt: skip
    opening: Any = SimpleNamespace(config=Config("demo", clock=clock), wal=None)
    for name in ("place", "namespace_stats"):
        monkeypatch.setattr(resharding, name, lambda *_: None)
    resharding._finished(arena, opening, cast("Any", None))
    assert (rebuilt == [5]) is (clock == "virtual")
