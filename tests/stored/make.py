"""Write files that later versions have to read: `python tests/stored/make.py`.

When a layout or a format of the WAL is released, run this script once with the code of the release.
The folder of the arena is named after the ABI. The folder of the export and the WAL is named after
the WAL's format. The files never change afterwards. tests/test_upgrade.py starts later daemons on
them. The arena is that of a killed daemon, and the export is of the same moment. The WAL covers
several boots, and has every final state that a timer or an operation can have. Clock and contents
are simulated, so that they are the same on every machine.
"""

from __future__ import annotations

import io
import json
import lzma
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

import purgatory_driver as driver  # noqa: E402
from core_driver import NIL, Entry  # noqa: E402
from purgatory_driver import BASE_NOW, Key, Owner, Purgatory  # noqa: E402
from wal_segment_driver import WAL_BUFFER_BYTES, GroupCommit  # noqa: E402

from purgatoryd.shm_layout import wire  # noqa: E402
from purgatoryd.shm_layout._core import ffi, lib  # noqa: E402
from purgatoryd.shm_layout.arena import Reader  # noqa: E402
from purgatoryd.shm_layout.layout import LAYOUT_ID, LatePolicy, PutMode, Status, TimeKind  # noqa: E402
from purgatoryd.shm_layout.shm import ArenaFile  # noqa: E402
from purgatoryd.shm_layout.wal import Walk, file_name, segments, write_snapshot  # noqa: E402

S = 10**9
# wall time at 0 of the boot clock: 2026-01-01T00:00:00Z
WALL_OFFSET_NS = 1_767_225_600 * S
BEGUN_NS = 10 * S
KILLED_NS = 20 * S
SOON_NS = 5 * S
"""Shortest delay of timers that come due while no daemon runs. These delays are multiples of
SOON_NS, or next to one. All of their deadlines are below a minute of uptime."""
FAR_NS = 10**18
"""A delay of 31 years, which never ends in a test."""
LONG_KEY = b"a watch key of more than sixteen bytes"
NONCE = 7

CONFIG: dict[str, Any] = {
    "capacity": 48,
    "replay_capacity": 32,
    "replay_bytes_max": 1 << 14,
    "payload_bytes": 1 << 16,
    "tick_ns": 1_000_000,
    "fanout": 8,
    "namespaces": 4,
    "topics": 8,
    "sessions": 2,
    "watches": 256,
    "watermarks": 128,
    "watermark_ttl_ns": 365 * 86_400 * S,
    "inbox_max": 64,
    "now_ns": BEGUN_NS,
    "wall_offset_ns": WALL_OFFSET_NS,
    "created_wall_ns": WALL_OFFSET_NS + BEGUN_NS,
    "stream_id": 0x5EED,
    "secret": (0x0123456789ABCDEF, 0xFEDCBA9876543210),
    "uuid": bytes(range(0x10, 0x20)),
    "boot_id": bytes(range(0x20, 0x30)),
    "page_size": 4096,
    "clock_kind": lib.PG_CLOCK_BOOT,
}


def text(key: wire.Key) -> list[str]:
    """Return a key for JSON: [type, bytes in hex]."""
    kind, data = wire.encode_key(key)
    return [("str", "bytes", "uuid")[kind], data.hex()]


def fired_before(core: Purgatory) -> None:
    """Add timers that fire, and send their notices. Arm one of the keys again."""
    for key, payload in (("sent", b""), ("sent again", b"first"), (b"\0sent", bytes(range(256)))):
        assert core.put(key, S, payload=payload, topic=b"sent").status == Status.ADDED
    core.advance(BEGUN_NS + 2 * S)
    core.publish_all()
    assert core.put("sent again", SOON_NS * 2, payload=b"second").status == Status.ADDED


def timers(core: Purgatory) -> None:
    """Add timers of every key type, every kind of time and every mode."""
    core.put("soon", SOON_NS * 3, payload=b"x" * 1000)
    core.put(b"soon in bytes", SOON_NS * 2 + 1, namespace=b"other")
    core.put(UUID(int=42), SOON_NS * 2 - 1, payload=b"uuid")
    core.put("far", FAR_NS, payload=b"far")
    core.put("absolute", FAR_NS + 1, TimeKind.BOOT, topic=b"u")
    core.put("wall soon", WALL_OFFSET_NS + KILLED_NS + S, TimeKind.WALL, payload=b"wall")
    core.put("wall far", WALL_OFFSET_NS + FAR_NS, TimeKind.WALL)
    core.put("replaced", SOON_NS, payload=b"old")
    core.put("replaced", FAR_NS + 2, payload=b"new", mode=PutMode.REPLACE)
    core.put("extended", SOON_NS)
    core.put("extended", FAR_NS + 3, mode=PutMode.EXTEND)
    core.put("cancelled", SOON_NS)
    assert core.cancel("cancelled").status == Status.CANCELLED


