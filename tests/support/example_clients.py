"""Checks of the clients in examples/, whose processes and whose daemon are killed.

A client is a program with three commands: `work` arms and cancels timers, `listen` prints notices,
`consume` takes jobs. Each prints a line for each event; examples/c/demo.c describes the lines.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from real_daemon import PATIENCE_S, Daemon, eventually, stats

from purgatoryd.clients import Admin, Client

ADDED, CANCELLED, FIRED, UNKNOWN = 1, 6, 7, 8
NEVER_NS = 2**63


class Running:
    """A running program whose output goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        self.killed_ns = NEVER_NS
        """Time of CLOCK_MONOTONIC just before the kill."""
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output)

    def lines(self) -> list[list[str]]:
        """Return the words of each complete line that the program has printed."""
        return [line.split() for line in self.log.read_text().split("\n")[:-1]]

    def kill(self) -> None:
        """Kill the program, which must still run."""
        assert self.process.poll() is None, self.log
        self.killed_ns = time.monotonic_ns()
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def terminate(self) -> None:
        """Send SIGTERM. The program must end with exit code 0."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0, self.log


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[Running]:
    """Run a program with its output in `log`. At the end it is killed if it still runs."""
    program = Running(command, log)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.wait()


def crash(demo: Daemon) -> None:
    """Kill the daemon, and start it on the arena that it left."""
    demo.kill()
    demo.start()


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program until its end, and capture its output."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
    )


# ---- timers and notices --------------------------------------------------------------------------


def _notices(listener: Running) -> list[list[str]]:
    return [words for words in listener.lines() if words[0] == "notice"]


def _canaries(listener: Running, name: str) -> list[str]:
    """Arm timers until the listener has printed the notice of one of them. Return their keys."""
    sent: list[str] = []

    def seen() -> bool:
        with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
            sent.append(f"{name}:{len(sent)}")
            client.add(sent[-1], 0, topic="orders")
        return any(words[4].startswith(name) for words in _notices(listener))

    eventually(seen)
    return sent


def check_timers(command: Sequence[str], demo: Daemon, folder: Path) -> None:
    """Kill the daemon six times while a program arms and cancels timers, and another one prints
    the notices. Each timer must be cancelled or fire once, and each lost notice must be named."""
    place = str(demo.dir / "demo")
    with running([*command, "listen", place], folder / "listen.txt") as listener:
        sent = _canaries(listener, "first")
        with running([*command, "work", place, str(10**7)], folder / "work.txt") as worker:
            for _ in range(6):
                before = len(worker.lines())
                eventually(lambda: len(worker.lines()) > before + 500)  # noqa: B023
                crash(demo)
            worker.terminate()
        eventually(lambda: stats(demo)["live"] == 0)
        sent += _canaries(listener, "last")
        assert listener.process.poll() is None
    answers = _check_answers(worker)
    _check_sequence(listener)
    _check_notices(_notices(listener), answers, sent, listener)


def _check_answers(worker: Running) -> dict[str, tuple[int, ...]]:
    """Check the answers that `work` printed. Return ticket and both statuses of each key."""
    answers = {words[0]: tuple(map(int, words[1:])) for words in worker.lines()}
    assert len(answers) > 3000
    assert {put for _, put, _ in answers.values()} == {ADDED}
    assert len({ticket for ticket, _, _ in answers.values()}) == len(answers)
    assert {cancel for _, _, cancel in answers.values()} <= {0, CANCELLED, FIRED, UNKNOWN}
    return answers


def _lost(listener: Running) -> list[range]:
    return [range(int(w[1]), int(w[2]) + 1) for w in listener.lines() if w[0] == "lost"]


def _check_sequence(listener: Running) -> None:
    """Check that each sequence came once, or is named as lost, and that no notice is early."""
    came = _notices(listener)
    received = [int(words[1]) for words in came]
    every = sorted([*received, *itertools.chain.from_iterable(_lost(listener))])
    assert every == list(range(received[0], received[-1] + 1))
    assert all(int(words[3]) >= 0 for words in came)
    assert not [words for words in listener.lines() if words[0] == "new"]


def _check_notices(
    came: list[list[str]],
    answers: dict[str, tuple[int, ...]],
    sent: list[str],
    listener: Running,
) -> None:
    """Check that the notices are those of the timers that were not cancelled. `sent`: keys of other
    timers of the topic."""
    keys = [words[4] for words in came]
    assert len(keys) == len(set(keys))
    orders = [words for words in came if words[4] in answers]
    assert all(int(words[2]) == answers[words[4]][0] for words in orders)
    assert {" ".join(words[5:]) for words in orders} == {"pay up"}
    cancelled = {key for key, (_, _, cancel) in answers.items() if cancel == CANCELLED}
    assert cancelled
    assert not cancelled & set(keys)
    first, last = sent.index(keys[0]), sent.index(keys[-1])
    fired = (answers.keys() - cancelled) | set(sent[first : last + 1])
    assert len(fired - set(keys)) == sum(map(len, _lost(listener)))


# ---- jobs ----------------------------------------------------------------------------------------


class Consumers:
    """The programs that take jobs of the consumer group `mailers`."""

    def __init__(self, command: Sequence[str], demo: Daemon, folder: Path) -> None:
        self._command = [*command, "consume", str(demo.dir / "demo")]
        self._folder = folder
        self.all: list[Running] = []

    def begin(self) -> Running:
        """Start a program, and wait until it is a member."""
        number = len(self.all)
        program = Running(self._command, self._folder / f"consume{number}.txt")
        self.all.append(program)
        eventually(lambda: program.lines() or program.process.poll() is not None)
        assert program.lines() == [["ready"]] or len(program.lines()) > 1, program.log
        return program

    def end(self) -> None:
        """Kill all programs that still run."""
        for program in self.all:
            program.process.kill()
            program.process.wait()


def check_jobs(command: Sequence[str], demo: Daemon, folder: Path, kills: int) -> None:
    """Kill consumers and the daemon under load. No job may be lost, each must be acknowledged once,
    and no two live processes may have the same attempt."""
    consumers, rng, tickets = Consumers(command, demo, folder), random.Random(kills), set()
    try:
        with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
            client.create_group(
                "mailers", ["orders"], backoff=0, max_attempts=1000, max_backlog=16_000
            )
            alive = [consumers.begin() for _ in range(3)]
            for number in range(kills):
                rows = [
                    (f"k{number}:{n}", rng.random() * 0.2, "orders", b"pay up") for n in range(200)
                ]
                added = client.add_many(rows)
                assert added.ok
                tickets |= set(added.tickets)
                time.sleep(rng.random() * 0.1)
                if number % 4 == 3:
                    crash(demo)
                else:
                    alive.pop(rng.randrange(3)).kill()
                    alive.append(consumers.begin())
            eventually(lambda: client.group("mailers").acked >= len(tickets), 4 * PATIENCE_S)
            for program in alive:
                program.terminate()
            info = client.group("mailers")
        assert (info.acked, info.waiting, info.leased, info.delayed, info.dead, info.members) == (
            200 * kills, 0, 0, 0, 0, 0
        )  # fmt: skip
    finally:
        consumers.end()
    assert len(tickets) == 200 * kills
    _check_runs(consumers.all, tickets)


def check_stop(command: Sequence[str], demo: Daemon, folder: Path) -> None:
    """Send SIGTERM to a consumer that holds jobs. It must leave without failed attempts."""
    consumers = Consumers(command, demo, folder)
    try:
        with Client("demo", namespace="shop", timeout=PATIENCE_S) as client:
            client.create_group("mailers", ["orders"])
            program = consumers.begin()
            client.add_many([(f"k{n}", 0.0, "orders", b"pay up") for n in range(4000)])
            eventually(lambda: client.group("mailers").acked > 50)
            program.terminate()
            info = client.group("mailers")
        assert (info.leased, info.retried, info.delayed, info.members) == (0, 0, 0, 0)
        assert info.acked + info.waiting == 4000
        assert info.waiting > 0
    finally:
        consumers.end()


def check_lost_session(command: Sequence[str], demo: Daemon, folder: Path) -> None:
    """End the session of a consumer that holds jobs. The consumer must join in another session, and
    take all jobs."""
    consumers = Consumers(command, demo, folder)
    try:
        with (
            Client("demo", namespace="shop", timeout=PATIENCE_S) as client,
            Admin("demo") as admin,
        ):
            client.create_group("mailers", ["orders"], backoff=0)
            program = consumers.begin()
            client.add_many([(f"k{n}", 0.0, "orders", b"pay up") for n in range(1000)])
            eventually(lambda: client.group("mailers").acked > 50)
            [session] = [one for one in admin.sessions() if one.pid == program.process.pid]
            admin.drop_session(session.session)
            eventually(lambda: client.group("mailers").acked == 1000)
            info = client.group("mailers")
            program.terminate()
        assert (info.dead, info.waiting, info.leased, info.delayed) == (0, 0, 0, 0)
        assert info.retried > 0
    finally:
        consumers.end()
    started = [words[1] for words in program.lines()[1:] if words[0] == "start"]
    assert len(set(started)) == 1000
    acked = [words[1] for words in program.lines()[1:] if words[0] == "acked"]
    assert len(acked) == len(set(acked))


def _check_runs(programs: list[Running], tickets: set[int]) -> None:
    """Check that each job ran, that an acknowledged job did not run again, and that only the end of
    a process is followed by another attempt."""
    runs: dict[int, list[tuple[int, int, Running]]] = defaultdict(list)
    acked: dict[int, int] = {}
    for program in programs:
        for event, ticket, attempt, at_ns, *rest in program.lines()[1:]:
            if event == "start":
                assert rest[1:] == ["pay", "up"]
                runs[int(ticket)].append((int(attempt), int(at_ns), program))
            else:
                assert event == "acked"
                assert int(ticket) not in acked, f"job {ticket} was acknowledged twice"
                acked[int(ticket)] = int(attempt)
    assert runs.keys() == tickets
    for job, found in runs.items():
        found.sort(key=lambda one: one[1])
        assert acked.get(job, found[-1][0]) == found[-1][0], f"job {job} ran after its ack"
        for (first, _, program), (later, at, _) in itertools.pairwise(found):
            assert later > first, f"job {job} ran twice in attempt {first}"
            assert program.killed_ns < at, f"job {job} ran in two live processes"
        if job not in acked:  # the kill came before the line
            assert found[-1][2].killed_ns < NEVER_NS
