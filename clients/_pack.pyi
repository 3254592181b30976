"""Types of the extension that packs batches; clients/pack/module.c has its code."""

from collections.abc import Callable
from typing import Any

Column = list[Any] | tuple[str, Any, Any, int, int] | None
"""A list of objects, or (letter, buffer, offsets or entries, first offset, detail). Letters: S, U
numpy's bytes and str; i, l Arrow's 32-bit and 64-bit offsets, with the enum pg_key_type; d seconds;
q whole numbers, with their unit in ns; t times in ns, with their enum pg_time_kind; c indexes of a
list of entries of the name table; B flags, one byte each."""

class Builder:
    """A batch under construction."""

    def __init__(self, bytes_max: int, /) -> None: ...
    def __len__(self) -> int: ...
    def fits(self, name: bytes, /) -> bool: ...
    def record(
        self, name: bytes, op: int, mode: int, key_type: int, key: bytes, time_kind: int,
        flags: int, payload: bytes, extension: bytes, time_ns: int, value: int, /,
    ) -> None: ...  # fmt: skip
    def fill(self, source: Source, start: int, /) -> int: ...
    def body(self) -> tuple[int, int, int, bytes]: ...

class Source:
    """The rows of a bulk call."""

    count: int
    """Number of rows."""

    def __init__(
        self, count: int, op: int, mode: int, flags: int, delays: bool, now_ns: int, entry: bytes,
        topics: dict[str, bytes],
        slow: Callable[[int], tuple[int, int, int, bytes, bytes, bytes, int]],
        rows: list[Any] | None, key: Column, time: Column, topic: Column, payload: Column,
        flags_of_rows: Column, /,
    ) -> None: ...  # fmt: skip
