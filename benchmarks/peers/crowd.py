"""Run clients at the same time, each in a process of its own, and measure rates and CPU times."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import Any

from .side import PATIENCE_S, Job, Prepare, Server

Sample = dict[str, float]
_FORK = get_context("fork")
"""Clients are forked from a process that has imported everything and has no connection."""


def client(
    prepare: Prepare, server: Server, job: Job, together: Barrier, results: Connection
) -> None:
    """Prepare a client, wait for all others, run it, and report its times.

    The barrier is passed three times: when all are prepared, when the clock of the server was read,
    and when it was read again, so that nobody leaves before that.
    """
    try:
        run = prepare(server, job)
        together.wait(PATIENCE_S)
        together.wait(PATIENCE_S)
        cpu_s, begun_s = time.process_time(), time.monotonic()
        run()
        ended_s, used_s = time.monotonic(), time.process_time() - cpu_s
        results.send((begun_s, ended_s, used_s, job.call_us()))
        together.wait(PATIENCE_S)
    except BaseException:
        traceback.print_exc()
        together.abort()
    finally:
        os._exit(0)  # without the end of contexts, which waits for servers


def calls(prepare: Prepare, server: Server, job: Job, clients: int, operations: int = 1) -> Sample:
    """Run clients and return operations per second, CPU times of an operation in us, and the
    median time of a call if the job is timed.

    `operations`: number of operations with each key.
    """
    together, pipe = _FORK.Barrier(clients + 1), _FORK.Pipe(duplex=False)
    processes = [
        _FORK.Process(
            target=client, args=(prepare, server, replace(job, worker=n), together, pipe[1])
        )
        for n in range(clients)
    ]
    for process in processes:
        process.start()
    together.wait(PATIENCE_S)
    server_s = server.cpu_s()
    together.wait(PATIENCE_S)
    begun_s, ended_s, client_s, each_us = zip(*(received(pipe[0]) for _ in processes), strict=True)
    server_s = server.cpu_s() - server_s
    together.wait(PATIENCE_S)
    for process in processes:
        process.join(PATIENCE_S)
    count = job.count * clients * operations
    call_us = [one_us for some_us in each_us for one_us in some_us]
    timed = {"p50_us": median(call_us)} if call_us else {}
    return timed | {
        "per_s": count / (max(ended_s) - min(begun_s)), "server_us": server_s / count * 1e6,
        "client_us": sum(client_s) / count * 1e6,
        "per_core_s": count / sum(client_s), "both_us": (server_s + sum(client_s)) / count * 1e6,
    }  # fmt: skip


def received(pipe: Connection) -> Any:
    """Return the next object of a pipe; raise TimeoutError if none comes."""
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("a client did not finish")
    return pipe.recv()


@contextmanager
def apart(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, Connection]]:
    """Run a function in a forked process; yield its pid, and the pipe to which it sends as its last
    argument. Kill it at the end of the block."""
    mine, its = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=work, args=(*arguments, its))
    process.start()
    its.close()  # so that the end of the process ends a wait for its result
    assert process.pid is not None
    try:
        yield process.pid, mine
    finally:
        process.kill()
        process.join(PATIENCE_S)
