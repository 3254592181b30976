"""Generated bronze tables: rows like those of a WAL, with lifecycles of every kind, as files of a
lake."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from purgatoryd.pipeline.lake import BOUNDED, Lake, Manifest, record, spans
from purgatoryd.pipeline.schemas import BRONZE

Longs = npt.NDArray[np.int64]
Rows = dict[str, Longs]

MS, S = 10**6, 10**9
BOOT_NS = 5_000 * S
WALL_NS = 1_760_000_400 * S
"""Time of the wall clock when the boot clock shows BOOT_NS."""
NIL = -(2**63)
"""Placeholder for a null value."""
TIMEOUTS_NS = np.array([S, 2 * S, 5 * S, 20 * S])
"""Timeouts of topics t0, t1, ..."""
WORDS: dict[str, list[str]] = {
    "kind": ["arm", "watch", "move", "end", "fire", "outcome", "sent", "unknown", "replied"],
    "cause": ["expired", "satisfied", "failed", "cancelled", "acknowledged", "published"],
    "key_type": ["str", "bytes", "uuid"],
}
ARM, WATCH, MOVE, END, FIRE, OUTCOME, SENT, UNKNOWN, REPLIED = range(9)
EXPIRED, SATISFIED, FAILED, CANCELLED, ACKNOWLEDGED, PUBLISHED = range(6)
REPLACED, OPEN = 6, 7
FATES = np.array([CANCELLED] * 80 + [EXPIRED] * 8 + [REPLACED] * 4 + [OPEN] * 3
                 + [SATISFIED] * 3 + [FAILED] * 2)  # fmt: skip
"""Final states of a hundred lifecycles. Every tenth expired lifecycle, and each satisfied or failed
lifecycle, is an operation."""
REPLACED_TIMESTAMPS = (
    "session", "worker", "sent_ns", "received_ns", "applied_ns", "done_ns", "armed_ns",
    "deadline_ns",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Parameters of the generated rows.

    `slow_worker`: index of the worker whose calls wait half a second longer in the request queue;
    -1: none. `real_offset_ns`: the real boot clock minus the arena's clock. `unsent_rows`: number
    of records between the last final state and the first batch of notices.
    """

    timers: int
    seed: int = 1
    daemon: str = "ab" * 16
    node: str = "host-a"
    clock: str = "boot"
    span_s: int = 1200
    segment_rows: int = 5_000
    topics: int = 4
    workers: int = 6
    slow_worker: int = -1
    real_offset_ns: int = 0
    unsent_rows: int = 0
    payload: bytes = b"20 bytes of payload."


def rows_of(plan: Plan) -> Rows:
    """Return all rows in the order of their LSNs. Every column contains numbers; NIL stands for no
    value."""
    rng = np.random.default_rng(plan.seed)
    adds = _adds(plan, rng)
    final_states = _final_states(plan, adds, rng)
    batches = _batches(plan, _notices(final_states))
    moves = _some_of(adds, OPEN, MOVE, rng)
    answers = [_answers(plan, rows) for rows in (adds, final_states)]
    rows = _stacked([adds, final_states, batches, moves, *answers, *_strays(adds, rng)])
    order = np.argsort(rows["at_ns"], kind="stable")
    rows = {name: column[order] for name, column in rows.items()}
    if plan.unsent_rows:
        rows = _held_up(rows, plan.unsent_rows)
    rows["lsn"] = np.arange(1, len(rows["kind"]) + 1)
    _link(rows, plan.timers)
    return rows


def _held_up(rows: Rows, count: int) -> Rows:
    """Move batches of notices to the end, behind `count` records whose type belongs to a later
    version."""
    sent = rows["kind"] == SENT
    last_ns = rows["at_ns"].max()
    between = {"kind": np.full(count, UNKNOWN), "at_ns": np.full(count, last_ns)}
    before, after = ({n: c[chosen] for n, c in rows.items()} for chosen in (~sent, sent))
    return _stacked([before, between, after])


