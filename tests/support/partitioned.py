"""A deployment in which the namespace "default" can have several partitions."""

from __future__ import annotations

from real_daemon import PATIENCE_S, Daemon, StartDaemon

from purgatoryd.clients import Admin


def start_partitioned(daemon: StartDaemon, partitions: int, *options: str) -> Daemon:
    """Start the daemon "demo": without shards if `partitions` is 1, otherwise with two shards."""
    if partitions == 1:
        return daemon("demo", *options)
    real = daemon("demo", "--shards", "2", *options)
    with Admin("demo", timeout=PATIENCE_S) as admin:
        admin.create_namespace("default", partitions)
    return real
