"""The pages of docs: every command and example in them runs, and every link has a target.

Each ```python and ```sh block runs by itself in a new folder. For each daemon name that the block
uses, the test runs a daemon, unless the block starts it. The commands in help texts run in the same
way. If a block waits for notices, the test fires timers in the topics that the block names. If a
block does not end by itself, the test interrupts it after its first line of output.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from click.testing import CliRunner
from real_daemon import PATIENCE_S, StartDaemon, clean_environment

from purgatoryd.cli.app import app
from purgatoryd.clients import Client
from purgatoryd.daemon import commands as requests
from purgatoryd.daemon.listeners import admission_control, sockets, time_shares, transport

pytestmark = pytest.mark.tier("check")

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
_NAME = re.compile(
    r"(?:Client|Subscriber|Consumer|Admin|\bPurgatory|arena_paths)\([\"']([a-z0-9-]+)"
    r"|--name[ =]([a-z0-9-]+)"
)
_NAMESPACE = re.compile(r"(?:namespace=|--namespace[ =]|-n )[\"']?([a-z0-9-]+)")
_TOPIC = re.compile(r"(?:topics?=\[?|--topic[ =]|-t )[\"']?([a-z0-9-]+)")
_SUBJECT = re.compile(r"[\"']([a-z0-9-]+)\\0([a-z0-9-]+)\\0")
_EXAMPLE = re.compile(r"^ +(purgatoryd .+)$", re.MULTILINE)  # a command in a help text
_SESSION = re.compile(r"^(?:[$#] )?(?:\S*/)?purgatoryd (.+?)(?: &)?$", re.MULTILINE)
_HOST_DIRECTORY = "/run/purgatoryd"


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def names(self) -> set[str]:
        """Names of daemons that the block uses."""
        found = {name for pair in _NAME.findall(self.text) for name in pair if name}
        found |= set(re.findall(_HOST_DIRECTORY + r"/([a-z0-9-]+)\.", self.text))
        return found or {"default"}


def blocks(*languages: str) -> list[Block]:
    return [
        Block(page, page.read_text()[: match.start()].count("\n") + 1, match[1], match[2])
        for page in PAGES
        for match in _BLOCK.finditer(page.read_text())
        if match[1] in languages
    ]


def commands() -> list[Block]:
    """Return the shell blocks of all pages, and the commands in help texts."""
    shown = (
        block._replace(text="\n".join(_EXAMPLE.findall(block.text))) for block in blocks("text")
    )
    return blocks("sh") + [block for block in shown if block.text]


def shell_script(text: str) -> str:
    """Return the commands as a script. Leave out calls of `make`: another test looks up their
    targets in the Makefile.

    The script ends its background commands when it exits.
    """
    lines = ["trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT"]
    lines += [line.removeprefix("$ ") for line in text.splitlines()]
    return "\n".join(line for line in lines if not line.startswith("make "))


def subjects(text: str) -> set[tuple[str, str]]:
    """Return the (namespace, topic) pairs in a block of Python, shell or raw frames."""
    namespace = next(iter(_NAMESPACE.findall(text)), "default")
    topics = _TOPIC.findall(text)
    return set(_SUBJECT.findall(text)) | {(namespace, topic) for topic in topics or ["default"]}


def feed(block: Block, name: str, serial: Iterator[int]) -> None:
    """Let a timer fire in every topic that the block names."""
    for namespace, topic in subjects(block.text):
        with Client(name, namespace=namespace) as client:
            client.add(f"fed:{next(serial)}", delay_ns=0, topic=topic, payload=b"fed")


def wait_for_output(process: subprocess.Popen[str], block: Block) -> None:
    """Let timers fire until the process has printed something or ended."""
    assert process.stdout is not None
    end, serial = time.monotonic() + PATIENCE_S, count()
    while not select.select([process.stdout], [], [], 0.05)[0]:
        assert time.monotonic() < end, f"{block} printed nothing"
        for name in block.names:
            feed(block, name, serial)


def run_block(block: Block, command: list[str], folder: Path, *, fed: bool, endless: bool) -> None:
    environment = clean_environment(Path(os.environ["PURGATORYD_DIR"]))
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with (
        subprocess.Popen(
            command, cwd=folder, env=environment | {"PYTHONUNBUFFERED": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        ) as process,
        ExitStack() as cleanup,
    ):  # fmt: skip
        cleanup.callback(kill_group, process)
        if fed:
            wait_for_output(process, block)
        if endless:
            os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    ends = (0, -signal.SIGINT, 128 + signal.SIGINT) if endless else (0,)
    assert process.returncode in ends, f"{block}\n{out}\n{err}"


def kill_group(process: subprocess.Popen[str]) -> None:
    """End all processes that the block left in its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.mark.tier("all")
