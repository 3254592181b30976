"""Check the language of code and docs: `python .ci/style.py [--shrink]` (part of `make lint`).

Two kinds of findings:

* A line holds a word that vocabulary.toml replaces.
* A sentence of a comment, docstring, message or page has no subject or no main clause.

style_exceptions.txt lists the sentences that are allowed to stay. Each line has the path, the hash
of the sentence and its first words. Entries without a finding are errors; `--shrink` removes them.
Nothing adds entries, and a list longer than CEILING is an error. `--shrink` lowers CEILING to the
length of the list, so the list can only shrink.
"""

from __future__ import annotations

import ast
import hashlib
import io
import os
import re
import subprocess
import sys
import time
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORDS = Path(__file__).with_name("vocabulary.toml")
EXCEPTIONS = Path(__file__).with_name("style_exceptions.txt")
CEILING = 192
"""The largest permitted number of exceptions."""
STAMP = ROOT / "build" / "style.stamp"
"""An empty file; its modification time is the start of the last run without findings."""
SKIPPED = (
    ".ci/vocabulary.toml", ".ci/style.py", ".ci/style_exceptions.txt", "LICENSE",
    "docs/img/*", "src/purgatoryd/*", "tests/fuzz/corpus/*", "tests/stored/*.xz",
    "benchmarks/results/*", "tests/support/public_names.txt", "tests/test_style.py",
    "tests/world/bugs/*", "*.png", "*.svg",
)  # fmt: skip
MADE_OF_DOCSTRINGS = tuple(f"docs/reference/{name}.md" for name in ("api", "cli", "errors"))
"""Pages that consist of docstrings; their sentences are checked in the code."""


class Prose(NamedTuple):
    """A comment, docstring, message or paragraph."""

    line: int
    kind: str
    """"comment", "docstring", "message" or "page"."""
    text: str


class Finding(NamedTuple):
    """A line or sentence that has to be rewritten."""

    path: str
    line: int
    rule: str
    text: str

    @property
    def entry(self) -> str:
        """Path and hash of the finding, as in the list of exceptions."""
        return f"{self.path} {hashlib.sha256(self.text.encode()).hexdigest()[:10]}"

    @property
    def listed(self) -> str:
        """The whole line for the finding in the list of exceptions."""
        return f"{self.entry}  # {' '.join(self.text.split()[:8])}"


# ---- words ----


