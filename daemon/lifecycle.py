"""The lifecycle of a daemon and of a deployment: a table of states, and a report of each move to
another state.

A move is reported to the service manager, in the log, and as a notice. The state of a daemon is in
the status file while it starts, and then in its arena header. The state of a deployment is always
in the status file.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from purgatoryd.daemon.log import log
from purgatoryd.daemon.service_manager import ServiceManager
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.arena import Arena, slots_used
from purgatoryd.shm_layout.health import STARTS
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import (
    EVENTS_NAMESPACE,
    EVENTS_TOPIC,
    DaemonState,
    Degraded,
)
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
"""The states that may follow each state. A process may end in any state; the next process begins
with STOPPED."""

MEANING = {
    Degraded.WAL: "the WAL has stopped; new timers are refused",
    Degraded.WAL_BUFFER: "the disk is too slow: due timers wait for the WAL",
    Degraded.LATE: "due timers wait for the loop or the socket",
    Degraded.TIMERS: "nearly all timer slots are in use",
    Degraded.PAYLOADS: "the payload memory is nearly full",
    Degraded.ARENA: "the arena files have lost their names; new timers are refused",
    Degraded.FRAGMENTED: "free payload memory is in small blocks; large payloads are refused",
    Degraded.PAUSED: "the drain waits for due timers of paused topics",
}

LATE_NS = 1_000_000_000
"""A timer that is overdue by more than this at a heartbeat makes the daemon degraded."""
FULL, RELIEVED = 0.9, 0.8
"""A table becomes nearly full when its use reaches the first fraction, and stays so until its use
is below the second fraction."""

Publish = Callable[[str, bytes], None]
"""Publishes a notice with a key and a payload."""
_EVENTS = wire.encode_namespace(EVENTS_NAMESPACE), wire.encode_topic(EVENTS_TOPIC)

Why = TypeVar("Why")


class Lifecycle(ABC, Generic[Why]):
    """The state of a daemon or deployment, and `why`, the reasons why it does not serve as it
    should. Without reasons `why` is false."""

    KEY: ClassVar[str]
    """Key of the notices about moves."""

    def __init__(self, service_manager: ServiceManager, sound: Why, host: Host = HOST) -> None:
        """`sound`: the value of `why` if there are no reasons."""
        self.service_manager = service_manager
        self._host = host
        self.state = STOPPED
        self.why = self._sound = sound
        self._since_boot_ns = 0
        self._file: StatusFile | None = None
        self._publish: Publish | None = None

    def publish_by(self, publish: Publish) -> None:
        """Set the function that publishes later moves."""
        self._publish = publish

    def write_to(self, file: StatusFile) -> None:
        """Write this and later states to a status file."""
        self._file = file
        self._store()

    def step(self, text: str) -> None:
        """Report a step of a start or an end to the service manager, and report progress. `text`
        describes the step."""
        self.service_manager.step(text)
        self.heartbeat()

    def heartbeat(self) -> None:
        """Report progress, in the loop or within a long step, to the service manager and in the
        status file. If the file cannot be written, the next move logs the error."""
        self.service_manager.alive()
        with suppress(OSError):
            self._write()

    def enter(self, state: DaemonState, why: Why | None = None) -> None:
        """Move to `state`. Raises AssertionError if `MOVES` does not allow it."""
        if state not in MOVES[self.state]:
            raise AssertionError(f"no move from {self.state.name} to {state.name}")
        was, self.state, self.why = self.state, state, why or self._sound
        self._since_boot_ns = self._host.boot_ns() if state != was else self._since_boot_ns
        self._store()
        self._announce(was)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Move to STOPPED if the start fails inside this context. Otherwise readers would take the
        process for killed."""
        try:
            yield
        except Exception:
            if self.state is RECOVERING:
                with suppress(OSError):  # the start's error is the one to report
                    self._give_up()
            raise

    def _give_up(self) -> None:
        """End a start that failed."""
        self.enter(STOPPED)

    def settle(self, why: Why, *, draining: bool) -> None:
        """Move to DRAINING, DEGRADED or READY, if that state or its reasons changed."""
        state = DRAINING if draining else DEGRADED if why else READY
        if (state, why) != (self.state, self.why):
            self.enter(state, why)

    def _store(self) -> None:
        """Make the state readable for other processes."""
        try:
            self._write()
        except OSError as error:
            log.error(f"the status file cannot be written: {error}")

    def _write(self) -> None:
        if self._file is not None:
            pid = 0 if self.state is STOPPED else self._host.pid
            found = StatusRecord(self.state, pid, self._since_boot_ns, self._host.boot_ns())
            self._file.write(self._complete(found))

    def _complete(self, found: StatusRecord) -> StatusRecord:
        """Return the record for the status file, with the fields that only a subclass reports."""
        return found

    @abstractmethod
    def _reasons(self) -> str:
        """Return `why` as text."""

    @abstractmethod
    def _causes(self) -> Sequence[str]:
        """Return the names of the reasons, each once, for programs."""

    def _announce(self, was: DaemonState) -> None:
        reasons = self._reasons()
        text = self.state.name.lower() + (f": {reasons}" if reasons else "")
        self.service_manager.status(text)
        if (was, self.state) == (RECOVERING, READY):
            self.service_manager.ready()
        if self.state is STOPPED:
            self.service_manager.stopping()
        tell = log.warning if self.why else log.info
        names = {"state": self.state.name.lower(), "was": was.name.lower()}
        tell(text, **names)
        if self._publish is not None:
            self._publish(self.KEY, json.dumps({**names, "why": self._causes()}).encode())


