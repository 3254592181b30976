"""Mutants of the core: each store to truth dropped, each adjacent pair of stores swapped.

Every mutant has to be caught by the C tests or by the crash harness, which kills it before each
store (stores.c); or it is listed in equivalent.toml with the reason why nobody could tell it. One
whose machine code is that of the original is no mutant. `mutate.py --help` has the flags.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CORE = ROOT / "shm_layout"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")

FILES = [
    "batch.c", "inbox.c", "levels.c", "loads.c", "names.c", "operations.c", "outbox.c",
    "session.c", "stage.c", "timers.c",
]  # fmt: skip
"""Whatever stores truth while a daemon runs."""

FIELDS = {
    "ctl", "deadline_ns", "flags", "hash", "topic", "cold", "value",
    "next_ticket", "outbox_tail", "outbox_head", "published", "next_incarnation", "wall_offset_ns",
    "commit", "sequence", "previous", "last_position", "meta",
    "name_len", "namespace_row", "incarnation", "shard", "owner_uid", "durability",
    "target", "level", "slot", "sibling", "error", "touched_s", "key_len", "key_type",
    "first_watch", "notice_blob", "ended_ns", "cause", "version",
    "id", "uid", "last", "current", "applied", "count", "intent", "checksum", "extra_blob",
    "extra_bytes",
    "staged", "tail", "next_lsn", "lives",
    "fence", "state", "load", "load_first", "number", "used_boot_ns",
}  # fmt: skip
COPIES = ("memcpy(", "memset(", "answer(", "answer_slot(", "*op = ", "*e = ", "*r = ", "*f = ")
TARGET = r"[a-z_]\w*(?:->|\.|\[)(?:[^=;]*?\W)?(?P<field>[a-z_]+)(?:\[\w+\])?"
STORES = (
    re.compile(rf"STORE_RELEASE\(&{TARGET}, .*\);"),
    re.compile(rf"(?:\+\+|--)?{TARGET}(?: [-+|&]?= .*|\+\+|--)?;"),
)

COMPILE = ["cc", "-std=c11", "-O3", "-fvisibility=hidden", "-w", f"-I{CORE}", f"-I{ROOT}/tests/c"]
STORES_SEEN = "-fsanitize=thread"
"""For stores.c, which has what the compiler calls then."""

PRIVATE = re.compile(
    r"answer\(\w+, 0, .*|memcpy\(&.*|memset\((?:a->|out,).*|a->\w+ = .*|(?:p->|n\.|next\.|out\[).*"
)
"""Refusals, locals, the fields of a process's handle, and what is derived."""

FEW_ROUNDS = 2
"""Of the harness; they catch most."""

CPU_S = 20
"""Of one program, and of a round; a mutant that takes more hangs."""


@dataclass(frozen=True)
class Mutant:
    """`line`: of the statement, or of the first of two, in the file as it is."""

    file: str
    kind: str
    line: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.file} {self.kind}: {self.text}"

    def source(self) -> str:
        lines = (CORE / self.file).read_text().splitlines(keepends=True)
        if self.kind == "drop":
            lines[self.line] = ";\n"
        else:
            lines[self.line], lines[self.line + 1] = lines[self.line + 1], lines[self.line]
        return "".join(lines)


def is_store(line: str) -> bool:
    """A whole statement on one line that stores into a field of the truth, or copies."""
    text = line.strip()
    if PRIVATE.fullmatch(text):
        return False
    if text.startswith(COPIES):
        return text.endswith(";")
    found = [store.fullmatch(text) for store in STORES if "metrics" not in text]
    return any(f is not None and f["field"] in FIELDS for f in found)


def mutants() -> Iterator[Mutant]:
    """All of them, in the order of files and lines."""
    for file in FILES:
        lines = (CORE / file).read_text().splitlines()
        for n, line in enumerate(lines):
            if not is_store(line):
                continue
            yield Mutant(file, "drop", n, line.strip())
            after = lines[n + 1] if n + 1 < len(lines) else ""
            if is_store(after) and _indent(after) == _indent(line) and not _guarded(lines, n):
                yield Mutant(file, "swap", n, f"{line.strip()} {after.strip()}")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _guarded(lines: list[str], n: int) -> bool:
    """The only statement of an if or a loop: swapped, it would guard the other one."""
    before = lines[n - 1]
    return _indent(before) < _indent(lines[n]) and not before.rstrip().endswith("{")


