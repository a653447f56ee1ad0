"""Workers and their database: connections, outages, the listener, upkeep and the idle load."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from sqlalchemy_jobs import AsyncWorker, JobContext, Tasks, Worker
from sqlalchemy_jobs._connections import autocommit
from sqlalchemy_jobs._store import Store
from sqlalchemy_jobs.statements import Statements
from tests.engines import open_async_engine
from tests.faults.fleets import enqueue_elsewhere, quick_tasks
from tests.workers import ON_POSTGRES, Jobs, jobs_on, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine

    from tests.conftest import Database


@pytest.fixture(params=ON_POSTGRES)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver of PostgreSQL."""
    yield from jobs_on(request)


# --- connections --------------------------------------------------------------------------------


def test_handlers_may_hold_the_whole_pool(jobs: Jobs) -> None:
    """Case 43: a pool of one, held by a handler, keeps no lease and no outcome from its row."""
    tasks = Tasks()
    holds: list[Any] = []

    def hold(_: JobContext) -> None:
        with engines[0].connect() as connection:
            connection.execute(text("SELECT pg_sleep(2.5)"))
            holds.append(connection.engine.pool)

    async def hold_async(_: JobContext) -> None:
        async with engines[0].connect() as connection:
            await connection.execute(text("SELECT pg_sleep(2.5)"))
            holds.append(engines[0].pool)

    tasks.register(hold_async if jobs.is_async else hold, "hold")
    tasks.register(lambda _: None, "quick")
    engine = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 60}
    with jobs.worker(
        tasks, engine=engine, visibility_timeout=1.2, recovery_interval=0.2
    ) as running:
        engines = [running.worker._engine]
        held = jobs.enqueue("hold")
        jobs.wait(held, lambda job: job.status == "running")
        quick = jobs.enqueue("quick")
        assert jobs.finished(quick).status == "succeeded"
        assert jobs.job(held).status == "running"
        job = jobs.finished(held)
        assert (job.status, job.attempts, job.errors) == ("succeeded", 1, [])
    assert len(holds) == 1


@pytest.mark.parametrize("level", ["SERIALIZABLE", "REPEATABLE READ"])
def test_a_worker_runs_at_read_committed(jobs: Jobs, level: str) -> None:
    """Whatever the level of the engine, the worker's own statements run at READ COMMITTED."""
    jobs.execute("CREATE TABLE IF NOT EXISTS levels (level text)")
    jobs.execute("TRUNCATE levels")
    jobs.execute(
        "CREATE OR REPLACE FUNCTION note_level() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO levels VALUES (current_setting('transaction_isolation')); "
        "RETURN NULL; END $$"
    )
    jobs.execute(
        "CREATE TRIGGER note AFTER UPDATE ON jobs.jobs FOR EACH ROW EXECUTE FUNCTION note_level()"
    )
    tasks = Tasks()
    seen: list[str] = []

    def looks(_: JobContext) -> None:
        with engines[0].connect() as connection:
            seen.append(connection.execute(text("SHOW transaction_isolation")).scalar_one())

    async def looks_async(_: JobContext) -> None:
        async with engines[0].connect() as connection:
            shown = await connection.execute(text("SHOW transaction_isolation"))
            seen.append(shown.scalar_one())

    tasks.register(looks_async if jobs.is_async else looks, "looks")
    try:
        with jobs.worker(tasks, engine={"isolation_level": level}) as running:
            engines = [running.worker._engine]
            assert jobs.finished(jobs.enqueue("looks")).status == "succeeded"
        levels = [row[0] for row in jobs.execute("SELECT level FROM levels")]
    finally:
        jobs.execute("DROP TRIGGER note ON jobs.jobs")
    assert len(levels) == 2  # the claim and the outcome
    assert set(levels) == {"read committed"}
    assert seen == [level.lower()]  # the handler's own sessions are as the user made them


def test_no_transaction_is_open_while_a_handler_runs(jobs: Jobs) -> None:
    """None of the worker's connections keeps a transaction, and with it dead rows, open."""
    tasks = Tasks()
    hold = threading.Event()
    tasks.register(lambda _: hold.wait(30) or None, "holds")
    with jobs.worker(tasks, visibility_timeout=1) as running:
        running.ready()
        job_id = jobs.enqueue("holds")
        jobs.wait(job_id, lambda job: job.status == "running")
        states: set[str] = set()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            rows = jobs.execute(
                "SELECT state FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid()"
            )
            states.update(row[0] for row in rows)
        hold.set()
        jobs.finished(job_id)
    assert "idle in transaction" not in states
    assert "idle" in states


# --- the listener -------------------------------------------------------------------------------


