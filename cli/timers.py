"""The commands add, cancel and get."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.completion import topic_names
from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.operations import operation_fields, operation_record
from purgatoryd.cli.options import (
    emit,
    json_option,
    key_record,
    key_text,
    key_type_option,
    name_option,
    namespace_option,
    payload_record,
    read_key,
    time_text,
    timeout_option,
    visible,
)

if TYPE_CHECKING:
    from purgatoryd.clients import TimerInfo
    from purgatoryd.clients.times import Late


def late_record(late: Late | None) -> dict[str, Any]:
    """Return the own late policy of a timer for JSON; no fields if it has none."""
    if late is None:
        return {}
    if isinstance(late, str):
        return {"late": late}
    from purgatoryd.clients.times import seconds_ns

    return {"late": late[0], "grace_ns": seconds_ns(late[1])}


def timer_record(timer: TimerInfo) -> dict[str, Any]:
    """Return a timer for JSON."""
    record: dict[str, Any] = {
        **key_record(timer.key),
        "namespace": timer.namespace,
        "topic": timer.topic,
        "ticket": timer.ticket,
        "deadline_boot_ns": timer.deadline_boot_ns,
        "status": timer.status.name,
        **({} if timer.within_ns is None else {"within_ns": timer.within_ns}),
        **({} if timer.tag is None else {"tag": timer.tag}),
        **({} if timer.priority is None else {"priority": timer.priority}),
        **({} if timer.order_key is None else {"order_hash": int(timer.order_key)}),
        **late_record(timer.late),
        **(
            {}
            if timer.unique_until_boot_ns is None
            else {"unique_until_boot_ns": timer.unique_until_boot_ns}
        ),
        **payload_record(timer.payload),
    }
    if timer.deadline_at:
        record["deadline_at"] = units.format_moment(timer.deadline_at)
    if timer.operation is not None:
        record["operation"] = operation_record(timer.operation)
    return record


@click.command("add", cls=Command)
@click.argument("key")
@name_option
@namespace_option
@click.option(
    "--delay", type=units.Duration(), help="Time until KEY is due: 250ms, 30s, 1h30m, 2w."
)
@click.option(
    "--deadline",
    type=units.Moment(),
    help="Wall time at which KEY is due: 2026-01-31T12:00:00Z, 'tomorrow 9:00'.",
)
@click.option(
    "--within",
    type=units.Duration(),
    help="Slack: KEY may fire so long after it is due, to share a wake-up.  [default: the topic's]",
)
@click.option(
    "-t", "--topic", default="default", show_default=True, shell_complete=topic_names,
    help="Topic of the notice.",
)  # fmt: skip
@click.option("--tag", help="Text by which `timers` commands select KEY: up to 63 bytes.")
@click.option(
    "--priority",
    type=units.Whole(0, 9),
    help="Priority of the jobs; 9 is the most urgent one.  [default: the topic's]",
)
@click.option(
    "--order-key",
    metavar="TEXT",
    help="Ordered groups lease one job of this key at a time.  [default: KEY]",
)
@click.option(
    "--unique-for",
    type=units.Duration(),
    help="Refuse other adds of KEY for so long, also after its notice and its ack.",
)
@click.option("-p", "--payload", default="", help="Payload of the notice, as text.")
@click.option("--payload-file", type=click.File("rb"), help="File with the payload; - is stdin.")
@click.option(
    "--mode",
    type=click.Choice(["error", "replace", "keep", "extend"]),
    default="error",
    show_default=True,
    help="If KEY is armed: refuse, replace the timer, keep it, or move it to a later time.",
)
@key_type_option
@timeout_option
@json_option
def add_command(
    key: str,
    name: str,
    namespace: str,
    delay: int | None,
    deadline: datetime | None,
    within: int | None,
    topic: str,
    tag: str | None,
    priority: int | None,
    order_key: str | None,
    unique_for: int | None,
    payload: str,
    payload_file: BinaryIO | None,
    mode: Any,
    key_type: str,
    timeout: float,
    as_json: bool,
) -> None:
    """Arm a timer under KEY.

    When the timer is due, each listener of its topic receives a notice. A timer with a past
    deadline or a delay of 0s is due at once.

    \b
    purgatoryd add order:42 --delay 30s --topic orders --payload 'remind me'
    purgatoryd add call:7 --deadline 'tomorrow 9:00 Europe/Berlin'
    """
    if (delay is None) == (deadline is None):
        raise click.UsageError("Give either --delay or --deadline.")
    if payload and payload_file:
        raise click.UsageError("Give either --payload or --payload-file.")
    content = payload_file.read() if payload_file else payload.encode()
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        virtual = client.virtual
        timer = client.add(
            read_key(key, key_type),
            delay_ns=delay,
            deadline=deadline,
            topic=topic,
            payload=content,
            mode=mode,
            tag=tag,
            priority=priority,
            order_key=order_key,
            within=None if within is None else within / 1e9,
            unique_for=None if unique_for is None else unique_for / 1e9,
        )
    text = f"{timer.status.name.lower()} {key_text(timer.key)}, ticket {timer.ticket}"
    emit(timer_record(timer) | ({} if virtual else due_record(timer, True)), text, as_json)


@click.command("cancel", cls=Command)
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@name_option
@namespace_option
@key_type_option
@timeout_option
@json_option
def cancel_command(
    keys: tuple[str, ...], name: str, namespace: str, key_type: str, timeout: float, as_json: bool
) -> int:
    """Cancel the timers of one or more KEYs.

    Prints for each key "cancelled", "fired" (too late: the notice was written) or "unknown". Exit
    code 0 means that all timers were cancelled.
    """
    wanted = [read_key(key, key_type) for key in keys]
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        results = list(client.cancel_many(wanted))
    for key, result in zip(wanted, results, strict=True):
        record = {**key_record(key), "result": result.name}
        emit(record, f"{result.name.lower()} {key_text(key)}", as_json)
    return Exit.DONE if set(results) == {clients.CancelResult.CANCELLED} else Exit.NEGATIVE


@click.command("get", cls=Command)
@click.argument("key")
@name_option
@namespace_option
@key_type_option
@timeout_option
@json_option
def get_command(
    key: str, name: str, namespace: str, key_type: str, timeout: float, as_json: bool
) -> int:
    """Show the armed timer or operation of KEY.

    Exit code 1 means that KEY has neither. For an operation, the command also shows the condition,
    the owner's session and uid, and each watch key with its watermark.
    """
    wanted = read_key(key, key_type)
    with clients.Client(name, namespace=namespace, timeout=timeout) as client:
        timer, virtual = client.get(wanted), client.virtual
    if timer is None:
        text = f"unknown {key_text(wanted)}"
        emit({**key_record(wanted), "status": "UNKNOWN"}, text, as_json)
        return Exit.NEGATIVE
    record = timer_record(timer) | ({} if virtual else due_record(timer, as_json))
    shown = record if timer.operation is None else operation_fields(record, timer.operation)
    if "due" in shown:
        del shown["deadline_boot_ns"]  # a number of the boot clock, for programs
    lines = [f"{label:<18}{visible(field_text(label, value))}" for label, value in shown.items()]
    emit(record, "\n".join(lines), as_json)
    return Exit.DONE


def field_text(label: str, value: Any) -> str:
    """Return a field of `get` for people. A slack has a unit, a deadline a relative time."""
    if label == "deadline_at":
        return time_text(str(value))
    return units.format_duration(value) if label == "within_ns" else str(value)


def due_record(timer: TimerInfo, as_json: bool) -> dict[str, str]:
    """Return when a timer is due, for JSON or as text. The daemon has to be on this host."""
    left_ns = timer.deadline_boot_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    due_at = units.wall_in(left_ns)
    return (
        {"due_at": due_at} if as_json else {"due": f"{units.format_relative(left_ns)}, at {due_at}"}
    )
