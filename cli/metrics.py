"""The command metrics."""

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
"""Time-out, in seconds, for reading a request and for writing its response."""
Address = str | tuple[str, int]
"""Path of a Unix socket, or host and port."""


def address_of(_: click.Context, __: click.Parameter, text: str | None) -> Address | None:
    """Parse HOST:PORT, [IPV6]:PORT, :PORT for a port of 127.0.0.1, or the path of a Unix socket."""
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
    help="Serve the metrics at HOST:PORT, at :PORT of 127.0.0.1, or at the path of a Unix socket.",
)
def metrics_command(name: str, serve: Address | None) -> None:
    """Print or serve the daemon's metrics in OpenMetrics format.

    Reads the shared memory without contacting the daemon, so it also works if the daemon hangs or
    has stopped; the metrics then report that it is not up. For a deployment it reports each shard
    under its own name. Needs the extra `metrics`.

    With --serve, the command serves /metrics until SIGTERM or SIGINT and reads the arena for each
    request. Anyone who can connect to the address can read the names of namespaces. At a loopback
    address, the server refuses requests whose Host header is not a name of this host.
    """
    from purgatoryd.pipeline.extras import need

    need("prometheus_client", "metrics")
    from purgatoryd.cli.exposition import text

    if serve is None:
        click.echo(text(name), nl=False)
    else:
        serve_until_interrupted(name, serve)


def serve_until_interrupted(name: str, address: Address) -> None:
    """Serve requests. Raises InvalidName, and BadPath if the address cannot be bound."""
    from prometheus_client import make_wsgi_app

    from purgatoryd.cli.exposition import registry

    check_name(name)
    figures = make_wsgi_app(registry(name))
    with suppress(KeyboardInterrupt), sigterm_interrupts(), server_at(address) as server:
        server.set_app(OnlyFigures(figures, called_here=only_here(server.server_address)))
        click.echo(f"serving {name} at {shown(server.server_address)}")
        server.serve_forever()


def shown(address: Any) -> str:
    """Return the address of a server as text."""
    return address if isinstance(address, str) else f"http://{address[0]}:{address[1]}{PATH}"


def only_here(address: Any) -> bool:
    """Return True for an address that only programs on this host can reach."""
    return not isinstance(address, str) and loopback(address[0])


class OnlyFigures:
    """WSGI middleware that refuses requests for other paths and, if required, for other hosts."""

    def __init__(self, figures: WSGIApplication, *, called_here: bool) -> None:
        self._figures = figures
        self._called_here = called_here

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Answer 421 to a request for another host, and 404 to a request for another path."""
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
    """A request handler that logs nothing, because scrapes would fill the log."""

    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a thread for each request, so that a client that hangs does not delay other
    clients."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without looking up the host's name."""
        TCPServer.server_bind(self)
        self.name_itself()

    def name_itself(self) -> None:
        """Set the name and port that WSGI requests see."""
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _UnixServer(_Server):
    """A server on a Unix socket that already listens."""

    address_family = socket.AF_UNIX

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.name_itself()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a request. A peer of a Unix socket has no address."""
        connection, _ = super().get_request()
        return connection, ("localhost", 0)


@contextmanager
def server_at(address: Address) -> Iterator[WSGIServer]:
    """Return a context manager for a server that listens at the address. Raises BadPath."""
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
