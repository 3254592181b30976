"""A block device that fails once, with a file system on it, to test the effects of disk errors.

The device is a loop device over the only file of a small FUSE file system. This program serves the
file system from its own memory. The kernel's page cache is above the device: after a failed write,
the cache contains the bytes but the medium does not. As a program, this module reads orders from
stdin, one JSON object per line, and answers each order with the number of failed calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from machine import needs
from real_daemon import eventually

MIB = 1 << 20
BYTES = 64 * MIB
NAME = b"device"
ROOT, FILE = 1, 2  # inode numbers in FUSE
MAX_WRITE = 1 << 17
MNT_DETACH = 2
IN = struct.Struct("<IIQQIIIHH")
OUT = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
NO_REPLY = {2, 36, 42}  # FORGET, INTERRUPT, BATCH_FORGET


class Refused(Exception):
    """Error of a request that has to fail. Its argument is the errno."""


class Medium:
    """The bytes of the device, and the call that has to fail."""

    def __init__(self) -> None:
        self.data = bytearray(BYTES)
        self._unsynced: list[tuple[int, bytes]] = []  # position and overwritten bytes of each write
        self._marker, self._call, self._armed = b"", "", False
        self.failed = 0

    def order(self, call: str, marker: str) -> None:
        """Plan a failure. "write": the next write that contains `marker` fails; "sync": the next
        sync after such a write fails."""
        self._call, self._marker, self._armed = call, marker.encode(), False

    def write(self, at: int, data: memoryview) -> None:
        """Write `data` at a position, or raise Refused and write nothing."""
        if self._marker and self._marker in bytes(data):
            self._armed = True
            if self._call == "write":
                self._fail()
        self._unsynced.append((at, bytes(self.data[at : at + len(data)])))
        self.data[at : at + len(data)] = data

    def sync(self) -> None:
        """Sync, or raise Refused and undo all writes since the last sync."""
        unsynced, self._unsynced = self._unsynced, []
        if self._armed and self._call == "sync":
            for at, before in reversed(unsynced):
                self.data[at : at + len(before)] = before
            self._fail()

    def _fail(self) -> None:
        self._call, self._marker, self._armed = "", b"", False
        self.failed += 1
        raise Refused(errno.EIO)


def attributes(node: int) -> bytes:
    """Return the struct fuse_attr of an inode."""
    mode, size = (stat.S_IFDIR | 0o700, 0) if node == ROOT else (stat.S_IFREG | 0o600, BYTES)
    return ATTRIBUTES.pack(node, size, size // 512, *[0] * 6, mode, 1, 0, 0, 0, 4096, 0)


class Server:
    """The FUSE server, which answers the kernel's requests as in <linux/fuse.h>."""

    def __init__(self, fd: int, medium: Medium) -> None:
        self._fd, self._medium = fd, medium

    def serve(self) -> None:
        """Read one request of the kernel, and answer it."""
        request = os.read(self._fd, MAX_WRITE + 8192)
        _, opcode, unique, node, *_ = IN.unpack_from(request)
        if opcode in NO_REPLY:
            return
        body, error = b"", 0
        try:
            body = self._answer(opcode, node, memoryview(request)[IN.size :])
        except Refused as refused:
            error = -refused.args[0]
        os.writev(self._fd, [OUT.pack(OUT.size + len(body), error, unique), body])

    def _answer(self, opcode: int, node: int, body: memoryview) -> bytes:
        match opcode:
            case 1:  # LOOKUP
                if bytes(body).rstrip(b"\0") != NAME:
                    raise Refused(errno.ENOENT)
                return struct.pack("<QQQQII", FILE, 0, 1, 1, 0, 0) + attributes(FILE)
            case 3 | 4:  # GETATTR, SETATTR
                return struct.pack("<QII", 1, 0, 0) + attributes(node)
            case 14 | 27:  # OPEN with FOPEN_DIRECT_IO, OPENDIR
                return struct.pack("<QII", 1, 1 if opcode == 14 else 0, 0)
            case 15:  # READ
                _, at, size = struct.unpack_from("<QQI", body)
                return bytes(self._medium.data[at : at + size])
            case 16:  # WRITE
                _, at, size = struct.unpack_from("<QQI", body)
                self._medium.write(at, body[40 : 40 + size])
                return struct.pack("<II", size, 0)
            case 17:  # STATFS
                return struct.pack("<5Q10I", 1, 0, 0, 1, 0, 4096, 255, 4096, *[0] * 7)
            case 20:  # FSYNC
                self._medium.sync()
            case 18 | 25 | 29 | 38:  # RELEASE, FLUSH, RELEASEDIR, DESTROY
                pass
            case 26:  # INIT
                return struct.pack(
                    "<IIIIHHIIHHI", 7, 31, 0, 0, 16, 12, MAX_WRITE, 1, 32, 0, 0
                ) + bytes(28)
            case _:
                raise Refused(errno.ENOSYS)
        return b""


