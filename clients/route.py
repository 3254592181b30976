"""Find the daemon that holds a partition of a namespace: a daemon, or a shard of a deployment.

With shards the routing table says which shard holds each partition. If a namespace is not in the
table yet, the deployment is asked to create it. No code here waits.
"""

from __future__ import annotations

from pathlib import Path

from purgatoryd.clients.local_channel import open_zmq
from purgatoryd.clients.poller import AnyChannel, OpenChannel
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.errors import DaemonUnreachable, Partitioned, ShardUnavailable
from purgatoryd.shm_layout.host import HOST, Host
from purgatoryd.shm_layout.paths import Paths, client_paths, paths_in
from purgatoryd.shm_layout.shards import Placement, ShardTable, read_table

FAILURES = 3
"""Number of consecutive calls without an answer after which calls for a shard fail at once."""
ASK_AGAIN_NS = 500_000_000
PAUSE_NS, PAUSE_MAX_NS = 1_000_000_000, 30_000_000_000
"""Pause before the first probe of a shard that does not answer, and the longest pause. Each failed
probe doubles the pause."""


class Route:
    """Finds the daemons that hold `namespace`, for one client."""

    def __init__(
        self,
        name: str,
        namespace: str,
        host: Host = HOST,
        open_channel: OpenChannel = open_zmq,
    ) -> None:
        self.name = name
        self.namespace = namespace
        self.host = host
        self._open_channel = open_channel
        self._breakers: dict[int, Breaker] = {}
        """Breakers by shard, shared by the connections to a shard."""
        self._partitions = 0
        """Number of partitions that the first find() or count() saw; 0 = none yet."""
        self._directory: Path | None = None
        self._asked: AnyChannel | None = None
        self._ask_boot_ns = 0

    def count(self) -> int:
        """Return the number of partitions of the namespace; 1 without shards. Raises the errors of
        find()."""
        paths, table = self.table()
        return self._counted(1 if table is None else self.placed(paths, table).partitions)

    def find(self, partition: int = 0) -> tuple[Paths, Breaker | None]:
        """Return (paths of the daemon that holds a partition, breaker of its shard). Without shards
        the breaker is None.

        Raises DaemonUnreachable if the daemon is not found or the namespace is not created yet,
        MessageRefused if it cannot be created, TableBroken, and Partitioned if the number of
        partitions has changed.
        """
        paths, table = self.table()
        if table is None:
            self._counted(1)
            return paths, None
        placement = self.placed(paths, table)
        self._counted(placement.partitions)
        shard = placement.shards[partition]
        breaker = self._breakers.setdefault(shard, Breaker(self.name, shard, self.host))
        return paths_in(paths.directory, table.daemon(shard)), breaker

    def _counted(self, partitions: int) -> int:
        if self._partitions not in (0, partitions):
            detail = f"this client was opened when it had {self._partitions}; open a new client"
            raise Partitioned(self.namespace, partitions, detail)
        self._partitions = partitions
        return partitions

    def table(self) -> tuple[Paths, ShardTable | None]:
        """Return (paths of the daemon, routing table). The table is None without shards. Raises
        DaemonUnreachable if the daemon is not found, or if its name is found in another directory
        than before, because that is another daemon."""
        paths = client_paths(self.name)
        if self._directory not in (None, paths.directory):
            raise DaemonUnreachable(self.name, str(self._directory), 0.0)
        self._directory = paths.directory
        return paths, read_table(paths.directory, self.name)

    def placed(self, paths: Paths, table: ShardTable) -> Placement:
        """Return the placement of the namespace in `table`. Raises the errors of find()."""
        if not table.knows(self.namespace):
            self._ask(paths)
            raise DaemonUnreachable(self.name, paths.cmd_endpoint, 0.0)
        self.close()
        return table.place(self.namespace)

    def _ask(self, paths: Paths) -> None:
        """Ask the deployment to create the namespace. A repeated request does no harm."""
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
        """Close the channel to the deployment, if one is open."""
        if self._asked is not None:
            self._asked.close()
            self._asked = None


class Breaker:
    """Circuit breaker of one shard.

    After FAILURES consecutive calls without an answer, calls fail at once, except one probe after
    each pause of PAUSE_NS to PAUSE_MAX_NS. The first answer closes the breaker.
    """

    def __init__(self, name: str, shard: int, host: Host = HOST) -> None:
        self._host = host
        self.name = name
        self.shard = shard
        self.failures = 0
        self._since_boot_ns = 0
        self._retry_boot_ns = 0
        self._pause_ns = PAUSE_NS

    def check(self) -> None:
        """Admit a call. Raises ShardUnavailable."""
        if self.failures < FAILURES:
            return
        now_ns = self._host.boot_ns()
        if now_ns < self._retry_boot_ns:
            raise ShardUnavailable(
                self.name, self.shard, self.failures, self._since_boot_ns, self._retry_boot_ns
            )
        self._retry_boot_ns = now_ns + self._pause_ns  # this call is the probe

    def failed(self) -> None:
        """Count a call that got no answer."""
        now_ns = self._host.boot_ns()
        self.failures += 1
        if self.failures == 1:
            self._since_boot_ns = now_ns
        if self.failures > FAILURES:
            self._pause_ns = min(2 * self._pause_ns, PAUSE_MAX_NS)
        self._retry_boot_ns = now_ns + self._pause_ns

    def answered(self) -> None:
        """Note an answer of the shard, and admit all its calls again."""
        self.failures, self._pause_ns = 0, PAUSE_NS
