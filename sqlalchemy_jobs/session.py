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

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, cast

from sqlalchemy import Connection, Engine, Table, TwoPhaseTransaction, event, insert, inspect
from sqlalchemy.exc import DBAPIError, IntegrityError, StatementError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from ._channel import channel_of
from ._store import statements_for
from ._wake import wake_workers
from .errors import AutocommitError, InvalidArgumentError, SchemaError, seconds
from .models import Job
from .payload import MAX_CHARACTERS, check_text, dump
from .tasks import MAX_NAME, check_max_attempts

if TYPE_CHECKING:
    from sqlalchemy.orm import SessionTransaction

    from .settings import Duration
    from .statements import Statements

    _SyncBase = Session
    _AsyncBase = AsyncSession
else:
    _SyncBase = object
    _AsyncBase = object

Notify: TypeAlias = Literal["commit", "after_commit", False]
"""When workers are told. ``"commit"``: with the commit, never without it. ``"after_commit"``: by
a statement of its own after it, which spares busy writers that NOTIFY makes commits queue up, and
is lost if the process dies in between. ``False``: not at all; workers find the job by polling."""

AnySession: TypeAlias = "Session | scoped_session[Any] | Connection"
AnyAsyncSession: TypeAlias = "AsyncSession | async_scoped_session[Any] | AsyncConnection"

LONGEST_KEY: Final = 255
CHUNK: Final = 5000
"""Rows a statement of ``enqueue_many``; fewer if their payloads are large."""

