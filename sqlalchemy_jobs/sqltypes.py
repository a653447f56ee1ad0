"""The column type for points in time, and the database's clock as SQL expressions.

The database's clock decides when a job is due and when a lease runs out; nothing compares it with
a clock of an application's host. Dialects without a form here are refused at compile time.
"""

from __future__ import annotations

from datetime import UTC as _UTC
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import JSON, BigInteger, DateTime, Float, Integer, TypeDecorator
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import NullType

from .lifecycle import KEPT_ERRORS

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Dialect
    from sqlalchemy.sql.compiler import SQLCompiler


class UTC(TypeDecorator[datetime]):
    """An aware datetime, given back in UTC.

    SQLite has no time zones: there it is UTC text with six digits of a second, which sorts as
    time does. A naive datetime is refused, for it would mean another instant on every host.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return what the driver is given."""
        if value is None:
            return None
        if value.tzinfo is None:
            message = "a naive datetime names no instant; use datetime.now(timezone.utc)"
            raise ValueError(message)
        value = value.astimezone(_UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - the base class's signature
        """Return the time in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=_UTC) if value.tzinfo is None else value.astimezone(_UTC)


class created_now(FunctionElement[datetime]):  # noqa: N801 - reads as an SQL function
    """The default of a time column: the start of the transaction that writes the row."""

    type = UTC()
    inherit_cache = True


class db_now(FunctionElement[datetime]):  # noqa: N801 - reads as an SQL function
    """The database's clock at the start of the statement.

    Not ``clock_timestamp()``: that one is volatile, so a comparison with it cannot use an index.
    Not ``now()``: that one is as old as the transaction.
    """

    type = UTC()
    inherit_cache = True


class db_after(FunctionElement[datetime]):  # noqa: N801 - reads as an SQL function
    """:class:`db_now` plus the seconds given."""

    type = UTC()
    inherit_cache = True


class seconds_since(FunctionElement[float]):  # noqa: N801 - reads as an SQL function
    """Seconds from the first time to the second (default: :class:`db_now`)."""

    type = Float()
    inherit_cache = True


class element_at(FunctionElement[Any]):  # noqa: N801 - reads as an SQL function
    """``(array)[index]`` for an array that is a parameter, which PostgreSQL wants in brackets."""

    inherit_cache = True

    def __init__(self, array: ColumnElement[Any], index: ColumnElement[int]) -> None:
        kind: Any = array.type  # an ARRAY
        self.type: Any = kind.item_type
        super().__init__(array, index)


_SQLITE_NOW = "strftime('%Y-%m-%d %H:%M:%f000','now')"


@compiles(created_now, "postgresql")
def _(element: created_now, compiler: SQLCompiler, **kw: Any) -> str:  # noqa: ARG001
    return "now()"


@compiles(created_now, "sqlite")
def _(element: created_now, compiler: SQLCompiler, **kw: Any) -> str:  # noqa: ARG001
    return f"({_SQLITE_NOW})"


@compiles(db_now, "postgresql")
def _(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:  # noqa: ARG001
    return "statement_timestamp()"


@compiles(db_now, "sqlite")
def _(element: db_now, compiler: SQLCompiler, **kw: Any) -> str:  # noqa: ARG001
    return _SQLITE_NOW


@compiles(db_after, "postgresql")
def _(element: db_after, compiler: SQLCompiler, **kw: Any) -> str:
    delay = compiler.process(element.clauses, **kw)
    return f"(statement_timestamp() + make_interval(secs => {delay}))"


@compiles(db_after, "sqlite")
def _(element: db_after, compiler: SQLCompiler, **kw: Any) -> str:
    delay = compiler.process(element.clauses, **kw)
    return f"strftime('%Y-%m-%d %H:%M:%f000','now',({delay}) || ' seconds')"


@compiles(seconds_since, "postgresql")
def _(element: seconds_since, compiler: SQLCompiler, **kw: Any) -> str:
    earlier, *later = (compiler.process(clause, **kw) for clause in element.clauses)
    until = later[0] if later else "statement_timestamp()"
    return f"CAST(extract(epoch FROM {until} - {earlier}) AS float8)"


@compiles(seconds_since, "sqlite")
def _(element: seconds_since, compiler: SQLCompiler, **kw: Any) -> str:
    earlier, *later = (compiler.process(clause, **kw) for clause in element.clauses)
    until = later[0] if later else "'now'"
    return f"((julianday({until}) - julianday({earlier})) * 86400.0)"


@compiles(element_at, "postgresql")
def _(element: element_at, compiler: SQLCompiler, **kw: Any) -> str:
    array, index = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({array})[{index}]"


class errors_appended(FunctionElement[Any]):  # noqa: N801 - reads as an SQL function
    """The list of errors with one more entry, cut to the latest few.

    Takes (errors, attempt, worker, error). A list that somebody edited into something else is
    begun anew, for one odd row must not stop a batch.
    """

    type = JSON()
    inherit_cache = True


@compiles(errors_appended, "postgresql")
def _(element: errors_appended, compiler: SQLCompiler, **kw: Any) -> str:
    errors, attempt, worker, error = (compiler.process(c, **kw) for c in element.clauses)
    return (
        f"(CASE WHEN jsonb_typeof({errors}) = 'array' THEN CASE WHEN jsonb_array_length({errors})"
        f" >= {KEPT_ERRORS} THEN {errors} - 0 ELSE {errors} END ELSE CAST('[]' AS jsonb) END)"
        f" || jsonb_build_array(jsonb_build_object('attempt', {attempt},"
        f" 'at', statement_timestamp(), 'worker', {worker}, 'error', CAST({error} AS text)))"
    )


@compiles(errors_appended, "sqlite")
def _(element: errors_appended, compiler: SQLCompiler, **kw: Any) -> str:
    errors, attempt, worker, error = (compiler.process(c, **kw) for c in element.clauses)
    return (
        f"json_insert(CASE WHEN {_is_json(errors)} AND json_type({errors}) = 'array' THEN CASE"
        f" WHEN json_array_length({errors}) >= {KEPT_ERRORS} THEN json_remove({errors}, '$[0]')"
        f" ELSE {errors} END ELSE '[]' END, '$[#]', json_object("
        f"'attempt', CAST({attempt} AS INTEGER), 'at', strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now'),"
        f" 'worker', {worker}, 'error', {error}))"
    )


class errors_kept(FunctionElement[int]):  # noqa: N801 - reads as an SQL function
    """How many errors a list has; none if somebody edited it into something else."""

    type = Integer()
    inherit_cache = True


@compiles(errors_kept, "postgresql")
def _(element: errors_kept, compiler: SQLCompiler, **kw: Any) -> str:
    errors = compiler.process(element.clauses, **kw)
    return (
        f"CASE WHEN jsonb_typeof({errors}) = 'array' THEN jsonb_array_length({errors}) ELSE 0 END"
    )


@compiles(errors_kept, "sqlite")
def _(element: errors_kept, compiler: SQLCompiler, **kw: Any) -> str:
    errors = compiler.process(element.clauses, **kw)
    return f"CASE WHEN {_is_json(errors)} THEN json_array_length({errors}) ELSE 0 END"


def _is_json(column: str) -> str:
    # Bytes may be valid JSON, and are then refused by whatever takes JSON.
    return f"(typeof({column}) = 'text' AND json_valid({column}))"


class microseconds(FunctionElement[int]):  # noqa: N801 - reads as an SQL function
    """A time as whole microseconds since 1970, exactly; times before are taken as 1970."""

    type = BigInteger()
    inherit_cache = True


@compiles(microseconds, "postgresql")
def _(element: microseconds, compiler: SQLCompiler, **kw: Any) -> str:
    at = compiler.process(element.clauses, **kw)
    return f"CAST(extract(epoch FROM greatest({at}, 'epoch')) * 1000000 AS bigint)"


class at_microseconds(FunctionElement[datetime]):  # noqa: N801 - reads as an SQL function
    """The time of :class:`microseconds`, or minus infinity for a null."""

    type = UTC()
    inherit_cache = True


@compiles(at_microseconds, "postgresql")
def _(element: at_microseconds, compiler: SQLCompiler, **kw: Any) -> str:
    at = compiler.process(element.clauses, **kw)
    return (
        "coalesce(CAST('epoch' AS timestamptz)"
        f" + {at} * CAST('1 microsecond' AS interval), '-infinity')"
    )


BUCKETS: Final = 64
"""Tasks share so many marks: a worker of many tasks holds no more locks than that."""

MARK: Final = 1
SILENT: Final = 2
"""Which lock of a bucket: the one that resting workers hold, and the one that enqueuers hold who
found no mark, until their transaction ends."""


def bucket_of(task: str) -> str:
    """Return, as SQL, the bucket of a task."""
    return f"(hashtext({task}) & {BUCKETS - 1})"


def lock_key(channel: str, which: int, bucket: str) -> str:
    """Return, as SQL, the key of an advisory lock."""
    return f"((hashtextextended({channel}, {which}) & -{BUCKETS}) | {bucket})"


class told(FunctionElement[Any]):  # noqa: N801 - reads as an SQL function
    """Notify (channel, task) if a worker of the task rests; ``_bell`` says why none is missed.

    Looked for twice: the second time under the lock that a worker, once it has taken the mark,
    waits for. The first spares that lock where somebody rests anyway. To hold the mark's own lock
    for an instant is how to look for it, so two who look at once may notify for nothing.
    """

    type = NullType()
    inherit_cache = True


@compiles(told, "postgresql")
def _(element: told, compiler: SQLCompiler, **kw: Any) -> str:
    channel, payload = (compiler.process(clause, **kw) for clause in element.clauses)
    mark, silent = (lock_key(channel, which, bucket_of(payload)) for which in (MARK, SILENT))
    tell = f"pg_notify({channel}, {payload})"
    nobody = f"CASE WHEN pg_try_advisory_lock({mark}) THEN pg_advisory_unlock({mark}) END"
    return (
        f"CASE WHEN {nobody} THEN CASE WHEN pg_try_advisory_xact_lock_shared({silent}) THEN"
        f" CASE WHEN {nobody} THEN NULL ELSE {tell} END ELSE {tell} END ELSE {tell} END"
    )
