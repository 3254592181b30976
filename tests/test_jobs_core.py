"""The jobs of consumer groups, in the core."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from core_driver import Fault
from jobs_driver import SETTINGS, JobsCore, Session, of_job, record
from jobs_world import MS, SECOND, World, fire, restart, step, timer

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import MESSAGE_MAX, Op, PutMode, Status, TimeKind

pytestmark = pytest.mark.tier("test")


@pytest.fixture
def core() -> Iterator[JobsCore]:
    core = JobsCore()
    yield core
    core.check()


def test_a_timer_of_a_group_is_leased_to_its_member_and_ends_with_the_ack(core: JobsCore) -> None:
    core.create_group()
    session = Session(core)
    session.join()
    tickets = fire(core, "a")
    (held,) = core.jobs_of(session)
    assert (held.ticket, held.key, held.payload, held.attempt) == (tickets[0], b"a", b"pa", 1)
    assert core.info().leased == 1
    assert session.ack(held) == Status.DONE
    assert (core.info().leased, core.info().acked) == (0, 1)
    assert session.ack(held) == Status.LEASE_LOST
    assert core.metrics.jobs == 0


def test_a_timer_armed_before_the_group_is_a_job_of_it(core: JobsCore) -> None:
    core.put("a", 10 * MS, topic=b"t")
    core.create_group()
    assert core.info().pending == 1
    session = Session(core)
    session.join()
    step(core, 20 * MS)
    assert [held.key for held in core.jobs_of(session)] == [b"a"]


def test_each_group_gets_each_job_and_the_payload_is_stored_once(core: JobsCore) -> None:
    for group in (b"g", b"h"):
        core.create_group(group)
    before = core.metrics.blob_bytes
    fire(core, "a")
    after = core.metrics.blob_bytes
    one, two = Session(core), Session(core)
    one.join(b"g")
    two.join(b"h")
    step(core)
    got = core.received()
    assert got[one.id][0].ticket == got[two.id][0].ticket
    assert after - before == 16
    assert one.ack(got[one.id][0]) == Status.DONE
    core.check()
    assert two.ack(got[two.id][0]) == Status.DONE


def test_a_payload_outlives_its_notice(core: JobsCore) -> None:
    core.create_group()
    fire(core, "a")
    for n in range(100):
        fire(core, f"other{n}", topic=b"u")
    assert core.header.replay_head > 1
    session = Session(core)
    session.join()
    step(core)
    (held,) = core.jobs_of(session)
    assert held.payload == b"pa"
    assert session.ack(held) == Status.DONE


def test_jobs_go_to_the_member_with_most_credits_and_then_in_rotation(core: JobsCore) -> None:
    core.create_group()
    small, large = Session(core), Session(core)
    small.join(credits_=2)
    large.join(credits_=4)
    fire(core, *"abcdef")
    got = core.received()
    assert (len(got[small.id]), len(got[large.id])) == (2, 4)
    small.join(credits_=4)
    large.join(credits_=6)
    fire(core, *"ghij")
    got = core.received()
    assert (len(got[small.id]), len(got[large.id])) == (4, 6)


def test_a_lease_that_expires_is_a_failed_attempt(core: JobsCore) -> None:
    core.create_group(backoff_base_ns=0)
    session = Session(core)
    session.join(lease_ns=10 * MS)
    fire(core, "a")
    (first,) = core.jobs_of(session)
    step(core, 12 * MS)
    (second,) = core.jobs_of(session)
    assert (second.attempt, second.lease) == (2, 2)
    assert session.ack(first) == Status.LEASE_LOST
    assert session.ack(second) == Status.DONE


def test_an_extended_lease_lives_until_its_new_end_and_max_lease(core: JobsCore) -> None:
    core.create_group(max_lease_ns=50 * MS)
    session = Session(core)
    session.join(lease_ns=10 * MS)
    fire(core, "a")
    (held,) = core.jobs_of(session)
    for _ in range(4):
        assert session.extend(held, 20 * MS) == Status.DONE
        step(core, 10 * MS)
    assert session.extend(held, 20 * MS) == Status.DONE
    step(core, 12 * MS)
    assert session.ack(held) == Status.LEASE_LOST


def test_the_answer_to_an_extension_has_the_time_that_is_left(core: JobsCore) -> None:
    core.create_group(max_lease_ns=50 * MS)
    session = Session(core)
    session.join(lease_ns=10 * MS)
    fire(core, "a")
    (held,) = core.jobs_of(session)

    def left_ns(lease_ns: int) -> int:
        return session.one(of_job(Op.JOB_EXTEND, held, time_ns=lease_ns)).deadline_ns

    step(core, 4 * MS)
    assert left_ns(30 * MS) == 30 * MS
    assert left_ns(1 * MS) == 30 * MS
    assert left_ns(60 * MS) == 46 * MS
    step(core, 6 * MS)
    assert left_ns(60 * MS) == 40 * MS
    settings: dict[str, Any] = {**SETTINGS, "max_lease_ns": 100 * MS}
    core.ask_group(lib.PG_GA_CHANGE, b"g", **settings)
    assert left_ns(60 * MS) == 60 * MS
    core.ask_group(lib.PG_GA_CHANGE, b"g", **settings | {"max_lease_ns": 20 * MS})
    assert left_ns(80 * MS) == 60 * MS


def test_a_replaced_timer_counts_against_the_bytes_of_the_budget(core: JobsCore) -> None:
    core.create_group(max_bytes=64, max_jobs=1)
    assert core.put("a", SECOND, payload=b"small").status == Status.ADDED
    large = core.put("a", SECOND, payload=b"x" * 100, mode=PutMode.REPLACE)
    assert (large.status, core.info().pending) == (Status.FULL_GROUP, 1)
    assert core.put("a", SECOND, payload=b"x" * 60, mode=PutMode.REPLACE).status == Status.REPLACED
    assert core.put("a", MS, payload=b"small", mode=PutMode.REPLACE).status == Status.REPLACED
    step(core, 2 * MS)
    assert (core.info().waiting, core.info().bytes) == (1, 16)


def test_a_group_takes_earliest_notices_within_the_bytes_of_its_budget(core: JobsCore) -> None:
    fire(core, "a", "b", "c")
    core.create_group(earliest=True, max_bytes=32)
    assert (core.info().waiting, core.info().bytes, core.info().dropped) == (2, 32, 1)


def test_an_extension_never_shortens_a_lease(core: JobsCore) -> None:
    core.create_group()
    session, other = Session(core), Session(core)
    session.join(lease_ns=20 * MS)
    fire(core, "a")
    (held,) = core.jobs_of(session)
    other.join()
    assert session.extend(held, MS) == Status.DONE
    step(core, 10 * MS)
    assert core.jobs_of(other) == []
    assert session.ack(held) == Status.DONE


def test_a_failed_attempt_waits_for_its_delay_and_the_last_one_is_a_dead_letter(
    core: JobsCore,
) -> None:
    core.create_group(max_attempts=2)
    session = Session(core)
    session.join()
    fire(core, "a")
    (held,) = core.jobs_of(session)
    assert session.nack(held, 5 * MS, b"no") == Status.DONE
    assert core.info().delayed == 1
    step(core, 2 * MS)
    assert core.jobs_of(session) == []
    step(core, 5 * MS)
    (held,) = core.jobs_of(session)
    assert held.attempt == 2
    assert session.nack(held, error=b"still no") == Status.DONE
    (dead,) = core.dead()
    assert (dead.key, dead.payload, dead.attempts, dead.error) == (b"a", b"pa", 2, b"still no")
    assert dead.reason == lib.PG_JR_MAX_ATTEMPTS
    assert core.ask_dead(lib.PG_DA_REQUEUE, ticket=dead.ticket)[0] == 1
    step(core)
    (held,) = core.jobs_of(session)
    assert held.attempt == 1
    assert session.ack(held) == Status.DONE


def test_a_released_job_is_no_failed_attempt(core: JobsCore) -> None:
    core.create_group()
    session = Session(core)
    session.join()
    fire(core, "a")
    (held,) = core.jobs_of(session)
    assert session.release(held) == Status.DONE
    step(core)
    (again,) = core.jobs_of(session)
    assert (again.attempt, again.lease) == (1, 2)
    assert session.ack(held) == Status.LEASE_LOST


def test_a_rejected_job_is_a_dead_letter_and_the_oldest_are_dropped(core: JobsCore) -> None:
    core.create_group(max_dead=2)
    session = Session(core)
    session.join()
    for key in "abc":
        fire(core, key)
    for held in core.jobs_of(session):
        assert session.reject(held, b"bad") == Status.DONE
    assert [d.key for d in core.dead()] == [b"b", b"c"]
    assert {d.reason for d in core.dead()} == {lib.PG_JR_REJECTED}
    assert core.ask_dead(lib.PG_DA_DROP)[0] == 2
    assert core.dead() == []


def test_the_end_of_a_session_gives_its_jobs_back(core: JobsCore) -> None:
    core.create_group(backoff_base_ns=0)
    one, two = Session(core), Session(core)
    one.join()
    fire(core, "a")
    (held,) = core.jobs_of(one)
    two.join()
    lib.pg_inbox_away(core.a, one.id)
    step(core)
    (again,) = core.jobs_of(two)
    assert again.attempt == 2
    two.bye()
    assert core.info().waiting == 1
    three = Session(core)
    three.join()
    step(core)
    (last,) = core.jobs_of(three)
    assert last.attempt == 2
    assert one.ack(held) == Status.LEASE_LOST


def test_a_full_group_refuses_timers_at_the_add(core: JobsCore) -> None:
    core.create_group(max_jobs=3)
    session = Session(core)
    assert [session.one(timer(k)).status for k in ("a", "b", "c")] == [Status.ADDED] * 3
    refused = session.one(timer("d"))
    assert (refused.status, refused.deadline_ns) == (Status.FULL_GROUP, 3)
    assert session.one(timer("a", mode=1)).status == Status.REPLACED
    step(core, 10 * MS)
    assert session.one(timer("d")).status == Status.FULL_GROUP
    session.join()
    step(core)
    for held in core.jobs_of(session):
        session.ack(held)
    assert session.one(timer("d")).status == Status.ADDED


def test_a_full_group_drops_its_oldest_waiting_job(core: JobsCore) -> None:
    core.create_group(max_jobs=2, flags=lib.PG_G_DROP_OLDEST)
    fire(core, "a")
    fire(core, "b")
    session = Session(core)
    assert session.one(timer("c")).status == Status.ADDED
    assert core.info().dropped == 1
    step(core, 10 * MS)
    session.join()
    step(core)
    assert [h.key for h in core.jobs_of(session)] == [b"b", b"c"]


def test_an_old_job_is_a_dead_letter(core: JobsCore) -> None:
    core.create_group(retention_ns=20 * MS)
    fire(core, "a")
    step(core, 30 * MS)
    (dead,) = core.dead()
    assert (dead.reason, dead.attempts) == (lib.PG_JR_TOO_OLD, 0)


def test_jobs_of_a_key_are_leased_one_by_one_in_order(core: JobsCore) -> None:
    core.create_group(flags=lib.PG_G_ORDERED, backoff_base_ns=0)
    fire(core, "a")
    fire(core, "a")
    fire(core, "b")
    session = Session(core)
    session.join()
    step(core)
    first = core.jobs_of(session)
    assert [h.key for h in first] == [b"a", b"b"]
    session.nack(first[0], 5 * MS)
    step(core)
    assert core.jobs_of(session) == []
    step(core, 6 * MS)
    (again,) = core.jobs_of(session)
    assert again.ticket == first[0].ticket
    session.ack(again)
    step(core)
    (second,) = core.jobs_of(session)
    assert second.key == b"a"
    assert second.ticket != again.ticket
    session.ack(second)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_dead_letter_blocks_its_key_if_the_group_says_so(core: JobsCore, blocks: bool) -> None:
    core.create_group(flags=lib.PG_G_ORDERED | (lib.PG_G_BLOCK if blocks else 0))
    fire(core, "a")
    fire(core, "a")
    session = Session(core)
    session.join()
    step(core)
    (held,) = core.jobs_of(session)
    session.reject(held)
    step(core)
    assert len(core.jobs_of(session)) == (not blocks)
    core.ask_dead(lib.PG_DA_DROP)
    step(core)
    assert len(core.jobs_of(session)) == blocks


@pytest.mark.parametrize("restarts", [False, True])
def test_a_change_of_block_frees_or_blocks_the_order_keys(core: JobsCore, restarts: bool) -> None:
    ordered, blocks = lib.PG_G_ORDERED, lib.PG_G_ORDERED | lib.PG_G_BLOCK
    settings: dict[str, Any] = {**SETTINGS, "max_attempts": 1}
    core.create_group(flags=blocks, max_attempts=1)
    session = Session(core)
    session.join()
    for _ in range(3):
        session.one(timer("k"))
        step(core, 5 * MS)
    (first,) = core.jobs_of(session)
    session.reject(first)
    step(core)
    assert core.jobs_of(session) == []
    core.ask_group(lib.PG_GA_CHANGE, b"g", **settings, flags=ordered)
    step(core)
    (second,) = core.jobs_of(session)
    core.ask_group(lib.PG_GA_CHANGE, b"g", **settings, flags=blocks)
    if restarts:
        restart(core)
        session.join()
        core.received()
    assert session.ack(second) == Status.DONE
    step(core)
    assert core.jobs_of(session) == []
    core.ask_dead(lib.PG_DA_DROP)
    step(core)
    (third,) = core.jobs_of(session)
    assert session.ack(third) == Status.DONE
    core.ask_group(lib.PG_GA_CHANGE, b"g", **settings, flags=ordered)
    assert core.info().settings.flags == ordered
    core.create_group(b"plain", (b"u",))
    reply = core.ask_group(lib.PG_GA_CHANGE, b"plain", **settings, flags=lib.PG_G_BLOCK)
    assert reply.detail[0] == lib.PG_GR_SETTINGS


@pytest.mark.parametrize("seed", range(4))
def test_dead_letters_enter_the_order_of_their_keys_by_deadline(core: JobsCore, seed: int) -> None:
    ordered, blocks = lib.PG_G_ORDERED, lib.PG_G_ORDERED | lib.PG_G_BLOCK
    settings: dict[str, Any] = {**SETTINGS, "max_dead": 50}
    core.create_group(flags=ordered, max_dead=50)
    session, chance = Session(core), random.Random(seed)
    session.join()
    step(core, SECOND)
    rows = [(key, n * MS) for n in range(1, 13) for key in (b"k", b"l", b"m")]
    chance.shuffle(rows)
    tickets: dict[bytes, list[tuple[int, int]]] = {b"k": [], b"l": [], b"m": []}
    for key, deadline_ns in rows:
        ticket = core.put(key, deadline_ns, TimeKind.BOOT).ticket
        tickets[key].append((deadline_ns, ticket))
        step(core)
        (held,) = core.jobs_of(session)
        session.reject(held)
        step(core)
    for _ in range(2):
        core.ask_group(lib.PG_GA_CHANGE, b"g", **settings, flags=blocks)
        core.ask_group(lib.PG_GA_CHANGE, b"g", **settings, flags=ordered)
        core.check()
    core.ask_group(lib.PG_GA_CHANGE, b"g", **settings, flags=blocks)
    assert core.ask_dead(lib.PG_DA_REQUEUE)[0] == len(rows)
    found: dict[bytes, list[int]] = {}
    while sum(map(len, found.values())) < len(rows):
        step(core)
        for held in core.jobs_of(session):
            found.setdefault(held.key, []).append(held.ticket)
            assert session.ack(held) == Status.DONE
    assert found == {key: [ticket for _, ticket in sorted(tickets[key])] for key in tickets}


def item(kind: int, extra: int = 0, value: int = 0) -> bytes:
    """Return an extension item of a PUT."""
    return bytes(ffi.buffer(ffi.new("struct pg_ext *", [kind, extra, value])))


def with_items(key: str, *items: bytes, delay_ns: int = MS) -> tuple[bytes, bytes]:
    """Return the PUT of a timer with extension items."""
    area = b"".join(items)
    return record(Op.PUT, key.encode(), area, time_kind=1, time_ns=delay_ns, ext_len=len(area))


def test_urgent_jobs_come_first_and_all_jobs_come_in_time(core: JobsCore) -> None:
    core.create_group()
    session = Session(core)
    for key, priority in (("low", 0), ("high", 9), ("middle", 5)):
        session.one(with_items(key, item(lib.PG_EXT_PRIORITY, priority)))
        step(core, 5 * MS)
    session.one(timer("plain"))
    step(core, 5 * MS)
    session.join()
    step(core)
    jobs = core.jobs_of(session)
    assert [job.key for job in jobs] == [b"high", b"middle", b"low", b"plain"]
    assert [job.priority for job in jobs] == [9, 5, 0, 0]
    for job in jobs:
        session.ack(job)
    session.join(credits_=0)
    session.one(timer("old"))
    step(core, 5 * MS)
    step(core, 120 * SECOND)
    session.one(with_items("urgent", item(lib.PG_EXT_PRIORITY, 9)))
    step(core, 5 * MS)
    session.join(credits_=100)
    step(core)
    assert [job.key for job in core.jobs_of(session)] == [b"old", b"urgent"]


def test_jobs_of_an_order_key_are_leased_one_by_one(core: JobsCore) -> None:
    core.create_group(flags=lib.PG_G_ORDERED)
    session = Session(core)
    order = item(lib.PG_EXT_ORDER, 0, 77)
    for key in ("a", "b"):
        session.one(with_items(key, order))
        step(core, 5 * MS)
    session.one(timer("c"))
    step(core, 5 * MS)
    session.join()
    step(core)
    jobs = core.jobs_of(session)
    assert [job.key for job in jobs] == [b"a", b"c"]
    session.ack(jobs[0])
    step(core)
    assert [job.key for job in core.jobs_of(session)] == [b"b"]


def test_a_paused_group_leases_nothing(core: JobsCore) -> None:
    core.create_group()
    session = Session(core)
    session.join()
    core.ask_group(lib.PG_GA_PAUSE, b"g")
    fire(core, "a")
    assert core.jobs_of(session) == []
    core.ask_group(lib.PG_GA_RESUME, b"g")
    step(core)
    assert len(core.jobs_of(session)) == 1


def test_a_rate_paces_leases(core: JobsCore) -> None:
    core.create_group(rate=2)
    session = Session(core)
    session.join()
    fire(core, *"abcde")
    assert len(core.jobs_of(session)) == 2
    step(core, 400 * MS)
    assert core.jobs_of(session) == []
    assert core.next_ns <= core.header.now_ns + 100 * MS
    step(core, 100 * MS)
    assert len(core.jobs_of(session)) == 1


def test_a_cancel_answers_leased_and_removes_what_nobody_holds(core: JobsCore) -> None:
    core.create_group()
    fire(core, "a", "b")
    session = Session(core)
    assert session.one(record(Op.CANCEL, b"a")).status == Status.FIRED
    assert session.one(record(Op.CANCEL, b"a", flags=1)).status == Status.CANCELLED
    session.join()
    step(core)
    (held,) = core.jobs_of(session)
    assert held.key == b"b"
    assert session.one(record(Op.CANCEL, b"b", flags=1)).status == Status.LEASED
    assert session.ack(held) == Status.DONE


def test_a_cancel_of_a_waiting_job_is_too_late_without_its_notice(core: JobsCore) -> None:
    core.create_group()
    (first,) = fire(core, "a")
    session = Session(core)
    core.put("a", SECOND, topic=b"t")
    assert session.one(record(Op.CANCEL, b"a")).status == Status.CANCELLED
    too_late = session.one(record(Op.CANCEL, b"a"))
    assert (too_late.status, too_late.ticket) == (Status.FIRED, first)
    for n in range(100):
        fire(core, f"other{n}", topic=b"u")
    assert core.header.replay_head > 1
    assert session.one(record(Op.CANCEL, b"a", value=first)).status == Status.FIRED
    assert session.one(record(Op.CANCEL, b"a", value=first + 1)).status == Status.UNKNOWN
    assert core.metrics.cancels_fired == 2
    session.join()
    step(core)
    (held,) = core.jobs_of(session)
    assert session.ack(held) == Status.DONE
    assert session.one(record(Op.CANCEL, b"a")).status == Status.UNKNOWN


def test_a_new_group_may_begin_with_the_replay_buffer(core: JobsCore) -> None:
    fire(core, "a", "b")
    core.create_group(earliest=True)
    session = Session(core)
    session.join()
    step(core)
    assert {h.key for h in core.jobs_of(session)} == {b"a", b"b"}


def test_a_group_with_other_settings_or_without_space_is_refused(core: JobsCore) -> None:
    core.create_group()
    core.create_group()
    assert refusal(core, b"g", max_jobs=99) == lib.PG_GR_MISMATCH
    assert refusal(core, b"h", max_jobs=500) == lib.PG_GR_JOBS
    assert refusal(core, b"h", max_jobs=0) == lib.PG_GR_SETTINGS
    core.put("x", SECOND, topic=b"u")
    core.put("y", SECOND, topic=b"u")
    assert refusal(core, b"h", topics=(b"u",), max_jobs=1) == lib.PG_GR_PENDING
    for name in (b"h", b"i", b"j"):
        core.create_group(name, max_jobs=50)
    assert refusal(core, b"k", max_jobs=1) == lib.PG_GR_ROWS
    assert core.ask_group(lib.PG_GA_DELETE, b"k").error != 0


def refusal(
    core: JobsCore, group: bytes, topics: tuple[bytes, ...] = (b"t",), **settings: Any
) -> int:
    from jobs_driver import SETTINGS

    reply = core.ask_group(lib.PG_GA_CREATE, group, topics, **{**SETTINGS, **settings})
    assert reply.error == lib.PG_ERR_GROUP
    return reply.detail[0]


def test_a_deleted_group_has_no_jobs(core: JobsCore) -> None:
    core.create_group()
    session = Session(core)
    session.join(credits_=1)
    fire(core, *"abc")
    (held,) = core.jobs_of(session)
    assert core.ask_group(lib.PG_GA_DELETE, b"g").error == 0
    assert core.metrics.jobs == 0
    assert session.ack(held) == Status.LEASE_LOST
    assert session.join().status == Status.NO_GROUP
    fire(core, "d")
    assert core.metrics.jobs == 0


def test_a_member_of_a_deleted_group_gets_one_message_without_jobs(core: JobsCore) -> None:
    core.create_group()
    core.create_group(b"other", (b"u",))
    member, away, other, gone = (Session(core) for _ in range(4))
    for session in (member, away, gone):
        session.join()
    other.join(b"other")
    lib.pg_inbox_away(core.a, away.id)
    lib.pg_inbox_away(core.a, gone.id)
    for session in (away, gone):
        session.join()
    core.received()
    core.ask_group(lib.PG_GA_DELETE, b"g")
    lib.pg_inbox_away(core.a, away.id)
    gone.bye()
    core.create_group()
    fire(core, "a")
    member.join()
    step(core)
    messages = [(session, len(jobs)) for session, jobs in core.messages()]
    assert messages == [(member.id, 0), (member.id, 1)]
    assert core.messages() == []
    lib.pg_inbox_to(core.a, away.id)
    assert core.messages() == [(away.id, [])]
    assert core.messages() == []


def test_a_message_without_jobs_that_was_not_sent_is_sent_again(core: JobsCore) -> None:
    core.create_group()
    session = Session(core)
    session.join()
    core.received()
    core.ask_group(lib.PG_GA_DELETE, b"g")
    number, out = ffi.new("uint64_t *"), bytearray(MESSAGE_MAX)
    assert lib.pg_jobs(core.a, number, ffi.from_buffer(out), MESSAGE_MAX) != 0
    assert number[0] == session.id
    lib.pg_jobs_untaken(core.a)
    lib.pg_inbox_again(core.a, 0)
    assert core.messages() == [(session.id, [])]
    assert core.messages() == []


def test_leases_survive_a_restart_and_are_sent_again_when_the_member_joins(
    core: JobsCore,
) -> None:
    core.create_group()
    session = Session(core)
    session.join()
    fire(core, "a")
    (held,) = core.jobs_of(session)
    restart(core)
    step(core)
    assert core.received() == {}
    session.join()
    assert core.jobs_of(session) == [held]
    restart(core)
    assert session.ack(held) == Status.DONE


def test_a_larger_arena_has_the_same_jobs(core: JobsCore) -> None:
    core.create_group()
    core.create_group(b"h")
    session = Session(core)
    session.join(credits_=1)
    fire(core, "a", "b")
    (held,) = core.jobs_of(session)
    larger = core.migrated(jobs=500, capacity=300)
    larger.check()
    assert larger.metrics.jobs == 4
    with pytest.raises(Fault, match="budgets of consumer groups"):
        core.migrated(jobs=100)
    assert session.ack(held) == Status.DONE


def merged(source: JobsCore, shard: int, shards: int) -> JobsCore:
    """Return the arena of one of the shards to which the namespace is moved."""
    to = JobsCore(shards=shards, shard=shard)
    to.nonces = 100
    numbers = ffi.new("uint32_t[]", list(range(shards)))
    routes = ffi.new("struct pg_route[]", 4)
    routes[0] = {"shards": numbers, "partitions": shards, "fresh_topics": shards > 1}
    scratch = {
        name: ffi.new("uint32_t[]", 64)
        for name in ("namespaces", "topics", "watermarks", "sessions", "bulk_loads")
    }
    sources = ffi.new("struct pg_source[]", [{"arena": source.a, "routes": routes, **scratch}])
    fault = ffi.new("struct pg_fault *")
    assert lib.pg_merge(to.a, sources, 1, fault), ffi.string(fault.detail)
    to.rebuild(source.header.now_ns)
    to.check()
    return to


@pytest.mark.parametrize("shards", [1, 3])
def test_resharding_keeps_groups_and_jobs(core: JobsCore, shards: int) -> None:
    core.create_group(max_attempts=3)
    core.create_group(b"h")
    session = Session(core)
    session.join(credits_=2)
    keys = [f"k{n}" for n in range(20)]
    fire(core, *keys)
    first, second = core.jobs_of(session)
    session.nack(first, SECOND, b"later")
    session.reject(second, b"never")
    step(core)
    assert len(core.jobs_of(session)) == 2
    cores = [merged(core, shard, shards) for shard in range(shards)]
    found: list[bytes] = []
    for to in cores:
        assert to.info().settings.max_attempts == 3
        found += [dead.error for dead in to.dead()]
        again = Session(to)
        again.join(credits_=100)
        step(to, 2 * SECOND)
        jobs = to.jobs_of(again)
        found += [job.key for job in jobs]
        assert {again.ack(job) for job in jobs} <= {Status.DONE}
    assert sorted(found) == sorted(
        [b"never", *(k.encode() for k in keys if k.encode() != second.key)]
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_job_is_acknowledged_twice_or_held_by_two_in_random_steps(seed: int) -> None:
    world = World(seed)
    for _ in range(3000):
        world.step()
    counts = world.core.metrics
    assert min(counts.jobs_acked, counts.jobs_retried, counts.jobs_expired, counts.jobs_dead) > 10
    assert counts.jobs_born == counts.jobs + counts.jobs_acked + counts.jobs_dropped
