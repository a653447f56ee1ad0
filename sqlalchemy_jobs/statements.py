"""Every statement of the queue, in SQLAlchemy Core, derived from the table of the job's life.

A statement's ``SET`` comes from :data:`~sqlalchemy_jobs.lifecycle.MOVES`; what is written here
is how rows are found. Each is built once for a table and a dialect. Lists are single array
parameters, never expanding ones, so that each statement has one text; statuses are literals, for
a parameter would keep the planner from the partial indexes.

The PostgreSQL forms are here, the plain ones of SQLite in ``_statements_sqlite``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy import (
    BigInteger,
    Float,
    Integer,
    SmallInteger,
    Table,
    Text,
    and_,
    bindparam,
    case,
    cast,
    column,
    delete,
    exists,
    func,
    literal_column,
    null,
    or_,
    select,
    text,
    true,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, insert

from .lifecycle import (
    DEFAULT_MAX_ATTEMPTS,
    MOVES,
    UNFINISHED,
    Allowance,
    Errors,
    Event,
    Hold,
    RunAt,
    Status,
)
from .models import KEY_TAKEN, in_status
from .sqltypes import (
    UTC,
    at_microseconds,
    db_after,
    db_now,
    element_at,
    errors_appended,
    errors_kept,
    microseconds,
    seconds_since,
    told,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sqlalchemy import ColumnElement, Executable, Select

    from ._messages import Lease, Outcome
    from ._window import Look

Call: TypeAlias = "tuple[Executable, dict[str, Any]]"
"""A statement and its parameters."""

Values: TypeAlias = "dict[str, ColumnElement[Any]]"

HORIZON: Final = 60.0
"""Seconds: a job due later than this is nobody's next look."""

_BOUND_WORKER: Final = bindparam("worker", type_=Text)
_VISIBILITY: Final = bindparam("visibility", type_=Float)
_LIMIT: Final = bindparam("limit", type_=Integer)
_CHANNEL: Final = bindparam("channel", type_=Text)
_LARGEST: Final[ColumnElement[int]] = literal_column(str(2**31 - 1), Integer)
_ONE: Final[ColumnElement[int]] = literal_column("1", Integer)


def changes(
    table: Table,
    event: Event,
    *,
    delay: ColumnElement[float] | None = None,
    error: ColumnElement[str] | None = None,
    bound: ColumnElement[int] | None = None,
) -> Values:
    """Return what *event* sets in a row of *table*, as its row of the table of moves says."""
    move, row = MOVES[event], table.c
    values: Values = {}
    if move.target is not None and {move.target} != move.source:
        values["status"] = literal_column(f"'{move.target}'")
        values["updated_at"] = db_now()
    if move.counts:
        values["attempts"] = row.attempts + 1
        values["started_at"] = db_now()
    match move.allowance:
        case Allowance.SETTLE:
            values["max_attempts"] = func.coalesce(row.max_attempts, bound)
        case Allowance.GIVE_BACK:
            # A bound at the column's largest stays: an overflow would refuse the outcome for ever.
            more = case((row.max_attempts == _LARGEST, _LARGEST), else_=row.max_attempts + 1)
            values["max_attempts"] = more
        case Allowance.AT_LEAST_ONE_MORE:
            # A null of a job that never ran stays: its first claim settles it.
            values["max_attempts"] = case(
                (row.attempts < func.coalesce(row.max_attempts, _ONE), row.max_attempts),
                else_=row.attempts + 1,
            )
        case Allowance.KEEP:
            pass
    match move.lease:
        case Hold.TAKE:
            values["locked_by"] = _BOUND_WORKER
            values["lease_expires_at"] = db_after(_VISIBILITY)
        case Hold.EXTEND:
            values["lease_expires_at"] = db_after(_VISIBILITY)
        case Hold.DROP:
            values["locked_by"] = null()
            values["lease_expires_at"] = null()
        case Hold.KEEP:
            pass
    match move.run_at:
        case RunAt.NOW:
            values["run_at"] = db_now()
        case RunAt.GIVEN:
            assert delay is not None
            values["run_at"] = db_after(delay)
        case RunAt.KEEP:
            pass
    if move.errors is Errors.APPEND:
        assert error is not None
        values["last_error"] = error
        values["errors"] = errors_appended(row.errors, row.attempts, row.locked_by, error)
    return values


