"""Published notices, which have no timer, and the names that are reserved for the daemon's own
notices."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    eventually,
    notices,
    remove_arena_files,
    wal_entries,
)

from purgatoryd.clients import (
    Admin,
    AllOf,
    CancelResult,
    Client,
    Denied,
    Full,
    InvalidName,
    InvalidPayload,
    MessageRefused,
    Purgatory,
    Subscriber,
)
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.layout import EVENTS_NAMESPACE, EVENTS_TOPIC, Cause, Message, WireError
from purgatoryd.shm_layout.paths import arena_paths
from purgatoryd.shm_layout.wal import Contents

pytestmark = pytest.mark.tier("all")

HOUR_S = 3600.0


@pytest.fixture
def admin(daemon: StartDaemon) -> Admin:
    daemon("demo", "--payload-memory", "64K", "--replay-memory", "16K")
    return Admin("demo", timeout=PATIENCE_S)


def listen(namespace: str = EVENTS_NAMESPACE) -> Subscriber:
    return Subscriber("demo", namespace=namespace, timeout=PATIENCE_S)


def publish(admin: Admin, key: wire.Key, payload: bytes = b"") -> int:
    return admin.publish(EVENTS_TOPIC, key, payload, namespace=EVENTS_NAMESPACE)


def test_a_notice_without_a_timer_comes_like_any_other(admin: Admin) -> None:
    with listen() as subscriber, admin:
        tickets = [publish(admin, key, b"found") for key in ("node-7", b"\0", "node-7")]
        came = [subscriber.get(PATIENCE_S) for _ in tickets]
    assert [n and (n.ticket, n.seq, n.key, n.payload, n.topic, n.cause) for n in came] == [
        (ticket, seq, key, b"found", EVENTS_TOPIC, Cause.PUBLISHED)
        for ticket, seq, key in zip(tickets, (2, 3, 4), ("node-7", b"\0", "node-7"), strict=True)
    ]
    assert all(n and n.lateness_ns >= 0 for n in came)


def test_no_key_finds_a_published_notice(admin: Admin) -> None:
    """Calls with the key of a published notice do not find the notice, before or after a
    rebuild."""
    with Client("demo", timeout=PATIENCE_S) as client, admin:
        admin.publish("t", "k")
        assert client.cancel("k") is CancelResult.UNKNOWN
        timer = client.add("k", delay=HOUR_S, topic="t")
        admin.publish("t", "k")
        found = client.get("k")
        assert found is not None
        assert found.ticket == timer.ticket
        assert client.cancel("k") is CancelResult.CANCELLED


@pytest.mark.tier("test")
def test_published_notices_survive_kills_and_reboots(daemon: StartDaemon, daemon_dir: Path) -> None:
    """The WAL has a record of the notice. A disconnected subscriber finds the notice in the replay
    buffer."""
    wal = daemon_dir / "wal"
    real = daemon("demo", "--wal-dir", str(wal), "--retain-age", "1h")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        ticket = publish(admin, "k", b"payload")
    real.kill()
    real.start()
    (notice,) = in_replay_buffer(real)
    assert (notice.ticket, notice.payload, notice.cause) == (ticket, b"payload", Cause.PUBLISHED)
    with Client("demo", timeout=PATIENCE_S) as client:
        assert client.cancel("k") is CancelResult.UNKNOWN
    eventually(lambda: entries(wal))
    real.kill()
    remove_arena_files(real.paths)
    real.start()
    (entry,) = entries(wal)
    assert (entry.key, entry.payload) == ("k", b"payload")
    with Admin("demo", timeout=PATIENCE_S) as admin:
        assert publish(admin, "after") > ticket
    with closing(Reader.attach(real.paths)) as reader:
        _, newest = reader.newest_sequences(EVENTS_NAMESPACE)[EVENTS_TOPIC]
    assert newest > 2, (
        "the sequence of the topic continues"
    )  # the topic has two published notices and the daemon's notices about its own state
    assert [n.key for n in in_replay_buffer(real, first=newest)] == ["after"]


def in_replay_buffer(real: Daemon, first: int = 1) -> list[wire.RawNotice]:
    """Return the notices in the replay buffer, without the daemon's notices about its own state."""
    with closing(Reader.attach(real.paths)) as reader:
        found = notices(reader, EVENTS_NAMESPACE, EVENTS_TOPIC, first)
    return [notice for notice in found if notice.key != "state"]


