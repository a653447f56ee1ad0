"""Enqueueing a job in the caller's own transaction.

A job enqueued through a session is a row that the session's transaction inserts. Commit, and it
will be attempted; roll back, the savepoint around it included, and it never existed. ::

    Session = sessionmaker(engine, class_=JobSession)

    with Session.begin() as session:
        user = User(email="a@example.org")
        session.add(user)
        session.enqueue("send-welcome", lambda: {"user_id": user.id})

A callable payload is called after a flush, when keys that the database makes are known. The
:class:`AsyncJobSession` has the same method to await. For session classes of your own there are
the mixins, and for any kind of session or connection, scoped ones included, the functions
:func:`enqueue` and :func:`enqueue_async`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from sqlalchemy import Connection, event
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session

from ._newjob import DEFAULTS, NewJob, checked_ids, chunks, row_of
from ._target import AnySession, Notify, Target, autocommits, explained, table_of
from .errors import InvalidArgumentError
from .models import Job

if TYPE_CHECKING:
    from sqlalchemy.orm import SessionTransaction

    from .settings import Duration

    _SyncBase = Session
    _AsyncBase = AsyncSession
else:
    _SyncBase = object
    _AsyncBase = object

AnyAsyncSession: TypeAlias = "AsyncSession | async_scoped_session[Any] | AsyncConnection"


def enqueue(
    session: AnySession,
    task: str,
    payload: Any = None,
    *,
    delay: Duration | None = None,
    run_at: datetime | None = None,
    max_attempts: int | None = None,
    timeout: Duration | None = None,
    priority: int = 0,
    idempotency_key: str | None = None,
    meta: Any = None,
    job_class: Any = Job,
    notify: Notify = "commit",
    allow_autocommit: bool = False,
) -> int | None:
    """Enqueue a job in the transaction of *session* and return its id.

    None is returned, and nothing is stored, if an unfinished job has the same *idempotency_key*;
    if another open transaction has just stored one, this waits for its end.

    session
        A Session of any class, a scoped_session, or a Connection.
    task
        Which handler is to run it: 1 to 200 characters.
    payload
        JSON data, a dataclass, pydantic model or msgspec struct; or a callable that returns one,
        which is called after a flush.
    delay, run_at
        Not before: so many seconds (or a timedelta) after this call by the database's clock, or
        an aware datetime. Default: at once.
    max_attempts
        Default: the task's own, which is 3 unless it says otherwise.
    timeout
        Bound on one attempt, in seconds or a timedelta; 0: none. Default: the task's, else the
        worker's.
    priority
        From -2 to 2; higher runs first.
    idempotency_key
        1 to 255 characters, compared exactly, unique among pending and running jobs of all tasks.
    meta
        JSON data that the queue never reads: a trace context, tags.
    job_class
        Your own class on :class:`JobMixin`.
    notify
        See :data:`Notify`. A two-phase session sends none.
    allow_autocommit
        Accept a session that commits every statement by itself.

    Raises :class:`PayloadError` and :class:`InvalidArgumentError` before any SQL, so that the
    transaction stays usable; :class:`AutocommitError`; :class:`SchemaError` if the table is
    missing or older than this release.
    """
    job = NewJob(
        task, payload, delay, run_at, max_attempts, timeout, priority, idempotency_key, meta
    )
    target = Target(session, job_class, notify=notify, allow_autocommit=allow_autocommit)
    row = row_of(job, target.resolve)
    connection, statements, channel = target.connect()
    call = statements.enqueue(row, channel)
    with explained():
        inserted = connection.execute(*call).first()
    if inserted is None:
        return None
    target.tell_after_commit([job.task])
    job_id: int = inserted[0]
    return job_id


def enqueue_many(
    session: AnySession,
    jobs: Iterable[NewJob],
    *,
    job_class: Any = Job,
    notify: Notify = "commit",
    allow_autocommit: bool = False,
) -> list[int | None]:
    """Enqueue thousands of jobs, a statement per 5,000, and return an id or None for each.

    Large payloads make smaller statements, of about 16 MB each.

    Keys are taken in sorted order, so that two callers with the same keys do not deadlock; of
    two jobs with one key among *jobs* the first is stored. Otherwise as :func:`enqueue`.
    """
    new = list(jobs)
    target = Target(session, job_class, notify=notify, allow_autocommit=allow_autocommit)
    rows = [row_of(job, target.resolve) for job in new]
    if not rows:
        return []
    columns = frozenset(name for row in rows for name in row)
    filled = [{name: row.get(name, DEFAULTS.get(name)) for name in columns} for row in rows]
    connection, statements, channel = target.connect()
    ids: list[int | None] = [None] * len(rows)
    for places in chunks(filled):
        call = statements.enqueue_many([filled[i] for i in places], channel)
        with explained():
            inserted = connection.execute(*call).all()
        by_key = {row[1]: row[0] for row in inserted if row[1] is not None}
        without_key = iter(sorted(row[0] for row in inserted if row[1] is None))
        for i in places:
            key = filled[i].get("idempotency_key")
            ids[i] = next(without_key) if key is None else by_key.pop(key, None)
    stored = {new[i].task for i, job_id in enumerate(ids) if job_id is not None}
    if stored:
        target.tell_after_commit(sorted(stored))
    return ids


async def enqueue_async(
    session: AnyAsyncSession, task: str, payload: Any = None, **options: Any
) -> int | None:
    """Enqueue a job in the transaction of an async session or connection; see :func:`enqueue`."""
    job_id: int | None = await _lent(session, enqueue, task, payload, **options)
    return job_id


async def enqueue_many_async(
    session: AnyAsyncSession, jobs: Iterable[NewJob], **options: Any
) -> list[int | None]:
    """Enqueue thousands of jobs in an async session's transaction; see :func:`enqueue_many`."""
    ids: list[int | None] = await _lent(session, enqueue_many, jobs, **options)
    return ids


