"""Options that several commands have, and functions that print keys, payloads and records as text
or JSON."""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

import click

from purgatoryd.cli import units

Key = str | bytes | UUID


def not_negative(_: click.Context, __: click.Parameter, span_ns: int) -> int:
    """Refuse a negative time span, because it would make every daemon look frozen."""
    if span_ns < 0:
        raise click.BadParameter(f"{units.format_duration(span_ns)} is below 0.")
    return span_ns


name_option = click.option(
    "--name",
    envvar="PURGATORYD_NAME",
    default="default",
    show_default=True,
    show_envvar=True,
    help="Name of the daemon: up to 32 characters of a-z, 0-9 and -.",
)
namespace_option = click.option(
    "-n", "--namespace", default="default", show_default=True, help="Namespace of keys and topics."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per line."
)
frozen_option = click.option(
    "--frozen-after",
    "frozen_ns",
    type=units.Duration(),
    callback=not_negative,
    default="5s",
    show_default=True,
    help="Report the daemon as frozen if its loop stands still for longer. A healthy "
    "loop moves every second.",
)
timeout_option = click.option(
    "--timeout",
    type=units.Number(min=0),
    default=5.0,
    show_default=True,
    help="Seconds to wait for the daemon.",
)
key_type_option = click.option(
    "--key-type",
    type=click.Choice(["str", "hex", "uuid"]),
    default="str",
    show_default=True,
    help="Type of the key: text, bytes in hexadecimal, or a UUID.",
)


def read_key(text: str, key_type: str) -> Key:
    """Return the key that `text` contains. Raises click.BadParameter."""
    readers: dict[str, Callable[[str], Key]] = {"str": str, "hex": bytes.fromhex, "uuid": UUID}
    try:
        return readers[key_type](text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a key of the type {key_type}.") from None


def key_record(key: Key) -> dict[str, str]:
    """Return a key for JSON: as text in the form of the command line, and its type unless the type
    is str."""
    if isinstance(key, bytes):
        return {"key": key.hex(), "key_type": "hex"}
    return {"key": str(key)} if isinstance(key, str) else {"key": str(key), "key_type": "uuid"}


def key_text(key: Key) -> str:
    """Return a key as text for a terminal."""
    return visible(key_record(key)["key"])


def visible(text: str) -> str:
    """Return `text` for a terminal, with control characters escaped, so that it fits on a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def payload_record(payload: bytes) -> dict[str, str]:
    """Return a payload for JSON: as text if it is UTF-8, otherwise in base64."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": binascii.b2a_base64(payload, newline=False).decode()}


def emit(record: dict[str, Any], text: str, as_json: bool) -> None:
    """Print one result, as JSON or as `text`, and flush, so that a pipe gets it at once.

    Escapes control characters in `text`, except newlines. The caller passes names and keys through
    visible(), which also escapes newlines.
    """
    lines = "\n".join(map(visible, text.split("\n")))
    click.echo(json.dumps(record, ensure_ascii=False) if as_json else lines)
