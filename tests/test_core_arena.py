"""An arena's lifecycle: attach and refusals of attach, rebuild, migration, and memory use."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_driver import DERIVED, Core, Entry, Fault, config_struct

from purgatoryd.daemon.config import BOUNDS, Config
from purgatoryd.daemon.store import core_config
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import LAYOUT_ID, PutMode, Status, TimeKind

pytestmark = pytest.mark.tier("check")

SECOND_NS = 10**9
MS = 10**6


def refusal(action: Callable[[], Any]) -> Fault:
    with pytest.raises(Fault) as caught:
        action()
    return caught.value


# ---- attach --------------------------------------------------------------------------------

# Header field -> (wrong value, words of the refusal, expected value)
HEADER: dict[str, tuple[int, str, int]] = {
    "magic": (5, "magic", lib.PG_MAGIC),
    "version": (0, "version mark", lib.PG_MAGIC),
    "abi_major": (2, "ABI major", lib.PG_ABI_MAJOR),
    "layout_id": (1, "layout id", LAYOUT_ID),
    "length": (4096, "length of the arena file", 4096),
    "tick_ns": (999, "tick", 1000),
    "fanout": (257, "fan-out", 256),
    "levels": (99, "levels", 10),
    "replay_capacity": (17, "bits of the replay buffer entries", 1),
    "payload_bytes": (0, "payload bytes", 1),
    "stream_id": (0, "stream id", 1),
}


@pytest.mark.parametrize("field", HEADER)
def test_a_header_field_that_does_not_fit(field: str) -> None:
    core = Core()
    wrong, words, expected = HEADER[field]
    setattr(core.header, field, wrong)
    found = wrong
    if field == "length":
        found = len(core.arena)
    if field == "replay_capacity":
        found = 2
    for reader in (False, True):
        fault = refusal(lambda reader=reader: core.attach(reader=reader))  # type: ignore[misc]
        assert (fault.part, fault.expected, fault.found) == ("header", expected, found)
        assert words in fault.detail


@pytest.mark.parametrize("field", ["capacity", "replay_capacity", "payload_bytes", "fanout"])
def test_sizes_that_the_regions_do_not_have(field: str) -> None:
    core = Core()
    setattr(core.header, field, getattr(core.header, field) * 2)
    fault = refusal(core.attach)
    assert fault.part == "header"
    assert fault.expected != fault.found


@pytest.mark.parametrize("field", ["offset", "length", "stride", "count"])
@pytest.mark.parametrize("region", range(lib.PG_R_COUNT))
def test_a_region_that_is_not_where_it_belongs(region: int, field: str) -> None:
    core = Core()
    row = core.header.regions[region]
    was = getattr(row, field)
    setattr(row, field, was + 64)
    fault = refusal(core.attach)
    # The row counts of these regions are sizes of the arena. A different count would move all later
    # regions.
    sizes = (
        lib.PG_R_NAMESPACES, lib.PG_R_TOPICS, lib.PG_R_WATCHES, lib.PG_R_WATERMARKS,
        lib.PG_R_ACCOUNTS, lib.PG_R_BULK_LOADS, lib.PG_R_BULK_LOAD_BLOCKS, lib.PG_R_GROUPS,
        lib.PG_R_JOBS, lib.PG_R_SCHEDULES, lib.PG_R_CURSORS,
    )  # fmt: skip
    if field != "count" or region not in sizes:
        assert (fault.where, fault.expected, fault.found) == (region, was, was + 64)
    setattr(row, field, was)
    core.attach()


def test_arena_files_of_another_length() -> None:
    core = Core()
    fault = refusal(lambda: core.attach(arena_bytes=100))
    assert (fault.expected, fault.found) == (lib_size("struct pg_header"), 100)
    fault = refusal(lambda: core.attach(arena_bytes=len(core.arena) + 4096))
    assert (fault.expected, fault.found) == (len(core.arena), len(core.arena) + 4096)
    fault = refusal(lambda: core.attach(private_bytes=10))
    assert (fault.expected, fault.found) == (lib_size("struct pg_private"), 10)
    fault = refusal(lambda: core.attach(private_bytes=len(core.private) - 1))
    assert (fault.expected, fault.found) == (len(core.private), len(core.private) - 1)
    fault = refusal(lambda: core.attach(layout_id=LAYOUT_ID + 1))
    assert (fault.expected, fault.found) == (LAYOUT_ID + 1, LAYOUT_ID)
    core.attach()


def lib_size(struct: str) -> int:
    from purgatoryd.shm_layout._core import ffi

    return int(ffi.sizeof(struct))


PRIVATE: dict[str, tuple[int, str]] = {
    "magic": (5, "magic"),
    "version": (0, "version mark"),
    "layout_id": (1, "layout id"),
    "length": (4096, "length"),
    "window": (3, "window"),
    "rows_offset": (0, "rows"),
    "replies_offset": (4096, "replies"),
    "sessions": (0, "replies"),
}


@pytest.mark.parametrize("field", PRIVATE)
def test_a_field_of_the_private_arena_file_that_does_not_fit(field: str) -> None:
    core = Core(sessions=40)
    wrong, words = PRIVATE[field]
    setattr(core.secret, field, wrong)
    fault = refusal(core.attach)
    assert words in fault.detail
    assert fault.expected != fault.found
    core.attach(reader=True)


def test_the_private_arena_file_of_another_arena() -> None:
    core = Core()
    core.secret.uuid[15] = 99
    fault = refusal(core.attach)
    assert "uuid" in fault.detail
    assert (fault.expected >> 56, fault.found >> 56) == (15, 99)


def test_blank_memory_is_no_arena() -> None:
    core = Core()
    core.arena[:] = bytes(len(core.arena))
    assert "magic" in refusal(core.attach).detail


# ---- observable state -----------------------------------------------------------------------


def observe(core: Core) -> dict[str, Any]:
    """Return all state that a client or a subscriber could observe, with tickets and counters."""
    h = core.header
    return {
        "timers": sorted(map(repr, core.scan())),
        "replay_buffer": list(core.entries()),
        "positions": (h.replay_head, h.published, h.replay_tail),
        "tickets": h.next_ticket,
        "topics": core.topic_rows(),
        "stream": (h.stream_id, h.epoch, h.next_incarnation),
        "live": (core.metrics.live, core.metrics.live_wall, core.metrics.blob_bytes),
        "time": h.now_ns,
    }


def busy(**config: Any) -> Core:
    """Return an arena with timers of all kinds, sent and unsent notices, and a session with
    answers."""
    core = Core(**{"capacity": 300, "replay_capacity": 64, "payload_bytes": 1 << 18, **config})
    for i in range(200):
        core.put(f"k{i}", i * 5 * MS, payload=bytes(i), topic=b"t%d" % (i % 3))
    core.put("wall", 5 * SECOND_NS, TimeKind.WALL, namespace=b"m", payload=b"w")
    core.put(b"\0raw", SECOND_NS, namespace=b"m", topic=b"")
    core.advance(150 * MS)
    core.publish_all()
    core.put("k3", SECOND_NS, mode=PutMode.REPLACE, topic=b"t0")
    core.put("k4", SECOND_NS, mode=PutMode.REPLACE, topic=b"t0")
    core.cancel("k4")
    for i in range(100, 120):
        core.cancel(f"k{i}")
    core.advance(200 * MS)
    reply = core.handle(wire.encode_hello(b"n" * 16))
    assert isinstance(reply, wire.Reply)
    core.check()
    return core


def statuses(core: Core) -> list[tuple[Status, int]]:
    """Cancel every key, which removes the armed timers; return (status, ticket) of each cancel."""
    keys: list[wire.Key] = [f"k{i}" for i in range(200)]
    return [core.cancel(key)[:2][::-1] for key in keys]


@pytest.mark.parametrize("seed", range(5))
def test_rebuild_after_damage_of_all_derived_state(seed: int) -> None:
    core, untouched = busy(), busy()
    before = observe(core)
    rng = random.Random(seed)
    for region in DERIVED:
        view = core.region(region)
        if not view:
            continue  # the regions of bulk loads are empty in this arena
        for _ in range(1 + len(view) // rng.choice([1, 10, 1000])):
            view[rng.randrange(len(view))] = rng.randrange(256)
    core.attach()
    core.rebuild(200 * MS)
    core.check()
    assert observe(core) == before
    assert statuses(core) == statuses(untouched)
    core.check()


def fired_keys(core: Core) -> list[bytes]:
    return [e.key for e in core.entries()]


def test_timers_that_came_due_between_advances_fire_in_order() -> None:
    core = Core(capacity=100, replay_capacity=128)
    for i in random.Random(3).sample(range(100), 100):
        core.put(f"{i:02}", 100 * MS + i * MS)
    core.attach()
    core.rebuild(100 * SECOND_NS)
    assert core.next_ns <= 100 * SECOND_NS
    while core.advance(100 * SECOND_NS, budget=7):
        core.check()
    assert fired_keys(core) == [b"%02d" % i for i in range(100)]


def test_wall_timers_follow_the_clock_that_the_arena_wakes_up_to() -> None:
    core = Core(wall_offset_ns=1000 * SECOND_NS)
    core.put("k", 1100 * SECOND_NS, TimeKind.WALL)
    to = core.migrated(wall_offset_ns=1050 * SECOND_NS)
    to.advance(50 * SECOND_NS - 1, wall_offset_ns=1050 * SECOND_NS)
    assert fired_keys(to) == []
    to.advance(50 * SECOND_NS, wall_offset_ns=1050 * SECOND_NS)
    assert fired_keys(to) == [b"k"]


# ---- half-done work --------------------------------------------------------------------------


def test_an_entry_without_its_consequences_counts_as_fired() -> None:
    """The test restores the state of a crash that came after the entry was committed and before the
    timer's slot was freed."""
    core = Core()
    core.put("before", MS, payload=b"1")
    core.advance(MS)
    core.put("k", MS, payload=b"2")
    slot = next(
        i for i in range(17) if core.rows(lib.PG_R_HOT, "pg_hot")[i].ctl & 0xFF == lib.PG_S_ARMED
    )
    armed = bytes(core.region(lib.PG_R_HOT)[32 * slot : 32 * slot + 32])
    topics = bytes(core.region(lib.PG_R_TOPICS))
    core.advance(2 * MS)
    whole = observe(core)
    core.region(lib.PG_R_HOT)[32 * slot : 32 * slot + 32] = armed
    core.region(lib.PG_R_TOPICS)[:] = topics
    core.header.replay_tail = 1
    core.attach()
    core.rebuild(2 * MS)
    core.check()
    assert observe(core) == whole
    assert core.cancel("k").status == Status.FIRED


