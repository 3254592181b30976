"""Mutants of the core: each store to truth dropped, each adjacent pair of stores swapped.

Every mutant has to be caught by the crash harness, which kills it before each store (stores.c),
or by the C tests; or it is listed in equivalent.toml with the reason why nobody could tell it. One
whose machine code is that of the original is no mutant. All mutants are compiled into one core;
$MUTANT says which one is alive. With --write the result of each file that was tried takes the place
of its older one in benchmarks/results/mutants.json. `mutate.py --help` has the flags.
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
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, origin

CORE = ROOT / "shm_layout"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
KEPT = RESULTS / "mutants.json"
ALIVE, SAME_CODE = "alive", "same code"

FILES = [
    "batch.c", "inbox.c", "levels.c", "loads.c", "names.c", "operations.c", "outbox.c",
    "publish.c", "quotas.c", "session.c", "stage.c", "timers.c",
]  # fmt: skip
"""Whatever stores truth while a daemon runs."""

FIELDS = {
    "ctl", "deadline_ns", "flags", "hash", "topic", "cold", "blob", "payload_len", "value",
    "next_ticket", "outbox_tail", "outbox_head", "published", "next_incarnation", "wall_offset_ns",
    "commit", "sequence", "previous", "last_position", "meta",
    "namespaces", "name_len", "namespace_row", "incarnation", "shard", "owner_uid", "durability",
    "quota_timers", "quota_bytes", "quota_ops", "park_beyond_ns",
    "target", "level", "slot", "sibling", "error", "touched_s", "key_len", "key_type",
    "first_watch", "notice_blob", "ended_ns", "cause", "version",
    "id", "uid", "last", "current", "applied", "count", "intent", "checksum", "extra_blob",
    "extra_bytes", "charged", "in_use",
    "results", "staged", "tail", "next_lsn", "lives",
    "fence", "state", "load", "load_first", "number", "used_boot_ns",
}  # fmt: skip
COPIES = (
    "memcpy(", "memset(", "answer(", "answer_slot(", "*op = ", "*e = ", "*l = ", "*r = ", "*f = ",
    "*body = ", "*frame_life(", "*to = ",
)  # fmt: skip
BEGINS = re.compile(r"\s+(?:\*|[a-z_]\w*(?:->|\.|\[)).* = [^;]*")
"""A statement that ends on a later line."""
FUNCTION = re.compile(r"[a-zA-Z][\w \*]*?\b(?P<name>\w+)\(")
BRIEF = 100
"""Characters of a statement in a mutant's name, at most."""
TARGET = r"[a-z_]\w*(?:->|\.|\[)(?:[^=;]*?\W)?(?P<field>[a-z_]+)(?:\[\w+\])?"
STORES = (
    re.compile(rf"STORE_RELEASE\(&{TARGET}, .*\);"),
    re.compile(rf"(?:\+\+|--)?{TARGET}(?: [-+|&]?= .*|\+\+|--)?;"),
)
PRIVATE = re.compile(
    r"answer\(\w+, 0, .*|memcpy\((?:&|detail).*|memset\((?:a->|out,).*"
    r"|a->(?:header->quota_)?\w+ = .*|(?:p->|n\.|next\.|out\[).*"
)
"""Refusals, locals, the fields of a process's handle, what each start sets, and what is derived."""

COMPILE = ["cc", "-std=c11", "-fvisibility=hidden", "-w", f"-I{CORE}", f"-I{ROOT}/tests/c"]
AS_SHIPPED = "-O3"
QUICKLY = "-O1"
STORES_SEEN = "-fsanitize=thread"
"""For stores.c, which has what the compiler calls then."""

CHOOSE = """
#include <stdlib.h>
int mutant;
__attribute__((constructor)) static void choose(void)
{
    const char *number = getenv("MUTANT");
    mutant = number == NULL ? 0 : atoi(number);
}
"""

PUTS = ("put error", "put replace", "put keep", "put extend")
ROWS = ("row error", "row replace", "row keep", "row extend", "row unpark", "load")
LEVELS = (
    "advance key", "bump", "fail", "advance forgotten", "fail forgotten", "clear", "forget",
    "cancel for key", "sweep",
)  # fmt: skip
WATCHES = ("watch all", "watch any", "watch sum", "watch client")
ENDS = ("cancel", "complete", "expire one", "expire burst", "drain expire", "ack")
OPERATIONS: dict[str, tuple[str, ...]] = {
    "batch.c": (*PUTS[:1], "bulk", "cancel for key", "bump", "load", "settings", "drain"),
    "inbox.c": ("inbox", *ENDS),
    "levels.c": (*LEVELS, "watch any", *ENDS),
    "loads.c": (*ROWS, "load open", "load close", "load forget", "load status", "sweep loads"),
    "names.c": ("put error", "publish", "settings", "bulk", "advance key"),
    "operations.c": (*WATCHES, *LEVELS, *ENDS, "bulk"),
    "outbox.c": ("expire burst", "publish", "published", "drain expire", "put replace", "cascade"),
    "publish.c": ("publish",),
    "quotas.c": (*PUTS, "watch all", "bulk", "settings"),
    "session.c": ("hello", "bye", "repeated batch", "bulk", "cancel for key", "load", *ENDS),
    "stage.c": (
        *PUTS, "settings", "publish", "published", "hello", "bye", "unpark", *ENDS, *ROWS,
        "load open", "load close", *WATCHES, *LEVELS,
    ),
    "timers.c": (*PUTS, *ENDS, "unpark", "wall step", "cascade", "row replace"),
}  # fmt: skip
"""Of the harness, that come to what a file does."""

