"""The WAL with real daemons: reboots, full disks, and refusals.

To simulate a reboot, a test kills the daemon and removes its arena files in /dev/shm.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fault_driver import Fault, build_library
from machine import needs
from real_daemon import (
    PATIENCE_S,
    Daemon,
    DaemonFailed,
    StartDaemon,
    boot_ns,
    eventually,
    refused,
    remove_arena_files,
    sent,
    stats,
)
from tiers import sample, wide

from purgatoryd.cli.exits import Exit
from purgatoryd.cli.wal import file_records, walks
from purgatoryd.clients import (
    Admin,
    AllOf,
    AsyncClient,
    CancelResult,
    Client,
    Consumer,
    DaemonError,
    Lagged,
    MessageRefused,
    NotDurable,
    Notice,
    NoWal,
    Purgatory,
    PurgatorydError,
    QuotaExceeded,
    SessionExpired,
    Subscriber,
    TimerInfo,
    WalStopped,
)
from purgatoryd.daemon.retention import needed_lsn
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import BadPath
from purgatoryd.shm_layout.paths import paths_in
from purgatoryd.shm_layout.shards import ShardTable, write_table
from purgatoryd.shm_layout.wal import (
    Frame,
    Walk,
    around,
    contents,
    following_lsn,
    header_of,
    segments,
    snapshots,
    uuid_of,
)

pytestmark = pytest.mark.tier("all")

HOUR_S = 3600.0
HEAD_BYTES = 4096
SMALL = ("--wal-segment-bytes", "256K", "--wal-buffer-bytes", "4M")


@pytest.fixture
def wal(daemon_dir: Path) -> Path:
    return daemon_dir / "wal"


def wal_flags(wal: Path, *args: str) -> tuple[str, ...]:
    return ("--wal-dir", str(wal), *SMALL, *args)


def reboot(daemon: Daemon) -> None:
    """Kill the daemon and remove its arena, as a power cut does."""
    daemon.kill()
    remove_arena_files(daemon.paths)


def durable(namespace: str = "shop") -> Client:
    return Client("demo", namespace=namespace, timeout=PATIENCE_S, durable=True)


def listen(namespace: str = "shop") -> Subscriber:
    return Subscriber("demo", namespace=namespace, timeout=PATIENCE_S)


def collect(subscriber: Subscriber, tickets: set[int]) -> dict[int, Notice]:
    """Collect notices until each of these tickets has arrived; ignore other tickets."""
    found: dict[int, Notice] = {}
    while missing := tickets - found.keys():
        with contextlib.suppress(Lagged):  # a new stream begins after a reboot
            notice = subscriber.get(PATIENCE_S)
            assert notice is not None, f"{len(missing)} of {len(tickets)} notices did not arrive"
            if notice.ticket in tickets:
                found[notice.ticket] = notice
    return found


def records(daemon: Daemon, wal: Path) -> list[Frame]:
    """Return all records in the segments on disk, except answers."""
    found, walk = [], Walk()
    for file in segments(wal / daemon.name):
        if uuid_of(file.path) != walk.uuid:
            walk = Walk()
        walk.enter(file.path)
        found += [frame for frame in walk.frames() if frame.kind != "replied"]
        walk.check()
    return found


def command(daemon: Daemon, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "purgatoryd.cli", *args], env=daemon.env, text=True,
        capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


# ---- durable ---------------------------------------------------------------------------------


def test_without_a_wal_a_durable_call_is_refused(daemon: StartDaemon) -> None:
    real = daemon()
    with durable() as client, pytest.raises(NoWal, match="--wal-dir"):
        client.add("a", delay=HOUR_S)
    assert stats(real)["adds"] == 0


@pytest.mark.tier("test")
def test_answered_calls_are_on_disk(daemon: StartDaemon, wal: Path) -> None:
    """The payloads are large: if a call did not wait for the disk, its answer would come long
    before its record is on disk."""
    real = daemon("demo", *wal_flags(wal, "--snapshot-segments", "1000"))
    reader = Reader.attach(real.paths)
    with durable() as client:
        for i in range(20):
            payload = bytes((i,)) * 60_000
            timer = client.add(f"k{i}", delay=HOUR_S, payload=payload)
            committed_lsn = int(reader.wal_buffer.committed_lsn)
            newest = records(real, wal)[-1]
            assert (newest.kind, newest.fields["ticket"]) == ("arm", timer.ticket)
            assert contents(newest) == (None, f"k{i}", payload)
            assert newest.lsn <= committed_lsn
        assert client.cancel("k3") is CancelResult.CANCELLED
        assert records(real, wal)[-1].kind == "end"


def test_a_durable_namespace_needs_no_flag_of_its_clients(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal, "--durable-namespace", "shop"))
    with Client("demo", namespace="shop") as client:
        for i in range(20):
            timer = client.add(f"k{i}", delay=HOUR_S)
            assert records(real, wal)[-1].fields["ticket"] == timer.ticket


def start_on_fragile_disk(daemon: StartDaemon, wal: Path, folder: Path) -> Path:
    """Start a daemon. The next sync of its WAL fails once the returned file exists."""
    needs("cc", "to compile tests/fault/shim.c")
    shim, broken = build_library("shim", folder), folder / "broken"
    fault = Fault("fdatasync", "EIO").environment(shim, 1, broken, folder / "log")
    daemon("demo", *wal_flags(wal), env=fault)
    return broken


def test_a_durable_namespace_answers_no_call_that_the_disk_refused(
    daemon: StartDaemon, wal: Path, tmp_path: Path
) -> None:
    broken = start_on_fragile_disk(daemon, wal, tmp_path)
    with Admin("demo") as admin:
        assert admin.set_namespace("shop", durability=1).durability == 1
    with Client("demo", namespace="shop") as shop, Client("demo", namespace="other") as other:
        shop.add("before", delay=HOUR_S)
        broken.touch()
        with pytest.raises(NotDurable, match=os.strerror(errno.EIO)):
            shop.add("applied", delay=HOUR_S)
        for client in (shop, other):
            with pytest.raises(WalStopped):
                client.add("refused", delay=HOUR_S)
        assert shop.get("before") is not None


def test_a_schedule_that_the_disk_refused_is_applied(
    daemon: StartDaemon, wal: Path, tmp_path: Path
) -> None:
    broken = start_on_fragile_disk(daemon, wal, tmp_path)
    with Client("demo", namespace="shop", durable=True) as shop:
        shop.add("before", delay=HOUR_S)
        broken.touch()
        with pytest.raises(NotDurable, match=os.strerror(errno.EIO)):
            shop.put_schedule("applied", every=3600)
        with pytest.raises(MessageRefused, match="its WAL has stopped"):
            shop.put_schedule("refused", every=3600)
    with Client("demo", namespace="shop", durable=False) as other:
        assert [one.key for one in other.schedules()] == ["applied"]


def test_every_kind_of_client_can_be_durable(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))

    async def add() -> None:
        async with AsyncClient("demo", durable=True) as client:
            ticket = (await client.add("async", delay=HOUR_S)).ticket
            assert records(real, wal)[-1].fields["ticket"] == ticket

    asyncio.run(add())
    with Purgatory("demo", durable=True) as purgatory:
        operation = purgatory.watch("op", AllOf({"watermark": 5}), timeout=HOUR_S)
        assert records(real, wal)[-1].fields["ticket"] == operation.ticket
        purgatory.advance("watermark", 4)
        assert records(real, wal)[-1].fields["watermark"] == 4


# ---- a reboot --------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_a_reboot_loses_nothing_that_was_answered(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    with listen() as subscriber, durable() as client:
        fired = [client.add(f"fired{i}", delay=0, topic="done") for i in range(50)]
        collect(subscriber, {timer.ticket for timer in fired})
        later = {client.add(f"later{i}", delay=4, topic="t").ticket for i in range(200)}
        wall_at = datetime.now(UTC) + timedelta(seconds=4)
        wall = {client.add(f"wall{i}", deadline=wall_at, topic="t").ticket for i in range(50)}
        rows = [(f"far{i}", HOUR_S, "t", b"x" * i) for i in range(500)]
        far = dict(zip((row[0] for row in rows), client.add_many(rows).tickets, strict=True))
        gone = [f"far{i}" for i in range(0, 500, 5)]
        assert set(client.cancel_many(gone)) == {CancelResult.CANCELLED}
        down = client.add_many([(f"down{i}", 1.0, "t", b"") for i in range(200)])
        killed_ns = boot_ns()
        reboot(real)
        eventually(lambda: boot_ns() > max(down.deadlines_boot_ns))
        real.start()
        came = collect(subscriber, later | wall | set(down.tickets))
    late = [came[ticket] for ticket in down.tickets]
    assert all(n.flags & lib.PG_E_LATE for n in late if n.deadline_boot_ns > killed_ns)
    assert all(n.fired_boot_ns >= n.deadline_boot_ns for n in came.values())
    assert all(came[ticket].fired_at >= wall_at for ticket in wall)
    with durable() as client:
        for key, ticket in far.items():
            timer = client.get(key)
            if key in gone:
                assert timer is None
            else:
                assert timer is not None
                assert (timer.ticket, timer.payload) == (ticket, b"x" * int(key[3:]))
        assert client.add("new", delay=HOUR_S).ticket > max(far.values())
        assert client.get("fired0") is None
    reader = Reader.attach(real.paths)
    reader.check()
    reader.close()


def test_a_subscriber_learns_that_the_stream_is_another_one(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    with listen() as subscriber, durable() as client:
        client.add("a", delay=0, topic="t")
        first = subscriber.get(PATIENCE_S)
        assert first is not None
        client.add("b", delay=1, topic="t")
        stream_id = Reader.attach(real.paths).stream_id
        reboot(real)
        real.start()
        assert Reader.attach(real.paths).stream_id != stream_id
        with pytest.raises(Lagged) as caught:
            subscriber.get(PATIENCE_S)
        assert (caught.value.first_lost, caught.value.last_lost) == (first.seq + 1, 0)
        second = subscriber.get(PATIENCE_S)
        assert second is not None
        assert (second.key, second.seq) == ("b", first.seq + 1)


@pytest.mark.tier("test")
def test_watermarks_operations_and_their_notices_are_kept(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    with Purgatory("demo", namespace="shop", durable=True, timeout=PATIENCE_S) as owner:
        owner.advance("replica-1", 7)
        owner.fail("broken", 42)
        ended = owner.watch("ended", AllOf({"replica-1": 5}), timeout=HOUR_S, topic="t")
        assert ended.result(PATIENCE_S).cause == "satisfied"
        waiting = owner.watch("waiting", AllOf({"replica-1": 8, "replica-2": 1}), timeout=HOUR_S,
                              topic="t", payload=b"mine")  # fmt: skip
        failing = owner.watch("later", AllOf({"other": 1}), timeout=HOUR_S, topic="t")
        reboot(real)
        real.start()
        with pytest.raises(SessionExpired):
            waiting.result(PATIENCE_S)
    with listen() as subscriber, Purgatory("demo", namespace="shop", timeout=PATIENCE_S) as other:
        assert other.advance("replica-1", 8) == 0
        assert other.advance("replica-2", 1) == 1
        assert other.fail("other", 9) == 1
        came = collect(subscriber, {waiting.ticket, failing.ticket})
        assert came[waiting.ticket].payload == b"mine"
        assert came[waiting.ticket].cause.name == "SATISFIED"
        verdict = came[failing.ticket].verdict
        assert verdict is not None
        assert (verdict.error, verdict.missing) == (9, (0,))
        again = other.watch("again", AllOf({"broken": 1}), timeout=HOUR_S)
        assert again.result(PATIENCE_S).error == 42


def test_sent_notices_are_not_published_again_after_a_clean_stop(
    daemon: StartDaemon, wal: Path
) -> None:
    real = daemon("demo", *wal_flags(wal))
    with listen() as subscriber, durable() as client:
        tickets = {client.add(f"k{i}", delay=0, topic="t").ticket for i in range(100)}
        collect(subscriber, tickets)
    real.stop()
    published = stats(real)["published"]
    remove_arena_files(real.paths)
    real.start()
    reported = published + 1  # 1: the notice that the daemon is ready
    assert stats(real)["published"] == stats(real)["replay_tail"] == reported


HANDS_NOTHING_OVER = f"""#!{sys.executable}
import runpy, sys
from purgatoryd.daemon import reaper
reaper.Reaper._publish = lambda self: False
del sys.argv[1:3]
runpy.run_module("purgatoryd.cli", run_name="__main__")
"""


def test_notices_that_nobody_received_come_after_a_reboot(daemon: StartDaemon, wal: Path) -> None:
    """The fired timers are on disk, but the daemon is killed before it has sent their notices."""
    real = daemon("demo", *wal_flags(wal))
    real.stop()
    before = of_kind("sent", real, wal)
    script = real.dir / "hands-nothing-over"
    script.write_text(HANDS_NOTHING_OVER)
    script.chmod(0o755)
    real.python = str(script)
    real.start()
    # A subscriber of the arena receives notices without a message.
    with Subscriber("demo", namespace="shop", timeout=PATIENCE_S, transport="zmq") as subscriber:
        with durable() as client:
            tickets = [client.add(f"k{i}", delay=0, topic="t").ticket for i in range(20)]
            eventually(lambda: len(of_kind("fire", real, wal)) == len(tickets))
        assert of_kind("sent", real, wal) == before
        reboot(real)
        real.python = sys.executable
        real.start()
        assert new_stream(subscriber, set(tickets)) == tickets
        with durable() as client:
            last = client.add("last", delay=0, topic="t")
        notice = subscriber.get(PATIENCE_S)
        assert notice is not None
        assert notice.ticket == last.ticket


def of_kind(kind: str, real: Daemon, wal: Path) -> list[Frame]:
    """Return the records of a kind that are on disk."""
    return [frame for frame in records(real, wal) if frame.kind == kind]


def new_stream(subscriber: Subscriber, wanted: set[int]) -> list[int]:
    """Wait for all wanted tickets. Return the tickets of the new stream in order of arrival."""
    tickets: list[int] = []
    while not wanted <= set(tickets):
        try:
            notice = subscriber.get(PATIENCE_S)
            assert notice is not None
            tickets.append(notice.ticket)
        except Lagged:
            tickets.clear()
    return tickets


def test_another_boot_has_another_clock(daemon: StartDaemon, wal: Path) -> None:
    needs("timens", "the daemon's second start is in a time namespace")
    needs("mountns")
    real = daemon("demo", *wal_flags(wal))
    with durable() as client:
        at = datetime.now(UTC) + timedelta(seconds=HOUR_S)
        client.add("delay", delay=HOUR_S)
        client.add("wall", deadline=at)
        early = client.add("early", delay=1, topic="t")
    reboot(real)
    other_id = real.dir / "boot_id"
    other_id.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    script = real.dir / "other-boot"
    mount = f"mount --bind {other_id} /proc/sys/kernel/random/boot_id"
    inner = f'{mount} && exec {sys.executable} "$@"'
    script.write_text(
        f"#!/bin/sh\nexec unshare -m -T --boottime 1000000 sh -c '{inner}' - \"$@\"\n"
    )
    script.chmod(0o755)
    real.python = str(script)
    real.start()
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        delayed, walled = client.get("delay"), client.get("wall")
        assert delayed is not None
        assert walled is not None
        moved_ns = delayed.deadline_boot_ns - boot_ns() - 1_000_000 * 10**9
        assert abs(moved_ns - HOUR_S * 10**9) < PATIENCE_S * 10**9
        assert walled.deadline_at is not None
        assert abs(walled.deadline_at - at) < timedelta(milliseconds=1)
    eventually(lambda: stats(real)["expiries"] == 1)
    reader = Reader.attach(real.paths)
    _, (body,) = reader.replay("shop", "t", 1, 1)
    reader.close()
    assert early.ticket.to_bytes(8, "little") in body


# ---- a ledger under kill -9 ------------------------------------------------------------------


class Ledger:
    """Results that a client knows, and keys of calls whose result it does not know."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.armed: dict[str, int] = {}
        self.cancelled: set[int] = set()
        self.in_doubt: set[str] = set()

    def work(self, client: Client, rounds: int) -> None:
        for _ in range(rounds):
            if self.armed and self.rng.random() < 0.3:
                self._cancel(client, self.rng.choice(list(self.armed)))
            else:
                self._add(client, f"k{self.rng.randrange(10**9)}")

    def _add(self, client: Client, key: str) -> None:
        self.in_doubt.add(key)
        timer = client.add(key, delay=HOUR_S, topic="t", payload=os.urandom(20))
        self.in_doubt.discard(key)
        self.armed[key] = timer.ticket

    def _cancel(self, client: Client, key: str) -> None:
        ticket = self.armed.pop(key)
        self.in_doubt.add(key)
        if client.cancel(key) is CancelResult.CANCELLED:
            self.cancelled.add(ticket)
            self.in_doubt.discard(key)

    def compare(self, client: Client) -> None:
        for key, ticket in self.armed.items():
            timer = client.get(key)
            assert timer is not None, f"{key} was acknowledged, but is lost"
            assert timer.ticket == ticket
        for key in self.in_doubt:
            timer = client.get(key)
            assert timer is None or timer.ticket not in self.cancelled


