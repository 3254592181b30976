"""`purgatoryd web`: its access rules, its contents, and its page in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from machine import BROWSERS, needs
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually
from web_page import Answer, Web

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.cli.listening import called_here, on_port, where
from purgatoryd.cli.view import Sampler, View
from purgatoryd.cli.web import page, policy
from purgatoryd.clients import Client
from purgatoryd.shm_layout.errors import InvalidArgument

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.tier("test")


@pytest.fixture
def demo(daemon: StartDaemon) -> Daemon:
    return daemon("demo", "--capacity", "1000")


@pytest.fixture
def web(demo: Daemon) -> Iterator[Web]:
    one = Web(demo, "--listen", "127.0.0.1:0")
    yield one
    assert one.end() == Exit.DONE


# ---- requests that are answered ------------------------------------------------------------------


@pytest.mark.tier("test")
def test_the_server_is_read_only_and_local(web: Web) -> None:
    assert web.ask().status == 200
    assert (web.ask(method="HEAD").status, web.ask(method="HEAD").text) == (200, "")
    assert {web.ask(method=m).status for m in ("POST", "PUT", "DELETE", "OPTIONS")} == {405}
    assert web.ask("/other").status == 404
    for host in ("evil.example", "127.0.0.1.evil.example:80", "", "localhost:80:80"):
        assert web.ask(Host=host).status == 421, host
        assert "armed" not in web.ask("/view.json", Host=host).text
    assert web.ask(Host="localhost:9").status == 200


@pytest.mark.tier("all")
def test_no_other_site_may_read_it(web: Web) -> None:
    for path in ("/", "/view.json"):
        headers = web.ask(path, Origin="http://evil.example").headers
        assert not [name for name in headers if name.lower().startswith("access-control")]
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers
    assert web.ask().headers["content-security-policy"] == policy(page())


@pytest.mark.parametrize(
    ("host", "ours"),
    [("localhost", True), ("LOCALHOST:80", True), ("127.0.0.1:80", True), ("[::1]:80", True),
     ("", False), ("::1", False), ("127.0.0.1@evil", False), ("localhost.evil", False),
     ("localhost:", False), ("[::1", False), ("127.0.0.2", True), ("192.0.2.1", False)],
)  # fmt: skip
def test_names_of_this_host(host: str, ours: bool) -> None:
    assert called_here(host) is ours


@pytest.mark.parametrize("listen", ["0.0.0.0:80", "[::]:80", "192.0.2.1:80", "example.com:80"])
def test_others_cannot_be_let_in(listen: str) -> None:
    with pytest.raises(InvalidArgument, match="not a loopback address"), on_port(listen):
        pass


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:http", ":80", "127.0.0.1:123456"])
def test_invalid_addresses_are_refused(listen: str) -> None:
    with pytest.raises(InvalidArgument, match="is not HOST:PORT"), on_port(listen):
        pass


def test_a_name_and_an_address() -> None:
    for listen in ("localhost:0", "127.0.0.1:0"):
        with on_port(listen) as listening:
            assert where(listening).startswith("http://127.0.0.1:")


@pytest.mark.tier("all")
def test_a_port_that_is_taken(web: Web) -> None:
    taken = web.address.removeprefix("http://").rstrip("/")
    done = CliRunner().invoke(app, ["web", "--name", "demo", "--listen", taken])
    assert (done.exit_code, "cannot be bound" in done.output) == (Exit.UNUSABLE, True)


@pytest.mark.tier("all")
def test_a_socket_for_user_and_group(demo: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "web"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    one = Web(demo, "--socket", str(path))
    assert one.address == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"GET /view.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert client.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
    done = CliRunner().invoke(app, ["web", "--name", "demo", "--socket", str(path)])
    assert (done.exit_code, "another process listens" in done.output) == (Exit.UNUSABLE, True)
    assert one.end() == Exit.DONE
    assert not path.exists()
    path.write_text("a file")
    done = CliRunner().invoke(app, ["web", "--name", "demo", "--socket", str(path)])
    assert (done.exit_code, path.read_text()) == (Exit.UNUSABLE, "a file")


# ---- contents ------------------------------------------------------------------------------------


def view(web: Web) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(web.ask("/view.json").text)
    return found


@pytest.mark.tier("test")
def test_aggregates_and_nothing_else(web: Web) -> None:
    with Client("demo", namespace="shop") as client:
        client.add("secret-key", delay=3600, topic="orders", payload=b"secret-payload")
        eventually(lambda: view(web)["armed"])
        found = view(web)
    assert [space["name"] for space in found["namespaces"]] == ["shop"]
    assert sum(sum(level["counts"]) for level in found["levels"]) == 1
    assert "secret" not in web.ask("/view.json").text


@pytest.mark.tier("all")
def test_the_past_is_reported_too(web: Web) -> None:
    eventually(lambda: len(view(web)["past"]) > 2)
    assert set(view(web)["past"][0]) == {"armed", "fired", "cancelled", "p50_ns", "p99_ns"}


@pytest.mark.tier("all")
def test_a_daemon_that_ends_is_still_shown(demo: Daemon, web: Web) -> None:
    demo.stop()
    assert eventually(lambda: view(web)["condition"] == "stopped")
    for arena_file in (demo.paths.arena, demo.paths.private):
        os.unlink("/dev/shm" + arena_file)
    assert eventually(lambda: "error" in view(web))


@pytest.mark.tier("all")
def test_an_error_of_the_views_ends_the_server(
    demo: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = [Sampler.take] * 2

    def take(sampler: Sampler) -> View:
        if not views:
            raise ZeroDivisionError
        return views.pop()(sampler)

    monkeypatch.setattr(Sampler, "take", take)
    done = CliRunner().invoke(app, ["web", "--name", "demo", "--listen", "127.0.0.1:0"])
    assert isinstance(done.exception, ZeroDivisionError)


def test_the_page_needs_nothing_but_itself() -> None:
    used = re.findall(r'(?:src|href|url)\s*[=(]\s*"?([^")\s>]+)', page())
    assert {one.split(":")[0] for one in used} <= {"data"}
    assert "@import" not in page()
    assert " style=" not in page()
    assert set(re.findall(r'fetch\("([^"]+)"', page())) == {"view.json"}


@pytest.fixture
def three(daemon: StartDaemon) -> Iterator[Web]:
    one = Web(daemon("demo", "--shards", "3", "--capacity", "1000"), "--listen", "127.0.0.1:0")
    yield one
    assert one.end() == Exit.DONE


def of_shard(web: Web, shard: int | str) -> Answer:
    return web.ask(f"/view.json?shard={shard}")


@pytest.mark.tier("all")
def test_a_deployment_and_each_of_its_shards(three: Web) -> None:
    with Client("demo", namespace="shop") as client:
        client.add_many([(f"k{i}", 3600.0) for i in range(5)])
    whole = eventually(lambda: (found := view(three))["armed"] and found)
    reported = [json.loads(of_shard(three, row["shard"]).text) for row in whole["shards"]]
    assert [one["name"] for one in reported] == ["demo-1-0", "demo-1-1", "demo-1-2"]
    assert whole["armed"] == sum(one["armed"] for one in reported) == 5
    assert [row["armed"] for row in whole["shards"]] == [one["armed"] for one in reported]
    assert (whole["runner"]["condition"], whole["runner"]["serving"]) == ("ready", 3)
    assert {one["runner"] for one in reported} == {None}
    assert "must be 0 to 2" in json.loads(of_shard(three, 3).text)["error"]
    assert {of_shard(three, bad).status for bad in ("x", "-1", "%00", "1e3", "99999")} == {400}


# ---- the page in a browser -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser that runs without a window."""
    needs("browser")
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def shown(browser: Browser, web: Web) -> Iterator[Page]:
    """The page in the browser. Errors and messages on the browser's console fail the test."""
    complaints: list[str] = []
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(request.url))
    page.goto(web.address)
    yield page
    found = list(complaints)  # before the daemon ends, because the page then reports further errors
    page.close()
    assert found == []


