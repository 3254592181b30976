"""The steps of a script that break something. Each fault is counted by its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import fields, replace
from errno import EIO
from functools import partial
from pathlib import Path
from typing import Any

from purgatoryd.clients.core import BYE_S
from purgatoryd.daemon import wal_birth
from purgatoryd.daemon.config import Config
from purgatoryd.daemon.retention import SNAPSHOTS_KEPT
from purgatoryd.daemon.snapshot import save_export
from purgatoryd.shm_layout import shm, wire
from purgatoryd.shm_layout._core import ffi
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import (
    AlreadyRunning,
    ArenaInUse,
    ArenaMismatch,
    ArenaTooSmall,
    BadPath,
    PurgatorydError,
    WalCopied,
    WalMismatch,
    WalNeeded,
)
from purgatoryd.shm_layout.layout import FLAG_DRAIN, Message, Status
from purgatoryd.shm_layout.shm import MOUNT
from purgatoryd.shm_layout.wal import SEGMENT, SNAPSHOT
from world import work
from world.cell import RESTART_NS, Cell
from world.clients import HASTY_S, LIMIT_S, SimulatedClient
from world.daemons import EVERY_UID
from world.disk import PAGE, File, Trouble
from world.network import RECONNECT_NS, Disturbance
from world.oracle import Violation
from world.script import CLIENTS, FOR_GOOD, MS, RESUMER, TOPICS, S
from world.world import FAR_NS

AGAIN_NS = 5 * MS
OPENS_NS = 10_000
"""Time after which a new client opens its connection."""
ATTEMPTS_NS = 8 * S
"""Time within which a daemon that cannot write its first snapshot gives up."""
SLOW_SNAPSHOT = 10
"""Duration of a snapshot step on a slow disk, divided by the duration of a commit."""
LEAVES_S = LIMIT_S + BYE_S + 0.1
"""Longest time from the close of a client to its end, on the clock of a client that is not
frozen."""
UUID_BYTES = 16
COPY_COMMIT_NS = 20 * MS
OF_THE_WAL = frozenset({
    "wal_dir", "wal_buffer_bytes", "wal_segment_bytes", "snapshot_segments", "durable_namespaces",
})  # fmt: skip
"""Settings that a daemon without a WAL does not have."""
NO_WAL: dict[str, Any] = {one.name: one.default for one in fields(Config) if one.name in OF_THE_WAL}
NAMED_AGAIN_NS = 5 * S
"""Time without a pause after which a daemon has restored the names of its arena files."""
SIZES = (
    "payload_bytes", "replay_capacity", "topics", "namespaces", "sessions", "watches", "watch_keys",
    "inbox", "accounts", "bulk_loads", "bulk_load_rows", "jobs",
)  # fmt: skip
LARGER = {64: 2, 512: 2}
"""For some capacities, the factor by which the other sizes exceed the sizes of the first start."""

Errors = tuple[type[PurgatorydError], ...]
"""Errors with which a wrong start may be refused."""
Wrong = AbstractContextManager[Errors]
"""A context that makes the next start wrong. It yields the errors with which the start may be
refused."""


def _count(cell: Cell, kind: str) -> None:
    cell.world.faults[kind] += 1


# ---- messages ----------------------------------------------------------------------------------


def disturb(cell: Cell, client: int, kind: str, frames: int, delay_ns: int) -> None:
    """Disturb the next frames of a client's connections. They are lost, doubled, delayed or
    swapped, or (`kind` "late") the client's socket has received them but is not readable at
    once."""
    for end in cell.clients[client].ends:
        end.disturbances.append(Disturbance(kind, frames, delay_ns))


def storm(cell: Cell, client: int, disturbances: list[dict[str, Any]]) -> None:
    """Disturb many frames of a client's connection, each in its own way."""
    for one in disturbances:
        disturb(cell, client, **one)


def disturb_subscriber(cell: Cell, subscriber: int, kind: str, frames: int, delay_ns: int) -> None:
    """Lose or delay the next frames of a subscriber. Its socket never doubles or swaps messages."""
    for end in cell.subscribers[subscriber].ends:
        lossy = kind if kind in ("lose", "delay") else "lose"
        end.disturbances.append(Disturbance(lossy, frames, delay_ns))