def test_half_a_replacement_keeps_the_younger_timer() -> None:
    core = Core()
    core.put("k", SECOND_NS, payload=b"old")
    slot, blob = bytes(core.region(lib.PG_R_HOT)[:32]), bytes(core.region(lib.PG_R_BLOBS)[:16])
    core.put("k", 2 * SECOND_NS, mode=PutMode.REPLACE, payload=b"new")
    core.region(lib.PG_R_HOT)[:32], core.region(lib.PG_R_BLOBS)[:16] = slot, blob
    core.attach()
    core.rebuild(0)
    core.check()
    assert [(i.ticket, i.payload) for i in core.scan()] == [(2, b"new")]


def test_a_withdrawal_that_did_not_move_the_head_is_finished() -> None:
    core = Core()
    for i in range(3):
        core.put(f"{i}", MS)
    core.advance(MS)
    core.publish_all()
    oldest = next(core.entries()).key.decode()
    core.rows(lib.PG_R_REPLAY_BUFFER, "pg_entry")[0].commit = 0
    core.attach()
    core.rebuild(MS)
    core.check()
    assert core.header.replay_head == 1
    assert core.cancel(oldest).status == Status.UNKNOWN


# ---- damaged authoritative state ---------------------------------------------------------------


def damage_topic(core: Core) -> None:
    core.rows(lib.PG_R_HOT, "pg_hot")[0].topic = 99


