"""`make lint` finds calls inside the C core that point upward (.ci/layers.py)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from lint_script import lint_script

pytestmark = pytest.mark.tier("check")

ROOT = Path(__file__).resolve().parents[1]


layers = lint_script("layers")
CODE = layers.code_of(ROOT / "shm_layout" / "core")


def core(folder: Path, **files: str) -> dict[str, str]:
    """Return the code of a core with these files; the storey precedes "__" in their names."""
    for name, text in files.items():
        storey, _, stem = name.partition("__")
        (folder / storey).mkdir(exist_ok=True)
        (folder / storey / f"{stem}.c").write_text(text)
    return layers.code_of(folder)  # type: ignore[no-any-return]


def test_the_core_calls_downward_only() -> None:
    calls = layers.calls_of(CODE)
    assert len(calls) > 40
    assert "fault_set" in calls["base/slots.c"]["base/check.c"]
    assert layers.upward(calls) == []
    assert layers.cycle(calls) == []


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
        "base/slots.c calls timers_put() of state/timers.c, which is above it"
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
    (chain,) = layers.cycle(calls)
    assert chain.startswith("these files call each other: state/")
    assert chain.count("->") == 3


def test_a_static_function_of_the_same_name_is_no_call_of_another_file(tmp_path: Path) -> None:
    calls = layers.calls_of(
        core(
            tmp_path,
            base__a="static void c(void)\n{\n}\nvoid a(void)\n{\n    c();\n}\n",
            front__c="void c(void)\n{\n}\n",
        )
    )
    assert calls["base/a.c"] == {}


def test_foreign_bytes_that_a_file_touches_are_counted(tmp_path: Path) -> None:
    code = core(
        tmp_path,
        state__timers="void f(struct pg_arena *a)\n{\n    a->topics[0] = to->topics[1];\n"
        "    a->namespaces(1);  w->ring[0]; /* a->sessions */\n}\n",
        state__names="void g(struct pg_arena *a)\n{\n    a->topics[0];\n}\n",
    )
    assert layers.touched(code) == {"state/timers.c": {"topics": 2}}
    assert layers.foreign(code, {"state/timers.c": {"topics": 2}}) == []
    fewer = layers.foreign(code, {"state/timers.c": {"topics": 3}, "front/x.c": {"ring": 1}})
    assert len(fewer) == 2, "an outdated list is an error"
    (more,) = layers.foreign(code, {"state/timers.c": {"topics": 1}})
    assert "at 2 places, foreign.toml has 1" in more


def test_the_list_of_foreign_bytes_is_up_to_date() -> None:
    assert layers.foreign(CODE, tomllib.loads(layers.FOREIGN.read_text())) == []
