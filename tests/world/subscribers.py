"""A subscriber of the world: the real Inbox with a simulated subscription."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from purgatoryd.clients.model import Notice
from purgatoryd.clients.subscriber import Inbox
from purgatoryd.shm_layout.errors import Lagged, PurgatorydError
from world.hosts import Machine, SimulatedHost
from world.network import NOTICES, End, Network, SimulatedSubscription

TAKE_NS = 4_000
"""Time from an event until the subscriber checks for notices."""
RETRY_NS = 10_000_000


class SimulatedSubscriber:
    """One subscriber process, which takes each notice at once unless it is frozen."""

    def __init__(
        self,
        machine: Machine,
        network: Network,
        name: str,
        namespace: str,
        topics: list[str] | None,
        take: Callable[[Notice | Lagged], None],
        *,
        whole: bool = False,
        local: bool = False,
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a subscriber. `whole`: it receives all notices in the arena, not only later
        notices. `local`: it reads them from the arena. `opened` is called when the daemon accepts
        the subscription."""
        self.machine = machine
        self.schedule = machine.schedule
        self.alive, self.frozen = True, False
        self.inbox: Inbox | None = None
        self.ends: list[End] = []
        self._host = SimulatedHost(machine, machine.next_pid())
        self._network = network
        self._arguments = (name, namespace, topics)
        self._take, self._whole, self._opened = take, whole, opened
        self._local = local
        if local:
            machine.sleepers.append(self._woken)
        self._looks = 0
        self._look_at_ns: int | None = None
        self._open()

    @property
    def open(self) -> bool:
        """True once the subscriber listens."""
        return self.inbox is not None

    def _open(self) -> None:
        if not self.alive or self.inbox is not None:
            return
        name, namespace, topics = self._arguments
        try:
            self.inbox = Inbox(
                name, namespace, topics, 1000, None, whole=self._whole,
                host=self._host, subscribe=self._subscribe, local=self._local,
            )  # fmt: skip
        except PurgatorydError:
            self.schedule.after(RETRY_NS, self._open)
            return
        self._opened()
        self.wake()

    def _subscribe(self, endpoint: str, subjects: Any, *_: object) -> Any:
        end = End(self._host, 0, NOTICES)
        end.wake = self.wake
        self.ends.append(end)
        return SimulatedSubscription(self._network, end, endpoint, subjects)

    def wake(self) -> None:
        """Check for notices soon."""
        self._look_in(TAKE_NS)

    def _woken(self) -> None:
        """End the sleep if one of its words has changed."""
        follower = self.inbox.follower if self.alive and self.inbox is not None else None
        if follower is not None and follower.sleep.missed:
            self.wake()

    def _look_in(self, delay_ns: int) -> None:
        at_ns = self.schedule.now_ns + delay_ns
        if self._look_at_ns is not None and self._look_at_ns <= at_ns:
            return
        self._look_at_ns = at_ns
        self._looks += 1
        number = self._looks
        self.schedule.after(delay_ns, lambda: self._look(number))

    def _look(self, number: int) -> None:
        if number != self._looks or not self.alive:
            return
        self._look_at_ns = None
        if self.frozen or self.inbox is None:
            return
        while (found := self.inbox.peek()) is not None:
            source, item = found
            source.taken = item
            self._take(item)
        self._look_in(max(TAKE_NS, round(self.inbox.patience_s * 1e9) + 1000))

    def freeze(self) -> None:
        """Stop the process as SIGSTOP does."""
        self.frozen = True

    def thaw(self) -> None:
        """Let the process continue."""
        self.frozen = False
        self.wake()

    def die(self) -> None:
        """End the process."""
        self.alive = False
        if self._local:
            self.machine.sleepers.remove(self._woken)
        for end in self.ends:
            end.wake = lambda: None
        if self.inbox is not None:
            self.inbox.close()
