"""The blocking subscriber, and the code that it shares with the asyncio subscriber.

A subscriber on the daemon's host reads notices from the arena, and sleeps on its words. It checks
every second whether another arena has replaced this one. If the arena is in another /dev/shm, the
daemon passes it, see arena_requests.py.

Other notices come through a SUB socket. PUB sockets drop messages silently, but a subscriber does
not lose their notices. Every message contains its position in its topic, and the arena's topic
table has the newest position of each topic. The subscriber compares the two positions often in the
first second after each connect, because a subscription takes effect some time after it was made.
After that it compares them every CHECK_S.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Protocol, Self, TypeVar

import zmq

from purgatoryd.clients.arena_requests import ArenaRequests
from purgatoryd.clients.arguments import check_limit_s, check_type, check_whole, each
from purgatoryd.clients.channel import Subscribe, Subscription
from purgatoryd.clients.closing import Closing
from purgatoryd.clients.cursors import CursorHold, CursorOptions, Hold, OpenCursor
from purgatoryd.clients.fork_guard import ForkGuard
from purgatoryd.clients.ledger import Ledger, Source
from purgatoryd.clients.model import Notice
from purgatoryd.clients.notices import Batch, Notices, Taken, Taker
from purgatoryd.clients.numa_local import pin_numa_local, refuse_remote
from purgatoryd.clients.past import Past
from purgatoryd.clients.remote import Remote
from purgatoryd.clients.route import Route
from purgatoryd.clients.stream import Stream
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import (
    ArenaMissing,
    ArenaNotReady,
    CursorHeld,
    DaemonUnreachable,
    InvalidArgument,
    Lagged,
    OtherAbi,
    PurgatorydError,
)
from purgatoryd.shm_layout.follower import (
    IDLE_S,
    WORDS_MAX,
    WORDS_MIN,
    Follower,
    JoinedSleep,
    Sleep,
    can_sleep,
)
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.paths import Paths, check_name

HWM_MAX = 2**31 - 1
RECEIVE_HWM = 1000  # number of messages; each message holds up to a thousand notices
CHECK_S = 5.0
FIRST_CHECK_S = 0.002
PROBATION_S = 1.0
STUCK_S = 0.02
OPEN_RETRY_S = 0.01
GET_MOST = 65_536
ITERATE_MOST = 1024
"""Number of notices that an iteration takes from the stream at once."""


Item = TypeVar("Item", Notice, Notices)
Next = tuple[Taker, Item | Lagged]
"""(object that stores the item as taken, item)."""


class Inbox:
    """A SUB socket, its Stream, and the schedule of comparisons with the arena. It never waits."""

    def __init__(
        self,
        name: str,
        namespace: str,
        topics: Collection[str] | None,
        high_water_mark: int,
        remote: Remote | None,
        ledger: Ledger | None = None,
        numa_local: bool = False,
        route: Route | None = None,
        whole: bool = False,
        host: Host = HOST,
        subscribe: Subscribe = Subscription,
        local: bool = False,
        unmapped: bool = False,
        requests: ArenaRequests | None = None,
        words: int = WORDS_MAX,
        cursor: CursorOptions | None = None,
        open_cursor: OpenCursor = CursorHold,
        open_past: Callable[[Callable[[], Paths]], Past] = Past,
    ) -> None:
        """`whole`: begin with all notices that the arena has, instead of those from now on.
        `cursor`: begin after the notices that a cursor has committed. `open_cursor`, `open_past`
        replace the hold of the cursor and the past notices.
        `local`: read notices from the arena without a socket, if it can be read. `unmapped`: use
        messages alone while there is no arena file. `requests`: the requests for arena files that
        are not in /dev/shm. `words`: number of words that a sleep has for the arena."""
        self._host = host
        self.name = check_name(name)
        check_type("remote", remote, Remote)
        check_type("ledger", ledger, Ledger)
        high_water_mark = check_whole("high_water_mark", high_water_mark, 0, HWM_MAX)
        refuse_remote(numa_local=numa_local, remote=remote)
        self._remote = remote
        self._route = route or Route(name, namespace, host=host)
        self._ledger = ledger
        self._noted: tuple[Notice | Lagged, ...] = ()
        """The items of the last peek(), which are in the ledger."""
        self._receiving = False
        """True while a message is received, and after an interrupt that left it half received."""
        self._number = 0 if ledger is None else ledger.subscriber()
        subjects = _subjects(namespace, topics)
        self.endpoint = remote.place.notices if remote else self._route.find()[0].pub_endpoint
        self._unmapped = unmapped
        self._requests = requests or ArenaRequests()
        self._asked: Paths | None = None
        """Paths of the daemon that was asked for its arena; None = none."""
        self._fork_guard = ForkGuard("subscriber")
        self._subscribe: Callable[[], Subscription] = lambda: subscribe(
            self.endpoint, subjects, high_water_mark, remote
        )
        self._subscription: Subscription | None = None
        self.poller = zmq.Poller()
        chosen = None if topics is None else frozenset(topics)
        self._hold: Hold | None = None
        self._open_past = open_past
        if cursor is not None:
            self._hold = open_cursor(self._route.name, namespace, chosen, cursor)
        local = local and remote is None and can_sleep()
        if not local:
            self._open_socket()
        self._stream = self._open_stream(namespace, chosen, whole, words if local else 0)
        if local and self.follower is None:
            self._open_socket()
        self.live = remote is None and (self._stream.mapped or not self._unmapped)
        """False until a daemon whose arena cannot be read has accepted the connection. True at once
        if it can, because the arena has all notices."""
        self._probation()
        if numa_local:
            self._pin_numa_local()

    def _open_stream(
        self, namespace: str, topics: frozenset[str] | None, whole: bool, words: int
    ) -> Stream:
        """Return the stream. If it cannot be opened, close the socket, and raise its error."""
        hold = self._hold
        try:
            stream = Stream(
                namespace, topics, self._attach, self._host.boot_ns, whole=whole, words=words,
                cursor=None if hold is None else hold.cursor,
                past=None if hold is None else self._open_past(lambda: self._route.find()[0]),
            )  # fmt: skip
            if self._hold is not None and not stream.mapped:
                raise InvalidArgument("a cursor needs an arena of this ABI")
            return stream
        except BaseException:
            if self._subscription is not None:
                self._subscription.close()
            if self._hold is not None:
                self._hold.close()
            raise

    def _open_socket(self) -> None:
        self._subscription = subscription = self._subscribe()
        for source in subscription.sockets:
            self.poller.register(source, zmq.POLLIN)

    @property
    def follower(self) -> Follower | None:
        """Finds new notices in the arena; None if they come through a socket."""
        return self._stream.follower if self._subscription is None else None

    @property
    def sleep(self) -> Sleep | None:
        """The words on which to wait; None if notices come through a socket, or while the arena
        cannot be read. Nothing reports the end of the latter state."""
        return self._stream.sleep if self._subscription is None else None

    def wait(self, limit_s: float) -> None:
        """Sleep until peek() may find something, at most `limit_s` seconds."""
        if (follower := self.follower) is None:
            self.poller.poll(round(limit_s * 1000 + 0.5))
        elif (sleep := self.sleep) is None:
            time.sleep(limit_s)
        else:
            follower.slept(woken=sleep.wait(limit_s))

    def use_socket(self) -> None:
        """Receive notices through a socket from now on."""
        if self._subscription is None:
            self._open_socket()
            self._probation()

    def finish(self) -> bool:
        """Take only the notices that remain in the arena, because no daemon will write it again.
        Returns False while that is not possible yet."""
        if self._stream.finish():
            self._check_s = math.inf
            return True
        return False

    def _pin_numa_local(self) -> None:
        if (reader := self._attach()) is not None:
            placed = reader.placement
            reader.close()
            pin_numa_local(placed.home, placed.reaper_cpu)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets that become readable when peek() may find something; none if notices are read
        from the arena."""
        return () if self._subscription is None else self._subscription.sockets

    def let_in(self) -> bool:
        """True once a connection to the daemon was made; always true for a local daemon."""
        if not self.live:
            self._compare()
        return self.live

    def peek(self) -> Next[Notice] | None:
        """Return (stream, item): the next notice or Lagged, and the stream that stores it as taken.
        Return None if there is no item."""
        return self._peek(self._stream.peek)

    def peek_many(self, most: int) -> Next[Notices] | None:
        """Return the next notices, at most `most`, as peek() returns one."""
        return self._peek(partial(self._stream.peek_many, most))

    def check(self) -> None:
        """Raise Closed or ForkedProcess if the inbox may not be used."""
        self._fork_guard.check()

    def commit(self) -> None:
        """Commit the notices that were handed out to the cursor. Raises InvalidArgument without a
        cursor, CursorHeld, CursorRefused, DaemonError."""
        self.check()
        if self._hold is None:
            raise InvalidArgument("commit() needs a subscriber with a cursor")
        handed, stream_id = self._stream.handed(), self._stream.stream_id
        if handed and self._hold.commit(stream_id, handed):
            self._stream.noted_commit(handed)

    def _peek(self, look: Callable[[], Item | Lagged | None]) -> Next[Item] | None:
        self.check()
        if self._hold is not None:
            self._hold.renew()
        while (item := look()) is None:
            if self._stream.stuck or not (self._receive() or self._compare()):
                return None
        if self._ledger is not None:
            self._note(self._ledger, tuple(item) if isinstance(item, Notices) else (item,))
        return self._stream, item

    def _note(self, ledger: Ledger, items: tuple[Notice | Lagged, ...]) -> None:
        before = {id(item) for item in self._noted}
        for item in items:
            if id(item) in before:
                continue
            if isinstance(item, Lagged):
                ledger.lost(self._source, item)
            else:
                ledger.received(self._source, item)
        self._noted = items

    @property
    def _source(self) -> Source:
        return Source(self._stream.daemon, self._stream.stream_id, self._number)

    @property
    def patience_s(self) -> float:
        """The longest sleep on the sockets before the next peek(), in seconds."""
        if self._stream.stuck or (self.follower is not None and not self._stream.ready):
            return STUCK_S
        limit_s = max(self._check_s - self._host.monotonic_s(), 0.0)
        follower = self.follower
        return limit_s if follower is None else min(limit_s, follower.limit_s)

    @property
    def open(self) -> bool:
        """True until close(), but only in the process that created the inbox."""
        return self._fork_guard.mine and not self._fork_guard.closed

    def end(self) -> list[Lagged]:
        """Close an inbox whose daemon is gone for good. Returns a Lagged to report for each topic;
        none with a cursor, because the successors continue after what it has committed."""
        if self._hold is not None:
            self._hold.drop()
            self._hold = None
            self.close()
            return []
        lost = self._stream.broken()
        if self._ledger is not None:
            for one in lost:
                self._ledger.lost(self._source, one)
        self.close()
        return lost

    def close(self) -> None:
        """Close socket and arena. An interrupted call can be repeated."""
        if self._fork_guard.mine:
            self._fork_guard.closed = True
            self._route.close()
            self._drop_request()
            self._stream.close()
            if self._subscription is not None:
                self._subscription.close()
            if self._hold is not None:
                self._hold.close()

    def _attach(self) -> Reader | None:
        """Attach to the arena. Return None if it cannot be read: the daemon is on another host, has
        another ABI, or has its arena in another /dev/shm and does not pass it."""
        if self._remote is not None:
            return None
        paths = self._route.find()[0]
        try:
            return self._reader(paths)
        except OtherAbi:
            return None
        except ArenaMissing:
            if self._unmapped:
                return None
            raise

    def _reader(self, paths: Paths) -> Reader:
        """Map the arena file in /dev/shm, or the file that the daemon passes. Raises the errors of
        Reader.attach()."""
        try:
            reader = Reader.attach(paths)
        except ArenaMissing:
            if self._asked != paths:
                self._drop_request()
            self._asked = paths
            file = self._requests.take(paths)
            self._unmapped |= self._requests.refused
            if file is None:
                raise
            self._unmapped = False  # a later request without an answer does not unmap this file
            return Reader.ready(file)
        self._drop_request()
        return reader

    def _drop_request(self) -> None:
        if self._asked is not None:
            self._requests.drop(self._asked)
            self._asked = None

    def _receive(self) -> bool:
        """Receive a message. After an interrupt the message is dropped, and its notices are read
        from the arena."""
        if self._subscription is None:
            return self._stream.look()
        if self._receiving:
            self._check_s = 0.0
        self._receiving = True
        frames = self._subscription.receive()
        if frames is not None:
            self._received = True
            self._stream.take(frames)
        self._receiving = False
        return frames is not None

    def _compare(self) -> bool:
        """Compare the stream with the arena if a comparison is due. Returns whether it was due."""
        if self._subscription is None:
            return self._look_after()
        if self._subscription.reconnected():
            self.live = True
            self._stream.reconnected()
            self._probation()
            return True
        now_s = self._host.monotonic_s()
        if self._received:
            self._received = False
            self._trust(now_s)
        if now_s < self._check_s:
            return False
        self._follow()
        if self._stream.moved or (self._unmapped and not self._stream.mapped):
            self._stream.reconnected()
        else:
            self._drop_request()
            self._stream.compare()
        self._schedule(now_s)
        return True

    def _look_after(self) -> bool:
        """Attach to another arena if it has replaced ours. If that one cannot be read here, its
        notices come through a socket."""
        now_s = self._host.monotonic_s()
        if now_s < self._check_s:
            return False
        self._check_s = now_s + IDLE_S
        with suppress(PurgatorydError):
            endpoint = self._route.find()[0].pub_endpoint
            if endpoint != self.endpoint or self._stream.moved:
                self.endpoint = endpoint
                self._stream.reconnected()
            else:
                self._drop_request()
        if self._stream.follower is None:
            self.use_socket()
        return True

    def _follow(self) -> None:
        """Redirect the subscription if another daemon holds the namespace. That happens when the
        number of shards changes, and when a daemon becomes a deployment."""
        if self._remote is not None:
            return
        with suppress(PurgatorydError):
            endpoint = self._route.find()[0].pub_endpoint
            if self._subscription is not None and endpoint != self.endpoint:
                self.endpoint = endpoint
                self._subscription.redirect(endpoint)

    # The time between two comparisons doubles until it reaches PROBATION_S, or until a message
    # shows that the subscription is live. After that a comparison is made every CHECK_S.

    def _probation(self) -> None:
        self._received = False
        self._step_s = FIRST_CHECK_S
        self._check_s = self._host.monotonic_s() + self._step_s

    def _trust(self, now_s: float) -> None:
        if self._step_s < PROBATION_S:
            self._step_s = PROBATION_S
            self._check_s = now_s + CHECK_S

    def _schedule(self, now_s: float) -> None:
        self._step_s *= 2
        self._check_s = now_s + (self._step_s if self._step_s < PROBATION_S else CHECK_S)


