"""A process that runs `purgatoryd web`, and an HTTP client for its page."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from contextlib import closing
from typing import NamedTuple

from real_daemon import PATIENCE_S, Daemon


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


BASE = [sys.executable, "-m", "purgatoryd.cli", "web", "--name", "demo", "--json"]


class Web:
    """`purgatoryd web` for the daemon "demo". It listens once the constructor has returned."""

    def __init__(self, daemon: Daemon, *args: str) -> None:
        self.process = subprocess.Popen(
            [*BASE, *args], env=daemon.env, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address: str = json.loads(self.process.stdout.readline())["listening"]

    def ask(self, path: str = "/", method: str = "GET", **headers: str) -> Answer:
        host, port = self.address.removeprefix("http://").rstrip("/").rsplit(":", 1)
        with closing(http.client.HTTPConnection(host, int(port), PATIENCE_S)) as connection:
            connection.request(method, path, headers=headers)
            reply = connection.getresponse()
            return Answer(reply.status, dict(reply.headers), reply.read().decode())

    def end(self) -> int:
        self.process.terminate()
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code
