"""The settings of one daemon: a frozen record, the bounds of its fields, and derived defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from purgatoryd.daemon.log import LEVELS
from purgatoryd.shm_layout.curve import place
from purgatoryd.shm_layout.errors import InvalidArgument, InvalidSetting
from purgatoryd.shm_layout.paths import SHARDS_MAX, check_name
from purgatoryd.shm_layout.topology import cpu_order

MIB = 2**20
_ID_MAX = 2**32 - 2  # highest uid or gid; the next value means "none" to the kernel
_ENTRIES_MAX = 2**27  # slots or replay buffer entries: their ids share 28 bits of the key index

# Lowest and highest value by field. The core has the same bounds, but errors raised here name the
# setting.
BOUNDS = {
    "capacity": (1, _ENTRIES_MAX),
    "payload_bytes": (4096, 16 * (2**32 - 513)),
    "replay_capacity": (16, _ENTRIES_MAX),
    "replay_bytes_max": (4096, 16 * (2**32 - 513)),
    "tick_ns": (1_000, 100_000_000),
    "fanout": (2, 256),
    "topics": (1, 65_534),
    "namespaces": (1, 4_095),
    "sessions": (1, 65_535),
    "session_grace_ns": (10**8, 10**9 * 86_400),
    "watches": (1, _ENTRIES_MAX),
    "watch_keys": (1, _ENTRIES_MAX),
    "watermark_ttl_ns": (10**9, 10**9 * 86_400 * 365),
    "inbox": (1, _ENTRIES_MAX),
    "budget": (1, 2**20),
    "ring_bytes": (0, 2**40),
    "accounts": (1, 65_535),
    "groups": (0, 4_096),
    "jobs": (0, _ENTRIES_MAX),
    "bulk_loads": (0, 32_767),
    "bulk_load_rows": (0, 2**38),
    "schedules": (0, 65_535),
    "cursors": (0, 32_767),
    "bulk_load_ttl_ns": (10**9, 10**9 * 86_400 * 3650),
    "quota_timers": (0, 2**48 - 1),
    "quota_bytes": (0, 2**48 - 1),
    "quota_ops": (0, 10**9),
    "uid_share": (1, 100),
    "node": (-1, 65_535),
    "realtime": (0, 99),
    "busy_poll_ns": (0, 10_000_000),
    "wal_segment_bytes": (256 * 1024, 4096 * MIB),
    "wal_buffer_bytes": (4 * MIB, 1024 * MIB),
    "snapshot_segments": (1, 2**20),
    "retain_age_ns": (0, 10**9 * 86_400 * 3650),
    "retain_bytes": (0, 2**62),
    "shards": (0, SHARDS_MAX),
}
_OF_THE_WAL = (
    "wal_segment_bytes", "wal_buffer_bytes", "snapshot_segments", "retain_age_ns", "retain_bytes",
    "durable_namespaces",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Settings of a daemon. The defaults fit a /dev/shm of 64 MiB.

    Raises InvalidName, or InvalidSetting with the bound that a value violates. The start of the
    daemon checks whether the sizes fit the machine.
    """

    name: str
    capacity: int = 131_072
    """Number of timers and operations that may be armed at once. Unacknowledged outcomes count as
    well. `purgatoryd size` shows the memory. Raise it if adds get `Full` for "slots"."""
    payload_bytes: int = 16 * MIB
    """Memory for the keys and payloads of armed timers and of notices in the replay buffer. Raise
    it if adds get `Full` for "space for key and payload"."""
    replay_capacity: int = 131_072
    """Number of notices in the replay buffer; a power of two. It limits how far a subscriber may
    fall behind, and how long a cancel answers FIRED. Each notice costs 64 bytes. Raise it if
    subscribers get `Lagged`."""
    replay_bytes_max: int = 0
    """Payload memory that fired notices may keep. Above it the oldest notices are dropped from the
    replay buffer. 0 means half of `payload_bytes`, so that fired notices cannot starve new
    timers."""
    tick_ns: int = 65_536
    """Resolution of the wheel: a timer fires within one tick after its deadline."""
    fanout: int = 256
    """Number of buckets in one level of the wheel."""
    topics: int = 1_024
    """Number of topics in all namespaces together, not counting the daemon's own topic. Each costs
    256 bytes."""
    namespaces: int = 64
    """Number of namespaces, not counting the daemon's own namespace. Each costs 256 bytes."""
    sessions: int = 1_024
    """Number of client sessions that may be open at once. Each costs 4.4 KiB. Raise it if clients
    get `SessionTableFull`."""
    session_grace_ns: int = 60 * 10**9
    """Time that a session outlives its connection if the daemon cannot watch the client's process:
    on another host, in another pid namespace, and after a restart of the daemon."""
    watches: int = 40_000
    """Number of watch records: one for each watch key of each operation. Each costs 32 bytes."""
    watch_keys: int = 65_536
    """Number of watch keys whose watermarks are stored. Each costs 72 bytes."""
    watermark_ttl_ns: int = 600 * 10**9
    """Time that a watermark is kept after its last change and after its last watcher has ended."""
    inbox: int = 65_536
    """Number of operations that one session may own, armed or with an unacknowledged outcome.
    Further operations get `InboxFull`."""
    clock: Literal["real", "virtual"] = "real"
    """A virtual clock is for tests and simulation. It moves only on request of an administrator."""
    wall_origin_ns: int = 0
    """Wall time at time 0 of a virtual clock, in ns since 1970."""
    budget: int = 4_096
    """Maximum number of timers that one loop iteration fires or moves. A larger budget delays
    requests."""
    accounts: int = 1_024
    """Number of uids that may have sessions, timers or watch keys at once. Each costs 64 bytes."""
    groups: int = 64
    """Number of consumer groups. Each costs 1.4 KiB. 0 = none."""
    jobs: int = 16_384
    """Total of the budgets of all consumer groups: their pending timers, jobs and dead letters.
    Each costs 200 bytes. Raise it if a new group is refused for lack of jobs."""
    schedules: int = 512
    """Number of schedules. Each costs 632 bytes. Raise it if `put_schedule` gets
    `FULL_SCHEDULES`."""
    bulk_loads: int = 256
    """Number of bulk loads that the daemon remembers at once."""
    bulk_load_rows: int = 2**22
    """Total number of rows of all remembered bulk loads, counted in blocks of 4096 rows."""
    bulk_load_ttl_ns: int = 7 * 86_400 * 10**9
    """Time that a bulk load is remembered after its last use, on the real clock."""
    cursors: int = 1_024
    """Number of rows for cursors of subscribers: one for each cursor, and one for its position in
    each topic. Each costs 128 bytes."""
    ring_bytes: int = 64 * MIB
    """Memory for the rings of clients on this host, 36 to 260 KiB for each client. Further clients
    use ZeroMQ. 0 = all clients use ZeroMQ."""
    quota_timers: int = 0
    """Number of timers and operations that one uid may have armed; 0 = no quota."""
    quota_bytes: int = 0
    """Bytes of keys and payloads that the armed timers of one uid may hold; 0 = no quota."""
    quota_ops: int = 0
    """Number of adds, watches, advances, bumps and fails that one uid may send per second; 0 = no
    quota."""
    uid_share: int = 75
    """Percentage of each table that one uid may hold: topics, namespaces, sessions, watch keys,
    watch records, owned operations and bulk loads. 100 = no limit. Root and the daemon's uid have
    no limit."""
    admin_uids: tuple[int, ...] = ()
    """Uids that may administer, in addition to root and the daemon's own uid."""
    allow_uids: tuple[int, ...] = ()
    """Uids that may connect. If neither uids nor gids are set, anyone who can open the socket may
    connect."""
    allow_gids: tuple[int, ...] = ()
    """Unix groups whose members may connect. Membership is read once, at the start."""
    wal_dir: str = ""
    """Directory of the WALs. The WAL of daemon NAME is its subdirectory NAME. Empty = no WAL: a
    reboot loses all timers."""
    wal_segment_bytes: int = 64 * MIB
    """Size of one WAL segment; a multiple of 4096."""
    wal_buffer_bytes: int = 8 * MIB
    """Memory in the arena for records that are not on disk yet; a power of two. Raise it if the
    disk cannot keep up with bursts."""
    snapshot_segments: int = 4
    """Number of new WAL segments after which the daemon takes a snapshot."""
    retain_age_ns: int = 0
    """Time that WAL segments are kept for readers although recovery does not need them."""
    retain_bytes: int = 0
    """Size of the newest WAL segments that are kept for readers although recovery does not need
    them."""
    durable_namespaces: tuple[str, ...] = ()
    """Namespaces in which a change is answered only after it is on disk."""
    log_level: Literal["error", "warning", "info"] = "warning"
    """Minimum level of log messages."""
    placement: Literal["auto", "none"] = "auto"
    """`auto` = the daemon chooses CPUs and NUMA node; `none` = the kernel chooses."""
    cpus: str = ""
    """CPUs of the daemon, such as "3,1-2": the first is for the loop, the others are for its other
    threads. Not with shards."""
    node: int = -1
    """NUMA node of arena and threads; -1 = as `placement` decides."""
    realtime: int = 0
    """SCHED_FIFO priority of the loop; libzmq's thread gets the next lower priority. 0 = normal
    scheduling. Needs CAP_SYS_NICE or RLIMIT_RTPRIO. The kernel leaves 5 % of each CPU to other
    processes."""
    lock_memory: bool = False
    """Lock in RAM all memory that the daemon has at the end of its start. Needs CAP_IPC_LOCK or
    RLIMIT_MEMLOCK."""
    huge_pages: bool = False
    """Use huge pages for the arena. Needs Linux 6.1 and a /dev/shm mounted with huge=advise."""
    busy_poll_ns: int = 0
    """Time before each deadline, and after each message, during which the loop polls
    instead of sleeping. Costs a core for that time; needs two CPUs."""

    shards: int = 0
    """Number of shards among which the namespaces are divided; 0 = one daemon without shards."""
    shard: int = -1
    """Number of this shard in its deployment; -1 = not a shard."""
    tcp: str = ""
    """HOST:PORT for clients on other hosts. Commands use this port, notices the next one. Needs
    `server_key` and `keys`; not with shards."""
    server_key: str = ""
    """File with the daemon's key pair, from `purgatoryd keygen`."""
    keys: str = ""
    """File with the public keys of clients that may connect through `tcp`: one line NAME KEY UID
    for each key. A reload reads the file again."""

    def __post_init__(self) -> None:
        check_name(self.name)
        self._check_tcp()
        if self.replay_bytes_max == 0:
            object.__setattr__(self, "replay_bytes_max", max(4096, self.payload_bytes // 2))
        for setting, (low, high) in BOUNDS.items():
            value = getattr(self, setting)
            if not low <= value <= high:
                bound = f"from {low} to {high}{_unit(setting)}"
                raise InvalidSetting(setting, value, bound, "config")
        for setting in ("admin_uids", "allow_uids", "allow_gids"):
            for value in getattr(self, setting):
                if not 0 <= value <= _ID_MAX:
                    raise InvalidSetting(setting, value, f"from 0 to {_ID_MAX}", "config")
        if self.replay_capacity & (self.replay_capacity - 1):
            raise InvalidSetting(
                "replay_capacity", self.replay_capacity, "a power of two", "config"
            )
        if self.wal_buffer_bytes & (self.wal_buffer_bytes - 1):
            raise InvalidSetting(
                "wal_buffer_bytes", self.wal_buffer_bytes, "a power of two", "config"
            )
        if self.wal_segment_bytes % 4096:
            raise InvalidSetting(
                "wal_segment_bytes", self.wal_segment_bytes, "a multiple of 4096", "config"
            )
        self._refuse_settings_of_no_wal()
        self._check_placement()
        if self.clock not in ("real", "virtual"):
            raise InvalidSetting("clock", self.clock, "real or virtual", "config")
        if self.log_level not in LEVELS:
            raise InvalidSetting(
                "log_level", self.log_level, f"one of {', '.join(LEVELS)}", "config"
            )
        if self.wall_origin_ns and self.clock == "real":
            raise InvalidSetting(
                "wall_origin_ns", self.wall_origin_ns, "0 with the real clock", "config"
            )

    def _check_tcp(self) -> None:
        if self.tcp and self.shards:
            raise InvalidSetting("tcp", self.tcp, "left out with shards", "config")
        given = [setting for setting in ("tcp", "server_key", "keys") if getattr(self, setting)]
        if len(given) not in (0, 3):
            bound = "set together with the other two of tcp, server-key and keys, or left out"
            raise InvalidSetting(given[0], getattr(self, given[0]), bound, "config")
        try:
            if self.tcp:
                place(self.tcp)
        except InvalidArgument:
            bound = "HOST:PORT, where PORT + 1 is also a valid port"
            raise InvalidSetting("tcp", self.tcp, bound, "config") from None

    def _check_placement(self) -> None:
        if self.placement not in ("auto", "none"):
            raise InvalidSetting("placement", self.placement, "auto or none", "config")
        try:
            cpu_order(self.cpus)
        except ValueError:
            raise InvalidSetting("cpus", self.cpus, 'a list such as "3,0-2"', "config") from None
        for setting in ("cpus", "node"):
            value = getattr(self, setting)
            if setting == "cpus" and value and self.shards:
                raise InvalidSetting(setting, value, "left out with shards", "config")
            if self.placement == "none" and value != DEFAULTS[setting]:
                raise InvalidSetting(setting, value, "left out with placement none", "config")

    def _refuse_settings_of_no_wal(self) -> None:
        for setting in _OF_THE_WAL:
            value = getattr(self, setting)
            if not self.wal_dir and value != DEFAULTS[setting]:
                raise InvalidSetting(setting, value, "left out without a WAL", "config")


def _unit(setting: str) -> str:
    return " ns" if setting.endswith("_ns") else " bytes" * ("bytes" in setting)


_OF_A_DEPLOYMENT = ("name", "shard")
"""Fields that identify a daemon; all others are settings with a default."""
DEFAULTS = {
    field.name: field.default for field in fields(Config) if field.name not in _OF_A_DEPLOYMENT
}
