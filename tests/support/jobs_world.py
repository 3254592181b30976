"""Steps of a core with consumer groups, and random steps of its clients."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

from jobs_driver import JobsCore, Leased, Session, record

from purgatoryd.shm_layout._core import lib
from purgatoryd.shm_layout.layout import Op, Status

MS = 10**6
SECOND = 10**9


def fire(core: JobsCore, *keys: str, topic: bytes = b"t") -> list[int]:
    """Let timers fire. Return their tickets."""
    tickets = [core.put(key, 0, topic=topic, payload=b"p" + key.encode()).ticket for key in keys]
    step(core)
    return tickets


def step(core: JobsCore, ns: int = MS) -> None:
    """Move the clock."""
    now_ns = core.header.now_ns + ns
    while core.advance(now_ns):
        pass
    core.publish_all()
    core.check()


def restart(core: JobsCore) -> None:
    core.attach()
    core.rebuild(core.header.now_ns)
    core.check()


def timer(key: str, delay_ns: int = MS, **fields: Any) -> tuple[bytes, bytes]:
    return record(Op.PUT, key.encode(), time_kind=1, time_ns=delay_ns, **fields)


class World:
    """Random steps of clients, and what each job has seen of them."""

    def __init__(self, seed: int, core: JobsCore | None = None, max_dead: int = 3) -> None:
        self.random = random.Random(seed)
        self.core = core or JobsCore(sessions=64)
        self.groups = {b"g": 0, b"h": lib.PG_G_ORDERED, b"i": lib.PG_G_ORDERED | lib.PG_G_BLOCK}
        for name, flags in self.groups.items():
            self.core.create_group(
                name, flags=flags, max_attempts=4, max_jobs=60, max_dead=max_dead,
                retention_ns=300 * MS if name == b"h" else 0, backoff_base_ns=8 * MS,
            )  # fmt: skip
        self.sessions = [Session(self.core) for _ in range(3)]
        self.held: dict[tuple[int, int], tuple[Leased, int]] = {}
        """The newest lease of each job by group and ticket, and the session that got it."""
        self.acked: Counter[tuple[int, int]] = Counter()
        self.keys = 0

    def step(self) -> None:
        steps = [
            self.add,
            self.add,
            self.add,
            self.advance,
            self.advance,
            self.join,
            self.answer,
            self.answer,
            self.answer,
            self.answer,
            self.leave,
            self.restart,
            self.dead,
            self.cancel,
        ]
        self.random.choice(steps)()
        self.core.check()
        self.check_oldest()

    def check_oldest(self) -> None:
        """Check that each group names the job without an ack that fired first."""
        jobs, fired_ns = self.core.rows(lib.PG_R_JOBS, "pg_job"), defaultdict[int, list[int]](list)
        for row in range(self.core.header.regions[lib.PG_R_JOBS].count):
            if jobs[row].control & 0xFF not in (lib.PG_JOB_FREE, lib.PG_JOB_DEAD):
                fired_ns[jobs[row].group].append(jobs[row].fired_ns)
        for row, name in enumerate(self.groups):
            oldest = self.core.rows(lib.PG_R_GROUPS, "pg_consumer_group")[row].oldest
            found = [] if oldest == lib.PG_NIL else [jobs[oldest].fired_ns]
            assert found == sorted(fired_ns[row])[:1], name

    def add(self) -> None:
        self.keys += 1
        session = self.random.choice(self.sessions)
        key = f"k{self.random.randrange(12)}"
        session.one(timer(key, self.random.randrange(20) * MS, mode=1))

    def advance(self) -> None:
        step(self.core, self.random.choice([1, 5, 40]) * MS)
        self.receive()

    def receive(self) -> None:
        """Take the jobs that were sent. A job that was sent before keeps its lease, unless it was
        leased again."""
        for session, jobs in self.core.received().items():
            for held in jobs:
                before, _ = self.held.get((held.group, held.ticket), (None, 0))
                assert before is None or held.lease >= before.lease
                assert (held.group, held.ticket) not in self.acked
                self.held.pop((held.group, held.ticket), None)  # the newest lease comes last
                self.held[held.group, held.ticket] = (held, session)

    def join(self) -> None:
        session = self.random.choice(self.sessions)
        answer = session.join(
            self.random.choice(list(self.groups)), self.random.randrange(6),
            self.random.choice([10, 100]) * MS,
        )  # fmt: skip
        assert answer.status == Status.DONE
        step(self.core)
        self.receive()

    def answer(self) -> None:
        """Answer a job, mostly through the session that got it last."""
        if not self.held:
            return
        held, owner = self.random.choice(list(self.held.values())[-6:])
        owners = [s for s in self.sessions if s.id == owner and self.random.random() < 0.9]
        session = self.random.choice(owners or self.sessions)
        how = self.random.choice(["ack", "ack", "nack", "release", "reject", "extend"])
        job = self.core.rows(lib.PG_R_JOBS, "pg_job")[held.row]
        owns = (
            job.control & 0xFF == lib.PG_JOB_LEASED and job.ticket >> 8 == held.ticket
            and job.control >> 32 == held.lease and job.session == session.id
        )  # fmt: skip
        if how == "nack":
            status = session.nack(held, self.random.choice([-1, 0, 7 * MS]), b"e" * 40)
        elif how == "extend":
            status = session.extend(held, 50 * MS)
        else:
            status = getattr(session, how)(held)
        assert status == (Status.DONE if owns else Status.LEASE_LOST)
        if owns and how in ("ack", "reject"):
            del self.held[held.group, held.ticket]
        if owns and how == "ack":
            self.acked[held.group, held.ticket] += 1

    def leave(self) -> None:
        n = self.random.randrange(len(self.sessions))
        if self.random.random() < 0.5:
            lib.pg_inbox_away(self.core.a, self.sessions[n].id)
            self.core.check()
        self.sessions[n].bye()
        self.sessions[n] = Session(self.core)

    def restart(self) -> None:
        restart(self.core)
        if self.random.random() < 0.2:
            self.core.migrated(jobs=450).check()

    def dead(self) -> None:
        group = self.random.choice(list(self.groups))
        self.core.ask_dead(self.random.choice([lib.PG_DA_DROP, lib.PG_DA_REQUEUE]), group)

    def cancel(self) -> None:
        key = f"k{self.random.randrange(12)}".encode()
        self.random.choice(self.sessions).one(record(Op.CANCEL, key, flags=1))
