"""Argument checks that several calls share. Each check raises InvalidArgument before the call sends
anything."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

from purgatoryd.shm_layout.errors import InvalidArgument, InvalidRows, PurgatorydError

LIMIT_S = 1e9
"""The longest wait: 30 years. No clock overflows within this time."""


def check_whole(name: str, value: Any, least: int, most: int) -> int:
    """Return `value` as an int from `least` to `most`. A bool is refused."""
    try:
        whole = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = least - 1
    if not least <= whole <= most:
        raise InvalidArgument(f"{name} {value!r} must be an int from {least} to {most}")
    return whole


def check_limit_s(limit_s: Any, name: str = "timeout") -> float:
    """Return the seconds to wait, of a number of seconds or a timedelta. Negative values become 0,
    infinity becomes LIMIT_S."""
    if type(limit_s) is float and 0.0 <= limit_s <= LIMIT_S:  # the usual case; false for NaN
        return limit_s
    if isinstance(limit_s, timedelta):
        limit_s = limit_s.total_seconds()
    if isinstance(limit_s, bool) or not hasattr(limit_s, "__float__"):
        raise InvalidArgument(f"{name} {limit_s!r} must be a number of seconds or a timedelta")
    try:
        seconds = float(limit_s)
    except OverflowError:  # an int that is too large
        seconds = math.inf if limit_s > 0 else 0.0
    except (TypeError, ValueError):
        seconds = math.nan
    if math.isnan(seconds):
        raise InvalidArgument(f"{name} {limit_s!r} must be a number of seconds or a timedelta")
    return min(max(seconds, 0.0), LIMIT_S)


def check_type(name: str, value: Any, *types: type, optional: bool = True) -> None:
    """Raise InvalidArgument if `value` has none of these types. If `optional`, None is accepted."""
    if not (optional and value is None) and not isinstance(value, types):
        wanted = " or ".join([one.__name__ for one in types] + ["None"] * optional)
        raise InvalidArgument(f"{name} must be {wanted}, not {type(value).__name__}")


def check_flag(name: str, value: Any) -> bool:
    """Return `value`, which must be a bool."""
    check_type(name, value, bool, optional=False)
    return bool(value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`. Raises InvalidArgument."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return value


def check_class(name: str, value: Any, module: str, cls: str) -> None:
    """Raise InvalidArgument unless `value` is None or an instance of class `cls` in a module of
    this package. The module is imported only if there is a value, because most clients use none of
    these classes."""
    if value is not None:
        check_type(name, value, getattr(import_module(f"purgatoryd.clients.{module}"), cls))


def check_callable(name: str, value: Any) -> None:
    """Raise InvalidArgument unless `value` is None or can be called."""
    if value is not None and not callable(value):
        raise InvalidArgument(f"{name} must be callable, not {type(value).__name__}")


def check_no_text(name: str, values: Any) -> None:
    """Raise InvalidRows if `values` is a text, whose characters would be taken for values."""
    if isinstance(values, str | bytes | bytearray):
        raise InvalidRows(f"{name} must be a collection, not the single value {values!r}", -1)


def each(name: str, values: Any) -> Iterator[Any]:
    """Return an iterator over `values`. Errors that this iterator raises are passed on."""
    check_no_text(name, values)
    try:
        return iter(values)
    except TypeError:
        raise InvalidRows(f"{name} must be iterable, not {type(values).__name__}", -1) from None


def unreadable(subject: str, error: Exception) -> Exception:
    """Return InvalidRows in place of a library's error about columns. Return an error of
    purgatoryd, or a MemoryError, unchanged."""
    if isinstance(error, PurgatorydError | MemoryError):
        return error
    return InvalidRows(f"{subject} cannot be read: {error}", -1)
