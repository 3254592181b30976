"""Memory, files and space run out: the Nth call of every function fails, for every N.

The daemon continues, or ends with one clear sentence. Without memory or descriptors, libzmq aborts
the process (ABORTS) or crashes (CRASHES), and glibc ends it (GLIBC_ENDS). Even then the arena
contains all acknowledged changes. By default N takes the values 1, 2, 6, 18, 54 ...; with
CRASH_TEST=complete in the environment it takes all values.
"""

from __future__ import annotations

import errno
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import purgatory_driver as driver
import pytest
import raw_wire as raw
import zmq
from fault_driver import COMPLETE, EVERY, Fault, Victim, Walk, build_library, numbers
from machine import needs
from opened import opened
from raw_wire import Raw
from real_daemon import Daemon, notices, remove_arena_files
from tiers import wide

from purgatoryd.cli.arena import infos
from purgatoryd.cli.exits import Exit
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.main import system_failures
from purgatoryd.daemon.store import Opening
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import SystemFailure
from purgatoryd.shm_layout.layout import ArenaState, Message
from purgatoryd.shm_layout.paths import Paths

pytestmark = pytest.mark.tier("all")

SIZES = (
    "--capacity", "100", "--payload-memory", "64K", "--replay-buffer", "64", "--topics", "8",
    "--sessions", "4", "--watches", "64", "--watch-keys", "64",
)  # fmt: skip
CONFIG = Config(
    "demo", capacity=100, payload_bytes=65536, replay_capacity=64, topics=8, sessions=4,
    watches=64, watch_keys=64,
)  # fmt: skip
OTHER_SIZES = (*SIZES, "--capacity", "200")

OUTCOMES = int(Message.OUTCOMES)

FAULTS = [
    Fault("malloc", "ENOMEM"), Fault("calloc", "ENOMEM"), Fault("realloc", "ENOMEM"),
    Fault("mmap64", "ENOMEM"),
    Fault("posix_fallocate64", "ENOSPC"), Fault("posix_fallocate64", "EIO"),
    Fault("open64", "EMFILE"), Fault("shm_open", "EMFILE"), Fault("ftruncate64", "EIO"),
    Fault("rename", "EIO"), Fault("unlink", "EIO"), Fault("fchmod", "EPERM"),
    Fault("write", "ENOSPC"), Fault("pwrite64", "ENOSPC"),
    Fault("pipe2", "EMFILE"), Fault("eventfd", "EMFILE"), Fault("epoll_create1", "EMFILE"),
    Fault("epoll_ctl", "ENOMEM"), Fault("epoll_wait", "EINTR"), Fault("poll", "ENOMEM"),
    Fault("timerfd_create", "EMFILE"),
    Fault("timerfd_settime", "ECANCELED"), Fault("socket", "EMFILE"), Fault("bind", "ENOMEM"),
    Fault("listen", "EADDRINUSE"), Fault("accept4", "EMFILE"), Fault("send", "EAGAIN"),
    Fault("recv", "EAGAIN"), Fault("recv", "EIO"),
    Fault("pthread_create", "EAGAIN"),
]  # fmt: skip
KILLS = [Fault(c, "KILL") for c in ("rename", "unlink", "shm_open", "mmap64", "posix_fallocate64")]

# Exit code of glibc if a thread has no memory for its thread-local data.
GLIBC_ENDS = 127

AT_THE_START = {
    "mmap64", "posix_fallocate64", "shm_open", "ftruncate64", "rename", "fchmod", "pwrite64",
    "pipe2", "eventfd", "epoll_create1", "timerfd_create", "socket", "bind", "listen",
    "pthread_create",
}  # fmt: skip
"""Functions that a daemon without a WAL calls only until it is ready."""

AT_TIMES = {"calloc", "open64", "timerfd_settime"}
"""Functions that a working daemon need not call. For example, a busy daemon does not sleep."""

LATER = {"accept4", "send", "recv", "epoll_wait", "timerfd_settime"}
"""Functions that a daemon need not call if it is stopped as soon as it is ready."""

