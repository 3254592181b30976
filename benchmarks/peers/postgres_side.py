"""PostgreSQL: timers as rows; a process takes due rows with SKIP LOCKED. Part of `--nightly`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .side import PAYLOAD, Job, Run, Server, Start, boot_ns, child, lacking, stamp, stamped

BINARIES = "/usr/lib/postgresql"
USER = "postgres"
"""The user of the server, because it refuses to run as root."""
TABLE = (
    "CREATE TABLE timers (key bytea PRIMARY KEY, due_ns bigint NOT NULL, payload bytea NOT NULL)"
)
INDEX = "CREATE INDEX ON timers (due_ns)"
INSERT = "INSERT INTO timers SELECT * FROM unnest(%s::bytea[], %s::bigint[], %s::bytea[])"
TAKE = """DELETE FROM timers WHERE key IN (SELECT key FROM timers WHERE due_ns <= %s ORDER BY due_ns
    LIMIT 1000 FOR UPDATE SKIP LOCKED) RETURNING payload"""
TAKEN_AT_ONCE = 1000
POLL_S = 0.001

Timers = Sequence[tuple[bytes, int, bytes]]
"""(key, deadline in ns of the boot clock, payload)."""


def binary(name: str) -> str | None:
    """Return the path of a program of the newest version that is installed."""
    folders = sorted(Path(BINARIES).glob("*/bin"), key=lambda folder: float(folder.parent.name))
    return shutil.which(name, path=str(folders[-1])) if folders else None


def missing() -> str:
    if binary("postgres") is None:
        return f"program postgres in {BINARIES}"
    return lacking([], ["psycopg"])


def user() -> str | None:
    return USER if os.getuid() == 0 else None


@contextmanager
def server(start: Start) -> Iterator[Server]:
    data = start.files / "data"
    if user():
        for folder in (start.directory, start.files):
            shutil.chown(folder, USER, USER)
    subprocess.run(
        [str(binary("initdb")), "-D", str(data), "-A", "trust", "-U", USER, "--no-sync"],
        user=user(), check=True, stdout=subprocess.DEVNULL, cwd=start.files,
    )  # fmt: skip
    sync = "on" if start.log == "always" else "off"
    words = [str(binary("postgres")), "-D", str(data), "-k", str(start.directory), "-c",
             "listen_addresses=", "-c", f"synchronous_commit={sync}"]  # fmt: skip
    with child(words, lambda: serves(start.directory), user()) as pid:
        kind = "CREATE TABLE" if start.log else "CREATE UNLOGGED TABLE"
        connected(start.directory).execute(TABLE.replace("CREATE TABLE", kind))
        connected(start.directory).execute(INDEX)
        yield Server(start.directory, (pid,), family=True)


def connected(directory: Path) -> Any:
    import psycopg

    return psycopg.connect(
        host=str(directory), user=USER, dbname="postgres", autocommit=True, prepare_threshold=1
    )


def serves(directory: Path) -> bool:
    import psycopg

    with suppress(psycopg.OperationalError):
        return bool(connected(directory).execute("SELECT true").fetchone())
    return False


def insert(connection: Any, timers: Timers) -> None:
    """Insert timers with one statement."""
    connection.execute(INSERT, [list(column) for column in zip(*timers, strict=True)])


def add(server: Server, job: Job) -> Run:
    connection, now_ns = connected(server.address), boot_ns()
    timers = [(key, now_ns + int(delay_s * 1e9), PAYLOAD) for key, delay_s in job.timers()]
    calls = job.calls(timers)

    def run() -> None:
        for some in job.paced(calls):
            insert(connection, some)

    return run


def arm(server: Server, deadlines_ns: list[int], first: int = 0) -> None:
    connection = connected(server.address)
    timers = [
        (b"%016d" % n, due_ns, stamped(due_ns)) for n, due_ns in enumerate(deadlines_ns, first)
    ]
    for at in range(0, len(timers), TAKEN_AT_ONCE):
        insert(connection, timers[at : at + TAKEN_AT_ONCE])


def polled(server: Server) -> Iterator[tuple[int, int]]:
    """Take due rows each millisecond. Yields as ours.subscribed does."""
    connection = connected(server.address)
    yield 0, 0
    while True:
        taken = connection.execute(TAKE, [boot_ns()]).fetchall()
        now_ns = boot_ns()
        yield from ((now_ns, stamp(payload)) for (payload,) in taken)
        if len(taken) < TAKEN_AT_ONCE:
            time.sleep(POLL_S)
