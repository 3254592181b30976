"""The recipes of examples/recipes stay right while their processes and the daemon are killed."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, free_port, stats

from examples.recipes import retries, webhooks
from examples.recipes.session_expiry import open_table
from purgatoryd.clients import Client, GroupInfo, JobReason

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).resolve().parent.parent


class Child:
    """A process that is killed and started again."""

    def __init__(self, demo: Daemon, log: Path, *args: str, **env: str) -> None:
        self._start: Callable[[], subprocess.Popen[bytes]] = lambda: subprocess.Popen(
            [sys.executable, *args], cwd=ROOT, env=demo.env | env, stdin=subprocess.DEVNULL,
            stdout=log.open("ab"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._log = log
        self._process = self._start()

    def restart(self) -> None:
        """Kill the process, which must still run, and start it again."""
        assert self._process.poll() is None, self._log.read_text()
        self.kill()
        self._process = self._start()

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()


@contextmanager
def child(demo: Daemon, log: Path, *args: str, **env: str) -> Iterator[Child]:
    """Return a context manager for a Child, which is killed at the end."""
    started = Child(demo, log, *args, **env)
    try:
        yield started
    finally:
        started.kill()


def read(file: Path, query: str) -> list[Any]:
    """Return the rows of a query of a database that other processes use; none without tables."""
    base = sqlite3.connect(file, timeout=30)
    try:
        return base.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []
    finally:
        base.close()


# ---- session_expiry --------------------------------------------------------------------------

WEB = """
import random, sys, uuid
from datetime import timedelta
from examples.recipes.session_expiry import NAMESPACE, login, logout, open_table, touch
from purgatoryd.clients import Client

idle = timedelta(milliseconds=200)
table, log = open_table(sys.argv[2]), open(sys.argv[3], "a", buffering=1)
with Client(sys.argv[1], namespace=NAMESPACE, timeout=30) as timers:
    sessions = []
    while True:
        sessions.append(login(timers, table, uuid.uuid4().hex, idle))
        for session in random.sample(sessions, min(len(sessions), 5)):
            deadline_ns = touch(timers, session, idle)
            if deadline_ns is None:
                sessions.remove(session)
            log.write(f"{session.name} {session.ticket} {deadline_ns or 0}\\n")
        if len(sessions) > 20:
            left = sessions.pop()
            log.write(f"{left.name} {left.ticket} -1\\n")
            logout(timers, table, left)
"""
"""A web process whose users log in, send requests, and sometimes log out. It logs the deadline of a
session after each request, 0 after a request that came too late, and -1 before a logout."""

COUNT = """
CREATE TABLE ends (name TEXT, ticket INTEGER, ended_ns INTEGER);
CREATE TRIGGER counted AFTER UPDATE ON sessions
BEGIN INSERT INTO ends VALUES (new.name, new.ticket, new.ended_ns); END;
"""
"""Copies each change of a session to a table, so that a second end would be seen."""

Key = tuple[str, int]
"""Name and ticket of a session."""


def logged(log: Path) -> dict[Key, list[int]]:
    """Return the deadlines of each session that web processes logged."""
    found: dict[Key, list[int]] = defaultdict(list)
    for line in log.read_text().split("\n")[:-1]:  # the last line may be incomplete
        if len(parts := line.split()) == 3:
            found[parts[0], int(parts[1])].append(int(parts[2]))
    return found


@pytest.mark.tier("test")
@pytest.mark.costly("runs two processes and a daemon, and kills each of them three times")
def test_a_session_ends_once_after_its_last_request(daemon: StartDaemon, tmp_path: Path) -> None:
    demo = daemon("demo", "--capacity", "100000")
    base, log = tmp_path / "sessions.db", tmp_path / "web.log"
    log.touch()
    with closing(open_table(str(base))) as table:
        table.executescript(COUNT)

    def ends() -> list[Any]:
        return read(base, "SELECT name, ticket, ended_ns FROM ends")

    module = ("-m", "examples.recipes.session_expiry", "demo", str(base))
    program = ("-c", WEB, "demo", str(base), str(log))
    with child(demo, tmp_path / "worker.txt", *module) as worker:
        with child(demo, tmp_path / "web.txt", *program) as web:
            for kill in (worker.restart, web.restart, partial(crash, demo)) * 3:
                known, ended = len(logged(log)), len(ends())
                eventually(lambda: len(logged(log)) > known + 50)  # noqa: B023
                eventually(lambda: len(ends()) > ended + 50)  # noqa: B023
                kill()
        sessions = set(read(base, "SELECT name, ticket FROM sessions"))
        eventually(lambda: len(ends()) >= len(sessions))
    times = Counter((name, ticket) for name, ticket, _ in ends())
    assert set(times) == sessions
    assert set(times.values()) == {1}
    seen = logged(log)
    early = [
        (name, ticket)
        for name, ticket, ended_ns in ends()
        if -1 not in seen[name, ticket] and ended_ns < max(seen[name, ticket], default=0)
    ]
    assert early == []


def crash(demo: Daemon) -> None:
    """Kill the daemon, and start it on the arena that it left."""
    demo.kill()
    demo.start()


# ---- reminders -------------------------------------------------------------------------------


def ask(port: int, method: str, name: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Return (status, body) of a request. Repeat it while the application gives no answer."""

    def once() -> tuple[int, Any] | None:
        data = None if body is None else json.dumps(body).encode()
        url, headers = (
            f"http://127.0.0.1:{port}/reminders/{name}",
            {"content-type": "application/json"},
        )
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return None if error.code >= 500 else (error.code, None)
        except (OSError, HTTPException):  # no application, or it was killed
            return None

    found = eventually(once)
    assert found is not None
    return found


