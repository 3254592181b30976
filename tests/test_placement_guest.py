"""Real daemons in a virtual machine with two NUMA nodes: threads and pages are on the chosen node.

The machine's first process is guest/placement.py. Its file system has just the files that Python
opens to run this script.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guest_machine import cpio_end, cpio_entry, kernels, running
from machine import needs

from purgatoryd.shm_layout.layout import HEADER

pytestmark = pytest.mark.tier("all")

SCRIPT = Path(__file__).resolve().parent / "guest" / "placement.py"
LOADER = Path("/lib64/ld-linux-x86-64.so.2")
MIB_OF_NODE = 320
# Code that imports all modules that the guest needs, and prints the files of all loaded modules and
# libraries.
OPENED = """
import encodings.ascii, importlib.util, runpy, sys
import purgatoryd.cli.app, purgatoryd.cli.config_file, purgatoryd.cli.service
import purgatoryd.daemon.main
runpy.run_path(sys.argv[1])
print(importlib.util.find_spec("purgatoryd.cli.__main__").origin)
for module in list(sys.modules.values()):
    print(getattr(module, "__file__", None), getattr(module, "__cached__", None), sep="\\n")
print(*(line.split()[5] for line in open("/proc/self/maps") if ".so" in line), sep="\\n")
"""


def opened() -> set[Path]:
    """Return the module and library files of this Python and of the package."""
    command = [sys.executable, "-c", OPENED, str(SCRIPT)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {Path(line) for line in said.splitlines()}
    for library in [path for path in found if ".so." in path.name]:  # add all links to each library
        stem = library.name.partition(".so")[0]
        same = (path for path in library.parent.glob(f"{stem}.so*"))
        found |= {path for path in same if path.resolve() == library.resolve()}
    return found


def way_to_them() -> Iterator[Path]:
    """Yield the other files that an interpreter needs to find its modules, also in a venv."""
    executable = Path(sys.executable)
    yield from (executable, executable.resolve(), executable.parent.parent / "pyvenv.cfg")
    yield from (LOADER, HEADER)
    for folder in map(Path, sys.path):
        if folder.is_dir():
            yield from folder.glob("*.pth")
            yield from folder.glob("__editable__*.py")


def initramfs() -> bytes:
    """Return an initramfs with all these files under their own paths, and with the script as /init.
    Links are replaced by the files that they point to."""
    files = {path for path in (*opened(), *way_to_them()) if path.is_file()}
    folders = {folder for path in files for folder in path.parents} - {Path("/")}
    entries = [cpio_entry(str(path)[1:], b"", 0o040755) for path in sorted(folders)]
    entries.append(cpio_entry("dev", b"", 0o040755))
    for name, device in (("console", (5, 1)), ("urandom", (1, 9))):  # needed before /dev is mounted
        entries.append(cpio_entry(f"dev/{name}", b"", 0o020600, device))
    entries += map(file_entry, sorted(files))
    entries.append(cpio_entry("init", script(), 0o100755))
    return b"".join([*entries, cpio_end()])


def file_entry(path: Path) -> bytes:
    """Return a file's cpio entry with its modification time, which Python checks in compiled
    modules."""
    changed_s = int(path.stat().st_mtime)
    return cpio_entry(str(path)[1:], path.read_bytes(), 0o100755, changed_s=changed_s)


def script() -> bytes:
    return f"#!{sys.executable}\n".encode() + SCRIPT.read_bytes()


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the guest; return all values that it reports."""
    needs("qemu")
    needs("kernel")
    if platform.machine() != "x86_64":
        pytest.skip("x86-64: the guest runs the host's Python")
    image, _ = next(kernels())
    root = tmp_path_factory.mktemp("guest") / "initramfs"
    root.write_bytes(initramfs())
    nodes = [
        argument
        for node in (0, 1)
        for argument in (
            "-object", f"memory-backend-ram,size={MIB_OF_NODE}M,id=memory{node}",
            "-numa", f"node,nodeid={node},cpus={2 * node}-{2 * node + 1},memdev=memory{node}",
        )
    ]  # fmt: skip
    command = [
        "qemu-system-x86_64", "-accel", "tcg", "-m", str(2 * MIB_OF_NODE), "-smp", "4", *nodes,
        "-numa", "dist,src=0,dst=1,val=21", "-nodefaults", "-no-reboot", "-display", "none",
        "-serial", "stdio", "-kernel", str(image), "-initrd", str(root),
        "-append", "console=ttyS0 quiet panic=-1 no_timer_check",
    ]  # fmt: skip
    return all_that_is_reported(command)


def all_that_is_reported(command: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    console: list[str] = []
    with running(command) as process:
        assert process.stdout is not None
        for line in process.stdout:
            console.append(line)
            if line.startswith("{"):
                facts |= json.loads(line)
    assert "done" in facts, "".join(["the guest did not get to its end:\n", *console[-60:]])
    return facts


def test_the_guest_has_two_nodes(reported: dict[str, Any]) -> None:
    assert reported["nodes"] == [[0, [0, 1], {"0": 10, "1": 21}], [1, [2, 3], {"0": 21, "1": 10}]]


def test_a_new_arena_is_on_its_node(reported: dict[str, Any]) -> None:
    born = reported["born"]
    assert set(born["pages"]) == {"1"}
    assert born["policy"] == "prefer:1"
    assert (born["loop"], born["others"]) == ([3], [2])
    assert (born["node"], born["memory_node"], born["reaper_cpu"]) == (1, 1, 3)
    assert (born["placed"], born["clamped"]) == ("cpus, memory, core", None)


def test_an_arena_that_was_elsewhere_is_moved(reported: dict[str, Any]) -> None:
    moved = reported["moved"]
    assert set(moved["pages"]) == {"0"}
    assert moved["pages_elsewhere"] == 0
    assert (moved["loop"], moved["others"]) == ([1], [0])
    assert (moved["placed"], moved["clamped"]) == ("cpus, memory, core", None)


def test_a_cpu_that_went_and_came_back(reported: dict[str, Any]) -> None:
    assert reported["cpu"] == 1
    assert reported["back"]


def test_another_node_for_a_running_daemon_moves_its_threads_alone(
    reported: dict[str, Any],
) -> None:
    reloaded = reported["reloaded"]
    assert (reloaded["loop"], reloaded["others"]) == ([3], [2])
    assert set(reloaded["pages"]) == {"0"}
    assert (reloaded["node"], reloaded["memory_node"], reloaded["reaper_cpu"]) == (1, 0, 3)
    assert (reloaded["placed"], reloaded["clamped"]) == ("cpus, memory, core", "memory")
