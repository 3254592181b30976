"""The lifecycle of a daemon, and of a deployment of shards: one table of states, and whoever has
to know of a move.

Each move is reported to the service manager and the log, and stands where others read it: in a
file, and of a daemon that serves in the header of its arena. It is published, too, as a notice.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from purgatoryd.daemon.log import log
from purgatoryd.daemon.supervisor import Supervisor
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.health import STARTS
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import EVENTS_NAMESPACE, EVENTS_TOPIC, DaemonState, Degraded
from purgatoryd.shm_layout.status_file import StatusFile, StatusRecord, Trouble

STOPPED, STARTING, RECOVERING, READY, DEGRADED, DRAINING = DaemonState
SOUND = Degraded(0)

MOVES: Mapping[DaemonState, frozenset[DaemonState]] = {
    STOPPED: frozenset({STARTING}),
    STARTING: frozenset({RECOVERING}),
    RECOVERING: frozenset({READY, STOPPED}),
    READY: frozenset({DEGRADED, DRAINING, STOPPED}),
    DEGRADED: frozenset({READY, DEGRADED, DRAINING, STOPPED}),
    DRAINING: frozenset({READY, DEGRADED, DRAINING, STOPPED}),
}
"""Where each state may go. From any of them the process may end; the next one starts over."""

MEANING = {
    Degraded.WAL: "the WAL has stopped, nothing is armed any more",
    Degraded.WAL_BUFFER: "the disk is too slow, what is due waits for the WAL",
    Degraded.LATE: "what is due waits for the loop or the socket",
    Degraded.TIMERS: "nearly all slots are taken",
    Degraded.PAYLOADS: "the payload memory is nearly full",
    Degraded.ARENA: "the arena files have lost their names, new timers are refused",
}

LATE_NS = 1_000_000_000
"""A deadline that is past by more than that, at a heartbeat, is a reason to be degraded."""
FULL, RELIEVED = 0.9, 0.8
"""What is nearly full at the first part stays so until it is below the second."""

Publish = Callable[[str, bytes], None]
"""Publishes a payload under a key."""
_EVENTS = wire.encode_namespace(EVENTS_NAMESPACE), wire.encode_topic(EVENTS_TOPIC)

Why = TypeVar("Why")


class Lifecycle(ABC, Generic[Why]):
    """Where somebody stands in the table. The reasons `why` are false if there are none."""

    KEY: ClassVar[str]
    """Of the notices of its moves."""

    def __init__(self, supervisor: Supervisor, sound: Why, host: Host = HOST) -> None:
        """`sound`: no reasons."""
        self.supervisor = supervisor
        self._host = host
        self.state = STOPPED
        self.why = self._sound = sound
        self._since_boot_ns = 0
        self._file: StatusFile | None = None
        self._publish: Publish | None = None

    def publish_by(self, publish: Publish) -> None:
        """From now on moves are published."""
        self._publish = publish

    def write_to(self, file: StatusFile) -> None:
        """From now on the state stands in this file."""
        self._file = file
        self._store()

    def step(self, text: str) -> None:
        """A start or an end has got so far; whoever watches it is notified."""
        self.supervisor.step(text)
        self.heartbeat()

    def heartbeat(self) -> None:
        """Report progress, in the loop or within a long step, to the service manager and in the
        status file. A folder without space is reported with the next move."""
        self.supervisor.alive()
        with suppress(OSError):
            self._write()

    def enter(self, state: DaemonState, why: Why | None = None) -> None:
        """Moves to `state`; the table must have the move."""
        if state not in MOVES[self.state]:
            raise AssertionError(f"no move from {self.state.name} to {state.name}")
        was, self.state, self.why = self.state, state, why or self._sound
        self._since_boot_ns = self._host.boot_ns() if state != was else self._since_boot_ns
        self._store()
        self._announce(was)

    def settle(self, why: Why, *, draining: bool) -> None:
        """Moves to where one that serves belongs, if it is not there."""
        state = DRAINING if draining else DEGRADED if why else READY
        if (state, why) != (self.state, self.why):
            self.enter(state, why)

    def _store(self) -> None:
        """Writes the state down where others find it."""
        try:
            self._write()
        except OSError as error:
            log.error(f"the state cannot be written down: {error}")

    def _write(self) -> None:
        if self._file is not None:
            pid = 0 if self.state is STOPPED else self._host.pid
            found = StatusRecord(self.state, pid, self._since_boot_ns, self._host.boot_ns())
            self._file.write(self._complete(found))

    def _complete(self, found: StatusRecord) -> StatusRecord:
        """With all that there is to tell."""
        return found

    @abstractmethod
    def _reasons(self) -> str:
        """In words."""

    @abstractmethod
    def _causes(self) -> Sequence[str]:
        """For programs, each once."""

    def _announce(self, was: DaemonState) -> None:
        reasons = self._reasons()
        text = self.state.name.lower() + (f": {reasons}" if reasons else "")
        self.supervisor.status(text)
        if (was, self.state) == (RECOVERING, READY):
            self.supervisor.ready()
        if self.state is STOPPED:
            self.supervisor.stopping()
        tell = log.warning if self.why else log.info
        names = {"state": self.state.name.lower(), "was": was.name.lower()}
        tell(text, **names)
        if self._publish is not None:
            self._publish(self.KEY, json.dumps({**names, "why": self._causes()}).encode())


class DaemonLifecycle(Lifecycle[Degraded]):
    """A daemon's."""

    KEY = "state"

    def __init__(self, supervisor: Supervisor, host: Host = HOST) -> None:
        super().__init__(supervisor, SOUND, host)
        self._arena: Arena | None = None

    def attach(self, arena: Arena) -> None:
        """From now on the state stands in this arena's header; until READY the file counts."""
        self._arena = arena
        self._store()

    def heartbeat(self) -> None:
        """Report progress in the arena as well, where the process that runs a shard reads it."""
        super().heartbeat()
        if self._arena is not None:
            self._arena.progress(self._host.boot_ns())

    def _store(self) -> None:
        if self._arena is not None:
            self._arena.set_daemon_state(self.state, self.why, self._since_boot_ns)
        if self.state in STARTS:
            super()._store()
        elif self._file is not None:
            self._file.remove()
            self._file = None

    def _reasons(self) -> str:
        return in_words(self.why)

    def _causes(self) -> Sequence[str]:
        return self.why.names


