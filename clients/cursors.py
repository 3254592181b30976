"""Cursors: the position of a subscriber, stored by the daemon, so that another process continues.

A subscriber with a cursor has a session of its own. The daemon lets one session at a time hold the
cursor. When the process of the subscriber ends, the daemon ends its session, and another subscriber
can open the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from purgatoryd.clients import jobs
from purgatoryd.clients.client import Client
from purgatoryd.clients.core import BYE_S, Core, CursorQuestion
from purgatoryd.clients.jobs import Job
from purgatoryd.clients.local_channel import Transport
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import (
    CursorRefused,
    DaemonError,
    MessageRefused,
    PurgatorydError,
)
from purgatoryd.shm_layout.layout import CURSOR_TOPICS, CursorAction, CursorRefusal, WireError
from purgatoryd.shm_layout.wire import Committed

T = TypeVar("T")
NO_CURSORS = "a cursor has a session with one shard"
RENEW_S = 15.0
"""Time between two renewals of the hold, in seconds. After a restart of the daemon, a session whose
client sends nothing ends after Config.session_grace_ns."""
BUSY_S = 0.005
OPEN_S = 1.0
"""Limit of one attempt to open the session, in seconds; the subscriber tries again."""


class CursorOptions(NamedTuple):
    """The arguments of a subscriber that concern its cursor."""

    name: str
    """Name of the cursor."""
    durable: bool | None
    """As in Client: wait until a commit is on disk."""
    timeout_s: float
    """Limit of a call, in seconds."""
    transport: str


class CursorSteps:
    """The steps of a hold: they open the cursor, commit, and renew the hold. They never wait."""

    def __init__(
        self, core: Core, topics: Collection[str] | None, cursor: str, limit_s: float,
        put: Callable[[Callable[[], None]], object],
    ) -> None:  # fmt: skip
        """`put` runs a function where the core may be used. `limit_s`: limit of a message, in
        seconds. Raises InvalidName."""
        self.cursor = cursor
        self._core = core
        self._name = core.cursor_name(cursor)
        self._every_topic = topics is None
        self._topics: Committed = dict.fromkeys(topics or (), (0, 0))
        self._limit_s = limit_s
        self._put = put
        self._renewal: CursorQuestion | None = None
        self._renew_at_s = core.host.monotonic_s() + RENEW_S

    def opening(self) -> Job[None]:
        """Open the cursor. Raises CursorHeld, CursorRefused, DaemonError."""
        for some in _portions(self._topics):
            yield from self._asked(CursorAction.OPEN, some, 0)

    def committing(self, stream_id: int, positions: Committed) -> Job[bool]:
        """Commit positions. Returns False if they are of another stream, so that their notices come
        again. Raises CursorHeld, CursorRefused, DaemonError."""
        try:
            for some in _portions(positions):
                yield from self._asked(CursorAction.COMMIT, some, stream_id)
        except CursorRefused as refusal:
            if refusal.detail[0] != CursorRefusal.STALE:
                raise
            return False
        return True

    def renew(self) -> None:
        """Renew the hold every RENEW_S, without a wait. After the daemon has lost the session, this
        holds the cursor again. Raises CursorHeld if another subscriber has the cursor."""
        now_s = self._core.host.monotonic_s()
        if now_s < self._renew_at_s:
            return
        self._renew_at_s = now_s + RENEW_S
        if (renewal := self._renewal) is not None and not renewal.done:
            return
        self._renewal = None
        if renewal is not None:
            _raise_refusal(renewal)
        self._put(self._send_renewal)

    def _send_renewal(self) -> None:
        self._renewal = self._question(CursorAction.OPEN, {}, 0)

    def _question(self, action: CursorAction, topics: Committed, stream_id: int) -> CursorQuestion:
        core = self._core
        every = action is CursorAction.OPEN and self._every_topic
        return core.cursor_question(
            core.whole(NO_CURSORS), self._name, action, topics, stream_id, every_topic=every
        )

    def _asked(self, action: CursorAction, topics: Committed, stream_id: int) -> Job[Committed]:
        """Send a message, and wait for its answer. The message is sent again while the WAL has no
        space."""
        ask = partial(self._question, action, topics, stream_id)
        host, connection = self._core.host, self._core.whole(NO_CURSORS)
        deadline_s = host.monotonic_s() + self._limit_s
        while True:
            try:
                return (yield from jobs.asked(connection, ask, "cursor", self._limit_s))
            except MessageRefused as refusal:
                if refusal.error != WireError.BUSY or host.monotonic_s() >= deadline_s:
                    raise
            again_s = host.monotonic_s() + BUSY_S
            while host.monotonic_s() < again_s:
                yield again_s


class Hold(Protocol):
    """The hold of a cursor, as a subscriber uses it."""

    cursor: str

    def commit(self, stream_id: int, positions: Committed) -> bool:
        """Commit positions, as CursorSteps.committing() does."""

    def renew(self) -> None:
        """Renew the hold, as CursorSteps.renew() does."""

    def close(self) -> None:
        """End the session, which releases the cursor."""

    def drop(self) -> None:
        """Release the cursor of a daemon that is gone for good."""


OpenCursor = Callable[[str, str, Collection[str] | None, CursorOptions], Hold]
"""Opens a cursor, with the arguments and errors of CursorHold."""


class CursorHold(CursorSteps):
    """The hold of a cursor in one daemon, and the client whose session has it."""

    def __init__(
        self, daemon: str, namespace: str, topics: Collection[str] | None, options: CursorOptions
    ) -> None:
        """Open the cursor. Raises InvalidName, CursorHeld, and the errors of Client."""
        wire.encode_namespace(namespace)
        wire.encode_cursor_name(options.name)
        transport: Transport = "zmq" if options.transport == "zmq" else "auto"
        self._client = client = Client(
            daemon, namespace=namespace, timeout=min(options.timeout_s, OPEN_S),
            durable=options.durable, transport=transport,
        )  # fmt: skip
        try:
            super().__init__(
                client._core, topics, options.name, options.timeout_s, client._engine.put
            )
            self._run(self.opening())
        except BaseException:
            self.close()
            raise

    def commit(self, stream_id: int, positions: Committed) -> bool:
        """Commit positions, as committing() does, and wait for the answer."""
        return self._run(self.committing(stream_id, positions))

    def _run(self, job: Job[T]) -> T:
        self._core.check()
        return self._client._ask(self._core.whole(NO_CURSORS), job)

    def close(self) -> None:
        """End the session, which releases the cursor."""
        with suppress(PurgatorydError):
            self._client._close(BYE_S)

    def drop(self) -> None:
        """Release the cursor of a daemon that is gone for good."""
        self._client._engine.end()


def _portions(positions: Committed) -> Iterator[Committed]:
    """Split positions, as many as fit into one message; at least one portion."""
    items = list(positions.items())
    for first in range(0, max(len(items), 1), CURSOR_TOPICS):
        yield dict(items[first : first + CURSOR_TOPICS])


def _raise_refusal(renewal: CursorQuestion) -> None:
    """Raise CursorRefused if the daemon refused the renewal. Other errors pass: the next renewal
    meets them again, or a commit reports them."""
    try:
        renewal.outcome()
    except CursorRefused:
        raise
    except DaemonError:
        pass
