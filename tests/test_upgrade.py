"""Arenas of earlier and of unknown ABIs, WALs of earlier versions, and interrupted creations of
arenas."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import later_build
import purgatory_driver as driver
import pytest
from machine import needs
from opened import opened
from purgatory_driver import Command
from raw_wire import Raw, batch, put
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    eventually,
    notices,
    refused,
    remove_arena_files,
    stats,
)
from stored_arena import ARENAS, EXPORTS, WALS, Stored, StoredExport, StoredWal
from tiers import sample, wide

from purgatoryd import shm_layout
from purgatoryd.cli.arena import infos
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import Client, Lagged, Notice, Purgatory, Subscriber
from purgatoryd.clients.stream import Stream
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.replacement import TABLE
from purgatoryd.daemon.store import Opening, wal_end
from purgatoryd.daemon.wal import locked
from purgatoryd.shm_layout import shm, wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Arena, Previous, Reader
from purgatoryd.shm_layout.errors import OtherAbi
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import (
    ABI,
    EVENTS_NAMESPACE,
    EVENTS_TOPIC,
    LAYOUT_ID,
    NOTICE_MAGIC,
    NOTICE_OF_OPERATION,
    RELEASED_LAYOUTS,
    WIRE_VERSION,
    ArenaState,
    Cause,
    KeyType,
    Message,
    size_of,
)
from purgatoryd.shm_layout.paths import Paths, paths_in
from purgatoryd.shm_layout.wal import SEGMENT, SNAPSHOT, GroupCommit, Walk, segments, snapshots
from purgatoryd.shm_layout.wal import contents as contents_of

pytestmark = pytest.mark.tier("all")

SAME = (
    "--capacity", "48", "--payload-memory", "64K",
    "--replay-buffer", "32", "--replay-memory", "16K",
    "--tick", "1ms", "--fanout", "8", "--namespaces", "4", "--topics", "8", "--sessions", "2",
    "--watches", "256", "--watch-keys", "128", "--watermark-ttl", "365d", "--inbox", "64",
)  # fmt: skip
MORE = ("--capacity", "1000", "--payload-memory", "1M", "--replay-buffer", "256", "--fanout", "64")
FAR_NS = 10**18
LATE = 2
KEY_TYPES = ("str", "bytes", "uuid")
LONG_KEY = b"a watch key of more than sixteen bytes"
# byte offsets in struct pg_header and struct pg_private, which every ABI has in common
MAJOR_AT, MINOR_AT, LAYOUT_AT, PRIVATE_LAYOUT_AT = 8, 12, 16, 8


@pytest.fixture(params=ARENAS, ids=lambda folder: folder.name)
def stored(request: pytest.FixtureRequest) -> Stored:
    return Stored(request.param)


@pytest.fixture
def paths(daemon_dir: Path) -> Paths:
    (daemon_dir / "demo.lock").touch()  # makes the fixture daemon_dir remove the arena files
    return paths_in(daemon_dir, "demo")


def key_of(record: dict[str, Any]) -> wire.Key:
    kind, data = record["key"]
    return wire.decode_key(KEY_TYPES.index(kind), bytes.fromhex(data))


# ---- the authoritative state of an earlier ABI -----------------------------------------------


@pytest.mark.tier("test")
@pytest.mark.parametrize("settings", [wide(SAME), MORE], ids=["the same sizes", "other sizes"])
def test_a_stored_arena_goes_on(
    stored: Stored, settings: tuple[str, ...], paths: Paths, daemon: StartDaemon
) -> None:
    stored.lay_out(paths)
    real = daemon("demo", *settings)
    reader = Reader.attach(real.paths)
    assert (reader.header.abi_major, reader.header.abi_minor) == ABI
    assert reader.header.layout_id == LAYOUT_ID
    what_came_due_fires(reader, stored.contents)
    what_is_armed_stays(reader, stored.contents)
    with Raw(real.paths.cmd) as owner:
        what_the_session_had_is_there(owner, stored.contents["session"])
        operations_end_as_they_would_have(owner)
    assert stats(real)["next_ticket"] == stored.contents["next_ticket"] + of_itself(reader)
    reader.check()
    reader.close()
    real.restart()  # starts from the converted arena, which has this ABI


def is_due(timer: dict[str, Any]) -> bool:
    return bool(timer["deadline_ns"] < FAR_NS)


def what_is_armed_stays(reader: Reader, was: dict[str, Any], shift_ns: int = 0) -> None:
    """Check the armed timers. A wall deadline was converted to a boot time by today's wall clock,
    so only its wall time is checked."""
    armed = {i.ticket: i for i in infos(reader)}
    expected = [t for t in was["timers"] if not is_due(t)]
    assert armed.keys() == {t["ticket"] for t in expected}
    for timer in expected:
        info = armed[timer["ticket"]]
        assert (info.key, info.namespace, info.topic) == (
            key_of(timer), timer["namespace"], timer["topic"],
        )  # fmt: skip
        assert (info.wall_ns, info.payload.hex()) == (timer["wall_ns"], timer["payload"])
        if timer["wall_ns"] is None:
            assert info.deadline_ns == timer["deadline_ns"] + shift_ns


def of_itself(reader: Reader) -> int:
    """Return the number of notices in this arena that daemons published about their own state."""
    return reader.newest_sequences(EVENTS_NAMESPACE)[EVENTS_TOPIC][1]


def what_came_due_fires(
    reader: Reader, was: dict[str, Any], *, sent: bool = True, shift_ns: int = 0
) -> None:
    """Check that due timers fire once, in the order of deadlines, after the earlier notices.

    `sent`: the replay buffer still has the notices that were sent before.
    """
    fired = len(was["replay_buffer"]) + 6  # seven operations are due, and one of them has no notice
    eventually(lambda: reader.header.published == fired + of_itself(reader))
    for namespace, topic in {(e["namespace"], e["topic"]) for e in was["replay_buffer"]}:
        before = [
            e for e in was["replay_buffer"] if (e["namespace"], e["topic"]) == (namespace, topic)
        ]
        gone = 0 if sent else sum(e["sent"] for e in before)
        del before[:gone]
        found = notices(reader, namespace, topic, gone + 1)
        assert [(n.ticket, n.key, n.deadline_ns, n.fired_ns, n.cause) for n in found][
            : len(before)
        ] == [
            (e["ticket"], key_of(e), moved(e["deadline_ns"], shift_ns),
             moved(e["fired_ns"], shift_ns), e["cause"])
            for e in before
        ]  # fmt: skip
        assert [n.payload.hex() for n in found][: len(before)] == [e["payload"] for e in before]
        came_due(found[len(before) :], was, namespace, topic)


def moved(time_ns: int, shift_ns: int) -> int:
    """Convert a time to the clock of another boot. A time before the start of that boot becomes
    0."""
    return max(0, time_ns + shift_ns)


def came_due(found: list[wire.RawNotice], was: dict[str, Any], namespace: str, topic: str) -> None:
    due = [
        t for t in was["timers"]
        if is_due(t) and (t["namespace"], t["topic"]) == (namespace, topic)
        and key_of(t) != b"expires silently"
    ]  # fmt: skip
    payloads = {n.ticket: payload_of(n).hex() for n in found}
    assert payloads == {t["ticket"]: t["payload"] for t in due}
    assert len(found) == len(due)
    assert all(n.flags & LATE and n.cause == Cause.EXPIRED for n in found)
    deadlines = [n.deadline_ns for n in found]
    assert deadlines == sorted(deadlines)


def payload_of(notice: wire.RawNotice) -> bytes:
    if notice.flags & NOTICE_OF_OPERATION:
        return wire.decode_verdict(notice.payload)[1]
    return notice.payload


def what_the_session_had_is_there(owner: Raw, session: dict[str, Any]) -> None:
    """Check that the nonce finds the session, and that its repeated batch gets the first answer."""
    owner.hello(bytes.fromhex(session["nonce"]))
    assert (owner.session, owner.sequence) == (session["id"], session["last"])
    owner.send(bytes.fromhex(session["batch"]))
    assert replied(owner, Message.BATCH) == bytes.fromhex(session["reply"])


def replied(owner: Raw, kind: Message) -> bytes:
    """Return the next message of a kind. Drop other messages: the daemon sends them again later."""
    while True:
        (data,) = owner.socket.recv_multipart()
        if wire.decode_reply(data).message == kind:
            return bytes(data)


def operations_end_as_they_would_have(owner: Raw) -> None:
    """Check that ended operations are reported, and armed operations wait for their watermarks."""
    watermarks = [
        driver.advance(b"a", 9), driver.advance(b"b", 1), driver.bump(b"c", 3),
        driver.bump(b"69", 7),
        driver.advance(LONG_KEY, 9),
        driver.fail(b"broken", 14),
    ]  # fmt: skip
    owner.sequence += 1
    names = [(b"n", b"t")]
    owner.send(batch(owner.session, owner.sequence, [as_raw(c) for c in watermarks], names=names))
    found: dict[wire.Key, tuple[int, bytes]] = {}
    while len(found) < 9:
        reply = wire.decode_reply(replied(owner, Message.OUTCOMES))
        for o in wire.decode_outcomes(reply.body, reply.records):
            found[o.key] = (o.cause, o.payload)
    assert found == {
        b"all": (Cause.SATISFIED, b"p"),
        b"any": (Cause.SATISFIED, b""),
        b"sum": (Cause.SATISFIED, b""),
        b"many": (Cause.SATISFIED, b""),
        b"client": (0, b"asked"),
        b"expires": (Cause.EXPIRED, b"late"),
        b"expires silently": (Cause.EXPIRED, b""),
        b"ended": (Cause.SATISFIED, b""),
        b"ended by cancel": (Cause.CANCELLED, b""),
    }


def as_raw(command: Command) -> tuple[bytes, bytes]:
    return command.record, command.area


def test_every_layout_has_a_stored_arena() -> None:
    stored = {Stored(folder).contents["layout_id"]: folder.name for folder in ARENAS}
    layouts = RELEASED_LAYOUTS | {LAYOUT_ID: ABI}
    assert stored == {layout_id: f"arena-{a}.{b}" for layout_id, (a, b) in layouts.items()}


@pytest.mark.parametrize("settings", [SAME, MORE], ids=["the same sizes", "other sizes"])
def test_a_stored_arena_gets_a_wal(
    stored: Stored, settings: tuple[str, ...], paths: Paths, daemon: StartDaemon
) -> None:
    stored.lay_out(paths)
    real = daemon("demo", *settings, "--wal-dir", str(paths.directory / "wal"))
    reader = Reader.attach(real.paths)
    what_came_due_fires(reader, stored.contents)
    fired = reader.header.published - of_itself(reader)
    reader.close()
    with Client("demo", durable=True, timeout=PATIENCE_S) as client:
        client.add("behind", delay=3600)  # all earlier changes are on disk when it is acknowledged
        client.cancel("behind")
    real.kill()
    remove_arena_files(real.paths)  # a reboot removes the arena files
    real.start()
    reader = Reader.attach(real.paths)
    what_is_armed_stays(reader, stored.contents)
    assert reader.header.published == reader.header.replay_tail == fired + of_itself(reader)
    operations_wait_for_their_watermarks(reader)
    reader.close()


def operations_wait_for_their_watermarks(reader: Reader) -> None:
    """Check that armed operations end when their watermarks are reached. Their owner is gone, so
    only notices report the ends."""
    _, last = reader.newest_sequences("n")["t"]
    with Purgatory("demo", namespace="n", timeout=PATIENCE_S) as other:
        ended = [
            other.advance(b"a", 9), other.advance(b"b", 1), other.bump(b"c", 3),
            other.bump(b"69", 7), other.advance(LONG_KEY, 9),
        ]  # fmt: skip
    assert ended == [0, 1, 1, 1, 1]
    reported = [(n.key, n.cause) for n in notices(reader, "n", "t", last + 1)]
    assert reported == [(b"any", Cause.SATISFIED), (b"sum", Cause.SATISFIED)]


# ---- an export of an earlier version -------------------------------------------------------------


@pytest.mark.parametrize("settings", [SAME, MORE], ids=["the same sizes", "other sizes"])
@pytest.mark.parametrize("folder", EXPORTS, ids=lambda folder: folder.name)
def test_a_stored_export_is_imported(
    folder: Path, settings: tuple[str, ...], tmp_path: Path, daemon: StartDaemon
) -> None:
    stored = StoredExport(folder, tmp_path / "stored.export")
    was = stored.contents
    real = daemon("demo", *settings, "--import", str(stored.file))
    reader = Reader.attach(real.paths)
    shift_ns = moved_by(reader, was)
    what_came_due_fires(reader, was, sent=False, shift_ns=shift_ns)
    what_is_armed_stays(reader, was, shift_ns)
    assert watermarks_in(exported(real)) == {
        bytes.fromhex(key): (watermark, error) for key, watermark, error in was["watermarks"]
    }
    reader.close()
    real.start(*settings)
    reader = Reader.attach(real.paths)
    what_is_armed_stays(reader, was, shift_ns)
    operations_wait_for_their_watermarks(reader)
    assert stats(real)["next_ticket"] > was["next_ticket"]
    reader.check()
    reader.close()


def moved_by(reader: Reader, was: dict[str, Any]) -> int:
    """Return by how many ns the deadlines of delays were shifted to this boot's clock. Check this
    number with the wall clock."""
    far = next(t for t in was["timers"] if t["wall_ns"] is None and not is_due(t))
    (found,) = (i for i in infos(reader) if i.ticket == far["ticket"])
    shift_ns = int(found.deadline_ns - far["deadline_ns"])
    expected_ns = was["wall_offset_ns"] - int(reader.header.wall_offset_ns)
    assert abs(shift_ns - expected_ns) < PATIENCE_S * 10**9
    return shift_ns


def exported(real: Daemon) -> Path:
    """Export a daemon's state, which stops the daemon; return the path of the export."""
    file = real.dir / "exported"
    command = [sys.executable, "-m", "purgatoryd.cli", "stop", "--name", real.name]
    subprocess.run([*command, "--export", str(file)], check=True, env=real.env)
    assert real.process.wait(PATIENCE_S) == 0
    return file


