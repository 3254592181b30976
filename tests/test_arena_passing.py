"""Readers with another /dev/shm, to which the daemon passes its arena over the socket of its
rings."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import mmap
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from machine import needs, private_memory, python_in
from other_user import run_as
from raw_ring import RawRing
from raw_wire import batch, put
from real_daemon import PATIENCE_S, Daemon, StartDaemon, clean_environment, eventually

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import AsyncSubscriber, Client, Lagged, Notice, Subscriber
from purgatoryd.clients.arena_requests import ArenaRequests, PassedArena
from purgatoryd.clients.subscriber import Inbox, Merged
from purgatoryd.daemon.listeners import arena_passing
from purgatoryd.daemon.listeners.acl import Listener
from purgatoryd.daemon.listeners.arena_passing import asks_for_arena, may_read
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.errors import ArenaMissing
from purgatoryd.shm_layout.layout import RingRefusal
from purgatoryd.shm_layout.paths import Paths, paths_in
from purgatoryd.shm_layout.rings import ARENA_NAME, OFFER, send_offer

pytestmark = pytest.mark.tier("test")

ALICE, BOB = 61001, 61002  # uids without an entry in any user database
SMALL = ("--capacity", "1000", "--payload-memory", "1M", "--replay-buffer", "1024")
OFFERED = (lib.PG_RING_MAGIC, lib.PG_RING_VERSION)
FUTEX_WAITV = "449"


# ---- a daemon whose /dev/shm is not that of the test ---------------------------------------------


@pytest.fixture
def memory() -> Iterator[str]:
    """Return a command that enters a mount namespace with an empty /dev/shm."""
    with private_memory("256m", "another /dev/shm") as enter:
        yield enter


@pytest.fixture
def start(memory: str, daemon_dir: Path) -> Iterator[Callable[..., Daemon]]:
    """Start a daemon in that namespace. Later starts of it use the same /dev/shm."""
    python = python_in(memory, daemon_dir / "python")
    with contextlib.ExitStack() as started:

        def start(*arguments: str) -> Daemon:
            real = Daemon("demo", daemon_dir, (*SMALL, *arguments), python=python)
            started.callback(real.close)
            return real

        yield start


@pytest.fixture
def real(start: Callable[..., Daemon]) -> Daemon:
    """Return a running daemon with another /dev/shm than the test's."""
    return start()


def file_of(real: Daemon, suffix: str = "") -> Path:
    """Return the path at which a daemon's arena file can be seen from here."""
    return Path(f"/proc/{real.pid}/root/dev/shm/{real.paths.arena[1:]}{suffix}")


def source_of(inbox: Inbox | Merged | None) -> str:
    """Return where a subscriber reads its notices: in a passed arena, or in a socket."""
    assert isinstance(inbox, Inbox)
    if inbox.sockets:
        return "socket"
    assert inbox.follower is not None
    assert inbox._stream._reader is not None
    return type(inbox._stream._reader.file).__name__


def fired(key: str) -> None:
    """Let a timer fire, and wait until readers see its notice, which a kill cannot take back."""
    with Subscriber("demo") as witness, Client("demo") as client:
        client.add(key, delay=0)
        await_key(witness, key)


def await_key(subscriber: Subscriber, key: str) -> int:
    """Receive notices until that of `key`, and return its sequence."""
    while True:
        notice = subscriber.get(PATIENCE_S)
        assert notice is not None
        if notice.key == key:
            return notice.seq


def test_a_subscriber_gets_the_arena_that_it_cannot_open(real: Daemon) -> None:
    assert not shm.exists(real.paths.arena)
    with Subscriber("demo") as subscriber:
        assert source_of(subscriber._inbox) == "PassedArena"
        fired("k")
        assert await_key(subscriber, "k") == 1
        inode, permissions = mapped(subscriber)
        assert inode == file_of(real).stat().st_ino
        assert permissions == "r--s"


@pytest.mark.usefixtures("real")
def test_an_async_subscriber_gets_the_arena() -> None:
    async def run() -> Notice | None:
        async with AsyncSubscriber("demo") as subscriber:
            assert source_of(subscriber._inbox) == "PassedArena"
            fired("k")
            return await subscriber.get(PATIENCE_S)

    notice = asyncio.run(run())
    assert notice is not None
    assert notice.key == "k"


