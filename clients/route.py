"""Name and namespace to the daemon that holds it: the daemon of that name, or one of its shards.

Never waits. With shards the routing table says which; a namespace that does not stand in it yet is
placed by who runs the deployment, who is asked once.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from purgatoryd.clients.channel import Channel, OpenChannel
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import DaemonUnreachable, Partitioned, ShardUnavailable
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.paths import Paths, client_paths, paths_in
from purgatoryd.shm_layout.shards import Placement, ShardTable, read_table

FAILURES = 3
"""Calls in a row without an answer, after which a shard is not asked for a while."""
ASK_AGAIN_NS = 500_000_000
PAUSE_NS, PAUSE_MAX_NS = 1_000_000_000, 30_000_000_000
"""For how long, the first time and at most; it doubles with every probe that fails."""


class Partition(NamedTuple):
    """One of those that a namespace is divided into, for a client that is one of several."""

    number: int
    breakers: dict[int, Breaker]
    """By shard; of all these clients, so that what one learns of a shard the others know."""


class Route:
    """To the daemon that holds `namespace`, or that partition of it."""

    def __init__(
        self,
        name: str,
        namespace: str,
        partition: Partition | None = None,
        host: Host = HOST,
        open_channel: OpenChannel = Channel,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.host = host
        self._open_channel = open_channel
        self.breaker: Breaker | None = None
        """Of the shard that was found last; None = the daemon has no shards."""
        self._partition = None if partition is None else partition.number
        self._breakers = {} if partition is None else partition.breakers
        self._directory: Path | None = None
        self._asked: Channel | None = None
        self._ask_boot_ns = 0

    def find(self) -> Paths:
        """Where the daemon is now. Raises DaemonUnreachable, also while the namespace is being
        placed, MessageRefused if it cannot be, Partitioned, and TableBroken."""
        paths, table = self.table()
        if table is None:
            return paths
        shard = self._shard(self.placed(paths, table))
        self.breaker = self._breakers.setdefault(shard, Breaker(self.name, shard, self.host))
        return paths_in(paths.directory, table.daemon(shard))

    def table(self) -> tuple[Paths, ShardTable | None]:
        """What there is of that name; with a table, a deployment. Raises DaemonUnreachable, also if
        it is in another directory by now: that is another daemon."""
        paths = client_paths(self.name)
        if self._directory not in (None, paths.directory):
            raise DaemonUnreachable(self.name, str(self._directory), 0.0)
        self._directory = paths.directory
        return paths, read_table(paths.directory, self.name)

    def placed(self, paths: Paths, table: ShardTable) -> Placement:
        """Where the namespace is by `table`. Raises as find() does."""
        if not table.knows(self.namespace):
            self._ask(paths)
            raise DaemonUnreachable(self.name, paths.cmd_endpoint, 0.0)
        self.close()
        return table.place(self.namespace)

    def _shard(self, placement: Placement) -> int:
        if self._partition is not None:
            return placement.shards[self._partition]
        if placement.partitions > 1:
            detail = "PartitionedClient is for those, and has plain timers only"
            raise Partitioned(self.namespace, placement.partitions, detail)
        return placement.shards[0]

    def _ask(self, paths: Paths) -> None:
        """Has the namespace placed. Asking again does no harm."""
        now_ns = self.host.boot_ns()
        if self._asked is None:
            self._asked = self._open_channel(paths.cmd_endpoint)
            self._ask_boot_ns = 0
        asks = self._asked.reconnected() or now_ns - self._ask_boot_ns > ASK_AGAIN_NS
        if asks and self._asked.send(wire.encode_place(0, wire.encode_namespace(self.namespace))):
            self._ask_boot_ns = now_ns
        data = self._asked.receive()
        if data is not None and (reply := wire.decode_reply(data)).error:
            self.close()
            raise reply.refusal()

    def close(self) -> None:
        """Gives back what it holds."""
        if self._asked is not None:
            self._asked.close()
            self._asked = None


class Breaker:
    """Of one shard: after FAILURES calls in a row without an answer, calls fail at once; now and
    then one is let through, and the first answer ends it."""

    def __init__(self, name: str, shard: int, host: Host = HOST) -> None:
        self._host = host
        self.name = name
        self.shard = shard
        self.failures = 0
        self._since_boot_ns = 0
        self._retry_boot_ns = 0
        self._pause_ns = PAUSE_NS

    def check(self) -> None:
        """Before a call. Raises ShardUnavailable."""
        if self.failures < FAILURES:
            return
        now_ns = self._host.boot_ns()
        if now_ns < self._retry_boot_ns:
            raise ShardUnavailable(
                self.name, self.shard, self.failures, self._since_boot_ns, self._retry_boot_ns
            )
        self._retry_boot_ns = now_ns + self._pause_ns  # this call is the probe

    def failed(self) -> None:
        """A call has had no answer."""
        now_ns = self._host.boot_ns()
        self.failures += 1
        if self.failures == 1:
            self._since_boot_ns = now_ns
        if self.failures > FAILURES:
            self._pause_ns = min(2 * self._pause_ns, PAUSE_MAX_NS)
        self._retry_boot_ns = now_ns + self._pause_ns

    def answered(self) -> None:
        """The shard answers."""
        self.failures, self._pause_ns = 0, PAUSE_NS
