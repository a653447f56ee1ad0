"""Jobs in a table of the application's own: class, columns, schema; and without any table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import CheckConstraint, MetaData, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.schema import CreateSchema

from sqlalchemy_jobs import (
    AsyncJobSession,
    AsyncWorker,
    Job,
    JobMixin,
    JobSession,
    NewJob,
    SchemaError,
    Tasks,
    Worker,
    cancel,
    enqueue,
    enqueue_async,
    metadata,
    requeue,
    table_args,
)
from tests.engines import make_empty_tables, open_async_engine, open_engine
from tests.enqueue_tools import listening, plain_engine, rows

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tests.conftest import Database

SECRET = "s3cr3t-hunter2"  # noqa: S105 - must be in no message


class Base(DeclarativeBase):
    """An application's own base, in a schema whose name needs quotes."""

    metadata = MetaData(schema="My-Jobs")


class Work(JobMixin, Base):
    """Jobs in another schema, under another name, with a column more."""

    __tablename__ = "work items"
    tenant: Mapped[str] = mapped_column(server_default="nobody")


class WorkSession(JobSession):
    """Sessions that enqueue there."""

    job_class = Work


class AsyncWorkSession(AsyncJobSession):
    """The same, to await."""

    sync_session_class = WorkSession


def _make_work(engine: Engine) -> None:
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.execution_options(schema_translate_map={"My-Jobs": None})
        else:
            connection.execute(CreateSchema("My-Jobs", if_not_exists=True))
            Base.metadata.drop_all(connection)
        Base.metadata.create_all(connection)


def _own_tasks(ran: list[Any]) -> Tasks:
    tasks = Tasks()
    tasks.register(lambda job: ran.append(job.payload), "note", max_attempts=7)
    return tasks


def test_the_sync_worker_runs_jobs_of_an_own_class(sync_engine: Engine) -> None:
    """A worker that is given the class serves its table, is woken for it, and no other."""
    _make_work(sync_engine)
    ran: list[Any] = []
    with WorkSession(sync_engine) as session, session.begin():
        job_id = session.enqueue("note", 1)
        enqueue(session, "note", "elsewhere", job_class=Job)
    assert Worker(sync_engine, _own_tasks(ran), job_class=Work).run(until_idle=True).succeeded == 1
    with Worker(sync_engine, _own_tasks(ran), job_class=Work, poll_interval=0.2):
        with sync_engine.begin() as connection:
            enqueue(connection, "note", 2, job_class=Work)
        until = time.monotonic() + 20
        while len(ran) < 2 and time.monotonic() < until:
            time.sleep(0.02)
    assert ran == [1, 2]
    with WorkSession(sync_engine) as session:
        job = session.get_one(Work, job_id)
        assert (job.status, job.max_attempts, job.tenant) == ("succeeded", 7, "nobody")


async def test_the_async_worker_runs_jobs_of_an_own_class(async_engine: AsyncEngine) -> None:
    """The async worker likewise."""
    async with async_engine.connect() as connection:
        await connection.run_sync(lambda c: _make_work(c.engine))
    ran: list[Any] = []
    async with AsyncWorkSession(async_engine) as session, session.begin():
        await session.enqueue("note", 1)
    worker = AsyncWorker(async_engine, _own_tasks(ran), job_class=Work)
    assert (await worker.run(until_idle=True)).succeeded == 1
    assert ran == [1]


def test_jobs_of_an_own_class_go_to_its_table(sync_engine: Engine) -> None:
    """The class of the session, or the one a call names, decides table, schema and channel."""
    _make_work(sync_engine)
    table: Any = Work.__table__
    with listening(sync_engine, table) as heard, listening(sync_engine) as others:
        with WorkSession(sync_engine) as session, session.begin():
            first = session.enqueue("method", idempotency_key="k")
            assert session.enqueue("again", idempotency_key="k") is None
            session.enqueue_many([NewJob("many"), NewJob("many", idempotency_key="k")])
            enqueue(session, "function", job_class=Work)
            found = session.execute(select(Work.task, Work.tenant).order_by(Work.id)).all()
            assert cancel(session, first or 0, job_class=Work) == [first]
            assert requeue(session, first or 0, job_class=Work) == [first]
        assert heard.notified() in (["function", "many", "method"], None)
        assert heard.wakes == 1
        assert others.notified() in ([], None)
        assert others.wakes == 0
    assert found == [("method", "nobody"), ("many", "nobody"), ("function", "nobody")]
    assert rows(sync_engine.url) == []  # nothing in the shipped table