WAL_FAULTS = [
    Fault("openat", "EMFILE"), Fault("open64", "EMFILE"), Fault("fallocate", "ENOSPC"),
    Fault("pwrite", "ENOSPC"), Fault("pwrite", "EIO"), Fault("fdatasync", "EIO"),
    Fault("fsync", "EIO"), Fault("rename", "EIO"), Fault("renameat", "EIO"),
    Fault("unlink", "EIO"), Fault("write", "ENOSPC"), Fault("write", "EIO"),
    Fault("read", "EIO"), Fault("mmap64", "ENOMEM"), Fault("eventfd", "EMFILE"),
    Fault("pthread_create", "EAGAIN"), Fault("fdatasync", "KILL"), Fault("pwrite", "KILL"),
    Fault("rename", "KILL"), Fault("renameat", "KILL"), Fault("unlink", "KILL"),
    Fault("write", "KILL"),
]  # fmt: skip

IN_ANY_PROCESS = {"malloc": 499, "calloc": 199, "realloc": 199, "mmap64": 3, "open64": 41}
"""By function: one call in this many fails. $FAULT_EVERY replaces all of these numbers. In a
complete run each call fails."""
CRASHES_OF_CPYTHON = (-signal.SIGABRT, -signal.SIGSEGV)

# Functions for which libzmq asserts that the call succeeds.
ABORTS = {
    "malloc", "calloc", "realloc", "read", "write", "epoll_create1", "epoll_ctl", "poll",
    "pthread_create", "accept4",
}  # fmt: skip

# Functions whose failure libzmq does not check. With a long socket path, libzmq allocates memory to
# notify of a connection.
CRASHES = {"malloc"}


def each(faults: list[Fault], *sample: Fault) -> pytest.MarkDecorator:
    """Parametrize a test with faults; `make test` runs only the faults of the sample."""
    values = [fault if fault in sample else wide(fault) for fault in faults]
    return pytest.mark.parametrize("fault", values, ids=lambda f: f"{f.call}-{f.code}")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("cc", "to compile tests/fault/shim.c")
    return build_library("shim", tmp_path_factory.mktemp("shim"))


class Before:
    """The arena files of a killed daemon, and the tickets of its acknowledged timers."""

    def __init__(self, real: Daemon) -> None:
        self.directory, self.paths = real.dir, real.paths
        with Raw(real.paths.cmd) as client:
            client.hello()
            answer = client.batch(*(raw.put(b"%d" % i, payload=b"p" * 40) for i in range(30)))
            self.tickets = {ticket for _, ticket, _ in answer.results}
        real.kill()
        self._bytes = {n: path_of(n).read_bytes() for n in (real.paths.arena, real.paths.private)}
        self._calls: dict[tuple[tuple[str, ...], Path | None], Counter[str]] = {}
        self._victim: Victim | None = None
        self.tally: Counter[str] = Counter()

    def victims(
        self, fault: Fault, shim: Path, args: tuple[str, ...], after: Path | None
    ) -> Iterator[Victim]:
        """Yield a daemon for each N = 1, 2 ...: its Nth call of the function fails.

        First, yield a daemon without a fault, to count the calls.
        """
        if (args, after) not in self._calls:
            self.again()
            self._victim = victim = Victim(self.directory, args, shim, fault, 0, after)
            yield victim
            self._calls[args, after] = victim.calls
        for nth in numbers(self._calls[args, after][fault.call], COMPLETE):
            self.again()
            self._victim = victim = Victim(self.directory, args, shim, fault, nth, after)
            yield victim
            if not victim.hit:
                return
            self.tally[HOW.get(victim.process.returncode, "ended")] += 1

    @property
    def untouched(self) -> bool:
        """Return whether no daemon has started on the restored arena."""
        present = {name: path_of(name).read_bytes() for name in self._bytes}
        return present == self._bytes and not self.paths.lock.exists()

    def again(self) -> None:
        """Restore the arena for the next N. Remove the lock file: the next start creates it. End a
        daemon that a failed test has left running."""
        if self._victim is not None and self._victim.running:
            self._victim.process.kill()
            self._victim.process.wait()
        remove_arena_files(self.paths)
        self.paths.lock.unlink(missing_ok=True)
        for name, data in self._bytes.items():
            path_of(name).write_bytes(data)


def path_of(name: str) -> Path:
    return shm.MOUNT / name[1:]


