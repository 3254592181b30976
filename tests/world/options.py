"""Options that worlds give to timers, and the settings of topics that apply to timers without
options.

The options of a timer depend on its key only, so that each judge can compute them.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from world.oracle import FOREVER_NS
from world.script import GRACES_NS, UNIQUE_NS

LateKind = Literal["fire", "skip", "coalesce"]
LATE_KINDS: tuple[LateKind, ...] = ("skip", "coalesce")
Value = TypeVar("Value", bound=Hashable)


class Policy(NamedTuple):
    """A late policy."""

    kind: LateKind
    grace_ns: int

    @property
    def argument(self) -> Literal["fire"] | tuple[Literal["skip", "coalesce"], float]:
        """The policy as an argument of an add."""
        return "fire" if self.kind == "fire" else (self.kind, self.grace_ns / 1e9)


FIRE = Policy("fire", 0)


class Options(NamedTuple):
    """The options of a timer; None: the option is not given."""

    priority: int | None = None
    order_key: str | None = None
    late: Policy | None = None
    unique_ns: int | None = None
    """Time for which the key is unique."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The options that are given, as arguments of an add."""
        given = {
            "priority": self.priority, "order_key": self.order_key,
            "late": None if self.late is None else self.late.argument,
            "unique_for": None if self.unique_ns is None else self.unique_ns / 1e9,
        }  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}


NONE = Options()


def options_of(
    key: str, *, ranks: bool = False, late: bool = False, unique: bool = False
) -> Options:
    """Return the options of the timers of a key. `ranks`: timers have priorities and order keys.
    `late`: they have late policies. `unique`: some keys are unique for a time. Only keys of clients
    have options."""
    if not key.startswith("k"):
        return NONE
    number = zlib.crc32(f"options of {key}".encode())
    priority = None if number % 3 == 0 else number // 3 % 10
    order_key = None if number // 30 % 3 == 0 else f"order {number // 90 % 3}"
    policies = (None, FIRE, *(Policy(kind, ns) for kind in LATE_KINDS for ns in GRACES_NS))
    policy = policies[number // 270 % len(policies)]
    spans_ns = (None, *UNIQUE_NS)
    unique_ns = spans_ns[number // 7000 % len(spans_ns)] if unique else None
    ordering = (priority, order_key) if ranks else (None, None)
    return Options(*ordering, policy if late else None, unique_ns)


@dataclass
class Possible(Generic[Value]):
    """The values that a setting may have, and may have had."""

    first: Value
    """Value before any change, and after a loss of the arena."""
    until_ns: dict[Value, int] = field(default_factory=dict)
    """For each value, the time until which it was possible."""
    open: int = 0
    """Number of changes without an answer."""

    def __post_init__(self) -> None:
        self.until_ns = {self.first: FOREVER_NS}

    def changing(self, value: Value) -> None:
        """Record a change before it is sent."""
        self.until_ns[value] = FOREVER_NS
        self.open += 1

    def changed(self, value: Value, now_ns: int) -> None:
        """Record the answer to the only change that has no answer."""
        self.open -= 1
        if self.open == 0:
            for other, until_ns in self.until_ns.items():
                if other != value:
                    self.until_ns[other] = min(until_ns, now_ns)

    def surely_from(self, value: Value) -> int:
        """Return the time from which on a setting surely has a value; FOREVER_NS: it may have
        another one."""
        others = [until_ns for other, until_ns in self.until_ns.items() if other != value]
        return max(others, default=0) if value in self.until_ns else FOREVER_NS

    def lost(self) -> None:
        """Record that an arena was lost: each earlier value is possible."""
        self.until_ns = dict.fromkeys(self.until_ns, FOREVER_NS)
        self.open += 1  # no later answer makes the value certain

    def since(self, from_ns: int) -> set[Value]:
        """Return the values that were possible at this time or later."""
        return {value for value, until_ns in self.until_ns.items() if until_ns >= from_ns}