def watermarks_in(export: Path) -> dict[wire.Key | None, tuple[int, int]]:
    """Return (watermark, error) of every watch key in an export."""
    walk = Walk()
    walk.enter(export)
    found = [frame for frame in walk.frames() if frame.kind == "watermark"]
    walk.check()
    return {contents_of(f).key: (f.fields["watermark"], f.fields["error"]) for f in found}


def test_every_format_of_the_wal_has_a_stored_export(tmp_path: Path) -> None:
    stored = [StoredExport(folder, tmp_path / "export").contents["wal"] for folder in EXPORTS]
    assert [lib.PG_WAL_MAJOR, lib.PG_WAL_MINOR] in stored


# ---- a WAL of an earlier version -----------------------------------------------------------


@pytest.mark.parametrize("folder", WALS, ids=lambda folder: folder.name)
def test_a_stored_wal_is_read(folder: Path, tmp_path: Path) -> None:
    stored = StoredWal(folder, tmp_path / "demo")
    walk, kinds = Walk(), Counter[str]()
    for file in segments(stored.directory):
        walk.enter(file.path)
        kinds.update(frame.kind for frame in walk.frames())
        walk.check()
    assert walk.uuid.hex() == stored.contents["uuid"]
    assert (walk.lsn, kinds) == (stored.contents["last_lsn"], stored.contents["kinds"])


