"""Write results of benchmarks, with a description of the machine, and tables of the docs.

Results contain summaries of the samples, never the samples.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
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


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return the summary that a result stores for samples: median, minimum and maximum."""
    return {"median": statistics.median(samples), "low": min(samples), "high": max(samples)}


def spread_text(values: dict[str, float], form: str) -> str:
    """Return what spread() has returned as text: median [minimum - maximum]."""
    middle, low, high = (format(values[name], form) for name in ("median", "low", "high"))
    return f"{middle} [{low} - {high}]"


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the sample below which the fraction `share` of the sorted samples lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def write_result(path: Path, document: dict[str, Any]) -> None:
    """Write a result as JSON, with one line for each innermost object, and floats with nine
    significant digits."""
    path.write_text(_json(document) + "\n")


def _json(value: Any, margin: str = "\n") -> str:
    if isinstance(value, float):
        return json.dumps(float(f"{value:.9g}"))
    if not isinstance(value, dict | list | tuple):
        return json.dumps(value)
    inner: list[Any] = list(value.values()) if isinstance(value, dict) else list(value)
    texts = [_json(one, f"{margin} ") for one in inner]
    one_line = not any(
        isinstance(one, dict) or "\n" in text for one, text in zip(inner, texts, strict=True)
    )
    if isinstance(value, dict):
        texts = [f"{json.dumps(key)}: {text}" for key, text in zip(value, texts, strict=True)]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    if one_line:
        return f"{begin}{', '.join(texts)}{end}"
    return f"{begin}{margin} " + f",{margin} ".join(texts) + f"{margin}{end}"


def write_section(name: str, text: str, page: Path = PAGE) -> None:
    """Replace the section of a page between the comments `NAME: begin` and `NAME: end`."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, begins, rest = page.read_text().partition(begin)
    _, ends, after = rest.partition(end)
    assert begins, (page, name)
    assert ends, (page, name)
    page.write_text(before + begin + text + end + after)
