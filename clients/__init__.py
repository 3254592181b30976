"""Clients of the daemon: add, cancel and get timers; receive notices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from purgatoryd.shm_layout.errors import (
    ArenaError,
    ArenaLost,
    BadPath,
    BatchError,
    BulkLoadClosed,
    Busy,
    CallTimeout,
    Closed,
    CursorHeld,
    CursorRefused,
    DaemonError,
    DaemonUnreachable,
    Denied,
    DuplicateWatchKey,
    Exists,
    Fenced,
    ForkedProcess,
    Full,
    FullGroup,
    GroupMismatch,
    GroupMissing,
    GroupRefused,
    InboxFull,
    InvalidArgument,
    InvalidCondition,
    InvalidKey,
    InvalidName,
    InvalidPayload,
    InvalidRows,
    InvalidSetting,
    InvalidTime,
    Lagged,
    LeaseLost,
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
    RingsRefused,
    ScheduleRefused,
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

if TYPE_CHECKING:
    from purgatoryd.clients.admin import Admin
    from purgatoryd.clients.aio import AsyncClient, AsyncHandle, AsyncSubscriber
    from purgatoryd.clients.aio_consumer import AsyncConsumer, AsyncJob
    from purgatoryd.clients.aio_purgatory import AsyncOperation, AsyncPurgatory
    from purgatoryd.clients.bulk import BulkResult
    from purgatoryd.clients.bulk_loads import BulkLoad, BulkLoadStatus
    from purgatoryd.clients.client import Client, Handle
    from purgatoryd.clients.conditions import AllOf, AnyOf, Quorum, SumOf, When
    from purgatoryd.clients.consumer import Consumer, Job
    from purgatoryd.clients.fake import FakeConsumer
    from purgatoryd.clients.items import OrderHash
    from purgatoryd.clients.ledger import Ledger
    from purgatoryd.clients.local import DelayedOperation, DelayedOperationPurgatory
    from purgatoryd.clients.local_purgatory import LocalPurgatory
    from purgatoryd.clients.model import CancelResult, Notice, Occurrence, TimerInfo
    from purgatoryd.clients.notices import Notices
    from purgatoryd.clients.operation_columns import AsyncOperations, Operations
    from purgatoryd.clients.pending import Selection, SweepStatus, TimerPage
    from purgatoryd.clients.purgatory import Operation, Outcome, Purgatory, Watch
    from purgatoryd.clients.remote import Remote
    from purgatoryd.clients.resume import Resume
    from purgatoryd.clients.schedules import Backfilled, Schedule
    from purgatoryd.clients.subscriber import Subscriber
    from purgatoryd.shm_layout.group_wire import DeadLetter, GroupInfo, GroupSettings
    from purgatoryd.shm_layout.layout import (
        ANYBODY,
        BulkLoadState,
        Cause,
        JobReason,
        Status,
        SweepChange,
        SweepState,
    )
    from purgatoryd.shm_layout.wire import NamespaceSettings, OperationInfo, Verdict, WatchInfo

__all__ = [
    "ANYBODY",
    "Admin",
    "AllOf",
    "AnyOf",
    "ArenaError",
    "ArenaLost",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncHandle",
    "AsyncJob",
    "AsyncOperation",
    "AsyncOperations",
    "AsyncPurgatory",
    "AsyncSubscriber",
    "Backfilled",
    "BadPath",
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
    "Consumer",
    "CursorHeld",
    "CursorRefused",
    "DaemonError",
    "DaemonUnreachable",
    "DeadLetter",
    "DelayedOperation",
    "DelayedOperationPurgatory",
    "Denied",
    "DuplicateWatchKey",
    "Exists",
    "FakeConsumer",
    "Fenced",
    "ForkedProcess",
    "Full",
    "FullGroup",
    "GroupInfo",
    "GroupMismatch",
    "GroupMissing",
    "GroupRefused",
    "GroupSettings",
    "Handle",
    "InboxFull",
    "InvalidArgument",
    "InvalidCondition",
    "InvalidKey",
    "InvalidName",
    "InvalidPayload",
    "InvalidRows",
    "InvalidSetting",
    "InvalidTime",
    "Job",
    "JobReason",
    "Lagged",
    "LeaseLost",
    "Ledger",
    "LocalPurgatory",
    "MessageRefused",
    "NamespaceSettings",
    "NoWal",
    "NotDurable",
    "Notice",
    "Notices",
    "Occurrence",
    "Operation",
    "OperationInfo",
    "Operations",
    "OrderHash",
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
    "RingsRefused",
    "Schedule",
    "ScheduleRefused",
    "Selection",
    "SessionExpired",
    "SessionTableFull",
    "ShardUnavailable",
    "Status",
    "Stopping",
    "Subscriber",
    "SumOf",
    "SweepChange",
    "SweepState",
    "SweepStatus",
    "TableBroken",
    "TimerInfo",
    "TimerPage",
    "TooFar",
    "UidShareExceeded",
    "Verdict",
    "WalStopped",
    "Watch",
    "WatchInfo",
    "WatermarkOverflow",
    "When",
    "WrongShard",
]

_NAMES = {
    "clients.admin": ("Admin",),
    "clients.aio": ("AsyncClient", "AsyncHandle", "AsyncSubscriber"),
    "clients.aio_consumer": ("AsyncConsumer", "AsyncJob"),
    "clients.aio_purgatory": ("AsyncOperation", "AsyncPurgatory"),
    "clients.bulk": ("BulkResult",),
    "clients.bulk_loads": ("BulkLoad", "BulkLoadStatus"),
    "clients.client": ("Client", "Handle"),
    "clients.consumer": ("Consumer", "Job"),
    "clients.fake": ("FakeConsumer",),
    "clients.conditions": ("AllOf", "AnyOf", "Quorum", "SumOf", "When"),
    "clients.ledger": ("Ledger",),
    "clients.local": ("DelayedOperation", "DelayedOperationPurgatory"),
    "clients.local_purgatory": ("LocalPurgatory",),
    "clients.items": ("OrderHash",),
    "clients.model": ("CancelResult", "Notice", "Occurrence", "TimerInfo"),
    "clients.notices": ("Notices",),
    "clients.operation_columns": ("AsyncOperations", "Operations"),
    "clients.pending": ("Selection", "SweepStatus", "TimerPage"),
    "clients.purgatory": ("Operation", "Outcome", "Purgatory", "Watch"),
    "clients.remote": ("Remote",),
    "clients.resume": ("Resume",),
    "clients.schedules": ("Backfilled", "Schedule"),
    "clients.subscriber": ("Subscriber",),
    "shm_layout.group_wire": ("DeadLetter", "GroupInfo", "GroupSettings"),
    "shm_layout.layout": (
        "ANYBODY",
        "BulkLoadState",
        "Cause",
        "JobReason",
        "Status",
        "SweepChange",
        "SweepState",
    ),
    "shm_layout.wire": ("NamespaceSettings", "OperationInfo", "Verdict", "WatchInfo"),
}
"""The names that this package exports, by module of purgatoryd."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module of `name` when the name is first used, so unused modules cost nothing."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"purgatoryd.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
