"""Rows of columns on their way into a daemon, each known there by its bulk load and its number."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

import numpy as np
import pyarrow as pa

from purgatoryd.clients import BulkLoad, BulkResult, Client, Remote
from purgatoryd.clients.closing import Closing
from purgatoryd.clients.packing import is_refusal
from purgatoryd.shm_layout.errors import BulkLoadRefused, Busy, ParkedElsewhere, SessionExpired
from purgatoryd.shm_layout.layout import Status
from purgatoryd.shm_layout.paths import client_paths
from purgatoryd.shm_layout.shards import read_table

TIMES = ("deadline", "deadline_ns", "delay", "delay_ns", "deadline_boot_ns")
PATIENCE_S = 60.0
"""How long rows may be answered BUSY before that counts as refused."""
SESSIONS = 3
"""How often rows whose session was lost are added again."""
SAMPLES = 5
_ARROW = {"str": pa.string(), "bytes": pa.binary()}


@dataclass(slots=True)
class Answers:
    """How many rows were answered how, by the names of enum pg_status; and some refusals, as
    (namespace, key, status)."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def refusals(self) -> dict[str, int]:
        """The counts of rows that were not done."""
        return {name: n for name, n in self.counts.items() if is_refusal(Status[name])}

    @property
    def refused(self) -> int:
        """How many rows were not done."""
        return sum(self.refusals.values())

    def add(self, other: Answers) -> None:
        """Takes what another has."""
        self.counts += other.counts
        self.samples = (self.samples + other.samples)[:SAMPLES]

    def record(self) -> dict[str, Any]:
        """In JSON."""
        return {"counts": dict(self.counts), "refused": self.refused, "samples": self.samples}

    def check(self, subject: str) -> None:
        """Raises BulkLoadRefused if a row was refused."""
        if self.refused:
            raise BulkLoadRefused(subject, self.refused, dict(self.counts), tuple(self.samples))


def write_report(path: Path, bulk_load: UUID, answers: Answers) -> None:
    """What became of a bulk load, as JSON."""
    path.write_text(json.dumps({"bulk_load": str(bulk_load), **answers.record()}, indent=1) + "\n")


