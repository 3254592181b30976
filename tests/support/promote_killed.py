"""A promotion that kills itself after a step, together with all processes that Spark runs for it.

python promote_killed.py LAKE NAME UNTIL_NS STEP

STEP is stage_slice (Spark has written the rows of the window) or add (the daemon has received the
first rows).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cold_driver import small_pieces
from small_plans import SMALL_PLANS

from purgatoryd.pipeline import promote
from purgatoryd.pipeline.bulk_loading import BulkLoader
from purgatoryd.pipeline.session import session
from purgatoryd.pipeline.tier import Tier


def deadly(step: Callable[..., Any]) -> Callable[..., None]:
    """Wrap a step, so that the process is killed after it."""

    def taken(*args: Any) -> None:
        step(*args)
        os.killpg(0, signal.SIGKILL)

    return taken


def main(lake: str, name: str, until_ns: str, step: str) -> None:
    """Promote timers due before `until_ns` until the process is killed."""
    hot, patch = BulkLoader(name), pytest.MonkeyPatch()
    small_pieces(patch, 5)
    where: Any = hot if step == "add" else promote
    patch.setattr(where, step, deadly(getattr(where, step)))
    spark = session("local[1]", SMALL_PLANS | {"spark.driver.memory": "512m"})
    promote.promote(spark, Tier(Path(lake)), int(until_ns), hot)


if __name__ == "__main__":
    main(*sys.argv[1:])
