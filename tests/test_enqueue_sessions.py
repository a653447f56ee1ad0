"""Every kind of session that people have, and jobs in tables of their own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import flask
import flask_sqlalchemy
import pytest
import sqlmodel
from sqlalchemy import UpdateBase, create_mock_engine, select, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session, sessionmaker
from sqlmodel.ext.asyncio.session import AsyncSession as SqlModelAsyncSession

from sqlalchemy_jobs import (
    AsyncJobSession,
    AsyncJobSessionMixin,
    Job,
    JobMixin,
    JobSession,
    JobSessionMixin,
    NewJob,
    UnsupportedDatabaseError,
    cancel,
    enqueue,
    enqueue_async,
    enqueue_many,
    requeue,
)
from sqlalchemy_jobs._store import statements_for
from tests.engines import open_engine
from tests.enqueue_tools import rows

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine


# --- sqlmodel


class SqlModelSession(JobSessionMixin, sqlmodel.Session):
    """sqlmodel's session with `enqueue`."""


class AsyncSqlModelSession(AsyncJobSessionMixin, SqlModelAsyncSession):
    """sqlmodel's async session with `enqueue`, whose sync side has it too."""

    sync_session_class = SqlModelSession


def test_sqlmodel_sessions_enqueue(sync_engine: Engine) -> None:
    """By the mixin or by the function, beside sqlmodel's own methods."""
    with SqlModelSession(sync_engine) as session, session.begin():
        assert session.enqueue("mixin") is not None
        assert session.exec(sqlmodel.select(sqlmodel.func.count()).select_from(Job)).one() == 1
    with sqlmodel.Session(sync_engine) as plain, plain.begin():
        assert enqueue(plain, "function") is not None
    assert rows(sync_engine.url, Job.task) == ["mixin", "function"]


async def test_async_sqlmodel_sessions_enqueue(async_engine: AsyncEngine) -> None:
    """The same for its AsyncSession; inside run_sync the sync session has the method."""
    async with AsyncSqlModelSession(async_engine) as session, session.begin():
        await session.enqueue("mixin")
        await session.enqueue_many([NewJob("many")])
        await session.run_sync(lambda sync: sync.enqueue("inside"))  # type: ignore[attr-defined]
    async with SqlModelAsyncSession(async_engine) as plain, plain.begin():
        await enqueue_async(plain, "function")
    assert rows(async_engine.url, Job.task) == ["mixin", "many", "inside", "function"]


# --- Flask-SQLAlchemy


def test_flask_sqlalchemy_enqueues_by_function_and_by_mixin(sync_engine: Engine) -> None:
    """`db.session` is a scoped session: give it to the function, or call it for the method."""

    class FlaskJobSession(JobSessionMixin, flask_sqlalchemy.session.Session):
        pass

    app = flask.Flask("app")
    app.config["SQLALCHEMY_DATABASE_URI"] = sync_engine.url
    db = flask_sqlalchemy.SQLAlchemy(session_options={"class_": FlaskJobSession})
    db.init_app(app)
    with app.app_context():
        assert enqueue(db.session, "function") is not None
        method: Any = db.session()
        assert method.enqueue("method") is not None
        db.session.commit()
        enqueue(db.session, "rolled back")
        db.session.rollback()
        db.engine.dispose()
    assert rows(sync_engine.url, Job.task) == ["function", "method"]


def test_a_plain_flask_session_enqueues(sync_engine: Engine) -> None:
    """Without any option of ours, the function is enough."""
    app = flask.Flask("app")
    app.config["SQLALCHEMY_DATABASE_URI"] = sync_engine.url
    db = flask_sqlalchemy.SQLAlchemy()
    db.init_app(app)
    with app.app_context():
        job_id = enqueue(db.session, "t")
        assert cancel(db.session, job_id or 0) == [job_id]
        assert requeue(db.session, job_id or 0) == [job_id]
        db.session.commit()
        db.engine.dispose()
    assert rows(sync_engine.url, Job.id, Job.status) == [(job_id, "pending")]


# --- SQLAlchemy's own ways


def test_a_sessionmaker_makes_sessions_that_enqueue(sync_engine: Engine) -> None:
    """`sessionmaker(class_=JobSession)` in its usual forms, and plain sessions by the function."""
    with sessionmaker(sync_engine, class_=JobSession).begin() as session:
        session.enqueue("maker")
        assert session.scalars(select(Job.task)).all() == ["maker"]
    with sessionmaker(sync_engine).begin() as plain:
        enqueue(plain, "plain")
        enqueue_many(plain, [NewJob("many")])
    assert rows(sync_engine.url, Job.task) == ["maker", "plain", "many"]