class OpenInbox(Protocol):
    """Opens the inbox of a route."""

    def __call__(self, route: Route, whole: bool, words: int) -> Inbox:
        """`whole`, `words`: as in Inbox."""


class Merged:
    """The inboxes of all shards that hold a namespace, merged. The notices of a topic are in order
    only within each shard."""

    def __init__(self, route: Route, open_one: OpenInbox, *, cursor: bool = False) -> None:
        """`cursor`: True if the inboxes have a cursor."""
        self._route = route
        self._open_one = open_one
        self._cursor = cursor
        self._inboxes: list[Inbox] = []
        self._reported: deque[Lagged] = deque()
        """Losses in the previous shard generation that are still to be raised."""
        self.taken: Taken | None = None
        self.sleep: Sleep | None = None
        """The words of all arenas, as of the last peek(); None if notices come through sockets."""
        self._finished = False
        """True while the last notices of a replaced shard generation are handed out."""
        self._check_s = 0.0
        self._shard_generation = 0
        self._next_inbox = 0
        self.poller = zmq.Poller()
        self._polled: tuple[zmq.Socket[bytes], ...] = ()
        self._open_all(whole=False)

    @property
    def name(self) -> str:
        """Name of the deployment."""
        return self._route.name

    @property
    def endpoint(self) -> str:
        """Endpoint of a shard that has not accepted the connection; else of the first shard."""
        waiting = [inbox for inbox in self._inboxes if not inbox.live] or self._inboxes
        return waiting[0].endpoint

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets that become readable when peek() may find something."""
        return tuple(socket for inbox in self._inboxes for socket in inbox.sockets)

    @property
    def patience_s(self) -> float:
        """The longest sleep on the sockets before the next peek(), in seconds."""
        check_s = max(self._check_s - self._route.host.monotonic_s(), 0.0)
        return min(check_s, *(inbox.patience_s for inbox in self._inboxes))

    @property
    def open(self) -> bool:
        """True until close(), but only in the process that created the inboxes."""
        return all(inbox.open for inbox in self._inboxes)

    def check(self) -> None:
        """Raise Closed or ForkedProcess if the inboxes may not be used."""
        self._inboxes[0].check()

    def let_in(self) -> bool:
        """True once every shard has let this subscriber in."""
        return all(inbox.let_in() for inbox in self._inboxes)

    def commit(self) -> None:
        """Commit the notices that were handed out to the cursor of each shard."""
        for inbox in self._inboxes:
            inbox.commit()

    def peek(self) -> Next[Notice] | None:
        """Return the next notice of any shard, or Lagged; None if there is none."""
        return self._peek(Inbox.peek)

    def peek_many(self, most: int) -> Next[Notices] | None:
        """Return the next notices of any one shard, at most `most`, as peek() returns one."""
        return self._peek(lambda inbox: inbox.peek_many(most))

    def wait(self, limit_s: float) -> None:
        """Sleep until peek() may find something, at most `limit_s` seconds."""
        if (sleep := self.sleep) is None:
            self.poller.poll(round(limit_s * 1000 + 0.5))
            return
        followers = [inbox.follower for inbox in self._inboxes if inbox.sleep is not None]
        woken = sleep.wait(limit_s)
        for follower in followers:
            if follower is not None:
                follower.slept(woken=woken)

    def _settle_sleep(self) -> None:
        """Note the words to sleep on. One wait cannot end by words and by sockets, so all notices
        come through sockets if those of one shard do."""
        if any(inbox.sockets for inbox in self._inboxes):
            for inbox in self._inboxes:
                inbox.use_socket()
            self._poll()
            self.sleep = None
            return
        parts = [part for inbox in self._inboxes if (part := inbox.sleep) is not None]
        sleep = self.sleep
        if not isinstance(sleep, JoinedSleep) or sleep.parts != parts:
            sleep = JoinedSleep(parts)
        sleep.look()
        self.sleep = sleep

    def _poll(self) -> None:
        sockets = self.sockets
        if self._polled != sockets:
            self.poller = zmq.Poller()
            for socket in sockets:
                self.poller.register(socket, zmq.POLLIN)
            self._polled = sockets

    def _peek(self, look: Callable[[Inbox], Next[Item] | None]) -> Next[Item] | None:
        while True:
            if self._reported and self._reported[0] is self.taken:
                self._reported.popleft()
            if self._reported:
                return self, self._reported[0]
            if (found := self._next(look)) is not None:
                return found
            if self._route.host.monotonic_s() < self._check_s:
                self._settle_sleep()
                return None
            self._follow()

    def _next(self, look: Callable[[Inbox], Next[Item] | None]) -> Next[Item] | None:
        for _ in self._inboxes:
            self._next_inbox = (self._next_inbox + 1) % len(self._inboxes)
            if (found := look(self._inboxes[self._next_inbox])) is not None:
                return found
        return None

    def close(self) -> None:
        """Close all inboxes."""
        self._reported.clear()
        self._route.close()
        for inbox in self._inboxes:
            inbox.close()

    def _follow(self) -> None:
        """Open the inboxes of the next shard generation after the number of shards has changed.

        With a cursor, the new inboxes begin after the notices that it has committed. Otherwise
        topics begin with the notices that were not sent to any subscriber before, and the notices
        that were sent before are read from the previous arenas first.
        Some may be lost, so a Lagged reports the end of each topic of the previous arenas.
        """
        now_s = self._route.host.monotonic_s()
        self._check_s = now_s + (CHECK_S if self.sockets else IDLE_S)
        with suppress(PurgatorydError):
            _, table = self._route.table()
            if table is None or table.shard_generation == self._shard_generation:
                return
            if self._cursor:
                self._open_all(whole=False)
            elif self._finished:
                self._open_all(whole=True)
                self._finished = False
            else:
                self._finished = self._finish()
                self._check_s = now_s if self._finished else now_s + STUCK_S

    def _finish(self) -> bool:
        """Let all inboxes take their last notices. Returns False while one of them cannot."""
        finished = [inbox.finish() for inbox in self._inboxes]
        return all(finished)

    def _open_all(self, *, whole: bool) -> None:
        paths, table = self._route.table()
        assert table is not None
        shards = self._route.placed(paths, table).shards
        # Each route uses the name of its shard, because a shard of another shard generation has
        # other topics.
        namespace, host = self._route.namespace, self._route.host
        routes = [Route(table.daemon(shard), namespace, host=host) for shard in {*shards}]
        words = WORDS_MAX // len(routes)
        open_one = partial(self._open_one, words=words)
        before, self._inboxes = self._inboxes, _all_or_none(routes, open_one, whole)
        self._shard_generation = table.shard_generation
        for inbox in before:
            self._reported.extend(inbox.end())


def _all_or_none(
    routes: list[Route], open_one: Callable[[Route, bool], Inbox], whole: bool
) -> list[Inbox]:
    opened: list[Inbox] = []
    with ExitStack() as undo:
        for route in routes:
            inbox = open_one(route, whole)
            undo.callback(inbox.close)
            opened.append(inbox)
        undo.pop_all()
    return opened


def delivered(source: Taker, item: Item | Lagged) -> tuple[Taker, Item]:
    """Return the arguments, or raise an item that is Lagged."""
    if isinstance(item, Lagged):
        source.taken = item; raise item  # noqa: E702  # fmt: skip
    return source, item


class Opener:
    """Opens the inbox of a subscriber once the daemon is found."""

    def __init__(
        self,
        name: str,
        namespace: str,
        topics: Collection[str] | None,
        high_water_mark: int,
        remote: Remote | None,
        ledger: Ledger | None,
        numa_local: bool,
        transport: str,
        cursor: CursorOptions | None = None,
    ) -> None:
        self.name = name
        if not isinstance(transport, str) or transport not in ("auto", "zmq"):
            raise InvalidArgument(f"transport must be 'auto' or 'zmq', not {transport!r}")
        self._local = transport == "auto"
        self._arguments = (name, namespace, topics, high_water_mark, remote, ledger, numa_local)
        self._route = Route(name, namespace)
        self._cursor = cursor
        if cursor is not None and remote is not None:
            raise InvalidArgument("a cursor needs the arena of the daemon: it excludes remote=")
        self._remote = remote
        self._unmapped = False
        self._requests = ArenaRequests()
        self.iterated = ITERATE_MOST if ledger is None else 1
        """Number of notices that an iteration takes at once. The ledger stores what was taken."""

    def __call__(self, *, late: bool) -> Inbox | Merged:
        """Open the inbox without a wait. Raises the errors of Subscriber.

        `late`: half of the time for opening it is over. Without an arena file, messages alone are
        then used: `/dev/shm` is that of another container, and the daemon does not pass its arena.
        """
        self._unmapped = late and self._remote is None and self._cursor is None
        if self._remote is None:
            paths, table = self._route.table()
            if table is not None and self._route.placed(paths, table).partitions > 1:
                return Merged(self._route, self._one, cursor=self._cursor is not None)
        return self._one(self._route, whole=False, words=WORDS_MAX)

    def close(self) -> None:
        """Release an opener that has not opened an inbox."""
        self._route.close()
        self._requests.close()

    def _one(self, route: Route, whole: bool, words: int) -> Inbox:
        local = self._local and words >= WORDS_MIN
        return Inbox(
            *self._arguments, route=route, whole=whole, local=local, unmapped=self._unmapped,
            requests=self._requests, words=words, cursor=self._cursor,
        )  # fmt: skip


OPENS_LATER = (DaemonUnreachable, ArenaMissing, ArenaNotReady, CursorHeld)
"""Errors after which an inbox can perhaps be opened a little later."""


def cursor_options(
    cursor: str | None, auto_commit: bool, durable: bool | None, timeout_s: float, transport: str
) -> CursorOptions | None:
    """Return the options of a subscriber's cursor; None without a cursor. Raises
    InvalidArgument."""
    check_type("auto_commit", auto_commit, bool)
    check_type("durable", durable, bool)
    check_type("cursor", cursor, str)
    if cursor is not None:
        return CursorOptions(cursor, durable, timeout_s, transport)
    if auto_commit or durable is not False:
        raise InvalidArgument("auto_commit and durable need a cursor")
    return None


class Subscriber(Closing):
    """Notices of the daemon `name` from now on. Each arrives exactly once, in order per topic.

    `topics`: receive only these topics; None = all topics of the namespace. `high_water_mark`:
    largest number of messages that wait in the socket. The socket drops further messages, and the
    subscriber reads their notices from the arena. `timeout`: seconds to wait for the daemon. Once
    the constructor has returned, the notice of every timer that fires arrives. `ledger`: stores
    every notice that is handed out. `numa_local`: as in Client; it needs the daemon's arena.

    The namespace may have any number of partitions. The notices of all shards are merged, and the
    notices of a topic are in order only within each shard.

    `transport`: "auto" reads notices from the arena, if the daemon is on this host and the kernel
    has futex_waitv() (Linux 5.16). Otherwise, and with "zmq", they come through a socket. So do
    those of a namespace in 64 shards, or if one of its shards has an arena that cannot be read. The
    guarantees are the same.

    If the arena is in the `/dev/shm` of another container, the daemon passes it over the socket of
    its rings. The subscriber cannot read the arena if its user may not, if the daemon has no rings
    or another ABI, or with `remote`. Then a topic begins with the first message that arrives, and
    messages that the socket drops are not recovered: Lagged reports them when the topic's next
    message arrives. Unless the daemon refuses its arena, the constructor waits half of `timeout`
    for one.

    `cursor`: name of a cursor, which the daemon stores. The subscriber begins after the notices
    that the cursor has committed, so it continues where an earlier process stopped. A new cursor
    begins with the notices from now on. commit() commits all notices that were handed out; with
    `auto_commit`, each call commits those of earlier calls. Notices that were not committed come
    again after a restart. `durable`: as in Client, for commits. One subscriber at a time can have
    the cursor: another one waits up to `timeout` and then gets CursorHeld.

    Not thread-safe. Raises DaemonUnreachable, ArenaError, InvalidName, CursorHeld, CursorRefused.
    """

    def __init__(
        self,
        name: str = "default",
        *,
        namespace: str = "default",
        topics: Collection[str] | None = None,
        high_water_mark: int = RECEIVE_HWM,
        timeout: float | timedelta = 5.0,
        remote: Remote | None = None,
        ledger: Ledger | None = None,
        numa_local: bool = False,
        transport: str = "auto",
        cursor: str | None = None,
        auto_commit: bool = False,
        durable: bool | None = False,
    ) -> None:
        timeout = check_limit_s(timeout)
        deadline_s = HOST.monotonic_s() + timeout
        open_inbox = Opener(
            name, namespace, topics, high_water_mark, remote, ledger, numa_local, transport,
            cursor_options(cursor, auto_commit, durable, timeout, transport),
        )  # fmt: skip
        self._auto_commit = auto_commit
        self._iterated = open_inbox.iterated
        self._batch: Batch | None = None
        while True:
            left_s = deadline_s - HOST.monotonic_s()
            try:
                self._inbox = open_inbox(late=timeout > 0 and left_s < timeout / 2)
                break
            except OPENS_LATER as error:
                if left_s <= 0:
                    open_inbox.close()
                    raise unreachable(name, error, timeout) from None
            time.sleep(OPEN_RETRY_S)
        while not self._inbox.let_in():
            if HOST.monotonic_s() >= deadline_s:
                self._inbox.close()
                raise DaemonUnreachable(name, self._inbox.endpoint, timeout)
            time.sleep(OPEN_RETRY_S)

    def get(self, timeout: float | timedelta | None = None) -> Notice | None:
        """Return the next notice; None if none came within `timeout` seconds (None = no limit).

        Raises Lagged once for each range that the replay buffer has lost; the next call continues
        after it.
        """
        found = self._await(self._inbox.peek, timeout)
        if found is None:
            return None
        source, item = found
        # No signal handler runs between the two statements, so an item counts as taken only if it
        # is returned.
        source.taken = item; return item  # noqa: E702  # fmt: skip

    def get_many(
        self, most: int = GET_MOST, timeout: float | timedelta | None = None
    ) -> Notices | None:
        """Return the notices that are there, at least 1 and at most `most`; None if none came
        within `timeout` seconds (None = no limit).

        They are columns, and make `Notice` objects only on request. Raises Lagged as get() does.
        """
        most = check_whole("most", most, 1, HWM_MAX)
        found = self._await(partial(self._inbox.peek_many, most), timeout)
        if found is None:
            return None
        source, item = found
        source.taken = item; return item  # noqa: E702  # fmt: skip

    def _await(
        self, look: Callable[[], Next[Item] | None], timeout: float | timedelta | None
    ) -> tuple[Taker, Item] | None:
        """Return (source, next item that `look` finds), or raise its Lagged."""
        limit_s = None if timeout is None else check_limit_s(timeout)
        inbox = self._inbox
        if self._auto_commit:
            inbox.commit()
        found = look()
        deadline_s = None if limit_s is None else HOST.monotonic_s() + limit_s
        while found is None and limit_s != 0:
            wait_s = inbox.patience_s
            if deadline_s is not None:
                wait_s = min(wait_s, deadline_s - HOST.monotonic_s())
            if wait_s < 0:
                break
            inbox.wait(wait_s)
            found = look()
        return None if found is None else delivered(*found)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Notice:
        """Return the next notice, however long it takes. Raises the same errors as get()."""
        batch = self._batch
        if batch is None or not batch.left:
            batch = self._batch = self._next_batch()
        else:
            self._inbox.check()
        notice = batch.notices[batch.handed]
        batch.handed += 1; return notice  # noqa: E702  # fmt: skip

    def _next_batch(self) -> Batch:
        while (found := self._await(partial(self._inbox.peek_many, self._iterated), None)) is None:
            pass
        source, notices = found
        source.taken = batch = Batch(source, notices)
        return batch

    def commit(self) -> None:
        """Commit all notices that were handed out to the cursor.

        A process that opens the cursor later begins after them. A daemon that has lost such notices
        commits nothing, and they come again. Raises InvalidArgument without a cursor, CursorHeld if
        another subscriber has the cursor, CursorRefused, DaemonError.
        """
        self._inbox.commit()

    def close(self) -> None:
        """End the subscription, and release the cursor. This commits nothing."""
        self._inbox.close()


def unreachable(name: str, error: Exception, waited_s: float) -> Exception:
    """Return the error for a daemon that was not found within `waited_s` seconds. An error that is
    not a DaemonUnreachable is returned unchanged."""
    if isinstance(error, DaemonUnreachable):
        return DaemonUnreachable(name, error.endpoint, waited_s, shut=error.shut)
    return error


def _subjects(namespace: str, topics: Collection[str] | None) -> list[bytes]:
    """Return the prefixes of the first frames to subscribe to. Raises InvalidArgument."""
    prefix = wire.encode_namespace(namespace)
    if topics is None:
        return [prefix + b"\0"]
    if isinstance(topics, str | bytes):  # a collection, but not of topics
        raise InvalidArgument(f"topics must be a collection of topics, not {topics!r}")
    topics = list(each("topics", topics))
    return [wire.topic_frame(prefix, wire.encode_topic(topic)) for topic in topics]
