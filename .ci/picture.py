"""Draw the picture of docs/architecture.md: packages with their imports, and the storeys of the
core.

Packages, imports and files come from the code, through layers.py.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from textwrap import wrap

import layers

CORE = layers.ROOT / "shm_layout" / "core"
PLACES = {
    "cli": (190, 60, 170, "the command purgatoryd"),
    "pipeline": (420, 150, 140, "lake, Spark, audit"),
    "daemon": (80, 240, 140, "loop, sockets, shards"),
    "clients": (300, 240, 140, "for programs"),
    "shm_layout": (250, 350, 480, "layout.h, the core, its bindings, errors"),
}
"""For each package: centre, top and width of its box, and the text in it."""
HEIGHT = 46
STOREY_X, STOREY_WIDTH, LINE = 560, 400, 16
_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 980 {height}" font-size="13" role="img"
 font-family="DejaVu Sans, Verdana, sans-serif" aria-label="{label}">
<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"
 orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="#334"/></marker></defs>
<rect width="980" height="{height}" fill="#fff"/>
"""


def box(x: int, y: int, width: int, height: int, name: str, lines: list[str]) -> str:
    """Return a box with a name and lines of text; `x` is its left edge."""
    texts = [
        f'<text x="{x + 12}" y="{at}" font-size="11" fill="#445">{escape(line)}</text>'
        for at, line in zip(range(y + 36, y + height, LINE), lines, strict=False)
    ]
    return "\n".join(
        [
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="#eef3fa"'
            ' stroke="#334"/>',
            f'<text x="{x + 12}" y="{y + 19}" font-weight="bold" fill="#112">{name}</text>',
            *texts,
        ]
    )


def arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    """Return an arrow."""
    return f'<path d="M{x} {y} L{to_x} {to_y}" stroke="#334" fill="none" marker-end="url(#tip)"/>'


def packages(imports: dict[str, set[str]]) -> list[str]:
    """Return a box for each package and an arrow for each import."""
    parts = []
    for package, names in imports.items():
        x, y, _, _ = PLACES[package]
        for name in sorted(names):
            to_x, to_y, width, _ = PLACES[name]
            end = min(max(x, to_x - width // 2 + 20), to_x + width // 2 - 20)
            parts.append(arrow(x, y + HEIGHT, end if width > 200 else to_x, to_y))
    for package, (x, y, width, about) in PLACES.items():
        parts.append(box(x - width // 2, y, width, HEIGHT, package, [about]))
    return parts


def storeys(core: Path) -> tuple[list[str], int]:
    """Return boxes for the storeys of the core, from the highest to the lowest, and the bottom of
    the last box."""
    middle = STOREY_X + STOREY_WIDTH // 2
    parts, y = [], 60
    for storey in reversed(layers.STOREYS):
        if parts:
            parts.append(arrow(middle, y - 18, middle, y))
        lines = wrap(", ".join(path.stem for path in sorted((core / storey).glob("*.c"))), 60)
        height = 28 + LINE * len(lines)
        parts.append(box(STOREY_X, y, STOREY_WIDTH, height, storey, lines))
        y += height + 18
    return parts, y


def svg() -> str:
    """Return the picture."""
    boxes, end = storeys(CORE)
    label = "packages and their imports; the storeys of the C core, from front down to base"
    titles = [
        f'<text x="{x}" y="36" fill="#112">{text}</text>'
        for x, text in ((10, "packages: imports"), (STOREY_X, "shm_layout/core: calls"))
    ]
    parts = [*titles, *packages(layers.imports_of(layers.ROOT)), *boxes]
    return _HEAD.format(height=max(end, 420), label=label) + "\n".join(parts) + "\n</svg>\n"
