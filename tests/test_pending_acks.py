"""Answers that wait for the WAL: when they are sent, and which errors they report if the WAL has
stopped."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest

from purgatoryd.daemon import commands
from purgatoryd.daemon.listeners import transport
from purgatoryd.daemon.listeners.ring_server import RingServer
from purgatoryd.daemon.pending_acks import PENDING_BYTES_MAX, PendingAcks
from purgatoryd.daemon.reaper import Reaper
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi
from purgatoryd.shm_layout.arena import Handled
from purgatoryd.shm_layout.layout import Measured, Message, Status, WireError

pytestmark = pytest.mark.tier("check")

Sent = list[tuple[Hashable, wire.Reply]]


@pytest.fixture
def sent() -> Sent:
    """A list in place of a socket: the messages that were sent."""
    return []


@pytest.fixture
def waiting(sent: Sent) -> PendingAcks:
    return PendingAcks(lambda route, body, _: sent.append((route, wire.decode_reply(bytes(body)))))


def reply(sequence: int, *statuses: int, extra: bytes = b"") -> memoryview:
    """Return the answer to a batch of session 7."""
    head = wire.encode_frame(Message.BATCH, 7, sequence, count=len(statuses))
    results = b"".join(struct.pack("<Qq", 9 << 8 | status, 0) for status in statuses)
    return memoryview(bytearray(head + results + extra))


def serving(
    replies: list[memoryview], send: Callable[..., bool], boot_ns: Callable[[], int],
    measure: Callable[[Measured, int], None],
) -> tuple[commands.Commands, Any]:  # fmt: skip
    """Return (commands, WAL). One message arrives for each of `replies`. The record of each message
    has LSN 5, and the WAL on disk ends at LSN 4."""
    asked = [transport.Request(b"route", b"", 0, 0, 0, 0, -1) for _ in replies]
    socket = SimpleNamespace(
        serve=lambda *_: transport.Served(request=asked.pop()) if asked else transport.NOTHING,
        send=send,
    )
    handled = iter(replies)
    arena: Any = SimpleNamespace(
        handle=lambda *message: (Handled.REPLY, next(handled)), durable_lsn=5,
        served=lambda ended_boot_ns: None, inbox_to=lambda session: None,
        session_pids=dict, session_grace_ns=lambda session: None, measure=measure,
    )  # fmt: skip
    host: Any = SimpleNamespace(boot_ns=boot_ns)
    wal: Any = SimpleNamespace(
        committed_lsn=4, errno=0, replied=lambda *answer: None, released=lambda callers: None,
        requests=ffi.NULL,
    )  # fmt: skip
    access: Any = SimpleNamespace(may_connect=lambda uid, gid: True)
    sockets: Any = SimpleNamespace(
        commands=socket, peers=SimpleNamespace(), ring_server=RingServer(0)
    )
    processes: Any = SimpleNamespace()
    schedules: Any = SimpleNamespace()
    return commands.Commands(arena, sockets, access, wal, 0, host, processes, schedules), wal


def sequences(sent: Sent) -> list[int]:
    return [answer.sequence for _, answer in sent]


def test_answers_go_out_in_order_once_their_records_are_on_disk(
    waiting: PendingAcks, sent: Sent
) -> None:
    for lsn, sequence in ((5, 1), (5, 2), (8, 3)):
        waiting.hold(lsn, b"route", reply(sequence, Status.ADDED), 0)
    waiting.release(4)
    assert sequences(sent) == []
    waiting.release(7)
    assert sequences(sent) == [1, 2]
    waiting.release(8)
    waiting.release(100)
    assert sequences(sent) == [1, 2, 3]


def test_a_refusal_finds_the_answers_that_its_peer_waits_for(
    waiting: PendingAcks, sent: Sent
) -> None:
    for lsn, route in ((5, b"route"), (8, b"route"), (9, b"other")):
        waiting.hold(lsn, route, reply(lsn, Status.ADDED), 0)
    assert waiting.newest_lsn(b"nobody") == 0
    waiting.hold(waiting.newest_lsn(b"route"), b"route", reply(10), 0)
    waiting.release(8)
    assert waiting.newest_lsn(b"route") == 9
    waiting.release(9)
    assert sequences(sent) == [5, 8, 9, 10]
    assert waiting.newest_lsn(b"route") == waiting.newest_lsn(b"other") == 0


def test_the_refusal_of_an_ended_session_comes_behind_its_pending_answer() -> None:
    """A batch is applied, its session ends, and then a second copy of the batch is refused."""
    answers: list[tuple[int, int]] = []
    refusal = memoryview(wire.encode_frame(Message.BATCH, 7, 1, error=WireError.SESSION_EXPIRED))

    def send(route: bytes, body: bytes) -> bool:
        decoded = wire.decode_reply(bytes(body))
        answers.append((decoded.sequence, decoded.error))
        return True

    served, wal = serving([reply(1, Status.ADDED), refusal], send, lambda: 10, lambda *_: None)
    served.serve()
    assert answers == []
    wal.committed_lsn = 5
    served.release()
    assert answers == [(1, 0), (1, WireError.SESSION_EXPIRED)]


@pytest.mark.parametrize("error", [0, WireError.SESSION_EXPIRED])
def test_an_answer_on_disk_does_not_overtake_a_pending_answer(error: int) -> None:
    """A commit ends while the second answer is made."""
    answers: list[tuple[int, int]] = []
    last = memoryview(bytearray(wire.encode_frame(Message.BATCH, 7, 2, error=error)))

    def send(route: bytes, body: bytes) -> bool:
        decoded = wire.decode_reply(bytes(body))
        answers.append((decoded.sequence, decoded.error))
        return True

    served, wal = serving([reply(1, Status.ADDED), last], send, lambda: 10, lambda *_: None)
    arena: Any = served._arena
    handle = arena.handle

    def handle_during_commit(*message: Any) -> tuple[Handled, Any]:
        found: tuple[Handled, Any] = handle(*message)
        wal.committed_lsn = 5 if found[1] is last else 4
        return found

    arena.handle = handle_during_commit
    served.serve()
    assert answers == []
    served.release()
    assert answers == [(1, 0), (2, error)]


def test_an_answer_is_kept_as_it_was(waiting: PendingAcks, sent: Sent) -> None:
    buffer = reply(1, Status.ADDED)
    waiting.hold(1, b"route", buffer, 0)
    buffer[:] = bytes(len(buffer))  # the next call of the core overwrites the buffer in this way
    waiting.release(1)
    assert sequences(sent) == [1]


def test_a_stopped_wal_is_reported_to_all_who_wait(waiting: PendingAcks, sent: Sent) -> None:
    waiting.hold(5, b"one", reply(1, Status.ADDED, Status.WAL), 0)
    waiting.hold(6, b"two", reply(2, Status.WAL, Status.WAL, extra=bytes(24)), 0)
    waiting.refuse(committed_lsn=4, errno=28)
    (first, applied), (second, refused) = sent
    assert (first, applied.session, applied.sequence) == (b"one", 7, 1)
    assert (applied.error, applied.detail) == (WireError.NOT_DURABLE, (4, 28))
    assert (second, refused.error) == (b"two", 0), "each record has status WAL"
    waiting.release(100)
    assert len(sent) == 2


def test_a_stopped_wal_is_reported_to_a_bulk_load(waiting: PendingAcks, sent: Sent) -> None:
    waiting.hold(5, b"one", memoryview(wire.encode_frame(Message.BULK_LOAD, 7, 1)), 0)
    refusal = wire.encode_frame(Message.BULK_LOAD, 7, 2, error=WireError.DENIED)
    waiting.hold(5, b"two", memoryview(refusal), 0)
    waiting.refuse(committed_lsn=4, errno=28)
    assert [(answer.message, answer.sequence, answer.error) for _, answer in sent] == [
        (Message.BULK_LOAD, 1, WireError.NOT_DURABLE),
        (Message.BULK_LOAD, 2, WireError.DENIED),
    ]


def test_waiting_work_is_bounded(waiting: PendingAcks, sent: Sent) -> None:
    count = 0
    while not waiting.full:
        waiting.hold(1, b"route", reply(count, *[Status.ADDED] * 1024), 0)
        count += 1
    assert count * 16 * 1024 < 2 * PENDING_BYTES_MAX
    waiting.release(1)
    assert not waiting.full
    assert sequences(sent) == list(range(count))


def test_time_on_disk_belongs_to_the_response_queue() -> None:
    """The socket needs 7 ns to take a message."""
    now = SimpleNamespace(ns=10)

    def takes(*_: object) -> bool:
        now.ns += 7
        return True

    spans: list[tuple[Measured, int]] = []
    served, wal = serving(
        [reply(1, Status.ADDED)], takes, lambda: now.ns,
        lambda which, span_ns: spans.append((which, span_ns)),
    )  # fmt: skip
    served.serve()
    served.release()
    assert spans == []
    now.ns, wal.committed_lsn = 110, 5
    served.release()
    assert spans == [(Measured.RESPONSE_QUEUE, 100), (Measured.SEND, 7)]


def test_a_stop_publishes_commits_and_then_answers() -> None:
    done: list[str] = []

    def publish() -> bool:
        done.append("publish")
        return len(done) < 3

    reaper: Any = SimpleNamespace(
        _lifecycle=SimpleNamespace(
            enter=lambda state: None, service_manager=SimpleNamespace(alive=lambda: None)
        ),
        _publish=publish,
        wal=SimpleNamespace(commit=lambda: done.append("commit")),
        _commands=SimpleNamespace(release=lambda: done.append("release")),
    )
    Reaper.finish(reaper)
    assert done == ["publish"] * 3 + ["commit", "release"]
