"""`make lint` finds replaced words and faulty sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lint_script import lint_script

pytestmark = pytest.mark.tier("check")

ROOT = Path(__file__).resolve().parents[1]

style = lint_script("style")


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
    assert any(word.concerns(path) and word.is_in(line) for word in style.entries())


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
    assert not any(word.concerns(path) and word.is_in(line) for word in style.entries())


def test_each_path_of_the_list_is_there() -> None:
    paths = [path for path, _ in style.texts()]
    named = {pattern for word in style.entries() for pattern in word.patterns}
    assert [p for p in named if not any(style.fnmatch(path, p) for path in paths)] == []


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ("headless", "Who may not read an arena gets an error."),
        ("headless", "Of the unfinished, and of what is behind them."),
        ("headless", "How much of `payload_bytes` notices may hold."),
        ("headless", "that the daemon runs"),
        ("headless", "So many beats ago its start got further."),
        ("pronoun without a noun", "It was armed when it was."),
        ("pronoun without a noun", "they are left out"),
        ("no main clause", "When it is to be started, while it is down."),
        ("no main clause", "As requests see it."),
        ("no verb", "By the command of the daemon."),
    ],
)
def test_a_faulty_sentence_breaks_a_rule(rule: str, sentence: str) -> None:
    assert style.fault(sentence, True) == rule


@pytest.mark.parametrize(
    "sentence",
    [
        "Return the timers that are due.",
        "Timer slots in shared memory.",
        "Who may read an arena?",
        "When the queue is full, the daemon answers BUSY.",
        "If a start fails: restart the shard.",
        "By default the daemon keeps two snapshots.",
        "That file is read once.",
        "How to add a shard.",
        "what-if scenarios",
        "For tests, use `Arena.memory()`.",
    ],
)
def test_a_whole_sentence_breaks_no_rule(sentence: str) -> None:
    assert style.fault(sentence, True) == ""


def test_a_later_sentence_may_start_with_a_pronoun() -> None:
    assert style.fault("It returns its error.", False) == ""


def test_lower_case_letters_are_judged_at_the_start_of_a_text_only() -> None:
    assert style.fault("of the topic", True) == "headless"
    assert style.fault("of the topic", False) == ""


def test_sentences_end_at_full_stops_paragraphs_and_list_items() -> None:
    text = "The daemon, e.g. a\nshard, starts. It runs\n\nx: What is due.\n- One item\n- Another"
    assert list(style.sentences(style.Prose(1, "docstring", text))) == [
        "The daemon, e.g. a shard, starts.",
        "It runs",
        "What is due.",
        "One item",
        "Another",
    ]


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("a.c", 'int a; /* who asks */ char *b = "/* what */";\n/* Of\n * both. */', [1, 2]),
        ("a.py", "# Whose\n# turn.\nx = 1  # what is\n'''Of x.'''\n# ruff: noqa\n", [1, 3, 4]),
        (
            "a.py",
            "def f():\n    '''Whether it\n    runs.'''\n    raise E(f'what {x} is')\n",
            [2, 4],
        ),
        ("a.py", "assert x, 'who asks'\nlog.info('of it')\nf('what it is')\n", [1, 2]),
        ("a.py", "TABLE = {'of a key': [('x', 'Of a key.'), 'of']}\nx = 'Of a key.'\n", [1]),
        (
            "a.py",
            "def __str__(self):\n    y = 'of a key'\n    return 'of it' if y else f'of {y}'\n",
            [3, 3],
        ),
        (
            "a.md",
            "# What it is\n\n* What it is.\n| What is |\n\n```\nWhat is\n```\nOf it.\n",
            [3, 9],
        ),
        ("a.toml", "# What it is.\n[a]\nb = 'What it is.'\n", [1]),
        ("Makefile", "a: b ## what it is\n# who asks\n\tcc '#' a\n", [1, 2]),
        ("a.html", "What it is.", []),
    ],
)
def test_prose_is_found_in_each_kind_of_file(path: str, text: str, found: list[int]) -> None:
    assert sorted(f.line for f in style.faulty_sentences(path, text)) == found


def finding(text: str) -> Any:
    """Return a finding with this text in the file a.py."""
    return style.Finding("a.py", 1, "headless", text)


def test_an_exception_excuses_its_sentence_once() -> None:
    sentence = finding("Who may read.")
    assert style.compare([sentence], [sentence.listed]) == ([], [])
    assert style.compare([sentence, sentence], [sentence.listed]) == ([sentence], [])
    assert style.compare([sentence, sentence], [sentence.listed] * 2) == ([], [])


def test_an_exception_does_not_excuse_another_sentence_or_file() -> None:
    known, other = finding("Who may read."), finding("Who may write.")
    moved = known._replace(path="b.py")
    refused, stale = style.compare([other, moved], [known.listed])
    assert refused == [other, moved]
    assert stale == [known.listed]


def test_a_line_may_move_but_a_rewritten_sentence_leaves_the_list() -> None:
    known = finding("Who may read.")
    assert style.compare([known._replace(line=7)], [known.listed]) == ([], [])
    assert style.compare([], [known.listed]) == ([], [known.listed])


def test_the_list_of_exceptions_may_not_grow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = style.EXCEPTIONS.read_text().splitlines()
    assert len(listed) <= style.CEILING
    monkeypatch.setattr(style, "STAMP", tmp_path / "style.stamp")
    monkeypatch.setattr(style, "texts", lambda _=0: [])
    monkeypatch.setattr(style, "clean_since_s", lambda: 0)
    assert style.main() == 0
    monkeypatch.setattr(style, "CEILING", len(listed) - 1)
    assert style.main() == 1
    assert f"{len(listed)} entries, {len(listed) - 1} are permitted" in capsys.readouterr().out


def test_the_ceiling_is_only_lowered() -> None:
    script = "a = 1\nCEILING = 7\n"
    assert style.with_ceiling(script, 5) == "a = 1\nCEILING = 5\n"
    assert style.with_ceiling(script, 9) == script
