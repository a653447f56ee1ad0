"""Points in time and the database's clock, on every database."""

from __future__ import annotations

from datetime import UTC as _UTC
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Float, bindparam, cast, create_engine, literal, make_url, null, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import CompileError, StatementError, UnsupportedCompilationError

from sqlalchemy_jobs.sqltypes import (
    UTC,
    at_microseconds,
    created_now,
    db_after,
    db_now,
    errors_appended,
    microseconds,
    seconds_since,
)
from tests.rows import JOBS, Queue, open_queue

if TYPE_CHECKING:
    from collections.abc import Generator

    from sqlalchemy import ColumnElement, Engine

POSTGRES = pytest.mark.drivers("psycopg")
SUMMER = timezone(timedelta(hours=5, minutes=45))


@pytest.fixture
def queue(sync_engine: Engine) -> Generator[Queue]:
    """The jobs table, empty."""
    with open_queue(sync_engine) as queue:
        yield queue


def value(queue: Queue, expression: ColumnElement[Any]) -> Any:
    """What the database makes of an expression."""
    return queue.connection.execute(select(expression.label("value"))).scalar_one()


# --- the type ----------------------------------------------------------------------------------


def test_a_naive_datetime_is_refused(queue: Queue) -> None:
    """A datetime without a zone names no instant, so it never reaches the database."""
    with pytest.raises(StatementError, match="naive datetime"):
        queue.add(run_at=datetime(2030, 1, 1))  # noqa: DTZ001 - that is the fault


@pytest.mark.parametrize(
    "at",
    [
        datetime(2030, 1, 1, 12, 30, 0, 1, tzinfo=_UTC),
        datetime(2030, 1, 1, 12, 30, tzinfo=SUMMER),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=_UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=_UTC),
        datetime(1, 1, 1, tzinfo=_UTC),
    ],
    ids=str,
)
def test_an_instant_comes_back_in_utc(queue: Queue, at: datetime) -> None:
    """To the microsecond the same instant, whatever its zone was, and always in UTC."""
    found = queue.row(queue.add(run_at=at))["run_at"]
    assert found == at
    assert found.tzinfo is _UTC


def test_the_sessions_time_zone_changes_nothing(queue: Queue) -> None:
    """A connection with a time zone of its own gives and takes the same instants."""
    if queue.connection.dialect.name == "postgresql":
        queue.run("SET TIME ZONE 'Asia/Kathmandu'")
    at = datetime(2030, 1, 1, 12, tzinfo=_UTC)
    found = queue.row(queue.add(run_at=at))["run_at"]
    assert (found, found.tzinfo) == (at, _UTC)


def test_none_stays_none(queue: Queue) -> None:
    """An empty time is empty in both directions."""
    assert queue.row(queue.add(started_at=None))["started_at"] is None


@given(
    st.lists(
        st.datetimes(
            min_value=datetime(1970, 1, 1),  # noqa: DTZ001 - hypothesis adds the zone
            timezones=st.sampled_from([_UTC, SUMMER, timezone(timedelta(hours=-11))]),
        ),
        min_size=2,
        max_size=5,
    )
)
def test_times_on_sqlite_sort_as_text(times: list[datetime]) -> None:
    """As SQLite compares text, the text of a later instant must be greater."""
    process = UTC().dialect_impl(sqlite.dialect()).bind_processor(sqlite.dialect())
    assert process is not None
    assert [process(at) for at in sorted(times)] == sorted(map(process, times))


# --- the clock ---------------------------------------------------------------------------------


def test_the_clock_is_the_statements(queue: Queue) -> None:
    """The clock goes on from statement to statement, also within a transaction, in UTC."""
    first = value(queue, db_now())
    second = value(queue, db_now())
    assert first.tzinfo is _UTC
    assert timedelta(0) <= second - first < timedelta(minutes=1)


@POSTGRES
@pytest.mark.every_postgres
def test_the_clock_goes_on_within_a_transaction(sync_engine: Engine) -> None:
    """A long transaction's later statement sees a later time, but within one it stands still."""
    with sync_engine.connect() as connection, connection.begin():
        first = connection.execute(select(db_now().label("now"))).scalar_one()
        connection.execute(text("SELECT pg_sleep(0.02)"))
        second, same = connection.execute(
            select(db_now().label("now"), db_now().label("again"))
        ).one()
        assert second - first >= timedelta(milliseconds=20)
        assert second == same
        created = connection.execute(select(created_now().label("at"))).scalar_one()
        assert created <= first, "the default is the transaction's start"


@pytest.mark.parametrize("delay", [0.0, 0.25, 1.5, 3600.0, -7200.5, 1e-5, 315_576_000.0])
def test_a_delay_is_added_in_seconds(queue: Queue, delay: float) -> None:
    """Fractions, negative delays and decades are added to the clock as they are."""
    with queue.clocked() as now:
        found = value(queue, db_after(literal(delay)))
    assert found == now[0].later(delay)


