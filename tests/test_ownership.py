"""Ownership of an arena and a WAL: one daemon at a time, whatever its run directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from machine import needs
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    clean_environment,
    remove_arena_files,
    stats,
)
from tiers import wide

from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.clients import Client
from purgatoryd.daemon import store
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.replacement import NEW, TABLE, Replacement, Row
from purgatoryd.daemon.wal_birth import Birth, record_birth
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.errors import AlreadyRunning
from purgatoryd.shm_layout.paths import Paths, paths_in

pytestmark = pytest.mark.tier("all")

RUN = (sys.executable, "-m", "purgatoryd.cli", "run", "--name", "demo")


def file(paths: Paths, suffix: str = "") -> Path:
    return shm.MOUNT / f"{paths.arena[1:]}{suffix}"


def files(paths: Paths) -> dict[str, int]:
    """Return the inode of each arena file of a daemon, by file name."""
    return {path.name: path.lstat().st_ino for path in shm.MOUNT.glob(f"{paths.arena[1:]}*")}


def empty(directory: Path) -> None:
    """Remove all files in a daemon's run directory."""
    for path in directory.glob("demo*.*"):
        if path.suffix != ".stderr":
            path.unlink()


def start_again(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a second daemon with the same run directory. The start has to be refused."""
    return subprocess.run(
        [*RUN, *arguments], cwd=directory, env=clean_environment(directory), timeout=PATIENCE_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def elsewhere(directory: Path, unshare: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a daemon in a container with an empty folder at the path of the run directory."""
    mount = f"mount -t tmpfs -o mode=700 tmpfs {directory}"
    command = f"{mount} && exec {shlex.join([*RUN, *arguments])}"
    return subprocess.Popen(
        ["unshare", *shlex.split(unshare), "sh", "-c", command], cwd="/",
        env=clean_environment(directory), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def serves(real: Daemon) -> bool:
    """Return whether the daemon arms a client's timer, and `purgatoryd get` finds it."""
    with Client("demo", timeout=PATIENCE_S) as client:
        client.add("served", delay=3600, mode="replace")
    done = CliRunner().invoke(app, ["get", "served", "--name", "demo"])
    return real.running and done.exit_code == Exit.DONE


# ---- one arena -------------------------------------------------------------------------------


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    "grow", [(), ("--capacity", "200")], ids=["as it was born", "after other sizes"]
)
def test_an_emptied_run_directory_gives_no_second_daemon(
    grow: Sequence[str], daemon: StartDaemon
) -> None:
    real = daemon("demo", "--capacity", "100")
    if grow:
        real.restart(*grow)
    before = files(real.paths)
    empty(real.dir)
    done = start_again(real.dir, "--capacity", "300")
    assert done.returncode == Exit.UNUSABLE
    assert f"a daemon 'demo' runs already, as process {real.pid}: it has locked" in done.stderr
    assert str(file(real.paths, ".private")) in done.stderr
    assert files(real.paths) == before
    assert real.running


def test_a_killed_daemon_leaves_no_lock(daemon: StartDaemon) -> None:
    real = daemon()
    real.kill()
    empty(real.dir)
    real.start()
    assert serves(real)


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("unshare", "process"),
    [("-m", "process {pid}:"), ("-m -p -f --mount-proc", "a process that cannot be seen")],
    ids=["of one pid namespace", "of another pid namespace"],
)  # fmt: skip
def test_a_second_container_that_shares_dev_shm_is_refused(
    unshare: str, process: str, daemon: StartDaemon
) -> None:
    needs("mountns", "a second run directory of the same path")
    real = daemon()
    before = files(real.paths)
    other = elsewhere(real.dir, unshare)
    _, said = other.communicate(timeout=PATIENCE_S)
    assert other.returncode == Exit.UNUSABLE
    assert f"a daemon 'demo' runs already, as {process.format(pid=real.pid)}" in said
    assert files(real.paths) == before
    assert serves(real)


