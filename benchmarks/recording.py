"""Where benchmarks write what they found: the machine beside it, and tables in the docs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def write_section(name: str, text: str, page: Path = PAGE) -> None:
    """Replaces what stands between a page's two marks of that name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, begins, rest = page.read_text().partition(begin)
    _, ends, after = rest.partition(end)
    assert begins, (page, name)
    assert ends, (page, name)
    page.write_text(before + begin + text + end + after)
