"""Sessions used as they must not be: SQLAlchemy's own errors, and nothing half-written."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import (
    DBAPIError,
    IntegrityError,
    InvalidRequestError,
    PendingRollbackError,
    ResourceClosedError,
)
from sqlalchemy.orm import sessionmaker

from sqlalchemy_jobs import AsyncJobSession, Job, JobSession, NewJob, enqueue
from tests.enqueue_tools import listening, rows

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine


async def test_a_cancelled_transaction_leaves_no_job(async_engine: AsyncEngine) -> None:
    """A task cancelled between enqueueing and the commit leaves no row and wakes nobody."""

    async def work(session: AsyncJobSession) -> None:
        async with session.begin():
            await session.enqueue("a")
            reached.set()
            await asyncio.sleep(60)

    reached = asyncio.Event()
    with listening(async_engine) as heard:
        async with AsyncJobSession(async_engine) as session:
            task = asyncio.create_task(work(session))
            await asyncio.wait_for(reached.wait(), 30)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await session.enqueue("b")
            await session.commit()
        assert rows(async_engine.url, Job.task) == ["b"]
        assert heard.notified() in (["b"], None)


@pytest.mark.drivers("asyncpg", "psycopg_async")  # SQLite has a single writer
async def test_a_session_for_each_task_is_the_way(async_engine: AsyncEngine) -> None:
    """Tasks with a session each enqueue at once."""

    async def work(number: int) -> None:
        async with AsyncJobSession(async_engine) as session, session.begin():
            await session.enqueue(f"{number}")

    await asyncio.gather(*(work(number) for number in range(8)))
    assert sorted(rows(async_engine.url, Job.task)) == [f"{number}" for number in range(8)]


def test_a_failed_flush_must_be_rolled_back_first(sync_engine: Engine) -> None:
    """A callable payload surfaces the flush's own error; the session then asks for a rollback."""
    with JobSession(sync_engine) as session, listening(sync_engine) as heard:
        session.enqueue("before")
        session.add(Job(task="x" * 201, payload=None))
        with pytest.raises(IntegrityError):
            session.enqueue("t", lambda: {"never": "called"})
        with pytest.raises(PendingRollbackError):
            session.enqueue("t")
        session.rollback()
        session.enqueue("after")
        session.commit()
        assert heard.wakes == 1
    assert rows(sync_engine.url, Job.task) == ["after"]


def test_an_aborted_transaction_stays_aborted(sync_engine: Engine) -> None:
    """Enqueueing never hides that an earlier statement failed."""
    with JobSession(sync_engine) as session:
        session.enqueue("t")
        with pytest.raises(DBAPIError):
            session.execute(text("SELECT nonsense FROM nowhere"))
        if sync_engine.dialect.name == "postgresql":
            with pytest.raises(DBAPIError, match="aborted"):
                session.enqueue("t")
        session.rollback()
    assert rows(sync_engine.url) == []


def test_enqueueing_in_an_after_commit_hook_is_refused(sync_engine: Engine) -> None:
    """There is no transaction any more that the job could belong to."""
    sessions = sessionmaker(sync_engine, class_=JobSession)
    caught: list[BaseException] = []

    def after_commit(session: Any) -> None:
        try:
            session.enqueue("too late")
        except InvalidRequestError as error:
            caught.append(error)

    event.listen(sessions, "after_commit", after_commit)
    with sessions() as session:
        session.enqueue("in time")
        session.commit()
    assert len(caught) == 1
    assert rows(sync_engine.url, Job.task) == ["in time"]


def test_a_mapper_hook_enqueues_on_its_connection(sync_engine: Engine) -> None:
    """In after_insert the connection of the flush is at hand, and the key is known."""

    def after_insert(mapper: Any, connection: Any, target: Job) -> None:
        if target.task == "orm":
            enqueue(connection, "hook", {"id": target.id})

    event.listen(Job, "after_insert", after_insert)
    try:
        with JobSession(sync_engine) as session:
            session.add(Job(task="orm", payload=None))
            session.commit()
            session.add(Job(task="orm", payload=None))
            session.flush()
            session.rollback()
    finally:
        event.remove(Job, "after_insert", after_insert)
    (orm, hook) = rows(sync_engine.url)
    assert (orm.task, hook.task, hook.payload) == ("orm", "hook", {"id": orm.id})


def test_a_closed_connection_says_so(sync_engine: Engine) -> None:
    """SQLAlchemy's own error comes out."""
    with sync_engine.connect() as connection:
        pass
    with pytest.raises(ResourceClosedError):
        enqueue(connection, "t")


def test_jobs_may_be_deleted_and_changed_by_hand(sync_engine: Engine) -> None:
    """Rows are the application's own: a job made as a mapped object is one like any other."""
    with JobSession(sync_engine) as session, session.begin():
        session.add(Job(task="by hand", payload={"a": 1}, idempotency_key="k"))
        session.flush()
        assert session.enqueue("t", idempotency_key="k") is None
        assert session.enqueue_many([NewJob("t", idempotency_key="k")]) == [None]
    (row,) = rows(sync_engine.url)
    assert (row.status, row.attempts, row.max_attempts, row.payload) == (
        "pending",
        0,
        None,
        {"a": 1},
    )
