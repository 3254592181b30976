"""Number of programs that a state machine tries; $HYPOTHESIS_PROFILE is quick, short or long."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def effort(short: int, long: int) -> settings:
    """Return settings for a number of examples; `quick` runs a quarter of the short number.

    Only the long examples differ from run to run.
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
