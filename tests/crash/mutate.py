"""Make mutants of the core: drop each store to authoritative state, swap each pair of adjacent
stores.

Each mutant must be caught by the crash harness, which kills a call before each store (stores.c), or
by the C tests. If neither catches a mutant, equivalent.toml must list it with the reason why it has
no visible effect. The harness then checks the reason: it writes noise to the bytes that no code
should read, or asserts the stated condition, and must find no fault. A change that compiles to the
original machine code is no mutant. All mutants are compiled into one core; $MUTANT selects the
active one. With --write the result of each tried file replaces its older result in
benchmarks/results/mutants.json. `mutate.py --help` lists the flags.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import resource
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, origin
from recording import write_result

CORE = ROOT / "shm_layout" / "core"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
KEPT = RESULTS / "mutants.json"
ALIVE, SAME_CODE = "alive", "same code"
SAME_EFFECT, UNFOUNDED = "equivalent", "unfounded"
"""The fates of a mutant whose reason was confirmed, or not confirmed, by the harness."""

FILES = [
    "batch.c", "inbox.c", "watermarks.c", "bulk_loads.c", "names.c", "operations.c",
    "replay_buffer.c", "publish.c", "quotas.c", "rebuild.c", "session.c", "wal_buffer.c",
    "timers.c", "watches.c", "records.c", "in_doubt.c", "compaction.c",
]  # fmt: skip
"""The files of the core that store authoritative state while a daemon runs."""

FIELDS = {
    "ctl", "deadline_ns", "flags", "hash", "topic", "cold", "blob", "payload_len", "value",
    "next_ticket", "replay_tail", "replay_head", "published", "next_incarnation", "wall_offset_ns",
    "commit", "sequence", "previous", "last_position", "meta",
    "namespaces", "name_len", "namespace_row", "incarnation", "shard", "owner_uid", "durability",
    "quota_timers", "quota_bytes", "quota_ops", "park_beyond_ns",
    "target", "watermark", "key_row", "slot", "sibling", "error", "touched_s", "key_len",
    "key_type",
    "first_watch", "notice_blob", "ended_ns", "cause", "version",
    "id", "uid", "last", "current", "applied", "count", "intent", "checksum", "extra_blob",
    "extra_bytes", "charged", "in_use",
    "results", "appended", "tail", "next_lsn", "timestamps",
    "fencing_token", "state", "bulk_load", "bulk_load_first", "number", "used_boot_ns",
    "armed_ns", "armed_boot_ns", "ended_boot_ns", "changed_boot_ns", "begun_boot_ns", "at_ns",
    "parked", "replaced", "replaced_slot", "in_bulk_load", "position", "add_lsn", "size", "now_ns",
    "pid", "opened_boot_ns", "grace_ns", "worker_len", "answers", "busy_first", "busy_last",
    "busy_keys", "account", "created_uid", "hot",
}  # fmt: skip
COPIES = (
    "memcpy(", "memset(", "answer(", "answer_slot(", "*op = ", "*e = ", "*l = ", "*r = ", "*f = ",
    "*body = ", "*frame_timestamps(", "*to = ", "own_of(op)[", "shares_of(op)[",
    "last_watermarks_of(op)[", "missing[", "failed[", "intent[",
)  # fmt: skip
BEGINS = re.compile(r"\s+(?:\*|[a-z_]\w*(?:\(.*?\))?(?:->|\.|\[)).* = [^;]*")
"""The first line of a statement that ends on a later line."""
COMMENT = re.compile(r"\s*/\*.*\*/$")
FUNCTION = re.compile(r"[a-zA-Z][\w \*]*?\b(?P<name>\w+)\(")
BRIEF = 100
"""Maximum number of characters of a statement in a mutant's name."""
STORE = re.compile(r"(?:\+\+|--)?(?P<place>[^=;]+?)(?: [-+|&]?= .*|\+\+|--)?;")
FIELD = re.compile(
    r"[a-z_]\w*(?:\([^=;]*?\))?(?:->|\.|\[)(?:.*\W)?(?P<field>[a-z_]+)(?:\[[\w />-]+\])?"
)
"""A field of a row; the row may be the result of a call."""
ROW = re.compile(r"\*(?:slot_hot|slot_cold|(?!frame)\w+_at)\(.*\)")
"""An assignment of a whole row."""
PRIVATE = re.compile(
    r"answer\(\w+, 0, .*|memcpy\((?:&|detail).*|memset\((?:a->|out,|why,).*"
    r"|a->(?:header->quota_|call\.)?\w+ = .*|(?:p->|n\.|next\.|watch\.|out\[).*"
)
"""Stores whose target is not authoritative state: refusals, locals, fields of a process's handle,
values that each start sets, and derived state."""

