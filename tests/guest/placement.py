"""The first process of a virtual machine with two NUMA nodes.

It runs daemons, and prints where their threads and pages are, one JSON object per line.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.paths import HOST_DIRECTORY, paths_in
from purgatoryd.shm_layout.topology import read

PATIENCE_S = 120.0
MOUNTS = (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/dev/shm"))
"""File systems to mount. /run and /tmp are not mounted, because they may contain the host's Python.
They are not needed, because the root file system is writable."""


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def mount_all() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, place in MOUNTS:
        os.makedirs(place, exist_ok=True)
        if libc.mount(kind.encode(), place.encode(), kind.encode(), 0, None) != 0:
            raise OSError(ctypes.get_errno(), f"mount {place}")
    for place in ("/run", "/tmp"):
        os.makedirs(place, exist_ok=True)


def mapping(pid: int) -> str:
    """Return the arena's line of numa_maps. The line is not found by the arena's name, because a
    new arena file is mapped before it has a name."""
    lines = Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
    found = [line for line in lines if "file=/dev/shm/" in line and ".private" not in line]
    return max(found, key=lambda line: sum(by_node(line).values()), default="")


def by_node(line: str) -> dict[str, int]:
    return {node: int(count) for node, count in re.findall(r" N(\d+)=(\d+)", line)}


def pages(pid: int) -> dict[str, int]:
    """Return the number of pages of the arena in the daemon's mapping, by NUMA node."""
    return by_node(mapping(pid))


def cpus(pid: int) -> tuple[list[int], list[int]]:
    """Return (CPUs of the loop, CPUs of all other threads)."""
    others = {thread.id for thread in psutil.Process(pid).threads()} - {pid}
    found: set[int] = set()
    for thread in others:
        with suppress(ProcessLookupError):  # the thread has ended
            found |= os.sched_getaffinity(thread)
    return sorted(os.sched_getaffinity(pid)), sorted(found)


def state(daemon: subprocess.Popen[str]) -> dict[str, Any]:
    loop, others = cpus(daemon.pid)
    reader = Reader.attach(paths_in(HOST_DIRECTORY, "guest"))
    figures = reader.stats()
    reader.close()
    shown = ("node", "memory_node", "reaper_cpu", "placed", "clamped", "pages_elsewhere")
    return {"loop": loop, "others": others, "pages": pages(daemon.pid),
            "policy": policy(daemon.pid), **{name: figures[name] for name in shown}}  # fmt: skip


def policy(pid: int) -> str:
    """Return the memory policy of the arena's mapping."""
    return (mapping(pid).split() or ["", ""])[1]


def start(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "purgatoryd.cli", "run", "--name", "guest", *args]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    assert daemon.stdout.readline().startswith("ready")
    return daemon


def stop(daemon: subprocess.Popen[str]) -> None:
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(PATIENCE_S) == 0


def eventually(fact: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + PATIENCE_S
    while not fact() and time.monotonic() < end_s:
        time.sleep(0.1)
    return fact()


def main() -> None:
    mount_all()
    topology = read(None)
    tell(nodes=[[n.id, sorted(n.cpus), dict(n.distances)] for n in topology.nodes])

    daemon = start("--node", "1")
    eventually(lambda: cpus(daemon.pid)[1] == [2])  # the thread that wrote "ready" may still run
    tell(born=state(daemon))
    stop(daemon)

    settings = Path("/tmp/guest.toml")
    settings.write_text("node = 0\n")
    daemon = start("--config", str(settings))
    eventually(lambda: cpus(daemon.pid)[1] == [0])
    tell(moved=state(daemon))
    (cpu,) = os.sched_getaffinity(daemon.pid)
    Path(f"/sys/devices/system/cpu/cpu{cpu}/online").write_text("0")
    eventually(lambda: cpu not in os.sched_getaffinity(daemon.pid))
    Path(f"/sys/devices/system/cpu/cpu{cpu}/online").write_text("1")
    daemon.send_signal(signal.SIGHUP)
    tell(back=eventually(lambda: os.sched_getaffinity(daemon.pid) == {cpu}), cpu=cpu)
    settings.write_text("node = 1\n")
    daemon.send_signal(signal.SIGHUP)
    eventually(lambda: state(daemon)["node"] == 1)
    tell(reloaded=state(daemon))
    stop(daemon)
    tell(done=True)


if __name__ == "__main__":
    main()
