"""The worker's decisions, without a clock and without I/O.

One machine drives the sync and the async worker. A shell feeds it events and carries out the
commands that come back::

    commands = machine.handle(events, now)

*now* is a reading of a monotonic clock in seconds. What the database says about time arrives as
a duration, so the two clocks never meet. The form is h11's: changes triggered by an event
(:meth:`Machine._react`), then changes triggered by the state alone (:meth:`Machine._plan`),
which after any event brings the machine to a point where another ``Tick`` would add nothing.

Laws, each with a property test:

* running attempts never exceed ``concurrency``, and no more is claimed than slots are free;
* of each kind of database command at most one is in flight, and each failing kind backs off alone;
* a local lease is counted from when the Claim or Renew was *issued*, so it never outlives the
  row's own; a running attempt whose local lease ran out is aborted;
* an outcome is kept, renewed and sent again until a Settle with it is answered; if they pile up,
  nothing more is claimed;
* leases are renewed while stopping, and a claim answered after the stop is given back;
* every answer but the last ends with exactly one ``Wait``, and a waiting time is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, assert_never

from ._messages import (
    Abort,
    Broke,
    Chore,
    Claim,
    Claimed,
    Command,
    DatabaseCommand,
    Event,
    Finished,
    Interrupt,
    Key,
    Lease,
    ListenerChanged,
    Notified,
    Outcome,
    Reason,
    Renew,
    Renewed,
    Settle,
    Settled,
    Start,
    Stop,
    StopRequested,
    Sweep,
    Swept,
    Tick,
    Wait,
)
from .lifecycle import MOVES

FULL_LOOK_EVERY: Final = 2.0
"""Seconds between looks that trust no memory, so that a row which committed late, with an earlier
time than what was claimed since, waits no longer than an idle poll."""

LONGEST_WAIT: Final = 3600.0
"""A cap that keeps every waiting time finite: timed waits refuse infinity."""

LONGEST_BACKOFF: Final = 30.0
"""Seconds between tries of a command that keeps failing."""

SHORTEST_LOOK: Final = 0.005
"""Seconds: the least wait for a job that is about to become due, so that no look spins."""

MOST_UNRECORDED: Final = 10
LEAST_UNRECORDED: Final = 100
"""Outcomes a slot, or at least in all, that may wait for being recorded until nothing more is
claimed: each is a job that runs again if the worker dies now."""

DRAIN_SHARE: Final = 2 / 3
"""The part of the shutdown timeout that waits for running jobs before they are aborted."""

_CHORES: Final = tuple(Chore)  # to go through an enumeration itself is slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What the machine needs to know of the settings. All times in seconds."""

    concurrency: int = 5
    visibility_timeout: float = 300.0
    poll_interval: float = 2.0
    max_poll_interval: float = 30.0
    safety_interval: float = 30.0
    recovery_interval: float = 60.0
    prune_interval: float = 3600.0
    shutdown_timeout: float = 15.0
    statement_timeout: float = 30.0
    until_idle: bool = False


class Phase(Enum):
    """RUNNING claims; DRAINING waits for what runs; ABORTING has told it to end."""

    RUNNING = auto()
    DRAINING = auto()
    ABORTING = auto()
    STOPPED = auto()


@dataclass(slots=True)
class _Attempt:
    lease: Lease
    lease_until: float
    deadline: float | None


@dataclass(slots=True)
class _Ended:
    outcome: Outcome
    lease_until: float
    not_before: float = 0.0
    refusals: int = 0


@dataclass(slots=True)
class _Flight:
    command: DatabaseCommand
    issued: float
    interrupted: bool = False


