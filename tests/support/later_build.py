"""A build of the next minor version, to test the conversion from today's formats.

Its layout has an additional region, additional fields at the end of pg_namespace and pg_session,
and an additional WAL record type. Nothing else differs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from purgatoryd.shm_layout.layout import ABI, LAYOUT_ID

ROOT = Path(__file__).resolve().parents[2]
APPENDED = {
    "struct pg_namespace {": "    uint64_t later;\n};",
    "struct pg_session {": "    uint64_t later[3];\n};",
}


def later_layout(header: str) -> str:
    """Return the text of layout.h for the next minor version."""
    for version in ("PG_ABI_MINOR", "PG_WAL_MINOR"):
        header = replaced(header, rf"(#define {version}) \d+", rf"\1 {ABI[1] + 1}")
    for struct, end in APPENDED.items():
        header = replaced(header, rf"({re.escape(struct)}.*?)\n\}};", rf"\1\n{end}", re.DOTALL)
    header = replaced(header, r"^    PG_R_COUNT$", "    PG_R_LATER,\n    PG_R_COUNT", re.MULTILINE)
    return replaced(
        header, r"^    PG_WAL_TYPES\n", "    PG_WAL_LATER,\n    PG_WAL_TYPES\n", re.MULTILINE
    )


def replaced(text: str, pattern: str, by: str, flags: int = 0) -> str:
    text, count = re.subn(pattern, by, text, count=1, flags=flags)
    assert count == 1, pattern
    return text


def edit(path: Path, pattern: str, by: str) -> None:
    path.write_text(replaced(path.read_text(), pattern, by))


def make(folder: Path) -> Mapping[str, str]:
    """Build the next minor version in `folder`. Return the environment variables with which Python
    imports it."""
    package = folder / "purgatoryd"
    shutil.copytree(
        ROOT / "shm_layout", package / "shm_layout", ignore=shutil.ignore_patterns("*.so")
    )
    shutil.copy(ROOT / "src/purgatoryd/__init__.py", package)
    for name in ("daemon", "clients", "pipeline", "cli", "systemd"):
        (package / name).symlink_to(ROOT / name)
    (folder / "shm_layout").symlink_to(package / "shm_layout")
    core = package / "shm_layout"
    (core / "layout.h").write_text(later_layout((core / "layout.h").read_text()))
    edit(core / "layout.py", r"(RELEASED_LAYOUTS: .*?) = \{\}", rf"\1 = {{{LAYOUT_ID:#x}: {ABI}}}")
    edit(core / "build_core.py", '"-O3"', '"-O0"')
    code = "from shm_layout.build_core import ffibuilder; ffibuilder.compile(tmpdir='.')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT / "tests/support")))}
