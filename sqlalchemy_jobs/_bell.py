"""When a worker asks to be notified, which spares enqueuers that NOTIFY most of the time.

NOTIFY makes commits queue up behind one lock of the whole server, so telling workers that would
look anyway halves what writers can do. A worker therefore marks itself *resting* when it finds
nothing, and only then are notifications sent. The mark is an advisory lock that the listener's
connection holds, so it ends with the connection; ``sqltypes.told`` is the enqueuer's side.

No wake-up may be lost in between. An enqueuer that found no mark keeps a second, shared lock until
its transaction ends. A worker that has taken the mark tries that lock exclusively: if it can, all
silent enqueuers have committed, and **the look after that** sees their jobs; if it cannot, it
tries again soon. From then on every enqueuer finds the mark. Locks are seen at once whatever a
transaction's isolation, which no row could be.

Marks are by task, or rather by one of a few dozen buckets that tasks share, so that workers which
rest for want of other tasks cost nobody anything.

The mark is given up when a claim leaves jobs behind, and when notifications come thick and fast:
then the worker looks every few milliseconds for a while instead. Pure: time comes from outside.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Final, TypeAlias

from ._messages import (
    Claim,
    Claimed,
    Event,
    Finished,
    ListenerChanged,
    Notified,
    Rest,
    Rested,
    Rouse,
    TasksChanged,
)

MANY: Final = 25
WITHIN: Final = 0.25
"""More notifications than that in so many seconds, and looking is cheaper than being told."""

WARM_FOR: Final = 1.0
"""Seconds of looking by itself after the last job was found."""

WARM_LOOK: Final = 0.025
"""Seconds between such looks: two statements each."""

FIRST_RETRY: Final = 0.01
LONGEST_RETRY: Final = 2.0
"""Seconds between looks for silent enqueuers, which double while a long transaction stays open."""

NEVER: Final = float("inf")

Request: TypeAlias = Rest | Rouse


class _State(Enum):
    AWAKE = auto()
    ASKED = auto()  # a Rest is on its way
    RESTING = auto()


class Bell:
    """Decides for one worker. :attr:`at` is when it wants to be called though nothing happened."""

    def __init__(self) -> None:
        self.at = NEVER
        self._listening = False
        self._state = _State.AWAKE
        self._full = False  # the claim on its way looks at everything
        self._warm_until = 0.0
        self._retry = FIRST_RETRY
        self._counted_from = 0.0
        self._counted = 0

    def handle(
        self, events: Iterable[Event | Rested | TasksChanged], now: float
    ) -> tuple[list[Event], list[Request]]:
        """Return the machine's events, with looks added, and what the listener is to do."""
        passed: list[Event] = []
        requests: list[Request] = []
        for event in events:
            if isinstance(event, Finished):  # by far the most, and of no concern here
                passed.append(event)
                continue
            if isinstance(event, Rested):
                self._rested(event, now, passed)
                continue
            if isinstance(event, TasksChanged):
                self._state, self.at = _State.AWAKE, NEVER  # to take the marks that are missing
                passed.append(Notified())
                continue
            passed.append(event)
            match event:
                case ListenerChanged(up):
                    self._listening, self._state, self.at = up, _State.AWAKE, NEVER
                    self._retry = FIRST_RETRY
                case Notified() if self._listening:
                    self._count(now, requests)
                case Claimed() if self._listening:
                    self._claimed(event, now, requests)
                case _:
                    pass
        if now >= self.at:
            self.at = NEVER
            if self._state is _State.RESTING:
                self._ask(requests)
            elif self._state is _State.AWAKE:
                passed.append(Notified())
        return passed, requests

    def claiming(self, command: Claim) -> None:
        """Remember what the claim looks at."""
        self._full = command.full

    def _rested(self, event: Rested, now: float, passed: list[Event]) -> None:
        if self._state is not _State.ASKED:
            return  # roused since
        self._state = _State.RESTING
        passed.append(Notified())  # the look that sees what silent enqueuers committed
        if event.quiet:
            self._retry = FIRST_RETRY
        else:
            self.at = now + self._retry
            self._retry = min(2 * self._retry, LONGEST_RETRY)

    def _claimed(self, event: Claimed, now: float, requests: list[Request]) -> None:
        if event.leases and now < self._warm_until:
            self._warm_until = now + WARM_FOR
        if event.more:
            if event.leases:
                self._rouse(requests)
        elif self._full and event.sure and self._state is _State.AWAKE:
            if now < self._warm_until:
                self.at = now + WARM_LOOK
            else:
                self._ask(requests)

    def _count(self, now: float, requests: list[Request]) -> None:
        if now - self._counted_from > WITHIN:
            self._counted_from, self._counted = now, 0
        self._counted += 1
        if self._counted > MANY and self._state is not _State.AWAKE:
            self._warm_until = now + WARM_FOR
            self._rouse(requests)
            self.at = now + WARM_LOOK

    def _ask(self, requests: list[Request]) -> None:
        self._state, self.at = _State.ASKED, NEVER
        requests.append(Rest())

    def _rouse(self, requests: list[Request]) -> None:
        if self._state is not _State.AWAKE:
            self._state, self.at = _State.AWAKE, NEVER
            requests.append(Rouse())
