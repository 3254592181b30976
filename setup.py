"""What pyproject.toml cannot say: the C core, and one wheel for Python 3.11 and later."""

import sys

from setuptools import setup

if sys.platform != "linux":
    raise SystemExit(f"purgatoryd runs on Linux only; this is {sys.platform}.")

setup(
    cffi_modules=["shm_layout/build_core.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
