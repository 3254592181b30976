"""Builds purgatoryd.shm_layout._core: the C core with layout.h and api.h as its declaration."""

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent


def files(pattern: str) -> list[str]:
    """Paths of this folder's files from the root of the tree: setuptools wants them so."""
    return sorted(f"{HERE.name}/{path.name}" for path in HERE.glob(pattern))


ffibuilder = FFI()
ffibuilder.cdef((HERE / "layout.h").read_text() + (HERE / "api.h").read_text())
ffibuilder.set_source(
    "purgatoryd.shm_layout._core",
    '#include "core.h"\n',
    py_limited_api=True,
    sources=files("*.c"),
    include_dirs=[HERE.name],
    depends=files("*.[ch]"),
    # Hidden symbols are called directly, not through the linkage table.
    extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"],
    extra_link_args=["-pthread"],
)
