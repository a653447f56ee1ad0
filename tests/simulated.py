"""A simulated database, and workers on virtual clocks around the real machine.

:class:`Database` keeps rows in memory and performs the machine's commands on them. It is not a
second truth about a job's life: what may happen and what changes in the row is read from
``lifecycle.MOVES``, once, in :meth:`Database.move`. What it adds is what a table cannot say:
who holds what, what the time is, and which rows are locked. It also remembers what the fence of
the real table cannot see, the serial number of each claim, so that a test can tell whether an
outcome was recorded on the very claim that made it.

:class:`Worker` is a shell as the real ones are, made of lists: commands of its machine become
statements, which the test lets the database perform, fail or forget, and handlers, which the test
lets end, or not. Nothing here moves by itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy_jobs._messages import (
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
    Outcome,
    Reason,
    Renew,
    Renewed,
    Settle,
    Settled,
    Start,
    Stop,
    Sweep,
    Swept,
    Tick,
    Wait,
)
from sqlalchemy_jobs.lifecycle import (
    DEFAULT_MAX_ATTEMPTS,
    FINISHED,
    KEPT_ERRORS,
    MOVES,
    Allowance,
    Errors,
    Guard,
    Hold,
    RunAt,
    Status,
    advance,
)
from sqlalchemy_jobs.lifecycle import Event as Life

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")
FOREVER = float("inf")
WIDENINGS = 3


@dataclass(slots=True)
class Clock:
    """The time that everybody shares; each reads it with an offset of their own."""

    now: float = 0.0


# --- the database ------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """A row of the table. *claim* is the ghost: the serial of the claim that holds it."""

    id: int
    task: str
    status: Status = Status.PENDING
    priority: int = 0
    run_at: float = 0.0
    attempts: int = 0
    max_attempts: int | None = None
    timeout: float | None = None
    key: str | None = None
    locked_by: str | None = None
    lease_expires_at: float | None = None
    updated_at: float = 0.0
    errors: list[dict[str, Any]] = field(default_factory=list)
    claim: int | None = None


@dataclass(slots=True)
class Memory:
    """What a worker's claims remember of each other, as those of the real statements do."""

    after: dict[tuple[str, int], float] = field(default_factory=dict)  # (task, priority) -> run_at
    crowded: int = 0  # claims that came back short because others had locked what is due


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a worker tells the database with every command."""

    worker: str
    visibility_timeout: float
    tasks: Mapping[str, int] = field(default_factory=dict)  # name -> the task's own max_attempts
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An outcome that the database accepted, and the serials of the claims on both sides."""

    outcome: Outcome
    made_by: int
    held_by: int | None


def serial_of(lease: Lease) -> int:
    """The ghost in a lease: the serial of the claim that it came from."""
    serial = json.loads(lease.meta)["claim"]
    assert isinstance(serial, int)
    return serial


