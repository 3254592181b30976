"""Check that the table of docs/reference/words.md agrees with the code.

A published word is a word that one thread or process stores and another thread or process loads
without a lock, or that a recovery relies on. Each place of the C core that loads or stores a
published word names it in a macro of base/common.h or in a function of stdatomic.h. The table has a
row for each word, with the memory orders of its stores and loads. Code that only readers run loads
such words in no other way.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = ROOT / "shm_layout"
PAGE = ROOT / "docs" / "reference" / "words.md"
HEADING = "# Published words"
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
MACRO = re.compile(r"\b(LOAD|STORE|EXCHANGE)_(ACQUIRE|RELEASE|RELAXED)\(")
ATOMIC = re.compile(r"\batomic_(load|store|exchange|fetch_add)\(")
STRUCT = re.compile(r"^struct (\w+) \{(.*?)^\};", re.MULTILINE | re.DOTALL)
MEMBER = re.compile(r"^\s*(?:const )?struct (\w+) \*?(\w+);", re.MULTILINE)
RETURNS = re.compile(r"\bstruct (\w+) \*(\w+)\(")
ROW = re.compile(r"^ROW\((\w+), (\w+),", re.MULTILINE)
FUNCTION = re.compile(r"^[a-z_].*?\b(\w+)\([^;{]*\)\s*\{.*?^\}", re.MULTILINE | re.DOTALL)
ARROW = re.compile(r"(\w+(?:\((?:[^()]|\([^()]*\))*\))?(?:->\w+)*)->(\w+)\b(?!\()")
ARGUMENTS = re.compile(r"\((?:[^()]|\([^()]*\))*\)")
COPIED = {"pg_hot", "pg_cold", "pg_entry", "pg_watermark", "pg_job"}
"""Structs whose rows readers copy; readers pass on pointers to these copies."""
POINTERS = {
    ("front/batch.c", "value"): "pg_result.deadline_ns",
    ("front/batch.c", "intent[0]"): "pg_session.intent",
    ("state/bulk_loads.c", "word"): "bulk_load_bits",
    ("ring/ring.c", "word"): "pg_ring.taker_sleeps",
    ("base/futex.c", "word"): "pg_header.wake",
    ("base/futex.c", "words[i]"): "pg_header.wake",
}
"""Published words that the code names through a pointer: by (file, pointer)."""
READERS = {
    "front/scan.c": ".*",
    "front/notices.c": "notices_head",
    "state/replay_buffer.c": "replay_(copy|newest)",
    "state/timers.c": "slot_copy_bounded",
    "recover/snapshot.c": ".*",
    "recover/arena.c": "live_.*|pg_check_live",
    "state/names.c": "topic_named|pg_(find|topic|namespace)_.*",
    "wal/wal_buffer.c": "pg_wal_buffer_copy|wal_buffer_over|wal_stopped",
    "wal/group_commit.c": "clocks|pg_group_commit_iterate",
}
"""For each file: the functions (a regular expression) that load words while other threads store
them."""
OWN = {("wal/wal_buffer.c", "pg_wal_buffer.appended")}
"""Published words that a function in READERS stores itself."""


class Access(NamedTuple):
    """A place in the code that names a published word."""

    word: str
    """struct.member"""
    store: bool
    order: str
    where: str


def code_of(path: Path) -> str:
    """Return the text of a file with comments replaced by blanks, so that offsets and line numbers
    stay the same."""
    return COMMENT.sub(lambda c: re.sub(r"[^\n]", " ", c[0]), path.read_text())


class Types:
    """Find the struct that an expression points to."""

    def __init__(self, texts: list[str]) -> None:
        """Collect the declarations in the texts of all files."""
        self._members: dict[tuple[str, str], str] = {}
        self._returned: dict[str, str] = {}
        for text in texts:
            for struct, body in STRUCT.findall(text):
                self._members |= {(struct, name): kind for kind, name in MEMBER.findall(body)}
            self._returned |= {name: kind for kind, name in RETURNS.findall(text)}
            self._returned |= dict(ROW.findall(text))

    def struct_of(self, expression: str, before: str) -> str | None:
        """Return the struct that `expression` points to. `before` is the text of the function up to
        the expression."""
        base, *members = ARGUMENTS.sub("()", expression).split("->")
        struct: str | None
        if base.endswith("()"):
            struct = self._returned.get(base.removesuffix("()"))
        else:
            declared = rf"\bstruct (\w+) \*(?:const )?(?:\w+ = [^;]*?, \*)?{re.escape(base)}\b"
            found = re.findall(declared, before)
            struct = found[-1] if found else None
        for member in members:
            struct = self._members.get((struct or "", member))
        return struct


def so_far(text: str, at: int) -> str:
    """Return the text of the function around offset `at`, up to that offset."""
    return text[max(text.rfind("\n}\n", 0, at), 0) : at]


def argument(text: str, at: int) -> str:
    """Return the first argument of a call; `at` is the offset after the call's opening bracket."""
    deep = 0
    for end in range(at, len(text)):
        if (text[end] == "," and deep == 0) or (text[end] == ")" and deep == 0):
            return " ".join(text[at:end].split())
        deep += {"(": 1, ")": -1}.get(text[end], 0)
    raise ValueError(text[at : at + 40])


