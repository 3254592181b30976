"""A daemon that clients reach over TCP with CURVE."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from real_daemon import Daemon, StartDaemon, free_port

from purgatoryd.clients import Remote
from purgatoryd.shm_layout import curve

UID = 4242


class Place(NamedTuple):
    """A daemon that clients reach over TCP, with what a client needs to connect."""

    daemon: Daemon
    remote: Remote
    server_key: str
    args: tuple[str, ...]


def remote_place(daemon: StartDaemon, tmp_path: Path) -> Place:
    """Start a daemon that listens on the loopback interface and accepts one client key."""
    server = curve.generate(tmp_path / "server")
    client = curve.generate(tmp_path / "client")
    allowed = tmp_path / "allowed"
    allowed.write_text(f"# who is let in\n\nworker {client.public.decode()} {UID} # one of them\n")
    tcp = f"127.0.0.1:{free_port()}"
    args = ("--tcp", tcp, "--server-key", str(tmp_path / "server"), "--keys", str(allowed))
    remote = Remote(tcp, server.public.decode(), tmp_path / "client")
    return Place(daemon("demo", *args), remote, server.public.decode(), args)