def cancel(session: AnySession, job_ids: int | Sequence[int], *, job_class: Any = Job) -> list[int]:
    """Cancel jobs that have not finished and return the ids of those that were.

    A pending job will not run. A running one ends as cancelled at once: its worker learns it
    when it renews the lease (every third of the visibility timeout), aborts the handler, and
    whatever the handler did by then is done.
    """
    target = Target(session, job_class, notify=False, allow_autocommit=True)
    connection, statements, _ = target.connect()
    with explained():
        return [row[0] for row in connection.execute(*statements.cancel(checked_ids(job_ids)))]


def requeue(
    session: AnySession, job_ids: int | Sequence[int], *, job_class: Any = Job
) -> list[int]:
    """Give failed or cancelled jobs another attempt and return the ids of those that got one.

    Left out are jobs in another status, and those whose idempotency key has meanwhile been taken
    by an unfinished job: the others are requeued, and the transaction stays usable.
    """
    target = Target(session, job_class, notify="commit", allow_autocommit=True)
    connection, statements, channel = target.connect()
    ids = checked_ids(job_ids)
    # SQLite undoes a failed statement alone, and its driver would commit on release; without a
    # transaction around it there is nothing to save.
    saved = connection.dialect.name != "sqlite" and not autocommits(connection)
    savepoint: Callable[[], Any] = connection.begin_nested if saved else nullcontext
    rows: list[Any] = []
    try:
        with explained(), savepoint():
            rows.extend(connection.execute(*statements.requeue(ids)))
    except IntegrityError:  # two of them share a key, or somebody took one in this moment
        for job_id in ids:
            try:
                with explained(), savepoint():
                    rows.extend(connection.execute(*statements.requeue([job_id])))
            except IntegrityError:
                continue
    tasks = sorted({row[1] for row in rows})
    if channel is not None:
        for task in tasks:
            call = statements.tell(channel, task)
            if call is not None:
                connection.execute(*call).all()
    if tasks:
        target.tell_after_commit(tasks)
    return [row[0] for row in rows]


async def cancel_async(
    session: AnyAsyncSession, job_ids: int | Sequence[int], **options: Any
) -> list[int]:
    """Cancel jobs through an async session or connection; see :func:`cancel`."""
    ids: list[int] = await _lent(session, cancel, job_ids, **options)
    return ids


async def requeue_async(
    session: AnyAsyncSession, job_ids: int | Sequence[int], **options: Any
) -> list[int]:
    """Requeue jobs through an async session or connection; see :func:`requeue`."""
    ids: list[int] = await _lent(session, requeue, job_ids, **options)
    return ids


def _drop_schema_on_sqlite(
    session: Session,
    transaction: SessionTransaction,  # noqa: ARG001 - the event's signature
    connection: Connection,
) -> None:
    """Let queries of jobs through a job session work on SQLite, which has no schemas."""
    if connection.dialect.name == "sqlite":
        schema = table_of(getattr(session, "job_class", Job)).schema
        known: dict[str | None, str | None] | None
        known = connection.get_execution_options().get("schema_translate_map")
        if schema is not None and schema not in (known or {}):
            connection.execution_options(schema_translate_map={**(known or {}), schema: None})