@pytest.mark.tier("test")
@pytest.mark.parametrize("folder", WALS, ids=lambda folder: folder.name)
def test_a_daemon_goes_on_with_a_stored_wal(
    folder: Path, paths: Paths, daemon: StartDaemon
) -> None:
    wal = paths.directory / "wal"
    StoredWal(folder, wal / "demo")
    real = daemon("demo", *MORE, "--wal-dir", str(wal))
    reader = Reader.attach(real.paths)
    keys = {info.key for info in infos(reader)}
    reader.check()
    reader.close()
    assert keys == {b"of boot %d" % boot for boot in range(3)}


@pytest.mark.parametrize("field", ["major", "minor"])
@pytest.mark.parametrize("suffix", [SEGMENT, SNAPSHOT])
@pytest.mark.parametrize("force", [(), ("--force-wal",)], ids=["plain", "forced"])
def test_a_wal_of_another_version_is_refused_and_untouched(
    field: str, suffix: str, force: tuple[str, ...], paths: Paths, daemon: StartDaemon
) -> None:
    wal = paths.directory / "wal"
    StoredWal(WALS[-1], wal / "demo")
    newest = max((wal / "demo").glob(f"*{suffix}"))
    newest.write_bytes(of_later(field, newest.read_bytes()))
    before = {path.name: path.read_bytes() for path in (wal / "demo").glob("*.*")}
    said = refused(lambda: daemon("demo", *MORE, "--wal-dir", str(wal), *force))
    assert f"{newest}: " in said
    assert "version of a" in said
    assert {path.name: path.read_bytes() for path in (wal / "demo").glob("*.*")} == before


