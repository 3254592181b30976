"""Serve past notices and figures: the process that answers REPLAY and STATS, and its start.

The loop of the daemon does not read past notices. A REPLAY message on the command socket makes the
loop start this process, which has a socket of its own (NAME.back, and a tcp port). It reads the
replay buffer as any reader of the arena does, and the files of the WAL (past_notices.py). Each
reply is one page of bounded size, and the client asks for the next page, so that a slow client
costs nothing. The process has a low priority and short time slices, keeps away from the CPU of the
loop, and ends with the daemon.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.listeners.access import Access
from purgatoryd.daemon.listeners.sockets import accept_only, listen_at, listen_tcp
from purgatoryd.daemon.listeners.whole_messages import send_whole
from purgatoryd.daemon.listeners.zap import DOMAIN, ENDPOINT, NOBODY
from purgatoryd.daemon.log import log
from purgatoryd.daemon.parent import end_with
from purgatoryd.daemon.past_notices import MOST, PastNotices
from purgatoryd.daemon.snapshot import leave_the_loop, lower_priority
from purgatoryd.daemon.wal import wal_directory
from purgatoryd.shm_layout import curve, wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import ProtocolError, PurgatorydError
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.layout import (
    NOTICE_MAGIC,
    WIRE_MAGIC,
    WIRE_VERSION,
    ArenaState,
    CursorRefusal,
    Message,
    WireError,
)
from purgatoryd.shm_layout.paths import Paths
from purgatoryd.shm_layout.shm import ArenaFile
from purgatoryd.shm_layout.wal import has_stopped

PAGE_BYTES = 512 * 1024
"""Largest page of notices, in bytes; more than the largest notice has."""
REQUEST_MAX = 1024
REQUEST_HWM, REPLY_HWM = 16, 64
IDLE_MS = 2000
COMMIT_S, POLL_S = 2.0, 0.005
"""Longest wait for the disk before a notice counts as lost, and the pause between two looks."""
_NIL = 0xFFFFFFFF


# ---- in the daemon --------------------------------------------------------------------------


class ReplayServer:
    """The process that serves past notices, in the daemon. It is started on request."""

    def __init__(self, config: Config, paths: Paths) -> None:
        self._config = config
        self._paths = paths
        self._process: subprocess.Popen[bytes] | None = None
        self._bound = False
        """True once the socket of the process was there."""

    def start(self) -> None:
        """Start the process, unless it runs."""
        process = self._process
        if process is not None and process.poll() is None:
            there = self._paths.back.exists()
            if there or not self._bound:
                self._bound = there
                return
            self.close()  # its socket was removed
        self._bound = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "purgatoryd.daemon.replay_server", self._arguments()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def reread(self) -> None:
        """Let the process read the list of tcp keys again: the next request starts another one."""
        if self._config.tcp:
            self.close()

    def _arguments(self) -> str:
        access, config = Access.of(self._config), self._config
        return json.dumps(
            {
                "daemon": os.getpid(), "name": config.name, "arena": self._paths.arena,
                "back": str(self._paths.back), "wal": str(wal_directory(config) or ""),
                "tcp": config.tcp, "server_key": config.server_key,
                "keys": str(Path(config.keys).absolute()),
                "access": {
                    name: value if isinstance(value, bool) else sorted(value)
                    for name, value in asdict(access).items()
                },
            }
        )  # fmt: skip

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            with suppress(OSError):
                self._paths.back.unlink()


# ---- pages ----------------------------------------------------------------------------------


class Refused(Exception):
    """A REPLAY message gets this error. `error`, `detail`: as in struct pg_frame."""

    def __init__(self, error: WireError, detail: tuple[int, int] = (0, 0)) -> None:
        super().__init__(error)
        self.error = error
        self.detail = detail


class Place(NamedTuple):
    """The topic of a REPLAY message, and the range that is to be read."""

    row: int
    incarnation: int
    first: int
    last: int


class Pages:
    """Pages of past notices of one daemon."""

    def __init__(self, arena: str, directory: Path | None, host: Host = HOST) -> None:
        self._name = arena
        self._host = host
        self._reader = Reader(ArenaFile.open(arena, read_only=True))
        self._past = None if directory is None else PastNotices(directory, host)
        self._out = bytearray(PAGE_BYTES)
        self._positions = ffi.new("uint64_t[]", MOST)

    def page(self, asked: wire.PastRange) -> bytes:
        """Return the body of the reply. Raises Refused, PurgatorydError."""
        reader = self._current()
        epoch = reader.epoch
        place = self._place(reader, asked)
        answer = self._read(reader, place)
        if reader.state != ArenaState.READY or reader.epoch != epoch:
            raise Refused(WireError.STOPPING)
        return answer

    def stats(self) -> bytes:
        """Return the figures of the whole daemon as JSON. Raises Refused, PurgatorydError."""
        return json.dumps(self._current().stats()).encode()

    def _current(self) -> Reader:
        """Return the reader of the daemon's arena, whose file may have been replaced."""
        if self._reader.retired or not self._reader.file.has_name:
            before = self._reader
            self._reader = Reader(ArenaFile.open(self._name, read_only=True))
            before.close()
        if self._reader.state != ArenaState.READY:
            raise Refused(WireError.STOPPING)
        return self._reader

    def _place(self, reader: Reader, asked: wire.PastRange) -> Place:
        row = reader.topic_row(asked.namespace, asked.topic)
        topic = None if row == _NIL else reader.topic_at(row)
        stale = asked.stream_id not in (0, reader.stream_id)
        if topic is not None:
            stale |= asked.incarnation not in (0, topic.incarnation)
        if stale:
            raise Refused(WireError.CURSOR, (CursorRefusal.STALE, reader.stream_id))
        if topic is None:
            return Place(_NIL, 0, asked.first, 0)
        newest = int(lib.pg_newest(reader.struct, row))
        return Place(row, topic.incarnation, asked.first, min(asked.last, newest))

    def _read(self, reader: Reader, place: Place) -> bytes:
        row, first, last = place.row, place.first, place.last
        if first > last:
            return _reply(first - 1, first, bytes(ffi.buffer(_head(reader, place))))
        lost, got, out = ffi.new("uint64_t *"), ffi.new("uint64_t *"), self._out
        used = lib.pg_replay(
            reader.struct, row, first, min(last, first + MOST - 1), self._positions,
            ffi.from_buffer(out), len(out), lost, got,
        )  # fmt: skip
        lost_until = int(lost[0])
        if lost_until >= first:
            head = _head(reader, place)
            count = self._from_wal(reader, place, lost_until, head)
            if count:
                after = int(head.first) + int(head.count)
                return _reply(int(head.first) - 1, after, bytes(memoryview(out)[:count]))
            used = 0  # the call has used `out`: the client asks for the rest
        if used == 0:
            until = max(lost_until, first - 1)
            return _reply(until, until + 1, bytes(ffi.buffer(_head(reader, place))))
        return _reply(first - 1, int(got[0]) + 1, bytes(memoryview(out)[:used]))

    def _from_wal(self, reader: Reader, place: Place, last: int, head: Any) -> int:
        """Write notices that the replay buffer has dropped to `out`. Return the number of bytes."""
        if self._past is None:
            return 0
        for waits in (False, True):
            if waits:
                self._await_commit(reader)
                self._past.look()
            used = self._past.page(
                reader, place.row, place.incarnation, place.first, last, head,
                ffi.from_buffer(self._out),
            )  # fmt: skip
            if used and int(head.first) == place.first:
                return used
        return used

    def _await_commit(self, reader: Reader) -> None:
        """Wait until the records of all dropped notices are on disk."""
        wal_buffer = reader.wal_buffer
        if wal_buffer is None:
            return
        lsn, until_s = int(wal_buffer.next_lsn) - 1, self._host.monotonic_s() + COMMIT_S
        while int(wal_buffer.committed_lsn) < lsn and self._host.monotonic_s() < until_s:
            if has_stopped(wal_buffer):
                return
            self._sleep(POLL_S)

    def _sleep(self, wait_s: float) -> None:
        time.sleep(wait_s)

    def idle(self) -> None:
        """Drop the maps of deleted files."""
        if self._past is not None:
            self._past.look()