def _adds(plan: Plan, rng: np.random.Generator) -> Rows:
    n = plan.timers
    armed = np.sort(BOOT_NS + rng.integers(0, plan.span_s * S, n))
    topic, worker = np.arange(n) % plan.topics, np.arange(n) * 5 % plan.workers
    queue = rng.integers(5_000, 200_000, n) + np.where(worker == plan.slow_worker, 500 * MS, 0)
    applied = armed + plan.real_offset_ns - rng.integers(100, 5_000, n)
    fate = rng.choice(FATES, n)
    fate[-1] = OPEN
    replacing = np.flatnonzero(fate[:-1] == REPLACED) + 1  # each replaces the timer before it
    replaced = np.full(n, NIL)
    replaced[replacing] = replacing
    operation = np.isin(fate, (SATISFIED, FAILED)) | ((fate == EXPIRED) & (np.arange(n) % 10 == 0))
    operation[replacing] = False
    fate[replacing[np.isin(fate[replacing], (SATISFIED, FAILED))]] = CANCELLED
    return {
        "kind": np.where(operation, WATCH, ARM), "ticket": np.arange(1, n + 1), "fate": fate,
        "at_ns": armed, "armed_ns": armed, "applied_ns": applied, "received_ns": applied - queue,
        "done_ns": applied + 7_000 + np.arange(n) % 11 * 1_000,
        "sent_ns": applied - queue - rng.integers(10_000, 90_000, n),
        "deadline_ns": armed + TIMEOUTS_NS[topic % len(TIMEOUTS_NS)], "topic": topic,
        "worker": worker, "session": worker + 100, "replaced": replaced,
        "key": np.maximum.accumulate(np.where(replaced == NIL, np.arange(n), 0)),
    }  # fmt: skip


def _final_states(plan: Plan, adds: Rows, rng: np.random.Generator) -> Rows:
    """Return one row for each final state. A replaced timer has none: the row of its replacement is
    an add."""
    ended = np.isin(adds["fate"], (CANCELLED, EXPIRED, SATISFIED, FAILED))
    rows = {name: column[ended] for name, column in adds.items()}
    fate, n = rows["fate"], int(ended.sum())
    asked = rows["deadline_ns"] - rows["armed_ns"]
    late = rng.exponential(200_000, n).astype(np.int64)
    early = (asked * rng.beta(2, 5, n)).astype(np.int64)
    rows["at_ns"] = rows["armed_ns"] + np.where(fate == EXPIRED, asked + late, early)
    rows["ended_boot_ns"] = rows["at_ns"] + plan.real_offset_ns
    kind = np.where(fate == CANCELLED, END, FIRE)
    rows["kind"] = np.where(rows["kind"] == WATCH, OUTCOME, kind)
    rows["cause"] = fate
    rows["flags"] = np.where(rng.random(n) < 0.01, 2, 0)
    del rows["replaced"]
    return rows


def _notices(final_states: Rows) -> Longs:
    """Assign positions to notices. Return the time at which each notice fired, by position."""
    fired = np.flatnonzero(np.isin(final_states["kind"], (FIRE, OUTCOME)))
    fired = fired[np.argsort(final_states["at_ns"][fired], kind="stable")]
    final_states["position"] = np.full(len(final_states["kind"]), NIL)
    final_states["position"][fired] = np.arange(len(fired))
    return final_states["at_ns"][fired]