def test_one_of_ten_first_starts_in_containers_that_share_dev_shm_wins(daemon_dir: Path) -> None:
    needs("mountns", "run directories of the same path")
    racers = [elsewhere(daemon_dir, "-m") for _ in range(10)]
    paths = paths_in(daemon_dir, "demo")
    try:
        lines = [racer.stdout.readline() for racer in racers if racer.stdout]
        assert [line.startswith("ready") for line in lines].count(True) == 1
        for racer, line in zip(racers, lines, strict=True):
            if not line:
                _, said = racer.communicate(timeout=PATIENCE_S)
                assert racer.returncode == Exit.UNUSABLE
                assert "a daemon 'demo' runs already, as " in said
        assert len(files(paths)) == 2
    finally:
        for racer in racers:
            if racer.poll() is None:
                racer.send_signal(signal.SIGTERM)
            racer.communicate(timeout=PATIENCE_S)
        remove_arena_files(paths)


@pytest.mark.tier("test")
@pytest.mark.parametrize("has_ended", [False, True], ids=["goes on", "is complete"])
def test_a_first_start_keeps_the_arena_files_of_another(
    daemon_dir: Path, monkeypatch: pytest.MonkeyPatch, *, has_ended: bool
) -> None:
    """Another daemon creates its arena files right after this daemon has checked the names."""
    paths = paths_in(daemon_dir, "demo")
    theirs = shm.MOUNT / f"{paths.private[1:]}{'' if has_ended else NEW}"

    def meanwhile(_: Replacement) -> Row:
        other = os.open(theirs, os.O_CREAT | os.O_RDWR, 0o600)
        held.callback(os.close, other)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return TABLE[0] if has_ended else TABLE[1]

    monkeypatch.setattr(Replacement, "row", property(meanwhile))
    with contextlib.ExitStack() as held:
        held.callback(remove_arena_files, paths)
        opening = held.enter_context(store.owned(store.Opening(Config("demo"), paths)))
        with pytest.raises(AlreadyRunning):
            store.open_arena(opening)
        assert theirs.exists()


def test_a_second_deployment_keeps_the_shards_of_another_container(
    daemon: StartDaemon,
) -> None:
    needs("mountns", "a second run directory of the same path")
    real = daemon("demo", "--shards", "2")
    shards = [paths_in(real.dir, f"demo-1-{shard}") for shard in range(2)]
    before = [files(paths) for paths in shards]
    other = elsewhere(real.dir, "-m", "--shards", "3")
    _, said = other.communicate(timeout=PATIENCE_S)
    assert other.returncode == Exit.UNUSABLE
    assert "a daemon 'demo-1-0' runs already, as process" in said
    assert [files(paths) for paths in shards] == before
    with Client("demo", timeout=PATIENCE_S) as client:
        client.add("k", delay=3600)


def test_no_child_inherits_the_lock(daemon: StartDaemon) -> None:
    real = daemon("demo", "--capacity", "100")
    real.restart("--capacity", "200")
    private = file(real.paths, ".private").stat()
    held = [
        fd.name
        for fd in Path(f"/proc/{real.pid}/fd").iterdir()
        if fd.exists() and os.path.samestat(fd.stat(), private)
    ]
    assert held
    for fd in held:
        lines = Path(f"/proc/{real.pid}/fdinfo/{fd}").read_text().splitlines()
        flags = dict(line.split(":", 1) for line in lines)["flags"]
        assert int(flags, 8) & os.O_CLOEXEC


# ---- foreign files with the names of arena files -----------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".private", ".new", ".private.new", ".next"])
def test_a_directory_in_place_of_an_arena_file_is_named_and_stays(
    suffix: str, daemon: StartDaemon
) -> None:
    real = daemon()
    real.stop()
    path = file(real.paths, suffix)
    path.unlink(missing_ok=True)
    path.mkdir()
    try:
        before = files(real.paths)
        done = start_again(real.dir)
        said = f"{path}: has the name of an arena file but is not a file: remove it"
        assert (done.returncode, said in done.stderr) == (Exit.UNUSABLE, True)
        assert "Traceback" not in done.stderr
        assert files(real.paths) == before
    finally:
        path.rmdir()


