"""A deployment whose namespace "default" has partitions."""

from __future__ import annotations

from real_daemon import PATIENCE_S, Daemon, StartDaemon

from purgatoryd.clients import Admin


def start_partitioned(daemon: StartDaemon, partitions: int, *options: str) -> Daemon:
    """Start "demo": with one partition a daemon without shards, else two shards."""
    if partitions == 1:
        return daemon("demo", *options)
    real = daemon("demo", "--shards", "2", *options)
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("default", partitions)
    return real
