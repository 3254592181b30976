"""The commands consume, groups and dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import BASE, answer, cli
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually

from purgatoryd.cli.exits import Exit
from purgatoryd.clients import AllOf, Client, Consumer, Purgatory

pytestmark = pytest.mark.tier("test")


def add(key: str, payload: bytes = b"") -> None:
    with Client("demo", timeout=PATIENCE_S) as client:
        client.add(key, 0, topic="orders", payload=payload)


def create(demo: Daemon) -> None:
    assert cli(demo, "groups", "create", "mailers", "--topic", "orders").returncode == Exit.DONE


def test_a_consumer_group_is_created_changed_paused_and_deleted(daemon: StartDaemon) -> None:
    demo = daemon("demo")
    arguments = ("--topic", "orders", "--backoff", "2s", "--max-attempts", "3", "--ordered")
    made = answer(demo, "groups", "create", "mailers", *arguments)
    assert (made["group"], made["topics"], made["paused"]) == ("mailers", ["orders"], False)
    assert (made["backoff_ns"], made["max_attempts"], made["ordered"]) == (2 * 10**9, 3, True)
    changed = answer(demo, "groups", "change", "mailers", "--max-attempts", "4")
    assert (changed["backoff_ns"], changed["max_attempts"]) == (2 * 10**9, 4)
    assert changed["ordered"]
    assert answer(demo, "groups", "pause", "mailers")["result"] == "PAUSED"
    assert answer(demo, "groups", "describe", "mailers")["paused"]
    assert answer(demo, "groups", "resume", "mailers")["result"] == "RESUMED"
    add("k")
    table = cli(demo, "groups", "ls").stdout
    assert "mailers" in table
    assert "oldest_s" in table
    lines = cli(demo, "groups", "describe", "mailers").stdout
    assert "retention     none" in lines
    many = cli(demo, "groups", "create", "many", "--topic", "orders", "--max-backlog", "1000000")
    assert "--jobs" in many.stderr
    assert "backoff       2s" in lines
    asked = cli(demo, "groups", "delete", "mailers", stdin="y\n")
    assert (asked.returncode, "`groups delete` needs --yes" in asked.stderr) == (Exit.USAGE, True)
    asked = cli(demo, "dead", "drop", "mailers", "--all", stdin="y\n")
    assert (asked.returncode, "`dead drop` needs --yes" in asked.stderr) == (Exit.USAGE, True)
    for command in (("groups", "delete", "mailers"), ("timers", "purge")):
        code, question = at_terminal(demo, "n\n", *command)
        assert (code, "[y/N]" in question, "Abort" in question) == (Exit.NEGATIVE, True, False)
    assert answer(demo, "groups", "describe", "mailers")["group"] == "mailers"
    assert answer(demo, "groups", "delete", "mailers", "--yes")["result"] == "DELETED"
    assert cli(demo, "groups", "ls").stdout == ""
    assert cli(demo, "groups", "describe", "mailers").returncode == Exit.REFUSED


def at_terminal(demo: Daemon, typed: str, *args: str) -> tuple[int, str]:
    """Run a command at a terminal where a user types something. Return its exit code, and the
    question that it asked."""
    user, terminal = os.openpty()
    try:
        os.write(user, typed.encode())
        done = subprocess.run(
            [*BASE, *args, "--name", "demo"], env=demo.env, stdin=terminal, text=True,
            capture_output=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr
    finally:
        os.close(user)
        os.close(terminal)


def test_jobs_are_printed_and_acknowledged(daemon: StartDaemon) -> None:
    demo = daemon("demo")
    create(demo)
    for key in "abc":
        add(key, b"pay")
    done = cli(demo, "consume", "mailers", "--count", "3", "--json")
    assert done.returncode == Exit.DONE, done.stderr
    jobs = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(job["key"] for job in jobs) == ["a", "b", "c"]
    assert {(job["topic"], job["payload"], job["attempt"]) for job in jobs} == {
        ("orders", "pay", 1)
    }
    assert {(job["cause"], job["verdict"], job["missed"]) for job in jobs} == {("EXPIRED", None, 0)}
    add("d", b"text")
    assert "orders attempt 1 expired d (" in cli(demo, "consume", "mailers", "--count", "1").stdout
    assert cli(demo, "consume", "mailers", "--idle", "50ms").returncode == Exit.NEGATIVE
    bare = cli(demo, "consume", "mailers", "--idle", "0.05")
    assert (bare.returncode, "unit" in bare.stderr) == (Exit.USAGE, True)
    found = answer(demo, "groups", "describe", "mailers")
    assert (found["acked"], found["waiting"], found["leased"]) == (4, 0, 0)


def test_a_command_runs_for_each_job(daemon: StartDaemon, tmp_path: Path) -> None:
    demo, out = daemon("demo"), tmp_path / "out"
    add("early")
    command = (
        '(echo "$PURGATORYD_KEY $PURGATORYD_TOPIC $PURGATORYD_ATTEMPT $PURGATORYD_CAUSE $(cat)"'
        f" >> {out});"
        'if [ "$PURGATORYD_KEY" = bad ]; then echo "no space" >&2; exit 3; fi'
    )
    create(demo)
    assert cli(demo, "groups", "change", "mailers", "--max-attempts", "1").returncode == Exit.DONE
    add("good", b"one")
    add("bad", b"two")
    done = cli(demo, "consume", "mailers", "--exec", command, "--count", "2", "--concurrency", "2")
    assert done.returncode == Exit.DONE, done.stderr
    assert sorted(out.read_text().splitlines()) == [
        "bad orders 1 expired two", "good orders 1 expired one",
    ]  # fmt: skip
    letter = answer(demo, "dead", "ls", "mailers")
    assert (letter["key"], letter["reason"], letter["error"]) == ("bad", "max_attempts", "no space")
    assert (letter["attempts"], letter["payload"]) == (1, "two")
    assert (letter["cause"], letter["verdict"]) == ("EXPIRED", None)


def test_the_verdict_of_an_operation_is_printed(daemon: StartDaemon) -> None:
    demo = daemon("demo")
    create(demo)
    with Purgatory("demo") as operations:
        operations.watch("op", AllOf({"w": 1}), 3600, topic="orders", payload=b"pay").cancel()
    run = ("consume", "mailers", "--count", "1")
    printed = json.loads(cli(demo, *run, "--json").stdout)
    assert (printed["cause"], printed["payload"]) == ("CANCELLED", "pay")
    assert printed["verdict"]["missing"] == [0]


def test_sigterm_waits_for_running_commands(daemon: StartDaemon, tmp_path: Path) -> None:
    demo, began, goes_on = daemon("demo"), tmp_path / "began", tmp_path / "goes-on"
    create(demo)
    for key in "abc":
        add(key)
    command = f"touch {began}; while [ ! -e {goes_on} ]; do sleep 0.01; done"
    process = subprocess.Popen(
        [*BASE, "consume", "mailers", "--name", "demo", "--exec", command], env=demo.env,
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        eventually(began.exists)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: waiting(demo) == 2)
        assert process.poll() is None
        goes_on.touch()
        assert process.wait(PATIENCE_S) == Exit.DONE
    finally:
        process.kill()
        process.communicate()
    found = answer(demo, "groups", "describe", "mailers")
    assert (found["acked"], found["waiting"], found["retried"]) == (1, 2, 0)


def waiting(demo: Daemon) -> int:
    return int(answer(demo, "groups", "describe", "mailers")["waiting"])


def test_consume_creates_a_missing_consumer_group_only_with_topics(daemon: StartDaemon) -> None:
    demo = daemon("demo")
    assert cli(demo, "consume", "mailers", "--idle", "0s").returncode == Exit.REFUSED
    arguments = ("consume", "mailers", "--topics", "orders", "--idle", "0s", "--max-dead", "7")
    assert cli(demo, *arguments).returncode == Exit.NEGATIVE
    assert answer(demo, "groups", "describe", "mailers")["max_dead"] == 7


def rejected(count: int) -> None:
    with Consumer("demo", group="mailers", topics=["orders"], timeout=PATIENCE_S) as jobs:
        for number in range(count):
            add(f"k{number}")
            job = jobs.get(PATIENCE_S)
            assert job is not None
            job.reject("bad address")


@pytest.mark.parametrize("action", ["requeue", "drop"])
def test_dead_letters_are_requeued_or_dropped(daemon: StartDaemon, action: str) -> None:
    demo = daemon("demo")
    create(demo)
    rejected(3)
    lines = cli(demo, "dead", "ls", "mailers").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["k0", "k1", "k2"]
    assert lines[0].endswith("orders rejected after 1 attempts: bad address")
    ticket = lines[0].split()[0]
    run = confirmed(demo, action)
    assert run("mailers", ticket) == Exit.DONE
    assert run("mailers", ticket) == Exit.NEGATIVE
    assert run("mailers") == Exit.USAGE
    assert run("mailers", "--all") == Exit.DONE
    assert cli(demo, "dead", "ls", "mailers").stdout == ""
    found = answer(demo, "groups", "describe", "mailers")
    assert found["waiting"] == (3 if action == "requeue" else 0)


def confirmed(demo: Daemon, action: str) -> Callable[..., int]:
    """Return a function that runs a command for dead letters, without a question."""
    yes = ["--yes"] if action == "drop" else []
    return lambda *arguments: cli(demo, "dead", action, *arguments, *yes).returncode


def test_drop_asks_first(daemon: StartDaemon) -> None:
    demo = daemon("demo")
    create(demo)
    rejected(1)
    code, question = at_terminal(demo, "n\n", "dead", "drop", "mailers", "--all")
    assert code == Exit.NEGATIVE
    assert "Drop 1 dead letters of consumer group 'mailers'?" in question
    assert at_terminal(demo, "y\n", "dead", "drop", "mailers", "--all")[0] == Exit.DONE
    assert cli(demo, "dead", "ls", "mailers").stdout == ""
