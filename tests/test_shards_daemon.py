"""A deployment of shards as its users see it: real processes, each of which may end at any time."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import psutil
import pytest
from click.testing import CliRunner, Result
from other_user import run_as
from real_daemon import PATIENCE_S, Daemon, DaemonFailed, StartDaemon, eventually, refused
from service_manager import Manager, fill
from spoiled import spoil

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.cli.exposition import exported
from purgatoryd.cli.shards import directory_of
from purgatoryd.clients import (
    Admin,
    AllOf,
    AsyncClient,
    AsyncPurgatory,
    AsyncSubscriber,
    BulkLoad,
    BulkResult,
    CancelResult,
    Client,
    DaemonError,
    DaemonUnreachable,
    InvalidArgument,
    InvalidRows,
    InvalidSetting,
    InvalidTime,
    Lagged,
    MessageRefused,
    Notice,
    Partitioned,
    Purgatory,
    PurgatorydError,
    Resume,
    SessionTableFull,
    ShardUnavailable,
    Status,
    Subscriber,
    When,
    WrongShard,
    subscriber,
)
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.layout import EVENTS_NAMESPACE, EVENTS_TOPIC
from purgatoryd.shm_layout.paths import paths_in
from purgatoryd.shm_layout.shards import ShardTable, read_table, write_table
from purgatoryd.shm_layout.wire import Key

pytestmark = pytest.mark.tier("all")

FAR = 3600.0
STRANGER = 4242
BULK_LOAD = bytes(range(16))
SMALL = "--capacity", "2000", "--payload-memory", "1M", "--replay-buffer", "1024"
PATIENT = "status", "--frozen-after", "2s"
NAMES = [f"n{i}" for i in range(20)]


@pytest.fixture
def demo(daemon: StartDaemon) -> Daemon:
    return daemon("demo", "--shards", "2", *SMALL)


def table(demo: Daemon) -> ShardTable:
    found = read_table(demo.dir, demo.name)
    assert found is not None
    return found


def one_in(demo: Daemon, shard: int) -> str:
    """Return the name of a namespace that is in this shard, or that would be placed in it."""
    return next(name for name in NAMES if table(demo).place(name).shards == (shard,))


def pid_of(demo: Daemon, shard: int) -> int:
    reader = Reader.attach(paths_in(demo.dir, table(demo).daemon(shard)))
    try:
        return int(reader.header.daemon_pid)
    finally:
        reader.close()


def cli(*words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--name", "demo"])


def records(*words: str) -> list[Any]:
    done = cli(*words, "--json")
    assert done.exit_code == Exit.DONE, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- plain namespaces ---------------------------------------------------------------------------


def test_clients_find_the_shard_of_their_namespace(demo: Daemon) -> None:
    for shard in (0, 1):
        name = one_in(demo, shard)
        with (
            Subscriber("demo", namespace=name) as notices,
            Client("demo", namespace=name) as timers,
        ):
            timers.add("soon", delay=0.01, payload=b"p")
            notice = notices.get(timeout=30)
            assert notice is not None
            assert (notice.key, notice.payload, notice.namespace) == ("soon", b"p", name)
            timers.add("far", FAR)
            assert table(demo).placements[name].shards == (shard,)
        with Purgatory("demo", namespace=name) as owner:
            operation = owner.watch("op", AllOf({"k": 1}), timeout=FAR)
            assert owner.advance("k", 1) == 1
            assert operation.result(timeout=30).cause == "satisfied"
    assert {(r["namespace"], r["shard"]) for r in records("namespace", "ls")} == {
        (one_in(demo, 0), 0), (one_in(demo, 1), 1),
    }  # fmt: skip
    assert sorted(r["shard"] for r in records("stats")) == [0, 1]
    assert [r["key"] for r in records("list")] == ["far", "far"]
    assert len(records("check")) == 2
    assert [r["name"] for r in records("status")] == ["demo", "demo-1-0", "demo-1-1"]


def test_the_command_placement_shows_each_shard(demo: Daemon) -> None:
    reported = records("placement")
    assert [(one["name"], one["shard"]) for one in reported] == [("demo-1-0", 0), ("demo-1-1", 1)]
    for one in reported:
        assert one["daemon"]["mode"] == one["placement_plan"]["mode"] == "auto"
    shown = cli("placement").stdout
    for name in table(demo).daemons:
        assert f"{name}, placement plan (auto):" in shown
        assert f"{name} (auto): " in shown
    assert "None" not in shown


def test_asyncio_clients_find_the_shard_of_their_namespace(demo: Daemon) -> None:
    async def run(name: str) -> None:
        async with (
            AsyncSubscriber("demo", namespace=name) as notices,
            AsyncClient("demo", namespace=name) as timers,
        ):
            await timers.add("soon", delay=0.01)
            notice = await notices.get(timeout=30)
            assert notice is not None
            assert notice.key == "soon"

    for shard in (0, 1):
        asyncio.run(run(one_in(demo, shard)))


def test_a_shard_refuses_what_is_not_its_own(demo: Daemon) -> None:
    name = one_in(demo, 0)
    with Client("demo", namespace=name) as timers:
        timers.add("k", FAR)
    wrong = Client("demo-1-1", namespace=name)
    with wrong, pytest.raises(MessageRefused, match="WRONG_SHARD"):
        wrong.get("k", timeout=5)
    reader = Reader.attach(paths_in(demo.dir, "demo-1-1"))
    assert name not in [space.name for space in reader.namespaces().values()]
    reader.close()


def test_an_admin_reaches_the_shard_of_a_namespace(demo: Daemon) -> None:
    names = [one_in(demo, 0), one_in(demo, 1)]
    with Admin("demo") as admin:
        admin.ping()
        for name in names:
            assert admin.set_namespace(name, quota_timers=1).quota_timers == 1
            with Subscriber("demo", namespace=name) as notices:
                ticket = admin.publish("default", "news", b"p", namespace=name)
                notice = notices.get(timeout=30)
            assert notice is not None
            assert (notice.ticket, notice.payload) == (ticket, b"p")
        with pytest.raises(MessageRefused, match="PLACED"):
            admin.create_namespace(names[0], 2)
    limits = {r["namespace"]: r["quota_timers"] for r in records("namespace", "ls")}
    assert limits == dict.fromkeys(names, 1)


@pytest.mark.usefixtures("daemon_dir")
def test_partitions_are_refused_only_by_a_daemon_that_answers(daemon: StartDaemon) -> None:
    with Admin("demo", timeout=0.2) as admin, pytest.raises(DaemonUnreachable):
        admin.create_namespace("clicks", 2)
    daemon("demo")
    with Admin("demo") as admin, pytest.raises(InvalidSetting, match="has no shards"):
        admin.create_namespace("clicks", 2)


def test_a_notice_waits_until_its_shard_knows_the_namespace(demo: Daemon) -> None:
    before = table(demo)
    placement = before.place("late")
    write_table(demo.dir, before.with_birth(placement))
    [shard] = placement.shards
    with (
        Admin("demo") as admin,
        Admin(before.daemon(shard)) as holder,
        ThreadPoolExecutor(1) as other,
    ):
        with pytest.raises(WrongShard):
            admin.publish("default", "news", namespace="late", timeout=2)
        ticket = other.submit(admin.publish, "default", "news", namespace="late", timeout=60)
        holder.set_namespace("late")
        assert ticket.result() > 0


# ---- partitions ---------------------------------------------------------------------------------


@pytest.fixture
def clicks(demo: Daemon) -> Daemon:
    assert cli("namespace", "create", "clicks", "--partitions", "4").exit_code == Exit.DONE
    return demo


@pytest.mark.tier("test")
def test_a_partitioned_namespace_is_one_for_its_users(clicks: Daemon) -> None:
    keys = [f"k{i}" for i in range(40)]
    with (
        Client("demo", namespace="clicks") as timers,
        Subscriber("demo", namespace="clicks") as notices,
    ):
        result = timers.add_many([(key, 0.05) for key in keys])
        assert result.ok
        received = [notices.get(timeout=30) for _ in keys]
        assert sorted(n.key for n in received if n) == sorted(keys)
        assert sorted({n.ticket for n in received if n}) == sorted(set(result.tickets))
        assert {ticket >> 48 for ticket in result.tickets} == {0, 1}
        timers.add("k0", FAR, wait=False)
        timers.flush()
        assert timers.add_many([(key, FAR) for key in keys]).statuses == [
            Status.EXISTS, *[Status.ADDED] * 39,
        ]  # fmt: skip
        assert all(timers.get(key) is not None for key in keys)
        assert timers.cancel("k1") == CancelResult.CANCELLED
        assert timers.cancel_many(["k2", "k1", "k3"]) == [
            CancelResult.CANCELLED, CancelResult.UNKNOWN, CancelResult.CANCELLED,
        ]  # fmt: skip
    for shard in (0, 1):
        reader = Reader.attach(paths_in(clicks.dir, table(clicks).daemon(shard)))
        assert reader.stats()["live"] > 0
        reader.close()
    with Admin("demo") as admin, pytest.raises(Partitioned, match="cannot park"):
        admin.set_namespace("clicks", park_beyond_ns=1)


def test_a_partitioned_namespace_takes_columns_and_reports_rows_by_their_number(
    clicks: Daemon,
) -> None:
    keys = [f"k{i}" for i in range(40)]
    with Client("demo", namespace="clicks") as timers:
        columns = {"key": np.array(keys), "delay": np.full(40, FAR)}
        result = timers.add_many(columns, mode="keep", wait=False)
        timers.settle(result)
        assert result.statuses.tolist() == [Status.ADDED] * 40
        tickets = dict(zip(keys, result.tickets.tolist(), strict=True))
        assert {key: timers.add(key, FAR, mode="keep").ticket for key in keys} == tickets
        for call in (timers.add_many, timers.unpark_many):
            with pytest.raises(InvalidRows) as caught:
                call([*[(key, 1, b"") for key in keys], ("bad",)])  # type: ignore[list-item]
            assert caught.value.row == 40
        with pytest.raises(InvalidArgument, match="row 39: ticket"):
            timers.unpark_many([*[(key, 1, b"") for key in keys[:39]], ("k39", -1, b"")])
        found = timers.unpark_many([(key, 1, b"") for key in keys])
        assert found.statuses == [Status.UNKNOWN] * 40
        with pytest.raises(InvalidTime, match="row 39"):
            timers.add_many({"key": np.array(keys), "delay": np.array([*[FAR] * 39, np.nan])})
        with pytest.raises(InvalidRows, match="must be a collection"):
            timers.add_many({"key": "ab", "delay": [FAR, FAR]})
        with pytest.raises(InvalidArgument, match="mode"):
            timers.add_many([], mode="other")  # type: ignore[arg-type]
        assert timers.add_many([]).statuses == []


def test_bulk_loads_need_a_namespace_with_one_partition(clicks: Daemon) -> None:
    calls: list[Callable[[Client], object]] = [
        lambda c: c.add_many([("k", FAR)], bulk_load=BulkLoad(BULK_LOAD)),
        lambda c: c.cancel_many(["k"], bulk_load=BulkLoad(BULK_LOAD)),
        lambda c: c.unpark_many([("k", 1, b"")], bulk_load=BulkLoad(BULK_LOAD)),
        lambda c: c.open_bulk_load(BULK_LOAD),
        lambda c: c.close_bulk_load(BULK_LOAD),
        lambda c: c.forget_bulk_load(BULK_LOAD),
        lambda c: c.bulk_load_status(BULK_LOAD),
        lambda c: c.daemon,
    ]
    with Client("demo", namespace="clicks") as timers:
        for call in calls:
            with pytest.raises(Partitioned, match="4 partitions"):
                call(timers)
        assert timers.get("k") is None


def one_partition(owner: Purgatory | AsyncPurgatory, key: str, *, same: bool) -> str:
    """Return a watch key in the partition of the operation's key `key`; if not `same`, in another
    partition."""
    core = owner._core
    return next(w for w in map(str, range(100)) if (core.of(w) is core.of(key)) is same)


def test_operations_whose_keys_are_in_one_partition(clicks: Daemon) -> None:
    names = [f"op{i}" for i in range(20)]
    with Purgatory("demo", namespace="clicks") as owner:
        there = {name: one_partition(owner, name, same=True) for name in names}
        operations = owner.watch_many([(n, AllOf({there[n]: 1}), FAR) for n in names])
        assert owner.operations == len(names)
        assert sum(owner.advance_many([(w, 1) for w in {*there.values()}])) == len(names)
        assert {o.result(PATIENCE_S).cause for o in operations} == {"satisfied"}
        own = owner.watch("same", AllOf({"same": 1}), FAR, topic="ended")
        assert own.extend(2 * FAR)
        assert owner.cancel_for_key("same") == ["same"]
        assert own.result(PATIENCE_S).cause == "cancelled"
        asked = owner.watch("asked", When(lambda: True, ["asked"]), FAR)
        owner.advance("asked", 1)
        assert asked.result(PATIENCE_S).cause == "satisfied"
        apart = one_partition(owner, "op", same=False)
        with pytest.raises(Partitioned, match=f"watch key '{apart}'"):
            owner.watch("op", AllOf({"op": 1, apart: 1}), FAR)
        with pytest.raises(Partitioned):
            owner.watch_many([("fine", AllOf({"fine": 1}), FAR), ("op", AllOf({apart: 1}), FAR)])
        assert owner.operations == 0
        assert owner.forget("same")


def test_operations_in_one_partition_with_asyncio(clicks: Daemon) -> None:
    async def run() -> None:
        async with AsyncPurgatory("demo", namespace="clicks") as owner:
            key = one_partition(owner, "op", same=True)
            operation = await owner.watch("op", AllOf({key: 1}), FAR)
            assert await owner.advance(key, 1) == 1
            assert (await operation.result(PATIENCE_S)).cause == "satisfied"
            with pytest.raises(Partitioned):
                await owner.watch("op", AllOf({one_partition(owner, "op", same=False): 1}), FAR)

    asyncio.run(run())


def test_an_owner_of_operations_in_partitions_is_resumed(clicks: Daemon) -> None:
    names, ended = [f"op{i}" for i in range(20)], SimpleQueue[tuple[Key, str]]()
    resume = Resume("owner", 60, lambda key, outcome: ended.put((key, outcome.cause)))
    first = Purgatory("demo", namespace="clicks", resume=resume)
    for name in names:
        first.watch(name, AllOf({name: 1}), FAR)
    first._engine.end()  # as if the process of `first` had ended
    with Purgatory("demo", namespace="clicks", resume=resume) as second:
        for name in names:
            assert second.advance(name, 1) == 1
        outcomes = [ended.get(timeout=PATIENCE_S) for _ in names]
    assert sorted(outcomes, key=str) == sorted(((n, "satisfied") for n in names), key=str)


def test_a_refused_session_ends_those_of_the_other_partitions(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    daemon("demo", "--shards", "1", "--sessions", "8", *SMALL)
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("clicks", 16)
        with pytest.raises(SessionTableFull):
            Client("demo", namespace="clicks")
        assert admin.sessions() == []


def test_a_partitioned_namespace_with_asyncio(clicks: Daemon) -> None:
    keys = [f"k{i}" for i in range(40)]

    async def run() -> None:
        async with (
            AsyncClient("demo", namespace="clicks") as timers,
            AsyncSubscriber("demo", namespace="clicks") as notices,
        ):
            assert (await timers.add_many([(key, 0.05) for key in keys])).ok
            received = [await notices.get(timeout=30) for _ in keys]
            assert sorted(n.key for n in received if n) == sorted(keys)
            await timers.add("k0", FAR)
            assert (await timers.get("k0")) is not None
            assert await timers.cancel_many(["k1", "k0"]) == [
                CancelResult.FIRED, CancelResult.CANCELLED,
            ]  # fmt: skip

    asyncio.run(run())


def leave_with_an_error(freeze: Callable[[], None]) -> None:
    with Client("demo", namespace="clicks", timeout=PATIENCE_S) as timers:
        freeze()
        for n in range(100):
            timers.add(f"k{n}", FAR, wait=False)
        raise KeyError


def leave_asyncio_with_an_error(freeze: Callable[[], None]) -> None:
    async def run() -> None:
        async with AsyncClient("demo", namespace="clicks", timeout=PATIENCE_S) as timers:
            freeze()
            for n in range(100):
                await timers.add(f"k{n}", FAR, wait=False)
            raise KeyError

    asyncio.run(run())


@pytest.mark.parametrize("leave", [leave_with_an_error, leave_asyncio_with_an_error])
def test_after_an_error_a_client_of_many_partitions_waits_for_no_shard(
    demo: Daemon, leave: Callable[[Callable[[], None]], None]
) -> None:
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("clicks", 32)
    pids = pid_of(demo, 0), pid_of(demo, 1)
    frozen_s: list[float] = []

    def freeze() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        frozen_s.append(time.monotonic())

    try:
        with pytest.raises(KeyError):
            leave(freeze)
        assert time.monotonic() - frozen_s[0] < PATIENCE_S / 6
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # the process may have been killed
                os.kill(pid, signal.SIGCONT)


# ---- a shard that ends or hangs -----------------------------------------------------------------


@pytest.mark.tier("test")
def test_a_killed_shard_comes_back_and_the_others_do_not_notice(demo: Daemon) -> None:
    lost, other = one_in(demo, 0), one_in(demo, 1)
    with Client("demo", namespace=lost) as here, Client("demo", namespace=other) as there:
        here.add("kept", FAR)
        there.add("kept", FAR)
        before = pid_of(demo, 0), pid_of(demo, 1)
        os.kill(before[0], signal.SIGKILL)
        handles = [here.add(f"k{i}", FAR, wait=False) for i in range(10)]
        there.add("meanwhile", FAR)
        assert all(handle.result(timeout=30).status == Status.ADDED for handle in handles)
        assert here.get("kept") is not None
        assert pid_of(demo, 0) != before[0]
        assert pid_of(demo, 1) == before[1]
    assert "shard demo-1-0 has ended; restarting it in 0.1 s" in demo.stderr


def unavailable(timers: Client, key: str) -> ShardUnavailable | None:
    try:
        timers.get(key, timeout=0.2)
    except ShardUnavailable as refusal:
        return refusal
    except DaemonError:
        return None
    return None


def test_a_silent_shard_is_not_asked_for_a_while_by_real_clients(clicks: Daemon) -> None:
    keys = [f"k{i}" for i in range(40)]
    with Client("demo", namespace="clicks") as timers:
        placement = table(clicks).place("clicks")
        home = {key: placement.shards[placement.partition_of(key.encode())] for key in keys}
        silent = {timers._core.of(key): key for key in keys if home[key] == 0}.values()
        assert len(silent) == 2  # one key for each of two partitions, which have a session each
        one, other = silent
        lively = next(key for key in keys if home[key] == 1)
        pid = pid_of(clicks, 0)
        os.kill(pid, signal.SIGSTOP)
        try:
            for key in (one, other, one):
                with pytest.raises(DaemonError):
                    timers.get(key, timeout=0.2)
            # After the circuit breaker's pause, the next call is a probe, which is sent to the
            # shard and fails.
            refusal = eventually(lambda: unavailable(timers, other))
            assert refusal is not None
            assert refusal.shard == 0
            assert refusal.failures >= 3
            eventually(lambda: answers(timers, lively))
            eventually(lambda: unavailable(timers, other))
            with pytest.raises(ShardUnavailable) as caught:
                timers.add_many([(other, FAR), (lively, FAR)])
            result: BulkResult = vars(caught.value)["handle"]
            assert result.statuses == [Status.NONE, Status.ADDED]
            assert timers.cancel(lively) is CancelResult.CANCELLED
        finally:
            with suppress(ProcessLookupError):  # the process may have been killed
                os.kill(pid, signal.SIGCONT)
        eventually(lambda: answers(timers, other) and answers(timers, one))


def test_a_shard_that_hangs_is_started_again_and_the_rest_is_left_alone(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    manager = Manager(str(daemon_dir / "notify"))
    heartbeats = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "2000000"}
    demo = daemon("demo", "--shards", "2", *SMALL, env=heartbeats)
    manager.hears("READY=1")
    before = pid_of(demo, 0), pid_of(demo, 1)
    os.kill(before[0], signal.SIGSTOP)
    os.kill(demo.pid, signal.SIGHUP)
    manager.hears("RELOADING=1")
    # a reload does not wait for a shard that is known to hang
    received = manager.hears("READY=1")
    assert "STATUS=degraded: demo-1-0 does not answer" in received
    assert "WATCHDOG=1" in received
    manager.hears("STATUS=ready")
    assert pid_of(demo, 0) != before[0]
    assert pid_of(demo, 1) == before[1]
    manager.socket.close()


# ---- the lifecycle -----------------------------------------------------------------------------


def deployment_status() -> dict[str, Any]:
    """Return what `purgatoryd status` prints about the whole deployment."""
    found: dict[str, Any] = json.loads(cli("status", "--json").stdout.splitlines()[0])
    assert found["name"] == "demo"
    return found


def figure(name: str, **labels: str) -> float:
    """Return the value of a sample that describes the whole deployment."""
    labels |= {"daemon": "demo"}
    samples = (sample for family in exported("demo") for sample in family.samples)
    return next(s.value for s in samples if (s.name, s.labels) == (f"purgatoryd_{name}", labels))


def test_a_deployment_is_degraded_while_a_shard_is_not_there(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    manager = Manager(str(daemon_dir / "notify"))
    demo = daemon("demo", "--shards", "2", *SMALL, env={"NOTIFY_SOCKET": manager.address})
    received = manager.hears("READY=1")
    assert received.index("STATUS=starting") < received.index("STATUS=recovering")
    assert "STATUS=recovering: 0 of 2 shards are ready" in received
    assert "STATUS=ready" in received
    assert (deployment_status()["condition"], deployment_status()["pid"]) == ("ready", demo.pid)
    why = "demo-1-0 has ended and is being restarted"
    listener = Subscriber("demo", namespace=EVENTS_NAMESPACE, topics=[EVENTS_TOPIC])
    with (daemon_dir / "demo-1-0.lock").open("r+") as lock:
        # stop the supervisor, which may otherwise restart the shard before the test looks at the
        # state
        os.kill(demo.pid, signal.SIGSTOP)
        os.kill(pid_of(demo, 0), signal.SIGKILL)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.kill(demo.pid, signal.SIGCONT)
        manager.hears(f"STATUS=degraded: {why}")
        eventually(lambda: deployment_status()["condition"] == "degraded")
        assert deployment_status()["degraded_by"] == [why]
        eventually(lambda: figure("shards_serving") == 1)
        assert figure("degraded", reason="shard_restarting") == figure("state", state="degraded")
        assert (figure("shards"), figure("up"), figure("shard_restarts_total") >= 1) == (2, 1, True)
        status = deployment_status()
        assert (status["shards"], status["serving"], status["restarts"] >= 1) == (
            2, 1, True,
        )  # fmt: skip
        done = cli("status")
        assert done.stdout.startswith(f"demo: degraded ({why}), process {demo.pid}, last loop ")
        assert done.exit_code == Exit.NEGATIVE
    manager.hears("STATUS=ready")
    assert deployment_status()["condition"] == "ready"
    assert figure("degraded", reason="shard_restarting") == 0
    hears_move(listener, state="degraded", was="ready", why=["shard_restarting"])
    hears_move(listener, state="ready", was="degraded", why=[])
    assert f"purgatoryd: degraded: {why} [name=demo state=degraded was=ready]" in demo.stderr
    with Admin("demo") as admin, Client("demo", namespace=one_in(demo, 0)) as timers:
        timers.add("k", FAR)
        admin.stop(drain=True)
        manager.hears("STATUS=draining")
        eventually(lambda: deployment_status()["condition"] == "draining")
        admin.resume()
        manager.hears("STATUS=ready")
        eventually(lambda: states(demo) == ["ready", "ready"])  # one shard had finished draining
        eventually(lambda: deployment_status()["condition"] == "ready")
    held = pid_of(demo, 0)
    os.kill(held, signal.SIGSTOP)
    fill(manager)
    os.kill(demo.pid, signal.SIGTERM)
    eventually(lambda: deployment_status()["condition"] == "stopped")
    manager.hears("STOPPING=1")  # sent at a later heartbeat, because the manager's queue was full
    os.kill(held, signal.SIGCONT)
    hears_move(listener, state="stopped")
    demo.stop()
    assert (deployment_status()["condition"], deployment_status()["pid"]) == ("stopped", 0)
    listener.close()
    manager.socket.close()


def hears_move(listener: Subscriber, **move: object) -> None:
    """Wait until the deployment publishes a notice about a change of its state with these
    fields."""
    eventually(lambda: move.items() <= move_in(listener.get(PATIENCE_S)).items())


def move_in(notice: Notice | None) -> Any:
    """Return the fields of a notice about a new state of the whole deployment; {} for other
    notices."""
    return json.loads(notice.payload) if notice and notice.key == "deployment" else {}


def test_a_deployment_is_degraded_by_a_shard_that_is(daemon: StartDaemon) -> None:
    demo = daemon("demo", "--shards", "2", "--capacity", "10")
    with Client("demo", namespace=one_in(demo, 1)) as timers:
        timers.add_many([(f"k{i}", FAR) for i in range(9)])
        eventually(
            lambda: (
                deployment_status()["degraded_by"]
                == ["demo-1-1: nearly all timer slots are in use"]
            )
        )
        for i in range(9):
            timers.cancel(f"k{i}")
        eventually(lambda: deployment_status()["condition"] == "ready")


def test_a_deployment_that_hangs_or_was_killed_is_distinguished_from_its_shards(
    demo: Daemon,
) -> None:
    os.kill(demo.pid, signal.SIGSTOP)
    eventually(lambda: "demo: frozen" in cli(*PATIENT).stdout)
    assert states(demo) == ["ready", "ready"]
    assert cli(*PATIENT).exit_code == Exit.NEGATIVE
    demo.kill()
    eventually(lambda: deployment_status()["condition"] == "killed")
    (demo.dir / "demo.status").unlink()  # a supervisor of an earlier version writes no status file
    names = [json.loads(line)["name"] for line in cli("status", "--json").stdout.splitlines()]
    assert names == table(demo).daemons


def test_a_user_who_may_not_look_finds_no_deployment(demo: Daemon) -> None:
    assert run_as(STRANGER, lambda: directory_of("demo")) is None
    assert directory_of("demo") == demo.dir


@pytest.mark.parametrize("command", ["status", "stats"])
def test_a_user_who_is_not_of_the_group_is_refused(command: str, demo: Daemon) -> None:
    demo.dir.chmod(0o755)
    done = run_as(STRANGER, lambda: (cli(command).exit_code, cli(command).stderr))
    file = demo.dir / ("demo.status" if command == "status" else "demo.shards")
    assert done[0] == Exit.REFUSED
    assert done[1].startswith(f"purgatoryd: {file} cannot be read by this user")


def test_a_reload_has_ended_when_all_shards_have_read_their_settings(
    daemon: StartDaemon, daemon_dir: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "demo.toml"
    settings.write_text("quota-timers = 5\n")
    manager = Manager(str(daemon_dir / "notify"))
    demo = daemon(
        "demo", "--shards", "2", *SMALL, "--config", str(settings),
        env={"NOTIFY_SOCKET": manager.address},
    )  # fmt: skip
    manager.hears("READY=1")
    settings.write_text("quota-timers = 7\n")
    held = pid_of(demo, 1)
    os.kill(held, signal.SIGSTOP)
    os.kill(demo.pid, signal.SIGHUP)
    manager.hears("RELOADING=1")
    eventually(lambda: quota(demo, 0) == 7)
    with Admin("demo") as admin:
        admin.ping()
        admin.ping()
    manager.socket.settimeout(0)
    with pytest.raises(BlockingIOError):  # the stopped shard has not reloaded yet
        manager.hears("READY=1")
    assert quota(demo, 1) == 5
    manager.socket.settimeout(30)
    os.kill(held, signal.SIGCONT)
    manager.hears("READY=1")
    assert [quota(demo, shard) for shard in (0, 1)] == [7, 7]
    manager.socket.close()


def quota(demo: Daemon, shard: int) -> int:
    reader = Reader.attach(paths_in(demo.dir, table(demo).daemon(shard)))
    try:
        return int(reader.header.quota_timers)
    finally:
        reader.close()


def answers(timers: Client, key: str) -> bool:
    try:
        return timers.get(key) is None
    except DaemonError:
        return False


def test_shards_end_with_the_process_that_runs_them(demo: Daemon) -> None:
    with Client("demo", namespace="shop") as timers:
        timers.add("k", FAR)
    children = psutil.Process(demo.pid).children()
    assert len(children) == 2
    demo.kill()
    demo.start()  # the old shards may not have ended yet
    with Client("demo", namespace="shop") as timers:
        assert timers.get("k") is not None


def test_a_shard_that_cannot_start_ends_them_all(daemon: StartDaemon, daemon_dir: Path) -> None:
    with (daemon_dir / "demo-1-1.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DaemonFailed) as caught:
            daemon("demo", "--shards", "2", *SMALL)
    assert caught.value.code == Exit.UNUSABLE
    assert "shard demo-1-1 ended with code 7 before it was ready" in caught.value.stderr
    # succeeds, because the failed deployment has released all its resources
    demo = daemon("demo", "--shards", "2", *SMALL)
    demo.stop()
    spoil(paths_in(daemon_dir, "demo-1-1"))
    with pytest.raises(DaemonFailed) as caught:
        demo.start()
    assert caught.value.code == Exit.BROKEN


# ---- stop ---------------------------------------------------------------------------------------


def test_stop_drain_and_resume_are_for_all(demo: Daemon) -> None:
    names = [one_in(demo, 0), one_in(demo, 1)]
    clients = [Client("demo", namespace=name) for name in names]
    clients[0].add("k", FAR)
    with Admin("demo") as admin:
        admin.stop(drain=True)
        eventually(lambda: states(demo) == ["draining", "stopped"])
        admin.resume()
        eventually(lambda: states(demo) == ["ready", "ready"])
        for client in clients:
            eventually(partial(arms, client))
    for client in clients:
        client.cancel("k")
        client.cancel("again")
        client.close()
    with Subscriber("demo", namespace=EVENTS_NAMESPACE, topics=[EVENTS_TOPIC]) as listener:
        done = cli("stop", "--drain", "--json")
        hears_move(listener, state="draining")
    assert done.exit_code == Exit.DONE, done.output
    assert json.loads(done.stdout)["armed"] == 0
    assert demo.process.wait(30) == 0
    assert cli("status").exit_code == Exit.NO_DAEMON


def test_shards_are_stopped_by_the_name_of_their_deployment_alone(demo: Daemon) -> None:
    for words in (["stop", "--name", "demo-1-0"], ["stop", "--name", "demo", "--export", "file"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == Exit.USAGE, done.output
    assert states(demo) == ["ready", "ready"]
    done = cli("stop", "--json")
    assert json.loads(done.stdout)["pid"] == demo.pid
    assert demo.process.wait(30) == 0


def states(demo: Daemon) -> list[str]:
    _, *lines = cli("status", "--json").stdout.splitlines()
    return [json.loads(line)["condition"] for line in lines]


def arms(client: Client) -> bool:
    try:
        client.add("again", FAR, mode="keep")
    except PurgatorydError:
        return False
    return True


def test_a_start_that_would_leave_timers_behind_is_refused(
    daemon: StartDaemon, demo: Daemon
) -> None:
    demo.stop()
    assert "demo is a deployment" in refused(lambda: daemon("demo", *SMALL))
    file = ("--shards", "2", "--import", "file")
    assert "import without shards" in refused(lambda: daemon("demo", *file, *SMALL))


@pytest.mark.tier("test")
def test_clients_live_through_another_number_of_shards(clicks: Daemon) -> None:
    keys = [f"k{i}" for i in range(40)]
    names = [one_in(clicks, 0), one_in(clicks, 1)]
    with ExitStack() as stack:
        timers = [stack.enter_context(Client("demo", namespace=name)) for name in names]
        owners = [stack.enter_context(Purgatory("demo", namespace=name)) for name in names]
        received = [stack.enter_context(Subscriber("demo", namespace=name)) for name in names]
        many = stack.enter_context(Client("demo", namespace="clicks"))
        all_received = stack.enter_context(Subscriber("demo", namespace="clicks"))
        assert many.add_many([(key, FAR) for key in keys]).ok
        waits = [owner.watch("op", AllOf({"k": 1}), timeout=FAR) for owner in owners]
        for one in timers:
            one.add("kept", FAR)
        clicks.restart("--shards", "3", *SMALL)
        for one, owner, wait, notices in zip(timers, owners, waits, received, strict=True):
            assert one.get("kept", timeout=30) is not None
            one.add("soon", delay=0, timeout=30)
            assert next_of(notices).key == "soon"
            assert owner.advance("k", 1) == 1
            assert wait.result(timeout=30).cause == "satisfied"
        assert all(many.get(key, timeout=30) is not None for key in keys)
        many.add("new", delay=0, timeout=30)
        assert next_of(all_received).key == "new"


def test_another_number_of_shards_sends_nothing_twice(
    clicks: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "CHECK_S", 0.05)
    received: list[Notice] = []
    with (
        Client("demo", namespace="clicks", timeout=30) as many,
        Subscriber("demo", namespace="clicks") as notices,
    ):
        ends = hear(many, notices, received, "before")
        assert ends == []
        clicks.restart("--shards", "3", *SMALL)
        ends = hear(many, notices, received, "after") + hear(many, notices, received, "last")
    assert len(received) == len({notice.ticket for notice in received}) == 120
    assert [(end.topic, end.last_lost) for end in ends] == [("default", 0)] * 2


def hear(many: Client, notices: Subscriber, received: list[Notice], word: str) -> list[Lagged]:
    """Let 40 timers fire and receive their notices; return the losses reported in between."""
    missing = {f"{word}{i}" for i in range(40)}
    assert many.add_many([(key, 0.0) for key in missing]).ok
    lost = []
    while missing:
        try:
            notice = notices.get(timeout=30)
        except Lagged as reported:
            lost.append(reported)
            continue
        assert notice is not None
        received.append(notice)
        missing.discard(str(notice.key))
    return lost


def next_of(notices: Subscriber) -> Notice:
    """Return the next notice, ignoring reported losses."""
    while True:
        with suppress(Lagged):
            notice = notices.get(timeout=30)
            assert notice is not None
            return notice
