"""The commands wal ls, cat, verify, hold, holds and release. They need no running daemon."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from purgatoryd.cli import units
from purgatoryd.cli.arena import print_records
from purgatoryd.cli.exits import Command, Exit, Group
from purgatoryd.cli.options import (
    emit,
    json_option,
    key_record,
    key_text,
    name_option,
    payload_record,
    visible,
)

if TYPE_CHECKING:
    from purgatoryd.shm_layout.errors import WalDamaged
    from purgatoryd.shm_layout.retention_holds import RetentionHold
    from purgatoryd.shm_layout.wal import Frame, Walk
    from purgatoryd.shm_layout.wire import Key

_WAL: dict[str, Any] = {
    "type": click.Path(file_okay=False, path_type=Path),
    "envvar": "PURGATORYD_WAL_DIR",
    "show_envvar": True,
}
VERIFICATIONS = 3
"""Number of reads that must all find damage before it is reported."""
KEYS_MOST = 100_000
"""Maximum number of timers whose keys `wal cat` remembers for later records."""
wal_option = click.option(
    "--wal-dir", **_WAL, required=True, help="Directory of the WALs, as for `purgatoryd run`."
)


@click.group("wal", cls=Group)
def wal_command() -> None:
    """Inspect a write-ahead log (WAL), and retain it for readers.

    WAL_DIR/NAME contains segments, in which each change has a log sequence number (LSN), and
    snapshots, from which a recovery starts.
    """


def folder(wal_dir: Path, name: str) -> Path:
    """Return the directory of a daemon's WAL. Raises BadPath, InvalidName, TableBroken."""
    from purgatoryd.shm_layout.errors import BadPath
    from purgatoryd.shm_layout.paths import check_name
    from purgatoryd.shm_layout.shards import read_table
    from purgatoryd.shm_layout.wal import segments, snapshots

    path = wal_dir / check_name(name)
    if segments(path) or snapshots(path):
        return path
    # An unreadable directory would otherwise look like a missing WAL.
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise BadPath(str(path), os.strerror(errno.EACCES))
    table = read_table(wal_dir, name)
    shards = f"; its shards have a WAL each: {', '.join(table.daemons)}" if table else ""
    raise BadPath(str(path), f"is not a WAL{shards}")


def folders(wal_dir: Path, name: str) -> list[Path]:
    """Return the WAL directories of a deployment's shards, oldest first, or the WAL directory of a
    daemon without shards.

    Raises the errors of folder().
    """
    from purgatoryd.shm_layout.paths import check_name
    from purgatoryd.shm_layout.shards import wals_of

    return wals_of(wal_dir, check_name(name)) or [folder(wal_dir, name)]


# ---- ls --------------------------------------------------------------------------------------


