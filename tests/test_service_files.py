"""The daemon as a systemd service: installed units, the log, and settings after a reload."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from machine import needs
from real_daemon import Daemon, StartDaemon, eventually

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.cli.install import PLACES
from purgatoryd.daemon import log
from purgatoryd.shm_layout.arena import Reader

pytestmark = pytest.mark.tier("check")

UNITS = Path(__file__).resolve().parent.parent / "systemd"
COMMAND = "/opt/purgatoryd/bin/purgatoryd"
EXPOSURE_MAX = 1.5


# ---- install ---------------------------------------------------------------------------------


def install(root: Path, *args: str) -> Result:
    arguments = ["install", "--root", str(root), "--command", COMMAND, *args]
    return CliRunner().invoke(app, arguments)


def test_a_dry_run_writes_and_calls_nothing(tmp_path: Path) -> None:
    done = install(tmp_path, "--dry-run", "--enable", "web", "--json")
    assert done.exit_code == Exit.DONE, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    written = {record["file"] for record in records if "file" in record}
    settings = {str(tmp_path / f"etc/purgatoryd/{name}.toml") for name in ("default", "web")}
    assert written == settings | {str(tmp_path / place) for place in PLACES.values()}
    root = f"--root={tmp_path}"
    assert [record["call"] for record in records if "call" in record] == [
        ["systemd-sysusers", root, "purgatoryd.conf"],
        ["systemd-tmpfiles", root, "--create", "purgatoryd.conf"],
        ["systemctl", root, "enable", "purgatoryd@web.service"],
    ]
    assert list(tmp_path.iterdir()) == []


def test_an_image_gets_units_user_and_folders(tmp_path: Path) -> None:
    needs("systemd")
    needs("root", "systemd-sysusers writes /etc/passwd")
    settings = tmp_path / "etc/purgatoryd/default.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("capacity = 7\n")
    done = install(tmp_path, "--enable", "default", "--enable", "web")
    assert done.exit_code == Exit.DONE, done.stderr
    assert settings.read_text() == "capacity = 7\n"
    unit = (tmp_path / "etc/systemd/system/purgatoryd@.service").read_text()
    assert f"ExecStart={COMMAND} run --name %i" in unit
    assert "purgatoryd:x:" in (tmp_path / "etc/passwd").read_text()
    assert (tmp_path / "run/purgatoryd").stat().st_mode & 0o7777 == 0o750
    wanted = tmp_path / "etc/systemd/system/multi-user.target.wants"
    names = sorted(link.name for link in wanted.iterdir())
    assert names == ["purgatoryd.service", "purgatoryd@web.service"]


@pytest.mark.parametrize("command", ["/root/bin/purgatoryd", "/tmp/purgatoryd", "bin/purgatoryd"])
def test_a_command_that_the_unit_would_not_see_is_refused(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["install", "--root", str(tmp_path), "--command", command])
    assert done.exit_code == Exit.USAGE
    assert "which the units hide" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_two_units_differ_by_the_name_alone() -> None:
    plain, template = (
        lines((UNITS / name).read_text()) for name in ("purgatoryd.service", "purgatoryd@.service")
    )
    named = [line.replace("%i", "default") for line in template]
    assert [line for line in plain if line not in named] == ["Description=Timers in shared memory"]
    assert len(plain) == len(named)


def lines(unit: str) -> list[str]:
    return [line for line in unit.splitlines() if not line.startswith("#")]


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", [name for name in PLACES if name.endswith(".service")])
def test_a_unit_is_little_exposed(name: str) -> None:
    needs("systemd")
    command = ["systemd-analyze", "security", "--offline=true", "--json=short"]
    threshold = f"--threshold={EXPOSURE_MAX * 10:.0f}"
    done = subprocess.run(
        [*command, threshold, str(UNITS / name)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- settings read again ---------------------------------------------------------------------


def header(real: Daemon) -> Any:
    reader = Reader.attach(real.paths)
    figures = {name: int(getattr(reader.header, name)) for name in ("quota_timers", "quota_ops")}
    reader.close()
    return figures


@pytest.mark.tier("test")
def test_quotas_and_log_level_are_read_again(daemon: StartDaemon, tmp_path: Path) -> None:
    file = tmp_path / "demo.toml"
    file.write_text("quota-timers = 5\ncapacity = 1000\n")
    real = daemon("demo", "--config", str(file), "--quota-ops", "7")
    file.write_text('quota-timers = 6\nquota-ops = 8\ncapacity = 2000\nlog-level = "info"\n')
    os.kill(real.pid, signal.SIGHUP)
    eventually(lambda: "that apply from the next start on: capacity" in real.stderr)
    assert header(real) == {"quota_timers": 6, "quota_ops": 7}  # a flag wins over the file
    assert "settings reloaded" in real.stderr


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("text", "said"), [("capacity = 0", "must be from 1"), ("= 1", "TOML"), ("tick = 'x'", "tick")]
)
def test_invalid_settings_change_nothing(
    text: str, said: str, daemon: StartDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "demo.toml"
    file.write_text("quota-timers = 5\n")
    real = daemon("demo", "--config", str(file))
    file.write_text(f"quota-timers = 6\n{text}\n")
    os.kill(real.pid, signal.SIGHUP)
    eventually(lambda: "the settings are unchanged" in real.stderr)
    assert said in real.stderr
    assert header(real)["quota_timers"] == 5


# ---- the log ---------------------------------------------------------------------------------


def test_journald_gets_fields_and_what_it_does_not_take_goes_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(str(tmp_path / "journald"))
        monkeypatch.setattr(log, "JOURNALD", str(tmp_path / "journald"))
        monkeypatch.setattr(log, "leads_to_journald", lambda fd: True)
        logger = log.Log()
        logger.set_up("warning", name="demo")
        logger.info("not logged")
        logger.warning("two\nlines", errno=5)
        size = len("two\nlines").to_bytes(8, "little")
        assert journald.recv(4096) == (
            b"MESSAGE\n" + size + b"two\nlines\nPRIORITY=4\nSYSLOG_IDENTIFIER=purgatoryd\n"
            b"PURGATORYD_NAME=demo\nPURGATORYD_ERRNO=5\n"
        )
    (tmp_path / "journald").unlink()
    logger.error("nobody there", errno=5, peer="a = [b]")
    logger.flush()
    said = "<3>purgatoryd: nobody there [name=demo errno=5 peer='a = [b]']\n"
    assert capfd.readouterr().err == said
    logger.set_up("warning")
    logger.error("no fields")
    logger.flush()
    assert capfd.readouterr().err == "<3>purgatoryd: no fields\n"


def test_stderr_leads_to_journald_if_systemd_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "stream").open("w") as stream:
        about = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{about.st_dev}:{about.st_ino}")
        assert log.leads_to_journald(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{about.st_dev}:{about.st_ino + 1}")
        assert not log.leads_to_journald(stream.fileno())
    monkeypatch.delenv("JOURNAL_STREAM")
    assert not log.leads_to_journald(0)
