"""What the worker's commands do to the database, written once.

``perform(connection, command)`` takes a *sync* Connection in AUTOCOMMIT and returns the event
that answers the command. The async worker lends it a connection with ``run_sync``, so there is
one piece of code for every driver. What fails raises; the shells turn that into ``Broke``.
"""

from __future__ import annotations

import logging
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, assert_never

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from ._channel import channel_of
from ._messages import (
    Chore,
    Claim,
    Claimed,
    DatabaseCommand,
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
from ._statements_sqlite import SqliteStatements
from ._window import Window
from .errors import UnsupportedDatabaseError
from .lifecycle import KEPT_ERRORS, Status
from .statements import Statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Dialect, Row, Table

    from .settings import WorkerSettings
    from .statements import Call
    from .tasks import Tasks

RECOVER_BATCH: Final = 100
PRUNE_BATCH: Final = 1000
"""Rows a statement: about 2 ms of deleting, and far under any sane statement timeout. Triggers and
foreign keys without an index change that, so what is too slow is halved."""

QUERY_CANCELED: Final = "57014"

_log = logging.getLogger("sqlalchemy_jobs")

_forms: dict[tuple[Table, str], Statements] = {}


def statements_for(table: Table, dialect: Dialect) -> Statements:
    """Return the statements of *table* in the form of *dialect*, built once.

    Raises :class:`UnsupportedDatabaseError` for a dialect that cannot keep the promises.
    """
    try:
        return _forms[table, dialect.name]
    except KeyError:
        check_dialect(dialect)
    form = SqliteStatements if dialect.name == "sqlite" else Statements
    return _forms.setdefault((table, dialect.name), form(table))


def check_dialect(dialect: Dialect) -> None:
    """Raise :class:`UnsupportedDatabaseError` unless the dialect is supported."""
    if dialect.name not in ("postgresql", "sqlite"):
        message = (
            f"sqlalchemy-jobs does not support {dialect.name!r}: use PostgreSQL, "
            "or SQLite for development"
        )
        raise UnsupportedDatabaseError(message)


def describe(error: BaseException) -> str:
    """Return a database error for the log: the driver's own words, no statement, no parameters.

    Of an error of the server's only the first line: the rest quotes rows, payloads included.
    """
    original = getattr(error, "orig", None) or error
    words = str(original)
    if getattr(original, "sqlstate", None):
        words = words.partition("\n")[0]
    words = " ".join(words.split())
    return f"{type(original).__name__}: {words[:500]}"


class Store:
    """Carries out database commands for one worker."""

    def __init__(self, table: Table, tasks: Tasks, settings: WorkerSettings, worker: str) -> None:
        self.table = table
        self._tasks = tasks
        self._settings = settings
        self._worker = worker
        self._visibility = settings.seconds("visibility_timeout")
        self._default_timeout = settings.default_timeout
        self._window = Window()
        self._halved: dict[Chore, int] = {}
        self._locked: frozenset[Key] = frozenset()

    def perform(
        self, connection: Connection, command: DatabaseCommand
    ) -> Claimed | Settled | Renewed | Swept:
        """Carry out one command and return its answer."""
        statements = statements_for(self.table, connection.dialect)
        channel = channel_of(connection, self.table)
        match command:
            case Claim():
                return self._claim(connection, statements, channel, command)
            case Settle():
                return self._settle(connection, statements, channel, command)
            case Renew():
                return self._renew(connection, statements, command)
            case Sweep(chore):
                return self._sweep(connection, statements, channel, chore)
            case _:
                assert_never(command)

    def notify(self, connection: Connection, channel: str, payload: str) -> None:
        """Send a notification, if the database has them."""
        call = statements_for(self.table, connection.dialect).notify(channel, payload)
        if call is not None:
            _rows(connection, call)

    # --- claim ---------------------------------------------------------------------------------

    def _claim(
        self, connection: Connection, statements: Statements, channel: str, command: Claim
    ) -> Claimed:
        tasks = self._tasks.bounds()
        if not tasks:
            return Claimed(())
        window = self._window
        look = window.look(tasks, command.limit, full=command.full)
        call = statements.claim(self._worker, self._visibility, look, command.limit, channel)
        # RETURNING has no order of its own. Rows are taken apart by place, which is many times
        # faster than by name.
        rows = sorted(_rows(connection, call), key=_in_order)
        leases: list[Lease] = []
        for row in rows:
            if row[3] == Status.RUNNING:
                leases.append(self._lease(row))
            else:
                _log.error(
                    "job %s (%s) failed: its attempts are spent",
                    row.id,
                    row.task,
                    extra={"event": "exhausted", "job_id": row.id, "task": row.task},
                )
        if len(rows) >= command.limit:
            window.relax()
            if isinstance(rows[0].run_at, int):
                # Of each queue the last, which is the latest.
                window.claimed({(row[4], -row[0]): (row[1], row[2]) for row in rows}.items())
                if command.full:
                    in_use = _rows(connection, statements.survey(look))
                    window.in_use((task, priority) for task, priority in in_use)
            return Claimed(tuple(leases), more=True)
        if rows or not command.full:
            # What was claimed starts now; another look will tell what is left.
            return Claimed(tuple(leases), sure=False)
        waiting, next_due = _rows(connection, statements.outlook(look))[0]
        if waiting >= look.window and window.crowded():
            return Claimed(tuple(leases), more=True)
        pause = window.left(waiting)
        if pause is not None:
            next_due = pause if next_due is None else min(next_due, pause)
        return Claimed(tuple(leases), next_due=next_due)

    def _lease(self, row: Any) -> Lease:
        _, _, job_id, _, name, attempts, max_attempts, timeout, *rest = row
        failures, payload, meta, waited = rest
        if timeout is None:
            task = self._tasks.get(name)
            timeout = None if task is None else task.timeout
            if timeout is None:
                timeout = self._default_timeout
        return Lease(
            job_id,
            attempts,
            name,
            max_attempts,
            timeout if timeout > 0 else None,
            # The list is bounded; by then any back-off has reached its end.
            failures if failures < KEPT_ERRORS else None,
            max(0.0, waited or 0.0),  # null: no time at all, on SQLite
            payload,
            meta or "null",
        )

    # --- settle and renew ----------------------------------------------------------------------

    def _settle(
        self,
        connection: Connection,
        statements: Statements,
        channel: str,
        command: Settle,
    ) -> Settled:
        outcomes, passing_by = command.outcomes, command.passing_by
        # One statement finds a row by its id, so of two attempts of one job only the later may
        # be in it; attempts never go down, so the earlier one cannot hold the row any more.
        latest = {outcome.lease.job_id: outcome for outcome in outcomes}
        if len(latest) < len(outcomes):
            latest = {outcome.lease.job_id: outcome for outcome in sorted(outcomes, key=_attempt)}
        postponed: list[Outcome] = []
        accepted: set[Key] = set()
        settle = partial(statements.settle, self._worker, channel=channel, passing_by=passing_by)
        try:
            self._accept(connection, settle(list(latest.values())), accepted)
        except DBAPIError as error:
            if not _is_about_a_row(error):
                raise
            # One row may be what the database refuses (a trigger, a constraint of the user's):
            # the others must not wait for it.
            for outcome in latest.values():
                if outcome.lease.key in accepted:
                    continue  # where each outcome is a statement, some came before the refused one
                try:
                    self._accept(connection, settle([outcome]), accepted)
                except DBAPIError as single:
                    if not _is_about_a_row(single):
                        raise
                    _log.error(
                        "the outcome of job %s could not be recorded; it is tried again: %s",
                        outcome.lease.job_id,
                        describe(single),
                        extra={"event": "postponed", "job_id": outcome.lease.job_id},
                    )
                    postponed.append(outcome)
        if len(accepted) == len(outcomes):
            return Settled(recorded=tuple(outcomes))
        later = {outcome.lease.key for outcome in postponed}
        if passing_by:
            missing = [o.lease for o in latest.values() if o.lease.key not in accepted | later]
            locked = self._still_held(connection, statements, missing)
            postponed += [o for o in latest.values() if o.lease.key in locked]
            later |= locked
        return Settled(
            refused=tuple(o for o in outcomes if o.lease.key not in accepted | later),
            postponed=tuple(postponed),
            recorded=tuple(o for o in outcomes if o.lease.key in accepted),
        )

    @staticmethod
    def _accept(connection: Connection, calls: Sequence[Call], accepted: set[Key]) -> None:
        """Add to *accepted* as it goes: a later call may fail after earlier ones took effect."""
        for call in calls:
            accepted.update((row[0], row[1]) for row in _rows(connection, call))

    def _renew(self, connection: Connection, statements: Statements, command: Renew) -> Renewed:
        latest = {lease.job_id: lease for lease in sorted(command.leases, key=lambda x: x.attempt)}
        calls = statements.renew(self._worker, self._visibility, list(latest.values()))
        renewed: set[Key] = set()
        self._accept(connection, calls, renewed)
        lost = frozenset(lease.key for lease in command.leases) - renewed
        missing = [lease for lease in latest.values() if lease.key in lost]
        locked = self._still_held(connection, statements, missing)
        return Renewed(command, lost - locked, passed_by=locked)

    def _still_held(
        self, connection: Connection, statements: Statements, leases: Sequence[Lease]
    ) -> frozenset[Key]:
        """Return which of the leases that no update reached are ours: others have locked these."""
        if not leases:
            self._locked = frozenset()
            return self._locked
        held: set[Key] = set()
        self._accept(connection, statements.held(self._worker, leases), held)
        for job_id, attempt in sorted(held - self._locked):
            _log.warning(
                "job %s, attempt %s: another transaction has locked its row, so its lease cannot "
                "be renewed, nor its outcome recorded",
                job_id,
                attempt,
                extra={
                    "event": "row_locked",
                    "job_id": job_id,
                    "attempt": attempt,
                    "worker": self._worker,
                },
            )
        self._locked = frozenset(held)
        return self._locked

    # --- chores --------------------------------------------------------------------------------

    def _sweep(
        self, connection: Connection, statements: Statements, channel: str, chore: Chore
    ) -> Swept:
        halved = self._halved.get(chore, 0)
        size = max(1, (RECOVER_BATCH if chore is Chore.RECOVER else PRUNE_BATCH) >> halved)
        try:
            if chore is Chore.RECOVER:
                swept = self._recover(connection, statements, channel, size)
            else:
                swept = self._prune(connection, statements, size)
        except DBAPIError as error:
            if _state(error) == QUERY_CANCELED and size > 1:
                self._halved[chore] = halved + 1
            raise
        if halved and not swept.more:  # not before: each try that is too large is an error
            self._halved[chore] = halved - 1
        return swept

    def _recover(
        self, connection: Connection, statements: Statements, channel: str, size: int
    ) -> Swept:
        try:
            rows = _rows(connection, statements.recover(size, channel))
            more = len(rows) >= size
        except DBAPIError as error:
            if not _is_about_a_row(error):
                raise
            rows, more = self._recover_singly(connection, statements, channel, error), False
        for row in rows:
            level = logging.WARNING if row.status == Status.PENDING else logging.ERROR
            _log.log(
                level,
                "job %s (%s), attempt %s: %s",
                row.id,
                row.task,
                row.attempts,
                row.last_error,
                extra={
                    "event": "recovered" if row.status == Status.PENDING else "buried",
                    "job_id": row.id,
                    "task": row.task,
                    "attempt": row.attempts,
                    "max_attempts": row.max_attempts,
                    "worker": self._worker,
                },
            )
        return Swept(Chore.RECOVER, more, sum(row.status == Status.PENDING for row in rows))

    def _recover_singly(
        self, connection: Connection, statements: Statements, channel: str, cause: DBAPIError
    ) -> list[Row[Any]]:
        """One bad row must not keep the others: take them one by one."""
        rows: list[Row[Any]] = []
        refused = 0
        for (job_id,) in _rows(connection, statements.expired(10 * RECOVER_BATCH)):
            try:
                rows += _rows(connection, statements.recover(1, channel, only=job_id))
            except DBAPIError as error:
                if not _is_about_a_row(error):
                    raise
                refused += 1
                _log.error(
                    "job %s could not be recovered: %s",
                    job_id,
                    describe(error),
                    extra={"event": "unrecoverable", "job_id": job_id},
                )
        if refused and not rows:
            raise cause
        return rows

    def _prune(self, connection: Connection, statements: Statements, size: int) -> Swept:
        rows = _rows(connection, statements.prune(size, self._settings.retention))
        return Swept(Chore.PRUNE, more=len(rows) >= size)


def _rows(connection: Connection, call: Call) -> Sequence[Any]:
    statement, parameters = call
    return connection.execute(statement, parameters).all()


_in_order: Final = itemgetter(0, 1, 2)
"""The order in which claimed rows are run: priority (negated), run_at, id."""


def _attempt(outcome: Outcome) -> int:
    return outcome.lease.attempt


def _is_about_a_row(error: DBAPIError) -> bool:
    """True if the statement was refused for what is in a row, so that other rows may fare better.

    By class of SQLSTATE: data exceptions, integrity violations, limits, and what triggers raise.
    """
    classes = ("22", "23", "54", "P0")
    return isinstance(error, IntegrityError | DataError) or _state(error)[:2] in classes


def _state(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")
