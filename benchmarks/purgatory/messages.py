"""The wire messages of the experiment, which numpy builds and reads a batch at a time.

A key has 8 bytes. The key of a request is its number. An own watch key is four times that number
plus the index of the watch key; a shared watch key is a number that no request has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from purgatoryd.shm_layout import layout, wire
from purgatoryd.shm_layout._core import ffi, lib

from .experiment import KEYS, PAYLOAD_BYTES, Experiment, Longs

BATCH = 1024
"""Maximum number of records in a message."""

OWN_KEYS = 4
NEVER = 1 << 62
SHARED = np.uint64(1 << 63)
WORKER_BITS = 40
"""Bit position of the worker's number in a key; the request's number is in the lower bits."""


def struct_of(name: str) -> np.dtype[Any]:
    """Return the numpy type of a struct, without its array fields, which are reserved bytes."""
    plain = [f for f in layout.fields(name) if f[2].kind == "primitive"]
    return np.dtype(
        {
            "names": [field for field, _, _ in plain],
            "offsets": [offset for _, offset, _ in plain],
            "formats": [f"{'iu'[t.cname[0] == 'u']}{ffi.sizeof(t)}" for _, _, t in plain],
            "itemsize": layout.size_of(name),
        }
    )


FRAME = layout.size_of("pg_frame")
RECORD = struct_of("pg_record")
RESULT = struct_of("pg_result")
OUTCOME = struct_of("pg_outcome")
ACK = struct_of("pg_ack")
OUTCOME_AREA = np.dtype(
    [
        ("key", "<u8"), ("payload", f"V{PAYLOAD_BYTES}"), ("watermarks", "<u8", KEYS),
        ("missing", "u1"), ("failed", "u1"),
    ]
)  # fmt: skip
NAMES = wire.encode_names([(b"bench", b"")])

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[Any]


def watch_area(keys: int) -> np.dtype[Any]:
    """Return the numpy type of the key, payload and watch keys of one WATCH record."""
    parts = [("key", "<u8"), ("payload", f"S{PAYLOAD_BYTES}")]
    for n in range(keys):
        parts += [
            (f"target{n}", "<u8"), (f"cap{n}", "<u8"), (f"length{n}", "u1"), (f"type{n}", "u1"),
            (f"flags{n}", "u1"), (f"reserved{n}", "V5"), (f"watched{n}", "<u8"),
        ]  # fmt: skip
    return np.dtype(parts)


def records(op: int, count: int, **fields: int) -> Rows:
    """Return `count` equal records with keys of 8 bytes."""
    rows = np.zeros(count, RECORD)
    rows["op"], rows["key_type"], rows["key_len"] = op, layout.KeyType.BYTES, 8
    for name, value in fields.items():
        rows[name] = value
    return rows


class Messages:
    """Writes one message at a time into `bytes`; every method returns the length of the message.

    `session` is the session id in the frames; `sequence` is the sequence number of the last batch.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.session = 0
        self.sequence = 0
        self._base = experiment.worker << WORKER_BITS
        keys = experiment.shared + experiment.own
        area = watch_area(keys)
        space = FRAME + len(NAMES) + BATCH * (RECORD.itemsize + max(area.itemsize, 8))
        self.bytes: Bytes = np.zeros(space, np.uint8)
        self._buffer = self.bytes.data
        self._watch = records(
            lib.PG_OP_WATCH, BATCH, mode=lib.PG_C_ANY, payload_len=PAYLOAD_BYTES,
            ext_len=area.itemsize - 8 - PAYLOAD_BYTES, time_kind=layout.TimeKind.BOOT,
        )  # fmt: skip
        self._advance = records(lib.PG_OP_ADVANCE_KEY, BATCH, value=1).view(np.uint8)
        self._forget = records(lib.PG_OP_FORGET, BATCH).view(np.uint8)
        self._area = np.zeros(BATCH, area)
        self._own_fields = [f"watched{n}" for n in range(experiment.shared, keys)]
        self._fill_area(experiment.shared, keys)

    def _fill_area(self, shared: int, keys: int) -> None:
        self._area["payload"] = b"r" * PAYLOAD_BYTES
        for n in range(keys):
            self._area[f"target{n}"] = 1 if n == shared else NEVER
            self._area[f"length{n}"] = 8
            self._area[f"type{n}"] = layout.KeyType.BYTES
            if n < shared:
                self._area[f"watched{n}"] = SHARED + np.uint64(n)
            else:
                self._area[f"flags{n}"] = layout.OWN_KEY

    def _head(self, message: int, count: int) -> int:
        """Write the frame head and the name table; return the offset of the records."""
        batch = message == layout.Message.BATCH
        self.sequence += batch
        wire.FRAME.pack_into(
            self._buffer, 0, layout.WIRE_MAGIC, layout.WIRE_VERSION, message, self.session,
            self.sequence if batch else 0, count, batch, 0, len(NAMES) if batch else 0, 0, 0, 0, 0,
        )  # fmt: skip
        if batch:
            self._buffer[FRAME : FRAME + len(NAMES)] = NAMES
        return FRAME + len(NAMES) * batch

    def _put(self, at: int, rows: Rows) -> int:
        flat = rows.view(np.uint8)
        self.bytes[at : at + len(flat)] = flat
        return at + len(flat)

    def hello(self, nonce: bytes) -> int:
        """Write a HELLO message."""
        message = wire.encode_hello(nonce)
        self._buffer[: len(message)] = message
        return len(message)

    def watch(self, first: int, deadlines_ns: Longs) -> int:
        """Write a batch with a WATCH record for each deadline, for the requests from `first` on."""
        count = len(deadlines_ns)
        area, rows = self._area[:count], self._watch[:count]
        requests = np.arange(self._base + first, self._base + first + count, dtype=np.uint64)
        rows["time_ns"] = deadlines_ns
        area["key"] = requests
        requests *= np.uint64(OWN_KEYS)
        for n, name in enumerate(self._own_fields):
            area[name] = requests + np.uint64(n)
        return self._put(self._put(self._head(layout.Message.BATCH, count), rows), area)

    def _keys(self, template: Bytes, keys: Rows) -> int:
        at = self._head(layout.Message.BATCH, len(keys))
        return self._put(self._put(at, template[: len(keys) * RECORD.itemsize]), keys)

    def _numbers(self, requests: Longs) -> Rows:
        return requests.astype(np.uint64) + np.uint64(self._base)

    def advance(self, requests: Longs) -> int:
        """Write a batch that advances an own key of each request, which makes the request's
        condition true."""
        return self._keys(self._advance, self._numbers(requests) * np.uint64(OWN_KEYS))

    def forget(self, requests: Longs) -> int:
        """Write a batch that forgets an own key of each request. An advance after the request's end
        has created this key again."""
        return self._keys(self._forget, self._numbers(requests) * np.uint64(OWN_KEYS))

    def ack(self, outcomes: Rows) -> int:
        """Write an ACK for all outcomes of one message."""
        at = self._head(lib.PG_M_ACK, len(outcomes))
        rows = np.zeros(len(outcomes), ACK)
        rows["ticket"] = outcomes["ticket"] >> np.uint64(8)
        rows["slot"] = outcomes["slot"]
        return self._put(at, rows)


def outcomes_in(message: Bytes) -> tuple[Rows, Longs]:
    """Return (heads of the outcomes of an OUTCOMES message, numbers of their requests)."""
    count = int.from_bytes(message[24:28].tobytes(), "little")
    heads: Rows = np.ndarray(count, OUTCOME, message, FRAME)
    at = FRAME + count * OUTCOME.itemsize
    areas: Rows = np.ndarray(count, OUTCOME_AREA, message, at)
    requests = (areas["key"] & np.uint64((1 << WORKER_BITS) - 1)).astype(np.int64)
    return heads, requests


def statuses_in(reply: Bytes) -> bytes:
    """Return the status of each record of a BATCH's reply; raise if the batch was refused."""
    head = wire.decode_reply(reply[:FRAME].tobytes())
    if head.error:
        raise head.refusal()
    return reply[FRAME :: RESULT.itemsize][: head.records].tobytes()
