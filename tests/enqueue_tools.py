"""What the tests of enqueueing share: who is told of a job, which rows there are, which SQL ran."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
from psycopg import sql
from sqlalchemy import create_engine, event, make_url, select, text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import NullPool

from sqlalchemy_jobs import AsyncJobSession, Job, JobSession
from sqlalchemy_jobs._channel import channel_of
from sqlalchemy_jobs._wake import register
from tests.engines import open_async_engine, open_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sqlalchemy import URL, Engine

    from tests.workers import Jobs

Returned = TypeVar("Returned")

_END = "end of the test"


@lru_cache(maxsize=16)
def _plain(url: URL) -> Engine:
    # Without a pool there is nothing to dispose of.
    sqlite = url.get_backend_name() == "sqlite"
    return create_engine(
        url.set(drivername="sqlite" if sqlite else "postgresql+psycopg"),
        poolclass=NullPool,
        execution_options={"schema_translate_map": {"jobs": None}} if sqlite else {},
    )


def plain_engine(url: str | URL) -> Engine:
    """Return a sync engine without a pool on the database of *url*, whatever driver that names."""
    return _plain(make_url(url))


def rows(url: str | URL, *columns: Any) -> list[Any]:
    """Return what other connections see of the jobs, by id: whole rows, or the columns given."""
    with plain_engine(url).connect() as connection:
        chosen = columns or tuple(Job.__table__.c)
        found = connection.execute(select(*chosen).order_by(Job.id)).all()
    return [row[0] for row in found] if len(columns) == 1 else list(found)


def change(url: str | URL, statement: str, **parameters: Any) -> None:
    """Change rows behind the queue's back; ``{jobs}`` in *statement* is the table."""
    with plain_engine(url).begin() as connection:
        table = "jobs" if connection.dialect.name == "sqlite" else "jobs.jobs"
        connection.execute(text(statement.format(jobs=table)), parameters)


FINISHED_OR_NOT = {
    "pending": "UPDATE {jobs} SET status = 'pending'",
    "delayed": "UPDATE {jobs} SET run_at = '2999-01-01 00:00:00.000000'",
    "waiting for a retry": "UPDATE {jobs} SET attempts = 1, last_error = 'x'"
    ", run_at = '2999-01-01 00:00:00.000000'",
    "running": "UPDATE {jobs} SET status = 'running', attempts = 1, locked_by = 'w'"
    ", lease_expires_at = '2999-01-01 00:00:00.000000'",
    "succeeded": "UPDATE {jobs} SET status = 'succeeded', attempts = 1",
    "failed": "UPDATE {jobs} SET status = 'failed', attempts = 3",
    "cancelled": "UPDATE {jobs} SET status = 'cancelled'",
}
"""How a pending job is brought into each state of its life."""


TAKE_ALL_MARKS: Final = (
    "SELECT pg_advisory_lock_shared((hashtextextended(%s, 1) & -64) | bucket)"
    " FROM generate_series(0, 63) AS bucket"
)
"""What marks a connection as that of a worker that rests, whatever its tasks."""


class Heard:
    """What workers were told: by notifications of PostgreSQL, and within this process."""

    def __init__(self, connection: psycopg.Connection[Any] | None, channel: str) -> None:
        """Start listening on *channel*; without a *connection* there are no notifications."""
        self._connection = connection
        self._channel = channel
        self._notified: list[str] = []
        self.wakes = 0
        if connection is not None:
            connection.add_notify_handler(lambda notice: self._notified.append(notice.payload))
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            # The marks of workers that rest: who looks anyway need not be notified.
            connection.execute(TAKE_ALL_MARKS, [channel])

    def wake(self) -> None:
        """Count a wake-up within this process."""
        self.wakes += 1

    def notified(self) -> list[str] | None:
        """Return the payloads of all new notifications, sorted; None on SQLite, which has none.

        One of our own is sent and awaited: what was committed before arrives before it.
        """
        if self._connection is None:
            return None
        self._connection.execute("SELECT pg_notify(%s, %s)", [self._channel, _END])
        while _END not in self._notified:
            self._connection.execute("SELECT 1")
        told, self._notified[:] = self._notified[: self._notified.index(_END)], []
        return sorted(told)


@contextmanager
def listening(engine: Engine | AsyncEngine, table: Any = Job.__table__) -> Generator[Heard]:
    """Listen as a worker of *engine* does: on a raw connection of a driver, and in the process."""
    sync = _sync(engine)
    channel = channel_of(sync, table)
    with ExitStack() as stack:
        connection = None
        if sync.dialect.name == "postgresql":
            address = sync.url.set(drivername="postgresql").render_as_string(hide_password=False)
            connection = stack.enter_context(psycopg.connect(address, autocommit=True))
        heard = Heard(connection, channel)
        stack.callback(register(channel, heard.wake))
        yield heard


@contextmanager
def counted(engine: Engine | AsyncEngine) -> Generator[list[str]]:
    """Collect the text of every statement that is sent through *engine*."""
    sync = _sync(engine)
    sent: list[str] = []

    def collect(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(sync, "before_cursor_execute", collect)
    try:
        yield sent
    finally:
        event.remove(sync, "before_cursor_execute", collect)


def begin_by_hand(engine: Engine | AsyncEngine) -> None:
    """On SQLite, let SQLAlchemy begin transactions, as its documentation says for savepoints."""
    sync = _sync(engine)
    if sync.dialect.name != "sqlite":
        return

    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    event.listen(sync, "connect", connect)
    event.listen(sync, "begin", begin)


def connections_opened(engine: Engine | AsyncEngine) -> Callable[[], int]:
    """Count the connections that *engine* opens from now on."""
    opened: list[Any] = []
    event.listen(_sync(engine), "connect", lambda *made: opened.append(made))
    return lambda: len(opened)


def in_session(jobs: Jobs, work: Callable[[JobSession], Returned], **options: Any) -> Returned:
    """Run *work* in a session on the driver of *jobs* and commit; an async one is lent to it."""
    if not jobs.is_async:
        with open_engine(jobs.url) as engine, JobSession(engine, **options) as session:
            returned = work(session)
            session.commit()
        return returned

    async def lend() -> Returned:
        async with (
            open_async_engine(jobs.url) as engine,
            AsyncJobSession(engine, **options) as session,
        ):
            returned = await session.run_sync(work)  # type: ignore[arg-type]
            await session.commit()
        return returned

    return asyncio.run(lend())


def _sync(engine: Engine | AsyncEngine) -> Engine:
    return engine.sync_engine if isinstance(engine, AsyncEngine) else engine
