"""keygen: key pairs for tcp."""

from __future__ import annotations

from pathlib import Path

import click

from purgatoryd.cli.exits import Command, Exit
from purgatoryd.cli.options import emit, json_option


@click.command("keygen", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def keygen_command(file: Path, as_json: bool) -> int:
    """Make a key pair in a new FILE and print its public key.

    The file has both keys and mode 0600; it stays where it is used. The public key of a daemon
    goes to its clients, that of a client into the daemon's list, in a line NAME KEY UID.
    """
    from purgatoryd.shm_layout.curve import generate

    public = generate(file).public.decode()
    emit({"public_key": public, "file": str(file)}, public, as_json)
    return Exit.DONE
