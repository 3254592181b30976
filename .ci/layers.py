"""Check that calls inside the C core point downward, and that each file touches only its own rows.

A part of the core is a file `x.c`, its header `x.h`, or both. Inline functions of the header belong
to the part. A part may call functions and include headers of its own storey and of lower storeys,
and no chain of calls or includes leads from a part back to the same part. `arena.h` is above the
storey `base`, so the files of `base` know no arena. A lower storey calls a higher storey only
through a function pointer. A header declares the type of the pointer, or the struct that has the
pointer as a member, and CALLBACKS lists it.

Each region of the arena has one file, or one storey, that owns its rows. No other file touches
these rows. Other members of an arena's handle and of its header may be read by all files; only the
files in WRITERS write them.

Packages in Python import each other only as PACKAGES allows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STOREYS = ("base", "ring", "wal", "state", "recover", "front")
"""The storeys, from the lowest to the highest."""
ABOVE_BASE = 0.5
SHARED_HEADERS = ("layout.h", "api.h")
"""The headers next to the core's folder."""
CALLBACKS = {
    "wheel_due_fn": "base/wheel.h",  # the function in front/loop.c expires due timers
    "wheel_soon_fn": "base/wheel.h",  # the one in front/loop.c fetches timers that are due next
    "pg_storage": "api.h",  # the caller of the core provides the system calls of wal/
    "pg_loop_calls": "api.h",  # the caller of the core may provide those of the loop
    "pg_zmq_calls": "api.h",  # the caller of the core provides the functions of libzmq
}
"""For each type of a function pointer that a lower storey calls, and each struct of such pointers:
the header that declares it."""
INCLUDE = re.compile(r'^#include "core/([\w/]+\.h)"', re.MULTILINE)
FUNCTION_POINTER = re.compile(r"\(\*(\w+)\)\(")
STRUCT = re.compile(r"^struct (\w+) \{.*?^\};", re.MULTILINE | re.DOTALL)
NO_CODE = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\])*"', re.DOTALL)
DEFINITION = re.compile(
    r"^(static )?(?:inline |RARE )*(?:const )?(?:struct |enum )?\w+[ *]+(\w+)\([^;{]*\)\s*\{",
    re.MULTILINE,
)
CALL = re.compile(r"\b(\w+)\(")
OWNERS = {
    "slots.hot": "base/slots.c", "slots.cold": "base/slots.c", "slots.free": "base/slots.c",
    "wal_buffer": "wal/", "ring": "wal/",
    "namespaces": "state/names.c", "topics": "state/names.c", "name_index": "state/names.c",
    "accounts": "state/quotas.c", "replay_buffer": "state/rows.c",
    "groups": "state/groups.c", "group_topics": "state/groups.c", "members": "state/members.c",
    "jobs": "state/jobs.c", "job_slots.hot": "state/jobs.c",
    "timestamps": "state/records.c", "watches": "state/watches.c",
    "watermarks": "state/watermarks.c",
    "purgatory->free_watch": "state/watches.c", "purgatory->free_watches": "state/watches.c",
    "purgatory->free_watermark": "state/watermarks.c",
    "purgatory->free_watermarks": "state/watermarks.c",
    "purgatory->watermark_ttl_ns": "state/watermarks.c", "purgatory->inbox_max": "state/inbox.c",
    "bulk_loads": "state/bulk_loads.c", "bulk_load_blocks": "state/bulk_loads.c",
    "bulk_load_bits": "state/bulk_loads.c", "sessions": "state/session.c",
    "replies": "state/session.c", "answers": "state/session.c",
    "wheel.state": "base/wheel.c", "wheel.buckets": "base/wheel.c",
    "wheel.chunks": "base/wheel.c", "wheel.free_chunks": "base/wheel.c",
    "index.buckets": "base/index.c", "index.id_bits": "base/index.c",
    "blobs.heap": "base/blobs.c", "blobs.map": "base/blobs.c", "blobs.bytes": "base/blobs.c",
    "watermark_index": "state/watermarks.c", "bulk_load_index": "state/bulk_loads.c",
}  # fmt: skip
"""For each member of struct pg_arena: the file or the storey that owns its rows."""
POINTING = (
    r"(?! = region\(| = \((?:struct blob_pool|struct key_index|struct pg_\w+ \*|uint8_t \*)\))"
)
"""Code that sets a pointer when an arena is opened; it touches no row, so TOUCH leaves it out."""
TOUCH = re.compile(
    r"\b(?:a|to|from)->(" + "|".join(map(re.escape, OWNERS)) + r")\b(?!\()" + POINTING
)
OPENING = "recover/arena.c"
"""The file that opens an arena and may set each member of the handle."""
WRITERS = {
    "state.session_rows": {"state/session.c"}, "state.inbox_news": {"state/inbox.c"},
    "state.orphans": {"state/inbox.c"}, "state.news": {"state/inbox.c"},
    "state.news_count": {"state/inbox.c"},
    "state.news_seen": {"state/inbox.c", "state/prefetch.c"},
    "state.holding": {"front/loop.c"}, "state.hold_after_ns": {"front/loop.c"},
    "state.hold_upto_ns": {"front/loop.c"},
    "state.wall_cursor": {"state/timers.c", "recover/rebuild.c"},
    "state.wall_placed_by_ns": {"state/timers.c", "recover/rebuild.c"},
    "state.restricted": {"state/quotas.c"}, "state.topics_stuck_at": {"state/names.c"},
    "state.topics_refused_at": {"state/names.c", "state/quotas.c"},
    "state.topics_refused_uid": {"state/names.c"}, "state.topics_refused_held": {"state/names.c"},
    "state.free_bulk_load_block": {"state/bulk_loads.c"},
    "state.bulk_load_block": {"state/bulk_loads.c"},
    "state.free_member": {"state/members.c"},
    "state.jobs_wait": {
        "state/jobs.c", "state/members.c", "state/delivery.c", "front/consumers.c"
    },
    "state.jobs_unsent": {
        "state/members.c", "state/delivery.c", "state/inbox.c", "front/consumers.c"
    },
    "state.evicted_session": {"state/delivery.c"},
    "state.jobs_again_ns": {"state/delivery.c"},
    "state.wal_buffer_end": {"wal/wal_buffer.c"},
    "state.first_number": {"recover/rebuild.c"}, "state.started_ns": {"recover/rebuild.c"},
    "state.draining": {OPENING}, "state.nameless": {OPENING}, "state.confined": {OPENING},
    "histograms": {"arena.h", "recover/migrate.c"},
    "header->quota_timers": {"state/quotas.c"}, "header->quota_bytes": {"state/quotas.c"},
    "header->quota_ops": {"state/quotas.c"}, "header->uid_share": {"state/quotas.c"},
    "header->own_uid": {"state/quotas.c"}, "header->next_deadline_ns": {"front/loop.c"},
    "header->now_ns": {"front/loop.c", "recover/rebuild.c"},
    "header->wall_offset_ns": {"state/timers.c", "recover/redo.c"},
    "header->replay_head": {"state/replay_buffer.c", "recover/redo.c", "recover/migrate.c"},
    "header->replay_tail": {"state/replay_buffer.c", "recover/migrate.c"},
    "header->published": {"state/replay_buffer.c", "recover/migrate.c"},
    "header->visible": {"state/replay_buffer.c"},
    "header->wake": {OPENING},
    "state.woken": {"state/replay_buffer.c", "front/notices.c"},
    "header->replay_bytes": {"state/replay_buffer.c"},
    "header->next_incarnation": {
        "state/names.c", "state/groups.c", "recover/redo.c", "recover/merge.c"
    },
    "header->state": {OPENING, "recover/rebuild.c"},
    "header->daemon_state": {OPENING, "recover/rebuild.c"},
    "header->epoch": {OPENING}, "header->heartbeat_boot_ns": {OPENING},
    "header->daemon_pid": {OPENING}, "header->placement": {OPENING},
    "header->loop_iterations": {OPENING},
}  # fmt: skip
"""For each member of struct pg_arena or of its header that all files may read: the files that write
it."""
WRITE = re.compile(
    r"(?:(?P<before>\+\+|--|\b(?:STORE_\w+|mem\w+|histogram_add)\(&?)|\b)(?:a|to|from)->"
    r"(?P<member>" + "|".join(map(re.escape, sorted(WRITERS, key=len, reverse=True))) + r")\b"
    r"(?(before)|(?=(?:\[[^\]]*\])?(?:\+\+|--|\s*(?:[-+*/|&^]|<<|>>)?=(?!=))))"
)

