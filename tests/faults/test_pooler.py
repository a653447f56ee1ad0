"""Behind PgBouncer in transaction mode, two server connections for everybody."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from sqlalchemy_jobs import (
    AsyncJobSession,
    JobContext,
    JobSession,
    NewJob,
    PermanentJobError,
    Snooze,
    Tasks,
    cancel,
    exponential,
    requeue,
)
from tests.engines import open_async_engine, open_engine
from tests.faults.fleets import NEVER_LOOKS, Fleet, enqueue_elsewhere, quick_tasks
from tests.faults.pgbouncer import SERVERS, WITHOUT_PREPARED, PgBouncer
from tests.workers import ON_POSTGRES, Jobs, Running, jobs_on, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.postgres import Server


@pytest.fixture(params=ON_POSTGRES)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver of PostgreSQL; what the test itself sees, it sees without the pooler."""
    yield from jobs_on(request)


@pytest.fixture(scope="module")
def pooler(cluster: Server) -> Iterator[PgBouncer]:
    """Run a PgBouncer in front of the server."""
    with PgBouncer(cluster) as pooler:
        yield pooler


class Pooled(Jobs):
    """The jobs of a test, whose workers and enqueuers go through the pooler."""

    def __init__(self, jobs: Jobs, pooler: PgBouncer) -> None:
        """Send new workers through *pooler*."""
        super().__init__(jobs.driver, pooler.url(jobs.url), jobs.engine)
        self.direct = jobs.url
        self.options = {"connect_args": dict(WITHOUT_PREPARED[jobs.driver])}

    def enqueuing(self, work: Callable[[Any], Any]) -> Any:
        """Return what *work* returns, done in a transaction of a session of the driver's kind."""

        async def in_a_loop() -> Any:
            async with (
                open_async_engine(self.url, **self.options) as engine,
                AsyncJobSession(engine) as session,
                session.begin(),
            ):
                return await session.run_sync(work)

        if self.is_async:
            return asyncio.run(in_a_loop())
        with (
            open_engine(self.url, **self.options) as engine,
            JobSession(engine) as session,
            session.begin(),
        ):
            return work(session)


FOLLOWED = {
    "application_name",
    "client_encoding",
    "DateStyle",
    "IntervalStyle",
    "TimeZone",
    "standard_conforming_strings",
    "jit",
}
"""Settings that PgBouncer itself carries from client to client, and one of asyncpg's own."""


def settings_left(jobs: Pooled) -> set[str]:
    """Return which settings the shared sessions have because some client changed them."""
    options = {"connect_args": dict(WITHOUT_PREPARED["psycopg"]), "poolclass": NullPool}
    engine = create_engine(jobs.url.replace("asyncpg", "psycopg"), **options)
    left: set[str] = set()
    with ExitStack() as stack:
        # As many transactions at once as there are sessions, so each has one.
        sessions = [stack.enter_context(engine.connect()) for _ in range(SERVERS)]
        pids = {session.scalar(text("SELECT pg_backend_pid()")) for session in sessions}
        for session in sessions:
            changed = text("SELECT name FROM pg_settings WHERE source = 'session'")
            left.update(session.scalars(changed))
    assert len(pids) == SERVERS
    return left - FOLLOWED


def make_tasks() -> Tasks:
    """Return tasks that end in every way."""
    tasks = quick_tasks()

    @tasks.task("retried", backoff=exponential(0.1))
    def retried(job: JobContext) -> None:
        if job.attempt == 1:
            raise ValueError("as wished")

    @tasks.task("snoozed")
    def snoozed(job: JobContext) -> None:
        if job.max_attempts == 3:  # a snooze gives one more
            raise Snooze(0.1)

    @tasks.task("buried")
    def buried(_: JobContext) -> None:
        raise PermanentJobError("as wished")

    @tasks.task("late", timeout=0.2, max_attempts=1)
    async def late(_: JobContext) -> None:
        await asyncio.sleep(60)

    @tasks.task("released", max_attempts=1)
    async def released(_: JobContext) -> None:
        await asyncio.sleep(60)

    return tasks


