"""The shards of a deployment, and a ledger of the timers and operations that must still end.
Resharding must not change this ledger."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from purgatory_driver import ALL, SUM, Key, Mail, Owner, Purgatory, advance, put, watch

from purgatoryd.shm_layout._core import ffi, lib
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.layout import Status, TimeKind
from purgatoryd.shm_layout.merge import Route

MS = 10**6
FAR_NS = 10**12
LATE_NS = 2 * FAR_NS
PARTS = b"parts"
"""The namespace whose keys are partitioned."""
OWNED = b"n"
"""The namespace of the owner's operations and bulk load: the first name in the driver's NAMES."""
NONCE, UID, BULK_LOAD = 77, 4321, bytes(range(1, 17))
SIZES = {
    "capacity": 128,
    "replay_capacity": 64,
    "topics": 32,
    "namespaces": 16,
    "accounts": 4,
    "bulk_loads": 2,
    "bulk_load_blocks": 2,
}


class Shards:
    """The arenas of a deployment, by shard, and the placement of its namespaces."""

    def __init__(
        self, cores: Sequence[Purgatory], placements: Mapping[bytes, tuple[int, ...]]
    ) -> None:
        self.cores = cores
        self.placements = placements

    def of(self, namespace: bytes, key: bytes) -> Purgatory:
        """Return the core of the shard to which a key belongs."""
        shards = self.placements[namespace]
        partition = int(lib.pg_partition(key, len(key), len(shards)))
        return self.cores[shards[partition]]

    def routes(self, to: Mapping[bytes, tuple[int, ...]], shard: int) -> dict[str, Route]:
        """Return, for each namespace, the route from one shard to the namespace's new shards."""
        mine = (name for name, shards in self.placements.items() if shard in shards)
        return {name.decode(): Route(to[name], fresh_topics=len(to[name]) > 1) for name in mine}

    def check(self) -> None:
        for core in self.cores:
            core.check()


def as_arena(core: Purgatory) -> Arena:
    """Return a core in private memory as an Arena, for functions that take one."""
    arena = Arena.__new__(Arena)  # without __init__, which needs arena files
    arena._a, arena._base, arena._secret = core.a, core._base, core._secret
    return arena


def as_core(arena: Arena) -> Purgatory:
    """Return an arena in shared memory as a core of the test drivers. It is valid while the arena
    is open."""
    core = Purgatory()
    core.a, core._base, core._secret = arena.struct, arena._base, arena._secret
    core.arena, core.private = arena.mappings
    core.config["topics"] = arena.header.regions[lib.PG_R_TOPICS].count
    return core


def renamed(batch: bytes, session: int) -> bytes:
    """Return the batch with another session id."""
    return batch[:8] + session.to_bytes(8, "little") + batch[16:]


