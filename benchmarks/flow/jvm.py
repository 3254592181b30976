"""Measure the CPU time of Spark's JVM, by the kind of work of its threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

KINDS = {"C1 Co": "compilers", "C2 Co": "compilers", "GC": "collector", "Executor task": "tasks"}
"""Kind of work of a thread, by the beginning of its name. The kernel stores 15 characters of a
name."""
REST = "the rest"
"""Work of all other threads: loading classes, planning queries, generating code."""
WHERE = (*dict.fromkeys(KINDS.values()), REST)

Threads = dict[tuple[str, str], float]
"""CPU time of each thread since its start in seconds, by (number, name) of the thread."""


@contextmanager
def spending() -> Iterator[dict[str, float]]:
    """Yield a dict. When the block ends, it contains the CPU seconds that the JVM used in the
    block.

    Threads that end before the block are not counted. Threads of tasks exist for a minute after a
    task.
    """
    found, before = dict.fromkeys(WHERE, 0.0), _threads()
    yield found
    for thread, seconds in _threads().items():
        found[_kind(thread[1])] += seconds - before.get(thread, 0.0)


def _threads() -> Threads:
    """Return the threads of the JVM that this process has started."""
    found: Threads = {}
    java = [p for p in psutil.Process().children(recursive=True) if p.name() == "java"]
    for task in (task for p in java for task in Path(f"/proc/{p.pid}/task").iterdir()):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            ns = int((task / "schedstat").read_text().split()[0])
            found[task.name, (task / "comm").read_text()] = ns / 1e9
    return found


def _kind(name: str) -> str:
    return next((kind for begin, kind in KINDS.items() if name.startswith(begin)), REST)