def serve(demo: Daemon, tmp_path: Path, port: int) -> AbstractContextManager[Child]:
    """Return a context manager for the application of the reminders."""
    app = ("-m", "uvicorn", "--factory", "examples.recipes.reminders:application")
    env = {"REMINDERS": str(tmp_path / "reminders.db"), "PURGATORYD_NAME": "demo"}
    return child(demo, tmp_path / "app.txt", *app, "--port", str(port), **env)


def soon(seconds: float) -> str:
    """Return a time in the near future in ISO 8601."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def test_the_requests_of_a_reminder(daemon: StartDaemon, tmp_path: Path) -> None:
    demo, port = daemon("demo"), free_port()
    with serve(demo, tmp_path, port):
        later, past = {"text": "later", "due": soon(3600)}, {"text": "past", "due": soon(-1)}
        assert ask(port, "PUT", "a", later) == (200, {"state": "pending"})
        assert ask(port, "PUT", "a", later) == (200, {"state": "pending"})
        assert ask(port, "DELETE", "a") == (200, {"state": "deleted"})
        assert ask(port, "DELETE", "a") == (200, {"state": "deleted"})
        assert ask(port, "PUT", "a", later) == (200, {"state": "deleted"})
        assert ask(port, "PUT", "b", past)[0] == 200
        eventually(lambda: ask(port, "GET", "b") == (200, {"state": "sent"}))
        assert ask(port, "DELETE", "b")[0] == 409
        assert ask(port, "PUT", "b", past) == (200, {"state": "sent"})
        assert ask(port, "GET", "c")[0] == ask(port, "DELETE", "c")[0] == 404
        assert ask(port, "PUT", "c", {"text": "c", "due": "2026-01-31T12:00"})[0] == 422
    assert stats(demo)["live"] == 0
    assert read(tmp_path / "reminders.db", "SELECT * FROM sent") == [("b", "past")]


@pytest.mark.costly("runs an application and a daemon, and kills each of them four times")
def test_each_reminder_is_sent_once_unless_it_was_deleted(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    demo, port, base = daemon("demo"), free_port(), tmp_path / "reminders.db"
    deleted: set[str] = set()
    names: list[str] = []
    with serve(demo, tmp_path, port) as app, ThreadPoolExecutor(4) as threads:

        def use(name: str) -> None:
            number = int(name)
            due = soon(number % 7 / 5 - 0.2)
            assert ask(port, "PUT", name, {"text": name, "due": due})[0] == 200
            if number % 3 == 0 and ask(port, "DELETE", name)[0] == 200:
                deleted.add(name)

        for kill in (app.restart, partial(crash, demo)) * 4:
            more = [str(len(names) + n) for n in range(60)]
            names += more
            used = [threads.submit(use, name) for name in more]
            eventually(lambda: sum(one.done() for one in used) > 20)  # noqa: B023
            kill()
            for one in used:
                one.result(2 * PATIENCE_S)
        wanted = set(names) - deleted
        eventually(lambda: wanted <= {name for (name,) in read(base, "SELECT id FROM sent")})
        eventually(lambda: stats(demo)["live"] == 0)
    times = Counter(name for (name,) in read(base, "SELECT id FROM sent"))
    assert set(times) == wanted
    assert set(times.values()) == {1}
    assert deleted


# ---- webhooks --------------------------------------------------------------------------------


class Receiver(ThreadingHTTPServer):
    """A server that refuses some requests for a while, and events named gone forever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.accepted: list[tuple[str, str]] = []
        """Host and id of each accepted request."""
        self.chance = random.Random(7)