async def test_an_own_class_of_an_async_session(async_engine: AsyncEngine) -> None:
    """The sync session's `job_class` counts for the async one."""
    _make_work(plain_engine(async_engine.url))
    async with AsyncWorkSession(async_engine) as session, session.begin():
        await session.enqueue("t")
        await session.enqueue_many([NewJob("many")])
        assert (await session.scalars(select(Work.task))).all() == ["t", "many"]
    assert rows(async_engine.url) == []


def test_a_translated_schema_is_followed(database: Database) -> None:
    """schema_translate_map moves jobs and channel, set on the engine or for a connection."""
    with open_engine(database.url("psycopg")) as engine:
        make_empty_tables(engine.url)
        tenant = engine.execution_options(schema_translate_map={"jobs": "tenant_1"})
        metadata.drop_all(tenant)
        metadata.create_all(tenant)
        with listening(tenant) as heard, listening(engine) as others:
            with JobSession(tenant) as session, session.begin():
                session.enqueue("of the engine")
                session.enqueue_many([NewJob("of the engine")])
            options: Any = {"schema_translate_map": {"jobs": "tenant_1"}}
            with JobSession(engine) as session, session.begin():
                session.connection(execution_options=options)
                session.enqueue("of the connection")
            with JobSession(engine, execution_options=options) as session, session.begin():
                session.enqueue("of the session", notify="after_commit")
            expected = ["of the connection", "of the engine", "of the session"]
            assert heard.notified() == expected
            assert (heard.wakes, others.wakes) == (3, 0)
            assert others.notified() == []
        with tenant.connect() as connection:
            assert sorted(set(connection.scalars(select(Job.task)))) == expected
        assert rows(engine.url) == []


def test_an_empty_search_path_does_not_matter(database: Database) -> None:
    """Every name is qualified, so a role without any search_path can enqueue."""
    make_empty_tables(database.url("psycopg"))
    options = {"connect_args": {"options": "-c search_path="}}
    with (
        open_engine(database.url("psycopg"), **options) as engine,
        JobSession(engine) as session,
        session.begin(),
    ):
        job_id = session.enqueue("t", {"a": 1}, delay=1, idempotency_key="k")
        session.enqueue_many([NewJob("t", {"a": 1}, delay=1, idempotency_key="l")])
        assert cancel(session, job_id or 0) == [job_id]
        assert requeue(session, job_id or 0) == [job_id]


# --- without a table, and with one that is too old


@pytest.fixture
def empty(sync_engine: Engine) -> Engine:
    """A database without the table of jobs."""
    metadata.drop_all(sync_engine)
    return sync_engine


def test_a_missing_table_names_the_command(empty: Engine) -> None:
    """Every call raises SchemaError with the way out, and shows no payload, not in its cause."""
    calls: list[Any] = [
        lambda session: session.enqueue("t", {"password": SECRET}, meta=SECRET),
        lambda session: session.enqueue("t", SECRET, idempotency_key=SECRET, delay=1),
        lambda session: session.enqueue_many([NewJob("t", SECRET, meta=SECRET)]),
        lambda session: session.enqueue_many([NewJob("t", SECRET, idempotency_key="k")] * 2),
        lambda session: cancel(session, [1]),
        lambda session: requeue(session, [1]),
    ]
    for call in calls:
        with JobSession(empty) as session:
            with pytest.raises(SchemaError, match="alembic upgrade head") as caught:
                call(session)
            _shows_no_secret(caught.value)
            session.rollback()
            session.execute(text("SELECT 1"))


