"""A crash between the effect of a batch's record and the store that counts the record as
applied."""

from __future__ import annotations

import struct
from typing import Any

import purgatory_driver as pd
import pytest
from purgatory_driver import ALL, Key, Owner, Purgatory

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.layout import Status

pytestmark = pytest.mark.tier("check")

HOUR_NS = 3600 * 10**9


def row_of(core: Purgatory, owner: Owner) -> Any:
    rows = ffi.cast("struct pg_session *", core._secret + core.secret.rows_offset)
    return rows[owner.id & 0xFFFF]


def cut_off(core: Purgatory, owner: Owner, records: int) -> None:
    """Restore the state right after the last record's effect: the batch is in progress, and its
    last record is neither counted as applied nor answered."""
    row = row_of(core, owner)
    memory = ffi.cast("struct pg_reply_memory *", core._secret + core.secret.replies_offset)
    reply = memory[(owner.id & 0xFFFF) * core.secret.window + row.last % core.secret.window]
    row.current, row.applied, row.last = row.last, records - 1, row.last - 1
    reply.sequence = 0
    core.attach()
    core.rebuild(core.now_ns)
    core.check()


REACHED = pd.watch(b"w", ALL, [Key(b"reached", 5)], HOUR_NS, notice=True)
LAST = {
    "add": pd.put(b"w", HOUR_NS),
    "replace": pd.put(b"timer", HOUR_NS, lib.PG_MODE_REPLACE),
    "due": pd.put(b"w", -1),
    "watch": pd.watch(b"w", ALL, [Key(b"k", 9)], HOUR_NS),
    "watch that ends at once": REACHED,
    "bump": pd.bump(b"k", 5),
    "bump that ends one": pd.bump(b"waits", 5),
    "refused": pd.put(b"timer", HOUR_NS),
}


@pytest.mark.parametrize("last", LAST)
def test_the_last_record_takes_effect_once(last: str) -> None:
    core = Purgatory()
    owner = Owner(core)
    owner.send(
        pd.put(b"timer", HOUR_NS),
        pd.advance(b"reached", 5),
        pd.watch(b"waiting", ALL, [Key(b"waits", 3)], HOUR_NS),
    )
    message = owner.message([pd.put(b"first", HOUR_NS), LAST[last]])
    first = owner.reply(core.send(message)).answers
    counts, watermarks = core.counts(), dict(core.watermarks())
    tickets = core.header.next_ticket
    cut_off(core, owner, 2)
    again = owner.reply(core.send(message)).answers
    assert [a.ticket for a in again] == [a.ticket for a in first]
    assert core.header.next_ticket == tickets
    assert core.counts() == counts
    assert dict(core.watermarks()) == watermarks
    assert owner.reply(core.send(message)).answers == again, "the core remembers the answer"
    core.check()


def test_a_pending_record_is_applied() -> None:
    """The crash comes after the ticket was counted and before a slot contains this ticket."""
    core = Purgatory()
    owner = Owner(core)
    message = owner.message([LAST["watch"]])
    core.send(message)
    owner.send(pd.cancel(b"w"))
    owner.ack(owner.mail()[0].ack())
    row_of(core, owner).last = 1
    cut_off(core, owner, 1)
    (answer,) = owner.reply(core.send(message)).answers
    assert (answer.status, core.metrics.operations) == (Status.ADDED, 1)


def test_a_batch_under_way_goes_on_although_its_time_is_past() -> None:
    """While the batch is in progress, the virtual clock passes the time that the batch names."""
    core = Purgatory(capacity=4096, watches=8192, watermarks=4096, payload_bytes=1 << 21)
    owner, other = Owner(core, 1), Owner(core, 2)
    for first in range(0, 3000, 1000):
        owner.send(*(
            pd.watch(n.to_bytes(2), ALL, [Key(b"crowd", 1)], HOUR_NS)
            for n in range(first, first + 1000)
        ))  # fmt: skip
    message = bytearray(other.message([pd.advance(b"crowd", 1)]))
    struct.pack_into("<Iq", message, 36, 1, core.now_ns)
    reply = core.send(bytes(message), lambda: core.advance(core.now_ns + 10**9))
    assert other.reply(reply).answers[0].ended == 3000