@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_runs(block: Block, daemon: StartDaemon, daemon_dir: Path, tmp_path: Path) -> None:
    for name in block.names:
        daemon(name, "--capacity", "1000")
    script = tmp_path / "example.py"
    script.write_text(block.text.replace(_HOST_DIRECTORY, str(daemon_dir)))
    waits = any(word in block.text for word in ("Subscriber(", "SUBSCRIBE", "jobs.run("))
    endless = waits and bool(re.search(r"for \w+ in|while True|jobs\.run\(", block.text))
    command = [sys.executable, str(script)]
    run_block(block, command, tmp_path, fed=waits, endless=endless)


@pytest.mark.tier("all")
def test_the_client_of_the_protocol_prints_its_comments(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    [block] = [block for block in blocks("python") if "def request(" in block.text]
    daemon("demo")
    script = block.text.replace(_HOST_DIRECTORY, str(daemon_dir))
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert run.returncode == 0, run.stderr
    printed = re.sub(r"\(\d+, ", "(ticket, ", run.stdout).splitlines()
    assert printed == re.findall(r"^print\(.*?\)  # (.*)$", block.text, re.MULTILINE)


@pytest.mark.tier("all")
@pytest.mark.parametrize("block", commands(), ids=str)
def test_commands_run(block: Block, daemon: StartDaemon, daemon_dir: Path, tmp_path: Path) -> None:
    for name in block.names if "purgatoryd run" not in block.text else ():
        daemon(name, "--capacity", "1000")
    script = shell_script(block.text).replace(_HOST_DIRECTORY, str(daemon_dir))
    waits = "purgatoryd listen" in script or "purgatoryd consume" in script
    endless = waits and "--count" not in script
    command = ["bash", "-euc", script]
    run_block(block, command, tmp_path, fed=endless, endless=endless)


@pytest.mark.tier("all")
@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_settings_files_are_accepted(block: Block, tmp_path: Path) -> None:
    tomllib.loads(block.text)
    (tmp_path / "purgatoryd.toml").write_text(block.text)
    arguments = ["run", "--print-config", "--config", str(tmp_path / "purgatoryd.toml")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.tier("check")
@pytest.mark.parametrize("block", blocks("console"), ids=str)
def test_commands_of_sessions_are_accepted(block: Block) -> None:
    """The blocks need root, systemd or other processes, so that they are parsed and not run."""
    for line in _SESSION.findall(block.text):
        parse(app, "purgatoryd", shlex.split(line))


def parse(command: click.Command, name: str, arguments: list[str]) -> None:
    """Raise click.UsageError if the command line has an unknown command or option."""
    with click.Context(command, info_name=name) as ctx:
        if isinstance(command, click.Group):
            _, found, rest = command.resolve_command(ctx, arguments)
            assert found
            parse(found, arguments[0], rest)
        else:
            command.make_parser(ctx).parse_args(arguments)


@pytest.mark.tier("check")
def test_the_limits_for_hostile_clients_are_those_of_the_code() -> None:
    control = admission_control
    page = (ROOT / "docs/operations.md").read_text().partition("### Hostile clients")[2]
    for text in (
        f"({control.ALARM_BYTES >> 20} MiB of process memory), over {sockets.PARTS_MAX} frames",
        f"routing ids over {sockets.ROUTE_MAX} bytes",
        f"over {control.SUBJECTS_PER_UID} prefixes per uid",
        f"then {control.SUBSCRIBES_PER_S} new ones in a second",
        f"after {transport.REPLY_HWM} answers or {sockets.NOTICE_HWM} notices, dropped",
        f"over {control.CONNECTIONS_PER_UID} connections per uid",
        f"then {control.CONNECTS_PER_S} in a second",
        f"closed after {sockets.HANDSHAKE_MS // 1000} s",
        f"{time_shares.SHARE_NS / 1e6:g} ms per uid and iteration; {requests.BEHIND_MAX} messages "
        f"and {requests.WAITING_BYTES_MAX >> 20} MiB wait",
    ):
        assert text in page, text


@pytest.mark.tier("check")
def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:^|`)make ([a-z0-9-]+)", page.read_text(), re.MULTILINE)
        assert set(named) <= targets, page.name


@pytest.mark.tier("check")
def test_links_lead_somewhere() -> None:
    broken = [
        (page.name, target)
        for page in PAGES
        for target in _LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken
