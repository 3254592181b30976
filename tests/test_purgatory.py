"""The purgatory, case by case: bounds, bounded work, interruptions, limits."""

from __future__ import annotations

import itertools
import math
import random

import purgatory_driver as pd
import pytest
from core_driver import Fault
from purgatory_driver import ALL, ANY, CLIENT, QUORUM, SUM, Key, Owner, Purgatory

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.errors import MessageRefused
from purgatoryd.shm_layout.layout import Cause, Message, Status, WireError, size_of

pytestmark = pytest.mark.tier("check")

MS = 1_000_000
LOW = 2**32 - 1  # mask of the low half of a version, which is the number of the CHECK
BIG = {
    "capacity": 4096,
    "watches": 8192,
    "watermarks": 4096,
    "payload_bytes": 1 << 21,
    "replay_capacity": 64,
}
VISITS = 1024
"""Maximum number of watchers that one call visits."""


def statuses(answers: list[pd.Answer]) -> list[int]:
    return [a.status for a in answers]


def step(core: Purgatory, message: bytes) -> bytes | None:
    reply = core.once(message)
    core.check()
    return reply


def causes(mail: list[pd.Mail]) -> list[int]:
    return [m.cause for m in mail]


def drained(owner: Owner) -> list[pd.Mail]:
    """Read and acknowledge the whole inbox; return its messages."""
    mail = owner.mail()
    owner.ack(*(m.ack() for m in mail))
    return mail


# ---- memory --------------------------------------------------------------------------------


def test_a_watch_and_a_key_cost_what_was_promised() -> None:
    core = Purgatory(watches=1 << 14, watermarks=1 << 14)
    regions = core.header.regions
    watch = regions[lib.PG_R_WATCHES].stride
    assert watch <= 32
    assert watch + size_of("pg_share") <= 48
    index = regions[lib.PG_R_WATERMARK_INDEX].length / regions[lib.PG_R_WATERMARKS].count
    assert regions[lib.PG_R_WATERMARKS].stride + index <= 72  # for a watch key of at most 16 bytes


def test_many_operations_leave_nothing_behind() -> None:
    core = Purgatory(**BIG)
    owner, counts = Owner(core), core.counts()
    for iteration in range(10):
        keys = [b"%d-%d" % (iteration, n) for n in range(200)]
        owner.send(
            *(pd.watch(k, ANY, [Key(b"t", 2**60), Key(k, 1)], MS, notice=True) for k in keys)
        )
        owner.send(*(pd.advance(k, 1) for k in keys[:100]))
        while core.advance(core.now_ns + MS):
            core.publish_all()
        assert len(drained(owner)) == 200
        owner.send(*(pd.forget(k) for k in keys), pd.forget(b"t"))
        core.publish_all()
    left = core.counts()
    left["bytes"] -= core.header.replay_bytes
    left["granules"] -= core.header.replay_bytes // lib.PG_GRANULE
    assert left == counts


ENDS = {
    Cause.SATISFIED: lambda k: pd.advance(k, 9),
    Cause.FAILED: lambda k: pd.fail(k, 7),
    Cause.CANCELLED: pd.cancel_for_key,
    Cause.EXPIRED: pd.clear,
}