_AFTER: Final = "sqlalchemy_jobs.after"
_log = logging.getLogger("sqlalchemy_jobs")


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job for ``enqueue_many``; the fields are the arguments of :func:`enqueue`."""

    task: str
    payload: Any = field(default=None, repr=False)
    delay: Duration | None = None
    run_at: datetime | None = None
    max_attempts: int | None = None
    timeout: Duration | None = None
    priority: int = 0
    idempotency_key: str | None = None
    meta: Any = field(default=None, repr=False)


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
    target = _Target(session, job_class, notify=notify, allow_autocommit=allow_autocommit)
    row = _row(job, target.resolve)
    connection, statements, channel = target.connect()
    call = statements.enqueue(row, channel)
    with _explained():
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
    target = _Target(session, job_class, notify=notify, allow_autocommit=allow_autocommit)
    rows = [_row(job, target.resolve) for job in new]
    if not rows:
        return []
    columns = frozenset(name for row in rows for name in row)
    filled = [{name: row.get(name, _DEFAULTS.get(name)) for name in columns} for row in rows]
    connection, statements, channel = target.connect()
    ids: list[int | None] = [None] * len(rows)
    for places in _chunks(filled):
        call = statements.enqueue_many([filled[i] for i in places], channel)
        with _explained():
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
    target = _Target(session, job_class, notify=False, allow_autocommit=True)
    connection, statements, _ = target.connect()
    with _explained():
        return [row[0] for row in connection.execute(*statements.cancel(_ids(job_ids)))]


def requeue(
    session: AnySession, job_ids: int | Sequence[int], *, job_class: Any = Job
) -> list[int]:
    """Give failed or cancelled jobs another attempt and return the ids of those that got one.

    Left out are jobs in another status, and those whose idempotency key has meanwhile been taken
    by an unfinished job: the others are requeued, and the transaction stays usable.
    """
    target = _Target(session, job_class, notify="commit", allow_autocommit=True)
    connection, statements, channel = target.connect()
    ids = _ids(job_ids)
    # SQLite undoes a failed statement alone, and its driver would commit on release; without a
    # transaction around it there is nothing to save.
    saved = connection.dialect.name != "sqlite" and not _autocommits(connection)
    savepoint: Callable[[], Any] = connection.begin_nested if saved else nullcontext
    rows: list[Any] = []
    try:
        with _explained(), savepoint():
            rows.extend(connection.execute(*statements.requeue(ids)))
    except IntegrityError:  # two of them share a key, or somebody took one in this moment
        for job_id in ids:
            try:
                with _explained(), savepoint():
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


# --- what a job's row is ----------------------------------------------------------------------

_DEFAULTS: Final = {"priority": 0}
"""What a row of ``enqueue_many`` has in a column that only other rows give; else null."""


def _chunks(rows: Sequence[dict[str, Any]]) -> Iterator[list[int]]:
    """Yield the places of the rows of each statement, in the order of keys."""
    # Sorting is stable: jobs without a key keep the caller's order, and so do those with one key.
    order = sorted(range(len(rows)), key=lambda i: rows[i].get("idempotency_key") or "")
    places: list[int] = []
    size = 0
    for i in order:
        length = len(rows[i]["payload"]) + len(rows[i].get("meta") or "")
        if places and (len(places) == CHUNK or size + length > MAX_CHARACTERS):
            yield places
            places, size = [], 0
        places.append(i)
        size += length
    yield places


def _row(job: NewJob, resolve: Callable[[Any], Any]) -> dict[str, Any]:
    """Check a new job and return the columns that it gives; SQL comes after this.

    *resolve* calls a callable payload, after a flush.
    """
    row: dict[str, Any] = {"task": check_text(job.task, "task", MAX_NAME)}
    if job.delay is not None and job.run_at is not None:
        message = "give delay or run_at, not both"
        raise InvalidArgumentError(message)
    if job.delay is not None:
        row["delay"] = seconds(job.delay, "delay")
    if job.run_at is not None:
        row["run_at"] = _aware(job.run_at)
    if job.max_attempts is not None:
        row["max_attempts"] = check_max_attempts(job.max_attempts)
    if job.timeout is not None:
        row["timeout_s"] = seconds(job.timeout, "timeout")
    if _priority(job.priority):
        row["priority"] = job.priority
    if job.idempotency_key is not None:
        row["idempotency_key"] = check_text(job.idempotency_key, "idempotency_key", LONGEST_KEY)
    if job.meta is not None:
        row["meta"] = dump(job.meta, "meta")
    # Last: a callable may flush, and everything else is checked before any SQL.
    row["payload"] = dump(resolve(job.payload))
    return row


def _aware(run_at: object) -> datetime:
    if not isinstance(run_at, datetime):
        message = f"run_at must be a datetime, got {type(run_at).__name__}"
        raise InvalidArgumentError(message)
    if run_at.utcoffset() is None:
        message = "run_at must be aware: a naive datetime names no instant; give it a tzinfo"
        raise InvalidArgumentError(message)
    try:
        return run_at.astimezone(UTC)
    except OverflowError:
        message = "run_at is outside of the years 1 to 9999 in UTC"
        raise InvalidArgumentError(message) from None


def _priority(priority: object) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int) or not -2 <= priority <= 2:  # noqa: PLR2004 - the range of the column
        message = f"priority must be a whole number from -2 to 2, got {priority!r}"
        raise InvalidArgumentError(message)
    return priority


def _ids(job_ids: int | Sequence[int]) -> list[int]:
    ids = [job_ids] if isinstance(job_ids, int) else list(job_ids)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        message = "job ids must be whole numbers"
        raise InvalidArgumentError(message)
    return sorted(set(ids))


# --- where it goes ----------------------------------------------------------------------------


class _Target:
    """The session or connection in whose transaction rows are written."""

    def __init__(
        self, session: AnySession, job_class: Any, *, notify: Notify, allow_autocommit: bool
    ) -> None:
        if notify not in ("commit", "after_commit", False):
            message = f"notify must be 'commit', 'after_commit' or False, got {notify!r}"
            raise InvalidArgumentError(message)
        given = session() if isinstance(session, scoped_session) else session
        if isinstance(given, AsyncSession | AsyncConnection | async_scoped_session):
            message = "this is an async session: await enqueue_async(…), or its own enqueue()"
            raise InvalidArgumentError(message)
        if not isinstance(given, Session | Connection):
            message = f"a Session or a Connection is needed, got {type(given).__name__}"
            raise InvalidArgumentError(message)
        self._given: Session | Connection = given
        self._job_class = job_class
        self._table: Table = table_of(job_class)
        self._notify: Notify = notify
        self._allow_autocommit = allow_autocommit
        self._engine: Engine | None = None
        self._channel = ""

    def resolve(self, payload: Any) -> Any:
        """Call a callable payload, after a flush; a class is data that was meant otherwise."""
        if not callable(payload) or isinstance(payload, type):
            return payload
        if isinstance(self._given, Session):
            self._given.flush()
        return payload()

    def connect(self) -> tuple[Connection, Statements, str | None]:
        """Return the transaction's connection, its statements and the channel to notify on."""
        given = self._given
        if isinstance(given, Session):
            # Session.connection() never flushes, in no version of SQLAlchemy.
            connection = given.connection(
                bind_arguments={"mapper": inspect(self._job_class), "clause": _routed(self._table)}
            )
        else:
            connection = given
        statements = statements_for(self._table, connection.dialect)
        if not self._allow_autocommit and _autocommits(connection):
            message = (
                "this session commits every statement by itself (AUTOCOMMIT), so the job would "
                "survive a rollback; use another isolation level, or pass allow_autocommit=True"
            )
            raise AutocommitError(message)
        self._engine, self._channel = connection.engine, channel_of(connection, self._table)
        if self._notify == "after_commit" and _commits_elsewhere(given):
            self._notify = "commit"
        # NOTIFY cannot be prepared.
        silent = isinstance(connection.get_transaction(), TwoPhaseTransaction)
        now = self._notify == "commit" and not silent
        return connection, statements, self._channel if now else None

    def tell_after_commit(self, tasks: Sequence[str]) -> None:
        """Wake this process's workers once the transaction is committed."""
        if not isinstance(self._given, Session):
            return  # nothing can be run after a bare connection's commit
        _watch_sessions()
        innermost = self._given.get_nested_transaction() or self._given.get_transaction()
        after: _After = self._given.info.setdefault(_AFTER, {}).setdefault(innermost, _After())
        after.channels.add(self._channel)
        if self._notify == "after_commit" and self._engine is not None:
            after.notices.update((self._engine, self._table, self._channel, t) for t in tasks)


