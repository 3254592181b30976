"""pipeline ship and status: the WAL's way into the lake."""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from purgatoryd.cli import units
from purgatoryd.cli.exits import Command
from purgatoryd.cli.following import follow as repeat
from purgatoryd.cli.options import emit, json_option, name_option
from purgatoryd.cli.pipeline import lake_option
from purgatoryd.cli.wal import folders, show, wal_option

if TYPE_CHECKING:
    from purgatoryd.pipeline.lake import Manifest
    from purgatoryd.pipeline.progress import Progress
    from purgatoryd.pipeline.tiers import Segment

POLL_S = 1.0


@click.command("ship", cls=Command)
@name_option
@wal_option
@lake_option
@click.option("--follow", is_flag=True, help="Go on as segments are sealed, until interrupted.")
@click.option("--limit", type=units.Size(), default=0, help="Read at most so many bytes a second.")
@click.option("--node", default=socket.gethostname, help="Name of this host; its own unless given.")
@json_option
def ship_command(
    name: str, wal_dir: Path, lake: Path, follow: bool, limit: int, node: str, as_json: bool
) -> None:
    """Bring sealed segments and snapshots into the lake, each once, oldest first.

    Of a deployment those of all its shards, and of the shards that it had before. It may be killed
    at any time and started again. The WAL is held for it by a retention hold, so no segment goes
    before it is in the lake.
    """
    from purgatoryd.pipeline.extras import need

    need("pyarrow", "lake")
    from purgatoryd.pipeline.lake import Lake
    from purgatoryd.pipeline.ship import Convoy

    folders(wal_dir, name)  # before there is a lake
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
    """A manifest for people, on one line."""
    lsns = f"{manifest.first_lsn}..{manifest.last_lsn}"
    return f"{manifest.table:<9} {lsns:<24} {manifest.rows:>9} records {manifest.bytes:>10} bytes"


@click.command("status", cls=Command)
@name_option
@click.option(
    "--wal-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="PURGATORYD_WAL_DIR",
    show_envvar=True,
    help="Directory of the WALs; its segments are listed too.",
)
@lake_option
@click.option("--segments", is_flag=True, help="Where each is: hot (only in the WAL), both, lake.")
@json_option
def status_command(
    name: str, wal_dir: Path | None, lake: Path, segments: bool, as_json: bool
) -> None:
    """Show how far each daemon's WAL has come, or where each WAL segment is.

    Up to `complete_to` every segment is in the lake, from the first one there; `missing` are the
    LSNs of those that are not. `silver` and `gold` are the WAL segments whose tables are up to
    date. What lives is not counted in a daemon that is `replaced`, or `incomplete`: of its number
    of shards some are not in the lake yet, so that those before count.
    """
    from purgatoryd.pipeline.extras import need

    need("pyarrow", "lake")
    from purgatoryd.pipeline.lake import Lake

    place = Lake(lake)
    if segments:
        from purgatoryd.pipeline.tiers import tiers

        found = tiers(place, folders(wal_dir, name) if wal_dir else [])
        show([segment_record(one) for one in found], f"segments in {lake}", as_json)
        return
    from purgatoryd.pipeline.progress import progress

    show([progress_record(one) for one in progress(place)], f"daemons in {lake}", as_json)


def progress_record(one: Progress) -> dict[str, Any]:
    """A daemon's WAL in JSON, and in the table."""
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
    """A segment in JSON, and in the table."""
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
