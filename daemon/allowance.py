"""A token bucket, which limits the rate of a peer or of a kind of message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Allowance:
    """The bucket of a peer or of a kind of message: `left` tokens at time `at_ns`."""

    left: float
    at_ns: int

    def take(self, amount: float, now_ns: int, most: float, per_s: float) -> bool:
        """Take `amount` tokens; False if fewer are left. The bucket gains `per_s` tokens per
        second, up to `most`."""
        self.left = min(most, self.left + (now_ns - self.at_ns) * per_s / 1e9)
        self.at_ns = now_ns
        if self.left < amount:
            return False
        self.left -= amount
        return True
