"""The arena in Python: `Arena` for the only writer, `Reader` for every other process.

Python calls the C core once per batch, message or page, never once per timer.
"""

from __future__ import annotations

import enum
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.errors import (
    ArenaBroken,
    ArenaMismatch,
    ArenaNotReady,
    ArenaTooLarge,
    BadPath,
    InvalidSetting,
    OtherAbi,
)
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.layout import (
    ABI,
    LAYOUT_ID,
    MESSAGE_MAX,
    ArenaState,
    BulkLoadState,
    DaemonState,
    Degraded,
    LatePolicy,
    Measured,
    PlacementMode,
    PlacementPart,
    ScheduleState,
    Status,
    SweepChange,
    SweepState,
    WalState,
    WireError,
    converts,
    fields,
    is_padding,
    is_reserved,
    kernel_number,
    size_of,
)
from purgatoryd.shm_layout.paths import Paths
from purgatoryd.shm_layout.shm import ArenaFile, FreeMemory, Moved, refuse_too_large
from purgatoryd.shm_layout.wire import NamespaceSettings

ARENA_MODE = 0o640
PRIVATE_MODE = 0o600
NONE_NS = 2**63 - 1
"""Value of `next_ns` when nothing is armed."""
COUNTED = [name for name, _, _ in fields("pg_metrics") if not is_padding(name)]
"""Fields of struct pg_metrics."""

_PAGE_BYTES = 1 << 20
_NIL = 0xFFFFFFFF


def arena_file_bytes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return (size of the arena file, size of the private arena file) for `config`, in bytes."""
    struct = _config(config)
    return lib.pg_arena_bytes(struct), lib.pg_private_bytes(struct)


def _config(values: Mapping[str, Any]) -> Any:
    return ffi.new("struct pg_config *", {"layout_id": LAYOUT_ID, **values})


def text(chars: Any) -> str:
    """Return a zero-terminated C string as str."""
    return str(ffi.string(chars).decode())


def parts_text(parts: PlacementPart) -> str | None:
    """Return the names of `parts`, separated by commas; None if there are no parts."""
    return ", ".join(str(part.name).lower() for part in parts) or None


def broken(fault: Any) -> ArenaBroken:
    """Return the error for a broken invariant that the core found."""
    return ArenaBroken(
        text(fault.part), text(fault.detail), fault.where, fault.expected, fault.found
    )


@dataclass(frozen=True, slots=True)
class Topic:
    """A row of the topic table."""

    name: str
    namespace_row: int
    incarnation: int
    sequence: int
    live: int
    slack_ns: int
    """Slack of new timers that are added without one."""
    late_policy: LatePolicy
    """End of timers that are later than `grace_ns`."""
    grace_ns: int
    """Grace of the late policy; 0 if it is FIRE."""
    priority: int
    """Priority of jobs whose timers give none."""
    paused: bool
    """True if the topic itself is paused; its namespace may be paused as well."""
    backlog: int
    """Due timers that have not fired: they are paused, or the daemon catches up."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """A row of the namespace table."""

    name: str
    live: int
    bytes: int
    shard: int
    settings: NamespaceSettings
    created_uid: int
    """Uid whose message created the namespace; PG_NIL = unknown."""


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """The state of a consumer group: its jobs by state, the age of the oldest one without an ack,
    dead letters excluded, 0 = none; and the number of jobs and dead letters that were removed
    unfinished."""

    namespace: str
    name: str
    waiting: int
    leased: int
    delayed: int
    dead: int
    oldest_ns: int
    incarnation: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Account:
    """Usage of a uid over all namespaces: armed timers (`live`), bytes, and rows of the shared
    tables."""

    uid: int
    live: int
    bytes: int
    topics: int
    namespaces: int
    sessions: int
    watch_keys: int
    watches: int
    operations: int
    bulk_loads: int
    bulk_load_blocks: int


@dataclass(frozen=True, slots=True)
class Watermark:
    """A watch key."""

    namespace: str
    key: wire.Key
    watermark: int
    error: int
    """Error code of the failed key; 0 = the key has not failed."""
    watched: bool
    forgotten: bool
    """True if the key is removed when its last watcher leaves."""


@dataclass(frozen=True, slots=True)
class KnownSweep:
    """A sweep that the daemon remembers. `uid`: the uid that began it."""

    id: bytes
    uid: int
    change: SweepChange
    namespace: str


@dataclass(frozen=True, slots=True)
class KnownBulkLoad:
    """A bulk load. `rows` is the number of rows that are done; `upto` is 1 + the number of the
    highest row that is done."""

    id: bytes
    state: BulkLoadState
    fencing_token: int
    rows: int
    upto: int
    uid: int
    namespace_row: int
    used_boot_ns: int


@dataclass(frozen=True, slots=True)
class KnownCursor:
    """A cursor of a subscriber."""

    name: str
    namespace_row: int
    uid: int
    session: int
    """Session that opened the cursor last; it may have ended."""
    used_boot_ns: int
    incarnation: int
    """Topics with this incarnation or a later one are younger than the cursor."""
    every_topic: bool
    positions: Mapping[int, tuple[int, int]]
    """(incarnation, sequence of the newest committed notice) by row of the topic."""

    def committed(self, row: int, topic: Topic) -> int | None:
        """Return the sequence of the newest committed notice of a topic in row `row`; None if the
        cursor does not cover the topic."""
        incarnation, sequence = self.positions.get(row, (0, 0))
        if incarnation == topic.incarnation:
            return sequence
        younger = self.every_topic and topic.incarnation >= self.incarnation
        return 0 if younger and topic.namespace_row == self.namespace_row else None

    def lag(self, topics: Mapping[int, Topic]) -> int:
        """Return the number of notices that are not committed. `topics`: all topics, by row."""
        committed = ((topic, self.committed(row, topic)) for row, topic in topics.items())
        return sum(max(0, t.sequence - done) for t, done in committed if done is not None)


@dataclass(frozen=True, slots=True)
class Placed:
    """struct pg_placement, with CPUs and NUMA nodes as the kernel numbers them. None = any CPU or
    node."""

    mode: PlacementMode
    node: int | None
    memory_node: int | None
    reaper_cpu: int | None
    applied: PlacementPart
    clamped: PlacementPart
    pages_sampled: int = 0
    pages_elsewhere: int = 0

    @property
    def home(self) -> int | None:
        """NUMA node for processes that work with the daemon: the node of the arena, or the node of
        the daemon's threads if the arena has none."""
        return self.node if self.memory_node is None else self.memory_node


def slots_used(metrics: Any) -> int:
    """Return the number of slots in use. `metrics`: the struct pg_metrics of an arena."""
    return int(metrics.live + metrics.parked + metrics.outcomes + metrics.unique_keys)