def word_of(file: str, text: str, at: int, types: Types) -> str:
    """Return the name of the word whose address is the argument at offset `at` of the text."""
    place = argument(text, at)
    if (file, place.lstrip("&")) in POINTERS:
        return POINTERS[file, place.lstrip("&")]
    expression, arrow, member = place.removeprefix("&").rpartition("->")
    member = member.partition("[")[0]
    struct = types.struct_of(expression, so_far(text, at)) if arrow else None
    return f"{struct or '?'}.{member}" if arrow else place


def accesses(folder: Path) -> list[Access]:
    """Return all places below a folder that name a published word, except the definitions of the
    macros."""
    paths = sorted(p for p in folder.rglob("*.[ch]") if "core" in p.parts)
    texts = {path: code_of(path) for path in [*paths, folder / "layout.h", folder / "api.h"]}
    types = Types(list(texts.values()))
    found = []
    for path in paths:
        text, file = texts[path], f"{path.parent.name}/{path.name}"
        for pattern in (MACRO, ATOMIC):
            for use in pattern.finditer(text):
                line = text.count("\n", 0, use.start())
                if text.splitlines()[line].startswith("#define"):
                    continue
                word, kind = word_of(file, text, use.end(), types), use[1].lower()
                order = "seq_cst" if pattern is ATOMIC else use[2].lower()
                where = f"{file}:{line + 1}"
                if kind != "load":
                    found.append(Access(word, True, order, where))
                if kind != "store":
                    found.append(Access(word, False, order, where))
    return found


def table(page: str) -> dict[str, tuple[set[str], set[str]]]:
    """Read the table of the page. Return (orders of the stores, orders of the loads) by word."""
    section = page.partition(HEADING)[2].partition("\n#")[0]
    rows: dict[str, tuple[set[str], set[str]]] = {}
    for line in section.splitlines():
        if not line.startswith("| `"):
            continue
        words, _, _, store, load, *_ = (cell.strip() for cell in line.strip("|").split(" | "))
        orders = [set(re.findall(r"release|acquire|relaxed|seq_cst", c)) for c in (store, load)]
        for word in re.findall(r"`([^`]+)`", words):
            rows[word] = (orders[0], orders[1])
    return rows


def differences(rows: dict[str, tuple[set[str], set[str]]], found: list[Access]) -> list[str]:
    """Return a message for each difference between the table and the code."""
    used: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    wrong = []
    for a in found:
        used[a.word][0 if a.store else 1].add(a.order)
        if a.word not in rows:
            wrong.append(f"{a.where}: {a.word} is not in the table of published words")
    for word, orders in rows.items():
        for name, stated, real in zip(("stores", "loads"), orders, used[word], strict=True):
            if stated != real:
                wrong.append(
                    f"{word}: the table has {name} {sorted(stated)}, the code {sorted(real)}"
                )
    return wrong


def plain_loads(folder: Path, words: set[str]) -> list[str]:
    """Return a message for each place where readers load a published word without naming an
    order."""
    paths = sorted((folder / "core").glob("*/*.[ch]")) + sorted((folder / "core").glob("*.h"))
    texts = {path: code_of(path) for path in [*paths, folder / "layout.h"]}
    types = Types(list(texts.values()))
    wrong = []
    for file, names in READERS.items():
        text = texts[folder / "core" / file]
        for function in FUNCTION.finditer(text):
            if not re.fullmatch(names, function[1]):
                continue
            head = function[0].partition("{")[0]
            for use in ARROW.finditer(text, function.start(), function.end()):
                before = so_far(text, use.start())
                struct = types.struct_of(use[1], before)
                word = f"{struct}.{use[2]}"
                copied = struct in COPIED and re.search(rf"\*{re.escape(use[1])}\b", head)
                named = re.search(r"(?:LOAD|STORE)_\w+\(&$|atomic_\w+\(&$", before)
                if word in words and not named and not copied and (file, word) not in OWN:
                    line = text.count("\n", 0, use.start()) + 1
                    wrong.append(f"{file}:{line}: a reader loads {word} without an order")
    return wrong


def main() -> None:
    """Print all messages. Exit with code 1 if there are any."""
    rows = table(PAGE.read_text())
    found = differences(rows, accesses(LAYOUT)) + plain_loads(LAYOUT, set(rows))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