def damage_blob(core: Core) -> None:
    core.rows(lib.PG_R_COLD, "pg_cold")[0].blob = 0xFFFFFFF0


def overlap_blobs(core: Core) -> None:
    cold = core.rows(lib.PG_R_COLD, "pg_cold")
    cold[0].blob = cold[1].blob


def damage_length(core: Core) -> None:
    core.rows(lib.PG_R_COLD, "pg_cold")[0].payload_len = 70000


def damage_entry_topic(core: Core) -> None:
    core.rows(lib.PG_R_REPLAY_BUFFER, "pg_entry")[0].topic = 50


def damage_entry_blob(core: Core) -> None:
    core.rows(lib.PG_R_REPLAY_BUFFER, "pg_entry")[0].blob = 0xFFFFFFF0


def damage_head(core: Core) -> None:
    core.header.replay_head = 5


def damage_tail(core: Core) -> None:
    core.header.replay_tail = 10**6


@pytest.mark.parametrize(
    "damage",
    [
        damage_topic, damage_blob, overlap_blobs, damage_length, damage_entry_topic,
        damage_entry_blob, damage_head, damage_tail,
    ],
)  # fmt: skip
def test_damaged_authoritative_state_is_refused(damage: Callable[[Core], None]) -> None:
    core = Core()
    core.put("fires", MS)
    core.put("x", SECOND_NS)
    core.advance(MS)
    core.put("y", SECOND_NS)
    damage(core)
    core.attach()
    fault = refusal(lambda: core.rebuild(MS))
    assert fault.part
    assert fault.detail


