"""The command line with a real daemon, as a shell sees it: text, JSON, exit codes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from command_line import BASE, answer, cli
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually

from purgatoryd.cli.app import app
from purgatoryd.cli.arena import print_table, sections
from purgatoryd.cli.exits import (
    MEANING,
    Exit,
    errors_as_exit_codes,
    exit_of,
)
from purgatoryd.cli.options import visible
from purgatoryd.shm_layout import errors
from purgatoryd.shm_layout.files import write_durably
from purgatoryd.shm_layout.layout import EVENTS_TOPIC

pytestmark = pytest.mark.tier("check")

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture
def demo(daemon: StartDaemon) -> Daemon:
    return daemon("demo", "--capacity", "1000")


class Listener:
    """`purgatoryd listen` in the background. After construction it is subscribed."""

    def __init__(self, daemon: Daemon, *args: str) -> None:
        self.process = subprocess.Popen(
            [*BASE, "listen", "--name", daemon.name, "--json", *args],
            env=daemon.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        assert self.process.stderr.readline() == "listening\n"

    def result(self) -> tuple[list[dict[str, Any]], int]:
        """Return (printed notices, exit code)."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return [json.loads(line) for line in out.splitlines()], self.process.returncode


@pytest.mark.tier("test")
def test_a_timer_from_add_to_notice(demo: Daemon) -> None:
    listener = Listener(demo, "--topic", "orders", "--count", "1")
    added = answer(
        demo, "add", "order:42", "--delay", "1ms", "--topic", "orders", "--payload", "hé"
    )
    notices, code = listener.result()
    assert code == Exit.DONE
    (notice,) = notices
    assert (notice["key"], notice["payload"], notice["topic"]) == ("order:42", "hé", "orders")
    assert (notice["ticket"], notice["seq"]) == (added["ticket"], 1)
    assert notice["fired_boot_ns"] >= notice["deadline_boot_ns"] == added["deadline_boot_ns"]


@pytest.mark.tier("all")
def test_add_get_cancel(demo: Daemon) -> None:
    added = answer(demo, "add", "k", "--deadline", "2199-01-01T00:00:00Z", "-n", "shop")
    assert added["status"] == "ADDED"
    found = answer(demo, "get", "k", "-n", "shop")
    for record in (added, found):
        assert record["due_at"].startswith(("2198-12-31T23:59:59", "2199-01-01T00:00:00"))
    assert (found["ticket"], found["namespace"]) == (added["ticket"], "shop")
    assert answer(demo, "get", "k", code=Exit.NEGATIVE)["status"] == "UNKNOWN"
    assert answer(demo, "cancel", "k", "-n", "shop")["result"] == "CANCELLED"
    assert answer(demo, "cancel", "k", "-n", "shop", code=Exit.NEGATIVE)["result"] == "UNKNOWN"


@pytest.mark.tier("all")
def test_a_late_cancel_reports_fired(demo: Daemon) -> None:
    listener = Listener(demo, "--count", "1")
    cli(demo, "add", "k", "--delay", "0s")
    assert listener.result()[1] == Exit.DONE
    assert answer(demo, "cancel", "k", code=Exit.NEGATIVE)["result"] == "FIRED"


@pytest.mark.tier("all")
def test_cancel_of_several_keys_answers_each(demo: Daemon) -> None:
    cli(demo, "add", "a", "--delay", "1h")
    done = cli(demo, "cancel", "a", "b")
    assert done.stdout == "cancelled a\nunknown b\n"
    assert done.returncode == Exit.NEGATIVE


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("kind", "key"), [("hex", "00ff"), ("uuid", "12345678-1234-5678-1234-567812345678")]
)
def test_keys_that_are_no_text(kind: str, key: str, demo: Daemon) -> None:
    added = answer(demo, "add", key, "--delay", "1h", "--key-type", kind)
    assert (added["key"], added["key_type"]) == (key, kind)
    assert answer(demo, "get", key, code=Exit.NEGATIVE)
    assert answer(demo, "list")["key_type"] == kind
    assert answer(demo, "cancel", key, "--key-type", kind)["result"] == "CANCELLED"