def break_(cell: Cell, client: int) -> None:
    """Break a client's connections."""
    for end in cell.clients[client].ends:
        cell.world.network.break_connection(end)
    _count(cell, "message")


# ---- processes ---------------------------------------------------------------------------------


def freeze_client(cell: Cell, client: int, span_ns: int) -> None:
    """Stop a client for a while."""
    one = cell.clients[client]
    one.freeze()
    _count(cell, "client")
    cell.world.schedule.after(span_ns, one.thaw)


def freeze_subscriber(cell: Cell, subscriber: int, span_ns: int) -> None:
    """Stop a subscriber for a while."""
    one = cell.subscribers[subscriber]
    one.freeze()
    _count(cell, "client")
    cell.world.schedule.after(span_ns, one.thaw)


def cut(cell: Cell, client: int, span_ns: int) -> None:
    """Break a client's connections, and break its new connections as soon as a message has arrived.
    Then freeze the client for a while. The daemon thus receives a message whose connection is
    gone."""
    break_(cell, client)
    for end in cell.clients[client].ends:
        end.disturbances.insert(0, Disturbance("cut", 1))
    cell.world.schedule.after(RECONNECT_NS + MS, partial(freeze_client, cell, client, span_ns))


def kill_subscriber(cell: Cell, subscriber: int, topics: list[str] | None, whole: bool) -> None:
    """Kill a subscriber's process, and start its next process at once."""
    _count(cell, "client")
    cell.renew_subscriber(subscriber, topics, whole=whole)


def bar(cell: Cell, client: int, span_ns: int) -> None:
    """Restart the daemon with settings that refuse a client's uid. Let the uid connect again
    later."""
    uid = client if cell.world.script.setting.uids else 0
    if cell.barred is not None or uid == 0 or not cell.daemon.alive:
        return
    _count(cell, "stop")
    cell.barred = client
    cell.dropped.add(client)
    cell.daemon.next_uids = EVERY_UID - {uid}
    cell.daemon.stop()
    cell.clients[client].limit_s = HASTY_S
    work.rush(cell, client, 0, 3, S, 8)
    cell.world.schedule.after(2 * RESTART_NS, partial(work.get, cell, client, 1))
    cell.world.schedule.after(max(span_ns, 3 * RESTART_NS), cell.let_in)


def kill_client(cell: Cell, client: int, span_ns: int, doubled: int) -> None:
    """Kill a client's process. Its next process starts after `span_ns`, and the first `doubled`
    frames of that process arrive twice."""
    if cell.clients[client].alive:
        cell.end_client(client)
        _count(cell, "client")
        cell.world.schedule.after(span_ns, partial(cell.begin_client, client))
        if doubled:
            doubles = partial(disturb, cell, client, "double", doubled, 0)
            cell.world.schedule.after(span_ns + OPENS_NS, doubles)


def leave(cell: Cell, client: int, span_ns: int, lost: int) -> None:
    """Close a client while faults continue, and lose its next `lost` frames. Check that it ends in
    time. Its next process starts later."""
    one = cell.clients[client]
    if not one.usable or one.frozen or one.resumable:
        return
    closed_s = one.host.monotonic_s()

    def left() -> None:
        if one is not cell.clients[client] or not one.alive:
            return
        if one.frozen or one.host.monotonic_s() < closed_s + LEAVES_S:
            cell.world.schedule.after(S, left)
            return
        if not one.jobs.ended and one.thawed_s < closed_s:
            raise Violation(f"client {client} does not end")
        cell.end_client(client)
        cell.world.schedule.after(span_ns, partial(cell.begin_client, client))

    if lost:
        disturb(cell, client, "lose", lost, 0)
    one.close()
    cell.world.schedule.after(S, left)


def reuse_pid(cell: Cell, client: int) -> None:
    """Kill a client's process, and start its next process with the same pid at once."""
    one = cell.clients[client]
    if one.alive:
        cell.end_client(client)
        cell.world.machine.reuse_pid(one.host.pid)
        _count(cell, "client")
        cell.begin_client(client)


