"""Check that calls inside the C core point downward, and that files touch only their own rows.

A file of shm_layout/core may call functions of its own storey and of those below it, and no chain
of calls leads from a file back to it. Function pointers are not followed: they are how a lower part
calls an upper one.

Each region of the arena has a file that owns its rows. `foreign.toml` counts the places in other
files that touch them. A count that differs from the listed one is an error, so counts only fall.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STOREYS = ("base", "wal", "state", "recover", "front")
"""Storeys of the core, from the lowest to the highest one."""
NO_CODE = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\])*"', re.DOTALL)
DEFINITION = re.compile(
    r"^(static )?(?:inline |RARE )*(?:const )?(?:struct |enum )?\w+[ *]+(\w+)\([^;{]*\)\s*\{",
    re.MULTILINE,
)
CALL = re.compile(r"\b(\w+)\(")
OWNERS = {
    "slots.hot": "base/slots.c", "slots.cold": "base/slots.c", "slots.free": "base/slots.c",
    "wal_buffer": "wal/wal_buffer.c", "ring": "wal/wal_buffer.c",
    "namespaces": "state/names.c", "topics": "state/names.c", "name_index": "state/names.c",
    "accounts": "state/quotas.c", "replay_buffer": "state/replay_buffer.c",
    "timestamps": "state/records.c", "watches": "state/watches.c",
    "watermarks": "state/watermarks.c", "purgatory": "state/watches.c",
    "bulk_loads": "state/bulk_loads.c", "bulk_load_blocks": "state/bulk_loads.c",
    "bulk_load_bits": "state/bulk_loads.c", "sessions": "state/session.c",
    "replies": "state/session.c", "answers": "state/session.c",
}  # fmt: skip
"""File that owns the rows, by member of struct pg_arena."""
TOUCH = re.compile(r"\b(?:a|to|from)->(" + "|".join(map(re.escape, OWNERS)) + r")\b(?!\()")
FOREIGN = Path(__file__).with_name("foreign.toml")

Calls = dict[str, dict[str, set[str]]]
"""Called functions, by calling file and called file."""


def code_of(core: Path) -> dict[str, str]:
    """Return the code of each file without comments and strings, by `storey/file.c`."""
    return {
        f"{path.parent.name}/{path.name}": NO_CODE.sub(" ", path.read_text())
        for path in sorted(core.glob("*/*.c"))
    }


def calls_of(texts: dict[str, str]) -> Calls:
    """Return which functions of which other files each file calls."""
    home: dict[str, str] = {}
    own: dict[str, set[str]] = {}
    for file, text in texts.items():
        found = DEFINITION.findall(text)
        own[file] = {name for _, name in found}
        home |= {name: file for static, name in found if not static}
    calls: Calls = {}
    for file, text in texts.items():
        calls[file] = {}
        for name in set(CALL.findall(text)) & home.keys() - own[file]:
            calls[file].setdefault(home[name], set()).add(name)
    return calls


def storey(file: str) -> int:
    """Return the number of a file's storey, from below."""
    return STOREYS.index(file.partition("/")[0])


def upward(calls: Calls) -> list[str]:
    """Describe each call of a function in a higher storey."""
    return [
        f"{file} calls {name}() of {callee}, which is above it"
        for file, callees in calls.items()
        for callee, names in callees.items()
        if storey(callee) > storey(file)
        for name in sorted(names)
    ]


def cycle(calls: Calls) -> list[str]:
    """Describe a chain of calls that leads back to where it began, if there is one."""
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        chain = list(reversed(error.args[1]))
        return ["these files call each other: " + " -> ".join(chain)]
    return []


def touched(texts: dict[str, str]) -> dict[str, dict[str, int]]:
    """Count the places of each file that touch rows of other files, by region."""
    found: dict[str, dict[str, int]] = {}
    for file, text in texts.items():
        regions = Counter(region for region in TOUCH.findall(text) if OWNERS[region] != file)
        if regions:
            found[file] = regions
    return found


def foreign(texts: dict[str, str], listed: dict[str, dict[str, int]]) -> list[str]:
    """Describe each count that differs from the listed one."""
    counts = touched(texts)
    return [
        f"{file} touches rows of {region} at {counted} places, foreign.toml has {known}"
        for file in sorted(counts.keys() | listed.keys())
        for region in sorted(OWNERS)
        if (counted := counts.get(file, {}).get(region, 0))
        != (known := listed.get(file, {}).get(region, 0))
    ]


def main() -> None:
    """Print all violations. Exit with 1 if there is any."""
    texts = code_of(ROOT / "shm_layout" / "core")
    calls = calls_of(texts)
    found = upward(calls) or cycle(calls)
    found += foreign(texts, tomllib.loads(FOREIGN.read_text()))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