class Answers(BaseHTTPRequestHandler):
    """Answers to webhooks."""

    server: Receiver

    def do_POST(self) -> None:
        event, status = self.headers["webhook-id"], 200
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if event.startswith("gone"):
            status = 410
        elif self.server.chance.random() < 0.3:
            status = self.server.chance.choice((408, 429, 500, 503))
        if status == 200:
            assert body == {"event": event}
            self.server.accepted.append((self.headers["host"], event))
        self.send_response(status)
        if status == 429:
            self.send_header("retry-after", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Return a context manager for a Receiver that serves requests."""
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.costly("runs two processes and a daemon, and kills each of them three times")
def test_each_webhook_is_accepted_in_order_or_is_a_dead_letter(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    demo = daemon("demo")
    module = ("-m", "examples.recipes.webhooks", "demo", "0.01")
    given: dict[str, Any] = {"namespace": webhooks.NAMESPACE, "timeout": PATIENCE_S}
    sent: dict[str, list[str]] = defaultdict(list)
    gone = set()
    with receiver() as server, Client("demo", **given) as timers:
        webhooks.open_group(timers, 0.01)
        hosts = [f"{name}:{server.server_port}" for name in ("127.0.0.1", "localhost")]

        def more() -> None:
            for number in range(40):
                name = f"{len(sent[hosts[0]])}-{number}"
                for host in hosts:
                    event = f"gone-{name}-{host}" if number % 10 == 9 else f"{name}-{host}"
                    webhooks.send(timers, event, f"http://{host}/hook", {"event": event})
                    if number % 10 == 9:
                        gone.add(event)
                    else:
                        sent[host].append(event)

        with (
            child(demo, tmp_path / "one.txt", *module) as one,
            child(demo, tmp_path / "two.txt", *module) as two,
        ):
            for kill in (one.restart, partial(crash, demo), two.restart) * 3:
                before = len(server.accepted)
                more()
                eventually(lambda: len(server.accepted) > before + 20)  # noqa: B023
                kill()
            wanted = {event for events in sent.values() for event in events}
            eventually(lambda: timers.group(webhooks.GROUP).acked >= len(wanted), 4 * PATIENCE_S)
            eventually(lambda: timers.group(webhooks.GROUP).dead == len(gone))
        letters = list(timers.dead_letters(webhooks.GROUP))
    assert {letter.key for letter in letters} == gone
    assert {(letter.reason, letter.error) for letter in letters} == {
        (JobReason.REJECTED, "status 410")
    }
    assert {event for _, event in server.accepted} == wanted
    for host, events in sent.items():
        first = dict.fromkeys(event for at, event in server.accepted if at == host)
        assert list(first) == events


# ---- retries ---------------------------------------------------------------------------------


def unfinished(group: GroupInfo) -> int:
    """Return the number of timers and jobs of a group that neither ended nor are dead letters."""
    return group.pending + group.waiting + group.leased + group.delayed


@pytest.mark.tier("test")
@pytest.mark.costly("runs two processes and a daemon, and kills each of them three times")
def test_each_payment_is_collected_once_or_is_a_dead_letter(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    demo = daemon("demo")
    base = tmp_path / "payments.db"
    module = ("-m", "examples.recipes.retries", "demo", str(base), "0.01")
    given: dict[str, Any] = {"namespace": retries.NAMESPACE, "timeout": PATIENCE_S}
    refusals: dict[str, int] = {}
    with closing(retries.open_table(str(base))) as table, Client("demo", **given) as timers:
        retries.open_group(timers, 0.01)

        def more() -> None:
            for number in range(60):
                name = f"{len(refusals)}"
                refusals[name] = 99 if number % 10 == 9 else number % 3
                for _ in range(2):  # a caller that was killed repeats its request
                    retries.request(timers, table, name, 0.02, refusals[name])

        with (
            child(demo, tmp_path / "one.txt", *module) as one,
            child(demo, tmp_path / "two.txt", *module) as two,
        ):
            for kill in (one.restart, partial(crash, demo), two.restart) * 3:
                before = len(read(base, "SELECT * FROM attempts"))
                more()
                eventually(lambda: len(read(base, "SELECT * FROM attempts")) > before + 30)  # noqa: B023
                kill()
            eventually(lambda: unfinished(timers.group(retries.GROUP)) == 0, 4 * PATIENCE_S)
        letters = {str(letter.key): letter for letter in timers.dead_letters(retries.GROUP)}
    collected = dict(read(base, "SELECT name, collected FROM payments"))
    attempts: dict[str, list[int]] = defaultdict(list)
    for name, attempt in read(base, "SELECT name, attempt FROM attempts ORDER BY rowid"):
        attempts[name].append(attempt)
    assert collected.keys() == refusals.keys() == attempts.keys()
    assert collected == {name: int(times < 99) for name, times in refusals.items()}
    assert letters.keys() == {name for name, times in refusals.items() if times == 99}
    for letter in letters.values():
        assert (letter.attempts, letter.reason) == (retries.ATTEMPTS, JobReason.MAX_ATTEMPTS)
    for name, numbers in attempts.items():
        assert numbers == sorted(set(numbers)), (name, numbers)
        assert numbers[-1] <= retries.ATTEMPTS
        assert len(numbers) > refusals[name] or refusals[name] == 99
