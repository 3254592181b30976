"""The commands bulk-load ls, status and forget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.arena import daemon_records, print_records
from purgatoryd.cli.exits import Command, Group
from purgatoryd.cli.options import emit, json_option, name_option, timeout_option

if TYPE_CHECKING:
    from purgatoryd.shm_layout.arena import Reader


class BulkLoadId(click.ParamType[bytes]):
    """The id of a bulk load: 16 bytes as 32 hexadecimal digits or as a UUID."""

    name = "id"

    def convert(self, value: Any, param: Any, ctx: Any) -> bytes:
        """Return `value` as bytes. Bytes are returned unchanged."""
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


@click.group("bulk-load", cls=Group)
def bulk_load_command() -> None:
    """Show bulk loads, which apply each row only once."""


def bulk_load_records(reader: Reader, now_ns: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each bulk load in an arena. `now_ns`: the current CLOCK_BOOTTIME."""
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
            "used_at": units.wall_in(bulk_load.used_boot_ns - now_ns),
        }


@bulk_load_command.command("ls", cls=Command)
@name_option
@json_option
def ls_command(name: str, as_json: bool) -> None:
    """List the bulk loads that the daemon remembers, with their progress.

    Reads the shared memory without contacting the daemon.
    """
    print_records(daemon_records(name, bulk_load_records), name, as_json)


@bulk_load_command.command("status", cls=Command)
@id_argument
@name_option
@timeout_option
@json_option
def status_command(bulk_load: bytes, name: str, timeout: float, as_json: bool) -> None:
    """Show which rows of the bulk load ID were applied.

    Prints ranges FIRST..END, where END is not included. The state is "none" if the daemon does not
    remember the bulk load. Only administrators may use this command.
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
    """Make the daemon forget the bulk load ID.

    Its timers stay. Rows that are sent again afterwards are added again. Only administrators may
    use this command.
    """
    with clients.Admin(name, timeout=timeout) as admin:
        admin.forget_bulk_load(bulk_load)
    emit({"bulk_load": bulk_load.hex(), "state": "none"}, f"forgot {bulk_load.hex()}", as_json)
