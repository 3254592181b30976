"""Latency stages of a timer: the timestamps in the WAL record of its final state."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import purgatory_driver as driver
import pytest
from purgatory_driver import handle
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    boot_ns,
    eventually,
    remove_arena_files,
    wal_frames,
)
from unconnected import connection_of

from purgatoryd.clients import Admin, AllOf, Client, InvalidName, Purgatory, Remote
from purgatoryd.daemon.admin import frame
from purgatoryd.daemon.replies import Replies
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import Message
from purgatoryd.shm_layout.wal import Frame, contents

pytestmark = pytest.mark.tier("check")

HOUR_S = 3600.0
TIMESTAMPS = ["sent_boot_ns", "received_boot_ns", "applied_boot_ns"]


@pytest.fixture
def wal(daemon_dir: Path) -> Path:
    return daemon_dir / "wal"


@pytest.fixture
def real(daemon: StartDaemon, wal: Path) -> Daemon:
    return daemon("demo", "--wal-dir", str(wal), "--wal-segment-bytes", "256K")


def of_kind(wal: Path, kind: str) -> list[Frame]:
    return [frame for frame in wal_frames(wal / "demo") if frame.kind == kind]


def on_disk(wal: Path, kind: str, count: int = 1) -> list[Frame]:
    """Wait until the WAL has at least `count` records of a kind; return them."""
    return eventually(lambda: found if len(found := of_kind(wal, kind)) >= count else [])


def arm_of(wal: Path, ticket: int) -> Frame:
    (arm,) = (f for f in wal_frames(wal / "demo")
              if f.kind in ("arm", "watch") and f.fields["ticket"] == ticket)  # fmt: skip
    return arm


def durable(worker: str | None = None) -> Client:
    return Client("demo", namespace="shop", timeout=PATIENCE_S, durable=True, worker=worker)


def begun(timestamps: dict[str, int]) -> dict[str, int]:
    """Return the timestamps without `done_boot_ns`, which is not known yet when a timer is
    armed."""
    return {name: value for name, value in timestamps.items() if name != "done_boot_ns"}


def check_timestamps(wal: Path, frame: Frame, timestamps: dict[str, int], begun_ns: int) -> None:
    """Check that the timestamps equal those of the record of arming, and that they are in order."""
    arm = arm_of(wal, frame.fields["ticket"])
    assert begun(timestamps) == begun(arm.timestamps)
    assert timestamps["add_lsn"] == arm.lsn
    # duration of the stage "local"
    assert timestamps["done_boot_ns"] > timestamps["applied_boot_ns"]
    ended = [frame.fields["ended_boot_ns"]] if "ended_boot_ns" in frame.fields else []
    steps = [
        begun_ns,
        *(timestamps[name] for name in TIMESTAMPS),
        timestamps["armed_ns"],
        *ended,
        boot_ns(),
    ]
    assert steps == sorted(steps)


# ---- timestamps ------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_the_final_state_of_a_timer_has_its_timestamps(real: Daemon, wal: Path) -> None:
    begun_ns = boot_ns()
    with durable(worker="web-3") as client:
        fired = client.add("fires", delay=0, topic="t")
        cancelled = client.add("cancelled", delay=HOUR_S)
        client.add("replaced", delay=HOUR_S)
        client.cancel("cancelled")
        client.add("replaced", delay=HOUR_S, mode="replace")
    (fire,), (end,) = on_disk(wal, "fire"), of_kind(wal, "end")
    assert (fire.fields["ticket"], end.fields["ticket"]) == (fired.ticket, cancelled.ticket)
    check_timestamps(wal, fire, fire.timestamps, begun_ns)
    check_timestamps(wal, end, end.timestamps, begun_ns)
    assert end.fields["topic"] == arm_of(wal, cancelled.ticket).fields["topic"]
    (replacing,) = (f for f in of_kind(wal, "arm") if f.fields["replaced"])
    assert begun(replacing.replaced) == begun(arm_of(wal, replacing.fields["replaced"]).timestamps)
    assert replacing.replaced["done_boot_ns"] > replacing.replaced["applied_boot_ns"]
    session = end.timestamps["session"]
    for asking, sequence in ((end, 4), (replacing, 5)):
        ended = arm_of(wal, asking.fields.get("replaced", cancelled.ticket))
        assert asking.asked == {"session": session, "sequence": sequence, "bulk_loaded": 0,
                                "deadline_ns": ended.fields["deadline_ns"]}  # fmt: skip
    (opened,) = (
        f for f in of_kind(wal, "opened") if f.fields["session"] == fire.timestamps["session"]
    )
    assert contents(opened).name == "web-3"
    assert (opened.fields["uid"], opened.fields["pid"]) == (os.geteuid(), os.getpid())


@pytest.mark.tier("all")
def test_the_outcome_of_an_operation_has_its_timestamps(real: Daemon, wal: Path) -> None:
    begun_ns = boot_ns()
    with Purgatory("demo", timeout=PATIENCE_S, durable=True, worker="owner") as owner:
        operation = owner.watch("op", AllOf({"replica": 1}), timeout=HOUR_S)
        owner.advance("replica", 1)
        operation.result(PATIENCE_S)
    (outcome,) = on_disk(wal, "outcome")
    check_timestamps(wal, outcome, outcome.timestamps, begun_ns)
    assert outcome.timestamps["session"] == arm_of(wal, outcome.fields["ticket"]).fields["session"]


def killed(real: Daemon) -> None:
    real.kill()


def rebooted(real: Daemon) -> None:
    real.kill()
    remove_arena_files(real.paths)


def resized(real: Daemon) -> None:
    real.stop()
    real.args = (*real.args, "--capacity", "5000")


@pytest.mark.tier("all")
@pytest.mark.parametrize("interrupted", [killed, rebooted, resized])
def test_timestamps_are_known_after_an_interruption(
    interrupted: Callable[[Daemon], None], real: Daemon, wal: Path
) -> None:
    """After the interruption, the timestamps come from the arena, from the WAL, or from a
    snapshot."""
    with durable() as client:
        client.add("k", delay=HOUR_S)
    (arm,) = of_kind(wal, "arm")
    interrupted(real)
    real.start()
    with durable() as client:
        client.cancel("k")
    (end,) = of_kind(wal, "end")
    assert begun(end.timestamps) == begun(arm.timestamps)
    known = end.timestamps["done_boot_ns"] > end.timestamps["applied_boot_ns"]
    # a reboot loses done_boot_ns, which the add's WAL record lacks
    assert known == (interrupted is not rebooted)


@pytest.mark.tier("all")
def test_under_a_virtual_clock_stages_are_of_the_real_one(daemon: StartDaemon, wal: Path) -> None:
    begun_ns = boot_ns()
    daemon("demo", "--wal-dir", str(wal), "--clock", "virtual")
    with durable() as client, Admin("demo", timeout=PATIENCE_S) as admin:
        client.add("k", delay_ns=1000, topic="t")
        admin.advance(10**9)
    (fire,) = on_disk(wal, "fire")
    assert fire.timestamps["armed_ns"] == 0
    steps = [
        begun_ns,
        *(fire.timestamps[name] for name in TIMESTAMPS),
        fire.fields["ended_boot_ns"],
        boot_ns(),
    ]
    assert steps == sorted(steps)


# ---- workers, answers and notices ------------------------------------------------------------


@pytest.mark.tier("all")
def test_a_worker_without_a_name_is_known_by_its_process(real: Daemon, wal: Path) -> None:
    with durable() as client:
        client.add("k", delay=HOUR_S)
    (opened,) = of_kind(wal, "opened")
    assert contents(opened).name == ""
    assert opened.fields["pid"] == os.getpid()


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", ["x" * 64, "a\0b", "\ud800"])
def test_a_worker_has_a_short_name(name: str, real: Daemon) -> None:
    with pytest.raises(InvalidName, match="worker"):
        Client("demo", worker=name)


def test_a_remote_worker_names_its_host() -> None:
    connection = connection_of("demo", "n", remote=object.__new__(Remote))
    frame = connection.session.frame()
    assert frame is not None
    assert frame.endswith(f":{os.getpid()}".encode())
    assert not connection.session.same_clock


@pytest.mark.parametrize(("offset_ns", "same"), [(0, True), (-(10**18), False), (10**18, False)])
def test_a_client_in_another_time_namespace_notices(offset_ns: int, same: bool) -> None:
    connection = connection_of("demo", "n")
    frame = connection.session.frame()
    assert frame is not None
    sequence = wire.FRAME.unpack_from(frame)[4]
    welcome = wire.WELCOME.pack(
        3, 7, bytes(16), 0, 1, 0, 0, 0, 1, 0, 4, 1024, 1 << 23, boot_ns() + offset_ns, 0, 0, 3, 0, 0
    )  # fmt: skip
    connection.take(wire.encode_frame(Message.HELLO, 3, sequence) + welcome)
    assert connection.session.same_clock is same


def answered(wal: Path) -> set[int]:
    """Return the sequences of all answered batches. A repeated batch is answered again."""
    replied = of_kind(wal, "replied")
    return {f.fields["sequence"] + i for f in replied for i in range(f.fields["count"])}


def handed_over(wal: Path) -> dict[int, Frame]:
    """Return, by position of a notice, the record of when the notice was handed to the socket."""
    sent = of_kind(wal, "sent")
    return {at: f for f in sent for at in range(f.fields["from"], f.fields["upto"])}


@pytest.mark.tier("all")
def test_answers_and_notices_say_when_they_were_handed_over(real: Daemon, wal: Path) -> None:
    with durable() as client:
        for i in range(3):
            client.add(f"k{i}", delay=0, topic="t")
    fires = {f.fields["position"]: f for f in on_disk(wal, "fire", 3)}
    eventually(lambda: answered(wal) == {1, 2, 3})
    eventually(lambda: fires.keys() <= handed_over(wal).keys())
    handed = handed_over(wal)
    for position, fire in fires.items():
        sent = handed[position].fields
        ended_ns = fire.fields["ended_boot_ns"]
        assert ended_ns <= sent["built_boot_ns"] <= sent["handed_boot_ns"]
    replied = of_kind(wal, "replied")
    assert replied[0].fields["sequence"] == 1
    applied = {f.timestamps["session"]: f.timestamps["applied_boot_ns"] for f in fires.values()}
    for answer in replied:
        assert answer.fields["session"] in applied
        assert answer.fields["built_boot_ns"] <= answer.fields["handed_boot_ns"]


@pytest.mark.tier("all")
def test_the_last_answers_before_a_client_ends_are_recorded(real: Daemon, wal: Path) -> None:
    """The client ends before the loop has written the record of its last answer."""
    for i in range(20):
        with durable() as client:
            client.add(f"k{i}", delay=HOUR_S)
    eventually(lambda: [f.fields["sequence"] for f in of_kind(wal, "replied")] == [1] * 20)


def test_answers_wait_until_the_wal_has_space_for_their_records() -> None:
    appended: list[tuple[int, int, int]] = []
    arena: Any = SimpleNamespace(
        wal_buffer_full=True,
        replied=lambda session, first, count, *_: appended.append((session, first, count)),
    )
    replies = Replies(arena)
    for session, sequence in ((1, 1), (2, 5), (1, 2), (1, 9)):
        replies.add(frame(Message.BATCH, echo=(session, sequence)), 10, 20)
    replies.append()
    assert (appended, bool(replies)) == ([], True)
    replies.add(frame(Message.BATCH, echo=(1, 10)), 10, 20)
    arena.wal_buffer_full = False
    replies.append()
    assert (appended, bool(replies)) == ([(1, 1, 2), (1, 9, 1), (2, 5, 1), (1, 10, 1)], False)
    replies.add(frame(Message.BATCH, echo=(1, 11)), 10, 20)
    replies.forget()
    assert not replies


# ---- in the core -------------------------------------------------------------------------------


def test_a_batch_that_takes_several_calls_was_begun_in_the_first() -> None:
    """If a later call of the core arms a timer, the timer's stage "local" ends with this later
    call."""
    core = driver.Purgatory(
        wal_buffer_bytes=lib.PG_WAL_BUFFER_MIN,
        capacity=4096,
        watches=4096,
        payload_bytes=1 << 20,
        clock_kind=lib.PG_CLOCK_BOOT,
    )
    owner = driver.Owner(core)
    for first in (0, 1000):
        owner.send(*(driver.watch(b"%d" % i, driver.ALL, [driver.Key(b"w", 1)])
                     for i in range(first, first + 1000)))  # fmt: skip
    message = owner.message([driver.advance(b"w", 1), driver.put(b"last", 10**9)])
    begun_ns = core.now_ns + 10
    state, now_ns = handle(core, message, begun_ns), begun_ns
    while state == lib.PG_H_AGAIN:
        now_ns += 1000
        state = handle(core, message, now_ns, received_ns=begun_ns)
    assert now_ns > begun_ns, "the batch must exceed the work of one call"
    rows = core.rows(lib.PG_R_TIMESTAMPS, "pg_timestamps")
    (timestamps,) = (rows[i] for i in range(core.header.capacity) if rows[i].armed_ns == now_ns)
    assert (timestamps.received_boot_ns, timestamps.applied_boot_ns) == (begun_ns, begun_ns)
    assert timestamps.session == owner.id
    assert timestamps.done_boot_ns == 0
    lib.pg_served(core.a, now_ns + 70)
    assert timestamps.done_boot_ns - timestamps.applied_boot_ns == now_ns + 70 - begun_ns


def test_answers_that_follow_one_another_share_a_record() -> None:
    noted: list[tuple[int, ...]] = []
    arena: Any = SimpleNamespace(wal_buffer_full=False, replied=lambda *row: noted.append(row))
    replies = Replies(arena)
    for session, sequence in ((1, 1), (1, 2), (2, 1), (1, 3), (1, 5)):
        reply = wire.encode_frame(Message.BATCH, session, sequence)
        replies.add(reply, 10 * sequence, 10 * sequence + 1)
    replies.append()
    assert sorted(noted) == [(1, 1, 3, 10, 31), (1, 5, 1, 50, 51), (2, 1, 1, 10, 11)]
    assert not replies
