"""`make lint` finds calls of the C core that point upward, and imports of packages that are not
allowed (.ci/layers.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lint_script import lint_script

pytestmark = pytest.mark.tier("check")

ROOT = Path(__file__).resolve().parents[1]


layers = lint_script("layers")
CORE = ROOT / "shm_layout" / "core"
CODE = layers.code_of(CORE)
HEADERS = layers.headers_of(CORE)
BELOW_LISTENERS = {"allowance", "config", "log"}
"""Modules of the daemon that daemon/listeners imports."""


def core(folder: Path, **files: str) -> dict[str, str]:
    """Write a core with these files; return its code. The argument STOREY__NAME is the text of
    STOREY/NAME.c, and STOREY__NAME_h is the text of STOREY/NAME.h."""
    for name, text in files.items():
        storey, _, stem = name.partition("__")
        (folder / storey).mkdir(exist_ok=True)
        file = f"{stem[:-2]}.h" if stem.endswith("_h") else f"{stem}.c"
        (folder / storey / file).write_text(text)
    return layers.code_of(folder, "*/*.[ch]")  # type: ignore[no-any-return]


def test_the_core_calls_downward_only() -> None:
    calls = layers.calls_of(CODE | HEADERS)
    assert len(calls) > 40
    assert "fault_set" in calls["base/slots"]["base/check"]
    assert "blob_at" in calls["arena"]["base/blobs"]
    assert layers.upward(calls) == []
    assert layers.cycle(calls, "call") == []


def test_a_call_of_a_higher_storey_is_found(tmp_path: Path) -> None:
    calls = layers.calls_of(
        core(
            tmp_path,
            base__slots='void slots_take(void)\n{\n    /* timers_find() */\n    text("put()");\n'
            "    timers_put(1);\n}\n",
            state__timers="uint32_t timers_put(int n)\n{\n    return n;\n}\n"
            "struct key *timers_find(void)\n{\n    return own();\n}\n"
            "static struct key *own(void)\n{\n    return 0;\n}\n",
        )
    )
    assert layers.upward(calls) == [
        "base/slots calls timers_put() of state/timers, which is above it"
    ]


def test_files_that_call_each_other_are_found(tmp_path: Path) -> None:
    calls = layers.calls_of(
        core(
            tmp_path,
            state__a="void a(void)\n{\n    b();\n}\n",
            state__b="void b(void)\n{\n    c();\n}\n",
            state__c="void c(void)\n{\n    a();\n}\n",
        )
    )
    assert layers.upward(calls) == []
    (chain,) = layers.cycle(calls, "call")
    assert chain.startswith("these parts call each other: state/")
    assert chain.count("->") == 3


def test_calls_from_inline_functions_and_of_them_are_found(tmp_path: Path) -> None:
    code = core(
        tmp_path,
        state__a="int a(void)\n{\n    return small(1);\n}\n",
        state__a_h="int a(void);\nint b(void);\nstatic inline int one(void) { return 1; }\n",
        state__b="int b(void)\n{\n    return 1;\n}\n",
        state__b_h="static inline int small(int n)\n{\n    return n + one();\n}\nint a(void);\n",
        wal__c_h="static inline int c(void) { return a(); }\nint b(void);\n",
    )
    calls = layers.calls_of(code)
    assert calls == {
        "state/a": {"state/b": {"small"}},
        "state/b": {"state/a": {"one"}},
        "wal/c": {"state/a": {"a"}},
    }
    assert layers.cycle(calls, "call")[0].count("->") == 2
    assert layers.upward(calls) == ["wal/c calls a() of state/a, which is above it"]


def test_a_static_function_of_the_same_name_is_no_call_of_another_file(tmp_path: Path) -> None:
    calls = layers.calls_of(
        core(
            tmp_path,
            base__a="static void c(void)\n{\n}\nvoid a(void)\n{\n    c();\n}\n",
            front__c="void c(void)\n{\n}\n",
        )
    )
    assert calls["base/a"] == {}


def test_the_core_includes_downward_only() -> None:
    includes = layers.includes_of(CORE)
    assert "base/check.h" in includes["base/slots.c"]
    assert layers.included_upward(includes) == []
    found = layers.included_upward(
        {"base/slots.h": ["base/check.h", "arena.h"], "wal/frames.c": ["arena.h", "state/keys.h"]}
    )
    assert found == [
        "base/slots.h includes arena.h, which is above it",
        "wal/frames.c includes state/keys.h, which is above it",
    ]


def test_parts_that_include_each_other_are_found() -> None:
    parts = layers.included_parts(layers.includes_of(CORE))
    assert parts["state/timers"] > {"arena", "state/rows"}
    assert layers.cycle(parts, "include") == []
    parts = layers.included_parts({"wal/a.h": ["wal/b.h"], "wal/b.c": ["wal/b.h", "wal/a.h"]})
    assert parts == {"wal/a": {"wal/b"}, "wal/b": {"wal/a"}}
    (chain,) = layers.cycle(parts, "include")
    assert chain.startswith("these parts include each other: wal/")


def test_function_pointers_are_listed() -> None:
    assert layers.callbacks(HEADERS) == []
    more = {**HEADERS, "wal/frames.h": "typedef int (*frame_fn)(void);\n"}
    assert layers.callbacks(more) == ["frame_fn: declared by wal/frames.h, listed for no header"]
    assert len(layers.callbacks({})) == len(layers.CALLBACKS)


def test_function_pointers_of_shared_headers_are_found() -> None:
    assert HEADERS.keys() > {"api.h", "layout.h", "arena.h", "wal/frames.h"}
    pointers = HEADERS["api.h"] + "struct b {\n    int (*c)(void);\n};\nint d(int (*e)(void));\n"
    more = HEADERS | {"api.h": pointers, "arena.h": "struct f {\n    int (*g)(void);\n};\n"}
    assert layers.callbacks(more) == [
        "b: declared by api.h, listed for no header",
        "e: declared by api.h, listed for no header",
        "f: declared by arena.h, listed for no header",
    ]
    more = HEADERS | {"api.h": HEADERS["api.h"].replace("struct pg_storage {", "struct other {")}
    assert layers.callbacks(more)[-1] == "pg_storage: declared by no header, listed for api.h"


def test_a_file_that_touches_rows_of_another_one_is_found(tmp_path: Path) -> None:
    code = core(
        tmp_path,
        state__timers="void f(struct pg_arena *a)\n{\n    a->topics[0] = to->topics[1];\n"
        "    a->namespaces(1);  w->ring[0]; /* a->sessions */\n}\n",
        state__names="void g(struct pg_arena *a)\n{\n    a->topics[0];\n}\n",
        wal__group_commit="void h(struct pg_arena *a)\n{\n    a->ring[0];\n}\n",
        recover__arena="void i(struct pg_arena *a)\n{\n    a->topics = region(a, 1);\n}\n",
    )
    assert layers.foreign(code) == [
        "state/timers.c touches rows of topics, which belong to state/names.c"
    ]


def test_each_file_of_the_core_touches_rows_of_its_own() -> None:
    assert layers.foreign(CODE | HEADERS) == []
    assert "wal_buffer" in layers.TOUCH.findall(CODE["wal/wal_buffer.c"])
    assert "name_index" in layers.TOUCH.findall(CODE["state/names.c"])
    assert "watermark_index" in layers.TOUCH.findall(HEADERS["state/watermarks.h"])


def test_a_file_that_touches_the_inside_of_a_handle_is_found(tmp_path: Path) -> None:
    code = core(
        tmp_path,
        state__prefetch="void f(struct pg_arena *a)\n{\n    fetch(&a->wheel.chunks[1]);\n"
        "    wheel_place(&a->wheel, 1);\n    index_first(&a->index, 1);\n"
        "    a->blobs.granules;  g->to->blobs.heap->used;\n}\n",
    )
    assert layers.foreign(code) == [
        "state/prefetch.c touches rows of blobs.heap, which belong to base/blobs.c",
        "state/prefetch.c touches rows of wheel.chunks, which belong to base/wheel.c",
    ]


@pytest.mark.parametrize(
    "write",
    [
        "a->state.orphans = 1;", "r->a->state.orphans |= 1;", "a->state.orphans++;",
        "--a->state.orphans;", "to->state.orphans = a->state.now_ns = 1;",
        "STORE_RELEASE(&a->state.orphans, 1);", "a->state.orphans[n] = 1;",
    ],
)  # fmt: skip
def test_a_write_by_a_file_that_may_only_read_is_found(tmp_path: Path, write: str) -> None:
    text = f"void f(struct pg_arena *a)\n{{\n    {write}\n}}\n"
    code = core(tmp_path, state__timers=text, state__inbox=text, recover__arena=text)
    assert layers.foreign_writes(code) == [
        "state/timers.c writes state.orphans, which only state/inbox.c may write"
    ]
    reads = (
        "if (a->state.orphans == 1 || b <= a->state.orphans)\n"
        "    c = a->state.orphans + a->state.orphans_max++;\n"
    )
    assert layers.foreign_writes({"state/timers.c": reads}) == []


def test_each_file_of_the_core_writes_members_of_its_own() -> None:
    assert layers.foreign_writes(CODE | HEADERS) == []
    found = {
        member: {
            file
            for file, text in (CODE | HEADERS).items()
            if member in {write["member"] for write in layers.WRITE.finditer(text)}
        }
        for member in layers.WRITERS
    }
    for member, files in layers.WRITERS.items():
        assert found[member] | {layers.OPENING} == files | {layers.OPENING}, member


def test_each_assertion_of_the_core_is_broken_by_a_test() -> None:
    text = "".join(path.read_text() for path in CORE.rglob("*.[ch]") if path.name != "check.h")
    asserted = re.findall(r'PG_ASSERT(?:_IN_TESTS)?\([^;]*?(?:"([^"]+)"|part),\s+"([^"]+)"\)', text)
    assert len(asserted) > 12
    assert len(asserted) == len(re.findall(r"PG_ASSERT(?:_IN_TESTS)?\(", text))
    breaches = (ROOT / "tests" / "c" / "test_assert.c").read_text()
    for part, invariant in asserted:
        assert f'{part or "slots"}: {invariant}"' in breaches


# ---- packages ------------------------------------------------------------------------------------


def test_packages_import_each_other_only_as_allowed() -> None:
    found = layers.imports_of(ROOT)
    assert layers.forbidden(found) == []
    assert found == layers.PACKAGES


def test_an_import_that_is_not_allowed_is_found(tmp_path: Path) -> None:
    for package in layers.PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "shm_layout" / "loop.py").write_text("from purgatoryd.daemon.log import log\n")
    (tmp_path / "daemon" / "loop.py").write_text("    from purgatoryd import clients\n")
    found = layers.forbidden(layers.imports_of(tmp_path))
    assert [text.partition(",")[0] for text in found] == [
        "shm_layout/ imports purgatoryd.daemon",
        "daemon/ imports purgatoryd.clients",
    ]


def test_the_sockets_import_nothing_above_them() -> None:
    folder = ROOT / "daemon" / "listeners"
    modules = {path.stem for path in (ROOT / "daemon").glob("*.py")}
    imported = re.compile(r"purgatoryd\.daemon(?:\.| import )(\w+)")
    found = {name for path in folder.glob("*.py") for name in imported.findall(path.read_text())}
    assert modules > BELOW_LISTENERS | {"reaper", "deployment", "main"}
    assert "admission_control" in {path.stem for path in folder.glob("*.py")}
    assert found - {"listeners"} == BELOW_LISTENERS
