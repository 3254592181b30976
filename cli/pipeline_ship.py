"""The commands pipeline ship and status."""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from purgatoryd.cli import units
from purgatoryd.cli.arena import print_records
from purgatoryd.cli.exits import Command
from purgatoryd.cli.following import follow as repeat
from purgatoryd.cli.options import emit, json_option, name_option
from purgatoryd.cli.pipeline import lake_option
from purgatoryd.cli.wal import folders, wal_option

if TYPE_CHECKING:
    from purgatoryd.pipeline.lake import Manifest
    from purgatoryd.pipeline.progress import Progress
    from purgatoryd.pipeline.tiers import Segment

POLL_S = 1.0


@click.command("ship", cls=Command)
@name_option
@wal_option
@lake_option
@click.option("--follow", is_flag=True, help="Keep running and ship each segment that is sealed.")
@click.option(
    "--limit", type=units.Size(), default=0, help="Maximum number of bytes to read per second."
)
@click.option(
    "--node",
    default=socket.gethostname,
    help="Name of this host in the lake; default: its host name.",
)
@json_option
def ship_command(
    name: str, wal_dir: Path, lake: Path, follow: bool, limit: int, node: str, as_json: bool
) -> None:
    """Ship sealed WAL segments and snapshots to the lake.

    The command ships each file once, the oldest first. For a deployment, it ships the files of all
    shards, including shards from before a resharding. The command may be killed and started again
    at any time. A retention hold of the command keeps each segment until it is in the lake.
    """
    from purgatoryd.pipeline.extras import need

    need("pyarrow", "lake")
    from purgatoryd.pipeline.lake import Lake
    from purgatoryd.pipeline.ship import Convoy

    folders(wal_dir, name)  # a wrong directory or name raises before a lake is created
    lake.mkdir(parents=True, exist_ok=True)
    with closing(Convoy(partial(folders, wal_dir, name), Lake(lake), node, limit)) as convoy:

        def iteration() -> None:
            for manifest in convoy.poll():
                emit(asdict(manifest), shipped_text(manifest), as_json)

        if follow:
            repeat(iteration, lambda: POLL_S, as_json)
        else:
            iteration()


def shipped_text(manifest: Manifest) -> str:
    """Return a manifest as a line of text."""
    lsns = f"{manifest.first_lsn}..{manifest.last_lsn}"
    return f"{manifest.table:<9} {lsns:<24} {manifest.rows:>9} records {manifest.bytes:>10} bytes"


@click.command("status", cls=Command)
@name_option
@click.option(
    "--wal-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="PURGATORYD_WAL_DIR",
    show_envvar=True,
    help="Directory of WALs whose segments are also listed.",
)
@lake_option
@click.option(
    "--segments",
    is_flag=True,
    help="List the segments and the place of each: hot (only in the WAL), both, lake.",
)
@json_option
def status_command(
    name: str, wal_dir: Path | None, lake: Path, segments: bool, as_json: bool
) -> None:
    """Show the progress of shipping, ingesting and tables.

    Without --segments, the command prints a line for each daemon.

    The lake contains every segment from its first segment up to `complete_to`; `missing` lists the
    LSNs of missing segments. `silver` and `gold` are the numbers of segments in these tables.

    Open timers of a daemon that is `replaced` or `incomplete` are not counted. After a resharding,
    the new shards are `incomplete` until all of them are in the lake.
    """
    from purgatoryd.pipeline.extras import need

    need("pyarrow", "lake")
    from purgatoryd.pipeline.lake import Lake

    place = Lake(lake)
    if segments:
        from purgatoryd.pipeline.tiers import tiers

        found = tiers(place, folders(wal_dir, name) if wal_dir else [])
        print_records([segment_record(one) for one in found], f"segments in {lake}", as_json)
        return
    from purgatoryd.pipeline.progress import progress

    print_records([progress_record(one) for one in progress(place)], f"daemons in {lake}", as_json)


def progress_record(one: Progress) -> dict[str, Any]:
    """Return a daemon's WAL for JSON and for the table."""
    return {
        "daemon": one.daemon,
        "node": one.node,
        "state": one.state.value,
        "complete_to": units.format_wall(one.complete_to_us * 1000),
        "newest": units.format_wall(one.last_us * 1000),
        "missing": [f"{first}..{last}" for first, last in one.gaps],
        "segments": one.segments,
        "silver": one.silver,
        "gold": one.gold,
        "records": one.rows,
        "unknown": one.unknown,
    }


def segment_record(one: Segment) -> dict[str, Any]:
    """Return a segment for JSON and for the table."""
    manifest = one.manifest
    return {
        "daemon": one.identity.daemon,
        "epoch": one.identity.epoch,
        "first_lsn": one.identity.first_lsn,
        "last_lsn": manifest.last_lsn if manifest else None,
        "tier": one.tier.value,
        "node": manifest.node if manifest else None,
        "records": manifest.rows if manifest else None,
        "bytes": manifest.bytes if manifest else None,
    }