def of_later(field: str, data: bytes) -> bytes:
    """Return this WAL segment or snapshot with the next minor or major version in its header."""
    changed = bytearray(data)
    head = ffi.from_buffer("struct pg_wal_segment *", changed)
    setattr(head, field, getattr(head, field) + 1)
    head.crc = lib.pg_crc32c(0, head, ffi.offsetof("struct pg_wal_segment", "crc"))
    return bytes(changed)


def test_every_format_of_the_wal_is_stored() -> None:
    names = {folder.name for folder in WALS}
    assert f"wal-{lib.PG_WAL_MAJOR}.{lib.PG_WAL_MINOR}" in names


# ---- conversion, with today's layout in place of an earlier one ---------------------------------


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function. After its call, arenas of today's layout are converted as if their layout
    were an earlier one."""
    return lambda: monkeypatch.setattr(shm_layout.arena, "converts", lambda layout_id: True)


def arm_five(arena: Arena) -> None:
    """Open a session and arm the timers 1 to 5."""
    now_ns = HOST.boot_ns()
    asked = os.geteuid(), os.getpid(), now_ns, now_ns
    _, reply = arena.handle(wire.encode_hello(b"a client's nonce"), *asked)
    session = wire.decode_reply(bytes(reply)).session
    for number in range(1, 6):
        arena.handle(batch(session, number, [put(b"%d" % number, FAR_NS)]), *asked)


@pytest.mark.tier("check")
def test_a_converted_arena_has_the_timers(paths: Paths, earlier: Callable[[], None]) -> None:
    steps: list[str] = []
    opening = Opening(Config(name="demo", capacity=100), paths, step=steps.append)
    arena = opened(opening)
    arm_five(arena)
    arena.close()
    earlier()
    converted = opened(opening)
    assert "converting the arena of an earlier version" in steps
    converted.check()
    converted.set_state(ArenaState.READY)
    converted.close()
    reader = Reader.attach(paths)
    assert {info.key for info in infos(reader)} == {str(number) for number in range(1, 6)}
    reader.close()


@pytest.mark.tier("check")
@pytest.mark.parametrize("converts", [False, True])
def test_an_arena_begins_a_wal_with_a_snapshot_unless_it_is_converted(
    paths: Paths, earlier: Callable[[], None], *, converts: bool
) -> None:
    """A conversion makes a new arena, which begins its own WAL with a snapshot."""
    wal = paths.directory / "wal" / "demo"
    opening = Opening(Config(name="demo", capacity=100, wal_dir=str(wal.parent)), paths, force=True)
    with locked(wal):
        arena: Arena | Previous | None = opened(opening)
        assert isinstance(arena, Arena)
        arm_five(arena)
        end = wal_end(arena, opening)
        GroupCommit(arena, wal, 1 << 20, end, opening.host.disk).close()
        if converts:
            arena.close()
            earlier()
            arena = Previous.attach(paths.arena, paths.private)
        assert arena is not None
        (newest,) = segments(wal)
        os.truncate(newest.path, newest.bytes // 2)
        wal_end(arena, opening)
        assert segments(wal) == []
        assert bool(snapshots(wal)) is not converts
        arena.close()


# ---- the next minor version ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def later(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment variables that select a build of the next minor version."""
    return later_build.make(tmp_path_factory.mktemp("later"))