class Database:
    """The table ``jobs``, with a clock that no worker can read."""

    batch = 3
    """Rows that one sweep takes: small, so that full batches happen."""

    def __init__(self, clock: Clock, *, offset: float = 5_000_000.0) -> None:
        """Be empty; the database's clock is *offset* ahead."""
        self.clock = clock
        self.offset = offset
        self.rows: dict[int, Row] = {}
        self.locked: set[int] = set()  # ids of rows that a stranger's open transaction locked
        self.unwritable: set[int] = set()  # ids of rows that no outcome can be written to
        self.retention = {
            Status.SUCCEEDED: 3 * 86_400.0,
            Status.CANCELLED: 3 * 86_400.0,
            Status.FAILED: 30 * 86_400.0,
        }
        self.notify: Callable[[], None] = lambda: None  # called once for each statement that wakes
        self.recorded: list[Recorded] = []
        self.claims = 0
        self._next_id = 1

    @property
    def now(self) -> float:
        """The database's own time."""
        return self.clock.now + self.offset

    # --- the table of moves, applied ------------------------------------------------------------

    def allows(self, row: Row, life: Life, *, by: str = "", attempt: int = 0) -> bool:
        """Whether the table has this move and its guard holds."""
        move = MOVES[life]
        if row.status not in move.source:
            return False
        spent = row.attempts >= (FOREVER if row.max_attempts is None else row.max_attempts)
        match move.guard:
            case Guard.NONE:
                return True
            case Guard.DUE:
                return row.run_at <= self.now and not spent
            case Guard.SPENT:
                return row.run_at <= self.now and spent
            case Guard.HOLDER:
                return row.locked_by == by and row.attempts == attempt
            case Guard.EXPIRED:
                return self._is_expired(row) and not spent
            case Guard.EXPIRED_SPENT:
                return self._is_expired(row) and spent
            case Guard.AGED:
                return row.updated_at + self.retention[row.status] <= self.now

    def _is_expired(self, row: Row) -> bool:
        return row.lease_expires_at is not None and row.lease_expires_at <= self.now

    def move(
        self,
        row: Row,
        life: Life,
        *,
        by: str = "",
        lease: float = 0.0,
        delay: float = 0.0,
        error: str = "",
        bound: int = DEFAULT_MAX_ATTEMPTS,
    ) -> bool:
        """Change *row* as the table says; answer whether somebody is to be woken."""
        move = MOVES[life]
        target = advance(row.status, life)
        if target is None:
            del self.rows[row.id]
            return move.wakes
        if move.errors is Errors.APPEND:
            entry = {
                "attempt": row.attempts,
                "at": self.now,
                "worker": row.locked_by or by,
                "error": error or life.value,
            }
            row.errors = [*row.errors, entry][-KEPT_ERRORS:]
        if target is not row.status:
            row.updated_at = self.now
        row.status = target
        row.attempts += move.counts
        match move.allowance:
            case Allowance.KEEP:
                pass
            case Allowance.SETTLE:
                row.max_attempts = bound if row.max_attempts is None else row.max_attempts
            case Allowance.GIVE_BACK:
                assert row.max_attempts is not None
                row.max_attempts += 1
            case Allowance.AT_LEAST_ONE_MORE:
                if row.max_attempts is not None:  # else the task's own bound is still to come
                    row.max_attempts = max(row.max_attempts, row.attempts + 1)
        match move.lease:
            case Hold.KEEP:
                pass
            case Hold.TAKE:
                self.claims += 1
                row.locked_by, row.claim = by, self.claims
                row.lease_expires_at = self.now + lease
            case Hold.EXTEND:
                row.lease_expires_at = self.now + lease
            case Hold.DROP:
                row.locked_by = row.lease_expires_at = row.claim = None
        match move.run_at:
            case RunAt.KEEP:
                pass
            case RunAt.NOW:
                row.run_at = self.now
            case RunAt.GIVEN:
                row.run_at = self.now + delay
        return move.wakes

    # --- what callers and operators do ----------------------------------------------------------

    def enqueue(
        self,
        task: str,
        *,
        delay: float = 0.0,
        priority: int = 0,
        max_attempts: int | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> int | None:
        """Commit a new job. A negative *delay*: its transaction took that long to commit."""
        taken = (row.key for row in self.rows.values() if row.status not in FINISHED)
        if key is not None and key in taken:
            return None
        row = Row(
            self._next_id,
            task,
            priority=priority,
            run_at=self.now + delay,
            max_attempts=max_attempts,
            timeout=timeout,
            key=key,
            updated_at=self.now,
        )
        self._next_id += 1
        self.rows[row.id] = row
        if MOVES[Life.ENQUEUE].wakes:
            self.notify()
        return row.id

    def operate(self, job_id: int, life: Life) -> bool:
        """Cancel or requeue a job by hand; answer whether that was possible."""
        row = self.rows[job_id]
        possible = self.allows(row, life)
        if possible and self.move(row, life):
            self.notify()
        return possible

    # --- what workers do ------------------------------------------------------------------------

    def perform(self, command: DatabaseCommand, caller: Caller) -> Event:
        """Carry out *command* at once and completely, as one statement does."""
        match command:
            case Claim():
                return self._claim(command, caller)
            case Settle(outcomes):
                return self._settle(outcomes, caller)
            case Renew(leases):
                held = {lease.key for lease in leases if self._renew(lease, caller)}
                return Renewed(command, frozenset(lease.key for lease in leases) - held)
            case Sweep(chore):
                recovers = chore is Chore.RECOVER
                return self._sweep(chore, (Life.RECOVER, Life.BURY) if recovers else (Life.PRUNE,))
        raise AssertionError(command)

    def _claim(self, command: Claim, caller: Caller) -> Claimed:
        """Take the best due rows that nobody has locked.

        As the real statement does, a look that is not full passes over rows which were due
        before the last one that this worker claimed: memory says that they are gone.
        """
        mine = [row for row in self.rows.values() if row.task in caller.tasks]
        for row in mine:
            if row.id not in self.locked and self.allows(row, Life.EXHAUST):
                self.move(row, Life.EXHAUST, by=caller.worker)
        memory = caller.memory
        if command.full:
            memory.after.clear()
        due = [
            row
            for row in mine
            if self.allows(row, Life.CLAIM)
            and row.run_at >= memory.after.get((row.task, row.priority), -FOREVER)
        ]
        due.sort(key=lambda row: (-row.priority, row.run_at, row.id))
        free = [row for row in due if row.id not in self.locked]
        leases = []
        for row in free[: command.limit]:
            self.move(
                row,
                Life.CLAIM,
                by=caller.worker,
                lease=caller.visibility_timeout,
                bound=caller.tasks[row.task],
            )
            memory.after[row.task, row.priority] = row.run_at
            leases.append(self._lease(row))
        more = len(leases) == command.limit
        if more:
            memory.crowded = 0
        elif len(free) < len(due) and memory.crowded < WIDENINGS:
            memory.crowded += 1  # another claim looks further, a few times
            more = True
        waiting = [row.run_at for row in mine if row.status is Status.PENDING]
        later = [run_at - self.now for run_at in waiting if run_at > self.now]
        next_due = None if more else min(later, default=None)
        return Claimed(tuple(leases), more=more, next_due=next_due)

    def _lease(self, row: Row) -> Lease:
        assert row.max_attempts is not None
        return Lease(
            row.id,
            row.attempts,
            row.task,
            row.max_attempts,
            row.timeout,
            waited=self.now - row.run_at,
            meta=json.dumps({"claim": row.claim}),
        )

    def _settle(self, outcomes: Iterable[Outcome], caller: Caller) -> Settled:
        refused, postponed, recorded, wakes = [], [], [], False
        for outcome in outcomes:
            row = self.rows.get(outcome.lease.job_id)
            if row is None or not self.allows(
                row, outcome.event, by=caller.worker, attempt=outcome.lease.attempt
            ):
                refused.append(outcome)
            elif row.id in self.unwritable:
                postponed.append(outcome)
            else:
                recorded.append(outcome)
                self.recorded.append(Recorded(outcome, serial_of(outcome.lease), row.claim))
                wakes |= self.move(
                    row, outcome.event, delay=outcome.delay, error=outcome.error or ""
                )
        if wakes:
            self.notify()
        return Settled(tuple(refused), tuple(postponed), tuple(recorded))

    def _renew(self, lease: Lease, caller: Caller) -> bool:
        row = self.rows.get(lease.job_id)
        if row is None or not self.allows(row, Life.RENEW, by=caller.worker, attempt=lease.attempt):
            return False
        self.move(row, Life.RENEW, lease=caller.visibility_timeout)
        return True

    def _sweep(self, chore: Chore, lives: tuple[Life, ...]) -> Swept:
        done, woke = 0, 0
        for row in list(self.rows.values()):
            life = next((life for life in lives if self.allows(row, life)), None)
            if life is None or row.id in self.locked:
                continue
            woke += self.move(row, life, error=f"lease of {row.locked_by} ran out at {self.now}")
            done += 1
            if done == self.batch:
                break
        if woke:
            self.notify()
        return Swept(chore, more=done == self.batch, woke=woke)


# --- a worker ----------------------------------------------------------------------------------


class Handles(Protocol):
    """A machine, or something that watches one."""

    def handle(self, events: Iterable[Event], now: float) -> list[Command]:
        """Take events in and say what is to be done."""
        ...


class Stage(Enum):
    """How far a statement has come."""

    SENT = "sent"
    PERFORMED = "performed"


@dataclass(slots=True, eq=False)
class Statement:
    """A database command on its way: the database performs it, later its answer arrives."""

    command: DatabaseCommand
    issued: float  # by the worker's clock
    stage: Stage = Stage.SENT
    answer: Event | None = None
    interrupted: bool = False


@dataclass(slots=True, eq=False)
class Handler:
    """A handler that was started and has not ended, wanted any more or not."""

    lease: Lease
    started: float  # by the worker's clock
    ends: float | None = None  # when it ends by itself; None: when the test says so
    told: list[Reason] = field(default_factory=list)

    @property
    def has_slot(self) -> bool:
        """Only a worker that gives up waiting leaves an aborted handler its slot."""
        return all(reason is Reason.SHUTDOWN for reason in self.told)


class Worker:
    """A process: a machine, its statements, its handlers and its inbox."""

    def __init__(
        self,
        machine: Handles,
        database: Database,
        caller: Caller,
        *,
        offset: float,
        ends: Callable[[Lease], float | None] = lambda _: None,
    ) -> None:
        """*ends* says how many seconds a handler runs; None: until the test ends it."""
        self.machine = machine
        self.database = database
        self.caller = caller
        self.name = caller.worker
        self.listening = False
        self.notifications = 0  # sent to this worker and not yet received
        self.inbox: list[Event] = []
        self.statements: list[Statement] = []
        self.handlers: list[Handler] = []
        self.wait_until = -FOREVER
        self.stopping = False
        self.stopped: Stop | None = None
        self._offset = offset
        self._ends = ends

    @property
    def now(self) -> float:
        """The worker's monotonic clock, which has nothing to do with the database's."""
        return self.database.clock.now + self._offset

    @property
    def is_due(self) -> bool:
        """Whether the shell's timed wait is over."""
        return self.stopped is None and (bool(self.inbox) or self.now >= self.wait_until)

    @property
    def in_slots(self) -> list[Lease]:
        """What really runs and is wanted."""
        return [handler.lease for handler in self.handlers if handler.has_slot]

    # --- the machine's door ---------------------------------------------------------------------

    def turn(self, count: int | None = None) -> list[Command]:
        """Hand the first *count* events of the inbox over, all by default, or a Tick."""
        count = len(self.inbox) if count is None else count
        events, self.inbox = self.inbox[:count], self.inbox[count:]
        commands = self.machine.handle(events or [Tick()], self.now)
        for command in commands:
            self._carry_out(command)
        return commands

    def _carry_out(self, command: Command) -> None:
        match command:
            case Claim() | Settle() | Renew() | Sweep():
                self.statements.append(Statement(command, self.now))
            case Start(lease):
                runs = self._ends(lease)
                ends = None if runs is None else self.now + runs
                self.handlers.append(Handler(lease, self.now, ends))
            case Abort(lease, reason):
                for handler in self.handlers:
                    if handler.lease is lease or handler.lease == lease:
                        handler.told.append(reason)
            case Interrupt(hanging):
                for statement in self.statements:
                    if statement.command is hanging:
                        statement.interrupted = True
            case Wait(until):
                self.wait_until = until
            case Stop():
                self.stopped = command

    # --- what the network and the database do ---------------------------------------------------

    def perform(self, statement: Statement) -> None:
        """Let the database carry *statement* out; the answer is on its way."""
        assert statement.stage is Stage.SENT
        statement.answer = self.database.perform(statement.command, self.caller)
        statement.stage = Stage.PERFORMED

    def answer(self, statement: Statement) -> None:
        """Let the answer to *statement* arrive."""
        assert statement.answer is not None
        self._land(statement, statement.answer)

    def lose(self, statement: Statement) -> None:
        """Break the connection of *statement*, before or after it was performed."""
        self._land(statement, Broke(statement.command, "connection lost"))

    def _land(self, statement: Statement, event: Event) -> None:
        self.statements.remove(statement)
        self.inbox.append(event)

    # --- what handlers do -----------------------------------------------------------------------

    def end(self, handler: Handler, outcome: Outcome) -> None:
        """Let *handler* end, in time or too late."""
        self.handlers.remove(handler)
        self.inbox.append(Finished(outcome))

    def statement(self, kind: type[DatabaseCommand]) -> Statement | None:
        """The statement of *kind* that is on its way, if there is one."""
        return next((s for s in self.statements if isinstance(s.command, kind)), None)

    def handler(self, key: Key) -> Handler | None:
        """The handler of an attempt, while it has not ended."""
        return next((h for h in self.handlers if h.lease.key == key), None)