class BulkLoader(Closing):
    """Adds rows to the daemon `name`; it connects once it has something to say.

    `remote`: where the daemon is, if it is on another host. `mode`: what an add does when its key
    is armed. `timeout`: seconds without any answer that end a call. `durable`: answers wait until
    the daemon's WAL has them on disk; None = if the daemon keeps one.
    """

    def __init__(
        self, name: str, remote: Remote | None = None, mode: Any = "keep", *,
        timeout: float | timedelta = 30.0, durable: bool | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self._remote = remote
        self._mode = mode
        self._timeout = timeout
        self._durable = durable
        self._clients: dict[str, Client] = {}

    def close(self) -> None:
        """Ends the sessions."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    def _client(self, namespace: str) -> Client:
        if namespace not in self._clients:
            self._clients[namespace] = Client(
                self.name, namespace=namespace, remote=self._remote, timeout=self._timeout,
                durable=self._durable,
            )  # fmt: skip
        return self._clients[namespace]

    # ---- adds ----------------------------------------------------------------------------

    def open_bulk_load(
        self, bulk_load: UUID, namespaces: Iterable[str], fencing_token: int
    ) -> None:
        """Begins run `fencing_token` of it: those of lower ones add nothing more. Raises
        MessageRefused, DaemonError."""
        for namespace in namespaces:
            self._client(namespace).open_bulk_load(
                bulk_load_in(bulk_load, namespace), fencing_token
            )

    def add(self, bulk_load: UUID, rows: pa.Table, fencing_token: int = 0) -> Answers:
        """Arms rows: namespace, key_type, key, topic, payload, one of TIMES, and `row`, their
        number in the bulk load. With `daemon` and `ticket`: those are parked there, and are brought
        back. `fencing_token`: the run of the bulk load. What the daemon is too busy for is sent
        again. Raises ParkedElsewhere if this is not that daemon, DaemonError."""
        answers, end_s = Answers(), time.monotonic() + PATIENCE_S
        while rows.num_rows:
            sent = [self._statuses(bulk_load, run, fencing_token) for run in runs(rows)]
            statuses = np.concatenate(sent)
            again = (statuses == Status.BUSY) & (time.monotonic() < end_s)
            answers.add(counted(rows.filter(pa.array(~again)), statuses[~again]))
            rows = rows.filter(pa.array(again))
        return answers

    def _statuses(self, bulk_load: UUID, run: pa.Table, fencing_token: int) -> Any:
        """What became of a run; rows whose session was lost are sent in another one."""
        namespace = run["namespace"][0].as_py()
        known = BulkLoad(bulk_load_in(bulk_load, namespace), run["row"][0].as_py(), fencing_token)
        for left in reversed(range(SESSIONS)):
            try:
                return self._send(self._client(namespace), run, known)
            except SessionExpired:
                if not left:
                    raise
        raise AssertionError

    def _send(self, client: Client, run: pa.Table, known: BulkLoad) -> Any:
        if "ticket" not in run.column_names or not run["ticket"][0].is_valid:
            adds = partial(client.add_many, as_adds(run), mode=self._mode, bulk_load=known)
            return _statuses(adds)
        parked_by, daemon = run["daemon"][0].as_py(), client.daemon.hex()
        if parked_by != daemon:  # its tickets may be those of other timers here
            raise ParkedElsewhere(parked_by, daemon, run.num_rows)
        return _statuses(partial(client.unpark_many, as_returns(run), bulk_load=known))

    def uuids(self) -> list[str]:
        """Of the daemon's arena, or of those of its shards, in hex. Raises DaemonError."""
        return [self._uuid(name) for name in self._daemons()]

    def _uuid(self, daemon: str) -> str:
        with Client(daemon, remote=self._remote, timeout=self._timeout) as client:
            return client.daemon.hex()

    def _daemons(self) -> list[str]:
        if self._remote is not None:
            return [self.name]
        table = read_table(client_paths(self.name).directory, self.name)
        return [self.name] if table is None else table.daemons

    def close_bulk_load(
        self, bulk_load: UUID, namespaces: Iterable[str], fencing_token: int = 0
    ) -> None:
        """From now on no row of it adds anything. Raises MessageRefused, DaemonError."""
        for namespace in namespaces:
            self._client(namespace).close_bulk_load(
                bulk_load_in(bulk_load, namespace), fencing_token
            )

    def forget_bulk_load(self, bulk_load: UUID, namespaces: Iterable[str]) -> None:
        """The daemon need not know it any more. Raises MessageRefused, DaemonError."""
        for namespace in namespaces:
            self._client(namespace).forget_bulk_load(bulk_load_in(bulk_load, namespace))

    # ---- cancels -------------------------------------------------------------------------

    def cancel(self, keys: pa.Table) -> dict[str, int]:
        """Ends the timers of namespace, key_type, key; how many cancels found what.

        Raises BulkLoadRefused, DaemonError.
        """
        answers = Answers()
        for run in runs(keys):
            client = self._client(run["namespace"][0].as_py())
            result = client.cancel_many(keys_of(run), wait=False)
            client.flush()
            result.check()
            answers.add(counted(run, np.asarray(result.statuses)))
        answers.check("cancels")
        return dict(answers.counts)


def _statuses(call: Callable[[], BulkResult]) -> Any:
    """Return a status per row of a bulk call; BUSY for rows refused until the timeout."""
    try:
        return np.asarray(call().statuses)
    except Busy as error:
        if error.in_doubt:
            raise
        return np.asarray(error.result.statuses)


def bulk_load_in(bulk_load: UUID, namespace: str) -> bytes:
    """What the daemon knows a bulk load by: a bulk load of its has one namespace."""
    return uuid5(bulk_load, namespace).bytes


def runs(rows: pa.Table) -> Iterator[pa.Table]:
    """Pieces of one namespace, one type of keys and one `daemon`, if the rows have one, whose
    numbers follow each other."""
    ends = np.zeros(max(rows.num_rows - 1, 0), bool)
    for name in {"namespace", "key_type", "daemon"} & set(rows.column_names):
        values = rows[name].combine_chunks()
        codes = values.dictionary_encode("encode").indices.to_numpy()
        ends |= np.diff(codes) != 0
    if "row" in rows.column_names:
        ends |= np.diff(rows["row"].to_numpy()) != 1
    borders = [0, *(np.flatnonzero(ends) + 1).tolist(), rows.num_rows]
    for first, last in pairwise(borders):
        yield rows.slice(first, last - first)


def as_adds(run: pa.Table) -> dict[str, Any]:
    """The columns as add_many takes them."""
    columns: dict[str, Any] = {"key": keys_of(run), "topic": run["topic"].combine_chunks()}
    columns["payload"] = run["payload"].combine_chunks().fill_null(b"")
    (time_name,) = (name for name in TIMES if name in run.column_names)
    times = run[time_name].combine_chunks()
    if time_name == "deadline_ns":  # since 1970
        return columns | {"deadline": times.cast(pa.int64()).view(pa.timestamp("ns", "UTC"))}
    return columns | {time_name: times}


def as_returns(run: pa.Table) -> Iterator[tuple[Any, int, bytes]]:
    """The rows as unpark_many takes them."""
    keys = keys_of(run)
    keys = keys if isinstance(keys, list) else keys.to_pylist()
    payloads = run["payload"].combine_chunks().fill_null(b"").to_pylist()
    return zip(keys, run["ticket"].to_pylist(), payloads, strict=True)


def keys_of(run: pa.Table) -> Any:
    """The keys of a run, of their type."""
    keys, kind = run["key"].combine_chunks(), run["key_type"][0].as_py()
    if kind in _ARROW:
        return keys.cast(_ARROW[kind])
    return [UUID(bytes=key) for key in keys.to_pylist()]


def counted(rows: pa.Table, statuses: Any) -> Answers:
    """The answers to rows."""
    values, counts = np.unique(statuses, return_counts=True)
    found = {Status(value).name: int(n) for value, n in zip(values, counts, strict=True)}
    refused = np.flatnonzero(np.isin(statuses, [value for value in values if is_refusal(value)]))
    some = rows.select(["namespace", "key"]).take(pa.array(refused[:SAMPLES], pa.int64()))
    samples = [
        (row["namespace"], row["key"].decode(errors="backslashreplace"), Status(statuses[i]).name)
        for row, i in zip(some.to_pylist(), refused, strict=False)
    ]
    return Answers(Counter(found), samples)