class Entry:
    """A word, or a family of names, that vocabulary.toml replaces."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.use: str = fields["use"]
        self._found = re.compile(fields["find"])
        self._allowed = [re.compile(pattern) for pattern in fields.get("allow", [])]
        self._in: list[str] = fields.get("in", ["*"])
        self._not_in: list[str] = fields.get("not_in", [])

    @property
    def patterns(self) -> list[str]:
        """All path patterns of the entry."""
        return [*self._in, *self._not_in]

    def concerns(self, path: str) -> bool:
        """Return whether the entry applies to this file."""
        wanted = any(fnmatch(path, pattern) for pattern in self._in)
        return wanted and not any(fnmatch(path, pattern) for pattern in self._not_in)

    def may_be_in(self, text: str) -> bool:
        """Return whether the word occurs anywhere in a text, even in an allowed context."""
        return bool(self._found.search(text))

    def is_in(self, line: str) -> bool:
        """Return whether the line contains the word outside of the allowed contexts."""
        if not self.may_be_in(line):
            return False
        for allowed in self._allowed:
            line = allowed.sub("", line)
        return self.may_be_in(line)


def entries() -> list[Entry]:
    """Return all entries of vocabulary.toml."""
    return [Entry(fields) for fields in tomllib.loads(WORDS.read_text())["word"]]


def replaced_words(path: str, text: str, words: list[Entry]) -> Iterator[Finding]:
    """Find words that vocabulary.toml replaces, in the name and in the lines of a file."""
    concerned = [
        word for word in words if word.concerns(path) and word.may_be_in(f"{path}\n{text}")
    ]
    lines = [(0, path), *enumerate(text.splitlines(), 1)]
    for word in concerned:
        yield from (
            Finding(path, number, f"use {word.use}", line.strip())
            for number, line in lines
            if word.is_in(line)
        )


# ---- prose ----

MESSAGE_CALLS = {
    "critical", "debug", "echo", "error", "exception", "exit", "fail", "info", "log", "secho",
    "skip", "warning",
}  # fmt: skip
MESSAGE_ARGUMENTS = {"documentation", "help", "reason", "short_help"}
DIRECTIVE = re.compile(r"(?:fmt|type|pragma|mypy|ruff|coverage|!)\b|noqa|!/")
C_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*(.*?)\*/', re.DOTALL)
LIST_ITEM = re.compile(r"(?:[-*+]|\d+\.|[\w`-]+:)\s+")


def python_prose(text: str) -> Iterator[Prose]:
    """Return the comments, docstrings and messages of a Python file."""
    yield from _joined(_python_comments(text))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for body in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
            for statement in body if isinstance(body, list) else []:
                if isinstance(statement, ast.Expr) and (said := _constant(statement.value)):
                    yield Prose(statement.lineno, "docstring", said)
        yield from (Prose(part.lineno, "message", _constant(part)) for part in _messages(node))
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            yield from _table_texts(statement.value)


def _python_comments(text: str) -> Iterator[tuple[int, int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            said = token.string.lstrip("#").strip()
            yield token.start[0], token.start[1], "" if DIRECTIVE.match(said) else said


def _messages(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield from node.exc.args
    elif isinstance(node, ast.Assert) and node.msg is not None:
        yield node.msg
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        yield from node.args[:1] if called in MESSAGE_CALLS else []
        yield from (word.value for word in node.keywords if word.arg in MESSAGE_ARGUMENTS)
    elif isinstance(node, ast.FunctionDef) and node.name == "__str__":
        for part in ast.walk(node):
            if isinstance(part, ast.Return) and part.value is not None:
                yield from _alternatives(part.value)


def _alternatives(value: ast.expr) -> Iterator[ast.expr]:
    """Return the expressions of which a conditional expression returns one."""
    if isinstance(value, ast.IfExp):
        yield from _alternatives(value.body)
        yield from _alternatives(value.orelse)
    else:
        yield value


def _table_texts(value: ast.expr | None) -> Iterator[Prose]:
    """Return the texts of several words in a dict, list or tuple, except keys of a dict."""
    if isinstance(value, ast.Dict):
        parts = value.values
    else:
        parts = value.elts if isinstance(value, (ast.List, ast.Tuple)) else []
    for part in parts:
        said = _constant(part)
        if said.count(" ") > 1:
            yield Prose(part.lineno, "message", said)
        yield from _table_texts(part)


def _constant(node: ast.expr) -> str:
    """Return the text of a string literal, with "X" for each inserted value; "" for any other
    node."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_constant(part) or "X" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def _joined(comments: Iterator[tuple[int, int, str]]) -> Iterator[Prose]:
    """Join comments that are in the same column of consecutive lines."""
    first, last, column, parts = 0, -1, 0, list[str]()
    for line, start, said in comments:
        if (line, start) != (last + 1, column) and parts:
            yield Prose(first, "comment", "\n".join(parts))
            parts = []
        if not parts:
            first = line
        last, column = line, start
        parts.append(said)
    if parts:
        yield Prose(first, "comment", "\n".join(parts))


def c_prose(text: str) -> Iterator[Prose]:
    """Return the comments of a C file."""
    for match in C_TOKEN.finditer(text):
        if match[1] is not None:
            said = re.sub(r"(?m)^[ \t]*\*? ?|\s+$", "", match[1])
            yield Prose(text.count("\n", 0, match.start()) + 1, "comment", said)


def hash_prose(text: str) -> Iterator[Prose]:
    """Return the comments of a file in which comments start with "#", and the help texts of make
    targets."""
    lines = list(enumerate(text.splitlines(), 1))
    comments = ((number, line) for number, line in lines if line.lstrip().startswith("#"))
    yield from _joined(
        (number, line.index("#"), "" if DIRECTIVE.match(said) else said)
        for number, line in comments
        for said in [line.lstrip(" \t#").strip()]
    )
    for number, line in lines:
        target, mark, said = line.partition(" ## ")
        if mark and not target.lstrip().startswith("#"):
            yield Prose(number, "comment", said)