def test_subscribers_of_partitions_get_the_arenas_of_all_shards(
    start: Callable[..., Daemon],
) -> None:
    start("--shards", "2")
    create = ["namespace", "create", "shop", "--partitions", "4", "--name", "demo"]
    made = CliRunner().invoke(app, create)
    assert made.exit_code == Exit.DONE, made.output
    with Subscriber("demo", namespace="shop") as subscriber:
        assert isinstance(subscriber._inbox, Merged)
        readers = [inbox._stream._reader for inbox in subscriber._inbox._inboxes]
        assert len(readers) == 2
        assert {type(reader.file) for reader in readers if reader} == {PassedArena}


def test_a_passed_arena_needs_no_memory_of_rings(start: Callable[..., Daemon]) -> None:
    real = start("--ring-memory", "80K")
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(Client("demo", transport="ring"))
        maps = Path(f"/proc/{real.pid}/maps")
        rings = maps.read_text().count("purgatoryd-ring")
        subscriber = stack.enter_context(Subscriber("demo"))
        assert source_of(subscriber._inbox) == "PassedArena"
        assert maps.read_text().count("purgatoryd-ring") == rings
        fired("k")
        assert await_key(subscriber, "k") == 1


def test_a_subscriber_uses_the_socket_if_the_daemon_has_no_rings(
    start: Callable[..., Daemon],
) -> None:
    start("--ring-memory", "0")
    with pytest.raises(ArenaMissing):
        Subscriber("demo", timeout=0)
    with Subscriber("demo", timeout=1) as subscriber:
        assert source_of(subscriber._inbox) == "socket"
        fired("k")
        assert await_key(subscriber, "k") == 1


# ---- another arena -------------------------------------------------------------------------------


def mapped(subscriber: Subscriber) -> tuple[int, str]:
    """Return the inode and the permissions of the mapping from which a subscriber reads."""
    assert source_of(subscriber._inbox) == "PassedArena"
    assert isinstance(subscriber._inbox, Inbox)
    assert subscriber._inbox._stream._reader is not None
    address = int(ffi.cast("uintptr_t", subscriber._inbox._stream._reader._base))
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, permissions, _, _, inode, *_ = line.split()
        if int(area.split("-")[0], 16) <= address < int(area.split("-")[1], 16):
            return int(inode), permissions
    raise AssertionError("the arena is not mapped")


def asked(subscriber: Subscriber) -> int:
    """Return the address of the file that the daemon has passed last, which changes with each."""
    assert isinstance(subscriber._inbox, Inbox)
    return id(subscriber._inbox._stream._reader)


@pytest.mark.parametrize("end", [Daemon.stop, Daemon.kill])
def test_a_restart_with_the_same_arena_loses_nothing(
    end: Callable[[Daemon], None], real: Daemon
) -> None:
    with Subscriber("demo") as subscriber:
        reader, before = asked(subscriber), mapped(subscriber)
        fired("before")
        end(real)
        assert await_key(subscriber, "before") == 1
        real.start()
        fired("after")
        assert await_key(subscriber, "after") == 2
        eventually(lambda: subscriber.get(0.01) or asked(subscriber) != reader)
        assert mapped(subscriber) == before
        fired("later")
        assert await_key(subscriber, "later") == 3


def test_a_resized_arena_is_passed_and_no_notice_is_lost(real: Daemon) -> None:
    with Subscriber("demo") as subscriber:
        before, _ = mapped(subscriber)
        fired("before")
        real.restart(*SMALL, "--capacity", "2000")
        assert await_key(subscriber, "before") == 1
        fired("after")
        assert await_key(subscriber, "after") == 2
        assert mapped(subscriber)[0] == file_of(real).stat().st_ino != before


def test_the_arena_of_another_daemon_is_passed_after_the_first_is_lost(real: Daemon) -> None:
    """As if the daemon's container had been created again: nothing marks the old arena."""
    with Subscriber("demo") as subscriber:
        fired("before")
        assert await_key(subscriber, "before") == 1
        files = [file_of(real), file_of(real, ".private")]
        folder = os.open(files[0].parent, os.O_PATH)
        real.kill()
        for file in files:
            os.unlink(file.name, dir_fd=folder)
        os.close(folder)
        real.start()
        fired("after")
        with pytest.raises(Lagged):
            await_key(subscriber, "after")
        assert await_key(subscriber, "after") == 1
        assert mapped(subscriber)[0] == file_of(real).stat().st_ino


