"""Options that several commands have, and functions that print keys, payloads and records as text
or JSON."""

from __future__ import annotations

import binascii
import json
import shutil
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import click

from purgatoryd.cli import units
from purgatoryd.cli.completion import daemon_names, namespace_names

Key = str | bytes | UUID
WIDE = 120
"""Columns of a terminal from which on lines and tables show exact times next to relative ones."""


name_option = click.option(
    "--name",
    envvar="PURGATORYD_NAME",
    default="default",
    show_default=True,
    show_envvar=True,
    shell_complete=daemon_names,
    help="Name of the daemon: up to 32 characters of a-z, 0-9 and -.",
)
namespace_option = click.option(
    "-n",
    "--namespace",
    default="default",
    show_default=True,
    shell_complete=namespace_names,
    help="Namespace of keys and topics.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per line."
)
frozen_option = click.option(
    "--frozen-after",
    "frozen_ns",
    type=units.Duration(),
    default="5s",
    show_default=True,
    help="Report the daemon as frozen if its loop stands still for longer. A healthy "
    "loop moves every second.",
)
timeout_option = click.option(
    "--timeout",
    type=units.Limit(),
    default="5s",
    show_default=True,
    help="Time to wait for the daemon; inf = no limit.",
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


def is_wide() -> bool:
    """Return whether output has space for exact times: in a pipe, or in a terminal of at least
    WIDE columns."""
    return not sys.stdout.isatty() or shutil.get_terminal_size().columns >= WIDE


def time_text(at: str) -> str:
    """Return a time in ISO 8601 for people: "in 2h 5m" or "3m ago", and `at` itself if is_wide().

    Other text is returned unchanged.
    """
    try:
        moment = datetime.fromisoformat(at)
    except ValueError:
        return at
    left_ns = round((moment.timestamp() - time.time()) * 1e9)
    return units.format_relative(left_ns) + f", {at}" * is_wide()


def agreed(command: str, question: str) -> bool:
    """Ask a question at the terminal, and return whether the answer is yes. Raises UsageError if
    there is no terminal. `command`: the command that asks; it has the option --yes."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"Without a terminal, `{command}` needs --yes.")
    return click.confirm(question, err=True)


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