class DaemonLifecycle(Lifecycle[Degraded]):
    """The lifecycle of a daemon."""

    KEY = "state"

    def __init__(self, service_manager: ServiceManager, host: Host = HOST) -> None:
        super().__init__(service_manager, SOUND, host)
        self._arena: Arena | None = None

    def attach(self, arena: Arena) -> None:
        """Write this and later states to the arena header. Readers rely on the status file until
        READY."""
        self._arena = arena
        self._store()

    def _give_up(self) -> None:
        super()._give_up()
        if self._arena is not None:
            self._arena.clear_pid()

    def heartbeat(self) -> None:
        """Report progress in the arena header as well, where the supervisor of a shard reads it."""
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
    """The lifecycle of a deployment. Each reason is the trouble of one shard."""

    KEY = "deployment"

    def __init__(self, service_manager: ServiceManager) -> None:
        super().__init__(service_manager, ())
        self._figures = 0, 0, 0

    def count(self, shards: int, serving: int, restarts: int) -> None:
        """Set the number of shards, of serving shards and of restarts. The next move or heartbeat
        reports them."""
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
    """Return the PUBLISH request for the notice of an event."""
    return wire.encode_publish(0, *_EVENTS, key, payload)


def in_words(why: Degraded) -> str:
    """Return the reasons of a daemon, as in "the payload memory is nearly full"; empty if none."""
    return "; ".join(MEANING[reason] for reason in Degraded if reason in why)


def reasons(
    arena: Arena, before: Degraded, *, stopped: bool, full: bool, nameless: bool, fragmented: bool
) -> Degraded:
    """Return the reasons why the daemon does not serve as it should. Call this right after an
    advance of the wheel.

    `stopped`: the WAL is stopped; `full`: due timers wait for the WAL; `nameless`: the arena files
    have lost their names; `fragmented`: compaction could not make a large free block; `before`: the
    reasons of the previous heartbeat.
    """
    header, metrics = arena.header, arena.metrics
    slots = slots_used(metrics)
    found = {
        Degraded.WAL: stopped,
        Degraded.WAL_BUFFER: full,
        Degraded.LATE: header.now_ns - header.next_deadline_ns > LATE_NS and not full,
        Degraded.TIMERS: _crowded(slots, header.capacity, Degraded.TIMERS in before),
        Degraded.PAYLOADS: _crowded(
            metrics.blob_bytes, header.payload_bytes, Degraded.PAYLOADS in before
        ),
        Degraded.ARENA: nameless,
        Degraded.FRAGMENTED: fragmented,
    }
    return Degraded(sum(reason for reason, holds in found.items() if holds))


def _crowded(used: int, capacity: int, before: bool) -> bool:
    return bool(used >= capacity * (RELIEVED if before else FULL))