async def test_a_missing_table_on_async_drivers(async_engine: AsyncEngine) -> None:
    """The same error on asyncpg, psycopg and aiosqlite."""
    metadata.drop_all(plain_engine(async_engine.url))
    async with open_async_engine(async_engine.url) as opened, AsyncJobSession(opened) as session:
        with pytest.raises(SchemaError, match="alembic upgrade head") as caught:
            await session.enqueue("t", {"password": SECRET})
        _shows_no_secret(caught.value)


def test_a_missing_schema_and_an_older_table_say_the_same(database: Database) -> None:
    """A release that needs a column the table does not have names the same command."""
    with open_engine(database.url("psycopg")) as engine:
        make_empty_tables(engine.url)
        with JobSession(engine) as session:
            session.execute(text("ALTER TABLE jobs.jobs DROP COLUMN meta"))
            with pytest.raises(SchemaError, match="alembic upgrade head") as caught:
                session.enqueue("t", SECRET, meta=SECRET)
            _shows_no_secret(caught.value)
            session.rollback()
        elsewhere = engine.execution_options(schema_translate_map={"jobs": "nowhere"})
        with (
            JobSession(elsewhere) as session,
            pytest.raises(SchemaError, match="alembic upgrade head"),
        ):
            session.enqueue("t")


class Strict(DeclarativeBase):
    """A base of its own for the class below."""


class StrictJob(JobMixin, Strict):
    """Jobs with a rule of the application's own."""

    __tablename__ = "strict"
    __table_args__: Any = (
        *table_args("strict"),
        CheckConstraint("task <> 'odd'", name="not_odd"),
    )
    tenant: Mapped[str] = mapped_column(server_default=text("'nobody'"))


def test_the_server_shows_no_payload_in_its_own_errors(sync_engine: Engine) -> None:
    """Neither the parameters nor the detail with the failing row come out."""
    Strict.metadata.drop_all(sync_engine)
    Strict.metadata.create_all(sync_engine)
    with Session(sync_engine) as session:
        with pytest.raises(IntegrityError, match="not_odd") as caught:
            enqueue(session, "odd", {"password": SECRET}, job_class=StrictJob)
        assert "[SQL parameters hidden" in str(caught.value)
        _shows_no_secret(caught.value)


async def test_async_drivers_show_no_payload_either(async_engine: AsyncEngine) -> None:
    """The same holds for the errors of asyncpg, psycopg and aiosqlite."""
    engine = plain_engine(async_engine.url)
    Strict.metadata.drop_all(engine)
    Strict.metadata.create_all(engine)
    async with AsyncJobSession(async_engine) as session:
        with pytest.raises(IntegrityError, match="not_odd") as caught:
            await enqueue_async(session, "odd", {"password": SECRET}, job_class=StrictJob)
        _shows_no_secret(caught.value)


def test_a_role_that_may_not_insert_gets_the_drivers_error(database: Database) -> None:
    """A missing privilege is no missing table."""
    make_empty_tables(database.url("psycopg"))
    with open_engine(database.url("psycopg")) as engine, JobSession(engine) as session:
        session.execute(text("SET LOCAL ROLE pg_monitor"))
        with pytest.raises(ProgrammingError, match="permission denied") as caught:
            session.enqueue("t", {"password": SECRET})
        _shows_no_secret(caught.value)


def test_a_read_only_transaction_gets_the_drivers_error(sync_engine: Engine) -> None:
    """A replica, or a transaction that is read only, says so itself."""
    on_sqlite = sync_engine.dialect.name == "sqlite"
    with JobSession(sync_engine) as session:
        session.execute(text("PRAGMA query_only = 1" if on_sqlite else "SET TRANSACTION READ ONLY"))
        with pytest.raises(DBAPIError, match=r"read.?only"):
            session.enqueue("t")
        session.rollback()
        if on_sqlite:
            session.execute(text("PRAGMA query_only = 0"))


def _shows_no_secret(error: BaseException | None) -> None:
    while error is not None:
        assert SECRET not in str(error), type(error)
        assert SECRET not in repr(error), type(error)
        error = error.__cause__ or error.__context__
