"""Tables of docs/reference/tables.md: columns of the lake, violations and causes of the audit, and
the fields of a ledger line. Each table stands between the marks `<!-- table NAME -->` and
`<!-- end -->` of the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from purgatoryd.pipeline.schemas import (
    BRONZE,
    FLOW,
    LIFECYCLES,
    OPEN_TIMERS,
    TOPICS,
    WORKERS,
    Column,
)

TABLES = {table.name: table for table in (BRONZE, LIFECYCLES, OPEN_TIMERS, TOPICS, WORKERS, FLOW)}
_MARK = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end -->", re.DOTALL)

VIOLATIONS = {
    "lsn_gap": "a record number is missing, without a cause",
    "lsn_repeated": "a record number occurs twice",
    "epoch_back": "a later segment is of an earlier start",
    "clock_back": "the arena's clock went back",
    "snapshot_lacks": "records before a snapshot armed something that it lacks, also across a "
    "recovery or resharding",
    "snapshot_invents": "a snapshot has something that the records before it did not arm",
    "unbalanced": "in a namespace, carried over plus added is not ended plus open",
    "armed_twice": "a ticket was given twice",
    "never_armed": "something ended that was never armed",
    "bulk_load_row_twice": "a row of a bulk load was applied again, although the daemon remembered "
    "it",
    "fired_parked": "a parked timer fired without being unparked",
    "unpark_unfounded": "a timer was unparked that was not parked or had ended",
    "unparked_twice": "a timer was unparked twice",
    "ended_twice": "more than one final state",
    "ended_before_armed": "a final state before the arming",
    "wrong_final_state": "a timer with the final state of an operation, or the other way round",
    "early": "fired or expired before its deadline on the arena's clock",
    "early_by_wall": "fired before its wall deadline, to the millisecond",
    "wrong_deadline": "fired by another deadline than its own",
    "forgotten": "armed or parked a minute after its deadline and slack, on a running daemon with "
    "a real clock",
    "moved_back": "extended to an earlier time",
    "moved_after_end": "extended after its end",
    "key_armed_twice": "two armed timers have one key",
    "ack_unfounded": "an outcome was acknowledged that did not exist yet",
    "acked_twice": "an outcome was acknowledged twice",
    "wrong_timestamps": "the timestamps of an end differ from those of the arming",
    "condition_unmet": "satisfied, although the watermarks say no; not of CLIENT conditions",
    "condition_overlooked": "expired, although the watermarks say yes; not of CLIENT conditions",
    "failure_unfounded": "failed, although no watch key of it failed",
    "sequence_gap": "a sequence of a topic is missing",
    "sequence_repeated": "a sequence of a topic occurs twice",
    "position_gap": "a position of the replay buffer is missing",
    "position_repeated": "a position of the replay buffer occurs twice",
    "sent_out_of_order": "notices were handed to the socket out of order",
    "sent_before_made": "notices were handed to the socket before they existed",
    "ack_lost": "an acknowledged add has no record",
    "ack_differs": "an acknowledged add has a record with another key",
    "unpark_lost": "an acknowledged unpark has no record",
    "row_lost": "a row was reported as applied before, and has no record",
    "cancel_undone": "acknowledged as cancelled, and ended otherwise",
    "fired_unfounded": "a cancel was answered FIRED, and the timer had not fired",
    "outcome_differs": "the owner received another outcome than the WAL has",
    "notice_unfounded": "a received notice has no record",
    "notice_differs": "a received notice has another place in the WAL",
    "notice_doubled": "a subscriber received a notice twice",
    "notice_missed": "a subscriber did not receive a notice, and did not report it as lost",
    "received_early": "received before the deadline",
}
"""Meaning of each kind of violation."""

MISSING = {
    "retention": "the daemon removed the segments before they were shipped",
    "forced": "`run --force-wal` set the files aside; the arena had everything and went on",
    "recovery": "a new arena replaced one that was not stopped; what was not on disk is gone",
    "resharding": "the records of an earlier shard are not shipped yet, or went into the new "
    "arenas from memory; without an end: a new shard has no snapshot in the lake",
    "not_shipped": "a snapshot shows that newer records exist in the WAL; use `--wal-dir`",
    "unexplained": "no cause is known: also the violation `lsn_gap`",
    "snapshot": "records before the first snapshot: not judged, because the state before is "
    "unknown",
    "no_snapshot": "no snapshot exists: only single records and pairs are judged",
    "absent": "ledger lines of a daemon that the lake does not have",
    "beyond": "ledger lines about records that the lake does not have",
}
"""Why the audit lacks records, or does not judge them."""

LEDGER = {
    "op": "`add`, `cancel`, `watch`, `unpark`: an acknowledged call. `row`: a row of a bulk load "
    "was applied before. `outcome`, `notice`: received. `lost`: a subscriber reported lost notices",
    "ticket": "ticket of the timer or operation; in a `row` the timer of its key, 0 = none",
    "bulk_load": "id of the bulk load of a `row`, 32 hex digits",
    "row": "number of a `row`",
    "namespace": "namespace of the key or topic",
    "key": "key of a call or notice; bytes and UUIDs in hex",
    "key_type": "`str`, `bytes` or `uuid`",
    "found": "status of a call, or cause of an outcome or notice",
    "acked_boot_ns": "arrival of the answer to a call, or of an outcome, on the host's boot clock",
    "topic": "topic of a notice or a loss",
    "sequence": "sequence of a notice, or the first one of a loss",
    "upto": "last sequence of a loss; 0 = the stream changed",
    "stream": "id of the stream, 16 hex digits",
    "subscriber": "number of the subscriber in this ledger",
    "received_boot_ns": "arrival of a notice at the socket; null with a virtual clock",
}
"""Meaning of each field of a line."""

_OTHERS = {
    "violations": ("violation", VIOLATIONS),
    "missing": ("cause", MISSING),
    "ledger": ("field", LEDGER),
}


def refresh(page: str) -> str:
    """Return the text of a page with all its tables regenerated."""
    return _MARK.sub(
        lambda mark: f"<!-- table {mark[1]} -->\n{table_text(mark[1])}<!-- end -->", page
    )


def table_text(name: str) -> str:
    """Return the table of that name in Markdown."""
    if name in _OTHERS:
        head, rows = _OTHERS[name]
        return _table((head, "meaning"), ((f"`{one}`", about) for one, about in rows.items()))
    return _table(("column", "type", "meaning"), map(_cells, TABLES[name].columns))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(column: Column) -> tuple[str, str, str]:
    kind = "list" if isinstance(column.type, tuple) else column.type
    return f"`{column.name}`", "string" if kind == "word" else kind, column.about
