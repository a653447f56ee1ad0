"""A finished job that is made pending again although its idempotency key has a new owner."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError

from sqlalchemy_jobs import (
    AsyncJobSession,
    Job,
    JobContext,
    JobSession,
    Tasks,
    requeue,
    requeue_async,
)
from tests.engines import make_empty_tables, open_engine
from tests.enqueue_tools import change, counted, plain_engine, rows
from tests.workers import ON_POSTGRES, jobs_on, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tests.conftest import Database
    from tests.workers import Jobs


@pytest.fixture(params=ON_POSTGRES)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver of PostgreSQL."""
    yield from jobs_on(request)


def failed(engine: Engine, *keys: str | None) -> list[int]:
    """Enqueue a job a key, one after the other, so that each has failed before the next."""
    ids: list[int] = []
    for key in keys:
        with JobSession(engine) as session, session.begin():
            job_id = session.enqueue("t", {"key": key}, idempotency_key=key)
        assert job_id is not None
        change(engine.url, "UPDATE {jobs} SET status = 'failed' WHERE id = :id", id=job_id)
        ids.append(job_id)
    return ids


def newer(engine: Engine, key: str) -> int:
    """Enqueue the job that has the key now."""
    with JobSession(engine) as session, session.begin():
        job_id = session.enqueue("newer", idempotency_key=key)
    assert job_id is not None
    return job_id


def waiting_for_a_lock(database: Database) -> bool:
    """Whether a statement in the database waits for another transaction."""
    ((count,),) = database.cluster.psql(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s",
        parameters=[database.name],
    )
    return bool(count)


def test_a_failed_job_whose_key_is_taken_stays_failed_and_disturbs_nobody(jobs: Jobs) -> None:
    """Case 08: neither requeue nor a plain UPDATE takes a key from its new owner, the caller's
    transaction goes on, and so does the worker; once the key is free, the job is requeued.
    """
    tasks = Tasks()
    broken = True

    @tasks.task("charge", max_attempts=1)
    async def charge(job: JobContext) -> None:
        if broken:
            raise ValueError(job.payload)

    with jobs.worker(tasks, safety_interval=0.2) as running:
        first = jobs.enqueue("charge", "first", idempotency_key="order 7")
        assert jobs.finished(first).status == "failed"
        second = jobs.enqueue("charge", "second", idempotency_key="order 7", delay=3600)
        before = jobs.execute("SELECT * FROM jobs.jobs ORDER BY id")
        by_hand = update(Job).where(Job.id == first).values(status="pending")
        with jobs.session.begin() as session:
            assert requeue(session, first) == []
            refused = pytest.raises(IntegrityError, match="jobs_idempotency_key")
            with refused, session.begin_nested():
                session.execute(by_hand)
            beside = session.enqueue("charge", "beside", max_attempts=1)
        assert beside is not None
        assert jobs.finished(beside).status == "failed"
        after = jobs.execute("SELECT * FROM jobs.jobs WHERE id <> :id ORDER BY id", id=beside)
        assert after == before
        broken = False
        jobs.execute("UPDATE jobs.jobs SET run_at = now() WHERE id = :id", id=second)
        assert jobs.finished(second).status == "succeeded"
        with jobs.session.begin() as session:
            assert requeue(session, first) == [first]
        again = jobs.finished(first)
        assert (again.status, again.attempts, len(again.errors)) == ("succeeded", 2, 1)
        assert running.log.of("broke") == []


def test_one_taken_key_does_not_stop_nine_others(sync_engine: Engine) -> None:
    """Case 08: of ten failed jobs, the one whose key a new job holds is left out, and the new one
    is not touched.
    """
    ids = failed(sync_engine, *(f"k{i}" for i in range(10)))
    owner = newer(sync_engine, "k4")
    before = rows(sync_engine.url)[-1]
    with JobSession(sync_engine) as session, session.begin():
        with counted(sync_engine) as sent:
            assert sorted(requeue(session, ids)) == [*ids[:4], *ids[5:]]
        assert len([statement for statement in sent if "UPDATE" in statement]) == 1
        assert requeue(session, ids[4]) == []
        session.enqueue("the transaction goes on")
    found = dict(rows(sync_engine.url, Job.id, Job.status))
    assert found.pop(ids[4]) == "failed"
    assert set(found.values()) == {"pending"}
    assert len(found) == 11
    assert [row for row in rows(sync_engine.url) if row.id == owner] == [before]


def test_of_two_with_one_key_the_older_is_requeued(sync_engine: Engine) -> None:
    """Case 08: of two jobs that had the key one after the other one gets it back, and the rest of
    the bulk is not harmed.
    """
    ids = failed(sync_engine, "same", "other", "same", None)
    with JobSession(sync_engine) as session, session.begin():
        session.enqueue("before")
        assert sorted(requeue(session, ids)) == [ids[0], ids[1], ids[3]]
        session.enqueue("after")
    assert rows(sync_engine.url, Job.status)[:4] == ["pending", "pending", "failed", "pending"]
    assert rows(sync_engine.url, Job.task)[4:] == ["before", "after"]


async def test_async_sessions_requeue_by_the_same_rule(async_engine: AsyncEngine) -> None:
    """Case 08: through an async session a collision harms neither the bulk nor the transaction."""
    ids = failed(plain_engine(async_engine.url), "same", "taken", "same", None)
    newer(plain_engine(async_engine.url), "taken")
    async with AsyncJobSession(async_engine) as session, session.begin():
        await session.enqueue("before")
        assert sorted(await requeue_async(session, ids)) == [ids[0], ids[3]]
        await session.enqueue("after")
        assert await session.scalar(select(Job.status).where(Job.id == ids[1])) == "failed"
    statuses = rows(async_engine.url, Job.status)
    assert statuses == ["pending", "failed", "failed", *["pending"] * 4]


def test_a_key_taken_in_this_moment_is_waited_for(database: Database) -> None:
    """Case 08: if another transaction commits the key while we wait for it, the job is left out."""
    make_empty_tables(database.url("psycopg"))
    with open_engine(database.url("psycopg")) as engine:
        ids = failed(engine, "a", "k")
        with JobSession(engine) as holder, JobSession(engine) as session:
            holder.enqueue("holder", idempotency_key="k")
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(requeue, session, ids)
                wait_until(lambda: waiting_for_a_lock(database))
                holder.commit()
                assert waiting.result(60) == ids[:1]
            session.commit()
        assert rows(engine.url, Job.status) == ["pending", "failed", "pending"]


@pytest.mark.parametrize("first_ends", ["commit", "rollback"])
def test_two_who_requeue_jobs_of_one_key_at_once(database: Database, first_ends: str) -> None:
    """Case 08: the second waits for the first, and gets the key if that one rolled back."""
    make_empty_tables(database.url("psycopg"))
    with open_engine(database.url("psycopg")) as engine:
        ids = failed(engine, "same", "same")
        with JobSession(engine) as one, JobSession(engine) as two:
            assert requeue(one, ids[0]) == ids[:1]
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(requeue, two, ids[1])
                wait_until(lambda: waiting_for_a_lock(database))
                getattr(one, first_ends)()
                got = waiting.result(60)
            two.enqueue("the transaction goes on")
            two.commit()
        kept = first_ends == "commit"
        assert got == ([] if kept else ids[1:])
        expected = ["pending", "failed"] if kept else ["failed", "pending"]
        assert rows(engine.url, Job.status) == [*expected, "pending"]
