"""AUTOCOMMIT in all its forms is refused, unless it is asked for."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from sqlalchemy_jobs import (
    AsyncJobSession,
    AutocommitError,
    Job,
    JobSession,
    NewJob,
    cancel,
    enqueue,
    enqueue_async,
    enqueue_many,
    requeue,
)
from tests.enqueue_tools import begin_by_hand, change, counted, listening, rows

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from sqlalchemy import URL, Engine

LEVEL: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}


def _driver_level(url: URL) -> dict[str, Any]:
    """What a driver itself calls it; asyncpg has no such setting."""
    sqlite = url.get_backend_name() == "sqlite"
    return {"connect_args": {"isolation_level": None} if sqlite else {"autocommit": True}}


def _forms(url: URL) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name: options of the engine, and execution options on top."""
    forms: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "isolation_level": (LEVEL, {}),
        "execution_options of create_engine": ({"execution_options": LEVEL}, {}),
        "execution_options of an engine": ({}, LEVEL),
        "driver": (_driver_level(url), {}),
    }
    if url.get_driver_name() == "asyncpg":
        del forms["driver"]
    return forms


@contextmanager
def _engines(url: URL) -> Generator[list[tuple[str, Engine]]]:
    engines: list[tuple[str, Engine]] = [
        (name, create_engine(url, poolclass=NullPool, **options).execution_options(**execution))
        for name, (options, execution) in _forms(url).items()
    ]
    try:
        yield engines
    finally:
        for _, engine in engines:
            engine.dispose()


@asynccontextmanager
async def _async_engines(url: URL) -> AsyncGenerator[list[tuple[str, AsyncEngine]]]:
    yield [
        (
            name,
            create_async_engine(url, poolclass=NullPool, **options).execution_options(**execution),
        )
        for name, (options, execution) in _forms(url).items()
    ]


def test_every_form_of_autocommit_is_refused(sync_engine: Engine) -> None:
    """A job that would survive the caller's rollback is not stored."""
    with _engines(sync_engine.url) as engines:
        for name, engine in engines:
            with counted(engine) as sent, JobSession(engine) as session:
                with pytest.raises(AutocommitError, match="allow_autocommit=True"):
                    session.enqueue("t")
                with pytest.raises(AutocommitError):
                    session.enqueue_many([NewJob("t")])
                with engine.connect() as connection:
                    with pytest.raises(AutocommitError):
                        enqueue(connection, "t")
                    with connection.begin(), pytest.raises(AutocommitError):
                        enqueue_many(connection, [NewJob("t")])
            assert (name, [text for text in sent if "INSERT" in text]) == (name, [])
    assert rows(sync_engine.url) == []


def test_autocommit_of_one_transaction_is_refused(sync_engine: Engine) -> None:
    """It is also noticed where only a session, or a connection, is switched to it."""
    with JobSession(sync_engine) as session:
        session.connection(execution_options=LEVEL)
        with pytest.raises(AutocommitError):
            session.enqueue("t")
    for session in (
        JobSession(sync_engine, execution_options=LEVEL),
        JobSession(sync_engine.execution_options(**LEVEL)),
    ):
        with session, pytest.raises(AutocommitError):
            session.enqueue("t")
    with sync_engine.connect() as connection:
        connection.execution_options(**LEVEL)
        with pytest.raises(AutocommitError):
            enqueue(connection, "t")
    with JobSession(sync_engine) as session, session.begin():
        session.enqueue("transactional again")
    assert rows(sync_engine.url, Job.task) == ["transactional again"]


async def test_every_form_is_refused_on_async_drivers(async_engine: AsyncEngine) -> None:
    """asyncpg, psycopg and aiosqlite alike."""
    async with _async_engines(async_engine.url) as engines:
        for name, engine in engines:
            async with AsyncJobSession(engine) as session:
                with pytest.raises(AutocommitError):
                    await session.enqueue(name)
            async with engine.connect() as connection:
                with pytest.raises(AutocommitError):
                    await enqueue_async(connection, name)
            async with AsyncJobSession(engine) as session:
                await session.enqueue(name, allow_autocommit=True)
                await session.rollback()
        assert rows(async_engine.url, Job.task) == [name for name, _ in engines]


def test_whoever_asks_for_it_gets_it(sync_engine: Engine) -> None:
    """With allow_autocommit a job is there at once, told at once, and survives a rollback."""
    with _engines(sync_engine.url) as engines, listening(sync_engine) as heard:
        for number, (name, engine) in enumerate(engines):
            with JobSession(engine) as session:
                session.enqueue(name, allow_autocommit=True)
                session.enqueue_many([NewJob("many")], allow_autocommit=True)
                assert len(rows(sync_engine.url)) == 2 * number + 2
                assert heard.notified() in (sorted([name, "many"]), None)
                session.rollback()
        assert len(rows(sync_engine.url)) == 2 * len(engines)


def test_cancel_and_requeue_work_in_autocommit(sync_engine: Engine) -> None:
    """Operators' changes need no transaction: each is complete in itself."""
    with JobSession(sync_engine) as session, session.begin():
        ids = session.enqueue_many([NewJob("t", idempotency_key=key) for key in ("a", "b")])
    found = [job_id or 0 for job_id in ids]
    change(sync_engine.url, "UPDATE {jobs} SET status = 'failed'")
    change(sync_engine.url, "UPDATE {jobs} SET idempotency_key = 'same'")
    with _engines(sync_engine.url) as engines:
        for _, engine in engines:
            with JobSession(engine) as session:
                assert requeue(session, found) == found[:1]  # they share a key by now
                session.rollback()
                assert cancel(session, found) == found[:1]
                session.rollback()
    assert rows(sync_engine.url, Job.status) == ["cancelled", "failed"]


@pytest.mark.drivers("sqlite")
def test_transactions_begun_by_hand_are_no_autocommit(sync_engine: Engine) -> None:
    """SQLAlchemy's recipe for SQLite switches the driver's own off, and is accepted."""
    engine = create_engine(sync_engine.url, poolclass=NullPool)
    begin_by_hand(engine)
    with JobSession(engine) as session:
        session.enqueue("a")
        session.commit()
        session.enqueue("b")
        session.rollback()
    with engine.connect() as connection:
        enqueue(connection, "c")
        connection.commit()
        enqueue(connection, "d")
        connection.rollback()
    assert rows(sync_engine.url, Job.task) == ["a", "c"]


@pytest.mark.drivers("psycopg")
def test_a_listener_that_sets_autocommit_is_noticed(sync_engine: Engine) -> None:
    """What counts is the driver's connection, whoever changed it."""
    engine = create_engine(sync_engine.url, poolclass=NullPool)

    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.autocommit = True

    with JobSession(engine) as session, pytest.raises(AutocommitError):
        session.enqueue("t")
