"""Settings of `purgatoryd run`.

A flag overrides the environment, which overrides the TOML file, which overrides the default. An
unknown setting in the flags, the environment or the file is an error, so that a typing error never
silently changes a daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from purgatoryd.cli import units
from purgatoryd.cli.exits import ARGUMENTS, GroupedOption
from purgatoryd.daemon.config import DEFAULTS, Config
from purgatoryd.shm_layout.errors import InvalidArgument, InvalidSetting, UnknownSetting

PREFIX = "PURGATORYD_"
# Variables that begin with PREFIX but are not settings of `run`.
OTHER_VARIABLES = ("PURGATORYD_DIR", "PURGATORYD_CONFIG", "PURGATORYD_REQUIRE")

_SOURCES = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "config file",
    ParameterSource.DEFAULT: "default",
}


def variable(flag: str) -> str:
    """Return the environment variable of a flag, for example PURGATORYD_PAYLOAD_MEMORY for
    payload-memory."""
    return PREFIX + flag.upper().replace("-", "_")


def _text(value: Any, kind: click.ParamType[Any]) -> str:
    if isinstance(kind, units.Size):
        return units.exact_size(value)
    if isinstance(kind, units.Duration):
        return units.exact_duration(value)
    if isinstance(kind, units.Moment):
        return units.format_wall(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _written(value: Any, kind: click.ParamType[Any]) -> int | str | list[int | str]:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, bool):
        return value
    text = _text(value, kind)
    return int(value) if text == str(value) and isinstance(value, int) else text


Row = tuple[str, str, click.ParamType[Any], str]
"""A setting: (flag, field of Config, type, help)."""

GROUPS: dict[str, tuple[Row, ...]] = {
    "Timers and notices": (
        ("capacity", "capacity", click.INT,
         "Maximum number of timers and operations armed at once."),
        ("payload-memory", "payload_bytes", units.Size(), "Memory for keys and payloads."),
        ("replay-buffer", "replay_capacity", units.PowerOfTwo(),
         "Number of notices kept for slow subscribers; rounded up to a power of two."),
        ("replay-memory", "replay_bytes_max", units.Size(),
         "Payload memory that notices in the replay buffer may keep."),
        ("namespaces", "namespaces", click.INT,
         "Maximum number of namespaces, without the daemon's own."),
        ("topics", "topics", click.INT,
         "Maximum number of topics in all namespaces, without the daemon's own."),
    ),
    "Timing wheel and clock": (
        ("tick", "tick_ns", units.Duration(),
         "Resolution of the timing wheel, from 1us to 100ms."),
        ("fanout", "fanout", click.INT,
         "Number of buckets in a level of the wheel, from 2 to 256."),
        ("budget", "budget", click.INT,
         "Maximum number of timers that one loop iteration fires or moves."),
        ("clock", "clock", click.Choice(["real", "virtual"]),
         "A virtual clock moves only on request; it is for tests and simulation."),
        ("wall-origin", "wall_origin_ns", units.Moment(strict=True),
         "Wall time at virtual time 0. Needs --clock virtual."),
    ),
    "Sessions and operations": (
        ("sessions", "sessions", click.INT, "Maximum number of client sessions open at once."),
        ("session-grace", "session_grace_ns", units.Duration(),
         "Time that a session outlives its connection if the client's process cannot be watched."),
        ("watches", "watches", click.INT,
         "Number of watch records: one per watch key of an operation."),
        ("watch-keys", "watch_keys", click.INT,
         "Maximum number of watch keys whose watermarks the daemon remembers."),
        ("watermark-ttl", "watermark_ttl_ns", units.Duration(),
         "Time that a watermark is kept after its last change and after the end of its last "
         "watcher."),
        ("inbox", "inbox", click.INT,
         "Maximum number of operations of a session, armed or with an unacknowledged outcome."),
    ),
    "Consumer groups": (
        ("groups", "groups", click.INT, "Maximum number of consumer groups; 0 = none."),
        ("jobs", "jobs", click.INT,
         "Total of the budgets of all consumer groups: pending timers, jobs and dead letters."),
    ),
    "Schedules": (
        ("schedules", "schedules", click.INT, "Maximum number of schedules."),
    ),
    "Bulk loads": (
        ("bulk-loads", "bulk_loads", click.INT, "Number of bulk loads that the daemon remembers."),
        ("bulk-load-rows", "bulk_load_rows", click.INT,
         "Number of rows of all bulk loads that the daemon remembers."),
        ("bulk-load-ttl", "bulk_load_ttl_ns", units.Duration(),
         "Time that the daemon remembers a bulk load after its last use."),
    ),
    "Cursors": (
        ("cursors", "cursors", click.INT,
         "Number of rows for cursors of subscribers: one for each cursor, and one for its position "
         "in each topic."),
    ),
    "Rings": (
        ("ring-memory", "ring_bytes", units.Size(),
         "Memory for the rings of clients on this host, 36 to 260 KiB for each. Further clients "
         "use ZeroMQ. 0 = all clients use ZeroMQ."),
    ),
    "Access and quotas": (
        ("allow-uid", "allow_uids", click.INT,
         "Uid that may connect; may be repeated. With --allow-uid or --allow-gid only the given "
         "users and administrators may connect."),
        ("allow-gid", "allow_gids", click.INT,
         "Unix group whose members may connect; may be repeated."),
        ("admin-uid", "admin_uids", click.INT,
         "Uid that may administer, in addition to root and the daemon's own uid; may be repeated."),
        ("quota-timers", "quota_timers", click.INT,
         "Number of timers and operations that one uid may have armed; 0 = no quota."),
        ("quota-bytes", "quota_bytes", units.Size(),
         "Bytes of keys and payloads in the armed timers of one uid; 0 = no quota."),
        ("quota-ops", "quota_ops", click.INT,
         "Number of adds, watches and advances of one uid per second; 0 = no quota."),
        ("uid-share", "uid_share", click.INT,
         "Percentage of each of these tables that one uid may use: topics, namespaces, sessions, "
         "watch keys, watch records, owned operations, bulk loads. 100 = no limit."),
        ("accounts", "accounts", click.INT,
         "Maximum number of uids with sessions, timers or watch keys."),
    ),
    "Clients on other hosts": (
        ("tcp", "tcp", click.STRING,
         "HOST:PORT for commands; notices use the next port. Needs --server-key and --keys."),
        ("server-key", "server_key", click.STRING,
         "File with the daemon's key pair, made by `purgatoryd keygen`."),
        ("keys", "keys", click.STRING,
         "File with the public keys of clients that may connect: lines of NAME KEY UID."),
    ),
    "Write-ahead log": (
        ("wal-dir", "wal_dir", click.Path(),
         "Keep a write-ahead log (WAL) in DIRECTORY/NAME, so that timers survive a reboot."),
        ("durable-namespace", "durable_namespaces", click.STRING,
         "Answer each change in this namespace only once it is on disk; may be repeated."),
        ("wal-segment-bytes", "wal_segment_bytes", units.Size(), "Size of a WAL segment."),
        ("wal-buffer-bytes", "wal_buffer_bytes", units.PowerOfTwoSize(),
         "Memory for records that are not on disk yet; rounded up to a power of two."),
        ("snapshot-segments", "snapshot_segments", click.INT,
         "Number of full WAL segments after which the daemon takes a snapshot."),
        ("retain-age", "retain_age_ns", units.Duration(),
         "Keep WAL segments for readers at least this long."),
        ("retain-bytes", "retain_bytes", units.Size(),
         "Keep at least this many bytes of the WAL for readers."),
    ),
    "CPUs and memory": (
        ("placement", "placement", click.Choice(["auto", "none"]),
         "Let the daemon choose its CPUs and NUMA node (auto), or the kernel (none). "
         "`purgatoryd placement` shows the choice."),
        ("cpus", "cpus", click.STRING,
         "CPUs of the daemon, such as 3,1-2: the first for its loop, the others for its other "
         "threads."),
        ("node", "node", click.INT,
         "NUMA node of the arena and the threads; -1 = --placement decides."),
        ("realtime", "realtime", click.INT,
         "SCHED_FIFO priority of the loop, from 1 to 99; libzmq's thread gets the next lower one. "
         "0 = normal scheduling."),
        ("lock-memory", "lock_memory", click.BOOL,
         "Lock the memory that is mapped at startup into RAM."),
        ("huge-pages", "huge_pages", click.BOOL, "Give the arena huge pages at startup."),
        ("busy-poll", "busy_poll_ns", units.Duration(),
         "Time before a deadline, and after a message, during which the loop polls "
         "instead of sleeping; 10ms at most."),
    ),
    "Process": (
        ("shards", "shards", click.INT,
         "Divide the namespaces among this many daemons, each with its own arena and loop; 0 = "
         "one daemon for all."),
        ("log-level", "log_level", click.Choice(["error", "warning", "info"]),
         "Minimum log level of messages on stderr or in journald."),
    ),
}  # fmt: skip
"""The settings, by heading in `run --help`."""
_ROWS = [row for rows in GROUPS.values() for row in rows]
FLAG_OF = {field: flag for flag, field, _, _ in _ROWS}
_YES_OR_NO = {field for _, field, kind, _ in _ROWS if kind is click.BOOL}
_REPEATED = {"admin_uids", "allow_uids", "allow_gids", "durable_namespaces"}
_DERIVED = {
    "replay_bytes_max": "half of --payload-memory",
    "wall_origin_ns": "1970",
    "admin_uids": "none",
    "allow_uids": "everybody",
    "allow_gids": "everybody",
    "tcp": "none",
    "server_key": "none",
    "keys": "none",
    "wal_dir": "none",
    "durable_namespaces": "none",
    "cpus": "none",
}


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each setting to a command, under its heading."""
    for heading, rows in reversed(GROUPS.items()):
        for row in reversed(rows):
            command = _option(row, heading)(command)
    return command