COMPILE = ["cc", "-std=c11", "-fvisibility=hidden", "-w", f"-I{CORE.parent}", f"-I{ROOT}/tests/c"]
AS_SHIPPED = "-O3"
QUICKLY = "-O1"
STORES_SEEN = "-fsanitize=thread"
"""Compiler flag that inserts a call before each store; stores.c defines the called functions."""

CHOOSE = """
#include <stdlib.h>
#include <string.h>
int mutant;
__attribute__((constructor)) static void choose(void)
{
    const char *number = getenv("MUTANT");
    mutant = number == NULL ? 0 : atoi(number);
}
void noise(void *at, unsigned long bytes) { memset(at, 0xa5, bytes); }
void need(int holds)
{
    if (!holds)
        abort();
}
"""
DECLARED = "extern int mutant; void noise(void *, unsigned long); void need(int);\n"

PUTS = ("put error", "put replace", "put keep", "put extend")
ROWS = ("row error", "row replace", "row keep", "row extend", "row unpark", "bulk_load")
WATERMARKS = (
    "advance key", "bump", "fail", "advance forgotten", "fail forgotten", "clear", "forget",
    "cancel for key", "sweep",
)  # fmt: skip
WATCHES = ("watch all", "watch any", "watch sum", "watch client")
ENDS = ("cancel", "complete", "expire one", "expire burst", "drain expire", "ack")
OPERATIONS: dict[str, tuple[str, ...]] = {
    "batch.c": (
        *PUTS[:1], "bulk", "cancel for key", "bump", "bulk_load", "settings", "drain",
        "changed batch",
    ),
    "inbox.c": ("inbox", *ENDS),
    "watermarks.c": (*WATERMARKS, "watch any", *ENDS),
    "bulk_loads.c": (
        *ROWS, "bulk load open", "bulk load close", "bulk load forget", "bulk load status",
        "sweep bulk loads",
    ),
    "names.c": ("put error", "publish", "settings", "bulk", "advance key"),
    "operations.c": (*WATCHES, *WATERMARKS, *ENDS, "bulk"),
    "replay_buffer.c": (
        "expire burst", "publish", "published", "drain expire", "put replace", "cascade"),
    "publish.c": ("publish",),
    "quotas.c": (*PUTS, "watch all", "bulk", "settings"),
    "rebuild.c": (*ENDS, "unpark", "wall step"),
    "session.c": ("hello", "bye", "repeated batch", "bulk", "cancel for key", "bulk_load", *ENDS),
    "in_doubt.c": (*PUTS, *ENDS, *ROWS, *WATERMARKS, "settings", "unpark"),
    "records.c": (
        *PUTS, "settings", "publish", "published", "hello", "bye", "unpark", *ENDS, *ROWS,
        "bulk load open", "bulk load close", *WATCHES, *WATERMARKS,
    ),
    "wal_buffer.c": (*PUTS, *ENDS, "settings", "published", "hello"),
    "timers.c": (*PUTS, *ENDS, "unpark", "wall step", "cascade", "row replace"),
    "watches.c": (*WATCHES, *WATERMARKS, *ENDS),
    "compaction.c": ("compaction",),
}  # fmt: skip
"""The operations of the harness that run code of each file."""

TESTS = ("test_arena", "test_wal", "test_limits", "test_bulk_loads", "test_purgatory")
"""The C tests that contain the whole core; tests of a single part do not contain FILES."""

HARNESS = "harness"
FEW_ROUNDS = 3
"""Number of rounds in which the harness catches most mutants."""
SELDOM = "30"
DOUBLE_EVERY = {"rebuild.c": "3", "in_doubt.c": "3"}
"""In one of N states the recovery is killed as well; this is N. Files whose code runs in recoveries
need a small N."""


@dataclass(frozen=True)
class Statement:
    """A statement that stores: lines `first` to `last` of its file, counted from 0, and its
    function."""

    first: int
    last: int
    indent: int
    function: str
    text: str

    @property
    def brief(self) -> str:
        """The beginning of the statement's text."""
        return (
            self.text if len(self.text) <= BRIEF else self.text[:BRIEF].rsplit(" ", 1)[0] + " ..."
        )


