"""Settings of `purgatoryd run`: flags > environment > TOML file > defaults.

An unknown one is an error wherever it stands: a daemon must not run with less than what
its owner wrote down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from purgatoryd.cli import units
from purgatoryd.cli.exits import ARGUMENTS
from purgatoryd.daemon.config import DEFAULTS, Config
from purgatoryd.shm_layout.errors import InvalidArgument, InvalidSetting, UnknownSetting

PREFIX = "PURGATORYD_"
# Variables that are no settings of `run` but ours all the same.
OTHER_VARIABLES = ("PURGATORYD_DIR", "PURGATORYD_CONFIG", "PURGATORYD_REQUIRE")

_SOURCES = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "config file",
    ParameterSource.DEFAULT: "default",
}


def variable(flag: str) -> str:
    """The environment variable of a flag: payload-memory -> PURGATORYD_PAYLOAD_MEMORY."""
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


# flag, field of Config, type, help
_TABLE: tuple[tuple[str, str, click.ParamType[Any], str], ...] = (
    ("capacity", "capacity", click.INT, "Timers armed at once."),
    ("payload-memory", "payload_bytes", units.Size(), "Space for keys and payloads."),
    ("replay-buffer", "replay_capacity", units.PowerOfTwo(),
     "Notices kept for subscribers that fell behind; rounded up to a power of two."),
    ("replay-memory", "replay_bytes_max", units.Size(),
     "How much of the payload memory those notices may hold."),
    ("tick", "tick_ns", units.Duration(), "Resolution of the wheel, 1us to 100ms."),
    ("fanout", "fanout", click.INT, "Buckets in one level of the wheel, 2 to 256."),
    ("topics", "topics", click.INT, "Topics, over all namespaces, without the daemon's own."),
    ("namespaces", "namespaces", click.INT, "Namespaces, without the daemon's own."),
    ("sessions", "sessions", click.INT, "Client sessions open at once."),
    ("session-grace", "session_grace_ns", units.Duration(),
     "How long a session outlives its connection if its process cannot be watched."),
    ("watches", "watches", click.INT, "Watch records: one per key of each operation."),
    ("watch-keys", "watch_keys", click.INT, "Watch keys whose watermarks are remembered."),
    ("watermark-ttl", "watermark_ttl_ns", units.Duration(),
     "How long a watermark outlives its last change and watcher."),
    ("inbox", "inbox", click.INT, "Operations one client may own, armed or not acknowledged."),
    ("clock", "clock", click.Choice(["real", "virtual"]),
     "A virtual clock moves only on request: for tests and simulation."),
    ("wall-origin", "wall_origin_ns", units.Moment(),
     "Virtual clock: wall time at virtual time 0."),
    ("budget", "budget", click.INT, "Timers fired or moved in one loop iteration."),
    ("quota-timers", "quota_timers", click.INT, "Timers of one uid; 0 = no quota, here and below."),
    ("quota-bytes", "quota_bytes", units.Size(),
     "Bytes of keys and payloads in the timers of one uid."),
    ("quota-ops", "quota_ops", click.INT, "Adds, watches and advances of one uid per second."),
    ("uid-share", "uid_share", click.INT,
     "Per cent of the topics, namespaces, sessions, watch keys, watch records, owned operations "
     "and bulk loads, each, that one uid may hold; 100 = no limit."),
    ("accounts", "accounts", click.INT,
     "Uids that may have sessions, timers or watch keys at once."),
    ("bulk-loads", "bulk_loads", click.INT, "Bulk loads remembered at once."),
    ("bulk-load-rows", "bulk_load_rows", click.INT,
     "Rows of bulk loads remembered, over all bulk loads."),
    ("bulk-load-ttl", "bulk_load_ttl_ns", units.Duration(),
     "How long a bulk load is remembered after its last use."),
    ("admin-uid", "admin_uids", click.INT,
     "Uid that may administer, besides root and the daemon's own; may be repeated."),
    ("allow-uid", "allow_uids", click.INT,
     "Uid that may connect; others may not, once one is named. May be repeated."),
    ("allow-gid", "allow_gids", click.INT,
     "Group whose members may connect, likewise. May be repeated."),
    ("log-level", "log_level", click.Choice(["error", "warning", "info"]),
     "Minimum log level of messages on stderr or to journald."),
    ("shards", "shards", click.INT,
     "Divide the namespaces among so many daemons, each with an arena and a loop of its own; 0 = "
     "one daemon for all."),
    ("tcp", "tcp", click.STRING,
     "HOST:PORT for clients on other hosts; notices have the next port. Needs the next two."),
    ("server-key", "server_key", click.STRING,
     "File of the daemon's key pair, made by `purgatoryd keygen`."),
    ("keys", "keys", click.STRING, "File of the keys that are let in: lines of NAME KEY UID."),
    ("wal-dir", "wal_dir", click.Path(),
     "Keep a write-ahead log (WAL) in DIRECTORY/NAME: what is armed survives a reboot."),
    ("wal-segment-bytes", "wal_segment_bytes", units.Size(), "Size of one file of the WAL."),
    ("wal-buffer-bytes", "wal_buffer_bytes", units.PowerOfTwoSize(),
     "Space for records on their way to disk; rounded up to a power of two."),
    ("snapshot-segments", "snapshot_segments", click.INT,
     "Take a snapshot whenever so many files were filled."),
    ("retain-age", "retain_age_ns", units.Duration(),
     "Keep files of the WAL at least so long for readers."),
    ("retain-bytes", "retain_bytes", units.Size(),
     "Keep at least so much of the WAL for readers."),
    ("durable-namespace", "durable_namespaces", click.STRING,
     "Answer every change in this namespace once it is on disk; may be repeated."),
    ("placement", "placement", click.Choice(["auto", "none"]),
     "Who chooses CPUs and NUMA node: the daemon or the kernel. See `purgatoryd placement`."),
    ("cpus", "cpus", click.STRING,
     "CPUs of the daemon, as 3,1-2: its loop has the first, its other threads the rest."),
    ("node", "node", click.INT, "NUMA node of arena and threads; -1 = as --placement says."),
    ("realtime", "realtime", click.INT,
     "Priority of the loop under SCHED_FIFO, 1 to 99, and one less of libzmq's thread; 0 = "
     "the usual scheduling."),
    ("lock-memory", "lock_memory", click.BOOL, "Keep what is mapped at the start in RAM."),
    ("huge-pages", "huge_pages", click.BOOL, "Make the arena's pages huge ones at the start."),
    ("busy-poll", "busy_poll_ns", units.Duration(),
     "So long before a deadline the loop sleeps no more, 10ms at most."),
)  # fmt: skip
FLAG_OF = {field: flag for flag, field, _, _ in _TABLE}
_YES_OR_NO = {field for _, field, kind, _ in _TABLE if kind is click.BOOL}
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
    """Adds an option for every setting to a command."""
    return options(*FLAG_OF.values())(command)


def options(*flags: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds an option for each of these settings to a command."""
    return lambda command: _with_options(command, flags)