@pytest.mark.parametrize("command", ["stats", "list", "status", "check"])
def test_a_command_names_a_directory_in_place_of_the_arena_file(
    command: str, daemon: StartDaemon
) -> None:
    real = daemon()
    real.stop()
    file(real.paths).unlink()
    file(real.paths).mkdir()
    try:
        done = CliRunner().invoke(app, [command, "--name", "demo"])
        assert done.exit_code == Exit.UNUSABLE, done.output
        assert f"{file(real.paths)}: has the name of an arena file" in done.stderr
    finally:
        file(real.paths).rmdir()


KILLED = """
import os, signal, sys
from purgatoryd.daemon import store
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.wal_birth import Birth, record_birth
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.errors import AlreadyRunning
commit = shm._commit
def killed(fd, size, moved):
    sys.argv.pop() == "later" and commit(fd, size, moved)
    os.kill(os.getpid(), signal.SIGKILL)
shm._commit = killed
from purgatoryd.cli.app import app
moment = sys.argv[-1]
app(["run", "--name", "demo", "--capacity", "100"])
"""


@pytest.mark.tier("test")
@pytest.mark.parametrize("moment", [wide("at once"), "later"])
def test_a_start_that_is_killed_for_memory_leaves_no_file(
    moment: str, daemon_dir: Path, request: pytest.FixtureRequest
) -> None:
    paths = paths_in(daemon_dir, "demo")
    request.addfinalizer(lambda: remove_arena_files(paths))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, moment], env=clean_environment(daemon_dir), check=False,
        capture_output=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert files(paths) == {}


# ---- one WAL -----------------------------------------------------------------------------------


def copy_wal(real: Daemon, copier: Sequence[str]) -> Path:
    """Copy a daemon's folder of WALs; return the path of the copy."""
    other = real.dir / "other"
    other.mkdir()
    subprocess.run([*copier, f"{real.dir}/wal/.", str(other)], check=True, timeout=PATIENCE_S)
    return other


def snapshot_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def with_wal(daemon: StartDaemon) -> Daemon:
    """Start a daemon with a WAL and one durable timer."""
    real = daemon("demo", "--wal-dir", "wal")
    with Client("demo", durable=True, timeout=PATIENCE_S) as client:
        client.add("k", delay=3600)
    return real


def keys(directory: Path) -> set[str]:
    """Return the keys of all timers that the daemon with this run directory has armed."""
    arguments = [sys.executable, "-m", "purgatoryd.cli", "list", "--name", "demo", "--json"]
    done = subprocess.run(
        arguments, env=clean_environment(directory), capture_output=True, check=True, text=True
    )
    return {json.loads(line)["key"] for line in done.stdout.splitlines()}


