"""What a hostile or broken client does to a daemon's sockets: run as a process of its own.

    python attacker.py ATTACK DIRECTORY NAME [UID]

As root with a UID it becomes that user, but stays in its own group: a member of the daemon's.

It speaks ZMTP 3 by hand, so it can say what no ZeroMQ library says. It prints "ready" when it
has begun, goes on until it is killed, and connects again whenever it is cut off.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MORE, LONG, COMMAND = 1, 2, 4
GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes((3, 0)) + b"NULL".ljust(20, b"\0") + bytes(32)
PING = struct.pack("<IHHQQIHHIIqQQ", 0x51434750, 1, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
MIB = 2**20


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame as ZMTP writes it."""
    if len(body) > 255:
        return struct.pack(">BQ", flags | LONG, len(body)) + body
    return bytes((flags, len(body))) + body


def ready(kind: bytes, identity: bytes = b"") -> bytes:
    """The READY command that ends a handshake."""
    items = ((b"Socket-Type", kind), (b"Identity", identity))
    body = b"".join(
        bytes((len(name),)) + name + struct.pack(">I", len(value)) + value for name, value in items
    )
    return frame(b"\x05READY" + body, COMMAND)


def connect(path: Path) -> socket.socket:
    """A bare connection."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(path))
    return connection


def shake_hands(path: Path, kind: bytes = b"DEALER", identity: bytes = b"") -> socket.socket:
    """A connection that is through with its handshake. Raises OSError if it was refused."""
    connection = connect(path)
    connection.sendall(GREETING + ready(kind, identity))
    taken = 0
    while taken <= len(GREETING):
        data = connection.recv(4096)
        if not data:
            raise ConnectionResetError
        taken += len(data)
    return connection


def endless(path: Path, part: bytes) -> None:
    """One message whose parts never end."""
    piece = frame(part, MORE) * max(1, MIB // (len(part) + 9))
    connection = shake_hands(path)
    while True:
        connection.sendall(piece)


def many_parts(path: Path) -> None:
    """Whole messages, of 20,000 parts each."""
    message = frame(b"", MORE) * 19_999 + frame(b"")
    connection = shake_hands(path)
    while True:
        connection.sendall(message)


def flood(path: Path) -> None:
    """Requests without end, as fast as the socket takes them; the answers are read."""
    requests = frame(PING) * 1000
    connection = shake_hands(path)
    connection.setblocking(False)
    while True:
        with contextlib.suppress(BlockingIOError):
            connection.send(requests)
        with contextlib.suppress(BlockingIOError):
            connection.recv(MIB)


def never_read(path: Path) -> None:
    """Requests whose answers are never read."""
    connection = shake_hands(path)
    while True:
        connection.sendall(frame(PING) * 100)


def garbage(path: Path) -> None:
    """Bytes that mean nothing, before and after the handshake."""
    for seed in itertools.count():
        noise = bytes((seed * 31 + i * i) % 256 for i in range(997))
        for connection in (connect(path), shake_hands(path)):
            with connection, contextlib.suppress(OSError):
                connection.sendall(noise)
                connection.recv(100)


def half_handshakes(path: Path) -> None:
    """Connections that never finish what they began: as many as there may be, and more."""
    held = []
    with contextlib.suppress(OSError):
        for i in range(1_500):
            held.append(connect(path))
            with contextlib.suppress(OSError):
                held[-1].sendall(GREETING[: i % (len(GREETING) + 1)])
    announce()
    time.sleep(0.5)


def many_connections(path: Path) -> None:
    """Connections that come and go, faster than anybody needs them."""
    while True:
        for connection in [connect(path) for _ in range(50)]:
            connection.sendall(GREETING + ready(b"DEALER"))
            connection.close()


def long_routing_id(path: Path) -> None:
    """A routing id of megabytes, which goes before every message."""
    connection = shake_hands(path, identity=b"i" * (4 * MIB))
    while True:
        connection.sendall(frame(PING) * 10)


def claimed_routing_ids(path: Path) -> None:
    """Takes the routing ids that libzmq would give next, were its numbers to be foreseen."""
    first = 0x6B8B4567
    held = [shake_hands(path, identity=b"\0" + struct.pack(">I", first + i)) for i in range(200)]
    announce()
    time.sleep(3600)
    del held


def empty_messages(path: Path) -> None:
    """Messages of nothing, of two empty parts, and commands that nobody knows."""
    connection = shake_hands(path)
    while True:
        connection.sendall(frame(b"") + frame(b"", MORE) + frame(b""))
        connection.sendall(frame(b"\x04WHAT", COMMAND) + frame(PING, MORE) + frame(PING))


def subscription_flood(path: Path) -> None:
    """Prefixes without end, each of them new and as long as may be."""
    connection = shake_hands(path, b"SUB")
    for first in itertools.count(0, 500):
        names = (b"\1%0190d" % (first + i) for i in range(500))
        connection.sendall(b"".join(map(frame, names)))


def deaf_subscriber(path: Path) -> None:
    """Subscribes to everything and never reads."""
    connection = shake_hands(path, b"SUB")
    connection.sendall(frame(b"\1"))
    announce()
    time.sleep(3600)


def of_lane(attack: Callable[[Path], None]) -> str:
    """Which socket an attack is for."""
    return "pub" if attack in (subscription_flood, deaf_subscriber) else "cmd"


ATTACKS: dict[str, Callable[[Path], None]] = {
    "endless-large": lambda path: endless(path, bytes(MIB)),
    "endless-small": lambda path: endless(path, b""),
    "many-parts": many_parts,
    "flood": flood,
    "never-read": never_read,
    "garbage": garbage,
    "half-handshakes": half_handshakes,
    "many-connections": many_connections,
    "long-routing-id": long_routing_id,
    "claimed-routing-ids": claimed_routing_ids,
    "empty-messages": empty_messages,
    "subscription-flood": subscription_flood,
    "deaf-subscriber": deaf_subscriber,
}


def announce() -> None:
    """Tells the test that the attack is under way."""
    print("ready", flush=True)


def main(name: str, directory: str, daemon: str, uid: str = "") -> Iterator[None]:
    """The attack, again and again."""
    if uid:
        os.setgroups([])
        os.setuid(int(uid))
    attack = ATTACKS[name]
    path = Path(directory) / f"{daemon}.{of_lane(attack)}"
    while True:
        with contextlib.suppress(OSError):
            attack(path)
        yield


if __name__ == "__main__":
    if os.getppid() == 1:
        sys.exit("nobody is there to end this")
    announce()
    for _ in main(*sys.argv[1:]):
        time.sleep(0.005)