@pytest.mark.tier("test")
@pytest.mark.parametrize("seed", range(int(os.environ.get("WAL_ROUNDS", "1"))))
def test_nothing_answered_is_lost_by_kills_at_any_time(
    daemon: StartDaemon, wal: Path, seed: int
) -> None:
    real = daemon("demo", *wal_flags(wal, "--snapshot-segments", "1"))
    ledger, rng = Ledger(seed), random.Random(seed)
    for _ in range(4):
        killer = subprocess.Popen(
            ["sh", "-c", f"sleep {rng.uniform(0.1, 0.8):.3f}; kill -9 {real.pid}"]
        )
        with contextlib.suppress(DaemonError), contextlib.ExitStack() as stack:
            client = Client("demo", namespace="shop", timeout=2.0, durable=True)
            # ends the client without a BYE, because the daemon is dead
            stack.callback(client._engine.end)
            ledger.work(client, 10**6)
        assert killer.wait(PATIENCE_S) == 0
        real.kill()
        if rng.random() < 0.5:
            remove_arena_files(real.paths)
        real.start()
        with durable() as client:
            ledger.compare(client)
        reader = Reader.attach(real.paths)
        reader.check()
        reader.close()
    assert len(ledger.armed) > 20


# ---- other sizes, and a WAL for an arena that had none -----------------------------------


