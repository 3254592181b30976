"""size: how much memory so many timers take, and what to set for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from purgatoryd.cli import units
from purgatoryd.cli.exits import Command
from purgatoryd.cli.options import emit, json_option
from purgatoryd.daemon.config import Config
from purgatoryd.shm_layout.errors import InvalidArgument

GIB = 2**30
KEY_BYTES = 16
PAYLOADS = (0, 48, 240, 1008)
"""Bytes of the payloads in the table of the page, which with the key fill whole granules."""
MANY = 100_000
"""What one of fewer takes is lost in whole pages."""
MARKS = "<!-- capacity: begin -->\n", "<!-- capacity: end -->"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a daemon needs that has space for timers of one size."""

    settings: dict[str, Any]
    """Fields of Config that differ from the defaults."""
    shm_bytes: int
    """Of both arena files."""
    timer_bytes: float
    """Of them, what one more timer takes."""


@click.command("size", cls=Command)
@click.option(
    "--timers", type=click.IntRange(1), required=True, help="Timers armed at once, at most."
)
@click.option(
    "--key-bytes", type=click.IntRange(1), default=KEY_BYTES, show_default=True,
    help="Size of a key.",
)  # fmt: skip
@click.option(
    "--payload-bytes", type=click.IntRange(0), default=48, show_default=True,
    help="Size of a payload.",
)  # fmt: skip
@click.option("--with-wal", is_flag=True, help="The daemon keeps a WAL.")
@json_option
def size_command(
    timers: int, key_bytes: int, payload_bytes: int, with_wal: bool, as_json: bool
) -> None:
    """Say how much of /dev/shm so many timers take, and what to set for them.

    There is space for all of them, and in addition for a replay buffer full of notices of that
    size. What is not set stays as it is by default.
    """
    from purgatoryd.shm_layout.layout import KEY_MAX, PAYLOAD_MAX

    if key_bytes > KEY_MAX or payload_bytes > PAYLOAD_MAX:
        raise InvalidArgument(f"keys have {KEY_MAX} bytes at most, payloads {PAYLOAD_MAX}")
    found = sizes(timers, key_bytes + payload_bytes, with_wal)
    record = {
        "settings": found.settings,
        "shm_bytes": found.shm_bytes,
        "timer_bytes": round(found.timer_bytes, 2),
        "timers_per_gib": timers_in(GIB, key_bytes + payload_bytes, with_wal),
    }
    emit(record, "\n".join(size_lines(record)), as_json)


def size_lines(record: dict[str, Any]) -> list[str]:
    """The figures for people."""
    settings = record["settings"]
    return [
        f"capacity = {settings['capacity']}",
        f'payload-memory = "{units.exact_size(settings["payload_bytes"])}"',
        f'replay-memory = "{units.exact_size(settings["replay_bytes_max"])}"',
        f"# {units.format_size(record['shm_bytes'])} of /dev/shm in all, "
        f"{record['timer_bytes']:.0f} B a timer, {record['timers_per_gib']:,} of them in a GiB",
    ]


def sizes(timers: int, blob_bytes: int, with_wal: bool) -> Sizes:
    """For timers whose key and payload have `blob_bytes`. Raises InvalidSetting for too many."""
    many = max(timers, MANY)
    total, more, less = (_shm_bytes(n, blob_bytes, with_wal) for n in (timers, many, many // 2))
    return Sizes(_settings(timers, blob_bytes), total, (more - less) / (many - many // 2))


def timers_in(space_bytes: int, blob_bytes: int, with_wal: bool) -> int:
    """How many such timers fit into so much of /dev/shm; 0 = not even the rest does."""
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
    """Memory by the size of payloads, without and with a WAL."""
    rows = [
        "| payload | bytes a timer | timers in a GiB | with a WAL | timers in a GiB |",
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
    """The text of a page with its table regenerated."""
    before, _, rest = page.partition(MARKS[0])
    return before + MARKS[0] + table() + MARKS[1] + rest.partition(MARKS[1])[2]
