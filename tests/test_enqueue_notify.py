"""When workers are told: with the commit, after it, or not at all; two-phase transactions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlalchemy_jobs import (
    AsyncJobSession,
    Job,
    JobSession,
    JobSessionMixin,
    NewJob,
    enqueue,
    enqueue_async,
    requeue,
)
from sqlalchemy_jobs._channel import channel_of
from sqlalchemy_jobs._wake import register
from tests.engines import make_empty_tables, open_async_engine, open_engine
from tests.enqueue_tools import change, counted, listening, rows

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tests.conftest import Database

ONE_CONNECTION: dict[str, Any] = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2}
AFTER: dict[str, Any] = {"notify": "after_commit"}


def _notifying(sent: list[str]) -> list[str]:
    return [statement for statement in sent if "pg_notify" in statement]


def test_by_default_the_notice_rides_in_the_insert(database: Database) -> None:
    """One statement inserts and notifies; a taken key notifies nobody."""
    with _opened(database) as engine, listening(engine) as heard, counted(engine) as sent:
        with JobSession(engine) as session, session.begin():
            session.enqueue("t", idempotency_key="k")
            session.enqueue("other", idempotency_key="k")
        assert len(sent) == len(_notifying(sent)) == 2
        assert heard.notified() == ["t"]


def test_after_the_commit_the_notice_is_a_statement_of_its_own(database: Database) -> None:
    """The insert notifies nobody; what follows the commit does, on a pool of one connection."""
    with _opened(database) as engine, listening(engine) as heard, counted(engine) as sent:
        with JobSession(engine) as session:
            session.enqueue("a", **AFTER)
            session.enqueue("a", **AFTER)
            session.enqueue_many([NewJob("b"), NewJob("c")], **AFTER)
            assert _notifying(sent) == []
            session.commit()
        assert len(_notifying(sent)) == 3
        assert heard.notified() == ["a", "b", "c"]
        assert rows(engine.url, Job.task) == ["a", "a", "b", "c"]


def test_after_the_commit_means_never_without_it(database: Database) -> None:
    """A rollback, of a savepoint too, forgets the notice; the next transaction starts anew."""
    with _opened(database) as engine, listening(engine) as heard, JobSession(engine) as session:
        session.enqueue("rolled back", **AFTER)
        session.rollback()
        session.enqueue("outer", **AFTER)
        savepoint = session.begin_nested()
        session.enqueue("inner", **AFTER)
        savepoint.rollback()
        with session.begin_nested(), session.begin_nested():
            session.enqueue("kept", **AFTER)
        session.commit()
        assert heard.notified() == ["kept", "outer"]
        session.enqueue("closed", **AFTER)
        session.close()
        session.execute(text("SELECT 1"))
        session.commit()
        assert heard.notified() == []


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_after_the_commit_of_an_async_session(database: Database, driver: Any) -> None:
    """The same through async drivers, where the pool has one connection as well."""
    make_empty_tables(database.url("psycopg"))
    async with open_async_engine(database.url(driver), **ONE_CONNECTION) as engine:
        with listening(engine) as heard:
            async with AsyncJobSession(engine) as session:
                await session.enqueue("a", **AFTER)
                await session.commit()
                await session.enqueue("b", **AFTER)
                await session.rollback()
            async with AsyncSession(engine) as plain, plain.begin():
                await enqueue_async(plain, "c", **AFTER)
            assert heard.notified() == ["a", "c"]


def test_a_notice_that_cannot_be_sent_is_logged(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit has happened, so its caller gets no error, and the job is there."""
    with _opened(database) as engine, JobSession(engine) as session:

        def fail(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if "pg_notify" in statement:
                raise ConnectionRefusedError

        event.listen(engine, "before_cursor_execute", fail)
        with caplog.at_level(logging.ERROR, "sqlalchemy_jobs"):
            session.enqueue("t", **AFTER)
            session.commit()
        event.remove(engine, "before_cursor_execute", fail)
        assert [record.getMessage() for record in caplog.records] == [
            "a notification could not be sent; workers find the job by polling"
        ]
        assert rows(engine.url, Job.task) == ["t"]


def test_nobody_is_notified_if_asked_so(database: Database) -> None:
    """With notify=False, only a worker in the same process learns of the job."""
    with _opened(database) as engine, listening(engine) as heard, counted(engine) as sent:
        with JobSession(engine) as session, session.begin():
            session.enqueue("t", notify=False)
            session.enqueue_many([NewJob("u")], notify=False)
        assert _notifying(sent) == []
        assert heard.notified() == []
        assert heard.wakes == 1


def test_a_session_class_sets_its_own_default(database: Database) -> None:
    """`job_notify` counts where a call says nothing, and a call may say otherwise."""

    class Quiet(JobSessionMixin, Session):
        job_notify = False

    with _opened(database) as engine, listening(engine) as heard:
        with Quiet(engine) as session, session.begin():
            session.enqueue("quiet")
            session.enqueue_many([NewJob("quiet")])
            session.enqueue("loud", notify="commit")
        assert heard.notified() == ["loud"]


def test_where_no_session_sees_the_commit_the_notice_rides_in_the_insert(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """On a Connection, or in a session bound to one, after_commit falls back to commit."""
    with _opened(database) as engine, listening(engine) as heard:
        with engine.begin() as connection:
            enqueue(connection, "bare", **AFTER)
        assert heard.notified() == ["bare"]
        with engine.connect() as connection, connection.begin() as outer:
            with JobSession(connection, join_transaction_mode="create_savepoint") as session:
                session.enqueue("joined", **AFTER)
                session.commit()  # would wait for a second connection in vain
            outer.rollback()
        assert heard.notified() == []
        assert caplog.records == []
        assert rows(engine.url, Job.task) == ["bare"]


def test_a_failing_commit_tells_nobody(database: Database) -> None:
    """What the server refuses at the commit was never enqueued."""
    with _opened(database) as engine, listening(engine) as heard:
        with JobSession(engine) as session:
            session.execute(
                text("CREATE TEMP TABLE t (i int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
            )
            session.execute(text("INSERT INTO t VALUES (1), (1)"))
            session.enqueue("a")
            session.enqueue("b", **AFTER)
            with pytest.raises(Exception, match="duplicate key"):
                session.commit()
        assert heard.notified() == []
        assert heard.wakes == 0


def test_requeue_tells_workers_too(sync_engine: Engine) -> None:
    """A job that gets another attempt wakes workers with the commit, and not without it."""
    with JobSession(sync_engine) as session, listening(sync_engine) as heard:
        with session.begin():
            job_id = session.enqueue("t")
        change(sync_engine.url, "UPDATE {jobs} SET status = 'failed'")
        heard.notified()
        heard.wakes = 0
        requeue(session, job_id or 0)
        session.rollback()
        assert heard.notified() in ([], None)
        assert heard.wakes == 0
        requeue(session, job_id or 0)
        session.commit()
        assert heard.notified() in (["t"], None)
        assert heard.wakes == 1


def test_a_job_enqueued_while_flushing_is_told_with_the_commit(sync_engine: Engine) -> None:
    """Hooks of the session may enqueue; the wake-up waits for the transaction's end."""
    sessions = sessionmaker(sync_engine, class_=JobSession)

    def after_flush(session: Any, _: Any) -> None:
        if not session.info.get("done"):
            session.info["done"] = True
            enqueue(session, "hook")

    event.listen(sessions, "after_flush", after_flush)
    with listening(sync_engine) as heard, sessions() as session:
        session.add(Job(task="orm", payload=None))
        session.flush()
        assert heard.wakes == 0
        session.commit()
        assert heard.wakes == 1
    assert sorted(rows(sync_engine.url, Job.task)) == ["hook", "orm"]


def test_scoped_sessions_keep_their_wake_ups_apart(sync_engine: Engine) -> None:
    """The commit of one session does not tell of another's open transaction."""
    scoped = scoped_session(sessionmaker(sync_engine, class_=JobSession))
    with listening(sync_engine) as heard:
        with JobSession(sync_engine) as other:
            if sync_engine.dialect.name == "postgresql":  # SQLite has one writer at a time
                enqueue(scoped, "open")
            other.enqueue("done")
            other.commit()
            assert heard.notified() in (["done"], None)
        scoped.remove()
        assert heard.notified() in ([], None)
        assert heard.wakes == 1


async def test_an_async_wake_up_comes_after_the_commit(async_engine: AsyncEngine) -> None:
    """When a worker of this process is woken, another connection already sees the row."""
    seen: list[Any] = []
    table: Any = Job.__table__
    channel = channel_of(async_engine.sync_engine, table)
    end = register(channel, lambda: seen.append(rows(async_engine.url, Job.task)))
    try:
        async with AsyncJobSession(async_engine) as session, session.begin():
            await session.enqueue("t")
    finally:
        end()
    assert seen == [["t"]]


def _opened(database: Database) -> Any:
    make_empty_tables(database.url("psycopg"))
    return open_engine(database.url("psycopg"), **ONE_CONNECTION)
