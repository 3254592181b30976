"""Armed operations as text and for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from purgatoryd.cli.options import key_record, key_text

if TYPE_CHECKING:
    from purgatoryd.shm_layout.wire import OperationInfo, WatchInfo


def operation_record(found: OperationInfo) -> dict[str, Any]:
    """Return the condition and the owner of an armed operation for JSON."""
    keys = [{**row._asdict(), **key_record(row.key)} for row in found.keys]
    return {
        "condition": found.condition.name, "threshold": found.threshold,
        "owner": f"{found.owner:016x}", "owner_uid": found.owner_uid, "keys": keys,
    }  # fmt: skip


def operation_fields(record: dict[str, Any], found: OperationInfo) -> dict[str, Any]:
    """Return the fields that `get` shows: the fields of a timer, and the condition and owner of the
    operation."""
    shown = {name: value for name, value in record.items() if name != "operation"}
    keys = {f"key {n}": watch_text(row) for n, row in enumerate(found.keys, 1)}
    return {**shown, "condition": condition_text(found), "owner": owner_text(found), **keys}


def owner_text(found: OperationInfo) -> str:
    """Return the owner's session and uid as text."""
    uid = "unknown" if found.owner_uid is None else found.owner_uid
    return f"{found.owner:016x} (uid {uid})"


def condition_text(found: OperationInfo) -> str:
    """Return a condition as text, without the watermarks of its keys."""
    keys, name = len(found.keys), found.condition.name
    parts = {
        "ALL": f"all of {keys}", "ANY": f"any of {keys}",
        "QUORUM": f"{found.threshold} of {keys}", "CLIENT": f"asks its owner about {keys}",
        "SUM": f"sum of at least {found.threshold} over {keys}",
    }  # fmt: skip
    return f"{parts[name]} key{'s' * (keys != 1)}"


def watch_text(found: WatchInfo) -> str:
    """Return a watch key of an operation as text, with the key's watermark and target."""
    parts = [f"{key_text(found.key)} at {found.watermark}"]
    parts += [f"needs {found.target}"] if found.target is not None else []
    parts += [f"counts from {found.base}"] if found.base is not None else []
    parts += [f"{found.cap} at most"] if found.cap is not None else []
    return ", ".join(parts + ([f"failed with {found.error}"] if found.error else []))