def file_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a record for each file, snapshots first. Skip files that the daemon has removed
    since."""
    from purgatoryd.shm_layout.wal import header_of, segments, snapshots

    for kind, files in (("snapshot", snapshots(path)), ("segment", segments(path))):
        for file in files:
            with passing_by(file.path):
                header = header_of(file.path)
                yield {
                    "file": file.path.name,
                    "kind": kind,
                    "lsn": file.lsn,
                    "bytes": file.bytes,
                    "begun_at": units.format_wall(int(header.wall_ns)),
                    "epoch": int(header.epoch),
                    "uuid": bytes(header.uuid).hex(),
                }


@contextmanager
def passing_by(path: Path) -> Iterator[None]:
    """Return a context manager for reading a file. The context ends without an error if the daemon
    has removed the file."""
    from purgatoryd.shm_layout.errors import BadPath
    from purgatoryd.shm_layout.wal import has_gone

    try:
        yield
    except BadPath:
        if not has_gone(path):
            raise


@wal_command.command("ls", cls=Command)
@name_option
@wal_option
@json_option
def ls_command(name: str, wal_dir: Path, as_json: bool) -> None:
    """List WAL segments and snapshots.

    Recovery starts with a snapshot and redoes the segments from the snapshot's LSN on. Files with
    the same uuid belong to one arena. A recovery or a change of sizes starts a new uuid.
    """
    records = list(file_records(folder(wal_dir, name)))
    if not as_json:
        records = [
            {n: record[n] for n in ("file", "lsn", "bytes", "begun_at")} for record in records
        ]
    print_records(records, f"WAL of {name}", as_json)


# ---- cat -------------------------------------------------------------------------------------


def frames_of(paths: Iterable[Path]) -> Iterator[tuple[bytes, Frame]]:
    """Yield the records of files in order, each with the uuid of its arena, read from the disk.
    Damage is an error only if each of several reads finds it. Raises WalDamaged, WalMismatch."""
    from purgatoryd.shm_layout.layout import WalkState

    for walk in walks(paths):
        yield from ((walk.uuid, frame) for frame in walk.frames())
        for _ in range(VERIFICATIONS - 1):
            if walk.state == WalkState.DAMAGED:
                last = walk.lsn
                walk.enter_again()
                yield from ((walk.uuid, frame) for frame in walk.frames() if frame.lsn > last)
        walk.check()


def named(frames: Iterable[tuple[bytes, Frame]]) -> Iterator[tuple[Frame, Key | None]]:
    """Yield each record with its key. Tickets of different arenas belong to different timers."""
    keys, newest = TimerKeys(), b""
    for uuid, frame in frames:
        if uuid != newest:
            keys, newest = TimerKeys(), uuid
        yield frame, keys.of(frame)


def walks(paths: Iterable[Path]) -> Iterator[Walk]:
    """Yield a walk at the start of each file, in order. Skip files that the daemon has removed
    since."""
    from purgatoryd.shm_layout.wal import Walk

    walk = Walk(direct=True)
    for path in paths:
        before, walk = walk, Walk(direct=True)
        with passing_by(path):
            walk = entered(before, path)
            yield walk


def entered(walk: Walk, path: Path) -> Walk:
    """Return a walk at the start of `path`: `walk` itself if the file is another segment of the
    same uuid, otherwise a new walk."""
    from purgatoryd.shm_layout.wal import SEGMENT, Walk, uuid_of

    segments = walk.path is not None and {walk.path.suffix, path.suffix} == {SEGMENT}
    if not segments or uuid_of(path) != walk.uuid:
        walk = Walk(direct=walk.direct)
    walk.enter(path)
    return walk


class TimerKeys:
    """Keys of the newest timers in the records read so far."""

    def __init__(self, most: int = KEYS_MOST) -> None:
        self._most = most
        self._keys: dict[int, Key] = {}

    def of(self, frame: Frame) -> Key | None:
        """Return the key of a record, or the key that an earlier record has for its ticket; None =
        there is neither."""
        from purgatoryd.shm_layout.wal import contents

        ticket, key = frame.fields.get("ticket"), contents(frame).key
        if ticket is None:
            return key
        ticket >>= 8 if frame.kind in ("entry", "job") else 0
        if key is None:
            return self._keys.get(ticket)
        self._keys[ticket] = key
        if len(self._keys) > self._most:
            del self._keys[next(iter(self._keys))]
        return key


def frame_record(frame: Frame, key: Key | None) -> dict[str, Any]:
    """Return a record and its key for JSON."""
    from purgatoryd.shm_layout.wal import contents, explained

    fields = {n: v for n, v in explained(frame).items() if n != "key_type" and "_len" not in n}
    record: dict[str, Any] = {"lsn": frame.lsn, "kind": frame.kind, **fields, **frame.timestamps}
    if frame.replaced:
        record["replaced_timestamps"] = frame.replaced
    if frame.kind == "metrics":
        record["histograms"] = histogram_records(frame)
    if frame.asked:
        record["asked"] = frame.asked
    found = contents(frame)
    if found.name is not None:
        record["name"] = found.name
    if key is not None:
        record |= key_record(key)
    if found.payload is not None:
        record |= payload_record(found.payload)
    return record


def histogram_records(frame: Frame) -> dict[str, dict[str, int]]:
    """Return the histograms of a METRICS record for JSON, by name."""
    from purgatoryd.shm_layout.metrics import recorded

    found = recorded(frame.fields["histogram_count"], frame.rest)
    return {
        name: {
            "count": one.count, "sum_ns": one.sum_ns, "p50_ns": one.quantile(0.5),
            "p99_ns": one.quantile(0.99), "max_ns": one.max_ns,
        }
        for name, one in found.items()
    }  # fmt: skip


def frame_text(frame: Frame, key: Key | None) -> str:
    """Return a record and its key as a line of text."""
    from purgatoryd.shm_layout.wal import contents, explained

    found, fields = contents(frame), explained(frame)
    detail = visible(found.name or "") if key is None else key_text(key)
    shown = ("ticket", "topic", "group", "position", "watermark", "row", "job_state", "cause",
             "dead_reason", "leases", "failures", "upto", "start_lsn", "session", "sequence",
             "count", "bucket_count")  # fmt: skip
    rest = " ".join(f"{n}={fields[n]}" for n in shown if n in fields)
    return f"{frame.lsn:>12} {frame.kind:<10} {detail:<36} {rest}".rstrip()


@wal_command.command("cat", cls=Command)
@name_option
@click.option(
    "--wal-dir", **_WAL, help="Directory of the WALs, as for `purgatoryd run`; not with FILES."
)
@click.option("--from", "from_lsn", type=units.Whole(0), default=0, help="First LSN.")
@click.option("--kind", help="Only records of this kind: arm, fire, end, ...")
@click.option("--limit", type=units.Whole(1), help="Maximum number of records.")
@click.argument("files", nargs=-1, type=click.Path(dir_okay=False, exists=True, path_type=Path))
@json_option
def cat_command(
    name: str, wal_dir: Path | None, from_lsn: int, kind: str | None, limit: int | None,
    files: tuple[Path, ...], as_json: bool,
) -> None:  # fmt: skip
    """Print the records of all WAL segments, or of FILES.

    FILES may also be snapshots and exports. The command reads from the disk, bypassing the page
    cache, and omits records that a crash left incomplete. While the daemon runs, records
    after `committed_lsn` of `purgatoryd stats` may be written but not synced.

    A record with the ticket of a timer shows the timer's key if the files have the record that
    armed the timer. The command remembers the keys of the 100,000 newest timers. The `job_state` of
    a job is waiting, leased, delayed, dead or ended; `dead_reason` and `cause` say why.
    """
    from purgatoryd.shm_layout.errors import InvalidSetting
    from purgatoryd.shm_layout.wal import KINDS, segments

    if kind is not None and kind not in KINDS.values():
        raise InvalidSetting("kind", kind, f"one of {', '.join(KINDS.values())}", "argument")
    paths = files
    if not files:
        if wal_dir is None:
            raise click.UsageError("Give either --wal-dir or FILES.")
        paths = tuple(file.path for file in segments(folder(wal_dir, name)))
    read = named(frames_of(paths))
    found = (one for one in read if one[0].lsn >= from_lsn and kind in (None, one[0].kind))
    for frame, key in islice(found, limit):
        emit(frame_record(frame, key), frame_text(frame, key), as_json)


# ---- verify ----------------------------------------------------------------------------------


def refuse_missing(path: Path) -> None:
    """Raise WalDamaged if no snapshot reaches the first segment, because older segments are then
    missing."""
    from purgatoryd.shm_layout.errors import WalDamaged
    from purgatoryd.shm_layout.wal import refuse_lost_segments, segments, snapshots

    refuse_lost_segments(path)
    first = min((file.lsn for file in segments(path)), default=0)
    last = max((file.lsn for file in snapshots(path)), default=0)
    if first > last:
        detail = "the segment after the snapshot is missing" if last else "no snapshot is left"
        raise WalDamaged(str(path), detail, 0, 0, last, first - 1)


def refuse_short(path: Path, walk: Walk, confirmed: dict[bytes, int]) -> None:
    """Raise WalDamaged if the last segment ends before a record that a snapshot confirms.

    `walk`: the walk at the end of the last segment. `confirmed`: newest LSN on disk, by uuid of the
    arena.
    """
    from purgatoryd.shm_layout.errors import WalDamaged

    last = confirmed.get(walk.uuid, 0)
    if walk.lsn < last:
        detail = "confirmed records at the end are missing"
        raise WalDamaged(str(path), detail, 0, 0, walk.lsn + 1, last)


class Verification:
    """The result of reading each file of a WAL to its end, from the disk."""

    def __init__(self, path: Path) -> None:
        """Raise WalDamaged for the first damage that would make a recovery lose records."""
        self.records: list[dict[str, Any]] = []
        """A record for each undamaged file."""
        self.harmless: list[WalDamaged] = []
        """Damage in parts that a recovery does not need, because an undamaged snapshot is newer."""
        self._live_lsn = 0  # first LSN that a recovery needs
        self._confirmed: dict[bytes, int] = {}  # newest LSN that a snapshot confirms, by uuid
        self._read_snapshots(path)
        last = self._read_segments(path)
        refuse_missing(path)
        refuse_short(path, last, self._confirmed)

    def _read_snapshots(self, path: Path) -> None:
        from purgatoryd.shm_layout.errors import WalDamaged
        from purgatoryd.shm_layout.wal import Walk, snapshots

        for file in snapshots(path):
            with passing_by(file.path):
                try:
                    self._read(Walk(direct=True), file.path)
                    self._live_lsn = file.lsn
                except WalDamaged as damage:
                    self.harmless.append(damage)
        if self.harmless and not self._live_lsn:
            raise self.harmless[0]

    def _read_segments(self, path: Path) -> Walk:
        """Read all segments; return the walk at the end of the newest one."""
        from purgatoryd.shm_layout.errors import WalDamaged
        from purgatoryd.shm_layout.wal import Walk, around, segments

        files, walk = segments(path), Walk(direct=True)
        older, _ = around(files, self._live_lsn)
        for file in files:
            with passing_by(file.path):
                try:
                    walk = self._read(walk, file.path)
                except WalDamaged as damage:
                    if file not in older:
                        raise
                    self.harmless.append(damage)
                    walk = Walk(direct=True)
        return walk

    def _read(self, walk: Walk, path: Path) -> Walk:
        walk = entered(walk, path)
        count = self._count(walk)
        while damage := walk.skip(self._live_lsn):
            self.harmless.append(damage)
            count += self._count(walk)
        walk.check()
        self.records.append({"file": path.name, "records": count, "end": walk.state.name.lower()})
        return walk

    def _count(self, walk: Walk) -> int:
        count = 0
        for frame in walk.frames():
            count += 1
            if frame.kind == "last":
                self._confirmed[walk.uuid] = frame.fields["end_lsn"]
        return count


def verified(path: Path) -> Verification:
    """Verify a WAL. Damage is reported only if each of several reads finds it.

    While a daemon writes, a read may return an old version of one part of a file, but a newer
    version of the part before.
    """
    from purgatoryd.shm_layout.errors import WalDamaged

    for _ in range(VERIFICATIONS - 1):
        with suppress(WalDamaged):
            if not (found := Verification(path)).harmless:
                return found
    return Verification(path)


@wal_command.command("verify", cls=Command)
@name_option
@wal_option
@json_option
def verify_command(name: str, wal_dir: Path, as_json: bool) -> int:
    """Read every file of the WAL to its end, and report damage.

    Exit code 5 means that a file is damaged or missing. The command reads from the disk, bypassing
    the page cache. An incomplete group at the end of the newest segment, as after a power cut, is
    not damage. Damage before the newest undamaged snapshot also leads to exit code 5, but recovery
    does not need the damaged records.
    """
    from purgatoryd.shm_layout.filesystems import is_in_memory

    path = folder(wal_dir, name)
    found = verified(path)
    verdict = "damaged, but recovery loses nothing" if found.harmless else "no damage"
    print_records(found.records, f"WAL of {name}: {verdict}", as_json)
    for damage in found.harmless:
        click.echo(f"purgatoryd: {damage.place}; recovery does not need it", err=True)
    if is_in_memory(path):
        click.echo(
            f"purgatoryd: {path} is on a file system in memory and will not survive a reboot",
            err=True,
        )
    return Exit.BROKEN if found.harmless else Exit.DONE


# ---- retention holds -------------------------------------------------------------------------


@wal_command.command("hold", cls=Command)
@name_option
@wal_option
@click.option(
    "--cap", type=units.Size(), default=0, help="Drop the hold when it retains more than this."
)
@click.argument("hold")
@click.argument("lsn", type=units.Whole(1, 2**64 - 1))
@json_option
def hold_command(name: str, wal_dir: Path, cap: int, hold: str, lsn: int, as_json: bool) -> None:
    """Retain the WAL from LSN on for a reader, under the name HOLD.

    Repeat the command with another LSN to move the hold.
    """
    from purgatoryd.shm_layout.retention_holds import RetentionHold, set_hold

    held = RetentionHold(hold, lsn, cap)
    set_hold(folder(wal_dir, name), held, there=True)
    emit(hold_record(held), f"{hold} retains the WAL from LSN {lsn} on", as_json)


def hold_record(hold: RetentionHold) -> dict[str, Any]:
    """Return a retention hold for JSON and for the table."""
    return {
        "hold": hold.name, "lsn": hold.lsn, "cap_bytes": hold.cap_bytes, "dropped": hold.dropped
    }  # fmt: skip


@wal_command.command("release", cls=Command)
@name_option
@wal_option
@click.argument("hold")
@json_option
def release_command(name: str, wal_dir: Path, hold: str, as_json: bool) -> int:
    """Release HOLD; exit code 1 if there is no such retention hold."""
    from purgatoryd.shm_layout.retention_holds import remove_hold

    found = remove_hold(folder(wal_dir, name), hold)
    result = "removed" if found else "unknown"
    emit({"hold": hold, "release": result}, f"{hold}: {result}", as_json)
    return Exit.DONE if found else Exit.NEGATIVE


@wal_command.command("holds", cls=Command)
@name_option
@wal_option
@json_option
def holds_command(name: str, wal_dir: Path, as_json: bool) -> None:
    """List the retention holds.

    A hold is "dropped" if it would have retained more than its cap. A dropped hold retains nothing.
    """
    from purgatoryd.shm_layout.retention_holds import read_holds

    holds = read_holds(folder(wal_dir, name)).values()
    print_records([hold_record(hold) for hold in holds], f"retention holds of {name}", as_json)
