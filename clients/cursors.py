"""Cursors: the position of a subscriber, stored by the daemon, so that another process continues.

A subscriber with a cursor has a session of its own. The daemon lets one session at a time hold the
cursor. When the process of the subscriber ends, the daemon ends its session, and another subscriber
can open the cursor.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from purgatoryd.clients import jobs
from purgatoryd.clients.client import Client
from purgatoryd.clients.core import BYE_S, CursorQuestion
from purgatoryd.clients.local_channel import Transport
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import (
    CursorRefused,
    DaemonError,
    MessageRefused,
    PurgatorydError,
)
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import CURSOR_TOPICS, CursorAction, CursorRefusal, WireError
from purgatoryd.shm_layout.wire import Committed, CursorName

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


class CursorHold:
    """The hold of a cursor in one daemon, and the session that has it."""

    def __init__(
        self, daemon: str, namespace: str, topics: Collection[str] | None, options: CursorOptions
    ) -> None:
        """Open the cursor. Raises InvalidName, CursorHeld, and the errors of Client."""
        self._name = CursorName(
            wire.encode_namespace(namespace), wire.encode_cursor_name(options.name)
        )
        self.cursor = options.name
        self._every_topic = topics is None
        self._topics: Committed = dict.fromkeys(topics or (), (0, 0))
        self._limit_s = options.timeout_s
        self._renewal: CursorQuestion | None = None
        self._renew_at_s = HOST.monotonic_s() + RENEW_S
        transport: Transport = "zmq" if options.transport == "zmq" else "auto"
        self._client = Client(
            daemon, namespace=namespace, timeout=min(options.timeout_s, OPEN_S),
            durable=options.durable, transport=transport,
        )  # fmt: skip
        try:
            for topics_of_one in _portions(self._topics):
                self._ask(CursorAction.OPEN, topics_of_one, 0)
        except BaseException:
            self.close()
            raise

    def commit(self, stream_id: int, positions: Committed) -> bool:
        """Commit positions. Returns False if they are of another stream, so that their notices come
        again. Raises CursorHeld, CursorRefused, DaemonError."""
        try:
            for some in _portions(positions):
                self._ask(CursorAction.COMMIT, some, stream_id)
        except CursorRefused as refusal:
            if refusal.detail[0] != CursorRefusal.STALE:
                raise
            return False
        return True

    def renew(self) -> None:
        """Renew the hold every RENEW_S, without a wait. After the daemon has lost the session, this
        holds the cursor again. Raises CursorHeld if another subscriber has the cursor."""
        now_s = HOST.monotonic_s()
        if now_s < self._renew_at_s:
            return
        self._renew_at_s = now_s + RENEW_S
        if (renewal := self._renewal) is not None and not renewal.done:
            return
        self._renewal = None
        if renewal is not None:
            _raise_refusal(renewal)
        self._client._engine.put(self._send_renewal)

    def _send_renewal(self) -> None:
        self._renewal = self._question(CursorAction.OPEN, {}, 0)

    def _question(self, action: CursorAction, topics: Committed, stream_id: int) -> CursorQuestion:
        core = self._client._core
        every = action is CursorAction.OPEN and self._every_topic
        return core.cursor_question(
            core.whole(NO_CURSORS), self._name, action, topics, stream_id, every_topic=every
        )

    def _ask(self, action: CursorAction, topics: Committed, stream_id: int) -> Committed:
        """Send a message, and wait for its answer. The message is sent again while the WAL has no
        space."""
        ask = partial(self._question, action, topics, stream_id)
        client, deadline_s = self._client, HOST.monotonic_s() + self._limit_s
        while True:
            client._core.check()
            connection = client._core.whole(NO_CURSORS)
            try:
                job = jobs.asked(connection, ask, "cursor", self._limit_s)
                return client._ask(connection, job)
            except MessageRefused as refusal:
                if refusal.error != WireError.BUSY or HOST.monotonic_s() >= deadline_s:
                    raise
            time.sleep(BUSY_S)

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
