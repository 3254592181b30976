"""The command web: a live view of a daemon for a browser on this host."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections import deque
from contextlib import closing, suppress
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from purgatoryd.cli.exits import Command
from purgatoryd.cli.following import sigterm_interrupts
from purgatoryd.cli.listening import called_here, on_port, on_socket, where
from purgatoryd.cli.options import emit, frozen_option, json_option, name_option
from purgatoryd.pipeline.extras import need
from purgatoryd.shm_layout.errors import PurgatorydError

if TYPE_CHECKING:
    from socket import socket

    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn import Server

    from purgatoryd.cli.view import View
    from purgatoryd.cli.viewer import Viewer, Views

LISTEN = "127.0.0.1:8464"
PAST = 240
"""Number of views in the line charts, which cover two minutes."""
DRAWN = ("armed", "fired", "cancelled")
"""Rates that the line charts show."""
LATENESS = "structural_lateness"
SHARD = re.compile("[0-9]{1,4}")

HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@click.command("web", cls=Command)
@name_option
@click.option(
    "--listen", default=LISTEN, show_default=True, help="Loopback address and port of the server."
)
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path),
    help="Path of a Unix socket to listen on instead, with mode 0660, for a reverse proxy.",
)
@frozen_option
@json_option
def web_command(name: str, listen: str, path: Path | None, frozen_ns: int, as_json: bool) -> None:
    """Serve a live view of the daemon to a browser on this host.

    The page shows what `purgatoryd top` shows, until SIGTERM or SIGINT ends the command. The
    command reads the shared memory without contacting the daemon, and changes nothing. Keys and
    payloads are never shown. Slow clients are shown only if the command runs as root or as the
    daemon's user. For a deployment, the page shows the sum of all shards or one shard. Needs the
    extra `web`.

    Every user of this host can connect to the port. With --socket, only the user and the Unix group
    of the socket can connect.
    """
    need("uvicorn", "web")
    import uvicorn

    from purgatoryd.cli.viewer import Viewer

    with (
        suppress(KeyboardInterrupt),
        sigterm_interrupts(),
        closing(Viewer(name, frozen_ns)) as viewer,
        on_socket(path) if path else on_port(listen) as listening,
    ):
        past = Past(viewer)
        settings = uvicorn.Config(
            site(past), access_log=False, log_level="warning", server_header=False
        )
        # Import all modules that uvicorn needs before it serves. An interrupt during an import's
        # exec() would end the interpreter by SIGINT, although the interrupt is caught here.
        settings.load()
        address = where(listening)
        emit({"listening": address}, f"listening on {address}", as_json)
        asyncio.run(serve(past, uvicorn.Server(settings), listening))


async def serve(past: Past, server: Server, listening: socket) -> None:
    """Serve until a signal.

    An error while taking views ends the server and is raised, because otherwise the page would show
    the last view for ever.
    """

    def stop(_: object) -> None:
        server.should_exit = True

    past.look()
    watching = asyncio.create_task(past.watch())
    watching.add_done_callback(stop)
    await server.serve([listening])
    if watching.done():
        watching.result()


class Past:
    """The newest views, and the rates of earlier ones."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self._lines: dict[str, deque[dict[str, float]]] = {}
        self._views: Views | None = None
        self._error: PurgatorydError | None = None
        self._reported: dict[int | None, dict[str, Any]] = {}

    def look(self) -> None:
        """Take views; if that fails, keep the error instead."""
        self._reported, self._views, self._error = {}, None, None
        try:
            self._views = views = self._viewer.take()
        except PurgatorydError as error:
            self._error = error
            return
        lines = {view.name: line(view) for view in views.all()}
        self._lines = {name: self._lines.get(name, deque(maxlen=PAST)) for name in lines}
        for name, newest in lines.items():
            self._lines[name].append(newest)

    def reported(self, shard: int | None) -> dict[str, Any]:
        """Return the newest view of a shard for JSON, or the error. Shard None = the sum of all
        shards."""
        if shard not in self._reported:
            self._reported[shard] = self._tell(shard)
        return self._reported[shard]

    def _tell(self, shard: int | None) -> dict[str, Any]:
        if self._views is None:
            return {"error": str(self._error)}
        shards = [asdict(one) for one in self._views.whole.shards]
        try:
            view = self._views.of(shard)
        except PurgatorydError as error:
            return {"error": str(error), "shards": shards}
        return {**view.record(), "shards": shards, "past": list(self._lines[view.name])}

    async def watch(self) -> None:
        """Take views until the task is cancelled."""
        from purgatoryd.cli.view import INTERVAL_S

        while True:
            self.look()
            await asyncio.sleep(INTERVAL_S)


def line(view: View) -> dict[str, float]:
    """Return the rates of a view for the line charts."""
    late = view.times[LATENESS]
    drawn = {name: round(view.rates[name], 1) for name in DRAWN}
    return drawn | {"p50_ns": late.p50_ns, "p99_ns": late.p99_ns}


def site(past: Past) -> Starlette:
    """Return the application, which serves the page and the views that the page requests."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    text = page()
    headers = HEADERS | {"Content-Security-Policy": policy(text)}

    async def give_page(_: Request) -> Response:
        return HTMLResponse(text, headers=headers)

    async def give_view(request: Request) -> Response:
        chosen = request.query_params.get("shard", "")
        if chosen and not SHARD.fullmatch(chosen):
            return PlainTextResponse("shard is not a number\n", 400, HEADERS)
        return JSONResponse(past.reported(int(chosen) if chosen else None), headers=HEADERS)

    return Starlette(
        routes=[Route("/", give_page), Route("/view.json", give_view)],
        middleware=[Middleware(OnlyHere)],
    )


class OnlyHere:
    """ASGI middleware that refuses requests whose Host header is not a name of this host."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 421 to a request whose Host header names another host."""
        from starlette.responses import PlainTextResponse

        host = dict(scope.get("headers", ())).get(b"host", b"").decode("latin-1")
        if scope["type"] == "http" and not called_here(host):
            refusal = PlainTextResponse("this is not that host\n", 421, HEADERS)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def page() -> str:
    """Return the page, which needs no other files."""
    return files("purgatoryd.cli").joinpath("web.html").read_text()


def policy(text: str) -> str:
    """Return the Content-Security-Policy of the page. It allows only the page's own script, style
    and server."""
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'",
             "form-action 'none'", "frame-ancestors 'none'"]  # fmt: skip
    for element in ("script", "style"):
        (body,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        rules.append(f"{element}-src 'sha256-{digest}'")
    return "; ".join(rules)
