"""The statements of SQLite, the in-process development database, behind the same names.

There are no arrays, no LATERAL and no SKIP LOCKED: lists travel as JSON, outcomes one by one, and
a single UPDATE is atomic because there is a single writer. There are no notifications either.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    Table,
    Text,
    TypeDecorator,
    and_,
    bindparam,
    case,
    cast,
    column,
    func,
    literal_column,
    or_,
    select,
    text,
    true,
    type_coerce,
    update,
)
from sqlalchemy.dialects.sqlite import Insert, insert

from .lifecycle import MOVES, Event
from .models import KEY_TAKEN
from .sqltypes import db_after, db_now, seconds_since
from .statements import HORIZON, Statements, changes, literal_status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import ColumnElement, Dialect, Executable

    from ._messages import Lease, Outcome
    from ._window import Look
    from .statements import Call

_WORKER = bindparam("worker", type_=Text)
_LIMIT = bindparam("limit", type_=Integer)


class _Written(TypeDecorator[Any]):
    """Text, as bytes if it cannot be decoded."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | bytes | None:  # noqa: ARG002 - the base class's signature
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError:
            return value


class SqliteStatements(Statements):
    """The plain forms. The table has no schema here, for SQLite knows none."""

    def __init__(self, table: Table) -> None:
        super().__init__(table.to_metadata(MetaData(), schema=None))  # type: ignore[arg-type] # its documentation accepts None

    def claim(self, worker: str, visibility: float, look: Look, limit: int, channel: str) -> Call:
        del channel
        parameters = {"worker": worker, "visibility": visibility, "limit": limit}
        return self.claim_statement, parameters | self._tasks(look)

    def survey(self, look: Look) -> Call:
        return self.survey_statement, self._tasks(look)

    def outlook(self, look: Look) -> Call:
        return self.outlook_statement, self._tasks(look)

    @staticmethod
    def _tasks(look: Look) -> dict[str, Any]:
        return {"tasks": json.dumps(dict(zip(look.tasks, look.bounds, strict=True)))}

    def _known(self) -> tuple[ColumnElement[bool], Any]:
        """The pending rows of the worker's tasks, and the table of tasks with their bounds."""
        tasks = func.json_each(bindparam("tasks", type_=Text)).table_valued(
            column("key", Text), column("value", Integer), name="known"
        )
        pending = literal_status(MOVES[Event.CLAIM].source)
        return and_(pending, self.table.c.task.in_(select(tasks.c.key))), tasks

    def _claim(self) -> Executable:
        row = self.table.c
        known, tasks = self._known()
        chosen = (
            select(row.id)
            .where(known, row.run_at <= db_now())
            .order_by(row.priority.desc(), row.run_at, row.id)
            .limit(_LIMIT)
        )
        bound = select(tasks.c.value).where(tasks.c.key == row.task).scalar_subquery()
        return (
            update(self.table)
            .where(row.id.in_(chosen))
            .values(self._claimed(bound))
            # As text: whatever a hand has written there, it can be read and sorted.
            .returning(*self._lease(cast(row.run_at, Text), row.run_at))
        )

    def _lease(
        self, run_at: ColumnElement[Any], since: ColumnElement[Any]
    ) -> list[ColumnElement[Any]]:
        # A column's type is only a wish here, and one value that cannot be read, or is of another
        # kind, would cost the whole claim.
        row = self.table.c
        read: dict[str, ColumnElement[Any]] = {
            "max_attempts": cast(row.max_attempts, Integer),
            "timeout_s": cast(row.timeout_s, Float),
            "payload": type_coerce(cast(row.payload, LargeBinary), _Written()),
            "meta": type_coerce(cast(row.meta, LargeBinary), _Written()),
        }
        columns = super()._lease(run_at, since)
        return [read[c.key].label(c.key) if c.key in read else c for c in columns]

    def _survey(self) -> Executable:
        row = self.table.c
        known, _ = self._known()
        return select(row.task, row.priority).where(known, row.run_at <= db_now()).distinct()

    def _outlook(self) -> Executable:
        row = self.table.c
        known, _ = self._known()
        due = row.run_at <= db_now()
        horizon = row.run_at <= db_after(literal_column(str(HORIZON)))
        return select(
            func.coalesce(func.sum(case((due, 1), else_=0)), 0),
            func.min(case((~due, seconds_since(db_now(), row.run_at)))),
        ).where(known, horizon)

    def renew(self, worker: str, visibility: float, leases: Sequence[Lease]) -> list[Call]:
        return [
            (
                self.renew_statement,
                {"worker": worker, "visibility": visibility, **_fence(lease)},
            )
            for lease in leases
        ]

    def held(self, worker: str, leases: Sequence[Lease]) -> list[Call]:
        return [(self.held_statement, {"worker": worker, **_fence(lease)}) for lease in leases]

    def settle(
        self,
        worker: str,
        outcomes: Sequence[Outcome],
        channel: str,
        *,
        passing_by: bool = False,
    ) -> list[Call]:
        del channel, passing_by  # no row is locked here, but the whole database
        return [
            (
                self.settle_statement(frozenset({outcome.event})),
                {
                    "worker": worker,
                    "delay": outcome.delay,
                    "error": outcome.error,
                    **_fence(outcome.lease),
                },
            )
            for outcome in outcomes
        ]

    def _held(self, row: Any = None) -> ColumnElement[bool]:
        row = (self.table if row is None else row).c
        return and_(
            row.id == bindparam("lease_id", type_=Integer),
            row.attempts == bindparam("attempt", type_=Integer),
            row.locked_by == _WORKER,
        )

    def _held_and_free(self) -> ColumnElement[bool]:
        return self._held()

    def _settle(self, events: frozenset[Event], *, passing_by: bool = False) -> Executable:
        del passing_by
        (event,) = events
        values = changes(
            self.table,
            event,
            delay=bindparam("delay", type_=Float),
            error=bindparam("error", type_=Text),
        )
        return (
            update(self.table)
            .where(self._held())
            .values(values)
            .returning(self.table.c.id, self.table.c.attempts)
        )

    def recover(self, limit: int, channel: str, only: int | None = None) -> Call:
        del channel
        return self.recover_statement, {"limit": limit, "only": only}

    def _recover(self) -> Executable:
        row = self.table.c
        only = bindparam("only", type_=Integer)
        batch = (
            select(row.id)
            .where(*self._expired(self.table), or_(only.is_(None), row.id == only))
            .order_by(row.id)
            .limit(_LIMIT)
        )
        return (
            update(self.table)
            .where(row.id.in_(batch))
            .values(self._recovered())
            .returning(*self._report())
        )

    def _prune(self) -> Executable:
        row = self.table.c
        finished = literal_status(MOVES[Event.PRUNE].source)
        batch = (
            select(row.id)
            .where(finished, self._aged(self.table))
            .order_by(row.updated_at)
            .limit(_LIMIT)
        )
        return self.table.delete().where(row.id.in_(batch)).returning(row.id)

    def notify(self, channel: str, payload: str) -> None:
        del channel, payload

    def tell(self, channel: str, task: str) -> None:
        del channel, task

    def enqueue(self, row: Mapping[str, Any], channel: str | None) -> Call:
        del channel
        return super().enqueue(row, None)

    def enqueue_many(self, rows: Sequence[Mapping[str, Any]], channel: str | None) -> Call:
        del channel
        columns = frozenset(rows[0])
        portable = [{name: _portable(value) for name, value in row.items()} for row in rows]
        return self.enqueue_many_statement(columns, notify=False), {"rows": json.dumps(portable)}

    def cancel(self, ids: Sequence[int]) -> Call:
        return self.cancel_statement, {"ids": json.dumps(ids)}

    def requeue(self, ids: Sequence[int]) -> Call:
        return self.requeue_statement, {"ids": json.dumps(ids)}

    def _among(self) -> ColumnElement[bool]:
        ids = func.json_each(bindparam("ids", type_=Text)).table_valued(column("value", Integer))
        return self.table.c.id.in_(select(ids.c.value))

    def _json(self, json_text: ColumnElement[str]) -> ColumnElement[Any]:
        # A column of type JSON turns text that is a number into one of 15 digits; bytes it keeps.
        number = json_text.op("GLOB")(literal_column("'[-0-9]*'"))
        changed = cast(cast(json_text, Numeric), Text) != json_text
        return case((and_(number, changed), cast(json_text, LargeBinary)), else_=json_text)

    def _enqueue(self, columns: frozenset[str], *, notify: bool) -> Executable:
        assert not notify
        statement = insert(self.table).values(self._inserted(columns))
        statement = _keep_first(statement)
        return statement.returning(self.table.c.id)

    def _enqueue_many(self, columns: frozenset[str], *, notify: bool) -> Executable:
        assert not notify
        new = func.json_each(bindparam("rows", type_=Text)).table_valued(
            column("key", Integer), column("value", Text), name="new"
        )
        given = {name: func.json_extract(new.c.value, f"$.{name}") for name in sorted(columns)}
        values: dict[str, Any] = {n: v for n, v in given.items() if n not in ("delay", "run_at")}
        values |= {n: self._json(given[n]) for n in ("payload", "meta") if n in given}
        values["run_at"] = self._first_run(given)
        # "WHERE true": without it SQLite reads ON CONFLICT as the condition of a join.
        source = select(*values.values()).select_from(new).where(true()).order_by(new.c.key)
        statement = insert(self.table).from_select(list(values), source, include_defaults=False)
        statement = _keep_first(statement)
        return statement.returning(self.table.c.id, self.table.c.idempotency_key)


def _keep_first(statement: Insert) -> Insert:
    return statement.on_conflict_do_nothing(
        index_elements=["idempotency_key"], index_where=text(KEY_TAKEN)
    )


def _fence(lease: Lease) -> dict[str, Any]:
    return {"lease_id": lease.job_id, "attempt": lease.attempt}


def _portable(value: Any) -> Any:
    """A time as the text that a time column holds."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")
    return value
