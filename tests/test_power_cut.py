"""A virtual machine that writes a journal and is killed: no acknowledged record is lost.

The machine's only process is guest/power_cut.c: at each boot it reads the journal, checks it,
and appends until it is killed with SIGKILL, at a random moment. What the guest's kernel had not
written is lost with it; a file that is written without sync shows whether anything was. What the
host has in its own cache survives. $PURGATORYD_POWER_CUTS: how many times.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from machine import needs

ROOT = Path(__file__).resolve().parent.parent
CUTS = int(os.environ.get("PURGATORYD_POWER_CUTS", "2"))
DISK_BYTES = 1 << 29
MODULES = ("virtio_pci", "virtio_blk")


class Boot(NamedTuple):
    recovered: int
    unsynced: int  # LSN that a file written without sync told after the cut
    acknowledged: int
    acks: int


# ---- what the machine boots -------------------------------------------------------------------


def kernel() -> tuple[Path, Path]:
    """The newest kernel of the host that can be read, and its modules."""
    for image in sorted(Path("/boot").glob("vmlinuz-*"), reverse=True):
        modules = Path("/lib/modules") / image.name.removeprefix("vmlinuz-")
        if os.access(image, os.R_OK) and (modules / "modules.dep").exists():
            return image, modules
    pytest.skip(
        "kernel: /boot/vmlinuz-* with /lib/modules is needed, as of linux-image-cloud-amd64"
    )


def modules_in_order(folder: Path) -> list[Path]:
    """The disk's drivers, each behind what it needs. What is built in is not in the table."""
    needed: dict[str, list[str]] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, below = line.partition(":")
        needed[path] = below.split()
    wanted = [p for name in MODULES for p in needed if Path(p).name.startswith(f"{name}.ko")]
    order: dict[str, None] = {}
    for path in wanted:
        order |= dict.fromkeys([*reversed(needed[path]), path])
    return [folder / path for path in order]


def cpio_entry(name: str, data: bytes, mode: int, device: tuple[int, int] = (0, 0)) -> bytes:
    """One file of an initramfs, in the format `newc`."""
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


def initramfs(program: Path, modules: list[Path]) -> bytes:
    entries = [
        cpio_entry("dev", b"", 0o040755),
        cpio_entry("dev/console", b"", 0o020600, (5, 1)),
        cpio_entry("modules", b"", 0o040755),
        cpio_entry("init", program.read_bytes(), 0o100755),
    ]
    for number, path in enumerate(modules):
        entries.append(cpio_entry(f"modules/{number}", path.read_bytes(), 0o100644))
    return gzip.compress(b"".join([*entries, cpio_entry("TRAILER!!!", b"", 0)]), 1)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that boots the machine, with an empty disk."""
    needs("qemu")
    needs("cc")
    image, modules = kernel()
    folder = tmp_path_factory.mktemp("machine")
    program, disk = folder / "init", folder / "disk"
    sources = [str(path) for path in sorted((ROOT / "shm_layout").glob("*.c"))]
    subprocess.run(
        ["cc", "-std=c11", "-O2", "-static", "-pthread", f"-I{ROOT / 'shm_layout'}", "-o", program,
         str(ROOT / "tests" / "guest" / "power_cut.c"), *sources],
        check=True,
    )  # fmt: skip
    (folder / "initramfs").write_bytes(initramfs(program, modules_in_order(modules)))
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
    return [
        "qemu-system-x86_64", "-accel", "tcg", "-m", "256", "-nodefaults", "-no-reboot",
        "-display", "none", "-serial", "stdio", "-kernel", str(image),
        "-initrd", str(folder / "initramfs"), "-append", "console=ttyS0 quiet panic=-1",
        "-drive", f"file={disk},format=raw,if=virtio,cache=writeback",
    ]  # fmt: skip


# ---- one life of it -----------------------------------------------------------------------------


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def facts(process: subprocess.Popen[str]) -> Iterator[tuple[str, int]]:
    """What the guest says, line by line."""
    assert process.stdout is not None
    for line in process.stdout:
        word, _, rest = line.strip().partition(" ")
        assert word != "broken", line
        if word in ("recovered", "unsynced", "ack", "ready") and line.endswith("\n"):
            yield word, int(rest or 0)


def live_and_be_killed(command: list[str], alive_s: float) -> Boot:
    """Boots, lets it append for some time, kills it."""
    said: dict[str, int] = {}
    acks = 0
    with running(command) as process:
        for word, number in facts(process):
            said[word] = number
            acks += word == "ack"
            if word == "ready":
                until = time.monotonic() + alive_s
            if "ready" in said and time.monotonic() >= until:
                process.kill()
    assert "ready" in said, "the machine did not get as far as to append"
    return Boot(said["recovered"], said["unsynced"], said.get("ack", said["recovered"]), acks)


@pytest.mark.timeout(300 * (CUTS + 1))
def test_nothing_acknowledged_is_lost(machine: list[str]) -> None:
    random = Random(1)
    before = Boot(0, 0, 0, 0)
    lost_unsynced = acks = 0
    for cut in range(CUTS + 1):
        now = live_and_be_killed(machine, random.uniform(0.3, 3.0))
        assert now.recovered >= before.acknowledged
        print(
            f"boot {cut + 1}: recovered {now.recovered}, acknowledged before the cut "
            f"{before.acknowledged}, by the unsynced file {now.unsynced}; "
            f"then {now.acks} commits up to {now.acknowledged}"
        )
        lost_unsynced += cut > 0 and now.unsynced < before.acknowledged
        acks += now.acks
        before = now
    assert acks > 0
    print(f"{CUTS} cuts, {acks} commits; without sync {lost_unsynced} of the cuts lost records")
