"""Tables of schemas.py for the pages: `python -m purgatoryd.pipeline.reference docs/tables.md`
writes them again between the marks `<!-- table lifecycles -->` and `<!-- end -->`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from purgatoryd.pipeline.schemas import FLOW, LIFECYCLES, OPEN_TIMERS, TOPICS, WORKERS, Column

TABLES = {table.name: table for table in (LIFECYCLES, OPEN_TIMERS, TOPICS, WORKERS, FLOW)}
_MARK = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def refresh(page: str) -> str:
    """The text of a page with all its tables regenerated."""
    return _MARK.sub(
        lambda mark: f"<!-- table {mark[1]} -->\n{table_text(mark[1])}<!-- end -->", page
    )


def table_text(name: str) -> str:
    """Name, type and meaning of each column."""
    head = "| column | type | meaning |\n| --- | --- | --- |\n"
    return head + "".join(_line(column) for column in TABLES[name].columns)


def _line(column: Column) -> str:
    kind = "string" if column.type == "word" else column.type
    return f"| `{column.name}` | {kind} | {column.about} |\n"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(refresh(path.read_text()))
