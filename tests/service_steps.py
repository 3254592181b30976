"""Runs inside the container of test_service.py: what happens to the units, step by step.

Writes {step: None, or why it failed} as JSON to the file that it is given. The steps build on each
other, in their order.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import pwd
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from purgatoryd.clients import Client, Subscriber
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import ArenaMissing, DaemonUnreachable
from purgatoryd.shm_layout.paths import HOST_DIRECTORY, paths_in

Value = TypeVar("Value")

PATIENCE_S = 60.0
DROP_INS = Path("/etc/systemd/system")
PROBED = Path("/var/lib/purgatoryd/probed.json")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the C library has no function of that name
MPOL_PREFERRED = 1
EXPOSURE_MAX = 15
FAR_S = 3600


def systemctl(*args: str, check: bool = True) -> str:
    done = subprocess.run(["systemctl", *args], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, (args, done.returncode, done.stderr, journal())
    return done.stdout.strip()


def journal(*args: str) -> str:
    command = ["journalctl", "--no-pager", "-o", "cat", *(args or ("-u", "purgatoryd*"))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def shown(name: str, unit: str = "purgatoryd") -> str:
    return systemctl("show", "--value", "-p", name, unit)


def main_pid() -> int:
    return int(shown("MainPID"))


def purgatoryd(*args: str) -> tuple[int, str]:
    done = subprocess.run(
        ["/opt/bin/purgatoryd", *args], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def eventually(fact: Callable[[], Value]) -> Value:
    end_s = time.monotonic() + PATIENCE_S
    while not (value := fact()):
        assert time.monotonic() < end_s, "what the step waits for did not come true"
        time.sleep(0.02)
    return value


def another(pid: int) -> int:
    """The main process, once it is ready and another one."""
    return eventually(lambda: (now := main_pid()) != pid and shown("SubState") == "running" and now)


def ticket_of(key: str) -> int | None:
    with Client("default") as client:
        found = client.get(key)
    return found.ticket if found else None


def as_user(name: str, act: Callable[[], object]) -> str:
    """The name of the error that `act` ends with in a process of that user; "" = none."""
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        user = pwd.getpwnam(name)
        os.initgroups(name, user.pw_gid)
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        try:
            act()
        except BaseException as error:
            os.write(write_fd, type(error).__name__.encode())
        os._exit(0)
    os.close(write_fd)
    with open(read_fd) as told:
        name = told.read()
    os.wait()
    return name


# ---- steps -----------------------------------------------------------------------------------


def a_start_returns_when_the_daemon_is_ready() -> None:
    systemctl("start", "purgatoryd")
    assert purgatoryd("status")[0] == 0
    assert shown("StatusText") == "ready"
    with Client("default", timeout=PATIENCE_S) as client:
        client.add("far", delay=FAR_S)
    assert systemctl("is-enabled", "purgatoryd") == "enabled"


def a_killed_daemon_is_started_again_with_its_timers() -> None:
    pid, ticket, restarts = main_pid(), ticket_of("far"), int(shown("NRestarts"))
    with Subscriber("default", topics=["t"]) as notices, Client("default") as client:
        client.add("near", delay=0.2, topic="t")
        os.kill(pid, signal.SIGKILL)
        notice = notices.get(timeout=PATIENCE_S)
    assert notice is not None
    assert notice.key == "near"
    another(pid)
    assert ticket_of("far") == ticket
    assert int(shown("NRestarts")) > restarts


def a_daemon_that_hangs_is_killed_by_the_watchdog() -> None:
    pid, ticket = main_pid(), ticket_of("far")
    os.kill(pid, signal.SIGSTOP)
    another(pid)
    assert "Watchdog timeout" in journal()
    assert ticket_of("far") == ticket


def a_reload_takes_quotas_over_and_tells_journald() -> None:
    pid = main_pid()
    Path("/etc/purgatoryd/default.toml").write_text('log-level = "info"\nquota-timers = 77\n')
    systemctl("reload", "purgatoryd")
    eventually(lambda: header("quota_timers") == 77)
    eventually(lambda: shown("ActiveState") == "active")
    assert main_pid() == pid
    records = journal("-o", "json", "PURGATORYD_NAME=default").splitlines()
    told = [json.loads(record) for record in records]
    told = [one for one in told if "PURGATORYD_STATE" in one]
    moves = [(one["PURGATORYD_STATE"], one["PRIORITY"]) for one in told[:3]]
    assert moves == [("starting", "6"), ("recovering", "6"), ("ready", "6")]
    assert {one["SYSLOG_IDENTIFIER"] for one in told} == {"purgatoryd"}


def header(field: str) -> int:
    reader = Reader.attach(paths_in(HOST_DIRECTORY, "default"))
    try:
        return int(getattr(reader.header, field))
    finally:
        reader.close()


def a_second_daemon_of_the_name_is_refused() -> None:
    pid = main_pid()
    systemctl("start", "purgatoryd@default", check=False)
    eventually(lambda: f"process {pid}" in journal("-u", "purgatoryd@default", "-p", "err"))
    systemctl("stop", "purgatoryd@default")
    assert main_pid() == pid
    assert purgatoryd("status")[0] == 0


def a_daemon_of_another_name_comes_and_goes_beside_it() -> None:
    systemctl("start", "purgatoryd@web")
    assert purgatoryd("status", "--name", "web")[0] == 0
    systemctl("stop", "purgatoryd@web")
    assert purgatoryd("status", "--name", "web")[0] == 3
    assert purgatoryd("status")[0] == 0
    assert ticket_of("far")


def who_is_in_the_group_is_a_client_and_nobody_else() -> None:
    def use() -> None:
        with Client("default") as client:
            client.add("mine", delay=FAR_S)

    def read() -> None:
        Reader.attach(paths_in(HOST_DIRECTORY, "default")).close()

    assert (as_user("insider", use), as_user("insider", read)) == ("", "")
    assert as_user("outsider", use) == DaemonUnreachable.__name__
    assert as_user("outsider", read) in ("PermissionError", ArenaMissing.__name__, "BadPath")


def the_sandbox_allows_what_a_daemon_needs() -> None:
    folder = DROP_INS / "purgatoryd@web.service.d"
    folder.mkdir()
    probe = f"ExecStartPre=/opt/bin/python {__file__} probe\n"
    folder.joinpath("probe.conf").write_text(f"[Service]\n{probe}")
    systemctl("daemon-reload")
    systemctl("start", "purgatoryd@web")
    probed = json.loads(PROBED.read_text())
    systemctl("stop", "purgatoryd@web")
    assert probed == {"affinity": True, "mempolicy": 0, "home": False}, probed


def probe() -> None:
    """As the unit's user, with all that the unit takes away."""
    libc, number = ctypes.CDLL(None), SET_MEMPOLICY[platform.machine()]
    one = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, one)
    nodes = ctypes.c_ulong(1)
    found = {
        "affinity": os.sched_getaffinity(0) == one,
        "mempolicy": libc.syscall(number, MPOL_PREFERRED, ctypes.byref(nodes), 2),
        "home": os.access("/root", os.R_OK),
    }
    PROBED.write_text(json.dumps(found))