def options(*flags: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds an option for each of the settings `flags`, without a
    heading."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        for row in reversed([row for row in _ROWS if row[0] in flags]):
            command = _option(row)(command)
        return command

    return decorated


def _option(row: Row, heading: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag, field, kind, text = row
    derived = _DERIVED.get(field)
    return click.option(
        f"--{flag}",
        field,
        cls=GroupedOption,
        heading=heading,
        type=kind,
        envvar=variable(flag),
        default=None if derived else _text(DEFAULTS[field], kind),
        show_default=derived or True,
        multiple=field in _REPEATED,
        help=text,
    )


def read_file(ctx: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Callback of --config: use the values in the file as the defaults of the other options."""
    if path is None:
        return None
    from purgatoryd.cli.config_file import read_table

    found, source = read_table(path), f"config file {path}"
    fields = {flag: field for field, flag in FLAG_OF.items()} | {"name": "name"}
    ctx.default_map = {}
    for flag, value in found.items():
        if flag not in fields:
            raise UnknownSetting(flag, source, tuple(fields))
        ctx.default_map[fields[flag]] = _from_file(flag, fields[flag], value, source)
    return path


def _from_file(flag: str, field: str, value: Any, source: str) -> str | list[str]:
    """Return a value of the TOML file as text, in the form that the flag accepts."""
    values = value if field in _REPEATED and isinstance(value, list) else [value]
    if field in _YES_OR_NO and isinstance(value, bool):
        return str(value)
    if any(isinstance(one, (bool, list, dict)) for one in values):
        raise InvalidSetting(flag, value, "a number or a string", source)
    return list(map(str, values)) if field in _REPEATED else str(value)


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """Raise UnknownSetting if a PURGATORYD_ variable does not name a setting."""
    known = (*OTHER_VARIABLES, *map(variable, ["name", *FLAG_OF.values()]))
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            raise UnknownSetting(name, "environment", known)


def source_of(ctx: click.Context, field: str) -> str:
    """Return the source of a setting: flag, environment, config file or default."""
    found = ctx.get_parameter_source(field)
    return _SOURCES.get(found, "default") if found else "default"


def config_from(ctx: click.Context, name: str, values: Mapping[str, Any]) -> Config:
    """Return the Config for parsed options.

    Raises InvalidSetting with the flag and its source for a value that is out of bounds.
    """
    given = {field: value for field, value in values.items() if value is not None}
    if "wall_origin_ns" in given:
        from purgatoryd.clients.times import wall_ns

        given["wall_origin_ns"] = wall_ns(given["wall_origin_ns"])
    try:
        return Config(name=name, **given)
    except InvalidSetting as error:
        raise InvalidSetting(
            FLAG_OF[error.setting], error.value, error.bound, source_of(ctx, error.setting)
        ) from None


def read_again(ctx: click.Context) -> Config:
    """Return the Config for the same command line, with the current environment and TOML file.

    Raises PurgatorydError.
    """
    try:
        again = click.Command.make_context(ctx.command, ctx.info_name, list(ctx.meta[ARGUMENTS]))
    except click.UsageError as error:
        raise InvalidArgument(error.format_message()) from error
    values = {field: value for field, value in again.params.items() if field in FLAG_OF}
    return config_from(again, again.params["name"], values)


def effective(
    ctx: click.Context, config: Config
) -> Iterator[tuple[str, int | str | list[int | str], str]]:
    """Yield (flag, value, source) for every setting. The value has the form of a TOML file."""
    yield "name", config.name, source_of(ctx, "name")
    for flag, field, kind, _ in _ROWS:
        yield flag, _written(getattr(config, field), kind), source_of(ctx, field)
