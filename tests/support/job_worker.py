"""A process that takes jobs: `python job_worker.py DAEMON GROUP LEASE_S`.

It writes one line for each job before it works, and one after the daemon has taken the answer:

    start TICKET ATTEMPT BOOT_NS
    acked TICKET ATTEMPT BOOT_NS
    rejected TICKET ATTEMPT BOOT_NS
    lost TICKET ATTEMPT BOOT_NS
"""

from __future__ import annotations

import os
import signal
import sys

from real_daemon import boot_ns

from purgatoryd.clients import Consumer, DaemonError, LeaseLost


def report(event: str, ticket: int, attempt: int) -> None:
    os.write(1, f"{event} {ticket} {attempt} {boot_ns()}\n".encode())


def is_rejected(ticket: int) -> bool:
    """Return whether the process rejects the job, so that it becomes a dead letter."""
    return ticket % 97 == 0


def main(name: str, group: str, lease: str) -> None:
    with Consumer(
        name, namespace="shop", group=group, create=False, lease=float(lease), timeout=60,
        max_in_flight=8,
    ) as jobs:  # fmt: skip
        signal.signal(signal.SIGTERM, lambda *_: jobs.stop())
        os.write(1, b"ready\n")
        for job in jobs:
            report("start", job.ticket, job.attempt)
            rejects = is_rejected(job.ticket)
            try:
                if rejects:
                    job.reject(f"attempt {job.attempt}")
                else:
                    job.ack()
            except LeaseLost:
                report("lost", job.ticket, job.attempt)
            except DaemonError as error:
                sys.stderr.write(f"{error!r}\n")
                raise
            else:
                report("rejected" if rejects else "acked", job.ticket, job.attempt)


if __name__ == "__main__":
    main(*sys.argv[1:])
