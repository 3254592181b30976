"""A uid's share of topics, namespaces, sessions, watch keys, watch records, operations, bulk loads
and their blocks. Tested in the core, and with a real daemon that another uid fills."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import purgatory_driver as pd
import pytest
import raw_wire as raw
from core_driver import Fault
from other_user import run_as
from purgatory_driver import ANY, Command, Key, Owner, Purgatory
from raw_owner import Raw as Silent
from raw_owner import trigger
from raw_owner import watch as watch_of
from raw_wire import Raw
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, remove_arena_files
from wal_driver import Redo, Snapshot, Wal

from purgatoryd.cli.arena import uid_record
from purgatoryd.clients import (
    AnyOf,
    BulkLoad,
    Client,
    Full,
    QuotaExceeded,
    UidShareExceeded,
)
from purgatoryd.clients import Purgatory as PurgatoryClient
from purgatoryd.clients.packing import refusal
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.layout import BulkLoadAction, Op, Quota, Status, WireError
from purgatoryd.shm_layout.shards import Placement, ShardTable, read_table, write_table

pytestmark = pytest.mark.tier("check")

SECOND_NS = 10**9
FAR_NS = 3600 * SECOND_NS
ROOT, ALICE, BOB, DAEMON = 0, 1001, 1002, 1003
SIZES: dict[str, Any] = {
    "topics": 8, "namespaces": 8, "sessions": 8, "watches": 8, "watermarks": 8, "accounts": 8,
    "capacity": 64, "now_ns": SECOND_NS, "watermark_ttl_ns": FAR_NS,
    "bulk_loads": 8, "bulk_load_blocks": 64,
}  # fmt: skip
SHARE = 4
"""Number of rows that a uid may have in each table: a half of the table."""


@pytest.fixture
def core() -> Iterator[Purgatory]:
    core = Purgatory(**SIZES)
    core.set_uid_share(50, DAEMON)
    yield core
    core.check()


def named(owner: Owner, names: list[tuple[bytes, bytes]], *commands: Command) -> list[pd.Answer]:
    """Send a batch whose name table has these (namespace, topic) pairs."""
    with mock.patch.object(pd, "NAMES", names):
        return owner.send(*commands)


def put_in(owner: Owner, namespace: bytes, topic: bytes) -> pd.Answer:
    """Arm a timer in a namespace and a topic. Its key contains the uid and both names."""
    put = pd.put(b"%d-%s-%s" % (owner.uid, namespace, topic), FAR_NS)
    return named(owner, [(namespace, topic)], put)[0]


def topic(owner: Owner, n: int) -> pd.Answer:
    return put_in(owner, b"home", b"%d-%d" % (owner.uid, n))


def namespace(owner: Owner, n: int) -> pd.Answer:
    """Create a namespace without a topic: advance a watch key in it, and forget the key."""
    names = [(b"%d-%d" % (owner.uid, n), b"")]
    answers = named(owner, names, pd.advance(b"k", 1), pd.forget(b"k"))
    return answers[0]


def watch_key(owner: Owner, n: int) -> pd.Answer:
    return owner.send(pd.advance(b"%d-%d" % (owner.uid, n), 1))[0]


def watch(owner: Owner, n: int) -> pd.Answer:
    """Arm an operation with one watch record, on the key that all operations of the tests watch."""
    return owner.send(pd.watch(b"o%d-%d" % (owner.uid, n), ANY, [Key(b"all", 9)]))[0]


def watch_two(owner: Owner, n: int) -> pd.Answer:
    keys = [Key(b"all", 9), Key(b"other", 9)]
    return owner.send(pd.watch(b"p%d-%d" % (owner.uid, n), ANY, keys))[0]


def identity(owner: Owner, n: int) -> bytes:
    return b"%d-%d" % (owner.uid, n) + bytes(10)


def bulk_load(owner: Owner, n: int) -> pd.Answer:
    put = pd.put(b"row of %d-%d" % (owner.uid, n), FAR_NS)
    with mock.patch.object(pd, "NAMES", [(b"home", b"root")]):
        return owner.bulk_load((identity(owner, n), 0, 0), put)[0]


Fill = Callable[[Owner, int], pd.Answer]
TABLES: list[tuple[str, Fill, str, str]] = [
    ("topics", topic, "topics", "--topics"),
    ("namespaces", namespace, "namespaces", "--namespaces"),
    ("watch_keys", watch_key, "watch keys", "--watch-keys"),
    ("watches", watch, "watch records", "--watches"),
    ("bulk_loads", bulk_load, "bulk loads", "--bulk-loads"),
]
EVERY_TABLE = pytest.mark.parametrize(
    ("table", "fill", "resource", "setting"), TABLES, ids=[row[0] for row in TABLES]
)


def held_by(core: Purgatory, uid: int) -> dict[str, int]:
    """Return by table how many rows a uid has, from its account and from the names that it
    created."""
    rows = core.rows(lib.PG_R_ACCOUNTS, "pg_account")
    used = [rows[i] for i in range(core.config["accounts"]) if rows[i].in_use]
    counts = [(a.sessions, a.watch_keys, a.watches) for a in used if a.uid == uid] or [(0, 0, 0)]
    names: dict[str, int] = {}
    for name, region, row in (
        ("topics", lib.PG_R_TOPICS, "pg_topic"),
        ("namespaces", lib.PG_R_NAMESPACES, "pg_namespace"),
    ):
        table = core.rows(region, row)
        created = (table[i] for i in range(core.config[name]) if table[i].name_len)
        names[name] = sum(one.created_uid == uid for one in created)
    names["bulk_loads"] = sum(one.uid == uid for one in core.bulk_loads().values())
    return names | dict(zip(("sessions", "watch_keys", "watches"), counts[0], strict=True))


def refused(answer: pd.Answer) -> QuotaExceeded:
    error = refusal("k", answer.ticket << 8 | answer.status, answer.ended)
    assert isinstance(error, QuotaExceeded), error
    return error


def prepared(core: Purgatory) -> tuple[Owner, Owner]:
    """Return (Alice, Bob) after root has created the names and the watch key that they use."""
    root = Owner(core, 9, ROOT)
    names = [(b"n", b"t"), (b"other", b"t"), (b"home", b"")]
    named(root, names, pd.put(b"x", FAR_NS), pd.put(b"y", FAR_NS, name=1), pd.advance(b"all", 0))
    named(root, [(b"home", b"root")], pd.put(b"z", FAR_NS))
    return Owner(core, 1, ALICE), Owner(core, 2, BOB)


# ---- refusal ---------------------------------------------------------------------------------


@EVERY_TABLE
def test_a_uid_beyond_its_share_is_refused_alone(
    core: Purgatory, table: str, fill: Fill, resource: str, setting: str
) -> None:
    alice, bob = prepared(core)
    answers = [fill(alice, n) for n in range(SHARE + 2)]
    assert [a.status < Status.FULL for a in answers] == [True] * SHARE + [False] * 2
    for answer in answers[SHARE:]:
        error = refused(answer)
        figures = (error.whose, error.resource, error.uid, error.used, error.limit)
        assert figures == ("uid", resource, ALICE, SHARE, SHARE)
        assert f"uid {ALICE} holds {SHARE} {resource}" in str(error)
        assert f"one uid may hold {SHARE}; raise --uid-share or {setting}" in str(error)
    assert held_by(core, ALICE)[table] == SHARE
    assert fill(bob, 0).status < Status.FULL
    assert core.metrics.refused_quota == 2


def test_a_session_beyond_the_share_is_refused(core: Purgatory) -> None:
    owners = [Owner(core, n, ALICE) for n in range(1, SHARE + 1)]
    with pytest.raises(AssertionError):
        Owner(core, 7, ALICE)
    hello = wire.decode_reply(core.send(wire.encode_hello(bytes(16)), None, ALICE))
    error = hello.refusal()
    assert isinstance(error, UidShareExceeded)
    assert (error.resource, error.uid, error.used, error.limit) == ("sessions", ALICE, SHARE, SHARE)
    assert "raise --uid-share or --sessions" in str(error)
    again = wire.decode_reply(core.send(wire.encode_hello((1).to_bytes(16, "little")), None, ALICE))
    # the daemon answers the nonce of an open session with this session
    assert (again.error, again.session) == (0, owners[0].id)
    Owner(core, 8, BOB)
    owners[0].bye()
    Owner(core, 7, ALICE)
    assert held_by(core, ALICE)["sessions"] == SHARE


@EVERY_TABLE
@pytest.mark.parametrize("uid", [ROOT, DAEMON])
def test_root_and_the_daemon_have_no_limit(
    core: Purgatory, table: str, fill: Fill, resource: str, setting: str, uid: int
) -> None:
    prepared(core)
    owner = Owner(core, 3, uid)
    answers = [fill(owner, n) for n in range(SHARE + 1)]
    assert all(a.status < Status.FULL for a in answers)
    assert held_by(core, uid)[table] > SHARE


@pytest.mark.parametrize("percent", [0, 100])
def test_without_a_limit_a_uid_may_have_the_whole_table(core: Purgatory, percent: int) -> None:
    alice, _ = prepared(core)
    core.set_uid_share(percent, DAEMON)
    answers = [watch(alice, n) for n in range(SIZES["watches"] + 1)]
    assert answers[-2].status == Status.ADDED
    assert answers[-1].status == Status.FULL_WATCHES


def test_a_share_below_one_row_is_one_row(core: Purgatory) -> None:
    alice, _ = prepared(core)
    core.set_uid_share(1, DAEMON)
    assert watch(alice, 0).status == Status.ADDED
    assert refused(watch(alice, 1)).limit == 1


def test_a_watch_of_more_keys_than_are_left_changes_nothing(core: Purgatory) -> None:
    alice, bob = prepared(core)
    for n in range(SHARE - 1):
        watch(alice, n)
    before = held_by(core, ALICE)
    assert refused(watch_two(alice, 0)).used == SHARE - 1
    for n in range(SHARE):
        watch_key(alice, n)
    new_key = pd.watch(b"new", ANY, [Key(b"all", 9), Key(b"never was", 9)])
    assert refused(bob.send(pd.watch(b"b", ANY, [Key(b"b%d" % n, 9) for n in range(5)]))[0])
    assert refused(alice.send(new_key)[0]).resource == "watch records"
    assert held_by(core, ALICE) == before | {"watch_keys": SHARE}
    assert held_by(core, BOB)["watch_keys"] == 0
    assert watch(alice, SHARE).status == Status.ADDED


def test_a_refused_topic_leaves_no_namespace(core: Purgatory) -> None:
    alice, _ = prepared(core)
    for n in range(SHARE):
        topic(alice, n)
    assert refused(put_in(alice, b"new", b"t")).resource == "topics"
    assert held_by(core, ALICE)["namespaces"] == 0


def test_a_uid_at_its_share_gives_an_idle_topic_of_its_own_for_a_new_one(core: Purgatory) -> None:
    alice, bob = prepared(core)
    mine = [topic(alice, n) for n in range(SHARE)]
    assert refused(topic(alice, SHARE))
    named(alice, [(b"home", b"")], pd.cancel(b"%d-home-%d-0" % (ALICE, ALICE)))
    assert [topic(alice, SHARE).status for _ in range(1)] == [Status.ADDED]
    assert refused(topic(alice, SHARE + 1))
    assert topic(bob, 0).status == Status.ADDED
    assert len(mine) == held_by(core, ALICE)["topics"]


def test_released_rows_can_be_used_again(core: Purgatory) -> None:
    alice, _ = prepared(core)
    for n in range(SHARE):
        watch_key(alice, n)
        watch(alice, n)
    assert refused(watch_key(alice, 9))
    assert refused(watch(alice, 9))
    alice.send(pd.forget(b"%d-0" % ALICE), pd.cancel(b"o%d-0" % ALICE))
    assert watch_key(alice, 9).status == Status.DONE
    assert watch(alice, 9).status == Status.ADDED
    assert refused(watch_key(alice, 10))
    assert refused(watch(alice, 10))


def test_an_administrator_other_than_root_has_a_limit(core: Purgatory) -> None:
    for n in range(SHARE):
        body = wire.encode_namespace_set(1, b"n%d" % n, {})[wire.FRAME.size :]
        assert core.set_namespace_raw(body, ALICE)[0] == 0
    body = wire.encode_namespace_set(1, b"more", {})[wire.FRAME.size :]
    error, detail, _ = core.set_namespace_raw(body, ALICE)
    assert error == WireError.QUOTA
    assert detail == (SHARE << 8 | Quota.UID_NAMESPACES, ALICE << 32 | SHARE)
    assert core.set_namespace_raw(body, ROOT)[0] == 0


# ---- operations and blocks -------------------------------------------------------------------

SLOTS = 16


def outcome(owner: Owner, n: int) -> pd.Answer:
    """Arm an operation that ends at once, so that the owner has an unacknowledged outcome."""
    return owner.send(pd.watch(b"e%d-%d" % (owner.uid, n), ANY, [Key(b"all", 0)]))[0]


def with_outcomes(**more: Any) -> tuple[Purgatory, Owner, Owner]:
    """Return (core, Alice, Bob). Alice has as many outcomes as her share allows."""
    core = Purgatory(**(SIZES | {"capacity": SLOTS} | more))
    core.set_uid_share(50, DAEMON)
    alice, bob = prepared(core)
    for n in range(SLOTS // 2):
        assert outcome(alice, n).status == Status.ADDED
    return core, alice, bob


def operations_of(core: Purgatory, uid: int) -> int:
    rows = core.rows(lib.PG_R_ACCOUNTS, "pg_account")
    used = [rows[i] for i in range(core.config["accounts"]) if rows[i].in_use]
    return sum(int(row.operations) for row in used if row.uid == uid)


def test_outcomes_that_nobody_acknowledges_leave_slots_to_other_uids() -> None:
    core, alice, bob = with_outcomes()
    for owner in (alice, Owner(core, 5, ALICE)):
        error = refused(outcome(owner, 90))
        figures = (error.resource, error.uid, error.used, error.limit)
        assert figures == ("operations", ALICE, SLOTS // 2, SLOTS // 2)
        assert "acknowledge outcomes, raise --uid-share or --capacity" in str(error)
    assert outcome(bob, 0).status == Status.ADDED
    assert bob.send(pd.put(b"timer", FAR_NS))[0].status == Status.ADDED
    alice.ack(alice.mail()[0].ack())
    assert outcome(alice, 91).status == Status.ADDED
    assert refused(outcome(alice, 92))
    alice.bye()
    assert operations_of(core, ALICE) == 0
    again = Owner(core, 6, ALICE)
    assert outcome(again, 0).status == Status.ADDED
    core.check()


@pytest.mark.parametrize("uid", [ROOT, DAEMON])
def test_root_and_the_daemon_own_operations_without_limit(uid: int) -> None:
    core = Purgatory(**(SIZES | {"capacity": SLOTS}))
    core.set_uid_share(50, DAEMON)
    prepared(core)
    owner = Owner(core, 3, uid)
    assert [outcome(owner, n).status for n in range(SLOTS - 3)] == [Status.ADDED] * (SLOTS - 3)
    assert outcome(owner, SLOTS).status == Status.FULL


@pytest.mark.parametrize("by", ["a rebuild", "a migration"])
def test_owned_operations_are_counted_again(by: str) -> None:
    core, alice, bob = with_outcomes()
    if by == "a rebuild":
        rows = core.rows(lib.PG_R_ACCOUNTS, "pg_account")
        for i in range(SIZES["accounts"]):
            rows[i].operations = 77
        core.attach()
        core.rebuild(core.now_ns)
    else:
        core = core.migrated(capacity=2 * SLOTS)
        core.set_uid_share(25, DAEMON)
    alice.core = bob.core = core
    error = refused(outcome(alice, 90))
    assert (error.resource, error.used) == ("operations", SLOTS // 2)
    assert operations_of(core, ALICE) == SLOTS // 2
    assert outcome(bob, 0).status == Status.ADDED
    core.check()


def test_check_finds_a_wrong_count_of_operations() -> None:
    core, _, _ = with_outcomes()
    rows = core.rows(lib.PG_R_ACCOUNTS, "pg_account")
    row = next(rows[i] for i in range(SIZES["accounts"]) if rows[i].uid == ALICE)
    row.operations -= 1
    with pytest.raises(Fault, match="quotas"):
        core.check()


BLOCKS = 8
BLOCK: int = lib.PG_BULK_LOAD_BLOCK_ROWS


def row_of(owner: Owner, n: int) -> pd.Answer:
    """Add a row of one bulk load; each row is in another block."""
    put = pd.put(b"%d row %d" % (owner.uid, n), FAR_NS)
    with mock.patch.object(pd, "NAMES", [(b"home", b"root")]):
        return owner.bulk_load((identity(owner, 0), n * BLOCK, 0), put)[0]


def test_a_uid_beyond_its_share_of_blocks_is_refused_alone() -> None:
    core = Purgatory(**(SIZES | {"bulk_load_blocks": BLOCKS}))
    core.set_uid_share(50, DAEMON)
    alice, bob = prepared(core)
    answers = [row_of(alice, n) for n in range(BLOCKS // 2 + 1)]
    assert [a.status for a in answers[:-1]] == [Status.ADDED] * (BLOCKS // 2)
    error = refused(answers[-1])
    assert (error.used, error.limit, error.uid) == (BLOCKS // 2, BLOCKS // 2, ALICE)
    assert "blocks of 4096 rows of bulk loads" in str(error)
    assert "raise --uid-share or --bulk-load-rows" in str(error)
    assert row_of(alice, 0).status == Status.BULK_LOADED
    assert row_of(bob, 0).status == Status.ADDED
    core.attach()
    core.rebuild(core.now_ns)
    assert refused(row_of(alice, 90)).used == BLOCKS // 2
    core.check()
    alice.ask_bulk_load(identity(alice, 0), BulkLoadAction.FORGET)
    assert row_of(alice, 91).status == Status.ADDED
    core.check()


def test_opening_a_bulk_load_beyond_the_share_is_refused(core: Purgatory) -> None:
    alice, bob = prepared(core)
    for n in range(SHARE):
        alice.ask_bulk_load(identity(alice, n), BulkLoadAction.OPEN, namespace=b"home")
    with pytest.raises(UidShareExceeded) as caught:
        alice.ask_bulk_load(identity(alice, 9), BulkLoadAction.OPEN, namespace=b"home")
    error = caught.value
    figures = (error.resource, error.uid, error.used, error.limit)
    assert figures == ("bulk loads", ALICE, SHARE, SHARE)
    bob.ask_bulk_load(identity(bob, 0), BulkLoadAction.OPEN, namespace=b"home")
    alice.ask_bulk_load(identity(alice, 0), BulkLoadAction.CLOSE, namespace=b"home")


# ---- the table of accounts -------------------------------------------------------------------


def test_a_full_table_of_accounts_refuses_only_counted_rows() -> None:
    core = Purgatory(**(SIZES | {"accounts": 2}))
    core.set_uid_share(50, DAEMON)
    root = Owner(core, 1, ROOT)
    root.send(pd.put(b"r", FAR_NS), pd.advance(b"all", 0))
    alice, bob = Owner(core, 2, ALICE), Owner(core, 3, BOB)
    assert watch_key(alice, 0).status == Status.DONE
    for answer in (watch_key(bob, 0), watch(bob, 0)):
        error = refusal("k", answer.ticket << 8 | answer.status, answer.ended)
        assert isinstance(error, Full)
        assert "raise --accounts" in str(error)
    assert topic(bob, 0).status == Status.ADDED
    assert bob.send(pd.advance(b"all", 1))[0].status == Status.DONE
    assert [watch_key(alice, n).status for n in range(1, SHARE)] == [Status.DONE] * (SHARE - 1)
    assert refused(watch_key(alice, SHARE))
    core.check()
    root.send(pd.cancel(b"r"), pd.forget(b"all"))
    root.bye()
    # root's account is idle, so Bob can take its row
    assert watch_key(bob, 0).status == Status.DONE
    core.check()


# ---- derived state ---------------------------------------------------------------------------


def filled(core: Purgatory) -> tuple[Owner, Owner]:
    """Return (Alice, Bob) after Alice has used up her share of each table except the sessions."""
    alice, bob = prepared(core)
    for n in range(SHARE):
        for fill in (topic, namespace, watch_key, watch, bulk_load):
            assert fill(alice, n).status < Status.FULL
    return alice, bob


def refuses_alice_alone(core: Purgatory, alice: Owner, bob: Owner) -> None:
    alice.core = bob.core = core
    for n, (_, fill, resource, _) in enumerate(TABLES):
        assert refused(fill(alice, 20 + n)).resource == resource
        assert fill(bob, n).status < Status.FULL
    core.check()


def test_a_rebuild_counts_the_same(core: Purgatory) -> None:
    alice, bob = filled(core)
    before = held_by(core, ALICE)
    tables = ("topics", "namespaces", "watch_keys", "watches", "bulk_loads")
    assert before == dict.fromkeys(tables, SHARE) | {"sessions": 1}
    rows = core.rows(lib.PG_R_ACCOUNTS, "pg_account")
    for i in range(SIZES["accounts"]):
        rows[i].sessions = rows[i].watch_keys = rows[i].watches = 77
    core.attach()
    core.rebuild(core.now_ns)
    assert held_by(core, ALICE) == before
    refuses_alice_alone(core, alice, bob)


@pytest.mark.parametrize("more", [{}, {"accounts": 5}, {"accounts": 300, "watermarks": 9}])
def test_a_migration_counts_the_same(core: Purgatory, more: dict[str, int]) -> None:
    alice, bob = filled(core)
    before = held_by(core, ALICE)
    to = core.migrated(**more)
    assert held_by(to, ALICE) == before
    to.set_uid_share(50 if more.get("watermarks") is None else 45, DAEMON)
    refuses_alice_alone(to, alice, bob)


def test_a_redo_counts_the_same() -> None:
    core = Purgatory(**SIZES, wal_buffer_bytes=lib.PG_WAL_BUFFER_MIN)
    core.set_uid_share(50, DAEMON)
    wal = Wal(core)
    empty = Snapshot(core).finish()
    filled(core)
    wal.take()
    late = Snapshot(core, quiet=True).finish()
    before = held_by(core, ALICE) | {"sessions": 0}
    for snapshot, frames in ((empty.data, wal.data), (late.data, b"")):
        redo = Redo(snapshot, sessions=8)
        redo.frames(snapshot)
        redo.frames(frames)
        again = redo.end(core.now_ns)
        assert held_by(again, ALICE) == before
        again.set_uid_share(50, DAEMON)
        refuses_alice_alone(again, Owner(again, 1, ALICE), Owner(again, 2, BOB))


def test_a_recovered_operation_does_not_refuse_new_topics(core: Purgatory) -> None:
    """The test recovers an arena. After the recovery, the number of operations exceeds the count of
    watch records."""
    Owner(core, 1, ROOT).send(pd.watch(b"op", ANY, [Key(b"w", 1)]))
    snapshot = Snapshot(core, quiet=True).finish().data
    redo = Redo(snapshot, sessions=8)
    redo.frames(snapshot)
    again = redo.end(core.now_ns)
    again.set_uid_share(50, DAEMON)
    (answer,) = Owner(again, 2, ROOT).send(pd.put(b"timer", FAR_NS, name=1))
    assert Status(answer.status) == Status.ADDED


def test_a_smaller_share_refuses_new_rows_alone(core: Purgatory) -> None:
    alice, _ = filled(core)
    core.set_uid_share(25, DAEMON)
    error = refused(watch_key(alice, 9))
    assert (error.used, error.limit) == (SHARE, SHARE // 2)
    assert alice.send(pd.advance(b"%d-0" % ALICE, 5))[0].status == Status.DONE
    assert topic(alice, 0).status == Status.EXISTS
    alice.send(pd.cancel(b"o%d-0" % ALICE))
    assert refused(watch(alice, 9)).used == SHARE - 1


@pytest.mark.parametrize("count", ["sessions", "watch_keys", "watches", "watch key"])
def test_check_finds_a_count_that_is_wrong(core: Purgatory, count: str) -> None:
    filled(core)
    if count == "watch key":
        keys = core.rows(lib.PG_R_WATERMARKS, "pg_watermark")
        row = next(keys[i] for i in range(SIZES["watermarks"]) if keys[i].account)
        row.account = row.account % SIZES["accounts"] + 1
    else:
        accounts = core.rows(lib.PG_R_ACCOUNTS, "pg_account")
        row = next(accounts[i] for i in range(SIZES["accounts"]) if accounts[i].uid == ALICE)
        setattr(row, count, getattr(row, count) + 1)
    with pytest.raises(Fault, match="quotas"):
        core.check()
    if count == "watch key":
        row.account = 0
    core.rebuild(core.now_ns)


# ---- a real daemon ---------------------------------------------------------------------------

MEMBER, OTHER = 61001, 61002  # uids without an entry in any user database
HOUR_S = 3600.0
FLAGS = (
    "--topics", "8", "--namespaces", "8", "--sessions", "8", "--watches", "8", "--watch-keys", "8",
    "--uid-share", "50",
)  # fmt: skip
WAL_FLAGS = ("--wal-segment-bytes", "256K", "--wal-buffer-bytes", "4M")
Refusal = tuple[str, int | None, int | None, int]


def as_member(real: Daemon, uid: int, work: Callable[[], Any]) -> Any:
    real.dir.chmod(0o711)
    return run_as(uid, work, groups=[real.paths.cmd.stat().st_gid])


def until_refused(call: Callable[[int], object]) -> Refusal:
    for n in range(100):
        try:
            call(n)
        except (QuotaExceeded, UidShareExceeded) as error:
            return error.resource, error.uid, error.used, error.limit
    raise AssertionError("none of 100 calls was refused")


def enter(n: int) -> None:
    """Create a namespace by an advance in it."""
    with PurgatoryClient("demo", namespace=f"{n}") as client:
        client.advance("k", 1)
        client.forget("k")


def stay(real: Daemon) -> None:
    """Open a session that outlives its client by an hour."""
    grace = struct.pack("<IIq", 0, 0, 3600 * SECOND_NS)
    with Raw(real.paths.cmd) as client:
        if error := client.ask(raw.frame(raw.HELLO) + os.urandom(16) + grace).error:
            assert error == WireError.QUOTA
            Client("demo").close()


def fill_everything(real: Daemon) -> list[Refusal]:
    refusals = [until_refused(enter)]
    with PurgatoryClient("demo", namespace="0") as client:
        refusals.append(until_refused(lambda n: client.advance(f"k{n}", 1)))

        def watch(n: int) -> None:
            operation = client.watch(f"o{n}", AnyOf({"k0": 9}), timeout=HOUR_S)
            if operation.done:
                operation.result(0)

        refusals.append(until_refused(watch))
    with Client("demo", namespace="0") as timers:
        refusals.append(until_refused(lambda n: timers.add(f"{n}", delay=HOUR_S, topic=f"{n}")))
    return [*refusals, until_refused(lambda n: stay(real))]


def work(real: Daemon) -> str:
    """Add a timer, watch an operation and open sessions, in a namespace of this uid's own."""
    name = f"{os.getuid()}"
    with Client("demo", namespace=name) as client:
        client.add("k", delay=HOUR_S, topic="t", mode="replace")
    with PurgatoryClient("demo", namespace=name) as owner:
        done = owner.watch("o", AnyOf({"w": 1}), timeout=HOUR_S)
        owner.advance("w", 1)
        cause = done.result(PATIENCE_S).cause
        owner.forget("w")
    return cause


