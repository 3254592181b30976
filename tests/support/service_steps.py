"""Steps of test_service.py that run inside its container and check the units.

The program writes a JSON object to the given file: for each step null, or the reason of its
failure. Each step depends on the steps before it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from spoiled import spoil

from purgatoryd.clients import Client, Remote, Subscriber
from purgatoryd.shm_layout import memory, topology
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import ArenaMissing, DaemonUnreachable
from purgatoryd.shm_layout.paths import HOST_DIRECTORY, paths_in
from purgatoryd.shm_layout.shards import ShardTable, read_table

Value = TypeVar("Value")

PATIENCE_S = 60.0
DROP_INS = Path("/etc/systemd/system")
STATE = Path("/var/lib/purgatoryd")
PROBED = STATE / "probed.json"
OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
LOCKED = 0, errno.ENOMEM
"""Allowed results of mlock: the container's limit may be lower than the unit's limit."""
REALTIME = "Max realtime priority +10"
KEYS = "server", "worker"
PORT = 47_431
MANY = "purgatoryd@many"
"""A deployment of two shards."""
EXPOSURE_MAX = 15
FAR_S = 3600


def systemctl(*args: str, check: bool = True) -> str:
    done = subprocess.run(["systemctl", *args], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, (args, done.returncode, done.stderr, journald_text())
    return done.stdout.strip()


def journald_text(*args: str) -> str:
    command = ["journalctl", "--no-pager", "-o", "cat", *(args or ("-u", "purgatoryd*"))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def shown(name: str, unit: str = "purgatoryd") -> str:
    return systemctl("show", "--value", "-p", name, unit)


def main_pid(unit: str = "purgatoryd") -> int:
    return int(shown("MainPID", unit))


def purgatoryd(*args: str) -> tuple[int, str]:
    done = subprocess.run(
        ["/opt/bin/purgatoryd", *args], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def eventually(fact: Callable[[], Value]) -> Value:
    end_s = time.monotonic() + PATIENCE_S
    while not (value := fact()):
        assert time.monotonic() < end_s, "the expected fact did not become true"
        time.sleep(0.02)
    return value


def another(pid: int, unit: str = "purgatoryd") -> int:
    """Wait until a new main process runs, whose pid is not `pid`. Return its pid."""
    running = partial(shown, "SubState", unit)
    return eventually(lambda: (now := main_pid(unit)) != pid and running() == "running" and now)


def ticket_of(key: str, name: str = "default", namespace: str = "default") -> int | None:
    with Client(name, namespace=namespace, timeout=PATIENCE_S) as client:
        found = client.get(key)
    return found.ticket if found else None


def as_user(name: str, act: Callable[[], object]) -> str:
    """Run `act` in a process of this user. Return the class name of its exception, or ""."""
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
    with open(read_fd) as reported:
        name = reported.read()
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
    assert "Watchdog timeout" in journald_text()
    assert ticket_of("far") == ticket


def a_reload_takes_quotas_over_and_tells_journald() -> None:
    pid = main_pid()
    Path("/etc/purgatoryd/default.toml").write_text('log-level = "info"\nquota-timers = 77\n')
    systemctl("reload", "purgatoryd")
    eventually(lambda: header("quota_timers") == 77)
    eventually(lambda: shown("ActiveState") == "active")
    assert main_pid() == pid
    records = journald_text("-o", "json", "PURGATORYD_NAME=default").splitlines()
    reported = [json.loads(record) for record in records]
    reported = [one for one in reported if "PURGATORYD_STATE" in one]
    moves = [(one["PURGATORYD_STATE"], one["PRIORITY"]) for one in reported[:3]]
    assert moves == [("starting", "6"), ("recovering", "6"), ("ready", "6")]
    assert {one["SYSLOG_IDENTIFIER"] for one in reported} == {"purgatoryd"}


def header(field: str, name: str = "default") -> int:
    reader = Reader.attach(paths_in(HOST_DIRECTORY, name))
    try:
        return int(getattr(reader.header, field))
    finally:
        reader.close()


def a_second_daemon_of_the_name_is_refused() -> None:
    pid = main_pid()
    systemctl("start", "purgatoryd@default", check=False)
    eventually(lambda: f"process {pid}" in journald_text("-u", "purgatoryd@default", "-p", "err"))
    systemctl("stop", "purgatoryd@default")
    assert main_pid() == pid
    assert purgatoryd("status")[0] == 0


def a_daemon_of_another_name_comes_and_goes_next_to_it() -> None:
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
    assert as_user("outsider", read) in (
        "PermissionError",
        ArenaMissing.__name__,
        "PermissionDenied",
    )


PROBE = f"ExecStartPre=/opt/bin/python {__file__} probe\n"


def drop_in(unit: str, lines: str) -> None:
    """Change a unit, as `systemctl edit` does."""
    folder = DROP_INS / f"{unit}.service.d"
    folder.mkdir(exist_ok=True)
    folder.joinpath("test.conf").write_text(lines)
    systemctl("daemon-reload")


def the_sandbox_allows_what_a_daemon_needs() -> None:
    drop_in("purgatoryd@web", f"[Service]\n{PROBE}")
    systemctl("start", "purgatoryd@web")
    systemctl("stop", "purgatoryd@web")
    probed = json.loads(PROBED.read_text())
    assert probed.pop("lock") in LOCKED, probed
    refused = {"realtime": errno.EPERM, "home": False}
    assert probed == {"affinity": True, "memory": 0} | refused, probed


def probe() -> None:
    """Run checks as the unit's user, with all restrictions of the unit."""
    one = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, one)
    found = {
        "affinity": os.sched_getaffinity(0) == one,
        "memory": errno_of(memory_of_a_node),
        "lock": errno_of(memory.lock),
        "realtime": errno_of(no_priority),
        "home": os.access("/root", os.R_OK),
    }
    PROBED.write_text(json.dumps(found))


