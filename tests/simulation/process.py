"""A worker's process: a shell as the real ones are, on virtual time.

The real machine and the real bell decide. Commands become statements, which queue up in the lanes
of the real shells and meet what the weather has for them; handlers run for as long as their jobs
say; a listener hears notifications, or does not. The clock is a monotonic one with an offset of
its own, and a process can stand still, be suspended with its clock, or die at any step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy_jobs._core import LANES, lane_of
from sqlalchemy_jobs._messages import (
    Abort,
    Broke,
    Claim,
    Command,
    DatabaseCommand,
    Event,
    Finished,
    Interrupt,
    Lease,
    ListenerChanged,
    Notified,
    Outcome,
    Reason,
    Renew,
    Renewed,
    Rest,
    Rested,
    Start,
    Stop,
    StopRequested,
    Sweep,
    TasksChanged,
    Wait,
)
from tests.simulation.database import Caller, View, bucket_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy_jobs._bell import Bell
    from tests.simulation.fleet import Fleet

TICK = 1e-6
"""Seconds by which a timer is late, so that a rounding error cannot make it early."""

SLOW = 0.5
"""Seconds after which a statement without an answer is a trouble of its worker's."""

FOREVER = float("inf")


class Handles(Protocol):
    """A machine, or something that watches one."""

    def handle(self, events: Iterable[Event], now: float) -> list[Command]:
        """Take events in and say what is to be done."""
        ...

    @property
    def running(self) -> tuple[Lease, ...]:
        """What occupies a slot."""
        ...

    @property
    def held(self) -> tuple[Lease, ...]:
        """What is to be renewed."""
        ...

    @property
    def free(self) -> int:
        """Slots without a handler."""
        ...


@dataclass(slots=True)
class Fate:
    """What becomes of a statement: seconds until it is performed, and until its answer.

    None: it never is. *breaks*: the connection does, so that the answer is an error. *stale*: it
    chooses its rows at once, though it changes them later.
    """

    performed: float | None
    answered: float | None
    breaks: bool = False
    stale: bool = False


@dataclass(slots=True, eq=False)
class Statement:
    """A database command on its way."""

    command: DatabaseCommand
    issued: float
    lane: str
    epoch: int = 0  # of the server: none survives its restart
    served: bool = False
    performed: bool = False
    over: bool = False  # nobody waits for its answer any more
    dead: bool = False  # the server has forgotten it
    breaks: bool = False
    answered: float | None = None
    view: View | None = None
    answer: Event | None = None


@dataclass(slots=True)
class Script:
    """What the handler of an attempt does: it ends after *seconds* (None: never), and how."""

    seconds: float | None
    end: str = "succeed"
    delay: float = 0.0
    obeys: bool = True  # an abort


@dataclass(slots=True, eq=False)
class Handler:
    """A handler that was started and has not ended, wanted any more or not."""

    lease: Lease
    script: Script
    started: float
    told: list[Reason] = field(default_factory=list)
    ends_at: float = FOREVER

    @property
    def has_slot(self) -> bool:
        """Only a worker that gives up waiting leaves an aborted handler its slot."""
        return all(reason is Reason.SHUTDOWN for reason in self.told)

    def outcome(self) -> Outcome:
        """How it ends."""
        lease = self.lease
        if self.told and self.script.end != "succeed":
            return Outcome.released(lease)
        match self.script.end:
            case "raise":
                return Outcome.raised(lease, "boom", self.script.delay)
            case "fail":
                return Outcome.failed(lease, "never again")
            case "snooze":
                return Outcome.snoozed(lease, self.script.delay)
            case _:
                return Outcome.succeeded(lease)


