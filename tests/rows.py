"""Rows of the jobs table for tests: written by hand, read whole, and foretold from the table.

`Queue` puts rows into any state, as a person with SQL could, and reads every column back.
`foretold` says what a row must look like after an event; it knows `lifecycle.MOVES` and no SQL.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import delete, insert, literal, select, text, update

from sqlalchemy_jobs import lifecycle
from sqlalchemy_jobs._connections import autocommit
from sqlalchemy_jobs._messages import Lease
from sqlalchemy_jobs._store import Store, statements_for
from sqlalchemy_jobs.models import Job
from sqlalchemy_jobs.settings import WorkerSettings
from sqlalchemy_jobs.sqltypes import UTC, db_after, db_now
from sqlalchemy_jobs.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from sqlalchemy import Connection, Engine, Table

    from sqlalchemy_jobs._messages import DatabaseCommand
    from sqlalchemy_jobs.settings import WorkerOptions
    from sqlalchemy_jobs.statements import Statements

RowDict: TypeAlias = dict[str, Any]

JOBS: Table = Job.__table__  # type: ignore[assignment]
WORKER = "host-1-abc"
TIMES = ("run_at", "lease_expires_at", "started_at", "created_at", "updated_at")

# SQLite's clock has milliseconds, and rounds them.
GRAIN = timedelta(milliseconds=2)


@dataclass(frozen=True)
class Between:
    """Equal to every time from *earliest* to *latest*."""

    earliest: datetime
    latest: datetime

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, datetime):
            return NotImplemented
        return self.earliest - GRAIN <= other <= self.latest + GRAIN

    __hash__ = None  # type: ignore[assignment]

    def later(self, seconds: float) -> Between:
        """Both ends, moved."""
        return Between(*(at + timedelta(seconds=seconds) for at in (self.earliest, self.latest)))


class Queue:
    """The jobs table behind one connection in AUTOCOMMIT."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.name = "jobs" if connection.dialect.name == "sqlite" else "jobs.jobs"

    @property
    def statements(self) -> Statements:
        """The statements in the form of this database."""
        return statements_for(JOBS, self.connection.dialect)

    def add(self, task: str = "a", **columns: Any) -> int:
        """Insert a job and return its id; a number as a time is seconds from now."""
        values = {"task": task, **_times(columns)}
        statement = insert(JOBS).values(values).returning(JOBS.c.id)
        return int(self.connection.execute(statement).scalar_one())

    def add_running(self, task: str = "a", **changed: Any) -> Lease:
        """Insert a job that WORKER runs, unless told otherwise, and return the lease."""
        columns: RowDict = {
            "status": "running",
            "locked_by": WORKER,
            "lease_expires_at": 60,
            "attempts": 1,
            "max_attempts": 3,
            "started_at": -1,
            "updated_at": -1,
            "run_at": -1,
        }
        columns |= changed
        return Lease(
            self.add(task, **columns),
            columns["attempts"],
            task=task,
            max_attempts=columns["max_attempts"],
        )

    def edit(self, job_id: int, **columns: Any) -> None:
        """Change columns of a job, as a person with SQL could."""
        self.connection.execute(update(JOBS).where(JOBS.c.id == job_id).values(_times(columns)))

    def run(self, statement: str, **parameters: Any) -> list[Any]:
        """Run raw SQL; `{jobs}` is the table."""
        result = self.connection.execute(text(statement.format(jobs=self.name)), parameters)
        return list(result.all()) if result.returns_rows else []

    def row(self, job_id: int) -> RowDict:
        """Every column of a job."""
        row = self.find(job_id)
        assert row is not None
        return row

    def find(self, job_id: int) -> RowDict | None:
        """Every column of a job, or None if there is no such row."""
        query = select(JOBS).where(JOBS.c.id == job_id)
        row = self.connection.execute(query).mappings().one_or_none()
        return None if row is None else dict(row)

    def rows(self) -> dict[int, RowDict]:
        """Every column of every job, by id."""
        found = self.connection.execute(select(JOBS).order_by(JOBS.c.id)).mappings()
        return {row["id"]: dict(row) for row in found}

    def statuses(self) -> dict[int, str]:
        """The status of every job, by id."""
        query = select(JOBS.c.id, JOBS.c.status).order_by(JOBS.c.id)
        return {row.id: row.status for row in self.connection.execute(query)}

    def clear(self) -> None:
        """Delete every job."""
        self.connection.execute(delete(JOBS))

    def now(self) -> datetime:
        """The database's clock."""
        return self.connection.execute(select(db_now().label("now"))).scalar_one()

    @contextmanager
    def clocked(self) -> Generator[list[Between]]:
        """Yield a list that holds, after the block, the time of the database within it."""
        span: list[Between] = []
        began = self.now()
        yield span
        span.append(Between(began, self.now()))


