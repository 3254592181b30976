"""Attacks of a hostile or broken client on a daemon's sockets, in a process of its own.

python attacker.py ATTACK DIRECTORY NAME [UID]

If root starts it with a UID, the program becomes that user but keeps its primary group, which is
the daemon's group.

It implements ZMTP 3 itself, so that it can send frames that no ZeroMQ library sends. A blow is one
step of an attack. The program prints "ready" after its first blow, or after its first disconnect if
that comes earlier. It connects again after each disconnect. At SIGTERM it prints the number of
blows, and ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import raw_wire as raw

MORE, LONG, COMMAND = 1, 2, 4
GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes((3, 0)) + b"NULL".ljust(20, b"\0") + bytes(32)
PING = struct.pack("<IHHQQIHHIIqQQ", 0x51434750, 1, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
MIB = 2**20
Attack = Callable[[Path], Iterator[None]]
"""An attack on the socket at a path. The generator yields after each blow."""


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return one ZMTP frame."""
    if len(body) > 255:
        return struct.pack(">BQ", flags | LONG, len(body)) + body
    return bytes((flags, len(body))) + body


def ready(kind: bytes, identity: bytes = b"") -> bytes:
    """Return the READY command that ends a handshake."""
    items = ((b"Socket-Type", kind), (b"Identity", identity))
    body = b"".join(
        bytes((len(name),)) + name + struct.pack(">I", len(value)) + value for name, value in items
    )
    return frame(b"\x05READY" + body, COMMAND)


def connect(path: Path) -> socket.socket:
    """Return a connection without a handshake."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(path))
    return connection


def shake_hands(path: Path, kind: bytes = b"DEALER", identity: bytes = b"") -> socket.socket:
    """Return a connection after its handshake. Raises OSError if the daemon refused the
    connection."""
    connection = connect(path)
    connection.sendall(GREETING + ready(kind, identity))
    taken = 0
    while taken <= len(GREETING):
        data = connection.recv(4096)
        if not data:
            raise ConnectionResetError
        taken += len(data)
    return connection


def endless(path: Path, part: bytes) -> Iterator[None]:
    """Send one message that has endlessly many parts."""
    piece = frame(part, MORE) * max(1, MIB // (len(part) + 9))
    connection = shake_hands(path)
    while True:
        connection.sendall(piece)
        yield


def many_parts(path: Path) -> Iterator[None]:
    """Send whole messages of 20,000 parts each."""
    message = frame(b"", MORE) * 19_999 + frame(b"")
    connection = shake_hands(path)
    while True:
        connection.sendall(message)
        yield


def flood(path: Path) -> Iterator[None]:
    """Send requests endlessly, as fast as the socket accepts them, and read the answers."""
    requests = frame(PING) * 1000
    connection = shake_hands(path)
    connection.setblocking(False)
    while True:
        with contextlib.suppress(BlockingIOError):
            connection.send(requests)
            yield
        with contextlib.suppress(BlockingIOError):
            connection.recv(MIB)


def never_read(path: Path) -> Iterator[None]:
    """Send requests, and never read their answers."""
    connection = shake_hands(path)
    while True:
        connection.sendall(frame(PING) * 100)
        yield


def garbage(path: Path) -> Iterator[None]:
    """Send random bytes, before and after the handshake."""
    for seed in itertools.count():
        noise = bytes((seed * 31 + i * i) % 256 for i in range(997))
        for connection in (connect(path), shake_hands(path)):
            with connection, contextlib.suppress(OSError):
                connection.sendall(noise)
                yield
                connection.recv(100)


def half_handshakes(path: Path) -> Iterator[None]:
    """Open more connections than allowed, and finish no handshake."""
    held = []
    with contextlib.suppress(OSError):
        for i in range(1_500):
            held.append(connect(path))
            with contextlib.suppress(OSError):
                held[-1].sendall(GREETING[: i % (len(GREETING) + 1)])
                yield
    tell("held")
    time.sleep(0.5)


def many_connections(path: Path) -> Iterator[None]:
    """Open and close connections at a high rate."""
    while True:
        for connection in [connect(path) for _ in range(50)]:
            connection.sendall(GREETING + ready(b"DEALER"))
            connection.close()
            yield


def long_routing_id(path: Path) -> Iterator[None]:
    """Use a routing id of several megabytes, which precedes every message."""
    connection = shake_hands(path, identity=b"i" * (4 * MIB))
    while True:
        connection.sendall(frame(PING) * 10)
        yield


def claimed_routing_ids(path: Path) -> Iterator[None]:
    """Claim the routing ids that libzmq would assign next, if its numbers were predictable."""
    first = 0x6B8B4567
    held = [shake_hands(path, identity=b"\0" + struct.pack(">I", first + i)) for i in range(200)]
    yield
    time.sleep(3600)
    del held


def empty_messages(path: Path) -> Iterator[None]:
    """Send empty messages, messages of two empty parts, and unknown commands."""
    connection = shake_hands(path)
    while True:
        connection.sendall(frame(b"") + frame(b"", MORE) + frame(b""))
        connection.sendall(frame(b"\x04WHAT", COMMAND) + frame(PING, MORE) + frame(PING))
        yield


def subscription_flood(path: Path) -> Iterator[None]:
    """Subscribe endlessly to new prefixes of maximum length."""
    connection = shake_hands(path, b"SUB")
    for first in itertools.count(0, 500):
        names = (b"\1%0190d" % (first + i) for i in range(500))
        connection.sendall(b"".join(map(frame, names)))
        yield


def deaf_subscriber(path: Path) -> Iterator[None]:
    """Subscribe to everything and never read."""
    connection = shake_hands(path, b"SUB")
    connection.sendall(frame(b"\1"))
    yield
    time.sleep(3600)


def read_frame(connection: socket.socket) -> bytes:
    """Return the next message part that is not a ZMTP command."""
    while True:
        (flags,) = taken(connection, 1)
        size = int.from_bytes(taken(connection, 8 if flags & LONG else 1))
        body = taken(connection, size)
        if not flags & COMMAND:
            return body


def taken(connection: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes. Raises OSError at the end of the stream."""
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise ConnectionResetError
        data += more
    return data