def the_unit_is_sound_and_little_exposed() -> None:
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "purgatoryd.service", "purgatoryd@web.service",
         "purgatoryd-metrics@web.service"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (found.returncode, "purgatoryd" in found.stderr) == (0, False), found.stderr
    command = ["systemd-analyze", "security", f"--threshold={EXPOSURE_MAX}", "purgatoryd.service"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def settings_that_are_refused_are_not_tried_again() -> None:
    settings = Path("/etc/purgatoryd/web.toml")
    good = settings.read_text()
    settings.write_text("capacity = 0\n")
    systemctl("start", "purgatoryd@web", check=False)
    eventually(lambda: shown("ActiveState", "purgatoryd@web") == "failed")
    assert shown("NRestarts", "purgatoryd@web") == "0"
    assert "must be from 1" in journal("-u", "purgatoryd@web", "-p", "err")
    settings.write_text(good)


def a_stopped_daemon_stays_so_until_the_next_start() -> None:
    ticket = ticket_of("far")
    systemctl("stop", "purgatoryd")
    assert (shown("ActiveState"), shown("Result")) == ("inactive", "success")
    assert purgatoryd("status")[0] == 3
    systemctl("start", "purgatoryd")
    assert ticket_of("far") == ticket
    purgatoryd("stop", "--drain", "--timeout", "0.1")
    eventually(lambda: shown("ActiveState") == "inactive")


STEPS = (
    a_start_returns_when_the_daemon_is_ready,
    a_killed_daemon_is_started_again_with_its_timers,
    a_daemon_that_hangs_is_killed_by_the_watchdog,
    a_reload_takes_quotas_over_and_tells_journald,
    a_second_daemon_of_the_name_is_refused,
    a_daemon_of_another_name_comes_and_goes_beside_it,
    who_is_in_the_group_is_a_client_and_nobody_else,
    the_sandbox_allows_what_a_daemon_needs,
    the_unit_is_sound_and_little_exposed,
    settings_that_are_refused_are_not_tried_again,
    a_stopped_daemon_stays_so_until_the_next_start,
)


def outcome(step: Callable[[], None]) -> str | None:
    try:
        step()
    except BaseException:
        return traceback.format_exc() + journal()
    return None


def main(results: str) -> None:
    found = {step.__name__: outcome(step) for step in STEPS}
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    probe() if sys.argv[1] == "probe" else main(sys.argv[1])