def serve(folder: str) -> None:
    """Serve until stdin ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd, medium = os.open("/dev/fuse", os.O_RDWR), Medium()
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"faulty", folder.encode(), b"fuse.faulty", ctypes.c_ulong(0), options):
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    server = Server(fd, medium)
    print("mounted", flush=True)
    try:
        while True:
            if fd in (ready := select.select([fd, 0], [], [])[0]):
                server.serve()
            elif ready:
                if not (line := os.read(0, 4096)):
                    return
                if order := json.loads(line):
                    medium.order(**order)
                print(medium.failed, flush=True)
    except OSError as error:
        if error.errno != errno.ENODEV:  # ENODEV: the file system was unmounted
            raise
    finally:
        libc.umount2(folder.encode(), MNT_DETACH)


# ---- for tests -------------------------------------------------------------------------------


class FaultyDevice:
    """A loop device with an ext4 file system. The test chooses the call that fails."""

    def __init__(self, process: subprocess.Popen[str], device: str, folder: Path) -> None:
        self._process, self._device, self.folder = process, device, folder

    def fail(self, call: str, marker: str) -> None:
        """Let a call fail. "write": the next write that contains `marker`; "sync": the next sync
        after such a write."""
        self._ask({"call": call, "marker": marker})

    @property
    def failed(self) -> int:
        """Return the number of failed calls."""
        return self._ask({})

    def _ask(self, order: dict[str, str]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def mount(self) -> None:
        """Mount the file system at `folder`."""
        run("mount", "-t", "ext4", self._device, str(self.folder))

    def unmount(self) -> None:
        """Unmount the file system, which writes dirty pages and drops the page cache.

        Repeat it while the file system is busy: a child of a killed daemon may still use it for a
        moment.
        """
        eventually(lambda: unmounted(self.folder))


def unmounted(folder: Path) -> bool:
    done = subprocess.run(
        ("umount", os.fspath(folder)), stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0 or "busy" in done.stderr, done.stderr
    return done.returncode == 0


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@contextlib.contextmanager
def faulty_device(path: Path, features: str = "^has_journal") -> Iterator[FaultyDevice]:
    """Yield a device. Its ext4 file system, with these features, is mounted below `path`."""
    needs("faulty")
    needs("mkfs")
    below, folder = path / "fuse", path / "disk"
    below.mkdir()
    folder.mkdir()
    with contextlib.ExitStack() as held:
        process = held.enter_context(
            subprocess.Popen(
                [sys.executable, __file__, str(below)], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
        )  # fmt: skip
        held.callback(process.terminate)
        assert process.stdout is not None
        assert process.stdout.readline() == "mounted\n"
        held.callback(run, "umount", "-l", str(below))
        device = run("losetup", "--find", "--show", str(below / NAME.decode())).strip()
        held.callback(run, "losetup", "--detach", device)
        run("mkfs.ext4", "-q", "-O", features, device)
        found = FaultyDevice(process, device, folder)
        found.mount()
        held.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)
        yield found


if __name__ == "__main__":
    serve(sys.argv[1])