class Ledger:
    """A record of acknowledged timers and operations, and of their results."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.given: set[int] = set()
        """Every ticket that any shard ever assigned."""
        self.expected: dict[int, tuple[bytes, bytes, bytes]] = {}
        """For each ticket that still has to fire: (namespace, key, payload)."""
        self.sent: dict[tuple[str, str], int] = {}
        """Newest sequence of each topic of an unpartitioned namespace."""
        self.last = b""
        self.answers: list[Any] = []

    # ---- before ----

    def arm(self, shards: Shards, namespace: bytes, key: bytes, at_ns: int) -> None:
        payload = self.random.randbytes(self.random.choice((0, 5, 300)))
        kind = self.random.choice((TimeKind.BOOT, TimeKind.WALL))
        core = shards.of(namespace, key)
        topic = self.random.choice((b"t", b"u"))
        answer = core.put(key, at_ns, kind, payload=payload, namespace=namespace, topic=topic)
        assert answer.status == Status.ADDED
        self.note(core, answer.ticket)
        self.expected[answer.ticket] = namespace, key, payload

    def note(self, core: Purgatory, ticket: int) -> None:
        """Record a ticket that this shard has just assigned."""
        assert ticket // lib.PG_TICKET_SHARD == core.header.shard
        assert ticket not in self.given
        self.given.add(ticket)

    def fill(self, shards: Shards) -> None:
        """Add timers to all namespaces: fired and sent timers, fired but unsent timers, and armed
        timers."""
        for stage, at_ns in enumerate((10 * MS, 20 * MS, FAR_NS)):
            for namespace in shards.placements:
                for n in range(self.random.randint(1, 4)):
                    self.arm(shards, namespace, b"%d:%d" % (stage, n), at_ns + n * MS)
        for core in shards.cores:
            core.advance(15 * MS)
        self.take(shards)
        for core in shards.cores:
            core.advance(25 * MS)

    def operate(self, shards: Shards) -> None:
        """Create an owner that has two armed, partly satisfied operations and an unacknowledged
        outcome."""
        core = shards.of(OWNED, b"")
        core.set_quotas(timers=50)
        owner = Owner(core, NONCE, UID)
        answers = owner.send(
            watch(b"all", ALL, [Key(b"r1", 5), Key(b"r2" * 20, 5)], FAR_NS, notice=True),
            watch(b"sum", SUM, [Key(b"r1", 0, 100), Key(b"r3", 0, 100)], FAR_NS, threshold=90),
            watch(b"ended", ALL, [Key(b"r1", 2)], FAR_NS, payload=b"why"),
            advance(b"r1", 5), advance(b"r3", 84),
        )  # fmt: skip
        owner.bulk_load((BULK_LOAD, 0, 1), put(b"row0", FAR_NS), put(b"row1", FAR_NS))
        self.last = owner.newest
        self.answers = owner.again().answers
        for answer in answers[:3] + self.answers:
            self.note(core, answer.ticket)
        for row, answer in enumerate(self.answers):
            self.expected[answer.ticket] = OWNED, b"row%d" % row, b""

    # ---- after ----

    def take(self, shards: Shards) -> None:
        """Take all notices. Each notice must arrive once. In an unpartitioned namespace, no
        sequence may be missing."""
        for core in shards.cores:
            for part in core.publish_all():
                before = self.sent.get((part.namespace, part.topic), 0)
                partitioned = len(shards.placements[part.namespace.encode()]) > 1
                assert partitioned or part.head.first == before + 1
                self.sent[part.namespace, part.topic] = part.head.first + part.head.records - 1
                for ticket, _, _, _, flags, key, payload, _ in part.notices:
                    if not flags & lib.PG_E_OPERATION:
                        due = self.expected.pop(ticket)
                        assert due == (part.namespace.encode(), key, payload)

    def compare(self, shards: Shards) -> None:
        """Check that each armed timer is in the shard that the placement names, and in no other
        shard."""
        shards.check()
        for core in shards.cores:
            for info in core.scan():
                if info.namespace == OWNED.decode() and info.ticket not in self.expected:
                    continue  # an operation of the owner
                namespace, key, _ = self.expected[info.ticket]
                assert core is shards.of(namespace, key)
        armed = [key for key in self.expected.values() if not key[1].startswith((b"0", b"1"))]
        found = [info for core in shards.cores for info in core.scan()]
        assert len(found) == len(armed) + 2  # two operations of the owner

    def owner(self, shards: Shards) -> Owner:
        """Let the owner open its session again. Check that it receives its last answers and its
        unacknowledged outcome again. Return the owner."""
        core = shards.of(OWNED, b"")
        owner = Owner(core, NONCE, UID)
        owner.newest = renamed(self.last, owner.id)
        assert owner.again().answers == self.answers
        core.mail_again(owner.id)
        [outcome] = owner.mail()
        assert (outcome.key, outcome.payload, outcome.cause) == (
            b"ended", b"why", lib.PG_CAUSE_SATISFIED,
        )  # fmt: skip
        assert outcome.ticket in self.given
        return owner

    def finish(self, shards: Shards) -> None:
        """Let all timers and operations end. Check that they end as they would have ended without
        resharding."""
        owner = self.owner(shards)
        core = owner.core
        core.set_quotas(timers=50)
        row = owner.bulk_load((BULK_LOAD, 1, 1), put(b"row1", FAR_NS), put(b"row2", FAR_NS))
        assert [answer.status for answer in row] == [Status.BULK_LOADED, Status.ADDED]
        self.note(core, row[1].ticket)
        self.expected[row[1].ticket] = OWNED, b"row2", b""
        quota = owner.send(*[put(b"much%d" % n, FAR_NS) for n in range(50)])
        assert {answer.status for answer in quota[45:]} == {Status.QUOTA}
        for n, answer in enumerate(quota):
            if answer.status == Status.ADDED:
                self.note(core, answer.ticket)
                self.expected[answer.ticket] = OWNED, b"much%d" % n, b""
        ends = owner.send(advance(b"r3", 85), advance(b"r2" * 20, 5))
        assert [answer.ended for answer in ends] == [1, 1]
        reported: list[Mail] = owner.mail()
        assert {mail.key: mail.cause for mail in reported} == dict.fromkeys(
            (b"sum", b"all"), lib.PG_CAUSE_SATISFIED
        )
        for one in shards.cores:
            while one.advance(LATE_NS):
                self.take(shards)
        self.take(shards)
        assert not self.expected
        shards.check()


def release(cores: Sequence[Purgatory]) -> None:
    """Release the memory of the arenas, so that it can be unmapped."""
    for core in cores:
        core.a = core._base = core._secret = ffi.NULL
