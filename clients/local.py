"""The purgatory inside one process, without a daemon: operations that end when somebody
completes them or when they time out, whichever is first, each exactly once.

Semantics after Kafka's DelayedOperation and DelayedOperationPurgatory. No callback runs
under a lock of ours, so operations may complete one another, add new ones, or shut down from
within a callback. Instead of a lock, an operation has at most one thread at work on it; a
second one that wants to try leaves word, and the first tries again before it goes. So no
trigger is lost, and try_complete, on_complete and on_expiration of one operation never
overlap. What a callback completes is finished after it, in the same thread: however long a
chain of operations that complete one another is, they do not stand on one stack.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from datetime import timedelta
from typing import Literal

from purgatoryd.shm_layout.errors import Closed, InvalidArgument
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.wheel import NEVER_NS, Wheel

_LOG = logging.getLogger("purgatoryd")

NAP_MAX_S = 1.0
"""The reaper's longest sleep before a deadline: a wait stands still while the host is suspended."""

Ending = Literal["complete", "expire", "return"]


class _Finishing(threading.local):
    """Operations that this thread has to finish; None = it is finishing none."""

    queue: deque[DelayedOperation] | None = None


_finishing = _Finishing()


class DelayedOperation(abc.ABC):
    """An operation that waits. Subclass it; `timeout` is in seconds or a timedelta.

    try_complete decides and calls force_complete when the condition holds; on_complete runs
    once, whoever completed it; on_expiration runs after it, and only if the timeout won.
    """

    def __init__(self, timeout: float | timedelta) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not abs(seconds) < NEVER_NS / 1e9:
            raise InvalidArgument(f"timeout {timeout!r} must be below {NEVER_NS / 1e9:.0f} s")
        self.timeout_ns = round(seconds * 1e9)
        self._mutex = threading.Lock()  # the four fields below; never held in a callback
        self._working = False
        self._word_left = False
        self._completed = False
        self._expired = False
        self._purgatory: DelayedOperationPurgatory | None = None
        self._keys: tuple[Hashable, ...] = ()
        self._slot: int | None = None
        self._due = False

    # ---- for subclasses --------------------------------------------------------------------

    @abc.abstractmethod
    def try_complete(self) -> bool:
        """Looks at the condition; if it holds, returns self.force_complete()."""

    @abc.abstractmethod
    def on_complete(self) -> None:
        """What is to be done when it is over, however it ended."""

    def on_expiration(self) -> None:  # noqa: B027  -- most need nothing besides
        """What is to be done besides, if it timed out."""

    # ---- for everybody ---------------------------------------------------------------------

    @property
    def completed(self) -> bool:
        """True once it is decided that it ended; on_complete may still be running."""
        return self._completed

    def force_complete(self) -> bool:
        """Ends it now. True for the one call that did; on_complete has run; or it will,
        by another thread that is at work on it, or after the callback that makes this call."""
        return self._end(expired=False)

    # ---- one thread at a time --------------------------------------------------------------

    def _end(self, *, expired: bool) -> bool:
        with self._mutex:
            if self._completed:
                return False
            self._completed = True
            self._expired = expired
            mine = not self._working
            self._working = True
        if (purgatory := self._purgatory) is not None:  # cancel_for_key may take it away
            purgatory._take_out(self)
        if mine:
            self._finish()
        return True

    def _try(self) -> bool:
        """Tries once, and once more for every thread that came meanwhile. True if it is
        this call that saw it end."""
        with self._mutex:
            if self._completed or self._working:
                self._word_left = True
                return False
            self._working = True
        while True:
            try:
                self._guarded(self.try_complete)
            except KeyboardInterrupt:
                self._interrupted()
                raise
            with self._mutex:
                if not self._completed and not self._word_left:
                    self._working = False
                    return False
                self._word_left = False
                if self._completed:
                    break
        self._finish()
        return True

    def _interrupted(self) -> None:
        """The next one may try again; what was ended meanwhile is left to this thread."""
        with self._mutex:
            self._working = ended = self._completed
        if ended:
            self._finish()

    def _finish(self) -> None:
        """Runs in the one thread that is at work; nobody works on it afterwards."""
        if _finishing.queue is not None:
            _finishing.queue.append(self)
            return
        _finishing.queue = queue = deque((self,))
        try:
            while queue:
                queue.popleft()._call_back()
        finally:
            _finishing.queue = None

    def _call_back(self) -> None:
        self._guarded(self.on_complete)
        if self._expired:
            self._guarded(self.on_expiration)

    def _guarded(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except KeyboardInterrupt:  # meant for the thread, which is the main one
            raise
        except BaseException as error:  # sys.exit() too: it must not stop the others
            purgatory = self._purgatory
            (_log_error if purgatory is None else purgatory._report)(self, error)


def _log_error(operation: DelayedOperation, error: BaseException) -> None:
    _LOG.error("callback of %r failed", operation, exc_info=error)


class DelayedOperationPurgatory:
    """Holds delayed operations by the keys whose events may complete them. Thread-safe.

    `name` is for logs. `on_error(operation, error)` gets what callbacks raise; by default it
    is logged. `clock_ns`: the time; with `reaper=False` there is no thread, and operations
    expire when advance() is called.
    """

    def __init__(
        self,
        name: str,
        *,
        on_error: Callable[[DelayedOperation, BaseException], None] = _log_error,
        clock_ns: Callable[[], int] = HOST.boot_ns,
        reaper: bool = True,
    ) -> None:
        self.name = name
        self.errors = 0
        """Exceptions that callbacks raised."""
        self.already_true = 0
        """Operations completed only by the last look when they timed out: events without a
        check_and_complete."""
        self._on_error = on_error
        self._clock_ns = clock_ns
        self._changed = threading.Condition()  # everything below; never held in a callback
        self._wheel: Wheel[DelayedOperation] = Wheel(clock_ns())
        self._watchers: dict[Hashable, dict[int, DelayedOperation]] = {}  # by id()
        self._watched = 0
        self._closed = False
        self._wake_ns = NEVER_NS
        self._thread = None
        if reaper:
            self._thread = threading.Thread(target=self._reap, name=f"reaper-{name}", daemon=True)
            self._thread.start()

    # ---- watching --------------------------------------------------------------------------

    def try_complete_else_watch(
        self, operation: DelayedOperation, keys: Collection[Hashable]
    ) -> bool:
        """Tries `operation`; if it does not complete, watches `keys` until it does or times out.

        It is tried again after it stands on every key's list, so an event in between is not
        lost. Returns True if it is complete already. Raises Closed after shutdown, and
        InvalidArgument without keys or for an operation that is watched already.
        """
        unique = tuple(dict.fromkeys(keys))
        if not unique:
            raise InvalidArgument("an operation needs at least one key")
        self._adopt(operation)
        if operation._try() or operation.completed:
            return True
        self._link(operation, unique)
        if operation._try() or operation.completed:
            return True
        self._arm(operation)
        return operation.completed

    def _adopt(self, operation: DelayedOperation) -> None:
        with self._changed:
            self._check_open()
            if operation._purgatory is not None:
                raise InvalidArgument("this operation is watched already")
            operation._purgatory = self

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(subject=f"purgatory {self.name!r}")

    def _link(self, operation: DelayedOperation, keys: tuple[Hashable, ...]) -> None:
        with self._changed:
            if operation.completed:
                return
            if self._closed:
                operation._purgatory = None
            self._check_open()
            operation._keys = keys
            for key in keys:
                self._watchers.setdefault(key, {})[id(operation)] = operation
            self._watched += len(keys)

    def _arm(self, operation: DelayedOperation) -> None:
        deadline_ns = self._clock_ns() + operation.timeout_ns
        with self._changed:
            # Completed by somebody since, or taken out, or even watched again: no timer then.
            if operation.completed or not operation._keys or operation._slot is not None:
                return
            operation._slot = self._wheel.add(operation, deadline_ns)
            if self._wheel.next_ns < self._wake_ns:
                self._changed.notify()

    def _take_out(self, operation: DelayedOperation) -> None:
        with self._changed:
            self._unlink(operation)

    def _unlink(self, operation: DelayedOperation) -> None:
        """Leaves all lists and the wheel, in O(its keys). The caller holds the lock."""
        for key in operation._keys:
            watchers = self._watchers[key]
            del watchers[id(operation)]
            if not watchers:
                del self._watchers[key]
        self._watched -= len(operation._keys)
        operation._keys = ()
        if operation._slot is not None:
            self._wheel.cancel(operation._slot)
            operation._slot = None

    # ---- events ----------------------------------------------------------------------------

    def check_and_complete(self, key: Hashable) -> int:
        """Something happened on `key`: tries its operations. Returns how many this call
        completed; one that another thread is at work on is completed by that thread."""
        with self._changed:
            operations = tuple(self._watchers.get(key, {}).values())
        return sum(operation._try() for operation in operations)

    def cancel_for_key(self, key: Hashable) -> list[DelayedOperation]:
        """Takes the key's operations out of all lists, disarms them, and returns them; they
        are not completed. They may be watched again."""
        with self._changed:
            waiting = self._let_go(self._watchers.get(key, {}).values())
            for operation in waiting:
                operation._purgatory = None
        return waiting

    def _let_go(self, operations: Iterable[DelayedOperation]) -> list[DelayedOperation]:
        """Takes out those that have not begun to end. The caller holds the lock."""
        waiting = [o for o in operations if not (o._due or o.completed)]
        for operation in waiting:
            self._unlink(operation)
        return waiting

    # ---- sizes -----------------------------------------------------------------------------

    @property
    def watched(self) -> int:
        """Entries in all watch lists: an operation counts once for each of its keys."""
        return self._watched

    @property
    def num_delayed(self) -> int:
        """Operations that wait for their timeout."""
        with self._changed:
            return len(self._wheel)

    # ---- time ------------------------------------------------------------------------------

    def advance(self) -> int:
        """Ends what timed out; for reaper=False. Returns how many operations that were."""
        with self._changed:
            due = self._wheel.advance(self._clock_ns())
            for operation in due:
                operation._slot, operation._due = None, True
        return sum(self._expire(operation) for operation in due)

    def _expire(self, operation: DelayedOperation) -> bool:
        """Looks once more: an event may have come without a check_and_complete."""
        if operation._try():
            self.already_true += 1
            return True
        return operation._end(expired=True)

    def _reap(self) -> None:
        while self._wait():
            self.advance()

    def _wait(self) -> bool:
        """The one place that sleeps. False = shut down."""
        with self._changed:
            while not self._closed:
                self._wake_ns = self._wheel.next_ns
                left_ns = self._wake_ns - self._clock_ns()
                if left_ns <= 0:
                    return True
                nap_s = min(left_ns / 1e9, NAP_MAX_S)
                self._changed.wait(None if self._wake_ns == NEVER_NS else nap_s)
            return False

    # ---- the end -----------------------------------------------------------------------------

    def shutdown(self, ending: Ending = "return") -> list[DelayedOperation]:
        """Refuses new operations and ends those that are left: "complete" runs on_complete,
        "expire" runs on_expiration too, "return" leaves them uncompleted, to be watched
        elsewhere. Returns them."""
        if ending not in ("complete", "expire", "return"):
            raise InvalidArgument(f"ending {ending!r} is none of complete, expire, return")
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            everybody = {i: o for ops in self._watchers.values() for i, o in ops.items()}
            left = self._let_go(everybody.values())
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for operation in left:
            if ending == "return":
                operation._purgatory = None
            else:
                operation._end(expired=ending == "expire")
        return left

    def _report(self, operation: DelayedOperation, error: BaseException) -> None:
        with self._changed:
            self.errors += 1
        try:
            self._on_error(operation, error)
        except KeyboardInterrupt:
            raise
        except BaseException:
            _LOG.exception("the error handler of purgatory %r failed", self.name)
