"""The life cycle of a daemon: one table of its states, and whoever has to know of a move.

Each move is written into the arena's header, told to the service manager and the log, and
published to those who listen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from purgatoryd.daemon.clock import boot_ns
from purgatoryd.daemon.log import log
from purgatoryd.daemon.supervisor import Supervisor
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.layout import DaemonState, Degraded

STOPPED, STARTING, RECOVERING, READY, DEGRADED, DRAINING = DaemonState
SOUND = Degraded(0)

MOVES: Mapping[DaemonState, frozenset[DaemonState]] = {
    STOPPED: frozenset({STARTING}),
    STARTING: frozenset({RECOVERING}),
    RECOVERING: frozenset({READY}),
    READY: frozenset({DEGRADED, DRAINING, STOPPED}),
    DEGRADED: frozenset({READY, DEGRADED, DRAINING, STOPPED}),
    DRAINING: frozenset({READY, DEGRADED, DRAINING, STOPPED}),
}
"""Where each state may go. From any of them the process may end; the next one begins anew."""

MEANING = {
    Degraded.JOURNAL: "the journal has stopped, nothing is armed any more",
    Degraded.STAGE: "the disk is too slow, what is due waits for the journal",
    Degraded.LATE: "what is due waits for the loop or the socket",
    Degraded.TIMERS: "nearly all slots are taken",
    Degraded.PAYLOADS: "the payload memory is nearly full",
}

LATE_NS = 1_000_000_000
"""A deadline that is past by more than that, at a heartbeat, is a reason to be degraded."""
FULL, RELIEVED = 0.9, 0.8
"""What is nearly full at the first part stays so until it is below the second."""

Publish = Callable[[str, bytes], None]
"""Publishes a payload under a key, if anybody listens."""


class LifeCycle:
    """Where the daemon stands in the table."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.state = STOPPED
        self.why = SOUND
        self._since_boot_ns = 0
        self._arena: Arena | None = None
        self._publish: Publish | None = None

    def enter(self, state: DaemonState, why: Degraded = SOUND) -> None:
        """Moves to `state`; the table must have the move."""
        if state not in MOVES[self.state]:
            raise AssertionError(f"no move from {self.state.name} to {state.name}")
        was, self.state, self.why = self.state, state, why
        self._since_boot_ns = boot_ns() if state != was else self._since_boot_ns
        self._store()
        self._tell(was)

    def attach(self, arena: Arena) -> None:
        """From now on the state stands in this arena's header."""
        self._arena = arena
        self._store()

    def publish_by(self, publish: Publish) -> None:
        """From now on moves are published."""
        self._publish = publish

    def settle(self, why: Degraded, *, draining: bool) -> None:
        """Moves to where a daemon that serves belongs, if it is not there."""
        state = DRAINING if draining else DEGRADED if why else READY
        if (state, why) != (self.state, self.why):
            self.enter(state, why)

    def _store(self) -> None:
        if self._arena is not None:
            self._arena.set_daemon_state(self.state, self.why, self._since_boot_ns)

    def _tell(self, was: DaemonState) -> None:
        text = described(self.state, self.why)
        self.supervisor.status(text)
        if was is RECOVERING:
            self.supervisor.ready()
        if self.state is STOPPED:
            self.supervisor.stopping()
        names = self.state.name.lower(), was.name.lower()
        tell = log.warning if self.why else log.info
        tell(text, state=names[0], was=names[1])
        if self._publish is not None:
            record = {"state": names[0], "was": names[1], "why": self.why.names}
            self._publish("state", json.dumps(record).encode())


def described(state: DaemonState, why: Degraded) -> str:
    """A state in words: "degraded: nearly all slots are taken"."""
    reasons = "; ".join(MEANING[reason] for reason in Degraded if reason in why)
    return state.name.lower() + (f": {reasons}" if reasons else "")


def reasons(arena: Arena, before: Degraded, *, stopped: bool, full: bool) -> Degraded:
    """Why the daemon does not serve as it should, right after an advance.

    `stopped`: its journal is; `full`: what is due waits for the journal; `before`: the reasons
    of a heartbeat ago.
    """
    header, metrics = arena.header, arena.metrics
    slots = metrics.live + metrics.parked + metrics.outcomes
    found = {
        Degraded.JOURNAL: stopped,
        Degraded.STAGE: full,
        Degraded.LATE: header.now_ns - header.next_deadline_ns > LATE_NS and not full,
        Degraded.TIMERS: _crowded(slots, header.capacity, Degraded.TIMERS in before),
        Degraded.PAYLOADS: _crowded(
            metrics.blob_bytes, header.payload_bytes, Degraded.PAYLOADS in before
        ),
    }
    return Degraded(sum(reason for reason, holds in found.items() if holds))


def _crowded(used: int, room: int, before: bool) -> bool:
    return bool(used >= room * (RELIEVED if before else FULL))
