"""Refuses words that the vocabulary replaced: `python .ci/vocabulary.py` (part of `make lint`).

vocabulary.toml lists them. Prints each line that holds one, with the word to use.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
STAMP = ROOT / "build" / "vocabulary.stamp"
"""Its time is when the last run without a finding began."""
SKIPPED = (
    ".ci/vocabulary.toml", "LICENSE", "docs/img/*", "src/purgatoryd/*",
    "tests/fuzz/corpus/*", "tests/stored/*.xz", "benchmarks/results/*",
    "tests/support/public_names.txt", "tests/test_vocabulary.py", "tests/world/bugs/*",
    "*.png", "*.svg",
)  # fmt: skip


class Entry:
    """A word, or a family of names, that must not return."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.use: str = fields["use"]
        self._found = re.compile(fields["find"])
        self._allowed = [re.compile(pattern) for pattern in fields.get("allow", [])]
        self._in: list[str] = fields.get("in", ["*"])
        self._not_in: list[str] = fields.get("not_in", [])

    @property
    def patterns(self) -> list[str]:
        """All paths that it names."""
        return [*self._in, *self._not_in]

    def concerns(self, path: str) -> bool:
        """True if lines of this file are looked at."""
        wanted = any(fnmatch(path, pattern) for pattern in self._in)
        return wanted and not any(fnmatch(path, pattern) for pattern in self._not_in)

    def is_in(self, line: str) -> bool:
        """True if the line holds it outside of the contexts in which it is allowed."""
        if not self._found.search(line):
            return False
        for allowed in self._allowed:
            line = allowed.sub("", line)
        return bool(self._found.search(line))


def entries() -> list[Entry]:
    """All of the list."""
    return [Entry(fields) for fields in tomllib.loads(LIST.read_text())["word"]]


def texts(since_s: float = 0) -> Iterator[tuple[str, str]]:
    """Path and text of each tracked file that people read, if it changed since then."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for path in listed.splitlines():
        if any(fnmatch(path, pattern) for pattern in SKIPPED) or not (ROOT / path).is_file():
            continue
        if (ROOT / path).stat().st_mtime >= since_s:
            yield path, (ROOT / path).read_text()


def violations(since_s: float = 0) -> Iterator[str]:
    """A line for each place that holds a replaced word, in files that changed since then."""
    words = entries()
    for path, text in texts(since_s):
        mine = [word for word in words if word.concerns(path)]
        for word in mine:
            if word.is_in(path):
                yield f"{path}: file name: use {word.use}"
        for number, line in enumerate(text.splitlines(), 1):
            for word in mine:
                if word.is_in(line):
                    yield f"{path}:{number}: use {word.use}: {line.strip()[:100]}"


def main() -> int:
    """Print what is found in files that changed since a run found nothing; 1 if there is any."""
    began_s, clean_s = time.time(), STAMP.stat().st_mtime if STAMP.exists() else 0
    rules_s = max(path.stat().st_mtime for path in (LIST, Path(__file__)))
    found = list(violations(clean_s if rules_s < clean_s else 0))
    print(*found, sep="\n", end="\n" if found else "")
    if not found:
        STAMP.parent.mkdir(exist_ok=True)
        STAMP.touch()
        os.utime(STAMP, (began_s, began_s))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