TESTS = ("test_arena", "test_journal", "test_limits", "test_loads", "test_purgatory")
"""Those of a part alone have none of these files."""

FEW_ROUNDS = 3
"""Of the harness; they catch most."""


@dataclass(frozen=True)
class Statement:
    """One that stores, in lines first..last of its file, from 0, in a function."""

    first: int
    last: int
    indent: int
    function: str
    text: str

    @property
    def brief(self) -> str:
        """As it begins."""
        return (
            self.text if len(self.text) <= BRIEF else self.text[:BRIEF].rsplit(" ", 1)[0] + " ..."
        )


@dataclass(frozen=True)
class Mutant:
    """Without a store, or with two that stand one behind the other swapped."""

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
        """What this mutant does in the place of one of its stores."""
        others = [s.text for s in self.stores if s != store]
        return others[0] if others else ";"


def lines_of(file: str) -> list[str]:
    return (CORE / file).read_text().splitlines()


def is_store(text: str) -> bool:
    """A whole statement that stores into a field of the truth, or copies."""
    if PRIVATE.fullmatch(text):
        return False
    if text.startswith(COPIES):
        return text.endswith(";")
    found = [store.fullmatch(text) for store in STORES if "metrics" not in text]
    return any(f is not None and f["field"] in FIELDS for f in found)


def stores(lines: list[str]) -> Iterator[Statement]:
    function = ""
    for n, line in enumerate(lines):
        last, begins = n, FUNCTION.match(line)
        function = begins["name"] if begins else function
        if BEGINS.fullmatch(line):
            last = next(m for m in range(n, len(lines)) if lines[m].endswith(";"))
        text = " ".join(part.strip() for part in lines[n : last + 1])
        if is_store(text):
            yield Statement(n, last, len(line) - len(line.lstrip()), function, text)


def mutants() -> Iterator[Mutant]:
    """All of them, in the order of files and lines."""
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
    """The only statement of an if or a loop: swapped, it would guard the other one."""
    before = lines[store.first - 1]
    return len(before) - len(before.lstrip()) < store.indent and not before.rstrip().endswith("{")


def replaced(file: str, texts: dict[Statement, str]) -> str:
    lines = lines_of(file)
    for store, text in texts.items():
        lines[store.first : store.last + 1] = [text, *[""] * (store.last - store.first)]
    return "\n".join(lines)


def woven(file: str, numbers: dict[Mutant, int]) -> str:
    """The file with all its mutants in it: the one that is alive says what is done at a store."""
    cases: dict[Statement, str] = {}
    for mutant, number in numbers.items():
        for store in mutant.stores if mutant.file == file else ():
            case = f"case {number}: {mutant.instead(store)} break; "
            cases[store] = cases.get(store, "") + case
    texts = {s: f"switch (mutant) {{ {case}default: {s.text} }}" for s, case in cases.items()}
    return "extern int mutant;\n" + replaced(file, texts)


