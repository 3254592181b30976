"""Parts of a virtual machine for tests: a kernel, an initramfs, and the QEMU process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def kernels() -> Iterator[tuple[Path, Path]]:
    """Yield (kernel image, folder of its modules) for each readable kernel of the host, the newest
    first."""
    for image in sorted(Path("/boot").glob("vmlinuz-*"), reverse=True):
        modules = Path("/lib/modules") / image.name.removeprefix("vmlinuz-")
        if os.access(image, os.R_OK) and (modules / "modules.dep").exists():
            yield image, modules


def cpio_entry(
    name: str, data: bytes, mode: int, device: tuple[int, int] = (0, 0), changed_s: int = 0
) -> bytes:
    """Return one file of an initramfs in the format `newc`, with this modification time."""
    fields = (0, mode, 0, 0, 1, changed_s, len(data), 0, 0, *device, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


def cpio_end() -> bytes:
    """Return the entry that ends an initramfs."""
    return cpio_entry("TRAILER!!!", b"", 0)


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")
    try:
        yield process
    finally:
        process.kill()
        process.wait()