def test_the_next_minor_takes_over_all_that_is_stored(later: Mapping[str, str]) -> None:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k",
        "stored and not every and not next_minor", __file__,
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, **later}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout, done.stdout


def test_the_next_minor_takes_over_what_a_killed_daemon_appended(
    later: Mapping[str, str], daemon: StartDaemon
) -> None:
    real = daemon("demo", "--capacity", "1000")
    wal = str(real.dir / "wal")
    real.restart("--capacity", "1000", "--wal-dir", wal)
    with Client("demo", durable=True, timeout=PATIENCE_S) as client:
        client.add("durable", delay=3600)
    with Client("demo", timeout=PATIENCE_S) as client:
        client.add_many([(f"{i}", 3600) for i in range(500)])
    real.kill()
    before = real.env
    real.env = {**before, **later}
    # first from the arena, then from the WAL that both minor versions have written
    for _ in range(2):
        real.start()
        assert keys_listed(real) == {"durable", *map(str, range(500))}
        real.kill()
        remove_arena_files(real.paths)
    real.env = before
    said = refused(real.start)
    assert "minor version of a WAL segment" in said


@pytest.mark.parametrize("seen", [True, False], ids=["its effect is there", "it has none"])
def test_the_next_minor_decides_the_frame_in_doubt_as_a_rebuild_would(
    later: Mapping[str, str], paths: Paths, *, seen: bool
) -> None:
    config = Config(name="demo", capacity=100, wal_dir=str(paths.directory / "wal"))
    wal = paths.directory / "wal" / "demo"
    with locked(wal):
        arena = opened(Opening(config, paths))
        appended = append_one_in_doubt(arena, seen=seen)
        arena.close()
    command = [sys.executable, "-c", OPENED, str(paths.directory)]
    done = subprocess.run(command, env={**os.environ, **later}, capture_output=True, check=True)
    assert json.loads(done.stdout) == [*range(1, appended + 1)]
    assert snapshots(wal)[-1].lsn == appended + 1


