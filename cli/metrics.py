"""metrics: a daemon's figures in OpenMetrics, printed once or served."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import click

from purgatoryd.cli.exits import Command
from purgatoryd.cli.options import name_option
from purgatoryd.shm_layout.errors import BadPath

if TYPE_CHECKING:
    from purgatoryd.shm_layout.paths import Paths

SOCKET_MODE = 0o660
REQUEST_S = 10.0
"""How long a request, or the taking of its answer, may stand still."""
Address = str | tuple[str, int]
"""The path of a unix socket, or host and port."""


def address_of(_: click.Context, __: click.Parameter, text: str | None) -> Address | None:
    """HOST:PORT, [V6]:PORT, :PORT of the loopback, or the path of a unix socket."""
    if text is None or "/" in text:
        return text
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is neither HOST:PORT nor a path with a slash.")
    return host.strip("[]") or "127.0.0.1", int(port)


@click.command("metrics", cls=Command)
@name_option
@click.option(
    "--serve",
    callback=address_of,
    metavar="ADDRESS",
    help="Serve them at HOST:PORT, at :PORT of the loopback, or at a unix socket.",
)
def metrics_command(name: str, serve: Address | None) -> None:
    """Print a daemon's figures in OpenMetrics text, or serve them at /metrics.

    Reads the shared memory and does not trouble the daemon, so it answers also while that hangs,
    or is gone. Needs the extra `metrics`. A server reads the arena anew for each request; it stays
    when the daemon goes, and says then that it is not up. Whoever reaches the address may read the
    names of namespaces.
    """
    from purgatoryd.pipeline.extras import need
    from purgatoryd.shm_layout.paths import arena_paths

    need("prometheus_client", "metrics")
    from purgatoryd.cli.exposition import text

    paths = arena_paths(name)
    if serve is None:
        click.echo(text(paths), nl=False)
    else:
        serve_for_ever(paths, serve)


def serve_for_ever(paths: Paths, address: Address) -> None:
    """Answers requests until interrupted. Raises BadPath if the address cannot be had."""
    from prometheus_client import make_wsgi_app

    from purgatoryd.cli.exposition import registry

    with server_at(address) as server:
        server.set_app(make_wsgi_app(registry(paths)))
        click.echo(f"serving {paths.name} at {shown(server.server_address)}")
        server.serve_forever()


def shown(address: Any) -> str:
    """Where a server is, for people."""
    return address if isinstance(address, str) else f"http://{address[0]}:{address[1]}/metrics"


# ---- servers ---------------------------------------------------------------------------------


class _Handler(WSGIRequestHandler):
    """Logs nothing: scrapes come for ever."""

    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing to say."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request, so that a reader that hangs holds up no other."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Without asking for the name of the host."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _UnixServer(_Server):
    address_family = socket.AF_UNIX

    def get_request(self) -> tuple[Any, Any]:
        """A peer behind a unix socket has no address."""
        connection, _ = super().get_request()
        return connection, ("localhost", 0)


def server_at(address: Address) -> WSGIServer:
    """A server that is bound to the address. Raises BadPath."""
    if isinstance(address, str):
        return _unix_server(Path(address))
    kind = _ServerV6 if ":" in address[0] else _Server
    try:
        return kind(address, _Handler)
    except OSError as error:
        raise BadPath(shown(address), f"cannot be bound: {error.strerror}") from error


def _unix_server(path: Path) -> WSGIServer:
    """In the place of a socket that nobody serves; members of the group may connect."""
    _remove_dead(path)
    before = os.umask(0o777 & ~SOCKET_MODE)
    try:
        return _UnixServer(str(path), _Handler)  # type: ignore[arg-type]
    except OSError as error:
        raise BadPath(str(path), f"cannot be bound: {error.strerror}") from error
    finally:
        os.umask(before)


def _remove_dead(path: Path) -> None:
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise BadPath(str(path), "is there and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise BadPath(str(path), "is there and another process serves it")
    path.unlink()
