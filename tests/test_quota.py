"""Owners, quotas and accounts in the core: refusals with figures, and what a quota counts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import purgatory_driver as pd
import pytest
from core_driver import DERIVED, Fault
from effort import effort
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from purgatory_driver import ALL, ANY, CLIENT, SUM, Key, Owner, Purgatory

from purgatoryd.clients.packing import refusal
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.errors import Full, QuotaExceeded, Refused
from purgatoryd.shm_layout.layout import ANYBODY, QUOTA_MAX, Message, Status, WireError

pytestmark = pytest.mark.tier("check")

MS = 1_000_000
SECOND_NS = 10**9
ALICE, BOB, CAROL = 1001, 1002, 1003


def granules(count: int) -> int:
    return int(-(-count // lib.PG_GRANULE) * lib.PG_GRANULE)


def names_of(core: Purgatory) -> dict[bytes, tuple[int, int]]:
    """Return (timers, bytes) of each namespace, as its row counts them."""
    rows = core.rows(lib.PG_R_NAMESPACES, "pg_namespace")
    used = [rows[i] for i in range(core.config["namespaces"]) if rows[i].name_len]
    return {bytes(ffi.buffer(n.name, n.name_len)): (n.live, n.bytes) for n in used}


def accounts_of(core: Purgatory) -> dict[int, tuple[int, int]]:
    """Return (timers, bytes) of each uid, as its account counts them."""
    rows = core.rows(lib.PG_R_ACCOUNTS, "pg_account")
    used = [rows[i] for i in range(core.config["accounts"]) if rows[i].in_use]
    return {a.uid: (a.live, a.bytes) for a in used}


def error_of(answer: pd.Answer) -> Refused:
    """Return the error that a client raises for this answer."""
    return refusal("k", answer.ticket << 8 | answer.status, answer.ended)


def over(answer: pd.Answer) -> tuple[str, str, int, int | None, int | None]:
    error = error_of(answer)
    assert isinstance(error, QuotaExceeded), error
    assert str(error.limit) in str(error)
    return error.whose, error.resource, error.limit, error.used, error.retry_boot_ns


def statuses(answers: list[pd.Answer]) -> list[Status]:
    return [Status(a.status) for a in answers]


@pytest.fixture
def core() -> Iterator[Purgatory]:
    core = Purgatory(accounts=4, now_ns=SECOND_NS, sessions=8)
    yield core
    core.check()


# ---- settings of a namespace ---------------------------------------------------------------


def test_settings_are_set_one_by_one(core: Purgatory) -> None:
    assert core.set_namespace(b"n") == wire.NamespaceSettings()
    core.set_namespace(b"n", owner_uid=ALICE, quota_timers=3)
    core.set_namespace(b"n", quota_ops=7)
    expected = wire.NamespaceSettings(ALICE, 0, 3, 0, 7)
    assert core.set_namespace(b"n", quota_bytes=0) == expected
    core.attach()
    core.rebuild(core.now_ns)
    assert core.set_namespace(b"n") == expected
    assert core.migrated(namespaces=2).set_namespace(b"n") == expected
    assert core.set_namespace(b"n", owner_uid=ANYBODY, quota_timers=0) == (
        ANYBODY,
        0,
        0,
        0,
        7,
        0,
        0,
        0,
    )


SET = wire.NAMESPACE_SET


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", WireError.MALFORMED),
        (SET.pack(0, 0, 0, 1, 0, 0, 0, 0, 0, 0)[:-1], WireError.MALFORMED),
        (SET.pack(0, 0, 0, 1, 0, 0, 0, 0, 0, 0), WireError.MALFORMED),
        (SET.pack(0, 0, 0, 0, 0, 0, 0, 0, 0, 0), WireError.MALFORMED),
        (SET.pack(0, 0, 0, 2**32 - 64, 0, 0, 0, 0, 0, 0), WireError.MALFORMED),
        (SET.pack(0, 0, 0, 64, 0, 0, 0, 0, 0, 0) + b"n" * 64, WireError.MALFORMED),
        (SET.pack(0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"nn", WireError.MALFORMED),
        (SET.pack(0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"\0", WireError.MALFORMED),
        (SET.pack(0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"\xff", WireError.MALFORMED),
        (SET.pack(256, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"n", WireError.MALFORMED),
        (SET.pack(64, 0, 0, 1, 0, 0, 0, 0, 10**9 + 1, 0) + b"n", WireError.TOO_LARGE),
        (SET.pack(128, 0, 0, 1, 0, 0, 0, 0, 0, 2) + b"n", WireError.MALFORMED),
        (SET.pack(32, 0, 0, 1, 0, 0, 0, 5, 0, 0) + b"n", WireError.NO_WAL),
        (SET.pack(2, 0, 2, 1, 0, 0, 0, 0, 0, 0) + b"n", WireError.MALFORMED),
        (SET.pack(2, 0, 1, 1, 0, 0, 0, 0, 0, 0) + b"n", WireError.NO_WAL),
        (SET.pack(4, 0, 0, 1, QUOTA_MAX + 1, 0, 0, 0, 0, 0) + b"n", WireError.TOO_LARGE),
        (SET.pack(8, 0, 0, 1, 0, QUOTA_MAX + 1, 0, 0, 0, 0) + b"n", WireError.TOO_LARGE),
        (SET.pack(16, 0, 0, 1, 0, 0, 10**9 + 1, 0, 0, 0) + b"n", WireError.TOO_LARGE),
    ],
)
def test_bad_settings_change_nothing(core: Purgatory, body: bytes, error: WireError) -> None:
    core.set_namespace(b"n", owner_uid=ALICE)
    before = core.image()
    assert core.set_namespace_raw(body)[0] == error
    assert core.image() == before


def test_settings_of_a_namespace_that_has_no_free_slot(core: Purgatory) -> None:
    for name in (b"a", b"b", b"c", b"d"):
        core.set_namespace(name)
    body = SET.pack(0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"e"
    error, detail, _ = core.set_namespace_raw(body)
    assert (error, detail) == (WireError.NAMESPACES_FULL, (4, 0))


# ---- owners --------------------------------------------------------------------------------


EVERY_OP = [
    pd.put(b"timer", MS),
    pd.put(b"timer", MS, lib.PG_MODE_REPLACE),
    pd.put(b"timer", SECOND_NS * 9, lib.PG_MODE_EXTEND),
    pd.put(b"new", MS),
    pd.cancel(b"timer"),
    pd.cancel(b"operation"),
    pd.watch(b"another", ALL, [Key(b"w", 9)]),
    pd.advance(b"w", 5),
    pd.bump(b"w", 1),
    pd.fail(b"w", 3),
    pd.clear(b"w"),
    pd.forget(b"w"),
    pd.cancel_for_key(b"w"),
    pd.complete(b"operation", 1 << 32),
]


@pytest.mark.parametrize("command", EVERY_OP)
def test_another_uid_is_denied_and_nothing_changes(core: Purgatory, command: pd.Command) -> None:
    core.set_namespace(b"n", owner_uid=ALICE)
    alice, bob = Owner(core, 1, ALICE), Owner(core, 2, BOB)
    alice.send(pd.put(b"timer", SECOND_NS), pd.watch(b"operation", CLIENT, [Key(b"w", 1)]))
    arena, _ = core.image()
    assert bob.send(command) == [pd.Answer(Status.DENIED, 0, 0)]
    assert core.image()[0] == arena
    assert core.metrics.refused_denied == 1
    assert statuses(alice.send(command)) != [Status.DENIED]


def query(core: Purgatory, owner: Owner, key: bytes, namespace: bytes = b"n") -> wire.Info:
    message = wire.encode_query(1, owner.id, namespace, key)
    reply = wire.decode_reply(core.send(message, uid=owner.uid))
    return wire.decode_infos(reply.body, 1)[0]


def test_another_uid_may_not_read_either(core: Purgatory) -> None:
    core.set_namespace(b"n", owner_uid=ALICE)
    alice, bob = Owner(core, 1, ALICE), Owner(core, 2, BOB)
    alice.send(pd.put(b"k", MS, payload=b"secret"))
    assert query(core, alice, b"k").payload == b"secret"
    reported = query(core, bob, b"k")
    assert (reported.status, reported.payload, reported.ticket) == (Status.DENIED, b"", 0)
    assert query(core, bob, b"never was").status == Status.DENIED
    assert query(core, bob, b"k", b"nowhere").status == Status.UNKNOWN


def test_a_denied_record_creates_no_name(core: Purgatory) -> None:
    core.set_namespace(b"n", owner_uid=ALICE)
    Owner(core, 2, BOB).send(pd.put(b"k", MS), pd.put(b"k", MS, name=1))
    assert [row.namespace for row in core.topic_rows().values()] == [b"other"]


def test_other_records_of_the_batch_are_applied(core: Purgatory) -> None:
    core.set_namespace(b"other", owner_uid=ALICE)
    bob = Owner(core, 2, BOB)
    answers = bob.send(pd.put(b"a", MS), pd.put(b"b", MS, name=1), pd.put(b"c", MS))
    assert statuses(answers) == [Status.ADDED, Status.DENIED, Status.ADDED]


def test_a_new_owner_takes_over(core: Purgatory) -> None:
    alice, bob = Owner(core, 1, ALICE), Owner(core, 2, BOB)
    alice.send(pd.put(b"k", MS), pd.watch(b"o", ANY, [Key(b"w", 1)]))
    core.set_namespace(b"n", owner_uid=BOB)
    assert statuses(alice.send(pd.cancel(b"k"))) == [Status.DENIED]
    assert statuses(bob.send(pd.cancel(b"k"), pd.advance(b"w", 1))) == [
        Status.CANCELLED, Status.DONE,
    ]  # fmt: skip
    (mail,) = alice.mail()  # Alice armed `o` when she owned the namespace, so the outcome is hers
    alice.ack(mail.ack())
    assert core.metrics.outcomes == 0
    core.set_namespace(b"n", owner_uid=ANYBODY)
    assert statuses(alice.send(pd.put(b"k", MS))) == [Status.ADDED]


# ---- sessions of another uid ------------------------------------------------------------------


def test_a_nonce_of_another_uid_opens_another_session(core: Purgatory) -> None:
    alice, bob = Owner(core, 1, ALICE), Owner(core, 1, BOB)
    assert alice.id != bob.id
    assert Owner(core, 1, ALICE).id == alice.id


@pytest.mark.parametrize("kind", [Message.BATCH, Message.QUERY, Message.ACK, Message.BYE,
                                  Message.PING])  # fmt: skip
def test_a_session_of_another_uid_is_refused(core: Purgatory, kind: Message) -> None:
    alice = Owner(core, 1, ALICE)
    alice.send(pd.watch(b"o", ANY, [Key(b"w", 1)]), pd.advance(b"w", 1))
    (mail,) = alice.mail()
    messages = {
        Message.BATCH: alice.message([pd.cancel(b"o")]),
        Message.QUERY: wire.encode_query(1, alice.id, b"n", b"o"),
        Message.ACK: wire.encode_frame(Message.ACK, alice.id, count=1) + mail.ack(),
        Message.BYE: wire.encode_frame(Message.BYE, alice.id),
        Message.PING: wire.encode_frame(Message.PING, alice.id),
    }
    before = core.image()
    reply = wire.decode_reply(core.send(messages[kind], uid=BOB))
    assert (reply.error, reply.detail, reply.body) == (WireError.DENIED, (BOB, 0), b"")
    assert core.image() == before
    core.send(messages[kind], uid=ALICE)


# ---- quotas of timers and bytes ---------------------------------------------------------------


@pytest.mark.parametrize("whose", ["namespace", "uid"])
def test_a_quota_of_timers(core: Purgatory, whose: str) -> None:
    if whose == "uid":
        core.set_quotas(timers=2)
    else:
        core.set_namespace(b"n", quota_timers=2)
    alice = Owner(core, 1, ALICE)
    answers = alice.send(
        pd.put(b"a", SECOND_NS), pd.watch(b"b", ALL, [Key(b"w", 1)]), pd.put(b"c", MS),
        pd.watch(b"d", ALL, [Key(b"x", 1)]), pd.put(b"a", MS, lib.PG_MODE_KEEP),
        pd.put(b"a", 2 * SECOND_NS, lib.PG_MODE_EXTEND),
        pd.put(b"a", SECOND_NS, lib.PG_MODE_REPLACE), pd.put(b"a", MS),
    )  # fmt: skip
    assert statuses(answers) == [
        Status.ADDED, Status.ADDED, Status.QUOTA, Status.QUOTA, Status.KEPT, Status.EXTENDED,
        Status.REPLACED, Status.EXISTS,
    ]  # fmt: skip
    assert over(answers[2]) == over(answers[3]) == (whose, "timers", 2, 2, None)
    assert core.metrics.refused_quota == 2
    assert [key for key, _ in core.watermarks()] == [b"w"]  # the refused watch has created no key
    again = alice.send(pd.cancel(b"a"), pd.put(b"c", MS), pd.advance(b"w", 1), pd.put(b"d", MS))
    assert statuses(again) == [Status.CANCELLED, Status.ADDED, Status.DONE, Status.ADDED]
    core.advance(core.now_ns + SECOND_NS)  # both timers fire: no quota refuses that
    assert statuses(alice.send(pd.put(b"e", MS), pd.put(b"f", MS))) == [Status.ADDED] * 2


@pytest.mark.parametrize("whose", ["namespace", "uid"])
def test_a_quota_of_bytes(core: Purgatory, whose: str) -> None:
    if whose == "uid":
        core.set_quotas(bytes_=1024)
    else:
        core.set_namespace(b"n", quota_bytes=1024)
    alice = Owner(core, 1, ALICE)
    answers = alice.send(
        pd.put(b"a", SECOND_NS, payload=bytes(500)), pd.put(b"b", SECOND_NS, payload=bytes(600)),
        pd.put(b"a", SECOND_NS, lib.PG_MODE_REPLACE, payload=bytes(1000)),
        pd.put(b"a", SECOND_NS, lib.PG_MODE_REPLACE, payload=bytes(1024)),
    )  # fmt: skip
    assert statuses(answers) == [Status.ADDED, Status.QUOTA, Status.REPLACED, Status.QUOTA]
    assert over(answers[1]) == (whose, "bytes", 1024, granules(501), None)
    assert over(answers[3]) == (whose, "bytes", 1024, granules(1001), None)


def test_a_record_that_does_not_grow_a_count_is_not_refused(core: Purgatory) -> None:
    alice = Owner(core, 1, ALICE)
    alice.send(*(pd.put(k, SECOND_NS, payload=bytes(100)) for k in (b"a", b"b", b"c")))
    core.set_namespace(b"n", quota_timers=1, quota_bytes=16)
    same = pd.put(b"a", SECOND_NS, lib.PG_MODE_REPLACE, payload=bytes(100))
    less = pd.put(b"b", SECOND_NS, lib.PG_MODE_REPLACE, payload=bytes(1))
    more = pd.put(b"c", SECOND_NS, lib.PG_MODE_REPLACE, payload=bytes(200))
    assert statuses(alice.send(same, less, more)) == [
        Status.REPLACED, Status.REPLACED, Status.QUOTA,
    ]  # fmt: skip


def test_a_replacement_by_another_uid_counts_as_his(core: Purgatory) -> None:
    core.set_quotas(timers=1)
    alice, bob = Owner(core, 1, ALICE), Owner(core, 2, BOB)
    alice.send(pd.put(b"a", SECOND_NS))
    bob.send(pd.put(b"b", SECOND_NS))
    (answer,) = bob.send(pd.put(b"a", SECOND_NS, lib.PG_MODE_REPLACE))
    assert over(answer) == ("uid", "timers", 1, 1, None)
    bob.send(pd.cancel(b"b"))
    assert statuses(bob.send(pd.put(b"a", SECOND_NS, lib.PG_MODE_REPLACE))) == [Status.REPLACED]
    assert accounts_of(core) == {ALICE: (0, 0), BOB: (1, granules(1))}


def test_a_quota_of_a_uid_spans_namespaces_and_not_uids(core: Purgatory) -> None:
    core.set_quotas(timers=1)
    alice, bob = Owner(core, 1, ALICE), Owner(core, 2, BOB)
    answers = alice.send(pd.put(b"a", SECOND_NS), pd.put(b"a", SECOND_NS, name=1))
    assert statuses(answers) == [Status.ADDED, Status.QUOTA]
    assert statuses(bob.send(pd.put(b"b", SECOND_NS, name=1))) == [Status.ADDED]


def test_a_notice_counts_with_its_operation(core: Purgatory) -> None:
    core.set_quotas(timers=9)
    alice = Owner(core, 1, ALICE)
    alice.send(pd.watch(b"o", ANY, [Key(b"w", 1)], payload=bytes(500)))
    plain = accounts_of(core)[ALICE][1]
    alice.send(pd.watch(b"p", ANY, [Key(b"w", 1)], payload=bytes(500), notice=True))
    assert accounts_of(core)[ALICE][1] - plain > plain + 500
    core.check()
    alice.send(pd.advance(b"w", 1))
    assert accounts_of(core)[ALICE] == names_of(core)[b"n"] == (0, 0)


# ---- quotas of operations -----------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["namespace", "uid"])
def test_operations_come_back_evenly(core: Purgatory, whose: str) -> None:
    if whose == "uid":
        core.set_quotas(ops=4)
    else:
        core.set_namespace(b"n", quota_ops=4)
    alice, now_ns = Owner(core, 1, ALICE), core.now_ns
    advances = [pd.advance(b"w", watermark) for watermark in range(6)]
    answers = alice.send(*advances)
    assert statuses(answers) == [Status.DONE] * 4 + [Status.QUOTA] * 2
    retry_ns = now_ns + SECOND_NS // 4
    assert over(answers[4]) == (whose, "operations per second", 4, None, retry_ns)
    core.advance(retry_ns - 1)
    assert over(alice.send(advances[0])[0])[4] == retry_ns
    core.advance(retry_ns)
    assert statuses(alice.send(*advances[:2])) == [Status.DONE, Status.QUOTA]
    core.advance(retry_ns + 10 * SECOND_NS)  # at most the quota of one second is saved
    assert statuses(alice.send(*advances)).count(Status.DONE) == 4


def test_unused_operations_are_not_saved_beyond_a_second(core: Purgatory) -> None:
    core.set_namespace(b"n", quota_ops=4)
    alice = Owner(core, 1, ALICE)
    for _ in range(5):
        assert statuses(alice.send(pd.advance(b"w", 1))) == [Status.DONE]
        core.advance(core.now_ns + 9 * SECOND_NS // 10)
    assert statuses(alice.send(*[pd.advance(b"w", 1)] * 6)).count(Status.DONE) == 4


def test_over_a_long_time_the_rate_is_exact(core: Purgatory) -> None:
    core.set_namespace(b"n", quota_ops=1000)
    alice, done = Owner(core, 1, ALICE), 0
    first_ns = core.now_ns
    rng = random.Random(1)
    while core.now_ns < first_ns + 7 * SECOND_NS:
        answers = alice.send(*(pd.advance(b"w", 1) for _ in range(200)))
        done += statuses(answers).count(Status.DONE)
        core.advance(core.now_ns + rng.randrange(1, 30 * MS))
    allowed = 1000 + 1000 * (core.now_ns - first_ns) // SECOND_NS
    assert allowed - 31 <= done <= allowed


def test_both_quotas_of_operations_are_asked_before_either_is_used(core: Purgatory) -> None:
    core.set_namespace(b"n", quota_ops=2)
    core.set_quotas(ops=3)
    alice = Owner(core, 1, ALICE)
    mine = [pd.advance(b"w", 1)] * 5
    assert over(alice.send(*mine)[2])[0] == "namespace"
    assert statuses(alice.send(pd.put(b"k", MS, name=1), pd.put(b"l", MS, name=1))) == [
        Status.ADDED, Status.QUOTA,
    ]  # fmt: skip


def test_records_that_free_rows_count_no_operation(core: Purgatory) -> None:
    core.set_namespace(b"n", quota_ops=3)
    alice = Owner(core, 1, ALICE)
    alice.send(pd.put(b"a", SECOND_NS), pd.watch(b"o", CLIENT, [Key(b"w", 1)]), pd.advance(b"w", 1))
    (check,) = alice.mail()
    answers = alice.send(
        pd.put(b"b", MS), pd.cancel(b"a"), pd.complete(b"o", check.version), pd.clear(b"w"),
        pd.cancel_for_key(b"w"), pd.forget(b"w"),
    )  # fmt: skip
    assert Status.QUOTA not in statuses(answers[1:])
    assert statuses(answers[:1]) == [Status.QUOTA]
    assert query(core, alice, b"a").status == Status.UNKNOWN


def test_a_long_advance_is_one_operation(core: Purgatory) -> None:
    core = Purgatory(accounts=4, now_ns=SECOND_NS, capacity=4096, watches=4096,
                     payload_bytes=1 << 20)  # fmt: skip
    alice = Owner(core, 1, ALICE)
    for first in range(0, 3000, 1000):
        alice.send(*(pd.watch(b"%d" % n, ANY, [Key(b"w", 1)]) for n in range(first, first + 1000)))
    core.set_namespace(b"n", quota_ops=2)
    calls = []
    answers = alice.send(pd.advance(b"w", 1), pd.advance(b"w", 2), between=lambda: calls.append(1))
    assert calls  # the advance needed more than one call
    assert [a.ended for a in answers] == [3000, 0]
    assert statuses(answers) == [Status.DONE] * 2
    core.check()


def test_a_batch_that_is_sent_again_is_not_counted_again(core: Purgatory) -> None:
    core.set_quotas(ops=2)
    alice = Owner(core, 1, ALICE)
    first = alice.send(pd.advance(b"w", 1))
    assert alice.again().answers == first
    assert statuses(alice.send(pd.advance(b"w", 2))) == [Status.DONE]


# ---- accounts -----------------------------------------------------------------------------------


def test_timers_armed_without_a_quota_count_in_a_later_one(core: Purgatory) -> None:
    alice = Owner(core, 1, ALICE)
    alice.send(pd.put(b"k", SECOND_NS))
    assert accounts_of(core) == {ALICE: (1, granules(1))}
    core.set_quotas(timers=1)
    assert over(alice.send(pd.put(b"l", SECOND_NS))[0]) == ("uid", "timers", 1, 1, None)
    core.set_quotas()
    assert statuses(alice.send(pd.put(b"m", SECOND_NS), pd.cancel(b"k"))) == [
        Status.ADDED, Status.CANCELLED,
    ]  # fmt: skip
    assert accounts_of(core) == {ALICE: (1, granules(1))}


def test_without_quotas_a_full_table_of_accounts_refuses_no_timer(core: Purgatory) -> None:
    owners = [Owner(core, uid, uid) for uid in range(1, 7)]
    for owner in owners:
        assert statuses(owner.send(pd.put(b"%d" % owner.uid, SECOND_NS))) == [Status.ADDED]
    assert sorted(accounts_of(core)) == [1, 2, 3, 4]
    core.set_quotas(timers=9)
    assert statuses(owners[5].send(pd.put(b"k", SECOND_NS))) == [Status.FULL_ACCOUNTS]


def test_an_account_that_was_idle_longest_is_given_away(core: Purgatory) -> None:
    core.set_quotas(timers=9)
    for uid in range(1, 5):
        owner = Owner(core, uid, uid)
        owner.send(pd.put(b"%d" % uid, SECOND_NS * 3600), pd.put(b"x%d" % uid, SECOND_NS))
        owner.bye()
        core.advance(core.now_ns + MS)
    fifth = Owner(core, 5, 5)
    (answer,) = fifth.send(pd.put(b"k", MS))
    assert isinstance(error_of(answer), Full)
    assert (answer.status, answer.ended) == (Status.FULL_ACCOUNTS, 4)
    for uid in (3, 4, 2, 1):
        owner = Owner(core, uid, uid)
        owner.send(pd.cancel(b"%d" % uid), pd.cancel(b"x%d" % uid))
        core.advance(core.now_ns + MS)
        if uid != 3:
            owner.bye()  # uid 3 keeps its session, so its account is not idle
    assert statuses(fifth.send(pd.put(b"k", MS))) == [Status.ADDED]
    assert sorted(accounts_of(core)) == [1, 2, 3, 5]


def test_a_migration_with_too_few_accounts_is_refused(core: Purgatory) -> None:
    core.set_quotas(timers=9)
    for uid in range(1, 5):
        Owner(core, uid, uid).send(pd.put(b"%d" % uid, SECOND_NS))
    with pytest.raises(Fault, match="accounts in use"):
        core.migrated(accounts=3)
    for to in (core.migrated(accounts=4), core.migrated(accounts=100)):
        assert accounts_of(to) == accounts_of(core)
        to.check()


def test_outcomes_hold_no_account(core: Purgatory) -> None:
    core.set_quotas(timers=9)
    owners = [Owner(core, uid, uid) for uid in range(1, 5)]
    for owner in owners:
        owner.send(pd.watch(b"%d" % owner.uid, ANY, [Key(b"w", 1)]))
    owners[0].send(pd.advance(b"w", 1))
    assert core.metrics.outcomes == 4
    to = core.migrated(accounts=1)
    to.check()
    assert to.metrics.outcomes == 4


@pytest.mark.parametrize("detail", ["name_live", "name_bytes", "live", "bytes", "slot"])
def test_check_finds_a_count_that_is_wrong(core: Purgatory, detail: str) -> None:
    core.set_quotas(timers=9)
    Owner(core, 1, ALICE).send(pd.put(b"k", SECOND_NS))
    names = core.rows(lib.PG_R_NAMESPACES, "pg_namespace")
    accounts = core.rows(lib.PG_R_ACCOUNTS, "pg_account")
    row = next(i for i in range(4) if accounts[i].in_use)
    if detail == "slot":
        cold = core.rows(lib.PG_R_COLD, "pg_cold")
        slot = next(i for i in range(64) if cold[i].account)
        cold[slot].account = (row + 1) % 4 + 1
    elif detail.startswith("name"):
        setattr(names[0], detail[5:], getattr(names[0], detail[5:]) + 16)
    else:
        setattr(accounts[row], detail, getattr(accounts[row], detail) + 16)
    with pytest.raises(Fault, match="quotas"):
        core.check()
    core.rebuild(core.now_ns)
    if detail == "slot":
        core.rows(lib.PG_R_COLD, "pg_cold")[slot].account = row + 1
        core.rebuild(core.now_ns)


# ---- counts compared with a recount ----------------------------------------------------------


@dataclass
class Owned:
    """A timer or operation that is armed according to the core's answers."""

    uid: int
    name: int
    bytes: int | None  # None for an operation: only the arena knows its size
    ticket: int