def operations(owner: Owner) -> None:
    """Add operations of every condition, with and without a notice. Some end, some stay armed, and
    a CHECK is sent for one."""
    far, soon = FAR_NS, SOON_NS * 3
    watch = driver.watch
    owner.send(driver.advance(b"a", 5), driver.advance(LONG_KEY, 6), driver.fail(b"broken", 13))
    owner.send(
        watch(b"all", driver.ALL, [Key(b"a", 9), Key(LONG_KEY, 9)], far, payload=b"p"),
        watch(b"any", driver.ANY, [Key(b"a", 100), Key(b"b", 1)], far, notice=True),
        watch(b"sum", driver.SUM, [Key(b"c", BASE_NOW, 10)], far, threshold=7, notice=True),
        watch(b"client", driver.CLIENT, [Key(b"d", 0)], far, payload=b"asked"),
        watch(b"expires", driver.ALL, [Key(b"a", 99)], soon, payload=b"late", notice=True),
        watch(b"expires silently", driver.ANY, [Key(LONG_KEY, 99)], soon),
        watch(b"ended", driver.ALL, [Key(b"a", 5), Key(b"e", 3)], far, notice=True),
        watch(
            b"many", driver.SUM, [Key(b"%d" % i, BASE_NOW, 10) for i in range(70)], far, threshold=7
        ),
        watch(b"ended by cancel", driver.ALL, [Key(b"f", 1)], far),
    )
    owner.send(driver.bump(b"c", 4), driver.advance(b"e", 3), driver.bump(b"d", 1))
    owner.send(driver.cancel_for_key(b"f"), driver.put(b"of the session", FAR_NS))


def unsent(core: Purgatory) -> None:
    """Let timers fire, but do not send their notices before the kill."""
    core.put("unsent", S, payload=b"u")
    core.put("unsent too", S, topic=b"u", namespace=b"other")
    core.advance(core.now_ns + 2 * S)


def build() -> tuple[Purgatory, Owner]:
    """Return (core, owner) in the state of the kill."""
    core = Purgatory(**CONFIG)
    lib.pg_start_epoch(core.a, CONFIG["boot_id"])
    owner = Owner(core, NONCE)
    fired_before(core)
    timers(core)
    operations(owner)
    core.publish_all()
    unsent(core)
    core.advance(KILLED_NS)
    lib.pg_heartbeat(core.a, KILLED_NS, 100, 50, 10, 0)
    lib.pg_set_state(core.a, lib.PG_READY, 4242)
    core.check()
    return core, owner


def contents(core: Purgatory, owner: Owner) -> dict[str, Any]:
    """Return the contents of the arena that tests compare with."""
    return {
        "abi": [int(core.header.abi_major), int(core.header.abi_minor)],
        "layout_id": LAYOUT_ID,
        "wal": [lib.PG_WAL_MAJOR, lib.PG_WAL_MINOR],
        "boot_id_offset": ffi.offsetof("struct pg_header", "boot_id"),
        "uid_offsets": [uid_offset(core, row) for row in range(CONFIG["sessions"])],
        "killed_ns": KILLED_NS,
        "wall_offset_ns": WALL_OFFSET_NS,
        "next_ticket": int(core.header.next_ticket),
        "timers": [timer_record(info) for info in core.scan()],
        "replay_buffer": [entry_record(core, entry) for entry in core.entries()],
        "watermarks": [
            [key.hex(), int(row.watermark), int(row.error)] for key, row in core.watermarks()
        ],
        "operations": [operation_record(core, slot) for slot in core.operations()],
        "session": {
            "id": owner.id,
            "nonce": NONCE.to_bytes(16, "little").hex(),
            "last": owner.sequence,
            "batch": owner.newest.hex(),
            "reply": owner.again().data.hex(),
        },
    }


def uid_offset(core: Purgatory, row: int) -> int:
    """Return the byte offset of a session's uid in the private arena file."""
    at = core.secret.rows_offset + row * ffi.sizeof("struct pg_session")
    return int(at + ffi.offsetof("struct pg_session", "uid"))


def timer_record(info: wire.Info) -> dict[str, Any]:
    return {
        "key": text(info.key), "namespace": info.namespace, "topic": info.topic,
        "ticket": info.ticket, "deadline_ns": info.deadline_ns, "wall_ns": info.wall_ns,
        "payload": info.payload.hex(),
    }  # fmt: skip