PACKAGES = {
    "shm_layout": set[str](),
    "daemon": {"shm_layout"},
    "clients": {"shm_layout"},
    "pipeline": {"clients", "shm_layout"},
    "cli": {"pipeline", "clients", "daemon", "shm_layout"},
}
"""For each package: the packages that it may import."""
IMPORT = re.compile(
    r"^ *(?:from|import) purgatoryd\.(\w+)|^ *from purgatoryd import (\w+)|"
    r"import_module\(f?\"purgatoryd\.(\w+)",
    re.MULTILINE,
)

Calls = dict[str, dict[str, set[str]]]
"""Names of called functions, by calling part and then by called part."""


def code_of(core: Path, pattern: str = "*/*.c") -> dict[str, str]:
    """Return the code of each file without comments and strings, by `storey/file.c`."""
    return {
        path.relative_to(core).as_posix(): NO_CODE.sub(" ", path.read_text())
        for path in sorted(core.glob(pattern))
    }


def headers_of(core: Path) -> dict[str, str]:
    """Return the code of each header that the core includes, by its name in `#include`."""
    return (
        code_of(core, "*/*.h")
        | code_of(core, "*.h")
        | {file: NO_CODE.sub(" ", (core.parent / file).read_text()) for file in SHARED_HEADERS}
    )


