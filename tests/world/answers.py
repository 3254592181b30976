"""The statuses that each kind of call may receive. A refusal also needs a cause in the world."""

from __future__ import annotations

from purgatoryd.shm_layout.layout import Status

ADDED, EXISTS, PARKED, DONE, UNKNOWN = (
    Status.ADDED, Status.EXISTS, Status.PARKED, Status.DONE, Status.UNKNOWN
)  # fmt: skip
ANSWERS: dict[str, frozenset[Status]] = {
    "error": frozenset({ADDED, EXISTS, PARKED}),
    "replace": frozenset({ADDED, Status.REPLACED, PARKED}),
    "keep": frozenset({ADDED, Status.KEPT, PARKED}),
    "extend": frozenset({ADDED, Status.KEPT, Status.EXTENDED, PARKED}),
    "cancel": frozenset({Status.CANCELLED, Status.FIRED, Status.LEASED, UNKNOWN}),
    "get": frozenset({Status.FOUND, PARKED, UNKNOWN}),
    "row": frozenset({ADDED, EXISTS, PARKED, Status.BULK_LOADED}),
    "watch": frozenset({ADDED}),
    "ADVANCE_KEY": frozenset({DONE}),
    "BUMP": frozenset({DONE}),
    "FAIL": frozenset({DONE}),
    "CLEAR": frozenset({DONE, UNKNOWN}),
    "FORGET": frozenset({DONE, UNKNOWN}),
    "CANCEL_FOR_KEY": frozenset({DONE, UNKNOWN, Status.MORE}),
}
"""For each kind of call, the statuses that are not refusals."""
ANY_CHANGE = frozenset({Status.DENIED, Status.BUSY})
KEEPS = ANY_CHANGE | {
    Status.QUOTA, Status.WAL, Status.ARENA, Status.STOPPING, Status.FULL, Status.FULL_PAYLOAD,
    Status.FULL_GROUP,
}  # fmt: skip
"""Refusals that a call may receive if it arms a timer or an operation."""
REFUSALS: dict[str, frozenset[Status]] = {
    **dict.fromkeys(("error", "replace", "keep", "extend"), KEEPS | {Status.TOO_FAR}),
    "cancel": ANY_CHANGE,
    "get": frozenset(),
    "row": KEEPS | {Status.FENCED, Status.CLOSED},
    "watch": KEEPS,
    **dict.fromkeys(("ADVANCE_KEY", "BUMP", "FAIL"), ANY_CHANGE | {Status.QUOTA, Status.WAL}),
    **dict.fromkeys(("CLEAR", "FORGET"), ANY_CHANGE),
    "CANCEL_FOR_KEY": ANY_CHANGE | {Status.FULL_PAYLOAD},  # the keys in its reply need space
}
