"""Build settings that pyproject.toml cannot express: the C core, and one wheel for Python 3.11 and
later."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if sys.platform != "linux":
    raise SystemExit(f"purgatoryd runs on Linux only; this is {sys.platform}.")


class BuildChanged(build_ext):
    """Compile with all CPUs, and only files that have changed since their object file was made."""

    def build_extension(self, ext: Extension) -> None:
        """Compile each file separately, then link all object files."""
        shared = [
            Path("setup.py"),
            *(path for path in map(Path, ext.depends) if path.suffix == ".h"),
        ]
        shared_s = max(path.stat().st_mtime for path in shared)

        def compiled(source: str) -> str:
            (name,) = self.compiler.object_filenames([source], output_dir=self.build_temp)
            changed_s, made = max(shared_s, Path(source).stat().st_mtime), Path(name)
            if self.force or not made.exists() or made.stat().st_mtime <= changed_s:
                self.compiler.compile(
                    [source], output_dir=self.build_temp, macros=ext.define_macros,
                    include_dirs=ext.include_dirs, extra_postargs=ext.extra_compile_args,
                    debug=self.debug,
                )  # fmt: skip
            return str(name)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ext.extra_objects = [*pool.map(compiled, ext.sources)]
        ext.sources = []
        super().build_extension(ext)


PACK = Extension(
    "purgatoryd.clients._pack",
    sources=[
        *map(str, sorted(Path("clients/pack").glob("*.c"))),
        *(
            f"shm_layout/core/{name}.c"
            for name in ("base/check", "base/futex", "ring/doorbell", "ring/ring")
        ),
    ],
    include_dirs=["shm_layout"],
    depends=[
        str(path)
        for folder, pattern in (("clients/pack", "*.[ch]"), ("shm_layout", "**/*.h"))
        for path in sorted(Path(folder).glob(pattern))
    ],
    define_macros=[("Py_LIMITED_API", "0x030b0000")],
    py_limited_api=True,
    extra_compile_args=[
        "-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-cast-function-type",
    ],
    libraries=["m"],
)  # fmt: skip
"""The client's packing (docs/architecture.md, "Packing")."""

setup(
    cffi_modules=["shm_layout/build_core.py:ffibuilder"],
    ext_modules=[PACK],
    cmdclass={"build_ext": BuildChanged},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
