"""The commands groups and dead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.arena import print_table
from purgatoryd.cli.exits import Command, Exit, Group
from purgatoryd.cli.options import (
    agreed,
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
    from purgatoryd.clients import DeadLetter, GroupInfo

F = TypeVar("F", bound=Callable[..., Any])
_TIMES = {"retention_ns", "max_lease_ns", "backoff_ns", "backoff_cap_ns"}

SETTINGS = (
    click.option("--max-backlog", type=units.Whole(1), help="Budget in pending timers and jobs."),
    click.option("--max-bytes", type=units.Size(), help="Budget in bytes; 0 = no limit."),
    click.option("--retention", type=units.Duration(0), help="Longest wait of a job; 0 = none."),
    click.option("--max-lease", type=units.Duration(1), help="Longest lease with extensions."),
    click.option("--backoff", type=units.Duration(0), help="Longest delay of the second attempt."),
    click.option("--backoff-cap", type=units.Duration(0), help="Longest delay of any attempt."),
    click.option("--max-attempts", type=units.Whole(1), help="Failed attempts of a dead letter."),
    click.option("--max-dead", type=units.Whole(0), help="Number of dead letters that are kept."),
    click.option("--rate", type=units.Whole(0), help="Leases per second; 0 = no limit."),
    click.option(
        "--on-dead", type=click.Choice(["skip", "block"]),
        help="Ordered: later jobs of a key pass a dead letter, or wait.",
    ),
    click.option(
        "--full", type=click.Choice(["refuse", "drop_oldest"]),
        help="If the budget is used up: refuse new timers, or drop the oldest waiting job.",
    ),
)  # fmt: skip
start_option = click.option(
    "--start", type=click.Choice(["latest", "earliest"]), default="latest", show_default=True,
    help="earliest: begin with the notices that the replay buffer has.",
)  # fmt: skip

ordered_option = click.option(
    "--ordered/--unordered", default=None, help="Lease one job of a key at a time, in order."
)


def setting_options(command: F) -> F:
    """Add the options for the settings of a consumer group to a command."""
    for option in reversed(SETTINGS):
        command = option(command)
    return command


def group_options(command: F) -> F:
    """Add the options for a new consumer group to a command."""
    return setting_options(ordered_option(start_option(command)))


def settings_of_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of Client.create_group by the options that were given."""
    times = {name.removesuffix("_ns") for name in _TIMES}
    return {
        name: value / 1e9 if name in times else value
        for name, value in options.items()
        if value is not None
    }


# ---- groups ----------------------------------------------------------------------------------


def group_record(info: GroupInfo) -> dict[str, Any]:
    """Return a consumer group for JSON."""
    settings = info.settings._asdict()
    return {
        "group": info.name, "namespace": info.namespace, "topics": list(info.topics),
        "paused": info.paused, "members": info.members, "pending": info.pending,
        "waiting": info.waiting, "leased": info.leased, "delayed": info.delayed,
        "dead": info.dead, "oldest_s": oldest_s(info), "bytes": info.bytes, "acked": info.acked,
        "retried": info.retried, "dropped": info.dropped, **settings,
    }  # fmt: skip


def oldest_s(info: GroupInfo) -> float | None:
    """Return the age of the oldest job that is not dead in seconds; None if there is none."""
    if info.oldest_boot_ns is None:
        return None
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return round(max(now_ns - info.oldest_boot_ns, 0) / 1e9, 3)


def group_lines(info: GroupInfo) -> str:
    """Return a consumer group as lines of text."""
    record = group_record(info)
    for field in _TIMES:
        record[field.removesuffix("_ns")] = units.format_duration(record.pop(field))
    if info.settings.retention_ns == 0:
        record["retention"] = "none"
    record["topics"] = ", ".join(map(visible, info.topics))
    oldest = record.pop("oldest_s")
    record["oldest"] = "none" if oldest is None else units.format_duration(round(oldest * 1e9))
    return "\n".join(f"{name:<14}{value}" for name, value in record.items())


