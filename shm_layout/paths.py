"""Paths of the sockets, the lock and the arena files of a daemon, by its name.

If `$PURGATORYD_DIR` is set, it is the only possible directory of a daemon. Otherwise the possible
directories are, in this order:

    /run/purgatoryd                    for daemons of the host
    $XDG_RUNTIME_DIR/purgatoryd        for daemons of one user
    /tmp/purgatoryd-UID                for daemons of one user without XDG_RUNTIME_DIR

The daemon uses the first directory that it may write. A client uses the first directory that
contains the command socket. A directory has one lock file and one pair of arena files per name.
The names of the arena files contain a hash of the directory's path, except for /run/purgatoryd. So
two users, or a test and the host, never use the same arena file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from purgatoryd.shm_layout import shm
from purgatoryd.shm_layout.digests import sha256
from purgatoryd.shm_layout.errors import BadPath, DaemonUnreachable, InvalidName

NAME_BYTES_MAX = 32
SHARDS_MAX = 64
"""Largest number of shards of a deployment. The names of its daemons contain shard numbers."""
SOCKET_PATH_BYTES_MAX = 107  # sun_path has 108 bytes, including the terminator
HOST_DIRECTORY = Path("/run/purgatoryd")

_NAME = re.compile(r"[a-z0-9-]+")


class Paths(NamedTuple):
    """All paths of the daemon `name` in the file system and in shared memory."""

    name: str
    directory: Path
    cmd: Path
    pub: Path
    admin: Path
    ring: Path
    lock: Path
    back: Path
    """Socket of the process that serves past notices."""

    @property
    def arena(self) -> str:
        """Name of the arena file."""
        return f"/{shm.PREFIX}{self.name}{arena_end(self.directory)}"

    @property
    def private(self) -> str:
        """Name of the private arena file."""
        return f"{self.arena}.private"

    @property
    def cmd_endpoint(self) -> str:
        """ZeroMQ address of the command socket."""
        return f"ipc://{self.cmd}"

    @property
    def pub_endpoint(self) -> str:
        """ZeroMQ address of the notice socket."""
        return f"ipc://{self.pub}"

    @property
    def admin_endpoint(self) -> str:
        """ZeroMQ address of the admin socket."""
        return f"ipc://{self.admin}"

    @property
    def back_endpoint(self) -> str:
        """ZeroMQ address of the socket for past notices."""
        return f"ipc://{self.back}"


def ring_path(endpoint: str) -> str:
    """Return the path of the socket for rings, by the endpoint of the command socket."""
    return endpoint.removeprefix("ipc://").removesuffix(".cmd") + ".ring"


def without_rings(ring: str) -> bool:
    """Return whether there is a daemon that serves no rings. `ring`: path of the socket for rings.

    A daemon binds this socket before the command socket, and removes it after that.
    """
    cmd = ring.removesuffix(".ring") + ".cmd"
    return os.path.lexists(cmd) and not os.path.lexists(ring) and os.path.lexists(cmd)


def check_name(name: str) -> str:
    """Return `name` if it is a valid daemon name, else raise InvalidName."""
    if not isinstance(name, str):
        raise InvalidName("daemon", name, "must be str", 0, NAME_BYTES_MAX)
    length = len(name.encode(errors="surrogatepass"))
    if length > NAME_BYTES_MAX:
        raise InvalidName("daemon", name, "is too long", length, NAME_BYTES_MAX)
    if not _NAME.fullmatch(name):
        reason = "must consist of a-z, 0-9 and -"
        raise InvalidName("daemon", name, reason, length, NAME_BYTES_MAX)
    return name


def paths_in(directory: Path, name: str) -> Paths:
    """Return the paths of the daemon `name` in `directory`, without touching the file system.

    Raises InvalidName, and BadPath if the path of a socket would be too long.
    """
    check_name(name)
    longest = directory / f"{name}.admin"
    length = len(os.fsencode(longest))
    if length > SOCKET_PATH_BYTES_MAX:
        reason = (
            f"has {length} bytes as a socket path, AF_UNIX allows {SOCKET_PATH_BYTES_MAX}; "
            "set PURGATORYD_DIR to a shorter directory"
        )
        raise BadPath(str(longest), reason)
    return Paths(
        name=name,
        directory=directory,
        cmd=directory / f"{name}.cmd",
        pub=directory / f"{name}.pub",
        admin=longest,
        ring=directory / f"{name}.ring",
        lock=directory / f"{name}.lock",
        back=directory / f"{name}.back",
    )


@cache
def arena_end(directory: Path) -> str:
    """Return the suffix that distinguishes the arena files of a directory: /dev/shm contains the
    arena files of all directories."""
    if directory == HOST_DIRECTORY:
        return ""
    return f".{sha256(os.fsencode(os.path.realpath(directory))).hex()[:8]}"


def daemon_paths(name: str, environ: Mapping[str, str] = os.environ) -> Paths:
    """Return the paths for a daemon that starts here, and create its directory if possible.

    Raises InvalidName, and BadPath if a socket path is too long or none of the possible directories
    can be used.
    """
    check_name(name)
    *preferred, last = directories(environ)
    for directory in preferred:
        if _make(directory) is None:
            return paths_in(directory, name)
    reason = _make(last)
    if reason:
        raise BadPath(str(last), reason)
    return paths_in(last, name)


def client_paths(name: str, environ: Mapping[str, str] = os.environ) -> Paths:
    """Return the paths of a running daemon, for clients.

    Raises InvalidName, BadPath if a path is too long or another user could have created the socket,
    and DaemonUnreachable, with the directories that were searched, if there is no command socket.
    """
    check_name(name)
    tried = list(directories(environ))
    for directory in tried:
        paths = paths_in(directory, name)
        if _is_socket(paths.cmd):
            reason = _distrusted(directory)
            if reason:
                raise BadPath(str(directory), reason)
            return paths
    places = ", ".join(str(directory) for directory in tried)
    raise DaemonUnreachable(name, places, 0.0, shut=shut(name, environ))


def shut(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the first directory or command socket of the daemon that exists but that this user may
    not open; "" if there is none."""
    for directory in directories(environ):
        for path, mode in ((directory, os.X_OK), (paths_in(directory, name).cmd, os.W_OK)):
            if os.path.exists(path) and not os.access(path, mode, effective_ids=True):
                return str(path)
    return ""


