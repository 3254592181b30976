"""The commands pipeline rebalance-plan make and show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from purgatoryd.cli import units
from purgatoryd.cli.exits import Command, Exit, Group
from purgatoryd.cli.options import emit, json_option
from purgatoryd.cli.pipeline import lake_option, spark_options

if TYPE_CHECKING:
    from purgatoryd.pipeline.rebalance_plan import RebalancePlan

FILE = "rebalance_plan.json"


@click.group("rebalance-plan", cls=Group)
def rebalance_plan_command() -> None:
    """Propose moves of namespaces between daemons.

    The plan is for the daemons whose WALs are in the lake. The first moves separate the namespaces
    of a namespace group; the remaining moves balance the daemons. The plan is stored in
    LAKE/rebalance_plan.json.
    """


@rebalance_plan_command.command("make", cls=Command)
@lake_option
@click.option(
    "--fleet",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="TOML file with the capacity and labels of each daemon, and groups of namespaces.",
)
@click.option(
    "--label",
    default="rack",
    show_default=True,
    help="Label whose values separate the namespaces of a namespace group.",
)
@click.option(
    "--tolerance", type=units.Number(0.01, 1), default=0.1, show_default=True,
    help="Allowed difference between the usage of daemons, as a share of their capacity.",
)  # fmt: skip
@spark_options
@json_option
def make_command(
    lake: Path, fleet: Path, label: str, tolerance: float, master: str | None,
    conf: dict[str, str], as_json: bool,
) -> None:  # fmt: skip
    """Make a rebalance plan from the WALs in the lake.

    The new plan replaces the previous plan.
    """
    from purgatoryd.pipeline.extras import need

    need("pyspark", "spark")
    from purgatoryd.pipeline.continuity import excluded, successors
    from purgatoryd.pipeline.fleet import measured_in, of_today, read_fleet, spaces
    from purgatoryd.pipeline.lake import OPENINGS, Lake
    from purgatoryd.pipeline.rebalance_plan import plan_rebalance
    from purgatoryd.pipeline.session import session

    hosts, groups = read_fleet(fleet)
    there = Lake(lake)
    manifests = [*there.manifests(), *there.manifests(OPENINGS)]
    hosts = of_today(hosts, successors(manifests), excluded(manifests).absent)
    rows = measured_in(session(master, conf), lake).collect()
    made = plan_rebalance(list(hosts.values()), spaces(rows, hosts, groups), label, tolerance)
    save(lake, made)
    tell(made, as_json)


@rebalance_plan_command.command("show", cls=Command)
@lake_option
@json_option
def show_command(lake: Path, as_json: bool) -> int:
    """Show the rebalance plan; exit code 1 if there is none."""
    made = read(lake)
    if made is not None:
        tell(made, as_json)
    return Exit.NEGATIVE if made is None else Exit.DONE


# ---- the rebalance plan's file -----------------------------------------------------------------


def read(lake: Path) -> RebalancePlan | None:
    """Return the rebalance plan of a lake. Raises LakeBroken."""
    from purgatoryd.pipeline.rebalance_plan import rebalance_plan_of
    from purgatoryd.shm_layout.errors import LakeBroken

    path = lake / FILE
    try:
        return rebalance_plan_of(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LakeBroken(str(path), f"is not a rebalance plan: {error!r}") from error


def save(lake: Path, made: RebalancePlan) -> None:
    """Replace the rebalance plan of a lake atomically."""
    from purgatoryd.shm_layout.files import next_to, replace_durably

    path = lake / FILE
    replace_durably(path, json.dumps(made.record(), indent=1).encode(), next_to(path))


def tell(made: RebalancePlan, as_json: bool) -> None:
    """Print a plan, as JSON or as text with a line for each move."""
    lines = [
        f"{move.state:<10}{move.namespace}: {move.source} -> {move.target}, {move.live} timers; "
        f"{move.reason}{': ' * bool(move.error)}{move.error}"
        for move in made.moves
    ]
    lines.append(
        f"the fullest daemon: {made.before:.0%} before the moves, {made.after:.0%} after them"
    )
    emit(made.record(), "\n".join(lines), as_json)