@dataclass(slots=True)
class _After:
    """What to do once a session's transaction has ended well; a savepoint's goes to its parent."""

    channels: set[str] = field(default_factory=set[str])
    notices: set[tuple[Engine, Table, str, str]] = field(
        default_factory=set[tuple[Engine, "Table", str, str]]
    )
    committed: bool = False


@cache
def _watch_sessions() -> None:
    event.listen(Session, "after_commit", _on_commit)
    event.listen(Session, "after_transaction_end", _on_end)


def _on_commit(session: Session) -> None:
    pending: dict[SessionTransaction | None, _After] = session.info.get(_AFTER, {})
    after = pending.get(session.get_nested_transaction() or session.get_transaction())
    if after is not None:
        after.committed = True


def _on_end(session: Session, transaction: SessionTransaction) -> None:
    # Not already on commit: the session's connection must be back in the pool by now, for the
    # notice may need it.
    pending: dict[SessionTransaction, _After] = session.info.get(_AFTER, {})
    after = pending.pop(transaction, None)
    if after is None or not after.committed:
        return
    outer = transaction.parent
    if outer is None:
        _tell(after)
        return
    while outer.parent is not None and not outer.nested:
        outer = outer.parent
    around = pending.setdefault(outer, _After())
    around.channels |= after.channels
    around.notices |= after.notices


def _tell(after: _After) -> None:
    for channel in after.channels:
        wake_workers(channel)
    for engine, table, channel, task in sorted(after.notices, key=lambda notice: notice[2:]):
        call = statements_for(table, engine.dialect).tell(channel, task)
        if call is None:
            continue
        try:
            with engine.connect() as connection:
                connection.execution_options(isolation_level="AUTOCOMMIT").execute(*call).all()
        except Exception:  # noqa: BLE001 - the job is committed; only its notice is late
            _log.exception("a notification could not be sent; workers find the job by polling")


@cache
def _routed(table: Table) -> Any:
    """The kind of statement that will run, for sessions that route by it."""
    return insert(table)


def table_of(job_class: Any) -> Table:
    """Return the table of a mapped class of jobs."""
    table: Any = getattr(job_class, "__table__", None)
    columns: Any = getattr(table, "c", ())
    if not isinstance(table, Table) or "lease_expires_at" not in columns:
        message = f"job_class must be a mapped class with JobMixin, got {job_class!r}"
        raise InvalidArgumentError(message)
    return cast("Table", table)


def _commits_elsewhere(given: Session | Connection) -> bool:
    """Whether the transaction may end where a session's events do not tell."""
    return isinstance(given, Connection) or isinstance(given.bind, Connection)


def _autocommits(connection: Connection) -> bool:
    # What counts is the driver's connection: every way to ask for AUTOCOMMIT ends there.
    pooled = connection.connection
    if connection.dialect.name != "sqlite":
        raw: Any = pooled.dbapi_connection
        return connection.dialect.detect_autocommit_setting(raw)
    # Without a level of its own, but begun by hand, is the documented way to BEGIN IMMEDIATE.
    driver: Any = pooled.driver_connection
    if driver.isolation_level is not None and getattr(driver, "autocommit", None) is not True:
        return False
    begun = None if connection.in_transaction() else connection.begin()
    if driver.in_transaction:
        return False
    if begun is not None:
        begun.rollback()
    return True


class _explained:  # noqa: N801 - used as a statement
    """Around SQL of the caller's: never show a payload, and name the way out of a missing table."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, StatementError):
            return
        error.hide_parameters = True
        if not isinstance(error, DBAPIError):
            return
        state = str(getattr(error.orig, "sqlstate", None) or "")
        words = str(error.orig)
        missing = state in ("42P01", "42703", "3F000") or (
            any(
                told in words for told in ("no such table", "no such column", "has no column named")
            )
        )
        if missing:
            message = (
                "the jobs table is missing or older than this release: run 'alembic upgrade head', "
                "or add migrations.upgrade(op, ...) to a revision of your own"
            )
            raise SchemaError(message) from error
        if state in _SHOWING_ROWS:
            _cut(error)


_SHOWING_ROWS: Final = frozenset({"23502", "23514"})
"""Not-null and check violations: the server adds the row, with the payload, as a detail."""


def _cut(error: BaseException) -> None:
    """Leave the first line of an error's message, and of its causes' messages."""
    shown: Any = error
    while shown is not None:
        shown.args = (str(shown.args[0]).partition("\n")[0], *shown.args[1:])
        if getattr(shown, "detail", None):  # asyncpg puts its messages together when asked
            shown.detail = None
        shown = shown.__cause__


async def _lent(session: AnyAsyncSession, function: Any, *args: Any, **options: Any) -> Any:
    """Run a sync function on the sync side of an async session or connection."""
    given = session() if isinstance(session, async_scoped_session) else session
    if not isinstance(given, AsyncSession | AsyncConnection):
        message = f"an AsyncSession or an AsyncConnection is needed, got {type(given).__name__}"
        raise InvalidArgumentError(message)
    return await given.run_sync(function, *args, **options)
