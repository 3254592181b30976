"""bulk-load ls, status and forget: bulk loads whose rows the daemon remembers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from purgatoryd import clients
from purgatoryd.cli.arena import print_table, reading
from purgatoryd.cli.exits import Command
from purgatoryd.cli.options import emit, json_option, name_option, timeout_option
from purgatoryd.cli.shards import daemons

if TYPE_CHECKING:
    from purgatoryd.shm_layout.arena import Reader


class BulkLoadId(click.ParamType[bytes]):
    """16 bytes as 32 hex digits, or written as a UUID."""

    name = "id"

    def convert(self, value: Any, param: Any, ctx: Any) -> bytes:
        """The bytes of `value`; bytes pass."""
        if isinstance(value, bytes):
            return value
        try:
            bulk_load = bytes.fromhex(str(value).replace("-", ""))
        except ValueError:
            bulk_load = b""
        if len(bulk_load) != 16 or not any(bulk_load):
            self.fail(
                f"{value!r} is not the id of a bulk load: 32 hex digits, not all 0.", param, ctx
            )
        return bulk_load


id_argument = click.argument("bulk_load", metavar="ID", type=BulkLoadId())


@click.group("bulk-load")
def bulk_load_command() -> None:
    """Bulk loads, whose rows are done once however often they are sent."""


def bulk_load_records(reader: Reader, now_ns: int) -> Iterator[dict[str, Any]]:
    """One record for each bulk load that an arena remembers; `now_ns` is CLOCK_BOOTTIME."""
    names = reader.namespaces()
    for bulk_load in reader.bulk_loads():
        yield {
            "bulk_load": bulk_load.id.hex(),
            "namespace": names[bulk_load.namespace_row].name,
            "uid": bulk_load.uid,
            "state": bulk_load.state.name.lower(),
            "fencing_token": bulk_load.fencing_token,
            "rows": bulk_load.rows,
            "upto": bulk_load.upto,
            "unused_ns": max(0, now_ns - bulk_load.used_boot_ns),
        }


@bulk_load_command.command("ls", cls=Command)
@name_option
@json_option
def ls_command(name: str, as_json: bool) -> None:
    """List the bulk loads that are remembered, and how far each is.

    Reads the shared memory and does not trouble the daemon.
    """
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    rows = []
    for daemon in daemons(name):
        with reading(daemon.name) as reader:
            rows += [daemon.record | row for row in bulk_load_records(reader, now_ns)]
    if not as_json and rows:
        print_table(rows, name)
    for row in rows if as_json else []:
        emit(row, "", as_json)


@bulk_load_command.command("status", cls=Command)
@id_argument
@name_option
@timeout_option
@json_option
def status_command(bulk_load: bytes, name: str, timeout: float, as_json: bool) -> None:
    """Show which rows of the bulk load ID are done, as ranges without their end.

    For root, the daemon's own uid and those of --admin-uid. A bulk load that is not remembered has
    the state none.
    """
    with clients.Admin(name, timeout=timeout) as admin:
        status = admin.bulk_load_status(bulk_load)
    done = [[rows.start, rows.stop] for rows in status.done]
    record = {
        "bulk_load": bulk_load.hex(),
        "state": status.state.name.lower(),
        "fencing_token": status.fencing_token,
        "rows": status.rows,
        "done": done,
    }
    ranges = (f"{first}..{upto}" for first, upto in done)
    lines = [f"{field:<8}{value}" for field, value in record.items() if field != "done"]
    emit(record, "\n".join([*lines, *(f"done    {text}" for text in ranges)]), as_json)


@bulk_load_command.command("forget", cls=Command)
@id_argument
@name_option
@timeout_option
@json_option
def forget_command(bulk_load: bytes, name: str, timeout: float, as_json: bool) -> None:
    """Free what the daemon remembers of the bulk load ID; its timers stay.

    A row of it that is sent again afterwards is added again. For root, the daemon's own uid and
    those of --admin-uid.
    """
    with clients.Admin(name, timeout=timeout) as admin:
        admin.forget_bulk_load(bulk_load)
    emit(
        {"bulk_load": bulk_load.hex(), "state": "none"}, f"{bulk_load.hex()} is forgotten", as_json
    )