@pytest.mark.tier("all")
def test_a_browser_draws_the_page(shown: Page, demo: Daemon) -> None:
    with Client("demo", namespace="shop<b>&amp;") as client:
        client.add_many([(f"k{i}", 5.0 + i) for i in range(50)])
        client.add("soon", delay=0)
        shown.wait_for_selector("#namespaces td:text-is('50')")
        assert shown.text_content("#condition") == "ready"
        assert "shop<b>&amp;" in (shown.text_content("#namespaces") or "")
        assert shown.locator("#wheel .cell").count() > 1
        assert shown.locator("#rates .curve").count() == 3
        # The column of the fired timer may appear one refresh later.
        shown.wait_for_selector("#spread .column")
        assert shown.locator("#spread .column").count() == 1
        assert "none: all outcomes" in (shown.text_content("#clients") or "")
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.tier("all")
def test_a_browser_shows_the_shards_of_a_deployment(browser: Browser, three: Web) -> None:
    with Client("demo", namespace="shop") as client, closing(browser.new_page()) as page:
        client.add_many([(f"k{i}", 3600.0) for i in range(50)])
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto(three.address)
        page.wait_for_selector("#shards td:text-is('50')")
        page.wait_for_selector(
            "#runner:text-matches('^Supervisor process [0-9]+, ready; restarts: 0[.]$')"
        )
        assert page.locator("#choice a").all_inner_texts() == [
            "all", "shard 0", "shard 1", "shard 2"
        ]  # fmt: skip
        page.click("#choice a:text-is('shard 1')")
        page.wait_for_selector("#name:text-is('demo-1-1')")
        assert page.locator("#shards").is_hidden()
        assert page.text_content("#choice [aria-current]") == "shard 1"
        page.goto(three.address + "#9")
        page.wait_for_selector(".past #alarm:has-text('must be 0 to')")
        page.click("#choice a:text-is('all')")
        page.wait_for_selector("body:not(.past) #name:text-is('demo')")


