"""The commands session ls and session drop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.arena import print_records
from purgatoryd.cli.exits import Command, Exit, Group
from purgatoryd.cli.options import emit, json_option, name_option, timeout_option

if TYPE_CHECKING:
    from purgatoryd.shm_layout.wire import SessionInfo


class SessionId(click.ParamType[int]):
    """The id of a session as `session ls` prints it: 16 hexadecimal digits."""

    name = "session"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return `value` as a number; integers are returned unchanged."""
        try:
            number = value if isinstance(value, int) else int(value, 16)
        except ValueError:
            number = -1
        if not 0 < number < 2**64:
            self.fail(f"{value!r} must be a session id such as 9f0c55d1a2b30004", param, ctx)
        return number


def session_record(info: SessionInfo, now_ns: int) -> dict[str, Any]:
    """Return a session for JSON and for the table. `now_ns`: the current CLOCK_BOOTTIME."""
    return {
        "session": f"{info.session:016x}",
        "uid": info.uid,
        "pid": info.pid,
        "opened_at": units.wall_in(info.opened_boot_ns - now_ns),
        "used_at": units.wall_in(info.used_boot_ns - now_ns),
        "grace_ns": info.grace_ns,
        "operations": info.operations,
        "unacknowledged": info.unacknowledged,
    }


@click.group("session", cls=Group)
def session_command() -> None:
    """Show and end the sessions of clients."""


@session_command.command("ls", cls=Command)
@name_option
@timeout_option
@json_option
def ls_command(name: str, timeout: float, as_json: bool) -> None:
    """List the open sessions with their clients and operations.

    Administrators see all sessions, other users the sessions of their own uid. Pid 0 means a client
    on another host or in another pid namespace. `operations` counts armed operations and operations
    with an unacknowledged outcome.
    """
    from purgatoryd.shm_layout.host import HOST

    with clients.Admin(name, timeout=timeout) as admin:
        sessions = admin.sessions()
    rows = [session_record(info, HOST.boot_ns()) for info in sessions]
    print_records(rows, name, as_json)


@session_command.command("drop", cls=Command)
@click.argument("session", type=SessionId())
@name_option
@timeout_option
@json_option
def drop_command(session: int, name: str, timeout: float, as_json: bool) -> int:
    """End SESSION, an id that `session ls` prints.

    The daemon frees the session's unacknowledged outcomes. Armed operations and timers stay. A
    running client opens another session with its next call. Administrators may end all sessions,
    other users only the sessions of their own uid. Exit code 1 means that there is no such session.
    """
    from purgatoryd.shm_layout.errors import MessageRefused

    result = "dropped"
    try:
        with clients.Admin(name, timeout=timeout) as admin:
            admin.drop_session(session)
    except MessageRefused as error:
        if error.name != "SESSION_EXPIRED":
            raise
        result = "unknown"
    shown = f"{session:016x}"
    emit({"session": shown, "result": result.upper()}, f"{result} {shown}", as_json)
    return Exit.DONE if result == "dropped" else Exit.NEGATIVE
