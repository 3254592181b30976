"""Debounced session expiry: a session ends IDLE after its last request, exactly once.

A web process arms a timer at login, and each request extends it. A worker ends the sessions whose
timers fire. Any number of web processes, and one worker or several, share a table of sessions.

    add(session, IDLE, mode="extend")    a login or a request; never shortens the session
    Subscriber(topics=["sessions"])      each notice is the end of a session

Three rules keep the result right if a process or the daemon is killed at any point:

1. The ticket of a login identifies the session. A request whose answer has another ticket came too
   late: the timer had fired, and the request has only armed a new timer, which nobody waits for.
2. The web process arms the timer first, and has the table's write lock before the deadline. So a
   worker that gets the notice finds the session. If the lock came too late, the web process arms
   the timer again. A kill in between leaves a timer without a session, which is harmless.
3. A worker that starts, or that has lost notices, first subscribes and then looks at all open
   sessions: one without its timer ended while no worker ran.

Ending a session is one statement that changes a row only once, so a repeated notice does nothing.

    python -m examples.recipes.session_expiry DAEMON FILE    runs a worker
"""

from __future__ import annotations

import sqlite3
import sys
import time
from datetime import timedelta
from typing import NamedTuple

from purgatoryd.clients import Client, Lagged, Subscriber

NAMESPACE = "web"
TOPIC = "sessions"
IDLE = timedelta(minutes=30)


class Session(NamedTuple):
    """A login. Both values belong in the cookie."""

    name: str
    ticket: int


def open_table(file: str) -> sqlite3.Connection:
    """Open the table of sessions, and create it if it does not exist."""
    table = sqlite3.connect(file, timeout=30)
    table.execute(
        "CREATE TABLE IF NOT EXISTS sessions "
        "(name TEXT, ticket INTEGER, ended_ns INTEGER, PRIMARY KEY (name, ticket))"
    )
    table.commit()
    return table


def login(timers: Client, table: sqlite3.Connection, name: str, idle: timedelta) -> Session:
    """Begin a session. Another login under the same name shares its timer."""
    while True:
        timer = timers.add(name, idle, topic=TOPIC, mode="extend")
        session = Session(name, timer.ticket)
        with table:
            table.execute("INSERT OR IGNORE INTO sessions VALUES (?, ?, NULL)", session)
            if time.clock_gettime_ns(time.CLOCK_BOOTTIME) < timer.deadline_boot_ns:
                return session  # no worker can have looked for the row before it is committed
            table.rollback()


def touch(timers: Client, session: Session, idle: timedelta) -> int | None:
    """Extend a session by a request. Return its deadline on the daemon's clock, in ns; None if the
    session has ended."""
    timer = timers.add(session.name, idle, topic=TOPIC, mode="extend")
    return timer.deadline_boot_ns if timer.ticket == session.ticket else None


def logout(timers: Client, table: sqlite3.Connection, session: Session) -> bool:
    """End a session now. Return False if it had ended."""
    ended = end(table, session)
    timers.cancel(session.name, ticket=session.ticket)
    return ended


def end(table: sqlite3.Connection, session: Session) -> bool:
    """Store the end of a session. Return whether this call ended it: only then tell the user."""
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    with table:
        changed = table.execute(
            "UPDATE sessions SET ended_ns = ? WHERE name = ? AND ticket = ? AND ended_ns IS NULL",
            (now_ns, *session),
        )
    return changed.rowcount == 1


def end_missed(timers: Client, table: sqlite3.Connection) -> None:
    """End the open sessions whose timers have fired."""
    for row in table.execute("SELECT name, ticket FROM sessions WHERE ended_ns IS NULL").fetchall():
        timer = timers.get(row[0])
        if timer is None or timer.ticket != row[1]:
            end(table, Session(*row))


def work(daemon: str, file: str) -> None:
    """End sessions as their timers fire, until the process is killed."""
    table = open_table(file)
    with (
        Subscriber(daemon, namespace=NAMESPACE, topics=[TOPIC]) as notices,
        Client(daemon, namespace=NAMESPACE) as timers,
    ):
        end_missed(timers, table)
        while True:
            try:
                notice = notices.get()
            except Lagged:
                end_missed(timers, table)
                continue
            if notice is not None:
                end(table, Session(str(notice.key), notice.ticket))


if __name__ == "__main__":
    work(*sys.argv[1:])
