"""A virtual machine that writes a WAL and is killed: no acknowledged record is lost.

The machine's only process is guest/power_cut.c. At each boot it reads the WAL, checks it, and
appends records. At a random moment SIGKILL ends the machine. Data that the guest's kernel has not
written are lost. The disk keeps random sectors of the writes since the last flush. The process also
writes a file without sync, which shows whether a cut loses anything. $POWER_CUTS sets the number of
cuts.
"""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from guest_machine import cpio_end, cpio_entry, kernels, running
from machine import needs

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).resolve().parent.parent
CUTS = int(os.environ.get("POWER_CUTS", "1"))
DISK_BYTES = 1 << 28
MODULES = ("virtio_pci", "virtio_blk")
SECTOR = 512
LOG_HEAD, LOG_ENTRY = struct.Struct("<QQQL"), struct.Struct("<QQQQ")
LOG_MAGIC = 0x6A736677736872
LOG_FLUSH, LOG_DISCARD = 1, 4


class Machine(NamedTuple):
    command: list[str]  # command that boots the machine
    disk: Path  # data that survived all cuts; the machine runs on a copy
    copy: Path
    log: Path  # writes and flushes of the machine, in order


class Boot(NamedTuple):
    recovered: int
    unsynced: int  # LSN that the file without sync has after the cut
    acknowledged: int
    acks: int


# ---- contents of the machine ------------------------------------------------------------------


def modules_in_order(folder: Path) -> list[Path]:
    """Return the kernel modules of the disk's drivers, in the order of loading. Drivers that are
    built into the kernel need no module."""
    needed: dict[str, list[str]] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, below = line.partition(":")
        needed[path] = below.split()
    wanted = [p for name in MODULES for p in needed if Path(p).name.startswith(f"{name}.ko")]
    order: dict[str, None] = {}
    for path in wanted:
        order |= dict.fromkeys([*reversed(needed[path]), path])
    return [folder / path for path in order]


def initramfs(program: Path, modules: list[Path]) -> bytes:
    entries = [
        cpio_entry("dev", b"", 0o040755),
        cpio_entry("dev/console", b"", 0o020600, (5, 1)),
        cpio_entry("modules", b"", 0o040755),
        cpio_entry("init", program.read_bytes(), 0o100755),
    ]
    for number, path in enumerate(modules):
        entries.append(cpio_entry(f"modules/{number}", path.read_bytes(), 0o100644))
    return gzip.compress(b"".join([*entries, cpio_end()]), 1)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    needs("qemu")
    needs("kernel")
    needs("mkfs")
    needs("cc")
    image, modules = next(kernels())
    folder = tmp_path_factory.mktemp("machine")
    program, disk, copy, log = (folder / name for name in ("init", "disk", "copy", "log"))
    sources = [str(path) for path in sorted((ROOT / "shm_layout" / "core").rglob("*.c"))]
    subprocess.run(
        ["cc", "-std=c11", "-O2", "-static", "-pthread", f"-I{ROOT / 'shm_layout'}", "-o", program,
         str(ROOT / "tests" / "guest" / "power_cut.c"), *sources],
        check=True,
    )  # fmt: skip
    (folder / "initramfs").write_bytes(initramfs(program, modules_in_order(modules)))
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
    drive = {
        "driver": "blklogwrites", "node-name": "disk", "log-super-update-interval": 1,
        "file": {"driver": "file", "filename": str(copy)},
        "log": {"driver": "file", "filename": str(log)},
    }  # fmt: skip
    command = [
        "qemu-system-x86_64", "-accel", "tcg", "-m", "256", "-nodefaults", "-no-reboot",
        "-display", "none", "-serial", "stdio", "-kernel", str(image),
        "-initrd", str(folder / "initramfs"),
        "-append", "console=ttyS0 quiet panic=-1 no_timer_check",
        "-blockdev", json.dumps(drive), "-device", "virtio-blk-pci,drive=disk",
    ]  # fmt: skip
    return Machine(command, disk, copy, log)


