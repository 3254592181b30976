"""Create the pictures of docs/img: `python tests/support/pictures.py [SECONDS]`, with the project's
folder on PYTHONPATH.

web.png shows the page of `purgatoryd web` for a daemon that has worked for SECONDS. report.png
shows the page that `make report` has written, cut off above its second daemon.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from machine import BROWSERS
from PIL import Image
from raw_owner import Raw, trigger, watch
from real_daemon import Daemon, remove_arena_files
from web_page import Web

from purgatoryd.clients import Client
from purgatoryd.shm_layout.layout import Op

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "img"
REPORT = ROOT / "build" / "report.html"
SETTINGS = ("--capacity", "200000", "--payload-memory", "24M")
# For each namespace: (timers in a batch, median of their delays in seconds, fraction cancelled).
LOADS = {
    "orders": (400, 8.0, 0.8), "leases": (150, 30.0, 0.5), "retries": (60, 1.5, 0.1),
    "reminders": (30, 20_000.0, 0.0),
}  # fmt: skip
BATCHES_PER_S = 20
WIDTH = 1240
SECOND = "h2 >> nth=1"
"""Selector of the heading of the report's second daemon."""
COLOURS = 256
"""Number of colours of a picture. The limit reduces the file size to a third."""


def work(namespace: str, done: threading.Event) -> None:
    """Arm and cancel batches of changing size."""
    size, median_s, cancelled = LOADS[namespace]
    rng, number = random.Random(namespace), 0
    with Client("demo", namespace=namespace) as client:
        while not done.wait(1 / BATCHES_PER_S):
            count = int(size * rng.uniform(0.6, 1.4))
            keys = [f"{number}:{n}" for n in range(count)]
            delays = [median_s * rng.lognormvariate(0, 1) for _ in keys]
            client.add_many({"key": keys, "delay": delays, "payload": [bytes(40)] * count})
            client.cancel_many(keys[: int(count * cancelled)])
            number += 1


@contextmanager
def at_work(daemon: Daemon) -> Iterator[threading.Event]:
    """Let clients work with a daemon. One more client does not acknowledge its outcomes."""
    done = threading.Event()
    threads = [threading.Thread(target=work, args=(name, done)) for name in LOADS]
    with Raw(daemon) as slow:
        slow.batch(*(watch(b"%d" % n, b"t", 1) for n in range(300)))
        slow.batch(trigger(Op.ADVANCE_KEY, b"t", 1))
        for thread in threads:
            thread.start()
        try:
            yield done
        finally:
            done.set()
            for thread in threads:
                thread.join()


def picture_of_web(browser: Browser, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PURGATORYD_DIR"] = directory
        daemon = Daemon("demo", Path(directory), SETTINGS)
        try:
            with at_work(daemon) as done:
                web = Web(daemon, "--listen", "127.0.0.1:0")
                done.wait(seconds)
                shoot(browser, web.address, IMAGES / "web.png")
                web.end()
        finally:
            daemon.close()
            remove_arena_files(daemon.paths)


def shoot(browser: Browser, address: str, path: Path, before: str = "") -> None:
    """Take a picture of a page, down to the beginning of the element `before`."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 900})
    page.goto(address)
    page.wait_for_timeout(1500)
    page.screenshot(path=path, full_page=True)
    box = page.locator(before).bounding_box() if before else None
    page.close()
    with Image.open(path) as image:
        upto = round(box["y"]) if box else image.height
        image.crop((0, 0, image.width, upto)).quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(
            path, optimize=True
        )


def main() -> None:
    from playwright.sync_api import sync_playwright

    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0
    chromium = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        picture_of_web(browser, seconds)
        if REPORT.exists():
            shoot(browser, REPORT.as_uri(), IMAGES / "report.png", SECOND)
        browser.close()


if __name__ == "__main__":
    main()
