"""The command consume."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.groups import group_options, settings_of_options
from purgatoryd.cli.options import (
    emit,
    json_option,
    key_record,
    key_text,
    name_option,
    namespace_option,
    payload_record,
    timeout_option,
    visible,
)

if TYPE_CHECKING:
    from purgatoryd.clients import Consumer, Job

ERROR_BYTES = 1024
"""Bytes of a command's stderr that are stored with a failed job."""


def job_record(job: Job) -> dict[str, Any]:
    """Return a job for JSON."""
    return {
        **key_record(job.key),
        "group": job.group,
        "topic": job.topic,
        "ticket": job.ticket,
        "attempt": job.attempt,
        "priority": job.priority,
        "cause": job.cause.name,
        "verdict": job.verdict and job.verdict._asdict(),
        "missed": job.missed,
        "deadline_boot_ns": job.deadline_boot_ns,
        "fired_boot_ns": job.fired_boot_ns,
        "fired_at": units.format_moment(job.fired),
        "lateness_ns": job.lateness_ns,
        **payload_record(job.payload),
    }


def job_text(job: Job) -> str:
    """Return a job as a line of text."""
    late = units.format_duration(job.lateness_ns)
    payload = visible(job.payload.decode(errors="backslashreplace"))
    head = f"{units.format_moment(job.fired)} {visible(job.topic)} attempt {job.attempt}"
    return f"{head} {job.cause.name.lower()} {key_text(job.key)} ({late} late) {payload}"


@click.command("consume", cls=Command)
@click.argument("group")
@name_option
@namespace_option
@click.option(
    "-t", "--topic", "--topics", "topics", multiple=True,
    help="Topic of the consumer group, if the command creates it; may be repeated.",
)  # fmt: skip
@click.option(
    "--exec", "command", metavar="CMD",
    help="Run this shell command for each job. Exit code 0 acknowledges the job.",
)  # fmt: skip
@click.option(
    "--lease", type=units.Duration(units.NS_PER["ms"]), default="30s", show_default=True,
    help="Time for which the daemon gives a job to this process. It is extended while CMD runs.",
)  # fmt: skip
@click.option(
    "--concurrency", type=units.Whole(1, 4096), default=1, show_default=True,
    help="Number of commands that run at the same time.",
)  # fmt: skip
@click.option(
    "--drain", type=units.Duration(0), default="30s", show_default=True,
    help="Time to wait for running commands after SIGTERM.",
)  # fmt: skip
@click.option("--count", type=units.Whole(1), help="Stop after this number of jobs.")
@click.option(
    "--idle", type=units.Duration(0),
    help="Stop after this time without a job, with exit code 1.",
)  # fmt: skip
@group_options
@timeout_option
@json_option
def consume_command(
    group: str, name: str, namespace: str, topics: tuple[str, ...], command: str | None,
    lease: int, concurrency: int, drain: int, count: int | None, idle: int | None,
    timeout: float, as_json: bool, start: Any, **settings: Any,
) -> int:  # fmt: skip
    """Print the jobs of a consumer group, or run a command for each.

    The command is a member of the consumer group GROUP. Without --exec, each job is printed as a
    line and then acknowledged. With --exec, CMD gets the payload on its stdin, and PURGATORYD_KEY,
    PURGATORYD_TOPIC, PURGATORYD_TICKET, PURGATORYD_ATTEMPT and PURGATORYD_CAUSE in its environment.
    The cause is "expired" for a timer. Another exit code than 0 counts the attempt as failed; the
    end of stderr is stored with the job. With topics, a missing consumer group is created.

    After SIGTERM or Ctrl-C the command takes no more jobs, waits for running commands, and gives
    the other jobs back.

    \b
    purgatoryd consume mailers -t orders --exec 'echo "$PURGATORYD_KEY"'
    """
    with clients.Consumer(
        name, namespace=namespace, group=group, topics=topics, create=bool(topics), start=start,
        lease=lease / 1e9, max_in_flight=max(64, concurrency), timeout=timeout,
        **settings_of_options(settings),
    ) as jobs:  # fmt: skip
        click.echo("consuming", err=True)
        handler = partial(_print, as_json) if command is None else partial(_execute, command)
        work = _Work(jobs, handler, count, None if idle is None else idle / 1e9)
        with stopped_by_signals(jobs):
            work.run(concurrency)
        jobs.close(drain=drain / 1e9)
    return Exit.NEGATIVE if work.idled else Exit.DONE


@contextmanager
def stopped_by_signals(jobs: Consumer) -> Iterator[None]:
    """Return a context manager in which SIGTERM and SIGINT stop the consumer."""
    before = {
        number: signal.signal(number, lambda *_: jobs.stop())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Work:
    """The threads of a `consume` command."""

    def __init__(
        self, jobs: Consumer, handler: Any, count: int | None, idle_s: float | None
    ) -> None:
        self.idled = False
        """True if no job came for `idle_s` seconds."""
        self._jobs = jobs
        self._handler = handler
        self._left = count
        self._idle_s = idle_s
        self._mutex = threading.Lock()
        self._error: BaseException | None = None

    def run(self, concurrency: int) -> None:
        """Take jobs until the count is reached, no job comes, or a signal stops the consumer."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while self._claim():
                job = self._jobs.get(self._idle_s)
                if job is None:
                    self.idled = self.idled or self._idle_s is not None
                    break
                with suppress(clients.LeaseLost):
                    self._handler(job)
                del job  # no job stays in a variable while the thread waits
        except BaseException as error:
            self._error = error
        self._jobs.stop()

    def _claim(self) -> bool:
        """Return whether this thread may take another job."""
        with self._mutex:
            if self._left is None:
                return True
            self._left -= 1
            return self._left >= 0


def _print(as_json: bool, job: Job) -> None:
    emit(job_record(job), job_text(job), as_json)
    job.ack()


def _execute(command: str, job: Job) -> None:
    """Run a shell command for a job, and answer the job by its exit code."""
    environment = os.environ | {
        "PURGATORYD_KEY": key_record(job.key)["key"],
        "PURGATORYD_TOPIC": job.topic,
        "PURGATORYD_TICKET": str(job.ticket),
        "PURGATORYD_ATTEMPT": str(job.attempt),
        "PURGATORYD_CAUSE": job.cause.name.lower(),
    }
    # A session of its own keeps Ctrl-C from the command, which has to end by itself.
    done = subprocess.run(
        command, shell=True, input=job.payload, stderr=subprocess.PIPE, env=environment,
        check=False, start_new_session=True,
    )  # fmt: skip
    text = done.stderr[-ERROR_BYTES:].decode(errors="replace")
    click.echo(text, err=True, nl=False)
    if done.returncode == 0:
        job.ack()
    else:
        job.nack(text.strip() or f"exit code {done.returncode}")