class Bench:
    """Programs with all mutants in them: the harness, and the C tests."""

    def __init__(self, rounds: int) -> None:
        self.folder = ROOT / "build" / "mutants"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = (self.folder / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.headers = newest(*CORE.glob("*.h"), *(ROOT / "tests").glob("c*/*.h"))
        self.rounds = rounds
        self.numbers = {mutant: number for number, mutant in enumerate(mutants(), 1)}
        choose = self.compile(self.written("choose", CHOOSE), "choose")
        plain, seen = [choose], [choose]
        for file in sorted(CORE.glob("*.c")):
            source = file
            if file.name in FILES:
                source = self.written(f"woven-{file.stem}", woven(file.name, self.numbers))
            plain.append(self.compile(source, file.stem, QUICKLY))
            seen.append(self.compile(source, f"seen-{file.stem}", QUICKLY, STORES_SEEN))
        harness = set((ROOT / "tests/crash").glob("*.c")) - {ROOT / "tests/crash/step.c"}
        self.harness = self.link("harness", sorted(harness), seen)
        self.tests = [self.link(test, [ROOT / f"tests/c/{test}.c"], plain) for test in TESTS]
        self.cpu_s = 0.0
        self.cpu_s = 5 + 2 * self._whole()

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
        """From an archive, because some tests bring a part of the core themselves."""
        program, archive = self.folder / name, self.folder / f"{name}.a"
        archive.unlink(missing_ok=True)
        subprocess.run(["ar", "-rcs", archive, *core], check=True)
        subprocess.run(
            [*COMPILE, QUICKLY, "-o", program, *sources, archive, "-lpthread"], check=True
        )
        return program

    def _whole(self) -> float:
        """Seconds of the longest program, none of which finds a fault in the core as it is."""
        longest = 0.0
        for program in (self.harness, *self.tests):
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            assert not self.fails(None, program), f"{program.name} fails without a mutant"
            after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            longest = max(longest, after - before)
        return longest

    def caught_by(self, mutant: Mutant, equivalent: bool) -> str:
        """The harness or a C test, ALIVE = neither; or that there is nothing to catch.

        `equivalent`: it is said to be, so the harness alone tries, and not for long.
        """
        if self.fails(mutant, self.harness, FEW_ROUNDS):
            return "harness"
        if equivalent:
            return "equivalent"
        if self.same_code(mutant):
            return SAME_CODE
        by = next((test.name for test in self.tests if self.fails(mutant, test)), None)
        return by or ("harness" if self.fails(mutant, self.harness) else ALIVE)

    def fails(self, mutant: Mutant | None, program: Path, rounds: int = 0) -> bool:
        args = [str(rounds or self.rounds), "1", "30", "first"] if program == self.harness else []
        if mutant is not None and args:
            args += OPERATIONS[mutant.file]
        limit = ["prlimit", f"--cpu={self.cpu_s:.0f}"] if self.cpu_s else []
        environment = {**os.environ, "MUTANT": str(self.numbers[mutant] if mutant else 0)}
        run = subprocess.run(
            [*limit, program, *args],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return run.returncode != 0

    def same_code(self, mutant: Mutant) -> bool:
        number = self.numbers[mutant]
        alone = replaced(mutant.file, {s: mutant.instead(s) for s in mutant.stores})
        changed = self.written(f"alone-{number}", alone)
        return _code(self.compile(changed, f"alone-{number}", AS_SHIPPED)) == _code(
            self.compile(CORE / mutant.file, f"whole-{number}", AS_SHIPPED)
        )


def newest(*files: Path) -> float:
    return max(file.stat().st_mtime for file in files)


def _code(target: Path) -> bytes:
    """The machine code of an object, without names of files."""
    dump = target.with_suffix(".code")
    subprocess.run(["objcopy", "-O", "binary", "--only-section=.text*", target, dump], check=True)
    return dump.read_bytes()


def equivalent() -> dict[str, str]:
    """Why nobody can tell a mutant, by its name."""
    groups: list[dict[str, Any]] = tomllib.loads(EQUIVALENT.read_text())["equivalent"]
    return {name: group["reason"] for group in groups for name in group["mutants"]}


def judge(bench: Bench, chosen: list[Mutant], jobs: int) -> dict[str, Any]:
    """Tries each: how many fared how, and which; without those that are no mutants."""
    reasons = equivalent()
    fates: dict[str, list[str]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda m: bench.caught_by(m, m.name in reasons), chosen)
        for mutant, fate in zip(chosen, found, strict=True):
            print(f"{fate:16} {mutant.place:18} {mutant.name}", flush=True)
            if fate != SAME_CODE:
                fates.setdefault(fate, []).append(mutant.name)
    return {"counts": {fate: len(names) for fate, names in fates.items()}, **fates}


def keep(file: str, result: dict[str, Any]) -> None:
    """Takes the place of the file's older result, if it has one."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept[file] = {**origin("python", *sys.argv), **result}
    KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only every n-th of them")
    parser.add_argument("--rounds", type=int, default=12, help="of the harness, for each")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are tried at once")
    parser.add_argument("--file", nargs="+", default=FILES, help="only those of these files")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--write", action="store_true", help="keep the result: mutants.json")
    args = parser.parse_args()
    chosen = [m for m in mutants() if m.file in args.file][:: args.every]
    if args.list:
        print("\n".join(f"{m.place} {m.name}" for m in chosen))
        return 0
    bench = Bench(args.rounds)
    alive = False
    for file in args.file:
        result = judge(bench, [m for m in chosen if m.file == file], args.jobs)
        alive |= ALIVE in result
        if args.write:
            keep(file, result)
    return alive


if __name__ == "__main__":
    sys.exit(main())
