"""A container that boots systemd from the /usr of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

BOOT_S = 300
BOOTED = 42
PYTHON, VENV = "/opt/python", "/opt/venv"
"""Paths in the container of the Python interpreter and packages that run this test. Units of the
container see neither /root nor /home."""

_ALLOWED = "--capability=CAP_IPC_LOCK", "--rlimit=MEMLOCK=infinity", "--rlimit=RTPRIO=99"
"""Rights that the units need, but that a container does not have by default."""
_UNIT = """\
[Service]
Type=oneshot
ExecStart={command}
ExecStopPost=/bin/systemctl exit {code}
"""


def make_root(root: Path) -> None:
    """Create the files that systemd needs in addition to /usr."""
    for name in ("usr", "etc/systemd/system", "var", "tmp", "run", "proc", "sys", "dev", "opt"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    shutil.copy("/etc/os-release", root / "etc/os-release")
    (root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")


def boot(root: Path, command: str, binds: Mapping[str, str]) -> bool:
    """Boot the container, run one command, and end. `binds`: folders of this machine, by path in
    the container.

    Return True if systemd booted and ran the command.
    """
    unit = _UNIT.format(command=command, code=BOOTED)
    (root / "etc/systemd/system/check.service").write_text(unit)
    call = ["systemd-nspawn", "--register=no", "--keep-unit", "--console=pipe", "--quiet"]
    call += [f"--directory={root}", "--bind-ro=/usr", *_ALLOWED]
    call += [f"--bind-ro={ours}:{inside}" for inside, ours in binds.items()]
    done = subprocess.run(
        [*call, "--boot", "systemd.unit=check.service"],
        env=os.environ | {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, timeout=BOOT_S, check=False,
    )  # fmt: skip
    return done.returncode == BOOTED


def python_of(root: Path, source: Path) -> dict[str, str]:
    """Write /opt/bin/python, a script that runs Python with the packages of this test. Return the
    folders that it needs, by path in the container."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    path = f"/opt/source/src:{VENV}/lib/{version}/site-packages"
    script = root / "opt/bin/python"
    script.parent.mkdir()
    own = f"LD_LIBRARY_PATH={PYTHON}/lib PYTHONPATH={path}"  # /usr may contain another libpython
    script.write_text(f'#!/bin/sh\n{own} exec {PYTHON}/bin/{version} "$@"\n')
    script.chmod(0o755)
    return {PYTHON: sys.base_prefix, VENV: sys.prefix, "/opt/source": str(source)}


def boots() -> bool:
    """Return whether this machine can boot such a container."""
    if os.geteuid() != 0 or shutil.which("systemd-nspawn") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        make_root(Path(folder) / "root")
        try:
            return boot(Path(folder) / "root", "/bin/true", {})
        except subprocess.TimeoutExpired:
            return False
