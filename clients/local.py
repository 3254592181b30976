"""The purgatory inside one process, without a daemon.

An operation ends exactly once: when a caller completes it or when it times out, whichever is first.
The semantics are those of Kafka's DelayedOperation and DelayedOperationPurgatory.

No callback runs under a lock of this module, so a callback may complete other operations, add new
operations, or shut the purgatory down. Instead of a lock, at most one thread works on an operation.
If a second thread wants to try the operation, it increments `_words`, and the first thread tries
again before it stops. So no event is lost, and try_complete, on_complete and on_expiration of one
operation never overlap. If a callback completes another operation, the same thread finishes that
operation after the callback. So a chain of operations that complete one another needs no deep
stack.

An exception of a signal handler, such as KeyboardInterrupt, may interrupt any call between two
lines, or a callback. Even then an operation ends once, and on_complete is called once. These rules
ensure this:

* The statement that begins a step also notes the step in the operation. After an exception the same
  thread continues with the noted step before it passes the exception on (`_go_on`). No operation is
  left half watched.
* Steps that may be repeated are idempotent: to leave the lists, to disarm, to finish.
* A lock is held only during one call (`locked`).
* The line that calls a callback also notes that the callback was called. So an exception comes
  either before the note and the call, or from within the callback.

An exception within a callback ends the callback, even before its first line; the callback is not
called again. A second exception, while the first is handled, may leave operations without their
callbacks until the thread finishes another operation. If an operation was being tried, its
callbacks may never be called.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import get_ident
from typing import Literal

from purgatoryd.clients.locked import locked
from purgatoryd.clients.times import seconds_ns
from purgatoryd.shm_layout.errors import Closed, InvalidArgument, InvalidTime
from purgatoryd.shm_layout.host import HOST
from purgatoryd.shm_layout.wheel import NEVER_NS, Wheel

_LOG = logging.getLogger("purgatoryd")

NAP_MAX_S = 1.0
"""The reaper's longest sleep while a deadline is pending. The sleep is short because the clock of a
wait stops while the host is suspended."""

Ending = Literal["complete", "expire", "return"]


class _Finishing(threading.local):
    """Operations that this thread has to finish."""

    def __init__(self) -> None:
        self.queue: deque[DelayedOperation] = deque()
        self.lock = threading.Lock()
        """Locked while the thread finishes operations. Operations that end meanwhile are queued."""


_finishing = _Finishing()


class DelayedOperation(abc.ABC):
    """An operation that waits for an event or its timeout.

    Subclass it. `timeout`: seconds or a timedelta. try_complete() checks the condition, and calls
    force_complete() if the condition holds. on_complete() runs once, however the operation ended.
    on_expiration() runs after on_complete(), but only if the operation timed out.
    """

    def __init__(self, timeout: float | timedelta) -> None:
        try:
            self.timeout_ns = max(seconds_ns(timeout), 0)
        except InvalidTime as error:
            raise InvalidArgument(f"timeout {timeout!r} {error.reason}") from None
        if self.timeout_ns >= NEVER_NS:
            raise InvalidArgument(f"timeout {timeout!r} must be below {NEVER_NS / 1e9:.0f} s")
        self._mutex = threading.Lock()  # protects the five fields below; not held in a callback
        self._worker = 0
        """Id of the thread that works on the operation and finishes it if it ends; 0 = none."""
        self._words = 0
        """Number of tries that other threads have requested from the working thread."""
        self._tried = 0
        """Value of `_words` before the last try."""
        self._completed = False
        self._expired = False
        self._called = 0
        """1 = on_complete was called; 2 = on_expiration was called as well."""
        self._begun = False
        """True once the most recent callback has been called."""
        self._purgatory: DelayedOperationPurgatory | None = None
        self._watch: object = None
        """An object that identifies the call which watches the operation."""
        self._keys: tuple[Hashable, ...] = ()
        self._timer: _Timer | None = None
        self._due = False
        """True while a call expires the operation."""

    # ---- for subclasses --------------------------------------------------------------------

    @abc.abstractmethod
    def try_complete(self) -> bool:
        """Check the condition; if it holds, return self.force_complete()."""

    @abc.abstractmethod
    def on_complete(self) -> None:
        """Run once when the operation has ended."""

    def on_expiration(self) -> None:  # noqa: B027  -- most subclasses do not need it
        """Run after on_complete if the operation has timed out."""

    # ---- for all callers -------------------------------------------------------------------

    @property
    def completed(self) -> bool:
        """True once the operation has ended; on_complete may still be running."""
        return self._completed

    def force_complete(self) -> bool:
        """End the operation. Returns True only for the call that ended it.

        When this call returns, on_complete() has run, with two exceptions:

        * If another thread works on the operation, on_complete() runs in that thread.
        * If a callback made this call, on_complete() runs after the callback.
        """
        return self._end(expired=False)

    # ---- one thread at a time --------------------------------------------------------------

    def _end(self, *, expired: bool) -> bool:
        nested = self._worker == get_ident()  # called in a callback of this operation
        try:
            ended = locked(self._mutex, self._mark_ended, expired)
            if ended:
                self._settle(nested=nested)
            return ended
        except BaseException:
            self._go_on(nested=nested)
            raise

    def _mark_ended(self, expired: bool) -> bool:
        if self._completed:
            return False
        self._expired = expired
        self._worker, self._completed = self._worker or get_ident(), True
        return True

    def _try(self) -> bool:
        """Try the operation, and try again if other threads ask for it in the meantime. Returns
        True if the operation ended while this call worked on it."""
        nested = self._worker == get_ident()
        try:
            begun = locked(self._mutex, self._begin_work)
            while begun and self._attempt():
                pass
            if not (begun and self._completed and self._worker == get_ident()):
                return False
            self._settle(nested=nested)
            return True
        except BaseException:
            self._go_on(nested=nested)
            raise

    def _begin_work(self) -> bool:
        """Reserve the operation for this thread. If another thread works on it, return False and
        ask that thread to try again."""
        if self._completed or self._worker:
            self._words += 1
            return False
        self._worker = get_ident()
        return True

    def _attempt(self) -> bool:
        """Try the operation once. Returns True if another thread has asked for one more try."""
        words = self._words
        self._guarded(self.try_complete, 0)
        return locked(self._mutex, self._end_attempt, words)

    def _end_attempt(self, words: int) -> bool:
        self._tried = words
        if self._completed or self._words != words:
            return not self._completed
        self._worker = 0
        return False

    def _settle(self, *, nested: bool) -> None:
        """Take an ended operation out of all lists, and finish it if this thread works on it and
        the call is not nested."""
        if (purgatory := self._purgatory) is not None:  # cancel_for_key() may reset _purgatory
            purgatory._take_out(self)
        if self._worker == get_ident() and not nested:
            self._finish()

    def _go_on(self, *, nested: bool) -> None:
        """Continue after an exception: make the tries that other threads have requested, and finish
        the operation if it has ended."""
        if nested or self._worker != get_ident():
            return
        try:
            while self._words != self._tried and not self._completed:
                self._attempt()
        finally:
            locked(self._mutex, self._stop_work)
            if self._completed:
                self._settle(nested=False)

    def _stop_work(self) -> None:
        if not self._completed:
            self._worker = 0

    def _finish(self) -> None:
        """Finish the operation in the only thread that works on it. After that no thread works on
        it."""
        _finishing.queue.append(self)
        if not _finishing.lock.locked():
            locked(_finishing.lock, _call_back, _finishing.queue)

    def _call_back(self) -> None:
        if self._called < 1:
            self._guarded(self.on_complete, 1)
        if self._called < 2 and self._expired:
            self._guarded(self.on_expiration, 2)

    def _guarded(self, callback: Callable[[], object], called: int) -> None:
        self._begun = False
        try:
            self._begun, self._called = True, called; callback()  # noqa: E702  # fmt: skip
        except KeyboardInterrupt:  # only the main thread gets it, and must pass it on
            raise
        except BaseException as error:  # also sys.exit(), which must not stop the other callbacks
            if not self._begun:
                raise
            purgatory = self._purgatory
            (_log_error if purgatory is None else purgatory._report)(self, error)


def _call_back(queue: deque[DelayedOperation]) -> None:
    """Finish the queued operations. After an exception the next call continues with the rest."""
    while queue:
        queue[0]._call_back()
        queue.popleft()


def _log_error(operation: DelayedOperation, error: BaseException) -> None:
    _LOG.error("callback of %r failed", operation, exc_info=error)


class _Timer:
    """The timeout of an operation that is watched."""

    __slots__ = ("operation", "slot")

    def __init__(self, operation: DelayedOperation) -> None:
        self.operation = operation
        self.slot = -1


class DelayedOperationPurgatory:
    """Holds delayed operations by the keys whose events may complete them. Thread-safe.

    `name` is for logs. `on_error(operation, error)` receives exceptions of callbacks; by default it
    logs them. `clock_ns` returns the time in ns. With `reaper=False` there is no thread, and
    operations expire when advance() is called.
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
        """Number of exceptions that callbacks raised."""
        self.already_true = 0
        """Number of operations that timed out and that one last try then completed. Their event
        came without a call of check_and_complete()."""
        self._on_error = on_error
        self._clock_ns = clock_ns
        self._mutex = threading.Lock()  # protects all fields below; never held in a callback
        self._wheel: Wheel[_Timer] = Wheel(clock_ns())
        self._watchers: dict[Hashable, dict[int, DelayedOperation]] = {}  # The inner keys are id().
        self._due: dict[int, _Timer] = {}  # Timers that are due but not expired, by id().
        self._closed = False
        self._wake_ns = NEVER_NS
        self._bell: SimpleQueue[None] = SimpleQueue()  # wakes the reaper
        self._thread = None
        if reaper:
            self._thread = threading.Thread(target=self._reap, name=f"reaper-{name}", daemon=True)
            self._thread.start()

    # ---- watching --------------------------------------------------------------------------

    def try_complete_else_watch(
        self, operation: DelayedOperation, keys: Collection[Hashable]
    ) -> bool:
        """Try `operation`. If it is not complete, watch `keys` until it completes or times out.

        The operation is tried again once it is in every key's list, so an event in between is not
        lost. Returns True if the operation is already complete. Raises Closed after shutdown, and
        InvalidArgument without keys or for an operation that is already watched. After an interrupt
        the operation either is complete or is not watched.
        """
        if isinstance(keys, str | bytes):
            raise InvalidArgument(f"keys must be a collection of keys, not {keys!r}")
        unique = tuple(dict.fromkeys(keys))
        if not unique:
            raise InvalidArgument("an operation needs at least one key")
        watch = object()
        try:
            locked(self._mutex, self._adopt, operation, watch)
            if operation._try() or operation.completed:
                return True
            locked(self._mutex, self._link, operation, unique)
            if operation._try() or operation.completed:
                return True
            deadline_ns = self._clock_ns() + operation.timeout_ns
            locked(self._mutex, self._arm, operation, deadline_ns)
            return operation.completed
        except BaseException:
            if operation._watch is watch:
                locked(self._mutex, self._let_go, (operation,), [])
            raise

    def _adopt(self, operation: DelayedOperation, watch: object) -> None:
        self._check_open()
        if operation._purgatory is not None:
            raise InvalidArgument("this operation is watched already")
        operation._purgatory, operation._watch = self, watch

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(subject=f"purgatory {self.name!r}")

    def _link(self, operation: DelayedOperation, keys: tuple[Hashable, ...]) -> None:
        if operation.completed:
            return
        self._check_open()
        operation._keys = keys
        for key in keys:
            self._watchers.setdefault(key, {})[id(operation)] = operation

    def _arm(self, operation: DelayedOperation, deadline_ns: int) -> None:
        # An operation that was completed, taken out or watched again meanwhile needs no timer.
        if operation.completed or not operation._keys or operation._timer is not None:
            return
        operation._timer = timer = _Timer(operation)
        timer.slot = self._wheel.add(timer, deadline_ns)
        if self._wheel.next_ns < self._wake_ns:
            self._bell.put(None)

    def _take_out(self, operation: DelayedOperation) -> None:
        locked(self._mutex, self._unlink, operation)

    def _unlink(self, operation: DelayedOperation) -> None:
        """Take an operation out of all lists and the wheel. The time is linear in the number of its
        keys. The caller holds the lock."""
        for key in operation._keys:
            watchers = self._watchers.get(key, {})
            watchers.pop(id(operation), None)
            if not watchers:
                self._watchers.pop(key, None)
        operation._keys = ()
        if (timer := operation._timer) is not None:
            self._wheel.cancel(timer.slot, timer)
            operation._timer = None

    # ---- events ----------------------------------------------------------------------------

    def check_and_complete(self, key: Hashable) -> int:
        """Try the operations of `key` after an event.

        Returns the number of operations that this call completed. An operation that another thread
        works on is completed by that thread. Repeat an interrupted call: it may not have tried all
        operations.
        """
        return sum(map(DelayedOperation._try, locked(self._mutex, self._watchers_of, key)))

    def _watchers_of(self, key: Hashable) -> tuple[DelayedOperation, ...]:
        return tuple(self._watchers.get(key, {}).values())

    def cancel_for_key(self, key: Hashable) -> list[DelayedOperation]:
        """Take the key's operations out of all lists, disarm them, and return them uncompleted.

        They may be watched again. If the call is interrupted, the attribute `handle` of the
        exception contains the operations that the call took out.
        """
        taken: list[DelayedOperation] = []
        try:
            locked(self._mutex, self._let_go_key, key, taken)
            return taken
        except BaseException as error:
            vars(error)["handle"] = self._let_go_again(taken)
            raise

    def _let_go_key(self, key: Hashable, taken: list[DelayedOperation]) -> None:
        self._let_go(self._watchers_of(key), taken)

    def _let_go(
        self, operations: Iterable[DelayedOperation], taken: list[DelayedOperation]
    ) -> None:
        """Take out operations that have not begun to end. The caller holds the lock."""
        for operation in tuple(operations):
            if not (operation._due or operation.completed):
                taken.append(operation)
                self._unlink(operation)
                operation._purgatory = None

    def _let_go_again(self, taken: list[DelayedOperation]) -> list[DelayedOperation]:
        """Repeat _let_go() after an exception: its work on the last operation may be half done."""
        again: list[DelayedOperation] = []
        locked(self._mutex, self._let_go, taken, again)
        return again

    # ---- sizes -----------------------------------------------------------------------------

    @property
    def watched(self) -> int:
        """Number of entries in all watch lists: an operation counts once for each of its keys."""
        return locked(self._mutex, lambda: sum(map(len, self._watchers.values())))

    @property
    def num_delayed(self) -> int:
        """Number of operations that wait for their timeout."""
        return locked(self._mutex, len, self._wheel)

    # ---- time ------------------------------------------------------------------------------

    def advance(self) -> int:
        """End the operations that have timed out, and return their number. Only a purgatory with
        reaper=False needs this call. After an interrupted call the next call continues."""
        locked(self._mutex, self._take_due)
        return sum(map(self._expire, tuple(self._due.values())))

    def _take_due(self) -> None:
        self._wheel.advance(self._clock_ns(), self._note_due)

    def _note_due(self, timer: _Timer) -> None:
        self._due[id(timer)] = timer

    def _expire(self, timer: _Timer) -> bool:
        """Expire an operation, unless a last try completes it. Its event may have come without a
        call of check_and_complete()."""
        operation, ended = timer.operation, False
        try:
            due = locked(self._mutex, self._begin_expiry, timer)
            if due and operation._try():
                self.already_true += 1
                ended = True
            elif due:
                ended = operation._end(expired=True)
            if operation.completed or operation._timer is not timer:
                self._due.pop(id(timer), None)
        except BaseException:
            operation._due = False
            raise
        return ended

    def _begin_expiry(self, timer: _Timer) -> bool:
        """Begin to expire an operation. Return False if it was taken out, or another call has
        already begun to expire it."""
        operation = timer.operation
        if operation._timer is not timer or operation._due:
            return False
        operation._due = True
        return True

    def _reap(self) -> None:
        while self._wait():
            self.advance()

    def _next_ns(self) -> int:
        """Return the time at which the reaper must wake up, unless it is woken earlier."""
        self._wake_ns = self._wheel.next_ns
        return self._wake_ns

    def _wait(self) -> bool:
        """Sleep until an operation times out. Returns False after shutdown. The reaper sleeps only
        here."""
        while not self._closed:
            left_ns = locked(self._mutex, self._next_ns) - self._clock_ns()
            if left_ns <= 0:
                return True
            rests = self._wake_ns == NEVER_NS and not self._due
            with suppress(Empty):
                self._bell.get(timeout=None if rests else min(left_ns / 1e9, NAP_MAX_S))
            if self._due:
                return True
        return False

    # ---- the end -----------------------------------------------------------------------------

    def shutdown(self, ending: Ending = "return") -> list[DelayedOperation]:
        """Refuse new operations, end the remaining operations, and return them.

        `ending`: "complete" runs on_complete, "expire" runs on_expiration as well, "return" leaves
        the operations uncompleted, so that they can be watched elsewhere. Repeat an interrupted
        call: it may not have ended all operations. The attribute `handle` of the exception contains
        the operations that the call ended or took out.
        """
        if ending not in ("complete", "expire", "return"):
            raise InvalidArgument(f"ending must be one of complete, expire, return, not {ending!r}")
        self._closed = True
        self._bell.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        left: list[DelayedOperation] = []
        try:
            locked(self._mutex, self._let_go_all, left)
            self._end_all(left, ending)
            return left
        except BaseException as error:
            vars(error)["handle"] = left
            self._let_go_again(left)
            self._end_all(left, ending)
            raise

    def _let_go_all(self, taken: list[DelayedOperation]) -> None:
        everybody = {i: o for ops in self._watchers.values() for i, o in ops.items()}
        self._let_go(everybody.values(), taken)

    def _end_all(self, operations: list[DelayedOperation], ending: Ending) -> None:
        for operation in operations if ending != "return" else ():
            operation._purgatory = operation._purgatory or self  # reports errors of the callbacks
            operation._end(expired=ending == "expire")

    def _report(self, operation: DelayedOperation, error: BaseException) -> None:
        locked(self._mutex, self._count_error)
        try:
            self._on_error(operation, error)
        except KeyboardInterrupt:
            raise
        except BaseException:
            _LOG.exception("the error handler of purgatory %r failed", self.name)

    def _count_error(self) -> None:
        self.errors += 1
