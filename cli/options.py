"""Options that several commands share."""

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
    """A span that is past would call every daemon frozen."""
    if span_ns < 0:
        raise click.BadParameter(f"{units.format_duration(span_ns)} is below 0.")
    return span_ns


name_option = click.option(
    "--name",
    envvar="PURGATORYD_NAME",
    default="default",
    show_default=True,
    show_envvar=True,
    help="Name of the daemon: a-z, 0-9 and -, at most 32.",
)
namespace_option = click.option(
    "-n", "--namespace", default="default", show_default=True, help="Namespace of keys and topics."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
frozen_option = click.option(
    "--frozen-after",
    "frozen_ns",
    type=units.Duration(),
    callback=not_negative,
    default="5s",
    show_default=True,
    help="A loop that stood still for longer is frozen; a sound one moves every second.",
)
timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Seconds to wait for the daemon.",
)
key_type_option = click.option(
    "--key-type",
    type=click.Choice(["str", "hex", "uuid"]),
    default="str",
    show_default=True,
    help="How KEY is written: as text, as the hex digits of bytes, or as a UUID.",
)


def read_key(text: str, key_type: str) -> Key:
    """The key that the command line means."""
    readers: dict[str, Callable[[str], Key]] = {"str": str, "hex": bytes.fromhex, "uuid": UUID}
    try:
        return readers[key_type](text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a {key_type} key.") from None


def key_record(key: Key) -> dict[str, str]:
    """The key in JSON: as it is given on the command line, and its type if that is not str."""
    if isinstance(key, bytes):
        return {"key": key.hex(), "key_type": "hex"}
    return {"key": str(key)} if isinstance(key, str) else {"key": str(key), "key_type": "uuid"}


def key_text(key: Key) -> str:
    """The key for people."""
    return visible(key_record(key)["key"])


def visible(text: str) -> str:
    """`text` for a terminal: control characters spelt out, so that it stays on its line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def payload_record(payload: bytes) -> dict[str, str]:
    """The payload in JSON: as text if it is UTF-8, else in base64."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": binascii.b2a_base64(payload, newline=False).decode()}


def emit(record: dict[str, Any], text: str, as_json: bool) -> None:
    """Print one result and flush, so that a reader of the pipe has it at once.

    Control characters in `text` are spelt out. The caller passes names and keys through visible(),
    because newlines in them would look like ends of lines.
    """
    lines = "\n".join(map(visible, text.split("\n")))
    click.echo(json.dumps(record, ensure_ascii=False) if as_json else lines)
