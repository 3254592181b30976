"""Replaced words: `make lint` finds them, and the table of old and new names is right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import public_names
import pytest
from lint_script import lint_script

pytestmark = pytest.mark.tier("check")

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "names.md"


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
        ("docs/cold.md", "`bulk-load` needs `purgatoryd[spark]`"),
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


def renamed(section: str) -> Iterator[tuple[str, str]]:
    """Old and new names of a section of the table."""
    text = TABLE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    yield from re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", text, re.MULTILINE)


def test_the_table_of_names_tells_today_s_names() -> None:
    sections = public_names.stored()
    options = {f"--{line.rpartition('--')[2]}" for line in sections["options"]}
    for section, names in (
        ("Options", options), ("Metrics", set(sections["metrics"])),
        ("Settings", set(sections["settings"])),
    ):  # fmt: skip
        found = [(old.split()[0], new.split()[0]) for old, new in renamed(section)]
        plain = [(old, new) for old, new in found if re.fullmatch(r"[\w-]+", old + new)]
        assert len(plain) > 5, section
        assert [old for old, _ in plain if old in names] == []


def test_new_names_of_the_table_are_in_the_code() -> None:
    text = "\n".join(text for path, text in vocabulary.texts())
    known = set(re.findall(r"[\w-]+", text)) | set(re.findall(r"\w+", text))
    cells = re.findall(r"^\| `[^`]+` \| `([\w.-]+)` \|", TABLE.read_text(), re.MULTILINE)
    assert len(cells) > 150
    assert [cell for cell in cells if not {cell, cell.rpartition(".")[2]} & known] == []


def test_each_path_of_the_list_is_there() -> None:
    paths = [path for path, _ in vocabulary.texts()]
    named = {pattern for word in vocabulary.entries() for pattern in word.patterns}
    assert [p for p in named if not any(vocabulary.fnmatch(path, p) for path in paths)] == []
