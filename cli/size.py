"""The command size, and the generated table of sizes in docs/operations.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from purgatoryd.cli import units
from purgatoryd.cli.exits import Command
from purgatoryd.cli.options import emit, json_option
from purgatoryd.cli.settings import FLAG_OF
from purgatoryd.daemon.config import Config
from purgatoryd.shm_layout.errors import InvalidArgument, InvalidSetting

GIB = 2**30
KEY_BYTES = 16
PAYLOADS = (0, 48, 240, 1008)
"""Payload sizes in the table, in bytes. With a key of 16 bytes, each payload size fills whole
granules."""
MANY = 100_000
"""Minimum number of timers for measuring bytes per timer. With fewer timers, rounding to pages
distorts the result."""
MARKS = "<!-- capacity: begin -->\n", "<!-- capacity: end -->"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Settings and memory of a daemon for a number of timers of one size."""

    settings: dict[str, Any]
    """Fields of Config that differ from the defaults."""
    shm_bytes: int
    """Size of both arena files in bytes."""
    timer_bytes: float
    """Number of bytes in both files that one more timer adds."""


@click.command("size", cls=Command)
@click.option(
    "--timers", type=units.Whole(1), required=True, help="Maximum number of armed timers."
)
@click.option(
    "--key-bytes", type=units.Whole(1), default=KEY_BYTES, show_default=True,
    help="Size of a key.",
)  # fmt: skip
@click.option(
    "--payload-bytes", type=units.Whole(0), default=48, show_default=True,
    help="Size of a payload.",
)  # fmt: skip
@click.option("--with-wal", is_flag=True, help="Include the WAL buffer of a daemon with --wal-dir.")
@json_option
def size_command(
    timers: int, key_bytes: int, payload_bytes: int, with_wal: bool, as_json: bool
) -> None:
    """Show settings and memory for a number of timers.

    The memory is in /dev/shm. It has space for all timers, and for a full replay buffer with
    notices of the same size. All other settings have their defaults. The output is a configuration
    file.
    """
    from purgatoryd.shm_layout.layout import KEY_MAX, PAYLOAD_MAX

    if key_bytes > KEY_MAX or payload_bytes > PAYLOAD_MAX:
        raise InvalidArgument(f"a key has at most {KEY_MAX} bytes, a payload at most {PAYLOAD_MAX}")
    try:
        found = sizes(timers, key_bytes + payload_bytes, with_wal)
    except InvalidSetting as error:
        raise InvalidSetting(FLAG_OF[error.setting], error.value, error.bound, "size") from None
    record = {
        "settings": found.settings,
        "shm_bytes": found.shm_bytes,
        "timer_bytes": round(found.timer_bytes, 2),
        "timers_per_gib": timers_in(GIB, key_bytes + payload_bytes, with_wal),
    }
    emit(record, "\n".join(size_lines(record)), as_json)


def size_lines(record: dict[str, Any]) -> list[str]:
    """Return the result as the lines of a TOML file."""
    settings = record["settings"]
    return [
        f"capacity = {settings['capacity']}",
        f'payload-memory = "{units.exact_size(settings["payload_bytes"])}"',
        f'replay-memory = "{units.exact_size(settings["replay_bytes_max"])}"',
        f"# /dev/shm: {units.format_size(record['shm_bytes'])} in total, "
        f"{record['timer_bytes']:.0f} B per timer, {record['timers_per_gib']:,} timers per GiB",
    ]


def sizes(timers: int, blob_bytes: int, with_wal: bool) -> Sizes:
    """Return the sizes for timers whose key and payload have `blob_bytes` bytes in total.

    Raises InvalidSetting for too many timers.
    """
    many = max(timers, MANY)
    total, more, less = (_shm_bytes(n, blob_bytes, with_wal) for n in (timers, many, many // 2))
    return Sizes(_settings(timers, blob_bytes), total, (more - less) / (many - many // 2))


def timers_in(space_bytes: int, blob_bytes: int, with_wal: bool) -> int:
    """Return how many timers fit into `space_bytes` of /dev/shm; 0 if not even the fixed parts
    fit."""
    low, high = 0, space_bytes // 64
    while low < high:
        middle = (low + high + 1) // 2
        fits = _shm_bytes(middle, blob_bytes, with_wal) <= space_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _settings(timers: int, blob_bytes: int) -> dict[str, Any]:
    granules_bytes = -(-blob_bytes // 16) * 16
    replay_bytes = max(4096, Config("size").replay_capacity * granules_bytes)
    return {
        "capacity": timers,
        "payload_bytes": timers * granules_bytes + replay_bytes,
        "replay_bytes_max": replay_bytes,
    }


def _shm_bytes(timers: int, blob_bytes: int, with_wal: bool) -> int:
    from purgatoryd.daemon.store import core_config
    from purgatoryd.shm_layout.arena import arena_file_bytes

    wal = "wal" if with_wal else ""
    config = Config("size", wal_dir=wal, **_settings(timers, blob_bytes))
    return sum(arena_file_bytes(core_config(config)))


# ---- the table of docs/operations.md -------------------------------------------------------------


def table() -> str:
    """Return the table of memory by payload size, without and with a WAL."""
    rows = [
        "| payload | bytes per timer | timers per GiB | bytes with a WAL | timers per GiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for payload in PAYLOADS:
        cells = [f"{payload:,} B"]
        for with_wal in (False, True):
            blob = KEY_BYTES + payload
            a_timer = sizes(1_000_000, blob, with_wal).timer_bytes
            cells += [f"{a_timer:,.0f} B", f"{timers_in(GIB, blob, with_wal):,}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def refresh(page: str) -> str:
    """Return the text of a page with its table regenerated."""
    before, _, rest = page.partition(MARKS[0])
    return before + MARKS[0] + table() + MARKS[1] + rest.partition(MARKS[1])[2]
