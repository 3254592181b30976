"""The health of a daemon, read from its arena. This works even if the daemon hangs or has ended."""

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
"""Time without a heartbeat after which a loop is suspect. A healthy loop has a heartbeat every
second."""
STEP_NS = 120_000_000_000
"""Longest time of one step of a start or a stop, such as the recovery of a portion."""
WATCHED_NS = 2_000_000_000
"""Time for which a suspect daemon is watched before it counts as frozen. After a suspend of the
host the last heartbeat of a healthy daemon is old."""
POLL_S = 0.05

STARTS = (DaemonState.STARTING, DaemonState.RECOVERING)
"""States of a daemon that does not serve yet."""


class HealthCondition(enum.StrEnum):
    """Condition of a daemon, for monitoring."""

    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    RECOVERING = "recovering"
    FROZEN = "frozen"
    KILLED = "killed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Health:
    """Health of a daemon at one moment."""

    condition: HealthCondition
    why: Degraded
    pid: int
    """Pid of the daemon; 0 if it has stopped."""
    since_boot_ns: int
    """Time at which the daemon entered its state; 0 = unknown."""
    still_ns: int
    """Time since the last heartbeat."""
    overdue_ns: int
    """Time since the earliest armed deadline passed; 0 if it is in the future or the clock is
    virtual."""


class StatusSource(Protocol):
    """The source of a daemon's health: its arena, or an object with the same header fields."""

    @property
    def header(self) -> Any:
        """Current header."""
        ...


class Watch:
    """Observe a daemon repeatedly. The daemon counts as frozen or killed only after it was suspect
    for WATCHED_NS without any progress."""

    def __init__(self, source: StatusSource, frozen_ns: int = FROZEN_NS) -> None:
        self._source = source
        self._frozen_ns = frozen_ns
        self._seen()

    def _seen(self) -> None:
        self._last, self._since_ns = _move(self._source.header), HOST.boot_ns()

    def look(self) -> Health | None:
        """Return the health; None while the daemon is suspect and has to be watched longer."""
        header = self._source.header
        if _move(header) != self._last:
            self._seen()
            return self.unsure()
        suspicion = _suspicion(header, self._frozen_ns)
        if suspicion and HOST.boot_ns() - self._since_ns < WATCHED_NS:
            return None
        return _health(header, suspicion)

    def unsure(self) -> Health:
        """Return the health that the daemon itself reports, without the checks of this process."""
        return _health(self._source.header, None)


def look(source: StatusSource, frozen_ns: int = FROZEN_NS) -> Health:
    """Return the health of a daemon. This takes WATCHED_NS if the daemon is suspect."""
    watch = Watch(source, frozen_ns)
    while (health := watch.look()) is None:
        time.sleep(POLL_S)
    return health


def _move(header: Any) -> tuple[int, int, int]:
    """Return values that change with any progress of the daemon, or of a daemon that replaced
    it."""
    return header.heartbeat_boot_ns, header.daemon_state, header.epoch


def _suspicion(header: Any, frozen_ns: int) -> HealthCondition | None:
    if header.daemon_state == DaemonState.STOPPED:
        return None
    if not is_alive(header):
        return HealthCondition.KILLED
    limit_ns = max(frozen_ns, STEP_NS) if header.daemon_state in STARTS else frozen_ns
    return HealthCondition.FROZEN if still_ns(header) > limit_ns else None


def is_alive(header: Any) -> bool:
    """Return whether the daemon's process exists.

    A process that started after the daemon's last progress is another process with the same pid, so
    the result is then False.
    """
    try:
        with open(f"/proc/{header.daemon_pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    began_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return fields[0] not in ("Z", "X") and began_ns <= _moved_boot_ns(header)


def _health(header: Any, suspicion: HealthCondition | None) -> Health:
    state = DaemonState(header.daemon_state)
    condition = HealthCondition.RECOVERING if state in STARTS else HealthCondition[state.name]
    return Health(
        suspicion or condition,
        Degraded(header.daemon_why),
        int(header.daemon_pid),
        int(header.daemon_since_boot_ns),
        still_ns(header),
        overdue_ns(header),
    )


def still_ns(header: Any) -> int:
    """Return the time since a daemon's last heartbeat, from the header of its arena."""
    return max(0, HOST.boot_ns() - _moved_boot_ns(header))


def _moved_boot_ns(header: Any) -> int:
    """Return the time of the last heartbeat or of the last change of state, whichever is later."""
    return max(int(header.heartbeat_boot_ns), int(header.daemon_since_boot_ns))


def overdue_ns(header: Any) -> int:
    """Return the time since the earliest armed deadline passed; 0 if it is in the future or the
    clock is virtual."""
    due_ns = int(header.next_deadline_ns)
    if due_ns == NONE_NS or header.clock_kind == ClockKind.VIRTUAL:
        return 0
    return max(0, HOST.boot_ns() - due_ns)