@contextmanager
def open_queue(engine: Engine) -> Generator[Queue]:
    """Open the queue as a worker does: in AUTOCOMMIT at READ COMMITTED."""
    with engine.connect() as connection:
        queue = Queue(autocommit(connection))
        if connection.dialect.name == "sqlite":
            queue.run("PRAGMA synchronous = OFF")  # a test need not survive a power cut
        yield queue


def tasks_named(*names: str, **options: Any) -> Tasks:
    """Tasks that do nothing."""
    tasks = Tasks()
    for name in names:
        tasks.task(name, **options)(nothing)
    return tasks


def nothing(job: Any) -> None:
    """Do nothing."""


class Hand:
    """A worker's store on a connection, to give commands to by hand."""

    def __init__(
        self,
        queue: Queue,
        *names: str,
        worker: str = WORKER,
        tasks: Tasks | None = None,
        **options: Any,
    ) -> None:
        settings: WorkerOptions = {"visibility_timeout": 300.0, **options}  # type: ignore[typeddict-item]
        self.queue = queue
        self.settings = WorkerSettings(**settings)
        if tasks is None:
            tasks = tasks_named(*(names or ("a",)))
        self.store = Store(JOBS, tasks, self.settings, worker)

    def __call__(self, command: DatabaseCommand) -> Any:
        """Carry the command out and return the answer."""
        return self.store.perform(self.queue.connection, command)


def foretold(
    before: Mapping[str, Any],
    event: lifecycle.Event,
    now: Between,
    *,
    worker: str = WORKER,
    visibility: float = 300.0,
    bound: int = lifecycle.DEFAULT_MAX_ATTEMPTS,
    delay: float = 0.0,
    error: str | None = None,
) -> RowDict | None:
    """Return the row after *event*, by the table of moves; None if it is gone.

    *error* None: any text that names the worker which held the row, if one did.
    """
    move = lifecycle.MOVES[event]
    if move.target is None:
        return None
    row = dict(before)
    if before["status"] != move.target:
        row["status"], row["updated_at"] = str(move.target), now
    if move.counts:
        row["attempts"], row["started_at"] = before["attempts"] + 1, now
    row["max_attempts"] = _allowance(before, move.allowance, bound)
    match move.lease:
        case lifecycle.Hold.TAKE:
            row["locked_by"], row["lease_expires_at"] = worker, now.later(visibility)
        case lifecycle.Hold.EXTEND:
            row["lease_expires_at"] = now.later(visibility)
        case lifecycle.Hold.DROP:
            row["locked_by"] = row["lease_expires_at"] = None
        case lifecycle.Hold.KEEP:
            pass
    match move.run_at:
        case lifecycle.RunAt.NOW:
            row["run_at"] = now
        case lifecycle.RunAt.GIVEN:
            row["run_at"] = now.later(delay)
        case lifecycle.RunAt.KEEP:
            pass
    if move.errors is lifecycle.Errors.APPEND:
        said = error if error is not None else Naming(before["locked_by"] or "attempts")
        entry = {
            "attempt": before["attempts"],
            "at": Iso(now),
            "worker": before["locked_by"],
            "error": said,
        }
        row["last_error"] = said
        row["errors"] = [*before["errors"], entry][-lifecycle.KEPT_ERRORS :]
    return row


def _allowance(before: Mapping[str, Any], allowance: lifecycle.Allowance, bound: int) -> int | None:
    given: int | None = before["max_attempts"]
    match allowance:
        case lifecycle.Allowance.SETTLE:
            return bound if given is None else given
        case lifecycle.Allowance.GIVE_BACK:
            assert given is not None
            return given + 1
        case lifecycle.Allowance.AT_LEAST_ONE_MORE:
            attempts: int = before["attempts"]
            if given is None:  # still open, unless attempts were made without it being settled
                return None if attempts == 0 else attempts + 1
            return max(given, attempts + 1)
        case lifecycle.Allowance.KEEP:
            return given


@dataclass(frozen=True)
class Naming:
    """Equal to every text that holds *word*."""

    word: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.word in other

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Iso:
    """Equal to every ISO text of a time in *span*."""

    span: Between

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.span == datetime.fromisoformat(other)

    __hash__ = None  # type: ignore[assignment]


def _times(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: db_after(literal(float(value)))
        if name in TIMES and isinstance(value, int | float)
        else value
        for name, value in columns.items()
    }


def fixed(at: datetime) -> Any:
    """A time as a bound value of the column's type."""
    return literal(at, UTC())
