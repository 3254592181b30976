"""Notices that the replay buffer has dropped: REPLAY, its process, and the files of the WAL."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, stats
from remote_place import remote_place

from purgatoryd.clients import Admin, AllOf, Client, Consumer, Notice, Purgatory, Subscriber
from purgatoryd.clients.notices import Run
from purgatoryd.clients.past import Past
from purgatoryd.daemon.snapshot import NICENESS, SLICE_NS
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.layout import CursorRefusal, Message, WireError
from purgatoryd.shm_layout.wire import PastPage, PastRange

pytestmark = pytest.mark.tier("all")

SMALL = ("--replay-buffer", "16", "--wal-segment-bytes", "256K", "--retain-age", "1h")
EVERY = 2**64 - 1


def fire(count: int, topic: str = "t", *, first: int = 0, delay: float = 0.0) -> None:
    with Client("demo", timeout=PATIENCE_S) as client:
        rows = [(f"{topic}{n}", delay, topic, b"%d" % n) for n in range(first, first + count)]
        client.add_many(rows)


def asked(topic: str, first: int = 1, last: int = EVERY, **about: Any) -> PastRange:
    return PastRange("default", topic, 0, 0, first, last)._replace(**about)


def page(past: Past, wanted: PastRange) -> PastPage:
    return eventually(lambda: past.page(wanted))  # type: ignore[return-value]


def read(past: Past, topic: str, count: int) -> list[Notice]:
    """Return the first `count` notices of a topic, page by page. None may be lost."""
    found: list[Notice] = []
    while len(found) < count:
        first = len(found) + 1
        one = page(past, asked(topic, first))
        assert one.lost_until == first - 1
        head = wire.decode_notice_head(one.body)
        found += Run("default", topic, head, one.body, None).notices(first, first + head.records)
        assert one.next == len(found) + 1
    return found


def of(daemon: Daemon) -> Past:
    return Past(lambda: daemon.paths)


def plain(notices: list[Notice]) -> list[Notice]:
    """Return notices without the fields that depend on the reader."""
    return [replace(n, received_boot_ns=None, wall_offset_ns=0) for n in notices]


def check_past(running: Daemon, live: dict[str, list[Notice]]) -> None:
    """Let the replay buffer lose the received notices of each topic. Check that the same ones come
    from the WAL."""
    fire(1200, "filler")
    with closing(of(running)) as past:
        for topic, received in live.items():
            assert plain(read(past, topic, len(received))) == plain(received)


@pytest.mark.tier("test")
def test_notices_from_the_wal_are_the_ones_that_subscribers_received(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    """Timers, extended and parked timers, operations with verdicts, and published notices."""
    running = daemon("demo", *SMALL[2:], "--replay-buffer", "512", "--wal-dir", str(tmp_path))
    live: dict[str, list[Notice]] = {"t": [], "ops": [], "said": []}
    with Subscriber("demo", timeout=PATIENCE_S, topics=[*live]) as source:
        with Admin("demo", timeout=PATIENCE_S) as admin, Client("demo") as client:
            admin.publish("said", "a", b"published")
            client.add("slow", 0.3, topic="t", payload=b"x" * 3000)
            client.add("moved", 0.05, topic="t", payload=b"moved")
            client.add("moved", 0.2, topic="t", mode="extend")
            client.add("replaced", 0.05, topic="t", payload=b"old")
            client.add("replaced", 0.1, topic="t", payload=b"new", mode="replace")
        with Purgatory("demo", timeout=PATIENCE_S) as owner:
            done = owner.watch("op", AllOf({"w": 3}), 60, payload=b"satisfied", topic="ops")
            late = owner.watch("late", AllOf({"w": 9, "v": 2}), 0.1, payload=b"late", topic="ops")
            owner.advance("w", 3)
            assert done.result(PATIENCE_S)
            assert late.result(PATIENCE_S)
        fire(200)
        while sum(map(len, live.values())) < 1 + 3 + 2 + 200:
            for notice in source.get_many(timeout=PATIENCE_S) or ():
                live[notice.topic].append(notice)
    check_past(running, live)


@pytest.mark.tier("test")
def test_tagged_and_coalesced_timers_occurrences_and_jobs_come_from_the_wal(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    """The WAL records of these notices have items before the key, or jobs after the notice."""
    running = daemon("demo", *SMALL[2:], "--replay-buffer", "512", "--wal-dir", str(tmp_path))
    live: dict[str, list[Notice]] = {"jobs": [], "late": []}
    with (
        Subscriber("demo", timeout=PATIENCE_S, topics=[*live]) as source,
        Admin("demo", timeout=PATIENCE_S) as admin,
        Purgatory("demo", timeout=PATIENCE_S) as owner,
        Consumer("demo", group="g", topics=["jobs"], timeout=PATIENCE_S),
        Consumer("demo", group="h", topics=["jobs"], timeout=PATIENCE_S),
    ):
        owner.add("tagged", 0.05, topic="jobs", payload=b"tagged", tag="blue")
        owner.put_schedule("tick", every=0.1, topic="jobs", payload=b"tick", count=2)
        done = owner.watch("op", AllOf({"w": 3}), 60, payload=b"satisfied", topic="jobs")
        owner.advance("w", 3)
        assert done.result(PATIENCE_S)
        admin.publish("jobs", "a", b"published")
        admin.set_topic("late", paused=True)
        for n in range(4):
            owner.add(f"late{n}", 0.001 * n, topic="late", payload=b"%d" % n, tag="red")
        eventually(lambda: stats(running)["backlog"] == 4)
        time.sleep(0.01)  # all timers are later than a grace of 1 ms
        admin.set_topic("late", paused=False, late=("coalesce", 0.001))
        while sum(map(len, live.values())) < 5 + 1:
            for notice in source.get_many(timeout=PATIENCE_S) or ():
                live[notice.topic].append(notice)
    assert [notice.missed for notice in live["late"]] == [3]
    check_past(running, live)


@pytest.mark.tier("test")
def test_pages_reach_over_many_segments_and_are_bounded(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    running = daemon("demo", *SMALL, "--wal-dir", str(tmp_path))
    for first in range(0, 20_000, 5000):
        fire(5000, first=first)
    with closing(of(running)) as past:
        one = page(past, asked("t"))
        assert wire.decode_notice_head(one.body).records <= 8192
        found = read(past, "t", 20_000)
    assert sorted(int(n.payload) for n in found) == [*range(20_000)]
    assert len([*tmp_path.glob("demo/*.wal")]) > 5


def test_a_timer_that_was_armed_before_the_oldest_segment_is_found(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    """Only a snapshot has the arming of the timer."""
    options = ("--replay-buffer", "16", "--wal-segment-bytes", "256K", "--snapshot-segments", "1")
    running = daemon("demo", *options, "--wal-dir", str(tmp_path))
    fire(1, "long", delay=4.0)
    oldest = min(tmp_path.glob("demo/*.wal"))
    first = 0
    while oldest.exists():
        fire(3000, "filler", first=first)
        first += 3000
    with closing(of(running)) as past:
        eventually(lambda: page(past, asked("long")).next == 2, 30.0)
        fire(40, "filler", first=first)
        (found,) = read(past, "long", 1)
    assert (found.key, found.payload) == ("long0", b"0")


def test_notices_without_a_wal_come_from_the_replay_buffer(daemon: StartDaemon) -> None:
    running = daemon("demo", "--replay-buffer", "16")
    fire(100)
    with closing(of(running)) as past:
        one = page(past, asked("t", last=50))
        assert (one.lost_until, one.next) == (50, 51)
        assert wire.decode_notice_head(one.body).records == 0
        one = page(past, asked("t"))
        assert one.lost_until >= 80
        rest = page(past, asked("t", one.next))
        assert wire.decode_notice_head(rest.body).first == one.next
        assert rest.next == 101
        assert page(past, asked("t", 101))[:2] == (100, 101)
        assert page(past, asked("unknown"))[:2] == (0, 1)


def test_the_process_ends_with_the_daemon_and_is_started_again(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    running = daemon("demo", *SMALL, "--wal-dir", str(tmp_path))
    fire(100)
    with closing(of(running)) as past:
        read(past, "t", 100)
        os.kill(server(running), signal.SIGKILL)
        read(past, "t", 100)
        running.paths.back.unlink()
        os.kill(server(running), signal.SIGKILL)
        read(past, "t", 100)
        last = server(running)
        running.kill()
        eventually(lambda: not Path(f"/proc/{last}").exists())
        running.start()
        read(past, "t", 100)
    running.stop()
    assert not running.paths.back.exists()


def server(daemon: Daemon) -> int:
    """Return the pid of the process for past notices."""
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    served = [c for c in children if "replay_server" in Path(f"/proc/{c}/cmdline").read_text()]
    return int(served[0])


def slice_ns(thread: int) -> int:
    """Return the time slice of a thread; 0 = the kernel does not report it."""
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    attr = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(number, thread, attr, 48, 0) == 0
    return int.from_bytes(attr.raw[24:32], sys.byteorder)


def test_the_process_for_past_notices_gives_way_soon(daemon: StartDaemon) -> None:
    running = daemon()
    fire(3)
    with closing(of(running)) as past:
        read(past, "t", 3)
    threads = [int(thread) for thread in os.listdir(f"/proc/{server(running)}/task")]
    assert len(threads) > 1
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {NICENESS}
    if slice_ns(running.pid):
        assert {slice_ns(thread) for thread in threads} == {SLICE_NS}


@pytest.mark.tier("test")
def test_bad_messages_get_errors(daemon: StartDaemon) -> None:
    running = daemon()
    fire(3)
    with closing(of(running)) as past:
        read(past, "t", 3)
    reader = Reader.attach(running.paths)
    stream = reader.stream_id
    reader.close()
    good = wire.encode_replay(7, asked("t"))
    stale = {"stream_id": stream + 1}, {"incarnation": 99}
    wrong = [
        (good[:40], WireError.MALFORMED),
        (good[:-1], WireError.MALFORMED),
        (good + b"x", WireError.MALFORMED),
        (b"x" * len(good), WireError.MALFORMED),
        (good[:4] + b"\x09\0" + good[6:], WireError.VERSION),
        (wire.encode_frame(Message.PING), WireError.UNKNOWN_MESSAGE),
        (wire.encode_replay(7, asked("t", 0)), WireError.MALFORMED),
        *((wire.encode_replay(7, asked("t", **about)), WireError.CURSOR) for about in stale),
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.connect(running.paths.back_endpoint)
        for message, error in wrong:
            socket.send(message)
            reply = wire.decode_reply(socket.recv())
            assert reply.error == error, message
            if error == WireError.CURSOR:
                assert reply.detail == (CursorRefusal.STALE, stream)
        socket.send(good)
        reply = wire.decode_reply(socket.recv())
        assert (reply.error, reply.sequence) == (0, 7)


def asked_of(running: Daemon, message: bytes) -> wire.Reply:
    """Send a message to the process for past notices, and return its reply."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.connect(running.paths.back_endpoint)
        socket.send(message)
        return wire.decode_reply(socket.recv())


