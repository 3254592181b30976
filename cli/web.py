"""web: a daemon at work, as a page for a browser on this host."""

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
"""Views whose rates are remembered for the line charts: two minutes."""
DRAWN = ("armed", "fired", "cancelled")
"""Rates that have a line."""
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
@click.option("--listen", default=LISTEN, show_default=True, help="HOST:PORT of this host alone.")
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path),
    help="A unix socket of mode 0660 instead, for a server in front of it.",
)
@frozen_option
@json_option
def web_command(name: str, listen: str, path: Path | None, frozen_ns: int, as_json: bool) -> None:
    """Show the daemon at work in a browser: the same as `top`, drawn.

    A process of its own, which reads the shared memory and does not trouble the daemon. The page
    can only be looked at. Keys and payloads are not shown; slow clients only if this runs as root
    or the daemon's user. Whoever has an account on this host can open a port of it; a socket
    only its user and group. It goes on until SIGTERM or SIGINT. Needs the extra web. Of a
    deployment it shows all shards together, and each as it is chosen.
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
        # Imports what it serves with. An interrupt inside of an import's exec() would make the
        # interpreter end by SIGINT, although it is caught here.
        settings.load()
        address = where(listening)
        emit({"listening": address}, f"listening on {address}", as_json)
        asyncio.run(serve(past, uvicorn.Server(settings), listening))


async def serve(past: Past, server: Server, listening: socket) -> None:
    """Answers until a signal comes. What ends the views ends the server, too, and is raised: it
    would give the last one for ever."""

    def stop(_: object) -> None:
        server.should_exit = True

    past.look()
    watching = asyncio.create_task(past.watch())
    watching.add_done_callback(stop)
    await server.serve([listening])
    if watching.done():
        watching.result()


class Past:
    """The newest views, and what came before them."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self._lines: dict[str, deque[dict[str, float]]] = {}
        self._views: Views | None = None
        self._error: PurgatorydError | None = None
        self._reported: dict[int | None, dict[str, Any]] = {}

    def look(self) -> None:
        """Takes views; if there are none, the reason stands in their place."""
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
        """The newest view of a shard, None = of all, in JSON; or why there is none."""
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
        """Views, one after the other, until it is cancelled."""
        from purgatoryd.cli.view import INTERVAL_S

        while True:
            self.look()
            await asyncio.sleep(INTERVAL_S)


def line(view: View) -> dict[str, float]:
    """What of a view the line charts remember."""
    late = view.times[LATENESS]
    drawn = {name: round(view.rates[name], 1) for name in DRAWN}
    return drawn | {"p50_ns": late.p50_ns, "p99_ns": late.p99_ns}


def site(past: Past) -> Starlette:
    """The page, and what it asks for again and again."""
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
    """Lets through only what was asked of this host by a name of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 421 to a request for another host."""
        from starlette.responses import PlainTextResponse

        host = dict(scope.get("headers", ())).get(b"host", b"").decode("latin-1")
        if scope["type"] == "http" and not called_here(host):
            refusal = PlainTextResponse("this is not that host\n", 421, HEADERS)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def page() -> str:
    """The page: all that it needs is in it."""
    return files("purgatoryd.cli").joinpath("web.html").read_text()


def policy(text: str) -> str:
    """What a browser may do with the page: run the script and use the style that are in it, and
    ask where it came from."""
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'",
             "form-action 'none'", "frame-ancestors 'none'"]  # fmt: skip
    for element in ("script", "style"):
        (body,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        rules.append(f"{element}-src 'sha256-{digest}'")
    return "; ".join(rules)