def enqueue_all(session: JobSession) -> dict[str, int]:
    """Enqueue jobs in every way, and return their ids."""
    ended = ("quick", "retried", "snoozed", "buried", "late")
    ids = {name: session.enqueue(name, {"für": [name, 1.5, None]}) for name in ended}
    ids["delayed"] = session.enqueue("quick", delay=0.3)
    ids["keyed"] = session.enqueue("quick", idempotency_key="k")
    assert session.enqueue("quick", idempotency_key="k") is None
    ids["large"] = session.enqueue("quick", "x" * 1_000_000)
    ids["cancelled"] = session.enqueue("quick", delay=3600)
    assert ids["cancelled"] is not None
    assert cancel(session, ids["cancelled"]) == [ids["cancelled"]]
    return {name: job_id for name, job_id in ids.items() if job_id is not None}


ENDS = {
    "quick": ("succeeded", 1),
    "retried": ("succeeded", 2),
    "snoozed": ("succeeded", 2),
    "buried": ("failed", 1),
    "late": ("failed", 1),
    "delayed": ("succeeded", 1),
    "keyed": ("succeeded", 1),
    "large": ("succeeded", 1),
    "cancelled": ("cancelled", 0),
}
"""How those end, and after how many attempts."""


def test_a_whole_life_goes_through_a_pooler(
    jobs: Jobs, pooler: PgBouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 41: With a direct URL for LISTEN all that jobs can go through works, and at once.

    The sessions that the worker shares with others are left as they were.
    """
    pooled = Pooled(jobs, pooler)
    monkeypatch.setenv("DATABASE_DIRECT_URL", pooled.direct)
    with pooled.worker(
        make_tasks(),
        engine=pooled.options,
        visibility_timeout=1.5,
        recovery_interval=0.3,
        prune_interval=0.3,
        shutdown_timeout=2,
        concurrency=20,
        **NEVER_LOOKS,
    ) as running:
        running.ready()
        many: list[int] = pooled.enqueuing(
            lambda session: session.enqueue_many(NewJob("quick", n) for n in range(100))
        )
        ids = pooled.enqueuing(enqueue_all)
        found = {name: jobs.finished(job_id) for name, job_id in ids.items()}
        assert {name: (job.status, job.attempts) for name, job in found.items()} == ENDS
        assert pooled.enqueuing(lambda session: requeue(session, ids["late"])) == [ids["late"]]
        jobs.attempted(ids["late"], 2)
        for job_id in many:
            assert jobs.finished(job_id).attempts == 1
        waits: list[float] = []
        for _ in range(5):
            job = jobs.finished(pooled.enqueuing(lambda session: session.enqueue("quick")))
            assert job.started_at is not None
            waits.append((job.started_at - job.run_at).total_seconds())
        assert min(waits) < 1
        held: int = pooled.enqueuing(lambda session: session.enqueue("released"))
        jobs.wait(held, lambda job: job.status == "running")
        lease = jobs.job(held).lease_expires_at
        jobs.wait(held, lambda job: job.lease_expires_at != lease)
        running.stop()
    assert (jobs.job(held).status, jobs.job(held).max_attempts) == ("pending", 2)
    for event in ("broke", "not_listening", "recovered", "refused"):
        assert running.log.of(event) == []
    assert settings_left(pooled) == set()


def failed_again(running: Running) -> bool:
    """Whether a worker has tried twice to listen."""
    failures: int = running.worker._listener._listening._failures
    return failures >= 2


def test_without_a_direct_url_it_says_so_once_and_polls(cluster: Server, pooler: PgBouncer) -> None:
    """Case 41: LISTEN through the pooler brings nothing: one warning names the cure."""
    with Fleet(cluster) as fleet:
        running: dict[str, Running] = {}
        for driver, jobs in fleet.jobs.items():
            pooled = Pooled(jobs, pooler)
            running[driver] = fleet.stack.enter_context(
                pooled.worker(quick_tasks(), engine=pooled.options, poll_interval=0.1)
            )
        for driver, jobs in fleet.jobs.items():
            wait_until(partial(running[driver].log.of, "not_listening"), within=80)
            for _ in range(3):
                assert jobs.finished(enqueue_elsewhere(jobs)).attempts == 1
        for driver, jobs in fleet.jobs.items():
            wait_until(partial(failed_again, running[driver]))
            assert jobs.finished(enqueue_elsewhere(jobs)).attempts == 1
    for driver, worker in running.items():
        (warning,) = worker.log.of("not_listening")
        assert (driver, warning.levelname) == (driver, "WARNING")
        assert "DATABASE_DIRECT_URL" in warning.getMessage()
        assert worker.log.of("broke") == []