# ---- migration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"capacity": 1000, "payload_bytes": 1 << 20, "replay_capacity": 1024, "sessions": 5},
        {"capacity": 181, "payload_bytes": 1 << 15},
        {"tick_ns": 50_000, "fanout": 64},
        {"namespaces": 2, "topics": 5},
    ],
)
def test_migration_keeps_all_visible_state(sizes: dict[str, int]) -> None:
    core = busy()
    before, untouched = observe(core), core.image()
    to = core.migrated(**sizes)
    assert core.image() == untouched
    to.check()
    assert observe(to) == before
    assert bytes(to.secret.secret) == bytes(core.secret.secret)
    assert to.rows_of_sessions()[0].id == core.rows_of_sessions()[0].id
    assert statuses(to) == statuses(core)
    to.check()


def test_a_smaller_replay_buffer_keeps_the_youngest_notices() -> None:
    core = busy()
    retained: list[Entry] = list(core.entries())[-16:]
    to = core.migrated(replay_capacity=16)
    to.check()
    assert list(to.entries()) == retained
    lost, got, notices = to.replay(b"n", retained[-1].topic, 1, retained[-1].sequence)
    same = [e for e in retained if e.topic == retained[-1].topic]
    assert (lost, got) == (same[0].sequence - 1, retained[-1].sequence)
    assert [n.ticket for n in notices] == [e.ticket for e in same]


def test_a_notice_larger_than_the_replay_buffer_cap_moves_too() -> None:
    core = Core(replay_bytes_max=64)
    core.put("k", MS, payload=bytes(1000))
    core.advance(MS)
    to = core.migrated(capacity=100)
    to.check()
    assert to.cancel("k").status == Status.FIRED


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"capacity": 100}, "timers armed"),
        ({"payload_bytes": 4096}, "payload memory"),
        ({"namespaces": 1}, "namespaces in use"),
        ({"topics": 2}, "topics in use"),
        ({"replay_capacity": 16, "replay_bytes_max": 128}, "notices not sent"),
    ],
)
def test_migration_to_an_arena_that_is_too_small_is_refused(
    sizes: dict[str, int], words: str
) -> None:
    core = busy()
    for i in range(10):
        core.put(f"last{i}", MS)
    core.advance(300 * MS)
    before = core.image()
    fault = refusal(lambda: core.migrated(**sizes))
    assert fault.part == "migrate"
    assert words in fault.detail
    assert fault.expected > fault.found
    assert core.image() == before