@pytest.mark.tier("all")
def test_a_browser_shows_day_night_and_a_phone(shown: Page) -> None:
    shown.wait_for_selector("#wheel path")
    papers = set()
    for scheme in ("light", "dark"):
        shown.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        papers.add(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(papers) == 2
    shown.set_viewport_size({"width": 1000, "height": 800})
    cards = "[...document.querySelectorAll('section')]"
    assert shown.evaluate(f"{cards}.every((one) => one.scrollWidth <= one.clientWidth)")
    shown.set_viewport_size({"width": 360, "height": 800})
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
    amounts = "[...document.querySelectorAll('.fill span:last-child')]"
    lines = "(one) => one.clientHeight / parseFloat(getComputedStyle(one).lineHeight)"
    assert shown.evaluate(f"Math.max(...{amounts}.map({lines}))") < 2


@pytest.mark.tier("all")
def test_a_browser_says_that_the_daemon_was_killed(shown: Page, demo: Daemon) -> None:
    shown.wait_for_selector("#condition:text-is('ready')")
    demo.kill()
    shown.wait_for_selector("#condition:text-is('killed')")
    assert "The daemon was killed" in (shown.text_content("#alarm") or "")


@pytest.mark.tier("all")
def test_a_browser_shows_the_past_as_past(browser: Browser, web: Web) -> None:
    with closing(browser.new_page()) as page:
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto(web.address)
        page.wait_for_selector("body:not(.past) #condition:text-is('ready')")
        os.kill(web.process.pid, signal.SIGSTOP)
        try:
            page.wait_for_selector(".past #condition:text-is('unknown')")
            assert "does not answer" in (page.text_content("#alarm") or "")
            assert page.text_content("#reported") == ""
        finally:
            os.kill(web.process.pid, signal.SIGCONT)
        page.wait_for_selector("body:not(.past) #condition:text-is('ready')")
