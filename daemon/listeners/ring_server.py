"""Serve the messages of all clients from the core (front/ring_server.c).

The core takes messages from the rings and from the ROUTER socket, applies them and puts or sends
the replies. It keeps the replies of rings that have to wait for the disk. It leaves a message to
the caller if the message does not belong to the session that its sender owns, or if there is no
space for the reply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

from purgatoryd.daemon.listeners.router import Router
from purgatoryd.daemon.listeners.time_shares import TimeShares
from purgatoryd.daemon.listeners.transport import NOTHING, REPLY_HWM, Answered, Request, Served
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Arena, Handled
from purgatoryd.shm_layout.rings import RingPair

PENDING_BYTES = 256 * 2**10
"""Memory for the replies that wait for commits in the core."""


def _nothing() -> None:
    pass


class Ring:
    """The daemon's side of a client's rings. It is the route of the client's requests."""

    def __init__(self, pair: RingPair, credentials: tuple[int, int, int], number: int) -> None:
        """`credentials`: uid, gid and pid of the client, from the kernel. `number`: descriptor of
        the connection, on which the client waits."""
        self.pair = pair
        self.credentials = credentials
        self.number = number
        self.struct = ffi.new(
            "struct pg_ring_client *",
            {"taker": pair.taker, "putter": pair.putter, "pid": credentials[2], "socket": number},
        )
        self._share: Any = None
        self._replies: deque[bytes] = deque()
        """Replies that have no space yet; the first may be in the ring in part."""
        self.on_kept: Callable[[], object] = _nothing
        """Called after send() has kept a reply."""

    @property
    def gone(self) -> bool:
        """The connection has ended; whole messages may be left."""
        return bool(self.struct.gone)

    def end(self) -> None:
        """Note that the connection has ended."""
        self.struct.gone = 1

    def own(self, session: int, share: Any = ffi.NULL) -> None:
        """Let the core apply messages of a session; 0 = of no session. `share` is that of the
        uid."""
        self.struct.session = session
        self.struct.share = share
        self._share = share

    def send(self, body: Any) -> bool:
        """Put a reply, or keep it until there is space; False = the client is gone, or too many
        replies wait."""
        if self.gone or len(self._replies) >= REPLY_HWM:
            return False
        if self._replies or not self.pair.put(body):
            self._replies.append(bytes(body))
            self.struct.replies = 1
            self.on_kept()
        return True

    def flush(self) -> None:
        """Put replies that wait, as many as there is space for."""
        while self._replies and self.pair.put(self._replies[0]):
            self._replies.popleft()
        self.struct.replies = bool(self._replies)