def churn(core: Purgatory, owner: Owner, iteration: int) -> int:
    """Let operations with every condition and with long keys end in every way.

    Their watermarks are forgotten in odd iterations and expire in even ones. Returns the number of
    operations.
    """
    keys = [b"%d-%d" % (iteration, n) for n in range(192)]
    long = [k + b"-long" * 10 for k in keys]
    for n, key in enumerate(keys):
        condition, targets = [ALL, ANY, SUM, CLIENT][n % 4], [2**60, 1, 1] * (n % 4 != 3)
        own = [Key(k, t, 5) for k, t in zip((b"t", key, long[n]), targets or [0] * 3, strict=True)]
        owner.send(pd.watch(key, condition, own, MS, threshold=4, notice=True))
    owner.send(*(ENDS[Cause(n // 48 + 1)](key) for n, key in enumerate(keys)))
    while core.advance(core.now_ns + MS):
        core.publish_all()
    mail = owner.mail()
    owner.ack(*(m.ack() for m in mail if m.cause))
    if iteration % 2:
        owner.send(*(pd.forget(k) for k in [*keys, *long, b"t"]))
    else:
        owner.send(*(pd.clear(k) for k in keys))
        core.advance(core.now_ns + 2 * core.config["watermark_ttl_ns"])
        core.sweep()
    core.publish_all()
    return sum(m.cause != 0 for m in mail)


def test_every_condition_and_end_frees_all_rows() -> None:
    core = Purgatory(**BIG)
    owner, counts = Owner(core), core.counts()
    assert sum(churn(core, owner, iteration) for iteration in range(10)) == 1920
    for _ in range(lib.PG_WINDOW):
        # replaces all remembered replies, so that none contains ended keys
        owner.send(pd.clear(b"t"))
    core.check()
    ends = ("satisfied", "expired", "failed", "cancelled")
    assert all(getattr(core.metrics, end) for end in ends)
    left = core.counts()
    left["bytes"] -= core.header.replay_bytes
    left["granules"] -= core.header.replay_bytes // lib.PG_GRANULE
    assert left == counts


def test_the_end_of_an_operation_frees_its_topic() -> None:
    owner = Owner(Purgatory(topics=1))
    key = [Key(b"key", 1)]
    assert owner.send(pd.watch(b"a", ALL, key, MS))[0].status == Status.ADDED
    other = pd.watch(b"b", ALL, key, MS, name=1)
    assert owner.send(other)[0].status == Status.FULL_TOPICS
    owner.send(pd.advance(b"key", 1))
    assert owner.send(other)[0].status == Status.ADDED


# ---- visits of watchers --------------------------------------------------------------------


@pytest.mark.parametrize("keys", [1, 2, 7, 40])
@pytest.mark.parametrize("threshold", [1, 1000, 10**12])
def test_a_sum_is_visited_seldom(keys: int, threshold: int) -> None:
    """At each visit, the missing sum has fallen by at least one key's share, or a key has reached
    its cap."""
    core = Purgatory()
    owner, rng = Owner(core), random.Random(keys * threshold)
    names = [b"k%d" % n for n in range(min(keys, 24))]
    cap = -(-threshold // len(names)) + 1
    owner.send(pd.watch(b"sum", SUM, [Key(n, 0, cap) for n in names], threshold=threshold))
    watermarks = dict.fromkeys(names, 0)
    most = max(1, threshold // 500)
    for _ in range(20_000):
        name = rng.choice(names)
        watermarks[name] += rng.randint(1, most)
        done = owner.send(pd.advance(name, watermarks[name]))[0].ended
        if sum(min(cap, v) for v in watermarks.values()) >= threshold:
            assert done == 1
            break
        assert done == 0
    assert causes(owner.mail()) == [Cause.SATISFIED]
    assert core.metrics.visits <= len(names) * (math.log2(threshold) + 2)


def test_advances_that_reach_nobody_visit_nobody() -> None:
    core = Purgatory(**BIG)
    owner = Owner(core)
    for start in range(0, 3000, 1000):
        owner.send(
            *(
                pd.watch(b"%d" % n, ALL, [Key(b"hot", 10**6 + n)])
                for n in range(start, start + 1000)
            )
        )
    owner.send(*(pd.advance(b"hot", n) for n in range(1, 1000)))
    assert core.metrics.visits == 0
    assert owner.send(pd.advance(b"hot", 10**6 + 9))[0].ended == 10
    assert core.metrics.visits == 10


# ---- bounded work --------------------------------------------------------------------------


@pytest.fixture
def crowd() -> tuple[Purgatory, Owner, Owner]:
    """Return (core, owner of 3000 operations that wait for one key, another owner)."""
    core = Purgatory(**BIG)
    owner, other = Owner(core, 1), Owner(core, 2)
    for start in range(0, 3000, 1000):
        owner.send(
            *(pd.watch(b"%d" % n, ANY, [Key(b"hot", 10)]) for n in range(start, start + 1000))
        )
    core.check()
    return core, owner, other


def test_an_advance_goes_on_where_it_stopped(crowd: tuple[Purgatory, Owner, Owner]) -> None:
    core, owner, other = crowd
    message = other.message([pd.advance(b"hot", 10)])
    assert step(core, message) is None
    assert core.metrics.satisfied == VISITS
    assert owner.send(pd.watch(b"late", ALL, [Key(b"hot", 10)]))[0].status == Status.ADDED
    mine = owner.message([pd.advance(b"hot", 10)])
    assert step(core, mine) is None
    reply = step(core, message)
    assert reply is not None
    rest = owner.reply(core.send(mine))
    assert other.reply(reply).answers[0].ended + rest.answers[0].ended == 3000
    assert owner.again() == rest
    assert core.metrics.satisfied == 3001
    assert len({m.key for m in owner.mail()}) == 3001


def test_a_bump_is_applied_once(crowd: tuple[Purgatory, Owner, Owner]) -> None:
    core, owner, other = crowd
    message = other.message([pd.bump(b"hot", 10), pd.bump(b"hot", 1)])
    assert step(core, message) is None
    owner.send(pd.bump(b"x", 1))
    assert step(core, message) is None
    reply = step(core, message)
    assert reply is not None
    assert [a.ended for a in other.reply(reply).answers] == [3000, 0]
    assert other.again().data == reply
    assert dict(core.watermarks())[b"hot"].watermark == 11


@pytest.mark.parametrize("calls", [1, 2])
def test_a_crash_in_the_middle_changes_no_outcome(
    crowd: tuple[Purgatory, Owner, Owner], calls: int
) -> None:
    core, owner, other = crowd
    message = other.message([pd.bump(b"hot", 10)])
    for _ in range(calls):
        assert step(core, message) is None
    core.attach()
    core.rebuild(core.now_ns)
    core.check()
    core.send(message)
    assert dict(core.watermarks())[b"hot"].watermark == 10
    assert core.metrics.operations == 0
    mail = drained(owner)
    assert len({m.key for m in mail}) == len(mail) == 3000
    assert core.metrics.outcomes == 0


KEYS_PER_VISIT = 8
"""Number of keys of one operation that count as one visit."""


@pytest.mark.parametrize("end", ["advance", "expiry"])
def test_many_keys_count_as_work(end: str) -> None:
    """Arming 128 operations with 512 keys each exceeds the work of one call, and so does ending
    them."""
    core = Purgatory(
        capacity=256, watches=1 << 16, watermarks=1024, payload_bytes=1 << 20, inbox_max=1000
    )
    owner, most = Owner(core), VISITS * KEYS_PER_VISIT // 512
    keys = [Key(b"%d" % n, 2) for n in range(512)]
    message = owner.message([pd.watch(b"%d" % n, ANY, keys, MS) for n in range(128)])
    for _ in range(128 // most - 1):
        assert step(core, message) is None
    reply = owner.reply(core.send(message))
    assert statuses(reply.answers) == [Status.ADDED] * 128
    assert len({a.ticket for a in reply.answers}) == core.metrics.operations == 128
    if end == "advance":
        message = owner.message([pd.advance(b"0", 2)])
        assert step(core, message) is None
        assert 128 - most <= core.metrics.operations < 128
        assert owner.reply(core.send(message)).answers[0].ended == 128
    else:
        assert core.advance(2 * MS, budget=VISITS)
        assert core.metrics.operations == 128 - most
        while core.advance(2 * MS, budget=VISITS):
            core.check()
    assert len({m.key for m in drained(owner)}) == 128
    assert core.pool.free_watches == 1 << 16


def test_a_failure_goes_on_where_it_stopped(crowd: tuple[Purgatory, Owner, Owner]) -> None:
    core, owner, other = crowd
    message = other.message([pd.fail(b"hot", 7)])
    assert step(core, message) is None
    assert step(core, message) is None
    reply = step(core, message)
    assert reply is not None
    assert other.reply(reply).answers[0].ended == 3000
    assert {(m.cause, m.error, m.missing) for m in owner.mail()} == {
        (Cause.FAILED, 7, frozenset({0}))
    }


@pytest.fixture
def advanced(crowd: tuple[Purgatory, Owner, Owner]) -> tuple[Purgatory, Owner, Owner]:
    """Return the crowd with three more operations behind it. An advance of the key has ended the
    first 1024 operations and is not answered yet."""
    core, owner, other = crowd
    owner.send(
        pd.watch(b"both", ALL, [Key(b"hot", 11), Key(b"cold", 1)]),
        pd.watch(b"short", ALL, [Key(b"hot", 11), Key(b"cold", 1)], MS),
        pd.watch(b"either", ANY, [Key(b"cold", 5), Key(b"hot", 11)]),
    )
    assert step(core, other.message([pd.advance(b"hot", 11)])) is None
    assert core.metrics.satisfied == VISITS
    return core, owner, other


def test_a_failure_does_not_overtake_an_advance(
    advanced: tuple[Purgatory, Owner, Owner],
) -> None:
    core, owner, _ = advanced
    message = owner.message([pd.fail(b"hot", 7)])
    assert step(core, message) is None
    core.advance(2 * MS)
    core.check()
    assert owner.reply(core.send(message)).answers[0].ended == 3001 - VISITS
    assert owner.send(pd.advance(b"cold", 1))[0].ended == 1
    ends = {m.key: (m.cause, m.error, m.missing) for m in owner.mail()}
    assert len(ends) == 3003
    assert ends.pop(b"short") == (Cause.EXPIRED, 0, frozenset({1}))
    assert ends.pop(b"either") == (Cause.SATISFIED, 0, frozenset({0}))
    assert set(ends.values()) == {(Cause.SATISFIED, 0, frozenset())}


def test_a_failure_of_one_key_does_not_overtake_an_advance_of_another(
    advanced: tuple[Purgatory, Owner, Owner],
) -> None:
    core, owner, _ = advanced
    assert owner.send(pd.fail(b"cold", 7))[0].ended == 3
    ends = {m.key: (m.cause, m.error) for m in owner.mail()}
    assert ends[b"either"] == (Cause.SATISFIED, 0)
    assert ends[b"both"] == ends[b"short"] == (Cause.FAILED, 7)
    core.check()


def test_a_failure_that_is_cleared_half_way_fails_nobody_else(
    crowd: tuple[Purgatory, Owner, Owner],
) -> None:
    core, owner, other = crowd
    message = other.message([pd.fail(b"hot", 7)])
    assert step(core, message) is None
    owner.send(pd.clear(b"hot"), pd.watch(b"new", ANY, [Key(b"hot", 1)]))
    assert other.reply(core.send(message)).answers[0].ended == VISITS
    assert core.metrics.failed == VISITS
    assert owner.send(pd.advance(b"hot", 10))[0].ended + VISITS == 3001
    core.check()


def test_a_failure_that_ends_no_operation_continues_where_it_stopped_until_it_is_cleared() -> None:
    core = Purgatory(**{**BIG, "watches": 9000})
    owner, other = Owner(core, 1), Owner(core, 2)
    keys = [Key(name, 10) for name in (b"a", b"b", b"c")]
    for start in range(0, 3000, 1000):
        owner.send(
            *(pd.watch(b"%d" % n, QUORUM, keys, threshold=2) for n in range(start, start + 1000))
        )
    fail = other.message([pd.fail(b"a", 7)])
    assert [step(core, fail) is None for _ in range(3)] == [True, True, False]
    core.check()
    clear = other.message([pd.clear(b"a")])
    assert step(core, clear) is None
    assert owner.send(pd.fail(b"b", 8))[0].ended == 0
    assert other.reply(core.send(clear)).answers[0].status == Status.DONE
    core.check()
    assert core.metrics.failed == 0
    assert owner.send(pd.fail(b"a", 9))[0].ended == 3000
    assert {(m.cause, m.error, m.missing) for m in owner.mail()} == {
        (Cause.FAILED, 9, frozenset({0, 1, 2}))
    }


@pytest.mark.parametrize("first", ["fail", "clear"])
def test_a_failure_and_a_clear_at_the_same_time_both_come_to_an_end(first: str) -> None:
    core = Purgatory(**BIG)
    owner, failing, clearing = Owner(core, 1), Owner(core, 2), Owner(core, 3)
    keys = [Key(b"a", 10), Key(b"b", 10)]
    for start in range(0, 3000, 1000):
        owner.send(*(pd.watch(b"%d" % n, ANY, keys) for n in range(start, start + 1000)))
    if first == "clear":
        owner.send(pd.fail(b"a", 7))
    under_way = [failing.message([pd.fail(b"a", 7)]), clearing.message([pd.clear(b"a")])]
    under_way = under_way if first == "fail" else under_way[::-1]
    for _ in range(8):
        under_way = [message for message in under_way if step(core, message) is None]
    assert not under_way
    core.check()
    assert owner.send(pd.advance(b"a", 10))[0].ended == 3000


def test_an_advance_while_a_failure_is_cleared_loses_no_trigger() -> None:
    core = Purgatory(**BIG)
    owner, other = Owner(core, 1), Owner(core, 2)
    keys = [Key(b"a", 10), Key(b"b", 10)]
    owner.send(pd.fail(b"a", 7))
    for start in range(0, 3000, 1000):
        owner.send(*(pd.watch(b"%d" % n, ANY, keys) for n in range(start, start + 1000)))
    clear = other.message([pd.clear(b"a")])
    assert step(core, clear) is None
    owner.send(pd.advance(b"a", 10))
    other.reply(core.send(clear))
    assert core.metrics.satisfied == 3000


def test_expiry_in_the_middle_of_an_advance_finds_the_condition_true() -> None:
    """The advance waits, because the replay buffer has no space for notices. In the meantime an
    operation without a notice comes due."""
    core = Purgatory(replay_capacity=16)
    owner = Owner(core)
    owner.send(
        *(pd.watch(b"%d" % n, ALL, [Key(b"k", n)], 10**9, notice=True) for n in range(1, 18))
    )
    owner.send(pd.watch(b"short", ALL, [Key(b"k", 20)], MS))
    message = owner.message([pd.advance(b"k", 20)])
    assert step(core, message) is None
    core.advance(2 * MS)
    assert core.metrics.already_true == 1
    core.publish_all()
    reply = step(core, message)
    assert reply is not None
    assert owner.reply(reply).answers[0].ended == 17
    mail = owner.mail()
    assert set(causes(mail)) == {Cause.SATISFIED}
    assert len(mail) == 18


@pytest.mark.parametrize("rebuilt", [False, True])
def test_expiry_in_the_middle_of_a_failure_finds_the_error(rebuilt: bool) -> None:
    """The failure waits, because the replay buffer has no space for notices. In the meantime
    operations without a notice come due."""
    core = Purgatory(replay_capacity=16)
    owner = Owner(core)
    owner.send(
        *(pd.watch(b"%d" % n, ALL, [Key(b"k", n)], MS, notice=True) for n in range(1, 18)),
        pd.watch(b"short", ALL, [Key(b"j", 0), Key(b"k", 20)], MS),
    )
    message = owner.message([pd.fail(b"k", 7)])
    assert step(core, message) is None
    if rebuilt:
        core.attach()
        core.rebuild(core.now_ns)
    while core.advance(2 * MS):
        core.check()
        core.publish_all()
    ends = {m.key: (m.cause, m.error) for m in owner.mail()}
    assert len(ends) == 18
    assert set(ends.values()) == {(Cause.FAILED, 7)}
    assert core.metrics.already_true == core.metrics.expired == 0
    assert core.send(message) is not None


@pytest.mark.parametrize(
    "last",
    [
        pd.watch(b"last", ALL, [Key(b"k", 20), Key(b"j", 1)], notice=True),
        pd.watch(b"last", ANY, [Key(b"j", 2), Key(b"k", 20)], notice=True),
        pd.watch(b"last", SUM, [Key(b"j", 0, 0), Key(b"k", 0, 20)], threshold=20, notice=True),
    ],
    ids=["all", "any", "sum"],
)
def test_a_rebuild_while_notices_have_no_space_loses_no_trigger(last: pd.Command) -> None:
    core = Purgatory(replay_capacity=16)
    owner = Owner(core)
    owner.send(
        pd.advance(b"j", 1),
        *(pd.watch(b"%d" % n, ALL, [Key(b"k", n)], notice=True) for n in range(1, 17)),
        last,
    )
    message = owner.message([pd.advance(b"k", 20)])
    assert step(core, message) is None
    core.attach()
    core.rebuild(core.now_ns)
    core.check()
    assert core.metrics.operations == 1
    core.publish_all()
    assert step(core, message) is not None
    assert core.metrics.operations == 0


def test_a_client_condition_is_asked_again_after_a_rebuild_without_space() -> None:
    core = Purgatory(replay_capacity=16)
    owner = Owner(core)
    owner.send(
        *(pd.watch(b"%d" % n, ALL, [Key(b"k", 1)], notice=True) for n in range(16)),
        pd.watch(b"client", CLIENT, [Key(b"c", 0)], notice=True),
        pd.advance(b"k", 1),
    )
    core.rebuild(core.now_ns)
    (question,) = (m for m in owner.mail() if m.key == b"client")
    assert question.version & LOW == 1, (
        "the CHECK needs a new number: the owner may already have the previous CHECK"
    )
    owner.ack(question.ack())
    assert [m.version & LOW for m in owner.mail() if m.key == b"client"] == [2]


def test_a_full_replay_buffer_holds_commands_back() -> None:
    core = Purgatory(replay_capacity=16)
    owner, other = Owner(core, 1), Owner(core, 2)
    owner.send(*(pd.watch(b"%d" % n, ALL, [Key(b"k", 1)], notice=True) for n in range(20)))
    other.send(pd.watch(b"client", CLIENT, [Key(b"c", 0)], notice=True))
    (question,) = other.mail()
    message = owner.message([pd.advance(b"k", 1)])
    assert step(core, message) is None
    assert step(core, message) is None
    assert core.metrics.satisfied == 16
    for held in (
        pd.cancel(b"client"), pd.complete(b"client", question.version), pd.fail(b"c", 1),
        pd.watch(b"new", ALL, [Key(b"n", 0)], notice=True),
    ):  # fmt: skip
        assert step(core, other.message([held])) is None
        other.sequence -= 1
    core.published(core.header.replay_head + 4)
    reply = step(core, message)
    assert reply is not None
    assert owner.reply(reply).answers[0].ended == 20


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize(
    ("watched", "command"),
    [
        (pd.watch(b"x", CLIENT, [Key(b"c", 0)], notice=True), pd.advance(b"c", 1)),
        (pd.watch(b"x", CLIENT, [Key(b"c", 0)], notice=True), pd.complete(b"x", 1)),
        (
            pd.watch(b"x", ALL, [Key(b"c", 1), Key(b"d", 1)], notice=True),
            pd.advance(b"c", 1),
        ),
        (
            pd.watch(b"x", SUM, [Key(b"c", 0, 9), Key(b"d", 0, 9)], threshold=9, notice=True),
            pd.advance(b"c", 8),
        ),
    ],
    ids=["client", "late-answer", "all", "sum"],
)
def test_an_operation_that_waits_on_takes_no_notice_from_a_full_replay_buffer(
    watched: pd.Command, command: pd.Command, sent: bool
) -> None:
    core = Purgatory(replay_capacity=16)
    owner = Owner(core)
    owner.send(watched, *(pd.watch(b"%d" % n, ALL, [Key(b"k", 1)], notice=True) for n in range(16)))
    owner.send(pd.advance(b"k", 1))
    if sent:
        core.publish_all()
    assert step(core, owner.message([command])) is not None
    assert core.header.replay_tail - core.header.replay_head == 16
    assert core.metrics.operations == 1


def test_expiry_waits_for_space_and_is_late_not_lost() -> None:
    core = Purgatory(replay_capacity=16)
    owner = Owner(core)
    owner.send(*(pd.watch(b"%d" % n, ALL, [Key(b"k", 1)], MS, notice=True) for n in range(20)))
    assert core.advance(MS)
    core.check()
    assert core.metrics.expired == 16
    core.publish_all()
    assert not core.advance(MS)
    assert len(owner.mail()) == 20


# ---- CANCEL_FOR_KEY ------------------------------------------------------------------------


def test_cancelled_keys_come_in_pages() -> None:
    core = Purgatory(**BIG)
    owner, counts = Owner(core), core.counts()
    keys = {b"%0255d" % n for n in range(200)}
    owner.send(*(pd.watch(k, ALL, [Key(b"k", 1), Key(b"m", 0)]) for k in keys))
    found: list[bytes] = []
    for _ in range(10):
        reply = owner.reply(core.send(owner.message([pd.cancel_for_key(b"k")])))
        core.check()
        found += reply.ended[0]
        assert owner.again() == reply
        assert reply.answers[0].ended == len(reply.ended[0])
        if reply.answers[0].status == Status.DONE:
            break
        assert sum(2 + len(k) for k in reply.ended[0]) > 16384 - 300
    assert sorted(found) == sorted(keys)
    assert set(causes(drained(owner))) == {Cause.CANCELLED}
    owner.send(pd.forget(b"k"), pd.forget(b"m"))
    for _ in range(lib.PG_WINDOW):
        owner.send(pd.clear(b"k"))
    assert core.counts() == counts


def test_several_cancellations_share_a_reply() -> None:
    core = Purgatory(**BIG)
    owner = Owner(core)
    owner.send(*(pd.watch(b"%0255d" % n, ALL, [Key(b"k%d" % (n // 50), 1)]) for n in range(150)))
    message = owner.message([pd.cancel_for_key(b"k%d" % n) for n in (0, 7, 1, 2)])
    reply = owner.reply(core.send(message))
    more, unknown, done = Status.MORE, Status.UNKNOWN, Status.DONE
    assert statuses(reply.answers) == [done, unknown, more, more]
    assert [len(reply.ended.get(n, [])) for n in range(4)] == [a.ended for a in reply.answers]
    assert core.metrics.cancelled == sum(len(keys) for keys in reply.ended.values())


def interrupted(core: Purgatory, owner: Owner) -> bytes:
    """Return a batch that waits for space. The keys of the operations that it has ended are already
    stored for its reply."""
    owner.send(*(pd.watch(b"%d" % n, ALL, [Key(b"k", 1)], notice=True) for n in range(16)))
    owner.send(
        pd.watch(b"a", ALL, [Key(b"a", 1)]), pd.watch(b"b", ALL, [Key(b"b", 1)], notice=True)
    )
    owner.send(pd.advance(b"k", 1))
    message = owner.message([pd.cancel_for_key(b"a"), pd.advance(b"b", 1)])
    assert step(core, message) is None
    return message


@pytest.mark.parametrize("meanwhile", ["nothing", "rebuild", "migrate"])
def test_ended_keys_outlast_an_interruption(meanwhile: str) -> None:
    core = Purgatory(replay_capacity=16)
    owner = Owner(core)
    message = interrupted(core, owner)
    if meanwhile == "migrate":
        core = owner.core = core.migrated()
    if meanwhile == "rebuild":
        core.rebuild(core.now_ns)
    core.check()
    Owner(core, 2).send(pd.watch(b"x", ALL, [Key(b"x", 1)], payload=b"x" * 30_000))
    core.publish_all()
    reply = step(core, message)
    assert reply is not None
    assert owner.reply(reply).ended == {0: [b"a"]}


def test_a_session_that_ends_during_an_advance_leaves_nothing() -> None:
    core = Purgatory(replay_capacity=16)
    owner = Owner(core)
    interrupted(core, owner)
    owner.bye()
    core.check()
    assert core.metrics.outcomes == 0


# ---- refusals ------------------------------------------------------------------------------


def unchanged(core: Purgatory, owner: Owner, command: pd.Command) -> pd.Answer:
    before, watermarks = core.counts(), [name for name, _ in core.watermarks()]
    answer = owner.send(command)[0]
    assert core.counts() == before
    assert [name for name, _ in core.watermarks()] == watermarks
    core.check()
    return answer


FAR = Key(b"far", 1)


@pytest.mark.parametrize(
    ("command", "config", "status"),
    [
        (pd.watch(b"x", ALL, [Key(b"a", 1), Key(b"b", 1), Key(b"a", 2)]), {}, Status.DUPLICATE),
        (pd.watch(b"x", ALL, [Key(b"a", 1), Key(b"b", 1)]), {"watermarks": 2}, Status.FULL_KEYS),
        (pd.watch(b"x", ALL, [FAR, Key(b"b", 1)]), {"watches": 2}, Status.FULL_WATCHES),
        (pd.watch(b"x", ALL, [FAR]), {"capacity": 1}, Status.FULL),
        (pd.watch(b"first", ALL, [Key(b"b", 1)]), {}, Status.EXISTS),
        (pd.watch(b"x", ALL, [FAR], 2**63 - 1), {"now_ns": 1000 * MS}, Status.TOO_FAR),
        (pd.watch(b"x", ALL, [Key(b"b", 1)], payload=b"x" * 60_000),
         {"payload_bytes": 32768}, Status.FULL_PAYLOAD),
        (pd.watch(b"x", ALL, [Key(b"b", 1)], payload=b"x" * 20_000, notice=True),
         {"payload_bytes": 32768}, Status.FULL_PAYLOAD),
        (pd.advance(b"new", 1), {"watermarks": 1}, Status.FULL_KEYS),
        (pd.bump(b"new", 1), {"watermarks": 1}, Status.FULL_KEYS),
        (pd.fail(b"new", 1), {"watermarks": 1}, Status.FULL_KEYS),
        (pd.clear(b"new"), {}, Status.UNKNOWN),
        (pd.forget(b"new"), {}, Status.UNKNOWN),
        (pd.cancel_for_key(b"new"), {}, Status.UNKNOWN),
        (pd.cancel(b"new"), {}, Status.UNKNOWN),
        (pd.complete(b"first", 1), {}, Status.UNKNOWN),
        (pd.put(b"first", MS), {}, Status.EXISTS),
        (pd.put(b"first", MS, lib.PG_MODE_REPLACE), {}, Status.EXISTS),
        (pd.forget(b"far", name=1), {}, Status.UNKNOWN),
    ],
)  # fmt: skip
def test_refusals_change_nothing(
    command: pd.Command, config: dict[str, int], status: Status
) -> None:
    core = Purgatory(**config)
    owner = Owner(core)
    owner.send(pd.watch(b"first", ALL, [FAR]))
    if command.record[0] == lib.PG_OP_CANCEL_FOR_KEY:
        before = core.counts()
        assert owner.send(command)[0].status == status
        assert core.counts()["operations"] == before["operations"]
        return
    assert unchanged(core, owner, command).status == status


def test_a_watermark_stops_at_its_end() -> None:
    core = Purgatory()
    owner = Owner(core)
    owner.send(pd.advance(b"k", 5))
    assert unchanged(core, owner, pd.bump(b"k", 2**63 - 5)).status == lib.PG_ST_OVERFLOW
    assert owner.send(pd.bump(b"k", 2**63 - 6))[0].status == Status.DONE
    assert dict(core.watermarks())[b"k"].watermark == 2**63 - 1
    owner.send(
        pd.watch(b"x", SUM, [Key(b"k", 2**63, 9)], threshold=1),
        pd.watch(b"y", CLIENT, [Key(b"k", 0)]),
    )
    assert owner.send(pd.bump(b"k", 0))[0].ended == 0
    assert [m.key for m in owner.mail()] == [b"y"]


def malformed(owner: Owner, *commands: pd.Command) -> None:
    before = owner.core.image()
    with pytest.raises(MessageRefused) as refusal:
        owner.send(*commands)
    assert refusal.value.error == WireError.MALFORMED
    owner.sequence -= 1
    assert owner.core.image() == before


@pytest.mark.parametrize(
    "command",
    [
        pd.watch(b"x", ALL, []),
        pd.watch(b"x", lib.PG_CONDITIONS, [FAR]),
        *(pd.watch(b"x", kind, [Key(b"k", 2**63 - 1)], threshold=1) for kind in (ALL, ANY, QUORUM)),
        pd.watch(b"x", QUORUM, [FAR], threshold=0),
        pd.watch(b"x", QUORUM, [FAR], threshold=2),
        pd.watch(b"x", ALL, [Key(b"", 1)]),
        pd.watch(b"x", ALL, [Key(b"k", 1)])._replace(
            area=b"x" + pd.WATCH_KEY.pack(1, 0, 1, lib.PG_KEY_BYTES, lib.PG_WK_OWN + 1) + b"k"
        ),
        pd.watch(b"x", ALL, [Key(b"%d" % n, 1) for n in range(1025)]),
        pd.command(lib.PG_OP_WATCH, b"x", extension=pd.watch_keys([FAR])[:-1]),
        pd.command(lib.PG_OP_WATCH, b"x", extension=pd.watch_keys([FAR]), flags=2),
        *(
            pd.command(lib.PG_OP_PUT, b"x", mode=mode, value=1)
            for mode in range(lib.PG_MODE_EXTEND)
        ),
        pd.command(lib.PG_OP_ADVANCE_KEY, b"x", value=2**63),
        pd.command(lib.PG_OP_BUMP, b"x", value=2**63),
        pd.command(lib.PG_OP_FAIL, b"x", value=0),
        pd.command(lib.PG_OP_FAIL, b"x", value=2**32),
        pd.command(lib.PG_OP_FORGET, b"x", payload=b"y"),
        pd.command(lib.PG_OP_ADVANCE_KEY, b"x", extension=pd.watch_keys([FAR])),
        pd.command(lib.PG_OP_UNPARK + 1, b"x"),
    ],
)
def test_malformed_batches_change_nothing(command: pd.Command) -> None:
    malformed(Owner(Purgatory()), pd.advance(b"before", 1), command)


def test_most_keys() -> None:
    core = Purgatory(watches=1024, watermarks=1024)
    owner = Owner(core)
    keys = [Key(b"%d" % n, 1) for n in range(1024)]
    owner.send(pd.watch(b"x", ALL, keys, notice=True))
    owner.send(*(pd.advance(k.name, 1) for k in keys[:512]), pd.cancel(b"x"))
    core.check()
    missing = frozenset(range(512, 1024))
    assert [m.missing for m in owner.mail()] == [missing]
    assert [v.missing for v in core.verdicts(0)] == [missing]


def test_the_longest_payload_with_a_notice() -> None:
    core = Purgatory(replay_bytes_max=1 << 18)
    owner = Owner(core)
    payload = bytes(65536)
    owner.send(pd.watch(b"x", ALL, [Key(b"k", 1)], payload=payload, notice=True))
    owner.send(pd.advance(b"k", 1))
    core.check()
    core.rebuild(0)
    core.check()
    assert [v.payload for v in core.verdicts(0)] == [payload]
    assert [m.payload for m in owner.mail()] == [payload]


def test_the_inbox_has_a_cap() -> None:
    core = Purgatory(inbox_max=2)
    owner, other = Owner(core, 1), Owner(core, 2)
    already = [pd.watch(b"%d" % n, ALL, [Key(b"k", 0)]) for n in range(3)]
    assert statuses(owner.send(*already)) == [Status.ADDED, Status.ADDED, Status.BUSY]
    assert (core.metrics.refused_busy, core.metrics.refused_wal) == (1, 0)
    assert other.send(already[2])[0].status == Status.ADDED
    owner.ack(owner.mail()[0].ack())
    assert owner.send(pd.watch(b"4", ALL, [Key(b"k", 0)]))[0].status == Status.ADDED


def test_an_inbox_counts_what_is_armed() -> None:
    core = Purgatory(inbox_max=2)
    owner, other = Owner(core, 1), Owner(core, 2)
    watches = [pd.watch(b"%d" % n, ALL, [Key(b"k", 1)]) for n in range(3)]
    assert statuses(owner.send(*watches)) == [Status.ADDED, Status.ADDED, Status.BUSY]
    other.send(pd.advance(b"k", 1))
    assert statuses(owner.send(watches[2])) == [Status.BUSY]
    owner.ack(owner.mail()[0].ack())
    assert statuses(owner.send(watches[2])) == [Status.ADDED]


def test_outcomes_are_sent_again_at_growing_intervals() -> None:
    core = Purgatory()
    owner = Owner(core, 1)
    owner.send(pd.watch(b"op", ALL, [Key(b"k", 0)]))
    sent_s = []
    for now_s in range(1, 400):
        if core.mail():
            sent_s.append(now_s)

        core.advance(now_s * 10**9)
        lib.pg_inbox_again(core.a, core.now_ns)
    gaps = [b - a for a, b in itertools.pairwise(sent_s)]
    assert gaps[1:] == sorted(gaps[1:])
    assert len(sent_s) < 15
    assert max(gaps) == 64
    assert core.metrics.outcomes_repeated == len(sent_s) - 1


def test_nothing_is_sent_to_an_owner_that_is_away() -> None:
    core = Purgatory()
    owner, other = Owner(core, 1), Owner(core, 2)
    owner.send(pd.watch(b"op", ALL, [Key(b"k", 1)]))
    lib.pg_inbox_away(core.a, owner.id)
    other.send(pd.advance(b"k", 1))
    for now_s in range(1, 100):
        core.advance(now_s * 10**9)
        lib.pg_inbox_again(core.a, core.now_ns)
        assert not core.mail()
    assert core.metrics.outcomes_repeated == 0
    lib.pg_inbox_to(core.a, owner.id)
    assert len(owner.mail()) == 1


# ---- keys ----------------------------------------------------------------------------------


def test_the_key_of_an_ended_operation_is_unknown_also_after_a_rebuild() -> None:
    core = Purgatory()
    owner = Owner(core)
    owner.send(pd.put(b"x", MS))
    core.advance(MS)
    assert owner.send(pd.cancel(b"x"))[0].status == Status.FIRED
    owner.send(pd.watch(b"x", ALL, [Key(b"k", 0)], notice=True))
    for _ in range(2):
        assert owner.send(pd.cancel(b"x"))[0].status == Status.UNKNOWN
        core.rebuild(core.now_ns)
        core.check()


def test_namespaces_have_their_own_keys() -> None:
    core = Purgatory()
    owner = Owner(core)
    owner.send(pd.watch(b"x", ALL, [Key(b"k", 1)]), pd.watch(b"x", ALL, [Key(b"k", 1)], name=1))
    assert owner.send(pd.advance(b"k", 1, name=1))[0].ended == 1
    assert owner.send(pd.advance(b"k", 1))[0].ended == 1


def test_a_put_that_extends_moves_an_operations_deadline_and_arms_nothing() -> None:
    core = Purgatory()
    owner = Owner(core)
    (armed,) = owner.send(pd.watch(b"x", ALL, [Key(b"k", 1)], 5 * MS))
    extend = pd.extend(b"x", 9 * MS, armed.ticket)
    for put in (pd.put(b"x", 9 * MS, mode) for mode in (lib.PG_MODE_EXTEND, lib.PG_MODE_REPLACE)):
        assert owner.send(put)[0] == (Status.EXISTS, armed.ended, armed.ticket)
    assert owner.send(pd.extend(b"x", 9 * MS, armed.ticket + 1))[0].status == Status.UNKNOWN
    assert owner.send(extend)[0].status == Status.EXTENDED
    core.advance(8 * MS)
    assert core.metrics.operations == 1
    core.advance(9 * MS)
    assert causes(owner.mail()) == [Cause.EXPIRED]
    assert owner.send(extend)[0].status == Status.UNKNOWN
    assert core.metrics.live == 0


def test_a_failure_outlasts_the_time_to_live_until_it_is_cleared() -> None:
    core = Purgatory()
    owner = Owner(core)
    owner.send(pd.fail(b"failed", 7), pd.advance(b"other", 1))
    core.advance(60 * 10**9)
    core.sweep()
    assert [name for name, _ in core.watermarks()] == [b"failed"]
    owner.send(pd.watch(b"x", ALL, [Key(b"failed", 1)]))
    assert [(m.cause, m.error) for m in owner.mail()] == [(Cause.FAILED, 7)]
    owner.send(pd.clear(b"failed"))
    core.sweep()
    assert [name for name, _ in core.watermarks()] == [b"failed"]
    core.advance(120 * 10**9)
    core.sweep()
    assert not list(core.watermarks())


@pytest.mark.parametrize("restart", [False, True])
def test_a_later_watch_does_not_undo_a_forget(restart: bool) -> None:
    core = Purgatory()
    owner = Owner(core)
    owner.send(pd.watch(b"x", ALL, [Key(b"k", 9)]), pd.forget(b"k"))
    owner.send(pd.watch(b"y", ALL, [Key(b"k", 9)]), pd.cancel(b"x"))
    if restart:
        core.attach()
        core.rebuild(0)
    assert [name for name, _ in core.watermarks()] == [b"k"]
    owner.send(pd.cancel(b"y"))
    assert not list(core.watermarks())


def test_watermarks_stay_for_their_time_to_live_across_a_restart() -> None:
    """If a rebuild ends an operation, the last use of the operation's keys is set to the time of
    the last heartbeat."""
    core = Purgatory(replay_capacity=16, now_ns=100 * 10**9)
    owner = Owner(core)
    owner.send(
        *(pd.watch(b"%d" % n, ALL, [Key(b"k", 1)], notice=True) for n in range(16)),
        pd.watch(b"x", ALL, [Key(b"k", 2), Key(b"mine", 0)]),
    )
    lib.pg_heartbeat(core.a, core.now_ns, 1, 1, 1, 0)
    message = owner.message([pd.advance(b"k", 1), pd.cancel(b"none"), pd.advance(b"k", 2)])
    step(core, message)
    # the new watermark is stored, but its watchers are not visited yet
    dict(core.watermarks())[b"k"].watermark = 2
    core.attach()
    core.rebuild(core.now_ns)
    assert core.metrics.operations == 0
    core.sweep()
    assert {name for name, _ in core.watermarks()} == {b"k", b"mine"}


# ---- own keys ------------------------------------------------------------------------------

MANY_OWN = [Key(b"k%d" % n, 1, 1, own=n % 3 != 0) for n in range(20)]
ENDS_OF_OWN: dict[str, tuple[int, list[pd.Command]]] = {
    "all": (ALL, [pd.advance(k.name, 1) for k in MANY_OWN]),
    "any": (ANY, [pd.advance(b"k1", 1)]),
    "sum": (SUM, [pd.bump(k.name, 2) for k in MANY_OWN]),
    "failed": (ALL, [pd.fail(b"k3", 1)]),
    "cancelled": (CLIENT, [pd.cancel(b"x")]),
    "cancelled for its own key": (ANY, [pd.cancel_for_key(b"k4")]),
    "true at once": (ANY, []),
    "expired": (ALL, []),
}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("end", ENDS_OF_OWN)
def test_own_keys_go_with_the_operation(end: str, restart: bool) -> None:
    core = Purgatory()
    owner = Owner(core)
    condition, commands = ENDS_OF_OWN[end]
    if end == "true at once":
        owner.send(pd.advance(b"k7", 1))
    owner.send(pd.watch(b"x", condition, MANY_OWN, 5 * MS, threshold=20, notice=True))
    if restart:
        core.attach()
        core.rebuild(core.now_ns)
    if commands:
        owner.send(*commands)
    core.advance(5 * MS)
    core.check()
    assert core.metrics.operations == 0
    assert {name for name, _ in core.watermarks()} == {k.name for k in MANY_OWN if not k.own}


def test_an_own_key_that_others_watch_goes_with_the_last() -> None:
    core = Purgatory()
    owner = Owner(core)
    owner.send(
        pd.watch(b"its", ALL, [Key(b"k", 2, own=True), Key(b"other", 1)]),
        pd.watch(b"guest", ALL, [Key(b"k", 3), Key(b"other", 2)]),
        pd.advance(b"k", 2),
    )
    owner.send(pd.cancel(b"its"))
    assert [row.watermark for name, row in core.watermarks() if name == b"k"] == [2]
    owner.send(pd.cancel(b"guest"))
    core.check()
    assert {name for name, _ in core.watermarks()} == {b"other"}


def test_a_crash_in_the_middle_of_an_end_leaves_no_own_key() -> None:
    """The crash comes when the operation counts as ended but is still on the lists of its keys."""
    core = Purgatory()
    owner = Owner(core)
    owner.send(
        pd.watch(b"x", ALL, [Key(b"k", 1, own=True), Key(b"shared", 1)]),
        pd.watch(b"guest", ALL, [Key(b"shared", 2, own=True)]),
    )
    slot = next(s for s in core.operations() if core.operation(s).keys == 2)
    for name, row in core.watermarks():
        if name == b"k":
            row.touched_s = 2**32 - 1
    core.operation(slot).cause = lib.PG_CAUSE_EXPIRED
    core.rows(lib.PG_R_HOT, "pg_hot")[slot].ctl += lib.PG_S_OUTCOME - lib.PG_S_ARMED
    core.attach()
    core.rebuild(core.now_ns)
    core.check()
    assert {name for name, _ in core.watermarks()} == {b"shared"}
    owner.send(pd.cancel(b"guest"))
    assert not dict(core.watermarks())


# ---- CLIENT conditions ---------------------------------------------------------------------


def checks(owner: Owner) -> list[tuple[int, int]]:
    return [(m.cause, m.version & LOW) for m in owner.mail()]


def test_a_check_is_repeated_when_a_watermark_moved() -> None:
    core = Purgatory()
    owner = Owner(core)
    owner.send(pd.watch(b"x", CLIENT, [Key(b"a", 0), Key(b"b", 0)]))
    first = owner.mail()[0]
    assert (first.cause, first.version & LOW) == (0, 1)
    assert checks(owner) == []
    owner.send(pd.advance(b"a", 1), pd.advance(b"b", 5), pd.advance(b"a", 2))
    assert checks(owner) == []
    visits = core.metrics.visits
    owner.send(*(pd.bump(b"a", 1) for _ in range(50)))
    assert core.metrics.visits == visits
    owner.ack(first.ack())
    assert checks(owner) == [(0, 2)]
    owner.ack(first.ack())
    assert owner.send(pd.complete(b"x", first.version))[0].ended == 0
    assert owner.send(pd.complete(b"x", first.version + 1))[0].ended == 1
    assert causes(owner.mail()) == [Cause.SATISFIED]


def test_a_late_yes_ends_no_other_operation() -> None:
    """A new operation has the key of the expired operation. The first CHECK of the new operation
    has the number of the CHECK that is answered late."""
    core = Purgatory()
    owner = Owner(core)
    owner.send(pd.watch(b"c", CLIENT, [Key(b"k", 0)], MS))
    (asked,) = owner.mail()
    core.advance(2 * MS)
    assert causes(drained(owner)) == [Cause.EXPIRED]
    owner.send(pd.watch(b"c", CLIENT, [Key(b"k", 0)]))
    assert owner.send(pd.complete(b"c", asked.version))[0].ended == 0
    (again,) = owner.mail()
    assert owner.send(pd.complete(b"c", again.version))[0].ended == 1


def test_only_the_owner_completes() -> None:
    core = Purgatory()
    owner, other = Owner(core, 1), Owner(core, 2)
    owner.send(pd.watch(b"x", CLIENT, [Key(b"a", 0)]))
    (asked,) = owner.mail()
    assert other.send(pd.complete(b"x", asked.version))[0].status == Status.UNKNOWN
    assert owner.send(pd.complete(b"x", asked.version))[0].ended == 1


def test_an_answer_of_no_waits_for_the_next_watermark() -> None:
    core = Purgatory()
    owner, other = Owner(core, 1), Owner(core, 2)
    owner.send(pd.watch(b"x", CLIENT, [Key(b"a", 0)]))
    check = owner.mail()[0]
    other.ack(check.ack())
    owner.send(pd.advance(b"a", 0))
    owner.ack(check.ack(), check.ack())
    core.mail_again()
    assert checks(owner) == []
    other.send(pd.advance(b"a", 1))
    assert checks(owner) == [(0, 2)]


def test_the_condition_of_a_dead_owner_expires() -> None:
    core = Purgatory()
    owner, counts = Owner(core), Purgatory().counts()
    owner.send(pd.watch(b"x", CLIENT, [Key(b"a", 0)], MS, notice=True))
    owner.bye()
    other = Owner(core, 2)
    other.send(pd.advance(b"a", 1), pd.forget(b"a"))
    core.check()
    core.advance(MS)
    core.check()
    assert [v.cause for v in core.verdicts(0)] == [Cause.EXPIRED]
    assert core.metrics.outcomes == 0
    assert core.counts()["slots"] == counts["slots"]


# ---- sessions, migration -------------------------------------------------------------------


def test_an_operation_that_outlives_its_session_is_freed_at_its_end() -> None:
    core = Purgatory()
    owner, other = Owner(core, 1), Owner(core, 2)
    owner.send(pd.watch(b"x", ALL, [Key(b"a", 1)]), pd.watch(b"y", ALL, [Key(b"a", 0)]))
    assert core.metrics.outcomes == 1
    owner.bye()
    assert core.metrics.outcomes == 0
    assert other.send(pd.advance(b"a", 1))[0].ended == 1
    assert core.metrics.outcomes == core.metrics.operations == 0
    core.check()


@pytest.mark.parametrize("restart", [False, True])
def test_the_outcomes_of_an_ended_session_are_freed_over_several_iterations(restart: bool) -> None:
    core = Purgatory(**BIG)
    before, owner, other = core.counts(), Owner(core), Owner(core, 2)
    for first in range(0, 3000, 1000):
        owner.send(*(pd.watch(b"%d" % n, ALL, [Key(b"k", 1)]) for n in range(first, first + 1000)))
    owner.send(pd.watch(b"asked", CLIENT, [Key(b"c", 0)]))
    other.send(pd.advance(b"k", 1), pd.cancel(b"asked"))
    owner.send(pd.watch(b"late", CLIENT, [Key(b"c", 0)]), pd.forget(b"k"), pd.forget(b"c"))
    owner.bye()
    core.check()
    assert 0 < core.metrics.outcomes <= 3001 - VISITS
    other.send(pd.cancel(b"late"))
    if restart:
        core.attach()
        core.rebuild(core.now_ns)
    while lib.pg_next_ns(core.a) <= core.now_ns:
        core.advance(core.now_ns)
        core.check()
    assert core.counts() == before


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"capacity": 19}, "timers armed"),
        ({"watches": 9}, "watches in use"),
        ({"watermarks": 10}, "watch keys in use"),
        ({"sessions": 1}, None),
        ({"payload_bytes": 4096}, "payload memory in use"),
        ({"capacity": 20, "watches": 10, "watermarks": 11}, None),
    ],
)
def test_migration_counts_outcomes_too(changes: dict[str, int], detail: str | None) -> None:
    core = Purgatory()
    owner = Owner(core)
    owner.send(
        *(pd.watch(b"ended%d" % n, ALL, [Key(b"k", 0)], payload=bytes(300)) for n in range(10))
    )
    owner.send(*(pd.watch(b"armed%d" % n, ALL, [Key(b"a%d" % n, 1)]) for n in range(10)))
    if detail is not None:
        with pytest.raises(Fault, match=detail):
            core.migrated(**changes)
        return
    owner.core = to = core.migrated(**changes)
    to.check()
    assert sorted(m.key for m in owner.mail()) == [b"ended%d" % n for n in range(10)]
    assert owner.send(*(pd.advance(b"a%d" % n, 1) for n in range(10)))[0].ended == 1
    assert len(owner.mail()) == 10


def test_another_batch_under_the_same_number_is_refused() -> None:
    owner = Owner(Purgatory())
    owner.send(pd.bump(b"a", 1))
    owner.sequence -= 1
    with pytest.raises(MessageRefused) as refusal:
        owner.send(pd.bump(b"a", 2))
    assert refusal.value.error == WireError.CHANGED


def test_mail_comes_in_messages_that_fit() -> None:
    core = Purgatory()
    owner = Owner(core)
    owner.send(*(pd.watch(b"%d" % n, ALL, [Key(b"k", 0)], payload=bytes(500)) for n in range(50)))
    keys = [m.key for m in core.mail(700)[owner.id]]
    assert keys == [b"%d" % n for n in range(50)]
    assert core.mail() == {}
    core.mail_again(owner.id)
    assert [m.key for m in core.mail()[owner.id]] == keys


def test_a_check_that_became_an_outcome_leaves_the_others_unsent() -> None:
    core = Purgatory()
    owner = Owner(core)
    owner.send(pd.watch(b"x", CLIENT, [Key(b"a", 0)]))
    owner.send(*(pd.watch(b"%d" % n, ALL, [Key(b"k", 0)]) for n in range(3)), pd.cancel(b"x"))
    assert [m.key for m in owner.mail()] == [b"0", b"1", b"2", b"x"]


def test_a_ping_needs_no_session() -> None:
    core = Purgatory()
    assert wire.decode_reply(core.send(wire.encode_frame(Message.PING))).error == 0
