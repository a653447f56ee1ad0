"""A simulated database: rows in memory, and the machine's commands carried out on them.

It is not a second truth about a job's life: what may happen and what changes in the row is read
from ``lifecycle.MOVES``, once, in :meth:`Database.move`; what a claim remembers is the real
``_window``. What it adds is what a table cannot say: who holds what, what the time is, which rows
are locked, and that a statement chooses rows some time before it changes them.

It also remembers what the fence of the real table cannot see, the serial number of each claim, so
that a law can tell whether an outcome was recorded on the very claim that made it.
``test_database.py`` compares it with the real statements on real rows.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy_jobs._messages import (
    Chore,
    Claim,
    Claimed,
    DatabaseCommand,
    Event,
    Key,
    Lease,
    Outcome,
    Renew,
    Renewed,
    Settle,
    Settled,
    Sweep,
    Swept,
)
from sqlalchemy_jobs._window import Window
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
from sqlalchemy_jobs.statements import HORIZON

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FOREVER = float("inf")
MIDNIGHT = 5_000_000.0
"""What the database's clock shows when the simulation's shows zero: the two must never meet."""


@dataclass(slots=True)
class Clock:
    """The time that everybody shares; each reads it with an offset of their own."""

    now: float = 0.0


@dataclass(slots=True, eq=False)
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


@dataclass(slots=True, eq=False)
class Caller:
    """What a worker tells the database with every command, and what its claims remember."""

    worker: str
    visibility_timeout: float
    tasks: dict[str, int] = field(default_factory=dict)  # name -> the task's own max_attempts
    window: Window = field(default_factory=Window)


@dataclass(slots=True)
class View:
    """What a statement saw when it began: the time, and the rows that it means to change."""

    at: float
    ids: list[int]
    width: int = 0  # how many rows a claim looks at


@dataclass(slots=True)
class Moved:
    """A change of a row: what happened, and what the row was before."""

    life: Life
    status: Status
    attempts: int
    worker: str | None
    claim: int | None
    lease_expires_at: float | None
    at: float
    bound: int
    outcome: Outcome | None


@dataclass(slots=True, eq=False)
class Insert:
    """A row that is not committed yet. *tells*: workers are notified when it is."""

    row: Row
    tells: bool = False
    silent: bool = False


def serial_of(lease: Lease) -> int:
    """The ghost in a lease: the serial of the claim that it came from."""
    serial = json.loads(lease.meta)["claim"]
    assert isinstance(serial, int)
    return serial


def bucket_of(task: str) -> int:
    """Return the bucket whose marks tell of a task: some tasks share one."""
    return len(task) % 3


class Database:
    """The table ``jobs``, with a clock that no worker can read."""

    batch = 3
    """Rows that one sweep takes: small, so that full batches happen."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.rows: dict[int, Row] = {}
        self.inserts: list[Insert] = []  # of transactions that are open
        self.locked: set[int] = set()  # ids of rows that a stranger's open transaction locked
        self.unwritable: set[int] = set()  # ids of rows that no outcome can be written to
        self.retention = {
            Status.SUCCEEDED: 3 * 86_400.0,
            Status.CANCELLED: 3 * 86_400.0,
            Status.FAILED: 30 * 86_400.0,
        }
        self.marks: Counter[int] = Counter()  # bucket -> resting workers
        self.silent: Counter[int] = Counter()  # bucket -> enqueuers that found no mark
        self.notify: Callable[[str], None] = lambda _: None
        self.observe: Callable[[Row, Moved], None] = lambda _, __: None
        self.claims = 0
        self._next_id = 1

    @property
    def now(self) -> float:
        """The database's own time."""
        return self.clock.now + MIDNIGHT

    # --- the table of moves, applied ------------------------------------------------------------

    def allows(
        self, row: Row, life: Life, at: float | None = None, *, by: str = "", attempt: int = 0
    ) -> bool:
        """Whether the table has this move and its guard holds."""
        move = MOVES[life]
        if row.status not in move.source:
            return False
        at = self.now if at is None else at
        match move.guard:
            case Guard.NONE:
                return True
            case Guard.HOLDER:
                return row.locked_by == by and row.attempts == attempt
            case Guard.DUE:
                return row.run_at <= at and not self._is_spent(row)
            case Guard.SPENT:
                return row.run_at <= at and self._is_spent(row)
            case Guard.EXPIRED:
                return self._is_expired(row, at) and not self._is_spent(row)
            case Guard.EXPIRED_SPENT:
                return self._is_expired(row, at) and self._is_spent(row)
            case Guard.AGED:
                return row.updated_at + self.retention[row.status] < at

    @staticmethod
    def _is_spent(row: Row) -> bool:
        return row.max_attempts is not None and row.attempts >= row.max_attempts

    @staticmethod
    def _is_expired(row: Row, at: float) -> bool:
        return row.lease_expires_at is not None and row.lease_expires_at < at

    def move(
        self,
        row: Row,
        life: Life,
        at: float,
        *,
        by: str = "",
        lease: float = 0.0,
        error: str = "",
        bound: int = DEFAULT_MAX_ATTEMPTS,
        outcome: Outcome | None = None,
    ) -> bool:
        """Change *row* as the table says; answer whether somebody is to be woken."""
        move = MOVES[life]
        target = advance(row.status, life)
        before = Moved(
            life,
            row.status,
            row.attempts,
            row.locked_by,
            row.claim,
            row.lease_expires_at,
            at,
            bound,
            outcome,
        )
        if target is None:
            del self.rows[row.id]
            self.observe(row, before)
            return move.wakes
        if move.errors is Errors.APPEND:
            entry = {
                "attempt": row.attempts,
                "at": at,
                "worker": row.locked_by or by,
                "error": error or life.value,
            }
            row.errors = [*row.errors, entry][-KEPT_ERRORS:]
        if target is not row.status:
            row.updated_at = at
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
                row.lease_expires_at = at + lease
            case Hold.EXTEND:
                row.lease_expires_at = at + lease
            case Hold.DROP:
                row.locked_by = row.lease_expires_at = row.claim = None
        match move.run_at:
            case RunAt.KEEP:
                pass
            case RunAt.NOW:
                row.run_at = at
            case RunAt.GIVEN:
                row.run_at = at + (0.0 if outcome is None else outcome.delay)
        self.observe(row, before)
        return move.wakes

    def tell(self, tasks: Iterable[str]) -> None:
        """Notify of each task for which a worker rests, as ``sqltypes.told`` does."""
        for task in tasks:
            if self.marks[bucket_of(task)] > 0:
                self.notify(task)

    # --- what callers do, in three steps and a commit -------------------------------------------

    def insert(
        self,
        task: str,
        *,
        delay: float = 0.0,
        priority: int = 0,
        max_attempts: int | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> Insert | None:
        """Store a job that nobody sees before its commit. None: its key is taken."""
        if key is not None and self._is_taken(key):
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
        insert = Insert(row, tells=self.marks[bucket_of(task)] > 0)
        self.inserts.append(insert)
        return insert

    def _is_taken(self, key: str) -> bool:
        return any(insert.row.key == key for insert in self.inserts) or any(
            row.key == key and row.status not in FINISHED for row in self.rows.values()
        )

    def go_silent(self, insert: Insert) -> None:
        """Take the lock of an enqueuer that found no mark, until its transaction ends."""
        if not insert.tells:
            insert.silent = True
            self.silent[bucket_of(insert.row.task)] += 1

    def look_again(self, insert: Insert) -> None:
        """Look for a mark that was taken before that lock was."""
        insert.tells = insert.tells or self.marks[bucket_of(insert.row.task)] > 0

    def commit(self, insert: Insert) -> None:
        """Let everybody see the job."""
        self.roll_back(insert)
        self.rows[insert.row.id] = insert.row
        if insert.tells:
            self.notify(insert.row.task)

    def roll_back(self, insert: Insert) -> None:
        """End the transaction; without a commit there never was a job."""
        self.inserts.remove(insert)
        if insert.silent:
            self.silent[bucket_of(insert.row.task)] -= 1

    def operate(self, job_id: int, life: Life) -> bool:
        """Cancel or requeue a job by hand; answer whether that was possible."""
        row = self.rows[job_id]
        if not self.allows(row, life) or job_id in self.locked:
            return False
        if life is Life.REQUEUE and row.key is not None and self._is_taken(row.key):
            return False
        if self.move(row, life, self.now):
            self.tell([row.task])
        return True

    # --- what workers do ------------------------------------------------------------------------

    def is_blocked(self, command: DatabaseCommand) -> bool:
        """Whether *command* waits for a row that somebody has locked."""
        return (
            isinstance(command, Settle)
            and not command.passing_by
            and any(outcome.lease.job_id in self.locked for outcome in command.outcomes)
        )

    def view(self, command: DatabaseCommand, caller: Caller) -> View:
        """Begin *command*: choose rows, as they are now, without a lock."""
        at = self.now
        match command:
            case Claim():
                return self._best(command, caller, at)
            case Sweep(Chore.RECOVER):
                ids = [row.id for row in self.rows.values() if self._is_expired(row, at)]
                return View(at, ids)
            case Sweep():
                aged = [row.id for row in self.rows.values() if self.allows(row, Life.PRUNE, at)]
                return View(at, aged)
            case _:
                return View(at, [])

    def perform(self, command: DatabaseCommand, caller: Caller, view: View | None = None) -> Event:
        """Carry out *command*, which began with *view* or begins now; then it is committed."""
        view = view or self.view(command, caller)
        match command:
            case Claim():
                return self._claim(command, caller, view)
            case Settle():
                return self._settle(command, caller, view.at)
            case Renew():
                return self._renew(command, caller, view.at)
            case Sweep(Chore.RECOVER):
                return self._sweep(Chore.RECOVER, (Life.RECOVER, Life.BURY), view)
            case Sweep():
                return self._sweep(Chore.PRUNE, (Life.PRUNE,), view)

    def _best(self, command: Claim, caller: Caller, at: float) -> View:
        """The heads of the queues that this worker's memory does not pass over, best first."""
        look = caller.window.look(caller.tasks, command.limit, full=command.full)
        after = {
            (task, priority): (-FOREVER if since is None else since, number)
            for task, priority, since, number in zip(
                look.tasks, look.priorities, look.after, look.after_id, strict=True
            )
        }
        due = [
            (-row.priority, row.run_at, row.id)
            for row in self.rows.values()
            if row.status in MOVES[Life.CLAIM].source
            and row.run_at <= at
            and (row.run_at, row.id) >= after.get((row.task, row.priority), (FOREVER, 0))
        ]
        best = [job_id for _, _, job_id in sorted(due)[: look.window]]
        return View(at, best, look.window)

    def _claim(self, command: Claim, caller: Caller, view: View) -> Claimed:
        """Take the best of the rows in view that are still there and that nobody has locked."""
        chosen: list[Row] = []
        for job_id in view.ids:
            row = self.rows.get(job_id)
            if row is not None and self._may_be_taken(row, view.at):
                chosen.append(row)
                if len(chosen) == command.limit:
                    break
        leases: list[Lease] = []
        places: list[tuple[tuple[str, int], tuple[int, int]]] = []
        for row in chosen:
            places.append(((row.task, row.priority), (row.run_at, row.id)))  # type: ignore[arg-type]
            if self.allows(row, Life.CLAIM, view.at):
                self.move(
                    row,
                    Life.CLAIM,
                    view.at,
                    by=caller.worker,
                    lease=caller.visibility_timeout,
                    bound=caller.tasks[row.task],
                )
                leases.append(self._lease(row))
            else:
                self.move(row, Life.EXHAUST, view.at, by=caller.worker)
        return self._claimed(command, caller, tuple(leases), places, view.width)

    def _may_be_taken(self, row: Row, at: float) -> bool:
        due = self.allows(row, Life.CLAIM, at) or self.allows(row, Life.EXHAUST, at)
        return due and row.id not in self.locked

    def _claimed(
        self,
        command: Claim,
        caller: Caller,
        leases: tuple[Lease, ...],
        places: list[tuple[tuple[str, int], tuple[int, int]]],
        width: int,
    ) -> Claimed:
        """Tell what is left, as ``_store`` does with further statements."""
        window = caller.window
        if len(places) == command.limit:
            window.relax()
            window.claimed(places)
            if command.full:
                window.in_use(self._queues_of_due(caller))
            return Claimed(leases, more=True)
        if places or not command.full:
            return Claimed(leases, sure=False)
        waiting = len(self._queues_of_due(caller))
        if waiting >= width and window.crowded():
            return Claimed(leases, more=True)
        coming = [
            row.run_at - self.now
            for row in self.rows.values()
            if row.task in caller.tasks
            and row.status is Status.PENDING
            and 0 < row.run_at - self.now <= HORIZON
        ]
        pause = window.left(waiting)
        if pause is not None:
            coming.append(pause)
        return Claimed(leases, next_due=min(coming, default=None))

    def _queues_of_due(self, caller: Caller) -> list[tuple[str, int]]:
        """The queue of each row that is due now, locked or not."""
        now = self.now
        return [
            (row.task, row.priority)
            for row in self.rows.values()
            if row.status is Status.PENDING and row.run_at <= now and row.task in caller.tasks
        ]

    def _lease(self, row: Row) -> Lease:
        assert row.max_attempts is not None
        return Lease(
            row.id,
            row.attempts,
            row.task,
            row.max_attempts,
            row.timeout,
            waited=self.now - row.run_at,
            meta=f'{{"claim": {row.claim}}}',
        )

    def _settle(self, command: Settle, caller: Caller, at: float) -> Settled:
        refused: list[Outcome] = []
        postponed: list[Outcome] = []
        recorded: list[Outcome] = []
        woken: dict[str, None] = {}
        for outcome in command.outcomes:
            lease = outcome.lease
            row = self.rows.get(lease.job_id)
            if row is None or not self.allows(
                row, outcome.event, by=caller.worker, attempt=lease.attempt
            ):
                refused.append(outcome)
            elif row.id in self.unwritable or row.id in self.locked:
                postponed.append(outcome)
            else:
                recorded.append(outcome)
                error = outcome.error or ""
                if self.move(row, outcome.event, at, error=error, outcome=outcome):
                    woken[row.task] = None
        self.tell(woken)
        return Settled(tuple(refused), tuple(postponed), tuple(recorded))

    def _renew(self, command: Renew, caller: Caller, at: float) -> Renewed:
        lost: list[Key] = []
        passed_by: list[Key] = []
        for lease in command.leases:
            row = self.rows.get(lease.job_id)
            if row is None or not self.allows(
                row, Life.RENEW, by=caller.worker, attempt=lease.attempt
            ):
                lost.append(lease.key)
            elif row.id in self.locked:
                passed_by.append(lease.key)
            else:
                self.move(row, Life.RENEW, at, lease=caller.visibility_timeout)
        return Renewed(command, frozenset(lost), passed_by=frozenset(passed_by))

    def _sweep(self, chore: Chore, lives: tuple[Life, ...], view: View) -> Swept:
        """Take a batch of the rows in view. What became of each since then is looked at again."""
        done = 0
        woken: list[str] = []
        for row in [self.rows[job_id] for job_id in view.ids if job_id in self.rows]:
            life = next((life for life in lives if self.allows(row, life, view.at)), None)
            if life is None or row.id in self.locked:
                continue
            if self.move(row, life, view.at, error=f"the lease of {row.locked_by} ran out"):
                woken.append(row.task)
            done += 1
            if done == self.batch:
                break
        self.tell(dict.fromkeys(woken))
        return Swept(chore, more=done == self.batch, woke=len(woken))
