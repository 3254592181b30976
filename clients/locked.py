"""Run a step under a lock, safe from exceptions of signal handlers."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar

Result = TypeVar("Result")


def locked(lock: Lock, step: Callable[..., Result], *arguments: Any) -> Result:
    """Run a step under a lock. The `with` statement has one line, because an exception between the
    last line of a block and the release of its lock would leave the lock locked."""
    with lock: return step(*arguments)  # noqa: E701  # fmt: skip