# ---- the disk -----------------------------------------------------------------------------------


def entries(log: bytes) -> Iterator[tuple[int, int, memoryview]]:
    """Yield (flags, first sector, bytes) of each write in a log of dm-log-writes."""
    magic, _version, count, sector_bytes = LOG_HEAD.unpack_from(log)
    assert (magic, sector_bytes) == (LOG_MAGIC, SECTOR)
    at = SECTOR
    for _ in range(count):
        sector, sectors, flags, _ = LOG_ENTRY.unpack_from(log, at)
        data = memoryview(log)[at + SECTOR : at + SECTOR + sectors * SECTOR]
        assert not flags & LOG_DISCARD
        yield flags, sector, data
        at += SECTOR + len(data)


def power_is_cut(machine: Machine, random: Random) -> tuple[int, int]:
    """Apply the machine's writes to its disk: all up to the last flush, and random sectors of the
    rest.

    Returns (number of flushes, number of lost sectors).
    """
    written = list(entries(machine.log.read_bytes()))
    flushed = max((i for i, entry in enumerate(written) if entry[0] & LOG_FLUSH), default=-1)
    lost, share = 0, random.random()
    with machine.disk.open("r+b") as medium:
        for i, (_, first, data) in enumerate(written):
            for at in range(0, len(data), SECTOR):
                if i > flushed and random.random() < share:
                    lost += 1
                    continue
                medium.seek(first * SECTOR + at)
                medium.write(data[at : at + SECTOR])
    return sum(entry[0] & LOG_FLUSH for entry in written), lost


# ---- one boot of the machine ---------------------------------------------------------------------


def facts(process: subprocess.Popen[str], console: list[str]) -> Iterator[tuple[str, int]]:
    """Yield (word, number) for each line that the guest reports. Append every line to `console`."""
    assert process.stdout is not None
    for line in process.stdout:
        console.append(line)
        word, _, rest = line.strip().partition(" ")
        assert word != "broken", line
        if word in ("recovered", "unsynced", "ack", "ready") and line.endswith("\n"):
            yield word, int(rest or 0)


def live_and_be_killed(machine: Machine, alive_s: float) -> Boot:
    """Boot the machine, let it append records for `alive_s` seconds, and kill it."""
    said: dict[str, int] = {}
    console: list[str] = []
    acks = 0
    subprocess.run(["cp", "--sparse=always", machine.disk, machine.copy], check=True)
    machine.log.write_bytes(b"")
    with running(machine.command) as process:
        for word, number in facts(process, console):
            said[word] = number
            acks += word == "ack"
            if word == "ready":
                threading.Timer(alive_s, process.kill).start()
    assert "ready" in said, "".join(["the machine did not begin to append:\n", *console[-40:]])
    return Boot(said["recovered"], said["unsynced"], said.get("ack", said["recovered"]), acks)


@pytest.mark.timeout(300 * (CUTS + 1))
def test_nothing_acknowledged_is_lost(machine: Machine) -> None:
    random = Random(1)
    before = Boot(0, 0, 0, 0)
    lost_unsynced = acks = flushes = lost = 0
    for cut in range(CUTS + 1):
        now = live_and_be_killed(machine, random.uniform(0.3, 3.0))
        assert now.recovered >= before.acknowledged
        print(
            f"boot {cut + 1}: recovered {now.recovered}, acknowledged before the cut "
            f"{before.acknowledged}, by the unsynced file {now.unsynced}; the disk flushed "
            f"{flushes} times and lost {lost} sectors; then {now.acks} commits up to "
            f"{now.acknowledged}"
        )
        flushes, lost = power_is_cut(machine, random)
        lost_unsynced += cut > 0 and now.unsynced < before.acknowledged
        acks += now.acks
        before = now
    assert acks > 0
    assert lost_unsynced > 0, "no cut lost a record of the file without sync"
    print(f"{CUTS} cuts, {acks} commits; without sync {lost_unsynced} of the cuts lost records")