class RingServer:
    """The rings that are awake, the ROUTER socket, and their messages. No method blocks.

    Rings are awake while the daemon looks at them in each iteration. Before the daemon sleeps, it
    announces that to all rings that are awake; from then on their clients have to wake it.
    """

    def __init__(
        self, message_max: int, calls: Any = ffi.NULL, router: Router | None = None
    ) -> None:
        """`message_max`: size of the largest ring. `calls`: a struct pg_loop_calls; NULL = the
        system calls themselves. `router`: the socket; None = rings only."""
        self._message = bytearray(message_max)
        self._message_base = ffi.from_buffer(self._message)
        self._pending = bytearray(PENDING_BYTES)
        self._pending_base = ffi.from_buffer(self._pending)
        self._calls = calls
        self._rings: dict[int, Ring] = {}
        """Rings by number."""
        self._answered: list[Answered] = []
        """Answers to forgotten clients that need a REPLIED record."""
        self.struct = ffi.new(
            "struct pg_ring_server *",
            {
                "calls": calls, "message": self._message_base,
                "pending": {"memory": self._pending_base, "size": PENDING_BYTES},
            },
        )  # fmt: skip
        self._router = router
        if router is not None:
            self.struct.router = router.struct

    def add(self, ring: Ring) -> None:
        """Serve the rings of a client."""
        self._rings[ring.number] = ring
        ring.on_kept = partial(self.rouse, ring)
        self.rouse(ring)

    def remove(self, ring: Ring) -> None:
        """Forget a client."""
        del self._rings[ring.number]
        ring.on_kept = _nothing
        self._forget(ring.struct)

    def _forget(self, client: Any) -> None:
        self._take_answered()
        lib.pg_rings_remove(self.struct, client)

    def rouse(self, ring: Ring) -> None:
        """Look at the rings in each iteration, until may_sleep()."""
        lib.pg_rings_rouse(self.struct, ring.struct)

    def own(self, message: Request, session: int, share: Any) -> None:
        """Let the core apply the messages of `session` if they come from the sender of `message`.
        Their time is charged to `share`, a struct pg_time_share."""
        if isinstance(message.route, Ring):
            message.route.own(session, share)
        elif self._router is not None:
            self.disown(message.route, self._router.session_of(message.route))
            self._router.own(message, session, share)

    def disown(self, route: Hashable, session: int) -> None:
        """End own(), unless the route owns another session."""
        if isinstance(route, Ring):
            if route.struct.session == session:
                route.own(0)
        elif self._router is not None:
            client = self._router.disown(route, session)
            if client is not None:
                self._forget(client)

    def hold(self, route: Hashable, *, behind: bool) -> None:
        """Leave the messages of `route` to the caller while `behind` is true, because an earlier
        message is unfinished."""
        if isinstance(route, Ring):
            route.struct.behind = behind
        elif self._router is not None:
            self._router.hold(route, behind=behind)

    def spoke(self, route: Hashable) -> bool:
        """Return whether the core has applied a message from `route` since the last call."""
        if not isinstance(route, Ring):
            return self._router is not None and self._router.spoke(route)
        spoke, route.struct.spoke = bool(route.struct.spoke), 0
        return spoke

    def may_sleep(self) -> bool:
        """Announce to all rings that the daemon is about to sleep. False = a request waits."""
        return bool(lib.pg_rings_sleep(self.struct))

    def serve(
        self,
        arena: Arena,
        shares: TimeShares,
        most: int,
        look: Callable[[Ring], Request | None],
    ) -> Served:
        """Apply at most `most` messages, and return the first that is left to the caller.

        `look` is called with each ring that the core leaves to the caller. It returns the next
        request of the ring; None = there is none.
        """
        struct, applied = self.struct, 0
        while applied < most:
            event = arena.serve_rings(struct, shares.struct, most - applied)
            applied += int(struct.applied)
            if event == lib.PG_RE_NONE:
                break
            if event == lib.PG_RE_ENOUGH:
                return Served(most)  # the time for messages is used up
            if event != lib.PG_RE_LOOK:
                return self._left(arena, event, applied)
            request = self._receive() if not struct.client else look(self._ring())
            if request is not None:
                struct.unseen = struct.awake
                return Served(applied, request)
            if not struct.client and not struct.router.quiet:
                break  # the rest of a message is dropped in parts, one in each iteration
        return Served(applied) if applied else NOTHING

    def left(self, arena: Arena) -> Served:
        """Return the message that Arena.wait() has left to the caller, if there is one."""
        event, self.struct.left = self.struct.left, lib.PG_RE_NONE
        if event in (lib.PG_RE_NONE, lib.PG_RE_LOOK):
            return NOTHING
        return self._left(arena, event, 0)

    def _left(self, arena: Arena, event: int, applied: int) -> Served:
        struct = self.struct
        if event == lib.PG_RE_REPLY:
            request = self._request(b"")
            reply = arena.reply(struct.reply_bytes)
            return Served(applied, request, Handled.REPLY, reply, struct.built_boot_ns)
        if event == lib.PG_RE_OFFENCE:
            assert self._router is not None
            malformed = self._router.unlike_a_clients(struct.received_boot_ns)
            if malformed is not None:
                return Served(applied, malformed)
            return Served(applied) if applied else NOTHING
        body = bytes(ffi.buffer(struct.body, struct.message_bytes))
        how = Handled.AGAIN if event == lib.PG_RE_AGAIN else None
        return Served(applied, self._request(body), how)

    def _receive(self) -> Request | None:
        """Receive a message that the core has left in the socket."""
        return self._router.receive() if self._router is not None else None

    def _ring(self) -> Ring:
        """Return the rings of the last event."""
        return self._rings[self.struct.client.socket]

    def _request(self, body: bytes) -> Request:
        """Return the message that the core has received, as a request with `body`."""
        received_boot_ns = self.struct.received_boot_ns
        if self._router is not None and not self.struct.client:
            return self._router.request(body, received_boot_ns)
        return request_of(self._ring(), body, received_boot_ns)

    # ---- replies that wait for commits -----------------------------------------------------------

    def commit_by(self, requests: Any) -> None:
        """Keep durable replies until commits allow them. `requests`: a struct pg_commit_requests;
        NULL = there is no WAL."""
        self.struct.commits = requests

    @property
    def pending(self) -> int:
        """Number of replies that wait for commits in the core."""
        return int(self.struct.pending.count)

    def callers_pending(self, count: int) -> None:
        """Note that the caller keeps `count` replies that wait for commits. While it keeps any, the
        core leaves durable replies to it, so that they are sent in order."""
        self.struct.callers_pending = count

    def newest_lsn(self, route: Hashable) -> int:
        """Return the LSN for which the newest pending reply to `route` waits, or a later LSN; 0 =
        there is none."""
        waits = isinstance(route, Ring) and route.struct.pending
        return int(self.struct.pending.newest_lsn) if waits else 0

    def release(self, arena: Arena, send: Callable[[Hashable, bytes, int], None]) -> None:
        """Send the pending replies whose records are on disk. `send` sends a reply for which a ring
        has no space; its arguments are those of PendingAcks."""
        while self.pending and arena.release_replies(self.struct):
            _, route, body, built_boot_ns = self._take_oldest()
            send(route, body, built_boot_ns)

    def take_pending(self) -> Iterator[tuple[int, Hashable, bytes, int]]:
        """Take the pending replies away, the oldest first: LSN, route, reply, and the boot time at
        which the reply was complete."""
        while self.pending:
            yield self._take_oldest()

    def _take_oldest(self) -> tuple[int, Hashable, bytes, int]:
        oldest = lib.pg_pending_oldest(ffi.addressof(self.struct, "pending"))
        ring = self._rings[oldest.client.socket]
        body = bytes(ffi.buffer(oldest + 1, oldest.bytes))
        reply = int(oldest.lsn), ring, body, int(oldest.built_boot_ns)
        lib.pg_pending_drop(ffi.addressof(self.struct, "pending"))
        return reply

    def answered(self) -> list[Answered]:
        """Return the answers that need a REPLIED record, each once."""
        self._take_answered()
        found, self._answered = self._answered, []
        return found

    def _take_answered(self) -> None:
        while client := self.struct.answered:
            self.struct.answered = client.next_answered
            self._answered.append(Answered(
                client.answered_session, client.first_answer, client.answers, client.built_boot_ns,
                client.handed_boot_ns,
            ))  # fmt: skip
            client.answers = 0


def request_of(ring: Ring, body: Any, received_boot_ns: int) -> Request:
    """Return the request of a client."""
    uid, gid, pid = ring.credentials
    return Request(ring, body, uid, gid, pid, received_boot_ns, ring.number)
