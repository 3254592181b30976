"""Answers that wait for the journal: which go out when, and what is said when it stopped."""

from __future__ import annotations

import struct

import pytest

from purgatoryd.daemon import lanes
from purgatoryd.daemon.held import HELD_BYTES_MAX, Held
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.layout import Message, Status, WireError

Sent = list[tuple[bytes, wire.Reply]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What goes out, in place of a socket."""
    taken: Sent = []

    def send(_: object, route: bytes, body: bytes) -> None:
        taken.append((route, wire.decode_reply(bytes(body))))

    monkeypatch.setattr(lanes, "send", send)
    return taken


def held() -> Held:
    return Held(None, lambda reply, built_boot_ns: None)  # type: ignore[arg-type]


def reply(sequence: int, *statuses: int, extra: bytes = b"") -> memoryview:
    """The answer to a batch of session 7."""
    head = wire.encode_frame(Message.BATCH, 7, sequence, count=len(statuses))
    results = b"".join(struct.pack("<Qq", 9 << 8 | status, 0) for status in statuses)
    return memoryview(bytearray(head + results + extra))


def sequences(sent: Sent) -> list[int]:
    return [answer.sequence for _, answer in sent]


def test_answers_go_out_in_order_once_their_records_are_on_disk(sent: Sent) -> None:
    waiting = held()
    for lsn, sequence in ((5, 1), (5, 2), (8, 3)):
        waiting.hold(lsn, b"route", reply(sequence, Status.ADDED), 0)
    waiting.release(4)
    assert sequences(sent) == []
    waiting.release(7)
    assert sequences(sent) == [1, 2]
    waiting.release(8)
    waiting.release(100)
    assert sequences(sent) == [1, 2, 3]


def test_an_answer_is_kept_as_it_was(sent: Sent) -> None:
    waiting, buffer = held(), reply(1, Status.ADDED)
    waiting.hold(1, b"route", buffer, 0)
    buffer[:] = bytes(len(buffer))  # the arena's buffer, which the next call overwrites
    waiting.release(1)
    assert sequences(sent) == [1]


def test_a_stopped_journal_is_told_to_all_who_wait(sent: Sent) -> None:
    waiting = held()
    waiting.hold(5, b"one", reply(1, Status.ADDED, Status.JOURNAL), 0)
    waiting.hold(6, b"two", reply(2, Status.JOURNAL, Status.JOURNAL, extra=bytes(24)), 0)
    waiting.refuse(committed_lsn=4, errno=28)
    (first, applied), (second, refused) = sent
    assert (first, applied.session, applied.sequence) == (b"one", 7, 1)
    assert (applied.error, applied.detail) == (WireError.NOT_DURABLE, (4, 28))
    assert (second, refused.error) == (b"two", 0), "nothing was applied: each record says so"
    waiting.release(100)
    assert len(sent) == 2


def test_what_waits_is_bounded(sent: Sent) -> None:
    waiting, count = held(), 0
    while not waiting.full:
        waiting.hold(1, b"route", reply(count, *[Status.ADDED] * 1024), 0)
        count += 1
    assert count * 16 * 1024 < 2 * HELD_BYTES_MAX
    waiting.release(1)
    assert not waiting.full
    assert sequences(sent) == list(range(count))
