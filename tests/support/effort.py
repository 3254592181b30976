"""How many programs a state machine tries; $HYPOTHESIS_PROFILE is quick, short or long."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def effort(short: int, long: int) -> settings:
    """Return settings for that many examples, a quarter of the short ones if quick.

    Only the long ones differ from run to run.
    """
    profile = os.environ.get("HYPOTHESIS_PROFILE", "short")
    examples = {"quick": short // 4, "short": short, "long": long}[profile]
    is_long = profile == "long"
    return settings(
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        max_examples=examples,
        stateful_step_count=80 if is_long else 40,
        derandomize=not is_long,
    )
