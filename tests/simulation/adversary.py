"""The adversary: from a seed, a fleet, its work, and the worst moments for the worst faults.

    run(seed)        # raises an AssertionError that names the law, if one is broken

Faults come by steps rather than by seconds, for what matters happens in milliseconds between long
silences. Each schedule has a taste of its own: some faults never happen in it and some often, so
that schedules differ more than dice would make them.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy_jobs.lifecycle import Event as Life
from tests.simulation.fleet import SOUND, UNKNOWN, VERSIONS, Fleet, Order, Parts
from tests.simulation.process import Process, Script

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS: Final[dict[str, float]] = {
    "enqueue": 3.0,
    "crash": 2.0,
    "stop": 1.0,
    "start": 2.0,
    "stall": 1.0,
    "suspend": 0.5,
    "block": 0.5,
    "leap": 0.3,
    "restart_database": 0.7,
    "break_connection": 2.0,
    "cut_off": 0.7,
    "lose_listener": 0.7,
    "notify_for_nothing": 0.5,
    "deploy": 0.4,
    "learn": 0.2,
    "operate": 1.0,
    "lock": 0.4,
    "spoil": 0.4,
}
"""What the adversary does, and how often, compared with others."""

TASKS: Final = ("mail", "mail", "mail", "report", "digest", UNKNOWN)
ENDS: Final = ("succeed", "raise", "raise", "fail", "snooze", "kill")


class Adversary:
    """Chooses what happens to one fleet."""

    def __init__(self, seed: int, parts: Parts = SOUND, *, tells: bool = False) -> None:
        """Set up the fleet of *seed*; *tells*: it keeps its story."""
        self.chance = chance = random.Random(seed)  # noqa: S311 - dice, not keys
        choice = chance.choice
        self.lease = lease = choice((3.0, 12.0, 60.0, 300.0))
        self.fleet = Fleet(
            chance,
            parts=parts,
            tells=tells,
            latency=choice((0.002, 0.02, 0.02, 0.3)),
            trouble=choice((0.0, 0.05, 0.2)),
            retention=choice((1.0, lease, 1e6, 1e6)),
            concurrency=choice((1, 2, 3)),
            visibility_timeout=lease,
            poll_interval=choice((2.0, 2.0, 0.5)),
            recovery_interval=lease * choice((0.3, 1.0, 2.0)),
            prune_interval=choice((3600.0, 2 * lease)),
            shutdown_timeout=choice((0.0, 3.0, 15.0, 4 * lease)),
            statement_timeout=choice((min(30.0, max(1.0, lease / 3)), 1.0, 5.0, 30.0)),
        )
        self.faults = choice((2, 5, 8, 12, 20))
        self.taste = [weight * choice((0.0, 0.3, 1.0, 1.0, 4.0)) for weight in FAULTS.values()]
        self.doers: list[Callable[[], None]] = [getattr(self, f"_{name}") for name in FAULTS]
        self.kills = choice((0.0, 0.0, 0.1))
        self.listening = choice((0.5, 1.0, 1.0))

    def run(self) -> Fleet:
        """Play the schedule to its end; an AssertionError says which law was broken."""
        fleet, chance = self.fleet, self.chance
        self._enqueue()
        for _ in range(chance.choice((1, 2, 2, 3))):
            self._start()
        pause = chance.choice((2, 6, 15))
        for _ in range(self.faults):
            for _ in range(1 + int(chance.expovariate(1 / pause))):
                fleet.step()
            chance.choices(self.doers, self.taste)[0]()
            if not fleet.alive():
                self._start()
        fleet.end(self._encore() if chance.random() < 0.3 else ())
        for process in [*fleet.processes]:
            assert not process.alive
        return fleet

    # --- choices --------------------------------------------------------------------------------

    def _somebody(self) -> Process | None:
        """A process, by preference the one that the latest event was about."""
        alive = self.fleet.alive()
        last = self.fleet.last
        if last is not None and last.alive and self.chance.random() < 0.6:
            return last
        return self.chance.choice(alive) if alive else None

    def _a_while(self) -> float:
        """Some seconds: an instant, or as long as a few leases."""
        lease = self.lease
        return self.chance.choice((0.01, 0.5, 2.0, lease / 2, 1.2 * lease, 3 * lease))

    def _order(self) -> Order:
        choice = self.chance.choice
        return Order(
            choice(TASKS),
            delay=choice((0.0, 0.0, 0.0, 0.3, 7.0, 40.0)),
            priority=choice((0, 0, 1, -1)),
            max_attempts=choice((None, None, None, 1, 2, 0)),
            timeout=choice((None, None, 2.0, self.lease / 2, 2 * self.lease)),
            key=choice((None, None, None, "one", "other")),
            scripts=[self._script() for _ in range(choice((0, 1, 1, 2)))],
        )

    def _script(self) -> Script:
        chance, choice = self.chance, self.chance.choice
        end = choice(ENDS)
        if end == "kill" and chance.random() >= self.kills * 6:
            end = "raise"
        return Script(
            choice((0.0, 0.05, 0.05, 1.0, self.lease / 2, 1.3 * self.lease, None)),
            end,
            choice((0.0, 0.0, 0.25, 1.0, 20.0)),
            obeys=chance.random() < 0.6,
        )

    def _encore(self) -> list[tuple[float, dict[str, Any]]]:
        """Work for when all is well: more jobs than slots, and enqueuers that hesitate."""
        choice = self.chance.choice
        return [
            (
                choice((0.0, 0.03, 0.3, 5.0)),
                {
                    "orders": [
                        Order(choice(TASKS[:4]), delay=choice((0.0, 0.0, 1.0)))
                        for _ in range(choice((1, 1, 5)))
                    ],
                    "stays_open": choice((0.0, 0.01, 0.5, 4.0)),
                    "hesitates": choice((0.0, 0.0, 0.01, 0.1)),
                },
            )
            for _ in range(choice((1, 2, 3)))
        ]

    # --- what it does ---------------------------------------------------------------------------

    def _enqueue(self) -> None:
        chance, choice = self.chance, self.chance.choice
        self.fleet.enqueue(
            [self._order() for _ in range(choice((1, 1, 2, 3)))],
            stays_open=choice((0.0, 0.0, 0.0, 0.01, 1.0, self.lease)),
            hesitates=choice((0.0, 0.0, 0.005, 0.05)),
            rolls_back=chance.random() < 0.15,
            near=self._somebody() if chance.random() < 0.2 else None,
        )

    def _start(self) -> None:
        if len(self.fleet.alive()) < 3:
            self.fleet.start(
                tasks=self.chance.choice(VERSIONS),
                listening=self.chance.random() < self.listening,
                reaction=self.chance.choice((0.0, 0.0, 0.001, 0.05)),
            )

    def _to_somebody(self, do: Callable[..., object], *arguments: Any) -> None:
        process = self._somebody()
        if process is not None:
            do(process, *arguments)

    def _crash(self) -> None:
        self._to_somebody(self.fleet.crash)

    def _stop(self) -> None:
        self._to_somebody(self.fleet.stop)

    def _stall(self) -> None:
        self._to_somebody(self.fleet.sleep, self._a_while(), "stall")

    def _suspend(self) -> None:
        self._to_somebody(self.fleet.sleep, self._a_while(), "suspend")

    def _block(self) -> None:
        self._to_somebody(self.fleet.sleep, self._a_while(), "block")

    def _leap(self) -> None:
        self._to_somebody(self.fleet.leap, self._a_while())

    def _cut_off(self) -> None:
        self._to_somebody(self.fleet.cut_off, self._a_while())

    def _lose_listener(self) -> None:
        process = self._somebody()
        if process is not None:
            process.listener.lose(silently=self.chance.random() < 0.5)

    def _notify_for_nothing(self) -> None:
        self._to_somebody(self.fleet.notify_for_nothing)

    def _restart_database(self) -> None:
        self.fleet.restart_database(
            self.chance.choice((0.0, 1.0, 10.0, self.lease)), politely=self.chance.random() < 0.7
        )

    def _break_connection(self) -> None:
        self.fleet.break_connection(self.chance.randrange(6), committed=self.chance.random() < 0.6)

    def _deploy(self) -> None:
        choice = self.chance.choice
        self.fleet.deploy(choice((0, 1, 2)), choice((0.0, 1.0, 20.0)))

    def _learn(self) -> None:
        process = self._somebody()
        if process is not None and "digest" not in process.tasks:
            process.learn("digest", 2)

    def _operate(self) -> None:
        self.fleet.operate(
            self.chance.randrange(6), self.chance.choice((Life.CANCEL, Life.REQUEUE))
        )

    def _lock(self) -> None:
        self.fleet.lock(self.chance.randrange(6), self._a_while())

    def _spoil(self) -> None:
        self.fleet.spoil(self.chance.randrange(6), self._a_while())


def run(seed: int, parts: Parts = SOUND, *, tells: bool = False) -> Fleet:
    """Play the schedule of *seed*. The same seed plays the same schedule again."""
    return Adversary(seed, parts, tells=tells).run()
