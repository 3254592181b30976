"""beanstalkd: timers as delayed jobs, with a resolution of a second; greenstalk as the client."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .side import PAYLOAD, Job, Run, Server, Start, boot_ns, child, lacking, program, stamp, stamped


def missing() -> str:
    return lacking(["beanstalkd"], ["greenstalk"])


def serves(path: Path) -> bool:
    """Return whether a server answers; it does so after it has read its log."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        probe.sendall(b"list-tube-used\r\n")
        return probe.recv(64).startswith(b"USING")
    return False


@contextmanager
def server(start: Start) -> Iterator[Server]:
    path = start.directory / "beanstalkd.sock"
    path.unlink(missing_ok=True)
    words = [str(program("beanstalkd")), "-l", f"unix:{path}"]
    if start.log:
        words += ["-b", str(start.files), "-f", "0" if start.log == "always" else "1000"]
    with child(words, lambda: serves(path)) as pid:
        yield Server(path, (pid,))


def memory_bytes(server: Server) -> int:
    return server.memory_bytes()


def connected(server: Server) -> Any:
    import greenstalk

    return greenstalk.Client(str(server.address), encoding=None)


def add(server: Server, job: Job) -> Run:
    c = connected(server)
    jobs = [(key + PAYLOAD, int(delay_s)) for key, delay_s in job.timers()]

    def run() -> None:
        for body, delay_s in job.paced(jobs):
            c.put(body, delay=delay_s)

    return run


def cancel(server: Server, job: Job) -> Run:
    import greenstalk

    c = connected(server)
    jobs = [
        greenstalk.Job(c.put(key + PAYLOAD, delay=int(delay_s)), b"")
        for key, delay_s in job.timers()
    ]

    def run() -> None:
        for one in jobs:
            c.delete(one)

    return run


def arm(server: Server, deadlines_ns: list[int], first: int = 0) -> None:
    """Put jobs with the shortest delay that ends at or after the deadline."""
    c = connected(server)
    for number, due_ns in enumerate(deadlines_ns, first):
        delay_s = max(0, -(-(due_ns - boot_ns()) // 10**9))
        c.put(b"%016d" % number + stamped(due_ns), delay=delay_s)


def reserved(server: Server) -> Iterator[tuple[int, int]]:
    """Reserve and delete one job after another. Yields as ours.subscribed does."""
    c = connected(server)
    yield 0, 0
    while True:
        job = c.reserve()
        yield boot_ns(), stamp(job.body[16:])
        c.delete(job)


class Pipeline:
    """A connection that sends many requests of beanstalkd's text protocol before it reads the
    first answer."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._answers = self._socket.makefile("rb", buffering=1 << 16)

    def put(self, bodies: Sequence[bytes]) -> None:
        """Put jobs without a delay."""
        puts = (b"put 1 0 60 %d\r\n%b\r\n" % (len(body), body) for body in bodies)
        self._socket.sendall(b"".join(puts))
        for _ in bodies:
            self._expect(b"INSERTED")

    def reserve(self, most: int) -> list[tuple[bytes, bytes]]:
        """Return (id, body) of at most `most` jobs. Wait up to a second for the first one."""
        self._socket.sendall(
            b"reserve-with-timeout 1\r\n" + (most - 1) * b"reserve-with-timeout 0\r\n"
        )
        found = []
        for _ in range(most):
            words = self._answers.readline().split()
            if words[0] == b"RESERVED":
                found.append((words[1], self._answers.read(int(words[2]) + 2)[:-2]))
            elif words[0] != b"TIMED_OUT":
                raise ValueError(words)
        return found

    def delete(self, names: Sequence[bytes]) -> None:
        """Delete reserved jobs."""
        self._socket.sendall(b"".join(b"delete %b\r\n" % name for name in names))
        for _ in names:
            self._expect(b"DELETED")

    def _expect(self, word: bytes) -> None:
        answer = self._answers.readline()
        if not answer.startswith(word):
            raise ValueError(answer)
