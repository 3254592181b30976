"""The order of requests if one uid sends more than its share. The clock is simulated."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from purgatoryd.daemon import commands
from purgatoryd.daemon.commands import OVERHEAD_BYTES, TAKEN_PER_ITERATION, Commands
from purgatoryd.daemon.listeners.ring_server import RingServer
from purgatoryd.daemon.listeners.time_shares import SHARE_NS, SHARED_NS
from purgatoryd.daemon.listeners.transport import NOTHING, Request, Served
from purgatoryd.shm_layout._core import ffi
from purgatoryd.shm_layout.arena import Handled

pytestmark = pytest.mark.tier("check")

ALICE, BOB = 61001, 61002


class Queue:
    """Commands with stand-ins that store the waiting messages and the answered peers. An answer
    takes `cost_ns`."""

    def __init__(self) -> None:
        self.came: deque[Request] = deque()
        self.answered: list[bytes] = []
        self.now_ns = 1
        self.cost_ns = SHARE_NS
        arena: Any = SimpleNamespace(
            handle=self._handle, served=lambda _: None, measure=lambda *_: None, durable_lsn=0,
            session_pids=dict,
        )  # fmt: skip
        wal: Any = SimpleNamespace(committed_lsn=0, replied=lambda *_: None, requests=ffi.NULL)
        access: Any = SimpleNamespace(may_connect=lambda *_: True)
        socket = SimpleNamespace(
            serve=lambda *_: Served(request=self.came.popleft()) if self.came else NOTHING,
            send=lambda route, _: self.answered.append(route),
        )
        transport: Any = SimpleNamespace(
            commands=socket, peers=SimpleNamespace(), ring_server=RingServer(0)
        )
        host: Any = SimpleNamespace(boot_ns=lambda: self.now_ns)
        processes: Any = SimpleNamespace()
        schedules: Any = SimpleNamespace()
        self.commands = Commands(arena, transport, access, wal, 0, host, processes, schedules)

    def _handle(self, *_: object) -> tuple[Handled, memoryview]:
        self.now_ns += self.cost_ns
        return Handled.REPLY, memoryview(bytes(64))

    def comes(self, uid: int, route: bytes) -> None:
        self.came.append(Request(route, bytes(64), uid, uid, 1, 0, -1))

    def iterate(self) -> list[bytes]:
        """Run one loop iteration; return the peers that it has answered."""
        self.answered.clear()
        self.commands.serve()
        return [*self.answered]


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_a_peer_alone_has_the_whole_iteration(queue: Queue) -> None:
    for n in range(10):
        queue.comes(ALICE, b"a%d" % n)
    assert queue.iterate() == [b"a%d" % n for n in range(10)]


def meet(queue: Queue) -> None:
    """Let two peers of different uids send at the same time."""
    queue.comes(ALICE, b"a")
    queue.comes(BOB, b"b")
    queue.iterate()


def test_one_request_does_not_wait_for_each_of_anothers_connections(queue: Queue) -> None:
    meet(queue)
    for n in range(TAKEN_PER_ITERATION - 1):
        queue.comes(ALICE, b"a%d" % n)
    queue.comes(BOB, b"b")
    assert queue.iterate() == [b"a0", b"b"]
    queue.comes(BOB, b"b")
    assert queue.iterate() == [b"a1", b"b"]


def test_waiting_messages_are_served_completely_and_in_order(queue: Queue) -> None:
    meet(queue)
    sent = [b"a%d" % (n % 3) for n in range(12)]
    for route in sent:
        queue.comes(ALICE, route)
    answered = [route for _ in sent for route in queue.iterate()]
    assert sorted(answered) == sorted(sent)
    assert queue.iterate() == []
    assert not queue.commands.serve()


def test_shares_end_once_only_one_is_left(queue: Queue) -> None:
    meet(queue)
    queue.now_ns += SHARED_NS
    for n in range(10):
        queue.comes(ALICE, b"a%d" % n)
    queue.iterate()  # both peers were served just before, so ALICE still has only her share
    queue.now_ns += SHARED_NS
    while queue.commands.serve():
        pass
    for n in range(10):
        queue.comes(ALICE, b"a%d" % n)
    assert len(queue.iterate()) == 10


def test_waiting_work_is_bounded(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    meet(queue)
    monkeypatch.setattr(commands, "WAITING_BYTES_MAX", 3 * (OVERHEAD_BYTES + 64))
    for n in range(10):
        queue.comes(ALICE, b"a%d" % (n // 2))
    queue.iterate()
    assert queue.commands._waiting_bytes == 3 * (OVERHEAD_BYTES + 64)
    while queue.commands.serve():
        pass
    assert queue.commands._waiting_bytes == 0


def test_messages_of_one_peer_stay_in_order(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    meet(queue)
    bodies: list[int] = []

    def handle(body: bytes, *_: object) -> tuple[Handled, memoryview]:
        bodies.append(body[0])
        return queue._handle()

    monkeypatch.setattr(queue.commands._arena, "handle", handle)
    for n in range(50):
        queue.came.append(Request(b"a", bytes([n, *bytes(63)]), ALICE, ALICE, 1, 0, -1))
    while queue.commands.serve():
        pass
    assert bodies == [*range(50)]
