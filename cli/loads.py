"""load ls, status and forget: bulk loads whose rows the daemon remembers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from purgatoryd.cli.arena import print_table, reading
from purgatoryd.cli.exits import Command
from purgatoryd.cli.options import emit, json_option, name_option, timeout_option
from purgatoryd.cli.shards import daemons

if TYPE_CHECKING:
    from purgatoryd.shm_layout.arena import Reader


class LoadId(click.ParamType[bytes]):
    """16 bytes as 32 hex digits, or written as a UUID."""

    name = "id"

    def convert(self, value: Any, param: Any, ctx: Any) -> bytes:
        """The bytes of `value`; bytes pass."""
        if isinstance(value, bytes):
            return value
        try:
            load = bytes.fromhex(str(value).replace("-", ""))
        except ValueError:
            load = b""
        if len(load) != 16 or not any(load):
            self.fail(f"{value!r} is not the id of a load: 32 hex digits, not all 0.", param, ctx)
        return load


id_argument = click.argument("load", metavar="ID", type=LoadId())


@click.group("load")
def load_command() -> None:
    """Bulk loads, whose rows are done once however often they are sent."""


def load_records(reader: Reader, now_ns: int) -> Iterator[dict[str, Any]]:
    """One record for each load that an arena remembers; `now_ns` is CLOCK_BOOTTIME."""
    names = reader.namespaces()
    for load in reader.loads():
        yield {
            "load": load.id.hex(),
            "namespace": names[load.namespace_row].name,
            "uid": load.uid,
            "state": load.state.name.lower(),
            "fencing_token": load.fencing_token,
            "rows": load.rows,
            "upto": load.upto,
            "unused_ns": max(0, now_ns - load.used_boot_ns),
        }


@load_command.command("ls", cls=Command)
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
            rows += [daemon.record | row for row in load_records(reader, now_ns)]
    if not as_json and rows:
        print_table(rows, name)
    for row in rows if as_json else []:
        emit(row, "", as_json)


@load_command.command("status", cls=Command)
@id_argument
@name_option
@timeout_option
@json_option
def status_command(load: bytes, name: str, timeout: float, as_json: bool) -> None:
    """Show which rows of the load ID are done, as ranges without their end.

    For root, the daemon's own uid and those of --admin-uid. A load that is not remembered has the
    state none.
    """
    from purgatoryd.clients import Admin

    with Admin(name, timeout=timeout) as admin:
        status = admin.load_status(load)
    done = [[rows.start, rows.stop] for rows in status.done]
    record = {
        "load": load.hex(),
        "state": status.state.name.lower(),
        "fencing_token": status.fencing_token,
        "rows": status.rows,
        "done": done,
    }
    ranges = (f"{first}..{upto}" for first, upto in done)
    lines = [f"{field:<8}{value}" for field, value in record.items() if field != "done"]
    emit(record, "\n".join([*lines, *(f"done    {text}" for text in ranges)]), as_json)


@load_command.command("forget", cls=Command)
@id_argument
@name_option
@timeout_option
@json_option
def forget_command(load: bytes, name: str, timeout: float, as_json: bool) -> None:
    """Free what the daemon remembers of the load ID; its timers stay.

    A row of it that is sent again afterwards is added again. For root, the daemon's own uid and
    those of --admin-uid.
    """
    from purgatoryd.clients import Admin

    with Admin(name, timeout=timeout) as admin:
        admin.forget_load(load)
    emit({"load": load.hex(), "state": "none"}, f"{load.hex()} is forgotten", as_json)