def memory_of_a_node() -> None:
    """Make all system calls for memory that a daemon makes on a machine with several NUMA nodes."""
    node = min(topology.read(None).memory_nodes)
    memory.prefer(node)
    with mmap.mmap(-1, 1 << 20) as mapping:
        memory.bind(mapping, node, move=False)
        memory.bind(mapping, node, move=True)
        assert memory.elsewhere(mapping, node) == 0


def no_priority() -> None:
    """Make a request that the kernel refuses with EINVAL if the unit's system call filter lets it
    pass."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(0))


def errno_of(act: Callable[[], None]) -> int:
    """Return the errno of `act`; 0 = it succeeded."""
    try:
        act()
    except OSError as error:
        return error.errno or -1
    return 0


def drop_ins_of_the_docs_open_what_they_say() -> None:
    """Check that the drop-ins in the docs allow remote clients, SCHED_FIFO, and locked memory."""
    [remote] = re.findall(r"```ini\n(.*?)```", OPERATIONS.read_text(), re.DOTALL)
    drop_in("purgatoryd@far", f"{remote}RestrictRealtime=no\nLimitRTPRIO=10\n{PROBE}")
    keys = {name: purgatoryd("keygen", f"/var/lib/{name}.key")[1].strip() for name in KEYS}
    shutil.chown("/var/lib/server.key", "purgatoryd")
    allowed = Path("/var/lib/allowed")
    allowed.write_text(f"worker {keys['worker']} 1001\n")
    shutil.chown(allowed, "purgatoryd")
    settings = f"""
        tcp = "127.0.0.1:{PORT}"
        server-key = "/var/lib/server.key"
        keys = "{allowed}"
        realtime = 5
        lock-memory = true
        capacity = 1000
        payload-memory = "1M"
    """
    Path("/etc/purgatoryd/far.toml").write_text(settings)
    systemctl("start", "purgatoryd@far")
    far = Remote(f"127.0.0.1:{PORT}", server_key=keys["server"], key="/var/lib/worker.key")
    with Client("far", remote=far, timeout=PATIENCE_S) as client:
        assert client.add("key", delay=FAR_S).ticket
    stats = json.loads(purgatoryd("stats", "--name", "far", "--json")[1])
    probed = json.loads(PROBED.read_text())
    assert (probed["realtime"], probed["lock"] in LOCKED) == (errno.EINVAL, True), probed
    limits = Path(f"/proc/{shown('MainPID', 'purgatoryd@far')}/limits").read_text()
    for part, limit in (("lock", "Max locked memory +unlimited"), ("realtime", REALTIME)):
        field = "placed" if re.search(limit, limits) else "clamped"
        assert part in stats[field], (stats, limits)
    systemctl("stop", "purgatoryd@far")


def the_unit_is_sound_and_little_exposed() -> None:
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "purgatoryd.service", "purgatoryd@web.service",
         "purgatoryd-metrics@web.service"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (found.returncode, "purgatoryd" in found.stderr) == (0, False), found.stderr
    for unit in ("purgatoryd.service", "purgatoryd-metrics@web.service"):
        command = ["systemd-analyze", "security", f"--threshold={EXPOSURE_MAX}", unit]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (unit, done.stdout[-200:])


ENDPOINT = "http://127.0.0.1:9464/metrics"


def scraped() -> dict[str, float]:
    """Scrape the endpoint. Return the value of each sample, by name{labels}."""
    with urllib.request.urlopen(ENDPOINT, timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {sample: float(value) for sample, value in samples}


def reported(sample: str) -> float | None:
    """Return the value of a sample; None while the endpoint does not answer or lacks the sample."""
    try:
        return scraped()[sample]
    except (OSError, KeyError):
        return None


def the_endpoint_tells_whether_the_daemon_is_up() -> None:
    systemctl("start", "purgatoryd@web", "purgatoryd-metrics@web")
    eventually(lambda: reported('purgatoryd_up{daemon="web"}') == 1)
    with Client("web", timeout=PATIENCE_S) as client:
        client.add("far", delay=FAR_S)
    assert reported('purgatoryd_adds_total{daemon="web"}') == 1
    assert reported('purgatoryd_state{daemon="web",state="ready"}') == 1
    systemctl("stop", "purgatoryd@web")
    assert reported('purgatoryd_up{daemon="web"}') == 0
    assert reported('purgatoryd_state{daemon="web",state="stopped"}') == 1
    assert reported('purgatoryd_adds_total{daemon="web"}') == 1
    assert shown("ActiveState", "purgatoryd-metrics@web") == "active"
    assert shown("User", "purgatoryd-metrics@web") == "purgatoryd"
    systemctl("start", "purgatoryd-metrics@other", check=False)  # "web" uses the address
    eventually(lambda: shown("ActiveState", "purgatoryd-metrics@other") == "failed")
    assert shown("ExecMainStatus", "purgatoryd-metrics@other") == "7"
    assert shown("NRestarts", "purgatoryd-metrics@other") == "0"
    systemctl("stop", "purgatoryd-metrics@web")
    assert shown("Result", "purgatoryd-metrics@web") == "success"


def settings_that_are_refused_are_not_tried_again() -> None:
    settings = Path("/etc/purgatoryd/web.toml")
    good = settings.read_text()
    settings.write_text("capacity = 0\n")
    systemctl("start", "purgatoryd@web", check=False)
    eventually(lambda: shown("ActiveState", "purgatoryd@web") == "failed")
    assert shown("NRestarts", "purgatoryd@web") == "0"
    assert "must be from 1" in journald_text("-u", "purgatoryd@web", "-p", "err")
    settings.write_text(good)


def a_stopped_daemon_stays_so_until_the_next_start() -> None:
    ticket = ticket_of("far")
    systemctl("stop", "purgatoryd")
    assert (shown("ActiveState"), shown("Result")) == ("inactive", "success")
    assert purgatoryd("status")[0] == 3
    systemctl("start", "purgatoryd")
    assert ticket_of("far") == ticket
    purgatoryd("stop", "--drain", "--timeout", "100ms")
    eventually(lambda: shown("ActiveState") == "inactive")


def a_unit_with_a_wal_has_its_timers_also_without_shared_memory() -> None:
    unit = "purgatoryd@web"
    with Path("/etc/purgatoryd/web.toml").open("a") as settings:
        settings.write(f'wal-dir = "{STATE}"\n')
    systemctl("start", unit)
    with Client("web", durable=True, timeout=PATIENCE_S) as client:
        ticket = client.add("kept", delay=FAR_S).ticket
    systemctl("restart", unit)
    assert ticket_of("kept", "web") == ticket
    pid = main_pid(unit)
    forget_memory_of("web")
    os.kill(pid, signal.SIGKILL)
    another(pid, unit)
    assert ticket_of("kept", "web") == ticket
    assert shown("StatusText", unit) == "ready"
    systemctl("stop", unit)


def forget_memory_of(name: str) -> None:
    """Remove the arena files of daemons whose name begins with `name`, as a reboot does."""
    found = [*Path("/dev/shm").glob(f"purgatoryd.{name}*")]
    assert found
    for path in found:
        path.unlink()


# ---- shards ----------------------------------------------------------------------------------


def a_unit_of_shards_is_started_when_all_are_ready() -> None:
    settings = f"""
        shards = 2
        wal-dir = "{STATE}"
        log-level = "info"
        capacity = 1000
        payload-memory = "1M"
    """
    Path("/etc/purgatoryd/many.toml").write_text(settings)
    systemctl("start", MANY)
    assert shown("StatusText", MANY) == "ready"
    code, reported = purgatoryd("status", "--name", "many")
    assert code == 0, reported
    begins = [line.partition(",")[0] for line in reported.splitlines()]
    assert begins == ["many: ready", "many-1-0: ready", "many-1-1: ready"]
    for shard in (0, 1):
        with Client("many", namespace=name_in(shard), timeout=PATIENCE_S) as client:
            client.add("far", delay=FAR_S)


def table() -> ShardTable:
    found = read_table(HOST_DIRECTORY, "many")
    assert found is not None
    return found


def name_in(shard: int) -> str:
    """Return a namespace name that belongs to this shard."""
    return next(name for n in range(99) if table().place(name := f"n{n}").shards == (shard,))


def shard_pid(shard: int) -> int:
    reader = Reader.attach(paths_in(HOST_DIRECTORY, table().daemon(shard)))
    try:
        return int(reader.header.daemon_pid)
    finally:
        reader.close()


def has_far(shard: int) -> bool:
    with Client("many", namespace=name_in(shard), timeout=PATIENCE_S) as client:
        return client.get("far") is not None


def fires_meanwhile(shard: int) -> None:
    """Arm a timer in this shard, and wait until it fires."""
    name = name_in(shard)
    with Subscriber("many", namespace=name) as notices, Client("many", namespace=name) as client:
        client.add("near", delay=0.2)
        notice = notices.get(timeout=PATIENCE_S)
    assert notice is not None
    assert notice.key == "near"


def unit_of_shards() -> tuple[str, str]:
    return shown("MainPID", MANY), shown("NRestarts", MANY)


def a_killed_shard_comes_back_and_its_unit_does_not_notice() -> None:
    unit, pids = unit_of_shards(), (shard_pid(0), shard_pid(1))
    with (HOST_DIRECTORY / "many-1-0.lock").open() as lock:
        os.kill(pids[0], signal.SIGKILL)
        fcntl.flock(lock, fcntl.LOCK_EX)  # the lock prevents the next start
        fires_meanwhile(1)
        eventually(lambda: shown("StatusText", MANY).startswith("degraded: many-1-0 has ended"))
        assert purgatoryd("status", "--name", "many")[0] == 1
    eventually(lambda: shown("StatusText", MANY) == "ready")
    assert has_far(0)
    assert (shard_pid(0) != pids[0], shard_pid(1)) == (True, pids[1])
    assert unit_of_shards() == unit


def a_shard_that_hangs_is_started_again_and_its_unit_does_not_notice() -> None:
    unit, pids = unit_of_shards(), (shard_pid(0), shard_pid(1))
    os.kill(pids[1], signal.SIGSTOP)
    fires_meanwhile(0)
    eventually(lambda: shown("StatusText", MANY) == "degraded: many-1-1 does not answer")
    eventually(lambda: shown("StatusText", MANY) == "ready")
    assert has_far(1)
    assert (shard_pid(0), shard_pid(1) != pids[1]) == (pids[0], True)
    assert unit_of_shards() == unit


def a_reload_of_shards_is_for_each() -> None:
    with Path("/etc/purgatoryd/many.toml").open("a") as settings:
        settings.write("quota-timers = 77\n")
    unit = unit_of_shards()
    systemctl("reload", MANY)
    names = table().daemons
    eventually(lambda: [header("quota_timers", name) for name in names] == [77, 77])
    eventually(lambda: shown("ActiveState", MANY) == "active")
    assert unit_of_shards() == unit


def shards_are_seen_by_the_page_for_people() -> None:
    path = "/run/page"
    page = subprocess.Popen(
        ["/opt/bin/purgatoryd", "web", "--name", "many-1-1", "--socket", path],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert page.stdout is not None
    said = page.stdout.readline()
    assert "listening" in said, said + page.stdout.read()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(b"GET /view.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200 OK"), answer
    assert b'"ready"' in answer
    page.terminate()
    assert page.wait(PATIENCE_S) == 0


def a_deployment_that_hangs_is_killed_by_the_watchdog_and_keeps_its_timers() -> None:
    pid = int(shown("MainPID", MANY))
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: int(shown("NRestarts", MANY)) > 0 and shown("StatusText", MANY) == "ready")
    assert int(shown("MainPID", MANY)) != pid
    assert has_far(0)
    assert has_far(1)


def shards_stop_and_start_with_their_unit() -> None:
    systemctl("stop", MANY)
    assert (shown("ActiveState", MANY), shown("Result", MANY)) == ("inactive", "success")
    assert purgatoryd("status", "--name", "many")[0] == 3
    systemctl("start", MANY)
    assert has_far(0)
    assert has_far(1)


def another_number_of_shards_is_ready_once_it_has_all_timers() -> None:
    names = name_in(0), name_in(1)
    tickets = [ticket_of("far", "many", name) for name in names]
    assert all(tickets)
    drop_in(MANY, "[Service]\nEnvironment=PURGATORYD_SHARDS=3\n")
    systemctl("restart", MANY)
    assert table().daemons == ["many-2-0", "many-2-1", "many-2-2"]
    assert [ticket_of("far", "many", name) for name in names] == tickets
    pid = main_pid(MANY)
    forget_memory_of("many-2-")
    os.kill(pid, signal.SIGKILL)
    another(pid, MANY)
    assert [ticket_of("far", "many", name) for name in names] == tickets
    assert purgatoryd("status", "--name", "many")[0] == 0
    systemctl("stop", MANY)


def shards_that_are_refused_are_not_tried_again() -> None:
    spoil(paths_in(HOST_DIRECTORY, table().daemon(1)))
    systemctl("start", MANY, check=False)
    eventually(lambda: shown("ActiveState", MANY) == "failed")
    assert (shown("ExecMainStatus", MANY), shown("NRestarts", MANY)) == ("5", "0")


STEPS = (
    a_start_returns_when_the_daemon_is_ready,
    a_killed_daemon_is_started_again_with_its_timers,
    a_daemon_that_hangs_is_killed_by_the_watchdog,
    a_reload_takes_quotas_over_and_tells_journald,
    a_second_daemon_of_the_name_is_refused,
    a_daemon_of_another_name_comes_and_goes_next_to_it,
    who_is_in_the_group_is_a_client_and_nobody_else,
    the_sandbox_allows_what_a_daemon_needs,
    drop_ins_of_the_docs_open_what_they_say,
    the_unit_is_sound_and_little_exposed,
    the_endpoint_tells_whether_the_daemon_is_up,
    settings_that_are_refused_are_not_tried_again,
    a_stopped_daemon_stays_so_until_the_next_start,
    a_unit_with_a_wal_has_its_timers_also_without_shared_memory,
    a_unit_of_shards_is_started_when_all_are_ready,
    a_killed_shard_comes_back_and_its_unit_does_not_notice,
    a_shard_that_hangs_is_started_again_and_its_unit_does_not_notice,
    a_reload_of_shards_is_for_each,
    shards_are_seen_by_the_page_for_people,
    a_deployment_that_hangs_is_killed_by_the_watchdog_and_keeps_its_timers,
    shards_stop_and_start_with_their_unit,
    another_number_of_shards_is_ready_once_it_has_all_timers,
    shards_that_are_refused_are_not_tried_again,
)


def outcome(step: Callable[[], None]) -> str | None:
    try:
        step()
    except BaseException:
        return traceback.format_exc() + journald_text()
    return None


def main(results: str) -> None:
    found = {step.__name__: outcome(step) for step in STEPS}
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    probe() if sys.argv[1] == "probe" else main(sys.argv[1])
