"""Our side, with a daemon and clients that look for messages before they sleep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from own_daemon import own_daemon

from . import ours
from .side import Job, Run, Server, Start

DAEMON_SPIN, CLIENT_SPIN_US = "50us", 200

missing = ours.missing


@contextmanager
def server(start: Start) -> Iterator[Server]:
    settings = [*ours.settings(start), "--busy-poll", DAEMON_SPIN]
    with own_daemon(start.directory, ours.NAME, settings) as pid:
        yield Server(start.directory, (pid,))


def add(server: Server, job: Job) -> Run:
    return ours.add(ours.client(server, "ring", spin_us=CLIENT_SPIN_US), job)
