"""Cancelling and requeueing: which jobs, what changes in them, and whose transaction it is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import scoped_session, sessionmaker

from sqlalchemy_jobs import (
    AsyncJobSession,
    InvalidArgumentError,
    Job,
    JobSession,
    NewJob,
    cancel,
    cancel_async,
    requeue,
    requeue_async,
)
from tests.enqueue_tools import FINISHED_OR_NOT, change, counted, rows

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

CANCELLABLE = ["pending", "delayed", "waiting for a retry", "running"]
REQUEUEABLE = ["failed", "cancelled"]


def _enqueue(engine: Engine, *keys: str | None) -> list[int]:
    with JobSession(engine) as session, session.begin():
        jobs = [session.enqueue("t", {"key": key}, idempotency_key=key) for key in keys]
    return [job_id or 0 for job_id in jobs]


@pytest.mark.parametrize("state", FINISHED_OR_NOT)
def test_unfinished_jobs_can_be_cancelled(sync_engine: Engine, state: str) -> None:
    """A job that has not ended is cancelled and gives up lease and key; others are left alone."""
    (job_id,) = _enqueue(sync_engine, "k")
    change(sync_engine.url, FINISHED_OR_NOT[state])
    (before,) = rows(sync_engine.url)
    with JobSession(sync_engine) as session, session.begin():
        assert cancel(session, job_id) == ([job_id] if state in CANCELLABLE else [])
        assert cancel(session, job_id) == []
        again = session.enqueue("t", idempotency_key="k")
    row, *_ = rows(sync_engine.url)
    assert again is not None
    if state in CANCELLABLE:
        assert (row.status, row.locked_by, row.lease_expires_at) == ("cancelled", None, None)
        assert row.updated_at >= before.updated_at
        assert (row.attempts, row.payload, row.last_error) == (
            before.attempts,
            before.payload,
            before.last_error,
        )
    else:
        assert row == before


@pytest.mark.parametrize("state", FINISHED_OR_NOT)
def test_failed_and_cancelled_jobs_can_be_requeued(sync_engine: Engine, state: str) -> None:
    """They are pending and due again, with an attempt left and their history kept."""
    (job_id,) = _enqueue(sync_engine, "k")
    change(sync_engine.url, "UPDATE {jobs} SET max_attempts = 3, last_error = 'x'")
    change(sync_engine.url, "UPDATE {jobs} SET run_at = '2999-01-01 00:00:00.000000'")
    change(sync_engine.url, FINISHED_OR_NOT[state])
    (before,) = rows(sync_engine.url)
    with JobSession(sync_engine) as session, session.begin():
        assert requeue(session, job_id) == ([job_id] if state in REQUEUEABLE else [])
        assert requeue(session, job_id) == []
    (row,) = rows(sync_engine.url)
    if state not in REQUEUEABLE:
        assert row == before
        return
    assert (row.status, row.attempts, row.last_error) == ("pending", before.attempts, "x")
    assert row.max_attempts == (4 if state == "failed" else 3)
    assert abs(row.run_at - datetime.now(UTC)) < timedelta(minutes=5)


def test_a_requeued_job_whose_bound_was_left_open_gets_an_attempt(sync_engine: Engine) -> None:
    """Without max_attempts in the row, one more than the attempts made so far becomes the bound."""
    (job_id,) = _enqueue(sync_engine, None)
    change(sync_engine.url, "UPDATE {jobs} SET status = 'failed', attempts = 7")
    with JobSession(sync_engine) as session, session.begin():
        assert requeue(session, job_id) == [job_id]
    assert rows(sync_engine.url, Job.attempts, Job.max_attempts) == [(7, 8)]


def test_both_follow_the_callers_transaction(sync_engine: Engine) -> None:
    """A rollback undoes them, even where they are the first statement of the transaction."""
    first, second = _enqueue(sync_engine, None, None)
    change(sync_engine.url, f"UPDATE {{jobs}} SET status = 'failed' WHERE id = {second}")
    with JobSession(sync_engine) as session:
        assert cancel(session, first) == [first]
        session.rollback()
        assert requeue(session, second) == [second]
        session.rollback()
    assert rows(sync_engine.url, Job.status) == ["pending", "failed"]


def test_forty_thousand_ids_are_one_parameter(sync_engine: Engine) -> None:
    """More jobs than a statement may have parameters are cancelled and requeued at once."""
    with JobSession(sync_engine) as session, session.begin():
        ids = [job_id or 0 for job_id in session.enqueue_many([NewJob("t")] * 3)]
        many = list(range(ids[0], ids[0] + 70_000))
        with counted(sync_engine) as sent:
            assert sorted(cancel(session, many)) == ids
            assert sorted(requeue(session, many)) == ids
    assert len([statement for statement in sent if "UPDATE" in statement]) == 2


async def test_async_sessions_and_connections(async_engine: AsyncEngine) -> None:
    """The async functions do the same on every driver, in the caller's transaction."""
    async with AsyncJobSession(async_engine) as session:
        async with session.begin():
            ids = [
                job_id or 0
                for job_id in await session.enqueue_many(
                    [NewJob("t", idempotency_key=f"{i}") for i in range(3)]
                )
            ]
            assert await cancel_async(session, ids[:2]) == ids[:2]
        change(async_engine.url, "UPDATE {jobs} SET idempotency_key = 'same'")
        async with async_engine.begin() as connection:
            assert await requeue_async(connection, ids) == []  # the third holds the key
            assert await cancel_async(connection, ids) == ids[2:]
            assert await requeue_async(connection, ids) == ids[:1]
        assert await cancel_async(session, ids) == ids[:1]
        await session.rollback()
    assert rows(async_engine.url, Job.status) == ["pending", "cancelled", "cancelled"]


def test_ids_are_taken_in_any_form(sync_engine: Engine) -> None:
    """One id, any sequence, twice the same, unknown ones and none; anything else is refused."""
    ids = _enqueue(sync_engine, None, None)
    scoped = scoped_session(sessionmaker(sync_engine))
    assert cancel(scoped, ids[0]) == [ids[0]]
    assert cancel(scoped, (ids[1], ids[1], 10**15)) == [ids[1]]
    assert cancel(scoped, []) == []
    assert requeue(scoped, range(0)) == []
    bad: list[Any] = [True, ["1"], [1.0], [None], "12"]
    for wrong in bad:
        with pytest.raises(InvalidArgumentError, match="whole numbers"):
            cancel(scoped, wrong)
    scoped.commit()
    scoped.remove()


def test_objects_in_the_session_see_the_change_when_refreshed(sync_engine: Engine) -> None:
    """Mapped jobs loaded before keep their values until they are refreshed or expire."""
    (job_id,) = _enqueue(sync_engine, None)
    with JobSession(sync_engine) as session, session.begin():
        job = session.scalars(select(Job).where(Job.id == job_id)).one()
        cancel(session, job.id)
        session.refresh(job)
        assert job.status == "cancelled"