def test_a_replaced_arena_of_a_running_daemon_is_passed(real: Daemon) -> None:
    with Subscriber("demo") as subscriber:
        before, _ = mapped(subscriber)
        file_of(real).unlink()
        eventually(lambda: file_of(real).exists() and file_of(real).stat().st_ino != before)
        fired("k")
        assert await_key(subscriber, "k") == 1
        assert mapped(subscriber)[0] == file_of(real).stat().st_ino


def test_a_subscriber_uses_the_socket_after_a_restart_without_rings(real: Daemon) -> None:
    with Subscriber("demo") as subscriber:
        fired("before")
        assert await_key(subscriber, "before") == 1
        real.restart(*SMALL, "--ring-memory", "0")
        eventually(lambda: subscriber.get(0.01) or bool(subscriber._inbox.sockets))
        fired("after")
        assert await_key(subscriber, "after") == 2
        assert source_of(subscriber._inbox) == "socket"


@pytest.mark.parametrize("end", [Daemon.stop, Daemon.kill])
def test_an_arena_stays_mapped_while_no_daemon_runs(
    end: Callable[[Daemon], None], real: Daemon
) -> None:
    with Subscriber("demo") as subscriber:
        before = mapped(subscriber)
        fired("before")
        end(real)
        assert isinstance(subscriber._inbox, Inbox)
        subscriber._inbox._check_s = 0.0  # look for another arena at once
        assert await_key(subscriber, "before") == 1
        assert subscriber.get(0.01) is None
        subscriber._inbox._stream.reconnected()
        assert mapped(subscriber) == before


# ---- a reader in another mount namespace ---------------------------------------------------------


READER = f"""
import json, sys
from purgatoryd.clients import Subscriber

with Subscriber("demo", timeout={PATIENCE_S}) as subscriber:
    inbox = subscriber._inbox

    def report(what):
        source = "socket" if inbox.sockets else type(inbox._stream._reader.file).__name__
        print(json.dumps([what, source]), flush=True)

    report("ready")
    woken = True
    while subscriber.get(0) is None:  # look, then sleep on what was looked at
        woken = inbox.follower.sleep.wait({PATIENCE_S}) and woken
    report(woken)
    for notice in subscriber:
        report(notice.key)
"""


def test_a_reader_in_another_namespace_wakes_by_the_arena_and_follows_its_daemon(
    daemon: StartDaemon,
) -> None:
    needs("mountns", "another /dev/shm")
    real = daemon("demo", *SMALL)
    command = (
        'mount -t tmpfs tmpfs /dev/shm && test -z "$(ls /dev/shm)" && exec '
        f"{shlex.join([sys.executable, '-c', READER])}"
    )
    reader = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", command], env=clean_environment(real.dir),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    output = reader.stdout
    assert output is not None

    def reported() -> list[str]:
        line: list[str] = json.loads(output.readline())
        return line

    def received(key: str) -> str:
        """Let a timer fire, and return from where the reader has its notice."""
        fired(key)
        what, source = reported()
        assert what == key
        return source

    try:
        assert reported() == ["ready", "PassedArena"]
        call = Path(f"/proc/{reader.pid}/syscall")
        eventually(lambda: call.read_text().split()[0] == FUTEX_WAITV)
        fired("wakes")
        assert reported() == [True, "PassedArena"]
        assert received("first") == "PassedArena"
        real.kill()
        real.start()
        assert received("second") == "PassedArena"
        real.restart(*SMALL, "--capacity", "2000")
        assert received("third") == "PassedArena"
        assert received("fourth") == "PassedArena"
    finally:
        reader.kill()
        reader.communicate()


# ---- permissions ---------------------------------------------------------------------------------


@pytest.fixture
def shared(real: Daemon) -> Daemon:
    """Return a daemon whose run directory every user may enter."""
    real.dir.chmod(0o711)
    return real


def source_for_alice(real: Daemon) -> tuple[str, int]:
    """Return where a member of the daemon's group reads its notices, and the sequence of one.

    The timeout is long: a wait for half of it would end the test.
    """

    def receive() -> tuple[str, int]:
        with Subscriber("demo", timeout=100 * PATIENCE_S) as subscriber:
            fired("k")
            return source_of(subscriber._inbox), await_key(subscriber, "k")

    return run_as(ALICE, receive, groups=[real.paths.cmd.stat().st_gid])


def test_a_member_of_the_group_gets_the_arena(shared: Daemon) -> None:
    assert source_for_alice(shared) == ("PassedArena", 1)


