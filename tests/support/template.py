"""Start `python -m purgatoryd.cli` quickly, by a fork of a process that has already imported it.

Imports take most of the CPU time of a daemon or command that a test starts. A template is a process
that has imported the package. Each pytest process has a template for daemons and a template for
commands. On request, a template forks a child, which gets its own arguments, environment, working
directory and files. The child becomes a child of the requesting process.

A process is started in the ordinary way if a fork would behave differently. Reasons are another
interpreter, a variable that only a new interpreter or the loader reads, or a caller whose limits,
user, umask, CPUs, signals or namespaces differ from the template's.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import IO, Any, Protocol

DAEMON = "purgatoryd.cli.app", "purgatoryd.cli.service", "purgatoryd.daemon.main"
COMMANDS = tuple(
    f"purgatoryd.cli.{name}"
    for name in ("app", "timers", "notices", "arena", "purgatory", "namespaces", "sessions")
)
OF_A_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "COVERAGE", "COV_", "TZ", "LANG", "LC_")
"""Prefixes of environment variables that are read only when an interpreter starts."""
_INHERITED = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "Cap", "NoNew", "Secc", "Cpus")
_SET_CHILD_SUBREAPER = 36
_LARGEST = 1 << 17


class Process(Protocol):
    """The part of subprocess.Popen that tests use."""

    pid: int
    returncode: int | None

    @property
    def stdout(self) -> IO[bytes] | None:
        """Return the pipe that receives the output of the process."""

    def poll(self) -> int | None:
        """Return the exit code of the process; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended. Return its exit code."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""

    def kill(self) -> None:
        """Send SIGKILL."""


class Forked:
    """A child process that the template forked."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code of the process; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended. Return its exit code. Raises TimeoutExpired."""
        if self.poll() is None:
            poller = select.poll()
            poller.register(self._ended, select.POLLIN)
            poller.poll(None if timeout is None else timeout * 1000)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(["purgatoryd"], timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, sig)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def begin(
    python: str, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], stderr: IO[bytes]
) -> Process:
    """Start `python -m purgatoryd.cli ARGUMENTS`, with a pipe for its stdout."""
    if python == sys.executable and _DAEMONS.usable(env):
        ours, theirs = os.pipe()
        try:
            pid = _DAEMONS.fork(arguments, cwd, env, [os.dup(0), theirs, os.dup(stderr.fileno())])
        except BaseException:
            os.close(ours)
            raise
        return Forked(pid, os.fdopen(ours, "rb", buffering=0))
    return subprocess.Popen(
        [python, "-m", "purgatoryd.cli", *arguments],
        cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=stderr, bufsize=0,
    )  # fmt: skip


def run(
    arguments: Sequence[str], env: Mapping[str, str], stdin: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `python -m purgatoryd.cli ARGUMENTS` to its end. Raises TimeoutExpired."""
    command = [sys.executable, "-m", "purgatoryd.cli", *arguments]
    if not _COMMANDS.usable(env):
        return subprocess.run(
            command, env=env, input=stdin, capture_output=True, text=True, timeout=timeout
        )
    (source, sink), *outputs = (os.pipe() for _ in range(3))
    pid = _COMMANDS.fork(arguments, Path.cwd(), env, [source, *(theirs for _, theirs in outputs)])
    files = [os.fdopen(ours, "rb") for ours, _ in outputs]
    process = Forked(pid, files[0])
    with ThreadPoolExecutor() as pool, files[0], files[1]:
        said = [pool.submit(file.read) for file in files]
        pool.submit(_write, sink, stdin.encode())
        try:
            process.wait(timeout)
        finally:
            process.kill()
        texts = [one.result().decode() for one in said]
    return subprocess.CompletedProcess(command, process.wait(), *texts)


def _write(sink: int, text: bytes) -> None:
    with suppress(BrokenPipeError), os.fdopen(sink, "wb") as file:
        file.write(text)


def _of_a_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(OF_A_START)}


def surroundings() -> list[str]:
    """Return what a child inherits from this thread, except for files, environment and working
    directory."""
    status = Path("/proc/thread-self/status").read_text().splitlines()
    files = [Path("/proc/self", name).read_text() for name in ("limits", "cgroup", "oom_score_adj")]
    spaces = [os.readlink(space) for space in sorted(Path("/proc/self/ns").iterdir())]
    scheduled = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    lines = [line for line in status if line.startswith(_INHERITED)]
    return [*lines, *files, *spaces, str(scheduled)]


class Template:
    """A template process. It ends when this pytest process ends."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules, self._lock = modules, Lock()
        self._owner, self._surroundings = os.getpid(), surroundings()
        self._started = _of_a_start(os.environ)
        self._channel: socket.socket | None = None

    def usable(self, env: Mapping[str, str]) -> bool:
        """Return whether a child of the template would inherit the same as a child of the
        caller."""
        return (
            os.getpid() == self._owner
            and _of_a_start(env) == self._started
            and surroundings() == self._surroundings
        )

    def fork(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], files: Sequence[int]
    ) -> int:
        """Let the template fork a child of this process. The child gets `files` as stdin, stdout
        and stderr, and this process closes them. Return the pid of the child."""
        request = {"arguments": arguments, "cwd": str(cwd), "env": dict(env)}
        try:
            with self._lock:
                channel = self._channel = self._channel or self._start()
                _adopt(1)  # the child's parent ends at once, then this process becomes its parent
                try:
                    socket.send_fds(channel, [json.dumps(request).encode()], files)
                    pid = int(channel.recv(64))
                    channel.recv(64)  # the child's first parent has ended
                finally:
                    _adopt(0)
        finally:
            for file in files:
                os.close(file)
        return pid

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *self._modules],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        return ours


_DAEMONS = Template(DAEMON)
_COMMANDS = Template(COMMANDS)


def _adopt(orphans: int) -> None:
    """Set whether this process becomes the parent of orphans among its descendants: 1 yes, 0 no."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, orphans, 0, 0, 0)


# ---- in the template ------------------------------------------------------------------------


def serve(channel: socket.socket) -> Any:
    """Fork a child for each request. Return the request in the child. Return None in the template
    when no more requests can come."""
    while True:
        message, files, _, _ = socket.recv_fds(channel, _LARGEST, 3)
        if not message:
            return None
        first = os.fork()
        if not first:
            _fork_again(channel)
            _become(files)
            return json.loads(message)
        os.waitpid(first, 0)
        channel.send(b"ended")
        for file in files:
            os.close(file)


def _fork_again(channel: socket.socket) -> None:
    """Fork a second child, and end the first child. Return in the second child once it has its new
    parent."""
    first = os.getpid()
    if second := os.fork():
        channel.send(str(second).encode())
        os._exit(0)
    while os.getppid() == first:
        time.sleep(0.0002)


def _become(files: Sequence[int]) -> None:
    """Use `files` as stdin, stdout and stderr, and close all other files."""
    for standard, file in enumerate(files):
        os.dup2(file, standard)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        import_module(module)
    if (request := serve(channel)) is not None:
        channel.detach()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv[1:] = request["arguments"]
        runpy.run_module("purgatoryd.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