@pytest.mark.tier("test")
def test_stats_are_on_the_wire(daemon: StartDaemon) -> None:
    running = daemon()
    fire(3)
    with closing(of(running)) as past:
        read(past, "t", 3)
    reply = asked_of(running, wire.encode_frame(Message.STATS, sequence=9))
    found = json.loads(reply.body)
    assert (reply.error, reply.sequence) == (0, 9)
    assert (found["expiries"], found["live"], found["clock"]) == (3, 0, "real")
    assert found.keys() == stats(running).keys()
    assert asked_of(running, wire.encode_frame(Message.STATS) + b"x").error == WireError.MALFORMED


@pytest.mark.tier("test")
def test_a_probe_reports_that_the_subscription_is_live(daemon: StartDaemon) -> None:
    """No notice that follows the answer to a probe is missed."""
    running = daemon()
    fire(1)
    with zmq.Context() as context, Client("demo", timeout=PATIENCE_S) as client:
        for n in range(50):
            with context.socket(zmq.SUB) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
                socket.connect(running.paths.pub_endpoint)
                socket.setsockopt(zmq.SUBSCRIBE, b"default\0t\0")
                probe = b"\0" + os.urandom(64)
                socket.setsockopt(zmq.SUBSCRIBE, probe)
                while (frames := socket.recv_multipart()) != [probe, b""]:
                    assert frames[0] == b"default\0t\0"  # a notice or a heartbeat from before
                client.add(f"live{n}", 0, topic="t")
                while (head := wire.decode_notice_head(socket.recv_multipart()[1])).records == 0:
                    continue
                assert head.first + head.records - 1 == n + 2


def test_past_notices_of_another_host(daemon: StartDaemon, tmp_path: Path) -> None:
    far = remote_place(daemon, tmp_path)
    fire(50)
    with closing(Past(lambda: far.daemon.paths, far.remote)) as past:
        assert len(read(past, "t", 50)) == 50
