"""Files of exported timers: JSON lines or Parquet."""

from __future__ import annotations

import base64
import json
import time
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from purgatoryd.cli.options import read_key
from purgatoryd.clients import OrderHash
from purgatoryd.shm_layout.errors import InvalidRows
from purgatoryd.shm_layout.layout import UNIQUE_MAX_NS

_TEXTS = ("key", "key_type", "topic", "tag", "deadline_at", "payload", "payload_base64",
          "late")  # fmt: skip
_NUMBERS = ("within_ns", "deadline_boot_ns", "deadline_ns", "priority", "order_hash", "grace_ns",
            "unique_until_boot_ns", "unique_until_ns")  # fmt: skip


def _parquet() -> ModuleType:
    """Import pyarrow.parquet. Raises InvalidRows."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise InvalidRows("Parquet needs pyarrow, which is not installed", -1) from None
    return parquet  # type: ignore[no-any-return]


def write_rows(path: Path, rows: list[dict[str, Any]], *, parquet: bool) -> None:
    """Write rows to a file. Raises InvalidRows, OSError."""
    if parquet:
        module = _parquet()
        import pyarrow as pa

        columns = {name: pa.array([row.get(name) for row in rows], pa.string()) for name in _TEXTS}
        columns |= {
            name: pa.array([row.get(name) for row in rows], pa.int64()) for name in _NUMBERS
        }
        module.write_table(pa.table(columns), path)
        return
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _raw(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        rows = _parquet().read_table(path).to_pylist()
        return [{name: value for name, value in row.items() if value is not None} for row in rows]
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            try:
                rows.append(json.loads(line))
            except ValueError:
                raise InvalidRows("is no JSON object", number) from None
    return rows


def read_rows(path: Path, offset_ns: int | None, now_boot_ns: int) -> list[dict[str, Any]]:
    """Return the rows of a file as add_many takes them. `offset_ns`: wall clock minus the daemon's
    clock; None = the daemon has a virtual clock. `now_boot_ns`: time on the daemon's clock. Raises
    InvalidRows, OSError."""
    rows = []
    for number, row in enumerate(_raw(path)):
        try:
            rows.append(_row(row, offset_ns, now_boot_ns))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InvalidRows(f"is no exported timer: {error!r}", number) from None
    return rows


def _row(row: dict[str, Any], offset_ns: int | None, now_boot_ns: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "key": read_key(row["key"], row.get("key_type", "str")),
        "topic": row["topic"],
        "payload": _payload(row),
        "within": int(row["within_ns"]) / 1e9,
    }
    found |= {name: row[name] for name in ("tag", "priority") if name in row}
    if "order_hash" in row:
        found["order_key"] = OrderHash(row["order_hash"])
    if (unique_ns := _unique_ns(row, offset_ns, now_boot_ns)) > 0:
        found["unique_for"] = min(unique_ns, UNIQUE_MAX_NS) / 1e9
    if "late" in row:
        grace = "grace_ns" in row and int(row["grace_ns"]) / 1e9
        found["late"] = (row["late"], grace) if grace else row["late"]
    if "deadline_at" in row:
        return found | {"deadline": datetime.fromisoformat(row["deadline_at"])}
    if offset_ns is None or "deadline_ns" not in row:
        return found | {"deadline_boot_ns": int(row["deadline_boot_ns"])}
    return found | {"deadline_boot_ns": max(int(row["deadline_ns"]) - offset_ns, 0)}


def _unique_ns(row: dict[str, Any], offset_ns: int | None, now_boot_ns: int) -> int:
    """Return the time in ns for which the key of a row stays unique; 0 or less = not unique."""
    if offset_ns is None or "unique_until_ns" not in row:
        return int(row.get("unique_until_boot_ns", 0)) - now_boot_ns
    return int(row["unique_until_ns"]) - time.time_ns()


def _payload(row: dict[str, Any]) -> bytes:
    if "payload_base64" in row:
        return base64.b64decode(row["payload_base64"], validate=True)
    return str(row["payload"]).encode()
