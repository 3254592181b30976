"""Pending durable acknowledgements: replies that wait until their records are on disk."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from purgatoryd.daemon.admin import frame
from purgatoryd.shm_layout.layout import Message, Status, WireError
from purgatoryd.shm_layout.wire import FRAME, RESULT, decode_results

PENDING_BYTES_MAX = 64 * 2**20
"""Total size of pending replies above which no message is taken from the command socket."""


@dataclass(frozen=True, slots=True)
class _Reply:
    lsn: int
    route: Hashable
    body: bytes
    built_boot_ns: int


class PendingAcks:
    """Pending replies in the order of their LSNs. Replies that need no commit do not wait
    behind pending replies."""

    def __init__(self, send: Callable[[Hashable, bytes, int], None]) -> None:
        """`send` sends a reply; its arguments are the route, the reply, and the boot time at which
        the reply was complete."""
        self._send = send
        self._replies: deque[_Reply] = deque()
        self._routes: Counter[Hashable] = Counter()
        self._bytes = 0

    @property
    def full(self) -> bool:
        """True while pending replies exceed PENDING_BYTES_MAX."""
        return self._bytes > PENDING_BYTES_MAX

    def hold(self, lsn: int, route: Hashable, body: bytes | memoryview, built_boot_ns: int) -> None:
        """Keep a reply until record `lsn` is on disk. Later replies never have a lower LSN."""
        self._replies.append(_Reply(lsn, route, bytes(body), built_boot_ns))
        self._bytes += len(body)
        self._routes[route] += 1

    def precede(self, replies: Iterable[tuple[int, Hashable, bytes, int]]) -> None:
        """Keep earlier replies, given as the arguments of hold()."""
        later, self._replies = self._replies, deque()
        for reply in replies:
            self.hold(*reply)
        self._replies += later

    def newest_lsn(self, route: Hashable) -> int:
        """Return the LSN for which the newest reply to `route` waits, or a later LSN; 0 = no reply
        to `route` waits."""
        return self._replies[-1].lsn if route in self._routes else 0

    def __len__(self) -> int:
        return len(self._replies)

    def release(self, committed_lsn: int) -> bool:
        """Send the replies that wait for records up to `committed_lsn`. True = there were some."""
        before = len(self)
        while self._replies and self._replies[0].lsn <= committed_lsn:
            reply = self._take()
            self._send(reply.route, reply.body, reply.built_boot_ns)
        return len(self) < before

    def refuse(self, committed_lsn: int, errno: int) -> None:
        """Answer all pending calls with NOT_DURABLE: the WAL has stopped with `errno`."""
        while self._replies:
            reply = self._take()
            body = reply.body
            if not _changed_nothing(body):
                body = _not_durable(body, committed_lsn, errno)
            self._send(reply.route, body, reply.built_boot_ns)

    def _take(self) -> _Reply:
        reply = self._replies.popleft()
        self._bytes -= len(reply.body)
        self._routes[reply.route] -= 1
        if not self._routes[reply.route]:
            del self._routes[reply.route]
        return reply


def _changed_nothing(reply: bytes) -> bool:
    """Return whether a reply is an error, or answers a batch of which no record was applied because
    the WAL has stopped."""
    _, _, kind, _, _, count, _, error, *_ = FRAME.unpack_from(reply)
    if error or kind != Message.BATCH:
        return bool(error)
    end = FRAME.size + count * RESULT.size
    return all(word & 0xFF == Status.WAL for word, _ in decode_results(reply[FRAME.size : end]))


def _not_durable(reply: bytes, committed_lsn: int, errno: int) -> bytes:
    """Return the answer to a batch that was applied but cannot be written to disk."""
    _, _, kind, session, sequence, *_ = FRAME.unpack_from(reply)
    echo = session, sequence
    return frame(kind, WireError.NOT_DURABLE, detail=(committed_lsn, errno), echo=echo)