def test_a_user_who_may_not_read_the_arena_uses_the_socket(shared: Daemon) -> None:
    file_of(shared).chmod(0o600)
    assert source_for_alice(shared) == ("socket", 1)
    file_of(shared).chmod(0o640)
    assert source_for_alice(shared) == ("PassedArena", 2)


def test_a_user_who_may_not_connect_gets_nothing(start: Callable[..., Daemon]) -> None:
    real = start("--allow-uid", str(BOB))
    real.dir.chmod(0o711)
    real.paths.ring.chmod(0o666)

    def received() -> bytes:
        with asking(real.paths.ring) as client:
            return client.recv(OFFER.size)

    assert run_as(ALICE, received, groups=[real.paths.cmd.stat().st_gid]) == b""


@pytest.mark.parametrize(
    ("mode", "uid", "gids", "reads"),
    [
        (0o640, 0, set(), True),
        (0o000, 0, set(), True),
        (0o640, ALICE, set(), True),
        (0o040, ALICE, {BOB}, False),  # the owner's bits count for the owner
        (0o640, BOB, {BOB}, True),
        (0o640, BOB, {ALICE, BOB}, True),
        (0o640, BOB, {ALICE}, False),
        (0o640, BOB, set(), False),
        (0o604, BOB, {BOB}, False),  # the group's bits count for the group
        (0o604, BOB, {ALICE}, True),
        (0o600, BOB, {BOB}, False),
    ],
)
def test_owner_and_mode_of_the_file_decide(
    mode: int, uid: int, gids: set[int], reads: bool, tmp_path: Path
) -> None:
    needs("root", "to give a file away")
    file = tmp_path / "arena"
    file.touch()
    os.chown(file, ALICE, BOB)
    file.chmod(mode)
    with file.open("rb") as opened:
        assert may_read(opened.fileno(), uid, gids) is reads


def test_a_file_with_an_access_control_list_is_for_owner_and_root(tmp_path: Path) -> None:
    needs("acl")
    needs("root", "to give a file away")
    file = tmp_path / "arena"
    file.touch()
    os.chown(file, ALICE, BOB)
    file.chmod(0o644)
    Listener(file).shut_to([12345])
    with file.open("rb") as opened:
        read = [
            may_read(opened.fileno(), uid, gids)
            for uid, gids in ((0, set()), (ALICE, set()), (BOB, {BOB}), (12345, set()))
        ]
    assert read == [True, True, False, False]


def test_a_group_that_has_no_gid_here_is_no_group(shared: Daemon) -> None:
    """The kernel shows all such groups as one, so a file of that group must not match."""
    overflow = int(Path("/proc/sys/kernel/overflowgid").read_text())
    os.chown(file_of(shared), -1, overflow)
    shared.paths.ring.chmod(0o666)

    def refusal() -> RingRefusal:
        with asking(shared.paths.ring) as client:
            return answer(client)[0]

    assert run_as(ALICE, refusal, gid=overflow, groups=[overflow]) is RingRefusal.DENIED


def test_a_passed_descriptor_cannot_be_written(shared: Daemon) -> None:
    def attack() -> list[str]:
        with asking(shared.paths.ring) as client:
            refusal, _, (fd,) = answer(client)
        assert refusal is RingRefusal.NONE
        attacks: list[Callable[[], object]] = [
            lambda: mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE),
            lambda: os.pwrite(fd, b"x", 0),
            lambda: os.ftruncate(fd, 0),
            lambda: os.fchmod(fd, 0o666),
            lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDWR),
            lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ]
        failed = []
        for one in attacks:
            with contextlib.suppress(OSError):
                one()
                failed.append("done")
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        return failed

    member = partial(run_as, ALICE, groups=[shared.paths.cmd.stat().st_gid])
    assert member(attack) == []
    assert stat.S_IMODE(file_of(shared).stat().st_mode) == 0o640


def test_clients_do_not_share_an_open_file(real: Daemon) -> None:
    """The clients of one open file would share its offset and its flags."""
    with asking(real.paths.ring) as one, asking(real.paths.ring) as other:
        (first,), (second,) = answer(one)[2], answer(other)[2]
    os.lseek(first, 100, os.SEEK_SET)
    assert os.lseek(second, 0, os.SEEK_CUR) == 0
    assert os.path.samestat(os.fstat(first), os.fstat(second))
    os.close(first)
    os.close(second)


# ---- clients that break the rules ----------------------------------------------------------------


