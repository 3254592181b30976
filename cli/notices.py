"""The commands listen and publish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.completion import topic_names
from purgatoryd.cli.exits import Command, Exit
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
    timeout_option,
    visible,
)

if TYPE_CHECKING:
    from purgatoryd.clients import Notice


def notice_record(notice: Notice) -> dict[str, Any]:
    """Return a notice for JSON."""
    return {
        **key_record(notice.key),
        "namespace": notice.namespace,
        "topic": notice.topic,
        "seq": notice.seq,
        "ticket": notice.ticket,
        "cause": notice.cause.name,
        "deadline_boot_ns": notice.deadline_boot_ns,
        "fired_boot_ns": notice.fired_boot_ns,
        "fired_at": units.format_moment(notice.fired_at),
        "lateness_ns": notice.lateness_ns,
        **payload_record(notice.payload),
    }


def notice_text(notice: Notice) -> str:
    """Return a notice as a line of text."""
    late = units.format_duration(notice.lateness_ns)
    payload = visible(notice.payload.decode(errors="backslashreplace"))
    head = f"{units.format_moment(notice.fired_at)} {visible(notice.topic)} #{notice.seq}"
    return f"{head} {notice.cause.name.lower()} {key_text(notice.key)} ({late} late) {payload}"


@click.command("listen", cls=Command)
@name_option
@namespace_option
@click.option(
    "-t", "--topic", "topics", multiple=True, shell_complete=topic_names,
    help="Only notices of this topic; may be repeated.",
)  # fmt: skip
@click.option("--count", type=units.Whole(1), help="Stop after this number of notices.")
@click.option(
    "--idle",
    type=units.Limit(),
    help="Stop after this time without a notice, with exit code 1.",
)
@click.option(
    "--cursor", help="Begin after the notices that this cursor has committed, and commit each one."
)
@timeout_option
@json_option
def listen_command(
    name: str,
    namespace: str,
    topics: tuple[str, ...],
    count: int | None,
    idle: float | None,
    cursor: str | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Print the notices of a namespace as timers fire.

    The command prints "listening" on stderr when it is ready: it prints every notice that is
    published from then on. It requests missed notices from the daemon's replay buffer. If the
    buffer no longer has them, the command names the lost range and ends with exit code 8.
    """
    seen = 0
    with clients.Subscriber(
        name, namespace=namespace, topics=topics or None, timeout=timeout, cursor=cursor
    ) as subscriber:
        click.echo("listening", err=True)
        while count is None or seen < count:
            notice = subscriber.get(timeout=idle)
            if notice is None:
                return Exit.NEGATIVE
            emit(notice_record(notice), notice_text(notice), as_json)
            seen += 1
            if cursor is not None:
                subscriber.commit()
    return Exit.DONE


@click.command("publish", cls=Command)
@click.argument("key")
@name_option
@namespace_option
@click.option(
    "-t", "--topic", default="default", show_default=True, shell_complete=topic_names,
    help="Topic of the notice.",
)  # fmt: skip
@click.option("-p", "--payload", default="", help="Payload of the notice, as text.")
@click.option("--payload-file", type=click.File("rb"), help="File with the payload; - is stdin.")
@key_type_option
@timeout_option
@json_option
def publish_command(
    key: str, name: str, namespace: str, topic: str, payload: str, payload_file: BinaryIO | None,
    key_type: str, timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Publish a notice under KEY at once, without a timer.

    Listeners of the topic receive the notice like the notice of a timer, also later from the replay
    buffer. Its cause is "published". Only administrators may use this command. Namespaces and
    topics whose names begin with _ are reserved for this command, for example _purgatoryd and
    _events for findings about the daemon.

    \b
    purgatoryd publish node-7 -n _purgatoryd -t _events -p '{"finding": "slow"}'
    """
    if payload and payload_file:
        raise click.UsageError("Give either --payload or --payload-file.")
    content = payload_file.read() if payload_file else payload.encode()
    wanted = read_key(key, key_type)
    with clients.Admin(name, timeout=timeout) as admin:
        ticket = admin.publish(topic, wanted, content, namespace=namespace)
    record = {**key_record(wanted), "namespace": namespace, "topic": topic, "ticket": ticket}
    emit(record, f"published {key_text(wanted)}, ticket {ticket}", as_json)