OPENED = """
import sys
from pathlib import Path
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.store import Opening, open_arena, owned
from purgatoryd.daemon.wal import locked
from purgatoryd.shm_layout.paths import paths_in
from purgatoryd.shm_layout.wal import Walk, segments
folder = Path(sys.argv[1])
config = Config(name="demo", capacity=100, wal_dir=str(folder / "wal"))
with locked(folder / "wal" / "demo"):
    with owned(Opening(config, paths_in(folder, "demo"))) as opening:
        arena = open_arena(opening)
    arena.check()
walk = Walk()
walk.enter(segments(folder / "wal" / "demo")[0].path)
print([frame.lsn for frame in walk.frames()])
"""


def append_one_in_doubt(arena: Arena, *, seen: bool) -> int:
    """Arm five timers, then restore the state of a kill at the last frame. Return the number of
    frames that the next start accepts. With `seen`, the effect of the last frame is in the
    arena."""
    arm_five(arena)
    buffer, at = arena.wal_buffer, 0
    ring = ffi.cast("uint8_t *", buffer) + lib.PG_WAL_BUFFER_HEAD
    while at + ffi.cast("struct pg_frame_head *", ring + at).bytes != buffer.appended:
        at += ffi.cast("struct pg_frame_head *", ring + at).bytes
    appended = int(buffer.next_lsn) - 1
    if seen:
        buffer.tail = at
        return appended
    frame = bytearray(ffi.buffer(ring + at, buffer.appended - at))
    struct.pack_into("<Q", frame, 8, appended + 1)
    struct.pack_into("<Q", frame, size_of("pg_frame_head"), 99)  # a ticket that no slot has
    ffi.memmove(ring + buffer.appended, frame, len(frame))
    buffer.appended += len(frame)
    buffer.next_lsn += 1
    return appended


