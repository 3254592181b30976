"""Messages of the command socket in the core: sessions, batches, re-sent batches and hostile
bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

import pytest
from core_driver import Core
from core_peer import NONCE, SECOND_NS, Peer, Record, cancel, get, put, statuses

from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import Message, Op, PutMode, Status, TimeKind, WireError

pytestmark = pytest.mark.tier("check")

MINUTE_NS = 60 * SECOND_NS


@pytest.fixture
def core() -> Iterator[Core]:
    core = Core(capacity=32, sessions=2)
    yield core
    core.check()


@pytest.fixture
def peer(core: Core) -> Peer:
    return Peer(core)


def refused_and_untouched(peer: Peer, data: bytes, uid: int = 1000) -> wire.Reply:
    """Check that the core refuses the message and changes nothing but counters; return the
    reply."""
    before = peer.core.image()
    reply = peer.core.handle(data, uid=uid, real_boot_ns=peer.now_ns)
    assert isinstance(reply, wire.Reply)
    assert reply.error != 0
    assert (reply.records, reply.body) == (0, b"")
    assert peer.core.image() == before
    return reply


# ---- sessions ------------------------------------------------------------------------------


def test_hello_with_the_same_nonce_finds_the_same_session(peer: Peer) -> None:
    peer.batch(put())
    again = peer.hello()
    assert (again.session, again.last) == (peer.session, 1)
    assert (again.window, again.batch_records) == (lib.PG_WINDOW, lib.PG_BATCH_RECORDS)
    assert again.tick_ns == peer.core.config["tick_ns"]


def test_a_numa_local_client_receives_the_arenas_node(peer: Peer) -> None:
    placement = peer.core.header.placement
    placement.node, placement.reaper_cpu = 2, 8
    assert (peer.hello().node, peer.hello().reaper_cpu) == (2, 8)
    placement.memory_node = 1
    assert peer.hello().node == 1


def test_a_nonce_of_another_user_is_another_session(core: Core, peer: Peer) -> None:
    other = Peer(core, NONCE, uid=7)
    assert other.session != peer.session
    reply = refused_and_untouched(peer, peer.encode(put()), uid=7)
    assert (reply.error, reply.detail[0]) == (WireError.DENIED, 7)


def test_bye_ends_the_session(peer: Peer) -> None:
    data = peer.encode(put())
    assert peer.ask(wire.encode_frame(Message.BYE, peer.session)).error == 0
    reply = refused_and_untouched(peer, data)
    assert (reply.error, reply.detail[0]) == (WireError.SESSION_EXPIRED, peer.session)
    assert peer.hello().session != peer.session


def test_no_session_is_taken_from_a_silent_client(core: Core, peer: Peer) -> None:
    second = Peer(core, b"2" * 16)
    second.now_ns = peer.now_ns = 2 * MINUTE_NS
    second.batch(put(b"second"))
    reply = refused_and_untouched(peer, wire.encode_hello(b"3" * 16))
    assert (reply.error, reply.detail) == (WireError.SESSIONS_FULL, (2, 2 * MINUTE_NS))
    assert str(reply.refusal()) == (
        "session table full: 2 of 2 sessions are open, the most idle one was last used 120 s ago; "
        "raise --sessions or close idle clients"
    )
    assert peer.batch(put(b"first")) == [(Status.ADDED, 2)]


WINDOWS = 16
"""Number of sessions that can fill their windows with full batches if the answer pool is sized for
20 sessions."""


def test_answers_keep_their_real_size_in_a_bounded_pool() -> None:
    core = Core(sessions=20)
    peers = [Peer(core, b"%016d" % i) for i in range(20)]
    full = [cancel(b"none")] * lib.PG_BATCH_RECORDS
    sent = []
    for i, peer in enumerate(peers[:WINDOWS]):
        peer.now_ns = i * SECOND_NS
        for _ in range(lib.PG_WINDOW):
            sent.append((peer, peer.encode(*full)))
            peer.batch(*full)
    late = peers[WINDOWS]
    late.now_ns = 20 * SECOND_NS
    refused = late.ask(late.encode(cancel()))
    assert (refused.error, refused.detail) == (WireError.BUSY, (65_536, 0))
    for peer, data in sent:
        assert len(statuses(peer.ask(data))) == lib.PG_BATCH_RECORDS
    late.now_ns = MINUTE_NS + SECOND_NS // 2
    assert late.batch(cancel()) == [(Status.UNKNOWN, 0)]
    core.check()
    forgotten = [data for peer, data in sent if peer.ask(data).error == WireError.STALE]
    assert forgotten == [data for peer, data in sent if peer is peers[0]]
    assert peers[0].batch(put()) == [(Status.ADDED, 1)]
    core.attach()
    core.rebuild(0)
    assert [peer.hello().last for peer in (peers[0], late)] == [5, 1]
    core.check()


def test_an_evicted_row_forgets_its_replies(core: Core, peer: Peer) -> None:
    sent = peer.encode(put())
    peer.batch(put())
    peer.ask(wire.encode_frame(Message.BYE, peer.session))
    again = peer.hello()
    assert again.last == 0
    stolen = sent[:8] + struct.pack("<Q", again.session) + sent[16:]
    assert statuses(peer.ask(stolen)) == [(Status.EXISTS, 1)]


# ---- batches -------------------------------------------------------------------------------


def test_a_batch_answers_each_record_in_order(peer: Peer) -> None:
    assert peer.batch(
        put(b"a"), put(b"a"), put(b"a", mode=PutMode.KEEP), put(b"a", mode=PutMode.REPLACE),
        put(b"a", mode=PutMode.EXTEND, delay_ns=2 * SECOND_NS), cancel(b"a", ticket=1),
        cancel(b"a"), cancel(b"a"),
    ) == [
        (Status.ADDED, 1), (Status.EXISTS, 1), (Status.KEPT, 1), (Status.REPLACED, 2),
        (Status.EXTENDED, 2), (Status.UNKNOWN, 0), (Status.CANCELLED, 2), (Status.UNKNOWN, 0),
    ]  # fmt: skip


def test_a_full_batch(core: Core) -> None:
    core = Core(capacity=1024)
    peer = Peer(core)
    records = [put(b"%d" % i, name=i % 2) for i in range(1024)]
    names = [(b"n", b"t"), (b"n", b"")]
    assert peer.batch(*records, names=names) == [(Status.ADDED, i + 1) for i in range(1024)]
    assert peer.batch(*(cancel(b"%d" % i) for i in range(1024)))[-1] == (Status.CANCELLED, 1024)
    core.check()


@pytest.mark.parametrize("at_once", [1, lib.PG_WINDOW])
def test_a_batch_sent_again_gets_the_first_answers(peer: Peer, at_once: int) -> None:
    sent, answers = [], []
    for i in range(at_once):
        sent.append(peer.encode(put(b"%d" % i), cancel(b"0")))
        answers.append(peer.batch(put(b"%d" % i), cancel(b"0")))
    for _ in range(2):
        for data, answer in zip(sent, answers, strict=True):
            before = peer.core.image()
            assert statuses(peer.ask(data)) == answer
            assert peer.core.image() == before
    assert peer.core.metrics.batches_repeated == 2 * at_once


def test_answers_are_remembered_across_a_rebuild_and_a_migration(peer: Peer) -> None:
    sent = peer.encode(put(b"a"))
    peer.batch(put(b"a"))
    peer.batch(cancel(b"a"))
    peer.core.attach()
    peer.core.rebuild(0)
    assert statuses(peer.ask(sent)) == [(Status.ADDED, 1)]
    peer.core = peer.core.migrated(capacity=100, sessions=7)
    assert statuses(peer.ask(sent)) == [(Status.ADDED, 1)]
    assert peer.batch(put(b"b")) == [(Status.ADDED, 2)]
    peer.core.check()


def test_a_batch_behind_the_window_is_stale(peer: Peer) -> None:
    sent = [peer.encode(put(b"%d" % i), sequence=i + 1) for i in range(6)]
    for i in range(6):
        peer.batch(put(b"%d" % i))
    for old in sent[:2]:
        reply = refused_and_untouched(peer, old)
        assert reply.error == WireError.STALE
        assert reply.detail == (3, struct.unpack_from("<Q", old, 16)[0])
    for data in sent[2:]:
        assert statuses(peer.ask(data))[0][0] == Status.ADDED


@pytest.mark.parametrize("sequence", [2, 3, 100, 2**64 - 1])
def test_a_gap_is_out_of_order(peer: Peer, sequence: int) -> None:
    reply = refused_and_untouched(peer, peer.encode(put(), sequence=sequence))
    assert (reply.error, reply.detail) == (WireError.OUT_OF_ORDER, (1, sequence))


@pytest.mark.parametrize("batches", [0, 4, 5])
def test_batch_number_zero_is_refused(peer: Peer, batches: int) -> None:
    for i in range(batches):
        peer.batch(put(b"%d" % i))
    reply = refused_and_untouched(peer, peer.encode(put(b"x"), sequence=0))
    assert reply.error == WireError.MALFORMED


def test_another_batch_under_the_same_sequence(peer: Peer) -> None:
    peer.batch(put(b"a"))
    for changed in (put(b"b"), put(b"a", delay_ns=1), put(b"a", b"x"), cancel(b"a")):
        reply = refused_and_untouched(peer, peer.encode(changed, sequence=1))
        assert reply.error == WireError.CHANGED


def test_no_small_change_of_a_batch_goes_unnoticed(peer: Peer) -> None:
    text = bytearray(b"the quick brown fox jumps over the lazy dog, " * 8)
    peer.batch(put(b"a", bytes(text)))
    rng = random.Random(1)
    for _ in range(2000):
        changed = bytearray(text)
        first = rng.randrange(len(text) - 64)
        for at in (first, first + 32):
            changed[at] ^= rng.randrange(1, 256)
        reply = peer.ask(peer.encode(put(b"a", bytes(changed)), sequence=1))
        assert reply.error == WireError.CHANGED


def test_two_sessions_do_not_see_each_other(core: Core, peer: Peer) -> None:
    other = Peer(core, b"2" * 16)
    assert peer.batch(put(b"a")) == [(Status.ADDED, 1)]
    assert other.batch(put(b"b")) == [(Status.ADDED, 2)]
    assert peer.ask(peer.encode(put(b"a"), sequence=1)).body != b""
    assert other.batch(cancel(b"a")) == [(Status.CANCELLED, 1)]


def test_a_batch_that_was_interrupted_goes_on_where_it_stood(core: Core, peer: Peer) -> None:
    """The test restores the state of a daemon that died after it had applied one of three
    records."""
    records = [put(b"%d" % i) for i in range(3)]
    data = peer.encode(*records)
    peer.ask(data)
    session = core.rows_of_sessions()[0]
    session.last, session.current, session.applied = 0, 1, 1
    core.cancel("1")
    assert statuses(peer.ask(data)) == [
        (Status.ADDED, 1), (Status.ADDED, 4), (Status.EXISTS, 3)
    ]  # fmt: skip


# ---- names ---------------------------------------------------------------------------------


def test_names_of_one_batch_do_not_take_each_others_rows() -> None:
    core = Core(topics=2)
    peer = Peer(core)
    names = [(b"n", b"a"), (b"n", b"b"), (b"n", b"c")]
    found = peer.batch(*(put(b"%d" % i, name=i) for i in range(3)), names=names)
    assert [status for status, _ in found] == [Status.ADDED, Status.ADDED, Status.FULL_TOPICS]
    assert {i.key: i.topic for i in core.scan()} == {"0": "a", "1": "b"}
    core.check()


def test_a_topic_without_timers_gives_its_row_to_the_next_batch() -> None:
    core = Core(topics=1)
    peer = Peer(core)
    peer.batch(put(b"k"), names=[(b"n", b"a")])
    assert peer.batch(put(b"x"), names=[(b"n", b"b")]) == [(Status.FULL_TOPICS, 0)]
    peer.batch(cancel(b"k"))
    assert peer.batch(put(b"x"), names=[(b"n", b"b")]) == [(Status.ADDED, 2)]
    assert core.topic_rows()[0][:3] == (b"n", b"b", 2)
    core.check()


def test_a_namespace_is_found_by_an_earlier_name_of_the_table(peer: Peer) -> None:
    names = [(b"new", b""), (b"new", b"t")]
    assert peer.batch(put(b"k", name=1), cancel(b"k", name=0), names=names) == [
        (Status.ADDED, 1), (Status.CANCELLED, 1),
    ]  # fmt: skip


def test_cancel_needs_no_space_for_names() -> None:
    core = Core(topics=1, namespaces=1)
    peer = Peer(core)
    peer.batch(put(b"k"), names=[(b"n", b"a")])
    before = core.image()[0]
    assert peer.batch(cancel(b"k"), names=[(b"other", b"")]) == [(Status.UNKNOWN, 0)]
    assert core.image()[0] == before
    assert peer.batch(cancel(b"k"), names=[(b"n", b"")]) == [(Status.CANCELLED, 1)]


def test_a_batch_may_use_one_name_twice(peer: Peer) -> None:
    names = [(b"n", b"t"), (b"n", b"t"), (b"n", b"")]
    assert peer.batch(put(b"a"), put(b"a", name=1), cancel(b"a", name=2), names=names) == [
        (Status.ADDED, 1), (Status.EXISTS, 1), (Status.CANCELLED, 1)
    ]  # fmt: skip


# ---- queries -------------------------------------------------------------------------------


def query(peer: Peer, *records: Record, names: list[tuple[bytes, bytes]] | None = None) -> bytes:
    return peer.encode(*records, kind=Message.QUERY, names=names, sequence=9)


def test_query_finds_armed_timers_and_changes_nothing(peer: Peer) -> None:
    peer.batch(put(b"a", b"pay"), put(b"w", kind=TimeKind.WALL, delay_ns=SECOND_NS))
    before = peer.core.image()
    names = [(b"n", b""), (b"nowhere", b"t")]
    reply = peer.ask(query(peer, get(b"a"), get(b"z"), get(b"a", name=1), get(b"w"), names=names))
    a, z, elsewhere, w = wire.decode_infos(reply.body, reply.records)
    assert (a.status, a.ticket, a.deadline_ns, a.wall_ns) == (Status.FOUND, 1, SECOND_NS, None)
    assert (a.namespace, a.topic, a.key, a.payload) == ("n", "t", "a", b"pay")
    assert z.status == elsewhere.status == Status.UNKNOWN
    assert (w.status, w.wall_ns) == (Status.FOUND, SECOND_NS)
    assert peer.core.image() == before
    assert reply.sequence == 9


def test_a_query_whose_answer_is_too_large(core: Core) -> None:
    core = Core(payload_bytes=1 << 20)
    peer = Peer(core)
    peer.batch(put(b"big", bytes(65536)))
    reply = refused_and_untouched(peer, query(peer, *[get(b"big")] * 200))
    assert reply.error == WireError.TOO_LARGE
    assert len(peer.ask(query(peer, *[get(b"big")] * 100)).body) > 100 * 65536


# ---- virtual time --------------------------------------------------------------------------


def test_a_batch_for_a_later_time_waits_for_it(peer: Peer) -> None:
    data = peer.encode(put(), at_ns=SECOND_NS)
    before = peer.core.image()
    assert peer.core.handle(data) == SECOND_NS
    assert peer.core.image() == before
    peer.core.advance(SECOND_NS)
    assert statuses(peer.ask(data)) == [(Status.ADDED, 1)]
    assert peer.core.get("k").deadline_ns == 2 * SECOND_NS
    peer.core.advance(3 * SECOND_NS)
    assert statuses(peer.ask(data)) == [(Status.ADDED, 1)]


def test_a_batch_for_the_past_or_for_a_real_clock_is_refused(peer: Peer) -> None:
    peer.core.advance(SECOND_NS)
    reply = refused_and_untouched(peer, peer.encode(put(), at_ns=5))
    assert (reply.error, reply.detail) == (WireError.CLOCK, (SECOND_NS, 5))
    real = Peer(Core(clock_kind=lib.PG_CLOCK_BOOT))
    assert refused_and_untouched(real, real.encode(put(), at_ns=5)).error == WireError.CLOCK


# ---- hostile bytes -------------------------------------------------------------------------


def patched(offset: int, form: str, value: int) -> Callable[[bytes], bytes]:
    def patch(data: bytes) -> bytes:
        return data[:offset] + struct.pack(form, value) + data[offset + struct.calcsize(form) :]

    return patch


# Byte offsets in a batch whose name table has one pair, ("n", "t"), padded to 8 bytes.
NAMES_AT, RECORD_AT = 64, 72
FRAME_BAD = {
    "magic": (patched(0, "<I", 0x12345678), WireError.MALFORMED),
    "version": (patched(4, "<H", 2), WireError.VERSION),
    "message": (patched(6, "<H", 99), WireError.UNKNOWN_MESSAGE),
    "admin message": (patched(6, "<H", Message.ADVANCE), WireError.UNKNOWN_MESSAGE),
    "session": (patched(8, "<Q", 12345), WireError.SESSION_EXPIRED),
    "row of the session": (patched(8, "<H", 0xFFFF), WireError.SESSION_EXPIRED),
    "no records": (patched(24, "<I", 0), WireError.TOO_LARGE),
    "too many records": (patched(24, "<I", 1025), WireError.TOO_LARGE),
    "records that are not there": (patched(24, "<I", 3), WireError.MALFORMED),
    "no names": (patched(28, "<H", 0), WireError.TOO_LARGE),
    "too many names": (patched(28, "<H", 257), WireError.TOO_LARGE),
    "names that are not there": (patched(28, "<H", 4), WireError.MALFORMED),
    "error in a request": (patched(30, "<H", 1), WireError.MALFORMED),
    "odd names length": (patched(32, "<I", 7), WireError.MALFORMED),
    "names beyond the end": (patched(32, "<I", 1 << 20), WireError.MALFORMED),
    "huge names length": (patched(32, "<I", 0xFFFFFFF8), WireError.MALFORMED),
    "shorter names": (patched(32, "<I", 0), WireError.MALFORMED),
    "unknown flag": (patched(36, "<I", 8), WireError.MALFORMED),
    "durable without a WAL": (patched(36, "<I", 2), WireError.NO_WAL),
}
NAMES_BAD = {
    "empty namespace": patched(NAMES_AT, "B", 0),
    "namespace beyond its bound": patched(NAMES_AT, "B", 64),
    "topic beyond its bound": patched(NAMES_AT + 1, "B", 128),
    "NUL in a namespace": patched(NAMES_AT + 2, "B", 0),
    "NUL in a topic": patched(NAMES_AT + 3, "B", 0),
}
RECORD_BAD = {
    "op 0": patched(RECORD_AT, "B", 0),
    "GET in a batch": patched(RECORD_AT, "B", Op.GET),
    "reserved op": patched(RECORD_AT, "B", lib.PG_OP_WATCH),
    "unknown op": patched(RECORD_AT, "B", 200),
    "unknown mode": patched(RECORD_AT + 1, "B", 4),
    "unknown key type": patched(RECORD_AT + 2, "B", 3),
    "UUID of 2 bytes": patched(RECORD_AT + 2, "B", 2),
    "empty key": patched(RECORD_AT + 3, "B", 0),
    "longer key": patched(RECORD_AT + 3, "B", 3),
    "shorter key": patched(RECORD_AT + 3, "B", 1),
    "name out of range": patched(RECORD_AT + 4, "<H", 1),
    "unknown kind of time": patched(RECORD_AT + 6, "B", 3),
    "slack beyond its bound": patched(RECORD_AT + 7, "B", 48),
    "longer payload": patched(RECORD_AT + 8, "<I", 6),
    "shorter payload": patched(RECORD_AT + 8, "<I", 4),
    "payload beyond its bound": patched(RECORD_AT + 8, "<I", 65537),
    "huge payload": patched(RECORD_AT + 8, "<I", 0xFFFFFFFF),
    "reserved word": patched(RECORD_AT + 12, "<I", 1),
    "value of a put": patched(RECORD_AT + 24, "<Q", 1),
}


def victim(peer: Peer) -> bytes:
    """Return a valid batch: a put of key "kk" with a payload of 5 bytes, and a cancel."""
    return peer.encode(put(b"kk", b"12345"), cancel(b"c"))


@pytest.mark.parametrize("detail", FRAME_BAD)
def test_a_bad_frame_is_refused(peer: Peer, detail: str) -> None:
    patch, error = FRAME_BAD[detail]
    assert refused_and_untouched(peer, patch(victim(peer))).error == error


@pytest.mark.parametrize("detail", NAMES_BAD)
def test_bad_names_are_refused(peer: Peer, detail: str) -> None:
    reply = refused_and_untouched(peer, NAMES_BAD[detail](victim(peer)))
    assert (reply.error, reply.detail) == (WireError.MALFORMED, (NAMES_AT, 0))


@pytest.mark.parametrize("detail", RECORD_BAD)
def test_a_bad_record_is_refused(peer: Peer, detail: str) -> None:
    reply = refused_and_untouched(peer, RECORD_BAD[detail](victim(peer)))
    assert reply.error == WireError.MALFORMED


@pytest.mark.parametrize("field", [(1, "B", 1), (6, "B", 1), (8, "<I", 1), (16, "<q", 1)])
def test_a_cancel_with_fields_of_a_put_is_refused(peer: Peer, field: tuple[int, str, int]) -> None:
    offset, form, value = field
    bad = patched(RECORD_AT + 32 + offset, form, value)(victim(peer))
    reply = refused_and_untouched(peer, bad)
    assert (reply.error, reply.detail) == (WireError.MALFORMED, (RECORD_AT + 32, 1))


def test_every_truncation_and_every_addition_is_refused(peer: Peer) -> None:
    whole = victim(peer)
    for length in range(len(whole)):
        assert refused_and_untouched(peer, whole[:length]).error == WireError.MALFORMED
    for more in (1, 7, 8, 64):
        assert refused_and_untouched(peer, whole + bytes(more)).error == WireError.MALFORMED
    assert peer.ask(whole).error == 0


def test_wrong_lengths_of_the_small_messages(peer: Peer) -> None:
    hello = wire.encode_hello(b"h" * 16)
    for data in (hello[:-1], hello + b"\0", hello[:64]):
        assert refused_and_untouched(peer, data).error == WireError.MALFORMED
    assert refused_and_untouched(peer, b"").error == WireError.MALFORMED


def test_a_message_beyond_the_bound(peer: Peer) -> None:
    reply = refused_and_untouched(peer, victim(peer) + bytes(layout.MESSAGE_MAX))
    assert (reply.error, reply.detail[0]) == (WireError.TOO_LARGE, layout.MESSAGE_MAX)


def test_random_bytes(peer: Peer) -> None:
    rng = random.Random(7)
    for _ in range(500):
        refused_and_untouched(peer, rng.randbytes(rng.randrange(300)))


def test_random_bytes_behind_a_good_frame(peer: Peer) -> None:
    rng = random.Random(8)
    peer.core.image()
    for _ in range(1000):
        names, length = rng.randrange(4), rng.randrange(200)
        head = wire.encode_frame(
            rng.choice([Message.BATCH, Message.QUERY]), peer.session, 1,
            count=rng.randrange(4), names=names, names_bytes=8 * rng.randrange(5),
        )  # fmt: skip
        refused_and_untouched(peer, head + rng.randbytes(length))


def test_every_mutation_of_one_byte_is_valid_or_refused() -> None:
    """A batch with one changed byte is either refused or another valid batch."""
    core = Core(capacity=4, sessions=1, payload_bytes=4096, fanout=256, tick_ns=100_000_000)
    peer = Peer(core)
    peer.batch(put(b"kk", b"old"))
    whole = peer.encode(
        put(b"kk", b"12345", mode=PutMode.REPLACE), cancel(b"c"), names=[(b"nn", b"tt")]
    )
    state = (core.arena[:], core.private[:], bytes(core.handle_memory))
    shared = core.image()
    accepted = 0
    for at in range(len(whole)):
        for value in range(256):
            reply = core.handle(whole[:at] + bytes((value,)) + whole[at + 1 :])
            if isinstance(reply, int) or reply.error:
                assert core.image() == shared
                continue
            core.check()
            accepted += 1
            core.arena[:], core.private[:], core.handle_memory[:] = state
    assert accepted > len(whole)
