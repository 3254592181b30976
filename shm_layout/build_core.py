"""Build purgatoryd.shm_layout._core: the C core, with layout.h and api.h as its declarations."""

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent


def files(pattern: str) -> list[str]:
    """Return the files of this folder as paths relative to the root of the tree, for setuptools."""
    return sorted(f"{HERE.name}/{path.relative_to(HERE)}" for path in HERE.rglob(pattern))


ffibuilder = FFI()
ffibuilder.cdef((HERE / "layout.h").read_text() + (HERE / "api.h").read_text())
ffibuilder.set_source(
    "purgatoryd.shm_layout._core",
    '#include "core/core.h"\n',
    py_limited_api=True,
    sources=files("core/**/*.c"),
    include_dirs=[HERE.name],
    depends=files("*.[ch]"),
    # With hidden visibility, calls are direct and do not use the linkage table.
    extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"],
    extra_link_args=["-pthread"],
)