HOW = {
    -11: "were crashed by CPython or libzmq",
    0: "went on", 5: "named a damaged WAL", 7: "ended with a sentence",
    -6: "were aborted by libzmq", -9: "were killed", 127: "were ended by glibc",
}  # fmt: skip


@pytest.fixture(scope="module")
def before(request: pytest.FixtureRequest) -> Iterator[Before]:
    directory = Path(tempfile.mkdtemp(prefix="purgatoryd-test-"))
    real = Daemon("demo", directory, SIZES)
    found = Before(real)
    yield found
    found.again()
    reported = ", ".join(f"{count} {how}" for how, count in found.tally.most_common())
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{found.tally.total()} daemons with a fault: {reported}")
    real.close()
    remove_arena_files(real.paths)
    shutil.rmtree(directory)


def ended_well(victim: Victim, fault: Fault, code: int) -> None:
    """Check that the daemon ended with the exit code and the message that its fault may cause."""
    said = victim.stderr
    if code == Exit.BROKEN:
        assert fault.call == "read", said
        assert re.fullmatch(r"purgatoryd: \S+/wal/\S+: cannot be read: .+\n", said), said
    elif code in (Exit.UNUSABLE, -signal.SIGTERM):  # SIGTERM came while the daemon was ending
        assert re.fullmatch(r"purgatoryd: .+\n", said.splitlines(keepends=True)[-1]), said
        assert "Traceback" not in said
    elif code == -signal.SIGABRT:
        assert fault.call in ABORTS, said
    elif code == -signal.SIGSEGV:
        assert fault.call in CRASHES, said
    elif code == GLIBC_ENDS:
        assert "cannot allocate memory for thread-local data" in said
    else:
        assert code == (-signal.SIGKILL if fault.code == "KILL" and victim.hit else 0), said


def recovered(paths: Paths, tickets: set[int]) -> None:
    """Open the arena as the next daemon does, and check that all acknowledged timers exist."""
    arena = opened(Opening(CONFIG, paths))
    arena.check()
    arena.set_state(ArenaState.READY)
    arena.close()
    assert tickets <= known(paths)
    assert len(list(shm.MOUNT.glob(f"{paths.arena[1:]}*"))) == 2


def known(paths: Paths) -> set[int]:
    """Return the tickets of all timers that are armed or in the replay buffer.

    The armed timers are read first, because a live daemon may fire them in between.
    """
    reader = Reader.attach(paths)
    try:
        armed = {info.ticket for info in infos(reader)}
        fired = [
            n for topic in reader.newest_sequences("raw") for n in notices(reader, "raw", topic)
        ]
        return armed | {n.ticket for n in fired}
    finally:
        reader.close()


@pytest.mark.tier("test")
def test_a_lock_without_memory_is_reported_without_traceback() -> None:
    with pytest.raises(SystemFailure) as caught, system_failures():
        raise RuntimeError("can't allocate read lock")
    assert caught.value.number == errno.ENOMEM
    with pytest.raises(RuntimeError), system_failures():
        raise RuntimeError("another")


@pytest.mark.tier("test")
def test_a_failed_call_keeps_its_number_and_its_file() -> None:
    with pytest.raises(SystemFailure) as caught, system_failures():
        raise OSError(errno.EMFILE, "Too many open files", "/dev/shm/demo")
    assert caught.value.number == errno.EMFILE
    assert "/dev/shm/demo" in str(caught.value)


# ---- the start ---------------------------------------------------------------------------------


@pytest.mark.tier("test")
@each(
    FAULTS + KILLS,
    Fault("mmap64", "ENOMEM"),
    Fault("posix_fallocate64", "ENOSPC"),
    Fault("rename", "KILL"),
)
def test_the_start(fault: Fault, before: Before, shim: Path) -> None:
    """Faults after the lock, at a start with other sizes: attach, rebuild, migration, sockets
    ..."""
    hits = 0
    for victim in before.victims(fault, shim, OTHER_SIZES, before.paths.lock):
        ended_well(victim, fault, victim.end())
        recovered(before.paths, before.tickets)
        hits += victim.hit
    assert hits > 0 or fault.call in LATER, "the function was never called"


