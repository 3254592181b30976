"""Move the process of a client or subscriber to CPUs near its daemon."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from purgatoryd.clients.arguments import check_type
from purgatoryd.shm_layout.errors import InvalidArgument

if TYPE_CHECKING:
    from purgatoryd.clients.remote import Remote


def refuse_remote(*, numa_local: bool, remote: Remote | None) -> None:
    """Raise InvalidArgument if `numa_local` is True and the daemon is on another host."""
    check_type("numa_local", numa_local, bool)
    if numa_local and remote is not None:
        raise InvalidArgument(
            "numa_local=True needs a daemon on this host; remote= names another host"
        )


def pin_numa_local(node: int | None, reaper_cpu: int | None) -> None:
    """Move all threads of this process to the CPUs of `node`; None = any node.

    The core of `reaper_cpu` and the CPUs of other daemons' loops are left out. If the daemon chose
    neither node nor CPU, nothing changes.
    """
    if node is None and reaper_cpu is None:
        return
    # Few clients need these modules, and they take long to import.
    import psutil

    from purgatoryd.shm_layout.loops import loop_cpus
    from purgatoryd.shm_layout.topology import read, worker_cpus

    cpus = worker_cpus(read(os.sched_getaffinity(0)), node, reaper_cpu, loop_cpus())
    for thread in psutil.Process().threads():
        with suppress(ProcessLookupError):
            if fewer := os.sched_getaffinity(thread.id).intersection(cpus):
                os.sched_setaffinity(thread.id, fewer)
