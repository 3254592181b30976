"""The C client of examples/c, written from docs/protocol.md, while processes are killed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import example_clients
import pytest
from cffi import FFI
from machine import needs
from real_daemon import PATIENCE_S, StartDaemon, eventually

from purgatoryd.clients import Cause, Client, JobReason, Purgatory, Quorum
from purgatoryd.clients.groups import DEFAULTS
from purgatoryd.shm_layout import layout
from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import Status

pytestmark = pytest.mark.tier("all")

SOURCES = Path(__file__).resolve().parent.parent / "examples" / "c"
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror",
         "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")  # fmt: skip
OWN = {"PG_IN_DOUBT", "PG_NO_ANSWER", "PG_FAILED", "PG_SILENCE", "PG_NOTICE", "PG_LOST",
       "PG_NEW_STREAM"}  # fmt: skip
"""Numbers of the client that the protocol does not have."""


@pytest.fixture(scope="module")
def demo_command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    needs("libzmq")
    program = tmp_path_factory.mktemp("c") / "demo"
    sources = map(str, SOURCES.glob("*.c"))
    command = [os.environ.get("CC", "cc"), *FLAGS, *sources, "-lzmq", "-o", str(program)]
    subprocess.run(command, check=True)
    return [str(program)]


def sources() -> str:
    return "".join(one.read_text() for one in sorted(SOURCES.glob("*.[ch]")))


@pytest.mark.tier("check")
def test_its_structs_are_those_of_the_layout() -> None:
    text = sources()
    asserted = re.findall(r'sizeof\(struct (\w+)\) == (\d+), "(\w+)"', text)
    assert len(asserted) >= 12
    c = FFI()
    for name, size, wanted in asserted:
        [body] = re.findall(rf"^struct {name} (\{{.*?^\}};)", text, re.M | re.S)
        c.cdef(f"struct {name} {body}")
        found = c.typeof(f"struct {name}")
        assert c.sizeof(f"struct {name}") == int(size) == layout.size_of(wanted)
        offsets = {field: offset for field, offset, _ in layout.fields(wanted)}
        for field, place in found.fields:
            assert field.startswith("pad") or offsets[field] == place.offset, f"{name}.{field}"


def numbers() -> Iterator[tuple[str, int]]:
    """Yield name and number of each constant of the enums. An enum counts on by itself."""
    text = re.sub(r"/\*.*?\*/", "", sources(), flags=re.S)
    for body in re.findall(r"enum \w* ?\{([^}]*)\}", text):
        value = -1
        for constant in filter(None, map(str.strip, body.split(","))):
            name, _, given = constant.partition(" = ")
            value = int(given) if given else value + 1
            yield name, value


@pytest.mark.tier("check")
def test_its_numbers_are_those_of_the_layout() -> None:
    prefixes = ("PG_", "PG_M_", "PG_OP_", "PG_GA_", "PG_ST_")
    found = list(numbers())
    assert len(found) >= 45
    for name, value in found:
        known = [f"{prefix}{name.removeprefix('PG_')}" for prefix in prefixes]
        there = [getattr(lib, one) for one in known if hasattr(lib, one)]
        assert value in there or name in OWN, f"{name} = {value}"


@pytest.mark.costly("runs two programs under sanitizers and kills a daemon six times")
def test_each_timer_fires_once_or_is_cancelled_while_the_daemon_is_killed(
    demo_command: list[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    example_clients.check_timers(demo_command, daemon("demo", "--capacity", "20000"), tmp_path)


@pytest.mark.costly("starts twelve programs, and kills them and a daemon twelve times")
def test_kills_of_consumers_and_daemon_lose_no_job(
    demo_command: list[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    example_clients.check_jobs(demo_command, daemon("demo"), tmp_path, 12)


def test_a_consumer_ends_after_sigterm_without_failed_attempts(
    demo_command: list[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    example_clients.check_stop(demo_command, daemon("demo"), tmp_path)


def test_a_consumer_whose_session_ended_joins_again(
    demo_command: list[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    example_clients.check_lost_session(demo_command, daemon("demo"), tmp_path)


def test_jobs_are_answered(demo_command: list[str], daemon: StartDaemon) -> None:
    """A failed job waits for its backoff, a released job comes again, a rejected one is dead. The
    client creates the consumer group."""
    demo = daemon("demo")
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        client.create_group("mailers", ["orders"], backoff=0)
        timer = client.add("k", 0, topic="orders", payload=b"p")
        done = example_clients.run([*demo_command, "dead", str(demo.dir / "demo")])
        assert (done.returncode, done.stderr) == (0, "")
        status = int(Status.DONE)
        assert done.stdout == f"1 0 {status}\n2 0 {status}\n2 0 {status}\n"
        [letter] = client.dead_letters("mailers")
        info = client.group("mailers")
    assert (letter.ticket, letter.reason) == (timer.ticket, JobReason.REJECTED)
    assert (letter.error, letter.attempts) == ("no address", 2)
    assert (info.members, info.leased, info.retried) == (0, 0, 1)


def test_it_creates_a_missing_group(
    demo_command: list[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    demo = daemon("demo")
    command = [*demo_command, "consume", str(demo.dir / "demo")]
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        with example_clients.running(command, tmp_path / "out.txt") as program:
            eventually(lambda: program.lines() == [["ready"]])
            client.add("k", 0, topic="orders", payload=b"pay up")
            eventually(lambda: client.group("mailers").acked == 1)
            program.terminate()
        info = client.group("mailers")
    assert (info.topics, info.members) == (("orders",), 0)
    assert info.settings == DEFAULTS


def test_a_timer_has_its_options(demo_command: list[str], daemon: StartDaemon) -> None:
    """The order key of the C client has the hash of the other clients."""
    demo = daemon("demo")
    order_key = "a customer whose key has more bytes than a block of the hash function has"
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        client.add("other", 3600, topic="orders", order_key=order_key)
        command = [*demo_command, "options", str(demo.dir / "demo")]
        for status in (Status.ADDED, Status.EXISTS):
            done = example_clients.run(command)
            assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{int(status)}\n")
        timer, other = client.get("order:1"), client.get("other")
    assert timer is not None
    assert other is not None
    assert (timer.tag, timer.priority) == ("customer of the north", 7)
    assert (timer.late, timer.payload) == (("skip", 0.5), b"pay up")
    assert timer.order_key == other.order_key is not None


def test_jobs_have_verdict_and_occurrence(demo_command: list[str], daemon: StartDaemon) -> None:
    """A job of an operation has its verdict, and that of an occurrence has its nominal time."""
    demo = daemon("demo")
    with Purgatory("demo", namespace="shop", timeout=PATIENCE_S) as owner:
        owner.create_group("mailers", ["orders"])
        owner.add("k", 0, topic="orders", payload=b"timer")
        condition = Quorum(["a", "b", "c"], need=2)
        for key in ("first", "second"):
            owner.watch(key, condition, timeout=3600, topic="orders", payload=key.encode())
        owner.advance("b", 1)
        owner.cancel("first")
        owner.fail("a", 7)
        owner.fail("c", 9)
        owner.put_schedule("daily", cron="0 0 * * *", topic="orders", payload=b"report")
        owner.trigger_schedule("daily", datetime(2026, 1, 1, tzinfo=UTC))
        command = [*demo_command, "ends", str(demo.dir / "demo"), "4"]
        done = example_clients.run(command)
        assert owner.group("mailers").acked == 4
    assert (done.returncode, done.stderr) == (0, "")
    nominal_ns = 1_767_225_600 * 10**9
    assert sorted(done.stdout.splitlines()) == [
        f"daily@{nominal_ns} {int(Cause.EXPIRED)} report occurrence daily {nominal_ns}",
        f"first {int(Cause.CANCELLED)} first verdict 0 3 5",
        f"k {int(Cause.EXPIRED)} timer",
        f"second {int(Cause.FAILED)} second verdict 7 3 5",
    ]


def test_a_longer_lease_of_the_group_holds_at_once(
    demo_command: list[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    """The client takes the end of a lease from the daemon's answer. After max_lease was raised, it
    holds a job for longer than the earlier limit."""
    demo = daemon("demo")
    command = [*demo_command, "hold", str(demo.dir / "demo"), "4000"]
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        client.create_group("mailers", ["orders"], max_lease=2)
        client.add("k", 0, topic="orders")
        with example_clients.running(command, tmp_path / "out.txt") as program:
            eventually(lambda: program.lines() == [["held"]])
            client.change_group("mailers", max_lease=3600)
            assert program.process.wait(PATIENCE_S) == 0
        info = client.group("mailers")
    assert program.lines()[1:] == [["1", "0", str(int(Status.DONE))]]
    assert (info.acked, info.retried) == (1, 0)


def test_a_lease_ends_at_the_limit_of_the_group(
    demo_command: list[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    """The client releases a job without a handler before its lease ends, as no failed attempt."""
    demo = daemon("demo")
    command = [*demo_command, "hold", str(demo.dir / "demo"), "3000"]
    with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
        client.create_group("mailers", ["orders"], max_lease=1, backoff=3600)
        client.add_many([(f"k{n}", 0.0, "orders", b"") for n in range(2)])
        with example_clients.running(command, tmp_path / "out.txt") as program:
            assert program.process.wait(PATIENCE_S) == 0
        info = client.group("mailers")
    assert program.lines()[1:] == [["1", "1", str(int(Status.LEASE_LOST))]]
    assert (info.acked, info.retried, info.waiting) == (0, 1, 1)


def test_a_refused_message_is_an_error(demo_command: list[str], daemon: StartDaemon) -> None:
    demo = daemon("demo", "--clock", "virtual")
    run = example_clients.run([*demo_command, "work", str(demo.dir / "demo"), "1"])
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "demo: the daemon has a virtual clock\n"


def test_refused_records_have_their_status(demo_command: list[str], daemon: StartDaemon) -> None:
    demo = daemon("demo", "--capacity", "100")
    with Client("demo", namespace="shop") as client:
        client.add("order:1", 3600)
    run = example_clients.run([*demo_command, "work", str(demo.dir / "demo"), "3"])
    assert run.returncode == 0, run.stderr
    statuses = [line.split()[2] for line in run.stdout.splitlines()]
    assert statuses == ["1", "5", "1"]  # order:1 EXISTS