@pytest.mark.tier("all")
def test_payload_from_stdin(demo: Daemon) -> None:
    done = cli(demo, "add", "k", "--delay", "1h", "--payload-file", "-", stdin="from a pipe")
    assert done.returncode == Exit.DONE, done.stderr
    assert answer(demo, "get", "k")["payload"] == "from a pipe"


@pytest.mark.tier("all")
def test_list_filters(demo: Daemon) -> None:
    for key in ("order:1", "order:2", "mail:1"):
        cli(demo, "add", key, "--delay", "1h", "-n", "shop")
    done = cli(demo, "list", "--prefix", "order:", "--json")
    assert {json.loads(line)["key"] for line in done.stdout.splitlines()} == {"order:1", "order:2"}
    assert len(cli(demo, "list", "--limit", "2").stdout.splitlines()) == 2
    assert cli(demo, "list", "-n", "elsewhere").stdout == ""


@pytest.mark.tier("all")
def test_stats_count_what_happened(demo: Daemon) -> None:
    cli(demo, "add", "k", "--delay", "1h", "--topic", "t")
    figures = answer(demo, "stats")
    assert (figures["live"], figures["adds"], figures["capacity"]) == (1, 1, 1000)
    assert figures["daemon_pid"] == demo.pid
    cli(demo, "topic", "set", "t", "--within", "5ms")
    lines = cli(demo, "stats", "--topics", "--json").stdout.splitlines()
    topics = [(topic["topic"], topic["within_ns"]) for topic in map(json.loads, lines)]
    assert topics == [(EVENTS_TOPIC, 0), ("t", 5_000_000)]
    shown = cli(demo, "stats").stdout
    assert shown.index("timers") < shown.index("live") < shown.index("purgatory")


@pytest.mark.tier("all")
@pytest.mark.parametrize("wal", [False, True])
def test_each_figure_of_the_stats_has_a_section(
    daemon: StartDaemon, tmp_path: Path, wal: bool
) -> None:
    real = daemon("demo", *(("--wal-dir", str(tmp_path)) if wal else ()))
    assert dict(sections(answer(real, "stats"))).get("more", []) == []


@pytest.mark.tier("all")
def test_refusals_keep_their_figures(demo: Daemon) -> None:
    cli(demo, "add", "k", "--delay", "1h")
    done = cli(demo, "add", "k", "--delay", "1h", "--json")
    assert done.returncode == Exit.REFUSED
    assert json.loads(done.stderr)["error"] == "Exists"
    assert answer(demo, "add", "k", "--delay", "2h", "--mode", "replace")["status"] == "REPLACED"


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["add", "k"], "Give either --delay or --deadline"),
        (["add", "k", "--delay", "1h", "-p", "x", "--payload-file", "-"], "--payload-file"),
        (["add", "k", "--delay", "1h", "--payload", "x" * 65537], "65537 bytes"),
        (["add", "k" * 256, "--delay", "1h"], "256 bytes"),
        (["add", "zz", "--delay", "1h", "--key-type", "hex"], "is not a key of the type hex"),
        (["list", "--name", "No"], "daemon name 'No'"),
    ],
)
def test_usage_errors_say_the_bound(args: list[str], said: str, demo: Daemon) -> None:
    done = subprocess.run(
        [*BASE, *args, *([] if "--name" in args else ["--name", demo.name])],
        env=demo.env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == Exit.USAGE
    assert said in done.stderr


@pytest.mark.tier("all")
def test_usage_errors_are_json_with_the_option_json(demo: Daemon) -> None:
    done = cli(demo, "add", "k", "--delay", "1h", "--colour", "red", "--json")
    assert done.returncode == Exit.USAGE
    assert json.loads(done.stderr)["error"] == "NoSuchOption"


@pytest.mark.tier("all")
def test_reading_commands_need_no_daemon(demo: Daemon) -> None:
    cli(demo, "add", "k", "--delay", "1h")
    demo.stop()
    assert answer(demo, "list")["key"] == "k"
    assert answer(demo, "stats")["live"] == 1
    assert answer(demo, "check") == {"check": "clean"}
    assert cli(demo, "get", "k", "--timeout", "100ms").returncode == Exit.NO_DAEMON


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "command",
    ["get k --timeout 100ms", "cancel k --timeout 100ms", "add k --delay 1s --timeout 100ms",
     "listen --timeout 100ms", "list", "stats", "check", "stop"],
)  # fmt: skip
def test_no_daemon_has_its_exit_code(command: str, daemon_dir: Path) -> None:
    words = [*command.split(), "--name", "nobody"]
    done = subprocess.run([*BASE, *words], capture_output=True, text=True)
    assert done.returncode == Exit.NO_DAEMON
    assert str(daemon_dir) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.tier("all")
