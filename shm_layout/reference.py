"""Write tables of layout.h into pages: structs with byte offsets, enums, limits.

`python -m purgatoryd.shm_layout.reference docs/protocol.md` writes each table between two comments
of the page. The first is `<!-- struct pg_frame -->`, `<!-- enum pg_op -->` or `<!-- limits -->`,
the second is `<!-- end -->`. The column "meaning" contains the comments of layout.h.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import HEADER, fields, size_of

_MARK = re.compile(r"<!-- (struct|enum|limits) ?(\w*) -->\n.*?<!-- end -->", re.DOTALL)
_FIELD = re.compile(r"\w+\s+(\w+)(?:\[\w+\])?;\s*(?:/\*(.*?)\*/)?", re.DOTALL)
_CONSTANT = re.compile(r"(PG_\w+)(?:\s*=\s*\d+)?,?[ \t]*(?:/\*(.*?)\*/)?", re.DOTALL)
# Constants that give the number of members of an enum, and are not members themselves.
_COUNTS = {
    "PG_MODES", "PG_T_KINDS", "PG_KEY_TYPES", "PG_CONDITIONS", "PG_N_FIELDS", "PG_TF_FIELDS",
    "PG_LATE_POLICIES", "PG_BULK_LOAD_ACTIONS", "PG_CURSOR_ACTIONS", "PG_PLACE_MODES",
    "PG_SCHEDULE_ACTIONS", "PG_GROUP_ACTIONS", "PG_DEAD_ACTIONS", "PG_G_FLAGS", "PG_OVERLAPS",
}  # fmt: skip
_INTERNAL = {"PG_GRANULE", "PG_NIL", "PG_CAPACITY_MAX"}
_LIMIT = re.compile(r"^#define (PG_\w+) .*?(?:/\*(.*?)\*/)?$", re.MULTILINE)


def refresh(page: str) -> str:
    """Return the text of a page with all its tables regenerated."""
    return _MARK.sub(lambda mark: f"<!-- {mark[1]} {mark[2]}".rstrip() + " -->\n"
                     + _TABLES[mark[1]](mark[2]) + "<!-- end -->", page)  # fmt: skip


def struct_table(name: str) -> str:
    """Return a table of offset, bytes, type, name and meaning of each field of struct `name`."""
    meanings = {
        field: "0" if field.startswith("pad") else _one_line(text)
        for field, text in _FIELD.findall(_body("struct", name))
    }
    rows = (
        (str(offset), str(ffi.sizeof(kind)), f"`{kind.cname}`", f"`{field}`", meanings[field])
        for field, offset, kind in fields(name)
    )
    head = ("offset", "bytes", "type", "field", "meaning")
    return _table(head, rows) + f"\n{size_of(name)} bytes.\n"


def enum_table(name: str) -> str:
    """Return a table of number, name and meaning of each constant of enum `name`."""
    found = _CONSTANT.findall(_body("enum", name))
    numbers = ffi.typeof(f"enum {name}").relements
    rows = (
        (str(numbers[label]), f"`{label}`", _one_line(text))
        for label, text in found
        if label not in _COUNTS
    )
    return _table(("number", "name", "meaning"), rows)


def limits_table(_: str) -> str:
    """Return a table of the limits that layout.h defines."""
    text = HEADER.read_text().split("---- limits ")[1].split("/* ----")[0]
    rows = (
        (f"`{label}`", str(getattr(lib, label)), _one_line(meaning))
        for label, meaning in _LIMIT.findall(text)
        if label not in _INTERNAL
    )
    return _table(("name", "value", "meaning"), rows)


_TABLES = {"struct": struct_table, "enum": enum_table, "limits": limits_table}


def _body(kind: str, name: str) -> str:
    found = re.search(rf"^{kind} {name} \{{(.*?)\}};", HEADER.read_text(), re.M | re.S)
    if found is None:
        raise KeyError(f"layout.h has no {kind} {name}")
    return found[1]


def _one_line(comment: str) -> str:
    return " ".join(comment.split()).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(refresh(path.read_text()))
