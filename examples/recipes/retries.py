"""Retries: each payment is collected once, however often the bank refuses and processes die.

`request` stores a payment and arms a timer for its due time. Worker processes are members of one
consumer group, which leases each due payment to one of them. If the bank refuses, the handler
raises BankRefused: the daemon repeats the attempt after a random delay whose limit doubles with
each failure. After ATTEMPTS failures the payment is a dead letter, which a person looks at:
`purgatoryd dead ls payments` shows it, and `purgatoryd dead requeue` tries again.

Three rules keep the result right if a process or the daemon is killed at any point:

1. `request` stores the payment first, and then arms the timer, whose key is unique for a day. If
   `request` is killed, the caller repeats it, and nothing is stored or armed twice, also if the
   timer has fired meanwhile.
2. The group exists before the first timer fires, so it gets all of them.
3. A handler may run twice for one payment, because a worker can die between the bank's answer and
   the ack. `collect` therefore changes a payment only once, in one transaction.

    python -m examples.recipes.retries DAEMON FILE [BACKOFF_SECONDS]    runs a worker
"""

from __future__ import annotations

import signal
import sqlite3
import sys
from contextlib import closing, suppress
from datetime import timedelta

from purgatoryd.clients import Client, Consumer, Exists, Job

NAMESPACE = "payments"
GROUP = "payments"
TOPIC = "due"
BACKOFF_S, BACKOFF_CAP_S, ATTEMPTS = 1.0, 3600.0, 6
TIMEOUT_S = 60.0
REPEATED_WITHIN = timedelta(days=1)
"""Longest time after which a caller repeats a request."""


class BankRefused(Exception):
    """The bank refuses a payment for now."""


def open_table(file: str) -> sqlite3.Connection:
    """Open the tables of payments and attempts, and create them if they do not exist. `refusals`:
    how often the bank will refuse the payment; a real bank decides this itself."""
    table = sqlite3.connect(file, timeout=30)
    table.executescript(
        "CREATE TABLE IF NOT EXISTS payments "
        "(name TEXT PRIMARY KEY, refusals INTEGER, collected INTEGER DEFAULT 0);"
        "CREATE TABLE IF NOT EXISTS attempts (name TEXT, attempt INTEGER)"
    )
    return table


def open_group(timers: Client, backoff_s: float = BACKOFF_S) -> None:
    """Create the consumer group, unless it exists."""
    timers.create_group(
        GROUP, [TOPIC], max_attempts=ATTEMPTS, backoff=backoff_s, backoff_cap=BACKOFF_CAP_S
    )


def request(
    timers: Client, table: sqlite3.Connection, name: str, due_s: float, refusals: int = 0
) -> None:
    """Store a payment, and let the workers collect it in `due_s` seconds."""
    with table:
        table.execute(
            "INSERT OR IGNORE INTO payments (name, refusals) VALUES (?, ?)", (name, refusals)
        )
    with suppress(Exists):  # an earlier call has armed the timer, which has fired
        timers.add(name, due_s, topic=TOPIC, mode="keep", unique_for=REPEATED_WITHIN)


def collect(table: sqlite3.Connection, name: str, attempt: int) -> None:
    """Collect a payment, unless it is collected. Raises BankRefused."""
    with table:
        table.execute("INSERT INTO attempts VALUES (?, ?)", (name, attempt))
        refused = table.execute(
            "UPDATE payments SET refusals = refusals - 1 WHERE name = ? AND refusals > 0", (name,)
        )
        if refused.rowcount == 0:
            table.execute(
                "UPDATE payments SET collected = collected + 1 WHERE name = ? AND collected = 0",
                (name,),
            )
    if refused.rowcount:
        raise BankRefused(f"the bank refuses payment {name}")


def work(daemon: str, file: str, backoff_s: float = BACKOFF_S) -> None:
    """Collect payments until SIGTERM."""

    def handle(job: Job) -> None:
        with closing(open_table(file)) as table:
            collect(table, str(job.key), job.attempt)

    with Client(daemon, namespace=NAMESPACE, timeout=TIMEOUT_S) as timers:
        open_group(timers, backoff_s)
    with Consumer(
        daemon, namespace=NAMESPACE, group=GROUP, create=False, timeout=TIMEOUT_S
    ) as jobs:
        signal.signal(signal.SIGTERM, lambda *_: jobs.stop())
        jobs.run(handle, concurrency=4)


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:]))