def _head(reader: Reader, place: Place) -> Any:
    header, known = reader.header, place.row != _NIL
    return ffi.new(
        "struct pg_notices *",
        {
            "magic": NOTICE_MAGIC, "version": WIRE_VERSION, "stream_id": reader.stream_id,
            "incarnation": place.incarnation, "first": place.first,
            "tail": int(lib.pg_newest(reader.struct, place.row)) if known else 0,
            "built_ns": header.now_ns, "wall_offset_ns": header.wall_offset_ns,
        },
    )  # fmt: skip


def _reply(lost_until: int, following: int, body: bytes) -> bytes:
    return wire.REPLAY_INFO.pack(lost_until, following) + body


# ---- the process ----------------------------------------------------------------------------


class Listener:
    """The socket of the process, and the handler that admits tcp clients."""

    def __init__(self, given: dict[str, Any]) -> None:
        may = given["access"]
        admins, uids, gids = (frozenset(may[name]) for name in ("admins", "uids", "gids"))
        access = Access(admins, uids, gids, may["everybody"])
        self._context = zmq.Context()
        self._access = access
        self._keys: dict[bytes, int] = {}
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ENDPOINT)
        self.socket = socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0), (zmq.MAXMSGSIZE, REQUEST_MAX), (zmq.SNDHWM, REPLY_HWM),
            (zmq.RCVHWM, REQUEST_HWM), (zmq.HANDSHAKE_IVL, 10_000),
        ):  # fmt: skip
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        accept_only(socket, access)
        if given["tcp"]:
            self._keys = curve.read_allowed(Path(given["keys"]))
            pair, place = curve.read_pair(Path(given["server_key"])), curve.place(given["tcp"])
            listen_tcp(socket, place.past, pair, REQUEST_MAX)
        back = Path(given["back"])
        back.unlink(missing_ok=True)
        listen_at(socket, back)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._zap, zmq.POLLIN)

    def wait(self) -> bool:
        """Wait for a request, and admit clients meanwhile. Returns False if none came for
        IDLE_MS."""
        ready = dict(self._poller.poll(IDLE_MS))
        if self._zap in ready:
            self._admit(self._zap.recv_multipart())
        return bool(ready)

    def _admit(self, frames: list[bytes]) -> None:
        """Answer a handshake. libzmq itself checks the uid of an ipc client."""
        version, number, _, _, _, mechanism, *credentials = frames
        admitted = mechanism != b"CURVE"
        if not admitted:
            uid = self._keys.get(credentials[0])
            admitted = uid is not None and self._access.may_connect(uid, NOBODY)
        status = b"200" if admitted else b"400"
        send_whole(self._zap, version, number, status, b"", b"", b"")

    def receive(self) -> list[bytes] | None:
        """Return route and body of the next request; None if there is none."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return frames if len(frames) == 2 else []


def answer(pages: Pages, body: bytes) -> bytes:
    """Return the reply to one message. Never raises: bad bytes get an error."""
    kind, session, sequence = 0, 0, 0
    try:
        if len(body) < wire.FRAME.size:
            raise Refused(WireError.MALFORMED, (len(body), wire.FRAME.size))
        magic, version, kind, session, sequence, *_ = wire.FRAME.unpack_from(body)
        _check_frame(magic, version, kind)
        page, error, detail = _body(pages, kind, body[wire.FRAME.size :]), WireError.NONE, (0, 0)
    except Refused as refusal:
        page, error, detail = b"", refusal.error, refusal.detail
    except ProtocolError:
        page, error, detail = b"", WireError.MALFORMED, (len(body), 0)
    except (PurgatorydError, OSError) as failure:
        log.warning(f"past notices cannot be read: {failure}")
        page, error, detail = b"", WireError.STOPPING, (0, 0)
    return wire.encode_frame(kind, session, sequence, error=error, detail=detail) + page


def _body(pages: Pages, kind: int, body: bytes) -> bytes:
    """Return the body of the reply to a message. Raises Refused, PurgatorydError."""
    if kind == Message.STATS:
        if body:
            raise Refused(WireError.MALFORMED, (wire.FRAME.size + len(body), wire.FRAME.size))
        return pages.stats()
    asked = wire.decode_replay_ask(body)
    if asked.first == 0:
        raise Refused(WireError.MALFORMED, (wire.FRAME.size, 0))
    return pages.page(asked)


def _check_frame(magic: int, version: int, kind: int) -> None:
    if magic != WIRE_MAGIC:
        raise Refused(WireError.MALFORMED, (0, magic))
    if version != WIRE_VERSION:
        raise Refused(WireError.VERSION, (WIRE_VERSION, version))
    if kind not in (Message.REPLAY, Message.STATS):
        raise Refused(WireError.UNKNOWN_MESSAGE, (kind, 0))


def _serve(listener: Listener, pages: Pages) -> None:
    while True:
        if not listener.wait():
            pages.idle()
        while (frames := listener.receive()) is not None:
            if frames:
                with suppress(zmq.ZMQError):  # the client is gone or does not read: it asks again
                    send_whole(listener.socket, frames[0], answer(pages, frames[1]))


def _main(arguments: str) -> int:
    given = json.loads(arguments)
    end_with(given["daemon"])
    lower_priority()
    log.set_up("warning", name=given["name"])
    try:
        leave_the_loop(given["daemon"])
        pages = Pages(given["arena"], Path(given["wal"]) if given["wal"] else None)
        _serve(Listener(given), pages)
    except (OSError, PurgatorydError, zmq.ZMQError) as error:
        log.error(f"past notices are not served: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
