"""pipeline: from the WAL to tables in a lake. Each part has a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from purgatoryd.cli.app import Lazy

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])

# command: module of purgatoryd.cli; in the order of --help
PARTS = {
    "ship": "pipeline_ship",
    "status": "pipeline_ship",
    "ingest": "pipeline_tables",
    "rebuild": "pipeline_tables",
    "compact": "pipeline_tables",
    "trace": "pipeline_tables",
    "slow": "pipeline_tables",
    "timeouts": "pipeline_tables",
    "capacity": "pipeline_tables",
    "cold": "pipeline_cold",
    "bulk-load-agent": "pipeline_agent",
    "rebalance-plan": "pipeline_rebalance_plan",
    "audit": "pipeline_audit",
    "report": "pipeline_audit",
}

lake_option = click.option(
    "--lake",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="PURGATORYD_LAKE",
    show_envvar=True,
    required=True,
    help="Directory of the lake.",
)
_master_option = click.option(
    "--master", help="Spark's master; all cores of this host unless given."
)


def _pairs(_: click.Context, __: click.Parameter, given: Iterable[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for key, equals, _value in pairs:
        if not (key and equals):
            raise click.BadParameter(f"{key!r} is not KEY=VALUE.")
    return {key: value for key, _equals, value in pairs}


_conf_option = click.option(
    "--conf", multiple=True, metavar="KEY=VALUE", callback=_pairs, help="A setting of Spark."
)


def spark_options(command: Wrapped) -> Wrapped:
    """--master and --conf, as `master: str | None` and `conf: dict[str, str]` for session()."""
    return _master_option(_conf_option(command))


@click.group("pipeline", cls=Lazy, table=PARTS)
def pipeline_command() -> None:
    """Bring the WAL into a lake, and make tables of it there.

    For `ship`, `status`, `bulk-load-agent`, `cold cancel | status` and `rebalance-plan show | apply
    | cancel` the extra `lake` is enough, on the daemon's host; all others need the extra `spark`,
    and Java 17 or newer or the extra `jre`: pip install '.[spark,jre]' in the checkout.
    """
