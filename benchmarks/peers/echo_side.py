"""A bare pyzmq ROUTER that returns each message: what a call through ZeroMQ costs without a
daemon's work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from .side import ROOT, Job, Run, Server, Start, child

MESSAGE = bytes(192)
"""The message has the size of a single add."""


def missing() -> str:
    return ""


@contextmanager
def server(start: Start) -> Iterator[Server]:
    path = start.directory / "echo.sock"
    words = [sys.executable, "-m", "peers.echo_side", f"ipc://{path}"]
    with child(words, path.exists, environment={"PYTHONPATH": str(ROOT / "benchmarks")}) as pid:
        yield Server(path, (pid,))


def ask(server: Server, job: Job) -> Run:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"ipc://{server.address}")
    socket.send(MESSAGE)
    socket.recv()

    def run() -> None:
        for _ in job.paced(range(job.count)):
            socket.send(MESSAGE)
            socket.recv()

    return run


def serve(endpoint: str) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        socket.send_multipart(socket.recv_multipart())


if __name__ == "__main__":
    serve(*sys.argv[1:2])
