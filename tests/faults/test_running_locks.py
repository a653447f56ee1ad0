"""A row that somebody else's transaction has locked while a worker holds the job."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from sqlalchemy_jobs import JobContext, Tasks, cancel
from sqlalchemy_jobs._messages import Outcome, Renew, Settle
from tests.rows import Hand, open_queue
from tests.workers import ON_POSTGRES, jobs_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

    from tests.workers import Jobs


@pytest.fixture(params=ON_POSTGRES)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver of PostgreSQL."""
    yield from jobs_on(request)


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """Let handlers that wait for it end, at the latest with the test."""
    event = threading.Event()
    yield event
    event.set()


def holding(go_on: threading.Event) -> Tasks:
    """Tasks that end when the test says so."""
    tasks = Tasks()

    @tasks.task("held")
    def held(job: JobContext) -> None:
        while not (go_on.wait(0.05) or job.cancelled):
            pass

    tasks.register(lambda _: None, "quick")
    return tasks


def test_one_locked_row_costs_no_other_job_its_lease(jobs: Jobs, go_on: threading.Event) -> None:
    """Case 21: while a transaction that cancels one job stays open, the leases of the worker's
    other jobs are renewed, and jobs are claimed, run and recorded.
    """
    with jobs.worker(
        holding(go_on), visibility_timeout=1.5, recovery_interval=0.2, concurrency=4
    ) as running:
        locked, *others = [jobs.enqueue("held") for _ in range(3)]
        for job_id in (locked, *others):
            jobs.wait(job_id, lambda job: job.status == "running")
        with jobs.session.begin() as session:
            assert cancel(session, locked) == [locked]
            running.log.wait_for("row_locked", job_id=locked)
            # Its lease cannot be renewed, and somebody might have it at any moment.
            running.log.wait_for("lease_lost", job_id=locked)
            assert jobs.finished(jobs.enqueue("quick")).status == "succeeded"
        go_on.set()
        for job in map(jobs.finished, others):
            assert (job.status, job.attempts, job.errors) == ("succeeded", 1, [])
        assert (jobs.job(locked).status, jobs.job(locked).attempts) == ("cancelled", 1)
        assert running.log.of("broke", command="renew") == []
        assert len(running.log.of("row_locked")) == 1


def test_one_locked_row_holds_up_no_other_outcome(jobs: Jobs, go_on: threading.Event) -> None:
    """Case 21: outcomes that were to be recorded with that of a locked row wait no longer than a
    statement may take, and its own is recorded when the lock is gone.
    """
    with jobs.worker(holding(go_on), statement_timeout=0.5, concurrency=4) as running:
        ids = [jobs.enqueue("held") for _ in range(4)]
        for job_id in ids:
            jobs.wait(job_id, lambda job: job.status == "running")
        with jobs.session.begin() as session:
            session.execute(
                text("SELECT 1 FROM jobs.jobs WHERE id = :id FOR UPDATE"), {"id": ids[1]}
            )
            go_on.set()
            for job_id in (ids[0], *ids[2:]):
                assert jobs.finished(job_id).status == "succeeded"
            running.log.wait_for("row_locked", job_id=ids[1])
            for _ in range(3):
                assert jobs.finished(jobs.enqueue("quick")).status == "succeeded"
            assert len(running.log.of("broke", command="settle")) <= 1
        assert jobs.finished(ids[1]).status == "succeeded"
    assert {(job.status, job.attempts) for job in jobs.all()} == {("succeeded", 1)}
    assert running.summary is not None
    # The statement that was given up may still record it, when the lock is gone, and be first.
    summary = running.summary
    assert (summary.succeeded + summary.lost, summary.lost <= 1) == (7, True)


@pytest.mark.every_postgres
@pytest.mark.drivers("psycopg")
def test_what_is_locked_is_told_from_what_is_lost(sync_engine: Engine) -> None:
    """Case 21: of many leases one statement renews or settles what it can; what it left is lost,
    or held and locked. A foreign key that points at a job, in an open transaction, locks nothing.
    """
    with open_queue(sync_engine) as queue:
        hand = Hand(queue)
        free, locked, referred = (queue.add_running() for _ in range(3))
        lost = queue.add_running(locked_by="w2")
        leases = (free, locked, referred, lost)
        queue.run("CREATE TABLE notes (job bigint REFERENCES {jobs} (id))")
        try:
            with sync_engine.connect() as other, other.begin() as transaction:
                lock = text("SELECT 1 FROM jobs.jobs WHERE id = :id FOR UPDATE")
                other.execute(lock, {"id": locked.job_id})
                other.execute(text("INSERT INTO notes VALUES (:id)"), {"id": referred.job_id})
                before: dict[int, Any] = queue.rows()
                renewed = hand(Renew(leases))
                assert (renewed.lost, renewed.passed_by) == ({lost.key}, {locked.key})
                moved = [
                    job_id
                    for job_id, row in queue.rows().items()
                    if row["lease_expires_at"] > before[job_id]["lease_expires_at"]
                ]
                assert moved == [free.job_id, referred.job_id]
                settled = hand(Settle(tuple(map(Outcome.succeeded, leases)), passing_by=True))
                assert [o.lease for o in settled.recorded] == [free, referred]
                assert [o.lease for o in settled.postponed] == [locked]
                assert [o.lease for o in settled.refused] == [lost]
                transaction.rollback()
            assert hand(Settle(settled.postponed)).recorded == settled.postponed
        finally:
            queue.run("DROP TABLE notes")
