"""How a worker is, for probes and dashboards: what ``worker.health()`` returns, and its keeping.

Nothing here asks the database. Each loop's successes and failures are noted as they come, by the
thread that sees them, and any thread may read them at any time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

State: TypeAlias = Literal["starting", "running", "stopping", "stopped"]
"""``starting`` until the first look for jobs was answered; ``stopped`` before and after a run."""

LOOPS: Final = ("claim", "settle", "renew", "recover", "prune", "listen")
"""What a worker does again and again."""

PATIENCE: Final = 10.0
TRIES: Final = 3
"""An error that a new connection should not need is tried again so often and for so many seconds,
as it may be the passing state of a driver; then the worker ends with it."""

LATE: Final = 5.0
"""Seconds by which a worker may be late, before it is not well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopHealth:
    """How one loop of a worker is.

    age
        Seconds since it last succeeded; None: not yet. It says little by itself: outcomes are
        recorded and leases renewed only when there are some.
    failures, error
        How often it has failed since, and what the latest of these failures was; 0 and None if
        all is well.
    """

    age: float | None = None
    failures: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How a worker is.

    ok
        The worker is running, the latest try of each loop but ``listen`` succeeded, outcomes do
        not pile up, and it is not late. Neither being idle nor being busy makes it false.
    state
        ``starting`` until the first look for jobs was answered, ``running``, ``stopping``, or
        ``stopped``, which is before and after a run, whatever ended it.
    ended_by
        The error that ended the worker, if one did.
    loops
        By name: ``claim`` looks for jobs, ``settle`` records outcomes, ``renew`` keeps the leases
        of running jobs, ``recover`` takes back those that ran out, ``prune`` deletes old jobs,
        ``listen`` gets notifications.
    listening
        Notifications arrive. If not, it polls, which is slower and otherwise as good.
    slots, busy
        How many handlers may run at once, and how many do.
    unrecorded
        Attempts that ended and whose outcome is not in the database yet.
    zombies
        Handlers that still run although their attempts are over.
    late
        Seconds by which the worker is behind with what it wanted to do next: its event loop is
        blocked, or the machine overloaded.
    """

    ok: bool
    state: State
    ended_by: str | None
    loops: Mapping[str, LoopHealth]
    listening: bool
    slots: int
    busy: int
    unrecorded: int
    zombies: int
    late: float


class Vital:
    """What is known of one loop. Written by one thread, read by any."""

    __slots__ = ("error", "failures", "hopeless", "hopeless_since", "succeeded_at")

    def __init__(self) -> None:
        self.succeeded_at: float | None = None
        self.failures = 0
        self.error: str | None = None
        self.hopeless = 0  # failures in a row that no new connection explains
        self.hopeless_since = 0.0

    def succeed(self, now: float) -> int:
        """Note a success and return how many failures it ended."""
        self.succeeded_at = now
        failures = self.failures
        if failures:
            self.failures, self.hopeless, self.error = 0, 0, None
        return failures

    def fail(self, error: str, now: float, *, hopeless: bool) -> bool:
        """Note a failure; True if the loop will not heal.

        *hopeless*: a new connection is not expected to help.
        """
        self.failures += 1
        self.error = error
        if not hopeless:
            self.hopeless = 0
            return False
        if not self.hopeless:
            self.hopeless_since = now
        self.hopeless += 1
        return self.hopeless >= TRIES and now - self.hopeless_since >= PATIENCE

    def seen(self, now: float, *, idle: bool) -> LoopHealth:
        """Return how the loop is. *idle*: there is nothing to do, so no failure matters."""
        at = self.succeeded_at
        age = None if at is None else max(0.0, now - at)
        if idle:
            return LoopHealth(age=age)
        return LoopHealth(age=age, failures=self.failures, error=self.error)


class Vitals:
    """What is known of one run of a worker."""

    def __init__(self) -> None:
        self.loops = {name: Vital() for name in LOOPS}
        self.active = False
        self.listening = False
        self.turn_by = math.inf  # the worker's loop wants to turn then, at the latest
        self.ended_by: str | None = None