def whichever(table: Table, branches: Sequence[tuple[ColumnElement[bool], Values]]) -> Values:
    """Merge the values of several events: of the first whose condition holds, else of the last."""
    *conditional, (_, otherwise) = branches
    if not conditional:
        return otherwise
    merged: Values = {}
    for name in dict.fromkeys(name for _, values in branches for name in values):
        last = otherwise.get(name, table.c[name])
        whens = [(condition, values.get(name, table.c[name])) for condition, values in conditional]
        same = all(value.compare(last) for _, value in whens)
        merged[name] = last if same else case(*whens, else_=last)
    return merged


def literal_status(statuses: Iterable[Status], alias: str = "") -> ColumnElement[bool]:
    """Return "the status is one of these" as literal SQL."""
    predicate = in_status(statuses)
    return literal_column(f"{alias}.{predicate}" if alias else predicate)


def attempts_left(table: Table, bound: ColumnElement[int] | None = None) -> ColumnElement[bool]:
    """Return "another attempt may be made". *bound* stands in for a null ``max_attempts``."""
    fallback: ColumnElement[int] = literal_column(str(DEFAULT_MAX_ATTEMPTS), Integer)
    return table.c.attempts < func.coalesce(
        table.c.max_attempts, fallback if bound is None else bound
    )


def lost_lease(table: Table, ending: str) -> ColumnElement[str]:
    """Return the error of an attempt whose lease ran out: who held it, until when."""
    return (
        literal_column("'worker '", Text)
        + table.c.locked_by
        + literal_column("' was lost: its lease ran out at '", Text)
        + cast(table.c.lease_expires_at, Text)
        + literal_column(f"'{ending}'", Text)
    )


EXHAUSTED: Final = literal_column("'attempts are spent: attempts >= max_attempts'", Text)