@contextlib.contextmanager
def asking(path: Path, name: bytes | str | None = None) -> Iterator[socket.socket]:
    """Connect a socket with the address `name`; default: one that asks for the arena."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(PATIENCE_S)
        client.bind(ARENA_NAME + os.urandom(8).hex().encode() if name is None else name)
        eventually(lambda: connects(client, path))
        yield client


def connects(client: socket.socket, path: Path) -> bool:
    """Connect. Return False if the daemon has to accept other connections first."""
    with contextlib.suppress(BlockingIOError):
        client.connect(str(path))
        return True
    return False


def answer(client: socket.socket) -> tuple[RingRefusal, int, list[int]]:
    """Receive (refusal, size of rings, descriptors)."""
    offer, fds, _, _ = socket.recv_fds(client, OFFER.size, 3)
    magic, version, refusal, ring_bytes = OFFER.unpack(offer)
    assert (magic, version) == OFFERED
    return RingRefusal(refusal), ring_bytes, fds


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def descriptors_at_rest(real: Daemon) -> int:
    """Return the number of descriptors of a daemon that has a session of this process, but no
    rings."""
    assert arms(real)
    maps = Path(f"/proc/{real.pid}/maps")
    eventually(lambda: "purgatoryd-ring" not in maps.read_text())
    return descriptors(real.pid)


def arms(real: Daemon) -> bool:
    """Return whether a client with rings can arm a timer."""
    with RawRing(real.paths.ring) as raw:
        raw.hello()
        raw.sequence += 1
        raw.send(batch(raw.session, raw.sequence, [put(b"k", 3600 * 10**9)]))
        return raw.receive().error == 0


@pytest.mark.parametrize(
    "name",
    [
        b"\0purgatoryd-aren", b"\0PURGATORYD-ARENA", b"\0", b"\0" + b"\xff" * 107,
        b"\0" + ARENA_NAME, b"\0x" + ARENA_NAME[1:], "{directory}/purgatoryd-arena",
    ],
    ids=["short", "capitals", "empty", "long", "zeros", "prefix", "path"],
)  # fmt: skip
def test_another_name_of_a_socket_gives_rings(name: bytes | str, daemon: StartDaemon) -> None:
    real = daemon("demo", *SMALL)
    address = name.format(directory=real.dir) if isinstance(name, str) else name
    with asking(real.paths.ring, address) as client:
        refusal, ring_bytes, fds = answer(client)
        assert refusal is RingRefusal.NONE
        assert ring_bytes
        assert len(fds) == 2
        for fd in fds:
            os.close(fd)
    assert arms(real)


@pytest.mark.parametrize("length", [1, 15, 16, 100_000])
def test_bytes_after_a_request_change_nothing(length: int, daemon: StartDaemon) -> None:
    real = daemon("demo", *SMALL)
    before = descriptors_at_rest(real)
    with asking(real.paths.ring) as client:
        client.sendall(os.urandom(length))
        refusal, ring_bytes, (fd,) = answer(client)
        assert (refusal, ring_bytes) == (RingRefusal.NONE, 0)
        os.close(fd)
    assert arms(real)
    eventually(lambda: descriptors(real.pid) == before)


def test_answers_that_are_not_read_are_limited(daemon: StartDaemon) -> None:
    real = daemon("demo", *SMALL)
    before = descriptors_at_rest(real)
    with contextlib.ExitStack() as stack:
        ask = partial(asking, real.paths.ring)
        deaf = [stack.enter_context(ask()) for _ in range(arena_passing.UNREAD_PER_UID)]
        eventually(lambda: descriptors(real.pid) == before + len(deaf))
        for client in deaf[:8]:
            client.shutdown(socket.SHUT_WR)  # looks like the end of the client
        for client in deaf[8:12]:
            client.shutdown(socket.SHUT_RDWR)
        for _ in range(20):
            with ask() as one_more:
                assert answer(one_more) == (RingRefusal.UNREAD, 0, [])
        eventually(lambda: descriptors(real.pid) == before + len(deaf))
        assert arms(real)
        refusal, _, (fd,) = answer(deaf[0])
        assert refusal is RingRefusal.NONE
        os.close(fd)
        with ask() as one_more:
            refusal, _, (fd,) = answer(one_more)
            assert refusal is RingRefusal.NONE
            os.close(fd)
    eventually(lambda: descriptors(real.pid) == before)


def test_clients_that_end_before_the_answer_leave_no_descriptor(daemon: StartDaemon) -> None:
    real = daemon("demo", *SMALL)
    before = descriptors(real.pid)
    for _ in range(10 * arena_passing.UNREAD_PER_UID):
        with asking(real.paths.ring):
            pass
    with asking(real.paths.ring) as client:
        refusal, _, fds = answer(client)
        assert refusal is RingRefusal.NONE
        os.close(fds[0])
    eventually(lambda: descriptors(real.pid) == before)


def test_the_ends_of_clients_do_not_end_the_clients_that_get_their_descriptors(
    daemon: StartDaemon,
) -> None:
    real = daemon("demo", *SMALL)
    with contextlib.ExitStack() as stack:
        ended = [stack.enter_context(asking(real.paths.ring)) for _ in range(3)]
        for client in ended:
            os.close(answer(client)[2][0])
        os.kill(real.pid, signal.SIGSTOP)
        ended[0].close()
        ringing = []
        for _ in range(2):
            ringing.append(stack.enter_context(asking(real.paths.ring, "")))
            ended[len(ringing)].close()
        os.kill(real.pid, signal.SIGCONT)
        for client in ringing:
            refusal, _, fds = answer(client)
            assert refusal is RingRefusal.NONE
            for fd in fds:
                os.close(fd)
        assert arms(real)
        for client in ringing:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)


def test_the_name_of_a_client_without_an_address_is_no_request() -> None:
    assert [asks_for_arena(name) for name in ("", None, "purgatoryd-arena", b"")] == [False] * 4
    assert asks_for_arena(ARENA_NAME)


# ---- the answers of other daemons ----------------------------------------------------------------


@pytest.fixture
def place(daemon_dir: Path) -> Iterator[tuple[Paths, socket.socket]]:
    """Return the paths of a daemon, and a listener in its place."""
    paths = paths_in(daemon_dir, "demo")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(paths.ring))
        listener.listen()
        yield paths, listener


@pytest.mark.parametrize(
    ("offer", "count", "refused"),
    [
        (OFFER.pack(*OFFERED, RingRefusal.NONE, 16384), 2, True),  # a daemon without such requests
        (OFFER.pack(*OFFERED, RingRefusal.UID, 0), 0, True),
        (OFFER.pack(*OFFERED, RingRefusal.DENIED, 0), 0, True),
        (OFFER.pack(*OFFERED, RingRefusal.UNREAD, 0), 0, False),
        (OFFER.pack(OFFERED[0], OFFERED[1] + 1, RingRefusal.NONE, 0), 1, True),
        (OFFER.pack(OFFERED[0] + 1, OFFERED[1], RingRefusal.NONE, 0), 1, True),
        (OFFER.pack(*OFFERED, RingRefusal.NONE, 0), 2, False),
        (OFFER.pack(*OFFERED, RingRefusal.NONE, 0), 0, False),
        (b"short", 1, False),
        (b"", 0, False),
    ],
)
def test_a_client_takes_no_other_answer(
    offer: bytes, count: int, refused: bool, place: tuple[Paths, socket.socket]
) -> None:
    paths, listener = place
    requests = ArenaRequests()
    assert requests.take(paths) is None  # there is no answer so far
    before = descriptors(os.getpid())
    connection, name = listener.accept()
    with connection:
        assert asks_for_arena(name)
        if offer:
            socket.send_fds(connection, [offer], [listener.fileno()] * count)
    assert requests.take(paths) is None
    assert requests.refused is refused
    assert descriptors(os.getpid()) == before - 1  # the client's own connection


def test_a_client_asks_once_until_it_is_answered(
    place: tuple[Paths, socket.socket], tmp_path: Path
) -> None:
    paths, listener = place
    listener.setblocking(False)
    requests = ArenaRequests()
    for _ in range(5):
        assert requests.take(paths) is None
        assert not requests.refused
    connection, _ = listener.accept()
    with pytest.raises(BlockingIOError):
        listener.accept()
    file = tmp_path / "arena"
    file.write_bytes(bytes(4096))
    with connection, file.open("rb") as opened:
        send_offer(connection, RingRefusal.NONE, fds=[opened.fileno()])
        passed = requests.take(paths)
    assert isinstance(passed, PassedArena)
    assert passed.has_name
    other_path = paths.ring.with_suffix(".other")  # exists already, so it has another inode
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    other.bind(str(other_path))
    listener.close()
    assert passed.has_name  # no other daemon has its place
    paths.ring.unlink()
    assert passed.has_name
    paths.cmd.touch()
    assert not passed.has_name  # a daemon without rings has its place
    other_path.rename(paths.ring)
    assert not passed.has_name
    other.close()
    passed.close()
