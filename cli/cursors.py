"""The commands cursor ls and delete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from purgatoryd import clients
from purgatoryd.cli.arena import daemon_records, print_records
from purgatoryd.cli.exits import Command, Group
from purgatoryd.cli.options import (
    emit,
    json_option,
    name_option,
    namespace_option,
    timeout_option,
    visible,
)

if TYPE_CHECKING:
    from purgatoryd.shm_layout.arena import Reader


@click.group("cursor", cls=Group)
def cursor_command() -> None:
    """Show and delete cursors, the stored positions of subscribers."""


def cursor_records(reader: Reader, now_ns: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each cursor in an arena. `now_ns`: the current CLOCK_BOOTTIME."""
    names, topics = reader.namespaces(), reader.topics_by_row()
    for cursor in reader.cursors():
        yield {
            "cursor": cursor.name,
            "namespace": names[cursor.namespace_row].name,
            "uid": cursor.uid,
            "topics": "all" if cursor.every_topic else str(len(cursor.positions)),
            "lag": cursor.lag(topics),
            "unused_ns": max(0, now_ns - cursor.used_boot_ns),
        }


@cursor_command.command("ls", cls=Command)
@name_option
@json_option
def ls_command(name: str, as_json: bool) -> None:
    """List the cursors with their lag in notices.

    The lag is the number of notices that a cursor has not committed. The command reads the shared
    memory without contacting the daemon.
    """
    print_records(daemon_records(name, cursor_records), name, as_json)


@cursor_command.command("delete", cls=Command)
@click.argument("cursor")
@name_option
@namespace_option
@timeout_option
@json_option
def delete_command(cursor: str, name: str, namespace: str, timeout: float, as_json: bool) -> None:
    """Delete CURSOR of a namespace.

    A subscriber that opens it again begins with the notices from then on. A cursor that a
    subscriber has open cannot be deleted.
    """
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        client.delete_cursor(cursor)
    record = {"namespace": namespace, "cursor": cursor}
    emit(record, f"deleted {visible(cursor)}", as_json)