class JobSessionMixin(_SyncBase):
    """Adds :meth:`enqueue` to a Session class: ``class S(JobSessionMixin, Session)``.

    job_class
        The mapped class of jobs; override it with your own.
    job_notify
        When workers are told; see :data:`Notify`.
    """

    job_class: ClassVar[Any] = Job
    job_notify: ClassVar[Notify] = "commit"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if issubclass(cls, Session):
            event.listen(cls, "after_begin", _drop_schema_on_sqlite)

    def enqueue(
        self,
        task: str,
        payload: Any = None,
        *,
        delay: Duration | None = None,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
        meta: Any = None,
        notify: Notify | None = None,
        allow_autocommit: bool = False,
    ) -> int | None:
        """Enqueue a job in this session's transaction; see :func:`sqlalchemy_jobs.enqueue`."""
        return enqueue(
            self,
            task,
            payload,
            delay=delay,
            run_at=run_at,
            max_attempts=max_attempts,
            timeout=timeout,
            priority=priority,
            idempotency_key=idempotency_key,
            meta=meta,
            allow_autocommit=allow_autocommit,
            **_attributes(self, notify),
        )

    def enqueue_many(
        self,
        jobs: Iterable[NewJob],
        *,
        notify: Notify | None = None,
        allow_autocommit: bool = False,
    ) -> list[int | None]:
        """Enqueue thousands of jobs; see :func:`sqlalchemy_jobs.enqueue_many`."""
        return enqueue_many(
            self,
            jobs,
            allow_autocommit=allow_autocommit,
            **_attributes(self, notify),
        )


class AsyncJobSessionMixin(_AsyncBase):
    """Adds :meth:`enqueue` to an AsyncSession class.

    ``class S(AsyncJobSessionMixin, AsyncSession)``.

    Set ``sync_session_class`` to a class with :class:`JobSessionMixin`, whose ``job_class`` and
    ``job_notify`` count.
    """

    async def enqueue(
        self,
        task: str,
        payload: Any = None,
        *,
        delay: Duration | None = None,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109 - the job's, not the call's
        priority: int = 0,
        idempotency_key: str | None = None,
        meta: Any = None,
        notify: Notify | None = None,
        allow_autocommit: bool = False,
    ) -> int | None:
        """Enqueue a job in this session's transaction; see :func:`sqlalchemy_jobs.enqueue`."""
        return await self.run_sync(
            _jobs_of(self).enqueue,
            task,
            payload,
            delay=delay,
            run_at=run_at,
            max_attempts=max_attempts,
            timeout=timeout,
            priority=priority,
            idempotency_key=idempotency_key,
            meta=meta,
            notify=notify,
            allow_autocommit=allow_autocommit,
        )

    async def enqueue_many(
        self,
        jobs: Iterable[NewJob],
        *,
        notify: Notify | None = None,
        allow_autocommit: bool = False,
    ) -> list[int | None]:
        """Enqueue thousands of jobs; see :func:`sqlalchemy_jobs.enqueue_many`."""
        return await self.run_sync(
            _jobs_of(self).enqueue_many, jobs, notify=notify, allow_autocommit=allow_autocommit
        )


class JobSession(JobSessionMixin, Session):
    """A Session that can enqueue: ``sessionmaker(engine, class_=JobSession)``."""


class AsyncJobSession(AsyncJobSessionMixin, AsyncSession):
    """An AsyncSession that can enqueue: ``async_sessionmaker(engine, class_=AsyncJobSession)``."""

    sync_session_class = JobSession
    sync_session: JobSession  # pyright: ignore[reportIncompatibleVariableOverride]


def _attributes(session: Session, notify: Notify | None) -> dict[str, Any]:
    """What a session class says of its jobs; an async session may have lent a plain one."""
    return {
        "job_class": getattr(session, "job_class", Job),
        "notify": getattr(session, "job_notify", "commit") if notify is None else notify,
    }


def _jobs_of(session: AsyncSession) -> Any:
    """The class whose methods to lend: the sync session's own, if it can enqueue."""
    kind = type(session.sync_session)
    return kind if issubclass(kind, JobSessionMixin) else JobSession


async def _lent(session: AnyAsyncSession, function: Any, *args: Any, **options: Any) -> Any:
    """Run a sync function on the sync side of an async session or connection."""
    given = session() if isinstance(session, async_scoped_session) else session
    if not isinstance(given, AsyncSession | AsyncConnection):
        message = f"an AsyncSession or an AsyncConnection is needed, got {type(given).__name__}"
        raise InvalidArgumentError(message)
    return await given.run_sync(function, *args, **options)