def entry_record(core: Purgatory, entry: Entry) -> dict[str, Any]:
    return {
        "position": entry.position, "sent": entry.position < core.header.published,
        "key": [("str", "bytes", "uuid")[entry.key_type], entry.key.hex()],
        "namespace": entry.namespace.decode(), "topic": entry.topic.decode(),
        "sequence": entry.sequence, "ticket": entry.ticket, "deadline_ns": entry.deadline_ns,
        "fired_ns": entry.fired_ns, "cause": entry.cause, "payload": entry.payload.hex(),
    }  # fmt: skip


def operation_record(core: Purgatory, slot: int) -> dict[str, Any]:
    op, hot = core.operation(slot), core.rows(lib.PG_R_HOT, "pg_hot")[slot]
    cold = core.rows(lib.PG_R_COLD, "pg_cold")[slot]
    at = cold.blob * lib.PG_GRANULE + cold.ext_len
    key = bytes(core.region(lib.PG_R_BLOBS)[at : at + cold.key_len])
    return {
        "key": key.hex(), "ticket": int(hot.ctl >> 8), "condition": int(op.condition),
        "deadline_ns": int(hot.deadline_ns), "armed_ns": int(op.armed_ns),
        "cause": int(op.cause), "keys": int(op.keys), "error": int(op.error),
        "notice": op.notice_blob != NIL,
    }  # fmt: skip


def arena_files(core: Purgatory) -> dict[str, bytes]:
    return {"arena": core.arena[:], "private": core.private[:]}


def export_files(core: Purgatory) -> dict[str, bytes]:
    """Return the files that `stop --export` writes."""
    file = io.BytesIO()
    write_snapshot(Reader(ArenaFile("stored", core.arena)), file, quiet=True)
    return {"export": file.getvalue()}


# ---- a WAL -----------------------------------------------------------------------------

BOOTS = 3
ROUNDS = 20
"""Number of rounds of each boot. Their records do not fit into one segment."""
BULK_LOAD_ROWS = 8
"""Number of rows that a round adds to the bulk load."""
WAL_CONFIG = CONFIG | {
    "capacity": 2048, "replay_capacity": 2048, "replay_bytes_max": 1 << 20,
    "payload_bytes": 1 << 22, "wal_buffer_bytes": WAL_BUFFER_BYTES, "bulk_loads": 2,
    "bulk_load_blocks": 2,
}  # fmt: skip


def write_wal(directory: Path) -> None:
    """Write all files of a daemon's WAL folder. The newest segment is not sealed."""
    core = Purgatory(**WAL_CONFIG)
    for boot in range(BOOTS):
        lib.pg_start_epoch(core.a, bytes([boot + 1] * 16))
        write_snapshot_file(core, directory)
        group_commit = GroupCommit(core, directory)
        owner = Owner(core, NONCE + boot)
        for number in range(ROUNDS):
            wal_round(core, owner, f"{boot}-{number}")
            bulk_load_round(core, owner, (boot * ROUNDS + number) * BULK_LOAD_ROWS)
            late_round(core, f"{boot}-{number}")
            core.check()
            group_commit.commit()
        owner.send(driver.put(b"of boot %d" % boot, FAR_NS))
        owner.bye()
        lib.pg_wal_append_metrics(core.a, core.now_ns)
        group_commit.commit()
        group_commit.close()


def write_snapshot_file(core: Purgatory, directory: Path) -> None:
    lsn = int(lib.pg_wal_buffer_of(core.a).next_lsn)
    with (directory / file_name(lsn, ".snapshot")).open("wb") as file:
        write_snapshot(Reader(ArenaFile("stored", core.arena)), file, quiet=True)


