"""Judge the notices of subscribers: each arrives once and in order, or is reported as lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from world.oracle import Oracle, Sent, Violation


@dataclass
class Delivered:
    """Progress of one subscriber in one topic of one stream."""

    next: int
    """Sequence that the next notice must have; 0 = any."""


@dataclass
class Deliveries:
    """The judge of the notices that one subscriber receives."""

    oracle: Oracle
    stream: Callable[[], int]
    """Function that returns the stream of the last received notice."""
    replay: Callable[[str, int], tuple[bool, int]]
    """Function that returns (notice is in the replay buffer of the current stream, number of
    notices that the buffer received), for a topic and a sequence."""
    wanted: list[str] | None = None
    """Topics of the subscription; None = all."""
    topics: dict[tuple[int, str], Delivered] = field(default_factory=dict)
    before: dict[tuple[int, str], int] | None = None
    """Newest sequence of each topic when the subscriber was accepted; None before that."""
    unsent: dict[tuple[int, str, int], Sent] = field(default_factory=dict)
    """Notices that the subscriber read from the replay buffer before they were sent."""
    notices: int = 0
    lost: int = 0

    def opened(self) -> None:
        """Record that the subscriber has been accepted. It has to receive all later notices."""
        self.before = dict(self.oracle.newest)

    def received(self, topic: str, sequence: int, sent: Sent) -> None:
        """Judge a notice that arrived."""
        stream = self.stream()
        known = self.oracle.sent.get((stream, topic, sequence))
        if known is None:
            self.unsent[stream, topic, sequence] = sent
        elif known != sent:
            raise Violation(f"{topic} {sequence}: received {sent}, but {known} was sent")
        at = self.topics.setdefault((stream, topic), Delivered(0))
        if at.next not in (0, sequence):
            raise Violation(f"{topic}: received {sequence}, but {at.next} comes next")
        at.next = sequence + 1
        self.notices += 1

    def lagged(self, topic: str, first: int, last: int) -> None:
        """Judge a range that the subscriber reports as lost. `last` 0: it reports the end of a
        stream."""
        stream = self.stream()
        if last == 0:
            self.topics.pop((stream, topic), None)
            return
        at = self.topics.setdefault((stream, topic), Delivered(0))
        if at.next not in (0, first):
            raise Violation(f"{topic}: a reported loss begins at {first}, but {at.next} comes next")
        if stream == self.oracle.stream_id:
            self.lost += 1
            has_it, fired = self.replay(topic, last)
            if has_it:
                raise Violation(
                    f"{topic}: reported as lost up to {last}, but the replay buffer has this notice"
                )
            self.oracle.judge_loss((stream, topic), range(first, last + 1), fired)
        at.next = last + 1

    def finish(self) -> None:
        """Check at the end that each notice of the current stream has arrived or was reported as
        lost."""
        self._judge_unseen()
        for place, sent in self.unsent.items():
            if place[0] == self.oracle.stream_id and self.oracle.sent.get(place) != sent:
                raise Violation(f"{place}: received {sent}, which was not sent")
        for (stream, topic), at in self.topics.items():
            if stream != self.oracle.stream_id:
                continue
            newest = self.oracle.newest.get(
                (stream, topic)
            )  # None: all notices of the topic were sent before the subscriber was accepted
            if newest is not None and at.next != newest + 1:
                raise Violation(
                    f"{topic}: the last notice is {newest}, but {at.next - 1} is the last received"
                )

    def _judge_unseen(self) -> None:
        """Check the topics of the current stream from which the subscriber has received nothing."""
        if self.before is None:
            return
        for (stream, topic), newest in self.oracle.newest.items():
            wanted = stream == self.oracle.stream_id and topic in (self.wanted or [topic])
            sent = newest > self.before.get((stream, topic), 0)
            if wanted and sent and (stream, topic) not in self.topics:
                raise Violation(f"{topic}: sent up to {newest}, received none")
