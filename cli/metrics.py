"""metrics: a daemon's figures in OpenMetrics, printed once or served."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import click

from purgatoryd.cli.exits import Command
from purgatoryd.cli.following import sigterm_interrupts
from purgatoryd.cli.listening import called_here, loopback, on_socket
from purgatoryd.cli.options import name_option
from purgatoryd.shm_layout.errors import BadPath
from purgatoryd.shm_layout.paths import check_name

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

PATH = "/metrics"
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
    or is gone. Needs the extra `metrics`. A server reads the arena again for each request; it stays
    when the daemon goes, and says then that it is not up. Of a deployment all shards are reported,
    each with its own name. Whoever reaches the address may read the names of namespaces; at a
    loopback address requests by another name than one of this host are refused. A server goes on
    until SIGTERM or SIGINT.
    """
    from purgatoryd.pipeline.extras import need

    need("prometheus_client", "metrics")
    from purgatoryd.cli.exposition import text

    if serve is None:
        click.echo(text(name), nl=False)
    else:
        serve_until_interrupted(name, serve)


def serve_until_interrupted(name: str, address: Address) -> None:
    """Answers requests. Raises InvalidName, and BadPath if the address cannot be had."""
    from prometheus_client import make_wsgi_app

    from purgatoryd.cli.exposition import registry

    check_name(name)
    figures = make_wsgi_app(registry(name))
    with suppress(KeyboardInterrupt), sigterm_interrupts(), server_at(address) as server:
        server.set_app(OnlyFigures(figures, called_here=only_here(server.server_address)))
        click.echo(f"serving {name} at {shown(server.server_address)}")
        server.serve_forever()


def shown(address: Any) -> str:
    """Where a server is, for people."""
    return address if isinstance(address, str) else f"http://{address[0]}:{address[1]}{PATH}"


def only_here(address: Any) -> bool:
    """True for an address that browsers of this host reach, and nobody else."""
    return not isinstance(address, str) and loopback(address[0])


class OnlyFigures:
    """Lets through what asks for the figures, of this host if it has to be."""

    def __init__(self, figures: WSGIApplication, *, called_here: bool) -> None:
        self._figures = figures
        self._called_here = called_here

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Answers 421 to a request for another host, 404 to one for another path."""
        if self._called_here and not called_here(environ.get("HTTP_HOST", "")):
            return _refusal(start, "421 Misdirected Request")
        if environ["PATH_INFO"] != PATH:
            return _refusal(start, "404 Not Found")
        return self._figures(environ, start)


def _refusal(start: StartResponse, status: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{status}\n".encode()]


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
        self.name_itself()

    def name_itself(self) -> None:
        """As requests see it."""
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _UnixServer(_Server):
    """On a socket that listens already."""

    address_family = socket.AF_UNIX

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.name_itself()

    def get_request(self) -> tuple[Any, Any]:
        """A peer behind a unix socket has no address."""
        connection, _ = super().get_request()
        return connection, ("localhost", 0)


@contextmanager
def server_at(address: Address) -> Iterator[WSGIServer]:
    """A server that listens at the address. Raises BadPath."""
    if isinstance(address, str):
        with on_socket(Path(address)) as listening:
            yield _UnixServer(listening)
        return
    kind = _ServerV6 if ":" in address[0] else _Server
    try:
        server = kind(address, _Handler)
    except OSError as error:
        raise BadPath(shown(address), f"cannot be bound: {error.strerror}") from error
    with server:
        yield server