def markdown_prose(text: str) -> Iterator[Prose]:
    """Return the paragraphs of a page, without headings, tables and code blocks."""
    text = re.sub(r"(?ms)^ *(```|~~~).*?^ *\1[^\n]*$", lambda m: "\n" * m[0].count("\n"), text)
    first, parts = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        said = line.strip()
        starts = not said or said.startswith(("#", "|", "<")) or LIST_ITEM.match(said)
        if starts and parts:
            yield Prose(first, "page", "\n".join(parts))
            parts = []
        if said and not said.startswith(("#", "|", "<")):
            first = first if parts else number
            parts.append(said.removeprefix("> "))


READERS: dict[str, Callable[[str], Iterator[Prose]]] = {
    ".c": c_prose, ".h": c_prose, ".md": markdown_prose, ".py": python_prose, ".pyi": python_prose,
    ".service": hash_prose, ".toml": hash_prose, ".yml": hash_prose, "Makefile": hash_prose,
    "run": hash_prose,
}  # fmt: skip
"""The function that reads a file, by suffix or, for a file without a suffix, by name."""

# ---- sentences ----

BREAK = re.compile(
    r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!vs\.)[\"')*]*\s+(?=[\"'(*`\[]*[A-Z`\d])"
)
HEADLESS = re.compile(
    r"(?:who|whoever|whom|whose|what|whatever|which|whichever|whether|how(?! to\b)|why"
    r"|of(?! course\b)|so (?:many|much|long))\b(?![-`:=(])"
    r"|that (?:a|an|the|it|they|he|she|we|you|no|not|each|every|all|this|these|those|there|which"
    r"|who|what|one|something|nothing|some|any|only|both|its|their)\b"
)
PRONOUN = re.compile(r"(?:it|they|he|she|him|them)\b|(?:Its|Their|His|Her)\b")
CLAUSE = re.compile(
    r"(?:As|Because|Since|While|Although|Though|If|When|Whenever|Where|Wherever|Unless|Until|Till"
    r"|Once|So that|Such as)\b"
)
MAIN_CLAUSE = re.compile(
    r"(?:,|:|;| -| –| then) (?!(?:and|or|nor|but|if|when|while|where|unless|until|because|since|as"
    r"|which|who|whose|that|with|without|for|from|in|on|at|by|of|to|not|even|so|than|too)\b)"
)
LOOSE = re.compile(
    r"(?:For|With|Without|From|To|In|On|By|At|Under|Before|After|Except|Like|And|Or|But|Nor|Even)\b"
)
VERB = re.compile(
    r"\b(?:am|be|been|can|could|did|do|had|have|is|are|may|might|must|shall|should|was|were|will"
    r"|would|see|use|call|set|run|give|take|make|let|keep|went|got|came|saw|took|gave|made|ran"
    r"|[a-z]+(?:s|ed|en))\b"
)


def sentences(prose: Prose) -> Iterator[str]:
    """Return the sentences of a piece of prose, each on one line."""
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.) )|\n(?=\s{8,})", prose.text)
    for paragraph in paragraphs:
        said = " ".join(paragraph.split())
        item = LIST_ITEM.match(said)
        said = said[item.end() :] if item else said
        yield from (part for part in BREAK.split(said) if part)


def fault(sentence: str, is_first: bool) -> str:
    """Return the rule that a sentence breaks, or "".

    The rules look at the first words. A sentence that starts in lower case is checked only at the
    beginning of a comment or message. Elsewhere it is the rest of a sentence that was cut.
    """
    said = sentence.lstrip("\"'(*[ ").removeprefix("What to do: ")  # the remedy of an error
    start = said[:1].lower() + said[1:] if said[:1].isupper() or is_first else ""
    if said.rstrip("\"')* ").endswith("?"):
        return ""
    if HEADLESS.match(start):
        return "headless"
    if is_first and (PRONOUN.match(said) or PRONOUN.match(start)):
        return "pronoun without a noun"
    if CLAUSE.match(said) and not MAIN_CLAUSE.search(said):
        return "no main clause"
    if LOOSE.match(said) and said.endswith(".") and not VERB.search(said):
        return "no verb"
    return ""


