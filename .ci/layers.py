"""Check that calls inside the C core point downward: `python .ci/layers.py [CORE]`.

A file of shm_layout/core may call functions of its own storey and of those below it, and no chain
of calls leads from a file back to it. Function pointers are not followed: they are how a lower part
calls an upper one.
"""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STOREYS = ("base", "wal", "state", "recover", "front")
"""From the lowest to the highest one."""
NO_CODE = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\])*"', re.DOTALL)
DEFINITION = re.compile(
    r"^(static )?(?:inline |RARE )*(?:const )?(?:struct |enum )?\w+[ *]+(\w+)\([^;{]*\)\s*\{",
    re.MULTILINE,
)
CALL = re.compile(r"\b(\w+)\(")

Calls = dict[str, dict[str, set[str]]]
"""By file: the files that it calls, and the functions."""


def calls_of(core: Path) -> Calls:
    """Return which functions of which other files each file calls, as `storey/file.c`."""
    texts = {
        f"{path.parent.name}/{path.name}": NO_CODE.sub(" ", path.read_text())
        for path in sorted(core.glob("*/*.c"))
    }
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


def main() -> None:
    """Print what points upward. Exit with 1 if there is anything."""
    core = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "shm_layout" / "core"
    calls = calls_of(core)
    found = upward(calls) or cycle(calls)
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