def test_a_listener_proves_itself_rarely(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its start a quiet listener is left alone, for each proof is a statement."""
    sent: list[str] = []
    notify = Store.notify

    def counted(self: Store, connection: Connection, channel: str, payload: str) -> None:
        sent.append(channel)
        notify(self, connection, channel, payload)

    monkeypatch.setattr(Store, "notify", counted)
    with jobs.worker(quick_tasks()) as running:
        running.ready()
        time.sleep(1)
    assert len(sent) <= 2


def test_foreign_notifications_are_harmless(jobs: Jobs) -> None:
    """Notices of other tasks, or of anything at all, on the same channel change nothing."""
    with jobs.worker(quick_tasks()) as running:
        running.ready()
        for payload in ("", "unknown", "{}", "x" * 7000, "ünïcode"):
            jobs.execute("SELECT pg_notify('jobs.jobs', :payload)", payload=payload)
        assert jobs.finished(enqueue_elsewhere(jobs, "quick")).status == "succeeded"
    assert not running.log.of("not_listening")


def test_a_job_that_comes_due_during_a_look_is_not_missed(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a look takes, what comes due meanwhile is found soon, not by the next poll."""
    outlook = Statements.outlook

    def slow(self: Statements, look: Any) -> Any:
        time.sleep(0.4)
        return outlook(self, look)

    monkeypatch.setattr(Statements, "outlook", slow)
    polls: dict[str, Any] = {"poll_interval": 30, "max_poll_interval": 30, "safety_interval": 30}
    with jobs.worker(quick_tasks(), **polls) as running:
        running.ready()
        for delay in (0.1, 0.3, 0.5):
            job_id = jobs.enqueue("quick", delay=delay)
            jobs.wait(job_id, lambda job: job.status == "succeeded", within=15)


# --- outages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_run_until_idle_does_not_wait_for_a_database(driver: str) -> None:
    """Who wants what is due now to be run, a cron job say, is told that there is no database."""
    url = f"postgresql+{driver}://nobody@127.0.0.1:9/none"
    error: BaseException | None = None
    try:
        if driver == "psycopg":
            Worker(create_engine(url), quick_tasks()).run(until_idle=True)
        else:
            await AsyncWorker(create_async_engine(url), quick_tasks()).run(until_idle=True)
    except (OSError, OperationalError) as raised:
        error = raised
    assert error is not None


# --- upkeep -------------------------------------------------------------------------------------


def test_old_jobs_are_pruned_in_batches_while_others_run(jobs: Jobs) -> None:
    """The first sweep of a long history goes in bounded statements, and holds no job up."""
    jobs.execute("CREATE TABLE IF NOT EXISTS batches (size int)")
    jobs.execute("TRUNCATE batches")
    jobs.execute(
        "CREATE OR REPLACE FUNCTION note_batch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO batches SELECT count(*) FROM gone; RETURN NULL; END $$"
    )
    jobs.execute(
        "CREATE TRIGGER note_batch AFTER DELETE ON jobs.jobs REFERENCING OLD TABLE AS gone "
        "EXECUTE FUNCTION note_batch()"
    )
    for status, days in (("succeeded", 4), ("cancelled", 4), ("failed", 31), ("failed", 4)):
        jobs.execute(
            "INSERT INTO jobs.jobs (task, status, updated_at, created_at, attempts) "
            f"SELECT 'old', '{status}', now() - interval '{days} days', "
            f"now() - interval '{days} days', 1 FROM generate_series(1, 1200)"
        )
    tasks = Tasks()
    hold = threading.Event()
    tasks.register(lambda _: hold.wait(60) or None, "long")
    tasks.register(lambda _: None, "quick")
    try:
        with jobs.worker(tasks, prune_interval=0.5):
            long = jobs.enqueue("long")
            quick = [jobs.enqueue("quick") for _ in range(10)]
            for job_id in quick:
                assert jobs.finished(job_id).status == "succeeded"
            count = "SELECT status, count(*) FROM jobs.jobs WHERE task = 'old' GROUP BY status"
            wait_until(lambda: dict(map(tuple, jobs.execute(count))) == {"failed": 1200})
            assert jobs.job(long).status == "running"
            hold.set()
            assert jobs.finished(long).status == "succeeded"
        sizes = [row[0] for row in jobs.execute("SELECT size FROM batches")]
        assert sum(sizes) == 3600
        assert max(sizes) <= 1000
    finally:
        hold.set()
        jobs.execute("DROP TRIGGER note_batch ON jobs.jobs")


# --- poolers ------------------------------------------------------------------------------------


async def test_without_prepared_statements_each_statement_is_a_transaction(
    database: Database, sync_engine: Engine
) -> None:
    """Whoever turned asyncpg's caches off has a pooler, which a transaction keeps to one server."""
    options = {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
    begun: list[str] = []
    async with open_async_engine(database.url("asyncpg"), connect_args=options) as engine:
        jobs = Jobs("psycopg", database.url("psycopg"), sync_engine)
        async with AsyncWorker(engine, quick_tasks(), listen=False, poll_interval=0.1):
            assert (await asyncio.to_thread(jobs.finished, jobs.enqueue("quick"))).attempts == 1
            for _ in range(20):
                begun += [row.state for row in jobs.execute(OWN_STATES)]
                await asyncio.sleep(0.01)
    async with open_async_engine(database.url("asyncpg")) as engine, engine.connect() as connection:
        assert await connection.run_sync(lambda c: level(autocommit(c))) == "AUTOCOMMIT"
    async with (
        open_async_engine(database.url("asyncpg"), connect_args=options) as engine,
        engine.connect() as connection,
    ):
        assert await connection.run_sync(lambda c: level(autocommit(c))) == "READ COMMITTED"
        assert not connection.in_transaction()
    assert begun.count("idle") > len(begun) / 2, "none is left in a transaction"


OWN_STATES = (
    "SELECT state FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid() AND query NOT LIKE '%pg_stat_activity%'"
)


def level(connection: Connection) -> Any:
    """The isolation level that was set on a connection."""
    return connection.get_execution_options().get("isolation_level")