def entries(wal: Path) -> list[Contents]:
    """Return the published notices in the WAL, without the daemon's notices about its own state."""
    return [entry for entry in wal_entries(wal / "demo") if entry.key != "state"]


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namespace", "topic"), [("_mine", "t"), (EVENTS_NAMESPACE, EVENTS_TOPIC), ("default", "_t")]
)
def test_reserved_names_are_not_for_timers(namespace: str, topic: str, admin: Admin) -> None:
    with Purgatory("demo", namespace=namespace, timeout=PATIENCE_S) as owner, admin:
        with pytest.raises(Denied):
            owner.add("k", delay=HOUR_S, topic=topic)
        with pytest.raises(Denied):
            owner.watch("op", AllOf({"w": 1}), timeout=HOUR_S, topic=topic)
        if namespace.startswith("_"):
            with pytest.raises(Denied):
                owner.advance("w", 1)
        assert owner.cancel("k") is CancelResult.UNKNOWN
        assert owner.get("k") is None
        assert owner.add("free", delay=HOUR_S) if namespace == "default" else True


def test_a_full_daemon_refuses_to_publish(admin: Admin) -> None:
    with Client("demo", timeout=PATIENCE_S) as client, admin:
        client.add_many([(f"k{i}", HOUR_S, "t", bytes(4096)) for i in range(100)])
        with closing(Reader.attach(arena_paths("demo"))) as reader:
            before = reader.stats()["refused_payload"]
            with pytest.raises(Full):
                publish(admin, "k", bytes(8192))
            assert reader.stats()["refused_payload"] == before + 1


def test_invalid_publications_are_refused(admin: Admin) -> None:
    with admin:
        with pytest.raises(InvalidName):
            admin.publish("t\0", "k")
        with pytest.raises(InvalidPayload):
            admin.publish("t", "k", bytes(65537))


BROKEN = [
    b"",
    wire.PUBLISH.pack(0, 0, 0, 1, 1) + b"nt",
    wire.PUBLISH.pack(0, 1, 9, 1, 1) + b"ntk",
    wire.PUBLISH.pack(0, 1, 0, 0, 1) + b"tk",
    wire.PUBLISH.pack(0, 1, 0, 1, 128) + b"n" + b"t" * 128 + b"k",
    wire.PUBLISH.pack(0, 1, 0, 1, 1) + b"n\0k",
    wire.PUBLISH.pack(0, 1, 0, 1, 1) + b"ntk more",
    wire.PUBLISH.pack(2**32 - 1, 1, 0, 1, 1) + b"ntk",
]


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
def test_broken_bytes_publish_nothing(body: bytes, admin: Admin) -> None:
    with admin:
        with pytest.raises(MessageRefused) as refused:
            admin._do(admin._request, wire.encode_frame(Message.PUBLISH) + body, PATIENCE_S)
        assert refused.value.error in (WireError.MALFORMED, WireError.TOO_LARGE)
        first = admin.publish("t", "k")
    with Client("demo", timeout=PATIENCE_S) as client:
        assert client.add("k", delay=HOUR_S).ticket == first + 1


def test_the_command_publishes(admin: Admin, daemon_dir: Path) -> None:
    names = ("-n", EVENTS_NAMESPACE, "-t", EVENTS_TOPIC)
    with listen() as subscriber, admin:
        done = subprocess.run(
            [sys.executable, "-m", "purgatoryd.cli", "publish", "node-7", "--name", "demo",
             *names, "-p", "slow", "--json"], capture_output=True, text=True, check=True,
        )  # fmt: skip
        notice = subscriber.get(PATIENCE_S)
    assert notice is not None
    assert (notice.key, notice.payload) == ("node-7", b"slow")
    assert json.loads(done.stdout)["ticket"] == notice.ticket
