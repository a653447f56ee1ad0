"""From making a worker to its end: what is refused, how it runs, and how it stops."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.dialects.mssql import aioodbc, pyodbc
from sqlalchemy.dialects.mysql import aiomysql, pymysql
from sqlalchemy.dialects.oracle import oracledb
from sqlalchemy.engine import Dialect, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool, QueuePool, StaticPool

from sqlalchemy_jobs import (
    AsyncWorker,
    InvalidArgumentError,
    JobContext,
    SchemaError,
    Tasks,
    UnsupportedDatabaseError,
    Worker,
)
from tests.engines import open_async_engine, open_engine
from tests.workers import EVERYWHERE, Jobs, jobs_on, on_drivers, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=EVERYWHERE)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver."""
    yield from jobs_on(request)


def quick_tasks(*names: str) -> Tasks:
    """Return tasks that do nothing."""
    tasks = Tasks()
    for name in names or ("quick",):
        tasks.register(lambda _: None, name)
    return tasks


# --- what is refused ----------------------------------------------------------------------------


def unconnected(dialect: Dialect) -> Engine:
    """Return an engine of a dialect whose driver is not installed."""
    url = make_url(f"{dialect.name}+{dialect.driver}://nowhere/db")
    return Engine(QueuePool(lambda: pytest.fail("it connects")), dialect, url)


@pytest.mark.parametrize("module", [pymysql, pyodbc, oracledb])
def test_an_unsupported_dialect_is_refused(module: Any) -> None:
    """A worker for another database is refused when it is made, in one sentence that names it."""
    dialect = module.dialect()
    with pytest.raises(UnsupportedDatabaseError, match=f"'{dialect.name}'.*PostgreSQL.*SQLite"):
        Worker(unconnected(dialect), Tasks())


@pytest.mark.parametrize("module", [aiomysql, aioodbc])
def test_an_unsupported_async_dialect_is_refused(module: Any) -> None:
    """The same for the async worker."""
    dialect = module.dialect()
    with pytest.raises(UnsupportedDatabaseError, match=f"'{dialect.name}'.*PostgreSQL.*SQLite"):
        AsyncWorker(AsyncEngine(unconnected(dialect)), Tasks())


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("sqlite://", {}),
        ("sqlite:///:memory:", {}),
        ("sqlite://", {"poolclass": StaticPool}),
    ],
)
def test_sqlite_in_memory_is_refused(url: str, options: dict[str, Any]) -> None:
    """A database that one connection alone can see is refused, with the way out."""
    with pytest.raises(UnsupportedDatabaseError, match="use a file"):
        Worker(create_engine(url, **options), Tasks())
    async_url = url.replace("sqlite", "sqlite+aiosqlite", 1)
    with pytest.raises(UnsupportedDatabaseError, match="use a file"):
        AsyncWorker(create_async_engine(async_url, **options), Tasks())


def test_an_engine_of_the_other_kind_is_refused(sqlite_url: str) -> None:
    """Each worker takes its own kind of engine, and names the other worker."""
    with open_engine(sqlite_url) as engine:
        with pytest.raises(InvalidArgumentError, match="see AsyncWorker"):
            Worker(create_async_engine(sqlite_url.replace("sqlite", "sqlite+aiosqlite")), Tasks())  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="see Worker"):
            AsyncWorker(engine, Tasks())  # type: ignore[arg-type]


def test_other_arguments_are_checked(sqlite_url: str) -> None:
    """A class that is no class of jobs and a setting that does not exist are refused."""
    with open_engine(sqlite_url) as engine:
        with pytest.raises(InvalidArgumentError, match="JobMixin"):
            Worker(engine, Tasks(), job_class=dict)
        with pytest.raises(InvalidArgumentError, match="no setting concurency"):
            Worker(engine, Tasks(), concurency=3)  # type: ignore[call-arg]
        with pytest.raises(InvalidArgumentError, match="concurrency must be"):
            Worker(engine, Tasks(), concurrency=0)