def test_the_next_minor_refuses_the_arena_of_another_shard(
    later: Mapping[str, str], paths: Paths
) -> None:
    opened(Opening(Config(name="demo", shard=1, shards=4), paths)).close()
    command = [sys.executable, "-m", "purgatoryd.cli", "run", "--name", "demo"]
    done = subprocess.run(
        command,
        env={**os.environ, **later},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == Exit.UNUSABLE
    assert "shard is 1 of 4, expected 0 of 1" in done.stderr


def keys_listed(real: Daemon) -> set[str]:
    """Return the keys that `purgatoryd list`, in the daemon's version, prints."""
    command = [sys.executable, "-m", "purgatoryd.cli", "list", "--name", real.name, "--json"]
    done = subprocess.run(command, env=real.env, capture_output=True, text=True, check=True)
    return {json.loads(line)["key"] for line in done.stdout.splitlines()}


# ---- arenas that cannot be converted -----------------------------------------------------------


def newer_minor(stored: Stored) -> str:
    struct.pack_into("<I", stored.arena, MINOR_AT, ABI[1] + 1)
    for data, at in ((stored.arena, LAYOUT_AT), (stored.private, PRIVATE_LAYOUT_AT)):
        struct.pack_into("<Q", data, at, 77)
    return f"ABI is {ABI[0]}.{ABI[1] + 1}, expected {ABI[0]}.{ABI[1]}"


def newer_major(stored: Stored) -> str:
    struct.pack_into("<II", stored.arena, MAJOR_AT, ABI[0] + 1, 0)
    return f"ABI is {ABI[0] + 1}.0, expected {ABI[0]}.{ABI[1]}"


def unknown_build(stored: Stored) -> str:
    struct.pack_into("<II", stored.arena, MAJOR_AT, *ABI)
    struct.pack_into("<Q", stored.arena, LAYOUT_AT, 77)
    return f"layout id is 77, expected {LAYOUT_ID}"


@pytest.mark.parametrize("change", [newer_minor, newer_major, unknown_build])
def test_another_abi_is_refused_and_untouched(
    change: Callable[[Stored], str], stored: Stored, paths: Paths, daemon: StartDaemon
) -> None:
    expected = change(stored)
    stored.lay_out(paths)
    assert expected in refused(lambda: daemon("demo", *SAME))
    assert stored.untouched(paths)


# ---- clients of a daemon with another ABI ------------------------------------------------------


@pytest.fixture
def newer(daemon: StartDaemon) -> Daemon:
    """A daemon whose arena header names the next minor version, so that clients cannot attach."""
    real = daemon("demo")
    with file(real, "").open("r+b") as arena:
        arena.seek(MINOR_AT)
        arena.write(struct.pack("<I", ABI[1] + 1))
        arena.seek(LAYOUT_AT)
        arena.write(struct.pack("<Q", 77))
    return real


@pytest.mark.parametrize("topics", [None, ["t"]])
def test_a_subscriber_has_the_socket(newer: Daemon, topics: list[str] | None) -> None:
    with pytest.raises(OtherAbi, match=f"ABI is {ABI[0]}.{ABI[1] + 1}, expected"):
        Reader.attach(newer.paths)
    with Client("demo") as client, Subscriber("demo", topics=topics) as subscriber:
        received: Notice | None = None
        while received is None:  # a subscription takes effect with a delay
            client.add("first", delay=0, topic="t", mode="replace")
            received = subscriber.get(0.05)
        for i in range(100):
            client.add(str(i), delay=0, topic="t")
        found = [received]
        # Timers of one tick fire in any order.
        while not {str(i) for i in range(100)} <= {n.key for n in found}:
            notice = subscriber.get(PATIENCE_S)
            assert notice is not None
            found.append(notice)
    assert [n.seq for n in found] == list(range(received.seq, received.seq + len(found)))


def test_a_subscriber_without_an_arena_names_what_the_socket_dropped() -> None:
    stream = Stream("n", None, lambda: None, lambda: 0)
    stream.take(message(first=41, keys=[b"a", b"b"]))
    assert [popped(stream), popped(stream), popped(stream)] == [(b"a", 41), (b"b", 42), None]
    stream.take(message(first=45, keys=[b"e"]))
    assert [popped(stream), popped(stream)] == [(43, 44), (b"e", 45)]
    stream.take(message(first=45, keys=[b"e"]))  # a restarted daemon repeats a message
    # a heartbeat shows that notices 46 and 47 were dropped
    stream.take(message(first=46, keys=[], tail=47))
    assert [popped(stream), popped(stream)] == [(46, 47), None]
    stream.take(message(first=1, keys=[b"z"], stream_id=8))
    assert [popped(stream), popped(stream)] == [(48, 0), (b"z", 1)]


def test_a_topic_without_an_arena_may_begin_with_a_heartbeat() -> None:
    stream = Stream("n", ["t"], lambda: None, lambda: 0)
    stream.take(message(first=10, keys=[], tail=9))
    stream.take(message(first=11, keys=[b"k"]))
    assert [popped(stream), popped(stream)] == [(10, 10), (b"k", 11)]


def popped(stream: Stream) -> tuple[object, int] | None:
    """Return (key, sequence) of the next notice, (first, last) of a lost range, or None."""
    try:
        notice = stream.pop()
    except Lagged as lost:
        return lost.first_lost, lost.last_lost
    return None if notice is None else (notice.key, notice.seq)


def message(
    first: int, keys: list[bytes], tail: int | None = None, stream_id: int = 7
) -> list[bytes]:
    """Return the two frames of a message of topic t."""
    last = first + len(keys) - 1 if tail is None else tail
    head = wire.NOTICES.pack(NOTICE_MAGIC, WIRE_VERSION, stream_id, 3, first, last, 0, 0, len(keys))
    records = b"".join(
        wire.NOTICE.pack(1, 0, 0, 0, len(k), KeyType.BYTES, Cause.EXPIRED, 0, 0) for k in keys
    )
    return [b"n\0t\0", head + records + b"".join(keys)]


def test_a_daemon_of_another_minor_can_be_stopped(newer: Daemon) -> None:
    with Client("demo") as client:
        client.add("k", delay=3600)
    command = [sys.executable, "-m", "purgatoryd.cli", "stop", "--name", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"stopped": "demo", "pid": newer.pid, "armed": 1}
    assert newer.process.wait(PATIENCE_S) == 0


def test_a_daemon_of_another_minor_is_not_stopped_for_an_export(newer: Daemon) -> None:
    file = newer.dir / "demo.export"
    command = [sys.executable, "-m", "purgatoryd.cli", "stop", "--name", "demo"]
    done = subprocess.run(
        [*command, "--export", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == Exit.UNUSABLE
    assert f"ABI is {ABI[0]}.{ABI[1] + 1}, expected" in done.stderr
    assert newer.running
    assert not file.exists()


# ---- interrupted creations of arenas ------------------------------------------------------------

# By moment of the interruption: the files that it leaves ("old": of the old arena, "born": of the
# new one), and the arena that the next start uses.
CUTS = {
    "before both were whole": ({"": "old", ".private": "old", ".new": "born"}, "old"),
    "when the private one was not": (
        {"": "old", ".private": "old", ".new": "born", ".private.new": "born"}, "old",
    ),
    "when both were whole": (
        {"": "old", ".private": "old", ".next": "born", ".private.new": "born"}, "born",
    ),
    "between the two": ({"": "old", ".private": "born", ".next": "born"}, "born"),
    "of the first arena": ({".next": "born", ".private.new": "born"}, "born"),
    "between the first two": ({".private": "born", ".next": "born"}, "born"),
}  # fmt: skip


def test_a_daemon_starts_in_each_state_of_a_replacement() -> None:
    cut = {(".private.new" in files, ".next" in files) for files, _ in CUTS.values()}
    assert cut == {(row.private_new, row.arena_next) for row in TABLE}


@pytest.mark.tier("test")
@pytest.mark.parametrize("cut", sample(CUTS, {"between the two"}))
def test_a_birth_that_was_cut_off_is_completed_or_undone(cut: str, daemon: StartDaemon) -> None:
    bytes_of: dict[str, dict[str, bytes]] = {}
    real = daemon("demo", "--capacity", "100")
    for generation, capacity in (("old", "100"), ("born", "200")):
        real.restart("--capacity", capacity)
        with Client("demo", timeout=PATIENCE_S) as client:
            client.add(generation, delay=3600)
        real.stop()
        bytes_of[generation] = {s: file(real, s).read_bytes() for s in ("", ".private")}
    files, serves = CUTS[cut]
    for suffix in ("", ".private"):
        file(real, suffix).unlink()
    for suffix, generation in files.items():
        whole = ".private" if suffix.startswith(".private") else ""
        file(real, suffix).write_bytes(bytes_of[generation][whole])
    real.start("--capacity", "300")
    keys = {"old"} if serves == "old" else {"old", "born"}
    assert {info.key for info in armed(real)} == keys
    assert len(list(shm.MOUNT.glob(f"{real.paths.arena[1:]}*"))) == 2


def file(real: Daemon, suffix: str) -> Path:
    return shm.MOUNT / f"{real.paths.arena[1:]}{suffix}"


def armed(real: Daemon) -> list[wire.Info]:
    reader = Reader.attach(real.paths)
    try:
        return list(infos(reader))
    finally:
        reader.close()


def test_a_foreign_arena_file_in_the_way_of_a_birth_is_named_and_stays(daemon: StartDaemon) -> None:
    needs("root", "an arena file of another user")
    real = daemon("demo", "--capacity", "100")
    for suffix in (".next", ".new", ".private.new"):
        real.stop()
        file(real, suffix).write_bytes(b"precious")
        os.chown(file(real, suffix), 65534, 65534)
        said = refused(lambda: real.start("--capacity", "200"))
        assert f"{file(real, suffix)}: is foreign: it belongs to uid 65534" in said
        assert file(real, suffix).read_bytes() == b"precious"
        file(real, suffix).unlink()
        real.start("--capacity", "100")