class Handle:
    """A mapped arena. The writer's handle also has the private arena file."""

    def __init__(self, arena: ArenaFile, private: ArenaFile | None) -> None:
        self.file = arena
        self._private = private
        self._memory = ffi.new("uint8_t[]", lib.pg_handle_bytes())
        self._a = ffi.cast("struct pg_arena *", self._memory)
        writable = private is not None
        self._base = ffi.from_buffer(arena.memory, require_writable=writable)
        self._secret = (
            ffi.from_buffer(private.memory, require_writable=True) if private else ffi.NULL
        )
        self._fault = ffi.new("struct pg_fault *")

    def _attach(self, layout_id: int = LAYOUT_ID) -> None:
        attach = lib.pg_attach if layout_id == LAYOUT_ID else lib.pg_attach_previous
        private_bytes = self._private.bytes if self._private else 0
        if not attach(
            self._a, self._base, self.file.bytes, self._secret, private_bytes, layout_id,
            self._fault,
        ):  # fmt: skip
            raise self._mismatch(text(self._fault.detail))

    def _mismatch(self, detail: str) -> ArenaMismatch:
        name = self.file.name
        if detail not in ("ABI major", "layout id"):
            return ArenaMismatch(name, detail, self._fault.expected, self._fault.found)
        header = ffi.cast("struct pg_header *", self._base)
        found = (header.abi_major, header.abi_minor)
        if found == ABI:  # another build of the same version, with another layout
            return OtherAbi(name, "layout id", LAYOUT_ID, header.layout_id)
        return OtherAbi(name, "ABI", *(f"{major}.{minor}" for major, minor in (ABI, found)))

    @property
    def struct(self) -> Any:
        """struct pg_arena, which the functions of the core take as argument."""
        return self._a

    @property
    def wal_buffer(self) -> Any:
        """struct pg_wal_buffer in the mapped arena file; None if the arena has no WAL."""
        wal_buffer = lib.pg_wal_buffer_of(self._a)
        return wal_buffer if wal_buffer != ffi.NULL else None

    @property
    def uuid(self) -> bytes:
        """Identity of the arena, 16 bytes."""
        return bytes(self.header.uuid)

    @property
    def header(self) -> Any:
        """struct pg_header in the mapped arena file."""
        return lib.pg_header_of(self._a)

    @property
    def metrics(self) -> Any:
        """struct pg_metrics in the mapped arena file."""
        return lib.pg_metrics_of(self._a)

    @property
    def histograms(self) -> Any:
        """struct pg_histogram[] in the mapped arena file, in the order of enum pg_histogram_id."""
        return lib.pg_histograms_of(self._a)

    @property
    def purgatory(self) -> Any:
        """struct pg_purgatory in the mapped arena file."""
        return self.rows(lib.PG_R_PURGATORY, "pg_purgatory")

    def watch_fill(self) -> dict[str, int]:
        """Return the numbers of used watch records and watch keys, and their limits, by name."""
        regions, free = self.header.regions, self.purgatory
        records, keys = regions[lib.PG_R_WATCHES].count, regions[lib.PG_R_WATERMARKS].count
        return {
            "watch_records_max": records,
            "watch_records": records - free.free_watches,
            "watch_keys_max": keys,
            "watch_keys": keys - free.free_watermarks,
        }

    def rows(self, region: int, struct: str) -> Any:
        """Return a pointer to the elements of a region (PG_R_...) in the mapped arena file."""
        return ffi.cast(f"struct {struct} *", self._base + self.header.regions[region].offset)

    def topic_row(self, namespace: str, topic: str) -> int:
        """Return the row of a topic; PG_NIL if it does not exist."""
        name = topic.encode()
        row = lib.pg_find_topic(self._a, self.namespace_row(namespace), name, len(name))
        return int(row)

    def namespace_row(self, namespace: str) -> int:
        """Return the row of a namespace; PG_NIL if it does not exist."""
        name = namespace.encode()
        return int(lib.pg_find_namespace(self._a, name, len(name)))

    def topics(self) -> Iterator[Topic]:
        """Yield the rows of the topic table that are in use."""
        yield from self.topics_by_row().values()

    def topics_by_row(self) -> dict[int, Topic]:
        """Return the rows of the topic table that are in use, by row number."""
        rows = ((row, self.topic_at(row)) for row in range(self.topic_rows))
        return {row: topic for row, topic in rows if topic is not None}

    @property
    def topic_rows(self) -> int:
        """Number of rows of the topic table."""
        return int(self.header.regions[lib.PG_R_TOPICS].count)

    def topic_at(self, row: int) -> Topic | None:
        """Return the topic in a row of the topic table; None if the row is not in use, or if
        another topic took it during the read."""
        t = self.rows(lib.PG_R_TOPICS, "pg_topic")[row]
        if not (length := t.name_len):
            return None
        birth, name = t.incarnation, bytes(ffi.buffer(t.name, length - 1))
        late = LatePolicy(t.late % (1 << lib.PG_LATE_SHIFT)), t.late >> lib.PG_LATE_SHIFT
        backlog = self.rows(lib.PG_R_BACKLOGS, "pg_backlog")[row].count
        topic = (t.namespace_row, birth, t.sequence, t.live, t.slack_ns, *late, t.priority,
                 bool(t.paused), backlog)  # fmt: skip
        same = (t.name_len, t.incarnation) == (length, birth)
        return Topic(name.decode(), *topic) if same else None

    def namespaces(self) -> dict[int, Namespace]:
        """Return the namespaces that exist, by row number."""
        region = self.header.regions[lib.PG_R_NAMESPACES]
        rows = self.rows(lib.PG_R_NAMESPACES, "pg_namespace")
        used = (i for i in range(region.count) if rows[i].name_len)
        return {
            i: Namespace(
                bytes(ffi.buffer(rows[i].name, rows[i].name_len)).decode(),
                rows[i].live,
                rows[i].bytes,
                rows[i].shard,
                NamespaceSettings(
                    rows[i].owner_uid, rows[i].durability, rows[i].quota_timers,
                    rows[i].quota_bytes, rows[i].quota_ops, rows[i].park_beyond_ns,
                    rows[i].late_per_s, rows[i].paused,
                ),
                rows[i].created_uid,
            )
            for i in used
        }  # fmt: skip

    def name_fills(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (used rows, all rows) of the namespace table and of the topic table, without the
        rows of reserved namespaces."""
        namespaces, topics = lib.pg_namespace_fill(self._a), lib.pg_topic_fill(self._a)
        return (namespaces.used, namespaces.rows), (topics.used, topics.rows)

    def namespaces_of_users(self) -> list[Namespace]:
        """Return the namespaces that exist, except the reserved ones, in which the daemon publishes
        notices about itself and its clients."""
        return [n for n in self.namespaces().values() if not is_reserved(n.name)]

    def consumer_groups(self) -> Iterator[ConsumerGroup]:
        """Yield the consumer groups."""
        names = {row: namespace.name for row, namespace in self.namespaces().items()}
        groups = self.rows(lib.PG_R_GROUPS, "pg_consumer_group")
        jobs = self.rows(lib.PG_R_JOBS, "pg_job")
        for row in range(self.header.regions[lib.PG_R_GROUPS].count):
            g = groups[row]
            if g.name_len and g.incarnation:
                now_ns, oldest = self.header.now_ns, g.oldest
                fired_ns = now_ns if oldest == lib.PG_NIL else jobs[oldest].fired_ns
                yield ConsumerGroup(
                    names.get(g.namespace_row, ""),
                    bytes(ffi.buffer(g.name, g.name_len)).decode(),
                    g.waiting, g.leased, g.delayed, g.dead,
                    max(0, now_ns - fired_ns), g.incarnation, g.dropped,
                )  # fmt: skip

    def accounts(self) -> Iterator[Account]:
        """Yield the accounts of all uids that have or had an account row, or that created a name or
        a bulk load."""
        topics = self._created(lib.PG_R_TOPICS, "pg_topic")
        namespaces = self._created(lib.PG_R_NAMESPACES, "pg_namespace")
        region = self.header.regions[lib.PG_R_ACCOUNTS]
        rows = self.rows(lib.PG_R_ACCOUNTS, "pg_account")
        known = {rows[i].uid: rows[i] for i in range(region.count) if rows[i].in_use}
        bulk_loads, blocks = self._bulk_loaded()
        created = {*topics, *namespaces, *bulk_loads}
        for uid in [*known, *sorted(created - {*known, lib.PG_NIL})]:
            row = known.get(uid)
            live, held = (row.live, row.bytes) if row else (0, 0)
            shared = (0, 0, 0, 0)
            if row:
                shared = (row.sessions, row.watch_keys, row.watches, row.operations)
            yield Account(
                uid, live, held, topics[uid], namespaces[uid], *shared, bulk_loads[uid], blocks[uid]
            )

    def _bulk_loaded(self) -> tuple[Counter[int], Counter[int]]:
        """Count the bulk loads of each uid, and the blocks that their rows use."""
        bulk_loads: Counter[int] = Counter()
        blocks: Counter[int] = Counter()
        region = self.header.regions[lib.PG_R_BULK_LOADS]
        rows = self.rows(lib.PG_R_BULK_LOADS, "pg_bulk_load")
        for i in range(region.count):
            if rows[i].state:
                bulk_loads[rows[i].uid] += 1
                blocks[rows[i].uid] += rows[i].blocks
        return bulk_loads, blocks

    def _created(self, region: int, struct: str) -> Counter[int]:
        """Count the rows of a table of names by the uid whose records created them."""
        rows = self.rows(region, struct)
        count = self.header.regions[region].count
        return Counter(rows[i].created_uid for i in range(count) if rows[i].name_len)

    def bulk_loads(self) -> Iterator[KnownBulkLoad]:
        """Yield the bulk loads that the daemon remembers."""
        region = self.header.regions[lib.PG_R_BULK_LOADS]
        rows = self.rows(lib.PG_R_BULK_LOADS, "pg_bulk_load")
        for i in range(region.count):
            if state := rows[i].state:
                yield KnownBulkLoad(
                    bytes(rows[i].id), BulkLoadState(state), rows[i].fencing_token, rows[i].rows,
                    rows[i].upto, rows[i].uid, rows[i].namespace_row, rows[i].used_boot_ns,
                )  # fmt: skip

    def newest_sweeps(self, most: int) -> list[KnownSweep]:
        """Return the newest sweeps, at most so many, oldest first."""
        rows = self.rows(lib.PG_R_SWEEPS, "pg_sweep")
        found = sorted(
            (rows[i].begun_ns, i) for i in range(lib.PG_SWEEPS) if rows[i].state != SweepState.NONE
        )
        return [
            KnownSweep(
                bytes(rows[i].id), rows[i].uid, SweepChange(rows[i].change),
                bytes(rows[i].text)[: rows[i].select.namespace_len].decode(errors="replace"),
            )
            for _, i in found[-most:]
        ] if most > 0 else []  # fmt: skip

    @property
    def placement(self) -> Placed:
        """Current or last placement of the daemon."""
        p = self.header.placement
        return Placed(
            PlacementMode(p.mode), kernel_number(p.node), kernel_number(p.memory_node),
            kernel_number(p.reaper_cpu), PlacementPart(p.applied), PlacementPart(p.clamped),
            p.pages_sampled, p.pages_elsewhere,
        )  # fmt: skip

    def cursors(self) -> Iterator[KnownCursor]:
        """Yield the cursors of subscribers. The daemon may change them during the call."""
        region = self.header.regions[lib.PG_R_CURSORS]
        rows = self.rows(lib.PG_R_CURSORS, "pg_cursor")
        found = range(region.count)
        positions: dict[int, dict[int, tuple[int, int]]] = {}
        for i in found:
            if rows[i].state == lib.PG_CURSOR_POSITION:
                position = (int(rows[i].incarnation), int(rows[i].sequence))
                positions.setdefault(rows[i].cursor, {})[int(rows[i].topic)] = position
        for i in found:
            c = rows[i]
            if c.state == lib.PG_CURSOR_HEAD:
                yield KnownCursor(
                    bytes(ffi.buffer(c.name, c.name_len)).decode(), c.namespace_row, c.uid,
                    c.session, c.used_boot_ns, c.incarnation, bool(c.every_topic),
                    positions.get(i, {}),
                )  # fmt: skip

    def in_use(self) -> tuple[int, int]:
        """Return (number of slots with timers, number of slots with operations). An unacknowledged
        outcome counts as an operation.

        The function looks at every slot, so the numbers are right even if a killed daemon left a
        change half done.
        """
        timers, operations = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        lib.pg_slots_in_use(self._a, timers, operations)
        return int(timers[0]), int(operations[0])

    def close(self) -> None:
        """Unmap the arena. The handle must not be used afterwards."""
        ffi.release(self._base)
        self.file.close()
        if self._private:
            ffi.release(self._secret)
            self._private.close()


class Handled(enum.IntEnum):
    """enum pg_handled: the next action of the loop after a message of the command socket."""

    REPLY = lib.PG_H_REPLY
    AGAIN = lib.PG_H_AGAIN
    SILENT = lib.PG_H_SILENT
    WAIT = lib.PG_H_WAIT


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One notice message: its two frames, as views of a buffer that the next call overwrites."""

    subject: memoryview
    body: memoryview


class _Owned(Handle):
    """A handle with the private arena file. Only the daemon has such a handle."""

    @property
    def private(self) -> ArenaFile:
        """The private arena file."""
        assert self._private is not None
        return self._private

    @property
    def mappings(self) -> list[mmap.mmap]:
        """Memory mappings of the two arena files."""
        return [one.memory for one in (self.file, self._private) if one is not None]

    @property
    def session_rows(self) -> int:
        """Number of rows of the session table in the private arena file."""
        return int(ffi.cast("struct pg_private *", self._secret).sessions)


class Previous(_Owned):
    """An arena of an earlier ABI, for `Arena.convert_from`. It has not changed since its daemon
    ended."""

    @classmethod
    def attach(cls, name: str, private_name: str) -> Previous | None:
        """Map arena file `name`. Return None if this version cannot convert the file's layout.

        Raises ArenaMissing, and ArenaMismatch if the file is not a valid arena.
        """
        arena = ArenaFile.open(name, read_only=False)
        layout_id = _layout_of(arena)
        if not converts(layout_id):
            arena.close()
            return None
        self = cls(arena, ArenaFile.open(private_name, read_only=False))
        self._attach(layout_id)
        return self


def _layout_of(arena: ArenaFile) -> int:
    """Return the layout id in the header of an arena file; 0 if the file is too short for a
    header."""
    if arena.bytes < size_of("pg_header"):
        return 0
    with ffi.from_buffer(arena.memory) as base:
        return int(ffi.cast("struct pg_header *", base).layout_id)


class Arena(_Owned):
    """The writer's handle, for one thread of one process."""

    PARTS = 1024

    def __init__(self, arena: ArenaFile, private: ArenaFile) -> None:
        super().__init__(arena, private)
        self._more = ffi.new("int *")
        self._upto = ffi.new("uint64_t *")
        self._parts = ffi.new("struct pg_part[]", self.PARTS)
        self._out = bytearray(2 * _PAGE_BYTES)
        self._out_base = ffi.from_buffer(self._out)
        self._reply = bytearray(MESSAGE_MAX)
        self._reply_base = ffi.from_buffer(self._reply)
        self._reply_bytes = ffi.new("uint64_t *")
        self._wait_ns = ffi.new("int64_t *")
        self._session = ffi.new("uint64_t *")
        self._sweep_cursor = ffi.new("uint32_t *")

    # ---- lifecycle ----

    @classmethod
    def create(
        cls,
        name: str,
        private_name: str,
        config: Mapping[str, Any],
        free_memory: FreeMemory = HOST.free_memory,
    ) -> Arena:
        """Create arena files for `config`, the fields of struct pg_config without layout_id.

        The files have no names yet, and the private file is locked. Raises ArenaTooLarge with the
        needed and the available bytes, and ValueError if the core does not accept `config`.
        """
        struct = _config(config)
        size, private_size = lib.pg_arena_bytes(struct), lib.pg_private_bytes(struct)
        if size == 0:
            raise ValueError(f"not a valid arena configuration: {dict(config)}")
        refuse_too_large(size + private_size, free_memory)
        arena = ArenaFile.create(name, size, ARENA_MODE)
        try:
            private = ArenaFile.create(private_name, private_size, PRIVATE_MODE)
        except BaseException as error:
            arena.close()
            if isinstance(error, ArenaTooLarge):
                total, free = size + private_size, size + error.available
                raise ArenaTooLarge(error.where, total, free) from error
            raise
        private.lock()
        self = cls(arena, private)
        lib.pg_create(self._a, self._base, self._secret, struct)
        return self

    @classmethod
    def attach(cls, name: str, private_name: str) -> Arena:
        """Map existing arena files; a call of `rebuild` must follow. Raises ArenaMissing,
        ArenaMismatch."""
        arena = ArenaFile.open(name, read_only=False)
        Handle(arena, None)._attach()  # raises first, if the file is not a valid arena
        self = cls(arena, ArenaFile.open(private_name, read_only=False))
        self._attach()
        return self

    def copied(
        self, moved: Moved, free_memory: FreeMemory = HOST.free_memory
    ) -> tuple[ArenaFile, ArenaFile]:
        """Copy both arena files. The copies have no names yet; the copy of the private file is
        locked.

        Calls `moved` after each portion that is copied. Raises ArenaTooLarge.
        """
        refuse_too_large(self.file.bytes + self.private.bytes, free_memory)
        private = self.private.copy(PRIVATE_MODE, moved)
        try:
            private.lock()
            return self.file.copy(ARENA_MODE, moved), private
        except BaseException:
            private.close()
            raise

    def move_to(self, arena: ArenaFile, private: ArenaFile, moved: Moved) -> None:
        """Use copies of the arena files. The caller has set the original files to RETIRED.

        Calls `moved` after each portion of the old mappings that is unmapped.
        """
        old, bases = (self.file, self.private), (self._base, self._secret)
        self.file, self._private = arena, private
        self._base = ffi.from_buffer(arena.memory, require_writable=True)
        self._secret = ffi.from_buffer(private.memory, require_writable=True)
        lib.pg_move(self._a, self._base, self._secret)
        for base in bases:
            ffi.release(base)
        for file in old:
            file.give_up(moved)

    @property
    def has_names(self) -> bool:
        """True if both arena files still have their names."""
        try:
            return self.file.has_name and self.private.has_name
        except BadPath:
            return False

    def set_nameless(self, *, nameless: bool) -> None:
        """Refuse new timers with status ARENA while the arena files have no names."""
        lib.pg_set_nameless(self._a, nameless)

    def rebuild(self, now_ns: int) -> None:
        """Rebuild all derived state with two threads. Raises ArenaBroken if authoritative state is
        damaged."""
        if not lib.pg_rebuild_threaded(self._a, now_ns, self._fault):
            raise broken(self._fault)

    def migrate_from(self, old: Arena) -> None:
        """Copy all authoritative state of `old`. Raises ArenaBroken, which names the table that
        lacks space."""
        if not lib.pg_migrate(self._a, old._a, self._fault):
            raise broken(self._fault)

    def redo_file(self, redo: Any, walk: Any) -> None:
        """Apply the records of the file that `walk` (struct pg_walk) is reading. Raises
        ArenaBroken."""
        if not lib.pg_redo_file(self._a, redo, walk, self._fault):
            raise broken(self._fault)

    def redo_end(
        self, redo: Any, now_ns: int, real_boot_ns: int, shift_ns: int, wall_offset_ns: int
    ) -> None:
        """Finish a redo: add `shift_ns` to all times and rebuild derived state. Raises
        ArenaBroken."""
        if not lib.pg_redo_end(
            self._a, redo, now_ns, real_boot_ns, shift_ns, wall_offset_ns, self._fault
        ):
            raise broken(self._fault)
        self.rebuild(now_ns)

    def convert_from(self, old: Previous) -> None:
        """Copy all authoritative state of `old`, which has the same sizes. A call of `rebuild` must
        follow. Raises ArenaBroken."""
        if not lib.pg_convert(self._a, old._a, self._fault):
            raise broken(self._fault)

    def start_epoch(self, boot_id: bytes) -> None:
        """Count a start of the daemon. After this call, deadlines are on the boot clock of the boot
        `boot_id`."""
        lib.pg_start_epoch(self._a, boot_id)

    def set_state(self, state: ArenaState, pid: int = 0) -> None:
        """Publish the arena's state, and the daemon's pid while it runs."""
        lib.pg_set_state(self._a, int(state), pid)

    def clear_pid(self) -> None:
        """Publish that no process runs on the arena. The arena's state stays."""
        self.set_state(ArenaState(self.header.state))

    def set_placement(self, placed: Placed) -> None:
        """Publish where the daemon runs."""
        numbers = (placed.node, placed.memory_node, placed.reaper_cpu)
        fields = (placed.mode, *(0 if n is None else n + 1 for n in numbers), placed.applied,
                  placed.clamped, placed.pages_sampled, placed.pages_elsewhere)  # fmt: skip
        lib.pg_set_placement(self._a, ffi.new("struct pg_placement *", list(map(int, fields))))

    def set_daemon_state(self, state: DaemonState, why: Degraded, since_boot_ns: int) -> None:
        """Publish the daemon's state, the reasons if it is degraded (`why`), and the time of the
        last change."""
        lib.pg_set_daemon_state(self._a, state, why, since_boot_ns)

    def drain(self, *, draining: bool) -> None:
        """Start or stop draining. While the daemon drains, it refuses adds and watches with status
        STOPPING."""
        lib.pg_drain(self._a, draining)

    @property
    def paused_due(self) -> int:
        """Number of due timers that do not fire because their topic or namespace is paused."""
        return int(lib.pg_paused_due(self._a))

    def confine(self) -> None:
        """Let only set_namespace() create namespaces. Messages for an unknown namespace are then
        refused with WRONG_SHARD."""
        lib.pg_confine(self._a)

    @property
    def drained(self) -> bool:
        """True if nothing is armed, all outcomes are acknowledged, and all notices are sent."""
        return bool(lib.pg_drained(self._a))

    @property
    def fragmented(self) -> bool:
        """True if enough payload memory is free, but compaction could not make a large block."""
        return bool(lib.pg_fragmented(self._a))

    def set_durable(self, namespace: str) -> None:
        """Make a namespace durable, and create it if it does not exist.

        The daemon answers changes of a durable namespace after they are on disk. Raises
        InvalidName, and InvalidSetting if there is no free slot for another namespace.
        """
        change = wire.encode_namespace_set(0, wire.encode_namespace(namespace), {"durability": 1})
        error, detail, _ = self.set_namespace(change[wire.FRAME.size :], os.geteuid())
        if error:
            raise InvalidSetting("namespaces", detail[0], "slots for every durable one", "arena")

    @property
    def wal_buffer_full(self) -> bool:
        """True while due timers and changes of timers have to wait for space in the WAL buffer."""
        return bool(lib.pg_wal_buffer_full(self._a))

    def measure(self, histogram: Measured, span_ns: int) -> None:
        """Add a duration that the caller has measured to a histogram."""
        lib.pg_measure(self._a, histogram, span_ns)

    def served(self, ended_boot_ns: int) -> None:
        """Record when the last `handle` returned."""
        lib.pg_served(self._a, ended_boot_ns)

    def notified(self, built_boot_ns: int, handed_boot_ns: int) -> None:
        """Record when the message of the last `inbox` was built, and when the socket accepted
        it."""
        lib.pg_notified(self._a, built_boot_ns, handed_boot_ns)

    def untaken(self) -> None:
        """Record that the message of the last `inbox` was not sent, because its receiver is not
        connected."""
        lib.pg_untaken(self._a)

    def append_metrics(self, real_boot_ns: int) -> None:
        """Append the current histograms to the WAL, if there is one."""
        lib.pg_wal_append_metrics(self._a, real_boot_ns)

    def heartbeat(
        self, real_boot_ns: int, iterations: int, wakeups: int, sent: int, log_dropped: int
    ) -> None:
        """Publish the loop's progress."""
        lib.pg_heartbeat(self._a, real_boot_ns, iterations, wakeups, sent, log_dropped)

    def progress(self, real_boot_ns: int) -> None:
        """Publish that the daemon makes progress while its loop does not iterate."""
        lib.pg_progress(self._a, real_boot_ns)

    def check(self) -> None:
        """Check all invariants of the arena. Raises ArenaBroken for the first broken invariant."""
        if not lib.pg_check(self._a, self._fault):
            raise broken(self._fault)

    # ---- time ----

    def advance(self, now_ns: int, wall_offset_ns: int, real_boot_ns: int, budget: int) -> bool:
        """Fire timers that are due at `now_ns` (arena clock), with at most `budget` timers fired or
        moved. Return whether due work is left."""
        lib.pg_advance(self._a, now_ns, wall_offset_ns, real_boot_ns, budget, self._more)
        return bool(self._more[0])

    def hold_operations(self, after_ns: int, upto_ns: int, *, again: bool) -> bool:
        """Delay the expiry of operations after an outage from `after_ns` to `upto_ns` (arena
        clock). Operations that came due during the outage, or were armed before its end, do not
        expire until release_operations().

        Operations that were released, but have not expired yet, are delayed again only with
        `again`. Return False if operations that an earlier call delayed have not expired yet.
        """
        return bool(lib.pg_hold_operations(self._a, after_ns, upto_ns, again))

    def release_operations(self) -> None:
        """End the delay of hold_operations()."""
        lib.pg_release_operations(self._a)

    @property
    def next_ns(self) -> int:
        """Time at which `advance` has to be called next (arena clock); NONE_NS if nothing is
        armed."""
        return int(lib.pg_next_ns(self._a))

    # ---- commands ----

    def handle(
        self, message: Any, uid: int, pid: int, received_boot_ns: int, real_boot_ns: int
    ) -> tuple[Handled, memoryview]:
        """Apply one message of the command socket (any buffer) that was received at
        `received_boot_ns`.

        Returns (next action, reply). The reply is a view that the next call overwrites; it is empty
        if there is no reply. After AGAIN, repeat the same call to continue with the message. After
        WAIT, repeat it when the arena's time has reached `wait_ns`.
        """
        state = lib.pg_handle(
            self._a, ffi.from_buffer(message), len(message), uid, pid, received_boot_ns,
            real_boot_ns, self._reply_base, self._reply_bytes, self._wait_ns,
        )  # fmt: skip
        return Handled(state), self.reply(self._reply_bytes[0])

    def reply(self, size: int) -> memoryview:
        """Return the first `size` bytes of the last reply, as a view that the next call
        overwrites."""
        return memoryview(self._reply)[:size]

    def serve_rings(self, server: Any, shares: Any, most: int) -> int:
        """Apply at most `most` messages of clients. Return enum pg_ring_event.

        `server`: a struct pg_ring_server, which gets the details. `shares`: a struct
        pg_time_shares.
        """
        server.reply = self._reply_base
        return int(lib.pg_rings_serve(self._a, server, shares, most))

    def release_replies(self, server: Any) -> bool:
        """Put the replies of `server` whose records are on disk. True = the caller has to send the
        oldest reply that is left."""
        return bool(lib.pg_pending_release(self._a, server))

    def commit_is_due(self, requests: Any, callers: int, boot_ns: int) -> bool:
        """Return whether the next commit is to be requested.

        `requests`: a struct pg_commit_requests. `callers`: number of replies that wait for the
        commit.
        """
        return bool(lib.pg_commit_is_due(self._a, requests, callers, boot_ns))

    def request_commit(self, requests: Any) -> None:
        """Wake the group-commit thread to commit all records."""
        lib.pg_commit_request(self._a, requests)

    def commit_allowed(self, requests: Any, callers: int) -> None:
        """Note that a commit allowed replies. `callers`: number of replies that were pending
        before."""
        lib.pg_commit_allowed(self._a, requests, callers)

    def wait(self, loop: Any, until_boot_ns: int) -> bool:
        """Sleep, and meanwhile serve clients, see pg_loop_wait. True = a system call failed, and
        ffi.errno has the reason."""
        loop.server.reply = self._reply_base
        return bool(lib.pg_loop_wait(self._a, loop, until_boot_ns))

    def set_namespace(self, body: Any, uid: int) -> tuple[WireError, tuple[int, int], bytes]:
        """Apply the body of a NAMESPACE message from `uid`. Return (error, figures of the error,
        settings in effect as struct pg_namespace_set)."""
        now = ffi.new("struct pg_namespace_set *")
        detail = ffi.new("uint64_t[2]")
        error = lib.pg_set_namespace(self._a, ffi.from_buffer(body), len(body), uid, now, detail)
        return WireError(error), (detail[0], detail[1]), bytes(ffi.buffer(now))

    def set_topic(self, body: Any, uid: int) -> tuple[WireError, tuple[int, int], bytes]:
        """Apply the body of a TOPIC message from `uid`. Return (error, figures of the error, struct
        pg_result)."""
        result, detail = ffi.new("struct pg_result *"), ffi.new("uint64_t[2]")
        error = lib.pg_set_topic(self._a, ffi.from_buffer(body), len(body), uid, result, detail)
        return WireError(error), (detail[0], detail[1]), bytes(ffi.buffer(result))

    def publish(
        self, body: Any, uid: int, real_boot_ns: int
    ) -> tuple[WireError, tuple[int, int], bytes]:
        """Apply the body of a PUBLISH message. Return (error, figures of the error, struct
        pg_result)."""
        result, detail = ffi.new("struct pg_result *"), ffi.new("uint64_t[2]")
        error = lib.pg_publish(
            self._a, ffi.from_buffer(body), len(body), uid, real_boot_ns, result, detail
        )
        return WireError(error), (detail[0], detail[1]), bytes(ffi.buffer(result))

    def set_quotas(self, timers: int, byte_count: int, ops: int) -> None:
        """Set the quotas of each uid: timers, bytes, operations per second; 0 = no quota."""
        lib.pg_set_quotas(self._a, timers, byte_count, ops)

    def set_uid_share(self, percent: int) -> None:
        """Set the percentage of each shared table that one uid may hold. Root and the daemon's own
        uid have no limit."""
        lib.pg_set_uid_share(self._a, percent, os.geteuid())

    def bulk_load(self, body: Any) -> tuple[WireError, tuple[int, int], bytes]:
        """Apply the body of an administrator's BULK_LOAD message. Return (error, figures of the
        error, answer)."""
        detail = ffi.new("uint64_t[2]")
        error = lib.pg_bulk_load_admin(
            self._a, ffi.from_buffer(body), len(body), self._reply_base, self._reply_bytes, detail
        )
        answer = bytes(memoryview(self._reply)[: self._reply_bytes[0]])
        return WireError(error), (detail[0], detail[1]), answer

    # ---- schedules ----

    def schedule_question(self) -> Any:
        """Return the next question about a cron expression as struct pg_question; None = there is
        no question. The struct is valid until the next call that changes the arena."""
        question = ffi.new("struct pg_question *")
        return question if lib.pg_schedule_question(self._a, question) else None

    def schedule_answer(self, question: Any, status: Status, times: Sequence[int]) -> None:
        """Answer a question with nominal times in ns since 1970. `status`: DONE, or BAD_SPEC."""
        found = ffi.new("int64_t[]", times)
        lib.pg_schedule_answer(self._a, question, status, found, len(times))

    def recheck_schedules(self) -> None:
        """Let the times of all cron expressions be computed again."""
        lib.pg_schedules_recheck(self._a)

    def schedule_zones(self) -> set[str]:
        """Return the names of the time zones of all schedules."""
        rows, zones = self.rows(lib.PG_R_SCHEDULES, "pg_schedule"), set()
        for i in range(self.header.regions[lib.PG_R_SCHEDULES].count):
            row = rows[i].fields[rows[i].version % 2]
            if row.state != ScheduleState.NONE and row.zone_len:
                at = row.blob * lib.PG_GRANULE + row.key_len + row.spec_len
                blobs = self._base + self.header.regions[lib.PG_R_BLOBS].offset
                zones.add(bytes(ffi.buffer(blobs + at, row.zone_len)).decode())
        return zones

    def sweep_bulk_loads(self, real_boot_ns: int, ttl_ns: int) -> None:
        """Forget one bulk load that was last used more than `ttl_ns` ago, if there is one."""
        lib.pg_bulk_loads_sweep(self._a, real_boot_ns, ttl_ns)

    @property
    def durable_lsn(self) -> int:
        """LSN that must be on disk before the last reply may be sent; 0 = the reply need not
        wait."""
        return int(lib.pg_durable_lsn(self._a))

    @property
    def wait_ns(self) -> int:
        """Virtual time in ns before which the last message cannot be applied."""
        return int(self._wait_ns[0])

    # ---- inboxes ----

    def inbox(self) -> tuple[int, memoryview]:
        """Return (session, next OUTCOMES message as a view); session 0 = there is no message."""
        used = lib.pg_inbox(self._a, self._session, self._out_base, len(self._out))
        return int(self._session[0]), memoryview(self._out)[:used]

    def jobs(self) -> tuple[int, memoryview]:
        """Return (session, next JOBS message as a view); session 0 = there is no message."""
        used = lib.pg_jobs(self._a, self._session, self._out_base, len(self._out))
        return int(self._session[0]), memoryview(self._out)[:used]

    def jobs_untaken(self) -> None:
        """Record that the last message of `jobs` was not sent. Its jobs are sent again at the next
        heartbeat."""
        lib.pg_jobs_untaken(self._a)

    def inbox_again(self, real_boot_ns: int) -> None:
        """Send the unacknowledged outcomes of all sessions again, at intervals that grow."""
        lib.pg_inbox_again(self._a, real_boot_ns)

    def inbox_to(self, session: int) -> None:
        """Record that the session's owner is connected, so that all unacknowledged outcomes are
        sent to it."""
        lib.pg_inbox_to(self._a, session)

    def inbox_away(self, session: int) -> None:
        """Record that nobody is connected to receive the session's inbox, until the session sends a
        message."""
        lib.pg_inbox_away(self._a, session)

    # ---- sessions ----

    def session_grace_ns(self, session: int) -> int | None:
        """Return the session's grace period in ns; None = there is no such session."""
        grace_ns = int(lib.pg_session_grace_ns(self._a, session))
        return grace_ns if grace_ns >= 0 else None

    def end_session(self, session: int, real_boot_ns: int) -> bool:
        """End a session and free its outcomes. Return False if the WAL has no space: call again
        later."""
        return bool(lib.pg_session_end(self._a, session, real_boot_ns))

    def sessions(self, uid: int | None = None) -> bytes:
        """Return struct pg_session_info of each session of `uid`; None = sessions of all uids."""
        rows, count = self._sessions(uid)
        return bytes(ffi.buffer(rows))[: count * size_of("pg_session_info")]

    def session_pids(self) -> dict[int, int]:
        """Return the pid of the client of each open session, by session id; 0 = unknown."""
        rows, count = self._sessions(None)
        return {int(rows[i].session): int(rows[i].pid) for i in range(count)}

    def session_ids(self, uid: int | None = None) -> list[int]:
        """Return the ids of the open sessions of `uid`; None = sessions of all uids."""
        rows, count = self._sessions(uid)
        return [int(rows[i].session) for i in range(count)]

    def _sessions(self, uid: int | None) -> tuple[Any, int]:
        rows = ffi.new("struct pg_session_info[]", self.session_rows)
        count = lib.pg_sessions(self._a, _NIL if uid is None else uid, rows, self.session_rows)
        return rows, int(count)

    @property
    def watermarks_to_sweep(self) -> int:
        """Number of rows in the table of watch keys, all of which have to be swept; 0 if no row is
        in use."""
        rows = int(self.header.regions[lib.PG_R_WATERMARKS].count)
        return rows if self.purgatory.free_watermarks < rows else 0

    def sweep(self, real_boot_ns: int, budget: int) -> None:
        """Look at the next `budget` rows of watch keys, and remove expired keys."""
        lib.pg_sweep(self._a, real_boot_ns, self._sweep_cursor, budget)

    # ---- notices ----

    def show(self) -> None:
        """Let readers take the notices of all fired timers, and wake the readers that sleep until
        their topics have notices."""
        lib.pg_show(self._a)

    def send_none(self, now_boot_ns: int) -> None:
        """Record that no socket wants the visible notices."""
        lib.pg_published(self._a, lib.pg_sendable(self._a), now_boot_ns, now_boot_ns)

    def _outgoing(self, count: int) -> list[Outgoing]:
        view = memoryview(self._out)
        parts = (self._parts[i] for i in range(count))
        return [
            Outgoing(
                view[p.subject : p.subject + p.subject_bytes], view[p.body : p.body + p.body_bytes]
            )
            for p in parts
        ]

    def notices(self) -> tuple[list[Outgoing], int]:
        """Return (messages, position). The messages contain the next unsent notices, as many as
        fit; position is the replay buffer position after these notices."""
        count = lib.pg_notices(
            self._a, self._out_base, len(self._out), self._parts, self.PARTS, self._upto
        )
        return self._outgoing(count), int(self._upto[0])

    def published(self, upto: int, built_boot_ns: int, handed_boot_ns: int) -> None:
        """Record that all replay buffer entries below position `upto` were handed to the socket,
        and when."""
        lib.pg_published(self._a, upto, built_boot_ns, handed_boot_ns)

    def replied(
        self, session: int, sequence: int, count: int, built_boot_ns: int, handed_boot_ns: int
    ) -> None:
        """Record in the WAL that the answers to `count` batches of a session were sent; `sequence`
        is the number of the first batch.

        The first answer was built at `built_boot_ns`, and the socket accepted the last answer at
        `handed_boot_ns`.
        """
        lib.pg_replied(self._a, session, sequence, count, built_boot_ns, handed_boot_ns)

    def tail_heartbeats(self, since_boot_ns: int) -> Iterator[Outgoing]:
        """Yield tail heartbeats for the topics that changed since `since_boot_ns` (real boot
        clock)."""
        cursor = ffi.new("uint32_t *")
        while count := lib.pg_tail_heartbeats(
            self._a, since_boot_ns, cursor, self._out_base, len(self._out), self._parts, self.PARTS
        ):
            yield from self._outgoing(count)


class Reader(Handle):
    """A read-only view of an arena. It can be used while the daemon writes or hangs, and after the
    daemon has ended."""

    def __init__(self, arena: ArenaFile) -> None:
        super().__init__(arena, None)
        self._attach()
        self._cursor = ffi.new("uint32_t *")

    @classmethod
    def attach(cls, paths: Paths) -> Reader:
        """Map the arena of a daemon. Raises ArenaMissing, and the errors of ready()."""
        return cls.ready(ArenaFile.open(paths.arena, read_only=True))

    @classmethod
    def ready(cls, file: ArenaFile) -> Reader:
        """Return a view of the arena in a mapped file.

        Raises ArenaMismatch (the file is from another build, or is not an arena), and ArenaNotReady
        (the arena is being rebuilt, or was retired).
        """
        self = cls(file)
        if self.state != ArenaState.READY:
            raise ArenaNotReady(file.name, self.state.name.lower())
        return self

    @property
    def state(self) -> ArenaState:
        """State of the arena, as the daemon last wrote it."""
        return ArenaState(self.header.state)

    @property
    def retired(self) -> bool:
        """True if another arena file has replaced this file; readers have to attach again."""
        return self.state == ArenaState.RETIRED

    @property
    def stream_id(self) -> int:
        """Identity of the notice streams; if it has changed, notices may have been lost."""
        return int(self.header.stream_id)

    @property
    def epoch(self) -> int:
        """Number of daemon starts on this arena."""
        return int(self.header.epoch)

    # ---- topics ----

    def newest_sequences(self, namespace: str) -> dict[str, tuple[int, int]]:
        """Return (incarnation, newest visible sequence) by name of topic, for all topics of the
        namespace."""
        return _newest(self, namespace, lib.pg_newest)

    def newest_sent(self, namespace: str) -> dict[str, tuple[int, int]]:
        """Return the same for the notices that were handed to the socket. Only for an arena that no
        daemon writes."""
        return _newest(self, namespace, lib.pg_newest_sent)

    def replay(self, namespace: str, topic: str, first: int, last: int) -> tuple[int, list[bytes]]:
        """Return notices `first`..`last` of a topic from the replay buffer, oldest first.

        The result is (lost_until, bodies). `lost_until` is the highest sequence of the range that
        the replay buffer has dropped; `first` - 1 if none was dropped. Each body has the form of
        the second frame of a notice message.
        """
        row = self.topic_row(namespace, topic)
        if row == _NIL:
            return last, []
        positions = ffi.new("uint64_t[]", last - first + 1)
        lost, got = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        lost_until, bodies, out = first - 1, [], bytearray(_PAGE_BYTES)
        while first <= last:
            used = lib.pg_replay(
                self._a, row, first, last, positions, ffi.from_buffer(out), len(out), lost, got
            )
            if lost[0] >= first:
                lost_until = lost[0]
            if used == 0:
                break
            bodies.append(bytes(memoryview(out)[:used]))
            first = got[0] + 1
        return lost_until, bodies

    def committed(self, namespace: str, cursor: str) -> dict[str, tuple[int, int]] | None:
        """Return (incarnation, sequence of the newest committed notice) by topic, for a cursor of
        the namespace. Topics without a committed notice are left out. None = there is no such
        cursor."""
        row = self.namespace_row(namespace)
        for known in self.cursors():
            if (known.namespace_row, known.name) == (row, cursor):
                topics = {i: self.topic_at(i) for i in known.positions}
                return {
                    t.name: known.positions[i]
                    for i, t in topics.items()
                    if t is not None and t.incarnation == known.positions[i][0]
                }
        return None

    def carried(self, namespace: str) -> dict[str, int]:
        """Return the sequence of the last notice that a resharding or a recovery from the WAL
        carried over after it was sent, by topic of the namespace. Topics without such a notice are
        left out."""
        wanted, rows = self.namespace_row(namespace), self.rows(lib.PG_R_TOPICS, "pg_topic")
        topics = ((i, self.topic_at(i)) for i in range(self.topic_rows) if rows[i].carried)
        return {
            topic.name: int(rows[i].carried)
            for i, topic in topics
            if topic is not None and topic.namespace_row == wanted
        }

    # ---- watch keys ----

    def watermarks(self) -> Iterator[Watermark]:
        """Yield all watch keys that are in use."""
        names = self.namespaces()
        rows = self.rows(lib.PG_R_WATERMARKS, "pg_watermark")
        for i in range(self.header.regions[lib.PG_R_WATERMARKS].count):
            row = rows[i]
            if length := row.key_len:
                identity = (length, row.hash, row.namespace_row)
                key = wire.decode_key(row.key_type, self._watch_key(row.key, length))
                state = (row.watermark, row.error, row.root != _NIL, row.touched_s == _NIL)
                # If they differ, another key has taken the row during the read.
                if (row.key_len, row.hash, row.namespace_row) == identity:
                    yield Watermark(names[identity[2]].name, key, *state)

    def _watch_key(self, bytes_or_blob: Any, length: int) -> bytes:
        """Return the bytes of a watch key. If the key has more than 16 bytes, `bytes_or_blob` holds
        the granule of a blob with the key."""
        if length <= len(bytes_or_blob):
            return bytes(ffi.buffer(bytes_or_blob, length))
        region = self.header.regions[lib.PG_R_BLOBS]
        at = int.from_bytes(ffi.buffer(bytes_or_blob, 4), "little") * lib.PG_GRANULE
        if at + length > region.length:
            return b""  # another key has taken the row
        key = ffi.cast("char *", self._base + region.offset + at)
        return bytes(ffi.buffer(key, length))

    # ---- timers ----

    def scan(self) -> Iterator[bytes]:
        """Yield all armed and parked timers and armed operations, as pages. A page has several
        struct pg_info, each followed by names, key and payload."""
        cursor, out = ffi.new("uint32_t *"), bytearray(_PAGE_BYTES)
        base, slots = ffi.from_buffer(out), self.header.capacity + 1
        while cursor[0] < slots:
            used = lib.pg_scan(self._a, cursor, 4096, base, len(out))
            yield bytes(memoryview(out)[:used])

    def check(self) -> None:
        """Check the invariants that a reader can check while the daemon works. Raises ArenaBroken
        for the first broken invariant."""
        if not lib.pg_check_live(self._a, self._fault):
            raise broken(self._fault)

    def stats(self) -> dict[str, Any]:
        """Return header fields and counters that describe the daemon's condition, by name."""
        header, metrics = self.header, self.metrics
        shown = (
            "capacity", "replay_capacity", "payload_bytes", "replay_bytes_max", "tick_ns",
            "fanout", "levels", "daemon_pid", "epoch", "stream_id", "heartbeat_boot_ns",
            "loop_iterations", "now_ns", "next_deadline_ns", "wall_offset_ns", "next_ticket",
            "daemon_since_boot_ns",
            "replay_head", "replay_tail", "published", "replay_bytes", "length",
        )  # fmt: skip
        return {
            "arena_state": self.state.name.lower(),
            "daemon_state": DaemonState(header.daemon_state).name.lower(),
            "degraded_by": Degraded(header.daemon_why).names,
            "clock": "virtual" if header.clock_kind == lib.PG_CLOCK_VIRTUAL else "real",
            **{name: int(getattr(header, name)) for name in shown},
            **{name: int(getattr(metrics, name)) for name in COUNTED},
            "overdue": int(lib.pg_overdue(self._a)),
            **self.watch_fill(),
            **self._placement_stats(),
            **self._wal_stats(),
        }

    def _placement_stats(self) -> dict[str, Any]:
        placed = self.placement
        return {
            "placement": placed.mode.name.lower(),
            "node": placed.node,
            "memory_node": placed.memory_node,
            "reaper_cpu": placed.reaper_cpu,
            "placed": parts_text(placed.applied),
            "clamped": parts_text(placed.clamped),
            "pages_sampled": placed.pages_sampled,
            "pages_elsewhere": placed.pages_elsewhere,
        }

    def _wal_stats(self) -> dict[str, Any]:
        wal_buffer = self.wal_buffer
        if wal_buffer is None:
            return {"wal": "none"}
        return {
            "wal": WalState(wal_buffer.state).name.lower(),
            "wal_error": os.strerror(wal_buffer.error) if wal_buffer.error else None,
            "committed_lsn": int(wal_buffer.committed_lsn),
            "appended_lsn": int(wal_buffer.next_lsn) - 1,
            "wal_buffer_used_bytes": int(wal_buffer.tail - wal_buffer.committed),
            "wal_buffer_bytes": int(wal_buffer.size),
            "wal_bytes": int(wal_buffer.bytes),
            "syncs": int(wal_buffer.syncs),
            "sync_mean_ns": int(wal_buffer.sync_ns) // max(1, int(wal_buffer.syncs)),
        }


class HeaderView:
    """The fields of an arena header that a command needs to stop the daemon, in any minor ABI
    version.

    Raises ArenaMissing if there is no file, OtherAbi if it has another major ABI version, and
    ArenaMismatch if it has no arena header.
    """

    def __init__(self, name: str) -> None:
        self.file = ArenaFile.open(name, read_only=True)
        self._base = ffi.from_buffer(self.file.memory)
        if self.file.bytes < size_of("pg_header") or self._header.magic != lib.PG_MAGIC:
            raise ArenaMismatch(name, "magic", lib.PG_MAGIC, 0)
        if self._header.abi_major != ABI[0]:
            raise OtherAbi(name, "ABI major", ABI[0], self._header.abi_major)

    @property
    def _header(self) -> Any:
        return ffi.cast("struct pg_header *", self._base)

    @property
    def pid(self) -> int:
        """Pid of the daemon; 0 if it has stopped."""
        return int(self._header.daemon_pid)

    @property
    def heartbeat_boot_ns(self) -> int:
        """Time of the last heartbeat of the daemon's loop (CLOCK_BOOTTIME)."""
        return int(self._header.heartbeat_boot_ns)

    @property
    def retired(self) -> bool:
        """True if another arena file has replaced this file; readers have to attach again."""
        return bool(self._header.state == ArenaState.RETIRED)

    @property
    def stream_id(self) -> int:
        """Identity of the notice streams, as in Reader."""
        return int(self._header.stream_id)

    @property
    def why(self) -> Degraded:
        """Reasons why the daemon is degraded."""
        return Degraded(self._header.daemon_why)

    @property
    def armed(self) -> int:
        """Number of armed timers and operations."""
        region = self._header.regions[lib.PG_R_METRICS]
        if region.offset + size_of("pg_metrics") > self.file.bytes:
            raise ArenaMismatch(self.file.name, "offset of the counters", 0, region.offset)
        return int(ffi.cast("struct pg_metrics *", self._base + region.offset).live)

    def close(self) -> None:
        """Unmap the header."""
        ffi.release(self._base)
        self.file.close()


def _newest(reader: Reader, namespace: str, newest: Any) -> dict[str, tuple[int, int]]:
    wanted = reader.namespace_row(namespace)
    rows = ((row, reader.topic_at(row)) for row in range(reader.topic_rows))
    return {
        topic.name: (topic.incarnation, int(newest(reader._a, row)))
        for row, topic in rows
        if topic is not None and topic.namespace_row == wanted
    }


def retire(name: str) -> None:
    """Set the state of arena file `name` to RETIRED, so that its readers attach to the arena that
    replaces it."""
    arena = ArenaFile.open(name, read_only=False)
    if arena.bytes >= size_of("pg_header"):
        with ffi.from_buffer(arena.memory, require_writable=True) as base:
            header = ffi.cast("struct pg_header *", base)
            header.state = ArenaState.RETIRED
            lib.pg_wake_all(ffi.addressof(header, "wake"))
    arena.close()


def page_size() -> int:
    """Return the size of a memory page in bytes."""
    return os.sysconf("SC_PAGE_SIZE")