def wal_round(core: Purgatory, owner: Owner, name: str) -> None:
    """Fire, cancel, replace and extend timers; end operations with every outcome."""
    begin_ns, of = core.now_ns, name.encode()
    keys = [b"%s/%d" % (of, i) for i in range(20)]
    owner.send(*(driver.put(key, S + i, payload=key * 8) for i, key in enumerate(keys)))
    core.put(f"wall {name}", begin_ns + WALL_OFFSET_NS + S, TimeKind.WALL, topic=b"u")
    core.put(UUID(int=begin_ns), S // 2, namespace=b"other", payload=of)
    owner.send(*(driver.put(key, 2 * S, PutMode.EXTEND) for key in keys[:4]))
    owner.send(*(driver.put(key, 2 * S, PutMode.REPLACE) for key in keys[4:8]))
    core.advance(begin_ns + S // 10)
    owner.send(*(driver.cancel(key) for key in keys[8:12]))
    outcomes(owner, of)
    core.advance(begin_ns + 3 * S)
    core.publish_all()
    owner.ack(*(mail.ack() for mail in owner.mail()))


def bulk_load_round(core: Purgatory, owner: Owner, first: int) -> None:
    """Add rows of a bulk load; cancel, replace and fire their timers; let one row replace a timer;
    repeat a batch."""
    keys = [b"row %d" % (first + i) for i in range(BULK_LOAD_ROWS)]
    owner.send(driver.put(keys[0], S))
    owner.bulk_load((b"a bulk load, 16b", first, 0),
               *(driver.put(key, 2 * S, PutMode.REPLACE) for key in keys))  # fmt: skip
    answered(core, owner, 1)
    owner.send(*(driver.cancel(key) for key in keys[:3]))
    owner.send(driver.put(keys[3], 2 * S, PutMode.REPLACE))
    answered(core, owner, 2)
    answered(core, owner, 2)
    core.advance(core.now_ns + 3 * S)
    core.publish_all()


def late_round(core: Purgatory, name: str) -> None:
    """Skip and coalesce timers of topics that were paused until the timers were late."""
    policies = ((b"skips", LatePolicy.SKIP), (b"coalesces", LatePolicy.COALESCE))
    for topic, policy in policies:
        set_topic(core, topic, wire.TopicChanges(late=(policy, S), paused=True))
        for i in range(3):
            core.put(f"{name} {policy} {i}", i * S // 10, topic=topic)
    core.advance(core.now_ns + 3 * S)
    for topic, _ in policies:
        set_topic(core, topic, wire.TopicChanges(paused=False))
    core.advance(core.now_ns + S)
    core.publish_all()


def set_topic(core: Purgatory, topic: bytes, changes: wire.TopicChanges) -> None:
    message = wire.encode_topic_set(1, b"n", topic, changes)
    error, answer = core.set_topic(message[wire.FRAME.size :])
    assert (error, answer.status) == (0, Status.DONE)


def answered(core: Purgatory, owner: Owner, batches: int) -> None:
    """Write records of the answers to the newest `batches` batches."""
    core.advance(core.now_ns + 1000)
    first = owner.sequence - batches + 1
    lib.pg_replied(core.a, owner.id, first, batches, core.now_ns, core.now_ns + 500)


def outcomes(owner: Owner, of: bytes) -> None:
    watermark, own, broken = b"watermark " + of, b"own key of " + of, b"broken " + of
    owner.send(
        driver.watch(b"all " + of, driver.ALL, [Key(watermark, 2), Key(own, 1)], S, notice=True),
        driver.watch(b"sum " + of, driver.SUM, [Key(watermark, 0, 9)], S, threshold=3, payload=of),
        driver.watch(b"any " + of, driver.ANY, [Key(watermark, 99), Key(own, 99)], S, notice=True),
        driver.watch(b"failed " + of, driver.ALL, [Key(broken, 1, own=True)], S),
        driver.watch(b"cancelled " + of, driver.CLIENT, [Key(watermark, 0)], S),
    )
    owner.send(driver.advance(watermark, 2), driver.advance(own, 5), driver.bump(watermark, 1))
    owner.send(driver.fail(broken, 7), driver.cancel(b"cancelled " + of))
    owner.send(driver.clear(broken), driver.forget(watermark), driver.forget(own))


def wal_contents(directory: Path) -> dict[str, Any]:
    """Return what a reader has to find in the segments, such as the number of records by kind."""
    walk, kinds = Walk(), Counter[str]()
    for file in segments(directory):
        walk.enter(file.path)
        kinds.update(frame.kind for frame in walk.frames())
        walk.check()
    return {"wal": [lib.PG_WAL_MAJOR, lib.PG_WAL_MINOR],
            "uuid": CONFIG["uuid"].hex(), "last_lsn": walk.lsn, "kinds": kinds}  # fmt: skip


def folder_of(kind: str, version: list[int]) -> Path:
    folder = HERE / f"{kind}-{'.'.join(map(str, version))}"
    folder.mkdir(exist_ok=True)
    return folder


def save(folder: Path, kind: str, found: dict[str, Any], files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / f"{name}.xz").write_bytes(lzma.compress(data, preset=9))
    (folder / f"{kind}.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    core, owner = build()
    found = contents(core, owner)
    wal = folder_of("wal", found["wal"])
    save(folder_of("arena", found["abi"]), "arena", found, arena_files(core))
    save(wal, "export", found, export_files(core))
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        write_wal(directory)
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        save(wal, "wal", wal_contents(directory), files)


if __name__ == "__main__":
    main()
