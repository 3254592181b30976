"""Compute the times of schedules for the core, which has no calendar.

The core asks for the nominal times of a cron expression: when a message needs them, and when a
schedule has armed an occurrence and needs the time of a later one. An answer that comes late makes
an occurrence late; no occurrence is lost or fires twice, because the core arms each one from the
times in its row.
"""

from __future__ import annotations

from typing import Any

from purgatoryd.daemon.log import log
from purgatoryd.shm_layout import cron
from purgatoryd.shm_layout._core import ffi
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.layout import Status

ANSWERS_PER_ITERATION = 64
STEP_NS = 1_000_000_000
"""After a smaller change of the wall clock's offset, no times are computed again."""
ZONES_EVERY_NS = 60 * 1_000_000_000
"""Time between two looks at the files of the zones."""


class Schedules:
    """Answers the core's questions about nominal times."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._offset_ns = int(arena.header.wall_offset_ns)
        self._zones: dict[str, tuple[int, int]] = {}
        self._look_at_ns = 0

    def begin(self) -> None:
        """Compute all times again, because the tz database may have changed since the last run."""
        self._zones = cron.zone_files(self._arena.schedule_zones())
        self._arena.recheck_schedules()

    def serve(self) -> bool:
        """Answer questions for one iteration. True = there may be more."""
        return all(self.answer() for _ in range(ANSWERS_PER_ITERATION))

    def answer(self) -> bool:
        """Answer one question. False = there was none."""
        question = self._arena.schedule_question()
        if question is None:
            return False
        spec, zone = (
            _text(question.spec, question.spec_len),
            _text(question.zone, question.zone_len),
        )
        status, times = Status.DONE, []
        try:
            times = cron.times(spec, zone, question.after_ns, question.until_ns, question.count)
        except cron.BadSpec as error:
            status = Status.BAD_SPEC
            if question.row != _NO_ROW:
                log.error(f"a schedule cannot arm its next occurrence: {error}")
        self._arena.schedule_answer(question, status, times)
        return True

    def heartbeat(self, now_ns: int) -> None:
        """Compute all times again after a step of the wall clock, and after a change of a zone."""
        offset_ns = int(self._arena.header.wall_offset_ns)
        stepped = abs(offset_ns - self._offset_ns) >= STEP_NS
        self._offset_ns = offset_ns
        if now_ns >= self._look_at_ns:
            self._look_at_ns = now_ns + ZONES_EVERY_NS
            stepped |= self._zones_changed()
        if stepped:
            self._arena.recheck_schedules()

    def _zones_changed(self) -> bool:
        """Look at the files of all zones in use. True = one that was in use before has changed."""
        before, self._zones = self._zones, cron.zone_files(self._arena.schedule_zones())
        changed = any(self._zones.get(zone, state) != state for zone, state in before.items())
        if changed:
            cron.forget_zones()
        return changed


_NO_ROW = 0xFFFFFFFF


def _text(at: Any, length: int) -> str:
    return bytes(ffi.buffer(at, length)).decode(errors="replace")