def includes_of(core: Path) -> dict[str, list[str]]:
    """Return the headers of the core that each file of the core includes, by `storey/file.c`."""
    return {
        path.relative_to(core).as_posix(): INCLUDE.findall(path.read_text())
        for path in sorted(core.glob("*/*.[ch]")) + sorted(core.glob("arena.h"))
    }


def part(file: str) -> str:
    """Return the part of the core to which a file or a header belongs."""
    return file.rpartition(".")[0]


def bodies(text: str) -> str:
    """Return the bodies of the functions that a file defines, without its declarations."""
    found = []
    for match in DEFINITION.finditer(text):
        line_end = text.find("\n", match.end())
        on_one_line = text[match.end() : line_end].rstrip().endswith("}")
        end = line_end if on_one_line else text.find("\n}", match.end())
        found.append(text[match.end() : end])
    return "\n".join(found)


def calls_of(texts: dict[str, str]) -> Calls:
    """For each part, return the functions of other parts that it calls."""
    home: dict[str, str] = {}
    own: dict[str, set[str]] = {}
    for file, text in texts.items():
        found = DEFINITION.findall(text)
        own[file] = {name for _, name in found}
        shared = file.endswith(".h")
        home |= {name: part(file) for static, name in found if shared or not static}
    calls: Calls = {}
    for file, text in texts.items():
        callees = calls.setdefault(part(file), {})
        code = bodies(text) if file.endswith(".h") else text
        for name in set(CALL.findall(code)) & home.keys() - own[file]:
            if home[name] != part(file):
                callees.setdefault(home[name], set()).add(name)
    return calls


def included_parts(includes: dict[str, list[str]]) -> dict[str, set[str]]:
    """For each part, return the other parts whose headers it includes."""
    parts: dict[str, set[str]] = {}
    for file, headers in includes.items():
        found = {part(header) for header in headers}
        parts.setdefault(part(file), set()).update(found - {part(file)})
    return parts