@dataclass(frozen=True)
class Reason:
    """The reason why a mutant has no visible effect."""

    text: str
    unseen: tuple[int, ...] = ()
    """Indexes (from 1) of those of the mutant's stores whose targets no code reads before all
    stores of the mutant are done."""
    holds: str = "1"
    """A condition in C that is true whenever execution reaches the mutant."""


@dataclass(frozen=True)
class Mutant:
    """A mutant of a file: one store is dropped, or two adjacent stores are swapped."""

    file: str
    stores: tuple[Statement, ...]

    @property
    def name(self) -> str:
        kind = "drop" if len(self.stores) == 1 else "swap"
        texts = " ".join(store.brief for store in self.stores)
        return f"{self.file} {self.stores[0].function} {kind}: {texts}"

    @property
    def place(self) -> str:
        return f"{self.file}:{self.stores[0].first + 1}"

    def instead(self, store: Statement) -> str:
        """Return the code that replaces one of the mutant's stores."""
        others = [s.text for s in self.stores if s != store]
        return others[0] if others else ";"

    def tried(self, store: Statement, reason: Reason) -> str:
        """Return the code of instead(), preceded by a check of the mutant's reason."""
        if store != self.stores[0]:
            return self.instead(store)
        noises = [noise(self.stores[n - 1].text) for n in reason.unseen]
        return f"need({reason.holds}); {' '.join(noises)} {self.instead(store)}"


def arguments(call: str) -> list[str]:
    """Return the arguments of a call in C. An argument may contain calls."""
    parts, depth = [""], 0
    for c in call[call.index("(") + 1 : call.rindex(")")]:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def noise(store: str) -> str:
    """Return a statement that writes noise to the target of a store."""
    if store.startswith(("memcpy(", "memset(")):
        to, _, size = arguments(store)
        return f"noise({to}, {size});"
    to = "*" + arguments(store)[0] if store.startswith("answer(") else place_of(store)
    return f"noise(&({to}), sizeof({to}));"


def path_of(file: str) -> Path:
    """Return the path of a C file of the core. Each file name occurs once in the core."""
    (path,) = CORE.glob(f"*/{file}")
    return path


def lines_of(file: str) -> list[str]:
    return path_of(file).read_text().splitlines()


def place_of(text: str) -> str:
    """Return the target into which a statement stores; "" = the statement is not a store."""
    if text.startswith(("STORE_RELEASE(", "STORE_RELAXED(")):
        return arguments(text)[0].removeprefix("&")
    store = STORE.fullmatch(text)
    return "" if store is None else store["place"]


def is_store(text: str) -> bool:
    """Return whether a complete statement stores into a field or row of authoritative state, or
    copies bytes there."""
    if PRIVATE.fullmatch(text):
        return False
    if text.startswith(COPIES):
        return text.endswith(";")
    if ROW.fullmatch(place_of(text)):
        return True
    field = FIELD.fullmatch(place_of(text))
    return field is not None and field["field"] in FIELDS and "metrics" not in text


def stores(lines: list[str]) -> Iterator[Statement]:
    function = ""
    for n, line in enumerate(lines):
        last, begins = n, FUNCTION.match(line)
        function = begins["name"] if begins else function
        if BEGINS.fullmatch(line):
            last = next(m for m in range(n, len(lines)) if lines[m].endswith(";"))
        text = COMMENT.sub("", " ".join(part.strip() for part in lines[n : last + 1]))
        if is_store(text):
            yield Statement(n, last, len(line) - len(line.lstrip()), function, text)


def mutants() -> Iterator[Mutant]:
    """Yield all mutants, in the order of files and lines."""
    for file in FILES:
        lines = lines_of(file)
        found = list(stores(lines))
        for n, store in enumerate(found):
            yield Mutant(file, (store,))
            after = found[n + 1] if n + 1 < len(found) else store
            if (after.first, after.indent) == (store.last + 1, store.indent) and not guarded(
                lines, store
            ):
                yield Mutant(file, (store, after))


def guarded(lines: list[str], store: Statement) -> bool:
    """Return whether a store is the only statement of an if or a loop. If so, a swap would move the
    other store into the if or loop."""
    before = next(line for line in reversed(lines[: store.first]) if line)
    return len(before) - len(before.lstrip()) < store.indent and not before.rstrip().endswith("{")