UIDS = (ALICE, BOB, CAROL)
TIMER_QUOTA, BYTE_QUOTA = 7, 4096
NAME_QUOTA = 12


class Accounting(RuleBasedStateMachine):
    """Puts, replacements, watches, cancels, ends and kills: the stored counts equal a recount of
    the slots."""

    @initialize()
    def begin(self) -> None:
        self.core = Purgatory(accounts=3, now_ns=SECOND_NS, sessions=8, capacity=40)
        self.core.set_quotas(timers=TIMER_QUOTA, bytes_=BYTE_QUOTA)
        self.core.set_namespace(b"other", quota_timers=NAME_QUOTA)
        self.owners = {uid: Owner(self.core, uid, uid) for uid in UIDS}
        self.armed: dict[tuple[int, bytes], Owned] = {}

    def used(self, uid: int) -> tuple[int, int]:
        """Return (timers, bytes) of a uid, counted in the slots."""
        return self.recount()[0].get(uid, (0, 0))

    def recount(self) -> tuple[dict[int, tuple[int, int]], dict[bytes, tuple[int, int]]]:
        core = self.core
        hot, cold = core.rows(lib.PG_R_HOT, "pg_hot"), core.rows(lib.PG_R_COLD, "pg_cold")
        accounts = core.rows(lib.PG_R_ACCOUNTS, "pg_account")
        uids: Counter[tuple[int, str]] = Counter()
        names: Counter[tuple[bytes, str]] = Counter()
        for slot in range(core.config["capacity"] + 1):
            if hot[slot].ctl & 0xFF != lib.PG_S_ARMED:
                continue
            size = granules(cold[slot].ext_len + cold[slot].key_len + cold[slot].payload_len)
            if hot[slot].flags & lib.PG_F_OPERATION:
                size += self.notice_bytes(slot)
            row = core.topic_row(hot[slot].topic)
            uid = accounts[cold[slot].account - 1].uid
            uids[uid, "live"] += 1
            uids[uid, "bytes"] += size
            names[row.namespace, "live"] += 1
            names[row.namespace, "bytes"] += size
        return (
            {uid: (uids[uid, "live"], uids[uid, "bytes"]) for uid, _ in uids},
            {name: (names[name, "live"], names[name, "bytes"]) for name, _ in names},
        )

    def notice_bytes(self, slot: int) -> int:
        op, cold = self.core.operation(slot), self.core.rows(lib.PG_R_COLD, "pg_cold")[slot]
        if op.notice_blob == 0xFFFFFFFF:
            return 0
        head = pd.VERDICT.size + -(-op.keys // 8)
        return granules(head + int(cold.key_len) + int(cold.payload_len))

    # ---- actions ----

    keys = st.sampled_from([b"%d" % n for n in range(24)])
    uids = st.sampled_from(UIDS)
    names = st.integers(0, 1)

    @rule(uid=uids, name=names, key=keys, mode=st.integers(0, 3),
          payload=st.sampled_from([0, 1, 40, 700, 3000]), delay_ms=st.integers(1, 50))  # fmt: skip
    def put(self, uid: int, name: int, key: bytes, mode: int, payload: int, delay_ms: int) -> None:
        live, size = self.used(uid)
        name_live = names_of(self.core).get(pd.NAMES[name][0], (0, 0))[0]
        (answer,) = self.owners[uid].send(
            pd.put(key, delay_ms * MS, mode, payload=bytes(payload), name=name)
        )
        new = granules(len(key) + payload)
        old = self.armed.get((name, key))
        if answer.status in (Status.ADDED, Status.REPLACED):
            assert (answer.status == Status.REPLACED) == (old is not None)
            self.armed[name, key] = Owned(uid, name, new, answer.ticket)
        elif answer.status == Status.QUOTA:
            mine = old if old is not None and old.uid == uid else None
            over_timers = mine is None and live + 1 > TIMER_QUOTA
            over_name = name == 1 and old is None and name_live + 1 > NAME_QUOTA
            over_bytes = size - (mine.bytes or 0 if mine else 0) + new > BYTE_QUOTA
            assert over_timers or over_name or over_bytes
        else:
            assert answer.status in (Status.EXISTS, Status.KEPT, Status.EXTENDED, Status.FULL)
        after = self.used(uid)
        assert after[0] <= TIMER_QUOTA
        assert after[1] <= max(BYTE_QUOTA, size)

    @rule(uid=uids, name=names, key=keys, condition=st.sampled_from([ALL, ANY, SUM]),
          watched=st.lists(st.sampled_from([b"p", b"q", b"r"]), min_size=1, unique=True),
          payload=st.sampled_from([0, 300]), notice=st.booleans(),
          watermark=st.integers(0, 3))  # fmt: skip
    def watch(
        self, uid: int, name: int, key: bytes, condition: int, watched: list[bytes], payload: int,
        notice: bool, watermark: int,
    ) -> None:  # fmt: skip
        command = pd.watch(
            key, condition, [Key(w, watermark, 9 if condition == SUM else 0) for w in watched],
            20 * MS, threshold=2 if condition == SUM else 0, payload=bytes(payload),
            notice=notice, name=name,
        )  # fmt: skip
        (answer,) = self.owners[uid].send(command)
        if answer.status == Status.ADDED:
            self.armed[name, key] = Owned(uid, name, None, answer.ticket)

    @rule(uid=uids, name=names, key=keys)
    def cancel(self, uid: int, name: int, key: bytes) -> None:
        (answer,) = self.owners[uid].send(pd.cancel(key, name=name))
        assert answer.status != Status.QUOTA
        if answer.status == Status.CANCELLED:
            del self.armed[name, key]

    @rule(
        uid=uids, name=names, key=st.sampled_from([b"p", b"q", b"r"]), watermark=st.integers(0, 4)
    )
    def advance_key(self, uid: int, name: int, key: bytes, watermark: int) -> None:
        self.owners[uid].send(pd.advance(key, watermark, name=name))

    @rule(uid=uids)
    def acknowledge(self, uid: int) -> None:
        self.owners[uid].ack(*(m.ack() for m in self.owners[uid].mail() if m.cause))

    @rule(ms=st.integers(1, 40))
    def pass_time(self, ms: int) -> None:
        while self.core.advance(self.core.now_ns + ms * MS):
            self.core.publish_all()
        self.core.publish_all()

    @rule(garbage=st.booleans())
    def kill(self, garbage: bool) -> None:
        """Restart the core as after a kill. `garbage`: first overwrite derived state and counts."""
        if garbage:
            for region in DERIVED:
                view = self.core.region(region)
                view[:] = b"\xa5" * len(view)
            for row in range(self.core.config["accounts"]):
                self.core.rows(lib.PG_R_ACCOUNTS, "pg_account")[row].live = 99
            self.core.rows(lib.PG_R_NAMESPACES, "pg_namespace")[0].bytes = 12345
        self.core.attach()
        self.core.rebuild(self.core.now_ns)

    @rule(more=st.integers(0, 3))
    def resize(self, more: int) -> None:
        self.core = self.core.migrated(accounts=self.core.config["accounts"] + more)
        for owner in self.owners.values():
            owner.core = self.core

    # ---- invariants ----

    @invariant()
    def counts_are_those_of_a_recount(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        uids, names = self.recount()
        assert {u: c for u, c in accounts_of(self.core).items() if c != (0, 0)} == uids
        assert {n: c for n, c in names_of(self.core).items() if c != (0, 0)} == names
        tickets = {info.ticket: info for info in self.core.scan()}
        mine = Counter(o.uid for o in self.armed.values() if o.ticket in tickets)
        assert {uid: live for uid, (live, _) in uids.items()} == mine
        self.armed = {k: o for k, o in self.armed.items() if o.ticket in tickets}


TestAccounting = Accounting.TestCase
TestAccounting.settings = effort(100, 3000)
