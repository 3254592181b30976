"""The extension items of a PUT: the properties that few timers have."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from purgatoryd.clients import times
from purgatoryd.clients.arguments import check_whole
from purgatoryd.clients.times import Late
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.layout import PRIORITY_MAX
from purgatoryd.shm_layout.wire import Key


class OrderHash(int):
    """Hash of an order key, 64 bits, signed. The daemon stores it in place of the key. add() and
    add_many() take it as `order_key`, so that a copy of a timer has the order of the original."""


OrderKey = Key | OrderHash


def check_priority(priority: int | None) -> int | None:
    """Return a priority from 0 to 9, or None. Raises InvalidArgument."""
    return None if priority is None else check_whole("priority", priority, 0, PRIORITY_MAX)


def order_hash(order_key: OrderKey | None) -> int | None:
    """Return the hash of an order key, which all clients compute alike: the first 8 bytes of the
    SHA-256 of its bytes, as a little-endian number. None = no order key. Raises InvalidKey."""
    if order_key is None:
        return None
    if isinstance(order_key, OrderHash):
        return check_whole("order_key", int(order_key), -(2**63), 2**63 - 1)
    from hashlib import sha256  # most clients have no order keys

    return int.from_bytes(sha256(wire.encode_key(order_key)[1]).digest()[:8], "little", signed=True)


def encode_items(
    tag: str | None,
    priority: int | None,
    order_key: OrderKey | None,
    late: Late | None,
    unique_for: float | timedelta | None,
) -> bytes:
    """Return the extension items of a PUT, in ascending order of their kinds. Raises
    InvalidArgument."""
    return (
        wire.encode_tag(tag)
        + wire.encode_priority(check_priority(priority))
        + wire.encode_order(order_hash(order_key))
        + wire.encode_late(times.late_policy(late))
        + wire.encode_unique(times.unique_ns(unique_for))
    )


class Common(NamedTuple):
    """Arguments of add_many() for the rows that have no values of their own."""

    within: float | timedelta | None = None
    tag: str | None = None
    priority: int | None = None
    order_key: OrderKey | None = None
    late: Late | None = None
    unique_for: float | timedelta | None = None

    @property
    def slack(self) -> int:
        """The slack as times.slack() returns it. Raises InvalidArgument."""
        return times.slack(self.within)

    def items(
        self, tag: str | None = None, priority: int | None = None,
        order_key: OrderKey | None = None, late: Late | None = None,
        unique_for: float | timedelta | None = None,
    ) -> bytes:  # fmt: skip
        """Return the extension items of a row that has these values. Raises InvalidArgument."""
        return encode_items(
            self.tag if tag is None else tag,
            self.priority if priority is None else priority,
            self.order_key if order_key is None else order_key,
            self.late if late is None else late,
            self.unique_for if unique_for is None else unique_for,
        )
