"""The WAL of a running daemon: folder, group commit, snapshots, removal of files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.listeners.transport import Answered
from purgatoryd.daemon.log import log
from purgatoryd.daemon.recovery import Step
from purgatoryd.daemon.replies import Replies
from purgatoryd.daemon.retention import Keep, is_untidy
from purgatoryd.daemon.snapshot import Child, save_snapshot, start, tidy_and_tell
from purgatoryd.daemon.wal_birth import refuse_copy
from purgatoryd.shm_layout._core import ffi
from purgatoryd.shm_layout.arena import NONE_NS, Arena, Handle
from purgatoryd.shm_layout.disk import DISK, Disk
from purgatoryd.shm_layout.errors import (
    BadPath,
    WalError,
    WalInUse,
    WalMismatch,
    WalUnwritable,
)
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.wal import (
    File,
    GroupCommit,
    Walk,
    has_header,
    has_stopped,
    is_of_birth,
    read_out,
    segments,
    snapshots,
    uuid_of,
)

MODE = 0o700
"""Mode of the WAL folder. Other users must not read keys and payloads, or open the lock file: a
user who can open it can lock it."""
HEARTBEATS_PER_LOOK = 60
"""Heartbeats between two checks of file ages and retention holds if no segment was filled."""
METRICS_NS = 60_000_000_000
"""Interval between records with histograms."""
SET_ASIDE = ".damaged"
"""Suffix of damaged files. They are kept for inspection; recovery ignores them."""
SNAPSHOT_BEFORE_READY, BYTES_OF_A_TIMER = 32 * 2**20, 200
"""Size of the largest snapshot that a start writes before READY, and estimated size of a timer, in
bytes."""
SNAPSHOT_ATTEMPTS = 3
"""The WAL stops after this number of failed attempts at the first snapshot after READY."""


# ---- the folder ------------------------------------------------------------------------------


def wal_directory(config: Config) -> Path | None:
    """Return the folder of the daemon's WAL; None = no WAL."""
    return Path(config.wal_dir).absolute() / config.name if config.wal_dir else None


@contextlib.contextmanager
def locked(directory: Path | None, *, as_restored: bool = False) -> Iterator[None]:
    """Make the folder and hold its lock. Raises WalInUse, WalCopied, BadPath.

    `as_restored`: accept a WAL that is a copy.
    """
    if directory is None:
        yield
        return
    try:
        _refuse_open_parents(directory)
        directory.mkdir(MODE, parents=True, exist_ok=True)
        _refuse_open_parents(directory)
        _refuse_open_folder(directory)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadPath(str(directory), f"cannot be used: {error.strerror}") from error
    try:
        _flock(fd, directory)
        refuse_copy(directory, as_restored=as_restored)
        yield
    finally:
        os.close(fd)


def _refuse_open_parents(directory: Path) -> None:
    """Raise BadPath if other users may replace the folder. Folders that do not exist yet are
    skipped."""
    for above in (*directory.parents, *directory.resolve().parents):
        if not above.exists():
            continue
        about = above.stat()
        if about.st_uid not in (0, os.geteuid()):
            raise BadPath(str(directory), f"is in {above}, which belongs to uid {about.st_uid}")
        if about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
            mode = stat.S_IMODE(about.st_mode)
            raise BadPath(
                str(directory),
                f"is in {above}, whose mode is {mode:04o}: other users may replace it",
            )


def _refuse_open_folder(directory: Path) -> None:
    """Raise BadPath if other users own the folder or may write to it."""
    about = directory.stat()
    if about.st_uid != os.geteuid():
        raise BadPath(str(directory), f"is foreign: it belongs to uid {about.st_uid}")
    if about.st_mode & 0o022:
        mode = stat.S_IMODE(about.st_mode)
        raise BadPath(str(directory), f"has mode {mode:04o}: other users may write to it")


def _flock(fd: int, directory: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).strip()
        raise WalInUse(str(directory), int(holder) if holder.isdigit() else 0) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def has_begun(directory: Path, disk: Disk = DISK) -> bool:
    """True if a daemon may have written records to this WAL: it has segments, or a snapshot that
    the first start did not write."""
    born = (is_of_birth(file, disk) for file in snapshots(directory, disk))
    return bool(segments(directory, disk)) or not all(born)


def refuse_other_wal(directory: Path, uuid: bytes, disk: Disk = DISK) -> None:
    """Raise WalMismatch if the folder holds the WAL of another arena."""
    files = (*segments(directory, disk), *snapshots(directory, disk))
    found = {uuid_of(file.path, disk) for file in files if has_header(file.path, disk)}
    if segments(directory, disk) and found and uuid not in found:
        raise WalMismatch(str(directory), "uuid", uuid.hex(), found.pop().hex())


