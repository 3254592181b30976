"""session ls and drop: the clients of a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from purgatoryd.cli.arena import print_table
from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.options import emit, json_option, name_option, timeout_option

if TYPE_CHECKING:
    from purgatoryd.shm_layout.wire import SessionInfo


class SessionId(click.ParamType[int]):
    """The id of a session as `session ls` prints it: 16 hexadecimal digits."""

    name = "session"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """The number of `value`; integers pass."""
        try:
            number = value if isinstance(value, int) else int(value, 16)
        except ValueError:
            number = -1
        if not 0 < number < 2**64:
            self.fail(f"{value!r} is no id of a session, such as 9f0c55d1a2b30004", param, ctx)
        return number


def session_record(info: SessionInfo, now_ns: int) -> dict[str, Any]:
    """A session in JSON; times in seconds before now."""
    return {
        "session": f"{info.session:016x}",
        "uid": info.uid,
        "pid": info.pid,
        "open_s": round((now_ns - info.opened_boot_ns) / 1e9, 3),
        "idle_s": round((now_ns - info.used_boot_ns) / 1e9, 3),
        "grace_s": info.grace_ns / 1e9,
        "operations": info.operations,
        "unacknowledged": info.unacknowledged,
    }


@click.group("session")
def session_command() -> None:
    """Sessions of the clients of a daemon."""


@session_command.command("ls", cls=Command)
@name_option
@timeout_option
@json_option
def ls_command(name: str, timeout: float, as_json: bool) -> None:
    """List the open sessions: who has them, and what they own.

    Administrators see all of them, others those of their own uid. Pid 0 is a client on another
    host or in another pid namespace. `operations` counts those that are armed and those with an
    outcome that is not acknowledged.
    """
    from purgatoryd.clients import Admin
    from purgatoryd.clients.times import boot_now_ns

    with Admin(name, timeout=timeout) as admin:
        sessions = admin.sessions()
    rows = [session_record(info, boot_now_ns()) for info in sessions]
    if not as_json and rows:
        print_table(rows, name)
    for row in rows if as_json else []:
        emit(row, "", as_json)


@session_command.command("drop", cls=Command)
@click.argument("session", type=SessionId())
@name_option
@timeout_option
@json_option
def drop_command(session: int, name: str, timeout: float, as_json: bool) -> int:
    """End SESSION, an id that `session ls` prints.

    Its unacknowledged outcomes are freed; its armed operations and timers stay. A client that is
    still there opens another session with its next call. For administrators, and for sessions of
    one's own uid. Exit code 1 means that there is no such session.
    """
    from purgatoryd.clients import Admin
    from purgatoryd.shm_layout.errors import MessageRefused

    result = "dropped"
    try:
        with Admin(name, timeout=timeout) as admin:
            admin.drop_session(session)
    except MessageRefused as error:
        if error.name != "SESSION_EXPIRED":
            raise
        result = "unknown"
    shown = f"{session:016x}"
    emit({"session": shown, "result": result.upper()}, f"{result} {shown}", as_json)
    return Exit.DONE if result == "dropped" else Exit.NEGATIVE
