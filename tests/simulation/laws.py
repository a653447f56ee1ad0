"""The laws of the worker's machine, asserted on every answer that it gives.

:class:`Watched` stands between a shell and its machine. It sees what the machine sees, events and
the time, keeps the few facts that the laws speak about, and compares them with the commands
that come back. It shares no code with the machine beside its settings, and reads no more of it
than ``running``, ``held``, ``free`` and ``unrecorded``, so it can watch a machine at work on a
simulated database and on a real one alike.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy_jobs._messages import (
    Abort,
    Broke,
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
from sqlalchemy_jobs.lifecycle import MOVES
from sqlalchemy_jobs.lifecycle import Event as Life

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy_jobs._machine import Timing

SLACK = 1e-6
"""Seconds by which two ways of adding up the same times may differ."""

FULL_LOOK_EVERY = 2.0
SHORTEST_LOOK = 0.005
LONGEST_WAIT = 3600.0
LONGEST_BACKOFF = 30.0
DRAIN_SHARE = 2 / 3
NEVER = float("inf")


@dataclass(slots=True)
class Running:
    """An attempt that must be running now."""

    lease: Lease
    lease_until: float
    deadline: float
    told_to_stop: bool = False


@dataclass(slots=True)
class Unrecorded:
    """An attempt that ended, and whose outcome must be kept. None: the machine makes it."""

    lease: Lease
    outcome: Outcome | None
    lease_until: float
    not_before: float = -NEVER
    not_after: float = -NEVER
    refusals: int = 0


@dataclass(slots=True)
class Flight:
    """A database command without an answer."""

    command: DatabaseCommand
    issued: float
    interrupted: bool = False


@dataclass(slots=True)
class Failing:
    """A kind of command whose last tries all failed."""

    times: int
    since: float


@dataclass(slots=True)
class Facts:
    """What follows from the events alone."""

    running: dict[Key, Running] = field(default_factory=dict)
    unrecorded: dict[Key, Unrecorded] = field(default_factory=dict)
    flights: dict[str, Flight] = field(default_factory=dict)
    failing: dict[str, Failing] = field(default_factory=dict)
    swept: dict[str, tuple[float, float]] = field(default_factory=dict)  # no sooner, no later
    look_by: float = -NEVER  # a look must have been sent by then: at once, to begin with
    look_full: bool = True  # and it must trust no memory
    full_look_at: float = -NEVER
    quiet_until: float = -NEVER  # nothing was found, so no look may be sent before
    passed_by_at: float = -NEVER  # a renewal passed a locked row by, which backs off a little
    renewed_at: float = NEVER  # the oldest issue of what is held, as far as it was not renewed
    listening: bool = False
    stop_asked: float | None = None
    to_start: list[Lease] = field(default_factory=list)
    to_abort: list[tuple[Key, Reason]] = field(default_factory=list)
    has_changed: bool = True  # what runs and what is held, since it was last compared


RECOVER, PRUNE = "recover", "prune"
BOTH = (RECOVER, PRUNE)


def kind_of(command: DatabaseCommand) -> str:
    """What at most one may be in flight of, and what backs off alone."""
    if type(command) is Sweep:
        return str(command.chore)
    return type(command).__name__


class Watched:
    """A machine under the eye of its laws. To be used as the machine itself."""

    def __init__(self, machine: Any, now: float) -> None:
        """Watch *machine*, which was made at *now*."""
        self.machine = machine
        self.timing: Timing = machine.timing
        self.facts = Facts()
        self.started: Counter[Key] = Counter()
        self.reached: Counter[str] = Counter()
        self.stopped = False
        self._latest = now
        self._answers = 0
        for chore in BOTH:
            self.facts.swept[chore] = (-NEVER, -NEVER)

    @property
    def running(self) -> tuple[Lease, ...]:
        """What occupies a slot."""
        running: tuple[Lease, ...] = self.machine.running
        return running

    @property
    def held(self) -> tuple[Lease, ...]:
        """What is renewed."""
        held: tuple[Lease, ...] = self.machine.held
        return held

    @property
    def free(self) -> int:
        """Slots without a handler."""
        free: int = self.machine.free
        return free

    def handle(self, events: Iterable[Event], now: float) -> list[Command]:
        """Pass *events* on, and judge the answer."""
        events = list(events)
        assert now >= self._latest, "a monotonic clock"
        self._latest = now
        commands: list[Command] = self.machine.handle(events, now)
        if self.stopped:
            assert commands == [], "after Stop nothing is commanded"
            return commands
        facts = self.facts
        if facts.to_start:
            facts.to_start = []
        if facts.to_abort:
            facts.to_abort = []
        for event in events:
            self._learn(event, now)
        if facts.running:
            self._overdue(now)
        self._judge(commands, now)
        if not self.stopped:
            self._judge_quiet(commands[-1], now)
        return commands

    # --- what the events mean -------------------------------------------------------------------

    def _learn(self, event: Event, now: float) -> None:
        facts = self.facts
        match event:
            case Claimed():
                self._claimed(event, now)
            case Finished(outcome):
                attempt = facts.running.pop(outcome.lease.key, None)
                facts.has_changed = True
                if attempt is not None:
                    self._keep(attempt.lease, outcome, attempt.lease_until)
                else:
                    self.reached["late end"] += 1
            case Settled():
                self._settled(event, now)
            case Renewed():
                self._renewed(event, now)
            case Swept():
                self._land(str(event.chore))
                every = self._every(str(event.chore))
                facts.swept[str(event.chore)] = (
                    (now, now) if event.more else (now + every, now + 1.1 * every)
                )
                if event.woke:
                    self._news(now)
            case Broke(command):
                self._broke(command, now)
            case Notified():
                self._news(now)
            case ListenerChanged(up):
                facts.listening = up
                self._news(now)
            case StopRequested():
                if facts.stop_asked is None:
                    facts.stop_asked = now
            case Tick():
                pass

    def _land(self, kind: str) -> Flight:
        self.facts.failing.pop(kind, None)
        return self.facts.flights.pop(kind)

    def _news(self, now: float) -> None:
        """Something may be due now, whatever was found before."""
        facts = self.facts
        facts.look_by, facts.look_full = min(facts.look_by, now), True
        facts.quiet_until = -NEVER
        if "Claim" in facts.flights:
            self.reached["news during a claim"] += 1

    def _keep(self, lease: Lease, outcome: Outcome | None, lease_until: float) -> None:
        self.facts.unrecorded[lease.key] = Unrecorded(lease, outcome, lease_until)

    def _claimed(self, event: Claimed, now: float) -> None:
        facts, timing = self.facts, self.timing
        flight = self._land("Claim")
        assert isinstance(flight.command, Claim)
        lease_until = flight.issued + timing.visibility_timeout
        facts.has_changed = True
        if event.leases:
            facts.renewed_at = min(facts.renewed_at, flight.issued)
        for lease in event.leases:
            if facts.stop_asked is None and now < lease_until:
                deadline = now + lease.timeout if lease.timeout else NEVER
                facts.running[lease.key] = Running(lease, lease_until, deadline)
                facts.to_start.append(lease)
            else:
                self._keep(lease, Outcome.released(lease), lease_until)
                self.reached["released"] += 1
        expected = facts.look_by  # finite if there was news since this look was sent
        if event.more:
            pause = 0.0 if event.leases else SHORTEST_LOOK
            facts.quiet_until = min(expected, now + pause)
            facts.look_by = min(expected, now + pause)
        elif not (flight.command.full and event.sure):
            facts.look_by, facts.look_full = now, True
        else:
            longest = timing.safety_interval if facts.listening else 1.1 * timing.max_poll_interval
            next_due = NEVER if event.next_due is None else max(event.next_due, SHORTEST_LOOK)
            shortest = min(timing.poll_interval, timing.safety_interval)
            facts.quiet_until = min(expected, now + min(shortest, next_due))
            facts.look_by, facts.look_full = min(expected, now + min(longest, next_due)), True

    def _settled(self, event: Settled, now: float) -> None:
        flight = self._land("Settle")
        assert isinstance(flight.command, Settle)
        self.facts.has_changed = True
        postponed = {outcome.lease.key for outcome in event.postponed}
        refused = {outcome.lease.key for outcome in event.refused}
        for outcome in flight.command.outcomes:
            if outcome.lease.key in postponed:
                end = self.facts.unrecorded[outcome.lease.key]
                end.refusals += 1
                end.not_after = now + min(2.0 ** (end.refusals - 1), LONGEST_BACKOFF)
                end.not_before = now + min(2.0 ** (end.refusals - 1), LONGEST_BACKOFF) / 2
                self.reached["postponed"] += 1
                continue
            del self.facts.unrecorded[outcome.lease.key]
            if outcome.lease.key in refused:
                self.reached["refused"] += 1
            elif MOVES[outcome.event].wakes:
                due = now + max(outcome.delay, 0.0)
                if due <= now:
                    self._news(now)
                else:
                    self.facts.look_by = min(self.facts.look_by, due)
                    self.facts.quiet_until = min(self.facts.quiet_until, due)

    def _renewed(self, event: Renewed, now: float) -> None:
        facts = self.facts
        facts.has_changed = True
        flight = facts.flights.get("Renew")
        if flight is not None and flight.command is event.command:
            self._land("Renew")
            issued = flight.issued
        else:
            assert event.issued is not None
            issued = event.issued
            self.reached["renewed by others"] += 1
        lease_until = issued + self.timing.visibility_timeout
        if event.passed_by:
            facts.renewed_at, facts.passed_by_at = -NEVER, now
            self.reached["locked row passed by"] += 1
        for lease in event.command.leases:
            if lease.key in event.passed_by:
                continue
            attempt = facts.running.get(lease.key)
            if attempt is not None and lease.key in event.lost:
                del facts.running[lease.key]
                facts.to_abort.append((lease.key, Reason.LEASE_LOST))
                self.reached["lease lost to another"] += 1
            elif attempt is not None:
                attempt.lease_until = max(attempt.lease_until, lease_until)
            elif lease.key in facts.unrecorded:
                end = facts.unrecorded[lease.key]
                end.lease_until = max(end.lease_until, lease_until)

    def _broke(self, command: DatabaseCommand, now: float) -> None:
        kind = kind_of(command)
        flight = self.facts.flights.pop(kind)
        assert flight.command is command
        times = self.facts.failing[kind].times + 1 if kind in self.facts.failing else 1
        self.facts.failing[kind] = Failing(times, now)
        self.reached[f"broke {kind}"] += 1
        if kind == "Claim":
            self._news(now)
        elif kind == "Renew":
            self.facts.renewed_at = self.facts.passed_by_at = -NEVER

    def _overdue(self, now: float) -> None:
        """Deadlines and local leases end attempts without any event."""
        facts = self.facts
        for key, attempt in list(facts.running.items()):
            if now >= attempt.deadline:
                del facts.running[key]
                facts.has_changed = True
                self._keep(attempt.lease, None, attempt.lease_until)
                facts.to_abort.append((key, Reason.TIMEOUT))
                self.reached["timeout"] += 1
            elif now >= attempt.lease_until:
                del facts.running[key]
                facts.has_changed = True
                facts.to_abort.append((key, Reason.LEASE_LOST))
                self.reached["local lease ran out"] += 1

    def _every(self, chore: str) -> float:
        timing = self.timing
        return timing.recovery_interval if chore == "recover" else timing.prune_interval

    # --- what may and must be said --------------------------------------------------------------

    def _judge(self, commands: list[Command], now: float) -> None:
        facts = self.facts
        aborts: list[tuple[Key, Reason]] = []
        starts: list[Lease] = []
        for place, command in enumerate(commands):
            match command:
                case Start(lease):
                    starts.append(lease)
                    self.started[lease.key] += 1
                    assert self.started[lease.key] == 1, "an attempt starts once"
                case Abort(lease, reason):
                    aborts.append((lease.key, reason))
                case Interrupt(hanging):
                    flight = facts.flights[kind_of(hanging)]
                    assert flight.command is hanging
                    assert not flight.interrupted, "interrupting once is enough"
                    assert now >= flight.issued + self.timing.statement_timeout
                    flight.interrupted = True
                    self.reached["interrupt"] += 1
                case Wait() | Stop():
                    assert place == len(commands) - 1, "an answer ends with its Wait or Stop"
                case _:
                    self._judge_launch(command, now)
        assert isinstance(commands[-1], Wait | Stop), "every answer ends with a Wait or is the last"
        assert starts == facts.to_start, "all that was claimed starts, and nothing else"
        if facts.stop_asked is not None:
            self._tell_to_stop(facts.stop_asked, now)
        if aborts or facts.to_abort:
            assert Counter(aborts) == Counter(facts.to_abort), "who must end is told, once"
        self._judge_holding()
        if isinstance(commands[-1], Stop):
            self._judge_stop(commands[-1], now)

    def _judge_holding(self) -> None:
        facts, machine = self.facts, self.machine
        free = machine.free
        assert free == self.timing.concurrency - len(facts.running), "a slot for each that runs"
        assert free >= 0, "running attempts never exceed the slots"
        assert machine.unrecorded == len(facts.unrecorded), "outcomes are kept until recorded"
        if not facts.has_changed:
            return
        facts.has_changed = False
        running = [lease.key for lease in machine.running]
        held = [lease.key for lease in machine.held]
        assert sorted(running) == sorted(facts.running), "it runs what was started and not ended"
        assert sorted(held) == sorted([*facts.running, *facts.unrecorded]), (
            "it holds what runs and every outcome that is not recorded"
        )
        if not free:
            self.reached["all slots taken"] += 1

    def _judge_launch(self, command: DatabaseCommand, now: float) -> None:
        facts = self.facts
        kind = kind_of(command)
        assert kind not in facts.flights, "at most one of a kind is in flight"
        failing = facts.failing.get(kind)
        if failing is not None:
            pause = min(2.0 ** (failing.times - 1), self._longest_backoff(kind)) / 2
            assert now >= failing.since + pause - SLACK, "a failing command backs off"
        match command:
            case Claim(limit, full):
                assert facts.stop_asked is None, "a stopping worker claims no more"
                assert limit == self.timing.concurrency - len(facts.running), "free slots, all"
                assert limit > 0, "no claim without a slot"
                assert not self._is_swamped(), "outcomes pile up, and more is claimed"
                assert full or not facts.look_full, "this look must trust no memory"
                assert full or now < facts.full_look_at + FULL_LOOK_EVERY, "trusted for too long"
                assert now >= facts.quiet_until - SLACK, "nothing was found and nothing happened"
                facts.look_by, facts.look_full = NEVER, False
                facts.quiet_until = -NEVER
                facts.full_look_at = now if full else facts.full_look_at
                self.reached["full look" if full else "look from memory"] += 1
            case Settle(outcomes):
                self._judge_settle(outcomes, now)
            case Renew(leases):
                assert sorted(lease.key for lease in leases) == sorted(
                    [*facts.running, *facts.unrecorded]
                ), "everything held is renewed, ended or not"
                assert now >= facts.renewed_at + self.timing.visibility_timeout / 3 - SLACK, (
                    "a renewal has its time"
                )
                facts.renewed_at = now
                if facts.stop_asked is not None:
                    self.reached["renewal while stopping"] += 1
            case Sweep():
                assert facts.stop_asked is None, "a stopping worker sweeps no more"
                assert not facts.flights.keys() & BOTH, "one sweep at a time"
                assert now >= facts.swept[kind][0] - SLACK, "a chore has its time"
        facts.flights[kind] = Flight(command, now)

    def _longest_backoff(self, kind: str) -> float:
        """A renewal must be tried again while leases live, so its back-off is shorter."""
        if kind == "Renew":
            return min(LONGEST_BACKOFF, self.timing.visibility_timeout / 6)
        return LONGEST_BACKOFF

    def _judge_settle(self, outcomes: tuple[Outcome, ...], now: float) -> None:
        unrecorded = self.facts.unrecorded
        sent = [outcome.lease.key for outcome in outcomes]
        assert sent, "an empty Settle is a wasted statement"
        assert len(set(sent)) == len(sent)
        assert set(sent) <= set(unrecorded), "only what ended and is not recorded is settled"
        for outcome in outcomes:
            end = unrecorded[outcome.lease.key]
            if end.outcome is None:  # the machine's own: what became of an overdue attempt
                assert outcome.event in {Life.RETRY, Life.FAIL}
                end.outcome = outcome
            assert outcome is end.outcome or outcome == end.outcome, "the first end counts"
            assert now >= end.not_before - SLACK, "a postponed outcome waits"
        for key, end in unrecorded.items():
            assert key in sent or now < end.not_after + SLACK, "all outcomes go together"
        if len(sent) > 1:
            self.reached["group commit"] += 1

    def _is_swamped(self) -> bool:
        """So many outcomes wait for being recorded that no more are to come."""
        return len(self.facts.unrecorded) >= max(100, 10 * self.timing.concurrency)

    def _tell_to_stop(self, asked: float, now: float) -> None:
        """After two thirds of a shutdown every running attempt is told, once."""
        facts = self.facts
        if now >= asked + self.timing.shutdown_timeout * DRAIN_SHARE:
            for key, attempt in facts.running.items():
                if not attempt.told_to_stop:
                    attempt.told_to_stop = True
                    facts.to_abort.append((key, Reason.SHUTDOWN))
                    self.reached["told to stop"] += 1

    def _judge_stop(self, stop: Stop, now: float) -> None:
        facts = self.facts
        self.stopped = True
        assert facts.stop_asked is not None, "nobody asked it to stop"
        done = not facts.running and not facts.unrecorded and not facts.flights
        late = now >= facts.stop_asked + self.timing.shutdown_timeout
        assert done or late, "it stops when all is done or the time is over"
        assert sorted(lease.key for lease in stop.abandoned) == sorted(
            [*facts.running, *facts.unrecorded]
        ), "what it leaves behind is named"
        self.reached["stopped with abandoned" if stop.abandoned else "stopped clean"] += 1

    # --- what must have been said by now, and be said in time -----------------------------------

    def _judge_quiet(self, wait: Command, now: float) -> None:
        assert isinstance(wait, Wait)
        until = wait.until
        assert math.isfinite(until)
        assert now < until <= now + LONGEST_WAIT + SLACK, "waits are finite and do not spin"
        for duty, latest in self._duties():
            assert until <= latest + SLACK, f"{duty} is late by {until - latest} s"
        self._answers += 1
        if self._answers % 4 == 0:  # as often as is cheap
            again = self.machine.handle([Tick()], now)
            assert again == [wait], "a second Tick at the same time changes nothing"

    def _duties(self) -> list[tuple[str, float]]:
        """What must be commanded at the latest when, as long as nothing happens."""
        facts, timing = self.facts, self.timing
        flights, running, unrecorded = facts.flights, facts.running, facts.unrecorded
        duties = [
            ("the interrupt", flight.issued + timing.statement_timeout)
            for flight in flights.values()
            if not flight.interrupted
        ]
        if running or unrecorded:
            self._duties_of_holding(duties)
        if facts.stop_asked is not None:
            if not all(attempt.told_to_stop for attempt in running.values()):
                told_at = facts.stop_asked + timing.shutdown_timeout * DRAIN_SHARE
                duties.append(("the word to stop", told_at))
            duties.append(("the stop", facts.stop_asked + timing.shutdown_timeout))
            assert running or unrecorded or flights, "with nothing left to do it stops"
            return duties
        has_slot = len(running) < timing.concurrency and not self._is_swamped()
        if has_slot and "Claim" not in flights:
            duties.append(("the look", max(facts.look_by, self._failing_until("Claim"))))
        if RECOVER not in flights and PRUNE not in flights:
            for chore in BOTH:
                latest = max(facts.swept[chore][1], self._failing_until(chore))
                duties.append((chore, latest))
        return duties

    def _duties_of_holding(self, duties: list[tuple[str, float]]) -> None:
        facts = self.facts
        oldest = ready = NEVER
        for attempt in facts.running.values():
            duties.append(("the abort at the deadline", attempt.deadline))
            duties.append(("the abort at the end of the lease", attempt.lease_until))
            oldest = min(oldest, attempt.lease_until)
        for end in facts.unrecorded.values():
            oldest = min(oldest, end.lease_until)
            ready = min(ready, end.not_after)
        if facts.unrecorded and "Settle" not in facts.flights:
            duties.append(("the settle", max(ready, self._failing_until("Settle"))))
        if "Renew" not in facts.flights:
            a_third_over = oldest - self.timing.visibility_timeout * 2 / 3
            again = facts.passed_by_at + min(1.0, self.timing.visibility_timeout / 6)
            after = max(a_third_over, again, self._failing_until("Renew"))
            duties.append(("the renewal", after))

    def _failing_until(self, kind: str) -> float:
        failing = self.facts.failing.get(kind)
        if failing is None:
            return -NEVER
        return failing.since + min(2.0 ** (failing.times - 1), self._longest_backoff(kind))
