"""`make lint` compares the table of published words with the code (.ci/orders.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from lint_script import lint_script

pytestmark = pytest.mark.tier("check")

orders = lint_script("orders")

LAYOUT = "struct pg_row {\n    uint64_t word;\n    uint32_t other;\n};\n"
WRITER = (
    "void f(struct pg_arena *a, struct pg_row *r)\n{\n    /* LOAD_ACQUIRE(&r->other) */\n"
    "    STORE_RELEASE(&r->word, 1);\n    STORE_RELEASE(&row_at(a, r->other)->word, 2);\n}\n"
)
READER = "struct pg_row *row_at(struct pg_arena *a, int n)\n{\n    return 0;\n}\n"


def core(folder: Path, writer: str = WRITER, **readers: str) -> Path:
    """Write a core to check: one published word, its writer, and the files that only readers
    run."""
    for name in orders.READERS:
        path = folder / "core" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(READER + readers.get(path.stem, ""))
    (folder / "core/state/writer.c").write_text(writer)
    (folder / "layout.h").write_text(LAYOUT)
    (folder / "api.h").write_text("")
    return folder


def test_the_table_is_that_of_the_code() -> None:
    rows = orders.table(orders.PAGE.read_text())
    assert len(rows) > 50
    assert rows["pg_hot.ctl"] == ({"release"}, {"acquire"})
    assert orders.differences(rows, orders.accesses(orders.LAYOUT)) == []
    assert orders.plain_loads(orders.LAYOUT, set(rows)) == []


def test_each_place_is_named_by_struct_and_member(tmp_path: Path) -> None:
    found = orders.accesses(core(tmp_path))
    assert [(a.word, a.store, a.order, a.where) for a in found] == [
        ("pg_row.word", True, "release", "state/writer.c:4"),
        ("pg_row.word", True, "release", "state/writer.c:5"),
    ]


def test_a_word_without_a_row_and_another_order_are_found(tmp_path: Path) -> None:
    found = orders.accesses(core(tmp_path))
    assert orders.differences({"pg_row.word": ({"release"}, set())}, found) == []
    (order,) = orders.differences({"pg_row.word": ({"relaxed"}, set())}, found)
    assert "the table has stores ['relaxed'], the code ['release']" in order
    first, _ = orders.differences({}, found)
    assert first.endswith("pg_row.word is not in the table of published words")
    (gone,) = orders.differences(
        {"pg_row.word": ({"release"}, set()), "pg_row.other": (set(), {"acquire"})}, found
    )
    assert gone.startswith("pg_row.other")


def test_an_exchange_stores_and_loads(tmp_path: Path) -> None:
    writer = "void f(struct pg_row *r)\n{\n    atomic_exchange(&r->word, 1);\n}\n"
    found = orders.accesses(core(tmp_path, writer))
    assert {(a.store, a.order) for a in found} == {(True, "seq_cst"), (False, "seq_cst")}


@pytest.mark.parametrize(
    ("code", "plain"),
    [
        ("LOAD_ACQUIRE(&r->word)", False),
        ("r->other", False),
        ("r->word", True),
        ("row_at(a, r->other)->word", True),
    ],
)
def test_a_plain_load_by_a_reader_is_found(tmp_path: Path, code: str, plain: bool) -> None:
    reader = f"int g(struct pg_arena *a, struct pg_row *r)\n{{\n    return {code};\n}}\n"
    found = orders.plain_loads(core(tmp_path, scan=reader), {"pg_row.word"})
    assert found == (["front/scan.c:7: a reader loads pg_row.word without an order"] * plain)
