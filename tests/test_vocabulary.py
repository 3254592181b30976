"""Replaced words: `make lint` finds them."""

from __future__ import annotations

import pytest
from lint_script import lint_script

pytestmark = pytest.mark.tier("check")

vocabulary = lint_script("vocabulary")


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("daemon/store.py", "    journal: Path | None"),
        ("shm_layout/core/core.h", "struct pg_stage *stage;"),
        ("shm_layout/core/state/timers.c", "/* Pops the outbox's oldest. */"),
        ("clients/stream.py", "raise SnapshotRequired(1, 2)"),
        ("clients/core.py", "near: bool = False"),
        ("daemon/reaper.py", "turns += 1"),
        ("docs/guarantees.md", "The sender is told so."),
        ("cli/settings.py", '("level-ttl", "level_ttl_ns")'),
        ("daemon/shard.py", "beats = 0"),
        ("docs/operations.md", "beside the arena"),
        ("docs/pipeline.md", "`bulk-load` needs `purgatoryd[spark]`"),
    ],
)
def test_a_replaced_word_is_found(path: str, line: str) -> None:
    assert any(word.concerns(path) and word.is_in(line) for word in vocabulary.entries())


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("daemon/log.py", 'JOURNALD = "/run/systemd/journal/socket"'),
        ("shm_layout/core/base/wheel.c", "a level of the wheel"),
        ("cli/exposition.py", 'labels=["daemon", "stage"]'),
        ("shm_layout/layout.h", "enum pg_slot_state { PG_S_FREE, PG_S_ARMED, PG_S_PARKED };"),
        ("shm_layout/core/recover/redo.c", "static bool redo_arm(const struct redo *r)"),
    ],
)
def test_a_word_in_another_sense_is_allowed(path: str, line: str) -> None:
    assert not any(word.concerns(path) and word.is_in(line) for word in vocabulary.entries())


def test_each_path_of_the_list_is_there() -> None:
    paths = [path for path, _ in vocabulary.texts()]
    named = {pattern for word in vocabulary.entries() for pattern in word.patterns}
    assert [p for p in named if not any(vocabulary.fnmatch(path, p) for path in paths)] == []
