"""What the network is like: how long things take, and which of them go wrong.

All chance of a simulation comes from here, from one seeded source, so that the same seed and the
same faults give the same history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.process import Fate

if TYPE_CHECKING:
    import random

    from tests.simulation.process import Process


class Weather:
    """Latencies and losses."""

    def __init__(
        self, chance: random.Random, *, latency: float, trouble: float, patience: float
    ) -> None:
        """Be rough, until :meth:`clear_up`.

        *latency*: the longest usual one, in seconds. *trouble*: the share of statements and
        notifications that meet a fault. *patience*: how long a slow statement may take.
        """
        self.chance = chance
        self._latency = latency
        self._trouble = trouble
        self._patience = patience

    def clear_up(self) -> None:
        """Let nothing go wrong any more, and answers be quick."""
        self._latency = min(self._latency, 0.02)
        self._trouble = 0.0

    def latency(self) -> float:
        """Seconds that a message takes."""
        return self._latency * self.chance.random()

    def pause(self) -> float:
        """Seconds until a lost listener is noticed or another is tried: a few, or half a minute."""
        return 0.1 + 29.0 * self.chance.random() ** (2 if self._trouble else 6)

    def forgets(self) -> bool:
        """Whether a server drops a statement whose client is gone."""
        return self.chance.random() < 0.5

    def deliveries(self) -> list[float]:
        """How long each copy of a notification takes: lost, late and twice are possible."""
        if self.chance.random() >= self._trouble:
            return [self.latency()]
        late = self._patience * self.chance.random()
        deliveries: tuple[list[float], ...] = ([], [0.0, 0.5], [late])
        return self.chance.choice(deliveries)

    def fate(self, process: Process) -> Fate:
        """What becomes of the next statement of *process*."""
        chance, latency = self.chance, self._latency
        now = process.fleet.clock.now
        there, back = latency * chance.random(), latency * chance.random()
        if process.cut_off_until > now:
            return Fate(None, None)
        if process.fleet.is_down:
            return Fate(None, there, breaks=True)
        if chance.random() >= self._trouble:
            return Fate(there, back)
        late = self._patience * chance.random()
        match chance.randrange(8):
            case 0:  # refused
                return Fate(None, there, breaks=True)
            case 1 | 2:  # committed, and the connection breaks
                return Fate(there, back, breaks=True)
            case 3:  # committed, and nothing is heard
                return Fate(there, None)
            case 4:  # it never arrives
                return Fate(None, None)
            case 5:  # it comes late, perhaps after its worker has given it up
                return Fate(late, back)
            case 6:  # committed, and the answer is late
                return Fate(there, late)
            case _:  # it takes its time between choosing rows and changing them
                return Fate(late, back, stale=True)
