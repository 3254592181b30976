"""The command pipeline, and the options that its subcommands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from purgatoryd.cli.app import Lazy

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])

# Module in purgatoryd.cli by command, in the order of --help.
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
_master_option = click.option("--master", help="Spark master; default: all cores of this host.")


def _pairs(_: click.Context, __: click.Parameter, given: Iterable[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for key, equals, _value in pairs:
        if not (key and equals):
            raise click.BadParameter(f"{key!r} is not KEY=VALUE.")
    return {key: value for key, _equals, value in pairs}


_conf_option = click.option(
    "--conf",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_pairs,
    help="Setting of Spark; may be repeated.",
)


def spark_options(command: Wrapped) -> Wrapped:
    """Add the options --master and --conf, whose values are the parameters `master` and `conf` of
    session()."""
    return _master_option(_conf_option(command))


@click.group("pipeline", cls=Lazy, table=PARTS)
def pipeline_command() -> None:
    """Ship the WAL to a lake and build tables from it.

    `ship`, `status`, `bulk-load-agent`, `cold cancel | status` and `rebalance-plan show | apply |
    cancel` need only the extra `lake`. All other commands need the extra `spark`, and Java 17 or
    newer or the extra `jre`: pip install '.[spark,jre]'.
    """
