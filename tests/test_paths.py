"""Paths of a daemon's files: which directory is tried first, and each refusal is a clear
sentence."""

import os
import socket
from pathlib import Path

import pytest

from purgatoryd.shm_layout import paths as module
from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.errors import BadPath, DaemonUnreachable, InvalidName
from purgatoryd.shm_layout.paths import arena_paths, client_paths, daemon_paths, paths_in

pytestmark = pytest.mark.tier("check")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory that the tests use in place of the host's /run/purgatoryd."""
    directory = tmp_path / "run"
    monkeypatch.setattr(module, "HOST_DIRECTORY", directory)
    return directory


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory that the tests use in place of /tmp/purgatoryd-UID."""
    directory = tmp_path / "shared"
    monkeypatch.setattr(module, "_shared_tmp", lambda: directory)
    return directory


def serve_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(path))  # the file stays after the socket is closed


@pytest.mark.parametrize("name", ["", "A", "a_b", "a/b", "..", "ä", "a" * 33, "a\n"])
def test_names_out_of_bounds_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidName, match="daemon name"):
        paths_in(tmp_path, name)


def test_paths_of_a_name() -> None:
    paths = paths_in(Path("/run/purgatoryd"), "web-1")
    assert paths.cmd_endpoint == "ipc:///run/purgatoryd/web-1.cmd"
    assert paths.pub_endpoint == "ipc:///run/purgatoryd/web-1.pub"
    assert paths.admin_endpoint == "ipc:///run/purgatoryd/web-1.admin"
    assert paths.lock == Path("/run/purgatoryd/web-1.lock")
    assert (paths.arena, paths.private) == ("/purgatoryd.web-1", "/purgatoryd.web-1.private")


def test_arena_files_of_two_directories_differ(tmp_path: Path) -> None:
    first, second = (paths_in(tmp_path / d, "demo").arena for d in ("a", "b"))
    assert first != second
    assert first.startswith("/purgatoryd.demo.")


def test_arena_files_do_not_depend_on_the_way_to_the_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert paths_in(tmp_path / "link", "d").arena == paths_in(tmp_path / "real", "d").arena


def test_chosen_directory_is_the_only_one(host: Path, tmp_path: Path) -> None:
    host.mkdir()
    chosen = {"PURGATORYD_DIR": str(tmp_path / "mine")}
    assert daemon_paths("demo", chosen).directory == tmp_path / "mine"
    serve_at(host / "demo.cmd")
    with pytest.raises(DaemonUnreachable) as caught:
        client_paths("demo", chosen)
    assert caught.value.endpoint == str(tmp_path / "mine")


def test_daemon_takes_the_first_directory_it_may_write(
    host: Path, shared: Path, tmp_path: Path
) -> None:
    assert daemon_paths("demo", {}).directory == host
    host.rmdir()
    host.write_text("in the way")
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert daemon_paths("demo", runtime).directory == tmp_path / "purgatoryd"
    assert daemon_paths("demo", {"XDG_RUNTIME_DIR": "not/absolute"}).directory == shared
    assert shared.stat().st_mode & 0o777 == 0o700


def test_client_takes_the_first_directory_with_the_socket(
    host: Path, shared: Path, tmp_path: Path
) -> None:
    for directory in (host, shared):
        directory.mkdir(0o700)
    (host / "demo.cmd").write_text("not a socket")
    serve_at(shared / "demo.cmd")
    assert client_paths("demo", {}).directory == shared
    (host / "demo.cmd").unlink()
    serve_at(host / "demo.cmd")
    assert client_paths("demo", {}).directory == host


def test_no_daemon_names_every_directory(host: Path, shared: Path, tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable) as caught:
        client_paths("demo", {"XDG_RUNTIME_DIR": "/x"})
    assert caught.value.endpoint == f"{host}, /x/purgatoryd, {shared}"


def test_arena_of_a_daemon_that_is_gone(
    host: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "exists", lambda name: False)
    with pytest.raises(DaemonUnreachable):
        arena_paths("demo", {})
    left = paths_in(shared, "demo").arena
    monkeypatch.setattr(shm, "exists", lambda name: name == left)
    assert arena_paths("demo", {}).directory == shared


def test_a_socket_path_that_is_too_long_is_refused_with_its_length(tmp_path: Path) -> None:
    directory = Path("/" + "d" * (module.SOCKET_PATH_BYTES_MAX - len("//demo.admin")))
    assert len(str(paths_in(directory, "demo").admin)) == 107
    with pytest.raises(BadPath, match="has 108 bytes as a socket path, AF_UNIX allows 107"):
        paths_in(directory, "demos")


def test_directory_in_tmp_must_be_our_own(host: Path, shared: Path, tmp_path: Path) -> None:
    host.write_text("in the way")
    (tmp_path / "elsewhere").mkdir(0o700)
    shared.symlink_to("elsewhere")
    with pytest.raises(BadPath, match="symbolic link"):
        daemon_paths("demo", {})
    shared.unlink()
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(BadPath, match="0755"):
        daemon_paths("demo", {})
    serve_at(shared / "demo.cmd")
    with pytest.raises(BadPath, match="0755"):
        client_paths("demo", {})


def test_directory_in_tmp_of_another_user(
    host: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.write_text("in the way")
    shared.mkdir(0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(BadPath, match=f"belongs to uid {owner}"):
        daemon_paths("demo", {})


@pytest.mark.parametrize(
    ("chosen", "reason"), [("file", "not a directory"), ("missing/child", "cannot be made")]
)
def test_chosen_directory_that_cannot_be_used(chosen: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadPath, match=reason):
        daemon_paths("demo", {"PURGATORYD_DIR": str(tmp_path / chosen)})