def drop_session(cell: Cell, client: int, late_ns: int) -> None:
    """Let an operator end a client's session. Unless `late_ns` is 0, delay the client's next frames
    by this time, and end the client's session once more."""
    session = cell.clients[client].session_id
    if cell.clients[client].alive and session:
        _count(cell, "client")
        cell.dropped.add(client)
        if client == RESUMER:
            cell.inherited.clear()
        if late_ns:
            disturb(cell, client, "delay", 3, late_ns)
            cell.world.schedule.after(AGAIN_NS, partial(drop_session, cell, client, 0))
        cell.operator.ask(lambda n: wire.encode_frame(Message.DROP, session, n))


def drop_busy(cell: Cell, late_ns: int, **watches: Any) -> None:
    """Let an operator end a client's session soon after the client armed many operations."""
    work.watch_many(cell, **watches)
    cell.world.schedule.after(late_ns, partial(drop_session, cell, watches["client"], 0))


def ask_durably(cell: Cell, client: int, span_ns: int, lost: int) -> None:
    """Let a client request durable answers for a while from a daemon without a WAL.

    The daemon refuses each batch as a whole, and the client replaces its session. `lost`: number of
    frames to lose after a batch and its answer.
    """
    one = cell.clients[client]
    if one.usable:
        _count(cell, "client")
        if lost:
            disturb(cell, client, "delay", 2, 0)
            disturb(cell, client, "lose", lost, 0)
        if client == RESUMER:
            cell.dropped.add(client)
            cell.inherited.clear()
        one.want_durable(True)
        cell.world.schedule.after(span_ns, partial(one.want_durable, False))


def lose_answer(cell: Cell, client: int) -> None:
    """Lose a client's next message, break its connections, and end its session.

    When the client repeats the message, the session is gone, and the message may already have been
    applied.
    """
    disturb(cell, client, "lose", 1, 0)
    cell.world.schedule.after(AGAIN_NS, partial(break_, cell, client))
    cell.world.schedule.after(AGAIN_NS, partial(drop_session, cell, client, 0))


def kill_daemon(cell: Cell, calls: int) -> None:
    """Kill the daemon after `calls` more calls into core, disk and sockets."""
    cell.daemon.fuse.left = calls


def kill_start(cell: Cell, calls: int, capacity: int | None, cut: bool) -> None:
    """Kill the daemon or cut the power. Then kill the next process during its start, after `calls`
    calls. This start may have other sizes."""
    if not cell.daemon.alive:
        return
    if cut:
        power_cut(cell, AGAIN_NS, answered=False)
    else:
        cell.daemon.kill()
    cell.daemon.fuse.left = calls
    _resize(cell, capacity)


def _resize(cell: Cell, capacity: int | None) -> None:
    """Set the sizes of the next start for this capacity. None: keep the sizes of the last start."""
    if capacity is not None:
        usual, times = cell.usual, LARGER.get(capacity, 1)
        sizes = {name: times * getattr(usual, name) for name in SIZES}
        cell.daemon.next_config = replace(cell.daemon.config, capacity=capacity, **sizes)


def freeze_daemon(cell: Cell, span_ns: int, read_in_ns: int, late: bool) -> None:
    """Freeze the daemon for `span_ns`. If `late`, count this time from the intended wake-up of the
    loop.

    `read_in_ns` after the freeze, the sockets read the messages that arrived during the freeze.
    """
    if cell.daemon.alive:
        if late:
            span_ns += cell.daemon.sleeps_ns
        cell.daemon.freeze()
        _count(cell, "freeze")
        cell.world.schedule.after(span_ns, partial(cell.daemon.thaw, read_in_ns))


def stop_daemon(cell: Cell, capacity: int | None, asked: bool, publishes: bool) -> None:
    """Stop the daemon cleanly, by a signal or by the STOP command. The next start may have other
    sizes. `publishes`: an operator publishes notices just before the stop."""
    if not cell.daemon.alive:
        return
    _count(cell, "stop")
    if publishes:
        for topic in TOPICS:
            work.publish(cell, topic)
    if asked:
        cell.operator.ask(lambda n: wire.encode_frame(Message.STOP, 0, n))
    else:
        cell.daemon.stop()
    _resize(cell, capacity)


