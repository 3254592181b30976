"""Clients of the daemon: add, cancel and get timers; receive notices."""

import importlib
from typing import TYPE_CHECKING, Any

from purgatoryd.clients.admin import Admin
from purgatoryd.clients.bulk import BulkResult
from purgatoryd.clients.bulk_loads import BulkLoad, BulkLoadStatus
from purgatoryd.clients.client import Client, Handle
from purgatoryd.clients.conditions import AllOf, AnyOf, Quorum, SumOf, When
from purgatoryd.clients.ledger import Ledger
from purgatoryd.clients.local import DelayedOperation, DelayedOperationPurgatory
from purgatoryd.clients.model import CancelResult, Notice, TimerInfo
from purgatoryd.clients.purgatory import Operation, Outcome, Purgatory, Watch
from purgatoryd.clients.remote import Remote
from purgatoryd.clients.resume import Resume
from purgatoryd.clients.subscriber import Subscriber
from purgatoryd.shm_layout.errors import (
    ArenaError,
    ArenaLost,
    BatchError,
    BulkLoadClosed,
    Busy,
    CallTimeout,
    Closed,
    DaemonError,
    DaemonUnreachable,
    Denied,
    DuplicateWatchKey,
    Exists,
    Fenced,
    ForkedProcess,
    Full,
    InboxFull,
    InvalidArgument,
    InvalidCondition,
    InvalidKey,
    InvalidName,
    InvalidPayload,
    InvalidRows,
    InvalidTime,
    Lagged,
    MessageRefused,
    NotDurable,
    NoWal,
    Partitioned,
    PermissionDenied,
    ProtocolError,
    PurgatorydError,
    QueueFull,
    QuotaExceeded,
    Refused,
    SessionExpired,
    SessionTableFull,
    ShardUnavailable,
    Stopping,
    TableBroken,
    TooFar,
    UidShareExceeded,
    WalStopped,
    WatermarkOverflow,
    WrongShard,
)
from purgatoryd.shm_layout.layout import ANYBODY, BulkLoadState, Cause, Status
from purgatoryd.shm_layout.wire import NamespaceSettings, OperationInfo, WatchInfo

if TYPE_CHECKING:
    from purgatoryd.clients.aio import AsyncClient, AsyncHandle, AsyncSubscriber
    from purgatoryd.clients.aio_purgatory import AsyncOperation, AsyncPurgatory

__all__ = [
    "ANYBODY",
    "Admin",
    "AllOf",
    "AnyOf",
    "ArenaError",
    "ArenaLost",
    "AsyncClient",
    "AsyncHandle",
    "AsyncOperation",
    "AsyncPurgatory",
    "AsyncSubscriber",
    "BatchError",
    "BulkLoad",
    "BulkLoadClosed",
    "BulkLoadState",
    "BulkLoadStatus",
    "BulkResult",
    "Busy",
    "CallTimeout",
    "CancelResult",
    "Cause",
    "Client",
    "Closed",
    "DaemonError",
    "DaemonUnreachable",
    "DelayedOperation",
    "DelayedOperationPurgatory",
    "Denied",
    "DuplicateWatchKey",
    "Exists",
    "Fenced",
    "ForkedProcess",
    "Full",
    "Handle",
    "InboxFull",
    "InvalidArgument",
    "InvalidCondition",
    "InvalidKey",
    "InvalidName",
    "InvalidPayload",
    "InvalidRows",
    "InvalidTime",
    "Lagged",
    "Ledger",
    "MessageRefused",
    "NamespaceSettings",
    "NoWal",
    "NotDurable",
    "Notice",
    "Operation",
    "OperationInfo",
    "Outcome",
    "Partitioned",
    "PermissionDenied",
    "ProtocolError",
    "Purgatory",
    "PurgatorydError",
    "QueueFull",
    "Quorum",
    "QuotaExceeded",
    "Refused",
    "Remote",
    "Resume",
    "SessionExpired",
    "SessionTableFull",
    "ShardUnavailable",
    "Status",
    "Stopping",
    "Subscriber",
    "SumOf",
    "TableBroken",
    "TimerInfo",
    "TooFar",
    "UidShareExceeded",
    "WalStopped",
    "Watch",
    "WatchInfo",
    "WatermarkOverflow",
    "When",
    "WrongShard",
]


_ASYNC = {
    "AsyncClient": "aio",
    "AsyncHandle": "aio",
    "AsyncSubscriber": "aio",
    "AsyncOperation": "aio_purgatory",
    "AsyncPurgatory": "aio_purgatory",
}


def __getattr__(name: str) -> Any:
    """Import the asyncio classes on first use: asyncio is a third of all import time."""
    if name not in _ASYNC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"purgatoryd.clients.{_ASYNC[name]}"), name)
