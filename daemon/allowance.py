"""A token bucket: how much somebody may still do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Allowance:
    """What a peer or a kind of message has left, as of `at_ns`."""

    left: float
    at_ns: int

    def take(self, amount: float, now_ns: int, most: float, per_s: float) -> bool:
        """False if there is not so much left; it grows by `per_s` in a second, up to `most`."""
        self.left = min(most, self.left + (now_ns - self.at_ns) * per_s / 1e9)
        self.at_ns = now_ns
        if self.left < amount:
            return False
        self.left -= amount
        return True
