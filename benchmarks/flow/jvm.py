"""Where the processor time of Spark's JVM goes, by what its threads do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

KINDS = {"C1 Co": "compilers", "C2 Co": "compilers", "GC": "collector", "Executor task": "tasks"}
"""By how a thread's name begins, of which the kernel knows 15 characters."""
REST = "the rest"
"""Classes are loaded, queries planned, their code generated."""
WHERE = (*dict.fromkeys(KINDS.values()), REST)

Threads = dict[tuple[str, str], float]
"""Seconds of processor time so far, by number and name."""


@contextmanager
def spending() -> Iterator[dict[str, float]]:
    """Gives what is filled at the end: seconds of processor time that the JVM took meanwhile.

    What threads did that ended before is missing; those of tasks stay for a minute.
    """
    found, before = dict.fromkeys(WHERE, 0.0), _threads()
    yield found
    for thread, seconds in _threads().items():
        found[_kind(thread[1])] += seconds - before.get(thread, 0.0)


def _threads() -> Threads:
    """Of the JVM that this process has started."""
    found: Threads = {}
    java = [p for p in psutil.Process().children(recursive=True) if p.name() == "java"]
    for task in (task for p in java for task in Path(f"/proc/{p.pid}/task").iterdir()):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            ns = int((task / "schedstat").read_text().split()[0])
            found[task.name, (task / "comm").read_text()] = ns / 1e9
    return found


def _kind(name: str) -> str:
    return next((kind for begin, kind in KINDS.items() if name.startswith(begin)), REST)
