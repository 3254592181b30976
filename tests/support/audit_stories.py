"""WALs in which the audit finds no error, their ledgers, and functions that ship the WALs to a
lake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from wal_writer import (
    ANY,
    EXPIRED,
    SATISFIED,
    SUM,
    Record,
    S,
    Story,
    Wal,
    Watched,
    arm,
    end,
    fire,
    gone,
    move,
    namespace,
    outcome,
    sent,
    topic,
    watch,
    watermark,
)

from purgatoryd.pipeline.lake import Lake
from purgatoryd.pipeline.ship import Shipper

WALL = Wal().wall_offset_ns

RECORDS: dict[str, Record] = {
    "shop": namespace(0, "shop"),
    "late": topic(0, 0, "late"),
    "arm_a": arm(1, "a", 10 * S, at_ns=1 * S),
    "arm_b": arm(2, "b", 11 * S, at_ns=1 * S),
    "arm_c": arm(3, "c", 50 * S, at_ns=2 * S),
    "cancel_c": end(3, at_ns=3 * S),
    "arm_d": arm(4, "d", 60 * S, at_ns=3 * S),
    "again_d": arm(5, "d", 70 * S, at_ns=4 * S, replaced=4),
    "move_d": move(5, 80 * S, at_ns=5 * S),
    "watermark": watermark(0, 0, key="stock"),
    "watch_e": watch(6, "e", 30 * S, [Watched(0, 5)], at_ns=6 * S),
    "reach_e": watermark(0, 7),
    "end_e": outcome(6, 30 * S, 7 * S, SATISFIED, keys=1, position=0, sequence=1),
    "sent_e": sent(0, 1, at_ns=7 * S),
    "ack_e": end(6, at_ns=8 * S, acknowledged=True),
    "watch_f": watch(7, "f", 9 * S, [Watched(0, 100)], at_ns=8 * S),
    "end_f": outcome(7, 9 * S, 9 * S, EXPIRED, keys=1, position=1, sequence=2),
    "fire_a": fire(1, 10 * S, 10 * S, position=2, sequence=3),
    "fire_b": fire(2, 11 * S, 12 * S, position=3, sequence=4),
    "sent_ab": sent(1, 4, at_ns=12 * S),
    "arm_w": arm(8, "w", 20 * S, at_ns=12 * S, wall_ns=WALL + 20 * S),
    "other": watermark(1, 0, key="more"),
    "watch_s": watch(10, "s", 30 * S, [Watched(0, base=7, cap=10), Watched(1, cap=3)],
                     condition=SUM, threshold=5, at_ns=13 * S),
    "watch_y": watch(11, "y", 30 * S, [Watched(0, 90), Watched(1, 4)], condition=ANY,
                     at_ns=13 * S),
    "more_0": watermark(0, 9),
    "more_1": watermark(1, 4),
    "end_s": outcome(10, 30 * S, 14 * S, SATISFIED, keys=2, position=None),
    "end_y": outcome(11, 30 * S, 14 * S, SATISFIED, keys=2, position=None),
    "gone": gone(1),
    "fire_w": fire(8, 20 * S, 20 * S, position=4, sequence=5),
    "sent_w": sent(4, 5, at_ns=20 * S),
    "arm_g": arm(9, "g", 900 * S, at_ns=21 * S),
}  # fmt: skip

OPEN = (arm(5, "d", 80 * S), arm(9, "g", 900 * S))

CLEAN = Story(RECORDS, closing=OPEN)

IN_PARTS = CLEAN.having(cuts={"fire_a": (0, 1), "arm_w": (0, 1)})


def uuid(number: int) -> bytes:
    return number.to_bytes(16)


def by(number: int, story: Story) -> Story:
    """Return a copy of the story in which daemon `number` wrote the WAL."""
    return story.having(wal=replace(story.wal, uuid=uuid(number)))


def restarted(number: int, living: tuple[Record, ...]) -> Story:
    """Return the WAL, as a Story, of the arena that replaced the arena of CLEAN after a
    recovery."""
    later = {"shop": RECORDS["shop"], "late": topic(0, 0, "late", sequence=5),
             "fire_d": fire(5, 80 * S, 80 * S, position=5, sequence=6)}  # fmt: skip
    return by(number, Story(later, first_lsn=len(RECORDS) + 1, first=living, published=5))


Line = dict[str, Any]


def call(op: str, ticket: int, key: str, found: str, at_ns: int) -> Line:
    return {"op": op, "ticket": ticket, "namespace": "shop", "key": key, "key_type": "str",
            "found": found, "acked_boot_ns": at_ns}  # fmt: skip


def reported(ticket: int, found: str) -> Line:
    return {"op": "outcome", "ticket": ticket, "found": found, "acked_boot_ns": 15 * S}


def notice(ticket: int, key: str, sequence: int, at_ns: int, topic: str = "late") -> Line:
    return {"op": "notice", "ticket": ticket, "namespace": "shop", "key": key, "key_type": "str",
            "found": "expired", "stream": "0" * 15 + "1", "subscriber": 1, "topic": topic,
            "sequence": sequence, "received_boot_ns": at_ns}  # fmt: skip


NOTED = {
    "a": call("add", 1, "a", "added", 1 * S),
    "b": call("add", 2, "b", "added", 1 * S),
    "c": call("add", 3, "c", "added", 2 * S),
    "cancel_c": call("cancel", 3, "c", "cancelled", 3 * S),
    "again_d": call("add", 5, "d", "replaced", 4 * S),
    "move_d": call("add", 5, "d", "extended", 5 * S),
    "e": call("watch", 6, "e", "added", 6 * S),
    "cancel_e": call("cancel", 6, "e", "fired", 9 * S),
    "reported_e": reported(6, "satisfied"),
    "reported_f": reported(7, "expired"),
    "notice_e": notice(6, "e", 1, 8 * S),
    "notice_f": notice(7, "f", 2, 9 * S),
    "notice_a": notice(1, "a", 3, 12 * S),
    "notice_b": notice(2, "b", 4, 12 * S),
    "notice_w": notice(8, "w", 5, 20 * S),
}


def noted(**changes: Line | None) -> list[Line]:
    return [line for line in (NOTED | changes).values() if line is not None]


def write_ledger(directory: Path, daemon: bytes, lines: list[Line]) -> None:
    folder = directory / f"daemon={daemon.hex()}"
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    # the last line is incomplete, as if its writer had been killed
    (folder / "host-1-0.jsonl").write_text(text + '{"op":"add","ticket":99,"na')


def ship(directory: Path, lake: Lake, node: str) -> None:
    shipper = Shipper(directory, lake, node)
    list(shipper.poll())
    shipper.close()
