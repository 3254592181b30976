"""Clients of the daemon: add, cancel and get timers; receive notices."""

from typing import TYPE_CHECKING, Any

from purgatoryd.clients.admin import Admin
from purgatoryd.clients.bulk import BulkResult
from purgatoryd.clients.client import Client, Handle
from purgatoryd.clients.model import CancelResult, Notice, TimerInfo
from purgatoryd.clients.subscriber import Subscriber
from purgatoryd.shm_layout.errors import (
    ArenaError,
    BatchError,
    Busy,
    CallTimeout,
    Closed,
    DaemonError,
    DaemonUnreachable,
    Denied,
    Exists,
    ForkedProcess,
    Full,
    InvalidArgument,
    InvalidKey,
    InvalidName,
    InvalidPayload,
    InvalidRows,
    InvalidTime,
    MessageRefused,
    ProtocolError,
    PurgatorydError,
    QueueFull,
    QuotaExceeded,
    Refused,
    SessionExpired,
    SnapshotRequired,
    TooFar,
    WrongShard,
)
from purgatoryd.shm_layout.layout import Cause, Status

if TYPE_CHECKING:
    from purgatoryd.clients.aio import AsyncClient, AsyncHandle, AsyncSubscriber

__all__ = [
    "Admin",
    "ArenaError",
    "AsyncClient",
    "AsyncHandle",
    "AsyncSubscriber",
    "BatchError",
    "BulkResult",
    "Busy",
    "CallTimeout",
    "CancelResult",
    "Cause",
    "Client",
    "Closed",
    "DaemonError",
    "DaemonUnreachable",
    "Denied",
    "Exists",
    "ForkedProcess",
    "Full",
    "Handle",
    "InvalidArgument",
    "InvalidKey",
    "InvalidName",
    "InvalidPayload",
    "InvalidRows",
    "InvalidTime",
    "MessageRefused",
    "Notice",
    "ProtocolError",
    "PurgatorydError",
    "QueueFull",
    "QuotaExceeded",
    "Refused",
    "SessionExpired",
    "SnapshotRequired",
    "Status",
    "Subscriber",
    "TimerInfo",
    "TooFar",
    "WrongShard",
]


def __getattr__(name: str) -> Any:
    """Imports asyncio, a third of all import time, only for those who use it."""
    if name not in ("AsyncClient", "AsyncHandle", "AsyncSubscriber"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from purgatoryd.clients import aio

    return getattr(aio, name)