def uids(real: Daemon) -> dict[int, dict[str, int]]:
    """Return the rows of `purgatoryd stats` about uids, by uid."""
    reader = Reader.attach(real.paths)
    rows = [uid_record(account) for account in reader.accounts()]
    return {row.pop("uid"): row for row in rows}


@pytest.mark.tier("test")
def test_a_member_that_fills_the_tables_is_refused_alone(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    real = daemon("demo", "--wal-dir", str(daemon_dir / "wal"), *WAL_FLAGS, *FLAGS)
    tables = ("namespaces", "watch keys", "watch records", "topics", "sessions")
    refused_with = [(table, MEMBER, SHARE, SHARE) for table in tables]
    assert as_member(real, MEMBER, lambda: fill_everything(real)) == refused_with
    held = {"topics": 4, "namespaces": 4, "sessions": 4, "watch_keys": 4, "watches": 4}
    eventually(lambda: uids(real)[MEMBER].items() >= held.items())
    assert as_member(real, OTHER, lambda: work(real)) == "satisfied"
    before = uids(real)
    assert before[OTHER].items() >= {"topics": 2, "namespaces": 1, "watch_keys": 0}.items()

    real.kill()
    real.start()
    assert uids(real)[MEMBER] == before[MEMBER]
    with pytest.raises(UidShareExceeded, match=f"uid {MEMBER} holds 4 sessions"):
        as_member(real, MEMBER, lambda: Client("demo"))
    assert as_member(real, OTHER, lambda: work(real)) == "satisfied"

    real.kill()
    remove_arena_files(real.paths)
    real.start()
    assert uids(real)[MEMBER] == before[MEMBER] | {"sessions": 0}
    assert uids(real)[OTHER].items() >= {"topics": 2, "namespaces": 1}.items()

    def again() -> list[Refusal]:
        with PurgatoryClient("demo", namespace="0") as client:
            advance = until_refused(lambda n: client.advance(f"n{n}", 1))
            add = until_refused(lambda n: client.add(f"n{n}", delay=HOUR_S, topic=f"n{n}"))
            return [advance, add]

    assert as_member(real, MEMBER, again) == refused_with[1:4:2]
    Reader.attach(real.paths).check()


def leave_outcomes(real: Daemon) -> list[int]:
    """Leave outcomes in the inbox of a session that outlives its client by an hour."""
    with Silent(real, grace_ns=3600 * SECOND_NS) as owner:
        owner.batch(trigger(Op.ADVANCE_KEY, b"k", 1))
        return [owner.batch(watch_of(b"o%d" % n, b"k", 1))[0][0] for n in range(36)]


def bulk_load_until_refused() -> tuple[Refusal, list[Status]]:
    """Open bulk loads until one is refused. Then add rows to one of them, each in another block,
    until a row is refused."""
    with Client("demo", namespace="mine") as client:
        opened = until_refused(lambda n: client.open_bulk_load(bytes((n + 1,)) * 16))
        rows = [
            client.add_many([(f"{n}", HOUR_S)], bulk_load=BulkLoad(bytes((1,)) * 16, n * BLOCK))
            for n in range(SHARE + 1)
        ]
        return opened, [result.statuses[0] for result in rows]


def add_as_bulk_load() -> list[bool]:
    with Client("demo", namespace="others") as client:
        timers = client.add_many([(f"{n}", HOUR_S) for n in range(16)])
        rows = client.add_many([("row", HOUR_S)], bulk_load=BulkLoad(b"of the other uid"))
        return [timers.ok, rows.ok]


@pytest.mark.tier("test")
def test_outcomes_and_bulk_loads_of_a_member_starve_no_other_uid(daemon: StartDaemon) -> None:
    real = daemon("demo", "--capacity", "64", "--bulk-loads", "8", "--bulk-load-rows", "32768",
                  "--uid-share", "50")  # fmt: skip
    ended = as_member(real, MEMBER, lambda: leave_outcomes(real))
    assert ended == [Status.ADDED] * 32 + [Status.QUOTA] * 4
    refused_with, rows = as_member(real, MEMBER, bulk_load_until_refused)
    assert refused_with == ("bulk loads", MEMBER, SHARE, SHARE)
    assert rows == [Status.ADDED] * SHARE + [Status.QUOTA]
    held = {"operations": 32, "bulk_loads": SHARE, "bulk_load_blocks": SHARE}
    assert uids(real)[MEMBER].items() >= held.items()
    assert as_member(real, OTHER, add_as_bulk_load) == [True, True]
    Reader.attach(real.paths).check()


@pytest.mark.tier("all")
def test_a_reload_changes_the_share(daemon: StartDaemon, tmp_path: Path) -> None:
    settings = tmp_path / "demo.toml"
    settings.write_text("topics = 8\nuid-share = 25\n")
    real = daemon("demo", "--config", str(settings))

    def add(n: int) -> None:
        with Client("demo") as client:
            for i in range(n):
                client.add(f"{i}", delay=HOUR_S, topic=f"{i}", mode="keep")

    as_member(real, MEMBER, lambda: add(2))
    with pytest.raises(QuotaExceeded, match="holds 2 topics, and one uid may hold 2"):
        as_member(real, MEMBER, lambda: add(3))
    settings.write_text("topics = 8\nuid-share = 50\n")
    real.process.send_signal(signal.SIGHUP)
    reader = Reader.attach(real.paths)
    eventually(lambda: reader.header.uid_share == 50)
    as_member(real, MEMBER, lambda: add(4))
    with pytest.raises(QuotaExceeded, match="holds 4 topics, and one uid may hold 4"):
        as_member(real, MEMBER, lambda: add(5))


@pytest.mark.tier("all")
def test_a_deployment_refuses_namespaces_beyond_the_share(daemon: StartDaemon) -> None:
    real = daemon("demo", "--shards", "2", "--namespaces", "8", "--uid-share", "50")

    def enter(n: int) -> None:
        with Client("demo", namespace=f"{os.getuid()}-{n}") as client:
            client.add("k", delay=HOUR_S)

    refused_with = as_member(real, MEMBER, lambda: until_refused(enter))
    assert refused_with == ("namespaces", MEMBER, SHARE, SHARE)
    table = read_table(real.dir, "demo")
    assert table is not None
    assert max(table.created_in(shard, MEMBER) for shard in (0, 1)) == SHARE
    assert as_member(real, OTHER, lambda: Client("demo", namespace="mine").add("k", 1.0).ticket)


def test_the_routing_table_keeps_who_created_a_namespace(tmp_path: Path) -> None:
    table = ShardTable("demo", 1, 1, 2).with_birth(Placement("shop", (1,), MEMBER))
    table = table.with_birth(Placement("nobody's", (0, 1)))
    write_table(tmp_path, table)
    found = read_table(tmp_path, "demo")
    assert found == table
    assert (found.created_in(1, MEMBER), found.created_in(0, MEMBER)) == (1, 0)