def terminate(cell: Cell, calls: int) -> None:
    """Send the daemon a signal to stop. It arrives after `calls` more calls of the daemon."""
    if cell.daemon.alive:
        _count(cell, "stop")
        cell.daemon.terminate(calls)


def drain(cell: Cell, span_ns: int, calls: int | None) -> None:
    """Let the daemon refuse adds for a while. `calls`: number of calls of the daemon until a signal
    to stop arrives; None: no signal arrives."""
    _count(cell, "stop")
    cell.oracle.causes.add(Status.STOPPING)
    cell.draining = True
    if calls is not None:
        cell.daemon.terminate(calls)
    cell.operator.ask(lambda n: wire.encode_frame(Message.STOP, 0, n, flags=FLAG_DRAIN))
    cell.world.schedule.after(span_ns, cell.resume)


def crowd(cell: Cell, count: int, uid: int, span_ns: int) -> None:
    """Open sessions of `count` more clients, which may fill the session table. An operator ends the
    first of these sessions. Later all these clients end at the same time."""
    guests = [cell.guest(uid) for _ in range(count)]
    _count(cell, "client")
    cell.world.schedule.after(span_ns // 2, partial(_drop_guest, cell, guests[0]))
    cell.world.schedule.after(span_ns, partial(cell.end_guests, guests))


def _drop_guest(cell: Cell, guest: SimulatedClient) -> None:
    """Let an operator end the session of a guest. Then let the guest query a key."""
    session = guest.session_id
    if guest in cell.guests and session:
        cell.operator.ask(lambda n: wire.encode_frame(Message.DROP, session, n))
        cell.world.schedule.after(MS, lambda: guest.get("k", lambda _: None))


def wrong_start(cell: Cell, kind: str) -> None:
    """Stop the daemon, and start it with a wrong setting or on another machine. Check that the
    start is refused. The fault changes nothing else."""
    where, wrong = WRONG_STARTS[kind]
    if not where(cell) or not _stop_at_ease(cell):
        return
    _count(cell, "stop")
    with wrong(cell) as expected:
        _start_refused(cell, kind, expected)


def _start_refused(cell: Cell, kind: str, expected: Errors) -> None:
    cell.expected = expected
    started = cell.daemon.start()
    cell.expected = ()
    if started and kind != "too small":  # a smaller arena is enough if few rows are in use
        raise Violation(f"a wrong start ({kind}) was not refused")
    cell.daemon.stop()


@contextmanager
def _configured(cell: Cell, expected: Errors, **settings: Any) -> Iterator[Errors]:
    """Change settings of the next start. Yield the errors with which it may be refused."""
    usual = cell.daemon.next_config
    cell.daemon.next_config = replace(usual, **settings)
    yield expected
    cell.daemon.next_config = usual


def _other_clock(cell: Cell) -> Wrong:
    clock = "real" if cell.virtual else "virtual"
    return _configured(cell, (ArenaMismatch,), clock=clock, wall_origin_ns=0)


@contextmanager
def _other_clock_without_arena(cell: Cell) -> Iterator[Errors]:
    """Lose the arena, so that the start creates one with another clock."""
    cell.lose_arena()
    with _other_clock(cell) as expected:
        yield expected


def _other_shard(cell: Cell) -> Wrong:
    return _configured(cell, (ArenaMismatch,), shard=2, shards=3)


def _too_small(cell: Cell) -> Wrong:
    return _configured(cell, (ArenaTooSmall,), sessions=1)


def _no_wal(cell: Cell) -> Wrong:
    return _configured(cell, (WalNeeded,), **NO_WAL)


@contextmanager
def _another_wal(cell: Cell) -> Iterator[Errors]:
    """Let a daemon that has no WAL start with a WAL that another daemon wrote."""
    folder = cell.world.directory / "wal" / cell.daemon.config.name
    cell.world.disk.put(folder / f"{1:016x}{SEGMENT}", bytes(PAGE))
    with _configured(cell, (WalMismatch,), wal_dir=str(folder.parent)) as expected:
        yield expected
    cell.world.disk.empty(folder)


@contextmanager
def _wal_of_another(cell: Cell) -> Iterator[Errors]:
    """Let a daemon start with the WAL of the other shard."""
    with cell.world.disk.mistaken(_wal(cell), _wal(_other(cell))):
        yield (WalMismatch,)


@contextmanager
def _open_folder(cell: Cell, above: bool) -> Iterator[Errors]:
    """Let other users write to the WAL's folder, or (`above`) to its parent folder."""
    folder = _wal(cell).parent if above else _wal(cell)
    mode = folder.stat().st_mode
    folder.chmod(0o777)
    yield (BadPath,)
    folder.chmod(mode)


@contextmanager
def _import(cell: Cell) -> Iterator[Errors]:
    """Let the next start import an export, although an arena or a WAL already exists."""
    cell.daemon.import_path = _export(cell)
    yield (ArenaInUse, WalMismatch)
    cell.daemon.import_path = None


@contextmanager
def _copied_wal(cell: Cell) -> Iterator[Errors]:
    _copy_birth(_wal(cell))
    cell.daemon.as_restored = False
    yield (WalCopied,)


@contextmanager
def _no_birth(cell: Cell) -> Iterator[Errors]:
    """Replace the birth file of a WAL by a folder, and remove the folder later.

    The birth file shows that the WAL is not a copy. It is on the real disk. The next start also
    looks for segments on the real disk, so this function leaves an empty segment there.
    """
    path = _wal(cell) / wal_birth.NAME
    path.unlink()
    path.mkdir()
    yield (BadPath,)
    path.rmdir()
    (_wal(cell) / f"{1:016x}{SEGMENT}").touch()


@contextmanager
def _other_boot(cell: Cell) -> Iterator[Errors]:
    machine = cell.world.machine
    usual, machine.boot_id = machine.boot_id, bytes(16)
    yield (ArenaMismatch,)
    machine.boot_id = usual


@contextmanager
def _other_boot_clock(cell: Cell) -> Iterator[Errors]:
    """Let the boot clock be behind the times in the arena."""
    machine = cell.world.machine
    usual = machine.boot_begun_ns
    machine.boot_begun_ns = cell.world.schedule.now_ns - MS
    yield (ArenaMismatch,)
    machine.boot_begun_ns = usual


def _other(cell: Cell) -> Cell:
    return cell.world.cells[cell.number - 1]


def _anywhere(_: Cell) -> bool:
    return True


def _with_wal(cell: Cell) -> bool:
    return bool(cell.daemon.config.wal_dir)


def _without_wal(cell: Cell) -> bool:
    return not _with_wal(cell)


def _with_another_wal(cell: Cell) -> bool:
    other = _other(cell)
    there = other is not cell and _with_wal(cell)
    return there and any(name.endswith(SEGMENT) for name in cell.world.disk.folder(_wal(other)).now)


def _in_real_time(cell: Cell) -> bool:
    return not cell.virtual


WRONG_STARTS: dict[str, tuple[Callable[[Cell], bool], Callable[[Cell], Wrong]]] = {
    "clock": (_anywhere, _other_clock),
    "clock without an arena": (_with_wal, _other_clock_without_arena),
    "shard": (_anywhere, _other_shard),
    "too small": (_anywhere, _too_small),
    "no WAL": (_with_wal, _no_wal),
    "another WAL": (_without_wal, _another_wal),
    "WAL of another": (_with_another_wal, _wal_of_another),
    "open folder": (_with_wal, partial(_open_folder, above=False)),
    "open parent": (_with_wal, partial(_open_folder, above=True)),
    "import": (_with_wal, _import),
    "copied WAL": (_with_wal, _copied_wal),
    "no birth": (_with_wal, _no_birth),
    "boot id": (_anywhere, _other_boot),
    "boot clock": (_in_real_time, _other_boot_clock),
}
"""For each kind: (function that tells whether a world can have the fault, context that causes
it)."""


def two_starts(cell: Cell, calls: int, lost: bool) -> None:
    """Start two processes of one daemon at the same time: a rival process starts and ends after
    `calls` calls of the first process. `lost`: the arena is gone, so no file exists to lock."""
    if not _stop_at_ease(cell):
        return
    _count(cell, "stop")
    if lost:
        cell.lose_arena()
    daemon = cell.daemon
    daemon.rivalled, daemon.fuse.signal_left = True, calls
    cell.expected = (AlreadyRunning,)
    daemon.start()
    daemon.rivalled, daemon.fuse.signal_left, cell.expected = False, None, ()


def _stop_at_ease(cell: Cell) -> bool:
    """Stop the daemon cleanly, unless a fault affects it. Return False if a fault or a kill
    affected it before or during the stop."""
    disk, daemon = cell.world.disk, cell.daemon
    if not daemon.alive or cell.steadiness()[-1] or cell.may_lose_arena or cell.rotten:
        return False
    daemon.fuse.left = None
    failed = disk.failed
    daemon.stop()
    paths = daemon.paths
    there = all(map(shm.exists, (paths.arena, paths.private)))
    return disk.failed == failed and there


def _copy_birth(folder: Path) -> None:
    """Replace the birth file of a WAL by a copy, so that the WAL looks like a copy."""
    path = folder / wal_birth.NAME
    copied = folder / "copied"
    copied.write_bytes(path.read_bytes())
    copied.rename(path)


def move(cell: Cell) -> None:
    """Stop the daemon, export its arena, and remove arena and WAL. The next start imports the
    export."""
    daemon, disk = cell.daemon, cell.world.disk
    if not _stop_at_ease(cell):
        return
    _count(cell, "stop")
    daemon.import_path, exported = None, _export(cell)
    cell.move()
    daemon.import_path = exported
    if daemon.config.wal_dir:
        _start_refused(cell, "import over a WAL", (WalMismatch,))
        disk.empty(_wal(cell))
    if cell.world.script.setting.durable_namespace:
        with _configured(cell, (WalNeeded,), **NO_WAL) as expected:
            _start_refused(cell, "durability", expected)


def _export(cell: Cell) -> Path:
    """Export the arena of the stopped daemon. Return the path of the export."""
    saved = cell.world.directory / "export"
    with closing(Reader.attach(cell.daemon.paths)) as reader:
        save_export(reader, saved, cell.world.host())
    path = cell.world.directory / f"import{cell.number}" / "export"
    cell.world.disk.put(path, saved.read_bytes())
    return path


def kill_snapshot(cell: Cell, more: int) -> None:
    """Kill the process that writes a snapshot, and the next `more` snapshot processes. Unless
    `more` is 0, kill the daemon as well, because it needs a snapshot once it runs again."""
    _count(cell, "snapshot")
    cell.daemon.doomed_snapshots = more
    if more:
        cell.oracle.causes.add(Status.WAL)
        kill_daemon(cell, 0)
        cell.world.pass_time(ATTEMPTS_NS)
    if cell.daemon.snapshot is not None:
        cell.daemon.snapshot.kill()


# ---- the disk ----------------------------------------------------------------------------------


def disk(cell: Cell, kind: str, errno: int, times: int, span_ns: int) -> None:
    """Let calls of one kind fail: once, for a while, or (with EIO) until the world is healed."""
    trouble = cell.world.disk.troubles[kind] = Trouble(errno, times)
    if errno == EIO and times == FOR_GOOD:
        return

    def heal() -> None:
        if cell.world.disk.troubles.get(kind) is trouble:
            del cell.world.disk.troubles[kind]

    cell.world.schedule.after(span_ns, heal)


def fail_sync(cell: Cell, span_ns: int) -> None:
    """Let a sync fail, and restart the daemon with its arena. Cut the power at a later durable
    answer. All changes before that answer have to be on the medium."""
    disk(cell, "sync", 5, 1, span_ns)
    cell.world.schedule.after(AGAIN_NS + span_ns, partial(_cut_later, cell))


def _cut_later(cell: Cell) -> None:
    if not cell.finishing:
        kill_daemon(cell, 0)
        power_cut(cell, AGAIN_NS, answered=True)


def disk_full(cell: Cell, span_ns: int) -> None:
    """Let the disk be full for a while."""
    cell.world.disk.full = True

    def heal() -> None:
        cell.world.disk.full = False

    cell.world.schedule.after(span_ns, heal)


def short_write(cell: Cell, times: int) -> None:
    """Let the next writes of group commit write only a part of their bytes."""
    cell.world.disk.short_writes += times


def slow_disk(cell: Cell, commit_ns: int, span_ns: int) -> None:
    """Let commits and snapshots take longer for a while."""
    cell.daemon.commit_ns, cell.daemon.snapshot_ns = commit_ns, SLOW_SNAPSHOT * commit_ns
    _count(cell, "disk")
    cell.world.schedule.after(span_ns, cell.daemon.quicken)


def rot(cell: Cell, file: int, byte: float, cut: bool, dead: bool = False) -> None:
    """Change a byte of a WAL file on the medium. `cut`: cut the power soon after that.

    `dead`: change a byte that the newest snapshot made superfluous, in the first segment that a
    recovery reads.
    """
    found = _rot_dead(cell, byte) if dead else cell.world.disk.rot(_wal(cell), file, byte)
    if found is None:
        return
    _count(cell, "disk")
    cell.rots.append(found)
    cell.rotten |= _costs(cell)
    if cut:
        cell.world.schedule.after(AGAIN_NS, partial(power_cut, cell, AGAIN_NS, False))


def _rot_dead(cell: Cell, byte: float) -> tuple[File, int] | None:
    """Change a byte that the newest snapshot made superfluous. Return (file, position); None if no
    such byte exists."""
    files = cell.world.disk.folder(_wal(cell)).now
    snapshots = sorted(name for name in files if name.endswith(SNAPSHOT))
    older = files[snapshots[-1]].older if snapshots else {}
    segments = [files[name] for name in sorted(files) if name.endswith(SEGMENT)]
    begins = [one for one in segments if older.get(one, 0) > PAGE and not one.dirty]
    if not begins:
        return None
    at = PAGE + int(byte * (older[begins[-1]] - PAGE))
    begins[-1].change(at)
    return begins[-1], at


def _wal(cell: Cell) -> Path:
    return Path(cell.daemon.config.wal_dir) / cell.daemon.config.name


def _costs(cell: Cell) -> bool:
    """Return whether the damage may lose changes: it affects both retained snapshots, or records
    that are newer than the beginning of the newest undamaged snapshot."""
    files = cell.world.disk.folder(_wal(cell)).now
    damaged = [file for file, _ in cell.rots]
    snapshots = sorted(name for name in files if name.endswith(SNAPSHOT))
    newest = [_arena_of(cell, files[name]) for name in snapshots[-1:]]
    retained = [name for name in snapshots if _arena_of(cell, files[name]) in newest]
    retained = retained[-SNAPSHOTS_KEPT:]
    sound = [name for name in retained if files[name] not in damaged]
    if not sound:
        return bool(damaged)
    segments = sorted(name for name in files if name.endswith(SEGMENT))
    begin, older = sound[-1].removesuffix(SNAPSHOT), files[sound[-1]].older
    begun = sum(name.removesuffix(SEGMENT) <= begin for name in segments[1:])
    needed = [files[name] for name in segments[begun:]]
    return any(file in needed and not PAGE <= at < older.get(file, 0) for file, at in cell.rots)


def _arena_of(cell: Cell, file: File) -> bytes:
    """Return the uuid of the arena that a WAL file describes. Damage to the uuid is reverted first.
    Only a snapshot of the same arena can replace a snapshot."""
    head = bytearray(file.medium[:PAGE])
    for damaged, at in cell.rots:
        if damaged is file and at < len(head):
            head[at] ^= 1
    begin = ffi.offsetof("struct pg_wal_segment", "uuid")
    return bytes(head[begin : begin + UUID_BYTES])


def lose_file(cell: Cell, file: int) -> None:
    """Remove a file of the WAL, as a careless user does."""
    if cell.world.disk.lose(_wal(cell), file) is not None:
        cell.rotten = True
        _count(cell, "disk")


def ruin(cell: Cell, file: int, byte: float, lost: bool, cut: bool, span_ns: int) -> None:
    """Damage or remove a file of the WAL, and end the daemon at once, so that the next start has to
    read the WAL. `cut`: cut the power, so that the arena is lost as well."""
    if lost:
        lose_file(cell, file)
    else:
        rot(cell, file, byte, cut=False)
    if cut:
        power_cut(cell, span_ns, answered=False)
    else:
        kill_daemon(cell, 0)


# ---- the machine -------------------------------------------------------------------------------


def power_cut(cell: Cell, span_ns: int, answered: bool) -> None:
    """Cut the power: all processes, all memory, and unsynced data of the disk are lost.

    `answered`: the cut happens at the next answer to a durable call.
    """
    if answered:
        cell.at_durable_answer = partial(power_cut, cell, span_ns, False)
        return
    world = cell.world
    _count(cell, "power cut")
    for one in world.cells:
        for client in range(CLIENTS):
            if one.clients[client].alive:
                one.end_client(client)
                world.schedule.after(span_ns + MS, partial(one.begin_client, client))
        one.end_guests(list(one.guests))
        one.end_delivery()
        world.schedule.after(span_ns + MS, one.begin_delivery)
        if one.daemon.alive:
            one.daemon.kill()
        one.daemon.fuse.left = None
        one.lose_arena()
    world.disk.cut()
    for one in world.cells:
        if one.rots:
            one.rotten |= _costs(one)
    world.machine.reboot()
    for one in world.cells:
        one.renew_local_subscribers()


def cut_at_copy(cell: Cell, client: int, span_ns: int) -> None:
    """Let messages of a client arrive twice while the disk is slow. Cut the power at the next
    durable answer. The change must be on disk even if the daemon has answered the second copy of a
    message."""
    disturb(cell, client, "double", 3, 0)
    slow_disk(cell, COPY_COMMIT_NS, span_ns)
    power_cut(cell, AGAIN_NS, answered=True)


def lose_name(cell: Cell, private: bool) -> None:
    """Remove the name of an arena file."""
    if cell.daemon.alive:
        _count(cell, "name")
        cell.may_lose_arena = True
        cell.oracle.causes.add(Status.ARENA)
        steady = cell.steadiness()
        cell.world.schedule.after(NAMED_AGAIN_NS, partial(cell.named_again, steady))
        paths = cell.daemon.paths
        (MOUNT / (paths.private if private else paths.arena)[1:]).unlink(missing_ok=True)


def step_wall(cell: Cell, by_ns: int) -> None:
    """Move the wall clock by `by_ns`."""
    _count(cell, "clock")
    wall_ns = cell.world.machine.wall_ns(cell.world.schedule.now_ns)
    for one in cell.world.cells:
        one.oracle.wall_steps(wall_ns)
        one.schedules.wall_moved(wall_ns, wall_ns + by_ns)
    cell.world.wall_is_wrong(abs(by_ns))
    cell.world.machine.step_wall(by_ns)


def swing_wall(cell: Cell, by_ns: int) -> None:
    """Move the wall clock forward by `by_ns`, back by twice this time, and forward again."""
    step_wall(cell, by_ns)
    cell.world.schedule.after(300 * MS, partial(step_wall, cell, -2 * by_ns))
    cell.world.schedule.after(600 * MS, partial(step_wall, cell, by_ns))


def drift(cell: Cell, ppm: int) -> None:
    """Let the wall clock drift."""
    _count(cell, "clock")
    wall_ns = cell.world.machine.wall_ns(cell.world.schedule.now_ns)
    for one in cell.world.cells:
        one.schedules.wall_moved(wall_ns, wall_ns)
    cell.world.wall_is_wrong(FAR_NS // 1000)
    cell.world.machine.drift(ppm)


def suspend(cell: Cell, span_ns: int) -> None:
    """Suspend the machine."""
    _count(cell, "clock")
    cell.world.machine.suspend(span_ns)


STEPS: dict[str, Callable[..., None]] = {
    function.__name__.rstrip("_"): function
    for function in (
        disturb, storm, disturb_subscriber, break_, freeze_client, freeze_subscriber, kill_client,
        leave, reuse_pid, drop_session, drop_busy, ask_durably, lose_answer, crowd, kill_daemon,
        kill_start, freeze_daemon, stop_daemon, terminate, drain, two_starts, wrong_start, move,
        kill_snapshot, disk, fail_sync, disk_full, short_write, slow_disk, rot, lose_file, ruin,
        power_cut, cut_at_copy, lose_name, step_wall, swing_wall, drift, suspend, cut,
        kill_subscriber, bar,
    )
}  # fmt: skip