class Process:
    """A worker's process, from its start to its stop or its death."""

    def __init__(
        self, fleet: Fleet, machine: Handles, bell: Bell, caller: Caller, *, offset: float
    ) -> None:
        """Be made, not started: see :meth:`start`."""
        self.fleet = fleet
        self.machine = machine
        self.bell = bell
        self.caller = caller
        self.name = caller.worker
        self.offset = offset
        self.alive = True
        self.reaction = 0.0  # seconds from an event to the turn that takes it
        self.inbox: list[Any] = []
        self.lanes: dict[str, deque[Statement]] = {name: deque() for name in LANES}
        self.handlers: list[Handler] = []
        self.listener = Listener(self)
        self.wait_until = -FOREVER
        self.stopping_since: float | None = None  # since it was told so, by the common clock
        self.stopped: Stop | None = None
        self.asleep_until: float | None = None
        self.cut_off_until = -FOREVER
        self.trouble_until = fleet.clock.now
        self.free_since = fleet.clock.now
        self.misled_until = -FOREVER  # its clock knows nothing of leases from before
        self.turns = 0
        self._suspended = False
        self._fell_asleep = 0.0
        self._ringing = False

    @property
    def now(self) -> float:
        """The process's monotonic clock, which has nothing to do with the database's."""
        return self.fleet.clock.now + self.offset

    @property
    def tasks(self) -> dict[str, int]:
        """The tasks it knows, each with its own max_attempts."""
        return self.caller.tasks

    @property
    def is_awake(self) -> bool:
        """Whether it is alive and its loop turns."""
        return self.alive and self.asleep_until is None

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop, heard or not."""
        return self.stopping_since is not None or any(
            isinstance(event, StopRequested) for event in self.inbox
        )

    def start(self, *, listening: bool) -> None:
        """Begin to turn."""
        if listening:
            self.listener.wanted = True
            self.fleet.after(self.fleet.weather.latency(), self.listener.connect)
        else:
            self.inbox.append(ListenerChanged(up=False))
        self.fleet.after(0.0, self.turn)

    # --- the loop -------------------------------------------------------------------------------

    def post(self, event: Any) -> None:
        """Put an event into the inbox; the loop takes it at its next turn."""
        self.inbox.append(event)
        if not self._ringing and self.alive and self.asleep_until is None:
            self._ringing = True
            self.fleet.after(self.reaction, self._ring)

    def _ring(self) -> None:
        self._ringing = False
        if self.inbox:
            self.turn()

    def _wake(self, turns: int) -> None:
        if turns == self.turns:
            self.turn()

    def turn(self) -> None:
        """Hand the inbox over, as ``_core`` does, and carry out what comes back."""
        if not self.alive or self.asleep_until is not None:
            return
        fleet = self.fleet
        self.turns += 1
        events, self.inbox = self.inbox, []
        now = self.now
        passed, requests = self.bell.handle(events, now)
        commands = self.machine.handle(passed, now)
        if fleet.story is not None:
            fleet.tell(f"{self.name} takes {events} and says {commands} {requests}")
        for request in requests:
            self.listener.ask(isinstance(request, Rest))
        for command in commands:
            match command:
                case Wait(until):
                    self.wait_until = min(until, self.bell.at)
                case Start(lease):
                    self._start(lease)
                case Abort(lease, reason):
                    self._abort(lease, reason)
                case Interrupt(hanging):
                    self._interrupt(hanging)
                case Stop():
                    self.stopped = command
                case _:
                    if isinstance(command, Claim):
                        self.bell.claiming(command)
                    self._submit(command)
        fleet.ledger.heard(self, passed)
        fleet.ledger.turned(self)
        if self.stopped is not None:
            self.leave()
        else:
            pause = self.wait_until - self.offset - fleet.clock.now
            fleet.after(max(pause, 0.0) + TICK, self._wake, self.turns)

    # --- statements -----------------------------------------------------------------------------

    def _submit(self, command: DatabaseCommand) -> None:
        lane = lane_of(command)
        self.lanes[lane].append(Statement(command, self.fleet.clock.now, lane))
        self._serve(lane)

    def _serve(self, lane: str) -> None:
        """Send the first statement of a lane: a connection does one thing at a time."""
        if not self.lanes[lane] or self.lanes[lane][0].served or not self.is_awake:
            return
        fleet = self.fleet
        statement = self.lanes[lane][0]
        statement.served, statement.epoch = True, fleet.epoch
        fate = fleet.weather.fate(self)
        if fate.stale and isinstance(statement.command, Claim | Sweep):
            statement.view = fleet.database.view(statement.command, self.caller)
        statement.breaks, statement.answered = fate.breaks, fate.answered
        if fate.performed is not None:
            fleet.after(fate.performed, self.perform, statement)
        elif fate.answered is not None:
            fleet.after(fate.answered, self.answer, statement)

    def perform(self, statement: Statement) -> None:
        """Let the database carry *statement* out; the answer is on its way."""
        fleet = self.fleet
        if statement.dead or statement.performed or statement.epoch != fleet.epoch:
            return
        if fleet.database.is_blocked(statement.command):
            fleet.blocked.append((self, statement))
            return
        statement.performed = True
        caller = self.caller
        if statement.over:  # what its worker remembers knows nothing of it
            caller = replace(caller, window=type(caller.window)())
            fleet.reached["performed after all"] += 1
        fleet.ledger.issued(self, statement)
        statement.answer = fleet.database.perform(statement.command, caller, statement.view)
        if fleet.story is not None:
            fleet.tell(f"the database performs {statement.command}: {statement.answer}")
        if statement.answered is not None and not statement.over:
            fleet.after(statement.answered, self.answer, statement)

    def answer(self, statement: Statement) -> None:
        """Let the answer to *statement* arrive, or the news that there will be none."""
        if statement.over or not self.alive:
            return
        if statement.breaks or statement.answer is None:
            self.lose(statement)
        else:
            self._land(statement, statement.answer)

    def lose(self, statement: Statement) -> None:
        """Break the connection of *statement*."""
        if statement.performed:
            self.fleet.reached[f"answer lost: {type(statement.command).__name__}"] += 1
        else:
            statement.dead = True
        self._in_trouble()
        self._land(statement, Broke(statement.command, "connection lost"))

    def _land(self, statement: Statement, event: Event) -> None:
        statement.over = True
        if self.fleet.clock.now - statement.issued > SLOW:
            self._in_trouble()
        self.lanes[statement.lane].remove(statement)
        self.post(event)
        self._serve(statement.lane)

    def _interrupt(self, command: DatabaseCommand) -> None:
        """Give the connection up; what waits for it goes on with another, as in the real shells."""
        lane = lane_of(command)
        hanging = [statement for statement in self.lanes[lane] if statement.served]
        for statement in hanging:
            self.lanes[lane].remove(statement)
            statement.over = True
            if not statement.performed:
                statement.dead = self.fleet.weather.forgets()
        self._in_trouble()
        self.post(Broke(command, "no answer"))
        self._serve(lane)

    def _in_trouble(self) -> None:
        self.trouble_until = max(self.trouble_until, self.fleet.clock.now)

    @property
    def in_flight(self) -> list[Statement]:
        """The statements that the server has, or will have soon, with their clients waiting."""
        return [lane[0] for lane in self.lanes.values() if lane and lane[0].served]

    # --- handlers -------------------------------------------------------------------------------

    def _start(self, lease: Lease) -> None:
        handler = Handler(lease, self.fleet.ledger.started(self, lease), self.fleet.clock.now)
        self.handlers.append(handler)
        if handler.script.seconds is not None:
            self._ends_in(handler, handler.script.seconds)

    def _ends_in(self, handler: Handler, seconds: float) -> None:
        ends_at = self.fleet.clock.now + seconds
        if ends_at < handler.ends_at:
            handler.ends_at = ends_at
            self.fleet.after(seconds, self._end, handler, ends_at)

    def _end(self, handler: Handler, ends_at: float) -> None:
        if not self.alive or handler.ends_at != ends_at:
            return
        if self.asleep_until is not None:
            handler.ends_at = FOREVER
            self._ends_in(handler, self.asleep_until - self.fleet.clock.now + TICK)
        elif handler.script.end == "kill" and not handler.told:
            self.fleet.reached["poison"] += 1
            self.crash()
            self.fleet.mourn(self)
        else:
            handler.ends_at = -FOREVER
            self.handlers.remove(handler)
            self.post(Finished(handler.outcome()))

    def _abort(self, lease: Lease, reason: Reason) -> None:
        self.fleet.ledger.gave_up(lease, reason)
        for handler in self.handlers:
            if handler.lease.key == lease.key:
                handler.told.append(reason)
                self.fleet.ledger.aborted(handler, reason)
                if handler.script.obeys:
                    self._ends_in(handler, 0.01)

    def hurry(self, seconds: float) -> None:
        """Let no handler run for longer than so many seconds more."""
        for handler in self.handlers:
            self._ends_in(handler, seconds)

    # --- what happens to a process --------------------------------------------------------------

    def sleep(self, seconds: float, how: str) -> None:
        """Stand still.

        *stall*: as a stopped process does. *suspend*: with its clock, as on a host that sleeps.
        *block*: a handler keeps the loop to itself, and the watchdog's thread renews meanwhile.
        """
        if not self.is_awake:
            return
        fleet = self.fleet
        self._suspended = how == "suspend"
        self._fell_asleep = fleet.clock.now
        self.asleep_until = fleet.clock.now + seconds
        fleet.after(seconds, self._alarm, self.asleep_until)
        if how == "block":
            every = self.caller.visibility_timeout / 3
            for number in range(1, min(20, int(seconds / every)) + 1):
                fleet.after(number * every, self._watchdog)

    def _alarm(self, at: float) -> None:
        if at == self.asleep_until:
            self.wake_up()

    def wake_up(self) -> None:
        """Go on, if it stood still."""
        if not self.alive or self.asleep_until is None:
            return
        if self._suspended:
            self.misled_until = self.fleet.clock.now
            self.offset -= max(0.0, self.fleet.clock.now - self._fell_asleep - TICK)
        self.asleep_until = None
        self._ringing = False
        self._in_trouble()
        for lane in self.lanes:
            self._serve(lane)
        self.turn()

    def _watchdog(self) -> None:
        """Renew leases with another connection while the loop is blocked."""
        fleet = self.fleet
        leases = self.machine.held
        if not self.alive or self.asleep_until is None or fleet.is_down or not leases:
            return
        command, issued = Renew(leases), self.now
        if fleet.database.is_blocked(command):
            return
        renewed = fleet.database.perform(command, self.caller)
        assert isinstance(renewed, Renewed)
        self.inbox.append(Renewed(command, renewed.lost, issued, renewed.passed_by))
        fleet.reached["renewed by the watchdog"] += 1

    def leap(self, seconds: float) -> None:
        """Let the monotonic clock jump ahead, which it must not and sometimes does."""
        if self.is_awake:
            self.misled_until = self.fleet.clock.now
            self.offset += seconds
            self._in_trouble()
            self.turn()

    def stop(self) -> None:
        """Ask it to stop, perhaps not for the first time."""
        self.post(StopRequested())

    def learn(self, task: str, bound: int) -> None:
        """Register a task while it runs."""
        self.caller.tasks[task] = bound
        self.post(TasksChanged())

    def crash(self) -> None:
        """Die, now. Statements may still reach the database, and handlers are gone."""
        self.fleet.reached["crash with handlers" if self.handlers else "crash"] += 1
        self.leave()

    def leave(self) -> None:
        """Be gone, one way or the other."""
        self.alive = False
        self.asleep_until = None
        for lane in self.lanes.values():
            for statement in lane:
                statement.over = True
                if not statement.performed:
                    statement.dead = not statement.served or self.fleet.weather.forgets()
            lane.clear()
        self.handlers.clear()
        self.inbox.clear()
        self.listener.leave()


class Listener:
    """The connection that listens, and what the server keeps of it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.fleet = process.fleet
        self.wanted = False
        self.session = 0  # changes with each connection
        self.is_connected = False
        self.is_deaf = False  # connected, as far as anybody knows, and nothing arrives
        self.up_since = FOREVER
        self.marks: set[int] = set()
        self._busy_until = -FOREVER

    def connect(self) -> None:
        """Subscribe, and prove it; try again while the server is away."""
        if not self.process.alive or self.is_connected:
            return
        fleet = self.fleet
        if fleet.is_down or self.process.cut_off_until > fleet.clock.now:
            fleet.after(fleet.weather.pause(), self.connect)
            return
        self.session += 1
        self.is_connected, self.is_deaf = True, False
        self.up_since = fleet.clock.now
        self.process.post(ListenerChanged(up=True))

    def lose(self, *, silently: bool) -> None:
        """Break; *silently*: it takes up to half a minute until anybody knows."""
        if not self.is_connected:
            return
        if silently:
            self.is_deaf = True
            self.fleet.after(self.fleet.weather.pause(), self._noticed, self.session)
        else:
            self._noticed(self.session)

    def _noticed(self, session: int) -> None:
        if session == self.session and self.is_connected:
            self._drop_marks()
            self.is_connected = False
            self.up_since = FOREVER
            self.session += 1
            if self.process.alive:
                self.process.post(ListenerChanged(up=False))
                self.fleet.after(self.fleet.weather.pause(), self.connect)

    def leave(self) -> None:
        """Be gone with the process."""
        self._drop_marks()
        self.is_connected = False
        self.session += 1

    def _drop_marks(self) -> None:
        for bucket in self.marks:
            self.fleet.database.marks[bucket] -= 1
        self.marks.clear()

    # --- notifications --------------------------------------------------------------------------

    def send(self, task: str) -> None:
        """Have the server send a notification."""
        if self.is_connected and not self.is_deaf:
            for delay in self.fleet.weather.deliveries():
                self.fleet.after(delay, self._hear, self.session, task)

    def _hear(self, session: int, task: str) -> None:
        if session == self.session and not self.is_deaf and task in self.process.tasks:
            self.process.post(Notified())

    # --- the mark of a resting worker -----------------------------------------------------------

    def ask(self, rests: bool) -> None:  # noqa: FBT001 - one of two requests
        """Take the marks, or give them up: one after the other, as one connection does."""
        if not self.is_connected:
            return
        fleet = self.fleet
        self._busy_until = max(self._busy_until, fleet.clock.now) + fleet.weather.latency()
        delay = self._busy_until - fleet.clock.now
        fleet.after(delay, self._rest if rests else self._rouse, self.session)

    def _rest(self, session: int) -> None:
        if session != self.session or self.is_deaf:
            return
        database = self.fleet.database
        buckets = dict.fromkeys(bucket_of(task) for task in self.process.tasks)
        for bucket in buckets:
            if bucket not in self.marks:
                self.marks.add(bucket)
                database.marks[bucket] += 1
        quiet = not any(database.silent[bucket] for bucket in buckets)
        self.fleet.reached["rests" if quiet else "rests beside silent enqueuers"] += 1
        self.fleet.after(self.fleet.weather.latency(), self._rested, session, quiet)

    def _rested(self, session: int, quiet: bool) -> None:  # noqa: FBT001 - an answer
        if session == self.session and not self.is_deaf:
            self.process.post(Rested(quiet=quiet))

    def _rouse(self, session: int) -> None:
        if session == self.session and not self.is_deaf:
            self._drop_marks()