def warn_of_other_directory(directory: Path, arena: Handle, disk: Disk = DISK) -> None:
    """Log a warning if the folder has no file of the arena. An arena with a WAL has a snapshot in
    the folder of its WAL from the beginning, so the daemon last ran with another folder."""
    files = (*snapshots(directory, disk), *segments(directory, disk))
    try:
        own = any(has_header(f.path, disk) and uuid_of(f.path, disk) == arena.uuid for f in files)
    except WalError:  # a warning is no reason to refuse a start
        return
    if not own:
        log.warning(
            f"{directory} has no file of this arena: a new WAL begins there; the earlier records "
            "are in the WAL directory of the last start, or were removed"
        )


def newest_end(directory: Path, arena: Handle, disk: Disk = DISK) -> Walk:
    """Read the newest segment of the arena's WAL. Return its end, where the WAL continues.

    The read may use the page cache, because group commit writes unconfirmed records again.

    Raises WalDamaged, WalMismatch.
    """
    newest = segments(directory, disk)[-1:]
    if not newest or _is_of_other(newest[0].path, arena.uuid, disk):
        return Walk.before(arena)
    walk = Walk(disk=disk)
    walk.enter(newest[0].path)
    read_out(walk)
    while damage := walk.skip(int(arena.wal_buffer.committed_lsn) + 1):
        log.warning(f"{damage.place}; nothing is lost, the arena has these records")
        read_out(walk)
    walk.check()
    return walk


def _is_of_other(path: Path, uuid: bytes, disk: Disk) -> bool:
    return has_header(path, disk) and uuid_of(path, disk) != uuid


def own_snapshot(directory: Path, arena: Arena, host: Host, step: Step) -> bool:
    """Make sure that a snapshot contains the whole arena, and remove snapshots of the arena that
    this arena replaced. False if the daemon is to write the snapshot once it is ready, because the
    arena is large.

    A clean stop leaves such a snapshot. After a kill or a failed write, the older files may lack
    bytes on disk, so the daemon acknowledges nothing before a new snapshot is confirmed. The
    snapshot of a large arena may be written later only if a recovery from the older files is
    possible until it exists. If there are no segments, the arena has replaced no other arena;
    snapshots of other arenas are then set aside.
    """
    disk = host.disk
    sound = [file for file in snapshots(directory, disk) if has_header(file.path, disk)]
    found = {file: uuid_of(file.path, disk) for file in sound}
    own = [file for file, uuid in found.items() if uuid == arena.uuid]
    confirmed = any(file.lsn == arena.wal_buffer.next_lsn for file in own)
    if not confirmed and not (_leads_on(directory, own, disk) and _is_large(arena)):
        save_snapshot(arena, directory, host, step)
        confirmed = True
    begun = bool(segments(directory, disk))
    for file in found.keys() - own:
        if begun or is_of_birth(file, disk):
            disk.remove(file.path)
        else:
            _set_aside(file.path, disk)
    disk.sync_directory(directory)
    return confirmed


def _leads_on(directory: Path, own: list[File], disk: Disk) -> bool:
    """True if the segments continue one of the snapshots `own`."""
    first = segments(directory, disk)[:1]
    return bool(own and first) and first[0].lsn <= own[-1].lsn


def _is_large(arena: Arena) -> bool:
    timers, operations = arena.in_use()
    bytes_ = (timers + operations) * BYTES_OF_A_TIMER + int(arena.metrics.blob_bytes)
    return bytes_ > SNAPSHOT_BEFORE_READY


def set_aside(directory: Path, disk: Disk = DISK) -> None:
    """Rename all files of a damaged WAL, so that recovery ignores them."""
    for file in (*segments(directory, disk), *snapshots(directory, disk)):
        _set_aside(file.path, disk)
    disk.sync_directory(directory)


def _set_aside(path: Path, disk: Disk) -> None:
    disk.rename(path, path.name + SET_ASIDE)


# ---- while the daemon runs -------------------------------------------------------------------