def test_a_missing_table_is_refused_with_the_command(jobs: Jobs) -> None:
    """A worker on a database without the table, or with an older one, says what to run."""
    tasks = quick_tasks()

    def refused() -> str:
        with pytest.raises(SchemaError) as caught:
            jobs.drain(tasks)
        with pytest.raises(SchemaError, match=re.escape(str(caught.value))), jobs.worker(tasks):
            pass
        return str(caught.value)

    table = "jobs.jobs" if jobs.on_postgres else "jobs"
    jobs.execute(f"ALTER TABLE {table} RENAME COLUMN meta TO other")
    try:
        older = refused()
        assert "alembic upgrade head" in older or "migrations.upgrade(op, to=" in older
        assert "meta" in older
        jobs.execute(f"ALTER TABLE {table} RENAME TO hidden")
        assert 'run "alembic upgrade head"' in refused()
        jobs.execute(f"ALTER TABLE {table.removesuffix('jobs')}hidden RENAME TO jobs")
    finally:
        jobs.execute(f"ALTER TABLE {table} RENAME COLUMN other TO meta")


def test_a_worker_without_tasks_warns(jobs: Jobs) -> None:
    """No tasks is no error, since they may be registered later, but it is worth a warning."""
    running = jobs.drain(Tasks())
    assert [record.levelname for record in running.log.of("no_tasks")] == ["WARNING"]


# --- running ------------------------------------------------------------------------------------


def test_until_idle_does_what_is_due_and_returns(jobs: Jobs) -> None:
    """`run(until_idle=True)` works off what is due, and what comes of it, and sums up."""
    tasks = Tasks()

    def follows(job: JobContext) -> None:
        if job.payload:
            jobs.enqueue("follows", job.payload - 1)

    def fails(job: JobContext) -> None:
        raise ValueError(job.attempt)

    tasks.register(follows, "follows")
    tasks.register(fails, "fails", backoff=lambda attempt: 0 if attempt == 1 else 3600)
    jobs.enqueue("follows", 10)
    failing = jobs.enqueue("fails")
    later = jobs.enqueue("follows", 1, delay=3600)
    summary = jobs.drain(tasks, concurrency=2).summary
    assert summary is not None
    assert (summary.succeeded, summary.retried, summary.attempts) == (11, 2, 13)
    assert [job.id for job in jobs.unfinished()] == [failing, later]
    assert jobs.drain(tasks).summary == type(summary)()


def test_a_task_that_is_registered_later_joins_the_next_look(jobs: Jobs) -> None:
    """A running worker takes a new task at once, although it polls every 30 s."""
    tasks = quick_tasks("early")
    with jobs.worker(tasks, poll_interval=30, max_poll_interval=30) as running:
        running.ready()
        late = jobs.enqueue("late")
        early = jobs.enqueue("early")
        assert jobs.finished(early).status == "succeeded"
        assert jobs.job(late).status == "pending"
        tasks.register(lambda _: None, "late")
        jobs.wait(late, lambda job: job.status == "succeeded", within=15)


@on_drivers("psycopg", "sqlite")
def test_a_sync_worker_runs_beside_the_program(jobs: Jobs) -> None:
    """`with Worker(...)` runs it in a thread, stops it at the end, and may be entered again."""
    with open_engine(jobs.url) as engine:
        worker = Worker(engine, quick_tasks(), poll_interval=0.1)
        for _ in range(2):
            with worker as entered:
                assert entered is worker
                assert jobs.finished(jobs.enqueue("quick")).status == "succeeded"
                with pytest.raises(RuntimeError, match="running already"):
                    worker.run()
                with pytest.raises(RuntimeError, match="running already"), worker:
                    pass
                assert jobs.finished(jobs.enqueue("quick")).status == "succeeded"
            late = jobs.enqueue("quick")
            assert worker.run(until_idle=True).succeeded == 1
            assert jobs.job(late).status == "succeeded"
        with pytest.raises(ZeroDivisionError), worker:
            raise ZeroDivisionError
        assert worker.run(until_idle=True).attempts == 0


