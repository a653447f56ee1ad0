"""Long transactions, retention in bulk, attempts without end, texts and payloads of any size."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from sqlalchemy_jobs import JobContext, PayloadError, Tasks
from tests.faults.fleets import quick_tasks
from tests.workers import ON_POSTGRES, Jobs, jobs_on, on_drivers, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

OUR_TRANSACTIONS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND backend_type = 'client backend'
    AND xact_start < clock_timestamp() - interval '0.3 seconds'
"""
DAY = 86_400


@pytest.fixture(params=ON_POSTGRES)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """An empty table and workers of each driver."""
    yield from jobs_on(request)


def test_no_transaction_stays_open_while_a_handler_runs(jobs: Jobs) -> None:
    """Case 54: no backend of a worker is in a transaction meanwhile, so vacuum is never stopped."""
    tasks, begun = Tasks(), list[int]()

    def slow(job: JobContext) -> None:
        begun.append(job.id)
        job.cancelled.wait(1.0)

    tasks.register(slow, "slow")
    with jobs.worker(tasks, concurrency=2, visibility_timeout=2):
        job_ids = [jobs.enqueue("slow") for _ in range(2)]
        wait_until(lambda: len(begun) == 2)
        seen = list[int]()
        while jobs.unfinished():
            seen += [count for (count,) in jobs.execute(OUR_TRANSACTIONS)]
            time.sleep(0.05)
        assert len(seen) > 3, "it was looked while handlers ran"
        assert not any(seen)
        for job_id in job_ids:
            assert jobs.finished(job_id).status == "succeeded"


@on_drivers("psycopg", "asyncpg")
def test_a_held_snapshot_does_not_stop_the_queue(jobs: Jobs) -> None:
    """Case 54: while somebody holds a snapshot, jobs are claimed, run, retried and recorded."""
    with jobs.engine.connect() as holder:
        holder = holder.execution_options(isolation_level="REPEATABLE READ")  # noqa: PLW2901
        holder.execute(text("SELECT count(*) FROM jobs.jobs")).all()
        with jobs.session.begin() as session:
            session.execute(
                text(
                    "INSERT INTO jobs.jobs (task) SELECT 'quick' FROM generate_series(1, 3000) AS n"
                )
            )
        summary = jobs.drain(quick_tasks(), concurrency=50).summary
        assert summary is not None
        assert summary.succeeded == 3000
        assert not jobs.unfinished()


def test_two_workers_prune_in_batches_and_leave_what_is_young(jobs: Jobs) -> None:
    """Case 55: half a week's rows go in bounded statements, without a deadlock; others stay."""
    jobs.execute(
        "INSERT INTO jobs.jobs (task, status, updated_at) SELECT 'old', 'succeeded',"
        " now() - interval '9 days' FROM generate_series(1, 7500) AS n"
    )
    young = jobs.execute(
        "INSERT INTO jobs.jobs (task, status, updated_at) SELECT 'young', status,"
        " now() - interval '1 day'"
        " FROM (VALUES ('succeeded'), ('failed'), ('cancelled')) AS s (status)"
        " RETURNING id"
    )
    deleted = "SELECT count(*) FROM jobs.jobs WHERE task = 'old'"
    with jobs.worker(quick_tasks()) as one, jobs.worker(quick_tasks()) as two:
        wait_until(lambda: jobs.execute(deleted)[0][0] == 0)
        for running in (one, two):
            assert not running.log.of("broke")
    assert [job.id for job in jobs.all()] == [job_id for (job_id,) in young]


def test_the_nine_hundredth_attempt_waits_an_hour_at_most(jobs: Jobs) -> None:
    """Case 56: no attempt overflows the back-off, and a back-off that is no delay costs none."""
    tasks = Tasks()

    def fails(_: JobContext) -> None:
        message = "again"
        raise ValueError(message)

    for name, backoff in {
        "default": None,
        "infinite": lambda _: float("inf"),
        "negative": lambda _: -1.0,
        "nothing": lambda _: None,
        "raising": lambda _: 1 / 0,
    }.items():
        odd: Any = backoff
        tasks.register(fails, name, backoff=odd)
    job_ids = {
        name: jobs.enqueue(name, max_attempts=1000)
        for name in ("default", "infinite", "negative", "nothing", "raising")
    }
    jobs.execute("UPDATE jobs.jobs SET attempts = 899")
    jobs.drain(tasks)
    for job_id in job_ids.values():
        job = jobs.job(job_id)
        assert (job.status, job.attempts, len(job.errors)) == ("pending", 900, 1)
    (waits,) = jobs.execute(
        "SELECT max(run_at - now()) <= interval '1 hour', min(run_at - now()) > interval '0'"
        " FROM jobs.jobs WHERE errors <> '[]'"
    )
    assert all(waits)


@on_drivers("psycopg", "asyncpg")
def test_an_error_of_fifty_megabytes_is_cut(jobs: Jobs) -> None:
    """Case 57: the row gets 4,000 characters, and the worker does not keep the rest."""
    tasks, alive = Tasks(), list[int]()

    class Huge(Exception):  # noqa: N818 - as users name them
        def __del__(self) -> None:
            alive.append(-1)

    def fails(_: JobContext) -> None:
        alive.append(1)
        raise Huge("x" * 50_000_000)

    tasks.register(fails, "huge")
    with jobs.worker(tasks):
        job = jobs.finished(jobs.enqueue("huge", max_attempts=1))
        assert job.status == "failed"
        assert job.last_error is not None
        assert len(job.last_error) <= 4000
        assert job.last_error == job.errors[-1]["error"]

        def gone() -> bool:
            gc.collect()
            return sum(alive) == 0

        wait_until(gone)


def test_a_payload_of_sixteen_megabytes_arrives_and_a_larger_one_is_refused(jobs: Jobs) -> None:
    """Case 58: the bound is told before any SQL; a claim reads no payload that it does not take."""
    with jobs.session.begin() as session:
        with pytest.raises(PayloadError, match="payload: 20000002 characters of JSON, more than"):
            session.enqueue("huge", "x" * 20_000_000)
        assert not session.in_transaction() or session.scalar(text("SELECT 1")) == 1
    jobs.enqueue("huge", "x" * 16_000_000, priority=2)
    small = [jobs.enqueue("small") for _ in range(20)]
    ((toast,),) = jobs.execute(
        "SELECT CAST(CAST(reltoastrelid AS regclass) AS text) FROM pg_class"
        " WHERE oid = CAST('jobs.jobs' AS regclass)"
    )
    blocks = f"SELECT pg_stat_get_blocks_fetched(CAST('{toast}' AS regclass))"
    before = jobs.execute(blocks)
    jobs.drain(quick_tasks("small"))
    assert all(jobs.job(job_id).status == "succeeded" for job_id in small)
    assert jobs.execute(blocks) == before, "no part of the large payload was read"
    tasks, sizes = Tasks(), list[int]()
    tasks.register(lambda job: sizes.append(len(job.payload)), "huge")
    jobs.drain(tasks)
    assert sizes == [16_000_000]
    wait_until(lambda: jobs.execute(blocks) > before, within=15)
