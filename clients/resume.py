"""Resume the session of an owner of operations in a later process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from purgatoryd.clients.arguments import check_callable, check_limit_s
from purgatoryd.shm_layout import wire
from purgatoryd.shm_layout.digests import sha256
from purgatoryd.shm_layout.errors import InvalidArgument, SessionExpired
from purgatoryd.shm_layout.layout import GRACE_MAX_NS
from purgatoryd.shm_layout.wire import Key

if TYPE_CHECKING:
    from purgatoryd.clients.operations import Outcome

_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Resume:
    """Lets a later process take over the operations of an owner whose process has ended.

    `name`: 1 to 63 bytes, the same in both processes. Only one process of a uid may use a name at a
    time. `grace`: seconds or a timedelta for which the daemon keeps the session after its process
    has ended, up to a day. After that, and after close(), the daemon frees the outcomes.
    `callback(key, outcome)` runs in the purgatory's thread, once for each ended operation that an
    earlier process watched. `missing`, `failed` and `watermarks` of such an outcome are empty. The
    condition of a `When` of an earlier process counts as false.

    `on_lost(error)` runs in the same thread if a session that was taken over is lost, at most once
    for each partition of the namespace. After that, no more outcomes arrive for operations of
    earlier processes in that partition.

    Raises InvalidArgument.
    """

    name: str
    grace: float | timedelta
    callback: Callable[[Key, Outcome], object]
    on_lost: Callable[[SessionExpired], object] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not wire.encode_worker(self.name):
            raise InvalidArgument(f"name {self.name!r} must be a str of 1 to 63 bytes")
        if not 0 < check_limit_s(self.grace, "grace") * 1e9 <= GRACE_MAX_NS:
            raise InvalidArgument(f"grace {self.grace!r} must be above 0 s and at most a day")
        check_callable("callback", self.callback)
        check_callable("on_lost", self.on_lost)

    @property
    def grace_ns(self) -> int:
        """The `grace` in ns."""
        return round(check_limit_s(self.grace, "grace") * 1e9)

    def nonces(
        self, random_bytes: Callable[[int], bytes], partition: int
    ) -> Callable[[int], bytes]:
        """Return a function that first gives the nonce of the resumable session with a partition.
        Then it gives random nonces for the sessions that replace this session; no process can
        resume the replacements."""
        made = self._nonces(random_bytes, partition)
        return lambda _: next(made)

    def _nonces(self, random_bytes: Callable[[int], bytes], partition: int) -> Iterator[bytes]:
        # The first of several partitions has the same nonce as a single partition.
        suffix = b"\0%d" % partition if partition else b""
        name = b"purgatoryd resume " + self.name.encode() + suffix
        yield sha256(name)[:_NONCE_BYTES]
        while True:
            yield random_bytes(_NONCE_BYTES)
