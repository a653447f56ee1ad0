"""How much of the queue a claim looks at, and what it remembers from earlier ones.

A claim reads the heads of the (task, priority) queues and takes the best. Three memories keep its
cost flat, and each is dropped by a *full* look, which the machine orders every two seconds, when
it is woken, and before it believes that nothing is due. So no memory hides a job for longer.

*After*: the last (run_at, id) claimed of each queue. Rows before it are dead versions that a
long-open snapshot keeps, which would be walked again by each claim. A row that commits late with
an earlier time is seen by the next full look.

*In use*: the queues that had due jobs when a full look last came back full; five priorities of
fifty tasks would otherwise be probed each time.

*Window*: how many rows of each queue are read. Twice the free slots is enough until other
workers hold all of them locked; then it doubles, and shrinks again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

PRIORITIES: Final = (2, 1, 0, -1, -2)
WIDEST: Final = 16
FIRST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 1.0
"""Seconds between looks for jobs that are due and cannot be had."""

Queue: TypeAlias = tuple[str, int]
"""A task and a priority."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one claim probes: parallel lists, a place a queue."""

    tasks: list[str]
    priorities: list[int]
    bounds: list[int]  # the task's own max_attempts
    after: list[int | None]  # microseconds since 1970
    after_id: list[int]
    window: int


class Window:
    """The memory of one worker's claims."""

    def __init__(self) -> None:
        self._factor = 2
        self._pause = FIRST_PAUSE
        self._after: dict[Queue, tuple[int, int]] = {}
        self._in_use: frozenset[Queue] | None = None  # None: not known

    def look(self, tasks: Mapping[str, int], limit: int, *, full: bool) -> Look:
        """Return what to probe for *limit* jobs of *tasks*, each with its own max_attempts."""
        if full:
            self._after.clear()
            self._in_use = None
        queues = [
            (task, priority)
            for task in tasks
            for priority in PRIORITIES
            if self._in_use is None or (task, priority) in self._in_use
        ]
        after = [self._after.get(queue) for queue in queues]
        return Look(
            tasks=[task for task, _ in queues],
            priorities=[priority for _, priority in queues],
            bounds=[tasks[task] for task, _ in queues],
            after=[at and at[0] for at in after],
            after_id=[at[1] if at else 0 for at in after],
            window=self._factor * limit,
        )

    def claimed(self, rows: Iterable[tuple[Queue, tuple[int, int]]]) -> None:
        """Remember (run_at in microseconds, id) of what was claimed from each queue."""
        for queue, at in rows:
            if at > self._after.get(queue, (-1, -1)):
                self._after[queue] = at

    def in_use(self, queues: Iterable[Queue]) -> None:
        """Remember which queues have due jobs."""
        self._in_use = frozenset(queues)

    def crowded(self) -> bool:
        """All rows of the window were locked by others: widen it. False if it is at its widest."""
        if self._factor >= WIDEST:
            return False
        self._factor *= 2
        return True

    def left(self, waiting: int) -> float | None:
        """Return the pause before another look for due jobs that a claim left; None for none left.

        They came due just after the claim, and are there for the taking; or somebody has locked
        them, perhaps for long, and looking more and more rarely is enough.
        """
        if not waiting:
            self._pause = FIRST_PAUSE
            return None
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause

    def relax(self) -> None:
        """A claim got all that it asked for: narrow the window."""
        self._factor = max(2, self._factor - 1)
