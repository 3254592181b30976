"""Follow the visible notices of a namespace in an arena: find topics with new ones, and sleep.

The words of a sleep are read before the topics are looked at, so a notice that becomes visible in
between ends the sleep at once. A member of the daemon's group can wake sleepers, or move them away
with FUTEX_CMP_REQUEUE. So each sleep has a limit, which is short after a wake-up was missed.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Reader

IDLE_S = 1.0
MISSED_S = 0.1
_NIL = 0xFFFFFFFF
_ALL = 2**64 - 1
WORDS_MAX = int(lib.PG_SLEEP_WORDS) - 1
"""Largest number of words of arenas in one sleep, which has another word of its own."""
WORDS_MIN = 2
"""Number of words that a follower needs: that of the arena, and that of the namespace."""


def can_sleep() -> bool:
    """Return whether the kernel has futex_waitv() (since Linux 5.16)."""
    return int(lib.pg_sleep(ffi.NULL, ffi.NULL, 0, 0)) not in (errno.ENOSYS, errno.EPERM)


class Sleep:
    """Words of an arena, and their values at the last look. Another thread than that of the look
    may wait."""

    def __init__(self, words: list[Any]) -> None:
        self.words = words
        self._own = ffi.new("uint32_t *")
        self._count = len(words) + 1
        self._words = ffi.new("uint32_t *[]", [*words, self._own])
        self._values = ffi.new("uint32_t[]", self._count)

    def look(self) -> None:
        """Note the present values of the words."""
        lib.pg_look_at(self._words, self._values, self._count)

    @property
    def missed(self) -> bool:
        """True if a word of the arena has changed since the last look."""
        return any(self._words[i][0] != self._values[i] for i in range(self._count - 1))

    def wait(self, limit_s: float) -> bool:
        """Sleep until a word changes, at most `limit_s` seconds. Returns False if the limit ended
        the sleep."""
        limit_ns = max(0, round(limit_s * 1e9))
        error = int(lib.pg_sleep(self._words, self._values, self._count, limit_ns))
        return error != errno.ETIMEDOUT

    def end(self) -> None:
        """End a wait of another thread, or the next wait."""
        lib.pg_wake_all(self._own)


class JoinedSleep(Sleep):
    """The words of several sleeps, with the values that each of them has noted."""

    def __init__(self, parts: Sequence[Sleep]) -> None:
        self.parts = parts
        super().__init__([word for part in parts for word in part.words])

    def look(self) -> None:
        """Copy the values of the parts, which must be read before the notices they announce."""
        at = 0
        for part in self.parts:
            ffi.memmove(self._values + at, part._values, 4 * len(part.words))
            at += len(part.words)
        self._values[at] = self._own[0]


class Rows(NamedTuple):
    """Rows of the names that a reader follows; _NIL = the name does not exist."""

    namespace: int
    topics: tuple[int, ...]
    """Empty if the reader follows all topics, or more than its share of words."""

    @property
    def named(self) -> bool:
        """True if a sleep can wait for the topics themselves."""
        return self.topics != () and _NIL not in self.topics


class Changed(NamedTuple):
    """A topic with another incarnation or a newer visible notice than the reader had noted."""

    topic: str
    incarnation: int
    sequence: int
    """Sequence of the newest visible notice."""
    row: int


class Follower:
    """The topics of a namespace whose visible notices one reader follows."""

    def __init__(
        self,
        reader: Reader,
        namespace: str,
        topics: Collection[str] | None,
        words: int = WORDS_MAX,
    ) -> None:
        """`topics`: None = all topics. `words`: number of words that a sleep has for this arena, at
        least WORDS_MIN."""
        self._reader = reader
        self._namespace = namespace
        self._topics = topics
        few = topics is not None and len(topics) < words
        self._names = [topic.encode() for topic in topics or ()] if few else []
        self._rows = Rows(_NIL, ())
        self._topic_names: dict[int, str] = {}
        """Names of the known topics, by row."""
        self._known = ffi.new("struct pg_known_topic[]", reader.topic_rows)
        self._found = ffi.new("struct pg_known_topic[]", reader.topic_rows)
        self.limit_s = IDLE_S
        """The longest sleep, in seconds."""
        self._arrange(self._rows_of())

    def _rows_of(self) -> Rows:
        row = self._rows.namespace
        if row == _NIL and (row := self._reader.namespace_row(self._namespace)) == _NIL:
            return Rows(row, ())
        arena = self._reader.struct
        return Rows(row, tuple(lib.pg_find_topic(arena, row, t, len(t)) for t in self._names))

    def _arrange(self, rows: Rows) -> None:
        """Choose the words to sleep on. The first word changes with the namespaces and with the
        state of the arena. One word follows for each topic, or one for the namespace."""
        self._rows = rows
        self._listed = ffi.new("uint32_t[]", rows.topics) if rows.named else ffi.NULL
        self.sleep = Sleep([ffi.addressof(self._reader.header, "wake"), *self._wakes(rows)])

    def _wakes(self, rows: Rows) -> Iterator[Any]:
        if rows.named:
            topics = self._reader.rows(lib.PG_R_TOPICS, "pg_topic")
            yield from (ffi.addressof(topics[row], "wake") for row in rows.topics)
        elif rows.namespace != _NIL:
            namespaces = self._reader.rows(lib.PG_R_NAMESPACES, "pg_namespace")
            yield ffi.addressof(namespaces[rows.namespace], "wake")

    def look(self) -> list[Changed]:
        """Return the topics that have changed since they were noted as known. The next sleep ends
        if another one changes after this look."""
        self.sleep.look()
        while (rows := self._rows_of()) != self._rows:
            self._arrange(rows)
            self.sleep.look()
        if rows.namespace == _NIL:
            return []
        count = lib.pg_changed_topics(
            self._reader.struct, rows.namespace, self._listed, len(rows.topics), self._known,
            self._found,
        )  # fmt: skip
        return [one for i in range(count) if (one := self._changed(self._found[i])) is not None]

    def _changed(self, found: Any) -> Changed | None:
        row, incarnation = int(found.row), int(found.incarnation)
        if self._known[row].incarnation != incarnation:
            topic = self._reader.topic_at(row)
            if topic is None or topic.incarnation != incarnation:
                return None
            if self._topics is not None and topic.name not in self._topics:
                self.know(row, incarnation, _ALL)
                return None
            self._topic_names[row] = topic.name
        return Changed(self._topic_names[row], incarnation, int(found.sequence), row)

    def know(self, row: int, incarnation: int, sequence: int) -> None:
        """Note that the notices of a topic up to `sequence` are known."""
        self._known[row].sequence = sequence
        self._known[row].incarnation = incarnation

    def slept(self, *, woken: bool) -> None:
        """Note how a sleep ended. Short sleeps follow if the words changed without a wake-up."""
        if not woken:
            self.limit_s = MISSED_S if self.sleep.missed else min(2 * self.limit_s, IDLE_S)
