"""Number of programs that Hypothesis tries with a state machine. $HYPOTHESIS_PROFILE sets it:
quick, short or long."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def effort(short: int, long: int) -> settings:
    """Return the settings of a test: `short` or `long` examples; the quick profile runs a quarter
    of `short`.

    Only the long profile tries other examples in each run.
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
