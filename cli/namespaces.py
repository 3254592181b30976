"""The commands namespace create, set and ls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.arena import human, print_records, reading
from purgatoryd.cli.completion import namespace_names
from purgatoryd.cli.exits import Command, Group
from purgatoryd.cli.options import emit, json_option, name_option, timeout_option, visible
from purgatoryd.cli.shards import daemons

if TYPE_CHECKING:
    from purgatoryd.shm_layout.wire import NamespaceSettings

DURABILITY = ("memory", "durable")


class Owner(units.Count):
    """A uid, or "anybody"."""

    name = "uid"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return `value` as a uid. An int is returned unchanged."""
        from purgatoryd.shm_layout.layout import ANYBODY

        if value == "anybody":
            return ANYBODY
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a uid nor 'anybody'.", param, ctx)


def settings_record(namespace: str, settings: NamespaceSettings) -> dict[str, Any]:
    """Return a namespace's settings for JSON. An owner of null means anybody; a quota of 0 means no
    quota."""
    from purgatoryd.shm_layout.layout import ANYBODY

    owner = settings.owner_uid
    return {
        "namespace": namespace,
        **settings._asdict(),
        "owner_uid": None if owner == ANYBODY else owner,
        "durability": DURABILITY[settings.durability],
        "paused": bool(settings.paused),
    }


@click.group("namespace", cls=Group)
def namespace_command() -> None:
    """Create namespaces; show and set owners, durability and quotas."""


@namespace_command.command("set", cls=Command)
@click.argument("namespace", shell_complete=namespace_names)
@name_option
@click.option("--owner", type=Owner(), help="Only uid that may use the namespace, or 'anybody'.")
@click.option(
    "--durability",
    type=click.Choice(DURABILITY),
    help="Durability of acknowledged changes: in memory, or on disk.",
)
@click.option("--quota-timers", type=click.INT, help="Timers armed at once; 0 = no quota.")
@click.option("--quota-bytes", type=units.Size(), help="Bytes of keys and payloads; 0 = no quota.")
@click.option(
    "--quota-ops", type=click.INT, help="Adds, watches and advances per second; 0 = no quota."
)
@click.option(
    "--park-beyond",
    type=units.Duration(),
    help="Park timers that are due later than this duration from now; 0s = park no timers.",
)
@click.option(
    "--late-per-second",
    type=click.INT,
    help="Late timers that fire per second after an outage or a pause; 0 = 100000.",
)
@timeout_option
@json_option
def set_command(
    namespace: str,
    name: str,
    owner: int | None,
    durability: str | None,
    quota_timers: int | None,
    quota_bytes: int | None,
    quota_ops: int | None,
    park_beyond: int | None,
    late_per_second: int | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Change the given settings of NAMESPACE and print all its settings.

    Creates the namespace if it does not exist. Only administrators may use this command: root, the
    daemon's own uid and the uids of --admin-uid.

    \b
    purgatoryd namespace set orders --owner 1001 --quota-timers 100000
    """
    with clients.Admin(name, timeout=timeout) as admin:
        settings = admin.set_namespace(
            namespace,
            owner_uid=owner,
            durability=None if durability is None else DURABILITY.index(durability),
            quota_timers=quota_timers,
            quota_bytes=quota_bytes,
            quota_ops=quota_ops,
            park_beyond_ns=park_beyond,
            late_per_s=late_per_second,
        )
    record = settings_record(namespace, settings)
    lines = (f"{field:<16}{visible(human(field, value))}" for field, value in record.items())
    emit(record, "\n".join(lines), as_json)


@namespace_command.command("create", cls=Command)
@click.argument("namespace")
@name_option
@click.option(
    "--partitions",
    type=click.INT,
    default=1,
    show_default=True,
    help="Number of partitions, which are on different shards.",
)
@timeout_option
@json_option
def create_command(
    namespace: str, name: str, partitions: int, timeout: float, as_json: bool
) -> None:
    """Create NAMESPACE before its first use.

    Only a namespace with several partitions needs this command. Other namespaces are created by
    their first use. Several partitions need a daemon with --shards. An existing namespace is
    refused unless it has this number of partitions. Only administrators may use this command.

    \b
    purgatoryd namespace create clicks
    """
    with clients.Admin(name, timeout=timeout) as admin:
        admin.create_namespace(namespace, partitions)
    record = {"namespace": namespace, "partitions": partitions}
    emit(record, f"{visible(namespace)} has {partitions} partitions", as_json)


@namespace_command.command("ls", cls=Command)
@name_option
@json_option
def ls_command(name: str, as_json: bool) -> None:
    """List the namespaces with their settings and their use of quotas.

    Reads the shared memory without contacting the daemon.
    """
    rows = []
    for daemon in daemons(name):
        with reading(daemon.name) as reader:
            rows += [
                settings_record(n.name, n.settings)
                | {"timers": n.live, "bytes": n.bytes}
                | daemon.record
                for n in reader.namespaces_of_users()
            ]
    print_records(rows, name, as_json)
