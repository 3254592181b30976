"""The C client of examples/c, written from docs/protocol.md, while the daemon is killed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machine import needs
from real_daemon import PATIENCE_S, Daemon, StartDaemon, eventually, stats

from purgatoryd.clients import Client
from purgatoryd.shm_layout.layout import size_of

pytestmark = pytest.mark.tier("all")

SOURCES = Path(__file__).resolve().parent.parent / "examples" / "c"
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror",
         "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")  # fmt: skip
ADDED, CANCELLED, FIRED, UNKNOWN = 1, 6, 7, 8


@pytest.fixture(scope="module")
def demo_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("libzmq")
    program = tmp_path_factory.mktemp("c") / "demo"
    sources = map(str, SOURCES.glob("*.c"))
    command = [os.environ.get("CC", "cc"), *FLAGS, *sources, "-lzmq", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


@contextmanager
def running(program: Path, log: Path, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program with its output in `log`. At the end it is killed if it still runs."""
    with log.open("wb") as output:
        process = subprocess.Popen([program, *args], stdin=subprocess.DEVNULL, stdout=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def lines(log: Path) -> list[list[str]]:
    """Return the words of each complete line."""
    return [line.split() for line in log.read_text().split("\n")[:-1]]


def crash(demo: Daemon) -> None:
    """Kill the daemon, and start it on the arena that it left."""
    demo.kill()
    demo.start()


def notices(log: Path) -> list[list[str]]:
    return [words for words in lines(log) if words[0] == "notice"]


def canaries(log: Path, name: str) -> list[str]:
    """Arm timers until the listener has printed the notice of one of them. Return their keys."""
    sent: list[str] = []

    def seen() -> bool:
        with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
            sent.append(f"{name}:{len(sent)}")
            client.add(sent[-1], 0, topic="orders")
        return any(words[4].startswith(name) for words in notices(log))

    eventually(seen)
    return sent


@pytest.mark.tier("check")
def test_its_structs_have_the_sizes_of_the_protocol() -> None:
    sources = "".join(one.read_text() for one in sorted(SOURCES.glob("*.c")))
    found = re.findall(r'sizeof\(struct \w+\) == (\d+), "(\w+)"', sources)
    assert {name: int(size) for size, name in found} == {name: size_of(name) for _, name in found}
    assert len(found) >= 7


@pytest.mark.costly("runs two programs under sanitizers and kills a daemon six times")
def test_each_timer_fires_once_or_is_cancelled_while_the_daemon_is_killed(
    demo_program: Path, daemon: StartDaemon, tmp_path: Path
) -> None:
    demo = daemon("demo", "--capacity", "20000")
    place, printed, done = str(demo.dir / "demo"), tmp_path / "listen.txt", tmp_path / "work.txt"
    with running(demo_program, printed, "listen", place) as listener:
        sent = canaries(printed, "first")
        with running(demo_program, done, "work", place, str(10**7)) as worker:
            for _ in range(6):
                before = len(lines(done))
                eventually(lambda: len(lines(done)) > before + 500)  # noqa: B023
                crash(demo)
            worker.terminate()
            assert worker.wait(PATIENCE_S) == 0
        eventually(lambda: stats(demo)["live"] == 0)
        sent += canaries(printed, "last")
        assert listener.poll() is None
    answers = {words[0]: tuple(map(int, words[1:])) for words in lines(done)}
    assert len(answers) > 3000
    assert {put for _, put, _ in answers.values()} == {ADDED}
    assert len({ticket for ticket, _, _ in answers.values()}) == len(answers)
    assert {cancel for _, _, cancel in answers.values()} <= {0, CANCELLED, FIRED, UNKNOWN}

    came = notices(printed)
    keys = [words[4] for words in came]
    received = [int(words[1]) for words in came]
    lost = [range(int(w[1]), int(w[2]) + 1) for w in lines(printed) if w[0] == "lost"]
    every = sorted([*received, *(one for span in lost for one in span)])
    assert every == list(
        range(received[0], received[-1] + 1)
    )  # each came once, or is named as lost
    assert len(keys) == len(set(keys))
    assert all(int(words[3]) >= 0 for words in came)  # none is early
    assert not [words for words in lines(printed) if words[0] == "new"]

    orders = [words for words in came if words[4] in answers]
    assert all(int(words[2]) == answers[words[4]][0] for words in orders)
    assert {" ".join(words[5:]) for words in orders} == {"pay up"}
    cancelled = {key for key, (_, _, cancel) in answers.items() if cancel == CANCELLED}
    assert cancelled
    assert not cancelled & set(keys)
    first, last = sent.index(keys[0]), sent.index(keys[-1])
    fired = (answers.keys() - cancelled) | set(sent[first : last + 1])
    assert len(fired - set(keys)) == sum(map(len, lost))


def test_a_refused_message_is_an_error(
    demo_program: Path, daemon: StartDaemon, tmp_path: Path
) -> None:
    demo = daemon("demo", "--clock", "virtual")
    args = [str(demo_program), "work", str(demo.dir / "demo"), "1"]
    run = subprocess.run(args, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "demo: the daemon has a virtual clock\n"


def test_refused_records_have_their_status(
    demo_program: Path, daemon: StartDaemon, tmp_path: Path
) -> None:
    demo = daemon("demo", "--capacity", "100")
    args = [str(demo_program), "work", str(demo.dir / "demo"), "3"]
    with Client("demo", namespace="shop") as client:
        client.add("order:1", 3600)
    run = subprocess.run(args, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    statuses = [line.split()[2] for line in run.stdout.splitlines()]
    assert statuses == ["1", "5", "1"]  # order:1 EXISTS
