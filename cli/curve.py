"""The command keygen."""

from __future__ import annotations

from pathlib import Path

import click

from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.options import emit, json_option


@click.command("keygen", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def keygen_command(file: Path, as_json: bool) -> int:
    """Write a key pair for --tcp to a new FILE.

    The command prints the public key. The file has mode 0600 and contains both keys; do not copy it
    to another host. Clients need the public key of the daemon. The daemon needs the public key of
    each client, in a line NAME KEY UID of the file that --keys names.
    """
    from purgatoryd.shm_layout.curve import generate

    public = generate(file).public.decode()
    emit({"public_key": public, "file": str(file)}, public, as_json)
    return Exit.DONE