class DeploymentLifecycle(Lifecycle[tuple[Trouble, ...]]):
    """That of a deployment; each reason is a shard's."""

    KEY = "deployment"

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__(supervisor, ())
        self._figures = 0, 0, 0

    def count(self, shards: int, serving: int, restarts: int) -> None:
        """What is reported of the shards from the next move or heartbeat on."""
        self._figures = shards, serving, restarts

    def _complete(self, found: StatusRecord) -> StatusRecord:
        reasons = [trouble.text for trouble in self.why]
        shards, serving, restarts = self._figures
        return replace(
            found, causes=self._causes(), reasons=reasons, shards=shards, serving=serving,
            restarts=restarts, log_dropped=log.dropped,
        )  # fmt: skip

    def _reasons(self) -> str:
        return "; ".join(trouble.text for trouble in self.why)

    def _causes(self) -> Sequence[str]:
        return sorted({trouble.cause for trouble in self.why})


def publishing(key: str, payload: bytes) -> bytes:
    """The PUBLISH that reports an event."""
    return wire.encode_publish(0, *_EVENTS, key, payload)


def in_words(why: Degraded) -> str:
    """Reasons of a daemon: "nearly all slots are taken"; empty if there are none."""
    return "; ".join(MEANING[reason] for reason in Degraded if reason in why)


def reasons(
    arena: Arena, before: Degraded, *, stopped: bool, full: bool, nameless: bool
) -> Degraded:
    """Why the daemon does not serve as it should, right after an advance.

    `stopped`: the WAL is stopped; `full`: due timers wait for the WAL; `nameless`: the arena files
    have lost their names; `before`: the reasons of the previous heartbeat.
    """
    header, metrics = arena.header, arena.metrics
    slots = metrics.live + metrics.parked + metrics.outcomes
    found = {
        Degraded.WAL: stopped,
        Degraded.WAL_BUFFER: full,
        Degraded.LATE: header.now_ns - header.next_deadline_ns > LATE_NS and not full,
        Degraded.TIMERS: _crowded(slots, header.capacity, Degraded.TIMERS in before),
        Degraded.PAYLOADS: _crowded(
            metrics.blob_bytes, header.payload_bytes, Degraded.PAYLOADS in before
        ),
        Degraded.ARENA: nameless,
    }
    return Degraded(sum(reason for reason, holds in found.items() if holds))


def _crowded(used: int, capacity: int, before: bool) -> bool:
    return bool(used >= capacity * (RELIEVED if before else FULL))