def storey(file: str) -> float:
    """Return the number of the storey of a file or part, counted from the lowest storey."""
    return ABOVE_BASE if file in ("arena", "arena.h") else STOREYS.index(file.partition("/")[0])


def upward(calls: Calls) -> list[str]:
    """Return a message for each call of a function in a higher storey."""
    return [
        f"{file} calls {name}() of {callee}, which is above it"
        for file, callees in calls.items()
        for callee, names in callees.items()
        if storey(callee) > storey(file)
        for name in sorted(names)
    ]


def included_upward(includes: dict[str, list[str]]) -> list[str]:
    """Return a message for each header of a higher storey that a file includes."""
    return [
        f"{file} includes {header}, which is above it"
        for file, headers in includes.items()
        for header in headers
        if storey(header) > storey(file)
    ]


def pointers_of(text: str) -> set[str]:
    """Return the names of the function pointers that a header declares. For members of a struct,
    return the name of the struct."""
    structs = {found[1] for found in STRUCT.finditer(text) if FUNCTION_POINTER.search(found[0])}
    return structs | set(FUNCTION_POINTER.findall(STRUCT.sub("", text)))


def callbacks(headers: dict[str, str]) -> list[str]:
    """Return a message for each type of a function pointer that is declared but not listed, or
    listed but not declared."""
    found = {name: file for file, text in headers.items() for name in pointers_of(text)}
    return [
        f"{name}: declared by {found.get(name, 'no header')}, "
        f"listed for {CALLBACKS.get(name, 'no header')}"
        for name in sorted(found.keys() | CALLBACKS.keys())
        if found.get(name) != CALLBACKS.get(name)
    ]


def cycle(graph: Mapping[str, Iterable[str]], verb: str) -> list[str]:
    """Return a message about a chain of calls or includes that leads back to its first part, if
    there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        chain = list(reversed(error.args[1]))
        return [f"these parts {verb} each other: " + " -> ".join(chain)]
    return []


def foreign(texts: dict[str, str]) -> list[str]:
    """Return a message for each region whose rows are touched by a file that does not own them."""
    return [
        f"{file} touches rows of {region}, which belong to {OWNERS[region]}"
        for file, text in texts.items()
        for region in sorted(set(TOUCH.findall(text)))
        if not file.replace(".h", ".c").startswith(OWNERS[region])
    ]


def foreign_writes(texts: dict[str, str]) -> list[str]:
    """Return a message for each member of WRITERS that is written by a file not listed for it."""
    return [
        f"{file} writes {member}, which only {' and '.join(sorted(WRITERS[member]))} may write"
        for file, text in texts.items()
        for member in sorted({found["member"] for found in WRITE.finditer(text)})
        if file not in WRITERS[member] | {OPENING}
    ]


def imports_of(root: Path) -> dict[str, set[str]]:
    """For each package, return the other packages that its files import."""
    return {
        package: {
            name
            for path in sorted((root / package).rglob("*.py"))
            for names in IMPORT.findall(path.read_text())
            for name in names
            if name in PACKAGES and name != package
        }
        for package in PACKAGES
    }


def forbidden(imports: dict[str, set[str]]) -> list[str]:
    """Return a message for each import that PACKAGES does not allow."""
    return [
        f"{package}/ imports purgatoryd.{name}, which .ci/layers.py does not allow"
        for package, names in imports.items()
        for name in sorted(names - PACKAGES[package])
    ]


def main() -> None:
    """Print all messages. Exit with code 1 if there are any."""
    core = ROOT / "shm_layout" / "core"
    texts, headers = code_of(core), headers_of(core)
    calls, includes = calls_of(texts | headers), includes_of(core)
    found = upward(calls) or cycle(calls, "call")
    found += included_upward(includes) or cycle(included_parts(includes), "include")
    found += callbacks(headers) + foreign(texts | headers) + foreign_writes(texts | headers)
    found += forbidden(imports_of(ROOT))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