def _with_options(command: Callable[..., Any], flags: tuple[str, ...]) -> Callable[..., Any]:
    for flag, field, kind, text in reversed([row for row in _TABLE if row[0] in flags]):
        derived = _DERIVED.get(field)
        option = click.option(
            f"--{flag}",
            field,
            type=kind,
            envvar=variable(flag),
            default=None if derived else _text(DEFAULTS[field], kind),
            show_default=derived or True,
            multiple=field in _REPEATED,
            help=text,
        )
        command = option(command)
    return command


def read_file(ctx: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Callback of --config: the file's values become the defaults of the other options."""
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
    """What is read as the same text would be in a flag."""
    values = value if field in _REPEATED and isinstance(value, list) else [value]
    if field in _YES_OR_NO and isinstance(value, bool):
        return str(value)
    if any(isinstance(one, (bool, list, dict)) for one in values):
        raise InvalidSetting(flag, value, "a number or a string", source)
    return list(map(str, values)) if field in _REPEATED else str(value)


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """Raises UnknownSetting for a PURGATORYD_ variable that means nothing."""
    known = (*OTHER_VARIABLES, *map(variable, ["name", *FLAG_OF.values()]))
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            raise UnknownSetting(name, "environment", known)


def source_of(ctx: click.Context, field: str) -> str:
    """Where the value of a setting came from."""
    found = ctx.get_parameter_source(field)
    return _SOURCES.get(found, "default") if found else "default"


def config_from(ctx: click.Context, name: str, values: Mapping[str, Any]) -> Config:
    """The Config of parsed options. A bound that is broken names the flag and the source."""
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
    """The Config of the same command line as the settings are written down now.

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
    """(flag, value as it may be written, source) of every setting."""
    yield "name", config.name, source_of(ctx, "name")
    for flag, field, kind, _ in _TABLE:
        yield flag, _written(getattr(config, field), kind), source_of(ctx, field)