def test_stop_returns_when_the_process_has_ended(demo: Daemon) -> None:
    assert answer(demo, "stop") == {"stopped": "demo", "pid": demo.pid, "armed": 0}
    assert demo.process.wait(0) == 0
    assert cli(demo, "stop").returncode == Exit.NO_DAEMON


@pytest.mark.tier("test")
def test_stop_that_drains_waits_for_what_is_armed(demo: Daemon) -> None:
    cli(demo, "add", "k", "--delay", "300ms")
    assert answer(demo, "stop", "--drain", "--timeout", "30s")["armed"] == 0
    demo.start()
    assert answer(demo, "stats")["expiries"] == 1


@pytest.mark.tier("all")
def test_stop_that_could_not_drain_in_time_keeps_the_rest(demo: Daemon) -> None:
    cli(demo, "add", "k", "--delay", "1h")
    done = cli(demo, "stop", "--drain", "--timeout", "100ms", "--json")
    assert (done.returncode, json.loads(done.stdout)["armed"]) == (Exit.NEGATIVE, 1)
    assert demo.process.wait(0) == 0
    demo.start()
    assert answer(demo, "list")["key"] == "k"


def draining(demo: Daemon) -> subprocess.Popen[bytes]:
    """Start a command that waits for the daemon to drain; return once the daemon refuses adds."""
    cli(demo, "add", "k", "--delay", "1h")
    waiting = subprocess.Popen(
        [*BASE, "stop", "--drain", "--timeout", "1h", "--name", demo.name],
        env=demo.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    eventually(lambda: cli(demo, "add", "x", "--delay", "1h", "--mode", "replace").returncode)
    return waiting


@pytest.mark.tier("all")
def test_a_drain_that_is_interrupted_is_given_up(demo: Daemon) -> None:
    waiting = draining(demo)
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(PATIENCE_S) == Exit.INTERRUPTED
    assert cli(demo, "add", "y", "--delay", "1h").returncode == Exit.DONE


@pytest.mark.tier("all")
def test_a_drain_whose_command_is_gone_is_given_up_on_demand(demo: Daemon) -> None:
    waiting = draining(demo)
    waiting.kill()
    waiting.wait(PATIENCE_S)
    assert cli(demo, "add", "y", "--delay", "1h").returncode == Exit.REFUSED
    assert answer(demo, "stop", "--resume") == {"resumed": "demo"}
    assert cli(demo, "add", "y", "--delay", "1h").returncode == Exit.DONE
    assert demo.running


@pytest.mark.tier("all")
def test_stop_of_a_killed_daemon_finds_none(demo: Daemon) -> None:
    demo.kill()
    assert cli(demo, "stop").returncode == Exit.NO_DAEMON


@pytest.mark.tier("all")
def test_second_daemon_of_a_name_is_refused(demo: Daemon) -> None:
    done = cli(demo, "run")
    assert done.returncode == Exit.UNUSABLE
    assert f"process {demo.pid}" in done.stderr


@pytest.mark.tier("all")
def test_listen_ends_on_silence_and_on_interrupt(demo: Daemon) -> None:
    assert Listener(demo, "--idle", "50ms").result() == ([], Exit.NEGATIVE)
    listener = Listener(demo)
    os.kill(listener.process.pid, signal.SIGINT)
    assert listener.result() == ([], Exit.INTERRUPTED)


@pytest.mark.tier("all")
def test_socket_path_too_long_is_one_sentence(tmp_path: Path) -> None:
    env = os.environ | {"PURGATORYD_DIR": str(tmp_path / ("d" * 100))}
    done = subprocess.run([*BASE, "run"], env=env, capture_output=True, text=True)
    assert done.returncode == Exit.UNUSABLE
    assert "AF_UNIX allows 107" in done.stderr
    assert done.stderr.count("\n") == 1


NOT_FOR_SHORT_COMMANDS = {
    "asyncio", "base64", "concurrent.futures", "decimal", "hashlib", "logging",
    "multiprocessing", "numpy", "prometheus_client", "psutil", "py4j", "pyarrow", "pyspark",
    "rich", "starlette", "subprocess", "uvicorn", "zmq", "purgatoryd.cli.purgatory",
    "purgatoryd.cli.service", "purgatoryd.cli.settings", "purgatoryd.clients.aio",
    "purgatoryd.clients.bulk_loads", "purgatoryd.clients.conditions",
    "purgatoryd.clients.ledger", "purgatoryd.clients.local",
    "purgatoryd.clients.operations", "purgatoryd.clients.purgatory",
    "purgatoryd.clients.remote", "purgatoryd.clients.resume",
    "purgatoryd.clients.subscriber", "purgatoryd.daemon", "purgatoryd.pipeline",
    "purgatoryd.shm_layout.arena", "purgatoryd.shm_layout.curve",
    "purgatoryd.shm_layout.topology",
}  # fmt: skip
"""Modules that add, cancel and get must not import, because each would make them slower."""
NOT_FOR_HELP = {"zmq", "cffi", "numpy", "rich", "psutil", "purgatoryd.shm_layout._core"}
IMPORTED = """
import sys
from purgatoryd.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def imported(environment: dict[str, str], *arguments: str) -> set[str]:
    """Return all modules that a command imports."""
    words = [sys.executable, "-c", IMPORTED, *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == Exit.DONE, done.stderr
    return set(done.stderr.split())


@pytest.mark.tier("test")
def test_short_commands_import_only_what_they_need(demo: Daemon) -> None:
    for command in (("add", "k", "--delay", "1h"), ("get", "k"), ("cancel", "k")):
        modules = imported(demo.env, *command, "--name", demo.name)
        assert "purgatoryd.clients.client" in modules
        assert modules.isdisjoint(NOT_FOR_SHORT_COMMANDS), command


@pytest.mark.tier("all")
def test_help_imports_no_client() -> None:
    assert imported(dict(os.environ), "--help").isdisjoint(NOT_FOR_HELP)


def helps(command: click.Command, title: str) -> Iterator[tuple[str, str]]:
    """Yield (title, help text at 80 columns) of a command and of all its subcommands."""
    with click.Context(command, info_name=title, terminal_width=80) as context:
        yield title, command.get_help(context)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None
                yield from helps(below, name)


def test_every_command_has_h_and_help() -> None:
    for title, text in helps(app, "purgatoryd"):
        assert "-h, --help" in text, title


def test_help_fits_into_80_columns_and_cuts_no_summary() -> None:
    for title, text in helps(app, "purgatoryd"):
        assert max(map(len, text.splitlines())) <= 80, title
        summaries = text.partition("\nCommands:\n")[2]
        assert "..." not in summaries, title


def test_every_error_has_an_exit_code_and_every_code_a_meaning() -> None:
    assert set(MEANING) == set(Exit)
    assert exit_of(errors.BadPath("/x", "is a file")) == Exit.UNUSABLE
    assert exit_of(errors.Full("k", 16, "slots")) == Exit.REFUSED
    assert exit_of(errors.PurgatorydError()) == Exit.OTHER


def test_a_shard_that_cannot_start_decides_the_exit_code() -> None:
    codes = [exit_of(errors.ShardFailed("demo-1-0", code)) for code in (2, 5, 0, 1, -9, 255)]
    assert codes == [Exit.USAGE, Exit.BROKEN] + 4 * [Exit.UNUSABLE]


def test_a_refusal_by_the_machine_is_reported_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(click.exceptions.Exit) as ended, errors_as_exit_codes(as_json=False):
        write_durably(tmp_path / "x.new", full)
    assert ended.value.exit_code == Exit.UNUSABLE
    assert f"{tmp_path / 'x.new'}: No space left on device" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError), errors_as_exit_codes(as_json=False):
        (tmp_path / "gone").read_bytes()


def test_an_argument_that_is_no_text_is_reported_without_traceback(daemon_dir: Path) -> None:
    lake = daemon_dir / "file"
    lake.touch()
    cancel = ("pipeline", "cold", "cancel", "k", "--lake", str(daemon_dir), "-n", "\udcff")
    ship = ("pipeline", "ship", "--wal-dir", str(daemon_dir), "--lake", str(lake / "x"))
    for arguments, code in ((cancel, Exit.USAGE), (ship, Exit.UNUSABLE)):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == code, done.output
        assert len(done.stderr.splitlines()) == 1


def test_control_characters_never_reach_the_terminal() -> None:
    assert visible("a\nb\x1b[31m café") == "a\\nb\\x1b[31m café"


@pytest.mark.tier("all")
def test_namespaces_are_set_and_listed(demo: Daemon) -> None:
    reported = answer(
        demo, "namespace", "set", "shop", "--owner", "1001", "--quota-bytes", "4K",
        "--durability", "memory",
    )  # fmt: skip
    assert reported == {
        "namespace": "shop", "owner_uid": 1001, "durability": "memory", "quota_timers": 0,
        "quota_bytes": 4096, "quota_ops": 0, "park_beyond_ns": 0, "late_per_s": 0, "paused": False,
    }  # fmt: skip
    assert answer(demo, "namespace", "ls") == reported | {"timers": 0, "bytes": 0}
    assert answer(demo, "namespace", "set", "shop", "--owner", "anybody")["owner_uid"] is None
    answer(demo, "namespace", "set", "shop", "--late-per-second", "5000")
    listed = cli(demo, "namespace", "ls").stdout
    assert "shop" in listed
    assert "5,000" in listed
    cli(demo, "add", "k", "--delay", "1h", "-n", "shop", "--payload", "x" * 20)
    assert answer(demo, "namespace", "ls")["bytes"] == 32


@pytest.mark.tier("all")
def test_stats_tell_what_each_uid_has(daemon: StartDaemon) -> None:
    real = daemon("demo", "--quota-timers", "5")
    cli(real, "add", "k", "--delay", "1h", "--payload", "x" * 20)
    held = {"topics": 2, "namespaces": 2, "sessions": 0, "watch_keys": 0, "watches": 0}
    held |= {"operations": 0, "bulk_loads": 0, "bulk_load_blocks": 0}
    # the daemon's own namespace and topic count for the uid of the daemon
    of_uid = {"uid": os.getuid(), "live": 1, "blob_bytes": 32}
    assert answer(real, "stats")["uids"] == [of_uid | held]
    assert "uids" in cli(real, "stats").stdout


@pytest.mark.tier("all")
def test_owners_and_quotas_refuse_calls(demo: Daemon) -> None:
    cli(demo, "namespace", "set", "shop", "--owner", "1001")
    cli(demo, "namespace", "set", "small", "--quota-timers", "1")
    add = ("add", "k", "--delay", "1h", "-n")
    denied = [("get", "k", "-n", "shop"), ("cancel", "k", "-n", "shop"), (*add, "shop")]
    for command in denied:
        done = cli(demo, *command, "--json")
        assert done.returncode == Exit.REFUSED
        assert json.loads(done.stderr)["error"] == "Denied"
    cli(demo, *add, "small")
    done = cli(demo, "add", "l", "--delay", "1h", "-n", "small", "--json")
    assert done.returncode == Exit.REFUSED
    reported = json.loads(done.stderr)
    assert (reported["error"], reported["limit"], reported["used"]) == ("QuotaExceeded", 1, 1)


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "arguments",
    [("--owner", "nobody"), ("--owner", "-1"), ("--quota-ops", "1000000001"),
     ("--quota-bytes", "1X"), ("--durability", "paper")],
)  # fmt: skip
def test_settings_out_of_bounds_are_usage_errors(demo: Daemon, arguments: tuple[str, ...]) -> None:
    done = cli(demo, "namespace", "set", "shop", *arguments)
    assert done.returncode == Exit.USAGE
    assert cli(demo, "namespace", "ls").stdout == ""


WIDE = [{f"field_{n}": f"value {row}-{n}" * 3 for n in range(12)} for row in range(2)]


def test_a_table_is_whole_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(WIDE, "wide")
    reported = capsys.readouterr().out
    assert all(value in reported for row in WIDE for value in row.values())
    assert len(reported.splitlines()) == 7  # title, header, two rows, and the lines of the frame


def test_a_table_that_does_not_fit_is_reported_row_by_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("COLUMNS", "80"), ("FORCE_COLOR", "1"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    print_table(WIDE, "wide")
    lines = capsys.readouterr().out.splitlines()
    for field, value in WIDE[1].items():
        assert f"{field:<8}  {value}" in lines
    print_table([{"a": 1}], "narrow")
    assert "│ 1 │" in capsys.readouterr().out


# ---- the purgatory -------------------------------------------------------------------------------


@contextmanager
def watching(demo: Daemon, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Run `purgatoryd watch`. The block starts once the daemon has armed the operation of the
    command."""
    command = [*BASE, "watch", *args, "--within", "1h", "--json", "--name", demo.name]
    with subprocess.Popen(command, env=demo.env, stdout=subprocess.PIPE, text=True) as process:
        eventually(lambda: cli(demo, "get", args[0], "--json").returncode == 0)
        yield process


@pytest.mark.tier("test")
def test_an_operation_from_the_command_line(demo: Daemon) -> None:
    with watching(demo, "write", "r-1=40", "r-2=40", "r-3=40", "--need", "2") as process:
        assert answer(demo, "fail", "r-1", "7") == {"key": "r-1", "ended": 0}
        assert answer(demo, "advance", "r-2", "40") == {"key": "r-2", "ended": 0}
        assert answer(demo, "advance", "r-3", "--by", "41") == {"key": "r-3", "ended": 1}
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == Exit.DONE
    outcome = json.loads(out)
    assert (outcome["cause"], outcome["missing"], outcome["error"]) == ("satisfied", ["r-1"], 0)
    assert outcome["failed"] == ["r-1"]
    assert [(k["key"], k["watermark"]) for k in outcome["watermarks"]] == [
        ("r-1", 0), ("r-2", 40), ("r-3", 41),
    ]  # fmt: skip


@pytest.mark.tier("all")
def test_condition_and_owner_of_an_operation_are_shown(demo: Daemon) -> None:
    with watching(demo, "write", "r-1=40", "r-2=40", "--need", "1") as process:
        cli(demo, "advance", "r-1", "7")
        cli(demo, "fail", "r-2", "9")
        listed = answer(demo, "list")
        operation = listed["operation"]
        assert (operation["condition"], operation["threshold"]) == ("QUORUM", 1)
        keys = [(k["key"], k["watermark"], k["target"], k["error"]) for k in operation["keys"]]
        assert keys == [("r-1", 7, 40, 0), ("r-2", 0, 40, 9)]
        assert answer(demo, "get", "write")["operation"] == operation
        owner = operation["owner"]
        assert answer(demo, "session", "ls")["session"] == owner
        assert " ago, 20" in cli(demo, "session", "ls").stdout
        assert operation["owner_uid"] == os.getuid()
        owner += f" (uid {os.getuid()})"
        assert f"1 of 2 keys, owner {owner}" in cli(demo, "list").stdout
        lines = [line.split(maxsplit=1) for line in cli(demo, "get", "write").stdout.splitlines()]
        assert ["condition", "1 of 2 keys"] in lines
        assert ["owner", owner] in lines
        assert ["key", "2             r-2 at 0, needs 40, failed with 9"] in lines
        cli(demo, "cancel", "write")
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.tier("test")
def test_watch_says_how_it_ended_by_its_exit_code(demo: Daemon) -> None:
    with watching(demo, "write", "k") as process:
        assert cli(demo, "fail", "k", "9").stdout == "ended 1\n"
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == Exit.NEGATIVE
    assert (json.loads(out)["cause"], json.loads(out)["error"]) == ("failed", 9)
    expired = cli(demo, "watch", "late", "never", "--within", "1ms")
    assert expired.returncode == Exit.NEGATIVE
    assert expired.stdout.startswith("expired late after ")
    assert expired.stdout.endswith("missing: never\n")
    failed = cli(demo, "watch", "lost", "k", "--within", "1h")
    assert failed.stdout.endswith("error 9, missing: k, failed: k\n")


@pytest.mark.tier("all")
def test_watermarks_are_listed_until_they_are_forgotten(demo: Daemon) -> None:
    long = "long" * 20
    for key in ("short", long):
        cli(demo, "advance", key, "5")
    cli(demo, "fail", "short", "7", "-n", "other")
    cli(demo, "fail", long, "8")
    found = [json.loads(line) for line in cli(demo, "watermarks", "--json").stdout.splitlines()]
    common = {"watched": False, "forgotten": False}
    assert sorted(found, key=str) == sorted(
        [
            {"key": "short", "namespace": "default", "watermark": 5, "error": 0, **common},
            {"key": "short", "namespace": "other", "watermark": 0, "error": 7, **common},
            {"key": long, "namespace": "default", "watermark": 5, "error": 8, **common},
        ],
        key=str,
    )
    failed = answer(demo, "watermarks", "--failed", "-n", "default", "--prefix", "l")
    assert failed["error"] == 8
    assert "failed with 7" in cli(demo, "watermarks", "-n", "other").stdout
    assert answer(demo, "clear", long)["result"] == "CLEARED"
    assert answer(demo, "clear", "nobody", code=Exit.NEGATIVE)["result"] == "UNKNOWN"
    assert not cli(demo, "watermarks", "--failed", "-n", "default").stdout
    assert answer(demo, "clear", "short", "-n", "other", "--forget")["result"] == "CLEARED"
    assert not cli(demo, "watermarks", "-n", "other").stdout


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "args",
    [
        ("watch", "x", "k=many"),
        ("watch", "x", "k", "k=2"),
        ("watch", "x", "k", "--need", "2"),
        ("watch", "x"),
        ("advance", "k"),
        ("advance", "k", "1", "--by", "1"),
        ("advance", "k", "9223372036854775808"),
        ("fail", "k", "0"),
        ("clear",),
    ],
)
def test_purgatory_commands_refuse_bad_input(demo: Daemon, args: tuple[str, ...]) -> None:
    assert cli(demo, *args).returncode == Exit.USAGE
    assert not cli(demo, "watermarks").stdout