def _batches(plan: Plan, notices: Longs) -> Rows:
    """Return batches of notices. Notices that fired in the same 2 ms share a batch."""
    first = np.flatnonzero(np.diff(notices // (2 * MS), prepend=-1))
    upto = np.append(first[1:], len(notices)) if len(first) else first
    at = notices[upto - 1] + 30_000
    built = at + plan.real_offset_ns
    return {
        "kind": np.full(len(first), SENT), "at_ns": at, "built_ns": built,
        "handed_ns": built + 45_000, "positions_from": first, "positions_upto": upto,
    }  # fmt: skip


def _answers(plan: Plan, rows: Rows) -> Rows:
    """Assign request batches to timers that a request ended, one batch for each 5 ms. Return the
    rows of the answers.

    Every third batch is answered twice.
    """
    asks = (rows["kind"] == END) | (rows.get("replaced", np.full(len(rows["kind"]), NIL)) != NIL)
    batch = 1 + 2 * ((rows["at_ns"] - BOOT_NS) // (5 * MS)) + (rows["kind"] == END)
    ended_boot = rows["at_ns"] + plan.real_offset_ns
    reported = {"ended_by": rows["session"], "ended_batch": batch, "ended_boot_ns": ended_boot}
    rows |= {name: np.where(asks, column, rows.get(name, NIL)) for name, column in reported.items()}
    asked = np.unique(np.stack([rows["session"], batch])[:, asks], axis=1)
    session, sequence = np.concatenate([asked, asked[:, ::3]], axis=1)
    again = np.arange(len(session)) >= asked.shape[1]
    at = BOOT_NS + (sequence + 1) // 2 * 5 * MS + np.where(again, MS, 0)
    built = at + plan.real_offset_ns
    return {
        "kind": np.full(len(session), REPLIED), "at_ns": at, "session": session,
        "sequence": sequence, "count": np.ones_like(session), "built_ns": built,
        "handed_ns": built + 15_000,
    }  # fmt: skip


def _some_of(adds: Rows, fate: int, kind: int, rng: np.random.Generator) -> Rows:
    """Return rows of this kind for about half of the timers with this fate, 1 us after they were
    armed."""
    chosen = (adds["fate"] == fate) & (adds["kind"] == ARM) & (rng.random(len(adds["fate"])) < 0.5)
    ticket, armed = adds["ticket"][chosen], adds["armed_ns"][chosen]
    return {
        "kind": np.full(len(ticket), kind), "ticket": ticket, "at_ns": armed + 1_000,
        "deadline_ns": adds["deadline_ns"][chosen] + S,
    }  # fmt: skip


def _strays(adds: Rows, rng: np.random.Generator) -> list[Rows]:
    """Return rows that end no timer: acknowledgements, a published notice, record types of a later
    version."""
    acknowledged = _some_of(adds, SATISFIED, END, rng)
    acknowledged["cause"] = np.full(len(acknowledged["kind"]), ACKNOWLEDGED)
    published = {"kind": np.array([FIRE]), "cause": np.array([PUBLISHED]),
                 "ticket": np.array([2**40]), "at_ns": adds["at_ns"][:1]}  # fmt: skip
    unknown = {"kind": np.full(3, UNKNOWN), "at_ns": adds["at_ns"][:3]}
    return [acknowledged, published, unknown]


def _stacked(parts: list[Rows]) -> Rows:
    names = {name for part in parts for name in part}
    return {
        name: np.concatenate([part.get(name, np.full(len(part["kind"]), NIL)) for part in parts])
        for name in sorted(names)
    }


def _link(rows: Rows, timers: int) -> None:
    """Set add_lsn in the rows of final states. Copy the columns of each replaced timer into the row
    of the add that replaced it."""
    added = np.flatnonzero(np.isin(rows["kind"], (ARM, WATCH)))
    row_of = np.zeros(timers + 1, dtype=np.int64)
    row_of[rows["ticket"][added]] = added
    final_states = np.isin(rows["kind"], (END, FIRE, OUTCOME)) & (rows["armed_ns"] != NIL)
    rows["add_lsn"] = np.full(len(final_states), NIL)
    rows["add_lsn"][final_states] = rows["lsn"][row_of[rows["ticket"][final_states]]]
    replacing = np.flatnonzero(rows["replaced"] != NIL)
    timestamps = {"add_lsn": "lsn"} | {name: name for name in REPLACED_TIMESTAMPS}
    for name, source in timestamps.items():
        column = np.full(len(final_states), NIL)
        column[replacing] = rows[source][row_of[rows["replaced"][replacing]]]
        rows[f"replaced_{name}"] = column


# ---- as files --------------------------------------------------------------------------------


def table_of(plan: Plan, rows: Rows, segment: int) -> pa.Table:
    """Return the rows of one segment as a table with the newest schema of bronze."""
    count = len(rows["lsn"])
    same = {"daemon": plan.daemon, "node": plan.node, "clock": plan.clock, "epoch": 1,
            "segment": segment}  # fmt: skip
    known = same | _named(plan, rows)
    schema = BRONZE.arrow()
    arrays = []
    for field in schema:
        value = known.get(field.name)
        if field.name in same:
            value = pa.repeat(pa.scalar(value), count)
        elif value is None and field.name in rows:
            value = _nullable(rows[field.name])
        arrays.append(pa.nulls(count, field.type) if value is None else _cast(value, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _named(plan: Plan, rows: Rows) -> dict[str, pa.Array]:
    """Return the columns that do not contain numbers."""
    of_timer = rows["topic"] != NIL
    wall = rows["at_ns"] - BOOT_NS + WALL_NS
    words = {name: _words(rows[name], words) for name, words in WORDS.items() if name in rows}
    keys = np.char.add("key:", np.char.mod("%d", rows["key"]))
    workers = [f"worker-{n}" for n in range(plan.workers)]
    payload = np.where(np.isin(rows["kind"], (ARM, WATCH)), len(plan.payload), NIL)
    return words | {
        "at": pa.array(wall // 1000),
        "key": pa.array(keys, mask=~of_timer),
        "key_type": _words(np.where(of_timer, 0, NIL), WORDS["key_type"]),
        "payload": pa.array(np.full(len(payload), plan.payload.decode()), mask=payload == NIL),
        "payload_len": _nullable(payload),
        "namespace": _words(np.where(of_timer, 0, NIL), ["default"]),
        "topic": _words(rows["topic"], [f"t{n}" for n in range(plan.topics)]),
        **{name: _words(rows[name], workers) for name in ("worker", "replaced_worker")},
    }  # fmt: skip


def _nullable(column: Longs) -> pa.Array:
    return pa.array(column, mask=column == NIL)


def _words(column: Longs, words: list[str]) -> pa.Array:
    indices = pa.array(column, mask=column == NIL).cast(pa.int32())
    return pa.DictionaryArray.from_arrays(indices, pa.array(words))


def _cast(value: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return value if pa.types.is_dictionary(value.type) else value.dictionary_encode()
    return value.cast(kind)


def segments_of(plan: Plan) -> list[tuple[Manifest, pa.Table]]:
    """Return (manifest, table) of each segment, in order."""
    rows = rows_of(plan)
    total = len(rows["lsn"])
    starts = range(0, total, plan.segment_rows)
    return [_segment(plan, {n: c[at : at + plan.segment_rows] for n, c in rows.items()})
            for at in starts]  # fmt: skip


def _segment(plan: Plan, rows: Rows) -> tuple[Manifest, pa.Table]:
    first, last = int(rows["lsn"][0]), int(rows["lsn"][-1])
    table = table_of(plan, rows, first)
    at = table["at"].cast(pa.int64()).to_numpy()
    bounds = {name: _known(rows, name) for name in BOUNDED}
    notices, handed = spans(bounds)
    kinds = Counter(WORDS["kind"][kind] for kind in rows["kind"].tolist())
    return Manifest(
        table="bronze", daemon=plan.daemon, node=plan.node, epoch=1, first_lsn=first,
        last_lsn=last, crc=plan.seed, clock=plan.clock, rows=len(table),
        wall_from_us=int(at.min()), wall_to_us=int(at.max()),
        kinds=dict(kinds), notices=notices, handed=handed,
        ended_upto_ns=max(bounds["ended_boot_ns"], default=0),
        built_from_ns=min(bounds["built_ns"], default=0), began_empty=first == 1,
    ), table  # fmt: skip


def _known(rows: Rows, name: str) -> list[int]:
    column = rows[name]
    found: list[int] = column[column != NIL].tolist()
    return found


def opening_of(plan: Plan, start_lsn: int, taken_lsn: int) -> tuple[Manifest, pa.Table]:
    """Return a snapshot with the timers that were armed at `taken_lsn`. A redo that follows the
    snapshot begins at `start_lsn`."""
    rows = rows_of(plan)
    before = rows["lsn"] <= taken_lsn
    final_states = np.isin(rows["kind"], (END, FIRE, OUTCOME)) & (rows["armed_ns"] != NIL)
    ended = [rows["ticket"][before & final_states], rows["replaced"][before]]
    added = np.isin(rows["kind"], (ARM, WATCH))
    lived = before & added & ~np.isin(rows["ticket"], np.concatenate(ended))
    rows = {name: column[lived] for name, column in rows.items()}
    rows["replaced"] = np.full(len(rows["lsn"]), NIL)
    manifest, _ = _segment(plan, rows)
    reported = replace(manifest, table="openings", first_lsn=start_lsn, last_lsn=taken_lsn)
    return reported, table_of(plan, rows, start_lsn)


def put(lake: Lake, segment: tuple[Manifest, pa.Table]) -> None:
    """Write the files of a segment into a lake."""
    manifest, table = segment
    file = lake.data(manifest)
    reported = lake.root / "manifests" / f"daemon={manifest.daemon}" / f"{manifest.name}.json"
    for path in (file, reported):
        path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, compression="zstd")
    reported.write_bytes(record(replace(manifest, bytes=file.stat().st_size)))
