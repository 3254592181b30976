"""Moves the process of a client or subscriber to CPUs near its daemon's, if it was made so."""

from __future__ import annotations

import os
from contextlib import suppress

from purgatoryd.clients.arguments import check_type
from purgatoryd.clients.remote import Remote
from purgatoryd.shm_layout.errors import InvalidArgument


def refuse_remote(*, numa_local: bool, remote: Remote | None) -> None:
    """Raises InvalidArgument if the daemon is on another host."""
    check_type("numa_local", numa_local, bool)
    if numa_local and remote is not None:
        raise InvalidArgument(
            "numa_local=True needs a daemon on this host, and remote= names another"
        )


def pin_numa_local(node: int | None, reaper_cpu: int | None) -> None:
    """To the CPUs of `node` without the core of `reaper_cpu`, None = any, nor those that loops of
    other daemons have. Nowhere if the daemon chose neither."""
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