@on_drivers("asyncpg", "psycopg_async", "aiosqlite")
async def test_an_async_worker_runs_beside_the_program(jobs: Jobs) -> None:
    """`async with AsyncWorker(...)` runs it in the loop, stops it, and may be entered again."""
    async with open_async_engine(jobs.url) as engine:
        worker = AsyncWorker(engine, quick_tasks(), poll_interval=0.1)
        for _ in range(2):
            async with worker as entered:
                assert entered is worker
                await asyncio.to_thread(jobs.finished, jobs.enqueue("quick"))
                with pytest.raises(RuntimeError, match="running already"):
                    await worker.run()
                with pytest.raises(RuntimeError, match="running already"):
                    await worker.__aenter__()
                await asyncio.to_thread(jobs.finished, jobs.enqueue("quick"))
            late = jobs.enqueue("quick")
            assert (await worker.run(until_idle=True)).succeeded == 1
            assert jobs.job(late).status == "succeeded"
        with pytest.raises(ZeroDivisionError):
            async with worker:
                raise ZeroDivisionError
        assert (await worker.run(until_idle=True)).attempts == 0

    def tasks() -> list[str]:
        return [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("jobs")]

    until = time.monotonic() + 20
    while tasks():
        assert time.monotonic() < until, tasks()
        await asyncio.sleep(0.02)


@on_drivers("asyncpg", "psycopg_async", "aiosqlite")
async def test_cancelling_run_stops_it_in_the_same_bounded_way(jobs: Jobs) -> None:
    """A cancelled `run()` tells the handlers, records what they did, and is cancelled then."""
    tasks = Tasks()
    started = asyncio.Event()

    @tasks.task("long")
    async def long(_: JobContext) -> None:
        started.set()
        await asyncio.sleep(60)

    job_id = jobs.enqueue("long")
    async with open_async_engine(jobs.url) as engine:
        worker = AsyncWorker(engine, tasks, shutdown_timeout=0.6)
        running = asyncio.create_task(worker.run())
        await asyncio.wait_for(started.wait(), 20)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 20)
    job = jobs.job(job_id)
    assert (job.status, job.attempts, job.max_attempts) == ("pending", 1, 4)


@on_drivers("psycopg", "asyncpg")
def test_signals_are_left_alone_in_threads_and_context_managers(jobs: Jobs) -> None:
    """Only `run()` on the main thread has handlers of its own, and only while it runs."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    with jobs.worker(quick_tasks()) as running:
        running.ready()
        assert handlers() == before
    if jobs.is_async:

        async def main() -> None:
            seen: list[list[Any]] = []
            tasks = Tasks()
            tasks.register(lambda _: seen.append(handlers()), "look")
            jobs.enqueue("look")
            async with open_async_engine(jobs.url) as engine:
                at_start = handlers()
                await AsyncWorker(engine, tasks).run(until_idle=True)
                assert seen[0] != at_start
                assert handlers() == at_start
                async with AsyncWorker(engine, tasks):
                    assert handlers() == at_start

        asyncio.run(main())
    else:
        seen: list[list[Any]] = []
        tasks = Tasks()
        tasks.register(lambda _: seen.append(handlers()), "look")
        jobs.enqueue("look")
        with open_engine(jobs.url) as engine:
            Worker(engine, tasks).run(until_idle=True)
            assert seen[0] != before
            with Worker(engine, tasks):
                assert handlers() == before
    assert handlers() == before


@on_drivers("psycopg", "asyncpg")
def test_a_stopped_worker_leaves_nothing_behind(jobs: Jobs) -> None:
    """After the end no thread of the worker runs, and none of its connections is open."""
    with jobs.worker(quick_tasks()) as running:
        running.ready()
        for _ in range(5):
            jobs.finished(jobs.enqueue("quick"))

    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("jobs")]

    wait_until(lambda: not threads())
    name = make_url(jobs.url).database
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = :name AND pid <> pg_backend_pid()"
    )
    wait_until(lambda: jobs.execute(count, name=name)[0][0] == 0)


def test_importing_and_making_a_worker_starts_nothing(sqlite_url: str) -> None:
    """Neither connects, starts a thread nor touches the database."""
    before = threading.active_count()
    with open_engine("postgresql+psycopg://nobody@127.0.0.1:1/none", poolclass=NullPool) as engine:
        worker = Worker(engine, quick_tasks())
    AsyncWorker(create_async_engine("postgresql+asyncpg://nobody@127.0.0.1:1/none"), quick_tasks())
    assert threading.active_count() == before
    worker.stop()
    assert worker.zombies == 0