def test_migration_refuses_to_lose_a_session() -> None:
    core = Core(sessions=2)
    for nonce in (b"1" * 16, b"2" * 16):
        core.handle(wire.encode_hello(nonce))
    fault = refusal(lambda: core.migrated(sessions=1))
    assert (fault.detail, fault.expected, fault.found) == ("sessions open", 2, 1)


# ---- memory --------------------------------------------------------------------------------------

HOT = ("hot", "free_slots", "wheel", "buckets", "chunks", "free_chunks")
GROWING = (*HOT, "cold", "index", "blob_heap", "blob_map", "blobs")
MEMORY_PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def test_bytes_per_timer(capsys: pytest.CaptureFixture[str]) -> None:
    """Print the size of a full arena with a million timers (16-byte keys, 48-byte payloads) and
    without consumer groups; all other settings have their defaults."""
    timers = 1_000_000
    config = core_config(
        Config("full", capacity=timers, payload_bytes=timers * (16 + 48), groups=0)
    )
    core = Core(**config)
    names = {value: name for name, value in vars(lib).items() if name.startswith("PG_R_")}
    sizes = {
        names[i].removeprefix("PG_R_").lower(): int(core.header.regions[i].length)
        for i in range(lib.PG_R_COUNT)
    }
    hot = sum(sizes[name] for name in HOT) / timers
    growing = sum(sizes[name] for name in GROWING) / timers
    fixed = {name: size for name, size in sizes.items() if name not in GROWING}
    fixed["private"] = lib.pg_private_bytes(config_struct(**config))
    table = [f"| {name} | {sizes[name] / timers:.2f} B |" for name in GROWING]
    table += [f"| all that the wheel touches | {hot:.2f} B |"]
    table += [f"| all that grows with the timers | {growing:.2f} B |"]
    table += [f"| {name} | {size:,} B |" for name, size in fixed.items()]
    with capsys.disabled():
        print("", *table, sep="\n")
    assert hot <= 41
    assert growing <= 132
    page = MEMORY_PAGE.read_text()
    assert [line for line in table if line not in page] == []


def test_the_default_sizes_are_below_64_mib() -> None:
    mib = [
        (lib.pg_arena_bytes(config) + lib.pg_private_bytes(config)) / 2**20
        for wal_dir in ("", "/wal")
        for config in [config_struct(**core_config(Config("default", wal_dir=wal_dir)))]
    ]
    assert mib[0] < mib[1] < 64 < 2 * mib[0], "docs/operations.md: 64 MiB hold one arena, not two"
    assert f"take {mib[0]:.1f} MiB" in MEMORY_PAGE.read_text().replace("\n", " ")


@pytest.mark.parametrize("setting", ["capacity", "namespaces", "sessions", "topics"])
def test_the_core_takes_as_many_as_the_settings_allow(setting: str) -> None:
    most = Config("most", **{setting: BOUNDS[setting][1]})  # type: ignore[arg-type]
    assert lib.pg_arena_bytes(config_struct(**core_config(most))) > 0


def test_a_million_timers_of_that_size_fit() -> None:
    timers = 20_000
    core = Core(capacity=timers, payload_bytes=timers * 64, fanout=64)
    for i in range(timers):
        assert core.put(f"{i:016}", SECOND_NS + i * MS, payload=bytes(48)).status == Status.ADDED
    assert core.put("x", SECOND_NS).status == Status.FULL
    assert core.metrics.blob_bytes == timers * 64
    core.check()