@click.group("groups", cls=Group)
def groups_command() -> None:
    """Show, create and change consumer groups."""


@groups_command.command("ls", cls=Command)
@name_option
@namespace_option
@timeout_option
@json_option
def ls_command(name: str, namespace: str, timeout: float, as_json: bool) -> None:
    """List the consumer groups of a namespace.

    `pending` counts armed timers of the topics, `oldest_s` is the age of the oldest job that is not
    dead.
    """
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        found = client.groups()
    fields = ("group", "topics", "paused", "members", "pending", "waiting", "leased", "delayed",
              "dead", "oldest_s")  # fmt: skip
    rows = [{field: group_record(info)[field] for field in fields} for info in found]
    if not as_json and rows:
        print_table([row | {"topics": ",".join(row["topics"])} for row in rows], name)
    for info in found if as_json else []:
        emit(group_record(info), "", as_json)


@groups_command.command("describe", cls=Command)
@click.argument("group")
@name_option
@namespace_option
@timeout_option
@json_option
def describe_command(group: str, name: str, namespace: str, timeout: float, as_json: bool) -> None:
    """Show the settings and the jobs of the consumer group GROUP."""
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        info = client.group(group)
    emit(group_record(info), group_lines(info), as_json)


@groups_command.command("create", cls=Command)
@click.argument("group")
@click.option(
    "-t", "--topic", "--topics", "topics", multiple=True, required=True,
    help="Topic of the consumer group; may be repeated.",
)  # fmt: skip
@name_option
@namespace_option
@group_options
@timeout_option
@json_option
def create_command(
    group: str, topics: tuple[str, ...], name: str, namespace: str, start: Any, timeout: float,
    as_json: bool, **settings: Any,
) -> None:  # fmt: skip
    """Create the consumer group GROUP.

    It receives each timer of its topics that fires from then on, also timers that are armed
    already. A consumer group that exists with the same settings and topics stays as it is.

    \b
    purgatoryd groups create mailers --topic orders --max-attempts 5
    """
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        info = client.create_group(group, topics, start=start, **settings_of_options(settings))
    emit(group_record(info), group_lines(info), as_json)


@groups_command.command("change", cls=Command)
@click.argument("group")
@name_option
@namespace_option
@setting_options
@timeout_option
@json_option
def change_command(
    group: str, name: str, namespace: str, timeout: float, as_json: bool, **settings: Any
) -> None:
    """Change settings of the consumer group GROUP. Settings that are not given stay, and so
    do its topics and its order."""
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        info = client.change_group(group, **settings_of_options(settings))
    emit(group_record(info), group_lines(info), as_json)


@groups_command.command("delete", cls=Command)
@click.argument("group")
@name_option
@namespace_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@timeout_option
@json_option
def delete_command(
    group: str, name: str, namespace: str, yes: bool, timeout: float, as_json: bool
) -> int:
    """Delete the consumer group GROUP with its jobs and dead letters."""
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        info = client.group(group)
        jobs = info.waiting + info.leased + info.delayed + info.dead
        question = f"Delete consumer group {group!r} with {jobs} jobs?"
        if not (yes or agreed("groups delete", question)):
            return Exit.NEGATIVE
        client.delete_group(group)
    emit({"group": group, "result": "DELETED"}, f"deleted {visible(group)}", as_json)
    return Exit.DONE


@groups_command.command("pause", cls=Command)
@click.argument("group")
@name_option
@namespace_option
@timeout_option
@json_option
def pause_command(group: str, name: str, namespace: str, timeout: float, as_json: bool) -> None:
    """Lease no jobs of the consumer group GROUP. Jobs that are leased stay leased."""
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        client.pause_group(group)
    emit({"group": group, "result": "PAUSED"}, f"paused {visible(group)}", as_json)