class Bench:
    """Objects of the core as it is; programs with one of them replaced."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        core = sorted(CORE.glob("*.c"))
        self.core = {c.name: self.compile(c, c.stem) for c in core}
        self.seen = {c.name: self.compile(c, f"seen-{c.stem}", STORES_SEEN) for c in core}
        crash = sorted(set((ROOT / "tests/crash").glob("*.c")) - {ROOT / "tests/crash/step.c"})
        self.harness = [self.compile(c, f"crash-{c.stem}") for c in crash]
        self.tests = [[self.compile(c, c.stem)] for c in sorted((ROOT / "tests/c").glob("*.c"))]

    def compile(self, source: Path, name: str, *flags: str) -> Path:
        target = self.folder / f"{name}.o"
        subprocess.run([*COMPILE, *flags, "-c", "-o", target, source], check=True)
        return target

    def link(self, program: list[Path], core: dict[str, Path]) -> Path:
        """From an archive, because some tests bring a part of the core themselves."""
        target, archive = self.folder / "program", self.folder / "core.a"
        archive.unlink(missing_ok=True)
        subprocess.run(["ar", "-rcs", archive, *core.values()], check=True)
        subprocess.run(["cc", "-o", target, *program, archive, "-lpthread"], check=True)
        return target

    def caught_by(self, mutant: Mutant, equivalent: bool) -> str:
        """The harness or a C test, "" = neither; or that there is nothing to catch.

        `equivalent`: it is said to be, so not all is tried.
        """
        source = self.folder / "mutant.c"
        source.write_text(mutant.source())
        try:
            changed = self.compile(source, "mutant")
        except subprocess.CalledProcessError:
            return "does not compile"
        if _code(changed) == _code(self.core[mutant.file]):
            return "same code"
        core = {**self.core, mutant.file: changed}
        seen = {**self.seen, mutant.file: self.compile(source, "seen-mutant", STORES_SEEN)}
        if self.harness_fails(seen, FEW_ROUNDS):
            return "harness"
        if equivalent:
            return "equivalent"
        by = next((t[0].stem for t in self.tests if self.fails(t, core)), "")
        return by or ("harness" if self.harness_fails(seen, self.rounds) else "")

    def harness_fails(self, core: dict[str, Path], rounds: int) -> bool:
        return self.fails(self.harness, core, str(rounds), "1", "30", "first")

    def fails(self, program: list[Path], core: dict[str, Path], *args: str) -> bool:
        limit = ["prlimit", f"--cpu={CPU_S * self.rounds}"]
        run = subprocess.run(
            [*limit, self.link(program, core), *args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return run.returncode != 0


def _code(target: Path) -> bytes:
    """The machine code of an object, without names of files."""
    dump = ["objcopy", "-O", "binary", "--only-section=.text*", str(target), "/dev/stdout"]
    return subprocess.run(dump, check=True, capture_output=True).stdout


def judge(chosen: list[Mutant], rounds: int) -> dict[str, object]:
    """Tries each; the result has counts, and the survivors with their reasons."""
    reasons: dict[str, str] = tomllib.loads(EQUIVALENT.read_text())
    counts: dict[str, int] = {}
    equivalent: dict[str, str] = {}
    alive: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), rounds)
        assert not bench.harness_fails(bench.seen, rounds), "the core as it is fails"
        for mutant in chosen:
            by = bench.caught_by(mutant, mutant.name in reasons) or "alive"
            if by == "equivalent":
                equivalent[mutant.name] = reasons[mutant.name]
            elif by == "alive":
                alive.append(f"{mutant.name} (line {mutant.line + 1})")
            counts[by] = counts.get(by, 0) + 1
            print(
                f"{by:16} {mutant.file}:{mutant.line + 1} {mutant.kind} {mutant.text}", flush=True
            )
    mutated = len(chosen) - counts.get("same code", 0) - counts.get("does not compile", 0)
    return {"mutants": mutated, "by": counts, "alive": alive, "equivalent": equivalent}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only every n-th of them")
    parser.add_argument("--rounds", type=int, default=12, help="of the harness, for each")
    parser.add_argument("--file", help="only those of this file")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    chosen = [m for m in mutants() if args.file in (None, m.file)][:: args.every]
    if args.list:
        print("\n".join(f"{m.file}:{m.line + 1} {m.kind} {m.text}" for m in chosen))
        return 0
    result = judge(chosen, args.rounds)
    text = json.dumps(result, indent=1)
    print(text)
    if args.write:
        RESULTS.write_text(text + "\n")
    return bool(result["alive"])


if __name__ == "__main__":
    sys.exit(main())