class Machine:
    """Decides what a worker does next. See the module's docstring."""

    def __init__(
        self,
        timing: Timing,
        *,
        timed_out: Callable[[Lease], Outcome],
        jitter: Callable[[], float],
        now: float,
    ) -> None:
        """*timed_out* makes the outcome of an overdue attempt; *jitter* answers 0 <= x < 1."""
        self.timing = timing
        self.phase = Phase.RUNNING
        self._timed_out = timed_out
        self._jitter = jitter
        self._running: dict[Key, _Attempt] = {}
        self._ended: dict[Key, _Ended] = {}
        self._flights: dict[str, _Flight] = {}
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        # Looking for work.
        self._look_at = now
        self._fresh = True  # the next look must be full
        self._look_again = False  # notified while a Claim was in flight
        self._due_at = float("inf")  # a job put back while a Claim was in flight is due then
        self._full_at = now
        self._found_nothing = False  # the last full look left nothing due
        self._listening = False
        self._pause = timing.poll_interval
        # Leases and chores.
        self._renew_at: float | None = None
        self._check_at = float("inf")  # no attempt needs an abort before
        self._sweep_at = {Chore.RECOVER: now, Chore.PRUNE: now}
        # Stopping.
        self._abort_at = float("inf")
        self._stop_at = float("inf")

    # --- what others may read ------------------------------------------------------------------

    @property
    def running(self) -> tuple[Lease, ...]:
        """The leases whose handlers occupy a slot."""
        return tuple(attempt.lease for attempt in list(self._running.values()))

    @property
    def held(self) -> tuple[Lease, ...]:
        """The leases to renew: running, and ended but not yet recorded."""
        ended = tuple(end.outcome.lease for end in list(self._ended.values()))
        return self.running + ended

    @property
    def free(self) -> int:
        """Slots without a handler."""
        return self.timing.concurrency - len(self._running)

    @property
    def unrecorded(self) -> int:
        """Outcomes that are not in the database yet, or not known to be."""
        return len(self._ended)

    @property
    def is_swamped(self) -> bool:
        """So many outcomes wait that no more are to come."""
        most = max(LEAST_UNRECORDED, MOST_UNRECORDED * self.timing.concurrency)
        return len(self._ended) >= most

    # --- the only door -------------------------------------------------------------------------

    def handle(self, events: Iterable[Event], now: float) -> list[Command]:
        """Take *events* in, in order, and return what is to be done at *now*."""
        commands: list[Command] = []
        if self.phase is Phase.STOPPED:
            return commands
        for event in events:
            self._react(event, now, commands)
        self._plan(now, commands)
        return commands

    # --- triggered by an event -----------------------------------------------------------------

    def _react(self, event: Event, now: float, commands: list[Command]) -> None:
        match event:
            case Finished(outcome):
                self._finish(outcome)
            case Claimed():
                self._take(event, now, commands)
            case Settled():
                self._forget(event, now)
            case Renewed():
                self._extend(event, now, commands)
            case Swept():
                self._swept(event, now)
            case Broke():
                self._back_off(event, now)
            case Notified():
                self._look(now)
            case ListenerChanged(up):
                self._listening = up
                self._pause = self.timing.poll_interval
                self._look(now)
            case StopRequested():
                self._drain(now)
            case Tick():
                pass
            case _:
                assert_never(event)

    def _look(self, now: float) -> None:
        """Look at everything as soon as a slot is free."""
        if "claim" in self._flights:
            self._look_again = True
        else:
            self._look_at, self._fresh = now, True

    def _finish(self, outcome: Outcome) -> None:
        attempt = self._running.pop(outcome.lease.key, None)
        if attempt is not None:  # else it had ended before, and this is too late
            self._ended[outcome.lease.key] = _Ended(outcome, attempt.lease_until)

    def _take(self, event: Claimed, now: float, commands: list[Command]) -> None:
        flight = self._land("claim")
        if flight is None:
            return
        lease_until = flight.issued + self.timing.visibility_timeout
        for lease in event.leases:
            if self.phase is Phase.RUNNING and now < lease_until:
                deadline = now + lease.timeout if lease.timeout else None
                self._running[lease.key] = _Attempt(lease, lease_until, deadline)
                self._check_at = min(self._check_at, lease_until, deadline or lease_until)
                commands.append(Start(lease))
            else:  # stopping, or the answer came too late: no handler may start without a lease
                self._ended[lease.key] = _Ended(Outcome.released(lease), lease_until)
        self._schedule_renewal()
        assert isinstance(flight.command, Claim)
        self._schedule_look(event, now, full=flight.command.full)

    def _schedule_look(self, event: Claimed, now: float, *, full: bool) -> None:
        self._found_nothing = False
        if event.leases:
            self._pause = self.timing.poll_interval
        if self._look_again or (not event.more and not (full and event.sure)):
            self._look_at, self._fresh = now, True
        elif event.more:  # all that was seen may have been locked by others: do not spin
            self._look_at = now if event.leases else now + SHORTEST_LOOK
        else:
            self._found_nothing = True
            if self._listening:
                wait = self.timing.safety_interval
            else:
                wait = self._pause * (1 + self._jitter() / 10)
                if not event.leases:
                    self._pause = min(2 * self._pause, self.timing.max_poll_interval)
            if event.next_due is not None:
                wait = min(wait, max(event.next_due, SHORTEST_LOOK))
            self._look_at, self._fresh = min(now + wait, self._due_at), True
        self._look_again = False

    def _forget(self, event: Settled, now: float) -> None:
        flight = self._land("settle")
        if flight is None:
            return
        assert isinstance(flight.command, Settle)
        postponed = {outcome.lease.key for outcome in event.postponed}
        refused = {outcome.lease.key for outcome in event.refused}
        for outcome in flight.command.outcomes:
            key = outcome.lease.key
            if key in postponed:
                end = self._ended[key]
                end.refusals += 1
                end.not_before = now + self._backoff(end.refusals)
                continue
            del self._ended[key]
            if MOVES[outcome.event].wakes and key not in refused:
                if outcome.delay <= 0:
                    self._look(now)
                else:  # the database was told the same delay a moment ago
                    self._look_at = min(self._look_at, now + outcome.delay)
                    self._due_at = min(self._due_at, now + outcome.delay)

    def _extend(self, event: Renewed, now: float, commands: list[Command]) -> None:
        flight = self._flights.get("renew")
        if flight is not None and flight.command is event.command:
            self._land("renew")
            issued = flight.issued
        elif event.issued is not None:
            issued = event.issued
        else:
            return
        lease_until = issued + self.timing.visibility_timeout
        for lease in event.command.leases:
            if lease.key in event.passed_by:
                continue
            attempt = self._running.get(lease.key)
            if attempt is None:
                # An ended outcome is judged by its Settle alone, lost or not.
                end = self._ended.get(lease.key)
                if end is not None:
                    end.lease_until = max(end.lease_until, lease_until)
            elif lease.key in event.lost:
                del self._running[lease.key]
                commands.append(Abort(lease, Reason.LEASE_LOST))
            else:
                attempt.lease_until = max(attempt.lease_until, lease_until)
        if event.passed_by:  # they are due at once, and so they will be again
            longest = self.timing.visibility_timeout / 6
            self._not_before["renew"] = now + self._backoff(1, longest)
        self._schedule_renewal()

    def _schedule_renewal(self) -> None:
        """Renew all leases when the oldest of them has lived a third of its time."""
        untils = [attempt.lease_until for attempt in self._running.values()]
        untils += [end.lease_until for end in self._ended.values()]
        two_thirds = self.timing.visibility_timeout * 2 / 3
        self._renew_at = min(untils) - two_thirds if untils else None

    def _swept(self, event: Swept, now: float) -> None:
        if self._land(event.chore) is None:
            return
        if event.more:
            self._sweep_at[event.chore] = now
        else:
            every = self._sweep_every(event.chore)
            self._sweep_at[event.chore] = now + every * (1 + self._jitter() / 10)
        if event.woke:
            self._look(now)

    def _sweep_every(self, chore: Chore) -> float:
        if chore is Chore.RECOVER:
            return self.timing.recovery_interval
        return self.timing.prune_interval

    def _back_off(self, event: Broke, now: float) -> None:
        kind = kind_of(event.command)
        flight = self._flights.get(kind)
        if flight is None or flight.command is not event.command:
            return
        del self._flights[kind]
        failures = self._failures[kind] = self._failures.get(kind, 0) + 1
        longest = LONGEST_BACKOFF
        if kind == "renew":  # a database that is back must be asked while the leases still live
            longest = min(longest, self.timing.visibility_timeout / 6)
        self._not_before[kind] = now + self._backoff(failures, longest)
        if kind == "claim":
            self._look_at, self._fresh, self._look_again = now, True, False

    def _backoff(self, failures: int, longest: float = LONGEST_BACKOFF) -> float:
        pause = min(2.0 ** (min(failures, 10) - 1), longest)
        return pause * (0.5 + self._jitter() / 2)

    def _land(self, kind: str) -> _Flight | None:
        self._failures.pop(kind, None)
        self._not_before.pop(kind, None)
        return self._flights.pop(kind, None)

    def _drain(self, now: float) -> None:
        if self.phase is Phase.RUNNING:
            self.phase = Phase.DRAINING
            self._abort_at = now + self.timing.shutdown_timeout * DRAIN_SHARE
            self._stop_at = now + self.timing.shutdown_timeout

    # --- triggered by the state ----------------------------------------------------------------

    def _plan(self, now: float, commands: list[Command]) -> None:
        if now >= self._check_at:
            self._abort_overdue(now, commands)
        if self.timing.until_idle and self._is_idle(now):
            self._drain(now)
        if self._ended:
            self._plan_settle(now, commands)
        if self.phase is Phase.RUNNING:
            self._plan_claim(now, commands)
            self._plan_sweep(now, commands)
        self._plan_renew(now, commands)
        for flight in self._flights.values():
            if not flight.interrupted and now >= flight.issued + self.timing.statement_timeout:
                flight.interrupted = True
                commands.append(Interrupt(flight.command))
        if self.phase is not Phase.RUNNING and self._plan_stop(now, commands):
            return
        commands.append(Wait(self._next_event(now)))

    def _abort_overdue(self, now: float, commands: list[Command]) -> None:
        check_at = float("inf")
        for key, attempt in list(self._running.items()):
            if attempt.deadline is not None and now >= attempt.deadline:
                del self._running[key]
                self._ended[key] = _Ended(self._timed_out(attempt.lease), attempt.lease_until)
                commands.append(Abort(attempt.lease, Reason.TIMEOUT))
            elif now >= attempt.lease_until:
                del self._running[key]
                commands.append(Abort(attempt.lease, Reason.LEASE_LOST))
            else:
                check_at = min(check_at, attempt.lease_until, attempt.deadline or check_at)
        self._check_at = check_at

    def _is_idle(self, now: float) -> bool:
        return (
            self._found_nothing
            and now < self._look_at
            and not self._running
            and not self._ended
            and not self._flights
            and all(now < at for at in self._sweep_at.values())
        )

    def _plan_settle(self, now: float, commands: list[Command]) -> None:
        if "settle" in self._flights or now < self._not_before.get("settle", now):
            return
        ready = [end for end in self._ended.values() if now >= end.not_before]
        if ready:
            # It may be one locked row that all had to wait for.
            passing_by = "settle" in self._failures or any(end.refusals for end in ready)
            outcomes = tuple(end.outcome for end in ready)
            self._launch(Settle(outcomes, passing_by), now, commands)

    def _plan_claim(self, now: float, commands: list[Command]) -> None:
        if (
            "claim" in self._flights
            or now < self._look_at
            or self.free <= 0
            or self.is_swamped
            or now < self._not_before.get("claim", now)
        ):
            return
        full = self._fresh or now >= self._full_at + FULL_LOOK_EVERY
        if full:
            self._full_at, self._fresh = now, False
        self._due_at = float("inf")  # it will see what was put back until now
        self._launch(Claim(self.free, full=full), now, commands)

    def _plan_sweep(self, now: float, commands: list[Command]) -> None:
        if any(chore in self._flights for chore in _CHORES):
            return
        for chore in _CHORES:  # recovery first: it gives work back
            if now >= max(self._sweep_at[chore], self._not_before.get(chore, now)):
                self._launch(Sweep(chore), now, commands)
                return

    def _plan_renew(self, now: float, commands: list[Command]) -> None:
        if not self._running and not self._ended:
            self._renew_at = None
        elif (
            self._renew_at is not None
            and "renew" not in self._flights
            and now >= max(self._renew_at, self._not_before.get("renew", now))
        ):
            self._launch(Renew(self.held), now, commands)

    def _plan_stop(self, now: float, commands: list[Command]) -> bool:
        if self.phase is Phase.DRAINING and now >= self._abort_at:
            # They keep their slots and leases: what ends in the last third is still recorded.
            self.phase = Phase.ABORTING
            commands.extend(Abort(lease, Reason.SHUTDOWN) for lease in self.running)
        done = not self._running and not self._ended and not self._flights
        if done or now >= self._stop_at:
            self.phase = Phase.STOPPED
            commands.append(Stop(self.held))
            return True
        return False

    def _launch(self, command: DatabaseCommand, now: float, commands: list[Command]) -> None:
        self._flights[kind_of(command)] = _Flight(command, now)
        commands.append(command)

    def _next_event(self, now: float) -> float:
        """The earliest time at which :meth:`_plan` could want something new."""
        until = min(now + LONGEST_WAIT, self._check_at)
        flights = self._flights
        for flight in flights.values():
            if not flight.interrupted:
                until = min(until, flight.issued + self.timing.statement_timeout)
        if "settle" not in flights and self._ended:
            ready = min(end.not_before for end in self._ended.values())
            until = min(until, max(ready, self._not_before.get("settle", ready)))
        if "renew" not in flights and self._renew_at is not None:
            until = min(until, max(self._renew_at, self._not_before.get("renew", 0.0)))
        if self.phase is not Phase.RUNNING:
            stopping = self._abort_at if self.phase is Phase.DRAINING else self._stop_at
            return min(until, stopping)
        if "claim" not in flights and self.free > 0 and not self.is_swamped:
            until = min(until, max(self._look_at, self._not_before.get("claim", 0.0)))
        if not any(chore in flights for chore in _CHORES):
            sweeps = (max(self._sweep_at[c], self._not_before.get(c, 0.0)) for c in _CHORES)
            until = min(until, *sweeps)
        return until


def kind_of(command: DatabaseCommand) -> str:
    """Return which kind of command this is: at most one of each is in flight."""
    match command:
        case Claim():
            return "claim"
        case Settle():
            return "settle"
        case Renew():
            return "renew"
        case Sweep(chore):
            return chore
        case _:
            assert_never(command)