def faulty_sentences(path: str, text: str) -> Iterator[Finding]:
    """Find the sentences of a file that break a rule."""
    reader = READERS.get(Path(path).suffix or Path(path).name)
    if path in MADE_OF_DOCSTRINGS:
        return
    for prose in reader(text) if reader else ():
        for position, sentence in enumerate(sentences(prose)):
            is_first = position == 0 and prose.kind != "page"
            if rule := fault(sentence, is_first):
                yield Finding(path, prose.line, rule, sentence)


# ---- findings and exceptions ----


def texts(since_s: float = 0) -> Iterator[tuple[str, str]]:
    """Return (path, text) of each tracked file that people read, if the file has changed since
    `since_s`."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for path in listed.splitlines():
        if any(fnmatch(path, pattern) for pattern in SKIPPED) or not (ROOT / path).is_file():
            continue
        if (ROOT / path).stat().st_mtime >= since_s:
            yield path, (ROOT / path).read_text()


def findings(files: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Return everything in these files that has to be rewritten, including exceptions."""
    words = entries()
    for path, text in files:
        yield from replaced_words(path, text, words)
        yield from faulty_sentences(path, text)


def clean_since_s() -> float:
    """Return the time at which the last run without findings began; 0 if the rules have changed
    since."""
    rules_s = max(path.stat().st_mtime for path in (Path(__file__), WORDS, EXCEPTIONS))
    clean_s = STAMP.stat().st_mtime if STAMP.exists() else 0
    return clean_s if rules_s < clean_s else 0


def compare(found: list[Finding], listed: list[str]) -> tuple[list[Finding], list[str]]:
    """Return the findings that are not exceptions, and the exceptions that have no finding.

    An entry excuses one finding. A sentence that occurs twice in a file needs two entries.
    """
    unused = Counter(line.partition("  #")[0] for line in listed)
    refused = []
    for finding in found:
        if unused[finding.entry] > 0:
            unused[finding.entry] -= 1
        else:
            refused.append(finding)
    stale = []
    for line in listed:
        entry = line.partition("  #")[0]
        if unused[entry] > 0:
            unused[entry] -= 1
            stale.append(line)
    return refused, stale


def with_ceiling(script: str, entries: int) -> str:
    """Return the text of this script with CEILING lowered to a number of entries."""
    return re.sub(r"(?m)^CEILING = (\d+)$",
                  lambda found: f"CEILING = {min(int(found[1]), entries)}", script)  # fmt: skip


def main() -> int:
    """Check the files that have changed since the last run without findings. Return 1 if there are
    findings."""
    began_s, files = time.time(), dict(texts(clean_since_s()))
    listed = EXCEPTIONS.read_text().splitlines()
    concerned = [
        line for line in listed
        if (path := line.partition(" ")[0]) in files or not (ROOT / path).is_file()
    ]  # fmt: skip
    refused, stale = compare(list(findings(files.items())), concerned)
    for path, line, rule, text in refused:
        print(f"{path}:{line}: {rule}: {text[:120]}")
    if "--shrink" in sys.argv:
        for entry in stale:
            listed.remove(entry)
        EXCEPTIONS.write_text("".join(f"{entry}\n" for entry in listed))
        script = Path(__file__)
        script.write_text(with_ceiling(script.read_text(), len(listed)))
        stale = []
    if stale:
        print("these sentences are gone; `python .ci/style.py --shrink` removes them from", end=" ")
        print(EXCEPTIONS.relative_to(ROOT), *stale, sep="\n    ")
    if excess := max(0, len(listed) - CEILING):
        print(f"{EXCEPTIONS.relative_to(ROOT)}: {len(listed)} entries, {CEILING} are permitted;",
              "rewrite the new sentences instead of listing them")  # fmt: skip
    if refused or stale or excess:
        return 1
    STAMP.parent.mkdir(exist_ok=True)
    STAMP.touch()
    os.utime(STAMP, (began_s, began_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
