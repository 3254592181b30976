"""What a hostile or broken client does to a daemon's sockets: run as a process of its own.

    python attacker.py ATTACK DIRECTORY NAME [UID]

As root with a UID it becomes that user, but stays in its own group: a member of the daemon's.

It speaks ZMTP 3 by hand, so it can say what no ZeroMQ library says. It prints "ready" after its
first blow, or when it was cut off before; it goes on until a SIGTERM, connects again whenever it is
cut off, and prints at its end how many blows there were.
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
"""What is done to the socket at a path, blow by blow."""


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


def endless(path: Path, part: bytes) -> Iterator[None]:
    """One message whose parts never end."""
    piece = frame(part, MORE) * max(1, MIB // (len(part) + 9))
    connection = shake_hands(path)
    while True:
        connection.sendall(piece)
        yield


def many_parts(path: Path) -> Iterator[None]:
    """Whole messages, of 20,000 parts each."""
    message = frame(b"", MORE) * 19_999 + frame(b"")
    connection = shake_hands(path)
    while True:
        connection.sendall(message)
        yield


def flood(path: Path) -> Iterator[None]:
    """Requests without end, as fast as the socket takes them; the answers are read."""
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
    """Requests whose answers are never read."""
    connection = shake_hands(path)
    while True:
        connection.sendall(frame(PING) * 100)
        yield


def garbage(path: Path) -> Iterator[None]:
    """Bytes that mean nothing, before and after the handshake."""
    for seed in itertools.count():
        noise = bytes((seed * 31 + i * i) % 256 for i in range(997))
        for connection in (connect(path), shake_hands(path)):
            with connection, contextlib.suppress(OSError):
                connection.sendall(noise)
                yield
                connection.recv(100)


def half_handshakes(path: Path) -> Iterator[None]:
    """Connections that never finish what they began: as many as there may be, and more."""
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
    """Connections that come and go, faster than anybody needs them."""
    while True:
        for connection in [connect(path) for _ in range(50)]:
            connection.sendall(GREETING + ready(b"DEALER"))
            connection.close()
            yield


def long_routing_id(path: Path) -> Iterator[None]:
    """A routing id of megabytes, which goes before every message."""
    connection = shake_hands(path, identity=b"i" * (4 * MIB))
    while True:
        connection.sendall(frame(PING) * 10)
        yield


def claimed_routing_ids(path: Path) -> Iterator[None]:
    """Takes the routing ids that libzmq would give next, were its numbers to be foreseen."""
    first = 0x6B8B4567
    held = [shake_hands(path, identity=b"\0" + struct.pack(">I", first + i)) for i in range(200)]
    yield
    time.sleep(3600)
    del held


def empty_messages(path: Path) -> Iterator[None]:
    """Messages of nothing, of two empty parts, and commands that nobody knows."""
    connection = shake_hands(path)
    while True:
        connection.sendall(frame(b"") + frame(b"", MORE) + frame(b""))
        connection.sendall(frame(b"\x04WHAT", COMMAND) + frame(PING, MORE) + frame(PING))
        yield


def subscription_flood(path: Path) -> Iterator[None]:
    """Prefixes without end, each of them new and as long as may be."""
    connection = shake_hands(path, b"SUB")
    for first in itertools.count(0, 500):
        names = (b"\1%0190d" % (first + i) for i in range(500))
        connection.sendall(b"".join(map(frame, names)))
        yield


def deaf_subscriber(path: Path) -> Iterator[None]:
    """Subscribes to everything and never reads."""
    connection = shake_hands(path, b"SUB")
    connection.sendall(frame(b"\1"))
    yield
    time.sleep(3600)


def read_frame(connection: socket.socket) -> bytes:
    """The next message that is no command."""
    while True:
        (flags,) = taken(connection, 1)
        size = int.from_bytes(taken(connection, 8 if flags & LONG else 1))
        body = taken(connection, size)
        if not flags & COMMAND:
            return body


def taken(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes. Raises OSError at their end."""
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise ConnectionResetError
        data += more
    return data


def dear_request(path: Path) -> tuple[socket.socket, bytes]:
    """A connection, and a request of a few kilobytes whose answer has almost 8 MiB."""
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
    """Large answers, none of which is read."""
    connection, request = dear_request(path)
    while True:
        connection.sendall(request)
        yield


def dear_requests(path: Path) -> Iterator[None]:
    """Large answers through many connections at once; all are read."""
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
    """Messages to the socket that sends them."""
    connection = shake_hands(path, b"SUB")
    while True:
        connection.sendall((frame(b"") + frame(b"\7" + bytes(200))) * 1000)
        yield


def subscription_churn(path: Path) -> Iterator[None]:
    """The same prefixes, subscribed to and given up, again and again."""
    connection = shake_hands(path, b"SUB")
    while True:
        connection.sendall((frame(b"\1same") + frame(b"\0same")) * 1000)
        yield


def socket_of(attack: Attack) -> str:
    """Which socket an attack is for."""
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
    """A line for the test: how far the attack has come."""
    print(word, flush=True)


def blows_of(attack: Attack, path: Path) -> Iterator[bool]:
    """The attack, again and again: true for each blow, false where it was cut off."""
    while True:
        with contextlib.suppress(OSError):
            for _ in attack(path):
                yield True
        yield False
        time.sleep(0.005)


def end_at_sigterm(blows: list[int]) -> None:
    """Waits for the signal in a thread of its own: a handler would not run while the attack hangs
    in a call that began just after the signal came."""
    signal.sigwait({signal.SIGTERM})
    tell(str(blows[0]))
    os._exit(0)


def main(name: str, directory: str, daemon: str, uid: str = "") -> None:
    """Attacks until the process is to end."""
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
        sys.exit("nobody is there to end this")
    main(*sys.argv[1:])
