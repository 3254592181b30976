"""A socket that is full while the process at the other end is killed: the socket of a remote
subscriber, or that of a daemon for remote clients.

Run as a program, because libzmq may abort the process. Prints the number of messages received.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import zmq

from purgatoryd.clients import remote
from purgatoryd.clients.channel import Subscription
from purgatoryd.daemon.listeners import sockets
from purgatoryd.shm_layout import curve

HEARTBEAT_MS = 300
MESSAGE = b"x" * 20_000


def publish(pair: curve.KeyPair, write_fd: int) -> None:
    """Publish messages without an end."""
    socket = zmq.Context().socket(zmq.PUB)
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, pair.secret)
    os.write(write_fd, str(socket.bind_to_random_port("tcp://127.0.0.1")).encode())
    while True:
        socket.send_multipart([b"topic", MESSAGE])
        time.sleep(0.001)


def subscriber(pair: curve.KeyPair, key: Path) -> int:
    """Subscribe, kill the publisher, and receive."""
    read_fd, write_fd = os.pipe()
    if (publisher := os.fork()) == 0:
        publish(pair, write_fd)
    port = int(os.read(read_fd, 10))
    place = remote.Remote(f"127.0.0.1:{port}", pair.public.decode(), key)
    subscription = Subscription(f"tcp://127.0.0.1:{port}", [b""], 1, place)
    end(publisher)
    received = 0
    while subscription.receive() is not None:
        received += 1
        time.sleep(0.001)
    return received


def request(pair: curve.KeyPair, key: Path, port: int) -> None:
    """Send messages without an end."""
    socket = zmq.Context().socket(zmq.DEALER)
    remote.Remote(f"127.0.0.1:{port}", pair.public.decode(), key).equip(socket)
    socket.connect(f"tcp://127.0.0.1:{port}")
    while True:
        socket.send(MESSAGE)


def daemon(pair: curve.KeyPair, key: Path) -> int:
    """Listen, kill the client, and receive."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as free:
        port = free.bind_to_random_port("tcp://127.0.0.1")
    if (client := os.fork()) == 0:
        request(pair, key, port)
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.set(zmq.RCVHWM, 1)
    sockets.listen_tcp(socket, f"tcp://127.0.0.1:{port}", pair, 1 << 20)
    end(client)
    received = 0
    while socket.poll(200):
        received += len(socket.recv_multipart()) == 2
    return received


def end(pid: int) -> None:
    """Kill the other process once the queue is full, and wait until heartbeats would be due."""
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    time.sleep(4 * HEARTBEAT_MS / 1000)


def main(which: str, folder: str) -> None:
    """Print how many messages the full socket had."""
    for module in (remote, sockets):
        module.HEARTBEAT_MS, module.HEARTBEAT_TIMEOUT_MS = HEARTBEAT_MS, 100 * HEARTBEAT_MS  # type: ignore[attr-defined]
    key = Path(folder) / "key"
    print({"subscriber": subscriber, "daemon": daemon}[which](curve.generate(key), key))


if __name__ == "__main__":
    main(*sys.argv[1:])