async def test_an_async_session_over_a_plain_sync_session_enqueues(
    async_engine: AsyncEngine,
) -> None:
    """`sync_session_class` may be any Session, such as one that routes; defaults apply then."""

    class Routing(Session):
        pass

    class Mixed(AsyncJobSessionMixin, AsyncSession):
        pass

    makers: list[Any] = [
        async_sessionmaker(async_engine, class_=AsyncJobSession, sync_session_class=Routing),
        async_sessionmaker(async_engine, class_=Mixed),
    ]
    for maker in makers:
        async with maker.begin() as session:
            assert await session.enqueue("t") is not None
            assert await session.enqueue_many([NewJob("many")]) != [None]
    assert rows(async_engine.url, Job.task) == ["t", "many"] * 2


async def test_tasks_share_an_async_scoped_session_without_mixing(
    async_engine: AsyncEngine,
) -> None:
    """Each asyncio task enqueues in its own session of the scope."""
    scoped = async_scoped_session(async_sessionmaker(async_engine), asyncio.current_task)

    async def work(number: int) -> None:
        await enqueue_async(scoped, f"{number}")
        await (scoped.commit() if number % 2 else scoped.rollback())
        await scoped.remove()

    if async_engine.dialect.name == "sqlite":
        for number in range(4):
            await work(number)
    else:
        await asyncio.gather(*(work(number) for number in range(4)))
    assert sorted(rows(async_engine.url, Job.task)) == ["1", "3"]


def test_a_session_that_must_not_begin_by_itself_says_so(sync_engine: Engine) -> None:
    """SQLAlchemy's own rules hold: autobegin=False needs a begin()."""
    with JobSession(sync_engine, autobegin=False) as session:
        with pytest.raises(InvalidRequestError, match="Autobegin is disabled"):
            session.enqueue("t")
        with session.begin():
            session.enqueue("t")
    assert rows(sync_engine.url, Job.task) == ["t"]


def test_a_test_suite_may_join_sessions_into_its_own_transaction(sync_engine: Engine) -> None:
    """With create_savepoint, a commit of the session is undone with the outer transaction."""
    with sync_engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        transaction = connection.get_transaction() or connection.begin()
        enqueue(connection, "before")
        with JobSession(connection, join_transaction_mode="create_savepoint") as session:
            session.enqueue("t")
            session.commit()
        assert enqueue(connection, "after") is not None
        transaction.rollback()
    assert rows(sync_engine.url, Job.task) == []


# --- several databases


def test_a_routing_session_sends_jobs_where_updates_go(sync_engine: Engine) -> None:
    """The statement that `get_bind` sees is an UpdateBase, so writers are found by it."""
    with open_engine(sync_engine.url) as writer, open_engine("sqlite://") as replica:

        class Routing(JobSession):
            def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Any:  # noqa: ARG002
                writes = self._flushing or isinstance(clause, UpdateBase)
                return writer if writes else replica

        with Routing() as session, session.begin():
            session.enqueue("t")
            session.enqueue_many([NewJob("many")])
            assert len(cancel(session, rows_in(session, writer))) == 2
    assert rows(sync_engine.url, Job.task, Job.status) == [
        ("t", "cancelled"),
        ("many", "cancelled"),
    ]


def test_a_session_that_routes_by_class_finds_the_mapper(sync_engine: Engine) -> None:
    """`get_bind` gets a Mapper, as from SQLAlchemy itself, whose class_ may be asked for."""

    class Routing(JobSession):
        def get_bind(self, mapper: Any = None, **_: Any) -> Any:
            return sync_engine if mapper and issubclass(mapper.class_, JobMixin) else None

    with Routing() as session, session.begin():
        assert session.enqueue("t") is not None
        assert enqueue(session, "t") is not None


def rows_in(session: Session, engine: Engine) -> list[int]:
    """Return the ids that the session's own transaction sees in *engine*."""
    connection = session.connection(bind_arguments={"bind": engine})
    known = {"schema_translate_map": {"jobs": None} if engine.dialect.name == "sqlite" else {}}
    return list(connection.scalars(select(Job.id), execution_options=known))


def test_another_dialect_is_refused() -> None:
    """A session on a database without what the queue needs is refused, with both names."""
    mock = create_mock_engine("mssql+pyodbc://", lambda *_: None)
    table: Any = Job.__table__
    with pytest.raises(UnsupportedDatabaseError, match=r"'mssql'.*PostgreSQL"):
        statements_for(table, mock.dialect)