class Statements:
    """The statements of PostgreSQL for one table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.claim_statement = self._claim()
        self.survey_statement = self._survey()
        self.outlook_statement = self._outlook()
        self.renew_statement = self._renew()
        self.held_statement = self._still_held()
        self.recover_statement = self._recover()
        self.prune_statement = self._prune()
        self.cancel_statement = self._cancel()
        payload = bindparam("payload", type_=Text)
        self.notify_statement: Executable = select(func.pg_notify(_CHANNEL, payload))
        self.tell_statement: Executable = select(told(_CHANNEL, payload))
        self.requeue_statement = self._requeue()
        self.settle_statement = lru_cache(maxsize=None)(self._settle)
        self.enqueue_statement = lru_cache(maxsize=256)(self._enqueue)
        self.enqueue_many_statement = lru_cache(maxsize=64)(self._enqueue_many)

    # --- looking for work ----------------------------------------------------------------------

    def claim(self, worker: str, visibility: float, look: Look, limit: int, channel: str) -> Call:
        """Claim up to *limit* due jobs: the best of the heads of each (task, priority) queue."""
        del channel
        parameters = self._pairs(look)
        parameters |= {"worker": worker, "visibility": visibility, "limit": limit}
        parameters |= {"bounds": look.bounds, "after": look.after, "after_id": look.after_id}
        return self.claim_statement, parameters

    def survey(self, look: Look) -> Call:
        """Which (task, priority) pairs have due jobs."""
        return self.survey_statement, self._pairs(look)

    def outlook(self, look: Look) -> Call:
        """How many due jobs wait, up to the window, and the seconds until the next is due."""
        return self.outlook_statement, self._pairs(look)

    @staticmethod
    def _pairs(look: Look) -> dict[str, Any]:
        return {"tasks": look.tasks, "priorities": look.priorities, "window": look.window}

    def _pair(self, *more: tuple[str, Any]) -> Any:
        arrays = [("tasks", Text), ("priorities", SmallInteger), *more]
        columns = [column(name, type_) for name, type_ in arrays]
        parameters = (bindparam(name, type_=ARRAY(type_)) for name, type_ in arrays)
        return func.unnest(*parameters).table_valued(*columns).render_derived(name="pair")

    def _due(self, pair: Any) -> tuple[Any, ColumnElement[bool]]:
        """The pending rows of a pair; with a bound on run_at, a range of the index of due jobs."""
        due = self.table.alias("due")
        return due, and_(
            due.c.task == pair.c.tasks,
            due.c.priority == pair.c.priorities,
            literal_status(MOVES[Event.CLAIM].source, "due"),
        )

    def _claim(self) -> Executable:
        row_at = self.table.c.run_at
        # Minus infinity, which a hand may have written, cannot be subtracted.
        since = func.greatest(row_at, db_after(literal_column("-3155760000")))
        window = bindparam("window", type_=Integer)
        pair = self._pair(("after", BigInteger), ("after_id", BigInteger))
        due, of_pair = self._due(pair)
        head = (
            select(due.c.id, due.c.priority, due.c.run_at)
            .where(
                of_pair,
                due.c.run_at <= db_now(),
                tuple_(due.c.run_at, due.c.id)
                >= tuple_(at_microseconds(pair.c.after), pair.c.after_id),
            )
            .order_by(due.c.run_at, due.c.id)
            .limit(window)
            .lateral("head")
        )
        best = (
            select(head.c.id)
            .select_from(pair.join(head, true()))
            .order_by(head.c.priority.desc(), head.c.run_at, head.c.id)
            .limit(window)
            .subquery("best")
        )
        # Locked by primary key. "status = 'pending'" here would imply the index of due jobs and
        # lead the planner through its dead entries; the other statuses imply no index.
        row = self.table.alias("job")
        others = sorted(frozenset(Status) - MOVES[Event.CLAIM].source)
        lock = (
            select(row.c.id)
            .where(
                row.c.id == best.c.id,
                row.c.status.not_in([literal_column(f"'{status}'") for status in others]),
                row.c.run_at <= db_now(),
            )
            .with_for_update(skip_locked=True, of=row)
            .lateral("lock")
        )
        chosen = (
            select(lock.c.id).select_from(best.join(lock, true())).limit(_LIMIT).scalar_subquery()
        )
        bound = element_at(
            bindparam("bounds", type_=ARRAY(Integer)),
            func.array_position(bindparam("tasks", type_=ARRAY(Text)), self.table.c.task),
        )
        return (
            update(self.table)
            .where(self.table.c.id == func.any(func.array(chosen)))
            .values(self._claimed(bound))
            .returning(*self._lease(microseconds(row_at), since))
        )

    def _claimed(self, bound: ColumnElement[int]) -> Values:
        return whichever(
            self.table,
            [
                (attempts_left(self.table, bound), changes(self.table, Event.CLAIM, bound=bound)),
                (true(), changes(self.table, Event.EXHAUST, error=EXHAUSTED)),
            ],
        )

    def _lease(
        self, run_at: ColumnElement[Any], since: ColumnElement[Any]
    ) -> list[ColumnElement[Any]]:
        """What a claim returns; first that by which it is sorted."""
        row = self.table.c
        return [
            (-row.priority).label("rank"),
            run_at.label("run_at"),
            row.id,
            row.status,
            row.task,
            row.attempts,
            row.max_attempts,
            row.timeout_s,
            errors_kept(row.errors).label("failures"),
            cast(row.payload, Text).label("payload"),
            cast(row.meta, Text).label("meta"),
            seconds_since(since).label("waited"),
        ]

    def _survey(self) -> Executable:
        pair = self._pair()
        first = self._waiting(pair, _ONE).lateral("first")
        return select(pair.c.tasks, pair.c.priorities).select_from(pair.join(first, true()))

    def _waiting(self, pair: Any, limit: ColumnElement[int]) -> Select[Any]:
        """Up to *limit* due rows of a pair."""
        due, of_pair = self._due(pair)
        return (
            select(_ONE.label("one"))
            .where(of_pair, due.c.run_at <= db_now())
            # Of no use but to the planner: without an order, a sequential scan that hopes to meet
            # enough rows early seems cheaper than the index.
            .order_by(due.c.run_at)
            .limit(limit)
            .correlate(pair)
        )

    def _outlook(self) -> Executable:
        pair = self._pair()
        due, of_pair = self._due(pair)
        waiting = self._waiting(pair, bindparam("window", type_=Integer)).subquery("waiting")
        count = select(func.count().label("n")).select_from(waiting).lateral("count")
        coming = (
            select(due.c.run_at)
            .where(
                of_pair,
                due.c.run_at > db_now(),
                due.c.run_at <= db_after(literal_column(str(HORIZON))),
            )
            .order_by(due.c.run_at)
            .limit(1)
            .lateral("coming")
        )
        return select(
            cast(func.coalesce(func.sum(count.c.n), 0), BigInteger),
            seconds_since(db_now(), func.min(coming.c.run_at)),
        ).select_from(pair.join(count, true()).outerjoin(coming, true()))

    # --- leases and outcomes -------------------------------------------------------------------

    def renew(self, worker: str, visibility: float, leases: Sequence[Lease]) -> list[Call]:
        """Extend leases, but of rows that others have locked; returns (id, attempts) of each."""
        parameters = {"worker": worker, "visibility": visibility} | _fence(leases)
        return [(self.renew_statement, parameters)]

    def held(self, worker: str, leases: Sequence[Lease]) -> list[Call]:
        """Return (id, attempts) of each lease that is still held, whoever has locked its row."""
        return [(self.held_statement, {"worker": worker} | _fence(leases))]

    def settle(
        self,
        worker: str,
        outcomes: Sequence[Outcome],
        channel: str,
        *,
        passing_by: bool = False,
    ) -> list[Call]:
        """Record outcomes in one statement; returns (id, attempts) of each that was accepted.

        *passing_by*: but of rows that others have locked.
        """
        events = frozenset(outcome.event for outcome in outcomes)
        parameters: dict[str, Any] = {"worker": worker}
        parameters |= _fence([outcome.lease for outcome in outcomes])
        if len(events) > 1:
            parameters["happened"] = [outcome.event.value for outcome in outcomes]
        moves = [MOVES[event] for event in events]
        if any(move.run_at is RunAt.GIVEN for move in moves):
            parameters["delays"] = [outcome.delay for outcome in outcomes]
        if any(move.errors is Errors.APPEND for move in moves):
            parameters["said"] = [outcome.error for outcome in outcomes]
        if any(move.wakes for move in moves):
            parameters["channel"] = channel
        return [(self.settle_statement(events, passing_by=passing_by), parameters)]

    def _held(self, row: Any = None) -> ColumnElement[bool]:
        """The fence. No status: locked_by is null unless running, and "status = 'running'" would
        imply an index full of dead entries.
        """
        row = self.table if row is None else row
        return and_(
            row.c.id == func.any(_IDS),
            row.c.attempts == element_at(_ATTEMPTS, func.array_position(_IDS, row.c.id)),
            row.c.locked_by == _BOUND_WORKER,
        )

    def _held_and_free(self) -> ColumnElement[bool]:
        """The fence, without the rows that another transaction has locked.

        One of those, be it a job that a long transaction cancels, would else hold up all the
        others. The lock that is asked for is the one of an update, which foreign keys that point
        at a job do not contradict.
        """
        row = self.table.alias("job")
        free = select(row.c.id).where(self._held(row))
        free = free.with_for_update(skip_locked=True, key_share=True, of=row)
        return self.table.c.id == func.any(func.array(free.scalar_subquery()))

    def _still_held(self) -> Executable:
        return select(self.table.c.id, self.table.c.attempts).where(self._held())

    def _of_lease(self, array: ColumnElement[Any]) -> ColumnElement[Any]:
        return element_at(array, func.array_position(_IDS, self.table.c.id))

    def _renew(self) -> Executable:
        return (
            update(self.table)
            .where(self._held_and_free())
            .values(changes(self.table, Event.RENEW))
            .returning(self.table.c.id, self.table.c.attempts)
        )

    def _settle(self, events: frozenset[Event], *, passing_by: bool = False) -> Executable:
        happened = self._of_lease(bindparam("happened", type_=ARRAY(Text)))
        delay = self._of_lease(bindparam("delays", type_=ARRAY(Float)))
        error = self._of_lease(bindparam("said", type_=ARRAY(Text)))
        order = sorted(events)
        branches = [
            (
                happened == literal_column(f"'{event}'"),
                changes(self.table, event, delay=delay, error=error),
            )
            for event in order
        ]
        returned: list[Any] = [self.table.c.id, self.table.c.attempts]
        waking = [event for event in order if MOVES[event].wakes]
        if waking:
            notice = told(_CHANNEL, self.table.c.task)
            # Read from the row as it is now: only a move back to pending wakes anybody.
            returned.append(case((literal_status({Status.PENDING}), notice)))
        fence = self._held_and_free() if passing_by else self._held()
        statement = update(self.table).where(fence).values(whichever(self.table, branches))
        return statement.returning(*returned)  # pyright: ignore[reportUnknownVariableType]

    # --- chores --------------------------------------------------------------------------------

    def recover(self, limit: int, channel: str, only: int | None = None) -> Call:
        """Give back, or bury, jobs whose leases ran out; *only* narrows it to one job."""
        return self.recover_statement, {"limit": limit, "channel": channel, "only": only}

    def prune(self, limit: int, retention: Mapping[Status, float | None]) -> Call:
        """Delete finished jobs older than the retention of their status; None keeps them."""
        aged = {status.value: seconds for status, seconds in retention.items()}
        return self.prune_statement, {"limit": limit} | aged

    def expired(self, limit: int) -> Call:
        """The ids of running jobs whose leases ran out."""
        query = select(self.table.c.id).where(*self._expired(self.table))
        return query.order_by(self.table.c.lease_expires_at).limit(_LIMIT), {"limit": limit}

    def _expired(self, row: Any, alias: str = "") -> tuple[ColumnElement[bool], ...]:
        running = literal_status(MOVES[Event.RECOVER].source, alias)
        return running, row.c.lease_expires_at < db_now()

    def _recovered(self) -> Values:
        again = changes(self.table, Event.RECOVER, error=lost_lease(self.table, ""))
        ending = lost_lease(self.table, "; no attempt is left")
        return whichever(
            self.table,
            [
                (attempts_left(self.table), again),
                (true(), changes(self.table, Event.BURY, error=ending)),
            ],
        )

    def _recover(self) -> Executable:
        row = self.table.alias("job")
        only = bindparam("only", type_=BigInteger)
        batch = (
            select(row.c.id)
            .where(*self._expired(row, "job"), or_(only.is_(None), row.c.id == only))
            .order_by(row.c.id)
            .limit(_LIMIT)
            .with_for_update(skip_locked=True, of=row)
            .scalar_subquery()
        )
        notice = told(_CHANNEL, self.table.c.task)
        return (
            update(self.table)
            .where(self.table.c.id == func.any(func.array(batch)))
            .values(self._recovered())
            .returning(
                *self._report(),
                case((literal_status({Status.PENDING}), notice)),
            )
        )

    def _report(self) -> list[ColumnElement[Any]]:
        row = self.table.c
        return [row.id, row.status, row.task, row.attempts, row.max_attempts, row.last_error]

    def _aged(self, row: Any) -> ColumnElement[bool]:
        return or_(
            *(
                and_(row.c.status == literal_column(f"'{status}'"), row.c.updated_at < oldest_kept)
                for status, oldest_kept in self._oldest_kept().items()
            )
        )

    def _oldest_kept(self) -> dict[Status, ColumnElement[Any]]:
        """By status, since when finished jobs are kept; null: for ever."""
        return {
            # Cast, for the driver sends a null without its type.
            status: db_after(-cast(bindparam(status.value, type_=Float), Float))
            for status in sorted(MOVES[Event.PRUNE].source)
        }

    def _prune(self) -> Executable:
        row = self.table.alias("job")
        batch = (
            select(row.c.id)
            .where(
                literal_status(MOVES[Event.PRUNE].source, "job"),
                # A range of the index: what no status would drop yet is not read.
                row.c.updated_at < func.greatest(*self._oldest_kept().values()),
                self._aged(row),
            )
            .order_by(row.c.updated_at)
            .limit(_LIMIT)
            .with_for_update(skip_locked=True, of=row)
            .scalar_subquery()
        )
        return (
            delete(self.table)
            .where(self.table.c.id == func.any(func.array(batch)))
            .returning(self.table.c.id)
        )

    # --- the caller's side ---------------------------------------------------------------------

    def notify(self, channel: str, payload: str) -> Call | None:
        """Send a notification, whoever listens; None where there are none."""
        return self.notify_statement, {"channel": channel, "payload": payload}

    def tell(self, channel: str, task: str) -> Call | None:
        """Notify resting workers of a task; None where there are no notifications."""
        return self.tell_statement, {"channel": channel, "payload": task}

    def enqueue(self, row: Mapping[str, Any], channel: str | None) -> Call:
        """Insert one job. Returns its id, or no row if its key is taken. No channel: no notice."""
        statement = self.enqueue_statement(frozenset(row), notify=channel is not None)
        return statement, dict(row) if channel is None else {**row, "channel": channel}

    def enqueue_many(self, rows: Sequence[Mapping[str, Any]], channel: str | None) -> Call:
        """Insert jobs that give the same columns. Returns (id, key) of each that was inserted."""
        columns = frozenset(rows[0])
        parameters: dict[str, Any] = {name: [row[name] for row in rows] for name in columns}
        if channel is not None:
            parameters["channel"] = channel
        return self.enqueue_many_statement(columns, notify=channel is not None), parameters

    def cancel(self, ids: Sequence[int]) -> Call:
        """Cancel unfinished jobs; returns the ids of those that were."""
        return self.cancel_statement, {"ids": ids}

    def requeue(self, ids: Sequence[int]) -> Call:
        """Give ended jobs another attempt, unless their key is taken; returns id and task."""
        return self.requeue_statement, {"ids": ids}

    def _cancel(self) -> Executable:
        return (
            update(self.table)
            .where(self._among(), literal_status(MOVES[Event.CANCEL].source))
            .values(changes(self.table, Event.CANCEL))
            .returning(self.table.c.id)
        )

    def _requeue(self) -> Executable:
        other = self.table.alias("other")
        taken = exists(
            select(_ONE).where(
                other.c.idempotency_key == self.table.c.idempotency_key,
                literal_status(UNFINISHED, "other"),
            )
        )
        return (
            update(self.table)
            .where(
                self._among(),
                literal_status(MOVES[Event.REQUEUE].source),
                ~taken,
                # One more would overflow, and so keep the others from their attempt.
                self.table.c.attempts < _LARGEST,
            )
            .values(changes(self.table, Event.REQUEUE))
            .returning(self.table.c.id, self.table.c.task)
        )

    def _among(self) -> ColumnElement[bool]:
        return self.table.c.id == func.any(_IDS)

    def _inserted(self, columns: frozenset[str]) -> dict[str, ColumnElement[Any]]:
        """The values of an insert, from parameters named as in a row of new jobs."""
        values: dict[str, ColumnElement[Any]] = {}
        for name in sorted(columns):
            match name:
                case "delay":
                    values["run_at"] = db_after(bindparam(name, type_=Float))
                case "run_at":
                    values["run_at"] = bindparam(name, type_=UTC())
                case "payload" | "meta":
                    values[name] = self._json(bindparam(name, type_=Text))
                case _:
                    values[name] = bindparam(name, type_=self.table.c[name].type)
        values.setdefault("run_at", db_now())
        return values

    def _first_run(self, given: Any) -> ColumnElement[Any]:
        """The run_at of a row that gives one, or a delay, or neither."""
        at = [given["run_at"]] if "run_at" in given else []
        after = [db_after(given["delay"])] if "delay" in given else []
        return func.coalesce(*at, *after, db_now(), type_=UTC()) if at or after else db_now()

    def _json(self, json_text: ColumnElement[str]) -> ColumnElement[Any]:
        return cast(json_text, JSONB)

    def _enqueue(self, columns: frozenset[str], *, notify: bool) -> Executable:
        statement = insert(self.table).values(self._inserted(columns))
        if "idempotency_key" in columns:
            statement = statement.on_conflict_do_nothing(
                index_elements=["idempotency_key"], index_where=text(KEY_TAKEN)
            )
        if notify:
            notice = told(_CHANNEL, self.table.c.task)
            return statement.returning(self.table.c.id, notice)
        return statement.returning(self.table.c.id)

    def _enqueue_many(self, columns: frozenset[str], *, notify: bool) -> Executable:
        names = sorted(columns)
        types: dict[str, Any] = {"delay": Float, "payload": Text, "meta": Text, "run_at": UTC()}
        types |= {n: self.table.c[n].type for n in names if n not in types}
        arrays = (bindparam(name, type_=ARRAY(types[name])) for name in names)
        rows = (
            func.unnest(*arrays)
            .table_valued(*(column(n, types[n]) for n in names), with_ordinality="position")
            .render_derived(name="new")
        )
        values: dict[str, ColumnElement[Any]] = {}
        for name in names:
            match name:
                case "delay" | "run_at":
                    values["run_at"] = self._first_run(rows.c)
                case "payload" | "meta":
                    values[name] = self._json(rows.c[name])
                case _:
                    values[name] = rows.c[name]
        values.setdefault("run_at", db_now())
        # In order of position, so that ids grow in the caller's order.
        source = select(*values.values()).select_from(rows).order_by(rows.c.position)
        statement = insert(self.table).from_select(list(values), source, include_defaults=False)
        if "idempotency_key" in columns:
            statement = statement.on_conflict_do_nothing(
                index_elements=["idempotency_key"], index_where=text(KEY_TAKEN)
            )
        row = self.table.c
        if not notify:
            return statement.returning(row.id, row.idempotency_key)
        done = statement.returning(row.id, row.idempotency_key, row.task).cte("done")
        tasks = select(done.c.task).distinct().subquery("tasks")
        notices = select(func.count(told(_CHANNEL, tasks.c.task))).scalar_subquery()
        return select(done.c.id, done.c.idempotency_key, notices)


_IDS: Final = bindparam("ids", type_=ARRAY(BigInteger))
_ATTEMPTS: Final = bindparam("held_attempts", type_=ARRAY(Integer))


def _fence(leases: Sequence[Lease]) -> dict[str, Any]:
    return {
        "ids": [lease.job_id for lease in leases],
        "held_attempts": [lease.attempt for lease in leases],
    }
