"""The commands watch, advance, fail, clear and watermarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from purgatoryd import clients
from purgatoryd.cli import units
from purgatoryd.cli.completion import namespace_names, topic_names
from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.options import (
    emit,
    json_option,
    key_record,
    key_text,
    key_type_option,
    name_option,
    namespace_option,
    read_key,
    timeout_option,
    visible,
)

if TYPE_CHECKING:
    from purgatoryd.clients import AllOf, Outcome, Quorum
    from purgatoryd.shm_layout.arena import Watermark

Target = tuple[str, int]


def read_target(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> list[Target]:
    """Parse WATCH_KEY=TARGET arguments. The default target is 1."""
    targets = []
    for text in given:
        key, equals, number = text.rpartition("=")
        if equals and not number.isdecimal():
            raise click.BadParameter(f"{text!r} must be WATCH_KEY or WATCH_KEY=TARGET.")
        targets.append((key, int(number)) if equals else (number, 1))
    return targets


def read_condition(targets: list[Target], key_type: str, need: int | None) -> AllOf | Quorum:
    """Return a condition for all targets, or for `need` of the targets if it is given."""
    by_key = {read_key(key, key_type): target for key, target in targets}
    if len(by_key) < len(targets):
        raise click.UsageError("Give each watch key once.")
    return clients.AllOf(by_key) if need is None else clients.Quorum(by_key, need)


def outcome_record(key: Any, outcome: Outcome) -> dict[str, Any]:
    """Return an outcome for JSON."""
    return {
        **key_record(key),
        "cause": outcome.cause,
        "missing": [key_record(one)["key"] for one in outcome.missing],
        "failed": [key_record(one)["key"] for one in outcome.failed],
        "watermarks": [
            {**key_record(one), "watermark": watermark}
            for one, watermark in outcome.watermarks.items()
        ],
        "error": outcome.error,
        "elapsed_ns": outcome.elapsed_ns,
    }


def outcome_text(key: Any, outcome: Outcome) -> str:
    """Return an outcome as a line of text."""
    text = f"{outcome.cause} {key_text(key)} after {units.format_duration(outcome.elapsed_ns)}"
    if outcome.error:
        text += f", error {outcome.error}"
    if outcome.missing:
        text += f", missing: {', '.join(map(key_text, outcome.missing))}"
    if outcome.failed:
        text += f", failed: {', '.join(map(key_text, outcome.failed))}"
    return text


@click.command("watch", cls=Command)
@click.argument("key")
@click.argument(
    "targets", metavar="WATCH_KEY[=TARGET]...", nargs=-1, required=True, callback=read_target
)
@name_option
@namespace_option
@click.option(
    "--within",
    "within_ns",
    type=units.Duration(),
    default="30s",
    show_default=True,
    help="Time until the operation expires: 250ms, 30s, 10m.",
)
@click.option(
    "--need",
    type=units.Whole(1),
    help="Number of watch keys that must reach their targets; default: all.",
)
@click.option(
    "-t", "--topic", shell_complete=topic_names,
    help="Topic of a notice about the outcome; default: no notice.",
)  # fmt: skip
@click.option("-p", "--payload", default="", help="Payload of the notice, as text.")
@key_type_option
@timeout_option
@json_option
def watch_command(
    key: str,
    targets: list[Target],
    name: str,
    namespace: str,
    within_ns: int,
    need: int | None,
    topic: str | None,
    payload: str,
    key_type: str,
    timeout: float,
    as_json: bool,
) -> int:
    """Arm an operation under KEY and wait for its outcome.

    The operation is satisfied once the watermark of every WATCH_KEY is at least its TARGET. With
    --need K, K of the watch keys are enough. The default TARGET is 1. Exit code 0 means that the
    operation was satisfied, 1 that it expired, failed or was cancelled. If the command is
    interrupted, the operation stays armed; `purgatoryd cancel KEY` ends it.

    \b
    purgatoryd watch write:7 replica-1=40 replica-2=40 --within 5s &
    purgatoryd advance replica-1 40
    purgatoryd advance replica-2 40
    """
    wanted = read_key(key, key_type)
    condition = read_condition(targets, key_type, need)
    with clients.Purgatory(name, namespace=namespace, timeout=timeout) as purgatory:
        operation = purgatory.watch(
            wanted, condition, within_ns / 1e9, payload=payload.encode(), topic=topic
        )
        outcome = operation.result()
    emit(outcome_record(wanted, outcome), outcome_text(wanted, outcome), as_json)
    return Exit.DONE if outcome.cause == "satisfied" else Exit.NEGATIVE


@click.command("advance", cls=Command)
@click.argument("watch_key")
@click.argument("watermark", type=units.Whole(0), required=False)
@click.option("--by", type=units.Whole(0), help="Add this number to the watermark instead.")
@name_option
@namespace_option
@key_type_option
@timeout_option
@json_option
def advance_command(
    watch_key: str,
    watermark: int | None,
    by: int | None,
    name: str,
    namespace: str,
    key_type: str,
    timeout: float,
    as_json: bool,
) -> None:
    """Raise the watermark of WATCH_KEY to at least WATERMARK.

    Prints the number of operations that ended.

    \b
    purgatoryd advance replica-1 40
    purgatoryd advance deliveries --by 1
    """
    if (watermark is None) == (by is None):
        raise click.UsageError("Give either WATERMARK or --by.")
    key = read_key(watch_key, key_type)
    with clients.Purgatory(name, namespace=namespace, timeout=timeout) as purgatory:
        ended = (
            purgatory.bump(key, by) if by is not None else purgatory.advance(key, watermark or 0)
        )
    emit({**key_record(key), "ended": ended}, f"ended {ended:,}", as_json)


@click.command("fail", cls=Command)
@click.argument("watch_key")
@click.argument("code", type=units.Whole(1, 2**32 - 1))
@name_option
@namespace_option
@key_type_option
@timeout_option
@json_option
def fail_command(
    watch_key: str, code: int, name: str, namespace: str, key_type: str, timeout: float,
    as_json: bool,
) -> None:  # fmt: skip
    """Fail WATCH_KEY with the error CODE until the key is cleared.

    Ends the operations whose condition cannot hold without the key, and prints the number of
    operations that ended.
    """
    key = read_key(watch_key, key_type)
    with clients.Purgatory(name, namespace=namespace, timeout=timeout) as purgatory:
        ended = purgatory.fail(key, code)
    emit({**key_record(key), "ended": ended}, f"ended {ended:,}", as_json)


@click.command("clear", cls=Command)
@click.argument("watch_keys", metavar="WATCH_KEY...", nargs=-1, required=True)
@click.option("--forget", is_flag=True, help="Forget the watermark of the key as well.")
@name_option
@namespace_option
@key_type_option
@timeout_option
@json_option
def clear_command(
    watch_keys: tuple[str, ...], forget: bool, name: str, namespace: str, key_type: str,
    timeout: float, as_json: bool,
) -> int:  # fmt: skip
    """End the failure of one or more WATCH_KEYs.

    Their watermarks stay. Exit code 1 means that a key is unknown.
    """
    keys = [read_key(text, key_type) for text in watch_keys]
    with clients.Purgatory(name, namespace=namespace, timeout=timeout) as purgatory:
        known = [purgatory.clear(key) for key in keys]
        for key in keys if forget else ():
            purgatory.forget(key)
    for key, done in zip(keys, known, strict=True):
        result = "cleared" if done else "unknown"
        emit({**key_record(key), "result": result.upper()}, f"{result} {key_text(key)}", as_json)
    return Exit.DONE if all(known) else Exit.NEGATIVE


def watermark_record(found: Watermark) -> dict[str, Any]:
    """Return a watch key for JSON."""
    return {
        **key_record(found.key),
        "namespace": found.namespace,
        "watermark": found.watermark,
        "error": found.error,
        "watched": found.watched,
        "forgotten": found.forgotten,
    }


def watermark_text(found: Watermark) -> str:
    """Return a watch key as a line of text."""
    states = [f"failed with {found.error}"] if found.error else []
    states += ["watched"] if found.watched else []
    states += ["forgotten with its last watcher"] if found.forgotten else []
    place = visible(found.namespace)
    return (
        f"{found.watermark:>20} {place:<16} {key_text(found.key):<36} {', '.join(states)}".rstrip()
    )


@click.command("watermarks", cls=Command)
@name_option
@click.option(
    "-n", "--namespace", shell_complete=namespace_names, help="Only watch keys of this namespace."
)
@click.option("--prefix", default="", help="Only watch keys that begin with this text.")
@click.option("--failed", is_flag=True, help="Only watch keys that failed and were not cleared.")
@json_option
def watermarks_command(
    name: str, namespace: str | None, prefix: str, failed: bool, as_json: bool
) -> None:
    """List the watch keys of the daemon with their watermarks.

    Reads the shared memory without contacting the daemon. A key that changes while the command runs
    is shown with its old or its new watermark.
    """
    from purgatoryd.cli.arena import reading
    from purgatoryd.cli.shards import daemons

    for daemon in daemons(name):
        with reading(daemon.name) as reader:
            for found in reader.watermarks():
                shown = namespace in (None, found.namespace) and bool(found.error) >= failed
                if shown and key_text(found.key).startswith(prefix):
                    emit(watermark_record(found), watermark_text(found), as_json)
