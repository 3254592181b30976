"""How much is tried of a state machine: more of it with HYPOTHESIS_PROFILE=long."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def effort(short: int, long: int) -> settings:
    """Settings for so many examples; the short ones are the same every time."""
    is_long = {"short": False, "long": True}[os.environ.get("HYPOTHESIS_PROFILE", "short")]
    return settings(
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        max_examples=long if is_long else short,
        stateful_step_count=80 if is_long else 40,
        derandomize=not is_long,
    )