@groups_command.command("resume", cls=Command)
@click.argument("group")
@name_option
@namespace_option
@timeout_option
@json_option
def resume_command(group: str, name: str, namespace: str, timeout: float, as_json: bool) -> None:
    """Lease jobs of the paused consumer group GROUP again."""
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        client.resume_group(group)
    emit({"group": group, "result": "RESUMED"}, f"resumed {visible(group)}", as_json)


# ---- dead ------------------------------------------------------------------------------------


def letter_record(letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter for JSON."""
    from purgatoryd.clients.times import wall_time

    failed_ns = letter.last_failed_boot_ns
    at = None if failed_ns is None else wall_time(failed_ns + letter.wall_offset_ns)
    return {
        **key_record(letter.key), "ticket": letter.ticket, "topic": letter.topic,
        "reason": letter.reason.name.lower(), "attempts": letter.attempts, "error": letter.error,
        "cause": letter.cause.name, "verdict": letter.verdict and letter.verdict._asdict(),
        "deadline_boot_ns": letter.deadline_boot_ns, "fired_boot_ns": letter.fired_boot_ns,
        "first_failed_boot_ns": letter.first_failed_boot_ns, "last_failed_boot_ns": failed_ns,
        "last_failed_at": None if at is None else units.format_moment(at),
        **payload_record(letter.payload),
    }  # fmt: skip


def letter_text(letter: DeadLetter) -> str:
    """Return a dead letter as a line of text."""
    record = letter_record(letter)
    head = f"{letter.ticket} {key_text(letter.key)} {visible(letter.topic)}"
    return f"{head} {record['reason']} after {letter.attempts} attempts: {visible(letter.error)}"


ticket_argument = click.argument("ticket", type=units.Whole(1), required=False)
all_option = click.option("--all", "everything", is_flag=True, help="All dead letters of GROUP.")


@click.group("dead", cls=Group)
def dead_command() -> None:
    """Show, requeue and drop jobs that failed for good."""


@dead_command.command("ls", cls=Command)
@click.argument("group")
@name_option
@namespace_option
@timeout_option
@json_option
def dead_ls_command(group: str, name: str, namespace: str, timeout: float, as_json: bool) -> None:
    """List the dead letters of the consumer group GROUP, oldest first.

    Each line has the ticket, key, topic, reason, number of failed attempts, and the error of the
    last one.
    """
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        for letter in client.dead_letters(group):
            emit(letter_record(letter), letter_text(letter), as_json)


@dead_command.command("requeue", cls=Command)
@click.argument("group")
@ticket_argument
@all_option
@name_option
@namespace_option
@timeout_option
@json_option
def requeue_command(
    group: str, ticket: int | None, everything: bool, name: str, namespace: str, timeout: float,
    as_json: bool,
) -> int:  # fmt: skip
    """Give the dead letter TICKET of GROUP, or all, to consumers.

    A requeued job has all its attempts again.
    """
    _check_choice(ticket, everything)
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        count = client.requeue_dead(group, ticket)
    emit({"group": group, "requeued": count}, f"requeued {count}", as_json)
    return Exit.DONE if count or everything else Exit.NEGATIVE


@dead_command.command("drop", cls=Command)
@click.argument("group")
@ticket_argument
@all_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@name_option
@namespace_option
@timeout_option
@json_option
def drop_command(
    group: str, ticket: int | None, everything: bool, yes: bool, name: str, namespace: str,
    timeout: float, as_json: bool,
) -> int:  # fmt: skip
    """Remove the dead letter TICKET of GROUP, or all."""
    _check_choice(ticket, everything)
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        which = f"{client.group(group).dead} dead letters" if everything else f"letter {ticket}"
        if not (yes or agreed("dead drop", f"Drop {which} of consumer group {group!r}?")):
            return Exit.NEGATIVE
        count = client.drop_dead(group, ticket)
    emit({"group": group, "dropped": count}, f"dropped {count}", as_json)
    return Exit.DONE if count or everything else Exit.NEGATIVE


def _check_choice(ticket: int | None, everything: bool) -> None:
    if (ticket is None) != everything:
        raise click.UsageError("Give either a TICKET or --all.")