def test_other_sizes_start_a_new_wal(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    with durable() as client:
        tickets = {f"k{i}": client.add(f"k{i}", delay=HOUR_S).ticket for i in range(100)}
        for i in range(0, 100, 2):
            client.cancel(f"k{i}")
    first = uuid_of(snapshots(wal / "demo")[-1].path)
    real.restart(*wal_flags(wal, "--capacity", "200", "--topics", "10"))
    (retained,) = snapshots(wal / "demo")
    assert uuid_of(retained.path) != first
    with durable() as client:
        client.add("behind", delay=HOUR_S)
    reboot(real)
    real.start()
    assert stats(real)["capacity"] == 200
    with durable() as client:
        for i in range(100):
            timer = client.get(f"k{i}")
            assert (timer and timer.ticket) == (tickets[f"k{i}"] if i % 2 else None)
        assert client.get("behind") is not None


@pytest.mark.parametrize("capacity", ["500", "300000"])
def test_a_recovery_with_other_sizes(daemon: StartDaemon, wal: Path, capacity: str) -> None:
    real = daemon("demo", *wal_flags(wal, "--capacity", "2000"))
    with durable() as client:
        tickets = [client.add(f"k{i}", delay=HOUR_S).ticket for i in range(300)]
    reboot(real)
    real.start(*wal_flags(wal, "--capacity", capacity))
    assert stats(real)["capacity"] == int(capacity)
    with durable() as client:
        assert [timer.ticket for i in range(300) if (timer := client.get(f"k{i}"))] == tickets


def test_quotas_count_on_after_a_reboot(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal, "--quota-timers", "3"))
    with durable() as client, Admin("demo") as admin:
        admin.set_namespace("small", quota_timers=1)
        for key in ("a", "b"):
            client.add(key, delay=HOUR_S)
    reboot(real)
    real.start()
    with durable() as client, durable("small") as small:
        small.add("c", delay=HOUR_S)
        with pytest.raises(QuotaExceeded, match="3"):
            client.add("d", delay=HOUR_S)
        client.cancel("a")
        with pytest.raises(QuotaExceeded, match="1"):
            small.add("d", delay=HOUR_S)


def test_a_wal_for_an_arena_that_had_none(daemon: StartDaemon, wal: Path) -> None:
    real = daemon()
    with Client("demo", namespace="shop") as client:
        ticket = client.add("a", delay=HOUR_S).ticket
    real.restart(*wal_flags(wal))
    with durable() as client:
        client.add("b", delay=HOUR_S)
    reboot(real)
    real.start()
    with durable() as client:
        timer = client.get("a")
        assert timer is not None
        assert timer.ticket == ticket
        assert client.get("b") is not None


def began_empty(wal: Path) -> bool:
    first = segments(wal / "demo")[0]
    assert first.lsn == 1
    return bool(header_of(first.path).flags & lib.PG_WAL_BEGAN_EMPTY)


@pytest.mark.tier("test")
def test_the_first_segment_says_that_the_arena_was_empty(daemon: StartDaemon, wal: Path) -> None:
    """The first segment says this even after a kill, so an audit can begin with the first
    record."""
    real = daemon("demo", *wal_flags(wal))
    add_durably("a")
    real.kill()
    real.start()
    add_durably("b")
    assert began_empty(wal)


def test_the_first_segment_says_that_the_arena_was_not_empty(
    daemon: StartDaemon, wal: Path
) -> None:
    """The daemon ran without a WAL before, so the WAL has no records of the earlier timers."""
    real = daemon()
    with Client("demo", namespace="shop") as client:
        client.add("a", delay=HOUR_S)
    real.restart(*wal_flags(wal))
    add_durably("b")
    assert not began_empty(wal)