def test_no_delay_is_no_time(queue: Queue) -> None:
    """A null delay gives a null time, which no comparison lets through."""
    delay = cast(bindparam("delay", None, type_=Float), Float)
    assert value(queue, db_after(delay)) is None
    assert value(queue, db_after(-delay)) is None


def test_seconds_between_two_times(queue: Queue) -> None:
    """The difference counts from the first to the second, or to now, in fractional seconds."""
    at = datetime(2030, 1, 1, tzinfo=_UTC)
    later = at + timedelta(days=1, milliseconds=250)
    first, second = literal(at, UTC()), literal(later, UTC())
    assert value(queue, seconds_since(first, second)) == pytest.approx(86400.25, abs=1e-3)
    assert value(queue, seconds_since(second, first)) == pytest.approx(-86400.25, abs=1e-3)
    assert 9.9 < value(queue, seconds_since(db_after(literal(-10.0)))) < 60
    assert isinstance(value(queue, seconds_since(first, second)), float)


def test_seconds_since_null_is_null(queue: Queue) -> None:
    """Without a time there is no distance."""
    assert value(queue, seconds_since(db_now(), cast(null(), UTC()))) is None


@POSTGRES
@pytest.mark.every_postgres
@pytest.mark.parametrize(
    "at",
    [
        datetime(1970, 1, 1, tzinfo=_UTC),
        datetime(2026, 7, 31, 23, 59, 59, 999_999, tzinfo=_UTC),
        datetime(2255, 1, 1, 23, 59, 59, 999_999, tzinfo=_UTC),
    ],
    ids=str,
)
def test_microseconds_are_exact_both_ways(queue: Queue, at: datetime) -> None:
    """A time as a number and back is the same to the microsecond: the lower bound relies on it."""
    number = value(queue, microseconds(literal(at, UTC())))
    assert number == (at - datetime(1970, 1, 1, tzinfo=_UTC)) // timedelta(microseconds=1)
    assert value(queue, at_microseconds(bindparam("n", number))) == at


@POSTGRES
def test_microseconds_of_odd_times(queue: Queue) -> None:
    """Times before 1970 count as 1970, and no number means before everything."""
    early = literal(datetime(1901, 1, 1, tzinfo=_UTC), UTC())
    assert value(queue, microseconds(early)) == 0
    assert value(queue, microseconds(cast(literal("-infinity"), UTC()))) == 0
    before_all = at_microseconds(cast(null(), postgresql.BIGINT))
    assert value(queue, before_all < literal(datetime(1, 1, 1, tzinfo=_UTC), UTC()))


# --- the record of errors ----------------------------------------------------------------------


def test_an_entry_is_appended_at_the_end(queue: Queue) -> None:
    """The new entry names attempt, worker, time and error, behind the earlier ones."""
    job_id = queue.add(errors=[{"attempt": 1, "error": "old"}], attempts=2, last_error="new")
    with queue.clocked() as now:
        appended = errors_appended(JOBS.c.errors, JOBS.c.attempts, literal("w1"), JOBS.c.last_error)
        query = select(appended.label("value")).where(JOBS.c.id == job_id)
        found = queue.connection.execute(query).scalar_one()
    assert [entry["error"] for entry in found] == ["old", "new"]
    assert (found[1]["attempt"], found[1]["worker"]) == (2, "w1")
    assert now[0] == datetime.fromisoformat(found[1]["at"])


# --- dialects ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "element",
    [created_now(), db_now(), db_after(literal(1.0)), seconds_since(db_now())],
    ids=lambda element: type(element).__name__,
)
def test_another_dialect_is_refused_when_compiled(element: ColumnElement[Any]) -> None:
    """A dialect for which no form was written gives an error and not a wrong statement."""
    dialect = make_url("mysql://").get_dialect()()
    with pytest.raises((CompileError, UnsupportedCompilationError)):
        element.compile(dialect=dialect)


@pytest.mark.parametrize(
    "element", [db_now(), db_after(bindparam("d", type_=Float))], ids=["db_now", "db_after"]
)
def test_the_clock_can_be_cached(element: ColumnElement[Any]) -> None:
    """Statements with the clock in them are compiled once, not for each execution."""
    assert select(element)._generate_cache_key() is not None


def test_the_clock_on_postgresql_can_use_an_index() -> None:
    """Comparisons use the statement's clock: the volatile one could not use an index."""
    engine = create_engine("postgresql+psycopg://")
    for element in (db_now(), db_after(literal(1.0)), seconds_since(db_now())):
        sql = str(element.compile(engine))
        assert "statement_timestamp()" in sql
        assert "clock_timestamp" not in sql
