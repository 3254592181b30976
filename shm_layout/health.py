"""How a daemon does, as its arena tells: also while it hangs, and when it is gone."""

from __future__ import annotations

import enum
import os
import time
from dataclasses import dataclass
from typing import Any, Protocol

from purgatoryd.shm_layout.arena import NONE_NS
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import ClockKind, DaemonState, Degraded

FROZEN_NS = 5_000_000_000
"""A loop that stood still for longer is suspect: it moves once a second, whatever happens."""
STEP_NS = 120_000_000_000
"""So long one step of a start, or of an end, may take: a recovery moves with each step."""
WATCHED_NS = 2_000_000_000
"""How long a suspect is watched: after a suspend of the host its last move is long ago."""
POLL_S = 0.05

STARTS = (DaemonState.STARTING, DaemonState.RECOVERING)
"""States of one that does not serve yet."""


class Condition(enum.StrEnum):
    """What somebody who watches a daemon has to know."""

    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    RECOVERING = "recovering"
    FROZEN = "frozen"
    KILLED = "killed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Health:
    """A daemon at one moment."""

    condition: Condition
    why: Degraded
    pid: int
    """0 = it has stopped."""
    since_boot_ns: int
    """When it entered its state; 0 = not known."""
    still_ns: int
    """How long ago its loop moved last."""
    overdue_ns: int
    """By how much its next deadline is past; 0 = it is not, or its clock is virtual."""


class StatusSource(Protocol):
    """Source of how a daemon does: its arena, or what has the fields of an arena's header."""

    @property
    def header(self) -> Any:
        """As it is now."""
        ...


class Watch:
    """A daemon that is looked at again and again. Only a suspect that was watched for WATCHED_NS,
    and did nothing meanwhile, is called frozen, or killed."""

    def __init__(self, source: StatusSource, frozen_ns: int = FROZEN_NS) -> None:
        self._source = source
        self._frozen_ns = frozen_ns
        self._seen()

    def _seen(self) -> None:
        self._last, self._since_ns = _move(self._source.header), HOST.boot_ns()

    def look(self) -> Health | None:
        """Its health now; None = it is a suspect, and has to be watched for longer."""
        header = self._source.header
        if _move(header) != self._last:
            self._seen()
            return self.unsure()
        suspicion = _suspicion(header, self._frozen_ns)
        if suspicion and HOST.boot_ns() - self._since_ns < WATCHED_NS:
            return None
        return _health(header, suspicion)

    def unsure(self) -> Health:
        """Its health as it tells itself, whatever it is suspected of."""
        return _health(self._source.header, None)


def look(source: StatusSource, frozen_ns: int = FROZEN_NS) -> Health:
    """The health of a daemon, which takes WATCHED_NS if it is a suspect."""
    watch = Watch(source, frozen_ns)
    while (health := watch.look()) is None:
        time.sleep(POLL_S)
    return health


def _move(header: Any) -> tuple[int, int, int]:
    """Changes whenever the daemon, or its successor, does anything."""
    return header.heartbeat_boot_ns, header.daemon_state, header.epoch


def _suspicion(header: Any, frozen_ns: int) -> Condition | None:
    if header.daemon_state == DaemonState.STOPPED:
        return None
    if not is_alive(header):
        return Condition.KILLED
    limit_ns = max(frozen_ns, STEP_NS) if header.daemon_state in STARTS else frozen_ns
    return Condition.FROZEN if still_ns(header) > limit_ns else None


def is_alive(header: Any) -> bool:
    """True if a daemon's process is there: another one with that id began after the last move."""
    try:
        with open(f"/proc/{header.daemon_pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    began_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return fields[0] not in ("Z", "X") and began_ns <= _moved_boot_ns(header)


def _health(header: Any, suspicion: Condition | None) -> Health:
    state = DaemonState(header.daemon_state)
    condition = Condition.RECOVERING if state in STARTS else Condition[state.name]
    return Health(
        suspicion or condition,
        Degraded(header.daemon_why),
        int(header.daemon_pid),
        int(header.daemon_since_boot_ns),
        still_ns(header),
        overdue_ns(header),
    )


def still_ns(header: Any) -> int:
    """How long ago the loop of a daemon moved last, by the header of its arena."""
    return max(0, HOST.boot_ns() - _moved_boot_ns(header))


def _moved_boot_ns(header: Any) -> int:
    """When the daemon moved last; before its first heartbeat, when it entered its state."""
    return max(int(header.heartbeat_boot_ns), int(header.daemon_since_boot_ns))


def overdue_ns(header: Any) -> int:
    """By how much the next deadline is past; 0 = it is not, or the clock is virtual."""
    due_ns = int(header.next_deadline_ns)
    if due_ns == NONE_NS or header.clock_kind == ClockKind.VIRTUAL:
        return 0
    return max(0, HOST.boot_ns() - due_ns)