def test_an_arena_with_a_wal_is_not_started_without(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    real.stop()
    said = refused(lambda: real.start("--capacity", "131072"))
    assert "has a WAL: start the daemon with the --wal-dir of its last start" in said
    real.start(*wal_flags(wal))


def test_a_start_with_another_wal_directory_says_so(
    daemon: StartDaemon, wal: Path, daemon_dir: Path
) -> None:
    other = daemon_dir / "other"
    real = daemon("demo", *wal_flags(wal))
    for folder, warned in ((wal, False), (other, True), (other, False)):
        real.restart(*wal_flags(folder))
        said = f"{folder}/demo has no file of this arena: a new WAL begins there"
        assert (said in real.stderr) is warned
        add_durably(f"{folder}{warned}")
    real.stop()
    said = refused(lambda: real.start(*wal_flags(wal)))
    assert "the files end before the last committed frame" in said
    assert "probably wrote the later records to another --wal-dir: start it with that" in said
    assert command(real, "status", "--name", "demo").stdout.startswith(
        "demo: stopped, last loop iteration "
    )
    real.start(*wal_flags(other))


def test_a_lost_wal_is_restarted_from_the_arena(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    with durable() as client:
        client.add("a", delay=HOUR_S)
    real.kill()
    shutil.rmtree(wal)
    real.start()
    with durable() as client:
        client.add("b", delay=HOUR_S)
    reboot(real)
    real.start()
    with durable() as client:
        assert client.get("a") is not None
        assert client.get("b") is not None


def add_durably(*keys: str) -> None:
    with durable() as client:
        for key in keys:
            client.add(key, delay=HOUR_S)


def armed(*keys: str) -> list[bool]:
    with durable() as client:
        return [client.get(key) is not None for key in keys]


def remove(folder: Path, suffix: str) -> None:
    for path in folder.glob(f"*{suffix}"):
        path.unlink()


def test_lost_segments_are_replaced_from_the_arena(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    add_durably("a")
    real.kill()
    remove(wal / "demo", ".wal")
    real.start()
    add_durably("b")
    reported(real, "verify", "--wal-dir", str(wal))
    reboot(real)
    real.start()
    assert armed("a", "b") == [True, True]


def test_a_damaged_old_segment_is_replaced_from_the_arena(daemon: StartDaemon, wal: Path) -> None:
    real, timers = with_segments(daemon, wal)
    real.kill()
    first = segments(wal / "demo")[0]
    flip(first.path, first.bytes // 2)
    real.start()
    add_durably("b")
    eventually(lambda: len(snapshots(wal / "demo")) == 2)
    reboot(real)
    real.start()
    assert all(armed(*(str(timer.key) for timer in timers), "b"))


# ---- refusals --------------------------------------------------------------------------------


def test_segments_that_are_lost_with_the_arena_are_reported(daemon: StartDaemon, wal: Path) -> None:
    real, at = daemon("demo", *wal_flags(wal)), ("--wal-dir", str(wal))
    add_durably("a")
    real.stop()
    remove_arena_files(real.paths)
    before = {file.path: file.path.read_bytes() for file in snapshots(wal / "demo")}
    remove(wal / "demo", ".wal")
    verified = command(real, "wal", "verify", "--name", "demo", *at)
    assert (verified.returncode, "*.wal: none is left" in verified.stderr) == (5, True)
    said = refused(real.start)
    assert "*.wal: none is left" in said
    assert "--force-wal" in said
    assert {file.path: file.path.read_bytes() for file in snapshots(wal / "demo")} == before
    real.start(*wal_flags(wal, "--force-wal"))
    assert armed("a") == [True]


def test_a_start_that_did_not_get_past_its_first_snapshot_is_begun_again(
    daemon: StartDaemon, wal: Path
) -> None:
    real = daemon("demo", *wal_flags(wal))
    reboot(real)
    remove(wal / "demo", ".wal")
    real.start()
    assert armed("a") == [False]
    assert len(snapshots(wal / "demo")) == 1


def test_a_wal_in_memory_is_reported(daemon: StartDaemon, daemon_dir: Path) -> None:
    with tempfile.TemporaryDirectory(dir=shm.MOUNT) as folder:
        real = daemon("demo", *wal_flags(Path(folder)))
        assert "it will not survive a reboot" in real.stderr
        verified = command(real, "wal", "verify", "--name", "demo", "--wal-dir", folder)
        assert (verified.returncode, "not survive" in verified.stderr) == (0, True)
        real.stop()


@pytest.mark.parametrize("way", ["imported", "without a WAL"])
def test_a_snapshot_of_another_arena_is_set_aside(daemon: StartDaemon, wal: Path, way: str) -> None:
    real = daemon("demo", *wal_flags(wal))
    add_durably("a")
    real.stop()
    remove(wal / "demo", ".wal")
    before = [file.path.read_bytes() for file in snapshots(wal / "demo")[1:]]
    remove_arena_files(real.paths)
    if way == "imported":
        real.start(*wal_flags(wal, "--import", str(export(daemon("other")))))
    else:
        real.start("--log-level", "warning")
        real.stop()
        real.start(*wal_flags(wal))
    aside = sorted((wal / "demo").glob("*.snapshot.damaged"))
    assert [path.read_bytes() for path in aside] == before


def test_the_wal_of_another_arena_is_set_aside_by_force(daemon: StartDaemon, wal: Path) -> None:
    one = daemon("one", *wal_flags(wal))
    two = daemon("two", *wal_flags(wal))
    two.stop()
    one.stop()
    shutil.rmtree(wal / "one")
    (wal / "two").rename(wal / "one")
    before = {path.name for path in (wal / "one").glob("*.*")}
    one.start(*wal_flags(wal, "--force-wal"))
    assert {path.stem for path in (wal / "one").glob("*.damaged")} == before


def test_two_daemons_do_not_share_a_wal(daemon: StartDaemon, wal: Path, tmp_path: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    second = refused(lambda: Daemon("demo", tmp_path, wal_flags(wal)))
    assert f"process {real.pid} writes this WAL" in second
    remove_arena_files(real.paths)


def test_the_wal_of_another_arena_is_refused(daemon: StartDaemon, wal: Path) -> None:
    one = daemon("one", *wal_flags(wal))
    two = daemon("two", *wal_flags(wal))
    one.stop()
    two.stop()
    (wal / "one").rename(wal / "other")
    (wal / "two").rename(wal / "one")
    assert "uuid is" in refused(one.start)
    (wal / "one").rename(wal / "two")
    (wal / "other").rename(wal / "one")
    one.start()
    two.start()


def test_a_folder_that_cannot_be_made_is_refused(daemon: StartDaemon, daemon_dir: Path) -> None:
    (daemon_dir / "open" / "demo").mkdir(parents=True)
    (daemon_dir / "open" / "demo").chmod(0o770)
    said = refused(lambda: daemon("demo", *wal_flags(daemon_dir / "open")))
    assert "has mode 0770: other users may write to it" in said
    (daemon_dir / "file").write_text("")
    said = refused(lambda: daemon("demo", *wal_flags(daemon_dir / "file")))
    assert "cannot be used" in said


def test_a_folder_that_others_may_replace_is_refused(daemon: StartDaemon, wal: Path) -> None:
    above = wal / "open"
    above.mkdir(parents=True)
    above.chmod(0o777)
    real = daemon("demo", *wal_flags(wal))
    real.stop()
    assert "other users may replace it" in refused(lambda: real.start(*wal_flags(above)))
    assert not list(above.iterdir())
    above.chmod(0o1777)  # sticky, as /tmp is: only an owner may rename a file
    real.start(*wal_flags(wal))


# ---- damage ----------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes((byte[0] ^ 0xFF,)))


def fill(client: Client, segments_full: int, wal: Path) -> list[TimerInfo]:
    """Add timers until `segments_full` segments are full."""
    timers: list[TimerInfo] = []
    while len(segments(wal)) <= segments_full:
        timers.append(client.add(f"k{len(timers)}", delay=HOUR_S, payload=b"x" * 4000))
    return timers


def with_segments(daemon: StartDaemon, wal: Path) -> tuple[Daemon, list[TimerInfo]]:
    """Return (daemon with two full segments after its last snapshot, timers in these segments)."""
    real = daemon("demo", *wal_flags(wal, "--snapshot-segments", "1000"))
    with durable() as client:
        return real, fill(client, 2, wal / "demo")


def test_a_damaged_snapshot_makes_place_for_the_older(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal, "--snapshot-segments", "1"))
    with durable() as client:
        timers = fill(client, 3, wal / "demo")
        eventually(lambda: len(snapshots(wal / "demo")) == 2)
    reboot(real)
    newest = snapshots(wal / "demo")[-1]
    flip(newest.path, newest.bytes // 2)
    real.start()
    assert "recovering from the older snapshot" in real.stderr
    with durable() as client:
        assert all(client.get(timer.key) is not None for timer in timers)


def flip_uuid(path: Path) -> None:
    flip(path, 16)


def cut_header(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("harm", [flip_uuid, cut_header])
def test_a_segment_without_its_header_is_damage_like_any_other(
    daemon: StartDaemon, wal: Path, harm: Callable[[Path], None]
) -> None:
    real, timers = with_segments(daemon, wal)
    reboot(real)
    harm(segments(wal / "demo")[-1].path)
    assert "--force-wal" in refused(real.start)
    real.start(*wal_flags(wal, "--force-wal"))
    with durable() as client:
        there = [client.get(timer.key) is not None for timer in timers]
    assert 0 < sum(there) < len(timers)
    assert there == sorted(there, reverse=True), "a timer is missing before one that remains"


@pytest.mark.parametrize("harm", [flip_uuid, cut_header])
def test_the_older_snapshot_makes_good_for_one_without_a_header(
    daemon: StartDaemon, wal: Path, harm: Callable[[Path], None]
) -> None:
    real = daemon("demo", *wal_flags(wal))
    with durable() as client:
        client.add("k", delay=HOUR_S)
    real.stop()
    remove_arena_files(real.paths)
    _, newest = snapshots(wal / "demo")
    harm(newest.path)
    real.start()
    assert "recovering from the older snapshot" in real.stderr
    with durable() as client:
        assert client.get("k") is not None


def test_force_is_not_advised_where_it_cannot_help(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    reboot(real)
    (only,) = snapshots(wal / "demo")
    flip(only.path, only.bytes - 8)
    assert "--force-wal" not in refused(real.start)
    refused(lambda: real.start(*wal_flags(wal, "--force-wal")))


def test_a_newest_segment_that_was_made_shorter_is_refused(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    with durable() as client:
        client.add("k", delay=HOUR_S)
    reboot(real)
    (only,) = segments(wal / "demo")
    os.truncate(only.path, only.bytes // 2)
    said = refused(real.start)
    assert "was made shorter" in said
    assert "--force-wal" in said
    verified = command(real, "wal", "verify", "--name", "demo", "--wal-dir", str(wal))
    assert verified.returncode == 5
    real.start(*wal_flags(wal, "--force-wal"))
    with durable() as client:
        assert client.get("k") is not None, "the timer before the cut is missing"


def test_records_that_a_snapshot_confirms_must_exist(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal, "--snapshot-segments", "1"))
    with durable() as client:
        fill(client, 3, wal / "demo")
        eventually(lambda: len(snapshots(wal / "demo")) == 2)
    reboot(real)
    newest = snapshots(wal / "demo")[-1]
    *before, last = [file for file in segments(wal / "demo") if file.lsn <= newest.lsn]
    for file in segments(wal / "demo")[len(before) + 1 :]:
        file.path.unlink()
    with last.path.open("r+b") as damaged:
        damaged.seek(HEAD_BYTES)
        damaged.write(bytes(last.bytes - HEAD_BYTES))
    said = refused(real.start)
    assert "confirmed records are missing" in said
    assert str(last.path) in said


def test_a_newest_segment_that_is_missing_is_reported(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal, "--snapshot-segments", "1000"))
    with durable() as client:
        fill(client, 2, wal / "demo")
    real.stop()
    segments(wal / "demo")[-1].path.unlink()
    verified = command(real, "wal", "verify", "--name", "demo", "--wal-dir", str(wal))
    assert verified.returncode == 5
    assert "confirmed records at the end are missing" in verified.stderr


def test_a_newest_segment_without_its_uuid_is_damage(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    add_durably("a")
    real.kill()
    flip_uuid(segments(wal / "demo")[-1].path)
    assert "header" in refused(real.start)
    real.start(*wal_flags(wal, "--force-wal"))
    assert armed("a") == [True]


def test_a_header_that_is_damaged_is_reported_as_damage(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    reboot(real)
    (only,) = segments(wal / "demo")
    flip(only.path, 40)
    verified = command(real, "wal", "verify", "--name", "demo", "--wal-dir", str(wal))
    assert verified.returncode == 5
    assert "header" in verified.stderr


@pytest.mark.parametrize(("suffix", "detail"), [(".wal", "missing"), (".snapshot", "no snap")])
def test_a_first_file_that_is_missing_is_reported(
    daemon: StartDaemon, wal: Path, suffix: str, detail: str
) -> None:
    real = daemon("demo", *wal_flags(wal, "--snapshot-segments", "1000"))
    with durable() as client:
        fill(client, 2, wal / "demo")
    reboot(real)
    min((wal / "demo").glob(f"*{suffix}")).unlink()
    verified = command(real, "wal", "verify", "--name", "demo", "--wal-dir", str(wal))
    assert verified.returncode == 5
    assert detail in verified.stderr
    refused(real.start)


def test_force_without_a_wal_is_refused(daemon: StartDaemon) -> None:
    said = refused(lambda: daemon("demo", "--force-wal"))
    assert "left out without a WAL" in said


@pytest.mark.tier("test")
def test_damage_is_refused_with_its_place_and_can_be_forced(daemon: StartDaemon, wal: Path) -> None:
    real, timers = with_segments(daemon, wal)
    reboot(real)
    first = segments(wal / "demo")[0]
    flip(first.path, first.bytes // 2)
    said = refused(real.start)
    assert str(first.path) in said
    assert "--force-wal" in said
    verified = command(real, "wal", "verify", "--name", "demo", "--wal-dir", str(wal))
    assert verified.returncode == 5
    real.start(*wal_flags(wal, "--snapshot-segments", "1000", "--force-wal"))
    with durable() as client:
        there = [client.get(timer.key) is not None for timer in timers]
        assert 0 < sum(there) < len(timers)
        assert there == sorted(there, reverse=True), "a timer is missing before one that remains"
        client.add("goes on", delay=HOUR_S)
    reboot(real)
    real.start(*wal_flags(wal))
    with durable() as client:
        assert client.get("goes on") is not None
        assert [client.get(timer.key) is not None for timer in timers] == there


def test_a_forced_start_without_any_header_keeps_deadlines(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    add_durably("a")
    real.stop()
    real.start(*wal_flags(wal))
    reboot(real)
    newest = segments(wal / "demo")[-1]
    flip(newest.path, 82)
    with pytest.raises(DaemonFailed) as caught:
        real.start()
    assert "checksum of a WAL segment's header" in caught.value.stderr
    real.start(*wal_flags(wal, "--force-wal"))
    assert armed("a") == [True]


def with_dead_bytes(daemon: StartDaemon, wal: Path) -> tuple[Daemon, list[TimerInfo]]:
    """Return (killed daemon, timers). The WAL has two snapshots and all segments before them."""
    flags = ("--snapshot-segments", "1", "--payload-memory", "64M")
    real = daemon("demo", *wal_flags(wal, *flags))
    reported(real, "hold", "all", "1", "--wal-dir", str(wal))
    timers: list[TimerInfo] = []
    with durable() as client:
        while min(file.lsn for file in snapshots(wal / "demo")) == 1 or not inside(wal / "demo"):
            timers.append(client.add(f"k{len(timers)}", delay=HOUR_S, payload=b"x" * 4000))
    real.kill()
    assert segments(wal / "demo")[0].lsn == 1
    return real, timers


def inside(folder: Path) -> bool:
    """Return whether the newest snapshot starts after the first group of its segment."""
    newest = snapshots(folder)[-1].lsn
    walk = Walk()
    walk.enter([file.path for file in segments(folder) if file.lsn <= newest][-1])
    ends = [walk.lsn for _ in walk.groups()]
    return bool(ends) and ends[0] < newest


def flip_in_the_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def flip_the_first_group(path: Path) -> None:
    flip(path, HEAD_BYTES + 100)


def oldest_segment(folder: Path) -> Path:
    return segments(folder)[0].path


def segment_of_the_newest_snapshot(folder: Path) -> Path:
    newest = snapshots(folder)[-1]
    _, (file, *_) = around(segments(folder), newest.lsn)
    assert newest.lsn - file.lsn > 1, "the snapshot begins with the segment"
    return file.path


def older_snapshot(folder: Path) -> Path:
    return snapshots(folder)[0].path


DEAD = [
    (oldest_segment, flip_in_the_middle, "lost"),
    (oldest_segment, flip_uuid, "lost"),
    (oldest_segment, cut_header, "lost"),
    (oldest_segment, cut_header, "there"),
    (segment_of_the_newest_snapshot, flip_the_first_group, "lost"),
    (older_snapshot, flip_in_the_middle, "lost"),
    (older_snapshot, cut_header, "there"),
]


@pytest.mark.tier("test")
@pytest.mark.parametrize(("place", "harm", "arena"), sample(DEAD, DEAD[:1]))
def test_damage_before_the_newest_sound_snapshot_costs_nothing(
    daemon: StartDaemon, wal: Path, place: Callable[[Path], Path],
    harm: Callable[[Path], None], arena: str,
) -> None:  # fmt: skip
    real, timers = with_dead_bytes(daemon, wal)
    damaged = place(wal / "demo")
    harm(damaged)
    verified = command(real, "wal", "verify", "--name", "demo", "--wal-dir", str(wal))
    assert verified.returncode == Exit.BROKEN
    assert f"{damaged}:" in verified.stderr
    assert "recovery does not need it" in verified.stderr
    if arena == "lost":
        remove_arena_files(real.paths)
    real.start()
    if arena == "lost" and place is segment_of_the_newest_snapshot:
        assert f"{damaged}:" in real.stderr
        assert "nothing is lost" in real.stderr
    with durable() as client:
        assert all(client.get(timer.key) is not None for timer in timers)
        client.add("goes on", delay=HOUR_S)
    reboot(real)
    real.start()
    with durable() as client:
        assert all(client.get(timer.key) is not None for timer in timers)
        assert client.get("goes on") is not None


def test_damage_before_the_confirmed_end_costs_nothing_with_the_arena(
    daemon: StartDaemon, wal: Path
) -> None:
    real, timers = with_segments(daemon, wal)
    with durable() as client:
        timers += [client.add(f"last-{i}", delay=HOUR_S) for i in range(5)]
    real.kill()
    newest = segments(wal / "demo")[-1]
    flip_the_first_group(newest.path)
    real.start()
    assert f"{newest.path}:" in real.stderr
    assert "the arena has these records" in real.stderr
    reboot(real)
    real.start()
    with durable() as client:
        assert all(client.get(timer.key) is not None for timer in timers)


@pytest.mark.tier("test")
def test_a_cut_end_is_no_damage(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    with durable() as client:
        tickets = [client.add(f"k{i}", delay=HOUR_S).ticket for i in range(50)]
    reboot(real)
    (only,) = segments(wal / "demo")
    walk = Walk()
    walk.enter(only.path)
    ends = [int(walk.struct.at) for _ in walk.groups()]
    with only.path.open("r+b") as file:
        file.seek(ends[-1] - 8)
        file.write(bytes(8))
    real.start()
    with durable() as client:
        there = [timer.ticket for i in range(50) if (timer := client.get(f"k{i}"))]
        assert there == tickets[: len(there)]
        assert len(there) >= 50 - 1024
        client.add("new", delay=HOUR_S)


# ---- retention -------------------------------------------------------------------------------


def reported(real: Daemon, *args: str) -> list[dict[str, object]]:
    """Run a subcommand of `purgatoryd wal`; return its JSON output."""
    done = command(real, "wal", *args, "--name", real.name, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def replace_until(fact: Callable[[], bool]) -> None:
    """Fill segments by replacing one timer repeatedly, until `fact` is True."""
    with durable() as client:

        def replaced() -> bool:
            for _ in range(4):
                client.add("k", delay=HOUR_S, payload=b"x" * 60_000, mode="replace")
            return fact()

        eventually(replaced)


@pytest.mark.tier("test")
def test_old_files_go_and_retention_holds_keep_them(daemon: StartDaemon, wal: Path) -> None:
    at, folder = ("--wal-dir", str(wal)), wal / "demo"
    flags = ("--snapshot-segments", "1", "--payload-memory", "64M")
    real = daemon("demo", *wal_flags(wal, *flags))
    reported(real, "hold", "audit", "1", *at)
    reported(real, "hold", "slow", "1", "--cap", "1M", *at)
    replace_until(lambda: "slow" in real.stderr and len(snapshots(folder)) == 2)
    assert segments(folder)[0].lsn == 1, "the hold `audit` keeps the first segment"
    holds = [(hold["hold"], hold["dropped"]) for hold in reported(real, "holds", *at)]
    assert sorted(holds) == [("audit", False), ("slow", True)]
    reported(real, "release", "audit", *at)
    assert command(real, "wal", "release", "audit", "--name", "demo", *at).returncode == 1
    replace_until(lambda: segments(folder)[0].lsn > 1)
    newest = segments(folder)[-1].lsn
    reported(real, "hold", "late", str(newest), *at)
    late = command(real, "wal", "hold", "late", "1", "--name", "demo", *at)
    assert late.returncode == 2
    assert "the oldest record" in late.stderr
    early = command(real, "wal", "hold", "early", str(2**62), "--name", "demo", *at)
    assert (early.returncode, "the next record" in early.stderr) == (2, True)
    following = following_lsn(segments(folder)[-1])
    reported(real, "hold", "next", str(following), *at)
    reported(real, "release", "next", *at)
    assert reported(real, "holds", *at) == [
        {"hold": "slow", "lsn": 1, "cap_bytes": 2**20, "dropped": True},
        {"hold": "late", "lsn": newest, "cap_bytes": 0, "dropped": False},
    ]
    eventually(lambda: len(snapshots(folder)) == 2)
    reboot(real)
    real.start()
    with durable() as client:
        assert client.get("k") is not None


@pytest.mark.parametrize(
    ("long", "short"), [(("--retain-age", "1h"), "1s"), (("--retain-bytes", "1024G"), "3M")]
)
def test_files_stay_for_readers_as_long_as_was_set(
    daemon: StartDaemon, wal: Path, long: tuple[str, str], short: str
) -> None:
    folder, settings = wal / "demo", wal_flags(wal, "--snapshot-segments", "1")
    real = daemon("demo", *settings, *long)
    replace_until(lambda: sum(f.lsn < needed_lsn(snapshots(folder)) for f in segments(folder)) > 8)
    assert segments(folder)[0].lsn == 1
    real.restart(*settings, long[0], short)
    replace_until(lambda: segments(folder)[0].lsn > 1)


def test_segments_stay_for_readers_up_to_the_set_size(daemon: StartDaemon, wal: Path) -> None:
    folder = wal / "demo"
    daemon("demo", *wal_flags(wal, "--snapshot-segments", "1", "--retain-bytes", "3M"))
    replace_until(lambda: segments(folder)[0].lsn > 1)
    assert sum(file.bytes for file in segments(folder)) >= 3 * 2**20


# ---- a full disk -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    needs("root", "a small tmpfs is mounted")
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        needs("mountns", "a tmpfs could not be mounted")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def add_until_refused(client: Client) -> tuple[list[TimerInfo], PurgatorydError]:
    """Add timers until a call is refused; return (acknowledged timers, error of that call)."""
    timers: list[TimerInfo] = []
    try:
        while len(timers) < 1000:
            timers.append(client.add(f"k{len(timers)}", delay=HOUR_S, payload=b"x" * 60_000))
    except PurgatorydError as error:
        return timers, error
    raise AssertionError("no call was refused")


@pytest.mark.tier("test")
def test_a_full_disk_stops_adds_and_not_the_daemon(daemon: StartDaemon, small_disk: Path) -> None:
    real = daemon("demo", *wal_flags(small_disk, "--snapshot-segments", "1000"))
    with listen() as subscriber, durable() as client:
        soon = client.add("soon", delay=3, topic="t")
        acknowledged, error = add_until_refused(client)
        assert isinstance(error, NotDurable | WalStopped)
        assert len(acknowledged) > 10
        with pytest.raises(WalStopped):
            client.add("refused", delay=HOUR_S)
        (health,) = (json.loads(command(real, "stats", "--name", "demo", "--json").stdout),)
        assert (health["wal"], health["wal_error"]) == ("stopped", os.strerror(28))
        assert client.get("k0") is not None
        collect(subscriber, {soon.ticket})
    eventually(lambda: "No space left on device" in real.stderr)
    eventually(lambda: "degraded: the WAL has stopped" in real.stderr)
    reboot(real)
    (small_disk / "demo" / "segment.new").unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,size=32M", str(small_disk)], check=True)
    real.start()
    with durable() as client:
        assert all(client.get(timer.key) is not None for timer in acknowledged)
        client.add("again", delay=HOUR_S)
    real.stop()  # before the test removes the disk


def test_a_disk_that_a_retention_hold_fills_stops_adds_and_keeps_what_is_held(
    daemon: StartDaemon, small_disk: Path
) -> None:
    at, folder = ("--wal-dir", str(small_disk)), small_disk / "demo"
    real = daemon("demo", *wal_flags(small_disk, "--snapshot-segments", "1"))
    reported(real, "hold", "slow", "1", *at)
    with pytest.raises((NotDurable, WalStopped)):
        replace_until(lambda: False)
    assert segments(folder)[0].lsn == 1
    assert [hold["dropped"] for hold in reported(real, "holds", *at)] == [False]
    real.kill()
    reported(real, "release", "slow", *at)
    subprocess.run(["mount", "-o", "remount,size=256M", str(small_disk)], check=True)
    real.start()
    replace_until(lambda: segments(folder)[0].lsn > 1)
    real.stop()


def test_a_restart_writes_records_that_the_full_disk_refused(
    daemon: StartDaemon, small_disk: Path
) -> None:
    real = daemon("demo", *wal_flags(small_disk, "--snapshot-segments", "1000"))
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        applied, error = add_until_refused(client)
    assert isinstance(error, WalStopped)
    real.kill()
    assert "No space left on device" in refused(real.start)
    subprocess.run(["mount", "-o", "remount,size=32M", str(small_disk)], check=True)
    real.start()
    reboot(real)
    real.start()
    with durable() as client:
        assert all(client.get(timer.key) is not None for timer in applied)
    real.stop()


def iterations_in_a_heartbeat(real: Daemon) -> int:
    """Return the number of loop iterations from one heartbeat to the next."""
    before = stats(real)
    eventually(lambda: stats(real)["heartbeat_boot_ns"] > before["heartbeat_boot_ns"])
    return int(stats(real)["loop_iterations"] - before["loop_iterations"])


def test_due_timers_wait_for_the_disk_while_the_loop_sleeps(
    daemon: StartDaemon, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,size=32M", str(small_disk)], check=True)
    real = daemon("demo", *wal_flags(small_disk, "--snapshot-segments", "1000"))
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        # The records of these notices exceed the WAL buffer.
        client.add_many([(f"due{i}", 15, "t") for i in range(60_000)])
        with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as filler:
            while True:
                filler.write(bytes(4096))
        add_until_refused(client)
        eventually(lambda: stats(real)["live"] < 60_000)
        eventually(
            lambda: stats(real)["wal_buffer_used_bytes"] > 0.9 * stats(real)["wal_buffer_bytes"]
        )
        # A loop that does not sleep has thousands of iterations per heartbeat.
        eventually(lambda: iterations_in_a_heartbeat(real) < 100)
        assert stats(real)["live"] > 0
    real.kill()
    (small_disk / "filler").unlink()
    real.start()
    eventually(lambda: sent(real, "shop") == 60_000)
    real.stop()


# ---- export and import -----------------------------------------------------------------------


def export(real: Daemon) -> Path:
    """Export a daemon's state, which stops the daemon; return the path of the export."""
    file = real.dir / f"{real.name}.export"
    stopped = command(real, "stop", "--name", real.name, "--export", str(file))
    assert stopped.returncode == 0, stopped.stderr
    assert real.process.wait(PATIENCE_S) == 0
    return file


@pytest.mark.tier("test")
@pytest.mark.parametrize("with_wal", [wide(False), True])
def test_an_export_begins_another_daemon(daemon: StartDaemon, wal: Path, with_wal: bool) -> None:
    real = daemon("demo", *(wal_flags(wal) if with_wal else ()))
    with Purgatory("demo", namespace="shop", timeout=PATIENCE_S) as owner:
        timers = {f"k{i}": owner.add(f"k{i}", delay=HOUR_S, topic=f"t{i % 7}", payload=b"x" * i)
                  for i in range(300)}  # fmt: skip
        owner.advance("replica", 3)
        operation = owner.watch("op", AllOf({"replica": 4}), timeout=HOUR_S, topic="t0")
    file = export(real)
    other = daemon(
        "other", "--import", str(file), "--capacity", "1000", "--topics", "50",
        *(wal_flags(wal) if with_wal else ()),
    )  # fmt: skip
    with Purgatory("other", namespace="shop", timeout=PATIENCE_S) as client:
        for key, timer in timers.items():
            found = client.get(key)
            assert found is not None
            assert (found.ticket, found.payload, found.topic, found.deadline_boot_ns) == (
                timer.ticket, timer.payload, timer.topic, timer.deadline_boot_ns
            )  # fmt: skip
        with Subscriber("other", namespace="shop") as subscriber:
            assert client.advance("replica", 4) == 1
            assert collect(subscriber, {operation.ticket})
    reader = Reader.attach(other.paths)
    reader.check()
    reader.close()
    other.stop()
    assert "an import needs an empty arena" in refused(lambda: other.start("--import", str(file)))


def test_an_export_is_written_to_a_file_of_its_own(daemon: StartDaemon, daemon_dir: Path) -> None:
    shared, umask = daemon_dir / "shared", os.umask(0)
    try:
        shared.mkdir(0o1777)
        (shared / "demo.export.new").touch(0o666)
        (shared / "demo.export").touch(0o666)
    finally:
        os.umask(umask)
    real = daemon("demo")
    with (shared / "demo.export").open("rb") as opened_before:
        reported = command(real, "stop", "--name", "demo", "--export", str(shared / "demo.export"))
        assert reported.returncode == Exit.DONE
        assert opened_before.read() == b""
    assert (shared / "demo.export").stat().st_mode & 0o777 == 0o600
    assert (shared / "demo.export.new").read_bytes() == b""
    assert len(list(shared.iterdir())) == 2


@pytest.mark.parametrize("how", ["--keep", "--drain"])
@pytest.mark.parametrize("file", ["nowhere/demo.export", "x" * 255], ids=["no folder", "long"])
def test_a_daemon_is_not_stopped_for_an_export_that_cannot_be_written(
    daemon: StartDaemon, daemon_dir: Path, file: str, how: str
) -> None:
    real = daemon("demo")
    path = daemon_dir / file
    with Client("demo") as client:
        client.add("before", delay=HOUR_S)
        reported = command(real, "stop", "--name", "demo", how, "--export", str(path))
        assert (reported.returncode, reported.stdout) == (Exit.UNUSABLE, "")
        assert f"{path} cannot be written" in reported.stderr
        client.add("behind", delay=HOUR_S)
    assert real.running
    assert not path.exists()


def segments_of(real: Daemon) -> dict[str, bytes]:
    """Return the contents of a daemon's arena files by file name."""
    found = shm.MOUNT.glob(f"{real.paths.arena[1:]}*")
    return {path.name: path.read_bytes() for path in found}


@pytest.mark.parametrize("end", [Daemon.stop, Daemon.kill], ids=["stopped", "killed"])
def test_an_import_over_an_arena_in_use_changes_no_byte(
    daemon: StartDaemon, end: Callable[[Daemon], None]
) -> None:
    small = ("--capacity", "100", "--payload-memory", "1M")
    other, real = daemon("other", *small), daemon("demo", *small)
    with Client("other") as client:
        client.add("imported", delay=HOUR_S)
    file = export(other)
    with Purgatory("demo", timeout=PATIENCE_S) as owner:
        owner.add("mine", delay=HOUR_S)
        owner.watch("operation", AllOf({"watermark": 1}), timeout=HOUR_S)
    end(real)
    before = segments_of(real)
    said = refused(lambda: real.start(*small, "--import", str(file)))
    assert "holds 1 timers, 1 operations and 0 notices not sent yet" in said
    assert segments_of(real) == before
    real.start(*small)
    with Purgatory("demo", timeout=PATIENCE_S) as client:
        assert client.cancel("mine") is CancelResult.CANCELLED
        assert client.advance("watermark", 1) == 1
    eventually(lambda: stats(real)["outcomes"] == 0)
    end(real)
    real.start(*small, "--import", str(file))
    with Client("demo") as client:
        assert client.get("imported") is not None


def test_more_durable_namespaces_than_there_are_slots_for_are_refused(
    daemon: StartDaemon, wal: Path
) -> None:
    """The daemon's own namespace has a reserved row, which no other namespace can use."""
    few = wal_flags(wal, "--namespaces", "1", "--durable-namespace", "shop")
    said = refused(lambda: daemon("demo", *few, "--durable-namespace", "bank"))
    assert "namespaces = 1" in said
    assert "the durable namespaces" in said
    daemon("demo", *few)


def test_a_durable_namespace_is_not_imported_without_a_wal(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal, "--durable-namespace", "shop"))
    with Client("demo", namespace="shop") as client:
        client.add("a", delay=HOUR_S)
    begin = ("--import", str(export(real)))
    assert "namespace 'shop' is durable" in refused(lambda: daemon("other", *begin))
    assert not list(shm.MOUNT.glob(f"{paths_in(real.dir, 'other').arena[1:]}*"))
    other = daemon("other", *begin, *wal_flags(wal))
    with Client("other", namespace="shop") as client, Admin("other") as admin:
        ticket = client.add("b", delay=HOUR_S).ticket
        assert records(other, wal)[-1].fields["ticket"] == ticket
        admin.set_namespace("shop", durability=0)
    daemon("third", "--import", str(export(other)))
    with Client("third", namespace="shop") as client:
        assert all(client.get(key) is not None for key in "ab")


def test_an_invalid_export_is_refused(daemon: StartDaemon) -> None:
    real = daemon("demo")
    with Client("demo") as client:
        client.add("a", delay=HOUR_S)
    file = export(real)
    content = file.read_bytes()
    for bad in (b"", b"nothing", content[:4200], content[:-8], content[:-40] + bytes(40)):
        file.write_bytes(bad)
        refused(lambda: daemon("other", "--import", str(file)))
    for at in range(4096, len(content), 97):
        file.write_bytes(content)
        flip(file, at)
        if at % 5 == 0:
            refused(lambda: daemon("other", "--import", str(file)))
    file.write_bytes(content)
    daemon("other", "--import", str(file), "--capacity", "100")


# ---- the command line ------------------------------------------------------------------------


def test_cat_explains_the_jobs_of_consumer_groups(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    tickets = {}
    with durable() as client:
        client.create_group("g", ["orders"], max_backlog=3, full="drop_oldest")
        for key in ("acked", "rejected", "dropped"):
            tickets[key] = client.add(key, 0, topic="orders").ticket
        eventually(lambda: client.group("g").waiting == 3)
        with Consumer("demo", namespace="shop", group="g", create=False) as jobs:
            held = {str(job.key): job for job in jobs.get_many(3, timeout=PATIENCE_S)}
            held["acked"].ack()
            held["rejected"].reject("no such address")
            held["dropped"].release()
        client.add("more", HOUR_S, topic="orders")
        client.add("most", HOUR_S, topic="orders")
    at = ("--wal-dir", str(wal))
    records = reported(real, "cat", "--kind", "job", *at)
    assert all(isinstance(record["lsn"], int) and record["lsn"] > 0 for record in records)
    parts = ("job_state", "cause", "leases", "dead_reason", "error_text")
    found = {
        key: [
            {part: record[part] for part in parts if part in record}
            for record in records
            if record["ticket"] == ticket
        ]
        for key, ticket in tickets.items()
    }
    leased = {"job_state": "leased", "leases": 1}
    assert found["acked"] == [leased, {"job_state": "ended", "cause": "acknowledged"}]
    assert found["rejected"] == [
        leased,
        {
            "job_state": "dead",
            "leases": 1,
            "dead_reason": "rejected",
            "error_text": "no such address",
        },
    ]
    assert found["dropped"][0] == leased
    assert found["dropped"][-1] == {"job_state": "ended", "cause": "dropped"}
    text = command(real, "wal", "cat", "--name", "demo", "--kind", "job", *at).stdout
    ended = next(line for line in text.splitlines() if "cause=acknowledged" in line)
    assert f"ticket={tickets['acked']} " in ended
    assert ended.split()[2] == "acked"
    assert {record["ticket"]: record["key"] for record in records} == {
        ticket: key for key, ticket in tickets.items()
    }
    later = str([r["lsn"] for r in records if r["ticket"] == tickets["acked"]][-1])
    assert reported(real, "cat", "--kind", "job", "--from", later, *at)[0]["key"] == "acked"
    causes = [record["cause"] for record in reported(real, "cat", "--kind", "end", *at)]
    assert set(causes) <= {"cancelled", "acknowledged", "dropped", "skipped", "coalesced"}


def test_the_files_are_listed_printed_and_verified(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal))
    with durable() as client:
        ticket = client.add("order:42", delay=HOUR_S, topic="orders", payload=b"\xff").ticket
        client.cancel("order:42")
    at = ("--wal-dir", str(wal))
    assert [row["kind"] for row in reported(real, "ls", *at)] == ["snapshot", "segment"]
    (arm,) = reported(real, "cat", "--kind", "arm", *at)
    assert (arm["key"], arm["payload_base64"], arm["ticket"]) == ("order:42", "/w==", ticket)
    (end,) = reported(real, "cat", "--from", str(arm["lsn"]), "--kind", "end", *at)
    assert (end["ticket"], end["cause"]) == (ticket, "cancelled")
    assert {row["end"] for row in reported(real, "verify", *at)} == {"sealed", "end"}
    snapshot = str(snapshots(wal / "demo")[-1].path)
    assert reported(real, "cat", snapshot)[0]["kind"] == "head"
    assert command(real, "wal", "cat", "--name", "demo").returncode == Exit.USAGE
    assert "order:42" in command(real, "wal", "cat", "--name", "demo", *at).stdout
    listed = command(real, "wal", "ls", "--name", "demo", *at).stdout
    assert ".snapshot" in listed
    assert "KiB" in listed
    unknown = command(real, "wal", "cat", "--name", "demo", "--kind", "nothing", *at)
    assert unknown.returncode == 2
    assert "one of " in unknown.stderr
    nowhere = command(real, "wal", "ls", "--name", "nobody", *at)
    assert nowhere.returncode == 7
    assert nowhere.stderr.endswith("is not a WAL\n")
    write_table(wal, ShardTable("many", version=1, shard_generation=3, count=2))
    sharded = command(real, "wal", "ls", "--name", "many", *at)
    assert "its shards have a WAL each: many-3-0, many-3-1" in sharded.stderr
    (wal / "empty").mkdir()
    for name in ("empty", "../WAL/demo"):
        bad = command(real, "wal", "verify", "--name", name, *at)
        assert bad.returncode in (Exit.USAGE, Exit.UNUSABLE), name


def test_files_removed_while_they_are_read_are_skipped(daemon: StartDaemon, wal: Path) -> None:
    real = daemon("demo", *wal_flags(wal, "--snapshot-segments", "1000"))
    with durable() as client:
        fill(client, 4, wal / "demo")
    real.stop()
    first, second, third, *_ = paths = [file.path for file in segments(wal / "demo")]
    found, listed = walks(paths), file_records(wal / "demo")
    assert next(found).path == first
    assert next(listed)["kind"] == "snapshot"
    first.unlink()
    second.unlink()
    there = [row["file"] for row in listed if row["kind"] == "segment"]
    assert there == [path.name for path in paths[2:]]
    walk = next(found)
    for _ in walk.groups():
        pass
    walk.check()
    assert walk.path == third
    with pytest.raises(BadPath, match="No such file"):
        list(walks([third, wal / "demo" / f"{2**40:016x}.wal"]))
