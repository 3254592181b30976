"""Install this checkout as users do, to measure what they run.

`make build` installs the package in editable mode, with every assertion compiled in. So each
start of Python takes longer, because Python searches for the checkout, and the core is slower
because of the assertions.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns("build", ".*", "*.so", "__pycache__")
"""Objects in build/ were compiled with all assertions, and would be used again."""


def install(directory: Path) -> Path:
    """Build a wheel and install it in a new environment in `directory`. Return its bin folder.

    The dependencies are those of the running interpreter, so that nothing is downloaded.
    """
    pip = [sys.executable, "-m", "pip"]
    quietly = ["--quiet", "--no-deps", "--no-index"]
    wheels, environment = directory / "wheels", directory / "environment"
    source = shutil.copytree(CHECKOUT, directory / "source", symlinks=True, ignore=NOT_COPIED)
    _run(*pip, "wheel", *quietly, "--no-build-isolation", "-w", str(wheels), str(source))
    _run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python = environment / "bin" / "python"
    _run(*pip, "--python", str(python), "install", *quietly, *map(str, wheels.glob("*.whl")))
    packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def run_with_wheel(script: str, words: Sequence[str]) -> int:
    """Run a benchmark in a new environment, with the arguments `words` and `--installed`. Return
    its exit code."""
    with tempfile.TemporaryDirectory(prefix="bench-wheel-") as directory:
        python = install(Path(directory)) / "python"
        return subprocess.run([python, script, "--installed", *words], check=False).returncode


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)
