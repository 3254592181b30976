"""Print in one sentence what this machine lacks to build purgatoryd. Old versions of Python can run
this file."""

import os
import shutil
import sys
import sysconfig


def has_module(name):
    """Return whether the module can be imported. Debian has the module venv in a separate
    package."""
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def missing(compiler):
    """Return a sentence about the first missing requirement; None if there is none."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    headers = sysconfig.get_paths()["include"]
    if not sys.platform.startswith("linux"):
        return f"purgatoryd runs on Linux only; this is {sys.platform}."
    if sys.version_info < (3, 11):
        return (
            f"purgatoryd needs Python 3.11 or newer; {sys.executable} is {version} "
            "(name another: make PYTHON=python3.12)."
        )
    if not (has_module("venv") and has_module("ensurepip")):
        return "The venv module is missing (Debian, Ubuntu: apt-get install python3-venv)."
    if shutil.which(compiler.split()[0]) is None:
        return f"No C compiler: {compiler} is not there (Debian, Ubuntu: apt-get install gcc)."
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return f"No Python.h in {headers} (Debian, Ubuntu: apt-get install python3-dev)."
    return None


if __name__ == "__main__":
    sys.exit(missing(sys.argv[1]))