def replaced(file: str, texts: dict[Statement, str]) -> str:
    lines = lines_of(file)
    for store, text in texts.items():
        lines[store.first : store.last + 1] = [text, *[""] * (store.last - store.first)]
    return "\n".join(lines)


def woven(file: str, numbers: dict[Mutant, int]) -> str:
    """Return the file with all its mutants. The number of the active mutant decides what runs at
    each store.

    The negative of a mutant's number also checks the mutant's reason.
    """
    cases: dict[Statement, str] = {}
    for mutant, number in numbers.items():
        reason = reasons().get(mutant.name)
        for store in mutant.stores if mutant.file == file else ():
            case = f"case {number}: {mutant.instead(store)} break; "
            if reason is not None:
                case += f"case -{number}: {mutant.tried(store, reason)} break; "
            cases[store] = cases.get(store, "") + case
    texts = {s: f"switch (mutant) {{ {case}default: {s.text} }}" for s, case in cases.items()}
    return DECLARED + replaced(file, texts)


class Bench:
    """The programs that contain all mutants: the harness and the C tests."""

    def __init__(self, rounds: int) -> None:
        self.folder = ROOT / "build" / "mutants"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = (self.folder / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.headers = newest(*CORE.parent.rglob("*.h"), *(ROOT / "tests").glob("c*/*.h"))
        self.rounds = rounds
        self.numbers = {mutant: number for number, mutant in enumerate(mutants(), 1)}
        self.limits_s: dict[Path, float] = {}
        harness = set((ROOT / "tests/crash").glob("*.c")) - {ROOT / "tests/crash/step.c"}
        self.harness = self.link(HARNESS, sorted(harness), self.core("seen-", STORES_SEEN))
        self.making = threading.Lock()
        self.tests: list[Path] = []

    def core(self, prefix: str, *flags: str) -> list[Path]:
        """Compile the core with all mutants, and return the object files."""
        objects = [self.compile(self.written("choose", CHOOSE), "choose")]
        for file in sorted(CORE.glob("*/*.c")):
            source = file
            if file.name in FILES:
                source = self.written(f"woven-{file.stem}", woven(file.name, self.numbers))
            objects.append(self.compile(source, f"{prefix}{file.stem}", QUICKLY, *flags))
        return objects

    def c_tests(self) -> list[Path]:
        """The C tests. They are compiled when the first mutant needs them, because few mutants
        do."""
        with self.making:
            if not self.tests:
                core = self.core("plain-")
                self.tests = [self.link(t, [ROOT / f"tests/c/{t}.c"], core) for t in TESTS]
        return self.tests

    def written(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.c"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        return path

    def compile(self, source: Path, name: str, *flags: str) -> Path:
        target = self.folder / f"{name}.o"
        if not target.exists() or newest(target) < max(newest(source), self.headers):
            subprocess.run([*COMPILE, *flags, "-c", "-o", target, source], check=True)
        return target

    def link(self, name: str, sources: list[Path], core: list[Path]) -> Path:
        """Link the core as an archive, because some tests include a part of the core themselves."""
        program, archive = self.folder / name, self.folder / f"{name}.a"
        archive.unlink(missing_ok=True)
        subprocess.run(["ar", "-rcs", archive, *core], check=True)
        subprocess.run(
            [*COMPILE, QUICKLY, "-o", program, *sources, archive, "-lpthread"], check=True
        )
        self.limits_s[program] = 5 + 3 * self.whole_s(program)
        return program

    def whole_s(self, program: Path) -> float:
        """Run a program with the unchanged core, and assert that the program does not fail. Return
        the CPU time in seconds."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        rounds = [str(self.rounds), "1", SELDOM] if program.name == HARNESS else []
        assert not self.fails(0, program, *rounds), f"{program.name} fails without a mutant"
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before

    def caught_by(self, mutant: Mutant) -> str:
        """Return the name of the program that catches the mutant. If none does, return SAME_EFFECT
        or UNFOUNDED for a mutant with a reason, SAME_CODE for one that compiles to the original
        machine code, otherwise ALIVE.

        A mutant with a reason is tried only with the harness, for FEW_ROUNDS rounds.
        """
        number = self.numbers[mutant]
        few, more = range(1, 1 + FEW_ROUNDS), range(1 + FEW_ROUNDS, 1 + self.rounds)
        if self.harness_fails(number, mutant.file, few):
            return HARNESS
        if mutant.name in reasons():
            unfounded = self.harness_fails(-number, mutant.file, few)
            return UNFOUNDED if unfounded else SAME_EFFECT
        if self.same_code(mutant):
            return SAME_CODE
        by = next((test.name for test in self.c_tests() if self.fails(number, test)), None)
        again = by is None and self.harness_fails(number, mutant.file, more)
        return by or (HARNESS if again else ALIVE)

    def harness_fails(self, number: int, file: str, seeds: range) -> bool:
        """Return whether the harness fails in the operations that run code of a file."""
        rounds = [str(len(seeds)), str(seeds.start), DOUBLE_EVERY.get(file, SELDOM), "first"]
        return self.fails(number, self.harness, *rounds, *OPERATIONS[file])

    def fails(self, number: int, program: Path, *args: str) -> bool:
        """Return whether a program fails. `number`: the active mutant; 0 = none."""
        limit = [f"--cpu={self.limits_s[program]:.0f}"] if program in self.limits_s else []
        environment = {**os.environ, "MUTANT": str(number)}
        run = subprocess.run(
            ["prlimit", *limit, program, *args],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return run.returncode != 0

    def same_code(self, mutant: Mutant) -> bool:
        number = self.numbers[mutant]
        alone = replaced(mutant.file, {s: mutant.instead(s) for s in mutant.stores})
        changed = self.written(f"alone-{number}", alone)
        return _code(self.compile(changed, f"alone-{number}", AS_SHIPPED)) == self.shipped(
            mutant.file
        )

    def shipped(self, file: str) -> bytes:
        """Return the machine code of the original file, as compiled for the product."""
        with self.making:
            return _code(self.compile(path_of(file), f"whole-{Path(file).stem}", AS_SHIPPED))


def newest(*files: Path) -> float:
    return max(file.stat().st_mtime for file in files)


def _code(target: Path) -> bytes:
    """Return the machine code of an object file, without file names."""
    dump = target.with_suffix(".code")
    subprocess.run(["objcopy", "-O", "binary", "--only-section=.text*", target, dump], check=True)
    return dump.read_bytes()


@cache
def reasons() -> dict[str, Reason]:
    """Return {mutant's name: reason} for the equivalent mutants. Each reason can be checked."""
    groups: list[dict[str, Any]] = tomllib.loads(EQUIVALENT.read_text())["equivalent"]
    found: dict[str, Reason] = {}
    for group in groups:
        assert ("unseen" in group) != ("holds" in group), group["reason"]
        reason = Reason(group["reason"], tuple(group.get("unseen", ())), group.get("holds", "1"))
        found |= dict.fromkeys(group["mutants"], reason)
    return found


def judge(bench: Bench, chosen: list[Mutant], jobs: int) -> dict[str, list[str]]:
    """Try each mutant; return the mutants' names by fate, except changes that compile to the
    original machine code."""
    fates: dict[str, list[str]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(bench.caught_by, chosen)
        for mutant, fate in zip(chosen, found, strict=True):
            print(f"{fate:16} {mutant.place:18} {mutant.name}", flush=True)
            if fate != SAME_CODE:
                fates.setdefault(fate, []).append(mutant.name)
    return fates


def keep(file: str, result: dict[str, Any]) -> None:
    """Store the result of a file, and replace its older result if there is one."""
    retained = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    retained[file] = result
    write_result(KEPT, dict(sorted(retained.items())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only every n-th mutant")
    parser.add_argument(
        "--rounds", type=int, default=12, help="rounds of the harness for each mutant"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of mutants that are tried at the same time"
    )
    parser.add_argument("--file", nargs="+", default=FILES, help="only mutants of these files")
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument("--write", action="store_true", help="store the result in mutants.json")
    args = parser.parse_args()
    chosen = [m for m in mutants() if m.file in args.file][:: args.every]
    if args.list:
        print("\n".join(f"{m.place} {m.name}" for m in chosen))
        return 0
    # determine the commit first, because a written result would mark the checkout as changed
    came_from = origin("python", *sys.argv)
    bench = Bench(args.rounds)
    alive = False
    for file in args.file:
        fates = judge(bench, [m for m in chosen if m.file == file], args.jobs)
        alive |= ALIVE in fates or UNFOUNDED in fates
        if args.write:
            keep(file, {**came_from, "counts": {fate: len(names) for fate, names in fates.items()}})
    return alive


if __name__ == "__main__":
    sys.exit(main())