class NullWal:
    """A stand-in for Wal in a daemon that has no WAL: no method has an effect."""

    requests: Any = ffi.NULL
    """The struct pg_commit_requests of the WAL."""

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable after a commit."""
        return []

    @property
    def committed_lsn(self) -> int:
        """LSN of the newest record on disk."""
        return 0

    @property
    def errno(self) -> int:
        """The error that stopped the WAL; 0 = it has not stopped."""
        return 0

    @property
    def full(self) -> bool:
        """True while due timers have to wait for the disk."""
        return False

    @property
    def commit_at_ns(self) -> int:
        """Boot time at which the loop has to request the next commit."""
        return NONE_NS

    def end_work(self, pending: int) -> None:
        """Note the end of a part of an iteration's work. Its records may be committed from then on.
        `pending`: number of answers that wait for a commit."""

    def released(self, callers: int) -> None:
        """Note that a commit allowed answers. `callers`: number of answers that waited before."""

    def replied(self, reply: Any, built_boot_ns: int, handed_boot_ns: int) -> None:
        """Note that an answer was complete at `built_boot_ns` and sent at `handed_boot_ns`."""

    def answered(self, answers: Answered) -> None:
        """Note that answers were sent."""

    def pause(self) -> bool:
        """Stop other threads from using the arena. False = not yet: call again once a descriptor in
        `fds` is readable."""
        return True

    def unpause(self, *, moved: bool) -> None:
        """End a pause. `moved`: the arena has new files."""

    def clear_wakeup(self) -> None:
        """Reset the descriptors in `fds` after one of them was readable."""

    def heartbeat(self) -> None:
        """Start snapshots, and remove files that are not needed. Called once a second."""

    def commit(self) -> None:
        """Write all records to disk. No record may be appended afterwards."""

    def close(self) -> None:
        """Write a last snapshot after a clean end, and close the files."""


class Wal(NullWal):
    """A WAL on disk. Only the loop's thread uses it; group commit has a thread of its own."""

    def __init__(
        self,
        arena: Arena,
        name: str,
        directory: Path,
        config: Config,
        end: Walk,
        host: Host = HOST,
        step: Step = lambda _: None,
        *,
        start_snapshot: Callable[..., Child] = start,
        threaded: bool = True,
    ) -> None:
        """`name`: name of the arena file. `end`: reader of the WAL, after its last record; new
        segments continue there. `step` is called at each step of starting and of closing.
        `start_snapshot` starts the process that writes snapshots. If `threaded` is false, the
        caller commits with `commit_group`."""
        self._host = host
        self._start_snapshot = start_snapshot
        self._step = step
        self._arena = arena
        self._name = name
        self._directory = directory
        self._snapshot_segments = config.snapshot_segments
        self._keep = Keep(config.retain_age_ns, config.retain_bytes)
        confirmed = own_snapshot(directory, arena, host, step)
        self._attempts = 0
        self._given_up = False
        """True if the snapshot process was killed because the arena moved."""
        self._start_lsn = int(self._wal_buffer.next_lsn)
        self._open = True
        self._child: Child | None = None
        self._segment = self._heartbeats = 0
        self._measured_boot_ns = host.boot_ns()
        self._reported = False
        self._replies = Replies(arena)
        # created last: its thread would go on if this constructor failed afterwards
        self._group_commit = GroupCommit(
            arena, directory, config.wal_segment_bytes, end, host.disk, threaded=threaded
        )
        self.requests = self._group_commit.requests()
        self._confirmed = confirmed

    @property
    def _wal_buffer(self) -> Any:
        """The WAL buffer. Not cached, because an arena whose files were removed is mapped
        elsewhere."""
        return self._arena.wal_buffer

    @property
    def _confirmed(self) -> bool:
        """True once a snapshot contains the arena's state at the start, so that the WAL alone is
        enough for a recovery."""
        return bool(self.requests.confirmed)

    @_confirmed.setter
    def _confirmed(self, confirmed: bool) -> None:
        self.requests.confirmed = confirmed

    @property
    def fds(self) -> list[int]:
        """The descriptor of the group-commit thread."""
        return [self._group_commit.fd]

    @property
    def committed_lsn(self) -> int:
        """Newest LSN that the group-commit thread confirmed; 0 until the first snapshot is
        confirmed."""
        return int(self._wal_buffer.committed_lsn) if self._confirmed else 0

    @property
    def errno(self) -> int:
        """The error number of the system call of group commit that failed; 0 = the WAL has not
        stopped."""
        return int(self._wal_buffer.error) if has_stopped(self._wal_buffer) else 0

    @property
    def full(self) -> bool:
        """True while the WAL buffer has no space."""
        return self._arena.wal_buffer_full

    def replied(self, reply: Any, built_boot_ns: int, handed_boot_ns: int) -> None:
        """Note an answer. REPLIED records do not trigger a commit. They are written with the next
        record, at most one second later."""
        if self._open:
            self._replies.add(reply, built_boot_ns, handed_boot_ns)

    def answered(self, answers: Answered) -> None:
        """Note that answers were sent, as replied() does."""
        if self._open:
            self._replies.extend(answers)

    def end_work(self, pending: int) -> None:
        """Wake the group-commit thread if records were appended, unless the commit waits for more
        calls."""
        if self._arena.commit_is_due(self.requests, pending, self._host.boot_ns()):
            self._kick()

    @property
    def commit_at_ns(self) -> int:
        """Boot time at which the next commit begins, although calls are missing that may share
        it."""
        return int(self.requests.until_boot_ns)

    def released(self, callers: int) -> None:
        """Note that answers left after a commit. `callers`: number of pending answers before."""
        self._arena.commit_allowed(self.requests, callers)

    def _kick(self) -> None:
        """Append REPLIED records and wake the group-commit thread. REPLIED records alone do not
        wake the thread, because the next durable call would wait for their commit."""
        self._replies.append()
        self._arena.request_commit(self.requests)

    def commit_group(self) -> bool:
        """Commit one group, if there is no thread. False if no group is left."""
        return self._group_commit.iterate()

    def pause(self) -> bool:
        """Pause the group-commit thread after its current commit. False while this commit is under
        way."""
        return self._group_commit.pause()

    def unpause(self, *, moved: bool) -> None:
        """Continue commits. If the arena moved, a process that writes a snapshot is killed, and a
        later process takes the snapshot again."""
        self._group_commit.unpause()
        if moved and self._child is not None:
            self._child.kill()  # the child waits for commits that only the new arena files show
            self._given_up = True

    def clear_wakeup(self) -> None:
        """Reset the descriptor of the group-commit thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._group_commit.fd)

    def heartbeat(self) -> None:
        """Append histograms, and report once that the WAL has stopped. Check the files after each
        filled segment and once a minute."""
        self._heartbeats += 1
        self._append_metrics(self._host.boot_ns())
        if self.errno:
            self._replies.forget()
        if self._replies:
            self._kick()
        if self.errno and not self._reported:
            self._reported = True
            error = WalUnwritable(str(self._directory), self.errno)
            log.error(f"the WAL has stopped: {error}", errno=self.errno)
        if self._child is not None:
            if self._child.poll() is not None:
                self._ended(self._child.returncode)
            return
        if (
            not self._confirmed
            or self._segment != int(self._wal_buffer.segment)
            or self._heartbeats % HEARTBEATS_PER_LOOK == 0
        ):
            self._segment = int(self._wal_buffer.segment)
            self._look()

    def _ended(self, code: int) -> None:
        """Note the end of the snapshot process. Nothing is acknowledged before the first snapshot,
        so the WAL stops after SNAPSHOT_ATTEMPTS failures."""
        given_up, self._child, self._given_up = self._given_up, None, False
        if self._confirmed:
            return
        self._confirmed = code == 0 and self._has_first_snapshot()
        self._attempts += not (self._confirmed or given_up or not self._arena.has_names)
        if self._attempts == SNAPSHOT_ATTEMPTS and not self.errno:
            self._group_commit.stop(errno.EIO)

    def _has_first_snapshot(self) -> bool:
        try:
            return self._snapshot_lsn() >= self._start_lsn
        except OSError as error:
            log.warning(f"a WAL file cannot be read or written: {error}")
            return False

    def _append_metrics(self, now_boot_ns: int) -> None:
        if now_boot_ns - self._measured_boot_ns >= METRICS_NS:
            self._measured_boot_ns = now_boot_ns
            self._arena.append_metrics(now_boot_ns)

    def _look(self) -> None:
        try:
            snapshot = self._snapshot_is_due()
            if snapshot or is_untidy(self._directory, self._keep, self._host):
                self._child = self._start_snapshot(
                    self._name, self._directory, self._keep, snapshot=snapshot
                )
        except (OSError, BadPath) as error:
            log.warning(f"a WAL file cannot be read or written: {error}")

    def _snapshot_is_due(self) -> bool:
        files = segments(self._directory, self._host.disk)
        filled = sum(file.lsn > self._snapshot_lsn() for file in files)
        return (filled >= self._snapshot_segments or not self._confirmed) and not self.errno

    def _snapshot_lsn(self) -> int:
        newest = snapshots(self._directory, self._host.disk)[-1:]
        return newest[0].lsn if newest else 0

    def commit(self) -> None:
        """Write all records to disk and end the group-commit thread."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
        if self._open:
            self._open = False
            self._replies.append()
            self._group_commit.close()

    def close(self) -> None:
        """Write a snapshot, unless the loop ended by an error or the WAL has stopped."""
        clean = not self._open  # after an error of the loop the arena is not changed
        self.commit()
        try:
            if clean and not self.errno and self._changed():
                save_snapshot(self._arena, self._directory, self._host, self._step)
                tidy_and_tell(self._directory, self._keep, self._host)
        except (OSError, WalError, BadPath) as error:
            log.warning(f"a WAL file cannot be read or written: {error}")

    def _changed(self) -> bool:
        return int(self._wal_buffer.next_lsn) != self._snapshot_lsn()