def arena_paths(name: str, environ: Mapping[str, str] = os.environ) -> Paths:
    """Return the paths of a running daemon, or of a daemon that has ended and left its arena.

    Raises the same errors as client_paths().
    """
    try:
        return client_paths(name, environ)
    except DaemonUnreachable:
        for directory in directories(environ):
            paths = paths_in(directory, name)
            if shm.exists(paths.arena):
                return paths
        raise


def directories(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yield the possible directories of a daemon, in the order in which clients search."""
    if chosen := environ.get("PURGATORYD_DIR"):
        yield Path(os.path.abspath(chosen))
        return
    yield HOST_DIRECTORY
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):  # the XDG specification says to ignore a relative path
        yield Path(runtime) / "purgatoryd"
    yield _shared_tmp()


def _shared_tmp() -> Path:
    return Path(f"/tmp/purgatoryd-{os.geteuid()}")


def _make(directory: Path) -> str | None:
    """Create `directory` if it is missing. Return the reason if a daemon cannot use it, or None."""
    mode = 0o750 if directory == HOST_DIRECTORY else 0o700
    try:
        directory.mkdir(mode)
        directory.chmod(mode)  # because the umask has cleared bits of the mode
    except FileExistsError:
        pass
    except OSError as error:
        return f"cannot be made: {error.strerror}"
    if not directory.is_dir():
        return "is not a directory"
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        return "is not writable"
    owner = directory.stat().st_uid
    if owner not in (0, os.geteuid()):
        return f"belongs to uid {owner}, who could replace the sockets"
    return _distrusted(directory)


def _distrusted(directory: Path) -> str | None:
    """Return the reason if other users could create sockets in `directory`, or None.

    They could if any user can write to the directory. They also could in the directory in /tmp,
    which any user may create first, unless that directory belongs to this user and is private.
    """
    if directory.stat().st_mode & stat.S_IWOTH:
        return "can be written by anybody, who could replace the sockets"
    if directory != _shared_tmp():
        return None
    found = directory.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if found.st_uid != os.geteuid():
        return f"belongs to uid {found.st_uid}, not {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, not 0700"
    return None


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False
