"""A description of all formats to the byte, without names of fields. `python
tests/support/golden.py` prints it as JSON.

tests/support/golden.json is the stored copy. A change of names does not change the description. A
change of a format shows in the diff of the stored copy, and needs a new version of that format.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).parents[1] / "stored"))

import make
import purgatory_driver
from core_driver import Core
from purgatory_driver import Purgatory

from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.host import Host

GOLDEN = Path(__file__).with_suffix(".json")


def numbers() -> dict[str, Any]:
    """Return sizes and offsets of all structs, and values of all enums and constants, in the order
    of layout.h."""
    header = layout.HEADER.read_text()
    enums = re.findall(r"^enum (\w+) \{", header, re.MULTILINE)
    constants = re.findall(r"^#define (\w+) ", header, re.MULTILINE)
    return {
        "layout_id": f"{layout.LAYOUT_ID:#x}",
        "structs": [
            f"{layout.size_of(name)}: {' '.join(layout.places(name))}"
            for name in layout.struct_names()
        ],
        "enums": [
            " ".join(str(value) for value in sorted(ffi.typeof(f"enum {name}").elements))
            for name in enums
        ],
        "constants": " ".join(str(getattr(lib, name)) for name in constants),
    }


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Traffic:
    """The first message of each kind, and a digest of all messages, in both directions."""

    def __init__(self) -> None:
        self.first: dict[str, str] = {}
        self.count = 0
        self._all = hashlib.blake2b(digest_size=16)

    def note(self, direction: str, message: bytes) -> None:
        kind = direction if direction == "notice" or not message else f"{direction} {message[6]}"
        self.first.setdefault(kind, message.hex())
        self.count += 1
        self._all.update(message)

    def listen(self, stack: ExitStack) -> None:
        """Record all messages to and from the cores of the test drivers, until `stack` is
        closed."""
        send, part, split = Purgatory.send, Core._part, purgatory_driver.split_mail

        def noted_send(core: Purgatory, message: bytes, *rest: Any) -> bytes:
            self.note("request", message)
            reply = send(core, message, *rest)
            self.note("reply", reply)
            return reply

        def noted_part(core: Core, place: Any) -> Any:
            self.note("notice", bytes(core._out[place.body : place.body + place.body_bytes]))
            return part(core, place)

        def noted_split(message: bytes, session: int) -> Any:
            self.note("reply", message)
            return split(message, session)

        stack.enter_context(mock.patch.object(Purgatory, "send", noted_send))
        stack.enter_context(mock.patch.object(Core, "_part", noted_part))
        stack.enter_context(mock.patch.object(purgatory_driver, "split_mail", noted_split))

    def summary(self) -> dict[str, Any]:
        return {"first": self.first, "count": self.count, "all": self._all.hexdigest()}


def requests(core: Core, traffic: Traffic) -> None:
    """Record the kinds of requests that the scripted run does not send, and replies to some of
    them."""
    for message in (
        wire.encode_hello(bytes(range(16)), 3, b"worker"),
        wire.encode_query(4, 0, b"n", "far"),
        wire.encode_frame(layout.Message.PING, 0, 6),
    ):
        traffic.note("request", message)
        core.handle(message)
        traffic.note("reply", core.newest_reply)
    for message in (
        wire.encode_bulk_load(
            7, 0, b"a bulk load, 16b", 1, namespace=b"n", fencing_token=2, start=3
        ),
        wire.encode_namespace_set(8, b"n", {"owner_uid": 5, "quota_ops": 6}),
        wire.encode_place(9, b"n", 2),
        wire.encode_publish(10, b"n", b"t", "key", b"payload"),
    ):
        traffic.note("request", message)


def frame_sizes(directory: Path) -> dict[str, str]:
    """Return the sizes in bytes of the frames in the WAL and its snapshots, by frame type."""
    sizes = defaultdict(set)
    for path in sorted(directory.iterdir()):
        data, at = path.read_bytes(), lib.PG_WAL_SEGMENT_HEAD
        while at + 24 <= len(data) and (size := int.from_bytes(data[at : at + 4], "little")):
            sizes[int.from_bytes(data[at + 20 : at + 22], "little")].add(size)
            at += size
    return {str(kind): " ".join(map(str, sorted(sizes[kind]))) for kind in sorted(sizes)}


def golden() -> dict[str, Any]:
    """Return the description of all formats, from one scripted run with fixed clocks and
    secrets."""
    traffic = Traffic()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Host, "random_bits", return_value=0x5A17))
        traffic.listen(stack)
        core, owner = make.build()
        make.contents(core, owner)
        files = make.arena_files(core) | make.export_files(core)
        requests(core, traffic)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make.write_wal(directory)
        for path in directory.iterdir():
            data = path.read_bytes()
            files[f"{path.stem} {data[:8].hex()}"] = data
        frames = frame_sizes(directory)
    return {
        **numbers(),
        "frames": frames,
        "messages": traffic.summary(),
        "files": {name: f"{len(files[name])} {digest(files[name])}" for name in sorted(files)},
    }


def text() -> str:
    return json.dumps(golden(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(), end="")