def dear_request(path: Path) -> tuple[socket.socket, bytes]:
    """Return (connection, request). The request has a few kilobytes, and its answer has almost 8
    MiB."""
    connection = connect(path)
    connection.sendall(GREETING + ready(b"DEALER"))
    taken(connection, len(GREETING))
    connection.sendall(frame(raw.frame(raw.HELLO) + os.urandom(16) + bytes(16)))
    session = raw.answer(read_frame(connection)).session
    key = b"dear %d" % os.getuid()
    connection.sendall(frame(raw.batch(session, 1, [raw.put(key, payload=bytes(65_000))])))
    read_frame(connection)
    records = [(raw.record(raw.GET, len(key)), key)] * 125
    return connection, frame(raw.batch(session, 0, records, message=raw.QUERY))


def unread_answers(path: Path) -> Iterator[None]:
    """Request large answers, and read none of them."""
    connection, request = dear_request(path)
    while True:
        connection.sendall(request)
        yield


def dear_requests(path: Path) -> Iterator[None]:
    """Request large answers through many connections at once, and read all of them."""
    first, request = dear_request(path)
    rest = dict.fromkeys([first, *(shake_hands(path) for _ in range(63))], b"")
    for connection in rest:
        connection.setblocking(False)
    while True:
        readable, writable, _ = select.select(rest, rest, [])
        for connection in writable:
            data = rest[connection] or request
            with contextlib.suppress(BlockingIOError):
                rest[connection] = data[connection.send(data) :]
                yield
        for connection in readable:
            connection.recv(MIB)


def published(path: Path) -> Iterator[None]:
    """Send messages to the notice socket, which only sends."""
    connection = shake_hands(path, b"SUB")
    while True:
        connection.sendall((frame(b"") + frame(b"\7" + bytes(200))) * 1000)
        yield


def subscription_churn(path: Path) -> Iterator[None]:
    """Subscribe to the same prefix and unsubscribe from it, repeatedly."""
    connection = shake_hands(path, b"SUB")
    while True:
        connection.sendall((frame(b"\1same") + frame(b"\0same")) * 1000)
        yield


def socket_of(attack: Attack) -> str:
    """Return the name of the socket that an attack targets: "pub" or "cmd"."""
    listening = (subscription_flood, subscription_churn, published, deaf_subscriber)
    return "pub" if attack in listening else "cmd"


ATTACKS: dict[str, Attack] = {
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
    "unread-answers": unread_answers,
    "dear-requests": dear_requests,
    "subscription-flood": subscription_flood,
    "subscription-churn": subscription_churn,
    "published": published,
    "deaf-subscriber": deaf_subscriber,
}


def tell(word: str) -> None:
    """Print a line about the progress, for the test."""
    print(word, flush=True)


def blows_of(attack: Attack, path: Path) -> Iterator[bool]:
    """Repeat the attack; yield True for each blow, False after a disconnect."""
    while True:
        with contextlib.suppress(OSError):
            for _ in attack(path):
                yield True
        yield False
        time.sleep(0.005)


def end_at_sigterm(blows: list[int]) -> None:
    """Wait for SIGTERM in a separate thread.

    A signal handler would not run while the main thread is blocked in a call that began just after
    the signal.
    """
    signal.sigwait({signal.SIGTERM})
    tell(str(blows[0]))
    os._exit(0)


def main(name: str, directory: str, daemon: str, uid: str = "") -> None:
    """Attack until SIGTERM."""
    if uid:
        os.setgroups([])
        os.setuid(int(uid))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    attack, blows = ATTACKS[name], [0]
    threading.Thread(target=end_at_sigterm, args=(blows,), daemon=True).start()
    tries = blows_of(attack, Path(directory) / f"{daemon}.{socket_of(attack)}")
    for number, struck in enumerate(tries):
        blows[0] += struck
        if not number:
            tell("ready")
        if struck and blows[0] == 1:
            tell("struck")


if __name__ == "__main__":
    if os.getppid() == 1:
        sys.exit("the parent process has ended, so nothing would stop this attack")
    main(*sys.argv[1:])
