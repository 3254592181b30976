"""Parts of shards, tested without a daemon: the routing table and its file, the lifecycle of a
shard's process, the circuit breaker, and the distribution of rows to partitions."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import resource
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import zmq
from purgatory_driver import ANY, Command, Key, Purgatory, advance, cancel, put, watch
from unconnected import with_partitions
from wal_driver import authoritative_state

from purgatoryd.clients import route
from purgatoryd.clients.bulk import BulkResult, MergedResult
from purgatoryd.clients.core import Core
from purgatoryd.clients.jobs import Job, together
from purgatoryd.clients.partitions import puts, split_rows
from purgatoryd.clients.route import FAILURES, PAUSE_NS, Breaker
from purgatoryd.clients.subscriber import _all_or_none
from purgatoryd.daemon import deployment, shard
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.deployment import Deployment, Registry
from purgatoryd.daemon.lifecycle import DeploymentLifecycle
from purgatoryd.daemon.log import log
from purgatoryd.daemon.main import _set_up_namespaces, serve
from purgatoryd.daemon.service_manager import ServiceManager
from purgatoryd.daemon.shard import ENDS_MAX, MOVES, UNANSWERED_PINGS_MAX, Shard, State
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.errors import (
    Busy,
    CallTimeout,
    DaemonError,
    DaemonUnreachable,
    InvalidName,
    InvalidSetting,
    Partitioned,
    ShardUnavailable,
    TableBroken,
)
from purgatoryd.shm_layout.layout import (
    FLAG_DRAIN,
    BulkLoadAction,
    DaemonState,
    Degraded,
    Message,
    Status,
    WireError,
)
from purgatoryd.shm_layout.paths import paths_in
from purgatoryd.shm_layout.shards import (
    Placement,
    ShardTable,
    deployment_of,
    read_table,
    refuse_shard_name,
    table_path,
    write_table,
)
from purgatoryd.shm_layout.status_file import Cause, StatusFile, StatusRecord

pytestmark = pytest.mark.tier("check")

TABLE = ShardTable("demo", 3, 2, 4, {"shop": Placement("shop", (2,))})
KEYS = [f"key-{i}" for i in range(200)]


# ---- the routing table --------------------------------------------------------------------------


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_table(tmp_path, "demo") is None
    write_table(tmp_path, TABLE)
    assert read_table(tmp_path, "demo") == TABLE
    assert [path.name for path in tmp_path.iterdir()] == ["demo.shards"]
    assert table_path(tmp_path, "demo").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": 2}, "schema 2"),
        ({"name": "other"}, "the table of 'other'"),
        ({"count": 0}, "0 shards"),
        ({"count": 65}, "65 shards"),
        ({"placements": {"shop": [4]}}, r"places 'shop' in \[4\]"),
        ({"placements": {"shop": []}}, "places 'shop'"),
        ({"version": None}, "no routing table"),
        ({"placements": [1]}, "no routing table"),
    ],
)
def test_an_inconsistent_table_is_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    write_table(tmp_path, TABLE)
    path = table_path(tmp_path, "demo")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TableBroken, match=why):
        read_table(tmp_path, "demo")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff"])
def test_an_invalid_table_file_is_refused(content: bytes, tmp_path: Path) -> None:
    table_path(tmp_path, "demo").write_bytes(content)
    with pytest.raises(TableBroken):
        read_table(tmp_path, "demo")


def test_a_namespace_stays_where_it_was_born() -> None:
    elsewhere = next(s for s in range(4) if TABLE.place("new").shards != (s,))
    born = TABLE.with_birth(Placement("new", (elsewhere,)))
    assert born.place("new").shards == (elsewhere,)
    assert (born.version, born.shard_generation) == (TABLE.version + 1, TABLE.shard_generation)
    assert "new" not in TABLE.placements
    assert born.namespaces_of(2) == ["shop", *(["new"] if elsewhere == 2 else [])]
    assert born.daemons == ["demo-2-0", "demo-2-1", "demo-2-2", "demo-2-3"]


@pytest.mark.parametrize("name", ["demo", "demo-1", "1-0", "demo-1-a", "demo-1-0-x"])
def test_other_names_are_free(name: str) -> None:
    refuse_shard_name(name)


@pytest.mark.parametrize("count", [0, 2])
def test_the_name_of_a_shard_is_refused_for_other_daemons(count: int) -> None:
    name = TABLE.daemon(1)
    assert deployment_of(name) == "demo"
    config = Config(name=name, shards=count)
    with pytest.raises(InvalidName, match=r"only names of shards do$"):
        deployment.serve_shards(config, lambda *_: [], lambda: config) if count else serve(config)


def test_namespaces_and_partitions_spread() -> None:
    table = ShardTable("demo", 1, 1, 4)
    used = Counter(table.place(f"n{i}").shards[0] for i in range(400))
    assert sorted(used) == [0, 1, 2, 3]
    assert min(used.values()) > 50
    assert sorted(table.place("clicks", 4).shards) == [0, 1, 2, 3]
    assert Counter(Counter(table.place("clicks", 8).shards).values()) == {2: 4}


def test_few_namespaces_move_with_one_shard_more() -> None:
    before, after = ShardTable("demo", 1, 1, 4), ShardTable("demo", 1, 2, 5)
    names = [f"n{i}" for i in range(400)]
    moved = [n for n in names if before.place(n).shards != after.place(n).shards]
    assert 0 < len(moved) < 160
    assert all(after.place(n).shards == (4,) for n in moved)


def test_a_namespace_of_the_daemons_is_in_every_shard() -> None:
    assert TABLE.knows("_purgatoryd")
    assert TABLE.place("_purgatoryd").shards == (0, 1, 2, 3)
    assert not TABLE.knows("new")


# ---- the arena of a shard -----------------------------------------------------------------------


def batch(session: int, command: Command) -> bytes:
    names = wire.encode_names([(b"n", b"t")])
    head = wire.encode_frame(
        Message.BATCH, session, 1, count=1, names=1, names_bytes=len(names)
    )  # fmt: skip
    return head + names + b"".join(command)


@pytest.mark.parametrize("kind", ["put", "cancel", "watch", "advance", "query", "bulk_load"])
def test_a_shard_takes_only_what_names_a_namespace_of_its_own(kind: str) -> None:
    core = Purgatory(shard=1, shards=2, bulk_loads=1, bulk_load_blocks=1)
    lib.pg_confine(core.a)
    hello = core.handle(wire.encode_hello(bytes(16)))
    assert isinstance(hello, wire.Reply)
    session = wire.decode_welcome(hello.body).session
    message = {
        "put": lambda: batch(session, put(b"k", 10**9)),
        "cancel": lambda: batch(session, cancel(b"k")),
        "watch": lambda: batch(session, watch(b"k", ANY, [Key(b"w", 1)])),
        "advance": lambda: batch(session, advance(b"k", 1)),
        "query": lambda: wire.encode_query(1, session, b"n", b"k"),
        "bulk_load": lambda: wire.encode_bulk_load(
            1, session, b"l" * 16, BulkLoadAction.OPEN, namespace=b"n"
        ),
    }[kind]()
    before = authoritative_state(core)
    refused = core.handle(message)
    assert isinstance(refused, wire.Reply)
    assert (refused.error, refused.detail) == (WireError.WRONG_SHARD, (1, 2))
    assert authoritative_state(core) == before
    core.set_namespace(b"n")
    taken = core.handle(message)
    assert isinstance(taken, wire.Reply)
    assert taken.error == 0
    core.check()


# ---- the registry of namespaces -----------------------------------------------------------------


def test_a_birth_counts_once_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = paths_in(tmp_path, "demo")
    registry = Registry.of(Config(name="demo", shards=2), paths)
    placement = registry.table.place("shop")
    registry.record(placement)
    assert Registry.of(Config(name="demo", shards=2), paths).table == registry.table
    before = registry.table

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(deployment, "write_table", full)
    with pytest.raises(OSError, match="no space"):
        registry.record(registry.table.place("other"))
    assert registry.table == before


def test_with_a_wal_the_table_next_to_it_counts(tmp_path: Path) -> None:
    paths, wal = paths_in(tmp_path / "run", "demo"), tmp_path / "wal"
    paths.directory.mkdir()
    config = Config(name="demo", shards=2, wal_dir=str(wal))
    Registry.of(config, paths).record(Placement("shop", (1,)))
    table_path(paths.directory, "demo").unlink()  # a reboot removes the run directory
    assert Registry.of(config, paths).table.place("shop").shards == (1,)
    assert read_table(paths.directory, "demo") == read_table(wal, "demo")


def test_a_half_written_birth_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(name="demo", shards=2, wal_dir=str(tmp_path / "wal"))
    registry = Registry.of(config, paths_in(tmp_path, "demo"))
    before, write = registry.table, write_table

    def full(home: Path, table: ShardTable) -> None:
        if home == tmp_path:
            raise OSError(errno.ENOSPC, "no space")
        write(home, table)

    monkeypatch.setattr(deployment, "write_table", full)
    with pytest.raises(OSError, match="no space"):
        registry.record(before.place("shop"))
    assert read_table(tmp_path / "wal", "demo") == read_table(tmp_path, "demo") == before


def test_a_table_older_than_the_one_in_use_is_refused(tmp_path: Path) -> None:
    config = Config(name="demo", shards=2, wal_dir=str(tmp_path / "wal"))
    paths = paths_in(tmp_path, "demo")
    newer = Registry.of(config, paths).table.with_birth(Placement("shop", (1,)))
    write_table(tmp_path, newer)
    with pytest.raises(TableBroken, match="is outdated: version 2 exists, this is 1"):
        Registry.of(config, paths)
    assert read_table(tmp_path, "demo") == newer


@pytest.mark.parametrize(
    "given", [{"tcp": "127.0.0.1:1", "server_key": "k", "keys": "l"}, {"cpus": "0"}]
)
def test_settings_for_a_single_daemon_are_refused_with_shards(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="with shards"):
        Config(name="demo", shards=2, **given)


# ---- the status file --------------------------------------------------------------------------


def test_a_status_file_is_read_as_it_was_written_until_the_host_boots(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, "demo")
    with pytest.raises(FileNotFoundError):
        _ = file.header
    now = StatusRecord(DaemonState.DEGRADED, 7, 1, 2, [Cause.SILENT], ["why"], 3, 2, 1)
    file.write(now)
    assert file.header == now
    assert (tmp_path / "demo.status").stat().st_mode & 0o777 == 0o640
    os.utime(tmp_path / "demo.status", (1, 1))
    with pytest.raises(FileNotFoundError, match="before this boot"):
        _ = file.header


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"daemon_state": 1}', "\xff"])
def test_an_invalid_status_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "demo.status").write_text(content)
    with pytest.raises(TableBroken, match=r"demo\.status: is not a status file"):
        _ = StatusFile(tmp_path, "demo").header


def test_a_folder_without_space_stops_no_deployment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lifecycle = DeploymentLifecycle(ServiceManager())
    lifecycle.write_to(StatusFile(tmp_path / "gone", "demo"))
    lifecycle.enter(DaemonState.STARTING)
    lifecycle.heartbeat()
    assert lifecycle.state is DaemonState.STARTING
    log.flush()
    assert capfd.readouterr().err.count("the status file cannot be written: ") == 2


# ---- a shard's process --------------------------------------------------------------------------


def test_a_shard_that_ends_repeatedly_is_crash_looping(tmp_path: Path) -> None:
    with zmq.Context() as context:
        one = Shard(0, paths_in(tmp_path, "demo-1-0"), ["/bin/false"], context)
        pauses, now_ns = [], 0
        while one.state is not State.CRASH_LOOPING:
            one.start()
            assert one.pid
            while not one.ended(now_ns, requested=False):
                continue
            pauses.append(one.restart_at_ns - now_ns)
            now_ns = one.restart_at_ns
        assert len(pauses) == ENDS_MAX
        assert pauses[:4] == [shard.PAUSE_NS << n for n in range(4)]
        assert pauses[-1] == shard.PAUSE_MAX_NS
        assert one.code == 1
        one.try_again(now_ns)
        one.start()  # would be refused if the shard were not stopped
        one.wait()


@pytest.mark.parametrize("missing", ["a process", "a descriptor"])
def test_a_shard_without_space_for_its_process_waits(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    command = "/nowhere" if missing == "a process" else "/bin/sleep"
    monkeypatch.setattr(os, "pidfd_open", fails)
    with zmq.Context() as context:
        one = Shard(0, paths_in(tmp_path, "demo-1-0"), [command, "1000"], context)
        with pytest.raises(OSError, match=r"nowhere|open files"):
            one.start()
        assert one.pid == 0
        assert one.fds == []
        one.failed(5)
        assert one.state is State.DOWN
        assert one.restart_at_ns == 5 + shard.PAUSE_NS


@pytest.mark.parametrize(("command", "state"), [("true", State.ENDED), ("false", State.DOWN)])
def test_a_shard_that_was_stopped_stays_stopped(command: str, state: State, tmp_path: Path) -> None:
    with zmq.Context() as context:
        one = Shard(0, paths_in(tmp_path, "demo-1-0"), [f"/bin/{command}"], context)
        one.start()
        assert len(one.fds) == 2
        while not one.ended(0, requested=True):
            continue
        assert one.state is state
        assert one.fds == []


def test_only_a_ready_shard_has_to_answer(tmp_path: Path) -> None:
    with zmq.Context() as context:
        says_ready = ["/bin/sh", "-c", "echo ready; exec sleep 1000"]
        one = Shard(0, paths_in(tmp_path, "demo-1-0"), says_ready, context)
        one.heartbeat()
        one.start()
        one.heartbeat()
        assert one.unanswered_pings == 0
        while not one.said_ready(0):
            continue
        for _ in range(3):
            one.heartbeat()
            one.receive()
        assert one.unanswered_pings == 3
        one.signal(signal.SIGKILL)
        while not one.ended(0, requested=False):
            continue
        one.heartbeat()
        assert one.unanswered_pings == 0


def test_a_shard_is_ready_once_a_socket_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with zmq.Context() as context:
        says_ready = ["/bin/sh", "-c", "echo ready; exec sleep 1000"]
        one = Shard(0, paths_in(tmp_path, "demo-1-0"), says_ready, context)
        one.start()
        with monkeypatch.context() as patch:
            patch.setattr(context, "socket", refused)
            while not one._reads_ready():
                continue
            assert not one.said_ready(0)
        assert one.said_ready(0)
        one.signal(signal.SIGKILL)
        while not one.ended(0, requested=True):
            continue


def test_a_shard_whose_arena_says_that_its_loop_runs_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    with zmq.Context() as context:
        says_ready = ["/bin/sh", "-c", "echo ready; exec sleep 1000"]
        one = Shard(0, paths_in(tmp_path, "demo-1-0"), says_ready, context)
        monkeypatch.setattr(one, "send", asked.append)
        one.start()
        while not one.said_ready(0):
            continue
        arena = Reported()
        monkeypatch.setattr(one, "_arena", arena)
        for moves, silent in ((1, 0), (1, 0), (0, 1), (0, 2), (1, 0), (0, 1)):
            arena.heartbeat_boot_ns += moves
            one.heartbeat()
            assert one.unanswered_pings == silent
        assert len(asked) == 2
        one.signal(signal.SIGKILL)
        one.wait()


class Reported:
    """Stand-in for the reports in the arena header of a shard."""

    heartbeat_boot_ns = 0
    why = Degraded(0)
    retired = False

    def close(self) -> None:
        """Do nothing: no arena is mapped."""


def test_a_start_that_gets_no_further_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "STALLED_HEARTBEATS_MAX", 3)
    with zmq.Context() as context:
        paths = paths_in(tmp_path, "demo-1-0")
        one = Shard(0, paths, ["/bin/sh", "-c", "echo ready; exec sleep 1000"], context)
        one.start()
        for moved_ns in (0, 7, 8):
            if moved_ns:
                now = StatusRecord(DaemonState.RECOVERING, one.pid, 1, moved_ns)
                StatusFile(tmp_path, "demo-1-0").write(now)
                one.heartbeat()
            for heartbeats in range(3):
                assert (one.stalled_heartbeats, one.hangs) == (heartbeats, "")
                one.heartbeat()
            assert one.hangs == "makes no progress during its start"
        while not one.said_ready(0):
            continue
        assert one.hangs == ""
        one.signal(signal.SIGKILL)
        one.wait()


def test_a_shard_that_hangs_is_killed_unless_it_is_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    one, killed = looks_after(State.STARTING, State.READY), list[str]()
    monkeypatch.setattr(Shard, "signal", lambda each, _: killed.append(each.name))
    one._shards[0].stalled_heartbeats = shard.STALLED_HEARTBEATS_MAX
    one._shards[1].unanswered_pings = shard.UNANSWERED_PINGS_MAX
    for draining in (True, False):
        one._draining = draining
        for each in one._shards:
            one._end_silent(each)
        assert killed == ([] if draining else ["demo-1-0", "demo-1-1"])


def test_an_end_has_more_time_while_a_shard_gets_further(monkeypatch: pytest.MonkeyPatch) -> None:
    one, said = looks_after(State.ENDED, State.READY), list[str]()
    one._lifecycle.state = DaemonState.STOPPED
    one._manager = cast("Any", SimpleNamespace(step=said.append))
    last, arena = one._shards[1], Reported()
    for name, value in {"_process": one, "_admin": one, "_arena": arena, "send": id}.items():
        monkeypatch.setattr(last, name, value)
    for moves in (1, 1, 0, 0, 1):
        arena.heartbeat_boot_ns += moves
        one.heartbeat(0)
        assert said == ["stopping: 1 of 2 shards have ended"] * moves
        said.clear()


def looks_after(*states: State, wake_fd: int = -1) -> Deployment:
    """Return a deployment whose shards are in these states. No processes run."""
    idle = SimpleNamespace(receive=lambda: None)
    nothing: Any = SimpleNamespace(
        pending=lambda *, commands: False, fds=lambda: (), watch_due_ns=2**62, notices_fd=-1,
        take_subscriptions=lambda: None, keep_watch=lambda *_: False, bind_again=lambda: None,
        commands=idle, admin=idle,
    )  # fmt: skip
    shards = [Shard(n, paths_in(Path("/"), f"demo-1-{n}"), [], nothing) for n in range(len(states))]
    for one, state in zip(shards, states, strict=True):
        one.state = state
    lifecycle = DeploymentLifecycle(ServiceManager())
    lifecycle.state = DaemonState.RECOVERING
    config = Config(name="demo")
    return Deployment(config, nothing, shards, nothing, nothing, wake_fd, lifecycle, lambda: config)


def test_a_shard_that_comes_back_keeps_no_other_from_it() -> None:
    one = looks_after(State.STARTING, State.DOWN, State.READY)
    assert one._startable() == []
    one._lifecycle.state = DaemonState.DEGRADED
    assert one._startable() == [one._shards[1]]


def test_a_drain_does_not_wait_for_a_crash_looping_shard() -> None:
    one, other = (looks_after(s, State.CRASH_LOOPING) for s in (State.ENDED, State.READY))
    assert not one.done()
    for drained in (one, other):
        drained._obey(FLAG_DRAIN)
    assert one.done()
    assert not other.done()


def test_a_deployment_may_have_more_descriptors_than_select_knows() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    near, end = os.pipe()
    far = fcntl.fcntl(near, fcntl.F_DUPFD, 1100)
    try:
        os.write(end, b"!")
        one = looks_after(State.READY, wake_fd=far)
        one._lifecycle.state = DaemonState.READY
        one.loop.iterate()
        assert one._waiter.wait(2**62) == {far}
    finally:
        for fd in (near, end, far):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_why_a_deployment_does_not_serve_as_it_should() -> None:
    one = looks_after(State.CRASH_LOOPING, State.STARTING, State.READY, State.READY)
    one._lifecycle.state = DaemonState.READY
    one._shards[2].unanswered_pings = shard.SLOW_PINGS + 1
    one._shards[3].unanswered_pings = shard.SLOW_PINGS
    one._settle()
    assert one._lifecycle.state is DaemonState.DEGRADED
    assert one._lifecycle.why == (
        (Cause.CRASH_LOOPING, "demo-1-0 is crash-looping: 8 failures in a row; not restarted"),
        (Cause.RESTARTING, "demo-1-1 has ended and is being restarted"),
        (Cause.SILENT, "demo-1-2 does not answer"),
    )
    for each in one._shards:
        each.state, each.unanswered_pings = State.READY, 0
    one._settle()
    assert one._lifecycle.state.name == "READY"
    assert not one._lifecycle.why


def test_a_reload_does_not_make_a_start_ready() -> None:
    one = looks_after(State.CRASH_LOOPING, State.STARTING)
    said: list[str] = []
    one._manager = cast(
        "Any", SimpleNamespace(reloading=lambda: said.append("r"), ready=lambda: said.append("R"))
    )
    one.loop.request_reload()
    one.loop.reload_if_requested()
    assert said == []
    one._lifecycle.state = DaemonState.DEGRADED
    one.loop.reload_if_requested()
    one._report_reload()
    assert said == ["r", "R"]  # the starting shard is asked to reload once it is ready
    assert [each.state for each in one._shards] == [State.DOWN, State.STARTING]
    assert one._shards[1]._reload_missed


def test_a_reload_waits_for_the_answer_of_each_shard_that_does_not_hang() -> None:
    one = looks_after(State.READY, State.READY)
    one._lifecycle.state = DaemonState.READY
    said: list[str] = []
    one._manager = cast(
        "Any", SimpleNamespace(reloading=lambda: said.append("r"), ready=lambda: said.append("R"))
    )
    answers, hangs = one._shards
    assert one.reload()
    one._report_reload()
    answers._reloaded = answers._reload
    one._report_reload()
    assert [each.reloads for each in one._shards] == [False, True]
    assert said == ["r"]
    hangs.unanswered_pings = UNANSWERED_PINGS_MAX
    one._report_reload()
    assert said == ["r", "R"]


def test_each_iteration_passes_a_reload_on() -> None:
    one = looks_after(State.ENDED)
    one._waiter = cast("Any", SimpleNamespace(watch=list))
    one._lifecycle.state = DaemonState.READY
    said: list[str] = []
    one._manager = cast(
        "Any", SimpleNamespace(reloading=lambda: said.append("r"), ready=lambda: said.append("R"))
    )
    one.loop.request_reload()
    one.loop.iterate()
    assert said == ["r", "R"]


def test_no_inbox_stays_open_unless_all_are_opened() -> None:
    closed: list[str] = []

    def open_one(route: Any, whole: bool) -> Any:
        if route == "bad":
            raise OSError(errno.EMFILE, "Too many open files")
        return SimpleNamespace(close=lambda: closed.append(route))

    routes: Any = ["one", "other", "bad"]
    with pytest.raises(OSError, match="Too many"):
        _all_or_none(routes, open_one, True)
    assert sorted(closed) == ["one", "other"]
    assert len(_all_or_none(routes[:2], open_one, True)) == len(closed)


def namespaces_set_up(**settings: Any) -> list[object]:
    """Return the steps by which a start sets up the namespaces of its settings. The arena already
    has the namespace `bank`."""
    done: list[object] = []
    arena: Any = SimpleNamespace(
        namespaces_of_users=lambda: [SimpleNamespace(name="bank")], set_durable=done.append,
        confine=lambda: done.append("confined"),
    )  # fmt: skip
    _set_up_namespaces(arena, Config("demo", **settings))
    return done


@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_has_the_namespaces_that_are_placed_in_it(shard: int) -> None:
    assert namespaces_set_up(shard=shard) == ["confined"]


def test_settings_of_namespaces_need_slots_for_all() -> None:
    durable = {"wal_dir": "/wal", "durable_namespaces": ("shop",)}
    assert namespaces_set_up(namespaces=2, **durable) == ["shop"]
    with pytest.raises(InvalidSetting, match="namespaces"):
        namespaces_set_up(namespaces=1, **durable)


def test_every_state_has_its_moves() -> None:
    assert set(MOVES) == set(State)
    reached = set(itertools.chain.from_iterable(MOVES.values()))
    assert reached == set(State)


# ---- routes from a client to its shard ----------------------------------------------------------


def test_a_daemon_of_that_name_in_another_directory_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = paths_in(tmp_path, "demo")
    monkeypatch.setattr(route, "client_paths", lambda _: there)
    way = route.Route("demo", "shop")
    assert way.find()[0] == there
    write_table(tmp_path, ShardTable("demo", 1, 1, 2).with_birth(Placement("shop", (1,))))
    assert way.find()[0].name == "demo-1-1"
    there = paths_in(tmp_path / "other", "demo")
    with pytest.raises(DaemonUnreachable):
        way.find()
    there = paths_in(tmp_path, "demo")
    assert way.find()[0].name == "demo-1-1"


def test_another_number_of_partitions_needs_another_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "client_paths", lambda _: paths_in(tmp_path, "demo"))
    empty = ShardTable("demo", 1, 1, 2)
    write_table(tmp_path, empty.with_birth(Placement("shop", (0, 1, 0))))
    way = route.Route("demo", "shop")
    assert way.count() == 3
    assert [way.find(number)[0].name for number in range(3)] == ["demo-1-0", "demo-1-1", "demo-1-0"]
    breakers = [way.find(number)[1] for number in range(3)]
    assert breakers[0] is breakers[2] is not breakers[1]
    write_table(tmp_path, empty.with_birth(Placement("shop", (1,))))
    with pytest.raises(Partitioned, match=r"has 1 partitions: .* had 3; open a new client"):
        way.find(0)


# ---- the circuit breaker ------------------------------------------------------------------------


def test_a_shard_that_is_silent_is_not_asked_for_a_while() -> None:
    now_ns = 1_000_000_000
    host: Any = SimpleNamespace(boot_ns=lambda: now_ns)
    breaker = Breaker("demo", 3, host)
    for _ in range(FAILURES):
        breaker.check()
        breaker.failed()
    with pytest.raises(ShardUnavailable) as caught:
        breaker.check()
    error = caught.value
    assert (error.name, error.shard, error.failures) == ("demo", 3, FAILURES)
    assert (error.since_boot_ns, error.retry_boot_ns) == (now_ns, now_ns + PAUSE_NS)
    now_ns += PAUSE_NS
    breaker.check()  # this call is the probe
    with pytest.raises(ShardUnavailable):
        breaker.check()  # only one call at a time is a probe
    breaker.failed()
    now_ns += PAUSE_NS
    with pytest.raises(ShardUnavailable):
        breaker.check()  # after a failed probe, the breaker refuses calls for twice as long
    now_ns += PAUSE_NS
    breaker.check()
    breaker.answered()
    for _ in range(FAILURES):
        breaker.check()
        breaker.failed()


# ---- partitions ---------------------------------------------------------------------------------


def test_several_silent_partitions_do_not_take_the_time_of_each() -> None:
    """together() waits for all partitions at the same time, and for each partition until its call
    has failed."""
    steps = Counter[str]()

    def silent(name: str, deadline_s: float, count: int) -> Job[None]:
        for _ in range(count):
            steps[name] += 1
            yield deadline_s
        raise CallTimeout(name, 5.0, 0)

    job = together([silent("slow", 7.0, 3), silent("fast", 5.0, 1)])
    assert [next(job) for _ in range(3)] == [5.0, 7.0, 7.0]
    with pytest.raises(CallTimeout, match="fast"):
        next(job)
    assert steps == {"slow": 3, "fast": 1}


def test_a_broken_connection_reaches_the_jobs_of_all_partitions() -> None:
    caught = []

    def job(name: str) -> Job[None]:
        try:
            yield 1.0
        except OSError:
            caught.append(name)
            yield 2.0

    both = together([job("one"), job("other")])
    assert next(both) == 1.0
    assert both.throw(OSError()) == 2.0
    assert caught == ["one", "other"]
    with pytest.raises(StopIteration):
        next(both)


def partitions(count: int = 3) -> Core:
    return with_partitions(count, "demo", "clicks")


@pytest.mark.parametrize(
    "rows",
    [
        [(key, 5.0) for key in KEYS],
        [{"key": key, "delay": 5.0} for key in KEYS],
        {"key": KEYS, "delay": [5.0] * len(KEYS)},
        {"key": np.array(KEYS), "delay": np.full(len(KEYS), 5.0)},
        pa.table({"key": KEYS, "delay": [5.0] * len(KEYS)}),
    ],
    ids=["tuples", "dicts", "lists", "numpy", "arrow"],
)
def test_rows_of_any_kind_go_where_their_keys_are(rows: Any) -> None:
    some = partitions()
    shares = list(split_rows(some, rows))
    assert sorted(share.connection.number for share in shares) == [0, 1, 2]
    assert sorted(place for share in shares for place in share.places) == list(range(len(KEYS)))
    for share in shares:
        assert {some.of(KEYS[place]) for place in share.places} == {share.connection}
        assert keys_of(share.rows) == [KEYS[place] for place in share.places]


def keys_of(rows: Any) -> list[str]:
    if isinstance(rows, list):
        return [row["key"] if isinstance(row, dict) else row[0] for row in rows]
    return [str(key) for key in rows["key"]]


def test_results_come_back_in_the_order_of_the_rows() -> None:
    cells = [wire.RESULT.pack(row << 8 | 1, row) for row in range(5)]
    odd, even = BulkResult(None, arrays=False), BulkResult(None, arrays=False)
    odd._parts, even._parts = [cells[1], cells[3]], [cells[0] + cells[2]]
    lost = DaemonError()
    merged = MergedResult(5)
    merged.add((1, 3), odd)
    merged.add((0, 2), even)
    merged.fail(lost)
    assert merged.tickets == [0, 1, 2, 3, 0]
    assert [int(status) for status in merged.statuses] == [1, 1, 1, 1, 0]
    assert not merged.ok
    with pytest.raises(DaemonError):
        merged.check()


def test_busy_rows_of_several_partitions_are_reported_by_their_number() -> None:
    busy, added = wire.RESULT.pack(Status.BUSY, 0), wire.RESULT.pack(1 << 8 | Status.ADDED, 1)
    odd, even = BulkResult(None, arrays=False), BulkResult(None, arrays=False)
    odd._parts, even._parts = [busy, added], [added, busy, bytes(wire.RESULT.size)]
    merged = MergedResult(5)
    merged.add((1, 3), odd)
    merged.add((0, 2, 4), even)
    merged.fail(odd._busy())
    with pytest.raises(Busy) as caught:
        merged.check()
    assert (caught.value.rows, caught.value.result) == ((1, 2), merged)
    lost = DaemonError()
    merged.fail(lost)  # replaces Busy, because after this error some rows have no result
    merged.fail(odd._busy())
    with pytest.raises(DaemonError) as other:
        merged.check()
    assert other.value is lost


def test_a_bulk_call_goes_on_in_the_partitions_whose_shards_answer() -> None:
    core = partitions()
    refused = core.connections[1]
    refused.breaker = Breaker("demo", 7)
    for _ in range(FAILURES):
        refused.breaker.failed()
    result, parts = puts(core, [(key, 5.0) for key in KEYS], "t", "error")
    assert {part.connection for part in parts} == {core.connections[0], core.connections[2]}
    for part in parts:
        for batch in part.batches:
            batch.settle(wire.RESULT.pack(1 << 8 | Status.ADDED, 1) * batch.count)
    assert result.done
    there = [Status.ADDED if core.of(key) is not refused else Status.NONE for key in KEYS]
    assert result.statuses == there
    with pytest.raises(ShardUnavailable):
        result.check()
    assert refused.packer.queued == 0