@each([fault for fault in FAULTS if fault.call in IN_ANY_PROCESS])
def test_the_beginning_of_the_process(fault: Fault, before: Before, shim: Path) -> None:
    """Faults between the loader and the lock, before the daemon has changed anything.

    Most of these calls come from the interpreter, which may crash.
    """
    before.again()
    every = 1 if COMPLETE else EVERY or IN_ANY_PROCESS[fault.call]
    for end in Walk(before.directory, SIZES, shim, fault, every).ends():
        said = f"N = {end.nth}: {end.code}, {end.stderr}"
        if not before.untouched:
            assert end.code in (Exit.DONE, Exit.UNUSABLE, -signal.SIGABRT), said
            recovered(before.paths, before.tickets)
            before.again()
        else:
            assert end.code in {*Exit, *CRASHES_OF_CPYTHON} - {Exit.DONE}, said
        before.tally[HOW.get(end.code, "ended")] += 1


# ---- work and the stop -------------------------------------------------------------------------


@pytest.mark.tier("test")
@each([fault for fault in FAULTS if fault.call not in AT_THE_START], Fault("accept4", "EMFILE"))
def test_work_and_stop(fault: Fault, before: Before, shim: Path) -> None:
    """Faults between the ready line and the end of the process."""
    marker, hits = before.directory / "begin", 0
    for victim in before.victims(fault, shim, SIZES, marker):
        assert victim.ready, victim.stderr
        marker.touch()
        acknowledged = work(victim)
        ended_well(victim, fault, victim.end())
        recovered(before.paths, before.tickets | acknowledged)
        marker.unlink()
        hits += victim.hit
    assert hits > 0 or fault.call in AT_TIMES, "the function was never called"


@pytest.mark.tier("test")
@each(WAL_FAULTS, Fault("pwrite", "ENOSPC"), Fault("fdatasync", "EIO"))
def test_the_wal(fault: Fault, before: Before, shim: Path) -> None:
    """Faults between the lock and the end of the process, on an arena that had no WAL before."""
    folder = before.directory / "wal"
    settings, hits = (*SIZES, "--wal-dir", str(folder)), 0
    for victim in before.victims(fault, shim, settings, before.paths.lock):
        acknowledged = work(victim) if victim.ready else set()
        ended_well(victim, fault, victim.end())
        successor = Daemon("demo", before.directory, settings)
        try:
            assert before.tickets | acknowledged <= known(before.paths)
        finally:
            successor.close()
            shutil.rmtree(folder)
        hits += victim.hit
    assert hits > 0, "the function was never called"


def work(victim: Victim) -> set[int]:
    """Send batches to a daemon that may end at any time; return the acknowledged tickets."""
    tickets: set[int] = set()
    batches: list[list[tuple[bytes, bytes] | driver.Command]] = [
        [raw.put(b"far%d" % i, payload=b"x" * 100) for i in range(10)],
        [raw.put(b"now%d" % i, 0) for i in range(10)],
        [driver.watch(b"op", driver.ALL, [driver.Key(b"k", 1)], notice=True)],
        [driver.advance(b"k", 1), driver.cancel(b"never")],
        [raw.put(b"soon%d" % i, 20_000_000) for i in range(10)],
    ]
    with (
        Raw(victim.paths.cmd, patience_s=0.1) as client,
        Raw(victim.paths.pub, kind=zmq.SUB) as sub,
    ):
        sub.socket.subscribe(b"")
        opened = ask(victim, client, raw.frame(raw.HELLO) + b"n" * 16 + bytes(16))
        for sequence, records in enumerate(batches, 1):
            if opened is None:
                break
            request = raw.batch(opened.session, sequence, [(r[0], r[1]) for r in records])
            answer = ask(victim, client, request)
            if answer is None:
                break
            tickets |= {ticket for status, ticket, _ in answer.results if status == raw.ADDED}
    return tickets


def ask(victim: Victim, client: Raw, request: bytes) -> raw.Answer | None:
    """Repeat a request until it is answered. Return the answer, or None if the daemon has ended."""
    sequence = raw.answer(request).sequence
    while victim.running:
        client.send(request)
        try:
            while (answer := client.receive()).sequence != sequence or answer.message == OUTCOMES:
                pass
        except zmq.Again:
            continue
        assert answer.error == 0
        return answer
    return None