@pytest.mark.tier("test")
@pytest.mark.parametrize("copier", [["cp", "-a"], wide(["cp", "-r"])], ids=" ".join)
def test_a_wal_that_was_copied_from_a_running_daemon_is_refused(
    copier: Sequence[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    real = with_wal(daemon)
    other = copy_wal(real, copier)
    (other / "demo" / "lock").write_text("")
    before, run = snapshot_of(other), tmp_path / "run"
    run.mkdir(0o700)
    done = start_again(run, "--wal-dir", str(other))
    assert (done.returncode, done.stdout) == (Exit.UNUSABLE, "")
    assert f"{other / 'demo'}: this WAL is a copy" in done.stderr
    assert "--as-restored" in done.stderr
    assert snapshot_of(other) | {"lock": b""} == before | {"lock": b""}
    assert files(paths_in(run, "demo")) == {}
    assert serves(real)


def test_a_restored_copy_goes_on_as_a_stream_of_its_own(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    real = with_wal(daemon)
    stream, other = stats(real)["stream_id"], copy_wal(real, ["cp", "-a"])
    real.stop()
    remove_arena_files(real.paths)
    for arguments in (("--as-restored",), ()):  # the second start needs no --as-restored
        real.start("--wal-dir", str(other), *arguments)
        assert keys(daemon_dir) == {"k"}
        assert stats(real)["stream_id"] != stream
        stream = stats(real)["stream_id"]
        real.kill()
        remove_arena_files(real.paths)


def test_a_wal_without_its_birth_is_an_original(daemon: StartDaemon) -> None:
    real = with_wal(daemon)
    real.stop()
    (real.dir / "wal/demo/birth").unlink()
    remove_arena_files(real.paths)
    real.start()
    assert keys(real.dir) == {"k"}
    assert "wal/demo/birth is missing" in real.stderr
    real.restart()
    assert "is missing" not in real.stderr


@pytest.mark.parametrize(
    "written",
    [b"", b"{}", b"[]", b'{"inode": "x", "born_wall_ns": null}', b"[" * 100_000],
    ids=["empty", "object", "list", "string", "nested"],
)
def test_a_damaged_birth_is_refused_until_it_is_restored(
    written: bytes, daemon: StartDaemon
) -> None:
    real = with_wal(daemon)
    real.stop()
    (real.dir / "wal/demo/birth").write_bytes(written)
    done = start_again(real.dir, "--wal-dir", "wal")
    assert done.returncode == Exit.UNUSABLE
    assert "this WAL is a copy" in done.stderr
    real.start("--wal-dir", "wal", "--as-restored")
    assert keys(real.dir) == {"k"}


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_birth_that_is_not_a_regular_file_is_named(
    make: Callable[[Path], object], daemon: StartDaemon
) -> None:
    real = with_wal(daemon)
    real.stop()
    birth = real.dir / "wal/demo/birth"
    birth.unlink()
    make(birth)
    done = start_again(real.dir, "--wal-dir", "wal")
    assert done.returncode == Exit.UNUSABLE
    assert "birth: is not a regular file" in done.stderr


def test_a_moved_folder_is_the_original(daemon: StartDaemon) -> None:
    """A WAL can be moved, even to another host, because its file `birth` contains nothing of the
    host."""
    real = with_wal(daemon)
    real.stop()
    (real.dir / "wal").rename(real.dir / "moved")
    remove_arena_files(real.paths)
    real.start("--wal-dir", "moved")
    assert keys(real.dir) == {"k"}


@pytest.mark.parametrize(
    ("written", "found", "differs"),
    [
        ((1, 5), (1, 5), False),
        ((1, 5), (2, 5), True),
        ((1, 5), (1, 6), True),
        ((1, None), (1, 6), False),
        ((1, 5), (1, None), False),
        ((1, None), (2, None), True),
        ((None, None), (None, None), False),
        ((None, 5), (None, 6), True),
    ],
)
def test_a_birth_differs_in_values_that_both_file_systems_provide(
    written: tuple[int | None, int | None], found: tuple[int | None, int | None], *, differs: bool
) -> None:
    assert Birth(*written).differs(Birth(*found)) is differs


@pytest.mark.tier("test")
def test_a_birth_names_its_own_inode_and_birth_time(tmp_path: Path) -> None:
    record_birth(tmp_path)
    path = tmp_path / "birth"
    about, written = path.stat(), json.loads(path.read_text())
    assert written["inode"] == about.st_ino
    stat = subprocess.run(["stat", "-c", "%W", path], capture_output=True, check=True).stdout
    assert (written["born_wall_ns"] or 0) // 10**9 == int(stat)


def test_a_deployment_of_copied_wals_starts_as_restored(daemon: StartDaemon) -> None:
    real = daemon("demo", "--shards", "2", "--wal-dir", "wal")
    with Client("demo", durable=True, timeout=PATIENCE_S) as client:
        client.add("k", delay=3600)
    other = copy_wal(real, ["cp", "-a"])
    real.stop()
    for shard in range(2):
        remove_arena_files(paths_in(real.dir, f"demo-1-{shard}"))
    done = start_again(real.dir, "--shards", "2", "--wal-dir", str(other))
    assert done.returncode != Exit.DONE
    assert "this WAL is a copy" in done.stderr
    real.start("--shards", "3", "--wal-dir", str(other), "--as-restored")
    with Client("demo", timeout=PATIENCE_S) as client:
        assert client.get("k") is not None
